//! A memory server as a client process knows it: how it is reached, who it is, and the line for calls.
//!
//! The line is opened again when it has broken and somebody calls; sessions that serve calls are then registered again. If what
//! answers is not the server that was there, or has lost its memory, the server is lost for good.

use super::TcpOptions;
use super::attempts::Attempts;
use super::frames::{
    Admission, FEATURES, GREETING_BYTES, Introduction, MAX_ADMISSION_BYTES, MAX_TOKEN_BYTES, Purpose,
    Stranger, VERSION, check_greeting,
};
use crate::addr::ServerId;
use crate::call::Principal;
use crate::clock::Nanos;
use crate::error::FabricError;
use crate::exec::lock;
use crate::region::{Identity, RegionTable};
use crate::transport::line::frames::{FromClient, FromServer};
use crate::transport::line::{Inboxes, Line, serving};
use crate::transport::stream::Stream;
use crate::transport::verbs::queue::PortAddress;
use crate::wire::decode;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};
use std::time::Duration;

/// One server.
#[derive(Debug)]
pub(crate) struct Station {
    address: String,
    options: TcpOptions,
    identity: Identity,
    table: RegionTable,
    inboxes: Inboxes,
    /// With the life of the server at its other end.
    line: Mutex<(Arc<Line>, u64)>,
    /// At opening the line again.
    reopening: Arc<Attempts>,
    lost: AtomicBool,
}

impl Station {
    /// Connects to the server at `address`.
    pub(crate) fn open(address: &str, options: &TcpOptions) -> Result<Arc<Self>, FabricError> {
        let inboxes = Inboxes::default();
        let (identity, line) = open_line(address, options, &inboxes)?;
        Ok(Arc::new(Self {
            address: address.to_owned(),
            options: options.clone(),
            table: RegionTable::new(&identity.regions),
            reopening: Attempts::new(identity.server),
            line: Mutex::new((line, identity.life)),
            identity,
            inboxes,
            lost: AtomicBool::new(false),
        }))
    }

    pub(crate) fn identity(&self) -> &Identity {
        &self.identity
    }

    pub(crate) fn id(&self) -> ServerId {
        self.identity.server
    }

    pub(crate) fn table(&self) -> &RegionTable {
        &self.table
    }

    pub(crate) fn patience_ns(&self) -> Nanos {
        u64::try_from(self.options.patience.as_nanos()).unwrap_or(u64::MAX)
    }

    /// Whether the server, or its memory, is known to be gone for good.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::SeqCst)
    }

    pub(crate) fn line(&self) -> Arc<Line> {
        self.line_of_life().0
    }

    /// The line, and the life of the server at its other end.
    pub(crate) fn line_of_life(&self) -> (Arc<Line>, u64) {
        let line = lock(&self.line);
        (Arc::clone(&line.0), line.1)
    }

    fn gone(&self) -> FabricError {
        self.lost.store(true, Ordering::SeqCst);
        FabricError::ServerLost { server: self.id() }
    }

    /// Opens the line again if it is broken: one thread does for all who call.
    #[expect(clippy::disallowed_methods, reason = "connecting blocks, and happens once at a time")]
    pub(crate) async fn restore_line(self: &Arc<Self>) -> Result<(), FabricError> {
        if let Some(known) = self.line_state() {
            return known;
        }
        let asked = self.reopening.ask(|attempt| {
            let station = Arc::clone(self);
            let work = move || {
                std::thread::sleep(Duration::from_nanos(attempt.pause_ns()));
                attempt.end(station.reopen_line());
            };
            // Without a thread the attempt is dropped, and has failed.
            if let Err(error) = std::thread::Builder::new().spawn(work) {
                tracing::error!("cannot start a thread to connect: {error}");
            }
        });
        asked.await
    }

    /// Whether the line is open, or never will be; `None`: it is broken.
    fn line_state(&self) -> Option<Result<(), FabricError>> {
        if self.is_lost() {
            return Some(Err(FabricError::ServerLost { server: self.id() }));
        }
        (!self.line().is_lost()).then_some(Ok(()))
    }

    /// Blocks, within the client's patience.
    fn reopen_line(&self) -> Result<(), FabricError> {
        if let Some(known) = self.line_state() {
            return known;
        }
        let server = self.id();
        let opened = open_line(&self.address, &self.options, &self.inboxes);
        let (identity, line) = opened.map_err(|_| FabricError::Disconnected { server })?;
        if !identity.has_memory_of(&self.identity) {
            return Err(self.gone());
        }
        for (key, ticket) in serving(&self.inboxes) {
            let who = Principal { session: key.0, term: key.1, ticket };
            let answer = line.ask(|request| FromClient::Serve { request, who });
            if !matches!(answer, Some(FromServer::Serving { accepted: true, .. })) {
                if let Some((_, inbox)) = lock(&self.inboxes).remove(&key) {
                    inbox.close();
                }
            }
        }
        *lock(&self.line) = (line, identity.life);
        Ok(())
    }

    /// A verbs connection, over the socket or over the queue pairs of which these are our ends. Blocks, within the client's
    /// patience.
    pub(crate) fn connect(
        &self,
        who: Principal,
        replaces: u64,
        queues: Option<PortAddress>,
    ) -> Result<(TcpStream, Admission), FabricError> {
        let server = self.id();
        if self.is_lost() {
            return Err(FabricError::ServerLost { server });
        }
        let Identity { pool, incarnation, .. } = self.identity;
        let view = crate::transport::VIEW;
        let purpose = match queues {
            None => Purpose::Verbs { pool, server, incarnation, view, who, replaces },
            Some(port) => Purpose::Queues { pool, server, incarnation, view, who, replaces, port },
        };
        let (socket, admission) = match shake_hands(&self.address, &self.options, purpose) {
            Ok(connected) => connected,
            Err(error) => {
                tracing::debug!(%server, "cannot connect: {error}");
                return Err(FabricError::Disconnected { server });
            }
        };
        match admission {
            Admission::Verbs { .. } | Admission::Queues { .. } => Ok((socket, admission)),
            Admission::NotAdmitted {} => Err(FabricError::Fenced { session: who.session }),
            Admission::NoRoom {} => Err(FabricError::TooManyEndpoints { server }),
            Admission::OtherServer {} => Err(self.gone()),
            Admission::Refused { why } => Err(FabricError::Unreachable {
                why: format!("the server at {} refuses: {why}", self.address),
            }),
            Admission::Calls { .. } => Err(FabricError::Disconnected { server }),
        }
    }
}

