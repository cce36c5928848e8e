//! Carries out a client's batch on the server's memory, and writes the reply.
//!
//! The same as `direct` does for those who map the memory: behind the connection's gate, verb by verb, with a fence wherever a
//! READ follows a WRITE and at the end. What a READ brings is copied once, from memory into the bytes that go to the socket.

use super::buffer::Outgoing;
use super::verbs::{BATCH, FENCED, HEAD_BYTES, Refusal, Request, What, head, take_head, take_verb};
use crate::addr::ServerId;
use crate::region::{Permissions, RegionTable};
use crate::transport::host::gates::Gate;
use crate::transport::host::regions::{Regions, at};
use std::sync::atomic::{Ordering, fence};

/// Of a batch that will come soon, so many verbs are looked at.
const ANNOUNCED_VERBS: u8 = 4;

/// Where a connection's verbs go, and how far it may go.
#[derive(Debug)]
pub(crate) struct Reach {
    pub(crate) server: ServerId,
    pub(crate) table: RegionTable,
    pub(crate) gate: Gate,
}

impl Reach {
    /// Says that the memory of a frame that will come soon is needed. Most of what a READ costs the server is waiting for memory.
    pub(crate) fn announce(&self, mut frame: &[u8], memory: &Regions) {
        let Ok((BATCH, verbs, _)) = take_head(&mut frame) else { return };
        for _ in 0..verbs.min(ANNOUNCED_VERBS) {
            let Ok(verb) = take_verb(&mut frame, self.server) else { return };
            let len = match verb.what {
                What::Read { len } => len,
                What::Write { bytes } => bytes.len(),
                What::Cas { .. } | What::MaskedCas { .. } | What::Faa { .. } => 8,
            };
            if self.table.check(verb.addr, len as u64, Permissions::NONE).is_ok() {
                memory.region(verb.addr.region()).expect(at(verb.addr.offset()), len);
            }
        }
    }

    /// Carries out one frame (without its length), wholly or not at all, and puts the reply into `out`. How many verbs were
    /// carried out.
    pub(crate) fn execute(&self, frame: &[u8], memory: &Regions, out: &mut Outgoing) -> Result<u8, Refusal> {
        let request = Request::check(frame, self.server, &self.table)?;
        if !self.gate.enter() {
            reply_head(FENCED, &request, 0, out);
            return Ok(0);
        }
        reply_head(BATCH, &request, request.reply_bytes, out);
        let mut wrote = false;
        for verb in request.verbs() {
            let region = memory.region(verb.addr.region());
            let offset = at(verb.addr.offset());
            match verb.what {
                What::Read { len } => {
                    if wrote {
                        // WRITE then READ is ordered, which stores and loads of one thread are not.
                        fence(Ordering::SeqCst);
                        wrote = false;
                    }
                    region.read(offset, out.room(len));
                }
                What::Write { bytes } => {
                    region.write(offset, bytes);
                    wrote = true;
                }
                What::Cas { expected, desired } => {
                    let word = region.word(offset);
                    let (Ok(before) | Err(before)) =
                        word.compare_exchange(expected, desired, Ordering::SeqCst, Ordering::SeqCst);
                    out.put(&before.to_le_bytes());
                }
                What::MaskedCas { compare, compare_mask, swap, swap_mask } => {
                    let before = region.masked_cas(offset, compare, compare_mask, swap, swap_mask);
                    out.put(&before.to_le_bytes());
                }
                What::Faa { add } => {
                    out.put(&region.word(offset).fetch_add(add, Ordering::SeqCst).to_le_bytes());
                }
            }
        }
        if wrote {
            fence(Ordering::SeqCst);
        }
        self.gate.leave();
        Ok(request.verbs)
    }
}

/// The end of a connection whose session is fenced: like the reply to a request that was not carried out, but to no request.
pub(crate) fn put_notice(out: &mut Outgoing) {
    let length = u32::try_from(HEAD_BYTES).expect("a head is short");
    out.put(&length.to_le_bytes());
    out.put(&head(FENCED, 0, 0));
}

fn reply_head(kind: u8, request: &Request<'_>, bytes: usize, out: &mut Outgoing) {
    let length = u32::try_from(HEAD_BYTES + bytes).expect("replies are far below 4 GiB");
    out.put(&length.to_le_bytes());
    out.put(&head(kind, request.verbs, request.sequence));
}
