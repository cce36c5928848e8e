//! One trial: a world, a workload and a fault plan, all of it in one line of text that replays exactly.
//!
//! 1. Memory servers start; the driver joins the pool and creates the engine.
//! 2. Compute servers start as processes of their own. Each joins the pool, keeps its lease alive (with the product's janitor,
//!    which recovers the dead), and runs tasks, which do random operations one after the other and write down what they were told.
//!    One that finds itself fenced starts anew with a new session.
//! 3. When all have ended or died, the driver waits until the dead have been recovered: by its own session's janitor, as in any
//!    other compute server.
//! 4. The structure is walked and verified, memory is accounted for, and the history is judged.
//!
//! `text` is a trial as a line of text; `draw` draws its faults; `others` are indexes that come and go beside the one that is tried.

mod draw;
mod others;
mod text;

pub use draw::{ADOPTION_MARKS, AMID_INTENT, CALLS, FaultKind};
pub use text::BadTrial;

use crate::check::{self, leaks, settled};
use crate::company;
use crate::history::{Action, History, Outcome};
use crate::mix::{self, Mix};
use crate::spelling::Spelling;
use farwood_fabric::clock::{MICROSECOND, MILLISECOND, Nanos};
use farwood_fabric::control::IndexState;
use farwood_fabric::procedure::ProcedureSet;
use farwood_fabric::region::PoolId;
use farwood_fabric::server::{ServerLogic, StartError};
use farwood_fabric::transport::sim::{Fault, FaultPlan, Sabotage, Sim, SimConfig, SimReport, SimStop};
use farwood_fabric::{Cluster, Endpoint, FabricError, ServerId, marks};
use farwood_index::pool::JoinOptions;
use farwood_index::shared::heap::{CLAIM, Heap};
use farwood_index::{Engine, IndexError, OrderedIndex, Pool};
use farwood_memory::{MemoryServer, ServerConfig};
use fastrand::Rng;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt;
use std::future::poll_fn;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;

/// How long a session lives without a heartbeat.
const LEASE_NS: Nanos = MILLISECOND;
const HEARTBEAT_NS: Nanos = 100 * MICROSECOND;
/// How long a READ that lasts long may last: as many operations as a task does in a quarter of its life.
const LONG_READ_NS: Nanos = 600 * MICROSECOND;
/// How often a fenced compute server starts anew.
const MAX_LIVES: u32 = 5;
/// How many objects an operation has in its hands that are not linked yet, at most.
const OBJECTS_PER_OPERATION: u64 = 2;
/// How often an operation that is given up has been polled by then, at most.
const MAX_POLLS: u32 = 12;
/// When a compute server leaves in the middle of its operations, at the latest.
const LONGEST_STAY_NS: Nanos = 3 * LEASE_NS / 2;
/// How many operations a task polls in turns, where clients touch memory themselves.
const MAX_COMPANY: u32 = 3;
/// How late a compute server comes that comes late.
const LATE_NS: Nanos = 300 * MICROSECOND;
/// The client that a bulk load is written down as, key by key.
const BULK_LOADER: u32 = u32::MAX;
/// How many compute servers use other indexes, where those come and go: one makes and drops them, one only uses them.
const GUESTS: u32 = 2;
/// What the index is called.
const INDEX: &str = "tried";
/// How often the driver looks whether the dead have been recovered.
const MAX_RECOVERY_WAITS: u32 = 100;

