//! What the gateway keeps with a value: when it expires.
//!
//! ```text
//! a value that never expires:          the value itself, byte for byte
//! the same, if it ends with 0xfd:      value 0x00 0xfd
//! a value that expires:                value time 0x01 0xfd      time: milliseconds since 1970, 8 bytes, most significant first
//! ```
//!
//! So an index that a gateway serves holds plain values, which `farwood get`, `put` and programs read and write as they are, except for
//! values that expire. No text in UTF-8 ends with 0xfd; bytes written by others that happen to look like an envelope are
//! taken for one.
//!
//! The envelope is behind the value, so that a change of the time alone changes only the end of what is stored. An engine can do that in
//! place, however long the value is, and needs no memory for it: EXPIRE works in a full pool.

use std::borrow::Cow;

const ESCAPE: u8 = 0xfd;
const PLAIN: u8 = 0;
const EXPIRES: u8 = 1;
/// How many bytes are behind a value that expires, and behind one that is only marked as plain.
const EXPIRES_BYTES: usize = 10;
const PLAIN_BYTES: usize = 2;
/// The longest envelope.
pub(crate) const MOST_BYTES: usize = EXPIRES_BYTES;

/// Milliseconds since 1970.
pub type Millis = i64;

/// Where a value ends in what is stored, and when it expires.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Opened {
    /// How many bytes are the value's; the rest is the envelope.
    pub bytes: usize,
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
        [value @ .., PLAIN, ESCAPE] => Opened { bytes: value.len(), expires_at: None },
        [rest @ .., EXPIRES, ESCAPE] => match rest.split_last_chunk::<8>() {
            Some((value, time)) => {
                Opened { bytes: value.len(), expires_at: Some(Millis::from_be_bytes(*time)) }
            }
            None => Opened { bytes: stored.len(), expires_at: None },
        },
        _ => Opened { bytes: stored.len(), expires_at: None },
    }
}

/// What to store for a value.
pub fn seal(value: &[u8], expires_at: Option<Millis>) -> Cow<'_, [u8]> {
    let mut sealed = match (expires_at, value.last()) {
        (None, Some(&ESCAPE)) => Vec::with_capacity(value.len() + PLAIN_BYTES),
        (None, _) => return Cow::Borrowed(value),
        (Some(_), _) => Vec::with_capacity(value.len() + EXPIRES_BYTES),
    };
    sealed.extend_from_slice(value);
    match expires_at {
        Some(at) => {
            sealed.extend(at.to_be_bytes());
            sealed.extend([EXPIRES, ESCAPE]);
        }
        None => sealed.extend([PLAIN, ESCAPE]),
    }
    Cow::Owned(sealed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_is_sealed_is_found_again(
            rest in prop::collection::vec(prop_oneof![Just(0u8), Just(1), any::<u8>()], 0..20),
            last in prop::option::of(prop_oneof![Just(0xfdu8), any::<u8>()]),
            expires_at in prop::option::of(any::<i64>()),
        ) {
            let value: Vec<u8> = rest.into_iter().chain(last).collect();
            let sealed = seal(&value, expires_at);
            let opened = open(&sealed);
            prop_assert_eq!(opened.expires_at, expires_at);
            prop_assert_eq!(&sealed[..opened.bytes], &value[..]);
            prop_assert!(sealed.starts_with(&value) && sealed.len() <= value.len() + MOST_BYTES);
        }
    }

    #[test]
    fn plain_values_are_stored_as_they_are() {
        assert!(matches!(seal(b"hello", None), Cow::Borrowed(b"hello")));
        // Written by somebody else, and no envelope.
        for bytes in [&[][..], &[0xfd], &[3, 2, 1, 0xfd], &[0, 7, 0xfd], &[0xfd, 1]] {
            assert_eq!(open(bytes), Opened { bytes: bytes.len(), expires_at: None });
        }
    }

    #[test]
    fn a_value_expires_at_its_time() {
        let opened = open(&seal(b"x", Some(1000)));
        assert!(!opened.has_expired(999) && opened.has_expired(1000));
        assert!(!open(b"x").has_expired(i64::MAX));
    }
}
