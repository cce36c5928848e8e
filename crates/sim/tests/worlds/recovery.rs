//! What happens while the dead are cleaned up after: deaths of those who do it, lines that fail, futures that are dropped, pools that are
//! full, indexes that come and go, compute servers that leave. Sherman and Sphinx alike.

use super::{Sum, clean, trials};
use farwood_fabric::transport::sim::Fault;
use farwood_index::AnyEngine;
use farwood_index::engine::{sherman, sphinx};
use farwood_sim::trial::{ADOPTION_MARKS, AMID_INTENT, FaultKind, Trial};
use std::collections::BTreeSet;

fn engines() -> [AnyEngine; 2] {
    engines_with(false)
}

/// With journals on the board, or in pages alone.
fn engines_with(pages_only: bool) -> [AnyEngine; 2] {
    let (mut sherman, mut sphinx) = (sherman::Config::tiny(), sphinx::Config::tiny());
    sherman.sabotage.zero_freed = true;
    sherman.sabotage.pages_only = pages_only;
    sphinx.sabotage.pages_only = pages_only;
    [AnyEngine::Sherman(sherman::Sherman::new(sherman)), AnyEngine::Sphinx(sphinx::Sphinx::new(sphinx))]
}

/// Few keys, so that somebody always waits for the dead.
fn crowded(seed: u64) -> Trial {
    Trial { seed, keys: 16, ops: 60, ..Trial::default() }
}

fn all(usual: u64, trial_of: impl Fn(u64) -> Trial) -> Sum {
    all_of(engines(), usual, trial_of)
}

fn all_of(engines: impl IntoIterator<Item = AnyEngine>, usual: u64, trial_of: impl Fn(u64) -> Trial) -> Sum {
    let mut sum = Sum::default();
    for engine in engines {
        for seed in 0..trials(usual) {
            sum.add(&clean(&engine, &trial_of(seed)));
        }
    }
    sum
}

#[test]
fn adopters_may_die_one_after_the_other() {
    let sum = all(60, |seed| crowded(seed).with_dying_adopters(2));
    sum.assert_ran(&[("session_recovered", 100), ("lock_of_the_dead_released", 20)]);
    all(20, |seed| Trial { sessions: 6, ..crowded(seed) }.with_dying_adopters(4));
}

/// The trial with these faults too.
fn with(mut trial: Trial, faults: &[String]) -> Trial {
    trial.faults.faults.extend(faults.iter().map(|fault| fault.parse::<Fault>().expect("a fault")));
    trial
}

/// A session dies, its adopter dies at one mark, and the next one at another.
#[test]
fn every_pair_of_adoption_marks_kills() {
    const SEEDS: u64 = 60;
    let marks = ADOPTION_MARKS;
    let mut struck = BTreeSet::new();
    for engine in engines() {
        for (n, first) in marks.iter().enumerate() {
            for (m, second) in marks.iter().enumerate() {
                // The hits of both adopters count: the second one comes by the marks before the first one's death again.
                let nth = if m <= n { 2 } else { 1 };
                for seed in 0..SEEDS {
                    let mut faults = vec![format!("kill-at:{first}#1"), format!("kill-at:{second}#{nth}")];
                    let trial = if faults.iter().any(|fault| fault.contains("adopt_intent_written")) {
                        // Two leave an intent: the second may be carried out when the first is not there any more.
                        faults.extend([3, 9].map(|nth| format!("kill-at:{AMID_INTENT}#{nth}")));
                        Trial { sessions: 5, ..crowded(seed) }
                    } else {
                        crowded(seed).with_faults(FaultKind::Kill, 1)
                    };
                    let trial = with(trial, &faults);
                    if clean(&engine, &trial).struck.len() == faults.len() {
                        struck.insert((*first, *second));
                        break;
                    }
                }
            }
        }
    }
    let pairs = marks.iter().flat_map(|first| marks.iter().map(move |second| (*first, *second)));
    let missing: Vec<_> = pairs.filter(|pair| !struck.contains(pair)).collect();
    assert_eq!(missing, [], "pairs of marks that nobody died at");
}

