//! Remote objects: where new ones come from, and when old ones may be used again.
//!
//! Memory servers hand out chunks; a chunk of objects starts with a bitmap ([`ObjectChunk`]), in which a set bit means "not
//! free": linked into an index, or in the hands of some session. One heap serves all endpoints and indexes of a session.
//!
//! 1. **Allocate**: from the session's own free objects; else from retired ones that are safe by now; else by claiming free
//!    bits of a chunk it was given, some at a time (CAS on the bitmap word); else from a new chunk (a call; the server hands out
//!    what dead sessions left first, and where room is scarce, chunks that others have and use only in part).
//! 2. **Retire** an object that has just been unlinked: it is written into the session's journal on its server (`journal`), and waits for
//!    the epoch ([`Session::retire_stamp`]). Then its journal slot is cleared, and it is free in this session's hands. Epochs are
//!    asked for now and then only: it is a call, during which the thread may do nothing else.
//! 3. Beyond [`MAX_FREE`] free objects of a class, or one claim, are given back: their bits are cleared (FAA; nobody else changes a set bit).
//! 4. **Inherit** from a fenced session: its chunks are nobody's and will be handed out again; what its journal lists is freed once it
//!    is safe, slot by slot, by CAS ([`crate::pool::recovery`]).
//!
//! **Futures that are dropped, outcomes that stay unknown.** Claims, new chunks and collections go on by themselves if their operation goes away.
//! An object whose WRITE may still land is not used again, nor is a journal slot, before the verb's connection is fenced
//! ([`Endpoint::quiet`]): it is *parked* until then.
//!
//! A crash at any point may leave a bit set for an object that nothing links to: a leak, bounded by what the session held
//! in its hands (at most [`MAX_FREE`] a class or one claim, another claim, and 16 that are just being freed; of long objects fewer,
//! 64 KiB of a class or a claim of one), and found by a walk of the index. It never leaves a clear bit or a journal entry for an object that is linked, which is why step 2 comes after the unlinking and
//! why slots are cleared before reuse.

mod flush;
mod inherit;
mod journal;
mod limbo;
mod reclaim;
mod room;

use super::locks::TURN;
use super::surely;
use crate::api::IndexError;
use farwood_fabric::clock::{MICROSECOND, MILLISECOND, Nanos};
use farwood_fabric::control::{ControlError, IndexId, MAIN_BASE, ObjectChunk, Reply, Request};
use farwood_fabric::session::RetireStamp;
use farwood_fabric::{
    Batch, CallError, Endpoint, FabricError, GlobalAddr, Op, RegionId, ServerId, Session, marks,
};
use journal::Slots;
use limbo::Limbo;
use reclaim::Reclaim;
pub use room::Room;
use rustc_hash::{FxHashMap, FxHashSet};
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Most free objects of one class and server that a session keeps for itself, unless it claims more at a time.
pub const MAX_FREE: usize = 16;
/// How many objects are claimed at a time, at first.
pub const CLAIM: u32 = 8;
/// Of long objects fewer are claimed and kept: others cannot have them, and if the session dies nobody can.
const MAX_HANDS_BYTES: u32 = 64 << 10;
/// Later a session claims as many as this share of what it has claimed of the class before, up to a word of the bitmap: a claim costs
/// more than an object, and what is lost if the session dies stays a small part of what it made.
const CLAIM_SHARE: u32 = 64;
const MAX_CLAIM: u32 = 64;
/// A claim of large objects stays as it was at first.
const MAX_CLAIM_BYTES: u32 = 8192;
/// How many words of a bitmap are looked at before all of it is.
const NEAR_WORDS: u64 = 8;
/// How much time lies between two questions for the epochs, at least, and how much more than asking takes: how long objects wait
/// depends on how often everybody asks, also those who retire little.
const COLLECT_EVERY_NS: Nanos = 200 * MICROSECOND;
const COLLECT_EVERY_TIMES: u64 = 32;
/// They are asked for sooner when so many objects have been retired since, always when the journal is full, and when there is no other
/// way to an object.
const COLLECT_AT: usize = 64;
/// With so many waiting, sessions that do nothing are asked to hurry.
const URGENT_AT: usize = 256;
/// How many are freed under one pin.
const FREE_AT_A_TIME: usize = 16;
/// How often an allocation looks for objects: others may take what a new chunk brought, and what they claimed.
const MAX_CLAIMS: u32 = 1_000;
/// How often it looks whether somebody else got a chunk, and how long it waits in between.
const MAX_CHUNK_WAITS: u32 = 10_000;
const CHUNK_WAIT_NS: Nanos = 20 * MICROSECOND;
/// How often it is looked whether what was retired is free, and how long is waited in between: twice as long as before each time, up to a
/// limit. Idle sessions have heartbeats of 100 ms, until they are asked to hurry.
const MAX_WAITS: u32 = 50;
const WAIT_NS: Nanos = 200 * MICROSECOND;
const LONGEST_WAIT_NS: Nanos = 8 * MILLISECOND;
/// How often an operation waits for that.
const MAX_ROOM_WAITS: u32 = 8;
/// The same for those who leave.
const MAX_LEAVING_WAITS: u32 = 40;
const LONGEST_LEAVING_WAIT_NS: Nanos = 50 * MILLISECOND;

/// What an operation lacks that met a long value and may not move it yet.
pub(crate) const LONG_VALUE: &str = "room for a long value";

