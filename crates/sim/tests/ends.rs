//! Scans for the last bytes of values: every key that stays, in order and once, while values are rewritten beside them; and no more is read
//! than that takes.

use farwood_fabric::clock::{MICROSECOND, MILLISECOND};
use farwood_fabric::procedure::ProcedureSet;
use farwood_fabric::region::PoolId;
use farwood_fabric::server::ServerLogic;
use farwood_fabric::transport::sim::{FaultPlan, Sim, SimConfig};
use farwood_fabric::{ServerId, SessionOptions};
use farwood_index::engine::sherman::{self, Sherman};
use farwood_index::engine::sphinx::{self, Sphinx};
use farwood_index::{Engine, IndexError, OrderedIndex, Pool};
use farwood_memory::{MemoryServer, ServerConfig};
use std::cell::Cell;
use std::ops::Bound;
use std::rc::Rc;
use std::sync::Arc;

const KEYS: u64 = 60;
const END_BYTES: usize = 10;

/// What is stored where.
#[derive(Clone, Copy)]
struct Shape {
    key_bytes: fn(u64) -> usize,
    value_bytes: fn(u64) -> usize,
}

fn key(shape: Shape, n: u64) -> Vec<u8> {
    let mut key = n.to_be_bytes().to_vec();
    key.resize((shape.key_bytes)(n), b'k');
    key
}

fn value(shape: Shape, n: u64, round: u64) -> Vec<u8> {
    let mut value = vec![0; (shape.value_bytes)(n + round)];
    value
        .iter_mut()
        .enumerate()
        .for_each(|(at, byte)| *byte = u8::try_from((at as u64 + n + round) % 251).expect("a byte"));
    value
}

/// How many bytes a scan for ends reads, and one for values.
fn run<E: Engine>(engine: &E, shape: Shape, is_immediate: bool, seed: u64) -> Result<(u64, u64), IndexError> {
    let mut config = SimConfig::adversarial(seed);
    config.capabilities.immediate = is_immediate;
    config.max_events = 50_000_000;
    let servers = (0..2).map(|n| {
        let config = ServerConfig {
            pool: PoolId(u128::from(seed)),
            lock_bytes: 4096,
            max_sessions: 8,
            lease_ns: 10 * MILLISECOND,
            chunk_bytes: 64 << 10,
            memory_bytes: 256 * (64 << 10),
            ..ServerConfig::tiny(ServerId::new(n), 2, 512)
        };
        Arc::new(MemoryServer::new(config, ProcedureSet::default()).expect("valid")) as Arc<dyn ServerLogic>
    });
    let sim = Sim::new(config, FaultPlan::default(), servers.collect()).expect("it starts");
    let (cluster, engine) = (sim.cluster(), engine.clone());
    let ended = sim.run(async move {
        let pool = Pool::join(&cluster, SessionOptions::default()).await?;
        let endpoint = pool.session().endpoint()?;
        pool.keep_alive(&endpoint, 100 * MICROSECOND);
        engine.create(&pool, &endpoint, "tried").await?;
        let attached = engine.attach(&pool, &endpoint, "tried").await?;
        let index = engine.open(&attached, &endpoint, 0)?;
        for n in 0..KEYS {
            index.put(&key(shape, n), &value(shape, n, 0)).await?;
        }
        let is_over = Rc::new(Cell::new(false));
        let writer = endpoint.spawn({
            let (is_over, index) = (Rc::clone(&is_over), engine.open(&attached, &endpoint, 1)?);
            async move {
                let mut round = 0;
                while !is_over.get() {
                    round += 1;
                    for n in 0..KEYS {
                        index.put(&key(shape, n), &value(shape, n, round)).await?;
                    }
                }
                Ok::<_, IndexError>(round)
            }
        });
        for reverse in [false, true].repeat(10) {
            let mut keys = Vec::new();
            let mut each = |key: &[u8], end: &[u8]| {
                assert!(end.len() <= END_BYTES);
                keys.push(key.to_vec());
                true
            };
            let range = (Bound::Unbounded, Bound::Unbounded);
            let count = index.scan_ends(range, usize::MAX, reverse, END_BYTES, &mut each).await?;
            if reverse {
                keys.reverse();
            }
            assert_eq!((count, keys), (60, (0..KEYS).map(|n| key(shape, n)).collect()));
        }
        is_over.set(true);
        assert!(writer.await.unwrap_or(Err(IndexError::Unknown))? > 0, "values were rewritten meanwhile");
        let (mut ends, mut values) = (Vec::new(), Vec::new());
        let (start, end) = (Bound::Included(key(shape, 7)), Bound::Excluded(key(shape, 50)));
        let range = (start.as_ref().map(Vec::as_slice), end.as_ref().map(Vec::as_slice));
        let begun = endpoint.totals().bytes_read;
        let mut each = |key: &[u8], end: &[u8]| {
            ends.push((key.to_vec(), end.to_vec()));
            ends.len() < 40
        };
        index.scan_ends(range, usize::MAX, false, END_BYTES, &mut each).await?;
        let between = endpoint.totals().bytes_read;
        let mut each = |key: &[u8], value: &[u8]| {
            values.push((key.to_vec(), value[value.len() - value.len().min(END_BYTES)..].to_vec()));
            true
        };
        index.scan_with(range.0, range.1, 40, false, &mut each).await?;
        assert!(ends.len() == 40 && ends == values);
        Ok::<_, IndexError>((between - begun, endpoint.totals().bytes_read - between))
    });
    ended.map_err(|stop| IndexError::Corrupt { what: stop.to_string() })?
}

#[test]
fn ends_are_those_of_all_values_and_little_is_read() {
    let sphinx = Sphinx::new(sphinx::Config::tiny());
    let mixed = Shape {
        key_bytes: |n| if n % 7 == 0 { 700 } else { 8 + usize::try_from(n % 90).expect("few") },
        value_bytes: |n| usize::try_from(n * 37 % 900).expect("few"),
    };
    let long = Shape { key_bytes: |_| 12, value_bytes: |_| 6000 };
    // Nothing is to be read behind long keys whose values are empty.
    let empty = Shape {
        key_bytes: |n| 400 + usize::try_from(n % 9).expect("few"),
        value_bytes: |n| usize::try_from(n % 3 * 4).expect("few"),
    };
    for is_immediate in [false, true] {
        for seed in 0..8 {
            run(&sphinx, mixed, is_immediate, seed).expect("nothing fails");
            run(&sphinx, empty, is_immediate, seed).expect("nothing fails");
            let (ends, values) = run(&sphinx, long, is_immediate, seed).expect("nothing fails");
            assert!(ends * 8 < values, "{ends} of {values}");
        }
    }
    let sherman = Sherman::new(sherman::Config::default());
    let fixed = Shape { key_bytes: |_| 8, value_bytes: |_| 8 };
    run(&sherman, fixed, false, 1).expect("nothing fails");
}
