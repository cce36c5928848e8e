//! Sphinx: keys that hurt, values of all lengths.

use super::{
    Crew, Draw, INDEX, Model, Opened, agrees_with_a_btreemap, cluster, survives_a_full_pool, threads_agree,
};
use farwood_fabric::{Executor, SessionOptions};
use farwood_index::engine::sphinx::{Config, Sphinx, Switches};
use farwood_index::{Engine, IndexError, OrderedIndex, Pool};
use farwood_sim::spelling::Spelling;
use fastrand::Rng;

/// Values of all sizes, most of them small.
fn value(rng: &mut Rng) -> Vec<u8> {
    let most = [0, 8, 60, 200, 3000][rng.usize(0..5)];
    let len = rng.usize(0..=most);
    (0..len).map(|_| rng.u8(..)).collect()
}

#[test]
fn a_tree_and_a_btreemap_agree() {
    let keys = |spelling: Spelling, count: u64| move |rng: &mut Rng| spelling.key(rng.u64(0..count));
    let binary = |rng: &mut Rng| -> Vec<u8> { (0..rng.usize(0..5)).map(|_| rng.u8(..) & 0x83).collect() };
    let kinds: [(Draw<'_>, u32); 7] = [
        (&keys(Spelling::Numbers, 600), 12_000),
        (&keys(Spelling::Prefixes, 400), 12_000),
        (&keys(Spelling::Ladder, 600), 12_000),
        (&keys(Spelling::LongPrefix, 600), 6_000),
        (&keys(Spelling::Huge, 60), 1_500),
        (&keys(Spelling::Binary, 600), 12_000),
        (&binary, 12_000),
    ];
    for (seed, (key_of, steps)) in (0..).zip(kinds) {
        let no_filter = Switches { filter: false, ..Config::tiny().switches };
        for config in [Config::art(), Config::tiny(), Config { switches: no_filter, ..Config::tiny() }] {
            let cluster = cluster(400, 32 << 10);
            Executor::new().block_on(async {
                let opened = Opened::create(&cluster, Sphinx::new(config)).await.expect("created");
                let (_, left) = agrees_with_a_btreemap(&opened, seed, steps, (key_of, &value)).await;
                let tables = if opened.engine.config.switches.hash_table { 2 } else { 0 };
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
            let opened = Opened::create(&cluster, Sphinx::new(config)).await.expect("created");
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
        let opened = Opened::create(&cluster, Sphinx::new(config)).await.expect("created");
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

/// Who finds nodes by hash says so in the index, if it may write.
#[test]
fn who_only_reads_finds_nodes_by_hash_too() {
    let cluster = cluster(400, 128 << 10);
    Executor::new().block_on(async {
        let switches = Switches { always_by_hash: true, ..Switches::SPHINX };
        let engine = Sphinx::new(Config { switches, ..Config::default() });
        let opened = Opened::create(&cluster, engine.clone()).await.expect("created");
        for n in 0..500u64 {
            opened.tree.put(&n.to_be_bytes(), b"v").await.expect("put");
        }
        let options = SessionOptions { read_only: true, ..SessionOptions::default() };
        let pool = Pool::join(&cluster, options).await.expect("joined");
        let endpoint = pool.session().endpoint().expect("an endpoint");
        let attached = engine.attach(&pool, &endpoint, INDEX).await.expect("attached");
        let tree = engine.open(&attached, &endpoint, 0).expect("opened");
        for n in 0..501u64 {
            assert_eq!(tree.get(&n.to_be_bytes()).await.expect("got").is_some(), n < 500);
        }
    });
}

#[test]
fn values_up_to_a_mebibyte_and_keys_up_to_four_kibibytes() {
    let cluster = cluster(40, 8 << 20);
    Executor::new().block_on(async {
        let opened = Opened::create(&cluster, Sphinx::new(Config::default())).await.expect("created");
        let tree = &opened.tree;
        let long_key = vec![0xff; 4096];
        // A mebibyte, and what whoever stores it keeps beside it.
        let longest = tree.limits().value_bytes;
        assert!(longest > 1 << 20);
        for bytes in [0, 1, 63, 64, 1000, 5000, 70_000, longest, 3, 1 << 20, 0] {
            for key in [&b""[..], b"k", &long_key] {
                let value = vec![u8::try_from(bytes % 251).expect("small"); bytes];
                tree.put(key, &value).await.expect("put");
                assert_eq!(tree.get(key).await.expect("got"), Some(value));
            }
        }
        assert!(matches!(tree.put(b"k", &vec![0; longest + 1]).await, Err(IndexError::BadValue { .. })));
        assert!(matches!(tree.put(&[0; 4097], b"").await, Err(IndexError::BadKey { .. })));
        assert!(matches!(tree.get(&[0; 4097]).await, Err(IndexError::BadKey { .. })));
        opened.check().await;
    });
}

#[test]
fn a_full_pool_is_an_error_and_the_tree_serves_on() {
    for config in [Config::art(), Config::tiny()] {
        survives_a_full_pool(Sphinx::new(config), &cluster(10, 4096));
    }
}

#[test]
fn wrong_settings_are_refused_with_what_is_wrong() {
    let cluster = cluster(10, 16 << 10);
    Executor::new().block_on(async {
        let opened = Opened::create(&cluster, Sphinx::new(Config::default())).await.expect("created");
        let too_long = opened.tree.put(b"k", &vec![0; 20_000]).await;
        assert!(
            matches!(&too_long, Err(IndexError::BadValue { why }) if why.contains("larger")),
            "{too_long:?}"
        );
        let attach = async |config: Config| opened.attach(Sphinx::new(config)).await;
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

#[test]
fn threads_of_three_sessions_see_one_order_of_all_operations() {
    let narrow = ["edge_split", "path_compressed", "leaf_replaced", "object_reused", "lost_cas"];
    let wide = ["node_grown", "node_shrunk", "leaf_replaced", "object_reused", "lost_cas"];
    for (config, spelling, paths) in [
        (Config::art(), Spelling::Prefixes, narrow),
        (Config::tiny(), Spelling::Prefixes, narrow),
        (Config::tiny(), Spelling::Ladder, wide),
    ] {
        let crew =
            Crew { process: (0, 1), seed: 1, sessions: 3, threads: 2, ops: 10_000, keys: 200, spelling };
        threads_agree(&Sphinx::new(config), &cluster(400, 16 << 10), &crew, &paths);
    }
}
