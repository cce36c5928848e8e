//! Transport `sim`: a whole world in virtual time, on one thread, from one seed.
//!
//! The same code that runs on real transports runs here, under an adversary that does whatever the contract allows: verbs
//! take effect in windows of time and tear where somebody could notice, batches overtake each other, processes die, pause
//! and come back, completions get lost and their effects come late, servers slow down and vanish, clocks drift. A seed
//! replays exactly; [`SimReport::trace_hash`] proves it.
//!
//! In *cost mode* ([`SimConfig::priced`]) times come from a [`Profile`] of real hardware instead, so that the same code can be measured.
//!
//! - [`Sim`] owns the tasks and drives them: it polls a random ready task, and when none is ready lets the next event happen.
//! - `world` holds servers, flights and events; `tear` cuts verbs to pieces; `memory` holds the bytes; [`faults`] is what
//!   goes wrong, as data; `doom` kills at marks; `cost` is what things take.
//! - In an *immediate* world clients may look at memory themselves, as on `local` and `shm` (`look`): the short cuts that engines take there
//!   meet the adversary, too.

mod bound;
mod cost;
mod doom;
pub mod faults;
mod look;
mod memory;
mod tear;
mod world;

pub use cost::{BadProfile, NicUsage, Placement, Pricing, Profile, ServerUsage, Usage};
pub use faults::{BadPlan, Fault, FaultPlan, MarkName};
pub use world::SimCounts;

use super::{Cluster, Inbox, Link, Origin, ReplySlot, View, Way};
use crate::addr::{ServerId, SessionId};
use crate::buf::BufPool;
use crate::call::{Call, CallId, CallOutcome, Once, Principal, Target};
use crate::caps::Capabilities;
use crate::clock::{MICROSECOND, MILLISECOND, Nanos, SECOND};
use crate::endpoint::{ClockSkew, Endpoint};
use crate::error::FabricError;
use crate::exec::{DRIVER, Executor, GroupId, JoinHandle};
use crate::marks;
use crate::procedure::{Procedure, ProcedureContext};
use crate::region::RegionTable;
use crate::server::{ServerLogic, StartError};
use crate::verb::{
    Batch, BatchFailure, BatchResult, Completed, Fences, Landing, Output, Source, Verb, VerbOutcome,
};
use crate::work::Work;
use bound::Bound;
use cost::Thread;
use doom::Doom;
use smallvec::SmallVec;
use std::cell::{Cell, RefCell};
use std::fmt;
use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use world::{Action, Bytes, Landed, Masks, Sender, SimServer, SimVerb, SimVerbs, World, server_group};

/// How long messages take, at random.
#[derive(Clone, Copy, Debug)]
pub struct Latency {
    /// At least, one way.
    pub min_ns: Nanos,
    /// Usually at most.
    pub max_ns: Nanos,
    /// One in so many takes longer; 0: none does.
    pub tail_one_in: u32,
    /// By up to this much.
    pub tail_ns: Nanos,
    /// Between a server and its own memory.
    pub near_ns: Nanos,
}

/// Mistakes of the transport itself, which the harness must catch: they test the test.
#[derive(Clone, Copy, Default, Debug)]
pub struct Sabotage {
    /// `reconnect` opens a new connection while verbs of the old one can still land.
    pub reconnect_without_fence: bool,
    /// A look counts though its session was fenced meanwhile.
    pub look_without_gate: bool,
}

/// What kind of world it is.
#[derive(Clone, Debug)]
pub struct SimConfig {
    /// Everything random comes from it.
    pub seed: u64,
    /// Whether verbs tear. Without, each takes effect in one instant, which is faster.
    pub tear: bool,
    /// How long the effects of one verb may spread.
    pub window_ns: Nanos,
    /// How long those of one READ in sixteen may spread instead: the contract sets no bound, and a READ that outlasts many operations
    /// sees words of very different ages. 0: none does. Only where verbs tear.
    pub long_read_ns: Nanos,
    /// How long messages take.
    pub latency: Latency,
    /// When a client gives up on a completion or a reply.
    pub timeout_ns: Nanos,
    /// How late effects of the dead may be.
    pub late_ns: Nanos,
    /// What the transport claims; the adversary respects it and nothing more.
    pub capabilities: Capabilities,
    /// A world that does more than this is stuck.
    pub max_events: u64,
    /// A world that lasts longer than this is stuck.
    pub max_virtual_ns: Nanos,
    /// Mistakes to be caught.
    pub sabotage: Sabotage,
    /// Cost mode: times come from this hardware, not from `latency` and `window_ns`.
    pub pricing: Option<Pricing>,
}

