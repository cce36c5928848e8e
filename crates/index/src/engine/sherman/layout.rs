//! Where things are in a node, and how they are proven whole. Pure arithmetic on bytes.
//!
//! ```text
//! node    +0   flags 1 B (bit 0: which half of the header holds, bit 1: dead, 6 bits of its generation), level 1 B, incarnation 5 B, linked 1 B
//!         +8   low fence                     K bytes, inclusive; never changes in a node's life
//!         ..   half 0: high fence K, sibling 8, seal 8
//!         ..   half 1: the same
//!         ..   pair blocks to the end
//! block   key 0, value 0, META 8, key 1, value 1
//! seal    unbounded 1 bit | generation 15 | checksum 48     the generation grows with every change of the fences
//! META    present 2 bits | version 14 | checksum 48         keyed by index, address, incarnation, generation and block
//! ```
//!
//! With `bare_versions`, an ablation, there are no checksums but the paper's 4-bit versions: a word more at each end of a block,
//! of which META repeats the low bits, one for either entry, beside those of the generation. The adversary finds it out.
//!
//! K and V are the lengths of keys and values, rounded up to words. With 8 B keys and values the header takes 64 bytes, and 24
//! blocks of 40 fill a node of 1 KiB: 48 entries, 21.3 B each.
//!
//! - An entry and its META are neighbours, so that writing either entry of a block is one short WRITE. (The paper's entries have
//!   a 4-bit version at each end instead, which cannot tell a torn value when words land in any order.)
//! - The header has two halves, and one byte says which holds: a change of fences is written beside the old ones and
//!   takes effect with that byte, so that a writer that dies in the middle has changed nothing. The byte also has the low bits of that
//!   half's generation: words of a READ come in any order, and a reader may find the new byte beside what stood in that half before,
//!   which is two generations older and valid in itself.
//! - META carries the generation in its key: a reader that finds the header and a block valid knows that both belong to the
//!   same fences.
//! - Inner nodes have the layout of leaves, with child addresses as values. They are sorted where they are used, on the
//!   compute side; the paper sorts them in far memory, where a writer that dies in the middle leaves a node that nobody can mend.

use crate::shared::whole::Place;
use farwood_fabric::GlobalAddr;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

pub(super) const FLAGS_AT: usize = 0;
pub(super) const LEVEL_AT: usize = 1;
pub(super) const INCARNATION_AT: usize = 2;
pub(super) const LINKED_AT: usize = 7;
pub(super) const LOW_AT: usize = 8;
const WORD: usize = 8;

pub(super) const ACTIVE_HALF: u8 = 1;
pub(super) const DEAD: u8 = 2;
const FLAG_BITS: u32 = 2;
/// An incarnation is drawn at random when a node is made.
pub(super) const INCARNATION_MASK: u64 = (1 << 40) - 1;

const CHECKSUM_BITS: u32 = 48;
const CHECKSUM_MASK: u64 = (1 << CHECKSUM_BITS) - 1;
pub(super) const GENERATION_MASK: u16 = (1 << 15) - 1;
const UNBOUNDED: u16 = 1 << 15;
const VERSION_MASK: u16 = (1 << 14) - 1;
const _: () = assert!(INCARNATION_AT + 5 == LINKED_AT && LINKED_AT + 1 == LOW_AT);

/// The flags of a live node whose half of this generation holds. Generations and halves take turns.
#[expect(clippy::cast_possible_truncation, reason = "the low bits are wanted")]
pub(super) const fn flags_of(generation: u16) -> u8 {
    (generation as u8) << FLAG_BITS | (generation as u8 & ACTIVE_HALF)
}

/// Where things are in nodes with these sizes of keys and values.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Layout {
    pub(super) key_bytes: usize,
    pub(super) value_bytes: usize,
    key_stride: usize,
    pair: usize,
    pub(super) node_bytes: usize,
    blocks: usize,
    /// Bytes of the version at each end of a block, if there are no checksums.
    end: usize,
}

const fn to_words(bytes: usize) -> usize {
    bytes.div_ceil(WORD) * WORD
}

const fn header_bytes(key_stride: usize) -> usize {
    LOW_AT + key_stride + 2 * half_bytes(key_stride)
}

const fn half_bytes(key_stride: usize) -> usize {
    key_stride + 2 * WORD
}

impl Layout {
    pub(super) const fn new(key_bytes: usize, value_bytes: usize, node_bytes: usize) -> Self {
        let key_stride = to_words(key_bytes);
        let pair = key_stride + to_words(value_bytes);
        let blocks = node_bytes.saturating_sub(header_bytes(key_stride)) / (2 * pair + WORD);
        Self { key_bytes, value_bytes, key_stride, pair, node_bytes, blocks, end: 0 }
    }

    /// The same with the paper's versions instead of checksums.
    #[must_use]
    pub(super) const fn bare(mut self) -> Self {
        self.end = WORD;
        self.blocks = self.node_bytes.saturating_sub(header_bytes(self.key_stride)) / self.block_bytes();
        self
    }

