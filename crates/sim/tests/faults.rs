//! Every kind of fault really happens: one small world for each, in which only that one does.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use farwood_fabric::clock::{MICROSECOND, MILLISECOND, Nanos};
use farwood_fabric::control::{IndexState, Request, SessionState};
use farwood_fabric::procedure::ProcedureSet;
use farwood_fabric::server::ServerLogic;
use farwood_fabric::transport::sim::{Sim, SimConfig};
use farwood_fabric::{
    Cluster, Endpoint, FabricError, GlobalAddr, RegionId, ServerId, Session, SessionOptions, marks,
};
use farwood_memory::{MemoryServer, ServerConfig};
use std::cell::Cell;
use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;

const SERVERS: u16 = 2;
/// What nobody else uses.
const WORD: u64 = 2048;

fn word(server: u16) -> GlobalAddr {
    GlobalAddr::new(ServerId::new(server), RegionId::MAIN, WORD)
}

fn world(seed: u64, plan: &str) -> Sim {
    let server = |n| {
        let config = ServerConfig {
            max_sessions: 8,
            lease_ns: 0,
            ..ServerConfig::tiny(ServerId::new(n), SERVERS, 16)
        };
        Arc::new(MemoryServer::new(config, ProcedureSet::default()).unwrap()) as Arc<dyn ServerLogic>
    };
    let plan = plan.parse().expect("a plan");
    Sim::new(SimConfig::adversarial(seed), plan, (0..SERVERS).map(server).collect()).unwrap()
}

/// Runs a driver that has a session of its own.
fn run<T: 'static, F: Future<Output = T> + 'static>(
    sim: &Sim,
    driver: impl FnOnce(Sim, Session, Endpoint) -> F + 'static,
) -> T {
    let (cluster, world) = (sim.cluster(), sim.clone());
    sim.run(async move {
        let session = Session::open(&cluster, SessionOptions::default()).await.unwrap();
        let endpoint = session.endpoint().unwrap();
        driver(world, session, endpoint).await
    })
    .unwrap()
}

async fn join(cluster: &Cluster) -> (Session, Endpoint) {
    let session = Session::open(cluster, SessionOptions::default()).await.unwrap();
    let endpoint = session.endpoint().unwrap();
    (session, endpoint)
}

fn create() -> Request {
    Request::CreateIndex { name: "new".to_owned(), engine: "none".to_owned(), config: Vec::new() }
}

/// A client joins (`OpenSession` is its call 0, `AttachSession` its call 1) and creates an index, of which it may die. Whether it
/// did, and whether the index is there.
fn create_under(seed: u64, plan: &str) -> (bool, bool) {
    let sim = world(seed, plan);
    run(&sim, |sim, _session, endpoint| async move {
        let cluster = sim.cluster();
        let client = sim.spawn_client(async move {
            let (_session, endpoint) = join(&cluster).await;
            endpoint.op().control(ServerId::COORDINATOR, &create()).await.unwrap();
        });
        let is_dead = client.await.is_err();
        sim.sleep(10 * MILLISECOND).await;
        let reply = endpoint.op().control(ServerId::COORDINATOR, &Request::ListIndexes {}).await.unwrap();
        let farwood_fabric::control::Reply::Indexes { infos } = reply else { panic!("{reply:?}") };
        assert!(infos.iter().all(|info| info.state == IndexState::Creating));
        (is_dead, !infos.is_empty())
    })
}

#[test]
fn who_dies_at_a_call_dies_before_its_effect_or_after_it() {
    for seed in 0..50 {
        assert_eq!(create_under(seed, ""), (false, true));
        assert_eq!(create_under(seed, "kill-before:c0@r2"), (true, false));
        assert_eq!(create_under(seed, "kill-after:c0@r2"), (true, true));
        assert_eq!(create_under(seed, "kill-after:c1@r2"), (false, true), "another client's");
        assert_eq!(create_under(seed, "kill-at:before-CreateIndex#1"), (true, false));
        assert_eq!(create_under(seed, "kill-at:c0@after-CreateIndex#1"), (true, true));
        assert_eq!(create_under(seed, "kill-at:after-AttachSession#1"), (true, false));
        assert_eq!(create_under(seed, "kill-at:after-CreateIndex#2"), (false, true), "there is one only");
    }
}