/// Whoever dies in the middle of a change of several WRITEs leaves an intent, which those who recover it carry out.
#[test]
fn intents_of_the_dead_are_carried_out() {
    let sum = all(40, |seed| {
        let amid = [1 + seed % 5, 8 + seed % 7, 20].map(|nth| format!("kill-at:{AMID_INTENT}#{nth}"));
        with(crowded(seed), &amid)
    });
    sum.assert_ran(&[("intent_carried_out", 20)]);
}

/// What waits for an epoch may be more than the board has slots for.
#[test]
fn journals_go_on_in_pages() {
    let sum = all_of(engines_with(true), 40, |seed| crowded(seed).with_dying_adopters(3));
    let ran = [("journal_page_added", 100), ("journal_page_chained", 100), ("journal_page_inherited", 50)];
    sum.assert_ran(&ran);
    let with_drops = |seed| Trial { others: true, leaves: 1, cancel: 10, ..crowded(seed) };
    all_of(engines_with(true), 20, with_drops);
    all_of(engines_with(true), 20, |seed| with_drops(seed).with_random_faults());
    all_of(engines_with(true), 20, |seed| Trial { chunks: Some(24), ..crowded(seed) }.with_random_faults());
}

#[test]
fn calls_kill_before_and_after_their_effect() {
    all(40, |seed| crowded(seed).with_faults(FaultKind::KillAtCall, 3));
}

#[test]
fn failed_reconnects_settle_nothing() {
    let sum = all(40, |seed| crowded(seed).with_faults(FaultKind::FailReconnect, 3));
    sum.assert_ran(&[("reconnect", 100)]);
}

#[test]
fn lines_are_cut_and_heal() {
    all(40, |seed| crowded(seed).with_faults(FaultKind::Cut, 3));
}

/// A server that comes back on its memory lets the sessions go on that it finds: nobody who is alive is fenced (every such trial checks
/// that), and whoever dies meanwhile is recovered.
#[test]
fn servers_come_back_on_their_memory() {
    let sum = all(40, |seed| crowded(seed).with_faults(FaultKind::RestartServer, 2));
    sum.assert_ran(&[("reconnect", 100)]);
    all(20, |seed| Trial { immediate: true, ..crowded(seed) }.with_faults(FaultKind::RestartServer, 2));
    let dying = |seed| crowded(seed).with_dying_adopters(1).with_faults(FaultKind::RestartServer, 2);
    let sum = all(40, dying);
    sum.assert_ran(&[("session_recovered", 50)]);
    all(20, |seed| Trial { cancel: 5, leaves: 1, ..crowded(seed) }.with_faults(FaultKind::RestartServer, 2));
    // While drops wait for flushes, and calls die before and after their effect.
    let drops = |seed| Trial { others: true, leaves: 1, ..crowded(seed) };
    all(20, |seed| drops(seed).with_faults(FaultKind::RestartServer, 3));
    all(20, |seed| {
        drops(seed).with_faults(FaultKind::KillAtCall, 2).with_faults(FaultKind::RestartServer, 3)
    });
}

#[test]
fn dropped_futures_leave_nothing_behind() {
    let sum = all(30, |seed| Trial { cancel: 5, ..crowded(seed) });
    sum.assert_ran(&[("operation_cancelled", 500)]);
    all(20, |seed| Trial { cancel: 5, ..crowded(seed) }.with_random_faults());
}

#[test]
fn full_pools_refuse_and_stay_whole() {
    let full = |seed| Trial { chunks: Some(3), keys: 256, servers: 1, ..crowded(seed) };
    let sum = all(20, full);
    sum.assert_ran(&[("pool_full", 20)]);
    all(20, |seed| full(seed).with_random_faults());
}

