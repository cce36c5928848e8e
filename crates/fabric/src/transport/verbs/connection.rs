//! One endpoint's queue pairs to one server, on the client's side.
//!
//! Two lanes, each a queue pair: short batches, and bulk ones, which would keep the short ones waiting. The first lane also
//! carries short calls. Completions arrive in one queue, which the executor polls when no task is ready; when that has
//! brought nothing for a while, it waits for the queue's descriptor.
//!
//! The TCP connection over which the queue pairs were agreed upon stays open: it is how either end learns that the other is gone,
//! or that the session was fenced, long before the device gives up.
//!
//! Invariant: a connection that has broken stays so, has no queue pairs and has nothing in flight.

use super::dock::RegionKey;
use super::error::VerbsError;
use super::mailbox::{IS_MESSAGE, Mailbox, SLOT_BYTES, SLOTS};
use super::notes::{Asked, Note};
use super::offer::{LANES, Offer, ROOM, far_regions, message_count};
use super::plan::Limits;
use super::queue::{Completion, CompletionQueue, PortAddress};
use super::sender::Sender;
use crate::addr::{ServerId, SessionId};
use crate::buf::BufPool;
use crate::call::{Call, CallError, CallId, CallOutcome, Target};
use crate::clock::{MICROSECOND, Nanos};
use crate::error::FabricError;
use crate::exec::{Executor, Source, Spin};
use crate::region::Permissions;
use crate::transport::ReplySlot;
use crate::transport::slots::{Carries, Slots, Ticket};
use crate::transport::tcp::server::is_passing;
use crate::verb::{Batch, BatchFailure, Completed, VerbOutcome};
use crate::wire;
use rustc_hash::FxHashMap;
use rustix::event::{PollFd, PollFlags, epoll};
use std::cell::{Cell, RefCell, RefMut};
use std::fmt;
use std::io::{self, Read};
use std::net::{Shutdown, TcpStream};
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Waker;

/// Batches of more bytes go on the second lane.
const BULK_BYTES: usize = 16 << 10;
/// A device needs no core of ours, except one in software; and waking up costs more than any device takes.
const SPIN: Spin = Spin { ns: 200 * MICROSECOND, alone_ns: 60 * MICROSECOND };
/// So often in a row a task may look for completions itself; then it is the turn of others.
const MAX_EARLY_LOOKS: u32 = 16;
/// Lanes, by number.
const SHORT: usize = 0;
const BULK: usize = 1;
/// How often a connection that goes away looks whether the rest of its batches has completed.
const LAST_LOOKS: u32 = 20_000;
/// What a server says before it closes a fenced connection.
pub(super) const FENCED: u8 = 1;

/// Who is connected to whom, and what the server said.
#[derive(Debug)]
pub(crate) struct Ends {
    /// The connection's number at the server.
    pub(crate) id: u64,
    pub(crate) server: ServerId,
    pub(crate) session: SessionId,
    pub(crate) port: PortAddress,
    pub(crate) regions: Vec<RegionKey>,
    pub(crate) patience: Nanos,
}

/// One connection.
pub(crate) struct Connection {
    id: u64,
    server: ServerId,
    session: SessionId,
    patience: Nanos,
    executor: Executor,
    completions: Arc<CompletionQueue>,
    mailbox: Arc<Mailbox>,
    state: RefCell<State>,
    /// The executor waits for the descriptor, which it may have made ready.
    is_armed: Cell<bool>,
    /// Completions were found when it was about to wait.
    has_news: Cell<bool>,
    /// How often tasks have looked for completions themselves since the executor last did.
    early_looks: Cell<u32>,
    socket: TcpStream,
    /// Ready when the completion queue or the socket is.
    bell: OwnedFd,
}

struct State {
    lanes: [Sender; LANES],
    /// Of each batch, how many verbs it has.
    slots: Slots<usize>,
    /// Why it is of no more use, if it is not.
    ended: Option<FabricError>,
    /// Calls without an answer, with the time at which they were sent.
    calls: FxHashMap<CallId, (Arc<ReplySlot>, Nanos)>,
    /// Calls whose answer is too long for a message.
    too_long: Vec<CallId>,
    /// How many calls may be sent.
    credit: usize,
}

