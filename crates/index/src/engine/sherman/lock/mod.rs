//! Hierarchical on-chip locks (section 4.3): a table of remote locks on each server, and a local queue in front of it.
//!
//! A node's lock is on the node's server, found by a hash of its address; several nodes may share one. By default a lock is
//! a word of its own ([`LockWord`]); as an ablation four 16-bit locks share a word, as in the paper.
//!
//! 1. **Acquire**: wait for one's turn in the local queue; if the lock comes by handover, that is all. Else CAS the lock from 0 until
//!    it is ours, with the READ of the node behind it in the same batch (`lock_and_read`). A failed CAS changes nothing.
//! 2. **Release**: the write-back and, behind it in the same batch, the WRITE of 0 (`combine`). Locks that share a word are
//!    released by masked CAS: a plain WRITE could be undone by a neighbour's (contract, rule 4).
//! 3. **Handover**: the write-back alone; when it has *completed*, the next in the queue gets the lock. (The paper's Figure 6 hands
//!    over first; the two threads have different connections, so the next could read what the last has not yet written.)
//! 4. A lock that does not come free for long: its owner is recovered, if its lease has run out ([`recover`]).
//!
//! Nobody waits for a second lock while holding one: [`Tree::try_lock`] gives up.

pub(super) mod alone;
pub(super) mod local;
pub(super) mod recover;

use super::{Shared, Tree};
use crate::api::IndexError;
use crate::shared::lock::LockWord;
use crate::shared::surely;
use farwood_fabric::clock::Nanos;
use farwood_fabric::verb::{INLINE_BYTES, Verb};
use farwood_fabric::{Batch, Buf, FabricError, GlobalAddr, Op, RegionId, ServerId, SessionId, marks};
use local::{LockKey, Tried};
use smallvec::SmallVec;
use std::sync::Arc;

/// How often a lock is tried for before the operation fails. With the waits below this is far beyond a lease.
const MAX_ATTEMPTS: u32 = 1_000_000;
/// From so many attempts on, waits lie between them.
const SPINS: u32 = 2_000;
const WAIT_NS: Nanos = 2_000;
/// How often a batch is repeated through lost completions.
const MAX_LOST: u32 = 64;
/// Locks in a word, if they share one.
const LANES: u64 = 4;

/// Where the locks of a tree are.
#[derive(Clone, Debug)]
pub(super) struct LockTable {
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
pub(super) struct LockAt {
    pub(super) addr: GlobalAddr,
    lane: u32,
    pub(super) mask: u64,
}

/// A lock that is held.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) at: LockAt,
    /// What its bits are while it is.
    pub(super) word: u64,
    turn: Option<Turn>,
}

/// One's turn in the local queue. It ends when this is dropped, so that an error strands nobody who waits there.
#[derive(Debug)]
struct Turn {
    shared: Arc<Shared>,
    key: LockKey,
    is_over: bool,
}

impl Turn {
    /// Hands the lock to the next in the queue, and the turn with it. Whether there was somebody.
    fn hand_over(&mut self, word: u64) -> bool {
        self.is_over = self.shared.local.hand_over(self.key, word);
        self.is_over
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if !self.is_over {
            self.shared.local.release(self.key);
        }
    }
}

/// A WRITE that belongs to what a lock protects.
#[derive(Clone, Debug)]
pub(super) struct Write {
    pub(super) addr: GlobalAddr,
    pub(super) bytes: SmallVec<[u8; 32]>,
}

impl LockTable {
    /// In lock memory, which all trees of a pool share: locks of a word each have its first half, those that share words the
    /// second, since a word that is released by a plain WRITE must be one lock's alone.
    pub(super) fn in_lock_memory(servers: &[ServerId], bytes: u64, most: u64, masked: bool) -> Self {
        let half = bytes / 16 * 8;
        let from = if masked { half } else { 0 };
        let bases = servers.iter().map(|server| GlobalAddr::new(*server, RegionId::LOCK, from)).collect();
        Self::new(bases, half, 8, most, masked)
    }

    /// In tables of so many bytes. In main memory locks are as far apart as in FG, which has them in its nodes: a NIC tells
    /// atomics apart by the low bits of their addresses alone (section 3.2.2).
    pub(super) fn new(bases: Vec<GlobalAddr>, bytes: u64, stride: u64, most: u64, masked: bool) -> Self {
        let count = (bytes / stride).saturating_mul(if masked { LANES } else { 1 });
        Self { bases, count: count.min(most).max(1), stride, masked }
    }

    /// Words with locks on each server.
    fn words(&self) -> u64 {
        self.count.div_ceil(if self.masked { LANES } else { 1 })
    }

