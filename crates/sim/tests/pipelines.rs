//! Pipelines: writes of one task that are under way together take effect in their order, for whoever looks from another session.
//!
//! A writer puts the same number into all keys, in order, as one pipeline, round after round. A reader goes through the keys from the
//! last to the first, each after the answer for the one before: a key must hold what the key behind it held, or something newer.

use farwood_fabric::clock::{MICROSECOND, MILLISECOND};
use farwood_fabric::pipeline::{Boxes, Freedom, Order, Pipeline};
use farwood_fabric::procedure::ProcedureSet;
use farwood_fabric::region::PoolId;
use farwood_fabric::server::ServerLogic;
use farwood_fabric::transport::sim::{FaultPlan, Sim, SimConfig};
use farwood_fabric::{Endpoint, ServerId, SessionOptions, marks};
use farwood_index::engine::sherman::{self, Sherman};
use farwood_index::engine::sphinx::{self, Sphinx};
use farwood_index::{Engine, IndexError, OrderedIndex, Pool};
use farwood_memory::{MemoryServer, ServerConfig};
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;

const KEYS: u64 = 12;
const ROUNDS: u64 = 60;
const HEARTBEAT_NS: u64 = 100 * MICROSECOND;

/// What is tried.
#[derive(Clone, Copy)]
struct World {
    seed: u64,
    order: Order,
    /// Values of so many bytes are long: they are moved only when the pipeline says so.
    long_bytes: Option<usize>,
    is_immediate: bool,
    chunks: u32,
    /// Values have from so many to so many bytes.
    value_bytes: (usize, usize),
}

/// What the reader saw.
#[derive(Default, Debug)]
struct Seen {
    /// Times that a key held something else than the one behind it: the writer was just between them.
    between: Cell<u64>,
    /// Times that it held something older.
    reversed: Cell<u64>,
}

fn key(n: u64) -> [u8; 8] {
    // Neighbours in the pipeline are not neighbours in the tree.
    n.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes()
}

fn value(world: World, round: u64, n: u64) -> Vec<u8> {
    let (least, most) = world.value_bytes;
    let bytes = least + usize::try_from((round * 7 + n * 3) % (most - least + 1) as u64).expect("small");
    let mut value = round.to_be_bytes().to_vec();
    value.resize(bytes, 0);
    value
}

