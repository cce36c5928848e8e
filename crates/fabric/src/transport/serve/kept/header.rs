//! What kept memory says of itself, in its first block behind the gates. Pure.
//!
//! ```text
//! 1 MiB        slot 0   \ one page each; the one with the higher sequence counts
//! 1 MiB + 4096 slot 1   /
//! 1 MiB + 8192 checksums of the pieces, 8 B each, up to 2 MiB; meaningful in state clean
//!
//! slot
//! +0   magic      8 B
//! +8   version    4 B | state 4 B: 1 in use, 2 clean
//! +16  sequence   8 B   grows with every change
//! +24  opening    8 B   which opening of the memory this was
//! +32  boot      16 B   of the machine that opened it
//! +48  device     8 B   \ the file that was opened: a copy has another inode
//! +56  inode      8 B   /
//! +64  total      8 B   bytes of gates, header and all regions
//! +72  piece      8 B   bytes that have a checksum
//! +80  pieces     8 B
//! +88  sums       8 B   checksum of all checksums; meaningful in state clean
//! +96  checksum   8 B   of everything before it
//! ```
//!
//! A change is written to the slot that does not count, made durable, and then the other slot is cleared. So a process that is killed
//! anywhere leaves a slot that counts, and memory at rest has just one: if its page is lost, or comes back from earlier, none counts, or
//! one that does not fit the checksums.

use super::super::backing::Layout;
use crate::addr::RegionId;
use crate::found::Piece;
use std::fmt;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Where the first slot is.
pub(super) const HEADER_AT: usize = 1 << 20;
/// Length of a slot's page.
pub(super) const SLOT_BYTES: usize = 4096;
/// Where the checksums are.
pub(super) const SUMS_AT: usize = HEADER_AT + 2 * SLOT_BYTES;
/// Where header and checksums end.
pub(crate) const HEADER_END: usize = 2 << 20;
/// How many pieces there can be.
const MAX_SUMS: u64 = ((HEADER_END - SUMS_AT) / 8) as u64;
/// Pieces are no shorter.
const MIN_PIECE_BYTES: u64 = 64 << 10;

const MAGIC: u64 = u64::from_le_bytes(*b"FARWKEPT");
const VERSION: u32 = 1;
const CHECKED_BYTES: usize = 96;
/// A slot without the rest of its page.
pub(super) const ENCODED_BYTES: usize = CHECKED_BYTES + 8;

/// One start of a machine. Memory of its page cache and of its processors lives as long.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct BootId(pub u128);

impl BootId {
    /// Of this machine, as the system says; where it does not, one that never comes again.
    pub fn of_this_machine() -> Self {
        let said = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok();
        said.and_then(|text| text.parse().ok()).unwrap_or_else(|| Self(fastrand::u128(..)))
    }
}

impl std::str::FromStr for BootId {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let digits: String = text.trim().chars().filter(|c| *c != '-').collect();
        u128::from_str_radix(&digits, 16).map(Self)
    }
}

impl fmt::Debug for BootId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// Whether somebody works on the memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    InUse = 1,
    Clean = 2,
}

/// What a slot says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Header {
    pub(super) state: State,
    pub(super) sequence: u64,
    pub(super) opening: u64,
    pub(super) boot: BootId,
    /// Device and inode.
    pub(super) file: (u64, u64),
    pub(super) total: u64,
    pub(super) piece_bytes: u64,
    pub(super) pieces: u64,
    pub(super) sums: u64,
}

impl Header {
    pub(super) fn encode(&self) -> [u8; ENCODED_BYTES] {
        let boot = self.boot.0.to_le_bytes();
        let words = [
            MAGIC,
            u64::from(VERSION) | (self.state as u64) << 32,
            self.sequence,
            self.opening,
            word_at(&boot, 0),
            word_at(&boot, 8),
            self.file.0,
            self.file.1,
            self.total,
            self.piece_bytes,
            self.pieces,
            self.sums,
        ];
        let mut bytes = [0; ENCODED_BYTES];
        for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        let checksum = xxh3_64_with_seed(&bytes[..CHECKED_BYTES], MAGIC);
        bytes[CHECKED_BYTES..].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8; ENCODED_BYTES]) -> Option<Self> {
        let word = |n: usize| word_at(bytes, n * 8);
        let is_whole = word(0) == MAGIC && xxh3_64_with_seed(&bytes[..CHECKED_BYTES], MAGIC) == word(12);
        let state = match (word(1) & 0xffff_ffff, word(1) >> 32) {
            (1, 1) => State::InUse,
            (1, 2) => State::Clean,
            _ => return None,
        };
        is_whole.then(|| Self {
            state,
            sequence: word(2),
            opening: word(3),
            boot: BootId(u128::from(word(4)) | u128::from(word(5)) << 64),
            file: (word(6), word(7)),
            total: word(8),
            piece_bytes: word(9),
            pieces: word(10),
            sums: word(11),
        })
    }

    /// Of two slots, the number of the one that counts, and what it says.
    pub(super) fn choose(slots: [Option<Self>; 2]) -> Option<(usize, Self)> {
        let found = slots.into_iter().enumerate().filter_map(|(number, slot)| Some((number, slot?)));
        found.max_by_key(|(_, header)| header.sequence)
    }
}

