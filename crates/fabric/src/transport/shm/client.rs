//! The client's end: one connection per server, shared by all endpoints of the process.
//!
//! A thread reads what the server says: it answers those who wait for a gate or a reply, fills inboxes, and when the socket
//! closes it shuts the process's gates, so that every verb and call on that server fails from then on.
//!
//! A reply that does not come in time is an unknown outcome; the same call can be sent again.

use super::backing::map;
use super::frames::{
    FromClient, FromServer, Greeting, Hello, MAX_TOKEN_BYTES, Stranger, VERSION, frame, take_frame,
};
use super::{ShmOptions, socket};
use crate::addr::SessionId;
use crate::call::{Call, CallError, CallId, CallOutcome, Target};
use crate::clock::{Nanos, RealClock, SECOND};
use crate::error::FabricError;
use crate::exec::lock;
use crate::mem::RacyMemory;
use crate::region::{Identity, Permissions, RegionTable};
use crate::transport::host::Opened;
use crate::transport::host::gates::Gate;
use crate::transport::host::regions::Regions;
use crate::transport::{Inbox, ReplySlot};
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

/// How long a server may take to answer anything.
const PATIENCE: Duration = Duration::from_secs(5);
const PATIENCE_NS: Nanos = 5 * SECOND;
/// How often it is looked whether a reply is overdue.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// A connection to one server.
pub(crate) struct Connection {
    identity: Identity,
    table: RegionTable,
    memory: Arc<Regions>,
    gates: Arc<RacyMemory>,
    socket: UnixStream,
    /// Frames go out whole.
    writing: Mutex<()>,
    clock: RealClock,
    lost: AtomicBool,
    next_request: AtomicU64,
    /// Questions to the server itself, by number.
    asked: Mutex<FxHashMap<u64, SyncSender<FromServer>>>,
    /// Calls without a reply, with the time at which they were sent.
    waiting: Mutex<FxHashMap<CallId, (Arc<ReplySlot>, Nanos)>>,
    /// Sessions of this process that serve calls.
    inboxes: Mutex<FxHashMap<(SessionId, u64), Arc<Inbox>>>,
    held: Mutex<BTreeMap<u32, Gate>>,
}

