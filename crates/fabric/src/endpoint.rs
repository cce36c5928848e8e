//! The endpoint, which is what the papers call a client thread, and the operation, which is what it works on.
//!
//! An [`Endpoint`] owns its connections, buffers, clock and random source, and stays on its thread. Work goes through an
//! [`Op`]: it carries the operation's counters (tasks interleave on one endpoint) and pins the epoch in which it began, so
//! that nothing it can still reach is reused. Everything outside enters an engine here and nowhere else.

use crate::addr::{GlobalAddr, ServerId, SessionId};
use crate::buf::{Buf, BufPool};
use crate::call::{Call, CallError, CallId, Once, Principal, Seen, Target};
use crate::caps::Capabilities;
use crate::clock::{MILLISECOND, Nanos};
use crate::company::Company;
use crate::control::{ControlError, Reply, Request};
use crate::doubt::Doubts;
use crate::error::FabricError;
use crate::exec::{Executor, GroupId, JoinHandle};
use crate::mem::Words;
use crate::pins::Pins;
use crate::procedure::{ProcedureContext, ProcedureId, ProcedureSet};
use crate::session::Session;
use crate::stats::OpStats;
use crate::transport::direct::DirectLink;
use crate::transport::{Link, Posted};
use crate::verb::{Batch, BatchFailure, BatchResult, INLINE_BYTES};
use crate::wire;
use crate::work::Work;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

/// How often a call without a reply is repeated before the caller is told.
const CALL_ATTEMPTS: u32 = 10;
/// A task that never has to wait lets others run after so many batches.
const BATCHES_PER_TURN: u32 = 128;
/// How long an operation keeps its pin while it waits for its turn.
const TURN_NS: Nanos = 5 * MILLISECOND;
/// In an immediate world of the simulator, after fewer than so many.
const MAX_SIMULATED_TURN: u64 = 6;

/// A client thread's access to far memory. Clones are the same endpoint.
#[derive(Clone)]
pub struct Endpoint {
    pub(crate) inner: Rc<Inner>,
    /// The costs of all operations that ended on this handle and its clones.
    totals: Rc<Cell<OpStats>>,
}

pub(crate) struct Inner {
    pub(crate) link: Link,
    principal: Principal,
    /// The session, unless this endpoint only opens one or runs a procedure.
    pub(crate) owner: Option<Session>,
    number: u64,
    pub(crate) executor: Executor,
    /// Whose tasks it works for: what it settles in the background ends with them.
    pub(crate) group: GroupId,
    pool: BufPool,
    pub(crate) pins: Pins,
    calls: RefCell<Calls>,
    turn: Cell<u32>,
    company: Company,
    skew: ClockSkew,
    pub(crate) doubts: Doubts,
}

/// How a process's clock differs from true time; none outside the simulator.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct ClockSkew {
    /// How far it is ahead.
    pub(crate) ahead_ns: Nanos,
    /// How many millionths it runs too fast (or, negative, too slow).
    pub(crate) drift_ppm: i32,
}

impl ClockSkew {
    fn stretch(span: Nanos, ppm: i64) -> Nanos {
        if ppm == 0 {
            return span;
        }
        let change = i128::from(span) * i128::from(ppm) / 1_000_000;
        u64::try_from(i128::from(span) + change).unwrap_or(0)
    }

    fn local(self, now: Nanos) -> Nanos {
        Self::stretch(now, i64::from(self.drift_ppm)) + self.ahead_ns
    }

    fn true_span(self, span: Nanos) -> Nanos {
        Self::stretch(span, -i64::from(self.drift_ppm))
    }
}

/// The calls of an endpoint: the next sequence number, and which have not been answered, by target.
#[derive(Default)]
struct Calls {
    next: u64,
    open: FxHashMap<Target, BTreeSet<u64>>,
}

impl Endpoint {
    pub(crate) fn for_session(session: &Session, number: u64, link: Link, executor: &Executor) -> Self {
        let pins = Pins::new(session.register_pins());
        Self::build(link, session.principal(), Some(session.clone()), number, executor, pins)
    }

    /// An endpoint without a session, to open one with.
    pub(crate) fn stranger(link: Link, executor: &Executor) -> Self {
        Self::near(link, Principal::NOBODY, executor)
    }

