//! The tree's locks: where they are, and whose are freed when a session has died ([`Locks`] has the protocol).

use super::{Shared, Sherman, Tree};
use crate::api::IndexError;
use crate::shared::locks::{Held, LockTable, Locks, Write};
use farwood_fabric::control::IndexState;
use farwood_fabric::{Buf, GlobalAddr, Op, ServerId, SessionId};

impl Shared {
    /// Cleans up after a session whose lease has run out; nothing, if it has not or somebody else does.
    pub(super) async fn recover(&self, op: &Op, victim: SessionId) -> Result<(), IndexError> {
        let tables = async |op: &Op| self.all_tables(op).await;
        Locks::recover(&self.pool, op, victim, tables, self.config.sabotage.forget_intents).await
    }

    /// The lock tables of all trees of the pool: a session that dies may have worked on several, and is recovered once.
    async fn all_tables(&self, op: &Op) -> Result<Vec<LockTable>, IndexError> {
        let bytes = op.endpoint().capabilities().lock_memory_bytes;
        let mut tables = LockTable::all_in_lock_memory(self.pool.session().servers(), bytes);
        let mut add = |table: LockTable| {
            if !tables.iter().any(|other| other.covers(&table)) {
                tables.push(table);
            }
        };
        add(self.locks.table().clone());
        for info in self.pool.list_indexes(op).await? {
            // One that is being made, or dropped, has no locks that anybody waits for.
            if info.state != IndexState::Ready || info.id == self.info.id {
                continue;
            }
            let Ok(tree) = Sherman::of(&info) else { continue };
            add(tree.lock_table(op, &self.pool, &info).await?);
        }
        Ok(tables)
    }
}

impl Tree {
    /// Takes the lock of a node and reads the node.
    pub(super) async fn lock_and_read(&self, op: &Op, node: GlobalAddr) -> Result<(Held, Buf), IndexError> {
        let object = (node, self.shared.config.node_bytes);
        let recover = async |op: &Op, victim| self.shared.recover(op, victim).await;
        self.shared.locks.lock_and_read(op, self.number, object, recover).await
    }

    /// Takes the lock of a node if nobody holds it, and reads the node.
    pub(super) async fn try_lock(
        &self,
        op: &Op,
        node: GlobalAddr,
    ) -> Result<Option<(Held, Buf)>, IndexError> {
        self.shared.locks.try_lock(op, self.number, (node, self.shared.config.node_bytes)).await
    }

    /// Gives a lock back.
    pub(super) async fn unlock(&self, op: &Op, held: Held) -> Result<(), IndexError> {
        self.shared.locks.unlock(op, held).await
    }

    /// Writes back what the lock protects, on its server, and gives the lock back, or on.
    pub(super) async fn finish(&self, op: &Op, held: Held, writes: &[Write]) -> Result<(), IndexError> {
        self.shared.locks.finish(op, held, writes).await
    }

    /// Carries out WRITEs under a lock that stays held; they can be repeated.
    pub(super) async fn write(&self, op: &Op, server: ServerId, writes: &[Write]) -> Result<(), IndexError> {
        self.shared.locks.write(op, server, writes).await
    }
}
