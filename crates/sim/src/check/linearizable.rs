//! Linearizability of the point operations: on each key, one order of the operations, each between its invocation and
//! its response, in which a sequential map gives every answer that was given.
//!
//! Linearizability is local (Herlihy and Wing 1990), so each key is judged alone, as a register that holds a value or
//! nothing, by the search in `search.rs`. An operation of unknown outcome may take effect at any time after its
//! invocation, or never.
//!
//! A get of a value that nobody wrote is caught here, and needs no search: the value is needed and nothing writes it.
//!
//! A violation is cut down for people: to the shortest bad prefix (what responds later counts as unknown), and in it to
//! the fewest answers that still contradict each other when all others are forgotten.
//!
//! **Cost.** Near linear in operations times open operations if most values differ, as a workload should arrange.
//! Few distinct values under much concurrency cost more, up to the limit on failed configurations per key.

use std::collections::BTreeMap;
use std::fmt;

use super::search::{Entry, Interner, Search, Verdict};
use super::{Effect, Failure, Held, scan};
use crate::history::{Action, Bytes, Held as ShowHeld, History, Key, Operation, Outcome, Value};

/// Failed configurations of one key after which the search is given up.
pub const DEFAULT_LIMIT: usize = 500_000;

/// The same for each attempt to find a shorter bad prefix: not worth more than a moment.
const PREFIX_LIMIT: usize = 20_000;

/// The same for each attempt to leave answers out of the contradiction, of which there are more.
const CORE_LIMIT: usize = 2_000;

/// Attempts to leave answers out of the contradiction.
const CORE_ATTEMPTS: usize = 300;

/// Proof that a history is not linearizable, cut down for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// The key whose operations have no order.
    pub key: Key,
    /// What the key held at the start.
    pub initial: Option<Value>,
    /// The shortest bad prefix ends with this response, counted on this key from 1.
    pub responses: usize,
    /// Answers that contradict each other, even if every other operation on the key may or may not have happened at
    /// any time after its invocation. In order of invocation. A scan stands here as the get of this key it amounts to.
    pub core: Vec<Operation>,
    /// Other operations around the failure, in order of invocation.
    pub nearby: Vec<Operation>,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN_LINES: usize = 40;
        writeln!(
            f,
            "key {} (at first {}) is not linearizable from its response {} on; the operations marked ! contradict each other:",
            Bytes(&self.key),
            ShowHeld(self.initial.as_deref()),
            self.responses
        )?;
        let marked = self.core.iter().map(|operation| (operation, '!'));
        let mut lines: Vec<_> = marked.chain(self.nearby.iter().map(|operation| (operation, ' '))).collect();
        lines.sort_by_key(|(operation, _)| operation.invoked);
        let skipped = lines.len().saturating_sub(SHOWN_LINES);
        if skipped > 0 {
            writeln!(f, "    ({skipped} earlier operations)")?;
        }
        for (operation, mark) in &lines[skipped..] {
            writeln!(f, "  {mark} {operation}")?;
        }
        Ok(())
    }
}

/// The search on a key was given up: neither good nor bad.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Undecided {
    /// The key whose operations were searched.
    pub key: Key,
    /// How many operations it has.
    pub operations: usize,
    /// How many failed configurations were seen.
    pub limit: usize,
}

impl fmt::Display for Undecided {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "key {}: gave up ordering {} operations after {} failed configurations; raise the limit, or write more distinct values",
            Bytes(&self.key),
            self.operations,
            self.limit
        )
    }
}

/// Judges the point operations.
///
/// # Errors
/// [`Failure::NotLinearizable`] if any key is; otherwise [`Failure::Undecided`] if any search was given up.
pub fn check(history: &History) -> Result<(), Failure> {
    check_registers(history, &registers(history), DEFAULT_LIMIT)
}

/// Judges the point operations as [`check`] does, with a limit of one's own on the failed configurations per key.
///
/// # Errors
/// As [`check`].
pub fn check_with_limit(history: &History, limit: usize) -> Result<(), Failure> {
    check_registers(history, &registers(history), limit)
}

