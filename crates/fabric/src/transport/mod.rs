//! Transports, and the contract that every one of them keeps.
//!
//! # The contract
//!
//! The weakest one that RDMA, shared memory, TCP and the simulator all keep. Engines rely on this and on nothing more;
//! [`conformance`] runs it against every transport.
//!
//! 1. **Addresses.** A [`GlobalAddr`](crate::addr::GlobalAddr) names server, region and offset. A server number is
//!    logical and looked up in a [`View`]. Region 0 is main memory, 1 lock memory, 2 the server's tables (clients read
//!    only), 3 the board (anchors and journals).
//! 2. **Atomicity.** Only aligned 8-byte words are atomic; the part of a WRITE that lies in one word is atomic and touches
//!    only its own bytes. Words and lines of one READ or WRITE take effect in any order, interleaved with everybody else's
//!    verbs. More than that is a capability ([`Capabilities`]), declared after a litmus test.
//! 3. **Ordered batches.** Order exists only within one batch, across the regions of its server, and it is an order of
//!    *effects*. Free, one round trip for the whole batch: WRITE then anything, atomic then READ, READ then READ
//!    (`ordered_reads`). READ or atomic followed by WRITE or atomic is legal, needs a fence, and costs one more round trip
//!    on every transport. Two batches have no order, not even to one server. A CAS that does not match is a completed verb,
//!    and what follows still executes: only harmless verbs belong behind it. A verb *error* ends its batch.
//! 4. **Atomics** (CAS, masked CAS, FAA) are atomic among themselves and with nothing else: a plain WRITE racing with an
//!    atomic on its word may be lost or may be overwritten. Locks that share a word with others are released by atomics
//!    only. There is one atomic domain per region; procedures on the memory server are in it.
//! 5. **Outcome.** A completed verb has taken effect and is visible to everybody, to procedures on the server too. A failed
//!    or timed-out verb is *unknown* and may still take effect until its connection, or its session, is **fenced**: after
//!    that none of its verbs can land. `reconnect` fences the old connection before it opens the new one. A `reconnect` that
//!    *fails* settles nothing: the server may never have heard of it, so what was in flight on the old connection stays unknown
//!    and may still take effect, until a later `reconnect` succeeds or the session is fenced; the connection stays down
//!    meanwhile, and posts are refused with `Disconnected`. Locks are stolen, memory is reused and epochs advance past a session
//!    only after it is fenced on every server.
//! 6. **Checks.** Bounds, region, alignment and permission are checked against the region table before a batch is posted:
//!    a typed error for that verb, the other verbs of the batch are `NotExecuted`, nothing is touched. A server that
//!    checks again and refuses makes it a session error: verbs in flight become unknown.
//! 7. **Capabilities** are asked, not guessed. Relaxed ordering is off everywhere.
//!
//! # What a transport supplies
//!
//! A `Link`, one per endpoint, with `post` (a checked batch), `call`, `reconnect`, `serve` (calls to this session) and
//! `reply`; on the memory server's side it maps the regions that a [`ServerLogic`](crate::server::ServerLogic) asks for,
//! hands it the calls, and carries out its [`HostAction`](crate::server::HostAction)s.

pub mod conformance;
pub(crate) mod direct;
pub(crate) mod host;
pub(crate) mod line;
pub mod local;
pub mod serve;
pub mod shm;
pub mod sim;
pub(crate) mod slots;
pub(crate) mod stream;
pub mod tcp;
pub mod url;
pub mod verbs;

use crate::addr::ServerId;
use crate::buf::BufPool;
use crate::call::{Call, CallId, CallOutcome, CallTable, Once, Principal, Seen, Target};
use crate::caps::Capabilities;
use crate::error::FabricError;
use crate::region::{Identity, RegionTable};
use crate::verb::{Batch, BatchResult};
use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

/// The number of the first view of a pool, which is its only one so far.
pub(crate) const VIEW: u64 = 1;

/// Which server answers to which number.
#[derive(Clone, Debug)]
pub struct View {
    /// Grows with every change.
    pub number: u64,
    /// The servers, by number.
    pub servers: Vec<Identity>,
}

