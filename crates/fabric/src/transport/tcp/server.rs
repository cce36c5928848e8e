//! The server's end of verbs: one thread that carries out the batches of all connections.
//!
//! 1. The door admits a connection ([`Desk::admit`]): a gate for the session's endpoint; if it comes instead of an earlier
//!    connection, that one's gate is closed first, so that nothing of it can land any more.
//! 2. The thread reads what has come on a connection, carries out every batch that is whole, and sends all replies at once.
//! 3. It spins on the connections that were busy just now for [`SPIN_NS`], then sleeps until something comes.
//!
//! A session that is fenced or closed has no more use for its connections: what has come on them is answered (`FENCED`), the client is told that
//! this is the end, and they are closed. Where there is no room for another connection, one whose gate is closed goes, then the idlest of the
//! session that has most.
//!
//! **Turns.** Of those that have something, sessions take turns, and a session's connections take turns in those of their session; a turn ends
//! after [`QUANTUM_BYTES`]. So who asks for little does not wait for all that others ask for, on however many connections.
//!
//! Memory is bounded: a connection whose replies are not read is not read from, and keeps what it was stopped at. A batch that
//! must not be carried out ends its connection, with the reason.
//!
//! Invariant (*OWN GATE*): a gate is given back by this thread, when it has forgotten the connection that had it.

use super::buffer::{Outgoing, first_frame};
use super::execute::{Reach, put_notice};
use super::frames::Admission;
use super::verbs::{MAX_REQUEST_BYTES, Refusal};
use crate::addr::SessionId;
use crate::call::Principal;
use crate::clock::{MICROSECOND, Nanos, RealClock};
use crate::exec::lock;
use crate::rarely::Rarely;
use crate::status::Traffic;
use crate::transport::host::Host;
use crate::transport::host::gates::Gate;
use crate::transport::line::frames::frame;
use crate::wake::{Bell, Wake};
use rustc_hash::FxHashMap;
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use slab::Slab;
use std::collections::VecDeque;
use std::fmt;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// How long the thread looks for more before it sleeps.
const SPIN_NS: Nanos = 50 * MICROSECOND;
/// Of so many busy connections each is tried in turn; of more, the system is asked which have something.
const FEW: usize = 4;
/// While it tries the busy ones, the thread asks about all others every so many rounds.
const ROUNDS_PER_LOOK: u32 = 16;
/// Room for what comes of a connection: more than the longest request, and what is read in a turn.
const READ_BYTES: usize = 512 << 10;
const _: () = assert!(READ_BYTES > MAX_REQUEST_BYTES + 4 + QUANTUM_OF_FEW_BYTES);
/// So much is read from a connection in one turn, and when its replies have so many bytes, its other requests wait. When so much has been
/// done, the thread asks who else has something.
const QUANTUM_BYTES: usize = 64 << 10;
/// The same when few are busy.
const QUANTUM_OF_FEW_BYTES: usize = 128 << 10;
/// What a turn costs beside its bytes, in bytes.
const TURN_BYTES: usize = 256;
/// So many requests ahead, their memory is asked for.
const AHEAD: usize = 4;
/// What a client may have without a reply: batches, and bytes of them and their replies.
const CREDIT_BATCHES: u32 = 1024;
const CREDIT_BYTES: u32 = 4 << 20;
/// How many connections there may be; less if there are fewer gates. And how many of one session.
pub(crate) const MAX_CONNECTIONS: usize = if cfg!(test) { 16 } else { 8192 };
const MAX_OF_A_SESSION: usize = if cfg!(test) { 12 } else { 1024 };
/// Of what a client still sends when its connection ends, so many reads are thrown away, lest the system take back what was said last.
const LAST_READS: usize = 16;
/// What all connections may hold together of requests that have not come whole and of replies that are not read. If it is more, one of those
/// that hold much has to go: the one that has taken longest.
const MAX_HELD_BYTES: usize = 256 << 20;
const MUCH_BYTES: usize = 16 << 10;
/// What is kept of a request that has not come whole grows in such steps.
const KEPT_STEP_BYTES: usize = 4 << 10;
/// The name of the wake-up among the connections.
const WOKEN: u64 = u64::MAX;

