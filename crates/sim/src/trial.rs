//! One trial: a world, a workload and a fault plan, all of it in one line of text that replays exactly.
//!
//! 1. Memory servers start; the driver joins the pool and creates the engine.
//! 2. Compute servers start as processes of their own. Each joins the pool, keeps its lease alive, recovers sessions whose
//!    lease has run out, and runs tasks, which do random operations one after the other and write down what they were told.
//!    One that finds itself fenced starts anew with a new session.
//! 3. When all have ended or died, the driver waits for the leases of the dead and recovers them.
//! 4. The structure is walked and verified, memory is accounted for, and the history is judged.

use crate::check::{self, leaks};
use crate::history::{Action, History, Outcome};
use crate::mix::{self, Mix};
use crate::spelling::Spelling;
use farwood_fabric::clock::{MICROSECOND, MILLISECOND, Nanos};
use farwood_fabric::control::SessionState;
use farwood_fabric::procedure::ProcedureSet;
use farwood_fabric::region::PoolId;
use farwood_fabric::server::{ServerLogic, StartError};
use farwood_fabric::transport::sim::{Fault, FaultPlan, Sabotage, Sim, SimConfig, SimReport, SimStop};
use farwood_fabric::{Cluster, Endpoint, ServerId, SessionOptions, marks};
use farwood_index::shared::heap::{CLAIM, MAX_FREE};
use farwood_index::{Engine, IndexError, OrderedIndex, Pool};
use farwood_memory::{MemoryServer, ServerConfig};
use fastrand::Rng;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::rc::Rc;
use std::str::FromStr;
use std::sync::Arc;

/// How long a session lives without a heartbeat.
const LEASE_NS: Nanos = MILLISECOND;
const HEARTBEAT_NS: Nanos = 100 * MICROSECOND;
/// How long a READ that lasts long may last: as many operations as a task does in a quarter of its life.
const LONG_READ_NS: Nanos = 600 * MICROSECOND;
/// How often a fenced compute server starts anew.
const MAX_LIVES: u32 = 5;
/// The client that a bulk load is written down as, key by key.
const BULK_LOADER: u32 = u32::MAX;
/// What the index is called.
const INDEX: &str = "tried";
/// How often the driver looks whether the dead can be recovered.
const MAX_RECOVERY_ROUNDS: u32 = 100;

/// Faults that a trial draws. The loss of a server is not among them: what it held is gone, so there is nothing to check;
/// see the tests of the fabric for that.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[expect(missing_docs, reason = "they are those of `Fault`")]
pub enum FaultKind {
    Kill,
    Pause,
    LoseCompletion,
    LoseReply,
    SlowServer,
    SkewClock,
}

impl FaultKind {
    /// All of them.
    pub const ALL: [FaultKind; 6] =
        [Self::Kill, Self::Pause, Self::LoseCompletion, Self::LoseReply, Self::SlowServer, Self::SkewClock];
}

/// Everything that determines a run.
#[derive(Clone, PartialEq, Eq, Debug)]
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
    /// Whether half of the tasks empty the index while the others fill it, rather than all together: memory is used again sooner.
    pub churn: bool,
    /// Whether the first task of the first compute server loads every other key in bulk, while the others only read at first.
    pub bulk: bool,
    /// What goes wrong.
    pub faults: FaultPlan,
}

impl Trial {
    /// The trial with up to four faults of any kind, drawn from its seed; in one of four, some READs outlast many operations.
    #[must_use]
    pub fn with_random_faults(mut self) -> Self {
        let mut world = Rng::with_seed(self.seed ^ 0x1095);
        if world.u8(0..4) == 0 {
            self.long_ns = world.u64(1..=LONG_READ_NS);
        }
        let mut rng = Rng::with_seed(self.seed ^ 0xfa17);
        for _ in 0..rng.u32(0..=4) {
            let kind = rng.choice(FaultKind::ALL).unwrap_or(FaultKind::Kill);
            self.add_fault(kind, &mut rng);
        }
        self
    }

