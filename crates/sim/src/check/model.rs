//! What the tests of the checkers share: a sequential map, true histories made from it, false ones made from those, and
//! a slow checker that is too simple to be wrong.
//!
//! Nothing here uses `super::Effect`, so that a mistake there is not made twice.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use fastrand::Rng;

use crate::history::{Action, History, Key, OpId, Operation, Outcome, Value};

/// What a point operation does to what its key holds, and what it answers.
fn apply(action: &Action, held: &mut Option<Value>) -> Outcome {
    let before = held.clone();
    match action {
        Action::Get { .. } => return Outcome::Value(before),
        Action::Put { value, .. } => {
            *held = Some(value.clone());
            return Outcome::Done;
        }
        Action::PutIfAbsent { value, .. } if before.is_none() => *held = Some(value.clone()),
        Action::UpdateIfPresent { value, .. } if before.is_some() => *held = Some(value.clone()),
        Action::CompareAndSwap { expected, new, .. } if before == *expected => (*held).clone_from(new),
        Action::Delete { .. } if before.is_some() => *held = None,
        _ => return Outcome::Applied(false),
    }
    Outcome::Applied(true)
}

/// Whether the operations of each key have an order that explains them: tries them all.
pub(crate) fn is_linearizable(history: &History) -> bool {
    let mut keys: BTreeMap<&Key, Vec<&Operation>> = BTreeMap::new();
    for operation in history.operations() {
        if let Some(key) = operation.action.key() {
            keys.entry(key).or_default().push(operation);
        }
    }
    keys.iter().all(|(&key, operations)| {
        assert!(operations.len() <= 20, "too many for the reference");
        has_order(operations, 0, history.initial().get(key).cloned(), &mut BTreeSet::new())
    })
}

/// Whether what is not in the set `ordered` can follow when the key holds `held`.
fn has_order(
    operations: &[&Operation],
    ordered: u32,
    held: Option<Value>,
    failed: &mut BTreeSet<(u32, Option<Value>)>,
) -> bool {
    let rest = || (0..operations.len()).filter(|index| ordered >> index & 1 == 0);
    if rest().all(|index| operations[index].responded.is_none()) {
        return true;
    }
    if failed.contains(&(ordered, held.clone())) {
        return false;
    }
    for index in rest() {
        let next = operations[index];
        let is_overtaken =
            rest().any(|other| operations[other].responded.is_some_and(|at| at < next.invoked));
        let mut after = held.clone();
        let outcome = apply(&next.action, &mut after);
        let is_explained = next.outcome.as_ref().is_none_or(|answer| *answer == outcome);
        if !is_overtaken && is_explained && has_order(operations, ordered | 1 << index, after, failed) {
            return true;
        }
    }
    failed.insert((ordered, held));
    false
}

/// Rebuilds a history with the answers changed by `change`; an answer changed to `None` is forgotten.
pub(crate) fn rewrite(
    history: &History,
    mut change: impl FnMut(usize, &Operation) -> Option<Outcome>,
) -> History {
    let mut events: Vec<(u64, usize, bool)> = Vec::new();
    for (index, operation) in history.operations().iter().enumerate() {
        events.push((operation.invoked, index, true));
        events.extend(operation.responded.map(|at| (at, index, false)));
    }
    events.sort_unstable();
    let mut copy = History::with_initial(history.initial().clone());
    let mut ids: BTreeMap<usize, OpId> = BTreeMap::new();
    for (_, index, is_invocation) in events {
        let operation = &history.operations()[index];
        if is_invocation {
            ids.insert(index, copy.invoke(operation.client, operation.action.clone()));
        } else if let Some(outcome) = change(index, operation) {
            copy.respond(ids[&index], outcome);
        }
    }
    copy
}

/// Forgets every answer that is not to be kept.
pub(crate) fn forget(history: &History, keep: impl Fn(&Operation) -> bool) -> History {
    rewrite(history, |_, operation| operation.outcome.clone().filter(|_| keep(operation)))
}

