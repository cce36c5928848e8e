//! The server's end of queue pairs: who has some, how they are fenced, and the thread that hears calls.
//!
//! Verbs cost the server nothing: its device carries them out. What is left to do:
//!
//! 1. A client comes to the door with its ends of queue pairs ([`Dock::admit`]). Its connection gets a gate, like any other; but the
//!    one who is inside, always, is the device. So the gate is busy from the start, and closing it means ending the queue pairs:
//!    when that is done, nothing of the connection lands any more, and only then is anybody told that the session is fenced.
//! 2. What the client may do is up to its queue pairs (the session's permissions) and the regions' keys (the region's).
//! 3. Its TCP connection stays with the door; when it closes, the queue pairs are ended.
//! 4. A thread takes calls from the receive queues of all clients and hands them to the host.

use super::connection::FENCED;
use super::device::Domain;
use super::error::VerbsError;
use super::mailbox::{IS_MESSAGE, Mailbox, SLOT_BYTES, SLOTS};
use super::memory::{DeviceMemory, MemoryRegion};
use super::notes::{Asked, Note};
use super::offer::LANES;
use super::queue::{Completion, CompletionQueue, Depth, PortAddress, QueuePair, remote_access};
use super::sys;
use crate::addr::RegionId;
use crate::call::{CallId, CallOutcome, Principal};
use crate::clock::{MICROSECOND, Nanos, RealClock};
use crate::exec::lock;
use crate::transport::host::gates::{Gate, Holder};
use crate::transport::host::{Caller, Host, PeerId};
use crate::transport::tcp::frames::Admission;
use crate::transport::tcp::server::Asked as Wanted;
use crate::wake::Wake;
use crate::wire::{self, wire_struct};
use rustc_hash::FxHashMap;
use rustix::event::{PollFd, PollFlags, poll};
use std::fmt;
use std::io::Write;
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

/// How many connections there may be, if the device's queues are long enough.
const MAX_CONNECTIONS: usize = 1024;
/// How long the thread looks for more before it sleeps.
const SPIN_NS: Nanos = 50 * MICROSECOND;

/// Where a region is, to a client's device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct RegionKey {
    pub(crate) region: RegionId,
    pub(crate) base: u64,
    pub(crate) key: u32,
}

wire_struct!(RegionKey { region, base, key });

/// A server's regions, as its device knows them.
#[derive(Debug)]
pub(super) struct Offered {
    keys: Vec<RegionKey>,
    _regions: Vec<MemoryRegion>,
    device_memory: Option<DeviceMemory>,
}

impl Offered {
    /// Registers all regions with what clients may do in each. Lock memory goes onto the device if it has room and `may_move_locks`.
    fn new(domain: &Arc<Domain>, host: &Host, may_move_locks: bool) -> Result<Self, VerbsError> {
        let (mut keys, mut regions, mut device_memory) = (Vec::new(), Vec::new(), None);
        for spec in host.table().iter() {
            let access = remote_access(spec.permissions) | sys::ACCESS_LOCAL_WRITE;
            if spec.id == RegionId::LOCK && may_move_locks {
                let bytes = usize::try_from(spec.bytes).unwrap_or(usize::MAX);
                device_memory = DeviceMemory::allocate(domain, bytes, access);
                if let Some(memory) = &device_memory {
                    keys.push(RegionKey { region: spec.id, base: 0, key: memory.remote_key() });
                    continue;
                }
            }
            let region = MemoryRegion::of(domain, host.memory(), |memory| memory.region(spec.id), access)?;
            let base = host.memory().region(spec.id).base().as_ptr().expose_provenance() as u64;
            keys.push(RegionKey { region: spec.id, base, key: region.remote_key() });
            regions.push(region);
        }
        Ok(Self { keys, _regions: regions, device_memory })
    }

    pub(super) fn keys(&self) -> &[RegionKey] {
        &self.keys
    }
}