fn word_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).and_then(|word| word.try_into().ok()).map_or(0, u64::from_le_bytes)
}

/// The bytes that have a checksum each: as many as there is room for, none shorter than 64 KiB.
pub(super) fn piece_bytes(layout: &Layout) -> u64 {
    let mut bytes = MIN_PIECE_BYTES;
    while layout.regions.iter().map(|mapped| mapped.extent.bytes.div_ceil(bytes)).sum::<u64>() > MAX_SUMS {
        bytes *= 2;
    }
    bytes
}

/// All pieces, in the order of their checksums.
pub(super) fn pieces(layout: &Layout, piece_bytes: u64) -> impl Iterator<Item = Piece> + '_ {
    layout.regions.iter().flat_map(move |mapped| {
        let (region, whole) = (mapped.region, mapped.extent.bytes);
        let steps = (0..whole.div_ceil(piece_bytes)).map(move |n| n * piece_bytes);
        steps.map(move |offset| Piece { region, offset, bytes: piece_bytes.min(whole - offset) })
    })
}

/// Why memory is not taken over as it is.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum NotWhole {
    /// The machine went down while a server used it.
    InUse,
    /// It was copied while a server used it.
    Copied,
    /// Pieces are not what they were when it was closed.
    Pieces {
        /// How many.
        failed: u64,
        /// Of how many.
        pieces: u64,
        /// The first of them.
        region: RegionId,
        /// Where it begins there.
        offset: u64,
    },
    /// The checksums themselves are not what they were.
    Checksums,
    /// The header is gone.
    NoHeader,
    /// It is shorter or longer than it was.
    Length {
        /// Its length.
        found: u64,
        /// What it was.
        expected: u64,
    },
    /// It has been opened fewer times than the pool's other memory.
    Older {
        /// Its opening.
        found: u64,
        /// The last one of the pool.
        expected: u64,
    },
}

impl fmt::Display for NotWhole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InUse => {
                f.write_str("it was in use when the machine went down, so its pages may be of different ages")
            }
            Self::Copied => {
                f.write_str("it is a copy made while a server used it, so its pages may be of different ages")
            }
            Self::Pieces { failed, pieces, region, offset } => write!(
                f,
                "{failed} of {pieces} pieces are not what they were when it was closed (the first: region {region} at \
                 {offset:#x})"
            ),
            Self::Checksums => {
                f.write_str("the checksums in it are not those that were there when it was closed")
            }
            Self::NoHeader => f.write_str(
                "it holds data, and no header that says how it was left (formats before 4 had none)",
            ),
            Self::Length { found, expected } => write!(f, "it has {found} bytes and had {expected}"),
            Self::Older { found: 0, expected } => {
                write!(f, "it is empty, and the pool has been opened {expected} times")
            }
            Self::Older { found, expected } => {
                write!(f, "it is a copy of opening {found}, the pool's last was {expected}")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(sequence: u64) -> Header {
        Header {
            state: State::Clean,
            sequence,
            opening: 3,
            boot: BootId(7 << 64 | 9),
            file: (5, 6),
            total: 4 << 20,
            piece_bytes: 65536,
            pieces: 40,
            sums: 77,
        }
    }

    #[test]
    fn every_bit_of_a_slot_counts() {
        let bytes = header(1).encode();
        assert_eq!(Header::decode(&bytes), Some(header(1)));
        for bit in 0..bytes.len() * 8 {
            let mut other = bytes;
            other[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Header::decode(&other), None, "bit {bit}");
        }
    }

    #[test]
    fn the_last_slot_that_is_whole_counts() {
        let (old, new) = (Some(header(4)), Some(header(5)));
        assert_eq!(Header::choose([old, new]), Some((1, header(5))));
        assert_eq!(Header::choose([new, old]), Some((0, header(5))));
        assert_eq!(Header::choose([old, None]), Some((0, header(4))));
        assert_eq!(Header::choose([None, None]), None);
    }

    #[test]
    fn boots_are_named_as_the_system_names_them() {
        let said = "0f2b3c4d-0000-4000-8000-00000000002a\n".parse();
        assert_eq!(said, Ok(BootId(0x0f2b_3c4d_0000_4000_8000_0000_0000_002a)));
        assert!("".parse::<BootId>().is_err());
    }
}
