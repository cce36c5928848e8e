//! A queue pair with the requests that are under way on it.
//!
//! The device reads and writes the memory of a request until it has completed, however little anybody still cares about it. So a
//! request's memory is *here* until then: it comes with the batch, and is given back with the completion, or when the device has
//! confirmed that the queue pair is gone. If it does not confirm that, the memory is never used again.
//!
//! A batch goes out as one linked list, of which the last request is signaled; one that is longer than the queue goes out in
//! parts. Requests are numbered from 1; the completion of a number means that all before it have completed. So batches, verbs and
//! requests are queues: what is under way is what stands between their ends, and a batch of one verb costs little.

use super::device::Domain;
use super::memory::LocalMemory;
use super::plan::{Kind, Limits, Memory, Request, plan};
use super::queue::QueuePair;
use super::sys;
use crate::addr::RegionId;
use crate::buf::{Buf, BufPool, Registrar, Registration};
use crate::clock::Nanos;
use crate::error::FabricError;
use crate::verb::{Batch, Fences, Output, Verb};
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

/// A batch under way.
#[derive(Clone, Copy, Debug)]
struct Job {
    tag: usize,
    /// How many verbs it has: the memory of as many is its own.
    verbs: usize,
    /// The numbers of the request before its first one, and of its last one.
    before: u64,
    last: u64,
}

/// A verb's memory and how the device knows it.
#[derive(Debug)]
struct Held {
    memory: Memory,
    key: u32,
}

/// What a batch has brought, by verb.
pub(super) type Outputs = SmallVec<[Output; 2]>;

/// A request as it is handed over, with the one place on our side that it names.
#[derive(Debug)]
struct Handed {
    request: sys::SendWr,
    place: sys::Sge,
}

/// A queue pair that sends.
#[derive(Debug)]
pub(super) struct Sender {
    /// In the order in which they complete, as all that follows.
    jobs: VecDeque<Job>,
    /// Of memory that the device did not know, by the number of the verb; before the memory, so that the device forgets it first.
    registrations: VecDeque<(u64, Registration)>,
    /// Of the verbs under way.
    memory: VecDeque<Held>,
    /// Requests that are not posted.
    waiting: VecDeque<Request>,
    queue: QueuePair,
    regions: FarRegions,
    registrar: LocalMemory,
    limits: Limits,
    /// How many requests may be under way.
    room: u64,
    posted: u64,
    completed: u64,
    /// How many verbs have completed: the number of the first in `memory`.
    verbs_done: u64,
    /// When jobs were first seen to be under way, since the last completion.
    waiting_since: Option<Nanos>,
    /// Used again for every list, so that few fields have to be written.
    list: Vec<Handed>,
}

impl Sender {
    pub(super) fn new(
        domain: &Arc<Domain>,
        queue: QueuePair,
        room: u32,
        limits: Limits,
        regions: FarRegions,
    ) -> Self {
        Self {
            jobs: VecDeque::new(),
            registrations: VecDeque::new(),
            memory: VecDeque::new(),
            waiting: VecDeque::new(),
            queue,
            regions,
            registrar: LocalMemory(Arc::clone(domain)),
            limits,
            room: u64::from(room),
            posted: 0,
            completed: 0,
            verbs_done: 0,
            waiting_since: None,
            list: Vec::new(),
        }
    }

    pub(super) fn queue(&self) -> &QueuePair {
        &self.queue
    }

    pub(super) fn is_idle(&self) -> bool {
        self.jobs.is_empty()
    }

