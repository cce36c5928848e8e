//! Batches under way on a connection, and the tickets of those who wait for them.
//!
//! A slot is there until its batch has a result and its ticket is gone: whichever is last removes it.

use crate::verb::{BatchFailure, BatchResult};
use slab::Slab;
use std::cell::RefMut;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

/// The batches of a connection, each with what the connection has to know of it.
#[derive(Debug)]
pub(crate) struct Slots<T> {
    slots: Slab<Slot<T>>,
}

#[derive(Debug)]
struct Slot<T> {
    batch: T,
    result: Option<BatchResult>,
    waker: Option<Waker>,
    /// Nobody wants the result.
    detached: bool,
}

impl<T> Slots<T> {
    pub(crate) fn new() -> Self {
        Self { slots: Slab::new() }
    }

    pub(crate) fn insert(&mut self, batch: T) -> usize {
        self.slots.insert(Slot { batch, result: None, waker: None, detached: false })
    }

    /// Takes back one that nobody has a ticket of.
    pub(crate) fn remove(&mut self, key: usize) {
        self.slots.remove(key);
    }

    /// A batch that is under way.
    pub(crate) fn batch(&mut self, key: usize) -> Option<&mut T> {
        self.slots.get_mut(key).map(|slot| &mut slot.batch)
    }

    /// A batch has come to its end.
    pub(crate) fn finish(&mut self, key: usize, result: BatchResult) {
        let Some(slot) = self.slots.get_mut(key) else { return };
        slot.result = Some(result);
        if let Some(waker) = slot.waker.take() {
            waker.wake();
        }
        if slot.detached {
            self.slots.remove(key);
        }
    }

    /// All that are under way fail, as `failure` says of each. Whom to wake, when nothing is borrowed any more.
    pub(crate) fn end(&mut self, mut failure: impl FnMut(usize, &T) -> Box<BatchFailure>) -> Vec<Waker> {
        let mut wakers = Vec::new();
        self.slots.retain(|key, slot| {
            if slot.result.is_none() {
                slot.result = Some(Err(failure(key, &slot.batch)));
            }
            wakers.extend(slot.waker.take());
            !slot.detached
        });
        wakers
    }
}

/// A connection that batches are under way on.
pub(crate) trait Carries {
    type Batch;
    fn slots(&self) -> RefMut<'_, Slots<Self::Batch>>;
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

    pub(crate) fn poll(&mut self, context: &mut Context<'_>) -> Poll<BatchResult> {
        let mut slots = self.connection.slots();
        let Some(slot) = slots.slots.get_mut(self.key) else { return Poll::Pending };
        if let Some(result) = slot.result.take() {
            slots.slots.remove(self.key);
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
    fn drop(&mut self) {
        if self.key == usize::MAX {
            return;
        }
        let mut slots = self.connection.slots();
        let Some(slot) = slots.slots.get_mut(self.key) else { return };
        slot.detached = true;
        if slot.result.is_some() {
            slots.slots.remove(self.key);
        }
    }
}
