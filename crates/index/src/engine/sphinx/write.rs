//! Changes of one key: the leaf under its lock, or the slot that leads to it under its node's.
//!
//! An attempt follows the way of the key and does what is to be done at its end. If somebody was faster, or a dead node is in the way
//! and had to be replaced first, it is made anew.

use super::layout::{
    Head, LEAF_HEAD_AT, LEAF_KEY_AT, LeafClass, LeafRef, LeafState, NODE_LINKED_AT, NODE_STATE_AT, NodeRef,
    Slot, Step, leaf_bytes,
};
use super::node::leaf::{self, Leaf};
use super::node::prefix::{self, Prefixes};
use super::node::{Node, is_too_large};
use super::read::{Stop, Way};
use super::restructure::common_bytes;
use super::{Tree, corrupt};
use crate::api::IndexError;
use crate::shared::boxed::boxed;
use crate::shared::heap::{Class, Room};
use crate::shared::intents::{self, Redo};
use crate::shared::locks::{Behind, Held, Write, begun};
use crate::shared::surely;
use farwood_fabric::control::ControlError;
use farwood_fabric::mem::Words;
use farwood_fabric::{Buf, FabricError, GlobalAddr, Op, ServerId, marks};
use smallvec::{SmallVec, smallvec};
use std::cell::Cell;

/// How often a change is tried.
const MAX_ATTEMPTS: u32 = 10_000;
/// From so many attempts on, waits lie between them.
const SPINS: u32 = 8;
const WAIT_NS: u64 = 1_000;
/// How often a leaf that is deleted is tried to be unlinked, before that is left to others.
const MAX_UNLINKS: u32 = 16;
/// The most that is written to update a leaf in place: an intent must hold it, and others need room for theirs.
pub(super) const MAX_IN_PLACE_BYTES: usize = 1024;

/// What is to become of a key.
#[derive(Clone, Copy, Debug)]
pub(super) enum Decision<'a> {
    Keep,
    Put(&'a [u8]),
    /// A value that differs a little from the one that is there, and may use the room to spare.
    Adjust(&'a [u8]),
    Remove,
}

/// Decides, given what the key holds.
pub(super) type Decide<'a> = &'a dyn Fn(Option<&[u8]>) -> Decision<'a>;

/// What became of a slot that was to be turned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Turned {
    /// It was; whether the node should take a smaller form now.
    Done { is_too_large: bool },
    /// Somebody else did.
    Changed,
    /// The node is dead.
    Dead,
    /// There is no slot left in the node.
    Full,
}

/// A key that is to be changed.
pub(super) struct Change<'a> {
    pub(super) op: &'a Op,
    pub(super) key: &'a [u8],
    pub(super) prefixes: Prefixes<'a>,
    /// What was lacking under a lock, and was got without it for the next attempt.
    pub(super) reserved: Reserved,
}

/// Room that an operation has for its next attempt.
#[derive(Default)]
pub(super) struct Reserved {
    pub(super) object: Cell<Option<Room>>,
    intent: Cell<Option<intents::Slot>>,
}

/// The WRITE of a word.
fn word_at(addr: GlobalAddr, at: usize, word: u64) -> Write {
    Write { addr: addr.add(at as u64), bytes: SmallVec::from_slice(&word.to_le_bytes()) }
}

/// The WRITE of a byte.
fn byte_at(addr: GlobalAddr, at: usize, byte: u8) -> Write {
    Write { addr: addr.add(at as u64), bytes: SmallVec::from_slice(&[byte]) }
}

impl Tree {
    /// Takes the lock of an object and reads it.
    pub(super) async fn lock(
        &self,
        op: &Op,
        addr: GlobalAddr,
        bytes: usize,
    ) -> Result<(Held, Buf), IndexError> {
        let recover = async |op: &Op, owner| self.shared.pool.suspect(op, owner).await.map(drop);
        self.shared.locks.lock_and_read(op, self.number, (addr, bytes), recover).await
    }

    /// Says that a node's lock will be taken soon.
    pub(super) fn expect_lock(&self, op: &Op, node: NodeRef) {
        op.expect(self.shared.locks.table().lock_of(node.addr).addr, 8);
    }

