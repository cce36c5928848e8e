//! Values that say which write they come from, so that whoever reads one can tell a value that was written from one that
//! never was: mixed from two writes, cut short, or of another key.
//!
//! | size | contents | what can be read back |
//! |---|---|---|
//! | 16 bytes or more | the version; the key, masked by a hash of the version; noise | key and version ([`Values::identify`]) |
//! | 8 to 15 | 40 bits of the version and 24 bits of a hash of the key, permuted together; noise | the version, given the key ([`Values::version_of`]) |
//! | 0 to 7 | noise | nothing; it can be compared ([`Values::matches`]) |
//!
//! Noise and size follow from key and version and are checked byte by byte; two versions of a key differ in every word. Half of
//! one value and half of another unmask to a random key, not to the one it was read under. To whoever knows that key, a mixture
//! passes for whole with a probability of 2^-64, of values below 16 bytes of 2^-24. Without the key it is the noise alone that
//! gives it away, of which a value of 16 bytes has none: compare the key that [`Values::identify`] returns. Values of fewer
//! than 8 bytes cannot tell writes apart reliably.

use crate::random::{Random, mix64, unmix64};
use crate::text::{BadText, parse_range, write_range};
use std::fmt;
use std::str::FromStr;

/// The largest value that can be asked for.
pub const MAX_VALUE_BYTES: u32 = 1 << 24;
/// From this size on, key and version can be read back.
pub const IDENTITY_BYTES: usize = 16;
/// From this size on, the version can be read back by whoever knows the key.
pub const VERSION_BYTES: usize = 8;
/// How much of the version a value of fewer than 16 bytes holds.
pub const SHORT_VERSION_BITS: u32 = 40;

const SHORT_VERSION_MASK: u64 = (1 << SHORT_VERSION_BITS) - 1;
/// Makes the mask of version 0 a number like any other.
const MASK_KEY: u64 = 0x243f_6a88_85a3_08d3;

/// The write that a value comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ValueId {
    /// The number of its key.
    pub index: u64,
    /// The version; 0 for loaded values.
    pub version: u64,
}

/// Why a value does not say where it comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum BadValue {
    /// Too small to say; compare it with [`Values::matches`].
    TooSmall {
        /// Its size.
        bytes: usize,
    },
    /// Not of a size that its write had.
    WrongSize {
        /// Its size.
        bytes: usize,
    },
    /// No write of this workload: mixed from several, damaged, or of another key.
    Mixed,
}

impl fmt::Display for BadValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooSmall { bytes } => {
                write!(
                    f,
                    "a value of {bytes} bytes cannot say which write it is: use larger values, or compare"
                )
            }
            Self::WrongSize { bytes } => {
                write!(f, "no write of this value had {bytes} bytes: cut, grown or mixed")
            }
            Self::Mixed => {
                f.write_str("no write made this value: mixed from several, damaged, or of another key")
            }
        }
    }
}

impl std::error::Error for BadValue {}

/// Values of one size, or of sizes evenly distributed in a range. Text: `64` or `16-400`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Values {
    min: u32,
    max: u32,
}

impl Values {
    /// Values of this many bytes, at most [`MAX_VALUE_BYTES`].
    pub const fn fixed(bytes: u32) -> Self {
        Self::between(bytes, bytes)
    }

    /// Values of `min` to `max` bytes, at most [`MAX_VALUE_BYTES`], at least `min`.
    pub const fn between(min: u32, max: u32) -> Self {
        let min = if min > MAX_VALUE_BYTES { MAX_VALUE_BYTES } else { min };
        let max = if max > MAX_VALUE_BYTES { MAX_VALUE_BYTES } else { max };
        Self { min, max: if max < min { min } else { max } }
    }

    /// The smallest and the largest size.
    pub const fn bounds(self) -> (u32, u32) {
        (self.min, self.max)
    }

