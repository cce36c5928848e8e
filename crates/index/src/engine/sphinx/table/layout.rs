//! A subtable's bytes, and which of them a hash may be in: pure.
//!
//! ```text
//! subtable  +0    lock       8 B   who splits it (see `split`)
//!           +8    state      8 B   below
//!           +16   children 160 B   for each depth, the subtable that was split off there; 0: none yet
//!           +192  groups           of three buckets of eight slots of 8 B each
//!
//! group     [ main bucket 0 ][ overflow bucket ][ main bucket 1 ]     either main bucket and the overflow bucket are 128 B in a row
//!
//! state     63       48 47     24 23   16 15   8 7     0
//!           [ magic 16 ][ suffix 24 ][ phase 8 ][ birth 8 ][ depth 8 ]
//!
//! slot      [ frozen 1 ][ entry 63 ]                                  0: empty
//! ```
//!
//! A hash belongs to the subtable whose suffix its lowest `depth` bits are. Splitting a subtable of depth d leaves it those hashes whose
//! bit d is 0; its suffix stays the same number.

use super::{HASH_BITS, MAX_DEPTH};

/// The slots of a bucket.
pub(super) const BUCKET_SLOTS: usize = 8;
const BUCKET_BYTES: u64 = 8 * BUCKET_SLOTS as u64;
const GROUP_BYTES: u64 = 3 * BUCKET_BYTES;
/// What one READ of a main bucket with its overflow bucket brings.
pub(super) const PAIR_BYTES: usize = 2 * BUCKET_SLOTS * 8;

pub(super) const LOCK_AT: u64 = 0;
pub(super) const STATE_AT: u64 = 8;
pub(super) const CHILDREN_AT: u64 = 16;
/// Lock, state and children.
pub(super) const RECORD_BYTES: u64 = 192;
const _: () = assert!(CHILDREN_AT + 8 * MAX_DEPTH as u64 <= RECORD_BYTES);
const _: () = assert!(RECORD_BYTES % 64 == 0 && (MAX_DEPTH as u32) < 24 && HASH_BITS >= 32);

/// Set in a slot whose entry is being moved: nobody may change it.
pub(super) const FROZEN: u64 = 1 << 63;

const MAGIC: u64 = 0x5ace;

/// How far a split has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Phase {
    /// None is under way.
    Idle = 0,
    /// Entries are being copied. They still count where they are; new ones that would have to move too are not accepted.
    Splitting = 1,
    /// The new subtable counts. Copies of what moved there may still be here, frozen.
    Clearing = 2,
}

/// A subtable's state, which one word holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct State {
    /// How many bits of a hash decide whether it belongs here.
    pub(super) depth: u8,
    /// How many did when the subtable was made.
    pub(super) birth: u8,
    pub(super) phase: Phase,
    /// What they have to be.
    pub(super) suffix: u64,
}

/// What a state says about one hash.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Standing {
    /// It belongs here.
    Here,
    /// It belongs here until the split that is under way is through.
    Leaving,
    /// It belongs to another subtable.
    Gone,
}

impl State {
    pub(super) fn new(birth: u8, suffix: u64) -> Self {
        Self { depth: birth, birth, phase: Phase::Idle, suffix }
    }

    pub(super) fn to_raw(self) -> u64 {
        MAGIC << 48
            | self.suffix << 24
            | (self.phase as u64) << 16
            | u64::from(self.birth) << 8
            | u64::from(self.depth)
    }

    /// `None` if the word is not a subtable's state.
    pub(super) fn from_raw(raw: u64) -> Option<Self> {
        let [depth, birth, phase, ..] = raw.to_le_bytes();
        let phase = match phase {
            0 => Phase::Idle,
            1 => Phase::Splitting,
            2 => Phase::Clearing,
            _ => return None,
        };
        let suffix = raw >> 24 & 0xff_ffff;
        let is_sound =
            raw >> 48 == MAGIC && birth <= depth && depth <= MAX_DEPTH && suffix & !low_bits(birth) == 0;
        is_sound.then_some(Self { depth, birth, phase, suffix })
    }

    /// Whether a hash belongs here, going by so many bits.
    fn is_suffix_of(self, hash: u64, depth: u8) -> bool {
        hash & low_bits(depth) == self.suffix
    }

    pub(super) fn standing(self, hash: u64) -> Standing {
        if !self.is_suffix_of(hash, self.depth) {
            Standing::Gone
        } else if self.phase == Phase::Splitting && !self.is_suffix_of(hash, self.depth + 1) {
            Standing::Leaving
        } else {
            Standing::Here
        }
    }

    /// The state of the subtable that is split off at this depth.
    pub(super) fn child(self) -> Self {
        Self::new(self.depth + 1, self.suffix | 1 << self.depth)
    }

    pub(super) fn with(self, depth: u8, phase: Phase) -> Self {
        Self { depth, phase, ..self }
    }
}

/// The lowest `count` bits.
pub(super) fn low_bits(count: u8) -> u64 {
    (1u64 << count) - 1
}

/// How large a subtable is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Geometry {
    groups: u64,
}

impl Geometry {
    pub(super) fn new(groups: u32) -> Self {
        Self { groups: u64::from(groups) }
    }

