//! Mistakes of those who clean up after the dead, and of the coordinator that lets them.

use super::{bushy, crowded, long_values, must_be_caught};
use farwood_fabric::transport::sim::{Fault, MarkName};
use farwood_index::engine::sherman::{Config, Sabotage, Sherman, Switches};
use farwood_index::engine::sphinx::{self, Sphinx};
use farwood_memory::Mistakes;
use farwood_sim::reference::{Bugs, records::Records};
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

#[test]
fn a_dropped_index_of_which_a_session_keeps_something() {
    let drops = |seed| Trial { others: true, ..bushy(seed) };
    mistake_is_caught("drop_without_clearing", &Config::tiny(), |s| s.drop_without_clearing = true, drops);
}

/// Somebody dies who comes by this mark for the `nth` time.
fn dies_at(mut trial: Trial, mark: &str, nth: u64) -> Trial {
    let mark = MarkName::new(mark).expect("a plain name");
    trial.faults.faults.push(Fault::KillAtMark { client: None, mark, nth });
    trial
}

/// Four locks share the one word of a server. A neighbour's that was taken or given back since the table was read is lost, or comes back.
#[test]
fn locks_of_the_dead_freed_by_a_plain_write() {
    let mut config = Config { locks: 4, ..Config::tiny() };
    config.switches = Switches { masked_locks: true, ..config.switches };
    let kills = |seed| {
        let trial = Trial { servers: 1, sessions: 6, keys: 24, ..bushy(seed) };
        trial.with_faults(FaultKind::Kill, 4)
    };
    mistake_is_caught("plain_release", &config, |s| s.recovery.plain_release = true, kills);
}

/// Nodes merge all the time, and somebody dies between two of the locks that a merge gives back.
fn half_unlocked(seed: u64) -> Trial {
    let trial = Trial { keys: 24, churn: true, ..bushy(seed) };
    dies_at(trial, "commit_unlocked_in_part", 1 + seed % 20)
}

/// Where no lock is handed on, lock words do not come back, and an intent that names all its locks need not be ended: it is not, with and without
/// the mistake. One that is ended before the first lock is given back could as well name one lock alone; see the next test.
#[test]
fn a_merge_whose_intent_names_one_of_its_locks() {
    let mut config = Config::tiny();
    config.switches.handover = false;
    config.sabotage.intent_not_ended = true;
    mistake_is_caught("one_lock_named", &config, |s| s.one_lock_named = true, half_unlocked);
}

/// As merges are, their intents are ended while all locks are held, by those who make them as by those who clean up. So there are two walls, and
/// where no lock is handed on each holds without the other: naming one lock alone does no harm then.
#[test]
fn an_open_intent_is_never_held_in_part() {
    let in_part = |config: &Config, trial: &Trial| {
        let report = run(&Sherman::new(config.clone()), trial, Settings::default());
        let report = report.unwrap_or_else(|failure| panic!("{trial}: {failure}"));
        report.marks.contains_key("intent_held_in_part")
    };
    assert!((0..300).all(|seed| !in_part(&Config::tiny(), &half_unlocked(seed))));
    let mut open = Config::tiny();
    open.switches.handover = false;
    open.sabotage.intent_not_ended = true;
    assert!((0..300).any(|seed| in_part(&open, &half_unlocked(seed))), "the mark is seen where it must be");
}

/// Whoever drops an index dies when the drop has begun, with objects of it in its journal. READs that last long keep the epochs, and with them the
/// adopter, back; sessions that come and go ask for chunks, and get those of the dropped index.
#[test]
fn memory_that_changes_its_type_before_an_adoption_is_finished() {
    let mistakes = Mistakes { flush_before_adoption: true, ..Mistakes::default() };
    let drops = |seed| {
        let trial = Trial { seed, servers: 1, sessions: 6, tasks: 2, ops: 120, keys: 16, ..Trial::default() };
        let trial = Trial { leaves: 4, others: true, long_ns: 2_000_000, ..trial };
        dies_at(trial, "after-BeginDrop", 1)
    };
    let radix = |trial: &Trial, coordinator| {
        let settings = Settings { coordinator, ..Settings::default() };
        run(&Sphinx::new(sphinx::Config::tiny()), trial, settings).map(drop)
    };
    let right = |trial: &Trial| radix(trial, Mistakes::default());
    must_be_caught("flush_before_adoption", drops, |trial| radix(trial, mistakes), right);
}

/// Servers come back while sessions read for long, others overwrite what they read, and chunks are few.
fn comes_back(seed: u64) -> Trial {
    let trial = Trial { seed, servers: 1, sessions: 4, tasks: 2, ops: 120, keys: 8, ..Trial::default() };
    Trial { long_ns: 2_000_000, ..trial }.with_faults(FaultKind::RestartServer, 3)
}

fn after_restarts(trial: &Trial, coordinator: Mistakes) -> Result<(), Failure> {
    let settings = Settings { coordinator, ..Settings::default() };
    run(&Sphinx::new(sphinx::Config::tiny()), trial, settings).map(drop)
}

#[test]
fn a_server_that_comes_back_and_takes_the_living_for_dead() {
    let mistakes = Mistakes { restart_ends_sessions: true, ..Mistakes::default() };
    let right = |trial: &Trial| after_restarts(trial, Mistakes::default());
    let failure =
        must_be_caught("restart_ends_sessions", comes_back, |trial| after_restarts(trial, mistakes), right);
    assert!(matches!(failure, Failure::Fenced { .. }), "{failure}");
}

/// Readers that are on their way to a record when the server comes back find it reused: the server told the others that nobody was.
#[test]
fn a_server_that_comes_back_and_forgets_what_is_pinned() {
    let records = |trial: &Trial, coordinator| {
        let settings = Settings { coordinator, ..Settings::default() };
        run(&Records { keys: trial.keys, bugs: Bugs::default() }, trial, settings).map(drop)
    };
    let mistakes = Mistakes { restart_forgets_pins: true, ..Mistakes::default() };
    let readers = |seed| {
        let trial = Trial { servers: 1, sessions: 4, tasks: 4, ops: 200, long_ns: 300_000, ..crowded(seed) };
        trial.with_faults(FaultKind::RestartServer, 6)
    };
    must_be_caught(
        "restart_forgets_pins",
        readers,
        |trial| records(trial, mistakes),
        |trial| records(trial, Mistakes::default()),
    );
}
