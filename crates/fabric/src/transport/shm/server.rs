//! The server's end: one thread that answers the socket, and what each client has.
//!
//! 1. A client connects and is greeted with a nonce. The server takes hold of its process (a pidfd), which it must be able to
//!    end; the client answers with the nonce, so it was alive then.
//! 2. With the right token it gets the server's identity, the layout of its memory and the descriptor.
//! 3. From then on it asks for gates, makes calls and serves its sessions' calls, until its socket closes.
//!
//! Sockets do not block: what a client does not read waits in its outbox, up to a limit; who lets it grow beyond that is
//! dropped. A fence may hold this thread up for as long as it takes to end a stuck process.

use super::backing::{self, Backing, Share};
use super::frames::{FromClient, FromServer, Greeting, Hello, Stranger, VERSION, frame, take_frame};
use super::process::Process;
use super::socket;
use crate::addr::SessionId;
use crate::call::{Call, CallId, CallOutcome};
use crate::clock::{Nanos, RealClock, SECOND};
use crate::exec::lock;
use crate::region::Identity;
use crate::server::{ServerLogic, StartError};
use crate::transport::host::gates::{Gate, Holder};
use crate::transport::host::{Caller, Host, PeerId, SessionServer};
use crate::wire::Malformed;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// How long a stranger may take to introduce itself.
const HANDSHAKE_NS: Nanos = 5 * SECOND;
/// How many processes can be connected at a time.
const MAX_CLIENTS: usize = 1024;
/// What may wait for a client that does not read.
const MAX_OUTBOX_BYTES: usize = 64 << 20;
/// How much is read from one client before the others have their turn.
const READ_BYTES: usize = 16 << 10;

/// How a memory server is offered.
#[derive(Clone, Debug)]
pub struct ServeOptions {
    /// Where its socket is made.
    pub socket: PathBuf,
    /// Where its bytes are.
    pub backing: Backing,
    /// What clients have to know; empty: nothing.
    pub token: Vec<u8>,
}

/// Why a server process does not start. The message says what to do.
#[derive(Debug)]
#[non_exhaustive]
pub enum ServeError {
    /// The server's logic refuses the memory or the settings.
    Start(StartError),
    /// Another server listens there.
    SocketInUse {
        /// Where.
        path: PathBuf,
    },
    /// There is something else.
    NotASocket {
        /// Where.
        path: PathBuf,
    },
    /// Unix sockets have short names.
    PathTooLong {
        /// Which.
        path: PathBuf,
        /// The most bytes.
        max: usize,
    },
    /// The socket cannot be made.
    Socket {
        /// Where.
        path: PathBuf,
        /// Why not.
        error: io::Error,
    },
    /// Another server uses that memory.
    MemoryInUse {
        /// Which.
        path: PathBuf,
    },
    /// What is there has another size.
    OtherShape {
        /// Where.
        path: String,
        /// Its size.
        found: u64,
        /// What these settings need.
        expected: u64,
    },
    /// The machine has not so much.
    NotEnoughMemory {
        /// How many bytes more are needed.
        missing: u64,
        /// How many there are.
        available: u64,
    },
    /// The memory cannot be had.
    Memory {
        /// Where.
        place: String,
        /// Why not.
        error: io::Error,
    },
}

impl ServeError {
    pub(super) fn memory(place: &str) -> impl Fn(io::Error) -> Self {
        move |error| Self::Memory { place: place.to_owned(), error }
    }
}

impl fmt::Display for ServeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Start(error) => error.fmt(f),
            Self::SocketInUse { path } => {
                write!(
                    f,
                    "another server already listens at {}; choose another path or stop it",
                    path.display()
                )
            }
            Self::NotASocket { path } => {
                write!(f, "{} exists and is not a socket; choose another path", path.display())
            }
            Self::PathTooLong { path, max } => write!(
                f,
                "{} is too long for a socket, which may have {max} bytes; choose a shorter path",
                path.display()
            ),
            Self::Socket { path, error } if error.kind() == io::ErrorKind::PermissionDenied => write!(
                f,
                "no permission to make the socket {}; choose a folder that you may write to",
                path.display()
            ),
            Self::Socket { path, error } if error.kind() == io::ErrorKind::NotFound => {
                write!(f, "there is no folder for the socket {}; make it first", path.display())
            }
            Self::Socket { path, error } => write!(f, "cannot make the socket {}: {error}", path.display()),
            Self::MemoryInUse { path } => {
                write!(f, "another server uses the memory {}; stop it or choose another path", path.display())
            }
            Self::OtherShape { path, found, expected } => write!(
                f,
                "{path} holds {found} bytes of another server's memory, these settings make {expected}; give the \
                 settings it was made with, or another path"
            ),
            Self::NotEnoughMemory { missing, available } => write!(
                f,
                "the server needs {} MiB of memory and {} MiB are available; ask for less",
                missing >> 20,
                available >> 20
            ),
            Self::Memory { place, error } if error.kind() == io::ErrorKind::StorageFull => {
                write!(f, "not enough room for the memory in {place}; ask for less, or choose another path")
            }
            Self::Memory { place, error } => write!(f, "cannot use {place} as memory: {error}"),
        }
    }
}

