//! The one binary. So far it runs trials in the simulator; memory servers, benchmarks and the store itself come with their
//! transports and engines.

#![forbid(unsafe_code)]

mod simulate;

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
    /// Try a structure in simulated worlds, under an adversary, and check everything it does
    Simulate(simulate::Arguments),
}

fn main() -> ExitCode {
    let Arguments { command } = Arguments::parse();
    let result = match command {
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
