//! Coverage marks: code says that a rare path ran, a test asserts that it did.
//!
//! Counters are per thread (a simulated world lives on one), always on, and meant for paths that are rare by nature: a
//! torn read, a lost CAS, a stolen lock.

use std::cell::RefCell;
use std::collections::BTreeMap;

thread_local! {
    static HITS: RefCell<BTreeMap<&'static str, u64>> = const { RefCell::new(BTreeMap::new()) };
}

/// Notes that the path `name` ran.
#[cold]
pub fn hit(name: &'static str) {
    HITS.with_borrow_mut(|hits| *hits.entry(name).or_default() += 1);
}

/// How often each path ran on this thread since [`reset`].
pub fn snapshot() -> BTreeMap<&'static str, u64> {
    HITS.with_borrow(Clone::clone)
}

/// How often path `name` ran on this thread since [`reset`].
pub fn count(name: &str) -> u64 {
    HITS.with_borrow(|hits| hits.get(name).copied().unwrap_or(0))
}

/// Starts counting anew on this thread.
pub fn reset() {
    HITS.with_borrow_mut(BTreeMap::clear);
}