impl Connection {
    /// Connects queue pairs to those of the server, which has admitted them.
    pub(crate) fn new(
        offer: Offer,
        ends: Ends,
        socket: TcpStream,
        executor: &Executor,
    ) -> Result<Rc<Self>, VerbsError> {
        let failed = |error| VerbsError::Failed { what: "be used over this connection", error };
        socket.set_nonblocking(true).map_err(failed)?;
        let Ends { id, server, session, port, regions, patience } = ends;
        let Offer { domain, completions, mailbox, lanes } = offer;
        let bell = bell(&completions, &socket).map_err(failed)?;
        for slot in 0..SLOTS {
            if !lanes[SHORT].receive(slot) {
                return Err(VerbsError::last("receive"));
            }
        }
        let limits = Limits {
            message_bytes: domain.port().max_message_bytes.min(port.max_message_bytes) as usize,
            inline_bytes: lanes.iter().map(|lane| lane.depth().inline_bytes).min().unwrap_or(0) as usize,
        };
        for (lane, other) in lanes.iter().zip(&port.queues) {
            lane.connect(&port, *other, Permissions::NONE)?;
        }
        let max = u32::try_from(domain.context().attr().max_qp_wr).unwrap_or(ROOM);
        let room = ROOM.min(max.saturating_sub(message_count())).max(1);
        let regions = far_regions(&regions);
        let state = State {
            lanes: lanes.map(|queue| Sender::new(&domain, queue, room, limits, regions)),
            slots: Slots::new(),
            ended: None,
            calls: FxHashMap::default(),
            too_long: Vec::new(),
            credit: SLOTS,
        };
        let connection = Rc::new(Self {
            id,
            server,
            session,
            patience,
            executor: executor.clone(),
            completions,
            mailbox,
            state: RefCell::new(state),
            is_armed: Cell::new(false),
            has_news: Cell::new(false),
            early_looks: Cell::new(0),
            socket,
            bell,
        });
        let source: Rc<dyn Source> = Rc::clone(&connection) as _;
        executor.register(&source).map_err(failed)?;
        Ok(connection)
    }

    /// Its number at the server.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// Posts a checked batch.
    #[inline]
    pub(crate) fn post(
        self: &Rc<Self>,
        batch: &mut Batch,
        pool: &BufPool,
    ) -> Result<Ticket<Self>, Box<BatchFailure>> {
        let verbs = batch.len();
        let mut state = self.state.borrow_mut();
        if let Some(error) = &state.ended {
            return Err(BatchFailure::not_executed(error.clone(), verbs));
        }
        let lane = if batch.bytes() > BULK_BYTES { BULK } else { SHORT };
        let key = state.slots.insert(verbs);
        let posted = state.lanes[lane].post(batch, pool, key);
        drop(state);
        let is_taken = posted.map_err(|error| {
            self.state.borrow_mut().slots.remove(key);
            BatchFailure::not_executed(error, verbs)
        })?;
        if !is_taken {
            self.fail("a device does not take requests");
        }
        Ok(Ticket::new(self, key))
    }

    /// Sends a call, if it is short and there is room for one; otherwise it is handed back.
    pub(crate) async fn call(&self, target: Target, call: Call) -> Result<CallOutcome, Call> {
        let message = wire::encode(&Asked { target, call: call.clone() });
        let slot = Arc::new(ReplySlot::default());
        {
            let mut state = self.state.borrow_mut();
            if state.ended.is_some() || state.credit == 0 || message.len() > SLOT_BYTES {
                return Err(call);
            }
            state.credit -= 1;
            state.calls.insert(call.id, (Arc::clone(&slot), self.executor.now()));
            if !self.mailbox.send(state.lanes[SHORT].queue(), message) {
                state.calls.remove(&call.id);
                return Err(call);
            }
        }
        let _waiting = Waiting { connection: self, id: call.id };
        let outcome = slot.wait().await;
        let too_long = &mut self.state.borrow_mut().too_long;
        match too_long.iter().position(|id| *id == call.id) {
            // The line brings the answer, since the same call is not run again.
            Some(n) => {
                too_long.swap_remove(n);
                Err(call)
            }
            None => Ok(outcome),
        }
    }

    /// Nothing more is sent or taken in: what is under way is unknown.
    pub(crate) fn break_off(&self, error: &FabricError) {
        let (wakers, calls) = self.state.borrow_mut().break_off(self.server, error);
        let _ = self.socket.shutdown(Shutdown::Both);
        // Outside the borrow, since tasks may be polled anywhere.
        wakers.into_iter().for_each(Waker::wake);
        for slot in calls {
            slot.set(Err(CallError::Unknown));
        }
    }

