//! One node: proof that it was read whole, search, and every change as the WRITEs that make it. Pure: bytes in, bytes out.
//!
//! **Reading.** A header is whole if the half that its flags name fits its seal. A block is whole if it fits its META, which
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

use super::layout::{
    ACTIVE_HALF, DEAD, FLAGS_AT, GENERATION_MASK, INCARNATION_AT, INCARNATION_MASK, LEVEL_AT, LINKED_AT,
    LOW_AT, Layout, Presence, address, half_bits, join_seal, of_half_bits, set_word, split_seal, word,
};
use crate::shared::whole::Place;
use farwood_fabric::{Buf, GlobalAddr};
use smallvec::SmallVec;
use std::ops::{Deref, DerefMut};

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
        if level > MAX_LEVEL || layout.half_checksum(&bytes, seed, half, bits) != checksum {
            return Err(bytes);
        }
        let (generation, unbounded) = of_half_bits(bits);
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

impl<B: DerefMut<Target = [u8]>> Node<B> {
    /// Makes a new node in `bytes`. The blocks hold `entries`, which must not be more than fit.
    pub(super) fn build<'a>(
        layouts: &Layouts,
        place: Place,
        mut bytes: B,
        plan: &Plan<'_>,
        entries: impl IntoIterator<Item = (&'a [u8], &'a [u8])>,
    ) -> Self {
        let layout = *layouts.of(plan.level);
        bytes.fill(0);
        let incarnation = plan.incarnation & INCARNATION_MASK;
        set_word(&mut bytes, 0, incarnation << (8 * INCARNATION_AT));
        bytes[LEVEL_AT] = plan.level;
        bytes[LINKED_AT] = u8::from(plan.is_linked);
        bytes[LOW_AT..LOW_AT + plan.low.len()].copy_from_slice(plan.low);
        let seed = Layout::seed(place, incarnation, plan.level);
        let Layouts { keyed_by_version, checked, .. } = *layouts;
        let mut node =
            Self { bytes, layout, seed, half: 0, generation: 0, unbounded: true, keyed_by_version, checked };
        node.set_half(0, plan.high, plan.sibling, 0);
        node.unbounded = plan.high.is_none();
        let mut filled = 0;
        for (slot, (key, value)) in entries.into_iter().enumerate() {
            node.set_entry(slot, key, value);
            filled = slot + 1;
        }
        for block in 0..layout.blocks() {
            let presence = Presence::of(0);
            let present = presence.with(0, 2 * block < filled).with(1, 2 * block + 1 < filled);
            node.seal_block(block, present);
        }
        node
    }

    fn set_half(&mut self, half: usize, high: Option<&[u8]>, sibling: GlobalAddr, generation: u16) {
        let layout = self.layout;
        let range = layout.half(half);
        self.bytes[range].fill(0);
        let high_bytes = high.unwrap_or_default();
        let at = layout.high_at(half);
        self.bytes[at..at + high_bytes.len()].copy_from_slice(high_bytes);
        set_word(&mut self.bytes, layout.sibling_at(half), sibling.to_raw());
        let bits = half_bits(generation, high.is_none());
        let checksum = layout.half_checksum(&self.bytes, self.seed, half, bits);
        set_word(&mut self.bytes, layout.seal_at(half), join_seal(bits, checksum));
    }

    fn set_entry(&mut self, slot: usize, key: &[u8], value: &[u8]) {
        let (key_at, value_at) = (self.layout.key_at(slot), self.layout.value_at(slot));
        self.bytes[key_at..key_at + self.layout.entry_bytes()].fill(0);
        self.bytes[key_at..key_at + key.len()].copy_from_slice(key);
        self.bytes[value_at..value_at + value.len()].copy_from_slice(value);
    }

    fn seal_block(&mut self, block: usize, presence: Presence) {
        self.seal_block_in(block, presence, self.generation);
    }

    fn seal_block_in(&mut self, block: usize, presence: Presence, generation: u16) {
        if self.layout.is_bare() {
            self.layout.count_on(&mut self.bytes, block);
        }
        let bits = presence.next();
        let generation = self.key_of(generation);
        let checksum = self.layout.block_checksum(&self.bytes, self.seed, generation, block, bits);
        set_word(&mut self.bytes, self.layout.meta_at(block), join_seal(bits, checksum));
    }

    fn patch(&self, at: usize, len: usize) -> Patch {
        Patch { at, bytes: SmallVec::from_slice(&self.bytes[at..at + len]) }
    }

    fn meta_patch(&self, block: usize) -> Patch {
        if self.layout.is_bare() {
            return self.patch(self.layout.block_at(block), self.layout.block_bytes());
        }
        self.patch(self.layout.meta_at(block), 8)
    }

    fn blocks_patch(&self) -> Patch {
        let at = self.layout.blocks_at();
        self.patch(at, self.layout.blocks_end() - at)
    }

    fn flags_patch(&self) -> Patch {
        self.patch(FLAGS_AT, 1)
    }

    /// Gives a slot that counts another value: the value and META, which are neighbours, or have only the key between them.
    pub(super) fn update(&mut self, slot: usize, value: &[u8]) -> Patches {
        let at = self.layout.value_at(slot);
        self.bytes[at..at + value.len()].copy_from_slice(value);
        let presence = self.presence(slot);
        self.seal_block(slot / 2, presence);
        if self.layout.is_bare() {
            return SmallVec::from_iter([self.meta_patch(slot / 2)]);
        }
        let meta = self.layout.meta_at(slot / 2);
        let (from, to) =
            if slot % 2 == 0 { (at, meta + 8) } else { (meta, self.layout.value_at(slot) + to_words(value)) };
        SmallVec::from_iter([self.patch(from, to - from)])
    }

    /// Fills a free slot.
    pub(super) fn insert(&mut self, slot: usize, key: &[u8], value: &[u8]) -> Patches {
        let mut patches = Patches::new();
        let before = self.presence(slot);
        if before.has(slot) {
            // An entry that does not count must not become a mixture that does.
            self.seal_block(slot / 2, before.with(slot, false));
            patches.push(self.meta_patch(slot / 2));
        }
        self.set_entry(slot, key, value);
        patches.push(self.patch(self.layout.key_at(slot), self.layout.entry_bytes()));
        let presence = self.presence(slot).with(slot, true);
        self.seal_block(slot / 2, presence);
        patches.push(self.meta_patch(slot / 2));
        patches
    }

    /// Empties a slot.
    pub(super) fn remove(&mut self, slot: usize) -> Patches {
        let presence = self.presence(slot).with(slot, false);
        self.seal_block(slot / 2, presence);
        SmallVec::from_iter([self.meta_patch(slot / 2)])
    }

    /// Ends the node at `high`; what is beyond has moved to `sibling`.
    pub(super) fn shrink(&mut self, high: &[u8], sibling: GlobalAddr) -> Patches {
        let mut patches = self.turn(Some(high), sibling);
        self.drop_what_does_not_count();
        patches.push(self.blocks_patch());
        patches
    }

    /// Takes over the entries and the place of the node to the right: first what to write beside what holds, then what
    /// makes it hold. `None` if they do not fit.
    pub(super) fn grow<C: Deref<Target = [u8]>>(&mut self, right: &Node<C>) -> Option<(Patches, Patches)> {
        let empty: Vec<usize> = self.empty().collect();
        let moving: Vec<usize> = right.live().collect();
        if empty.len() < moving.len() {
            return None;
        }
        let kept: Vec<usize> = self.live().chain(empty.iter().copied().take(moving.len())).collect();
        for (slot, from) in empty.iter().zip(&moving) {
            self.set_entry(*slot, right.key(*from), right.value(*from));
        }
        let mut first = Patches::new();
        if !moving.is_empty() {
            first.push(self.blocks_patch());
        }
        let generation = next_generation(self.generation);
        for block in 0..self.layout.blocks() {
            let has = |n: usize| kept.contains(&(2 * block + n));
            let presence = self.presence(2 * block).with(0, has(0)).with(1, has(1));
            self.seal_block_in(block, presence, generation);
        }
        first.push(self.blocks_patch());
        let high = right.high().map(<[u8]>::to_vec);
        Some((first, self.turn(high.as_deref(), right.sibling())))
    }

    /// New fences, which hold with the last patch.
    fn turn(&mut self, high: Option<&[u8]>, sibling: GlobalAddr) -> Patches {
        let half = 1 - self.half;
        self.generation = next_generation(self.generation);
        self.set_half(half, high, sibling, self.generation);
        self.half = half;
        self.unbounded = high.is_none();
        self.bytes[FLAGS_AT] ^= ACTIVE_HALF;
        let range = self.layout.half(half);
        SmallVec::from_iter([self.patch(range.start, range.len()), self.flags_patch()])
    }

    fn drop_what_does_not_count(&mut self) {
        for block in 0..self.layout.blocks() {
            let counts = |slot: usize| self.presence(slot).has(slot) && self.covers(self.key(slot));
            let presence = self.presence(2 * block);
            let presence = presence.with(0, counts(2 * block)).with(1, counts(2 * block + 1));
            self.seal_block(block, presence);
        }
    }

    /// Mends what a writer that died left: every block is sealed as META says it is. `None` if nothing was broken. Only under
    /// the node's lock: there a block that is not whole can be nobody's work in progress.
    pub(super) fn repair(&mut self) -> Option<Patch> {
        if (0..self.layout.blocks()).all(|block| self.block_is_whole_in(block, self.generation)) {
            return None;
        }
        self.drop_what_does_not_count();
        Some(self.blocks_patch())
    }

    /// Ends the node's life.
    pub(super) fn bury(&mut self) -> Patch {
        self.bytes[FLAGS_AT] |= DEAD;
        self.flags_patch()
    }

    /// Says that a pointer to the node was written.
    pub(super) fn link(&mut self) -> Patch {
        self.bytes[LINKED_AT] = 1;
        self.patch(LINKED_AT, 1)
    }
}

fn next_generation(generation: u16) -> u16 {
    generation.wrapping_add(1) & GENERATION_MASK
}

fn to_words(value: &[u8]) -> usize {
    value.len().div_ceil(8) * 8
}
