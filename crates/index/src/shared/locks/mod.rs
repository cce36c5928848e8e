//! Hierarchical on-chip locks (Sherman, section 4.3): a table of remote locks on each server, and a local queue in front of it.
//!
//! A node's lock is on the node's server, found by a hash of its address; several nodes may share one. By default a lock is
//! a word of its own ([`LockWord`]); as an ablation four 16-bit locks share a word, as in the paper.
//!
//! 0. **In order**: an operation of a pipeline waits until those before it have ended ([`Op::turn`]). All that engines change, they change
//!    under a lock, so effects come in that order.
//! 1. **Acquire**: wait for one's turn in the local queue; if the lock comes by handover, that is all. Else CAS the lock from 0 until
//!    it is ours, with the READ of the node behind it in the same batch (`lock_and_read`). A failed CAS changes nothing.
//! 2. **Release**: the write-back and, behind it in the same batch, the WRITE of 0 (`combine`). Locks that share a word are
//!    released by masked CAS: a plain WRITE could be undone by a neighbour's (contract, rule 4).
//! 3. **Handover**: the write-back alone; when it has *completed*, the next in the queue gets the lock. (The paper's Figure 6 hands
//!    over first; the two threads have different connections, so the next could read what the last has not yet written.)
//! 4. A lock that does not come free for long: its owner is recovered, if its lease has run out ([`recover`]).
//!
//! # Invariants
//!
//! - Who holds a lock waits for nothing but the verbs by which it reads and writes what the lock protects. Not for a second lock
//!   ([`Locks::try_lock`] gives up), not for memory, room for an intent, a splitter or a call: whoever lacks one of these gives the lock back, gets
//!   it, and comes again.
//! - A lock that was taken, or perhaps was, is given back, whatever becomes of the operation: [`held`].
//! - What [`Locks::finish`] was told to write is written, though its operation may be gone by then; or the session is fenced.

mod held;
mod local;
mod recover;

use super::lock::{LockWord, Patience};
use super::surely;
use crate::Pool;
use crate::api::IndexError;
use farwood_fabric::clock::Nanos;
use farwood_fabric::verb::Verb;
use farwood_fabric::{Batch, Buf, FabricError, GlobalAddr, Op, RegionId, ServerId, SessionId, marks};
pub(crate) use held::{Behind, Commit, Held, settle_word};
use held::{Finishing, Grip};
use local::{LocalLocks, LockKey};
use smallvec::SmallVec;
use std::iter;
use std::ops::Deref;
use std::sync::Arc;

/// How often a lock is tried for before the operation fails. With the waits below this is far beyond a lease.
const MAX_ATTEMPTS: u32 = 1_000_000;
/// From so many attempts on, waits lie between them.
const SPINS: u32 = 2_000;
const WAIT_NS: Nanos = 2_000;
/// How often a batch is repeated through lost completions.
const MAX_LOST: u32 = 64;
/// What an operation lacks that is to take effect after others, which take long.
pub(crate) const TURN: &str = "its turn";
/// The word of a lock that nobody holds.
const FREE: &[u8] = &[0; 8];
/// Locks in a word, if they share one.
const LANES: u64 = 4;

/// How locks are taken and given back: Sherman's techniques (sections 4.3 and 4.5), and one step beyond them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a technique of its own")]
pub(crate) struct Manner {
    /// Write-back and unlock go out as one batch.
    pub(crate) combine: bool,
    /// Threads queue for a lock among themselves; only the first asks for it remotely.
    pub(crate) hierarchical: bool,
    /// Whoever is done hands the lock to the next in that queue.
    pub(crate) handover: bool,
    /// The lock is taken and the object read in one batch.
    pub(crate) lock_and_read: bool,
    /// It is given back by an FAA, not by a WRITE.
    pub(crate) faa_release: bool,
}

/// Mistakes with locks. They test the tests.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a mistake of its own")]
pub(crate) struct Mistakes {
    /// The lock is released before what it protects is written.
    pub(crate) unlock_before_write_back: bool,
    /// The release goes out in front of the write-back, in the same batch.
    pub(crate) unlock_inside_payload: bool,
    /// The lock is handed over while the write-back is under way.
    pub(crate) handover_before_completion: bool,
    /// A masked lock is released by a plain WRITE.
    pub(crate) plain_masked_release: bool,
    /// An operation that is dropped keeps its lock.
    pub(crate) forget_when_dropped: bool,
}

