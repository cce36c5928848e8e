//! The cost model: what verbs, calls and computation take on named hardware, in virtual time.
//!
//! A verb's way, and what it may have to wait for (all of it first come, first served):
//!
//! 1. the client's thread, which posts it (`compute.post_ns`);
//! 2. the client's NIC, outward: the longer of `nic.message_ns` and the bytes with their header at the link's rate;
//! 3. half a round trip on the wire; then the server's NIC, inward, for the same time (they overlap: a message is forwarded
//!    while it comes in);
//! 4. one of the server NIC's processing units, and with it PCIe, or the bucket of an atomic (`nic`);
//! 5. **the effect**: atomics in one instant, READs and WRITEs over the time of their DMA;
//! 6. the server's NIC outward, half a round trip, the client's NIC inward, with the answer;
//! 7. the client's thread, which polls the completion (`compute.poll_ns`).
//!
//! Verbs of one batch are messages of their own that follow each other without waiting, and take effect in order. A fence
//! makes what follows wait at the client until the answer to what precedes it is in: one more round trip. A call takes
//! the NICs both ways and a core of the server in between; a procedure's accesses and charged work take a core, for at most a slice at a
//! time, so that long ones do not keep short ones waiting.
//!
//! Most numbers come from a prototype that was fitted to FG+ in Sherman's Table 1; `docs/cost-model.md` says what is known, fitted
//! and assumed, and where the limits are.

mod nic;
mod profile;
mod usage;

pub(super) use nic::Access;
pub use profile::{BadProfile, Profile};
pub(super) use profile::{Picos, round};
pub use usage::{NicUsage, ServerUsage, Usage};

use super::world::server_of;
use crate::clock::Nanos;
use crate::exec::{DRIVER, GroupId};
use crate::work::Work;
use fastrand::Rng;
use nic::{Cores, Nic, Prices, Responder, at_rate};

/// Which machine each client process and each memory server has.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Placement {
    /// Every client process and every memory server has a machine, and so a NIC, of its own.
    #[default]
    Separate,
    /// Client process `i` runs on the machine of memory server `i` modulo the number of servers, and shares its NIC. Verbs to
    /// the own machine go through the NIC like all others. (Sherman 5.1 and Sphinx do so to save machines.)
    Shared,
}

/// A world's prices, as its configuration names them.
#[derive(Clone, PartialEq, Debug)]
pub struct Pricing {
    /// The hardware.
    pub profile: Profile,
    /// Who shares a NIC with whom.
    pub placement: Placement,
}

/// Where computation takes place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Thread {
    /// An endpoint's own.
    Own(usize),
    /// A core of this server's.
    Server(usize),
}

/// Everything that can be waited for.
#[derive(Debug)]
pub(super) struct Cost {
    pricing: Pricing,
    prices: Prices,
    /// The servers' first, then the driver's, then the client processes'.
    nics: Vec<Nic>,
    servers: Vec<(Responder, Cores)>,
    /// When the threads are free again.
    threads: Vec<Nanos>,
    rng: Rng,
}

/// The first whole nanosecond that is not before.
#[inline]
pub(super) fn ceil(at: Picos) -> Nanos {
    at.div_ceil(1000)
}

impl Cost {
    /// `cores`: how many cores each server has.
    pub(super) fn new(pricing: Pricing, cores: impl Iterator<Item = usize>, seed: u64) -> Self {
        let profile = &pricing.profile;
        let servers: Vec<_> = cores.map(|cores| (Responder::new(profile), Cores::new(cores))).collect();
        Self {
            prices: Prices::of(profile),
            nics: vec![Nic::default(); servers.len() + 1],
            servers,
            threads: Vec::new(),
            rng: Rng::with_seed(seed ^ 0xc057_c057),
            pricing,
        }
    }

    /// The NIC of a process.
    pub(super) fn nic_of(&mut self, group: GroupId) -> usize {
        let servers = self.servers.len();
        if group == DRIVER {
            return servers;
        }
        if let Some(server) = server_of(group).filter(|server| *server < servers) {
            return server;
        }
        let client = group as usize - 1;
        let nic = match self.pricing.placement {
            Placement::Separate => servers + 1 + client,
            Placement::Shared => client % servers.max(1),
        };
        if nic >= self.nics.len() {
            self.nics.resize(nic + 1, Nic::default());
        }
        nic
    }

    pub(super) fn new_thread(&mut self) -> Thread {
        self.threads.push(0);
        Thread::Own(self.threads.len() - 1)
    }

    // --- messages ---

    /// One way between two machines, of which one is slow by a factor.
    pub(super) fn one_way(&self, slowness: u64) -> Nanos {
        self.prices.one_way / 1000 * slowness
    }

    /// A NIC sends a message that is ready at `from`; when its first byte reaches the other NIC.
    #[inline]
    pub(super) fn send(&mut self, nic: usize, from: Picos, bytes: u64, slowness: u64) -> Picos {
        let service = self.prices.message(bytes);
        self.nics[nic].out.serve(from, service) - service + self.prices.one_way * slowness
    }

    /// When a message that `reaches` a NIC is to ask for its service: not before enough of it is there.
    #[inline]
    pub(super) fn asks(&self, reaches: Picos, bytes: u64) -> Picos {
        self.asks_for(reaches, self.prices.message(bytes))
    }

