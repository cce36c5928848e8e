//! `farwood simulate`: many trials from many seeds, or one trial from its text; a failure is shrunk and printed as a line that
//! replays it.

use crate::report::unless_broken_pipe;
use clap::ValueEnum;
use farwood_fabric::clock::RealClock;
use farwood_fabric::transport::sim::Sabotage;
use farwood_index::engine::sherman::{Config, Sherman};
use farwood_index::engine::sphinx::{self, Sphinx};
use farwood_sim::reference::{Bugs, cells::Cells, records::Records};
use farwood_sim::shrink::shrink;
use farwood_sim::spelling::Spelling;
use farwood_sim::trial::{self, Failure, Report, Settings, Trial};
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::process::ExitCode;

#[derive(clap::Args, Debug)]
pub(crate) struct Arguments {
    /// What to try
    #[arg(long, value_enum, default_value_t = SubjectName::Cells)]
    subject: SubjectName,

    /// How many trials, each with its own seed and faults
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u64).range(1..=100_000_000))]
    trials: u64,

    /// The first seed
    #[arg(long, default_value_t = 0)]
    seed: u64,

    /// Somebody dies in every trial, and so do up to so many of those who clean up, one after the other
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=16))]
    dying_adopters: Option<u32>,

    /// Run this one trial instead, as printed by a failure
    #[arg(long, value_name = "TEXT")]
    trial: Option<String>,

    /// Make a known mistake, to see it caught
    #[arg(long, value_enum)]
    mistake: Option<Mistake>,

    /// How many runs may go into making a failing trial small
    #[arg(long, default_value_t = 300)]
    shrink: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum, Debug)]
enum SubjectName {
    /// Cells updated in place under remote locks
    Cells,
    /// Immutable records behind words that are swung by CAS
    Records,
    /// The B-link tree, with nodes of four entries and next to no cache
    Sherman,
    /// The radix tree with its hash table and next to no filter, on keys of every spelling
    Sphinx,
    /// The radix tree by itself
    Art,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum, Debug)]
enum Mistake {
    /// A reader trusts a single READ (cells)
    TrustSingleRead,
    /// A lock is taken from a silent owner without fencing it (cells)
    StealWithoutFence,
    /// A reconnect leaves verbs of the old connection in flight (cells)
    ReconnectWithoutFence,
    /// A retired object is used again at once (records)
    ReuseWithoutEpoch,
    /// What a cached address leads to is taken for current (records)
    TrustHint,
    /// An intent does not name its lock (cells)
    IntentWithoutLock,
}

impl Mistake {
    /// The structure that can make it.
    fn subject(self) -> SubjectName {
        match self {
            Self::ReuseWithoutEpoch | Self::TrustHint => SubjectName::Records,
            _ => SubjectName::Cells,
        }
    }
}

impl Arguments {
    /// Refuses a mistake that the subject cannot make.
    fn check(&self) -> Result<(), String> {
        match self.mistake {
            Some(mistake) if mistake.subject() != self.subject => Err(format!(
                "--mistake: {:?} cannot make this one; add --subject {}",
                self.subject,
                format!("{:?}", mistake.subject()).to_lowercase()
            )),
            _ => Ok(()),
        }
    }

    fn run_one(&self, trial: &Trial) -> Result<Report, Failure> {
        let is = |mistake| self.mistake == Some(mistake);
        let bugs = Bugs {
            trust_single_read: is(Mistake::TrustSingleRead),
            steal_without_fence: is(Mistake::StealWithoutFence),
            reuse_without_epoch: is(Mistake::ReuseWithoutEpoch),
            trust_hint: is(Mistake::TrustHint),
            intent_without_lock: is(Mistake::IntentWithoutLock),
        };
        let sabotage =
            Sabotage { reconnect_without_fence: is(Mistake::ReconnectWithoutFence), ..Sabotage::default() };
        let settings = Settings { sabotage, ..Settings::default() };
        match self.subject {
            SubjectName::Cells => trial::run(&Cells { keys: trial.keys, bugs }, trial, settings),
            SubjectName::Records => trial::run(&Records { keys: trial.keys, bugs }, trial, settings),
            SubjectName::Sherman => {
                let mut config = Config::tiny();
                config.sabotage.zero_freed = true;
                trial::run(&Sherman::new(config), trial, settings)
            }
            SubjectName::Sphinx => trial::run(&Sphinx::new(sphinx::Config::tiny()), trial, settings),
            SubjectName::Art => trial::run(&Sphinx::new(sphinx::Config::art()), trial, settings),
        }
    }

