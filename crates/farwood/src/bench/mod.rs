//! `farwood bench`: loads an index, runs a workload on it, and says what every operation cost.
//!
//! | file | what it is |
//! |---|---|
//! | `engines` | the engines by name |
//! | `baseline` | what they are compared with |
//! | `drive` | a run, phase by phase |
//! | `task` | one task of it |
//! | `verify`, `checked` | a model of the index, and how every answer is held against it |
//! | `join` | several processes in one run |
//! | `tally`, `result` | what was measured, and how it is told |

mod baseline;
mod checked;
mod drive;
mod engines;
mod join;
mod result;
mod tally;
mod task;
mod verify;

use crate::fleet::{Fleet, MAX_CLIENTS, Shape, Transport, TransportArguments, World};
use crate::report::{JsonFile, Wall, unless_broken_pipe};
use crate::units::{Size, check_seconds};
use engines::{Choice, ENGINES, Load, with_engine};
use farwood_fabric::clock::RealClock;
use farwood_workload::{Chooser, KeyKind, KeySet, Stream, StreamOptions, Values, Workload};
use join::{Joint, MAX_PROCESSES};
use result::Run;
use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// In a simulated world threads cost nothing but memory.
const MAX_SIMULATED_THREADS: u32 = 4096;
const MAX_TASKS: u32 = 1024;
/// What a key may take in far memory besides its bytes, so that servers of ours are large enough.
const OVERHEAD_BYTES_PER_KEY: u64 = 128;

#[derive(clap::Args, Debug)]
pub(crate) struct Arguments {
    /// Engines to run one after the other, with commas (see --list)
    #[arg(long, required_unless_present = "list", default_value = "")]
    engine: String,

    #[command(flatten)]
    place: TransportArguments,

    /// A workload by name (see --list), or a mix such as get=50,put=45,scan=5:100
    #[arg(long, default_value = "ycsb-c")]
    workload: String,

    /// Keys to load
    #[arg(long, default_value_t = 1_000_000)]
    keys: u64,

    /// Operations of all clients together [default: as many as there are keys]
    #[arg(long, conflicts_with = "seconds")]
    ops: Option<u64>,

    /// Run for this long instead; virtual time in a simulated world
    #[arg(long)]
    seconds: Option<f64>,

    /// What keys look like: u64, sequential, email; u64:32 pads to 32 bytes
    #[arg(long, default_value = "u64")]
    key_set: String,

    /// Bytes of a value, such as 8 or 16-400
    #[arg(long, default_value = "8")]
    value_size: String,

    /// How keys are chosen: uniform, zipfian:0.99, zipfian:0.99@1e9, latest, sequential [default: as the workload says]
    #[arg(long)]
    dist: Option<String>,

    /// Compute servers, each with a session of its own
    #[arg(long, default_value_t = 1)]
    compute: u32,

    /// Threads of each compute server
    #[arg(long, default_value_t = 1)]
    threads: u32,

    /// Operations that each thread has under way at a time
    #[arg(long, default_value_t = 1)]
    tasks: u32,

    /// Memory servers, where they are ours to start
    #[arg(long)]
    memory: Option<u16>,

    /// A switch of the engine, as name=value; may be repeated
    #[arg(long, value_name = "SWITCH=VALUE")]
    set: Vec<String>,

    /// Decides all that is random
    #[arg(long, default_value_t = 1)]
    seed: u64,

    /// Check every answer against a model while it runs; times then include that
    #[arg(long)]
    verify: bool,

    /// So many processes, each started with these same arguments, make one run; the one that comes first tells the result
    #[arg(long, value_name = "PROCESSES")]
    join: Option<u32>,

    /// Write the result to this file, too
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// List the engines and workloads
    #[arg(long)]
    list: bool,
}

/// The arguments, checked.
#[derive(Clone, Debug)]
struct Plan {
    transport: Transport,
    workload: Workload,
    keys: u64,
    ops: Option<u64>,
    seconds: Option<f64>,
    key_kind: KeyKind,
    values: Values,
    chooser: Option<Chooser>,
    compute: u32,
    threads: u32,
    tasks: u32,
    set: Vec<(String, String)>,
    seed: u64,
    verify: bool,
    /// This process's place among several.
    joint: Option<Joint>,
    /// Whether a terminal is to see how far it is.
    shows_progress: bool,
}

fn option<T: std::str::FromStr<Err: std::fmt::Display>>(name: &str, text: &str) -> Result<T, String> {
    text.parse().map_err(|error| format!("{name}: {error}"))
}

