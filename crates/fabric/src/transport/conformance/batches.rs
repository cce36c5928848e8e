//! Batches: their verbs take effect in order, their results come back in order, and they cost what the contract says.

use super::client::{Client, Failure, Outcome, Patience, ensure, noise, size};
use super::procedures::ECHO;
use super::{Scenario, scenario};
use crate::addr::GlobalAddr;
use crate::buf::SharedBuf;
use crate::call::Target;
use crate::endpoint::Op;
use crate::error::FabricError;
use crate::stats::OpStats;
use crate::verb::{Batch, Completed, Verb, VerbOutcome};

pub(super) fn scenarios() -> Vec<Scenario> {
    vec![
        scenario!("batches/in_order", clients 1, in_order,
            "rule 3: each verb of a batch sees what those before it did, and its result comes at its place"),
        scenario!("batches/read_many", clients 1, read_many,
            "API: any number of places on any servers, results in the order asked for, one round trip"),
        scenario!("batches/tickets", clients 1, tickets,
            "API: posted batches are awaited in any order, polled, together; each brings its own results"),
        scenario!("batches/failed_cas", clients 1, failed_cas,
            "rule 3: a CAS that does not match is a completed verb, what follows still executes"),
        scenario!("batches/together", clients 1, together,
            "rule 6: of batches submitted together a bad one fails by itself"),
        scenario!("batches/accounting", clients 1, accounting,
            "rule 3: round trips, verbs and bytes are counted alike on every transport"),
    ]
}

const AREA: usize = 256;

/// Two areas of one server that a batch works on, and what they should hold.
struct Areas {
    places: [GlobalAddr; 2],
    bytes: [Vec<u8>; 2],
}

/// What a verb has to bring.
enum Due {
    Nothing,
    Word(u64),
    Bytes(Vec<u8>),
    Landed(SharedBuf, usize, Vec<u8>),
}

impl Areas {
    fn word(&self, area: usize, at: usize) -> u64 {
        self.bytes[area][at..at + 8].iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte))
    }

    /// Adds a random verb, carries it out on the model, and says what it has to bring.
    fn push(&mut self, client: &Client, batch: &mut Batch) -> Result<Due, Failure> {
        let area = client.random_size(2);
        let place = self.places[area];
        let from = client.random_size(AREA);
        let len = 1 + client.random_size((AREA - from).min(90));
        let range = from..from + len;
        let addr = place.add(from as u64);
        let at = client.random_size(AREA / 8) * 8;
        let word = place.add(at as u64);
        let any = client.random(u64::MAX);
        match client.random(6) {
            0 => {
                batch.read(addr, len);
                Ok(Due::Bytes(self.bytes[area][range].to_vec()))
            }
            1 => {
                let (buf, landing) = (client.shared(128)?, client.random_size(30));
                batch.read_into(addr, len, &buf, landing);
                Ok(Due::Landed(buf, landing, self.bytes[area][range].to_vec()))
            }
            2 | 3 => {
                let data = noise(any, len);
                if len <= 32 {
                    batch.write_inline(addr, &data);
                } else {
                    batch.write(addr, client.endpoint.buf_of(&data));
                }
                self.bytes[area][range].copy_from_slice(&data);
                Ok(Due::Nothing)
            }
            4 => {
                let before = self.word(area, at);
                let expected = if client.random(2) == 0 { before } else { any };
                batch.cas(word, expected, !any);
                let after = if before == expected { !any } else { before };
                self.bytes[area][at..at + 8].copy_from_slice(&after.to_le_bytes());
                Ok(Due::Word(before))
            }
            _ => {
                let before = self.word(area, at);
                batch.faa(word, any);
                self.bytes[area][at..at + 8].copy_from_slice(&before.wrapping_add(any).to_le_bytes());
                Ok(Due::Word(before))
            }
        }
    }
}

