//! A compute server's membership in a pool, and the pool's catalog: create, open, list, drop.
//!
//! | module | what it is |
//! |---|---|
//! | [`janitor`] | keeps the session alive, and does the chores that the coordinator asks for |
//! | [`recovery`] | what becomes of a session that is dead |
//!
//! **Drop.** `BeginDrop` begins a flush. Every session learns of it with its next heartbeat: it refuses new operations on the index
//! (`Dropped`), lets those that have begun end, and clears what it has of the index (free objects, retired ones, their journal
//! slots) before it says that it has flushed. Then the memory is released on every server. If whoever drops dies on the
//! way, the coordinator asks somebody else.
//!
//! **Leave.** New operations are refused, those that have begun come to their end, the heap is closed, and then the session. If one
//! does not end in time, or retired objects are not safe yet, the session fences itself instead, and others recover it.

pub mod janitor;
pub mod recovery;

pub use recovery::{Recoverer, RecoveryMistakes};

use crate::shared::heap::{self, Heap};
use crate::shared::intents::Intents;
use crate::shared::opening::{Opening, Openings};
use farwood_fabric::clock::{MILLISECOND, Nanos};
use farwood_fabric::control::{ControlError, IndexId, IndexInfo, IndexState, Reply, Request};
use farwood_fabric::{
    CallError, Cluster, Endpoint, Executor, FabricError, Op, ServerId, Session, SessionId, SessionOptions,
};
use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// How often a drop waits for others to let go of the index, each time twice as long as before, up to a limit.
const MAX_DROP_WAITS: u32 = 200;
const FIRST_WAIT_NS: u64 = 100_000;
const LONGEST_WAIT_NS: u64 = 20_000_000;
/// How often a session that leaves looks whether its operations have ended; the waits between are as above.
const MAX_LEAVING_WAITS: u32 = 120;
/// How often somebody who finds all sessions taken waits for others to make room, and how long each time.
const MAX_JOIN_WAITS: u32 = 100;
const JOIN_WAIT_NS: Nanos = 20 * MILLISECOND;
/// How long a lock is waited for before its owner is looked at, and the part of a lease that this is at most.
const SUSPICION_NS: Nanos = MILLISECOND;
const SUSPICIONS_PER_LEASE: Nanos = 8;

/// How a compute server joins.
#[derive(Clone, Default, Debug)]
pub struct JoinOptions {
    /// The session.
    pub session: SessionOptions,
    /// Mistakes, for tests of the tests.
    pub mistakes: Mistakes,
    /// Who recovers what dead sessions left in indexes of engines that this library does not have.
    pub recoverers: Vec<Arc<dyn Recoverer>>,
}

/// Mistakes that the checkers must catch: they test the test.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Mistakes {
    /// Those of the heap.
    pub heap: heap::Sabotage,
    /// Those of recovery.
    pub recovery: RecoveryMistakes,
    /// A session does not clear what it has of a dropped index before it says that it has flushed.
    pub drop_without_clearing: bool,
}

/// A pool, joined: a session, and the heap that goes with it. Cheap to clone, usable from any thread.
#[derive(Clone, Debug)]
pub struct Pool {
    session: Session,
    heap: Heap,
    intents: Intents,
    mistakes: Mistakes,
    /// Who knows what dead sessions may have left in an index.
    recoverers: Arc<[Arc<dyn Recoverer>]>,
    /// Whom this session is cleaning up after. The coordinator lets one session adopt a victim at a time, but cannot tell that
    /// session's tasks apart.
    recovering: Arc<Mutex<BTreeSet<SessionId>>>,
    /// Tells acquisitions of locks by this session apart, whichever of its indexes they are for: indexes share lock memory.
    acquisitions: Arc<AtomicU32>,
    /// Indexes that are open, so that those who open one again share its cache and its local locks.
    open: Arc<Mutex<OpenIndexes>>,
    openings: Arc<Openings>,
    /// Indexes that this session has laid out and fills, and that nobody else can open yet.
    laid_out: Arc<Mutex<Vec<IndexInfo>>>,
}

type OpenIndexes = BTreeMap<IndexId, Weak<dyn Any + Send + Sync>>;

impl Pool {
    /// Joins the pool with a new session. Runs on the current thread's executor.
    pub async fn join(cluster: &Cluster, options: SessionOptions) -> Result<Self, FabricError> {
        Self::join_with(cluster, JoinOptions { session: options, ..JoinOptions::default() }).await
    }

