//! What becomes of a dead session's locks: after it is fenced, what it was in the middle of is finished ([`intents`]), then its
//! locks are freed. What it left otherwise unfinished is mended by whoever locks it next, as the engine says.

use super::{LANES, LockAt, LockTable, Locks, MAX_LOST};
use crate::Pool;
use crate::api::IndexError;
use crate::shared::{intents, surely};
use farwood_fabric::control::SessionState;
use farwood_fabric::session::Estate;
use farwood_fabric::{Batch, GlobalAddr, Op, SessionId, marks};

/// How many words of a lock table are read at a time.
const STEP: usize = 1024;

impl LockTable {
    /// Whether all locks of the other table are locks of this one.
    pub(crate) fn covers(&self, other: &Self) -> bool {
        (&self.bases, self.stride, self.masked) == (&other.bases, other.stride, other.masked)
            && self.count >= other.count
    }

    /// All locks that are held, and by whom. Two words are never read at one instant; for locks of the dead that is no matter.
    pub(crate) async fn held(&self, op: &Op) -> Result<Vec<(LockAt, u64)>, IndexError> {
        let mut held = Vec::new();
        for base in &self.bases {
            let (words, stride) = (self.words(), self.stride);
            for first in (0..words).step_by(STEP) {
                let some = (words - first).min(STEP as u64);
                let bytes = usize::try_from((some - 1) * stride + 8).unwrap_or(0);
                let table = surely::read(op, base.add(first * stride), bytes).await?;
                for n in 0..some {
                    let word = table.word(usize::try_from(n * stride).unwrap_or(0));
                    self.add_held(base.add((first + n) * stride), word, &mut held);
                }
            }
        }
        Ok(held)
    }

    fn add_held(&self, addr: GlobalAddr, word: u64, held: &mut Vec<(LockAt, u64)>) {
        let lanes = if self.masked { u32::try_from(LANES).unwrap_or(0) } else { 1 };
        for lane in 0..lanes {
            let mask = if self.masked { 0xffff << (16 * lane) } else { u64::MAX };
            if word & mask != 0 {
                held.push((LockAt { addr, lane, mask }, word & mask));
            }
        }
    }
}

impl Locks {
    /// Cleans up after a session whose lease has run out; nothing, if it has not or somebody else does. `tables` names all lock tables
    /// that the session may hold locks of: it may have worked on several indexes, and is recovered once.
    pub(crate) async fn recover(
        pool: &Pool,
        op: &Op,
        victim: SessionId,
        tables: impl AsyncFnOnce(&Op) -> Result<Vec<LockTable>, IndexError>,
        forget_intents: bool,
    ) -> Result<(), IndexError> {
        let clean_up = async |op: &Op, estate: &Estate| -> Result<(), IndexError> {
            if !forget_intents {
                intents::replay(op, estate).await?;
            }
            for table in tables(op).await? {
                for (at, word) in table.held(op).await? {
                    if at.owner(word) == victim {
                        free(op, at, word).await?;
                        marks::hit("lock_of_the_dead_released");
                    }
                }
            }
            Ok(())
        };
        // Boxed: who waits for a lock comes here rarely, and should not carry it about.
        if Box::pin(pool.recover(op, victim, clean_up)).await?.is_some() {
            marks::hit("session_recovered");
        }
        Ok(())
    }

    /// No lock is held, unless by somebody alive who works on another index: all indexes of a pool share lock memory.
    pub(crate) async fn check_free(&self, op: &Op) -> Result<(), IndexError> {
        let held = self.table.held(op).await?;
        if held.is_empty() {
            return Ok(());
        }
        let is_alone = self.pool.list_indexes(op).await?.len() == 1;
        let sessions = self.pool.session().list(op).await?;
        for (at, word) in held {
            let owner = at.owner(word);
            let is_alive =
                sessions.iter().any(|info| info.session == owner && info.state == SessionState::Active);
            if is_alone || !is_alive {
                let what = format!("the lock at {} is still held, by {owner} ({word:#x})", at.addr);
                return Err(IndexError::Corrupt { what });
            }
        }
        Ok(())
    }
}

/// Frees a lock whose owner is fenced. Nobody else writes it, or it is freed by an atomic.
async fn free(op: &Op, at: LockAt, word: u64) -> Result<(), IndexError> {
    if at.mask == u64::MAX {
        return Ok(surely::write_word(op, at.addr, 0).await?);
    }
    for _ in 0..MAX_LOST {
        let mut batch = Batch::new(at.addr.server());
        batch.push(at.swap(word, 0));
        match op.submit(batch).await {
            Ok(_) => return Ok(()),
            // Free by then, or still the victim's: its number comes back only after this.
            Err(failure) => surely::reconnected(op, failure.error).await?,
        }
    }
    Err(IndexError::Contended { what: "a completion", attempts: MAX_LOST })
}
