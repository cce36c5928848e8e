//! One task of a run: takes operations off its stream, carries them out on its index, and tallies what they cost.

use super::checked::Checked;
use super::tally::{Kind, Tally};
use crate::interrupt;
use farwood_fabric::clock::{Nanos, RealClock};
use farwood_fabric::{Endpoint, OpStats, Work};
use farwood_index::{Engine, IndexError, OrderedIndex};
use farwood_workload::{KeySet, Operation, Stream, ValueId, Values};
use std::ops::Bound;

/// A task whose index never makes it wait lets the others run after so many operations.
const OPS_PER_TURN: u64 = 128;
/// How full nodes are after a bulk load (Sherman, section 5.1).
const BULK_FILL: f64 = 0.8;

/// The clock of a run: the world's, or one that all threads share.
#[derive(Clone, Copy, Debug)]
pub(super) enum Watch {
    Virtual,
    Real(RealClock),
}

impl Watch {
    #[inline]
    pub(super) fn now(self, endpoint: &Endpoint) -> Nanos {
        match self {
            Self::Virtual => endpoint.now(),
            Self::Real(clock) => clock.now(),
        }
    }
}

/// Times operations and counts what they cost.
#[derive(Debug)]
pub(super) struct Meter {
    /// A handle of its own, so that its costs are told apart from those of other tasks.
    endpoint: Endpoint,
    watch: Watch,
    /// Whether this is the only task of its thread: then one look at the clock ends an operation and begins the next.
    alone: bool,
    /// What each operation costs beside its verbs.
    work: Work,
    now: Nanos,
    before: OpStats,
    tally: Tally,
}

impl Meter {
    pub(super) fn new(endpoint: &Endpoint, watch: Watch, alone: bool, work: Work) -> Self {
        let endpoint = endpoint.clone();
        let (now, before) = (watch.now(&endpoint), endpoint.totals());
        Self { endpoint, watch, alone, work, now, before, tally: Tally::new() }
    }

    /// Forgets what was measured so far: it was for warming up.
    pub(super) fn restart(&mut self) {
        self.tally = Tally::new();
        self.now = self.watch.now(&self.endpoint);
        self.before = self.endpoint.totals();
        self.tally.began = self.now;
        self.tally.ended = self.now;
    }

    #[inline]
    async fn time<T>(
        &mut self,
        kind: Kind,
        operation: impl Future<Output = Result<T, IndexError>>,
    ) -> Result<T, IndexError> {
        if !self.alone {
            self.now = self.watch.now(&self.endpoint);
        }
        let began = self.now;
        self.endpoint.charge(self.work).await;
        let result = operation.await;
        self.now = self.watch.now(&self.endpoint);
        let totals = self.endpoint.totals();
        let cost = totals - self.before;
        self.before = totals;
        if result.is_ok() {
            self.tally.record(kind, self.now - began, cost);
        }
        result
    }
}

/// When a task ends.
#[derive(Clone, Copy, Debug)]
pub(super) struct Until {
    pub(super) ops: u64,
    pub(super) at: Nanos,
}

/// One task.
pub(super) struct Task<I> {
    pub(super) index: Checked<I>,
    pub(super) stream: Stream,
    pub(super) keys: KeySet,
    pub(super) values: Values,
    pub(super) meter: Meter,
    key: Vec<u8>,
    value: Vec<u8>,
    /// Where the last `Iterate` ended.
    cursor: Option<Vec<u8>>,
}

impl<I: OrderedIndex> Task<I> {
    pub(super) fn new(index: Checked<I>, stream: Stream, keys: KeySet, values: Values, meter: Meter) -> Self {
        Self { index, stream, keys, values, meter, key: Vec::new(), value: Vec::new(), cursor: None }
    }

    /// Stores the loaded value of these keys.
    pub(super) async fn load(
        &mut self,
        indices: impl Iterator<Item = u64>,
        loaded: impl Fn(u64),
    ) -> Result<(), IndexError> {
        let mut count = 0;
        for index in indices {
            let key = self.keys.key(index, &mut self.key);
            let value = self.values.value(ValueId { index, version: 0 }, &mut self.value);
            self.index.load(key, value).await?;
            count += 1;
            if count % OPS_PER_TURN == 0 {
                loaded(OPS_PER_TURN);
                self.meter.endpoint.yield_now().await;
                if interrupt::came() {
                    break;
                }
            }
        }
        loaded(count % OPS_PER_TURN);
        Ok(())
    }

