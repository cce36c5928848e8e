//! Verbs that must not be posted: each is refused with the error that says why, the rest of its batch does not happen, and
//! no byte changes.

use super::client::{Client, Failure, Outcome, ensure, noise, size};
use super::{Scenario, scenario};
use crate::addr::{GlobalAddr, RegionId, ServerId};
use crate::error::FabricError;
use crate::region::{Permissions, RegionTable};
use crate::verb::{Batch, Landing, Source, Verb, VerbOutcome};

pub(super) fn scenarios() -> Vec<Scenario> {
    vec![
        scenario!("bad_input/verbs", clients 1, verbs,
            "rule 6: every kind of verb with every kind of fault, at every place of a batch"),
        scenario!("bad_input/batches", clients 1, batches,
            "rule 6: batches that are empty, too long, or for several servers"),
        scenario!("bad_input/buffers", clients 1, buffers,
            "rule 6: verbs that name more of a local buffer than there is"),
        scenario!("bad_input/words", clients 1, words,
            "rule 6: the short forms for words are checked like verbs in a batch"),
        scenario!("bad_input/unaligned_word", clients 1, unaligned_word,
            "rule 6: a READ of an aligned word at another address is refused everywhere"),
        scenario!("bad_input/random", clients 1, random,
            "rule 6: random addresses and lengths: refused exactly if the region table says so"),
    ]
}

/// Kinds of verbs, as one makes them.
const KINDS: [fn(&Client, GlobalAddr, usize) -> Verb; 6] = [
    |_, addr, len| Verb::Read { addr, len, into: Landing::Pooled },
    |client, addr, len| Verb::Write { addr, from: Source::Owned(client.endpoint.buf(len)) },
    |_, addr, len| {
        let len = u8::try_from(len.min(32)).unwrap_or(0);
        Verb::Write { addr, from: Source::Inline { bytes: [0xbb; 32], len } }
    },
    |_, addr, _| Verb::Cas { addr, expected: 0, desired: 1 },
    |_, addr, _| Verb::Faa { addr, add: 1 },
    |_, addr, _| Verb::MaskedCas { addr, compare: 0, compare_mask: 0, swap: u64::MAX, swap_mask: u64::MAX },
];

/// The region table of a server as a client with every right sees it.
fn table(client: &Client, server: usize) -> RegionTable {
    RegionTable::new(&client.cluster.view().servers[server].regions)
}

/// Everything that is wrong with a verb for `server`; a transport may name any of it.
fn faults(client: &Client, verb: &Verb, server: ServerId) -> Vec<FabricError> {
    let addr = verb.addr();
    let mut faults = Vec::new();
    let Some(n) = (0..client.servers()).find(|n| client.server(*n) == server) else {
        return vec![FabricError::UnknownServer { server }];
    };
    if addr.server() != server {
        return vec![FabricError::MixedServers { batch: server, verb: addr.server() }];
    }
    let needed = match verb {
        Verb::Read { .. } => Permissions::READ,
        Verb::Write { .. } => Permissions::WRITE,
        _ => Permissions::ATOMIC,
    };
    if needed == Permissions::ATOMIC && addr.offset() % 8 != 0 {
        faults.push(FabricError::Misaligned { addr });
    }
    if matches!(verb, Verb::MaskedCas { .. }) && !client.endpoint.capabilities().masked_cas {
        faults.push(FabricError::Unsupported { what: "masked CAS" });
    }
    match table(client, n).get(addr.region()) {
        None => faults.push(FabricError::UnknownRegion { server, region: addr.region() }),
        Some(spec) => {
            let len = verb.len() as u64;
            let end = u128::from(addr.offset()) + u128::from(len);
            if len == 0 || end > u128::from(spec.bytes) {
                faults.push(FabricError::OutOfBounds { addr, len, region_bytes: spec.bytes });
            }
            if !spec.permissions.allows(needed) {
                faults.push(FabricError::PermissionDenied { addr, needed, held: spec.permissions });
            }
        }
    }
    faults
}

/// Submits a batch whose verb `at` is bad: it is refused for a reason in `due`, and nothing happened.
async fn refuse(client: &Client, batch: Batch, at: usize, due: &[FabricError]) -> Outcome {
    let verbs = batch.len();
    let said = format!("{:?}", batch.verbs.get(at));
    let op = client.op();
    match op.submit(batch).await {
        Ok(_) => Err(Failure::new(format_args!("{said} completed; expected one of {due:?}"))),
        Err(failure) => {
            ensure!(due.contains(&failure.error), "{said}: expected one of {due:?}, got {:?}", failure.error);
            let fates = failure.outcomes.iter().enumerate();
            let right = fates.clone().all(|(n, fate)| match fate {
                VerbOutcome::Refused => n == at,
                VerbOutcome::NotExecuted => n != at,
                _ => false,
            });
            ensure!(
                failure.at == at && right && fates.len() == verbs,
                "{said}, verb {at} of {verbs}, failed at {} and the verbs became {:?}",
                failure.at,
                failure.outcomes
            );
            ensure!(op.stats().round_trips == 0, "a refused batch cost {:?}", op.stats());
            Ok(())
        }
    }
}