/// The locks of an index, as one compute server has them. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Locks {
    core: Arc<Core>,
}

#[derive(Debug)]
pub(crate) struct Core {
    pool: Pool,
    table: LockTable,
    local: LocalLocks,
    manner: Manner,
    mistakes: Mistakes,
}

impl Deref for Locks {
    type Target = Core;

    fn deref(&self) -> &Core {
        &self.core
    }
}

/// Where the locks of an index are.
#[derive(Clone, Debug)]
pub(crate) struct LockTable {
    /// The first word on each server.
    bases: Vec<GlobalAddr>,
    /// Locks on each server.
    count: u64,
    /// How far apart two words with locks are.
    stride: u64,
    masked: bool,
}

/// One lock: a word, or 16 bits of one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct LockAt {
    pub(crate) addr: GlobalAddr,
    lane: u32,
    pub(crate) mask: u64,
}

/// A WRITE that belongs to what a lock protects.
#[derive(Clone, Debug)]
pub(crate) struct Write {
    pub(crate) addr: GlobalAddr,
    pub(crate) bytes: SmallVec<[u8; 32]>,
}

impl LockTable {
    /// In lock memory, which all indexes of a pool share: locks of a word each have its first half, those that share words the
    /// second, since a word that is released by a plain WRITE must be one lock's alone.
    pub(crate) fn in_lock_memory(servers: &[ServerId], bytes: u64, most: u64, masked: bool) -> Self {
        let half = bytes / 16 * 8;
        let from = if masked { half } else { 0 };
        let bases = servers.iter().map(|server| GlobalAddr::new(*server, RegionId::LOCK, from)).collect();
        Self::new(bases, half, 8, most, masked)
    }

    /// All of lock memory, whichever indexes have locks there.
    pub(crate) fn all_in_lock_memory(servers: &[ServerId], bytes: u64) -> Vec<Self> {
        [false, true].map(|masked| Self::in_lock_memory(servers, bytes, u64::MAX, masked)).into()
    }

    /// In tables of so many bytes. In main memory locks are as far apart as in FG, which has them in its nodes: a NIC tells
    /// atomics apart by the low bits of their addresses alone (section 3.2.2).
    pub(crate) fn new(bases: Vec<GlobalAddr>, bytes: u64, stride: u64, most: u64, masked: bool) -> Self {
        let count = (bytes / stride).saturating_mul(if masked { LANES } else { 1 });
        Self { bases, count: count.min(most).max(1), stride, masked }
    }

    /// Words with locks on each server.
    fn words(&self) -> u64 {
        self.count.div_ceil(if self.masked { LANES } else { 1 })
    }

    /// The lock of a node.
    pub(crate) fn lock_of(&self, node: GlobalAddr) -> LockAt {
        // Nodes lie at regular distances: mix, so that neighbours do not share a lock for that.
        let hash = (node.offset() >> 3).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
        self.nth(node.server(), hash)
    }

    /// A server's lock of this number, of as many as there are.
    pub(crate) fn nth(&self, server: ServerId, number: u64) -> LockAt {
        let number = number % self.count;
        // What leads to a server that there is not comes from memory that was torn; the verb that asks for its lock says so.
        let nowhere = GlobalAddr::new(server, RegionId::LOCK, 0);
        let base = self.bases.get(server.index()).copied().unwrap_or(nowhere);
        if !self.masked {
            return LockAt { addr: base.add(number * self.stride), lane: 0, mask: u64::MAX };
        }
        let lane = u32::try_from(number % LANES).unwrap_or(0);
        LockAt { addr: base.add(number / LANES * self.stride), lane, mask: 0xffff << (16 * lane) }
    }
}

impl LockAt {
    fn key(self) -> LockKey {
        (self.addr.to_raw(), self.lane)
    }

    /// The owner, as the word says.
    pub(crate) fn owner(self, word: u64) -> SessionId {
        if self.mask == u64::MAX {
            return LockWord::from_raw(word).owner;
        }
        SessionId::new(u16::try_from((word & self.mask) >> (16 * self.lane)).unwrap_or(0))
    }