    /// Takes the lock of a node and reads it.
    pub(super) async fn lock_node(&self, op: &Op, node: NodeRef) -> Result<(Held, Node<Buf>), IndexError> {
        let (held, bytes) = self.lock(op, node.addr, node.kind.bytes()).await?;
        if let Some(image) = Node::accept(node.kind, bytes) {
            return Ok((held, image));
        }
        self.shared.locks.unlock(op, held).await?;
        Err(corrupt(format!("there is no {:?} at {}", node.kind, node.addr)))
    }

    /// Freezes a node under its lock, and gives the lock back.
    pub(super) async fn bury(
        &self,
        op: &Op,
        held: Held,
        node: NodeRef,
        image: &Node<Buf>,
    ) -> Result<(), IndexError> {
        let is_dead = !self.shared.config.sabotage.switch_without_invalidation;
        let head = Head { is_dead, ..image.head };
        self.shared.locks.finish(op, held, &[byte_at(node.addr, NODE_STATE_AT, head.state_byte())]).await
    }

    /// Turns a slot of a node from one word to another, under the node's lock. `rooms` are those of objects that it leads to then; what it
    /// leads to no more is retired.
    pub(super) async fn turn(
        &self,
        op: &Op,
        node: NodeRef,
        step: Step,
        (from, to): (Slot, Slot),
        rooms: &mut [&mut Room],
        retire: Option<(Class, GlobalAddr)>,
    ) -> Result<Turned, IndexError> {
        let (held, image) = self.lock_node(op, node).await?;
        let found = image.find(step);
        let refused = match found {
            _ if image.head.is_dead => Some(Turned::Dead),
            Some((_, slot)) if slot != from => Some(Turned::Changed),
            None if from.is_empty() => Some(Turned::Full),
            None => Some(Turned::Changed),
            Some(_) => None,
        };
        if let Some(refused) = refused {
            marks::hit(match refused {
                Turned::Dead => "dead_node_met",
                Turned::Full => "full_node_met",
                _ => "slot_changed",
            });
            self.shared.locks.unlock(op, held).await?;
            return Ok(refused);
        }
        let at = found.map_or(0, |(at, _)| at);
        // Children are counted in every slot: not where one more makes it only fuller.
        let is_too_large =
            !from.is_empty() && is_too_large(node.kind, image.count() - usize::from(to.is_empty()));
        let mut writes: SmallVec<[Write; 2]> = smallvec![word_at(node.addr, at, to.0)];
        if !image.head.is_linked {
            // Whoever linked it has not said so yet, or died before.
            writes.push(byte_at(node.addr, NODE_LINKED_AT, 1));
        }
        // From here on it happens, though this operation may not live to see it.
        for room in rooms {
            room.link();
        }
        self.shared.locks.finish_with(op, held, &writes, Behind { slot: None, retire }).await?;
        if let Some((class, addr)) = retire {
            // Boxed: an insert retires nothing, and its future would be as large.
            Box::pin(self.retire(op, class, addr)).await?;
        }
        Ok(Turned::Done { is_too_large })
    }

    /// A new object on this server, or on another if there is no room.
    pub(super) async fn allocate(&self, op: &Op, server: ServerId, class: Class) -> Result<Room, IndexError> {
        let others = self.shared.servers().iter().copied().filter(|other| *other != server);
        let mut full = None;
        for server in [server].into_iter().chain(others) {
            match self.shared.pool.heap().room(op, server, class).await {
                Ok(room) => return Ok(room),
                Err(error) if is_full(&error) => full = full.or(Some(error)),
                Err(error) => return Err(error.into()),
            }
        }
        Err(full.map_or(IndexError::Contended { what: "a memory server", attempts: 0 }, IndexError::from))
    }

    /// The same without waiting, for those who hold a lock or like it quick: what was reserved, if it is of this class, or what is at hand.
    pub(super) fn at_hand(&self, change: &Change<'_>, server: ServerId, class: Class) -> Option<Room> {
        let reserved = change.reserved.object.take().filter(|room| room.class() == class);
        reserved.or_else(|| self.shared.pool.heap().room_at_hand(change.op, server, class))
    }

