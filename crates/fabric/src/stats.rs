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

impl OpStats {
    /// All counters, in the order of the fields: for who adds them up, or sends them on.
    pub fn to_array(self) -> [u64; 10] {
        let Self {
            round_trips,
            reads,
            writes,
            atomics,
            calls,
            bytes_read,
            bytes_written,
            retries,
            hints,
            wrong_hints,
        } = self;
        [round_trips, reads, writes, atomics, calls, bytes_read, bytes_written, retries, hints, wrong_hints]
    }

    /// The counters of [`OpStats::to_array`].
    pub fn from_array(counters: [u64; 10]) -> Self {
        let [
            round_trips,
            reads,
            writes,
            atomics,
            calls,
            bytes_read,
            bytes_written,
            retries,
            hints,
            wrong_hints,
        ] = counters;
        Self {
            round_trips,
            reads,
            writes,
            atomics,
            calls,
            bytes_read,
            bytes_written,
            retries,
            hints,
            wrong_hints,
        }
    }

    fn with(self, other: Self, each: impl Fn(u64, u64) -> u64) -> Self {
        let (ours, theirs) = (self.to_array(), other.to_array());
        Self::from_array(std::array::from_fn(|n| each(ours[n], theirs[n])))
    }
}

impl AddAssign for OpStats {
    #[inline]
    fn add_assign(&mut self, other: Self) {
        *self = self.with(other, |ours, theirs| ours + theirs);
    }
}

/// What was added since an earlier look.
impl Sub for OpStats {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        self.with(earlier, |now, before| now - before)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_keep_their_places() {
        let counters = std::array::from_fn(|n| n as u64 + 1);
        let mut stats = OpStats::from_array(counters);
        assert_eq!((stats.round_trips, stats.retries, stats.wrong_hints), (1, 8, 10));
        assert_eq!(stats.to_array(), counters);
        stats += OpStats { reads: 5, ..OpStats::default() };
        assert_eq!(stats - OpStats::from_array(counters), OpStats { reads: 5, ..OpStats::default() });
    }
}