    /// The trial with `count` faults of one kind, drawn from its seed.
    #[must_use]
    pub fn with_faults(mut self, kind: FaultKind, count: u32) -> Self {
        let mut rng = Rng::with_seed(self.seed ^ 0xfa17);
        for _ in 0..count {
            self.add_fault(kind, &mut rng);
        }
        self
    }

    fn add_fault(&mut self, kind: FaultKind, rng: &mut Rng) {
        let client = rng.u32(0..self.sessions.max(1));
        // A task's operation takes about four verbs.
        let at_verb = rng.u64(0..u64::from(self.tasks) * u64::from(self.ops) * 4);
        self.faults.faults.push(match kind {
            FaultKind::Kill => Fault::Kill { client, at_verb },
            FaultKind::Pause => {
                Fault::Pause { client, at_verb, for_ns: rng.u64(100 * MICROSECOND..8 * LEASE_NS) }
            }
            FaultKind::LoseCompletion => {
                Fault::LoseCompletion { client, at_verb, late_ns: rng.u64(0..2 * LEASE_NS) }
            }
            FaultKind::LoseReply => Fault::LoseReply { client, at_call: rng.u64(0..40) },
            FaultKind::SlowServer => Fault::SlowServer {
                server: rng.u16(0..self.servers.max(1)),
                from_ns: rng.u64(0..MILLISECOND),
                for_ns: rng.u64(0..MILLISECOND),
                factor: rng.u32(2..20),
            },
            FaultKind::SkewClock => Fault::SkewClock {
                client,
                ahead_ns: rng.u64(0..10 * LEASE_NS),
                drift_ppm: rng.i32(-100_000..100_000),
            },
        });
    }
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
            churn: false,
            bulk: false,
            faults,
        }
    }
}

impl fmt::Display for Trial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seed, servers, sessions, tasks, ops, keys, spelling, tear, long_ns, churn, bulk, faults } =
            self;
        write!(
            f,
            "seed={seed} servers={servers} sessions={sessions} tasks={tasks} ops={ops} keys={keys} tear={tear}"
        )?;
        if *spelling != Spelling::Numbers {
            write!(f, " spell={spelling}")?;
        }
        if *long_ns > 0 {
            write!(f, " long={long_ns}")?;
        }
        if *churn {
            f.write_str(" churn=true")?;
        }
        if *bulk {
            f.write_str(" bulk=true")?;
        }
        if faults.faults.is_empty() { Ok(()) } else { write!(f, " {faults}") }
    }
}

/// A line that is no trial.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BadTrial {
    /// The word that is not understood.
    pub word: String,
}

impl fmt::Display for BadTrial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "'{}' is not understood; a trial is written like 'seed=7 servers=3 sessions=4 tasks=4 ops=40 keys=8 tear=true \
             kill:c2@v57', with at least one server, session, task, operation and key",
            self.word
        )
    }
}

impl std::error::Error for BadTrial {}

impl FromStr for Trial {
    type Err = BadTrial;

    fn from_str(text: &str) -> Result<Self, BadTrial> {
        let mut trial = Trial::default();
        for word in text.split_whitespace() {
            set(&mut trial, word).ok_or_else(|| BadTrial { word: word.to_owned() })?;
        }
        Ok(trial)
    }
}

fn set(trial: &mut Trial, word: &str) -> Option<()> {
    let Some((name, value)) = word.split_once('=') else {
        trial.faults.faults.push(word.parse().ok()?);
        return Some(());
    };
    match name {
        "seed" => trial.seed = value.parse().ok()?,
        "servers" => trial.servers = value.parse().ok().filter(|n| (1..=64).contains(n))?,
        "sessions" => trial.sessions = value.parse().ok().filter(|n| (1..=64).contains(n))?,
        "tasks" => trial.tasks = value.parse().ok().filter(|n| (1..=16).contains(n))?,
        "ops" => trial.ops = value.parse().ok().filter(|n| *n > 0)?,
        "keys" => trial.keys = value.parse().ok().filter(|n| (1..=4096).contains(n))?,
        "spell" => trial.spelling = value.parse().ok()?,
        "tear" => trial.tear = value.parse().ok()?,
        "long" => trial.long_ns = value.parse().ok()?,
        "churn" => trial.churn = value.parse().ok()?,
        "bulk" => trial.bulk = value.parse().ok()?,
        _ => return None,
    }
    Some(())
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
    Memory(leaks::Usage),
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
            Self::Memory(_) => "memory",
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
            Self::Memory(usage) => write!(f, "memory is wrong: {usage}"),
        }
    }
}

