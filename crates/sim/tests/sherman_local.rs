//! Sherman on real memory, outside the simulator: against `BTreeMap`, at the edges of what can be stored, loaded in bulk, in a pool
//! that is full, with wrong input, and on several threads at once.

use farwood_fabric::region::PoolId;
use farwood_fabric::server::ServerLogic;
use farwood_fabric::transport::local::LocalCluster;
use farwood_fabric::{Cluster, Endpoint, Executor, ServerId, SessionOptions};
use farwood_index::engine::sherman::{Attached, Config, LocksAlone, Sherman, Switches, Tree};
use farwood_index::{Engine, IndexError, OrderedIndex, Pool};
use farwood_memory::{MemoryServer, ServerConfig};
use farwood_sim::check::leaks;
use farwood_sim::threads::{self, Crew};
use fastrand::Rng;
use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;

const INDEX: &str = "tree";

fn cluster(chunks: u32, chunk_bytes: u64) -> Cluster {
    let server = |n| -> Arc<dyn ServerLogic> {
        let memory_bytes = u64::from(chunks) * chunk_bytes;
        let config = ServerConfig {
            chunk_bytes,
            lease_ns: 0,
            max_sessions: 20,
            ..ServerConfig::new(PoolId(3), ServerId::new(n), 2, memory_bytes)
        };
        Arc::new(
            MemoryServer::new(config, farwood_fabric::procedure::ProcedureSet::default()).expect("valid"),
        )
    };
    LocalCluster::start((0..2).map(server).collect()).expect("they start")
}

/// One session with one open tree.
struct Opened {
    pool: Pool,
    endpoint: Endpoint,
    engine: Sherman,
    attached: Attached,
    tree: Tree,
}

impl Opened {
    async fn create(cluster: &Cluster, config: Config) -> Result<Self, IndexError> {
        let pool = Pool::join(cluster, SessionOptions::default()).await?;
        let endpoint = pool.session().endpoint()?;
        let engine = Sherman::new(config);
        engine.create(&pool, &endpoint, INDEX).await?;
        let attached = engine.attach(&pool, &endpoint, INDEX).await?;
        let tree = engine.open(&attached, &endpoint, 0)?;
        Ok(Self { pool, endpoint, engine, attached, tree })
    }

    /// The tree is as it must be, and all memory is either in it or free.
    async fn check(&self) {
        let reachable = self.engine.check(&self.attached, &self.endpoint).await.expect("the tree is sound");
        self.pool.heap().close(&self.endpoint).await.expect("memory is given back");
        let usage =
            leaks::measure(self.pool.session(), &self.endpoint, &reachable).await.expect("it is counted");
        assert!(usage.leaked.is_empty() && usage.dangling.is_empty(), "{usage}");
    }
}

/// A random key: few different ones, and the smallest and the greatest among them.
fn key(rng: &mut Rng, bytes: usize) -> Vec<u8> {
    match rng.u32(0..50) {
        0 => vec![0; bytes],
        1 => vec![0xff; bytes],
        _ => {
            let mut key = vec![0; bytes];
            let number = rng.u16(0..2000).to_be_bytes();
            let at = rng.usize(0..2) * (bytes - 2);
            key[at..at + 2].copy_from_slice(&number);
            key
        }
    }
}

fn bound(rng: &mut Rng, bytes: usize) -> Bound<Vec<u8>> {
    let mut key = key(rng, bytes);
    // Bounds may be shorter or longer than keys.
    match rng.u32(0..6) {
        0 => key.truncate(rng.usize(0..bytes)),
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
    model: &BTreeMap<Vec<u8>, Vec<u8>>,
    (start, end): (Bound<&[u8]>, Bound<&[u8]>),
    limit: usize,
    reverse: bool,
) -> Vec<(Vec<u8>, Vec<u8>)> {
    use std::ops::RangeBounds;
    let inside =
        |(key, _): &(&Vec<u8>, &Vec<u8>)| RangeBounds::<[u8]>::contains(&(start, end), key.as_slice());
    let pairs = model.iter().filter(inside).map(|(key, value)| (key.clone(), value.clone()));
    if reverse { pairs.rev().take(limit).collect() } else { pairs.take(limit).collect() }
}

async fn one_step(tree: &Tree, model: &mut BTreeMap<Vec<u8>, Vec<u8>>, rng: &mut Rng, config: &Config) {
    let key = key(rng, config.key_bytes);
    let value: Vec<u8> = (0..config.value_bytes).map(|_| rng.u8(..) & rng.u8(..) & rng.u8(..)).collect();
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
            let (start, end) = (bound(rng, config.key_bytes), bound(rng, config.key_bytes));
            let range = (start.as_ref().map(Vec::as_slice), end.as_ref().map(Vec::as_slice));
            let limit = if rng.bool() { rng.usize(0..20) } else { usize::MAX };
            let reverse = rng.bool();
            let found = tree.scan(range.0, range.1, limit, reverse).await.expect("scanned");
            assert_eq!(found, expected_range(model, range, limit, reverse), "{range:?} {limit} {reverse}");
        }
    }
}

