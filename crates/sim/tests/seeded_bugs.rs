//! The harness is tested with mistakes that published codes have made: each must be caught, shrinks to something small that
//! still fails, and the same trial without the mistake is clean.

use farwood_fabric::transport::sim::Sabotage;
use farwood_sim::reference::{Bugs, cells::Cells, records::Records};
use farwood_sim::shrink::shrink;
use farwood_sim::trial::{Failure, FaultKind, Settings, Trial, run};

/// How many seeds a mistake may hide in. It shows in one of twenty or more (see the closing lines of each test's output).
const SEEDS: u64 = 200;

/// Looks for a trial that fails, checks that the mistake is to blame, and shrinks it.
fn must_be_caught(
    bug: &str,
    trial_of: impl Fn(u64) -> Trial,
    wrong: impl Fn(&Trial) -> Result<(), Failure>,
    right: impl Fn(&Trial) -> Result<(), Failure>,
) -> Failure {
    let found = (0..SEEDS).find_map(|seed| {
        let trial = trial_of(seed);
        wrong(&trial).err().map(|failure| (trial, failure))
    });
    let (trial, failure) = found.unwrap_or_else(|| panic!("{bug}: not caught in {SEEDS} seeds"));
    right(&trial).unwrap_or_else(|failure| panic!("{bug}: {trial} fails without the mistake too: {failure}"));
    let kind = failure.kind();
    let small = shrink(trial.clone(), failure, 60, &wrong);
    let replayed = wrong(&small.trial).expect_err("what was shrunk still fails");
    assert_eq!(replayed.kind(), kind);
    println!("{bug}: caught at seed {} as '{kind}', shrunk to: {}", trial.seed, small.trial);
    replayed
}

fn crowded(seed: u64) -> Trial {
    Trial { seed, keys: 3, ..Trial::default() }
}

fn cells(trial: &Trial, bugs: Bugs, sabotage: Sabotage) -> Result<(), Failure> {
    let settings = Settings { sabotage };
    run(&Cells { keys: trial.keys, bugs }, trial, settings).map(drop)
}

fn records(trial: &Trial, bugs: Bugs) -> Result<(), Failure> {
    run(&Records { keys: trial.keys, bugs }, trial, Settings::default()).map(drop)
}

#[test]
fn a_reader_that_trusts_a_single_read() {
    let bugs = Bugs { trust_single_read: true, ..Bugs::default() };
    let failure = must_be_caught(
        "trust_single_read",
        crowded,
        |trial| cells(trial, bugs, Sabotage::default()),
        |trial| cells(trial, Bugs::default(), Sabotage::default()),
    );
    assert_eq!(failure.kind(), "history");
}

#[test]
fn a_lock_stolen_without_a_fence() {
    let bugs = Bugs { steal_without_fence: true, ..Bugs::default() };
    must_be_caught(
        "steal_without_fence",
        |seed| crowded(seed).with_faults(FaultKind::Pause, 8),
        |trial| cells(trial, bugs, Sabotage::default()),
        |trial| cells(trial, Bugs::default(), Sabotage::default()),
    );
}

#[test]
fn a_late_write_after_a_reconnect() {
    let sabotage = Sabotage { reconnect_without_fence: true };
    must_be_caught(
        "reconnect_without_fence",
        |seed| crowded(seed).with_faults(FaultKind::LoseCompletion, 8),
        |trial| cells(trial, Bugs::default(), sabotage),
        |trial| cells(trial, Bugs::default(), Sabotage::default()),
    );
}

#[test]
fn memory_reused_without_an_epoch() {
    let bugs = Bugs { reuse_without_epoch: true, ..Bugs::default() };
    let failure = must_be_caught(
        "reuse_without_epoch",
        crowded,
        |trial| records(trial, bugs),
        |trial| records(trial, Bugs::default()),
    );
    assert_eq!(failure.kind(), "operation", "the reader finds a record that is not the one it wants");
}

#[test]
fn a_stale_hint_taken_for_current() {
    let bugs = Bugs { trust_hint: true, ..Bugs::default() };
    let failure = must_be_caught(
        "trust_hint",
        crowded,
        |trial| records(trial, bugs),
        |trial| records(trial, Bugs::default()),
    );
    assert_eq!(failure.kind(), "history");
}

/// Found by this harness: two locks of one server can be at the same sequence number, so an intent that names only the lock
/// word may be one that was written under another lock, and carrying it out again brings back an old value.
#[test]
fn an_intent_that_does_not_name_its_lock() {
    let bugs = Bugs { intent_without_lock: true, ..Bugs::default() };
    must_be_caught(
        "intent_without_lock",
        |seed| Trial { seed, ..Trial::default() }.with_faults(FaultKind::Pause, 8),
        |trial| cells(trial, bugs, Sabotage::default()),
        |trial| cells(trial, Bugs::default(), Sabotage::default()),
    );
}
