//! What was measured, per kind of operation: how often, how long, at what cost. Tallies of tasks, threads and processes add up.

use farwood_fabric::OpStats;
use farwood_fabric::clock::Nanos;
use farwood_workload::{Distribution, Exported};
use serde::{Deserialize, Serialize};

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
    pub(crate) retries: Distribution,
    pub(crate) bytes_written: Distribution,
    pub(crate) cost: OpStats,
}

impl KindTally {
    pub(crate) fn new() -> Self {
        Self {
            latency_ns: Distribution::new(),
            round_trips: Distribution::new(),
            retries: Distribution::new(),
            bytes_written: Distribution::new(),
            cost: OpStats::default(),
        }
    }

    #[inline]
    fn record(&mut self, latency_ns: Nanos, cost: OpStats) {
        self.latency_ns.record(latency_ns);
        self.round_trips.record(cost.round_trips);
        self.retries.record(cost.retries);
        self.bytes_written.record(cost.bytes_written);
        self.cost += cost;
    }

    fn merge(&mut self, other: &Self) {
        self.latency_ns.merge(&other.latency_ns);
        self.round_trips.merge(&other.round_trips);
        self.retries.merge(&other.retries);
        self.bytes_written.merge(&other.bytes_written);
        self.cost += other.cost;
    }
}

/// A tally as it travels between processes.
#[derive(Serialize, Deserialize, Debug)]
pub(crate) struct TallyText {
    kinds: Vec<KindText>,
    ops: u64,
    errors: u64,
    first_error: Option<String>,
    elapsed_ns: Nanos,
}

#[derive(Serialize, Deserialize, Debug)]
struct KindText {
    kind: usize,
    latency_ns: DistributionText,
    round_trips: DistributionText,
    retries: DistributionText,
    bytes_written: DistributionText,
    cost: [u64; 10],
}

#[derive(Clone, Serialize, Deserialize, Debug)]
struct DistributionText {
    buckets: Vec<(u64, u64)>,
    /// More than a JSON number holds.
    sum: String,
    min: u64,
    max: u64,
}

/// What a task, or several, did.
#[derive(Clone, Debug)]
pub(crate) struct Tally {
    /// Those that occurred; distributions are large.
    kinds: [Option<Box<KindTally>>; 5],
    /// Operations of the workload that ended well, and in time.
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
            kinds: Kind::ALL.map(|_| None),
            ops: 0,
            errors: 0,
            first_error: None,
            began: Nanos::MAX,
            ended: 0,
        }
    }

    #[inline]
    pub(crate) fn record(&mut self, kind: Kind, latency_ns: Nanos, cost: OpStats) {
        self.kind_mut(kind as usize).record(latency_ns, cost);
    }

    fn kind_mut(&mut self, kind: usize) -> &mut KindTally {
        self.kinds[kind].get_or_insert_with(|| Box::new(KindTally::new()))
    }

    pub(crate) fn fail(&mut self, why: impl FnOnce() -> String) {
        self.errors += 1;
        self.first_error.get_or_insert_with(why);
    }

    /// The operations of a kind, if there were any.
    pub(crate) fn kind(&self, kind: Kind) -> Option<&KindTally> {
        self.kinds[kind as usize].as_deref()
    }

    /// The operations of all kinds together.
    pub(crate) fn all(&self) -> KindTally {
        let mut all = KindTally::new();
        self.kinds.iter().flatten().for_each(|kind| all.merge(kind));
        all
    }

    pub(crate) fn merge(&mut self, other: &Self) {
        for (n, theirs) in other.kinds.iter().enumerate() {
            if let Some(theirs) = theirs {
                self.kind_mut(n).merge(theirs);
            }
        }
        self.ops += other.ops;
        self.errors += other.errors;
        if self.first_error.is_none() {
            self.first_error.clone_from(&other.first_error);
        }
        self.began = self.began.min(other.began);
        self.ended = self.ended.max(other.ended);
    }

    /// As it travels between processes.
    pub(crate) fn export(&self) -> TallyText {
        let distribution = |from: &Distribution| {
            let Exported { buckets, sum, min, max } = from.export();
            DistributionText { buckets, sum: sum.to_string(), min, max }
        };
        let kind = |(kind, tally): (usize, &KindTally)| KindText {
            kind,
            latency_ns: distribution(&tally.latency_ns),
            round_trips: distribution(&tally.round_trips),
            retries: distribution(&tally.retries),
            bytes_written: distribution(&tally.bytes_written),
            cost: tally.cost.to_array(),
        };
        TallyText {
            kinds: self
                .kinds
                .iter()
                .enumerate()
                .filter_map(|(n, tally)| Some((n, tally.as_deref()?)))
                .map(kind)
                .collect(),
            ops: self.ops,
            errors: self.errors,
            first_error: self.first_error.clone(),
            elapsed_ns: self.elapsed_ns(),
        }
    }

    /// Adds what another process exported; a merged run lasts as long as its longest part.
    pub(crate) fn import(&mut self, text: &TallyText) {
        let add = |to: &mut Distribution, from: &DistributionText| {
            let DistributionText { buckets, sum, min, max } = from.clone();
            to.import(&Exported { buckets, sum: sum.parse().unwrap_or(0), min, max });
        };
        for theirs in text.kinds.iter().filter(|theirs| theirs.kind < Kind::ALL.len()) {
            let ours = self.kind_mut(theirs.kind);
            add(&mut ours.latency_ns, &theirs.latency_ns);
            add(&mut ours.round_trips, &theirs.round_trips);
            add(&mut ours.retries, &theirs.retries);
            add(&mut ours.bytes_written, &theirs.bytes_written);
            ours.cost += OpStats::from_array(theirs.cost);
        }
        self.ops += text.ops;
        self.errors += text.errors;
        if self.first_error.is_none() {
            self.first_error.clone_from(&text.first_error);
        }
        self.ended = self.began.saturating_add(self.elapsed_ns().max(text.elapsed_ns));
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
        let get = a.kind(Kind::Get).unwrap();
        assert_eq!((get.latency_ns.count(), get.cost.reads, get.round_trips.summary().max), (2, 8, 3));
        assert_eq!(a.kind(Kind::Scan).unwrap().latency_ns.count(), 1);
        assert!(a.kind(Kind::Put).is_none());
        let all = a.all();
        assert_eq!((all.latency_ns.count(), all.latency_ns.summary().max, all.cost.round_trips), (3, 40, 6));
    }

    #[test]
    fn what_travels_is_what_adds_up() {
        let mut a = Tally { ops: 1, began: 10, ended: 30, ..Tally::new() };
        a.record(Kind::Put, 77, OpStats { round_trips: 2, retries: 1, ..OpStats::default() });
        let mut b = Tally { ops: 5, began: 1000, ended: 1090, ..Tally::new() };
        b.record(Kind::Put, 5_000_000, OpStats { round_trips: 9, bytes_read: 64, ..OpStats::default() });
        b.fail(|| "lost".to_owned());
        let text = serde_json::to_string(&b.export()).unwrap();
        a.import(&serde_json::from_str(&text).unwrap());
        assert_eq!((a.ops, a.errors, a.elapsed_ns(), a.first_error.as_deref()), (6, 1, 90, Some("lost")));
        let put = a.kind(Kind::Put).unwrap();
        assert_eq!((put.retries.summary().max, put.bytes_written.count()), (1, 2));
        assert_eq!((put.latency_ns.summary().max, put.latency_ns.count()), (5_000_000, 2));
        assert_eq!((put.cost.round_trips, put.cost.retries, put.cost.bytes_read), (11, 1, 64));
    }
}
