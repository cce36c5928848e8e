//! What client processes do until they are ended.

use super::world::{AT_WORK, connect};
use farwood_fabric::clock::{MILLISECOND, Nanos, SECOND};
use farwood_fabric::{
    Batch, CallError, Cluster, Endpoint, Executor, FabricError, GlobalAddr, RegionId, ServerId, Session,
    SessionOptions,
};
use farwood_index::{Engine, Index, IndexError, OrderedIndex, Pool};
use farwood_sim::reference::Bugs;
use farwood_sim::reference::cells::Cells;
use farwood_sim::reference::records::Records;

/// What the index is called.
pub(crate) const INDEX: &str = "tried";
/// How many keys the structures have.
pub(crate) const KEYS: u64 = 64;
/// How often clients renew their lease.
pub(crate) const HEARTBEAT_NS: Nanos = 2 * MILLISECOND;

pub(crate) fn cells() -> Cells {
    Cells { keys: KEYS, bugs: Bugs::default() }
}

pub(crate) fn records() -> Records {
    Records { keys: KEYS, bugs: Bugs::default() }
}

pub(crate) fn play(part: &str) {
    let (part, place) = part.split_once(' ').expect("a part and a place");
    if part == "cut-off" {
        return super::hosts::cut_off(place);
    }
    if part == "crowd" {
        return super::crowd::play(place);
    }
    if let Some(crew) = part.strip_prefix("mixed/") {
        return super::mixed::play(crew, place);
    }
    let cluster = connect(place).expect("a pool");
    let executor = Executor::new();
    let ended = match part {
        "cells" => executor.block_on(keep_writing(&cells(), &cluster)).map_err(|e| e.to_string()),
        "records" => executor.block_on(keep_writing(&records(), &cluster)).map_err(|e| e.to_string()),
        "trees" => executor.block_on(keep_growing(&cluster)).map_err(|e| e.to_string()),
        "idle" => executor.block_on(idle(&cluster)).map_err(|e| e.to_string()),
        "scribbler" => executor.block_on(keep_scribbling(&cluster)).map_err(|e| e.to_string()),
        _ => panic!("no such part: {part}"),
    };
    executor.clear();
    if let Err(why) = ended {
        eprintln!("{part}: {why}");
        std::process::exit(1);
    }
}

pub(crate) fn say_at_work() {
    println!("\n{AT_WORK}");
}

/// Two trees: one with its locks in lock memory, one in main memory.
pub(crate) const TREES: [(&str, &str); 2] = [("one", "sherman"), ("other", "fg+")];
/// How many keys they have.
pub(crate) const TREE_KEYS: u64 = 2000;

/// Writes to and deletes from two trees at random, several tasks at a time, for ever.
async fn keep_growing(cluster: &Cluster) -> Result<(), IndexError> {
    let pool = Pool::join(cluster, SessionOptions::default()).await?;
    let endpoint = pool.session().endpoint()?;
    pool.keep_alive(&endpoint, HEARTBEAT_NS);
    let mut tasks = Vec::new();
    for (name, _) in TREES {
        let tree = Index::open(&pool, &endpoint, name).await?;
        for _ in 0..4 {
            let (handle, endpoint) = (tree.handle(&endpoint)?, endpoint.clone());
            tasks.push(endpoint.clone().spawn(async move {
                loop {
                    let key = endpoint.random_below(TREE_KEYS).to_be_bytes();
                    let done = match endpoint.random_below(3) {
                        0 => handle.delete(&key).await.map(drop),
                        _ => handle.put(&key, &endpoint.random().to_be_bytes()).await,
                    };
                    if let Err(error) = done {
                        return error;
                    }
                }
            }));
        }
    }
    say_at_work();
    // None of them ends by itself.
    let first = tasks.remove(0);
    Err(first.await.unwrap_or(IndexError::Unknown))
}

