//! Transport `local`: memory servers inside the process, the embedded default of the library.
//!
//! Verbs run inline on the caller's thread, straight on the server's memory; there is no server CPU in their path and
//! nothing is ever in flight. Calls go to the server's logic on the caller's thread; procedures run on threads of their
//! own, as many as the server has cores.
//!
//! **Fencing.** A connection has a `busy` flag that its endpoint raises before each batch that may change memory, and an
//! `open` flag that it looks at afterwards; `fence` lowers `open`, then waits until `busy` is down. Both sides use
//! sequentially consistent accesses, so either the endpoint sees the fence or the fence waits for the batch.
//!
//! **Completed means visible** (rule 5): a batch that wrote ends with a full fence, so that neither a later verb nor a
//! plain load of the caller can overtake its stores.

use super::{Cluster, Inbox, Link, ReplySlot, View, Way};
use crate::addr::{GlobalAddr, RegionId, ServerId, SessionId};
use crate::buf::{Buf, BufPool};
use crate::call::{Call, CallError, CallId, CallOutcome, Target};
use crate::caps::Capabilities;
use crate::clock::{Nanos, RealClock};
use crate::control::ControlError;
use crate::endpoint::Endpoint;
use crate::error::FabricError;
use crate::exec::{Executor, lock};
use crate::mem::{RacyMemory, Side};
use crate::procedure::{Procedure, ProcedureContext};
use crate::region::{Permissions, RegionTable};
use crate::server::{HostAction, ServerLogic, ServerMemory, StartError};
use crate::verb::{Batch, BatchFailure, BatchResult, Completed, Landing, Output, Source, Verb, VerbOutcome};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Mutex, Weak};

/// The most verbs in one batch; local has no limit of its own, so this is what an RDMA send queue takes.
const MAX_BATCH: usize = 128;

/// The memory servers of this process.
#[derive(Debug)]
pub struct LocalCluster {
    view: View,
    servers: Vec<Arc<LocalServer>>,
    capabilities: Capabilities,
    /// Calls whose reply has not come.
    waiting: Mutex<FxHashMap<CallId, (Arc<ReplySlot>, Target)>>,
    /// Sessions that serve calls.
    inboxes: Mutex<FxHashMap<SessionId, Arc<Inbox>>>,
    clock: RealClock,
}

struct LocalServer {
    id: ServerId,
    logic: Arc<dyn ServerLogic>,
    memory: LocalMemory,
    table: RegionTable,
    /// Who may use the server, with the connections to close when it may no longer.
    admitted: Mutex<FxHashMap<SessionId, Admitted>>,
    workers: Mutex<Option<Arc<Workers>>>,
    /// Held while a call is answered and its actions are carried out: the logic counts on their order.
    turn: Mutex<()>,
}

#[derive(Debug)]
struct Admitted {
    term: u64,
    permissions: Permissions,
    connections: Vec<Arc<Connection>>,
}

#[derive(Default, Debug)]
struct LocalMemory {
    regions: [Option<RacyMemory>; RegionId::MAX as usize + 1],
}

impl LocalMemory {
    #[inline]
    fn region(&self, region: RegionId) -> &RacyMemory {
        self.regions[region.get() as usize].as_ref().expect("checked against the region table")
    }
}

/// An offset as an index. Regions are mapped, so their offsets fit.
#[inline]
fn at(offset: u64) -> usize {
    usize::try_from(offset).expect("a mapped offset fits the address space")
}

impl ServerMemory for LocalMemory {
    fn load(&self, region: RegionId, offset: u64) -> u64 {
        self.region(region).word(at(offset)).load(Ordering::SeqCst)
    }

    fn store(&self, region: RegionId, offset: u64, value: u64) {
        self.region(region).word(at(offset)).store(value, Ordering::SeqCst);
    }
}

impl fmt::Debug for LocalServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LocalServer({})", self.id)
    }
}

