//! A pool for programs that have threads, or an asynchronous runtime, of their own.
//!
//! A [`Client`] can be cloned and used from anywhere. Operations run on a few threads of its own, each with an executor, an
//! endpoint and as many tasks as operations are under way; they all share one session, and with it caches and locks. What an operation
//! brings is a [`Pending`]: a future for any runtime, or [`Pending::wait`] for threads that block. The hop costs some
//! microseconds; who cannot afford it uses [`Index`](crate::Index) on an executor's thread.
//!
//! **Servers that come back.** When the session is lost (a memory server was started again, or the session was fenced), what is under way
//! fails, and the client joins the pool anew by itself, as often as it takes; operations that are given meanwhile fail at once, with the
//! reason. Indexes that were open are opened again by their names. If a server came back with empty memory, the log says so, and an index
//! that went with it is absent until somebody creates it.
//!
//! ```
//! use farwood_index::{AnyEngine, Client};
//! # let cluster = farwood_memory::embedded(2, 64 << 20).unwrap();
//! let client = Client::new(&cluster, 1)?;     // or Client::connect("tcp://10.0.0.1:7000", b"token", 1)
//! let orders = client.create("orders", &AnyEngine::named("sherman", 8, 8)?).wait()?;
//! orders.put(7u64.to_be_bytes(), *b"8 bytes!").wait()?;
//! let both = [orders.get(7u64.to_be_bytes()), orders.get(8u64.to_be_bytes())];    // under way together
//! let values = both.map(|value| value.wait());
//! assert_eq!(values[0].clone()?.as_deref(), Some(&b"8 bytes!"[..]));
//! assert_eq!(values[1], Ok(None));
//! # Ok::<_, farwood_index::IndexError>(())
//! ```

mod pending;
mod queue;
mod worker;

pub use pending::Pending;

use crate::api::{IndexError, KeyValue};
use crate::engine::AnyEngine;
use farwood_fabric::transport::url::{Access, BadUrl, PoolUrl};
use farwood_fabric::{Cluster, FabricError, Label};
use std::fmt;
use std::ops::{Bound, RangeBounds};
use std::sync::Arc;
use worker::{Job, Opened, Operation, Workers};

/// A pool, from any thread. Cheap to clone; the session is closed with the last clone, when what is under way has ended.
#[derive(Clone)]
pub struct Client {
    workers: Arc<Workers>,
}

/// An index of a client's pool, from any thread. Cheap to clone.
#[derive(Clone)]
pub struct ClientIndex {
    workers: Arc<Workers>,
    engine: AnyEngine,
    opened: Arc<Opened>,
}

impl Client {
    /// A client of a pool, with `threads` threads of its own. Blocks until its session is open.
    pub fn new(cluster: &Cluster, threads: usize) -> Result<Self, IndexError> {
        Self::labelled(cluster, threads, Label::of_process("client"))
    }

    /// The same, known to people who look at the pool by a label of its own.
    pub fn labelled(cluster: &Cluster, threads: usize, label: Label) -> Result<Self, IndexError> {
        Ok(Self { workers: Arc::new(Workers::start(cluster, threads.max(1), label)?) })
    }

    /// The same for servers that run, by their URL: `tcp://HOST:PORT,...`, `verbs://HOST:PORT,...` or
    /// `shm://PATH,...`.
    pub fn connect(url: &str, token: &[u8], threads: usize) -> Result<Self, IndexError> {
        let unreachable = |bad: BadUrl| FabricError::Unreachable { why: bad.to_string() };
        let url: PoolUrl = url.parse().map_err(unreachable)?;
        Self::new(&Cluster::open(&url, &Access::with_token(token))?, threads)
    }

    /// Creates an index, empty, and opens it.
    pub fn create(&self, name: &str, engine: &AnyEngine) -> Pending<ClientIndex> {
        let (promise, pending) = pending::promise();
        let (name, engine, workers) = (name.to_owned(), engine.clone(), Arc::clone(&self.workers));
        let promise = promise.map(move |opened| ClientIndex::new(workers, opened));
        self.workers.give(Job::Create { name, engine, promise });
        pending
    }

    /// Opens an index that is there.
    pub fn open(&self, name: &str) -> Pending<ClientIndex> {
        let (promise, pending) = pending::promise();
        let (name, workers) = (name.to_owned(), Arc::clone(&self.workers));
        let promise = promise.map(move |opened| ClientIndex::new(workers, opened));
        self.workers.give(Job::Open { name, promise });
        pending
    }

