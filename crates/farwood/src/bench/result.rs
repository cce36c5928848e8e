//! The result of a run: a table for people, JSON for programs. The fields are always the same, whatever the engine.

use super::tally::{Kind, KindTally, Tally};
use crate::report::{Table, Wall};
use crate::units::{count, time};
use farwood_workload::{Distribution, Summary};
use serde::Serialize;
use std::collections::BTreeMap;
use std::io::{self, Write};

/// One engine's run.
#[derive(Serialize, Debug)]
pub(super) struct Run {
    pub(super) engine: String,
    pub(super) transport: String,
    pub(super) profile: Option<String>,
    pub(super) workload: String,
    pub(super) key_set: String,
    pub(super) value_size: String,
    pub(super) dist: String,
    pub(super) compute: u32,
    pub(super) threads: u32,
    pub(super) tasks: u32,
    pub(super) memory: usize,
    pub(super) processes: u32,
    pub(super) set: BTreeMap<String, String>,
    pub(super) keys: u64,
    pub(super) ops: u64,
    pub(super) seed: u64,
    /// Whether times are virtual.
    #[serde(rename = "virtual")]
    pub(super) is_virtual: bool,
    pub(super) throughput_ops_s: f64,
    pub(super) elapsed_s: f64,
    pub(super) errors: u64,
    pub(super) first_error: Option<String>,
    /// Whether every answer was checked, how many there were, and how many of them left only one thing to be true.
    pub(super) verified: bool,
    pub(super) answers_checked: u64,
    pub(super) answers_constrained: u64,
    pub(super) compute_cache_bytes: u64,
    pub(super) memory_bytes: u64,
    pub(super) kinds: BTreeMap<&'static str, KindResult>,
    /// All kinds together.
    pub(super) all: KindResult,
    pub(super) wall: Wall,
}

/// The operations of one kind: means per operation, unless it says otherwise.
#[derive(Serialize, Debug)]
pub(super) struct KindResult {
    count: u64,
    throughput_ops_s: f64,
    latency_us: Latency,
    round_trips: RoundTrips,
    reads: f64,
    writes: f64,
    atomics: f64,
    calls: f64,
    bytes_read: f64,
    bytes_written: f64,
    retries: f64,
    /// How often a cache of the compute server led it somewhere, and how often to nothing of use.
    hints: f64,
    wrong_hints: f64,
    /// The shares of operations that wrote at most so many bytes, and that began something anew at most so often.
    bytes_written_within: Within,
    retries_within: Within,
}

#[derive(Serialize, Debug)]
struct Latency {
    p50: f64,
    p90: f64,
    p99: f64,
    p999: f64,
    max: f64,
    mean: f64,
}

#[derive(Serialize, Debug)]
struct RoundTrips {
    mean: f64,
    p50: u64,
    p99: u64,
    max: u64,
    within: Within,
}

/// The share of operations that stayed within a number: every number up to 16, then powers of two, up to the largest that
/// occurred, and to 4096 at least, so that results can be compared.
type Within = BTreeMap<u64, f64>;

fn within(distribution: &Distribution) -> Within {
    let all = distribution.count().max(1) as f64;
    let most = distribution.summary().max;
    let (mut buckets, mut so_far) = (distribution.buckets().peekable(), 0);
    let mut share = |limit: u64| {
        while let Some((_, times)) = buckets.next_if(|(value, _)| *value <= limit) {
            so_far += times;
        }
        (limit, so_far as f64 / all)
    };
    let powers = (5..63).map(|bits| 1u64 << bits).take_while(|limit| *limit / 2 < most.max(4096));
    (0..=16).chain(powers).map(&mut share).collect()
}

impl KindResult {
    pub(super) fn new(tally: &KindTally, elapsed_s: f64) -> Self {
        let latency: Summary = tally.latency_ns.summary();
        let trips = tally.round_trips.summary();
        let mean = |sum: u64| if latency.count == 0 { 0.0 } else { sum as f64 / latency.count as f64 };
        let us = |ns: u64| ns as f64 / 1e3;
        Self {
            count: latency.count,
            throughput_ops_s: latency.count as f64 / elapsed_s.max(1e-9),
            latency_us: Latency {
                p50: us(latency.p50),
                p90: us(latency.p90),
                p99: us(latency.p99),
                p999: us(latency.p999),
                max: us(latency.max),
                mean: latency.mean / 1e3,
            },
            round_trips: RoundTrips {
                mean: trips.mean,
                p50: trips.p50,
                p99: trips.p99,
                max: trips.max,
                within: within(&tally.round_trips),
            },
            reads: mean(tally.cost.reads),
            writes: mean(tally.cost.writes),
            atomics: mean(tally.cost.atomics),
            calls: mean(tally.cost.calls),
            bytes_read: mean(tally.cost.bytes_read),
            bytes_written: mean(tally.cost.bytes_written),
            retries: mean(tally.cost.retries),
            hints: mean(tally.cost.hints),
            wrong_hints: mean(tally.cost.wrong_hints),
            bytes_written_within: within(&tally.bytes_written),
            retries_within: within(&tally.retries),
        }
    }
}

