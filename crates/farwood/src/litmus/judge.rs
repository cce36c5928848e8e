//! What observations mean, without a transport: how versions are written into words, what a READ of them shows, and what the
//! verdict is. Pure, so that every mistake a transport could make can be put in front of it by hand.

use serde::Serialize;
use std::ops::AddAssign;

/// Words of a line of the memory system.
const LINE_WORDS: usize = 8;
/// An odd number with bits in every byte: neighbouring versions differ in all of their bytes.
const SPREAD: u32 = 0x9e37_79b1;
/// Its inverse modulo 2^32.
const GATHER: u32 = inverse(SPREAD);
const _: () = assert!(SPREAD.wrapping_mul(GATHER) == 1);

const fn inverse(odd: u32) -> u32 {
    // Newton: each step doubles the bits that are right, of which there are 3 to begin with.
    let mut inverse = odd;
    let mut steps = 0;
    while steps < 5 {
        inverse = inverse.wrapping_mul(2u32.wrapping_sub(odd.wrapping_mul(inverse)));
        steps += 1;
    }
    inverse
}

/// A version as a word: spread over four bytes, and their complement behind them, so that a word of two versions shows.
pub(super) fn word_of(version: u32) -> u64 {
    let spread = version.wrapping_mul(SPREAD);
    u64::from(spread) | u64::from(!spread) << 32
}

/// The version of a word; `None` if the word is torn.
pub(super) fn version_of(word: u64) -> Option<u32> {
    let bytes = word.to_le_bytes();
    let half = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    (half(0) == !half(4)).then(|| half(0).wrapping_mul(GATHER))
}

/// The words of what a READ brought.
pub(super) fn words_of(bytes: &[u8]) -> impl Iterator<Item = u64> + '_ {
    bytes.chunks_exact(8).filter_map(|word| word.first_chunk()).map(|word| u64::from_le_bytes(*word))
}

/// What was looked at, what could have shown a violation, what did.
#[derive(Clone, Copy, PartialEq, Eq, Default, Serialize, Debug)]
pub(super) struct Count {
    /// Observations made.
    pub(super) observations: u64,
    /// Those that really raced with somebody, and so could have shown a violation.
    pub(super) chances: u64,
    /// Those that did.
    pub(super) violations: u64,
}

impl Count {
    pub(super) fn one(chance: bool, violation: bool) -> Self {
        Self { observations: 1, chances: u64::from(chance || violation), violations: u64::from(violation) }
    }
}

impl AddAssign for Count {
    fn add_assign(&mut self, other: Self) {
        self.observations += other.observations;
        self.chances += other.chances;
        self.violations += other.violations;
    }
}

/// What a READ of words that carry versions shows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Look {
    /// Words that are of no version.
    pub(super) torn_words: u64,
    /// Lines in which there is more than one version (or a torn word).
    pub(super) mixed_lines: u64,
    pub(super) oldest: u32,
    pub(super) newest: u32,
}

impl Look {
    pub(super) fn at(bytes: &[u8]) -> Self {
        let mut look = Self { torn_words: 0, mixed_lines: 0, oldest: u32::MAX, newest: 0 };
        let versions: Vec<Option<u32>> = words_of(bytes).map(version_of).collect();
        for line in versions.chunks(LINE_WORDS) {
            let mixed = line.iter().any(|version| version.is_none() || *version != line[0]);
            look.mixed_lines += u64::from(mixed);
            for version in line {
                match version {
                    Some(version) => {
                        look.oldest = look.oldest.min(*version);
                        look.newest = look.newest.max(*version);
                    }
                    None => look.torn_words += 1,
                }
            }
        }
        look
    }

    /// Whether it raced with a WRITE.
    fn is_mixed(&self) -> bool {
        self.oldest != self.newest || self.torn_words > 0
    }

    /// Whether words are whole.
    pub(super) fn words(&self) -> Count {
        Count::one(self.is_mixed(), self.torn_words > 0)
    }

    /// Whether lines are whole. A READ of a single line cannot be mixed without being a violation: that the line is another
    /// than last time is all that can be known.
    pub(super) fn lines(&self, bytes: usize, last: u32) -> Count {
        let single = bytes <= LINE_WORDS * 8;
        Count::one(self.is_mixed() || (single && self.newest != last), self.mixed_lines > 0)
    }