impl Plan {
    fn new(arguments: &Arguments) -> Result<Self, String> {
        let mut plan = Self {
            transport: arguments.place.parse(World::USUAL)?,
            workload: option("--workload", &arguments.workload)?,
            keys: arguments.keys,
            ops: arguments.ops,
            seconds: arguments.seconds,
            key_kind: option("--key-set", &arguments.key_set)?,
            values: option("--value-size", &arguments.value_size)?,
            chooser: arguments.dist.as_deref().map(|text| option("--dist", text)).transpose()?,
            compute: arguments.compute,
            threads: arguments.threads,
            tasks: arguments.tasks,
            set: arguments.set.iter().map(|text| switch(text)).collect::<Result<_, _>>()?,
            seed: arguments.seed,
            verify: arguments.verify,
            joint: None,
            shows_progress: true,
        };
        plan.check_join(arguments.join)?;
        if plan.keys == 0 {
            return Err("--keys: there must be at least 1".to_owned());
        }
        if plan.ops == Some(0) {
            return Err("--ops: there must be at least 1".to_owned());
        }
        check_seconds(plan.seconds)?;
        if plan.ops.is_none() && plan.seconds.is_none() {
            plan.ops = Some(plan.keys);
        }
        let most =
            if matches!(plan.transport, Transport::Sim { .. }) { MAX_SIMULATED_THREADS } else { MAX_CLIENTS };
        let threads = plan.compute.checked_mul(plan.threads);
        if threads.is_none_or(|threads| threads == 0 || threads > most) {
            return Err(format!("--compute, --threads: there can be 1 to {most} threads in all"));
        }
        if !(1..=MAX_TASKS).contains(&plan.tasks) {
            return Err(format!("--tasks: there can be 1 to {MAX_TASKS}"));
        }
        // Streams know best what they can be made from.
        let options =
            StreamOptions { chooser: plan.chooser, clients: plan.clients(), ..StreamOptions::new(plan.keys) };
        Stream::new(&plan.workload, &options).map_err(|error| error.to_string())?;
        plan.shape(arguments.memory)?;
        Ok(plan)
    }

    /// Gives servers of ours as much memory as the keys may need.
    fn shape(&mut self, servers: Option<u16>) -> Result<(), String> {
        let key_bytes = self.key_set().key(0, &mut Vec::new()).len().max(32) as u64;
        let per_key = OVERHEAD_BYTES_PER_KEY + 2 * (key_bytes + u64::from(self.values.bounds().1));
        let needed = self.capacity().saturating_mul(per_key).saturating_add(64 << 20);
        let shape = match (self.transport.shape_mut(), servers) {
            (Some(shape), _) => shape,
            (None, None) => return Ok(()),
            (None, Some(_)) => return Err("--memory: these servers run already".to_owned()),
        };
        match (&shape, servers) {
            (Some(_), Some(_)) => {
                return Err("--memory: the transport says how many servers there are".to_owned());
            }
            (Some(_), None) => {}
            (None, servers) => {
                let servers = servers.unwrap_or(1).max(1);
                let bytes = (needed / u64::from(servers)).saturating_add(32 << 20);
                *shape = Some(Shape::new(servers, bytes.checked_next_multiple_of(8 << 20).unwrap_or(bytes)));
            }
        }
        Ok(())
    }

    fn check_join(&self, processes: Option<u32>) -> Result<(), String> {
        let Some(processes) = processes else { return Ok(()) };
        if !(2..=MAX_PROCESSES).contains(&processes) {
            return Err(format!("--join: there can be 2 to {MAX_PROCESSES} processes"));
        }
        if !matches!(self.transport, Transport::At { .. }) {
            return Err("--join: several processes need servers that run, such as shm://PATH".to_owned());
        }
        if self.verify {
            return Err("--verify: a model does not see what other processes do; leave out --join".to_owned());
        }
        Ok(())
    }

    fn profile(&self) -> Option<String> {
        match &self.transport {
            Transport::Sim { world, .. } => Some(world.name().to_owned()),
            _ => None,
        }
    }

    fn key_set(&self) -> KeySet {
        KeySet::new(self.key_kind, self.seed)
    }

    /// Whether this is the only process, or the first.
    fn is_first(&self) -> bool {
        self.joint.is_none_or(|joint| joint.is_first())
    }

    /// How many tasks there are in all processes.
    fn all_clients(&self) -> u64 {
        self.clients() * u64::from(self.joint.map_or(1, |joint| joint.of))
    }

