//! Pools that are full: deletes work and make room, overwrites go on, and what is refused is refused for good reason.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use farwood_fabric::clock::{MICROSECOND, MILLISECOND, Nanos, SECOND};
use farwood_fabric::procedure::ProcedureSet;
use farwood_fabric::server::ServerLogic;
use farwood_fabric::transport::sim::{Profile, Sim, SimConfig};
use farwood_fabric::{Cluster, Endpoint, ServerId, SessionOptions};
use farwood_index::engine::{sherman, sphinx};
use farwood_index::{AnyEngine, Engine, IndexError, OrderedIndex, Pool};
use farwood_memory::{MemoryServer, ServerConfig};
use fastrand::Rng;
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

const SERVERS: u16 = 2;
fn world(config: SimConfig, chunks: u32, chunk_bytes: u64) -> Sim {
    let server = |n| {
        let config = ServerConfig {
            max_sessions: 8,
            lease_ns: 0,
            chunk_bytes,
            memory_bytes: u64::from(chunks) * chunk_bytes,
            lock_bytes: 16 << 10,
            ..ServerConfig::tiny(ServerId::new(n), SERVERS, chunks)
        };
        Arc::new(MemoryServer::new(config, ProcedureSet::default()).unwrap()) as Arc<dyn ServerLogic>
    };
    Sim::new(config, "".parse().unwrap(), (0..SERVERS).map(server).collect()).unwrap()
}

async fn join(cluster: &Cluster, beat_ns: Nanos) -> (Pool, Endpoint) {
    let pool = Pool::join(cluster, SessionOptions::default()).await.unwrap();
    let endpoint = pool.session().endpoint().unwrap();
    pool.keep_alive(&endpoint, beat_ns);
    (pool, endpoint)
}

fn key(n: u64) -> [u8; 8] {
    n.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes()
}

/// Several sessions fill a pool, then empty it, then one fills it again; how many keys it took each time.
fn filled_twice(engine: AnyEngine, seed: u64, value_bytes: usize) -> (u64, u64) {
    const FILLERS: u64 = 3;
    let sim = world(SimConfig { max_events: 400_000_000, ..SimConfig::adversarial(seed) }, 24, 16 << 10);
    let cluster = sim.cluster();
    sim.run(async move {
        let (pool, endpoint) = join(&cluster, 100 * MICROSECOND).await;
        engine.create(&pool, &endpoint, "full").await.unwrap();
        let mut sessions = Vec::new();
        for _ in 0..FILLERS {
            let (pool, endpoint) = join(&cluster, 100 * MICROSECOND).await;
            let attached = engine.attach(&pool, &endpoint, "full").await.unwrap();
            sessions.push((pool, Rc::new(engine.open(&attached, &endpoint, 0).unwrap()), endpoint));
        }
        let fillers: Vec<_> = (0..FILLERS)
            .zip(&sessions)
            .map(|(filler, (_, index, on))| {
                let index = Rc::clone(index);
                on.spawn(async move {
                    for n in 0.. {
                        match index.put(&key(n * FILLERS + filler), &vec![1; value_bytes]).await {
                            Ok(()) => {}
                            Err(IndexError::PoolFull(_)) => return n,
                            Err(error) => panic!("{error}"),
                        }
                    }
                    0
                })
            })
            .collect();
        let mut counts = Vec::new();
        for filler in fillers {
            counts.push(filler.await.unwrap());
        }
        let emptiers: Vec<_> = (0..FILLERS)
            .zip(&sessions)
            .map(|(filler, (_, index, on))| {
                let (index, count) = (Rc::clone(index), counts[usize::try_from(filler).unwrap()]);
                on.spawn(async move {
                    for n in 0..count {
                        let deleted = index.delete(&key(n * FILLERS + filler)).await;
                        assert!(deleted.unwrap(), "key {n} of {filler}");
                    }
                })
            })
            .collect();
        for emptier in emptiers {
            emptier.await.unwrap();
        }
        let (_, index, on) = &sessions[0];
        on.sleep(MILLISECOND).await;
        let mut again = 0;
        while index.put(&key(again), &vec![2; value_bytes]).await.is_ok() {
            again += 1;
        }
        (counts.iter().sum(), again)
    })
    .unwrap()
}