    /// The endpoint of a procedure that runs beside the memory, called by `caller`.
    pub(crate) fn near(link: Link, caller: Principal, executor: &Executor) -> Self {
        // Its calls are told apart by a random number, since no session counts this endpoint. Real endpoints count from 0.
        let number = executor.random() | 1 << 63;
        Self::build(link, caller, None, number, executor, Pins::none())
    }

    fn build(
        link: Link,
        principal: Principal,
        owner: Option<Session>,
        number: u64,
        executor: &Executor,
        pins: Pins,
    ) -> Self {
        let skew = match &link {
            Link::Direct(_) | Link::Far(_) => ClockSkew::default(),
            Link::Sim(link) => link.clock_skew(),
        };
        let pool = link.pool();
        Self {
            inner: Rc::new(Inner {
                link,
                principal,
                owner,
                number,
                executor: executor.clone(),
                group: executor.group(),
                pool,
                pins,
                calls: RefCell::default(),
                turn: Cell::new(BATCHES_PER_TURN),
                company: Company::default(),
                skew,
                doubts: Doubts::default(),
            }),
            totals: Rc::default(),
        }
    }

    /// The session in whose name verbs and calls go out.
    pub fn session_id(&self) -> SessionId {
        self.inner.principal.session
    }

    /// The session itself; procedures on a memory server have none.
    pub fn session(&self) -> Option<&Session> {
        self.inner.owner.as_ref()
    }

    /// What the transport can do.
    pub fn capabilities(&self) -> &Capabilities {
        self.inner.link.capabilities()
    }

    /// Now, on the clock that the endpoints of a process share; other processes' need not agree with it.
    pub fn now(&self) -> Nanos {
        self.inner.skew.local(self.inner.executor.now())
    }

    /// Waits for a time.
    pub async fn sleep(&self, span: Nanos) {
        let executor = &self.inner.executor;
        executor.sleep_until(executor.now().saturating_add(self.inner.skew.true_span(span))).await;
    }

    /// Lets other tasks run.
    pub async fn yield_now(&self) {
        self.inner.executor.yield_now().await;
    }

    /// Says that this thread does some work now, beside its verbs. It takes time in the simulator's cost mode, where the tasks of an
    /// endpoint share one thread; everywhere else it is free, and returns at once.
    #[inline]
    pub async fn charge(&self, work: Work) {
        if let Link::Sim(link) = &self.inner.link {
            link.charge(&self.inner.executor, work).await;
        }
    }

    /// A random number.
    pub fn random(&self) -> u64 {
        self.inner.executor.random()
    }

    /// A random number below `bound` (0 if there is none).
    pub fn random_below(&self, bound: u64) -> u64 {
        u64::try_from((u128::from(self.random()) * u128::from(bound)) >> 64).unwrap_or(0)
    }

