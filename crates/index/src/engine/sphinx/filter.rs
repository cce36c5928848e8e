//! The succinct filter cache of a compute server (Sphinx, III-B): a cuckoo filter (Fan et al., CoNEXT '14) of the prefixes that have inner nodes, in which those
//! that are used stay.
//!
//! ```text
//! bucket   64 bits: lanes of a fingerprint, never 0, and above it a hotness bit; 0: empty
//!          slim   [ 4 unused ][ 12 ][ 12 ][ 12 ][ 12 ][ 12 ]     11-bit fingerprints, at most 0.5% false positives a check
//!          wide   [ 16 ][ 16 ][ 16 ][ 16 ]                       15-bit fingerprints, at most 0.03%
//! ```
//!
//! A bucket is one word, so threads change it by CAS and nobody takes a lock. (Four lanes of 12-bit fingerprints, as in the paper's arithmetic, would leave a
//! fifth of each word unused.) A prefix may be in two buckets; each follows from the other and the fingerprint: `second = f(fingerprint) - first`, modulo
//! the number of buckets, which may then be any number.
//!
//! 1. **check**: two loads. What is found becomes hot.
//! 2. **insert**: into an empty lane of either bucket. Else make room: if a neighbour in these buckets has an empty lane in its other bucket, it moves there,
//!    first copied, then overwritten, so that it is never missing; and so on for a few steps. Else replace one that is not hot. Else move a hot one on and let it cool, and so on for a few
//!    steps; the last one goes.
//!
//! It is a cache: what it has forgotten costs a longer way, what it has wrongly costs a look into the hash table. Neither is an error.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

/// How many hot prefixes are moved to make room for one, at most.
const MAX_MOVES: u32 = 8;
/// How many prefixes are moved at most, so that nobody has to go.
const SEARCH_DEPTH: u32 = 16;
/// How often a word that others change meanwhile is tried again.
const MAX_TRIES: u32 = 64;

/// How a bucket is divided.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Shape {
    lanes: u32,
    lane_bits: u32,
    /// The fullest that the filter can be made without losing any, in percent: from here on something has to go. Five lanes reach more than four.
    full_percent: u64,
}

impl Shape {
    const SLIM: Self = Self { lanes: 5, lane_bits: 12, full_percent: 97 };
    const WIDE: Self = Self { lanes: 4, lane_bits: 16, full_percent: 95 };

    /// How many prefixes so many buckets hold.
    fn capacity(self, buckets: u64) -> u64 {
        buckets * u64::from(self.lanes) * self.full_percent / 100
    }

    /// The lowest bit of each lane.
    const fn ones(self) -> u64 {
        let (mut ones, mut lane) = (0, 0);
        while lane < self.lanes {
            ones |= 1 << (lane * self.lane_bits);
            lane += 1;
        }
        ones
    }

    /// The hotness bit of each lane.
    const fn hots(self) -> u64 {
        self.ones() << (self.lane_bits - 1)
    }

    /// The largest fingerprint.
    const fn most(self) -> u64 {
        (1 << (self.lane_bits - 1)) - 1
    }
}

/// The filter. Its threads share it.
pub struct Filter {
    buckets: Box<[AtomicU64]>,
    shape: Shape,
    ones: u64,
    hots: u64,
    /// Lanes in use, about.
    used: AtomicU64,
    /// Tells choices apart that chance is to decide.
    turn: AtomicU64,
}

/// Where a prefix may be.
#[derive(Clone, Copy)]
struct Place {
    fingerprint: u64,
    buckets: [usize; 2],
}

