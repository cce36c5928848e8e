//! Sphinx on real memory, outside the simulator: against `BTreeMap` on keys that hurt, at the edges of what can be stored, loaded in bulk, in a
//! pool that is full, with wrong input, and on several threads at once.

use farwood_fabric::region::PoolId;
use farwood_fabric::server::ServerLogic;
use farwood_fabric::transport::local::LocalCluster;
use farwood_fabric::{Cluster, Endpoint, Executor, ServerId, SessionOptions};
use farwood_index::engine::sphinx::{Attached, Config, Sphinx, Switches, Tree};
use farwood_index::{Engine, IndexError, OrderedIndex, Pool};
use farwood_memory::{MemoryServer, ServerConfig};
use farwood_sim::check::leaks;
use farwood_sim::spelling::Spelling;
use fastrand::Rng;
use std::collections::BTreeMap;
use std::ops::{Bound, RangeBounds};
use std::sync::Arc;

const INDEX: &str = "tree";
type Model = BTreeMap<Vec<u8>, Vec<u8>>;
type DrawKey<'a> = &'a dyn Fn(&mut Rng) -> Vec<u8>;

fn cluster(chunks: u32, chunk_bytes: u64) -> Cluster {
    let server = |n| -> Arc<dyn ServerLogic> {
        let memory_bytes = u64::from(chunks) * chunk_bytes;
        let config = ServerConfig {
            chunk_bytes,
            lease_ns: 0,
            max_sessions: 20,
            ..ServerConfig::new(PoolId(3), ServerId::new(n), 2, memory_bytes)
        };
        let procedures = farwood_fabric::procedure::ProcedureSet::default();
        Arc::new(MemoryServer::new(config, procedures).expect("valid"))
    };
    LocalCluster::start((0..2).map(server).collect()).expect("they start")
}

/// One session with one open tree.
struct Opened {
    pool: Pool,
    endpoint: Endpoint,
    engine: Sphinx,
    attached: Attached,
    tree: Tree,
}

