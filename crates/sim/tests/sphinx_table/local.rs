//! The table on real memory, outside the simulator: what operations cost, how full it gets, a pool that is full, wrong input, and several threads at once.

use farwood_fabric::procedure::ProcedureSet;
use farwood_fabric::region::PoolId;
use farwood_fabric::server::ServerLogic;
use farwood_fabric::transport::local::LocalCluster;
use farwood_fabric::{Cluster, Executor, GlobalAddr, Op, ServerId, SessionOptions, marks};
use farwood_index::engine::sphinx::table::{Config, MAX_ENTRY, Nodes, Table};
use farwood_index::{IndexError, Pool};
use farwood_memory::{MemoryServer, ServerConfig};
use farwood_sim::check::leaks;

const CLASS: (u32, u16) = (1, 0);

fn cluster(chunks: u32, chunk_bytes: u64) -> Cluster {
    let memory_bytes = u64::from(chunks) * chunk_bytes;
    let config = ServerConfig {
        chunk_bytes,
        lease_ns: 0,
        ..ServerConfig::new(PoolId(3), ServerId::new(0), 1, memory_bytes)
    };
    let server = MemoryServer::new(config, ProcedureSet::default()).expect("valid");
    let servers: Vec<std::sync::Arc<dyn ServerLogic>> = vec![std::sync::Arc::new(server)];
    LocalCluster::start(servers).expect("it starts")
}

/// Entries that say themselves what their hash is.
struct Numbers;

fn hash(entry: u64) -> u64 {
    let mixed = (entry ^ entry >> 31).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9)
}

impl Nodes for Numbers {
    async fn hashes_of(&self, _: &Op, entries: &[u64]) -> Result<Vec<Option<u64>>, IndexError> {
        // Replacements have the hash of what they replace.
        Ok(entries.iter().map(|entry| Some(hash(entry & 0xffff_ffff))).collect())
    }
}

fn config(groups: u32) -> Config {
    Config { groups, ..Config::default() }
}

async fn create(cluster: &Cluster, groups: u32) -> Result<(Pool, GlobalAddr), IndexError> {
    let pool = Pool::join(cluster, SessionOptions::default()).await?;
    let op = pool.session().endpoint()?.op();
    let index = pool.create_index(&op, "table", "none", &[]).await?.id;
    assert_eq!(index, CLASS.0, "the first index of a pool");
    let root = Table::create(&op, &pool, CLASS, ServerId::new(0), config(groups)).await?;
    drop(op);
    Ok((pool, root))
}

async fn finds(table: &Table, op: &Op, entry: u64) -> bool {
    let found = table.look_up(op, hash(entry), |other| other == entry).await.expect("looked up");
    found.len() == 1
}

#[test]
fn operations_cost_what_the_paper_says() {
    let cluster = cluster(16, 64 << 10);
    Executor::new().block_on(async {
        let (pool, root) = create(&cluster, 64).await.expect("created");
        let table = Table::attach(&pool, CLASS, root, config(64)).expect("attached");
        let endpoint = pool.session().endpoint().expect("an endpoint");
        for n in 1..=1000 {
            table.insert(&endpoint.op(), &Numbers, hash(n), n).await.expect("inserted");
        }
        let op = endpoint.op();
        assert!(finds(&table, &op, 7).await);
        let found = op.stats();
        assert_eq!((found.round_trips, found.reads, found.bytes_read), (1, 2, 256));
        let op = endpoint.op();
        assert!(!finds(&table, &op, 2000).await);
        assert_eq!(op.stats().round_trips, 2, "one more to be certain");
        let op = endpoint.op();
        table.insert(&op, &Numbers, hash(2000), 2000).await.expect("inserted");
        assert_eq!((op.stats().round_trips, op.stats().atomics), (2, 1));
        let slot = table.look_up(&op, hash(7), |entry| entry == 7).await.expect("looked up")[0];
        let op = endpoint.op();
        assert_eq!(table.replace(&op, &Numbers, hash(7), slot, 7 | 1 << 40).await, Ok(true));
        assert_eq!(op.stats().round_trips, 1);
        assert_eq!(
            table.replace(&op, &Numbers, hash(7), slot, 7 | 1 << 41).await,
            Ok(false),
            "it is another now"
        );
        let op = endpoint.op();
        assert_eq!(table.remove(&op, &Numbers, hash(2000), 2000).await, Ok(true));
        assert_eq!(op.stats().round_trips, 2);
        assert_eq!(table.remove(&op, &Numbers, hash(2000), 2000).await, Ok(false));
        for entry in [0, MAX_ENTRY + 1] {
            let refused = table.insert(&op, &Numbers, hash(1), entry).await;
            assert!(matches!(refused, Err(IndexError::BadValue { .. })), "{entry:#x}: {refused:?}");
        }
        for groups in [0, 1, 5000] {
            let refused = Table::attach(&pool, CLASS, root, config(groups));
            assert!(matches!(refused, Err(IndexError::BadConfig { .. })), "{groups} groups");
        }
        let nowhere = Table::attach(&pool, CLASS, root.add(64), config(64)).expect("nobody has looked yet");
        let lost = nowhere.look_up(&op, hash(7), |_| false).await;
        assert!(matches!(lost, Err(IndexError::Corrupt { .. })), "{lost:?}");
    });
}

