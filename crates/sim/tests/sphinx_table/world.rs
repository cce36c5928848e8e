//! A world whose clients work on one hash table: nodes are small objects that hold their hash, entries lead to them.

use crate::model::{Kind, Model};
use farwood_fabric::clock::{MICROSECOND, MILLISECOND, Nanos};
use farwood_fabric::control::IndexId;
use farwood_fabric::procedure::ProcedureSet;
use farwood_fabric::region::PoolId;
use farwood_fabric::server::ServerLogic;
use farwood_fabric::transport::sim::{Fault, Sim, SimConfig};
use farwood_fabric::{Cluster, Endpoint, GlobalAddr, Op, RegionId, ServerId, SessionOptions, marks};
use farwood_index::engine::PLAIN;
use farwood_index::engine::sphinx::table::{Census, Config, Nodes, Sabotage, Slot, Table};
use farwood_index::shared::heap::Class;
use farwood_index::shared::surely;
use farwood_index::{IndexError, Pool};
use farwood_memory::{MemoryServer, ServerConfig};
use farwood_sim::check::leaks;
use farwood_sim::trial::Trial;
use fastrand::Rng;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

const LEASE_NS: Nanos = MILLISECOND;
const HEARTBEAT_NS: Nanos = 100 * MICROSECOND;
const MAX_LIVES: u32 = 5;
const SUBTABLES: u16 = 0;
const NODES: u16 = 1;
const NODE_BYTES: u32 = 64;
/// Entries are a node's place, and a number above it, so that no two are the same.
const TAG_SHIFT: u32 = 40;

/// What is tried.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Setting {
    pub(crate) sabotage: Sabotage,
    /// The entry is inserted before its node is written.
    pub(crate) publish_before_node: bool,
}

/// What came of it.
#[derive(Clone, Debug)]
pub(crate) struct Report {
    pub(crate) looks: u64,
    pub(crate) changes: u64,
    pub(crate) census: Census,
    pub(crate) trace_hash: u64,
    pub(crate) marks: BTreeMap<&'static str, u64>,
}

#[derive(Clone)]
struct World {
    trial: Trial,
    setting: Setting,
    model: Model,
    index: Rc<Cell<IndexId>>,
    root: Rc<Cell<GlobalAddr>>,
    next_tag: Rc<Cell<u64>>,
    /// Sessions that ended before their time.
    deaths: Rc<Cell<u64>>,
}

/// One client's view.
#[derive(Clone)]
struct Client {
    world: World,
    pool: Pool,
    table: Table,
}

fn hash_of_key(key: usize) -> u64 {
    let mut x = (key as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ x >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93);
    x ^ x >> 32
}

fn server(trial: &Trial) -> ServerId {
    ServerId::new(trial.servers - 1)
}

impl Nodes for Client {
    async fn hashes_of(&self, op: &Op, entries: &[u64]) -> Result<Vec<Option<u64>>, IndexError> {
        let mut hashes = Vec::new();
        for entry in entries {
            let hash = surely::read_word(op, self.node_at(*entry)).await?;
            hashes.push((hash != 0).then_some(hash));
        }
        Ok(hashes)
    }
}

impl Client {
    async fn open(world: &World, cluster: &Cluster) -> Result<(Self, Endpoint), IndexError> {
        let pool = Pool::join(cluster, SessionOptions::default()).await?;
        let keeper = pool.session().endpoint()?;
        pool.keep_alive(&keeper, HEARTBEAT_NS);
        let config = config(world);
        let table = Table::attach(&pool, (world.index.get(), SUBTABLES), world.root.get(), config)?;
        Ok((Self { world: world.clone(), pool, table }, keeper))
    }

    fn term(&self) -> u64 {
        self.pool.session().term()
    }

    fn class(&self) -> Class {
        Class { index: self.world.index.get(), class: NODES, object_bytes: NODE_BYTES }
    }

    fn node_at(&self, entry: u64) -> GlobalAddr {
        let offset = (entry & ((1 << TAG_SHIFT) - 1)) * 8;
        GlobalAddr::new(server(&self.world.trial), RegionId::MAIN, offset)
    }

    /// A node that is not written yet, and its entry.
    async fn allocate(&self, op: &Op) -> Result<u64, IndexError> {
        let addr = self.pool.heap().allocate(op, server(&self.world.trial), self.class()).await?;
        let tag = self.world.next_tag.replace(self.world.next_tag.get() + 1);
        Ok((tag << TAG_SHIFT) | (addr.offset() / 8))
    }

    async fn write_node(&self, op: &Op, entry: u64, hash: u64) -> Result<(), IndexError> {
        Ok(surely::write_word(op, self.node_at(entry), hash).await?)
    }

