//! Futures that one task polls in turns, and that make way for each other while memory is on its way to the processor.
//!
//! Where a thread carries out verbs itself, a READ never waits for a completion, but it does wait for memory: a good hundred nanoseconds for
//! each line that is in no cache. If the thread has something else to do meanwhile, it asks for the line first (a prefetch), does the
//! other thing, and comes back. A task switch through the executor would cost more than it gains, so this is between a task and the
//! futures that it polls itself: it says that there are several ([`Company::poll`]), and polls again those that stepped aside.
//!
//! Some of them may have to take effect in order ([`crate::pipeline`]): whoever polls one says whether it has its turn, and whoever is
//! about to change something waits for it ([`Op::turn`](crate::Op::turn)).

use std::cell::Cell;
use std::fmt;
use std::rc::Rc;
use std::task::Poll;

/// Whether futures on an endpoint have company, whether they have their turn, and whether one has stepped aside.
#[derive(Clone, Default)]
pub struct Company {
    state: Rc<State>,
}

#[derive(Default)]
struct State {
    has_others: Cell<bool>,
    /// What is polled may not take effect yet.
    is_early: Cell<bool>,
    stepped_aside: Cell<bool>,
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
