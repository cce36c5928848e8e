//! `farwood probe`: what verbs, ordered batches and calls cost on a transport, each beside a baseline in the same run.
//!
//! | file | what it is |
//! |---|---|
//! | `access` | what a row measures, as verbs |
//! | `measure` | one client of a row: depth, time, counters |
//! | `raw` | the baseline on plain memory |
//! | `bare` | the baseline of TCP: a bare pair of sockets |
//! | `result` | the rows, as a table and as JSON |

mod access;
mod bare;
mod measure;
mod raw;
mod result;

use crate::arena::Arena;
use crate::fleet::{Fleet, MAX_CLIENTS, Meeting, Transport, TransportArguments, World, all, with_session};
use crate::report::{JsonFile, Wall};
use crate::units::{Size, check_seconds, index, list, nanos};
use access::{Access, LINE};
use farwood_fabric::clock::RealClock;
use farwood_fabric::transport::url::PoolUrl;
use measure::{Job, Tally};
use raw::Raw;
use result::{Baseline, Probe, Row, Settings, Speed};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

/// How often a row alternates between the transport and its baseline, so that both see the same weather.
const SLICES: u32 = 3;
/// How long a row lasts if nothing is said, and how many accesses each client makes in a simulated world.
const DEFAULT_SECONDS: f64 = 0.2;
const DEFAULT_VIRTUAL_OPS: u64 = 10_000;
const MAX_DEPTH: u32 = 1024;
const MAX_ACCESS_BYTES: u64 = 64 << 20;

#[derive(clap::Args, Debug)]
pub(crate) struct Arguments {
    #[command(flatten)]
    place: TransportArguments,

    /// Bytes of an access, with commas
    #[arg(long, default_value = "8,64,256,1024,4096,65536", value_name = "SIZES")]
    sizes: String,

    /// Accesses that each client keeps in flight, with commas
    #[arg(long, default_value = "1,16", value_name = "DEPTHS")]
    depths: String,

    /// Clients, each with a session, an endpoint and a thread of its own; with commas, one row for each number
    #[arg(long, default_value = "1", value_name = "NUMBERS")]
    clients: String,

    /// Time for each row, of the transport and of its baseline [default: 0.2 on a real transport]
    #[arg(long)]
    seconds: Option<f64>,

    /// Accesses of each client for each row [default: 10000 in a simulated world]
    #[arg(long)]
    ops: Option<u64>,

    /// Memory that the accesses go to, on all servers together
    #[arg(long, default_value = "64MiB", value_name = "SIZE")]
    working_set: String,

    /// Which accesses, with commas: read, write, cas, masked-cas, faa, write-write, read-read, cas-read, read-cas, call
    /// [default: all]
    #[arg(long)]
    verbs: Option<String>,

    /// Where accesses go, and everything random in a simulated world, comes from it
    #[arg(long, default_value_t = 1)]
    seed: u64,

    /// Write all rows and settings to this file, too
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// What a real transport is compared with.
enum Beside {
    /// The same access on plain memory.
    Memory(Raw),
    /// A round trip on a bare socket.
    Socket,
}

impl Beside {
    /// Nanoseconds for each access, in one window after the other.
    fn measure(&mut self, job: &Job, clients: u32) -> Result<Vec<f64>, String> {
        match self {
            Self::Memory(raw) => raw.measure(job, clients),
            Self::Socket => bare::measure(job, clients),
        }
    }

    fn name(&self, job: &Job) -> &'static str {
        match self {
            Self::Memory(_) => raw::name(job.access, job.bytes),
            Self::Socket => bare::NAME,
        }
    }
}

/// The arguments, checked.
struct Plan {
    transport: Transport,
    sizes: Vec<u64>,
    depths: Vec<u32>,
    clients: Vec<u32>,
    seconds: Option<f64>,
    ops: Option<u64>,
    working_set: u64,
    verbs: Vec<Access>,
    seed: u64,
}

