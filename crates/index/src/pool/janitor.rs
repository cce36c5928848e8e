//! Keeping a session alive, and the chores of the pool.
//!
//! Memory servers have almost no CPU and know no engines, so sessions clean up after each other. The coordinator notices what has to be
//! done and asks whoever sends a heartbeat next ([`Chore`]). Every session that is kept alive does such chores, on an endpoint of
//! their own, so that neither its lease nor its operations wait for them.

use super::recovery::is_dead;
use super::{JoinOptions, Pool};
use crate::api::IndexError;
use farwood_fabric::clock::{MILLISECOND, Nanos};
use farwood_fabric::control::{Chore, SessionInfo, SessionState};
use farwood_fabric::{Cluster, Endpoint, FabricError, Op, SessionOptions, marks};
use std::cell::Cell;
use std::rc::Rc;

/// A lease is renewed so often while it runs, and at least every tenth of a second, so that memory comes back soon.
const HEARTBEATS_PER_LEASE: Nanos = 4;
const HEARTBEAT_NS: Nanos = 100 * MILLISECOND;
/// How many chores a session does at a time.
const MAX_CHORES: u32 = 4;
/// So much sooner comes the next heartbeat after one that brought a chore.
const BEATS_WITH_CHORES: Nanos = 16;
/// So soon comes the next one while somebody waits for the epochs to go on.
const AWAITED_BEAT_NS: Nanos = 5 * MILLISECOND;
/// So many heartbeats lie between two looks at the servers that hear from us only with verbs.
const BEATS_PER_LOOK: Nanos = 5;
/// How often a reaper looks whether it has made room, and how long it waits in between.
const MAX_ROOM_WAITS: u32 = 2_000;
const ROOM_WAIT_NS: Nanos = 5 * MILLISECOND;

/// What a heartbeat leads to.
enum Next {
    /// The next one in time.
    InTime,
    /// One sooner: others wait for the epochs to go on, and thereby for those who do nothing.
    AwaitedBeat,
    /// One sooner, for another chore: where one has died others may have, since a machine that fails takes all its clients with it.
    Chore,
}

impl Pool {
    /// Joins the pool, and keeps the session alive from tasks of the endpoint that comes with it. If that fails, nothing of it stays.
    pub async fn join_alive(
        cluster: &Cluster,
        options: SessionOptions,
    ) -> Result<(Self, Endpoint), FabricError> {
        let (pool, endpoint) = Self::join(cluster, options).await?.with_endpoint().await?;
        let every = match pool.session.lease_ns() {
            0 => HEARTBEAT_NS,
            lease => HEARTBEAT_NS.min(lease / HEARTBEATS_PER_LEASE),
        };
        pool.keep_alive(&endpoint, every);
        Ok((pool, endpoint))
    }

    /// A pool that was just joined, and an endpoint. If there is none to be had, the session ends: nobody has to wait for its lease.
    pub async fn with_endpoint(self) -> Result<(Self, Endpoint), FabricError> {
        match self.session.endpoint() {
            Ok(endpoint) => Ok((self, endpoint)),
            Err(error) => {
                let _ = self.session.close_unused().await;
                Err(error)
            }
        }
    }

    /// Keeps the session alive from tasks of `endpoint`'s thread, until it is closed or lost, looks whether all servers still know it, and
    /// does chores of the pool. The thread's executor has to run at least every third of a lease.
    pub fn keep_alive(&self, endpoint: &Endpoint, every: Nanos) {
        let janitor = self.session.endpoint().unwrap_or_else(|_| endpoint.clone());
        let (session, heap, looker) = (self.session.clone(), self.heap.clone(), janitor.clone());
        janitor.spawn(async move {
            while !session.is_closed() && !session.is_lost() {
                looker.sleep(every.saturating_mul(BEATS_PER_LOOK)).await;
                // A server that came back has ended the sessions that it found, and the coordinator does not know.
                session.look_around(&looker).await;
                // Whoever does nothing more gives back what it retired, too. What fails is tried again.
                let _ = heap.collect(&looker).await;
            }
        });
        let (pool, endpoint) = (self.clone(), endpoint.clone());
        endpoint.clone().spawn(async move {
            let chores = Rc::new(Cell::new(0));
            while !pool.session.is_closed() {
                if pool.session.is_condemned() {
                    // Others recover what it could not settle.
                    let _ = pool.session.fence_itself(&endpoint).await;
                    return;
                }
                // Errors show in what the session says of itself.
                let next = pool.beat(&endpoint, &janitor, &chores).await.unwrap_or(Next::InTime);
                if pool.session.is_lost() && !pool.session.is_condemned() {
                    return;
                }
                let pause = match next {
                    Next::InTime => every,
                    Next::AwaitedBeat => every.min(AWAITED_BEAT_NS),
                    Next::Chore => every / BEATS_WITH_CHORES,
                };
                endpoint.sleep(pause).await;
            }
        });
    }