fn open_line(
    address: &str,
    options: &TcpOptions,
    inboxes: &Inboxes,
) -> Result<(Identity, Arc<Line>), FabricError> {
    let (socket, admission) = shake_hands(address, options, Purpose::Calls {})?;
    let unreachable = |why: String| FabricError::Unreachable { why };
    match admission {
        Admission::Calls { identity, .. } => {
            let server = identity.server;
            let on_loss = move || tracing::debug!(%server, "the line to a memory server broke");
            let line =
                Line::start(Stream::Tcp(socket), Vec::new(), options.patience, Arc::clone(inboxes), on_loss);
            let line = line.map_err(|error| unreachable(format!("cannot use {address}: {error}")))?;
            Ok((identity, line))
        }
        Admission::Refused { why } => Err(unreachable(format!("the server at {address} refuses: {why}"))),
        _ => Err(unreachable(format!("the server at {address} answers what it was not asked"))),
    }
}

/// Connects and says the first words; what the server answers.
fn shake_hands(
    address: &str,
    options: &TcpOptions,
    purpose: Purpose,
) -> Result<(TcpStream, Admission), FabricError> {
    let unreachable = |why: String| FabricError::Unreachable { why };
    if options.token.len() > MAX_TOKEN_BYTES {
        return Err(unreachable(format!("the token for {address} has more than {MAX_TOKEN_BYTES} bytes")));
    }
    let mut socket = connect(address, options)?;
    let failed = |error: io::Error| {
        unreachable(match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                format!("the server at {address} does not answer; it may be stopped or overloaded")
            }
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
                format!("the server at {address} closed the connection; see what it says")
            }
            io::ErrorKind::InvalidData => {
                format!(
                    "the server at {address} says what makes no sense; use the same farwood on both sides"
                )
            }
            _ => format!("cannot use the server at {address}: {error}"),
        })
    };
    super::prepare(&socket).map_err(failed)?;
    socket.set_read_timeout(Some(options.patience)).map_err(failed)?;
    socket.set_write_timeout(Some(options.patience)).map_err(failed)?;
    let mut greeting = [0; GREETING_BYTES];
    socket.read_exact(&mut greeting).map_err(failed)?;
    check_greeting(&greeting).map_err(|stranger| {
        unreachable(match stranger {
            Stranger::NotFarwood => format!("what listens at {address} is not a Farwood memory server"),
            Stranger::Version(theirs) => format!(
                "the server at {address} speaks version {theirs} of the tcp protocol and this farwood version {VERSION}; \
                 use the same farwood on both sides"
            ),
        })
    })?;
    let introduction = Introduction { features: FEATURES, token: options.token.clone(), purpose };
    socket.write_all(&introduction.encode()).map_err(failed)?;
    let mut length = [0; 4];
    socket.read_exact(&mut length).map_err(failed)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > MAX_ADMISSION_BYTES {
        return Err(failed(io::ErrorKind::InvalidData.into()));
    }
    let mut admission = vec![0; length];
    socket.read_exact(&mut admission).map_err(failed)?;
    let admission = decode(&admission).map_err(|_| failed(io::ErrorKind::InvalidData.into()))?;
    Ok((socket, admission))
}

fn connect(address: &str, options: &TcpOptions) -> Result<TcpStream, FabricError> {
    let unreachable = |why: String| FabricError::Unreachable { why };
    let places: Vec<SocketAddr> = match address.to_socket_addrs() {
        Ok(places) => places.collect(),
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
            return Err(unreachable(format!("'{address}' is no address; give host:port")));
        }
        Err(error) => return Err(unreachable(format!("no machine is known as {address}: {error}"))),
    };
    let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
    for place in places {
        match TcpStream::connect_timeout(&place, options.patience) {
            Ok(socket) => return Ok(socket),
            Err(error) => last = error,
        }
    }
    Err(unreachable(match last.kind() {
        io::ErrorKind::ConnectionRefused => {
            format!("no server listens at {address}; start one with `farwood serve --listen {address}`")
        }
        io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => {
            format!("nothing answers at {address}; check the address, and that no firewall is in the way")
        }
        _ => format!("cannot connect to {address}: {last}"),
    }))
}

/// Does something that blocks on a thread of its own, so that the executor goes on.
#[expect(clippy::disallowed_methods, reason = "connecting blocks, and happens rarely")]
pub(crate) async fn aside<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let slot = Arc::new(Mutex::new((None::<T>, None::<Waker>)));
    let theirs = Arc::clone(&slot);
    std::thread::spawn(move || {
        let result = work();
        let mut slot = lock(&theirs);
        slot.0 = Some(result);
        if let Some(waker) = slot.1.take() {
            waker.wake();
        }
    });
    std::future::poll_fn(|context| {
        let mut slot = lock(&slot);
        if let Some(result) = slot.0.take() {
            return Poll::Ready(result);
        }
        slot.1 = Some(context.waker().clone());
        Poll::Pending
    })
    .await
}
