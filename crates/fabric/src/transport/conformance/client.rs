//! A client's way into a scenario and out of it.
//!
//! 1. It opens a session and keeps it alive.
//! 2. Client 0 creates an index named after the scenario, takes raw chunks on every server (the *arena*), zeroes what is
//!    promised to be zero, writes the addresses into the index's anchor and declares it ready; the others poll for it.
//! 3. The body runs. Bodies meet at a barrier, which is a word of the anchor; who fails raises a flag there, so that nobody
//!    waits for it.
//! 4. Everybody counts itself out. Client 0 waits for that, drops the index, and the pool is as it was.
//!
//! ```text
//! anchor  +0     barrier: clients that came, all barriers together
//!         +8     raised by a client that failed
//!         +16    clients that have left
//!         +64    address of each server's arena
//!         +2048  words for the body, zero at first
//! ```

use super::Scenario;
use super::procedures::Task;
use crate::addr::{GlobalAddr, RegionId, ServerId, SessionId};
use crate::buf::SharedBuf;
use crate::clock::{MICROSECOND, MILLISECOND, Nanos, SECOND};
use crate::control::{ANCHOR_BYTES, ControlError, IndexId, Reply, Request};
use crate::endpoint::{Endpoint, Op};
use crate::error::FabricError;
use crate::procedure::ProcedureId;
use crate::session::{Session, SessionOptions};
use crate::transport::Cluster;
use crate::wire::encode;
use std::cell::Cell;
use std::fmt;
use std::future::Future;
use std::panic::Location;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::Poll;

/// How long anybody waits for anything before it is a failure.
pub(super) const PATIENCE_NS: Nanos = 20 * SECOND;
/// How often sessions renew their lease and publish their pins.
pub(super) const HEARTBEAT_NS: Nanos = 500 * MICROSECOND;
/// Raw bytes on each server.
pub(super) const ARENA_BYTES: u64 = 1280 * 1024;
/// Bytes at the front of each arena that are zero when the body begins.
pub(super) const ZEROED_BYTES: u64 = 64 * 1024;
/// Bytes at the front of lock memory that are zero when the body begins.
pub(super) const LOCKS_ZEROED_BYTES: u64 = 4096;

const BARRIER_AT: u64 = 0;
const RAISED_AT: u64 = 8;
const LEFT_AT: u64 = 16;
const ARENAS_AT: u64 = 64;
const MAX_SERVERS: usize = 240;
const BODY_AT: u64 = 2048;
const _: () = assert!(ARENAS_AT + MAX_SERVERS as u64 * 8 <= BODY_AT && BODY_AT < ANCHOR_BYTES);

/// How many words of the anchor belong to the body.
pub(super) const BODY_WORDS: u64 = (ANCHOR_BYTES - BODY_AT) / 8;
/// Polls without a sleep: partners are usually there in no time.
const SPINS: u32 = 200;

/// What was expected and what was seen, and where in the suite.
#[derive(Debug)]
pub(super) struct Failure(String);

/// What a body comes to.
pub(super) type Outcome = Result<(), Failure>;

impl Failure {
    #[track_caller]
    pub(super) fn new(what: impl fmt::Display) -> Self {
        let at = Location::caller();
        let file = at.file().rsplit('/').next().unwrap_or_default();
        Self(format!("{file}:{}: {what}", at.line()))
    }
}

impl<E: std::error::Error> From<E> for Failure {
    #[track_caller]
    fn from(error: E) -> Self {
        Self::new(format_args!("unexpected error: {error}"))
    }
}

impl From<Failure> for String {
    fn from(failure: Failure) -> Self {
        failure.0
    }
}

/// Ends a body with a failure unless something holds.
macro_rules! ensure {
    ($holds:expr, $($message:tt)+) => {
        if !$holds {
            return Err($crate::transport::conformance::client::Failure::new(format_args!($($message)+)));
        }
    };
}
pub(super) use ensure;

/// One client of a scenario.
#[derive(Clone, Debug)]
pub struct Client {
    /// The transport under test.
    pub cluster: Cluster,
    /// The client's session.
    pub session: Session,
    /// Its endpoint.
    pub endpoint: Endpoint,
    /// Its number.
    pub index: u32,
    /// How many clients there are.
    pub of: u32,
    /// Raw memory on each server, the same for all clients.
    pub arena: Vec<GlobalAddr>,
    /// How often the body repeats what it does: a measure, not a count.
    pub rounds: u64,
    /// The scenario's index in the catalog.
    pub catalog: IndexId,
    anchor: GlobalAddr,
    barriers: Rc<Cell<u64>>,
}

