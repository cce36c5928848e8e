//! How many commands are under way on a thread: each may have a longest value in its hands, which nobody has counted yet (`budget`). So
//! there are no more than `--client-memory` has room for once more.
//!
//! A connection takes a slot for each command that it starts, in their order. Commands under way never wait for one that has not begun, so
//! slots always come back.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::task::{Poll, Waker};

/// The longest value, about.
const VALUE_BYTES: u64 = 1 << 20;
/// There are at least so many, however little memory there is.
const LEAST: usize = 32;

/// Slots for commands.
#[derive(Debug)]
pub(crate) struct Slots {
    all: usize,
    free: Cell<usize>,
    waiting: RefCell<VecDeque<Waker>>,
}

/// The right to be under way; it goes back when it is dropped.
#[derive(Debug)]
pub(crate) struct Slot {
    slots: Rc<Slots>,
}

impl Slots {
    /// Those of one of so many threads.
    pub(super) fn new(memory_bytes: u64, threads: usize) -> Rc<Self> {
        let fitting = usize::try_from(memory_bytes / VALUE_BYTES).unwrap_or(usize::MAX) / threads.max(1);
        let all = fitting.max(LEAST);
        Rc::new(Self { all, free: Cell::new(all), waiting: RefCell::default() })
    }

    /// A slot, if one is free.
    #[inline]
    pub(super) fn try_take(self: &Rc<Self>) -> Option<Slot> {
        let left = self.free.get().checked_sub(1)?;
        self.free.set(left);
        Some(Slot { slots: Rc::clone(self) })
    }

    /// A slot, for somebody who has none.
    pub(super) async fn take(self: &Rc<Self>) -> Slot {
        std::future::poll_fn(|context| {
            if let Some(slot) = self.try_take() {
                return Poll::Ready(slot);
            }
            self.waiting.borrow_mut().push_back(context.waker().clone());
            Poll::Pending
        })
        .await
    }

    /// Whether more than half of them are taken: those who would have several values in their hands take fewer.
    pub(crate) fn are_scarce(&self) -> bool {
        self.free.get() * 2 < self.all
    }
}

impl Drop for Slot {
    #[inline]
    fn drop(&mut self) {
        self.slots.free.set(self.slots.free.get() + 1);
        if let Some(next) = self.slots.waiting.borrow_mut().pop_front() {
            next.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farwood_fabric::Executor;

    #[test]
    fn whoever_waits_gets_the_next_slot() {
        let slots = Slots::new(0, 1);
        let mut taken: Vec<_> = (0..LEAST).filter_map(|_| slots.try_take()).collect();
        assert!(taken.len() == LEAST && slots.try_take().is_none() && slots.are_scarce());
        let executor = Executor::new();
        let (one, two) = (Rc::clone(&slots), Rc::clone(&slots));
        executor.block_on(async {
            let had = Rc::new(Cell::new(0));
            let wait = |slots: Rc<Slots>| {
                let had = Rc::clone(&had);
                executor.spawn(async move {
                    let _slot = slots.take().await;
                    had.set(had.get() + 1);
                })
            };
            let waiting = [wait(one), wait(two)];
            executor.yield_now().await;
            assert_eq!(had.get(), 0);
            taken.pop();
            for task in waiting {
                task.await.expect("it has had its slot");
            }
            assert_eq!(had.get(), 2);
        });
        taken.clear();
        assert!(slots.free.get() == LEAST && !slots.are_scarce());
        assert_eq!(Slots::new(256 << 20, 2).all, 128);
    }
}