/// Clients that hit a mark before each of ten WRITEs, one after the other; how far each came, and how many died.
fn count_under(seed: u64, plan: &str, clients: u16) -> (Vec<u64>, u64) {
    let sim = world(seed, plan);
    let counted = run(&sim, move |sim, _session, endpoint| async move {
        // The driver's own hits do not count, and it does not die.
        marks::hit("counted");
        let mut all = Vec::new();
        for client in 0..clients {
            let cluster = sim.cluster();
            let counting = sim.spawn_client(async move {
                let (_session, endpoint) = join(&cluster).await;
                for n in 1..=10 {
                    marks::hit("counted");
                    endpoint.op().write_word(word(client), n).await.unwrap();
                }
            });
            let _ = counting.await;
            sim.sleep(10 * MILLISECOND).await;
            all.push(endpoint.op().read_word(word(client)).await.unwrap());
        }
        all
    });
    (counted, sim.report().counts.deaths)
}

#[test]
fn who_dies_at_a_mark_posts_no_other_verb() {
    for seed in 0..50 {
        assert_eq!(count_under(seed, "", 2), (vec![10, 10], 0));
        assert_eq!(count_under(seed, "kill-at:c1@counted#4", 2), (vec![10, 3], 1));
        assert_eq!(count_under(seed, "kill-at:counted#4", 2), (vec![3, 10], 1));
        // The hits of all clients count: four of the first, the other's are the fifth and so on.
        assert_eq!(count_under(seed, "kill-at:counted#4 kill-at:counted#6", 2), (vec![3, 1], 2));
        assert_eq!(count_under(seed, "kill-at:other#1", 2), (vec![10, 10], 0));
    }
}

#[test]
fn deaths_at_marks_are_reported() {
    let plan = "kill-at:counted#4 kill-at:c0@counted#9";
    let sim = world(1, plan);
    run(&sim, |sim, _session, _endpoint| async move {
        let client = sim.spawn_client(async {
            for _ in 0..4 {
                marks::hit("counted");
            }
            std::future::pending::<()>().await;
        });
        assert!(client.await.is_err());
    });
    assert_eq!(sim.struck(), ["kill-at:counted#4".parse().unwrap()]);
}

/// A client's WRITE loses its completion, and its first reconnects fail: the one that it asks for, and those by which its endpoint goes on in
/// the background. Whether the WRITE landed after the first of them.
fn lands_after_a_failed_reconnect(seed: u64) -> bool {
    const FAILED: u64 = 9;
    let sim = world(seed, &format!("lose:c0@v0+2000000 refuse:c0@n0x{FAILED}"));
    let landed = run(&sim, |sim, _session, driver| async move {
        let cluster = sim.cluster();
        let (client, late) = (sim.clone(), Rc::new(Cell::new(false)));
        let seen = Rc::clone(&late);
        let ended = sim.spawn_client(async move {
            let (_session, endpoint) = join(&cluster).await;
            let (op, server) = (endpoint.op(), ServerId::new(1));
            let error = op.write_word(word(1), 7).await.unwrap_err();
            assert_eq!(error, FabricError::Unknown { server });
            let error = endpoint.reconnect(server).await.unwrap_err();
            assert_eq!(error, FabricError::Disconnected { server });
            let refused = op.write_word(word(1), 8).await.unwrap_err();
            assert_eq!(refused, FabricError::Disconnected { server });
            // Nothing is settled: what the driver puts there now may be overwritten.
            driver.op().write_word(word(1), 1).await.unwrap();
            client.sleep(4 * MILLISECOND).await;
            seen.set(driver.op().read_word(word(1)).await.unwrap() == 7);
            for _ in 0..FAILED {
                if endpoint.reconnect(server).await.is_ok() {
                    break;
                }
            }
            driver.op().write_word(word(1), 2).await.unwrap();
            client.sleep(8 * MILLISECOND).await;
            assert_eq!(driver.op().read_word(word(1)).await.unwrap(), 2, "fenced is fenced");
            op.write_word(word(1), 3).await.unwrap();
        });
        ended.await.unwrap();
        late.get()
    });
    assert_eq!(sim.report().counts.failed_reconnects, FAILED);
    landed
}