impl Opened {
    async fn create(cluster: &Cluster, config: Config) -> Result<Self, IndexError> {
        let pool = Pool::join(cluster, SessionOptions::default()).await?;
        let endpoint = pool.session().endpoint()?;
        let engine = Sphinx::new(config);
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
}

fn bound(rng: &mut Rng, key: Vec<u8>) -> Bound<Vec<u8>> {
    let mut key = key;
    // Bounds need not be keys.
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

/// Values of all sizes, most of them small.
fn value(rng: &mut Rng) -> Vec<u8> {
    let most = [0, 8, 60, 200, 3000][rng.usize(0..5)];
    let len = rng.usize(0..=most);
    (0..len).map(|_| rng.u8(..)).collect()
}

async fn one_step(tree: &Tree, model: &mut Model, rng: &mut Rng, key_of: DrawKey<'_>) {
    let (key, value) = (key_of(rng), value(rng));
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

#[test]
fn a_tree_and_a_btreemap_agree() {
    let keys = |spelling: Spelling, count: u64| move |rng: &mut Rng| spelling.key(rng.u64(0..count));
    let binary = |rng: &mut Rng| -> Vec<u8> { (0..rng.usize(0..5)).map(|_| rng.u8(..) & 0x83).collect() };
    let kinds: [(DrawKey<'_>, u32); 7] = [
        (&keys(Spelling::Numbers, 600), 12_000),
        (&keys(Spelling::Prefixes, 400), 12_000),
        (&keys(Spelling::Ladder, 600), 12_000),
        (&keys(Spelling::LongPrefix, 600), 6_000),
        (&keys(Spelling::Huge, 60), 1_500),
        (&keys(Spelling::Binary, 600), 12_000),
        (&binary, 12_000),
    ];
    for (n, (key_of, steps)) in (0..).zip(kinds) {
        let no_filter = Switches { filter: false, ..Config::tiny().switches };
        for config in [Config::art(), Config::tiny(), Config { switches: no_filter, ..Config::tiny() }] {
            let cluster = cluster(400, 32 << 10);
            Executor::new().block_on(async {
                let opened = Opened::create(&cluster, config).await.expect("created");
                let (mut model, mut rng) = (BTreeMap::new(), Rng::with_seed(n));
                for _ in 0..steps {
                    one_step(&opened.tree, &mut model, &mut rng, key_of).await;
                }
                let all = opened.all().await;
                assert_eq!(all, model.into_iter().collect::<Vec<_>>());
                for (key, _) in all {
                    assert!(opened.tree.delete(&key).await.expect("deleted"));
                }
                let tables = if opened.engine.config.switches.hash_table { 2 } else { 0 };
                let left = opened.check().await;
                assert!(left == 1 + tables || tables > 0 && left < 40, "{left} objects in an empty tree");
            });
        }
    }
}

#[test]
fn a_bulk_load_is_a_tree_like_any_other() {
    for config in [Config::art(), Config::default()] {
        let cluster = cluster(400, 128 << 10);
        Executor::new().block_on(async {
            let opened = Opened::create(&cluster, config).await.expect("created");
            let number = |n: u64| n.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes().to_vec();
            let mut model: Model = (0..60_000).map(|n| (number(n), n.to_le_bytes().to_vec())).collect();
            // Keys that are prefixes of others, and the empty one.
            for n in 0..3000 {
                let key = number(n)[..usize::try_from(n % 9).expect("small")].to_vec();
                model.insert(key, vec![1; 70]);
            }
            let unsorted = [(vec![1], vec![]), (vec![1], vec![])];
            assert!(matches!(opened.tree.bulk_load(unsorted).await, Err(IndexError::BadKey { .. })));
            assert_eq!(opened.tree.bulk_load(model.clone()).await, Ok(model.len() as u64));
            let again = opened.tree.bulk_load(model.clone()).await;
            assert!(matches!(again, Err(IndexError::BadConfig { .. })), "{again:?}");
            assert_eq!(opened.all().await, model.clone().into_iter().collect::<Vec<_>>());
            for n in (0..70_000u64).step_by(7) {
                let key = number(n);
                assert_eq!(opened.tree.get(&key).await.expect("got"), model.get(&key).cloned());
                opened.tree.put(&key, &[7; 8]).await.expect("put");
            }
            opened.check().await;
        });
    }
}

#[test]
fn a_get_takes_three_round_trips_and_an_update_in_place_four() {
    let cluster = cluster(400, 128 << 10);
    Executor::new().block_on(async {
        let switches = Switches { always_by_hash: true, ..Switches::SPHINX };
        let config = Config { switches, ..Config::default() };
        let opened = Opened::create(&cluster, config).await.expect("created");
        let key = |n: u64| n.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes();
        let mut pairs: Vec<_> = (0..20_000).map(|n| (key(n).to_vec(), vec![5; 64])).collect();
        pairs.sort();
        opened.tree.bulk_load(pairs).await.expect("loaded");
        let (mut gets, mut updates) = (0, 0);
        for n in 0..2_000 {
            let before = opened.endpoint.totals();
            assert!(opened.tree.get(&key(n)).await.expect("got").is_some());
            let get = opened.endpoint.totals() - before;
            opened.tree.put(&key(n), &[6; 64]).await.expect("put");
            let put = opened.endpoint.totals() - before - get;
            gets += u64::from(get.round_trips == 3);
            updates += u64::from((put.round_trips, put.atomics) == (4, 1));
        }
        println!("of 2000, {gets} gets in three round trips, {updates} updates in four");
        assert!(gets >= 1940 && updates >= 1940, "{gets} gets, {updates} updates");
    });
}

#[test]
fn values_up_to_a_mebibyte_and_keys_up_to_four_kibibytes() {
    let cluster = cluster(40, 8 << 20);
    Executor::new().block_on(async {
        let opened = Opened::create(&cluster, Config::default()).await.expect("created");
        let tree = &opened.tree;
        let long_key = vec![0xff; 4096];
        for bytes in [0, 1, 63, 64, 1000, 5000, 70_000, 1 << 20, 3, (1 << 20) - 1, 0] {
            for key in [&b""[..], b"k", &long_key] {
                let value = vec![u8::try_from(bytes % 251).expect("small"); bytes];
                tree.put(key, &value).await.expect("put");
                assert_eq!(tree.get(key).await.expect("got"), Some(value));
            }
        }
        assert!(matches!(tree.put(b"k", &vec![0; (1 << 20) + 1]).await, Err(IndexError::BadValue { .. })));
        assert!(matches!(tree.put(&[0; 4097], b"").await, Err(IndexError::BadKey { .. })));
        assert!(matches!(tree.get(&[0; 4097]).await, Err(IndexError::BadKey { .. })));
        opened.check().await;
    });
}

#[test]
fn a_full_pool_is_an_error_and_the_tree_serves_on() {
    for config in [Config::art(), Config::tiny()] {
        let cluster = cluster(10, 4096);
        Executor::new().block_on(async {
            let opened = Opened::create(&cluster, config).await.expect("created");
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
}

#[test]
fn wrong_settings_are_refused_with_what_is_wrong() {
    let cluster = cluster(10, 16 << 10);
    Executor::new().block_on(async {
        let opened = Opened::create(&cluster, Config::default()).await.expect("created");
        let too_long = opened.tree.put(b"k", &vec![0; 20_000]).await;
        assert!(
            matches!(&too_long, Err(IndexError::BadValue { why }) if why.contains("larger")),
            "{too_long:?}"
        );
        let attach = async |config: Config| {
            Sphinx::new(config).attach(&opened.pool, &opened.endpoint, INDEX).await.map(drop)
        };
        assert!(attach(Config::art()).await.is_err(), "another engine");
        let other = attach(Config { table_groups: 128, ..Config::default() }).await;
        assert!(
            matches!(&other, Err(IndexError::BadConfig { why }) if why.contains("64 groups")),
            "{other:?}"
        );
        assert_eq!(attach(Config { filter_bytes: 1000, ..Config::default() }).await, Ok(()));
        opened.pool.drop_index(&opened.endpoint, INDEX).await.expect("dropped");
        assert!(attach(Config::default()).await.is_err(), "it is gone");
    });
}

/// Adds one to a counter that everybody shares, by compare-and-swap.
async fn add_one(tree: &Tree, key: &[u8]) {
    loop {
        let held = tree.get(key).await.expect("got");
        let number =
            held.as_deref().map_or(0, |held| u64::from_le_bytes(held[..8].try_into().expect("eight bytes")));
        let mut new = (number + 1).to_le_bytes().to_vec();
        // Of many lengths, so that leaves are replaced too.
        new.resize(8 + usize::try_from(number % 100).expect("small"), 1);
        if tree.compare_and_swap(key, held.as_deref(), Some(&new)).await.expect("swapped") {
            return;
        }
    }
}

#[test]
fn threads_of_two_sessions_keep_what_they_write() {
    const THREADS: u64 = 6;
    const KEYS: u64 = 60;
    const STEPS: u64 = 8_000;
    for config in [Config::art(), Config::tiny()] {
        let cluster = cluster(400, 16 << 10);
        let engine = Sphinx::new(config);
        let join = async |create: bool| {
            let pool = Pool::join(&cluster, SessionOptions::default()).await.expect("joined");
            let endpoint = pool.session().endpoint().expect("an endpoint");
            if create {
                engine.create(&pool, &endpoint, INDEX).await.expect("created");
            }
            let attached = engine.attach(&pool, &endpoint, INDEX).await.expect("attached");
            (pool, attached)
        };
        let members = [Executor::new().block_on(join(true)), Executor::new().block_on(join(false))];
        let shared = b"everybody's";
        let worker = |thread: u64| {
            let (pool, attached) = &members[usize::from(thread % 2 == 1)];
            Executor::new().block_on(async {
                let endpoint = pool.session().endpoint().expect("an endpoint");
                let tree =
                    engine.open(attached, &endpoint, u16::try_from(thread).expect("few")).expect("open");
                let (mut rng, mut mine, mut added) = (Rng::with_seed(thread), BTreeMap::new(), 0u64);
                for n in 0..STEPS {
                    // Keys of all threads lie between each other, so that they share nodes.
                    let key = Spelling::Prefixes.key(rng.u64(0..KEYS) * THREADS + thread);
                    match rng.u32(0..10) {
                        0..4 => {
                            let mut value = n.to_le_bytes().to_vec();
                            value.resize(rng.usize(8..80), 3);
                            tree.put(&key, &value).await.expect("put");
                            mine.insert(key, value);
                        }
                        4..7 => {
                            let deleted = tree.delete(&key).await.expect("deleted");
                            assert_eq!(deleted, mine.remove(&key).is_some());
                        }
                        7..9 => assert_eq!(tree.get(&key).await.expect("got"), mine.get(&key).cloned()),
                        _ => {
                            add_one(&tree, shared).await;
                            added += 1;
                        }
                    }
                }
                for (key, value) in mine {
                    assert_eq!(tree.get(&key).await.expect("got"), Some(value));
                }
                added
            })
        };
        let worker = &worker;
        let added: u64 = std::thread::scope(|scope| {
            let workers: Vec<_> = (0..THREADS).map(|thread| scope.spawn(move || worker(thread))).collect();
            workers.into_iter().map(|worker| worker.join().expect("no thread failed")).sum()
        });
        Executor::new().block_on(async {
            let (pool, attached) = &members[0];
            let endpoint = pool.session().endpoint().expect("an endpoint");
            engine.check(attached, &endpoint).await.expect("the tree is sound");
            let tree = engine.open(attached, &endpoint, 0).expect("open");
            let counted = tree.get(shared).await.expect("got").expect("somebody counted");
            assert_eq!(counted[..8], added.to_le_bytes(), "no addition was lost");
        });
    }
}
