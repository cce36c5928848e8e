//! Why every request may be repeated to the next server process: its answer may have gone with the last one.
//!
//! Within one life of a server process the call table answers a repeat. The next process knows what is in META alone, and takes a
//! repeat for a new call. So each request either finds in META that it was carried out, or does no harm when it is carried out again:
//!
//! | request | why a repeat is harmless |
//! |---|---|
//! | `Hello`, `ListSessions`, `ListChunks`, `ListIndexes`, `OpenIndex` | changes nothing |
//! | `OpenSession` | opens a second session; nobody speaks for the first, whose lease runs out |
//! | `AttachSession` | the slot has the term: it is told the same again |
//! | `CloseSession` | a session that is gone is closed: callers take `NoSuchSession` for done |
//! | `Heartbeat` | renews a lease; pins and flushes only grow |
//! | `RequestFlush` | begins another flush, which costs its sessions their hints once more |
//! | `BeginFence`, `Evict`, `Fence`, `CompleteFence` | the state says that the step was taken, and the term whose it was |
//! | `BeginAdopt` | the state names the adopter; it is told the victim's term and the seal again |
//! | `AdoptChunks` | what is nobody's already is not listed again; callers need no list |
//! | `FinishAdopt` | the number is free and its last term is the victim's: done |
//! | `AllocChunks` | the extent bears the tag of the call that was given it: the same is answered |
//! | `FreeChunks` | **not repeated**: the chunk may have been handed out again. The client is told that it does not know |
//! | `DrainChunks` | marks are there already; a chunk that is marked again waits for a flush that is asked for after both |
//! | `TakeOffline`, `BringOnline` | the entry has the term of who repairs; without it, it is in use: done |
//! | `FreeExtent` | freed already |
//! | `ReleaseIndex` | releases what is left, of nothing |
//! | `CreateIndex` | the entry that is being made bears the tag of the call that made it: the same is answered |
//! | `IndexReady` | ready already |
//! | `BeginDrop` | the entry has the generation to wait for; once it is gone, there is no such index. Whoever drops by a name means what has it |
//! | `FinishDrop` | an id that was given out and is not in the catalog was dropped: done |
//! | procedures | **not repeated**: the client knows to which life of the server it sent the call ([`Identity::life`]), and sends it to no other |
//!
//! [`Identity::life`]: farwood_fabric::region::Identity::life

use farwood_fabric::call::CallId;

/// Bits of a tag: those that a chunk's entry has room for.
const BITS: u32 = 48;

/// Names a call where META has little room. Never 0; two calls have the same tag with a chance of 2^-47, and only those of one session, for
/// the same thing, are ever compared. The lowest bit belongs to whoever stores it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct CallTag(u64);

impl CallTag {
    pub(crate) fn of(id: CallId) -> Self {
        let CallId { term, endpoint, sequence, .. } = id;
        // The finalizer of splitmix64, which changes half of the bits for each that goes in.
        let mix = |word: u64| {
            let word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
            word ^ word >> 31
        };
        let words = [term, endpoint, sequence];
        let hash = words
            .iter()
            .fold(0, |hash: u64, word| mix(hash.wrapping_add(0x9e37_79b9_7f4a_7c15) ^ mix(*word)));
        let tag = hash >> (64 - BITS) & !1;
        Self(if tag == 0 { 2 } else { tag })
    }

    /// The tag with a bit beside it.
    pub(crate) fn with(self, bit: bool) -> u64 {
        self.0 | u64::from(bit)
    }

    /// The bit beside the tag, if what was stored has this one.
    pub(crate) fn matches(self, stored: u64) -> Option<bool> {
        (stored & !1 == self.0).then_some(stored & 1 == 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farwood_fabric::addr::SessionId;
    use std::collections::BTreeSet;

    #[test]
    fn tags_fit_differ_and_carry_a_bit() {
        let mut seen = BTreeSet::new();
        for term in 1..20 {
            for endpoint in [0, 1, 2, 1 << 63, u64::MAX] {
                for sequence in 0..20 {
                    let tag = CallTag::of(CallId { session: SessionId::new(1), term, endpoint, sequence });
                    assert!(tag.with(true) < 1 << BITS && tag.with(false) != 0);
                    assert_eq!(
                        [tag.matches(tag.with(true)), tag.matches(tag.with(false))],
                        [Some(true), Some(false)]
                    );
                    assert!(tag.matches(0).is_none() && seen.insert(tag.with(false)));
                }
            }
        }
    }
}