impl View {
    /// The view of these servers, in whatever order they were found: all of one pool, each once, none missing.
    pub fn new(mut servers: Vec<Identity>) -> Result<Self, FabricError> {
        let wrong = |why: String| Err(FabricError::WrongServer { why });
        let Some(first) = servers.first() else { return wrong("a pool has at least one server".into()) };
        let (pool, count, format) = (first.pool, first.servers, first.format);
        for server in &servers {
            if server.pool != pool {
                return Err(FabricError::WrongPool { ours: pool, theirs: server.pool });
            }
            if server.format != format || server.servers != count {
                return wrong(format!(
                    "server {} was set up with other settings than the rest",
                    server.server
                ));
            }
        }
        servers.sort_by_key(|s| s.server);
        for (n, server) in servers.iter().enumerate() {
            if server.server.index() > n {
                return wrong(format!("server m{n} of the pool is missing"));
            }
            if server.server.index() < n {
                return wrong(format!("server {} is named twice", server.server));
            }
        }
        if servers.len() != usize::from(count) {
            return wrong(format!("the pool has {count} servers, {} were named", servers.len()));
        }
        Ok(Self { number: VIEW, servers })
    }

    /// Servers that have another memory here than in an `earlier` view of the pool: what they held is gone.
    pub fn emptied_since(&self, earlier: &View) -> Vec<ServerId> {
        let memory = |server: &Identity| (server.pool, server.server, server.incarnation);
        let had = |server: &&Identity| !earlier.servers.iter().any(|before| memory(before) == memory(server));
        self.servers.iter().filter(had).map(|server| server.server).collect()
    }

    /// The numbers of all servers.
    pub fn ids(&self) -> impl Iterator<Item = ServerId> + use<> {
        self.servers.iter().map(|s| s.server).collect::<Vec<_>>().into_iter()
    }

    /// The size of a server's chunks, which follows from the size of its memory; 0 if there is no such server.
    pub fn chunk_bytes(&self, server: ServerId) -> u64 {
        self.servers.get(server.index()).map_or(0, |server| server.chunk_bytes)
    }

    /// The size that chunks have everywhere, at least.
    pub fn smallest_chunk_bytes(&self) -> u64 {
        self.servers.iter().map(|server| server.chunk_bytes).min().unwrap_or(0)
    }
}

/// A way to a pool's memory servers. Cheap to clone, usable from any thread.
#[derive(Clone, Debug)]
pub struct Cluster {
    pub(crate) way: Way,
    pub(crate) origin: Arc<Origin>,
}

/// Where a pool's servers were found.
#[derive(Debug)]
pub(crate) enum Origin {
    /// In this process, or in a simulated world.
    Here,
    Shm(Vec<PathBuf>, shm::ShmOptions),
    Tcp(Vec<String>, tcp::TcpOptions),
    Verbs(Vec<String>, verbs::VerbsOptions),
}

#[derive(Clone, Debug)]
pub(crate) enum Way {
    Direct(Arc<direct::DirectCluster>),
    Far(Arc<tcp::client::FarCluster>),
    Sim(sim::SimCluster),
}

impl Cluster {
    pub(crate) fn new(way: Way, origin: Origin) -> Self {
        Self { way, origin: Arc::new(origin) }
    }

    /// Connects anew to whatever servers are where these were found: for those that came back, with the memory they had or with another.
    /// [`View::emptied_since`] tells, and so does the log. Servers inside this process are the same. Blocks for as long as a client waits
    /// for anything.
    pub fn again(&self) -> Result<Self, FabricError> {
        let again = match &*self.origin {
            Origin::Here => self.clone(),
            Origin::Shm(places, options) => shm::ShmCluster::connect(places, options)?,
            Origin::Tcp(addresses, options) => tcp::TcpCluster::connect(addresses, options)?,
            Origin::Verbs(addresses, options) => verbs::VerbsCluster::connect(addresses, options)?,
        };
        for server in again.view().emptied_since(&self.view()) {
            tracing::error!(%server, "a memory server came back with empty memory: what it held is gone");
        }
        Ok(again)
    }

    /// Which servers there are.
    pub fn view(&self) -> View {
        match &self.way {
            Way::Direct(cluster) => cluster.view().clone(),
            Way::Far(cluster) => cluster.view().clone(),
            Way::Sim(cluster) => cluster.view(),
        }
    }

    /// What the transport can do.
    pub fn capabilities(&self) -> Capabilities {
        match &self.way {
            Way::Direct(cluster) => cluster.capabilities(),
            Way::Far(cluster) => cluster.capabilities(),
            Way::Sim(cluster) => cluster.capabilities(),
        }
    }

    /// Connects an endpoint of a session (nobody's: one that may only call) to all servers.
    pub(crate) fn connect(&self, who: Principal) -> Result<Link, FabricError> {
        Ok(match &self.way {
            Way::Direct(cluster) => Link::Direct(cluster.connect(who)?),
            Way::Far(cluster) => Link::Far(cluster.connect(who, true)?),
            Way::Sim(cluster) => Link::Sim(cluster.connect(who)),
        })
    }

