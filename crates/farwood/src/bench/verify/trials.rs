//! The model against maps that are right, maps with a mistake, and the simulator's exact checker.

use super::{Kind, Model, ReadTicket, Scan, Violation, WriteTicket};
use farwood_sim::check::{self, Failure};
use farwood_sim::history::{Action, History, OpId, Outcome};
use fastrand::Rng;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::{Arc, Mutex};

const KEYS: u8 = 3;
const CLIENTS: u8 = 4;

/// What is wrong with a map.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Mistake {
    None,
    /// Some gets return what the key held before.
    StaleGet,
    /// Some puts do nothing.
    LostPut,
    /// Some swaps compare first, and set at their end.
    TornSwap,
    /// Some deletes leave the key.
    LostDelete,
    /// Some scans leave out a key.
    ScanSkips,
    /// Some answers are made up.
    Invention,
}

#[derive(Debug)]
enum Ticket {
    Read(ReadTicket),
    Write(WriteTicket),
}

fn begin(model: &Model, action: &Action) -> Ticket {
    match action {
        Action::Get { .. } | Action::Scan { .. } => Ticket::Read(model.begin_read()),
        Action::Put { key, value }
        | Action::PutIfAbsent { key, value }
        | Action::UpdateIfPresent { key, value } => Ticket::Write(model.begin_write(key, Some(value))),
        Action::CompareAndSwap { key, new, .. } => Ticket::Write(model.begin_write(key, new.as_deref())),
        Action::Delete { key } => Ticket::Write(model.begin_write(key, None)),
    }
}

fn end(model: &Model, ticket: Ticket, action: &Action, outcome: &Outcome) -> Result<(), Violation> {
    match (ticket, action, outcome) {
        (Ticket::Read(ticket), Action::Get { key }, Outcome::Value(value)) => {
            model.got(ticket, key, value.as_deref())
        }
        (Ticket::Read(ticket), Action::Scan { start, end, limit, reverse }, Outcome::Pairs(pairs)) => {
            let (start, end) = (start.as_ref().map(Vec::as_slice), end.as_ref().map(Vec::as_slice));
            model.scanned(ticket, Scan { start, end, limit: *limit, reverse: *reverse }, pairs)
        }
        (Ticket::Write(ticket), Action::Put { .. }, _) => model.wrote(ticket),
        (Ticket::Write(ticket), action, Outcome::Applied(applied)) => match action {
            Action::PutIfAbsent { .. } => model.inserted(ticket, *applied),
            Action::UpdateIfPresent { .. } => model.updated(ticket, *applied),
            Action::Delete { .. } => model.deleted(ticket, *applied),
            Action::CompareAndSwap { expected, .. } => model.swapped(ticket, expected.as_deref(), *applied),
            _ => unreachable!(),
        },
        other => unreachable!("{other:?}"),
    }
}

#[derive(Debug)]
struct UnderWay {
    action: Action,
    ticket: Ticket,
    id: OpId,
    /// What a scan has collected, and how many keys it has passed.
    pairs: Vec<(Vec<u8>, Vec<u8>)>,
    passed: u8,
    outcome: Option<Outcome>,
    /// A swap that sets at its end.
    unset: bool,
}

/// A map, and clients whose operations take effect at an instant between begin and end.
struct World {
    map: BTreeMap<Vec<u8>, Vec<u8>>,
    before: BTreeMap<Vec<u8>, Option<Vec<u8>>>,
    clients: Vec<Option<UnderWay>>,
    late: Vec<Action>,
    model: Model,
    history: History,
    mistake: Mistake,
    /// Values differ from write to write.
    distinct: bool,
    /// Some operations of unknown outcome are settled, for which a history has no word.
    settles: bool,
    writes: u32,
}

impl World {
    fn new(mistake: Mistake, distinct: bool, by_function: bool) -> Self {
        let loaded = (b"1".to_vec(), b"loaded".to_vec());
        let model = if by_function {
            Model::with_initial(Box::new(|key| (key == b"1").then(|| b"loaded".to_vec())))
        } else {
            Model::new()
        };
        if !by_function {
            model.load(&loaded.0, &loaded.1);
        }
        Self {
            map: BTreeMap::from([loaded.clone()]),
            before: BTreeMap::new(),
            clients: (0..CLIENTS).map(|_| None).collect(),
            late: Vec::new(),
            model,
            history: History::with_initial([loaded]),
            mistake,
            distinct,
            settles: true,
            writes: 0,
        }
    }

