//! What becomes of a session that is dead: in two phases, each step of which may be repeated, so that whoever does it may die anywhere, too.
//!
//! 1. **Urgent**, for those who wait: *fence* the session on every server, which also lets the epochs go on; become its one *adopter*;
//!    carry out and end the intents of which every lock is held; then free its locks, each only while it holds the word that the victim
//!    wrote, and nobody else can write.
//! 2. **Lazy**, in the background: wait until no operation can reach what the victim had retired; free that, slot by slot, from the
//!    *victim's* journal (CAS the slot to 0, then clear the bit); finish the adoption, after which the number can come back.
//!
//! Why it may be repeated, and continued by others: an adopter is fenced before the next one begins, so no two are ever at it. No lock
//! is freed while an intent is open. Every step changes a value that only this victim can have left there, or repeats a WRITE of
//! the victim's under locks of the victim's. Flushes wait until the adoption is finished, so memory that the journal names does not
//! change its type; pins wait for the fence alone.
//!
//! What an engine has beside lock memory and intents is its [`Recoverer`]'s. If nobody here knows the engine of an index, the
//! victim stays fenced for a session that does.

use super::Pool;
use crate::api::IndexError;
use crate::shared::{intents, locks, surely};
use farwood_fabric::clock::{MICROSECOND, MILLISECOND, Nanos, SECOND};
use farwood_fabric::control::{ControlError, IndexInfo, IndexState, SessionInfo, SessionState, SessionWord};
use farwood_fabric::session::Estate;
use farwood_fabric::{Endpoint, FabricError, Op, SessionId, marks};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};

/// How many dead adopters are followed, each the adopter of the one before.
const MAX_CHAIN: usize = 16;
/// How often the lazy phase is tried, and the longest wait between two looks at the epochs.
const MAX_LAZY: u32 = 20;
const MAX_GRACE_WAITS: u32 = 10_000;
const FIRST_GRACE_WAIT_NS: Nanos = 50 * MICROSECOND;
const LONGEST_GRACE_WAIT_NS: Nanos = 20 * MILLISECOND;

/// How long somebody who needs a pool without dead sessions waits for that: two leases and a moment, within bounds. And how often he looks.
const LEASES_TO_SETTLE: Nanos = 2;
const SETTLE_NS: Nanos = 3 * SECOND;
const LONGEST_SETTLE_NS: Nanos = 30 * SECOND;
const SETTLE_LOOK_NS: Nanos = 10 * MILLISECOND;

/// A future that stays on its thread.
pub type LocalFuture<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// What dead sessions may have left in the indexes of some engines.
pub trait Recoverer: Send + Sync + fmt::Debug {
    /// Whether it knows the engine of this index.
    fn knows(&self, info: &IndexInfo) -> bool;

    /// Finishes or undoes what the dead session was in the middle of in this index, beside its intents, and frees locks of it that
    /// are not in lock memory. It MUST be possible to do it again after it was done, or done in part: every change is a CAS from what
    /// only this victim can have left, or is made under a lock of the victim's.
    fn settle<'a>(
        &'a self,
        op: &'a Op,
        pool: &'a Pool,
        info: &'a IndexInfo,
        estate: &'a Estate,
    ) -> LocalFuture<'a, Result<(), IndexError>>;
}

/// Mistakes of recovery that the checkers must catch.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct RecoveryMistakes {
    /// What a dead session was in the middle of is not finished before its locks are freed.
    pub forget_intents: bool,
    /// Words of lock memory are written back without the locks of the dead, as they were read, rather than freed lock by lock.
    pub plain_release: bool,
}

/// The right of one task of this session to recover a victim. Ends when dropped.
struct Recovering {
    set: Arc<Mutex<BTreeSet<SessionId>>>,
    victim: SessionId,
}

impl Recovering {
    /// `None` if another task is at it.
    fn begin(pool: &Pool, victim: SessionId) -> Option<Self> {
        let set = Arc::clone(&pool.recovering);
        let first = set.lock().unwrap_or_else(PoisonError::into_inner).insert(victim);
        // Not `then_some`: a guard that is made and dropped would end the other task's entry.
        first.then(|| Self { set, victim })
    }
}

impl Drop for Recovering {
    fn drop(&mut self) {
        self.set.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.victim);
    }
}

impl Pool {
    /// Looks at the owner of a lock that does not come free: one READ. If it is dead, it is recovered; whether it was, by us.
    pub async fn suspect(&self, op: &Op, owner: SessionId) -> Result<bool, IndexError> {
        if owner == self.session.id() || !self.is_dead(op, owner).await? {
            return Ok(false);
        }
        marks::hit("owner_found_dead");
        self.recover(op, owner).await
    }

    async fn is_dead(&self, op: &Op, session: SessionId) -> Result<bool, IndexError> {
        let Some(addr) = SessionWord::addr(session) else { return Ok(false) };
        let word = surely::read_word(op, addr).await?;
        Ok(SessionWord::from_raw(word).is_some_and(SessionWord::is_dead))
    }

