//! What drawing operations, keys and values costs, beside the cost of a bare random word in the same run: a workload must not
//! be what a benchmark measures.
//!
//! `cargo bench -p farwood-workload` prints the figures; without `--bench` (as `cargo test` runs it) a short run checks that it
//! works. The bars: a `u64` key below 100 ns, an e-mail address below 500 ns, an operation below 150 ns.

use farwood_workload::random::Random;
use farwood_workload::zipf::Zipf;
use farwood_workload::{Distribution, KeySet, Operation, Stream, StreamOptions, ValueId, Values, Workload};
use std::hint::black_box;
use std::time::Instant;

const KEYS: u64 = 10_000_000;

fn main() {
    let full = std::env::args().any(|arg| arg == "--bench");
    let rounds = if full { 2_000_000 } else { 10_000 };
    println!("ns each, one thread; medians of 5 runs of {rounds}");
    draws(rounds);
    keys(rounds);
    values_and_latencies(rounds);
    for workload in Workload::all() {
        let options = StreamOptions { clients: 2, ..StreamOptions::new(10 * KEYS) };
        let mut stream = Stream::new(&workload, &options).expect("a valid stream");
        row(rounds, &format!("an operation of {workload}"), move |_| {
            stream.next().and_then(Operation::key).unwrap_or(0)
        });
    }
}

fn draws(rounds: u64) {
    let mut random = Random::new(1, 0);
    row(rounds, "a random word", move |_| random.word());
    for (theta, ranks) in [(0.5, KEYS), (0.99, KEYS), (0.99, 1_000_000_000), (1.0, KEYS), (1.2, KEYS)] {
        let mut random = Random::new(1, 0);
        let zipf = Zipf::new(theta, ranks).expect("a valid law");
        row(rounds, &format!("a rank of zipfian:{theta}@{ranks}"), move |_| zipf.draw(&mut random));
    }
}

fn keys(rounds: u64) {
    for kind in ["u64", "u64:20", "sequential", "email"] {
        let keys = KeySet::new(kind.parse().expect("a key set"), 1);
        let mut buffer = Vec::new();
        row(rounds, &format!("a key of {kind}"), move |index| keys.key(index, &mut buffer).len() as u64);
    }
    let emails = KeySet::new("email".parse().expect("a key set"), 1);
    let mut buffer = Vec::new();
    row(rounds, "an e-mail address and its number", move |index| {
        emails.index_of(emails.key(index, &mut buffer)).unwrap_or(0)
    });
}

fn values_and_latencies(rounds: u64) {
    for bytes in [8, 64, 400] {
        let values = Values::fixed(bytes);
        let mut buffer = Vec::new();
        row(rounds, &format!("a value of {bytes} bytes"), move |index| {
            values.value(ValueId { index, version: index }, &mut buffer).len() as u64
        });
    }
    let mut latencies = Distribution::new();
    row(rounds, "recording a latency", move |index| {
        latencies.record(1000 + index % 4096);
        latencies.count()
    });
}

/// Measures one thing and prints its line.
fn row(rounds: u64, what: &str, mut one: impl FnMut(u64) -> u64) {
    let mut samples = [0.0; 5];
    let mut index = 0;
    for sample in &mut samples {
        #[expect(
            clippy::disallowed_methods,
            reason = "a bench measures real time, and there is no endpoint here"
        )]
        let begin = Instant::now();
        for _ in 0..rounds {
            black_box(one(black_box(index)));
            index += 1;
        }
        *sample = begin.elapsed().as_secs_f64() * 1e9 / rounds as f64;
    }
    samples.sort_by(f64::total_cmp);
    println!("{:>8.1}  {what}", samples[2]);
}