impl LocalCluster {
    /// Starts these servers, in any order, and connects them as one pool.
    pub fn start(logics: Vec<Arc<dyn ServerLogic>>) -> Result<Cluster, StartError> {
        let clock = RealClock::new();
        let mut servers = Vec::new();
        let mut identities = Vec::new();
        for logic in logics {
            let mut memory = LocalMemory::default();
            for spec in logic.regions() {
                let region = RacyMemory::zeroed(at(spec.bytes))
                    .ok_or_else(|| StartError::Config(format!("no memory for {} bytes", spec.bytes)))?;
                memory.regions[spec.id.get() as usize] = Some(region);
            }
            let identity = logic.start(&memory, clock.now())?;
            let server = LocalServer {
                id: identity.server,
                logic,
                memory,
                table: RegionTable::new(&identity.regions),
                admitted: Mutex::default(),
                workers: Mutex::default(),
                turn: Mutex::default(),
            };
            identities.push(identity);
            servers.push(Arc::new(server));
        }
        let view = View::new(identities).map_err(|error| StartError::Mismatch(error.to_string()))?;
        servers.sort_by_key(|server| server.id);
        let lock_bytes = servers.iter().filter_map(|s| s.table.get(RegionId::LOCK)).map(|r| r.bytes).min();
        let capabilities = Capabilities {
            masked_cas: true,
            lock_memory_bytes: lock_bytes.unwrap_or(0),
            line_atomic: false,
            ordered_lines_bytes: 0,
            ordered_reads: true,
            max_batch: MAX_BATCH,
            session_calls: true,
        };
        let (waiting, inboxes) = (Mutex::default(), Mutex::default());
        let cluster = LocalCluster { view, servers, capabilities, waiting, inboxes, clock };
        Ok(Cluster { way: Way::Local(Arc::new(cluster)) })
    }

    pub(crate) fn view(&self) -> &View {
        &self.view
    }

    pub(crate) fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn now(&self) -> Nanos {
        self.clock.now()
    }

    pub(crate) fn connect(self: &Arc<Self>, session: SessionId, term: u64) -> LocalLink {
        let open = |server: &Arc<LocalServer>| Some(server.connect(session, term));
        self.link(session, self.servers.iter().map(open).collect())
    }

    /// The link of a procedure on `near`: it reaches that server's memory only, in its caller's name, so that fencing the
    /// caller ends it too.
    fn connect_near(self: &Arc<Self>, near: &LocalServer, call: CallId) -> LocalLink {
        let open = |server: &Arc<LocalServer>| {
            (server.id == near.id).then(|| server.connect(call.session, call.term))
        };
        self.link(call.session, self.servers.iter().map(open).collect())
    }

    fn link(self: &Arc<Self>, session: SessionId, routes: Vec<Option<Route>>) -> LocalLink {
        let capabilities = self.capabilities;
        LocalLink { cluster: Arc::clone(self), session, capabilities, routes: routes.into() }
    }

    fn deliver(&self, to: CallId, outcome: CallOutcome) {
        let slot = lock(&self.waiting).remove(&to);
        if let Some((slot, _)) = slot {
            slot.set(outcome);
        }
    }

    /// Answers the calls that will have no other answer, now that `server` has fenced `session`: those the session sent
    /// there (except `answered`, whose reply is on its way) and, from the coordinator on, those that others sent to it.
    fn end_calls(&self, server: ServerId, session: SessionId, answered: &[CallId]) {
        let fenced = CallError::Control(ControlError::SessionFenced { session });
        lock(&self.waiting).retain(|id, (slot, target)| {
            let sent = id.session == session && *target == Target::Server(server) && !answered.contains(id);
            let received = server == ServerId::COORDINATOR && *target == Target::Session(session);
            if sent || received {
                slot.set(Err(if sent { fenced.clone() } else { CallError::Unknown }));
            }
            !(sent || received)
        });
    }

    /// Carries out what a server's logic decided, in order.
    fn carry_out(self: &Arc<Self>, server: &Arc<LocalServer>, actions: Vec<HostAction>) {
        let answered: SmallVec<[CallId; 2]> = actions.iter().filter_map(HostAction::answers).collect();
        for action in actions {
            match action {
                HostAction::Admit { session, term, permissions } => {
                    let mut admitted = lock(&server.admitted);
                    // The same session may be admitted again; its connections stay.
                    let connections = admitted.remove(&session).map(|a| a.connections).unwrap_or_default();
                    admitted.insert(session, Admitted { term, permissions, connections });
                }
                HostAction::Fence { session } => {
                    let admitted = lock(&server.admitted).remove(&session);
                    for connection in admitted.into_iter().flat_map(|a| a.connections) {
                        connection.close();
                    }
                    if server.id == ServerId::COORDINATOR {
                        if let Some(inbox) = lock(&self.inboxes).remove(&session) {
                            inbox.close();
                        }
                    }
                    self.end_calls(server.id, session, &answered);
                }
                HostAction::Reply { to, outcome } => self.deliver(to, outcome),
                HostAction::Run { call, procedure, request } => {
                    server.workers(self).push(Job { call, procedure, request });
                }
            }
        }
    }
}