/// Puts a number into all keys, as one pipeline.
async fn write<I: OrderedIndex>(
    index: &I,
    endpoint: &Endpoint,
    world: World,
    round: u64,
) -> Result<(), IndexError> {
    let pairs: Vec<_> = (0..KEYS).map(|n| (key(n), value(world, round, n))).collect();
    let boxes = Boxes::new(endpoint.company());
    let mut pipeline =
        if world.long_bytes.is_some() { Pipeline::limited(boxes) } else { Pipeline::new(boxes) };
    let mut result = Ok(());
    std::future::poll_fn(|context| {
        for (key, value) in &pairs {
            if let Some((done, ())) =
                pipeline.start(|| index.put(key, value), ((), world.order, Freedom::Limited), true, context)
            {
                result = std::mem::replace(&mut result, Ok(())).and(done);
            }
        }
        Poll::Ready(())
    })
    .await;
    std::future::poll_fn(|context| {
        pipeline.advance(context, |done, ()| result = std::mem::replace(&mut result, Ok(())).and(done));
        if pipeline.asking().is_some() {
            pipeline.free();
            context.waker().wake_by_ref();
        }
        if pipeline.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    result
}

async fn read<I: OrderedIndex>(index: &I, seen: &Seen) -> Result<(), IndexError> {
    let mut behind = 0;
    for n in (0..KEYS).rev() {
        let value = index.get(&key(n)).await?;
        let round = value.and_then(|value| Some(u64::from_be_bytes(*value.first_chunk::<8>()?))).unwrap_or(0);
        if round != behind && n + 1 < KEYS {
            seen.between.set(seen.between.get() + 1);
        }
        if round < behind {
            seen.reversed.set(seen.reversed.get() + 1);
        }
        behind = round;
    }
    Ok(())
}

fn run<E: Engine>(engine: &E, world: World) -> Result<Seen, IndexError> {
    marks::reset();
    let mut config = SimConfig::adversarial(world.seed);
    config.capabilities.immediate = world.is_immediate;
    config.max_events = 50_000_000;
    let servers = (0..2).map(|n| {
        let config = ServerConfig {
            pool: PoolId(u128::from(world.seed)),
            lock_bytes: 4096,
            max_sessions: 8,
            lease_ns: 10 * MILLISECOND,
            ..ServerConfig::tiny(ServerId::new(n), 2, world.chunks)
        };
        Arc::new(MemoryServer::new(config, ProcedureSet::default()).expect("valid")) as Arc<dyn ServerLogic>
    });
    let sim = Sim::new(config, FaultPlan::default(), servers.collect()).expect("it starts");
    let (cluster, engine) = (sim.cluster(), engine.clone());
    let ended = sim.run(async move {
        let writer = Pool::join(&cluster, SessionOptions::default()).await?;
        let endpoint = writer.session().endpoint()?;
        if let Some(bytes) = world.long_bytes {
            endpoint.company().set_long_bytes(bytes);
        }
        writer.keep_alive(&endpoint, HEARTBEAT_NS);
        engine.create(&writer, &endpoint, "tried").await?;
        let index = engine.open(&engine.attach(&writer, &endpoint, "tried").await?, &endpoint, 0)?;
        let seen = Rc::new(Seen::default());
        let is_over = Rc::new(Cell::new(false));
        let reader = endpoint.spawn({
            let (seen, is_over, cluster, engine) =
                (Rc::clone(&seen), Rc::clone(&is_over), cluster.clone(), engine.clone());
            async move {
                let pool = Pool::join(&cluster, SessionOptions::default()).await?;
                let endpoint = pool.session().endpoint()?;
                pool.keep_alive(&endpoint, HEARTBEAT_NS);
                let index = engine.open(&engine.attach(&pool, &endpoint, "tried").await?, &endpoint, 0)?;
                while !is_over.get() {
                    read(&index, &seen).await?;
                }
                Ok::<_, IndexError>(())
            }
        });
        for round in 1..=ROUNDS {
            write(&index, &endpoint, world, round).await?;
        }
        is_over.set(true);
        reader.await.unwrap_or(Err(IndexError::Unknown))?;
        for n in 0..KEYS {
            assert_eq!(index.get(&key(n)).await?, Some(value(world, ROUNDS, n)), "all are done");
        }
        Ok::<_, IndexError>(Rc::into_inner(seen).expect("the reader has ended"))
    });
    ended.map_err(|stop| IndexError::Corrupt { what: stop.to_string() })?
}

/// Runs worlds until they show what is looked for, at most so many.
fn totals<E: Engine>(engine: &E, world: World, seeds: u64) -> (u64, u64) {
    let (mut between, mut reversed) = (0, 0);
    for seed in 0..seeds {
        let seen = run(engine, World { seed, ..world }).expect("nothing fails");
        between += seen.between.get();
        reversed += seen.reversed.get();
    }
    (between, reversed)
}

fn sphinx() -> Sphinx {
    Sphinx::new(sphinx::Config::tiny())
}

fn worlds() -> impl Iterator<Item = World> {
    [false, true].into_iter().map(|is_immediate| World {
        seed: 0,
        order: Order::InTurn,
        long_bytes: None,
        is_immediate,
        chunks: 256,
        value_bytes: (8, 40),
    })
}

#[test]
fn writes_of_a_pipeline_take_effect_in_order_in_sphinx() {
    for world in worlds() {
        let (between, reversed) = totals(&sphinx(), world, 20);
        assert!(between > 100, "the reader raced {between} times");
        assert_eq!(reversed, 0, "of {between}, immediate: {}", world.is_immediate);
    }
}

#[test]
fn writes_of_a_pipeline_take_effect_in_order_in_sherman() {
    for world in worlds() {
        let engine = Sherman::new(sherman::Config::default());
        let (between, reversed) = totals(&engine, World { value_bytes: (8, 8), ..world }, 20);
        assert!(between > 100, "the reader raced {between} times");
        assert_eq!(reversed, 0, "of {between}, immediate: {}", world.is_immediate);
    }
}

/// They begin anew when they may fetch the long value that they have met, and come to their end in their order.
#[test]
fn writes_that_meet_long_values_wait_for_leave_and_keep_their_order() {
    for world in worlds() {
        let (mut between, mut asked) = (0, 0);
        for seed in 0..20 {
            let world = World { seed, long_bytes: Some(96), value_bytes: (8, 100), ..world };
            let seen = run(&sphinx(), world).expect("nothing fails");
            assert_eq!(seen.reversed.get(), 0, "seed {seed}, immediate: {}", world.is_immediate);
            between += seen.between.get();
            asked += marks::count("long_value_awaited");
        }
        assert!(between > 100 && asked > 100, "the reader raced {between} times, {asked} asked");
    }
}

/// The reader finds out if they do not.
#[test]
fn writes_that_are_free_are_seen_out_of_order() {
    for world in worlds() {
        let (_, reversed) = totals(&sphinx(), World { order: Order::Free, ..world }, 20);
        assert!(reversed > 0, "immediate: {}", world.is_immediate);
    }
}

/// What the first write needs is free when those behind it have let go of their pins.
#[test]
fn a_full_pool_does_not_make_a_pipeline_wait_for_itself() {
    let mut awaited = 0;
    for seed in 0..20 {
        let world =
            World { seed, chunks: 16, value_bytes: (1100, 1400), ..worlds().next().expect("a world") };
        run(&sphinx(), world).expect("there is room");
        awaited += marks::count("turn_awaited");
    }
    assert!(awaited > 0, "those behind gave way {awaited} times");
}
