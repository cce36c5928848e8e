//! Where `probe` and `litmus` run: turns the text of `--transport` into something that runs clients.
//!
//! On a real transport a client is a thread with an executor of its own; in a simulated world it is a process of that
//! world, and time is virtual. The body of a client is the same code in both.

mod neighbours;
mod restarts;
mod transport;

pub(crate) use neighbours::{Neighbours, Plan};
pub(crate) use transport::{Shape, Transport, TransportArguments, World};

use crate::interrupt;
use farwood_fabric::clock::{MICROSECOND, Nanos};
use farwood_fabric::pages::available_bytes;
use farwood_fabric::procedure::ProcedureSet;
use farwood_fabric::region::PoolId;
use farwood_fabric::server::ServerLogic;
use farwood_fabric::transport::local::LocalCluster;
use farwood_fabric::transport::sim::{FaultPlan, Sim, SimConfig};
use farwood_fabric::{Cluster, Endpoint, Executor, Label, ServerId, Session, SessionOptions};
use farwood_index::{IndexError, Pool};
use farwood_memory::{MemoryServer, ServerConfig};
use neighbours::Over;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// How often a lease is renewed while it runs.
const HEARTBEATS_PER_LEASE: u64 = 4;
/// How long a client waits for the others before it looks again.
const GATE_NS: Nanos = 20 * MICROSECOND;
/// More clients than this no machine here has threads for.
pub(crate) const MAX_CLIENTS: u32 = 256;

/// Memory servers, and a way to run clients of theirs.
#[derive(Debug)]
pub(crate) struct Fleet {
    place: Place,
    /// Servers that were started for it. After the way to them, so that it is gone when they end.
    _neighbours: Option<Neighbours>,
}

#[derive(Debug)]
enum Place {
    Real(Cluster),
    Sim { sim: Sim, idle_round_trip_ns: f64 },
}

impl Fleet {
    /// Starts or finds the servers. Where it is up to us how much memory they have, it is `arena_bytes` altogether; `more_bytes`
    /// is what the caller will need in this process besides.
    pub(crate) fn open(
        transport: &Transport,
        arena_bytes: u64,
        more_bytes: u64,
        seed: u64,
    ) -> Result<Self, String> {
        let place = match transport {
            Transport::Local(shape) => {
                let logics = servers(shape_or_default(*shape, arena_bytes, more_bytes)?)?;
                let started = LocalCluster::start(logics).map_err(|error| format!("--transport: {error}"))?;
                Place::Real(started)
            }
            Transport::Sim { shape, world } => {
                simulated(servers(shape_or_default(*shape, arena_bytes, more_bytes)?)?, world, seed)?
            }
            Transport::Shm(shape) | Transport::Tcp(shape) => {
                let over = if matches!(transport, Transport::Shm(_)) { Over::Shm } else { Over::Tcp };
                let shape = shape_or_default(*shape, arena_bytes, more_bytes)?;
                let (neighbours, cluster) =
                    Neighbours::start(over, shape).map_err(|why| format!("--transport: {why}"))?;
                return Ok(Self { place: Place::Real(cluster), _neighbours: Some(neighbours) });
            }
            Transport::At { url, access } => {
                Place::Real(Cluster::open(url, access).map_err(|error| format!("--transport: {error}"))?)
            }
        };
        Ok(Self { place, _neighbours: None })
    }

    /// Whether time is the simulator's.
    pub(crate) fn is_virtual(&self) -> bool {
        matches!(self.place, Place::Sim { .. })
    }

    /// How clients of a command open their sessions. In a simulated world they have no label: what depends on the machine would
    /// change what calls cost.
    pub(crate) fn options(&self, command: &str) -> SessionOptions {
        match self.place {
            Place::Real(_) => {
                SessionOptions { label: Label::of_process(command), ..SessionOptions::default() }
            }
            Place::Sim { .. } => SessionOptions::default(),
        }
    }