    /// Does something with a key. An error ends the session's life.
    async fn step(&self, endpoint: &Endpoint, rng: &mut Rng) -> Result<(), IndexError> {
        let model = &self.world.model;
        let key = rng.usize(0..self.world.model.keys());
        let op = endpoint.op();
        let kind = rng.u8(0..100);
        if kind < 45 {
            return self.look(&op, key).await;
        }
        if let Some((turn, entry)) = model.join(key, self.term()) {
            self.table.insert(&op, self, hash_of_key(key), entry).await?;
            turn.done();
            return Ok(());
        }
        let state = model.key(key);
        match state.present {
            _ if !state.maybe.is_empty() => self.settle(&op, key).await,
            None => self.insert(&op, key).await,
            Some(old) if kind < 75 => self.replace(&op, key, old).await,
            Some(old) if kind < 97 => self.remove(&op, key, old).await,
            Some(old) => self.abandon(&op, key, old).await,
        }
    }

    /// As the tree does it: what is found counts if its node says so; if none does, the directory may have been behind.
    async fn look(&self, op: &Op, key: usize) -> Result<(), IndexError> {
        let (model, hash) = (&self.world.model, hash_of_key(key));
        let look = model.begin_look(key);
        let matches = |entry| model.is_of(key, entry);
        let found = self.table.look_up(op, hash, matches).await?;
        let mut current = self.current(op, hash, &found).await?;
        if current.is_empty() && !found.is_empty() {
            marks::hit("candidates_refuted");
            let found = self.table.look_up_surely(op, hash, matches).await?;
            current = self.current(op, hash, &found).await?;
        }
        model.end_look(&look, &current);
        Ok(())
    }

    /// The entries whose nodes are alive.
    async fn current(&self, op: &Op, hash: u64, found: &[Slot]) -> Result<Vec<u64>, IndexError> {
        let mut current = Vec::new();
        for slot in found {
            if surely::read_word(op, self.node_at(slot.entry)).await? == hash {
                current.push(slot.entry);
            }
        }
        Ok(current)
    }

    async fn insert(&self, op: &Op, key: usize) -> Result<(), IndexError> {
        let hash = hash_of_key(key);
        let entry = self.allocate(op).await?;
        if !self.world.setting.publish_before_node {
            self.write_node(op, entry, hash).await?;
        }
        let turn = self.world.model.begin((key, self.term()), Kind::Insert, None, Some(entry));
        let Some(turn) = turn else {
            self.pool.heap().free_unpublished(self.class(), self.node_at(entry));
            return Ok(());
        };
        self.table.insert(op, self, hash, entry).await?;
        if self.world.setting.publish_before_node {
            self.write_node(op, entry, hash).await?;
        }
        turn.done();
        Ok(())
    }

    async fn replace(&self, op: &Op, key: usize, old: u64) -> Result<(), IndexError> {
        let (model, hash) = (&self.world.model, hash_of_key(key));
        let new = self.allocate(op).await?;
        self.write_node(op, new, hash).await?;
        let turn = model.begin((key, self.term()), Kind::Replace, Some(old), Some(new));
        let Some(turn) = turn else {
            self.pool.heap().free_unpublished(self.class(), self.node_at(new));
            return Ok(());
        };
        let found = self.table.look_up(op, hash, |entry| entry == old).await?;
        let Some(slot) = found.first() else {
            model.fail(format!("key {key}: {old:#x} is not there to be replaced"));
            return Ok(());
        };
        if !self.table.replace(op, self, hash, *slot, new).await? {
            model.fail(format!("key {key}: {old:#x} went before it was replaced"));
        }
        turn.done();
        self.pool.heap().retire(op, self.class(), self.node_at(old)).await?;
        Ok(())
    }

    async fn remove(&self, op: &Op, key: usize, old: u64) -> Result<(), IndexError> {
        let model = &self.world.model;
        let turn = model.begin((key, self.term()), Kind::Remove, Some(old), None);
        let Some(turn) = turn else { return Ok(()) };
        if !self.table.remove(op, self, hash_of_key(key), old).await? {
            model.fail(format!("key {key}: {old:#x} was not there to be removed"));
        }
        turn.done();
        self.pool.heap().retire(op, self.class(), self.node_at(old)).await?;
        Ok(())
    }

    /// The node says that it is none any more. (It is not freed: its entry may lead to it for ever.)
    async fn abandon(&self, op: &Op, key: usize, old: u64) -> Result<(), IndexError> {
        let model = &self.world.model;
        let turn = model.begin((key, self.term()), Kind::Abandon, Some(old), None);
        let Some(turn) = turn else { return Ok(()) };
        marks::hit("node_abandoned");
        self.write_node(op, old, 0).await?;
        turn.done();
        Ok(())
    }

