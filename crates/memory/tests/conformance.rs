//! Runs the fabric's conformance suite against its transports, with real memory servers behind them.
//!
//! `local`: every client is a thread; scenarios of a group follow each other on one pool, twice, so that each also starts on
//! what the others left. `sim`: every client is a simulated process; each scenario runs in a world of its own per seed, and
//! the seed also picks what the transport claims. `FARWOOD_SEEDS=1000` runs more of them, `FARWOOD_SEED=17` only that one,
//! `FARWOOD_ROUNDS=10` ten times the rounds on `local`.
//!
//! The suite itself is tested by clients that break the rules and by a simulator that does: both must be caught.

use farwood_fabric::addr::{GlobalAddr, RegionId, ServerId};
use farwood_fabric::call::{CallError, Target};
use farwood_fabric::clock::{MICROSECOND, MILLISECOND, Nanos, SECOND};
use farwood_fabric::procedure::{Procedure, ProcedureContext, ProcedureFuture, ProcedureId, ProcedureSet};
use farwood_fabric::region::PoolId;
use farwood_fabric::server::ServerLogic;
use farwood_fabric::transport::Cluster;
use farwood_fabric::transport::conformance::{Scenario, mistakes, procedures, run_client, scenarios};
use farwood_fabric::transport::local::LocalCluster;
use farwood_fabric::transport::sim::{Fault, FaultPlan, Profile, Sim, SimConfig};
use farwood_fabric::{Executor, FabricError, Session, SessionOptions};
use farwood_memory::{MemoryServer, ServerConfig};
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

/// Limits small enough to be reached.
fn servers(count: u16, lease_ns: Nanos) -> Vec<Arc<dyn ServerLogic>> {
    let start = |n| -> Arc<dyn ServerLogic> {
        let config = ServerConfig {
            chunk_bytes: 64 << 10,
            lock_bytes: 16 << 10,
            max_sessions: 12,
            max_indexes: 3,
            lease_ns,
            queue: 12,
            ..ServerConfig::new(PoolId(7), ServerId::new(n), count, 3 << 20)
        };
        Arc::new(MemoryServer::new(config, procedures()).expect("the limits are valid"))
    };
    // In any order: the view sorts them.
    (0..count).rev().map(start).collect()
}

fn from_env(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|text| text.parse().ok())
}

fn of_group(group: &str) -> Vec<Scenario> {
    let of_group: Vec<_> = scenarios().into_iter().filter(|s| s.group() == group).collect();
    assert!(!of_group.is_empty(), "no scenario in group {group}");
    of_group
}

/// Fails with the first failures, if there are any.
fn report(failures: impl Iterator<Item = String>) {
    let failures: Vec<_> = failures.take(12).collect();
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
}

fn mistake(name: &str) -> Scenario {
    mistakes().into_iter().find(|s| s.name == name).expect("no mistake of that name")
}

// --- local ---

/// How long a client may take before the test gives up on it; the suite's own patience is shorter.
const HANGS_AFTER: Duration = Duration::from_secs(90);

#[expect(clippy::disallowed_methods, reason = "the clients of `local` are threads")]
fn run_local(scenario: Scenario, cluster: &Cluster, rounds: u64) -> Result<(), String> {
    let (done, results) = mpsc::channel();
    for index in 0..scenario.clients {
        let (cluster, done) = (cluster.clone(), done.clone());
        std::thread::spawn(move || {
            let result = Executor::new().block_on(run_client(&scenario, &cluster, index, rounds));
            // The test may have given up.
            let _ = done.send(result);
        });
    }
    drop(done);
    let mut failures = Vec::new();
    for _ in 0..scenario.clients {
        match results.recv_timeout(HANGS_AFTER) {
            Ok(Ok(())) => {}
            Ok(Err(why)) => failures.push(why),
            Err(error) => failures.push(format!("{}: a client panicked or hangs: {error}", scenario.name)),
        }
    }
    if failures.is_empty() { Ok(()) } else { Err(failures.join("\n  ")) }
}