    /// One heartbeat, and what it brings; what comes next.
    async fn beat(
        &self,
        endpoint: &Endpoint,
        janitor: &Endpoint,
        chores: &Rc<Cell<u32>>,
    ) -> Result<Next, FabricError> {
        let session = &self.session;
        let (epochs, chore) = if chores.get() < MAX_CHORES {
            session.heartbeat_and_chore(endpoint).await?
        } else {
            (session.heartbeat(endpoint).await?, None)
        };
        if session.to_clear().is_some() {
            let (heap, endpoint) = (self.heap.clone(), janitor.clone());
            // One at a time, and again with the next heartbeat if it fails.
            janitor.spawn(async move { drop(heap.clear_flushed(&endpoint).await) });
        }
        let Some(chore) = chore else {
            return Ok(if epochs.is_awaited { Next::AwaitedBeat } else { Next::InTime });
        };
        chores.set(chores.get() + 1);
        let (pool, endpoint, chores) = (self.clone(), janitor.clone(), Rc::clone(chores));
        janitor.spawn(async move {
            // What fails is asked for again.
            let _ = pool.do_chore(&endpoint, chore).await;
            chores.set(chores.get() - 1);
        });
        Ok(Next::Chore)
    }

    /// Does what the coordinator asked for.
    async fn do_chore(&self, endpoint: &Endpoint, chore: Chore) -> Result<(), IndexError> {
        match chore {
            Chore::Recover { victim } => {
                marks::hit("chore_recover");
                let op = endpoint.op();
                self.fence_the_dead(&op).await?;
                self.recover(&op, victim).await.map(drop)
            }
            Chore::FinishDrop { index } => {
                marks::hit("chore_finish_drop");
                Ok(self.finish_drop(&endpoint.op(), index).await?)
            }
            _ => Ok(()),
        }
    }

    /// Fences all whose lease has run out, before any of them is recovered: each holds the epochs back until it is.
    async fn fence_the_dead(&self, op: &Op) -> Result<(), FabricError> {
        let sessions = self.session.list(op).await?;
        let is_unfenced = |info: &&SessionInfo| match info.state {
            SessionState::Active => info.lease_left_ns == 0,
            state => state == SessionState::Fencing,
        };
        for info in sessions.iter().filter(is_unfenced).filter(|info| info.session != self.session.id()) {
            // Its lease runs again, or others are faster; or it fails for all, and then the recovery says why.
            let _ = self.session.fence(op, info.session).await;
        }
        Ok(())
    }
}

/// Recovers dead sessions of a pool in which all numbers are taken, until one is free; false if none of them is dead. A reaper has a
/// number that is kept back for this.
pub(super) async fn make_room(cluster: &Cluster, options: &JoinOptions) -> Result<bool, FabricError> {
    let session = SessionOptions { reaper: true, read_only: false, ..options.session };
    let pool = Pool::join_once(cluster, JoinOptions { session, ..options.clone() }).await?;
    let (pool, endpoint) = pool.with_endpoint().await?;
    marks::hit("reaper");
    let made = reap(&pool, &endpoint).await;
    let left = pool.leave(&endpoint).await;
    left.and(made)
}

async fn reap(pool: &Pool, endpoint: &Endpoint) -> Result<bool, FabricError> {
    let before = pool.session.list(&endpoint.op()).await?.len();
    for _ in 0..MAX_ROOM_WAITS {
        if let Some(chore) = pool.session.heartbeat_and_chore(endpoint).await?.1 {
            // What fails is offered again; what cannot be recovered here leaves the pool as full as it is.
            let _ = pool.do_chore(endpoint, chore).await;
            continue;
        }
        let sessions = pool.session.list(&endpoint.op()).await?;
        if sessions.len() < before {
            return Ok(true);
        }
        if !sessions.iter().any(is_dead) {
            return Ok(false);
        }
        endpoint.sleep(ROOM_WAIT_NS).await;
    }
    Ok(false)
}