impl std::error::Error for Failure {}

/// The transport's and the world's settings that are not part of a trial's text.
#[derive(Clone, Copy, Default, Debug)]
pub struct Settings {
    /// Mistakes of the transport.
    pub sabotage: Sabotage,
}

/// Runs a trial of `engine`.
pub fn run<E: Engine>(engine: &E, trial: &Trial, settings: Settings) -> Result<Report, Failure> {
    marks::reset();
    let mut config = SimConfig::adversarial(trial.seed);
    config.tear = trial.tear;
    config.long_read_ns = trial.long_ns;
    config.sabotage = settings.sabotage;
    config.max_events =
        200_000 + u64::from(trial.sessions) * u64::from(trial.tasks) * u64::from(trial.ops) * 20_000;
    let sim = Sim::new(config, trial.faults.clone(), memory_servers(trial)?).map_err(Failure::Start)?;
    let log = Rc::new(RefCell::new(Log::default()));
    let main = drive(sim.clone(), engine.clone(), trial.clone(), Rc::clone(&log));
    let ended = sim.run(main).map_err(Failure::Stuck)?;
    let sim = sim.report();
    let log = log.borrow();
    if let Some((action, error)) = &log.trouble {
        return Err(Failure::Operation { action: action.clone(), error: error.clone() });
    }
    let usage = ended.map_err(Failure::Structure)?;
    let recovered = marks::count("session_recovered");
    check::all(&log.history).map_err(Failure::History)?;
    if !usage.dangling.is_empty()
        || usage.lost_chunks > 0
        || usage.leaked.len() as u64 > may_leak(trial, recovered)
    {
        return Err(Failure::Memory(usage));
    }
    let operations = log.history.operations();
    let unknown = operations.iter().filter(|op| op.responded.is_none()).count() as u64;
    Ok(Report {
        sim,
        operations: operations.len() as u64,
        unknown,
        usage,
        recovered,
        marks: marks::snapshot(),
    })
}

/// How many objects may be lost: what each session that died had in its hands on each server (see `shared::heap`), and what
/// each lost completion leaves in doubt.
fn may_leak(trial: &Trial, dead_sessions: u64) -> u64 {
    let in_hands = MAX_FREE as u64 + 2 * u64::from(CLAIM) + u64::from(trial.tasks);
    let lost = |fault: &&Fault| matches!(fault, Fault::LoseCompletion { .. });
    let lost = trial.faults.faults.iter().filter(lost).count() as u64;
    dead_sessions * u64::from(trial.servers) * in_hands + lost * u64::from(CLAIM) * u64::from(trial.tasks)
}

