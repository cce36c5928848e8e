//! Whether operations on an index may begin: what one session knows of an index that it has open.
//!
//! Every operation asks once, at its beginning. An index that is dropped, and a session that leaves, close their openings first and
//! let the operations that have begun come to their end after that.

use crate::api::IndexError;
use farwood_fabric::control::IndexId;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

const OPEN: u8 = 0;
const DROPPED: u8 = 1;
const CLOSED: u8 = 2;

/// One index, as one session has it open.
#[derive(Debug)]
pub(crate) struct Opening {
    state: AtomicU8,
}

impl Opening {
    /// To be asked before an operation touches anything.
    #[inline]
    pub(crate) fn check(&self) -> Result<(), IndexError> {
        // Relaxed: the operation has pinned its epoch by a sequentially consistent store before, and whoever closes waits for that.
        match self.state.load(Ordering::Relaxed) {
            OPEN => Ok(()),
            state => refused(state),
        }
    }
}

#[cold]
fn refused(state: u8) -> Result<(), IndexError> {
    Err(if state == DROPPED { IndexError::Dropped } else { IndexError::Closed })
}

/// All openings of a session.
#[derive(Default, Debug)]
pub(crate) struct Openings {
    state: Mutex<State>,
}

#[derive(Default, Debug)]
struct State {
    by_index: BTreeMap<IndexId, Weak<Opening>>,
    /// The session leaves: nothing opens any more.
    is_closed: bool,
}

impl Openings {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Only plain moves happen under the lock, so a panic elsewhere left nothing half-done.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The opening of an index, which all who have it open share. `is_dropping` is asked under the lock, so that a drop that is
    /// learned of at the same time either finds the opening or is found by it.
    pub(crate) fn of(&self, index: IndexId, is_dropping: impl FnOnce() -> bool) -> Arc<Opening> {
        let mut state = self.lock();
        if let Some(opening) = state.by_index.get(&index).and_then(Weak::upgrade) {
            return opening;
        }
        let begins = match (state.is_closed, is_dropping()) {
            (true, _) => CLOSED,
            (false, true) => DROPPED,
            (false, false) => OPEN,
        };
        let opening = Arc::new(Opening { state: AtomicU8::new(begins) });
        state.by_index.retain(|_, other| other.strong_count() > 0);
        state.by_index.insert(index, Arc::downgrade(&opening));
        opening
    }

    /// Whether somebody has the index open.
    pub(crate) fn has(&self, index: IndexId) -> bool {
        self.lock().by_index.get(&index).is_some_and(|opening| opening.strong_count() > 0)
    }

    /// These indexes are being dropped.
    pub(crate) fn drop_all(&self, indexes: &[IndexId]) {
        let state = self.lock();
        for opening in indexes.iter().filter_map(|index| state.by_index.get(index)?.upgrade()) {
            opening.state.store(DROPPED, Ordering::SeqCst);
        }
    }

    /// Whether an index that somebody has open is dropped.
    pub(crate) fn any_dropped(&self) -> bool {
        let state = self.lock();
        let mut open = state.by_index.values().filter_map(Weak::upgrade);
        open.any(|opening| opening.state.load(Ordering::Relaxed) == DROPPED)
    }

    /// The session leaves.
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        state.is_closed = true;
        for opening in state.by_index.values().filter_map(Weak::upgrade) {
            opening.state.store(CLOSED, Ordering::SeqCst);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn openings_are_shared_and_end_with_their_index_or_their_session() {
        let openings = Openings::default();
        let (a, b) = (openings.of(1, || false), openings.of(2, || false));
        assert!(Arc::ptr_eq(&a, &openings.of(1, || false)));
        assert!(a.check().is_ok() && b.check().is_ok() && !openings.any_dropped());
        openings.drop_all(&[1, 7]);
        assert_eq!(a.check(), Err(IndexError::Dropped));
        assert_eq!(b.check(), Ok(()));
        assert!(openings.any_dropped());
        assert_eq!(
            openings.of(3, || true).check(),
            Err(IndexError::Dropped),
            "the drop was learned of before"
        );
        openings.close();
        assert_eq!(b.check(), Err(IndexError::Closed));
        assert_eq!(openings.of(4, || false).check(), Err(IndexError::Closed));
    }
}