    /// Where a leaf for this value belongs, and of which size it is.
    fn leaf_place(&self, change: &Change<'_>, value: &[u8]) -> Result<(ServerId, LeafClass), IndexError> {
        let Some(class) = LeafClass::for_pair(change.key.len(), value.len()) else {
            return Err(IndexError::BadValue { why: "it is too long".into() });
        };
        Ok((prefix::server_of(change.prefixes.whole(), self.shared.servers()), class))
    }

    /// WRITEs a new leaf that nobody knows yet.
    pub(super) async fn new_leaf(
        &self,
        change: &Change<'_>,
        value: &[u8],
    ) -> Result<(Room, LeafRef), IndexError> {
        let (server, class) = self.leaf_place(change, value)?;
        let object = self.shared.leaf_class(class);
        let room = match self.at_hand(change, server, object) {
            Some(room) => room,
            None => Box::pin(self.allocate(change.op, server, object)).await?,
        };
        self.write_leaf(change, room, class, value).await
    }

    async fn write_leaf(
        &self,
        change: &Change<'_>,
        room: Room,
        class: LeafClass,
        value: &[u8],
    ) -> Result<(Room, LeafRef), IndexError> {
        let Change { op, key, .. } = change;
        let version = u32::try_from(op.endpoint().random() >> 36).unwrap_or(0);
        let bytes = leaf::build(self.shared.place(room.addr()), version, key, value);
        surely::write(op, room.addr(), &bytes).await?;
        let leaf = LeafRef { addr: room.addr(), class };
        Ok((room, leaf))
    }

    /// Retires an object that a slot was turned away from. The operation has happened, whatever comes of it.
    pub(super) async fn retire(&self, op: &Op, class: Class, addr: GlobalAddr) -> Result<(), IndexError> {
        match self.shared.pool.heap().retire(op, class, addr).await.map_err(begun) {
            Err(IndexError::Fenced) => Err(IndexError::Fenced),
            _ => Ok(()),
        }
    }

    /// Changes a key as `decide` says; whether it did.
    pub(super) async fn modify(&self, key: &[u8], decide: Decide<'_>) -> Result<bool, IndexError> {
        let op = self.endpoint.op();
        self.admit(&op)?;
        let prefixes = Prefixes::of(self.shared.seed, key);
        let change = Change { op: &op, key, prefixes, reserved: Reserved::default() };
        let mut way = Way::default();
        for attempt in 0..MAX_ATTEMPTS {
            self.find_way(&op, key, &change.prefixes, &mut way).await?;
            let done = match way.leaf {
                Some(leaf) => self.change_leaf(&change, &way, leaf, decide).await?,
                None => self.change_absent(&change, &way, decide).await?,
            };
            if let Some(done) = done {
                return Ok(done);
            }
            op.count_retry();
            if attempt >= SPINS {
                self.endpoint.sleep(WAIT_NS + self.endpoint.random_below(WAIT_NS)).await;
            }
        }
        Err(IndexError::Contended { what: "a slot", attempts: MAX_ATTEMPTS })
    }

    /// The way leads to no leaf.
    async fn change_absent(
        &self,
        change: &Change<'_>,
        way: &Way,
        decide: Decide<'_>,
    ) -> Result<Option<bool>, IndexError> {
        let value = match decide(None) {
            Decision::Keep => return Ok(Some(false)),
            Decision::Remove => return Ok(Some(true)),
            Decision::Put(value) | Decision::Adjust(value) => value,
        };
        let Some((last, stop)) = way.last() else { return Ok(None) };
        let is_prefix = change.prefixes.get(stop.head.depth) == Some(stop.hash)
            || self.shared.config.sabotage.skip_prefix_check && stop.step.is_some();
        if let (true, Some(step)) = (is_prefix, stop.step) {
            return self.attach(change, way, (last, step), value).await;
        }
        // The key parts from those below this node before it ends: where, any of them tells.
        match self.some_key(change.op, stop.node).await? {
            Some(other) => boxed(|| self.split_edge(change, way, &other, value)).await,
            None => Box::pin(self.replace(change, way, last, None)).await.map(|_| None),
        }
    }