    /// What a round trip takes in the simulated world when nothing else happens.
    pub(crate) fn idle_round_trip_ns(&self) -> Option<f64> {
        match self.place {
            Place::Sim { idle_round_trip_ns, .. } => Some(idle_round_trip_ns),
            Place::Real(_) => None,
        }
    }

    pub(crate) fn cluster(&self) -> Cluster {
        match &self.place {
            Place::Real(cluster) => cluster.clone(),
            Place::Sim { sim, .. } => sim.cluster(),
        }
    }

    /// Runs `clients` clients at once; what became of each, in order.
    pub(crate) fn run<T, F>(
        &self,
        clients: u32,
        body: impl Fn(u32, Cluster) -> F + Sync,
    ) -> Vec<Result<T, String>>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, String>> + 'static,
    {
        match &self.place {
            Place::Real(cluster) => on_threads(clients, |index| {
                let executor = Executor::new();
                let result = executor.block_on(body(index, cluster.clone()));
                executor.clear();
                result
            }),
            Place::Sim { sim, .. } => {
                let tasks: Vec<_> =
                    (0..clients).map(|index| sim.spawn_client(body(index, sim.cluster()))).collect();
                let ended = sim.run(async move {
                    let mut results = Vec::new();
                    for task in tasks {
                        results.push(task.await.unwrap_or_else(|killed| Err(killed.to_string())));
                    }
                    results
                });
                ended.unwrap_or_else(|stop| vec![Err(format!("the simulated world stopped: {stop}"))])
            }
        }
    }

    /// Runs compute servers with several threads each, all at once; what became of each thread, in order. In a simulated
    /// world a compute server is a process and its threads are tasks.
    pub(crate) fn run_compute<T, F>(
        &self,
        (compute, threads): (u32, u32),
        body: impl Fn(u32, u32, Cluster) -> F + Sync,
    ) -> Vec<Result<T, String>>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, String>> + 'static,
    {
        match &self.place {
            Place::Real(_) => {
                self.run(compute * threads, |n, cluster| body(n / threads, n % threads, cluster))
            }
            Place::Sim { .. } => {
                let processes = self.run(compute, |n, cluster| {
                    let bodies: Vec<F> = (0..threads).map(|t| body(n, t, cluster.clone())).collect();
                    async move {
                        let executor = Executor::current().ok_or("no executor")?;
                        let tasks: Vec<_> = bodies.into_iter().map(|body| executor.spawn(body)).collect();
                        let mut results = Vec::new();
                        for task in tasks {
                            results.push(task.await.unwrap_or_else(|killed| Err(killed.to_string())));
                        }
                        Ok(results)
                    }
                });
                let of_process = |process: Result<Vec<Result<T, String>>, String>| match process {
                    Ok(threads) => threads,
                    Err(why) => vec![Err(why)],
                };
                processes.into_iter().flat_map(of_process).collect()
            }
        }
    }

    /// Runs one client.
    pub(crate) fn run_one<T, F>(&self, body: impl Fn(Cluster) -> F + Sync) -> Result<T, String>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, String>> + 'static,
    {
        all(self.run(1, |_, cluster| body(cluster)))?.pop().ok_or_else(|| "the client did not run".to_owned())
    }
}

/// What all clients brought, or the first failure.
pub(crate) fn all<T>(results: Vec<Result<T, String>>) -> Result<Vec<T>, String> {
    // Whoever only stopped because another failed is not the one to quote.
    let failure =
        results.iter().filter_map(|result| result.as_ref().err()).min_by_key(|why| *why == ANOTHER_FAILED);
    match failure {
        Some(why) => Err(why.clone()),
        None => Ok(results.into_iter().flatten().collect()),
    }
}

/// One thread for each client, all at once; results in order. A panic is that client's failure.
pub(crate) fn on_threads<T: Send>(
    clients: u32,
    body: impl Fn(u32) -> Result<T, String> + Sync,
) -> Vec<Result<T, String>> {
    let body = &body;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..clients).map(|index| scope.spawn(move || body(index))).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, _>| thread.join();
        threads.into_iter().map(|t| join(t).unwrap_or_else(|_| Err("a client panicked".to_owned()))).collect()
    })
}