impl SimConfig {
    /// The adversary at full strength.
    pub fn adversarial(seed: u64) -> Self {
        Self {
            seed,
            tear: true,
            window_ns: 2 * MICROSECOND,
            long_read_ns: 0,
            latency: Latency {
                min_ns: 300,
                max_ns: 2500,
                tail_one_in: 50,
                tail_ns: 30 * MICROSECOND,
                near_ns: 80,
            },
            timeout_ns: 200 * MICROSECOND,
            late_ns: 3 * MILLISECOND,
            capabilities: Capabilities {
                masked_cas: true,
                lock_memory_bytes: 0,
                line_atomic: false,
                ordered_lines_bytes: 0,
                ordered_reads: true,
                immediate: false,
                max_batch: 64,
                session_calls: true,
            },
            max_events: 200_000_000,
            max_virtual_ns: 1000 * SECOND,
            sabotage: Sabotage::default(),
            pricing: None,
        }
    }

    /// Cost mode: everything takes what it takes on this hardware, on machines of their own.
    pub fn priced(seed: u64, profile: Profile) -> Self {
        Self {
            pricing: Some(Pricing { profile, placement: Placement::Separate }),
            max_events: u64::MAX,
            ..Self::adversarial(seed)
        }
    }

    /// Cost mode, with clients and servers on the same machines or not.
    #[must_use]
    pub fn placed(mut self, placement: Placement) -> Self {
        if let Some(pricing) = &mut self.pricing {
            pricing.placement = placement;
        }
        self
    }
}

/// Why a world stopped before its main task ended.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum SimStop {
    /// Nothing can happen any more, and tasks still wait.
    Deadlock {
        /// When.
        at_ns: Nanos,
        /// How many tasks.
        tasks: usize,
    },
    /// More events than [`SimConfig::max_events`]: somebody spins.
    TooManyEvents {
        /// When.
        at_ns: Nanos,
    },
    /// More time than [`SimConfig::max_virtual_ns`].
    TooLong,
    /// The main task was ended.
    MainKilled,
}

impl fmt::Display for SimStop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Deadlock { at_ns, tasks } => {
                write!(f, "deadlock at {at_ns} ns: {tasks} tasks wait for ever")
            }
            Self::TooManyEvents { at_ns } => write!(f, "too many events at {at_ns} ns: somebody spins"),
            Self::TooLong => f.write_str("the world lasted too long"),
            Self::MainKilled => f.write_str("the main task was ended"),
        }
    }
}

impl std::error::Error for SimStop {}

/// What a world did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SimReport {
    /// The same for the same seed, and for no other.
    pub trace_hash: u64,
    /// How long it lasted.
    pub virtual_ns: Nanos,
    /// What happened.
    pub counts: SimCounts,
}

/// What the world asks of its runner.
pub(super) enum Order {
    Kill(GroupId),
    Pause(GroupId),
    Resume(GroupId),
    Run { server: usize, call: CallId, ticket: u64, procedure: Arc<dyn Procedure>, request: Vec<u8> },
}

/// A simulated world and its tasks. Clones are the same world.
#[derive(Clone)]
pub struct Sim {
    inner: Rc<SimInner>,
}

struct SimInner {
    executor: Executor,
    cluster: SimCluster,
    doom: Rc<Doom>,
    clients: Cell<u32>,
    choices: RefCell<fastrand::Rng>,
}

impl Drop for SimInner {
    fn drop(&mut self) {
        // Tasks hold endpoints, which hold the executor, which holds the tasks.
        self.executor.clear();
    }
}

