//! The operations of a trial on real transports: threads of several sessions, in one process or several, whose histories are judged
//! like those of a simulated world.
//!
//! 1. Somebody [`prepare`]s the index, and beside it a word in far memory that gives all stamps of the history.
//! 2. Each process lets a [`Crew`] [`work`]: all begin when all are there. Before and after each operation a client takes a stamp by FAA, so
//!    that what ended before another began has the smaller stamps, whichever process they were in. No clock is involved.
//! 3. Somebody [`judge`]s the operations of all together, and the tree and memory that they left.

use crate::check::{self, leaks};
use crate::history::{History, Operation};
use crate::mix::{self, Mix};
use crate::spelling::Spelling;
use crate::trial::{Failure, join_options};
use farwood_fabric::clock::{MILLISECOND, Nanos, SECOND};
use farwood_fabric::{Cluster, Endpoint, Executor, GlobalAddr, marks};
use farwood_index::engine::PLAIN;
use farwood_index::{Engine, IndexError, Pool};
use std::collections::BTreeMap;

/// What the index is called, and what has the word for stamps, the one for those who have come and the one for sessions that are done.
const INDEX: &str = "tried";
const STAMPS: &str = "stamps";
const STAMP_AT: u64 = 0;
const CAME_AT: u64 = 8;
const DONE_AT: u64 = 16;
const HEARTBEAT_NS: Nanos = 2 * MILLISECOND;
/// How long clients wait for those of other processes.
const PATIENCE_NS: Nanos = 60 * SECOND;

/// The clients of one process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Crew {
    /// Which process this is, and of how many; all have as many clients.
    pub process: (u32, u32),
    /// Everything random comes from it.
    pub seed: u64,
    /// Sessions of this process.
    pub sessions: u32,
    /// Threads of each.
    pub threads: u16,
    /// Operations of each.
    pub ops: u32,
    /// Keys, from 0.
    pub keys: u64,
    /// How they are spelled.
    pub spelling: Spelling,
}

/// What a crew did.
#[derive(Clone, Default, Debug)]
pub struct Done {
    /// What its clients were told.
    pub operations: Vec<Operation>,
    /// Which rare paths ran, and how often.
    pub marks: BTreeMap<&'static str, u64>,
}

impl Done {
    fn add(&mut self, other: Self) {
        self.operations.extend(other.operations);
        for (mark, hits) in other.marks {
            *self.marks.entry(mark).or_default() += hits;
        }
    }
}

/// Creates the index that is to be tried.
pub fn prepare<E: Engine>(engine: &E, cluster: &Cluster) -> Result<(), IndexError> {
    on_a_session(engine, cluster, async |pool, endpoint| {
        engine.create(pool, endpoint, INDEX).await?;
        let op = endpoint.op();
        let stamps = pool.create_index(&op, STAMPS, PLAIN, &[]).await?;
        Ok(pool.index_ready(&op, stamps.id).await?)
    })
}

/// Judges what the crews of all processes did, and what they left.
pub fn judge<E: Engine>(engine: &E, cluster: &Cluster, operations: Vec<Operation>) -> Result<(), Failure> {
    let measured = on_a_session(engine, cluster, async |pool, endpoint| {
        let attached = engine.attach(pool, endpoint, INDEX).await?;
        // Who left while others could still reach what it had retired has left that to be inherited.
        while pool.session().list(&endpoint.op()).await?.len() > 1 {
            endpoint.sleep(HEARTBEAT_NS).await;
        }
        let reachable = engine.check(&attached, endpoint).await?;
        pool.heap().close(endpoint).await?;
        Ok(leaks::measure(pool.session(), endpoint, &reachable).await?)
    });
    let usage = measured.map_err(Failure::Structure)?;
    check::all(&History::of(operations)).map_err(Failure::History)?;
    // Everybody has left as one should, so nothing may be lost.
    if usage.dangling.is_empty() && usage.leaked.is_empty() && usage.lost_chunks == 0 {
        Ok(())
    } else {
        Err(Failure::Memory { usage, may_leak: 0 })
    }
}

fn on_a_session<T>(
    engine: &impl Engine,
    cluster: &Cluster,
    work: impl AsyncFnOnce(&Pool, &Endpoint) -> Result<T, IndexError>,
) -> Result<T, IndexError> {
    let executor = Executor::new();
    let result = executor.block_on(async {
        let pool = Pool::join_with(cluster, join_options(engine)).await?;
        let endpoint = pool.session().endpoint()?;
        pool.keep_alive(&endpoint, HEARTBEAT_NS);
        let result = work(&pool, &endpoint).await?;
        pool.leave(&endpoint).await?;
        Ok(result)
    });
    executor.clear();
    result
}

