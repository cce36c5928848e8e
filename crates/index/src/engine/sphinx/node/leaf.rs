//! Leaves as bytes: a key and its value, with a checksum by which a reader knows that it read them whole. Pure.
//!
//! The checksum is keyed by index, address, version and lengths ([`Place`]), and leaves out the state alone, so that freezing a leaf is
//! the WRITE of one word.

use crate::engine::sphinx::layout::{
    LEAF_CHECKSUM_AT, LEAF_HEAD_AT, LEAF_KEY_AT, LEAF_KEYED_BITS, LeafHead, LeafState, leaf_bytes,
};
use crate::shared::whole::Place;
use farwood_fabric::mem::Words;
use smallvec::SmallVec;
use std::ops::Deref;

/// A leaf that was read whole.
#[derive(Debug)]
pub(in super::super) struct Leaf<B> {
    bytes: B,
    pub(in super::super) head: LeafHead,
}

fn checksum(place: Place, head: LeafHead, pair: &[u8]) -> u64 {
    place.checksum(head.to_word() & LEAF_KEYED_BITS, pair)
}

impl<B: Deref<Target = [u8]>> Leaf<B> {
    /// Takes bytes for a leaf if they are one, whole; hands them back if not.
    pub(in super::super) fn accept(place: Place, bytes: B, checked: bool) -> Result<Self, B> {
        let word = |at: usize| bytes.get(at..at + 8)?.try_into().ok().map(u64::from_le_bytes);
        let (Some(head), Some(sum)) =
            (word(LEAF_HEAD_AT).and_then(LeafHead::from_word), word(LEAF_CHECKSUM_AT))
        else {
            return Err(bytes);
        };
        match bytes.get(LEAF_KEY_AT..leaf_bytes(head.key_bytes, head.value_bytes)) {
            Some(pair) if !checked || checksum(place, head, pair) == sum => Ok(Self { bytes, head }),
            _ => Err(bytes),
        }
    }

    /// The same leaf, its bytes kept in another way.
    pub(in super::super) fn map<C>(self, keep: impl FnOnce(B) -> C) -> Leaf<C> {
        Leaf { bytes: keep(self.bytes), head: self.head }
    }

    pub(in super::super) fn key(&self) -> &[u8] {
        &self.bytes[LEAF_KEY_AT..LEAF_KEY_AT + self.head.key_bytes]
    }

    pub(in super::super) fn value(&self) -> &[u8] {
        let from = LEAF_KEY_AT + self.head.key_bytes;
        &self.bytes[from..from + self.head.value_bytes]
    }

    pub(in super::super) fn state(&self) -> LeafState {
        self.head.state
    }

    /// The word that puts it into another state.
    pub(in super::super) fn frozen(&self, state: LeafState) -> u64 {
        LeafHead { state, ..self.head }.to_word()
    }
}

/// The key of a leaf if it is not this one, as far as it tells where they part. Without a lock or a checksum, since no rewrite changes a key.
#[inline]
pub(in super::super) fn other_key(leaf: Words<'_>, key: &[u8]) -> Option<SmallVec<[u8; 64]>> {
    let head = LeafHead::from_word(leaf.get(LEAF_HEAD_AT))?;
    let word = |n: usize| leaf.get(LEAF_KEY_AT + 8 * n);
    let whole = key.chunks_exact(8);
    let (rest, rest_at) = (whole.remainder(), key.len() / 8);
    let is_at =
        |(n, part): (usize, &[u8])| part.try_into().map(u64::from_le_bytes).is_ok_and(|part| part == word(n));
    let rest_is_at = || word(rest_at).to_le_bytes()[..rest.len()] == *rest;
    if head.key_bytes == key.len() && whole.enumerate().all(is_at) && rest_is_at() {
        return None;
    }
    let word = |n: usize| word(n).to_le_bytes();
    let seen_bytes = head.key_bytes.min(leaf.len() - LEAF_KEY_AT);
    let mut other: SmallVec<[u8; 64]> = (0..seen_bytes.div_ceil(8)).flat_map(word).collect();
    other.truncate(seen_bytes);
    Some(other)
}

/// What the first bytes of a leaf say of the rest: where the last bytes of its value are, and how many. The key is never torn, since no
/// rewrite changes it; lengths may be those of a moment ago.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Outline {
    head: LeafHead,
    /// Where the end of the value begins, in the leaf.
    pub(in super::super) end_at: usize,
    pub(in super::super) end_bytes: usize,
}

impl Outline {
    /// `None` if the key is not within the first bytes, or they are no leaf's of at most `most_bytes`.
    pub(in super::super) fn of(first: &[u8], end_bytes: usize, most_bytes: usize) -> Option<Self> {
        let word = first.get(LEAF_HEAD_AT..LEAF_HEAD_AT + 8)?.try_into().ok().map(u64::from_le_bytes)?;
        let head = LeafHead::from_word(word)?;
        let end_bytes = end_bytes.min(head.value_bytes);
        let all_bytes = leaf_bytes(head.key_bytes, head.value_bytes);
        let is_one = first.len() >= LEAF_KEY_AT + head.key_bytes && all_bytes <= most_bytes;
        is_one.then_some(Self { head, end_at: all_bytes - end_bytes, end_bytes })
    }

    /// The words that the end of the value is in.
    pub(in super::super) fn words(self) -> (usize, usize) {
        (self.end_at / 8 * 8, (self.end_at + self.end_bytes).next_multiple_of(8))
    }

    /// A leaf with no more than the end of its value, unchecked: the value may be torn.
    pub(in super::super) fn with_end(self, first: &[u8], end: &[u8]) -> Leaf<Vec<u8>> {
        let key_end = LEAF_KEY_AT + self.head.key_bytes;
        let bytes = [&first[..key_end], end].concat();
        Leaf { bytes, head: LeafHead { value_bytes: end.len(), ..self.head } }
    }
}

/// The bytes of a leaf in this place.
pub(in super::super) fn build(place: Place, version: u32, key: &[u8], value: &[u8]) -> Vec<u8> {
    let head = LeafHead {
        state: LeafState::Alive,
        version: version & 0x0fff_ffff,
        key_bytes: key.len(),
        value_bytes: value.len(),
    };
    let mut bytes = Vec::with_capacity(leaf_bytes(key.len(), value.len()));
    bytes.extend(head.to_word().to_le_bytes());
    bytes.extend([0; 8]);
    bytes.extend(key);
    bytes.extend(value);
    let sum = checksum(place, head, &bytes[LEAF_KEY_AT..]);
    bytes[LEAF_CHECKSUM_AT..LEAF_KEY_AT].copy_from_slice(&sum.to_le_bytes());
    bytes
}
