//! A server's memory for those who try to get at what is not theirs: a part of it that they may use, and around it what they must
//! neither change nor see. Used by tests and by the fuzzer (`fuzz/`).

use super::execute::Reach;
use crate::addr::{RegionId, ServerId};
use crate::mem::RacyMemory;
use crate::region::{Permissions, RegionSpec, RegionTable};
use crate::transport::host::gates::{Gate, Gates};
use crate::transport::host::regions::Regions;

pub(super) const SERVER: ServerId = ServerId::new(3);
/// Smaller than what is mapped, so that what is written behind the end shows.
pub(super) const REGION_BYTES: u64 = 8192;
const MAPPED_BYTES: usize = 16384;

/// A server's memory: main memory that may be used, tables that may be read, a region that does not exist for clients.
pub(super) struct Bench {
    pub(super) reach: Reach,
    pub(super) memory: Regions,
    _gates: Gates,
    pub(super) gate: Gate,
}

const SECRET: RegionId = RegionId::new(9);

impl Bench {
    pub(super) fn new() -> Self {
        let spec = |id, permissions| RegionSpec { id, bytes: REGION_BYTES, permissions };
        let table = RegionTable::new(&[
            spec(RegionId::MAIN, Permissions::ALL),
            spec(RegionId::META, Permissions::READ),
        ]);
        let mut memory = Regions::default();
        for id in [RegionId::MAIN, RegionId::META, SECRET] {
            memory.insert(id, RacyMemory::zeroed(MAPPED_BYTES).expect("a little memory"));
        }
        let gates = Gates::new(RacyMemory::zeroed(4096).expect("a little memory"));
        let gate = gates.take(None, (crate::addr::SessionId::new(1), 1)).expect("there are gates");
        let reach = Reach { server: SERVER, table, gate: gate.clone() };
        Self { reach, memory, _gates: gates, gate }
    }

    /// Fills what no client may touch with a pattern that must stay, and must not be read.
    pub(super) fn mark(&self, word: u64) {
        for (region, from) in Self::forbidden() {
            for at in (from..MAPPED_BYTES).step_by(8) {
                self.memory.region(region).word(at).store(word, std::sync::atomic::Ordering::SeqCst);
            }
        }
    }

    /// Where no client may write; the tables may be read.
    fn forbidden() -> [(RegionId, usize); 3] {
        let end = usize::try_from(REGION_BYTES).expect("small");
        [(RegionId::MAIN, end), (RegionId::META, 0), (SECRET, 0)]
    }

    pub(super) fn is_unharmed(&self, word: u64) -> bool {
        Self::forbidden().iter().all(|(region, from)| {
            (*from..MAPPED_BYTES).step_by(8).all(|at| {
                self.memory.region(*region).word(at).load(std::sync::atomic::Ordering::SeqCst) == word
            })
        })
    }
}
