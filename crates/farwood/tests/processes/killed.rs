//! `kill -9`, of clients and of servers, under load.

use super::parts::{INDEX, KEYS, TREE_KEYS, TREES, cells, records};
use super::world::{Over, Process, Servers, client, connect};
use farwood_fabric::clock::{MICROSECOND, MILLISECOND, SECOND};
use farwood_fabric::{
    Batch, Endpoint, Executor, FabricError, GlobalAddr, RegionId, ServerId, Session, SessionOptions,
};
use farwood_index::{AnyEngine, Engine, Index, OrderedIndex, Pool};
use farwood_sim::check::leaks;
use farwood_sim::trial::join_options;
use std::ops::Bound;

/// What one death may leave unaccounted for: see `shared::heap`.
const LEAKED_PER_DEATH: usize = 2 * 24;

/// Kills clients in the middle of their writes. Leases are long: that clients are gone shows by their sockets, at once if they map the
/// memory, half a second later if they are far away.
fn survives_kills<E: Engine>(engine: &E, part: &str, over: Over, kills: u64) {
    let servers = Servers::start(&["--lease-ms", "600000"]);
    survives_kills_of(&servers, over, engine, part, kills);
}

/// The same, with servers that were started before.
pub(crate) fn survives_kills_of<E: Engine>(
    servers: &Servers,
    over: Over,
    engine: &E,
    part: &str,
    kills: u64,
) {
    let place = servers.place(over);
    let cluster = connect(&place).expect("the pool is there");
    let executor = Executor::new();
    executor.block_on(async {
        let pool = Pool::join_with(&cluster, join_options(engine)).await.expect("joins");
        let endpoint = pool.session().endpoint().expect("an endpoint");
        pool.keep_alive(&endpoint, 2 * MILLISECOND);
        engine.create(&pool, &endpoint, INDEX).await.expect("creates");
        let attached = engine.attach(&pool, &endpoint, INDEX).await.expect("attaches");
        let index = engine.open(&attached, &endpoint, 0).expect("opens");
        for kill in 0..kills {
            let mut clients = [client(part, &place), client(part, &place)];
            // This session takes part meanwhile, as one that reads does: epochs pass.
            let until = endpoint.now() + (1500 + kill * 37 % 2000) * MICROSECOND;
            while endpoint.now() < until {
                pool.session().heartbeat(&endpoint).await.expect("its lease runs");
                endpoint.sleep(200 * MICROSECOND).await;
            }
            for client in &mut clients {
                client.kill();
            }
            // Everything works again when the dead have been buried: locks, memory, numbers.
            wait_for_recovery(&pool, &endpoint).await;
            for key in 0..KEYS {
                index.put(&key.to_be_bytes(), &kill.to_be_bytes()).await.expect("puts");
            }
            for key in 0..KEYS {
                let value = index.get(&key.to_be_bytes()).await.expect("gets");
                assert_eq!(value, Some(kill.to_be_bytes().to_vec()));
            }
            // What was retired, by the dead and by us, is free again as soon as nobody can reach it: there is nobody else.
            for _ in 0..1000 {
                pool.heap().collect(&endpoint).await.expect("collects");
                if pool.heap().retired() == 0 {
                    break;
                }
                endpoint.sleep(MILLISECOND).await;
            }
            let reachable = engine.check(&attached, &endpoint).await.expect("whole, and no lock is held");
            let usage = leaks::measure(pool.session(), &endpoint, &reachable).await.expect("measures");
            let deaths = usize::try_from(2 * (kill + 1)).expect("few");
            assert!(usage.dangling.is_empty() && usage.lost_chunks == 0, "after {deaths} deaths: {usage}");
            println!("{part}: {} leaked after {deaths} deaths", usage.leaked.len());
            // What this session holds in its hands is not in the structure either.
            let bound = (deaths + 1) * LEAKED_PER_DEATH;
            assert!(usage.leaked.len() <= bound, "after {deaths} deaths: {usage}");
        }
    });
    executor.clear();
}

