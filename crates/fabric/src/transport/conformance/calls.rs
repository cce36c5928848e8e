//! The two-sided path: replies, refusals, at most once, long and short, to servers and to other sessions.

use super::client::{Client, Failure, Outcome, Patience, ensure, noise, poll_once, size, within};
use super::procedures::{ECHO, FAIL, FAILS_WITH, LONG_WORK, Task, WORK, procedures};
use super::{Scenario, scenario};
use crate::addr::{GlobalAddr, ServerId, SessionId};
use crate::call::{CallError, CallOutcome, Target};
use crate::clock::{MICROSECOND, SECOND};
use crate::error::FabricError;
use crate::procedure::ProcedureId;
use crate::wire::{decode, encode};
use std::cell::Cell;
use std::pin::pin;
use std::rc::Rc;

pub(super) fn scenarios() -> Vec<Scenario> {
    vec![
        scenario!("calls/echo", clients 2, echo,
            "a call of any size reaches its server and its reply comes back"),
        scenario!("calls/refusals", clients 1, refusals,
            "what cannot be called is refused with the right error, and calls go on"),
        scenario!("calls/repeat", clients 1, repeat,
            "a call that is sent again runs at most once and gets the same reply, even while it runs"),
        scenario!("calls/two_ways", clients 1, two_ways,
            "a call that is asked over a broken connection, the next one and beside it runs once, and every way has its reply"),
        scenario!("calls/beside", clients 1, beside,
            "procedures work beside their server's memory only, in their caller's name"),
        scenario!("calls/long", clients 1, long,
            "long calls do not keep short ones waiting"),
        scenario!("calls/busy", clients 1, busy,
            "beyond the queue calls are refused as busy, did not run, and can be repeated"),
        scenario!("calls/many", clients 2, many,
            "tasks of one endpoint call at the same time and each gets its own reply"),
        scenario!("calls/to_sessions", clients 3, to_sessions,
            "sessions that serve are called like servers; those that do not are told apart"),
        scenario!("calls/to_the_gone", clients 2, to_the_gone,
            "a call to a session that ends before it replies comes back, and does not hang"),
    ]
}

const SIZES: [usize; 13] = [0, 1, 7, 8, 63, 64, 65, 1000, 4095, 4096, 4097, 65_535, 65_536];

fn server(client: &Client, n: usize) -> Target {
    Target::Server(client.server(n))
}

fn word(reply: &[u8]) -> Result<u64, Failure> {
    decode(reply)
        .map_err(|_| Failure::new(format_args!("expected a word as reply, got {} bytes", reply.len())))
}

async fn echo(client: &Client) -> Outcome {
    for round in 0..client.rounds.div_ceil(100) {
        for n in 0..client.servers() {
            for len in SIZES {
                let request = noise(round ^ u64::from(client.index), len);
                let reply = client.op().call(server(client, n), ECHO, request.clone()).await?;
                ensure!(reply == request, "an echo of {len} bytes came back as {} others", reply.len());
            }
        }
    }
    Ok(())
}

async fn refused(
    client: &Client,
    target: Target,
    procedure: ProcedureId,
    request: Vec<u8>,
) -> Result<CallError, Failure> {
    match client.op().call(target, procedure, request).await {
        Err(FabricError::Call(error)) => Ok(error),
        other => Err(Failure::new(format_args!("a call of {procedure} should be refused, but: {other:?}"))),
    }
}

async fn refusals(client: &Client) -> Outcome {
    let nothing = ProcedureId(0xdead_0001);
    let nowhere = ServerId::new(u16::try_from(client.servers())?);
    let nobody = Target::Session(SessionId::new(60_000));
    for n in 0..client.servers() {
        let here = server(client, n);
        let due = CallError::NoSuchProcedure { procedure: nothing };
        let seen = refused(client, here, nothing, vec![1]).await?;
        ensure!(seen == due, "expected {due:?}, got {seen:?}");
        let due = CallError::Failed(FAILS_WITH.to_owned());
        let seen = refused(client, here, FAIL, vec![]).await?;
        ensure!(seen == due, "expected {due:?}, got {seen:?}");
        for garbage in [vec![], vec![255], noise(3, 50)] {
            let seen = refused(client, here, ProcedureId::CONTROL, garbage).await?;
            ensure!(seen == CallError::Malformed, "garbage as a request: expected Malformed, got {seen:?}");
        }
        let reply = client.op().call(here, ECHO, vec![5]).await?;
        ensure!(reply == [5], "after refusals an echo came back as {reply:?}");
    }
    let seen = client.op().call(Target::Server(nowhere), ECHO, vec![]).await;
    ensure!(
        seen == Err(FabricError::UnknownServer { server: nowhere }),
        "a server that does not exist: expected UnknownServer, got {seen:?}"
    );
    if client.endpoint.capabilities().session_calls {
        let seen = refused(client, nobody, ECHO, vec![]).await?;
        ensure!(
            matches!(seen, CallError::NoSuchSession { .. }),
            "a session that does not exist: got {seen:?}"
        );
        // This session exists and serves nothing.
        let me = client.session.id();
        let seen = refused(client, Target::Session(me), ECHO, vec![]).await?;
        ensure!(
            seen == CallError::NoSuchSession { session: me },
            "a session that does not serve: got {seen:?}"
        );
    }
    Ok(())
}