#[test]
fn subtables_are_full_when_they_are_split_and_a_new_directory_finds_everything() {
    const ENTRIES: u64 = 60_000;
    let cluster = cluster(64, 64 << 10);
    Executor::new().block_on(async {
        marks::reset();
        let (pool, root) = create(&cluster, 64).await.expect("created");
        let table = Table::attach(&pool, CLASS, root, config(64)).expect("attached");
        let endpoint = pool.session().endpoint().expect("an endpoint");
        let mut first_split = 0;
        for n in 1..=ENTRIES {
            table.insert(&endpoint.op(), &Numbers, hash(n), n).await.expect("inserted");
            if first_split == 0 && marks::count("hash_split") > 0 {
                first_split = n;
            }
        }
        let slots = 64 * 24;
        assert!(
            first_split > slots * 85 / 100,
            "{first_split} of {slots} slots were full at the first split"
        );
        let census = table.check(&endpoint.op(), &Numbers).await.expect("sound");
        assert_eq!(
            (census.entries.len() as u64, census.strays, census.copies, census.dead),
            (ENTRIES, 0, 0, 0)
        );
        assert!(census.slots < ENTRIES * 100 / 42, "{} slots for {ENTRIES} entries", census.slots);
        let known = table.directory_bytes();
        assert!(known <= 16 * 2 * 2 * census.objects.len() as u64, "{known} bytes of directory");
        let stranger = Table::attach(&pool, CLASS, root, config(64)).expect("attached");
        for n in 1..=ENTRIES {
            assert!(finds(&stranger, &endpoint.op(), n).await, "entry {n}");
        }
        let before = endpoint.totals().round_trips;
        for n in 1..=ENTRIES {
            assert!(finds(&stranger, &endpoint.op(), n).await, "entry {n}");
        }
        assert_eq!(endpoint.totals().round_trips - before, ENTRIES, "the directory knows by now");
        pool.heap().close(&endpoint).await.expect("memory is given back");
        let usage = leaks::measure(pool.session(), &endpoint, &census.objects).await.expect("counted");
        assert_eq!((usage.leaked.len(), usage.dangling.len()), (0, 0), "{usage}");
        assert_eq!(usage.in_use, census.objects.len() as u64);
    });
}

#[test]
fn a_full_pool_is_an_error_and_the_table_serves_on() {
    let cluster = cluster(3, 4096);
    Executor::new().block_on(async {
        let (pool, root) = create(&cluster, 4).await.expect("created");
        let table = Table::attach(&pool, CLASS, root, config(4)).expect("attached");
        let endpoint = pool.session().endpoint().expect("an endpoint");
        let mut stored = Vec::new();
        let full = loop {
            let entry = stored.len() as u64 + 1;
            match table.insert(&endpoint.op(), &Numbers, hash(entry), entry).await {
                Ok(()) => stored.push(entry),
                Err(error) => break error,
            }
            assert!(stored.len() < 10_000, "a small pool does not hold so many");
        };
        assert!(matches!(full, IndexError::PoolFull(_)), "{full:?}");
        assert!(!finds(&table, &endpoint.op(), stored.len() as u64 + 1).await, "it did not happen");
        for entry in &stored {
            assert!(finds(&table, &endpoint.op(), *entry).await);
        }
        for entry in &stored[..stored.len() / 2] {
            let op = endpoint.op();
            assert_eq!(table.remove(&op, &Numbers, hash(*entry), *entry).await, Ok(true));
        }
        let next = stored.len() as u64 + 1;
        table.insert(&endpoint.op(), &Numbers, hash(next), next).await.expect("there is room again");
        let census = table.check(&endpoint.op(), &Numbers).await.expect("sound");
        assert_eq!(census.entries.len(), stored.len() - stored.len() / 2 + 1);
    });
}

#[test]
fn threads_of_two_sessions_find_what_they_inserted() {
    const THREADS: u64 = 4;
    const EACH: u64 = 4_000;
    let cluster = cluster(64, 64 << 10);
    let (pool, root) = Executor::new().block_on(create(&cluster, 4)).expect("created");
    let other = Executor::new().block_on(Pool::join(&cluster, SessionOptions::default())).expect("joined");
    let members =
        [&pool, &other].map(|pool| (pool, Table::attach(pool, CLASS, root, config(4)).expect("attached")));
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (pool, table) = &members[usize::from(thread % 2 == 1)];
            scope.spawn(move || {
                Executor::new().block_on(async {
                    let endpoint = pool.session().endpoint().expect("an endpoint");
                    for n in 1..=EACH {
                        let op = endpoint.op();
                        let entry = n * THREADS + thread;
                        table.insert(&op, &Numbers, hash(entry), entry).await.expect("inserted");
                        // All threads insert these at once.
                        table
                            .insert(&op, &Numbers, hash(n + 1_000_000), n + 1_000_000)
                            .await
                            .expect("inserted");
                        let earlier = n.div_ceil(2) * THREADS + thread;
                        if n.div_ceil(2) % 3 != 0 {
                            assert!(finds(table, &op, earlier).await, "entry {earlier}");
                        }
                        if n % 3 == 0 {
                            assert_eq!(table.remove(&op, &Numbers, hash(entry), entry).await, Ok(true));
                            assert!(!finds(table, &op, entry).await, "entry {entry} was removed");
                        }
                    }
                });
            });
        }
    });
    Executor::new().block_on(async {
        let endpoint = pool.session().endpoint().expect("an endpoint");
        let census = members[0].1.check(&endpoint.op(), &Numbers).await.expect("sound");
        let expected = THREADS * (EACH - EACH / 3) + EACH;
        assert_eq!((census.entries.len() as u64, census.strays, census.copies), (expected, 0, 0));
    });
}
