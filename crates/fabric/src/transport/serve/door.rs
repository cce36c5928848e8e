//! The thread that answers a server's sockets, and what each client has.
//!
//! 1. Somebody connects and is greeted. Over a Unix socket, the server takes hold of its process (a pidfd), which it must be able to
//!    end, and greets it with a nonce; the client answers with the nonce, so it was alive then.
//! 2. With the right token it becomes a *member*, who gets the descriptor of the memory, or a *caller* (TCP), who does not; or
//!    its socket is handed to the desk, which carries out verbs, or it gets queue pairs at the dock. A verbs connection that replaces another is let in when the
//!    other is fenced.
//! 3. From then on members ask for gates, and both make calls and serve their sessions' calls, until the socket closes.
//!
//! **Turns.** In each turn the lines over which sessions were heard last come first, then all others, which have one budget of messages: so a
//! heartbeat waits for few messages of others, however many they send. No line has more than [`MESSAGES_PER_TURN`]; what comes of
//! them is sent at once.
//!
//! A member whose socket closes is gone for good, and so is its lease. A caller may only have lost its way: its lease decides.
//! Those who have not introduced themselves are few at a time: a newcomer takes the place of the one who has taken longest, of the address
//! that has most of them. Where all places for clients are taken, he takes that of the line that has been silent for longest among those
//! from which no session was heard last: a session has one such line, so nobody who has something to do loses it.
//!
//! Memory is bounded: a message takes what has come of it, all of them together no more than [`MAX_ARRIVED_BYTES`], or the one among the
//! long ones that began first goes; and a client that does not read its answers is not read from.
//! A fence may hold this thread up for as long as it takes to end a stuck process.

