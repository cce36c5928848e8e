//! One trial: workers fill an index, and some die; leaks are injected; a repairer comes, may die, and another one ends
//! it, while somebody tries to use the index; then everything is looked at, and used again.

use farwood_fabric::clock::{MICROSECOND, MILLISECOND, Nanos};
use farwood_fabric::control::{ControlError, MAIN_BASE, ObjectChunk, Reply, Request};
use farwood_fabric::procedure::ProcedureSet;
use farwood_fabric::region::PoolId;
use farwood_fabric::server::ServerLogic;
use farwood_fabric::transport::sim::{FaultPlan, Sim, SimConfig};
use farwood_fabric::{Endpoint, GlobalAddr, RegionId, ServerId, marks};
use farwood_index::pool::JoinOptions;
use farwood_index::repair::{self, Mode};
use farwood_index::{Engine, IndexError, OrderedIndex, Pool};
use farwood_memory::{MemoryServer, ServerConfig};
use farwood_sim::check::leaks;
use farwood_sim::trial::join_options;
use fastrand::Rng;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

pub(crate) const INDEX: &str = "repaired";
const SERVERS: u16 = 2;
const CHUNK_BYTES: u64 = 4096;
const LEASE_NS: Nanos = MILLISECOND;
const BEAT_NS: Nanos = 100 * MICROSECOND;
const STAY_NS: Nanos = 15 * MILLISECOND;
/// How often somebody who is refused tries again.
const MAX_TRIES: u32 = 400;
/// Numbers of the simulator's clients.
const WORKERS: u32 = 2;
const FIRST_REPAIRER: u32 = WORKERS;
/// Classes that no engine has.
const STRANGE_CLASS: u16 = 900;

/// What a trial does.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) seed: u64,
    pub(crate) faults: String,
    /// Enough keys for inner nodes and hash tables that grow.
    pub(crate) is_large: bool,
    /// How many bits are set for nothing.
    pub(crate) bits: u32,
    /// Raw bytes, and a chunk of objects of a class that the engine does not have.
    pub(crate) has_strange_chunks: bool,
    /// Somebody comes to use the index at this time.
    pub(crate) intruder: Option<Nanos>,
    /// When the repair begins.
    pub(crate) wait_ns: Nanos,
}

impl Plan {
    pub(crate) fn draw(seed: u64, rng: &mut Rng) -> Self {
        let mut faults = Vec::new();
        for worker in 0..WORKERS {
            if rng.u8(..3) == 0 {
                faults.push(format!("kill:c{worker}@v{}", rng.u32(20..900)));
            }
        }
        if rng.bool() {
            faults.push(format!("kill:c{FIRST_REPAIRER}@v{}", rng.u32(1..400)));
        }
        if rng.u8(..4) == 0 {
            faults.push(format!("lose:c{FIRST_REPAIRER}@v{}+3000", rng.u32(1..300)));
        }
        Self {
            seed,
            faults: faults.join(" "),
            is_large: rng.bool(),
            bits: rng.u32(5..40),
            has_strange_chunks: rng.bool(),
            intruder: rng.bool().then(|| rng.u64(0..3 * MILLISECOND)),
            wait_ns: if rng.bool() { 0 } else { rng.u64(0..MILLISECOND) },
        }
    }

    fn keys(&self) -> u64 {
        if self.is_large { 60 } else { 6 }
    }
}

/// What came of it.
#[derive(Clone, Default, Debug)]
pub(crate) struct Outcome {
    pub(crate) injected: u64,
    pub(crate) freed: u64,
    pub(crate) extents: u64,
    pub(crate) keys: u64,
    pub(crate) workers_killed: u64,
    pub(crate) repairers_killed: u64,
    /// How often somebody was refused while the index was out of use.
    pub(crate) kept_out: u64,
    /// How often a repair was refused while somebody was there.
    pub(crate) refused: u64,
}

pub(crate) type Tried<T> = Result<T, String>;

pub(crate) fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// What a key may hold: what was acknowledged last, or what was tried since.
type Model = BTreeMap<Vec<u8>, Vec<Option<Vec<u8>>>>;

pub(crate) fn new_world(seed: u64, faults: &str) -> Sim {
    let server = |n| {
        let config = ServerConfig {
            pool: PoolId(u128::from(seed) + 1),
            chunk_bytes: CHUNK_BYTES,
            memory_bytes: 512 * CHUNK_BYTES,
            lock_bytes: 4096,
            max_sessions: 16,
            lease_ns: LEASE_NS,
            ..ServerConfig::tiny(ServerId::new(n), SERVERS, 512)
        };
        Arc::new(MemoryServer::new(config, ProcedureSet::default()).expect("valid")) as Arc<dyn ServerLogic>
    };
    let faults: FaultPlan = faults.parse().expect("a plan");
    let mut config = SimConfig::adversarial(seed);
    config.max_events = 20_000_000;
    Sim::new(config, faults, (0..SERVERS).map(server).collect()).expect("it starts")
}

