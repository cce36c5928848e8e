//! The one binary: memory servers, what measures and tests transports, and trials in the simulator; benchmarks and the store
//! itself come with their engines.

#![forbid(unsafe_code)]

mod arena;
mod bench;
mod devices;
mod fleet;
mod litmus;
mod probe;
mod report;
mod serve;
mod simulate;
mod status;
mod units;

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
    /// Run a memory server for other processes
    Serve(serve::Arguments),
    /// Ask memory servers how they do
    Status(status::Arguments),
    /// List RDMA devices, what they can do, and what Farwood will use of it
    Devices(devices::Arguments),
    /// Try a structure in simulated worlds, under an adversary, and check everything it does
    Simulate(simulate::Arguments),
    /// Load an index, run a workload on it, and say what every operation cost
    Bench(Box<bench::Arguments>),
    /// Measure what verbs, batches and calls cost on a transport, beside a baseline in the same run
    Probe(probe::Arguments),
    /// Test what a transport really does about atomicity and order, beside what is promised
    Litmus(litmus::Arguments),
}

fn main() -> ExitCode {
    let Arguments { command } = Arguments::parse();
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_target(false).init();
    let result = match command {
        Command::Serve(arguments) => serve::run(&arguments),
        Command::Status(arguments) => status::run(&arguments),
        Command::Devices(arguments) => devices::run(&arguments),
        Command::Simulate(arguments) => simulate::run(&arguments),
        Command::Bench(arguments) => bench::run(&arguments),
        Command::Probe(arguments) => probe::run(&arguments),
        Command::Litmus(arguments) => litmus::run(&arguments),
    };
    match result {
        Ok(code) => code,
        Err(message) => {
            eprintln!("farwood: {message}");
            ExitCode::from(2)
        }
    }
}
