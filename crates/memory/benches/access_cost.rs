//! What `local` and `shm` add to the raw access: each figure beside its baseline in the same run, over the same memory.
//!
//! `cargo bench -p farwood-memory` prints the figures; without `--bench` (as `cargo test` runs it) a short run checks that it works.
//! The bars: an 8-byte READ or CAS through the endpoint costs at most 60 ns more than the raw dependent access, a 1 KiB READ
//! at most twice a `memcpy`, and `shm` at most a tenth more than `local`. Accesses are *dependent*: the address of each comes
//! from the value of the one before; of 1 KiB, from its first and its last word, since whoever reads an object needs all of it.
//!
//! The server of `shm` is this program once more, in a process of its own.

use farwood_fabric::clock::RealClock;
use farwood_fabric::control::{Reply, Request};
use farwood_fabric::mem::RacyMemory;
use farwood_fabric::procedure::ProcedureSet;
use farwood_fabric::region::PoolId;
use farwood_fabric::transport::local::LocalCluster;
use farwood_fabric::transport::serve::{MemoryProcess, ServeOptions};
use farwood_fabric::transport::shm::{ShmCluster, ShmOptions};
use farwood_fabric::{
    Cluster, Endpoint, Executor, GlobalAddr, Op, RegionId, ServerId, Session, SessionOptions,
};
use farwood_memory::{MemoryServer, ServerConfig};
use std::hint::black_box;
use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Set for the process that serves: its socket and the size of its memory.
const SERVE: &str = "FARWOOD_BENCH_SERVE";

const OBJECT: u64 = 1024;

fn main() {
    if let Ok(serve) = std::env::var(SERVE) {
        return serve_until_told(&serve);
    }
    let full = std::env::args().any(|arg| arg == "--bench");
    let rounds: u64 = if full { 2_000_000 } else { 20_000 };
    let sizes: &[u64] = if full { &[1 << 20, 64 << 20, 512 << 20] } else { &[1 << 20] };
    println!(
        "ns per access, dependent, one thread; medians of 7 runs of {rounds} (1 KiB: a quarter of that)"
    );
    println!(
        "{:>12} {:>12} {:>8} {:>8} {:>8} {:>11} {:>10} {:>10}",
        "working set", "access", "raw", "local", "shm", "local - raw", "local/raw", "shm/local"
    );
    for working_set in sizes {
        measure(*working_set, rounds);
    }
}

fn server(working_set: u64) -> Arc<MemoryServer> {
    let config = ServerConfig {
        lease_ns: 0,
        ..ServerConfig::new(PoolId(1), ServerId::new(0), 1, working_set + (16 << 20))
    };
    Arc::new(MemoryServer::new(config, ProcedureSet::default()).expect("a valid size"))
}

/// The part of the other process: a server that lives until its standard input closes.
fn serve_until_told(serve: &str) {
    let (working_set, socket) = serve.split_once(' ').expect("a size and a socket");
    let logic = server(working_set.parse().expect("a size"));
    let options = ServeOptions { shm: Some(PathBuf::from(socket)), ..ServeOptions::default() };
    let server = MemoryProcess::start(logic, options).expect("starts");
    println!("ready");
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
    drop(server);
}

/// A server in another process; it ends with this.
struct Neighbour(Child);

