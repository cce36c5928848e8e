//! The memory of a simulated server: flat bytes, no metadata per word. The operating system supplies pages as they are
//! first written, so a world costs what it touches, not what its servers claim to have.

use crate::region::RegionSpec;

/// Regions of at least this size are used at random and all over, if they are used: large pages pay. Smaller worlds are made by
/// the thousand and touch little.
const LARGE: usize = 128 << 20;

/// One region.
#[derive(Debug)]
pub(super) struct Memory {
    bytes: Vec<u8>,
}

impl Memory {
    pub(super) fn new(spec: &RegionSpec) -> Self {
        let bytes = vec![0; usize::try_from(spec.bytes).expect("a simulated region fits the address space")];
        if bytes.len() >= LARGE {
            crate::pages::prefer_large(bytes.as_ptr(), bytes.len());
        }
        Self { bytes }
    }

    /// Says that these bytes will be needed soon. Of a long verb, its first KiB: the processor goes on by itself.
    #[inline]
    pub(super) fn prefetch(&self, offset: usize, len: usize) {
        const LINE: usize = 64;
        const LINES: usize = 16;
        for at in (offset..offset + len.min(LINES * LINE)).step_by(LINE) {
            if let Some(byte) = self.bytes.get(at) {
                crate::mem::prefetch(byte);
            }
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
