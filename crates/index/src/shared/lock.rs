//! The remote lock word: who holds it, and which acquisition this is.
//!
//! ```text
//! 63         48 47                       16 15          0
//! [ owner 16 ] [ acquisition sequence 32 ] [ flags 16 ]      owner 0: free
//! ```
//!
//! 1. Acquire: CAS from a free word to {me, sequence + 1}. A CAS that fails changes nothing and brings the word as it is.
//! 2. Release: WRITE {nobody, the same sequence}. Only the owner WRITEs the word, and the word is nobody else's, so a plain
//!    WRITE is enough and goes in one batch behind the data it protects (contract, rule 3).
//!
//! The sequence makes every acquisition a word of its own: after a lost completion the owner can tell whether the CAS
//! happened, and whoever cleans up after a dead owner can tell which acquisition its intent belongs to.
//! A lock is taken from a dead owner only after the owner is fenced; that is recovery's work, not this file's.

use farwood_fabric::SessionId;
use farwood_fabric::clock::Nanos;

/// A lock word, taken apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LockWord {
    /// Who holds it.
    pub owner: SessionId,
    /// How often it was taken; wraps.
    pub sequence: u32,
    /// Which of the owner's tasks, or whatever else the engine keeps beside.
    pub flags: u16,
}

impl LockWord {
    /// From the 64 bits.
    pub fn from_raw(raw: u64) -> Self {
        let bytes = raw.to_le_bytes();
        Self {
            owner: SessionId::new(u16::from_le_bytes([bytes[6], bytes[7]])),
            sequence: u32::from_le_bytes([bytes[2], bytes[3], bytes[4], bytes[5]]),
            flags: u16::from_le_bytes([bytes[0], bytes[1]]),
        }
    }

    /// The 64 bits.
    pub fn to_raw(self) -> u64 {
        u64::from(self.owner.get()) << 48 | u64::from(self.sequence) << 16 | u64::from(self.flags)
    }

    /// Whether nobody holds it.
    pub fn is_free(self) -> bool {
        self.owner.is_none()
    }

    /// The word by which a task of `owner` takes this lock. Two tasks of one session must use different flags: else neither
    /// could tell, after a lost completion, which of them the word means.
    #[must_use]
    pub fn taken_by(self, owner: SessionId, flags: u16) -> Self {
        Self { owner, sequence: self.sequence.wrapping_add(1), flags }
    }

    /// The word that frees this lock.
    #[must_use]
    pub fn released(self) -> Self {
        Self { owner: SessionId::NONE, flags: 0, ..self }
    }
}

/// How long the same word has been in the way.
#[derive(Default, Debug)]
pub(crate) struct Patience {
    seen: Option<(u64, Nanos)>,
}

impl Patience {
    /// One more look; whether it is time to suspect the owner.
    pub(crate) fn is_over(&mut self, word: u64, now: Nanos, limit: Nanos) -> bool {
        match self.seen {
            Some((before, since)) if before == word => {
                if limit > 0 && now.saturating_sub(since) >= limit {
                    self.seen = None;
                    return true;
                }
            }
            _ => self.seen = Some((word, now)),
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_word_has_the_layout_of_the_architecture() {
        let word = LockWord { owner: SessionId::new(0xabcd), sequence: 0x1234_5678, flags: 0x9f01 };
        assert_eq!(word.to_raw(), 0xabcd_1234_5678_9f01);
        assert_eq!(LockWord::from_raw(word.to_raw()), word);
    }

    #[test]
    fn every_acquisition_is_a_word_of_its_own() {
        let free = LockWord::from_raw(0);
        assert!(free.is_free());
        let first = free.taken_by(SessionId::new(3), 7);
        let again = first.released().taken_by(SessionId::new(3), 7);
        assert!(!first.is_free() && first.released().is_free());
        assert_ne!(first, again);
        let wrapped = LockWord { owner: SessionId::NONE, sequence: u32::MAX, flags: 0 };
        assert_eq!(wrapped.taken_by(SessionId::new(1), 0).sequence, 0);
    }
}
