//! A session: one compute server as its pool knows it, with a lease, epochs, and the duty to drop hints when asked.
//!
//! All endpoints (threads) of a compute server share one session, because they share its caches and hand its locks to
//! each other. The session is what is fenced, and what owns chunks. Its number is used again when it has ended; its *term*
//! is not (see [`crate::control`]).
//!
//! **Reclamation.** Two kinds of addresses outlive the moment at which they were read:
//! - *pinned* ones, in operations under way. Whoever unlinks an object calls [`Session::retire_stamp`] afterwards and may
//!   reuse the object once [`Session::is_safe`] says so: by then every operation that was under way anywhere at the
//!   unlinking has ended, or its session was fenced.
//! - *hints*, in caches, which may be hours old. Memory that changes its type (index, class) waits for a *flush*: every
//!   session drops its hints ([`Session::on_flush`]) and lets the operations that may have used them end.
//!
//! **Drops.** A reply to a heartbeat also says which indexes are being dropped. The session hears of them before it drops its hints
//! ([`Session::on_drop`]), so that no operation on them begins after the flush has. Where somebody *clears* what the session
//! itself has of such an index, and what it has in its hands ([`Session::set_clears`]), the flush is done only when that has happened:
//! then nothing of the session names the index's memory any more.
//!
//! **Why the stamp is safe.** The heartbeat that follows the unlinking brings epoch E. An operation that began before the
//! unlinking carries an epoch the pool had by then, at most E. `safe > E` says that every session has published a pin above
//! E, so no such operation is left; and a session that knows an epoch above E learned it after the unlinking, so what it
//! begins now cannot find the object.

use crate::addr::{GlobalAddr, ServerId, SessionId};
use crate::call::Principal;
use crate::clock::{Nanos, SECOND};
use crate::control::{
    Chore, ChunkInfo, ControlError, Epochs, IndexId, IndexInfo, Reply, Request, SessionInfo, SessionWord,
};
use crate::endpoint::{Endpoint, Op};
use crate::error::FabricError;
use crate::exec::{Executor, lock};
use crate::label::Label;
use crate::marks;
use crate::pins::{IDLE, PinSlot};
use crate::pool_clock::{PoolClock, PoolTime};
use crate::rarely::Rarely;
use crate::transport::Cluster;
use std::fmt;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::task::Poll;

/// Each session that joins finds the same servers empty.
static LOSSES: LazyLock<Rarely> = LazyLock::new(Rarely::default);
/// A server that has not answered for so long is silent.
const SILENCE_NS: Nanos = 3 * SECOND;
/// How many leases a session tries to settle what is unknown; and how long, if its lease never ends.
const PATIENCE_LEASES: u64 = 4;
const PATIENCE_NS: Nanos = 10 * SECOND;
/// How often it is looked whether all is settled.
const SETTLED_EVERY_NS: Nanos = 10_000;

/// How a session is opened.
#[derive(Clone, Copy, Default, Debug)]
pub struct SessionOptions {
    /// It may only READ.
    pub read_only: bool,
    /// It comes to recover others and will own nothing: it gets in where a pool is full of dead sessions.
    pub reaper: bool,
    /// Who it is, for people who look at the pool.
    pub label: Label,
}

/// One compute server's membership in a pool. Cheap to clone, usable from any thread.
#[derive(Clone)]
pub struct Session {
    inner: Arc<Inner>,
}

type FlushHook = Arc<dyn Fn() + Send + Sync>;
type DropHook = Arc<dyn Fn(&[IndexId]) + Send + Sync>;

struct Inner {
    cluster: Cluster,
    id: SessionId,
    term: u64,
    ticket: u64,
    opening: Opening,
    /// Servers that came back empty: indexes with numbers below these have lost what they had there.
    emptied: Vec<(ServerId, IndexId)>,
    lease_ns: Nanos,
    journals: Vec<GlobalAddr>,
    servers: Vec<ServerId>,
    epoch: AtomicU64,
    safe: AtomicU64,
    /// Flushes up to this one are through everywhere.
    flushed_through: AtomicU64,
    fenced: AtomicBool,
    /// A server is gone, and the session with it.
    lost: AtomicBool,
    /// When the last heartbeat was acknowledged, and whether one has failed since.
    heard: AtomicU64,
    clock: PoolClock,
    unheard: AtomicBool,
    /// The server that did not answer when the others were last looked at.
    silent: Mutex<Option<ServerId>>,
    /// It could not settle what it left behind: see [`Session::condemn`].
    condemned: AtomicBool,
    /// Settlements under way.
    settling: AtomicUsize,
    closed: AtomicBool,
    next_endpoint: AtomicU64,
    pins: Mutex<Vec<Arc<PinSlot>>>,
    flush: Mutex<Flush>,
}

