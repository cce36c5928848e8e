//! Keys that this thread has given a time to live: they are removed when that is over, whoever asks for them.
//!
//! A set of keys for each second of the pool's time, so that a key which is set again and again is there once a second at most. Deadlines
//! come and go in memory of a fixed size; where it does not suffice the latest are forgotten, and the sweep finds those keys, as it finds
//! those of gateways that are gone. The sets' hashes are seeded, since clients choose the keys.

use super::Shard;
use crate::command::Refused;
use crate::envelope::{self, Millis};
use crate::store::Store;
use farwood_fabric::clock::MILLISECOND;
use farwood_index::OrderedIndex;
use std::cell::RefCell;
use std::collections::{BTreeMap, HashSet};
use std::rc::Rc;

/// Memory for deadlines of all threads.
const ALL_BYTES: usize = 32 << 20;
/// What an entry costs beside its key.
const ENTRY_BYTES: usize = 48;
const SECOND_MS: Millis = 1_000;
/// How often it is looked what has expired.
const LOOK_NS: u64 = 100 * MILLISECOND;
/// So many keys are removed before others get a turn.
const BATCH: usize = 256;

/// Keys by the second after which they have expired.
#[derive(Debug)]
pub(crate) struct Deadlines {
    seconds: RefCell<Seconds>,
}

#[derive(Debug)]
struct Seconds {
    keys: BTreeMap<Millis, HashSet<Box<[u8]>>>,
    bytes: usize,
    most_bytes: usize,
}

impl Deadlines {
    /// None yet, for one of so many threads.
    pub(super) fn new(threads: usize) -> Self {
        let most_bytes = ALL_BYTES / threads.max(1);
        Self { seconds: RefCell::new(Seconds { keys: BTreeMap::new(), bytes: 0, most_bytes }) }
    }

    /// A key expires at this time.
    pub(crate) fn note(&self, key: &[u8], at: Millis) {
        let mut seconds = self.seconds.borrow_mut();
        let second = at / SECOND_MS;
        seconds.add(second, key);
        while seconds.bytes > seconds.most_bytes {
            seconds.forget_latest();
        }
    }

    /// Up to so many keys that have expired by now.
    fn due(&self, now: Millis, most: usize) -> Vec<Box<[u8]>> {
        let mut seconds = self.seconds.borrow_mut();
        let mut due = Vec::new();
        while due.len() < most {
            // All of a second are over when it is.
            let Some(mut entry) = seconds.keys.first_entry().filter(|entry| *entry.key() < now / SECOND_MS)
            else {
                break;
            };
            let left = most - due.len();
            if entry.get().len() <= left {
                due.extend(entry.remove());
            } else {
                let some: Vec<_> = entry.get().iter().take(left).cloned().collect();
                for key in &some {
                    entry.get_mut().remove(key);
                }
                due.extend(some);
            }
        }
        seconds.bytes -= due.iter().map(|key| key.len() + ENTRY_BYTES).sum::<usize>();
        due
    }
}

impl Seconds {
    fn add(&mut self, second: Millis, key: &[u8]) {
        let is_full = self.bytes + key.len() + ENTRY_BYTES > self.most_bytes;
        if is_full && self.keys.last_key_value().is_none_or(|(latest, _)| *latest <= second) {
            // It would be forgotten at once.
            return;
        }
        let keys = self.keys.entry(second).or_default();
        if !keys.contains(key) {
            keys.insert(key.into());
            self.bytes += key.len() + ENTRY_BYTES;
        }
    }

    /// Forgets some keys of the latest second: to find one in a set that was emptied from the front takes as long as to find many.
    fn forget_latest(&mut self) {
        let Some(mut entry) = self.keys.last_entry() else { return };
        let some: Vec<_> = entry.get().iter().take(BATCH).cloned().collect();
        for key in &some {
            entry.get_mut().remove(key);
            self.bytes -= key.len() + ENTRY_BYTES;
        }
        if entry.get().is_empty() {
            entry.remove();
        }
    }
}

