//! What the clients of one run did and saw, in one order of time.
//!
//! A [`History`] is the only thing the checkers look at: they know nothing of engines, verbs or memory. Every
//! invocation and every response takes a stamp from one counter, so all stamps differ and "before" has one meaning.
//!
//! An operation ends in one of three ways:
//!
//! 1. [`History::respond`]: the client got an answer, and the operation took effect between its two stamps.
//! 2. [`History::unknown`], or nothing at all: the client died or a verb failed. The operation takes effect once, at
//!    any time after its invocation, perhaps long after, or never.
//! 3. [`History::cancel`]: the operation certainly did not and will not take effect. It leaves no trace.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Bound;

/// A key of the index.
pub type Key = Vec<u8>;

/// A value of the index.
pub type Value = Vec<u8>;

/// What a client asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Read one key.
    Get {
        /// The key to read.
        key: Key,
    },
    /// Write one key, whatever it held.
    Put {
        /// The key to write.
        key: Key,
        /// The value to write.
        value: Value,
    },
    /// Write one key if it is absent.
    PutIfAbsent {
        /// The key to write.
        key: Key,
        /// The value to write.
        value: Value,
    },
    /// Write one key if it is present.
    UpdateIfPresent {
        /// The key to write.
        key: Key,
        /// The value to write.
        value: Value,
    },
    /// Replace what a key holds if it holds what is expected.
    CompareAndSwap {
        /// The key to change.
        key: Key,
        /// What the key must hold; `None` is "absent".
        expected: Option<Value>,
        /// What the key then holds; `None` deletes it.
        new: Option<Value>,
    },
    /// Remove one key.
    Delete {
        /// The key to remove.
        key: Key,
    },
    /// Read a range of keys in order.
    Scan {
        /// The lower end of the range, in both directions.
        start: Bound<Key>,
        /// The upper end of the range, in both directions.
        end: Bound<Key>,
        /// The most pairs the scan may return.
        limit: usize,
        /// Whether the scan goes from the upper end down.
        reverse: bool,
    },
}

impl Action {
    /// The one key a point operation is about; `None` for a scan.
    #[must_use]
    pub fn key(&self) -> Option<&Key> {
        match self {
            Self::Get { key }
            | Self::Put { key, .. }
            | Self::PutIfAbsent { key, .. }
            | Self::UpdateIfPresent { key, .. }
            | Self::CompareAndSwap { key, .. }
            | Self::Delete { key } => Some(key),
            Self::Scan { .. } => None,
        }
    }

    /// Whether it changes nothing.
    #[must_use]
    pub fn is_read(&self) -> bool {
        matches!(self, Self::Get { .. } | Self::Scan { .. })
    }
}

/// What a client was told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// What a get found.
    Value(Option<Value>),
    /// A put was done.
    Done,
    /// Whether a conditional write or a delete changed anything (a delete: whether the key existed).
    Applied(bool),
    /// What a scan found, in the order it was returned.
    Pairs(Vec<(Key, Value)>),
}

impl Outcome {
    /// Whether this is the kind of answer that `action` has.
    #[must_use]
    pub fn fits(&self, action: &Action) -> bool {
        match self {
            Self::Value(_) => matches!(action, Action::Get { .. }),
            Self::Done => matches!(action, Action::Put { .. }),
            Self::Applied(_) => matches!(
                action,
                Action::PutIfAbsent { .. }
                    | Action::UpdateIfPresent { .. }
                    | Action::CompareAndSwap { .. }
                    | Action::Delete { .. }
            ),
            Self::Pairs(_) => matches!(action, Action::Scan { .. }),
        }
    }
}

/// One operation of one client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Operation {
    /// Who asked.
    pub client: u32,
    /// The stamp of the invocation.
    pub invoked: u64,
    /// The stamp of the response; `None` while there is none, and forever if the outcome is unknown.
    pub responded: Option<u64>,
    /// What was asked.
    pub action: Action,
    /// What was answered; present exactly if `responded` is.
    pub outcome: Option<Outcome>,
}

/// Names an operation from its invocation to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct OpId(u64);

/// The record of one run: the contents at the start, and every operation since.
///
/// # Invariants
/// - All stamps are distinct and grow in the order of the calls.
/// - `responded` and `outcome` of an operation are both present or both absent, and the outcome fits the action.
#[derive(Debug, Clone, Default)]
pub struct History {
    initial: BTreeMap<Key, Value>,
    operations: Vec<Operation>,
    /// Where the operations that have not ended stand in `operations`, by their stamp of invocation.
    open: BTreeMap<u64, usize>,
    stamps: u64,
}

