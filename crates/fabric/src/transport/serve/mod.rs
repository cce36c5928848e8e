//! A memory server as a process that others use: over shared memory, over TCP, or both at once on the same regions.
//!
//! | file | what it is |
//! |---|---|
//! | `door` | the thread that answers sockets: who comes in, calls, who serves which session |
//! | `peer` | a client process, to those who have something to tell it |
//! | `backing` | where the bytes are |
//! | `kept` | how bytes that are kept were left, and whether they are whole |
//! | `ask` | the question how a server does |
//! | `error` | why a server does not start |
//!
//! Verbs of those who map the memory, or reach it by RDMA, cost the server nothing; those of TCP clients are carried out by a thread of their own
//! (`super::tcp::server`), so that neither a call nor a crowd at the door keeps them waiting.

mod ask;
mod backing;
mod door;
mod error;
mod kept;
mod peer;
#[cfg(test)]
mod tests;

pub use ask::{ServerPlace, status};
pub(crate) use backing::map;
pub use backing::{Backing, anonymous_memory};
pub use error::ServeError;
pub use kept::{BootId, KeepOptions, LastOpening, Left, NotWhole, left};

use super::host::Host;
use super::host::gates::Gates;
use super::host::regions::Regions;
use super::shm::socket;
use super::tcp::server::{self as desk, Desk};
use super::verbs;
use super::verbs::device::Domain;
use super::verbs::dock::Dock;
use crate::region::Identity;
use crate::server::ServerLogic;
use crate::status::Torn;
use crate::wake::Wake;
use backing::Share;
use door::Door;
use kept::Keeper;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// How many connections the system may have made for us that we have not taken yet.
const BACKLOG: i32 = 511;

/// Open files of a server that is full: connections for verbs, clients, those who introduce themselves, and what else it has open.
const MAX_FILES: u64 = (desk::MAX_CONNECTIONS + door::MAX_CLIENTS + door::MAX_STRANGERS + 1024) as u64;

/// How a memory server is offered.
#[derive(Clone, Default, Debug)]
pub struct ServeOptions {
    /// Where its bytes are.
    pub backing: Backing,
    /// How kept memory is taken over.
    pub keep: KeepOptions,
    /// Where processes of this machine find it: a Unix socket to be made.
    pub shm: Option<PathBuf>,
    /// Where other machines find it; port 0 for any that is free.
    pub tcp: Option<SocketAddr>,
    /// The RDMA device by which other machines reach its memory, when they have found it over TCP.
    pub verbs: Option<String>,
    /// What clients have to know; empty: nothing.
    pub token: Vec<u8>,
}

/// A memory server that other processes can use. Dropping it stops it; [`MemoryProcess::end`] closes kept memory, too.
#[derive(Debug)]
pub struct MemoryProcess {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    path: Option<PathBuf>,
    address: Option<SocketAddr>,
    keeper: Option<Keeper>,
}

/// What its threads share.
#[derive(Debug)]
struct Shared {
    host: Arc<Host>,
    wake: Arc<Wake>,
    stop: AtomicBool,
    /// Where verbs of TCP clients are carried out.
    desk: Option<Arc<Desk>>,
    /// Where clients that come by RDMA have their queue pairs.
    dock: Option<Arc<Dock>>,
}

/// Where newcomers knock.
#[derive(Debug)]
struct Listeners {
    unix: Option<UnixListener>,
    tcp: Option<TcpListener>,
}

impl Listeners {
    fn open(options: &ServeOptions) -> Result<Self, ServeError> {
        if options.shm.is_none() && options.tcp.is_none() {
            return Err(ServeError::Nowhere);
        }
        if let Some(address) = options.tcp.filter(|a| !a.ip().is_loopback() && options.token.is_empty()) {
            return Err(ServeError::NeedsToken { address });
        }
        let tcp = match options.tcp {
            Some(address) => {
                let failed = |error| ServeError::Address { address, error };
                let listener = TcpListener::bind(address).map_err(failed)?;
                // What std asks for is less than a pool's clients that all come back at once.
                rustix::net::listen(&listener, BACKLOG).map_err(|error| failed(error.into()))?;
                listener.set_nonblocking(true).map_err(failed)?;
                Some(listener)
            }
            None => None,
        };
        let unix = options.shm.as_deref().map(socket::listen).transpose()?;
        Ok(Self { unix, tcp })
    }
}

