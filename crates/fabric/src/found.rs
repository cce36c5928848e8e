//! How a server found its memory, which decides what it may believe of it.
//!
//! Whoever opens the memory knows (`transport::serve`): a killed process loses nothing that it stored, a power cut may lose any page.
//! The server's logic is told through [`ServerMemory::found`](crate::server::ServerMemory::found).

use crate::addr::RegionId;

/// How a server found its memory.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub enum Found {
    /// Empty, or as the last server left it on a machine that has been up ever since.
    #[default]
    SameBoot,
    /// Whole, but the machine was started again: no process is left that knew it.
    OtherBoot,
    /// Not whole, and to be used all the same.
    Torn(Damage),
}

/// What is known of memory that is not whole.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Damage {
    /// Into how many pieces the memory is divided by its checksums; 0: there are none, so that any page may be of any age.
    pub pieces: u64,
    /// Those whose checksums fail.
    pub failed: Vec<Piece>,
}

impl Damage {
    /// Whether these bytes may be other than they were.
    pub fn touches(&self, region: RegionId, offset: u64, bytes: u64) -> bool {
        let overlaps = |piece: &Piece| {
            piece.region == region && piece.offset < offset + bytes && offset < piece.offset + piece.bytes
        };
        self.pieces == 0 || self.failed.iter().any(overlaps)
    }
}

/// A part of the memory that has a checksum of its own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// Where.
    pub region: RegionId,
    /// Where it begins there.
    pub offset: u64,
    /// How long it is.
    pub bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_checksums_nothing_is_trusted() {
        let piece = Piece { region: RegionId::MAIN, offset: 64, bytes: 64 };
        let known = Damage { pieces: 9, failed: vec![piece] };
        let touched = [(0, 64), (0, 65), (127, 1), (128, 1)]
            .map(|(at, bytes)| known.touches(RegionId::MAIN, at, bytes));
        assert_eq!(touched, [false, true, true, false]);
        assert!(!known.touches(RegionId::META, 64, 64));
        assert!(Damage::default().touches(RegionId::META, 0, 1));
    }
}
