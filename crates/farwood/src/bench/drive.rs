//! A run, phase by phase, the same code on threads and in a simulated world.
//!
//! 1. The index is created.
//! 2. Each compute server joins the pool with a session that its threads share, and attaches to the index. Each thread opens an
//!    endpoint and starts its tasks.
//! 3. All tasks load the keys, each its share; all wait for each other.
//! 4. All tasks warm up; all wait; then they are measured, and all wait once more.
//! 5. Memory is counted, sessions leave, and the index is dropped.

use super::Plan;
use super::tally::Tally;
use super::task::{Meter, Task, Until, Watch};
use crate::fleet::{Fleet, Meeting, all};
use farwood_fabric::clock::{MICROSECOND, Nanos, RealClock};
use farwood_fabric::control::{Reply, Request};
use farwood_fabric::{CallError, Cluster, Endpoint, FabricError, SessionOptions};
use farwood_index::{Engine, IndexError, Pool};
use farwood_workload::{Start, Stream, StreamOptions};
use indicatif::{ProgressBar, ProgressStyle};
use std::sync::{Arc, Mutex, PoisonError};

/// What the index of a run is called.
const INDEX: &str = "farwood-bench";
/// How often a lease is renewed while it runs.
const HEARTBEATS_PER_LEASE: u64 = 4;
/// How long a thread waits for its compute server before it looks again.
const LOOK_EVERY_NS: Nanos = 20 * MICROSECOND;

/// What came out of a run.
#[derive(Debug)]
pub(super) struct Measured {
    pub(super) tally: Tally,
    pub(super) cache_bytes: u64,
    pub(super) memory_bytes: u64,
}

/// What one thread brings home.
struct ThreadResult {
    tally: Tally,
    cache_bytes: u64,
    memory_bytes: u64,
}

/// What the threads of one compute server share.
type Member<A> = Arc<Mutex<Option<(Pool, A)>>>;

/// What all threads of a run know.
struct Run<E: Engine> {
    engine: E,
    plan: Plan,
    watch: Watch,
    members: Vec<Member<E::Attached>>,
    meeting: Arc<Meeting>,
    loading: ProgressBar,
    running: ProgressBar,
}

pub(super) fn drive<E: Engine>(engine: &E, plan: &Plan, fleet: &Fleet) -> Result<Measured, String> {
    let creator = engine.clone();
    fleet.run_one(|cluster| {
        let engine = creator.clone();
        async move {
            let created = async {
                let pool = Pool::join(&cluster, SessionOptions::default()).await?;
                let endpoint = pool.session().endpoint()?;
                engine.create(&pool, &endpoint, INDEX).await?;
                pool.leave(&endpoint).await?;
                Ok::<_, IndexError>(())
            };
            created.await.map_err(|error| format!("cannot create the index: {error}"))
        }
    })?;
    let measured = run(engine, plan, fleet);
    let dropped = fleet.run_one(|cluster| async move {
        let dropped = async {
            let pool = Pool::join(&cluster, SessionOptions::default()).await?;
            let endpoint = pool.session().endpoint()?;
            if pool.list_indexes(&endpoint.op()).await?.iter().any(|info| info.name == INDEX) {
                pool.drop_index(&endpoint, INDEX).await?;
            }
            pool.leave(&endpoint).await
        };
        dropped.await.map(drop).map_err(|error| format!("cannot drop the index: {error}"))
    });
    let measured = measured?;
    dropped.map(|()| measured)
}

fn run<E: Engine>(engine: &E, plan: &Plan, fleet: &Fleet) -> Result<Measured, String> {
    let run = Arc::new(Run {
        engine: engine.clone(),
        plan: plan.clone(),
        watch: if fleet.is_virtual() { Watch::Virtual } else { Watch::Real(RealClock::new()) },
        members: (0..plan.compute).map(|_| Member::<E::Attached>::default()).collect(),
        meeting: Meeting::of(plan.compute * plan.threads),
        loading: bar(engine.name(), "load", if plan.loads() { plan.keys } else { 0 }),
        running: bar(engine.name(), "run", plan.ops.unwrap_or(0)),
    });
    let results = fleet.run_compute((plan.compute, plan.threads), |compute, thread, cluster| {
        let run = Arc::clone(&run);
        async move {
            let body = async |meeting: &Meeting| {
                run.thread(compute, thread, &cluster, meeting).await.map_err(|error| match error {
                    Trouble::Index(error) => error.to_string(),
                    Trouble::Said(why) => why,
                })
            };
            run.meeting.attend(body).await
        }
    });
    run.loading.finish_and_clear();
    run.running.finish_and_clear();
    let mut measured = Measured { tally: Tally::new(), cache_bytes: 0, memory_bytes: 0 };
    for result in all(results)? {
        measured.tally.merge(&result.tally);
        measured.cache_bytes += result.cache_bytes;
        measured.memory_bytes += result.memory_bytes;
    }
    Ok(measured)
}

