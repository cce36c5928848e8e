//! Splits, separators and new roots. One lock at a time.
//!
//! 1. Under the lock of the full node N: WRITE X, with the upper half of N's entries, on a random server. Nobody knows X yet.
//! 2. [WRITE N's new half, WRITE N's flag, WRITE N's blocks, (mark X linked,) unlock N]. With the flag X is linked.
//! 3. Under the parent's lock: if X is still alive, WRITE its separator. A full parent is split first, in the same way.
//! 4. If N was the root, a new root takes both and is CASed into the anchor. Who loses that CAS adds its separator to the winner's root.
//!
//! Whoever dies before 2 leaves a node that nobody knows. Whoever dies between 2 and 3 leaves a node that is reached through N;
//! the first writer that goes that way adds its separator.

use crate::api::IndexError;
use crate::engine::sherman::Tree;
use crate::engine::sherman::layout::LOW_AT;
use crate::engine::sherman::node::{Head, Node, Plan};
use crate::engine::sherman::write::Locked;
use crate::shared::locks::{Write, begun};
use crate::shared::surely;
use farwood_fabric::{GlobalAddr, Op, ServerId, marks};
use smallvec::SmallVec;
use std::sync::atomic::Ordering;

/// How many separators one operation adds, or tries to.
const MAX_SEPARATORS: u32 = 1_000;

/// A node that may lack its separator.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(in super::super) struct LostSeparator {
    /// The level of its parent.
    pub(in super::super) level: u8,
    /// Its low fence.
    pub(in super::super) separator: Vec<u8>,
    /// Where it is.
    pub(in super::super) child: GlobalAddr,
}

/// What became of a separator.
enum Added {
    Done,
    /// The parent was full and was split, and its new half lacks a separator itself.
    Split(LostSeparator),
    /// There was no parent; now there may be.
    Again,
}

impl Tree {
    /// Splits a full node and tells its parent.
    pub(in super::super) async fn split(&self, op: &Op, locked: Locked) -> Result<(), IndexError> {
        let lost = self.split_node(op, locked).await?;
        self.add_separators(op, lost).await
    }

    fn any_server(&self, op: &Op) -> ServerId {
        let servers = self.shared.pool.session().servers();
        let number = op.endpoint().random_below(servers.len() as u64);
        servers[usize::try_from(number).unwrap_or(0)]
    }

    /// A new node's place, on a random server, or on any that has room.
    pub(super) async fn new_place(&self, op: &Op) -> Result<GlobalAddr, IndexError> {
        let class = self.shared.node_class();
        let heap = self.shared.pool.heap();
        let first = self.any_server(op);
        match heap.allocate(op, first, class).await.map_err(IndexError::from) {
            Err(IndexError::PoolFull(full)) => {
                for server in self.shared.pool.session().servers().iter().filter(|server| **server != first) {
                    match heap.allocate(op, *server, class).await.map_err(IndexError::from) {
                        Err(IndexError::PoolFull(_)) => {}
                        other => return other,
                    }
                }
                Err(IndexError::PoolFull(full))
            }
            other => other,
        }
    }

    async fn split_node(&self, op: &Op, locked: Locked) -> Result<LostSeparator, IndexError> {
        let Locked { held, addr, mut node } = locked;
        debug_assert!(node.is_whole(), "nobody splits a node without having looked at all of it");
        let made = self.write_upper_half(op, &node).await;
        let (separator, child) = match made {
            Ok(made) => made,
            Err(error) => {
                self.unlock(op, held).await?;
                return Err(error);
            }
        };
        let mut writes: SmallVec<[Write; 4]> = SmallVec::new();
        writes.extend(node.shrink(&separator, child).into_iter().map(|patch| Self::patch_at(addr, patch)));
        let together = child.server() == addr.server();
        if together {
            writes.push(Write {
                addr: child.add(super::super::layout::LINKED_AT as u64),
                bytes: SmallVec::from_slice(&[1]),
            });
        }
        self.finish(op, held, &writes).await?;
        marks::hit("split");
        if !together {
            self.mark_linked(op, child).await?;
        }
        Ok(LostSeparator { level: node.level() + 1, separator, child })
    }

    /// Writes a node, which nobody knows yet, with the upper half of `node`.
    async fn write_upper_half(&self, op: &Op, node: &Node) -> Result<(Vec<u8>, GlobalAddr), IndexError> {
        let slots = node.sorted();
        let upper = &slots[slots.len() / 2..];
        let Some(first) = upper.first() else {
            return Err(super::super::corrupt("a full node has no entries".into()));
        };
        let separator = node.key(*first).to_vec();
        let addr = self.new_place(op).await?;
        let plan = Plan {
            level: node.level(),
            incarnation: op.endpoint().random(),
            is_linked: false,
            low: &separator,
            high: node.high(),
            sibling: node.sibling(),
        };
        let entries = upper.iter().map(|slot| (node.key(*slot), node.value(*slot)));
        self.write_new(op, addr, &plan, entries).await?;
        Ok((separator, addr))
    }

