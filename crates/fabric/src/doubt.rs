//! Verbs that were given up and may still land: how an endpoint settles them in the background.
//!
//! A verb is given up when its ticket is dropped while it is in flight, or when its completion is lost. Until it has completed, or its
//! connection is fenced, it may land at any time (contract, rule 5), and it keeps its operation's epoch pinned. An operation that
//! gets an unknown outcome mostly reconnects by itself. Where nobody does, since its future is gone or the reconnect failed, a task of
//! the endpoint waits for the completion, or reconnects until that succeeds. If it does not for longer than
//! [`Session::patience_ns`](crate::Session::patience_ns), the session condemns itself.
//!
//! Whatever depends on such a verb (a lock that it may have taken, memory that it may write to) waits for [`Endpoint::quiet`].

use crate::addr::ServerId;
use crate::clock::{MICROSECOND, MILLISECOND, Nanos, SECOND};
use crate::endpoint::Endpoint;
use crate::error::FabricError;
use crate::marks;
use crate::session::Session;
use crate::transport::Posted;
use crate::verb::BatchResult;
use std::cell::{Cell, RefCell};
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

/// How long it is waited before the first attempt to settle something, and between later ones: twice as long each time, up to a limit.
/// The first wait gives an operation that is still there time to reconnect by itself.
const FIRST_WAIT_NS: Nanos = 50 * MICROSECOND;
const LONGEST_WAIT_NS: Nanos = 20 * MILLISECOND;
/// How long an endpoint without a session tries.
const PATIENCE_NS: Nanos = 10 * SECOND;

/// What an endpoint has given up.
#[derive(Default)]
pub(crate) struct Doubts {
    /// Batches whose ticket was dropped while they were in flight.
    orphans: RefCell<Vec<Orphan>>,
    /// Numbers everything that is given up, in order.
    next: Cell<u64>,
    /// The servers that a task settles something on.
    settling: RefCell<Vec<ServerId>>,
}

struct Orphan {
    posted: Posted,
    server: ServerId,
    /// The epoch that it keeps pinned.
    epoch: u64,
    number: u64,
}

impl Doubts {
    /// Whether something is in flight that nobody waits for.
    pub(crate) fn are_flying(&self) -> bool {
        !self.orphans.borrow().is_empty()
    }

    fn is_flying(&self, server: ServerId, below: u64) -> bool {
        self.orphans.borrow().iter().any(|orphan| orphan.server == server && orphan.number < below)
    }

    fn next_number(&self) -> u64 {
        let number = self.next.get();
        self.next.set(number + 1);
        number
    }
}

/// How long one waits for something that others bring about.
struct Waits {
    next_ns: Nanos,
}

impl Waits {
    fn new() -> Self {
        Self { next_ns: FIRST_WAIT_NS }
    }

    async fn wait(&mut self, endpoint: &Endpoint) {
        endpoint.sleep(self.next_ns).await;
        self.next_ns = LONGEST_WAIT_NS.min(self.next_ns * 2);
    }
}

impl Endpoint {
    /// Re-establishes the connection to `server` after an unknown outcome. The old connection is fenced first: nothing
    /// that was in flight on it lands later. If it fails, nothing is settled: what is unknown stays so, and is settled in the background.
    pub async fn reconnect(&self, server: ServerId) -> Result<(), FabricError> {
        if let Some(session) = self.inner.owner.as_ref().filter(|session| session.is_condemned()) {
            return Err(FabricError::Fenced { session: session.id() });
        }
        // Not when this goes on: others may have posted on the new connection by then, and what they do not know is not settled.
        let endpoint = self.clone();
        let settled = move || endpoint.inner.pins.clear_unknown(server);
        let reconnected = self.inner.link.reconnect(server, settled).await;
        match &reconnected {
            Err(FabricError::Fenced { .. }) => self.has_ended(),
            Ok(()) | Err(FabricError::ServerLost { .. }) => {}
            Err(_) => {
                marks::hit("reconnect_failed");
                self.settle_later(server);
            }
        }
        reconnected
    }

    /// A server does not know our session any more. If it is one that came back, the others still do, and must hear of it: a session that
    /// has ended somewhere has ended.
    #[cold]
    pub(crate) fn has_ended(&self) {
        // One that was closed from here has nothing left to be cleaned up.
        if let Some(session) = self.inner.owner.as_ref().filter(|session| !session.is_closed()) {
            session.condemn();
        }
    }

    /// Whether something that was posted to `server` and given up may still land.
    pub fn is_in_doubt(&self, server: ServerId) -> bool {
        self.is_in_doubt_below(server, u64::MAX)
    }

    fn is_in_doubt_below(&self, server: ServerId, below: u64) -> bool {
        self.inner.doubts.is_flying(server, below) || self.inner.pins.is_unknown(server, below)
    }

    /// Waits until nothing that was posted to `server` and given up before this call can land any more. An error says that this
    /// will not be seen here: the session is fenced, or has condemned itself, or the server and its memory are gone.
    pub async fn quiet(&self, server: ServerId) -> Result<(), FabricError> {
        let below = self.inner.doubts.next.get();
        let mut waits = Waits::new();
        loop {
            self.reap_orphans();
            if !self.is_in_doubt_below(server, below) {
                return Ok(());
            }
            if let Some(session) = self.inner.owner.as_ref().filter(|session| session.is_fenced()) {
                return Err(FabricError::Fenced { session: session.id() });
            }
            self.inner.link.check_alive(server)?;
            self.settle_later(server);
            waits.wait(self).await;
        }
    }

