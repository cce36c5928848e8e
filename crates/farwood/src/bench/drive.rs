//! A run, phase by phase, the same code on threads and in a simulated world.
//!
//! 1. The index is created.
//! 2. Each compute server joins the pool with a session that its threads share, and attaches to the index. Each thread opens an
//!    endpoint and starts its tasks.
//! 3. All tasks load the keys, each its share; or the first one all of them, if the engine has a bulk load. All wait for each other.
//! 4. Each compute server fills its caches, if the engine knows how. All tasks warm up; all wait; then they are measured, and all wait once more.
//! 5. Memory is counted, sessions leave, and the index is dropped.

use super::Plan;
use super::checked::Checked;
use super::join::Joint;
use super::tally::{Tally, TallyText};
use super::task::{Meter, Task, Until, Watch};
use super::verify::Model;
use crate::fleet::{Fleet, Meeting, all, with_pool, with_session};
use farwood_fabric::clock::{MICROSECOND, Nanos, RealClock, SECOND};
use farwood_fabric::control::{Reply, Request};
use farwood_fabric::{CallError, Cluster, Endpoint, FabricError, SessionOptions};
use farwood_index::{Engine, IndexError, Pool};
use farwood_workload::{Mix, OperationKind, Start, Stream, StreamOptions, ValueId};
use indicatif::{ProgressBar, ProgressStyle};
use serde::{Deserialize, Serialize};
use std::sync::{Arc, Mutex, PoisonError};

/// What the index of a run is called.
const INDEX: &str = "farwood-bench";
/// How often a lease is renewed while it runs.
const HEARTBEATS_PER_LEASE: u64 = 4;
/// How often all wait for each other in a run.
const PHASES: u32 = 5;
/// How long a thread waits for its compute server before it looks again.
const LOOK_EVERY_NS: Nanos = 20 * MICROSECOND;
/// How long the first thread waits, after a failure, for the others to end before it leaves the pool.
const END_NS: Nanos = 5 * SECOND;

/// What came out of a run.
#[derive(Debug)]
pub(super) struct Measured {
    pub(super) tally: Tally,
    pub(super) cache_bytes: u64,
    pub(super) memory_bytes: u64,
    /// How many answers were checked, and how many of them left only one thing to be true.
    pub(super) checked: Option<(u64, u64)>,
}

/// The same, as it travels between processes.
#[derive(Serialize, Deserialize, Debug)]
pub(super) struct MeasuredText {
    tally: TallyText,
    cache_bytes: u64,
}

impl Measured {
    pub(super) fn export(&self) -> MeasuredText {
        MeasuredText { tally: self.tally.export(), cache_bytes: self.cache_bytes }
    }

    /// Memory is counted once, by the first process.
    pub(super) fn import(&mut self, text: &MeasuredText) {
        self.tally.import(&text.tally);
        self.cache_bytes += text.cache_bytes;
    }
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
    options: SessionOptions,
    members: Vec<Member<E::Attached>>,
    meeting: Arc<Meeting>,
    /// What every answer is checked against.
    model: Option<Arc<Model>>,
    loading: ProgressBar,
    running: ProgressBar,
}

pub(super) fn drive<E: Engine>(engine: &E, plan: &Plan, fleet: &Fleet) -> Result<Measured, String> {
    if plan.joint.is_none_or(|joint| joint.is_first()) {
        create(engine, fleet)?;
    }
    let measured = run(engine, plan, fleet);
    if plan.joint.is_some_and(|joint| !joint.is_first()) {
        return measured;
    }
    let dropped = drop_index(fleet);
    let measured = measured?;
    dropped.map(|()| measured)
}

fn create<E: Engine>(engine: &E, fleet: &Fleet) -> Result<(), String> {
    let (creator, options) = (engine.clone(), fleet.options("bench"));
    fleet.run_one(|cluster| {
        let engine = creator.clone();
        async move {
            let created = with_pool(&cluster, options, async |pool, endpoint| {
                engine.create(pool, endpoint, INDEX).await.map(drop)
            });
            created.await.map_err(|error| format!("cannot create the index: {error}"))
        }
    })
}

fn drop_index(fleet: &Fleet) -> Result<(), String> {
    let options = fleet.options("bench");
    fleet.run_one(|cluster| async move {
        let dropped = with_pool(&cluster, options, async |pool, endpoint| {
            if pool.list_indexes(&endpoint.op()).await?.iter().any(|info| info.name == INDEX) {
                pool.drop_index(endpoint, INDEX).await?;
            }
            Ok(())
        });
        dropped.await.map_err(|error| format!("cannot drop the index: {error}"))
    })
}