/// Everything that determines a run.
#[derive(Clone, PartialEq, Eq, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a word of its text")]
pub struct Trial {
    /// Everything random comes from it.
    pub seed: u64,
    /// Memory servers.
    pub servers: u16,
    /// Compute servers.
    pub sessions: u32,
    /// Tasks of each.
    pub tasks: u16,
    /// Operations of each task.
    pub ops: u32,
    /// Keys, from 0.
    pub keys: u64,
    /// What they look like.
    pub spelling: Spelling,
    /// Whether verbs tear.
    pub tear: bool,
    /// How long some READs last, at most; 0: none lasts longer than others.
    pub long_ns: Nanos,
    /// Whether clients touch memory themselves, as on `local` and `shm`: engines take the short cuts that they take there, and a task polls
    /// several operations in turns.
    pub immediate: bool,
    /// Whether half of the tasks empty the index while the others fill it, rather than all together: memory is used again sooner.
    pub churn: bool,
    /// Of a hundred operations, how many are given up in the middle: their future is dropped.
    pub cancel: u8,
    /// How many chunks a server has, if they are to be few.
    pub chunks: Option<u16>,
    /// How often each compute server leaves the pool in the middle of its operations and joins anew.
    pub leaves: u32,
    /// Whether the first task of the first compute server loads every other key in bulk, while the others only read at first, and the
    /// last compute server comes later.
    pub bulk: bool,
    /// Whether other indexes come and go in the same pool.
    pub others: bool,
    /// What goes wrong.
    pub faults: FaultPlan,
}

impl Default for Trial {
    fn default() -> Self {
        let faults = FaultPlan::default();
        Self {
            seed: 1,
            servers: 3,
            sessions: 4,
            tasks: 4,
            ops: 40,
            keys: 8,
            spelling: Spelling::Numbers,
            tear: true,
            long_ns: 0,
            immediate: false,
            churn: false,
            cancel: 0,
            chunks: None,
            leaves: 0,
            bulk: false,
            others: false,
            faults,
        }
    }
}

/// What a trial that went well did.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Report {
    /// The world.
    pub sim: SimReport,
    /// Operations begun.
    pub operations: u64,
    /// Operations whose outcome the client never learned.
    pub unknown: u64,
    /// Memory at the end.
    pub usage: leaks::Usage,
    /// Sessions that died, or were fenced, and were recovered.
    pub recovered: u64,
    /// Deaths at marks that happened.
    pub struck: Vec<Fault>,
    /// Which rare paths ran, and how often.
    pub marks: BTreeMap<&'static str, u64>,
}

/// What a trial found.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Failure {
    /// The servers did not start.
    Start(StartError),
    /// The world came to a stop, or did not.
    Stuck(SimStop),
    /// The history is not explained by any order, or a scan is wrong.
    History(check::Failure),
    /// An operation failed in a way that no fault explains.
    Operation {
        /// What was tried.
        action: String,
        /// How it failed.
        error: IndexError,
    },
    /// The structure is damaged, or could not be walked.
    Structure(IndexError),
    /// Memory is lost, or used twice.
    Memory {
        /// How it is used.
        usage: leaks::Usage,
        /// How many objects may be lost.
        may_leak: u64,
    },
    /// Somebody left something behind that nobody cleaned up.
    Unsettled(String),
    /// A server came back, and a session that was alive did not go on.
    Fenced {
        /// What ran instead.
        mark: &'static str,
    },
}

impl Failure {
    /// Which kind of failure: shrinking keeps to one kind.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Start(_) => "start",
            Self::Stuck(_) => "stuck",
            Self::History(check::Failure::Undecided(_)) => "undecided",
            Self::History(_) => "history",
            Self::Operation { .. } => "operation",
            Self::Structure(_) => "structure",
            Self::Memory { .. } => "memory",
            Self::Unsettled(_) => "unsettled",
            Self::Fenced { .. } => "fenced",
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Start(error) => error.fmt(f),
            Self::Stuck(stop) => stop.fmt(f),
            Self::History(failure) => failure.fmt(f),
            Self::Operation { action, error } => write!(f, "{action} failed: {error}"),
            Self::Structure(error) => write!(f, "the structure is damaged: {error}"),
            Self::Memory { usage, may_leak } => {
                write!(f, "memory is wrong: {usage}; {may_leak} may be leaked")
            }
            Self::Unsettled(what) => write!(f, "something is left behind: {what}"),
            Self::Fenced { mark } => {
                write!(f, "a server came back, and a session that was alive did not go on ('{mark}' ran)")
            }
        }
    }
}

impl std::error::Error for Failure {}

/// The transport's and the world's settings that are not part of a trial's text.
#[derive(Clone, Copy, Default, Debug)]
pub struct Settings {
    /// Mistakes of the transport.
    pub sabotage: Sabotage,
    /// Mistakes of the coordinator.
    pub coordinator: farwood_memory::Mistakes,
}