/// What a verbs connection asks for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked {
    pub(crate) who: Principal,
    /// The connection that is to be fenced first; 0: none.
    pub(crate) replaces: u64,
}

/// What it gets.
#[derive(Debug)]
pub(crate) enum Admitted {
    Yes(Box<Newcomer>, Admission),
    No(Admission),
}

/// A connection for the thread to serve.
#[derive(Debug)]
pub(crate) struct Newcomer {
    id: u64,
    session: SessionId,
    socket: Arc<TcpStream>,
    reach: Reach,
    arrived: Vec<u8>,
    active_at: Arc<AtomicU64>,
}

/// A connection, to those who may have to fence it.
#[derive(Debug)]
struct Known {
    who: Principal,
    gate: Gate,
    socket: Arc<TcpStream>,
    /// When it was last busy.
    active_at: Arc<AtomicU64>,
    /// It has to make room for another, as soon as the thread finds out.
    is_going: bool,
}

/// Where verbs are carried out.
pub(crate) struct Desk {
    host: Arc<Host>,
    epoll: OwnedFd,
    wake: Arc<Wake>,
    fenced: Arc<Bell>,
    clock: RealClock,
    stop: AtomicBool,
    next_id: AtomicU64,
    known: Mutex<FxHashMap<u64, Known>>,
    newcomers: Mutex<Vec<Newcomer>>,
    any_newcomers: AtomicBool,
    counts: Counts,
    ended: Rarely,
}

/// What was done so far. One thread counts.
#[derive(Default, Debug)]
struct Counts {
    batches: AtomicU64,
    verbs: AtomicU64,
    bytes_in: AtomicU64,
    bytes_out: AtomicU64,
}

impl Counts {
    fn add(&self, done: &Done) {
        let counts = [
            (&self.batches, done.batches),
            (&self.verbs, done.verbs),
            (&self.bytes_in, done.bytes_in),
            (&self.bytes_out, done.bytes_out),
        ];
        for (count, more) in counts {
            count.store(count.load(Ordering::Relaxed) + more, Ordering::Relaxed);
        }
    }
}

/// What was done for a connection in one turn.
#[derive(Clone, Copy, Default, Debug)]
struct Done {
    batches: u64,
    verbs: u64,
    bytes_in: u64,
    bytes_out: u64,
}

impl Desk {
    pub(crate) fn new(host: &Arc<Host>) -> io::Result<Self> {
        let wake = Arc::new(Wake::new()?);
        let fenced = Arc::new(Bell::new(&wake));
        host.tell_of_fences(Arc::clone(&fenced));
        let desk = Self {
            host: Arc::clone(host),
            epoll: epoll::create(CreateFlags::CLOEXEC)?,
            wake,
            fenced,
            clock: RealClock::new(),
            stop: AtomicBool::new(false),
            next_id: AtomicU64::new(host.first_connection()),
            known: Mutex::default(),
            newcomers: Mutex::default(),
            any_newcomers: AtomicBool::new(false),
            counts: Counts::default(),
            ended: Rarely::default(),
        };
        epoll::add(&desk.epoll, &*desk.wake, EventData::new_u64(WOKEN), EventFlags::IN)?;
        Ok(desk)
    }

    /// Decides about a connection. If it replaces another of its session, that one is fenced when this returns.
    pub(crate) fn admit(&self, asked: Asked, socket: TcpStream, arrived: Vec<u8>) -> Admitted {
        let Asked { who, replaces } = asked;
        self.fence(replaces, who);
        let (all, own) = {
            let known = lock(&self.known);
            let stay = || known.values().filter(|one| !one.is_going);
            (stay().count(), stay().filter(|one| one.who == who).count())
        };
        if own >= MAX_OF_A_SESSION || (all >= MAX_CONNECTIONS && !self.make_room(0)) {
            return Admitted::No(Admission::NoRoom {});
        }
        let opened = match self.host.connect(who, None) {
            Err(_) => return Admitted::No(Admission::NoRoom {}),
            Ok(opened) if opened.gate.number() == 0 => return Admitted::No(Admission::NotAdmitted {}),
            Ok(opened) => opened,
        };
        let (id, socket) = (self.next_id.fetch_add(1, Ordering::Relaxed), Arc::new(socket));
        let active_at = Arc::new(AtomicU64::new(self.clock.now()));
        let known = Known {
            who,
            gate: opened.gate.clone(),
            socket: Arc::clone(&socket),
            active_at: Arc::clone(&active_at),
            is_going: false,
        };
        lock(&self.known).insert(id, known);
        let reach = Reach {
            server: self.host.id(),
            table: self.host.table().restricted_to(opened.permissions),
            gate: opened.gate,
        };
        let answer = Admission::Verbs {
            connection: id,
            permissions: opened.permissions,
            batches: CREDIT_BATCHES,
            bytes: CREDIT_BYTES,
        };
        Admitted::Yes(
            Box::new(Newcomer { id, session: who.session, socket, reach, arrived, active_at }),
            answer,
        )
    }