/// One client's queue pairs.
pub(crate) struct Moored {
    id: u64,
    who: Principal,
    peer: PeerId,
    gate: OnceLock<Gate>,
    queues: Mutex<Option<[QueuePair; LANES]>>,
    numbers: [u32; LANES],
    mailbox: Arc<Mailbox>,
    socket: TcpStream,
}

impl Moored {
    /// Ends the queue pairs: when this returns, nothing lands through them any more. The client is told if that is a fence, not if only
    /// this connection has failed.
    fn end(&self, is_fence: bool) {
        // Destroyed with the lock held, so that whoever comes second finds it done.
        let mut queues = lock(&self.queues);
        if let Some(mut ended) = queues.take() {
            // Both of them, whatever becomes of the first.
            if ended.each_mut().map(QueuePair::end) != [true; LANES] {
                tracing::error!("the device obeys no more: this server cannot fence anybody, and stops");
                // Its clients see a dead server, which is safe; one whose writes go on after it was fenced is not.
                std::process::abort();
            }
            if is_fence {
                let _ = (&self.socket).write(&[FENCED]);
            }
            // The door finds out, and forgets the connection.
            let _ = self.socket.shutdown(Shutdown::Both);
        }
    }
}

impl Holder for Moored {
    fn name(&self) -> (u64, u64) {
        // No process of this machine has to be found again.
        (0, 0)
    }

    fn is_gone(&self) -> bool {
        lock(&self.queues).is_none()
    }

    fn end_unless(&self, _: &dyn Fn() -> bool) {
        self.end(true);
    }
}

impl Caller for Moored {
    fn answer(&self, to: CallId, outcome: CallOutcome) {
        let mut message = wire::encode(&Note::Answered { to, outcome });
        if message.len() > SLOT_BYTES {
            message = wire::encode(&Note::TooLong { to });
        }
        if let Some([short, _]) = &*lock(&self.queues) {
            // If it fails, the client learns from its own queue pair, or by a time-out.
            let _ = self.mailbox.send(short, message);
        }
    }
}

impl fmt::Debug for Moored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Moored({} of {})", self.id, self.who.session)
    }
}

/// Where clients' queue pairs are tied up.
pub(crate) struct Dock {
    // Queue pairs first, then what they use.
    known: Mutex<FxHashMap<u64, Arc<Moored>>>,
    by_queue: Mutex<FxHashMap<u32, Arc<Moored>>>,
    completions: Arc<CompletionQueue>,
    offered: Arc<Offered>,
    domain: Arc<Domain>,
    host: Arc<Host>,
    max_connections: usize,
    next_id: AtomicU64,
    wake: Wake,
    stop: AtomicBool,
}

impl Dock {
    /// Opens the device and registers the server's memory with it.
    pub(crate) fn new(
        host: &Arc<Host>,
        domain: Arc<Domain>,
        may_move_locks: bool,
    ) -> Result<Self, VerbsError> {
        let offered = Offered::new(&domain, host, may_move_locks)?;
        let most = usize::try_from(domain.context().attr().max_cqe).unwrap_or(0) / (2 * SLOTS);
        let max_connections = MAX_CONNECTIONS.min(most.saturating_sub(1));
        let entries = u32::try_from((max_connections + 1) * 2 * SLOTS).unwrap_or(u32::MAX);
        let completions = CompletionQueue::new(domain.context(), entries)?;
        let wake = Wake::new().map_err(|error| VerbsError::Failed { what: "be waited for", error })?;
        Ok(Self {
            known: Mutex::default(),
            by_queue: Mutex::default(),
            completions,
            offered: Arc::new(offered),
            domain,
            host: Arc::clone(host),
            max_connections,
            next_id: AtomicU64::new(host.first_connection()),
            wake,
            stop: AtomicBool::new(false),
        })
    }

    pub(super) fn offered(&self) -> &Arc<Offered> {
        &self.offered
    }

