//! How many commands are under way on a thread: each may have a longest value in its hands, which nobody has counted yet (`budget`). So
//! there are no more than `--client-memory` has room for once more.
//!
//! 1. A connection takes a slot for each command that it starts, in their order. Commands under way never wait for one that has not begun, so
//!    slots always come back.
//! 2. Commands that are expected to bring much have slots of their own, a quarter as many: others do not wait for them.
//! 3. Whoever waits gets a slot in its turn: one that comes back goes to who has waited longest.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::task::{Poll, Waker};

/// The longest value, about.
const VALUE_BYTES: u64 = 1 << 20;
/// There are at least so many, however little memory there is.
const LEAST: usize = 32;
/// One in so many is for commands that bring much.
const HEAVY_SHARE: usize = 4;

/// Slots for the commands of one thread.
#[derive(Debug)]
pub(crate) struct Slots {
    light: Rc<Kind>,
    heavy: Rc<Kind>,
}

/// Slots for one kind of commands.
#[derive(Debug)]
struct Kind {
    all: usize,
    free: Cell<usize>,
    waiting: RefCell<VecDeque<Rc<Waiting>>>,
}

#[derive(Default, Debug)]
struct Waiting {
    waker: RefCell<Option<Waker>>,
    slot: RefCell<Option<Slot>>,
}

/// The right to be under way; it goes back when it is dropped.
#[derive(Debug)]
pub(crate) struct Slot {
    kind: Rc<Kind>,
}

impl Kind {
    fn new(all: usize) -> Rc<Self> {
        Rc::new(Self { all, free: Cell::new(all), waiting: RefCell::default() })
    }
}

impl Slots {
    /// Those of one of so many threads.
    pub(super) fn new(memory_bytes: u64, threads: usize) -> Self {
        let fitting = usize::try_from(memory_bytes / VALUE_BYTES).unwrap_or(usize::MAX) / threads.max(1);
        let light = fitting.max(LEAST);
        Self { light: Kind::new(light), heavy: Kind::new(light / HEAVY_SHARE) }
    }

    fn kind(&self, is_heavy: bool) -> &Rc<Kind> {
        if is_heavy { &self.heavy } else { &self.light }
    }

    /// A slot, if one is free.
    #[inline]
    pub(super) fn try_take(&self, is_heavy: bool) -> Option<Slot> {
        let kind = self.kind(is_heavy);
        let left = kind.free.get().checked_sub(1)?;
        kind.free.set(left);
        Some(Slot { kind: Rc::clone(kind) })
    }

    /// A slot, for somebody who has none.
    pub(super) async fn take(&self, is_heavy: bool) -> Slot {
        if let Some(slot) = self.try_take(is_heavy) {
            return slot;
        }
        let waiting = Rc::<Waiting>::default();
        self.kind(is_heavy).waiting.borrow_mut().push_back(Rc::clone(&waiting));
        std::future::poll_fn(|context| {
            if let Some(slot) = waiting.slot.take() {
                return Poll::Ready(slot);
            }
            waiting.waker.replace(Some(context.waker().clone()));
            Poll::Pending
        })
        .await
    }

    /// Whether more than half of those for commands that bring much are taken: each of these takes fewer values at a time then.
    pub(crate) fn are_scarce(&self) -> bool {
        self.heavy.free.get() * 2 < self.heavy.all
    }
}

impl Drop for Slot {
    #[inline]
    fn drop(&mut self) {
        let next = self.kind.waiting.borrow_mut().pop_front();
        match next {
            // Who waits no more drops it at once, and so it comes here again.
            Some(next) => {
                next.slot.replace(Some(Slot { kind: Rc::clone(&self.kind) }));
                if let Some(waker) = next.waker.take() {
                    waker.wake();
                }
            }
            None => self.kind.free.set(self.kind.free.get() + 1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farwood_fabric::Executor;

    #[test]
    fn slots_go_to_who_has_waited_longest_and_light_ones_to_light_commands() {
        let slots = Rc::new(Slots::new(0, 1));
        let mut taken: Vec<_> = (0..LEAST).filter_map(|_| slots.try_take(true)).collect();
        assert!(taken.len() == LEAST / HEAVY_SHARE && slots.try_take(true).is_none() && slots.are_scarce());
        assert!(slots.try_take(false).is_some(), "others do not wait");
        let executor = Executor::new();
        let order = Rc::new(RefCell::new(Vec::new()));
        let wait = |name: &'static str| {
            let (slots, order) = (Rc::clone(&slots), Rc::clone(&order));
            executor.spawn(async move {
                let _slot = slots.take(true).await;
                order.borrow_mut().push(name);
            })
        };
        executor.block_on(async {
            let waiting = [wait("first"), wait("second")];
            executor.yield_now().await;
            assert!(order.borrow().is_empty());
            taken.pop();
            assert!(slots.try_take(true).is_none(), "nobody overtakes");
            for task in waiting {
                task.await.expect("it has had its slot");
            }
        });
        assert_eq!(*order.borrow(), ["first", "second"]);
        taken.clear();
        assert!(slots.heavy.free.get() == LEAST / HEAVY_SHARE && !slots.are_scarce());
        assert_eq!(Slots::new(256 << 20, 2).light.all, 128);
    }
}
