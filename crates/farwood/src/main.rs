//! The one binary: memory servers, what measures and tests transports, and trials in the simulator; benchmarks and the store
//! itself come with their engines.

#![forbid(unsafe_code)]

mod archive;
mod arena;
mod bench;
mod compare;
mod devices;
mod evict;
mod fleet;
mod gateway;
mod interrupt;
mod keeping;
mod litmus;
mod page;
mod probe;
mod report;
mod reproduce;
mod serve;
mod simulate;
mod stat;
mod status;
mod store;
mod units;
mod up;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// An ordered key-value index in far memory.
#[derive(Parser, Debug)]
#[command(version, about)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Run everything on this machine: memory servers, an index, and a gateway for Redis clients
    Up(Box<up::Arguments>),
    /// Serve Redis clients from an index of a pool
    Gateway(Box<gateway::Arguments>),
    /// Run a memory server for other processes
    Serve(serve::Arguments),
    /// Ask memory servers how they do
    Status(status::Arguments),
    /// End a session of a pool, whether it is alive or not, so that others recover what it held
    Evict(evict::Arguments),
    /// List RDMA devices, what they can do, and what Farwood will use of it
    Devices(devices::Arguments),
    /// Create an index in a pool
    Create(store::Create),
    /// Print the value of a key
    Get(store::Get),
    /// Set the value of a key
    Put(store::Put),
    /// Remove a key
    Del(store::Get),
    /// Print a range of keys and values
    Scan(store::Scan),
    /// Set many pairs from CSV or JSON lines
    Load(Box<store::Load>),
    /// Print a whole index as CSV or JSON lines
    Dump(Box<store::Dump>),
    /// Save indexes of a pool, which may be in use, to a file
    Save(store::Save),
    /// Restore indexes from a file that was saved
    Restore(store::Restore),
    /// Ask a gateway how it does
    Stat(stat::Arguments),
    /// Walk a whole index that nobody writes to and verify it; with --repair, free what is leaked
    Check(store::Check),
    /// Drop an index and free its memory
    Drop(store::Whole),
    /// List the indexes of a pool
    List(store::Place),
    /// Try a structure in simulated worlds, under an adversary, and check everything it does
    Simulate(simulate::Arguments),
    /// Load an index, run a workload on it, and say what every operation cost
    Bench(Box<bench::Arguments>),
    /// Run a paper's experiments in the simulator and set what comes out beside what the paper says
    Reproduce(reproduce::Arguments),
    /// Make a page from results of `bench --json`, to compare engines or versions
    Report(compare::Arguments),
    /// Measure what verbs, batches and calls cost on a transport, beside a baseline in the same run
    Probe(probe::Arguments),
    /// Test what a transport really does about atomicity and order, beside what is promised
    Litmus(litmus::Arguments),
}

impl Command {
    /// Whether it has a session that it should leave when it is interrupted. Servers and gateways see to that themselves.
    fn joins_a_pool(&self) -> bool {
        match self {
            Self::Evict(_)
            | Self::Create(_)
            | Self::Get(_)
            | Self::Put(_)
            | Self::Del(_)
            | Self::Scan(_)
            | Self::Load(_)
            | Self::Dump(_)
            | Self::Save(_)
            | Self::Restore(_)
            | Self::Check(_)
            | Self::Drop(_)
            | Self::List(_)
            | Self::Bench(_)
            | Self::Probe(_)
            | Self::Litmus(_) => true,
            Self::Up(_)
            | Self::Gateway(_)
            | Self::Serve(_)
            | Self::Status(_)
            | Self::Devices(_)
            | Self::Stat(_)
            | Self::Simulate(_)
            | Self::Reproduce(_)
            | Self::Report(_) => false,
        }
    }
}

fn main() -> ExitCode {
    let Arguments { command } = Arguments::parse();
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_target(false).init();
    if command.joins_a_pool() {
        if let Err(message) = interrupt::listen() {
            eprintln!("farwood: {message}");
            return ExitCode::from(2);
        }
    }
    let result = match command {
        Command::Up(arguments) => up::run(&arguments),
        Command::Gateway(arguments) => gateway::run(&arguments),
        Command::Serve(arguments) => serve::run(&arguments),
        Command::Status(arguments) => status::run(&arguments),
        Command::Evict(arguments) => evict::run(&arguments),
        Command::Devices(arguments) => devices::run(&arguments),
        Command::Create(arguments) => store::create(&arguments),
        Command::Get(arguments) => store::get(&arguments),
        Command::Put(arguments) => store::put(&arguments),
        Command::Del(arguments) => store::delete(&arguments),
        Command::Scan(arguments) => store::scan(&arguments),
        Command::Load(arguments) => store::load(&arguments),
        Command::Dump(arguments) => store::dump(&arguments),
        Command::Save(arguments) => store::save(&arguments),
        Command::Restore(arguments) => store::restore(&arguments),
        Command::Stat(arguments) => stat::run(&arguments),
        Command::Check(arguments) => store::check(&arguments),
        Command::Drop(arguments) => store::drop_index(&arguments),
        Command::List(place) => store::list(&place),
        Command::Simulate(arguments) => simulate::run(&arguments),
        Command::Bench(arguments) => bench::run(&arguments),
        Command::Reproduce(arguments) => reproduce::run(&arguments),
        Command::Report(arguments) => compare::run(&arguments),
        Command::Probe(arguments) => probe::run(&arguments),
        Command::Litmus(arguments) => litmus::run(&arguments),
    };
    match result {
        Err(message) if interrupt::came() => {
            eprintln!("farwood: {message}");
            ExitCode::from(interrupt::EXIT_CODE)
        }
        Ok(_) if interrupt::came() => ExitCode::from(interrupt::EXIT_CODE),
        Ok(code) => code,
        Err(message) => {
            eprintln!("farwood: {message}");
            ExitCode::from(2)
        }
    }
}
