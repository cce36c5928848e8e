//! What the `local` transport adds to the raw access: each figure beside its baseline in the same run, over the same memory.
//!
//! `cargo bench -p farwood-memory` prints the figures; without `--bench` (as `cargo test` runs it) a short run checks that it works.
//! The bars: an 8-byte READ or CAS through the endpoint costs at most 60 ns more than the raw dependent access, a 1 KiB READ
//! at most twice a `memcpy`. Accesses are *dependent*: the address of each comes from the value of the one before; of 1 KiB,
//! from its first and its last word, since whoever reads an object needs all of it.

use farwood_fabric::clock::RealClock;
use farwood_fabric::control::{Reply, Request};
use farwood_fabric::mem::RacyMemory;
use farwood_fabric::procedure::ProcedureSet;
use farwood_fabric::region::PoolId;
use farwood_fabric::server::ServerLogic;
use farwood_fabric::transport::local::LocalCluster;
use farwood_fabric::{Executor, GlobalAddr, Op, RegionId, ServerId, Session, SessionOptions};
use farwood_memory::{MemoryServer, ServerConfig};
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::Ordering;

const OBJECT: u64 = 1024;

fn main() {
    let full = std::env::args().any(|arg| arg == "--bench");
    let rounds: u64 = if full { 2_000_000 } else { 20_000 };
    let sizes: &[u64] = if full { &[1 << 20, 64 << 20, 512 << 20] } else { &[1 << 20] };
    println!("ns per access, dependent, one thread; medians of 5 runs of {rounds}");
    println!(
        "{:>12} {:>12} {:>8} {:>8} {:>10} {:>8}",
        "working set", "access", "raw", "local", "difference", "ratio"
    );
    for working_set in sizes {
        measure(*working_set, rounds);
    }
}

fn measure(working_set: u64, rounds: u64) {
    let raw = RawMemory::new(working_set);
    let executor = Executor::new();
    executor.block_on(async {
        let config = ServerConfig::new(PoolId(1), ServerId::new(0), 1, working_set + (16 << 20));
        let server = MemoryServer::new(config, ProcedureSet::default()).expect("a valid size");
        let cluster = LocalCluster::start(vec![Arc::new(server) as Arc<dyn ServerLogic>]).expect("starts");
        let session = Session::open(&cluster, SessionOptions::default()).await.expect("a session");
        let endpoint = session.endpoint().expect("an endpoint");
        let op = endpoint.op();
        let count = u32::try_from(working_set.div_ceil(8 << 20)).expect("few chunks");
        let request = Request::AllocChunks { index: 1, class: 0, object_bytes: 0, count, flushed_through: 0 };
        let Ok(Reply::Chunks { offset, .. }) = op.control(ServerId::new(0), &request).await else {
            panic!("no memory");
        };
        let base = GlobalAddr::new(ServerId::new(0), RegionId::MAIN, offset);
        for n in 0..working_set / OBJECT {
            op.write_word(base.add(n * OBJECT), raw.chain[usize::try_from(n).expect("fits")])
                .await
                .expect("writes");
        }
        let mut rows: [(&str, Vec<f64>, Vec<f64>); 3] =
            [("READ 8 B", vec![], vec![]), ("CAS", vec![], vec![]), ("READ 1 KiB", vec![], vec![])];
        for _ in 0..5 {
            rows[0].1.push(raw.loads(rounds));
            rows[0].2.push(reads(&op, base, rounds).await);
            rows[1].1.push(raw.swaps(rounds));
            rows[1].2.push(swaps(&op, base, rounds).await);
            rows[2].1.push(raw.copies(rounds / 4));
            rows[2].2.push(big_reads(&op, base, rounds / 4).await);
        }
        for (name, raw, local) in &mut rows {
            let (raw, local) = (median(raw), median(local));
            println!(
                "{:>8} MiB {:>12} {:>8.1} {:>8.1} {:>10.1} {:>8.2}",
                working_set >> 20,
                name,
                raw,
                local,
                local - raw,
                local / raw
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
