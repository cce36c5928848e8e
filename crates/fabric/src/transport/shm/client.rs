//! The client's end: one connection per server, shared by all endpoints of the process.
//!
//! Calls and questions go over the [`Line`]. When it breaks, the server's process is gone, but not its memory. Then
//!
//! * *verbs go on* while their gate is open. They need no server: only a fence could be in their way, and a fence needs one. The next process
//!   on the memory closes all gates before it answers anybody, so nothing is ever decided while a gate is open that should not be;
//! * *whoever finds its gate closed* connects to the next process, which knows the sessions that were there, and goes on through another
//!   gate ([`Connection::reopen`]). Nothing was in flight, so nobody above notices more than that it took a moment;
//! * *calls wait* for the next process, a bounded time.
//!
//! Without a successor, verbs go on for [`GO_ON`]: what nobody serves is soon nobody's. Then the process shuts its own gates, and verbs fail
//! until there is a server. If what answers has other memory, this memory is lost: the process's gates are shut, and every verb and call says so from then on.

use super::frames::{Greeting, Hello, MAX_TOKEN_BYTES, Stranger, VERSION};
use super::{ShmOptions, socket};
use crate::addr::SessionId;
use crate::call::{Call, CallError, CallId, CallOutcome, Once, Principal, Target};
use crate::clock::{Nanos, RealClock};
use crate::error::FabricError;
use crate::exec::lock;
use crate::mem::RacyMemory;
use crate::region::{Identity, Permissions, RegionTable};
use crate::status::ServerStatus;
use crate::transport::Inbox;
use crate::transport::host::Opened;
use crate::transport::host::gates::Gate;
use crate::transport::host::regions::Regions;
use crate::transport::line::frames::{Extent, FromClient, FromServer, Mapped, take_frame};
use crate::transport::line::{Inboxes, Line, close_all, serving};
use crate::transport::serve::map;
use crate::transport::stream::Stream;
use crate::transport::tcp::attempts::Attempts;
use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

/// How long a server may take to answer anything.
const PATIENCE: Duration = Duration::from_secs(5);

/// How long after the end of a server's process a thread stands still for the next one, which takes over memory and answers in moments.
const REOPEN: Duration = Duration::from_secs(1);
/// How long after that end a reconnect waits, and a call. Later, each looks once whether there is a server.
const RECONNECT: Duration = Duration::from_secs(2);
const CALLS: Duration = Duration::from_secs(5);
/// How long one attempt of a call waits. A call has ten of them.
const AWAY: Duration = Duration::from_millis(500);
/// How long the first words may take at least.
const FIRST_WORDS: Duration = Duration::from_millis(50);
/// How long verbs go on without a server. So long its successor is looked for before anybody asks.
const GO_ON: Duration = Duration::from_secs(3);
/// How long it is waited between two looks: at first, and at most.
const FIRST_LOOK: Duration = Duration::from_micros(500);
const LONGEST_LOOK: Duration = Duration::from_millis(8);

/// A connection to one server, through all processes that serve its memory.
pub(crate) struct Connection {
    path: PathBuf,
    options: ShmOptions,
    identity: Identity,
    extents: (Extent, Vec<Mapped>),
    /// The file that is mapped: device and number.
    file: (u64, u64),
    table: RegionTable,
    memory: Arc<Regions>,
    gates: Arc<RacyMemory>,
    /// The line to the process that serves now, or served last, with its life.
    line: Mutex<(Arc<Line>, u64)>,
    /// Held by whoever opens the line again.
    reopening: Mutex<()>,
    /// The same for those who cannot stand still meanwhile.
    attempts: Arc<Attempts>,
    held: Mutex<BTreeMap<u32, Gate>>,
    inboxes: Inboxes,
    /// The memory is gone for good.
    lost: AtomicBool,
    clock: RealClock,
    /// When the last line broke.
    broken_at: AtomicU64,
    itself: Arc<Myself>,
}

/// How a line that has broken finds its connection.
type Myself = OnceLock<Weak<Connection>>;

/// What a server says when it lets us in.
struct Welcomed {
    socket: UnixStream,
    identity: Identity,
    extents: (Extent, Vec<Mapped>),
    descriptor: OwnedFd,
    arrived: Vec<u8>,
}

