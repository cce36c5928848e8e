//! Two tiny reference structures that exercise the whole path, from batches to recovery, and that know how to be wrong.
//!
//! - [`cells`]: fixed cells, updated in place under remote locks. What it needs: whole reads, ordered batches, fencing.
//! - [`records`]: a word per key that points to an immutable record, swung by CAS. What it needs: the heap, epochs, hints.
//!
//! They are measuring sticks for the harness, not engines: the keys are the numbers below a limit. Each mistake in [`Bugs`]
//! is one that published codes have made, and that the checkers must catch.

pub mod cells;
pub mod records;

use crate::history::{Key, Value};
use farwood_fabric::control::IndexInfo;
use farwood_fabric::{Endpoint, GlobalAddr, Op, ServerId};
use farwood_index::shared::surely;
use farwood_index::{IndexError, KeyValue, OrderedIndex, Pool};
use std::ops::Bound;

/// Mistakes that the harness must catch.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a mistake of its own")]
pub struct Bugs {
    /// A reader takes whatever one READ brings.
    pub trust_single_read: bool,
    /// A lock is taken from an owner that seems dead, without fencing it.
    pub steal_without_fence: bool,
    /// A retired object is used again at once.
    pub reuse_without_epoch: bool,
    /// A reader takes what a cached address leads to for current.
    pub trust_hint: bool,
    /// An intent names the acquisition it was written under, but not of which lock.
    pub intent_without_lock: bool,
}

/// Where an array that is spread over all servers has its entries.
#[derive(Clone, Copy, Debug)]
struct Geometry {
    servers: u64,
    entry_bytes: u64,
}

impl Geometry {
    fn bytes_per_server(self, entries: u64) -> u64 {
        entries.div_ceil(self.servers) * self.entry_bytes
    }

    fn addr(self, arrays: &[GlobalAddr], entry: u64) -> GlobalAddr {
        let server = usize::try_from(entry % self.servers).unwrap_or(0);
        arrays[server].add(entry / self.servers * self.entry_bytes)
    }
}

/// An open structure: its catalog entry and its arrays.
#[derive(Clone, Debug)]
struct Opened {
    info: IndexInfo,
    geometry: Geometry,
    arrays: Vec<GlobalAddr>,
}

impl Opened {
    async fn open(
        op: &Op,
        pool: &Pool,
        index: &str,
        engine: &str,
        entry_bytes: u64,
    ) -> Result<Self, IndexError> {
        let info = pool.open_index(op, index, Some(engine)).await?;
        let mut arrays = Vec::new();
        for server in pool.session().servers() {
            let word = surely::read_word(op, anchor_word(&info, *server)).await?;
            arrays.push(GlobalAddr::from_raw(word));
        }
        let geometry = Geometry { servers: arrays.len() as u64, entry_bytes };
        Ok(Self { info, geometry, arrays })
    }

    fn addr(&self, entry: u64) -> GlobalAddr {
        self.geometry.addr(&self.arrays, entry)
    }
}

/// A reference structure as one compute server has it.
#[derive(Clone, Debug)]
pub struct Attached {
    pool: Pool,
    opened: Opened,
}

impl Attached {
    async fn new(
        op: &Op,
        pool: &Pool,
        index: &str,
        engine: &str,
        entry_bytes: u64,
    ) -> Result<Self, IndexError> {
        let opened = Opened::open(op, pool, index, engine, entry_bytes).await?;
        Ok(Self { pool: pool.clone(), opened })
    }
}

fn anchor_word(info: &IndexInfo, server: ServerId) -> GlobalAddr {
    info.anchor.add(u64::from(server.get()) * 8)
}

async fn publish_arrays(op: &Op, info: &IndexInfo, arrays: &[GlobalAddr]) -> Result<(), IndexError> {
    for array in arrays {
        farwood_index::shared::surely::write_word(op, anchor_word(info, array.server()), array.to_raw())
            .await?;
    }
    Ok(())
}

fn corrupt(what: String) -> IndexError {
    IndexError::Corrupt { what }
}

/// What decides about a key's new value, given the present one: `None` leaves it alone, `Some(None)` removes it.
pub type Decide<'a> = &'a dyn Fn(Option<&[u8]>) -> Option<Option<Value>>;

/// What a reference structure supplies; [`Handle`] makes an index of it.
pub trait Access {
    /// The endpoint it works on.
    fn endpoint(&self) -> &Endpoint;
    /// How many keys there are.
    fn keys(&self) -> u64;
    /// The longest value.
    fn max_value_bytes(&self) -> usize;
    /// Reads one key.
    fn fetch(&self, op: &Op, key: u64) -> impl Future<Output = Result<Option<Value>, IndexError>>;
    /// Reads several keys, each at some instant of the call.
    fn fetch_many(
        &self,
        op: &Op,
        keys: &[u64],
    ) -> impl Future<Output = Result<Vec<Option<Value>>, IndexError>>;
    /// Changes a key atomically; whether `decide` wanted a change.
    fn modify(&self, op: &Op, key: u64, decide: Decide<'_>)
    -> impl Future<Output = Result<bool, IndexError>>;
}

/// An open reference structure as an index.
#[derive(Debug)]
pub struct Handle<A>(pub A);

/// How many keys a scan reads at a time.
const SCAN_STEP: u64 = 4;

impl<A: Access> Handle<A> {
    fn number(&self, key: &[u8]) -> Result<u64, IndexError> {
        let bytes = key.try_into().map_err(|_| IndexError::BadKey { why: "a key has eight bytes".into() })?;
        let number = u64::from_be_bytes(bytes);
        if number < self.0.keys() {
            return Ok(number);
        }
        Err(IndexError::BadKey { why: format!("keys are below {}", self.0.keys()) })
    }

