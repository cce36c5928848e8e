//! What was measured, per kind of operation: how often, how long, at what cost. Tallies of tasks, threads and processes add up.

use farwood_fabric::OpStats;
use farwood_fabric::clock::Nanos;
use farwood_workload::Distribution;

/// The kinds that results are told apart by. A read-modify-write is a get and a put; an insert is a put.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Kind {
    Get,
    Put,
    Delete,
    Scan,
    Cas,
}

impl Kind {
    pub(crate) const ALL: [Kind; 5] = [Self::Get, Self::Put, Self::Delete, Self::Scan, Self::Cas];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Get => "get",
            Self::Put => "put",
            Self::Delete => "delete",
            Self::Scan => "scan",
            Self::Cas => "cas",
        }
    }
}

/// What the operations of one kind did.
#[derive(Clone, Debug)]
pub(crate) struct KindTally {
    pub(crate) latency_ns: Distribution,
    pub(crate) round_trips: Distribution,
    pub(crate) cost: OpStats,
}

impl KindTally {
    fn new() -> Self {
        Self { latency_ns: Distribution::new(), round_trips: Distribution::new(), cost: OpStats::default() }
    }
}

/// What a task, or several, did.
#[derive(Clone, Debug)]
pub(crate) struct Tally {
    kinds: [KindTally; 5],
    /// Operations of the workload that ended well.
    pub(crate) ops: u64,
    /// Operations that ended in an error, or whose outcome is unknown.
    pub(crate) errors: u64,
    /// What the first of them said.
    pub(crate) first_error: Option<String>,
    /// When the first operation began and the last one ended.
    pub(crate) began: Nanos,
    pub(crate) ended: Nanos,
}

impl Tally {
    pub(crate) fn new() -> Self {
        Self {
            kinds: Kind::ALL.map(|_| KindTally::new()),
            ops: 0,
            errors: 0,
            first_error: None,
            began: Nanos::MAX,
            ended: 0,
        }
    }

    #[inline]
    pub(crate) fn record(&mut self, kind: Kind, latency_ns: Nanos, cost: OpStats) {
        let tally = &mut self.kinds[kind as usize];
        tally.latency_ns.record(latency_ns);
        tally.round_trips.record(cost.round_trips);
        tally.cost += cost;
    }

    pub(crate) fn fail(&mut self, why: impl FnOnce() -> String) {
        self.errors += 1;
        self.first_error.get_or_insert_with(why);
    }

    pub(crate) fn kind(&self, kind: Kind) -> &KindTally {
        &self.kinds[kind as usize]
    }

    pub(crate) fn merge(&mut self, other: &Self) {
        for (ours, theirs) in self.kinds.iter_mut().zip(&other.kinds) {
            ours.latency_ns.merge(&theirs.latency_ns);
            ours.round_trips.merge(&theirs.round_trips);
            ours.cost += theirs.cost;
        }
        self.ops += other.ops;
        self.errors += other.errors;
        if self.first_error.is_none() {
            self.first_error.clone_from(&other.first_error);
        }
        self.began = self.began.min(other.began);
        self.ended = self.ended.max(other.ended);
    }

    pub(crate) fn elapsed_ns(&self) -> Nanos {
        self.ended.saturating_sub(self.began)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tallies_add_up() {
        let cost = |round_trips| OpStats { round_trips, reads: 2 * round_trips, ..OpStats::default() };
        let mut a = Tally { ops: 1, began: 10, ended: 30, ..Tally::new() };
        a.record(Kind::Get, 20, cost(1));
        let mut b = Tally { ops: 2, began: 5, ended: 25, ..Tally::new() };
        b.record(Kind::Get, 40, cost(3));
        b.record(Kind::Scan, 7, cost(2));
        b.fail(|| "lost".to_owned());
        b.fail(|| "later".to_owned());
        a.merge(&b);
        assert_eq!((a.ops, a.errors, a.elapsed_ns()), (3, 2, 25));
        assert_eq!(a.first_error.as_deref(), Some("lost"));
        let get = a.kind(Kind::Get);
        assert_eq!((get.latency_ns.count(), get.cost.reads, get.round_trips.summary().max), (2, 8, 3));
        assert_eq!((a.kind(Kind::Scan).latency_ns.count(), a.kind(Kind::Put).latency_ns.count()), (1, 0));
    }
}
