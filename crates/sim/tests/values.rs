//! Values that change in parts, get and lose their last bytes, move, go and come back, while the client that does it dies, or loses a completion,
//! at any verb. Afterwards a key holds what it held or what it was about to hold, and can be worked with as before.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use farwood_fabric::clock::{MICROSECOND, MILLISECOND};
use farwood_fabric::procedure::ProcedureSet;
use farwood_fabric::region::PoolId;
use farwood_fabric::server::ServerLogic;
use farwood_fabric::transport::sim::{Sim, SimConfig};
use farwood_fabric::{Cluster, ServerId, SessionOptions};
use farwood_index::engine::sphinx::{Config, Sphinx};
use farwood_index::{Engine, IndexError, OrderedIndex, Pool};
use farwood_memory::{MemoryServer, ServerConfig};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

const KEY: &[u8] = b"the key";
const STEPS: u8 = 16;

type Value = Option<Vec<u8>>;

fn body(n: u8, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| u8::try_from((at * 31 + usize::from(n) * 7) % 251).unwrap()).collect()
}

/// What the key is to hold after this step, and whether only its last bytes are another.
fn next(step: u8, held: &Value, bytes: usize) -> (Value, bool) {
    let first = body(1, bytes);
    match step % 8 {
        0 | 1 => (Some([first, vec![step; 10]].concat()), true),
        2 => (Some(first), true),
        3 => {
            let mut value = held.clone().unwrap();
            let begin = value.len().saturating_sub(300);
            value[begin..].fill(step);
            (Some(value), false)
        }
        4 => (Some(body(step, bytes)), false),
        5 => (Some(body(step, bytes / 2)), false),
        6 => (None, false),
        _ => (Some(first), false),
    }
}

/// The client that dies. `may` is what the key may hold: what was done, and what was begun.
async fn work(
    cluster: Cluster,
    engine: Sphinx,
    may: &RefCell<Vec<Value>>,
    bytes: usize,
) -> Result<(), IndexError> {
    let pool = Pool::join(&cluster, SessionOptions::default()).await?;
    let endpoint = pool.session().endpoint()?;
    pool.keep_alive(&endpoint, 100 * MICROSECOND);
    let attached = engine.attach(&pool, &endpoint, "new").await?;
    let index = engine.open(&attached, &endpoint, 0)?;
    for step in 0..STEPS {
        let held = may.borrow().last().unwrap().clone();
        let (to, is_end) = next(step, &held, bytes);
        may.borrow_mut().push(to.clone());
        match (&held, &to) {
            (Some(held), Some(to)) if is_end => assert!(index.adjust(KEY, held, to).await?),
            (_, Some(to)) => index.put(KEY, to).await?,
            (_, None) => assert!(index.delete(KEY).await?),
        }
        *may.borrow_mut() = vec![to];
    }
    Ok(())
}

/// Whether the client came to its end.
fn run(seed: u64, plan: &str, bytes: usize, is_immediate: bool) -> bool {
    let mut config = SimConfig::adversarial(seed);
    config.capabilities.immediate = is_immediate;
    let servers = (0..2).map(|n| {
        let config = ServerConfig {
            pool: PoolId(u128::from(seed)),
            lock_bytes: 4096,
            max_sessions: 8,
            lease_ns: MILLISECOND,
            chunk_bytes: 64 << 10,
            memory_bytes: 64 * (64 << 10),
            ..ServerConfig::tiny(ServerId::new(n), 2, 512)
        };
        Arc::new(MemoryServer::new(config, ProcedureSet::default()).unwrap()) as Arc<dyn ServerLogic>
    });
    let sim = Sim::new(config, plan.parse().unwrap(), servers.collect()).unwrap();
    let (cluster, world, plan) = (sim.cluster(), sim.clone(), plan.to_owned());
    sim.run(async move {
        let pool = Pool::join(&cluster, SessionOptions::default()).await.unwrap();
        let endpoint = pool.session().endpoint().unwrap();
        pool.keep_alive(&endpoint, 100 * MICROSECOND);
        let engine = Sphinx::new(Config::tiny());
        engine.create(&pool, &endpoint, "new").await.unwrap();
        let attached = engine.attach(&pool, &endpoint, "new").await.unwrap();
        let index = engine.open(&attached, &endpoint, 0).unwrap();
        index.put(KEY, &body(1, bytes)).await.unwrap();
        index.put(b"the keys", b"beside").await.unwrap();
        let may = Rc::new(RefCell::new(vec![Some(body(1, bytes))]));
        let is_done = Rc::new(Cell::new(false));
        let _client = world.spawn_client({
            let (engine, may, is_done) = (engine.clone(), Rc::clone(&may), Rc::clone(&is_done));
            async move {
                match work(cluster, engine, &may, bytes).await {
                    Ok(()) => is_done.set(true),
                    Err(
                        IndexError::Unknown | IndexError::Fenced | IndexError::Fabric(_) | IndexError::Closed,
                    ) => {}
                    Err(error) => panic!("{error}"),
                }
            }
        });
        // Half of the time somebody looks at what is under way.
        for _ in 0..if seed % 2 == 0 { 40 } else { 0 } {
            let seen = index.get(KEY).await.unwrap();
            assert!(seen.is_none_or(|seen| seen.len() >= bytes / 2), "{plan}");
        }
        world.sleep(10 * MILLISECOND).await;
        let seen = index.get(KEY).await.unwrap();
        assert!(may.borrow().contains(&seen), "{plan}: it holds what nobody wrote");
        if let Some(seen) = &seen {
            let to = [&seen[..seen.len().min(bytes)], &[9; 10]].concat();
            assert!(index.adjust(KEY, seen, &to).await.unwrap(), "{plan}");
            assert_eq!(index.get(KEY).await.unwrap(), Some(to), "{plan}");
        }
        index.put(KEY, &body(99, bytes)).await.unwrap();
        assert_eq!(index.get(KEY).await.unwrap(), Some(body(99, bytes)), "{plan}");
        assert!(index.delete(KEY).await.unwrap(), "{plan}");
        world.sleep(5 * MILLISECOND).await;
        assert_eq!(index.get(KEY).await.unwrap(), None, "{plan}: it came back");
        is_done.get()
    })
    .unwrap()
}

#[test]
fn a_client_that_dies_at_any_verb_leaves_a_key_that_works() {
    let [mut done, mut died] = [0; 2];
    for (bytes, is_immediate) in
        [100, 700, 3000].into_iter().flat_map(|bytes| [(bytes, false), (bytes, true)])
    {
        for verb in (0..260).chain((260..700).step_by(9)) {
            let count = if run(verb + 1_000, &format!("kill:c0@v{verb}"), bytes, is_immediate) {
                &mut done
            } else {
                &mut died
            };
            *count += 1;
        }
    }
    assert!(done > 100 && died > 1_000, "{done} done, {died} died");
}

#[test]
fn a_lost_completion_at_any_verb_leaves_a_key_that_works() {
    for (bytes, is_immediate) in [100, 3000].into_iter().flat_map(|bytes| [(bytes, false), (bytes, true)]) {
        for verb in (0..500).step_by(4) {
            run(verb + 2_000, &format!("lose:c0@v{verb}+3000"), bytes, is_immediate);
            run(verb + 3_000, &format!("lose:c0@v{verb}+100000 refuse:c0@n0x2"), bytes, is_immediate);
        }
    }
}
