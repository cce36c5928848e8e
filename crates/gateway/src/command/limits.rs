//! How long keys and values may be, for clients: what the engine takes, less the room for a value's envelope.
//!
//! - A value has the same limit whether it expires or not.
//! - A key that is too long is in no index. Commands that look for it find nothing; those that would create it are refused.
//! - A bound of a range may have any length. One that is longer than any key becomes its first bytes: the same keys are on either side.

use super::Refused;
use crate::envelope::MOST_BYTES;
use crate::shard::Shard;
use crate::store::Store;
use farwood_index::Limits;
use std::ops::Bound;

/// The limits of clients on an index that has these.
pub(crate) fn of_clients(index: Limits) -> Limits {
    let less = |bytes: usize| if bytes == usize::MAX { bytes } else { bytes.saturating_sub(MOST_BYTES) };
    Limits {
        value_bytes: less(index.value_bytes),
        pair_bytes: less(index.pair_bytes),
        key_bytes: index.key_bytes,
    }
}

impl<S: Store> Shard<S> {
    /// Whether no index can have such a key.
    #[inline]
    pub(super) fn is_too_long(&self, key: &[u8]) -> bool {
        key.len() > self.limits.key_bytes
    }

    /// Refuses a key and a value that are too long.
    #[inline]
    pub(super) fn check_pair(&self, key: &[u8], value_bytes: usize) -> Result<(), Refused> {
        let Limits { key_bytes: key_most, value_bytes: value_most, pair_bytes: pair_most } = self.limits;
        if key.len() <= key_most && value_bytes <= value_most && key.len() + value_bytes <= pair_most {
            return Ok(());
        }
        Err(Refused::new(if key.len() > key_most {
            format!("ERR the key is longer than the {key_most} bytes that a key may have")
        } else if value_bytes > value_most {
            format!("ERR the value is longer than the {value_most} bytes that a value may have")
        } else {
            format!("ERR key and value are longer than the {pair_most} bytes that both may have together")
        }))
    }

    /// The lower end of a range, no longer than a key. Keys that are greater than a long one are those that are greater than its beginning.
    pub(super) fn lower_end(&self, end: Bound<Vec<u8>>) -> Bound<Vec<u8>> {
        match end {
            Bound::Included(key) | Bound::Excluded(key) if self.is_too_long(&key) => {
                Bound::Excluded(self.cut(key))
            }
            end => end,
        }
    }

    /// The upper end. Keys that are less than a long one are its beginning and those that are less than that.
    pub(super) fn upper_end(&self, end: Bound<Vec<u8>>) -> Bound<Vec<u8>> {
        match end {
            Bound::Included(key) | Bound::Excluded(key) if self.is_too_long(&key) => {
                Bound::Included(self.cut(key))
            }
            end => end,
        }
    }

    fn cut(&self, mut key: Vec<u8>) -> Vec<u8> {
        key.truncate(self.limits.key_bytes);
        key
    }
}

/// Whether no key can be between the bounds.
pub(super) fn is_behind(start: &Bound<Vec<u8>>, end: &Bound<Vec<u8>>) -> bool {
    match (start, end) {
        (Bound::Included(start), Bound::Included(end)) => start > end,
        (Bound::Included(start) | Bound::Excluded(start), Bound::Included(end) | Bound::Excluded(end)) => {
            start >= end
        }
        _ => false,
    }
}
