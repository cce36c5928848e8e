//! Room for an object that nobody knows yet. It is linked, or goes back to the heap, whatever becomes of the operation that took it.

use super::{Class, Heap};
use farwood_fabric::{Endpoint, FabricError, GlobalAddr, Op, ServerId};

/// So much of the next object is asked for ahead.
const MAX_EXPECTED_BYTES: usize = 256;

/// Room for an object, in the hands of one operation. Dropped, it goes back to the heap, once nothing can be written to it any more.
#[derive(Debug)]
pub struct Room {
    heap: Heap,
    endpoint: Endpoint,
    class: Class,
    addr: GlobalAddr,
    is_linked: bool,
}

impl Room {
    fn new(heap: &Heap, op: &Op, class: Class, addr: GlobalAddr) -> Self {
        Self { heap: heap.clone(), endpoint: op.endpoint().clone(), class, addr, is_linked: false }
    }

    /// Where it is.
    pub fn addr(&self) -> GlobalAddr {
        self.addr
    }

    /// What it is for.
    pub fn class(&self) -> Class {
        self.class
    }

    /// The WRITE or CAS that links it is about to be posted: from now on it is the index's.
    pub fn link(&mut self) {
        self.is_linked = true;
    }

    /// Takes it out of this guard's care: whoever has its address sees to it.
    #[must_use]
    pub fn release(mut self) -> (Class, GlobalAddr) {
        self.is_linked = true;
        (self.class, self.addr)
    }

    /// It turned out that nothing leads to it.
    pub fn unlink(&mut self) {
        self.is_linked = false;
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        if !self.is_linked {
            self.heap.give_back_room(&self.endpoint, self.class, self.addr);
        }
    }
}

impl Heap {
    /// Room on `server`, as [`Heap::allocate`] finds it.
    pub async fn room(&self, op: &Op, server: ServerId, class: Class) -> Result<Room, FabricError> {
        let addr = self.allocate(op, server, class).await?;
        Ok(Room::new(self, op, class, addr))
    }

    /// An object that was allocated, as room.
    pub fn room_of(&self, op: &Op, class: Class, addr: GlobalAddr) -> Room {
        Room::new(self, op, class, addr)
    }

    /// Room on `server` that is at hand: for those who hold a lock, and must not wait.
    pub fn room_at_hand(&self, op: &Op, server: ServerId, class: Class) -> Option<Room> {
        let (addr, next) = self.take_free_with_next(server, class)?;
        if let Some(next) = next {
            // It is in no cache, and WRITEs wait for it.
            op.expect(next, usize::try_from(class.object_bytes).unwrap_or(0).min(MAX_EXPECTED_BYTES));
        }
        Some(Room::new(self, op, class, addr))
    }

    /// Takes back an object that was never linked, once nothing that `endpoint` posted can be written to it any more.
    pub fn give_back_room(&self, endpoint: &Endpoint, class: Class, addr: GlobalAddr) {
        if self.inner.sabotage.reuse_in_doubt {
            return self.free_unpublished(class, addr);
        }
        self.when_quiet(endpoint, addr.server(), move |heap| heap.free_unpublished(class, addr));
    }
}