    /// Connects an endpoint of a session that only calls.
    pub(crate) fn connect_to_call(&self, who: Principal) -> Result<Link, FabricError> {
        match &self.way {
            Way::Far(cluster) => cluster.connect(who, false).map(Link::Far),
            _ => self.connect(who),
        }
    }
}

/// An endpoint's connections.
#[derive(Debug)]
pub(crate) enum Link {
    Direct(direct::DirectLink),
    Far(tcp::client::FarLink),
    Sim(sim::SimLink),
}

impl Link {
    pub(crate) fn capabilities(&self) -> &Capabilities {
        match self {
            Self::Direct(link) => link.capabilities(),
            Self::Far(link) => link.capabilities(),
            Self::Sim(link) => link.capabilities(),
        }
    }

    /// The regions that this endpoint may use on `server`.
    pub(crate) fn table(&self, server: ServerId) -> Result<&RegionTable, FabricError> {
        match self {
            Self::Direct(link) => link.table(server),
            Self::Far(link) => link.table(server),
            Self::Sim(link) => link.table(server),
        }
    }

    /// Whether `server` exists and is not known to be gone.
    pub(crate) fn check_alive(&self, server: ServerId) -> Result<(), FabricError> {
        match self {
            Self::Direct(link) => link.check_alive(server),
            Self::Far(link) => link.check_alive(server),
            Self::Sim(link) => link.table(server).map(drop),
        }
    }

    /// Buffers for its verbs.
    pub(crate) fn pool(&self) -> BufPool {
        match self {
            Self::Far(link) => link.pool(),
            Self::Direct(_) | Self::Sim(_) => BufPool::default(),
        }
    }

    /// Posts a batch that has been checked.
    pub(crate) fn post(&self, mut batch: Batch, pool: &BufPool) -> Posted {
        match self {
            Self::Direct(link) => Posted::Ready(link.execute(batch, pool)),
            Self::Far(link) => link.post(&mut batch, pool),
            Self::Sim(link) => Posted::Sim(link.post(batch, pool)),
        }
    }

    /// Sends a call and waits for its reply. One that must run only `once` is sent to no other life of the server than before.
    pub(crate) async fn call(&self, target: Target, call: Call, once: Once<'_>) -> CallOutcome {
        match self {
            Self::Direct(link) => link.call(target, call, once).await,
            Self::Far(link) => link.call(target, call, once).await,
            Self::Sim(link) => link.call(target, call, once).await,
        }
    }

    /// Fences the connection to `server` and opens a new one. Does `settled` when nothing that was in flight before can land any more,
    /// because of that or because the memory is gone, and before anything is posted anew.
    pub(crate) async fn reconnect(
        &self,
        server: ServerId,
        settled: impl FnOnce() + 'static,
    ) -> Result<(), FabricError> {
        let reconnected = match self {
            Self::Direct(link) => link.reconnect(server).await,
            Self::Far(link) => return link.reconnect(server, settled).await,
            Self::Sim(link) => link.reconnect(server).await,
        };
        if matches!(reconnected, Ok(()) | Err(FabricError::ServerLost { .. })) {
            settled();
        }
        reconnected
    }

    /// Where calls to this endpoint's session arrive from now on.
    pub(crate) fn serve(&self) -> Arc<Inbox> {
        match self {
            Self::Direct(link) => link.serve(),
            Self::Far(link) => link.serve(),
            Self::Sim(link) => link.serve(),
        }
    }

    /// Answers a call that arrived at the inbox.
    pub(crate) fn reply(&self, to: CallId, outcome: CallOutcome) {
        match self {
            Self::Direct(link) => link.reply(to, outcome),
            Self::Far(link) => link.reply(to, outcome),
            Self::Sim(link) => link.reply(to, outcome),
        }
    }
}

/// A batch under way. Dropping it detaches: the verbs complete, their results go nowhere.
pub(crate) enum Posted {
    Ready(BatchResult),
    Far(slots::Ticket<tcp::connection::Connection>),
    Queued(slots::Ticket<verbs::connection::Connection>),
    Sim(sim::SimTicket),
    Taken,
}

impl Future for Posted {
    type Output = BatchResult;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<BatchResult> {
        // In place: a ticket is polled more often than it is ready, and is not small. One that was ready knows that by itself.
        match &mut *self {
            Self::Far(ticket) => ticket.poll(context),
            Self::Queued(ticket) => ticket.poll(context),
            Self::Sim(ticket) => ticket.poll(context),
            Self::Ready(_) => match std::mem::replace(&mut *self, Self::Taken) {
                Self::Ready(result) => Poll::Ready(result),
                _ => Poll::Pending,
            },
            Self::Taken => Poll::Pending,
        }
    }
}

