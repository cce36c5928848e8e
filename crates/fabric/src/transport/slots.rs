//! Batches under way on a connection, and the tickets of those who wait for them.
//!
//! A slot is taken until its batch has a result and its ticket is gone: whichever is last gives it back. It stays where it is, and the
//! next batch uses it again.

use crate::verb::{BatchFailure, BatchResult};
use std::cell::RefMut;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

/// The batches of a connection, each with what the connection has to know of it.
#[derive(Debug)]
pub(crate) struct Slots<T> {
    slots: Vec<Slot<T>>,
    free: Vec<usize>,
}

#[derive(Debug)]
struct Slot<T> {
    /// `None`: the slot is free.
    batch: Option<T>,
    result: Option<BatchResult>,
    waker: Option<Waker>,
    /// Nobody wants the result.
    detached: bool,
}

impl<T> Slots<T> {
    pub(crate) fn new() -> Self {
        Self { slots: Vec::new(), free: Vec::new() }
    }

    #[inline]
    pub(crate) fn insert(&mut self, batch: T) -> usize {
        if let Some(key) = self.free.pop() {
            self.slots[key].batch = Some(batch);
            return key;
        }
        self.slots.push(Slot { batch: Some(batch), result: None, waker: None, detached: false });
        self.slots.len() - 1
    }

    /// Gives a slot back that nobody has a ticket of any more.
    #[inline]
    pub(crate) fn remove(&mut self, key: usize) {
        let slot = &mut self.slots[key];
        (slot.batch, slot.result, slot.waker, slot.detached) = (None, None, None, false);
        self.free.push(key);
    }

    /// A slot that is taken.
    #[inline]
    fn get(&mut self, key: usize) -> Option<&mut Slot<T>> {
        self.slots.get_mut(key).filter(|slot| slot.batch.is_some())
    }

    /// A batch that is under way.
    pub(crate) fn batch(&mut self, key: usize) -> Option<&mut T> {
        self.get(key).and_then(|slot| slot.batch.as_mut())
    }

    /// A batch has come to its end.
    #[inline]
    pub(crate) fn finish(&mut self, key: usize, result: BatchResult) {
        let Some(slot) = self.get(key) else { return };
        slot.result = Some(result);
        if let Some(waker) = slot.waker.take() {
            waker.wake();
        }
        if slot.detached {
            self.remove(key);
        }
    }

    /// All that are under way fail, as `failure` says of each. Whom to wake, when nothing is borrowed any more.
    pub(crate) fn end(&mut self, mut failure: impl FnMut(usize, &mut T) -> Box<BatchFailure>) -> Vec<Waker> {
        let mut wakers = Vec::new();
        for key in 0..self.slots.len() {
            let slot = &mut self.slots[key];
            let Some(batch) = &mut slot.batch else { continue };
            if slot.result.is_none() {
                slot.result = Some(Err(failure(key, batch)));
            }
            wakers.extend(slot.waker.take());
            if slot.detached {
                self.remove(key);
            }
        }
        wakers
    }
}

/// A connection that batches are under way on.
pub(crate) trait Carries {
    type Batch;
    fn slots(&self) -> RefMut<'_, Slots<Self::Batch>>;

    /// Somebody is about to wait for the first time for a batch: what has come may be taken in now.
    fn is_awaited(&self) {}
}

/// A batch under way. Dropping it detaches.
#[derive(Debug)]
pub(crate) struct Ticket<C: Carries> {
    /// Held, since somebody has to take in the result.
    connection: Rc<C>,
    key: usize,
}

impl<C: Carries> Ticket<C> {
    pub(crate) fn new(connection: &Rc<C>, key: usize) -> Self {
        Self { connection: Rc::clone(connection), key }
    }

    #[inline]
    pub(crate) fn poll(&mut self, context: &mut Context<'_>) -> Poll<BatchResult> {
        let mut slots = self.connection.slots();
        if slots.get(self.key).is_some_and(|slot| slot.result.is_none() && slot.waker.is_none()) {
            drop(slots);
            self.connection.is_awaited();
            slots = self.connection.slots();
        }
        let Some(slot) = slots.get(self.key) else { return Poll::Pending };
        if let Some(result) = slot.result.take() {
            slots.remove(self.key);
            // The drop finds nothing.
            self.key = usize::MAX;
            return Poll::Ready(result);
        }
        if !slot.waker.as_ref().is_some_and(|waker| waker.will_wake(context.waker())) {
            slot.waker = Some(context.waker().clone());
        }
        Poll::Pending
    }
}

impl<C: Carries> Drop for Ticket<C> {
    #[inline]
    fn drop(&mut self) {
        if self.key == usize::MAX {
            return;
        }
        let mut slots = self.connection.slots();
        let Some(slot) = slots.get(self.key) else { return };
        slot.detached = true;
        if slot.result.is_some() {
            slots.remove(self.key);
        }
    }
}