    fn swap(self, expected: u64, desired: u64) -> Verb {
        let (addr, mask) = (self.addr, self.mask);
        if mask == u64::MAX {
            return Verb::Cas { addr, expected, desired };
        }
        Verb::MaskedCas { addr, compare: expected, compare_mask: mask, swap: desired, swap_mask: mask }
    }
}

impl Locks {
    pub(crate) fn new(pool: &Pool, table: LockTable, manner: Manner, mistakes: Mistakes) -> Self {
        let local = LocalLocks::default();
        Self { core: Arc::new(Core { pool: pool.clone(), table, local, manner, mistakes }) }
    }

    pub(crate) fn table(&self) -> &LockTable {
        &self.table
    }

    /// The bits by which this acquisition shows itself.
    fn fresh_word(&self, at: LockAt, handle: u16) -> u64 {
        let owner = self.pool.session().id();
        if at.mask != u64::MAX {
            return u64::from(owner.get()) << (16 * at.lane);
        }
        let sequence = self.pool.next_acquisition();
        LockWord { owner, sequence, flags: handle }.to_raw()
    }
}

impl Locks {
    /// Takes the lock of an object for one of the session's tasks, and reads the object. `recover` cleans up after a session that
    /// seems to be dead, if it is.
    pub(crate) async fn lock_and_read(
        &self,
        op: &Op,
        task: u16,
        object: (GlobalAddr, usize),
        recover: impl AsyncFn(&Op, SessionId) -> Result<(), IndexError>,
    ) -> Result<(Held, Buf), IndexError> {
        let read = self.manner.lock_and_read.then_some(object);
        match self.acquire(op, task, (self.table.lock_of(object.0), read), recover).await? {
            (held, Some(buf)) => Ok((held, buf)),
            (held, None) => self.read_under(op, held, object).await,
        }
    }

    /// Takes a lock, from the queue or remotely; and brings what was read behind it, if anything.
    pub(crate) async fn acquire(
        &self,
        op: &Op,
        task: u16,
        (at, read): (LockAt, Option<(GlobalAddr, usize)>),
        recover: impl AsyncFn(&Op, SessionId) -> Result<(), IndexError>,
    ) -> Result<(Held, Option<Buf>), IndexError> {
        if !op.turn().await {
            return Err(IndexError::Contended { what: TURN, attempts: 0 });
        }
        let endpoint = op.endpoint();
        let mut held = Held::nothing(self, endpoint, at);
        if self.manner.hierarchical {
            let left = |word| drop(Held::handed(self, endpoint, at, word));
            let handed = self.local.acquire(at.key(), left).await;
            held.has_turn = true;
            if let Some(word) = handed {
                marks::hit("handover");
                (held.word, held.grip) = (word, Grip::Yes);
                return Ok((held, None));
            }
        }
        let buf = self.take(op, task, &mut held, read, recover).await?;
        Ok((held, buf))
    }

    /// Takes the lock of an object if nobody holds it, and reads the object.
    pub(crate) async fn try_lock(
        &self,
        op: &Op,
        task: u16,
        (node, bytes): (GlobalAddr, usize),
    ) -> Result<Option<(Held, Buf)>, IndexError> {
        let at = self.table.lock_of(node);
        if self.manner.hierarchical && !self.local.try_acquire(at.key()) {
            return Ok(None);
        }
        let mut held = Held::nothing(self, op.endpoint(), at);
        held.has_turn = self.manner.hierarchical;
        match self.swap_once(op, task, &mut held, None).await? {
            Ok(_) => self.read_under(op, held, (node, bytes)).await.map(Some),
            Err(_) => Ok(None),
        }
    }

    async fn read_under(
        &self,
        op: &Op,
        held: Held,
        (node, bytes): (GlobalAddr, usize),
    ) -> Result<(Held, Buf), IndexError> {
        // If it cannot be read, the lock is settled in the background.
        let buf = surely::read(op, node, bytes).await?;
        Ok((held, buf))
    }