/// Falsifies the answers of one or two point operations.
pub(crate) fn mutate(history: &History, rng: &mut Rng) -> History {
    let answered: Vec<usize> = (0..history.operations().len())
        .filter(|&index| {
            let operation = &history.operations()[index];
            matches!(operation.outcome, Some(Outcome::Value(_) | Outcome::Applied(_)))
        })
        .collect();
    if answered.is_empty() {
        return history.clone();
    }
    let victim = answered[rng.usize(..answered.len())];
    let other = answered[rng.usize(..answered.len())];
    let outcome_of = |index: usize| history.operations()[index].outcome.clone();
    let written: Vec<Value> =
        history.operations().iter().filter_map(|operation| written(&operation.action)).collect();
    let swaps = rng.bool();
    rewrite(history, |index, operation| {
        let swapped = match index {
            _ if index == victim => outcome_of(other),
            _ if index == other => outcome_of(victim),
            _ => None,
        };
        if let Some(swapped) = swapped.filter(|outcome| swaps && outcome.fits(&operation.action)) {
            return Some(swapped);
        }
        match &operation.outcome {
            Some(Outcome::Applied(applied)) if index == victim => Some(Outcome::Applied(!applied)),
            Some(Outcome::Value(_)) if index == victim => Some(Outcome::Value(match rng.u8(..8) {
                0 => None,
                1 => Some(b"never".to_vec()),
                _ if written.is_empty() => None,
                _ => Some(written[rng.usize(..written.len())].clone()),
            })),
            outcome => outcome.clone(),
        }
    })
}

fn written(action: &Action) -> Option<Value> {
    match action {
        Action::Put { value, .. }
        | Action::PutIfAbsent { value, .. }
        | Action::UpdateIfPresent { value, .. } => Some(value.clone()),
        Action::CompareAndSwap { new, .. } => new.clone(),
        _ => None,
    }
}

/// A few operations on one key with answers made up at random.
pub(crate) fn random_history(rng: &mut Rng, most_operations: u32) -> History {
    let values = rng.u64(2..4);
    let simulation = Simulation { values: Some(values), ..Simulation::tiny(rng) };
    let mut history = History::new();
    let mut open: Vec<(OpId, Action)> = Vec::new();
    let mut left = rng.u32(2..=most_operations);
    while left > 0 || !open.is_empty() {
        if left > 0 && (open.is_empty() || rng.u8(..5) < 3) {
            left -= 1;
            let action = simulation.action(rng, &mut 0);
            open.push((history.invoke(left, action.clone()), action));
        } else {
            let (id, action) = open.swap_remove(rng.usize(..open.len()));
            let mut held = (rng.u8(..3) > 0).then(|| simulation.value(rng, &mut 0));
            if rng.u8(..8) > 0 {
                history.respond(id, apply(&action, &mut held));
            }
        }
    }
    history
}

/// A way to make true histories: clients that work on one real map, each operation at an instant of its own.
#[derive(Debug, Clone)]
pub(crate) struct Simulation {
    pub(crate) clients: u32,
    pub(crate) operations: usize,
    pub(crate) keys: u64,
    /// How many values there are; all differ if `None`.
    pub(crate) values: Option<u64>,
    /// Of 1000 operations, how many are never answered.
    pub(crate) unknown: u32,
    /// Of 1000 operations, how many are scans.
    pub(crate) scans: u32,
    /// Of 1000 point operations, how many are gets.
    pub(crate) gets: u32,
    /// The most pairs of a scan, if the scan is limited.
    pub(crate) most_pairs: usize,
}

/// An operation on its way.
struct Running {
    id: OpId,
    action: Action,
    is_dead: bool,
    outcome: Option<Outcome>,
    /// Of a scan, the keys not yet read, and the pairs found.
    unread: Vec<Key>,
    /// Of a scan, the most keys it reads at one instant.
    stride: usize,
    found: BTreeMap<Key, Value>,
}

impl Simulation {
    /// Few operations on one key, for the reference.
    pub(crate) fn tiny(rng: &mut Rng) -> Self {
        Self {
            clients: rng.u32(2..6),
            operations: rng.usize(2..8),
            keys: 1,
            values: rng.bool().then_some(rng.u64(2..4)),
            unknown: 150,
            scans: 0,
            gets: 400,
            most_pairs: 0,
        }
    }

