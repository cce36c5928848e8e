//! A queue pair with the requests that are under way on it.
//!
//! The device reads and writes the memory of a request until it has completed, however little anybody still cares about it. So a
//! request's memory is *here* until then: it comes with the plan, and is given back with the completion, or when the device has
//! confirmed that the queue pair is gone. If it does not confirm that, the memory is never used again.
//!
//! A plan goes out as one linked list, of which the last request is signaled; one that is longer than the queue goes out in
//! parts. Requests are numbered from 1; the completion of a number means that all before it have completed.

use super::device::Domain;
use super::memory::LocalMemory;
use super::plan::{Kind, Local, Memory, Plan, Request};
use super::queue::QueuePair;
use super::sys;
use crate::addr::RegionId;
use crate::buf::{Registrar, Registration};
use crate::clock::Nanos;
use crate::error::FabricError;
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::Arc;

/// Where a region of the server is, to its device.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct FarRegion {
    pub(super) base: u64,
    pub(super) key: u32,
}

/// All of them, by number.
pub(super) type FarRegions = [FarRegion; RegionId::MAX as usize + 1];

/// Memory of a verb, and how the device knows it.
#[derive(Debug)]
struct Cargo {
    key: u32,
    /// Of what is not registered otherwise; before the memory, so that the device forgets it first.
    _registration: Option<Registration>,
    memory: Memory,
}

/// A plan under way.
#[derive(Debug)]
struct Job {
    tag: usize,
    requests: SmallVec<[Request; 4]>,
    /// How many of them are posted.
    posted: usize,
    /// The number of the last one that is.
    last: u64,
    cargo: SmallVec<[Cargo; 2]>,
    since: Nanos,
}

/// A job that the device has done with.
#[derive(Debug)]
pub(super) struct Done {
    pub(super) tag: usize,
    pub(super) memory: SmallVec<[Memory; 2]>,
}

/// A queue pair that sends.
#[derive(Debug)]
pub(super) struct Sender {
    jobs: VecDeque<Job>,
    queue: QueuePair,
    regions: FarRegions,
    registrar: LocalMemory,
    /// How many requests may be under way.
    room: u64,
    posted: u64,
    completed: u64,
    list: Vec<sys::SendWr>,
    places: Vec<sys::Sge>,
}

impl Sender {
    pub(super) fn new(domain: &Arc<Domain>, queue: QueuePair, room: u32, regions: FarRegions) -> Self {
        Self {
            jobs: VecDeque::new(),
            queue,
            regions,
            registrar: LocalMemory(Arc::clone(domain)),
            room: u64::from(room),
            posted: 0,
            completed: 0,
            list: Vec::new(),
            places: Vec::new(),
        }
    }

    pub(super) fn queue(&self) -> &QueuePair {
        &self.queue
    }

    pub(super) fn is_idle(&self) -> bool {
        self.jobs.is_empty()
    }

    /// Since when the oldest job is under way.
    pub(super) fn oldest(&self) -> Option<Nanos> {
        self.jobs.front().map(|job| job.since)
    }

    /// Posts a plan, as far as there is room. `Ok(false)`: the queue pair has failed, and has to be ended.
    pub(super) fn post(&mut self, plan: Plan, tag: usize, since: Nanos) -> Result<bool, FabricError> {
        let cargo = plan.memory.into_iter().map(|memory| self.load(memory)).collect::<Result<_, _>>()?;
        self.jobs.push_back(Job { tag, requests: plan.requests, posted: 0, last: 0, cargo, since });
        Ok(self.pump())
    }

    /// Finds the key of a verb's memory; registers it if it has none.
    fn load(&self, memory: Memory) -> Result<Cargo, FabricError> {
        let (key, base, bytes) = match &memory {
            Memory::None => (Some(0), NonNull::dangling(), 0),
            Memory::Owned(buf) => (buf.local_key(self.registrar.domain()), buf.base(), buf.len()),
            Memory::Shared(buf) => {
                let key = buf.local_key(&self.registrar);
                let key = key.ok_or(FabricError::CannotRegister { bytes: buf.memory().len() })?;
                (Some(key), buf.memory().base(), buf.memory().len())
            }
        };
        if let Some(key) = key {
            return Ok(Cargo { key, _registration: None, memory });
        }
        // SAFETY: the registration goes before the memory, by the order of fields.
        let registration = unsafe { self.registrar.register(base, bytes) };
        let registration = registration.ok_or(FabricError::CannotRegister { bytes })?;
        Ok(Cargo { key: registration.key(), _registration: Some(registration), memory })
    }

    /// Posts what has not been, as far as there is room; false if the queue pair has failed.
    fn pump(&mut self) -> bool {
        let first = self.jobs.iter().rposition(|job| job.posted == job.requests.len()).map_or(0, |n| n + 1);
        for n in first..self.jobs.len() {
            let left = self.jobs[n].requests.len() - self.jobs[n].posted;
            let free = usize::try_from(self.room - (self.posted - self.completed)).unwrap_or(0);
            let part = left.min(free);
            if part == 0 {
                break;
            }
            if !self.post_part(n, part) {
                return false;
            }
            if part < left {
                break;
            }
        }
        true
    }

