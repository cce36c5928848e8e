//! How nodes are made and changed: each change as the WRITEs that make it, in order. What the order is for stands in `node`.

use super::{Layouts, Node, Patch, Patches, Plan};
use crate::engine::sherman::layout::{
    DEAD, FLAGS_AT, GENERATION_MASK, INCARNATION_AT, INCARNATION_MASK, LEVEL_AT, LINKED_AT, LOW_AT, Layout,
    Presence, flags_of, half_bits, join_seal, set_word,
};
use crate::shared::whole::Place;
use farwood_fabric::GlobalAddr;
use smallvec::SmallVec;
use std::ops::{Deref, DerefMut};

impl<B: DerefMut<Target = [u8]>> Node<B> {
    /// Makes a new node in `bytes`. The blocks hold `entries`, which must not be more than fit.
    pub(in super::super) fn build<'a>(
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
    pub(in super::super) fn update(&mut self, slot: usize, value: &[u8]) -> Patches {
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
    pub(in super::super) fn insert(&mut self, slot: usize, key: &[u8], value: &[u8]) -> Patches {
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
    pub(in super::super) fn remove(&mut self, slot: usize) -> Patches {
        let presence = self.presence(slot).with(slot, false);
        self.seal_block(slot / 2, presence);
        SmallVec::from_iter([self.meta_patch(slot / 2)])
    }

    /// Ends the node at `high`; what is beyond has moved to `sibling`.
    pub(in super::super) fn shrink(&mut self, high: &[u8], sibling: GlobalAddr) -> Patches {
        let mut patches = self.turn(Some(high), sibling);
        self.drop_what_does_not_count();
        patches.push(self.blocks_patch());
        patches
    }

    /// Takes over the entries and the place of the node to the right: first what to write beside what holds, then what
    /// makes it hold. `None` if they do not fit.
    pub(in super::super) fn grow<C: Deref<Target = [u8]>>(
        &mut self,
        right: &Node<C>,
    ) -> Option<(Patches, Patches)> {
        let moving = right.live().map(|slot| (right.key(slot), right.value(slot)));
        let first = self.take_in(moving)?;
        Some((first, self.turn(right.high(), right.sibling())))
    }

    /// Fills a node that is empty and the last one; if there is a `next` one, ends it there. It holds with the last patch. `None` if the entries
    /// do not fit.
    pub(in super::super) fn fill<'a>(
        &mut self,
        entries: impl Iterator<Item = (&'a [u8], &'a [u8])>,
        next: Option<(&[u8], GlobalAddr)>,
    ) -> Option<Patches> {
        let mut patches = self.take_in(entries)?;
        let (high, sibling) = next.unzip();
        patches.extend(self.turn(high, sibling.unwrap_or(GlobalAddr::NULL)));
        Some(patches)
    }

    /// Entries into empty slots, where they do not count before the next generation. `None` if they do not fit.
    fn take_in<'a>(&mut self, entries: impl Iterator<Item = (&'a [u8], &'a [u8])>) -> Option<Patches> {
        let (entries, empty) = (entries.collect::<Vec<_>>(), self.empty().collect::<Vec<_>>());
        if empty.len() < entries.len() {
            return None;
        }
        let kept: Vec<usize> = self.live().chain(empty.iter().copied().take(entries.len())).collect();
        for (slot, (key, value)) in empty.iter().zip(&entries) {
            self.set_entry(*slot, key, value);
        }
        let mut patches = Patches::new();
        if !entries.is_empty() {
            patches.push(self.blocks_patch());
        }
        let generation = next_generation(self.generation);
        for block in 0..self.layout.blocks() {
            let has = |n: usize| kept.contains(&(2 * block + n));
            let presence = self.presence(2 * block).with(0, has(0)).with(1, has(1));
            self.seal_block_in(block, presence, generation);
        }
        patches.push(self.blocks_patch());
        Some(patches)
    }

    /// New fences, which hold with the last patch.
    fn turn(&mut self, high: Option<&[u8]>, sibling: GlobalAddr) -> Patches {
        let half = 1 - self.half;
        self.generation = next_generation(self.generation);
        self.set_half(half, high, sibling, self.generation);
        self.half = half;
        self.unbounded = high.is_none();
        self.bytes[FLAGS_AT] = flags_of(self.generation);
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
    pub(in super::super) fn repair(&mut self) -> Option<Patch> {
        if (0..self.layout.blocks()).all(|block| self.block_is_whole_in(block, self.generation)) {
            return None;
        }
        self.drop_what_does_not_count();
        Some(self.blocks_patch())
    }

    /// Ends the node's life.
    pub(in super::super) fn bury(&mut self) -> Patch {
        self.bytes[FLAGS_AT] |= DEAD;
        self.flags_patch()
    }

    /// Says that a pointer to the node was written.
    pub(in super::super) fn link(&mut self) -> Patch {
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
