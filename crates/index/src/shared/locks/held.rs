//! A lock that is held, and what becomes of it if its operation goes away: a future that is dropped, an error, a panic.
//!
//! Whoever drops a [`Held`] without giving it back leaves a *settlement*, a task of the same endpoint:
//!
//! 1. Wait until nothing of what the operation posted can land any more ([`Endpoint::quiet`]).
//! 2. If the lock is still ours: carry out again what the operation had begun to write, all of it, as a lost completion would have made it
//!    do; then free the lock as any holder does. If the lock is not ours, the release had landed and all before it, or it was never taken.
//! 3. End the local turn, so that the next in the queue takes the lock anew and reads what it protects.
//!
//! What was written before the operation began to give the lock back is left as it is: a node under its lock can be mended after any WRITE.
//! A settlement that comes to no end condemns the session, and others recover it.

use super::{Core, LockAt, Locks, Write, in_order};
use crate::shared::heap::{Class, Heap};
use crate::shared::intents::{HeldWord, Slot};
use crate::shared::surely;
use farwood_fabric::clock::{MICROSECOND, MILLISECOND, Nanos};
use farwood_fabric::{Batch, Endpoint, FabricError, GlobalAddr, Op, ServerId, Session, marks};
use smallvec::SmallVec;
use std::mem;
use std::sync::Arc;

/// How long lies between two attempts: twice as long each time, up to a limit.
const FIRST_WAIT_NS: Nanos = 20 * MICROSECOND;
const LONGEST_WAIT_NS: Nanos = 20 * MILLISECOND;

/// A lock that is held.
#[derive(Debug)]
pub(crate) struct Held {
    core: Arc<Core>,
    endpoint: Endpoint,
    pub(crate) at: LockAt,
    /// What its bits are while it is.
    pub(crate) word: u64,
    pub(super) grip: Grip,
    /// It is our turn in the local queue.
    pub(super) has_turn: bool,
}

/// Whether the remote lock is ours.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Grip {
    No,
    /// A CAS is in flight, or its outcome is unknown.
    Perhaps,
    Yes,
}

impl Held {
    /// Nothing yet.
    pub(super) fn nothing(locks: &Locks, endpoint: &Endpoint, at: LockAt) -> Self {
        let (core, endpoint) = (Arc::clone(&locks.core), endpoint.clone());
        Self { core, endpoint, at, word: 0, grip: Grip::No, has_turn: false }
    }

    /// A lock that was handed to somebody who is gone.
    pub(super) fn handed(locks: &Locks, endpoint: &Endpoint, at: LockAt, word: u64) -> Self {
        let mut held = Self::nothing(locks, endpoint, at);
        (held.word, held.grip, held.has_turn) = (word, Grip::Yes, true);
        held
    }

    /// How the lock shows that it is held.
    pub(crate) fn shows(&self) -> HeldWord {
        HeldWord { addr: self.at.addr, mask: self.at.mask, word: self.word }
    }

    /// Hands the lock to the next in the local queue, and the turn with it. Whether there was somebody.
    pub(super) fn hand_over(&mut self) -> bool {
        if self.core.local.hand_over(self.at.key(), self.word) {
            self.has_turn = false;
            self.grip = Grip::No;
        }
        self.grip == Grip::No
    }

    /// The lock is free.
    pub(super) fn is_released(&mut self) {
        self.grip = Grip::No;
    }

    fn end_turn(&mut self) {
        if mem::take(&mut self.has_turn) {
            self.core.local.release(self.at.key());
        }
    }

    #[cold]
    fn settle(&mut self, writes: Vec<Write>, behind: Behind) {
        let retire = behind.retire.map(|(class, addr)| (self.core.pool.heap().clone(), class, addr));
        if self.core.mistakes.forget_when_dropped {
            self.grip = Grip::No;
            return self.end_turn();
        }
        if self.at.mask != u64::MAX && !self.has_turn {
            // The word does not tell this acquisition from another of the session's tasks.
            self.core.pool.session().condemn();
            self.grip = Grip::No;
            return;
        }
        let grasp = Grasp { at: self.at, word: self.word, _turn: self.take_turn() };
        self.grip = Grip::No;
        let parcel = Parcel { grasps: vec![grasp], writes, slot: behind.slot, retire };
        parcel.settle(self.core.pool.session(), &self.endpoint);
    }