    /// Stores the loaded value of the first `count` keys, all at once.
    pub(super) async fn bulk_load<E: Engine<Index = I>>(
        &self,
        engine: &E,
        count: u64,
        loaded: impl Fn(u64),
    ) -> Result<(), IndexError> {
        let (mut key, mut value) = (Vec::new(), Vec::new());
        let pairs = self.keys.sorted(count).take_while(|_| !interrupt::came()).map(|index| {
            loaded(1);
            let key = self.keys.key(index, &mut key).to_vec();
            (key, self.values.value(ValueId { index, version: 0 }, &mut value).to_vec())
        });
        self.index.bulk_load(engine, pairs, BULK_FILL).await
    }

    /// Carries out operations until it is time to stop.
    pub(super) async fn run(&mut self, until: Until, done: impl Fn(u64)) {
        let mut count = 0;
        while count < until.ops && self.meter.now < until.at {
            let Some(operation) = self.stream.next() else { break };
            match self.perform(operation).await {
                // What ends later is part of the latencies, not of the throughput.
                Ok(()) => self.meter.tally.ops += u64::from(self.meter.now <= until.at),
                Err(error) => {
                    self.meter.tally.fail(|| format!("{operation:?}: {error}"));
                    // Nothing that this task begins can succeed any more.
                    if matches!(error, IndexError::Fenced | IndexError::Dropped) {
                        break;
                    }
                }
            }
            count += 1;
            if count % OPS_PER_TURN == 0 {
                done(OPS_PER_TURN);
                self.meter.endpoint.yield_now().await;
                if interrupt::came() {
                    break;
                }
                if self.meter.alone {
                    self.meter.now = self.meter.watch.now(&self.meter.endpoint);
                }
            }
        }
        done(count % OPS_PER_TURN);
        self.meter.tally.ended = self.meter.now.min(until.at);
    }

    #[inline]
    async fn perform(&mut self, operation: Operation) -> Result<(), IndexError> {
        match operation {
            Operation::Get(index) => {
                let key = self.keys.key(index, &mut self.key);
                self.meter.time(Kind::Get, self.index.get(key)).await.map(drop)
            }
            Operation::Put(index) | Operation::Insert(index) => self.put(index).await,
            Operation::Delete(index) => {
                let key = self.keys.key(index, &mut self.key);
                self.meter.time(Kind::Delete, self.index.delete(key)).await.map(drop)
            }
            Operation::Scan { start, limit } => {
                let key = self.keys.key(start, &mut self.key);
                let scan = self.index.scan(Bound::Included(key), Bound::Unbounded, limit as usize, false);
                self.meter.time(Kind::Scan, scan).await.map(drop)
            }
            Operation::Iterate { limit } => self.iterate(limit).await,
            Operation::ReadModifyWrite(index) => {
                let key = self.keys.key(index, &mut self.key);
                self.meter.time(Kind::Get, self.index.get(key)).await?;
                self.put(index).await
            }
            Operation::CompareAndSwap(index) => {
                let key = self.keys.key(index, &mut self.key);
                let held = self.meter.time(Kind::Get, self.index.get(key)).await?;
                let id = ValueId { index, version: self.stream.version() };
                let value = self.values.value(id, &mut self.value);
                let swap = self.index.compare_and_swap(key, held.as_deref(), Some(value));
                self.meter.time(Kind::Cas, swap).await.map(drop)
            }
        }
    }

    #[inline]
    async fn put(&mut self, index: u64) -> Result<(), IndexError> {
        let key = self.keys.key(index, &mut self.key);
        let id = ValueId { index, version: self.stream.version() };
        let value = self.values.value(id, &mut self.value);
        self.meter.time(Kind::Put, self.index.put(key, value)).await
    }

    async fn iterate(&mut self, limit: u32) -> Result<(), IndexError> {
        let start = self.cursor.as_deref().map_or(Bound::Unbounded, Bound::Excluded);
        let scan = self.index.scan(start, Bound::Unbounded, limit as usize, false);
        let found = self.meter.time(Kind::Scan, scan).await?;
        let more = found.len() >= limit as usize;
        self.cursor = found.into_iter().last().map(|(key, _)| key).filter(|_| more);
        Ok(())
    }

    pub(super) fn into_tally(self) -> Tally {
        self.meter.tally
    }
}