fn compare(completed: &mut Completed, due: &[Due], said: &str) -> Outcome {
    for (n, due) in due.iter().enumerate() {
        match due {
            Due::Nothing => {}
            Due::Word(word) => {
                let seen = completed.previous(n);
                ensure!(seen == *word, "verb {n} of {said} found {seen:#x} instead of {word:#x}");
            }
            Due::Bytes(bytes) => {
                let seen = completed.take(n);
                ensure!(
                    seen[..] == bytes[..],
                    "verb {n} of {said} read {:x?} instead of {bytes:x?}",
                    &seen[..]
                );
            }
            Due::Landed(buf, at, bytes) => {
                let mut seen = vec![0; bytes.len()];
                buf.memory().read(*at, &mut seen);
                ensure!(seen == *bytes, "verb {n} of {said} landed {seen:x?} instead of {bytes:x?}");
            }
        }
    }
    Ok(())
}

async fn in_order(client: &Client) -> Outcome {
    let max = client.endpoint.capabilities().max_batch;
    let op = client.op();
    for round in 0..client.rounds {
        let server = client.random_size(client.servers());
        let places = [client.at(server, 1024), client.lock(server, 8)];
        let mut areas = Areas { places, bytes: [noise(round, AREA), noise(!round, AREA)] };
        for (place, bytes) in places.iter().zip(&areas.bytes) {
            op.write(*place, client.endpoint.buf_of(bytes)).await?;
        }
        let verbs = if round % 16 == 15 { max } else { (1 + client.random_size(10)).min(max) };
        let mut batch = Batch::new(client.server(server));
        let mut due = Vec::new();
        for _ in 0..verbs {
            due.push(areas.push(client, &mut batch)?);
        }
        let said = format!("{:?}", batch.verbs);
        let mut completed = op.submit(batch).await?;
        compare(&mut completed, &due, &said)?;
        for (place, bytes) in places.iter().zip(&areas.bytes) {
            let seen = op.read(*place, AREA).await?;
            ensure!(seen[..] == bytes[..], "{said} left {:x?} instead of {bytes:x?} at {place}", &seen[..]);
        }
    }
    Ok(())
}

async fn read_many(client: &Client) -> Outcome {
    const FILLED: usize = 32 * 1024;
    let mut filled = Vec::new();
    for server in 0..client.servers() {
        let bytes = noise(server as u64, FILLED);
        client.op().write(client.at(server, 0), client.endpoint.buf_of(&bytes)).await?;
        filled.push(bytes);
    }
    let max = client.endpoint.capabilities().max_batch;
    for count in [0, 1, 2, max, max + 1, client.servers() * max, client.servers() * max + 3] {
        let op = client.op();
        let (mut places, mut due) = (Vec::new(), Vec::new());
        for _ in 0..count {
            let server = client.random_size(client.servers());
            let from = client.random_size(FILLED - 200);
            let len = 1 + client.random_size(200);
            places.push((client.at(server, from as u64), len));
            due.push(&filled[server][from..from + len]);
        }
        let bufs = op.read_many(&places).await?;
        ensure!(bufs.len() == count, "{count} places were asked for and {} came", bufs.len());
        for (n, (buf, due)) in bufs.iter().zip(due).enumerate() {
            ensure!(buf[..] == *due, "place {n} of {count}, {:?}, brought another's bytes", places[n]);
        }
        let (trips, reads) = (op.stats().round_trips, op.stats().reads);
        ensure!(
            trips == u64::from(count > 0) && reads == count as u64,
            "{count} places cost {trips} round trips and {reads} READs"
        );
    }
    let mut places = vec![(client.at(0, 0), 8); 3];
    places[1].0 = GlobalAddr::new(client.server(0), places[0].0.region(), GlobalAddr::MAX_OFFSET - 7);
    let refused = client.op().read_many(&places).await;
    ensure!(
        matches!(refused, Err(FabricError::OutOfBounds { .. })),
        "one bad place of three: expected OutOfBounds, got {refused:?}"
    );
    Ok(())
}

