//! Local buffers for verbs: pooled ones that a READ fills and an operation owns, and shared ones that several tasks read.
//!
//! A verb in flight owns its buffer, so dropping a future never leaves a NIC writing into memory that somebody else
//! got; the buffer returns to its pool when the completion is in and nobody wants it any more. Pools are carved from slabs
//! that live as long as any buffer of them, which is what an RDMA transport registers.

use crate::exec::lock;
use crate::mem::RacyMemory;
use smallvec::SmallVec;
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::any::Any;
use std::cell::{Cell, RefCell};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::{Arc, Mutex};

const SMALLEST: usize = 64;
const CLASSES: usize = 18;
/// The largest buffer that is pooled: 8 MiB. Larger ones are allocated and freed one by one.
pub const LARGEST_POOLED: usize = SMALLEST << (CLASSES - 1);
const SLAB: usize = 256 * 1024;
const ALIGN: usize = 64;
/// Blocks that fill a slab are given back to the system beyond so many bytes of them that nobody has: whoever once had many long values
/// in its hands does not keep the room for them.
const MAX_SPARE_LARGE: usize = 8 << 20;
const _: () = assert!(LARGEST_POOLED == 8 << 20);

/// Makes memory known to a network card.
pub(crate) trait Registrar: fmt::Debug {
    /// What registrations are valid for.
    fn domain(&self) -> u64;

    /// Registers bytes; `None` if that cannot be done, which has been logged.
    ///
    /// # Safety
    /// The bytes stay allocated as long as the registration.
    unsafe fn register(&self, base: NonNull<u8>, bytes: usize) -> Option<Registration>;
}

/// Memory that a network card knows. Dropping it makes the card forget.
pub(crate) struct Registration {
    domain: u64,
    key: u32,
    _owner: Box<dyn Any + Send + Sync>,
}

impl Registration {
    pub(crate) fn new(domain: u64, key: u32, owner: Box<dyn Any + Send + Sync>) -> Self {
        Self { domain, key, _owner: owner }
    }

    /// The key by which the card knows it.
    pub(crate) fn key(&self) -> u32 {
        self.key
    }
}

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Registration({:#x} of domain {})", self.key, self.domain)
    }
}

/// The buffers of one endpoint, by size class (powers of two from 64 B to 8 MiB).
#[derive(Clone, Default)]
pub struct BufPool {
    inner: Rc<PoolInner>,
}

#[derive(Default)]
struct PoolInner {
    free: RefCell<[Vec<NonNull<u8>>; CLASSES]>,
    /// By address.
    slabs: RefCell<Vec<Slab>>,
    /// Bytes of free blocks that fill a slab.
    spare_large: Cell<usize>,
    registrar: Option<Box<dyn Registrar>>,
}

struct Slab {
    base: NonNull<u8>,
    layout: Layout,
    registration: Option<Registration>,
}

impl BufPool {
    /// A pool whose buffers a network card knows.
    pub(crate) fn registered(registrar: Box<dyn Registrar>) -> Self {
        let mut inner = PoolInner::default();
        inner.registrar = Some(registrar);
        Self { inner: Rc::new(inner) }
    }

    /// A buffer of `len` bytes. Its contents are whatever it held last.
    #[inline]
    pub fn take(&self, len: usize) -> Buf {
        let class = class_of(len);
        let block = match class {
            Some(class) => {
                let recycled = self.inner.free.borrow_mut()[class].pop();
                if is_large(class) && recycled.is_some() {
                    let spare = &self.inner.spare_large;
                    spare.set(spare.get() - (SMALLEST << class));
                }
                recycled.unwrap_or_else(|| self.inner.carve(class))
            }
            None => allocate(single(len)),
        };
        Buf { block, len, pool: Rc::clone(&self.inner) }
    }

    /// A buffer with a copy of `data`.
    pub fn copy_of(&self, data: &[u8]) -> Buf {
        let mut buf = self.take(data.len());
        buf.copy_from_slice(data);
        buf
    }

    /// How many bytes the pool's slabs take.
    pub fn slab_bytes(&self) -> usize {
        self.inner.slabs.borrow().iter().map(|slab| slab.layout.size()).sum()
    }
}

impl fmt::Debug for BufPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BufPool({} bytes)", self.slab_bytes())
    }
}

#[inline]
fn class_of(len: usize) -> Option<usize> {
    let class = len.max(SMALLEST).next_power_of_two().trailing_zeros() - SMALLEST.trailing_zeros();
    ((class as usize) < CLASSES).then_some(class as usize)
}

