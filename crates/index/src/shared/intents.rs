//! Intents: what a session writes down before it changes something that must not be left half done.
//!
//! An intent is a list of WRITEs, bound to *all* locks that its session holds while it carries them out. If the session dies, and
//! is fenced, and every one of the locks is still held by that very acquisition, then whoever recovers it carries them out once more.
//! What is written again is what the dead session wrote, or was about to write: nobody else could have come between. Then the
//! intent is ended, by CAS, and only after that are locks freed. So whoever recovers may die anywhere: the next one finds the
//! intent open and every lock held, or the intent ended.
//!
//! ```text
//! intent  +0   checksum       8 B   of all that follows, keyed by where the intent is
//!         +8   bytes          4 B   length of the whole | locks 2 B | WRITEs 2 B
//!         +16  locks                word 8, mask 8, held 8: by which bits the word shows that it is held
//!         ...  WRITEs               address 8, length 8, bytes padded to words
//! ```
//!
//! Intents live in the session's journal on the lock's server ([`INTENT_BYTES`] there), in granules of 64 bytes that all
//! indexes of the session share. One that is left over is harmless as long as its lock word does not come back; where it may (a
//! lock that is handed on, a word too small to be unique) the writer ends it: [`Slot::end_addr`].

use super::surely;
use crate::api::IndexError;
use farwood_fabric::control::{INTENT_BYTES, RETIRE_SLOTS};
use farwood_fabric::session::Estate;
use farwood_fabric::{FabricError, GlobalAddr, Op, ServerId, Session, marks};
use smallvec::SmallVec;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use xxhash_rust::xxh3::xxh3_64_with_seed;

const GRANULE: usize = 64;
const GRANULES: usize = 64;
const HEADER: usize = 16;
const LOCK: usize = 24;
/// How often room for an intent is looked for.
const MAX_WAITS: u32 = 100_000;
const WAIT_NS: u64 = 1_000;
const _: () = assert!((GRANULE * GRANULES) as u64 == INTENT_BYTES);

/// The room for intents in a session's journals. Cheap to clone, usable from any thread.
#[derive(Clone, Debug)]
pub struct Intents {
    session: Session,
    /// Per server, a bit for each granule in use.
    used: Arc<[AtomicU64]>,
}

/// Room for one intent; given back when dropped, so it is kept until nothing can be written to it any more
/// (`Behind` in `shared/locks`), and no intent in it is open.
#[derive(Debug)]
pub struct Slot {
    used: Arc<[AtomicU64]>,
    server: ServerId,
    mask: u64,
    addr: GlobalAddr,
}

/// What is to be done again if its author dies.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Redo {
    /// All locks that the author holds meanwhile.
    pub locks: SmallVec<[HeldWord; 3]>,
    /// The WRITEs, in order.
    pub writes: Vec<(GlobalAddr, Vec<u8>)>,
}

/// How a lock shows that its author holds it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HeldWord {
    /// The lock word.
    pub addr: GlobalAddr,
    /// The bits of it that are the lock's.
    pub mask: u64,
    /// What they are while the author holds it.
    pub word: u64,
}

impl Intents {
    /// The room that a session has.
    pub fn new(session: &Session) -> Self {
        Self { session: session.clone(), used: session.servers().iter().map(|_| AtomicU64::new(0)).collect() }
    }

    /// Room for `bytes` on `server`, if there is some just now.
    pub fn take(&self, server: ServerId, bytes: usize) -> Option<Slot> {
        let granules = bytes.div_ceil(GRANULE).max(1);
        let journal = self.session.journal(server)?;
        let wanted = u64::MAX >> GRANULES.checked_sub(granules)?;
        let place = |used: u64| first_run(!used, granules);
        let used = self.used.get(server.index())?;
        let before = used.fetch_update(Ordering::AcqRel, Ordering::Acquire, |used| {
            place(used).map(|first| used | wanted << first)
        });
        let first = place(before.ok()?)?;
        let addr = intents_of(journal).add((first * GRANULE) as u64);
        Some(Slot { used: Arc::clone(&self.used), server, mask: wanted << first, addr })
    }
}

impl Intents {
    /// Room for `bytes` on `server`; waits for it if others have it all, so it is not to be called under a lock: those who have the room may be
    /// waiting for that lock.
    pub async fn room(&self, op: &Op, server: ServerId, bytes: usize) -> Result<Slot, IndexError> {
        for _ in 0..MAX_WAITS {
            if let Some(slot) = self.take(server, bytes) {
                return Ok(slot);
            }
            op.endpoint().sleep(WAIT_NS).await;
        }
        Err(IndexError::Contended { what: "room for an intent", attempts: MAX_WAITS })
    }
}