    /// Looks whether the server is gone, or has fenced the session; whether that is so.
    fn look_at_socket(&self) -> bool {
        let mut said = [0; 1];
        let error = match (&mut &self.socket).read(&mut said) {
            Ok(1) if said[0] == FENCED => FabricError::Fenced { session: self.session },
            Err(error) if is_passing(&error) => return false,
            Ok(_) | Err(_) => FabricError::Disconnected { server: self.server },
        };
        let is_news = self.state.borrow().ended.is_none();
        self.break_off(&error);
        is_news
    }

    fn fail(&self, why: &str) {
        // The server may have said more than the device knows.
        if self.look_at_socket() {
            return;
        }
        let (server, id) = (self.server, self.id);
        tracing::warn!(%server, id, "a connection to a memory server failed: {why}");
        self.break_off(&FabricError::Disconnected { server });
    }

    /// Takes in what has completed; whether there was anything.
    fn take_in(&self) -> bool {
        let mut failure = None;
        let polled = self.completions.poll(|completion| {
            if failure.is_none() {
                failure = self.heed(&completion).err();
            }
        });
        let is_news = polled.as_ref().map_or(true, |count| *count > 0);
        if polled.is_err() {
            failure = Some("its completions cannot be read".to_owned());
        }
        if let Some(why) = failure {
            self.fail(&why);
        }
        is_news
    }

    fn heed(&self, completion: &Completion) -> Result<(), String> {
        let mut state = self.state.borrow_mut();
        if state.ended.is_some() {
            return Ok(());
        }
        if !completion.is_success() {
            return Err(describe(completion.status));
        }
        if completion.is_receive {
            drop(state);
            return self.hear(completion);
        }
        if completion.id & IS_MESSAGE != 0 {
            let is_fine = self.mailbox.sent(state.lanes[SHORT].queue(), completion.id);
            return if is_fine { Ok(()) } else { Err("a device does not send".to_owned()) };
        }
        let State { lanes, slots, .. } = &mut *state;
        let lane = lanes.iter_mut().find(|lane| lane.queue().end_point().number == completion.queue);
        let is_fine = lane.is_some_and(|lane| {
            lane.completed(completion.id, |key, outputs| slots.finish(key, Ok(Completed { outputs })))
        });
        if is_fine { Ok(()) } else { Err("a device does not take requests".to_owned()) }
    }

    /// A message has come: the answer to a call.
    fn hear(&self, completion: &Completion) -> Result<(), String> {
        let slot = usize::try_from(completion.id).unwrap_or(usize::MAX);
        if slot >= SLOTS {
            return Err("a message arrived nowhere".to_owned());
        }
        let message = self.mailbox.take(slot, completion.bytes);
        let mut state = self.state.borrow_mut();
        if !state.lanes[SHORT].queue().receive(slot) {
            return Err("a device does not receive".to_owned());
        }
        state.credit = (state.credit + 1).min(SLOTS);
        let note =
            wire::decode(&message).map_err(|_| "the answers of the server make no sense".to_owned())?;
        let (to, outcome) = match note {
            Note::Answered { to, outcome } => (to, outcome),
            Note::TooLong { to } => {
                // Only if somebody still waits, who takes it out again.
                if state.calls.contains_key(&to) {
                    state.too_long.push(to);
                }
                (to, Err(CallError::Unknown))
            }
        };
        let waiting = state.calls.remove(&to);
        drop(state);
        if let Some((waiting, _)) = waiting {
            waiting.set(outcome);
        }
        Ok(())
    }
}

impl State {
    fn break_off(&mut self, server: ServerId, error: &FabricError) -> (Vec<Waker>, Vec<Arc<ReplySlot>>) {
        if self.ended.is_some() {
            return (Vec::new(), Vec::new());
        }
        self.ended = Some(error.clone());
        // When the queue pairs are gone, nothing is written into a buffer any more.
        let unsent: Vec<usize> = self
            .lanes
            .iter_mut()
            .flat_map(Sender::end)
            .filter(|(_, has_begun)| !has_begun)
            .map(|(key, _)| key)
            .collect();
        let wakers = self.slots.end(|key, verbs| {
            if unsent.contains(&key) {
                return BatchFailure::not_executed(error.clone(), *verbs);
            }
            let unknown = match error {
                FabricError::Fenced { .. } => error.clone(),
                _ => FabricError::Unknown { server },
            };
            let outcomes = (0..*verbs).map(|_| VerbOutcome::Unknown).collect();
            Box::new(BatchFailure { error: unknown, at: 0, outcomes })
        });
        (wakers, self.calls.drain().map(|(_, (slot, _))| slot).collect())
    }