/// A progress bar on a terminal, and nothing elsewhere.
fn bar(engine: &str, phase: &'static str, steps: u64) -> ProgressBar {
    let bar = ProgressBar::new(steps);
    let style =
        ProgressStyle::with_template("{prefix:>12} {msg:<5} [{bar:40}] {percent:>3}% {per_sec}, {eta} left");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.set_prefix(engine.to_owned());
    bar.set_message(phase);
    bar
}

/// Why a thread has no result.
enum Trouble {
    Index(IndexError),
    Said(String),
}

impl From<IndexError> for Trouble {
    fn from(error: IndexError) -> Self {
        Self::Index(error)
    }
}

impl From<FabricError> for Trouble {
    fn from(error: FabricError) -> Self {
        Self::Index(error.into())
    }
}

impl From<String> for Trouble {
    fn from(why: String) -> Self {
        Self::Said(why)
    }
}

impl<E: Engine> Run<E> {
    /// One thread of one compute server.
    async fn thread(
        self: &Arc<Self>,
        compute: u32,
        thread: u32,
        cluster: &Cluster,
        meeting: &Meeting,
    ) -> Result<ThreadResult, Trouble> {
        let (pool, attached, endpoint) = self.join(compute, thread, cluster, meeting).await?;
        let tasks = (0..self.plan.tasks).map(|task| self.task(&attached, &endpoint, (compute, thread, task)));
        let mut tasks = tasks.collect::<Result<Vec<_>, Trouble>>()?;
        if self.plan.loads() {
            tasks = self.each(&endpoint, tasks, Self::load, (compute, thread)).await?;
        }
        meeting.gather(&endpoint, 1).await?;
        let warm_up = self.plan.until(0.1, self.watch.now(&endpoint));
        tasks = self
            .each(&endpoint, tasks, move |run, task, _| run.measure(task, warm_up, false), (compute, thread))
            .await?;
        meeting.gather(&endpoint, 2).await?;
        let until = self.plan.until(1.0, self.watch.now(&endpoint));
        tasks = self
            .each(&endpoint, tasks, move |run, task, _| run.measure(task, until, true), (compute, thread))
            .await?;
        let mut tally = Tally::new();
        for task in tasks {
            tally.merge(&task.into_tally());
        }
        meeting.gather(&endpoint, 3).await?;
        let first = thread == 0;
        let cache_bytes = if first { self.engine.cache_bytes(&attached) } else { 0 };
        let memory_bytes =
            if first && compute == 0 { self.memory_bytes(&pool, &attached, &endpoint).await? } else { 0 };
        meeting.gather(&endpoint, 4).await?;
        if first {
            drop(attached);
            pool.leave(&endpoint).await?;
        }
        Ok(ThreadResult { tally, cache_bytes, memory_bytes })
    }

    /// Joins the pool with the first thread of a compute server; the others wait for that.
    async fn join(
        &self,
        compute: u32,
        thread: u32,
        cluster: &Cluster,
        meeting: &Meeting,
    ) -> Result<(Pool, E::Attached, Endpoint), Trouble> {
        let member = &self.members[compute as usize];
        if thread == 0 {
            let pool = Pool::join(cluster, SessionOptions::default()).await?;
            let endpoint = pool.session().endpoint()?;
            let lease_ns = pool.session().lease_ns();
            if lease_ns > 0 {
                pool.session().keep_alive(&endpoint, lease_ns / HEARTBEATS_PER_LEASE);
            }
            let attached = self.engine.attach(&pool, &endpoint, INDEX).await?;
            let shared = (pool.clone(), attached.clone());
            *member.lock().unwrap_or_else(PoisonError::into_inner) = Some(shared);
            return Ok((pool, attached, endpoint));
        }
        let executor = farwood_fabric::Executor::current().ok_or(FabricError::NoExecutor)?;
        loop {
            let joined = member.lock().unwrap_or_else(PoisonError::into_inner).clone();
            if let Some((pool, attached)) = joined {
                let endpoint = pool.session().endpoint()?;
                return Ok((pool, attached, endpoint));
            }
            meeting.check()?;
            executor.sleep_until(executor.now() + LOOK_EVERY_NS).await;
        }
    }