/// Whether a block of this class fills a slab.
#[inline]
fn is_large(class: usize) -> bool {
    SMALLEST << class >= SLAB
}

fn single(len: usize) -> Layout {
    Layout::from_size_align(len, ALIGN).expect("a buffer is smaller than the address space")
}

fn allocate(layout: Layout) -> NonNull<u8> {
    // SAFETY: only called with layouts of at least 64 bytes.
    NonNull::new(unsafe { alloc_zeroed(layout) }).unwrap_or_else(|| handle_alloc_error(layout))
}

impl PoolInner {
    /// Cuts a new slab into blocks of the class, keeps all but one.
    #[cold]
    fn carve(&self, class: usize) -> NonNull<u8> {
        let block = SMALLEST << class;
        let layout = single(block.max(SLAB));
        let slab = allocate(layout);
        // SAFETY: the slab is freed after its registration is dropped, in `drop`.
        let registration = self.registrar.as_ref().and_then(|r| unsafe { r.register(slab, layout.size()) });
        let mut slabs = self.slabs.borrow_mut();
        let at = slabs.partition_point(|other| other.base < slab);
        slabs.insert(at, Slab { base: slab, layout, registration });
        drop(slabs);
        let free = &mut self.free.borrow_mut()[class];
        for n in 1..layout.size() / block {
            // SAFETY: block `n` lies inside the slab just allocated.
            free.push(unsafe { slab.add(n * block) });
        }
        slab
    }

    /// Takes back a block that fills a slab.
    #[cold]
    fn take_back_large(&self, block: NonNull<u8>, class: usize) {
        let spare = self.spare_large.get() + (SMALLEST << class);
        if spare <= MAX_SPARE_LARGE {
            self.spare_large.set(spare);
            self.free.borrow_mut()[class].push(block);
            return;
        }
        let slab = {
            let mut slabs = self.slabs.borrow_mut();
            let at = slabs.partition_point(|slab| slab.base < block);
            slabs.remove(at)
        };
        debug_assert_eq!(slab.base, block, "a block of this size is a slab");
        slab.free();
    }
}

impl Slab {
    /// Gives it back to the system. Nobody has a block of it.
    fn free(self) {
        drop(self.registration);
        // SAFETY: allocated in `carve` with this layout.
        unsafe { dealloc(self.base.as_ptr(), self.layout) }
    }
}

impl Drop for PoolInner {
    fn drop(&mut self) {
        // Every buffer holds the pool, so none is left.
        self.slabs.get_mut().drain(..).for_each(Slab::free);
    }
}

/// A buffer owned by whoever holds it, 64-byte aligned, back in its pool when dropped.
pub struct Buf {
    block: NonNull<u8>,
    len: usize,
    pool: Rc<PoolInner>,
}

impl Buf {
    /// Where it begins, for those who name it to a network card.
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.block
    }

    /// The key by which a network card knows these bytes, in this domain. Buffers that are too large to be pooled are not known.
    pub(crate) fn local_key(&self, domain: u64) -> Option<u32> {
        let slabs = self.pool.slabs.borrow();
        let slab = &slabs[slabs.partition_point(|slab| slab.base <= self.block).checked_sub(1)?];
        let within = self.block.addr().get() - slab.base.addr().get() < slab.layout.size();
        slab.registration.as_ref().filter(|r| within && r.domain == domain).map(|r| r.key)
    }

    /// The little-endian word at byte `at`.
    ///
    /// # Panics
    /// If the word does not lie inside the buffer.
    #[inline]
    pub fn word(&self, at: usize) -> u64 {
        u64::from_le_bytes(self[at..at + 8].try_into().expect("eight bytes"))
    }

    /// Stores a little-endian word at byte `at`.
    ///
    /// # Panics
    /// If the word does not lie inside the buffer.
    #[inline]
    pub fn set_word(&mut self, at: usize, value: u64) {
        self[at..at + 8].copy_from_slice(&value.to_le_bytes());
    }
}

impl Deref for Buf {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        // SAFETY: the block has at least `len` initialised bytes and belongs to this value alone.
        unsafe { std::slice::from_raw_parts(self.block.as_ptr(), self.len) }
    }
}

impl DerefMut for Buf {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and we hold it mutably.
        unsafe { std::slice::from_raw_parts_mut(self.block.as_ptr(), self.len) }
    }
}