impl LocalServer {
    fn connect(self: &Arc<Self>, session: SessionId, term: u64) -> Route {
        let mut admitted = lock(&self.admitted);
        // Nobody's endpoints, and those of a session that is not (or no longer) admitted, can call but not touch memory.
        let entry = admitted.get_mut(&session).filter(|entry| entry.term == term);
        let connection = Arc::new(Connection { busy: false.into(), open: entry.is_some().into() });
        let permissions = entry.as_ref().map_or(Permissions::NONE, |e| e.permissions);
        if let Some(entry) = entry {
            // Endpoints come and go: forget those that have gone.
            entry.connections.retain(|c| Arc::strong_count(c) > 1);
            entry.connections.push(Arc::clone(&connection));
        }
        Route { server: Arc::clone(self), connection, table: self.table.restricted_to(permissions) }
    }

    /// The server's cores, started when the first procedure is called.
    fn workers(self: &Arc<Self>, cluster: &Arc<LocalCluster>) -> Arc<Workers> {
        let mut workers = lock(&self.workers);
        Arc::clone(workers.get_or_insert_with(|| Workers::start(cluster, self)))
    }
}

/// One endpoint's way to one server. On a line of its own: `busy` changes with every batch.
#[derive(Debug)]
#[repr(align(64))]
struct Connection {
    busy: AtomicBool,
    open: AtomicBool,
}

impl Connection {
    /// Raises `busy`; false if the connection is closed.
    #[inline]
    fn enter(&self) -> bool {
        self.busy.swap(true, Ordering::SeqCst);
        let open = self.open.load(Ordering::SeqCst);
        if !open {
            self.leave();
        }
        open
    }

    /// Whether the connection is open. A READ changes nothing, so a fence need not wait for it; but what it brings counts only
    /// if the connection is still open afterwards, or it might be memory that was reused meanwhile.
    #[inline]
    fn check_open(&self, session: SessionId) -> Result<(), FabricError> {
        if self.open.load(Ordering::Acquire) { Ok(()) } else { Err(FabricError::Fenced { session }) }
    }

    #[inline]
    fn leave(&self) {
        self.busy.store(false, Ordering::Release);
    }

    /// Returns when no batch runs on the connection and none can begin.
    fn close(&self) {
        self.open.store(false, Ordering::SeqCst);
        // A batch takes microseconds at most and never blocks, so this ends.
        while self.busy.load(Ordering::SeqCst) {
            std::hint::spin_loop();
        }
    }
}

#[derive(Debug)]
struct Route {
    server: Arc<LocalServer>,
    connection: Arc<Connection>,
    table: RegionTable,
}

/// An endpoint's connections to the servers of this process.
#[derive(Debug)]
pub(crate) struct LocalLink {
    cluster: Arc<LocalCluster>,
    session: SessionId,
    capabilities: Capabilities,
    routes: Box<[Option<Route>]>,
}

impl LocalLink {
    pub(crate) fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    #[inline]
    fn route(&self, server: ServerId) -> Result<&Route, FabricError> {
        match self.routes.get(server.index()) {
            Some(Some(route)) => Ok(route),
            _ => Err(FabricError::UnknownServer { server }),
        }
    }

    #[inline]
    pub(crate) fn table(&self, server: ServerId) -> Result<&RegionTable, FabricError> {
        self.route(server).map(|route| &route.table)
    }

    /// Runs a checked batch, verb by verb.
    pub(crate) fn execute(&self, batch: Batch, pool: &BufPool) -> BatchResult {
        let verbs = batch.len();
        let route = self.route(batch.server()).map_err(|e| BatchFailure::refused(e, 0, verbs))?;
        if !route.connection.enter() {
            let outcomes = (0..verbs).map(|_| VerbOutcome::NotExecuted).collect();
            let error = FabricError::Fenced { session: self.session };
            return Err(Box::new(BatchFailure { error, at: 0, outcomes }));
        }
        let mut outputs = SmallVec::new();
        let mut wrote = false;
        for verb in batch.verbs {
            if wrote && matches!(verb, Verb::Read { .. }) {
                // WRITE then READ is ordered, which stores and loads of one thread are not.
                fence(Ordering::SeqCst);
                wrote = false;
            }
            wrote |= matches!(verb, Verb::Write { .. });
            outputs.push(apply(verb, &route.server.memory, pool));
        }
        if wrote {
            fence(Ordering::SeqCst);
        }
        route.connection.leave();
        Ok(Completed { outputs })
    }