/// All kinds, those that did not occur too, so that every result has the same fields.
pub(super) fn kinds(tally: &Tally, elapsed_s: f64) -> BTreeMap<&'static str, KindResult> {
    let none = KindTally::new();
    let result = |kind: &Kind| (kind.name(), KindResult::new(tally.kind(*kind).unwrap_or(&none), elapsed_s));
    Kind::ALL.iter().map(result).collect()
}

/// Prints runs side by side.
pub(super) fn print(runs: &[Run], out: &mut impl Write) -> io::Result<()> {
    let Some(first) = runs.first() else { return Ok(()) };
    writeln!(
        out,
        "{} on {}{}: {} keys ({}), values of {} B, {}, {} compute x {} threads x {} tasks{}, {} memory server(s), seed {}, {} time",
        first.workload,
        first.transport,
        first.profile.as_ref().map_or(String::new(), |profile| format!(" ({profile})")),
        first.keys,
        first.key_set,
        first.value_size,
        first.dist,
        first.compute,
        first.threads,
        first.tasks,
        if first.processes > 1 { format!(" x {} processes", first.processes) } else { String::new() },
        first.memory,
        first.seed,
        if first.is_virtual { "virtual" } else { "real" }
    )?;
    let heads = [
        "engine",
        "kind",
        "count",
        "ops/s",
        "p50",
        "p90",
        "p99",
        "p999",
        "max",
        "trips",
        "trips p99",
        "read",
        "written",
        "retries",
    ];
    let mut table = Table::new(&heads);
    for run in runs {
        let mut engine = run.engine.clone();
        for kind in Kind::ALL {
            let Some(result) = run.kinds.get(kind.name()).filter(|result| result.count > 0) else { continue };
            let us = |us: f64| time(us * 1e3);
            table.row(vec![
                std::mem::take(&mut engine),
                kind.name().to_owned(),
                result.count.to_string(),
                count(result.throughput_ops_s),
                us(result.latency_us.p50),
                us(result.latency_us.p90),
                us(result.latency_us.p99),
                us(result.latency_us.p999),
                us(result.latency_us.max),
                format!("{:.2}", result.round_trips.mean),
                result.round_trips.p99.to_string(),
                format!("{:.0} B", result.bytes_read),
                format!("{:.0} B", result.bytes_written),
                format!("{:.3}", result.retries),
            ]);
        }
    }
    table.print(out)?;
    for run in runs {
        writeln!(
            out,
            "{}: {} ops in {} ({} ops/s), {} errors{}, compute cache {} B, memory {} B{}",
            run.engine,
            run.ops,
            time(run.elapsed_s * 1e9),
            count(run.throughput_ops_s),
            run.errors,
            run.first_error.as_ref().map_or(String::new(), |why| format!(" (the first: {why})")),
            run.compute_cache_bytes,
            run.memory_bytes,
            if run.verified {
                format!(
                    ", {} answers checked, {} of them fully determined",
                    run.answers_checked, run.answers_constrained
                )
            } else {
                String::new()
            }
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_add_up_and_end_at_all() {
        let mut distribution = Distribution::new();
        for (value, times) in [(2, 3), (3, 93), (11, 3), (5000, 1)] {
            distribution.record_many(value, times);
        }
        let within = within(&distribution);
        let share = |limit: u64| within[&limit];
        assert_eq!((share(1), share(2), share(3), share(10), share(16)), (0.0, 0.03, 0.96, 0.96, 0.99));
        assert_eq!((share(4096), share(8192)), (0.99, 1.0));
        assert_eq!(within.last_key_value(), Some((&8192, &1.0)), "nothing beyond the largest");
        assert_eq!(super::within(&Distribution::new()).last_key_value(), Some((&4096, &0.0)));
    }
}