/// Has connections and does nothing with them, but lives.
async fn idle(cluster: &Cluster) -> Result<(), FabricError> {
    let session = Session::open(cluster, SessionOptions::default()).await?;
    let endpoints: Vec<Endpoint> =
        (0..super::idle::CONNECTIONS).map(|_| session.endpoint()).collect::<Result<_, _>>()?;
    session.keep_alive(&endpoints[0], session.lease_ns() / 4);
    for endpoint in &endpoints {
        endpoint.op().read_word(area(ServerId::COORDINATOR, 0)).await?;
    }
    say_at_work();
    loop {
        endpoints[0].sleep(3600 * SECOND).await;
    }
}

/// Writes and deletes at random, for ever.
async fn keep_writing<E: Engine>(engine: &E, cluster: &Cluster) -> Result<(), IndexError> {
    let pool = Pool::join(cluster, SessionOptions::default()).await?;
    let endpoint = pool.session().endpoint()?;
    pool.keep_alive(&endpoint, HEARTBEAT_NS);
    let attached = engine.attach(&pool, &endpoint, INDEX).await?;
    let index = engine.open(&attached, &endpoint, 0)?;
    say_at_work();
    loop {
        let key = endpoint.random_below(KEYS).to_be_bytes();
        match endpoint.random_below(4) {
            0 => drop(index.delete(&key).await?),
            _ => index.put(&key, &endpoint.random().to_be_bytes()).await?,
        }
    }
}

/// Bytes of main memory in which one life of the scribbler writes, on each server.
pub(crate) const AREA_BYTES: u64 = 128 << 10;
/// How many areas there are: a life writes into the one of its term.
pub(crate) const AREAS: u64 = 8;
const BLOCK_BYTES: usize = 64 << 10;
/// Where the areas begin. Nobody else uses the pool, so that the memory need not be asked for.
const AREAS_AT: u64 = 4096;

pub(crate) fn area(server: ServerId, term: u64) -> GlobalAddr {
    GlobalAddr::new(server, RegionId::MAIN, AREAS_AT + term % AREAS * AREA_BYTES)
}

/// Writes everywhere in its area without a pause; when it is fenced, it begins again with a new session.
async fn keep_scribbling(cluster: &Cluster) -> Result<(), FabricError> {
    let mut said = false;
    loop {
        let session = match Session::open(cluster, SessionOptions::default()).await {
            // Those who were fenced and not yet buried take up room.
            Err(FabricError::Call(CallError::Control(_))) => continue,
            session => session?,
        };
        let endpoint = session.endpoint()?;
        session.keep_alive(&endpoint, HEARTBEAT_NS);
        if !said {
            say_at_work();
            said = true;
        }
        match scribble(&session, &endpoint).await {
            FabricError::Fenced { session: fenced } if fenced == session.id() => {}
            error => return Err(error),
        }
    }
}

/// Writes until that is refused; why it was.
async fn scribble(session: &Session, endpoint: &Endpoint) -> FabricError {
    for n in 1.. {
        for server in session.servers() {
            let area = area(*server, session.term());
            let mut batch = Batch::new(*server);
            let mut block = endpoint.buf(BLOCK_BYTES);
            block.fill(u8::try_from(n % 251).expect("below 251"));
            batch.write(area.add(64), block);
            batch.faa(area.add(8), 1);
            batch.write_word(area, n);
            let done = endpoint.op().submit(batch).await.map(drop).map_err(|failure| failure.error);
            // Small ones, too.
            let done = match done {
                Ok(()) => endpoint.op().faa(area.add(16), 1).await.map(drop),
                failed => failed,
            };
            // Another process may serve the memory now, and know the session or not.
            let done = match done {
                Err(FabricError::Disconnected { server } | FabricError::Unknown { server }) => {
                    endpoint.reconnect(server).await
                }
                done => done,
            };
            match done {
                Ok(()) | Err(FabricError::Disconnected { .. }) => {}
                Err(error) => return error,
            }
        }
    }
    unreachable!("it is fenced before it has counted to the end")
}
