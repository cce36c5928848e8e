//! The threads of a client: each takes jobs from the queue that all share and runs them as tasks on its own executor.
//!
//! The first thread opens the session and keeps it alive; it is the last to go, and leaves the pool.

use super::pending::Promise;
use crate::Pool;
use crate::api::{IndexError, KeyValue, OrderedIndex};
use crate::engine::AnyEngine;
use crate::index::{Handle, Index};
use farwood_fabric::{Cluster, Endpoint, Executor, Label, SessionOptions};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::ops::Bound;
use std::rc::Rc;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};
use std::thread::JoinHandle;

/// A lease is renewed so often while it runs.
const HEARTBEATS_PER_LEASE: u64 = 4;
/// How often the epoch is to advance, so that memory comes back soon.
const HEARTBEAT_NS: u64 = 100_000_000;
/// Handles that a thread keeps for the next operations.
const SPARE_HANDLES: usize = 64;

/// What is to be done.
#[derive(Debug)]
pub(super) enum Job {
    Create { name: String, engine: AnyEngine, promise: Promise<Index> },
    Open { name: String, promise: Promise<Index> },
    Drop { name: String, promise: Promise<()> },
    List { promise: Promise<Vec<String>> },
    Operate { index: Index, operation: Operation },
}

/// What is to be done to an index.
#[derive(Debug)]
pub(super) enum Operation {
    Get {
        key: Vec<u8>,
        promise: Promise<Option<Vec<u8>>>,
    },
    Put {
        key: Vec<u8>,
        value: Vec<u8>,
        promise: Promise<()>,
    },
    CompareAndSwap {
        key: Vec<u8>,
        expected: Option<Vec<u8>>,
        new: Option<Vec<u8>>,
        promise: Promise<bool>,
    },
    PutIfAbsent {
        key: Vec<u8>,
        value: Vec<u8>,
        promise: Promise<bool>,
    },
    UpdateIfPresent {
        key: Vec<u8>,
        value: Vec<u8>,
        promise: Promise<bool>,
    },
    Delete {
        key: Vec<u8>,
        promise: Promise<bool>,
    },
    Scan {
        start: Bound<Vec<u8>>,
        end: Bound<Vec<u8>>,
        limit: usize,
        reverse: bool,
        promise: Promise<Vec<KeyValue>>,
    },
    Check {
        promise: Promise<usize>,
    },
}

/// Jobs on their way to whichever thread is free.
#[derive(Default, Debug)]
struct Queue {
    state: Mutex<QueueState>,
}