/// Runs a trial of `engine`.
pub fn run<E: Engine>(engine: &E, trial: &Trial, settings: Settings) -> Result<Report, Failure> {
    marks::reset();
    let mut config = SimConfig::adversarial(trial.seed);
    config.tear = trial.tear;
    config.long_read_ns = trial.long_ns;
    config.capabilities.immediate = trial.immediate;
    config.sabotage = settings.sabotage;
    config.max_events =
        200_000 + u64::from(trial.sessions) * u64::from(trial.tasks) * u64::from(trial.ops) * 3_000;
    let sim =
        Sim::new(config, trial.faults.clone(), memory_servers(trial, settings)?).map_err(Failure::Start)?;
    let log = Rc::new(RefCell::new(Log::default()));
    let main = drive(sim.clone(), engine.clone(), trial.clone(), Rc::clone(&log));
    let ended = sim.run(main).map_err(Failure::Stuck)?;
    let struck = sim.struck();
    let sim = sim.report();
    let log = log.borrow();
    if let Some((action, error)) = &log.trouble {
        return Err(Failure::Operation { action: action.clone(), error: error.clone() });
    }
    let (usage, left_over) = ended.map_err(Failure::Structure)?;
    let recovered = marks::count("session_recovered");
    check::all(&log.history).map_err(Failure::History)?;
    let may_leak = may_leak(trial, &log, sim.counts.broken);
    if !usage.dangling.is_empty() || usage.lost_chunks > 0 || usage.leaked.len() as u64 > may_leak {
        return Err(Failure::Memory { usage, may_leak });
    }
    if let Some(what) = left_over {
        return Err(Failure::Unsettled(what));
    }
    if let Some(mark) = lost_by_restart(trial) {
        return Err(Failure::Fenced { mark });
    }
    let operations = log.history.operations();
    let unknown = operations.iter().filter(|op| op.responded.is_none()).count() as u64;
    Ok(Report {
        sim,
        operations: operations.len() as u64,
        unknown,
        usage,
        recovered,
        struck,
        marks: marks::snapshot(),
    })
}

/// What ran that does not where servers come back and nothing else happens: whoever was alive goes on in the session that it had.
fn lost_by_restart(trial: &Trial) -> Option<&'static str> {
    let is_restart = |fault: &Fault| matches!(fault, Fault::RestartServer { .. });
    if trial.faults.faults.is_empty() || !trial.faults.faults.iter().all(is_restart) {
        return None;
    }
    ["session_condemned", "new_life", "driver_fenced", "index_made_anew"]
        .into_iter()
        .find(|mark| marks::count(mark) > 0)
}

/// How many objects may be lost: what each session that died had in its hands, as its heap counts it, with what its tasks were just
/// claiming or linking; what was in doubt; and what a broken connection or a future that was dropped leaves of a claim.
fn may_leak(trial: &Trial, log: &Log, broken: u64) -> u64 {
    let of_life = |life: &Life| {
        let counts = life.heap.counts();
        let in_hands = life.heap.in_hands().max(life.leaving_with.get()) as u64;
        let under_way = u64::from(trial.tasks) * (u64::from(CLAIM) + OBJECTS_PER_OPERATION);
        let lost = in_hands + counts.unjournaled + under_way;
        counts.doubtful + if life.has_left.get() { 0 } else { lost }
    };
    let lives: u64 = log.lives.iter().map(|life| of_life(life)).sum();
    // Whoever dies in the middle of a bulk load leaves the nodes that it had written: a key has one or two.
    let loaded = if trial.bulk { 2 * trial.keys } else { 0 };
    loaded + lives + broken * u64::from(CLAIM) + marks::count("operation_cancelled") * OBJECTS_PER_OPERATION
}

/// How many numbers there are for sessions: every life of a compute server is one, and the dead keep theirs until they are recovered.
fn max_sessions(trial: &Trial) -> u16 {
    let others = if trial.others { GUESTS * others::MAX_LIVES } else { 0 };
    u16::try_from(trial.sessions * (MAX_LIVES + trial.leaves + 1) + others + 1).unwrap_or(u16::MAX)
}