impl Sim {
    /// A world with these servers, in which these faults happen.
    pub fn new(
        mut config: SimConfig,
        plan: FaultPlan,
        logics: Vec<Arc<dyn ServerLogic>>,
    ) -> Result<Self, StartError> {
        let mut servers = Vec::new();
        for logic in logics {
            let mut server = SimServer::new(logic);
            let identity = server.start(0)?;
            servers.push((identity, server));
        }
        servers.sort_by_key(|(identity, _)| identity.server);
        let (identities, servers): (Vec<_>, Vec<_>) = servers.into_iter().unzip();
        let view = View::new(identities).map_err(|error| StartError::Mismatch(error.to_string()))?;
        let locks = |server: &SimServer| server.table.get(crate::addr::RegionId::LOCK).map(|spec| spec.bytes);
        config.capabilities.lock_memory_bytes = servers.iter().filter_map(locks).min().unwrap_or(0);
        let (seed, capabilities) = (config.seed, config.capabilities);
        let ordered = Arc::<AtomicBool>::default();
        let doom = Rc::new(Doom::new(&plan, Arc::clone(&ordered)));
        let jitter_ns = if capabilities.immediate { config.window_ns } else { 0 };
        let world = World::new(config, plan, servers, view, (Arc::clone(&ordered), Rc::clone(&doom)));
        let cluster = SimCluster { world: Arc::new(Bound::new(world)), ordered, capabilities };
        Ok(Self {
            inner: Rc::new(SimInner {
                executor: Executor::with_virtual_time(seed ^ 0x5bd1_e995, jitter_ns),
                cluster,
                doom,
                clients: Cell::new(0),
                choices: RefCell::new(fastrand::Rng::with_seed(seed.rotate_left(32) ^ 0x9e37_79b9)),
            }),
        })
    }

    /// The way to the world's servers.
    pub fn cluster(&self) -> Cluster {
        Cluster::new(Way::Sim(self.inner.cluster.clone()), Origin::Here)
    }

    /// Starts a client: a process of its own, which faults can name by its number (0, 1, ...).
    pub fn spawn_client<T: 'static>(&self, task: impl Future<Output = T> + 'static) -> JoinHandle<T> {
        let client = self.inner.clients.get();
        self.inner.clients.set(client + 1);
        self.inner.executor.spawn_in(client + 1, task)
    }

    /// Ends a client's process, if it has not died: whatever its tasks still do stops, as at any exit.
    pub fn end_client(&self, client: u32) {
        self.inner.cluster.world.borrow().exit(client + 1);
    }

    /// True time in the world.
    pub fn now(&self) -> Nanos {
        self.inner.executor.now()
    }

    /// Waits, in true time.
    pub async fn sleep(&self, span: Nanos) {
        self.inner.executor.sleep_until(self.now() + span).await;
    }

    /// Runs the world until `main` (the test driver, which no fault touches) has ended.
    pub fn run<T: 'static>(&self, main: impl Future<Output = T> + 'static) -> Result<T, SimStop> {
        let executor = &self.inner.executor;
        let result = Rc::new(RefCell::new(None));
        let out = Rc::clone(&result);
        let main = executor.spawn_in(DRIVER, main);
        executor.spawn_in(DRIVER, async move {
            let ended = main.await;
            *out.borrow_mut() = Some(ended);
        });
        let _watching = self.watch_marks();
        executor.within(|| {
            loop {
                // Fault orders come out of polls, and are carried out before the next one.
                while executor.poll_one(|ready| self.inner.choices.borrow_mut().usize(0..ready)) {
                    self.inner.cluster.carry_out_orders(executor);
                }
                if let Some(ended) = result.borrow_mut().take() {
                    return ended.map_err(|_| SimStop::MainKilled);
                }
                self.inner.cluster.advance(executor, Nanos::MAX)?;
                self.inner.cluster.carry_out_orders(executor);
            }
        })
    }

    /// Lets marks kill, if the plan says so.
    fn watch_marks(&self) -> Option<marks::Watching> {
        let doom = Rc::clone(&self.inner.doom);
        let executor = self.inner.executor.clone();
        doom.is_watching().then(|| marks::watch(Rc::new(move |name| doom.hit(executor.group(), name))))
    }

    /// The deaths at marks ([`Fault::KillAtMark`]) that have happened.
    pub fn struck(&self) -> Vec<Fault> {
        self.inner.doom.struck()
    }

    /// What has happened so far.
    pub fn report(&self) -> SimReport {
        let world = self.inner.cluster.world.borrow();
        SimReport { trace_hash: world.trace_hash(), virtual_ns: world.now, counts: world.counts }
    }

    /// How busy the hardware has been since the world began; nothing is known of it outside cost mode.
    pub fn usage(&self) -> Usage {
        let world = self.inner.cluster.world.borrow();
        world.cost.as_ref().map(|cost| cost.usage(world.now)).unwrap_or_default()
    }
}