async fn tickets(client: &Client) -> Outcome {
    let op = client.op();
    for round in 1..=client.rounds {
        let mut tickets = Vec::new();
        for n in 0..8u64 {
            let place = client.at(size(n) % client.servers(), 64 * n);
            let mut batch = Batch::new(place.server());
            batch.write_word(place, round << 8 | n);
            batch.read(place, 8);
            tickets.push((n, op.post(batch)));
        }
        let mut order: Vec<usize> = (0..8).collect();
        for n in 0..8 {
            order.swap(n, client.random_size(8));
        }
        let mut tickets: Vec<_> = tickets.into_iter().map(Some).collect();
        for n in order {
            let Some((n, mut ticket)) = tickets[n].take() else { continue };
            let result = if client.random(2) == 0 {
                ticket.await
            } else {
                let mut patience = Patience::new(&client.endpoint);
                loop {
                    if let Some(result) = ticket.try_take() {
                        break result;
                    }
                    patience.wait("a posted batch to complete").await?;
                }
            };
            let seen = result?.take(1).word(0);
            ensure!(seen == round << 8 | n, "ticket {n} of round {round} brought {seen:#x}");
        }
    }
    Ok(())
}

async fn failed_cas(client: &Client) -> Outcome {
    for round in 0..client.rounds.min(200) {
        let server = client.random_size(client.servers());
        let (word, other) = (client.at(server, 0), client.lock(server, 1));
        let op = client.op();
        op.write_word(word, 10).await?;
        op.write_word(other, 20).await?;
        let mut batch = Batch::new(word.server());
        let lost = batch.cas(word, 11, 12);
        let read = batch.read(word, 8);
        batch.write_word(other, 21 + round);
        let won = batch.cas(word, 10, 13);
        let last = batch.read(other, 8);
        let mut completed = op.submit(batch).await?;
        let (lost, won) = (completed.previous(lost), completed.previous(won));
        let (read, last) = (completed.take(read).word(0), completed.take(last).word(0));
        ensure!(
            (lost, read, won, last) == (10, 10, 10, 21 + round),
            "behind a CAS that lost: {:?}, expected {:?}",
            (lost, read, won, last),
            (10, 10, 10, 21 + round)
        );
    }
    Ok(())
}

async fn together(client: &Client) -> Outcome {
    let op = client.op();
    let mut batches = Vec::new();
    for server in 0..client.servers() {
        let mut good = Batch::new(client.server(server));
        good.write_word(client.at(server, 0), 77);
        good.read(client.at(server, 0), 8);
        let mut bad = Batch::new(client.server(server));
        bad.write_word(client.at(server, 8), 78);
        bad.faa(client.at(server, 9), 1);
        batches.extend([good, bad]);
    }
    for (n, result) in op.submit_all(batches).await.into_iter().enumerate() {
        let server = n / 2;
        match result {
            Ok(mut completed) if n % 2 == 0 => {
                let seen = completed.take(1).word(0);
                ensure!(seen == 77, "batch {n} read {seen} instead of 77");
            }
            Err(failure) if n % 2 == 1 => {
                let misaligned = FabricError::Misaligned { addr: client.at(server, 9) };
                ensure!(
                    failure.error == misaligned && failure.at == 1,
                    "expected {misaligned}, got {failure}"
                );
                let fate = (&failure.outcomes[0], &failure.outcomes[1]);
                ensure!(
                    matches!(fate, (VerbOutcome::NotExecuted, VerbOutcome::Refused)),
                    "the verbs of a refused batch became {fate:?}"
                );
                let untouched = op.read_word(client.at(server, 8)).await?;
                ensure!(untouched == 0, "a refused batch wrote {untouched}");
            }
            Ok(_) => return Err(Failure::new(format_args!("batch {n} is bad and completed"))),
            Err(failure) => return Err(failure.into()),
        }
    }
    Ok(())
}

fn of_kinds(kinds: &str, at: GlobalAddr, bytes: usize, client: &Client) -> Batch {
    let mut batch = Batch::new(at.server());
    for kind in kinds.chars() {
        match kind {
            'R' => batch.read(at, bytes),
            'W' => batch.write(at, client.endpoint.buf(bytes)),
            'C' => batch.cas(at, 1, 2),
            'M' => {
                batch.push(Verb::MaskedCas { addr: at, compare: 0, compare_mask: 1, swap: 0, swap_mask: 1 })
            }
            _ => batch.faa(at, 1),
        };
    }
    batch
}