async fn repeat(client: &Client) -> Outcome {
    repeat_at(client, server(client, client.servers() - 1), client.at(client.servers() - 1, 0)).await
}

/// Sends calls again in every phase of their life; each must run once.
async fn repeat_at(client: &Client, target: Target, counter: GlobalAddr) -> Outcome {
    let op = client.op();
    let begin = op.read_word(counter).await?;
    let rounds = client.rounds.min(100);
    let request = |sleep_ns| encode(&Task::Count { at: counter, sleep_ns });
    // This one stays open to the end: its reply must not be forgotten meanwhile.
    let old = op.prepare_call(target, WORK, request(0));
    let due = old.send().await?;
    for n in 1..=rounds {
        let sleep_ns = if n % 8 == 0 { 50 * MICROSECOND } else { 0 };
        let call = op.prepare_call(target, WORK, request(sleep_ns));
        if n % 2 == 0 {
            // Sent, and the reply not waited for: it may not have arrived, run, or have run.
            let first = pin!(call.send());
            poll_once(first).await;
            if n % 4 == 0 {
                client.endpoint.sleep(client.random(30) * MICROSECOND).await;
            }
        }
        let (first, second) = (call.send().await?, call.send().await?);
        ensure!(first == second, "a repeated call got {first:?}, then {second:?}");
        let found = word(&first)?;
        ensure!(found == begin + n, "call {n} found the counter at {found} instead of {}", begin + n);
        let seen = op.read_word(counter).await?;
        ensure!(seen == begin + n + 1, "{} calls ran {} times", n + 1, seen - begin);
    }
    let again = old.send().await?;
    ensure!(
        again == due,
        "an open call was repeated after {rounds} others and got {again:?} instead of {due:?}"
    );
    let seen = op.read_word(counter).await?;
    ensure!(seen == begin + rounds + 1, "{} calls ran {} times", rounds + 1, seen - begin);
    let failing = op.prepare_call(target, FAIL, vec![]);
    let (first, second) = (failing.send().await, failing.send().await);
    ensure!(first == second && first.is_err(), "a failing call repeated: {first:?}, then {second:?}");
    Ok(())
}

/// Asks the same call over one connection, and, while it runs, over the next one more often than a connection takes calls without an
/// answer. Over RDMA it goes as a message on either queue pair, and the rest over the line.
async fn two_ways(client: &Client) -> Outcome {
    const TIMES: usize = 10;
    let n = client.servers() - 1;
    let (count, gate) = (client.at(n, 0), client.at(n, 8));
    let op = client.op();
    let call = op.prepare_call(server(client, n), LONG_WORK, encode(&Task::Gate { count, gate }));
    poll_once(pin!(call.send())).await;
    client.until("the call to begin", count, |begun| begun == 1).await?;
    client.endpoint.reconnect(client.server(n)).await?;
    for asked in 0..TIMES {
        let early = poll_once(pin!(call.send())).await;
        ensure!(
            early.is_none(),
            "a call that waits at its gate was answered: {early:?} (asked {asked} times)"
        );
    }
    // This one is waited for.
    let mut last = pin!(call.send());
    poll_once(last.as_mut()).await;
    client.tell(gate, 1).await?;
    let (first, second) = (last.await?, call.send().await?);
    ensure!(first == second, "a call got {first:?} one way, then {second:?}");
    let (found, ran) = (word(&first)?, op.read_word(count).await?);
    ensure!(found == 0 && ran == 1, "a call that was asked two ways ran {ran} times, and found {found}");
    // Nothing of that is left in the way of others.
    for n in 0..TIMES {
        let request = vec![0; n];
        let reply = op.call(server(client, client.servers() - 1), ECHO, request.clone()).await?;
        ensure!(reply == request, "an echo came back as {reply:?}");
    }
    Ok(())
}