    /// The number of a task among all.
    fn client(&self, (compute, thread, task): (u32, u32, u32)) -> u64 {
        u64::from((compute * self.plan.threads + thread) * self.plan.tasks + task)
    }

    fn task(
        &self,
        attached: &E::Attached,
        endpoint: &Endpoint,
        number: (u32, u32, u32),
    ) -> Result<Task<E::Index>, Trouble> {
        let plan = &self.plan;
        let endpoint = endpoint.metered();
        let handle = number.1 * plan.tasks + number.2;
        let index = self.engine.open(attached, &endpoint, u16::try_from(handle).unwrap_or(u16::MAX))?;
        let options = StreamOptions {
            chooser: plan.chooser,
            seed: plan.seed,
            client: self.client(number),
            clients: plan.clients(),
            ..StreamOptions::new(plan.keys)
        };
        let stream = Stream::new(&plan.workload, &options).map_err(|error| error.to_string())?;
        let meter = Meter::new(&endpoint, self.watch, plan.tasks == 1);
        Ok(Task::new(index, stream, plan.key_set(), plan.values, meter))
    }

    /// Lets all tasks of a thread do something at the same time.
    async fn each<F>(
        self: &Arc<Self>,
        endpoint: &Endpoint,
        tasks: Vec<Task<E::Index>>,
        work: impl Fn(Arc<Self>, Task<E::Index>, u64) -> F,
        (compute, thread): (u32, u32),
    ) -> Result<Vec<Task<E::Index>>, Trouble>
    where
        F: Future<Output = Result<Task<E::Index>, Trouble>> + 'static,
    {
        let numbered = (0..).zip(tasks);
        let spawned: Vec<_> = numbered
            .map(|(n, task)| endpoint.spawn(work(Arc::clone(self), task, self.client((compute, thread, n)))))
            .collect();
        let mut tasks = Vec::new();
        for task in spawned {
            tasks.push(task.await.unwrap_or_else(|killed| Err(Trouble::Said(killed.to_string())))?);
        }
        Ok(tasks)
    }

    async fn load(self: Arc<Self>, mut task: Task<E::Index>, client: u64) -> Result<Task<E::Index>, Trouble> {
        let step = usize::try_from(self.plan.clients()).unwrap_or(usize::MAX);
        task.load((client..self.plan.keys).step_by(step), |loaded| self.loading.inc(loaded)).await?;
        Ok(task)
    }

    async fn measure(
        self: Arc<Self>,
        mut task: Task<E::Index>,
        until: Until,
        counts: bool,
    ) -> Result<Task<E::Index>, Trouble> {
        task.meter.restart();
        task.run(until, |done| {
            if counts {
                self.running.inc(done);
            }
        })
        .await;
        Ok(task)
    }

    /// The bytes of far memory that the index has, or its own.
    async fn memory_bytes(
        &self,
        pool: &Pool,
        attached: &E::Attached,
        endpoint: &Endpoint,
    ) -> Result<u64, FabricError> {
        if let Some(bytes) = self.engine.own_memory_bytes(attached) {
            return Ok(bytes);
        }
        let op = endpoint.op();
        let indexes = pool.list_indexes(&op).await?;
        let Some(ours) = indexes.iter().find(|info| info.name == INDEX) else { return Ok(0) };
        let mut bytes = 0;
        for server in &pool.session().cluster().view().servers {
            let Reply::ChunkList { chunks, .. } =
                op.control(server.server, &Request::ListChunks { owner: None }).await?
            else {
                return Err(CallError::Malformed.into());
            };
            let of_index = chunks.iter().filter(|chunk| chunk.index == ours.id);
            bytes += of_index.map(|chunk| u64::from(chunk.count) * server.chunk_bytes).sum::<u64>();
        }
        Ok(bytes)
    }
}

impl Plan {
    /// Whether keys are stored before the run.
    pub(super) fn loads(&self) -> bool {
        self.workload.start() == Start::Loaded
    }

    /// When each task stops, for a part of the whole run that begins at `now`.
    fn until(&self, part: f64, now: Nanos) -> Until {
        // A workload that starts from nothing has nothing to warm up with.
        let part = if part < 1.0 && !self.loads() { 0.0 } else { part };
        let scaled = |whole: f64| {
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it saturates")]
            let whole = (whole * part).ceil() as u64;
            whole
        };
        let ops = self.ops.map_or(u64::MAX, |ops| scaled(ops as f64).div_ceil(self.clients()));
        let at = self.seconds.map_or(Nanos::MAX, |seconds| now.saturating_add(scaled(seconds * 1e9)));
        Until { ops, at }
    }
}