impl Plan {
    fn new(arguments: &Arguments) -> Result<Self, String> {
        let transport = arguments.place.parse(World::USUAL)?;
        let sizes = list("--sizes", &arguments.sizes, |text| text.parse().map(|Size(bytes)| bytes))?;
        if let Some(large) = sizes.iter().find(|bytes| **bytes > MAX_ACCESS_BYTES) {
            return Err(format!("--sizes: {} is more than {}", Size(*large), Size(MAX_ACCESS_BYTES)));
        }
        let depth = |text: &str| match text.parse() {
            Ok(depth) if (1..=MAX_DEPTH).contains(&depth) => Ok(depth),
            _ => Err(format!("'{text}' is no number from 1 to {MAX_DEPTH}")),
        };
        let depths = list("--depths", &arguments.depths, depth)?;
        let clients = list("--clients", &arguments.clients, |text| match text.parse() {
            Ok(clients) if (1..=MAX_CLIENTS).contains(&clients) => Ok(clients),
            _ => Err(format!("'{text}' is no number from 1 to {MAX_CLIENTS}")),
        })?;
        check_seconds(arguments.seconds)?;
        if arguments.ops == Some(0) {
            return Err("--ops: a row needs at least 1".to_owned());
        }
        let working_set =
            arguments.working_set.parse::<Size>().map_err(|why| format!("--working-set: {why}"))?.0;
        let verbs = match &arguments.verbs {
            Some(names) => names.split(',').map(Access::parse).collect::<Result<_, _>>()?,
            None => Access::ALL.to_vec(),
        };
        let (seconds, ops, seed) = (arguments.seconds, arguments.ops, arguments.seed);
        Ok(Self { transport, sizes, depths, clients, seconds, ops, working_set, verbs, seed })
    }