    /// Puts a leaf into a node that has no child for this key.
    async fn attach(
        &self,
        change: &Change<'_>,
        way: &Way,
        (at, step): (usize, Step),
        value: &[u8],
    ) -> Result<Option<bool>, IndexError> {
        let node = way.stops[at].node;
        self.expect_lock(change.op, node);
        let (mut room, leaf) = self.new_leaf(change, value).await?;
        let slot = to_leaf(step, leaf)?;
        match self.turn(change.op, node, step, (Slot::EMPTY, slot), &mut [&mut room], None).await? {
            Turned::Full => {
                let added = Some((step, slot, &mut room));
                let replaced = Box::pin(self.replace(change, way, at, added)).await?;
                Ok(replaced.then_some(true))
            }
            Turned::Done { .. } => Ok(Some(true)),
            Turned::Dead => Box::pin(self.replace(change, way, at, None)).await.map(|_| None),
            Turned::Changed => Ok(None),
        }
    }

    /// The way leads to a leaf, of this key or of another.
    async fn change_leaf(
        &self,
        change: &Change<'_>,
        way: &Way,
        at: LeafRef,
        decide: Decide<'_>,
    ) -> Result<Option<bool>, IndexError> {
        let op = change.op;
        if let Some(other) = Self::other_key(change, at) {
            return match decide(None) {
                Decision::Keep => Ok(Some(false)),
                Decision::Remove => Ok(Some(true)),
                Decision::Put(value) | Decision::Adjust(value) => {
                    boxed(|| self.split_edge(change, way, &other, value)).await
                }
            };
        }
        Self::check_length(op, at)?;
        let (held, bytes) = self.lock(op, at.addr, at.class.bytes()).await?;
        let Some(leaf) = self.accept(at, bytes) else {
            self.shared.locks.unlock(op, held).await?;
            return Err(corrupt(format!("the leaf at {} is torn under its lock", at.addr)));
        };
        let is_here = leaf.key() == change.key;
        let counts = is_here && leaf.state() != LeafState::Deleted;
        let decision = decide(counts.then(|| leaf.value()));
        if is_here && leaf.state() == LeafState::Alive {
            return self.change_live(change, way, (held, at, leaf), decision).await;
        }
        self.shared.locks.unlock(op, held).await?;
        match decision {
            Decision::Keep => Ok(Some(false)),
            Decision::Remove if !counts => Ok(Some(true)),
            Decision::Put(value) | Decision::Adjust(value) if !is_here => {
                boxed(|| self.split_edge(change, way, leaf.key(), value)).await
            }
            Decision::Put(value) | Decision::Adjust(value) => {
                marks::hit("frozen_leaf_met");
                let new = self.new_leaf(change, value).await?;
                Box::pin(self.turn_to(change, way, at, new)).await
            }
            // What it holds cannot change any more, so it is enough that the slot still leads there.
            Decision::Remove => {
                marks::hit("frozen_leaf_met");
                Box::pin(self.unlink(change, way, at)).await.map(|unlinked| unlinked.then_some(true))
            }
        }
    }

    /// The key of a leaf, if it is another one and this thread can look itself; elsewhere the READ that comes with the lock tells.
    fn other_key(change: &Change<'_>, at: LeafRef) -> Option<SmallVec<[u8; 64]>> {
        let Change { op, key, .. } = *change;
        let bytes = (LEAF_KEY_AT + key.len() + 1).next_multiple_of(8).min(at.class.bytes());
        let look = |words: Words<'_>| leaf::other_key(words, key);
        if op.is_simulated() {
            return op.look(at.addr, bytes, look)?.ok()?;
        }
        // If it is this key's, the READ that comes with the lock counts.
        let other = op.peek_here(at.addr, bytes, look)?.ok()?;
        if other.is_some() {
            op.count_look(bytes);
        }
        other
    }