    /// Whether lock memory is on the device.
    pub(crate) fn has_device_memory(&self) -> bool {
        self.offered.device_memory.is_some()
    }

    /// Decides about a connection. If it replaces another of its session, that one is fenced when this returns.
    pub(crate) fn admit(
        &self,
        wanted: Wanted,
        port: &PortAddress,
        socket: TcpStream,
        peer: PeerId,
    ) -> Result<(Arc<Moored>, Admission), Admission> {
        let Wanted { who, replaces } = wanted;
        self.fence(replaces, who);
        if lock(&self.known).len() >= self.max_connections {
            return Err(Admission::NoRoom {});
        }
        let refused = |error: &VerbsError| Admission::Refused { why: error.to_string() };
        if port.queues.len() != LANES || port.is_ethernet != self.domain.port().is_ethernet {
            let why =
                "the RDMA devices of client and server do not fit together; use the same kind of network"
                    .into();
            return Err(Admission::Refused { why });
        }
        let moored = self.prepare(wanted, socket, peer).map_err(|error| refused(&error))?;
        let opened = match self.host.connect(who, Some(Arc::clone(&moored) as _)) {
            Err(_) => return Err(Admission::NoRoom {}),
            Ok(opened) if opened.gate.number() == 0 => return Err(Admission::NotAdmitted {}),
            Ok(opened) => opened,
        };
        let _ = moored.gate.set(opened.gate.clone());
        lock(&self.known).insert(moored.id, Arc::clone(&moored));
        // The device is inside from here on. A fence that was quicker finds the queue pairs not connected, and so it stays.
        let is_in = opened.gate.enter();
        let connected = match &*lock(&moored.queues) {
            Some(queues) if is_in => queues
                .iter()
                .zip(&port.queues)
                .try_for_each(|(queue, other)| queue.connect(port, *other, opened.permissions))
                .map(|()| PortAddress::of(&self.domain, queues.iter()))
                .map_err(|error| refused(&error)),
            _ => Err(Admission::NotAdmitted {}),
        };
        match connected {
            Ok(port) => {
                lock(&self.by_queue).extend(moored.numbers.map(|number| (number, Arc::clone(&moored))));
                let (connection, permissions) = (moored.id, opened.permissions);
                let regions = self.offered.keys.clone();
                Ok((moored, Admission::Queues { connection, permissions, port, regions }))
            }
            Err(answer) => {
                self.forget(&moored);
                Err(answer)
            }
        }
    }

    /// Queue pairs that are ready to be connected.
    fn prepare(&self, wanted: Wanted, socket: TcpStream, peer: PeerId) -> Result<Arc<Moored>, VerbsError> {
        let mailbox = Mailbox::new(&self.domain)?;
        let slots = u32::try_from(SLOTS).unwrap_or(8);
        let make = |lane: usize, mailbox: Option<Arc<Mailbox>>| {
            let depth = Depth { sends: slots, receives: slots, inline_bytes: 0 };
            let psn = fastrand::u32(..) ^ u32::try_from(lane).unwrap_or(0);
            QueuePair::new(&self.domain, &self.completions, depth, psn, mailbox)
        };
        let queues = [make(0, Some(Arc::clone(&mailbox)))?, make(1, None)?];
        for slot in 0..SLOTS {
            if !queues[0].receive(slot) {
                return Err(VerbsError::last("receive"));
            }
        }
        Ok(Arc::new(Moored {
            id: self.next_id.fetch_add(1, Ordering::Relaxed),
            who: wanted.who,
            peer,
            gate: OnceLock::new(),
            numbers: [queues[0].end_point().number, queues[1].end_point().number],
            queues: Mutex::new(Some(queues)),
            mailbox,
            socket,
        }))
    }

