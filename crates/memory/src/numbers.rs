//! (Servers other than the coordinator) Which indexes may have chunks here, by their numbers.
//!
//! The coordinator numbers indexes one after the other, and never uses a number twice. Sessions bring two things under its seal: the number
//! that the next index gets, and the release of an index that was dropped, which every server confirms before the coordinator forgets the
//! index. So the indexes that may have chunks here are those below the next number, less those that were released: never more than
//! the catalog has room for. A client that asks in the name of any other is refused, since nobody would ever release what it got.
//!
//! A server that came to the pool with empty memory is told by its first session, under a seal that was made for this memory, which indexes
//! there are.
//!
//! Each number has a word in the unused catalog of this server. It is stored before the next number, and cleared after the chunks are
//! released: a crash leaves a number that is learned, or released, once more.

use crate::config::ServerConfig;
use crate::layout::{self, Layout, catalog_entry, superblock};
use farwood_fabric::control::{ControlError, IndexId};
use farwood_fabric::server::{ServerMemory, StartError};

/// The numbers.
#[derive(Debug)]
pub(crate) struct IndexNumbers {
    layout: Layout,
    /// The number of the next index, as far as this server knows; 0: it knows nothing.
    next: IndexId,
    /// Indexes below this lost what they had here.
    lost_below: IndexId,
    /// Those that may have chunks, each at the place of its word; 0 is none.
    slots: Vec<IndexId>,
}

impl IndexNumbers {
    /// Reads the numbers from META.
    pub(crate) fn load(memory: &dyn ServerMemory, config: &ServerConfig) -> Result<Self, StartError> {
        let layout = Layout::new(config);
        let number = |what: &str, at: u64| {
            IndexId::try_from(layout::load(memory, at)).map_err(|_| layout::damaged(what, at))
        };
        let words = (0..config.max_indexes).map(|slot| number("number of an index", word_at(layout, slot)));
        let slots = if config.is_coordinator() { Vec::new() } else { words.collect::<Result<_, _>>()? };
        Ok(Self {
            layout,
            next: number("the next index", superblock::NEXT_INDEX_AT)?,
            lost_below: number("what was lost", superblock::LOST_BELOW_AT)?,
            slots,
        })
    }

    /// Indexes below this lost what they had here.
    pub(crate) fn lost_below(&self) -> IndexId {
        self.lost_below
    }

    /// The first session has come, and says which indexes there are: they had nothing here, or lost it.
    pub(crate) fn begin(&mut self, memory: &dyn ServerMemory, next: IndexId, indexes: &[IndexId]) {
        self.lost_below = next;
        layout::store(memory, superblock::LOST_BELOW_AT, u64::from(next));
        for slot in 0..self.slots.len() {
            self.set(memory, slot, indexes.get(slot).copied().unwrap_or(0));
        }
        self.set_next(memory, next);
    }

    /// The coordinator says that the next index gets this number.
    pub(crate) fn learn(&mut self, memory: &dyn ServerMemory, next: IndexId) {
        if next <= self.next {
            return;
        }
        // No more than the catalog has room for are not released.
        let most = IndexId::try_from(self.slots.len()).unwrap_or(IndexId::MAX);
        for number in self.next.max(next.saturating_sub(most)).max(1)..next {
            let is_new = !self.slots.contains(&number);
            if let Some(slot) = self.slots.iter().position(|held| *held == 0).filter(|_| is_new) {
                self.set(memory, slot, number);
            }
        }
        self.set_next(memory, next);
    }

    /// Whether the index may be given chunks here.
    pub(crate) fn check(&self, index: IndexId) -> Result<(), ControlError> {
        if index > 0 && self.slots.contains(&index) {
            return Ok(());
        }
        Err(ControlError::NoSuchIndex { name: format!("#{index}") })
    }

    /// The coordinator says that the index was dropped, and its chunks have been released here.
    pub(crate) fn released(&mut self, memory: &dyn ServerMemory, index: IndexId) {
        // It may not have been heard of before, and must not be taken for a new one later.
        self.learn(memory, index.saturating_add(1));
        if let Some(slot) = self.slots.iter().position(|held| *held == index) {
            self.set(memory, slot, 0);
        }
    }

    fn set_next(&mut self, memory: &dyn ServerMemory, next: IndexId) {
        self.next = next;
        layout::store(memory, superblock::NEXT_INDEX_AT, u64::from(next));
    }

    fn set(&mut self, memory: &dyn ServerMemory, slot: usize, number: IndexId) {
        self.slots[slot] = number;
        let at = word_at(self.layout, u16::try_from(slot).unwrap_or(u16::MAX));
        layout::store(memory, at, u64::from(number));
    }
}

fn word_at(layout: Layout, slot: u16) -> u64 {
    layout.catalog_entry(slot) + catalog_entry::NUMBER_AT
}