    /// Writes a node that nobody knows yet. If that fails its place is given back.
    pub(super) async fn write_new<'a>(
        &self,
        op: &Op,
        addr: GlobalAddr,
        plan: &Plan<'_>,
        entries: impl Iterator<Item = (&'a [u8], &'a [u8])>,
    ) -> Result<(), IndexError> {
        let buf = op.endpoint().buf(self.shared.config.node_bytes);
        let node = Node::build(&self.shared.layouts, self.shared.place(addr), buf, plan, entries);
        let written = surely::write(op, addr, node.bytes()).await;
        if written.is_err() {
            self.shared.pool.heap().abandon();
        }
        Ok(written?)
    }

    /// Adds separators, that of `first` and those of parents that are split for it.
    pub(in super::super) async fn add_separators(
        &self,
        op: &Op,
        first: LostSeparator,
    ) -> Result<(), IndexError> {
        let mut missing = vec![first];
        for _ in 0..MAX_SEPARATORS {
            let Some(lost) = missing.pop() else { return Ok(()) };
            match self.add_separator(op, &lost).await? {
                Added::Done => {}
                Added::Again => missing.push(lost),
                Added::Split(parent) => missing.extend([lost, parent]),
            }
        }
        Err(IndexError::Contended { what: "room for a separator", attempts: MAX_SEPARATORS })
    }

    async fn add_separator(&self, op: &Op, lost: &LostSeparator) -> Result<Added, IndexError> {
        let LostSeparator { level, separator, child } = lost;
        let flushes = self.shared.cache.flushes();
        let Some(mut locked) = self.lock_covering(op, separator, *level).await? else {
            self.grow_root(op, lost).await?;
            return Ok(Added::Again);
        };
        locked = self.mended(op, locked).await?;
        let known = locked.node.live().any(|slot| locked.node.key(slot) == separator.as_slice());
        let wanted = if known { Ok(false) } else { self.is_alive(op, lost).await };
        match wanted {
            Ok(true) => {}
            Ok(false) => {
                self.unlock(op, locked.held).await?;
                return Ok(Added::Done);
            }
            Err(error) => {
                self.unlock(op, locked.held).await?;
                return Err(error);
            }
        }
        let Some(slot) = locked.node.free_slot() else {
            return self.split_node(op, locked).await.map(Added::Split);
        };
        let patches = locked.node.insert(slot, separator, &child.to_raw().to_le_bytes());
        self.shared.cache.keep(&locked.node, flushes, || op.endpoint().random());
        self.write_back(op, locked, patches).await?;
        Ok(Added::Done)
    }

    /// Whether the node is alive that a separator is to be added for. It may have been merged away, if others were faster.
    async fn is_alive(&self, op: &Op, lost: &LostSeparator) -> Result<bool, IndexError> {
        let key_bytes = self.shared.config.key_bytes;
        let start = surely::read(op, lost.child, LOW_AT + key_bytes).await?;
        let head = Head::of(&start);
        // The first word is read at once, and a low fence does not change.
        Ok(!head.is_dead && head.level + 1 == lost.level && start[LOW_AT..] == lost.separator)
    }

    /// Puts a root above the root, if nobody else has.
    async fn grow_root(&self, op: &Op, lost: &LostSeparator) -> Result<(), IndexError> {
        let old = self.root(op, false).await?;
        let Some(node) = self.read_whole(op, old, None).await? else { return Ok(()) };
        if node.level() + 1 != lost.level {
            return Ok(());
        }
        let addr = self.new_place(op).await?;
        let low = node.low().to_vec();
        let plan = Plan {
            level: lost.level,
            incarnation: op.endpoint().random(),
            is_linked: false,
            low: &low,
            high: None,
            sibling: GlobalAddr::NULL,
        };
        let (left, right) = (old.addr.to_raw().to_le_bytes(), lost.child.to_raw().to_le_bytes());
        let entries = [(low.as_slice(), left.as_slice()), (lost.separator.as_slice(), right.as_slice())];
        self.write_new(op, addr, &plan, entries.into_iter()).await?;
        if self.swap_root(op, old.addr, addr).await? {
            marks::hit("root_split");
            self.shared.root.store(addr.to_raw(), Ordering::Relaxed);
            self.mark_linked(op, addr).await?;
        }
        Ok(())
    }

    /// CASes the root pointer; whether it was ours that took effect. If not, the new node is given back.
    pub(super) async fn swap_root(
        &self,
        op: &Op,
        old: GlobalAddr,
        new: GlobalAddr,
    ) -> Result<bool, IndexError> {
        let heap = self.shared.pool.heap();
        let pointer = self.shared.root_pointer();
        match op.cas(pointer, old.to_raw(), new.to_raw()).await {
            Ok(before) if before == old.to_raw() => Ok(true),
            Ok(_) => {
                marks::hit("lost_root_cas");
                heap.free_unpublished(self.shared.node_class(), new);
                Ok(false)
            }
            Err(error) => {
                // Now it has happened or never will.
                surely::reconnected(op, error).await.map_err(begun)?;
                let seen = surely::read_word(op, pointer).await.map_err(begun)?;
                if seen == old.to_raw() {
                    heap.free_unpublished(self.shared.node_class(), new);
                } else if seen != new.to_raw() {
                    // Ours, with another above it by now; or only the other.
                    heap.abandon();
                }
                Ok(seen == new.to_raw())
            }
        }
    }
}
