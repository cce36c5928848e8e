//! Operations that are given up in the middle, and outcomes that stay unknown for a while: nothing stays locked, nothing leaks, nothing that
//! was acknowledged is lost.

use super::{Sum, clean, trials};
use farwood_index::engine::sherman::{self, Sherman};
use farwood_index::engine::sphinx::{self, Sphinx};
use farwood_sim::trial::{FaultKind, Report, Trial};

/// The same trial of both engines, with short and with long values, without and with hash tables.
fn both(trial: &Trial, sum: &mut Sum, judge: impl Fn(&Report)) {
    let short = sherman::Config::tiny();
    let long = sherman::Config { value_bytes: 40, ..short.clone() }.with_entries(4);
    for config in [short, long] {
        let report = clean(&Sherman::new(config), trial);
        judge(&report);
        sum.add(&report);
    }
    for config in [sphinx::Config::art(), sphinx::Config::tiny()] {
        let report = clean(&Sphinx::new(config), trial);
        judge(&report);
        sum.add(&report);
    }
}

fn given_up(seed: u64, keys: u64) -> Trial {
    Trial { seed, keys, cancel: 20, ..Trial::default() }
}

#[test]
fn operations_that_are_given_up_leave_nothing_behind() {
    let mut sum = Sum::default();
    for seed in 0..trials(20) {
        for keys in [3, 12, 48] {
            both(&given_up(seed, keys), &mut sum, |report| {
                assert_eq!(
                    (report.recovered, &report.usage.leaked[..]),
                    (0, &[][..]),
                    "seed {seed}, {keys} keys"
                );
            });
        }
    }
    sum.assert_ran(&[
        ("operation_cancelled", 100),
        ("lock_left_to_be_settled", 100),
        ("lock_settled", 100),
        ("parked", 10),
        ("seen_through", 10),
        ("handover", 10),
    ]);
    assert_eq!(sum.marks.get("session_condemned"), None);
}

#[test]
fn what_a_failed_reconnect_leaves_open_is_settled_later() {
    let mut sum = Sum::default();
    for seed in 0..trials(20) {
        let trial = Trial { seed, keys: 12, ..Trial::default() };
        let refused =
            trial.clone().with_faults(FaultKind::LoseCompletion, 6).with_faults(FaultKind::FailReconnect, 4);
        both(&refused, &mut sum, |_| ());
        both(&trial.with_faults(FaultKind::Cut, 3), &mut sum, |_| ());
    }
    sum.assert_ran(&[
        ("reconnect_failed", 10),
        ("settled_by_reconnecting", 10),
        ("lock_settled", 10),
        ("parked", 1),
    ]);
}

#[test]
fn operations_that_are_given_up_among_faults_of_every_kind() {
    let mut sum = Sum::default();
    for seed in 0..trials(20) {
        both(&given_up(seed, 12).with_faults(FaultKind::Kill, 2), &mut sum, |_| ());
        let refused = given_up(seed, 12)
            .with_faults(FaultKind::LoseCompletion, 6)
            .with_faults(FaultKind::FailReconnect, 2);
        both(&refused, &mut sum, |_| ());
    }
    sum.assert_ran(&[("operation_cancelled", 100), ("lock_settled", 100), ("session_recovered", 1)]);
}

/// Found by these trials: a settlement freed its lock by CAS. The next holder took the lock and released it by a WRITE while that CAS was still on its way,
/// and the WRITE was lost (contract, rule 4).
#[test]
fn the_release_behind_a_settlement_is_not_lost() {
    clean(&Sherman::new(sherman::Config::tiny()), &given_up(66, 12));
    clean(&Sphinx::new(sphinx::Config::art()), &given_up(68, 12));
    clean(&Sphinx::new(sphinx::Config::tiny()), &given_up(55, 12));
}
