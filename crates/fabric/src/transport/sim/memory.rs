//! The memory of a simulated server: flat bytes, no metadata per word. The operating system supplies pages as they are
//! first written, so a world costs what it touches, not what its servers claim to have.

use crate::region::RegionSpec;

/// One region.
#[derive(Debug)]
pub(super) struct Memory {
    bytes: Vec<u8>,
}

impl Memory {
    pub(super) fn new(spec: &RegionSpec) -> Self {
        Self {
            bytes: vec![0; usize::try_from(spec.bytes).expect("a simulated region fits the address space")],
        }
    }

    /// Says that the bytes at `offset` will be needed soon.
    pub(super) fn prefetch(&self, offset: usize) {
        if let Some(byte) = self.bytes.get(offset) {
            crate::mem::prefetch(byte);
        }
    }

    pub(super) fn load(&self, offset: usize) -> u64 {
        u64::from_le_bytes(self.bytes[offset..offset + 8].try_into().expect("eight bytes"))
    }

    pub(super) fn store(&mut self, offset: usize, value: u64) {
        self.bytes[offset..offset + 8].copy_from_slice(&value.to_le_bytes());
    }

    pub(super) fn read(&self, offset: usize, into: &mut [u8]) {
        into.copy_from_slice(&self.bytes[offset..offset + into.len()]);
    }

    pub(super) fn write(&mut self, offset: usize, from: &[u8]) {
        self.bytes[offset..offset + from.len()].copy_from_slice(from);
    }
}