#[test]
fn a_reconnect_that_fails_settles_nothing() {
    let landed = (0..60).filter(|seed| lands_after_a_failed_reconnect(*seed)).count();
    assert!((1..60).contains(&landed), "{landed} of 60 landed late");
}

const CUT_NS: Nanos = 300 * MICROSECOND;

#[test]
fn a_line_that_is_cut_carries_nothing_until_it_is_whole() {
    let mut happened = [0; 2];
    for seed in 0..60 {
        let sim = world(seed, &format!("cut:c0-m1@{}+{CUT_NS}", 100 * MICROSECOND));
        let landed = run(&sim, |sim, _session, driver| async move {
            let cluster = sim.cluster();
            let client = sim.spawn_client({
                let sim = sim.clone();
                async move {
                    let (_session, endpoint) = join(&cluster).await;
                    let op = endpoint.op();
                    sim.sleep(150 * MICROSECOND - sim.now()).await;
                    let server = ServerId::new(1);
                    // The other line is whole.
                    op.write_word(word(0), 5).await.unwrap();
                    let error = op.write_word(word(1), 5).await.unwrap_err();
                    assert_eq!(error, FabricError::Unknown { server });
                    let landed = driver.op().read_word(word(1)).await.unwrap();
                    let error = endpoint.reconnect(server).await.unwrap_err();
                    assert_eq!(error, FabricError::Disconnected { server });
                    // A call takes as long as the line is cut.
                    op.control(server, &Request::ListChunks { owner: None }).await.unwrap();
                    assert!(sim.now() >= 100 * MICROSECOND + CUT_NS, "at {}", sim.now());
                    endpoint.reconnect(server).await.unwrap();
                    op.write_word(word(1), 6).await.unwrap();
                    landed
                }
            });
            client.await.unwrap()
        });
        happened[usize::from(landed == 5)] += 1;
        assert!(sim.report().counts.failed_reconnects > 0);
    }
    assert!(happened.iter().all(|times| *times > 0), "effects happen or not: {happened:?}");
}

#[test]
fn completions_and_replies_do_not_pass_a_cut_that_comes_later() {
    let mut cut_off = 0;
    for seed in 0..40 {
        let sim = world(seed, &format!("cut:c0-m1@{}+{CUT_NS}", 100 * MICROSECOND));
        run(&sim, |sim, _session, _driver| async move {
            let cluster = sim.cluster();
            let client = sim.spawn_client(async move {
                let (_session, endpoint) = join(&cluster).await;
                // Without a pause, so that something is under way when it is cut.
                for n in 0..400 {
                    if let Err(error) = endpoint.op().write_word(word(1), n).await {
                        assert!(error.is_unknown() || matches!(error, FabricError::Disconnected { .. }));
                        let _ = endpoint.reconnect(ServerId::new(1)).await;
                    }
                }
            });
            client.await.unwrap();
        });
        cut_off += sim.report().counts.cut_off;
    }
    assert!(cut_off > 0, "no completion was on its way when the line was cut");
}

#[test]
fn a_restarted_server_has_its_memory_and_its_sessions_go_on_when_they_have_reconnected() {
    for seed in 0..40 {
        let sim = world(seed, "restart:m1@500000");
        run(&sim, |sim, session, driver| async move {
            let server = ServerId::new(1);
            driver.op().write_word(word(1), 5).await.unwrap();
            sim.sleep(MILLISECOND - sim.now()).await;
            let error = driver.op().write_word(word(1), 6).await.unwrap_err();
            assert_eq!(error, FabricError::Disconnected { server });
            driver.reconnect(server).await.unwrap();
            assert_eq!(driver.op().read_word(word(1)).await.unwrap(), 5);
            driver.op().write_word(word(1), 6).await.unwrap();
            driver.op().control(server, &Request::ListChunks { owner: None }).await.unwrap();
            let listed = session.list(&driver.op()).await.unwrap();
            assert!(
                listed.iter().any(|info| info.session == session.id() && info.state == SessionState::Active)
            );
        });
        assert_eq!(sim.report().counts.restarts, 1);
    }
}