    /// Makes sure that nothing of a connection can land any more. Only its own session may ask for that.
    fn fence(&self, id: u64, who: Principal) {
        // With the lock held: as long as the connection is known, its gate is not given back, and is nobody else's.
        let known = lock(&self.known);
        if let Some(old) = known.get(&id).filter(|old| old.who == who) {
            if let Some(gate) = old.gate.get() {
                self.host.close(gate);
            }
        }
    }

    /// A connection is gone, or has to go: its queue pairs end, and its gate is given back.
    pub(crate) fn forget(&self, moored: &Arc<Moored>) {
        moored.end(false);
        let mut known = lock(&self.known);
        if known.remove(&moored.id).is_some() {
            if let Some(gate) = moored.gate.get() {
                self.host.disconnect(gate);
            }
        }
        drop(known);
        let mut by_queue = lock(&self.by_queue);
        for number in moored.numbers {
            if by_queue.get(&number).is_some_and(|other| Arc::ptr_eq(other, moored)) {
                by_queue.remove(&number);
            }
        }
    }

    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
        self.wake.wake();
    }

    /// Hears calls until it is told to stop; then ends all connections.
    pub(crate) fn run(&self) {
        let clock = RealClock::new();
        let mut active_at = clock.now();
        while !self.stop.load(Ordering::SeqCst) {
            match self.take_in() {
                Ok(true) => active_at = clock.now(),
                Ok(false) if clock.now() - active_at > SPIN_NS => {
                    self.sleep();
                    active_at = clock.now();
                }
                // What is waited for may need this very core.
                Ok(false) => std::thread::yield_now(),
                Err(error) => {
                    tracing::error!("calls over RDMA end here: {error}");
                    break;
                }
            }
        }
        let all: Vec<_> = lock(&self.known).values().cloned().collect();
        for moored in &all {
            self.forget(moored);
        }
    }

    fn sleep(&self) {
        // What completes from here on makes the descriptor ready; what did before has to be looked for once more.
        if self.completions.arm().is_err() || self.take_in().unwrap_or(true) {
            return;
        }
        let mut ends =
            [PollFd::new(&self.wake, PollFlags::IN), PollFd::new(&self.completions, PollFlags::IN)];
        // If it fails, somebody interrupted us: we look again.
        let _ = poll(&mut ends, None);
        let woken = !ends[0].revents().is_empty();
        self.completions.settle();
        if woken {
            self.wake.settle();
        }
    }

    fn take_in(&self) -> Result<bool, VerbsError> {
        let mut found = Vec::new();
        self.completions.poll(|completion| found.push(completion))?;
        for completion in &found {
            let moored = lock(&self.by_queue).get(&completion.queue).cloned();
            // Of those that are gone, nothing counts any more.
            if let Some(moored) = moored {
                if self.heed(&moored, completion).is_none() {
                    moored.end(false);
                }
            }
        }
        Ok(!found.is_empty())
    }

    /// A call, or an answer that was sent; `None` if the connection is of no more use.
    fn heed(&self, moored: &Arc<Moored>, completion: &Completion) -> Option<()> {
        if !completion.is_success() {
            return None;
        }
        let queues = lock(&moored.queues);
        // Ended meanwhile: that is as good as never sent.
        let Some(queue) = queues.as_ref().map(|queues| &queues[0]) else { return Some(()) };
        if completion.id & IS_MESSAGE != 0 {
            return moored.mailbox.sent(queue, completion.id).then_some(());
        }
        let slot =
            usize::try_from(completion.id).ok().filter(|slot| completion.is_receive && *slot < SLOTS)?;
        let message = moored.mailbox.take(slot, completion.bytes);
        queue.receive(slot).then_some(())?;
        drop(queues);
        let Asked { target, call } = wire::decode(&message).ok()?;
        self.host.call(target, call, moored.peer, Arc::clone(moored) as _);
        Some(())
    }
}

impl fmt::Debug for Dock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Dock({}, {} connections)", self.domain.device(), lock(&self.known).len())
    }
}
