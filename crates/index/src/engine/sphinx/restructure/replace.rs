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
use crate::engine::sphinx::write::{Change, Turned};
use crate::shared::heap::{Class, Room};
use farwood_fabric::{ServerId, marks};
use smallvec::SmallVec;

/// Room for a new node, if one is needed, or where it has to be got; no lock is held then.
enum AtHand {
    Room(Option<(Room, NodeRef)>),
    Lacking(ServerId, Class),
}

/// A child that is to be added: how it is reached, and its room.
type Added<'a> = (Step, Slot, &'a mut Room);

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
        mut add: Option<Added<'_>>,
    ) -> Result<bool, IndexError> {
        let stop = way.stops[at];
        if stop.node.addr == self.shared.root.addr {
            return Ok(false);
        }
        // Where a hash entry led to the node, its parent is not known.
        let mut attempt = Attempt::Frozen;
        if at > 0 {
            attempt = self.try_to_replace(change, way, at, &mut add).await?;
        }
        let mut way = Way::default();
        for _ in 0..MAX_TRIES {
            if attempt != Attempt::Frozen {
                break;
            }
            let below = (&change.prefixes, stop.head.depth);
            self.find_way_above(change.op, change.key, below, &mut way).await?;
            match way.stops.iter().position(|other| other.node == stop.node) {
                Some(at) if at > 0 => attempt = self.try_to_replace(change, &way, at, &mut add).await?,
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
        add: &mut Option<Added<'_>>,
    ) -> Result<Attempt, IndexError> {
        let (stop, parent) = (way.stops[at], way.stops[at - 1]);
        let node = stop.node;
        let Some(parent_step) = parent.step else { return Ok(Attempt::Needless) };
        self.expect_lock(change.op, parent.node);
        self.expect_entry(change.op, stop.hash);
        let added = add.as_ref().map(|(step, slot, _)| (*step, *slot));
        let Some((children, mut room)) = self.freeze(change, stop, added).await? else {
            return Ok(Attempt::Needless);
        };
        let new = room.as_ref().map(|(_, new)| *new);
        let slot = match new {
            Some(new) => {
                let form = (new.kind, stop.head.depth);
                self.write_node(change.op, new.addr, form, stop.hash, &children).await?;
                to_node(Step::End, new)?
            }
            None => children.first().map_or(Slot::EMPTY, |(_, only)| *only),
        };
        let to = slot.reached_by(parent_step);
        let rooms = room.iter_mut().map(|(room, _)| room);
        let mut rooms: SmallVec<[&mut Room; 2]> =
            rooms.chain(add.iter_mut().map(|(_, _, room)| &mut **room)).collect();
        let retire = Some((self.shared.node_class(node.kind), node.addr));
        let turn = (parent.slot, to);
        match self.turn(change.op, parent.node, parent_step, turn, &mut rooms, retire).await? {
            Turned::Done { is_too_large } => {
                match new {
                    Some(new) => self.announce(change.op, stop.hash, new, Some(node)).await?,
                    None => self.forget(change.op, stop.hash, node).await?,
                }
                if is_too_large {
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
    ) -> Result<Option<(Children, Option<(Room, NodeRef)>)>, IndexError> {
        let (node, op) = (stop.node, change.op);
        for _ in 0..MAX_TRIES {
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
            let room = match self.room_for(change, stop, &form_of(&children)) {
                AtHand::Room(room) => room,
                AtHand::Lacking(server, class) => {
                    self.shared.locks.unlock(op, held).await?;
                    change.reserved.object.set(Some(self.allocate(op, server, class).await?));
                    continue;
                }
            };
            if image.head.is_dead {
                self.shared.locks.unlock(op, held).await?;
            } else {
                self.bury(op, held, node, &image).await?;
            }
            return Ok(Some((children, room)));
        }
        Err(IndexError::Contended { what: "room for a node", attempts: MAX_TRIES })
    }

    /// Room for a node of this form, if it is to be one.
    fn room_for(&self, change: &Change<'_>, stop: Stop, form: &Form) -> AtHand {
        let Form::Node(kind) = *form else {
            marks::hit(if *form == Form::Nothing { "node_removed" } else { "path_compressed" });
            return AtHand::Room(None);
        };
        let (server, class) =
            (prefix::server_of(stop.hash, self.shared.servers()), self.shared.node_class(kind));
        let Some(room) = self.at_hand(change, server, class) else { return AtHand::Lacking(server, class) };
        marks::hit(if kind > stop.node.kind { "node_grown" } else { "node_shrunk" });
        let addr = room.addr();
        AtHand::Room(Some((room, NodeRef { addr, kind })))
    }
}