impl Slot {
    /// Whether it is on `server` and has room for so many bytes.
    pub fn fits(&self, server: ServerId, bytes: usize) -> bool {
        self.server == server && bytes <= GRANULE * usize::try_from(self.mask.count_ones()).unwrap_or(0)
    }

    /// Where the intent goes.
    pub fn addr(&self) -> GlobalAddr {
        self.addr
    }

    /// The word that ends the intent when it is zeroed.
    pub fn end_addr(&self) -> GlobalAddr {
        self.addr
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if let Some(used) = self.used.get(self.server.index()) {
            used.fetch_and(!self.mask, Ordering::AcqRel);
        }
    }
}

/// Where the first run of so many set bits begins.
fn first_run(bits: u64, length: usize) -> Option<usize> {
    // Bits where runs of `known` begin.
    let (mut runs, mut known) = (bits, 1);
    while known < length {
        let more = known.min(length - known);
        runs &= runs >> more;
        known += more;
    }
    (runs != 0).then(|| runs.trailing_zeros() as usize)
}

fn intents_of(journal: GlobalAddr) -> GlobalAddr {
    journal.add(RETIRE_SLOTS * 8)
}

impl Redo {
    /// How many bytes it takes.
    pub fn encoded_bytes(&self) -> usize {
        let writes = self.writes.iter().map(|(_, bytes)| encoded_write_bytes(bytes.len()));
        HEADER + self.locks.len() * LOCK + writes.sum::<usize>()
    }

    /// Its bytes, for this place.
    pub fn encode(&self, at: GlobalAddr) -> Vec<u8> {
        let writes = self.writes.iter().map(|(addr, bytes)| (*addr, bytes.as_slice()));
        encode(&self.locks, self.encoded_bytes(), writes, at)
    }

    /// How many bytes an intent of one WRITE of so many bytes under one lock takes.
    pub fn encoded_bytes_of_one(bytes: usize) -> usize {
        Self::encoded_bytes_of([bytes])
    }

    /// The same of several WRITEs.
    pub fn encoded_bytes_of(bytes: impl IntoIterator<Item = usize>) -> usize {
        HEADER + LOCK + bytes.into_iter().map(encoded_write_bytes).sum::<usize>()
    }

    /// The bytes of an intent of some WRITEs, under one lock, for this place.
    pub fn encode_under<'a>(
        lock: HeldWord,
        writes: impl ExactSizeIterator<Item = (GlobalAddr, &'a [u8])> + Clone,
        at: GlobalAddr,
    ) -> Vec<u8> {
        let bytes = Self::encoded_bytes_of(writes.clone().map(|(_, bytes)| bytes.len()));
        encode(&[lock], bytes, writes, at)
    }

    /// The intent at the start of `bytes`, if there is a whole one.
    pub fn decode(bytes: &[u8], at: GlobalAddr) -> Option<Self> {
        let word = |at: usize| bytes.get(at..at + 8)?.try_into().ok().map(u64::from_le_bytes);
        let sizes = word(8)?;
        let len = usize::try_from(sizes >> 32).ok()?;
        let (locks, writes) = (sizes >> 16 & 0xffff, sizes & 0xffff);
        let whole = bytes.get(8..len)?;
        if len < HEADER || locks == 0 || xxh3_64_with_seed(whole, at.to_raw()) != word(0)? {
            return None;
        }
        let mut from = HEADER;
        let mut redo = Self { locks: SmallVec::new(), writes: Vec::new() };
        for _ in 0..locks {
            let addr = GlobalAddr::from_raw(word(from)?);
            redo.locks.push(HeldWord { addr, mask: word(from + 8)?, word: word(from + 16)? });
            from += LOCK;
        }
        for _ in 0..writes {
            let (addr, len) = (word(from)?, usize::try_from(word(from + 8)?).ok()?);
            redo.writes.push((GlobalAddr::from_raw(addr), bytes.get(from + 16..from + 16 + len)?.to_vec()));
            from += 16 + len.div_ceil(8) * 8;
        }
        Some(redo)
    }
}

fn encoded_write_bytes(bytes: usize) -> usize {
    16 + bytes.next_multiple_of(8)
}

