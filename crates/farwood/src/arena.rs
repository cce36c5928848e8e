//! Far memory to measure on: an index of its own in the pool's catalog, with raw chunks on every server.
//!
//! It is dropped at the end, also when a measurement failed, so that a shared pool is left as it was found. (A process that
//! is killed leaves the index behind; its name begins with `farwood-`.)

use crate::fleet::Fleet;
use crate::units::{Size, index};
use farwood_fabric::clock::{MILLISECOND, SECOND};
use farwood_fabric::control::{ControlError, IndexId, Reply, Request};
use farwood_fabric::{Endpoint, FabricError, GlobalAddr, RegionId};
use farwood_index::Pool;
use farwood_index::engine::PLAIN;

/// How long a drop waits for the other sessions of the pool to let go: longer than the usual lease.
const DROP_PATIENCE_NS: u64 = 15 * SECOND;
/// How much is written at a time when the arena is made.
const FILL_BYTES: u64 = 64 * 1024;

/// Memory on every server, each with the same number of bytes.
#[derive(Clone, Debug)]
pub(crate) struct Arena {
    /// The index it belongs to.
    pub(crate) index: IndexId,
    name: String,
    bases: Vec<GlobalAddr>,
}

impl Arena {
    /// Makes an arena of at least `bytes` bytes, spread evenly over the servers, runs `work` on it, and drops it.
    pub(crate) fn with<T>(
        fleet: &Fleet,
        purpose: &'static str,
        bytes: u64,
        work: impl FnOnce(&Arena) -> Result<T, String>,
    ) -> Result<T, String> {
        let options = fleet.options(purpose);
        let share = bytes.div_ceil(fleet.cluster().view().servers.len() as u64);
        let arena = fleet.run_one(|cluster| async move {
            let failed = |error: FabricError| format!("no far memory of {}: {error}", Size(bytes));
            let pool = Pool::join(&cluster, options).await.map_err(failed)?;
            let endpoint = pool.session().endpoint().map_err(failed)?;
            let made = Self::make(&pool, &endpoint, purpose, share).await.map_err(failed);
            pool.leave(&endpoint).await.map_err(failed)?;
            made
        })?;
        let result = work(&arena);
        let dropped = fleet.run_one(|cluster| {
            let name = arena.name.clone();
            async move {
                let failed = |error: FabricError| format!("index '{name}' was left in the pool: {error}");
                let pool = Pool::join(&cluster, options).await.map_err(failed)?;
                let endpoint = pool.session().endpoint().map_err(failed)?;
                let dropped = drop_index(&pool, &endpoint, &name).await.map_err(failed);
                pool.leave(&endpoint).await.map_err(failed)?;
                dropped
            }
        });
        let value = result?;
        dropped.map(|()| value)
    }

    async fn make(pool: &Pool, endpoint: &Endpoint, purpose: &str, share: u64) -> Result<Self, FabricError> {
        // Two that run at once on one pool must not meet.
        let name = format!("farwood-{purpose}-{:016x}", endpoint.random());
        let info = pool.create_index(&endpoint.op(), &name, PLAIN, &[]).await?;
        let mut arena = Self { index: info.id, name, bases: Vec::new() };
        match arena.fill(pool, endpoint, share).await {
            Ok(()) => Ok(arena),
            Err(error) => {
                // The first failure is the one to report.
                let _ = drop_index(pool, endpoint, &arena.name).await;
                Err(error)
            }
        }
    }

    async fn fill(&mut self, pool: &Pool, endpoint: &Endpoint, share: u64) -> Result<(), FabricError> {
        let session = pool.session();
        for server in session.cluster().view().servers {
            let count = u32::try_from(share.div_ceil(server.chunk_bytes)).unwrap_or(u32::MAX);
            let flushed_through = session.flushed_through();
            let request =
                Request::AllocChunks { index: self.index, class: 0, object_bytes: 0, count, flushed_through };
            let Reply::Chunks { offset, .. } = endpoint.op().control(server.server, &request).await? else {
                return Err(farwood_fabric::CallError::Malformed.into());
            };
            let base = GlobalAddr::new(server.server, RegionId::MAIN, offset);
            // Memory that was never written may be one shared page of zeroes, and far too fast to read.
            for at in (0..share).step_by(index(FILL_BYTES)) {
                let mut zeroes = endpoint.buf(index(FILL_BYTES.min(share - at)));
                zeroes.fill(0);
                endpoint.op().write(base.add(at), zeroes).await?;
            }
            self.bases.push(base);
        }
        endpoint
            .op()
            .control(farwood_fabric::ServerId::COORDINATOR, &Request::IndexReady { index: self.index })
            .await?;
        Ok(())
    }

    /// Byte `offset` on server number `n` modulo the number of servers.
    #[inline]
    pub(crate) fn at(&self, n: usize, offset: u64) -> GlobalAddr {
        self.bases[n % self.bases.len()].add(offset)
    }

    pub(crate) fn servers(&self) -> usize {
        self.bases.len()
    }
}

async fn drop_index(pool: &Pool, endpoint: &Endpoint, name: &str) -> Result<(), FabricError> {
    let deadline = endpoint.now().saturating_add(DROP_PATIENCE_NS);
    loop {
        match pool.drop_index(endpoint, name).await {
            Err(error)
                if matches!(error.control(), Some(ControlError::DropPending { .. }))
                    && endpoint.now() < deadline =>
            {
                endpoint.sleep(100 * MILLISECOND).await;
            }
            ended => return ended,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farwood_fabric::{ServerId, SessionOptions};

    /// How many indexes the catalog has, and how many chunks are in use.
    fn in_use(fleet: &Fleet) -> (usize, usize) {
        let counted = fleet.run_one(|cluster| async move {
            crate::fleet::with_session(&cluster, SessionOptions::default(), async |endpoint| {
                let op = endpoint.op();
                let ask = async |request| op.control(ServerId::COORDINATOR, &request).await;
                match (ask(Request::ListIndexes {}).await, ask(Request::ListChunks { owner: None }).await) {
                    (Ok(Reply::Indexes { infos }), Ok(Reply::ChunkList { chunks, .. })) => {
                        Ok((infos.len(), chunks.len()))
                    }
                    other => Err(format!("{other:?}")),
                }
            })
            .await
        });
        counted.unwrap()
    }

    #[test]
    fn nothing_is_left_behind_whether_the_work_succeeds_or_fails() {
        for transport in ["local:2x16MiB", "sim:2x16MiB"] {
            let fleet = Fleet::open(&transport.parse().unwrap(), 0, 0, 1).unwrap();
            let during = Arena::with(&fleet, "test", 100_000, |arena| Ok((arena.servers(), in_use(&fleet))));
            assert_eq!(during, Ok((2, (1, 1))));
            assert_eq!(in_use(&fleet), (0, 0));
            let failed: Result<(), _> =
                Arena::with(&fleet, "test", 100_000, |_| Err("on purpose".to_owned()));
            assert_eq!(failed, Err("on purpose".to_owned()));
            assert_eq!(in_use(&fleet), (0, 0));
            let too_large = Arena::with(&fleet, "test", 1 << 30, |_| Ok(()));
            assert!(too_large.is_err_and(|why| why.contains("no far memory of 1 GiB")));
            assert_eq!(in_use(&fleet), (0, 0));
        }
    }
}
