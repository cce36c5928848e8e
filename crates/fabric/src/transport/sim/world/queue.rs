//! The events to come, in the order of their time, and of their making where times are equal.
//!
//! Nearly all events lie a few microseconds ahead. Those go into a wheel with a slot for every nanosecond of the next
//! [`SLOTS`], each a list in the order of making; two levels of bits find the next slot in use. The few that lie farther ahead
//! wait in a heap until the wheel has turned to them. A heap of all events costs several times as much.
//!
//! Invariant: the wheel holds exactly the events with `base <= at < base + SLOTS`, the heap all later ones. An event enters its
//! slot from the heap at the moment when the slot comes within reach, so before any event made later can be put there.

use crate::clock::Nanos;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// How many nanoseconds the wheel reaches ahead.
const SLOTS: usize = 8192;
const WORDS: usize = SLOTS / 64;
const NONE: u32 = u32::MAX;
const _: () = assert!(WORDS % 64 == 0 && WORDS <= 128);

struct Node<T> {
    at: Nanos,
    next: u32,
    what: T,
}

/// A queue of events.
pub(super) struct Queue<T> {
    /// The time of the event that came last.
    base: Nanos,
    /// First and last of each slot's list.
    slots: Vec<(u32, u32)>,
    used: [u64; WORDS],
    /// Which words of `used` are not zero.
    summary: [u64; WORDS / 64],
    nodes: Vec<Node<T>>,
    free: u32,
    far: BinaryHeap<Reverse<(Nanos, u64, u32)>>,
    made: u64,
}

impl<T: Copy> Queue<T> {
    pub(super) fn new() -> Self {
        Self {
            base: 0,
            slots: vec![(NONE, NONE); SLOTS],
            used: [0; WORDS],
            summary: [0; WORDS / 64],
            nodes: Vec::new(),
            free: NONE,
            far: BinaryHeap::new(),
            made: 0,
        }
    }

    /// Adds an event; one whose time has passed comes next.
    #[inline]
    pub(super) fn push(&mut self, at: Nanos, what: T) {
        let at = at.max(self.base);
        let node = Node { at, next: NONE, what };
        let n = if self.free == NONE {
            self.nodes.push(node);
            u32::try_from(self.nodes.len() - 1).expect("fewer events than that at a time")
        } else {
            let n = self.free;
            let place = &mut self.nodes[n as usize];
            self.free = place.next;
            *place = node;
            n
        };
        if at - self.base < SLOTS as u64 {
            self.enter(at, n);
        } else {
            self.made += 1;
            self.far.push(Reverse((at, self.made, n)));
        }
    }

    #[inline]
    fn slot(at: Nanos) -> usize {
        usize::try_from(at % SLOTS as u64).unwrap_or(0)
    }

    fn enter(&mut self, at: Nanos, n: u32) {
        let slot = Self::slot(at);
        let (first, last) = self.slots[slot];
        if first == NONE {
            self.slots[slot] = (n, n);
            self.used[slot / 64] |= 1 << (slot % 64);
            self.summary[slot / 4096] |= 1 << (slot / 64 % 64);
        } else {
            self.nodes[last as usize].next = n;
            self.slots[slot].1 = n;
        }
    }

    /// The first slot in use, counted from `base` around.
    #[inline]
    fn first(&self) -> Option<usize> {
        let from = Self::slot(self.base);
        let word = from / 64;
        let ahead = self.used[word] & (!0 << (from % 64));
        if ahead != 0 {
            return Some(word * 64 + ahead.trailing_zeros() as usize);
        }
        // Then the words behind it, all the way around to its lower bits.
        let later = |word: usize| {
            let (mut level, mut bits) = (word / 64, !0u64 << (word % 64));
            while level < self.summary.len() {
                let found = self.summary[level] & bits;
                if found != 0 {
                    return Some(level * 64 + found.trailing_zeros() as usize);
                }
                (level, bits) = (level + 1, !0);
            }
            None
        };
        let found = (word + 1 < WORDS).then(|| later(word + 1)).flatten().or_else(|| later(0))?;
        Some(found * 64 + self.used[found].trailing_zeros() as usize)
    }

    /// Takes the next event, unless it is due after `until`.
    #[inline]
    pub(super) fn pop(&mut self, until: Nanos) -> Option<(Nanos, T)> {
        let slot = if let Some(slot) = self.first() {
            slot
        } else {
            let at = self.far.peek().map(|Reverse((at, ..))| *at)?;
            if at > until {
                return None;
            }
            self.base = at;
            self.pull();
            Self::slot(at)
        };
        let n = self.slots[slot].0;
        let node = &mut self.nodes[n as usize];
        let (at, next, what) = (node.at, node.next, node.what);
        if at > until {
            return None;
        }
        node.next = self.free;
        self.free = n;
        self.slots[slot].0 = next;
        if next == NONE {
            self.used[slot / 64] &= !(1 << (slot % 64));
            if self.used[slot / 64] == 0 {
                self.summary[slot / 4096] &= !(1 << (slot / 64 % 64));
            }
        }
        self.base = at;
        if !self.far.is_empty() {
            self.pull();
        }
        Some((at, what))
    }

    /// Brings in what has come within reach.
    fn pull(&mut self) {
        while let Some(Reverse((at, _, n))) = self.far.peek().copied() {
            if at - self.base >= SLOTS as u64 {
                return;
            }
            self.far.pop();
            self.enter(at, n);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Pushes and pops in any mixture come out as from a sorted list.
        #[test]
        fn events_come_in_order(
            steps in proptest::collection::vec((0u8..3, prop_oneof![0u64..4, 0u64..9000, 0u64..70_000]), 1..400)
        ) {
            let mut queue = Queue::new();
            let mut model: Vec<(u64, usize)> = Vec::new();
            let mut now = 0;
            for (n, (what, ahead)) in steps.into_iter().enumerate() {
                if what < 2 {
                    queue.push(now + ahead, n);
                    model.push((now + ahead, n));
                } else {
                    model.sort_unstable();
                    let until = now + ahead;
                    let due = model.first().is_some_and(|(at, _)| *at <= until);
                    let expected = due.then(|| model.remove(0));
                    prop_assert_eq!(queue.pop(until), expected);
                    now = expected.map_or(now, |(at, _)| at);
                }
            }
            model.sort_unstable();
            for expected in model {
                prop_assert_eq!(queue.pop(u64::MAX), Some(expected));
            }
            prop_assert_eq!(queue.pop(u64::MAX), None);
        }
    }
}
