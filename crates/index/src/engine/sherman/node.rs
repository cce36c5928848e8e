//! One node: proof that it was read whole, search, and every change as the WRITEs that make it. Pure: bytes in, bytes out.
//!
//! **Reading.** A header is whole if the half that its flags name fits its seal, and is of the generation that they name. A block is whole if it fits its META, which
//! is keyed by the header's generation. *Found* needs the header and that block; *absent* needs the header and all blocks.
//!
//! **Why that is right.** While a generation lasts, its fences stay, an entry stays in its slot, and blocks change one by
//! one. What a block said was so at some instant of the READ; a key that was in none of the blocks when each was read was
//! nowhere at some instant between (it is never in two slots, and moves only by being deleted and inserted again).
//!
//! **Writing** happens under the node's lock, as an ordered list of [`Patch`]es, chosen such that a writer may die after any word
//! of them and [`Node::repair`] still finds a legal state, because META changes last:
//! - *update* of a value of one word: old or new, whatever META says (longer values are written down in an intent first);
//! - *insert*: the entry, in a slot that META calls empty; then META;
//! - *remove*: META;
//! - *shrink* (split): the new half, the flag, then all METAs under the new generation: from the flag on, entries beyond the high
//!   fence do not count;
//! - *grow* (merge): the new entries, which do not count as they are beyond the high fence; all METAs under the new generation; then
//!   half and flag.

mod change;

use super::layout::{
    ACTIVE_HALF, DEAD, FLAGS_AT, INCARNATION_AT, INCARNATION_MASK, LEVEL_AT, LINKED_AT, LOW_AT, Layout,
    Presence, address, flags_of, of_half_bits, split_seal, word,
};
use crate::shared::whole::Place;
use farwood_fabric::{Buf, GlobalAddr};
use smallvec::SmallVec;
use std::ops::Deref;

/// The greatest level a node can have.
pub(super) const MAX_LEVEL: u8 = 40;

/// One WRITE within a node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Patch {
    pub(super) at: usize,
    pub(super) bytes: SmallVec<[u8; 32]>,
}

/// The WRITEs of one change, in order.
pub(super) type Patches = SmallVec<[Patch; 3]>;

/// The layouts of a tree's nodes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layouts {
    pub(super) leaf: Layout,
    pub(super) inner: Layout,
    /// Checksums are keyed by the generation. Always, but for a test of the tests.
    pub(super) keyed_by_version: bool,
    /// Blocks are checked. Always, but for a test of the tests.
    pub(super) checked: bool,
}

impl Layouts {
    pub(super) fn of(&self, level: u8) -> &Layout {
        if level == 0 { &self.leaf } else { &self.inner }
    }
}

/// What a search found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Lookup {
    Found(usize),
    Absent,
    /// The node has to be read again.
    Torn,
}

/// What the first word says, which is read at once and so always whole.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Head {
    pub(super) level: u8,
    pub(super) is_dead: bool,
    /// A pointer to it was written.
    pub(super) is_linked: bool,
}

impl Head {
    pub(super) fn of(bytes: &[u8]) -> Self {
        Self {
            level: bytes[LEVEL_AT],
            is_dead: bytes[FLAGS_AT] & DEAD != 0,
            is_linked: bytes[LINKED_AT] == 1,
        }
    }
}

/// A node whose header is whole.
#[derive(Debug)]
pub(super) struct Node<B = Buf> {
    bytes: B,
    layout: Layout,
    seed: u64,
    half: usize,
    generation: u16,
    unbounded: bool,
    keyed_by_version: bool,
    checked: bool,
}

/// What a new node is made of.
#[derive(Debug)]
pub(super) struct Plan<'a> {
    pub(super) level: u8,
    pub(super) incarnation: u64,
    pub(super) is_linked: bool,
    pub(super) low: &'a [u8],
    pub(super) high: Option<&'a [u8]>,
    pub(super) sibling: GlobalAddr,
}

impl<B: Deref<Target = [u8]>> Node<B> {
    /// The node in `bytes`, if its header is whole and its own.
    #[inline]
    pub(super) fn accept(layouts: &Layouts, place: Place, bytes: B) -> Result<Self, B> {
        let level = bytes[LEVEL_AT];
        let layout = *layouts.of(level);
        let incarnation = word(&bytes, 0) >> (8 * INCARNATION_AT) & INCARNATION_MASK;
        let seed = Layout::seed(place, incarnation, level);
        let half = usize::from(bytes[FLAGS_AT] & ACTIVE_HALF);
        let (bits, checksum) = split_seal(word(&bytes, layout.seal_at(half)));
        let (generation, unbounded) = of_half_bits(bits);
        let is_current = bytes[FLAGS_AT] & !DEAD == flags_of(generation);
        if level > MAX_LEVEL || !is_current || layout.half_checksum(&bytes, seed, half, bits) != checksum {
            return Err(bytes);
        }
        let Layouts { keyed_by_version, checked, .. } = *layouts;
        Ok(Self { bytes, layout, seed, half, generation, unbounded, keyed_by_version, checked })
    }