#[derive(Default)]
struct Flush {
    /// Hints were dropped for this generation...
    dropped: u64,
    /// ...in this epoch: when all operations in flight are younger, the flush is done.
    dropped_in: u64,
    /// What the session had of memory that may change its use was cleared for this generation.
    cleared: u64,
    /// Somebody clears; until then a flush is not done.
    clears: bool,
    /// The last generation that is done.
    done: u64,
    /// Indexes that are being dropped.
    dropping: Vec<IndexId>,
    hooks: Vec<FlushHook>,
    drop_hooks: Vec<DropHook>,
}

/// What a session has to clear before a flush is done: free objects in its hands, and all that it has of dropped indexes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ToClear {
    /// For which flush.
    pub generation: u64,
    /// These are dropped.
    pub indexes: Vec<IndexId>,
}

/// When an object was unlinked, as far as reuse is concerned.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct RetireStamp(pub u64);

/// What a dead session left behind.
#[derive(Clone, Debug)]
pub struct Estate {
    /// Whose it was.
    pub victim: SessionId,
    /// Which holder of that number.
    pub term: u64,
    /// The coordinator's seal on this adoption.
    seal: u64,
    /// Its chunks, with the server they are on; they are nobody's now and serve again.
    pub chunks: Vec<(ServerId, ChunkInfo)>,
    /// Its journals: what it had unlinked but not freed, and what it was in the middle of.
    pub journals: Vec<GlobalAddr>,
}

/// What a session says to the servers of its pool to be let in, under the coordinator's seal.
#[derive(Clone, Copy, Debug)]
struct Opening {
    read_only: bool,
    term: u64,
    coordinator: u32,
    next_index: IndexId,
    seal: u64,
}

impl Opening {
    fn request(self, incarnation: u32, indexes: Vec<IndexId>) -> Request {
        let Self { read_only, term, coordinator, next_index, seal } = self;
        Request::AttachSession { read_only, term, coordinator, next_index, incarnation, indexes, seal }
    }

    /// The same as the coordinator says and seals it now, for the memory of one server, with the indexes that there are.
    async fn renewed(self, op: &Op, incarnation: u32) -> Result<(Self, Vec<IndexId>), FabricError> {
        match op.control(ServerId::COORDINATOR, &self.request(incarnation, Vec::new())).await? {
            Reply::Session { next_index, indexes, seal, .. } => {
                Ok((Self { next_index, seal, ..self }, indexes))
            }
            _ => Err(crate::call::CallError::Malformed.into()),
        }
    }

    async fn attach(self, op: &Op, server: ServerId) -> Result<Reply, FabricError> {
        let attached = op.control(server, &self.request(0, Vec::new())).await;
        match attached.as_ref().map_err(FabricError::control) {
            Err(Some(ControlError::Unbound { incarnation, .. })) => {
                let (renewed, indexes) = self.renewed(op, *incarnation).await?;
                op.control(server, &renewed.request(*incarnation, indexes)).await
            }
            _ => attached,
        }
    }
}

/// A settlement under way.
#[derive(Debug)]
pub(crate) struct Settling {
    session: Session,
}

