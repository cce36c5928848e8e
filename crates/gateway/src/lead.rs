//! The first thread of a gateway: one session of the pool after the other.
//!
//! 1. Join the pool, keep the session alive, open the index.
//! 2. Serve clients on all threads, until told to stop, until the index is dropped, or until the session is lost: it was fenced (the gateway stood still for longer than
//!    a lease, and somebody needed what it held), or a memory server came back with empty memory. One that comes back with its memory knows us.
//! 3. Told to stop, leave the pool. Otherwise hand the clients to a thread that serves them without an index (PING is answered, data
//!    commands are told to try again), connect to the servers anew, and go on with 1 as soon as that works.
//!
//! Clients keep their connections, except for those whose command could not be brought to an end with the old session. If servers came
//! back with empty memory, that is said, once; an index that went with it is made anew, and what others have filled again is served.
//!
//! Whatever fails between joining and serving leaves the pool again.

use crate::common::{Common, Stop, at_most};
use crate::health::Remedy;
use crate::shard::{self, Inbox, Joined, Start};
use crate::store::{Backing, Store, lacks_index};
use farwood_fabric::clock::{MILLISECOND, SECOND};
use farwood_fabric::control::ControlError;
use farwood_fabric::{Cluster, Endpoint, Executor, FabricError, Label, SessionOptions};
use farwood_index::{IndexError, Pool};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;

/// How often it is looked whether the session is still one, and whether it has heard from all servers.
const LOOK_NS: u64 = 100 * MILLISECOND;
/// How often it is looked whether other threads have ended.
const REST_LOOK_NS: u64 = MILLISECOND;
/// How long the end of a session may take: it waits for what is under way and for the servers, which may be silent.
const LEAVE_NS: u64 = 10 * SECOND;
const FENCE_NS: u64 = SECOND;
/// How long a gateway waits before it tries again to join, and how often it looks meanwhile whether it is to stop.
const REJOIN_NS: u64 = 200 * MILLISECOND;
const REJOIN_LOOKS: u64 = 4;

/// What the first thread says when it is ready.
pub(crate) type Ready = Sender<Result<(), IndexError>>;

/// What the first thread needs.
pub(crate) struct Lead<B> {
    pub(crate) cluster: Cluster,
    pub(crate) backing: B,
    pub(crate) common: Arc<Common>,
    pub(crate) listener: TcpListener,
    pub(crate) stop: Arc<Stop>,
}

/// How a session ended.
enum Ended {
    /// As it was to.
    Stopped,
    /// It was lost.
    Lost(Lost),
}

/// Why there is no session.
struct Lost {
    why: String,
    remedy: Remedy,
}

impl Lost {
    fn new(why: impl Into<String>) -> Self {
        Self { why: why.into(), remedy: Remedy::Time }
    }

    fn from_error(error: &IndexError) -> Self {
        let of_other =
            |error: &FabricError| matches!(error.control(), Some(ControlError::OtherCoordinator { .. }));
        let remedy = match error {
            error if lacks_index(error) => Remedy::Index,
            IndexError::Fabric(error) if of_other(error) => Remedy::Operator,
            _ => Remedy::Time,
        };
        Self { why: error.to_string(), remedy }
    }
}

impl<B: Backing> Lead<B> {
    /// One session after the other, until it is told to stop.
    pub(crate) fn run(mut self, ready: &Ready) {
        let mut starting = Some(ready);
        let mut meanwhile = None;
        // Whether servers came back with empty memory since the index was last open.
        let mut is_emptied = false;
        while !self.stop.is_set() {
            let executor = Executor::new();
            let ended = executor.block_on(async {
                let joined = self.join(is_emptied).await?;
                // Hands its clients over.
                drop(meanwhile.take());
                is_emptied = false;
                self.serve(joined, starting.take(), &mut meanwhile).await
            });
            // Hangs up on clients whose commands are cut short.
            executor.clear();
            let lost = match ended {
                Ok(Ended::Stopped) => break,
                Ok(Ended::Lost(lost)) => lost,
                Err(error) => match starting {
                    // Nobody was served yet, and who started us hears why.
                    Some(ready) => return drop(ready.send(Err(error))),
                    None => Lost::from_error(&error),
                },
            };
            self.absent(&lost);
            if meanwhile.is_none() {
                meanwhile = self.serve_meanwhile();
            }
            is_emptied |= self.find_servers();
        }
        drop(meanwhile);
        let _ = self.common.health.absent("the gateway has stopped", Remedy::Time);
        drop(self.common.lobby.take_all());
    }

