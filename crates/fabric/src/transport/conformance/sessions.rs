//! What a session may do, what it holds, and when the pool may go on without asking it.

use super::client::{Client, Failure, HEARTBEAT_NS, Outcome, Patience, ensure};
use super::procedures::{LONG_WORK, Task, WORK};
use super::{Scenario, scenario};
use crate::addr::SessionId;
use crate::call::{CallError, Target};
use crate::control::{ControlError, Reply, Request};
use crate::error::FabricError;
use crate::region::Permissions;
use crate::verb::{Batch, Verb, VerbOutcome};
use crate::wire::encode;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub(super) fn scenarios() -> Vec<Scenario> {
    vec![
        scenario!("sessions/read_only", clients 1, read_only,
            "rule 6: a session that may only READ is refused the rest, typed, and nothing is touched"),
        scenario!("sessions/epochs", clients 2, epochs,
            "an operation under way anywhere keeps what was unlinked from being reused, until it ends"),
        scenario!("sessions/flush", clients 2, flush,
            "a flush is through when every session has dropped its hints and the operations that used them ended"),
        scenario!("sessions/chunks", clients 1, chunks,
            "a full pool says so; freed chunks serve again, for another use after a flush only"),
        scenario!("sessions/close", clients 1, close,
            "a closed session's endpoints are refused, its chunks are nobody's"),
        scenario!("sessions/close_when_busy", clients 1, close_when_busy,
            "a session whose procedures run is not closed, and can be closed later"),
        scenario!("sessions/reconnect", clients 2, reconnect,
            "rule 5: nothing that was in flight before a reconnect lands after it"),
    ]
}

async fn read_only(client: &Client) -> Outcome {
    let (session, endpoint) = client.another_session(true).await?;
    for n in 0..client.servers() {
        let (word, lock) = (client.at(n, 8), client.lock(n, 1));
        for at in [word, lock] {
            client.tell(at, 55).await?;
            let op = endpoint.op();
            let seen = op.read_word(at).await?;
            ensure!(seen == 55, "a session that only reads read {seen} instead of 55");
            let verbs = [
                Verb::Write { addr: at, from: crate::verb::Source::Owned(endpoint.buf_of(&[1; 8])) },
                Verb::Cas { addr: at, expected: 55, desired: 1 },
                Verb::Faa { addr: at, add: 1 },
            ];
            for verb in verbs {
                let needed =
                    if matches!(verb, Verb::Write { .. }) { Permissions::WRITE } else { Permissions::ATOMIC };
                let due = FabricError::PermissionDenied { addr: at, needed, held: Permissions::READ };
                let mut batch = Batch::new(at.server());
                batch.read(at, 8);
                batch.push(verb);
                match op.submit(batch).await {
                    Ok(_) => return Err(Failure::new(format_args!("expected {due}, but it was done"))),
                    Err(failure) => {
                        ensure!(failure.error == due && failure.at == 1, "expected {due}, got {failure}");
                        let unread = matches!(failure.outcomes[0], VerbOutcome::NotExecuted);
                        ensure!(unread, "the READ before a refused verb became {:?}", failure.outcomes[0]);
                    }
                }
            }
            let written = op.write_word(at, 1).await;
            let swapped = op.cas(at, 55, 1).await.map(|_| ());
            for refused in [written, swapped] {
                let told = matches!(refused, Err(FabricError::PermissionDenied { .. }));
                ensure!(told, "a single word: expected PermissionDenied, got {refused:?}");
            }
            // Its procedures act in its name.
            let task = encode(&Task::Write { at, data: vec![1; 8] });
            let refused = op.call(Target::Server(client.server(n)), WORK, task).await;
            ensure!(refused.is_err(), "a procedure wrote for a session that only reads");
            let untouched = client.op().read_word(at).await?;
            ensure!(untouched == 55, "a session that only reads changed a word to {untouched}");
        }
        let request = Request::AllocChunks {
            index: client.catalog,
            class: 5,
            object_bytes: 0,
            count: 1,
            flushed_through: 0,
        };
        let refused = endpoint.op().control(client.server(n), &request).await;
        let told = matches!(&refused, Err(error) if error.control().is_some());
        ensure!(told, "a session that only reads asked for memory: {refused:?}");
    }
    session.close(&endpoint).await?;
    Ok(())
}

/// Client 1 holds an operation; client 0 retires something.
async fn epochs(client: &Client) -> Outcome {
    let (held, ask) = (client.board(0), client.board(1));
    for round in 1..=client.rounds.clamp(1, 4) {
        if client.index == 1 {
            let op = client.op();
            client.tell(held, round * 2 - 1).await?;
            client.until("leave to end the operation", ask, |word| word == round).await?;
            drop(op);
            client.tell(held, round * 2).await?;
        } else {
            client.until("an operation under way", held, |word| word == round * 2 - 1).await?;
            let stamp = client.session.retire_stamp(&client.endpoint, false).await?;
            for _ in 0..12 {
                client.endpoint.sleep(HEARTBEAT_NS).await;
                client.session.heartbeat(&client.endpoint).await?;
                ensure!(
                    !client.session.is_safe(stamp),
                    "{stamp:?} is safe, and an operation that was under way then still is"
                );
            }
            client.tell(ask, round).await?;
            client.until("the operation to end", held, |word| word == round * 2).await?;
            let mut patience = Patience::new(&client.endpoint);
            while !client.session.is_safe(stamp) {
                client.session.heartbeat(&client.endpoint).await?;
                patience.wait("what was unlinked to be safe").await?;
            }
        }
        client.barrier().await?;
    }
    Ok(())
}

