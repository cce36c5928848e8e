//! What a batch orders, as litmus tests and as the locks that engines build on it.

use super::client::{Client, Failure, Outcome, Patience, ensure, repeat, size, words_of};
use super::{Scenario, scenario};
use crate::addr::GlobalAddr;
use crate::endpoint::Op;
use crate::verb::Batch;

pub(super) fn scenarios() -> Vec<Scenario> {
    vec![
        scenario!("order/write_write", clients 3, write_write,
            "rule 3: who sees the flag of a batch WRITE data, WRITE flag sees the data"),
        scenario!("order/write_cas", clients 3, write_cas,
            "rule 3: who sees the CAS of a batch WRITE data, CAS flag sees the data"),
        scenario!("order/write_faa", clients 3, write_faa,
            "rule 3: who sees the FAA of a batch WRITE data, FAA flag sees the data"),
        scenario!("order/faa_write", clients 3, faa_write,
            "rule 3: a WRITE behind an atomic is fenced: who sees it sees the atomic"),
        scenario!("order/store_buffering", clients 2, store_buffering,
            "rule 3: of two clients that write, then read each other's word, one sees the other"),
        scenario!("order/load_buffering", clients 2, load_buffering,
            "rule 3: of two clients that read, then write each other's word, one does not see the other"),
        scenario!("order/lock_and_read", clients 4, lock_and_read,
            "rule 3: a READ behind the CAS that took a lock sees the last owner's data; unlock by WRITE, lock memory"),
        scenario!("order/lock_then_read", clients 4, lock_then_read,
            "rule 3: WRITE data, WRITE unlock across regions: the next owner sees the data whole"),
        scenario!("order/lock_in_main", clients 3, lock_in_main,
            "rule 3: the same with lock and data in main memory, side by side"),
    ]
}

/// How a message is published.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Publish {
    WriteWrite,
    WriteCas,
    WriteFaa,
    /// The message is the count of an FAA, the flag a WRITE behind it.
    FaaWrite,
    /// Wrong: the flag first.
    FlagFirst,
    /// Wrong: two batches, which have no order.
    TwoBatches,
}

/// How a message is received.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Receive {
    /// Flag and data in one batch if READs are ordered, one after the other if not.
    AsPromised,
    /// Flag and data in one batch, promised or not.
    OneBatch,
}

async fn write_write(client: &Client) -> Outcome {
    pass(client, Publish::WriteWrite, Receive::AsPromised).await
}

async fn write_cas(client: &Client) -> Outcome {
    pass(client, Publish::WriteCas, Receive::AsPromised).await
}

async fn write_faa(client: &Client) -> Outcome {
    pass(client, Publish::WriteFaa, Receive::AsPromised).await
}

async fn faa_write(client: &Client) -> Outcome {
    pass(client, Publish::FaaWrite, Receive::AsPromised).await
}

/// Message passing: client 0 publishes 1, 2, 3, ..., the others look.
pub(super) async fn pass(client: &Client, publish: Publish, receive: Receive) -> Outcome {
    let messages = client.rounds * 4;
    for (phase, words) in [1, 3, 9, 40].into_iter().enumerate() {
        let words = if publish == Publish::FaaWrite { 1 } else { words };
        let server = phase % client.servers();
        let data = client.at(server, 1024 * phase as u64);
        // In the data's own line, elsewhere in main memory, in lock memory.
        let flag = match phase % 3 {
            0 => data.add(words as u64 * 8),
            1 => client.at(server, 32_768),
            _ => client.lock(server, 5),
        };
        client.barrier().await?;
        if client.index == 0 {
            for n in 1..=messages {
                publish_one(client, publish, (data, words), flag, n).await?;
            }
        } else {
            receive_all(client, receive, (data, words), flag, messages).await?;
        }
    }
    Ok(())
}