impl History {
    /// A history that starts with an empty index.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A history that starts with these pairs; a later pair replaces an earlier one of the same key.
    #[must_use]
    pub fn with_initial(pairs: impl IntoIterator<Item = (Key, Value)>) -> Self {
        Self { initial: pairs.into_iter().collect(), ..Self::default() }
    }

    /// A history of operations that were written down elsewhere, on an index that was empty, with stamps from one counter.
    #[must_use]
    pub fn of(mut operations: Vec<Operation>) -> Self {
        operations.sort_unstable_by_key(|operation| operation.invoked);
        let stamps = operations.iter().map(|op| op.responded.unwrap_or(op.invoked)).max().unwrap_or(0);
        Self { operations, stamps, ..Self::default() }
    }

    /// Records that `client` starts `action` now.
    pub fn invoke(&mut self, client: u32, action: Action) -> OpId {
        let invoked = self.stamp();
        self.open.insert(invoked, self.operations.len());
        self.operations.push(Operation { client, invoked, responded: None, action, outcome: None });
        OpId(invoked)
    }

    /// Records that the operation ends now, with this answer.
    ///
    /// # Panics
    /// If the operation has ended before, or if the answer is of a kind that its action cannot have.
    pub fn respond(&mut self, id: OpId, outcome: Outcome) {
        let index = self.close(id);
        let responded = self.stamp();
        let operation = &mut self.operations[index];
        assert!(outcome.fits(&operation.action), "outcome {outcome:?} cannot belong to {operation}");
        operation.responded = Some(responded);
        operation.outcome = Some(outcome);
    }

    /// Records that nobody will ever learn what became of the operation.
    ///
    /// An operation that is simply left open means the same; saying so catches a response that comes anyway.
    ///
    /// # Panics
    /// If the operation has ended before.
    pub fn unknown(&mut self, id: OpId) {
        self.close(id);
    }

    /// Removes an operation that certainly has no effect, now or later.
    ///
    /// # Panics
    /// If the operation has ended before.
    pub fn cancel(&mut self, id: OpId) {
        let index = self.close(id);
        self.operations.swap_remove(index);
        if let Some(moved) = self.operations.get(index)
            && let Some(place) = self.open.get_mut(&moved.invoked)
        {
            *place = index;
        }
    }

    /// All operations: in the order of invocation, unless one was cancelled, then in no order.
    #[must_use]
    pub fn operations(&self) -> &[Operation] {
        &self.operations
    }

    /// What the index held before the first operation.
    #[must_use]
    pub fn initial(&self) -> &BTreeMap<Key, Value> {
        &self.initial
    }

    fn stamp(&mut self) -> u64 {
        self.stamps += 1;
        self.stamps
    }

    fn close(&mut self, id: OpId) -> usize {
        let Some(index) = self.open.remove(&id.0) else {
            panic!("{id:?} has already ended");
        };
        index
    }
}

/// Bytes for people: text if they are plain text, hexadecimal if not, shortened if long.
#[derive(Debug, Clone, Copy)]
pub struct Bytes<'a>(pub &'a [u8]);

impl fmt::Display for Bytes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN_BYTES: usize = 24;
        let shown = &self.0[..self.0.len().min(SHOWN_BYTES)];
        match std::str::from_utf8(shown) {
            Ok(text) if shown.iter().all(u8::is_ascii_graphic) => write!(f, "\"{text}\"")?,
            _ => {
                f.write_str("0x")?;
                for byte in shown {
                    write!(f, "{byte:02x}")?;
                }
            }
        }
        if shown.len() < self.0.len() {
            write!(f, "...({} bytes)", self.0.len())?;
        }
        Ok(())
    }
}

/// What a key holds, for people.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Held<'a>(pub(crate) Option<&'a [u8]>);

