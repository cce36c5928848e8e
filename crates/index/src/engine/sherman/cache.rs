//! The index cache of a compute server (section 4.2.3): copies of the nodes just above the leaves, within a byte budget, and
//! of the top two levels, always.
//!
//! A cached address is a *hint*: the node it leads to is accepted only if it is linked, alive, of the right level and covers
//! the key; if not, the copy that led there is dropped. So a stale copy costs a round trip and never a wrong answer.
//!
//! Snapshots are sorted and compact, reference-counted (whoever reads one keeps it alive), and found in an ordered map per level behind
//! one reader-writer lock, held for a search of some hundred nanoseconds. Eviction is by the power of two choices: of two random
//! copies, the one that was not used for longer goes. A flush drops everything; what an operation learned before a flush
//! does not come in after it.

use super::node::Node;
use farwood_fabric::GlobalAddr;
use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// What a copy takes beside its keys and addresses: itself, its map entry, its place among those that can go.
const SNAPSHOT_BYTES: u64 = 160;

/// A key as it is compared: the first eight bytes at once.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct CacheKey {
    prefix: u64,
    rest: Box<[u8]>,
}

impl CacheKey {
    fn new(key: &[u8]) -> Self {
        let mut prefix = [0; 8];
        let head = key.len().min(8);
        prefix[..head].copy_from_slice(&key[..head]);
        Self { prefix: u64::from_be_bytes(prefix), rest: key[head..].into() }
    }
}

/// A copy of an inner node: sorted, and only what counts.
#[derive(Debug)]
struct Snapshot {
    level: u8,
    low: CacheKey,
    high: Option<CacheKey>,
    /// The separators: their first eight bytes, and what is behind these.
    prefixes: Box<[u64]>,
    rests: Box<[u8]>,
    rest_bytes: usize,
    children: Box<[GlobalAddr]>,
    used: AtomicU64,
    /// Where it stands among those that can go.
    place: AtomicUsize,
}

impl Snapshot {
    fn of<B: Deref<Target = [u8]>>(node: &Node<B>) -> Self {
        let slots = node.sorted();
        let low = CacheKey::new(node.low());
        let rest_bytes = low.rest.len();
        Self {
            level: node.level(),
            low,
            high: node.high().map(CacheKey::new),
            prefixes: slots.iter().map(|slot| CacheKey::new(node.key(*slot)).prefix).collect(),
            rests: slots.iter().flat_map(|slot| node.key(*slot).iter().skip(8)).copied().collect(),
            rest_bytes,
            children: slots.iter().map(|slot| node.child(*slot)).collect(),
            used: AtomicU64::new(0),
            place: AtomicUsize::new(usize::MAX),
        }
    }

    fn bytes(&self) -> u64 {
        (self.prefixes.len() * 16 + self.rests.len()) as u64 + SNAPSHOT_BYTES
    }

    fn covers(&self, key: &CacheKey) -> bool {
        *key >= self.low && self.high.as_ref().is_none_or(|high| key < high)
    }

    /// The position of the child that `key` is under.
    fn position(&self, key: &CacheKey) -> Option<usize> {
        let below = self.prefixes.partition_point(|prefix| *prefix < key.prefix);
        let same = self.prefixes[below..].partition_point(|prefix| *prefix == key.prefix);
        let rest = |at: usize| &self.rests[at * self.rest_bytes..(at + 1) * self.rest_bytes];
        let up_to = (below..below + same).take_while(|at| rest(*at) <= &*key.rest).count();
        (below + up_to).checked_sub(1)
    }
}

#[derive(Default, Debug)]
struct Snapshots {
    /// By level and low fence.
    levels: Vec<BTreeMap<CacheKey, Arc<Snapshot>>>,
    /// Level 1, which can go.
    evictable: Vec<Arc<Snapshot>>,
    bytes: u64,
    evictable_bytes: u64,
}

/// The cache.
#[derive(Debug)]
pub(super) struct Cache {
    budget: u64,
    copies: RwLock<Snapshots>,
    clock: AtomicU64,
    flushes: AtomicU64,
}

impl Snapshots {
    fn find(&self, level: u8, key: &CacheKey) -> Option<&Arc<Snapshot>> {
        let (_, copy) = self.levels.get(usize::from(level))?.range(..=key).next_back()?;
        copy.covers(key).then_some(copy)
    }

    fn remove(&mut self, copy: &Arc<Snapshot>) {
        let Some(level) = self.levels.get_mut(usize::from(copy.level)) else { return };
        level.remove(&copy.low);
        self.bytes -= copy.bytes();
        let place = copy.place.load(Ordering::Relaxed);
        if place < self.evictable.len() {
            self.evictable_bytes -= copy.bytes();
            self.evictable.swap_remove(place);
            if let Some(moved) = self.evictable.get(place) {
                moved.place.store(place, Ordering::Relaxed);
            }
        }
    }