    /// The size of a value; of its version the lower 40 bits decide, which small values hold.
    pub fn bytes(self, id: ValueId) -> usize {
        let more = if self.min == self.max {
            0
        } else {
            Random::new(id.index, id.version & SHORT_VERSION_MASK).below(u64::from(self.max - self.min) + 1)
        };
        usize::try_from(u64::from(self.min) + more).unwrap_or(0)
    }

    /// The value that a write sets, in a buffer that is used again and again.
    pub fn value(self, id: ValueId, buffer: &mut Vec<u8>) -> &[u8] {
        let bytes = self.bytes(id);
        buffer.clear();
        if bytes >= IDENTITY_BYTES {
            buffer.extend_from_slice(&id.version.to_le_bytes());
            buffer.extend_from_slice(&(id.index ^ mask(id.version)).to_le_bytes());
        } else if bytes >= VERSION_BYTES {
            buffer.extend_from_slice(&short_identity(id).to_le_bytes());
        }
        let version = if bytes >= IDENTITY_BYTES { id.version } else { id.version & SHORT_VERSION_MASK };
        let mut noise = Random::new(mask(version) ^ id.index, bytes as u64);
        while buffer.len() < bytes {
            let word = noise.word().to_le_bytes();
            buffer.extend_from_slice(&word[..word.len().min(bytes - buffer.len())]);
        }
        buffer
    }

    /// Whether these bytes are the value of this write.
    pub fn matches(self, id: ValueId, value: &[u8]) -> bool {
        value.len() == self.bytes(id) && self.value(id, &mut Vec::new()) == value
    }

    /// Which write a value of 16 bytes or more comes from. Of few more than 16 bytes a mixture may pass, for one of a random key.
    pub fn identify(self, value: &[u8]) -> Result<ValueId, BadValue> {
        let words =
            value.split_first_chunk::<8>().and_then(|(first, rest)| Some((first, rest.first_chunk::<8>()?)));
        let (version, masked) = words.ok_or(BadValue::TooSmall { bytes: value.len() })?;
        let version = u64::from_le_bytes(*version);
        self.checked(ValueId { index: u64::from_le_bytes(*masked) ^ mask(version), version }, value)
    }

    /// Which version of a key a value of 8 bytes or more is; of values below 16 bytes, its lower 40 bits.
    pub fn version_of(self, index: u64, value: &[u8]) -> Result<u64, BadValue> {
        if value.len() >= IDENTITY_BYTES {
            let id = self.identify(value)?;
            return if id.index == index { Ok(id.version) } else { Err(BadValue::Mixed) };
        }
        let word = value.first_chunk().ok_or(BadValue::TooSmall { bytes: value.len() })?;
        let version = unmix64(u64::from_le_bytes(*word)) & SHORT_VERSION_MASK;
        self.checked(ValueId { index, version }, value).map(|id| id.version)
    }

    fn checked(self, id: ValueId, value: &[u8]) -> Result<ValueId, BadValue> {
        if !(self.min as usize..=self.max as usize).contains(&value.len()) {
            Err(BadValue::WrongSize { bytes: value.len() })
        } else if self.matches(id, value) {
            Ok(id)
        } else {
            Err(BadValue::Mixed)
        }
    }
}

fn mask(version: u64) -> u64 {
    mix64(version ^ MASK_KEY)
}

fn short_identity(id: ValueId) -> u64 {
    mix64((mix64(id.index) << SHORT_VERSION_BITS) | (id.version & SHORT_VERSION_MASK))
}

impl FromStr for Values {
    type Err = BadText;

    fn from_str(text: &str) -> Result<Self, BadText> {
        let (min, max) =
            parse_range(text, 0..=MAX_VALUE_BYTES).ok_or_else(|| BadText::ValueSize(text.to_owned()))?;
        Ok(Self { min, max })
    }
}

impl fmt::Display for Values {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_range(f, self.min, self.max)
    }
}