#[test]
fn deletes_work_in_a_full_pool_and_make_room() {
    let mut sherman = sherman::Config::tiny();
    sherman.value_bytes = 8;
    let engines = [
        ("sphinx", AnyEngine::Sphinx(sphinx::Sphinx::new(sphinx::Config::tiny())), 60),
        ("sphinx", AnyEngine::Sphinx(sphinx::Sphinx::new(sphinx::Config::tiny())), 900),
        ("sherman", AnyEngine::Sherman(sherman::Sherman::new(sherman)), 8),
    ];
    for (name, engine, value_bytes) in engines {
        for seed in 0..3 {
            let (first, again) = filled_twice(engine.clone(), seed, value_bytes);
            println!("{name}, {value_bytes} B: {first}, then {again}");
            assert!(again * 100 >= first * 85, "{name}, {value_bytes} B, seed {seed}: {again} of {first}");
        }
    }
}

/// The length of a value: its leaf has 256 or 320 bytes.
fn any_size(rng: &mut Rng) -> usize {
    if rng.bool() { 200 } else { 260 }
}

/// Overwrites by values of other lengths, so out of place, in a pool of which so much is live; how many there were in the time, and how many were
/// refused. Each client waits so long between two.
fn overwrites(live_percent: u64, time_ns: Nanos, pause_ns: Nanos) -> (u64, u64) {
    const CLIENTS: u64 = 4;
    let mut config = SimConfig::priced(1, Profile::named("cx5-100g").unwrap());
    (config.max_events, config.max_virtual_ns) = (u64::MAX, Nanos::MAX);
    let sim = world(config, 64, 128 << 10);
    let cluster = sim.cluster();
    sim.run(async move {
        let engine = sphinx::Sphinx::new(sphinx::Config::default());
        let (pool, endpoint) = join(&cluster, 5 * MILLISECOND).await;
        engine.create(&pool, &endpoint, "live").await.unwrap();
        let attached = engine.attach(&pool, &endpoint, "live").await.unwrap();
        let index = engine.open(&attached, &endpoint, 0).unwrap();
        let mut rng = Rng::with_seed(7);
        let mut keys = 0;
        while index.put(&key(keys), &vec![1; any_size(&mut rng)]).await.is_ok() {
            keys += 1;
        }
        let live = keys * live_percent / 100;
        for n in live..keys {
            assert!(index.delete(&key(n)).await.unwrap());
        }
        let begin = endpoint.now();
        let (done, refused) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(0)));
        let mut clients = Vec::new();
        for client in 0..CLIENTS {
            let (pool, on) = join(&cluster, 5 * MILLISECOND).await;
            let attached = engine.attach(&pool, &on, "live").await.unwrap();
            let index = engine.open(&attached, &on, 0).unwrap();
            let (done, refused) = (Rc::clone(&done), Rc::clone(&refused));
            clients.push(endpoint.spawn(async move {
                let mut rng = Rng::with_seed(client);
                let _pool = pool;
                while on.now() < begin + time_ns {
                    match index.put(&key(rng.u64(0..live)), &vec![2; any_size(&mut rng)]).await {
                        Ok(()) => done.set(done.get() + 1),
                        Err(IndexError::PoolFull(_)) => refused.set(refused.get() + 1),
                        Err(error) => panic!("{error}"),
                    }
                    if pause_ns > 0 {
                        on.sleep(pause_ns).await;
                    }
                }
            }));
        }
        for client in clients {
            client.await.unwrap();
        }
        (done.get(), refused.get())
    })
    .unwrap()
}

/// In a pool of 16 MiB. The larger a pool, the more objects there are to wait for epochs: 0.84 times as many in one of 32 MiB.
#[test]
fn overwrites_go_on_in_a_pool_that_is_almost_full() {
    let (half, _) = overwrites(50, SECOND / 25, 0);
    let (most, refused) = overwrites(95, SECOND / 25, 0);
    println!("{half} in a pool half empty, {most} in one 95% live, {refused} refused");
    assert_eq!(refused, 0);
    assert!(most * 2 >= half, "{most} of {half}");
}

/// The same for `FARWOOD_VIRTUAL_SECONDS`, an hour of which takes some minutes; a second otherwise.
#[test]
fn overwrites_in_a_pool_that_is_almost_full_are_never_refused() {
    let seconds =
        std::env::var("FARWOOD_VIRTUAL_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    let (done, refused) = overwrites(95, seconds * SECOND, 10 * MILLISECOND);
    println!("{done} overwrites in {seconds} s of virtual time, {refused} refused");
    assert_eq!(refused, 0);
}
