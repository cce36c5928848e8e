//! Fencing: when it returns, nothing of the victim can land any more, and what the victim had can be taken over.
//!
//! The victim is the last client, with its own session, because fencing may end its process.

use super::client::{Client, Failure, HEARTBEAT_NS, Outcome, Patience, ensure, repeat, within};
use super::procedures::{LONG_WORK, Task, WORK};
use super::{Scenario, scenario};
use crate::addr::SessionId;
use crate::call::Target;
use crate::clock::{MICROSECOND, SECOND};
use crate::control::{ControlError, SessionState};
use crate::endpoint::Endpoint;
use crate::error::FabricError;
use crate::session::{Session, SessionOptions};
use crate::verb::Batch;
use crate::wire::encode;
use std::pin::pin;

pub(super) fn scenarios() -> Vec<Scenario> {
    vec![
        scenario!("fencing/verbs", clients 2, doomed 1, verbs,
            "rule 5: after the fence no WRITE or atomic of the victim lands, and the victim is told"),
        scenario!("fencing/procedures", clients 2, doomed 1, running_procedures,
            "rule 5: nor does one of a procedure that the victim had called"),
        scenario!("fencing/adoption", clients 2, doomed 1, adoption,
            "what a fenced session had is listed, taken over once, and its number serves again"),
        scenario!("fencing/epochs", clients 2, doomed 1, epochs,
            "a dead session holds epochs until it is fenced, and no longer"),
        scenario!("fencing/leases", clients 2, doomed 1, leases,
            "a session is fenced without force only after its lease ran out"),
        scenario!("fencing/ends_calls", clients 2, doomed 1, ends_calls,
            "a call that the victim waits for comes back with an error and does not hang"),
        scenario!("fencing/reused_number", clients 2, doomed 1, reused_number,
            "a fenced session cannot come back under its number when that serves somebody else"),
    ]
}

/// The victim says who it is; the fencer hears.
async fn introduce(client: &Client) -> Result<SessionId, Failure> {
    let id = client.board(0);
    if client.index == 1 {
        client.tell(id, u64::from(client.session.id().get())).await?;
        return Ok(client.session.id());
    }
    let victim = client.until("the victim to say who it is", id, |id| id != 0).await?;
    Ok(SessionId::new(u16::try_from(victim)?))
}

/// The words that the victim changes on a server: one by WRITE, one by FAA, then a block.
const BLOCK_WORDS: usize = 60;
const WATCHED_BYTES: usize = 64 + BLOCK_WORDS * 8;
/// A WRITE so long that a fence is likely to come in its middle, on the server that is fenced last.
const LONG_AT: u64 = 256 * 1024;
const LONG_BYTES: usize = 256 * 1024;

async fn verbs(client: &Client) -> Outcome {
    let victim = introduce(client).await?;
    if client.index == 1 { keep_writing(client).await } else { fence_and_watch(client, victim, true).await }
}

/// Waits until the victim is busy, fences it (or, wrongly, does not) and sees that nothing changes any more.
pub(super) async fn fence_and_watch(client: &Client, victim: SessionId, fence: bool) -> Outcome {
    for n in 0..client.servers() {
        client.until("the victim to write", client.at(n, 0), |written| written > 20).await?;
    }
    if fence {
        client.evict(victim).await?;
    }
    let watched = unchanging(client).await;
    // Whatever came of it, the victim is not left behind.
    client.bury(victim).await?;
    watched
}

async fn unchanging(client: &Client) -> Outcome {
    let mut places: Vec<_> = (0..client.servers()).map(|n| (client.at(n, 0), WATCHED_BYTES)).collect();
    let long = client.at(client.servers() - 1, LONG_AT);
    places.extend([(long, 4096), (long.add(LONG_BYTES as u64 - 4096), 4096)]);
    let before = client.op().read_many(&places).await?;
    for look in 0..60 {
        client.endpoint.sleep(if look < 20 { 2 * MICROSECOND } else { 100 * MICROSECOND }).await;
        let after = client.op().read_many(&places).await?;
        for (n, (before, after)) in before.iter().zip(&after).enumerate() {
            let at = before.iter().zip(after.iter()).position(|(b, a)| b != a);
            ensure!(
                at.is_none(),
                "the victim is fenced, and byte {} of what it wrote at {} changed at look {look}",
                at.unwrap_or(0),
                places[n].0
            );
        }
    }
    Ok(())
}