fn memory_servers(trial: &Trial, settings: Settings) -> Result<Vec<Arc<dyn ServerLogic>>, Failure> {
    // Keys of 4 KiB need larger chunks.
    let (chunk_bytes, chunks) = if trial.spelling == Spelling::Huge { (32 << 10, 1024) } else { (4096, 256) };
    let chunks = trial.chunks.map_or(chunks, u32::from);
    let server = |n| {
        let config = ServerConfig {
            chunk_bytes,
            memory_bytes: chunk_bytes * u64::from(chunks),
            pool: PoolId(u128::from(trial.seed)),
            lock_bytes: 4096,
            max_sessions: max_sessions(trial),
            lease_ns: LEASE_NS,
            mistakes: settings.coordinator,
            ..ServerConfig::tiny(ServerId::new(n), trial.servers, chunks)
        };
        let server = MemoryServer::new(config, ProcedureSet::default()).map_err(Failure::Start)?;
        Ok(Arc::new(server) as Arc<dyn ServerLogic>)
    };
    (0..trial.servers).map(server).collect()
}

/// What the clients write down.
#[derive(Default)]
struct Log {
    history: History,
    /// The first failure that no fault explains.
    trouble: Option<(String, IndexError)>,
    /// Values are numbered, so that none is written twice.
    values: u64,
    /// Every session that was opened to work on the index.
    lives: Vec<Rc<Life>>,
}

/// What a compute server had in one of its lives, for those who count what is lost.
struct Life {
    heap: Heap,
    /// What it had in its hands when it began to leave.
    leaving_with: Cell<usize>,
    /// It left in good order.
    has_left: Cell<bool>,
}

impl Life {
    fn begin(pool: &Pool, log: &RefCell<Log>) -> Rc<Self> {
        let (leaving_with, has_left) = (Cell::new(0), Cell::new(false));
        let life = Rc::new(Self { heap: pool.heap().clone(), leaving_with, has_left });
        log.borrow_mut().lives.push(Rc::clone(&life));
        life
    }

    async fn leave(&self, pool: Pool, endpoint: &Endpoint) -> Result<(), FabricError> {
        self.leaving_with.set(self.heap.in_hands());
        let session = pool.session().clone();
        let left = pool.leave(endpoint).await?;
        // Whose operations did not end in time has fenced itself, with what it had in its hands.
        self.has_left.set(left == 0 && !session.is_fenced());
        Ok(())
    }
}

async fn drive<E: Engine>(
    sim: Sim,
    engine: E,
    trial: Trial,
    log: Rc<RefCell<Log>>,
) -> Result<Stock, IndexError> {
    let cluster = sim.cluster();
    let (pool, endpoint, attached) = make_index(&sim, &engine, &log).await?;
    let clients: Vec<_> = (0..trial.sessions)
        .map(|client| {
            let process = compute_server(sim.clone(), engine.clone(), trial.clone(), client, Rc::clone(&log));
            sim.spawn_client(process)
        })
        .collect();
    let over = Rc::new(Cell::new(false));
    let guests: Vec<_> = [true, false]
        .into_iter()
        .filter(|_| trial.others)
        .map(|is_maker| {
            let (cluster, trial) = (cluster.clone(), trial.clone());
            let (log, over, joins) = (Rc::clone(&log), Rc::clone(&over), join_options(&engine));
            let (doubtful, used) = (RefCell::default(), Cell::default());
            let guest = others::Guest { cluster, joins, trial, log, over, is_maker, doubtful, used };
            sim.spawn_client(guest.stay())
        })
        .collect();
    let mut number = 0;
    for (processes, is_over) in [(clients, false), (guests, true)] {
        over.set(is_over);
        for process in processes {
            // An error here is a process that was killed.
            let _ = process.await;
            sim.end_client(number);
            number += 1;
        }
    }
    let mut stock = take_stock(&sim, &engine, &trial, (&pool, &attached), &endpoint).await;
    for _ in 0..MAX_LIVES {
        // A slow server cost the driver its lease too, and a client took it for dead; or a server that came back ended it.
        if !stock.as_ref().is_err_and(IndexError::is_unknown) {
            break;
        }
        marks::hit("driver_fenced");
        stock = take_stock_anew(&sim, &engine, &trial).await;
    }
    stock
}