    /// One client goes on by one step: it begins, takes effect, or ends.
    fn step(&mut self, client: u8, dice: [u8; 3]) -> Result<(), Violation> {
        if dice[0] % 16 == 0
            && let Some(action) = self.late.pop()
        {
            self.apply(&action, 255);
        }
        let slot = usize::from(client % CLIENTS);
        match self.clients[slot].take() {
            None => {
                let action = self.choose(dice);
                let id = self.history.invoke(u32::from(client), action.clone());
                let ticket = begin(&self.model, &action);
                let under_way =
                    UnderWay { action, ticket, id, pairs: vec![], passed: 0, outcome: None, unset: false };
                self.clients[slot] = Some(under_way);
            }
            Some(under_way) if under_way.outcome.is_some() => return self.finish(under_way),
            Some(under_way) if dice[1] % 16 == 0 => return self.lose(under_way, dice[2]),
            Some(mut under_way) => {
                self.effect(&mut under_way, dice[2]);
                self.clients[slot] = Some(under_way);
            }
        }
        Ok(())
    }

    fn choose(&mut self, [kind, key, value]: [u8; 3]) -> Action {
        let key = vec![b'0' + key % KEYS];
        self.writes += 1;
        let distinct = self.writes;
        let new = if self.distinct { distinct.to_string().into_bytes() } else { vec![b'a' + value % 3] };
        let held = self.map.get(&key).cloned();
        match kind % 10 {
            0..3 => Action::Get { key },
            3 => Action::Put { key, value: new },
            4 => Action::PutIfAbsent { key, value: new },
            5 => Action::UpdateIfPresent { key, value: new },
            6 => Action::Delete { key },
            7 | 8 => {
                let expected = if value % 8 == 0 { None } else { held };
                Action::CompareAndSwap { key, expected, new: (value % 5 > 0).then_some(new) }
            }
            _ => Action::Scan {
                start: if value % 3 == 0 { Bound::Excluded(key) } else { Bound::Unbounded },
                end: Bound::Unbounded,
                limit: usize::from(value % 4),
                reverse: value & 16 == 0,
            },
        }
    }

    /// The operation has no answer: it may yet happen, or certainly does not.
    fn lose(&mut self, under_way: UnderWay, dice: u8) -> Result<(), Violation> {
        match under_way.ticket {
            Ticket::Read(ticket) => {
                self.history.cancel(under_way.id);
                self.model.abandoned(ticket);
            }
            Ticket::Write(ticket) if dice % 3 == 0 => {
                self.history.cancel(under_way.id);
                self.model.failed(ticket)?;
            }
            Ticket::Write(ticket) if dice % 3 == 1 || !self.settles => {
                self.history.unknown(under_way.id);
                self.late.push(under_way.action);
                self.model.unknown(ticket);
            }
            Ticket::Write(ticket) => {
                self.history.unknown(under_way.id);
                if dice & 16 == 0 {
                    self.apply(&under_way.action, 255);
                }
                self.model.settled(ticket);
            }
        }
        Ok(())
    }

    fn effect(&mut self, under_way: &mut UnderWay, dice: u8) {
        let Action::Scan { start, limit, reverse, .. } = &under_way.action else {
            under_way.unset = self.mistake == Mistake::TornSwap
                && matches!(&under_way.action, Action::CompareAndSwap { key, expected, .. } if self.map.get(key) == expected.as_ref());
            under_way.outcome = Some(if under_way.unset {
                Outcome::Applied(true)
            } else {
                self.apply(&under_way.action, dice)
            });
            return;
        };
        let place = if *reverse { KEYS - 1 - under_way.passed } else { under_way.passed };
        let key = vec![b'0' + place];
        let is_behind_start = !matches!(start, Bound::Excluded(start) if key <= *start);
        let skips = self.mistake == Mistake::ScanSkips && dice % 4 == 0;
        if under_way.pairs.len() < *limit
            && is_behind_start
            && !skips
            && let Some(value) = self.map.get(&key)
        {
            under_way.pairs.push((key, value.clone()));
        }
        under_way.passed += 1;
        if under_way.passed == KEYS {
            under_way.outcome = Some(Outcome::Pairs(std::mem::take(&mut under_way.pairs)));
        }
    }