impl Connection {
    /// Connects to the server at `path`.
    pub(crate) fn open(path: &Path, options: &ShmOptions) -> Result<Arc<Self>, FabricError> {
        let failed = |error: io::Error| unusable(path, &error);
        let welcomed = shake_hands(path, options, PATIENCE)?;
        let file = file_of(&welcomed.descriptor).map_err(failed)?;
        let Welcomed { socket, identity, extents, descriptor, arrived } = welcomed;
        let table = RegionTable::new(&identity.regions);
        let mut memory = Regions::default();
        for mapped in &extents.1 {
            let Some(spec) = table.get(mapped.region).filter(|spec| spec.bytes <= mapped.extent.bytes) else {
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
        let gates = Arc::new(map(&descriptor, extents.0, true).map_err(failed)?);
        let (inboxes, itself) = (Inboxes::default(), Arc::<Myself>::default());
        let line = start_line(socket, arrived, &identity, &inboxes, &itself).map_err(failed)?;
        let connection = Arc::new(Self {
            path: path.to_owned(),
            options: options.clone(),
            extents,
            file,
            table,
            memory: Arc::new(memory),
            gates,
            line: Mutex::new((line, identity.life)),
            reopening: Mutex::default(),
            attempts: Attempts::new(identity.server),
            identity,
            held: Mutex::default(),
            inboxes,
            lost: AtomicBool::new(false),
            clock: RealClock::new(),
            broken_at: AtomicU64::new(0),
            itself: Arc::clone(&itself),
        });
        let _ = itself.set(Arc::downgrade(&connection));
        Ok(connection)
    }

    fn since(&self, begin: Nanos) -> Duration {
        Duration::from_nanos(self.clock.now().saturating_sub(begin))
    }

    /// What is left of the time that may pass after the end of a server's process.
    fn left_of(&self, most: Duration) -> Duration {
        most.saturating_sub(self.since(self.broken_at.load(Ordering::SeqCst)))
    }

    fn line(&self) -> (Arc<Line>, u64) {
        let line = lock(&self.line);
        (Arc::clone(&line.0), line.1)
    }

    /// The memory is gone: nothing passes any more.
    fn lose(&self) -> FabricError {
        let server = self.identity.server;
        if !self.lost.swap(true, Ordering::SeqCst) {
            lock(&self.held).values().for_each(Gate::shut);
            close_all(&self.inboxes);
            tracing::warn!(%server, "a memory server is gone, and what it held");
        }
        FabricError::ServerLost { server }
    }

    /// The line to whatever process serves the memory, opened again if it is broken. Blocks, for as long as that: one thread looks for a
    /// server, all others wait for it.
    #[expect(clippy::disallowed_methods, reason = "a server that is away is looked for now and then")]
    fn restore(&self, patience: Duration) -> Result<(Arc<Line>, u64), FabricError> {
        let (server, begin) = (self.identity.server, self.clock.now());
        let _first = lock(&self.reopening);
        let mut look = FIRST_LOOK;
        loop {
            if self.is_lost() {
                return Err(FabricError::ServerLost { server });
            }
            let (line, life) = self.line();
            if !line.is_lost() {
                return Ok((line, life));
            }
            let left = patience.saturating_sub(self.since(begin));
            match shake_hands(&self.path, &self.options, left.max(FIRST_WORDS)) {
                Ok(welcomed) => self.go_on(welcomed)?,
                Err(error) => {
                    tracing::debug!(%server, "not back yet: {error}");
                    if left.is_zero() {
                        return Err(FabricError::Disconnected { server });
                    }
                    std::thread::sleep(look.min(left));
                    look = LONGEST_LOOK.min(look * 2);
                }
            }
        }
    }

    /// Goes on with the process that answered, if it has the memory that is mapped here.
    fn go_on(&self, welcomed: Welcomed) -> Result<(), FabricError> {
        let server = self.identity.server;
        let Welcomed { socket, identity, extents, descriptor, arrived } = welcomed;
        // A copy of the memory would do for everything but what others write there.
        let is_same_file = file_of(&descriptor).is_ok_and(|file| file == self.file);
        if !(is_same_file && identity.has_memory_of(&self.identity) && extents == self.extents) {
            return Err(self.lose());
        }
        let line = start_line(socket, arrived, &identity, &self.inboxes, &self.itself)
            .map_err(|_| FabricError::Disconnected { server })?;
        for (key, ticket) in serving(&self.inboxes) {
            let who = Principal { session: key.0, term: key.1, ticket };
            let answer = line.ask(|request| FromClient::Serve { request, who });
            // If the line is broken again, the next one asks.
            if matches!(answer, Some(FromServer::Serving { accepted: false, .. })) {
                if let Some((_, inbox)) = lock(&self.inboxes).remove(&key) {
                    inbox.close();
                }
            }
        }
        *lock(&self.line) = (line, identity.life);
        tracing::debug!(%server, "a memory server came back with its memory");
        Ok(())
    }

    /// The same as [`Self::restore`], for those who must not stand still.
    async fn restored(self: &Arc<Self>, patience: Duration) -> Result<(Arc<Line>, u64), FabricError> {
        let (line, life) = self.line();
        if !line.is_lost() {
            return Ok((line, life));
        }
        let asked = self.attempts.ask(|attempt| {
            let connection = Arc::clone(self);
            let work = move || attempt.end(connection.restore(patience).map(drop));
            // Without a thread the attempt is dropped, and has failed.
            if let Err(error) = std::thread::Builder::new().spawn(work) {
                tracing::error!("cannot start a thread to connect: {error}");
            }
        });
        asked.await.map(|()| self.line())
    }

    /// A gate for a connection that found its own closed. A new process has closed the gates of its predecessor's clients; if it knows the
    /// session, that goes on. Otherwise the session was fenced. What was read before the gate was found closed counts, if this succeeds: the
    /// session was not fenced until now, so nothing that it could reach was reused. Stands still until [`REOPEN`] after the end of the last
    /// process at most, but for the answer of the next.
    #[cold]
    pub(crate) fn reopen(&self, who: Principal, gate: &Gate) -> Result<(), FabricError> {
        let (session, server) = (who.session, self.identity.server);
        while !session.is_none() && !self.is_lost() {
            let (line, _) = match self.restore(self.left_of(REOPEN)) {
                Ok(line) => line,
                Err(FabricError::Disconnected { server }) => return Err(FabricError::Unknown { server }),
                Err(error) => return Err(error),
            };
            let old = gate.number();
            match line.ask(|request| FromClient::Connect { request, who }) {
                Some(FromServer::Connected { gate: number, .. }) => {
                    gate.move_to(number);
                    self.disconnect_number(old, &line);
                    if number == 0 {
                        break;
                    }
                    self.hold(gate);
                    return Ok(());
                }
                Some(FromServer::NoGate { .. }) => return Err(FabricError::TooManyEndpoints { server }),
                // That one is gone, too.
                _ if line.is_lost() => {}
                _ => return Err(FabricError::Unknown { server }),
            }
        }
        Err(if self.is_lost() { FabricError::ServerLost { server } } else { FabricError::Fenced { session } })
    }

    /// Waits for the process that serves now, or comes back in time.
    pub(crate) async fn reconnect(self: &Arc<Self>) -> Result<(), FabricError> {
        self.restored(self.left_of(RECONNECT)).await.map(drop)
    }

    fn hold(&self, gate: &Gate) {
        lock(&self.held).insert(gate.number(), gate.clone());
        if self.is_lost() {
            gate.shut();
        }
    }

    fn disconnect_number(&self, gate: u32, line: &Line) {
        if lock(&self.held).remove(&gate).is_some() {
            // If it cannot be sent, the server is gone or soon drops us with all our gates.
            let _ = line.send(&FromClient::Disconnect { gate });
        }
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

    /// Whether the server's memory is gone for good.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::SeqCst)
    }

    /// What those get who may not pass. Nobody's endpoints have no rights; others are told why.
    fn closed(&self, session: SessionId) -> Opened {
        let gate = Gate::new(&self.gates, 0).expect("there is at least one gate");
        let permissions = if session.is_none() { Permissions::NONE } else { Permissions::ALL };
        Opened { gate, permissions }
    }

    /// A gate for an endpoint of a session.
    pub(crate) fn connect(&self, who: Principal) -> Result<Opened, FabricError> {
        let session = who.session;
        if session.is_none() || self.is_lost() {
            return Ok(self.closed(session));
        }
        let server = self.identity.server;
        loop {
            // If there is none, whoever uses the endpoint looks again.
            let Ok((line, _)) = self.restore(self.left_of(RECONNECT)) else {
                return Ok(self.closed(session));
            };
            let (number, permissions) = match line.ask(|request| FromClient::Connect { request, who }) {
                Some(FromServer::Connected { gate, permissions, .. }) => (gate, permissions),
                Some(FromServer::NoGate { .. }) => return Err(FabricError::TooManyEndpoints { server }),
                _ if line.is_lost() => continue,
                _ => return Err(FabricError::Unknown { server }),
            };
            let Some(gate) = Gate::new(&self.gates, number) else {
                return Err(FabricError::Unknown { server });
            };
            if number != 0 {
                self.hold(&gate);
            }
            return Ok(Opened { gate, permissions });
        }
    }

    /// An endpoint is gone.
    pub(crate) fn disconnect(&self, gate: &Gate) {
        self.disconnect_number(gate.number(), &self.line().0);
    }

    /// How the server does; `None` if it does not say in time.
    pub(crate) fn status(&self) -> Option<ServerStatus> {
        self.line().0.status()
    }

    /// Sends a call to whatever process serves now, or comes back in time.
    pub(crate) async fn call(self: &Arc<Self>, target: Target, call: Call, once: Once<'_>) -> CallOutcome {
        let Ok((line, life)) = self.restored(AWAY.min(self.left_of(CALLS))).await else {
            return Err(CallError::Unknown);
        };
        once.check(life)?;
        line.call(target, call).await
    }

    pub(crate) fn serve(&self, who: Principal) -> Arc<Inbox> {
        self.line().0.serve(who)
    }

    pub(crate) fn reply(&self, to: CallId, outcome: CallOutcome) {
        self.line().0.reply(to, outcome);
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Connection({}, {})", self.identity.server, if self.is_lost() { "lost" } else { "open" })
    }
}

/// Says the first words to the server at `path`; what it shows us.
fn shake_hands(path: &Path, options: &ShmOptions, patience: Duration) -> Result<Welcomed, FabricError> {
    let place = path.display();
    let failed = |error: io::Error| unusable(path, &error);
    if options.token.len() > MAX_TOKEN_BYTES {
        let why = format!("the token for {place} has more than {MAX_TOKEN_BYTES} bytes");
        return Err(FabricError::Unreachable { why });
    }
    let socket = socket::connect(path)?;
    socket.set_read_timeout(Some(patience)).map_err(failed)?;
    socket.set_write_timeout(Some(patience)).map_err(failed)?;
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
    match first_frame(&socket).map_err(failed)? {
        (FromServer::Welcome { identity, gates, regions }, Some(descriptor), arrived) => {
            Ok(Welcomed { socket, identity, extents: (gates, regions), descriptor, arrived })
        }
        (FromServer::Refused { why }, ..) => {
            Err(FabricError::Unreachable { why: format!("the server at {place} refuses: {why}") })
        }
        _ => Err(failed(io::ErrorKind::InvalidData.into())),
    }
}

fn unusable(path: &Path, error: &io::Error) -> FabricError {
    let place = path.display();
    FabricError::Unreachable {
        why: match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                format!("the server at {place} does not answer; it may be stopped or overloaded")
            }
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
                format!("the server at {place} closed the connection; see what it says")
            }
            _ => format!("cannot use the server at {place}: {error}"),
        },
    }
}

