//! Mistakes of those who clean up after the dead, and of the coordinator that lets them.

use super::{bushy, crowded, long_values, must_be_caught};
use farwood_index::engine::sherman::{Config, Sabotage, Sherman};
use farwood_memory::Mistakes;
use farwood_sim::trial::{Failure, FaultKind, Settings, Trial, run};

fn tree(trial: &Trial, config: &Config, coordinator: Mistakes) -> Result<(), Failure> {
    run(&Sherman::new(config.clone()), trial, Settings { coordinator, ..Settings::default() }).map(drop)
}

/// A mistake of the tree, or of its session, is caught in these trials.
fn mistake_is_caught(
    name: &str,
    config: &Config,
    spoil: impl Fn(&mut Sabotage),
    trial_of: impl Fn(u64) -> Trial,
) {
    let mut wrong = config.clone();
    spoil(&mut wrong.sabotage);
    let right = |trial: &Trial| tree(trial, config, Mistakes::default());
    must_be_caught(name, trial_of, |trial| tree(trial, &wrong, Mistakes::default()), right);
}

/// A mistake of the coordinator is caught in these trials.
fn coordinators_mistake_is_caught(
    name: &str,
    config: &Config,
    mistakes: Mistakes,
    trial_of: impl Fn(u64) -> Trial,
) {
    let right = |trial: &Trial| tree(trial, config, Mistakes::default());
    must_be_caught(name, trial_of, |trial| tree(trial, config, mistakes), right);
}

/// The completion of the WRITE that frees a lock is lost. Somebody else has the lock by the time the WRITE is repeated.
#[test]
fn a_lock_of_the_dead_that_is_freed_blindly() {
    let unlucky = |seed| {
        let trial = Trial { sessions: 6, ..crowded(seed) }.with_faults(FaultKind::Kill, 3);
        trial.with_faults(FaultKind::LoseCompletion, 24)
    };
    mistake_is_caught("plain_release", &Config::tiny(), |s| s.recovery.plain_release = true, unlucky);
}

/// An adopter dies between two of the three locks of a merge. Whoever goes on finds the intent open and one lock held.
#[test]
fn an_intent_of_a_merge_that_names_one_lock_and_is_not_ended() {
    let spoil = |s: &mut Sabotage| {
        s.one_lock_named = true;
        s.recovery.leave_intents_open = true;
    };
    // Somebody dies when its merge is done but not ended, and whoever adopts it when one lock is free.
    let dying = |seed: u64| {
        let mut trial = Trial { sessions: 6, churn: true, ..bushy(seed) };
        for fault in
            [format!("kill-at:merge#{}", seed % 8 + 1), "kill-at:lock_of_the_dead_released#1".to_owned()]
        {
            trial.faults.faults.push(fault.parse().expect("a fault"));
        }
        trial
    };
    mistake_is_caught("one_lock_named", &Config::tiny(), spoil, dying);
}

/// A task that is handed the lock of another writes under the same lock word.
#[test]
fn an_intent_that_is_not_ended_before_the_lock_is_handed_on() {
    let kills = |seed| Trial { keys: 2, tasks: 4, ..crowded(seed) }.with_faults(FaultKind::Kill, 4);
    mistake_is_caught("intent_not_ended", &long_values(), |s| s.intent_not_ended = true, kills);
}

#[test]
fn an_adopter_that_begins_while_another_is_at_it() {
    let mistakes = Mistakes { adopters_not_chained: true, ..Mistakes::default() };
    let kills = |seed| Trial { sessions: 6, ..crowded(seed) }.with_faults(FaultKind::Kill, 4);
    coordinators_mistake_is_caught("adopters_not_chained", &long_values(), mistakes, kills);
}

/// Indexes come and go, and memory changes its type under the journal of a session that died.
#[test]
fn a_flush_that_does_not_wait_for_the_adoption() {
    let mistakes = Mistakes { flush_before_adoption: true, ..Mistakes::default() };
    // Whoever uses those indexes dies with retired objects of one, and its adopter too, which leaves time for a drop.
    let kills = |seed: u64| {
        let mut trial = Trial { others: true, ..bushy(seed) };
        let guest = trial.sessions + 1;
        for fault in [format!("kill:c{guest}@v{}", 20 + seed % 300), "kill-at:adopt_unlocked#1".to_owned()] {
            trial.faults.faults.push(fault.parse().expect("a fault"));
        }
        trial
    };
    coordinators_mistake_is_caught("flush_before_adoption", &Config::tiny(), mistakes, kills);
}

#[test]
fn a_dropped_index_of_which_a_session_keeps_something() {
    let drops = |seed| Trial { others: true, ..bushy(seed) };
    mistake_is_caught("drop_without_clearing", &Config::tiny(), |s| s.drop_without_clearing = true, drops);
}
