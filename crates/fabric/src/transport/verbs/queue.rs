//! Queues of a device: completion queues, and reliable connected queue pairs.
//!
//! What a queue pair may read or write is its owner's business ([`super::sender`], [`super::mailbox`]); this file makes, connects
//! and ends them. When [`QueuePair::end`] has returned, the device touches nothing in its name any more.

use super::device::{Context, Domain};
use super::error::VerbsError;
use super::mailbox::{Mailbox, SLOTS};
use super::sys;
use crate::region::Permissions;
use crate::wire::wire_struct;
use std::fmt;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

/// How long the device waits for an acknowledgement: 4.096 us times 2 to the power of this, some 270 ms; so often it sends again.
/// Together less than the patience of a client.
const TIMEOUT: u8 = 16;
const RETRIES: u8 = 7;
/// Receives are posted before anything is sent, so nobody waits for them long; for ever, if need be.
const RNR_RETRIES: u8 = 7;
/// 0.64 ms.
const MIN_RNR_TIMER: u8 = 12;
const HOP_LIMIT: u8 = 64;
/// What devices that carry few bytes along still do.
const FEW_INLINE_BYTES: u32 = 64;
/// So many completions are taken at a time.
const POLLED: usize = 16;

/// Where completions arrive, with a descriptor to wait for them.
pub(super) struct CompletionQueue {
    raw: NonNull<sys::Cq>,
    channel: NonNull<sys::CompChannel>,
    context: Arc<Context>,
}

// SAFETY: as for `Context`.
unsafe impl Send for CompletionQueue {}
// SAFETY: as for `Context`.
unsafe impl Sync for CompletionQueue {}

/// Something has completed, or failed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Completion {
    /// The number that the request had; of a failed one, that is all that counts.
    pub(super) id: u64,
    pub(super) queue: u32,
    pub(super) status: u32,
    pub(super) is_receive: bool,
    pub(super) bytes: u32,
}

impl Completion {
    pub(super) fn is_success(&self) -> bool {
        self.status == sys::WC_SUCCESS
    }
}

impl CompletionQueue {
    pub(super) fn new(context: &Arc<Context>, entries: u32) -> Result<Arc<Self>, VerbsError> {
        let library = context.library();
        let entries = i32::try_from(entries).unwrap_or(i32::MAX).min(context.attr().max_cqe);
        // SAFETY: an open context.
        let channel = NonNull::new(unsafe { (library.create_comp_channel)(context.raw()) })
            .ok_or_else(|| VerbsError::last("make a completion channel"))?;
        let null = std::ptr::null_mut();
        // SAFETY: an open context and its channel.
        let raw = unsafe { (library.create_cq)(context.raw(), entries, null, channel.as_ptr(), 0) };
        let Some(raw) = NonNull::new(raw) else {
            let error = VerbsError::last("make a completion queue");
            // SAFETY: made just now, and used by nobody.
            unsafe { (library.destroy_comp_channel)(channel.as_ptr()) };
            return Err(error);
        };
        let queue = Arc::new(Self { raw, channel, context: Arc::clone(context) });
        rustix::fs::fcntl_setfl(queue.as_fd(), rustix::fs::OFlags::NONBLOCK)
            .map_err(|error| VerbsError::Failed { what: "be waited for", error: error.into() })?;
        Ok(queue)
    }

    /// Calls `each` with what has completed; how many there were. An error means that the queue is of no more use.
    pub(super) fn poll(&self, mut each: impl FnMut(Completion)) -> Result<usize, VerbsError> {
        let mut found = [const { MaybeUninit::<sys::Wc>::uninit() }; POLLED];
        let Some(poll) = self.context.operations().poll_cq else { return Err(VerbsError::NoDevice) };
        // SAFETY: a completion queue that exists, and room for as many as are asked for.
        let count = unsafe { poll(self.raw.as_ptr(), 16, found.as_mut_ptr().cast()) };
        let Ok(count) = usize::try_from(count) else {
            return Err(VerbsError::last("tell what has completed"));
        };
        for wc in &found[..count.min(POLLED)] {
            // SAFETY: the device wrote as many as it says; any bytes are a completion.
            let wc = unsafe { wc.assume_init_ref() };
            each(Completion {
                id: wc.wr_id,
                queue: wc.qp_num,
                status: wc.status,
                is_receive: wc.opcode & sys::WC_RECV != 0,
                bytes: wc.byte_len,
            });
        }
        Ok(count)
    }