async fn publish_one(
    client: &Client,
    publish: Publish,
    (data, words): (GlobalAddr, usize),
    flag: GlobalAddr,
    n: u64,
) -> Outcome {
    let op = client.op();
    let message = client.endpoint.buf_of(&repeat(n, words));
    let mut batch = Batch::new(flag.server());
    match publish {
        Publish::FlagFirst => {
            batch.write_word(flag, n);
        }
        Publish::TwoBatches => {
            batch.write(data, message);
            let first = op.post(batch);
            let mut second = Batch::new(flag.server());
            second.write_word(flag, n);
            op.submit(second).await?;
            first.await?;
            return Ok(());
        }
        _ => {}
    }
    if publish == Publish::FaaWrite {
        batch.faa(data, 1);
    } else {
        batch.write(data, message);
    }
    match publish {
        Publish::WriteWrite | Publish::FaaWrite => batch.write_word(flag, n),
        Publish::WriteCas => batch.cas(flag, n - 1, n),
        Publish::WriteFaa => batch.faa(flag, 1),
        Publish::FlagFirst | Publish::TwoBatches => 0,
    };
    op.submit(batch).await?;
    Ok(())
}

async fn receive_all(
    client: &Client,
    receive: Receive,
    (data, words): (GlobalAddr, usize),
    flag: GlobalAddr,
    messages: u64,
) -> Outcome {
    let one_batch = receive == Receive::OneBatch || client.endpoint.capabilities().ordered_reads;
    let mut patience = Patience::new(&client.endpoint);
    let mut last = 0;
    while last < messages {
        let op = client.op();
        let (seen, bytes) = if one_batch {
            let mut batch = Batch::new(flag.server());
            batch.read(flag, 8);
            batch.read(data, words * 8);
            let mut completed = op.submit(batch).await?;
            (completed.take(0).word(0), completed.take(1))
        } else {
            (op.read_word(flag).await?, op.read(data, words * 8).await?)
        };
        for (at, word) in words_of(&bytes).enumerate() {
            ensure!(
                word >= seen,
                "flag {seen} was seen, and word {at} of {words} of its data still is {word}"
            );
        }
        ensure!(seen >= last, "a flag went back from {last} to {seen}");
        if seen == last {
            client.check_others().await?;
            patience.wait("the next message").await?;
        } else {
            patience = Patience::new(&client.endpoint);
        }
        last = seen;
    }
    Ok(())
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Litmus {
    /// Write mine, read yours: somebody sees the other.
    Store,
    /// Read yours, write mine: somebody does not.
    Load,
    /// Wrong: the READ is posted before the WRITE.
    StoreTooLate,
}

async fn store_buffering(client: &Client) -> Outcome {
    two_words(client, Litmus::Store).await
}

async fn load_buffering(client: &Client) -> Outcome {
    two_words(client, Litmus::Load).await
}

/// The ways in which a client writes one word and reads another.
const WAYS: u64 = 5;
/// The pairs of words: in one line, in lines of their own, in two regions.
const PAIRS: u64 = 3;
/// Where the clients leave what they saw for each other.
const NOTES_AT: u64 = 128 * 1024;
const MOST_NOTES: u64 = 8192;
/// Where blocks are that give the transport something else to do.
const BLOCKS_AT: u64 = 32 * 1024;
/// Clients that did not meet (they may have to share a core) try again, so often.
const TRIES: u64 = 40;

/// Two clients, two words, the classic litmus tests. Nobody waits for the other: client A writes 1, 2, 3, ... to its word,
/// noting what it finds in B's, and B the other way round; afterwards the notes are compared.
pub(super) async fn two_words(client: &Client, litmus: Litmus) -> Outcome {
    let rounds = client.rounds.min(MOST_NOTES - 1);
    for stream in 0..PAIRS * WAYS {
        let server = size(stream) % client.servers();
        let base = client.at(server, stream * 1024);
        let word = |who: u32| match (stream % PAIRS, who) {
            (0, who) => base.add(u64::from(who) * 8),
            (1, who) => base.add(u64::from(who) * 512),
            (_, 0) => base,
            _ => client.lock(server, 40 + stream),
        };
        let (mine, yours) = (word(client.index), word(1 - client.index));
        let mut met = [0, 0];
        for begin in (0..TRIES).map(|n| n * rounds) {
            client.barrier().await?;
            let mut notes = Vec::new();
            for n in begin + 1..=begin + rounds {
                let seen = one_side(client, litmus, stream / PAIRS, n, mine, yours).await?;
                ensure!(seen <= begin + rounds, "a word that counts to {} is {seen}", begin + rounds);
                notes.push(seen.saturating_sub(begin));
            }
            let theirs = exchange(client, &notes).await?;
            compare(litmus, &notes, &theirs).map_err(|why| {
                Failure::new(format_args!(
                    "after {begin} rounds at {mine} and {yours}, way {}: {why}",
                    stream / PAIRS
                ))
            })?;
            for (met, notes) in met.iter_mut().zip([&notes, &theirs]) {
                *met += notes.windows(2).filter(|pair| pair[0] != pair[1]).count() as u64;
            }
            if met.iter().all(|met| *met >= rounds / 4) {
                break;
            }
        }
    }
    Ok(())
}

/// Gives the other client the notes and gets its own.
async fn exchange(client: &Client, notes: &[u64]) -> Result<Vec<u64>, Failure> {
    let place = |who: u32| client.at(0, NOTES_AT + u64::from(who) * MOST_NOTES * 8);
    let bytes: Vec<u8> = notes.iter().flat_map(|seen| seen.to_le_bytes()).collect();
    client.op().write(place(client.index), client.endpoint.buf_of(&bytes)).await?;
    client.barrier().await?;
    let theirs = client.op().read(place(1 - client.index), bytes.len()).await?;
    Ok(words_of(&theirs).collect())
}

/// Whether what A found (`mine[n]` in its round `n + 1`) goes together with what B found.
fn compare(litmus: Litmus, mine: &[u64], theirs: &[u64]) -> Result<(), String> {
    for (a, b) in (1..).zip(mine) {
        match litmus {
            // A wrote `a` and found `b`, so B wrote `b + 1` later, and what it found then is not older than `a`.
            Litmus::Store | Litmus::StoreTooLate => match theirs.get(size(*b)) {
                Some(found) if *found < a => {
                    let next = b + 1;
                    return Err(format!(
                        "one wrote {a} and found {b}, the other wrote {next} and found {found}: a READ overtook a WRITE"
                    ));
                }
                _ => {}
            },
            // A found `b` and wrote `a`, so what B found before it wrote `b` is older than `a`.
            Litmus::Load => match b.checked_sub(1).and_then(|at| theirs.get(size(at))) {
                Some(found) if *found >= a => {
                    return Err(format!(
                        "one found {b} and wrote {a}, the other found {found} and wrote {b}: a WRITE overtook a READ"
                    ));
                }
                _ => {}
            },
        }
    }
    Ok(())
}

/// Writes `n` to `mine` and reads `yours`, in the order of the litmus test, in one of several ways.
async fn one_side(
    client: &Client,
    litmus: Litmus,
    way: u64,
    n: u64,
    mine: GlobalAddr,
    yours: GlobalAddr,
) -> Result<u64, Failure> {
    let op = client.op();
    let mut batch = Batch::new(mine.server());
    match (litmus, way) {
        (Litmus::StoreTooLate, _) => {
            let mut read = Batch::new(yours.server());
            read.read(yours, 8);
            let read = op.post(read);
            op.write_word(mine, n).await?;
            Ok(read.await?.take(0).word(0))
        }
        // One verb after the other.
        (Litmus::Store, 0) => {
            op.write_word(mine, n).await?;
            Ok(op.read_word(yours).await?)
        }
        (Litmus::Store, 1) => {
            op.write(mine, client.endpoint.buf_of(&n.to_le_bytes())).await?;
            Ok(op.read(yours, 8).await?.word(0))
        }
        (Litmus::Load, 0) => {
            let seen = op.read_word(yours).await?;
            op.write_word(mine, n).await?;
            Ok(seen)
        }
        // One batch.
        (Litmus::Store, _) => {
            let server = size(mine.server().get().into());
            let block = |who: u32| client.at(server, BLOCKS_AT + u64::from(who) * 4096);
            match way {
                2 => batch.write_word(mine, n),
                // Nobody else writes the word, so an FAA of one takes it to `n`.
                3 => batch.faa(mine, 1),
                _ => {
                    // Much to write, to lines that the other has just read: the word's turn comes late.
                    batch.write(block(client.index), client.endpoint.buf_of(&repeat(n, 128)));
                    batch.write_word(mine, n)
                }
            };
            let read = batch.read(yours, 8);
            if way == 4 {
                batch.read(block(1 - client.index), 1024);
            }
            Ok(op.submit(batch).await?.take(read).word(0))
        }
        (Litmus::Load, _) => {
            let read = batch.read(yours, 8);
            if way == 1 {
                batch.faa(mine, 1)
            } else {
                batch.write_word(mine, n)
            };
            Ok(op.submit(batch).await?.take(read).word(0))
        }
    }
}

/// How a lock is used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Locking {
    /// CAS and READ in one batch.
    AndRead,
    /// CAS, then READ.
    ThenRead,
    /// As `ThenRead`, the lock right behind the data.
    InMain,
    /// Wrong: no lock at all.
    Not,
}

