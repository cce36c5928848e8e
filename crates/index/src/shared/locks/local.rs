//! The local lock table of a compute server (section 4.3): its threads queue for a lock here, first come first served, and
//! only the one whose turn it is asks for the lock remotely. A lock that is held remotely can be handed to the next in the
//! queue, at most [`MAX_HANDOVERS`] times in a row, so that other compute servers are not starved.
//!
//! Waiting costs no verb. A waiter that goes away (its future is dropped) gives up its place; if it had just been handed the
//! lock, it passes it on. If nobody else waits, the lock is held remotely for nobody: whoever waited has said what to do then.

use rustc_hash::FxHashMap;
use std::collections::VecDeque;
use std::collections::hash_map::Entry;
use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

/// How often in a row a lock stays on one compute server (MAX_DEPTH in the paper's Figure 6).
const MAX_HANDOVERS: u32 = 4;
const SHARDS: usize = 64;

/// Which lock: its address and lane.
pub(super) type LockKey = (u64, u32);

#[derive(Debug)]
pub(super) struct LocalLocks {
    shards: Vec<Mutex<FxHashMap<LockKey, Line>>>,
}

/// A lock that is held here, and those who wait for it.
#[derive(Default, Debug)]
struct Line {
    waiting: VecDeque<Arc<Waiter>>,
    handovers: u32,
}

#[derive(Debug)]
struct Waiter {
    state: Mutex<State>,
}

#[derive(Debug)]
enum State {
    Waiting(Option<Waker>),
    /// It is this waiter's turn; with the lock's word, if it is held remotely.
    Granted(Option<u64>),
    Gone,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Only plain moves happen under these locks, so a panic elsewhere left nothing half-done.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Default for LocalLocks {
    fn default() -> Self {
        Self { shards: (0..SHARDS).map(|_| Mutex::default()).collect() }
    }
}

impl LocalLocks {
    fn shard(&self, key: LockKey) -> MutexGuard<'_, FxHashMap<LockKey, Line>> {
        let number = (key.0 >> 3).wrapping_mul(4).wrapping_add(u64::from(key.1));
        lock(&self.shards[usize::try_from(number % SHARDS as u64).unwrap_or(0)])
    }

    /// Waits for one's turn. The word of the lock, if it is held remotely already. If the future is dropped when it has been handed the
    /// lock, and nobody else wants it, `left` is told the word; the turn is the caller's still.
    pub(super) async fn acquire(&self, key: LockKey, left: impl Fn(u64)) -> Option<u64> {
        let waiter = {
            let mut shard = self.shard(key);
            let line = match shard.entry(key) {
                Entry::Occupied(line) => line.into_mut(),
                Entry::Vacant(free) => {
                    free.insert(Line::default());
                    return None;
                }
            };
            let waiter = Arc::new(Waiter { state: Mutex::new(State::Waiting(None)) });
            line.waiting.push_back(Arc::clone(&waiter));
            waiter
        };
        let place = Place { locks: self, key, waiter, left };
        poll_fn(|context| {
            let mut state = lock(&place.waiter.state);
            match &mut *state {
                State::Granted(word) => {
                    let word = *word;
                    *state = State::Gone;
                    Poll::Ready(word)
                }
                State::Waiting(waker) => {
                    *waker = Some(context.waker().clone());
                    Poll::Pending
                }
                State::Gone => Poll::Ready(None),
            }
        })
        .await
    }

    /// Takes one's turn if nobody else has it.
    pub(super) fn try_acquire(&self, key: LockKey) -> bool {
        let mut shard = self.shard(key);
        match shard.entry(key) {
            Entry::Occupied(_) => false,
            Entry::Vacant(free) => {
                free.insert(Line::default());
                true
            }
        }
    }

    /// Whether the lock may be handed to somebody.
    pub(super) fn wants_handover(&self, key: LockKey) -> bool {
        self.shard(key)
            .get(&key)
            .is_some_and(|line| !line.waiting.is_empty() && line.handovers < MAX_HANDOVERS)
    }