    /// The next completion makes the descriptor ready. Those that are there already do not.
    pub(super) fn arm(&self) -> Result<(), VerbsError> {
        let notify = self.context.operations().req_notify_cq.ok_or(VerbsError::NoDevice)?;
        // SAFETY: a completion queue that exists.
        VerbsError::check("be waited for", unsafe { notify(self.raw.as_ptr(), 0) })
    }

    /// Takes back what made the descriptor ready.
    pub(super) fn settle(&self) {
        let library = self.context.library();
        let (mut queue, mut context) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the channel exists and does not block; the queue that it brings is ours, since it has no other.
        while unsafe { (library.get_cq_event)(self.channel.as_ptr(), &raw mut queue, &raw mut context) } == 0
        {
            // SAFETY: one event, just taken. Who does not acknowledge cannot destroy the queue.
            unsafe { (library.ack_cq_events)(self.raw.as_ptr(), 1) };
        }
    }
}

impl AsFd for CompletionQueue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel, and so its descriptor, is open as long as `self`.
        unsafe { BorrowedFd::borrow_raw(self.channel.as_ref().fd) }
    }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        let library = self.context.library();
        // SAFETY: queue pairs held it, and are gone; every event was acknowledged. The channel goes after its queue.
        unsafe {
            (library.destroy_cq)(self.raw.as_ptr());
            (library.destroy_comp_channel)(self.channel.as_ptr());
        }
    }
}

impl fmt::Debug for CompletionQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CompletionQueue({})", self.context.name())
    }
}

/// One end of a queue pair, to the other end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct QueueEnd {
    pub(crate) number: u32,
    /// The first packet's sequence number.
    pub(crate) psn: u32,
}

wire_struct!(QueueEnd { number, psn });

/// A device's port, to the other end of its queue pairs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct PortAddress {
    pub(crate) gid: u128,
    pub(crate) lid: u16,
    pub(crate) is_ethernet: bool,
    pub(crate) mtu: u8,
    /// How many READs and atomics of the other end it keeps track of.
    pub(crate) reads_at_once: u8,
    pub(crate) max_message_bytes: u32,
    pub(crate) queues: Vec<QueueEnd>,
}

wire_struct!(PortAddress { gid, lid, is_ethernet, mtu, reads_at_once, max_message_bytes, queues });

impl PortAddress {
    pub(super) fn of<'a>(domain: &Domain, queues: impl Iterator<Item = &'a QueuePair>) -> Self {
        let port = domain.port();
        Self {
            gid: u128::from_be_bytes(port.gid),
            lid: port.lid,
            is_ethernet: port.is_ethernet,
            mtu: u8::try_from(port.mtu).unwrap_or(1),
            reads_at_once: domain.reads_at_once(),
            max_message_bytes: port.max_message_bytes,
            queues: queues.map(|queue| queue.end).collect(),
        }
    }
}

/// How long a queue pair's queues are.
#[derive(Clone, Copy, Debug)]
pub(super) struct Depth {
    pub(super) sends: u32,
    pub(super) receives: u32,
    pub(super) inline_bytes: u32,
}

/// A reliable connected queue pair.
pub(super) struct QueuePair {
    raw: Option<NonNull<sys::Qp>>,
    end: QueueEnd,
    depth: Depth,
    domain: Arc<Domain>,
    /// What it receives into; after the queue pair itself.
    mailbox: Option<Arc<Mailbox>>,
    _completions: Arc<CompletionQueue>,
}

// SAFETY: as for `Context`; posting is synchronised by the library.
unsafe impl Send for QueuePair {}
// SAFETY: as above.
unsafe impl Sync for QueuePair {}

