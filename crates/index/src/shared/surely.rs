//! Verbs that can be repeated, repeated through lost completions.
//!
//! A lost completion breaks the connection. `reconnect` fences it, after which the verb has happened or never will; an
//! idempotent verb is then simply posted again. What is not idempotent (CAS, FAA) has to look at the memory instead.

use farwood_fabric::{Batch, Buf, FabricError, GlobalAddr, Op, marks};

/// How many lost completions one verb may meet.
const MAX_LOST: u32 = 16;

/// Whether the connection is usable again after `error`: true if the verb may be judged and repeated, an error if it was
/// another kind of failure or the server is not to be reached.
pub async fn reconnected(op: &Op, error: FabricError) -> Result<(), FabricError> {
    match error {
        FabricError::Unknown { server } | FabricError::Disconnected { server } => {
            marks::hit("reconnect");
            op.count_retry();
            op.endpoint().reconnect(server).await
        }
        error => Err(error),
    }
}

/// READs, through lost completions.
pub async fn read(op: &Op, addr: GlobalAddr, len: usize) -> Result<Buf, FabricError> {
    for _ in 0..MAX_LOST {
        match op.read(addr, len).await {
            Ok(buf) => return Ok(buf),
            Err(error) => reconnected(op, error).await?,
        }
    }
    Err(FabricError::RetriesExhausted { what: "a READ", attempts: MAX_LOST })
}

/// READs many places at once, through lost completions.
pub async fn read_many(op: &Op, places: &[(GlobalAddr, usize)]) -> Result<Vec<Buf>, FabricError> {
    for _ in 0..MAX_LOST {
        match op.read_many(places).await {
            Ok(bufs) => return Ok(bufs),
            Err(error) => reconnected(op, error).await?,
        }
    }
    Err(FabricError::RetriesExhausted { what: "READs", attempts: MAX_LOST })
}

/// READs two places of one server in one batch, the first before the second where READs are ordered, through lost completions.
pub async fn read_pair(
    op: &Op,
    first: (GlobalAddr, usize),
    second: (GlobalAddr, usize),
) -> Result<(Buf, Buf), FabricError> {
    for _ in 0..MAX_LOST {
        let mut batch = Batch::new(first.0.server());
        let reads = [first, second].map(|(addr, len)| batch.read(addr, len));
        match op.submit(batch).await {
            Ok(mut done) => return Ok((done.take(reads[0]), done.take(reads[1]))),
            Err(failure) => reconnected(op, failure.error).await?,
        }
    }
    Err(FabricError::RetriesExhausted { what: "READs", attempts: MAX_LOST })
}

/// READs a word, through lost completions.
pub async fn read_word(op: &Op, addr: GlobalAddr) -> Result<u64, FabricError> {
    for _ in 0..MAX_LOST {
        match op.read_word(addr).await {
            Ok(word) => return Ok(word),
            Err(error) => reconnected(op, error).await?,
        }
    }
    Err(FabricError::RetriesExhausted { what: "a READ", attempts: MAX_LOST })
}

/// WRITEs a word that nobody else writes, through lost completions.
pub async fn write_word(op: &Op, addr: GlobalAddr, word: u64) -> Result<(), FabricError> {
    for _ in 0..MAX_LOST {
        match op.write_word(addr, word).await {
            Ok(()) => return Ok(()),
            Err(error) => reconnected(op, error).await?,
        }
    }
    Err(FabricError::RetriesExhausted { what: "a WRITE", attempts: MAX_LOST })
}

/// WRITEs words that nobody else writes, all at once, through lost completions.
pub async fn write_words(op: &Op, words: &[(GlobalAddr, u64)]) -> Result<(), FabricError> {
    let max = op.endpoint().capabilities().max_batch;
    for _ in 0..MAX_LOST {
        let mut batches: Vec<Batch> = Vec::new();
        for (addr, word) in words {
            let fits = |batch: &&mut Batch| batch.server() == addr.server() && batch.len() < max;
            if let Some(batch) = batches.iter_mut().find(fits) {
                batch.write_word(*addr, *word);
            } else {
                let mut batch = Batch::new(addr.server());
                batch.write_word(*addr, *word);
                batches.push(batch);
            }
        }
        let failures: Vec<_> = op.submit_all(batches).await.into_iter().filter_map(Result::err).collect();
        if failures.is_empty() {
            return Ok(());
        }
        for failure in failures {
            reconnected(op, failure.error).await?;
        }
    }
    Err(FabricError::RetriesExhausted { what: "WRITEs", attempts: MAX_LOST })
}

/// WRITEs bytes that nobody else writes, through lost completions.
pub async fn write(op: &Op, addr: GlobalAddr, data: &[u8]) -> Result<(), FabricError> {
    for _ in 0..MAX_LOST {
        match op.write_bytes(addr, data).await {
            Ok(()) => return Ok(()),
            Err(error) => reconnected(op, error).await?,
        }
    }
    Err(FabricError::RetriesExhausted { what: "a WRITE", attempts: MAX_LOST })
}

/// CASes a word from a value that nobody else turns it from, and that does not come back, to 0, through lost completions. A word
/// that is something else stays.
pub async fn clear_word(op: &Op, addr: GlobalAddr, from: u64) -> Result<(), FabricError> {
    for _ in 0..MAX_LOST {
        match op.cas(addr, from, 0).await {
            Ok(_) => return Ok(()),
            // It has happened, or the next one does it.
            Err(error) => reconnected(op, error).await?,
        }
    }
    Err(FabricError::RetriesExhausted { what: "a CAS", attempts: MAX_LOST })
}