    /// How many tasks there are in this process.
    fn clients(&self) -> u64 {
        u64::from(self.compute) * u64::from(self.threads) * u64::from(self.tasks)
    }

    fn load(&self) -> Load {
        let key_bytes = match self.key_kind {
            KeyKind::U64 { bytes } | KeyKind::Sequential { bytes } => usize::try_from(bytes).ok(),
            KeyKind::Email => None,
        };
        let (least, most) = self.values.bounds();
        let value_bytes = if least == most { usize::try_from(least).ok() } else { None };
        Load { keys: self.capacity(), key_bytes, value_bytes }
    }

    /// The most keys there can be, as far as it is known.
    fn capacity(&self) -> u64 {
        let inserted = match self.ops {
            _ if !self.workload.inserts() => 0,
            // With what warms up, and what is left over when operations are shared out.
            Some(ops) => ops + ops / 10 + 2 * self.all_clients(),
            None => self.keys,
        };
        self.keys.saturating_add(inserted)
    }
}

/// `name=value`.
fn switch(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err(format!("--set: '{text}' is not of the form name=value")),
    }
}

/// Checks the arguments; the engines by name.
fn prepare(arguments: &Arguments) -> Result<(Plan, Vec<(String, Choice)>), String> {
    let plan = Plan::new(arguments)?;
    let mut choices = Vec::new();
    for name in arguments.engine.split(',') {
        let choice = Choice::new(name, plan.load(), &plan.set)?;
        choice.check(&plan.transport, plan.key_kind)?;
        choices.push((name.to_owned(), choice));
    }
    Ok((plan, choices))
}

/// A run that another command asks for, in the words that a user would.
#[derive(Debug)]
pub(crate) struct Order {
    arguments: Arguments,
    plan: Plan,
    engine: (String, Choice),
}

impl Order {
    /// Checks the words: the arguments of `farwood bench`, for one engine.
    pub(crate) fn parse(words: &[String]) -> Result<Self, String> {
        #[derive(clap::Parser)]
        #[command(no_binary_name = true)]
        struct Line {
            #[command(flatten)]
            arguments: Arguments,
        }
        let line = <Line as clap::Parser>::try_parse_from(words).map_err(|error| error.to_string())?;
        let (mut plan, choices) = prepare(&line.arguments)?;
        plan.shows_progress = false;
        match <[_; 1]>::try_from(choices) {
            Ok([engine]) => Ok(Self { arguments: line.arguments, plan, engine }),
            Err(_) => Err("--engine: one at a time".to_owned()),
        }
    }

    /// How many operations are under way at a time, how many keys are loaded, and how long it runs, if it is told so.
    pub(crate) fn size(&self) -> (u64, u64, f64) {
        (self.plan.clients(), self.plan.keys, self.plan.seconds.unwrap_or(0.0))
    }