/// The servers that the user shaped, or one with room for `arena_bytes`; if the machine has that much.
fn shape_or_default(shape: Option<Shape>, arena_bytes: u64, more_bytes: u64) -> Result<Shape, String> {
    let chunk = config(0, Shape { servers: 1, bytes: 1 }).chunk_bytes;
    let whole = || arena_bytes.checked_next_multiple_of(chunk).unwrap_or(u64::MAX);
    let shape = shape.unwrap_or_else(|| Shape { servers: 1, bytes: whole() });
    let all = shape.bytes.checked_mul(u64::from(shape.servers));
    let needed = all.and_then(|bytes| bytes.checked_add(more_bytes));
    let available = available_bytes();
    if needed.is_none_or(|needed| needed > available) {
        let needed =
            needed.map_or("more than can be counted".to_owned(), |bytes| format!("{} MiB", bytes >> 20));
        return Err(format!("{needed} of memory needed, {} MiB available; ask for less", available >> 20));
    }
    Ok(shape)
}

fn config(server: u16, Shape { servers, bytes }: Shape) -> ServerConfig {
    ServerConfig::new(PoolId(1), ServerId::new(server), servers, bytes)
}

/// The logic of fresh memory servers.
fn servers(shape: Shape) -> Result<Vec<Arc<dyn ServerLogic>>, String> {
    let start = |n| {
        let server = MemoryServer::new(config(n, shape), ProcedureSet::default());
        server
            .map(|server| Arc::new(server) as Arc<dyn ServerLogic>)
            .map_err(|error| format!("--transport: {error}"))
    };
    (0..shape.servers).map(start).collect()
}

fn simulated(logics: Vec<Arc<dyn ServerLogic>>, world: &World, seed: u64) -> Result<Place, String> {
    let config = match world {
        World::Adversary => SimConfig::adversarial(seed),
        World::Priced(profile, placement) => SimConfig::priced(seed, (**profile).clone()).placed(*placement),
    };
    let idle_round_trip_ns = match world {
        // Two ways, each between the least and the usual most.
        World::Adversary => config.latency.min_ns + config.latency.max_ns,
        World::Priced(profile, _) => profile.round_trip_ns,
    } as f64;
    // Whoever uses the world bounds the work.
    let config = SimConfig { max_events: u64::MAX, max_virtual_ns: u64::MAX, ..config };
    let sim =
        Sim::new(config, FaultPlan::default(), logics).map_err(|error| format!("--transport: {error}"))?;
    Ok(Place::Sim { sim, idle_round_trip_ns })
}

/// Opens a session for one client, keeps it alive while `body` runs, and closes it, also after a failure.
pub(crate) async fn with_session<T>(
    cluster: &Cluster,
    options: SessionOptions,
    body: impl AsyncFnOnce(&Endpoint) -> Result<T, String>,
) -> Result<T, String> {
    let session = Session::open(cluster, options).await.map_err(|error| error.to_string())?;
    let endpoint = session.endpoint().map_err(|error| error.to_string())?;
    if session.lease_ns() > 0 {
        session.keep_alive(&endpoint, session.lease_ns() / HEARTBEATS_PER_LEASE);
    }
    let result = body(&endpoint).await;
    let closed = session.close(&endpoint).await.map_err(|error| error.to_string());
    let value = result?;
    closed.map(|()| value)
}

/// Joins the pool, does something, and leaves it, also after a failure.
pub(crate) async fn with_pool<T>(
    cluster: &Cluster,
    options: SessionOptions,
    body: impl AsyncFnOnce(&Pool, &Endpoint) -> Result<T, IndexError>,
) -> Result<T, IndexError> {
    let (pool, endpoint) = Pool::join(cluster, options).await?.with_endpoint().await?;
    let result = body(&pool, &endpoint).await;
    let left = pool.leave(&endpoint).await;
    let value = result?;
    left?;
    Ok(value)
}

