//! Futures that one task polls in turns, and that make way for each other while memory is on its way to the processor.
//!
//! Where a thread carries out verbs itself, a READ never waits for a completion, but it does wait for memory: a good hundred nanoseconds for
//! each line that is in no cache. If the thread has something else to do meanwhile, it asks for the line first (a prefetch), does the
//! other thing, and comes back. A task switch through the executor would cost more than it gains, so this is between a task and the
//! futures that it polls itself: it says that there are several ([`Company::poll`]), and polls again those that stepped aside.
//!
//! Some of them may have to take effect in order ([`crate::pipeline`]): whoever polls one says whether it has its turn, and whoever is
//! about to change something waits for it ([`Op::turn`](crate::Op::turn)).
//!
//! Some may only move long values when they are told so ([`Company::limit`]), since memory for many of them at once may be lacking: an operation
//! that meets a long value asks before it fetches it ([`Op::may_move`](crate::Op::may_move)), ends, and begins anew when it may.

use crate::clock::Nanos;
use std::cell::Cell;
use std::fmt;
use std::rc::Rc;
use std::task::Poll;

/// A value of so many bytes is long, unless somebody says otherwise.
pub const LONG_BYTES: usize = 64 << 10;

/// Whether futures on an endpoint have company, whether they have their turn, and whether one has stepped aside.
#[derive(Clone, Default)]
pub struct Company {
    state: Rc<State>,
}

struct State {
    has_others: Cell<bool>,
    /// What is polled may not take effect yet.
    is_early: Cell<bool>,
    stepped_aside: Cell<bool>,
    /// Until when the task that polls will be woken in any case, for those that wait for their turn.
    alarm: Cell<Nanos>,
    /// What is polled may not move long values yet.
    is_limited: Cell<bool>,
    /// It has asked for that.
    has_asked: Cell<bool>,
    long_bytes: Cell<usize>,
}

impl Default for State {
    fn default() -> Self {
        Self {
            has_others: Cell::default(),
            is_early: Cell::default(),
            stepped_aside: Cell::default(),
            alarm: Cell::default(),
            is_limited: Cell::default(),
            has_asked: Cell::default(),
            long_bytes: Cell::new(LONG_BYTES),
        }
    }
}

impl Company {
    /// Polls a future, or some. If it `has_others` to take turns with, it may step aside, which is said beside what came of the
    /// poll: then it is ready to be polled again, and nobody wakes anybody for it. Unless it `has_turn` it must not take effect: it is
    /// polled again when it has, and nobody wakes anybody for that either.
    #[inline]
    pub fn poll<T>(&self, has_others: bool, has_turn: bool, poll: impl FnOnce() -> T) -> (T, bool) {
        // What is polled may have company of its own.
        let had_others = self.state.has_others.replace(has_others);
        let was_early = self.state.is_early.get();
        self.state.is_early.set(was_early || !has_turn);
        let had_stepped = self.state.stepped_aside.replace(false);
        let polled = poll();
        self.state.has_others.set(had_others);
        self.state.is_early.set(was_early);
        (polled, self.state.stepped_aside.replace(had_stepped))
    }

    /// Polls a future, or some, that may move long values only if it is `free` to, or asks for that; what came of it, and whether it asks. Then it is polled
    /// again when it is free to, and nobody wakes anybody for that.
    #[inline]
    pub fn limit<T>(&self, is_free: bool, poll: impl FnOnce() -> T) -> (T, bool) {
        let was_limited = self.state.is_limited.get();
        self.state.is_limited.set(was_limited || !is_free);
        let had_asked = self.state.has_asked.replace(false);
        let polled = poll();
        self.state.is_limited.set(was_limited);
        let asks = self.state.has_asked.get();
        // Whoever limits this one is asked, too.
        self.state.has_asked.set(had_asked || asks && was_limited);
        (polled, asks)
    }

    /// Whether what is polled may move so many bytes.
    #[inline]
    pub(crate) fn may_move(&self, bytes: usize) -> bool {
        !self.state.is_limited.get() || bytes < self.state.long_bytes.get()
    }

    /// From how many bytes on values count as long.
    pub fn set_long_bytes(&self, bytes: usize) {
        self.state.long_bytes.set(bytes);
    }