impl fmt::Debug for Sim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sim(at {} ns)", self.now())
    }
}

/// The way to a world's servers.
#[derive(Clone)]
pub(crate) struct SimCluster {
    world: Arc<Bound<World>>,
    /// Whether the world has orders for its runner, so that looking costs no lock.
    ordered: Arc<AtomicBool>,
    capabilities: Capabilities,
}

impl SimCluster {
    pub(super) fn view(&self) -> View {
        self.world.borrow().view.clone()
    }

    pub(super) fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    pub(super) fn connect(&self, who: Principal) -> SimLink {
        let group = Executor::current().map_or(DRIVER, |executor| executor.group());
        let mut world = self.world.borrow();
        let thread = world.cost.as_mut().map(|cost| cost.new_thread());
        let count = world.servers.len();
        let routes = (0..count).map(|n| Some(world.connect(who, group, n, false, thread))).collect();
        drop(world);
        SimLink { cluster: Rc::new(self.clone()), session: who.session, group, thread, routes }
    }

    /// The link of a procedure on `server`, in its caller's name.
    fn connect_near(&self, server: usize, caller: Principal) -> SimLink {
        let group = server_group(server);
        let mut world = self.world.borrow();
        let count = world.servers.len();
        let thread = world.cost.is_some().then_some(Thread::Server(server));
        let connect = |n| (n == server).then(|| world.connect(caller, group, n, true, thread));
        let routes = (0..count).map(connect).collect();
        drop(world);
        SimLink { cluster: Rc::new(self.clone()), session: caller.session, group, thread, routes }
    }
}

impl SimCluster {
    /// Lets timers and events happen until there is something to do: true; or until that time, and there is nothing: false.
    fn advance(&self, executor: &Executor, until: Nanos) -> Result<bool, SimStop> {
        let mut world = self.world.borrow();
        // Only tasks make timers, and none runs in here.
        let timer = executor.next_timer().filter(|at| *at <= until);
        while !executor.any_woken() && !self.ordered.load(Ordering::Relaxed) {
            // Where a timer and an event are due at the same time, the event comes first.
            let event = world.next_event(timer.unwrap_or(until));
            let Some(at) = event.map(|(at, _)| at).or(timer) else {
                if until == Nanos::MAX {
                    return Err(SimStop::Deadlock { at_ns: world.now, tasks: executor.tasks() });
                }
                executor.set_now(until);
                world.now = until;
                return Ok(false);
            };
            if at > world.config.max_virtual_ns {
                return Err(SimStop::TooLong);
            }
            if world.counts.events > world.config.max_events {
                return Err(SimStop::TooManyEvents { at_ns: at });
            }
            executor.set_now(at);
            if let Some((at, event)) = event {
                world.happen(at, event);
            } else {
                world.now = at;
                drop(world);
                executor.fire_timers();
                return Ok(true);
            }
        }
        Ok(true)
    }

    fn carry_out_orders(&self, executor: &Executor) {
        if !self.ordered.load(Ordering::Relaxed) {
            return;
        }
        let orders = {
            let mut world = self.world.borrow();
            world.bury_the_doomed();
            std::mem::take(&mut world.orders)
        };
        self.ordered.store(false, Ordering::Relaxed);
        for order in orders {
            match order {
                Order::Kill(group) => executor.kill_group(group),
                Order::Pause(group) => executor.pause_group(group),
                Order::Resume(group) => executor.resume_group(group),
                Order::Run { server, call, ticket, procedure, request } => {
                    let who = Principal { session: call.session, term: call.term, ticket };
                    let link = Link::Sim(self.connect_near(server, who));
                    let endpoint = Endpoint::near(link, who, executor);
                    let context = ProcedureContext { endpoint, caller: call.session };
                    let world = Arc::clone(&self.world);
                    let running = procedure.run(context, request);
                    executor.spawn_in(server_group(server), async move {
                        let outcome = running.await;
                        world.borrow().procedure_finished(server, call, outcome);
                    });
                }
            }
        }
    }
}

impl fmt::Debug for SimCluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SimCluster")
    }
}

/// An endpoint's connections in the world.
#[derive(Debug)]
pub(crate) struct SimLink {
    /// Shared with the tickets, and counted without atomics.
    cluster: Rc<SimCluster>,
    session: SessionId,
    group: GroupId,
    /// In cost mode: what its work is charged to.
    thread: Option<Thread>,
    /// By server: the connection, and what may be done there.
    routes: Vec<Option<(usize, RegionTable)>>,
}