pub(crate) async fn join<E: Engine>(sim: &Sim, engine: &E) -> Tried<(Pool, Endpoint)> {
    let options: JoinOptions = join_options(engine);
    let pool = Pool::join_with(&sim.cluster(), options).await.map_err(text)?;
    let endpoint = pool.session().endpoint().map_err(text)?;
    pool.keep_alive(&endpoint, BEAT_NS);
    Ok((pool, endpoint))
}

pub(crate) async fn open<E: Engine>(
    engine: &E,
    pool: &Pool,
    endpoint: &Endpoint,
) -> Result<E::Index, IndexError> {
    let attached = engine.attach(pool, endpoint, INDEX).await?;
    engine.open(&attached, endpoint, 0)
}

fn key(number: u64) -> Vec<u8> {
    number.to_be_bytes().to_vec()
}

pub(crate) fn value<E: Engine>(engine: &E, rng: &mut Rng) -> Vec<u8> {
    let mut value = vec![0; rng.usize(engine.value_bytes())];
    rng.fill(&mut value);
    value
}

/// Puts and deletes of a worker's own keys, written down before they are tried and after.
async fn work<E: Engine>(
    engine: &E,
    index: &E::Index,
    (keys, ops, seed): (std::ops::Range<u64>, u64, u64),
    model: &RefCell<Model>,
) -> Result<(), IndexError> {
    let mut rng = Rng::with_seed(seed);
    for n in 0..ops {
        // First all keys, then any.
        let number = if n < keys.end - keys.start { keys.start + n } else { rng.u64(keys.clone()) };
        let is_delete = n >= keys.end - keys.start && rng.u8(..3) == 0;
        let new = (!is_delete).then(|| value(engine, &mut rng));
        model.borrow_mut().entry(key(number)).or_insert_with(|| vec![None]).push(new.clone());
        match &new {
            Some(value) => index.put(&key(number), value).await?,
            None => drop(index.delete(&key(number)).await?),
        }
        model.borrow_mut().insert(key(number), vec![new]);
    }
    Ok(())
}

/// Everything that the index holds is what it may hold.
async fn verify<I: OrderedIndex>(index: &I, model: &RefCell<Model>) -> Tried<u64> {
    let model = model.borrow().clone();
    let mut held = BTreeMap::new();
    for (key, may) in &model {
        let value = index.get(key).await.map_err(|error| format!("get of {key:x?}: {error}"))?;
        if !may.contains(&value) {
            return Err(format!("key {key:x?} holds {value:x?}, of {may:x?}"));
        }
        held.extend(value.map(|value| (key.clone(), value)));
    }
    let all = (std::ops::Bound::Unbounded, std::ops::Bound::Unbounded);
    let pairs = index.scan(all.0, all.1, usize::MAX, false).await.map_err(text)?;
    if pairs.into_iter().collect::<BTreeMap<_, _>>() != held {
        return Err("a scan and the gets do not agree".to_owned());
    }
    Ok(model.len() as u64)
}

/// Sets bits for nothing; which objects' they are.
pub(crate) async fn inject(
    pool: &Pool,
    endpoint: &Endpoint,
    (bits, strange): (u32, bool),
    rng: &mut Rng,
) -> Tried<Vec<GlobalAddr>> {
    let op = endpoint.op();
    let index = pool.open_index(&op, INDEX, None).await.map_err(text)?.id;
    if strange {
        for object_bytes in [0, 0, 64] {
            let class = STRANGE_CLASS + u16::try_from(object_bytes).unwrap_or(0);
            let server = ServerId::new(rng.u16(..SERVERS));
            let request = Request::AllocChunks { index, class, object_bytes, count: 1, flushed_through: 0 };
            op.control(server, &request).await.map_err(text)?;
        }
    }
    let mut chunks = Vec::new();
    for server in pool.session().servers() {
        let listed = op.control(*server, &Request::ListChunks { owner: None }).await.map_err(text)?;
        let Reply::ChunkList { chunks: listed, .. } = listed else { return Err("no list".to_owned()) };
        chunks
            .extend(listed.into_iter().filter(|chunk| chunk.object_bytes > 0).map(|chunk| (*server, chunk)));
    }
    let mut injected = Vec::new();
    while injected.len() < bits as usize {
        let (server, chunk) = &chunks[rng.usize(..chunks.len())];
        let layout = ObjectChunk::new(CHUNK_BYTES, chunk.object_bytes).ok_or("no layout")?;
        let object = rng.u32(..layout.objects);
        assert!(chunk.offset >= MAIN_BASE);
        let at = GlobalAddr::new(*server, RegionId::MAIN, chunk.offset);
        let word = at.add(ObjectChunk::BITMAP_OFFSET + u64::from(object / 64) * 8);
        let seen = op.read_word(word).await.map_err(text)?;
        if seen >> (object % 64) & 1 == 1 {
            // Full chunks are passed by in time: new ones are as many as old ones.
            chunks.extend((rng.u8(..50) == 0).then(|| chunks[0].clone()));
            if rng.u8(..200) == 0 {
                break;
            }
            continue;
        }
        if op.cas(word, seen, seen | 1 << (object % 64)).await.map_err(text)? == seen {
            injected.push(at.add(layout.object_offset(object)));
        }
    }
    Ok(injected)
}

