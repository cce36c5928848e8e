//! A compute server's membership in a pool, and the pool's catalog: create, open, list, drop.

use crate::shared::heap::{self, Heap};
use crate::shared::intents::Intents;
use farwood_fabric::control::{ControlError, IndexId, IndexInfo, IndexState, Reply, Request};
use farwood_fabric::session::Estate;
use farwood_fabric::{
    CallError, Cluster, Endpoint, FabricError, Op, ServerId, Session, SessionId, SessionOptions,
};
use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// How often a drop waits for others to let go of the index, each time twice as long as before, up to a limit.
const MAX_DROP_WAITS: u32 = 200;
const FIRST_WAIT_NS: u64 = 100_000;
const LONGEST_WAIT_NS: u64 = 20_000_000;

/// What became of a dead session's belongings.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Recovered {
    /// Chunks that serve again.
    pub chunks: usize,
    /// Retired objects that were taken over.
    pub objects: u64,
}

/// A pool, joined: a session, and the heap that goes with it. Cheap to clone, usable from any thread.
#[derive(Clone, Debug)]
pub struct Pool {
    session: Session,
    heap: Heap,
    intents: Intents,
    /// Whom this session is cleaning up after. The coordinator lets one session adopt a victim at a time, but cannot tell that
    /// session's tasks apart.
    recovering: Arc<Mutex<BTreeSet<SessionId>>>,
    /// Tells acquisitions of locks by this session apart, whichever of its indexes they are for: indexes share lock memory.
    acquisitions: Arc<AtomicU32>,
    /// Indexes that are open, so that those who open one again share its cache and its local locks.
    open: Arc<Mutex<OpenIndexes>>,
}

type OpenIndexes = BTreeMap<IndexId, Weak<dyn Any + Send + Sync>>;

/// Ends an entry in [`Pool::recovering`], also when the recovery is cut short.
struct Recovering<'a> {
    pool: &'a Pool,
    victim: SessionId,
}

impl<'a> Recovering<'a> {
    /// `None` if another task is at it.
    fn begin(pool: &'a Pool, victim: SessionId) -> Option<Self> {
        let first = pool.recovering.lock().unwrap_or_else(PoisonError::into_inner).insert(victim);
        // Not `then_some`: a guard that is made and dropped would end the other task's entry.
        first.then(|| Self { pool, victim })
    }
}

impl Drop for Recovering<'_> {
    fn drop(&mut self) {
        self.pool.recovering.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.victim);
    }
}

impl Pool {
    /// Joins the pool with a new session. Runs on the current thread's executor.
    pub async fn join(cluster: &Cluster, options: SessionOptions) -> Result<Self, FabricError> {
        Self::join_with(cluster, options, heap::Sabotage::default()).await
    }

    /// Joins with a heap that makes mistakes, for tests of the tests.
    pub async fn join_with(
        cluster: &Cluster,
        options: SessionOptions,
        sabotage: heap::Sabotage,
    ) -> Result<Self, FabricError> {
        let session = Session::open(cluster, options).await?;
        let heap = Heap::new(&session, sabotage);
        let intents = Intents::new(&session);
        let (recovering, open) = (Arc::default(), Arc::default());
        let acquisitions = Arc::new(AtomicU32::new(first_acquisition(session.term())));
        Ok(Self { session, heap, intents, recovering, acquisitions, open })
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
        let (name, engine, config) = (name.to_owned(), engine.to_owned(), config.to_vec());
        index_of(op.control(ServerId::COORDINATOR, &Request::CreateIndex { name, engine, config }).await?)
    }

    /// Lets others open an index whose layout is in place.
    pub async fn index_ready(&self, op: &Op, index: IndexId) -> Result<(), FabricError> {
        op.control(ServerId::COORDINATOR, &Request::IndexReady { index }).await.map(drop)
    }

    /// Finds an index by name, of a certain engine if one is named.
    pub async fn open_index(
        &self,
        op: &Op,
        name: &str,
        engine: Option<&str>,
    ) -> Result<IndexInfo, FabricError> {
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
        Ok(infos.iter().any(|info| info.id == index.id && info.state == IndexState::Ready))
    }

