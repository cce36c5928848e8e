//! Proof that an object was read whole.
//!
//! Under the contract a READ may bring any mixture of an object's old and new words. Versions alone cannot tell when payload
//! words are full, so an object carries a checksum of its bytes, keyed by the index, the object's address and its version:
//!
//! ```text
//! +0   version    8 B   grows with every rewrite of the object
//! +8   checksum   8 B   of the payload, keyed by index, address, version and length
//! +16  payload
//! ```
//!
//! - keyed by *address and index*, so that no stale hint takes foreign or moved bytes for the object it expects;
//! - keyed by the *version*, so that a mixture of two rewrites with the same payload words in different places does not
//!   pass: words of two versions never agree on the key;
//! - 64 bits, so that a torn object passes about once in 10^19 reads. (32 bits would pass once in 4 x 10^9.)
//!
//! The hash is XXH3, a checksum and not a seal against malice: a client that may WRITE may forge.

use farwood_fabric::control::IndexId;
use farwood_fabric::{Buf, FabricError, GlobalAddr, Op, marks};
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

/// Bytes in front of the payload.
pub const HEADER_BYTES: usize = 16;
const VERSION_AT: usize = 0;
const CHECKSUM_AT: usize = 8;
const _: () = assert!(CHECKSUM_AT + 8 == HEADER_BYTES && VERSION_AT + 8 == CHECKSUM_AT);

/// How often a torn read is repeated before the reader gives up. Each repeat is one READ against writers that each take a
/// window of nanoseconds, so this many in a row means that the object stays broken.
pub const MAX_ATTEMPTS: u32 = 1000;

/// What an object's checksum is keyed by, besides its version.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// The index it belongs to.
    pub index: IndexId,
    /// Where it lives.
    pub addr: GlobalAddr,
}

impl Place {
    /// The checksum of `payload` as version `version` of the object here.
    #[inline]
    pub fn checksum(self, version: u64, payload: &[u8]) -> u64 {
        let mut key = [0; 24];
        key[..8].copy_from_slice(&self.addr.to_raw().to_le_bytes());
        key[8..16].copy_from_slice(&version.to_le_bytes());
        key[16..].copy_from_slice(&u64::from(self.index).to_le_bytes());
        xxh3_64_with_seed(payload, xxh3_64(&key))
    }

    /// Fills in the header of an object whose payload is in place.
    ///
    /// # Panics
    /// If there is no room for a header.
    pub fn seal(self, version: u64, object: &mut [u8]) {
        let checksum = self.checksum(version, &object[HEADER_BYTES..]);
        object[VERSION_AT..CHECKSUM_AT].copy_from_slice(&version.to_le_bytes());
        object[CHECKSUM_AT..HEADER_BYTES].copy_from_slice(&checksum.to_le_bytes());
    }

    /// The version of an object that is whole; `None` if it is torn, foreign, or too short.
    #[inline]
    pub fn version_if_whole(self, object: &[u8]) -> Option<u64> {
        let (version, rest) = object.split_first_chunk()?;
        let (checksum, payload) = rest.split_first_chunk()?;
        let version = u64::from_le_bytes(*version);
        (self.checksum(version, payload) == u64::from_le_bytes(*checksum)).then_some(version)
    }
}

/// An object that was read whole.
#[derive(Debug)]
pub struct Whole {
    buf: Buf,
    /// Its version.
    pub version: u64,
}

impl Whole {
    /// What is behind the header.
    pub fn payload(&self) -> &[u8] {
        &self.buf[HEADER_BYTES..]
    }
}

/// Takes an object that was read as whole, or hands the buffer back.
pub fn accept(place: Place, buf: Buf) -> Result<Whole, Buf> {
    if let Some(version) = place.version_if_whole(&buf) {
        Ok(Whole { buf, version })
    } else {
        marks::hit("torn_read");
        Err(buf)
    }
}

/// Reads an object of `len` bytes, header included, until it is whole. One round trip, and one more for each torn read.
pub async fn read(op: &Op, place: Place, len: usize) -> Result<Whole, FabricError> {
    for _ in 0..MAX_ATTEMPTS {
        if let Ok(whole) = accept(place, op.read(place.addr, len).await?) {
            return Ok(whole);
        }
        op.count_retry();
    }
    Err(FabricError::RetriesExhausted { what: "reading an object whole", attempts: MAX_ATTEMPTS })
}

#[cfg(test)]
mod tests {
    use super::*;
    use farwood_fabric::{RegionId, ServerId};
    use proptest::prelude::*;

    fn place(index: IndexId, offset: u64) -> Place {
        Place { index, addr: GlobalAddr::new(ServerId::new(1), RegionId::MAIN, offset) }
    }

    proptest! {
        #[test]
        fn a_sealed_object_is_whole_only_as_itself(payload in proptest::collection::vec(any::<u8>(), 0..200), version: u64, flip in any::<proptest::sample::Index>()) {
            let mut object = vec![0; HEADER_BYTES];
            object.extend(&payload);
            place(7, 640).seal(version, &mut object);
            prop_assert_eq!(place(7, 640).version_if_whole(&object), Some(version));
            prop_assert_eq!(place(8, 640).version_if_whole(&object), None, "another index");
            prop_assert_eq!(place(7, 704).version_if_whole(&object), None, "another address");
            prop_assert_eq!(place(7, 640).version_if_whole(&object[..object.len() - 1]), None, "another length");
            let at = flip.index(object.len());
            object[at] ^= 1;
            prop_assert_eq!(place(7, 640).version_if_whole(&object), None, "a flipped bit");
        }

        #[test]
        fn any_mixture_of_two_versions_is_refused(words in 1usize..40, mask: u64, same_payload: bool) {
            let object = |version: u64| {
                let mut object = vec![0; HEADER_BYTES];
                let fill = if same_payload { 1 } else { version };
                object.extend((0..words).flat_map(|w| (fill * 1000 + w as u64).to_le_bytes()));
                place(1, 64).seal(version, &mut object);
                object
            };
            let (old, new) = (object(1), object(2));
            let mut mixed = old.clone();
            for w in (0..words + 2).filter(|w| mask >> (w % 64) & 1 == 1) {
                mixed[w * 8..w * 8 + 8].copy_from_slice(&new[w * 8..w * 8 + 8]);
            }
            if mixed != old && mixed != new {
                prop_assert_eq!(place(1, 64).version_if_whole(&mixed), None);
            }
        }
    }

    #[test]
    fn garbage_shorter_than_a_header_is_refused() {
        for len in 0..HEADER_BYTES {
            assert_eq!(place(1, 64).version_if_whole(&vec![0; len]), None);
        }
        assert_eq!(place(1, 64).version_if_whole(&[0; 64]), None, "memory that was never written");
    }
}