    /// How many batches are under way.
    pub(super) fn batches(&self) -> usize {
        self.jobs.len()
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

    /// Posts a checked batch, as far as there is room. `Ok(false)`: the queue pair has failed, and has to be ended. An error: nothing
    /// was posted.
    #[inline]
    pub(super) fn post(
        &mut self,
        batch: &mut Batch,
        pool: &BufPool,
        tag: usize,
    ) -> Result<bool, FabricError> {
        let (verbs, had, before) = (batch.len(), self.memory.len(), self.planned());
        let had_waiting = self.waiting.len();
        let mut fences = Fences::default();
        for verb in &mut batch.verbs {
            if let Err(error) = self.take_up(verb, &mut fences, pool) {
                self.waiting.truncate(had_waiting);
                let begun = self.verbs_done + had as u64;
                self.registrations.truncate(self.registrations.partition_point(|(n, _)| *n < begun));
                self.memory.truncate(had);
                return Err(error);
            }
        }
        if let Some(last) = self.waiting.back_mut() {
            last.is_last = true;
        }
        self.jobs.push_back(Job { tag, verbs, before, last: self.planned() });
        Ok(self.pump())
    }

    /// The number of the last request that there is, posted or not.
    fn planned(&self) -> u64 {
        self.posted + self.waiting.len() as u64
    }

    #[inline]
    fn take_up(&mut self, verb: &mut Verb, fences: &mut Fences, pool: &BufPool) -> Result<(), FabricError> {
        let n = self.verbs_done + self.memory.len() as u64;
        let memory = plan(verb, n, fences, pool, self.limits, &mut self.waiting)?;
        let key = match &memory {
            Memory::Inline(_) => 0,
            Memory::Shared(buf) => {
                let key = buf.local_key(&self.registrar);
                key.ok_or_else(|| FabricError::CannotRegister { bytes: buf.memory().len() })?
            }
            Memory::Source(buf) | Memory::Landing(buf) | Memory::Word(buf) => {
                match buf.local_key(self.registrar.domain()) {
                    Some(key) => key,
                    None => self.register(n, buf)?,
                }
            }
        };
        self.memory.push_back(Held { memory, key });
        Ok(())
    }

    /// Registers the memory of verb `n`, which the device does not know.
    #[cold]
    fn register(&mut self, n: u64, buf: &Buf) -> Result<u32, FabricError> {
        // SAFETY: the registration goes before the memory, by the order of fields and in `completed`; or, if the verb is not posted, at
        // once.
        let registration = unsafe { self.registrar.register(buf.base(), buf.len()) };
        let registration = registration.ok_or(FabricError::CannotRegister { bytes: buf.len() })?;
        let key = registration.key();
        self.registrations.push_back((n, registration));
        Ok(key)
    }

    /// Posts what has not been, as far as there is room; false if the queue pair has failed.
    #[inline]
    fn pump(&mut self) -> bool {
        let free = usize::try_from(self.room - (self.posted - self.completed)).unwrap_or(0);
        let count = self.waiting.len().min(free);
        if count == 0 {
            return true;
        }
        while self.list.len() < count {
            self.list.push(Handed { request: sys::SendWr::zeroed(), place: sys::Sge::default() });
        }
        // From the last to the first, since each names the next.
        let mut first = std::ptr::null_mut();
        for (n, Handed { request: wr, place }) in self.list[..count].iter_mut().enumerate().rev() {
            let request = &self.waiting[n];
            let verb = usize::try_from(request.verb - self.verbs_done).expect("a verb that is under way");
            *place = local(request, &mut self.memory[verb]);
            describe(request, &self.regions, wr);
            wr.wr_id = self.posted + 1 + n as u64;
            wr.send_flags = if request.is_fenced { sys::SEND_FENCE } else { 0 };
            if request.kind == Kind::Write && request.len <= self.limits.inline_bytes {
                wr.send_flags |= sys::SEND_INLINE;
            }
            // A batch is waited for; and so is room for the rest.
            if request.is_last || n + 1 == count {
                wr.send_flags |= sys::SEND_SIGNALED;
            }
            (wr.next, wr.sg_list, wr.num_sge) = (first, &raw mut *place, 1);
            first = &raw mut *wr;
        }
        self.posted += count as u64;
        self.waiting.drain(..count);
        // SAFETY: the list was linked just now. Every place lies within a verb's memory (checked in `local`) or is inline; the
        // memory is ours until the completion (`completed`) or until the queue pair is gone (`end`, `drop`).
        unsafe { self.queue.post(first) }
    }

    /// All requests up to this number have completed: `done` gets the tag and the outputs of each batch that ends with that. False if
    /// the queue pair has failed.
    #[inline]
    pub(super) fn completed(&mut self, number: u64, mut done: impl FnMut(usize, Outputs)) -> bool {
        self.completed = self.completed.max(number.min(self.posted));
        self.waiting_since = None;
        while let Some(Job { tag, verbs, last, .. }) = self.jobs.front().copied() {
            if last > self.completed {
                break;
            }
            self.jobs.pop_front();
            self.verbs_done += verbs as u64;
            while self.registrations.front().is_some_and(|(n, _)| *n < self.verbs_done) {
                self.registrations.pop_front();
            }
            let mut outputs = Outputs::new();
            for _ in 0..verbs {
                let Some(held) = self.memory.pop_front() else { break };
                outputs.push(held.memory.output());
            }
            done(tag, outputs);
        }
        self.waiting.is_empty() || self.pump()
    }

    /// Ends the queue pair. What was under way, by its tag, and whether any of it was posted.
    pub(super) fn end(&mut self) -> Vec<(usize, bool)> {
        let is_gone = self.queue.end();
        let ended = self.jobs.drain(..).map(|job| (job.tag, job.before < self.posted)).collect();
        self.waiting.clear();
        if !is_gone {
            std::mem::forget((std::mem::take(&mut self.registrations), std::mem::take(&mut self.memory)));
        }
        self.registrations.clear();
        self.memory.clear();
        ended
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        self.end();
    }
}

/// Where a request's bytes are on our side.
#[inline]
fn local(request: &Request, Held { memory, key }: &mut Held) -> sys::Sge {
    let (base, bytes) = match memory {
        Memory::Inline(bytes) => (NonNull::from(&mut *bytes).cast::<u8>(), bytes.len()),
        Memory::Source(buf) | Memory::Landing(buf) | Memory::Word(buf) => (buf.base(), buf.len()),
        Memory::Shared(buf) => (buf.memory().base(), buf.memory().len()),
    };
    let Request { at, len, .. } = *request;
    assert!(len <= bytes && at <= bytes - len, "a request goes beyond its buffer");
    sys::Sge {
        addr: (base.as_ptr().expose_provenance() + at) as u64,
        length: u32::try_from(len).expect("a message is shorter than 4 GiB"),
        lkey: *key,
    }
}

/// What a request does and where, as the device wants it. What its kind does not need stays as it was.
#[inline]
fn describe(request: &Request, regions: &FarRegions, wr: &mut sys::SendWr) {
    let region = regions[usize::from(request.addr.region().get())];
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
}