/// The victim: writes until it is told that it is fenced, then sees that it stays so.
pub(super) async fn keep_writing(client: &Client) -> Outcome {
    let mut patience = Patience::new(&client.endpoint);
    let deadline = client.endpoint.now() + super::client::PATIENCE_NS;
    let mut n = 0;
    let error = 'fenced: loop {
        n += 1;
        for server in 0..client.servers() {
            if let Err(error) = write_all(client, &client.endpoint, server, n).await {
                match error {
                    FabricError::Unknown { .. } => {}
                    FabricError::Disconnected { server } => match client.endpoint.reconnect(server).await {
                        Ok(()) => {}
                        Err(error) => break 'fenced error,
                    },
                    error => break 'fenced error,
                }
            }
        }
        if n % 64 == 0 {
            // In time for others to run; a failed fencer is noticed here.
            let others = client.check_others().await;
            let alive = client.op().read_word(client.board(0)).await.is_ok();
            if alive {
                others?;
            }
            ensure!(client.endpoint.now() < deadline, "nobody fenced the victim");
        }
    };
    let me = client.session.id();
    ensure!(
        error == FabricError::Fenced { session: me },
        "the victim's verbs: expected Fenced, got {error:?}"
    );
    // One server has fenced; the others follow.
    for server in 0..client.servers() {
        loop {
            match write_all(client, &client.endpoint, server, n).await {
                Err(FabricError::Fenced { .. }) => break,
                Ok(()) | Err(FabricError::Unknown { .. } | FabricError::Disconnected { .. }) => {}
                Err(error) => return Err(error.into()),
            }
            patience.wait("every server to fence").await?;
        }
        let again = client.endpoint.reconnect(client.server(server)).await;
        ensure!(matches!(again, Err(FabricError::Fenced { .. })), "a fenced session reconnects: {again:?}");
        let mut batch = Batch::new(client.server(server));
        batch.read(client.at(server, 0), 8);
        batch.faa(client.at(server, 8), 1);
        let refused = client.op().submit(batch).await;
        let untouched = matches!(&refused, Err(failure) if !failure.may_have_happened(1));
        ensure!(untouched, "a fenced session's FAA: expected NotExecuted, got {refused:?}");
    }
    let late = client.session.endpoint()?;
    let refused = write_all(client, &late, 0, n).await;
    let told = matches!(refused, Err(FabricError::Fenced { .. }));
    ensure!(told, "a new endpoint of a fenced session writes: {refused:?}");
    let call = client.op().call(Target::Server(client.server(0)), WORK, encode(&Task::Whoami {})).await;
    ensure!(call.is_err(), "a fenced session's call ran");
    let beat = client.session.heartbeat(&client.endpoint).await;
    ensure!(matches!(beat, Err(FabricError::Fenced { .. })), "a fenced session's heartbeat: {beat:?}");
    ensure!(client.session.is_fenced(), "the session was told that it is fenced and does not know");
    Ok(())
}

async fn write_all(client: &Client, endpoint: &Endpoint, server: usize, n: u64) -> Result<(), FabricError> {
    let op = endpoint.op();
    let base = client.at(server, 0);
    let mut batch = Batch::new(base.server());
    batch.write(base.add(64), endpoint.buf_of(&repeat(n, BLOCK_WORDS)));
    batch.faa(base.add(8), 1);
    // Detached verbs are the victim's too.
    if n % 4 == 0 {
        drop(op.post(batch));
    } else {
        op.submit(batch).await?;
    }
    op.write_word(base, n).await?;
    if n % 4 == 2 && server + 1 == client.servers() {
        let mut long = endpoint.buf(LONG_BYTES);
        long.fill(n.to_le_bytes()[0]);
        op.write(client.at(server, LONG_AT), long).await?;
    }
    Ok(())
}

async fn running_procedures(client: &Client) -> Outcome {
    let victim = introduce(client).await?;
    if client.index == 0 {
        return fence_and_watch(client, victim, true).await;
    }
    let mut calls = Vec::new();
    for server in 0..client.servers() {
        let (worker, at) = (client.clone(), client.at(server, 0));
        let task = async move { worker.work(server, LONG_WORK, &Task::Pump { at }).await };
        calls.push(client.endpoint.spawn(task));
    }
    let mut patience = Patience::new(&client.endpoint);
    while client.op().read_word(client.at(0, 0)).await.is_ok() {
        patience.wait("the fence").await?;
    }
    Ok(())
}