    /// A leaf of this key that is alive, under its lock.
    async fn change_live(
        &self,
        change: &Change<'_>,
        way: &Way,
        (held, at, leaf): (Held, LeafRef, Leaf<Buf>),
        decision: Decision<'_>,
    ) -> Result<Option<bool>, IndexError> {
        let (op, locks) = (change.op, &self.shared.locks);
        let freeze = |state| word_at(at.addr, LEAF_HEAD_AT, leaf.frozen(state));
        match decision {
            Decision::Keep => locks.unlock(op, held).await.map(|()| Some(false)),
            Decision::Put(value) | Decision::Adjust(value) => {
                let (key_bytes, value_bytes) = (leaf.key().len(), value.len());
                let stays = match decision {
                    Decision::Adjust(_) => at.class.keeps_adjusted(key_bytes, value_bytes),
                    _ => at.class.keeps(key_bytes, value_bytes),
                };
                if let Some(from) = stays.then(|| self.written_from(at.class, &leaf, value)).flatten() {
                    let updated = self.update_in_place(change, held, (at, &leaf, from), value).await?;
                    return Ok(updated.then_some(true));
                }
                // First the new one, so that a full pool leaves the old one as it is.
                let (server, class) = self.leaf_place(change, value)?;
                let object = self.shared.leaf_class(class);
                let Some(room) = self.at_hand(change, server, object) else {
                    locks.unlock(op, held).await?;
                    change.reserved.object.set(Some(self.allocate(op, server, object).await?));
                    return Ok(None);
                };
                let new = self.write_leaf(change, room, class, value).await?;
                locks.finish(op, held, &[freeze(LeafState::Moved)]).await?;
                Box::pin(self.turn_to(change, way, at, new)).await
            }
            Decision::Remove => {
                if self.shared.config.sabotage.delete_without_mark {
                    locks.unlock(op, held).await?;
                } else {
                    locks.finish(op, held, &[freeze(LeafState::Deleted)]).await?;
                }
                // The key is gone; that something still leads to its leaf is no failure.
                match Box::pin(self.unlink_surely(change, way, at)).await {
                    Err(IndexError::Fenced) => Err(IndexError::Fenced),
                    _ => Ok(Some(true)),
                }
            }
        }
    }

    /// From where on a leaf is written to update it in place to another value, its head aside; `None` if that is too much for an intent. A
    /// small leaf is written in one piece, from its beginning; of a large one what is behind the bytes that both values begin with.
    fn written_from(&self, class: LeafClass, leaf: &Leaf<Buf>, value: &[u8]) -> Option<usize> {
        if class.bytes() <= self.shared.config.whole_leaf_bytes.min(MAX_IN_PLACE_BYTES) {
            return Some(LEAF_HEAD_AT);
        }
        let least = (LEAF_KEY_AT + value.len()).saturating_sub(MAX_IN_PLACE_BYTES);
        let old = leaf.value().strip_prefix(&value[..least])?;
        Some(leaf_bytes(leaf.key().len(), least + common_bytes(old, &value[least..])))
    }

    /// Writes another value into a leaf, its head and what is `from` some place on: first down in an intent, since it must not be left half
    /// done. Whether there was room for that; if not, it is reserved for the next attempt.
    async fn update_in_place(
        &self,
        change: &Change<'_>,
        held: Held,
        (at, leaf, from): (LeafRef, &Leaf<Buf>, usize),
        value: &[u8],
    ) -> Result<bool, IndexError> {
        let (op, server) = (change.op, at.addr.server());
        let version = leaf.head.version.wrapping_add(1);
        let bytes = leaf::build(self.shared.place(at.addr), version, leaf.key(), value);
        let parts = parts_to_write(at.addr, &bytes, from);
        let needed = Redo::encoded_bytes_of(parts.iter().map(|(_, bytes)| bytes.len()));
        let intents = self.shared.pool.intents();
        let reserved = change.reserved.intent.take().filter(|slot| slot.fits(server, needed));
        let Some(slot) = reserved.or_else(|| intents.take(server, needed)) else {
            self.shared.locks.unlock(op, held).await?;
            marks::hit("waited_for_room_of_an_intent");
            change.reserved.intent.set(Some(intents.room(op, server, needed).await?));
            return Ok(false);
        };
        let redo = Redo::encode_under(held.shows(), parts.iter().copied(), slot.addr());
        let mut writes: SmallVec<[Write; 4]> = smallvec![Write { addr: slot.addr(), bytes: redo.into() }];
        writes.extend(parts.iter().map(|(addr, bytes)| Write { addr: *addr, bytes: (*bytes).into() }));
        // The lock may be handed on, and then its word stays what it is.
        writes.push(word_at(slot.end_addr(), 0, 0));
        let behind = Behind { slot: Some(slot), retire: None };
        self.shared.locks.finish_with(op, held, &writes, behind).await?;
        Ok(true)
    }