    fn check_value(&self, value: &[u8]) -> Result<(), IndexError> {
        let max = self.0.max_value_bytes();
        if value.len() <= max {
            return Ok(());
        }
        Err(IndexError::BadValue { why: format!("a value has at most {max} bytes") })
    }

    async fn modify(&self, key: &[u8], decide: Decide<'_>) -> Result<bool, IndexError> {
        let number = self.number(key)?;
        let op = self.0.endpoint().op();
        self.0.modify(&op, number, decide).await
    }
}

/// The keys of a range as numbers: first, and one behind the last.
fn range(start: Bound<&[u8]>, end: Bound<&[u8]>, keys: u64) -> (u64, u64) {
    // Bounds may have any length: the first number whose key is not below (or not at) the bound.
    let first_at = |bound: &[u8], after: bool| {
        let mut padded = [0; 8];
        let len = bound.len().min(8);
        padded[..len].copy_from_slice(&bound[..len]);
        let number = u64::from_be_bytes(padded);
        let beyond = bound.len() > 8 || (bound.len() == 8 && after);
        number.saturating_add(u64::from(beyond))
    };
    let from = match start {
        Bound::Unbounded => 0,
        Bound::Included(key) => first_at(key, false),
        Bound::Excluded(key) => first_at(key, true),
    };
    let to = match end {
        Bound::Unbounded => keys,
        Bound::Included(key) => first_at(key, true),
        Bound::Excluded(key) => first_at(key, false),
    };
    (from, to.min(keys))
}

impl<A: Access> OrderedIndex for Handle<A> {
    async fn get(&self, key: &[u8]) -> Result<Option<Value>, IndexError> {
        let number = self.number(key)?;
        let op = self.0.endpoint().op();
        self.0.fetch(&op, number).await
    }

    async fn put(&self, key: &[u8], value: &[u8]) -> Result<(), IndexError> {
        self.check_value(value)?;
        self.modify(key, &|_| Some(Some(value.to_vec()))).await.map(drop)
    }

    async fn compare_and_swap(
        &self,
        key: &[u8],
        expected: Option<&[u8]>,
        new: Option<&[u8]>,
    ) -> Result<bool, IndexError> {
        self.check_value(new.unwrap_or_default())?;
        self.modify(key, &|held| (held == expected).then(|| new.map(<[u8]>::to_vec))).await
    }

    async fn put_if_absent(&self, key: &[u8], value: &[u8]) -> Result<bool, IndexError> {
        self.check_value(value)?;
        self.modify(key, &|held| held.is_none().then(|| Some(value.to_vec()))).await
    }

    async fn update_if_present(&self, key: &[u8], value: &[u8]) -> Result<bool, IndexError> {
        self.check_value(value)?;
        self.modify(key, &|held| held.is_some().then(|| Some(value.to_vec()))).await
    }

    async fn delete(&self, key: &[u8]) -> Result<bool, IndexError> {
        self.modify(key, &|held| held.is_some().then_some(None)).await
    }

    async fn scan(
        &self,
        start: Bound<&[u8]>,
        end: Bound<&[u8]>,
        limit: usize,
        reverse: bool,
    ) -> Result<Vec<KeyValue>, IndexError> {
        let (mut from, mut to) = range(start, end, self.0.keys());
        let op = self.0.endpoint().op();
        let mut pairs: Vec<(Key, Value)> = Vec::new();
        while from < to && pairs.len() < limit {
            let step = SCAN_STEP.min(to - from);
            let numbers: Vec<u64> = if reverse {
                to -= step;
                (to..to + step).rev().collect()
            } else {
                from += step;
                (from - step..from).collect()
            };
            let values = self.0.fetch_many(&op, &numbers).await?;
            for (number, value) in numbers.into_iter().zip(values) {
                pairs.extend(value.map(|value| (number.to_be_bytes().to_vec(), value)));
            }
        }
        pairs.truncate(limit);
        Ok(pairs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_range_holds_exactly_the_keys_between_its_bounds(start in bound(), end in bound()) {
            let (from, to) = range(as_slices(&start), as_slices(&end), 6);
            for number in 0..6u64 {
                let key = number.to_be_bytes().to_vec();
                let after_start = match &start { Bound::Unbounded => true, Bound::Included(s) => key >= *s, Bound::Excluded(s) => key > *s };
                let before_end = match &end { Bound::Unbounded => true, Bound::Included(e) => key <= *e, Bound::Excluded(e) => key < *e };
                prop_assert_eq!((from..to).contains(&number), after_start && before_end, "{}", number);
            }
        }
    }

    fn as_slices(bound: &Bound<Vec<u8>>) -> Bound<&[u8]> {
        bound.as_ref().map(Vec::as_slice)
    }

    fn bound() -> impl Strategy<Value = Bound<Vec<u8>>> {
        let key = prop_oneof![
            (0u64..8).prop_map(|n| n.to_be_bytes().to_vec()),
            proptest::collection::vec(0u8..3, 0..11),
        ];
        (key, 0..3).prop_map(|(key, kind)| match kind {
            0 => Bound::Included(key),
            1 => Bound::Excluded(key),
            _ => Bound::Unbounded,
        })
    }
}