/// Repairs until nobody is in the way; what was freed.
async fn repair_in_the_end<E: Engine>(
    sim: Sim,
    engine: E,
    wait_ns: Nanos,
    outcome: Rc<RefCell<Outcome>>,
) -> Tried<()> {
    sim.sleep(wait_ns).await;
    let mut last = String::new();
    for _ in 0..MAX_TRIES {
        let (pool, endpoint) = join(&sim, &engine).await?;
        let repaired = repair::repair(&pool, &endpoint, &engine, INDEX, Mode::Free, &mut |_| ()).await;
        pool.leave(&endpoint).await.map_err(text)?;
        match repaired {
            Ok(findings) => {
                let leaks = findings.leaks.ok_or("a repair knows what is leaked")?;
                let mut outcome = outcome.borrow_mut();
                outcome.freed += leaks.total().objects;
                outcome.extents += leaks.extents.objects;
                return Ok(());
            }
            Err(error) if is_refused(&error) => {
                outcome.borrow_mut().refused += 1;
                last = text(error);
            }
            // A slow server cost it its lease.
            Err(error) if error.is_unknown() => last = text(error),
            Err(error) => return Err(format!("the repair failed: {error}")),
        }
        sim.sleep(LEASE_NS / 4).await;
    }
    Err(format!("no repair came about: {last}"))
}

/// Whether others were in the pool, or dead and not recovered in time.
fn is_refused(error: &IndexError) -> bool {
    match error {
        IndexError::Fabric(error) => {
            matches!(error.control(), Some(ControlError::IndexInUse { .. }))
        }
        IndexError::Unrecovered { .. } => true,
        _ => false,
    }
}

/// Comes in the middle, and uses the index as soon as it is let.
async fn intrude<E: Engine>(
    sim: Sim,
    engine: E,
    (wait_ns, keys): (Nanos, std::ops::Range<u64>),
    model: Rc<RefCell<Model>>,
    outcome: Rc<RefCell<Outcome>>,
) -> Tried<()> {
    sim.sleep(wait_ns).await;
    for _ in 0..MAX_TRIES {
        let (pool, endpoint) = join(&sim, &engine).await?;
        let opened = open(&engine, &pool, &endpoint).await;
        let worked = match opened {
            Ok(index) => work(&engine, &index, (keys.clone(), 2 * (keys.end - keys.start), 1), &model).await,
            Err(error) => Err(error),
        };
        if wait_ns % 2 == 0 {
            // Long enough to be met by whoever repairs.
            sim.sleep(STAY_NS).await;
        }
        let left = pool.leave(&endpoint).await.map(drop).map_err(text);
        match worked {
            Ok(()) => return left,
            Err(IndexError::Fabric(error))
                if matches!(error.control(), Some(ControlError::IndexOffline { .. })) =>
            {
                outcome.borrow_mut().kept_out += 1;
            }
            Err(error) if error.is_unknown() => {}
            Err(error) => return Err(format!("the intruder: {error}")),
        }
        sim.sleep(LEASE_NS / 8).await;
    }
    Err("the intruder was never let in".to_owned())
}

/// Runs a trial. The repairers' engine may have a mistake.
pub(crate) fn run<E: Engine>(engine: &E, repairers: &E, plan: &Plan) -> Tried<Outcome> {
    marks::reset();
    let sim = new_world(plan.seed, &plan.faults);
    let main = drive(sim.clone(), (engine.clone(), repairers.clone()), plan.clone());
    sim.run(main).map_err(text)?
}

