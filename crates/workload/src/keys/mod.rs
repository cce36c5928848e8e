//! Key sets: a key's bytes from its number and back, so that a run of 10^9 keys stores none of them. Different numbers have
//! different keys, for every number and by construction.
//!
//! | set | key |
//! |---|---|
//! | `u64` | 8 bytes that look random: a keyed bijection of the number, most significant byte first |
//! | `sequential` | the number itself, most significant byte first |
//! | `email` | an address of 2 to 32 bytes, see [`email`] |
//!
//! `u64:20` and `sequential:20` append the digit 0 up to 20 bytes, as db_bench does with its keys (dLSM: 20 bytes). Every
//! 8-byte key is possible, 0 and the maximum too.

pub mod email;

use crate::random::{Random, mix64, unmix64};
use crate::text::{BadText, parse_count};
use std::fmt;
use std::str::FromStr;

/// The longest key that a set has.
pub const MAX_KEY_BYTES: u32 = 1024;
const WORD_BYTES: u32 = 8;

/// What keys look like.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KeyKind {
    /// Evenly distributed 64-bit numbers.
    U64 {
        /// The length of a key, 8 or more.
        bytes: u32,
    },
    /// 0, 1, 2 and so on.
    Sequential {
        /// The length of a key, 8 or more.
        bytes: u32,
    },
    /// E-mail addresses.
    Email,
}

impl FromStr for KeyKind {
    type Err = BadText;

    fn from_str(text: &str) -> Result<Self, BadText> {
        let bad = || BadText::KeySet(text.to_owned());
        let (name, bytes) = match text.split_once(':') {
            Some((name, bytes)) => (name, Some(parse_count(bytes).ok_or_else(bad)?)),
            None => (text, None),
        };
        let bytes = bytes.map(u32::try_from).transpose().map_err(|_| bad())?;
        if bytes.is_some_and(|bytes| !(WORD_BYTES..=MAX_KEY_BYTES).contains(&bytes)) {
            return Err(bad());
        }
        match (name, bytes) {
            ("u64", bytes) => Ok(Self::U64 { bytes: bytes.unwrap_or(WORD_BYTES) }),
            ("sequential", bytes) => Ok(Self::Sequential { bytes: bytes.unwrap_or(WORD_BYTES) }),
            ("email", None) => Ok(Self::Email),
            _ => Err(bad()),
        }
    }
}

impl fmt::Display for KeyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, bytes) = match self {
            Self::U64 { bytes } => ("u64", *bytes),
            Self::Sequential { bytes } => ("sequential", *bytes),
            Self::Email => return f.write_str("email"),
        };
        f.write_str(name)?;
        if bytes == WORD_BYTES { Ok(()) } else { write!(f, ":{bytes}") }
    }
}

/// Keys of one kind, the same for everybody with the same seed.
#[derive(Clone, Debug)]
pub struct KeySet {
    kind: KeyKind,
    /// What tells apart the `u64` sets of different seeds.
    whitening: u64,
    emails: email::Emails,
}

impl KeySet {
    /// The keys of a kind and a seed.
    pub fn new(kind: KeyKind, seed: u64) -> Self {
        Self { kind, whitening: Random::new(seed, 0x6b65_7973).word(), emails: email::Emails::new(seed) }
    }

    /// What keys look like.
    pub fn kind(&self) -> KeyKind {
        self.kind
    }

    /// The bytes of the key with this number, in a buffer that is used again and again.
    #[inline]
    pub fn key<'a>(&self, index: u64, buffer: &'a mut Vec<u8>) -> &'a [u8] {
        buffer.clear();
        match self.kind {
            KeyKind::U64 { bytes } | KeyKind::Sequential { bytes } => {
                buffer.extend_from_slice(&self.word(index).to_be_bytes());
                if bytes > WORD_BYTES {
                    buffer.resize(usize::try_from(bytes).unwrap_or(8), b'0');
                }
            }
            KeyKind::Email => self.emails.write(index, buffer),
        }
        buffer
    }

    /// The number that the first eight bytes of a key are; of e-mail addresses, which have none, their own number.
    fn word(&self, index: u64) -> u64 {
        if matches!(self.kind, KeyKind::U64 { .. }) { mix64(index ^ self.whitening) } else { index }
    }

    /// The key with this number as a number, in the order of its bytes; `None` for e-mail addresses.
    #[inline]
    pub fn key_u64(&self, index: u64) -> Option<u64> {
        (self.kind != KeyKind::Email).then(|| self.word(index))
    }

    /// The numbers of the first `count` keys in the order of these keys. Takes 16 bytes of memory for each, whatever their length.
    pub fn sorted(&self, count: u64) -> impl Iterator<Item = u64> + use<> {
        let (mut one, mut other) = (Vec::new(), Vec::new());
        let mut order: Vec<(u64, u64)> =
            (0..count).map(|index| (prefix(self.key(index, &mut one)), index)).collect();
        order.sort_unstable_by(|a, b| {
            a.0.cmp(&b.0).then_with(|| self.key(a.1, &mut one).cmp(self.key(b.1, &mut other)))
        });
        order.into_iter().map(|(_, index)| index)
    }

    /// The number of a key; `None` if these bytes are no key of this set.
    pub fn index_of(&self, key: &[u8]) -> Option<u64> {
        let (KeyKind::U64 { bytes } | KeyKind::Sequential { bytes }) = self.kind else {
            return self.emails.index_of(key);
        };
        let (word, padding) = key.split_first_chunk()?;
        let word = u64::from_be_bytes(*word);
        let whole = key.len() as u64 == u64::from(bytes) && padding.iter().all(|byte| *byte == b'0');
        whole.then(|| {
            if matches!(self.kind, KeyKind::U64 { .. }) { unmix64(word) ^ self.whitening } else { word }
        })
    }
}

/// The first bytes of a key, as a number that sorts as they do.
fn prefix(key: &[u8]) -> u64 {
    let mut word = [0; 8];
    let bytes = key.len().min(8);
    word[..bytes].copy_from_slice(&key[..bytes]);
    u64::from_be_bytes(word)
}
