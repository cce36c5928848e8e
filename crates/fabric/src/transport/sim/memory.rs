//! The memory of a simulated server: flat pages that appear when first written, no metadata per word.

use crate::region::RegionSpec;

const PAGE: usize = 64 * 1024;

/// One region.
#[derive(Debug)]
pub(super) struct Pages {
    pages: Vec<Option<Box<[u8]>>>,
}

impl Pages {
    pub(super) fn new(spec: &RegionSpec) -> Self {
        let bytes = usize::try_from(spec.bytes).expect("a simulated region fits the address space");
        Self { pages: (0..bytes.div_ceil(PAGE)).map(|_| None).collect() }
    }

    fn page_mut(&mut self, n: usize) -> &mut [u8] {
        self.pages[n].get_or_insert_with(|| vec![0; PAGE].into_boxed_slice())
    }

    /// Says that the bytes at `offset` will be needed soon.
    pub(super) fn prefetch(&self, offset: usize) {
        if let Some(Some(page)) = self.pages.get(offset / PAGE) {
            crate::mem::prefetch(&page[offset % PAGE]);
        }
    }

    pub(super) fn load(&self, offset: usize) -> u64 {
        let (page, at) = (offset / PAGE, offset % PAGE);
        let Some(page) = &self.pages[page] else { return 0 };
        u64::from_le_bytes(page[at..at + 8].try_into().expect("eight bytes"))
    }

    pub(super) fn store(&mut self, offset: usize, value: u64) {
        let (page, at) = (offset / PAGE, offset % PAGE);
        self.page_mut(page)[at..at + 8].copy_from_slice(&value.to_le_bytes());
    }

    pub(super) fn read(&self, mut offset: usize, mut into: &mut [u8]) {
        while !into.is_empty() {
            let (page, at) = (offset / PAGE, offset % PAGE);
            let step = into.len().min(PAGE - at);
            let (head, rest) = into.split_at_mut(step);
            match &self.pages[page] {
                Some(page) => head.copy_from_slice(&page[at..at + step]),
                None => head.fill(0),
            }
            into = rest;
            offset += step;
        }
    }

    pub(super) fn write(&mut self, mut offset: usize, mut from: &[u8]) {
        while !from.is_empty() {
            let (page, at) = (offset / PAGE, offset % PAGE);
            let step = from.len().min(PAGE - at);
            self.page_mut(page)[at..at + step].copy_from_slice(&from[..step]);
            from = &from[step..];
            offset += step;
        }
    }
}