    pub(super) const fn is_bare(&self) -> bool {
        self.end > 0
    }

    /// The bytes of the smallest node that holds so many entries.
    pub(super) const fn bytes_for(key_bytes: usize, value_bytes: usize, entries: usize) -> usize {
        let key_stride = to_words(key_bytes);
        let pair = key_stride + to_words(value_bytes);
        header_bytes(key_stride) + entries.div_ceil(2) * (2 * pair + WORD)
    }

    /// How many entries a node holds.
    #[inline]
    pub(super) const fn capacity(&self) -> usize {
        2 * self.blocks
    }

    #[inline]
    pub(super) const fn blocks(&self) -> usize {
        self.blocks
    }

    /// Where the blocks begin.
    #[inline]
    pub(super) const fn blocks_at(&self) -> usize {
        header_bytes(self.key_stride)
    }

    /// Where the blocks end.
    pub(super) const fn blocks_end(&self) -> usize {
        self.blocks_at() + self.blocks * self.block_bytes()
    }

    #[inline]
    pub(super) const fn block_bytes(&self) -> usize {
        2 * (self.pair + self.end) + WORD
    }

    /// Bytes of a key with its value, in whole words.
    pub(super) const fn entry_bytes(&self) -> usize {
        self.pair
    }

    #[inline]
    pub(super) const fn block_at(&self, block: usize) -> usize {
        self.blocks_at() + block * self.block_bytes()
    }

    #[inline]
    pub(super) const fn key_at(&self, slot: usize) -> usize {
        self.block_at(slot / 2) + self.end + (slot % 2) * (self.pair + WORD)
    }

    #[inline]
    pub(super) const fn value_at(&self, slot: usize) -> usize {
        self.key_at(slot) + self.key_stride
    }

    #[inline]
    pub(super) const fn meta_at(&self, block: usize) -> usize {
        self.block_at(block) + self.end + self.pair
    }

    #[inline]
    const fn half_at(&self, half: usize) -> usize {
        LOW_AT + self.key_stride + half * half_bytes(self.key_stride)
    }

    #[inline]
    pub(super) const fn high_at(&self, half: usize) -> usize {
        self.half_at(half)
    }

    #[inline]
    pub(super) const fn sibling_at(&self, half: usize) -> usize {
        self.half_at(half) + self.key_stride
    }

    #[inline]
    pub(super) const fn seal_at(&self, half: usize) -> usize {
        self.sibling_at(half) + WORD
    }

    /// The bytes of a half: high fence, sibling, seal.
    pub(super) const fn half(&self, half: usize) -> std::ops::Range<usize> {
        self.half_at(half)..self.half_at(half) + half_bytes(self.key_stride)
    }

    /// Whether a value that is overwritten in place can be left half old and half new. One of a word cannot.
    pub(super) const fn update_needs_intent(&self) -> bool {
        self.pair - self.key_stride > WORD
    }

    /// The most bytes that the WRITE of another value takes: the value, META, and a key that lies between them.
    pub(super) const fn update_bytes(&self) -> usize {
        if self.is_bare() { self.block_bytes() } else { self.entry_bytes() + WORD }
    }

    /// What all checksums of a node in this life are keyed by.
    #[inline]
    pub(super) fn seed(place: Place, incarnation: u64, level: u8) -> u64 {
        let mut key = [0; 24];
        key[..8].copy_from_slice(&place.addr.to_raw().to_le_bytes());
        key[8..16].copy_from_slice(&(incarnation << 8 | u64::from(level)).to_le_bytes());
        key[16..].copy_from_slice(&u64::from(place.index).to_le_bytes());
        xxh3_64(&key)
    }

    /// The checksum of a half, with the bits beside it.
    #[inline]
    pub(super) fn half_checksum(&self, bytes: &[u8], seed: u64, half: usize, bits: u16) -> u64 {
        if self.is_bare() {
            return 0;
        }
        let low = &bytes[LOW_AT..LOW_AT + self.key_stride];
        let rest = &bytes[self.high_at(half)..self.seal_at(half)];
        let hash = xxh3_64_with_seed(low, seed);
        xxh3_64_with_seed(rest, hash ^ u64::from(bits)) & CHECKSUM_MASK
    }

    /// The checksum of a block, with the bits beside it.
    #[inline]
    pub(super) fn block_checksum(
        &self,
        bytes: &[u8],
        seed: u64,
        generation: u16,
        block: usize,
        bits: u16,
    ) -> u64 {
        if self.is_bare() {
            let (front, rear) = self.ends(block);
            return u64::from(generation & 15) << 8 | (word(bytes, front) & 15) << 4 | word(bytes, rear) & 15;
        }
        let at = self.block_at(block);
        let number = u64::from(generation) << 32 | (block as u64 + 1);
        let seed = seed.wrapping_add(number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let hash = xxh3_64_with_seed(&bytes[at..at + self.pair], seed);
        let second = at + self.pair + WORD;
        xxh3_64_with_seed(&bytes[second..second + self.pair], hash ^ u64::from(bits)) & CHECKSUM_MASK
    }
}

impl Layout {
    /// The versions at the ends of a block.
    const fn ends(&self, block: usize) -> (usize, usize) {
        (self.block_at(block), self.block_at(block) + self.block_bytes() - WORD)
    }

