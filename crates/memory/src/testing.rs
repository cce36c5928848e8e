//! Memory for tests: regions as vectors of words.

use farwood_fabric::addr::RegionId;
use farwood_fabric::region::RegionSpec;
use farwood_fabric::server::ServerMemory;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// Regions that live in vectors. Shared between threads it is as racy as the real ones.
#[derive(Debug)]
pub struct VecMemory {
    regions: BTreeMap<RegionId, Vec<AtomicU64>>,
}

impl VecMemory {
    /// Zeroed regions.
    pub fn new(specs: &[RegionSpec]) -> Self {
        let words = |spec: &RegionSpec| (0..spec.bytes.div_ceil(8)).map(|_| AtomicU64::new(0)).collect();
        Self { regions: specs.iter().map(|spec| (spec.id, words(spec))).collect() }
    }

    fn word(&self, region: RegionId, offset: u64) -> &AtomicU64 {
        assert_eq!(offset % 8, 0, "word {region}+{offset:#x} is not aligned");
        let words = self.regions.get(&region);
        let index = usize::try_from(offset / 8).unwrap_or(usize::MAX);
        words.and_then(|words| words.get(index)).unwrap_or_else(|| panic!("no word {region}+{offset:#x}"))
    }
}

impl ServerMemory for VecMemory {
    fn load(&self, region: RegionId, offset: u64) -> u64 {
        self.word(region, offset).load(Ordering::Relaxed)
    }

    fn store(&self, region: RegionId, offset: u64, value: u64) {
        self.word(region, offset).store(value, Ordering::Relaxed);
    }
}
