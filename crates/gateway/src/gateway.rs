//! A gateway: threads that serve clients, all in one session of the pool.
//!
//! The first thread joins the pool, keeps the session alive and opens the index; when told to stop it waits for the others and leaves
//! the pool. A gateway whose session was fenced (it stood still for longer than a lease, and somebody needed what it held) hangs up on its clients
//! and begins again with a new session: they connect again, and find everything that they were told was done.

use crate::common::{Common, Stop};
use crate::metrics::Metrics;
use crate::options::{Options, StartError};
use crate::shard::{self, Inbox, Start};
use crate::store::{Backing, Store};
use farwood_fabric::clock::MILLISECOND;
use farwood_fabric::{Cluster, Endpoint, Executor, FabricError, Label, SessionOptions};
use farwood_index::{IndexError, Pool};
use rustix::process::{Resource, getrlimit, setrlimit};
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

/// A lease is renewed so often while it runs, and at least every tenth of a second, so that memory comes back soon.
const HEARTBEATS_PER_LEASE: u64 = 4;
const HEARTBEAT_NS: u64 = 100 * MILLISECOND;
/// Open files beside those of clients: connections to memory servers, epoll descriptors, what the program has open.
const FILES_BESIDE_CLIENTS: u64 = 1024;
/// How often the first thread looks whether its session is still one.
const LOOK_NS: u64 = 200 * MILLISECOND;
/// How long a gateway waits before it tries again to join.
const REJOIN_NS: u64 = 500 * MILLISECOND;

/// A gateway that runs; dropping it stops it.
#[derive(Debug)]
pub struct Gateway {
    address: SocketAddr,
    metrics: Option<Metrics>,
    stop: Arc<Stop>,
    first: Option<JoinHandle<()>>,
}

/// What the first thread says when it is ready.
type Ready = Sender<Result<(), IndexError>>;

impl Gateway {
    /// Starts a gateway; returns when clients can connect.
    #[expect(clippy::disallowed_methods, reason = "a gateway has threads of its own")]
    pub fn start<B: Backing>(cluster: &Cluster, backing: B, options: Options) -> Result<Self, StartError> {
        if !options.listen.ip().is_loopback() && options.password.is_none() {
            return Err(StartError::Unprotected(options.listen));
        }
        raise_file_limit(options.max_clients);
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
        let (cluster, of_first) = (cluster.clone(), Arc::clone(&stop));
        let first =
            std::thread::spawn(move || lead(&cluster, &backing, &common, &listener, &of_first, &ready));
        let gateway = Self { address, metrics, stop, first: Some(first) };
        is_ready.recv().unwrap_or(Err(IndexError::Unknown))?;
        Ok(gateway)
    }

