//! Repairs of indexes in adversarial worlds: every leak is freed, real ones and injected ones, and nothing else; though
//! workers and repairers are killed anywhere, and others try to come in meanwhile.
//!
//! `FARWOOD_TRIALS` sets how many trials are run, for longer runs.

mod refused;
mod world;

use farwood_index::engine::sherman::{self, Sherman};
use farwood_index::engine::sphinx::{self, Sphinx};
use fastrand::Rng;
use world::{Outcome, Plan, run};

/// Every engine, with short and long values.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Sherman,
    LongSherman,
    FgPlus,
    Sphinx,
    Art,
}

const KINDS: [Kind; 5] = [Kind::Sherman, Kind::LongSherman, Kind::FgPlus, Kind::Sphinx, Kind::Art];

fn sherman(kind: Kind) -> sherman::Config {
    let tiny = sherman::Config::tiny();
    match kind {
        Kind::LongSherman => sherman::Config { value_bytes: 40, ..tiny }.with_entries(4),
        Kind::FgPlus => sherman::Config { switches: sherman::Switches::FG_PLUS, ..tiny },
        _ => tiny,
    }
}

fn sphinx(kind: Kind) -> sphinx::Config {
    if kind == Kind::Art { sphinx::Config::art() } else { sphinx::Config::tiny() }
}

fn trial(seed: u64) -> Result<Outcome, String> {
    let mut rng = Rng::with_seed(seed);
    let kind = KINDS[rng.usize(..KINDS.len())];
    let plan = Plan::draw(seed, &mut rng);
    let ended = match kind {
        Kind::Sherman | Kind::LongSherman | Kind::FgPlus => {
            let engine = Sherman::new(sherman(kind));
            run(&engine, &engine, &plan)
        }
        Kind::Sphinx | Kind::Art => {
            let engine = Sphinx::new(sphinx(kind));
            run(&engine, &engine, &plan)
        }
    };
    ended.map_err(|why| format!("{kind:?}, {plan:?}: {why}"))
}

#[test]
fn every_leak_is_freed_and_nothing_else() {
    let trials = std::env::var("FARWOOD_TRIALS").ok().and_then(|n| n.parse().ok()).unwrap_or(40);
    let mut sum = Outcome::default();
    for seed in 0..trials {
        let outcome = trial(seed).unwrap_or_else(|why| panic!("{why}"));
        sum.injected += outcome.injected;
        sum.freed += outcome.freed;
        sum.extents += outcome.extents;
        sum.keys += outcome.keys;
        sum.repairers_killed += outcome.repairers_killed;
        sum.workers_killed += outcome.workers_killed;
        sum.kept_out += outcome.kept_out;
        sum.refused += outcome.refused;
    }
    println!("{trials} trials: {sum:?}");
    assert!(sum.injected > trials * 5 && sum.freed >= sum.injected && sum.keys > trials * 20, "{sum:?}");
    assert!(sum.extents > trials / 10, "raw bytes were leaked and freed, too: {sum:?}");
    assert!(sum.repairers_killed > trials / 10 && sum.workers_killed > trials / 10, "{sum:?}");
    assert!(sum.kept_out > 0 && sum.refused > 0, "others came before and in the middle: {sum:?}");
}

/// A walk that does not name all that is linked lets the repair free what is in use, and the trials notice.
#[test]
fn a_walk_that_forgets_a_kind_of_object_is_caught() {
    let plans = |n| (0..n).map(|seed| Plan { is_large: true, ..Plan::draw(seed, &mut Rng::with_seed(seed)) });
    let right = Sherman::new(sherman(Kind::Sherman));
    let mut wrong = right.clone();
    wrong.config.sabotage.walk_forgets_inner_nodes = true;
    let caught = plans(6).filter(|plan| run(&right, &wrong, plan).is_err()).count();
    assert!(caught >= 5, "inner nodes were forgotten, and {caught} of 6 trials noticed");
    let right = Sphinx::new(sphinx(Kind::Sphinx));
    let mut wrong = right.clone();
    wrong.config.sabotage.walk_forgets_tables = true;
    let caught = plans(6).filter(|plan| run(&right, &wrong, plan).is_err()).count();
    assert!(caught >= 5, "hash tables were forgotten, and {caught} of 6 trials noticed");
}
