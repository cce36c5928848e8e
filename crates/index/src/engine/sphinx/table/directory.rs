//! What a compute server knows of a table's subtables: where to look for a hash. A hint, that may be behind but never leads astray.
//!
//! For each depth there is an array of words, as long as there are suffixes of that many bits; a word says where the subtable is that
//! had this depth and suffix. The deepest that is known for a hash comes first. Since a subtable stays where it is for as long as
//! its index lives, and keeps its lower half when it is split, what was once noted stays true: a hash that is not there any more
//! has moved to a subtable that leads from there (its children). Threads read and write the words without a lock.

use super::MAX_DEPTH;
use super::layout::low_bits;
use farwood_fabric::GlobalAddr;
use std::fmt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

const LEVELS: usize = MAX_DEPTH as usize + 1;

pub(super) struct Directory {
    levels: [OnceLock<Box<[AtomicU64]>>; LEVELS],
    deepest: AtomicU8,
}

impl Directory {
    pub(super) fn new(root: GlobalAddr) -> Self {
        let directory = Self { levels: [const { OnceLock::new() }; LEVELS], deepest: AtomicU8::new(0) };
        directory.note(0, 0, root);
        directory
    }

    /// Notes that the subtable at `addr` has, or had, this depth and suffix.
    pub(super) fn note(&self, depth: u8, suffix: u64, addr: GlobalAddr) {
        let words = self.levels[usize::from(depth)]
            .get_or_init(|| (0..=low_bits(depth)).map(|_| AtomicU64::new(0)).collect());
        words[place(suffix, depth)].store(addr.to_raw(), Ordering::Release);
        self.deepest.fetch_max(depth, Ordering::Release);
    }

    /// Where to look for a hash.
    pub(super) fn find(&self, hash: u64) -> GlobalAddr {
        let deepest = self.deepest.load(Ordering::Acquire);
        for depth in (0..=deepest).rev() {
            let Some(words) = self.levels[usize::from(depth)].get() else { continue };
            let raw = words[place(hash, depth)].load(Ordering::Acquire);
            if raw != 0 {
                return GlobalAddr::from_raw(raw);
            }
        }
        // Depth 0 has a word from the start.
        GlobalAddr::NULL
    }

    pub(super) fn root(&self) -> GlobalAddr {
        self.levels[0]
            .get()
            .map_or(GlobalAddr::NULL, |words| GlobalAddr::from_raw(words[0].load(Ordering::Acquire)))
    }

    /// What it takes up.
    pub(super) fn bytes(&self) -> u64 {
        self.levels.iter().filter_map(OnceLock::get).map(|words| 8 * words.len() as u64).sum()
    }
}

fn place(hash: u64, depth: u8) -> usize {
    usize::try_from(hash & low_bits(depth)).unwrap_or(0)
}

impl fmt::Debug for Directory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Directory({} bytes, {} deep)", self.bytes(), self.deepest.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farwood_fabric::{RegionId, ServerId};

    fn at(offset: u64) -> GlobalAddr {
        GlobalAddr::new(ServerId::new(2), RegionId::MAIN, offset)
    }

    #[test]
    fn the_deepest_subtable_that_is_known_comes_first() {
        let directory = Directory::new(at(64));
        assert_eq!((directory.find(0b1011), directory.root(), directory.bytes()), (at(64), at(64), 8));
        directory.note(1, 0b1, at(128));
        assert_eq!((directory.find(0b1011), directory.find(0b1010)), (at(128), at(64)));
        // A subtable further down, of which the levels between were never heard.
        directory.note(3, 0b011, at(192));
        assert_eq!(
            (directory.find(0b1011), directory.find(0b1111), directory.find(0b110)),
            (at(192), at(128), at(64))
        );
        assert_eq!(directory.bytes(), 8 * (1 + 2 + 8));
        assert_eq!(directory.root(), at(64));
    }
}