impl SimLink {
    pub(super) fn capabilities(&self) -> &Capabilities {
        &self.cluster.capabilities
    }

    fn route(&self, server: ServerId) -> Result<&(usize, RegionTable), FabricError> {
        let route = self.routes.get(server.index()).and_then(Option::as_ref);
        route.ok_or(FabricError::UnknownServer { server })
    }

    pub(super) fn table(&self, server: ServerId) -> Result<&RegionTable, FabricError> {
        self.route(server).map(|(_, table)| table)
    }

    pub(crate) fn clock_skew(&self) -> ClockSkew {
        self.cluster.world.borrow().clock_skew(self.group)
    }

    /// Does some work on the endpoint's thread; free outside cost mode.
    pub(crate) async fn charge(&self, executor: &Executor, work: Work) {
        let Some(thread) = self.thread else { return };
        let Some((mut left, slice)) = self.cluster.world.borrow().price_work(thread, work) else { return };
        while left > 0 {
            let span = left.min(slice);
            let until = self.cluster.world.borrow().occupy(thread, span);
            executor.sleep_until(until).await;
            left -= span;
        }
    }

    pub(super) fn post(&self, batch: Batch, pool: &BufPool) -> SimTicket {
        let mut ticket = SimTicket {
            cluster: Rc::clone(&self.cluster),
            landings: SmallVec::new(),
            state: TicketState::Never,
        };
        let refuse = |error, verbs| {
            let outcomes = (0..verbs).map(|_| VerbOutcome::NotExecuted).collect();
            TicketState::Refused(Box::new(BatchFailure { error, at: 0, outcomes }))
        };
        let count = batch.len();
        let connection = match self.route(batch.server()) {
            Ok((connection, _)) => *connection,
            Err(error) => {
                ticket.state = refuse(error, count);
                return ticket;
            }
        };
        let mut fences = Fences::default();
        let mut verbs = SimVerbs::new();
        for (n, verb) in batch.verbs.into_iter().enumerate() {
            let fenced = fences.before(&verb);
            let (verb, landing) = translate(verb, fenced, pool);
            verbs.push(verb);
            ticket.landings.push((n, landing));
        }
        let mut world = self.cluster.world.borrow();
        if count > 1 && !self.cluster.capabilities.ordered_reads {
            world.shuffle_reads(&mut verbs, &mut ticket.landings);
        }
        ticket.state = match world.post(connection, verbs) {
            Ok(Some(flight)) => TicketState::Flying(flight),
            Ok(None) => TicketState::Never,
            Err(error) => refuse(error, count),
        };
        ticket
    }

    pub(super) async fn call(&self, target: Target, call: Call, once: Once<'_>) -> CallOutcome {
        if let Target::Server(server) = target {
            once.check(self.cluster.world.borrow().life(server))?;
        }
        let slot = Arc::new(ReplySlot::default());
        let guard = Calling { world: &self.cluster.world, id: call.id };
        self.cluster.world.borrow().call(self.group, target, call, &slot);
        let outcome = slot.wait().await;
        drop(guard);
        outcome
    }

    pub(super) async fn reconnect(&self, server: ServerId) -> Result<(), FabricError> {
        let connection = self.route(server)?.0;
        let slot = Arc::new(ReplySlot::default());
        self.cluster.world.borrow().reconnect(connection, Arc::clone(&slot));
        // What came back matters less than what the connection is now.
        let _ = slot.wait().await;
        let refusal = self.cluster.world.borrow().why_not_reconnected(connection);
        refusal.map_or(Ok(()), Err)
    }

    pub(super) fn serve(&self) -> Arc<Inbox> {
        let coordinator = self.route(ServerId::COORDINATOR).map(|(connection, _)| *connection);
        self.cluster.world.borrow().serve(coordinator.ok(), self.session, self.group)
    }

    pub(super) fn reply(&self, to: CallId, outcome: CallOutcome) {
        self.cluster.world.borrow().answer(to, outcome, Sender::Process(self.group));
    }
}

/// Stops waiting for a reply when the caller goes away.
struct Calling<'a> {
    world: &'a Bound<World>,
    id: CallId,
}

impl Drop for Calling<'_> {
    fn drop(&mut self) {
        self.world.borrow().forget_call(self.id);
    }
}

