//! Which locks are held, and by whom; and how those of the dead are freed, as a step of recovery ([`crate::pool::recovery`]). What a dead
//! session left otherwise unfinished is mended by whoever locks it next, as the engine says.

use super::{LANES, LockAt, LockTable, Locks, MAX_LOST};
use crate::api::IndexError;
use crate::shared::surely;
use farwood_fabric::control::SessionState;
use farwood_fabric::{Batch, GlobalAddr, Op, SessionId, marks};

/// How many words of a lock table are read at a time.
const STEP: usize = 1024;

impl LockTable {
    /// Frees all locks of a session that is fenced and whose intents are ended.
    pub(crate) async fn free_all_of(&self, op: &Op, victim: SessionId) -> Result<(), IndexError> {
        for (at, word) in self.held(op).await? {
            if at.owner(word) == victim {
                free(op, at, word).await?;
                marks::hit("lock_of_the_dead_released");
            }
        }
        Ok(())
    }

    /// The same by a mistake: words are written back as they were read, without the victim's locks. Whatever became of other locks in them
    /// meanwhile is undone.
    pub(crate) async fn free_all_plainly(&self, op: &Op, victim: SessionId) -> Result<(), IndexError> {
        let held = self.held(op).await?;
        for (at, _) in held.iter().filter(|(at, word)| at.owner(*word) == victim) {
            let others = held.iter().filter(|(o, word)| o.addr == at.addr && o.owner(*word) != victim);
            let rest = others.fold(0, |rest, (_, word)| rest | word);
            surely::write_word(op, at.addr, rest).await?;
        }
        Ok(())
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

/// Frees a lock whose owner is fenced. The owner's word does not come back, so after a lost completion the word tells whether there is
/// anything left to do: somebody else may have the lock by then. A lock that is a word of its own is freed by a WRITE, not by a CAS:
/// the next holder releases it by a WRITE, and while a CAS is still on its way that could be lost (contract, rule 4).
async fn free(op: &Op, at: LockAt, word: u64) -> Result<(), IndexError> {
    for _ in 0..MAX_LOST {
        let freed = if at.mask == u64::MAX {
            op.write_word(at.addr, 0).await
        } else {
            let mut batch = Batch::new(at.addr.server());
            batch.push(at.swap(word, 0));
            op.submit(batch).await.map(drop).map_err(|failure| failure.error)
        };
        match freed {
            Ok(()) => return Ok(()),
            Err(error) => surely::reconnected(op, error).await?,
        }
        if surely::read_word(op, at.addr).await? & at.mask != word {
            return Ok(());
        }
    }
    Err(IndexError::Contended { what: "a completion", attempts: MAX_LOST })
}