/// Client 0 asks for a flush; client 1 has hints, and an operation that may have used one.
async fn flush(client: &Client) -> Outcome {
    let dropped = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&dropped);
    client.session.on_flush(move || {
        counter.fetch_add(1, Ordering::SeqCst);
    });
    let (held, ask) = (client.board(0), client.board(1));
    for round in 1..=client.rounds.clamp(1, 4) {
        if client.index == 1 {
            let op = client.op();
            client.tell(held, round * 2 - 1).await?;
            client.until("leave to end the operation", ask, |word| word == round).await?;
            let count = dropped.load(Ordering::SeqCst);
            ensure!(count == round, "{round} flushes were asked for and hints dropped {count} times");
            drop(op);
            client.tell(held, round * 2).await?;
        } else {
            client.until("an operation under way", held, |word| word == round * 2 - 1).await?;
            let generation = client.session.request_flush(&client.op()).await?;
            for _ in 0..12 {
                client.endpoint.sleep(HEARTBEAT_NS).await;
                client.session.heartbeat(&client.endpoint).await?;
                let through = client.session.flushed_through();
                ensure!(
                    through < generation,
                    "flush {through} is through, and an operation that may use a hint from before {generation} is under way"
                );
            }
            client.tell(ask, round).await?;
            client.until("the operation to end", held, |word| word == round * 2).await?;
            client.flushed(generation).await?;
        }
        client.barrier().await?;
    }
    Ok(())
}

async fn chunks(client: &Client) -> Outcome {
    const MANY: u64 = 4096;
    for n in 0..client.servers() {
        let list = client.control(n, &Request::ListChunks { owner: None }).await?;
        let Reply::ChunkList { free, .. } = list else {
            return Err(Failure::new(format_args!("chunks were listed, but: {list:?}")));
        };
        if free > MANY {
            continue;
        }
        let known = client.session.flushed_through();
        let mut offsets = Vec::new();
        let full = loop {
            match client.alloc(n, 2, 1, known).await {
                Ok(offset) => offsets.push(offset),
                Err(error) => break error,
            }
            ensure!(offsets.len() as u64 <= free, "{free} chunks were free, and more were handed out");
        };
        let due = ControlError::PoolFull { server: client.server(n), wanted: 1, flush_helps: false };
        ensure!(full.control() == Some(&due), "expected {due}, got {full}");
        ensure!(offsets.len() as u64 == free, "{free} chunks were free, {} were handed out", offsets.len());
        let distinct: std::collections::BTreeSet<_> = offsets.iter().collect();
        ensure!(distinct.len() == offsets.len(), "a chunk was handed out twice");
        let Some(first) = offsets.first().copied() else { continue };
        // Freed: at once for the same use.
        let generation = client.session.request_flush(&client.op()).await?;
        client.control(n, &Request::FreeChunks { offset: first, generation }).await?;
        let again = client.alloc(n, 2, 1, known).await?;
        ensure!(again == first, "the one freed chunk is {first:#x}, but {again:#x} was handed out");
        client.control(n, &Request::FreeChunks { offset: first, generation }).await?;
        // For another use after the flush.
        let refused = client.alloc(n, 3, 1, known).await;
        let due = ControlError::PoolFull { server: client.server(n), wanted: 1, flush_helps: true };
        let told = matches!(&refused, Err(error) if error.control() == Some(&due));
        ensure!(told, "before the flush: expected {due}, got {refused:?}");
        client.flushed(generation).await?;
        let other = client.alloc(n, 3, 1, client.session.flushed_through()).await?;
        ensure!(other == first, "the one freed chunk is {first:#x}, but {other:#x} was handed out");
        for offset in offsets {
            client.control(n, &Request::FreeChunks { offset, generation }).await?;
        }
    }
    Ok(())
}