    /// Whether all of it is at least as new as what an earlier READ promised. `last`: what that READ brought the time
    /// before.
    pub(super) fn at_least(&self, promised: u32, last: u32) -> Count {
        Count::one(self.is_mixed() || self.newest > promised || promised != last, self.oldest < promised)
    }
}

/// Whether one READ, over lines that were written from the last to the first, went from the first to the last: then
/// versions never fall with the address.
pub(super) fn ascending(versions: &[Option<u32>]) -> Count {
    let known: Vec<u32> = versions.iter().copied().flatten().collect();
    let mixed = known.windows(2).any(|pair| pair[0] != pair[1]);
    Count::one(mixed, known.windows(2).any(|pair| pair[0] > pair[1]))
}

/// Which litmus test of two clients and two words.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Two {
    /// Both write their own word, then read the other's: one of them must see the other.
    StoreThenLoad,
    /// Both read the other's word, then write their own: one of them must not see the other.
    LoadThenStore,
}

/// Compares what two clients found. In its round n = 1, 2, ... a client writes n to its own word and notes what it finds in
/// the other's.
pub(super) fn compare(two: Two, mine: &[u64], theirs: &[u64]) -> Count {
    let mut count = Count::default();
    let mut last = 0;
    let found_in_round = |round: u64| usize::try_from(round).ok().and_then(|n| theirs.get(n.checked_sub(1)?));
    for (round, found) in (1..).zip(mine) {
        let violated = match two {
            // Our WRITE came before our READ, which came before their WRITE of the next: their READ finds at least ours.
            Two::StoreThenLoad => found_in_round(found + 1).is_some_and(|theirs| *theirs < round),
            // Their READ came before their WRITE, which came before our READ, which came before our WRITE.
            Two::LoadThenStore => found_in_round(*found).is_some_and(|theirs| *theirs >= round),
        };
        count += Count::one(*found != last, violated);
        last = *found;
    }
    count
}