/// Leaves of several sizes and nodes of several kinds come and go in a pool that has not room for a chunk of each at a time.
#[test]
fn chunks_change_their_class_under_every_kind_of_fault() {
    let tight =
        |seed| Trial { chunks: Some(4), keys: 128, servers: 2, churn: true, ops: 80, ..crowded(seed) };
    let sum = all_of([AnyEngine::Sphinx(sphinx::Sphinx::new(sphinx::Config::tiny()))], 20, tight);
    sum.assert_ran(&[("chunks_reclaimed", 10), ("drained_chunk_forgotten", 10)]);
    all_of([AnyEngine::Sphinx(sphinx::Sphinx::new(sphinx::Config::tiny()))], 60, |seed| {
        tight(seed).with_random_faults()
    });
}

#[test]
fn indexes_come_and_go_beside_the_one_that_is_tried() {
    let sum = all(20, |seed| Trial { others: true, ..crowded(seed) });
    sum.assert_ran(&[("other_index_dropped", 20), ("other_index_gone", 20)]);
    all(20, |seed| Trial { others: true, ..crowded(seed) }.with_random_faults());
}

/// Whoever gave operations on an index up, or does not know what became of them, lets nobody have its memory before that is settled.
#[test]
fn operations_are_given_up_on_indexes_that_go() {
    let impatient = |seed| Trial { others: true, cancel: 15, sessions: 2, ..crowded(seed) };
    all(20, |seed| impatient(seed).with_faults(FaultKind::FailReconnect, 6));
}

/// Found by `operations_are_given_up_on_indexes_that_go`: a session cleared what it had of a dropped index while it still settled what an
/// operation on it had left behind, which then wrote into the index that had the memory next.
#[test]
fn settlements_end_before_their_index_is_cleared() {
    let trial = "seed=3254 servers=2 sessions=2 tasks=2 ops=150 keys=16 tear=true cancel=15 others=true lose:c2@v108+1156248 \
                 refuse:c2@n0x3 lose:c3@v601+1434902 refuse:c3@n0x4 lose:c2@v1171+1000075 refuse:c2@n0x5 \
                 lose:c2@v270+1019387 refuse:c2@n0x2 lose:c3@v573+531110 refuse:c3@n1x4 lose:c3@v117+958427 refuse:c3@n0x4";
    clean(&engines()[1], &trial.parse().expect("a trial"));
}

/// Found when idle sessions began to collect: who began to collect after a session had learned of a drop gave objects of the dropped index
/// back, into the bitmap of whatever its chunk had become.
#[test]
fn what_is_retired_of_a_dropped_index_is_not_collected() {
    for ops in [60, 120] {
        let trial = format!(
            "seed=83 servers=1 sessions=6 tasks=2 ops={ops} keys=16 tear=true long=2000000 leaves=4 others=true \
             kill-at:after-BeginDrop#1"
        );
        clean(&engines()[1], &trial.parse().expect("a trial"));
    }
}

#[test]
fn compute_servers_leave_in_the_middle_of_their_operations() {
    let sum = all(30, |seed| Trial { leaves: 2, ..crowded(seed) });
    sum.assert_ran(&[("left_in_the_middle", 100)]);
    all(20, |seed| Trial { leaves: 2, ..crowded(seed) }.with_random_faults());
}

/// Found by `adopters_may_die_one_after_the_other`: the coordinator reminded the last session of its four adoptions so often that it never
/// asked it to fence the fifth, whose pin the four were waiting for.
#[test]
fn reminders_do_not_keep_the_unfenced_waiting() {
    let trials = [
        "seed=18 servers=3 sessions=6 tasks=4 ops=60 keys=16 tear=true kill:c3@v629 kill-at:adopt_fenced#1 \
         kill-at:before-CompleteFence#3 kill-at:before-Fence#3 kill-at:before-BeginFence#3",
        "seed=118 servers=3 sessions=6 tasks=4 ops=60 keys=16 tear=true kill:c4@v959 kill-at:before-CompleteFence#1 \
         kill-at:adopt_fence_begun#3 kill-at:after-BeginFence#2 kill-at:before-Fence#1",
    ];
    for trial in trials {
        clean(&engines()[0], &trial.parse().expect("a trial"));
    }
}
