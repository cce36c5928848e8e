//! How procedures on a memory server take part in its device's atomics.
//!
//! A device's atomics and a processor's do not mix: each may overwrite what the other is about to change. So a procedure's atomics,
//! and all it does in lock memory (which may be on the device), go through a queue pair from the device to itself. One word or
//! one page at a time, waited for on the spot: that takes as long as the device takes, and procedures use few of them.

use super::device::Domain;
use super::dock::{Offered, RegionKey};
use super::error::VerbsError;
use super::mailbox::{Mailbox, SLOT_BYTES};
use super::queue::{CompletionQueue, Depth, PortAddress, QueuePair};
use super::sys;
use crate::addr::{GlobalAddr, ServerId};
use crate::clock::{Nanos, RealClock, SECOND};
use crate::error::FabricError;
use crate::exec::lock;
use crate::region::Permissions;
use std::fmt;
use std::sync::{Arc, Mutex};

/// How long the device may take.
const PATIENCE_NS: Nanos = 5 * SECOND;
/// The slot of the mailbox that bytes pass through.
const SLOT: usize = 0;

/// The way from a server's processor to its memory by its device.
pub(crate) struct Loopback {
    /// `None` after a failure; it is made again when it is next needed.
    pair: Mutex<Option<Pair>>,
    offered: Arc<Offered>,
    domain: Arc<Domain>,
    server: ServerId,
    clock: RealClock,
}

/// Both ends.
#[derive(Debug)]
struct Pair {
    near: QueuePair,
    _far: QueuePair,
    completions: Arc<CompletionQueue>,
    mailbox: Arc<Mailbox>,
}

impl Pair {
    fn new(domain: &Arc<Domain>) -> Result<Self, VerbsError> {
        let completions = CompletionQueue::new(domain.context(), 16)?;
        let mailbox = Mailbox::new(domain)?;
        let depth = Depth { sends: 4, receives: 1, inline_bytes: 0 };
        let make =
            || QueuePair::new(domain, &completions, depth, fastrand::u32(..), Some(Arc::clone(&mailbox)));
        let (near, far) = (make()?, make()?);
        let address = PortAddress::of(domain, [&near, &far].into_iter());
        far.connect(&address, near.end_point(), Permissions::ALL)?;
        near.connect(&address, far.end_point(), Permissions::NONE)?;
        Ok(Self { near, _far: far, completions, mailbox })
    }
}

impl Loopback {
    pub(super) fn new(
        domain: &Arc<Domain>,
        offered: &Arc<Offered>,
        server: ServerId,
    ) -> Result<Self, VerbsError> {
        let pair = Mutex::new(Some(Pair::new(domain)?));
        let (domain, offered) = (Arc::clone(domain), Arc::clone(offered));
        Ok(Self { pair, offered, domain, server, clock: RealClock::new() })
    }

    /// CAS; the word as it was.
    pub(crate) fn cas(&self, addr: GlobalAddr, expected: u64, desired: u64) -> Result<u64, FabricError> {
        self.atomic(addr, sys::WR_ATOMIC_CMP_AND_SWP, expected, desired)
    }

    /// FAA; the word as it was.
    pub(crate) fn faa(&self, addr: GlobalAddr, add: u64) -> Result<u64, FabricError> {
        self.atomic(addr, sys::WR_ATOMIC_FETCH_AND_ADD, add, 0)
    }

    fn atomic(&self, addr: GlobalAddr, opcode: u32, first: u64, swap: u64) -> Result<u64, FabricError> {
        let mut word = [0; 8];
        self.run(
            addr,
            8,
            |request, key| {
                (request.opcode, request.atomic_rkey) = (opcode, key);
                (request.compare_add_or_rkey, request.swap) = (first, swap);
            },
            &[],
            &mut word,
        )?;
        Ok(u64::from_ne_bytes(word))
    }

    /// READ, page by page.
    pub(crate) fn read(&self, addr: GlobalAddr, into: &mut [u8]) -> Result<(), FabricError> {
        for (n, part) in into.chunks_mut(SLOT_BYTES).enumerate() {
            let describe = |request: &mut sys::SendWr, key: u32| {
                (request.opcode, request.compare_add_or_rkey) = (sys::WR_RDMA_READ, u64::from(key));
            };
            self.run(later(addr, n), part.len(), describe, &[], part)?;
        }
        Ok(())
    }

    /// WRITE, page by page.
    pub(crate) fn write(&self, addr: GlobalAddr, from: &[u8]) -> Result<(), FabricError> {
        for (n, part) in from.chunks(SLOT_BYTES).enumerate() {
            let describe = |request: &mut sys::SendWr, key: u32| {
                (request.opcode, request.compare_add_or_rkey) = (sys::WR_RDMA_WRITE, u64::from(key));
            };
            self.run(later(addr, n), part.len(), describe, part, &mut [])?;
        }
        Ok(())
    }

    /// Posts one request with `out` as its bytes, waits for it, and takes what it brought.
    fn run(
        &self,
        addr: GlobalAddr,
        bytes: usize,
        describe: impl Fn(&mut sys::SendWr, u32),
        out: &[u8],
        back: &mut [u8],
    ) -> Result<(), FabricError> {
        let unknown = || FabricError::Unknown { server: self.server };
        let known = self.offered.keys().iter().find(|known| known.region == addr.region());
        let Some(RegionKey { base, key, .. }) = known.copied() else {
            return Err(FabricError::UnknownRegion { server: self.server, region: addr.region() });
        };
        let mut pair = lock(&self.pair);
        if pair.is_none() {
            *pair =
                Some(Pair::new(&self.domain).map_err(|_| FabricError::Disconnected { server: self.server })?);
        }
        let Some(Pair { near, completions, mailbox, .. }) = &*pair else { return Err(unknown()) };
        mailbox.put(SLOT, out);
        let mut place = mailbox.place(SLOT);
        place.length = u32::try_from(bytes).unwrap_or(0);
        let mut request = sys::SendWr::zeroed();
        (request.sg_list, request.num_sge) = (&raw mut place, 1);
        (request.send_flags, request.remote_addr) = (sys::SEND_SIGNALED, base + addr.offset());
        describe(&mut request, key);
        // SAFETY: one request; its bytes are a slot of the mailbox, which the queue pair holds until it is destroyed and which is made
        // to be raced on.
        let mut is_fine = unsafe { near.post(&raw mut request) };
        let begun = self.clock.now();
        let mut done = false;
        while is_fine && !done {
            let polled = completions.poll(|completion| {
                done = true;
                is_fine &= completion.is_success();
            });
            is_fine &= polled.is_ok() && self.clock.now() - begun < PATIENCE_NS;
            if !done {
                std::thread::yield_now();
            }
        }
        if is_fine {
            back.copy_from_slice(&mailbox.take(SLOT, place.length)[..back.len()]);
            return Ok(());
        }
        tracing::error!("the RDMA device does not carry out a procedure's verb");
        *pair = None;
        Err(unknown())
    }
}

fn later(addr: GlobalAddr, pages: usize) -> GlobalAddr {
    if pages == 0 { addr } else { addr.add((pages * SLOT_BYTES) as u64) }
}

impl fmt::Debug for Loopback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Loopback({})", self.domain.device())
    }
}
