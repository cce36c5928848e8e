//! The client's end: one connection per server, shared by all endpoints of the process.
//!
//! Calls and questions go over the [`Line`]. When it breaks, the server is gone: the process's gates are shut, so that every
//! verb and call on that server fails from then on.

use super::frames::{Greeting, Hello, MAX_TOKEN_BYTES, Stranger, VERSION};
use super::{ShmOptions, socket};
use crate::addr::SessionId;
use crate::call::{Call, CallId, CallOutcome, Principal, Target};
use crate::error::FabricError;
use crate::exec::lock;
use crate::mem::RacyMemory;
use crate::region::{Identity, Permissions, RegionTable};
use crate::status::ServerStatus;
use crate::transport::Inbox;
use crate::transport::host::Opened;
use crate::transport::host::gates::Gate;
use crate::transport::host::regions::Regions;
use crate::transport::line::frames::{FromClient, FromServer, take_frame};
use crate::transport::line::{Inboxes, Line, close_all};
use crate::transport::serve::map;
use crate::transport::stream::Stream;
use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// How long a server may take to answer anything.
const PATIENCE: Duration = Duration::from_secs(5);

/// A connection to one server.
pub(crate) struct Connection {
    identity: Identity,
    table: RegionTable,
    memory: Arc<Regions>,
    gates: Arc<RacyMemory>,
    line: Arc<Line>,
    held: Arc<Mutex<BTreeMap<u32, Gate>>>,
}

impl Connection {
    /// Connects to the server at `path`.
    pub(crate) fn open(path: &Path, options: &ShmOptions) -> Result<Arc<Self>, FabricError> {
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

    fn start(
        socket: UnixStream,
        identity: Identity,
        table: RegionTable,
        memory: Regions,
        gates: Arc<RacyMemory>,
        arrived: Vec<u8>,
    ) -> io::Result<Arc<Self>> {
        let (held, inboxes) = (Arc::<Mutex<BTreeMap<u32, Gate>>>::default(), Inboxes::default());
        let (theirs, ending, server) = (Arc::clone(&held), Arc::clone(&inboxes), identity.server);
        let on_loss = move || {
            lock(&theirs).values().for_each(Gate::shut);
            close_all(&ending);
            tracing::warn!(%server, "a memory server is gone");
        };
        let line = Line::start(Stream::Unix(socket), arrived, PATIENCE, inboxes, on_loss)?;
        Ok(Arc::new(Self { identity, table, memory: Arc::new(memory), gates, line, held }))
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
        self.line.is_lost()
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
        let (gate, permissions) = match self.line.ask(|request| FromClient::Connect { request, who }) {
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
            let _ = self.line.send(&FromClient::Disconnect { gate: number });
        }
    }

    /// How the server does; `None` if it does not say in time.
    pub(crate) fn status(&self) -> Option<ServerStatus> {
        self.line.status()
    }

    pub(crate) async fn call(&self, target: Target, call: Call) -> CallOutcome {
        self.line.call(target, call).await
    }

    pub(crate) fn serve(&self, who: Principal) -> Arc<Inbox> {
        self.line.serve(who)
    }

    pub(crate) fn reply(&self, to: CallId, outcome: CallOutcome) {
        self.line.reply(to, outcome);
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Connection({}, {})", self.identity.server, if self.is_lost() { "lost" } else { "open" })
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
