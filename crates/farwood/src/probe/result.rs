//! What a probe found: rows for people and for programs. The names in JSON stay as they are.

use super::measure::{Job, Tally};
use crate::fleet::Fleet;
use crate::report::{Claims, Table, Wall, unless_broken_pipe};
use crate::units::{Size, count, time};
use serde::Serialize;
use std::io::{self, Write};

/// Everything, as it goes into the JSON file.
#[derive(Serialize, Debug)]
pub(super) struct Probe {
    command: &'static str,
    version: &'static str,
    /// Times are those of a simulated world.
    r#virtual: bool,
    settings: Settings,
    capabilities: Claims,
    rows: Vec<Row>,
    /// Accesses that the transport does not have.
    skipped: Vec<&'static str>,
    /// The only part that differs between two runs of the same simulated world.
    wall: Wall,
}

/// What was asked for.
#[derive(Serialize, Debug)]
pub(super) struct Settings {
    pub(super) transport: String,
    pub(super) servers: usize,
    pub(super) clients: Vec<u32>,
    pub(super) seconds_per_row: Option<f64>,
    pub(super) ops_per_client: Option<u64>,
    pub(super) working_set_bytes: u64,
    pub(super) seed: u64,
}

/// What a row is compared with.
#[derive(Clone, Copy, Debug)]
pub(super) struct Baseline {
    pub(super) name: &'static str,
    pub(super) ns: f64,
    /// It is compared with the latency of an access, not with the time between two of them.
    pub(super) is_latency: bool,
}

/// How fast a row was.
#[derive(Debug)]
pub(super) struct Speed {
    /// All clients together.
    pub(super) rate_per_s: f64,
    /// A client's time for each access.
    pub(super) ns_per_op: f64,
    /// How many accesses each client made.
    pub(super) ops_of: Vec<u64>,
}

impl Speed {
    /// What the slowest client got of what they got on average.
    fn slowest(&self) -> f64 {
        let mean = self.ops_of.iter().sum::<u64>() as f64 / self.ops_of.len().max(1) as f64;
        self.ops_of.iter().min().map_or(1.0, |slowest| *slowest as f64 / mean.max(1.0))
    }
}

/// One access at one size and depth, by so many clients.
#[derive(Serialize, Debug)]
pub(super) struct Row {
    verb: &'static str,
    #[serde(skip)]
    title: &'static str,
    /// The size; none where the access has only one.
    bytes: Option<usize>,
    depth: u32,
    clients: u32,
    ops: u64,
    latency_ns_p50: f64,
    latency_ns_p99: f64,
    latency_ns_mean: f64,
    /// How many accesses were timed together; then percentiles are those of averages.
    timed_block_ops: u64,
    /// Time of a client for each access, median over windows of a millisecond; with several in flight, less than the latency.
    ns_per_op: f64,
    rate_per_s: f64,
    /// What the slowest client got of what they got on average.
    slowest_client_share: f64,
    bytes_per_s: f64,
    round_trips_per_op: f64,
    baseline: Option<&'static str>,
    baseline_ns: Option<f64>,
    /// `ns_per_op` over `baseline_ns`; where that is a latency (a simulated world; one round trip beside another),
    /// `latency_ns_p50` is compared with it.
    ratio_of: &'static str,
    /// The ratio.
    ratio: Option<f64>,
}