fn local_cluster() -> Cluster {
    LocalCluster::start(servers(3, 500 * MILLISECOND)).expect("the servers start")
}

fn local(group: &str, rounds: u64) {
    let mut cluster = local_cluster();
    let rounds = rounds * from_env("FARWOOD_ROUNDS").unwrap_or(1);
    let twice = of_group(group).into_iter().chain(of_group(group));
    report(twice.filter_map(|scenario| {
        let why = run_local(scenario, &cluster, rounds).err()?;
        // A client that failed leaves things behind.
        cluster = local_cluster();
        Some(format!("local: {why}"))
    }));
}

#[test]
fn local_verbs() {
    local("verbs", 4000);
}

#[test]
fn local_batches() {
    local("batches", 10_000);
}

#[test]
fn local_words() {
    local("words", 30_000);
}

#[test]
fn local_order() {
    local("order", 6000);
}

#[test]
fn local_atomics() {
    local("atomics", 100_000);
}

#[test]
fn local_visible() {
    local("visible", 1000);
}

#[test]
fn local_calls() {
    local("calls", 400);
}

#[test]
fn local_sessions() {
    local("sessions", 20_000);
}

#[test]
fn local_fencing() {
    local("fencing", 1);
}

/// Whether a fence comes in the middle of a WRITE is a matter of luck: many of them.
#[test]
fn local_fences_in_the_middle() {
    let cluster = local_cluster();
    let scenario = scenarios().into_iter().find(|s| s.name == "fencing/verbs").expect("it is there");
    report((0..40).filter_map(|_| run_local(scenario, &cluster, 1).err()));
}

#[test]
fn local_bad_input() {
    local("bad_input", 10_000);
}

#[test]
fn local_catches_races() {
    // Whether threads meet is a matter of luck, so each gets several chances; what else is a mistake, real threads on
    // this transport do not punish.
    for name in ["mistakes/flag_first", "mistakes/no_lock", "mistakes/read_and_write", "mistakes/no_fence"] {
        let caught = (0..20).any(|_| run_local(mistake(name), &local_cluster(), 5000).is_err());
        assert!(caught, "{name} went unnoticed on local");
    }
}

// --- sim ---

/// What the simulated transport claims and how it behaves.
#[derive(Clone, Copy, Debug)]
enum Variant {
    Adversarial,
    UnorderedReads,
    Untorn,
    Modest,
    OneServer,
    /// Cost mode: times from a profile, not from the adversary.
    Priced,
}

const VARIANTS: [Variant; 6] = [
    Variant::Adversarial,
    Variant::UnorderedReads,
    Variant::Untorn,
    Variant::Modest,
    Variant::OneServer,
    Variant::Priced,
];

fn run_sim(scenario: Scenario, seed: u64, variant: Variant, rounds: u64, plan: &str) -> Result<(), String> {
    let plan = plan.parse().expect("the plan can be read");
    run_world(scenario, config(seed, variant), variant, rounds, plan)
}

fn config(seed: u64, variant: Variant) -> SimConfig {
    let mut config = SimConfig::adversarial(seed);
    if matches!(variant, Variant::Priced) {
        config = SimConfig::priced(seed, Profile::named("cx5-100g").expect("built in"));
    }
    config.max_events = 20_000_000;
    match variant {
        Variant::Adversarial | Variant::OneServer | Variant::Priced => {}
        Variant::UnorderedReads => config.capabilities.ordered_reads = false,
        Variant::Untorn => config.tear = false,
        Variant::Modest => {
            config.capabilities.masked_cas = false;
            config.capabilities.max_batch = 16;
            config.capabilities.line_atomic = true;
            config.capabilities.ordered_lines_bytes = 1024;
        }
    }
    config
}

