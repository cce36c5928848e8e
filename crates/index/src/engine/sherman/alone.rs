//! The locks by themselves, as something that can be measured like an index: the setting of the paper's Figures 2 and 16.
//!
//! All locks are on one memory server, side by side. A `put` takes the lock whose number its key is, and gives it back at
//! once; there is nothing else that it could do, so every other operation is refused. Where locks lie, whether threads queue, hand
//! over, and how a lock is given back, follows from the same switches, and is the same code, as in the tree.

use super::{Attached, Config, Sherman, Switches, Tree};
use crate::Pool;
use crate::api::{IndexError, KeyValue, OrderedIndex};
use crate::engine::Engine;
use crate::shared::heap::Class;
use farwood_fabric::{Endpoint, GlobalAddr, Op, ServerId, Work};
use std::ops::Bound;

/// LocksAlone lie side by side, in main memory too: there are no nodes between them.
pub(super) const STRIDE: u64 = 8;

/// LocksAlone on one server, as an engine.
#[derive(Clone, Debug)]
pub struct LocksAlone {
    /// How many locks there are, and switches; the sizes mean nothing here.
    pub config: Config,
}

impl Default for LocksAlone {
    /// The paper's lock with all that belongs to it, and as many as in its figures.
    fn default() -> Self {
        Self { config: Config { locks: 10_240, switches: Switches::SHERMAN, ..Config::default() } }
    }
}

/// The locks as one task sees them.
#[derive(Debug)]
pub struct LockTaker {
    tree: Tree,
}

impl LocksAlone {
    /// What such an index is called.
    pub const NAME: &'static str = "locks";

    fn tree(&self) -> Sherman {
        Sherman::new(self.config.clone())
    }
}

impl Engine for LocksAlone {
    type Attached = Attached;
    type Index = LockTaker;

    fn name(&self) -> &'static str {
        Self::NAME
    }

    /// Whoever measures locks asks what they cost, not what a search in a tree does.
    fn work(&self) -> Work {
        Work::Nanos(0)
    }

    async fn create(&self, pool: &Pool, endpoint: &Endpoint, index: &str) -> Result<(), IndexError> {
        let op = endpoint.op();
        let info = self.tree().create_with_locks(&op, pool, index, Self::NAME).await?;
        pool.index_ready(&op, info.id).await?;
        Ok(())
    }

    async fn attach(&self, pool: &Pool, endpoint: &Endpoint, index: &str) -> Result<Attached, IndexError> {
        self.tree().attach_with_locks(pool, endpoint, index, Self::NAME, STRIDE).await
    }

    fn open(&self, attached: &Attached, endpoint: &Endpoint, handle: u16) -> Result<LockTaker, IndexError> {
        Ok(LockTaker { tree: self.tree().open(attached, endpoint, handle)? })
    }

    /// Nobody uses them, so none may be held.
    async fn check(
        &self,
        attached: &Attached,
        endpoint: &Endpoint,
    ) -> Result<Vec<(Class, GlobalAddr)>, IndexError> {
        attached.shared.locks.check_free(&endpoint.op()).await.map(|()| Vec::new())
    }

    async fn extents(&self, attached: &Attached, endpoint: &Endpoint) -> Result<Vec<GlobalAddr>, IndexError> {
        self.tree().extents(attached, endpoint).await
    }
}

fn only_put<T>() -> Result<T, IndexError> {
    Err(IndexError::BadConfig { why: "locks can only be taken and given back, by put".to_owned() })
}

impl OrderedIndex for LockTaker {
    async fn get(&self, _: &[u8]) -> Result<Option<Vec<u8>>, IndexError> {
        only_put()
    }

    /// Takes a lock and gives it back.
    async fn put(&self, key: &[u8], _: &[u8]) -> Result<(), IndexError> {
        let Some(number) = key.first_chunk::<8>().map(|bytes| u64::from_be_bytes(*bytes)) else {
            return Err(IndexError::BadKey { why: "a lock's number has 8 bytes".to_owned() });
        };
        let op = self.tree.endpoint.op();
        self.tree.admit(&op)?;
        let shared = &self.tree.shared;
        let at = shared.locks.table().nth(ServerId::COORDINATOR, number);
        let recover = async |op: &Op, owner| shared.pool.suspect(op, owner).await.map(drop);
        let (held, _) = shared.locks.acquire(&op, self.tree.number, (at, None), recover).await?;
        self.tree.unlock(&op, held).await
    }

    async fn compare_and_swap(
        &self,
        _: &[u8],
        _: Option<&[u8]>,
        _: Option<&[u8]>,
    ) -> Result<bool, IndexError> {
        only_put()
    }

    async fn put_if_absent(&self, _: &[u8], _: &[u8]) -> Result<bool, IndexError> {
        only_put()
    }

    async fn update_if_present(&self, _: &[u8], _: &[u8]) -> Result<bool, IndexError> {
        only_put()
    }

    async fn delete(&self, _: &[u8]) -> Result<bool, IndexError> {
        only_put()
    }

    async fn scan(
        &self,
        _: Bound<&[u8]>,
        _: Bound<&[u8]>,
        _: usize,
        _: bool,
    ) -> Result<Vec<KeyValue>, IndexError> {
        only_put()
    }
}
