//! Engines on real memory, outside the simulator: against `BTreeMap`, at the edges of what can be stored, loaded in bulk, in a pool that is
//! full, with wrong input, and on several threads at once.

mod sherman;
mod sphinx;

use farwood_fabric::control::{Reply, Request};
use farwood_fabric::procedure::ProcedureSet;
use farwood_fabric::region::PoolId;
use farwood_fabric::server::ServerLogic;
use farwood_fabric::transport::local::LocalCluster;
use farwood_fabric::{Cluster, Endpoint, Executor, ServerId, SessionOptions};
use farwood_index::shared::heap::Class;
use farwood_index::{Engine, IndexError, OrderedIndex, Pool};
use farwood_memory::{MemoryServer, ServerConfig};
use farwood_sim::check::leaks;
use farwood_sim::threads::{self, Crew};
use fastrand::Rng;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::{Bound, RangeBounds};
use std::sync::Arc;

const INDEX: &str = "tree";

type Model = BTreeMap<Vec<u8>, Vec<u8>>;
type Draw<'a> = &'a dyn Fn(&mut Rng) -> Vec<u8>;

/// Two servers with so many chunks each.
fn cluster(chunks: u32, chunk_bytes: u64) -> Cluster {
    uneven_cluster(chunks, [chunk_bytes; 2])
}

/// The same, with chunks of different sizes.
fn uneven_cluster(chunks: u32, chunk_bytes: [u64; 2]) -> Cluster {
    let server = |n: u16| -> Arc<dyn ServerLogic> {
        let chunk_bytes = chunk_bytes[usize::from(n)];
        let memory_bytes = u64::from(chunks) * chunk_bytes;
        let config = ServerConfig {
            chunk_bytes,
            lease_ns: 0,
            max_sessions: 20,
            ..ServerConfig::new(PoolId(3), ServerId::new(n), 2, memory_bytes)
        };
        Arc::new(MemoryServer::new(config, ProcedureSet::default()).expect("valid"))
    };
    LocalCluster::start((0..2).map(server).collect()).expect("they start")
}

/// One session with one open tree.
struct Opened<E: Engine> {
    pool: Pool,
    endpoint: Endpoint,
    engine: E,
    attached: E::Attached,
    tree: E::Index,
}

impl<E: Engine> Opened<E> {
    async fn create(cluster: &Cluster, engine: E) -> Result<Self, IndexError> {
        let pool = Pool::join(cluster, SessionOptions::default()).await?;
        let endpoint = pool.session().endpoint()?;
        engine.create(&pool, &endpoint, INDEX).await?;
        let attached = engine.attach(&pool, &endpoint, INDEX).await?;
        let tree = engine.open(&attached, &endpoint, 0)?;
        Ok(Self { pool, endpoint, engine, attached, tree })
    }

    /// The tree is as it must be, and all memory is either in it or free. How many objects it has.
    async fn check(&self) -> usize {
        let reachable = self.engine.check(&self.attached, &self.endpoint).await.expect("the tree is sound");
        self.pool.heap().close(&self.endpoint).await.expect("memory is given back");
        let usage =
            leaks::measure(self.pool.session(), &self.endpoint, &reachable).await.expect("it is counted");
        assert!(usage.leaked.is_empty() && usage.dangling.is_empty(), "{usage}");
        reachable.len()
    }

    /// All pairs.
    async fn all(&self) -> Vec<(Vec<u8>, Vec<u8>)> {
        self.tree.scan(Bound::Unbounded, Bound::Unbounded, usize::MAX, false).await.expect("scanned")
    }

    /// Attaches the tree with another engine.
    async fn attach<F: Engine>(&self, engine: F) -> Result<(), IndexError> {
        engine.attach(&self.pool, &self.endpoint, INDEX).await.map(drop)
    }
}

/// An end of a range, which need not be a key.
fn bound(rng: &mut Rng, mut key: Vec<u8>) -> Bound<Vec<u8>> {
    match rng.u32(0..6) {
        0 => key.truncate(rng.usize(0..=key.len())),
        1 => key.push(rng.u8(..)),
        _ => {}
    }
    match rng.u32(0..3) {
        0 => Bound::Included(key),
        1 => Bound::Excluded(key),
        _ => Bound::Unbounded,
    }
}