    /// Recovers a session whose lease has run out. When this returns true, its locks are free and nothing of it can land any more;
    /// the rest goes on in the background. False, if there is nothing for us to do: its lease runs (a heartbeat may have been on its
    /// way), somebody else is at it, it is gone already, or it may have used an engine that nobody here knows.
    pub async fn recover(&self, op: &Op, victim: SessionId) -> Result<bool, IndexError> {
        if victim == self.session.id() {
            return Ok(false);
        }
        // What has begun goes on if the caller goes away: its WRITEs must not be repeated by another task while they may still land.
        let (pool, endpoint) = (self.clone(), op.endpoint().clone());
        op.endpoint().see_through(async move { pool.recover_chain(&endpoint, victim).await }).await
    }

    /// Recovers all sessions that are dead, or waits for those who do it; returns those that are dead still after a bounded time. Who was
    /// killed a moment ago has a lease that runs, so each of the others has to show with a heartbeat that it lives.
    pub async fn recover_all(&self, endpoint: &Endpoint) -> Result<Vec<SessionId>, IndexError> {
        let patience = (LEASES_TO_SETTLE * self.session.lease_ns()).saturating_add(SETTLE_NS);
        let end = endpoint.now() + patience.min(LONGEST_SETTLE_NS);
        let others = self.others(endpoint).await?;
        let begun = endpoint.now();
        let lease_end = |info: &SessionInfo, now: Nanos| now.saturating_add(info.lease_left_ns);
        let mut unproven: BTreeMap<_, _> =
            others.iter().map(|info| ((info.session, info.term), lease_end(info, begun))).collect();
        loop {
            let asked = endpoint.now();
            let others = self.others(endpoint).await?;
            let dead: Vec<_> = others.iter().filter(|info| is_dead(info)).map(|info| info.session).collect();
            unproven.retain(|who, before| {
                let info = others.iter().find(|info| (info.session, info.term) == *who);
                // A lease for ever is not renewed.
                info.is_some_and(|info| {
                    !is_dead(info) && info.lease_left_ns < Nanos::MAX && lease_end(info, asked) <= *before
                })
            });
            if (dead.is_empty() && unproven.is_empty()) || endpoint.now() >= end {
                return Ok(dead);
            }
            for victim in dead {
                // Others may be at it. What fails is tried again.
                let _ = self.recover(&endpoint.op(), victim).await;
            }
            endpoint.sleep(SETTLE_LOOK_NS).await;
            // Whoever recovers waits for epochs, which must not wait for us.
            self.session.heartbeat(endpoint).await?;
        }
    }

    async fn others(&self, endpoint: &Endpoint) -> Result<Vec<SessionInfo>, IndexError> {
        let mut sessions = self.session.list(&endpoint.op()).await?;
        sessions.retain(|info| info.session != self.session.id());
        Ok(sessions)
    }

    /// Dead adopters in the way are recovered first, the last of the chain before the others.
    async fn recover_chain(&self, endpoint: &Endpoint, victim: SessionId) -> Result<bool, IndexError> {
        let mut chain = vec![victim];
        while let Some(victim) = chain.last().copied() {
            match self.recover_one(endpoint, victim).await {
                Ok(recovered) if chain.len() == 1 => return Ok(recovered),
                Ok(_) => drop(chain.pop()),
                Err(error) => match adopter(&error) {
                    Some(by) if by != self.session.id() && self.is_dead(&endpoint.op(), by).await? => {
                        marks::hit("adopter_found_dead");
                        if chain.len() >= MAX_CHAIN || chain.contains(&by) {
                            return Ok(false);
                        }
                        chain.push(by);
                    }
                    _ if is_not_ours(&error) => return Ok(false),
                    _ => return Err(error),
                },
            }
        }
        Ok(false)
    }

    /// The urgent phase; the lazy one is left to a task.
    async fn recover_one(&self, endpoint: &Endpoint, victim: SessionId) -> Result<bool, IndexError> {
        let Some(exclusive) = Recovering::begin(self, victim) else { return Ok(false) };
        match self.free_locks(&endpoint.op(), victim).await {
            Ok(Some(estate)) => {
                let (pool, tasks) = (self.clone(), endpoint.clone());
                endpoint.spawn(async move { pool.recover_lazily(&tasks, &estate, exclusive).await });
                Ok(true)
            }
            Ok(None) => Ok(false),
            Err(error) => {
                // A WRITE of unknown outcome may still land: nobody here begins anew before it cannot.
                let (servers, tasks) = (self.session.servers().to_vec(), endpoint.clone());
                endpoint.settle(async move {
                    for server in servers {
                        // If it fails, this session is fenced or condemned, or the server is lost.
                        let _ = tasks.quiet(server).await;
                    }
                    drop(exclusive);
                });
                Err(error)
            }
        }
    }

