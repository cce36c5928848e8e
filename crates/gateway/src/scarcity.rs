//! What is done when a store is full: keys that have expired go first, then the command is tried once more.
//!
//! 1. A command finds that no memory is left. It asks the sweep (`shard::sweep`) to hurry, and waits until that has removed a key, or has been through all
//!    keys since and found none, or [`PATIENCE_NS`] are over.
//! 2. If keys were removed, the command is tried again.
//! 3. A pass that finds nothing to remove says until when there is nothing: until the first deadline that it met. Until then commands do not wait.

use crate::envelope::Millis;
use farwood_fabric::clock::{Nanos, SECOND};
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

/// How long a command waits for room.
pub(crate) const PATIENCE_NS: Nanos = 2 * SECOND;
/// So many commands wait at a time; others are told at once that the store is full.
const MAX_WAITING: u64 = 8;
/// What a pass has found counts for so long, since others may store what expires sooner.
const FRUITLESS_MS: Millis = 2_000;

/// Whether room is wanted, and what the sweep does about it.
#[derive(Default, Debug)]
pub(crate) struct Scarcity {
    /// Commands that wait for room.
    waiting: AtomicU64,
    /// Passes of the sweep that were begun, and that came to their end.
    begun: AtomicU64,
    ended: AtomicU64,
    removed: AtomicU64,
    /// Until then there is nothing to remove.
    fruitless_until: AtomicI64,
}

/// A command that waits for room.
#[derive(Debug)]
pub(crate) struct Waiting<'a> {
    scarcity: &'a Scarcity,
    removed: u64,
    /// When this pass has ended, all keys were looked at since.
    pass: u64,
}

/// What has become of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Room {
    /// Something was removed.
    Made,
    /// There is nothing to remove.
    None,
    /// Neither is known yet.
    Unknown,
}

impl Scarcity {
    /// Asks for room, unless it is known that there is nothing to remove.
    pub(crate) fn want(&self, now: Millis) -> Option<Waiting<'_>> {
        if now < self.fruitless_until.load(Ordering::SeqCst) {
            return None;
        }
        if self.waiting.fetch_add(1, Ordering::SeqCst) >= MAX_WAITING {
            self.waiting.fetch_sub(1, Ordering::SeqCst);
            return None;
        }
        let removed = self.removed.load(Ordering::SeqCst);
        Some(Waiting { scarcity: self, removed, pass: self.begun.load(Ordering::SeqCst) + 1 })
    }

    /// Whether somebody waits for room.
    pub(crate) fn is_pressing(&self) -> bool {
        self.waiting.load(Ordering::SeqCst) > 0
    }

    /// A pass begins; its number.
    pub(crate) fn begin_pass(&self) -> u64 {
        self.begun.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// Keys were removed.
    pub(crate) fn removed(&self, keys: u64) {
        self.removed.fetch_add(keys, Ordering::SeqCst);
    }

    /// A pass that began at a time has ended. If it `removed` nothing, and the first deadline that it met is this, there is nothing to
    /// remove before that.
    pub(crate) fn end_pass(&self, pass: u64, began: Millis, removed: u64, first_deadline: Option<Millis>) {
        if removed == 0 {
            let until = first_deadline.unwrap_or(Millis::MAX).min(began.saturating_add(FRUITLESS_MS));
            self.fruitless_until.store(until, Ordering::SeqCst);
        }
        self.ended.fetch_max(pass, Ordering::SeqCst);
    }
}

impl Waiting<'_> {
    pub(crate) fn look(&self) -> Room {
        if self.scarcity.removed.load(Ordering::SeqCst) > self.removed {
            Room::Made
        } else if self.scarcity.ended.load(Ordering::SeqCst) >= self.pass {
            Room::None
        } else {
            Room::Unknown
        }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.scarcity.waiting.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_whole_pass_has_to_find_nothing() {
        let scarcity = Scarcity::default();
        let before = scarcity.begin_pass();
        let waiting = scarcity.want(0).expect("nothing is known");
        assert!(scarcity.is_pressing());
        scarcity.end_pass(before, 0, 0, None);
        assert_eq!(waiting.look(), Room::Unknown, "it may have been where nothing had expired yet");
        assert!(scarcity.want(1).is_none(), "for those who come now it was the whole of it");
        let pass = scarcity.begin_pass();
        scarcity.end_pass(pass, 0, 0, None);
        assert_eq!(waiting.look(), Room::None);
        drop(waiting);
        assert!(!scarcity.is_pressing());
    }

    #[test]
    fn few_wait_at_a_time() {
        let scarcity = Scarcity::default();
        let mut waiting: Vec<_> = (0..20).filter_map(|_| scarcity.want(0)).collect();
        assert_eq!(waiting.len() as u64, MAX_WAITING);
        waiting.pop();
        assert!(scarcity.want(0).is_some());
        waiting.clear();
        assert!(!scarcity.is_pressing());
    }

    #[test]
    fn what_is_removed_makes_room_and_deadlines_are_waited_for() {
        let scarcity = Scarcity::default();
        let waiting = scarcity.want(0).expect("nothing is known");
        scarcity.removed(1);
        assert_eq!(waiting.look(), Room::Made);
        let pass = scarcity.begin_pass();
        scarcity.end_pass(pass, 1_000, 0, Some(1_500));
        assert!(scarcity.want(1_499).is_none() && scarcity.want(1_500).is_some());
        let pass = scarcity.begin_pass();
        scarcity.end_pass(pass, 2_000, 0, Some(1_000_000));
        assert!(
            scarcity.want(3_999).is_none() && scarcity.want(4_000).is_some(),
            "others may have stored since"
        );
    }
}
