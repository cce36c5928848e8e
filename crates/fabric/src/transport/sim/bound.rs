//! A cell that may travel between threads in its type, but is used on the one that made it.
//!
//! A world runs on one thread, yet a `Cluster` is `Send + Sync` for the sake of the other transports. A mutex would do, at the
//! price of a tenth of the simulator's speed; this checks the thread instead.

use std::cell::{RefCell, RefMut};

thread_local! {
    /// Its address tells threads apart, as long as they live.
    static HERE: u8 = const { 0 };
}

fn here() -> usize {
    HERE.with(|here| std::ptr::from_ref(here) as usize)
}

/// A value that is only borrowed on the thread that made the cell.
pub(super) struct Bound<T> {
    owner: usize,
    value: RefCell<T>,
}

// SAFETY: `borrow` is the only access, and it checks the thread before it touches the cell, so no two threads ever do. (When
// the owner has ended, another thread may get its address, but then only that one passes the check.) The value itself may be
// dropped anywhere, since `T: Send`.
unsafe impl<T: Send> Sync for Bound<T> {}

impl<T> std::fmt::Debug for Bound<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Bound")
    }
}

impl<T> Bound<T> {
    pub(super) fn new(value: T) -> Self {
        Self { owner: here(), value: RefCell::new(value) }
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
}