    /// Bytes of a subtable.
    pub(super) fn bytes(self) -> u64 {
        RECORD_BYTES + self.groups * GROUP_BYTES
    }

    /// Bytes of its groups.
    pub(super) fn groups_bytes(self) -> u64 {
        self.groups * GROUP_BYTES
    }

    /// Where the two pairs of buckets are that a hash may be in, from the start of the subtable; always in two groups.
    pub(super) fn pairs(self, hash: u64) -> [u64; 2] {
        // Mixed, so that these bits are independent of the suffix, which all hashes of a subtable share. (SplitMix64's finaliser.)
        let mut mixed = hash & ((1 << HASH_BITS) - 1);
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 31;
        let first = scale(mixed >> 40, self.groups);
        let second = (first + 1 + scale(mixed >> 16 & 0xff_ffff, self.groups - 1)) % self.groups;
        let at = |group: u64, side: u64| RECORD_BYTES + group * GROUP_BYTES + side * BUCKET_BYTES;
        [at(first, mixed & 1), at(second, mixed >> 1 & 1)]
    }

    /// Whether the slot at this offset is one of those that a hash may be in.
    pub(super) fn may_hold(self, hash: u64, slot: u64) -> bool {
        self.pairs(hash).iter().any(|pair| (*pair..pair + PAIR_BYTES as u64).contains(&slot))
    }
}

/// 24 bits, scaled down to below `bound`.
fn scale(bits: u64, bound: u64) -> u64 {
    (bits * bound) >> 24
}

/// Within the pair at `offset`, the order in which empty slots are taken: those of the main bucket, then the overflow bucket's.
pub(super) fn slot_order(offset: u64) -> impl Iterator<Item = usize> {
    let is_main_first = (offset - RECORD_BYTES) % GROUP_BYTES == 0;
    let turn = if is_main_first { 0 } else { BUCKET_SLOTS };
    (0..2 * BUCKET_SLOTS).map(move |n| (n + turn) % (2 * BUCKET_SLOTS))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_state_is_read_back_and_nothing_else_is_one(birth in 0u8..=MAX_DEPTH, more in 0u8..=MAX_DEPTH, suffix: u64, phase in 0u8..3, noise: u64) {
            let depth = (birth + more).min(MAX_DEPTH);
            let phase = [Phase::Idle, Phase::Splitting, Phase::Clearing][usize::from(phase)];
            let state = State { depth, birth, phase, suffix: suffix & low_bits(birth) };
            prop_assert_eq!(State::from_raw(state.to_raw()), Some(state));
            if let Some(other) = State::from_raw(noise) {
                prop_assert_eq!(other.to_raw(), noise);
            }
            prop_assert_eq!(State::from_raw(noise & 0xffff_ffff_ffff), None);
        }

        #[test]
        fn every_hash_has_two_pairs_in_two_groups(groups in 2u32..300, hash: u64) {
            let geometry = Geometry::new(groups);
            let [one, two] = geometry.pairs(hash);
            let group = |pair: u64| (pair - RECORD_BYTES) / GROUP_BYTES;
            prop_assert_ne!(group(one), group(two));
            for pair in [one, two] {
                prop_assert!(pair + PAIR_BYTES as u64 <= geometry.bytes());
                prop_assert!(pair % 64 == 0 && (pair - RECORD_BYTES) % GROUP_BYTES <= BUCKET_BYTES);
                prop_assert!(geometry.may_hold(hash, pair) && geometry.may_hold(hash, pair + 120));
                prop_assert_eq!(slot_order(pair).count(), 2 * BUCKET_SLOTS);
            }
        }

        #[test]
        fn a_split_gives_each_hash_to_exactly_one_side(depth in 0u8..MAX_DEPTH, suffix: u64, hash: u64) {
            let suffix = suffix & low_bits(depth);
            let hash = hash & !low_bits(depth) | suffix;
            let before = State::new(depth, suffix);
            prop_assert_eq!(before.standing(hash), Standing::Here);
            let (stays, moves) = (before.with(depth + 1, Phase::Clearing), before.child());
            prop_assert_eq!(stays.standing(hash) == Standing::Here, moves.standing(hash) == Standing::Gone);
            let during = before.with(depth, Phase::Splitting).standing(hash);
            prop_assert_eq!(during == Standing::Leaving, moves.standing(hash) == Standing::Here);
            prop_assert_eq!(before.standing(hash ^ 1 << depth), Standing::Here);
        }
    }

    #[test]
    fn the_overflow_bucket_is_taken_last_and_shared_by_both_sides() {
        let (left, right) = (RECORD_BYTES, RECORD_BYTES + BUCKET_BYTES);
        let last = |pair: u64| pair + 8 * slot_order(pair).last().unwrap() as u64;
        assert_eq!(slot_order(left).next(), Some(0));
        assert_eq!(
            slot_order(right).next(),
            Some(BUCKET_SLOTS),
            "main bucket 1 is behind the overflow bucket"
        );
        let overflow = RECORD_BYTES + BUCKET_BYTES..RECORD_BYTES + 2 * BUCKET_BYTES;
        assert!(overflow.contains(&last(left)) && overflow.contains(&last(right)));
    }
}