/// Joins the pool and makes the index; anew, if a server that came back ended the session meanwhile.
async fn make_index<E: Engine>(
    sim: &Sim,
    engine: &E,
    log: &RefCell<Log>,
) -> Result<(Pool, Endpoint, E::Attached), IndexError> {
    let mut made = try_to_make_index(sim, engine, log, false).await;
    for _ in 0..MAX_LIVES {
        if made.is_ok() {
            break;
        }
        marks::hit("index_made_anew");
        made = try_to_make_index(sim, engine, log, true).await;
    }
    made
}

async fn try_to_make_index<E: Engine>(
    sim: &Sim,
    engine: &E,
    log: &RefCell<Log>,
    anew: bool,
) -> Result<(Pool, Endpoint, E::Attached), IndexError> {
    let pool = join(&sim.cluster(), engine).await?;
    let endpoint = pool.session().endpoint()?;
    pool.keep_alive(&endpoint, HEARTBEAT_NS);
    let _ = Life::begin(&pool, log);
    // Whoever began to make it and came to its end leaves it whole, or to be dropped by the janitor.
    if anew {
        wait_for_recovery(sim, &pool, &endpoint).await?;
    }
    if !anew || pool.list_indexes(&endpoint.op()).await?.is_empty() {
        engine.create(&pool, &endpoint, INDEX).await?;
    }
    let attached = engine.attach(&pool, &endpoint, INDEX).await?;
    Ok((pool, endpoint, attached))
}

/// Joins the pool anew to see what is there.
async fn take_stock_anew<E: Engine>(sim: &Sim, engine: &E, trial: &Trial) -> Result<Stock, IndexError> {
    let pool = join(&sim.cluster(), engine).await?;
    let endpoint = pool.session().endpoint()?;
    pool.keep_alive(&endpoint, HEARTBEAT_NS);
    let attached = engine.attach(&pool, &endpoint, INDEX).await?;
    take_stock(sim, engine, trial, (&pool, &attached), &endpoint).await
}

/// Joins the pool, with the engine's mistakes.
async fn join<E: Engine>(cluster: &Cluster, engine: &E) -> Result<Pool, IndexError> {
    Ok(Pool::join_with(cluster, join_options(engine)).await?)
}

/// How compute servers that use an engine join, with its mistakes.
pub fn join_options<E: Engine>(engine: &E) -> JoinOptions {
    let recoverers = engine.recoverer().into_iter().collect();
    JoinOptions { mistakes: engine.mistakes(), recoverers, ..JoinOptions::default() }
}

/// How memory is used, and what was left behind.
type Stock = (leaks::Usage, Option<String>);

/// What is there when all clients have ended, and whether it is whole.
async fn take_stock<E: Engine>(
    sim: &Sim,
    engine: &E,
    trial: &Trial,
    (pool, attached): (&Pool, &E::Attached),
    endpoint: &Endpoint,
) -> Result<Stock, IndexError> {
    wait_for_recovery(sim, pool, endpoint).await?;
    others::clear(pool, endpoint).await?;
    let reachable = engine.check(attached, endpoint).await?;
    // What recovery retired into the driver's hands is given back before memory is counted.
    pool.heap().close(endpoint).await?;
    let left_over = settled::left_over(pool, endpoint, max_sessions(trial)).await?;
    Ok((leaks::measure(pool.session(), endpoint, &reachable).await?, left_over))
}

/// Waits until the product has recovered whoever died, and finished every drop.
async fn wait_for_recovery(sim: &Sim, pool: &Pool, endpoint: &Endpoint) -> Result<(), IndexError> {
    let mut left = String::new();
    for _ in 0..MAX_RECOVERY_WAITS {
        let sessions = pool.session().list(&endpoint.op()).await?;
        let indexes = pool.list_indexes(&endpoint.op()).await?;
        if sessions.len() == 1 && indexes.iter().all(|info| info.state == IndexState::Ready) {
            return Ok(());
        }
        left = format!("{sessions:?}, {indexes:?}");
        sim.sleep(LEASE_NS).await;
    }
    Err(IndexError::Corrupt { what: format!("what is left was not recovered: {left}") })
}