/// Judges the point operations together with what scans saw.
///
/// A scan is for each key a read at some instant of the scan's interval, see [`scan`]: of the value if the pair was
/// returned, of nothing if the key was owed and is missing. This is the sharpest that can be said of scans that need
/// not be atomic. The shape of a scan (order, bounds, limit) is not judged here.
///
/// # Errors
/// As [`check`].
pub fn check_with_scans(history: &History) -> Result<(), Failure> {
    let mut registers = registers(history);
    let keys: Vec<&[u8]> = scan::known_keys(history);
    for operation in history.operations() {
        scan::for_each_read(&keys, operation, |key, held| {
            registers.entry(key).or_default().push(Step { operation, seen_by_scan: Some(held) });
        });
    }
    check_registers(history, &registers, DEFAULT_LIMIT)
}

/// The steps of each key.
type Registers<'a> = BTreeMap<&'a [u8], Vec<Step<'a>>>;

/// An operation on one key, or the part of a scan that concerns the key.
#[derive(Debug, Clone, Copy)]
struct Step<'a> {
    operation: &'a Operation,
    seen_by_scan: Option<Held<'a>>,
}

impl<'a> Step<'a> {
    /// The effect, if `known` is the answer, or if it is not.
    fn effect(&self, known: bool) -> Option<Effect<Held<'a>>> {
        match (known, self.seen_by_scan, &self.operation.outcome) {
            (true, Some(held), _) => Some(Effect::read(held)),
            (true, None, Some(outcome)) => Some(Effect::completed(&self.operation.action, outcome)),
            _ => Effect::possible(&self.operation.action),
        }
    }

    fn responded(&self) -> u64 {
        self.operation.responded.unwrap_or(u64::MAX)
    }

    fn to_operation(self, key: &[u8]) -> Operation {
        let Some(held) = self.seen_by_scan else {
            return self.operation.clone();
        };
        Operation {
            action: Action::Get { key: key.to_vec() },
            outcome: Some(Outcome::Value(held.map(<[u8]>::to_vec))),
            ..*self.operation
        }
    }
}

fn registers(history: &History) -> Registers<'_> {
    let mut registers = Registers::new();
    for operation in history.operations() {
        if let Some(key) = operation.action.key() {
            registers.entry(key).or_default().push(Step { operation, seen_by_scan: None });
        }
    }
    registers
}

fn check_registers(history: &History, registers: &Registers<'_>, limit: usize) -> Result<(), Failure> {
    let mut undecided = None;
    for (&key, steps) in registers {
        let register = Register { initial: history.initial().get(key).map(Vec::as_slice), steps };
        match register.judge(limit) {
            Verdict::Linearizable => {}
            Verdict::NotLinearizable => {
                return Err(Failure::NotLinearizable(Box::new(register.explain(key))));
            }
            Verdict::Undecided => {
                undecided.get_or_insert_with(|| Undecided {
                    key: key.to_vec(),
                    operations: steps.len(),
                    limit,
                });
            }
        }
    }
    undecided.map_or(Ok(()), |undecided| Err(Failure::Undecided(Box::new(undecided))))
}

/// All that happened to one key.
struct Register<'a> {
    initial: Held<'a>,
    steps: &'a [Step<'a>],
}

