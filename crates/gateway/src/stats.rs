//! What the gateway counts: calls and errors of every command, latencies of some of them, hits, what clients and far memory cost.
//!
//! Every thread has counters of its own, which only it writes, so that counting takes no locked instruction; whoever asks adds them
//! up. Reading the clock twice costs a tenth of a GET, so only one command in [`SAMPLED_ONE_IN`] is timed.

use crate::command::COMMANDS;
use farwood_fabric::OpStats;
use farwood_fabric::clock::Nanos;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// One command of so many is timed.
pub(crate) const SAMPLED_ONE_IN: u32 = 16;
/// Latencies are told apart by powers of two, from this one on.
const FIRST_BUCKET_NS: u64 = 256;
/// The last bucket takes what is above half a second.
pub(crate) const BUCKETS: usize = 22;

/// A number that one thread writes and any reads.
#[derive(Default, Debug)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    #[inline]
    pub(crate) fn add(&self, more: u64) {
        self.0.store(self.0.load(Ordering::Relaxed) + more, Ordering::Relaxed);
    }

    pub(crate) fn set(&self, to: u64) {
        self.0.store(to, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// What one thread counts of one command.
#[derive(Default, Debug)]
pub(crate) struct CommandStats {
    pub(crate) calls: Counter,
    pub(crate) errors: Counter,
    timed: Counter,
    timed_ns: Counter,
    buckets: [Counter; BUCKETS],
}

impl CommandStats {
    pub(crate) fn time(&self, ns: Nanos) {
        self.timed.add(1);
        self.timed_ns.add(ns);
        self.buckets[bucket(ns)].add(1);
    }
}

fn bucket(ns: Nanos) -> usize {
    let above = ns / FIRST_BUCKET_NS;
    usize::try_from(u64::BITS - above.leading_zeros()).unwrap_or(BUCKETS).min(BUCKETS - 1)
}

/// The longest latency of a bucket; none, for the last one.
pub(crate) fn bucket_limit_ns(bucket: usize) -> Option<u64> {
    (bucket + 1 < BUCKETS).then(|| FIRST_BUCKET_NS << bucket)
}

/// What one thread counts.
#[derive(Debug)]
pub(crate) struct ThreadStats {
    pub(crate) commands: Vec<CommandStats>,
    pub(crate) hits: Counter,
    pub(crate) misses: Counter,
    pub(crate) expired: Counter,
    pub(crate) bytes_in: Counter,
    pub(crate) bytes_out: Counter,
    /// Clients that it handed to other threads.
    pub(crate) handed_over: Counter,
    /// How much of a processor it took in the last moment.
    pub(crate) load_percent: Counter,
    /// What its operations cost in far memory, as of a moment ago.
    far: Mutex<Far>,
}

/// What operations cost in far memory, and which of the engine's rare paths they took.
#[derive(Clone, Default, Debug)]
pub(crate) struct Far {
    pub(crate) costs: OpStats,
    pub(crate) paths: BTreeMap<&'static str, u64>,
}

impl Default for ThreadStats {
    fn default() -> Self {
        Self {
            commands: COMMANDS.iter().map(|_| CommandStats::default()).collect(),
            hits: Counter::default(),
            misses: Counter::default(),
            expired: Counter::default(),
            bytes_in: Counter::default(),
            bytes_out: Counter::default(),
            handed_over: Counter::default(),
            load_percent: Counter::default(),
            far: Mutex::default(),
        }
    }
}

impl ThreadStats {
    pub(crate) fn publish(&self, far: Far) {
        *self.far.lock().unwrap_or_else(PoisonError::into_inner) = far;
    }
}

/// A command's numbers, of all threads.
#[derive(Clone, Default, Debug)]
pub(crate) struct CommandTotals {
    pub(crate) calls: u64,
    pub(crate) errors: u64,
    pub(crate) timed: u64,
    pub(crate) timed_ns: u64,
    pub(crate) buckets: [u64; BUCKETS],
}

impl CommandTotals {
    fn add(&mut self, of: &CommandStats) {
        self.calls += of.calls.get();
        self.errors += of.errors.get();
        self.timed += of.timed.get();
        self.timed_ns += of.timed_ns.get();
        for (sum, bucket) in self.buckets.iter_mut().zip(&of.buckets) {
            *sum += bucket.get();
        }
    }

    /// The latency that this share of the timed calls did not exceed, rounded up to a bucket's limit.
    pub(crate) fn quantile_ns(&self, share: f64) -> u64 {
        let timed: u64 = self.buckets.iter().sum();
        let mut left = (timed as f64 * share).ceil();
        for (n, count) in self.buckets.iter().enumerate().filter(|_| timed > 0) {
            left -= *count as f64;
            if left <= 0.0 {
                return bucket_limit_ns(n).unwrap_or(FIRST_BUCKET_NS << BUCKETS);
            }
        }
        0
    }
}

/// Everything, of all threads.
#[derive(Clone, Default, Debug)]
pub(crate) struct Totals {
    /// In the order of [`COMMANDS`].
    pub(crate) commands: Vec<CommandTotals>,
    pub(crate) hits: u64,
    pub(crate) misses: u64,
    pub(crate) expired: u64,
    pub(crate) bytes_in: u64,
    pub(crate) bytes_out: u64,
    pub(crate) handed_over: u64,
    pub(crate) far: OpStats,
    pub(crate) paths: BTreeMap<&'static str, u64>,
}

impl Totals {
    pub(crate) fn of<'a>(threads: impl Iterator<Item = &'a ThreadStats>) -> Self {
        let mut totals = Self { commands: vec![CommandTotals::default(); COMMANDS.len()], ..Self::default() };
        for thread in threads {
            for (sum, command) in totals.commands.iter_mut().zip(&thread.commands) {
                sum.add(command);
            }
            totals.hits += thread.hits.get();
            totals.misses += thread.misses.get();
            totals.expired += thread.expired.get();
            totals.bytes_in += thread.bytes_in.get();
            totals.bytes_out += thread.bytes_out.get();
            totals.handed_over += thread.handed_over.get();
            let far = thread.far.lock().unwrap_or_else(PoisonError::into_inner);
            totals.far += far.costs;
            for (path, count) in &far.paths {
                *totals.paths.entry(*path).or_default() += count;
            }
        }
        totals
    }

    /// All calls.
    pub(crate) fn calls(&self) -> u64 {
        self.commands.iter().map(|command| command.calls).sum()
    }

    pub(crate) fn errors(&self) -> u64 {
        self.commands.iter().map(|command| command.errors).sum()
    }

    /// Calls of commands that go to the index.
    pub(crate) fn operations(&self) -> u64 {
        let to_index = COMMANDS.iter().zip(&self.commands).filter(|(spec, _)| spec.uses_index());
        to_index.map(|(_, command)| command.calls).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_latency_is_within_its_bucket() {
        for ns in [0, 1, 255, 256, 257, 511, 512, 1000, 1_000_000, 100_000_000, u64::MAX] {
            let bucket = bucket(ns);
            assert!(bucket_limit_ns(bucket).is_none_or(|limit| ns < limit), "{ns} in {bucket}");
            assert!(
                bucket == 0 || bucket_limit_ns(bucket - 1).is_some_and(|below| ns >= below),
                "{ns} in {bucket}"
            );
        }
    }

    #[test]
    fn quantiles_are_the_limits_of_buckets() {
        let stats = ThreadStats::default();
        for _ in 0..98 {
            stats.commands[0].time(300);
        }
        stats.commands[0].time(5_000);
        stats.commands[0].time(1 << 40);
        let totals = Totals::of([&stats, &stats].into_iter());
        let command = &totals.commands[0];
        assert_eq!((command.timed, command.quantile_ns(0.5)), (200, 512));
        assert_eq!((command.quantile_ns(0.99), command.quantile_ns(1.0)), (8192, 256 << BUCKETS));
        assert_eq!(CommandTotals::default().quantile_ns(0.5), 0);
    }
}