    /// Ends a connection whose gate is closed, or the idlest one of the session that has most, if it has more than `share`.
    pub(crate) fn make_room(&self, share: usize) -> bool {
        let mut known = lock(&self.known);
        let mut counts = FxHashMap::<SessionId, usize>::default();
        for one in known.values().filter(|one| !one.is_going) {
            *counts.entry(one.who.session).or_default() += 1;
        }
        let most = counts.into_iter().filter(|(_, count)| *count > share).max_by_key(|(_, count)| *count);
        let is_of = |one: &Known| most.is_some_and(|(session, _)| one.who.session == session);
        let may_go = known.values_mut().filter(|one| !one.is_going && (!one.gate.is_open() || is_of(one)));
        let going = may_go.min_by_key(|one| (one.gate.is_open(), one.active_at.load(Ordering::Relaxed)));
        let Some(going) = going else { return false };
        going.is_going = true;
        // The thread finds out.
        let _ = going.socket.shutdown(Shutdown::Both);
        true
    }

    /// Makes sure that nothing of a connection can land any more. Only its own session may ask for that.
    fn fence(&self, id: u64, who: Principal) {
        // With the lock held: as long as the connection is known, its gate is not given back, and is nobody else's.
        let known = lock(&self.known);
        if let Some(old) = known.get(&id).filter(|old| old.who == who) {
            self.host.close(&old.gate);
            // The thread finds out, and gives the gate back.
            let _ = old.socket.shutdown(Shutdown::Both);
        }
    }

    pub(crate) fn hand_over(&self, newcomer: Box<Newcomer>) {
        lock(&self.newcomers).push(*newcomer);
        self.any_newcomers.store(true, Ordering::Release);
        self.wake.wake();
    }

    /// Adds what the desk knows to a server's status.
    pub(crate) fn report(&self, traffic: &mut Traffic) {
        traffic.connections = u32::try_from(lock(&self.known).len()).unwrap_or(u32::MAX);
        traffic.batches = self.counts.batches.load(Ordering::Relaxed);
        traffic.verbs = self.counts.verbs.load(Ordering::Relaxed);
        traffic.bytes_in = self.counts.bytes_in.load(Ordering::Relaxed);
        traffic.bytes_out = self.counts.bytes_out.load(Ordering::Relaxed);
    }

    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
        self.wake.wake();
    }

    /// The next round does not sleep.
    #[cfg(test)]
    pub(super) fn nudge(&self) {
        self.wake.wake();
    }

    /// Serves until it is told to stop.
    pub(crate) fn run(&self) {
        let mut clerk = self.clerk();
        clerk.work();
        for connection in clerk.connections.drain() {
            self.forget(&connection);
        }
    }

    pub(super) fn clerk(&self) -> Clerk<'_> {
        Clerk {
            desk: self,
            connections: Slab::new(),
            busy: Vec::new(),
            input: vec![0; READ_BYTES],
            output: Outgoing::default(),
            held_bytes: 0,
            rota: Rota::default(),
            work: 0,
            round: 0,
            active_at: self.clock.now(),
            events: Vec::with_capacity(256),
        }
    }

    fn forget(&self, connection: &Connection) {
        let mut known = lock(&self.known);
        known.remove(&connection.id);
        self.host.disconnect(&connection.reach.gate);
        drop(known);
        let _ = connection.socket.shutdown(Shutdown::Both);
    }
}