    /// Counts the versions at the ends of a block on.
    pub(super) fn count_on(&self, bytes: &mut [u8], block: usize) {
        let (front, rear) = self.ends(block);
        for at in [front, rear] {
            let version = word(bytes, at).wrapping_add(1) & 15;
            set_word(bytes, at, version);
        }
    }
}

/// The word at `at`.
#[inline]
pub(super) fn word(bytes: &[u8], at: usize) -> u64 {
    bytes[at..at + WORD].try_into().map_or(0, u64::from_le_bytes)
}

pub(super) fn set_word(bytes: &mut [u8], at: usize, word: u64) {
    bytes[at..at + WORD].copy_from_slice(&word.to_le_bytes());
}

pub(super) fn address(bytes: &[u8], at: usize) -> GlobalAddr {
    GlobalAddr::from_raw(word(bytes, at))
}

/// A META or seal word, taken apart: 16 bits and a checksum.
#[inline]
pub(super) fn split_seal(word: u64) -> (u16, u64) {
    let bits = (word >> CHECKSUM_BITS) as u16;
    (bits, word & CHECKSUM_MASK)
}

#[inline]
pub(super) fn join_seal(bits: u16, checksum: u64) -> u64 {
    u64::from(bits) << CHECKSUM_BITS | checksum
}

/// The bits of a META word: which entries are present, and which version of the block this is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Presence {
    bits: u16,
}

impl Presence {
    #[inline]
    pub(super) fn of(bits: u16) -> Self {
        Self { bits }
    }

    #[inline]
    pub(super) fn has(self, slot: usize) -> bool {
        self.bits >> (14 + slot % 2) & 1 == 1
    }

    #[must_use]
    pub(super) fn with(self, slot: usize, present: bool) -> Self {
        let bit = 1 << (14 + slot % 2);
        Self { bits: if present { self.bits | bit } else { self.bits & !bit } }
    }

    /// The same entries, one version on.
    #[must_use]
    pub(super) fn next(self) -> u16 {
        self.bits & !VERSION_MASK | self.bits.wrapping_add(1) & VERSION_MASK
    }
}

/// The bits of a seal.
#[inline]
pub(super) fn half_bits(generation: u16, unbounded: bool) -> u16 {
    generation & GENERATION_MASK | if unbounded { UNBOUNDED } else { 0 }
}

/// Generation, and whether there is no high fence.
#[inline]
pub(super) fn of_half_bits(bits: u16) -> (u16, bool) {
    (bits & GENERATION_MASK, bits & UNBOUNDED != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kibibyte_holds_48_entries_of_8_and_8_bytes() {
        let layout = Layout::new(8, 8, 1024);
        assert_eq!((layout.capacity(), layout.blocks_at(), layout.blocks_end()), (48, 64, 1024));
        // At 80% fill, leaves and inner nodes: 1/38.4 of a leaf, 1/38.4 of that of an inner node, and so on.
        let per_entry = 1024.0 / (48.0 * 0.8);
        let with_inner = per_entry / (1.0 - 1.0 / 38.4);
        assert!(with_inner < 28.0, "{with_inner}");
        assert_eq!(Layout::bytes_for(8, 8, 48), 1024);
    }

    #[test]
    fn nothing_overlaps_and_nothing_lies_outside() {
        for (key_bytes, value_bytes, node_bytes) in [(8, 8, 1024), (1, 1, 144), (20, 100, 2048), (8, 9, 1000)]
        {
            let layout = Layout::new(key_bytes, value_bytes, node_bytes);
            let mut used = vec![0u8; node_bytes];
            let mut claim = |at: usize, bytes: usize| used[at..at + bytes].iter_mut().for_each(|b| *b += 1);
            claim(0, 8);
            claim(LOW_AT, layout.key_stride);
            for half in 0..2 {
                claim(layout.half(half).start, layout.half(half).len());
            }
            for slot in 0..layout.capacity() {
                claim(layout.key_at(slot), layout.key_stride);
                claim(layout.value_at(slot), layout.pair - layout.key_stride);
            }
            for block in 0..layout.blocks() {
                claim(layout.meta_at(block), 8);
            }
            let end = layout.blocks_end();
            assert!(used[..end].iter().all(|n| *n == 1) && used[end..].iter().all(|n| *n == 0));
        }
    }

    #[test]
    fn presence_and_version_do_not_touch_each_other() {
        let mut presence = Presence::of(0).with(1, true);
        for _ in 0..(1 << 14) + 5 {
            presence = Presence::of(presence.next());
            assert!(presence.has(1) && !presence.has(0));
        }
        assert_eq!(presence.with(1, false).bits & !VERSION_MASK, 0);
    }
}
