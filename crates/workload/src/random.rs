//! Randomness whose every bit is fixed by a seed, for all time: figures of two versions are compared on the same operations,
//! so the generator is part of a workload's definition and is not left to a crate whose next version may draw otherwise.
//!
//! - [`mix64`] is the output function of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014; constants of Stafford's variant 13), a
//!   bijection of 64-bit words that looks random; [`unmix64`] undoes it.
//! - [`Random`] is SplitMix64: one addition and one `mix64` per word. Generators with different seeds are places on one cycle
//!   of 2^64 words; a thousand of them that draw 10^9 words each overlap with a probability of about 10^-4.
//! - [`Permutation`] shuffles `0..count` without a table: a keyed bijection of the next power of two, applied until the
//!   result lies in range ("cycle walking": it must return to the range, since it started there; twice on average at most).

/// What SplitMix64 adds per step: 2^64 divided by the golden ratio, odd.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
const FACTORS: [u64; 2] = [0xbf58_476d_1ce4_e5b9, 0x94d0_49bb_1331_11eb];
const INVERSES: [u64; 2] = [inverse_of_odd(FACTORS[0]), inverse_of_odd(FACTORS[1])];

/// The inverse of an odd factor modulo 2^64, by Newton's iteration: each step doubles the number of right bits.
const fn inverse_of_odd(factor: u64) -> u64 {
    let mut inverse = factor;
    let mut steps = 0;
    while steps < 5 {
        inverse = inverse.wrapping_mul(2u64.wrapping_sub(factor.wrapping_mul(inverse)));
        steps += 1;
    }
    inverse
}

/// A bijection of 64-bit words under which neighbours have nothing in common.
pub const fn mix64(word: u64) -> u64 {
    let word = (word ^ (word >> 30)).wrapping_mul(FACTORS[0]);
    let word = (word ^ (word >> 27)).wrapping_mul(FACTORS[1]);
    word ^ (word >> 31)
}

/// Undoes [`mix64`].
pub const fn unmix64(word: u64) -> u64 {
    let word = (word ^ (word >> 31) ^ (word >> 62)).wrapping_mul(INVERSES[1]);
    let word = (word ^ (word >> 27) ^ (word >> 54)).wrapping_mul(INVERSES[0]);
    word ^ (word >> 30) ^ (word >> 60)
}

/// A stream of random words that is the same in every version of Farwood.
#[derive(Clone, Debug)]
pub struct Random {
    state: u64,
}

impl Random {
    /// The stream of a seed; `lane` tells apart the streams of one seed.
    pub const fn new(seed: u64, lane: u64) -> Self {
        Self { state: mix64(mix64(seed ^ GOLDEN) ^ lane) }
    }

    /// 64 random bits.
    #[inline]
    pub const fn word(&mut self) -> u64 {
        self.state = self.state.wrapping_add(GOLDEN);
        mix64(self.state)
    }

    /// A number below `bound`, or 0. The bias is less than `bound` / 2^64, which no run is long enough to see.
    #[inline]
    pub const fn below(&mut self, bound: u64) -> u64 {
        scale(self.word(), bound)
    }

    /// A number in `0.0..1.0`, a multiple of 2^-53.
    #[inline]
    pub const fn unit(&mut self) -> f64 {
        (self.word() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// A random word as a number below `bound`: the high word of the product.
#[inline]
pub(crate) const fn scale(word: u64, bound: u64) -> u64 {
    ((word as u128 * bound as u128) >> 64) as u64
}

const ROUNDS: usize = 3;

/// A shuffle of `0..count`, the same for everybody with the same seed.
#[derive(Clone, Debug)]
pub struct Permutation {
    count: u64,
    mask: u64,
    /// At least half of the bits, so that `x ^ (x >> shift)` undoes itself.
    shift: u32,
    factors: [u64; ROUNDS],
    addends: [u64; ROUNDS],
}

impl Permutation {
    /// A shuffle of `0..count`.
    pub const fn new(count: u64, seed: u64) -> Self {
        let bits = if count > 2 { 64 - (count - 1).leading_zeros() } else { 1 };
        let mut random = Random::new(seed, 0x7065_726d);
        let (mut factors, mut addends) = ([0; ROUNDS], [0; ROUNDS]);
        let mut round = 0;
        while round < ROUNDS {
            factors[round] = random.word() | 1;
            addends[round] = random.word();
            round += 1;
        }
        Self { count, mask: u64::MAX >> (64 - bits), shift: bits.div_ceil(2), factors, addends }
    }

    /// Where `at` goes; `at` must lie below the count.
    #[inline]
    pub fn apply(&self, at: u64) -> u64 {
        debug_assert!(at < self.count, "{at} is not below {}", self.count);
        let mut at = at;
        loop {
            for (factor, addend) in self.factors.iter().zip(&self.addends) {
                at = at.wrapping_mul(*factor).wrapping_add(*addend) & self.mask;
                at ^= at >> self.shift;
            }
            if at < self.count {
                return at;
            }
        }
    }

    /// What goes to `at`; `at` must lie below the count.
    pub fn invert(&self, at: u64) -> u64 {
        debug_assert!(at < self.count, "{at} is not below {}", self.count);
        let mut at = at;
        loop {
            for (factor, addend) in self.factors.iter().zip(&self.addends).rev() {
                at ^= at >> self.shift;
                at = at.wrapping_sub(*addend).wrapping_mul(inverse_of_odd(*factor)) & self.mask;
            }
            if at < self.count {
                return at;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The first outputs of SplitMix64 for state 0, as published with the reference implementation: the stream must not
    /// change from version to version.
    #[test]
    fn the_generator_is_splitmix64() {
        let mut random = Random { state: 0 };
        let words: Vec<u64> = (0..3).map(|_| random.word()).collect();
        assert_eq!(words, [0xe220_a839_7b1d_cdaf, 0x6e78_9e6a_a1b9_65f4, 0x06c4_5d18_8009_454f]);
    }

    #[test]
    fn lanes_and_seeds_differ() {
        let first = |seed, lane| Random::new(seed, lane).word();
        let mut words = vec![first(0, 0), first(0, 1), first(1, 0), first(1, 1)];
        words.sort_unstable();
        words.dedup();
        assert_eq!(words.len(), 4);
    }

    /// Every small count, so that domains of one and two bits and the walk are covered.
    #[test]
    fn a_permutation_reaches_everything_once() {
        for count in 1..200 {
            for seed in 0..5 {
                let permutation = Permutation::new(count, seed);
                let mut seen: Vec<u64> = (0..count).map(|at| permutation.apply(at)).collect();
                seen.sort_unstable();
                assert!(seen.into_iter().eq(0..count), "count {count}, seed {seed}");
            }
        }
    }

    proptest! {
        #[test]
        fn unmixing_undoes_mixing(word: u64) {
            prop_assert_eq!(unmix64(mix64(word)), word);
            prop_assert_eq!(mix64(unmix64(word)), word);
        }

        #[test]
        fn inverting_undoes_a_permutation(count in 1u64..=u64::MAX, at: u64, seed: u64) {
            let permutation = Permutation::new(count, seed);
            let to = permutation.apply(at % count);
            prop_assert!(to < count);
            prop_assert_eq!(permutation.invert(to), at % count);
        }

        #[test]
        fn bounded_draws_stay_below(bound in 1u64.., seed: u64) {
            prop_assert!(Random::new(seed, 0).below(bound) < bound);
        }
    }
}