    /// Connects to the servers anew, as soon as all of them are there; whether any came back with empty memory.
    fn find_servers(&mut self) -> bool {
        loop {
            self.pause();
            if self.stop.is_set() {
                return false;
            }
            match self.cluster.again() {
                Ok(cluster) => {
                    let before = std::mem::replace(&mut self.cluster, cluster);
                    return !self.cluster.view().emptied_since(&before.view()).is_empty();
                }
                Err(error) => self.absent(&Lost::from_error(&error.into())),
            }
        }
    }

    /// Says why there is no session, once until there is another reason.
    fn absent(&self, Lost { why, remedy }: &Lost) {
        if self.common.health.absent(why, *remedy) {
            tracing::warn!("no session with the memory servers: {why}; joining again until it works");
        }
    }

    /// Joins the pool and opens the index. If that fails, nothing of it stays.
    async fn join(&self, is_emptied: bool) -> Result<Joined<B::Store>, IndexError> {
        let label = Label::of_process("gateway");
        let options = SessionOptions { label, ..SessionOptions::default() };
        let (pool, endpoint) = Pool::join_alive(&self.cluster, options).await?;
        let opened = if is_emptied {
            self.backing.open_or_make(&pool, &endpoint).await
        } else {
            self.backing.open(&pool, &endpoint).await
        };
        // Nobody is told what has expired before the time is known.
        let opened = match opened {
            Ok(store) => pool.session().heartbeat(&endpoint).await.map(|_| store).map_err(IndexError::from),
            Err(error) => Err(error),
        };
        match opened {
            Ok(store) => {
                self.common.hear_time(pool.session());
                Ok(Joined { store, pool, endpoint })
            }
            Err(error) => {
                let _ = pool.leave(&endpoint).await;
                Err(error)
            }
        }
    }

    /// Serves clients in one session. When it ends, and is not the last, they are served `meanwhile`: commands that have begun may take
    /// their time to end, and a server that is silent the session's leave.
    async fn serve(
        &self,
        joined: Joined<B::Store>,
        ready: Option<&Ready>,
        meanwhile: &mut Option<Meanwhile>,
    ) -> Result<Ended, IndexError> {
        let Joined { pool, endpoint, .. } = joined.clone();
        let common = &self.common;
        let listener = match self.listener.try_clone() {
            Ok(listener) => listener,
            Err(error) => {
                let _ = pool.leave(&endpoint).await;
                return Err(FabricError::Unreachable { why: format!("cannot listen: {error}") }.into());
            }
        };
        if common.health.joined(pool.session()) > 1 {
            tracing::info!("joined the pool again, as {}", pool.session().id());
        }
        // Ends this session's threads, when all are to end or the session is no more.
        let session_stop = Arc::<Stop>::default();
        endpoint.spawn(pass_on(Arc::clone(&self.stop), Arc::clone(&session_stop)));
        endpoint.spawn(watch(pool.clone(), endpoint.clone(), Arc::clone(common), Arc::clone(&session_stop)));
        let inboxes: Arc<[Inbox]> = (0..common.threads.len()).map(|_| Inbox::default()).collect();
        let start = |number, listener| Start {
            number,
            common: Arc::clone(common),
            stop: Arc::clone(&session_stop),
            inboxes: Arc::clone(&inboxes),
            listener,
        };
        let others: Vec<_> = (1..common.threads.len())
            .map(|number| follow(start(number, None), joined.store.clone(), pool.clone()))
            .collect();
        if let Some(ready) = ready {
            let _ = ready.send(Ok(()));
        }
        let (first, ended) = (start(0, Some(listener)), Arc::clone(&session_stop));
        let first = endpoint.spawn(async move {
            let served = shard::serve(first, Some(joined)).await;
            ended.set();
            served
        });
        session_stop.wait().await;
        if !self.stop.is_set() {
            self.absent(&lost(&pool));
            *meanwhile = self.serve_meanwhile();
        }
        let served = first.await.unwrap_or(Err(IndexError::Unknown));
        // While they come to rest the session has to live.
        while others.iter().any(|other| !other.is_finished()) {
            endpoint.sleep(REST_LOOK_NS).await;
        }
        let mut is_at_rest = true;
        let mut failed = None;
        let outcomes = others.into_iter().map(|other| other.join().unwrap_or(Err(IndexError::Unknown)));
        for outcome in std::iter::once(served).chain(outcomes) {
            match outcome {
                Ok(has_rested) => is_at_rest &= has_rested,
                Err(error) => failed = Some(error),
            }
        }
        // Those who were on their way to a thread that has ended.
        inboxes.iter().flat_map(Inbox::take_all).for_each(|guest| common.lobby.push(guest));
        if pool.session().is_lost() {
            if pool.session().is_condemned() {
                // If it cannot be said, the lease runs out.
                let _ = at_most(endpoint.sleep(FENCE_NS), pool.session().fence_itself(&endpoint)).await;
            }
            return Ok(Ended::Lost(lost(&pool)));
        }
        let why = lost(&pool);
        depart(pool, &endpoint, is_at_rest).await;
        match failed {
            Some(error) => Err(error),
            None if self.stop.is_set() => Ok(Ended::Stopped),
            None => Ok(Ended::Lost(why)),
        }
    }