    /// One attempt: what was read behind the CAS if it succeeded, else the word that was in the way.
    async fn swap_once(
        &self,
        op: &Op,
        task: u16,
        held: &mut Held,
        read: Option<(GlobalAddr, usize)>,
    ) -> Result<Result<Option<Buf>, u64>, IndexError> {
        let at = held.at;
        let mine = self.fresh_word(at, task);
        (held.word, held.grip) = (mine, Grip::Perhaps);
        let swapped = match read {
            Some(read) if at.mask == u64::MAX => {
                op.cas_and_read((at.addr, 0, mine), read).await.map(|(before, buf)| (before, Some(buf)))
            }
            _ => {
                let mut batch = Batch::new(at.addr.server());
                let cas = batch.push(at.swap(0, mine));
                let read = read.map(|(node, bytes)| batch.read(node, bytes));
                let done = op.submit(batch).await.map_err(|failure| failure.error);
                done.map(|mut done| (done.previous(cas), read.map(|read| done.take(read))))
            }
        };
        match swapped {
            Ok((before, buf)) if before & at.mask == 0 => {
                held.grip = Grip::Yes;
                Ok(Ok(buf))
            }
            Ok((before, _)) => {
                held.grip = Grip::No;
                Ok(Err(before & at.mask))
            }
            Err(error) => {
                if !error.is_unknown() {
                    // Nothing was posted.
                    held.grip = Grip::No;
                }
                // Once reconnected the CAS has happened or never will, and the word tells which. If it cannot be asked for, that stays
                // open, and whoever drops `held` leaves it to be settled.
                surely::reconnected(op, error).await?;
                let seen = surely::read_word(op, at.addr).await? & at.mask;
                if seen == mine {
                    marks::hit("lock_taken_unknowingly");
                    held.grip = Grip::Yes;
                    return Ok(Ok(None));
                }
                held.grip = Grip::No;
                Ok(Err(seen))
            }
        }
    }

    /// Takes the lock remotely, however long it takes; and brings what was read behind it, if anything.
    async fn take(
        &self,
        op: &Op,
        task: u16,
        held: &mut Held,
        read: Option<(GlobalAddr, usize)>,
        recover: impl AsyncFn(&Op, SessionId) -> Result<(), IndexError>,
    ) -> Result<Option<Buf>, IndexError> {
        let (session, at) = (self.pool.session(), held.at);
        let limit = self.pool.suspicion_ns();
        let mut patience = Patience::default();
        for attempt in 0..MAX_ATTEMPTS {
            let seen = match self.swap_once(op, task, held, read).await? {
                Ok(buf) => return Ok(buf),
                Err(seen) => seen,
            };
            marks::hit("lost_cas");
            op.count_retry();
            if seen != 0 && patience.is_over(seen, op.endpoint().now(), limit) {
                let owner = at.owner(seen);
                if owner != session.id() {
                    recover(op, owner).await?;
                }
            }
            if attempt >= SPINS {
                op.endpoint().sleep(WAIT_NS + op.endpoint().random_below(WAIT_NS)).await;
            } else if attempt % 16 == 15 {
                // On some transports a verb never waits, and the holder may be a task of this thread.
                op.endpoint().yield_now().await;
            }
        }
        Err(IndexError::Contended { what: "a lock", attempts: MAX_ATTEMPTS })
    }

    /// Gives a lock back.
    pub(crate) fn unlock(&self, op: &Op, held: Held) -> impl Future<Output = Result<(), IndexError>> {
        self.finish(op, held, &[])
    }

    /// Writes back what the lock protects, on its server, and gives the lock back, or on.
    pub(crate) fn finish(
        &self,
        op: &Op,
        held: Held,
        writes: &[Write],
    ) -> impl Future<Output = Result<(), IndexError>> {
        self.finish_with(op, held, writes, Behind::default())
    }

    /// The same; and what follows is seen to if the operation does not live to see it.
    pub(crate) fn finish_with(
        &self,
        op: &Op,
        held: Held,
        writes: &[Write],
        behind: Behind,
    ) -> impl Future<Output = Result<(), IndexError>> {
        // From here on the WRITEs happen, whatever becomes of this future. Not by an `async fn`, whose future has room for its arguments
        // twice, and is moved about on the way of every put.
        let mut finishing = Finishing { held, writes, behind };
        async move {
            let held = &mut finishing.held;
            let (at, word, server) = (held.at, held.word, held.at.addr.server());
            let (manner, mistakes) = (self.manner, self.mistakes);
            if manner.handover && held.has_turn && self.local.wants_handover(at.key()) {
                if mistakes.handover_before_completion && held.hand_over() {
                    return self.write(op, server, writes).await;
                }
                self.write(op, server, writes).await?;
                if held.hand_over() {
                    return Ok(());
                }
                self.write_and_release(op, at, word, &[]).await?;
            } else if mistakes.unlock_before_write_back {
                self.write_and_release(op, at, word, &[]).await?;
                held.is_released();
                self.write(op, server, writes).await?;
            } else if manner.combine || writes.is_empty() {
                self.write_and_release(op, at, word, writes).await?;
            } else {
                self.write(op, server, writes).await?;
                self.write_and_release(op, at, word, &[]).await?;
            }
            // The turn, if there is one, ends with `finishing`.
            held.is_released();
            Ok(())
        }
    }