    fn insert(&mut self, copy: Arc<Snapshot>) {
        let level = usize::from(copy.level);
        if self.levels.len() <= level {
            self.levels.resize_with(level + 1, BTreeMap::new);
            // What was on top is so no longer.
            self.drop_levels(2..level.saturating_sub(1));
        }
        if let Some(old) = self.levels[level].get(&copy.low).cloned() {
            self.remove(&old);
        }
        self.bytes += copy.bytes();
        if level == 1 {
            self.evictable_bytes += copy.bytes();
            copy.place.store(self.evictable.len(), Ordering::Relaxed);
            self.evictable.push(Arc::clone(&copy));
        }
        self.levels[level].insert(copy.low.clone(), copy);
    }

    fn drop_levels(&mut self, levels: std::ops::Range<usize>) {
        for level in levels {
            for copy in std::mem::take(&mut self.levels[level]).into_values() {
                self.bytes -= copy.bytes();
            }
        }
    }
}

impl Cache {
    pub(super) fn new(budget: u64) -> Self {
        let (copies, clock, flushes) = (RwLock::default(), AtomicU64::new(0), AtomicU64::new(0));
        Self { budget, copies, clock, flushes }
    }

    fn read(&self) -> RwLockReadGuard<'_, Snapshots> {
        self.copies.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Snapshots> {
        self.copies.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// How often everything was dropped: to be asked when an operation begins.
    pub(super) fn flushes(&self) -> u64 {
        self.flushes.load(Ordering::SeqCst)
    }

    /// The child that `key` is under, as a copy on `level` has it.
    #[inline]
    pub(super) fn child(&self, level: u8, key: &[u8]) -> Option<GlobalAddr> {
        let key = CacheKey::new(key);
        let copies = self.read();
        let copy = copies.find(level, &key)?;
        copy.used.store(self.clock.load(Ordering::Relaxed), Ordering::Relaxed);
        copy.position(&key).map(|at| copy.children[at])
    }

    /// The child that `key` is under and its level, as the lowest copy from `level` up has it.
    pub(super) fn lowest_child(&self, level: u8, key: &[u8]) -> Option<(u8, GlobalAddr)> {
        let levels = u8::try_from(self.read().levels.len()).unwrap_or(u8::MAX);
        (level..levels).find_map(|level| Some((level - 1, self.child(level, key)?)))
    }

    /// Up to `count` children from the one that `key` is under on, to the left if `reverse`.
    pub(super) fn children(&self, level: u8, key: &[u8], count: usize, reverse: bool) -> Vec<GlobalAddr> {
        let key = CacheKey::new(key);
        let copies = self.read();
        let Some((copy, at)) = copies.find(level, &key).and_then(|copy| Some((copy, copy.position(&key)?)))
        else {
            return Vec::new();
        };
        if reverse {
            return copy.children[..=at].iter().rev().take(count).copied().collect();
        }
        copy.children[at..].iter().take(count).copied().collect()
    }

    /// Keeps a copy of an inner node that was read whole by an operation that began after flush `flushes`.
    pub(super) fn keep<B: Deref<Target = [u8]>>(
        &self,
        node: &Node<B>,
        flushes: u64,
        random: impl Fn() -> u64,
    ) {
        if node.level() == 0 {
            return;
        }
        let copy = Arc::new(Snapshot::of(node));
        copy.used.store(self.clock.fetch_add(1, Ordering::Relaxed), Ordering::Relaxed);
        let mut copies = self.write();
        let is_top = usize::from(copy.level) + 2 >= copies.levels.len();
        if (copy.level > 1 && !is_top) || self.flushes() != flushes {
            return;
        }
        copies.insert(copy);
        while copies.evictable_bytes > self.budget && copies.evictable.len() > 1 {
            let any = |copies: &Snapshots| {
                let at = (u128::from(random()) * copies.evictable.len() as u128) >> 64;
                Arc::clone(&copies.evictable[usize::try_from(at).unwrap_or(0)])
            };
            let (one, other) = (any(&copies), any(&copies));
            let used = |copy: &Snapshot| copy.used.load(Ordering::Relaxed);
            let victim = if used(&one) <= used(&other) { one } else { other };
            copies.remove(&victim);
        }
    }

    /// Drops the copy on `level` that covers `key`.
    pub(super) fn forget(&self, level: u8, key: &[u8]) {
        let key = CacheKey::new(key);
        let mut copies = self.write();
        if let Some(copy) = copies.find(level, &key).cloned() {
            copies.remove(&copy);
        }
        // The tree may have become lower, and what is on top now another level.
        while copies.levels.last().is_some_and(BTreeMap::is_empty) {
            copies.levels.pop();
        }
    }

    /// Drops everything.
    pub(super) fn flush(&self) {
        let mut copies = self.write();
        self.flushes.fetch_add(1, Ordering::SeqCst);
        *copies = Snapshots::default();
    }

    /// What it takes.
    pub(super) fn bytes(&self) -> u64 {
        self.read().bytes
    }
}

#[cfg(test)]
mod tests {
    use super::super::layout::Layout;
    use super::super::node::{Layouts, Plan};
    use super::*;
    use crate::shared::whole::Place;
    use farwood_fabric::{RegionId, ServerId};