async fn adoption(client: &Client) -> Outcome {
    let victim = introduce(client).await?;
    let chunk = |n: usize| client.board(8 + n as u64);
    if client.index == 1 {
        for n in 0..client.servers() {
            let offset = client.alloc(n, 7, 1, client.session.flushed_through()).await?;
            client.tell(chunk(n), offset).await?;
        }
        client.tell(client.board(1), 1).await?;
        let mut patience = Patience::new(&client.endpoint);
        while client.op().read_word(client.board(1)).await.is_ok() {
            patience.wait("the fence").await?;
        }
        return Ok(());
    }
    client.until("the victim's chunks", client.board(1), |done| done == 1).await?;
    let op = client.op();
    let early = client.session.adopt(&op, victim).await;
    let told =
        matches!(&early, Err(error) if matches!(error.control(), Some(ControlError::NotFenced { .. })));
    ensure!(told, "a living session is adopted: expected NotFenced, got {early:?}");
    client.evict(victim).await?;
    client.session.fence(&op, victim).await?;
    let state = client.session.list(&op).await?.into_iter().find(|info| info.session == victim);
    let fenced = state.as_ref().is_some_and(|info| info.state == SessionState::Fenced);
    ensure!(fenced, "{victim} was fenced and is listed as {state:?}");
    let estate = client.session.adopt(&op, victim).await?;
    ensure!(
        estate.chunks.len() == client.servers() && estate.journals.len() == client.servers(),
        "the victim had a chunk and a journal on each of {} servers: {estate:?}",
        client.servers()
    );
    for (n, (server, info)) in estate.chunks.iter().enumerate() {
        let offset = op.read_word(chunk(n)).await?;
        ensure!(
            *server == client.server(n)
                && (info.offset, info.class, info.index) == (offset, 7, client.catalog),
            "chunk {n} of the estate is {info:?} on {server}, the victim had {offset:#x}"
        );
    }
    client.session.finish_adoption(&op, &estate).await?;
    let listed = client.session.list(&op).await?.iter().any(|info| info.session == victim);
    ensure!(!listed, "{victim} was adopted and is still listed");
    drop(op);
    // Its number comes back, and means a session that can work.
    let (session, endpoint) = number_again(client, victim).await?;
    endpoint.op().write_word(client.at(0, 0), 4).await?;
    session.close(&endpoint).await?;
    Ok(())
}

/// Opens sessions until one has this number.
async fn number_again(client: &Client, number: SessionId) -> Result<(Session, Endpoint), Failure> {
    for _ in 0..1000 {
        let (session, endpoint) = client.another_session(false).await?;
        if session.id() == number {
            return Ok((session, endpoint));
        }
        session.close(&endpoint).await?;
    }
    Err(Failure::new(format_args!("the number of {number} never served again in 1000 sessions")))
}

async fn epochs(client: &Client) -> Outcome {
    let victim = introduce(client).await?;
    if client.index == 1 {
        let op = client.op();
        client.tell(client.board(1), op.epoch()).await?;
        let mut patience = Patience::new(&client.endpoint);
        // The operation is never ended.
        while op.read_word(client.board(1)).await.is_ok() {
            patience.wait("the fence").await?;
        }
        return Ok(());
    }
    client.until("an operation under way", client.board(1), |epoch| epoch != 0).await?;
    let stamp = client.session.retire_stamp(&client.endpoint, false).await?;
    for _ in 0..12 {
        client.endpoint.sleep(HEARTBEAT_NS).await;
        client.session.heartbeat(&client.endpoint).await?;
        ensure!(
            !client.session.is_safe(stamp),
            "{stamp:?} is safe, and an operation from before is under way"
        );
    }
    client.evict(victim).await?;
    let mut patience = Patience::new(&client.endpoint);
    while !client.session.is_safe(stamp) {
        client.session.heartbeat(&client.endpoint).await?;
        patience.wait("epochs to go past a fenced session").await?;
    }
    client.bury(victim).await
}

