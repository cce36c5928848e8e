//! What one client does in a trial: random operations of every kind, one after the other. The same in simulated worlds and on
//! real threads.
//!
//! Keys are few and values are never written twice, so that operations meet and the checkers can tell writes apart.

use crate::history::{Action, Key, Outcome, Value};
use crate::spelling::Spelling;
use farwood_index::{IndexError, OrderedIndex};
use fastrand::Rng;
use std::collections::BTreeMap;
use std::ops::{Bound, RangeInclusive};

/// After so many operations clients turn from filling the index to emptying it, and back.
const PHASE_OPS: u32 = 32;

/// The operations of one client.
#[derive(Debug)]
pub struct Mix {
    rng: Rng,
    keys: u64,
    spelling: Spelling,
    value_bytes: RangeInclusive<usize>,
    /// Odd: it empties the index while others fill it.
    phase: u32,
    /// What the client last saw under each key, for comparisons that have a chance.
    seen: BTreeMap<Key, Option<Value>>,
}

impl Mix {
    /// Operations on keys from 0 up to `keys`, with values of these lengths.
    pub fn new(seed: u64, keys: u64, value_bytes: RangeInclusive<usize>) -> Self {
        let (rng, spelling) = (Rng::with_seed(seed), Spelling::Numbers);
        Self { rng, keys, spelling, value_bytes, phase: 0, seen: BTreeMap::new() }
    }

    /// The same with keys that look like this.
    #[must_use]
    pub fn spelled(self, spelling: Spelling) -> Self {
        Self { spelling, ..self }
    }

    /// The same, but so many phases ahead: clients that are out of step fill and empty the index at the same time.
    #[must_use]
    pub fn ahead(self, phases: u32) -> Self {
        Self { phase: phases, ..self }
    }

    /// The next operation of a client that has `left` operations left. `values` numbers all values that this client, or all of
    /// them, have written.
    pub fn draw(&mut self, left: u32, values: &mut u64) -> Action {
        let Self { rng, keys, spelling, value_bytes, phase, seen } = self;
        let shrinking = (left / PHASE_OPS + *phase) % 2 == 1;
        let kind = rng.u8(0..100);
        let key = spelling.key(rng.u64(0..*keys));
        let mut value = || {
            *values += 1;
            let mut value = values.to_le_bytes().to_vec();
            // Of many lengths, and full to the last word, so that a torn value shows.
            value.resize(rng.usize(value_bytes.clone()), value[0] | 1);
            value
        };
        match kind {
            0..35 => Action::Get { key },
            35..52 if shrinking => Action::Delete { key },
            35..60 => Action::Put { key, value: value() },
            60..65 => Action::PutIfAbsent { key, value: value() },
            65..70 => Action::UpdateIfPresent { key, value: value() },
            70..80 => Action::Delete { key },
            80..90 => {
                let expected = seen.get(&key).cloned().flatten();
                let new = if kind < 83 { None } else { Some(value()) };
                Action::CompareAndSwap { key, expected, new }
            }
            _ => {
                let other = spelling.key(rng.u64(0..*keys));
                let (low, high) = if key <= other { (key, other) } else { (other, key) };
                let start = if rng.bool() { Bound::Included(low) } else { Bound::Unbounded };
                let end = if rng.bool() { Bound::Excluded(high) } else { Bound::Unbounded };
                let limit = if rng.bool() { rng.usize(1..5) } else { usize::MAX };
                Action::Scan { start, end, limit, reverse: rng.bool() }
            }
        }
    }

    /// Remembers what an operation was answered.
    pub fn note(&mut self, action: &Action, outcome: &Outcome) {
        let (key, held) = match (action, outcome) {
            (Action::Get { key }, Outcome::Value(value)) => (key, value.clone()),
            (Action::Put { key, value }, _) => (key, Some(value.clone())),
            (Action::CompareAndSwap { key, new, .. }, Outcome::Applied(true)) => (key, new.clone()),
            (Action::Delete { key }, _) => (key, None),
            _ => return,
        };
        self.seen.insert(key.clone(), held);
    }
}

/// Carries out one operation.
pub async fn execute<I: OrderedIndex>(index: &I, action: &Action) -> Result<Outcome, IndexError> {
    Ok(match action {
        Action::Get { key } => Outcome::Value(index.get(key).await?),
        Action::Put { key, value } => {
            index.put(key, value).await?;
            Outcome::Done
        }
        Action::PutIfAbsent { key, value } => Outcome::Applied(index.put_if_absent(key, value).await?),
        Action::UpdateIfPresent { key, value } => {
            Outcome::Applied(index.update_if_present(key, value).await?)
        }
        Action::CompareAndSwap { key, expected, new } => {
            Outcome::Applied(index.compare_and_swap(key, expected.as_deref(), new.as_deref()).await?)
        }
        Action::Delete { key } => Outcome::Applied(index.delete(key).await?),
        Action::Scan { start, end, limit, reverse } => {
            let (start, end) = (start.as_ref().map(Vec::as_slice), end.as_ref().map(Vec::as_slice));
            Outcome::Pairs(index.scan(start, end, *limit, *reverse).await?)
        }
    })
}
