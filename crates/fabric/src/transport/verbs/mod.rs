//! Transport `verbs`: memory servers that are reached through RDMA devices, without their processors.
//!
//! An endpoint has two reliable connected queue pairs to each server, one for short batches and one for bulk. A batch is one linked
//! list of requests, of which the last is signaled; fences stand only where the contract says. Who may come in, and with which
//! queue pairs and keys, is settled over the server's TCP port; long calls go over the same line as with `tcp`, short ones over the
//! queue pairs.
//!
//! | file | what it is |
//! |---|---|
//! | `sys` | the library, declared by hand and loaded at run time |
//! | `device`, `memory`, `queue` | the safe layer: devices, registered memory, queues, each owned |
//! | `inventory`, `error` | which devices there are; why RDMA cannot be used |
//! | `plan`, `sender` | a batch as requests, and the requests under way with the memory they use |
//! | `mailbox`, `notes` | short messages: calls and answers |
//! | `offer`, `connection` | the client's end of a connection, before and after; `super::tcp::client` holds them |
//! | `dock`, `loopback` | the server's end: who has queue pairs, and how procedures take part in the device's atomics |
//!
//! **Fencing** is ending the server's queue pairs: after that, its device takes nothing from the other end.
//!
//! **One atomic domain.** A device's atomics are atomic among themselves, not with a processor's, unless it says so. So a server that
//! offers RDMA takes no verbs over TCP or shared memory, and its own procedures use the device.
//!
//! **What is protected.** Each connection may do what its session may (the queue pairs' access flags) and what the region allows (the
//! key's): the server's tables cannot be written. Within that, bounds are checked on the client's side and, by the device, per
//! region; whoever has the keys can read and write any object. There is no encryption.

pub(crate) mod connection;
pub(crate) mod device;
pub(crate) mod dock;
mod error;
mod inventory;
pub(crate) mod loopback;
mod mailbox;
mod memory;
mod notes;
pub(crate) mod offer;
mod plan;
pub(crate) mod queue;
mod sender;
mod sys;

pub use error::VerbsError;
pub use inventory::{Atomics, DeviceInfo, LinkLayer, PortInfo, UsedAddress, devices};

use super::host::Host;
use super::tcp::TcpOptions;
use super::tcp::client::FarCluster;
use super::tcp::station::Station;
use super::{Cluster, Origin, View, Way};
use crate::buf::BufPool;
use crate::error::FabricError;
use device::Domain;
use dock::Dock;
use loopback::Loopback;
use memory::LocalMemory;
use std::sync::Arc;
use std::time::Duration;

/// How a client introduces itself, what it uses and what it puts up with.
#[derive(Clone, Default, Debug)]
pub struct VerbsOptions {
    /// The token that the servers ask for, if they do.
    pub token: Vec<u8>,
    /// The RDMA device; none: the first that can be used.
    pub device: Option<String>,
    /// How long a server may take to answer anything; none: as long as over TCP.
    pub patience: Option<Duration>,
}

/// A pool of memory servers that are reached by RDMA.
#[derive(Debug)]
#[non_exhaustive]
pub struct VerbsCluster;

impl VerbsCluster {
    /// Connects to the servers at these addresses (`host:port`, the server's TCP port), in any order.
    pub fn connect(addresses: &[String], options: &VerbsOptions) -> Result<Cluster, FabricError> {
        let unreachable = |error: VerbsError| FabricError::Unreachable { why: error.to_string() };
        let domain = Domain::open(options.device.as_deref()).map_err(unreachable)?;
        let usual = TcpOptions::default();
        let tcp =
            TcpOptions { token: options.token.clone(), patience: options.patience.unwrap_or(usual.patience) };
        let open = |address: &String| Station::open(address, &tcp);
        let stations: Vec<Arc<Station>> = addresses.iter().map(open).collect::<Result<_, _>>()?;
        let view = View::new(stations.iter().map(|station| station.identity().clone()).collect())?;
        let way = Way::Far(Arc::new(FarCluster::new(view, stations, Some(domain))));
        Ok(Cluster::new(way, Origin::Verbs(addresses.to_vec(), options.clone())))
    }
}

/// Buffers that the device knows.
pub(crate) fn pool(domain: &Arc<Domain>) -> BufPool {
    BufPool::registered(Box::new(LocalMemory(Arc::clone(domain))))
}

/// Offers a server's memory through a device. If processor and device must not mix, procedures use the device, too.
pub(crate) fn offer(
    host: &Arc<Host>,
    domain: &Arc<Domain>,
    may_move_locks: bool,
) -> Result<Dock, VerbsError> {
    let dock = Dock::new(host, Arc::clone(domain), may_move_locks)?;
    if !domain.atomics_are_global() || dock.has_device_memory() {
        host.use_loopback(Arc::new(Loopback::new(domain, dock.offered(), host.id())?));
    }
    Ok(dock)
}
