//! Spin locks in far memory, under skew: the setting of Sherman's Figure 2 (and, on the NIC's own memory, of Figure 16).
//!
//! Threads of several compute servers take and give back locks of one memory server, without any work in between: a CAS
//! from 0 to 1 until it succeeds, an FAA of -1 (as FG does) or a WRITE of 0 (as Sherman does) to give it back. Which lock is
//! wanted follows a Zipf distribution. In main memory the system collapses under contention: failed CASes queue up in the NIC
//! for the word, and hold what other locks' verbs need.

use farwood_fabric::clock::{MILLISECOND, Nanos, SECOND};
use farwood_fabric::control::{Reply, Request};
use farwood_fabric::procedure::ProcedureSet;
use farwood_fabric::region::PoolId;
use farwood_fabric::server::{ServerLogic, StartError};
use farwood_fabric::transport::sim::{FaultPlan, Profile, Sim, SimConfig, SimStop, Usage};
use farwood_fabric::{
    CallError, Cluster, Endpoint, FabricError, GlobalAddr, RegionId, ServerId, Session, SessionOptions,
};
use farwood_memory::{MemoryServer, ServerConfig};
use std::cell::RefCell;
use std::fmt;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

/// How a lock is given back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Release {
    /// By an FAA of -1.
    Faa,
    /// By a WRITE of 0.
    Write,
}

/// One run.
#[derive(Clone, Debug)]
pub struct LockSetting {
    /// The hardware.
    pub profile: Profile,
    /// Everything random comes from it.
    pub seed: u64,
    /// How many compute servers, each with a NIC of its own.
    pub compute_servers: u32,
    /// How many threads on each.
    pub threads: u32,
    /// How many locks.
    pub locks: u64,
    /// How skewed their popularity is; 0: not at all.
    pub zipf: f64,
    /// Where they are: main memory, or lock memory, on the NIC.
    pub region: RegionId,
    /// How they are given back.
    pub release: Release,
    /// How long the run lasts before anything is counted.
    pub warm_up_ns: Nanos,
    /// How long it is measured.
    pub measured_ns: Nanos,
}

impl LockSetting {
    /// Figure 2: 154 threads on 7 compute servers, 10240 locks in main memory, CAS and FAA; for 100 ms, which the tail needs.
    pub fn figure_2(profile: Profile, zipf: f64) -> Self {
        Self {
            profile,
            seed: 1,
            compute_servers: 7,
            threads: 22,
            locks: 10_240,
            zipf,
            region: RegionId::MAIN,
            release: Release::Faa,
            warm_up_ns: MILLISECOND,
            measured_ns: 100 * MILLISECOND,
        }
    }

    /// The first two bars of Figure 16: 176 threads on 8 compute servers, Zipf 0.99, locks in main memory or on the chip.
    pub fn figure_16(profile: Profile, region: RegionId) -> Self {
        Self { compute_servers: 8, region, release: Release::Write, ..Self::figure_2(profile, 0.99) }
    }
}

/// What came out.
#[derive(Clone, PartialEq, Debug)]
pub struct LockFigures {
    /// Locks taken and given back.
    pub acquisitions: u64,
    /// Of these, per second.
    pub per_second: f64,
    /// The median, from the first CAS to the end of the release.
    pub p50_ns: Nanos,
    /// What one in a hundred exceeds.
    pub p99_ns: Nanos,
    /// CASes per lock taken.
    pub cas_per_acquisition: f64,
    /// How busy the hardware was.
    pub usage: Usage,
    /// The same for the same seed.
    pub trace_hash: u64,
}

/// Why there are no figures.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum LockFailure {
    /// The server did not start.
    Start(StartError),
    /// The world came to a stop.
    Stuck(SimStop),
    /// A verb or call failed, though nothing was to fail.
    Fabric(FabricError),
}