impl QueuePair {
    /// One that is not connected; it can receive into `mailbox`.
    pub(super) fn new(
        domain: &Arc<Domain>,
        completions: &Arc<CompletionQueue>,
        depth: Depth,
        psn: u32,
        mailbox: Option<Arc<Mailbox>>,
    ) -> Result<Self, VerbsError> {
        let library = domain.context().library();
        let (null, cq) = (std::ptr::null_mut(), completions.raw.as_ptr());
        // How much a device carries along cannot be asked, only tried.
        let made = [depth.inline_bytes, FEW_INLINE_BYTES.min(depth.inline_bytes), 0].into_iter().find_map(
            |inline| {
                let mut init = sys::QpInitAttr {
                    qp_context: null,
                    send_cq: cq,
                    recv_cq: cq,
                    srq: null,
                    cap: sys::QpCap {
                        max_send_wr: depth.sends,
                        max_recv_wr: depth.receives,
                        max_send_sge: 1,
                        max_recv_sge: 1,
                        max_inline_data: inline,
                    },
                    qp_type: sys::QPT_RC,
                    sq_sig_all: 0,
                };
                // SAFETY: a domain and a completion queue that exist, and a valid description.
                let raw = unsafe { (library.create_qp)(domain.raw(), &raw mut init) };
                Some((NonNull::new(raw)?, init.cap.max_inline_data))
            },
        );
        let (raw, inline_bytes) = made.ok_or_else(|| VerbsError::last("make a queue pair"))?;
        // SAFETY: made just now.
        let number = unsafe { raw.as_ref().qp_num };
        let pair = Self {
            raw: Some(raw),
            end: QueueEnd { number, psn: psn & 0xff_ffff },
            depth: Depth { inline_bytes, ..depth },
            domain: Arc::clone(domain),
            mailbox,
            _completions: Arc::clone(completions),
        };
        let mut attr =
            sys::QpAttr { qp_state: sys::QPS_INIT, port_num: domain.port().number, ..Default::default() };
        let mask = sys::QP_STATE | sys::QP_PKEY_INDEX | sys::QP_PORT | sys::QP_ACCESS_FLAGS;
        pair.modify("prepare a queue pair", &mut attr, mask)?;
        Ok(pair)
    }

    pub(super) fn end_point(&self) -> QueueEnd {
        self.end
    }

    pub(super) fn depth(&self) -> Depth {
        self.depth
    }

    /// Connects it to the other end, which may do here what `permissions` say.
    pub(super) fn connect(
        &self,
        port: &PortAddress,
        other: QueueEnd,
        permissions: Permissions,
    ) -> Result<(), VerbsError> {
        let ours = self.domain.port();
        let mut address = sys::AhAttr {
            dgid: port.gid.to_be_bytes(),
            sgid_index: ours.gid_index,
            hop_limit: HOP_LIMIT,
            dlid: port.lid,
            port_num: ours.number,
            ..Default::default()
        };
        address.is_global = u8::from(ours.is_ethernet);
        let reads = port.reads_at_once.min(self.domain.reads_at_once());
        let mut attr = sys::QpAttr {
            qp_state: sys::QPS_RTR,
            path_mtu: ours.mtu.min(u32::from(port.mtu)),
            rq_psn: other.psn,
            dest_qp_num: other.number,
            qp_access_flags: remote_access(permissions),
            ah_attr: address,
            max_dest_rd_atomic: reads,
            min_rnr_timer: MIN_RNR_TIMER,
            ..Default::default()
        };
        let mask = sys::QP_STATE
            | sys::QP_AV
            | sys::QP_PATH_MTU
            | sys::QP_DEST_QPN
            | sys::QP_RQ_PSN
            | sys::QP_MAX_DEST_RD_ATOMIC
            | sys::QP_MIN_RNR_TIMER
            | sys::QP_ACCESS_FLAGS;
        self.modify("connect a queue pair", &mut attr, mask)?;
        let mut attr = sys::QpAttr {
            qp_state: sys::QPS_RTS,
            sq_psn: self.end.psn,
            max_rd_atomic: reads,
            timeout: TIMEOUT,
            retry_cnt: RETRIES,
            rnr_retry: RNR_RETRIES,
            ..Default::default()
        };
        let mask = sys::QP_STATE
            | sys::QP_SQ_PSN
            | sys::QP_MAX_QP_RD_ATOMIC
            | sys::QP_TIMEOUT
            | sys::QP_RETRY_CNT
            | sys::QP_RNR_RETRY;
        self.modify("start a queue pair", &mut attr, mask)
    }

