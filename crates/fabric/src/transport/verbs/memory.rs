//! Memory that a device may read and write: registered regions of ours, and the device's own.
//!
//! A registered region must stay where it is until it is deregistered. [`MemoryRegion::of`] sees to that itself, since it holds
//! what it registers; whoever registers bare bytes vouches for it.

use super::device::Domain;
use super::error::VerbsError;
use super::sys;
use crate::buf::{Registrar, Registration};
use crate::mem::RacyMemory;
use std::any::Any;
use std::fmt;
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

/// Local buffers: others have no business there.
const LOCAL: u32 = sys::ACCESS_LOCAL_WRITE;
/// Lock words are 8 bytes; a line each would not fit.
const LOG_ALIGN: u32 = 6;

/// A registered region of memory.
pub(super) struct MemoryRegion {
    raw: NonNull<sys::Mr>,
    domain: Arc<Domain>,
    /// What was registered; after the registration, by the order of fields and `drop`.
    memory: Option<Arc<dyn Any + Send + Sync>>,
}

// SAFETY: as for `Context`.
unsafe impl Send for MemoryRegion {}
// SAFETY: as for `Context`.
unsafe impl Sync for MemoryRegion {}

impl MemoryRegion {
    /// Registers memory, which it keeps alive: `owner` holds what `memory` finds in it.
    pub(super) fn of<T: Any + Send + Sync>(
        domain: &Arc<Domain>,
        owner: &Arc<T>,
        memory: impl Fn(&T) -> &RacyMemory,
        access: u32,
    ) -> Result<Self, VerbsError> {
        let block = memory(owner);
        // SAFETY: the block is owned by `owner`, which is held as long as the registration; its bytes are made to be raced on.
        let mut region = unsafe { Self::register(domain, block.base(), block.len(), access)? };
        region.memory = Some(Arc::clone(owner) as _);
        Ok(region)
    }

    /// Registers bare bytes.
    ///
    /// # Safety
    /// They stay allocated as long as the registration.
    unsafe fn register(
        domain: &Arc<Domain>,
        base: NonNull<u8>,
        bytes: usize,
        access: u32,
    ) -> Result<Self, VerbsError> {
        let access = i32::try_from(access).unwrap_or(0);
        let register = domain.context().library().reg_mr;
        // SAFETY: the caller vouches for the bytes; the domain is open.
        let raw = unsafe { register(domain.raw(), base.as_ptr().cast(), bytes, access) };
        let raw = NonNull::new(raw)
            .ok_or_else(|| VerbsError::Register { bytes, error: io::Error::last_os_error() })?;
        Ok(Self { raw, domain: Arc::clone(domain), memory: None })
    }

    pub(super) fn local_key(&self) -> u32 {
        // SAFETY: registered as long as `self`.
        unsafe { self.raw.as_ref().lkey }
    }

    pub(super) fn remote_key(&self) -> u32 {
        // SAFETY: as above.
        unsafe { self.raw.as_ref().rkey }
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        // SAFETY: registered by us; whoever gave its keys away has taken care that nobody uses them.
        let failed = unsafe { (self.domain.context().library().dereg_mr)(self.raw.as_ptr()) };
        if failed != 0 {
            // The device may still reach it, so it must not be used for anything else.
            std::mem::forget(self.memory.take());
        }
    }
}

impl fmt::Debug for MemoryRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MemoryRegion(key {:#x})", self.remote_key())
    }
}

/// Registers the buffers of an endpoint.
#[derive(Debug)]
pub(super) struct LocalMemory(pub(super) Arc<Domain>);

impl Registrar for LocalMemory {
    fn domain(&self) -> u64 {
        self.0.id()
    }

    unsafe fn register(&self, base: NonNull<u8>, bytes: usize) -> Option<Registration> {
        // SAFETY: the caller keeps the bytes as long as the registration, which is what holds the region.
        match unsafe { MemoryRegion::register(&self.0, base, bytes, LOCAL) } {
            Ok(region) => Some(Registration::new(self.0.id(), region.local_key(), Box::new(region))),
            Err(error) => {
                tracing::error!("{error}");
                None
            }
        }
    }
}

/// On-chip memory of a device, registered for remote access. Addresses in it count from 0.
#[derive(Debug)]
pub(super) struct DeviceMemory {
    region: Option<MemoryRegion>,
    raw: NonNull<sys::Dm>,
    domain: Arc<Domain>,
}

// SAFETY: as for `Context`.
unsafe impl Send for DeviceMemory {}
// SAFETY: as for `Context`.
unsafe impl Sync for DeviceMemory {}

impl DeviceMemory {
    /// Zeroed device memory; `None` if the device has none, or not so much.
    pub(super) fn allocate(domain: &Arc<Domain>, bytes: usize, access: u32) -> Option<Self> {
        let context = domain.context();
        if context.device_memory_bytes() < bytes as u64 {
            return None;
        }
        let extended = context.extended()?;
        let mut attr = sys::AllocDmAttr { length: bytes, log_align_req: LOG_ALIGN, comp_mask: 0 };
        // SAFETY: the context's own operation, on a valid description.
        let raw = NonNull::new(unsafe { (extended.alloc_dm?)(context.raw(), &raw mut attr) })?;
        let mut memory = Self { region: None, raw, domain: Arc::clone(domain) };
        let zeroes = vec![0u8; bytes];
        // SAFETY: device memory of `bytes` bytes, and as many of ours.
        let copied = unsafe { (raw.as_ref().memcpy_to_dm?)(raw.as_ptr(), 0, zeroes.as_ptr().cast(), bytes) };
        if copied != 0 {
            return None;
        }
        let access = access | sys::ACCESS_ZERO_BASED;
        // SAFETY: device memory that is freed only after the registration is gone.
        let region = unsafe { (extended.reg_dm_mr?)(domain.raw(), raw.as_ptr(), 0, bytes, access) };
        let region = MemoryRegion { raw: NonNull::new(region)?, domain: Arc::clone(domain), memory: None };
        memory.region = Some(region);
        Some(memory)
    }

    pub(super) fn remote_key(&self) -> u32 {
        self.region.as_ref().map_or(0, MemoryRegion::remote_key)
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        self.region = None;
        let free = self.domain.context().extended().and_then(|extended| extended.free_dm);
        if let Some(free) = free {
            // SAFETY: allocated by us, and not registered any more.
            unsafe { free(self.raw.as_ptr()) };
        }
    }
}