/// What an operation that found the pool full has waited for.
#[derive(Default, Debug)]
pub(crate) struct Waits {
    count: u32,
    /// How many objects had come free when it began again.
    reused: Option<u64>,
    /// It had its turn by then.
    in_turn: bool,
    /// How often chunks of other classes have been asked for.
    reclaimed: u32,
}

/// Awaits an operation on a tree, and again if what it lacked comes in a moment ([`Heap::come_again`]). A macro, since the future of an
/// operation is large: a closure would move it, and a function around it takes 2% of a put.
macro_rules! when_there_is_room {
    ($tree:expr, $operation:expr) => {{
        let mut waits = $crate::shared::heap::Waits::default();
        loop {
            let done = $operation.await;
            let Err(error) = &done else { break done };
            // Boxed: it is rare, and the future of every operation would be as large.
            if !Box::pin($tree.shared.pool.heap().come_again(&$tree.endpoint, error, &mut waits)).await? {
                break done;
            }
        }
    }};
}
pub(crate) use when_there_is_room;

/// A kind of object: equal in size, and never anything else where it is (type-stable memory).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Class {
    /// The index it belongs to.
    pub index: IndexId,
    /// Which of the index's classes.
    pub class: u16,
    /// Size, a multiple of 8 (of 64, if objects are to have packed addresses).
    pub object_bytes: u32,
}

/// Some objects, of whatever classes.
type Objects = Vec<(Class, GlobalAddr)>;

/// Mistakes that the checkers must catch: they test the test. And what helps to catch them.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "mistakes are made one by one")]
pub struct Sabotage {
    /// A retired object is free at once.
    pub reuse_without_epoch: bool,
    /// Room that was never linked is used again at once, though a WRITE to it may still land.
    pub reuse_in_doubt: bool,
    /// No mistake: an object that becomes free is zeroed, so that whoever still reads it is found out.
    pub zero_freed: bool,
    /// No mistake: the board has two slots, for the names of pages.
    pub pages_only: bool,
    /// A flush changes nothing: objects are claimed in chunks that are being drained, and the session keeps what it has in its hands.
    pub ignore_flush: bool,
}

/// The remote objects of one session. Cheap to clone, usable from any thread.
#[derive(Clone)]
pub struct Heap {
    inner: Arc<Inner>,
}

struct Inner {
    session: Session,
    sabotage: Sabotage,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    pools: FxHashMap<(ServerId, Class), ClassPool>,
    limbo: Limbo<Retired, RetireStamp>,
    /// When the epochs may be asked for again (on the clock of the process), and how many objects have been retired since they were.
    next_collection: Nanos,
    retired_since: usize,
    /// The journal slots that are not in use.
    slots: Slots,
    /// Somebody clears what a flush asks for.
    is_clearing: bool,
    /// How many collections are under way: what they have taken out of limbo is nowhere else. None begins while the heap closes.
    collecting: u32,
    is_closing: bool,
    counts: HeapCounts,
    /// How many flushes there have been.
    flushes: u64,
    reclaim: Reclaim,
}

#[derive(Default)]
struct ClassPool {
    /// With whether the session itself had it in use before.
    free: Vec<(GlobalAddr, bool)>,
    /// Those to be given back: their chunks are not known, since a flush or ever.
    returning: Vec<GlobalAddr>,
    /// Chunks in which objects may be claimed, in order and as a set.
    chunks: Vec<u64>,
    known: FxHashSet<u64>,
    /// Those that were known before the last flush. They may be another's by now.
    unverified: Vec<u64>,
    /// Where to look for free bits next: in which chunk, and from which word of its bitmap on.
    cursor: usize,
    word: u64,
    /// How many objects the session has claimed.
    claimed: u32,
    /// Somebody is asking for a new chunk.
    is_asking: bool,
}

impl ClassPool {
    /// How many objects are claimed at a time.
    fn claim(&self, class: Class) -> u32 {
        let least = CLAIM.min(fit_in_hands(class)).max(1);
        let most = (MAX_CLAIM_BYTES / class.object_bytes.max(1)).clamp(least, MAX_CLAIM);
        (self.claimed / CLAIM_SHARE).clamp(least, most)
    }

    /// How many free objects the session keeps.
    fn keeps(&self, class: Class) -> usize {
        let count = |number: u32| usize::try_from(number).unwrap_or(0);
        match fit_in_hands(class) {
            0 => 0,
            fit => MAX_FREE.min(count(fit)).max(count(self.claim(class))),
        }
    }
}

/// How many objects of a class a session may have in its hands; none, if they are longer than all that it may have.
fn fit_in_hands(class: Class) -> u32 {
    MAX_HANDS_BYTES / class.object_bytes.max(1)
}

/// The right to ask for a new chunk of a class, which one has at a time.
struct Asking {
    heap: Heap,
    of: (ServerId, Class),
}

impl Asking {
    fn begin(heap: &Heap, of: (ServerId, Class)) -> Option<Self> {
        let was_asking = {
            let mut state = heap.state();
            std::mem::replace(&mut state.pools.entry(of).or_default().is_asking, true)
        };
        // Not made for nothing, since dropping it ends it.
        (!was_asking).then(|| Self { heap: heap.clone(), of })
    }
}

