//! Sherman in adversarial worlds.

use farwood_index::engine::sherman::{Config, Sherman};
use farwood_sim::trial::{FaultKind, Report, Settings, Trial, run};
use std::collections::BTreeMap;

fn trials(usual: u64) -> u64 {
    std::env::var("FARWOOD_TRIALS").ok().and_then(|n| n.parse().ok()).unwrap_or(usual)
}

fn tree(config: &Config, trial: &Trial) -> Report {
    let engine = Sherman::new(config.clone());
    run(&engine, trial, Settings::default()).unwrap_or_else(|failure| panic!("sherman: {trial}\n{failure}"))
}

#[test]
fn without_faults() {
    let mut marks: BTreeMap<&str, u64> = BTreeMap::new();
    let mut ops = 0;
    for seed in 0..trials(50) {
        let report = tree(&Config::tiny(), &Trial { seed, keys: 24, ops: 100, ..Trial::default() });
        ops += report.operations;
        assert_eq!(report.usage.leaked, []);
        for (mark, n) in report.marks {
            *marks.entry(mark).or_default() += n;
        }
    }
    println!("{ops} {marks:?}");
}

#[test]
fn with_faults() {
    let mut marks: BTreeMap<&str, u64> = BTreeMap::new();
    for seed in 0..trials(50) {
        let base = Trial { seed, keys: 24, ops: 100, ..Trial::default() };
        for trial in [
            base.clone().with_random_faults(),
            base.clone().with_faults(FaultKind::Kill, 3),
            base.clone().with_faults(FaultKind::LoseCompletion, 8),
        ] {
            let report = tree(&Config::tiny(), &trial);
            for (mark, n) in report.marks {
                *marks.entry(mark).or_default() += n;
            }
        }
    }
    println!("{marks:?}");
}
#[test]
fn one() {
    let Ok(text) = std::env::var("FARWOOD_TRIAL") else { return };
    let report = tree(&Config::tiny(), &text.parse().unwrap());
    println!("{:?}", report.marks);
}
#[test]
fn explore() {
    let Ok(n) = std::env::var("EXPLORE") else { return };
    let mut config = Config { locks: 512, cache_bytes: 0, ..Config::tiny() };
    config.sabotage.reuse_without_epoch = true;
    for (name, keys, ops, sessions, tasks, kills) in
        [("a", 6, 150, 1, 16, 0), ("b", 10, 150, 1, 16, 0), ("c", 8, 150, 2, 16, 0), ("d", 16, 150, 3, 12, 0)]
    {
        let mut caught = vec![];
        let mut reused = 0;
        for seed in 0..n.parse().unwrap() {
            let trial = Trial { seed, keys, ops, sessions, tasks, servers: 1, ..Trial::default() }
                .with_faults(FaultKind::SlowServer, 2 + kills);
            match run(&Sherman::new(config.clone()), &trial, Settings::default()) {
                Ok(r) => reused += r.marks.get("merge").copied().unwrap_or(0),
                Err(f) => caught.push((seed, f.kind())),
            }
        }
        println!("{name}: {caught:?} merges {reused}");
    }
}