    /// Serves clients without an index until the result is dropped; none, if there is no way to.
    #[expect(clippy::disallowed_methods, reason = "a gateway has threads of its own")]
    fn serve_meanwhile(&self) -> Option<Meanwhile> {
        let stop = Arc::<Stop>::default();
        let inboxes: Arc<[Inbox]> = [Inbox::default()].into();
        let start = Start {
            number: 0,
            common: Arc::clone(&self.common),
            stop: Arc::clone(&stop),
            inboxes: Arc::clone(&inboxes),
            listener: Some(self.listener.try_clone().ok()?),
        };
        let thread = std::thread::spawn(move || {
            let executor = Executor::new();
            if let Err(error) = executor.block_on(shard::serve::<B::Store>(start, None)) {
                tracing::error!("clients are not told why they are not served: {error}");
            }
            executor.clear();
        });
        let common = Arc::clone(&self.common);
        Some(Meanwhile { stop, inboxes, common, thread: Some(thread) })
    }

    fn pause(&self) {
        let executor = Executor::new();
        for _ in 0..REJOIN_LOOKS {
            if !self.stop.is_set() {
                executor.block_on(executor.sleep_until(executor.now() + REJOIN_NS / REJOIN_LOOKS));
            }
        }
    }
}

/// The thread that serves clients while there is no session; dropping it ends it.
struct Meanwhile {
    stop: Arc<Stop>,
    inboxes: Arc<[Inbox]>,
    common: Arc<Common>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Meanwhile {
    fn drop(&mut self) {
        self.stop.set();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        self.inboxes.iter().flat_map(Inbox::take_all).for_each(|guest| self.common.lobby.push(guest));
    }
}

/// Why there is no session any more.
fn lost(pool: &Pool) -> Lost {
    let session = pool.session();
    if !session.is_lost() && pool.has_dropped_index() {
        return Lost { why: "the index was dropped; create it anew".to_owned(), remedy: Remedy::Index };
    }
    Lost::new(if session.is_fenced() {
        format!(
            "{} was fenced: a memory server had not heard from it in time, or it was evicted",
            session.id()
        )
    } else {
        format!("a memory server of {} is gone", session.id())
    })
}

/// Leaves the pool. If commands were cut short, others have to clean up: the session is given up, so that they do it soon.
async fn depart(pool: Pool, endpoint: &Endpoint, is_at_rest: bool) {
    // If it fails, the lease runs out, and whoever needs what we held takes it.
    if is_at_rest {
        let _ = at_most(endpoint.sleep(LEAVE_NS), pool.leave(endpoint)).await;
    } else {
        let _ = at_most(endpoint.sleep(FENCE_NS), pool.session().fence_itself(endpoint)).await;
    }
}

async fn pass_on(from: Arc<Stop>, to: Arc<Stop>) {
    from.wait().await;
    to.set();
}

/// Looks after the session, and ends the threads when it is lost, or its index was dropped: there may be a new one of that name.
async fn watch(pool: Pool, endpoint: Endpoint, common: Arc<Common>, stop: Arc<Stop>) {
    let session = pool.session();
    while !stop.is_set() {
        if session.is_lost() || pool.has_dropped_index() {
            return stop.set();
        }
        endpoint.sleep(LOOK_NS).await;
        common.health.heard(session.silent());
        common.hear_time(session);
    }
}

/// Any other thread.
#[expect(clippy::disallowed_methods, reason = "a gateway has threads of its own")]
fn follow<S: Store>(start: Start, store: S, pool: Pool) -> JoinHandle<Result<bool, IndexError>> {
    std::thread::spawn(move || {
        let executor = Executor::new();
        let stop = Arc::clone(&start.stop);
        let served = executor.block_on(async {
            let endpoint = pool.session().endpoint()?;
            shard::serve(start, Some(Joined { store, pool, endpoint })).await
        });
        if let Err(error) = &served {
            tracing::error!("a thread of the gateway ended: {error}");
            stop.set();
        }
        executor.clear();
        served
    })
}