/// Removes keys whose time is over, until the session ends.
pub(super) async fn remove_due<S: Store>(shard: Rc<Shard<S>>) {
    while !shard.stop.is_set() {
        shard.sleep(LOOK_NS).await;
        loop {
            let due = shard.deadlines.due(shard.common.surely_ms(), BATCH);
            // Whatever fails, the sweep finds the keys.
            let removed = shard.remove_expired(due.iter().map(|key| &**key)).await;
            if due.is_empty() || removed.is_err() || shard.stop.is_set() {
                break;
            }
            shard.executor.yield_now().await;
        }
    }
}

impl<S: Store> Shard<S> {
    /// Removes those of some keys that have expired; how many.
    pub(super) async fn remove_expired<'a>(
        &self,
        keys: impl Iterator<Item = &'a [u8]>,
    ) -> Result<usize, Refused> {
        let work = async |key: &[u8]| {
            let handle = self.handle()?;
            let Some(stored) = handle.get(key).await? else { return Ok(false) };
            let has_expired = envelope::open(&stored).has_expired(self.common.surely_ms());
            if has_expired {
                self.bury(&handle, key, &stored).await?;
            }
            Ok(has_expired)
        };
        let removed = self.count_keys(keys, work).await?;
        self.common.scarcity.removed(removed as u64);
        Ok(removed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::hash::BuildHasher;

    fn names(keys: &[Box<[u8]>]) -> Vec<&[u8]> {
        let mut names: Vec<_> = keys.iter().map(|key| &**key).collect();
        names.sort_unstable();
        names
    }

    #[test]
    fn keys_are_due_when_their_second_is_over() {
        let deadlines = Deadlines::new(1);
        for (key, at) in [(b"a", 1_000), (b"b", 1_999), (b"c", 2_000), (b"a", 1_500), (b"a", 5_000)] {
            deadlines.note(key, at);
        }
        assert!(deadlines.due(1_999, 10).is_empty());
        assert_eq!(names(&deadlines.due(2_000, 10)), [b"a", b"b"]);
        assert_eq!(deadlines.due(10_000, 1).len(), 1);
        assert_eq!(names(&deadlines.due(10_000, 10)), [b"a"]);
        assert_eq!(deadlines.seconds.borrow().bytes, 0);
    }

    #[test]
    fn times_at_the_end_of_all_time_are_never_over() {
        let deadlines = Deadlines::new(1);
        for at in [Millis::MAX, Millis::MAX - 1_000] {
            deadlines.note(b"key", at);
        }
        assert!(deadlines.due(Millis::MAX - 2_000, 10).is_empty());
    }

    #[test]
    fn keys_that_were_chosen_to_collide_do_not() {
        let seed = 0x243f_6a88_85a3_08d3_u64;
        let deadlines = Deadlines::new(1);
        let key = |n: u64| [seed.to_le_bytes(), n.to_le_bytes()].concat();
        for n in 0..1000 {
            deadlines.note(&key(n), 5_000);
        }
        let seconds = deadlines.seconds.borrow();
        let keys = &seconds.keys[&5];
        let hashes: HashSet<u64> = keys.iter().map(|key| keys.hasher().hash_one(key)).collect();
        assert!(hashes.len() > 990);
    }

    #[test]
    fn the_latest_are_forgotten_where_memory_does_not_suffice() {
        let deadlines = Deadlines::new(1);
        let many = ALL_BYTES / (ENTRY_BYTES + 8);
        for n in 0..3 * many as u64 {
            deadlines.note(&n.to_be_bytes(), i64::try_from(n).expect("few"));
        }
        assert!(deadlines.seconds.borrow().bytes <= ALL_BYTES);
        let due = deadlines.due(Millis::MAX / 2, usize::MAX);
        assert!(
            due.len() >= many - 1
                && due.iter().all(
                    |key| u64::from_be_bytes(key[..].try_into().expect("8")) / 1000 <= many as u64 / 1000
                )
        );
    }
}