    /// The same, with all that can be chosen. If all sessions are taken but some of them are dead, those are recovered first.
    pub async fn join_with(cluster: &Cluster, options: JoinOptions) -> Result<Self, FabricError> {
        for _ in 0..MAX_JOIN_WAITS {
            match Self::join_once(cluster, options.clone()).await {
                Err(error) if is_full(&error) => {}
                joined => return joined,
            }
            // Others may be at it, and have the numbers that are kept back for that: then we wait for them.
            match janitor::make_room(cluster, &options).await {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) if is_full(&error) => {
                    let executor = Executor::current().ok_or(FabricError::NoExecutor)?;
                    executor.sleep_until(executor.now().saturating_add(JOIN_WAIT_NS)).await;
                }
                Err(error) => return Err(error),
            }
        }
        Self::join_once(cluster, options).await
    }

    async fn join_once(cluster: &Cluster, options: JoinOptions) -> Result<Self, FabricError> {
        let JoinOptions { session, mistakes, mut recoverers } = options;
        let session = Session::open(cluster, session).await?;
        recoverers.push(Arc::new(crate::engine::Engines));
        let openings = Arc::<Openings>::default();
        let dropped = Arc::downgrade(&openings);
        session.on_drop(move |indexes| {
            if let Some(openings) = dropped.upgrade() {
                openings.drop_all(indexes);
            }
        });
        if !mistakes.drop_without_clearing {
            session.set_clears();
        }
        Ok(Self {
            heap: Heap::new(&session, mistakes.heap),
            intents: Intents::new(&session),
            mistakes,
            recoverers: recoverers.into(),
            recovering: Arc::default(),
            acquisitions: Arc::new(AtomicU32::new(first_acquisition(session.term()))),
            open: Arc::default(),
            openings,
            laid_out: Arc::default(),
            session,
        })
    }

    /// The session.
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// The heap that all indexes of this session share.
    pub fn heap(&self) -> &Heap {
        &self.heap
    }

    /// The room for intents that all indexes of this session share.
    pub fn intents(&self) -> &Intents {
        &self.intents
    }

    /// A number for the next acquisition of a lock, by any task and for any index of this session; wraps.
    pub fn next_acquisition(&self) -> u32 {
        self.acquisitions.fetch_add(1, Ordering::Relaxed)
    }

    /// Whether operations on an index may begin. To be asked for within an operation that has learned that the index is ready: its
    /// pin keeps a drop from passing by.
    pub(crate) fn opening(&self, index: IndexId) -> Arc<Opening> {
        self.openings.of(index, || self.session.is_dropping(index))
    }

    /// Whether anybody has this index open in this session.
    pub(crate) fn has_open(&self, index: IndexId) -> bool {
        self.openings.has(index)
    }

    /// Whether an index that is open here was dropped. Its name may mean another one by now.
    pub fn has_dropped_index(&self) -> bool {
        self.openings.any_dropped()
    }

    /// How long a lock is waited for before its owner is looked at.
    pub(crate) fn suspicion_ns(&self) -> Nanos {
        match self.session.lease_ns() {
            0 => SUSPICION_NS,
            lease => SUSPICION_NS.min(lease / SUSPICIONS_PER_LEASE),
        }
    }

    /// What this session has of an index that is open, if it has.
    pub(crate) fn opened<T: Send + Sync + 'static>(&self, index: IndexId) -> Option<Arc<T>> {
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.get(&index)?.upgrade()?.downcast().ok()
    }

    /// Remembers what this session has of an index, for as long as somebody has it; what others have remembered meanwhile
    /// comes first.
    pub(crate) fn remember<T: Send + Sync + 'static>(&self, index: IndexId, opened: Arc<T>) -> Arc<T> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let earlier = open.get(&index).and_then(Weak::upgrade).and_then(|any| any.downcast().ok());
        earlier.unwrap_or_else(|| {
            open.retain(|_, other| other.strong_count() > 0);
            let any: Arc<dyn Any + Send + Sync> = Arc::clone(&opened) as _;
            open.insert(index, Arc::downgrade(&any));
            opened
        })
    }

    /// Enters a new index into the catalog. Nobody can open it until [`Pool::index_ready`].
    pub async fn create_index(
        &self,
        op: &Op,
        name: &str,
        engine: &str,
        config: &[u8],
    ) -> Result<IndexInfo, FabricError> {
        self.session.create_index(op, name, engine, config).await
    }

    /// Lets others open an index whose layout is in place.
    pub async fn index_ready(&self, op: &Op, index: IndexId) -> Result<(), FabricError> {
        op.control(ServerId::COORDINATOR, &Request::IndexReady { index }).await?;
        self.laid_out().retain(|info| info.id != index);
        Ok(())
    }

    fn laid_out(&self) -> MutexGuard<'_, Vec<IndexInfo>> {
        self.laid_out.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// This session may open the index by its name, before it is ready.
    pub(crate) fn note_laid_out(&self, info: &IndexInfo) {
        self.laid_out().push(info.clone());
    }

    /// Finds an index by name, of a certain engine if one is named.
    pub async fn open_index(
        &self,
        op: &Op,
        name: &str,
        engine: Option<&str>,
    ) -> Result<IndexInfo, FabricError> {
        let is_ours =
            |info: &&IndexInfo| info.name == name && engine.is_none_or(|engine| engine == info.engine);
        if let Some(info) = self.laid_out().iter().find(is_ours) {
            return Ok(info.clone());
        }
        let (name, engine) = (name.to_owned(), engine.map(str::to_owned));
        index_of(op.control(ServerId::COORDINATOR, &Request::OpenIndex { name, engine }).await?)
    }

    /// All indexes of the pool.
    pub async fn list_indexes(&self, op: &Op) -> Result<Vec<IndexInfo>, FabricError> {
        match op.control(ServerId::COORDINATOR, &Request::ListIndexes {}).await? {
            Reply::Indexes { infos } => Ok(infos),
            _ => Err(CallError::Malformed.into()),
        }
    }

    /// Whether an index that was open is still there; to be asked after a flush.
    pub async fn is_ready(&self, op: &Op, index: &IndexInfo) -> Result<bool, FabricError> {
        let infos = self.list_indexes(op).await?;
        Ok(infos
            .iter()
            .any(|info| info.id == index.id && matches!(info.state, IndexState::Ready | IndexState::Offline)))
    }

    /// Drops an index: nobody opens it any more; once every session has let go of it its memory is free. If some session
    /// does not within a bounded time, the error says so, and whoever drops it again goes on from there.
    pub async fn drop_index(&self, endpoint: &Endpoint, name: &str) -> Result<(), FabricError> {
        let op = endpoint.op();
        self.laid_out().retain(|info| info.name != name);
        let request = Request::BeginDrop { name: name.to_owned() };
        let Reply::Dropping { info, generation } = op.control(ServerId::COORDINATOR, &request).await? else {
            return Err(CallError::Malformed.into());
        };
        // This operation must not hold the epoch that the flush waits for.
        drop(op);
        let mut wait_ns = FIRST_WAIT_NS;
        for _ in 0..MAX_DROP_WAITS {
            if self.session.heartbeat(endpoint).await?.flushed_through >= generation {
                return self.finish_drop(&endpoint.op(), info.id).await;
            }
            self.heap.clear_flushed(endpoint).await?;
            endpoint.sleep(wait_ns).await;
            wait_ns = LONGEST_WAIT_NS.min(wait_ns * 2);
        }
        Err(CallError::Control(ControlError::DropPending { name: name.to_owned() }).into())
    }

    /// Releases a dropped index on every server. Whoever does it again finds it done.
    pub(crate) async fn finish_drop(&self, op: &Op, index: IndexId) -> Result<(), FabricError> {
        let seals = self.session.release_index(op, index).await?;
        match op.control(ServerId::COORDINATOR, &Request::FinishDrop { index, seals }).await {
            Err(error) if matches!(error.control(), Some(ControlError::NoSuchIndex { .. })) => Ok(()),
            finished => finished.map(drop),
        }
    }

    /// Leaves the pool, as the top of this file says. Returns how many retired objects had to be left to others.
    pub async fn leave(self, endpoint: &Endpoint) -> Result<usize, FabricError> {
        self.openings.close();
        let mut wait_ns = FIRST_WAIT_NS;
        let mut is_idle = false;
        for _ in 0..MAX_LEAVING_WAITS {
            // Whatever dropped futures left comes to its end, too.
            is_idle = self.session.is_idle() && self.session.settled(endpoint).await;
            if is_idle || self.session.is_fenced() {
                break;
            }
            endpoint.sleep(wait_ns).await;
            wait_ns = LONGEST_WAIT_NS.min(wait_ns * 2);
        }
        let left = if is_idle { self.heap.close(endpoint).await? } else { self.heap.retired() };
        if is_idle && left == 0 && !self.session.is_condemned() {
            self.session.close(endpoint).await?;
        } else {
            self.session.fence_itself(endpoint).await?;
        }
        Ok(left)
    }
}

/// Where the numbers of a session's acquisitions begin. Sessions that have the same number one after the other must not come by the
/// same lock words, so each term begins elsewhere.
fn first_acquisition(term: u64) -> u32 {
    u32::try_from(term.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32).unwrap_or(0)
}

/// Whether all numbers of sessions are taken.
fn is_full(error: &FabricError) -> bool {
    matches!(error.control(), Some(ControlError::SessionsFull { .. }))
}

fn index_of(reply: Reply) -> Result<IndexInfo, FabricError> {
    match reply {
        Reply::Index { info } => Ok(info),
        _ => Err(CallError::Malformed.into()),
    }
}