    /// Carries it out; the result as `farwood bench --json` writes it.
    pub(crate) fn carry_out(&self) -> Result<serde_json::Value, String> {
        let (name, choice) = &self.engine;
        let run = run_engine(&self.arguments, &self.plan, name, choice)?;
        let run = run.ok_or("the result is with another process")?;
        if let Some(error) = run.first_error.as_ref().filter(|_| run.errors > 0) {
            return Err(format!("{} operations failed, the first: {error}", run.errors));
        }
        serde_json::to_value(run).map_err(|error| error.to_string())
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, String> {
    if arguments.list {
        return list();
    }
    let (plan, choices) = prepare(arguments)?;
    let json = JsonFile::open(arguments.json.as_deref())?;
    let mut runs = Vec::new();
    for (name, choice) in &choices {
        runs.extend(run_engine(arguments, &plan, name, choice)?);
    }
    if runs.is_empty() {
        let said = writeln!(std::io::stdout(), "done; the result is with the process that came first");
        return unless_broken_pipe(said).map(|()| ExitCode::SUCCESS);
    }
    unless_broken_pipe(result::print(&runs, &mut std::io::stdout().lock()))?;
    if let Some(json) = json {
        match &runs[..] {
            [run] => json.write(run)?,
            runs => json.write(&runs)?,
        }
    }
    // Nothing that was measured counts if an answer was wrong.
    let failed = runs.iter().any(|run| run.ops == 0 || run.verified && run.errors > 0);
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Runs one engine. The result, unless it is with another process.
fn run_engine(
    arguments: &Arguments,
    plan: &Plan,
    name: &str,
    choice: &Choice,
) -> Result<Option<Run>, String> {
    let clock = RealClock::new();
    let fleet = Fleet::open(&plan.transport, 0, 0, plan.seed)?;
    check_room(plan, &fleet)?;
    let mut plan = plan.clone();
    if let Some(processes) = arguments.join {
        plan.joint = Some(Joint::enter(&fleet, processes, &settings(&plan, name))?);
    }
    let plan = &plan;
    let measured = with_engine!(choice, engine => drive::drive(engine, plan, &fleet));
    let left = plan.joint.map_or(Ok(()), |joint| joint.leave(&fleet));
    let measured = measured?;
    left?;
    if !plan.is_first() {
        return Ok(None);
    }
    let elapsed_s = measured.tally.elapsed_ns() as f64 / 1e9;
    let text = |text: &Option<String>, default: String| text.clone().unwrap_or(default);
    Ok(Some(Run {
        engine: (*name).to_owned(),
        transport: arguments.place.transport.clone(),
        profile: plan.profile(),
        workload: plan.workload.to_string(),
        key_set: plan.key_kind.to_string(),
        value_size: plan.values.to_string(),
        dist: text(&arguments.dist, plan.workload.chooser().to_string()),
        compute: plan.compute,
        threads: plan.threads,
        tasks: plan.tasks,
        memory: fleet.cluster().view().servers.len(),
        processes: plan.joint.map_or(1, |joint| joint.of),
        set: plan.set.iter().cloned().collect::<BTreeMap<_, _>>(),
        keys: plan.keys,
        ops: measured.tally.ops,
        seed: plan.seed,
        is_virtual: fleet.is_virtual(),
        throughput_ops_s: measured.tally.ops as f64 / elapsed_s.max(1e-9),
        elapsed_s,
        errors: measured.tally.errors,
        first_error: measured.tally.first_error.clone(),
        verified: plan.verify,
        answers_checked: measured.checked.map_or(0, |(answers, _)| answers),
        answers_constrained: measured.checked.map_or(0, |(_, constrained)| constrained),
        compute_cache_bytes: measured.cache_bytes,
        memory_bytes: measured.memory_bytes,
        kinds: result::kinds(&measured.tally, elapsed_s),
        all: result::KindResult::new(&measured.tally.all(), elapsed_s),
        wall: Wall { seconds: clock.now() as f64 / 1e9 },
    }))
}

/// What several processes must agree on.
fn settings(plan: &Plan, engine: &str) -> String {
    let chooser = plan.chooser.unwrap_or(plan.workload.chooser());
    format!(
        "{engine} {} keys={} ops={:?} seconds={:?} {} {} {chooser} {}x{}x{} {:?} seed={}",
        plan.workload,
        plan.keys,
        plan.ops,
        plan.seconds,
        plan.key_kind,
        plan.values,
        plan.compute,
        plan.threads,
        plan.tasks,
        plan.set,
        plan.seed
    )
}

/// Servers that run already must at least have room for the bare keys and values.
fn check_room(plan: &Plan, fleet: &Fleet) -> Result<(), String> {
    let key_bytes = plan.key_set().key(0, &mut Vec::new()).len() as u64;
    let needed = plan.keys.saturating_mul(key_bytes + u64::from(plan.values.bounds().0));
    let view = fleet.cluster().view();
    let main = |server: &farwood_fabric::region::Identity| {
        server
            .regions
            .iter()
            .find(|spec| spec.id == farwood_fabric::RegionId::MAIN)
            .map_or(0, |spec| spec.bytes)
    };
    let there: u64 = view.servers.iter().map(main).sum();
    if needed > there {
        return Err(format!(
            "--keys: {} keys take at least {}, and the servers have {}",
            plan.keys,
            Size(needed),
            Size(there)
        ));
    }
    Ok(())
}

fn list() -> Result<ExitCode, String> {
    let mut out = std::io::stdout().lock();
    let mut print = || {
        writeln!(out, "engines:")?;
        for (name, what) in ENGINES {
            writeln!(out, "  {name:<24} {what}")?;
        }
        writeln!(out, "workloads:")?;
        for workload in Workload::all() {
            let name = workload.name().unwrap_or("");
            writeln!(
                out,
                "  {name:<24} {:<32} {:<20} {}",
                workload.mixes(),
                workload.chooser().to_string(),
                workload.source()
            )?;
        }
        Ok(())
    };
    unless_broken_pipe(print())?;
    Ok(ExitCode::SUCCESS)
}
