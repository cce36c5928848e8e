//! How a READ or WRITE is torn: its words fall into a few pieces that take effect at different times.
//!
//! A verb is torn only if somebody could tell: its time window overlaps a conflicting verb, or its client dies. The shapes
//! are the ones that real hardware and hard luck produce: words in any order, ascending, descending, one straggler.

use fastrand::Rng;

const LINE_WORDS: usize = 8;
/// Most pieces of one verb.
pub(super) const MAX_PIECES: usize = 8;

/// Which piece each word of a verb belongs to.
#[derive(Debug)]
pub(super) struct Torn {
    /// Per word, counted from the word that contains the first byte.
    piece_of: Vec<u8>,
    pieces: u8,
    /// Which pieces have taken effect.
    done: [bool; MAX_PIECES],
}

/// What the transport promises beyond the contract, and tearing must respect.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) line_atomic: bool,
    pub(super) ascending: bool,
}

impl Torn {
    /// Tears a verb of `len` bytes at `offset`.
    pub(super) fn new(offset: usize, len: usize, limits: Limits, rng: &mut Rng) -> Self {
        let first_word = offset / 8;
        let words = (offset + len).div_ceil(8) - first_word;
        let unit = if limits.line_atomic { LINE_WORDS } else { 1 };
        let unit_of = |word: usize| (first_word + word) / unit - first_word / unit;
        let units = unit_of(words - 1) + 1;
        let pieces = rng.u8(2..=8).min(u8::try_from(units.clamp(1, 8)).unwrap_or(8));
        let shape = if limits.ascending { 1 } else { rng.u8(0..4) };
        let of_unit: Vec<u8> = match shape {
            // Contiguous runs, taking effect in ascending order (1) or descending (2).
            1 | 2 => {
                let mut cuts: Vec<usize> = (1..pieces).map(|_| rng.usize(0..=units)).collect();
                cuts.sort_unstable();
                (0..units)
                    .map(|u| u8::try_from(cuts.partition_point(|cut| *cut <= u)).unwrap_or(0))
                    .map(|piece| if shape == 1 { piece } else { pieces - 1 - piece })
                    .collect()
            }
            // One unit comes last.
            3 => {
                let straggler = rng.usize(0..units);
                (0..units).map(|u| if u == straggler { pieces - 1 } else { 0 }).collect()
            }
            _ => {
                let mut bits = 0u64;
                (0..units)
                    .map(|u| {
                        if u % 20 == 0 {
                            bits = rng.u64(..);
                        }
                        let piece = u8::try_from(bits & 7).unwrap_or(0) % pieces;
                        bits >>= 3;
                        piece
                    })
                    .collect()
            }
        };
        let piece_of = (0..words).map(|word| of_unit[unit_of(word)]).collect();
        Self { piece_of, pieces, done: [false; MAX_PIECES] }
    }

    /// How many pieces there are.
    pub(super) fn pieces(&self) -> u8 {
        self.pieces
    }

    /// Marks a piece as done; false if it was.
    pub(super) fn begin(&mut self, piece: u8) -> bool {
        !std::mem::replace(&mut self.done[usize::from(piece)], true)
    }

    /// The byte ranges, relative to the verb's first byte, of the words in `piece`; runs are joined.
    pub(super) fn ranges(&self, piece: u8, offset: usize, len: usize) -> Vec<(usize, usize)> {
        let skew = offset % 8;
        let mut ranges: Vec<(usize, usize)> = Vec::new();
        for (word, of) in self.piece_of.iter().enumerate() {
            if *of != piece {
                continue;
            }
            let from = (word * 8).saturating_sub(skew);
            let to = (word * 8 + 8 - skew).min(len);
            match ranges.last_mut() {
                Some((_, end)) if *end == from => *end = to,
                _ => ranges.push((from, to)),
            }
        }
        ranges
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pieces_partition_the_verb_along_words(offset in 0usize..40, len in 1usize..1200, seed: u64, line_atomic: bool, ascending: bool) {
            let mut rng = fastrand::Rng::with_seed(seed);
            let mut torn = Torn::new(offset, len, Limits { line_atomic, ascending }, &mut rng);
            let mut covered = vec![u8::MAX; len];
            for piece in 0..torn.pieces() {
                prop_assert!(torn.begin(piece));
                prop_assert!(!torn.begin(piece), "a piece takes effect once");
                for (from, to) in torn.ranges(piece, offset, len) {
                    for byte in &mut covered[from..to] {
                        prop_assert_eq!(*byte, u8::MAX, "a byte in two pieces");
                        *byte = piece;
                    }
                }
            }
            prop_assert!(covered.iter().all(|p| *p != u8::MAX), "every byte is in a piece");
            let unit = if line_atomic { 64 } else { 8 };
            for at in 1..len {
                if (offset + at) % unit != 0 {
                    prop_assert_eq!(covered[at], covered[at - 1], "a unit stays whole");
                }
                if ascending {
                    prop_assert!(covered[at] >= covered[at - 1]);
                }
            }
        }
    }

    #[test]
    fn all_shapes_occur() {
        let mut rng = fastrand::Rng::with_seed(1);
        let limits = Limits { line_atomic: false, ascending: false };
        let (mut up, mut down, mut mixed) = (0, 0, 0);
        for _ in 0..1000 {
            let torn = Torn::new(0, 1024, limits, &mut rng);
            let ascending = torn.piece_of.is_sorted();
            let descending = torn.piece_of.is_sorted_by(|a, b| a >= b);
            up += u32::from(ascending && !descending);
            down += u32::from(descending && !ascending);
            mixed += u32::from(!ascending && !descending);
        }
        assert!(up > 100 && down > 100 && mixed > 300, "{up} {down} {mixed}");
    }
}
