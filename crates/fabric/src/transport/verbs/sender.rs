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
use super::plan::{Kind, Memory, Plan, Request};
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

/// A plan under way.
#[derive(Debug)]
struct Job {
    tag: usize,
    requests: SmallVec<[Request; 2]>,
    /// How many of them are posted.
    posted: usize,
    /// The number of the last one that is.
    last: u64,
    /// How the device knows each verb's memory.
    keys: SmallVec<[u32; 2]>,
    /// Of memory that it did not know; before the memory, so that the device forgets it first.
    registrations: Vec<Registration>,
    memory: SmallVec<[Memory; 2]>,
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
    /// When jobs were first seen to be under way, since the last completion.
    waiting_since: Option<Nanos>,
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
            waiting_since: None,
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

    /// Since when nothing has completed though something should, as of the last time it was asked.
    pub(super) fn waiting_since(&self) -> Option<Nanos> {
        self.waiting_since
    }

    /// The same, now.
    pub(super) fn is_waiting_since(&mut self, now: Nanos) -> Option<Nanos> {
        self.waiting_since = (!self.jobs.is_empty()).then(|| self.waiting_since.unwrap_or(now));
        self.waiting_since
    }

    /// Posts a plan, as far as there is room. `Ok(false)`: the queue pair has failed, and has to be ended.
    pub(super) fn post(&mut self, plan: Plan, tag: usize) -> Result<bool, FabricError> {
        let (mut keys, mut registrations) = (SmallVec::new(), Vec::new());
        for memory in &plan.memory {
            keys.push(self.key(memory, &mut registrations)?);
        }
        self.jobs.push_back(Job {
            tag,
            requests: plan.requests,
            posted: 0,
            last: 0,
            keys,
            registrations,
            memory: plan.memory,
        });
        Ok(self.pump())
    }

    /// Finds the key of a verb's memory; registers it if it has none.
    fn key(&self, memory: &Memory, registrations: &mut Vec<Registration>) -> Result<u32, FabricError> {
        match memory {
            Memory::Inline(_) => Ok(0),
            Memory::Shared(buf) => {
                let key = buf.local_key(&self.registrar);
                key.ok_or(FabricError::CannotRegister { bytes: buf.memory().len() })
            }
            Memory::Source(buf) | Memory::Landing(buf) | Memory::Word(buf) => {
                if let Some(key) = buf.local_key(self.registrar.domain()) {
                    return Ok(key);
                }
                // SAFETY: the registration goes before the memory, by the order of fields in `Job`; or, if there comes to be no
                // job, before the plan.
                let registration = unsafe { self.registrar.register(buf.base(), buf.len()) };
                let registration = registration.ok_or(FabricError::CannotRegister { bytes: buf.len() })?;
                let key = registration.key();
                registrations.push(registration);
                Ok(key)
            }
        }
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
        for request in &job.requests[job.posted..job.posted + part] {
            *posted += 1;
            let (place, flags) =
                local(request, &mut job.memory, &job.keys, queue.depth().inline_bytes as usize);
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
        // SAFETY: the list was linked just now. Every place lies within the job's memory (checked in `local`) or is inline; the
        // memory is ours until the completion (`completed`) or until the queue pair is gone (`end`, `drop`).
        unsafe { queue.post(first) }
    }

    /// All requests up to this number have completed: `done` gets the tag and the memory of each job that ends with that. False if the
    /// queue pair has failed.
    pub(super) fn completed(
        &mut self,
        number: u64,
        mut done: impl FnMut(usize, SmallVec<[Memory; 2]>),
    ) -> bool {
        self.completed = self.completed.max(number.min(self.posted));
        self.waiting_since = None;
        while let Some(job) = self.jobs.front() {
            if job.posted < job.requests.len() || job.last > self.completed {
                break;
            }
            if let Some(Job { tag, registrations, memory, .. }) = self.jobs.pop_front() {
                drop(registrations);
                done(tag, memory);
            }
        }
        self.pump()
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
fn local(request: &Request, memory: &mut [Memory], keys: &[u32], inline_bytes: usize) -> (sys::Sge, u32) {
    let (base, bytes) = match &mut memory[request.verb] {
        Memory::Inline(bytes) => (NonNull::from(&mut *bytes).cast::<u8>(), bytes.len()),
        Memory::Source(buf) | Memory::Landing(buf) | Memory::Word(buf) => (buf.base(), buf.len()),
        Memory::Shared(buf) => (buf.memory().base(), buf.memory().len()),
    };
    let Request { at, len, .. } = *request;
    assert!(len <= bytes && at <= bytes - len, "a request goes beyond its buffer");
    let place = sys::Sge {
        addr: (base.as_ptr().expose_provenance() + at) as u64,
        length: u32::try_from(len).expect("a message is shorter than 4 GiB"),
        lkey: keys[request.verb],
    };
    let is_short = request.kind == Kind::Write && len <= inline_bytes;
    (place, if is_short { sys::SEND_INLINE } else { 0 })
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