    /// Drops an index: nobody opens it any more; once every session has let go of it its memory is free. If some session
    /// does not within a bounded time, the error says so, and whoever drops it again goes on from there.
    pub async fn drop_index(&self, endpoint: &Endpoint, name: &str) -> Result<(), FabricError> {
        let op = endpoint.op();
        let request = Request::BeginDrop { name: name.to_owned() };
        let Reply::Dropping { info, generation } = op.control(ServerId::COORDINATOR, &request).await? else {
            return Err(CallError::Malformed.into());
        };
        // This operation must not hold the epoch that the flush waits for.
        drop(op);
        let mut wait_ns = FIRST_WAIT_NS;
        for _ in 0..MAX_DROP_WAITS {
            if self.session.heartbeat(endpoint).await?.flushed_through >= generation {
                return self.finish_drop(&endpoint.op(), &info).await;
            }
            endpoint.sleep(wait_ns).await;
            wait_ns = LONGEST_WAIT_NS.min(wait_ns * 2);
        }
        Err(CallError::Control(ControlError::DropPending { name: name.to_owned() }).into())
    }

    async fn finish_drop(&self, op: &Op, info: &IndexInfo) -> Result<(), FabricError> {
        self.heap.forget_index(info.id);
        for server in self.session.servers() {
            op.control(*server, &Request::ReleaseIndex { index: info.id }).await?;
        }
        op.control(ServerId::COORDINATOR, &Request::FinishDrop { index: info.id }).await.map(drop)
    }

    /// Fences a session whose lease has run out and takes over what it held. `clean_up` finishes or undoes what it was in
    /// the middle of and frees its locks, before its number can be used again. `None` if there is nothing for us to do: its
    /// lease runs (a heartbeat may have been on its way), somebody else is at it, or it is gone already.
    pub async fn recover<E: From<FabricError>>(
        &self,
        op: &Op,
        victim: SessionId,
        clean_up: impl AsyncFnOnce(&Op, &Estate) -> Result<(), E>,
    ) -> Result<Option<Recovered>, E> {
        let Some(_exclusive) = Recovering::begin(self, victim) else { return Ok(None) };
        let estate = match self.take_estate(op, victim).await {
            Ok(estate) => estate,
            Err(error) if is_not_ours(&error) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        clean_up(op, &estate).await?;
        let objects = self.heap.inherit(op, &estate).await?;
        match self.session.finish_adoption(op, &estate).await {
            Ok(()) => Ok(Some(Recovered { chunks: estate.chunks.len(), objects })),
            // We were fenced ourselves meanwhile, and somebody else finished the work.
            Err(error) if is_not_ours(&error) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    async fn take_estate(&self, op: &Op, victim: SessionId) -> Result<Estate, FabricError> {
        self.session.fence(op, victim, false).await?;
        self.session.adopt(op, victim).await
    }

    /// Leaves the pool. If retired objects could not be freed, because an operation elsewhere may still reach them, the session
    /// is not closed but fenced: its journal stays, and whoever recovers it next takes them over. Returns how many.
    pub async fn leave(self, endpoint: &Endpoint) -> Result<usize, FabricError> {
        // Whatever dropped futures left comes to its end first; if it does not, others recover this session.
        let is_settled = self.session.settled(endpoint).await;
        let left = if is_settled { self.heap.close(endpoint).await? } else { 0 };
        if is_settled && left == 0 {
            self.session.close(endpoint).await?;
        } else {
            let victim = self.session.id();
            let request = Request::BeginFence { victim, force: true };
            endpoint.op().control(ServerId::COORDINATOR, &request).await?;
        }
        Ok(left)
    }
}

/// The number of a session's first acquisition. Those of one term are far from those of the next, since session numbers are used again:
/// a lock word of the one must not be taken for the other's.
fn first_acquisition(term: u64) -> u32 {
    u32::try_from(term.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32).unwrap_or(0)
}

/// Whether a session is not, or no longer, ours to recover.
fn is_not_ours(error: &FabricError) -> bool {
    matches!(
        error.control(),
        Some(
            ControlError::LeaseAlive { .. }
                | ControlError::BeingAdopted { .. }
                | ControlError::NoSuchSession { .. }
                | ControlError::NotFenced { .. }
        )
    )
}

fn index_of(reply: Reply) -> Result<IndexInfo, FabricError> {
    match reply {
        Reply::Index { info } => Ok(info),
        _ => Err(CallError::Malformed.into()),
    }
}
