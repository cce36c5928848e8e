//! Short messages over a queue pair: calls and their answers.
//!
//! Each end has [`SLOTS`] places to receive into and as many to send from, registered once. A client has at most that many calls
//! without an answer, and a place is free again before the answer to what came in it is sent; so whatever arrives finds a
//! place. What does not fit into a slot goes over the line instead, which a call survives because it can be repeated.

use super::device::Domain;
use super::error::VerbsError;
use super::memory::MemoryRegion;
use super::queue::QueuePair;
use super::sys;
use crate::exec::lock;
use crate::mem::RacyMemory;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

/// Messages under way, in each direction.
pub(super) const SLOTS: usize = 8;
/// The longest message.
pub(super) const SLOT_BYTES: usize = 4096;
/// Requests that are messages have this bit in their number.
pub(super) const IS_MESSAGE: u64 = 1 << 63;

/// The places of one end.
#[derive(Debug)]
pub(super) struct Mailbox {
    region: MemoryRegion,
    memory: Arc<RacyMemory>,
    outgoing: Mutex<Outgoing>,
}

#[derive(Debug)]
struct Outgoing {
    free: Vec<usize>,
    waiting: VecDeque<Vec<u8>>,
}

impl Outgoing {
    /// The next message and a place for it. Without a place the rest waits, in order.
    fn next(&mut self) -> Option<(usize, Vec<u8>)> {
        if self.free.is_empty() {
            return None;
        }
        let message = self.waiting.pop_front()?;
        self.free.pop().map(|slot| (slot, message))
    }
}

impl Mailbox {
    pub(super) fn new(domain: &Arc<Domain>) -> Result<Arc<Self>, VerbsError> {
        let bytes = 2 * SLOTS * SLOT_BYTES;
        let none = || VerbsError::Register { bytes, error: std::io::ErrorKind::OutOfMemory.into() };
        let memory = Arc::new(RacyMemory::zeroed(bytes).ok_or_else(none)?);
        let region = MemoryRegion::of(domain, &memory, |memory| memory, sys::ACCESS_LOCAL_WRITE)?;
        let outgoing = Outgoing { free: (SLOTS..2 * SLOTS).collect(), waiting: VecDeque::new() };
        Ok(Arc::new(Self { region, memory, outgoing: Mutex::new(outgoing) }))
    }

    /// A slot, to the device. The first half is for receiving.
    pub(super) fn place(&self, slot: usize) -> sys::Sge {
        assert!(slot < 2 * SLOTS, "there are {SLOTS} slots each way");
        let addr = self.memory.base().as_ptr().expose_provenance() + slot * SLOT_BYTES;
        Self::sge(addr, SLOT_BYTES, self.region.local_key())
    }

    fn sge(addr: usize, bytes: usize, lkey: u32) -> sys::Sge {
        sys::Sge { addr: addr as u64, length: u32::try_from(bytes).unwrap_or(0), lkey }
    }

    /// Puts bytes into a slot.
    pub(super) fn put(&self, slot: usize, bytes: &[u8]) {
        assert!(slot < 2 * SLOTS && bytes.len() <= SLOT_BYTES, "the bytes fit a slot");
        self.memory.write(slot * SLOT_BYTES, bytes);
    }

    /// What has arrived in a slot.
    pub(super) fn take(&self, slot: usize, bytes: u32) -> Vec<u8> {
        let mut message = vec![0; (bytes as usize).min(SLOT_BYTES)];
        self.memory.read(slot.min(SLOTS - 1) * SLOT_BYTES, &mut message);
        message
    }

    /// Sends a message, now or when a place is free; false if the queue pair has failed.
    pub(super) fn send(&self, queue: &QueuePair, message: Vec<u8>) -> bool {
        let mut outgoing = lock(&self.outgoing);
        outgoing.waiting.push_back(message);
        self.send_waiting(queue, &mut outgoing)
    }

    /// The message with this number has been sent: its place is free.
    pub(super) fn sent(&self, queue: &QueuePair, number: u64) -> bool {
        let slot = usize::try_from(number & !IS_MESSAGE).unwrap_or(0);
        let mut outgoing = lock(&self.outgoing);
        if (SLOTS..2 * SLOTS).contains(&slot) && !outgoing.free.contains(&slot) {
            outgoing.free.push(slot);
        }
        self.send_waiting(queue, &mut outgoing)
    }

    fn send_waiting(&self, queue: &QueuePair, outgoing: &mut Outgoing) -> bool {
        if !queue.holds(self) {
            return false;
        }
        while let Some((slot, message)) = outgoing.next() {
            self.put(slot, &message);
            let mut place = Self::sge(
                self.memory.base().as_ptr().expose_provenance() + slot * SLOT_BYTES,
                message.len(),
                self.region.local_key(),
            );
            let mut request = sys::SendWr::zeroed();
            request.wr_id = slot as u64 | IS_MESSAGE;
            (request.sg_list, request.num_sge) = (&raw mut place, 1);
            (request.opcode, request.send_flags) = (sys::WR_SEND, sys::SEND_SIGNALED);
            // SAFETY: one request; the slot lies in the mailbox, which the queue pair holds until it is destroyed, and is not used
            // again before the device has said that it is sent.
            if !unsafe { queue.post(&raw mut request) } {
                return false;
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Answers were lost when more of them were ready than there were places.
    #[test]
    fn a_message_that_finds_no_place_waits_for_one() {
        let mut outgoing = Outgoing { free: vec![SLOTS], waiting: [vec![1], vec![2]].into() };
        assert_eq!(outgoing.next(), Some((SLOTS, vec![1])));
        assert_eq!(outgoing.next(), None);
        outgoing.free.push(SLOTS + 1);
        assert_eq!(outgoing.next(), Some((SLOTS + 1, vec![2])));
        assert_eq!(outgoing.next(), None);
        assert_eq!(outgoing.free.len(), 0);
    }
}