    /// Runs a task on this endpoint's thread.
    pub fn spawn<T: 'static>(&self, future: impl Future<Output = T> + 'static) -> JoinHandle<T> {
        self.inner.executor.spawn(future)
    }

    /// A buffer of `len` bytes to write from; its contents are whatever it held last.
    pub fn buf(&self, len: usize) -> Buf {
        self.inner.pool.take(len)
    }

    /// A buffer with a copy of `data`.
    pub fn buf_of(&self, data: &[u8]) -> Buf {
        self.inner.pool.copy_of(data)
    }

    /// Begins an operation.
    pub fn op(&self) -> Op {
        self.reap_orphans();
        let epoch = self.inner.owner.as_ref().map_or(0, Session::epoch);
        self.inner.pins.pin(epoch);
        Op { endpoint: self.clone(), epoch, stats: RefCell::default() }
    }

    /// The costs of all operations that ended on this handle and its clones.
    pub fn totals(&self) -> OpStats {
        self.totals.get()
    }

    /// The same endpoint with totals of its own: for a task whose costs are to be told apart from those of others.
    #[must_use]
    pub fn metered(&self) -> Self {
        Self { inner: Rc::clone(&self.inner), totals: Rc::default() }
    }

    /// Lets this endpoint answer calls to its session with `procedures`. The task runs until the session ends.
    pub fn serve(&self, procedures: ProcedureSet) {
        let inbox = self.inner.link.serve();
        let endpoint = self.clone();
        self.spawn(async move {
            while let Some((call, seen)) = inbox.next().await {
                match seen {
                    Seen::New => {}
                    Seen::Running => continue,
                    Seen::Done(outcome) => {
                        endpoint.inner.link.reply(call.id, outcome);
                        continue;
                    }
                    Seen::Forgotten => {
                        endpoint.inner.link.reply(call.id, Err(CallError::Forgotten));
                        continue;
                    }
                    Seen::TooMany { open } => {
                        endpoint.inner.link.reply(call.id, Err(CallError::Unacknowledged { open }));
                        continue;
                    }
                }
                let (serving, inbox) = (endpoint.clone(), Arc::clone(&inbox));
                let procedure = procedures.get(call.procedure);
                endpoint.spawn(async move {
                    serving.charge(Work::Call).await;
                    let outcome = match procedure {
                        Some(procedure) => {
                            let context =
                                ProcedureContext { endpoint: serving.clone(), caller: call.id.session };
                            procedure.run(context, call.request).await
                        }
                        None => Err(CallError::NoSuchProcedure { procedure: call.procedure }),
                    };
                    inbox.finish(call.id, &outcome);
                    serving.inner.link.reply(call.id, outcome);
                });
            }
        });
    }

    /// Adds a WRITE of bytes to a batch, in the way that suits their length.
    pub fn add_write(&self, batch: &mut Batch, addr: GlobalAddr, data: &[u8]) {
        if data.len() <= INLINE_BYTES {
            batch.write_inline(addr, data);
        } else {
            batch.write(addr, self.buf_of(data));
        }
    }

    /// What those need to know who poll several operations of this endpoint in turns.
    pub fn company(&self) -> &Company {
        &self.inner.company
    }

    /// Gives other tasks a turn now and then, though a transport may never make this one wait. Verbs do that by themselves, except
    /// [`Op::look`].
    #[inline]
    pub async fn breathe(&self) {
        let left = self.inner.turn.get();
        if left > 0 {
            self.inner.turn.set(left - 1);
        } else {
            self.inner.turn.set(self.next_turn());
            self.yield_now().await;
        }
    }
}

impl Endpoint {
    /// How many batches the next turn has.
    #[cold]
    fn next_turn(&self) -> u32 {
        match &self.inner.link {
            // Where others might come in between, they do.
            link @ Link::Sim(_) if link.capabilities().immediate => {
                u32::try_from(self.random_below(MAX_SIMULATED_TURN)).unwrap_or(0)
            }
            _ => BATCHES_PER_TURN,
        }
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Endpoint({} #{})", self.inner.principal.session, self.inner.number)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // An endpoint that goes away in the middle of verbs leaves its pins to the session, which holds them until it is
        // closed or fenced: only then is it certain that nothing lands.
        if !self.doubts.are_flying() {
            self.pins.retire();
        }
    }
}

/// Submits a batch and waits for it, in a method of an `Op`. In a future of its own, batch and result would be copied in and out.
macro_rules! submit {
    ($op:expr, $batch:expr) => {{
        let result = match &$op.endpoint.inner.link {
            // Nothing is ever in flight: the ticket would only be carried about.
            Link::Direct(link) => $op.execute(link, $batch),
            Link::Far(_) | Link::Sim(_) => $op.post($batch).await,
        };
        $op.endpoint.breathe().await;
        result
    }};
}

/// One operation: its counters and its epoch pin. Dropping it ends it.
pub struct Op {
    endpoint: Endpoint,
    epoch: u64,
    stats: RefCell<OpStats>,
}

impl Op {
    /// The endpoint it runs on.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// The epoch it pins.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// What it cost so far.
    pub fn stats(&self) -> OpStats {
        *self.stats.borrow()
    }

    /// Counts that the operation begins something anew.
    pub fn count_retry(&self) {
        self.stats.borrow_mut().retries += 1;
    }

    /// Counts that the operation goes where a cache led it.
    pub fn count_hint(&self) {
        self.stats.borrow_mut().hints += 1;
    }

    /// Counts that where a cache led was nothing of use.
    pub fn count_wrong_hint(&self) {
        self.stats.borrow_mut().wrong_hints += 1;
    }