    fn addr(n: u64) -> GlobalAddr {
        GlobalAddr::new(ServerId::new(1), RegionId::MAIN, n * 64)
    }

    /// An inner node from key `low` to `high` with a child for each key in `keys`.
    fn node(level: u8, low: &[u8], high: Option<&[u8]>, keys: &[&[u8]]) -> Node<Vec<u8>> {
        let inner = Layout::new(low.len(), 8, 1024);
        let layouts = Layouts { leaf: inner, inner, keyed_by_version: true, checked: true };
        let plan = Plan { level, incarnation: 1, is_linked: true, low, high, sibling: GlobalAddr::NULL };
        let children: Vec<_> = (1..).zip(keys).map(|(n, _)| addr(n).to_raw().to_le_bytes()).collect();
        let entries = keys.iter().copied().zip(children.iter().map(<[u8; 8]>::as_slice));
        Node::build(&layouts, Place { index: 1, addr: addr(99) }, vec![0; 1024], &plan, entries)
    }

    #[test]
    fn keys_that_agree_in_their_first_bytes_are_told_apart() {
        let keys: [&[u8]; 4] = [b"aaaaaaaaaa", b"aaaaaaaabb", b"aaaaaaaabc", b"aaaaaaab00"];
        let cache = Cache::new(1 << 20);
        cache.keep(&node(1, keys[0], None, &keys), 0, || 0);
        for (key, child) in [
            (b"aaaaaaaaaa", Some(1)),
            (b"aaaaaaaaba", Some(1)),
            (b"aaaaaaaabb", Some(2)),
            (b"aaaaaaaabd", Some(3)),
            (b"aaaaaaab00", Some(4)),
            (b"zzzzzzzzzz", Some(4)),
            (b"aaaaaaaa00", None),
        ] {
            assert_eq!(cache.child(1, key), child.map(addr), "{key:?}");
        }
        assert_eq!(cache.children(1, b"aaaaaaaabb", 2, false), [addr(2), addr(3)]);
        assert_eq!(cache.children(1, b"aaaaaaaabc", 9, true), [addr(3), addr(2), addr(1)]);
    }

    #[test]
    fn the_budget_holds_for_level_one_and_a_flush_is_final() {
        let cache = Cache::new(3 * (SNAPSHOT_BYTES + 16));
        let random = || 0x9e37_79b9_7f4a_7c15;
        for n in 0..50u8 {
            cache.keep(&node(1, &[n; 8], Some(&[n + 1; 8]), &[&[n; 8]]), 0, random);
        }
        assert!(cache.bytes() <= 3 * (SNAPSHOT_BYTES + 16));
        assert!(cache.child(1, &[49; 8]).is_some() || cache.child(1, &[48; 8]).is_some());
        cache.keep(&node(3, &[0; 8], None, &[&[0; 8]]), 0, random);
        assert_eq!(cache.lowest_child(2, &[7; 8]), Some((2, addr(1))));
        cache.flush();
        assert_eq!((cache.bytes(), cache.lowest_child(1, &[7; 8])), (0, None));
        cache.keep(&node(1, &[0; 8], None, &[&[0; 8]]), 0, random);
        assert_eq!(cache.bytes(), 0, "it was learned before the flush");
    }

    #[test]
    fn what_is_forgotten_is_gone_and_what_covers_less_does_not_answer() {
        let cache = Cache::new(1 << 20);
        cache.keep(&node(1, &[2; 8], Some(&[5; 8]), &[&[2; 8], &[3; 8]]), 0, || 0);
        assert_eq!(cache.child(1, &[3; 8]), Some(addr(2)));
        assert_eq!((cache.child(1, &[5; 8]), cache.child(1, &[1; 8])), (None, None));
        cache.forget(1, &[4; 8]);
        assert_eq!((cache.child(1, &[3; 8]), cache.bytes()), (None, 0));
    }
}