    /// Some hundred operations on some keys, scans among them.
    pub(crate) fn wide(rng: &mut Rng) -> Self {
        Self {
            clients: rng.u32(2..12),
            operations: 300,
            keys: rng.u64(2..12),
            values: rng.bool().then_some(rng.u64(2..6)),
            unknown: rng.u32(..60),
            scans: 100,
            gets: 400,
            most_pairs: 4,
        }
    }

    /// Thousands of operations on one key.
    pub(crate) fn crowded(clients: u32, distinct_values: bool) -> Self {
        Self {
            clients,
            operations: 2_000,
            keys: 1,
            values: (!distinct_values).then_some(8),
            unknown: 30,
            scans: 0,
            gets: 500,
            most_pairs: 0,
        }
    }

    pub(crate) fn run(&mut self, rng: &mut Rng) -> History {
        let mut fresh = 0;
        let mut map: BTreeMap<Key, Value> = BTreeMap::new();
        for key in 0..self.keys {
            if rng.bool() {
                map.insert(name(key), self.value(rng, &mut fresh));
            }
        }
        let mut history = History::with_initial(map.clone());
        let mut running: BTreeMap<u32, Running> = BTreeMap::new();
        let mut dead: Vec<Running> = Vec::new();
        let mut left = self.operations;
        while left > 0 || !running.is_empty() {
            let client = rng.u32(..self.clients);
            if let Some(operation) = running.get_mut(&client) {
                if operation.is_dead {
                    dead.extend(running.remove(&client));
                } else if let Some(outcome) = operation.outcome.take() {
                    history.respond(operation.id, outcome);
                    running.remove(&client);
                } else {
                    operation.step(rng, &mut map);
                }
            } else if left > 0 {
                left -= 1;
                running.insert(client, self.start(rng, client, &mut history, &mut fresh));
            }
            // What a dead client left behind takes effect at any time, or never.
            if !dead.is_empty() && rng.u8(..16) == 0 {
                let mut late = dead.swap_remove(rng.usize(..dead.len()));
                if rng.bool() && late.action.key().is_some() {
                    late.step(rng, &mut map);
                }
            }
        }
        history
    }

    fn start(&self, rng: &mut Rng, client: u32, history: &mut History, fresh: &mut u64) -> Running {
        let action = if rng.u32(..1000) < self.scans { self.scan(rng) } else { self.action(rng, fresh) };
        let mut unread: Vec<Key> = Vec::new();
        if action.key().is_none() {
            unread.extend((0..self.keys).map(name));
            rng.shuffle(&mut unread);
        }
        Running {
            id: history.invoke(client, action.clone()),
            is_dead: rng.u32(..1000) < self.unknown,
            action,
            outcome: None,
            stride: unread.len().div_ceil(4).max(1),
            unread,
            found: BTreeMap::new(),
        }
    }

    fn scan(&self, rng: &mut Rng) -> Action {
        let mut bound = |is_start: bool| {
            let (low, high) = if is_start { (0, self.keys / 2 + 1) } else { (self.keys / 2, self.keys) };
            match rng.u8(..3) {
                0 => Bound::Unbounded,
                1 => Bound::Included(name(rng.u64(low..high))),
                _ => Bound::Excluded(name(rng.u64(low..high))),
            }
        };
        Action::Scan {
            start: bound(true),
            end: bound(false),
            limit: if rng.bool() { rng.usize(..=self.most_pairs) } else { usize::MAX },
            reverse: rng.bool(),
        }
    }

    fn value(&self, rng: &mut Rng, fresh: &mut u64) -> Value {
        *fresh += 1;
        self.values.map_or(*fresh, |values| rng.u64(..values)).to_string().into_bytes()
    }