const ANOTHER_FAILED: &str = "another client failed";

/// What clients that work together know of each other: who is there, who is done, whether one failed.
#[derive(Debug)]
pub(crate) struct Meeting {
    expected: u32,
    came: AtomicU32,
    done: AtomicU32,
    failed: AtomicBool,
}

impl Meeting {
    pub(crate) fn of(expected: u32) -> Arc<Self> {
        let (came, done, failed) = (AtomicU32::new(0), AtomicU32::new(0), AtomicBool::new(false));
        Arc::new(Self { expected, came, done, failed })
    }

    /// Runs a client's body. If it ends in any other way than by success, the others are told.
    pub(crate) async fn attend<T>(
        &self,
        body: impl AsyncFnOnce(&Self) -> Result<T, String>,
    ) -> Result<T, String> {
        let mut absence = Absence { meeting: self, excused: false };
        let result = body(self).await;
        absence.excused = result.is_ok();
        result
    }

    /// Waits until everybody has come, for the `nth` time (from 1).
    pub(crate) async fn gather(&self, endpoint: &Endpoint, nth: u32) -> Result<(), String> {
        self.check()?;
        self.came.fetch_add(1, Ordering::SeqCst);
        while self.came.load(Ordering::SeqCst) < self.expected * nth {
            self.check()?;
            endpoint.sleep(GATE_NS).await;
        }
        Ok(())
    }

    /// Fails if another client has, or all are to end.
    pub(crate) fn check(&self) -> Result<(), String> {
        if interrupt::came() {
            return Err(interrupt::SAID.to_owned());
        }
        if self.failed.load(Ordering::SeqCst) { Err(ANOTHER_FAILED.to_owned()) } else { Ok(()) }
    }

    /// Lets the others fail at their next look.
    pub(crate) fn call_off(&self) {
        self.failed.store(true, Ordering::SeqCst);
    }

    /// How many have done what they came for.
    pub(crate) fn done(&self) -> u32 {
        self.done.load(Ordering::SeqCst)
    }

    /// Says that this client is done.
    pub(crate) fn finish(&self) {
        self.done.fetch_add(1, Ordering::SeqCst);
    }
}

/// Tells the others when a client goes away in the middle of things.
struct Absence<'a> {
    meeting: &'a Meeting,
    excused: bool,
}

impl Drop for Absence<'_> {
    fn drop(&mut self) {
        if !self.excused {
            self.meeting.call_off();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fleets() -> [Fleet; 2] {
        ["local", "sim"].map(|text| Fleet::open(&text.parse().unwrap(), 1, 0, 7).unwrap())
    }

    #[test]
    fn results_come_in_the_order_of_clients() {
        for fleet in fleets() {
            let results = fleet.run(3, |index, cluster| async move {
                with_session(&cluster, SessionOptions::default(), async |endpoint| {
                    endpoint.sleep(u64::from(3 - index) * MICROSECOND).await;
                    Ok(index)
                })
                .await
            });
            assert_eq!(all(results), Ok(vec![0, 1, 2]));
        }
    }

    #[test]
    fn who_waits_for_a_client_that_failed_is_told_and_the_cause_is_quoted() {
        for fleet in fleets() {
            let meeting = Meeting::of(2);
            let results: Vec<Result<(), String>> = fleet.run(2, |index, cluster| {
                let meeting = Arc::clone(&meeting);
                async move {
                    with_session(&cluster, SessionOptions::default(), async |endpoint| {
                        let body = async |meeting: &Meeting| {
                            if index == 1 {
                                Err("no luck".to_owned())
                            } else {
                                meeting.gather(endpoint, 1).await
                            }
                        };
                        meeting.attend(body).await
                    })
                    .await
                }
            });
            assert_eq!(all(results), Err("no luck".to_owned()));
        }
    }
}
