//! The one binary: memory servers, and trials in the simulator; benchmarks and the store itself come with their engines.

#![forbid(unsafe_code)]

mod serve;
mod simulate;
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
    /// Try a structure in simulated worlds, under an adversary, and check everything it does
    Simulate(simulate::Arguments),
}

fn main() -> ExitCode {
    let Arguments { command } = Arguments::parse();
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_target(false).init();
    let result = match command {
        Command::Serve(arguments) => serve::run(&arguments),
        Command::Simulate(arguments) => simulate::run(&arguments),
    };
    match result {
        Ok(code) => code,
        Err(message) => {
            eprintln!("farwood: {message}");
            ExitCode::from(2)
        }
    }
}
