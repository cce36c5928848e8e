//! What engines are compared with: a sharded `BTreeMap` in this process's memory, and an index that does nothing.
//!
//! `btreemap` is the simplest correct ordered index that a user could write: keys are spread over shards by hash, each a
//! `BTreeMap` behind a lock; a scan asks all shards and merges. It knows no far memory, so it runs on `local` only. `null` answers
//! everything with nothing at once; what it costs is what the bench itself costs.

use farwood_fabric::{Endpoint, GlobalAddr};
use farwood_index::shared::heap::Class;
use farwood_index::{Engine, IndexError, KeyValue, OrderedIndex, Pool};
use rustc_hash::FxHasher;
use std::collections::BTreeMap;
use std::hash::Hasher;
use std::ops::Bound;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What a map spends on an entry beside its key and value: two pointers-with-lengths, and the node's slack.
const ENTRY_BYTES: u64 = 64;

/// The sharded map.
#[derive(Clone, Debug)]
pub(super) struct ShardedMap {
    shards: Arc<[Mutex<Shard>]>,
}

type Shard = BTreeMap<Vec<u8>, Vec<u8>>;

impl ShardedMap {
    pub(super) const DEFAULT_SHARDS: usize = 64;

    pub(super) fn new(shards: usize) -> Self {
        Self { shards: (0..shards.max(1)).map(|_| Mutex::default()).collect() }
    }

    fn lock(&self, key: &[u8]) -> MutexGuard<'_, Shard> {
        let mut hasher = FxHasher::default();
        hasher.write(key);
        // The hasher's upper half is the better one.
        let shard = usize::try_from(hasher.finish() >> 32).unwrap_or(0) % self.shards.len();
        self.shards[shard].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, key: &[u8], decide: impl FnOnce(Option<&Vec<u8>>) -> Option<Option<Vec<u8>>>) -> bool {
        let mut shard = self.lock(key);
        let Some(new) = decide(shard.get(key)) else { return false };
        match new {
            Some(value) => drop(shard.insert(key.to_vec(), value)),
            None => drop(shard.remove(key)),
        }
        true
    }
}

impl Engine for ShardedMap {
    type Attached = ();
    type Index = Self;

    fn name(&self) -> &'static str {
        "btreemap"
    }

    async fn create(&self, _: &Pool, _: &Endpoint, _: &str) -> Result<(), IndexError> {
        Ok(())
    }

    async fn attach(&self, _: &Pool, _: &Endpoint, _: &str) -> Result<(), IndexError> {
        Ok(())
    }

    fn open(&self, (): &(), _: &Endpoint, _: u16) -> Result<Self, IndexError> {
        Ok(self.clone())
    }

    async fn check(&self, (): &(), _: &Endpoint) -> Result<Vec<(Class, GlobalAddr)>, IndexError> {
        Ok(Vec::new())
    }

    async fn extents(&self, (): &(), _: &Endpoint) -> Result<Vec<GlobalAddr>, IndexError> {
        Ok(Vec::new())
    }

    fn own_memory_bytes(&self, (): &()) -> Option<u64> {
        let of_shard = |shard: &Mutex<Shard>| {
            let shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            let entry = |(key, value): (&Vec<u8>, &Vec<u8>)| (key.len() + value.len()) as u64 + ENTRY_BYTES;
            shard.iter().map(entry).sum::<u64>()
        };
        Some(self.shards.iter().map(of_shard).sum())
    }
}

impl OrderedIndex for ShardedMap {
    async fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, IndexError> {
        Ok(self.lock(key).get(key).cloned())
    }

    async fn put(&self, key: &[u8], value: &[u8]) -> Result<(), IndexError> {
        let mut shard = self.lock(key);
        match shard.get_mut(key) {
            Some(held) => {
                held.clear();
                held.extend_from_slice(value);
            }
            None => drop(shard.insert(key.to_vec(), value.to_vec())),
        }
        Ok(())
    }

    async fn compare_and_swap(
        &self,
        key: &[u8],
        expected: Option<&[u8]>,
        new: Option<&[u8]>,
    ) -> Result<bool, IndexError> {
        Ok(self.change(key, |held| (held.map(Vec::as_slice) == expected).then(|| new.map(<[u8]>::to_vec))))
    }

    async fn put_if_absent(&self, key: &[u8], value: &[u8]) -> Result<bool, IndexError> {
        self.compare_and_swap(key, None, Some(value)).await
    }

    async fn update_if_present(&self, key: &[u8], value: &[u8]) -> Result<bool, IndexError> {
        Ok(self.change(key, |held| held.map(|_| Some(value.to_vec()))))
    }

    async fn delete(&self, key: &[u8]) -> Result<bool, IndexError> {
        Ok(self.lock(key).remove(key).is_some())
    }

