//! One endpoint's connection to one server, on the client's side.
//!
//! Batches become frames in the output; the executor sends them when it has run out of ready tasks and takes in replies, which
//! come in the order of the requests. What goes beyond the server's credit waits its turn.
//!
//! Invariant: a slot stays until its ticket is gone and all its frames are answered. A connection that has broken stays so, and
//! has nothing in flight.

use super::buffer::{Incoming, Outgoing, first_frame};
use super::pieces::{Piece, Sending};
use super::server::{is_passing, send};
use super::verbs::{BATCH, FENCED, MAX_REPLY_BYTES, REFUSED, take_head};
use crate::addr::{ServerId, SessionId};
use crate::buf::BufPool;
use crate::clock::Nanos;
use crate::error::FabricError;
use crate::exec::{Executor, Source};
use crate::transport::slots::{Carries, Slots, Ticket};
use crate::verb::{Batch, BatchFailure, BatchResult, Completed, Output, VerbOutcome};
use crate::wire::{Malformed, Wire};
use rustix::event::{PollFd, PollFlags};
use smallvec::SmallVec;
use std::cell::{Cell, RefCell, RefMut};
use std::collections::VecDeque;
use std::fmt;
use std::io::{self, Read};
use std::net::{Shutdown, TcpStream};
use std::rc::Rc;
use std::task::Waker;

/// So much is sent at once, though tasks are still ready.
const SEND_BYTES: usize = 64 << 10;
/// What is read at a time; pages that are not needed are not touched.
const READ_BYTES: usize = 1 << 20;
const _: () = assert!(READ_BYTES >= 2 * (MAX_REPLY_BYTES + 4));

/// What the server allows to be under way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Credit {
    pub(crate) batches: usize,
    pub(crate) bytes: usize,
}

/// Who is connected to whom.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ends {
    /// The connection's number at the server.
    pub(crate) id: u64,
    pub(crate) server: ServerId,
    pub(crate) session: SessionId,
}

/// One connection.
pub(crate) struct Connection {
    ends: Ends,
    socket: TcpStream,
    credit: Credit,
    patience: Nanos,
    state: RefCell<State>,
    /// The executor has waited for the socket: it may have something though nothing is expected.
    look: Cell<bool>,
    /// Nothing is under way, and nothing is to be sent.
    rests: Rc<Cell<bool>>,
}

struct State {
    out: Outgoing,
    input: Incoming,
    /// Batches that are not, or not wholly, in frames yet, with their slots.
    backlog: VecDeque<(usize, Sending)>,
    /// Frames without a reply, with their slots.
    awaited: VecDeque<(usize, Piece)>,
    /// When frames were first seen to be without a reply, since the last reply.
    waiting_since: Option<Nanos>,
    slots: Slots<Results>,
    next_sequence: u32,
    next_reply: u32,
    unanswered_bytes: usize,
    broken: bool,
}

/// What has come of a batch so far.
#[derive(Debug)]
pub(crate) struct Results {
    outputs: SmallVec<[Output; 2]>,
    failure: Option<Box<BatchFailure>>,
}

impl Connection {
    pub(crate) fn new(
        ends: Ends,
        socket: TcpStream,
        credit: Credit,
        patience: Nanos,
        executor: &Executor,
    ) -> io::Result<Rc<Self>> {
        socket.set_nonblocking(true)?;
        let state = State {
            out: Outgoing::default(),
            input: Incoming::new(READ_BYTES),
            backlog: VecDeque::new(),
            awaited: VecDeque::new(),
            waiting_since: None,
            slots: Slots::new(),
            next_sequence: 0,
            next_reply: 0,
            unanswered_bytes: 0,
            broken: false,
        };
        let (state, look) = (RefCell::new(state), Cell::new(false));
        let connection = Rc::new(Self { ends, socket, credit, patience, state, look, rests: Rc::default() });
        let source: Rc<dyn Source> = Rc::clone(&connection) as _;
        executor.register(&source)?;
        Ok(connection)
    }

    /// Its number at the server.
    pub(crate) fn id(&self) -> u64 {
        self.ends.id
    }

