//! Sherman: keys and values of fixed lengths.

use super::{Crew, INDEX, Opened, agrees_with_a_btreemap, cluster, survives_a_full_pool, threads_agree};
use farwood_fabric::{Executor, SessionOptions};
use farwood_index::engine::sherman::{Config, LocksAlone, Sherman, Switches};
use farwood_index::{Engine, IndexError, OrderedIndex, Pool};
use farwood_sim::spelling::Spelling;
use fastrand::Rng;
use std::ops::Bound;

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

#[test]
fn a_tree_and_a_btreemap_agree() {
    let sizes = [(8, 8, 4), (2, 1, 4), (20, 40, 6), (8, 8, 48), (13, 9, 9)];
    for (seed, (key_bytes, value_bytes, entries)) in (0..).zip(sizes) {
        let config = Config { key_bytes, value_bytes, ..Config::tiny() }.with_entries(entries);
        let cluster = cluster(400, 16 << 10);
        let key = |rng: &mut Rng| key(rng, key_bytes);
        let value = |rng: &mut Rng| (0..value_bytes).map(|_| rng.u8(..) & rng.u8(..) & rng.u8(..)).collect();
        Executor::new().block_on(async {
            let opened = Opened::create(&cluster, Sherman::new(config)).await.expect("created");
            let (before, left) = agrees_with_a_btreemap(&opened, seed, 20_000, (&key, &value)).await;
            assert!(left * 2 < before, "of {before} nodes {left} are left of an empty tree");
        });
    }
}

#[test]
fn a_bulk_load_fills_nodes_as_told_and_is_a_tree_like_any_other() {
    let cluster = cluster(400, 64 << 10);
    Executor::new().block_on(async {
        let opened = Opened::create(&cluster, Sherman::new(Config::default())).await.expect("created");
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
        let opened = Opened::create(&cluster, Sherman::new(Config::default())).await.expect("created");
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

/// Where the whole node is written back, an update of a value of 128 bytes or more waited for more room in the journal than there is, with
/// the lock held.
#[test]
fn values_of_every_length_can_be_overwritten_whatever_the_switches() {
    let whole_nodes = Switches { two_level_versions: false, ..Switches::SHERMAN };
    Executor::new().block_on(async {
        for switches in [Switches::FG_PLUS, whole_nodes, Switches::SHERMAN] {
            for value_bytes in [8, 9, 100, 128, 1000, 3072] {
                let config = Config { switches, ..Config::default() }.sized(8, value_bytes);
                let opened =
                    Opened::create(&cluster(20, 256 << 10), Sherman::new(config)).await.expect("created");
                for round in 0..3u8 {
                    for key in 0..80u64 {
                        let value = vec![round; value_bytes];
                        opened.tree.put(&key.to_be_bytes(), &value).await.expect("put");
                        let held = opened.tree.get(&key.to_be_bytes()).await.expect("got");
                        assert_eq!(held, Some(value), "{switches:?}");
                    }
                }
                opened.check().await;
            }
        }
        let too_long = Config { key_bytes: 2048, value_bytes: 2048, ..Config::fg_plus() }.with_entries(8);
        let refused = Opened::create(&cluster(20, 256 << 10), Sherman::new(too_long)).await.err();
        assert!(matches!(refused, Some(IndexError::BadConfig { why }) if why.contains("journal")));
    });
}

#[test]
fn a_full_pool_is_an_error_and_the_tree_serves_on() {
    survives_a_full_pool(Sherman::new(Config::tiny()), &cluster(3, 4096));
}

#[test]
fn wrong_input_and_other_settings_are_refused_with_what_is_wrong() {
    let cluster = cluster(10, 16 << 10);
    Executor::new().block_on(async {
        let opened = Opened::create(&cluster, Sherman::new(Config::default())).await.expect("created");
        let tree = &opened.tree;
        assert!(matches!(tree.get(b"short").await, Err(IndexError::BadKey { .. })));
        assert!(matches!(tree.put(&[0; 9], &[0; 8]).await, Err(IndexError::BadKey { .. })));
        assert!(matches!(tree.put(&[0; 8], &[0; 7]).await, Err(IndexError::BadValue { .. })));
        assert!(matches!(
            tree.compare_and_swap(&[0; 8], None, Some(&[])).await,
            Err(IndexError::BadValue { .. })
        ));
        let attach = async |config: Config| opened.attach(Sherman::new(config)).await;
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
    let spelling = Spelling::Numbers;
    let crew = Crew { process: (0, 1), seed: 1, sessions: 3, threads: 2, ops: 10_000, keys: 200, spelling };
    for config in [small, fg_plus] {
        let paths = ["split", "root_split", "merge", "object_reused", "stale_hint", "lost_cas"];
        threads_agree(&Sherman::new(config), &cluster(400, 16 << 10), &crew, &paths);
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