async fn drive<E: Engine>(sim: Sim, (engine, repairers): (E, E), plan: Plan) -> Tried<Outcome> {
    let outcome = Rc::new(RefCell::new(Outcome::default()));
    let model = Rc::new(RefCell::new(Model::default()));
    let mut rng = Rng::with_seed(plan.seed ^ 0x5eed);
    let (pool, endpoint) = join(&sim, &engine).await?;
    engine.create(&pool, &endpoint, INDEX).await.map_err(text)?;
    // Workers, with keys of their own.
    let workers: Vec<_> = (0..u64::from(WORKERS))
        .map(|worker| {
            let (sim2, engine, model) = (sim.clone(), engine.clone(), Rc::clone(&model));
            let keys = worker * 1000..worker * 1000 + plan.keys();
            let work_of = (keys, plan.keys() * 3, plan.seed << 8 | worker);
            sim.spawn_client(async move {
                let (pool, endpoint) = join(&sim2, &engine).await?;
                let index = open(&engine, &pool, &endpoint).await.map_err(text)?;
                match work(&engine, &index, work_of, &model).await {
                    Err(error) if !error.is_unknown() => return Err(text(error)),
                    _ => {}
                }
                drop(index);
                pool.leave(&endpoint).await.map(drop).map_err(text)
            })
        })
        .collect();
    for (number, worker) in (0..).zip(workers) {
        // An error here is a process that was killed.
        match worker.await {
            Ok(ended) => ended?,
            Err(_) => outcome.borrow_mut().workers_killed += 1,
        }
        sim.end_client(number);
    }
    let injected = inject(&pool, &endpoint, (plan.bits, plan.has_strange_chunks), &mut rng).await?;
    outcome.borrow_mut().injected = injected.len() as u64;
    pool.leave(&endpoint).await.map_err(text)?;
    // The repairs: the first may be killed, the second ends it.
    let first = sim.spawn_client(repair_in_the_end(
        sim.clone(),
        repairers.clone(),
        plan.wait_ns,
        Rc::clone(&outcome),
    ));
    let intruder = plan.intruder.map(|wait_ns| {
        let keys = 5000..5000 + plan.keys();
        let (model, outcome) = (Rc::clone(&model), Rc::clone(&outcome));
        sim.spawn_client(intrude(sim.clone(), engine.clone(), (wait_ns, keys), model, outcome))
    });
    match first.await {
        Ok(ended) => ended?,
        Err(_) => outcome.borrow_mut().repairers_killed += 1,
    }
    sim.end_client(FIRST_REPAIRER);
    let second = sim.spawn_client(repair_in_the_end(sim.clone(), repairers, 0, Rc::clone(&outcome)));
    second.await.map_err(|_| "the second repairer died")??;
    if let Some(intruder) = intruder {
        intruder.await.map_err(|_| "the intruder died")??;
    }
    let keys = look(&sim, &engine, &plan, &injected, &model).await?;
    let mut outcome = outcome.borrow().clone();
    outcome.keys = keys;
    Ok(outcome)
}

/// What is there at the end: all values, no leak, none of what was injected; and it stays so when memory is used again.
async fn look<E: Engine>(
    sim: &Sim,
    engine: &E,
    plan: &Plan,
    injected: &[GlobalAddr],
    model: &RefCell<Model>,
) -> Tried<u64> {
    let (pool, endpoint) = join(sim, engine).await?;
    let again =
        repair::repair(&pool, &endpoint, engine, INDEX, Mode::Free, &mut |_| ()).await.map_err(text)?;
    if !again.leaks.as_ref().is_some_and(repair::Leaks::is_empty) {
        return Err(format!("another repair found {again:?}"));
    }
    let attached = engine.attach(&pool, &endpoint, INDEX).await.map_err(text)?;
    let linked = engine.check(&attached, &endpoint).await.map_err(text)?;
    let is_linked = |addr: &&GlobalAddr| linked.iter().any(|(_, other)| other == *addr);
    // An intruder may have got some of them since.
    if let (None, Some(addr)) = (plan.intruder, injected.iter().find(is_linked)) {
        return Err(format!("what was injected at {addr} is linked"));
    }
    pool.heap().close(&endpoint).await.map_err(text)?;
    let usage = leaks::measure(pool.session(), &endpoint, &linked).await.map_err(text)?;
    if !usage.leaked.is_empty() || !usage.dangling.is_empty() {
        return Err(format!("after the repair: {usage}"));
    }
    let index = engine.open(&attached, &endpoint, 1).map_err(text)?;
    let keys = verify(&index, model).await?;
    // Freed objects are used again, and nothing that was there is among them.
    let more = 9000..9000 + plan.keys();
    work(engine, &index, (more, 4 * plan.keys(), plan.seed), model).await.map_err(text)?;
    verify(&index, model).await?;
    let linked = engine.check(&attached, &endpoint).await.map_err(text)?;
    pool.heap().close(&endpoint).await.map_err(text)?;
    let usage = leaks::measure(pool.session(), &endpoint, &linked).await.map_err(text)?;
    if !usage.leaked.is_empty() || !usage.dangling.is_empty() {
        return Err(format!("after it was used again: {usage}"));
    }
    Ok(keys)
}
