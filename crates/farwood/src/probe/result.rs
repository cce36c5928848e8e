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
    pub(super) clients: u32,
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

/// One access at one size and depth.
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
    bytes_per_s: f64,
    round_trips_per_op: f64,
    baseline: Option<&'static str>,
    baseline_ns: Option<f64>,
    /// `ns_per_op` (in a simulated world `latency_ns_p50`) over `baseline_ns`.
    ratio: Option<f64>,
}

impl Row {
    pub(super) fn new(
        job: &Job,
        clients: u32,
        sums: &Tally,
        (rate_per_s, ns_per_op): (f64, f64),
        baseline: Option<Baseline>,
    ) -> Self {
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
            bytes_per_s: bytes / ops * rate_per_s,
            round_trips_per_op: sums.stats.round_trips as f64 / ops,
            baseline: baseline.map(|baseline| baseline.name),
            baseline_ns: baseline.map(|baseline| baseline.ns),
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
        let Settings { transport, servers, clients, working_set_bytes, seed, .. } = &self.settings;
        let clock = if self.r#virtual { "virtual time" } else { "real time" };
        writeln!(
            out,
            "{transport}: {servers} server(s), {clients} client(s), working set {}, seed {seed}, {clock}",
            Size(*working_set_bytes)
        )?;
        let mut table = Table::new(&[
            "access", "size", "depth", "p50", "p99", "per s", "bytes/s", "trips", "ns/op", "baseline",
            "ratio", "beside",
        ]);
        for row in &self.rows {
            let or_dash = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
            let mark = if row.timed_block_ops > 1 { "*" } else { "" };
            table.row(vec![
                row.title.to_owned(),
                or_dash(row.bytes.map(|bytes| Size(bytes as u64).to_string())),
                row.depth.to_string(),
                time(row.latency_ns_p50) + mark,
                time(row.latency_ns_p99) + mark,
                count(row.rate_per_s),
                count(row.bytes_per_s),
                format!("{:.2}", row.round_trips_per_op),
                format!("{:.1}", row.ns_per_op),
                or_dash(row.baseline_ns.map(|ns| format!("{ns:.1}"))),
                or_dash(row.ratio.map(|ratio| format!("{ratio:.2}"))),
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
        let compared = if self.r#virtual {
            "p50"
        } else {
            "ns/op (a client's time for each access, median over windows of 1 ms)"
        };
        writeln!(out, "ratio: {compared} over the baseline, which is in ns as well")?;
        for verb in &self.skipped {
            writeln!(out, "{verb}: this transport has none")?;
        }
        Ok(())
    }
}