/// What the good verbs of bad batches would change, and what bad ones could.
struct Untouched {
    places: Vec<(GlobalAddr, usize)>,
    bytes: Vec<Vec<u8>>,
}

impl Untouched {
    async fn new(client: &Client) -> Result<Self, Failure> {
        let mut places = vec![(client.board(0), 64)];
        for n in 0..client.servers() {
            client.op().write(client.at(n, 0), client.endpoint.buf_of(&noise(n as u64, 256))).await?;
            places.extend([(client.at(n, 0), 256), (client.lock(n, 0), 256)]);
            for spec in table(client, n).iter() {
                // The ends of every region; of the server's tables only the first words never change.
                let end = GlobalAddr::new(client.server(n), spec.id, spec.bytes - 64);
                places.push((end, 64));
                if spec.id != RegionId::META {
                    places.push((GlobalAddr::new(client.server(n), spec.id, 0), 64));
                }
            }
        }
        let bytes = client.op().read_many(&places).await?.iter().map(|buf| buf.to_vec()).collect();
        Ok(Self { places, bytes })
    }

    async fn check(&self, client: &Client) -> Outcome {
        let seen = client.op().read_many(&self.places).await?;
        for ((place, before), after) in self.places.iter().zip(&self.bytes).zip(&seen) {
            ensure!(after[..] == before[..], "a refused verb changed bytes at {}", place.0);
        }
        Ok(())
    }
}

/// Adds a verb that is good and would leave a trace.
fn push_good(client: &Client, batch: &mut Batch, n: usize, which: usize) {
    let word = client.at(n, 8 * (which as u64 % 4));
    match which % 3 {
        0 => batch.write_word(word, 0x600d),
        1 => batch.faa(word, 0x600d),
        _ => batch.read(word, 8),
    };
}

async fn verbs(client: &Client) -> Outcome {
    let untouched = Untouched::new(client).await?;
    let mut cases = 0;
    for n in 0..client.servers() {
        let server = client.server(n);
        let mut places = Vec::new();
        for region in 0..=RegionId::MAX {
            let region = RegionId::new(region);
            let bytes = table(client, n).get(region).map_or(4096, |spec| spec.bytes);
            let ends = [bytes - 8, bytes - 7, bytes - 1, bytes, bytes + 1, bytes + 8];
            let beyond =
                [1 << 40, GlobalAddr::MAX_OFFSET - 15, GlobalAddr::MAX_OFFSET - 7, GlobalAddr::MAX_OFFSET];
            let inside = [0, 1, 4, 8];
            for offset in inside.into_iter().chain(ends).chain(beyond) {
                places.push(GlobalAddr::new(server, region, offset));
            }
        }
        for addr in places {
            for kind in KINDS {
                for len in [0, 1, 7, 8, 9, 16, 100] {
                    let verb = kind(client, addr, len);
                    let due = faults(client, &verb, server);
                    // What is good is not posted here: it would change what others rely on.
                    if due.is_empty() {
                        continue;
                    }
                    cases += 1;
                    let (before, after) = (cases % 3, cases / 3 % 3);
                    let mut batch = Batch::new(server);
                    for which in 0..before {
                        push_good(client, &mut batch, n, which + cases);
                    }
                    batch.push(verb);
                    for which in 0..after {
                        push_good(client, &mut batch, n, which + cases);
                    }
                    refuse(client, batch, before, &due).await?;
                }
            }
        }
        untouched.check(client).await?;
    }
    ensure!(cases > 500, "only {cases} cases were tried");
    // The endpoint works as before.
    client.tell(client.at(0, 0), 3).await?;
    let seen = client.op().read_word(client.at(0, 0)).await?;
    ensure!(seen == 3, "after refusals a word is {seen} instead of 3");
    Ok(())
}