fn expected_range(
    model: &Model,
    range: (Bound<&[u8]>, Bound<&[u8]>),
    limit: usize,
    reverse: bool,
) -> Vec<(Vec<u8>, Vec<u8>)> {
    let inside = |(key, _): &(&Vec<u8>, &Vec<u8>)| RangeBounds::<[u8]>::contains(&range, key.as_slice());
    let pairs = model.iter().filter(inside).map(|(key, value)| (key.clone(), value.clone()));
    if reverse { pairs.rev().take(limit).collect() } else { pairs.take(limit).collect() }
}

/// One random operation, answered by the tree as by the model.
async fn one_step(
    tree: &impl OrderedIndex,
    model: &mut Model,
    rng: &mut Rng,
    (key_of, value_of): (Draw<'_>, Draw<'_>),
) {
    let (key, value) = (key_of(rng), value_of(rng));
    let held = model.get(&key).cloned();
    match rng.u32(0..100) {
        0..30 => assert_eq!(tree.get(&key).await.expect("got"), held),
        30..50 => {
            tree.put(&key, &value).await.expect("put");
            model.insert(key, value);
        }
        50..56 => {
            assert_eq!(tree.put_if_absent(&key, &value).await.expect("put"), held.is_none());
            model.entry(key).or_insert(value);
        }
        56..62 => {
            assert_eq!(tree.update_if_present(&key, &value).await.expect("updated"), held.is_some());
            model.entry(key).and_modify(|held| *held = value);
        }
        62..82 => {
            assert_eq!(tree.delete(&key).await.expect("deleted"), held.is_some());
            model.remove(&key);
        }
        82..92 => {
            let expected = if rng.bool() { held.clone() } else { Some(value.clone()) };
            let new = rng.bool().then_some(value);
            let swapped = tree.compare_and_swap(&key, expected.as_deref(), new.as_deref()).await;
            assert_eq!(swapped.expect("swapped"), held == expected);
            if held == expected {
                match new {
                    Some(new) => drop(model.insert(key, new)),
                    None => drop(model.remove(&key)),
                }
            }
        }
        _ => {
            let (start, end) = (bound(rng, key), key_of(rng));
            let end = bound(rng, end);
            let range = (start.as_ref().map(Vec::as_slice), end.as_ref().map(Vec::as_slice));
            let limit = if rng.bool() { rng.usize(0..20) } else { usize::MAX };
            let reverse = rng.bool();
            let found = tree.scan(range.0, range.1, limit, reverse).await.expect("scanned");
            assert_eq!(found, expected_range(model, range, limit, reverse), "{range:?} {limit} {reverse}");
        }
    }
}

/// Does `steps` random operations on a new tree and a `BTreeMap`, which must agree all along and at the end; then deletes every key.
/// How many objects the tree had, and has when it is empty.
async fn agrees_with_a_btreemap<E: Engine>(
    opened: &Opened<E>,
    seed: u64,
    steps: u32,
    draw: (Draw<'_>, Draw<'_>),
) -> (usize, usize) {
    let (mut model, mut rng) = (Model::new(), Rng::with_seed(seed));
    for _ in 0..steps {
        one_step(&opened.tree, &mut model, &mut rng, draw).await;
    }
    let all = opened.all().await;
    assert_eq!(all, model.into_iter().collect::<Vec<_>>());
    let before = opened.check().await;
    for (key, _) in all {
        assert!(opened.tree.delete(&key).await.expect("deleted"));
    }
    (before, opened.check().await)
}

