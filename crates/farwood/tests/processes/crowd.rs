//! A server that stands still under many operations: its clients connect again once for all of them, not once for each.

use super::idle::cpu_ns;
use super::parts::say_at_work;
use super::world::{Over, Process, Servers, client, connect, nap, wait_for};
use farwood_fabric::clock::{MILLISECOND, SECOND};
use farwood_fabric::transport::tcp::{TcpCluster, TcpOptions};
use farwood_fabric::{
    Endpoint, Executor, FabricError, GlobalAddr, RegionId, ServerId, Session, SessionOptions,
};
use rustix::process::Signal;
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

/// How many endpoints the client has, and how many operations at once on each.
const ENDPOINTS: u64 = 2;
const OPERATIONS: u64 = 200;
/// How long the client waits for a server.
const CLIENT_PATIENCE: Duration = Duration::from_millis(500);
/// How long the server stands still: several such waits.
const STANDSTILL: Duration = Duration::from_secs(3);
/// The threads that the client may have: two of the test's runner, one for the line to each server, one to open each of these again, and
/// one for each connection of an endpoint that is made anew.
const MAX_THREADS: usize = 2 + 2 + 2 + 2 * 2;
/// How long the client is watched when nothing is left to do.
const IDLE: Duration = Duration::from_secs(3);

/// Where an operation counts, on the server that is stopped.
fn counter(n: u64) -> GlobalAddr {
    GlobalAddr::new(ServerId::new(1), RegionId::LOCK, n * 8)
}

/// Not 0: the client has done enough. On the server that goes on.
fn enough() -> GlobalAddr {
    GlobalAddr::new(ServerId::COORDINATOR, RegionId::LOCK, 0)
}

/// The part `crowd`: counts in many words at once, through everything, until it is enough.
pub(crate) fn play(place: &str) {
    let addresses: Vec<String> = place.trim_start_matches("tcp://").split(',').map(str::to_owned).collect();
    let options = TcpOptions { patience: CLIENT_PATIENCE, ..TcpOptions::default() };
    let cluster = TcpCluster::connect(&addresses, &options).expect("a pool");
    let executor = Executor::new();
    executor.block_on(async {
        let session = Session::open(&cluster, SessionOptions::default()).await.expect("a session");
        let is_enough = Rc::new(Cell::new(false));
        let endpoints: Vec<Endpoint> =
            (0..ENDPOINTS).map(|_| session.endpoint().expect("an endpoint")).collect();
        let mut n = 0;
        for endpoint in &endpoints {
            for _ in 0..OPERATIONS {
                drop(endpoint.spawn(keep_counting(endpoint.clone(), counter(n), Rc::clone(&is_enough))));
                n += 1;
            }
        }
        say_at_work();
        while endpoints[0].op().read_word(enough()).await.expect("this server goes on") == 0 {
            endpoints[0].sleep(20 * MILLISECOND).await;
        }
        is_enough.set(true);
        endpoints[0].sleep(3600 * SECOND).await;
    });
}

async fn keep_counting(endpoint: Endpoint, at: GlobalAddr, is_enough: Rc<Cell<bool>>) {
    while !is_enough.get() {
        match endpoint.op().faa(at, 1).await {
            Ok(_) => endpoint.sleep(MILLISECOND).await,
            // If it fails, the next verb says so.
            Err(FabricError::Unknown { server } | FabricError::Disconnected { server }) => {
                drop(endpoint.reconnect(server).await);
            }
            Err(error) => panic!("{error}"),
        }
    }
}

fn threads(process: &Process) -> usize {
    std::fs::read_dir(format!("/proc/{}/task", process.0.id())).expect("it runs").count()
}

/// What the counters say, to one who comes anew.
fn counters(place: &str) -> Vec<u64> {
    let cluster = connect(place).expect("the pool is there");
    let executor = Executor::new();
    let counted = executor.block_on(async {
        let session = Session::open(&cluster, SessionOptions::default()).await.expect("a session");
        let endpoint = session.endpoint().expect("an endpoint");
        let mut counted = Vec::new();
        for n in 0..ENDPOINTS * OPERATIONS {
            counted.push(endpoint.op().read_word(counter(n)).await.expect("the servers are there"));
        }
        session.close(&endpoint).await.expect("it ends");
        counted
    });
    executor.clear();
    counted
}

fn say_enough(place: &str) {
    let cluster = connect(place).expect("the pool is there");
    let executor = Executor::new();
    executor.block_on(async {
        let session = Session::open(&cluster, SessionOptions::default()).await.expect("a session");
        let endpoint = session.endpoint().expect("an endpoint");
        endpoint.op().write_word(enough(), 1).await.expect("the servers are there");
    });
    executor.clear();
}

/// A client of 400 operations at once has some ten threads while a server stands still, goes on with each of them when the server does,
/// and costs next to nothing when it has nothing to do afterwards.
#[test]
fn operations_that_wait_for_a_stopped_server_reconnect_once_for_all() {
    let servers = Servers::start(&["--lease-ms", "0"]);
    let place = servers.place(Over::Tcp);
    let client = client("crowd", &place);
    wait_for("each operation to count", || counters(&place).iter().all(|count| *count > 0));
    servers.processes[1].stop();
    let (step, mut most) = (Duration::from_millis(10), 0);
    for _ in 0..STANDSTILL.as_millis() / step.as_millis() {
        most = most.max(threads(&client));
        nap(step);
    }
    servers.processes[1].signal(Signal::CONT);
    println!("at most {most} threads");
    assert!(most <= MAX_THREADS, "the client had {most} threads");
    let before = counters(&place);
    wait_for("each operation to go on", || {
        let now = counters(&place);
        now.iter().zip(&before).all(|(now, before)| now > before)
    });
    say_enough(&place);
    nap(Duration::from_secs(1));
    let before = cpu_ns(&client);
    nap(IDLE);
    let spent = cpu_ns(&client) - before;
    println!("{spent} ns in {IDLE:?} without work, {} threads", threads(&client));
    let permille = spent * 1000 / u64::try_from(IDLE.as_nanos()).expect("seconds");
    assert!(permille < 10, "the client spent {spent} ns in {IDLE:?} without work");
}
