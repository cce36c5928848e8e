//! The mapped regions of one memory server, by number.

use crate::addr::RegionId;
use crate::clock::Nanos;
use crate::found::Found;
use crate::mem::RacyMemory;
use crate::pool_clock::{UnixMillis, wall_clock_ms};
use crate::server::ServerMemory;
use std::sync::atomic::Ordering;

/// Regions in this process's address space: on the heap for `local`, shared between processes for `shm`.
#[derive(Default, Debug)]
pub(crate) struct Regions {
    regions: [Option<RacyMemory>; RegionId::MAX as usize + 1],
    pub(crate) found: Found,
}

impl Regions {
    /// Says how the memory was found.
    pub(crate) fn set_found(&mut self, found: Found) {
        self.found = found;
    }

    /// Whether processes of those who used the memory before may still be there.
    pub(crate) fn is_of_same_boot(&self) -> bool {
        self.found == Found::SameBoot
    }

    pub(crate) fn insert(&mut self, region: RegionId, memory: RacyMemory) {
        self.regions[usize::from(region.get())] = Some(memory);
    }

    /// Whether the region is mapped.
    pub(crate) fn has(&self, region: RegionId) -> bool {
        self.regions[usize::from(region.get())].is_some()
    }

    /// The region's memory; the caller has checked against the region table that there is such a region.
    #[inline]
    pub(crate) fn region(&self, region: RegionId) -> &RacyMemory {
        self.regions[usize::from(region.get())].as_ref().expect("checked against the region table")
    }
}

/// An offset as an index. Regions are mapped, so their offsets fit.
#[inline]
pub(crate) fn at(offset: u64) -> usize {
    usize::try_from(offset).expect("a mapped offset fits the address space")
}

impl ServerMemory for Regions {
    fn load(&self, region: RegionId, offset: u64) -> u64 {
        self.region(region).word(at(offset)).load(Ordering::SeqCst)
    }

    fn store(&self, region: RegionId, offset: u64, value: u64) {
        self.region(region).word(at(offset)).store(value, Ordering::SeqCst);
    }

    fn found(&self) -> &Found {
        &self.found
    }

    fn wall_clock_ms(&self, _: Nanos) -> UnixMillis {
        wall_clock_ms()
    }
}