fn memory_servers(trial: &Trial) -> Result<Vec<Arc<dyn ServerLogic>>, Failure> {
    // Keys of 4 KiB need larger chunks.
    let (chunk_bytes, chunks) = if trial.spelling == Spelling::Huge { (32 << 10, 1024) } else { (4096, 256) };
    let server = |n| {
        let config = ServerConfig {
            chunk_bytes,
            memory_bytes: chunk_bytes * u64::from(chunks),
            pool: PoolId(u128::from(trial.seed)),
            lock_bytes: 4096,
            // Every life of a compute server is a session, and the dead keep theirs until they are recovered.
            max_sessions: u16::try_from(trial.sessions * (MAX_LIVES + 1) + 1).unwrap_or(u16::MAX),
            lease_ns: LEASE_NS,
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
}

async fn drive<E: Engine>(
    sim: Sim,
    engine: E,
    trial: Trial,
    log: Rc<RefCell<Log>>,
) -> Result<leaks::Usage, IndexError> {
    let cluster = sim.cluster();
    let pool = Pool::join(&cluster, SessionOptions::default()).await?;
    let endpoint = pool.session().endpoint()?;
    pool.session().keep_alive(&endpoint, HEARTBEAT_NS);
    engine.create(&pool, &endpoint, INDEX).await?;
    let attached = engine.attach(&pool, &endpoint, INDEX).await?;
    let clients: Vec<_> = (0..trial.sessions)
        .map(|client| {
            let process =
                compute_server(cluster.clone(), engine.clone(), trial.clone(), client, Rc::clone(&log));
            sim.spawn_client(process)
        })
        .collect();
    for client in clients {
        // An error here is a process that was killed.
        let _ = client.await;
    }
    match take_stock(&sim, &engine, (&pool, &attached), &endpoint).await {
        // A slow server cost the driver its lease too, and a client took it for dead. Nobody is left who could do so again.
        Err(IndexError::Fenced) => {
            marks::hit("driver_fenced");
            let pool = Pool::join(&cluster, SessionOptions::default()).await?;
            let endpoint = pool.session().endpoint()?;
            pool.session().keep_alive(&endpoint, HEARTBEAT_NS);
            let attached = engine.attach(&pool, &endpoint, INDEX).await?;
            take_stock(&sim, &engine, (&pool, &attached), &endpoint).await
        }
        ended => ended,
    }
}

/// What is there when all clients have ended, and whether it is whole.
async fn take_stock<E: Engine>(
    sim: &Sim,
    engine: &E,
    (pool, attached): (&Pool, &E::Attached),
    endpoint: &Endpoint,
) -> Result<leaks::Usage, IndexError> {
    recover_the_dead(sim, engine, (pool, attached), endpoint).await?;
    let reachable = engine.check(attached, endpoint).await?;
    // What recovery retired into the driver's hands is given back before memory is counted.
    pool.heap().close(endpoint).await?;
    Ok(leaks::measure(pool.session(), endpoint, &reachable).await?)
}

/// Recovers whoever has lost its lease, for as long as there is somebody.
async fn recover_the_dead<E: Engine>(
    sim: &Sim,
    engine: &E,
    member: (&Pool, &E::Attached),
    endpoint: &Endpoint,
) -> Result<(), IndexError> {
    for _ in 0..MAX_RECOVERY_ROUNDS {
        if recover_expired(engine, member, endpoint).await? == 0 {
            return Ok(());
        }
        sim.sleep(LEASE_NS).await;
    }
    Err(IndexError::Contended { what: "the recovery of all sessions", attempts: MAX_RECOVERY_ROUNDS })
}

/// Recovers the sessions whose lease has run out; returns how many others there were, dead or alive.
async fn recover_expired<E: Engine>(
    engine: &E,
    (pool, attached): (&Pool, &E::Attached),
    endpoint: &Endpoint,
) -> Result<usize, IndexError> {
    let sessions = pool.session().list(&endpoint.op()).await?;
    let others: Vec<_> = sessions.into_iter().filter(|info| info.session != pool.session().id()).collect();
    for info in &others {
        if info.state == SessionState::Active && info.lease_left_ns > 0 {
            continue;
        }
        engine.recover(attached, endpoint, info.session).await?;
    }
    Ok(others.len())
}

/// One compute server: as many lives as it takes to do its operations.
async fn compute_server<E: Engine>(
    cluster: Cluster,
    engine: E,
    trial: Trial,
    client: u32,
    log: Rc<RefCell<Log>>,
) {
    let left: Rc<RefCell<Vec<u32>>> = Rc::new(RefCell::new(vec![trial.ops; usize::from(trial.tasks)]));
    for life in 0..MAX_LIVES {
        let lived = live(&cluster, &engine, &trial, client, life, &log, &left).await;
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
    let pool = Pool::join_with(cluster, SessionOptions::default(), engine.heap_sabotage()).await?;
    let keeper = pool.session().endpoint()?;
    pool.session().keep_alive(&keeper, HEARTBEAT_NS);
    let attached = engine.attach(&pool, &keeper, INDEX).await?;
    let tasks: Vec<_> = (0..trial.tasks)
        .map(|task| {
            let (pool, attached, engine) = (pool.clone(), attached.clone(), engine.clone());
            let (log, left, keys) = (Rc::clone(log), Rc::clone(left), trial.keys);
            let (bulk, ops) = (trial.bulk, trial.ops);
            let (spelling, phases) = (trial.spelling, if trial.churn { u32::from(task) } else { 0 });
            let seed = trial.seed ^ u64::from(client) << 40 ^ u64::from(life) << 32 ^ u64::from(task) << 16;
            keeper.spawn(async move {
                let endpoint = pool.session().endpoint()?;
                let index = engine.open(&attached, &endpoint, task)?;
                let mut mix = Mix::new(seed, keys, engine.value_bytes()).spelled(spelling).ahead(phases);
                if bulk && (client, life, task) == (0, 0, 0) {
                    bulk_load(&engine, &index, &log, (keys, spelling)).await?;
                }
                while left.borrow()[usize::from(task)] > 0 {
                    let left_now = left.borrow()[usize::from(task)];
                    let mut action = mix.draw(left_now, &mut log.borrow_mut().values);
                    while bulk && left_now > ops / 2 && !action.is_read() {
                        action = mix.draw(left_now, &mut log.borrow_mut().values);
                    }
                    left.borrow_mut()[usize::from(task)] -= 1;
                    perform(&index, &log, client * 100 + u32::from(task), action, &mut mix).await?;
                }
                Ok::<_, IndexError>(())
            })
        })
        .collect();
    let janitor = (pool.clone(), attached, engine.clone(), keeper.clone());
    keeper.spawn(async move {
        let (pool, attached, engine, keeper) = janitor;
        while !pool.session().is_fenced() && !pool.session().is_closed() {
            keeper.sleep(LEASE_NS).await;
            // Whatever goes wrong here goes wrong for the tasks too, which say so.
            let _ = recover_expired(&engine, (&pool, &attached), &keeper).await;
        }
    });
    let mut result = Ok(());
    for task in tasks {
        let ended = task.await.unwrap_or(Err(IndexError::Unknown));
        result = result.and(ended);
    }
    result?;
    pool.leave(&keeper).await?;
    Ok(())
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

/// Does one operation and writes down what became of it. An error ends the task; the one that no fault explains is kept.
async fn perform<I: OrderedIndex>(
    index: &I,
    log: &Rc<RefCell<Log>>,
    client: u32,
    action: Action,
    mix: &mut Mix,
) -> Result<(), IndexError> {
    let id = log.borrow_mut().history.invoke(client, action.clone());
    let ended = mix::execute(index, &action).await;
    let mut log = log.borrow_mut();
    match ended {
        Ok(outcome) => {
            mix.note(&action, &outcome);
            log.history.respond(id, outcome);
            Ok(())
        }
        Err(error) if error.is_unknown() => {
            log.history.unknown(id);
            if error == IndexError::Fenced { Err(error) } else { Ok(()) }
        }
        Err(error) => {
            log.history.cancel(id);
            if log.trouble.is_none() {
                log.trouble = Some((format!("{action:?}"), error.clone()));
            }
            Err(error)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trial_survives_its_text() {
        for seed in 0..200 {
            let spelling = Spelling::ALL[usize::try_from(seed).unwrap_or(0) % Spelling::ALL.len()];
            let trial =
                Trial { seed, spelling, churn: seed % 2 == 1, ..Trial::default() }.with_random_faults();
            assert_eq!(trial.to_string().parse::<Trial>(), Ok(trial));
        }
    }

    #[test]
    fn nonsense_is_refused_with_the_word() {
        for (text, word) in [
            ("seed=x", "seed=x"),
            ("seed=1 kill", "kill"),
            ("servers=0", "servers=0"),
            ("tasks=17", "tasks=17"),
            ("colour=blue", "colour=blue"),
        ] {
            assert_eq!(text.parse::<Trial>(), Err(BadTrial { word: word.to_owned() }));
        }
    }

    #[test]
    fn random_faults_cover_every_kind() {
        let mut kinds = std::collections::BTreeSet::new();
        for seed in 0..300 {
            let trial = Trial { seed, ..Trial::default() }.with_random_faults();
            kinds.extend(
                trial.faults.faults.iter().map(|f| f.to_string().split(':').next().map(str::to_owned)),
            );
        }
        assert_eq!(kinds.len(), 6, "{kinds:?}");
    }
}