    fn set(&mut self, key: &[u8], value: Option<&Vec<u8>>) {
        let old = match value {
            Some(value) => self.map.insert(key.to_vec(), value.clone()),
            None => self.map.remove(key),
        };
        self.before.insert(key.to_vec(), old);
    }

    /// What a point operation does and answers. Small dice make mistakes.
    fn apply(&mut self, action: &Action, dice: u8) -> Outcome {
        let errs = |mistake| self.mistake == mistake && dice < 64;
        let key = action.key().expect("a point operation");
        let held = self.map.get(key).cloned();
        if errs(Mistake::Invention) {
            return match action {
                Action::Get { .. } => Outcome::Value((dice > 10).then(|| vec![b'a' + dice % 3])),
                Action::Put { .. } => Outcome::Done,
                _ => Outcome::Applied(dice % 2 == 0),
            };
        }
        let (applies, new) = match action {
            Action::Get { key } if errs(Mistake::StaleGet) => {
                return Outcome::Value(self.before.get(key).cloned().unwrap_or(held));
            }
            Action::Put { .. } if errs(Mistake::LostPut) => return Outcome::Done,
            Action::Delete { .. } if errs(Mistake::LostDelete) => return Outcome::Applied(held.is_some()),
            Action::Get { .. } | Action::Scan { .. } => return Outcome::Value(held),
            Action::Put { value, .. } => (true, Some(value)),
            Action::PutIfAbsent { value, .. } => (held.is_none(), Some(value)),
            Action::UpdateIfPresent { value, .. } => (held.is_some(), Some(value)),
            Action::Delete { .. } => (held.is_some(), None),
            Action::CompareAndSwap { expected, new, .. } => (held == *expected, new.as_ref()),
        };
        if applies {
            self.set(key, new);
        }
        if matches!(action, Action::Put { .. }) { Outcome::Done } else { Outcome::Applied(applies) }
    }

    fn finish(&mut self, under_way: UnderWay) -> Result<(), Violation> {
        let UnderWay { action, ticket, id, outcome, unset, .. } = under_way;
        if unset && let Action::CompareAndSwap { key, new, .. } = &action {
            self.set(key, new.as_ref());
        }
        let outcome = outcome.expect("took effect");
        self.history.respond(id, outcome.clone());
        end(&self.model, ticket, &action, &outcome)
    }

    /// Runs to the first violation.
    fn run(&mut self, rng: &mut Rng, steps: usize) -> Result<(), Violation> {
        (0..steps).try_for_each(|_| self.step(rng.u8(..), [rng.u8(..), rng.u8(..), rng.u8(..)]))
    }
}

