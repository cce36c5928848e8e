//! A pool's indexes in a file: what `farwood save` writes and `farwood restore` reads. `docs/save-format.md` shows the
//! bytes.
//!
//! | file | what it is |
//! |---|---|
//! | `write` | pairs into a file |
//! | `read` | pairs out of a file that may be damaged |
//!
//! A file is a header and records. Each ends with a checksum (xxh3-64) of all its bytes, a record's keyed with the
//! header's, so that a record of another file is none here. Records are numbered; each index ends with a record that
//! has the count and a checksum of all of its pairs; the file ends with a trailer, behind which nothing may be. So any
//! change of a byte, and any that is lacking or too many, is noticed.

mod read;
#[cfg(test)]
mod tests;
mod write;

pub(crate) use read::{Reader, Record};
pub(crate) use write::Writer;

use farwood_index::KeyValue;
use xxhash_rust::xxh3::Xxh3;

const MAGIC: &[u8; 8] = b"FWSAVE\r\n";
const VERSION: u32 = 1;
/// Magic, version, length of the body.
const HEADER_HEAD_BYTES: usize = 16;
/// Kind, index, length of the body, number of the record.
const RECORD_HEAD_BYTES: usize = 16;
const CHECKSUM_BYTES: usize = 8;
/// Lengths of a key and its value.
const PAIR_HEAD_BYTES: usize = 8;
/// A block is written when it has so many bytes.
pub(crate) const BLOCK_BYTES: usize = 256 << 10;
/// More than any header, or a block with the longest pair, has: what claims more is damaged, and is not allocated for.
const MAX_BODY_BYTES: usize = 64 << 20;
const KIND_BLOCK: u16 = 1;
const KIND_END: u16 = 2;
const KIND_TRAILER: u16 = 3;

/// An index, as the catalog had it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Saved {
    /// Its name.
    pub(crate) name: String,
    /// Its engine.
    pub(crate) engine: String,
    /// The engine's configuration, as the engine encodes it.
    pub(crate) config: Vec<u8>,
}

/// What stands at the beginning of a file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Header {
    /// The pool.
    pub(crate) pool: u128,
    /// When the save began, in milliseconds since 1970 by the clock of who saved.
    pub(crate) unix_ms: u64,
    /// Its indexes.
    pub(crate) indexes: Vec<Saved>,
}

/// A checksum of pairs, one after the other.
#[derive(Clone, Default)]
struct PairSum(Xxh3);

impl PairSum {
    fn add(&mut self, key: &[u8], value: &[u8]) {
        self.0.update(&(key.len() as u64).to_le_bytes());
        self.0.update(&(value.len() as u64).to_le_bytes());
        self.0.update(key);
        self.0.update(value);
    }

    fn sum(&self) -> u64 {
        self.0.digest()
    }
}