impl Asking {
    /// Gets a chunk, unless collecting what was retired brings something free.
    async fn ask(self, endpoint: &Endpoint) -> Result<(), FabricError> {
        let (heap, (server, class)) = (&self.heap, self.of);
        {
            let _collecting = Collecting::begin(heap);
            heap.collect_now(endpoint, true).await?;
        }
        if heap.has_free(server, class) {
            return Ok(());
        }
        heap.new_chunk(&endpoint.op(), server, class).await
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        if let Some(pool) = self.heap.state().pools.get_mut(&self.of) {
            pool.is_asking = false;
        }
    }
}

/// The right to clear what a flush asks for, which one has at a time.
struct Clearing<'a>(&'a Heap);

impl<'a> Clearing<'a> {
    fn begin(heap: &'a Heap) -> Option<Self> {
        let was_clearing = std::mem::replace(&mut heap.state().is_clearing, true);
        // Not made for nothing, since dropping it ends it.
        (!was_clearing).then(|| Self(heap))
    }
}

impl Drop for Clearing<'_> {
    fn drop(&mut self) {
        self.0.state().is_clearing = false;
    }
}

/// A collection under way.
struct Collecting(Heap);

impl Collecting {
    fn begin(heap: &Heap) -> Self {
        heap.state().collecting += 1;
        Self(heap.clone())
    }
}

impl Drop for Collecting {
    fn drop(&mut self) {
        self.0.state().collecting -= 1;
    }
}

/// An object on its way into limbo, which it reaches even if this is cut short: its journal slot then only once nothing can be written
/// to it any more.
struct Retiring<'a> {
    heap: &'a Heap,
    op: &'a Op,
    retired: Option<Retired>,
}

impl Retiring<'_> {
    /// It is about to be written down there.
    fn takes(&mut self, slot: GlobalAddr) {
        if let Some(retired) = &mut self.retired {
            retired.slot = Some(slot);
        }
    }

    fn end(mut self) {
        if let Some(retired) = self.retired.take() {
            self.heap.enter_limbo(retired);
        }
    }
}

impl Drop for Retiring<'_> {
    fn drop(&mut self) {
        if let Some(retired) = self.retired.take() {
            let server = retired.addr.server();
            self.heap.when_quiet(self.op.endpoint(), server, |heap| heap.enter_limbo(retired));
        }
    }
}

struct Retired {
    addr: GlobalAddr,
    class: Class,
    slot: Option<GlobalAddr>,
}

/// What a heap did.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct HeapCounts {
    /// Objects handed out.
    pub allocated: u64,
    /// Objects retired.
    pub retired: u64,
    /// Objects that were retired and came back.
    pub reused: u64,
    /// Objects that may have been lost to an unknown outcome.
    pub doubtful: u64,
    /// Objects that were retired without a journal slot, and would leak in a crash.
    pub unjournaled: u64,
}