impl fmt::Display for LockFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Start(error) => error.fmt(f),
            Self::Stuck(stop) => stop.fmt(f),
            Self::Fabric(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for LockFailure {}

impl From<FabricError> for LockFailure {
    fn from(error: FabricError) -> Self {
        Self::Fabric(error)
    }
}

/// Draws ranks, 0 the most popular, by an exact table of the distribution.
#[derive(Clone, Debug)]
pub struct Zipf {
    /// The share of all ranks up to this one.
    cumulated: Vec<f64>,
}

impl Zipf {
    /// Over `ranks` ranks, of which rank `r` has a weight of `1 / (r + 1)^exponent`.
    pub fn new(ranks: u64, exponent: f64) -> Self {
        let mut sum = 0.0;
        let mut cumulate = |rank: u64| {
            sum += ((rank + 1) as f64).powf(-exponent);
            sum
        };
        let mut cumulated: Vec<f64> = (0..ranks).map(&mut cumulate).collect();
        for share in &mut cumulated {
            *share /= sum;
        }
        Self { cumulated }
    }

    /// The rank that a random word stands for.
    pub fn rank(&self, random: u64) -> u64 {
        let share = (random >> 11) as f64 / (1u64 << 53) as f64;
        let rank = self.cumulated.partition_point(|cumulated| *cumulated <= share);
        rank.min(self.cumulated.len().saturating_sub(1)) as u64
    }
}

/// What the threads of a run share.
#[derive(Default)]
struct Tally {
    latencies: Vec<Nanos>,
    cas: u64,
}

/// A run under way.
struct Run {
    setting: LockSetting,
    base: GlobalAddr,
    zipf: Zipf,
    span: Range<Nanos>,
    tally: RefCell<Tally>,
}

/// Runs the experiment.
pub fn run(setting: &LockSetting) -> Result<LockFigures, LockFailure> {
    let bytes = ServerConfig::new(PoolId(2), ServerId::new(0), 1, 64 << 20);
    let config = ServerConfig { lease_ns: 0, ..bytes };
    let server = MemoryServer::new(config, ProcedureSet::default()).map_err(LockFailure::Start)?;
    let config = SimConfig::priced(setting.seed, setting.profile.clone());
    let sim = Sim::new(config, FaultPlan::default(), vec![Arc::new(server) as Arc<dyn ServerLogic>])
        .map_err(LockFailure::Start)?;
    let (world, wanted) = (sim.clone(), setting.clone());
    let (tally, usage) =
        sim.run(async move { measure(&world, wanted).await }).map_err(LockFailure::Stuck)??;
    let mut latencies = tally.latencies;
    latencies.sort_unstable();
    let at = |share: usize| latencies.get(latencies.len() * share / 100).copied().unwrap_or(Nanos::MAX);
    Ok(LockFigures {
        acquisitions: latencies.len() as u64,
        per_second: latencies.len() as f64 * SECOND as f64 / setting.measured_ns as f64,
        p50_ns: at(50),
        p99_ns: at(99),
        cas_per_acquisition: tally.cas as f64 / latencies.len().max(1) as f64,
        usage,
        trace_hash: sim.report().trace_hash,
    })
}

async fn measure(world: &Sim, setting: LockSetting) -> Result<(Tally, Usage), FabricError> {
    let cluster = world.cluster();
    let base = place(&cluster, &setting).await?;
    let begins = world.now() + setting.warm_up_ns;
    let span = begins..begins + setting.measured_ns;
    let zipf = Zipf::new(setting.locks, setting.zipf);
    let run = Rc::new(Run { setting, base, zipf, span, tally: RefCell::default() });
    let servers: Vec<_> = (0..run.setting.compute_servers)
        .map(|_| {
            let (cluster, run) = (cluster.clone(), Rc::clone(&run));
            world.spawn_client(async move { compute_server(&cluster, &run).await })
        })
        .collect();
    world.sleep(run.setting.warm_up_ns).await;
    let before = world.usage();
    world.sleep(run.setting.measured_ns).await;
    let usage = world.usage().since(&before);
    for server in servers {
        server.await.unwrap_or(Ok(()))?;
    }
    let tally = std::mem::take(&mut *run.tally.borrow_mut());
    Ok((tally, usage))
}

/// Where the locks are: in a chunk of main memory, or from the start of lock memory.
async fn place(cluster: &Cluster, setting: &LockSetting) -> Result<GlobalAddr, FabricError> {
    let server = ServerId::new(0);
    if setting.region == RegionId::LOCK {
        return Ok(GlobalAddr::new(server, RegionId::LOCK, 0));
    }
    let session = Session::open(cluster, SessionOptions::default()).await?;
    let endpoint = session.endpoint()?;
    let index = session.create_index(&endpoint.op(), "locks", "none", &[]).await?.id;
    let request = Request::AllocChunks { index, class: 0, object_bytes: 0, count: 1, flushed_through: 0 };
    match endpoint.op().control(server, &request).await? {
        Reply::Chunks { offset, .. } => Ok(GlobalAddr::new(server, RegionId::MAIN, offset)),
        _ => Err(FabricError::Call(CallError::Malformed)),
    }
}

async fn compute_server(cluster: &Cluster, run: &Rc<Run>) -> Result<(), FabricError> {
    let session = Session::open(cluster, SessionOptions::default()).await?;
    let mut threads = Vec::new();
    for _ in 0..run.setting.threads {
        let (endpoint, run) = (session.endpoint()?, Rc::clone(run));
        let thread = endpoint.clone();
        threads.push(endpoint.spawn(async move { spin(&thread, &run).await }));
    }
    for thread in threads {
        thread.await.unwrap_or(Ok(()))?;
    }
    Ok(())
}

/// One thread: takes locks and gives them back until the run ends.
async fn spin(endpoint: &Endpoint, run: &Run) -> Result<(), FabricError> {
    let op = endpoint.op();
    while endpoint.now() < run.span.end {
        let lock = run.base.add(8 * run.zipf.rank(endpoint.random()));
        let began = endpoint.now();
        let mut cas = 1;
        while op.cas(lock, 0, 1).await? != 0 {
            cas += 1;
            if endpoint.now() >= run.span.end {
                return Ok(());
            }
        }
        match run.setting.release {
            Release::Faa => {
                op.faa(lock, u64::MAX).await?;
            }
            Release::Write => op.write_word(lock, 0).await?,
        }
        let ended = endpoint.now();
        if run.span.contains(&ended) {
            let mut tally = run.tally.borrow_mut();
            tally.latencies.push(ended - began);
            tally.cas += cas;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_follow_the_distribution() {
        for exponent in [0.0, 0.5, 0.99] {
            let (ranks, draws) = (100u32, 400_000u32);
            let zipf = Zipf::new(u64::from(ranks), exponent);
            let mut seen = vec![0u32; 100];
            let mut rng = fastrand::Rng::with_seed(7);
            for _ in 0..draws {
                seen[usize::try_from(zipf.rank(rng.u64(..))).unwrap()] += 1;
            }
            let all: f64 = (1..=ranks).map(|rank| f64::from(rank).powf(-exponent)).sum();
            for rank in [0u32, 1, 10, 99] {
                let expected = f64::from(draws) * f64::from(rank + 1).powf(-exponent) / all;
                let off = (f64::from(seen[rank as usize]) - expected).abs() / expected.sqrt();
                assert!(off < 5.0, "exponent {exponent}, rank {rank}: {} of {expected}", seen[rank as usize]);
            }
        }
    }
}