/// Lets a crew work; returns when all of it are done. The first error of any ends the trial.
pub fn work<E: Engine>(engine: &E, cluster: &Cluster, crew: &Crew) -> Result<Done, Failure> {
    std::thread::scope(|scope| {
        let sessions: Vec<_> = (0..crew.sessions)
            .map(|session| scope.spawn(move || one_session(engine, cluster, crew, session)))
            .collect();
        let mut all = Done::default();
        for session in sessions {
            all.add(session.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?);
        }
        Ok(all)
    })
}

/// A session and its threads. This thread keeps the lease and the epochs going.
fn one_session<E: Engine>(engine: &E, cluster: &Cluster, crew: &Crew, session: u32) -> Result<Done, Failure> {
    let executor = Executor::new();
    let joined = executor.block_on(async {
        let pool = Pool::join_with(cluster, join_options(engine)).await?;
        let endpoint = pool.session().endpoint()?;
        pool.keep_alive(&endpoint, HEARTBEAT_NS);
        let attached = engine.attach(&pool, &endpoint, INDEX).await?;
        let stamps = pool.open_index(&endpoint.op(), STAMPS, None).await?;
        Ok::<_, IndexError>((pool, endpoint, attached, stamps.anchor))
    });
    let (pool, endpoint, attached, stamps) = joined.map_err(Failure::Structure)?;
    let done = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..crew.threads)
            .map(|thread| {
                let (pool, attached) = (&pool, &attached);
                scope.spawn(move || one_thread(engine, (pool, attached, stamps), crew, (session, thread)))
            })
            .collect();
        executor.block_on(async {
            while !threads.iter().all(std::thread::ScopedJoinHandle::is_finished) {
                endpoint.sleep(MILLISECOND).await;
            }
        });
        let mut all = Done::default();
        for thread in threads {
            all.add(thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?);
        }
        Ok(all)
    });
    // Together: whoever leaves while others hold on to what it retired loses what has no room in its journal.
    let left = executor.block_on(async {
        wait_for_all(&endpoint, stamps.add(DONE_AT), crew.process.1 * crew.sessions).await?;
        Ok(pool.leave(&endpoint).await?)
    });
    executor.clear();
    left.map_err(Failure::Structure)?;
    done
}

fn one_thread<E: Engine>(
    engine: &E,
    (pool, attached, stamps): (&Pool, &E::Attached, GlobalAddr),
    crew: &Crew,
    (session, thread): (u32, u16),
) -> Result<Done, Failure> {
    let threads = u32::from(crew.threads);
    let client = (crew.process.0 * crew.sessions + session) * threads + u32::from(thread);
    let clients = crew.process.1 * crew.sessions * threads;
    marks::reset();
    let executor = Executor::new();
    let operations = executor.block_on(async {
        let ready = async {
            let endpoint = pool.session().endpoint()?;
            let index = engine.open(attached, &endpoint, thread)?;
            wait_for_all(&endpoint, stamps.add(CAME_AT), clients).await?;
            Ok::<_, IndexError>((endpoint, index))
        };
        let (endpoint, index) = ready.await.map_err(Failure::Structure)?;
        let mix = Mix::new(crew.seed ^ u64::from(client) << 32, crew.keys, engine.value_bytes());
        let mut mix = mix.spelled(crew.spelling).ahead(client);
        let mut values = u64::from(client) << 32;
        let mut operations = Vec::new();
        for left in (1..=crew.ops).rev() {
            let action = mix.draw(left, &mut values);
            let done = async {
                let invoked = stamp(&endpoint, stamps).await?;
                let outcome = mix::execute(&index, &action).await?;
                Ok((invoked, outcome, stamp(&endpoint, stamps).await?))
            };
            let (invoked, outcome, responded) = done
                .await
                .map_err(|error: IndexError| Failure::Operation { action: action.to_string(), error })?;
            mix.note(&action, &outcome);
            let (responded, outcome) = (Some(responded), Some(outcome));
            operations.push(Operation { client, invoked, responded, action, outcome });
        }
        Ok(operations)
    });
    executor.clear();
    Ok(Done { operations: operations?, marks: marks::snapshot() })
}

async fn stamp(endpoint: &Endpoint, stamps: GlobalAddr) -> Result<u64, IndexError> {
    Ok(endpoint.op().faa(stamps.add(STAMP_AT), 1).await? + 1)
}

/// Says at `word` that somebody is there, and waits until all are.
async fn wait_for_all(endpoint: &Endpoint, word: GlobalAddr, all: u32) -> Result<(), IndexError> {
    endpoint.op().faa(word, 1).await?;
    let deadline = endpoint.now() + PATIENCE_NS;
    while endpoint.op().read_word(word).await? < u64::from(all) {
        if endpoint.now() > deadline {
            return Err(IndexError::Contended { what: "all clients of a trial", attempts: 1 });
        }
        endpoint.sleep(MILLISECOND).await;
    }
    Ok(())
}
