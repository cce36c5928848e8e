//! Transport `shm`: memory servers are processes of this machine, and clients map their memory.
//!
//! The server ([`MemoryProcess`](super::serve::MemoryProcess), behind `farwood serve --shm`) maps its regions from a memfd, a
//! file or a device ([`Backing`](super::serve::Backing)) and listens on a Unix socket. A client connects, shows a token, gets
//! the server's identity and the descriptor, and from then on carries out verbs itself, with no server CPU (module `direct`).
//! Calls go over the socket.
//!
//! The same path serves hardware-coherent CXL memory that both ends map. Memory that is shared without coherence is not
//! what this is for.
//!
//! - `frames`: the first words on the socket. `socket`: how it is found, made and passed through.
//! - `process`: a client process, to end it. `client`: the client's end; the server's is [`super::serve`].
//!
//! **Fencing** closes the victim's gates and waits until no batch is inside. A process that was stopped in the middle of one
//! is ended and waited for, so a server only takes clients that it is allowed to end. A process whose socket closes is gone
//! for good, and so is its lease. The same is done by a server that takes over kept memory, with the clients of its
//! predecessor.
//!
//! **A server that is gone** closes the socket, but its memory is there: `client` says how its clients go on with the next process.
//!
//! **Trust.** Whoever may connect can map the memory, so the checks of verbs on the client's side guard against mistakes, not
//! malice. The socket is the server's user's alone.

pub(crate) mod client;
pub(crate) mod frames;
pub(crate) mod process;
pub(crate) mod socket;

pub use frames::VERSION;

use super::direct::{DirectCluster, Station};
use super::{Cluster, Origin, View, Way};
use crate::addr::ServerId;
use crate::error::FabricError;
use client::Connection;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// How a client introduces itself.
#[derive(Clone, Default, Debug)]
pub struct ShmOptions {
    /// The token that the servers ask for, if they do.
    pub token: Vec<u8>,
}

/// The end of a socket's name in a folder of them.
const SOCKET_SUFFIX: &str = "sock";

/// A pool of memory servers that are processes of this machine.
#[derive(Debug)]
#[non_exhaustive]
pub struct ShmCluster;

impl ShmCluster {
    /// Connects to the servers behind these sockets, in any order; a folder stands for all sockets (`*.sock`) in it.
    pub fn connect(places: &[PathBuf], options: &ShmOptions) -> Result<Cluster, FabricError> {
        let mut connections: Vec<Arc<Connection>> = Vec::new();
        for socket in sockets(places)? {
            connections.push(Connection::open(&socket, options)?);
        }
        let view = View::new(connections.iter().map(|c| c.identity().clone()).collect())?;
        let stations = connections.into_iter().map(Station::Process).collect();
        let way = Way::Direct(Arc::new(DirectCluster::new(view, stations)));
        Ok(Cluster::new(way, Origin::Shm(places.to_vec(), options.clone())))
    }
}

/// The sockets at these places: a folder stands for all sockets (`*.sock`) in it.
pub fn sockets(places: &[PathBuf]) -> Result<Vec<PathBuf>, FabricError> {
    let mut sockets = Vec::new();
    for place in places {
        if !place.is_dir() {
            sockets.push(place.clone());
            continue;
        }
        let unreadable = |error| FabricError::Unreachable {
            why: format!("cannot look into {}: {error}", place.display()),
        };
        let mut found = Vec::new();
        for entry in place.read_dir().map_err(unreadable)? {
            let path = entry.map_err(unreadable)?.path();
            if path.extension().is_some_and(|end| end == SOCKET_SUFFIX) {
                found.push(path);
            }
        }
        if found.is_empty() {
            let why =
                format!("no server's socket (*.{SOCKET_SUFFIX}) in {}; start one there", place.display());
            return Err(FabricError::Unreachable { why });
        }
        found.sort();
        sockets.extend(found);
    }
    Ok(sockets)
}

/// The socket of server `number` at a place that was named: in a folder, one of its own.
pub fn socket_in(place: &Path, number: ServerId) -> PathBuf {
    if place.is_dir() { place.join(format!("{number}.{SOCKET_SUFFIX}")) } else { place.to_owned() }
}

/// The memory of server `number` at a place that was named: in a folder, a file of its own.
pub fn memory_in(place: &Path, number: ServerId) -> PathBuf {
    if place.is_dir() { place.join(format!("{number}.memory")) } else { place.to_owned() }
}