/// Runs client number `index` of a scenario on the current thread's executor.
pub async fn run_client(
    scenario: &Scenario,
    cluster: &Cluster,
    index: u32,
    rounds: u64,
) -> Result<(), String> {
    let client = Client::join(scenario, cluster, index, rounds).await.map_err(String::from)?;
    let body = (scenario.body)(client.clone()).await;
    if body.is_err() {
        // If that fails too, the others run out of patience, and the body's failure is still the one to report.
        let _ = client.tell(client.anchor.add(RAISED_AT), 1).await;
    }
    let left = client.leave(scenario).await.map_err(|failure| format!("leaving: {}", failure.0));
    body.and(left).map_err(|why| format!("{} (client {index} of {}): {why}", scenario.name, scenario.clients))
}

impl Client {
    async fn join(scenario: &Scenario, cluster: &Cluster, index: u32, rounds: u64) -> Result<Self, Failure> {
        let session = Session::open(cluster, SessionOptions::default()).await?;
        let endpoint = session.endpoint()?;
        session.keep_alive(&endpoint, HEARTBEAT_NS);
        let mut client = Self {
            cluster: cluster.clone(),
            session,
            endpoint,
            index,
            of: scenario.clients,
            arena: Vec::new(),
            rounds,
            catalog: 0,
            anchor: GlobalAddr::NULL,
            barriers: Rc::default(),
        };
        ensure!(client.servers() <= MAX_SERVERS, "the suite handles at most {MAX_SERVERS} servers");
        if index == 0 {
            client.create(scenario.name).await?;
        } else {
            client.find(scenario.name).await?;
        }
        client.barrier().await?;
        Ok(client)
    }

    async fn create(&mut self, name: &str) -> Outcome {
        let info = self.session.create_index(&self.op(), name, "conformance", &[]).await?;
        (self.catalog, self.anchor) = (info.id, info.anchor);
        let view = self.cluster.view();
        let mut addresses = Vec::new();
        for (n, server) in view.servers.iter().enumerate() {
            let count = u32::try_from(ARENA_BYTES.div_ceil(server.chunk_bytes)).unwrap_or(u32::MAX);
            let offset = self.alloc(n, 1, count, self.session.flushed_through()).await?;
            let arena = GlobalAddr::new(server.server, RegionId::MAIN, offset);
            let op = self.op();
            op.write(arena, self.zeroes(ZEROED_BYTES)).await?;
            let locks = GlobalAddr::new(server.server, RegionId::LOCK, 0);
            op.write(locks, self.zeroes(LOCKS_ZEROED_BYTES)).await?;
            self.arena.push(arena);
            addresses.extend(arena.to_raw().to_le_bytes());
        }
        self.op().write(self.anchor.add(ARENAS_AT), self.endpoint.buf_of(&addresses)).await?;
        self.control(0, &Request::IndexReady { index: self.catalog }).await?;
        Ok(())
    }

    fn zeroes(&self, bytes: u64) -> crate::buf::Buf {
        let mut buf = self.endpoint.buf(size(bytes));
        buf.fill(0);
        buf
    }

    async fn find(&mut self, name: &str) -> Outcome {
        let request = Request::OpenIndex { name: name.to_owned(), engine: Some("conformance".to_owned()) };
        let mut patience = Patience::new(&self.endpoint);
        let info = loop {
            match self.control(0, &request).await {
                Ok(Reply::Index { info }) => break info,
                Ok(other) => return Err(Failure::new(format_args!("an index was opened, but: {other:?}"))),
                Err(error) => match error.control() {
                    Some(ControlError::NoSuchIndex { .. } | ControlError::IndexNotReady { .. }) => {}
                    _ => return Err(error.into()),
                },
            }
            patience.wait("client 0 to create the index").await?;
        };
        (self.catalog, self.anchor) = (info.id, info.anchor);
        let addresses = self.op().read(self.anchor.add(ARENAS_AT), self.servers() * 8).await?;
        self.arena = (0..self.servers()).map(|n| GlobalAddr::from_raw(addresses.word(n * 8))).collect();
        Ok(())
    }

    async fn leave(self, scenario: &Scenario) -> Outcome {
        if self.session.is_fenced() || self.session.heartbeat(&self.endpoint).await.is_err() {
            let doomed = self.index >= self.of - scenario.doomed;
            ensure!(doomed, "the session of client {} was fenced or lost", self.index);
            return Ok(());
        }
        self.op().faa(self.anchor.add(LEFT_AT), 1).await?;
        if self.index == 0 {
            let all = u64::from(scenario.clients - scenario.doomed);
            let mut patience = Patience::new(&self.endpoint);
            while self.op().read_word(self.anchor.add(LEFT_AT)).await? < all {
                patience.wait("everybody to leave").await?;
            }
            self.drop_index(scenario.name).await?;
        }
        let endpoint = self.endpoint.clone();
        self.session.close(&endpoint).await?;
        // The task that kept the session alive ends when it looks next.
        endpoint.sleep(2 * HEARTBEAT_NS).await;
        Ok(())
    }