async fn lock_and_read(client: &Client) -> Outcome {
    count_under_lock(client, Locking::AndRead, 3).await
}

async fn lock_then_read(client: &Client) -> Outcome {
    count_under_lock(client, Locking::ThenRead, 25).await
}

async fn lock_in_main(client: &Client) -> Outcome {
    count_under_lock(client, Locking::InMain, 7).await
}

const LOCKS: u64 = 3;

/// All clients increment blocks of `words` equal words, each block under its lock, which WRITEs release.
pub(super) async fn count_under_lock(client: &Client, locking: Locking, words: usize) -> Outcome {
    let place = |which: u64| {
        let server = size(which) % client.servers();
        let data = client.at(server, 2048 + which * 512);
        let lock = match locking {
            Locking::InMain => data.add(words as u64 * 8),
            // Side by side: a lock is a word, and its neighbours are other locks.
            _ => client.lock(server, 64 + which),
        };
        (lock, data)
    };
    let counts = client.rounds / 2 + 1;
    for _ in 0..counts {
        let (lock, data) = place(client.random(LOCKS));
        let owner = u64::from(client.index) + 1;
        let op = client.op();
        let bytes = acquire(client, &op, locking, (lock, owner), (data, words * 8)).await?;
        let first = bytes.word(0);
        for (n, word) in words_of(&bytes).enumerate() {
            ensure!(
                word == first,
                "under the lock word {n} of {words} is {word}, the first {first}: not all of the last owner's WRITE is there"
            );
        }
        let mut batch = Batch::new(lock.server());
        batch.write(data, client.endpoint.buf_of(&repeat(first + 1, words)));
        batch.write_word(lock, 0);
        op.submit(batch).await?;
    }
    client.op().faa(client.board(0), counts).await?;
    client.barrier().await?;
    let due = client.op().read_word(client.board(0)).await?;
    let mut seen = 0;
    for which in 0..LOCKS {
        seen += client.op().read_word(place(which).1).await?;
    }
    ensure!(seen == due, "{due} increments under locks left {seen}: some were lost");
    Ok(())
}

async fn acquire(
    client: &Client,
    op: &Op,
    locking: Locking,
    (lock, owner): (GlobalAddr, u64),
    (data, len): (GlobalAddr, usize),
) -> Result<crate::buf::Buf, Failure> {
    let mut patience = Patience::new(&client.endpoint);
    loop {
        let mut batch = Batch::new(lock.server());
        match locking {
            Locking::AndRead => {
                let won = batch.cas(lock, 0, owner);
                let read = batch.read(data, len);
                let mut completed = op.submit(batch).await?;
                if completed.previous(won) == 0 {
                    return Ok(completed.take(read));
                }
            }
            Locking::ThenRead | Locking::InMain => {
                if op.cas(lock, 0, owner).await? == 0 {
                    return Ok(op.read(data, len).await?);
                }
            }
            Locking::Not => return Ok(op.read(data, len).await?),
        }
        if client.random(16) == 0 {
            client.check_others().await?;
        }
        patience.wait("a lock").await?;
    }
}