    /// Somebody died in the middle of a change of this key, or left an entry: one stays, the others go.
    async fn settle(&self, op: &Op, key: usize) -> Result<(), IndexError> {
        let (model, hash) = (&self.world.model, hash_of_key(key));
        let session = self.pool.session();
        let held = model.key(key).present;
        let Some(turn) = model.begin((key, self.term()), Kind::Settle, held, None) else { return Ok(()) };
        let sessions = session.list(op).await?;
        let state = model.key(key);
        let may_land = |term: &u64| *term != session.term() && sessions.iter().any(|info| info.term == *term);
        if state.cut.iter().any(may_land) {
            turn.done();
            return Ok(());
        }
        let found = self.table.look_up_surely(op, hash, |entry| model.is_of(key, entry)).await?;
        let entries: Vec<u64> = found.iter().map(|slot| slot.entry).collect();
        if entries.is_empty() && (state.one_of_them || state.present.is_some()) {
            model.fail(format!("key {key}: nothing is there, of {state:x?}"));
        }
        let kept = state.present.filter(|entry| entries.contains(entry)).or(entries.first().copied());
        let mut is_alive = false;
        if let Some(entry) = kept {
            is_alive = surely::read_word(op, self.node_at(entry)).await? != 0;
        }
        // The nodes that are not kept are dead first: an entry that nobody finds now may turn up where a directory is behind.
        for entry in state.maybe.iter().filter(|entry| Some(**entry) != kept) {
            self.write_node(op, *entry, 0).await?;
        }
        for entry in entries {
            if !is_alive || Some(entry) != kept {
                self.table.remove(op, self, hash, entry).await?;
            }
        }
        turn.settled(kept.filter(|_| is_alive));
        Ok(())
    }
}

fn config(world: &World) -> Config {
    Config { groups: 2, sabotage: world.setting.sabotage }
}

/// Runs a trial; what went wrong, if something did.
pub(crate) fn run(trial: &Trial, setting: Setting) -> Result<Report, String> {
    marks::reset();
    let mut config = SimConfig::adversarial(trial.seed);
    config.tear = trial.tear;
    config.max_events = 20_000_000;
    let servers = (0..trial.servers).map(|n| {
        let config = ServerConfig {
            pool: PoolId(u128::from(trial.seed)),
            max_sessions: u16::try_from(trial.sessions * (MAX_LIVES + 1) + 1).expect("few sessions"),
            lease_ns: LEASE_NS,
            ..ServerConfig::tiny(ServerId::new(n), trial.servers, 1024)
        };
        Arc::new(MemoryServer::new(config, ProcedureSet::default()).expect("valid")) as Arc<dyn ServerLogic>
    });
    let sim = Sim::new(config, trial.faults.clone(), servers.collect()).expect("it starts");
    let world = World {
        trial: trial.clone(),
        setting,
        model: Model::new(trial.keys),
        index: Rc::default(),
        root: Rc::new(Cell::new(GlobalAddr::NULL)),
        next_tag: Rc::new(Cell::new(1)),
        deaths: Rc::default(),
    };
    let ended = sim.run(drive(sim.clone(), world.clone())).map_err(|stop| stop.to_string())?;
    if let Some(trouble) = world.model.trouble.borrow().clone() {
        return Err(trouble);
    }
    let (census, usage) = ended.map_err(|error| error.to_string())?;
    judge_census(&world, &census)?;
    judge_memory(&world, &usage)?;
    let (looks, changes) = (*world.model.looks.borrow(), *world.model.changes.borrow());
    Ok(Report { looks, changes, census, trace_hash: sim.report().trace_hash, marks: marks::snapshot() })
}

async fn drive(sim: Sim, world: World) -> Result<(Census, leaks::Usage), IndexError> {
    let cluster = sim.cluster();
    let pool = Pool::join(&cluster, SessionOptions::default()).await?;
    let endpoint = pool.session().endpoint()?;
    pool.keep_alive(&endpoint, HEARTBEAT_NS);
    let op = endpoint.op();
    let info = pool.create_index(&op, "tried", PLAIN, &[]).await?;
    world.index.set(info.id);
    let on = server(&world.trial);
    world.root.set(Table::create(&op, &pool, (info.id, SUBTABLES), on, config(&world)).await?);
    pool.index_ready(&op, info.id).await?;
    drop(op);
    let clients: Vec<_> = (0..world.trial.sessions)
        .map(|n| sim.spawn_client(compute_server(cluster.clone(), world.clone(), n)))
        .collect();
    for client in clients {
        if client.await.is_err() {
            world.deaths.set(world.deaths.get() + 1);
        }
    }
    let table = Table::attach(&pool, (info.id, SUBTABLES), world.root.get(), config(&world))?;
    let client = Client { world: world.clone(), pool: pool.clone(), table };
    for _ in 0..100 {
        if pool.session().list(&endpoint.op()).await?.len() == 1 {
            break;
        }
        sim.sleep(LEASE_NS).await;
    }
    let op = endpoint.op();
    let census = client.table.check(&op, &client).await?;
    drop(op);
    pool.heap().close(&endpoint).await?;
    let mut reachable = census.objects.clone();
    let op = endpoint.op();
    for key in 0..world.model.keys() {
        let look = client.table.look_up(&op, hash_of_key(key), |entry| world.model.is_of(key, entry)).await?;
        reachable.extend(look.iter().map(|slot| (client.class(), client.node_at(slot.entry))));
    }
    drop(op);
    Ok((census, leaks::measure(pool.session(), &endpoint, &reachable).await?))
}