/// Who says that something holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Promise {
    /// The contract, of every transport.
    Contract,
    /// This transport, by a capability; or whatever else has this name.
    Claimed(&'static str),
    /// Nobody: the capability of this name is not claimed, or there is none.
    Nobody(Option<&'static str>),
}

impl Promise {
    /// What a capability that is claimed or not amounts to.
    pub(super) fn by(capability: &'static str, claimed: bool) -> Self {
        if claimed { Self::Claimed(capability) } else { Self::Nobody(Some(capability)) }
    }
}

/// What comes out.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Debug)]
#[serde(rename_all = "snake_case")]
pub(super) enum Verdict {
    /// Promised, raced for, and never violated.
    Holds,
    /// Promised and violated: the transport, or the promise, is wrong.
    Broken,
    /// Promised, but nothing raced, so that nothing is known.
    Untested,
    /// Not promised, and rightly so.
    NotPromisedViolated,
    /// Not promised, and not seen to fail.
    NotPromisedNotViolated,
}

impl Verdict {
    pub(super) fn of(promise: Promise, count: Count) -> Self {
        match (promise, count) {
            (Promise::Nobody(_), Count { violations: 0, .. }) => Self::NotPromisedNotViolated,
            (Promise::Nobody(_), _) => Self::NotPromisedViolated,
            (_, Count { violations: 1.., .. }) => Self::Broken,
            (_, Count { chances: 0, .. }) => Self::Untested,
            _ => Self::Holds,
        }
    }

    pub(super) fn text(self, count: Count) -> String {
        let Count { chances, violations, .. } = count;
        match self {
            Self::Holds => "holds".to_owned(),
            Self::Broken => format!("BROKEN: violated {violations} times"),
            Self::Untested => "untested: nothing raced".to_owned(),
            Self::NotPromisedViolated => format!("not promised: violated {violations} times"),
            Self::NotPromisedNotViolated => format!("not promised: no violation in {chances} chances"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(versions: &[u32]) -> Vec<u8> {
        versions.iter().flat_map(|version| word_of(*version).to_le_bytes()).collect()
    }

    #[test]
    fn versions_are_read_back_and_any_cut_through_a_word_shows() {
        for version in [0, 1, 2, 255, 256, 65_535, 1 << 24, u32::MAX] {
            assert_eq!(version_of(word_of(version)), Some(version));
            let (old, new) = (word_of(version).to_le_bytes(), word_of(version.wrapping_add(1)).to_le_bytes());
            for cut in 1..8 {
                let torn: Vec<u8> = new[..cut].iter().chain(&old[cut..]).copied().collect();
                let word = u64::from_le_bytes(torn.try_into().unwrap());
                assert_eq!(version_of(word), None, "version {version} cut at {cut}");
            }
        }
    }

    #[test]
    fn a_torn_word_is_a_violation_of_words_and_lines() {
        let mut bytes = block(&[4; 16]);
        bytes[75] ^= 0xff;
        let look = Look::at(&bytes);
        assert_eq!((look.torn_words, look.mixed_lines, look.oldest, look.newest), (1, 1, 4, 4));
        assert_eq!(look.words(), Count { observations: 1, chances: 1, violations: 1 });
    }

    #[test]
    fn a_cut_between_lines_is_a_chance_and_one_within_a_line_a_violation() {
        let between: Vec<u32> = [5; 8].into_iter().chain([4; 8]).collect();
        let look = Look::at(&block(&between));
        assert_eq!(look.words(), Count { observations: 1, chances: 1, violations: 0 });
        assert_eq!(look.lines(128, 4), Count { observations: 1, chances: 1, violations: 0 });
        let within: Vec<u32> = [5; 3].into_iter().chain([4; 13]).collect();
        assert_eq!(Look::at(&block(&within)).lines(128, 4).violations, 1);
    }

    #[test]
    fn what_did_not_race_is_no_chance() {
        let look = Look::at(&block(&[9; 8]));
        assert_eq!((look.words().chances, look.lines(64, 9).chances, look.at_least(9, 9).chances), (0, 0, 0));
        let changed = (look.lines(64, 8).chances, look.at_least(9, 8).chances, look.at_least(8, 8).chances);
        assert_eq!(changed, (1, 1, 1));
        assert_eq!(ascending(&[Some(3), Some(3)]).chances, 0);
    }

    #[test]
    fn data_older_than_its_flag_is_a_violation() {
        assert_eq!(Look::at(&block(&[7, 7, 6, 7])).at_least(7, 7).violations, 1);
        assert_eq!(Look::at(&block(&[7, 7, 8, 7])).at_least(7, 7).violations, 0);
    }

    #[test]
    fn lines_out_of_order_are_a_violation() {
        assert_eq!(ascending(&[Some(3), Some(3), Some(4)]).violations, 0);
        assert_eq!(ascending(&[Some(4), Some(3), Some(4)]).violations, 1);
        assert_eq!(ascending(&[Some(4), None, Some(3)]).violations, 1);
    }

    #[test]
    fn two_clients_that_both_miss_each_other_are_a_violation() {
        // One after the other: A has finished before B begins.
        assert_eq!(compare(Two::StoreThenLoad, &[0, 0], &[2, 2]).violations, 0);
        // A wrote 1 and found 0; B wrote 1 and found 0.
        assert_eq!(compare(Two::StoreThenLoad, &[0, 1], &[0, 1]).violations, 2);
        // In step, and rightly: each sees the other's last or present.
        assert_eq!(compare(Two::StoreThenLoad, &[0, 1, 2], &[1, 2, 3]).violations, 0);
    }

    #[test]
    fn two_clients_that_both_see_what_comes_later_are_a_violation() {
        assert_eq!(compare(Two::LoadThenStore, &[0, 0], &[2, 2]).violations, 0);
        // A found 1 and wrote 1; B found 1 and wrote 1: each before the other.
        assert_eq!(compare(Two::LoadThenStore, &[1], &[1]).violations, 1);
        let in_step = Count { observations: 2, chances: 2, violations: 0 };
        assert_eq!(compare(Two::LoadThenStore, &[1, 2], &[0, 1]), in_step);
    }

    #[test]
    fn the_verdict_depends_on_the_promise() {
        let seen = |chances, violations| Count { observations: 100, chances, violations };
        for (promise, count, verdict) in [
            (Promise::Contract, seen(10, 0), Verdict::Holds),
            (Promise::Contract, seen(0, 0), Verdict::Untested),
            (Promise::Contract, seen(10, 1), Verdict::Broken),
            (Promise::by("line_atomic", true), seen(10, 1), Verdict::Broken),
            (Promise::by("line_atomic", true), seen(10, 0), Verdict::Holds),
            (Promise::by("line_atomic", false), seen(10, 1), Verdict::NotPromisedViolated),
            (Promise::by("line_atomic", false), seen(10, 0), Verdict::NotPromisedNotViolated),
        ] {
            assert_eq!(Verdict::of(promise, count), verdict, "{promise:?} {count:?}");
        }
    }
}