    /// The rows: each access with its sizes, one after the other, at each depth, with each number of clients.
    fn rows(&self) -> impl Iterator<Item = (Access, u64, u32, u32)> + '_ {
        let sizes = |access: Access| if access.is_sized() { self.sizes.clone() } else { vec![8] };
        let accesses = self
            .verbs
            .iter()
            .flat_map(move |access| sizes(*access).into_iter().map(move |bytes| (*access, bytes)));
        let deep =
            accesses.flat_map(|(access, bytes)| self.depths.iter().map(move |depth| (access, bytes, *depth)));
        deep.flat_map(|(access, bytes, depth)| {
            self.clients.iter().map(move |clients| (access, bytes, depth, *clients))
        })
    }

    /// The largest slot must fit into each server's part of the working set.
    fn check_working_set(&self, servers: u64) -> Result<(), String> {
        let largest = self.rows().map(|(access, bytes, ..)| access.stride(bytes)).max().unwrap_or(LINE);
        let least = largest.saturating_mul(servers);
        if self.working_set < least {
            return Err(format!(
                "--working-set: {} is less than the {} that the largest access takes on {servers} server(s)",
                Size(self.working_set),
                Size(least)
            ));
        }
        Ok(())
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, String> {
    let plan = Plan::new(arguments)?;
    plan.check_working_set(1)?;
    let json = JsonFile::open(arguments.json.as_deref())?;
    let clock = RealClock::new();
    // The baseline needs memory for copies and memory for atomics.
    let fleet =
        Fleet::open(&plan.transport, plan.working_set, plan.working_set.saturating_mul(2), plan.seed)?;
    plan.check_working_set(fleet.cluster().view().servers.len() as u64)?;
    let mut baseline = match plan.transport {
        _ if fleet.is_virtual() => None,
        Transport::Tcp(_) | Transport::At { url: PoolUrl::Tcp(_), .. } => Some(Beside::Socket),
        _ => Some(Beside::Memory(Raw::new(plan.working_set))),
    };
    let (rows, skipped) = Arena::with(&fleet, "probe", plan.working_set, |arena| {
        let mut rows = Vec::new();
        let mut skipped = Vec::new();
        for cell in plan.rows() {
            let access = cell.0;
            if access.is_supported(&fleet.cluster().capabilities()) {
                rows.push(row(&plan, &fleet, arena, baseline.as_mut(), cell)?);
            } else if !skipped.contains(&access.name()) {
                skipped.push(access.name());
            }
        }
        Ok((rows, skipped))
    })?;
    let settings = Settings {
        transport: arguments.place.transport.clone(),
        servers: fleet.cluster().view().servers.len(),
        clients: plan.clients.clone(),
        seconds_per_row: plan.seconds,
        ops_per_client: plan.ops,
        working_set_bytes: plan.working_set,
        seed: plan.seed,
    };
    let wall = Wall { seconds: clock.now() as f64 / 1e9 };
    let probe = Probe::new(&fleet, settings, rows, skipped, wall);
    probe.print()?;
    json.map_or(Ok(()), |file| file.write(&probe))?;
    Ok(ExitCode::SUCCESS)
}

/// Measures one row: the transport and its baseline in turn.
fn row(
    plan: &Plan,
    fleet: &Fleet,
    arena: &Arena,
    mut baseline: Option<&mut Beside>,
    (access, bytes, depth, clients): (Access, u64, u32, u32),
) -> Result<Row, String> {
    let servers = arena.servers() as u64;
    let stride = access.stride(bytes);
    let is_virtual = fleet.is_virtual();
    // A count is made exactly, in one go.
    let slices = if plan.ops.is_some() || is_virtual { 1 } else { SLICES };
    let seconds = match (plan.seconds, plan.ops) {
        (None, None) if !is_virtual => Some(DEFAULT_SECONDS),
        (seconds, _) => seconds,
    };
    let ops = match (plan.seconds, plan.ops) {
        (None, None) if is_virtual => DEFAULT_VIRTUAL_OPS,
        (_, ops) => ops.unwrap_or(u64::MAX),
    };
    let mut job = Job {
        access,
        bytes: index(bytes),
        depth,
        slots: plan.working_set / servers / stride * servers,
        stride,
        ops,
        span_ns: seconds.map_or(u64::MAX, |seconds| nanos(seconds / f64::from(slices))),
        seed: plan.seed,
        is_virtual,
    };
    let mut sums = Tally::new(1)?;
    let (mut raw, mut rates) = (Vec::new(), Vec::new());
    let mut ops_of = vec![0; clients as usize];
    for slice in 0..slices {
        job.seed = plan.seed ^ u64::from(slice) << 48;
        let tallies = slice_of(fleet, arena, &job, clients)?;
        let rate = |tally: &Tally| tally.ops as f64 / (tally.elapsed_ns.max(1) as f64 / 1e9);
        rates.push(tallies.iter().map(rate).sum::<f64>());
        for (ops, tally) in ops_of.iter_mut().zip(&tallies) {
            sums.merge(tally)?;
            *ops += tally.ops;
        }
        if let Some(baseline) = &mut baseline {
            raw.extend(baseline.measure(&job, clients)?);
        }
    }
    let beside = match fleet.idle_round_trip_ns() {
        Some(idle) => Some(Baseline {
            name: "idle round trips",
            ns: idle * f64::from(access.round_trips()),
            is_latency: true,
        }),
        None => baseline.filter(|_| !raw.is_empty()).map(|baseline| Baseline {
            name: baseline.name(&job),
            ns: median(raw),
            is_latency: matches!(baseline, Beside::Socket) && depth == 1,
        }),
    };
    let speed = Speed { rate_per_s: median(rates), ns_per_op: median(sums.ns_per_op.clone()), ops_of };
    Ok(Row::new(&job, &sums, &speed, beside))
}

/// One slice of a row: all clients at once.
fn slice_of(fleet: &Fleet, arena: &Arena, job: &Job, clients: u32) -> Result<Vec<Tally>, String> {
    let (meeting, options) = (Meeting::of(clients), fleet.options("probe"));
    all(fleet.run(clients, |index, cluster| {
        let (job, arena, meeting) = (job.clone(), arena.clone(), Arc::clone(&meeting));
        async move {
            let body = async |meeting: &Meeting| {
                with_session(&cluster, options, async |endpoint| {
                    measure::client(job, arena, endpoint.clone(), index, meeting).await
                })
                .await
            };
            meeting.attend(body).await
        }
    }))
}

fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples.get(samples.len() / 2).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(sizes: &str, depths: &str, verbs: &str) -> Result<Plan, String> {
        let (place, working_set) = (TransportArguments::of("local"), "1MiB".to_owned());
        let (sizes, depths, verbs) = (sizes.to_owned(), depths.to_owned(), Some(verbs.to_owned()));
        let (clients, seconds, ops, seed, json) = ("1".to_owned(), None, None, 1, None);
        Plan::new(&Arguments { place, sizes, depths, clients, seconds, ops, working_set, verbs, seed, json })
    }

    #[test]
    fn every_access_gets_its_sizes_and_depths() {
        let rows: Vec<_> = plan("8,1KiB", "1,4", "read,cas").unwrap().rows().collect();
        assert_eq!(
            rows,
            [
                (Access::Read, 8, 1, 1),
                (Access::Read, 8, 4, 1),
                (Access::Read, 1024, 1, 1),
                (Access::Read, 1024, 4, 1),
                (Access::Cas, 8, 1, 1),
                (Access::Cas, 8, 4, 1),
            ]
        );
    }

    #[test]
    fn what_cannot_be_measured_is_refused() {
        for (sizes, depths, verbs) in [
            ("8,0", "1", "read"),
            ("8,", "1", "read"),
            ("65MiB", "1", "read"),
            ("8", "0", "read"),
            ("8", "1025", "read"),
            ("8", "1", "read,erase"),
        ] {
            assert!(plan(sizes, depths, verbs).is_err(), "{sizes} {depths} {verbs}");
        }
    }

    #[test]
    fn the_working_set_holds_one_slot_on_each_server() {
        let plan = plan("512KiB", "1", "read").unwrap();
        assert!(plan.check_working_set(2).is_ok() && plan.check_working_set(3).is_err());
    }

    #[test]
    fn the_median_is_the_one_in_the_middle() {
        assert!((median(vec![9.0, 1.0, 2.0]) - 2.0).abs() < f64::EPSILON);
    }
}