#[test]
fn a_tree_and_a_btreemap_agree() {
    let sizes = [(8, 8, 4), (2, 1, 4), (20, 40, 6), (8, 8, 48), (13, 9, 9)];
    for (n, (key_bytes, value_bytes, entries)) in (0..).zip(sizes) {
        let config = Config { key_bytes, value_bytes, ..Config::tiny() }.with_entries(entries);
        let cluster = cluster(400, 16 << 10);
        Executor::new().block_on(async {
            let opened = Opened::create(&cluster, config.clone()).await.expect("created");
            let (mut model, mut rng) = (BTreeMap::new(), Rng::with_seed(n));
            for _ in 0..20_000 {
                one_step(&opened.tree, &mut model, &mut rng, &config).await;
            }
            let all = opened
                .tree
                .scan(Bound::Unbounded, Bound::Unbounded, usize::MAX, false)
                .await
                .expect("scanned");
            assert_eq!(all, model.into_iter().collect::<Vec<_>>());
            let nodes =
                async || opened.engine.check(&opened.attached, &opened.endpoint).await.expect("sound").len();
            let before = nodes().await;
            for (key, _) in all {
                assert!(opened.tree.delete(&key).await.expect("deleted"));
            }
            opened.check().await;
            let left = nodes().await;
            println!("of {before} nodes {left} are left of an empty tree");
            assert!(left * 2 < before, "of {before} nodes {left} are left of an empty tree");
        });
    }
}

#[test]
fn a_bulk_load_fills_nodes_as_told_and_is_a_tree_like_any_other() {
    let cluster = cluster(400, 64 << 10);
    Executor::new().block_on(async {
        let opened = Opened::create(&cluster, Config::default()).await.expect("created");
        let pairs = || (0..100_000u64).map(|n| ((3 * n).to_be_bytes().to_vec(), n.to_le_bytes().to_vec()));
        let unsorted = [pairs().nth(5).expect("a pair"), pairs().nth(5).expect("a pair")];
        assert!(matches!(opened.tree.bulk_load(unsorted, 0.8).await, Err(IndexError::BadKey { .. })));
        assert!(matches!(opened.tree.bulk_load(pairs(), 1.5).await, Err(IndexError::BadConfig { .. })));
        assert_eq!(opened.tree.bulk_load(pairs(), 0.8).await, Ok(100_000));
        let nodes = opened.engine.check(&opened.attached, &opened.endpoint).await.expect("sound").len();
        let bytes_per_entry = nodes as f64 * 1024.0 / 100_000.0;
        println!("{nodes} nodes, {bytes_per_entry:.1} B an entry at 80% fill");
        assert!(bytes_per_entry <= 32.0);
        assert!(matches!(opened.tree.bulk_load(pairs(), 0.8).await, Err(IndexError::BadConfig { .. })));
        for n in (0..300_000u64).step_by(7) {
            let held = opened.tree.get(&n.to_be_bytes()).await.expect("got");
            assert_eq!(held, (n % 3 == 0).then(|| (n / 3).to_le_bytes().to_vec()));
            opened.tree.put(&n.to_be_bytes(), &[7; 8]).await.expect("put");
        }
        let start = 150_000u64.to_be_bytes();
        let some =
            opened.tree.scan(Bound::Included(&start), Bound::Unbounded, 1000, false).await.expect("scanned");
        assert_eq!(some.len(), 1000);
        assert!(some.windows(2).all(|pair| pair[0].0 < pair[1].0));
        opened.check().await;
    });
}

#[test]
fn a_get_is_one_round_trip_and_a_put_two_of_few_bytes() {
    let cluster = cluster(100, 64 << 10);
    Executor::new().block_on(async {
        let opened = Opened::create(&cluster, Config::default()).await.expect("created");
        let pairs = (0..5_000u64).map(|n| (n.to_be_bytes().to_vec(), n.to_le_bytes().to_vec()));
        opened.tree.bulk_load(pairs, 0.8).await.expect("loaded");
        let keys = (0..5_000u64).map(u64::to_be_bytes);
        for key in keys.clone() {
            opened.tree.get(&key).await.expect("got");
        }
        for key in keys.step_by(17) {
            let before = opened.endpoint.totals();
            opened.tree.get(&key).await.expect("got");
            let get = opened.endpoint.totals() - before;
            opened.tree.put(&key, &[1; 8]).await.expect("put");
            let put = opened.endpoint.totals() - before - get;
            assert_eq!((get.round_trips, get.reads, get.bytes_read), (1, 1, 1024));
            assert_eq!((put.round_trips, put.atomics, put.writes), (2, 1, 2));
            // The lock's CAS counts eight bytes, the unlock eight more.
            assert!(put.bytes_written - 16 <= 32, "{put:?}");
        }
    });
}