impl Drop for Settling {
    fn drop(&mut self) {
        self.session.inner.settling.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Session {
    /// Opens a session on every server of the pool. Runs on the current thread's executor.
    pub async fn open(cluster: &Cluster, options: SessionOptions) -> Result<Self, FabricError> {
        let executor = Executor::current().ok_or(FabricError::NoExecutor)?;
        let SessionOptions { read_only, reaper, label } = options;
        let stranger = Endpoint::stranger(cluster.connect(Principal::NOBODY)?, &executor);
        let request = Request::OpenSession { read_only, reaper, label };
        let opened = stranger.op().control(ServerId::COORDINATOR, &request).await?;
        let Reply::Session { session: id, term, lease_ns, journal, epochs, ticket, next_index, seal, .. } =
            opened
        else {
            return Err(crate::call::CallError::Malformed.into());
        };
        let who = Principal { session: id, term, ticket };
        let servers: Vec<_> = cluster.view().ids().collect();
        let mut journals = vec![journal];
        // From here on calls carry the session's number.
        let member = Endpoint::near(cluster.connect_to_call(who)?, who, &executor);
        let view = cluster.view();
        let coordinator = view.servers.get(ServerId::COORDINATOR.index()).map_or(0, |one| one.incarnation);
        let opening = Opening { read_only, term, coordinator, next_index, seal };
        let mut emptied = Vec::new();
        for server in servers.iter().copied().filter(|s| *s != ServerId::COORDINATOR) {
            let error = match opening.attach(&member.op(), server).await {
                Ok(Reply::Session { journal, lost_below, .. }) => {
                    journals.push(journal);
                    if lost_below > 1 {
                        emptied.push((server, lost_below));
                    }
                    continue;
                }
                Ok(_) => crate::call::CallError::Malformed.into(),
                Err(error) => error,
            };
            // Not to be had as a whole, so not at all: it ends where it was let in, and last at the coordinator, which gives its number
            // to the next. If that fails too, the lease runs out.
            let others = servers.iter().copied().filter(|s| *s != ServerId::COORDINATOR);
            for attached in others.take(journals.len() - 1).chain([ServerId::COORDINATOR]) {
                if member.op().control(attached, &Request::CloseSession {}).await.is_err() {
                    let request = Request::BeginFence { victim: id };
                    let _ = member.op().control(ServerId::COORDINATOR, &request).await;
                    break;
                }
            }
            return Err(error);
        }
        let inner = Inner {
            cluster: cluster.clone(),
            id,
            term,
            ticket,
            opening,
            emptied,
            lease_ns,
            journals,
            servers,
            epoch: AtomicU64::new(epochs.epoch),
            safe: AtomicU64::new(epochs.safe),
            flushed_through: AtomicU64::new(epochs.flushed_through),
            fenced: AtomicBool::new(false),
            lost: AtomicBool::new(false),
            heard: AtomicU64::new(executor.now()),
            clock: PoolClock::default(),
            unheard: AtomicBool::new(false),
            silent: Mutex::default(),
            condemned: AtomicBool::new(false),
            settling: AtomicUsize::new(0),
            closed: AtomicBool::new(false),
            next_endpoint: AtomicU64::new(0),
            pins: Mutex::default(),
            flush: Mutex::new(Flush {
                dropped: epochs.flush,
                cleared: epochs.flush,
                done: epochs.flush,
                ..Flush::default()
            }),
        };
        let session = Self { inner: Arc::new(inner) };
        session.report_losses(&member).await;
        Ok(session)
    }

    /// Servers that came back empty, each with a number: indexes with lower numbers have lost what they had there.
    pub fn emptied(&self) -> &[(ServerId, IndexId)] {
        &self.inner.emptied
    }

    /// Says which indexes have lost something, if there are any.
    async fn report_losses(&self, member: &Endpoint) {
        if self.emptied().is_empty() {
            return;
        }
        let Ok(Reply::Indexes { infos }) =
            member.op().control(ServerId::COORDINATOR, &Request::ListIndexes {}).await
        else {
            return;
        };
        for (server, below) in self.emptied() {
            let lost = infos.iter().filter(|info| info.id < *below);
            let names: Vec<String> = lost.map(|info| format!("'{}'", info.name)).collect();
            if names.is_empty() {
                continue;
            }
            if let Some(more) = LOSSES.say(member.now()) {
                tracing::error!(
                    "server {server} came back with empty memory: what {} had there is gone, and keys of which a part was there \
                     answer errors; drop the index and load it again, or start {server} with the memory that it had{more}",
                    names.join(", ")
                );
            }
        }
    }

    /// Its number.
    pub fn id(&self) -> SessionId {
        self.inner.id
    }

    /// Its term: unlike its number, nobody else's, ever.
    pub fn term(&self) -> u64 {
        self.inner.term
    }

    /// In whose name its endpoints act, with the proof of it: not to be shown to others.
    pub fn principal(&self) -> Principal {
        Principal { session: self.inner.id, term: self.inner.term, ticket: self.inner.ticket }
    }

    /// The pool it belongs to.
    pub fn cluster(&self) -> &Cluster {
        &self.inner.cluster
    }

    /// The pool's servers.
    pub fn servers(&self) -> &[ServerId] {
        &self.inner.servers
    }

    /// How long it lives without a heartbeat; 0: for ever.
    pub fn lease_ns(&self) -> Nanos {
        self.inner.lease_ns
    }

    /// Its journal on `server`: retire slots, then intents (see [`crate::control`]).
    pub fn journal(&self, server: ServerId) -> Option<GlobalAddr> {
        self.inner.journals.get(server.index()).copied()
    }

    /// An endpoint on this thread. Needs the thread's executor to be running.
    pub fn endpoint(&self) -> Result<Endpoint, FabricError> {
        let executor = Executor::current().ok_or(FabricError::NoExecutor)?;
        let number = self.inner.next_endpoint.fetch_add(1, Ordering::Relaxed);
        Ok(Endpoint::for_session(self, number, self.inner.cluster.connect(self.principal())?, &executor))
    }

    /// The epoch as far as this session knows.
    #[inline]
    pub fn epoch(&self) -> u64 {
        self.inner.epoch.load(Ordering::SeqCst)
    }

    /// Whether the session is known to have been fenced, or has condemned itself, which comes to the same.
    pub fn is_fenced(&self) -> bool {
        self.inner.fenced.load(Ordering::SeqCst) || self.is_condemned()
    }

    /// Gives the session up: it holds something, a lock or a verb that may still land, that it cannot settle by itself. Its
    /// operations fail with `Fenced` from now on and its heartbeats end. Whoever keeps it alive fences it, and others recover it.
    pub fn condemn(&self) {
        if !self.inner.condemned.swap(true, Ordering::SeqCst) {
            marks::hit("session_condemned");
        }
    }

    /// Whether the session has given itself up.
    #[inline]
    pub fn is_condemned(&self) -> bool {
        self.inner.condemned.load(Ordering::Relaxed)
    }

    /// How long a session tries to settle what is unknown before it condemns itself: longer than a lease, so that a server that
    /// is silent for a moment costs nobody his session.
    pub fn patience_ns(&self) -> Nanos {
        match self.inner.lease_ns {
            0 => PATIENCE_NS,
            lease => lease.saturating_mul(PATIENCE_LEASES),
        }
    }

    /// Counts a settlement: work that goes on in the background because its operation was dropped or came to an unknown end.
    pub(crate) fn settling(&self) -> Settling {
        self.inner.settling.fetch_add(1, Ordering::SeqCst);
        Settling { session: self.clone() }
    }

    /// Waits until nothing is left to be settled, at most as long as the session's patience. Whether nothing is; if something
    /// is, the session must be fenced rather than closed.
    pub async fn settled(&self, endpoint: &Endpoint) -> bool {
        let end = endpoint.now().saturating_add(self.patience_ns());
        while self.inner.settling.load(Ordering::SeqCst) > 0 && !self.is_fenced() {
            if endpoint.now() >= end {
                return false;
            }
            endpoint.sleep(SETTLED_EVERY_NS).await;
        }
        self.inner.settling.load(Ordering::SeqCst) == 0 && !self.is_condemned()
    }

    /// Whether the session has ended though nobody closed it: it was fenced, or a server is gone for good. Whoever wants to go on joins
    /// anew, over [`Cluster::again`].
    pub fn is_lost(&self) -> bool {
        self.is_fenced() || self.inner.lost.load(Ordering::SeqCst)
    }

    /// When the last heartbeat was acknowledged, on the executors' clock.
    pub fn heard_at(&self) -> Nanos {
        self.inner.heard.load(Ordering::SeqCst)
    }

    /// The pool's time at a moment of the executors' clock: the coordinator's, which means the same to all sessions. `None` before the
    /// first heartbeat.
    pub fn pool_time(&self, now: Nanos) -> Option<PoolTime> {
        self.inner.clock.at(now)
    }

    /// Whether the last heartbeat failed: the coordinator cannot be reached, for the time being.
    pub fn is_unheard(&self) -> bool {
        self.inner.unheard.load(Ordering::SeqCst)
    }

    /// A server other than the coordinator that does not answer, if the last look at them says so.
    pub fn silent(&self) -> Option<ServerId> {
        *lock(&self.inner.silent)
    }

    /// Whether the session was closed from here.
    pub fn is_closed(&self) -> bool {
        self.inner.closed.load(Ordering::SeqCst)
    }

    /// Ends the session without cleaning up: none of its verbs can land any more, and others recover it.
    pub async fn fence_itself(&self, endpoint: &Endpoint) -> Result<(), FabricError> {
        let request = Request::BeginFence { victim: self.id() };
        let fenced = endpoint.op().control(ServerId::COORDINATOR, &request).await;
        self.inner.fenced.store(true, Ordering::SeqCst);
        match fenced {
            Ok(_) | Err(FabricError::Fenced { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    pub(crate) fn register_pins(&self) -> Arc<PinSlot> {
        let slot = Arc::new(PinSlot::new());
        let mut pins = lock(&self.inner.pins);
        // Endpoints that are gone and hold nothing are forgotten.
        pins.retain(|slot| Arc::strong_count(slot) > 1 || slot.oldest() != IDLE);
        pins.push(Arc::clone(&slot));
        slot
    }

    /// Registers what to do when hints have to be dropped.
    pub fn on_flush(&self, hook: impl Fn() + Send + Sync + 'static) {
        lock(&self.inner.flush).hooks.push(Arc::new(hook));
    }

    /// Registers what to do about indexes that are being dropped, before hints to them are dropped. It may be called more than
    /// once for an index.
    pub fn on_drop(&self, hook: impl Fn(&[IndexId]) + Send + Sync + 'static) {
        lock(&self.inner.flush).drop_hooks.push(Arc::new(hook));
    }

    /// Somebody clears what the session has in its hands, and of dropped indexes ([`Session::to_clear`]); flushes wait for that from now on.
    pub fn set_clears(&self) {
        lock(&self.inner.flush).clears = true;
    }

    /// Whether an index is being dropped, as far as this session knows.
    pub fn is_dropping(&self, index: IndexId) -> bool {
        lock(&self.inner.flush).dropping.contains(&index)
    }

    /// The indexes that are being dropped, as far as this session knows.
    pub fn dropping(&self) -> Vec<IndexId> {
        lock(&self.inner.flush).dropping.clone()
    }

    /// What has to be cleared, once the operations that may still use it have ended, and the settlements that they have left behind.
    pub fn to_clear(&self) -> Option<ToClear> {
        let oldest_pin = self.oldest_pin();
        // Read after the pins: a settlement begins before its operation ends.
        let is_settled = self.inner.settling.load(Ordering::SeqCst) == 0;
        let flush = lock(&self.inner.flush);
        let is_due = flush.cleared < flush.dropped && oldest_pin > flush.dropped_in && is_settled;
        (is_due && flush.clears)
            .then(|| ToClear { generation: flush.dropped, indexes: flush.dropping.clone() })
    }

    /// That was cleared.
    pub fn cleared(&self, done: &ToClear) {
        let mut flush = lock(&self.inner.flush);
        flush.cleared = flush.cleared.max(done.generation);
    }

    /// No operation in flight began before this epoch.
    fn oldest_pin(&self) -> u64 {
        // Read before the pins: an operation that begins after this line pins at least this epoch.
        let known = self.epoch();
        let oldest = lock(&self.inner.pins).iter().map(|slot| slot.oldest()).min().unwrap_or(IDLE);
        oldest.min(known)
    }

    /// Whether no operation is in flight anywhere in this session.
    pub fn is_idle(&self) -> bool {
        lock(&self.inner.pins).iter().all(|slot| slot.oldest() == IDLE)
    }

    /// Renews the lease, publishes the oldest pin, learns the epochs, drops hints if asked to.
    pub async fn heartbeat(&self, endpoint: &Endpoint) -> Result<Epochs, FabricError> {
        self.beat(endpoint, false, false).await.map(|(epochs, _)| epochs)
    }

    /// The same, by somebody who does chores; and one of them, if there are.
    pub async fn heartbeat_and_chore(
        &self,
        endpoint: &Endpoint,
    ) -> Result<(Epochs, Option<Chore>), FabricError> {
        self.beat(endpoint, true, false).await
    }

    async fn beat(
        &self,
        endpoint: &Endpoint,
        does_chores: bool,
        is_waiting: bool,
    ) -> Result<(Epochs, Option<Chore>), FabricError> {
        if self.is_condemned() {
            // Whoever lets its lease run out must not renew it.
            return Err(FabricError::Fenced { session: self.inner.id });
        }
        let oldest_pin = self.oldest_pin();
        let flushed = {
            let mut flush = lock(&self.inner.flush);
            let is_clear = flush.cleared >= flush.dropped || !flush.clears;
            if flush.done < flush.dropped && oldest_pin > flush.dropped_in && is_clear {
                flush.done = flush.dropped;
            }
            flush.done
        };
        let request = Request::Heartbeat { oldest_pin, flushed, does_chores, is_waiting };
        let sent = endpoint.now();
        match endpoint.op().control(ServerId::COORDINATOR, &request).await {
            Ok(Reply::Alive { epochs, dropping, chore, unix_ms }) => {
                self.inner.clock.learn(unix_ms, sent, endpoint.now());
                self.inner.heard.fetch_max(endpoint.now(), Ordering::SeqCst);
                self.inner.unheard.store(false, Ordering::SeqCst);
                self.learn(epochs, dropping);
                Ok((epochs, chore))
            }
            Ok(_) => Err(crate::call::CallError::Malformed.into()),
            Err(error) => {
                self.inner.unheard.store(true, Ordering::SeqCst);
                self.note_end(&error);
                Err(error)
            }
        }
    }

    /// Remembers an error that means the end of the session.
    fn note_end(&self, error: &FabricError) {
        match error {
            FabricError::Fenced { .. } => self.inner.fenced.store(true, Ordering::SeqCst),
            FabricError::ServerLost { .. } => self.inner.lost.store(true, Ordering::SeqCst),
            _ => {}
        }
    }

    /// Asks the servers other than the coordinator, which hears from us often, whether they still know the session: one that came back
    /// does not. What does not end the session says which server is silent ([`Session::silent`]).
    pub async fn look_around(&self, endpoint: &Endpoint) {
        let mut silent = None;
        for server in self.others() {
            let probe =
                Request::Heartbeat { oldest_pin: 0, flushed: 0, does_chores: false, is_waiting: false };
            let op = endpoint.op();
            let mut answer = pin!(op.control(server, &probe));
            let mut limit = pin!(endpoint.sleep(SILENCE_NS));
            let in_time = poll_fn(|context| match answer.as_mut().poll(context) {
                Poll::Ready(answer) => Poll::Ready(Some(answer)),
                Poll::Pending => limit.as_mut().poll(context).map(|()| None),
            });
            let answer = if let Some(answer) = in_time.await {
                answer
            } else {
                // A call may take much longer to fail, and others ask meanwhile.
                *lock(&self.inner.silent) = Some(server);
                answer.await
            };
            if let Err(error) = answer {
                // It looks who is calling before it looks what for.
                if !matches!(error.control(), Some(ControlError::NotCoordinator { .. })) {
                    self.note_end(&error);
                    silent = Some(server);
                    break;
                }
            }
        }
        *lock(&self.inner.silent) = silent;
    }

    fn learn(&self, epochs: Epochs, dropping: Vec<IndexId>) {
        // Replies may overtake each other, so nothing goes back.
        self.inner.epoch.fetch_max(epochs.epoch, Ordering::SeqCst);
        self.inner.safe.fetch_max(epochs.safe, Ordering::SeqCst);
        self.inner.flushed_through.fetch_max(epochs.flushed_through, Ordering::SeqCst);
        let mut flush = lock(&self.inner.flush);
        if epochs.flush > flush.dropped {
            let (hooks, drop_hooks) = (flush.hooks.clone(), flush.drop_hooks.clone());
            flush.dropped = epochs.flush;
            flush.dropping = dropping;
            // Operations on dropped indexes are refused before hints are dropped: none begins that could keep one.
            for hook in drop_hooks {
                hook(&flush.dropping);
            }
            for hook in hooks {
                hook();
            }
            // Read after the hooks ran: operations that may hold a dropped hint pin at most this epoch.
            flush.dropped_in = self.epoch();
        }
    }

    /// Keeps the session alive from a task of `endpoint`, until it is closed or lost. The endpoint's executor has to
    /// run at least every third of a lease.
    pub fn keep_alive(&self, endpoint: &Endpoint, every: Nanos) {
        let (session, endpoint) = (self.clone(), endpoint.clone());
        endpoint.clone().spawn(async move {
            while !session.is_closed() {
                // Errors show in what the session says of itself.
                let _ = session.heartbeat(&endpoint).await;
                if session.is_lost() {
                    return;
                }
                endpoint.sleep(every).await;
            }
        });
    }

    /// The stamp of everything unlinked before this call. One heartbeat, so stamp many objects at once. If it is urgent that they are
    /// safe, those who do nothing send their heartbeats sooner.
    pub async fn retire_stamp(
        &self,
        endpoint: &Endpoint,
        is_urgent: bool,
    ) -> Result<RetireStamp, FabricError> {
        self.beat(endpoint, false, is_urgent).await.map(|(epochs, _)| RetireStamp(epochs.epoch))
    }

    /// Whether objects with this stamp may be reused, as far as this session knows.
    pub fn is_safe(&self, stamp: RetireStamp) -> bool {
        self.inner.safe.load(Ordering::SeqCst) > stamp.0
    }

    /// Every session has done the flushes up to this one.
    pub fn flushed_through(&self) -> u64 {
        self.inner.flushed_through.load(Ordering::SeqCst)
    }

    /// Asks all sessions to drop their hints; returns the flush to wait for.
    pub async fn request_flush(&self, op: &Op) -> Result<u64, FabricError> {
        match op.control(ServerId::COORDINATOR, &Request::RequestFlush {}).await? {
            Reply::Alive { epochs, dropping, .. } => {
                self.learn(epochs, dropping);
                Ok(epochs.flush)
            }
            _ => Err(crate::call::CallError::Malformed.into()),
        }
    }

    /// All sessions of the pool.
    pub async fn list(&self, op: &Op) -> Result<Vec<SessionInfo>, FabricError> {
        match op.control(ServerId::COORDINATOR, &Request::ListSessions {}).await? {
            Reply::Sessions { sessions } => Ok(sessions),
            _ => Err(crate::call::CallError::Malformed.into()),
        }
    }

    /// What the coordinator's table says of a session: one READ. `None` if it cannot be had.
    pub async fn look_at(&self, op: &Op, session: SessionId) -> Result<Option<SessionWord>, FabricError> {
        let Some(addr) = SessionWord::addr(session) else { return Ok(None) };
        Ok(SessionWord::from_raw(op.read_word(addr).await?))
    }

    /// Fences `victim` on every server: when this returns, none of its verbs can land any more. Refused while its lease
    /// runs. Anybody may repeat it; it is then already done. Whoever gets the number next is not touched: all
    /// steps are about the term that the first one found.
    pub async fn fence(&self, op: &Op, victim: SessionId) -> Result<(), FabricError> {
        let begun = op.control(ServerId::COORDINATOR, &Request::BeginFence { victim }).await?;
        self.shut_out(op, victim, victim_of(&begun)?).await
    }

    /// Fences one holder of a number, whether its lease runs or not: by order of somebody who knows that it has to go. Refused if
    /// the number has another holder by now.
    pub async fn evict(&self, op: &Op, victim: SessionId, term: u64) -> Result<(), FabricError> {
        let begun = op.control(ServerId::COORDINATOR, &Request::Evict { victim, term }).await?;
        self.shut_out(op, victim, victim_of(&begun)?).await
    }

    /// The second and the third step of fencing.
    async fn shut_out(
        &self,
        op: &Op,
        victim: SessionId,
        (term, seal): (u64, u64),
    ) -> Result<(), FabricError> {
        marks::hit("adopt_fence_begun");
        for server in self.others() {
            op.control(server, &Request::Fence { victim, term, seal }).await?;
        }
        op.control(ServerId::COORDINATOR, &Request::CompleteFence { victim, term }).await?;
        marks::hit("adopt_fenced");
        Ok(())
    }

    /// Enters a new index in the catalog, and tells the other servers under the coordinator's seal: they give memory to no index of which
    /// they have not heard. If that fails, the index is dropped when the session ends.
    pub async fn create_index(
        &self,
        op: &Op,
        name: &str,
        engine: &str,
        config: &[u8],
    ) -> Result<IndexInfo, FabricError> {
        let (name, engine, config) = (name.to_owned(), engine.to_owned(), config.to_vec());
        let created =
            op.control(ServerId::COORDINATOR, &Request::CreateIndex { name, engine, config }).await?;
        let Reply::Index { info } = created else { return Err(crate::call::CallError::Malformed.into()) };
        if self.inner.servers.len() > 1 {
            let (renewed, _) = self.inner.opening.renewed(op, 0).await?;
            for server in self.others() {
                renewed.attach(op, server).await?;
            }
        }
        Ok(info)
    }

    /// Frees the chunks of a dropped index on every server. The coordinator, which knows whether every session has let go of it, is asked
    /// first; the others take its word. Whoever does it again finds it done. Returns what `FinishDrop` proves that with.
    pub async fn release_index(&self, op: &Op, index: IndexId) -> Result<Vec<u64>, FabricError> {
        let asked = op.control(ServerId::COORDINATOR, &Request::ReleaseIndex { index, seal: 0 }).await?;
        let Reply::Released { seal } = asked else { return Err(crate::call::CallError::Malformed.into()) };
        let mut seals = Vec::new();
        for server in self.others() {
            match op.control(server, &Request::ReleaseIndex { index, seal }).await? {
                Reply::Released { seal } => seals.push(seal),
                _ => return Err(crate::call::CallError::Malformed.into()),
            }
        }
        Ok(seals)
    }

    /// Takes on the clean-up after a fenced session: its chunks become nobody's and are listed. The caller deals with the
    /// journals and the locks, then calls [`Session::finish_adoption`].
    pub async fn adopt(&self, op: &Op, victim: SessionId) -> Result<Estate, FabricError> {
        let begun = op.control(ServerId::COORDINATOR, &Request::BeginAdopt { victim }).await?;
        let (term, seal) = victim_of(&begun)?;
        marks::hit("adopt_begun");
        let mut estate = Estate { victim, term, seal, chunks: Vec::new(), journals: Vec::new() };
        for server in self.inner.servers.iter().copied() {
            let Reply::Adopted { chunks, journal } =
                op.control(server, &Request::AdoptChunks { victim, term, seal }).await?
            else {
                return Err(crate::call::CallError::Malformed.into());
            };
            estate.chunks.extend(chunks.into_iter().map(|chunk| (server, chunk)));
            estate.journals.push(journal);
        }
        Ok(estate)
    }

    /// Ends an adoption: the journals are cleared and the victim's number may be used again.
    pub async fn finish_adoption(&self, op: &Op, estate: &Estate) -> Result<(), FabricError> {
        let Estate { victim, term, seal, .. } = *estate;
        // The coordinator last: only then can the number come back.
        for server in self.others().chain([ServerId::COORDINATOR]) {
            op.control(server, &Request::FinishAdopt { victim, term, seal }).await?;
        }
        Ok(())
    }

    /// Ends the session: no lock is held, nothing is in flight. Its chunks become nobody's.
    pub async fn close(self, endpoint: &Endpoint) -> Result<(), FabricError> {
        self.inner.closed.store(true, Ordering::SeqCst);
        let op = endpoint.op();
        for server in self.others() {
            let Err(error) = op.ask(server, &Request::CloseSession {}).await else { continue };
            match error.control() {
                // It was closed there before.
                Some(ControlError::NoSuchSession { .. }) => {}
                // The server came back, or others have fenced us: something of ours is still there, and others have to clean it up.
                Some(ControlError::SessionFenced { .. }) => return self.fence_itself(endpoint).await,
                _ => return Err(error),
            }
        }
        match op.control(ServerId::COORDINATOR, &Request::CloseSession {}).await {
            Ok(_) | Err(FabricError::Fenced { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Ends a session for which no endpoint was to be had, so that nobody has to wait for the end of its lease.
    pub async fn close_unused(self) -> Result<(), FabricError> {
        let executor = Executor::current().ok_or(FabricError::NoExecutor)?;
        let who = self.principal();
        let link = self.inner.cluster.connect_to_call(who)?;
        self.close(&Endpoint::near(link, who, &executor)).await
    }

    fn others(&self) -> impl Iterator<Item = ServerId> {
        self.inner.servers.iter().copied().filter(|s| *s != ServerId::COORDINATOR)
    }
}

/// The victim's term and the coordinator's seal, which the first step of a fence or an adoption answers with.
fn victim_of(reply: &Reply) -> Result<(u64, u64), FabricError> {
    match *reply {
        Reply::Victim { term, seal } => Ok((term, seal)),
        _ => Err(crate::call::CallError::Malformed.into()),
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Session({})", self.inner.id)
    }
}