    fn modify(&self, what: &'static str, attr: &mut sys::QpAttr, mask: u32) -> Result<(), VerbsError> {
        let Some(raw) = self.raw else { return Err(VerbsError::NoDevice) };
        let mask = i32::try_from(mask).unwrap_or(0);
        // SAFETY: a queue pair that exists, and a description of which the masked fields are set.
        let returned = unsafe { (self.domain.context().library().modify_qp)(raw.as_ptr(), attr, mask) };
        VerbsError::check(what, returned)
    }

    /// Posts a list of requests; false if the device does not take all of them, and then the queue pair has to be ended.
    ///
    /// # Safety
    /// The list is well-formed, and what its requests name stays allocated and registered until they have completed or the queue
    /// pair has been ended; what they write is nobody else's until then.
    #[inline]
    pub(super) unsafe fn post(&self, list: *mut sys::SendWr) -> bool {
        let (Some(raw), Some(post)) = (self.raw, self.domain.context().operations().post_send) else {
            return false;
        };
        let mut bad = std::ptr::null_mut();
        // SAFETY: a queue pair that exists; the caller vouches for the list.
        unsafe { post(raw.as_ptr(), list, &raw mut bad) == 0 }
    }

    /// Whether this mailbox stays as long as the queue pair does.
    pub(super) fn holds(&self, mailbox: &Mailbox) -> bool {
        self.raw.is_some() && self.mailbox.as_deref().is_some_and(|held| std::ptr::eq(held, mailbox))
    }

    /// Lets the next message arrive in a slot of the mailbox.
    pub(super) fn receive(&self, slot: usize) -> bool {
        let (Some(mailbox), Some(raw)) = (&self.mailbox, self.raw) else { return false };
        assert!(slot < SLOTS, "messages arrive in the first half");
        let Some(post) = self.domain.context().operations().post_recv else { return false };
        let mut place = mailbox.place(slot);
        let mut request = sys::RecvWr {
            wr_id: slot as u64,
            next: std::ptr::null_mut(),
            sg_list: &raw mut place,
            num_sge: 1,
        };
        let mut bad = std::ptr::null_mut();
        // SAFETY: the slot lies in the mailbox, which is held until the queue pair is destroyed and is made to be raced on.
        unsafe { post(raw.as_ptr(), &raw mut request, &raw mut bad) == 0 }
    }

    /// Ends the queue pair; false if the device does not confirm that it touches nothing in its name any more.
    pub(super) fn end(&mut self) -> bool {
        let Some(raw) = self.raw.take() else { return true };
        let library = self.domain.context().library();
        // SAFETY: made by us, and from here on nobody has it.
        if unsafe { (library.destroy_qp)(raw.as_ptr()) } == 0 {
            return true;
        }
        let mut attr = sys::QpAttr { qp_state: sys::QPS_ERR, ..Default::default() };
        let mask = i32::try_from(sys::QP_STATE).unwrap_or(0);
        // SAFETY: it was not destroyed. In the error state it takes no requests from the other end and carries out none of ours.
        let is_stopped = unsafe { (library.modify_qp)(raw.as_ptr(), &raw mut attr, mask) } == 0;
        let device = self.domain.device();
        tracing::error!(device, is_stopped, "a queue pair cannot be destroyed; its memory is not used again");
        std::mem::forget(self.mailbox.take());
        is_stopped
    }
}

/// What others may do through a queue pair.
pub(super) fn remote_access(permissions: Permissions) -> u32 {
    let bits = [
        (Permissions::READ, sys::ACCESS_REMOTE_READ),
        (Permissions::WRITE, sys::ACCESS_REMOTE_WRITE),
        (Permissions::ATOMIC, sys::ACCESS_REMOTE_ATOMIC),
    ];
    bits.iter().filter(|(needed, _)| permissions.allows(*needed)).fold(0, |access, (_, bit)| access | bit)
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        self.end();
    }
}

impl fmt::Debug for QueuePair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "QueuePair({})", self.end.number)
    }
}