/// One compute server: as many lives as it takes to do its operations.
async fn compute_server<E: Engine>(sim: Sim, engine: E, trial: Trial, client: u32, log: Rc<RefCell<Log>>) {
    let left: Rc<RefCell<Vec<u32>>> = Rc::new(RefCell::new(vec![trial.ops; usize::from(trial.tasks)]));
    if comes_late(&trial, client) {
        sim.sleep(Rng::with_seed(trial.seed ^ 0xb01c).u64(0..LATE_NS)).await;
    }
    for life in 0..MAX_LIVES + trial.leaves {
        let lived = live(&sim.cluster(), &engine, &trial, client, life, &log, &left).await;
        if left.borrow().iter().all(|ops| *ops == 0) || log.borrow().trouble.is_some() {
            return;
        }
        // Fenced, or the pool was not to be reached for a moment: start anew.
        if lived.is_err() {
            marks::hit("new_life");
        }
    }
}

async fn live<E: Engine>(
    cluster: &Cluster,
    engine: &E,
    trial: &Trial,
    client: u32,
    life: u32,
    log: &Rc<RefCell<Log>>,
    left: &Rc<RefCell<Vec<u32>>>,
) -> Result<(), IndexError> {
    let pool = join(cluster, engine).await?;
    let keeper = pool.session().endpoint()?;
    pool.keep_alive(&keeper, HEARTBEAT_NS);
    let this = Life::begin(&pool, log);
    let attached = engine.attach(&pool, &keeper, INDEX).await?;
    let leaving = Rc::new(Cell::new(false));
    let tasks: Vec<_> = (0..trial.tasks)
        .map(|task| {
            let (pool, attached, engine) = (pool.clone(), attached.clone(), engine.clone());
            let (trial, log, left) = (trial.clone(), Rc::clone(log), Rc::clone(left));
            let only_reads_from = if comes_late(&trial, client) { u32::MAX } else { trial.ops / 2 };
            let (leaving, phases) = (Rc::clone(&leaving), if trial.churn { u32::from(task) } else { 0 });
            let seed = trial.seed ^ u64::from(client) << 40 ^ u64::from(life) << 32 ^ u64::from(task) << 16;
            keeper.spawn(async move {
                let endpoint = pool.session().endpoint()?;
                let index = engine.open(&attached, &endpoint, task)?;
                let mix =
                    Mix::new(seed, trial.keys, engine.value_bytes()).spelled(trial.spelling).ahead(phases);
                let (mix, mut company_rng) = (RefCell::new(mix), Rng::with_seed(seed ^ 0xc0));
                let mut whims = Rng::with_seed(seed ^ 0xca9c_e100);
                let work = Work { trial: &trial, log: &log, leaving: &leaving };
                if trial.bulk && (client, life, task) == (0, 0, 0) {
                    bulk_load(&engine, &index, &log, (trial.keys, trial.spelling)).await?;
                }
                let left_of_task = || left.borrow()[usize::from(task)];
                while left_of_task() > 0 {
                    let together = if trial.immediate { company_rng.u32(1..=MAX_COMPANY) } else { 1 };
                    let mut operations = Vec::new();
                    for n in 0..together.min(left_of_task()) {
                        let draw = || mix.borrow_mut().draw(left_of_task(), &mut log.borrow_mut().values);
                        let mut action = draw();
                        while trial.bulk && left_of_task() > only_reads_from && !action.is_read() {
                            action = draw();
                        }
                        left.borrow_mut()[usize::from(task)] -= 1;
                        let patience = Patience::draw(trial.cancel, &mut whims);
                        let client = client * 100 + n * 20 + u32::from(task);
                        operations.push(work.perform(&index, (client, action), patience, &mix));
                    }
                    for ended in company::run_all(endpoint.company(), operations).await {
                        ended?;
                    }
                }
                Ok::<_, IndexError>(())
            })
        })
        .collect();
    let leaver = (life < trial.leaves).then(|| {
        let (pool, keeper) = (pool.clone(), keeper.clone());
        let (leaving, this) = (Rc::clone(&leaving), Rc::clone(&this));
        let stay = Rng::with_seed(trial.seed ^ u64::from(client) << 40 ^ u64::from(life) << 32)
            .u64(0..LONGEST_STAY_NS);
        keeper.clone().spawn(async move {
            keeper.sleep(stay).await;
            if !leaving.replace(true) {
                marks::hit("left_in_the_middle");
                this.leave(pool, &keeper).await?;
            }
            Ok::<_, FabricError>(())
        })
    });
    let mut result = Ok(());
    for task in tasks {
        let ended = task.await.unwrap_or(Err(IndexError::Unknown));
        result = result.and(ended);
    }
    if leaving.replace(true) {
        // It left in the middle: what is left to do is for the next life.
        if let Some(leaver) = leaver {
            leaver.await.unwrap_or(Ok(()))?;
        }
        return Ok(());
    }
    result?;
    this.leave(pool, &keeper).await?;
    Ok(())
}