    /// The lock of a node.
    pub(super) fn lock_of(&self, node: GlobalAddr) -> LockAt {
        // Nodes lie at regular distances: mix, so that neighbours do not share a lock for that.
        let hash = (node.offset() >> 3).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
        self.nth(node.server(), hash)
    }

    /// A server's lock of this number, of as many as there are.
    fn nth(&self, server: ServerId, number: u64) -> LockAt {
        let number = number % self.count;
        let base = self.bases[server.index()];
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
    pub(super) fn owner(self, word: u64) -> SessionId {
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

impl Shared {
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

/// How long the same word has been in the way.
#[derive(Default)]
struct Patience {
    seen: Option<(u64, Nanos)>,
}

impl Patience {
    /// One more look; whether it is time to suspect the owner.
    fn is_over(&mut self, word: u64, now: Nanos, limit: Nanos) -> bool {
        match self.seen {
            Some((before, since)) if before == word => {
                if limit > 0 && now.saturating_sub(since) >= limit {
                    self.seen = None;
                    return true;
                }
            }
            _ => self.seen = Some((word, now)),
        }
        false
    }
}

impl Tree {
    fn turn(&self, at: LockAt) -> Option<Turn> {
        let is_hierarchical = self.shared.config.switches.hierarchical;
        is_hierarchical.then(|| Turn { shared: Arc::clone(&self.shared), key: at.key(), is_over: false })
    }

    /// Takes the lock of a node and reads the node.
    pub(super) async fn lock_and_read(&self, op: &Op, node: GlobalAddr) -> Result<(Held, Buf), IndexError> {
        let at = self.shared.locks.lock_of(node);
        let bytes = self.shared.config.node_bytes;
        let read = self.shared.config.switches.lock_and_read.then_some((node, bytes));
        match self.acquire(op, at, read).await? {
            (held, Some(buf)) => Ok((held, buf)),
            (held, None) => self.read_under(op, held, node).await,
        }
    }

    /// Takes a lock, from the queue or remotely; and brings what was read behind it, if anything.
    async fn acquire(
        &self,
        op: &Op,
        at: LockAt,
        read: Option<(GlobalAddr, usize)>,
    ) -> Result<(Held, Option<Buf>), IndexError> {
        let is_hierarchical = self.shared.config.switches.hierarchical;
        let handed = if is_hierarchical { self.shared.local.acquire(at.key()).await } else { None };
        let turn = self.turn(at);
        let (word, buf) = if let Some(word) = handed {
            marks::hit("handover");
            (word, None)
        } else {
            self.take(op, at, read).await?
        };
        Ok((Held { at, word, turn }, buf))
    }

    /// Takes the lock of a node if nobody holds it, and reads the node.
    pub(super) async fn try_lock(
        &self,
        op: &Op,
        node: GlobalAddr,
    ) -> Result<Option<(Held, Buf)>, IndexError> {
        let at = self.shared.locks.lock_of(node);
        let is_hierarchical = self.shared.config.switches.hierarchical;
        let tried = if is_hierarchical { self.shared.local.try_acquire(at.key()) } else { Tried::Ours };
        if tried == Tried::Others {
            return Ok(None);
        }
        let turn = self.turn(at);
        let word = match tried {
            Tried::Handed(word) => word,
            _ => match self.swap_once(op, at, None).await? {
                (Ok(word), _) => word,
                (Err(_), _) => return Ok(None),
            },
        };
        self.read_under(op, Held { at, word, turn }, node).await.map(Some)
    }

    async fn read_under(&self, op: &Op, held: Held, node: GlobalAddr) -> Result<(Held, Buf), IndexError> {
        match surely::read(op, node, self.shared.config.node_bytes).await {
            Ok(buf) => Ok((held, buf)),
            Err(error) => {
                self.unlock(op, held).await?;
                Err(error.into())
            }
        }
    }

    /// One attempt: our word if it succeeded, else the word that was in the way; and what was read behind it.
    async fn swap_once(
        &self,
        op: &Op,
        at: LockAt,
        read: Option<(GlobalAddr, usize)>,
    ) -> Result<(Result<u64, u64>, Option<Buf>), IndexError> {
        let mine = self.shared.fresh_word(at, self.number);
        let mut batch = Batch::new(at.addr.server());
        let cas = batch.push(at.swap(0, mine));
        let read = read.map(|(node, bytes)| batch.read(node, bytes));
        match op.submit(batch).await {
            Ok(mut done) => {
                let before = done.previous(cas);
                if before & at.mask == 0 {
                    return Ok((Ok(mine), read.map(|read| done.take(read))));
                }
                Ok((Err(before & at.mask), None))
            }
            Err(failure) => {
                // Once reconnected the CAS has happened or never will, and the word tells which.
                surely::reconnected(op, failure.error).await?;
                let seen = surely::read_word(op, at.addr).await? & at.mask;
                if seen == mine {
                    marks::hit("lock_taken_unknowingly");
                    return Ok((Ok(mine), None));
                }
                Ok((Err(seen), None))
            }
        }
    }

    /// Takes the lock remotely, however long it takes; and brings what was read behind it, if anything.
    async fn take(
        &self,
        op: &Op,
        at: LockAt,
        read: Option<(GlobalAddr, usize)>,
    ) -> Result<(u64, Option<Buf>), IndexError> {
        let session = self.shared.pool.session();
        let limit = session.lease_ns() / 4;
        let mut patience = Patience::default();
        for attempt in 0..MAX_ATTEMPTS {
            let seen = match self.swap_once(op, at, read).await? {
                (Ok(word), buf) => return Ok((word, buf)),
                (Err(seen), _) => seen,
            };
            marks::hit("lost_cas");
            op.count_retry();
            if seen != 0 && patience.is_over(seen, op.endpoint().now(), limit) {
                let owner = at.owner(seen);
                if owner != session.id() {
                    self.shared.recover(op, owner).await?;
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
    pub(super) async fn unlock(&self, op: &Op, held: Held) -> Result<(), IndexError> {
        self.finish(op, held, &[]).await
    }

    /// Writes back what the lock protects, on its server, and gives the lock back, or on.
    pub(super) async fn finish(&self, op: &Op, held: Held, writes: &[Write]) -> Result<(), IndexError> {
        let Held { at, word, turn } = held;
        let server = at.addr.server();
        let (switches, sabotage) = (self.shared.config.switches, self.shared.config.sabotage);
        match turn {
            Some(mut turn) if switches.handover && self.shared.local.wants_handover(at.key()) => {
                if sabotage.handover_before_completion && turn.hand_over(word) {
                    return self.write(op, server, writes).await;
                }
                let written = self.write(op, server, writes).await;
                if written.is_ok() && turn.hand_over(word) {
                    return written;
                }
                written.and(self.write_and_release(op, at, word, &[]).await)
            }
            // The turn, if there is one, ends with this call, after the lock is released.
            _turn if sabotage.unlock_before_write_back => {
                let released = self.write_and_release(op, at, word, &[]).await;
                released.and(self.write(op, server, writes).await)
            }
            _turn if switches.combine || writes.is_empty() => {
                self.write_and_release(op, at, word, writes).await
            }
            _turn => {
                let written = self.write(op, server, writes).await;
                written.and(self.write_and_release(op, at, word, &[]).await)
            }
        }
    }

    /// Carries out WRITEs under a lock that stays held; they can be repeated.
    pub(super) async fn write(&self, op: &Op, server: ServerId, writes: &[Write]) -> Result<(), IndexError> {
        if writes.is_empty() {
            return Ok(());
        }
        for _ in 0..MAX_LOST {
            match op.submit(batch_of(op, server, writes)).await {
                Ok(_) => return Ok(()),
                Err(failure) => surely::reconnected(op, failure.error).await.map_err(begun)?,
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
            let mut batch = batch_of(op, at.addr.server(), writes);
            if self.shared.config.switches.faa_release {
                batch.push(Verb::Faa { addr: at.addr, add: word.wrapping_neg() });
            } else if at.mask == u64::MAX {
                batch.write_word(at.addr, 0);
            } else if self.shared.config.sabotage.plain_masked_release {
                batch.write_inline(at.addr.add(u64::from(2 * at.lane)), &[0, 0]);
            } else {
                batch.push(at.swap(word, 0));
            }
            match op.submit(batch).await {
                Ok(_) => return Ok(()),
                Err(failure) => surely::reconnected(op, failure.error).await.map_err(begun)?,
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
pub(super) fn begun(error: FabricError) -> IndexError {
    match IndexError::from(error) {
        IndexError::Fenced => IndexError::Fenced,
        _ => IndexError::Unknown,
    }
}

fn batch_of(op: &Op, server: ServerId, writes: &[Write]) -> Batch {
    let mut batch = Batch::new(server);
    for write in writes {
        if write.bytes.len() <= INLINE_BYTES {
            batch.write_inline(write.addr, &write.bytes);
        } else {
            batch.write(write.addr, op.endpoint().buf_of(&write.bytes));
        }
    }
    batch
}