impl fmt::Display for Held<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(value) => Bytes(value).fmt(f),
            None => f.write_str("absent"),
        }
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Get { key } => write!(f, "get {}", Bytes(key)),
            Self::Put { key, value } => write!(f, "put {} = {}", Bytes(key), Bytes(value)),
            Self::PutIfAbsent { key, value } => {
                write!(f, "put-if-absent {} = {}", Bytes(key), Bytes(value))
            }
            Self::UpdateIfPresent { key, value } => {
                write!(f, "update-if-present {} = {}", Bytes(key), Bytes(value))
            }
            Self::CompareAndSwap { key, expected, new } => write!(
                f,
                "compare-and-swap {}: {} to {}",
                Bytes(key),
                Held(expected.as_deref()),
                Held(new.as_deref())
            ),
            Self::Delete { key } => write!(f, "delete {}", Bytes(key)),
            Self::Scan { start, end, limit, reverse } => {
                f.write_str(if *reverse { "reverse scan " } else { "scan " })?;
                match start {
                    Bound::Included(key) => write!(f, "[{}", Bytes(key))?,
                    Bound::Excluded(key) => write!(f, "({}", Bytes(key))?,
                    Bound::Unbounded => f.write_str("(")?,
                }
                f.write_str("..")?;
                match end {
                    Bound::Included(key) => write!(f, "{}]", Bytes(key))?,
                    Bound::Excluded(key) => write!(f, "{})", Bytes(key))?,
                    Bound::Unbounded => f.write_str(")")?,
                }
                write!(f, " limit {limit}")
            }
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN_PAIRS: usize = 8;
        match self {
            Self::Value(value) => Held(value.as_deref()).fmt(f),
            Self::Done => f.write_str("done"),
            Self::Applied(true) => f.write_str("applied"),
            Self::Applied(false) => f.write_str("not applied"),
            Self::Pairs(pairs) => {
                write!(f, "{} pairs", pairs.len())?;
                for (key, value) in pairs.iter().take(SHOWN_PAIRS) {
                    write!(f, " {}={}", Bytes(key), Bytes(value))?;
                }
                f.write_str(if pairs.len() > SHOWN_PAIRS { " ..." } else { "" })
            }
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.responded {
            Some(responded) => write!(f, "[{}..{responded}]", self.invoked)?,
            None => write!(f, "[{}..?]", self.invoked)?,
        }
        write!(f, " client {}: {}", self.client, self.action)?;
        match &self.outcome {
            Some(outcome) => write!(f, " -> {outcome}"),
            None => f.write_str(" -> unknown"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn get(key: &str) -> Action {
        Action::Get { key: key.into() }
    }

    #[test]
    fn stamps_are_distinct_and_grow() {
        let mut history = History::new();
        let first = history.invoke(1, get("a"));
        let second = history.invoke(2, get("b"));
        history.respond(second, Outcome::Value(None));
        history.respond(first, Outcome::Value(None));
        let stamps: Vec<_> =
            history.operations().iter().map(|operation| (operation.invoked, operation.responded)).collect();
        assert_eq!(stamps, [(1, Some(4)), (2, Some(3))]);
    }

    #[test]
    fn cancelled_operations_leave_no_trace_and_open_ones_stay_reachable() {
        let mut history = History::new();
        let first = history.invoke(1, get("a"));
        let second = history.invoke(2, get("b"));
        let third = history.invoke(3, get("c"));
        history.cancel(first);
        history.respond(third, Outcome::Value(Some(b"x".to_vec())));
        history.unknown(second);
        let mut lines: Vec<_> = history.operations().iter().map(ToString::to_string).collect();
        lines.sort();
        assert_eq!(lines, ["[2..?] client 2: get \"b\" -> unknown", "[3..4] client 3: get \"c\" -> \"x\""]);
    }

    #[test]
    #[should_panic(expected = "cannot belong")]
    fn an_outcome_of_the_wrong_kind_is_refused() {
        let mut history = History::new();
        let id = history.invoke(1, get("a"));
        history.respond(id, Outcome::Done);
    }

    #[test]
    #[should_panic(expected = "already ended")]
    fn a_response_after_the_end_is_refused() {
        let mut history = History::new();
        let id = history.invoke(1, get("a"));
        history.unknown(id);
        history.respond(id, Outcome::Value(None));
    }

    #[test]
    fn operations_read_well() {
        let mut history = History::with_initial([(b"a".to_vec(), b"1".to_vec())]);
        let id = history.invoke(
            7,
            Action::Scan {
                start: Bound::Included(b"a".to_vec()),
                end: Bound::Unbounded,
                limit: 3,
                reverse: true,
            },
        );
        history.respond(id, Outcome::Pairs(vec![(vec![0, 255], vec![b'z'; 30])]));
        assert_eq!(
            history.operations()[0].to_string(),
            "[1..2] client 7: reverse scan [\"a\"..) limit 3 -> \
             1 pairs 0x00ff=\"zzzzzzzzzzzzzzzzzzzzzzzz\"...(30 bytes)"
        );
    }
}