    /// Carries out WRITEs on any servers, in order, under several locks of which each protects some of them; gives the locks back,
    /// and retires what was unlinked. From here on all of it happens, whatever becomes of this future.
    pub(crate) async fn commit(&self, op: &Op, mut commit: Commit) -> Result<(), IndexError> {
        for writes in held::runs(&commit.writes) {
            self.write(op, writes[0].addr.server(), writes).await?;
        }
        commit.writes.clear();
        let mut released = Ok(());
        while let Some(held) = commit.held.pop() {
            released = released.and(self.unlock(op, held).await);
            if !commit.held.is_empty() {
                marks::hit("commit_unlocked_in_part");
            }
        }
        if let Some((heap, class, addr)) = commit.retire.take() {
            heap.retire(op, class, addr).await.map_err(begun)?;
        }
        released
    }

    /// Carries out WRITEs under a lock that stays held; they can be repeated.
    pub(crate) async fn write(&self, op: &Op, server: ServerId, writes: &[Write]) -> Result<(), IndexError> {
        if writes.is_empty() {
            return Ok(());
        }
        for _ in 0..MAX_LOST {
            match op.write_in_order(server, in_order(writes)).await {
                Ok(()) => return Ok(()),
                Err(error) => surely::reconnected(op, error).await.map_err(begun)?,
            }
            marks::hit("write_repeated");
        }
        Err(IndexError::Unknown)
    }

    /// The same, with the release behind it.
    async fn write_and_release(
        &self,
        op: &Op,
        at: LockAt,
        word: u64,
        writes: &[Write],
    ) -> Result<(), IndexError> {
        for _ in 0..MAX_LOST {
            let server = at.addr.server();
            let written = if self.mistakes.unlock_inside_payload {
                op.write_in_order(server, iter::once((at.addr, FREE)).chain(in_order(writes))).await
            } else if self.manner.faa_release {
                let release = Verb::Faa { addr: at.addr, add: word.wrapping_neg() };
                submit_with(op, server, writes, release).await
            } else if at.mask == u64::MAX {
                op.write_in_order(server, in_order(writes).chain(iter::once((at.addr, FREE)))).await
            } else if self.mistakes.plain_masked_release {
                let lane = at.addr.add(u64::from(2 * at.lane));
                op.write_in_order(server, in_order(writes).chain(iter::once((lane, &FREE[..2])))).await
            } else {
                submit_with(op, server, writes, at.swap(word, 0)).await
            };
            match written {
                Ok(()) => return Ok(()),
                Err(error) => surely::reconnected(op, error).await.map_err(begun)?,
            }
            // Nothing of the batch lands later. The release was its last verb: if it happened, all did.
            if surely::read_word(op, at.addr).await.map_err(begun)? & at.mask != word {
                return Ok(());
            }
            marks::hit("write_repeated");
        }
        Err(IndexError::Unknown)
    }
}

/// An error after the first WRITE of a change: it may have happened.
pub(crate) fn begun(error: FabricError) -> IndexError {
    match IndexError::from(error) {
        IndexError::Fenced => IndexError::Fenced,
        _ => IndexError::Unknown,
    }
}

fn in_order(writes: &[Write]) -> impl Iterator<Item = (GlobalAddr, &[u8])> + Clone {
    writes.iter().map(|write| (write.addr, &write.bytes[..]))
}

/// Carries out WRITEs and, behind them, an atomic.
async fn submit_with(op: &Op, server: ServerId, writes: &[Write], release: Verb) -> Result<(), FabricError> {
    let mut batch = Batch::new(server);
    for (addr, bytes) in in_order(writes) {
        op.endpoint().add_write(&mut batch, addr, bytes);
    }
    batch.push(release);
    op.submit(batch).await.map(drop).map_err(|failure| failure.error)
}
