//! Engines in adversarial worlds: all operations mixed, every kind of fault. Every trial must be clean, and the rare paths must really
//! have run.
//!
//! `FARWOOD_TRIALS` sets how many trials each test runs, for longer runs.

mod bulk;
mod recovery;
mod settled;
mod sherman;
mod sphinx;

use farwood_index::Engine;
use farwood_sim::trial::{Report, Settings, Trial, run};
use std::collections::BTreeMap;

/// How many trials: the given number, or what the environment says.
fn trials(usual: u64) -> u64 {
    std::env::var("FARWOOD_TRIALS").ok().and_then(|n| n.parse().ok()).unwrap_or(usual)
}

/// Runs a trial, which must be clean.
fn clean<E: Engine + std::fmt::Debug>(engine: &E, trial: &Trial) -> Report {
    run(engine, trial, Settings::default()).unwrap_or_else(|failure| panic!("{engine:?}: {trial}\n{failure}"))
}

/// Adds up what the trials did.
#[derive(Default)]
struct Sum {
    operations: u64,
    marks: BTreeMap<&'static str, u64>,
}

impl Sum {
    fn add(&mut self, report: &Report) {
        self.operations += report.operations;
        for (mark, hits) in &report.marks {
            *self.marks.entry(mark).or_default() += hits;
        }
    }

    /// Rare paths ran, each as often as it must in a run of the usual length, or at all.
    fn assert_ran(&self, paths: &[(&str, u64)]) {
        println!("{} operations, {:?}", self.operations, self.marks);
        let is_usual = std::env::var_os("FARWOOD_TRIALS").is_none();
        for (path, least) in paths {
            let least = if is_usual { *least } else { 1 };
            let ran = self.marks.get(path).copied().unwrap_or(0);
            assert!(ran >= least, "'{path}' ran {ran} times, not {least}; what ran: {:?}", self.marks);
        }
    }
}
