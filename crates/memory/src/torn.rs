//! Memory that is taken over although it is not whole: what nobody can vouch for is put right in the safe direction, before any table is read.
//!
//! Any page may hold what it held at an earlier time, or nothing. So:
//!
//! 1. The superblock has to be this server's, or all zeroes: then it is made again from the configuration.
//! 2. Numbers that must never come twice (terms, epochs, flushes, indexes) begin far beyond those that are found.
//! 3. Entries of sessions and indexes that make no sense are dropped, each with a line in the log. Sessions that are found have ended
//!    ([`crate::sessions`]); their journals are cleared, and no lock is held.
//! 4. Chunks ([`crate::chunks`], `mend`): what may be in use stays in use, and no object in it is free until somebody has looked
//!    whether anything leads to it (`farwood check --repair`). A chunk that nobody can say anything about is set aside for good.
//! 5. The superblock keeps what was found until the memory is formatted anew, for all who ask how the server does.
//!
//! So a torn index may answer wrongly, or with errors, but what is written from now on is not lost to what is left of the past.
//! *LEAK, NEVER REUSE*.

use crate::catalog;
use crate::chunks::{self, ChunkType};
use crate::config::ServerConfig;
use crate::layout::{self, Layout, MAGIC, catalog_entry, session_entry, superblock, torn_mark};
use crate::sessions;
use farwood_fabric::addr::RegionId;
use farwood_fabric::control::{ANCHOR_BYTES, IndexId, JOURNAL_BYTES};
use farwood_fabric::found::Damage;
use farwood_fabric::server::{ServerMemory, StartError};
use farwood_fabric::status::Torn;
use std::collections::BTreeSet;

/// How far numbers that must not come twice go on: more than any server uses between two moments at which its pages were made durable.
const LEAP: u64 = 1 << 20;
/// No number that was ever used is as large.
const PLAUSIBLE: u64 = 1 << 48;

/// Puts memory right that is not whole.
pub(crate) fn mend(
    memory: &dyn ServerMemory,
    config: &ServerConfig,
    damage: &Damage,
) -> Result<(), StartError> {
    let is_rebuilt = match layout::load(memory, superblock::MAGIC_AT) {
        0 => true,
        MAGIC => {
            layout::recognise(memory, config)?;
            false
        }
        _ => return Err(layout::not_ours()),
    };
    let mut mending =
        Mending { memory, config, layout: Layout::new(config), damage, dropped: 0, indexes: BTreeSet::new() };
    if is_rebuilt {
        mending.drop_entry(
            "the superblock is gone and made again; the pool and its servers are taken from the command line",
        );
        layout::store_superblock(memory, config);
    }
    mending.sessions(is_rebuilt);
    let known = if config.is_coordinator() { mending.catalog() } else { mending.numbers() };
    layout::clear(memory, RegionId::LOCK, 0, config.lock_bytes);
    let journals = u64::from(config.max_sessions) * JOURNAL_BYTES;
    layout::clear(memory, RegionId::BOARD, mending.layout.journals_at, journals);
    let is_known = |kind: ChunkType| known.contains(&kind.index);
    let mended = chunks::mend(memory, config, damage, &is_known);
    mended.lines.iter().for_each(|line| mending.drop_entry(line));
    mending.indexes.extend(&mended.indexes);
    let torn = Torn {
        failed: u32::try_from(damage.failed.len()).unwrap_or(u32::MAX),
        pieces: u32::try_from(damage.pieces).unwrap_or(u32::MAX),
        dropped: mending.dropped,
        set_aside: mended.set_aside,
        indexes: mending.indexes.into_iter().take(torn_mark::MAX_INDEXES).collect(),
    };
    tracing::warn!("memory server {} serves memory that is torn: {torn}", config.server);
    store_mark(memory, &torn);
    Ok(())
}

struct Mending<'a> {
    memory: &'a dyn ServerMemory,
    config: &'a ServerConfig,
    layout: Layout,
    damage: &'a Damage,
    dropped: u32,
    /// Of which something may be other than it was.
    indexes: BTreeSet<IndexId>,
}