#[test]
fn a_restarted_coordinator_goes_on_with_the_sessions_that_it_finds() {
    for seed in 0..40 {
        let sim = world(seed, "restart:m0@500000");
        run(&sim, |sim, session, driver| async move {
            sim.sleep(MILLISECOND - sim.now()).await;
            let (next, endpoint) = join(&sim.cluster()).await;
            let listed = next.list(&endpoint.op()).await.unwrap();
            let old = listed.iter().find(|info| info.session == session.id()).expect("it is still listed");
            assert_eq!((old.term, old.state), (session.term(), SessionState::Active));
            session.heartbeat(&driver).await.unwrap();
        });
    }
}

/// What the dead have sent may come late: a call, too.
#[test]
fn calls_of_the_dead_come_late_or_not_at_all() {
    let mut happened = [0; 3];
    for seed in 0..200 {
        let sim = world(seed, "kill:c0@v0");
        let (early, late) = run(&sim, |sim, _session, endpoint| async move {
            let cluster = sim.cluster();
            let client = sim.spawn_client(async move {
                let (session, endpoint) = join(&cluster).await;
                let other = session.endpoint().unwrap();
                endpoint.spawn(async move {
                    other.op().control(ServerId::COORDINATOR, &create()).await.unwrap();
                });
                // When the call has left.
                endpoint.sleep(1).await;
                endpoint.op().write_word(word(1), 1).await.unwrap();
            });
            assert!(client.await.is_err());
            let mut seen = Vec::new();
            for _ in 0..2 {
                sim.sleep(40 * MICROSECOND).await;
                let reply =
                    endpoint.op().control(ServerId::COORDINATOR, &Request::ListIndexes {}).await.unwrap();
                let farwood_fabric::control::Reply::Indexes { infos } = reply else { panic!("{reply:?}") };
                seen.push(!infos.is_empty());
                sim.sleep(10 * MILLISECOND).await;
            }
            (seen[0], seen[1])
        });
        happened[match (early, late) {
            (true, _) => 0,
            (false, true) => 1,
            (false, false) => 2,
        }] += 1;
    }
    assert!(happened.iter().all(|times| *times > 5), "in time, late, never: {happened:?}");
}

/// Found with two gateways: one deleted everything and did nothing more, and the other one had no room in an empty pool.
#[test]
fn a_session_that_does_nothing_more_gives_back_what_it_retired() {
    use farwood_index::engine::sphinx::{Config, Sphinx};
    use farwood_index::{Engine, OrderedIndex, Pool};
    let sim = world(3, "");
    let cluster = sim.cluster();
    let world = sim.clone();
    let (before, after) = sim
        .run(async move {
            let pool = Pool::join(&cluster, SessionOptions::default()).await.unwrap();
            let endpoint = pool.session().endpoint().unwrap();
            let engine = Sphinx::new(Config::tiny());
            engine.create(&pool, &endpoint, "new").await.unwrap();
            let attached = engine.attach(&pool, &endpoint, "new").await.unwrap();
            let index = engine.open(&attached, &endpoint, 0).unwrap();
            for key in 0..20u64 {
                index.put(&key.to_be_bytes(), b"value").await.unwrap();
                index.delete(&key.to_be_bytes()).await.unwrap();
            }
            let before = pool.heap().retired();
            pool.keep_alive(&endpoint, 100 * MICROSECOND);
            world.sleep(10 * MILLISECOND).await;
            (before, pool.heap().retired())
        })
        .unwrap();
    assert!(before > 0 && after == 0, "{before} objects waited, {after} still do");
}