impl std::error::Error for ServeError {}

/// A memory server that other processes can use. Dropping it stops it.
#[derive(Debug)]
pub struct ShmServer {
    shared: Arc<Shared>,
    thread: Option<std::thread::JoinHandle<()>>,
    path: PathBuf,
}

#[derive(Debug)]
struct Shared {
    host: Arc<Host>,
    wake: Arc<Wake>,
    stop: AtomicBool,
}

/// Wakes the server's thread from others.
#[derive(Debug)]
struct Wake(OwnedFd);

impl Wake {
    fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    fn wake(&self) {
        // It fails when the counter is full: then the thread is about to wake anyway.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    fn settle(&self) {
        let _ = rustix::io::read(&self.0, &mut [0u8; 8]);
    }
}

impl ShmServer {
    /// Starts a server; when this returns, clients can connect.
    #[expect(clippy::disallowed_methods, reason = "the socket is answered by a thread of its own")]
    pub fn start(logic: Arc<dyn ServerLogic>, options: ServeOptions) -> Result<Self, ServeError> {
        // The socket first: it shows whether a server is there already, before its memory is touched.
        let listener = socket::listen(&options.socket)?;
        let ready = Self::prepare(logic, &options);
        let (shared, share) = ready.inspect_err(|_| {
            // It was made just now, and if it cannot be removed, it is stale: the next server replaces it.
            let _ = std::fs::remove_file(&options.socket);
        })?;
        let path = options.socket.clone();
        let door = Door {
            shared: Arc::clone(&shared),
            listener,
            share,
            token: options.token,
            clock: RealClock::new(),
            visitors: Vec::new(),
            next_peer: 1,
            nonces: fastrand::Rng::new(),
        };
        let thread = std::thread::spawn(move || door.run());
        Ok(Self { shared, thread: Some(thread), path })
    }

    fn prepare(
        logic: Arc<dyn ServerLogic>,
        options: &ServeOptions,
    ) -> Result<(Arc<Shared>, Share), ServeError> {
        let (regions, gates, share) = backing::open(&options.backing, &logic.regions())?;
        let host = Host::start(logic, regions, gates).map_err(ServeError::Start)?;
        let wake = Arc::new(Wake::new().map_err(ServeError::memory("an eventfd"))?);
        Ok((Arc::new(Shared { host, wake, stop: AtomicBool::new(false) }), share))
    }

    /// Who it is.
    pub fn identity(&self) -> &Identity {
        self.shared.host.identity()
    }

    /// Where its socket is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for ShmServer {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.wake.wake();
        // New clients find no socket; those that are there are told when theirs closes.
        let _ = std::fs::remove_file(&self.path);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A client process, to those who have something to tell it.
#[derive(Debug)]
struct Peer {
    id: PeerId,
    socket: UnixStream,
    outbox: Mutex<Outbox>,
    wake: Arc<Wake>,
}

#[derive(Default, Debug)]
struct Outbox {
    unsent: Vec<u8>,
    /// It does not read, or is gone.
    failed: bool,
}

impl Peer {
    fn send(&self, message: &FromServer) {
        self.send_bytes(&frame(message));
    }

    fn send_bytes(&self, bytes: &[u8]) {
        let mut outbox = lock(&self.outbox);
        if outbox.failed {
            return;
        }
        outbox.unsent.extend_from_slice(bytes);
        self.flush(&mut outbox);
        if outbox.failed || !outbox.unsent.is_empty() {
            // The thread sends the rest when it can be sent, or drops the client.
            self.wake.wake();
        }
    }