    /// Drops an index and frees its memory, once every session has let go of it.
    pub fn drop_index(&self, name: &str) -> Pending<()> {
        let (promise, pending) = pending::promise();
        self.workers.give(Job::Drop { name: name.to_owned(), promise });
        pending
    }

    /// The names of the pool's indexes.
    pub fn indexes(&self) -> Pending<Vec<String>> {
        let (promise, pending) = pending::promise();
        self.workers.give(Job::List { promise });
        pending
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Client({} threads)", self.workers.threads())
    }
}

impl ClientIndex {
    fn new(workers: Arc<Workers>, opened: Opened) -> Self {
        Self { workers, engine: opened.engine(), opened: Arc::new(opened) }
    }

    fn give(&self, operation: Operation) {
        self.workers.give(Job::Operate { index: Arc::clone(&self.opened), operation });
    }

    /// Its name.
    pub fn name(&self) -> &str {
        self.opened.name()
    }

    /// Its engine, with the settings that it was created with.
    pub fn engine(&self) -> &AnyEngine {
        &self.engine
    }

    /// The value of a key.
    pub fn get(&self, key: impl Into<Vec<u8>>) -> Pending<Option<Vec<u8>>> {
        let (promise, pending) = pending::promise();
        self.give(Operation::Get { key: key.into(), promise });
        pending
    }

    /// Sets the value of a key.
    pub fn put(&self, key: impl Into<Vec<u8>>, value: impl Into<Vec<u8>>) -> Pending<()> {
        let (promise, pending) = pending::promise();
        self.give(Operation::Put { key: key.into(), value: value.into(), promise });
        pending
    }

    /// If the key holds `expected` (`None`: nothing), lets it hold `new` (`None`: nothing). Whether it did.
    pub fn compare_and_swap(
        &self,
        key: impl Into<Vec<u8>>,
        expected: Option<Vec<u8>>,
        new: Option<Vec<u8>>,
    ) -> Pending<bool> {
        let (promise, pending) = pending::promise();
        self.give(Operation::CompareAndSwap { key: key.into(), expected, new, promise });
        pending
    }

    /// Sets the value of a key that is absent. Whether it was.
    pub fn put_if_absent(&self, key: impl Into<Vec<u8>>, value: impl Into<Vec<u8>>) -> Pending<bool> {
        let (promise, pending) = pending::promise();
        self.give(Operation::PutIfAbsent { key: key.into(), value: value.into(), promise });
        pending
    }

    /// Sets the value of a key that is present. Whether it was.
    pub fn update_if_present(&self, key: impl Into<Vec<u8>>, value: impl Into<Vec<u8>>) -> Pending<bool> {
        let (promise, pending) = pending::promise();
        self.give(Operation::UpdateIfPresent { key: key.into(), value: value.into(), promise });
        pending
    }

    /// Removes a key. Whether it was there.
    pub fn delete(&self, key: impl Into<Vec<u8>>) -> Pending<bool> {
        let (promise, pending) = pending::promise();
        self.give(Operation::Delete { key: key.into(), promise });
        pending
    }

    /// Up to `limit` pairs in a range, from the lower end.
    pub fn scan<'a>(&self, range: impl RangeBounds<&'a [u8]>, limit: usize) -> Pending<Vec<KeyValue>> {
        self.range(&range, limit, false)
    }

    /// Up to `limit` pairs in a range, from the upper end.
    pub fn scan_back<'a>(&self, range: impl RangeBounds<&'a [u8]>, limit: usize) -> Pending<Vec<KeyValue>> {
        self.range(&range, limit, true)
    }

    fn range<'a>(
        &self,
        range: &impl RangeBounds<&'a [u8]>,
        limit: usize,
        reverse: bool,
    ) -> Pending<Vec<KeyValue>> {
        let owned = |bound: Bound<&&[u8]>| bound.map(|key| key.to_vec());
        let (start, end) = (owned(range.start_bound()), owned(range.end_bound()));
        let (promise, pending) = pending::promise();
        self.give(Operation::Scan { start, end, limit, reverse, promise });
        pending
    }

    /// Walks the whole index while nobody writes and verifies every invariant; how many heap objects it has. Waits for the recovery of
    /// dead sessions first.
    pub fn check(&self) -> Pending<usize> {
        let (promise, pending) = pending::promise();
        self.give(Operation::Check { promise });
        pending
    }
}

impl fmt::Debug for ClientIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ClientIndex('{}')", self.name())
    }
}
