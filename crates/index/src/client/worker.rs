//! The threads of a client: each takes jobs from the queue that all share and runs them as tasks on its own executor.
//!
//! The first thread opens the session and keeps it alive; it is the last to go, and leaves the pool. When the session is lost it joins the
//! pool anew, and the others follow.

use super::pending::Promise;
use super::queue::{Queue, Term};
use crate::Pool;
use crate::api::{IndexError, KeyValue, OrderedIndex};
use crate::engine::AnyEngine;
use crate::index::{Handle, Index};
use farwood_fabric::{Cluster, Endpoint, Executor, FabricError, Label, SessionOptions};
use std::cell::{Cell, RefCell};
use std::ops::Bound;
use std::rc::Rc;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Poll, Waker};
use std::thread::JoinHandle;

/// How often it is looked whether the session is still one.
const LOOK_NS: u64 = 100_000_000;
/// How long a client waits before it tries again to join, and how often it looks meanwhile whether it is still wanted.
const REJOIN_NS: u64 = 200_000_000;
const REJOIN_LOOKS: u64 = 4;
/// Handles that a thread keeps for the next operations.
const SPARE_HANDLES: usize = 64;

/// What is to be done.
#[derive(Debug)]
pub(super) enum Job {
    Create { name: String, engine: AnyEngine, promise: Promise<Opened> },
    Open { name: String, promise: Promise<Opened> },
    Drop { name: String, promise: Promise<()> },
    List { promise: Promise<Vec<String>> },
    Operate { index: Arc<Opened>, operation: Operation },
}

impl Job {
    pub(super) fn fail(self, error: IndexError) {
        match self {
            Self::Create { promise, .. } | Self::Open { promise, .. } => promise.keep(Err(error)),
            Self::Drop { promise, .. } => promise.keep(Err(error)),
            Self::List { promise } => promise.keep(Err(error)),
            Self::Operate { operation, .. } => operation.fail(error),
        }
    }
}

/// An index that is open, in one session after the other.
#[derive(Debug)]
pub(super) struct Opened {
    name: String,
    /// With the session that has it open.
    index: Mutex<(Term, Index)>,
}

impl Opened {
    fn new(term: Term, index: Index) -> Self {
        Self { name: index.name().to_owned(), index: Mutex::new((term, index)) }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn engine(&self) -> AnyEngine {
        self.index.lock().unwrap_or_else(PoisonError::into_inner).1.engine().clone()
    }

    /// The index in this session: opened again, if it was open in an earlier one.
    async fn within(&self, bench: &Bench) -> Result<Index, IndexError> {
        let (term, index) = self.index.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if term == bench.term {
            return Ok(index);
        }
        let index = Index::open(&bench.pool, &bench.endpoint, &self.name).await?;
        let mut newest = self.index.lock().unwrap_or_else(PoisonError::into_inner);
        if newest.0 < bench.term {
            *newest = (bench.term, index.clone());
        }
        Ok(index)
    }
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
        let first = std::thread::spawn(move || lead(cluster, label, &first, &opened));
        let joined = is_open.recv().unwrap_or(Err(IndexError::Unknown));
        let result = joined.and_then(|()| {
            for _ in 1..threads {
                let (opened, is_open) = channel();
                let queue = Arc::clone(&queue);
                workers.threads.push(std::thread::spawn(move || follow(&queue, &opened)));
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

/// The first thread: one session after the other, until no job will come.
fn lead(mut cluster: Cluster, label: Label, queue: &Arc<Queue>, opened: &Sender<Result<(), IndexError>>) {
    let mut starting = Some(opened);
    while !queue.is_closed() {
        let executor = Executor::new();
        let ended = executor.block_on(async {
            let options = SessionOptions { label, ..SessionOptions::default() };
            let (pool, endpoint) = Pool::join_alive(&cluster, options).await?;
            let term = queue.begin(&pool);
            endpoint.spawn(watch(pool.clone(), endpoint.clone(), Arc::clone(queue), term));
            if let Some(opened) = starting.take() {
                let _ = opened.send(Ok(()));
            }
            work(&pool, &endpoint, queue, term).await;
            // If it fails, the lease runs out, and whoever needs what we held takes it.
            if pool.session().is_condemned() {
                let _ = pool.session().fence_itself(&endpoint).await;
            } else if !pool.session().is_lost() {
                let _ = pool.leave(&endpoint).await;
            }
            Ok(())
        });
        executor.clear();
        if let Err(error) = ended {
            match starting {
                Some(opened) => return drop(opened.send(Err(error))),
                None => queue.suspend(&error),
            }
        }
        if queue.is_closed() {
            return;
        }
        pause(queue);
        match cluster.again() {
            Ok(again) => cluster = again,
            Err(error) => queue.suspend(&error.into()),
        }
    }
}

/// Waits until the session is lost; then what is given fails until there is another.
async fn watch(pool: Pool, endpoint: Endpoint, queue: Arc<Queue>, term: Term) {
    let session = pool.session();
    while !session.is_lost() {
        endpoint.sleep(LOOK_NS).await;
    }
    queue.end(term, &FabricError::Fenced { session: session.id() }.into());
}

fn pause(queue: &Queue) {
    let executor = Executor::new();
    for _ in 0..REJOIN_LOOKS {
        if !queue.is_closed() {
            executor.block_on(executor.sleep_until(executor.now() + REJOIN_NS / REJOIN_LOOKS));
        }
    }
}

/// Any other thread: works in whichever session there is.
fn follow(queue: &Queue, opened: &Sender<Result<(), IndexError>>) {
    let mut starting = Some(opened);
    let mut term = Term::default();
    loop {
        let executor = Executor::new();
        let next = executor.block_on(async {
            let (next, pool) = queue.session_after(term).await?;
            let endpoint = pool.session().endpoint();
            let outcome = endpoint.as_ref().map(drop).map_err(|error| error.clone().into());
            if let Some(opened) = starting.take() {
                let _ = opened.send(outcome);
            }
            if let Ok(endpoint) = endpoint {
                work(&pool, &endpoint, queue, next).await;
            }
            Some(next)
        });
        executor.clear();
        match next {
            Some(next) => term = next,
            None => return,
        }
    }
}

/// What the tasks of one thread share.
struct Bench {
    pool: Pool,
    term: Term,
    endpoint: Endpoint,
    /// Handles that no task uses just now, by the name of their index.
    spare: RefCell<Vec<Handle>>,
    under_way: Cell<usize>,
    waiting: RefCell<Option<Waker>>,
}

/// Runs jobs until the session has ended or there will be none, and waits for those under way.
async fn work(pool: &Pool, endpoint: &Endpoint, queue: &Queue, term: Term) {
    let bench = Rc::new(Bench {
        pool: pool.clone(),
        term,
        endpoint: endpoint.clone(),
        spare: RefCell::default(),
        under_way: Cell::new(0),
        waiting: RefCell::default(),
    });
    while let Some(job) = queue.pop(term).await {
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
                let created = Index::create(pool, endpoint, &name, &engine).await;
                promise.keep(created.map(|index| Opened::new(self.term, index)));
            }
            Job::Open { name, promise } => {
                let opened = Index::open(pool, endpoint, &name).await;
                promise.keep(opened.map(|index| Opened::new(self.term, index)));
            }
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
            Job::Operate { index, operation } => match index.within(self).await {
                Ok(index) => self.operate(&index, operation).await,
                Err(error) => operation.fail(error),
            },
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