async fn batches(client: &Client) -> Outcome {
    let untouched = Untouched::new(client).await?;
    let max = client.endpoint.capabilities().max_batch;
    let server = client.server(0);
    let empty = client.op().submit(Batch::new(server)).await;
    let due = FabricError::BatchLength { verbs: 0, max };
    let told = matches!(&empty, Err(failure) if failure.error == due && failure.outcomes.is_empty());
    ensure!(told, "an empty batch: expected {due}, got {empty:?}");
    let mut long = Batch::new(server);
    for which in 0..=max {
        push_good(client, &mut long, 0, which);
    }
    refuse(client, long, 0, &[FabricError::BatchLength { verbs: max + 1, max }]).await?;
    let nowhere = ServerId::new(u16::try_from(client.servers())?);
    let strange = [nowhere, ServerId::new(ServerId::MAX)];
    for server in strange {
        let mut batch = Batch::new(server);
        batch.read(GlobalAddr::new(server, RegionId::MAIN, 4096), 8);
        push_good(client, &mut batch, 0, 0);
        refuse(client, batch, 0, &[FabricError::UnknownServer { server }]).await?;
    }
    let mut others: Vec<_> = (1..client.servers()).map(|n| client.at(n, 0)).collect();
    others.extend(strange.map(|server| GlobalAddr::new(server, RegionId::MAIN, 4096)));
    for other in others {
        for at in 0..4 {
            for kind in KINDS {
                let mut batch = Batch::new(server);
                for which in 0..4 {
                    if which == at {
                        batch.push(kind(client, other, 8));
                    } else {
                        push_good(client, &mut batch, 0, which);
                    }
                }
                let due = [
                    FabricError::MixedServers { batch: server, verb: other.server() },
                    FabricError::UnknownServer { server: other.server() },
                ];
                refuse(client, batch, at, &due).await?;
            }
        }
    }
    untouched.check(client).await?;
    // As many as are allowed are allowed.
    let mut full = Batch::new(server);
    for which in 0..max {
        full.write_word(client.at(0, 1024 + 8 * which as u64), which as u64);
    }
    client.op().submit(full).await?;
    let last = client.op().read_word(client.at(0, 1024 + 8 * (max as u64 - 1))).await?;
    ensure!(last == max as u64 - 1, "the last of {max} verbs left {last}");
    Ok(())
}

async fn buffers(client: &Client) -> Outcome {
    let untouched = Untouched::new(client).await?;
    let buf = client.shared(256)?;
    let buffer_bytes = buf.memory().len();
    let pattern = noise(1, buffer_bytes);
    buf.memory().write(0, &pattern);
    let addr = client.at(0, 0);
    let bad = [
        (buffer_bytes, 1),
        (buffer_bytes - 7, 8),
        (buffer_bytes + 8, 8),
        (0, buffer_bytes + 1),
        (1, buffer_bytes),
        (usize::MAX, 8),
        (usize::MAX - 7, 8),
        (8, usize::MAX),
        (usize::MAX, usize::MAX),
    ];
    for (at, len) in bad {
        let range = FabricError::BufferRange { at, len, buffer_bytes };
        for reads in [true, false] {
            let mut batch = Batch::new(addr.server());
            push_good(client, &mut batch, 0, 0);
            if reads {
                batch.read_into(addr, len, &buf, at);
            } else {
                batch.write_from(addr, &buf, at, len);
            }
            // Lengths beyond the region are out of bounds as well.
            let region_bytes = table(client, 0).get(addr.region()).map_or(0, |spec| spec.bytes);
            let bounds = FabricError::OutOfBounds { addr, len: len as u64, region_bytes };
            let due = if len > 4096 { vec![range.clone(), bounds] } else { vec![range.clone()] };
            refuse(client, batch, 1, &due).await?;
        }
    }
    let mut after = vec![0; buffer_bytes];
    buf.memory().read(0, &mut after);
    ensure!(after == pattern, "a refused READ changed its buffer");
    untouched.check(client).await?;
    let mut batch = Batch::new(addr.server());
    batch.write_from(addr, &buf, buffer_bytes - 64, 64);
    batch.read_into(addr, buffer_bytes, &buf, 0);
    client.op().submit(batch).await?;
    Ok(())
}

fn is<T>(result: &Result<T, FabricError>, due: &[FabricError]) -> bool {
    matches!(result, Err(error) if due.contains(error))
}