    /// Posts a checked batch.
    pub(crate) fn post(
        self: &Rc<Self>,
        batch: &mut Batch,
        pool: &BufPool,
    ) -> Result<Ticket<Self>, Box<BatchFailure>> {
        let mut state = self.state.borrow_mut();
        if state.broken {
            let error = FabricError::Disconnected { server: self.ends.server };
            return Err(BatchFailure::not_executed(error, batch.len()));
        }
        self.rests.set(false);
        let sending = Sending::new(std::mem::take(&mut batch.verbs));
        let key = state.slots.insert(Results { outputs: sending.outputs(pool), failure: None });
        state.backlog.push_back((key, sending));
        state.fill(self.credit);
        let hurry = state.out.len() >= SEND_BYTES;
        drop(state);
        if hurry {
            self.flush();
        }
        Ok(Ticket::new(self, key))
    }

    /// Nothing more is sent or taken in: what is under way is unknown.
    pub(crate) fn break_off(&self) {
        let _ = self.socket.shutdown(Shutdown::Both);
        let wakers = self.state.borrow_mut().break_off(self.ends.server);
        // Outside the borrow, since tasks may be polled anywhere.
        wakers.into_iter().for_each(Waker::wake);
    }

    fn take_in(&self) -> Result<bool, Lost> {
        let state = &mut *self.state.borrow_mut();
        let space = state.input.space();
        match (&mut &self.socket).read(space) {
            Ok(0) => return Err(Lost::Closed),
            Ok(bytes) => state.input.filled(bytes),
            Err(error) if is_passing(&error) => return Ok(false),
            Err(_) => return Err(Lost::Closed),
        }
        while let Some(frame) = first_frame(state.input.arrived(), MAX_REPLY_BYTES)? {
            let bytes = 4 + frame.len();
            let mut rest = frame;
            if frame.first() == Some(&REFUSED) {
                rest = &frame[1..];
                return Err(Lost::Refused(String::take(&mut rest)?));
            }
            let (kind, verbs, sequence) = take_head(&mut rest)?;
            let Some((key, piece)) = state.awaited.pop_front() else { return Err(Malformed.into()) };
            if sequence != state.next_reply || usize::from(verbs) != piece.verbs() {
                return Err(Malformed.into());
            }
            state.next_reply = state.next_reply.wrapping_add(1);
            state.unanswered_bytes -= piece.cost;
            state.waiting_since = None;
            let Some(results) = state.slots.batch(key) else { return Err(Malformed.into()) };
            match kind {
                BATCH => piece.land(rest, &mut results.outputs)?,
                FENCED => results.fenced(&piece, self.ends.session),
                _ => return Err(Malformed.into()),
            }
            if piece.is_last {
                let result = results.complete();
                state.slots.finish(key, result);
            }
            state.input.consume(bytes);
        }
        Ok(true)
    }
}

impl State {
    /// Puts batches into frames as far as the credit goes.
    fn fill(&mut self, credit: Credit) {
        while self.awaited.len() < credit.batches && self.unanswered_bytes < credit.bytes {
            let Some((key, sending)) = self.backlog.front_mut() else { return };
            let piece = sending.next(self.next_sequence, &mut self.out);
            self.next_sequence = self.next_sequence.wrapping_add(1);
            self.unanswered_bytes += piece.cost;
            let (key, is_last) = (*key, piece.is_last);
            self.awaited.push_back((key, piece));
            if is_last {
                self.backlog.pop_front();
            }
        }
    }

    fn break_off(&mut self, server: ServerId) -> Vec<Waker> {
        self.broken = true;
        self.out = Outgoing::default();
        self.awaited.clear();
        self.waiting_since = None;
        self.unanswered_bytes = 0;
        let unsent: Vec<usize> =
            self.backlog.drain(..).filter(|(_, sending)| !sending.has_begun()).map(|(key, _)| key).collect();
        self.slots.end(|key, batch| {
            let verbs = batch.outputs.len();
            if unsent.contains(&key) {
                return BatchFailure::not_executed(FabricError::Disconnected { server }, verbs);
            }
            let outcomes = (0..verbs).map(|_| VerbOutcome::Unknown).collect();
            Box::new(BatchFailure { error: FabricError::Unknown { server }, at: 0, outcomes })
        })
    }
}