/// One compute server: as many lives as it takes.
async fn compute_server(cluster: Cluster, world: World, number: u32) {
    let left: Rc<Cell<u32>> = Rc::new(Cell::new(world.trial.ops * u32::from(world.trial.tasks)));
    for life in 0..MAX_LIVES {
        let lived = live(&cluster, &world, number, life, &left).await;
        if left.get() == 0 || world.model.trouble.borrow().is_some() {
            return;
        }
        match lived {
            Ok(()) | Err(IndexError::Fenced | IndexError::Unknown) => {
                world.deaths.set(world.deaths.get() + 1);
                marks::hit("new_life");
            }
            Err(error) => return world.model.fail(error.to_string()),
        }
    }
}

async fn live(
    cluster: &Cluster,
    world: &World,
    number: u32,
    life: u32,
    left: &Rc<Cell<u32>>,
) -> Result<(), IndexError> {
    let (client, keeper) = Client::open(world, cluster).await?;
    let tasks: Vec<_> = (0..world.trial.tasks)
        .map(|task| {
            let (client, left) = (client.clone(), Rc::clone(left));
            let seed =
                world.trial.seed ^ u64::from(number) << 40 ^ u64::from(life) << 32 ^ u64::from(task) << 16;
            keeper.spawn(async move {
                let endpoint = client.pool.session().endpoint()?;
                let mut rng = Rng::with_seed(seed);
                while left.get() > 0 && client.world.model.trouble.borrow().is_none() {
                    left.set(left.get() - 1);
                    match client.step(&endpoint, &mut rng).await {
                        // It is known by now, or never will be; the key is settled later.
                        Err(IndexError::Unknown) | Ok(()) => {}
                        Err(error) => return Err(error),
                    }
                }
                Ok::<_, IndexError>(())
            })
        })
        .collect();
    let mut result = Ok(());
    for task in tasks {
        result = result.and(task.await.unwrap_or(Err(IndexError::Unknown)));
    }
    result?;
    client.pool.leave(&keeper).await?;
    Ok(())
}

/// What the table holds in the end is what the model says.
fn judge_census(world: &World, census: &Census) -> Result<(), String> {
    let mut found: BTreeMap<usize, Vec<u64>> = BTreeMap::new();
    for (hash, entry) in &census.entries {
        let key = (0..world.model.keys()).find(|key| hash_of_key(*key) == *hash);
        let Some(key) = key.filter(|key| world.model.is_of(*key, *entry)) else {
            return Err(format!("entry {entry:#x} of hash {hash:#x} is no key's"));
        };
        found.entry(key).or_default().push(*entry);
    }
    for key in 0..world.model.keys() {
        let state = world.model.key(key);
        let entries = found.remove(&key).unwrap_or_default();
        let is_right = state.present.is_none_or(|entry| entries.contains(&entry))
            && entries.iter().all(|entry| state.present == Some(*entry) || state.maybe.contains(entry))
            && !(state.one_of_them && entries.is_empty());
        if !is_right {
            return Err(format!("key {key} has {entries:x?} in the end, not {state:x?}"));
        }
    }
    let most = world.deaths.get() * u64::from(world.trial.tasks);
    if census.strays > most || census.copies > most {
        return Err(format!("{} strays and {} copies after {most} deaths", census.strays, census.copies));
    }
    Ok(())
}

/// Nothing is used twice; nothing leaks, unless somebody died or a completion was lost.
fn judge_memory(world: &World, usage: &leaks::Usage) -> Result<(), String> {
    let is_faulty = world.trial.faults.faults.iter().any(|fault| !matches!(fault, Fault::SlowServer { .. }));
    let abandoned = usize::try_from(marks::count("node_abandoned")).unwrap_or(0);
    if !usage.dangling.is_empty() || (!is_faulty && usage.leaked.len() > abandoned) {
        return Err(format!("memory is wrong: {usage}"));
    }
    Ok(())
}
