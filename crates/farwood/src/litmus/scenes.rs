//! Races of one writer with readers, on one block of far memory.
//!
//! Client 0 writes versions 1, 2, 3, ... as fast as it can; the others look until their time or count is up. What each scene
//! writes and how it looks:
//!
//! | scene | the writer | a reader |
//! |---|---|---|
//! | `Block` | one WRITE of the block | one READ of it: are words and lines whole? |
//! | `WriteOrder` | one WRITE of the block | the last word, then the block: a WRITE that goes from the first line to the last left nothing older behind |
//! | `ReadOrder` | up to 8 lines, the last first, in one ordered batch | one READ of the block: a READ that goes from the first line to the last never sees versions fall |
//! | `Message` | data, then a flag, in one batch | the flag, then the data: never older than the flag |
//! | `Sealed` | one WRITE of an object with a keyed checksum | one READ: what is accepted is of one version |

use super::judge::{Count, Look, ascending, version_of, word_of, words_of};
use crate::arena::Arena;
use crate::fleet::{Fleet, Meeting, all, with_session};
use farwood_fabric::clock::Nanos;
use farwood_fabric::{Batch, Buf, Endpoint, FabricError, GlobalAddr, Op};
use farwood_index::shared::whole::{HEADER_BYTES, Place};
use std::sync::Arc;

/// Where flags and counters are, and where the data begins: far apart, so that nothing shares a line.
pub(super) const FLAG_AT: u64 = 0;
pub(super) const COUNTER_AT: u64 = 1024;
pub(super) const DATA_AT: u64 = 4096;
/// Bytes of a message.
const MESSAGE_BYTES: usize = 512;
/// How many lines of a block the writer of `ReadOrder` writes.
const MARKS: usize = 8;
/// So often a client lets its other tasks run.
pub(super) const YIELD_EVERY: u64 = 64;

/// How much far memory scenes with blocks of up to `bytes` need on one server.
pub(super) fn arena_bytes(bytes: usize) -> u64 {
    DATA_AT + bytes.max(MESSAGE_BYTES) as u64
}

/// When a client has seen enough.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    /// After so many observations...
    pub(super) rounds: u64,
    /// ...or after so long, whichever comes first.
    pub(super) span_ns: Nanos,
}

/// How a message is published.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Publish {
    /// WRITE data, WRITE flag.
    WriteWrite,
    /// WRITE data, FAA flag.
    WriteFaa,
    /// FAA of a counter, then, behind a fence, WRITE flag.
    FaaWrite,
    /// WRITE data and WRITE flag in two batches posted together, which have no order.
    TwoBatches,
}

/// What is raced for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Scene {
    Block { bytes: usize },
    WriteOrder { bytes: usize },
    ReadOrder { bytes: usize },
    Message { publish: Publish, reads_in_one_batch: bool },
    Sealed { bytes: usize },
}

/// What readers saw.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Seen {
    /// Of words.
    pub(super) words: Count,
    /// Of what the scene is about.
    pub(super) count: Count,
    /// Objects that were torn, and refused.
    pub(super) torn: u64,
}

impl Seen {
    pub(super) fn add(&mut self, other: Self) {
        self.words += other.words;
        self.count += other.count;
        self.torn += other.torn;
    }
}

/// Runs a scene with one writer and `clients - 1` readers.
pub(super) fn race(
    fleet: &Fleet,
    arena: &Arena,
    clients: u32,
    bounds: Bounds,
    scene: Scene,
) -> Result<Seen, String> {
    let (meeting, options) = (Meeting::of(clients), fleet.options("litmus"));
    let seen = all(fleet.run(clients, |index, cluster| {
        let (arena, meeting) = (arena.clone(), Arc::clone(&meeting));
        async move {
            let body = async |meeting: &Meeting| {
                with_session(&cluster, options, async |endpoint| {
                    let stage = Stage { scene, arena, endpoint: endpoint.clone() };
                    if index == 0 {
                        stage.write_until_all_have_seen(clients - 1, meeting).await
                    } else {
                        stage.look_around(bounds, meeting).await
                    }
                })
                .await
            };
            meeting.attend(body).await
        }
    }))?;
    let mut sum = Seen::default();
    for seen in seen {
        sum.add(seen);
    }
    Ok(sum)
}

struct Stage {
    scene: Scene,
    arena: Arena,
    endpoint: Endpoint,
}

impl Stage {
    fn flag(&self) -> GlobalAddr {
        self.arena.at(0, FLAG_AT)
    }

    fn data(&self) -> GlobalAddr {
        self.arena.at(0, DATA_AT)
    }