    /// The same, by the service.
    #[inline]
    pub(super) fn asks_for(&self, reaches: Picos, service: Picos) -> Picos {
        reaches + self.prices.arrival(service)
    }

    /// A NIC takes in a message; when it has all of it.
    #[inline]
    pub(super) fn receive(&mut self, nic: usize, reaches: Picos, bytes: u64) -> Picos {
        self.nics[nic].inward.serve(reaches, self.prices.message(bytes))
    }

    /// What messages of these sizes take of a lane.
    #[inline]
    pub(super) fn message(&self, bytes: u64) -> Picos {
        self.prices.message(bytes)
    }

    /// A NIC takes in several messages, of which the last `reaches` it, for `service` in all.
    #[inline]
    pub(super) fn receive_all(&mut self, nic: usize, reaches: Picos, last: Picos, service: Picos) -> Picos {
        self.nics[nic].inward.serve((reaches + last).saturating_sub(service), service)
    }

    // --- verbs at the server ---

    /// The earliest time at which a verb asks for what it needs at the server.
    #[inline]
    pub(super) fn verb_asks(&self, reaches: Picos, bytes: u64) -> Nanos {
        ceil(self.asks(reaches, bytes) + self.prices.shortest())
    }

    /// A request reaches a server's NIC; when its verb takes effect.
    #[inline]
    pub(super) fn admit(&mut self, server: usize, reaches: Picos, bytes: u64, access: Access) -> Picos {
        let received = self.receive(server, reaches, bytes);
        self.servers[server].0.admit(received, access, &self.prices)
    }

    /// How long the effects of a verb spread.
    pub(super) fn dma(&self, bytes: u64) -> Nanos {
        self.prices.dma(bytes)
    }

    // --- computation ---

    /// What a piece of work takes.
    pub(super) fn work(&mut self, thread: Thread, work: Work) -> Nanos {
        let profile = &self.pricing.profile;
        let rate = match thread {
            Thread::Own(_) => profile.compute_bytes_per_ns,
            Thread::Server(_) => profile.server_bytes_per_ns,
        };
        let ns = match work {
            Work::Operation => profile.operation_ns,
            Work::Bytes(bytes) => at_rate(bytes, rate),
            Work::Call => profile.call_ns,
            Work::Nanos(ns) => return ns,
        };
        let off = profile.spread * (2.0 * self.rng.f64() - 1.0);
        round(ns as f64 * (1.0 + off))
    }

    /// The longest piece of work that a thread does at a stretch.
    pub(super) fn slice(&self, thread: Thread) -> Nanos {
        match thread {
            Thread::Own(_) => Nanos::MAX,
            Thread::Server(_) => self.pricing.profile.slice_ns,
        }
    }

    /// Works on a thread; when that is done.
    pub(super) fn occupy(&mut self, thread: Thread, from: Nanos, span: Nanos) -> Nanos {
        match thread {
            Thread::Own(n) => {
                self.threads[n] = from.max(self.threads[n]) + span;
                self.threads[n]
            }
            Thread::Server(server) => self.servers[server].1.work(from, span),
        }
    }

    /// A thread rings a doorbell; when. Whoever posts is running: it does not queue behind work that has yet to begin, but delays it.
    #[inline]
    pub(super) fn post(&mut self, thread: Thread, now: Nanos) -> Nanos {
        let span = self.pricing.profile.post_ns;
        self.occupy(thread, now, span);
        now + span
    }

    /// A thread finds a completion; when.
    #[inline]
    pub(super) fn poll(&mut self, thread: Thread, at: Nanos) -> Nanos {
        self.occupy(thread, at, self.pricing.profile.poll_ns)
    }

    /// A core takes up a call; when it has run.
    pub(super) fn call(&mut self, server: usize, from: Nanos) -> Nanos {
        self.servers[server].1.work(from, self.pricing.profile.call_ns)
    }

    /// A procedure touches the memory beside it; when it begins to, and when it is done.
    pub(super) fn access(&mut self, server: usize, now: Nanos, bytes: u64) -> (Nanos, Nanos) {
        let profile = &self.pricing.profile;
        let copy = at_rate(bytes, profile.server_bytes_per_ns).max(1);
        let done = self.servers[server].1.work(now, profile.access_ns + copy);
        (done - copy, done)
    }

    /// How busy everything has been.
    pub(super) fn usage(&self, now: Nanos) -> Usage {
        let nic = |nic: &Nic| NicUsage { in_ns: nic.inward.busy / 1000, out_ns: nic.out.busy / 1000 };
        let server = |(n, (responder, cores)): (usize, &(Responder, Cores))| ServerUsage {
            nic: nic(&self.nics[n]),
            units_ns: responder.units_busy / 1000,
            units: self.pricing.profile.units,
            pcie_ns: responder.pcie_busy() / 1000,
            atomics_ns: responder.atomics_busy / 1000,
            cores_ns: cores.busy,
            cores: cores.count(),
        };
        Usage {
            span_ns: now,
            servers: self.servers.iter().enumerate().map(server).collect(),
            clients: self.nics[self.servers.len() + 1..].iter().map(nic).collect(),
        }
    }
}
