//! What the gateway keeps with a value: when it expires.
//!
//! ```text
//! a value that never expires:          the value itself, byte for byte
//! the same, if it begins with 0xfd:    0xfd 0x00 value
//! a value that expires:                0xfd 0x01 time value      time: milliseconds since 1970, 8 bytes, most significant first
//! ```
//!
//! So an index that a gateway serves holds plain values, which `farwood get`, `put` and programs read and write as they are, except for
//! values that expire. No text in UTF-8 begins with 0xfd; bytes written by others that happen to look like an envelope are
//! taken for one.

use std::borrow::Cow;

const ESCAPE: u8 = 0xfd;
const PLAIN: u8 = 0;
const EXPIRES: u8 = 1;
/// How many bytes are in front of a value that expires.
const EXPIRES_BYTES: usize = 10;
/// So many bytes say when a value expires.
pub const HEAD_BYTES: usize = EXPIRES_BYTES;

/// Milliseconds since 1970.
pub type Millis = i64;

/// Where a value begins in what is stored, and when it expires.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Opened {
    /// Where the value begins.
    pub from: usize,
    /// When it expires, if it does.
    pub expires_at: Option<Millis>,
}

impl Opened {
    /// Whether the value is as good as gone.
    pub fn has_expired(&self, now: Millis) -> bool {
        self.expires_at.is_some_and(|at| at <= now)
    }
}

/// Looks into what is stored.
pub fn open(stored: &[u8]) -> Opened {
    match stored {
        [ESCAPE, PLAIN, ..] => Opened { from: 2, expires_at: None },
        [ESCAPE, EXPIRES, time @ ..] => match time.first_chunk::<8>() {
            Some(time) => Opened { from: EXPIRES_BYTES, expires_at: Some(Millis::from_be_bytes(*time)) },
            None => Opened { from: 0, expires_at: None },
        },
        _ => Opened { from: 0, expires_at: None },
    }
}

/// What to store for a value.
pub fn seal(value: &[u8], expires_at: Option<Millis>) -> Cow<'_, [u8]> {
    let mut sealed = match (expires_at, value.first()) {
        (None, Some(&ESCAPE)) => vec![ESCAPE, PLAIN],
        (None, _) => return Cow::Borrowed(value),
        (Some(at), _) => {
            let mut sealed = Vec::with_capacity(EXPIRES_BYTES + value.len());
            sealed.extend([ESCAPE, EXPIRES]);
            sealed.extend(at.to_be_bytes());
            sealed
        }
    };
    sealed.extend_from_slice(value);
    Cow::Owned(sealed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_is_sealed_is_found_again(
            first in prop::option::of(prop_oneof![Just(0xfdu8), any::<u8>()]),
            rest in prop::collection::vec(prop_oneof![Just(0u8), Just(1), any::<u8>()], 0..20),
            expires_at in prop::option::of(any::<i64>()),
        ) {
            let value: Vec<u8> = first.into_iter().chain(rest).collect();
            let sealed = seal(&value, expires_at);
            let opened = open(&sealed);
            prop_assert_eq!(opened.expires_at, expires_at);
            prop_assert_eq!(&sealed[opened.from..], &value[..]);
        }
    }

    #[test]
    fn plain_values_are_stored_as_they_are() {
        assert!(matches!(seal(b"hello", None), Cow::Borrowed(b"hello")));
        assert_eq!(open(b""), Opened { from: 0, expires_at: None });
        // Written by somebody else, and no envelope.
        for bytes in [&[0xfd][..], &[0xfd, 1, 2, 3], &[0xfd, 7, 0]] {
            assert_eq!(open(bytes), Opened { from: 0, expires_at: None });
        }
    }

    #[test]
    fn a_value_expires_at_its_time() {
        let opened = open(&seal(b"x", Some(1000)));
        assert!(!opened.has_expired(999) && opened.has_expired(1000));
        assert!(!open(b"x").has_expired(i64::MAX));
    }
}