async fn close(client: &Client) -> Outcome {
    for _ in 0..client.rounds.clamp(1, 8) {
        let (session, endpoint) = client.another_session(false).await?;
        let second = session.endpoint()?;
        let id = session.id();
        let server = client.random_size(client.servers());
        let request = Request::AllocChunks {
            index: client.catalog,
            class: 9,
            object_bytes: 0,
            count: 1,
            flushed_through: 0,
        };
        endpoint.op().control(client.server(server), &request).await?;
        endpoint.op().write_word(client.at(server, 0), 1).await?;
        second.op().write_word(client.at(server, 0), 2).await?;
        session.clone().close(&endpoint).await?;
        let third = session.endpoint()?;
        for endpoint in [&endpoint, &second, &third] {
            let refused = endpoint.op().write_word(client.at(server, 0), 3).await;
            // An endpoint that was never admitted has no permission, one that was is told that it is over.
            let told =
                matches!(refused, Err(FabricError::Fenced { .. } | FabricError::PermissionDenied { .. }));
            ensure!(told, "a closed session writes: expected Fenced, got {refused:?}");
            let refused = endpoint
                .op()
                .call(Target::Server(client.server(server)), WORK, encode(&Task::Whoami {}))
                .await;
            ensure!(refused.is_err(), "a closed session's call ran");
        }
        let seen = client.op().read_word(client.at(server, 0)).await?;
        ensure!(seen == 2, "after the session was closed a word is {seen} instead of 2");
        let list = client.control(server, &Request::ListChunks { owner: Some(SessionId::NONE) }).await?;
        let nobodys = matches!(&list, Reply::ChunkList { chunks, .. } if chunks.iter().any(|c| c.class == 9));
        ensure!(nobodys, "the chunk of a closed session should be nobody's: {list:?}");
        let sessions = client.session.list(&client.op()).await?;
        ensure!(sessions.iter().all(|info| info.session != id), "{id} is closed and still listed");
    }
    Ok(())
}

async fn close_when_busy(client: &Client) -> Outcome {
    let (count, gate) = (client.at(0, 0), client.at(0, 8));
    let (session, endpoint) = client.another_session(false).await?;
    let op = endpoint.op();
    let call =
        op.prepare_call(Target::Server(client.server(0)), LONG_WORK, encode(&Task::Gate { count, gate }));
    let mut sent = pin!(call.send());
    ensure!(super::client::poll_once(sent.as_mut()).await.is_none(), "a call at a shut gate came back");
    client.until("the procedure to begin", count, |begun| begun == 1).await?;
    let refused = session.clone().close(&endpoint).await;
    client.tell(gate, 1).await?;
    let told = matches!(refused, Err(FabricError::Call(CallError::Busy { .. })));
    ensure!(told, "a session is closed while its procedure runs: expected Busy, got {refused:?}");
    let reply = sent.await;
    ensure!(reply.is_ok(), "the procedure that was in the way came back with {reply:?}");
    let closed = session.close(&endpoint).await;
    ensure!(closed.is_ok(), "the session is idle now and closed again, but: {closed:?}");
    Ok(())
}

/// Client 1 counts up in a word, reconnecting now and then and whenever it has to; client 0 sees the word never go back.
async fn reconnect(client: &Client) -> Outcome {
    let server = client.servers() - 1;
    // Of all clients' verbs only those of this endpoint get lost, if any do.
    let (word, done) = (client.at(server, 0), client.board(0));
    if client.index == 0 {
        let mut last = 0;
        let mut patience = Patience::new(&client.endpoint);
        loop {
            let over = client.op().read_word(done).await? != 0;
            let seen = client.op().read_word(word).await?;
            ensure!(
                seen >= last,
                "a word went back from {last} to {seen}: a WRITE from before a reconnect landed"
            );
            if over {
                return Ok(());
            }
            if seen == last {
                patience.wait("the count to go on").await?;
                client.check_others().await?;
            } else {
                patience = Patience::new(&client.endpoint);
            }
            last = seen;
        }
    }
    let mut lost = 0;
    for n in 1..=client.rounds {
        let written = client.op().write_word(word, n).await;
        match written {
            Ok(()) if n % 7 != 0 => continue,
            Ok(()) => {}
            Err(error) if error.is_unknown() || matches!(error, FabricError::Disconnected { .. }) => {
                lost += 1;
            }
            Err(error) => return Err(error.into()),
        }
        client.endpoint.reconnect(word.server()).await?;
        // From here on the word is what it is: the WRITE of `n` happened or never will.
        let after = retried(client, async || client.op().read_word(word).await).await?;
        ensure!(after == n || after == n - 1, "after a reconnect in round {n} the word is {after}");
        retried(client, async || client.op().write_word(word, n).await).await?;
    }
    // What is late would come within this time.
    client.endpoint.sleep(if lost > 0 { 8 * HEARTBEAT_NS } else { HEARTBEAT_NS }).await;
    let seen = retried(client, async || client.op().read_word(word).await).await?;
    ensure!(seen == client.rounds, "the last of {} rounds left {seen}", client.rounds);
    retried(client, async || client.op().write_word(done, 1).await).await
}

/// Repeats a verb that may be repeated, reconnecting in between.
async fn retried<T>(client: &Client, verb: impl AsyncFn() -> Result<T, FabricError>) -> Result<T, Failure> {
    let mut patience = Patience::new(&client.endpoint);
    loop {
        match verb().await {
            Ok(value) => return Ok(value),
            Err(FabricError::Unknown { server } | FabricError::Disconnected { server }) => {
                client.endpoint.reconnect(server).await?;
            }
            Err(error) => return Err(error.into()),
        }
        patience.wait("a verb to complete").await?;
    }
}
