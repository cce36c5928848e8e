//! What the keys of a trial look like: their numbers spelled so that they hurt, each in another way.

use std::fmt;
use std::str::FromStr;

/// How the number of a key becomes its bytes. Different numbers have different ones.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Spelling {
    /// Eight bytes, the most significant first.
    #[default]
    Numbers,
    /// Words over three letters by length, the empty one first: each is the prefix of others.
    Prefixes,
    /// Sixteen bytes that differ from zeros in one place, each in another.
    Ladder,
    /// A common prefix of 200 bytes.
    LongPrefix,
    /// 4 KiB, different at the beginning, in the middle or at the end.
    Huge,
    /// Any bytes of any length up to twelve.
    Binary,
}

/// The names by which a trial's text knows them.
const NAMES: [(&str, Spelling); 6] = [
    ("numbers", Spelling::Numbers),
    ("prefixes", Spelling::Prefixes),
    ("ladder", Spelling::Ladder),
    ("long-prefix", Spelling::LongPrefix),
    ("huge", Spelling::Huge),
    ("binary", Spelling::Binary),
];

const LADDER_BYTES: u64 = 16;
const LONG_PREFIX_BYTES: usize = 200;
const HUGE_BYTES: usize = 4096;

impl Spelling {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::Numbers, Self::Prefixes, Self::Ladder, Self::LongPrefix, Self::Huge, Self::Binary];

    /// The key with this number, which is below 4096.
    pub fn key(self, number: u64) -> Vec<u8> {
        let bytes = number.to_be_bytes();
        match self {
            Self::Numbers => bytes.to_vec(),
            Self::Prefixes => {
                let (mut left, mut word) = (number, Vec::new());
                while left > 0 {
                    left -= 1;
                    word.push(b'a' + u8::try_from(left % 3).unwrap_or(0));
                    left /= 3;
                }
                word
            }
            Self::Ladder => {
                let mut key = vec![0; 16];
                key[usize::try_from(number % LADDER_BYTES).unwrap_or(0)] =
                    u8::try_from(1 + number / LADDER_BYTES % 255).unwrap_or(0);
                if number >= LADDER_BYTES * 255 {
                    key.push(1);
                }
                key
            }
            Self::LongPrefix => {
                let mut key = vec![0x61; LONG_PREFIX_BYTES];
                key.extend(&bytes[6..]);
                key
            }
            Self::Huge => {
                let mut key = vec![7; HUGE_BYTES];
                let at = [0, HUGE_BYTES / 2, HUGE_BYTES - 2][usize::try_from(number % 3).unwrap_or(0)];
                key[at..at + 2]
                    .copy_from_slice(&u16::try_from(number / 3 + 0x0800).unwrap_or(0).to_be_bytes());
                key
            }
            Self::Binary => {
                // Whatever comes out of mixing the number, cut somewhere, and the number itself, so that all differ.
                let mixed = (number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                let len = usize::try_from(mixed >> 60).unwrap_or(0).min(10);
                let mut key: Vec<u8> = mixed.to_le_bytes().iter().cycle().take(len).copied().collect();
                key.extend(&bytes[6..]);
                key
            }
        }
    }
}

impl fmt::Display for Spelling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(NAMES.iter().find(|(_, spelling)| spelling == self).map_or("", |(name, _)| name))
    }
}

impl FromStr for Spelling {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        NAMES.iter().find(|(name, _)| *name == text).map(|(_, spelling)| *spelling).ok_or(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn different_numbers_have_different_keys_of_4_kib_at_most() {
        for spelling in Spelling::ALL {
            let keys: BTreeSet<Vec<u8>> = (0..4096).map(|number| spelling.key(number)).collect();
            assert_eq!(keys.len(), 4096, "{spelling}");
            assert!(keys.iter().all(|key| key.len() <= 4096), "{spelling}");
            assert_eq!(spelling.to_string().parse(), Ok(spelling));
        }
        assert_eq!(Spelling::Prefixes.key(0), b"");
    }
}