/// Where a verb's result goes.
enum LandingPlace {
    Nowhere,
    Pooled,
    Shared(crate::buf::SharedBuf, usize),
    Word,
}

fn translate(verb: Verb, fence_before: bool, pool: &BufPool) -> (SimVerb, LandingPlace) {
    let addr = verb.addr();
    let offset = usize::try_from(addr.offset()).expect("checked against the region");
    let (action, data, place) = match verb {
        Verb::Read { len, into, .. } => {
            let place = match into {
                Landing::Pooled => LandingPlace::Pooled,
                Landing::Shared { buf, at } => LandingPlace::Shared(buf, at),
            };
            (Action::Read, Bytes::Owned(pool.take(len)), place)
        }
        Verb::Write { from, .. } => {
            let data = match from {
                Source::Inline { bytes, len } => Bytes::Few(bytes, len),
                Source::Owned(buf) => Bytes::Owned(buf),
                Source::Shared { buf, at, len } => {
                    let mut data = pool.take(len);
                    buf.memory().read(at, &mut data);
                    Bytes::Owned(data)
                }
            };
            (Action::Write, data, LandingPlace::Nowhere)
        }
        Verb::Cas { expected, desired, .. } => {
            (Action::Cas { expected, desired }, Bytes::None, LandingPlace::Word)
        }
        Verb::MaskedCas { compare, compare_mask, swap, swap_mask, .. } => {
            let masks = Masks { compare, compare_mask, swap, swap_mask };
            (Action::MaskedCas(Box::new(masks)), Bytes::None, LandingPlace::Word)
        }
        Verb::Faa { add, .. } => (Action::Faa { add }, Bytes::None, LandingPlace::Word),
    };
    (SimVerb { action, region: addr.region(), offset, data, previous: 0, fence_before, reaches: 0 }, place)
}

/// In the order of effects: a verb's place in its batch, and where its result goes.
type Landings = SmallVec<[(usize, LandingPlace); 1]>;

/// A batch in the world.
pub(crate) struct SimTicket {
    cluster: Rc<SimCluster>,
    landings: Landings,
    state: TicketState,
}

enum TicketState {
    Flying(usize),
    Refused(Box<BatchFailure>),
    /// The process is dead: it will not see this.
    Never,
}

impl SimTicket {
    pub(super) fn poll(&mut self, context: &Context<'_>) -> Poll<BatchResult> {
        if let TicketState::Flying(flight) = self.state {
            let Some((landed, verbs)) = self.cluster.world.borrow().collect(flight, context.waker()) else {
                return Poll::Pending;
            };
            self.state = TicketState::Never;
            return Poll::Ready(match landed {
                Landed::Done => Ok(self.outputs(verbs)),
                Landed::Failed(error) => {
                    let outcomes = self.landings.iter().map(|_| VerbOutcome::Unknown).collect();
                    Err(Box::new(BatchFailure { error, at: 0, outcomes }))
                }
            });
        }
        match std::mem::replace(&mut self.state, TicketState::Never) {
            TicketState::Refused(failure) => Poll::Ready(Err(failure)),
            TicketState::Flying(_) | TicketState::Never => Poll::Pending,
        }
    }

    fn outputs(&self, mut verbs: SimVerbs) -> Completed {
        let output = |verb: SimVerb, place: &LandingPlace| match (place, verb.data) {
            (LandingPlace::Pooled, Bytes::Owned(buf)) => Output::Bytes(buf),
            (LandingPlace::Word, _) => Output::Previous(verb.previous),
            (LandingPlace::Shared(buf, at), data) => {
                buf.memory().write(*at, &data);
                Output::Done
            }
            (LandingPlace::Nowhere | LandingPlace::Pooled, _) => Output::Done,
        };
        let mut outputs = SmallVec::new();
        if let [(_, place)] = &*self.landings {
            // Nearly always there is one.
            outputs.extend(verbs.pop().map(|verb| output(verb, place)));
            return Completed { outputs };
        }
        outputs.extend(verbs.iter().map(|_| Output::Done));
        for (verb, (n, place)) in verbs.into_iter().zip(&self.landings) {
            outputs[*n] = output(verb, place);
        }
        Completed { outputs }
    }
}

impl Drop for SimTicket {
    fn drop(&mut self) {
        if let TicketState::Flying(flight) = self.state {
            self.cluster.world.borrow().detach(flight);
        }
    }
}
