//! What verbs queue for: lanes, the inside of a memory server's NIC, cores. All first come, first served.
//!
//! First come, first served means that the end of a service is known when it is asked for: a resource is the time at which
//! it is free again, and no queue is kept. That is right only if services are asked for in the order in which
//! their customers arrive, which is what the events of the world take care of.
//!
//! **Head-of-line blocking.** A NIC has few processing units, and an atomic holds one *while it waits* for its bucket. So a handful of atomics on one hot word fill all units, and verbs that have nothing to do with it wait too.
//! A prototype without this came out twenty times too fast for Sherman's Table 1 (FG+, 0.34 Mop/s under skew).

use super::profile::{Picos, Profile, picos, round};
use crate::clock::Nanos;

/// One customer at a time.
#[derive(Clone, Copy, Default, Debug)]
pub(in crate::transport::sim) struct Lane {
    free: Picos,
    pub(super) busy: Picos,
}

impl Lane {
    /// Serves whoever is there from `from` on; when that is done.
    #[inline]
    pub(super) fn serve(&mut self, from: Picos, service: Picos) -> Picos {
        self.free = from.max(self.free) + service;
        self.busy += service;
        self.free
    }
}

/// The two directions of a NIC.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Nic {
    pub(super) inward: Lane,
    pub(super) out: Lane,
}

/// What a verb needs of the memory server's NIC.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::transport::sim) enum Access {
    /// READ or WRITE of main memory: crosses PCIe.
    Main,
    /// READ or WRITE of the NIC's own memory.
    OnChip,
    /// Atomic in main memory, at this offset.
    AtomicMain(usize),
    /// Atomic in the NIC's own memory, at this offset.
    AtomicOnChip(usize),
}

/// The profile's numbers in the units of the model.
#[derive(Clone, Copy, Debug)]
pub(in crate::transport::sim) struct Prices {
    pub(super) one_way: Picos,
    message: Picos,
    per_byte: Picos,
    header_bytes: u64,
    verb: Picos,
    pcie: Picos,
    atomic: Picos,
    on_chip: Picos,
}

/// A message longer than this joins the queue of its receiver when so much of it has arrived, not when all has.
const SEGMENT_BYTES: u64 = 4096;

impl Prices {
    pub(super) fn of(profile: &Profile) -> Self {
        Self {
            one_way: profile.round_trip_ns * 1000 / 2,
            message: picos(profile.message_ns),
            per_byte: picos(1.0 / profile.link_bytes_per_ns),
            header_bytes: profile.header_bytes,
            verb: picos(profile.verb_ns),
            pcie: picos(profile.pcie_ns),
            atomic: picos(profile.atomic_ns),
            on_chip: picos(profile.on_chip_ns),
        }
    }

    /// What a message of so many bytes takes of a lane.
    #[inline]
    pub(super) fn message(&self, bytes: u64) -> Picos {
        self.message.max((bytes + self.header_bytes) * self.per_byte)
    }

    /// How much of a service has to pass before its customer can be told to have arrived.
    #[inline]
    pub(super) fn arrival(&self, service: Picos) -> Picos {
        service.min(self.message(SEGMENT_BYTES))
    }

    /// From the last byte of a request to when a verb asks for memory, if nobody is in the way. An atomic takes its unit
    /// when it arrives, and its effect comes later.
    #[inline]
    pub(super) fn shortest(&self) -> Picos {
        self.verb
    }

    /// How long a DMA of so many bytes lasts.
    pub(super) fn dma(&self, bytes: u64) -> Nanos {
        (bytes * self.per_byte).div_ceil(1000)
    }
}

/// The inside of a memory server's NIC.
#[derive(Debug)]
pub(super) struct Responder {
    /// When each unit is free again.
    units: Vec<Picos>,
    /// The unit that is looked at first.
    turn: usize,
    /// When each bucket is: a bucket is an aligned word's address without its low 3 bits, cut to `bucket_bits`.
    buckets: Vec<Picos>,
    pcie: Lane,
    pub(super) units_busy: Picos,
    pub(super) atomics_busy: Picos,
}

impl Responder {
    pub(super) fn new(profile: &Profile) -> Self {
        Self {
            units: vec![0; profile.units],
            turn: 0,
            buckets: vec![0; 1 << (profile.bucket_bits - 3)],
            pcie: Lane::default(),
            units_busy: 0,
            atomics_busy: 0,
        }
    }