    /// Posts a batch now; its ticket is awaited later, or dropped, which detaches it.
    pub fn post(&self, batch: Batch) -> Ticket<'_> {
        let inner = &self.endpoint.inner;
        let (server, round_trips) = (batch.server(), batch.round_trips());
        if inner.owner.as_ref().is_some_and(Session::is_condemned) {
            let refused = BatchFailure::refused(
                FabricError::Fenced { session: inner.principal.session },
                0,
                batch.len(),
            );
            return Ticket::refused(self, refused);
        }
        let checked = inner.link.table(batch.server()).map_err(|error| (0, error));
        let posted = match checked.and_then(|table| batch.check(table, inner.link.capabilities())) {
            Ok(()) => {
                batch.count(&mut self.stats.borrow_mut());
                inner.link.post(batch, &inner.pool)
            }
            Err((at, error)) => return Ticket::refused(self, BatchFailure::refused(error, at, batch.len())),
        };
        Ticket { op: self, posted, server, round_trips, taken: false }
    }

    /// Submits a batch and waits for it.
    #[inline]
    pub async fn submit(&self, batch: Batch) -> BatchResult {
        submit!(self, batch)
    }

    #[inline]
    fn execute(&self, link: &DirectLink, batch: Batch) -> BatchResult {
        let table = link.table(batch.server()).map_err(|error| (0, error));
        if let Err((at, error)) = table.and_then(|table| batch.check(table, link.capabilities())) {
            return Err(BatchFailure::refused(error, at, batch.len()));
        }
        {
            let mut stats = self.stats.borrow_mut();
            stats.round_trips += batch.round_trips();
            batch.count(&mut stats);
        }
        link.execute(batch, &self.endpoint.inner.pool)
    }

