//! A cell that may travel between threads in its type, but is used on the one that made it.
//!
//! A world runs on one thread, yet a `Cluster` is `Send + Sync` for the sake of the other transports. A mutex would do, at the
//! price of a tenth of the simulator's speed; this checks the thread instead.

use std::cell::{Cell, RefCell, RefMut};
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicU64, Ordering};

static THREADS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static HERE: Cell<u64> = const { Cell::new(0) };
}

/// The number of this thread, which no other ever has.
fn here() -> u64 {
    HERE.with(|here| {
        if here.get() == 0 {
            here.set(THREADS.fetch_add(1, Ordering::Relaxed) + 1);
        }
        here.get()
    })
}

/// A value that is only touched on the thread that made the cell. Whoever drops the cell on another thread leaks the value.
pub(super) struct Bound<T> {
    owner: u64,
    value: ManuallyDrop<RefCell<T>>,
}

// SAFETY: `borrow` and `drop` are the only ways to the value, and both check the thread before they touch it, so that no other
// thread than its own ever does.
unsafe impl<T> Sync for Bound<T> {}
// SAFETY: as above: on another thread nothing can be done with it.
unsafe impl<T> Send for Bound<T> {}

impl<T> Drop for Bound<T> {
    fn drop(&mut self) {
        if self.owner == here() {
            // SAFETY: dropped once, here, on the thread that it belongs to.
            unsafe { ManuallyDrop::drop(&mut self.value) }
        }
    }
}

impl<T> std::fmt::Debug for Bound<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Bound")
    }
}

impl<T> Bound<T> {
    pub(super) fn new(value: T) -> Self {
        Self { owner: here(), value: ManuallyDrop::new(RefCell::new(value)) }
    }

    /// The value.
    ///
    /// # Panics
    /// On another thread than the one that made the cell.
    #[inline]
    pub(super) fn borrow(&self) -> RefMut<'_, T> {
        assert!(self.owner == here(), "a simulated world is used on the thread that made it");
        self.value.borrow_mut()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[expect(clippy::disallowed_methods, reason = "the test is about a second thread")]
    fn another_thread_is_turned_away() {
        let bound = std::sync::Arc::new(Bound::new(5));
        *bound.borrow() += 1;
        let other = std::sync::Arc::clone(&bound);
        assert!(std::thread::spawn(move || *other.borrow()).join().is_err());
        assert_eq!(*bound.borrow(), 6);
    }

    #[test]
    #[expect(clippy::disallowed_methods, reason = "the test is about a second thread")]
    fn what_belongs_to_one_thread_is_not_dropped_on_another() {
        let shared = std::rc::Rc::new(5);
        let (here, away) = (Bound::new(shared.clone()), Bound::new(shared.clone()));
        drop(here);
        assert_eq!(std::rc::Rc::strong_count(&shared), 2, "dropped where it was made");
        std::thread::spawn(move || drop(away)).join().unwrap();
        assert_eq!(std::rc::Rc::strong_count(&shared), 2, "leaked elsewhere");
    }
}