impl Register<'_> {
    fn judge(&self, limit: usize) -> Verdict {
        self.judge_part(u64::MAX, |_| true, limit)
    }

    /// Judges the steps invoked before `end`, taking the answers only of those that are `known`.
    fn judge_part(&self, end: u64, known: impl Fn(&Step) -> bool, limit: usize) -> Verdict {
        let mut values = Interner::new();
        let initial = values.intern(self.initial);
        let mut required = Vec::with_capacity(self.steps.len());
        let mut optional = Vec::new();
        for step in self.steps.iter().filter(|step| step.operation.invoked < end) {
            let is_known = step.operation.responded.is_some_and(|responded| responded <= end) && known(step);
            let Some(effect) = step.effect(is_known) else { continue };
            let (list, responded) =
                if is_known { (&mut required, step.responded()) } else { (&mut optional, u64::MAX) };
            list.push(Entry {
                invoked: step.operation.invoked,
                responded,
                effect: values.intern_effect(effect),
            });
        }
        Search::new(initial, required, optional, values.count(), limit).run()
    }

    /// Cuts a register known to be bad down to what a person wants to see of it.
    fn explain(&self, key: &[u8]) -> Violation {
        let mut responses: Vec<u64> = self.steps.iter().filter_map(|step| step.operation.responded).collect();
        responses.sort_unstable();
        let fails_at = |index: usize| {
            self.judge_part(responses[index], |_| true, PREFIX_LIMIT) == Verdict::NotLinearizable
        };
        // Prefixes of linearizable histories are linearizable, so the shortest bad one can be found by halving.
        let (mut low, mut high) = (0, responses.len().saturating_sub(1));
        while low < high {
            let middle = low.midpoint(high);
            if fails_at(middle) {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        let end = responses.get(high).copied().unwrap_or(u64::MAX);
        let core = self.contradiction(end);
        Violation {
            key: key.to_vec(),
            initial: self.initial.map(<[u8]>::to_vec),
            responses: high + 1,
            nearby: self.nearby(key, end, &core),
            core: core.into_iter().map(|step| step.to_operation(key)).collect(),
        }
    }

    /// The fewest answers up to `end` found to be still bad if all the others are forgotten: leave out halves, then
    /// quarters, and so on down to single answers.
    fn contradiction(&self, end: u64) -> Vec<Step<'_>> {
        let mut core: Vec<Step> = self.steps.iter().filter(|step| step.responded() <= end).copied().collect();
        core.sort_by_key(|step| step.operation.invoked);
        let mut attempts = 0;
        let mut chunk = core.len().div_ceil(2);
        while chunk > 0 {
            let mut start = 0;
            while start < core.len() && attempts < CORE_ATTEMPTS {
                attempts += 1;
                let mut fewer = core.clone();
                fewer.drain(start..(start + chunk).min(core.len()));
                let invoked: Vec<u64> = fewer.iter().map(|step| step.operation.invoked).collect();
                let known = |step: &Step| invoked.binary_search(&step.operation.invoked).is_ok();
                if self.judge_part(end, known, CORE_LIMIT) == Verdict::NotLinearizable {
                    core = fewer;
                } else {
                    start += chunk;
                }
            }
            chunk /= 2;
        }
        core
    }

    /// The last few other operations invoked up to `end`.
    fn nearby(&self, key: &[u8], end: u64, core: &[Step]) -> Vec<Operation> {
        const SHOWN: usize = 12;
        let is_core =
            |step: &Step| core.iter().any(|other| other.operation.invoked == step.operation.invoked);
        let mut others: Vec<&Step> =
            self.steps.iter().filter(|step| step.operation.invoked < end && !is_core(step)).collect();
        others.sort_by_key(|step| step.operation.invoked);
        let skipped = others.len().saturating_sub(SHOWN);
        others[skipped..].iter().map(|step| step.to_operation(key)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::model::{Script, Simulation, forget, is_linearizable, mutate, random_history};
    use fastrand::Rng;

    fn is_good(history: &History) -> bool {
        match check(history) {
            Ok(()) => true,
            Err(Failure::NotLinearizable(_)) => false,
            Err(other) => panic!("{other}"),
        }
    }

    /// Lines of a script: `client operation -> answer`, see [`Script`].
    fn good(lines: &[&str]) {
        let history = Script::run(lines);
        assert!(is_linearizable(&history), "the reference rejects it");
        check(&history).unwrap();
    }

    fn bad(lines: &[&str]) -> Violation {
        let history = Script::run(lines);
        assert!(!is_linearizable(&history), "the reference accepts it");
        match check(&history) {
            Err(Failure::NotLinearizable(violation)) => *violation,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn sequential_use_of_every_action_is_good() {
        good(&[
            "1 get = -",
            "1 put a",
            "1 get = a",
            "1 pia b = no",
            "1 uip b = yes",
            "1 cas b c = yes",
            "1 cas b d = no",
            "1 get = c",
            "1 del = yes",
            "1 del = no",
            "1 uip x = no",
            "1 cas - e = yes",
            "1 cas e - = yes",
            "1 pia f = yes",
            "1 cas f f = yes",
            "1 get = f",
        ]);
    }

    #[test]
    fn stale_read_after_completed_write() {
        let violation = bad(&["1 put a", "1 put b", "2 get = a"]);
        assert_eq!((violation.responses, violation.core.len()), (3, 3));
    }

    #[test]
    fn stale_read_of_absence() {
        bad(&["1 put a", "2 get = -"]);
    }

    #[test]
    fn concurrent_read_may_be_old_or_new() {
        good(&["1 put a", "1( put b", "2 get = a", "2 get = b", "1)"]);
        good(&["1 put a", "1( put b", "2 get = b", "1)"]);
    }

    #[test]
    fn reads_by_different_clients_do_not_go_back() {
        bad(&["1 put a", "1( put b", "2 get = b", "3 get = a", "1)"]);
    }

    #[test]
    fn lost_update() {
        bad(&["1 put a", "1( cas a b = yes", "2( cas a c = yes", "1)", "2)"]);
        bad(&["1 put a", "1 put b", "2 get = a"]);
    }

    #[test]
    fn two_put_if_absent_without_delete() {
        bad(&["1( pia a = yes", "2( pia b = yes", "1)", "2)"]);
        good(&["1( pia a = yes", "2( pia b = yes", "3( del = yes", "1)", "2)", "3)"]);
    }

    #[test]
    fn read_of_a_value_never_written() {
        let violation = bad(&["1 put a", "2 get = z", "1 put b"]);
        assert_eq!(violation.core.len(), 1);
        assert_eq!(violation.responses, 2);
    }

    #[test]
    fn read_before_the_write_is_invoked() {
        bad(&["2 get = a", "1 put a"]);
    }

    #[test]
    fn value_resurrected_after_delete() {
        bad(&["1 put a", "1 del = yes", "2 get = -", "2 get = a"]);
    }

    #[test]
    fn unknown_write_that_shows_up_late() {
        good(&["1? put a", "2 get = -", "2 put b", "2 get = b", "2 get = a", "2 get = a"]);
        good(&["1? del", "2 put b", "2 get = b", "2 get = -"]);
        good(&["1? put a", "2 get = -", "2 get = -"]);
    }

    #[test]
    fn unknown_write_observed_then_unobserved() {
        bad(&["2 put b", "1? put a", "2 get = a", "2 get = b"]);
    }

    #[test]
    fn unknown_write_happens_once() {
        bad(&["1? put a", "2 get = a", "2 del = yes", "2 get = a"]);
        good(&["1? put a", "3? put a", "2 get = a", "2 del = yes", "2 get = a"]);
    }

    #[test]
    fn unknown_conditional_write_needs_its_condition() {
        bad(&["2 put b", "1? pia a", "2 get = a"]);
        bad(&["1? uip a", "2 get = a"]);
        good(&["2 put b", "1? pia a", "2 del = yes", "2 get = a"]);
        good(&["2 put b", "1? cas b c", "3? cas c d", "2 get = d"]);
        bad(&["2 put b", "3? cas c d", "2 get = d"]);
    }

    #[test]
    fn unknown_write_supplies_presence_only() {
        good(&["1? put a", "2 del = yes"]);
        bad(&["1? put a", "2 del = yes", "2 del = yes"]);
    }

    #[test]
    fn torn_value() {
        bad(&["1 put aaaa", "1( put bbbb", "2 get = aabb", "1)"]);
    }

    #[test]
    fn compare_and_swap_with_the_wrong_expectation() {
        bad(&["1 put a", "2 cas b c = yes"]);
        bad(&["1 put a", "2 cas a c = no"]);
        bad(&["1 put a", "2 cas - c = yes"]);
        bad(&["2 cas a a = yes"]);
    }

    #[test]
    fn the_violation_is_cut_down_and_reads_well() {
        let mut lines = vec!["1 put a"];
        lines.extend(["1 put c", "2 get = c", "3( get = c", "3)", "1 put d", "2 get = d"].repeat(50));
        lines.extend(["1 put x", "1 put y", "2 get = x"]);
        lines.extend(["1 put e", "2 get = e"].repeat(50));
        let violation = match check(&Script::run(&lines)) {
            Err(Failure::NotLinearizable(violation)) => violation,
            other => panic!("{other:?}"),
        };
        let core: Vec<_> = violation.core.iter().map(|operation| operation.action.to_string()).collect();
        assert_eq!(core, ["put \"k\" = \"x\"", "put \"k\" = \"y\"", "get \"k\""]);
        assert_eq!(violation.responses, 1 + 50 * 5 + 50 + 3 - 50);
        assert!(violation.to_string().lines().count() <= 1 + 3 + 12);
    }

    #[test]
    fn keys_are_independent_and_start_with_the_initial_contents() {
        let mut history = History::with_initial([(b"k".to_vec(), b"i".to_vec())]);
        Script::extend(&mut history, &["1 get = i", "1 pia a = no", "1 del = yes"]);
        check(&history).unwrap();
        Script::extend(&mut history, &["1 get = i"]);
        check(&history).unwrap_err();
    }

    /// The exact verdict on tiny histories, made up at random or true and then falsified, with few and many values.
    #[test]
    fn agrees_with_the_reference_on_tiny_histories() {
        let mut verdicts = [0_u32; 2];
        for seed in 0..12_000 {
            let mut rng = Rng::with_seed(seed);
            let history = if seed % 2 == 0 {
                random_history(&mut rng, 7)
            } else {
                let mut simulation = Simulation::tiny(&mut rng);
                let mut history = simulation.run(&mut rng);
                assert!(is_linearizable(&history), "seed {seed}");
                if rng.u8(..4) > 0 {
                    history = mutate(&history, &mut rng);
                }
                history
            };
            let expected = is_linearizable(&history);
            let lines: Vec<_> = history.operations().iter().map(ToString::to_string).collect();
            assert_eq!(is_good(&history), expected, "seed {seed}: {lines:#?}");
            verdicts[usize::from(expected)] += 1;
        }
        assert!(verdicts.iter().all(|&count| count > 2_000), "lopsided: {verdicts:?}");
    }

    /// The same with up to twelve operations, where the order of choices and the memory of failures matter.
    #[test]
    fn agrees_with_the_reference_on_small_histories() {
        let mut verdicts = [0_u32; 2];
        for seed in 0..3_000 {
            let mut rng = Rng::with_seed(seed);
            let mut simulation = Simulation {
                operations: rng.usize(8..13),
                clients: rng.u32(3..9),
                ..Simulation::tiny(&mut rng)
            };
            let history = match seed % 8 {
                0 => random_history(&mut rng, 12),
                _ => mutate(&simulation.run(&mut rng), &mut rng),
            };
            let expected = is_linearizable(&history);
            assert_eq!(is_good(&history), expected, "seed {seed}");
            verdicts[usize::from(expected)] += 1;
        }
        assert!(verdicts.iter().all(|&count| count > 300), "lopsided: {verdicts:?}");
    }

    /// A reported core must be bad by itself: the reference agrees when all other answers are forgotten.
    #[test]
    fn the_core_is_a_contradiction_by_itself() {
        for seed in 0..1_500 {
            let mut rng = Rng::with_seed(seed);
            let history = random_history(&mut rng, 7);
            let Err(Failure::NotLinearizable(violation)) = check(&history) else {
                continue;
            };
            let forgetful = forget(&history, |operation| violation.core.contains(operation));
            assert!(!is_linearizable(&forgetful), "seed {seed}: {violation}");
            for left_out in &violation.core {
                let weaker =
                    forget(&history, |operation| operation != left_out && violation.core.contains(operation));
                assert!(is_linearizable(&weaker), "seed {seed}: not minimal: {violation}");
            }
        }
    }

    #[test]
    fn true_histories_pass_and_false_ones_are_mostly_caught() {
        let (mut caught, mut falsified) = (0, 0);
        for seed in 0..300 {
            let mut rng = Rng::with_seed(seed);
            let history = Simulation::wide(&mut rng).run(&mut rng);
            check(&history).unwrap_or_else(|failure| panic!("seed {seed}: {failure}"));
            check_with_scans(&history).unwrap_or_else(|failure| panic!("seed {seed}: {failure}"));
            let mutant = mutate(&history, &mut rng);
            falsified += 1;
            caught += u32::from(!is_good(&mutant));
        }
        assert!(caught * 2 > falsified, "{caught} of {falsified}");
    }

    /// Thirty-two clients on one key and tens of operations never answered: true histories are decided at once, and
    /// false ones too where the values differ and the crowd is not as dense.
    #[test]
    fn crowded_keys_with_many_unknown_operations_are_decided() {
        for seed in 0..4 {
            let mut rng = Rng::with_seed(seed);
            let history = Simulation::crowded(32, seed % 2 == 0).run(&mut rng);
            check(&history).unwrap_or_else(|failure| panic!("seed {seed}: {failure}"));
            let history = Simulation::crowded(16, true).run(&mut rng);
            let mutant = mutate(&history, &mut rng);
            let verdict = check(&mutant);
            assert!(!matches!(verdict, Err(Failure::Undecided(_))), "seed {seed}: {verdict:?}");
        }
    }

    #[test]
    fn giving_up_is_said_so() {
        let mut given_up = 0;
        for seed in 0..20 {
            let mut rng = Rng::with_seed(seed);
            let history = Simulation::wide(&mut rng).run(&mut rng);
            check(&history).unwrap();
            match check_with_limit(&history, 0) {
                Ok(()) => {}
                Err(Failure::Undecided(_)) => given_up += 1,
                Err(other) => panic!("{other}"),
            }
        }
        assert!(given_up > 0);
    }
}