    /// READ without a batch.
    #[inline]
    pub(crate) fn read(&self, addr: GlobalAddr, len: usize, pool: &BufPool) -> Result<Buf, FabricError> {
        let route = self.route(addr.server())?;
        route.table.check(addr, len as u64, Permissions::READ)?;
        let mut buf = pool.take(len);
        route.server.memory.region(addr.region()).read(at(addr.offset()), &mut buf);
        route.connection.check_open(self.session)?;
        Ok(buf)
    }

    /// READ of one aligned word, without a buffer.
    #[inline]
    pub(crate) fn read_word(&self, addr: GlobalAddr) -> Result<u64, FabricError> {
        let route = self.route(addr.server())?;
        if !addr.is_word_aligned() {
            return Err(FabricError::Misaligned { addr });
        }
        route.table.check(addr, 8, Permissions::READ)?;
        let word = route.server.memory.region(addr.region()).word(at(addr.offset())).load(Ordering::SeqCst);
        route.connection.check_open(self.session)?;
        Ok(word)
    }

    /// WRITE of one aligned word, without a buffer.
    #[inline]
    pub(crate) fn write_word(&self, addr: GlobalAddr, value: u64) -> Result<(), FabricError> {
        self.on_word(addr, Permissions::WRITE, |word| {
            word.swap(value, Ordering::SeqCst);
        })
    }

    /// CAS without a batch.
    #[inline]
    pub(crate) fn cas(&self, addr: GlobalAddr, expected: u64, desired: u64) -> Result<u64, FabricError> {
        self.on_word(addr, Permissions::ATOMIC, |word| compare_exchange(word, expected, desired))
    }

    #[inline]
    fn on_word<T>(
        &self,
        addr: GlobalAddr,
        needed: Permissions,
        access: impl FnOnce(&std::sync::atomic::AtomicU64) -> T,
    ) -> Result<T, FabricError> {
        let route = self.route(addr.server())?;
        if !addr.is_word_aligned() {
            return Err(FabricError::Misaligned { addr });
        }
        route.table.check(addr, 8, needed)?;
        if !route.connection.enter() {
            return Err(FabricError::Fenced { session: self.session });
        }
        let result = access(route.server.memory.region(addr.region()).word(at(addr.offset())));
        route.connection.leave();
        Ok(result)
    }

    pub(crate) async fn call(&self, target: Target, call: Call) -> CallOutcome {
        let slot = Arc::new(ReplySlot::default());
        lock(&self.cluster.waiting).insert(call.id, (Arc::clone(&slot), target));
        let _guard = Waiting { cluster: &self.cluster, id: call.id };
        match target {
            Target::Server(id) => {
                let Some(server) = self.cluster.servers.get(id.index()) else {
                    return Err(CallError::Failed(FabricError::UnknownServer { server: id }.to_string()));
                };
                let turn = lock(&server.turn);
                let actions = server.logic.call(&server.memory, call, self.cluster.now());
                self.cluster.carry_out(server, actions);
                drop(turn);
            }
            Target::Session(session) => {
                let inbox = lock(&self.cluster.inboxes).get(&session).cloned();
                inbox.ok_or(CallError::NoSuchSession { session })?.push(call);
            }
        }
        slot.wait().await
    }

    /// Nothing is ever in flight, so there is nothing to fence: a connection that is closed stays so.
    pub(crate) fn reconnect(&self, server: ServerId) -> Result<(), FabricError> {
        let route = self.route(server)?;
        if route.connection.open.load(Ordering::SeqCst) {
            Ok(())
        } else {
            Err(FabricError::Fenced { session: self.session })
        }
    }

    pub(crate) fn serve(&self) -> Arc<Inbox> {
        let mut inboxes = lock(&self.cluster.inboxes);
        // The number of a session that was fenced may be another's by now: its calls are not ours to answer.
        let coordinator = self.routes.get(ServerId::COORDINATOR.index()).and_then(Option::as_ref);
        if coordinator.is_none_or(|route| route.connection.check_open(self.session).is_err()) {
            return Arc::new(Inbox::closed());
        }
        Arc::clone(inboxes.entry(self.session).or_default())
    }