impl Carries for Connection {
    type Batch = Results;

    fn slots(&self) -> RefMut<'_, Slots<Results>> {
        RefMut::map(self.state.borrow_mut(), |state| &mut state.slots)
    }
}

impl Results {
    /// The last frame is answered.
    fn complete(&mut self) -> BatchResult {
        let outputs = std::mem::take(&mut self.outputs);
        let Some(mut failure) = self.failure.take() else { return Ok(Completed { outputs }) };
        // What was before the fence is complete.
        for (outcome, output) in failure.outcomes.iter_mut().zip(outputs).take(failure.at) {
            *outcome = VerbOutcome::Completed(output);
        }
        Err(failure)
    }

    /// A frame was not carried out, because the session is fenced.
    fn fenced(&mut self, piece: &Piece, session: SessionId) {
        if self.failure.is_none() {
            let outcome = |n: usize| {
                let has_begun = n == piece.first && piece.continues;
                if has_begun { VerbOutcome::Unknown } else { VerbOutcome::NotExecuted }
            };
            let outcomes = (0..self.outputs.len()).map(outcome).collect();
            let error = FabricError::Fenced { session };
            self.failure = Some(Box::new(BatchFailure { error, at: piece.first, outcomes }));
        }
    }
}

/// Why a connection is of no more use.
enum Lost {
    Closed,
    Nonsense,
    Refused(String),
}

impl From<Malformed> for Lost {
    fn from(_: Malformed) -> Self {
        Self::Nonsense
    }
}

impl Source for Connection {
    fn flush(&self) -> bool {
        let mut state = self.state.borrow_mut();
        if state.broken {
            return false;
        }
        state.fill(self.credit);
        if state.out.is_empty() {
            return false;
        }
        if let Ok(sent) = send(&self.socket, state.out.unsent()) {
            state.out.advance(sent);
            return sent > 0;
        }
        drop(state);
        self.break_off();
        true
    }

    fn advance(&self) -> bool {
        {
            let state = self.state.borrow();
            let expects = !state.awaited.is_empty() || self.look.replace(false);
            if state.broken || !expects {
                self.rests.set(state.backlog.is_empty() && state.out.is_empty());
                return false;
            }
        }
        let (server, id) = (self.ends.server, self.ends.id);
        match self.take_in() {
            Ok(did) => return did,
            Err(Lost::Closed) => tracing::debug!(%server, id, "a memory server closed a connection"),
            Err(Lost::Nonsense) => {
                tracing::error!(%server, id, "the replies of a memory server make no sense");
            }
            Err(Lost::Refused(why)) => {
                tracing::error!(%server, id, "a memory server ended a connection: {why}");
            }
        }
        self.break_off();
        true
    }

    fn expire(&self, now: Nanos) -> bool {
        {
            let mut state = self.state.borrow_mut();
            if state.awaited.is_empty() {
                state.waiting_since = None;
                return false;
            }
            let since = *state.waiting_since.get_or_insert(now);
            if now.saturating_sub(since) <= self.patience {
                return false;
            }
        }
        let (server, id) = (self.ends.server, self.ends.id);
        tracing::warn!(%server, id, "a memory server did not answer in time");
        self.break_off();
        true
    }

    fn is_expecting(&self) -> bool {
        !self.state.borrow().awaited.is_empty()
    }

    fn rests(&self) -> Option<&Rc<Cell<bool>>> {
        Some(&self.rests)
    }

    fn interest(&self) -> Option<PollFd<'_>> {
        self.look.set(true);
        self.rests.set(false);
        let state = self.state.borrow();
        if state.broken {
            return None;
        }
        let output = if state.out.is_empty() { PollFlags::empty() } else { PollFlags::OUT };
        Some(PollFd::new(&self.socket, PollFlags::IN | output))
    }

    fn deadline(&self) -> Option<Nanos> {
        self.state.borrow().waiting_since.map(|since| since.saturating_add(self.patience + 1))
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // What was posted and detached goes out; whether it arrived, nobody asks.
        let state = self.state.get_mut();
        if !state.broken {
            let _ = send(&self.socket, state.out.unsent());
        }
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Connection({} to {})", self.ends.id, self.ends.server)
    }
}
