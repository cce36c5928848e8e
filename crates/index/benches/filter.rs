//! What it costs to find the longest prefix of a key in Sphinx's filter: hashing all prefixes included, on one core.
//!
//! `cargo bench -p farwood-index --bench filter` prints the figures; without `--bench` (as `cargo test` runs it) a short run checks that it works. The filter is
//! full, and larger than the processor's caches close to the core. The baseline hashes each prefix by itself, with XXH3, and is as good otherwise.

use farwood_fabric::clock::RealClock;
use farwood_index::engine::sphinx::filter::{Filter, PrefixHash};
use std::hint::black_box;
use xxhash_rust::xxh3::xxh3_64;

fn main() {
    let is_full = std::env::args().any(|arg| arg == "--bench");
    let (budget_bytes, keys) = if is_full { (24_000_000, 400_000) } else { (240_000, 4_000) };
    println!("{budget_bytes} bytes, full; {keys} keys a row; nanoseconds a key");
    println!(
        "{:<22} {:>9} {:>9} {:>14} {:>14} {:>12}",
        "keys", "longest", "all", "hashing alone", "one by one", "wrong/check"
    );
    for (name, bytes, depth) in [("8 bytes, random", 8, 3), ("20 bytes, as e-mail", 20, 9)] {
        row(name, bytes, depth, budget_bytes, keys);
    }
}

/// Key `n`, of letters if it is long.
fn key(n: u64, bytes: usize) -> Vec<u8> {
    let random = |salt: u8| {
        PrefixHash::all(&n.to_le_bytes())
            .last()
            .map_or(0, |hash| hash.rotate_left(3 * u32::from(salt)) ^ u64::from(salt))
    };
    if bytes == 8 {
        return random(0).to_be_bytes().to_vec();
    }
    (0..20).take(bytes).map(|at| b'a' + u8::try_from(random(at) & 15).unwrap_or(0)).collect()
}

/// Keys of so many bytes, with an inner node at a prefix of `depth` bytes.
fn row(name: &str, bytes: usize, depth: usize, budget_bytes: u64, keys: u64) {
    let filter = Filter::new(budget_bytes, None);
    let one_by_one = Filter::new(budget_bytes, None);
    let (mut known, mut n) = (Vec::new(), 0);
    while filter.count() < filter.capacity() && n < 4 * filter.capacity() {
        let key = key(n, bytes);
        let hash = PrefixHash::all(&key[..depth]).last().unwrap_or_default();
        filter.insert(if bytes == 8 { hash ^ n } else { hash });
        one_by_one.insert(xxh3_64(&key[..depth]));
        if n < keys {
            filter.insert(hash);
            known.push(key);
        }
        n += 1;
    }
    let mut hashes = Vec::with_capacity(bytes + 1);
    let mut hash_all = |key: &[u8]| {
        hashes.clear();
        hashes.extend(PrefixHash::all(key));
        black_box(&hashes).len()
    };
    let hashing = measure(&known, |key| hash_all(key) as u64);
    let mut hashes = Vec::with_capacity(bytes + 1);
    let longest = measure(&known, |key| {
        hashes.clear();
        hashes.extend(PrefixHash::all(key));
        filter.longest(&hashes).next().unwrap_or(0) as u64
    });
    let mut positives = 0;
    let all = measure(&known, |key| {
        hashes.clear();
        hashes.extend(PrefixHash::all(key));
        let count = filter.longest(&hashes).count() as u64;
        positives += count;
        count
    });
    let baseline = measure(&known, |key| {
        hashes.clear();
        hashes.extend((0..=key.len()).map(|len| xxh3_64(&key[..len])));
        one_by_one.longest(&hashes).count() as u64
    });
    // Each key has one prefix that is there; all else is wrong.
    let wrong = (positives as f64 / known.len() as f64 - 1.0) / bytes as f64;
    assert!(
        positives >= known.len() as u64 * 98 / 100,
        "{positives} prefixes of {} keys were found",
        known.len()
    );
    assert!(wrong < 0.01, "{wrong} of all checks were wrong");
    println!(
        "{name:<22} {longest:>9.0} {all:>9.0} {hashing:>14.0} {baseline:>14.0} {:>11.2}%",
        100.0 * wrong
    );
}

/// Nanoseconds a key, of runs that are short enough not to be interrupted: the machine may be shared. The fastest tenth of them at least took this.
fn measure(keys: &[Vec<u8>], mut check: impl FnMut(&[u8]) -> u64) -> f64 {
    let clock = RealClock::new();
    let mut sum = 0;
    let mut spans: Vec<u64> = Vec::new();
    for run in keys.chunks(400) {
        let begin = clock.now();
        for key in run {
            sum += check(black_box(key));
        }
        spans.push(clock.now() - begin);
    }
    black_box(sum);
    spans.sort_unstable();
    spans[spans.len() / 10] as f64 / 400.0
}