impl fmt::Debug for Desk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Desk({}, {} connections)", self.host.id(), lock(&self.known).len())
    }
}

/// A connection as the thread knows it.
#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each of them changes without the others")]
struct Connection {
    id: u64,
    socket: Arc<TcpStream>,
    reach: Reach,
    /// What has come and is not a whole request, or had to wait.
    arrived: Vec<u8>,
    /// Whether there may be whole requests in it.
    waiting: bool,
    /// Replies that the client's socket did not take yet.
    unsent: Vec<u8>,
    /// Whether the system tells when it takes more.
    watches_output: bool,
    is_busy: bool,
    session: SessionId,
    /// It waits for its turn.
    is_queued: bool,
    active_at: Nanos,
    /// The same, to those who look for the idlest.
    shown_active_at: Arc<AtomicU64>,
    /// Since when it holds what it holds.
    held_since: Nanos,
}

impl Connection {
    fn held_bytes(&self) -> usize {
        self.arrived.capacity() + self.unsent.capacity()
    }
}

/// Whose turn it is.
#[derive(Default, Debug)]
struct Rota {
    turns: VecDeque<SessionId>,
    /// The connections of each session that have something. Sessions that had some keep their place: they are few.
    of: FxHashMap<SessionId, VecDeque<usize>>,
}

impl Rota {
    fn add(&mut self, session: SessionId, key: usize) {
        let queue = self.of.entry(session).or_default();
        if queue.is_empty() {
            self.turns.push_back(session);
        }
        queue.push_back(key);
    }

    fn next(&mut self) -> Option<usize> {
        let session = self.turns.pop_front()?;
        let queue = self.of.get_mut(&session)?;
        let key = queue.pop_front();
        if !queue.is_empty() {
            self.turns.push_back(session);
        }
        key
    }

    fn is_empty(&self) -> bool {
        self.turns.is_empty()
    }
}

/// Why a connection ends.
#[derive(Debug)]
enum End {
    Gone,
    Refused(Refusal),
    /// Its session is fenced or has ended.
    Fenced,
    /// It holds much, and others are in need.
    TooMuchHeld,
}

impl From<io::Error> for End {
    fn from(_: io::Error) -> Self {
        Self::Gone
    }
}

/// The thread's state.
pub(super) struct Clerk<'a> {
    desk: &'a Desk,
    connections: Slab<Connection>,
    /// Those that had something just now.
    busy: Vec<usize>,
    input: Vec<u8>,
    output: Outgoing,
    /// What all connections hold.
    held_bytes: usize,
    /// Who has something and waits for its turn.
    rota: Rota,
    /// What has been done since the system was asked who has something, in bytes.
    work: usize,
    round: u32,
    active_at: Nanos,
    events: Vec<epoll::Event>,
}