async fn leases(client: &Client) -> Outcome {
    let victim = introduce(client).await?;
    let lease_ns = client.session.lease_ns();
    if client.index == 1 {
        // A session without a heartbeat, beside the client's own.
        let (silent, endpoint) = client.another_session(false).await?;
        client.tell(client.board(1), u64::from(silent.id().get())).await?;
        let mut patience = Patience::new(&client.endpoint);
        if lease_ns > 0 {
            while endpoint.op().read_word(client.board(1)).await.is_ok() {
                patience.wait("the lease to run out").await?;
            }
            let beat = silent.heartbeat(&endpoint).await;
            ensure!(matches!(beat, Err(FabricError::Fenced { .. })), "a heartbeat after the fence: {beat:?}");
        } else {
            silent.close(&endpoint).await?;
            client.tell(client.board(2), 1).await?;
        }
        while client.op().read_word(client.board(1)).await.is_ok() {
            patience.wait("the fence").await?;
        }
        return Ok(());
    }
    let op = client.op();
    let silent = client.until("a silent session", client.board(1), |id| id != 0).await?;
    let silent = SessionId::new(u16::try_from(silent)?);
    let early = client.session.fence(&op, victim).await;
    let told =
        matches!(&early, Err(error) if matches!(error.control(), Some(ControlError::LeaseAlive { .. })));
    ensure!(told, "a session that is kept alive is fenced: expected LeaseAlive, got {early:?}");
    if lease_ns > 0 {
        client.endpoint.sleep(lease_ns + lease_ns / 4).await;
        client.session.fence(&op, silent).await?;
        let estate = client.session.adopt(&op, silent).await?;
        client.session.finish_adoption(&op, &estate).await?;
        let early = client.session.fence(&op, victim).await;
        let told =
            matches!(&early, Err(error) if matches!(error.control(), Some(ControlError::LeaseAlive { .. })));
        ensure!(told, "a session that is kept alive is fenced: expected LeaseAlive, got {early:?}");
    } else {
        client.until("the silent session to close", client.board(2), |closed| closed == 1).await?;
    }
    client.bury(victim).await
}

async fn ends_calls(client: &Client) -> Outcome {
    let victim = introduce(client).await?;
    let n = client.servers() - 1;
    let (count, gate) = (client.at(n, 0), client.at(n, 8));
    if client.index == 0 {
        client.until("the victim's procedure to begin", count, |begun| begun == 1).await?;
        return client.bury(victim).await;
    }
    let task = Task::Gate { count, gate };
    let call = pin!(client.work(n, LONG_WORK, &task));
    let outcome = within(&client.endpoint, 2 * SECOND, call).await;
    ensure!(
        matches!(outcome, Some(Err(_))),
        "the caller was fenced, its call must come back with an error, but: {outcome:?} (None: it hung)"
    );
    Ok(())
}

async fn reused_number(client: &Client) -> Outcome {
    let victim = introduce(client).await?;
    let word = client.at(0, 128);
    if client.index == 0 {
        client.bury(victim).await?;
        let (session, endpoint) = number_again(client, victim).await?;
        endpoint.op().write_word(word, 1).await?;
        client.tell(client.board(1), 1).await?;
        client.until("the zombie's attempt", client.board(2), |done| done == 1).await?;
        let seen = client.op().read_word(word).await?;
        session.close(&endpoint).await?;
        ensure!(seen == 1, "a fenced session wrote {seen} under its number, which now is another's");
        return Ok(());
    }
    let mut patience = Patience::new(&client.endpoint);
    while client.op().read_word(word).await.is_ok() {
        patience.wait("the fence").await?;
    }
    // To hear what goes on it has to come back as somebody new, which is what it should do.
    let fresh = Session::open(&client.cluster, SessionOptions::default()).await?;
    let ear = fresh.endpoint()?;
    while ear.op().read_word(client.board(1)).await? == 0 {
        patience.wait("its number to serve again").await?;
    }
    let zombie = client.session.endpoint()?;
    let written = zombie.op().write_word(word, 666).await;
    let beat = client.session.heartbeat(&client.endpoint).await;
    ear.op().write_word(client.board(2), 1).await?;
    fresh.close(&ear).await?;
    ensure!(written.is_err(), "a fenced session opened an endpoint under its old number and wrote");
    ensure!(beat.is_err(), "a fenced session renewed the lease of the session that has its number now");
    Ok(())
}