async fn words(client: &Client) -> Outcome {
    let untouched = Untouched::new(client).await?;
    let op = client.op();
    let server = client.server(0);
    let nowhere = ServerId::new(u16::try_from(client.servers())?);
    let bytes = table(client, 0).get(RegionId::MAIN).map_or(0, |spec| spec.bytes);
    let places = [
        GlobalAddr::new(nowhere, RegionId::MAIN, 4096),
        GlobalAddr::new(server, RegionId::new(9), 64),
        GlobalAddr::new(server, RegionId::MAIN, bytes),
        GlobalAddr::new(server, RegionId::MAIN, GlobalAddr::MAX_OFFSET - 7),
        GlobalAddr::new(server, RegionId::META, 0),
        client.at(0, 4),
    ];
    for addr in places {
        let read = faults(client, &Verb::Read { addr, len: 8, into: Landing::Pooled }, addr.server());
        if !read.is_empty() {
            let (seen, word) = (op.read(addr, 8).await.map(|_| ()), op.read_word(addr).await);
            ensure!(
                is(&seen, &read) && is(&word, &read),
                "READ at {addr}: expected {read:?}, got {seen:?}, {word:?}"
            );
        }
        let inline = Source::Inline { bytes: [0; 32], len: 8 };
        let write = faults(client, &Verb::Write { addr, from: inline }, addr.server());
        if !write.is_empty() {
            let (seen, word) = (op.write(addr, client.endpoint.buf(8)).await, op.write_word(addr, 1).await);
            ensure!(
                is(&seen, &write) && is(&word, &write),
                "WRITE at {addr}: expected {write:?}, got {seen:?}, {word:?}"
            );
        }
        let atomic = faults(client, &Verb::Faa { addr, add: 1 }, addr.server());
        let (cas, faa) = (op.cas(addr, 0, 1).await, op.faa(addr, 1).await);
        ensure!(
            is(&cas, &atomic) && is(&faa, &atomic),
            "atomics at {addr}: expected {atomic:?}, got {cas:?}, {faa:?}"
        );
    }
    for len in [0, usize::MAX, size(bytes) + 1] {
        let seen = op.read(client.at(0, 0), len).await.map(|_| ());
        ensure!(matches!(seen, Err(FabricError::OutOfBounds { .. })), "a READ of {len} bytes: got {seen:?}");
    }
    let seen = op.write(client.at(0, 0), client.endpoint.buf(0)).await;
    ensure!(matches!(seen, Err(FabricError::OutOfBounds { .. })), "a WRITE of no bytes: got {seen:?}");
    untouched.check(client).await
}

async fn unaligned_word(client: &Client) -> Outcome {
    let addr = client.at(0, 4);
    let seen = client.op().read_word(addr).await;
    ensure!(
        seen == Err(FabricError::Misaligned { addr }),
        "read_word at {addr}: expected Misaligned, got {seen:?}"
    );
    // A WRITE of eight bytes may lie in two words.
    client.op().write_word(addr, 0x1122_3344_5566_7788).await?;
    let seen = client.op().read(client.at(0, 0), 16).await?;
    ensure!(
        (seen.word(0), seen.word(8)) == (0x5566_7788 << 32, 0x1122_3344),
        "a WRITE across words left {:x?}",
        &seen[..]
    );
    Ok(())
}

/// Addresses from anywhere: what is refused is what the table refuses; READs that are not are carried out.
async fn random(client: &Client) -> Outcome {
    let untouched = Untouched::new(client).await?;
    for round in 0..client.rounds * 8 {
        let n = client.random_size(client.servers());
        let server = match client.random(8) {
            0 => ServerId::new(u16::try_from(client.random(u64::from(ServerId::MAX) + 1))?),
            _ => client.server(n),
        };
        let region = RegionId::new(u8::try_from(client.random(if client.random(4) == 0 { 16 } else { 4 }))?);
        let bytes = table(client, n).get(region).map_or(1 << 20, |spec| spec.bytes);
        let offset = match client.random(4) {
            0 => client.random(GlobalAddr::MAX_OFFSET + 1),
            1 => (bytes + client.random(64)).saturating_sub(client.random(128)),
            _ => client.random(bytes),
        };
        let addr = GlobalAddr::new(server, region, offset.min(GlobalAddr::MAX_OFFSET));
        let len = match client.random(4) {
            0 => client.random_size(3),
            1 => size(bytes.saturating_sub(addr.offset())) + client.random_size(3),
            _ => client.random_size(200),
        };
        // Buffers for WRITEs stay small; READs name lengths that nobody allocates.
        let kind = KINDS[client.random_size(KINDS.len())];
        let mut verb = kind(client, addr, len.min(4096));
        if let (Verb::Read { len, .. }, 0) = (&mut verb, client.random(8)) {
            *len = usize::MAX - client.random_size(1 << 20);
        }
        let due = faults(client, &verb, server);
        let reads = matches!(verb, Verb::Read { .. });
        let mut batch = Batch::new(server);
        batch.push(verb);
        if !due.is_empty() {
            refuse(client, batch, 0, &due).await?;
        } else if reads {
            client.op().submit(batch).await?;
        }
        if round % 512 == 511 {
            untouched.check(client).await?;
        }
    }
    untouched.check(client).await
}