#[test]
fn a_killed_client_leaves_locks_and_cells_that_others_repair() {
    survives_kills(&cells(), "cells", Over::Shm, 25);
}

#[test]
fn a_killed_client_leaves_memory_that_others_find() {
    survives_kills(&records(), "records", Over::Shm, 25);
}

#[test]
fn a_killed_client_far_away_leaves_locks_and_cells_that_others_repair() {
    survives_kills(&cells(), "cells", Over::Tcp, 10);
}

#[test]
fn a_killed_client_far_away_leaves_memory_that_others_find() {
    survives_kills(&records(), "records", Over::Tcp, 10);
}

/// The janitor of this session recovers the dead, though nobody waits for them.
async fn wait_for_recovery(pool: &Pool, endpoint: &Endpoint) {
    let deadline = endpoint.now() + 20 * SECOND;
    while pool.session().list(&endpoint.op()).await.expect("lists").len() > 1 {
        assert!(endpoint.now() < deadline, "the dead are not recovered though their processes are gone");
        endpoint.sleep(MILLISECOND).await;
    }
}

/// A session that dies may have worked on several trees. Whoever recovers it has none of them open, and frees its locks in all.
#[test]
fn a_killed_client_leaves_no_lock_in_any_of_its_trees() {
    let servers = Servers::start(&["--lease-ms", "600000"]);
    let place = servers.place(Over::Shm);
    let cluster = connect(&place).expect("the pool is there");
    let executor = Executor::new();
    executor.block_on(async {
        let pool = Pool::join(&cluster, SessionOptions::default()).await.expect("joins");
        let endpoint = pool.session().endpoint().expect("an endpoint");
        pool.keep_alive(&endpoint, 2 * MILLISECOND);
        for (name, engine) in TREES {
            let engine = AnyEngine::named(engine, 8, 8).expect("it exists");
            drop(Index::create(&pool, &endpoint, name, &engine).await.expect("creates"));
        }
        for kill in 0..20u64 {
            let mut clients = [client("trees", &place), client("trees", &place)];
            // This session takes part meanwhile, as one that reads does: epochs pass.
            let until = endpoint.now() + (1500 + kill * 37 % 2000) * MICROSECOND;
            while endpoint.now() < until {
                pool.session().heartbeat(&endpoint).await.expect("its lease runs");
                endpoint.sleep(200 * MICROSECOND).await;
            }
            for client in &mut clients {
                client.kill();
            }
            wait_for_recovery(&pool, &endpoint).await;
            for (name, _) in TREES {
                let tree = Index::open(&pool, &endpoint, name).await.expect("opens");
                let handle = tree.handle(&endpoint).expect("a handle");
                for key in 0..TREE_KEYS {
                    handle.put(&key.to_be_bytes(), &kill.to_be_bytes()).await.expect("no lock is in the way");
                }
                let all =
                    handle.scan(Bound::Unbounded, Bound::Unbounded, usize::MAX, false).await.expect("scans");
                assert!(
                    all.len() as u64 == TREE_KEYS
                        && all.iter().all(|(_, value)| *value == kill.to_be_bytes())
                );
                tree.check(&endpoint).await.expect("whole, and no lock is held");
            }
        }
    });
    executor.clear();
}