    /// Hands the lock, held remotely by `word`, to the next in the queue. Whether there was one; if not, it is still ours.
    pub(super) fn hand_over(&self, key: LockKey, word: u64) -> bool {
        let mut shard = self.shard(key);
        let Some(line) = shard.get_mut(&key) else { return false };
        let granted = grant(line, Some(word));
        line.handovers += u32::from(granted);
        granted
    }

    /// Ends one's turn; the lock is not held remotely any more.
    pub(super) fn release(&self, key: LockKey) {
        let mut shard = self.shard(key);
        let Some(line) = shard.get_mut(&key) else { return };
        line.handovers = 0;
        if !grant(line, None) {
            shard.remove(&key);
        }
    }
}

/// Gives the turn to the first who still waits.
fn grant(line: &mut Line, word: Option<u64>) -> bool {
    while let Some(waiter) = line.waiting.pop_front() {
        let mut state = lock(&waiter.state);
        if let State::Waiting(waker) = &mut *state {
            let waker = waker.take();
            *state = State::Granted(word);
            drop(state);
            if let Some(waker) = waker {
                waker.wake();
            }
            return true;
        }
    }
    false
}

/// A place in the queue.
struct Place<'a, F: Fn(u64)> {
    locks: &'a LocalLocks,
    key: LockKey,
    waiter: Arc<Waiter>,
    left: F,
}

impl<F: Fn(u64)> Drop for Place<'_, F> {
    fn drop(&mut self) {
        let state = std::mem::replace(&mut *lock(&self.waiter.state), State::Gone);
        match state {
            State::Granted(None) => self.locks.release(self.key),
            State::Granted(Some(word)) => {
                if !self.locks.hand_over(self.key, word) {
                    (self.left)(word);
                }
            }
            State::Waiting(_) | State::Gone => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::pin::pin;
    use std::task::Context;

    const KEY: LockKey = (64, 0);

    fn poll<T>(future: std::pin::Pin<&mut impl Future<Output = T>>) -> Poll<T> {
        future.poll(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn turns_come_in_order_and_handovers_end() {
        let locks = LocalLocks::default();
        let mut first = pin!(locks.acquire(KEY, |_| ()));
        assert_eq!(poll(first.as_mut()), Poll::Ready(None));
        let mut waiting: Vec<_> = (0..7).map(|_| Box::pin(locks.acquire(KEY, |_| ()))).collect();
        for future in &mut waiting {
            assert_eq!(poll(future.as_mut()), Poll::Pending);
        }
        for (n, future) in waiting.iter_mut().enumerate() {
            if n == 4 {
                assert!(!locks.wants_handover(KEY), "four handovers are enough");
                locks.release(KEY);
                assert_eq!(poll(future.as_mut()), Poll::Ready(None), "it takes the lock anew");
                assert!(locks.wants_handover(KEY));
            } else {
                assert!(locks.hand_over(KEY, 100 + n as u64));
                assert_eq!(poll(future.as_mut()), Poll::Ready(Some(100 + n as u64)));
            }
        }
        assert!(!locks.hand_over(KEY, 9), "nobody is left");
        assert!(!locks.try_acquire(KEY));
        locks.release(KEY);
        assert!(locks.try_acquire(KEY));
    }

    #[test]
    fn who_goes_away_loses_neither_its_place_nor_the_lock() {
        let locks = LocalLocks::default();
        assert!(locks.try_acquire(KEY));
        let mut gone = Box::pin(locks.acquire(KEY, |_| ()));
        let mut next = Box::pin(locks.acquire(KEY, |_| ()));
        assert!(poll(gone.as_mut()).is_pending() && poll(next.as_mut()).is_pending());
        assert!(locks.hand_over(KEY, 5));
        drop(gone);
        assert_eq!(poll(next.as_mut()), Poll::Ready(Some(5)), "passed on");
        let left = Cell::new(None);
        let mut last = Box::pin(locks.acquire(KEY, |word| left.set(Some(word))));
        assert!(poll(last.as_mut()).is_pending() && locks.hand_over(KEY, 6));
        drop(last);
        assert_eq!(left.get(), Some(6), "who waited last frees it");
        assert!(!locks.try_acquire(KEY), "and has the turn until then");
    }
}
