//! One endpoint's connection to one server, on the client's side.
//!
//! Batches become frames in the output; the executor sends them when it has run out of ready tasks and takes in replies, which
//! come in the order of the requests. What goes beyond the server's credit waits its turn.
//!
//! **Short batches do not wait behind long ones.** Batches have no order among each other (contract, rule 3), so long ones wait in a queue of
//! their own, of which only [`LONG_BYTES_UNDER_WAY`] are under way: that is all that a short batch can find in front of it. What a long
//! batch will bring gets its room when its turn has come, so that many of them do not take much memory.
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
use rustc_hash::FxHashMap;
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
/// A batch that moves more than this is long.
const LONG_BYTES: usize = 32 << 10;
/// Another frame of a long batch is sent while less than this is under way of them.
const LONG_BYTES_UNDER_WAY: usize = 128 << 10;

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
    short: VecDeque<(usize, Sending)>,
    /// The same; room for what they bring comes from the pool.
    long: VecDeque<(usize, Sending, BufPool)>,
    /// Frames without a reply.
    awaited: VecDeque<Awaited>,
    /// When frames were first seen to be without a reply, since the last reply.
    waiting_since: Option<Nanos>,
    slots: Slots<Results>,
    next_sequence: u32,
    next_reply: u32,
    unanswered_bytes: usize,
    /// How much of that is of long batches.
    unanswered_long_bytes: usize,
    /// Why nothing is posted any more.
    over: Option<FabricError>,
}

/// A frame without a reply.
struct Awaited {
    slot: usize,
    piece: Piece,
    is_long: bool,
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
            short: VecDeque::new(),
            long: VecDeque::new(),
            awaited: VecDeque::new(),
            waiting_since: None,
            slots: Slots::new(),
            next_sequence: 0,
            next_reply: 0,
            unanswered_bytes: 0,
            unanswered_long_bytes: 0,
            over: None,
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
        if let Some(error) = &state.over {
            return Err(BatchFailure::not_executed(error.clone(), batch.len()));
        }
        self.rests.set(false);
        let is_long = batch.bytes() > LONG_BYTES;
        let sending = Sending::new(std::mem::take(&mut batch.verbs));
        let outputs = if is_long { SmallVec::new() } else { sending.outputs(pool) };
        let key = state.slots.insert(Results { outputs, failure: None });
        if is_long {
            state.long.push_back((key, sending, pool.clone()));
        } else {
            state.short.push_back((key, sending));
        }
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