impl Connection {
    /// Connects to the server at `path`.
    pub(super) fn open(path: &Path, options: &ShmOptions) -> Result<Arc<Self>, FabricError> {
        let place = path.display();
        let failed = |error: io::Error| FabricError::Unreachable {
            why: match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                    format!("the server at {place} does not answer; it may be stopped or overloaded")
                }
                io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
                    format!("the server at {place} closed the connection; see what it says")
                }
                _ => format!("cannot use the server at {place}: {error}"),
            },
        };
        if options.token.len() > MAX_TOKEN_BYTES {
            let why = format!("the token for {place} has more than {MAX_TOKEN_BYTES} bytes");
            return Err(FabricError::Unreachable { why });
        }
        let socket = socket::connect(path)?;
        socket.set_read_timeout(Some(PATIENCE)).map_err(failed)?;
        socket.set_write_timeout(Some(PATIENCE)).map_err(failed)?;
        let mut greeting = [0; Greeting::BYTES];
        (&socket).read_exact(&mut greeting).map_err(failed)?;
        let Greeting { nonce } = Greeting::decode(&greeting).map_err(|stranger| {
            let why = match stranger {
                Stranger::NotFarwood => format!("what listens at {place} is not a Farwood memory server"),
                Stranger::Version(theirs) => format!(
                    "the server at {place} speaks version {theirs} of the shm protocol and this farwood version \
                     {VERSION}; use the same farwood on both sides"
                ),
            };
            FabricError::Unreachable { why }
        })?;
        let hello = Hello { nonce, pid: std::process::id(), token: options.token.clone() };
        (&socket).write_all(&hello.encode()).map_err(failed)?;
        let (welcome, descriptor, arrived) = first_frame(&socket).map_err(failed)?;
        match (welcome, descriptor) {
            (FromServer::Welcome { identity, gates, regions }, Some(descriptor)) => {
                let table = RegionTable::new(&identity.regions);
                let mut memory = Regions::default();
                for mapped in regions {
                    let Some(spec) =
                        table.get(mapped.region).filter(|spec| spec.bytes <= mapped.extent.bytes)
                    else {
                        return Err(failed(io::ErrorKind::InvalidData.into()));
                    };
                    // What may only be read is mapped so: a stray write ends us and nobody else.
                    let writable = spec.permissions.intersect(Permissions::WRITE) != Permissions::NONE
                        || spec.permissions.intersect(Permissions::ATOMIC) != Permissions::NONE;
                    memory.insert(mapped.region, map(&descriptor, mapped.extent, writable).map_err(failed)?);
                }
                if table.iter().any(|spec| !memory.has(spec.id)) {
                    return Err(failed(io::ErrorKind::InvalidData.into()));
                }
                let gates = Arc::new(map(&descriptor, gates, true).map_err(failed)?);
                Self::start(socket, identity, table, memory, gates, arrived).map_err(failed)
            }
            (FromServer::Refused { why }, _) => {
                Err(FabricError::Unreachable { why: format!("the server at {place} refuses: {why}") })
            }
            _ => Err(failed(io::ErrorKind::InvalidData.into())),
        }
    }

    #[expect(clippy::disallowed_methods, reason = "the socket is read by a thread of its own")]
    fn start(
        socket: UnixStream,
        identity: Identity,
        table: RegionTable,
        memory: Regions,
        gates: Arc<RacyMemory>,
        arrived: Vec<u8>,
    ) -> io::Result<Arc<Self>> {
        let reader = socket.try_clone()?;
        reader.set_read_timeout(Some(LOOK_EVERY))?;
        let connection = Arc::new(Self {
            identity,
            table,
            memory: Arc::new(memory),
            gates,
            socket,
            writing: Mutex::default(),
            clock: RealClock::new(),
            lost: AtomicBool::new(false),
            next_request: AtomicU64::new(0),
            asked: Mutex::default(),
            waiting: Mutex::default(),
            inboxes: Mutex::default(),
            held: Mutex::default(),
        });
        let weak = Arc::downgrade(&connection);
        std::thread::spawn(move || listen(&reader, arrived, &weak));
        Ok(connection)
    }

    pub(crate) fn identity(&self) -> &Identity {
        &self.identity
    }

    pub(crate) fn table(&self) -> &RegionTable {
        &self.table
    }

    pub(crate) fn memory(&self) -> &Arc<Regions> {
        &self.memory
    }

    /// Whether the server is gone.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::SeqCst)
    }

    /// What those get who may not pass. Nobody's endpoints have no rights; others are told why.
    fn closed(&self, session: SessionId) -> Opened {
        let gate = Gate::new(&self.gates, 0).expect("there is at least one gate");
        let permissions = if session.is_none() { Permissions::NONE } else { Permissions::ALL };
        Opened { gate, permissions }
    }

    /// A gate for an endpoint of `session`.
    pub(crate) fn connect(&self, session: SessionId, term: u64) -> Result<Opened, FabricError> {
        if session.is_none() || self.is_lost() {
            return Ok(self.closed(session));
        }
        let server = self.identity.server;
        let (gate, permissions) = match self.ask(|request| FromClient::Connect { request, session, term }) {
            Some(FromServer::Connected { gate, permissions, .. }) => (gate, permissions),
            Some(FromServer::NoGate { .. }) => return Err(FabricError::TooManyEndpoints { server }),
            _ if self.is_lost() => return Ok(self.closed(session)),
            _ => return Err(FabricError::Unknown { server }),
        };
        let Some(gate) = Gate::new(&self.gates, gate) else { return Err(FabricError::Unknown { server }) };
        if gate.number() != 0 {
            lock(&self.held).insert(gate.number(), gate.clone());
            if self.is_lost() {
                gate.shut();
            }
        }
        Ok(Opened { gate, permissions })
    }

    /// An endpoint is gone.
    pub(crate) fn disconnect(&self, gate: &Gate) {
        let number = gate.number();
        if lock(&self.held).remove(&number).is_some() && !self.is_lost() {
            // If it cannot be sent, the server is gone or soon drops us with all our gates.
            let _ = self.send(&FromClient::Disconnect { gate: number });
        }
    }

    fn send(&self, message: &FromClient) -> io::Result<()> {
        let bytes = frame(message);
        let _whole = lock(&self.writing);
        (&self.socket).write_all(&bytes).inspect_err(|_| {
            // A frame that went out in part can never be completed.
            let _ = self.socket.shutdown(std::net::Shutdown::Both);
        })
    }

    /// Asks the server and waits for the answer.
    fn ask(&self, question: impl FnOnce(u64) -> FromClient) -> Option<FromServer> {
        let request = self.next_request.fetch_add(1, Ordering::Relaxed);
        let (sender, answer) = sync_channel(1);
        lock(&self.asked).insert(request, sender);
        let answer = self.send(&question(request)).ok().and_then(|()| {
            // The reader may have gone before it could see our question.
            let patience = if self.is_lost() { Duration::ZERO } else { PATIENCE };
            answer.recv_timeout(patience).ok()
        });
        lock(&self.asked).remove(&request);
        answer
    }

    pub(crate) async fn call(&self, target: Target, call: Call) -> CallOutcome {
        let slot = Arc::new(ReplySlot::default());
        let id = call.id;
        lock(&self.waiting).insert(id, (Arc::clone(&slot), self.clock.now()));
        let _guard = Waiting { connection: self, id };
        // The reader looks at those who wait once more when it has found the server gone.
        if self.send(&FromClient::Call { target, call }).is_err() || self.is_lost() {
            return Err(CallError::Unknown);
        }
        slot.wait().await
    }

    pub(crate) fn serve(&self, session: SessionId, term: u64) -> Arc<Inbox> {
        let key = (session, term);
        let inbox = Arc::clone(lock(&self.inboxes).entry(key).or_default());
        // Each endpoint asks, since the session may have ended meanwhile.
        let answer = self.ask(|request| FromClient::Serve { request, session, term });
        if !matches!(answer, Some(FromServer::Serving { accepted: true, .. })) {
            lock(&self.inboxes).remove(&key);
            inbox.close();
        }
        inbox
    }

    pub(crate) fn reply(&self, to: CallId, outcome: CallOutcome) {
        // If it cannot be sent, the caller learns from the server's end, or by a time-out.
        let _ = self.send(&FromClient::Reply { to, outcome });
    }

    // --- what the server says ---

    fn heed(&self, message: FromServer) {
        match message {
            FromServer::Connected { request, .. }
            | FromServer::NoGate { request }
            | FromServer::Serving { request, .. } => {
                let asked = lock(&self.asked).remove(&request);
                if let Some(asked) = asked {
                    // Who asked may have given up.
                    let _ = asked.try_send(message);
                } else if let FromServer::Connected { gate, .. } = message {
                    // A gate that comes too late is nobody's.
                    let _ = self.send(&FromClient::Disconnect { gate });
                }
            }
            FromServer::Answer { to, outcome } => {
                let waiting = lock(&self.waiting).remove(&to);
                if let Some((slot, _)) = waiting {
                    slot.set(outcome);
                }
            }
            FromServer::Incoming { session, term, call } => {
                let inbox = lock(&self.inboxes).get(&(session, term)).cloned();
                match inbox {
                    Some(inbox) => inbox.push(call),
                    None => self.reply(call.id, Err(CallError::NoSuchSession { session })),
                }
            }
            FromServer::Ended { session, term } => {
                let inbox = lock(&self.inboxes).remove(&(session, term));
                if let Some(inbox) = inbox {
                    inbox.close();
                }
            }
            FromServer::Refused { why } => tracing::error!("the memory server ended the connection: {why}"),
            FromServer::Welcome { .. } => {}
        }
    }

    /// Replies that are overdue will not be waited for any longer.
    fn give_up_overdue(&self, now: Nanos) {
        self.give_up(|since| now.saturating_sub(since) > PATIENCE_NS);
    }

    fn give_up(&self, on: impl Fn(Nanos) -> bool) {
        let mut given_up = Vec::new();
        lock(&self.waiting).retain(|_, (slot, since)| {
            let overdue = on(*since);
            given_up.extend(overdue.then(|| Arc::clone(slot)));
            !overdue
        });
        for slot in given_up {
            slot.set(Err(CallError::Unknown));
        }
    }

    /// The server is gone: nothing passes, nobody waits.
    fn lose(&self) {
        self.lost.store(true, Ordering::SeqCst);
        lock(&self.held).values().for_each(Gate::shut);
        lock(&self.asked).clear();
        self.give_up(|_| true);
        let inboxes = std::mem::take(&mut *lock(&self.inboxes));
        for inbox in inboxes.into_values() {
            inbox.close();
        }
        tracing::warn!(server = %self.identity.server, "a memory server is gone");
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // Ends the thread that reads.
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Connection({}, {})", self.identity.server, if self.is_lost() { "lost" } else { "open" })
    }
}

