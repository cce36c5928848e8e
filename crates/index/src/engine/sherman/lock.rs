//! The tree's locks, as its operations use them; `shared/locks` has the protocol.

use super::Tree;
use crate::api::IndexError;
use crate::shared::locks::{Held, Write};
use farwood_fabric::{Buf, GlobalAddr, Op, ServerId};

impl Tree {
    /// Takes the lock of a node and reads the node.
    pub(super) async fn lock_and_read(&self, op: &Op, node: GlobalAddr) -> Result<(Held, Buf), IndexError> {
        let object = (node, self.shared.config.node_bytes);
        let recover = async |op: &Op, owner| self.shared.pool.suspect(op, owner).await.map(drop);
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
    pub(super) fn unlock(&self, op: &Op, held: Held) -> impl Future<Output = Result<(), IndexError>> {
        self.shared.locks.unlock(op, held)
    }

    /// Writes back what the lock protects, on its server, and gives the lock back, or on.
    pub(super) fn finish(
        &self,
        op: &Op,
        held: Held,
        writes: &[Write],
    ) -> impl Future<Output = Result<(), IndexError>> {
        self.shared.locks.finish(op, held, writes)
    }

    /// Carries out WRITEs under a lock that stays held; they can be repeated.
    pub(super) async fn write(&self, op: &Op, server: ServerId, writes: &[Write]) -> Result<(), IndexError> {
        self.shared.locks.write(op, server, writes).await
    }
}