    fn flush(&self, outbox: &mut Outbox) {
        let mut sent = 0;
        while sent < outbox.unsent.len() {
            match (&self.socket).write(&outbox.unsent[sent..]) {
                Ok(0) => outbox.failed = true,
                Ok(bytes) => sent += bytes,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => outbox.failed = true,
            }
            if outbox.failed {
                return;
            }
        }
        outbox.unsent.drain(..sent);
        outbox.failed = outbox.unsent.len() > MAX_OUTBOX_BYTES;
    }
}

impl Caller for Peer {
    fn answer(&self, to: CallId, outcome: CallOutcome) {
        self.send(&FromServer::Answer { to, outcome });
    }
}

impl SessionServer for Peer {
    fn incoming(&self, session: SessionId, term: u64, call: Call) {
        self.send(&FromServer::Incoming { session, term, call });
    }

    fn ended(&self, session: SessionId, term: u64) {
        self.send(&FromServer::Ended { session, term });
    }
}

/// One connected socket.
struct Visitor {
    peer: Arc<Peer>,
    arrived: Vec<u8>,
    stage: Stage,
}

enum Stage {
    /// Greeted; has to introduce itself in time.
    Greeted { nonce: u64, since: Nanos, process: Result<Process, String> },
    /// A client.
    Member { holder: Arc<dyn Holder>, gates: BTreeMap<u32, Gate> },
}

/// Why a visitor has to go.
enum Goodbye {
    /// It is gone already, or talks nonsense.
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
struct Door {
    shared: Arc<Shared>,
    listener: UnixListener,
    share: Share,
    token: Vec<u8>,
    clock: RealClock,
    visitors: Vec<Visitor>,
    next_peer: PeerId,
    nonces: fastrand::Rng,
}

impl Door {
    fn run(mut self) {
        while !self.shared.stop.load(Ordering::SeqCst) {
            let Some((visitors_ready, knocks)) = self.wait() else { continue };
            // From the back, since those who leave are taken out.
            for (n, ready) in visitors_ready.into_iter().enumerate().rev() {
                if let Err(goodbye) = self.attend(n, ready) {
                    self.dismiss(n, goodbye);
                }
            }
            if knocks {
                self.welcome_newcomers();
            }
        }
        for visitor in &self.visitors {
            if let Stage::Member { gates, .. } = &visitor.stage {
                gates.values().for_each(Gate::shut);
            }
        }
    }

    /// Waits for something to do: for each visitor whether its socket is ready, and whether a newcomer is there.
    fn wait(&self) -> Option<(Vec<bool>, bool)> {
        let mut ends =
            vec![PollFd::new(&self.shared.wake.0, PollFlags::IN), PollFd::new(&self.listener, PollFlags::IN)];
        let mut deadline = None;
        for visitor in &self.visitors {
            let outbox = lock(&visitor.peer.outbox);
            let unsent = if outbox.unsent.is_empty() { PollFlags::empty() } else { PollFlags::OUT };
            ends.push(PollFd::new(&visitor.peer.socket, PollFlags::IN | unsent));
            if outbox.failed || matches!(visitor.stage, Stage::Greeted { .. }) {
                deadline = Some(Timespec { tv_sec: i64::from(!outbox.failed), tv_nsec: 0 });
            }
        }
        poll(&mut ends, deadline.as_ref()).ok()?;
        let ready: Vec<bool> = ends.iter().map(|end| !end.revents().is_empty()).collect();
        if ready[0] {
            self.shared.wake.settle();
        }
        Some((ready[2..].to_vec(), ready[1]))
    }

    fn welcome_newcomers(&mut self) {
        // As many as knock now; `accept` says when there are no more.
        while let Ok((socket, _)) = self.listener.accept() {
            if self.visitors.len() >= MAX_CLIENTS || socket.set_nonblocking(true).is_err() {
                continue;
            }
            let process = rustix::net::sockopt::socket_peercred(&socket)
                .map_err(io::Error::from)
                .and_then(|who| {
                    let pid = u32::try_from(who.pid.as_raw_nonzero().get());
                    Process::open(pid.map_err(|_| io::ErrorKind::InvalidData)?)
                })
                .map_err(|error| format!("the server cannot see this client's process: {error}"));
            let id = self.next_peer;
            self.next_peer += 1;
            let (outbox, wake) = (Mutex::default(), Arc::clone(&self.shared.wake));
            let peer = Arc::new(Peer { id, socket, outbox, wake });
            let nonce = self.nonces.u64(..);
            peer.send_bytes(&Greeting { nonce }.encode(VERSION));
            let stage = Stage::Greeted { nonce, since: self.clock.now(), process };
            self.visitors.push(Visitor { peer, arrived: Vec::new(), stage });
        }
    }