#[test]
fn a_full_pool_is_an_error_and_the_tree_serves_on() {
    let cluster = cluster(3, 4096);
    Executor::new().block_on(async {
        let opened = Opened::create(&cluster, Config::tiny()).await.expect("created");
        let mut stored = Vec::new();
        let full = loop {
            let key = (stored.len() as u64 * 7919 % 100_003).to_be_bytes();
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

#[test]
fn wrong_input_and_other_settings_are_refused_with_what_is_wrong() {
    let cluster = cluster(10, 16 << 10);
    Executor::new().block_on(async {
        let opened = Opened::create(&cluster, Config::default()).await.expect("created");
        let tree = &opened.tree;
        assert!(matches!(tree.get(b"short").await, Err(IndexError::BadKey { .. })));
        assert!(matches!(tree.put(&[0; 9], &[0; 8]).await, Err(IndexError::BadKey { .. })));
        assert!(matches!(tree.put(&[0; 8], &[0; 7]).await, Err(IndexError::BadValue { .. })));
        assert!(matches!(
            tree.compare_and_swap(&[0; 8], None, Some(&[])).await,
            Err(IndexError::BadValue { .. })
        ));
        let attach = async |config: Config| {
            Sherman::new(config).attach(&opened.pool, &opened.endpoint, INDEX).await.map(drop)
        };
        let other = attach(Config { value_bytes: 16, ..Config::default() }).await;
        assert!(
            matches!(&other, Err(IndexError::BadConfig { why }) if why.contains("values of 8 B")),
            "{other:?}"
        );
        assert!(attach(Config::fg_plus()).await.is_err(), "another engine");
        assert!(attach(Config { node_bytes: 100, ..Config::default() }).await.is_err());
        assert_eq!(attach(Config::default()).await, Ok(()));
        opened.pool.drop_index(&opened.endpoint, INDEX).await.expect("dropped");
        assert!(attach(Config::default()).await.is_err(), "it is gone");
    });
}

#[test]
fn threads_of_three_sessions_see_one_order_of_all_operations() {
    let small = Config { locks: 64, cache_bytes: 4096, ..Config::tiny() }.with_entries(6);
    let fg_plus = Config { switches: Switches::FG_PLUS, ..small.clone() };
    let crew = Crew { process: (0, 1), seed: 1, sessions: 3, threads: 2, ops: 10_000, keys: 200 };
    for config in [small, fg_plus] {
        let (engine, cluster) = (Sherman::new(config), cluster(400, 16 << 10));
        threads::prepare(&engine, &cluster).expect("a tree");
        let done = threads::work(&engine, &cluster, &crew).unwrap_or_else(|failure| panic!("{failure}"));
        println!("{} operations, {:?}", done.operations.len(), done.marks);
        for path in ["split", "root_split", "merge", "object_reused", "stale_hint", "lost_cas"] {
            assert!(done.marks.contains_key(path), "'{path}' never ran; what ran: {:?}", done.marks);
        }
        threads::judge(&engine, &cluster, done.operations).unwrap_or_else(|failure| panic!("{failure}"));
    }
}

/// The locks alone: what they cost, that they are free afterwards, and that nothing else can be done with them.
#[test]
fn locks_are_taken_and_given_back() {
    let none = Switches::FG_PLUS;
    for (switches, atomics, writes) in [
        (Switches::SHERMAN, 1, 1),
        (none, 1, 1),
        (Switches { lock_memory: true, ..none }, 1, 1),
        (Switches { faa_release: true, ..none }, 2, 0),
        (Switches { masked_locks: true, ..Switches::SHERMAN }, 2, 0),
    ] {
        Executor::new().block_on(async {
            let pool = Pool::join(&cluster(4, 1 << 20), SessionOptions::default()).await.expect("joined");
            let endpoint = pool.session().endpoint().expect("an endpoint");
            let mut engine = LocksAlone::default();
            engine.config.switches = switches;
            engine.create(&pool, &endpoint, INDEX).await.expect("created");
            let attached = engine.attach(&pool, &endpoint, INDEX).await.expect("attached");
            let locks = engine.open(&attached, &endpoint, 0).expect("opened");
            let before = endpoint.totals();
            for number in 0u64..100 {
                locks.put(&number.to_be_bytes(), &[]).await.expect("taken and given back");
            }
            let cost = endpoint.totals() - before;
            assert_eq!((cost.round_trips, cost.atomics, cost.writes), (200, 100 * atomics, 100 * writes));
            engine.check(&attached, &endpoint).await.expect("all are free");
            assert!(matches!(locks.get(&[0; 8]).await, Err(IndexError::BadConfig { .. })));
            assert!(matches!(locks.put(&[0; 3], &[]).await, Err(IndexError::BadKey { .. })));
        });
    }
}