async fn beside(client: &Client) -> Outcome {
    for n in 0..client.servers() {
        let reply = client.work(n, WORK, &Task::Whoami {}).await?;
        let mut due = encode(&client.session.id());
        due.extend(encode(&client.session.id()));
        ensure!(
            reply == due,
            "a procedure works in the name of {reply:?}, called by {}",
            client.session.id()
        );
        let (at, lock) = (client.at(n, 16), client.lock(n, 2));
        for at in [at, lock] {
            client.work(n, WORK, &Task::Write { at, data: vec![1; 16] }).await?;
            let found = word(&client.work(n, WORK, &Task::Count { at, sleep_ns: 0 }).await?)?;
            ensure!(
                found == u64::from_le_bytes([1; 8]),
                "a procedure's FAA found {found:#x} in its own WRITE"
            );
        }
        let last = client.server(n).get();
        let bad = [
            (client.at((n + 1) % client.servers(), 0), client.servers() > 1, "UnknownServer"),
            (GlobalAddr::new(client.server(n), at.region(), GlobalAddr::MAX_OFFSET - 7), true, "OutOfBounds"),
            (GlobalAddr::new(ServerId::new(last), crate::addr::RegionId::META, 0), true, "PermissionDenied"),
        ];
        for (at, possible, name) in bad {
            if possible {
                let seen = client.work(n, WORK, &Task::Write { at, data: vec![9; 8] }).await;
                let told =
                    matches!(&seen, Err(FabricError::Call(CallError::Failed(why))) if why.contains(name));
                ensure!(
                    told,
                    "a procedure on {} writes to {at}: expected {name}, got {seen:?}",
                    client.server(n)
                );
            }
        }
    }
    Ok(())
}

async fn long(client: &Client) -> Outcome {
    let n = client.servers() - 1;
    let (count, gate) = (client.at(n, 0), client.at(n, 8));
    let running = Rc::new(Cell::new(true));
    let (worker, flag) = (client.clone(), Rc::clone(&running));
    let task = client.endpoint.spawn(async move {
        let outcome = worker.work(n, LONG_WORK, &Task::Gate { count, gate }).await;
        flag.set(false);
        outcome
    });
    client.until("the long call to begin", count, |begun| begun == 1).await?;
    for round in 0..client.rounds.min(200) {
        let request = round.to_le_bytes().to_vec();
        let reply = client.op().call(server(client, n), ECHO, request.clone()).await?;
        ensure!(reply == request, "an echo came back as {reply:?}");
        let found = word(&client.work(n, WORK, &Task::Count { at: client.at(n, 16), sleep_ns: 0 }).await?)?;
        ensure!(found == round, "a short procedure found {found} instead of {round}");
        ensure!(running.get(), "the long call ended, and its gate is shut");
    }
    client.tell(gate, 1).await?;
    let found = word(&task.await??)?;
    ensure!(found == 0, "the long call ran once and found its counter at {found}");
    Ok(())
}

async fn busy(client: &Client) -> Outcome {
    const CALLS: usize = 400;
    let n = client.servers() - 1;
    let (count, gate) = (client.at(n, 0), client.at(n, 8));
    let refused = Rc::new(Cell::new(0usize));
    let mut tasks = Vec::new();
    for _ in 0..CALLS {
        let (client, refused) = (client.clone(), Rc::clone(&refused));
        tasks.push(client.endpoint.clone().spawn(async move {
            let op = client.op();
            let call = op.prepare_call(server(&client, n), LONG_WORK, encode(&Task::Gate { count, gate }));
            match call.send().await {
                Err(CallError::Busy { .. }) => refused.set(refused.get() + 1),
                outcome => return outcome,
            }
            // Refused means that it did not run: when there is room, the same call runs.
            client.until("the gate to open", gate, |open| open == 1).await.map_err(failed)?;
            let mut patience = Patience::new(&client.endpoint);
            loop {
                match call.send().await {
                    Err(CallError::Busy { .. }) => {}
                    outcome => return outcome,
                }
                patience.wait("room in the queue").await.map_err(failed)?;
            }
        }));
    }
    let mut patience = Patience::new(&client.endpoint);
    while refused.get() == 0 {
        patience.wait("a call to be refused as busy").await?;
    }
    let reply = client.op().call(server(client, n), ECHO, vec![1]).await?;
    ensure!(reply == [1], "while long calls queue a short one got {reply:?}");
    ensure!(refused.get() < CALLS, "all {CALLS} calls were refused");
    client.tell(gate, 1).await?;
    let mut found = vec![false; CALLS];
    for task in tasks {
        let before = size(word(&task.await??)?);
        ensure!(before < CALLS && !found[before], "two of {CALLS} calls found the counter at {before}");
        found[before] = true;
    }
    let ran = client.op().read_word(count).await?;
    ensure!(ran == CALLS as u64, "{CALLS} calls ran {ran} times");
    Ok(())
}

fn failed(failure: Failure) -> CallError {
    CallError::Failed(String::from(failure))
}