impl Row {
    pub(super) fn new(job: &Job, sums: &Tally, speed: &Speed, baseline: Option<Baseline>) -> Self {
        let Speed { rate_per_s, ns_per_op, .. } = *speed;
        let clients = u32::try_from(speed.ops_of.len()).unwrap_or(u32::MAX);
        let ops = sums.ops.max(1) as f64;
        let latency_ns_p50 = sums.latency_ps.value_at_quantile(0.5) as f64 / 1e3;
        let bytes = (sums.stats.bytes_read + sums.stats.bytes_written) as f64;
        let ratio = |baseline: Baseline| {
            let ours = if baseline.is_latency { latency_ns_p50 } else { ns_per_op };
            ours / baseline.ns
        };
        Self {
            verb: job.access.name(),
            title: job.access.title(),
            bytes: job.access.is_sized().then_some(job.bytes),
            depth: job.depth,
            clients,
            ops: sums.ops,
            latency_ns_p50,
            latency_ns_p99: sums.latency_ps.value_at_quantile(0.99) as f64 / 1e3,
            latency_ns_mean: sums.latency_ps.mean() / 1e3,
            timed_block_ops: sums.block_ops,
            ns_per_op,
            rate_per_s,
            slowest_client_share: speed.slowest(),
            bytes_per_s: bytes / ops * rate_per_s,
            round_trips_per_op: sums.stats.round_trips as f64 / ops,
            baseline: baseline.map(|baseline| baseline.name),
            baseline_ns: baseline.map(|baseline| baseline.ns),
            ratio_of: if baseline.is_some_and(|baseline| baseline.is_latency) { "p50" } else { "ns/op" },
            ratio: baseline.map(ratio),
        }
    }
}

impl Probe {
    pub(super) fn new(
        fleet: &Fleet,
        settings: Settings,
        rows: Vec<Row>,
        skipped: Vec<&'static str>,
        wall: Wall,
    ) -> Self {
        Self {
            command: "probe",
            version: env!("CARGO_PKG_VERSION"),
            r#virtual: fleet.is_virtual(),
            settings,
            capabilities: fleet.cluster().capabilities().into(),
            rows,
            skipped,
            wall,
        }
    }

    pub(super) fn print(&self) -> Result<(), String> {
        unless_broken_pipe(self.write(&mut io::stdout().lock()))
    }

    fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let Settings { transport, servers, working_set_bytes, seed, .. } = &self.settings;
        let clock = if self.r#virtual { "virtual time" } else { "real time" };
        writeln!(
            out,
            "{transport}: {servers} server(s), working set {}, seed {seed}, {clock}",
            Size(*working_set_bytes)
        )?;
        let mut table = Table::new(&[
            "access", "size", "depth", "clients", "p50", "p99", "per s", "slowest", "bytes/s", "trips",
            "ns/op", "baseline", "ratio", "of", "beside",
        ]);
        for row in &self.rows {
            let or_dash = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
            let mark = if row.timed_block_ops > 1 { "*" } else { "" };
            table.row(vec![
                row.title.to_owned(),
                or_dash(row.bytes.map(|bytes| Size(bytes as u64).to_string())),
                row.depth.to_string(),
                row.clients.to_string(),
                time(row.latency_ns_p50) + mark,
                time(row.latency_ns_p99) + mark,
                count(row.rate_per_s),
                format!("{:.2}", row.slowest_client_share),
                count(row.bytes_per_s),
                format!("{:.2}", row.round_trips_per_op),
                format!("{:.1}", row.ns_per_op),
                or_dash(row.baseline_ns.map(|ns| format!("{ns:.1}"))),
                or_dash(row.ratio.map(|ratio| format!("{ratio:.2}"))),
                or_dash(row.ratio.map(|_| row.ratio_of.to_owned())),
                or_dash(row.baseline.map(str::to_owned)),
            ]);
        }
        table.print(out)?;
        if let Some(row) = self.rows.iter().find(|row| row.timed_block_ops > 1) {
            writeln!(
                out,
                "* too short for a clock: timed in blocks of {}, percentiles are those of the blocks' averages",
                row.timed_block_ops
            )?;
        }
        writeln!(
            out,
            "ns/op: a client's time for each access, median over windows of 1 ms; ratio: what 'of' says, over the baseline, \
             which is in ns as well; slowest: what the slowest client got of what they got on average"
        )?;
        for verb in &self.skipped {
            writeln!(out, "{verb}: this transport has none")?;
        }
        Ok(())
    }
}