impl Mending<'_> {
    fn load(&self, at: u64) -> u64 {
        layout::load(self.memory, at)
    }

    fn drop_entry(&mut self, what: &str) {
        tracing::warn!("torn memory of server {}: {what}", self.config.server);
        self.dropped += 1;
    }

    /// Drops what is no session, and lets terms and epochs go on far beyond those that are found.
    fn sessions(&mut self, is_rebuilt: bool) {
        let stored = self.load(superblock::NEXT_TERM_AT);
        let (mut term, mut epoch, mut flush) =
            (stored, self.load(superblock::EPOCH_AT), self.load(superblock::FLUSH_AT));
        for number in 0..self.config.max_sessions {
            let at = self.layout.session_entry(number);
            let word = |word_at: u64| self.load(at + word_at);
            let [commit, pin, flushed, its_term] = [
                session_entry::COMMIT_AT,
                session_entry::PIN_AT,
                session_entry::FLUSHED_AT,
                session_entry::TERM_AT,
            ]
            .map(word);
            let most = if is_rebuilt || !self.config.is_coordinator() {
                PLAUSIBLE
            } else {
                stored.saturating_add(LEAP)
            };
            if !sessions::is_entry(commit, its_term) || its_term >= most {
                self.drop_entry(&format!(
                    "the entry of session {} makes no sense and is dropped",
                    number + 1
                ));
                layout::clear(self.memory, RegionId::META, at, farwood_fabric::control::SESSION_ENTRY_BYTES);
                continue;
            }
            term = term.max(its_term + 1);
            if commit != 0 {
                epoch = epoch.max(if pin < PLAUSIBLE { pin } else { 0 });
                flush = flush.max(if flushed < PLAUSIBLE { flushed } else { 0 });
            }
        }
        let numbers =
            [(superblock::NEXT_TERM_AT, term), (superblock::EPOCH_AT, epoch), (superblock::FLUSH_AT, flush)];
        for (at, value) in numbers {
            let value = if value < PLAUSIBLE { value } else { PLAUSIBLE };
            layout::store(self.memory, at, value + LEAP);
        }
    }

    /// (Coordinator) Drops what is no index; the indexes that are left.
    fn catalog(&mut self) -> BTreeSet<IndexId> {
        let stored = self.load(superblock::NEXT_INDEX_AT);
        let (mut known, mut names, mut next) =
            (BTreeSet::new(), BTreeSet::new(), stored.clamp(1, u64::from(u32::MAX / 2)));
        for slot in 0..self.config.max_indexes {
            let at = self.layout.catalog_entry(slot);
            let fault = match catalog::entry_at(self.memory, at) {
                Some(None) => continue,
                None => "makes no sense",
                Some(Some((id, _))) if id == 0 || id >= u32::MAX / 2 => "makes no sense",
                Some(Some((id, name))) if known.contains(&id) || !names.insert(name.clone()) => {
                    "is there twice"
                }
                Some(Some((id, _))) => {
                    known.insert(id);
                    next = next.max(u64::from(id) + 1);
                    let anchor = self.layout.anchor(slot).offset();
                    let entry_or_anchor = self.damage.touches(RegionId::BOARD, anchor, ANCHOR_BYTES)
                        || self.damage.touches(RegionId::META, at, layout::CATALOG_ENTRY_BYTES);
                    if entry_or_anchor {
                        self.indexes.insert(id);
                    }
                    continue;
                }
            };
            self.drop_entry(&format!(
                "the catalog's entry {slot} {fault} and is dropped: that index is lost"
            ));
            layout::clear(self.memory, RegionId::META, at, layout::CATALOG_ENTRY_BYTES);
        }
        // A crash may have come between an entry and the next number, so only what is far beyond is sure to be new.
        let is_sure = !self.damage.touches(RegionId::META, 0, layout::SUPERBLOCK_BYTES);
        layout::store(self.memory, superblock::NEXT_INDEX_AT, if is_sure { next } else { next + 1024 });
        known
    }

    /// (Other servers) Drops what is no number of an index; those that are left.
    fn numbers(&mut self) -> BTreeSet<IndexId> {
        let mut known = BTreeSet::new();
        for slot in 0..self.config.max_indexes {
            let at = self.layout.catalog_entry(slot) + catalog_entry::NUMBER_AT;
            match IndexId::try_from(self.load(at)) {
                Ok(0) => {}
                Ok(id) if id < u32::MAX / 2 && known.insert(id) => {}
                _ => {
                    self.drop_entry(&format!("the number of index {slot} makes no sense and is dropped"));
                    layout::store(self.memory, at, 0);
                }
            }
        }
        for at in [superblock::NEXT_INDEX_AT, superblock::LOST_BELOW_AT] {
            if self.load(at) >= u64::from(u32::MAX / 2) {
                self.drop_entry("a number of the superblock makes no sense and is dropped");
                layout::store(self.memory, at, 0);
            }
        }
        known
    }
}

fn store_mark(memory: &dyn ServerMemory, torn: &Torn) {
    let indexes = u32::try_from(torn.indexes.len()).unwrap_or(0);
    let words = [torn.failed, torn.pieces, torn.dropped, torn.set_aside, indexes];
    let indexes = torn.indexes.iter().copied();
    for (at, word) in (torn_mark::FAILED_AT..).step_by(8).zip(words.into_iter().chain(indexes)) {
        layout::store(memory, at, u64::from(word));
    }
    layout::store(memory, torn_mark::IS_TORN_AT, 1);
}

/// What is known of memory that was torn when it was taken over, now or earlier.
pub(crate) fn load_mark(memory: &dyn ServerMemory) -> Option<Torn> {
    if layout::load(memory, torn_mark::IS_TORN_AT) == 0 {
        return None;
    }
    // All of these were numbers of 32 bits when they were stored.
    let word = |n: u64| u32::try_from(layout::load(memory, torn_mark::FAILED_AT + n * 8)).unwrap_or(u32::MAX);
    let indexes = u64::from(word(4)).min(torn_mark::MAX_INDEXES as u64);
    let indexes = (0..indexes).map(|n| word(5 + n)).collect();
    Some(Torn { failed: word(0), pieces: word(1), dropped: word(2), set_aside: word(3), indexes })
}

#[cfg(test)]
mod tests;