    fn take_turn(&mut self) -> Option<Turn> {
        let turn = mem::take(&mut self.has_turn);
        turn.then(|| Turn { core: Arc::clone(&self.core), at: self.at })
    }
}

impl Drop for Held {
    #[inline]
    fn drop(&mut self) {
        if self.grip == Grip::No {
            self.end_turn();
        } else {
            self.settle(Vec::new(), Behind::default());
        }
    }
}

/// The end of what a lock protects: WRITEs that have begun, and are seen through.
pub(super) struct Finishing<'a> {
    pub(super) held: Held,
    pub(super) writes: &'a [Write],
    pub(super) behind: Behind,
}

/// What follows the last WRITEs under a lock, if the operation does not live to see to it itself.
#[derive(Default, Debug)]
pub(crate) struct Behind {
    /// Room of an intent, which nobody else may use before the lock is free.
    pub(crate) slot: Option<Slot>,
    /// What the WRITEs unlink, and is retired then.
    pub(crate) retire: Option<(Class, GlobalAddr)>,
}

impl Drop for Finishing<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.held.grip != Grip::No {
            let behind = mem::take(&mut self.behind);
            self.held.settle(self.writes.to_vec(), behind);
        }
    }
}

/// The same for several locks and servers: from here on all the WRITEs happen, in order, and then the object is retired.
pub(crate) struct Commit {
    session: Session,
    endpoint: Endpoint,
    pub(super) held: SmallVec<[Held; 3]>,
    pub(super) writes: Vec<Write>,
    slot: Option<Slot>,
    pub(super) retire: Option<(Heap, Class, GlobalAddr)>,
}

impl Commit {
    pub(crate) fn new(
        locks: &Locks,
        op: &Op,
        held: SmallVec<[Held; 3]>,
        writes: Vec<Write>,
        behind: Behind,
    ) -> Self {
        let (session, endpoint) = (locks.pool.session().clone(), op.endpoint().clone());
        let retire = behind.retire.map(|(class, addr)| (locks.pool.heap().clone(), class, addr));
        Self { session, endpoint, held, writes, slot: behind.slot, retire }
    }
}

impl Drop for Commit {
    fn drop(&mut self) {
        if self.held.is_empty() && self.retire.is_none() {
            return;
        }
        let grasps = self.held.iter_mut().map(|held| {
            held.grip = Grip::No;
            Grasp { at: held.at, word: held.word, _turn: held.take_turn() }
        });
        let grasps = grasps.collect();
        let slot = self.slot.take();
        let (writes, retire) = (mem::take(&mut self.writes), self.retire.take());
        Parcel { grasps, writes, slot, retire }.settle(&self.session, &self.endpoint);
    }
}

/// Frees a lock word that is no lock of a table: one that was taken, or perhaps was, by `word`.
pub(crate) fn settle_word(session: &Session, endpoint: &Endpoint, addr: GlobalAddr, word: u64) {
    let at = LockAt { addr, lane: 0, mask: u64::MAX };
    let grasps = vec![Grasp { at, word, _turn: None }];
    Parcel { grasps, writes: Vec::new(), slot: None, retire: None }.settle(session, endpoint);
}

/// A lock that is to be freed.
struct Grasp {
    at: LockAt,
    word: u64,
    _turn: Option<Turn>,
}

/// A turn in the local queue. It ends when this is dropped.
struct Turn {
    core: Arc<Core>,
    at: LockAt,
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.core.local.release(self.at.key());
    }
}

/// What is left to be settled.
struct Parcel {
    grasps: Vec<Grasp>,
    /// To be carried out first, all of them in order, if all the locks are still held.
    writes: Vec<Write>,
    slot: Option<Slot>,
    /// What the writes unlink.
    retire: Option<(Heap, Class, GlobalAddr)>,
}