    /// Fences the victim, adopts it, finishes what it was in the middle of and frees its locks. `None` if nobody here knows an engine
    /// that it may have used.
    async fn free_locks(&self, op: &Op, victim: SessionId) -> Result<Option<Estate>, IndexError> {
        self.session.fence(op, victim).await?;
        let Some(indexes) = self.indexes_in_use(op).await? else {
            marks::hit("engine_unknown_to_recovery");
            return Ok(None);
        };
        let estate = self.session.adopt(op, victim).await?;
        if !self.mistakes.recovery.forget_intents {
            intents::replay(op, &estate).await?;
        }
        marks::hit("adopt_replayed");
        for (info, recoverer) in &indexes {
            recoverer.settle(op, self, info, &estate).await?;
        }
        let bytes = op.endpoint().capabilities().lock_memory_bytes;
        for table in locks::LockTable::all_in_lock_memory(self.session.servers(), bytes) {
            if self.mistakes.recovery.plain_release {
                table.free_all_plainly(op, victim).await?;
            } else {
                table.free_all_of(op, victim).await?;
            }
        }
        marks::hit("adopt_unlocked");
        Ok(Some(estate))
    }

    /// The indexes in which a session may have worked, each with who knows it; `None` if nobody knows one of them. To be asked after
    /// the session is fenced: it opens no more.
    async fn indexes_in_use(
        &self,
        op: &Op,
    ) -> Result<Option<Vec<(IndexInfo, Arc<dyn Recoverer>)>>, IndexError> {
        let mut known = Vec::new();
        for info in self.list_indexes(op).await? {
            // One that is being made, or dropped, has no locks that anybody waits for. Who repairs one may die, too.
            if !matches!(info.state, IndexState::Ready | IndexState::Offline) {
                continue;
            }
            let Some(recoverer) = self.recoverers.iter().find(|one| one.knows(&info)) else {
                return Ok(None);
            };
            known.push((info, Arc::clone(recoverer)));
        }
        Ok(Some(known))
    }

    /// The lazy phase. If it does not come to its end here, the coordinator reminds us, or somebody else when we are gone.
    async fn recover_lazily(&self, endpoint: &Endpoint, estate: &Estate, _exclusive: Recovering) {
        for _ in 0..MAX_LAZY {
            match self.free_and_finish(endpoint, estate).await {
                Ok(()) => return marks::hit("session_recovered"),
                // We were fenced ourselves, or somebody else has finished it.
                Err(FabricError::Fenced { .. }) => return,
                Err(error) if is_not_ours(&error.clone().into()) => return,
                Err(_) => endpoint.sleep(LONGEST_GRACE_WAIT_NS).await,
            }
            if self.session.is_closed() || self.session.is_fenced() {
                return;
            }
        }
    }

    async fn free_and_finish(&self, endpoint: &Endpoint, estate: &Estate) -> Result<(), FabricError> {
        let stamp = self.session.retire_stamp(endpoint, true).await?;
        let mut wait_ns = FIRST_GRACE_WAIT_NS;
        for _ in 0..MAX_GRACE_WAITS {
            if self.session.is_safe(stamp) || self.session.is_closed() {
                break;
            }
            endpoint.sleep(wait_ns).await;
            wait_ns = LONGEST_GRACE_WAIT_NS.min(wait_ns * 2);
            self.session.heartbeat(endpoint).await?;
        }
        if !self.session.is_safe(stamp) {
            return Err(FabricError::RetriesExhausted {
                what: "the epochs to go on",
                attempts: MAX_GRACE_WAITS,
            });
        }
        marks::hit("adopt_safe");
        self.heap.free_retired_of(endpoint, estate).await?;
        marks::hit("adopt_freed");
        self.session.finish_adoption(&endpoint.op(), estate).await?;
        marks::hit("adopt_finished");
        Ok(())
    }
}

/// Whether a session is dead, and not recovered yet.
pub(super) fn is_dead(info: &SessionInfo) -> bool {
    info.state != SessionState::Active || info.lease_left_ns == 0
}

/// Who adopts the victim, if that is what is in the way.
fn adopter(error: &IndexError) -> Option<SessionId> {
    match error {
        IndexError::Fabric(error) => match error.control() {
            Some(ControlError::BeingAdopted { by, .. }) => Some(*by),
            _ => None,
        },
        _ => None,
    }
}

/// Whether a session is not, or no longer, ours to recover.
fn is_not_ours(error: &IndexError) -> bool {
    let IndexError::Fabric(error) = error else { return false };
    matches!(
        error.control(),
        Some(
            ControlError::LeaseAlive { .. }
                | ControlError::BeingAdopted { .. }
                | ControlError::NoSuchSession { .. }
                | ControlError::NotFenced { .. }
        )
    )
}