/// A pool that is full is an error, and the tree serves on.
fn survives_a_full_pool(engine: impl Engine, cluster: &Cluster) {
    Executor::new().block_on(async {
        let opened = Opened::create(cluster, engine).await.expect("created");
        let mut stored = Vec::new();
        let full = loop {
            let key = (stored.len() as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes();
            match opened.tree.put(&key, &key).await {
                Ok(()) => stored.push(key),
                Err(error) => break error,
            }
            assert!(stored.len() < 10_000, "a small pool does not hold so many");
        };
        assert!(matches!(full, IndexError::PoolFull(_)), "{full:?}");
        opened.check().await;
        for key in &stored {
            assert_eq!(opened.tree.get(key).await, Ok(Some(key.to_vec())));
            opened.tree.put(key, &[9; 8]).await.expect("an update needs no room");
        }
        for key in &stored[..stored.len() / 2] {
            assert_eq!(opened.tree.delete(key).await, Ok(true));
        }
        opened.tree.put(&stored[0], &[1; 8]).await.expect("there is room again");
        opened.check().await;
    });
}

/// Threads of several sessions see one order of all operations, and take these rare paths meanwhile.
fn threads_agree(engine: &impl Engine, cluster: &Cluster, crew: &Crew, paths: &[&str]) {
    threads::prepare(engine, cluster).expect("a tree");
    let done = threads::work(engine, cluster, crew).unwrap_or_else(|failure| panic!("{failure}"));
    println!("{} operations, {:?}", done.operations.len(), done.marks);
    for path in paths {
        assert!(done.marks.contains_key(path), "'{path}' never ran; what ran: {:?}", done.marks);
    }
    threads::judge(engine, cluster, done.operations).unwrap_or_else(|failure| panic!("{failure}"));
}

/// Servers of different sizes have chunks of different sizes: objects lie, and are counted, by those of their own server.
#[test]
fn servers_need_not_be_of_one_size() {
    for sizes in [[16 << 10, 64 << 10], [64 << 10, 16 << 10]] {
        let cluster = uneven_cluster(400, sizes);
        Executor::new().block_on(async {
            let engine =
                farwood_index::engine::sphinx::Sphinx::new(farwood_index::engine::sphinx::Config::tiny());
            let opened = Opened::create(&cluster, engine).await.expect("created");
            let mut model = Model::new();
            for n in 0..3_000u32 {
                let key = (n.wrapping_mul(2_654_435_761) % 1_500).to_be_bytes().to_vec();
                if n % 3 == 0 {
                    opened.tree.delete(&key).await.expect("deleted");
                    model.remove(&key);
                } else {
                    let value = vec![n.to_le_bytes()[0]; usize::try_from(n % 300).expect("small")];
                    opened.tree.put(&key, &value).await.expect("put");
                    model.insert(key, value);
                }
            }
            assert_eq!(opened.all().await, model.into_iter().collect::<Vec<_>>(), "{sizes:?}");
            assert!(opened.check().await > 1_000);
        });
    }
}

/// Operations that all find the heap empty are served by one new chunk: each asked for one of its own, once, and the pool was full.
#[test]
fn many_allocations_at_once_ask_for_one_chunk() {
    let cluster = cluster(64, 1 << 20);
    Executor::new().block_on(async {
        let pool = Pool::join(&cluster, SessionOptions::default()).await.expect("joined");
        let endpoint = pool.session().endpoint().expect("an endpoint");
        let info = pool.create_index(&endpoint.op(), "many", "none", &[]).await.expect("created");
        let class = Class { index: info.id, class: 1, object_bytes: 64 };
        let allocations: Vec<_> = (0..200)
            .map(|_| {
                let (heap, endpoint) = (pool.heap().clone(), endpoint.clone());
                endpoint.clone().spawn(async move {
                    heap.allocate(&endpoint.op(), ServerId::COORDINATOR, class).await.expect("there is room")
                })
            })
            .collect();
        let mut objects = BTreeSet::new();
        for allocation in allocations {
            assert!(objects.insert(allocation.await.expect("not killed")), "handed out twice");
        }
        let request = Request::ListChunks { owner: None };
        let reply = endpoint.op().control(ServerId::COORDINATOR, &request).await.expect("listed");
        let Reply::ChunkList { chunks, .. } = reply else { panic!("a list") };
        assert_eq!(chunks.len(), 1, "{chunks:?}");
    });
}
