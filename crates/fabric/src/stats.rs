//! Counters of one operation and of one endpoint: what holds on any hardware, whatever the clock says.

use std::ops::{AddAssign, Sub};

/// What an operation cost.
///
/// Counting rules: batches submitted together are one round trip, plus one for each fence of the longest; a posted
/// batch counts its round trips when its ticket is awaited, a detached one counts verbs and bytes only; a call is one round
/// trip however often it had to be repeated, each repeat counts as a retry.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct OpStats {
    /// Times the operation waited for the network.
    pub round_trips: u64,
    /// READs.
    pub reads: u64,
    /// WRITEs.
    pub writes: u64,
    /// CASes, masked CASes, FAAs.
    pub atomics: u64,
    /// Calls.
    pub calls: u64,
    /// Bytes that READs, atomics and replies brought.
    pub bytes_read: u64,
    /// Bytes that WRITEs, atomics and requests took.
    pub bytes_written: u64,
    /// Times the operation had to begin something anew.
    pub retries: u64,
    /// Times the operation went where a cache of the compute server led it.
    pub hints: u64,
    /// Those of them that led nowhere.
    pub wrong_hints: u64,
}

impl AddAssign for OpStats {
    fn add_assign(&mut self, other: Self) {
        self.round_trips += other.round_trips;
        self.reads += other.reads;
        self.writes += other.writes;
        self.atomics += other.atomics;
        self.calls += other.calls;
        self.bytes_read += other.bytes_read;
        self.bytes_written += other.bytes_written;
        self.retries += other.retries;
        self.hints += other.hints;
        self.wrong_hints += other.wrong_hints;
    }
}

/// What was added since an earlier look.
impl Sub for OpStats {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        Self {
            round_trips: self.round_trips - earlier.round_trips,
            reads: self.reads - earlier.reads,
            writes: self.writes - earlier.writes,
            atomics: self.atomics - earlier.atomics,
            calls: self.calls - earlier.calls,
            bytes_read: self.bytes_read - earlier.bytes_read,
            bytes_written: self.bytes_written - earlier.bytes_written,
            retries: self.retries - earlier.retries,
            hints: self.hints - earlier.hints,
            wrong_hints: self.wrong_hints - earlier.wrong_hints,
        }
    }
}