impl Filter {
    /// A filter that takes up to so many bytes. If it can hold `expected` prefixes with wide fingerprints, it has them; else, or if it is not
    /// known how many are to be expected, it holds as many as it can.
    pub fn new(budget_bytes: u64, expected: Option<u64>) -> Self {
        let count = (budget_bytes / 8).clamp(1, u64::from(u32::MAX));
        let fits_wide = Shape::WIDE.capacity(count);
        let shape =
            if expected.is_some_and(|expected| expected <= fits_wide) { Shape::WIDE } else { Shape::SLIM };
        let buckets = (0..count).map(|_| AtomicU64::new(0)).collect();
        Self {
            buckets,
            shape,
            ones: shape.ones(),
            hots: shape.hots(),
            used: AtomicU64::new(0),
            turn: AtomicU64::new(0),
        }
    }

    /// What it takes up.
    pub fn bytes(&self) -> u64 {
        8 * self.buckets.len() as u64
    }

    /// How many prefixes it can hold before it forgets some.
    pub fn capacity(&self) -> u64 {
        self.shape.capacity(self.buckets.len() as u64)
    }

    /// How many fingerprints it holds.
    pub fn count(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    #[cfg(test)]
    fn count_by_walk(&self) -> u64 {
        let lanes = |bucket: &AtomicU64| {
            (self.hots & !self.lanes_with(bucket.load(Ordering::Relaxed), 0)).count_ones()
        };
        self.buckets.iter().map(|bucket| u64::from(lanes(bucket))).sum()
    }

    #[inline]
    fn place(&self, hash: u64) -> Place {
        let (high, low) = (hash >> 32, hash & 0xffff_ffff);
        let fingerprint = 1 + ((low * self.shape.most()) >> 32);
        let first = self.scale(high);
        Place { fingerprint, buckets: [first, self.other(first, fingerprint)] }
    }

    /// 32 bits, scaled down to a bucket's number.
    #[inline]
    fn scale(&self, bits: u64) -> usize {
        ((bits * self.buckets.len() as u64) >> 32) as usize
    }

    /// The other bucket of a fingerprint that is in this one.
    #[inline]
    fn other(&self, bucket: usize, fingerprint: u64) -> usize {
        let sum = self.scale(fingerprint.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32);
        if sum >= bucket { sum - bucket } else { sum + self.buckets.len() - bucket }
    }

    /// The hotness bits of the lanes that hold this fingerprint (0: that are empty).
    #[inline]
    fn lanes_with(&self, word: u64, fingerprint: u64) -> u64 {
        // A lane that differs carries into its hotness bit, and no further: x + (2^f - 1) reaches 2^f unless x is 0.
        let differing = (word & !self.hots) ^ (fingerprint * self.ones);
        !(differing + (self.hots - self.ones)) & self.hots
    }

    /// Whether a prefix is there, perhaps. It is hot from now on.
    #[inline]
    pub fn contains(&self, hash: u64) -> bool {
        let place = self.place(hash);
        place.buckets.iter().any(|at| {
            let bucket = &self.buckets[*at];
            let word = bucket.load(Ordering::Relaxed);
            let lanes = self.lanes_with(word, place.fingerprint);
            // Once hot it is only read, so that threads do not take the line from each other. If the word has changed meanwhile, the next
            // check makes it hot.
            if lanes != 0 && word & lanes == 0 {
                let _ = bucket.compare_exchange(word, word | lanes, Ordering::Relaxed, Ordering::Relaxed);
            }
            lanes != 0
        })
    }

    /// Of the prefixes with these hashes, in the order of their lengths, those that are there, perhaps: their places in the list, longest first.
    pub fn longest<'a>(&'a self, hashes: &'a [u64]) -> impl Iterator<Item = usize> + 'a {
        (0..hashes.len()).rev().filter(|n| self.contains(hashes[*n]))
    }

    /// Notes that a prefix has an inner node.
    pub fn insert(&self, hash: u64) {
        let place = self.place(hash);
        if place.buckets.iter().any(|at| self.lanes_with(self.load(*at), place.fingerprint) != 0) {
            return;
        }
        let is_in = self.fill(place) || self.make_room(place) || self.replace_cold(place);
        if !is_in {
            self.displace(place);
        }
    }

    /// Forgets a prefix. So it does another one with the same fingerprint in the same buckets, if there is one.
    pub fn remove(&self, hash: u64) {
        let place = self.place(hash);
        for at in place.buckets {
            for _ in 0..MAX_TRIES {
                let word = self.load(at);
                let lanes = self.lanes_with(word, place.fingerprint);
                if lanes == 0 || self.store(at, word, self.lowest(lanes), 0) {
                    break;
                }
            }
        }
    }

    fn load(&self, at: usize) -> u64 {
        self.buckets[at].load(Ordering::Relaxed)
    }

    /// The number of the lane of the lowest of these hotness bits.
    fn lowest(&self, lanes: u64) -> u32 {
        lanes.trailing_zeros() / self.shape.lane_bits
    }

    fn fingerprint(&self, word: u64, lane: u32) -> u64 {
        word >> (lane * self.shape.lane_bits) & self.shape.most()
    }

    /// Replaces a lane of a word that has not changed since; the new one is not hot. Whether it had not.
    fn store(&self, at: usize, word: u64, lane: u32, fingerprint: u64) -> bool {
        let shift = lane * self.shape.lane_bits;
        let mask = (1 << self.shape.lane_bits) - 1;
        let changed = word & !(mask << shift) | fingerprint << shift;
        let is_stored =
            self.buckets[at].compare_exchange(word, changed, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if is_stored && self.fingerprint(word, lane) == 0 {
            self.used.fetch_add(1, Ordering::Relaxed);
        } else if is_stored && fingerprint == 0 {
            self.used.fetch_sub(1, Ordering::Relaxed);
        }
        is_stored
    }

    /// Puts a fingerprint into an empty lane of a bucket; whether there was one.
    fn fill_in(&self, at: usize, fingerprint: u64) -> bool {
        for _ in 0..MAX_TRIES {
            let word = self.load(at);
            let empty = self.lanes_with(word, 0);
            if empty == 0 {
                return false;
            }
            if self.store(at, word, self.lowest(empty), fingerprint) {
                return true;
            }
        }
        false
    }

    /// Into the emptier bucket: that leaves the most ways open.
    fn fill(&self, place: Place) -> bool {
        let empty = |at: usize| self.lanes_with(self.load(at), 0).count_ones();
        let [first, second] = place.buckets;
        let emptier = if empty(second) > empty(first) { [second, first] } else { [first, second] };
        emptier.into_iter().any(|at| self.fill_in(at, place.fingerprint))
    }

    /// Moves a neighbour to its other bucket, if that has an empty lane or can be made to have one; then takes its lane.
    fn make_room(&self, place: Place) -> bool {
        // Beyond that the search would rarely come to an end.
        let is_worth_while = self.count() < self.capacity();
        is_worth_while && place.buckets.iter().any(|at| self.vacate(*at, place.fingerprint, SEARCH_DEPTH))
    }

    /// Puts a fingerprint into a full bucket, if one of those there can move, or if one can after so many others have.
    fn vacate(&self, at: usize, fingerprint: u64, depth: u32) -> bool {
        let word = self.load(at);
        let other = |lane: u32| self.other(at, self.fingerprint(word, lane));
        let has_room = |lane: &u32| self.lanes_with(self.load(other(*lane)), 0) != 0;
        let direct = (0..self.shape.lanes).find(has_room);
        let lane = direct.unwrap_or_else(|| self.chance(word));
        let moved = self.fingerprint(word, lane);
        // Copied first, so that it is never missing. If the word has changed by then, the copy is one too many, and will go as it came.
        let is_copied = match direct {
            Some(_) => self.fill_in(other(lane), moved),
            None => depth > 0 && self.vacate(other(lane), moved, depth - 1),
        };
        is_copied && moved != 0 && self.store(at, word, lane, fingerprint)
    }

    /// Takes the lane of one that is not hot; whether there is one. Both buckets are full.
    fn replace_cold(&self, place: Place) -> bool {
        let begin = self.turn.load(Ordering::Relaxed) & 1;
        for n in 0..2 {
            let at = place.buckets[usize::from((begin + n) % 2 == 1)];
            for _ in 0..MAX_TRIES {
                let word = self.load(at);
                let cold = !word & self.hots;
                if cold == 0 {
                    break;
                }
                let begin = self.chance(place.fingerprint ^ word);
                let lanes = (0..self.shape.lanes).map(|n| (begin + n) % self.shape.lanes);
                let is_cold =
                    |lane: &u32| cold >> (lane * self.shape.lane_bits) & 1 << (self.shape.lane_bits - 1) != 0;
                let Some(lane) = lanes.into_iter().find(is_cold) else { break };
                if self.store(at, word, lane, place.fingerprint) {
                    return true;
                }
            }
        }
        false
    }

    /// All are hot: one moves on and cools, and in its other bucket perhaps another one; the last goes.
    fn displace(&self, place: Place) {
        let (mut at, mut fingerprint) = (place.buckets[0], place.fingerprint);
        for _ in 0..MAX_MOVES {
            let word = self.load(at);
            let lane = self.chance(fingerprint ^ word);
            let moved = self.fingerprint(word, lane);
            if !self.store(at, word, lane, fingerprint) {
                continue;
            }
            let other = self.other(at, moved);
            let next = Place { fingerprint: moved, buckets: [other, other] };
            if moved == 0 || self.fill_in(other, moved) || self.replace_cold(next) {
                return;
            }
            (at, fingerprint) = (other, moved);
        }
    }

    /// A lane, by chance enough for the purpose, and the same whenever the same is done.
    fn chance(&self, salt: u64) -> u32 {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let mixed = (turn ^ salt).wrapping_mul(0xd6e8_feb8_6659_fd93) >> 32;
        u32::try_from((mixed * u64::from(self.shape.lanes)) >> 32).unwrap_or(0)
    }
}

impl fmt::Debug for Filter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Filter({} bytes, {:?})", self.bytes(), self.shape)
    }
}

