//! Splits and separators. One lock at a time.
//!
//! 1. Under the lock of the full node N: WRITE X, with the upper half of N's entries, on a random server. Nobody knows X yet. If no room for X is at
//!    hand, N is unlocked until there is.
//! 2. [WRITE N's new half, WRITE N's flag, WRITE N's blocks, (mark X linked,) unlock N]. With the flag X is linked.
//! 3. Under the parent's lock: if X is still alive, WRITE its separator. A full parent is split first, in the same way.
//! 4. If N was the root, a new root takes both first ([`super::root`]).
//!
//! Whoever dies before 2 leaves a node that nobody knows. Whoever dies between 2 and 3 leaves a node that is reached through N;
//! the first writer that goes that way adds its separator.

use crate::api::IndexError;
use crate::engine::sherman::Tree;
use crate::engine::sherman::layout::LOW_AT;
use crate::engine::sherman::node::{Head, Node, Plan};
use crate::engine::sherman::write::Locked;
use crate::shared::heap::Room;
use crate::shared::locks::Write;
use crate::shared::surely;
use farwood_fabric::{GlobalAddr, Op, ServerId, marks};
use smallvec::SmallVec;

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
    /// There was no parent, or no room for its split; now there may be.
    Again,
}

impl Tree {
    /// Splits a full node and tells its parent; if no room is at hand, only gets some for the next attempt.
    pub(in super::super) async fn split(
        &self,
        op: &Op,
        locked: Locked,
        reserved: &mut Option<Room>,
    ) -> Result<(), IndexError> {
        match self.split_node(op, locked, reserved).await? {
            Some(lost) => self.add_separators(op, lost).await,
            None => Ok(()),
        }
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

    /// Room for a new node; not to be waited for under a lock.
    pub(super) async fn new_room(&self, op: &Op) -> Result<Room, IndexError> {
        let addr = self.new_place(op).await?;
        Ok(self.shared.pool.heap().room_of(op, self.shared.node_class(), addr))
    }

    /// The node that the upper half went to, which lacks its separator. `None` if no room was at hand: the lock is given back and the room is
    /// reserved for the next attempt.
    async fn split_node(
        &self,
        op: &Op,
        locked: Locked,
        reserved: &mut Option<Room>,
    ) -> Result<Option<LostSeparator>, IndexError> {
        let Locked { held, addr, mut node } = locked;
        debug_assert!(node.is_whole(), "nobody splits a node without having looked at all of it");
        let (heap, class) = (self.shared.pool.heap(), self.shared.node_class());
        let at_hand = reserved.take().or_else(|| heap.room_at_hand(op, self.any_server(op), class));
        let Some(mut room) = at_hand else {
            self.unlock(op, held).await?;
            *reserved = Some(self.new_room(op).await?);
            return Ok(None);
        };
        let child = room.addr();
        let separator = self.write_upper_half(op, &node, child).await?;
        let mut writes: SmallVec<[Write; 4]> = SmallVec::new();
        writes.extend(node.shrink(&separator, child).into_iter().map(|patch| Self::patch_at(addr, patch)));
        let together = child.server() == addr.server();
        if together {
            writes.push(Write {
                addr: child.add(super::super::layout::LINKED_AT as u64),
                bytes: SmallVec::from_slice(&[1]),
            });
        }
        room.link();
        self.finish(op, held, &writes).await?;
        marks::hit("split");
        if !together {
            self.mark_linked(op, child).await?;
        }
        Ok(Some(LostSeparator { level: node.level() + 1, separator, child }))
    }

    /// Writes a node, which nobody knows yet, with the upper half of `node`.
    async fn write_upper_half(&self, op: &Op, node: &Node, addr: GlobalAddr) -> Result<Vec<u8>, IndexError> {
        let slots = node.sorted();
        let upper = &slots[slots.len() / 2..];
        let Some(first) = upper.first() else {
            return Err(super::super::corrupt("a full node has no entries".into()));
        };
        let separator = node.key(*first).to_vec();
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
        Ok(separator)
    }

    /// Writes a node that nobody knows yet.
    pub(super) async fn write_new<'a>(
        &self,
        op: &Op,
        addr: GlobalAddr,
        plan: &Plan<'_>,
        entries: impl Iterator<Item = (&'a [u8], &'a [u8])>,
    ) -> Result<(), IndexError> {
        let buf = op.endpoint().buf(self.shared.config.node_bytes);
        let node = Node::build(&self.shared.layouts, self.shared.place(addr), buf, plan, entries);
        Ok(surely::write(op, addr, node.bytes()).await?)
    }

    /// Adds separators, that of `first` and those of parents that are split for it.
    pub(in super::super) async fn add_separators(
        &self,
        op: &Op,
        first: LostSeparator,
    ) -> Result<(), IndexError> {
        let (mut missing, mut room) = (vec![first], None);
        for _ in 0..MAX_SEPARATORS {
            let Some(lost) = missing.pop() else { return Ok(()) };
            match self.add_separator(op, &lost, &mut room).await? {
                Added::Done => {}
                Added::Again => missing.push(lost),
                Added::Split(parent) => missing.extend([lost, parent]),
            }
        }
        Err(IndexError::Contended { what: "room for a separator", attempts: MAX_SEPARATORS })
    }

    async fn add_separator(
        &self,
        op: &Op,
        lost: &LostSeparator,
        room: &mut Option<Room>,
    ) -> Result<Added, IndexError> {
        let LostSeparator { level, separator, child } = lost;
        let flushes = self.shared.cache.flushes();
        let Some(mut locked) = self.lock_covering(op, separator, *level).await? else {
            let may_be_there = self.grow_root(op, *level).await?;
            return Ok(if may_be_there { Added::Again } else { Added::Done });
        };
        locked = self.mended(op, locked).await?;
        let known = locked.node.live().any(|slot| locked.node.key(slot) == separator.as_slice());
        if known || !self.is_alive(op, lost).await? {
            self.unlock(op, locked.held).await?;
            return Ok(Added::Done);
        }
        let Some(slot) = locked.node.free_slot() else {
            let split = self.split_node(op, locked, room).await?;
            return Ok(split.map_or(Added::Again, Added::Split));
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
}