impl fmt::Debug for Posted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ready(_) => "Posted(ready)",
            Self::Far(_) | Self::Queued(_) | Self::Sim(_) => "Posted(in flight)",
            Self::Taken => "Posted(taken)",
        })
    }
}

/// Calls that have arrived for a session and wait to be run by it. All its endpoints that serve share one.
#[derive(Default, Debug)]
pub(crate) struct Inbox {
    state: Mutex<InboxState>,
}

#[derive(Default, Debug)]
struct InboxState {
    arrived: VecDeque<Call>,
    idle: Vec<Waker>,
    closed: bool,
    /// What was called before, so that a repeat runs at most once, whichever endpoint takes it.
    table: CallTable,
}

impl Inbox {
    /// One to which nothing comes.
    pub(crate) fn closed() -> Self {
        let inbox = Self::default();
        inbox.close();
        inbox
    }

    pub(crate) fn push(&self, call: Call) {
        let mut state = crate::exec::lock(&self.state);
        state.arrived.push_back(call);
        if let Some(waker) = state.idle.pop() {
            waker.wake();
        }
    }

    /// The session has ended: whoever serves it stops.
    pub(crate) fn close(&self) {
        let mut state = crate::exec::lock(&self.state);
        state.closed = true;
        for waker in state.idle.drain(..) {
            waker.wake();
        }
    }

    /// The next call, and whether it was seen before; `None` when the session has ended.
    pub(crate) async fn next(&self) -> Option<(Call, Seen)> {
        std::future::poll_fn(|context| {
            let mut state = crate::exec::lock(&self.state);
            if state.closed {
                return Poll::Ready(None);
            }
            if let Some(call) = state.arrived.pop_front() {
                let seen = state.table.begin(&call);
                return Poll::Ready(Some((call, seen)));
            }
            state.idle.push(context.waker().clone());
            Poll::Pending
        })
        .await
    }

    /// Keeps the outcome of a call that ran.
    pub(crate) fn finish(&self, id: CallId, outcome: &CallOutcome) {
        crate::exec::lock(&self.state).table.finish(id, outcome);
    }
}

/// Where the reply to a call arrives, from whatever thread.
#[derive(Default, Debug)]
pub(crate) struct ReplySlot {
    state: Mutex<(Option<CallOutcome>, Option<Waker>)>,
}

impl ReplySlot {
    pub(crate) fn set(&self, outcome: CallOutcome) {
        let mut state = crate::exec::lock(&self.state);
        // The first outcome counts: a time-out that was reported is not taken back by a late reply.
        if state.0.is_none() {
            state.0 = Some(outcome);
        }
        if let Some(waker) = state.1.take() {
            waker.wake();
        }
    }

    pub(crate) async fn wait(&self) -> CallOutcome {
        std::future::poll_fn(|context| {
            let mut state = crate::exec::lock(&self.state);
            if let Some(outcome) = state.0.take() {
                return Poll::Ready(outcome);
            }
            state.1 = Some(context.waker().clone());
            Poll::Pending
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::PoolId;

    fn identity(pool: u128, server: u16, servers: u16) -> Identity {
        let (pool, server) = (PoolId(pool), ServerId::new(server));
        Identity {
            pool,
            server,
            servers,
            incarnation: 1,
            life: 1,
            format: 1,
            chunk_bytes: 4096,
            regions: vec![],
        }
    }

    #[test]
    fn the_order_of_servers_means_nothing() {
        let view = View::new(vec![identity(1, 2, 3), identity(1, 0, 3), identity(1, 1, 3)]).unwrap();
        assert_eq!(view.ids().map(ServerId::get).collect::<Vec<_>>(), [0, 1, 2]);
    }

    #[test]
    fn strangers_doubles_and_gaps_are_refused() {
        let strangers = View::new(vec![identity(1, 0, 2), identity(2, 1, 2)]);
        assert!(matches!(strangers, Err(FabricError::WrongPool { .. })));
        for wrong in [
            vec![],
            vec![identity(1, 0, 2)],
            vec![identity(1, 0, 2), identity(1, 0, 2)],
            vec![identity(1, 0, 2), identity(1, 2, 2)],
            vec![identity(1, 0, 2), identity(1, 1, 3)],
        ] {
            assert!(matches!(View::new(wrong.clone()), Err(FabricError::WrongServer { .. })), "{wrong:?}");
        }
    }
}