/// Whether this compute server begins when a bulk load is under way, or done, without having seen what was there before.
fn comes_late(trial: &Trial, client: u32) -> bool {
    trial.bulk && client + 1 == trial.sessions && client > 0
}

/// Loads every other key in bulk, which counts as a put of each: all of them happened, or none, or nobody knows.
async fn bulk_load<E: Engine>(
    engine: &E,
    index: &E::Index,
    log: &Rc<RefCell<Log>>,
    (keys, spelling): (u64, Spelling),
) -> Result<(), IndexError> {
    let value_bytes = *engine.value_bytes().end();
    let mut pairs: Vec<(Vec<u8>, Vec<u8>)> =
        (0..keys).step_by(2).map(|n| (spelling.key(n), Vec::new())).collect();
    pairs.sort_unstable();
    pairs.dedup_by(|a, b| a.0 == b.0);
    let mut ids = Vec::new();
    for (key, value) in &mut pairs {
        let mut log = log.borrow_mut();
        log.values += 1;
        *value = log.values.to_le_bytes().to_vec();
        value.resize(value_bytes, value[0] | 1);
        ids.push(log.history.invoke(BULK_LOADER, Action::Put { key: key.clone(), value: value.clone() }));
    }
    let loaded = engine.bulk_load(index, pairs.into_iter(), 1.0).await;
    let mut log = log.borrow_mut();
    match loaded {
        Ok(_) => {
            marks::hit("bulk_loaded");
            for id in ids {
                log.history.respond(id, Outcome::Done);
            }
            Ok(())
        }
        // Somebody was faster.
        Err(IndexError::BadConfig { .. }) => {
            marks::hit("bulk_load_refused");
            for id in ids {
                log.history.cancel(id);
            }
            Ok(())
        }
        Err(error) if error.is_unknown() => {
            for id in ids {
                log.history.unknown(id);
            }
            if error == IndexError::Fenced { Err(error) } else { Ok(()) }
        }
        Err(error) => {
            log.trouble.get_or_insert(("a bulk load".to_owned(), error.clone()));
            Err(error)
        }
    }
}

/// How long a task waits for an operation before it drops its future: so many polls, and then at once, while something is under
/// way, or when that has come back.
#[derive(Clone, Copy, Debug)]
struct Patience {
    polls: u32,
    until_woken: bool,
}

impl Patience {
    /// As long as it takes, or with a chance of so many in a hundred, not.
    fn draw(percent: u8, whims: &mut Rng) -> Option<Self> {
        (whims.u8(0..100) < percent)
            .then(|| Self { polls: whims.u32(1..=MAX_POLLS), until_woken: whims.bool() })
    }

    /// What the future gives, unless it takes too long and is dropped.
    async fn wait<T>(self, future: impl Future<Output = T>) -> Option<T> {
        let mut future = pin!(future);
        let mut left = self.polls;
        poll_fn(|context| {
            if left == 0 {
                return Poll::Ready(None);
            }
            left -= 1;
            match future.as_mut().poll(context) {
                Poll::Pending if left == 0 && !self.until_woken => Poll::Ready(None),
                polled => polled.map(Some),
            }
        })
        .await
    }
}