impl Parcel {
    fn settle(self, session: &Session, endpoint: &Endpoint) {
        marks::hit("lock_left_to_be_settled");
        let settlement =
            Settlement { session: session.clone(), endpoint: endpoint.clone(), left: Some(self) };
        endpoint.settle(settlement.run());
    }
}

/// A task that settles a parcel. If it ends before it is done, the session is condemned.
struct Settlement {
    session: Session,
    endpoint: Endpoint,
    left: Option<Parcel>,
}

impl Settlement {
    async fn run(mut self) {
        let Some(parcel) = &self.left else { return };
        if free(&self.session, &self.endpoint, parcel).await.is_err() {
            // Whether the WRITEs were carried out is not known, so nothing that they unlink may be retired: the fence may have come to
            // one server and not yet to the one with the journal.
            return;
        }
        marks::hit("lock_settled");
        let retire = parcel.retire.clone();
        // Ends the turns, and gives back the room of the intent.
        self.left = None;
        if let Some((heap, class, addr)) = retire {
            // It is parked by itself if it fails.
            let _ = heap.retire(&self.endpoint.op(), class, addr).await;
        }
    }
}

impl Drop for Settlement {
    fn drop(&mut self) {
        if let Some(parcel) = &mut self.left {
            self.session.condemn();
            // Nothing may be written over an intent that others will carry out.
            mem::forget(parcel.slot.take());
        }
    }
}

/// Carries out what is left, and frees the locks.
async fn free(session: &Session, endpoint: &Endpoint, parcel: &Parcel) -> Result<(), FabricError> {
    let end = endpoint.now().saturating_add(session.patience_ns());
    let mut wait_ns = FIRST_WAIT_NS;
    loop {
        for server in parcel.servers() {
            endpoint.quiet(server).await?;
        }
        match attempt(&endpoint.op(), parcel).await {
            Ok(()) => return Ok(()),
            Err(error @ (FabricError::Fenced { .. } | FabricError::ServerLost { .. })) => return Err(error),
            Err(error) if endpoint.now() >= end => return Err(error),
            Err(_) => {}
        }
        endpoint.sleep(wait_ns).await;
        wait_ns = LONGEST_WAIT_NS.min(wait_ns * 2);
    }
}

/// One attempt. Nothing of any earlier one can land any more.
async fn attempt(op: &Op, parcel: &Parcel) -> Result<(), FabricError> {
    let mut held: SmallVec<[&Grasp; 3]> = SmallVec::new();
    for grasp in &parcel.grasps {
        if surely::read_word(op, grasp.at.addr).await? & grasp.at.mask == grasp.word {
            held.push(grasp);
        }
    }
    // Locks are freed behind all the WRITEs: if one of them is free, those were carried out.
    if held.len() == parcel.grasps.len() {
        for writes in runs(&parcel.writes) {
            op.write_in_order(writes[0].addr.server(), in_order(writes)).await?;
        }
    }
    for Grasp { at, word, .. } in held {
        if at.mask == u64::MAX {
            // Not by CAS: the next holder may release it by a WRITE while that is still on its way, and the WRITE would be lost (rule 4).
            op.write_word(at.addr, 0).await?;
        } else {
            let mut batch = Batch::new(at.addr.server());
            batch.push(at.swap(*word, 0));
            op.submit(batch).await.map_err(|failure| failure.error)?;
        }
    }
    Ok(())
}

impl Parcel {
    fn servers(&self) -> SmallVec<[ServerId; 3]> {
        let mut servers: SmallVec<[ServerId; 3]> =
            self.grasps.iter().map(|grasp| grasp.at.addr.server()).collect();
        servers.extend(self.writes.iter().map(|write| write.addr.server()));
        servers.sort_unstable();
        servers.dedup();
        servers
    }
}

/// WRITEs in their order, in runs of one server each.
pub(super) fn runs(writes: &[Write]) -> impl Iterator<Item = &[Write]> {
    writes.chunk_by(|one, next| one.addr.server() == next.addr.server())
}
