//! Jobs on their way to whichever thread is free, and the session in which they are to run.

use super::worker::Job;
use crate::Pool;
use crate::api::IndexError;
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

/// Tells a client's sessions apart: later ones are greater.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Term(u64);

#[derive(Default, Debug)]
pub(super) struct Queue {
    state: Mutex<State>,
}

#[derive(Default, Debug)]
struct State {
    jobs: VecDeque<Job>,
    /// Threads that have nothing to do, and threads that wait for a session.
    idle: Vec<Waker>,
    waiting: Vec<Waker>,
    closed: bool,
    term: Term,
    session: Session,
}

#[derive(Default, Debug)]
enum Session {
    /// The client starts.
    #[default]
    Expected,
    Open(Pool),
    /// There is none, for this reason.
    Lost(IndexError),
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn push(&self, job: Job) {
        let mut state = self.lock();
        // Of a closed queue nobody takes: dropping the job breaks its promise.
        if state.closed {
            return;
        }
        if let Session::Lost(why) = &state.session {
            let why = why.clone();
            drop(state);
            return job.fail(why);
        }
        state.jobs.push_back(job);
        let waker = state.idle.pop();
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// No job will come.
    pub(super) fn close(&self) {
        self.change(|state| state.closed = true);
    }

    pub(super) fn is_closed(&self) -> bool {
        self.lock().closed
    }

    /// A session was opened.
    pub(super) fn begin(&self, pool: &Pool) -> Term {
        self.change(|state| {
            state.term = Term(state.term.0 + 1);
            state.session = Session::Open(pool.clone());
            state.term
        })
    }

    /// A session has ended, unless another has begun.
    pub(super) fn end(&self, term: Term, why: &IndexError) {
        if self.lock().term == term {
            self.suspend(why);
        }
    }

    /// There is no session: what waits fails, and what is given until there is one.
    pub(super) fn suspend(&self, why: &IndexError) {
        let jobs = self.change(|state| {
            state.session = Session::Lost(why.clone());
            std::mem::take(&mut state.jobs)
        });
        for job in jobs {
            job.fail(why.clone());
        }
    }

    /// Changes something that idle threads look at.
    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.lock();
        let changed = change(&mut state);
        let (idle, waiting) = (std::mem::take(&mut state.idle), std::mem::take(&mut state.waiting));
        drop(state);
        idle.into_iter().chain(waiting).for_each(Waker::wake);
        changed
    }

    /// The next job in this session; `None` when there will be none.
    pub(super) async fn pop(&self, term: Term) -> Option<Job> {
        std::future::poll_fn(|context| {
            let mut state = self.lock();
            if state.term != term || matches!(state.session, Session::Lost(_)) {
                return Poll::Ready(None);
            }
            if let Some(job) = state.jobs.pop_front() {
                return Poll::Ready(Some(job));
            }
            if state.closed {
                return Poll::Ready(None);
            }
            state.idle.push(context.waker().clone());
            Poll::Pending
        })
        .await
    }

    /// A session after this one, as soon as there is one; `None` when there is no need any more.
    pub(super) async fn session_after(&self, term: Term) -> Option<(Term, Pool)> {
        std::future::poll_fn(|context| {
            let mut state = self.lock();
            if let (true, Session::Open(pool)) = (state.term > term, &state.session) {
                return Poll::Ready(Some((state.term, pool.clone())));
            }
            if state.closed {
                return Poll::Ready(None);
            }
            state.waiting.push(context.waker().clone());
            Poll::Pending
        })
        .await
    }
}
