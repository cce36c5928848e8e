//! How much was checked, and how much of it could have failed: a run whose every read may see anything proves nothing.

use std::fmt;

/// The operations of an index.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// `get`
    Get,
    /// `put`
    Put,
    /// `delete`
    Delete,
    /// `put_if_absent`
    Insert,
    /// `update_if_present`
    Update,
    /// `compare_and_swap`
    Swap,
    /// `scan`
    Scan,
}

impl Kind {
    /// All of them.
    pub(crate) const ALL: [Self; 7] =
        [Self::Get, Self::Put, Self::Delete, Self::Insert, Self::Update, Self::Swap, Self::Scan];
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Get => "get",
            Self::Put => "put",
            Self::Delete => "delete",
            Self::Insert => "insert",
            Self::Update => "update",
            Self::Swap => "swap",
            Self::Scan => "scan",
        })
    }
}

/// Answers that were judged and found good.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Checked {
    /// How many.
    pub(crate) answers: u64,
    /// Those during which the key can have held one thing only. Of scans: those that were so for each of their keys. (A
    /// put says nothing that could be wrong.)
    pub(crate) constrained: u64,
}

impl Checked {
    fn add(&mut self, constrained: bool) {
        self.answers += 1;
        self.constrained += u64::from(constrained);
    }
}

/// What a [`super::Model`] has checked so far.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(crate) struct Counters {
    by_kind: [Checked; Kind::ALL.len()],
    /// Keys that scans returned, or rightly left out though they have an entry.
    pub(crate) scanned_keys: Checked,
    /// Operations of unknown outcome.
    pub(crate) unknown: u64,
    /// Operations that did not happen, and reads without an answer.
    pub(crate) failed: u64,
    /// The most writes of one key that were kept at the same time.
    pub(crate) longest_history: usize,
}

impl Counters {
    /// Answers of one kind of operation.
    pub(crate) fn of(&self, kind: Kind) -> Checked {
        self.by_kind[kind as usize]
    }

    /// Answers of all kinds, and those of them that were constrained.
    pub(crate) fn sum(&self) -> (u64, u64) {
        let all = Kind::ALL.map(|kind| self.of(kind));
        (all.iter().map(|of| of.answers).sum(), all.iter().map(|of| of.constrained).sum())
    }

    pub(super) fn add(&mut self, kind: Kind, constrained: bool) {
        self.by_kind[kind as usize].add(constrained);
    }

    pub(super) fn add_scanned_key(&mut self, constrained: bool) {
        self.scanned_keys.add(constrained);
    }
}