/// The hashes of all prefixes of a key, from the empty one to the key itself, in one pass: each follows from the last and a byte.
///
/// A step is a folded 128-bit product, as in wyhash and its kin: each byte changes all bits, so that the hash of every prefix is as good as the last one, and needs no
/// finish of its own. It is no seal against malice.
#[derive(Clone, Copy, Debug)]
pub struct PrefixHash {
    state: u64,
}

impl PrefixHash {
    /// Of the empty prefix.
    pub const EMPTY: Self = Self { state: 0x243f_6a88_85a3_08d3 };

    /// Of the empty prefix, in an index of its own.
    pub fn seeded(seed: u64) -> Self {
        Self { state: Self::EMPTY.state ^ seed }
    }

    /// Of the prefix that is longer by a byte.
    #[inline]
    #[must_use]
    pub fn extended(self, byte: u8) -> Self {
        // The byte is spread over the word first, so that it does not meet the lowest bits of the state alone.
        let spread = (u64::from(byte) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let product = u128::from(self.state ^ spread) * 0xa076_1d64_78bd_642f;
        #[expect(clippy::cast_possible_truncation, reason = "the two halves are folded")]
        let folded = (product >> 64) as u64 ^ product as u64;
        Self { state: folded ^ 0x1319_8a2e_0370_7344 }
    }

    /// The hash, for the table and the filter.
    #[inline]
    pub fn get(self) -> u64 {
        self.state
    }

    /// The hashes of all prefixes of `key`, the empty one first.
    pub fn all(key: &[u8]) -> impl Iterator<Item = u64> {
        let longer = key.iter().scan(Self::EMPTY, |hash, byte| {
            *hash = hash.extended(*byte);
            Some(hash.get())
        });
        std::iter::once(Self::EMPTY.get()).chain(longer)
    }
}

#[cfg(test)]
mod tests;