impl Neighbour {
    fn start(working_set: u64) -> (Self, Cluster) {
        let socket = std::env::temp_dir().join(format!("farwood-bench-{}.sock", std::process::id()));
        let mut child = Command::new(std::env::current_exe().expect("this program"))
            .env(SERVE, format!("{working_set} {}", socket.display()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a server starts");
        let said = BufReader::new(child.stdout.take().expect("piped"));
        assert!(said.lines().map_while(Result::ok).any(|line| line == "ready"), "the server did not start");
        let cluster = ShmCluster::connect(&[socket], &ShmOptions::default()).expect("connects");
        (Self(child), cluster)
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

/// A chain of objects in far memory.
struct Far {
    endpoint: Endpoint,
    base: GlobalAddr,
}

impl Far {
    async fn new(cluster: &Cluster, working_set: u64, chain: &[u64]) -> Self {
        let session = Session::open(cluster, SessionOptions::default()).await.expect("a session");
        let endpoint = session.endpoint().expect("an endpoint");
        let op = endpoint.op();
        let count = u32::try_from(working_set.div_ceil(8 << 20)).expect("few chunks");
        let index = session.create_index(&op, "cost", "none", &[]).await.expect("created").id;
        let request = Request::AllocChunks { index, class: 0, object_bytes: 0, count, flushed_through: 0 };
        let Ok(Reply::Chunks { offset, .. }) = op.control(ServerId::new(0), &request).await else {
            panic!("no memory");
        };
        let base = GlobalAddr::new(ServerId::new(0), RegionId::MAIN, offset);
        for (n, next) in (0..).zip(chain) {
            op.write_word(base.add(n * OBJECT), *next).await.expect("writes");
        }
        drop(op);
        Self { endpoint, base }
    }
}

fn measure(working_set: u64, rounds: u64) {
    let raw = RawMemory::new(working_set);
    let (_neighbour, shm) = Neighbour::start(working_set);
    let local = LocalCluster::start(vec![server(working_set)]).expect("starts");
    Executor::new().block_on(async {
        let far =
            [Far::new(&local, working_set, &raw.chain).await, Far::new(&shm, working_set, &raw.chain).await];
        let mut rows = ["READ 8 B", "CAS", "READ 1 KiB"].map(|name| (name, [vec![], vec![], vec![]]));
        for _ in 0..7 {
            rows[0].1[0].push(raw.loads(rounds));
            rows[1].1[0].push(raw.swaps(rounds));
            rows[2].1[0].push(raw.copies(rounds / 4));
            for (column, Far { endpoint, base }) in (1..).zip(&far) {
                let op = endpoint.op();
                rows[0].1[column].push(reads(&op, *base, rounds).await);
                rows[1].1[column].push(swaps(&op, *base, rounds).await);
                rows[2].1[column].push(big_reads(&op, *base, rounds / 4).await);
            }
        }
        for (name, figures) in &mut rows {
            let [raw, local, shm] = figures.each_mut().map(|samples| median(samples));
            println!(
                "{:>8} MiB {:>12} {:>8.1} {:>8.1} {:>8.1} {:>11.1} {:>10.2} {:>10.2}",
                working_set >> 20,
                name,
                raw,
                local,
                shm,
                local - raw,
                local / raw,
                shm / local
            );
        }
    });
}

fn median(samples: &mut [f64]) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 2]
}

/// The same chain of offsets in plain memory.
struct RawMemory {
    memory: RacyMemory,
    chain: Vec<u64>,
}

impl RawMemory {
    /// Objects of 1 KiB in one random cycle: the first word of each says where the next one is.
    fn new(working_set: u64) -> Self {
        let objects = usize::try_from(working_set / OBJECT).expect("fits");
        let mut order: Vec<u64> = (0..objects as u64).collect();
        shuffle(&mut order);
        let mut chain = vec![0; objects];
        for n in 0..objects {
            let next = order[(n + 1) % objects];
            chain[usize::try_from(order[n]).expect("fits")] = next * OBJECT;
        }
        let memory = RacyMemory::zeroed(usize::try_from(working_set).expect("fits")).expect("enough memory");
        for (n, next) in chain.iter().enumerate() {
            memory.word(n * 1024).store(*next, Ordering::Relaxed);
        }
        Self { memory, chain }
    }

    fn at(offset: u64) -> usize {
        usize::try_from(offset).expect("fits")
    }

    fn loads(&self, rounds: u64) -> f64 {
        let clock = RealClock::new();
        let mut at = 0;
        for _ in 0..rounds {
            at = self.memory.word(Self::at(at)).load(Ordering::Relaxed);
        }
        black_box(at);
        clock.now() as f64 / rounds as f64
    }

    fn swaps(&self, rounds: u64) -> f64 {
        let clock = RealClock::new();
        let mut at = 0;
        for _ in 0..rounds {
            let word = self.memory.word(Self::at(at));
            at = match word.compare_exchange(u64::MAX, 0, Ordering::SeqCst, Ordering::SeqCst) {
                Ok(next) | Err(next) => next,
            };
        }
        black_box(at);
        clock.now() as f64 / rounds as f64
    }

    /// `memcpy` of a private copy of the objects: what any read of 1 KiB costs at least.
    fn copies(&self, rounds: u64) -> f64 {
        let mut plain = vec![0u8; self.memory.len()];
        self.memory.read(0, &mut plain);
        let mut into = [0u8; 1024];
        let clock = RealClock::new();
        let mut at = 0;
        for _ in 0..rounds {
            let from = Self::at(at);
            into.copy_from_slice(black_box(&plain[from..from + 1024]));
            let copied = black_box(&into);
            let word = |at: usize| u64::from_le_bytes(copied[at..at + 8].try_into().expect("eight bytes"));
            at = word(0) + word(1016);
        }
        clock.now() as f64 / rounds as f64
    }
}

/// A fixed permutation, good enough to defeat the prefetcher (xorshift, Fisher-Yates).
fn shuffle(order: &mut [u64]) {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for n in (1..order.len()).rev() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let other = usize::try_from(state % (n as u64 + 1)).expect("fits");
        order.swap(n, other);
    }
}

async fn reads(op: &Op, base: GlobalAddr, rounds: u64) -> f64 {
    let clock = RealClock::new();
    let mut at = 0;
    for _ in 0..rounds {
        at = op.read_word(base.add(at)).await.expect("reads");
    }
    black_box(at);
    clock.now() as f64 / rounds as f64
}

async fn swaps(op: &Op, base: GlobalAddr, rounds: u64) -> f64 {
    let clock = RealClock::new();
    let mut at = 0;
    for _ in 0..rounds {
        at = op.cas(base.add(at), u64::MAX, 0).await.expect("swaps");
    }
    black_box(at);
    clock.now() as f64 / rounds as f64
}

async fn big_reads(op: &Op, base: GlobalAddr, rounds: u64) -> f64 {
    let clock = RealClock::new();
    let mut at = 0;
    for _ in 0..rounds {
        let object = op.read(base.add(at), 1024).await.expect("reads");
        at = object.word(0) + object.word(1016);
    }
    black_box(at);
    clock.now() as f64 / rounds as f64
}