    pub(crate) fn reply(&self, to: CallId, outcome: CallOutcome) {
        self.cluster.deliver(to, outcome);
    }
}

/// Stops waiting for a reply when the caller goes away.
struct Waiting<'a> {
    cluster: &'a LocalCluster,
    id: CallId,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        lock(&self.cluster.waiting).remove(&self.id);
    }
}

#[inline]
fn compare_exchange(word: &std::sync::atomic::AtomicU64, expected: u64, desired: u64) -> u64 {
    match word.compare_exchange(expected, desired, Ordering::SeqCst, Ordering::SeqCst) {
        Ok(before) | Err(before) => before,
    }
}

/// Carries out one verb.
fn apply(verb: Verb, memory: &LocalMemory, pool: &BufPool) -> Output {
    let addr = verb.addr();
    let region = memory.region(addr.region());
    let offset = at(addr.offset());
    match verb {
        Verb::Read { len, into: Landing::Pooled, .. } => {
            let mut buf = pool.take(len);
            region.read(offset, &mut buf);
            Output::Bytes(buf)
        }
        Verb::Read { len, into: Landing::Shared { buf, at }, .. } => {
            region.copy_to(offset, buf.memory(), at, len, Side::Source);
            Output::Done
        }
        Verb::Write { from, .. } => {
            match from {
                Source::Inline { bytes, len } => region.write(offset, &bytes[..usize::from(len)]),
                Source::Owned(buf) => region.write(offset, &buf),
                Source::Shared { buf, at, len } => {
                    buf.memory().copy_to(at, region, offset, len, Side::Destination);
                }
            }
            Output::Done
        }
        Verb::Cas { expected, desired, .. } => {
            Output::Previous(compare_exchange(region.word(offset), expected, desired))
        }
        Verb::MaskedCas { compare, compare_mask, swap, swap_mask, .. } => {
            Output::Previous(region.masked_cas(offset, compare, compare_mask, swap, swap_mask))
        }
        Verb::Faa { add, .. } => Output::Previous(region.word(offset).fetch_add(add, Ordering::SeqCst)),
    }
}

/// A procedure to run.
struct Job {
    call: CallId,
    procedure: Arc<dyn Procedure>,
    request: Vec<u8>,
}

/// The cores of a server: threads that each interleave the procedures they took.
struct Workers {
    queue: Arc<JobQueue>,
}

#[derive(Default)]
struct JobQueue {
    state: Mutex<JobState>,
}

#[derive(Default)]
struct JobState {
    jobs: std::collections::VecDeque<Job>,
    idle: Vec<std::task::Waker>,
    closed: bool,
}

impl Workers {
    #[expect(
        clippy::disallowed_methods,
        reason = "the cores of an embedded server are threads of this process"
    )]
    fn start(cluster: &Arc<LocalCluster>, server: &Arc<LocalServer>) -> Arc<Self> {
        let queue = Arc::<JobQueue>::default();
        for _ in 0..server.logic.cores().max(1) {
            let (queue, cluster, server) =
                (Arc::clone(&queue), Arc::downgrade(cluster), Arc::downgrade(server));
            std::thread::spawn(move || {
                let executor = Executor::new();
                executor.block_on(work(&executor, &queue, &cluster, &server));
                executor.clear();
            });
        }
        Arc::new(Self { queue })
    }

    fn push(&self, job: Job) {
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
async fn work(
    executor: &Executor,
    queue: &JobQueue,
    cluster: &Weak<LocalCluster>,
    server: &Weak<LocalServer>,
) {
    while let Some(job) = queue.next().await {
        let (Some(strong), Some(near)) = (cluster.upgrade(), server.upgrade()) else { return };
        let link = Link::Local(strong.connect_near(&near, job.call));
        let endpoint = Endpoint::near(link, job.call.session, job.call.term, executor);
        let context = ProcedureContext { endpoint, caller: job.call.session };
        let running = job.procedure.run(context, job.request);
        let (cluster, server) = (Weak::clone(cluster), Weak::clone(server));
        executor.spawn(async move {
            let outcome = running.await;
            if let (Some(cluster), Some(server)) = (cluster.upgrade(), server.upgrade()) {
                let _turn = lock(&server.turn);
                let actions = server.logic.finished(job.call, outcome);
                cluster.carry_out(&server, actions);
            }
        });
    }
}