#[derive(Default, Debug)]
struct QueueState {
    jobs: VecDeque<Job>,
    idle: Vec<Waker>,
    closed: bool,
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, job: Job) {
        let mut state = self.lock();
        // Of a closed queue nobody takes: dropping the job breaks its promise.
        if state.closed {
            return;
        }
        state.jobs.push_back(job);
        let waker = state.idle.pop();
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        let idle = std::mem::take(&mut state.idle);
        drop(state);
        idle.into_iter().for_each(Waker::wake);
    }

    /// The next job; `None` when there will be none.
    async fn pop(&self) -> Option<Job> {
        std::future::poll_fn(|context| {
            let mut state = self.lock();
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
}

/// The threads. Dropping them lets what is under way end.
#[derive(Debug)]
pub(super) struct Workers {
    queue: Arc<Queue>,
    /// The first one last.
    threads: Vec<JoinHandle<()>>,
}

impl Workers {
    /// Starts the threads; returns when the session is open and each has its endpoint.
    #[expect(clippy::disallowed_methods, reason = "operations run on threads of the client's own")]
    pub(super) fn start(cluster: &Cluster, threads: usize, label: Label) -> Result<Self, IndexError> {
        let queue = Arc::<Queue>::default();
        let mut workers = Self { queue: Arc::clone(&queue), threads: Vec::new() };
        let (opened, is_open) = channel();
        let (cluster, first) = (cluster.clone(), Arc::clone(&queue));
        let first = std::thread::spawn(move || lead(&cluster, label, &first, &opened));
        let pool = is_open.recv().unwrap_or(Err(IndexError::Unknown));
        let result = pool.and_then(|pool| {
            for _ in 1..threads {
                let (opened, is_open) = channel();
                let (pool, queue) = (pool.clone(), Arc::clone(&queue));
                workers.threads.push(std::thread::spawn(move || follow(&pool, &queue, &opened)));
                is_open.recv().unwrap_or(Err(IndexError::Unknown))?;
            }
            Ok(())
        });
        workers.threads.push(first);
        result.map(|()| workers)
    }

    pub(super) fn give(&self, job: Job) {
        self.queue.push(job);
    }

    pub(super) fn threads(&self) -> usize {
        self.threads.len()
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.queue.close();
        for thread in self.threads.drain(..) {
            // The last clone may be dropped by a task of ours, which cannot wait for itself.
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}

/// The first thread.
fn lead(cluster: &Cluster, label: Label, queue: &Queue, opened: &Sender<Result<Pool, IndexError>>) {
    let executor = Executor::new();
    executor.block_on(async {
        let joined = async {
            let options = SessionOptions { label, ..SessionOptions::default() };
            let pool = Pool::join(cluster, options).await?;
            let endpoint = pool.session().endpoint()?;
            Ok((pool, endpoint))
        };
        let (pool, endpoint) = match joined.await {
            Ok(joined) => joined,
            Err(error) => return drop(opened.send(Err(error))),
        };
        let lease = pool.session().lease_ns();
        let every = if lease == 0 { HEARTBEAT_NS } else { HEARTBEAT_NS.min(lease / HEARTBEATS_PER_LEASE) };
        pool.keep_alive(&endpoint, every);
        let _ = opened.send(Ok(pool.clone()));
        work(&pool, &endpoint, queue).await;
        // If it fails, the lease runs out, and whoever needs what we held takes it.
        let _ = pool.leave(&endpoint).await;
    });
    executor.clear();
}

/// Any other thread.
fn follow(pool: &Pool, queue: &Queue, opened: &Sender<Result<(), IndexError>>) {
    let executor = Executor::new();
    executor.block_on(async {
        match pool.session().endpoint() {
            Ok(endpoint) => {
                let _ = opened.send(Ok(()));
                work(pool, &endpoint, queue).await;
            }
            Err(error) => drop(opened.send(Err(error.into()))),
        }
    });
    executor.clear();
}

/// What the tasks of one thread share.
struct Bench {
    pool: Pool,
    endpoint: Endpoint,
    /// Handles that no task uses just now, by the name of their index.
    spare: RefCell<Vec<Handle>>,
    under_way: Cell<usize>,
    waiting: RefCell<Option<Waker>>,
}

/// Runs jobs until there will be none, and waits for those under way.
async fn work(pool: &Pool, endpoint: &Endpoint, queue: &Queue) {
    let bench = Rc::new(Bench {
        pool: pool.clone(),
        endpoint: endpoint.clone(),
        spare: RefCell::default(),
        under_way: Cell::new(0),
        waiting: RefCell::default(),
    });
    while let Some(job) = queue.pop().await {
        bench.under_way.set(bench.under_way.get() + 1);
        let task = Rc::clone(&bench);
        endpoint.spawn(async move {
            task.run(job).await;
            task.under_way.set(task.under_way.get() - 1);
            if let Some(waker) = task.waiting.take() {
                waker.wake();
            }
        });
    }
    std::future::poll_fn(|context| {
        if bench.under_way.get() == 0 {
            return Poll::Ready(());
        }
        bench.waiting.replace(Some(context.waker().clone()));
        Poll::Pending
    })
    .await;
}

impl Bench {
    async fn run(&self, job: Job) {
        let Self { pool, endpoint, .. } = self;
        match job {
            Job::Create { name, engine, promise } => {
                promise.keep(Index::create(pool, endpoint, &name, &engine).await);
            }
            Job::Open { name, promise } => promise.keep(Index::open(pool, endpoint, &name).await),
            Job::Drop { name, promise } => {
                self.spare.borrow_mut().retain(|handle| handle.index().name() != name);
                promise.keep(Index::drop(pool, endpoint, &name).await);
            }
            Job::List { promise } => {
                let infos = pool.list_indexes(&endpoint.op()).await;
                promise.keep(
                    infos.map(|infos| infos.into_iter().map(|info| info.name).collect()).map_err(Into::into),
                );
            }
            Job::Operate { index, operation } => self.operate(&index, operation).await,
        }
    }

    async fn operate(&self, index: &Index, operation: Operation) {
        let spare = {
            let mut spare = self.spare.borrow_mut();
            let at = spare.iter().position(|handle| handle.index().is_same(index));
            at.map(|at| spare.swap_remove(at))
        };
        let handle = match spare.map_or_else(|| index.handle(&self.endpoint), Ok) {
            Ok(handle) => handle,
            Err(error) => return operation.fail(error),
        };
        operation.run(&handle, &self.endpoint).await;
        let mut spare = self.spare.borrow_mut();
        if spare.len() < SPARE_HANDLES {
            spare.push(handle);
        }
    }
}

impl Operation {
    async fn run(self, handle: &Handle, endpoint: &Endpoint) {
        match self {
            Self::Get { key, promise } => promise.keep(handle.get(&key).await),
            Self::Put { key, value, promise } => promise.keep(handle.put(&key, &value).await),
            Self::CompareAndSwap { key, expected, new, promise } => {
                promise.keep(handle.compare_and_swap(&key, expected.as_deref(), new.as_deref()).await);
            }
            Self::PutIfAbsent { key, value, promise } => {
                promise.keep(handle.put_if_absent(&key, &value).await);
            }
            Self::UpdateIfPresent { key, value, promise } => {
                promise.keep(handle.update_if_present(&key, &value).await);
            }
            Self::Delete { key, promise } => promise.keep(handle.delete(&key).await),
            Self::Scan { start, end, limit, reverse, promise } => {
                let (start, end) = (start.as_ref().map(Vec::as_slice), end.as_ref().map(Vec::as_slice));
                promise.keep(handle.scan(start, end, limit, reverse).await);
            }
            Self::Check { promise } => promise.keep(handle.index().check(endpoint).await),
        }
    }

    fn fail(self, error: IndexError) {
        match self {
            Self::Get { promise, .. } => promise.keep(Err(error)),
            Self::Put { promise, .. } => promise.keep(Err(error)),
            Self::CompareAndSwap { promise, .. }
            | Self::PutIfAbsent { promise, .. }
            | Self::UpdateIfPresent { promise, .. }
            | Self::Delete { promise, .. } => promise.keep(Err(error)),
            Self::Scan { promise, .. } => promise.keep(Err(error)),
            Self::Check { promise } => promise.keep(Err(error)),
        }
    }
}