    /// Where clients connect.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Where Prometheus asks.
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.metrics.as_ref().map(Metrics::address)
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

/// A client is an open file, and systems let a process have few unless it asks. If there are to be no more, accepting says so.
fn raise_file_limit(clients: usize) {
    let mut limit = getrlimit(Resource::Nofile);
    let wanted = clients as u64 + FILES_BESIDE_CLIENTS;
    if limit.current.is_some_and(|current| current < wanted) {
        limit.current = Some(limit.maximum.map_or(wanted, |most| most.min(wanted)));
        let _ = setrlimit(Resource::Nofile, limit);
    }
}

fn listen(address: SocketAddr) -> std::io::Result<TcpListener> {
    let listener = TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// The first thread: one session after the other, until it is told to stop.
fn lead<B: Backing>(
    cluster: &Cluster,
    backing: &B,
    common: &Arc<Common>,
    listener: &TcpListener,
    stop: &Arc<Stop>,
    ready: &Ready,
) {
    let mut ready = Some(ready);
    while !stop.is_set() {
        let executor = Executor::new();
        let ended = executor.block_on(serve_session(cluster, backing, common, listener, stop, ready));
        if ended.is_err() && ready.is_none() && !stop.is_set() {
            let pause = Executor::new();
            pause.block_on(pause.sleep_until(pause.now() + REJOIN_NS));
        }
        executor.clear();
        match ended {
            Ok(Some(())) => tracing::warn!("the session was fenced; clients have to connect again"),
            Ok(None) => return,
            // Nobody was served yet, and who started us knows why.
            Err(_) if ready.is_some() => return,
            Err(error) => tracing::warn!("cannot join the pool again: {error}; trying on"),
        }
        ready = None;
    }
}

/// Serves clients in one session. `Some` if it was fenced, `None` if we were told to stop.
async fn serve_session<B: Backing>(
    cluster: &Cluster,
    backing: &B,
    common: &Arc<Common>,
    listener: &TcpListener,
    stop: &Arc<Stop>,
    ready: Option<&Ready>,
) -> Result<Option<()>, IndexError> {
    let opened = async {
        let label = Label::of_process("gateway");
        let pool = Pool::join(cluster, SessionOptions { label, ..SessionOptions::default() }).await?;
        let endpoint = pool.session().endpoint()?;
        let lease = pool.session().lease_ns();
        let every = if lease == 0 { HEARTBEAT_NS } else { HEARTBEAT_NS.min(lease / HEARTBEATS_PER_LEASE) };
        pool.keep_alive(&endpoint, every);
        let store = backing.open(&pool, &endpoint).await?;
        Ok((pool, endpoint, store))
    };
    let (pool, endpoint, store) = match opened.await {
        Ok(opened) => opened,
        Err(error) => return Err(tell(ready, error)),
    };
    // Ends this session's threads, when all are to end or the session is no more.
    let session_stop = Arc::<Stop>::default();
    endpoint.spawn(pass_on(Arc::clone(stop), Arc::clone(&session_stop)));
    endpoint.spawn(watch_session(pool.clone(), endpoint.clone(), Arc::clone(&session_stop)));
    let inboxes: Arc<[Inbox]> = (0..common.threads.len()).map(|_| Inbox::default()).collect();
    let start = |number, listener| Start {
        number,
        store: store.clone(),
        pool: pool.clone(),
        common: Arc::clone(common),
        stop: Arc::clone(&session_stop),
        inboxes: Arc::clone(&inboxes),
        listener,
    };
    let listener = match listener.try_clone() {
        Ok(listener) => listener,
        Err(error) => {
            let why = format!("cannot listen: {error}");
            return Err(tell(ready, FabricError::Unreachable { why }.into()));
        }
    };
    let others: Vec<_> = (1..common.threads.len()).map(|number| follow(start(number, None))).collect();
    if let Some(ready) = ready {
        let _ = ready.send(Ok(()));
    }
    let served = shard::serve(start(0, Some(listener)), &endpoint).await;
    session_stop.set();
    for other in others {
        let _ = other.join();
    }
    served?;
    for client in common.clients.list() {
        client.disconnect();
        common.clients.leave(&client);
    }
    if pool.session().is_fenced() {
        return Ok(Some(()));
    }
    // If it fails, the lease runs out, and whoever needs what we held takes it.
    let _ = pool.leave(&endpoint).await;
    Ok(None)
}

/// Says what went wrong to whoever waits for the gateway to start.
fn tell(ready: Option<&Ready>, error: IndexError) -> IndexError {
    if let Some(ready) = ready {
        let _ = ready.send(Err(error.clone()));
    }
    error
}

async fn pass_on(from: Arc<Stop>, to: Arc<Stop>) {
    from.wait().await;
    to.set();
}

async fn watch_session(pool: Pool, endpoint: Endpoint, stop: Arc<Stop>) {
    while !pool.session().is_fenced() {
        endpoint.sleep(LOOK_NS).await;
    }
    stop.set();
}

/// Any other thread.
#[expect(clippy::disallowed_methods, reason = "a gateway has threads of its own")]
fn follow<S: Store>(start: Start<S>) -> JoinHandle<()> {
    std::thread::spawn(move || {
        let executor = Executor::new();
        let (stop, session) = (Arc::clone(&start.stop), start.pool.session().clone());
        let served = executor.block_on(async {
            let endpoint = session.endpoint()?;
            shard::serve(start, &endpoint).await
        });
        if let Err(error) = served {
            tracing::error!("a thread of the gateway ended: {error}");
            stop.set();
        }
        executor.clear();
    })
}