    pub(super) fn head(&self) -> Head {
        Head::of(&self.bytes)
    }

    #[inline]
    pub(super) fn level(&self) -> u8 {
        self.bytes[LEVEL_AT]
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    #[inline]
    pub(super) fn low(&self) -> &[u8] {
        &self.bytes[LOW_AT..LOW_AT + self.layout.key_bytes]
    }

    /// The high fence, unless there is none.
    #[inline]
    pub(super) fn high(&self) -> Option<&[u8]> {
        let at = self.layout.high_at(self.half);
        (!self.unbounded).then(|| &self.bytes[at..at + self.layout.key_bytes])
    }

    pub(super) fn sibling(&self) -> GlobalAddr {
        address(&self.bytes, self.layout.sibling_at(self.half))
    }

    /// Whether the key lies beyond the high fence.
    #[inline]
    pub(super) fn is_beyond(&self, key: &[u8]) -> bool {
        self.high().is_some_and(|high| key >= high)
    }

    #[inline]
    pub(super) fn covers(&self, key: &[u8]) -> bool {
        key >= self.low() && !self.is_beyond(key)
    }

    #[inline]
    pub(super) fn key(&self, slot: usize) -> &[u8] {
        let at = self.layout.key_at(slot);
        &self.bytes[at..at + self.layout.key_bytes]
    }

    #[inline]
    pub(super) fn value(&self, slot: usize) -> &[u8] {
        let at = self.layout.value_at(slot);
        &self.bytes[at..at + self.layout.value_bytes]
    }

    pub(super) fn child(&self, slot: usize) -> GlobalAddr {
        address(&self.bytes, self.layout.value_at(slot))
    }

    fn key_of(&self, generation: u16) -> u16 {
        if self.keyed_by_version { generation } else { 0 }
    }

    #[inline]
    fn block_is_whole_in(&self, block: usize, generation: u16) -> bool {
        let (bits, checksum) = split_seal(word(&self.bytes, self.layout.meta_at(block)));
        let generation = self.key_of(generation);
        self.layout.block_checksum(&self.bytes, self.seed, generation, block, bits) == checksum
    }

    #[inline]
    fn block_is_whole(&self, block: usize) -> bool {
        !self.checked || self.block_is_whole_in(block, self.generation)
    }

    #[inline]
    fn presence(&self, slot: usize) -> Presence {
        Presence::of(split_seal(word(&self.bytes, self.layout.meta_at(slot / 2))).0)
    }

    /// Whether all blocks are whole.
    pub(super) fn is_whole(&self) -> bool {
        (0..self.layout.blocks()).all(|block| self.block_is_whole(block))
    }

    /// Where the key is.
    #[inline]
    pub(super) fn find(&self, key: &[u8]) -> Lookup {
        // Keys of a word, which most are, are compared as such.
        let slot = match <[u8; 8]>::try_from(key) {
            Ok(key) => {
                let key = u64::from_le_bytes(key);
                self.find_where(|slot| word(&self.bytes, self.layout.key_at(slot)) == key)
            }
            Err(_) => self.find_where(|slot| self.key(slot) == key),
        };
        if let Some(slot) = slot {
            return if self.block_is_whole(slot / 2) { Lookup::Found(slot) } else { Lookup::Torn };
        }
        if self.is_whole() { Lookup::Absent } else { Lookup::Torn }
    }

    #[inline]
    fn find_where(&self, is_wanted: impl Fn(usize) -> bool) -> Option<usize> {
        (0..self.layout.capacity()).find(|slot| is_wanted(*slot) && self.presence(*slot).has(*slot))
    }

    /// The slots that count: present, and between the fences. The node must be whole.
    pub(super) fn live(&self) -> impl Iterator<Item = usize> {
        (0..self.layout.capacity())
            .filter(|slot| self.presence(*slot).has(*slot) && self.covers(self.key(*slot)))
    }

    /// The slots that count, by key.
    pub(super) fn sorted(&self) -> Vec<usize> {
        let mut slots: Vec<usize> = self.live().collect();
        slots.sort_unstable_by(|a, b| self.key(*a).cmp(self.key(*b)));
        slots
    }

    /// In an inner node that is whole: the slot of the child that `key` is under.
    pub(super) fn child_slot(&self, key: &[u8]) -> Option<usize> {
        self.live().filter(|slot| self.key(*slot) <= key).max_by_key(|slot| self.key(*slot))
    }

    /// Slots that META calls empty.
    pub(super) fn empty(&self) -> impl Iterator<Item = usize> {
        (0..self.layout.capacity()).filter(|slot| !self.presence(*slot).has(*slot))
    }

    /// A slot to insert into: an empty one, or one whose entry does not count.
    pub(super) fn free_slot(&self) -> Option<usize> {
        let left_over = || (0..self.layout.capacity()).find(|slot| !self.covers(self.key(*slot)));
        self.empty().next().or_else(left_over)
    }
}