    async fn drop_index(&self, name: &str) -> Outcome {
        let dropping = self.control(0, &Request::BeginDrop { name: name.to_owned() }).await?;
        let Reply::Dropping { generation, .. } = dropping else {
            return Err(Failure::new(format_args!("a drop began, but: {dropping:?}")));
        };
        self.flushed(generation).await?;
        let seals = self.session.release_index(&self.op(), self.catalog).await?;
        self.control(0, &Request::FinishDrop { index: self.catalog, seals }).await?;
        Ok(())
    }

    /// Waits until every session has done a flush.
    pub(super) async fn flushed(&self, generation: u64) -> Outcome {
        let mut patience = Patience::new(&self.endpoint);
        while self.session.flushed_through() < generation {
            self.session.heartbeat(&self.endpoint).await?;
            patience.wait("all sessions to flush").await?;
        }
        Ok(())
    }

    // --- places ---

    /// How many servers there are.
    pub(super) fn servers(&self) -> usize {
        self.session.servers().len()
    }

    pub(super) fn server(&self, n: usize) -> ServerId {
        self.session.servers()[n]
    }

    /// Byte `offset` of the arena on server `n`.
    pub(super) fn at(&self, n: usize, offset: u64) -> GlobalAddr {
        self.arena[n].add(offset)
    }

    /// Word `word` of lock memory on server `n`.
    pub(super) fn lock(&self, n: usize, word: u64) -> GlobalAddr {
        GlobalAddr::new(self.server(n), RegionId::LOCK, word * 8)
    }

    /// Word `word` of the body's part of the anchor, on the coordinator's board.
    pub(super) fn board(&self, word: u64) -> GlobalAddr {
        self.anchor.add(BODY_AT + (word % BODY_WORDS) * 8)
    }

    // --- work ---

    pub(super) fn op(&self) -> Op {
        self.endpoint.op()
    }

    /// WRITEs a word, and is done when that has completed.
    pub(super) async fn tell(&self, addr: GlobalAddr, word: u64) -> Outcome {
        Ok(self.op().write_word(addr, word).await?)
    }

    pub(super) async fn control(&self, server: usize, request: &Request) -> Result<Reply, FabricError> {
        self.op().control(self.server(server), request).await
    }

    /// Takes raw chunks of the scenario's index; their offset.
    pub(super) async fn alloc(
        &self,
        server: usize,
        class: u16,
        count: u32,
        flushed_through: u64,
    ) -> Result<u64, FabricError> {
        let index = self.catalog;
        let request = Request::AllocChunks { index, class, object_bytes: 0, count, flushed_through };
        match self.control(server, &request).await? {
            Reply::Chunks { offset, .. } => Ok(offset),
            _ => Err(crate::call::CallError::Malformed.into()),
        }
    }

    /// Lets a procedure of the suite work on server `n`.
    pub(super) async fn work(
        &self,
        n: usize,
        procedure: ProcedureId,
        task: &Task,
    ) -> Result<Vec<u8>, FabricError> {
        let target = crate::call::Target::Server(self.server(n));
        self.op().call(target, procedure, encode(task)).await
    }

    pub(super) fn random(&self, below: u64) -> u64 {
        self.endpoint.random_below(below)
    }

    pub(super) fn random_size(&self, below: usize) -> usize {
        size(self.random(below as u64))
    }

    /// A buffer for verbs to share.
    #[expect(clippy::unused_self, reason = "reads like the other buffers")]
    pub(super) fn shared(&self, bytes: usize) -> Result<SharedBuf, Failure> {
        SharedBuf::zeroed(bytes).ok_or_else(|| Failure::new("no memory for a buffer"))
    }

    // --- each other ---

    /// Waits until all clients have come this far.
    pub(super) async fn barrier(&self) -> Outcome {
        self.barriers.set(self.barriers.get() + 1);
        let all = self.barriers.get() * u64::from(self.of);
        self.op().faa(self.anchor.add(BARRIER_AT), 1).await?;
        self.until("all clients at the barrier", self.anchor.add(BARRIER_AT), |came| came >= all).await?;
        Ok(())
    }