fn run_world(
    scenario: Scenario,
    config: SimConfig,
    variant: Variant,
    rounds: u64,
    plan: FaultPlan,
) -> Result<(), String> {
    let seed = config.seed;
    let count = if matches!(variant, Variant::OneServer) { 1 } else { 3 };
    let said = format!("sim, seed {seed}, {variant:?}, plan '{plan}'");
    let sim = Sim::new(config, plan, servers(count, 5 * MILLISECOND)).expect("the world starts");
    let clients: Vec<_> = (0..scenario.clients)
        .map(|index| {
            let cluster = sim.cluster();
            sim.spawn_client(async move { run_client(&scenario, &cluster, index, rounds).await })
        })
        .collect();
    let ended = sim.run(async move {
        let mut failures = Vec::new();
        for client in clients {
            match client.await {
                Ok(Ok(())) => {}
                Ok(Err(why)) => failures.push(why),
                Err(killed) => failures.push(killed.to_string()),
            }
        }
        failures
    });
    match ended {
        Ok(failures) if failures.is_empty() => Ok(()),
        Ok(failures) => Err(format!("{said}: {}", failures.join("\n  "))),
        Err(stop) => Err(format!("{said}: {}: {stop}", scenario.name)),
    }
}

fn seeds(usual: u64) -> std::ops::Range<u64> {
    match (from_env("FARWOOD_SEED"), from_env("FARWOOD_SEEDS")) {
        (Some(seed), _) => seed..seed + 1,
        (None, Some(seeds)) => 0..seeds,
        (None, None) => 0..usual,
    }
}

fn variant(seed: u64) -> Variant {
    VARIANTS[usize::try_from(seed % VARIANTS.len() as u64).expect("few variants")]
}

fn sim(group: &str, usual_seeds: u64, rounds: u64) {
    let runs = seeds(usual_seeds).flat_map(|seed| of_group(group).into_iter().map(move |s| (seed, s)));
    report(runs.filter_map(|(seed, scenario)| run_sim(scenario, seed, variant(seed), rounds, "").err()));
}

#[test]
fn sim_verbs() {
    sim("verbs", 50, 20);
}

#[test]
fn sim_batches() {
    sim("batches", 100, 30);
}

#[test]
fn sim_words() {
    sim("words", 100, 60);
}

#[test]
fn sim_order() {
    sim("order", 80, 40);
}

#[test]
fn sim_atomics() {
    sim("atomics", 100, 40);
}

#[test]
fn sim_visible() {
    sim("visible", 100, 30);
}

#[test]
fn sim_calls() {
    sim("calls", 50, 20);
}

#[test]
fn sim_sessions() {
    sim("sessions", 60, 30);
}

#[test]
fn sim_fencing() {
    sim("fencing", 60, 1);
}

#[test]
fn sim_bad_input() {
    sim("bad_input", 20, 60);
}

/// What is late when its session is fenced never lands: the victim's completions get lost, it stops for a while.
#[test]
fn sim_fencing_with_faults() {
    for seed in seeds(300) {
        let (lose, pause) = (30 + seed * 3 % 97, 20 + seed * 7 % 89);
        let plans = [
            format!("lose:c1@v{lose}+3000000"),
            format!("pause:c1@v{pause}+400000 lose:c1@v{}+2000000", lose + 60),
        ];
        for plan in plans {
            let scenario = scenarios().into_iter().find(|s| s.name == "fencing/verbs").expect("it is there");
            if let Err(why) = run_sim(scenario, seed, variant(seed), 1, &plan) {
                panic!("{why}");
            }
        }
    }
}

/// The plan by which the completions of a client that counts get lost.
fn lossy(seed: u64) -> FaultPlan {
    let lose = |n: u64| Fault::LoseCompletion {
        client: 1,
        at_verb: 12 + n * 9 + seed * 5 % 13,
        late_ns: 400 * MICROSECOND,
    };
    FaultPlan { faults: (0..4).map(lose).collect() }
}

fn reconnects(seed: u64, sabotage: bool) -> Result<(), String> {
    let scenario = scenarios().into_iter().find(|s| s.name == "sessions/reconnect").expect("it is there");
    let mut config = config(seed, Variant::Adversarial);
    config.sabotage.reconnect_without_fence = sabotage;
    run_world(scenario, config, Variant::Adversarial, 60, lossy(seed))
}