use super::backing::Share;
use super::peer::{ENOUGH_UNSENT_BYTES, Outboxes, Peer};
use super::{Listeners, Shared, same_bytes};
use crate::clock::{MILLISECOND, Nanos, RealClock, SECOND};
use crate::rarely::Rarely;
use crate::status::ServerStatus;
use crate::transport::VIEW;
use crate::transport::host::PeerId;
use crate::transport::host::gates::{Gate, Holder};
use crate::transport::line::frames::{FromClient, FromServer, frame, status_frame, take_frame};
use crate::transport::shm::frames::{Greeting, Hello, Stranger as UnixStranger, VERSION as SHM_VERSION};
use crate::transport::shm::process::Process;
use crate::transport::shm::socket;
use crate::transport::stream::Stream;
use crate::transport::tcp::frames::{
    Admission, FEATURES, Introduction, Purpose, Stranger, VERSION, greeting,
};
use crate::transport::tcp::server::{Admitted, Asked};
use crate::transport::verbs::dock::Moored;
use crate::wire::{Malformed, encode};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::BTreeMap;
use std::io::{self, Read};
use std::net::{IpAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// How long a stranger may take to introduce itself.
const HANDSHAKE_NS: Nanos = 5 * SECOND;
/// How many processes can be connected at a time.
pub(super) const MAX_CLIENTS: usize = 1024;
/// How many may be about to introduce themselves.
pub(super) const MAX_STRANGERS: usize = 256;
/// How many newcomers are let in before those who are there have their turn.
const NEWCOMERS_PER_TURN: usize = 64;
/// When the system has no room for another socket, so many connections of a session that has more than its share of them go; so many are
/// a share.
const ROOM_CONNECTIONS: usize = 16;
const SHARE_CONNECTIONS: usize = 64;
/// How long nobody is let in when the system has no room for another socket.
const FULL_NS: Nanos = 100 * MILLISECOND;
/// How much is read from one client before the others have their turn.
const READ_BYTES: usize = 16 << 10;
/// So many messages of a line are obeyed before the others have their turn.
const MESSAGES_PER_TURN: usize = 16;
/// So many are obeyed in one turn of all who speak for no session; to hear somebody counts as one.
pub(super) const OTHERS_PER_TURN: usize = 1024;
/// What has come of messages that are not whole may take so much for all clients together; and so much makes a message a long one.
const MAX_ARRIVED_BYTES: usize = 64 << 20;
const LONG_BYTES: usize = 64 << 10;
/// A message grows by this part of itself, so that little is set aside for what may never come.
const GROWTH: usize = 8;

/// One connected socket.
struct Visitor {
    peer: Arc<Peer>,
    address: Option<IpAddr>,
    arrived: Vec<u8>,
    /// Since when the first message in it is not whole.
    arriving_since: Nanos,
    /// There may be whole messages in it, which wait until answers have been read.
    is_waiting: bool,
    heard_at: Nanos,
    stage: Stage,
}

impl Visitor {
    /// Takes in what has come, and sets little more aside for the rest.
    fn take_in(&mut self, bytes: &[u8], now: Nanos) {
        if self.arrived.is_empty() {
            self.arriving_since = now;
        }
        if self.arrived.capacity() - self.arrived.len() < bytes.len() {
            self.arrived.reserve_exact(bytes.len().max(self.arrived.len() / GROWTH));
        }
        self.arrived.extend_from_slice(bytes);
        self.heard_at = now;
    }

    /// The first message, if it is whole.
    fn next_message(&mut self, now: Nanos) -> Result<Option<FromClient>, Malformed> {
        let message = take_frame(&mut self.arrived)?;
        if message.is_some() {
            self.arriving_since = now;
            if self.arrived.capacity() > LONG_BYTES.max(2 * self.arrived.len()) {
                self.arrived.shrink_to_fit();
            }
        }
        Ok(message)
    }
}

enum Stage {
    /// Greeted on the Unix socket; has to introduce itself in time.
    Greeted { nonce: u64, since: Nanos, process: Result<Process, String> },
    /// The same, over TCP.
    GreetedFar { since: Nanos },
    /// A client that maps the memory.
    Member { holder: Arc<dyn Holder>, gates: BTreeMap<u32, Gate> },
    /// A client that may call.
    Caller,
    /// Its socket is at the desk.
    HandedOver,
    /// It has queue pairs, for as long as its socket is open.
    Moored(Arc<Moored>),
}

impl Stage {
    /// Since when it has not introduced itself, if it has not.
    fn stranger_since(&self) -> Option<Nanos> {
        match self {
            Self::Greeted { since, .. } | Self::GreetedFar { since } => Some(*since),
            Self::Member { .. } | Self::Caller | Self::HandedOver | Self::Moored(_) => None,
        }
    }
}

/// Why a visitor has to go.
enum Goodbye {
    /// It is gone already, or talks nonsense, or is somewhere else.
    Gone,
    /// It is told.
    Refused(String),
}

impl From<io::Error> for Goodbye {
    fn from(_: io::Error) -> Self {
        Self::Gone
    }
}

impl From<Malformed> for Goodbye {
    fn from(_: Malformed) -> Self {
        Self::Refused("the messages of this client make no sense to the server; use the same farwood".into())
    }
}

/// The thread's state.
pub(super) struct Door {
    shared: Arc<Shared>,
    listeners: Listeners,
    share: Share,
    token: Vec<u8>,
    clock: RealClock,
    visitors: Vec<Visitor>,
    next_peer: PeerId,
    nonces: fastrand::Rng,
    full_until: Nanos,
    /// With which of those who speak for no session the next turn begins.
    next_other: usize,
    /// What was told in this turn of how the server does.
    told: Option<Vec<u8>>,
    outboxes: Outboxes,
    logs: Logs,
}

/// What strangers can make us write.
#[derive(Default)]
struct Logs {
    full: Rarely,
    turned_away: Rarely,
    refused: Rarely,
    made_room: Rarely,
}

/// Who is at the door: for each visitor whether its socket is ready, and whether newcomers are there.
struct Ready {
    visitors: Vec<bool>,
    unix: bool,
    tcp: bool,
}

impl Door {
    pub(super) fn new(shared: &Arc<Shared>, listeners: Listeners, share: Share, token: Vec<u8>) -> Self {
        Self {
            shared: Arc::clone(shared),
            listeners,
            share,
            token,
            clock: RealClock::new(),
            visitors: Vec::new(),
            next_peer: 1,
            nonces: fastrand::Rng::new(),
            full_until: 0,
            next_other: 0,
            told: None,
            outboxes: Outboxes::default(),
            logs: Logs::default(),
        }
    }

    pub(super) fn run(mut self) {
        while !self.shared.stop.load(Ordering::SeqCst) {
            self.turn();
        }
        for visitor in &self.visitors {
            if let Stage::Member { gates, .. } = &visitor.stage {
                gates.values().for_each(Gate::shut);
            }
        }
    }

    /// Waits for something to do, and does it.
    pub(super) fn turn(&mut self) {
        let Some(ready) = self.wait() else { return };
        self.told = None;
        self.attend_all(&ready.visitors);
        self.bound_arrived();
        if ready.unix {
            self.welcome(|door| {
                let (socket, _) = door.listeners.unix.as_ref()?.accept().ok()?;
                socket.set_nonblocking(true).ok()?;
                Some((Stream::Unix(socket), None))
            });
        }
        if ready.tcp {
            self.welcome(Self::accept_far);
        }
    }

    /// Hears those who speak for sessions, then the others, as far as their budget goes; the next turn goes on with who is left.
    fn attend_all(&mut self, ready: &[bool]) {
        let speakers = self.shared.host.speakers();
        let speaks = |n: &usize| speakers.contains(&self.visitors[*n].peer.id);
        let (first, mut others): (Vec<usize>, Vec<usize>) = (0..ready.len()).partition(speaks);
        let mut leaving = Vec::new();
        for n in first {
            if let Err(goodbye) = self.attend(n, ready[n]) {
                leaving.push((n, goodbye));
            }
        }
        let begin = self.next_other.checked_rem(others.len()).unwrap_or(0);
        others.rotate_left(begin);
        let (mut budget, mut attended) = (OTHERS_PER_TURN, 0);
        for n in others {
            if budget == 0 {
                break;
            }
            let cost = match self.attend(n, ready[n]) {
                Ok(messages) => messages.max(usize::from(ready[n])),
                Err(goodbye) => {
                    leaving.push((n, goodbye));
                    1
                }
            };
            budget = budget.saturating_sub(cost);
            attended += 1;
        }
        self.next_other = begin + attended;
        // From the back, since those who leave are taken out.
        leaving.sort_unstable_by_key(|(n, _)| std::cmp::Reverse(*n));
        for (n, goodbye) in leaving {
            self.dismiss(n, goodbye);
        }
    }

    /// Waits for something to do.
    fn wait(&self) -> Option<Ready> {
        let mut ends = vec![PollFd::new(&self.shared.wake, PollFlags::IN)];
        let is_full = self.clock.now() < self.full_until;
        let unix = self.listeners.unix.as_ref().map(|listener| {
            ends.push(PollFd::new(listener, PollFlags::IN));
            ends.len() - 1
        });
        let tcp = self.listeners.tcp.as_ref().filter(|_| !is_full).map(|listener| {
            ends.push(PollFd::new(listener, PollFlags::IN));
            ends.len() - 1
        });
        let first = ends.len();
        let (mut hurry, mut at_once) = (is_full, false);
        let mut deadline = None;
        for visitor in &self.visitors {
            let flags = match visitor.peer.unsent() {
                0 => PollFlags::IN,
                unsent if unsent > ENOUGH_UNSENT_BYTES => PollFlags::OUT,
                _ => PollFlags::IN | PollFlags::OUT,
            };
            ends.push(PollFd::new(&visitor.peer.socket, flags));
            hurry |= visitor.peer.has_failed();
            at_once |= visitor.is_waiting && flags.contains(PollFlags::IN);
            if visitor.stage.stranger_since().is_some() {
                deadline = Some(Timespec { tv_sec: 1, tv_nsec: 0 });
            }
        }
        if hurry || at_once {
            deadline = Some(Timespec { tv_sec: 0, tv_nsec: if at_once { 0 } else { 10_000_000 } });
        }
        poll(&mut ends, deadline.as_ref()).ok()?;
        let ready: Vec<bool> = ends.iter().map(|end| !end.revents().is_empty()).collect();
        if ready[0] {
            self.shared.wake.settle();
        }
        let at = |n: Option<usize>| n.is_some_and(|n| ready[n]);
        Some(Ready { unix: at(unix), tcp: at(tcp), visitors: ready[first..].to_vec() })
    }

    /// The next newcomer from far away; `None` if there is none, or no room for one.
    fn accept_far(&mut self) -> Option<(Stream, Option<IpAddr>)> {
        match self.listeners.tcp.as_ref()?.accept() {
            Ok((socket, address)) => {
                let ready =
                    socket.set_nonblocking(true).and_then(|()| crate::transport::tcp::prepare(&socket));
                ready.ok()?;
                Some((Stream::Tcp(socket), Some(address.ip())))
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
            Err(error) => {
                // Mostly: too many open files. Somebody who has said nothing yet, or has nothing to say, has to make room.
                let now = self.clock.now();
                if let Some(more) = self.logs.full.say(now) {
                    tracing::warn!("cannot take another connection: {error}{more}");
                }
                self.full_until = now + FULL_NS;
                if !self.dismiss_oldest_stranger() && !self.end_connections() {
                    self.dismiss_idlest();
                }
                None
            }
        }
    }

    fn welcome(&mut self, mut next: impl FnMut(&mut Self) -> Option<(Stream, Option<IpAddr>)>) {
        for _ in 0..NEWCOMERS_PER_TURN {
            let Some((socket, address)) = next(self) else { return };
            let strangers = self.visitors.iter().filter(|v| v.stage.stranger_since().is_some()).count();
            let moored = self.visitors.iter().filter(|v| matches!(v.stage, Stage::Moored(_))).count();
            if strangers >= MAX_STRANGERS {
                self.dismiss_oldest_stranger();
            } else if self.visitors.len() - strangers - moored >= MAX_CLIENTS && !self.dismiss_idlest() {
                if let Some(more) = self.logs.turned_away.say(self.clock.now()) {
                    tracing::warn!("another client was turned away: {MAX_CLIENTS} are connected{more}");
                }
                continue;
            }
            self.greet(socket, address);
        }
    }

    /// Makes room among those who have not introduced themselves; false if there are none.
    fn dismiss_oldest_stranger(&mut self) -> bool {
        let mut of_address: BTreeMap<Option<IpAddr>, usize> = BTreeMap::new();
        for visitor in self.visitors.iter().filter(|visitor| visitor.stage.stranger_since().is_some()) {
            *of_address.entry(visitor.address).or_default() += 1;
        }
        let Some(crowd) = of_address.into_iter().max_by_key(|(_, count)| *count) else { return false };
        let strangers = self.visitors.iter().enumerate().filter(|(_, visitor)| visitor.address == crowd.0);
        let oldest = strangers.filter_map(|(n, visitor)| Some((visitor.stage.stranger_since()?, n))).min();
        let Some((_, n)) = oldest else { return false };
        self.dismiss(n, Goodbye::Gone);
        true
    }

    /// Makes room among the verbs connections; false if no session has more than its share of them.
    fn end_connections(&self) -> bool {
        let Some(desk) = &self.shared.desk else { return false };
        let ended = (0..ROOM_CONNECTIONS).take_while(|_| desk.make_room(SHARE_CONNECTIONS));
        ended.count() > 0
    }

    /// Makes room among the clients: the one that has been silent for longest goes, of those that speak for no session.
    fn dismiss_idlest(&mut self) -> bool {
        let host = &self.shared.host;
        let is_idle = |visitor: &Visitor| match &visitor.stage {
            Stage::Caller => !host.speaks(visitor.peer.id),
            Stage::Member { gates, .. } => gates.is_empty() && !host.speaks(visitor.peer.id),
            _ => false,
        };
        let idle = self.visitors.iter().enumerate().filter(|(_, visitor)| is_idle(visitor));
        let Some((n, _)) = idle.min_by_key(|(_, visitor)| visitor.heard_at) else { return false };
        let why = "the server needs the place of a client without a session; connect again";
        self.dismiss(n, Goodbye::Refused(why.into()));
        true
    }

    /// Keeps the memory bounded that messages take which have not come whole.
    fn bound_arrived(&mut self) {
        while self.visitors.iter().map(|visitor| visitor.arrived.capacity()).sum::<usize>()
            > MAX_ARRIVED_BYTES
        {
            let visitors = || self.visitors.iter().enumerate();
            let long = visitors().filter(|(_, visitor)| visitor.arrived.capacity() >= LONG_BYTES);
            let slowest = long.min_by_key(|(_, visitor)| visitor.arriving_since);
            let largest = || visitors().max_by_key(|(_, visitor)| visitor.arrived.capacity());
            let Some((n, _)) = slowest.or_else(largest) else { return };
            if let Some(more) = self.logs.made_room.say(self.clock.now()) {
                tracing::warn!("messages that do not come whole take too much memory{more}");
            }
            let why = "the server needs the memory that a message without end takes";
            self.dismiss(n, Goodbye::Refused(why.into()));
        }
    }

    fn greet(&mut self, socket: Stream, address: Option<IpAddr>) {
        let since = self.clock.now();
        let (words, stage) = match &socket {
            Stream::Unix(socket) => {
                let nonce = self.nonces.u64(..);
                let process = process_of(socket);
                (Greeting { nonce }.encode(SHM_VERSION), Stage::Greeted { nonce, since, process })
            }
            Stream::Tcp(_) => (greeting(VERSION), Stage::GreetedFar { since }),
        };
        let peer = Arc::new(Peer::new(self.next_peer, socket, &self.outboxes, &self.shared.wake));
        self.next_peer += 1;
        peer.send_bytes(&words);
        self.visitors.push(Visitor {
            peer,
            address,
            arrived: Vec::new(),
            arriving_since: since,
            is_waiting: false,
            heard_at: since,
            stage,
        });
    }

    /// Sends what waits, reads what has come, and does what it says. How many messages that were.
    fn attend(&mut self, n: usize, ready: bool) -> Result<usize, Goodbye> {
        let visitor = &mut self.visitors[n];
        let is_fine = if ready { visitor.peer.send_rest() } else { !visitor.peer.has_failed() };
        if !is_fine {
            return Err(Goodbye::Gone);
        }
        if visitor.stage.stranger_since().is_some_and(|since| self.clock.now() - since > HANDSHAKE_NS) {
            return Err(Goodbye::Refused("the client took too long to introduce itself".into()));
        }
        if !(ready || visitor.is_waiting) || visitor.peer.unsent() > ENOUGH_UNSENT_BYTES {
            return Ok(0);
        }
        let now = self.clock.now();
        if visitor.is_waiting {
            // Nothing is read before that has been done.
            return self.obey_all(n, now);
        }
        let mut buffer = [0; READ_BYTES];
        match (&visitor.peer.socket).read(&mut buffer) {
            Ok(0) => return Err(Goodbye::Gone),
            Ok(bytes) => visitor.take_in(&buffer[..bytes], now),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            Err(_) => return Err(Goodbye::Gone),
        }
        let is_client = match visitor.stage {
            Stage::Greeted { .. } => self.admit(n)?,
            Stage::GreetedFar { .. } => self.admit_far(n)?,
            Stage::Member { .. } | Stage::Caller => true,
            Stage::HandedOver => false,
            // There is nothing more to say here.
            Stage::Moored(_) if visitor.arrived.is_empty() => false,
            Stage::Moored(_) => return Err(Goodbye::Gone),
        };
        if is_client { self.obey_all(n, now) } else { Ok(0) }
    }

    /// Does what a client's next messages say, and sends what comes of them.
    fn obey_all(&mut self, n: usize, now: Nanos) -> Result<usize, Goodbye> {
        let peer = Arc::clone(&self.visitors[n].peer);
        peer.hold();
        let done = self.obey_some(n, now);
        peer.release();
        done
    }

    /// Does what a client's next messages say, as long as it reads the answers.
    fn obey_some(&mut self, n: usize, now: Nanos) -> Result<usize, Goodbye> {
        for done in 0..MESSAGES_PER_TURN {
            let visitor = &mut self.visitors[n];
            visitor.is_waiting = visitor.peer.unsent() > ENOUGH_UNSENT_BYTES;
            if visitor.is_waiting {
                return Ok(done);
            }
            let Some(message) = visitor.next_message(now)? else { return Ok(done) };
            self.obey(n, message)?;
        }
        // Perhaps: that is seen in the next turn.
        self.visitors[n].is_waiting = true;
        Ok(MESSAGES_PER_TURN)
    }

    /// Reads the introduction of a process of this machine; whether it is a client now.
    fn admit(&mut self, n: usize) -> Result<bool, Goodbye> {
        let visitor = &mut self.visitors[n];
        let Stage::Greeted { nonce, process, .. } = &mut visitor.stage else { return Ok(true) };
        let Stream::Unix(socket) = &visitor.peer.socket else { return Err(Goodbye::Gone) };
        let refused = |why: &str| Err(Goodbye::Refused(why.to_owned()));
        let hello = match Hello::decode(&visitor.arrived) {
            Ok(None) => return Ok(false),
            Ok(Some((hello, length))) => {
                visitor.arrived.drain(..length);
                hello
            }
            Err(UnixStranger::NotFarwood) => return Err(not_a_client()),
            Err(UnixStranger::Version(theirs)) => return Err(other_version("shm", SHM_VERSION, theirs)),
        };
        let process = std::mem::replace(process, Err(String::new())).map_err(Goodbye::Refused)?;
        if hello.nonce != *nonce || u64::from(hello.pid) != process.name().0 {
            return refused("the process that introduced itself is not the one that connected");
        }
        if !same_bytes(&hello.token, &self.token) {
            return Err(wrong_token());
        }
        if !process.can_be_ended() {
            return refused(
                "the server could not end this process if it got stuck; run both as the same user",
            );
        }
        if hello.pid == std::process::id() {
            return refused("a server cannot end its own process if a client in it gets stuck; use `local`");
        }
        let welcome = FromServer::Welcome {
            identity: self.shared.host.identity().clone(),
            gates: self.share.layout.gates,
            regions: self.share.layout.regions.clone(),
        };
        socket::send_with(socket, &frame(&welcome), &self.share.descriptor)?;
        visitor.stage = Stage::Member { holder: Arc::new(process), gates: BTreeMap::new() };
        Ok(true)
    }

    /// Reads an introduction that came over TCP; whether it is a client of ours now.
    fn admit_far(&mut self, n: usize) -> Result<bool, Goodbye> {
        let visitor = &mut self.visitors[n];
        let introduction = match Introduction::decode(&visitor.arrived) {
            Ok(None) => return Ok(false),
            Ok(Some((introduction, length))) => {
                visitor.arrived.drain(..length);
                introduction
            }
            Err(Stranger::NotFarwood) => return Err(not_a_client()),
            Err(Stranger::Version(theirs)) => return Err(other_version("tcp", VERSION, theirs)),
        };
        if !same_bytes(&introduction.token, &self.token) {
            return Err(wrong_token());
        }
        if introduction.features & !FEATURES != 0 {
            return Err(Goodbye::Refused(
                "the client wants what this server has not; update the server".into(),
            ));
        }
        let identity = self.shared.host.identity();
        match introduction.purpose {
            Purpose::Calls {} => {
                let welcome = Admission::Calls { identity: identity.clone(), view: VIEW };
                visitor.peer.send_bytes(&frame(&welcome));
                visitor.stage = Stage::Caller;
                Ok(true)
            }
            Purpose::Verbs { pool, server, incarnation, view, who, replaces } => {
                let is_us = (pool, server, incarnation, view)
                    == (identity.pool, identity.server, identity.incarnation, VIEW);
                if !is_us {
                    visitor.peer.send_bytes(&frame(&Admission::OtherServer {}));
                    return Err(Goodbye::Gone);
                }
                let Stream::Tcp(socket) = &visitor.peer.socket else { return Err(Goodbye::Gone) };
                let Some(desk) = &self.shared.desk else {
                    let why = "the memory of this server is reached by RDMA, whose atomics do not mix with the processor's; \
                               connect with verbs:// instead of tcp://";
                    visitor.peer.send_bytes(&frame(&Admission::Refused { why: why.into() }));
                    return Err(Goodbye::Gone);
                };
                let socket: TcpStream = socket.try_clone()?;
                let arrived = std::mem::take(&mut visitor.arrived);
                let answer = match desk.admit(Asked { who, replaces }, socket, arrived) {
                    Admitted::Yes(newcomer, answer) => {
                        // The answer goes out before the desk can reply to anything.
                        visitor.peer.send_bytes(&frame(&answer));
                        visitor.stage = Stage::HandedOver;
                        desk.hand_over(newcomer);
                        return Err(Goodbye::Gone);
                    }
                    Admitted::No(answer) => answer,
                };
                visitor.peer.send_bytes(&frame(&answer));
                Err(Goodbye::Gone)
            }
            Purpose::Queues { pool, server, incarnation, view, who, replaces, port } => {
                let is_us = (pool, server, incarnation, view)
                    == (identity.pool, identity.server, identity.incarnation, VIEW);
                let Stream::Tcp(socket) = &visitor.peer.socket else { return Err(Goodbye::Gone) };
                let admitted = match &self.shared.dock {
                    _ if !is_us => Err(Admission::OtherServer {}),
                    None => Err(Admission::Refused {
                        why: "it offers no RDMA; start it with --verbs, or connect with tcp://".into(),
                    }),
                    Some(dock) => {
                        let wanted = Asked { who, replaces };
                        dock.admit(wanted, &port, socket.try_clone()?, visitor.peer.id)
                    }
                };
                match admitted {
                    Ok((moored, answer)) => {
                        visitor.peer.send_bytes(&frame(&answer));
                        visitor.stage = Stage::Moored(moored);
                        Ok(false)
                    }
                    Err(answer) => {
                        visitor.peer.send_bytes(&frame(&answer));
                        Err(Goodbye::Gone)
                    }
                }
            }
        }
    }

    fn obey(&mut self, n: usize, message: FromClient) -> Result<(), Goodbye> {
        let host = &self.shared.host;
        let visitor = &mut self.visitors[n];
        let peer = &visitor.peer;
        match (message, &mut visitor.stage) {
            (FromClient::Connect { request, who }, Stage::Member { holder, gates }) => {
                let answer = match host.connect(who, Some(Arc::clone(holder))) {
                    Ok(opened) => {
                        let (gate, permissions) = (opened.gate.number(), opened.permissions);
                        if gate != 0 {
                            gates.insert(gate, opened.gate);
                        }
                        FromServer::Connected { request, gate, permissions }
                    }
                    Err(_) => FromServer::NoGate { request },
                };
                peer.send(&answer);
            }
            (FromClient::Disconnect { gate: number }, Stage::Member { holder, gates }) => {
                match gates.remove(&number) {
                    Some(gate) => host.disconnect(&gate),
                    None => host.reclaim(number, &**holder),
                }
            }
            // Gates are for those who map the memory.
            (FromClient::Connect { .. } | FromClient::Disconnect { .. }, _) => return Err(Malformed.into()),
            (FromClient::Call { target, call }, _) => host.call(target, call, peer.id, Arc::clone(peer) as _),
            (FromClient::Serve { request, who }, _) => {
                let accepted = host.serve(who, peer.id, Arc::clone(peer) as _);
                peer.send(&FromServer::Serving { request, accepted });
            }
            (FromClient::Reply { to, outcome }, _) => host.reply_of(peer.id, to, outcome),
            (FromClient::Status { request }, _) => {
                let told = self.told.take().unwrap_or_else(|| encode(&self.status()));
                self.visitors[n].peer.send_bytes(&status_frame(request, &told));
                self.told = Some(told);
            }
        }
        Ok(())
    }

    fn status(&self) -> ServerStatus {
        let mut status = self.shared.host.status(self.share.pages);
        let count = |is: fn(&Stage) -> bool| {
            let count = self.visitors.iter().filter(|visitor| is(&visitor.stage)).count();
            u32::try_from(count).unwrap_or(u32::MAX)
        };
        status.traffic.mapping = count(|stage| matches!(stage, Stage::Member { .. }));
        status.traffic.far = count(|stage| matches!(stage, Stage::Caller));
        if let Some(desk) = &self.shared.desk {
            desk.report(&mut status.traffic);
        }
        status
    }

    fn dismiss(&mut self, n: usize, goodbye: Goodbye) {
        let visitor = self.visitors.remove(n);
        if let Goodbye::Refused(why) = goodbye {
            if let Some(more) = self.logs.refused.say(self.clock.now()) {
                tracing::warn!("a client was refused: {why}{more}");
            }
            visitor.peer.send(&FromServer::Refused { why });
        }
        visitor.peer.forget();
        let id = visitor.peer.id;
        match visitor.stage {
            // The desk has the socket now.
            Stage::HandedOver => return,
            Stage::Member { holder, gates } => {
                let held: Vec<Gate> = gates.into_values().collect();
                self.shared.host.hung_up(id, &held, Some(&holder));
            }
            Stage::Caller => self.shared.host.hung_up(id, &[], None),
            Stage::Moored(moored) => {
                if let Some(dock) = &self.shared.dock {
                    dock.forget(&moored);
                }
                self.shared.host.hung_up(id, &[], None);
            }
            Stage::Greeted { .. } | Stage::GreetedFar { .. } => {}
        }
        hang_up(&visitor.peer.socket);
    }
}

/// Closes a socket so that what was said last is read. Bytes of the other end that nobody has read would take it back.
fn hang_up(socket: &Stream) {
    let mut unread = [0; READ_BYTES];
    let _ = (&mut &*socket).read(&mut unread);
    socket.hang_up();
}

/// The process at the other end of a Unix socket.
fn process_of(socket: &UnixStream) -> Result<Process, String> {
    let process = rustix::net::sockopt::socket_peercred(socket).map_err(io::Error::from).and_then(|who| {
        let pid = u32::try_from(who.pid.as_raw_nonzero().get());
        Process::open(pid.map_err(|_| io::ErrorKind::InvalidData)?)
    });
    process.map_err(|error| format!("the server cannot see this client's process: {error}"))
}

fn not_a_client() -> Goodbye {
    Goodbye::Refused("this is a Farwood memory server; use a farwood client".into())
}

fn wrong_token() -> Goodbye {
    Goodbye::Refused("the token is wrong; give the one in the server's --token-file".into())
}

fn other_version(protocol: &str, ours: u32, theirs: u32) -> Goodbye {
    Goodbye::Refused(format!(
        "the server speaks version {ours} of the {protocol} protocol and the client version {theirs}; use the same farwood \
         on both sides"
    ))
}
