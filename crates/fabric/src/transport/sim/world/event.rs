//! What happens in a world, and how it waits in the queue.
//!
//! Events are made and moved several times for every verb, so they wait as two words: which flight, and what. The few that need more
//! than that leave it in a slab, and wait as its key.

use super::calls::{Arriving, Replying};
use crate::exec::GroupId;
use crate::transport::ReplySlot;
use std::sync::Arc;

/// A flight by its key and serial: keys are used again, and a flight that is delayed gets a new serial, which voids the
/// events it had.
#[derive(Clone, Copy, Debug)]
pub(super) struct Flying {
    pub(super) key: u32,
    pub(super) serial: u32,
}

/// An event that does not happen for every verb.
#[derive(Debug)]
pub(super) enum Rare {
    Arrive(Box<Arriving>),
    Reply(Box<Replying>),
    LoseServer { server: usize },
    RestartServer { server: usize },
    Resume { group: GroupId },
    Reconnected { connection: usize, fails: bool, slot: Arc<ReplySlot> },
}

/// What happens, without its numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(super) enum What {
    /// In cost mode: the client's NIC sends the verbs up to the next fence.
    Send,
    Start,
    Piece,
    End,
    Complete,
    TimeOut,
    Rare,
}

/// An event as it waits. Whole words, so that moving one never has to wait for its parts to be put together.
#[derive(Clone, Copy, Debug)]
pub(in crate::transport::sim) struct Event {
    /// The flight's key and serial, or the key of a rare event.
    whose: u64,
    /// What, which verb, which piece: a byte each.
    what: u64,
}

impl Event {
    /// Something happens to a flight.
    #[inline]
    pub(super) fn new(what: What, flying: Flying) -> Self {
        Self { whose: u64::from(flying.key) | u64::from(flying.serial) << 32, what: what as u64 }
    }

    /// A piece of a verb takes effect.
    pub(super) fn piece(flying: Flying, verb: u8, piece: u8) -> Self {
        let Self { whose, what } = Self::new(What::Piece, flying);
        Self { whose, what: what | u64::from(verb) << 8 | u64::from(piece) << 16 }
    }

    /// Something rare happens.
    pub(super) fn rare(key: usize) -> Self {
        Self { whose: key as u64, what: What::Rare as u64 }
    }

    #[inline]
    pub(super) fn what(self) -> What {
        const ALL: [What; 8] = [
            What::Send,
            What::Start,
            What::Piece,
            What::End,
            What::Complete,
            What::TimeOut,
            What::Rare,
            What::Rare,
        ];
        ALL[usize::from(self.what.to_le_bytes()[0] & 7)]
    }

    #[inline]
    pub(super) fn flying(self) -> Flying {
        let half = |bits: u64| u32::try_from(bits & u64::from(u32::MAX)).unwrap_or(0);
        Flying { key: half(self.whose), serial: half(self.whose >> 32) }
    }

    /// Which verb of its flight, which piece of it.
    pub(super) fn part(self) -> (usize, u8) {
        let [_, verb, piece, ..] = self.what.to_le_bytes();
        (usize::from(verb), piece)
    }

    /// The key of a rare event.
    pub(super) fn key(self) -> usize {
        usize::try_from(self.whose).unwrap_or(usize::MAX)
    }
}