    /// Calls that are waited for since before `then`; they are waited for no longer.
    fn overdue_calls(&mut self, then: Nanos) -> Vec<Arc<ReplySlot>> {
        let mut overdue = Vec::new();
        self.calls.retain(|_, (slot, since)| {
            let is_overdue = *since < then;
            overdue.extend(is_overdue.then(|| Arc::clone(slot)));
            !is_overdue
        });
        overdue
    }

    fn is_expecting(&self) -> bool {
        self.ended.is_none() && (!self.calls.is_empty() || self.lanes.iter().any(|lane| !lane.is_idle()))
    }
}

/// What became of a request, in words.
fn describe(status: u32) -> String {
    let what = match status {
        4 | 8 => "a local buffer is not registered",
        5 => "the queue pair was ended",
        9 | 11 => "the server refuses a request as invalid",
        10 => "the server refuses access",
        12 => "the server does not answer",
        13 => "the server takes no more messages",
        _ => "the device failed",
    };
    format!("{what} (completion status {status})")
}

impl Carries for Connection {
    type Batch = usize;

    fn slots(&self) -> RefMut<'_, Slots<usize>> {
        RefMut::map(self.state.borrow_mut(), |state| &mut state.slots)
    }

    fn is_awaited(&self) {
        // A device in software has done what it was asked by the time that posting returns; then there is no way to the executor and back.
        let is_alone = self.state.borrow().lanes.iter().map(Sender::batches).sum::<usize>() == 1;
        let early = self.early_looks.get();
        if is_alone && early < MAX_EARLY_LOOKS {
            self.early_looks.set(early + 1);
            self.take_in();
        }
    }
}

impl Source for Connection {
    fn flush(&self) -> bool {
        false
    }

    fn advance(&self) -> bool {
        self.early_looks.set(0);
        self.has_news.set(false);
        if self.is_armed.replace(false) {
            self.completions.settle();
            if self.look_at_socket() {
                return true;
            }
        } else if !self.is_expecting() {
            return false;
        }
        self.take_in()
    }

    fn expire(&self, now: Nanos) -> bool {
        let then = now.saturating_sub(self.patience);
        let (since, overdue) = {
            let mut state = self.state.borrow_mut();
            let since = state.lanes.iter_mut().filter_map(|lane| lane.is_waiting_since(now)).min();
            (since, state.overdue_calls(then))
        };
        if since.is_some_and(|since| since < then) {
            self.fail("it did not answer in time");
            return true;
        }
        // The place of such a call stays taken until it is answered: the answer may still come.
        for slot in &overdue {
            slot.set(Err(CallError::Unknown));
        }
        !overdue.is_empty()
    }

    fn is_expecting(&self) -> bool {
        self.state.borrow().is_expecting()
    }

    fn interest(&self) -> Option<PollFd<'_>> {
        if self.state.borrow().ended.is_some() {
            return None;
        }
        if !self.is_armed.replace(true) {
            // What completes from here on is told; what did before has to be looked for once more.
            let armed = self.completions.arm();
            self.has_news.set(self.take_in() || armed.is_err());
        }
        Some(PollFd::new(&self.bell, PollFlags::IN))
    }

    fn deadline(&self) -> Option<Nanos> {
        if self.has_news.get() {
            return Some(0);
        }
        let state = self.state.borrow();
        let calls = state.calls.values().map(|(_, since)| *since);
        let since = state.lanes.iter().filter_map(Sender::waiting_since).chain(calls).min();
        since.map(|since| since.saturating_add(self.patience + 1))
    }

    fn spin(&self) -> Spin {
        SPIN
    }
}

/// What is ready when either is.
fn bell(completions: &CompletionQueue, socket: &TcpStream) -> io::Result<OwnedFd> {
    let bell = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    epoll::add(&bell, completions, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
    epoll::add(&bell, socket, epoll::EventData::new_u64(1), epoll::EventFlags::IN)?;
    Ok(bell)
}

impl Drop for Connection {
    fn drop(&mut self) {
        // What was posted and detached takes effect, if the server is there; nobody asks whether it did.
        for _ in 0..LAST_LOOKS {
            if !self.is_expecting() {
                break;
            }
            if !self.take_in() {
                std::thread::yield_now();
            }
        }
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Connection({} to {})", self.id, self.server)
    }
}

/// Stops waiting for an answer when the caller goes away.
struct Waiting<'a> {
    connection: &'a Connection,
    id: CallId,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut state = self.connection.state.borrow_mut();
        state.calls.remove(&self.id);
        state.too_long.retain(|id| *id != self.id);
    }
}
