//! The root pointer, up and down.
//!
//! It moves away from a node only under that node's lock, or when that node is dead. So nobody puts a new root above one that is
//! not the root any more, though a node may be the root, and have a parent, and be the root again.
//!
//! - **Up**: under the lock of the root R, which was split and has a sibling X: WRITE a new root with R and X; CAS the pointer. Who loses that
//!   CAS finds that R has a parent already.
//! - **Down**: under the lock of the root R, which covers all keys and has one child C left: WRITE R's flag: dead. CAS the pointer from R to C. Unlock, retire
//!   R. C may have been split meanwhile; then it is a root with a sibling, as between a split and a new root. Whoever comes to a
//!   dead root, since its session died there or is slow, CASes the pointer itself; who succeeds retires R.

use crate::api::IndexError;
use crate::engine::sherman::Tree;
use crate::engine::sherman::node::{Head, Node, Plan};
use crate::engine::sherman::write::{Locked, Reached};
use crate::shared::heap::Room;
use crate::shared::locks::begun;
use crate::shared::surely;
use farwood_fabric::{GlobalAddr, Op, marks};
use std::sync::atomic::Ordering;

/// How many lost completions a CAS of the root pointer may meet.
const MAX_LOST: u32 = 16;

/// The child that can take the place of this root.
fn only_child(root: &Node) -> Option<GlobalAddr> {
    let mut live = root.live();
    match (live.next(), live.next()) {
        (Some(slot), None) if root.level() > 0 && root.high().is_none() => Some(root.child(slot)),
        _ => None,
    }
}

impl Tree {
    /// Puts a root on `level` above the root, if that has a sibling and nobody else has. Whether there may be such a level now; if not,
    /// no node below it is alive that could need it.
    pub(super) async fn grow_root(&self, op: &Op, level: u8) -> Result<bool, IndexError> {
        let old = self.root(op, false).await?;
        let room = self.new_room(op).await?;
        let Reached::Node(locked) = self.lock_node(op, old, None).await? else {
            self.replace_dead_root(op, old.addr).await?;
            return Ok(true);
        };
        let Locked { held, addr, node } = locked;
        let above = node.level() + 1;
        let may_be_there = above > level || above == level && node.high().is_some();
        if above != level || !may_be_there {
            self.unlock(op, held).await?;
            return Ok(may_be_there);
        }
        let grown = self.put_above(op, addr, &node, room).await;
        let unlocked = self.unlock(op, held).await;
        grown?;
        unlocked.map(|()| true)
    }

    /// Puts a root above a node that is locked and has a sibling, if that node is the root.
    async fn put_above(&self, op: &Op, old: GlobalAddr, node: &Node, room: Room) -> Result<(), IndexError> {
        let Some(high) = node.high() else { return Ok(()) };
        let addr = room.addr();
        let plan = Plan {
            level: node.level() + 1,
            incarnation: op.endpoint().random(),
            is_linked: false,
            low: node.low(),
            high: None,
            sibling: GlobalAddr::NULL,
        };
        let (left, right) = (old.to_raw().to_le_bytes(), node.sibling().to_raw().to_le_bytes());
        let entries = [(node.low(), left.as_slice()), (high, right.as_slice())];
        self.write_new(op, addr, &plan, entries.into_iter()).await?;
        if self.swap_root(op, old, room).await? {
            marks::hit("root_split");
            self.shared.root.store(addr.to_raw(), Ordering::Relaxed);
            self.mark_linked(op, addr).await?;
        }
        Ok(())
    }

