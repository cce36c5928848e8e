//! One client of one row: makes accesses of one kind, so many at a time, until time or count is up.
//!
//! Depth 1: the address of each access depends on what the one before it brought, so nothing overlaps. Depth d: d independent
//! accesses are kept in flight; a call takes a task for each.
//!
//! Where an access takes less than [`BLOCK_BELOW_NS`], reading the clock for each would distort it, so blocks of
//! [`BLOCK_OPS`] are timed, and percentiles are those of the blocks' averages.

use super::access::{Access, Walk};
use crate::arena::Arena;
use crate::fleet::Meeting;
use crate::units::index;
use farwood_fabric::clock::Nanos;
use farwood_fabric::endpoint::Ticket;
use farwood_fabric::{Endpoint, FabricError, GlobalAddr, Op, OpStats};
use hdrhistogram::Histogram;
use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::task::Poll;

/// Accesses shorter than this are timed in blocks.
const BLOCK_BELOW_NS: Nanos = 2_000;
/// How many accesses are timed together then.
const BLOCK_OPS: u64 = 64;
/// How many such blocks are made to find that out; they are not counted.
const WARM_UP_BLOCKS: u64 = 5;
/// The time for an access is the median over windows of this length, so that moments in which the machine did something
/// else do not count.
const WINDOW_NS: Nanos = 1_000_000;
/// How many accesses one operation makes: it pins an epoch, which it should not hold for long.
const OPS_PER_PIN: u64 = 16 * 1024;
/// The longest latency that is told apart from longer ones, in picoseconds: a thousand seconds.
const LONGEST_PS: u64 = 1_000_000_000_000_000;

/// What one row measures.
#[derive(Clone, Debug)]
pub(super) struct Job {
    pub(super) access: Access,
    pub(super) bytes: usize,
    pub(super) depth: u32,
    /// How many slots the working set has on all servers together, and how far they are apart.
    pub(super) slots: u64,
    pub(super) stride: u64,
    /// When a client stops: after so many accesses, or after so long, whichever comes first.
    pub(super) ops: u64,
    pub(super) span_ns: Nanos,
    pub(super) seed: u64,
    /// Time is virtual: reading it costs nothing, and there is nothing to warm up.
    pub(super) is_virtual: bool,
}

/// What a client did in a row.
#[derive(Debug)]
pub(super) struct Tally {
    pub(super) ops: u64,
    pub(super) elapsed_ns: Nanos,
    /// Latencies in picoseconds, since the average of a block is no whole number of nanoseconds.
    pub(super) latency_ps: Histogram<u64>,
    pub(super) stats: OpStats,
    /// How many accesses were timed together.
    pub(super) block_ops: u64,
    /// The time of a client for each access, in one window after the other.
    pub(super) ns_per_op: Vec<f64>,
}

/// How long accesses took on average, in one stretch of time after the other.
#[derive(Default, Debug)]
pub(super) struct Windows {
    began: Nanos,
    ops: u64,
    ns_per_op: Vec<f64>,
}

impl Windows {
    pub(super) fn starting(began: Nanos) -> Self {
        Self { began, ..Self::default() }
    }

    /// Counts accesses that were complete at `now`.
    pub(super) fn count(&mut self, now: Nanos, ops: u64) {
        self.ops += ops;
        if now - self.began >= WINDOW_NS {
            self.close(now);
        }
    }

    fn close(&mut self, now: Nanos) {
        self.ns_per_op.push((now - self.began) as f64 / self.ops as f64);
        (self.began, self.ops) = (now, 0);
    }

    /// All windows; a run that was too short for one is a window by itself.
    pub(super) fn finish(mut self, now: Nanos) -> Vec<f64> {
        if self.ns_per_op.is_empty() && self.ops > 0 {
            self.close(now);
        }
        self.ns_per_op
    }
}

impl Tally {
    pub(super) fn new(block_ops: u64) -> Result<Self, String> {
        let latency_ps = Histogram::new_with_bounds(1, LONGEST_PS, 3).map_err(|error| error.to_string())?;
        let (stats, ns_per_op) = (OpStats::default(), Vec::new());
        Ok(Self { ops: 0, elapsed_ns: 0, latency_ps, stats, block_ops, ns_per_op })
    }