    /// Runs a task that settles something: it belongs to those whose endpoint this is, whoever drops the future that it comes from, and
    /// the session does not leave before it has ended.
    pub fn settle(&self, work: impl Future<Output = ()> + 'static) {
        let settling = self.inner.owner.as_ref().map(Session::settling);
        self.inner.executor.spawn_in(self.inner.group, async move {
            work.await;
            drop(settling);
        });
    }

    /// Awaits `work` in place; if that is given up after it has begun, the work goes on as a task.
    pub fn see_through<T: 'static>(&self, work: impl Future<Output = T> + 'static) -> SeeThrough<T> {
        SeeThrough { endpoint: self.clone(), work: Some(Box::pin(work)), has_begun: false }
    }

    /// A batch in flight that nobody waits for any more.
    #[cold]
    pub(crate) fn give_up(&self, posted: Posted, server: ServerId, epoch: u64) {
        self.inner.pins.pin(epoch);
        let number = self.inner.doubts.next_number();
        self.inner.doubts.orphans.borrow_mut().push(Orphan { posted, server, epoch, number });
        self.settle_later(server);
    }

    /// Unpins the epochs of dropped tickets whose batches have completed.
    #[inline]
    pub(crate) fn reap_orphans(&self) {
        if self.inner.doubts.are_flying() {
            self.reap();
        }
    }

    #[cold]
    fn reap(&self) {
        let mut orphans = self.inner.doubts.orphans.take();
        orphans.retain_mut(|orphan| {
            match Pin::new(&mut orphan.posted).poll(&mut Context::from_waker(Waker::noop())) {
                Poll::Ready(result) => {
                    self.hold_unknown(&result, orphan.epoch, || orphan.number);
                    self.inner.pins.unpin(orphan.epoch);
                    false
                }
                Poll::Pending => true,
            }
        });
        self.inner.doubts.orphans.borrow_mut().extend(orphans);
    }

    /// A verb that may still land keeps its epoch pinned until the connection is fenced.
    #[inline]
    pub(crate) fn hold_if_unknown(&self, result: &BatchResult, epoch: u64) {
        if result.is_err() {
            self.hold_unknown(result, epoch, || self.inner.doubts.next_number());
        }
    }

    fn hold_unknown(&self, result: &BatchResult, epoch: u64, number: impl FnOnce() -> u64) {
        if let Err(failure) = result {
            if let FabricError::Unknown { server } = failure.error {
                self.inner.pins.hold_unknown(server, epoch, number());
                self.settle_later(server);
            }
        }
    }

    /// Settles in the background what is in doubt on `server`, unless a task does already.
    fn settle_later(&self, server: ServerId) {
        {
            let mut settling = self.inner.doubts.settling.borrow_mut();
            if settling.contains(&server) {
                return;
            }
            settling.push(server);
        }
        let settler = Settler { endpoint: self.clone(), server };
        self.settle(async move { settler.run().await });
    }
}

/// Settles what is in doubt on one server.
struct Settler {
    endpoint: Endpoint,
    server: ServerId,
}

impl Settler {
    async fn run(&self) {
        let Self { endpoint, server } = self;
        let owner = endpoint.inner.owner.as_ref();
        let end = endpoint.now().saturating_add(owner.map_or(PATIENCE_NS, Session::patience_ns));
        let mut waits = Waits::new();
        loop {
            waits.wait(endpoint).await;
            endpoint.reap_orphans();
            if !endpoint.is_in_doubt(*server) || owner.is_some_and(Session::is_fenced) {
                return;
            }
            if endpoint.inner.pins.is_unknown(*server, u64::MAX) {
                match endpoint.reconnect(*server).await {
                    Ok(()) => {
                        marks::hit("settled_by_reconnecting");
                        continue;
                    }
                    Err(FabricError::Fenced { .. } | FabricError::ServerLost { .. }) => return,
                    Err(_) => {}
                }
            }
            if endpoint.now() >= end {
                if let Some(session) = owner {
                    session.condemn();
                }
                return;
            }
        }
    }
}

impl Drop for Settler {
    fn drop(&mut self) {
        self.endpoint.inner.doubts.settling.borrow_mut().retain(|server| *server != self.server);
    }
}

/// Work that is awaited in place and, if that is given up, goes on as a task.
pub struct SeeThrough<T: 'static> {
    endpoint: Endpoint,
    work: Option<Pin<Box<dyn Future<Output = T>>>>,
    has_begun: bool,
}

impl<T> Future for SeeThrough<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        self.has_begun = true;
        let Some(work) = &mut self.work else { return Poll::Pending };
        let polled = work.as_mut().poll(context);
        if polled.is_ready() {
            self.work = None;
        }
        polled
    }
}

impl<T> Drop for SeeThrough<T> {
    fn drop(&mut self) {
        if let Some(work) = self.work.take().filter(|_| self.has_begun) {
            marks::hit("seen_through");
            self.endpoint.settle(async move { drop(work.await) });
        }
    }
}

impl<T> fmt::Debug for SeeThrough<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SeeThrough")
    }
}