/// Stops waiting for a reply when the caller goes away.
struct Waiting<'a> {
    connection: &'a Connection,
    id: CallId,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        lock(&self.connection.waiting).remove(&self.id);
    }
}

/// The first frame, the descriptor that came with it, and what has come after it.
fn first_frame(socket: &UnixStream) -> io::Result<(FromServer, Option<OwnedFd>, Vec<u8>)> {
    let (mut arrived, mut descriptor) = (Vec::new(), None);
    loop {
        let mut buffer = [0; 4096];
        let (bytes, came_along) = socket::receive_with(socket, &mut buffer)?;
        if bytes == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        arrived.extend_from_slice(&buffer[..bytes]);
        descriptor = came_along.or(descriptor);
        let message = take_frame(&mut arrived).map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?;
        if let Some(message) = message {
            return Ok((message, descriptor, arrived));
        }
    }
}

/// Reads what the server says until one of the two is gone.
fn listen(socket: &UnixStream, mut arrived: Vec<u8>, connection: &Weak<Connection>) {
    let mut buffer = vec![0; 64 << 10];
    let lost = 'listening: loop {
        let Some(strong) = connection.upgrade() else { break false };
        loop {
            match take_frame(&mut arrived) {
                Ok(Some(message)) => strong.heed(message),
                Ok(None) => break,
                Err(_) => break 'listening true,
            }
        }
        strong.give_up_overdue(strong.clock.now());
        // While we wait, the connection may go.
        drop(strong);
        match (&mut &*socket).read(&mut buffer) {
            Ok(0) => break true,
            Ok(bytes) => arrived.extend_from_slice(&buffer[..bytes]),
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted
                ) => {}
            Err(_) => break true,
        }
    };
    if let (true, Some(connection)) = (lost, connection.upgrade()) {
        connection.lose();
    }
}