    /// The trials to run.
    fn planned(&self) -> Result<Box<dyn Iterator<Item = Trial>>, String> {
        if let Some(text) = &self.trial {
            return Ok(Box::new(std::iter::once(text.parse().map_err(|error| format!("--trial: {error}"))?)));
        }
        let seeds = (0..self.trials).map({
            let first = self.seed;
            move |n| first.wrapping_add(n)
        });
        let (is_tree, is_spelled) = match self.subject {
            SubjectName::Cells | SubjectName::Records => (false, false),
            SubjectName::Sherman => (true, false),
            SubjectName::Sphinx | SubjectName::Art => (true, true),
        };
        let spellings = if is_spelled { &Spelling::ALL[..] } else { &[Spelling::Numbers] };
        let usual = move |seed: u64, spelling: Spelling| match (is_tree, seed % 2) {
            // Enough keys for several levels, and time to fill and empty them; or few, and nodes that come and go.
            (true, 0) => Trial { seed, spelling, keys: 96, ops: 150, ..Trial::default() },
            (true, _) => Trial { seed, spelling, keys: 24, ops: 150, churn: true, ..Trial::default() },
            (false, _) => Trial { seed, spelling, ..Trial::default() },
        };
        let dying_adopters = self.dying_adopters;
        Ok(Box::new(seeds.zip(spellings.iter().cycle()).map(move |(seed, spelling)| {
            match dying_adopters {
                None => usual(seed, *spelling).with_random_faults(),
                // Few keys, so that somebody always waits for the dead.
                Some(count) => {
                    Trial { seed, spelling: *spelling, keys: 8, ops: 40, tasks: 2, ..Trial::default() }
                        .with_dying_adopters(count)
                }
            }
        })))
    }
}

/// What all trials did together.
#[derive(Default)]
struct Sum {
    trials: u64,
    operations: u64,
    unknown: u64,
    recovered: u64,
    /// Trials in which somebody died who cleaned up.
    adopters_died: u64,
    verbs: u64,
    torn: u64,
    late: u64,
    virtual_ns: u64,
    /// The hash of the last trial.
    trace_hash: u64,
    marks: BTreeMap<&'static str, u64>,
}

impl Sum {
    fn add(&mut self, report: &Report) {
        self.trials += 1;
        self.operations += report.operations;
        self.unknown += report.unknown;
        self.recovered += report.recovered;
        self.adopters_died += u64::from(!report.struck.is_empty());
        self.verbs += report.sim.counts.verbs;
        self.torn += report.sim.counts.torn;
        self.late += report.sim.counts.late;
        self.virtual_ns += report.sim.virtual_ns;
        self.trace_hash = report.sim.trace_hash;
        for (mark, hits) in &report.marks {
            *self.marks.entry(mark).or_default() += hits;
        }
    }

    /// Prints it; a reader that has gone (`| head`) is no failure.
    fn print(&self, seconds: f64, out: &mut impl Write) -> io::Result<()> {
        let rows = [
            ("trials, all clean", self.trials),
            ("operations checked", self.operations),
            ("of unknown outcome", self.unknown),
            ("sessions that died and were recovered", self.recovered),
            ("trials in which one died who cleaned up", self.adopters_died),
            ("verbs that took effect", self.verbs),
            ("torn", self.torn),
            ("late or never (lost, cut, fenced)", self.late),
        ];
        for (what, count) in rows {
            writeln!(out, "{count:>16}  {what}")?;
        }
        writeln!(out, "{:>16.3}  seconds of virtual time in {seconds:.1} s", self.virtual_ns as f64 / 1e9)?;
        if self.trials == 1 {
            writeln!(out, "{:>16x}  trace hash", self.trace_hash)?;
        }
        writeln!(out, "rare paths that ran:")?;
        for (mark, hits) in &self.marks {
            writeln!(out, "{hits:>16}  {}", mark.replace('_', " "))?;
        }
        Ok(())
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, String> {
    arguments.check()?;
    let planned = arguments.planned()?;
    let clock = RealClock::new();
    let mut sum = Sum::default();
    for trial in planned {
        match arguments.run_one(&trial) {
            Ok(report) => sum.add(&report),
            Err(failure) => {
                let written = report_failure(arguments, trial, failure, sum.trials, &mut io::stdout());
                return unless_broken_pipe(written).map(|()| ExitCode::FAILURE);
            }
        }
    }
    let written = sum.print(clock.now() as f64 / 1e9, &mut io::stdout());
    unless_broken_pipe(written).map(|()| ExitCode::SUCCESS)
}

fn report_failure(
    arguments: &Arguments,
    trial: Trial,
    failure: Failure,
    clean: u64,
    out: &mut impl Write,
) -> io::Result<()> {
    writeln!(out, "after {clean} clean trials, this one failed ({}):\n  {trial}", failure.kind())?;
    let small = shrink(trial, failure, arguments.shrink, |trial| arguments.run_one(trial).map(drop));
    writeln!(out, "as small as it got in {} runs:\n  --trial '{}'\n", small.attempts, small.trial)?;
    writeln!(out, "{}", small.failure)
}