#[test]
fn sim_reconnects_with_faults() {
    for seed in seeds(300) {
        if let Err(why) = reconnects(seed, false) {
            panic!("{why}");
        }
    }
}

#[test]
fn sim_catches_a_reconnect_that_does_not_fence() {
    assert!((0..60).any(|seed| reconnects(seed, true).is_err()), "late WRITEs went unnoticed");
}

/// READs the first byte after the reserved page, then never ends. A client that the plan kills at its first verb dies of it.
#[derive(Debug)]
struct Fatal;

impl Procedure for Fatal {
    fn id(&self) -> ProcedureId {
        ProcedureId::FIRST_FREE
    }

    fn run(self: Arc<Self>, context: ProcedureContext, _: Vec<u8>) -> ProcedureFuture {
        Box::pin(async move {
            let place = GlobalAddr::new(ServerId::COORDINATOR, RegionId::MAIN, 4096);
            let _ = context.endpoint.op().read_word(place).await;
            std::future::pending().await
        })
    }
}

/// Calls [`Fatal`] on the coordinator, or on the other session there is as soon as it serves.
async fn call_fatal(cluster: Cluster, session_call: bool) -> Result<Vec<u8>, FabricError> {
    let session = Session::open(&cluster, SessionOptions::default()).await?;
    let endpoint = session.endpoint()?;
    loop {
        let op = endpoint.op();
        let others = session.list(&op).await?;
        let target = if session_call {
            others.iter().find(|info| info.session != session.id()).map(|info| Target::Session(info.session))
        } else {
            Some(Target::Server(ServerId::COORDINATOR))
        };
        if let Some(target) = target {
            match op.call(target, ProcedureId::FIRST_FREE, vec![1]).await {
                Err(FabricError::Call(CallError::NoSuchSession { .. })) => {}
                outcome => return outcome,
            }
        }
        endpoint.sleep(20 * MICROSECOND).await;
    }
}

/// Whoever calls a session or a server that dies while it works on the call is told that nobody knows.
#[test]
fn sim_calls_to_the_dead_come_back() {
    for seed in seeds(20) {
        for fault in ["kill:c1@v0", "gone:m0@200000"] {
            let fatal = ProcedureSet::default().with(Arc::new(Fatal));
            let config = ServerConfig::new(PoolId(7), ServerId::COORDINATOR, 1, 64 << 20);
            let server = MemoryServer::new(config, fatal.clone()).expect("the limits are valid");
            let plan = fault.parse().expect("the plan can be read");
            let sim = Sim::new(SimConfig::adversarial(seed), plan, vec![Arc::new(server)])
                .expect("the world starts");
            let caller = sim.spawn_client(call_fatal(sim.cluster(), fault.starts_with("kill")));
            let cluster = sim.cluster();
            sim.spawn_client(async move {
                let session = Session::open(&cluster, SessionOptions::default()).await?;
                let endpoint = session.endpoint()?;
                endpoint.serve(fatal);
                endpoint.sleep(SECOND).await;
                Ok::<(), FabricError>(())
            });
            let outcome = sim.run(caller);
            assert!(
                matches!(outcome, Ok(Ok(Err(FabricError::Call(CallError::Unknown))))),
                "seed {seed}, {fault}: a call to the dead came to {outcome:?}"
            );
        }
    }
}

#[test]
fn sim_catches_mistakes() {
    for mistake in mistakes() {
        let variant = match mistake.name {
            "mistakes/unordered_reads" => Variant::UnorderedReads,
            _ => Variant::Adversarial,
        };
        let caught = (0..40).any(|seed| run_sim(mistake, seed, variant, 30, "").is_err());
        assert!(caught, "{} went unnoticed in the simulator", mistake.name);
    }
}

#[test]
fn names_are_unique_and_fit_the_catalog() {
    let mut names: Vec<_> = scenarios().iter().chain(&mistakes()).map(|s| s.name).collect();
    let count = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), count, "two scenarios share a name");
    assert!(names.iter().all(|name| name.len() <= 64 && name.contains('/')));
}