fn stats(round_trips: u64, verbs: [u64; 3], bytes: [u64; 2]) -> OpStats {
    let ([reads, writes, atomics], [bytes_read, bytes_written]) = (verbs, bytes);
    OpStats { round_trips, reads, writes, atomics, bytes_read, bytes_written, ..OpStats::default() }
}

fn cost(op: &Op, said: &str, due: OpStats) -> Outcome {
    ensure!(op.stats() == due, "{said} cost {:?} instead of {due:?}", op.stats());
    Ok(())
}

async fn accounting(client: &Client) -> Outcome {
    // An endpoint of its own: heartbeats are counted on the client's.
    let endpoint = client.session.endpoint()?;
    let at = client.at(client.servers() - 1, 0);
    let mut table = vec![
        ("R", 100, stats(1, [1, 0, 0], [100, 0])),
        ("W", 100, stats(1, [0, 1, 0], [0, 100])),
        ("C", 8, stats(1, [0, 0, 1], [8, 8])),
        ("F", 8, stats(1, [0, 0, 1], [8, 8])),
        ("WW", 24, stats(1, [0, 2, 0], [0, 48])),
        ("CR", 64, stats(1, [1, 0, 1], [72, 8])),
        ("WC", 16, stats(1, [0, 1, 1], [8, 24])),
        ("WRR", 16, stats(1, [2, 1, 0], [32, 16])),
        ("RW", 16, stats(2, [1, 1, 0], [16, 16])),
        ("RF", 16, stats(2, [1, 0, 1], [24, 8])),
        ("CW", 16, stats(2, [0, 1, 1], [8, 24])),
        ("FF", 8, stats(2, [0, 0, 2], [16, 16])),
        ("CRW", 16, stats(2, [1, 1, 1], [24, 24])),
        ("CWF", 16, stats(2, [0, 1, 2], [16, 32])),
        ("RWRW", 8, stats(3, [2, 2, 0], [16, 16])),
        ("FWRF", 8, stats(3, [1, 1, 2], [24, 24])),
    ];
    if client.endpoint.capabilities().masked_cas {
        table.push(("MWM", 8, stats(2, [0, 1, 2], [16, 24])));
    }
    let mut total = OpStats::default();
    for (kinds, bytes, due) in &table {
        let op = endpoint.op();
        op.submit(of_kinds(kinds, at, *bytes, client)).await?;
        cost(&op, kinds, *due)?;
        let posted = endpoint.op();
        let ticket = posted.post(of_kinds(kinds, at, *bytes, client));
        cost(&posted, "a posted batch, not awaited,", OpStats { round_trips: 0, ..*due })?;
        ticket.await?;
        cost(&posted, kinds, *due)?;
        total += *due;
        total += *due;
    }
    let op = endpoint.op();
    for result in op.submit_all(["R", "RWRW", "W"].map(|kinds| of_kinds(kinds, at, 8, client))).await {
        result?;
    }
    let mut due = stats(3, [3, 3, 0], [24, 24]);
    cost(&op, "three batches together", due)?;
    op.read_word(at).await?;
    op.write_word(at, 1).await?;
    op.cas(at, 9, 9).await?;
    op.faa(at, 0).await?;
    due += stats(4, [1, 1, 2], [24, 24]);
    cost(&op, "four single words", due)?;
    op.count_retry();
    due.retries += 1;
    let refused = op.submit(of_kinds("WF", at.add(1), 8, client)).await;
    ensure!(refused.is_err(), "a misaligned atomic completed");
    cost(&op, "a refused batch", due)?;
    let call = op.prepare_call(Target::Server(at.server()), ECHO, vec![7; 30]);
    for _ in 0..2 {
        let reply = call.send().await?;
        ensure!(reply == [7; 30], "an echo came back as {reply:?}");
    }
    drop(call);
    (due.calls, due.round_trips, due.retries) = (1, due.round_trips + 1, due.retries + 1);
    (due.bytes_read, due.bytes_written) = (due.bytes_read + 60, due.bytes_written + 60);
    cost(&op, "a call, sent twice,", due)?;
    total += due;
    drop(op);
    let seen = endpoint.totals();
    ensure!(seen == total, "the operations together cost {seen:?} instead of {total:?}");
    Ok(())
}