    /// Counts `ops` accesses that took from `before` until `now` together.
    fn record(&mut self, before: Nanos, now: Nanos, ops: u64) {
        self.ops += ops;
        self.latency_ps.saturating_record_n(((now - before).saturating_mul(1000) / ops).max(1), ops);
    }

    /// Adds what another did at the same time.
    pub(super) fn merge(&mut self, other: &Self) -> Result<(), String> {
        self.ops += other.ops;
        self.elapsed_ns = self.elapsed_ns.max(other.elapsed_ns);
        self.stats += other.stats;
        self.block_ops = self.block_ops.max(other.block_ops);
        self.ns_per_op.extend(&other.ns_per_op);
        self.latency_ps.add(&other.latency_ps).map_err(|error| error.to_string())
    }
}

/// A client's worker: its accesses, its way through the arena.
struct Worker {
    job: Job,
    arena: Arena,
    endpoint: Endpoint,
    walk: Walk,
    /// Of the client: all its tasks count together.
    windows: Rc<RefCell<Windows>>,
}

/// Runs client number `client` of a row.
pub(super) async fn client(
    job: Job,
    arena: Arena,
    endpoint: Endpoint,
    client: u32,
    meeting: &Meeting,
) -> Result<Tally, String> {
    let tasks = if job.access == Access::Call { job.depth } else { 1 };
    let windows = Rc::<RefCell<Windows>>::default();
    let worker = |task: u32| {
        let mut job = job.clone();
        // The first ones take what cannot be shared evenly.
        job.ops = job.ops / u64::from(tasks) + u64::from(u64::from(task) < job.ops % u64::from(tasks));
        let walk = Walk::new(job.seed ^ u64::from(client) << 32 ^ u64::from(task) << 16 ^ 1, job.slots);
        Worker { job, arena: arena.clone(), endpoint: endpoint.clone(), walk, windows: Rc::clone(&windows) }
    };
    let mut first = worker(0);
    let block_ops = first.warm_up().await.map_err(|error| error.to_string())?;
    meeting.gather(&endpoint, 1).await?;
    let start = endpoint.now();
    *windows.borrow_mut() = Windows::starting(start);
    let others: Vec<_> =
        (1..tasks).map(|task| endpoint.spawn(worker(task).one_by_one(start, block_ops))).collect();
    let mut tally = if tasks == 1 && job.depth > 1 {
        first.keep_in_flight(start, block_ops).await?
    } else {
        first.one_by_one(start, block_ops).await?
    };
    for other in others {
        let other = other.await.map_err(|killed| killed.to_string())?;
        tally.merge(&other?)?;
    }
    tally.ns_per_op = windows.take().finish(endpoint.now());
    Ok(tally)
}

impl Worker {
    /// The next address, after an access that brought `seen`.
    #[inline]
    fn next(&mut self, seen: u64) -> GlobalAddr {
        let slot = self.walk.next(seen);
        let servers = self.arena.servers() as u64;
        // A division would be a good part of a short access.
        if servers == 1 {
            self.arena.at(0, slot * self.job.stride)
        } else {
            self.arena.at(index(slot % servers), slot / servers * self.job.stride)
        }
    }

    fn deadline(&self, start: Nanos) -> Nanos {
        start.saturating_add(self.job.span_ns)
    }

    /// Makes a few accesses that do not count; how many are to be timed together.
    async fn warm_up(&mut self) -> Result<u64, FabricError> {
        if self.job.is_virtual {
            return Ok(1);
        }
        let start = self.endpoint.now();
        let mut fastest = Nanos::MAX;
        for _ in 0..WARM_UP_BLOCKS {
            let op = self.endpoint.op();
            let (before, mut made) = (self.endpoint.now(), 0);
            while made < BLOCK_OPS && (made == 0 || self.endpoint.now() < self.deadline(start)) {
                let at = self.next(0);
                self.job.access.perform(&op, at, self.job.bytes).await?;
                made += 1;
            }
            fastest = fastest.min((self.endpoint.now() - before) / made);
        }
        Ok(if fastest < BLOCK_BELOW_NS { BLOCK_OPS } else { 1 })
    }