fn run<E: Engine>(engine: &E, plan: &Plan, fleet: &Fleet) -> Result<Measured, String> {
    let run = Arc::new(Run {
        engine: engine.clone(),
        plan: plan.clone(),
        watch: if fleet.is_virtual() { Watch::Virtual } else { Watch::Real(RealClock::new()) },
        options: fleet.options("bench"),
        members: (0..plan.compute).map(|_| Member::<E::Attached>::default()).collect(),
        meeting: Meeting::of(plan.compute * plan.threads),
        model: plan.verify.then(|| Arc::new(model(plan))),
        loading: plan.bar(engine.name(), "load", if plan.loads() { plan.keys } else { 0 }),
        running: plan.bar(engine.name(), "run", plan.ops.unwrap_or(0)),
    });
    let waiting = Arc::clone(&run);
    fleet.run_one(|cluster| {
        let run = Arc::clone(&waiting);
        async move { run.meet_others(&cluster).await.map_err(Trouble::into_text) }
    })?;
    let results = fleet.run_compute((plan.compute, plan.threads), |compute, thread, cluster| {
        let run = Arc::clone(&run);
        async move {
            let body = async |meeting: &Meeting| {
                run.thread(compute, thread, &cluster, meeting).await.map_err(Trouble::into_text)
            };
            run.meeting.attend(body).await
        }
    });
    run.loading.finish_and_clear();
    run.running.finish_and_clear();
    let checked = run.model.as_ref().map(|model| model.counters().sum());
    let mut measured = Measured { tally: Tally::new(), cache_bytes: 0, memory_bytes: 0, checked };
    for result in all(results)? {
        measured.tally.merge(&result.tally);
        measured.cache_bytes += result.cache_bytes;
        measured.memory_bytes += result.memory_bytes;
    }
    match plan.joint {
        Some(joint) => together(joint, measured, fleet),
        None => Ok(measured),
    }
}

/// Brings the results of all processes to the first one.
fn together(joint: Joint, measured: Measured, fleet: &Fleet) -> Result<Measured, String> {
    let measured = Arc::new(Mutex::new(Some(measured)));
    let (shared, options) = (Arc::clone(&measured), fleet.options("bench"));
    fleet.run_one(move |cluster| {
        let measured = Arc::clone(&shared);
        async move {
            let take = || measured.lock().unwrap_or_else(PoisonError::into_inner).take();
            let mut measured = take().ok_or("a result is delivered once")?;
            with_session(&cluster, options, async |endpoint| {
                if !joint.is_first() {
                    joint.deliver(endpoint, &measured).await?;
                }
                joint.barrier(endpoint, PHASES + 2).await?;
                if joint.is_first() {
                    joint.collect(endpoint, &mut measured).await?;
                }
                // Nobody's memory goes before it was read.
                joint.barrier(endpoint, PHASES + 3).await?;
                Ok(())
            })
            .await?;
            Ok(measured)
        }
    })
}

/// A model of the index as it is loaded. Where nothing scans, it need not hold the keys that nobody writes.
fn model(plan: &Plan) -> Model {
    let scans = |mix: &Mix| {
        mix.shares().iter().any(|share| matches!(share.kind(), OperationKind::Scan | OperationKind::Iterate))
    };
    if plan.workload.roles().iter().any(scans) {
        return Model::new();
    }
    let (keys, values, loaded) = (plan.key_set(), plan.values, if plan.loads() { plan.keys } else { 0 });
    Model::with_initial(Box::new(move |key| {
        let index = keys.index_of(key).filter(|index| *index < loaded)?;
        Some(values.value(ValueId { index, version: 0 }, &mut Vec::new()).to_vec())
    }))
}

/// Why a thread has no result.
enum Trouble {
    Index(IndexError),
    Said(String),
}

impl Trouble {
    fn into_text(self) -> String {
        match self {
            Self::Index(error) => error.to_string(),
            Self::Said(why) => why,
        }
    }
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

/// The phases of a run: nobody begins the next before all have ended this one, in other processes too.
struct Phases<'a> {
    meeting: &'a Meeting,
    /// The other processes, for the one thread that speaks to them.
    joint: Option<Joint>,
    nth: u32,
}

impl Phases<'_> {
    async fn next(&mut self, endpoint: &Endpoint) -> Result<(), String> {
        self.meeting.gather(endpoint, 2 * self.nth + 1).await?;
        if let Some(joint) = &self.joint {
            // The first time was before the index was opened.
            joint.barrier(endpoint, self.nth + 2).await?;
        }
        self.meeting.gather(endpoint, 2 * self.nth + 2).await?;
        self.nth += 1;
        Ok(())
    }
}

impl<E: Engine> Run<E> {
    /// Waits until the first process has created the index.
    async fn meet_others(&self, cluster: &Cluster) -> Result<(), Trouble> {
        if let Some(joint) = &self.plan.joint {
            with_session(cluster, self.options, async |endpoint| joint.barrier(endpoint, 1).await).await?;
        }
        Ok(())
    }

    /// One thread of one compute server.
    async fn thread(
        self: &Arc<Self>,
        compute: u32,
        thread: u32,
        cluster: &Cluster,
        meeting: &Meeting,
    ) -> Result<ThreadResult, Trouble> {
        let (pool, attached, endpoint) = self.join(compute, thread, cluster, meeting).await?;
        let worked = self.work(&pool, attached, &endpoint, (compute, thread), meeting).await;
        meeting.finish();
        if thread > 0 {
            return worked;
        }
        if worked.is_err() {
            // The others of this compute server use the same session.
            meeting.call_off();
            let give_up = endpoint.now().saturating_add(END_NS);
            while meeting.done() < self.plan.compute * self.plan.threads && endpoint.now() < give_up {
                endpoint.sleep(LOOK_EVERY_NS).await;
            }
        }
        let left = pool.leave(&endpoint).await;
        let result = worked?;
        left?;
        Ok(result)
    }