impl Heap {
    /// The heap of a session.
    pub fn new(session: &Session, sabotage: Sabotage) -> Self {
        let slots = Slots::of(session, sabotage.pages_only);
        let state = Mutex::new(State { slots, ..State::default() });
        let heap = Self { inner: Arc::new(Inner { session: session.clone(), sabotage, state }) };
        heap.flush_with(session);
        heap
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Only plain moves happen under the lock, so a panic elsewhere left nothing half-done.
        self.inner.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What it did so far.
    pub fn counts(&self) -> HeapCounts {
        self.state().counts
    }

    /// How many free objects it has in its hands: what a crash would leak now, beside what tasks are just claiming or linking.
    pub fn in_hands(&self) -> usize {
        self.state().pools.values().map(|pool| pool.free.len() + pool.returning.len()).sum()
    }

    /// A new object on `server`. Its bytes are whatever they were. The pool may be full of what was retired: operations on an index wait for that.
    pub async fn allocate(&self, op: &Op, server: ServerId, class: Class) -> Result<GlobalAddr, FabricError> {
        for _ in 0..MAX_CLAIMS {
            if let Some(addr) = self.take_free(server, class) {
                return Ok(addr);
            }
            self.collect_if_due(op.endpoint()).await?;
            if let Some(addr) = self.take_free(server, class) {
                return Ok(addr);
            }
            if self.is_asking(server, class) {
                // Whoever asks has looked through all chunks in vain. Hundreds of operations under way would each look again.
                marks::hit("chunk_awaited");
                self.wait_for_asker(op, (server, class)).await;
                continue;
            }
            if self.has_chunks(server, class) {
                let (heap, endpoint) = (self.clone(), op.endpoint().clone());
                let claim = async move { heap.claim_from_own_chunks(&endpoint.op(), server, class).await };
                if op.endpoint().see_through(claim).await? {
                    continue;
                }
            }
            if self.has_unverified(server, class) {
                let (heap, endpoint) = (self.clone(), op.endpoint().clone());
                let verify = async move { heap.verify_chunks(&endpoint.op(), (server, class)).await };
                op.endpoint().see_through(verify).await?;
                continue;
            }
            // One asks for all: of hundreds of operations under way, each would be given a chunk.
            let Some(asking) = Asking::begin(self, (server, class)) else {
                self.wait_for_asker(op, (server, class)).await;
                continue;
            };
            let endpoint = op.endpoint().clone();
            op.endpoint().see_through(async move { asking.ask(&endpoint).await }).await?;
        }
        Err(FabricError::RetriesExhausted { what: "allocating an object", attempts: MAX_CLAIMS })
    }

    /// Sees to it that an allocation on `server` finds an object, also where chunks of other classes have to be asked for. For those who cannot
    /// begin anew; no operation of theirs may be under way.
    pub async fn provide(
        &self,
        endpoint: &Endpoint,
        server: ServerId,
        class: Class,
    ) -> Result<(), IndexError> {
        let mut waits = Waits::default();
        loop {
            let allocated = self.allocate(&endpoint.op(), server, class).await;
            let error = match allocated {
                Ok(addr) => {
                    self.free_unpublished(class, addr);
                    return Ok(());
                }
                Err(error) => IndexError::from(error),
            };
            if !Box::pin(self.come_again(endpoint, &error, &mut waits)).await? {
                return Err(error);
            }
        }
    }

    /// Waits until whoever asks for a chunk has got it, or failed; a bounded time.
    async fn wait_for_asker(&self, op: &Op, of: (ServerId, Class)) {
        for _ in 0..MAX_CHUNK_WAITS {
            if !self.is_asking(of.0, of.1) {
                return;
            }
            op.endpoint().sleep(CHUNK_WAIT_NS).await;
        }
    }

    /// Waits for what an operation, which has ended, did not have: memory that its session has retired, its turn in a pipeline, or leave to
    /// move a long value. Whether it should begin anew.
    pub(crate) async fn come_again(
        &self,
        endpoint: &Endpoint,
        error: &IndexError,
        waits: &mut Waits,
    ) -> Result<bool, FabricError> {
        match error {
            IndexError::PoolFull(_) => {
                // What is before it in its pipeline may free what it needs, so it waits anew in its turn.
                let has_turn = endpoint.company().has_turn();
                if has_turn && !waits.in_turn {
                    *waits = Waits { in_turn: true, ..Waits::default() };
                }
                let is_room = self.make_room(endpoint, waits).await?;
                if !is_room && !has_turn {
                    endpoint.company().turn().await;
                }
                Ok(is_room || !has_turn)
            }
            IndexError::Contended { what: TURN, .. } => {
                marks::hit("turn_awaited");
                endpoint.company().turn().await;
                Ok(true)
            }
            IndexError::Contended { what: LONG_VALUE, .. } => {
                marks::hit("long_value_awaited");
                endpoint.company().freedom().await;
                Ok(true)
            }
            _ => Ok(false),
        }
    }

    /// After an operation that found the pool full and has ended, since a pin holds the epochs up: waits until what the session has retired
    /// by now is free, a bounded time and so many times. Whether anything came free since the operation began, and it may be tried again.
    async fn make_room(&self, endpoint: &Endpoint, waits: &mut Waits) -> Result<bool, FabricError> {
        if waits.count == MAX_ROOM_WAITS {
            return self.reclaim_for(endpoint, waits).await;
        }
        waits.count += 1;
        let (mark, mut reused) = {
            let state = self.state();
            (state.limbo.mark(), state.counts.reused)
        };
        marks::hit("room_awaited");
        let mut wait_ns = WAIT_NS;
        for _ in 0..MAX_WAITS {
            self.collect_if_due(endpoint).await?;
            {
                let state = self.state();
                // What a collection has taken out of limbo and not yet put among the free ones is in neither.
                if state.limbo.is_past(mark) && (state.collecting == 0 || state.counts.reused > reused) {
                    break;
                }
            }
            endpoint.sleep(wait_ns).await;
            wait_ns = LONGEST_WAIT_NS.min(wait_ns * 2);
        }
        reused = self.state().counts.reused;
        // What came free while the operation was under way for the first time nobody has counted.
        if waits.reused.replace(reused).is_none_or(|before| reused > before) {
            return Ok(true);
        }
        self.reclaim_for(endpoint, waits).await
    }

    fn is_asking(&self, server: ServerId, class: Class) -> bool {
        self.state().pools.get(&(server, class)).is_some_and(|pool| pool.is_asking)
    }

    fn has_chunks(&self, server: ServerId, class: Class) -> bool {
        self.state().pools.get(&(server, class)).is_some_and(|pool| !pool.chunks.is_empty())
    }

    fn has_free(&self, server: ServerId, class: Class) -> bool {
        self.state().pools.get(&(server, class)).is_some_and(|pool| !pool.free.is_empty())
    }

    fn take_free(&self, server: ServerId, class: Class) -> Option<GlobalAddr> {
        self.take_free_with_next(server, class).map(|(addr, _)| addr)
    }

    /// A free object, and the one that comes after it.
    fn take_free_with_next(
        &self,
        server: ServerId,
        class: Class,
    ) -> Option<(GlobalAddr, Option<GlobalAddr>)> {
        let mut state = self.state();
        let free = &mut state.pools.get_mut(&(server, class))?.free;
        let (addr, was_used) = free.pop()?;
        let next = free.last().map(|(next, _)| *next);
        state.counts.allocated += 1;
        if was_used {
            marks::hit("object_reused");
        }
        Some((addr, next))
    }

    /// Takes back an object that was never linked, and that nothing is going to be written to: nobody else has its address. See
    /// [`Room`] for one that something may be.
    pub fn free_unpublished(&self, class: Class, addr: GlobalAddr) {
        self.put_back(class, addr, false);
    }

    /// Puts an object among the free ones, or among those that are given back, if its chunk may be drained by now.
    fn put_back(&self, class: Class, addr: GlobalAddr, was_used: bool) {
        let chunk = self.chunk_of(addr).0.offset();
        let mut state = self.state();
        let pool = state.pools.entry((addr.server(), class)).or_default();
        if pool.known.contains(&chunk) || self.inner.sabotage.ignore_flush {
            pool.free.push((addr, was_used));
        } else {
            pool.returning.push(addr);
        }
    }

    /// Notes that an object may be lost: linked and then replaced by others, or never linked.
    pub fn abandon(&self) {
        self.state().counts.doubtful += 1;
    }

    /// Takes back an object that has just been unlinked, once no operation anywhere can still hold its address.
    pub async fn retire(&self, op: &Op, class: Class, addr: GlobalAddr) -> Result<(), FabricError> {
        self.state().counts.retired += 1;
        if self.inner.sabotage.reuse_without_epoch {
            self.wipe(op, class, addr).await?;
            self.put_back(class, addr, true);
            return Ok(());
        }
        let mut retiring = Retiring { heap: self, op, retired: Some(Retired { addr, class, slot: None }) };
        if let Some(slot) = self.slot_for(op, class.index, addr.server()).await {
            retiring.takes(slot);
            surely::write_word(op, slot, addr.to_raw()).await?;
        }
        retiring.end();
        self.collect_if_due(op.endpoint()).await
    }

    fn enter_limbo(&self, retired: Retired) {
        let mut state = self.state();
        let has_slot = retired.slot.is_some();
        if !has_slot {
            state.counts.unjournaled += 1;
            marks::hit("retired_without_journal");
        }
        state.retired_since += if has_slot { 1 } else { COLLECT_AT };
        state.limbo.push(retired);
    }

    /// Does something once nothing can land any more of what was posted to a server and given up.
    fn when_quiet(&self, endpoint: &Endpoint, server: ServerId, then: impl FnOnce(&Self) + 'static) {
        if !endpoint.is_in_doubt(server) {
            return then(self);
        }
        marks::hit("parked");
        let (heap, on) = (self.clone(), endpoint.clone());
        endpoint.settle(async move {
            // If this never comes about, the session has come to its end.
            if on.quiet(server).await.is_ok() {
                then(&heap);
            }
        });
    }

    async fn wipe(&self, op: &Op, class: Class, addr: GlobalAddr) -> Result<(), FabricError> {
        if self.inner.sabotage.zero_freed {
            surely::write(op, addr, &vec![0; usize::try_from(class.object_bytes).unwrap_or(0)]).await?;
        }
        Ok(())
    }

    /// Frees what was retired and is safe by now, if the epochs have not been asked for just now.
    async fn collect_if_due(&self, endpoint: &Endpoint) -> Result<(), FabricError> {
        {
            let mut state = self.state();
            let is_due = state.retired_since >= COLLECT_AT || endpoint.now() >= state.next_collection;
            if state.limbo.is_empty() || !is_due {
                return Ok(());
            }
            // Before it is done, so that only one thread does it.
            state.next_collection = endpoint.now() + COLLECT_EVERY_NS;
            state.retired_since = 0;
        }
        let begin = endpoint.now();
        let collected = self.collect(endpoint).await;
        let end = endpoint.now();
        let pause = end.saturating_sub(begin).saturating_mul(COLLECT_EVERY_TIMES).max(COLLECT_EVERY_NS);
        self.state().next_collection = end + pause;
        collected
    }

    /// Frees what was retired and is safe by now. A heartbeat, if anything waits.
    pub async fn collect(&self, endpoint: &Endpoint) -> Result<(), FabricError> {
        {
            let state = self.state();
            if (state.limbo.is_empty() && !state.is_returning()) || state.is_closing {
                return Ok(());
            }
        }
        self.collect_to_the_end(endpoint).await
    }

    async fn collect_to_the_end(&self, endpoint: &Endpoint) -> Result<(), FabricError> {
        let (collecting, on) = (Collecting::begin(self), endpoint.clone());
        endpoint.see_through(async move { collecting.0.collect_now(&on, false).await }).await
    }

    async fn collect_now(&self, endpoint: &Endpoint, is_urgent: bool) -> Result<(), FabricError> {
        let waiting = {
            let state = self.state();
            let is_urgent = is_urgent || state.limbo.len() >= URGENT_AT;
            (!state.limbo.is_empty()).then(|| (state.limbo.mark(), is_urgent))
        };
        let Some((mark, is_urgent)) = waiting else {
            let is_returning = self.state().is_returning();
            return if is_returning { self.give_back_surplus(&endpoint.op()).await } else { Ok(()) };
        };
        // What is there now was unlinked before the heartbeat that follows; what comes later waits for the next one.
        let stamp = self.inner.session.retire_stamp(endpoint, is_urgent).await?;
        self.state().limbo.stamp(mark, stamp);
        while self.free_some(endpoint).await? {}
        Ok(())
    }

    /// Frees some of what was retired and is safe; whether there was anything. Not all at once, since its pin holds the epochs back that
    /// the others wait for.
    async fn free_some(&self, endpoint: &Endpoint) -> Result<bool, FabricError> {
        // Before anything is taken out: its pin tells a drop that objects are in our hands. But not one that the session has learned of:
        // that does not wait for who begins now, so what is the dropped index's is left to who clears it.
        let op = endpoint.op();
        let dropping = self.inner.session.dropping();
        let stays = |it: &Retired| dropping.contains(&it.class.index);
        let safe =
            self.state().limbo.take_safe(FREE_AT_A_TIME, |stamp| self.inner.session.is_safe(stamp), stays);
        if safe.is_empty() {
            return Ok(false);
        }
        let cleared = async {
            for (retired, _) in &safe {
                self.wipe(&op, retired.class, retired.addr).await?;
            }
            let slots: Vec<_> =
                safe.iter().filter_map(|(retired, _)| retired.slot).map(|slot| (slot, 0)).collect();
            // The slots first: from here on a crash leaks the objects rather than freeing them twice.
            surely::write_words(&op, &slots).await
        };
        if let Err(error) = cleared.await {
            self.put_back_when_quiet(endpoint, safe);
            return Err(error);
        }
        for (retired, _) in safe {
            self.forget_slot(&retired);
            self.put_back(retired.class, retired.addr, true);
        }
        // What is in our hands is lost if we die.
        self.give_back_surplus(&op).await?;
        Ok(true)
    }

    /// Puts back into limbo what could not be freed. Its slots are not to be cleared by somebody else, and used again, while our WRITEs may
    /// land.
    fn put_back_when_quiet(&self, endpoint: &Endpoint, objects: Vec<(Retired, RetireStamp)>) {
        let (doubtful, rest): (Vec<_>, Vec<_>) =
            objects.into_iter().partition(|(retired, _)| endpoint.is_in_doubt(retired.addr.server()));
        self.state().limbo.put_back(rest.into_iter());
        for one in doubtful {
            let server = one.0.addr.server();
            self.when_quiet(endpoint, server, move |heap| {
                heap.state().limbo.put_back(std::iter::once(one));
            });
        }
    }

    /// The journal slot of a retired object, which has been cleared, may be used again.
    fn forget_slot(&self, retired: &Retired) {
        let mut state = self.state();
        if let Some(slot) = retired.slot {
            state.slots.give(retired.class.index, slot);
        }
        state.counts.reused += 1;
    }

    /// Claims free bits of the chunks that the session owns; true if it got some.
    async fn claim_from_own_chunks(
        &self,
        op: &Op,
        server: ServerId,
        class: Class,
    ) -> Result<bool, FabricError> {
        let (chunks, cursor) = {
            let mut state = self.state();
            let pool = state.pools.entry((server, class)).or_default();
            (pool.chunks.clone(), pool.cursor)
        };
        for n in 0..chunks.len() {
            let at = (cursor + n) % chunks.len();
            if self.claim_from(op, server, class, chunks[at]).await? {
                self.state().pools.entry((server, class)).or_default().cursor = at;
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn layout(&self, server: ServerId, class: Class) -> Result<ObjectChunk, FabricError> {
        ObjectChunk::new(self.chunk_bytes(server), class.object_bytes).ok_or_else(|| {
            let why = format!("no object of {} bytes fits a chunk", class.object_bytes);
            FabricError::Call(CallError::Control(ControlError::BadRequest { why }))
        })
    }

    async fn claim_from(
        &self,
        op: &Op,
        server: ServerId,
        class: Class,
        chunk: u64,
    ) -> Result<bool, FabricError> {
        let words = self.layout(server, class)?.bitmap_words();
        let at = (server, class, GlobalAddr::new(server, RegionId::MAIN, chunk));
        let from = self.state().pools.entry((server, class)).or_default().word;
        // Bitmaps of small objects are long. Most often there is something free where something was free the last time, or behind that.
        let near = from.min(words)..(from + NEAR_WORDS).min(words);
        if near.end < words && self.claim_in(op, at, near.clone(), near.start).await? {
            return Ok(true);
        }
        self.claim_in(op, at, 0..words, near.end % words.max(1)).await
    }

    /// Claims free bits in some words of a chunk's bitmap, the first that there are from word `first` on; true if it got some.
    async fn claim_in(
        &self,
        op: &Op,
        (server, class, chunk): (ServerId, Class, GlobalAddr),
        words: Range<u64>,
        first: u64,
    ) -> Result<bool, FabricError> {
        let layout = self.layout(server, class)?;
        let bitmap = chunk.add(ObjectChunk::BITMAP_OFFSET);
        let len = usize::try_from((words.end - words.start) * 8).unwrap_or(0);
        let claim = self.state().pools.entry((server, class)).or_default().claim(class);
        let read = surely::read(op, bitmap.add(words.start * 8), len).await?;
        for word in (first..words.end).chain(words.start..first) {
            let seen = read.word(usize::try_from((word - words.start) * 8).unwrap_or(0));
            if seen == u64::MAX {
                continue;
            }
            let free = !seen & layout.word_mask(word);
            if free == 0 {
                continue;
            }
            let wanted = lowest_bits(free, claim);
            match op.cas(bitmap.add(word * 8), seen, seen | wanted).await {
                Ok(before) if before == seen => {
                    let mut state = self.state();
                    let pool = state.pools.entry((server, class)).or_default();
                    pool.word = word;
                    pool.claimed = pool.claimed.saturating_add(wanted.count_ones());
                    let is_known = pool.known.contains(&chunk.offset());
                    for bit in (0..64).filter(|bit| wanted >> bit & 1 == 1) {
                        let object = u32::try_from(word * 64 + bit).unwrap_or(0);
                        let addr = chunk.add(layout.object_offset(object));
                        if is_known {
                            pool.free.push((addr, false));
                        } else {
                            // There was a flush meanwhile, and the chunk may be drained by now.
                            pool.returning.push(addr);
                        }
                    }
                    return Ok(true);
                }
                // Somebody gave objects back meanwhile: take the next word, or come again.
                Ok(_) => marks::hit("claim_lost"),
                Err(error) => {
                    // The bits may be ours now without our knowing which: they are lost.
                    surely::reconnected(op, error).await?;
                    self.state().counts.doubtful += u64::from(wanted.count_ones());
                }
            }
        }
        Ok(false)
    }

    async fn new_chunk(&self, op: &Op, server: ServerId, class: Class) -> Result<(), FabricError> {
        self.layout(server, class)?;
        let request = Request::AllocChunks {
            index: class.index,
            class: class.class,
            object_bytes: class.object_bytes,
            count: 1,
            flushed_through: self.inner.session.flushed_through(),
        };
        // A chunk that is answered before a flush is not known after it.
        let flushes = self.state().flushes;
        let answer = op.control(server, &request).await;
        if matches!(answer.as_ref().map_err(FabricError::control), Err(Some(ControlError::PoolFull { .. }))) {
            self.state().reclaim.note_lack(server, class);
        }
        match answer? {
            Reply::Chunks { offset, inherited } => {
                if inherited {
                    marks::hit("chunk_inherited");
                }
                let mut state = self.state();
                let is_behind = state.flushes != flushes;
                let pool = state.pools.entry((server, class)).or_default();
                if is_behind {
                    pool.unverified.push(offset);
                    return Ok(());
                }
                // It may be one that the session had before somebody else asked for room.
                pool.turn_to(offset);
                Ok(())
            }
            _ => Err(CallError::Malformed.into()),
        }
    }

    /// Clears the bits of free objects beyond what a session keeps of a class.
    async fn give_back_surplus(&self, op: &Op) -> Result<(), FabricError> {
        let surplus = self.take_free_beyond(ClassPool::keeps);
        self.give_back(op, surplus).await
    }

    /// Takes out the free objects beyond what is kept of a class. What is of an index that is being dropped is not given back: its chunks may be
    /// another's any moment.
    fn take_free_beyond(&self, keeps: impl Fn(&ClassPool, Class) -> usize) -> Objects {
        let dropping = self.inner.session.dropping();
        let mut taken = Vec::new();
        for ((_, class), pool) in &mut self.state().pools {
            if !dropping.contains(&class.index) {
                let keep = pool.free.len().min(keeps(pool, *class));
                taken.extend(pool.free.drain(keep..).map(|(addr, _)| (*class, addr)));
                taken.extend(pool.returning.drain(..).map(|addr| (*class, addr)));
            }
        }
        taken
    }

    async fn give_back(&self, op: &Op, mut objects: Objects) -> Result<(), FabricError> {
        // In order, so that what is done does not depend on the order of a hash map.
        objects.sort_unstable();
        let mut words: Vec<(GlobalAddr, u64, Objects)> = Vec::new();
        {
            let mut state = self.state();
            for (class, _) in &objects {
                state.reclaim.note_given_back(*class);
            }
        }
        for (class, addr) in objects {
            let Some((word, bit)) = self.bit_of(class, addr) else { continue };
            match words.iter_mut().find(|(at, _, _)| *at == word) {
                Some((_, bits, objects)) => {
                    *bits |= bit;
                    objects.push((class, addr));
                }
                None => words.push((word, bit, vec![(class, addr)])),
            }
        }
        // The bits are set and only we clear them, so subtracting them borrows from nobody.
        let faa = |(word, bits, _): &(GlobalAddr, u64, Objects)| {
            let mut batch = Batch::new(word.server());
            batch.faa(*word, bits.wrapping_neg());
            batch
        };
        let mut ended = Ok(());
        let results = op.submit_all(words.iter().map(faa)).await;
        for ((_, bits, objects), result) in words.into_iter().zip(results) {
            let Err(failure) = result else { continue };
            let error = failure.error;
            if error.is_unknown() {
                self.state().counts.doubtful += u64::from(bits.count_ones());
            } else {
                // Nothing was posted: they are in our hands still.
                for (class, addr) in objects {
                    self.put_back(class, addr, true);
                }
            }
            ended = ended.and(surely::reconnected(op, error).await);
        }
        ended
    }

    /// The bitmap word and the bit in it that stand for an object.
    fn bit_of(&self, class: Class, addr: GlobalAddr) -> Option<(GlobalAddr, u64)> {
        let (chunk, within) = self.chunk_of(addr);
        let object = u64::from(self.layout(addr.server(), class).ok()?.object_at(within)?);
        Some((chunk.add(ObjectChunk::BITMAP_OFFSET + object / 64 * 8), 1 << (object % 64)))
    }

    /// Servers of different sizes have chunks of different sizes.
    fn chunk_bytes(&self, server: ServerId) -> u64 {
        self.inner.session.cluster().view().chunk_bytes(server)
    }

    /// The chunk that an object lies in, and where in it.
    fn chunk_of(&self, addr: GlobalAddr) -> (GlobalAddr, u64) {
        let within = (addr.offset() - MAIN_BASE) % self.chunk_bytes(addr.server()).max(1);
        (GlobalAddr::new(addr.server(), RegionId::MAIN, addr.offset() - within), within)
    }

    /// The class of the chunk that `addr` lies in, by the chunk's header.
    async fn class_at(&self, op: &Op, addr: GlobalAddr) -> Result<Option<Class>, FabricError> {
        if addr.offset() < MAIN_BASE {
            return Ok(None);
        }
        let header = surely::read(op, self.chunk_of(addr).0, 24).await?;
        let low32 = |word: u64| u32::try_from(word & 0xffff_ffff).unwrap_or(0);
        let (index, class) = (low32(header.word(8)), header.word(8) >> 32 & 0xffff);
        let class =
            Class { index, class: u16::try_from(class).unwrap_or(0), object_bytes: low32(header.word(16)) };
        Ok((header.word(0) == ObjectChunk::MAGIC && self.layout(addr.server(), class).is_ok())
            .then_some(class))
    }

    /// After a flush was asked for and the operations that began before have ended: gives back what was free in the session's hands, and
    /// clears what it has of indexes that are being dropped: free objects, chunks, retired objects and their slots in the journal. Only
    /// then does the session say that it has flushed.
    pub async fn clear_flushed(&self, endpoint: &Endpoint) -> Result<(), FabricError> {
        // One at a time: a slot that one has cleared may be in use again before another clears it.
        let Some(_clearing) = Clearing::begin(self) else { return Ok(()) };
        let Some(work) = self.inner.session.to_clear() else { return Ok(()) };
        let op = endpoint.op();
        self.give_back_surplus(&op).await?;
        let slots: Vec<_> = {
            let mut state = self.state();
            state.pools.retain(|(_, class), _| !work.indexes.contains(&class.index));
            let of_dropped = |retired: &Retired| work.indexes.contains(&retired.class.index);
            state
                .limbo
                .iter()
                .filter(|retired| of_dropped(retired))
                .filter_map(|retired| retired.slot)
                .map(|slot| (slot, 0))
                .collect()
        };
        surely::write_words(&op, &slots).await?;
        let gone = self.state().limbo.take_where(|retired| work.indexes.contains(&retired.class.index));
        for retired in gone {
            self.forget_slot(&retired);
        }
        self.forget_pages(&op, &work.indexes).await?;
        if !work.indexes.is_empty() {
            marks::hit("dropped_index_cleared");
        }
        self.inner.session.cleared(&work);
        Ok(())
    }

    /// How many retired objects wait.
    pub fn retired(&self) -> usize {
        self.state().limbo.len()
    }

    /// Gives everything back before the session ends: waits for retired objects to be safe (a bounded time), then clears the
    /// bits of all free ones. Returns how many retired objects had to be left.
    pub async fn close(&self, endpoint: &Endpoint) -> Result<usize, FabricError> {
        self.state().is_closing = true;
        let left = self.give_everything_back(endpoint).await;
        self.state().is_closing = false;
        left
    }

    async fn give_everything_back(&self, endpoint: &Endpoint) -> Result<usize, FabricError> {
        for wait in 0..MAX_LEAVING_WAITS {
            self.collect_to_the_end(endpoint).await?;
            self.clear_flushed(endpoint).await?;
            {
                let state = self.state();
                if state.limbo.is_empty() && state.collecting == 0 {
                    break;
                }
            }
            endpoint.sleep(LONGEST_LEAVING_WAIT_NS.min(WAIT_NS << wait.min(20))).await;
        }
        let op = endpoint.op();
        if self.state().limbo.is_empty() {
            self.free_pages(&op).await?;
        }
        let free = self.take_free_beyond(|_, _| 0);
        self.give_back(&op, free).await?;
        let state = self.state();
        Ok(state.limbo.len() + state.collecting as usize)
    }
}

impl fmt::Debug for Heap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Heap({:?})", self.inner.session)
    }
}

/// The lowest `count` set bits.
fn lowest_bits(bits: u64, count: u32) -> u64 {
    let mut rest = bits;
    for _ in 0..count {
        rest &= rest.wrapping_sub(1);
    }
    bits & !rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lowest_bits_takes_that_many() {
        assert_eq!(lowest_bits(0b1011_0100, 2), 0b0001_0100);
        assert_eq!(lowest_bits(0b1, 16), 0b1);
        assert_eq!(lowest_bits(0, 3), 0);
        assert_eq!(lowest_bits(u64::MAX, 64), u64::MAX);
    }

    #[test]
    fn few_long_objects_are_claimed_and_kept() {
        let of = |object_bytes, claimed| {
            let class = Class { index: 1, class: 1, object_bytes };
            let pool = ClassPool { claimed, ..ClassPool::default() };
            (pool.claim(class), pool.keeps(class))
        };
        assert_eq!((of(64, 0), of(64, 1 << 20)), ((8, 16), (64, 64)));
        assert_eq!((of(4096, 0), of(4096, 1 << 20)), ((8, 16), (8, 16)));
        assert_eq!((of(30 << 10, 0), of(30 << 10, 1 << 20)), ((2, 2), (2, 2)));
        assert_eq!((of(1 << 20, 0), of(1 << 20, 1 << 20)), ((1, 0), (1, 0)));
    }
}
