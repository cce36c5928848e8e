//! Makes a failing trial small: fewer faults, clients, operations and keys, as long as it still fails in the same way.
//!
//! A change of the trial changes everything that happens in it, so each smaller candidate is tried with several seeds; what
//! is left is the smallest trial found within the budget, with the seed that fails.

use crate::trial::{Failure, Trial};
use farwood_fabric::transport::sim::Fault;

/// A failing trial, as small as it got.
#[derive(Clone, Debug)]
pub struct Shrunk {
    /// It.
    pub trial: Trial,
    /// How it fails.
    pub failure: Failure,
    /// How many trials were run to find it.
    pub attempts: u32,
}

/// Shrinks `trial`, which fails with `failure`, running at most `budget` trials.
pub fn shrink(
    trial: Trial,
    failure: Failure,
    budget: u32,
    mut run: impl FnMut(&Trial) -> Result<(), Failure>,
) -> Shrunk {
    let kind = failure.kind();
    let mut best = Shrunk { trial, failure, attempts: 0 };
    loop {
        let candidates = smaller(&best.trial);
        let mut improved = false;
        for candidate in candidates {
            for reseed in 0..SEEDS_PER_CANDIDATE {
                if best.attempts >= budget {
                    return best;
                }
                let mut trial = candidate.clone();
                trial.seed = trial.seed.wrapping_add(reseed * 1_000_003);
                best.attempts += 1;
                if let Err(failure) = run(&trial) {
                    if failure.kind() == kind {
                        best = Shrunk { trial, failure, attempts: best.attempts };
                        improved = true;
                        break;
                    }
                }
            }
            if improved {
                break;
            }
        }
        if !improved {
            return best;
        }
    }
}

/// How many seeds are tried before a smaller trial is given up.
const SEEDS_PER_CANDIDATE: u64 = 6;

/// Trials that are a little smaller, the boldest first.
fn smaller(trial: &Trial) -> Vec<Trial> {
    let mut candidates = Vec::new();
    let mut push = |change: &dyn Fn(&mut Trial)| {
        let mut candidate = trial.clone();
        change(&mut candidate);
        if candidate != *trial {
            candidates.push(candidate);
        }
    };
    let faults = &trial.faults.faults;
    push(&|t| t.faults.faults.clear());
    for n in 0..faults.len() {
        push(&|t| {
            t.faults.faults.remove(n);
        });
    }
    push(&|t| t.ops = (t.ops / 2).max(1));
    push(&|t| t.sessions = (t.sessions / 2).max(1));
    push(&|t| t.tasks = (t.tasks / 2).max(1));
    push(&|t| t.keys = (t.keys / 2).max(1));
    push(&|t| t.servers = (t.servers / 2).max(1));
    push(&|t| t.sessions = (t.sessions - 1).max(1));
    push(&|t| t.tasks = (t.tasks - 1).max(1));
    push(&|t| t.ops = (t.ops - t.ops.div_ceil(4)).max(1));
    push(&|t| t.tear = false);
    push(&|t| t.churn = false);
    push(&|t| t.cancel = 0);
    push(&|t| t.cancel /= 2);
    push(&|t| t.chunks = None);
    push(&|t| t.leaves /= 2);
    push(&|t| t.long_ns = 0);
    push(&|t| t.immediate = false);
    push(&|t| t.others = false);
    for (n, fault) in faults.iter().enumerate() {
        if let Some(simpler) = earlier(*fault) {
            push(&|t| t.faults.faults[n] = simpler);
        }
    }
    candidates
}

/// The same fault, earlier.
fn earlier(fault: Fault) -> Option<Fault> {
    match fault {
        Fault::Kill { client, at_verb } if at_verb > 1 => Some(Fault::Kill { client, at_verb: at_verb / 2 }),
        Fault::Pause { client, at_verb, for_ns } if at_verb > 1 => {
            Some(Fault::Pause { client, at_verb: at_verb / 2, for_ns })
        }
        Fault::LoseCompletion { client, at_verb, late_ns } if at_verb > 1 => {
            Some(Fault::LoseCompletion { client, at_verb: at_verb / 2, late_ns })
        }
        Fault::KillAtCall { client, at_call, after } if at_call > 1 => {
            Some(Fault::KillAtCall { client, at_call: at_call / 2, after })
        }
        Fault::KillAtMark { client, mark, nth } if nth > 1 => {
            Some(Fault::KillAtMark { client, mark, nth: nth / 2 })
        }
        Fault::FailReconnect { client, nth, times } if times > 1 => {
            Some(Fault::FailReconnect { client, nth, times: times / 2 })
        }
        Fault::Cut { client, server, from_ns, for_ns } if for_ns > 1000 => {
            Some(Fault::Cut { client, server, from_ns, for_ns: for_ns / 2 })
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farwood_fabric::transport::sim::SimStop;

    /// A run that fails exactly if there is a kill, at least two sessions and ten operations.
    fn fails(trial: &Trial) -> Result<(), Failure> {
        let killed = trial.faults.faults.iter().any(|f| matches!(f, Fault::Kill { .. }));
        if killed && trial.sessions >= 2 && trial.ops >= 10 {
            return Err(Failure::Stuck(SimStop::TooLong));
        }
        Ok(())
    }

    #[test]
    fn only_what_the_failure_needs_is_left() {
        let plan = "kill:c0@v9 skew:c1@0+5 mute:c1@r2 slow:m0@0+9x2";
        let mut trial = Trial { faults: plan.parse().unwrap(), ..Trial::default() };
        trial.ops = 200;
        let failure = fails(&trial).unwrap_err();
        let shrunk = shrink(trial, failure, 10_000, fails);
        assert!(fails(&shrunk.trial).is_err());
        assert_eq!(shrunk.trial.faults.to_string(), "kill:c0@v1");
        assert_eq!(
            (shrunk.trial.sessions, shrunk.trial.tasks, shrunk.trial.keys, shrunk.trial.servers),
            (2, 1, 1, 1)
        );
        assert!((10..14).contains(&shrunk.trial.ops), "{}", shrunk.trial.ops);
    }

    #[test]
    fn another_kind_of_failure_is_not_followed() {
        let trial = Trial::default();
        let shrunk = shrink(trial.clone(), Failure::Stuck(SimStop::TooLong), 500, |t| {
            if t.sessions < trial.sessions {
                return Err(Failure::Structure(farwood_index::IndexError::Dropped));
            }
            Err(Failure::Stuck(SimStop::TooLong))
        });
        assert_eq!(shrunk.trial.sessions, trial.sessions);
    }

    #[test]
    fn the_budget_is_kept() {
        let mut runs = 0;
        shrink(Trial::default(), Failure::Stuck(SimStop::TooLong), 7, |_| {
            runs += 1;
            Err(Failure::Stuck(SimStop::TooLong))
        });
        assert_eq!(runs, 7);
    }
}