    /// Submits batches together and waits for all: one round trip, however many servers. One result each, in order; a
    /// dead server fails its own batch only.
    pub async fn submit_all(&self, batches: impl IntoIterator<Item = Batch>) -> SmallVec<[BatchResult; 4]> {
        let mut tickets: SmallVec<[Ticket<'_>; 4]> = batches.into_iter().map(|b| self.post(b)).collect();
        let trips = tickets.iter().map(|t| t.round_trips).max().unwrap_or(0);
        let mut results = SmallVec::new();
        for ticket in &mut tickets {
            ticket.round_trips = 0;
            results.push((&mut *ticket).await);
        }
        self.stats.borrow_mut().round_trips += trips;
        self.endpoint.breathe().await;
        results
    }

    /// Reads many places at once, on any servers: one round trip. Buffers come back in the order asked for.
    pub async fn read_many(&self, places: &[(GlobalAddr, usize)]) -> Result<Vec<Buf>, FabricError> {
        let max = self.endpoint.capabilities().max_batch;
        let mut batches: Vec<(Batch, Vec<usize>)> = Vec::new();
        for (n, (addr, len)) in places.iter().enumerate() {
            let fits =
                |(batch, _): &&mut (Batch, Vec<usize>)| batch.server() == addr.server() && batch.len() < max;
            if let Some((batch, wanted)) = batches.iter_mut().rev().find(fits) {
                batch.read(*addr, *len);
                wanted.push(n);
            } else {
                let mut batch = Batch::new(addr.server());
                batch.read(*addr, *len);
                batches.push((batch, vec![n]));
            }
        }
        let (batches, wanted): (Vec<_>, Vec<_>) = batches.into_iter().unzip();
        let results = self.submit_all(batches).await;
        let mut bufs: Vec<Option<Buf>> = places.iter().map(|_| None).collect();
        for (result, wanted) in results.into_iter().zip(wanted) {
            let mut completed = result?;
            for (verb, n) in wanted.into_iter().enumerate() {
                bufs[n] = Some(completed.take(verb));
            }
        }
        Ok(bufs.into_iter().flatten().collect())
    }

    /// READ of `len` bytes.
    #[inline]
    pub async fn read(&self, addr: GlobalAddr, len: usize) -> Result<Buf, FabricError> {
        if let Link::Direct(link) = &self.endpoint.inner.link {
            let buf = link.read(addr, len, &self.endpoint.inner.pool)?;
            self.count_one(|stats| {
                stats.reads += 1;
                stats.bytes_read += len as u64;
            });
            self.endpoint.breathe().await;
            return Ok(buf);
        }
        let mut batch = Batch::new(addr.server());
        let n = batch.read(addr, len);
        Ok(submit!(self, batch)?.take(n))
    }

    /// READ of aligned words by looking at them where they are, without a copy: `with` is given them, and what it makes of them counts
    /// if the connection was still open afterwards. `None`, and nothing happens, where that cannot be: ask [`Op::read`] then. It never waits,
    /// so it lets no other task run: whoever looks for long calls [`Endpoint::breathe`]. Counts as one READ of all bytes, however few are looked at.
    #[inline]
    pub fn look<T>(
        &self,
        addr: GlobalAddr,
        len: usize,
        with: impl FnOnce(Words<'_>) -> T,
    ) -> Option<Result<T, FabricError>> {
        let seen = match &self.endpoint.inner.link {
            Link::Direct(link) => link.look(addr, len, with)?,
            Link::Sim(link) => link.look(&self.endpoint.inner.executor, addr, len, with)?,
            Link::Far(_) => return None,
        };
        if seen.is_ok() {
            self.count_look(len);
        }
        Some(seen)
    }

    /// The same, but `None` in the simulator: for those who look often, and are compiled for this alone.
    #[inline]
    pub fn look_here<T>(
        &self,
        addr: GlobalAddr,
        len: usize,
        with: impl FnOnce(Words<'_>) -> T,
    ) -> Option<Result<T, FabricError>> {
        let seen = self.peek_here(addr, len, with)?;
        if seen.is_ok() {
            self.count_look(len);
        }
        Some(seen)
    }

    /// The same, and it does not count: who peeks fetches the same bytes again with a verb that does, or says [`Op::count_look`].
    #[inline]
    pub fn peek_here<T>(
        &self,
        addr: GlobalAddr,
        len: usize,
        with: impl FnOnce(Words<'_>) -> T,
    ) -> Option<Result<T, FabricError>> {
        let Link::Direct(link) = &self.endpoint.inner.link else { return None };
        link.look(addr, len, with)
    }

    /// A CAS, if there is one, and READs of words where they are behind it, in order, on one server: what a batch of these does, and counts as,
    /// where this thread carries out verbs itself. Each of what is read is given to `each`, by its place; the word as it was before the
    /// CAS comes back. `None`, and nothing happens, elsewhere and in the simulator: submit a batch then. It lets no other task run: see
    /// [`Endpoint::breathe`].
    #[inline]
    pub fn swap_and_look_here<const N: usize>(
        &self,
        swap: Option<(GlobalAddr, u64, u64)>,
        places: [(GlobalAddr, usize); N],
        mut each: impl FnMut(usize, Words<'_>),
    ) -> Option<Result<u64, FabricError>> {
        let Link::Direct(link) = &self.endpoint.inner.link else { return None };
        if link.has_device() {
            return None;
        }
        let mut before = 0;
        if let Some((addr, expected, desired)) = swap {
            match link.cas(addr, expected, desired) {
                Ok(word) => before = word,
                Err(error) => return Some(Err(error)),
            }
        }
        for (n, (addr, len)) in places.into_iter().enumerate() {
            if let Err(error) = link.look(addr, len, |words| each(n, words))? {
                return Some(Err(error));
            }
        }
        self.count_one(|stats| {
            if swap.is_some() {
                stats.atomics += 1;
                stats.bytes_read += 8;
                stats.bytes_written += 8;
            }
            stats.reads += N as u64;
            stats.bytes_read += places.iter().map(|(_, len)| *len as u64).sum::<u64>();
        });
        Some(Ok(before))
    }

    /// Whether memory is the simulator's.
    pub fn is_simulated(&self) -> bool {
        matches!(self.endpoint.inner.link, Link::Sim(_))
    }

    /// Counts a READ where the bytes are.
    #[inline]
    pub fn count_look(&self, len: usize) {
        self.count_one(|stats| {
            stats.reads += 1;
            stats.bytes_read += len as u64;
        });
        let turn = &self.endpoint.inner.turn;
        turn.set(turn.get().saturating_sub(1));
    }

    /// Says that these bytes will be read soon. A hint, which costs nothing where it is of no use.
    #[inline]
    pub fn expect(&self, addr: GlobalAddr, len: usize) {
        if let Link::Direct(link) = &self.endpoint.inner.link {
            link.expect(addr, len);
        }
    }

    /// The same, and makes way for others if the operation has [company](crate::company), until they may have arrived.
    #[inline]
    pub async fn approach(&self, places: &[(GlobalAddr, usize)]) {
        let company = &self.endpoint.inner.company;
        if company.has_others() {
            for (addr, len) in places {
                self.expect(*addr, *len);
            }
            company.step_aside().await;
        }
    }

    /// Waits for its turn, if it is one of several that take effect in order ([`crate::pipeline`]): whoever is about to change something
    /// calls this before it takes a lock. `false`: it waited in vain for a moment. Then the operation has to end, since its pin may be
    /// what those before it wait for, and another one begins when [`Company::turn`] says so.
    #[inline]
    pub async fn turn(&self) -> bool {
        let company = &self.endpoint.inner.company;
        if company.has_turn() {
            return true;
        }
        let executor = &self.endpoint.inner.executor;
        let mut end = None;
        std::future::poll_fn(|context| {
            if company.has_turn() {
                return Poll::Ready(true);
            }
            let now = executor.now();
            let end = *end.get_or_insert(now.saturating_add(TURN_NS));
            if now >= end {
                return Poll::Ready(false);
            }
            // Those before it may wait for what wakes nobody meanwhile. One alarm at a time is enough for all of a pipeline.
            if company.alarm() <= now {
                company.change_alarm(end);
                executor.wake_at(end, context.waker());
            }
            Poll::Pending
        })
        .await
    }

    /// Whether it may fetch a value of so many bytes. If not, it has to end before it holds anything, and another one begins when
    /// [`Company::freedom`] says so.
    #[inline]
    pub fn may_move(&self, bytes: usize) -> bool {
        self.endpoint.inner.company.may_move(bytes)
    }

    /// READ of one aligned word.
    #[inline]
    pub async fn read_word(&self, addr: GlobalAddr) -> Result<u64, FabricError> {
        if let Link::Direct(link) = &self.endpoint.inner.link {
            let word = link.read_word(addr)?;
            self.count_one(|stats| {
                stats.reads += 1;
                stats.bytes_read += 8;
            });
            self.endpoint.breathe().await;
            return Ok(word);
        }
        if !addr.is_word_aligned() {
            return Err(FabricError::Misaligned { addr });
        }
        let mut batch = Batch::new(addr.server());
        let n = batch.read(addr, 8);
        Ok(submit!(self, batch)?.take(n).word(0))
    }

    /// WRITE of a buffer.
    #[inline]
    pub async fn write(&self, addr: GlobalAddr, data: Buf) -> Result<(), FabricError> {
        let mut batch = Batch::new(addr.server());
        batch.write(addr, data);
        submit!(self, batch)?;
        Ok(())
    }

    /// WRITE of bytes, which are copied if the verb has to own them.
    #[inline]
    pub async fn write_bytes(&self, addr: GlobalAddr, data: &[u8]) -> Result<(), FabricError> {
        if let Link::Direct(link) = &self.endpoint.inner.link {
            link.write(addr, data)?;
            self.count_one(|stats| {
                stats.writes += 1;
                stats.bytes_written += data.len() as u64;
            });
            self.endpoint.breathe().await;
            return Ok(());
        }
        self.write(addr, self.endpoint.buf_of(data)).await
    }

    /// WRITEs on one server as one ordered batch, of bytes which are copied if the verbs have to own them.
    #[inline]
    pub async fn write_in_order<'a>(
        &self,
        server: ServerId,
        writes: impl Iterator<Item = (GlobalAddr, &'a [u8])> + Clone,
    ) -> Result<(), FabricError> {
        if let Link::Direct(link) = &self.endpoint.inner.link {
            link.write_in_order(server, writes.clone())?;
            self.count_one(|stats| {
                for (_, data) in writes {
                    stats.writes += 1;
                    stats.bytes_written += data.len() as u64;
                }
            });
            self.endpoint.breathe().await;
            return Ok(());
        }
        let mut batch = Batch::new(server);
        for (addr, data) in writes {
            self.endpoint.add_write(&mut batch, addr, data);
        }
        submit!(self, batch).map(drop).map_err(|failure| failure.error)
    }

    /// CAS of a word and, behind it in the same batch, a READ: the word as it was, and the bytes.
    #[inline]
    pub async fn cas_and_read(
        &self,
        (addr, expected, desired): (GlobalAddr, u64, u64),
        (from, len): (GlobalAddr, usize),
    ) -> Result<(u64, Buf), FabricError> {
        if let Link::Direct(link) = &self.endpoint.inner.link {
            let swapped =
                link.cas_and_read((addr, expected, desired), (from, len), &self.endpoint.inner.pool)?;
            self.count_one(|stats| {
                stats.atomics += 1;
                stats.reads += 1;
                stats.bytes_read += 8 + len as u64;
                stats.bytes_written += 8;
            });
            self.endpoint.breathe().await;
            return Ok(swapped);
        }
        let mut batch = Batch::new(addr.server());
        let cas = batch.cas(addr, expected, desired);
        let read = batch.read(from, len);
        let mut done = submit!(self, batch).map_err(|failure| failure.error)?;
        Ok((done.previous(cas), done.take(read)))
    }

    /// WRITE of one word (aligned or not, it takes effect as rule 2 says).
    #[inline]
    pub async fn write_word(&self, addr: GlobalAddr, word: u64) -> Result<(), FabricError> {
        if let (Link::Direct(link), true) = (&self.endpoint.inner.link, addr.is_word_aligned()) {
            link.write_word(addr, word)?;
            self.count_one(|stats| {
                stats.writes += 1;
                stats.bytes_written += 8;
            });
            self.endpoint.breathe().await;
            return Ok(());
        }
        let mut batch = Batch::new(addr.server());
        batch.write_word(addr, word);
        submit!(self, batch)?;
        Ok(())
    }

    /// CAS; brings the word as it was, which equals `expected` exactly if the swap happened.
    #[inline]
    pub async fn cas(&self, addr: GlobalAddr, expected: u64, desired: u64) -> Result<u64, FabricError> {
        if let Link::Direct(link) = &self.endpoint.inner.link {
            let before = link.cas(addr, expected, desired)?;
            self.count_one(|stats| {
                stats.atomics += 1;
                stats.bytes_read += 8;
                stats.bytes_written += 8;
            });
            self.endpoint.breathe().await;
            return Ok(before);
        }
        let mut batch = Batch::new(addr.server());
        let n = batch.cas(addr, expected, desired);
        Ok(submit!(self, batch)?.previous(n))
    }

    /// FAA; brings the word as it was.
    #[inline]
    pub async fn faa(&self, addr: GlobalAddr, add: u64) -> Result<u64, FabricError> {
        let mut batch = Batch::new(addr.server());
        let n = batch.faa(addr, add);
        Ok(submit!(self, batch)?.previous(n))
    }

    /// Prepares a call, which can then be sent as often as it takes: it runs at most once.
    pub fn prepare_call(&self, target: Target, procedure: ProcedureId, request: Vec<u8>) -> PendingCall<'_> {
        let mut calls = self.endpoint.inner.calls.borrow_mut();
        let sequence = calls.next;
        calls.next += 1;
        calls.open.entry(target).or_default().insert(sequence);
        // A session's own table outlives every server.
        let is_once = procedure != ProcedureId::CONTROL && matches!(target, Target::Server(_));
        PendingCall {
            op: self,
            target,
            procedure,
            sequence,
            request,
            sent: Cell::new(0),
            life: Cell::new(None),
            is_once,
        }
    }

    /// Calls and waits; without a reply it repeats the same call, a bounded number of times.
    pub async fn call(
        &self,
        target: Target,
        procedure: ProcedureId,
        request: Vec<u8>,
    ) -> Result<Vec<u8>, FabricError> {
        if let Target::Server(server) = target {
            self.endpoint.inner.link.check_alive(server)?;
        }
        self.call_to_the_end(self.prepare_call(target, procedure, request)).await
    }

    async fn call_to_the_end(&self, call: PendingCall<'_>) -> Result<Vec<u8>, FabricError> {
        for _ in 1..CALL_ATTEMPTS {
            match call.send().await {
                Err(CallError::Unknown) => {}
                outcome => return outcome.map_err(FabricError::Call),
            }
        }
        call.send().await.map_err(FabricError::Call)
    }

    /// Asks a memory server.
    pub async fn control(&self, server: ServerId, request: &Request) -> Result<Reply, FabricError> {
        self.ask(server, request).await.map_err(|error| match error.control() {
            // About ourselves: we were fenced, and perhaps buried already.
            Some(ControlError::SessionFenced { session } | ControlError::NoSuchSession { session })
                if *session == self.endpoint.inner.principal.session =>
            {
                self.endpoint.has_ended();
                FabricError::Fenced { session: *session }
            }
            _ => error,
        })
    }

    /// The same, with the server's own words if our session has ended there.
    pub(crate) async fn ask(&self, server: ServerId, request: &Request) -> Result<Reply, FabricError> {
        self.endpoint.inner.link.check_alive(server)?;
        let mut call = self.prepare_call(Target::Server(server), ProcedureId::CONTROL, wire::encode(request));
        call.is_once = !request.may_be_repeated();
        let reply = self.call_to_the_end(call).await?;
        wire::decode(&reply).map_err(|_| CallError::Malformed.into())
    }

    #[inline]
    fn count_one(&self, count: impl FnOnce(&mut OpStats)) {
        let mut stats = self.stats.borrow_mut();
        stats.round_trips += 1;
        count(&mut stats);
    }
}

impl Drop for Op {
    fn drop(&mut self) {
        let mut totals = self.endpoint.totals.get();
        totals += *self.stats.borrow();
        self.endpoint.totals.set(totals);
        self.endpoint.inner.pins.unpin(self.epoch);
    }
}

impl fmt::Debug for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Op(epoch {}, {:?})", self.epoch, self.stats.borrow())
    }
}

/// A batch under way. Awaiting it counts its round trips; dropping it detaches it.
#[derive(Debug)]
pub struct Ticket<'op> {
    op: &'op Op,
    posted: Posted,
    server: ServerId,
    round_trips: u64,
    taken: bool,
}

impl<'op> Ticket<'op> {
    fn refused(op: &'op Op, failure: Box<BatchFailure>) -> Self {
        Self {
            op,
            posted: Posted::Ready(Err(failure)),
            server: ServerId::COORDINATOR,
            round_trips: 0,
            taken: false,
        }
    }

