//! Attempts at something slow that can fail, such as a connection: one at a time, and everybody who asks meanwhile gets its outcome.
//!
//! However many operations wait for a server that does not answer, one of them connects. After a failure the next attempt begins only
//! after a pause: [`FIRST_PAUSE_NS`], twice as long after each further failure, at most [`LONGEST_PAUSE_NS`]. Who asks during the pause
//! waits for that attempt, so callers that ask again at once do not spin.
//!
//! Thread safety: callers may be on any threads. An attempt whose caller goes away goes on; one that is itself dropped has failed.

use crate::addr::ServerId;
use crate::clock::{MILLISECOND, Nanos, RealClock};
use crate::error::FabricError;
use crate::exec::lock;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

/// The pause after a failure: the first, and the longest.
pub(crate) const FIRST_PAUSE_NS: Nanos = MILLISECOND;
pub(crate) const LONGEST_PAUSE_NS: Nanos = 100 * MILLISECOND;

/// The attempts at one thing.
#[derive(Debug)]
pub(crate) struct Attempts {
    server: ServerId,
    clock: RealClock,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// How many have begun, and how many of them have ended: at most one less.
    begun: u64,
    ended: u64,
    /// Of the last one that has ended.
    outcome: Result<(), FabricError>,
    waiting: Vec<Waker>,
    /// The pause after the next failure.
    pause_ns: Nanos,
    /// When the next one may begin.
    not_before: Nanos,
}

impl Attempts {
    /// Attempts at something of this server.
    pub(crate) fn new(server: ServerId) -> Arc<Self> {
        let state = State {
            begun: 0,
            ended: 0,
            outcome: Ok(()),
            waiting: Vec::new(),
            pause_ns: FIRST_PAUSE_NS,
            not_before: 0,
        };
        Arc::new(Self { server, clock: RealClock::new(), state: Mutex::new(state) })
    }

    /// Waits for the attempt that is under way. If there is none, `begin` begins one.
    pub(crate) fn ask(self: &Arc<Self>, begin: impl FnOnce(Attempt)) -> Asked {
        let (number, is_first) = {
            let mut state = lock(&self.state);
            let is_first = state.begun == state.ended;
            state.begun += u64::from(is_first);
            (state.begun, is_first)
        };
        if is_first {
            begin(Attempt { attempts: Arc::clone(self), has_ended: false });
        }
        Asked { attempts: Arc::clone(self), number, waker: None }
    }

    fn end(&self, outcome: Result<(), FabricError>) {
        let waiting = {
            let mut state = lock(&self.state);
            if outcome.is_ok() {
                state.pause_ns = FIRST_PAUSE_NS;
            } else {
                state.not_before = self.clock.now().saturating_add(state.pause_ns);
                state.pause_ns = LONGEST_PAUSE_NS.min(state.pause_ns * 2);
            }
            state.outcome = outcome;
            state.ended = state.begun;
            std::mem::take(&mut state.waiting)
        };
        waiting.into_iter().for_each(Waker::wake);
    }
}

/// An attempt under way.
#[derive(Debug)]
pub(crate) struct Attempt {
    attempts: Arc<Attempts>,
    has_ended: bool,
}

impl Attempt {
    /// How long it still has to be waited.
    pub(crate) fn pause_ns(&self) -> Nanos {
        lock(&self.attempts.state).not_before.saturating_sub(self.attempts.clock.now())
    }

    /// Tells everybody who waits.
    pub(crate) fn end(mut self, outcome: Result<(), FabricError>) {
        self.has_ended = true;
        self.attempts.end(outcome);
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        if !self.has_ended {
            self.attempts.end(Err(FabricError::Disconnected { server: self.attempts.server }));
        }
    }
}

/// The outcome of an attempt, to be waited for. If later ones have ended before somebody looks, it is that of the last.
#[derive(Debug)]
pub(crate) struct Asked {
    attempts: Arc<Attempts>,
    number: u64,
    /// What is to be woken.
    waker: Option<Waker>,
}

impl Future for Asked {
    type Output = Result<(), FabricError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let asked = &mut *self;
        let mut state = lock(&asked.attempts.state);
        if state.ended >= asked.number {
            return Poll::Ready(state.outcome.clone());
        }
        if !asked.waker.as_ref().is_some_and(|waker| waker.will_wake(context.waker())) {
            asked.waker = Some(context.waker().clone());
            state.waiting.push(context.waker().clone());
        }
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    const SERVER: ServerId = ServerId::new(1);

    fn poll(asked: &mut Asked) -> Poll<Result<(), FabricError>> {
        Pin::new(asked).poll(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn all_who_ask_meanwhile_share_one_attempt() {
        let failure = Err(FabricError::Disconnected { server: SERVER });
        let (attempts, begun) = (Attempts::new(SERVER), RefCell::new(Vec::new()));
        let ask = || attempts.ask(|attempt| begun.borrow_mut().push(attempt));
        for outcome in [failure.clone(), Ok(())] {
            let mut asked: Vec<Asked> = (0..100).map(|_| ask()).collect();
            assert!(asked.iter_mut().all(|asked| poll(asked).is_pending()));
            let attempt = begun.borrow_mut().pop().expect("the first begins one");
            assert!(begun.borrow().is_empty(), "the others do not");
            attempt.end(outcome.clone());
            assert!(asked.iter_mut().all(|asked| poll(asked) == Poll::Ready(outcome.clone())));
        }
        let mut asked = ask();
        begun.borrow_mut().clear();
        assert_eq!(poll(&mut asked), Poll::Ready(failure), "an attempt that is dropped has failed");
    }

    #[test]
    fn the_pause_grows_with_each_failure_and_ends_with_a_success() {
        let attempts = Attempts::new(SERVER);
        let run = |outcome: Result<(), FabricError>| {
            drop(attempts.ask(|attempt| attempt.end(outcome)));
            lock(&attempts.state).pause_ns
        };
        let failure = Err(FabricError::Disconnected { server: SERVER });
        assert_eq!(run(failure.clone()), 2 * FIRST_PAUSE_NS);
        assert_eq!(run(failure.clone()), 4 * FIRST_PAUSE_NS);
        let longest = (0..10).map(|_| run(failure.clone())).max();
        assert_eq!(longest, Some(LONGEST_PAUSE_NS));
        drop(attempts.ask(|attempt| assert!(attempt.pause_ns() > 0, "it has just failed")));
        assert_eq!(run(Ok(())), FIRST_PAUSE_NS);
    }
}