#[test]
fn a_killed_server_is_an_error_within_a_bounded_time() {
    let mut servers = Servers::start(&[]);
    let cluster = servers.connect().expect("the pool is there");
    let executor = Executor::new();
    let gone = ServerId::new(1);
    executor.block_on(async {
        let session = Session::open(&cluster, SessionOptions::default()).await.expect("a session");
        let endpoint = session.endpoint().expect("an endpoint");
        let word = |server| GlobalAddr::new(server, RegionId::LOCK, 64);
        for server in [ServerId::COORDINATOR, gone] {
            endpoint.op().faa(word(server), 1).await.expect("both servers are there");
        }
        servers.processes[1].kill();
        // For a while verbs go on: another process may take over the memory.
        let deadline = endpoint.now() + 10 * SECOND;
        while endpoint.op().faa(word(gone), 1).await.is_ok() {
            assert!(endpoint.now() < deadline, "verbs on a dead server's memory go on");
        }
        let op = endpoint.op();
        let (down, open) =
            (FabricError::Disconnected { server: gone }, FabricError::Unknown { server: gone });
        assert_eq!(op.read_word(word(gone)).await, Err(open.clone()));
        assert_eq!(op.read(word(gone), 64).await.map(drop), Err(open));
        assert_eq!(op.cas(word(gone), 0, 1).await, Err(down.clone()));
        assert_eq!(op.write_word(word(gone), 1).await, Err(down.clone()));
        let mut batch = Batch::new(gone);
        batch.write_word(word(gone), 1);
        let failure = op.submit(batch).await.expect_err("nobody is there");
        assert!(failure.error == down && !failure.may_have_happened(0));
        assert_eq!(endpoint.reconnect(gone).await, Err(down));
        let hello = farwood_fabric::control::Request::Hello {};
        assert!(op.control(gone, &hello).await.expect_err("nobody answers").is_unknown());
        // The other server goes on, and whoever comes now is told.
        assert!(op.faa(word(ServerId::COORDINATOR), 1).await.is_ok());
        assert!(session.heartbeat(&endpoint).await.is_ok());
        let session = Session::open(&cluster, SessionOptions::default()).await;
        assert!(session.expect_err("the pool is not whole").is_unknown());
    });
    executor.clear();
    let again = servers.connect().expect_err("the pool is not whole");
    assert!(again.to_string().contains("is gone; start it again"), "{again}");
}

/// A call that waits when its server dies comes back.
#[test]
fn a_stopped_and_killed_server_answers_nobody_but_nobody_hangs() {
    let mut servers = Servers::start(&[]);
    let cluster = servers.connect().expect("the pool is there");
    let executor = Executor::new();
    executor.block_on(async {
        let session = Session::open(&cluster, SessionOptions::default()).await.expect("a session");
        let endpoint = session.endpoint().expect("an endpoint");
        servers.processes[1].stop();
        let caller = endpoint.clone();
        let call = endpoint.spawn(async move {
            caller.op().control(ServerId::new(1), &farwood_fabric::control::Request::Hello {}).await
        });
        endpoint.sleep(50 * MILLISECOND).await;
        servers.processes[1].kill();
        let ended = call.await.expect("it ends");
        assert!(ended.expect_err("nobody answered").is_unknown());
    });
    executor.clear();
}

/// One-sided verbs cost the server no CPU.
#[test]
fn verbs_cost_the_server_no_cpu() {
    let servers = Servers::start(&["--lease-ms", "0"]);
    let cluster = servers.connect().expect("the pool is there");
    let executor = Executor::new();
    executor.block_on(async {
        let session = Session::open(&cluster, SessionOptions::default()).await.expect("a session");
        let endpoint = session.endpoint().expect("an endpoint");
        let before: Vec<u64> = servers.processes.iter().map(Process::cpu_ticks).collect();
        let op = endpoint.op();
        for n in 0..1_000_000u64 {
            let word = GlobalAddr::new(ServerId::new(u16::from(n % 2 == 1)), RegionId::LOCK, n % 512 * 8);
            op.faa(word, 1).await.expect("adds");
            op.read(word, 8).await.expect("reads");
        }
        let after: Vec<u64> = servers.processes.iter().map(Process::cpu_ticks).collect();
        for (before, after) in before.iter().zip(&after) {
            assert!(after - before <= 1, "2,000,000 verbs cost a server {} ticks", after - before);
        }
    });
    executor.clear();
}