    async fn write_until_all_have_seen(&self, readers: u32, meeting: &Meeting) -> Result<Seen, String> {
        let failed = |error: FabricError| format!("the writer failed: {error}");
        self.begin().await.map_err(failed)?;
        meeting.gather(&self.endpoint, 1).await?;
        let mut version = 0;
        while meeting.done() < readers {
            meeting.check()?;
            version += 1;
            self.write(version).await.map_err(failed)?;
            if u64::from(version) % YIELD_EVERY == 0 {
                self.endpoint.yield_now().await;
            }
        }
        Ok(Seen::default())
    }

    /// Version 0, everywhere.
    async fn begin(&self) -> Result<(), FabricError> {
        let op = self.endpoint.op();
        for at in [FLAG_AT, COUNTER_AT] {
            op.write_word(self.arena.at(0, at), 0).await?;
        }
        if matches!(self.scene, Scene::ReadOrder { .. } | Scene::Message { .. }) {
            op.write(self.data(), self.filled(self.bytes(), 0)).await
        } else {
            self.write(0).await
        }
    }

    fn bytes(&self) -> usize {
        match self.scene {
            Scene::Block { bytes }
            | Scene::WriteOrder { bytes }
            | Scene::ReadOrder { bytes }
            | Scene::Sealed { bytes } => bytes,
            Scene::Message { .. } => MESSAGE_BYTES,
        }
    }

    /// A buffer of which every word is of `version`.
    fn filled(&self, bytes: usize, version: u32) -> Buf {
        let mut buf = self.endpoint.buf(bytes);
        for word in buf.chunks_exact_mut(8) {
            word.copy_from_slice(&word_of(version).to_le_bytes());
        }
        buf
    }

    async fn write(&self, version: u32) -> Result<(), FabricError> {
        let op = self.endpoint.op();
        match self.scene {
            Scene::Block { bytes } | Scene::WriteOrder { bytes } => {
                op.write(self.data(), self.filled(bytes, version)).await
            }
            Scene::ReadOrder { bytes } => {
                let mut batch = Batch::new(self.data().server());
                for at in marks(bytes).into_iter().rev() {
                    batch.write_word(self.data().add(at as u64), word_of(version));
                }
                op.submit(batch).await?;
                Ok(())
            }
            Scene::Message { publish, .. } => self.publish(&op, publish, version).await,
            Scene::Sealed { bytes } => {
                let mut object = self.filled(bytes, version);
                self.place().seal(version.into(), &mut object);
                op.write(self.data(), object).await
            }
        }
    }

    fn place(&self) -> Place {
        Place { index: self.arena.index, addr: self.data() }
    }

    async fn publish(&self, op: &Op, publish: Publish, version: u32) -> Result<(), FabricError> {
        let (flag, number) = (self.flag(), u64::from(version));
        let mut batch = Batch::new(flag.server());
        let message = |batch: &mut Batch| batch.write(self.data(), self.filled(MESSAGE_BYTES, version));
        match publish {
            Publish::WriteWrite => {
                message(&mut batch);
                batch.write_word(flag, number);
            }
            Publish::WriteFaa => {
                message(&mut batch);
                // From 0 by 1, so the flag is the version.
                batch.faa(flag, 1);
            }
            Publish::FaaWrite => {
                batch.faa(self.arena.at(0, COUNTER_AT), 1);
                batch.write_word(flag, number);
            }
            Publish::TwoBatches => {
                message(&mut batch);
                let first = op.post(batch);
                let mut second = Batch::new(flag.server());
                second.write_word(flag, number);
                op.submit(second).await?;
                first.await?;
                return Ok(());
            }
        }
        op.submit(batch).await?;
        Ok(())
    }

    async fn look_around(&self, bounds: Bounds, meeting: &Meeting) -> Result<Seen, String> {
        meeting.gather(&self.endpoint, 1).await?;
        let deadline = self.endpoint.now().saturating_add(bounds.span_ns);
        let mut seen = Seen::default();
        let mut last = 0;
        let mut rounds = 0;
        while rounds < bounds.rounds && self.endpoint.now() < deadline {
            meeting.check()?;
            let look = self.look(&mut last).await.map_err(|error| format!("a reader failed: {error}"))?;
            seen.add(look);
            rounds += 1;
            if rounds % YIELD_EVERY == 0 {
                self.endpoint.yield_now().await;
            }
        }
        meeting.finish();
        Ok(seen)
    }

