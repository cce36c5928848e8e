//! What a thread does every now and then: publishing its counts, handing clients to other threads; and the first thread for all:
//! disconnecting clients that are silent, asking servers for their memory.

use super::{Joined, Shard};
use crate::command::Refused;
use crate::common::ServerMemory;
use crate::store::Store;
use farwood_fabric::clock::MILLISECOND;
use farwood_fabric::control::{Reply, Request};
use farwood_fabric::{CallError, FabricError};
use farwood_index::IndexError;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::atomic::Ordering;

const MOMENT_NS: u64 = 100 * MILLISECOND;
/// Far memory is looked at every so many moments.
const MEMORY_MOMENTS: u32 = 50;
/// How long a thread that stops waits for operations under way: as long as Redis waits when it shuts down.
pub(crate) const REST_NS: u64 = 10_000 * MILLISECOND;
/// The same when the session is lost: what they still wait for does not come.
const LOST_REST_NS: u64 = 1_000 * MILLISECOND;
/// How often it looks whether they have ended.
const REST_LOOK_NS: u64 = MILLISECOND;

/// Keeps the thread's clock and counts up to date, and the clients in order.
pub(super) async fn every_moment<S: Store>(shard: Rc<Shard<S>>) {
    loop {
        shard.sleep(MOMENT_NS).await;
        shard.publish_costs();
        let common = &shard.common;
        shard.is_cut_off.set(common.health.is_cut_off());
        if shard.inboxes.len() > 1 {
            shard.balance.end_moment(common.now(), shard.number, &common.threads, common.options.spread);
        }
        let now = common.seconds();
        if shard.seconds.replace(now) != now && shard.is_first() {
            disconnect_silent(&shard, now);
        }
    }
}

/// Ends connections that were silent, or did not read their replies, for too long: their sockets are shut, and whoever serves them
/// finds that out.
fn disconnect_silent<S: Store>(shard: &Shard<S>, now: u64) {
    let options = &shard.common.options;
    for client in shard.common.clients.list() {
        let Some(still) = client.still_since().map(|since| now.saturating_sub(since)) else { continue };
        let is_deaf = client.unread_since.load(Ordering::Relaxed) > 0;
        let is_silent = !is_deaf && options.idle_seconds > 0 && still > options.idle_seconds;
        if is_silent || is_deaf && still > options.unread_seconds {
            client.disconnect();
        }
    }
}

/// Looks at far memory every now and then.
pub(super) async fn watch_memory<S: Store>(shard: Rc<Shard<S>>) {
    let mut moments = 0;
    while !shard.stop.is_set() {
        if moments == 0 {
            // A server that does not answer shows in every other command.
            let _ = shard.look_at_memory().await;
        }
        moments = (moments + 1) % MEMORY_MOMENTS;
        shard.sleep(MOMENT_NS).await;
    }
}

impl<S: Store> Shard<S> {
    fn is_first(&self) -> bool {
        self.number == 0
    }

    /// Asks all servers what their memory is used for.
    pub(crate) async fn look_at_memory(&self) -> Result<(), Refused> {
        let Some(joined) = &self.joined else { return Ok(()) };
        let servers = joined.ask_servers().await.map_err(IndexError::from)?;
        self.common.memory.set(servers, joined.store.cache_bytes());
        Ok(())
    }

    /// Waits until no operation is under way, for at most [`REST_NS`]; whether none is. What is cut short then is cleaned up by others, as
    /// after a death.
    pub(super) async fn come_to_rest(&self) -> bool {
        let begun = self.executor.now();
        let is_lost = || self.joined.as_ref().is_some_and(|joined| joined.pool.session().is_lost());
        let end = || begun + if is_lost() { LOST_REST_NS } else { REST_NS };
        while self.at_work.get() > 0 && self.executor.now() < end() {
            self.sleep(REST_LOOK_NS).await;
        }
        self.at_work.get() == 0
    }
}

impl<S: Store> Joined<S> {
    async fn ask_servers(&self) -> Result<Vec<ServerMemory>, FabricError> {
        let op = self.endpoint.op();
        let session = self.pool.session();
        let infos = self.pool.list_indexes(&op).await?;
        let name = |id| infos.iter().find(|info| info.id == id).map_or("?", |info| info.name.as_str());
        let mut servers = Vec::new();
        for server in session.servers() {
            let Reply::ChunkList { chunks, total, free } =
                op.control(*server, &Request::ListChunks { owner: None }).await?
            else {
                return Err(CallError::Malformed.into());
            };
            let chunk_bytes = session.cluster().view().chunk_bytes(*server);
            let mut indexes = BTreeMap::new();
            for chunk in chunks {
                *indexes.entry(name(chunk.index)).or_insert(0) += u64::from(chunk.count) * chunk_bytes;
            }
            servers.push(ServerMemory {
                server: u16::try_from(server.index()).unwrap_or(u16::MAX),
                total_bytes: total * chunk_bytes,
                free_bytes: free * chunk_bytes,
                indexes: indexes.into_iter().map(|(name, bytes)| (name.to_owned(), bytes)).collect(),
            });
        }
        Ok(servers)
    }
}