fn encode<'a>(
    locks: &[HeldWord],
    bytes: usize,
    writes: impl ExactSizeIterator<Item = (GlobalAddr, &'a [u8])>,
    at: GlobalAddr,
) -> Vec<u8> {
    let mut out = Vec::with_capacity(bytes);
    let sizes = (bytes as u64) << 32 | (locks.len() as u64) << 16 | writes.len() as u64;
    for word in [0, sizes] {
        out.extend_from_slice(&word.to_le_bytes());
    }
    for lock in locks {
        for word in [lock.addr.to_raw(), lock.mask, lock.word] {
            out.extend_from_slice(&word.to_le_bytes());
        }
    }
    for (addr, bytes) in writes {
        out.extend_from_slice(&addr.to_raw().to_le_bytes());
        out.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
        out.extend_from_slice(bytes);
        out.resize(out.len().next_multiple_of(8), 0);
    }
    let checksum = xxh3_64_with_seed(&out[8..], at.to_raw());
    out[..8].copy_from_slice(&checksum.to_le_bytes());
    out
}

/// Carries out again what a fenced session was in the middle of, and ends it. Before its locks are freed.
pub async fn replay(op: &Op, estate: &Estate) -> Result<(), FabricError> {
    for journal in &estate.journals {
        let base = intents_of(*journal);
        let bytes = surely::read(op, base, GRANULE * GRANULES).await?;
        for granule in 0..GRANULES {
            let at = base.add((granule * GRANULE) as u64);
            let intent = &bytes[granule * GRANULE..];
            let Some(redo) = Redo::decode(intent, at) else { continue };
            let held = count_held(op, &redo.locks).await?;
            if held < redo.locks.len() {
                if held > 0 {
                    // Not where intents are ended before the first lock is given back.
                    marks::hit("intent_held_in_part");
                }
                continue;
            }
            marks::hit("intent_carried_out");
            if held > 1 {
                marks::hit("intent_of_several_locks_carried_out");
            }
            for (addr, data) in &redo.writes {
                surely::write(op, *addr, data).await?;
            }
            marks::hit("adopt_intent_written");
            surely::clear_word(op, at, bytes.word(granule * GRANULE)).await?;
        }
    }
    Ok(())
}

/// How many locks are held by the acquisition that the intent names.
async fn count_held(op: &Op, locks: &[HeldWord]) -> Result<usize, FabricError> {
    let mut held = 0;
    for lock in locks {
        held += usize::from(surely::read_word(op, lock.addr).await? & lock.mask == lock.word);
    }
    Ok(held)
}

#[cfg(test)]
mod tests {
    use super::*;
    use farwood_fabric::RegionId;
    use smallvec::smallvec;

    #[test]
    fn the_first_run_that_is_long_enough_is_found() {
        for length in 1..=GRANULES {
            let run = u64::MAX >> (GRANULES - length);
            for at in 0..=GRANULES - length {
                assert_eq!(first_run(run << at, length), Some(at));
                assert_eq!(first_run(run << at & !(1 << at), length), None, "{length} at {at}, but one");
            }
        }
        assert_eq!(first_run(0b0111_0110_1101, 3), Some(8));
        assert_eq!(first_run(0, 1), None);
    }

    fn redo() -> Redo {
        let at = |offset| GlobalAddr::new(ServerId::new(2), RegionId::MAIN, offset);
        Redo {
            locks: smallvec![
                HeldWord { addr: at(80), mask: 0xffff, word: 7 },
                HeldWord { addr: at(96), mask: u64::MAX, word: 1 << 48 },
            ],
            writes: vec![(at(4096), vec![1]), (at(8192), (0..90).collect()), (at(64), Vec::new())],
        }
    }

    #[test]
    fn an_intent_is_read_back_only_whole_and_where_it_was_written() {
        let here = GlobalAddr::new(ServerId::new(1), RegionId::BOARD, 4096);
        let bytes = redo().encode(here);
        assert_eq!(bytes.len(), redo().encoded_bytes());
        assert_eq!(Redo::decode(&bytes, here), Some(redo()));
        assert_eq!(Redo::decode(&bytes, here.add(64)), None);
        for at in 0..bytes.len() {
            let mut torn = bytes.clone();
            torn[at] ^= 1;
            assert_eq!(Redo::decode(&torn, here), None, "byte {at}");
            assert_eq!(Redo::decode(&bytes[..at], here), None);
        }
        assert_eq!(Redo::decode(&[0; 4096], here), None);
        let lock = redo().locks[0];
        for count in 1..=3 {
            let some = Redo { locks: smallvec![lock], writes: redo().writes[..count].to_vec() };
            let writes = some.writes.iter().map(|(addr, bytes)| (*addr, bytes.as_slice()));
            assert_eq!(Redo::encode_under(lock, writes, here), some.encode(here));
        }
        assert_eq!(Redo::encoded_bytes_of_one(90), HEADER + LOCK + 16 + 96);
    }
}
