//! A new node where a key parts from those that are there.

use crate::api::IndexError;
use crate::engine::sphinx::layout::{Head, NodeKind, NodeRef, Slot, Step};
use crate::engine::sphinx::node::{Children, build, prefix};
use crate::engine::sphinx::read::{Stop, Way};
use crate::engine::sphinx::write::{Change, Turned, to_leaf};
use crate::engine::sphinx::{Tree, corrupt};
use crate::shared::heap::Room;
use crate::shared::surely;
use farwood_fabric::{GlobalAddr, Op, marks};

/// How many bytes two keys have in common at their beginning.
pub(in super::super) fn common_bytes(a: &[u8], b: &[u8]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

/// The kind of a new node at this depth below `parent`. Where bytes that follow each other both branch, and the parent has outgrown a
/// Node4, keys are dense over some alphabet: digits, letters. There most nodes outgrow a Node4, and growing costs more than twice what a new node
/// does. Not below a Node256, whose children may have any byte: most nodes at the lower end of keys of random bytes have two children.
fn first_kind(parent: &Stop, depth: usize) -> NodeKind {
    let is_dense = matches!(parent.node.kind, NodeKind::N16 | NodeKind::N48);
    if is_dense && parent.head.depth + 1 == depth { NodeKind::N16 } else { NodeKind::N4 }
}

impl Tree {
    /// WRITEs a new node that nobody knows yet.
    async fn new_node(
        &self,
        change: &Change<'_>,
        (kind, depth): (NodeKind, usize),
        hash: u64,
        children: &Children,
    ) -> Result<(Room, NodeRef), IndexError> {
        let server = prefix::server_of(hash, self.shared.servers());
        let class = self.shared.node_class(kind);
        let room = match self.at_hand(change, server, class) {
            Some(room) => room,
            None => Box::pin(self.allocate(change.op, server, class)).await?,
        };
        let addr = room.addr();
        self.write_node(change.op, addr, (kind, depth), hash, children).await?;
        Ok((room, NodeRef { addr, kind }))
    }

    /// WRITEs a node into room that nobody knows yet.
    pub(super) async fn write_node(
        &self,
        op: &Op,
        addr: GlobalAddr,
        (kind, depth): (NodeKind, usize),
        hash: u64,
        children: &Children,
    ) -> Result<(), IndexError> {
        let bytes = build(Head { is_dead: false, is_linked: false, kind, depth }, hash, children);
        Ok(surely::write(op, addr, &bytes).await?)
    }

    /// Lets a new leaf for the key branch off where it parts from `other`, a key below the last node of the way. `None` if somebody was
    /// faster.
    pub(in super::super) async fn split_edge(
        &self,
        change: &Change<'_>,
        way: &Way,
        other: &[u8],
        value: &[u8],
    ) -> Result<Option<bool>, IndexError> {
        let common = common_bytes(change.key, other);
        // The last node that both keys pass, and its child that only the other one does.
        let above = way.stops.iter().rposition(|stop| stop.head.depth <= common);
        let Some(above) = above else { return Ok(None) };
        let parent = &way.stops[above];
        let (Some(step), false) = (parent.step, parent.slot.is_empty()) else { return Ok(None) };
        let (Some(ours), Some(theirs)) = (Step::of(change.key, common), Step::of(other, common)) else {
            return Ok(None);
        };
        let Some(hash) = change.prefixes.get(common).filter(|_| ours != theirs) else { return Ok(None) };
        self.expect_lock(change.op, parent.node);
        self.expect_entry(change.op, hash);
        let (mut leaf_room, leaf) = self.new_leaf(change, value).await?;
        let mut children: Children =
            [(ours, to_leaf(ours, leaf)?), (theirs, parent.slot)].into_iter().collect();
        children.sort_unstable_by_key(|(step, _)| *step);
        let kind = first_kind(parent, common);
        let (mut node_room, node) = self.new_node(change, (kind, common), hash, &children).await?;
        if self.shared.config.sabotage.entry_before_node {
            self.announce(change.op, hash, node, None).await?;
        }
        let turn = (parent.slot, to_node(step, node)?);
        let mut rooms = [&mut leaf_room, &mut node_room];
        match self.turn(change.op, parent.node, step, turn, &mut rooms, None).await? {
            Turned::Done { .. } => {
                marks::hit("edge_split");
                self.announce(change.op, hash, node, None).await?;
                Ok(Some(true))
            }
            Turned::Dead => self.replace(change, way, above, None).await.map(|_| None),
            Turned::Changed | Turned::Full => Ok(None),
        }
    }
}

pub(in super::super) fn to_node(step: Step, node: NodeRef) -> Result<Slot, IndexError> {
    Slot::to_node(step, node).ok_or_else(|| corrupt(format!("{} is no place for a node", node.addr)))
}