    /// Posts the next `part` requests of job `n` as one list.
    fn post_part(&mut self, n: usize, part: usize) -> bool {
        let Self { jobs, regions, list, places, posted, queue, .. } = self;
        let job = &mut jobs[n];
        list.clear();
        places.clear();
        for request in &mut job.requests[job.posted..job.posted + part] {
            *posted += 1;
            let (place, flags) = local(request, &mut job.cargo, queue.depth().inline_bytes as usize);
            places.push(place);
            list.push(described(request, regions, *posted, flags));
        }
        job.posted += part;
        job.last = *posted;
        if let Some(last) = list.last_mut() {
            last.send_flags |= sys::SEND_SIGNALED;
        }
        let (mut next, mut place) = (std::ptr::null_mut(), places.as_mut_ptr_range().end);
        for request in list.iter_mut().rev() {
            place = place.wrapping_sub(1);
            (request.next, request.sg_list, request.num_sge) = (next, place, 1);
            next = &raw mut *request;
        }
        let Some(first) = list.first_mut() else { return true };
        // SAFETY: the list was linked just now. Every place lies within the job's cargo (checked in `local`) or is inline; the
        // cargo is ours until the completion (`completed`) or until the queue pair is gone (`end`, `drop`).
        unsafe { queue.post(first) }
    }

    /// All requests up to this number have completed; what that ends. `None`: the queue pair has failed.
    pub(super) fn completed(&mut self, number: u64) -> Option<SmallVec<[Done; 2]>> {
        self.completed = self.completed.max(number.min(self.posted));
        let mut done = SmallVec::new();
        while let Some(job) = self.jobs.front() {
            if job.posted < job.requests.len() || job.last > self.completed {
                break;
            }
            if let Some(job) = self.jobs.pop_front() {
                let memory = job.cargo.into_iter().map(|cargo| cargo.memory).collect();
                done.push(Done { tag: job.tag, memory });
            }
        }
        self.pump().then_some(done)
    }

    /// Ends the queue pair. What was under way, by its tag, and whether any of it was posted.
    pub(super) fn end(&mut self) -> Vec<(usize, bool)> {
        let is_gone = self.queue.end();
        let ended = self.jobs.drain(..).map(|job| {
            let what = (job.tag, job.posted > 0);
            if !is_gone {
                std::mem::forget(job);
            }
            what
        });
        ended.collect()
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        self.end();
    }
}

/// Where a request's bytes are on our side, and the flag that goes with it.
fn local(request: &mut Request, cargo: &mut [Cargo], inline_bytes: usize) -> (sys::Sge, u32) {
    let length = |len: usize| u32::try_from(len).expect("a message is shorter than 4 GiB");
    match &request.local {
        Local::Inline { bytes, from, len } => {
            let bytes = &bytes[usize::from(*from)..usize::from(*from) + usize::from(*len)];
            let place = sys::Sge {
                addr: bytes.as_ptr().expose_provenance() as u64,
                length: length(bytes.len()),
                lkey: 0,
            };
            (place, sys::SEND_INLINE)
        }
        Local::Part { verb, at, len } => {
            let cargo = &mut cargo[*verb];
            let (base, bytes) = match &mut cargo.memory {
                Memory::None => unreachable!("only inline bytes have no memory"),
                Memory::Owned(buf) => (buf.base(), buf.len()),
                Memory::Shared(buf) => (buf.memory().base(), buf.memory().len()),
            };
            assert!(*len <= bytes && *at <= bytes - *len, "a request goes beyond its buffer");
            let place = sys::Sge {
                addr: (base.as_ptr().expose_provenance() + at) as u64,
                length: length(*len),
                lkey: cargo.key,
            };
            let is_short = request.kind == Kind::Write && *len <= inline_bytes;
            (place, if is_short { sys::SEND_INLINE } else { 0 })
        }
    }
}

/// The request as the device wants it.
fn described(request: &Request, regions: &FarRegions, number: u64, flags: u32) -> sys::SendWr {
    let region = regions[usize::from(request.addr.region().get())];
    let mut wr = sys::SendWr::zeroed();
    wr.wr_id = number;
    wr.send_flags = flags | if request.is_fenced { sys::SEND_FENCE } else { 0 };
    wr.remote_addr = region.base + request.addr.offset();
    match request.kind {
        Kind::Read => {
            (wr.opcode, wr.compare_add_or_rkey) = (sys::WR_RDMA_READ, u64::from(region.key).to_le());
        }
        Kind::Write => {
            (wr.opcode, wr.compare_add_or_rkey) = (sys::WR_RDMA_WRITE, u64::from(region.key).to_le());
        }
        Kind::Cas { expected, desired } => {
            (wr.opcode, wr.atomic_rkey) = (sys::WR_ATOMIC_CMP_AND_SWP, region.key);
            (wr.compare_add_or_rkey, wr.swap) = (expected, desired);
        }
        Kind::Faa { add } => {
            (wr.opcode, wr.atomic_rkey) = (sys::WR_ATOMIC_FETCH_AND_ADD, region.key);
            wr.compare_add_or_rkey = add;
        }
    }
    wr
}
