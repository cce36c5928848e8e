//! Another form in the place of a node: a larger or a smaller copy, its only child, or nothing.
//!
//! 1. Under the node's lock: mark it as dead, which freezes it. One that is dead already is as good: its maker died, or is not done.
//! 2. WRITE the new node, with what the dead one holds and, where it had no room, the child that was to be added.
//! 3. Under the parent's lock: if the slot still leads to the dead node, turn it. Whoever does retires the dead node.
//!
//! Those who meet the dead node through its parent's slot read it as before; those who have to write to it come here.

use super::split::to_node;
use crate::api::IndexError;
use crate::engine::sphinx::Tree;
use crate::engine::sphinx::layout::{NodeRef, Slot, Step};
use crate::engine::sphinx::node::{Children, Form, form_of, is_too_large, prefix};
use crate::engine::sphinx::read::{Stop, Way};
use crate::engine::sphinx::write::{Change, Fresh, Turned};
use farwood_fabric::{Op, marks};

/// Room for a new node.
type Room = (Fresh, NodeRef);

/// How often a node that was frozen is tried to be replaced, before that is left to others.
const MAX_TRIES: u32 = 16;

/// What came of an attempt.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Attempt {
    Replaced,
    /// It stays as it is.
    Needless,
    /// It is frozen, and still linked as far as we know.
    Frozen,
}

impl Tree {
    /// Replaces node `at` of the way by what its children need, with one more of them if one is given. Whether that was done; else
    /// somebody else was faster, or it did not need to be done.
    pub(in super::super) async fn replace(
        &self,
        change: &Change<'_>,
        way: &Way,
        at: usize,
        add: Option<(Step, Slot)>,
    ) -> Result<bool, IndexError> {
        let stop = way.stops[at];
        if stop.node.addr == self.shared.root.addr {
            return Ok(false);
        }
        // Where a hash entry led to the node, its parent is not known.
        let mut attempt = Attempt::Frozen;
        if at > 0 {
            attempt = self.try_to_replace(change, way, at, add).await?;
        }
        for _ in 0..MAX_TRIES {
            if attempt != Attempt::Frozen {
                break;
            }
            let way = self.way_above(change.op, change.key, &change.prefixes, stop.head.depth).await?;
            match way.stops.iter().position(|other| other.node == stop.node) {
                Some(at) if at > 0 => attempt = self.try_to_replace(change, &way, at, add).await?,
                _ => break,
            }
        }
        Ok(attempt == Attempt::Replaced)
    }

    async fn try_to_replace(
        &self,
        change: &Change<'_>,
        way: &Way,
        at: usize,
        add: Option<(Step, Slot)>,
    ) -> Result<Attempt, IndexError> {
        let (stop, parent) = (way.stops[at], way.stops[at - 1]);
        let node = stop.node;
        let Some(parent_step) = parent.step else { return Ok(Attempt::Needless) };
        let Some((children, room)) = self.freeze(change, stop, add).await? else {
            return Ok(Attempt::Needless);
        };
        let slot = match room {
            Some(room) => self.write_form(change, stop, room, &children).await?,
            None => children.first().map_or(Slot::EMPTY, |(_, only)| *only),
        };
        let fresh: Option<Fresh> = room.map(|(fresh, _)| fresh);
        let to = slot.reached_by(parent_step);
        let turned = self.turn(change.op, parent.node, parent_step, (parent.slot, to)).await;
        match self.settle(fresh.as_slice(), turned)? {
            Turned::Done { children } => {
                match room {
                    Some((_, new)) => self.announce(change.op, stop.hash, new, Some(node)).await?,
                    None => self.forget(change.op, stop.hash, node).await?,
                }
                self.retire(change.op, self.shared.node_class(node.kind), node.addr).await?;
                if is_too_large(parent.node.kind, children) {
                    // This one is replaced; that the parent stays as large as it is is no failure.
                    if let Err(IndexError::Fenced) = Box::pin(self.replace(change, way, at - 1, None)).await {
                        return Err(IndexError::Fenced);
                    }
                }
                Ok(Attempt::Replaced)
            }
            Turned::Dead => {
                // First the parent, then this one.
                Box::pin(self.replace(change, way, at - 1, None)).await?;
                Ok(Attempt::Frozen)
            }
            Turned::Changed | Turned::Full => Ok(Attempt::Frozen),
        }
    }

    /// Freezes a node, and brings the children that are to be in its place, and room for a new node if they need one. `None` if it
    /// should stay as it is.
    async fn freeze(
        &self,
        change: &Change<'_>,
        stop: Stop,
        add: Option<(Step, Slot)>,
    ) -> Result<Option<(Children, Option<Room>)>, IndexError> {
        let (node, op) = (stop.node, change.op);
        let (held, image) = self.lock_node(op, node).await?;
        let mut children = image.children();
        let is_wanted = match add {
            Some((step, _)) => {
                let is_new = children.iter().all(|(other, _)| *other != step);
                is_new && (image.head.is_dead || image.find(step).is_none())
            }
            None => image.head.is_dead || is_too_large(node.kind, children.len()),
        };
        if !is_wanted {
            self.shared.locks.unlock(op, held).await?;
            return Ok(None);
        }
        children.extend(add);
        children.sort_unstable_by_key(|(step, _)| *step);
        // First the room, so that a full pool leaves the node as it is.
        let room = match self.room_for(op, stop, form_of(&children)).await {
            Ok(room) => room,
            Err(error) => {
                self.shared.locks.unlock(op, held).await?;
                return Err(error);
            }
        };
        let frozen = if image.head.is_dead {
            self.shared.locks.unlock(op, held).await
        } else {
            self.bury(op, held, node, &image).await
        };
        if let Err(error) = frozen {
            self.give_back(room.map(|(fresh, _)| fresh).as_slice());
            return Err(error);
        }
        Ok(Some((children, room)))
    }

    /// Room for a node of this form, if it is to be one.
    async fn room_for(&self, op: &Op, stop: Stop, form: Form) -> Result<Option<Room>, IndexError> {
        let Form::Node(kind) = form else {
            marks::hit(if form == Form::Nothing { "node_removed" } else { "path_compressed" });
            return Ok(None);
        };
        marks::hit(if kind > stop.node.kind { "node_grown" } else { "node_shrunk" });
        let server = prefix::server_of(stop.hash, self.shared.servers());
        let fresh = self.allocate(op, server, self.shared.node_class(kind)).await?;
        Ok(Some((fresh, NodeRef { addr: fresh.addr, kind })))
    }

    /// WRITEs the new node; the slot that leads to it.
    async fn write_form(
        &self,
        change: &Change<'_>,
        stop: Stop,
        (fresh, new): Room,
        children: &Children,
    ) -> Result<Slot, IndexError> {
        self.write_node(change.op, fresh, (new.kind, stop.head.depth), stop.hash, children).await?;
        to_node(Step::End, new)
    }
}
