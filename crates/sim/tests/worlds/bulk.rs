//! Bulk loads beside readers and writers: each pair counts as a put.

use super::{Sum, clean, trials};
use farwood_index::engine::{sherman, sphinx};
use farwood_sim::trial::{FaultKind, Trial};

fn tree() -> sherman::Sherman {
    sherman::Sherman::new(sherman::Config::tiny())
}

fn radix() -> sphinx::Sphinx {
    sphinx::Sphinx::new(sphinx::Config::tiny())
}

/// From one leaf to a tree of three levels.
fn load(seed: u64) -> Trial {
    Trial { seed, sessions: 3, keys: 4 << (seed % 5), ops: 30, bulk: true, ..Trial::default() }
}

#[test]
fn bulk_loads_survive_every_kind_of_fault() {
    let mut sum = Sum::default();
    for seed in 0..trials(60) {
        let trial = load(seed);
        // Those that begin with the load, and so hit it.
        let few = Trial { ops: 6, tasks: 1, ..trial.clone() };
        let worlds = [
            trial.clone(),
            trial.clone().with_random_faults(),
            Trial { long_ns: 200_000, ..trial },
            few.clone().with_faults(FaultKind::Kill, 1),
            few.with_faults(FaultKind::LoseCompletion, 4),
        ];
        for trial in worlds {
            sum.add(&clean(&tree(), &trial));
            sum.add(&clean(&radix(), &trial));
        }
    }
    sum.assert_ran(&[
        ("bulk_loaded", 300),
        ("bulk_load_refused", 10),
        ("reconnect", 50),
        ("session_recovered", 10),
    ]);
}

/// Found by reading: a bulk load moved the root pointer before the old root was buried, so whoever still had the old root found nothing there
/// though others had read what was loaded; and who moved the pointer on made the loader believe that it had failed, so that it
/// freed nodes that were linked.
#[test]
fn a_bulk_load_happens_at_one_instant() {
    for trial in [
        "seed=0 servers=3 sessions=3 tasks=1 ops=40 keys=32 tear=true bulk=true pause:c0@v12+600000",
        "seed=0 servers=3 sessions=3 tasks=1 ops=40 keys=32 tear=true bulk=true pause:c0@v13+600000",
        "seed=1 servers=3 sessions=3 tasks=1 ops=40 keys=32 tear=true bulk=true pause:c0@v14+600000",
        "seed=27 servers=3 sessions=3 tasks=4 ops=40 keys=8 tear=true bulk=true",
        "seed=160 servers=3 sessions=4 tasks=4 ops=40 keys=48 tear=true bulk=true",
    ] {
        let report = clean(&tree(), &trial.parse().expect("a trial"));
        assert!(report.marks.contains_key("bulk_loaded"), "{:?}", report.marks);
    }
}
