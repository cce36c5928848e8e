//! A result that is on its way from another thread: for futures and for threads that block.

use crate::api::IndexError;
use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

/// What an operation brings. It goes on whether or not somebody waits for it.
#[must_use = "whether the operation worked shows here"]
pub struct Pending<T> {
    cell: Arc<Cell<T>>,
}

struct Cell<T> {
    state: Mutex<State<T>>,
    arrived: Condvar,
}

struct State<T> {
    result: Option<Result<T, IndexError>>,
    waker: Option<Waker>,
}

/// What is done with a result when it is there.
type Keep<T> = Box<dyn FnOnce(Result<T, IndexError>) + Send>;

/// The other end.
pub(super) struct Promise<T> {
    keep: Option<Keep<T>>,
}

/// A promise and what it will keep.
pub(super) fn promise<T: Send + 'static>() -> (Promise<T>, Pending<T>) {
    let state = State { result: None, waker: None };
    let cell = Arc::new(Cell { state: Mutex::new(state), arrived: Condvar::new() });
    let theirs = Arc::clone(&cell);
    let keep = move |result| {
        let mut state = theirs.lock();
        state.result = Some(result);
        let waker = state.waker.take();
        drop(state);
        theirs.arrived.notify_all();
        if let Some(waker) = waker {
            waker.wake();
        }
    };
    (Promise { keep: Some(Box::new(keep)) }, Pending { cell })
}

impl<T> Cell<T> {
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: Send + 'static> Promise<T> {
    pub(super) fn keep(mut self, result: Result<T, IndexError>) {
        if let Some(keep) = self.keep.take() {
            keep(result);
        }
    }

    /// A promise of something else, from which this one's is made.
    pub(super) fn map<U: Send + 'static>(self, make: impl FnOnce(U) -> T + Send + 'static) -> Promise<U> {
        Promise { keep: Some(Box::new(move |result| self.keep(result.map(make)))) }
    }
}

impl<T> Drop for Promise<T> {
    /// Whoever should have kept it is gone; how far it came, nobody knows.
    fn drop(&mut self) {
        if let Some(keep) = self.keep.take() {
            keep(Err(IndexError::Unknown));
        }
    }
}

impl<T> fmt::Debug for Promise<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Promise")
    }
}

impl<T> Pending<T> {
    /// Blocks until the result is there.
    pub fn wait(self) -> Result<T, IndexError> {
        let mut state = self.cell.lock();
        loop {
            if let Some(result) = state.result.take() {
                return result;
            }
            state = self.cell.arrived.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl<T> Future for Pending<T> {
    type Output = Result<T, IndexError>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.cell.lock();
        if let Some(result) = state.result.take() {
            return Poll::Ready(result);
        }
        state.waker = Some(context.waker().clone());
        Poll::Pending
    }
}

impl<T> fmt::Debug for Pending<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.cell.lock().result.is_some() { "Pending(here)" } else { "Pending(on its way)" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_promise_is_kept_or_said_to_be_broken() {
        let (kept, pending) = promise::<u32>();
        kept.keep(Ok(7));
        assert_eq!(pending.wait(), Ok(7));
        let (mapped, pending) = promise::<String>();
        mapped.map(|n: u32| n.to_string()).keep(Ok(8));
        assert_eq!(pending.wait(), Ok("8".to_owned()));
        let (broken, pending) = promise::<u32>();
        drop(broken.map(|n: u32| n + 1));
        assert_eq!(pending.wait(), Err(IndexError::Unknown));
    }

    #[test]
    fn a_future_is_woken_and_a_thread_too() {
        let (kept, pending) = promise::<u32>();
        let (also_kept, also_pending) = promise::<u32>();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                kept.keep(Ok(1));
                also_kept.keep(Ok(2));
            });
            assert_eq!(farwood_fabric::Executor::new().block_on(pending), Ok(1));
            assert_eq!(also_pending.wait(), Ok(2));
        });
    }
}
