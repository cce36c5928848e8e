//! Coverage marks: code says that a rare path ran, a test asserts that it did.
//!
//! Counters are per thread (a simulated world lives on one), always on, and meant for paths that are rare by nature: a
//! torn read, a lost CAS, a stolen lock. The simulator watches them, since a process may die at any of them.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

/// Who is told of every hit.
type Watcher = Rc<dyn Fn(&'static str)>;

thread_local! {
    static HITS: RefCell<BTreeMap<&'static str, u64>> = const { RefCell::new(BTreeMap::new()) };
    static WATCHER: RefCell<Option<Watcher>> = const { RefCell::new(None) };
}

/// Notes that the path `name` ran.
#[cold]
pub fn hit(name: &'static str) {
    HITS.with_borrow_mut(|hits| *hits.entry(name).or_default() += 1);
    let watcher = WATCHER.with_borrow(Clone::clone);
    if let Some(watcher) = watcher {
        watcher(name);
    }
}

/// Lets `watcher` know of every hit on this thread, for as long as the guard lives.
pub(crate) fn watch(watcher: Watcher) -> Watching {
    Watching { before: WATCHER.replace(Some(watcher)) }
}

/// Ends a watch.
pub(crate) struct Watching {
    before: Option<Watcher>,
}

impl Drop for Watching {
    fn drop(&mut self) {
        WATCHER.set(self.before.take());
    }
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