    fn action(&self, rng: &mut Rng, fresh: &mut u64) -> Action {
        let key = name(rng.u64(..self.keys));
        if rng.u32(..1000) < self.gets {
            return Action::Get { key };
        }
        let value = self.value(rng, fresh);
        match rng.u8(..10) {
            0..4 => Action::Put { key, value },
            4 => Action::PutIfAbsent { key, value },
            5 => Action::UpdateIfPresent { key, value },
            6 | 7 => Action::CompareAndSwap {
                key,
                // Recent values, so that some swaps succeed even if all values differ.
                expected: (rng.u8(..4) > 0).then(|| match self.values {
                    Some(values) => rng.u64(..values).to_string().into_bytes(),
                    None => fresh.saturating_sub(rng.u64(1..8)).to_string().into_bytes(),
                }),
                new: (rng.u8(..4) > 0).then_some(value),
            },
            _ => Action::Delete { key },
        }
    }
}

impl Running {
    /// Does the next thing: all of a point operation, or the read of one more key of a scan.
    fn step(&mut self, rng: &mut Rng, map: &mut BTreeMap<Key, Value>) {
        let Action::Scan { start, end, limit, reverse } = &self.action else {
            let Some(key) = self.action.key() else { return };
            let mut held = map.remove(key);
            self.outcome = Some(apply(&self.action, &mut held));
            map.extend(held.map(|value| (key.clone(), value)));
            return;
        };
        for _ in 0..rng.usize(1..=self.stride) {
            let Some(key) = self.unread.pop() else { break };
            let is_inside = (start.as_ref(), end.as_ref());
            if let Some(value) = map.get(&key).filter(|_| std::ops::RangeBounds::contains(&is_inside, &&key))
            {
                self.found.insert(key, value.clone());
            }
        }
        if self.unread.is_empty() {
            let found = std::mem::take(&mut self.found).into_iter();
            let mut pairs: Vec<_> = if *reverse { found.rev().collect() } else { found.collect() };
            pairs.truncate(*limit);
            self.outcome = Some(Outcome::Pairs(pairs));
        }
    }
}

/// Keys whose order is that of their numbers.
pub(crate) fn name(number: u64) -> Key {
    format!("k{number:06}").into_bytes()
}

/// Histories of the key `k` in a few letters.
///
/// `1 put a` is an operation of client 1 from invocation to response; `1( put a` only its invocation, and `1)` its
/// response; `1? put a` an operation without one. Operations: `get = VALUE`, `put VALUE`, `pia VALUE = yes`
/// (put-if-absent), `uip VALUE = no` (update-if-present), `cas OLD NEW = yes`, `del = yes`. `-` is absence.
#[derive(Debug)]
pub(crate) struct Script;

impl Script {
    pub(crate) fn run(lines: &[&str]) -> History {
        let mut history = History::new();
        Self::extend(&mut history, lines);
        history
    }

    pub(crate) fn extend(history: &mut History, lines: &[&str]) {
        let mut open: BTreeMap<u32, (OpId, Outcome)> = BTreeMap::new();
        for line in lines {
            let words: Vec<&str> = line.split_whitespace().collect();
            let client = words[0].trim_end_matches(['(', ')', '?']).parse().expect("a client's number");
            if words[0].ends_with(')') {
                let (id, outcome) = open.remove(&client).expect("an operation that is open");
                history.respond(id, outcome);
                continue;
            }
            let (action, outcome) = Self::parse(&words[1..]);
            let id = history.invoke(client, action);
            if words[0].ends_with('(') {
                open.insert(client, (id, outcome));
            } else if words[0].ends_with('?') {
                history.unknown(id);
            } else {
                history.respond(id, outcome);
            }
        }
    }

    fn parse(words: &[&str]) -> (Action, Outcome) {
        let key = b"k".to_vec();
        let value = |word: usize| words[word].as_bytes().to_vec();
        let held = |word: usize| (words[word] != "-").then(|| value(word));
        let applied = Outcome::Applied(words.last() == Some(&"yes"));
        match words[0] {
            "get" => (Action::Get { key }, Outcome::Value(held(2))),
            "put" => (Action::Put { key, value: value(1) }, Outcome::Done),
            "pia" => (Action::PutIfAbsent { key, value: value(1) }, applied),
            "uip" => (Action::UpdateIfPresent { key, value: value(1) }, applied),
            "cas" => {
                let (expected, new) = (held(1), held(2));
                (Action::CompareAndSwap { key, expected, new }, applied)
            }
            "del" => (Action::Delete { key }, applied),
            other => panic!("unknown operation {other}"),
        }
    }
}