    /// Waits until a word is as wanted, and brings it.
    pub(super) async fn until(
        &self,
        what: &str,
        addr: GlobalAddr,
        wanted: impl Fn(u64) -> bool,
    ) -> Result<u64, Failure> {
        let mut patience = Patience::new(&self.endpoint);
        loop {
            // An operation each time: a wait must not hold an epoch.
            match self.op().read_word(addr).await {
                Ok(word) if wanted(word) => return Ok(word),
                Ok(_) => {}
                // Where completions get lost, a look that got lost is repeated.
                Err(FabricError::Unknown { server } | FabricError::Disconnected { server }) => {
                    self.endpoint.reconnect(server).await?;
                }
                Err(error) => return Err(error.into()),
            }
            if patience.polls % 16 == 15 {
                self.check_others().await?;
            }
            patience.wait(what).await?;
        }
    }

    /// Fails if another client has.
    pub(super) async fn check_others(&self) -> Outcome {
        let raised = self.op().read_word(self.anchor.add(RAISED_AT)).await?;
        ensure!(raised == 0, "another client failed");
        Ok(())
    }

    /// A session of this process besides the client's own; nothing keeps it alive.
    pub(super) async fn another_session(&self, read_only: bool) -> Result<(Session, Endpoint), Failure> {
        let session =
            Session::open(&self.cluster, SessionOptions { read_only, ..SessionOptions::default() }).await?;
        let endpoint = session.endpoint()?;
        Ok((session, endpoint))
    }

    /// Fences a session, whether its lease runs or not.
    pub(super) async fn evict(&self, victim: SessionId) -> Outcome {
        let sessions = self.session.list(&self.op()).await?;
        let Some(info) = sessions.into_iter().find(|info| info.session == victim) else {
            return Err(Failure::new(format_args!("{victim} is not listed")));
        };
        Ok(self.session.evict(&self.op(), victim, info.term).await?)
    }

    /// Fences a session, takes over what it left, and frees its number.
    pub(super) async fn bury(&self, victim: SessionId) -> Outcome {
        self.evict(victim).await?;
        let op = self.op();
        let estate = self.session.adopt(&op, victim).await?;
        self.session.finish_adoption(&op, &estate).await?;
        Ok(())
    }
}

/// Waiting with an end: spins, then sleeps longer and longer, then gives up.
pub(super) struct Patience<'a> {
    endpoint: &'a Endpoint,
    deadline: Nanos,
    polls: u32,
    sleep_ns: Nanos,
}

impl<'a> Patience<'a> {
    pub(super) fn new(endpoint: &'a Endpoint) -> Self {
        Self { endpoint, deadline: endpoint.now() + PATIENCE_NS, polls: 0, sleep_ns: 2 * MICROSECOND }
    }

    /// To be called each time that what is waited for is not there.
    pub(super) async fn wait(&mut self, what: &str) -> Outcome {
        ensure!(self.endpoint.now() <= self.deadline, "waited too long for {what}");
        self.polls += 1;
        if self.polls > SPINS {
            self.endpoint.sleep(self.sleep_ns).await;
            self.sleep_ns = (self.sleep_ns * 2).min(MILLISECOND / 2);
        } else {
            self.endpoint.yield_now().await;
        }
        Ok(())
    }
}

/// The result of `future`, unless it takes longer than `span`.
pub(super) async fn within<T>(
    endpoint: &Endpoint,
    span: Nanos,
    future: impl Future<Output = T>,
) -> Option<T> {
    let mut future = pin!(future);
    let mut alarm = pin!(endpoint.sleep(span));
    std::future::poll_fn(|context| {
        if let Poll::Ready(value) = future.as_mut().poll(context) {
            return Poll::Ready(Some(value));
        }
        alarm.as_mut().poll(context).map(|()| None)
    })
    .await
}

/// Polls a future once.
pub(super) async fn poll_once<F: Future>(mut future: Pin<&mut F>) -> Option<F::Output> {
    std::future::poll_fn(|context| match future.as_mut().poll(context) {
        Poll::Ready(value) => Poll::Ready(Some(value)),
        Poll::Pending => Poll::Ready(None),
    })
    .await
}

/// A count as a size. Everything here is far below 4 GiB.
pub(super) fn size(n: u64) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

/// Bytes that do not repeat in a way that a misplaced copy would.
pub(super) fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(len + 8);
    let mut state = seed;
    while bytes.len() < len {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        bytes.extend_from_slice(&mix(state).to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// A good scrambling of 64 bits (SplitMix64).
pub(super) fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The words of a block, and a block of one word repeated.
pub(super) fn words_of(bytes: &[u8]) -> impl Iterator<Item = u64> + '_ {
    bytes.chunks_exact(8).map(|word| word.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte)))
}

pub(super) fn repeat(word: u64, words: usize) -> Vec<u8> {
    word.to_le_bytes().repeat(words)
}