impl MemoryProcess {
    /// Starts a server; when this returns, clients can connect.
    #[expect(clippy::disallowed_methods, reason = "sockets are answered by threads of their own")]
    pub fn start(logic: Arc<dyn ServerLogic>, options: ServeOptions) -> Result<Self, ServeError> {
        crate::files::raise_limit(MAX_FILES);
        // Sockets first: they show whether a server is there already, before its memory is touched.
        let listeners = Listeners::open(&options)?;
        let path = options.shm.clone();
        let address = listeners.tcp.as_ref().and_then(|listener| listener.local_addr().ok());
        let (shared, mut share) = prepare(logic, &options).inspect_err(|_| {
            // It was made just now, and if it cannot be removed, it is stale: the next server replaces it.
            let _ = path.as_ref().map(std::fs::remove_file);
        })?;
        let keeper = share.keeper.take();
        let mut threads = Vec::new();
        if let Some(dock) = shared.dock.clone() {
            threads.push(std::thread::spawn(move || dock.run()));
        }
        if let Some(desk) = shared.desk.clone() {
            threads.push(std::thread::spawn(move || desk.run()));
        }
        let door = Door::new(&shared, listeners, share, options.token);
        threads.push(std::thread::spawn(move || door.run()));
        Ok(Self { shared, threads, path, address, keeper })
    }

    /// Stops it, and closes memory that is kept: nobody can touch it any more, and what it holds can be told from what it should not
    /// become. If that fails, or the process is ended meanwhile, the memory is as if the server had been killed.
    pub fn end(mut self) -> Result<(), ServeError> {
        self.stop();
        let Some(mut keeper) = self.keeper.take() else { return Ok(()) };
        self.shared.host.close_all();
        keeper.close(self.shared.host.memory())
    }

    /// Hears nobody any more.
    fn stop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.wake.wake();
        if let Some(desk) = &self.shared.desk {
            desk.stop();
        }
        if let Some(dock) = &self.shared.dock {
            dock.stop();
        }
        // New clients find no socket; those that are there are told when theirs closes.
        let _ = self.path.take().map(std::fs::remove_file);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }

    /// Who it is.
    pub fn identity(&self) -> &Identity {
        self.shared.host.identity()
    }

    /// What was not whole of the memory that it took over, now or earlier.
    pub fn torn(&self) -> Option<Torn> {
        self.shared.host.tables().torn
    }

    /// Where its Unix socket is, if it has one.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Whether its memory is reached by RDMA, and whether locks are in the device's own memory.
    pub fn verbs(&self) -> Option<bool> {
        self.shared.dock.as_ref().map(|dock| dock.has_device_memory())
    }

    /// Where it listens for other machines, if it does.
    pub fn address(&self) -> Option<SocketAddr> {
        self.address
    }
}

/// Opens the RDMA device, if there is to be one, and says whether processors may use atomics beside it.
fn open_device(options: &ServeOptions) -> Result<(Option<Arc<Domain>>, bool), ServeError> {
    let Some(device) = &options.verbs else { return Ok((None, true)) };
    if options.tcp.is_none() {
        return Err(ServeError::VerbsNeedsAddress);
    }
    let domain = Domain::open(Some(device)).map_err(ServeError::Verbs)?;
    let may_mix = domain.atomics_are_global();
    if options.shm.is_some() && !may_mix {
        return Err(ServeError::MixedAtomics { device: device.clone() });
    }
    Ok((Some(domain), may_mix))
}

fn prepare(logic: Arc<dyn ServerLogic>, options: &ServeOptions) -> Result<(Arc<Shared>, Share), ServeError> {
    let (device, may_mix) = open_device(options)?;
    let (regions, gates, mut share) = backing::open(&options.backing, &options.keep, &logic.regions())?;
    let regions = Arc::new(regions);
    let prepared = prepare_on(logic, options, (Arc::clone(&regions), gates), (device, may_mix));
    // Nobody has been let in.
    if let Some(keeper) = &mut share.keeper {
        match &prepared {
            Ok(_) => keeper.started()?,
            Err(_) => keeper.put_back(&regions),
        }
    }
    Ok((prepared?, share))
}

/// The rest, on memory that is marked as being in use.
fn prepare_on(
    logic: Arc<dyn ServerLogic>,
    options: &ServeOptions,
    (regions, gates): (Arc<Regions>, Gates),
    (device, may_mix): (Option<Arc<Domain>>, bool),
) -> Result<Arc<Shared>, ServeError> {
    let host = Host::start(logic, regions, gates).map_err(ServeError::Start)?;
    let wake = Arc::new(Wake::new().map_err(ServeError::memory("an eventfd"))?);
    // Locks on the device are seen by nobody else, and do not outlive the server.
    let may_move_locks = !may_mix && matches!(options.backing, Backing::Memfd);
    let dock = device.map(|device| verbs::offer(&host, &device, may_move_locks).map(Arc::new)).transpose();
    let dock = dock.map_err(ServeError::Verbs)?;
    let desk = (options.tcp.is_some() && may_mix).then(|| Desk::new(&host).map(Arc::new)).transpose();
    let desk = desk.map_err(ServeError::memory("an epoll instance"))?;
    Ok(Arc::new(Shared { host, wake, stop: AtomicBool::new(false), desk, dock }))
}

impl Drop for MemoryProcess {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Compares in a time that does not tell how much is right.
fn same_bytes(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |difference, (a, b)| difference | (a ^ b)) == 0
}