    /// One observation. `last`: the version that the one before brought.
    async fn look(&self, last: &mut u32) -> Result<Seen, FabricError> {
        let op = self.endpoint.op();
        let mut seen = Seen::default();
        match self.scene {
            Scene::Block { bytes } => {
                let look = Look::at(&op.read(self.data(), bytes).await?);
                (seen.words, seen.count) = (look.words(), look.lines(bytes, *last));
                *last = look.newest;
            }
            Scene::WriteOrder { bytes } => {
                let one_batch = self.endpoint.capabilities().ordered_reads;
                let end = self.data().add(bytes as u64 - 8);
                let (word, block) = read_two(&op, end, (self.data(), bytes), one_batch).await?;
                let promised = version_of(word).unwrap_or(0);
                seen.count = Look::at(&block).at_least(promised, *last);
                *last = promised;
            }
            Scene::ReadOrder { bytes } => {
                let block = op.read(self.data(), bytes).await?;
                let versions: Vec<_> =
                    marks(bytes).into_iter().map(|at| version_of(block.word(at))).collect();
                seen.count = ascending(&versions);
            }
            Scene::Message { publish, reads_in_one_batch } => {
                let (promised, look) = self.receive(&op, publish, reads_in_one_batch).await?;
                seen.count = look.at_least(promised, *last);
                *last = promised;
            }
            Scene::Sealed { bytes } => {
                let object = op.read(self.data(), bytes).await?;
                (seen.count, seen.torn) = accepted(self.place(), &object);
            }
        }
        Ok(seen)
    }

    /// The flag, and what the data shows.
    async fn receive(&self, op: &Op, publish: Publish, one_batch: bool) -> Result<(u32, Look), FabricError> {
        let version = |word| u32::try_from(word).unwrap_or(u32::MAX);
        if publish == Publish::FaaWrite {
            let counter = (self.arena.at(0, COUNTER_AT), 8);
            let (flag, counted) = read_two(op, self.flag(), counter, one_batch).await?;
            return Ok((version(flag), Look::at(&word_of(version(counted.word(0))).to_le_bytes())));
        }
        let (flag, message) = read_two(op, self.flag(), (self.data(), MESSAGE_BYTES), one_batch).await?;
        Ok((version(flag), Look::at(&message)))
    }
}

/// READ of a word, then of a block: in one batch, or one after the other.
async fn read_two(
    op: &Op,
    word: GlobalAddr,
    (block, bytes): (GlobalAddr, usize),
    one_batch: bool,
) -> Result<(u64, Buf), FabricError> {
    if !one_batch {
        return Ok((op.read_word(word).await?, op.read(block, bytes).await?));
    }
    let mut batch = Batch::new(word.server());
    batch.read(word, 8);
    batch.read(block, bytes);
    let mut completed = op.submit(batch).await?;
    Ok((completed.take(0).word(0), completed.take(1)))
}

/// The lines of a block that the writer of `ReadOrder` writes, as offsets: spread evenly, the first and the last among them.
fn marks(bytes: usize) -> Vec<usize> {
    let lines = (bytes / 64).max(1);
    let marks = MARKS.min(lines);
    (0..marks).map(|n| if n == 0 { 0 } else { n * (lines - 1) / (marks - 1) * 64 }).collect()
}

/// Whether what a checksum accepts is of one version; and whether it refused.
fn accepted(place: Place, object: &[u8]) -> (Count, u64) {
    match place.version_if_whole(object) {
        Some(version) => {
            let payload = object.get(HEADER_BYTES..).unwrap_or_default();
            let whole = words_of(payload).all(|word| version_of(word).map(u64::from) == Some(version));
            (Count::one(false, !whole), 0)
        }
        None => (Count::one(true, false), 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farwood_fabric::{RegionId, ServerId};

    #[test]
    fn marks_are_lines_from_the_first_to_the_last() {
        assert_eq!(marks(64), [0]);
        assert_eq!(marks(256), [0, 64, 128, 192]);
        let many = marks(65536);
        assert_eq!((many.len(), many[0], many[7]), (8, 0, 65536 - 64));
        assert!(many.windows(2).all(|pair| pair[0] < pair[1]) && many.iter().all(|at| at % 64 == 0));
    }

    #[test]
    fn a_checksum_that_accepts_two_versions_is_caught() {
        let place = Place { index: 3, addr: GlobalAddr::new(ServerId::new(0), RegionId::MAIN, 4096) };
        let sealed = |payload: [u32; 2]| {
            let mut object = vec![0; HEADER_BYTES];
            object.extend(payload.iter().flat_map(|version| word_of(*version).to_le_bytes()));
            place.seal(5, &mut object);
            object
        };
        let count = |chances, violations| Count { observations: 1, chances, violations };
        assert_eq!(accepted(place, &sealed([5, 5])), (count(0, 0), 0));
        // As a checksum too weak would do: accepted, though half of it is of another version.
        assert_eq!(accepted(place, &sealed([5, 4])), (count(1, 1), 0));
        let mut torn = sealed([5, 5]);
        torn[HEADER_BYTES] ^= 1;
        assert_eq!(accepted(place, &torn), (count(1, 0), 1));
    }
}
