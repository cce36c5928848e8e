//! Which epochs an endpoint's operations hold: what a session publishes with its heartbeat.
//!
//! An operation pins the epoch that its session knew when it began. The oldest one stands in a word that the session's
//! heartbeat reads, possibly from another thread. Why a pin that is just being set cannot be missed: the pin is stored
//! before the operation's first verb, both sequentially consistent, so a heartbeat that does not see it reads before that
//! verb; and what the operation can then reach was not yet unlinked at that time.

use crate::addr::ServerId;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// No operation is in flight.
pub(crate) const IDLE: u64 = u64::MAX;

/// The oldest epoch that one endpoint holds, or [`IDLE`].
#[derive(Debug)]
pub(crate) struct PinSlot {
    oldest: AtomicU64,
}

impl PinSlot {
    pub(crate) fn new() -> Self {
        Self { oldest: AtomicU64::new(IDLE) }
    }

    pub(crate) fn oldest(&self) -> u64 {
        self.oldest.load(Ordering::SeqCst)
    }
}

/// The pins of one endpoint.
#[derive(Debug)]
pub(crate) struct Pins {
    /// Absent for endpoints that pin nothing.
    slot: Option<Arc<PinSlot>>,
    held: RefCell<Held>,
}

#[derive(Default, Debug)]
struct Held {
    /// Epoch and number of operations, oldest first.
    running: VecDeque<(u64, u32)>,
    /// Epochs of verbs with an unknown outcome, by server, until the connection is fenced.
    unknown: Vec<Unknown>,
    published: u64,
}

/// A verb that may still land.
#[derive(Debug)]
struct Unknown {
    server: ServerId,
    epoch: u64,
    /// Its place among all verbs of the endpoint that were given up.
    number: u64,
}

impl Pins {
    pub(crate) fn new(slot: Arc<PinSlot>) -> Self {
        let held = Held { published: IDLE, ..Held::default() };
        Self { slot: Some(slot), held: RefCell::new(held) }
    }

    pub(crate) fn none() -> Self {
        Self { slot: None, held: RefCell::default() }
    }

    #[inline]
    pub(crate) fn pin(&self, epoch: u64) {
        if self.slot.is_none() {
            return;
        }
        let mut held = self.held.borrow_mut();
        // Epochs only grow, except that an orphan pins the epoch of its operation once more.
        match held.running.iter().rposition(|(at, _)| *at <= epoch) {
            Some(n) if held.running[n].0 == epoch => held.running[n].1 += 1,
            Some(n) => held.running.insert(n + 1, (epoch, 1)),
            None => held.running.push_front((epoch, 1)),
        }
        self.publish(&mut held);
    }

    #[inline]
    pub(crate) fn unpin(&self, epoch: u64) {
        if self.slot.is_none() {
            return;
        }
        let mut held = self.held.borrow_mut();
        if let Some(n) = held.running.iter().position(|(at, _)| *at == epoch) {
            held.running[n].1 -= 1;
            if held.running[n].1 == 0 {
                held.running.remove(n);
            }
        }
        self.publish(&mut held);
    }

    /// Keeps `epoch` pinned until the connection to `server` is fenced.
    pub(crate) fn hold_unknown(&self, server: ServerId, epoch: u64, number: u64) {
        let mut held = self.held.borrow_mut();
        held.unknown.push(Unknown { server, epoch, number });
        self.publish(&mut held);
    }

    /// Whether a verb of a number below `below` may still land on `server`.
    pub(crate) fn is_unknown(&self, server: ServerId, below: u64) -> bool {
        self.held.borrow().unknown.iter().any(|one| one.server == server && one.number < below)
    }

    /// The connection to `server` was fenced.
    pub(crate) fn clear_unknown(&self, server: ServerId) {
        let mut held = self.held.borrow_mut();
        held.unknown.retain(|one| one.server != server);
        self.publish(&mut held);
    }

    /// The endpoint goes away with nothing in flight; what is unknown stays held.
    pub(crate) fn retire(&self) {
        let mut held = self.held.borrow_mut();
        held.running.clear();
        self.publish(&mut held);
    }

    fn publish(&self, held: &mut Held) {
        let running = held.running.front().map_or(IDLE, |(epoch, _)| *epoch);
        let oldest = held.unknown.iter().map(|one| one.epoch).min().unwrap_or(IDLE).min(running);
        if oldest != held.published {
            held.published = oldest;
            if let Some(slot) = &self.slot {
                slot.oldest.store(oldest, Ordering::SeqCst);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_pin_is_published() {
        let slot = Arc::new(PinSlot::new());
        let pins = Pins::new(Arc::clone(&slot));
        assert_eq!(slot.oldest(), IDLE);
        pins.pin(3);
        pins.pin(3);
        pins.pin(5);
        pins.unpin(3);
        assert_eq!(slot.oldest(), 3, "one of two is left");
        pins.unpin(3);
        assert_eq!(slot.oldest(), 5);
        pins.pin(4);
        assert_eq!(slot.oldest(), 4, "an orphan may pin an older epoch again");
        pins.unpin(4);
        pins.unpin(5);
        assert_eq!(slot.oldest(), IDLE);
    }

    #[test]
    fn an_unknown_verb_holds_its_epoch_until_the_fence() {
        let slot = Arc::new(PinSlot::new());
        let pins = Pins::new(Arc::clone(&slot));
        let (a, b) = (ServerId::new(0), ServerId::new(1));
        pins.pin(7);
        pins.hold_unknown(a, 7, 3);
        pins.unpin(7);
        pins.pin(9);
        assert_eq!(slot.oldest(), 7);
        assert!(pins.is_unknown(a, 4) && !pins.is_unknown(a, 3) && !pins.is_unknown(b, 4));
        pins.clear_unknown(b);
        assert_eq!(slot.oldest(), 7, "another server's fence changes nothing");
        pins.clear_unknown(a);
        assert_eq!(slot.oldest(), 9);
    }
}