    /// Waits until it may move long values. No operation may be under way.
    pub async fn freedom(&self) {
        std::future::poll_fn(|_| {
            if !self.state.is_limited.get() {
                return Poll::Ready(());
            }
            self.state.has_asked.set(true);
            Poll::Pending
        })
        .await;
    }

    /// Whether there is somebody to make way for.
    #[inline]
    pub(crate) fn has_others(&self) -> bool {
        self.state.has_others.get()
    }

    /// Whether what is polled may take effect.
    #[inline]
    pub fn has_turn(&self) -> bool {
        !self.state.is_early.get()
    }

    /// Another task polls now, which is woken at that time; when the one before is.
    #[inline]
    pub(crate) fn change_alarm(&self, at: Nanos) -> Nanos {
        self.state.alarm.replace(at)
    }

    /// When the task that polls is woken in any case.
    #[inline]
    pub(crate) fn alarm(&self) -> Nanos {
        self.state.alarm.get()
    }

    /// Waits until it may.
    pub async fn turn(&self) {
        std::future::poll_fn(|_| if self.has_turn() { Poll::Ready(()) } else { Poll::Pending }).await;
    }

    /// Makes way, once.
    #[inline]
    pub(crate) async fn step_aside(&self) {
        let mut stepped = false;
        std::future::poll_fn(|_| {
            // Whoever has others is polled again; who has not, must not wait for it.
            if stepped || !self.has_others() {
                return Poll::Ready(());
            }
            stepped = true;
            self.state.stepped_aside.set(true);
            Poll::Pending
        })
        .await;
    }
}

impl fmt::Debug for Company {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.has_others() { "Company" } else { "Company(alone)" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::pin;
    use std::task::{Context, Waker};

    #[test]
    fn who_is_limited_asks_and_is_free_when_polled_so() {
        let company = Company::default();
        assert!(company.may_move(usize::MAX), "where nobody is limited");
        let mut context = Context::from_waker(Waker::noop());
        let mut freedom = pin!(company.freedom());
        // From within a company of its own, too.
        let mut poll = |is_free| {
            company.limit(is_free, || {
                assert!(company.may_move(LONG_BYTES - 1) && company.may_move(LONG_BYTES) == is_free);
                company.limit(true, || company.poll(true, true, || freedom.as_mut().poll(&mut context)).0).0
            })
        };
        assert_eq!(poll(false), (Poll::Pending, true));
        assert_eq!(poll(true), (Poll::Ready(()), false));
        assert!(company.may_move(LONG_BYTES));
    }

    #[test]
    fn only_who_has_others_steps_aside_and_a_company_within_does_not_count() {
        let company = Company::default();
        let mut context = Context::from_waker(Waker::noop());
        let mut alone = pin!(company.step_aside());
        assert_eq!(company.poll(false, true, || alone.as_mut().poll(&mut context)), (Poll::Ready(()), false));
        let mut first = pin!(company.step_aside());
        assert_eq!(company.poll(true, true, || first.as_mut().poll(&mut context)), (Poll::Pending, true));
        assert_eq!(company.poll(true, true, || first.as_mut().poll(&mut context)), (Poll::Ready(()), false));
        // One that takes turns itself, inside one that does not.
        let mut inner = pin!(company.step_aside());
        let outer =
            company.poll(false, true, || company.poll(true, true, || inner.as_mut().poll(&mut context)));
        assert_eq!(outer, ((Poll::Pending, true), false));
        assert!(!company.has_others());
    }

    #[test]
    fn nobody_takes_effect_out_of_turn_nor_does_what_it_polls_itself() {
        let company = Company::default();
        let mut context = Context::from_waker(Waker::noop());
        let mut turn = pin!(company.turn());
        let mut poll = |has_turn, has_own| {
            let (inner, _) = company
                .poll(true, has_turn, || company.poll(false, has_own, || turn.as_mut().poll(&mut context)).0);
            inner
        };
        assert_eq!((poll(false, true), poll(true, false)), (Poll::Pending, Poll::Pending));
        assert_eq!(poll(true, true), Poll::Ready(()));
        assert!(company.has_turn(), "who is polled by nobody else waits for nobody");
    }
}
