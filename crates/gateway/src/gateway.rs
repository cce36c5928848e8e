//! A gateway: threads that serve clients, all in one session of the pool at a time (`lead`).
//!
//! **Stopping** (dropping it; SIGINT or SIGTERM of the binary): nobody is accepted any more and no command begins; those that have begun
//! come to their end, for at most ten seconds, and their replies are sent, as far as sockets take them; then the session leaves the pool. If
//! commands have not ended by then, the session is given up instead, and others clean up after it. Leaving needs the memory servers; where
//! they may be silent, [`Gateway::stop`] says how long to wait for them.

use crate::common::{Common, Stop};
use crate::lead::Lead;
use crate::metrics::Metrics;
use crate::options::{Options, StartError};
use crate::store::Backing;
use farwood_fabric::clock::RealClock;
use farwood_fabric::{Cluster, Executor, files};
use farwood_index::IndexError;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread::JoinHandle;
use std::time::Duration;

/// Open files beside those of clients: connections to memory servers, epoll descriptors, what the program has open.
const FILES_BESIDE_CLIENTS: u64 = 1024;
/// How many may wait to be taken in, as in Redis; the system may allow fewer.
const BACKLOG: i32 = 511;
/// How often it is looked whether a gateway has stopped.
const LOOK: Duration = Duration::from_millis(5);

/// A gateway that runs; dropping it stops it.
#[derive(Debug)]
pub struct Gateway {
    address: SocketAddr,
    metrics: Option<Metrics>,
    stop: Arc<Stop>,
    first: Option<JoinHandle<()>>,
}

impl Gateway {
    /// Starts a gateway; returns when clients can connect.
    #[expect(clippy::disallowed_methods, reason = "a gateway has threads of its own")]
    pub fn start<B: Backing>(cluster: &Cluster, backing: B, options: Options) -> Result<Self, StartError> {
        if !options.listen.ip().is_loopback() && options.password.is_none() {
            return Err(StartError::Unprotected(options.listen));
        }
        files::raise_limit(options.max_clients as u64 + FILES_BESIDE_CLIENTS);
        let listener = listen(options.listen).map_err(|error| StartError::Listen(options.listen, error))?;
        let address = listener.local_addr().map_err(StartError::System)?;
        let metrics_at = options.metrics;
        let options = Options { listen: address, ..options };
        let executor_random = || Executor::new().random();
        let random = [executor_random(), executor_random(), executor_random()];
        let common = Arc::new(Common::new(options, random));
        let metrics = metrics_at
            .map(|at| Metrics::start(at, Arc::clone(&common)).map_err(|error| StartError::Listen(at, error)))
            .transpose()?;
        let stop = Arc::<Stop>::default();
        let (ready, is_ready) = channel();
        let lead = Lead { cluster: cluster.clone(), backing, common, listener, stop: Arc::clone(&stop) };
        let first = std::thread::spawn(move || lead.run(&ready));
        let gateway = Self { address, metrics, stop, first: Some(first) };
        is_ready.recv().unwrap_or(Err(IndexError::Unknown))?;
        Ok(gateway)
    }

    /// Where clients connect.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Where Prometheus asks, and `/healthz` is answered.
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.metrics.as_ref().map(Metrics::address)
    }

    /// Stops it, and waits for that; whether it has ended in good order. If it has not by then, because memory servers do not answer, its
    /// session ends with its lease.
    #[expect(clippy::disallowed_methods, reason = "waits for a thread of its own")]
    pub fn stop(mut self, patience: Duration) -> bool {
        self.stop.set();
        let clock = RealClock::new();
        while !self.has_ended() {
            if u128::from(clock.now()) > patience.as_nanos() {
                // Nobody waits for it any more.
                self.first = None;
                return false;
            }
            std::thread::sleep(LOOK);
        }
        true
    }

    /// Whether it has come to an end by itself, which it does only when it cannot go on.
    pub fn has_ended(&self) -> bool {
        self.first.as_ref().is_none_or(JoinHandle::is_finished)
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.stop.set();
        if let Some(first) = self.first.take() {
            let _ = first.join();
        }
    }
}

fn listen(address: SocketAddr) -> std::io::Result<TcpListener> {
    let listener = TcpListener::bind(address)?;
    // The number of those who wait to be taken in was chosen by the library; to listen again changes it.
    rustix::net::listen(&listener, BACKLOG)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}