/// A task and the circumstances of its operations.
struct Work<'a> {
    trial: &'a Trial,
    log: &'a RefCell<Log>,
    /// Its compute server is leaving the pool.
    leaving: &'a Cell<bool>,
}

impl Work<'_> {
    /// Does one operation and writes down what became of it. An error ends the task; the one that no fault explains is kept.
    async fn perform<I: OrderedIndex>(
        &self,
        index: &I,
        (client, action): (u32, Action),
        patience: Option<Patience>,
        mix: &RefCell<Mix>,
    ) -> Result<(), IndexError> {
        let id = self.log.borrow_mut().history.invoke(client, action.clone());
        let ended = match patience {
            None => Some(mix::execute(index, &action).await),
            Some(patience) => patience.wait(mix::execute(index, &action)).await,
        };
        let mut log = self.log.borrow_mut();
        match ended {
            None => {
                marks::hit("operation_cancelled");
                log.history.unknown(id);
                Ok(())
            }
            Some(Ok(outcome)) => {
                mix.borrow_mut().note(&action, &outcome);
                log.history.respond(id, outcome);
                Ok(())
            }
            Some(Err(error)) if error.is_unknown() => {
                log.history.unknown(id);
                if error == IndexError::Fenced || self.leaving.get() { Err(error) } else { Ok(()) }
            }
            Some(Err(error)) if self.is_explained(&error) => {
                log.history.cancel(id);
                if self.leaving.get() { Err(error) } else { Ok(()) }
            }
            Some(Err(error)) => {
                log.history.cancel(id);
                if log.trouble.is_none() {
                    log.trouble = Some((format!("{action:?}"), error.clone()));
                }
                Err(error)
            }
        }
    }

    /// Whether an operation may fail like this, without an effect.
    fn is_explained(&self, error: &IndexError) -> bool {
        let lines_fail = |fault: &Fault| matches!(fault, Fault::Cut { .. } | Fault::FailReconnect { .. });
        match error {
            IndexError::Corrupt { .. } => false,
            IndexError::PoolFull(_) if self.trial.chunks.is_some() => {
                marks::hit("pool_full");
                true
            }
            IndexError::Fabric(FabricError::Disconnected { .. } | FabricError::RetriesExhausted { .. })
                if self.trial.faults.faults.iter().any(lines_fail) =>
            {
                true
            }
            _ => self.leaving.get(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farwood_fabric::Executor;

    /// A future that is ready at its tenth poll, or is dropped before.
    struct Slow<'a> {
        polls: u32,
        dropped_after: &'a Cell<u32>,
    }

    impl Future for Slow<'_> {
        type Output = ();

        fn poll(mut self: std::pin::Pin<&mut Self>, context: &mut std::task::Context<'_>) -> Poll<()> {
            self.polls += 1;
            context.waker().wake_by_ref();
            if self.polls < 10 { Poll::Pending } else { Poll::Ready(()) }
        }
    }

    impl Drop for Slow<'_> {
        fn drop(&mut self) {
            self.dropped_after.set(self.polls);
        }
    }

    #[test]
    fn who_loses_patience_drops_the_future_where_it_stands() {
        for until_woken in [false, true] {
            for polls in 1..12 {
                let dropped_after = Cell::new(0);
                let slow = Slow { polls: 0, dropped_after: &dropped_after };
                let got = Executor::new().block_on(Patience { polls, until_woken }.wait(slow));
                assert_eq!((got.is_some(), dropped_after.get()), (polls >= 10, polls.min(10)));
            }
        }
    }

    #[test]
    fn so_many_in_a_hundred_lose_patience() {
        let mut whims = Rng::with_seed(3);
        let mut impatient =
            |percent| (0..1000).filter(|_| Patience::draw(percent, &mut whims).is_some()).count();
        assert_eq!((impatient(0), impatient(100)), (0, 1000));
        assert!((30..80).contains(&impatient(5)));
    }
}