impl Clerk<'_> {
    fn work(&mut self) {
        while !self.desk.stop.load(Ordering::Relaxed) {
            self.round();
        }
    }

    /// Looks for something to do, and does some of it.
    pub(super) fn round(&mut self) {
        let mut did = false;
        if self.desk.any_newcomers.load(Ordering::Acquire) {
            self.take_in();
            did = true;
        }
        if self.desk.fenced.has_rung() {
            self.end_the_fenced();
            did = true;
        }
        self.round = self.round.wrapping_add(1);
        let now = self.desk.clock.now();
        let sleeps = now - self.active_at > SPIN_NS;
        let quantum = self.quantum();
        for n in (0..self.busy.len()).rev() {
            let key = self.busy[n];
            if self.busy.len() <= FEW && self.rota.is_empty() && self.work < quantum {
                did |= self.attend(key, now);
            } else if self.connections.get(key).is_some_and(|c| c.waiting && c.unsent.is_empty()) {
                // It was stopped, and has something though nothing comes.
                self.enqueue(key);
            }
        }
        let is_due = self.work >= quantum || self.round % ROUNDS_PER_LOOK == 0;
        if sleeps || is_due || self.busy.len() > FEW || self.busy.is_empty() || !self.rota.is_empty() {
            let sleep = sleeps && !did && self.rota.is_empty();
            if sleep {
                self.rest();
            }
            did |= self.look(sleep);
            did |= self.attend_some(now);
            self.forget_the_calm(now);
        }
        if did {
            self.active_at = self.desk.clock.now();
        } else {
            // What is waited for may need this very core.
            std::thread::yield_now();
        }
    }

    /// How much is done before others are looked at.
    fn quantum(&self) -> usize {
        if self.busy.len() > FEW { QUANTUM_BYTES } else { QUANTUM_OF_FEW_BYTES }
    }

    /// A connection has something: it has its turn among those of its session.
    fn enqueue(&mut self, key: usize) {
        if let Some(connection) = self.connections.get_mut(key).filter(|c| !c.is_queued) {
            connection.is_queued = true;
            self.rota.add(connection.session, key);
        }
    }

    /// Serves those whose turn it is, until it is time to look who else has something.
    fn attend_some(&mut self, now: Nanos) -> bool {
        let (mut did, quantum) = (false, self.quantum());
        self.work = 0;
        while self.work < quantum {
            let Some(key) = self.rota.next() else { break };
            if let Some(connection) = self.connections.get_mut(key) {
                connection.is_queued = false;
                did |= self.attend(key, now);
            }
        }
        did
    }

    /// Whether nobody is busy.
    #[cfg(test)]
    pub(super) fn is_calm(&self) -> bool {
        let has_begun = !self.desk.any_newcomers.load(Ordering::Acquire) && !self.connections.is_empty();
        has_begun && self.busy.is_empty()
    }

    /// Nobody is busy any more.
    fn rest(&mut self) {
        for key in self.busy.drain(..) {
            if let Some(connection) = self.connections.get_mut(key) {
                connection.is_busy = false;
            }
        }
    }

    fn forget_the_calm(&mut self, now: Nanos) {
        let connections = &mut self.connections;
        self.busy.retain(|key| {
            let Some(connection) = connections.get_mut(*key) else { return false };
            connection.is_busy = connection.waiting || now.saturating_sub(connection.active_at) <= SPIN_NS;
            connection.is_busy
        });
    }

    /// Asks the system which connections have something.
    fn look(&mut self, sleep: bool) -> bool {
        let mut events = std::mem::take(&mut self.events);
        events.clear();
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        let patience = if sleep { None } else { Some(&at_once) };
        let mut did = false;
        if epoll::wait(&self.desk.epoll, rustix::buffer::spare_capacity(&mut events), patience).is_ok() {
            for event in &events {
                let data = event.data;
                match usize::try_from(data.u64()) {
                    Ok(key) if data.u64() != WOKEN => self.enqueue(key),
                    _ => {
                        self.desk.wake.settle();
                        did = true;
                    }
                }
            }
        }
        self.events = events;
        did
    }

    fn take_in(&mut self) {
        self.desk.any_newcomers.store(false, Ordering::Release);
        let newcomers = std::mem::take(&mut *lock(&self.desk.newcomers));
        for Newcomer { id, session, socket, reach, arrived, active_at: shown_active_at } in newcomers {
            let waiting = !arrived.is_empty();
            let (unsent, watches_output, is_busy, active_at) =
                (Vec::new(), false, true, self.desk.clock.now());
            let connection = Connection {
                id,
                socket,
                reach,
                arrived,
                waiting,
                unsent,
                watches_output,
                is_busy,
                session,
                is_queued: false,
                active_at,
                shown_active_at,
                held_since: active_at,
            };
            self.held_bytes += connection.held_bytes();
            let key = self.connections.insert(connection);
            let (data, socket) = (EventData::new_u64(key as u64), &self.connections[key].socket);
            if epoll::add(&self.desk.epoll, socket, data, EventFlags::IN).is_err() {
                let connection = self.connections.remove(key);
                self.held_bytes -= connection.held_bytes();
                self.desk.forget(&connection);
                continue;
            }
            self.busy.push(key);
        }
    }

    /// Sessions have ended: what has come on their connections is answered, and then they go.
    fn end_the_fenced(&mut self) {
        let now = self.desk.clock.now();
        let is_over = |connection: &Connection| !connection.reach.gate.is_open();
        let over: Vec<usize> =
            self.connections.iter().filter(|(_, c)| is_over(c)).map(|(key, _)| key).collect();
        for key in over {
            self.attend(key, now);
            if self.connections.contains(key) {
                self.end(key, &End::Fenced);
            }
        }
    }

    /// Serves one connection; whether it had something.
    fn attend(&mut self, key: usize, now: Nanos) -> bool {
        let quantum = self.quantum();
        let Some(connection) = self.connections.get_mut(key) else { return false };
        let (held, held_since) = (connection.held_bytes(), connection.held_since);
        let served = connection.serve(self.desk, &mut self.input, &mut self.output, now, quantum);
        if connection.held_bytes() != held || connection.held_since != held_since {
            self.held_bytes = self.held_bytes - held + connection.held_bytes();
        }
        let served = served.and_then(|bytes| {
            connection.watch(&self.desk.epoll, key)?;
            Ok(bytes)
        });
        let did = match served {
            Ok(bytes) => {
                self.work += TURN_BYTES + bytes;
                let did = bytes > 0;
                if did {
                    connection.active_at = now;
                    connection.shown_active_at.store(now, Ordering::Relaxed);
                    if !connection.is_busy {
                        connection.is_busy = true;
                        self.busy.push(key);
                    }
                }
                did
            }
            Err(end) => {
                self.end(key, &end);
                true
            }
        };
        if self.held_bytes > MAX_HELD_BYTES {
            self.make_room();
        }
        did
    }

    /// Of those that hold much, the one that has taken longest goes.
    fn make_room(&mut self) {
        let much = self.connections.iter().filter(|(_, connection)| connection.held_bytes() >= MUCH_BYTES);
        let slowest = much.min_by_key(|(_, connection)| connection.held_since).map(|(key, _)| key);
        if let Some(key) = slowest {
            self.end(key, &End::TooMuchHeld);
        }
    }

    fn end(&mut self, key: usize, end: &End) {
        let connection = self.connections.remove(key);
        self.held_bytes -= connection.held_bytes();
        self.busy.retain(|busy| *busy != key);
        let why = match end {
            End::Gone => None,
            End::Fenced => {
                connection.say_fenced(&mut self.input);
                None
            }
            End::Refused(refusal) => Some(refusal.to_string()),
            End::TooMuchHeld => Some(
                "the server needs the memory that a request without end, or replies without a reader, hold"
                    .into(),
            ),
        };
        if let Some(why) = why {
            if let Some(more) = self.desk.ended.say(self.desk.clock.now()) {
                tracing::warn!("a connection was ended: {why}{more}");
            }
            // It fits, or the client has not read for long: then it finds the end without the reason.
            let _ = (&mut &*connection.socket).write(&frame(&Admission::Refused { why }));
        }
        // The socket leaves the epoll set when it is closed.
        let _ = epoll::delete(&self.desk.epoll, &connection.socket);
        self.desk.forget(&connection);
    }
}