/// The device and the number of a file: what tells it from its copies. A device has no number of its own.
fn file_of(descriptor: &OwnedFd) -> io::Result<(u64, u64)> {
    let stat = rustix::fs::fstat(descriptor)?;
    Ok(if stat.st_rdev == 0 { (stat.st_dev, stat.st_ino) } else { (stat.st_rdev, 0) })
}

/// A line on which the first words have been said. When it breaks, the server's successor is looked for at once: the first who needs it
/// finds it there.
fn start_line(
    socket: UnixStream,
    arrived: Vec<u8>,
    identity: &Identity,
    inboxes: &Inboxes,
    itself: &Arc<Myself>,
) -> io::Result<Arc<Line>> {
    let (server, itself) = (identity.server, Arc::clone(itself));
    let on_loss = move || {
        let Some(connection) = itself.get().and_then(Weak::upgrade) else { return };
        tracing::info!(%server, "the process of a memory server is gone; its memory is there, and the next process is waited for");
        connection.broken_at.store(connection.clock.now(), Ordering::SeqCst);
        let look = move || {
            if connection.restore(GO_ON).is_err() {
                lock(&connection.held).values().for_each(Gate::shut);
            }
        };
        // Without a thread, the first who needs it looks.
        let _ = std::thread::Builder::new().spawn(look);
    };
    Line::start(Stream::Unix(socket), arrived, PATIENCE, Arc::clone(inboxes), on_loss)
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