    /// Sends what waits, reads what has come, and does what it says.
    fn attend(&mut self, n: usize, ready: bool) -> Result<(), Goodbye> {
        let visitor = &mut self.visitors[n];
        {
            let mut outbox = lock(&visitor.peer.outbox);
            if ready && !outbox.unsent.is_empty() {
                visitor.peer.flush(&mut outbox);
            }
            if outbox.failed {
                return Err(Goodbye::Gone);
            }
        }
        if let Stage::Greeted { since, .. } = visitor.stage {
            if self.clock.now() - since > HANDSHAKE_NS {
                return Err(Goodbye::Refused("the client took too long to introduce itself".into()));
            }
        }
        if !ready {
            return Ok(());
        }
        let mut buffer = [0; READ_BYTES];
        match (&visitor.peer.socket).read(&mut buffer) {
            Ok(0) => return Err(Goodbye::Gone),
            Ok(bytes) => visitor.arrived.extend_from_slice(&buffer[..bytes]),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            Err(_) => return Err(Goodbye::Gone),
        }
        if matches!(visitor.stage, Stage::Greeted { .. }) && !self.admit(n)? {
            return Ok(());
        }
        while let Some(message) = take_frame(&mut self.visitors[n].arrived)? {
            self.obey(n, message)?;
        }
        Ok(())
    }

    /// Reads a visitor's introduction; whether it is a client now.
    fn admit(&mut self, n: usize) -> Result<bool, Goodbye> {
        let visitor = &mut self.visitors[n];
        let Stage::Greeted { nonce, process, .. } = &mut visitor.stage else { return Ok(true) };
        let refused = |why: &str| Err(Goodbye::Refused(why.to_owned()));
        let hello = match Hello::decode(&visitor.arrived) {
            Ok(None) => return Ok(false),
            Ok(Some((hello, length))) => {
                visitor.arrived.drain(..length);
                hello
            }
            Err(Stranger::NotFarwood) => {
                return refused("this is a Farwood memory server; use a farwood client");
            }
            Err(Stranger::Version(theirs)) => {
                return refused(&format!(
                    "the server speaks version {VERSION} of the shm protocol and the client version {theirs}; use the \
                     same farwood on both sides"
                ));
            }
        };
        let process = std::mem::replace(process, Err(String::new())).map_err(Goodbye::Refused)?;
        if hello.nonce != *nonce || u64::from(hello.pid) != process.name().0 {
            return refused("the process that introduced itself is not the one that connected");
        }
        if !same_bytes(&hello.token, &self.token) {
            return refused("the token is wrong; give the one in the server's --token-file");
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
        socket::send_with(&visitor.peer.socket, &frame(&welcome), &self.share.descriptor)?;
        visitor.stage = Stage::Member { holder: Arc::new(process), gates: BTreeMap::new() };
        Ok(true)
    }

    fn obey(&mut self, n: usize, message: FromClient) -> Result<(), Goodbye> {
        let host = &self.shared.host;
        let visitor = &mut self.visitors[n];
        let Stage::Member { holder, gates } = &mut visitor.stage else { return Err(Goodbye::Gone) };
        let peer = &visitor.peer;
        match message {
            FromClient::Connect { request, session, term } => {
                let answer = match host.connect(session, term, Some(Arc::clone(holder))) {
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
            FromClient::Disconnect { gate } => {
                if let Some(gate) = gates.remove(&gate) {
                    host.disconnect(&gate);
                }
            }
            FromClient::Call { target, call } => host.call(target, call, peer.id, Arc::clone(peer) as _),
            FromClient::Serve { request, session, term } => {
                let accepted = host.serve(session, term, peer.id, Arc::clone(peer) as _);
                peer.send(&FromServer::Serving { request, accepted });
            }
            FromClient::Reply { to, outcome } => host.reply_of(peer.id, to, outcome),
        }
        Ok(())
    }

    fn dismiss(&mut self, n: usize, goodbye: Goodbye) {
        let visitor = self.visitors.remove(n);
        if let Goodbye::Refused(why) = goodbye {
            tracing::warn!("a client was refused: {why}");
            visitor.peer.send(&FromServer::Refused { why });
        }
        // Whatever still refers to the peer sends into the void from now on.
        lock(&visitor.peer.outbox).failed = true;
        let _ = visitor.peer.socket.shutdown(std::net::Shutdown::Both);
        if let Stage::Member { holder, gates } = visitor.stage {
            let held: Vec<Gate> = gates.into_values().collect();
            self.shared.host.hung_up(visitor.peer.id, &holder, &held);
        }
    }
}

/// Compares in a time that does not tell how much is right.
fn same_bytes(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |difference, (a, b)| difference | (a ^ b)) == 0
}
