//! Sphinx in adversarial worlds: keys that hurt, all operations mixed, every kind of fault. Every trial must be clean, and the rare paths
//! must really have run.
//!
//! `FARWOOD_TRIALS` sets how many trials each test runs, for longer runs.

use farwood_index::engine::sphinx::{Config, Sphinx};
use farwood_sim::spelling::Spelling;
use farwood_sim::trial::{FaultKind, Report, Settings, Trial, run};
use std::collections::BTreeMap;

/// How many trials: the given number, or what the environment says.
fn trials(usual: u64) -> u64 {
    std::env::var("FARWOOD_TRIALS").ok().and_then(|n| n.parse().ok()).unwrap_or(usual)
}

fn tree(config: &Config, trial: &Trial) -> Report {
    let engine = Sphinx::new(config.clone());
    run(&engine, trial, Settings::default())
        .unwrap_or_else(|failure| panic!("{config:?}: {trial}\n{failure}"))
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

    fn assert_ran(&self, paths: &[&str]) {
        println!("{} operations, {:?}", self.operations, self.marks);
        for path in paths {
            assert!(self.marks.contains_key(path), "'{path}' never ran; what ran: {:?}", self.marks);
        }
    }
}

/// All spellings but the huge one, which takes long.
const SPELLINGS: [Spelling; 5] =
    [Spelling::Numbers, Spelling::Prefixes, Spelling::Ladder, Spelling::LongPrefix, Spelling::Binary];

/// Keys for some nodes: 16 clients on 4 compute and 3 memory servers.
fn bushy(seed: u64, spelling: Spelling) -> Trial {
    Trial { seed, keys: 96, ops: 100, spelling, ..Trial::default() }
}

/// A few keys that everybody wants.
fn crowded(seed: u64, spelling: Spelling) -> Trial {
    Trial { seed, keys: 6, ops: 100, spelling, ..Trial::default() }
}

#[test]
fn many_operations_without_faults_leak_nothing_and_leave_nothing_unknown() {
    let mut sum = Sum::default();
    for seed in 0..trials(20) {
        for spelling in SPELLINGS {
            for trial in [bushy(seed, spelling), crowded(seed, spelling)] {
                for config in [&Config::art(), &Config::tiny()] {
                    let report = tree(config, &trial);
                    let operations = u64::from(trial.sessions) * u64::from(trial.tasks) * u64::from(trial.ops);
                    assert_eq!((report.operations, report.unknown, report.recovered), (operations, 0, 0));
                    assert_eq!(report.usage.leaked, [], "{trial}");
                    for left in ["dead_node_left", "hash_entry_out_of_date", "hash_entry_lacking"] {
                        assert_eq!(report.marks.get(left), None, "{config:?} {trial}");
                    }
                    sum.add(&report);
                }
            }
        }
    }
    sum.assert_ran(&[
        "torn_read",
        "lost_cas",
        "handover",
        "edge_split",
        "node_grown",
        "node_shrunk",
        "path_compressed",
        "node_removed",
        "leaf_replaced",
        "slot_changed",
        "dead_node_met",
        "frozen_leaf_met",
        "object_reused",
        "parallel_reads",
        "hash_probe_in_vain",
        "stale_hash_entry",
        "hash_directory_behind",
    ]);
}

#[test]
fn trees_survive_every_kind_of_fault() {
    let mut sum = Sum::default();
    for seed in 0..trials(6) {
        for spelling in SPELLINGS {
            for base in [bushy(seed, spelling), crowded(seed, spelling)] {
                for config in [&Config::art(), &Config::tiny()] {
                    sum.add(&tree(config, &base.clone().with_random_faults()));
                    sum.add(&tree(config, &base.clone().with_faults(FaultKind::Kill, 3)));
                    sum.add(&tree(config, &base.clone().with_faults(FaultKind::LoseCompletion, 8)));
                }
            }
        }
    }
    sum.assert_ran(&[
        "reconnect",
        "lock_taken_unknowingly",
        "write_repeated",
        "session_recovered",
        "lock_of_the_dead_released",
        "intent_carried_out",
        "retired_object_inherited",
        "chunk_inherited",
        "new_life",
    ]);
}
