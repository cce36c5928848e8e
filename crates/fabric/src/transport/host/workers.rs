//! The cores of a memory server: threads that each interleave the procedures they took.

use super::Host;
use crate::call::{CallId, Principal};
use crate::endpoint::Endpoint;
use crate::exec::{Executor, lock};
use crate::procedure::{Procedure, ProcedureContext};
use crate::transport::Link;
use crate::transport::direct::DirectLink;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, Weak};
use std::task::Waker;

/// A procedure to run.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) call: CallId,
    pub(super) ticket: u64,
    pub(super) procedure: Arc<dyn Procedure>,
    pub(super) request: Vec<u8>,
}

/// A server's cores. They end when this is dropped.
#[derive(Debug)]
pub(super) struct Workers {
    queue: Arc<JobQueue>,
}

#[derive(Default, Debug)]
struct JobQueue {
    state: Mutex<JobState>,
}

#[derive(Default, Debug)]
struct JobState {
    jobs: VecDeque<Job>,
    idle: Vec<Waker>,
    closed: bool,
}

impl Workers {
    #[expect(clippy::disallowed_methods, reason = "the cores of a memory server are threads of its process")]
    pub(super) fn start(host: &Arc<Host>) -> Self {
        let queue = Arc::<JobQueue>::default();
        for _ in 0..host.logic.cores().max(1) {
            let (queue, host) = (Arc::clone(&queue), Arc::downgrade(host));
            std::thread::spawn(move || {
                let executor = Executor::new();
                executor.block_on(work(&executor, &queue, &host));
                executor.clear();
            });
        }
        Self { queue }
    }

    pub(super) fn push(&self, job: Job) {
        let mut state = lock(&self.queue.state);
        state.jobs.push_back(job);
        if let Some(waker) = state.idle.pop() {
            waker.wake();
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        let mut state = lock(&self.queue.state);
        state.closed = true;
        for waker in state.idle.drain(..) {
            waker.wake();
        }
    }
}

impl JobQueue {
    /// The next job; `None` when the server is gone.
    async fn next(&self) -> Option<Job> {
        std::future::poll_fn(|context| {
            let mut state = lock(&self.state);
            if state.closed {
                return std::task::Poll::Ready(None);
            }
            if let Some(job) = state.jobs.pop_front() {
                return std::task::Poll::Ready(Some(job));
            }
            state.idle.push(context.waker().clone());
            std::task::Poll::Pending
        })
        .await
    }
}

/// One core: takes jobs, runs each as a task, so that a long one does not keep a short one waiting.
async fn work(executor: &Executor, queue: &JobQueue, host: &Weak<Host>) {
    while let Some(job) = queue.next().await {
        let Some(strong) = host.upgrade() else { return };
        let CallId { session, term, .. } = job.call;
        let who = Principal { session, term, ticket: job.ticket };
        let link = match DirectLink::near(&strong, who) {
            Ok(link) => link,
            Err(error) => {
                strong.finished(job.call, Err(crate::call::CallError::Failed(error.to_string())));
                continue;
            }
        };
        let endpoint = Endpoint::near(Link::Direct(link), who, executor);
        let context = ProcedureContext { endpoint, caller: job.call.session };
        let running = job.procedure.run(context, job.request);
        let host = Weak::clone(host);
        executor.spawn(async move {
            let outcome = running.await;
            if let Some(host) = host.upgrade() {
                host.finished(job.call, outcome);
            }
        });
    }
}
