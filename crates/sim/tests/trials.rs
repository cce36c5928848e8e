//! The reference structures in adversarial worlds: every trial must be clean, the same seed must give the same world, and the
//! rare paths must really have run.
//!
//! `FARWOOD_TRIALS` sets how many trials each test runs, for longer runs.

use farwood_sim::reference::{Bugs, cells::Cells, records::Records};
use farwood_sim::trial::{FaultKind, Report, Settings, Trial, run};
use std::collections::{BTreeMap, BTreeSet};

/// How many trials: the given number, or what the environment says.
fn trials(usual: u64) -> u64 {
    std::env::var("FARWOOD_TRIALS").ok().and_then(|n| n.parse().ok()).unwrap_or(usual)
}

fn cells(trial: &Trial) -> Report {
    let subject = Cells { keys: trial.keys, bugs: Bugs::default() };
    run(&subject, trial, Settings::default()).unwrap_or_else(|failure| panic!("cells: {trial}\n{failure}"))
}

fn records(trial: &Trial) -> Report {
    let subject = Records { keys: trial.keys, bugs: Bugs::default() };
    run(&subject, trial, Settings::default()).unwrap_or_else(|failure| panic!("records: {trial}\n{failure}"))
}

/// Adds up what the trials did.
#[derive(Default)]
struct Sum {
    operations: u64,
    torn: u64,
    late: u64,
    marks: BTreeMap<&'static str, u64>,
}

impl Sum {
    fn add(&mut self, report: &Report) {
        self.operations += report.operations;
        self.torn += report.sim.counts.torn;
        self.late += report.sim.counts.late;
        for (mark, hits) in &report.marks {
            *self.marks.entry(mark).or_default() += hits;
        }
    }

    fn assert_ran(&self, paths: &[&str]) {
        for path in paths {
            assert!(self.marks.contains_key(path), "'{path}' never ran; what ran: {:?}", self.marks);
        }
        assert!(self.torn > 0 && self.late > 0, "{} torn, {} late verbs", self.torn, self.late);
    }
}

#[test]
fn cells_survive_every_kind_of_fault() {
    let mut sum = Sum::default();
    for seed in 0..trials(250) {
        sum.add(&cells(&Trial { seed, ..Trial::default() }.with_random_faults()));
        // Many deaths on few keys, so that some die in the middle of a write.
        let crowded = Trial { seed, keys: 3, ops: 20, ..Trial::default() };
        sum.add(&cells(&crowded.clone().with_faults(FaultKind::Kill, 3)));
        sum.add(&cells(&crowded.with_faults(FaultKind::LoseCompletion, 8)));
    }
    sum.assert_ran(&[
        "torn_read",
        "lost_cas",
        "reconnect",
        "lock_taken_unknowingly",
        "write_repeated",
        "session_recovered",
        "lock_of_the_dead_released",
        "write_of_the_dead_finished",
        "new_life",
    ]);
    println!("cells: {} operations, {:?}", sum.operations, sum.marks);
}

#[test]
fn records_survive_every_kind_of_fault() {
    let mut sum = Sum::default();
    for seed in 0..trials(250) {
        sum.add(&records(&Trial { seed, ..Trial::default() }.with_random_faults()));
        let crowded = Trial { seed, keys: 3, ops: 20, ..Trial::default() };
        sum.add(&records(&crowded.clone().with_faults(FaultKind::Kill, 3)));
        sum.add(&records(&crowded.with_faults(FaultKind::LoseCompletion, 8)));
        // Many keys, so that after a lost completion the slot can still tell what became of the CAS.
        let roomy = Trial { seed, keys: 64, ops: 20, ..Trial::default() };
        sum.add(&records(&roomy.with_faults(FaultKind::LoseCompletion, 8)));
    }
    sum.assert_ran(&[
        "lost_cas",
        "reconnect",
        "hint_good",
        "hint_stale",
        "object_reused",
        "claim_lost",
        "outcome_found_out",
        "chunk_inherited",
        "retired_object_inherited",
        "session_recovered",
        "new_life",
    ]);
    println!("records: {} operations, {:?}", sum.operations, sum.marks);
}

#[test]
fn a_full_pool_refuses_and_stays_whole() {
    let mut refused = 0;
    for seed in 0..trials(20) {
        let full = Trial { seed, servers: 1, keys: 256, chunks: Some(4), ..Trial::default() };
        for report in [records(&full), records(&full.with_random_faults())] {
            refused += report.marks.get("pool_full").copied().unwrap_or(0);
        }
    }
    assert!(refused > 100, "{refused} operations found the pool full");
}

/// Records hold no locks, so nothing of an operation that is dropped has to be settled.
#[test]
fn operations_that_are_dropped_have_happened_or_not() {
    let mut dropped = 0;
    for seed in 0..trials(20) {
        let hasty = Trial { seed, cancel: 10, ..Trial::default() };
        for report in [records(&hasty), records(&hasty.with_random_faults())] {
            dropped += report.marks.get("operation_cancelled").copied().unwrap_or(0);
        }
    }
    assert!(dropped > 500, "{dropped} operations were dropped");
}

#[test]
fn compute_servers_leave_while_their_tasks_run() {
    let mut left = 0;
    for seed in 0..trials(40) {
        let restless = Trial { seed, leaves: 2, ..Trial::default() };
        for report in [records(&restless), records(&restless.with_random_faults())] {
            left += report.marks.get("left_in_the_middle").copied().unwrap_or(0);
        }
    }
    assert!(left > 80, "{left} left in the middle");
}

#[test]
fn without_faults_nothing_is_unknown_and_nothing_leaks() {
    for seed in 0..trials(60) {
        let trial = Trial { seed, ..Trial::default() };
        let (cells, records) = (cells(&trial), records(&trial));
        let operations = u64::from(trial.sessions) * u64::from(trial.tasks) * u64::from(trial.ops);
        for report in [&cells, &records] {
            assert_eq!((report.operations, report.unknown, report.recovered), (operations, 0, 0));
            assert_eq!(report.usage.leaked, []);
        }
        assert!(records.usage.in_use <= trial.keys, "one record a key at most");
    }
}

#[test]
fn a_seed_replays_exactly_and_no_other_seed_does() {
    let mut hashes = BTreeSet::new();
    for seed in 0..100 {
        let trial = Trial { seed, ops: 10, ..Trial::default() }.with_random_faults();
        let (once, again) = (records(&trial), records(&trial));
        assert_eq!(once, again, "{trial}");
        // Through its text, as a user would.
        let from_text: Trial = trial.to_string().parse().expect("a trial survives its text");
        assert_eq!(once.sim.trace_hash, records(&from_text).sim.trace_hash);
        hashes.insert(once.sim.trace_hash);
        hashes.insert(cells(&trial).sim.trace_hash);
    }
    assert_eq!(hashes.len(), 200, "two worlds have one trace");
}

/// Found by a long run: after a lost completion, a delete took the empty slot that another delete had left for its own work, so
/// both said that they had removed the key.
#[test]
fn two_deletes_do_not_both_claim_one_removal() {
    let trial = "seed=280 servers=3 sessions=4 tasks=4 ops=20 keys=64 tear=true lose:c0@v36+312142 lose:c2@v58+34251 \
                 lose:c3@v282+1863659 lose:c3@v288+461109 lose:c0@v147+1380069 lose:c2@v117+1736608 lose:c0@v156+1727067 \
                 lose:c3@v223+1615499";
    records(&trial.parse().expect("a trial"));
}