/// Sends a call until there is room for it.
async fn insist(client: &Client, target: Target, procedure: ProcedureId, request: Vec<u8>) -> CallOutcome {
    let op = client.op();
    let call = op.prepare_call(target, procedure, request);
    let mut patience = Patience::new(&client.endpoint);
    loop {
        match call.send().await {
            Err(CallError::Busy { .. }) => patience.wait("room in the queue").await.map_err(failed)?,
            outcome => return outcome,
        }
    }
}

async fn many(client: &Client) -> Outcome {
    let per_task = client.rounds.min(400) / 8 + 1;
    let mut tasks = Vec::new();
    for task in 0..24u64 {
        let client = client.clone();
        tasks.push(client.endpoint.clone().spawn(async move {
            for round in 0..per_task {
                let n = size(task + round) % client.servers();
                let request =
                    noise(task << 32 | round << 8 | u64::from(client.index), 1 + size(client.random(300)));
                let reply = insist(&client, server(&client, n), ECHO, request.clone()).await?;
                ensure!(reply == request, "task {task} got another's echo");
                let count = encode(&Task::Count { at: client.at(n, 0), sleep_ns: 0 });
                insist(&client, server(&client, n), WORK, count).await?;
            }
            Ok::<(), Failure>(())
        }));
    }
    for task in tasks {
        task.await??;
    }
    client.barrier().await?;
    let mut ran = 0;
    for n in 0..client.servers() {
        ran += client.op().read_word(client.at(n, 0)).await?;
    }
    let due = 24 * per_task * u64::from(client.of);
    ensure!(ran == due, "{due} calls ran {ran} times");
    Ok(())
}

async fn to_sessions(client: &Client) -> Outcome {
    if !client.endpoint.capabilities().session_calls {
        return Ok(());
    }
    let id = |who: u32| client.board(u64::from(who));
    if client.index != 2 {
        client.endpoint.serve(procedures());
    }
    client.tell(id(client.index), u64::from(client.session.id().get())).await?;
    client.barrier().await?;
    let mut sessions = Vec::new();
    for who in 0..client.of {
        let word = client.op().read_word(id(who)).await?;
        sessions.push(SessionId::new(u16::try_from(word)?));
    }
    // Everybody calls everybody, the one that does not serve included.
    for who in 0..client.of {
        let (session, peer) = (sessions[size(who.into())], Target::Session(sessions[size(who.into())]));
        if who == 2 {
            let seen = refused(client, peer, ECHO, vec![1]).await?;
            ensure!(
                seen == CallError::NoSuchSession { session },
                "a session that does not serve: got {seen:?}"
            );
            continue;
        }
        for len in SIZES {
            let request = noise(u64::from(who), len);
            let reply = client.op().call(peer, ECHO, request.clone()).await?;
            ensure!(reply == request, "an echo of {len} bytes by a session came back changed");
        }
        let nothing = ProcedureId(0xdead_0001);
        let seen = refused(client, peer, nothing, vec![]).await?;
        ensure!(
            seen == CallError::NoSuchProcedure { procedure: nothing },
            "an unknown procedure: got {seen:?}"
        );
        let reply = client.op().call(peer, WORK, encode(&Task::Whoami {})).await?;
        let mut due = encode(&client.session.id());
        due.extend(encode(&session));
        ensure!(reply == due, "{session} was called by {} and says {reply:?}", client.session.id());
        repeat_at(client, peer, client.at(0, 64 * u64::from(client.index * client.of + who))).await?;
    }
    client.barrier().await
}

/// Client 1 takes a call, says so, and closes its session without an answer.
async fn to_the_gone(client: &Client) -> Outcome {
    if !client.endpoint.capabilities().session_calls {
        return Ok(());
    }
    let (count, gate) = (client.at(0, 0), client.at(0, 8));
    if client.index == 1 {
        let (session, endpoint) = client.another_session(false).await?;
        endpoint.serve(procedures());
        client.tell(client.board(0), u64::from(session.id().get())).await?;
        client.until("the call to come", count, |came| came == 1).await?;
        session.close(&endpoint).await?;
        return client.barrier().await;
    }
    let callee = client.until("the callee", client.board(0), |id| id != 0).await?;
    let peer = Target::Session(SessionId::new(u16::try_from(callee)?));
    let op = client.op();
    let call = op.call(peer, LONG_WORK, encode(&Task::Gate { count, gate }));
    let outcome = within(&client.endpoint, SECOND, call).await;
    client.barrier().await?;
    ensure!(
        matches!(outcome, Some(Err(_))),
        "a call to a session that closed must come back with an error, but: {outcome:?} (None: it hung for a second)"
    );
    Ok(())
}