/// A client writes and deletes, so that its journal has pages, and loses the completion of a verb and the line after it; somebody else
/// drops the index. How many slots of its board were in use when all had let go of the index; `None` if it had not come to know the
/// index, or did not live.
fn drop_beside_a_lost_verb(verb: u64) -> Option<usize> {
    use farwood_fabric::control::RETIRE_SLOTS;
    use farwood_index::engine::sphinx::{Config, Sphinx};
    use farwood_index::pool::JoinOptions;
    use farwood_index::{Engine, OrderedIndex, Pool};
    let sim = world(5, &format!("lose:c0@v{verb}+100 refuse:c0@n0x1"));
    let (cluster, world) = (sim.cluster(), sim.clone());
    sim.run(async move {
        let pool = Pool::join(&cluster, SessionOptions::default()).await.unwrap();
        let endpoint = pool.session().endpoint().unwrap();
        let mut config = Config::tiny();
        config.sabotage.pages_only = true;
        let engine = Sphinx::new(config);
        engine.create(&pool, &endpoint, "new").await.unwrap();
        let servers = pool.session().servers().to_vec();
        let client = world.spawn_client(async move {
            let options = JoinOptions { mistakes: engine.mistakes(), ..JoinOptions::default() };
            let pool = Pool::join_with(&cluster, options).await.unwrap();
            let endpoint = pool.session().endpoint().unwrap();
            let attached = engine.attach(&pool, &endpoint, "new").await.ok()?;
            let index = engine.open(&attached, &endpoint, 0).unwrap();
            for key in 0..10u64 {
                // What becomes of them when the line fails is not what is asked here.
                let _ = index.put(&key.to_be_bytes(), b"value").await;
                let _ = index.delete(&key.to_be_bytes()).await;
            }
            drop((index, attached));
            pool.keep_alive(&endpoint, 100 * MICROSECOND);
            Some(pool)
        });
        let others = client.await.unwrap()?;
        pool.drop_index(&endpoint, "new").await.unwrap();
        let mut in_use = 0;
        for server in servers {
            let journal = others.session().journal(server).unwrap();
            for slot in 0..RETIRE_SLOTS {
                let word = endpoint.op().read_word(journal.add(slot * 8)).await.unwrap();
                in_use += usize::from(word != 0);
            }
        }
        (!others.session().is_lost()).then_some(in_use)
    })
    .unwrap()
}

/// Found by reading: a clearing that failed half way forgot pages that the board still named, and said the next time that all was clear.
#[test]
fn a_board_names_no_page_of_an_index_that_is_gone() {
    let mut lived = 0;
    for verb in 0..400 {
        if let Some(in_use) = drop_beside_a_lost_verb(verb) {
            assert_eq!(in_use, 0, "slots are in use after the verb {verb} was lost");
            lived += 1;
        }
    }
    assert!(lived > 300, "of 400 clients {lived} lived");
}

/// Found with an idle gateway beside a busy one: a pool with little alive in it was full of what waited for the idle one's heartbeats.
#[test]
fn a_pool_full_of_what_comes_free_in_a_moment_is_not_full() {
    use farwood_index::engine::sphinx::{Config, Sphinx};
    use farwood_index::{Engine, OrderedIndex, Pool};
    let sim = world(7, "");
    let cluster = sim.cluster();
    let idle_beat = 100 * MILLISECOND;
    let allocated = sim
        .run(async move {
            let idle = Pool::join(&cluster, SessionOptions::default()).await.unwrap();
            let on = idle.session().endpoint().unwrap();
            idle.keep_alive(&on, idle_beat);
            let pool = Pool::join(&cluster, SessionOptions::default()).await.unwrap();
            let endpoint = pool.session().endpoint().unwrap();
            pool.keep_alive(&endpoint, MILLISECOND);
            let engine = Sphinx::new(Config::tiny());
            engine.create(&pool, &endpoint, "new").await.unwrap();
            let attached = engine.attach(&pool, &endpoint, "new").await.unwrap();
            let index = engine.open(&attached, &endpoint, 0).unwrap();
            for n in 0..3_000u64 {
                let key = (n % 8).to_be_bytes();
                index.put(&key, b"a value that takes its room").await.unwrap();
                assert!(index.delete(&key).await.unwrap());
            }
            pool.heap().counts().allocated
        })
        .unwrap();
    assert!(allocated >= 3_000, "every value had its own object: {allocated}");
    assert!(marks::count("room_awaited") > 0, "the pool was never full");
}