impl Drop for Buf {
    #[inline]
    fn drop(&mut self) {
        match class_of(self.len) {
            Some(class) if is_large(class) => self.pool.take_back_large(self.block, class),
            Some(class) => self.pool.free.borrow_mut()[class].push(self.block),
            // SAFETY: allocated in `take` with this layout.
            None => unsafe { dealloc(self.block.as_ptr(), single(self.len)) },
        }
    }
}

impl fmt::Debug for Buf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buf({} bytes)", self.len)
    }
}

/// A buffer that several threads of a compute server read and fill at once: a frame of a cache. Verbs read into it and
/// write from it by range. What a racing verb leaves is words in any order, as in far memory itself; a WRITE whose
/// source changes while it is in flight writes a mixture.
#[derive(Clone, Debug)]
pub struct SharedBuf {
    inner: Arc<SharedInner>,
}

#[derive(Debug)]
struct SharedInner {
    /// Before the memory, so that network cards forget it first. One for each domain that it was used in.
    registrations: Mutex<SmallVec<[Registration; 1]>>,
    memory: RacyMemory,
}

impl SharedBuf {
    /// A zeroed buffer; `None` if there is no memory for it.
    pub fn zeroed(bytes: usize) -> Option<Self> {
        let (registrations, memory) = (Mutex::default(), RacyMemory::zeroed(bytes)?);
        Some(Self { inner: Arc::new(SharedInner { registrations, memory }) })
    }

    /// The memory, to be read and written word by word or copied.
    pub fn memory(&self) -> &RacyMemory {
        &self.inner.memory
    }

    /// The key by which a network card knows the buffer; it is registered when it is first used.
    pub(crate) fn local_key(&self, registrar: &dyn Registrar) -> Option<u32> {
        let mut registrations = lock(&self.inner.registrations);
        if let Some(known) = registrations.iter().find(|known| known.domain == registrar.domain()) {
            return Some(known.key);
        }
        let memory = &self.inner.memory;
        // SAFETY: registrations are dropped before the memory, by the order of fields.
        let registration = unsafe { registrar.register(memory.base(), memory.len())? };
        let key = registration.key;
        registrations.push(registration);
        Some(key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_recycled_within_their_class() {
        let pool = BufPool::default();
        let first = pool.take(1000);
        let at = first.as_ptr();
        drop(first);
        assert_eq!(pool.take(600).as_ptr(), at, "600 and 1000 bytes share the 1 KiB class");
        let slabs = pool.slab_bytes();
        for _ in 0..10_000 {
            drop(pool.take(1024));
        }
        assert_eq!(pool.slab_bytes(), slabs, "a steady state allocates nothing");
    }

    #[test]
    fn room_for_many_long_values_is_given_back() {
        let pool = BufPool::default();
        let held: Vec<Buf> = (0..40).map(|n| pool.take(1 << (18 + n % 4))).collect();
        assert!(pool.slab_bytes() > 4 * MAX_SPARE_LARGE);
        drop(held);
        assert!(pool.slab_bytes() <= MAX_SPARE_LARGE);
        let spare = pool.slab_bytes();
        for _ in 0..100 {
            let held: Vec<Buf> = (0..4).map(|_| pool.take(1 << 20)).collect();
            drop(held);
        }
        assert!(pool.slab_bytes() <= spare + (4 << 20) && pool.slab_bytes() <= MAX_SPARE_LARGE);
        let kept = pool.take(1 << 20).as_ptr();
        assert_eq!(pool.take(1 << 20).as_ptr(), kept, "some are kept");
    }

    #[test]
    fn a_buffer_outlives_its_pool() {
        let pool = BufPool::default();
        let mut buf = pool.take(4096);
        drop(pool);
        buf.fill(7);
        assert!(buf.iter().all(|b| *b == 7));
    }

    #[test]
    fn every_size_is_served_apart_and_aligned() {
        let pool = BufPool::default();
        let sizes = [0, 1, 8, 63, 64, 65, 1024, 4097, 1 << 20, LARGEST_POOLED, LARGEST_POOLED + 1];
        let mut held: Vec<Buf> = sizes.iter().chain(&sizes).map(|len| pool.take(*len)).collect();
        for (n, buf) in held.iter_mut().enumerate() {
            assert_eq!(buf.as_ptr() as usize % ALIGN, 0);
            buf.fill(n.to_le_bytes()[0]);
        }
        for (n, buf) in held.iter().enumerate() {
            assert!(buf.iter().all(|b| *b == n.to_le_bytes()[0]), "buffer {n} was overwritten by another");
        }
    }
}