    /// CASes the root pointer, away from a node that is locked; whether it was ours that took effect. If not, the new node is given
    /// back.
    async fn swap_root(&self, op: &Op, old: GlobalAddr, mut room: Room) -> Result<bool, IndexError> {
        let (new, pointer) = (room.addr(), self.shared.root_pointer());
        // If this is cut short nobody knows whether it is linked, and it may be lost.
        room.link();
        match op.cas(pointer, old.to_raw(), new.to_raw()).await {
            Ok(before) if before == old.to_raw() => Ok(true),
            Ok(_) => {
                marks::hit("lost_root_cas");
                room.unlink();
                Ok(false)
            }
            Err(error) => {
                // Now it has happened or never will.
                surely::reconnected(op, error).await.map_err(begun)?;
                let seen = surely::read_word(op, pointer).await.map_err(begun)?;
                if seen == old.to_raw() {
                    room.unlink();
                } else if seen != new.to_raw() {
                    // Ours, with another above it by now; or only the other.
                    self.shared.pool.heap().abandon();
                }
                Ok(seen == new.to_raw())
            }
        }
    }

    /// Makes the only child of the root the root, if it has only one.
    pub(super) async fn shrink_root(&self, op: &Op) -> Result<(), IndexError> {
        let old = self.root(op, false).await?;
        // Most that come here find nothing to do: look before locking.
        let seen = self.read_whole(op, old, None).await?;
        if seen.as_ref().and_then(only_child).is_none() {
            return Ok(());
        }
        let Reached::Node(locked) = self.lock_node(op, old, None).await? else { return Ok(()) };
        let Locked { held, addr, mut node } = self.mended(op, locked).await?;
        let Some(child) = only_child(&node) else { return self.unlock(op, held).await };
        let shrunk = async {
            if surely::read_word(op, self.shared.root_pointer()).await? != addr.to_raw() {
                return Ok(false);
            }
            self.write(op, addr.server(), &[Self::patch_at(addr, node.bury())]).await?;
            marks::hit("root_shrunk");
            self.move_root_down(op, addr, child).await
        };
        let shrunk = shrunk.await;
        let unlocked = self.unlock(op, held).await;
        if shrunk? {
            self.retire_root(op, addr, &node).await?;
        }
        unlocked
    }

    /// If the root pointer leads to a dead root, moves it on.
    pub(in super::super) async fn replace_dead_root(
        &self,
        op: &Op,
        addr: GlobalAddr,
    ) -> Result<(), IndexError> {
        let buf = surely::read(op, addr, self.shared.config.node_bytes).await?;
        if !Head::of(&buf).is_dead {
            return Ok(());
        }
        let Ok(node) = Node::accept(&self.shared.layouts, self.shared.place(addr), buf) else {
            return Ok(());
        };
        let Some(child) = node.is_whole().then(|| only_child(&node)).flatten() else { return Ok(()) };
        if self.move_root_down(op, addr, child).await? {
            marks::hit("root_shrink_finished_by_another");
            self.retire_root(op, addr, &node).await?;
        }
        Ok(())
    }

    async fn retire_root(&self, op: &Op, addr: GlobalAddr, node: &Node) -> Result<(), IndexError> {
        self.shared.cache.forget(node.level(), node.low());
        Ok(self.shared.pool.heap().retire(op, self.shared.node_class(), addr).await?)
    }

    /// CASes the root pointer from a dead root to its child; whether it was ours that took effect.
    async fn move_root_down(&self, op: &Op, dead: GlobalAddr, child: GlobalAddr) -> Result<bool, IndexError> {
        let pointer = self.shared.root_pointer();
        for _ in 0..MAX_LOST {
            match op.cas(pointer, dead.to_raw(), child.to_raw()).await {
                Ok(before) => {
                    let moved = before == dead.to_raw();
                    if moved {
                        self.shared.root.store(child.to_raw(), Ordering::Relaxed);
                    }
                    return Ok(moved);
                }
                Err(error) => surely::reconnected(op, error).await.map_err(begun)?,
            }
            if surely::read_word(op, pointer).await.map_err(begun)? != dead.to_raw() {
                // Ours or another's: nobody retires it, or the other does.
                self.shared.pool.heap().abandon();
                return Ok(false);
            }
        }
        Err(IndexError::Unknown)
    }
}