    /// The result, if it has come.
    pub fn try_take(&mut self) -> Option<BatchResult> {
        match Pin::new(self).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(result) => Some(result),
            Poll::Pending => None,
        }
    }
}

impl Future for Ticket<'_> {
    type Output = BatchResult;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<BatchResult> {
        match Pin::new(&mut self.posted).poll(context) {
            Poll::Ready(result) => {
                self.taken = true;
                self.op.endpoint.hold_if_unknown(&result, self.op.epoch);
                self.op.stats.borrow_mut().round_trips += self.round_trips;
                Poll::Ready(result)
            }
            Poll::Pending => Poll::Pending,
        }
    }
}

impl Drop for Ticket<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.taken {
            return;
        }
        let endpoint = &self.op.endpoint;
        match std::mem::replace(&mut self.posted, Posted::Taken) {
            Posted::Ready(result) => endpoint.hold_if_unknown(&result, self.op.epoch),
            posted => endpoint.give_up(posted, self.server, self.op.epoch),
        }
    }
}

/// A call with its name: sending it again is the same call.
#[derive(Debug)]
pub struct PendingCall<'op> {
    op: &'op Op,
    target: Target,
    procedure: ProcedureId,
    sequence: u64,
    request: Vec<u8>,
    sent: Cell<u32>,
    /// The life of the server that it was first sent to...
    life: Cell<Option<u64>>,
    /// ...and whether it may be sent to no other.
    is_once: bool,
}

