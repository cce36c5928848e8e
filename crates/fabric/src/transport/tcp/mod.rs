//! Transport `tcp`: memory servers anywhere that TCP reaches.
//!
//! One batch is one request and one reply; the server carries it out in order ([`super::serve`], `server`). An endpoint has a
//! connection of its own to each server, as it would have a queue pair, and its thread does the input and output itself: what
//! its tasks post goes out together when none of them is ready, and both ends spin for some 50 us before they block. Calls
//! go over a line per process (`line`).
//!
//! | file | what it is |
//! |---|---|
//! | `frames`, `verbs` | what is said, byte by byte: first words, batches and replies; `docs/wire.md` |
//! | `buffer` | bytes on their way out or in |
//! | `execute`, `server` | the server's end: one batch, and the thread that carries them out |
//! | `pieces`, `connection` | the client's end: a batch as frames and back, and one connection |
//! | `station`, `client` | a server as a process knows it, and an endpoint's connections |
//! | `attempts` | connecting again: once at a time, for all who wait for it |
//!
//! **Fencing.** A connection has a gate in the server, which stands between the socket and the memory: when it is closed,
//! nothing of the connection lands any more, whatever is still on its way. A session's gates are closed when it is fenced;
//! a connection's when the one that replaces it introduces itself.
//!
//! **A connection that breaks** makes everything in flight on it unknown; until it is replaced (`reconnect`), verbs say
//! `Disconnected`. An endpoint makes at most one attempt at a time to replace its connection to a server, and a process one to open a line
//! again. Whoever asks meanwhile waits for its outcome. A server that comes back with other memory is lost.

pub(crate) mod attempts;
pub(crate) mod buffer;
pub(crate) mod client;
pub(crate) mod connection;
mod execute;
pub(crate) mod frames;
#[cfg(fuzzing)]
#[doc(hidden)]
pub mod fuzz;
mod pieces;
#[cfg(any(test, fuzzing))]
mod scope;
pub(crate) mod server;
pub(crate) mod station;
mod verbs;

#[cfg(test)]
mod crowd;
#[cfg(test)]
mod tests;

pub use frames::VERSION;

use super::{Cluster, Origin, View, Way};
use crate::error::FabricError;
use std::io;
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

/// After so long without a sign of life the system asks the other end for one, and as often as that.
const KEEPALIVE: Duration = Duration::from_secs(20);
/// So many signs that do not come mean that it is gone.
const KEEPALIVES: u32 = 3;

/// How a client introduces itself, and what it puts up with.
#[derive(Clone, Debug)]
pub struct TcpOptions {
    /// The token that the servers ask for, if they do.
    pub token: Vec<u8>,
    /// How long a server may take to answer anything.
    pub patience: Duration,
}

impl Default for TcpOptions {
    fn default() -> Self {
        Self { token: Vec::new(), patience: Duration::from_secs(5) }
    }
}

/// A pool of memory servers behind TCP addresses.
#[derive(Debug)]
#[non_exhaustive]
pub struct TcpCluster;

impl TcpCluster {
    /// Connects to the servers at these addresses (`host:port`), in any order.
    pub fn connect(addresses: &[String], options: &TcpOptions) -> Result<Cluster, FabricError> {
        let open = |address: &String| station::Station::open(address, options);
        let stations: Vec<Arc<station::Station>> = addresses.iter().map(open).collect::<Result<_, _>>()?;
        let view = View::new(stations.iter().map(|station| station.identity().clone()).collect())?;
        let way = Way::Far(Arc::new(client::FarCluster::new(view, stations, None)));
        Ok(Cluster::new(way, Origin::Tcp(addresses.to_vec(), options.clone())))
    }
}

/// Small messages go out at once; whoever is gone without a word is found out.
pub(crate) fn prepare(socket: &TcpStream) -> io::Result<()> {
    socket.set_nodelay(true)?;
    rustix::net::sockopt::set_socket_keepalive(socket, true)?;
    rustix::net::sockopt::set_tcp_keepidle(socket, KEEPALIVE)?;
    rustix::net::sockopt::set_tcp_keepintvl(socket, KEEPALIVE)?;
    rustix::net::sockopt::set_tcp_keepcnt(socket, KEEPALIVES)?;
    Ok(())
}