    /// One access after the other, each depending on the one before.
    async fn one_by_one(mut self, start: Nanos, block_ops: u64) -> Result<Tally, String> {
        let mut tally = Tally::new(block_ops)?;
        let (deadline, Job { access, bytes, ops, .. }) = (self.deadline(start), self.job.clone());
        let mut at = self.next(0);
        let mut now = self.endpoint.now();
        while tally.ops < ops && now < deadline {
            let op = self.endpoint.op();
            let pinned_until = tally.ops.saturating_add(OPS_PER_PIN).min(ops);
            while tally.ops < pinned_until && now < deadline {
                let count = block_ops.min(pinned_until - tally.ops);
                let before = self.endpoint.now();
                for _ in 0..count {
                    let seen = access.perform(&op, at, bytes).await.map_err(|error| error.to_string())?;
                    at = self.next(seen);
                }
                now = self.endpoint.now();
                tally.record(before, now, count);
                self.windows.borrow_mut().count(now, count);
            }
            tally.stats += op.stats();
            drop(op);
            self.endpoint.yield_now().await;
        }
        tally.elapsed_ns = now - start;
        Ok(tally)
    }

    /// Keeps `depth` accesses in flight.
    async fn keep_in_flight(mut self, start: Nanos, block_ops: u64) -> Result<Tally, String> {
        let mut tally = Tally::new(block_ops)?;
        let (deadline, ops) = (self.deadline(start), self.job.ops);
        while tally.ops < ops && self.endpoint.now() < deadline {
            let endpoint = self.endpoint.clone();
            let op = endpoint.op();
            let count = OPS_PER_PIN.min(ops - tally.ops);
            self.fly(&op, count, deadline, &mut tally).await.map_err(|error| error.to_string())?;
            tally.stats += op.stats();
            drop(op);
            endpoint.yield_now().await;
        }
        tally.elapsed_ns = self.endpoint.now() - start;
        Ok(tally)
    }

    /// Makes up to `count` accesses, `depth` at a time, and waits for all.
    async fn fly(
        &mut self,
        op: &Op,
        count: u64,
        deadline: Nanos,
        tally: &mut Tally,
    ) -> Result<(), FabricError> {
        let depth = self.job.depth as usize;
        let mut flying: Vec<(Nanos, Ticket<'_>)> = Vec::with_capacity(depth);
        let mut posted = 0;
        while posted < count {
            let before = self.endpoint.now();
            if before >= deadline {
                break;
            }
            let block = tally.block_ops.min(count - posted);
            let mut done = 0;
            for _ in 0..block {
                let at = self.next(0);
                let Some(batch) = self.job.access.batch(&self.endpoint, at, self.job.bytes) else { continue };
                let mut ticket = op.post(batch);
                // Where the client touches the memory itself, a verb is complete as soon as it is posted.
                match ticket.try_take() {
                    Some(result) => {
                        std::hint::black_box(result?);
                        done += 1;
                    }
                    None => flying.push((before, ticket)),
                }
                while flying.len() >= depth {
                    self.land(&mut flying, tally).await?;
                }
            }
            posted += block;
            if done > 0 {
                let now = self.endpoint.now();
                tally.record(before, now, done);
                self.windows.borrow_mut().count(now, done);
            }
        }
        while !flying.is_empty() {
            self.land(&mut flying, tally).await?;
        }
        Ok(())
    }

    /// Waits until at least one of those in flight is complete.
    async fn land(
        &self,
        flying: &mut Vec<(Nanos, Ticket<'_>)>,
        tally: &mut Tally,
    ) -> Result<(), FabricError> {
        poll_fn(|context| {
            let (mut n, before) = (0, flying.len());
            while n < flying.len() {
                match Pin::new(&mut flying[n].1).poll(context) {
                    Poll::Ready(result) => {
                        let (posted_at, _) = flying.swap_remove(n);
                        result?;
                        let now = self.endpoint.now();
                        tally.record(posted_at, now, 1);
                        self.windows.borrow_mut().count(now, 1);
                    }
                    Poll::Pending => n += 1,
                }
            }
            if flying.len() < before { Poll::Ready(Ok(())) } else { Poll::Pending }
        })
        .await
    }
}