impl PendingCall<'_> {
    /// Sends it and waits for the reply.
    pub async fn send(&self) -> crate::call::CallOutcome {
        let inner = &self.op.endpoint.inner;
        let acknowledged_below = {
            let calls = inner.calls.borrow();
            let oldest = calls.open.get(&self.target).and_then(|open| open.first().copied());
            oldest.unwrap_or(self.sequence)
        };
        let Principal { session, term, ticket } = inner.principal;
        let id = CallId { session, term, endpoint: inner.number, sequence: self.sequence };
        let (procedure, request) = (self.procedure, self.request.clone());
        {
            let mut stats = self.op.stats.borrow_mut();
            stats.bytes_written += request.len() as u64;
            if self.sent.get() == 0 {
                stats.calls += 1;
                stats.round_trips += 1;
            } else {
                stats.retries += 1;
            }
        }
        self.sent.set(self.sent.get() + 1);
        let call = Call { id, ticket, acknowledged_below, procedure, request };
        let once = if self.is_once { Once::in_life(&self.life) } else { Once::ANY };
        let outcome = inner.link.call(self.target, call, once).await;
        if let Ok(reply) = &outcome {
            self.op.stats.borrow_mut().bytes_read += reply.len() as u64;
        }
        outcome
    }
}

impl Drop for PendingCall<'_> {
    fn drop(&mut self) {
        let mut calls = self.op.endpoint.inner.calls.borrow_mut();
        if let Some(open) = calls.open.get_mut(&self.target) {
            open.remove(&self.sequence);
        }
    }
}