    /// Takes in a verb whose request has been received; when it takes effect.
    pub(super) fn admit(&mut self, received: Picos, access: Access, prices: &Prices) -> Picos {
        // Any unit that is free is as good as another; if none is, the first to be.
        self.turn = if self.turn + 1 < self.units.len() { self.turn + 1 } else { 0 };
        let mut unit = self.turn;
        if self.units[unit] > received {
            for (n, free) in self.units.iter().enumerate() {
                if *free < self.units[unit] {
                    unit = n;
                }
            }
        }
        let begun = received.max(self.units[unit]);
        let ready = begun + prices.verb;
        let done = match access {
            Access::OnChip => ready,
            // Crossing and processing overlap: an idle PCIe adds nothing to what the unit takes.
            Access::Main => ready.max(self.pcie.serve(ready.saturating_sub(prices.pcie), prices.pcie)),
            Access::AtomicOnChip(offset) => self.exclude(offset, ready, prices.on_chip),
            Access::AtomicMain(offset) => self.exclude(offset, ready, prices.atomic),
        };
        self.units[unit] = done;
        self.units_busy += done - begun;
        done
    }

    /// An atomic keeps others from its bucket; when it is done.
    fn exclude(&mut self, offset: usize, ready: Picos, service: Picos) -> Picos {
        let bucket = (offset / 8) & (self.buckets.len() - 1);
        let done = ready.max(self.buckets[bucket]) + service;
        self.buckets[bucket] = done;
        self.atomics_busy += service;
        done
    }

    pub(super) fn pcie_busy(&self) -> Picos {
        self.pcie.busy
    }
}

/// A memory server's cores.
#[derive(Debug)]
pub(super) struct Cores {
    free: Vec<Nanos>,
    pub(super) busy: Nanos,
}

impl Cores {
    pub(super) fn new(count: usize) -> Self {
        Self { free: vec![0; count.max(1)], busy: 0 }
    }

    pub(super) fn count(&self) -> usize {
        self.free.len()
    }

    /// Works for `span` on the core that is free first; when that is done.
    pub(super) fn work(&mut self, from: Nanos, span: Nanos) -> Nanos {
        let core = self.free.iter_mut().min().expect("at least one core");
        *core = from.max(*core) + span;
        self.busy += span;
        *core
    }
}

/// How long so many bytes take at a rate.
pub(super) fn at_rate(bytes: u64, bytes_per_ns: f64) -> Nanos {
    round(bytes as f64 / bytes_per_ns)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nic() -> (Responder, Prices) {
        let profile = Profile::named("cx5-100g").unwrap();
        (Responder::new(&profile), Prices::of(&profile))
    }

    #[test]
    fn atomics_on_one_hot_word_block_the_whole_nic() {
        let (mut nic, prices) = nic();
        let idle = nic.admit(0, Access::Main, &prices);
        assert_eq!(idle, 20_000, "a verb holds its unit for 20 ns");
        for n in 1..=16 {
            assert_eq!(nic.admit(100_000, Access::AtomicMain(64), &prices), 120_000 + n * 400_000);
        }
        let stranger = nic.admit(110_000, Access::Main, &prices);
        assert_eq!(stranger, 520_000 + 20_000, "all units wait for the word; the first is free after 400 ns");
    }

    #[test]
    fn buckets_are_the_low_twelve_bits() {
        let (mut nic, prices) = nic();
        let first = nic.admit(0, Access::AtomicMain(8), &prices);
        assert_eq!(nic.admit(0, Access::AtomicMain(16), &prices), first, "another bucket, at the same time");
        assert_eq!(nic.admit(0, Access::AtomicMain(8 + 4096), &prices), first + 400_000, "the same bucket");
    }

    #[test]
    fn on_chip_atomics_queue_for_their_word_and_pass_each_other_elsewhere() {
        let (mut nic, prices) = nic();
        let first = nic.admit(0, Access::AtomicOnChip(8), &prices);
        assert_eq!(first, 145_000);
        assert_eq!(nic.admit(0, Access::AtomicOnChip(8), &prices), first + 125_000, "the same word");
        assert_eq!(nic.admit(0, Access::AtomicOnChip(16), &prices), first, "another word, at the same time");
        assert_eq!(
            nic.admit(0, Access::OnChip, &prices),
            20_000,
            "a READ or WRITE beside them does not wait"
        );
    }

    #[test]
    fn work_goes_to_the_core_that_is_free_first() {
        let mut cores = Cores::new(2);
        assert_eq!(
            [cores.work(0, 10), cores.work(0, 30), cores.work(0, 10), cores.work(25, 1)],
            [10, 30, 20, 26]
        );
    }
}