impl Connection {
    /// Sends what waits, reads, carries out, replies. How many bytes that were, of requests and replies.
    fn serve(
        &mut self,
        desk: &Desk,
        input: &mut [u8],
        output: &mut Outgoing,
        now: Nanos,
        quantum: usize,
    ) -> Result<usize, End> {
        if !self.unsent.is_empty() {
            let sent = send(&self.socket, &self.unsent)?;
            self.unsent.drain(..sent);
            if !self.unsent.is_empty() {
                return Ok(sent);
            }
            if self.unsent.capacity() > MUCH_BYTES {
                self.unsent = Vec::new();
            }
        }
        let mut end = self.arrived.len();
        input[..end].copy_from_slice(&self.arrived);
        if !self.waiting {
            let limit = input.len().min(end + quantum);
            match (&mut &*self.socket).read(&mut input[end..limit]) {
                Ok(0) => return Err(End::Gone),
                Ok(bytes) => end += bytes,
                Err(error) if is_passing(&error) => return Ok(0),
                Err(_) => return Err(End::Gone),
            }
        }
        self.waiting = false;
        let (mut at, mut ended, mut done) = (0, None, Done::default());
        let (mut announced, mut announced_to) = (0, 0);
        while output.len() < quantum {
            while announced < AHEAD {
                let Ok(Some(request)) = first_frame(&input[announced_to..end], MAX_REQUEST_BYTES) else {
                    break;
                };
                self.reach.announce(request, desk.host.memory());
                announced_to += 4 + request.len();
                announced += 1;
            }
            announced = announced.saturating_sub(1);
            match first_frame(&input[at..end], MAX_REQUEST_BYTES) {
                Ok(Some(request)) => match self.reach.execute(request, desk.host.memory(), output) {
                    Ok(verbs) => {
                        at += 4 + request.len();
                        done.batches += 1;
                        done.verbs += u64::from(verbs);
                    }
                    Err(refusal) => {
                        ended = Some(refusal);
                        break;
                    }
                },
                Ok(None) => break,
                Err(_) => {
                    ended = Some(Refusal::Malformed);
                    break;
                }
            }
        }
        self.waiting = output.len() >= quantum && ended.is_none();
        self.keep(&input[at..end], at > 0, now);
        (done.bytes_in, done.bytes_out) = (at as u64, output.len() as u64);
        desk.counts.add(&done);
        // What has come may be less than a request.
        let bytes = (at + output.len()).max(1);
        let sent = send(&self.socket, output.unsent());
        let sent = sent.inspect_err(|_| output.advance(output.len()))?;
        self.unsent.extend_from_slice(&output.unsent()[sent..]);
        output.advance(output.len());
        ended.map_or(Ok(bytes), |refusal| Err(End::Refused(refusal)))
    }

