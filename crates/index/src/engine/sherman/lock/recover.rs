//! What becomes of a dead session's locks: after it is fenced, what it was in the middle of is finished ([`intents`]), then its
//! locks are freed. Nodes that it left torn are mended by whoever locks them next (see `node`).

use super::{LANES, LockAt, LockTable, MAX_LOST};
use crate::api::IndexError;
use crate::engine::sherman::{Shared, Sherman};
use crate::shared::{intents, surely};
use farwood_fabric::control::IndexState;
use farwood_fabric::session::Estate;
use farwood_fabric::{Batch, GlobalAddr, Op, SessionId, marks};

/// How many words of a lock table are read at a time.
const STEP: usize = 1024;

impl LockTable {
    /// Whether all locks of the other table are locks of this one.
    fn covers(&self, other: &Self) -> bool {
        (&self.bases, self.stride, self.masked) == (&other.bases, other.stride, other.masked)
            && self.count >= other.count
    }

    /// All locks that are held, and by whom. Two words are never read at one instant; for locks of the dead that is no matter.
    pub(in super::super) async fn held(&self, op: &Op) -> Result<Vec<(LockAt, u64)>, IndexError> {
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

impl Shared {
    /// Cleans up after a session whose lease has run out; nothing, if it has not or somebody else does.
    pub(in super::super) async fn recover(&self, op: &Op, victim: SessionId) -> Result<(), IndexError> {
        let clean_up = async |op: &Op, estate: &Estate| -> Result<(), IndexError> {
            if !self.config.sabotage.forget_intents {
                intents::replay(op, estate).await?;
            }
            for table in self.all_tables(op).await? {
                for (at, word) in table.held(op).await? {
                    if at.owner(word) == victim {
                        self.free(op, at, word).await?;
                        marks::hit("lock_of_the_dead_released");
                    }
                }
            }
            Ok(())
        };
        // Boxed: who waits for a lock comes here rarely, and should not carry it about.
        if Box::pin(self.pool.recover(op, victim, clean_up)).await?.is_some() {
            marks::hit("session_recovered");
        }
        Ok(())
    }

    /// The lock tables of all trees of the pool: a session that dies may have worked on several, and is recovered once.
    async fn all_tables(&self, op: &Op) -> Result<Vec<LockTable>, IndexError> {
        let mut tables = vec![self.locks.clone()];
        for info in self.pool.list_indexes(op).await? {
            // One that is being made, or dropped, has no locks that anybody waits for.
            if info.state != IndexState::Ready || info.id == self.info.id {
                continue;
            }
            let Ok(tree) = Sherman::of(&info) else { continue };
            let table = tree.lock_table(op, &self.pool, &info).await?;
            if !tables.iter().any(|other| other.covers(&table)) {
                tables.push(table);
            }
        }
        Ok(tables)
    }

    /// Frees a lock whose owner is fenced. Nobody else writes it, or it is freed by an atomic.
    async fn free(&self, op: &Op, at: LockAt, word: u64) -> Result<(), IndexError> {
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
}