    /// Turns the slot from a leaf that cannot be written to any more to a new one.
    async fn turn_to(
        &self,
        change: &Change<'_>,
        way: &Way,
        old: LeafRef,
        (mut room, leaf): (Room, LeafRef),
    ) -> Result<Option<bool>, IndexError> {
        let Some((last, Stop { node, step: Some(step), slot, .. })) = way.last() else { return Ok(None) };
        let turn = (*slot, to_leaf(*step, leaf)?);
        let retire = Some((self.shared.leaf_class(old.class), old.addr));
        match self.turn(change.op, *node, *step, turn, &mut [&mut room], retire).await? {
            Turned::Done { .. } => {
                marks::hit("leaf_replaced");
                Ok(Some(true))
            }
            Turned::Dead => Box::pin(self.replace(change, way, last, None)).await.map(|_| None),
            Turned::Changed | Turned::Full => Ok(None),
        }
    }

    /// Clears the slot that leads to a leaf; whether it was us who did.
    async fn unlink(&self, change: &Change<'_>, way: &Way, leaf: LeafRef) -> Result<bool, IndexError> {
        let Some((last, Stop { node, step: Some(step), slot, .. })) = way.last() else { return Ok(false) };
        let retire = Some((self.shared.leaf_class(leaf.class), leaf.addr));
        match self.turn(change.op, *node, *step, (*slot, Slot::EMPTY), &mut [], retire).await? {
            Turned::Done { is_too_large } => {
                if is_too_large {
                    // The key is gone; that the node stays as large as it is is no failure.
                    let replaced = Box::pin(self.replace(change, way, last, None)).await;
                    if let Err(IndexError::Fenced) = replaced {
                        return Err(IndexError::Fenced);
                    }
                }
                Ok(true)
            }
            Turned::Dead => Box::pin(self.replace(change, way, last, None)).await.map(|_| false),
            Turned::Changed | Turned::Full => Ok(false),
        }
    }

    /// Clears the slot that leads to a deleted leaf, unless somebody else does.
    async fn unlink_surely(&self, change: &Change<'_>, way: &Way, leaf: LeafRef) -> Result<(), IndexError> {
        if self.unlink(change, way, leaf).await? {
            return Ok(());
        }
        let mut way = Way::default();
        for _ in 0..MAX_UNLINKS {
            self.find_way(change.op, change.key, &change.prefixes, &mut way).await?;
            if way.leaf != Some(leaf) || self.unlink(change, &way, leaf).await? {
                return Ok(());
            }
        }
        marks::hit("deleted_leaf_left");
        Ok(())
    }
}

/// What is written to update a leaf: its head and what is there `from` some place on.
fn parts_to_write(addr: GlobalAddr, leaf: &[u8], from: usize) -> SmallVec<[(GlobalAddr, &[u8]); 2]> {
    if from == LEAF_HEAD_AT {
        return smallvec![(addr, leaf)];
    }
    marks::hit("leaf_updated_in_parts");
    let (head, rest) = (&leaf[..LEAF_KEY_AT], &leaf[from..]);
    let rest = (!rest.is_empty()).then(|| (addr.add(from as u64), rest));
    std::iter::once((addr, head)).chain(rest).collect()
}

pub(super) fn to_leaf(step: Step, leaf: LeafRef) -> Result<Slot, IndexError> {
    Slot::to_leaf(step, leaf).ok_or_else(|| corrupt(format!("{} is no place for a leaf", leaf.addr)))
}

fn is_full(error: &FabricError) -> bool {
    matches!(error.control(), Some(ControlError::PoolFull { .. }))
}