    /// The session is fenced: whatever is under way was not carried out, and nothing is sent any more.
    fn end_fenced(&self) {
        let _ = self.socket.shutdown(Shutdown::Both);
        let wakers = self.state.borrow_mut().end_fenced(self.ends.session);
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Takes in what has come; whether there was anything, be it the end.
    fn hear(&self) -> bool {
        let (server, id) = (self.ends.server, self.ends.id);
        match self.take_in() {
            Ok(did) => return did,
            Err(Lost::Fenced) => {
                self.end_fenced();
                return true;
            }
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
            if (kind, verbs) == (FENCED, 0) {
                return Err(Lost::Fenced);
            }
            let Some(Awaited { slot: key, piece, is_long }) = state.awaited.pop_front() else {
                return Err(Malformed.into());
            };
            if sequence != state.next_reply || usize::from(verbs) != piece.verbs() {
                return Err(Malformed.into());
            }
            state.next_reply = state.next_reply.wrapping_add(1);
            state.unanswered_bytes -= piece.cost;
            state.unanswered_long_bytes -= if is_long { piece.cost } else { 0 };
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
            let may_be_long = self.unanswered_long_bytes < LONG_BYTES_UNDER_WAY;
            let is_filled = may_be_long && self.fill_long() || self.fill_short();
            if !is_filled {
                return;
            }
        }
    }

    /// Sends a frame of the first short batch, if there is one.
    fn fill_short(&mut self) -> bool {
        let Some((slot, sending)) = self.short.front_mut() else { return false };
        let piece = sending.next(self.next_sequence, &mut self.out);
        let slot = *slot;
        if piece.is_last {
            self.short.pop_front();
        }
        self.await_reply(Awaited { slot, piece, is_long: false });
        true
    }

    /// The same of the first long one.
    fn fill_long(&mut self) -> bool {
        let Some((slot, sending, pool)) = self.long.front_mut() else { return false };
        if let Some(results) = self.slots.batch(*slot).filter(|_| !sending.has_begun()) {
            results.outputs = sending.outputs(pool);
        }
        let piece = sending.next(self.next_sequence, &mut self.out);
        let slot = *slot;
        if piece.is_last {
            self.long.pop_front();
        }
        self.unanswered_long_bytes += piece.cost;
        self.await_reply(Awaited { slot, piece, is_long: true });
        true
    }

    fn has_sent_all(&self) -> bool {
        self.short.is_empty() && self.long.is_empty() && self.out.is_empty()
    }

    fn await_reply(&mut self, awaited: Awaited) {
        self.next_sequence = self.next_sequence.wrapping_add(1);
        self.unanswered_bytes += awaited.piece.cost;
        self.awaited.push_back(awaited);
    }

    fn break_off(&mut self, server: ServerId) -> Vec<Waker> {
        self.over = Some(FabricError::Disconnected { server });
        self.out = Outgoing::default();
        self.awaited.clear();
        self.waiting_since = None;
        (self.unanswered_bytes, self.unanswered_long_bytes) = (0, 0);
        let short = self.short.drain(..);
        let long = self.long.drain(..).map(|(slot, sending, _)| (slot, sending));
        let unsent: FxHashMap<usize, usize> = short
            .chain(long)
            .filter(|(_, sending)| !sending.has_begun())
            .map(|(slot, sending)| (slot, sending.verbs()))
            .collect();
        self.slots.end(|slot, batch| {
            if let Some(verbs) = unsent.get(&slot) {
                return BatchFailure::not_executed(FabricError::Disconnected { server }, *verbs);
            }
            let outcomes = (0..batch.outputs.len()).map(|_| VerbOutcome::Unknown).collect();
            Box::new(BatchFailure { error: FabricError::Unknown { server }, at: 0, outcomes })
        })
    }
}

impl State {
    fn end_fenced(&mut self, session: SessionId) -> Vec<Waker> {
        let error = FabricError::Fenced { session };
        self.over = Some(error.clone());
        self.out = Outgoing::default();
        self.waiting_since = None;
        (self.unanswered_bytes, self.unanswered_long_bytes) = (0, 0);
        for Awaited { slot, piece, .. } in self.awaited.drain(..) {
            if let Some(results) = self.slots.batch(slot) {
                results.fenced(&piece, session);
            }
        }
        let long = self.long.drain(..).map(|(slot, sending, _)| (slot, sending));
        for (slot, mut sending) in self.short.drain(..).chain(long) {
            let Some(results) = self.slots.batch(slot) else { continue };
            if sending.has_begun() {
                results.fenced(&sending.next(0, &mut Outgoing::default()), session);
            } else {
                results.failure = Some(BatchFailure::not_executed(error.clone(), sending.verbs()));
            }
        }
        self.slots.end(|_, results| match results.complete() {
            Err(failure) => failure,
            // There is none: every batch has frames that were not answered.
            Ok(completed) => BatchFailure::not_executed(error.clone(), completed.outputs.len()),
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
    Fenced,
}

impl From<Malformed> for Lost {
    fn from(_: Malformed) -> Self {
        Self::Nonsense
    }
}

impl Source for Connection {
    fn flush(&self) -> bool {
        let mut state = self.state.borrow_mut();
        if state.over.is_some() {
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
        // The server may have said why before it went.
        self.hear();
        if self.state.borrow().over.is_none() {
            self.break_off();
        }
        true
    }

    fn advance(&self) -> bool {
        {
            let state = self.state.borrow();
            let expects = !state.awaited.is_empty() || self.look.replace(false);
            if state.over.is_some() || !expects {
                self.rests.set(state.has_sent_all());
                return false;
            }
        }
        self.hear()
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
        if state.over.is_some() {
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
        if state.over.is_none() {
            let _ = send(&self.socket, state.out.unsent());
        }
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Connection({} to {})", self.ends.id, self.ends.server)
    }
}

#[cfg(test)]
mod tests {
    use super::super::pieces::FRAME_BYTES;
    use super::super::verbs::HEAD_BYTES;
    use super::*;
    use crate::addr::{GlobalAddr, RegionId};
    use std::net::TcpListener;
    use std::task::{Context, Poll};

    const SERVER: ServerId = ServerId::COORDINATOR;
    const LONG: usize = 1 << 20;

    fn read(len: usize) -> Batch {
        let mut batch = Batch::new(SERVER);
        batch.read(GlobalAddr::new(SERVER, RegionId::MAIN, 0), len);
        batch
    }

    /// How many bytes each READ asks for that has come.
    fn asked(socket: &mut TcpStream) -> Vec<usize> {
        const FRAME: usize = 4 + HEAD_BYTES + 16;
        let mut bytes = [0; 64 * FRAME];
        let came = socket.read(&mut bytes).expect("something was sent");
        let length =
            |frame: &[u8]| u32::from_le_bytes(frame[16..20].try_into().expect("four bytes")) as usize;
        bytes[..came].chunks(FRAME).map(length).collect()
    }

    #[test]
    fn short_batches_do_not_wait_behind_long_ones_which_get_room_in_their_turn() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let socket = TcpStream::connect(listener.local_addr().expect("an address")).expect("it listens");
        let (mut server, _) = listener.accept().expect("it has connected");
        let (executor, pool) = (Executor::new(), BufPool::default());
        let ends = Ends { id: 1, server: SERVER, session: SessionId::new(1) };
        let credit = Credit { batches: 1024, bytes: 4 << 20 };
        let connection = Connection::new(ends, socket, credit, 1 << 40, &executor).expect("a socket");
        let long: Vec<_> =
            (0..50).map(|_| connection.post(&mut read(LONG), &pool).expect("it is up")).collect();
        let short = connection.post(&mut read(64), &pool).expect("it is up");
        connection.flush();
        assert_eq!(
            asked(&mut server),
            [FRAME_BYTES, FRAME_BYTES, 64],
            "little of one long batch is in front"
        );
        assert!(pool.slab_bytes() < 2 * LONG, "the others have no room yet");
        // Answers make way for the next part.
        let reply = |sequence, bytes: usize| {
            let head = super::super::verbs::head(BATCH, 1, sequence);
            let length = u32::try_from(HEAD_BYTES + bytes).expect("short").to_le_bytes();
            [&length[..], &head, &vec![7; bytes]].concat()
        };
        std::io::Write::write_all(&mut server, &reply(0, FRAME_BYTES)).expect("it is read");
        while connection.state.borrow().next_reply < 1 {
            connection.advance();
        }
        connection.flush();
        assert_eq!(asked(&mut server), [FRAME_BYTES]);
        // What has not begun was not executed, however many bytes it would have brought.
        connection.break_off();
        let mut context = Context::from_waker(Waker::noop());
        for (n, mut ticket) in long.into_iter().chain([short]).enumerate() {
            let Poll::Ready(Err(failure)) = ticket.poll(&mut context) else {
                panic!("it cannot have ended well")
            };
            let is_unknown = matches!(failure.error, FabricError::Unknown { .. });
            assert_eq!((is_unknown, failure.outcomes.len()), (n == 0 || n == 50, 1), "batch {n}");
        }
    }

    /// A connection and its other end.
    fn connected(executor: &Executor) -> (Rc<Connection>, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let socket = TcpStream::connect(listener.local_addr().expect("an address")).expect("it listens");
        let (server, _) = listener.accept().expect("it has connected");
        let ends = Ends { id: 1, server: SERVER, session: SessionId::new(1) };
        let credit = Credit { batches: 1024, bytes: 4 << 20 };
        (Connection::new(ends, socket, credit, 1 << 40, executor).expect("a socket"), server)
    }

    #[test]
    fn the_end_of_a_session_is_the_answer_to_all_that_is_under_way_and_to_come() {
        let (executor, pool) = (Executor::new(), BufPool::default());
        let (connection, mut server) = connected(&executor);
        let lens = [LONG, 64, LONG, 64];
        let tickets: Vec<_> =
            lens.iter().map(|len| connection.post(&mut read(*len), &pool).expect("it is up")).collect();
        connection.flush();
        // The first part of a long batch is answered, then the session ends.
        let head = super::super::verbs::head(BATCH, 1, 0);
        let length = u32::try_from(HEAD_BYTES + FRAME_BYTES).expect("short").to_le_bytes();
        let mut last = Outgoing::default();
        super::super::execute::put_notice(&mut last);
        let said = [&length[..], &head, &vec![7; FRAME_BYTES], last.unsent()].concat();
        std::io::Write::write_all(&mut server, &said).expect("it is read");
        drop(server);
        while connection.state.borrow().over.is_none() {
            connection.advance();
        }
        let fenced = FabricError::Fenced { session: SessionId::new(1) };
        let mut context = Context::from_waker(Waker::noop());
        for (n, mut ticket) in tickets.into_iter().enumerate() {
            let Poll::Ready(Err(failure)) = ticket.poll(&mut context) else { panic!("batch {n} has ended") };
            assert_eq!((&failure.error, failure.outcomes.len()), (&fenced, 1), "batch {n}");
            assert_eq!(failure.may_have_happened(0), n == 0, "batch {n}");
        }
        let later = connection.post(&mut read(64), &pool).expect_err("it is over");
        assert_eq!(later.error, fenced);
    }
}