fn listed(history: &History) -> String {
    history.operations().iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

proptest! {
    #[test]
    fn a_correct_map_is_never_accused(
        steps in proptest::collection::vec((0..CLIENTS, any::<[u8; 3]>()), 0..400),
        distinct in any::<bool>(),
        by_function in any::<bool>(),
    ) {
        let mut world = World::new(Mistake::None, distinct, by_function);
        for (client, dice) in steps {
            let result = world.step(client, dice);
            prop_assert!(result.is_ok(), "{}\n{}", result.unwrap_err(), listed(&world.history));
        }
    }
}

#[test]
fn every_mistake_is_caught_soon() {
    for mistake in [
        Mistake::StaleGet,
        Mistake::LostPut,
        Mistake::TornSwap,
        Mistake::LostDelete,
        Mistake::ScanSkips,
        Mistake::Invention,
    ] {
        let caught = (0..20).filter(|&seed| {
            let mut rng = Rng::with_seed(seed);
            World::new(mistake, true, seed % 2 == 0).run(&mut rng, 2_000).is_err()
        });
        assert!(caught.count() >= 18, "{mistake:?}");
    }
}

/// Whatever the model refuses, the exact checker refuses too; and most of what that refuses is noticed here.
#[test]
fn accusations_stand_up_to_the_exact_checker() {
    let (mut bad, mut caught) = (0, 0);
    for seed in 0..6_000 {
        let mut rng = Rng::with_seed(seed);
        let mistakes = [Mistake::Invention, Mistake::TornSwap, Mistake::StaleGet, Mistake::LostDelete];
        let mut world = World::new(mistakes[rng.usize(..4)], rng.bool(), false);
        world.settles = false;
        let steps = rng.usize(10..80);
        let accused = world.run(&mut rng, steps);
        match check::all(&world.history) {
            Ok(()) => assert_eq!(accused, Ok(()), "seed {seed}: {}", listed(&world.history)),
            Err(Failure::Undecided(_)) => {}
            Err(_) => {
                bad += 1;
                caught += u32::from(accused.is_err());
            }
        }
    }
    assert!(bad > 1_000 && caught * 10 > bad * 9, "caught {caught} of {bad}");
}

#[test]
fn threads_on_a_locked_map_are_never_accused() {
    let model = Arc::new(Model::new());
    let map = Arc::new(Mutex::new(BTreeMap::<Vec<u8>, Vec<u8>>::new()));
    std::thread::scope(|scope| {
        for thread in 0..4_u32 {
            let (model, map) = (Arc::clone(&model), Arc::clone(&map));
            scope.spawn(move || {
                let mut rng = Rng::with_seed(u64::from(thread));
                for round in 0..5_000_u32 {
                    let key = vec![rng.u8(..6)];
                    let value = [thread.to_be_bytes(), round.to_be_bytes()].concat();
                    let result = match rng.u8(..5) {
                        0 => {
                            let ticket = model.begin_write(&key, Some(&value));
                            map.lock().unwrap().insert(key, value);
                            model.wrote(ticket)
                        }
                        1 => {
                            let ticket = model.begin_write(&key, None);
                            let existed = map.lock().unwrap().remove(&key).is_some();
                            model.deleted(ticket, existed)
                        }
                        2 => {
                            let ticket = model.begin_write(&key, Some(&value));
                            let mut map = map.lock().unwrap();
                            let was_absent = !map.contains_key(&key);
                            map.entry(key).or_insert(value);
                            drop(map);
                            model.inserted(ticket, was_absent)
                        }
                        3 => {
                            let ticket = model.begin_read();
                            let pairs: Vec<_> = map.lock().unwrap().clone().into_iter().take(4).collect();
                            let (start, end) = (Bound::Unbounded, Bound::Unbounded);
                            model.scanned(ticket, Scan { start, end, limit: 4, reverse: false }, &pairs)
                        }
                        _ => {
                            let ticket = model.begin_read();
                            let held = map.lock().unwrap().get(&key).cloned();
                            model.got(ticket, &key, held.as_deref())
                        }
                    };
                    result.unwrap();
                }
            });
        }
    });
    let counters = model.counters();
    assert_eq!(Kind::ALL.map(|kind| counters.of(kind).answers).iter().sum::<u64>(), 20_000);
    assert!(counters.of(Kind::Get).constrained > 0 && counters.scanned_keys.constrained > 0, "{counters:?}");
}

/// Sixteen clients, each with one operation under way, a million operations on a thousand keys.
#[test]
fn memory_stays_bounded() {
    let (clients, keys) = (16, 1_000_u32);
    let model = Model::new();
    let mut rng = Rng::with_seed(1);
    let mut tickets = Vec::new();
    let mut most = 0;
    for number in 0..1_000_000_u32 {
        let key = rng.u32(..keys).to_be_bytes();
        let value = number.to_be_bytes();
        // Whether a deleted key was there is not asked here: a put of nothing, so to speak.
        tickets.push(model.begin_write(&key, (rng.u8(..4) > 0).then_some(&value)));
        if tickets.len() == clients {
            model.wrote(tickets.swap_remove(rng.usize(..clients))).unwrap();
        }
        if number % 1_000 == 0 {
            let state = model.lock();
            let kept: usize = state.keys.values().map(super::History::len).sum();
            most = most.max(kept + state.gone.len());
        }
    }
    // The oldest of sixteen operations, of which one ends at random each time, is rarely more than a few hundred old.
    assert!(most < keys as usize + 1_000, "kept {most}");
    assert!(model.counters().longest_history < 20, "{:?}", model.counters());
}