    async fn scan(
        &self,
        start: Bound<&[u8]>,
        end: Bound<&[u8]>,
        limit: usize,
        reverse: bool,
    ) -> Result<Vec<KeyValue>, IndexError> {
        if is_empty_range(start, end) {
            return Ok(Vec::new());
        }
        let mut found: Vec<KeyValue> = Vec::new();
        for shard in self.shards.iter() {
            let shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            let pairs = shard.range::<[u8], _>((start, end)).map(|(key, value)| (key.clone(), value.clone()));
            if reverse {
                found.extend(pairs.rev().take(limit));
            } else {
                found.extend(pairs.take(limit));
            }
        }
        found.sort_unstable_by(|a, b| if reverse { b.cmp(a) } else { a.cmp(b) });
        found.truncate(limit);
        Ok(found)
    }
}

/// Whether no key can be between the bounds; `BTreeMap::range` would panic on some of these.
fn is_empty_range(start: Bound<&[u8]>, end: Bound<&[u8]>) -> bool {
    match (start, end) {
        (Bound::Included(start), Bound::Included(end)) => start > end,
        (Bound::Included(start) | Bound::Excluded(start), Bound::Included(end) | Bound::Excluded(end)) => {
            start >= end
        }
        _ => false,
    }
}

/// An index that does nothing, at once.
#[derive(Clone, Default, Debug)]
pub(super) struct Nothing {
    /// So that not everything can be optimised away.
    asked: Arc<AtomicU64>,
}

impl Engine for Nothing {
    type Attached = ();
    type Index = NothingHandle;

    fn name(&self) -> &'static str {
        "null"
    }

    async fn create(&self, _: &Pool, _: &Endpoint, _: &str) -> Result<(), IndexError> {
        Ok(())
    }

    async fn attach(&self, _: &Pool, _: &Endpoint, _: &str) -> Result<(), IndexError> {
        Ok(())
    }

    fn open(&self, (): &(), _: &Endpoint, _: u16) -> Result<NothingHandle, IndexError> {
        Ok(NothingHandle { asked: std::cell::Cell::new(0), sum: Arc::clone(&self.asked) })
    }

    async fn check(&self, (): &(), _: &Endpoint) -> Result<Vec<(Class, GlobalAddr)>, IndexError> {
        Ok(Vec::new())
    }

    async fn extents(&self, (): &(), _: &Endpoint) -> Result<Vec<GlobalAddr>, IndexError> {
        Ok(Vec::new())
    }

    fn own_memory_bytes(&self, (): &()) -> Option<u64> {
        Some(0)
    }
}

/// One task's access to nothing.
#[derive(Debug)]
pub(super) struct NothingHandle {
    asked: std::cell::Cell<u64>,
    sum: Arc<AtomicU64>,
}

impl NothingHandle {
    fn ask(&self, key: &[u8]) {
        self.asked.set(self.asked.get() + key.len() as u64);
    }
}

impl Drop for NothingHandle {
    fn drop(&mut self) {
        self.sum.fetch_add(self.asked.get(), Ordering::Relaxed);
    }
}

impl OrderedIndex for NothingHandle {
    async fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, IndexError> {
        self.ask(key);
        Ok(None)
    }

    async fn put(&self, key: &[u8], _: &[u8]) -> Result<(), IndexError> {
        self.ask(key);
        Ok(())
    }

    async fn compare_and_swap(
        &self,
        key: &[u8],
        _: Option<&[u8]>,
        _: Option<&[u8]>,
    ) -> Result<bool, IndexError> {
        self.ask(key);
        Ok(true)
    }

    async fn put_if_absent(&self, key: &[u8], _: &[u8]) -> Result<bool, IndexError> {
        self.ask(key);
        Ok(true)
    }

    async fn update_if_present(&self, key: &[u8], _: &[u8]) -> Result<bool, IndexError> {
        self.ask(key);
        Ok(true)
    }

    async fn delete(&self, key: &[u8]) -> Result<bool, IndexError> {
        self.ask(key);
        Ok(true)
    }

    async fn scan(
        &self,
        _: Bound<&[u8]>,
        _: Bound<&[u8]>,
        limit: usize,
        _: bool,
    ) -> Result<Vec<KeyValue>, IndexError> {
        self.asked.set(self.asked.get() + limit as u64);
        Ok(Vec::new())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_without_a_bulk_load_puts_every_pair() {
        let map = ShardedMap::new(4);
        let pairs = || (0..100u8).map(|n| (vec![n; 3], vec![n]));
        farwood_fabric::Executor::new().block_on(async {
            assert!(!map.has_bulk_load());
            assert_eq!(map.bulk_load(&map, pairs(), 0.5).await, Ok(100));
            let all = map.scan(Bound::Unbounded, Bound::Unbounded, usize::MAX, false).await;
            assert_eq!(all, Ok(pairs().collect()));
        });
    }
}