    /// Tells the client that its session is fenced: whatever has not been answered was not carried out. If it does not read, it learns so when it
    /// comes again.
    fn say_fenced(&self, input: &mut [u8]) {
        if self.unsent.is_empty() {
            let mut notice = Outgoing::default();
            put_notice(&mut notice);
            let _ = send(&self.socket, notice.unsent());
        }
        for _ in 0..LAST_READS {
            if !matches!((&mut &*self.socket).read(input), Ok(1..)) {
                return;
            }
        }
    }

    /// Keeps what has come and is not a whole request, in no more memory than that.
    fn keep(&mut self, rest: &[u8], has_advanced: bool, now: Nanos) {
        if has_advanced || self.arrived.is_empty() {
            self.held_since = now;
        }
        self.arrived.clear();
        if self.arrived.capacity() > MUCH_BYTES.max(2 * rest.len()) {
            self.arrived = Vec::new();
        }
        self.arrived.reserve_exact(rest.len().next_multiple_of(KEPT_STEP_BYTES));
        self.arrived.extend_from_slice(rest);
    }

    /// Lets the system say when the client's socket takes more, as long as there is more.
    fn watch(&mut self, epoll: &OwnedFd, key: usize) -> Result<(), End> {
        let watches = !self.unsent.is_empty();
        if watches != self.watches_output {
            // What is not read is not asked for: otherwise the system would say so again and again.
            let flags = if watches { EventFlags::OUT } else { EventFlags::IN };
            epoll::modify(epoll, &self.socket, EventData::new_u64(key as u64), flags)
                .map_err(io::Error::from)?;
            self.watches_output = watches;
        }
        Ok(())
    }
}

/// Whether a socket is only not ready.
pub(crate) fn is_passing(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// Sends as much as the socket takes.
pub(crate) fn send(mut socket: &TcpStream, bytes: &[u8]) -> io::Result<usize> {
    if bytes.is_empty() {
        return Ok(0);
    }
    match socket.write(bytes) {
        Ok(0) => Err(io::ErrorKind::WriteZero.into()),
        Err(error) if is_passing(&error) => Ok(0),
        sent => sent,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sessions_take_turns_and_so_do_the_connections_of_each() {
        let mut rota = Rota::default();
        let sessions = [1, 2, 3].map(SessionId::new);
        for key in 0..1000 {
            rota.add(sessions[0], key);
        }
        assert_eq!(rota.next(), Some(0));
        rota.add(sessions[1], 2000);
        rota.add(sessions[1], 2001);
        rota.add(sessions[2], 3000);
        let order: Vec<_> = std::iter::from_fn(|| rota.next()).collect();
        assert_eq!(order[..6], [1, 2000, 3000, 2, 2001, 3]);
        assert!(order.len() == 1002 && rota.is_empty());
        rota.add(sessions[1], 7);
        assert_eq!((rota.next(), rota.next()), (Some(7), None));
    }
}