    /// What a thread does between joining the pool and leaving it.
    async fn work(
        self: &Arc<Self>,
        pool: &Pool,
        attached: E::Attached,
        endpoint: &Endpoint,
        (compute, thread): (u32, u32),
        meeting: &Meeting,
    ) -> Result<ThreadResult, Trouble> {
        let is_first = compute == 0 && thread == 0;
        let mut phases = Phases { meeting, joint: self.plan.joint.filter(|_| is_first), nth: 0 };
        let tasks = (0..self.plan.tasks).map(|task| self.task(&attached, endpoint, (compute, thread, task)));
        let mut tasks = tasks.collect::<Result<Vec<_>, Trouble>>()?;
        if self.plan.loads() {
            tasks = self.each(endpoint, tasks, Self::load, (compute, thread)).await?;
        }
        phases.next(endpoint).await?;
        if thread == 0 && self.plan.loads() {
            let index = self.engine.open(&attached, endpoint, 0)?;
            self.engine.warm_up(&index).await?;
        }
        phases.next(endpoint).await?;
        let warm_up = self.plan.until(0.1, self.watch.now(endpoint));
        tasks = self
            .each(endpoint, tasks, move |run, task, _| run.measure(task, warm_up, false), (compute, thread))
            .await?;
        phases.next(endpoint).await?;
        let until = self.plan.until(1.0, self.watch.now(endpoint));
        tasks = self
            .each(endpoint, tasks, move |run, task, _| run.measure(task, until, true), (compute, thread))
            .await?;
        let mut tally = Tally::new();
        for task in tasks {
            tally.merge(&task.into_tally());
        }
        phases.next(endpoint).await?;
        let cache_bytes = if thread == 0 { self.engine.cache_bytes(&attached) } else { 0 };
        let memory_bytes = if is_first && self.plan.is_first() {
            self.memory_bytes(pool, &attached, endpoint).await?
        } else {
            0
        };
        phases.next(endpoint).await?;
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
            let pool = Pool::join(cluster, self.options).await?;
            let endpoint = pool.session().endpoint()?;
            let lease_ns = pool.session().lease_ns();
            if lease_ns > 0 {
                pool.keep_alive(&endpoint, lease_ns / HEARTBEATS_PER_LEASE);
            }
            let attached = match self.engine.attach(&pool, &endpoint, INDEX).await {
                Ok(attached) => attached,
                Err(error) => {
                    // The first failure is the one to report.
                    let _ = pool.leave(&endpoint).await;
                    return Err(error.into());
                }
            };
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

    /// The number of a task among all, those of other processes included.
    fn client(&self, (compute, thread, task): (u32, u32, u32)) -> u64 {
        let here = u64::from((compute * self.plan.threads + thread) * self.plan.tasks + task);
        let process = self.plan.joint.map_or(0, |joint| joint.number);
        u64::from(process) * self.plan.clients() + here
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
            clients: plan.all_clients(),
            ..StreamOptions::new(plan.keys)
        };
        let stream = Stream::new(&plan.workload, &options).map_err(|error| error.to_string())?;
        let meter = Meter::new(&endpoint, self.watch, plan.tasks == 1, self.engine.work());
        let index = Checked::new(index, self.model.clone());
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
        let mut ended = Vec::new();
        for task in spawned {
            ended.push(task.await.unwrap_or_else(|killed| Err(Trouble::Said(killed.to_string()))));
        }
        // Not at the first failure: whoever leaves the pool has to know that all have ended.
        ended.into_iter().collect()
    }

    async fn load(self: Arc<Self>, mut task: Task<E::Index>, client: u64) -> Result<Task<E::Index>, Trouble> {
        if self.engine.has_bulk_load() {
            if client == 0 {
                task.bulk_load(&self.engine, self.plan.keys, |loaded| self.loading.inc(loaded)).await?;
            }
            return Ok(task);
        }
        let step = usize::try_from(self.plan.all_clients()).unwrap_or(usize::MAX);
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
    /// A progress bar on a terminal, and nothing elsewhere.
    fn bar(&self, engine: &str, phase: &'static str, steps: u64) -> ProgressBar {
        if !self.shows_progress {
            return ProgressBar::hidden();
        }
        let bar = ProgressBar::new(steps);
        let style = ProgressStyle::with_template(
            "{prefix:>12} {msg:<5} [{bar:40}] {percent:>3}% {per_sec}, {eta} left",
        );
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.set_prefix(engine.to_owned());
        bar.set_message(phase);
        bar
    }

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
        let ops = self.ops.map_or(u64::MAX, |ops| scaled(ops as f64).div_ceil(self.all_clients()));
        let at = self.seconds.map_or(Nanos::MAX, |seconds| now.saturating_add(scaled(seconds * 1e9)));
        Until { ops, at }
    }
}
