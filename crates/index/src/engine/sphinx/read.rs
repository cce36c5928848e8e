//! The way down to a leaf, and leaves that are read whole.
//!
//! A way is what this operation read, node by node, each through a slot of the one before it. Whether a node on it is dead does not matter
//! to who reads: what it said was so at that instant or later (see the invariants in `mod`).

use super::layout::{
    Head, LINE, LeafRef, LeafState, NODE_END_AT, NODE_HASH_AT, NODE_HEAD_AT, NODE_SLOTS_AT, NodeKind,
    NodeRef, Slot, Step, Target,
};
use super::node::leaf::Leaf;
use super::node::prefix::Prefixes;
use super::node::{Image, InPlace, Node, direct_slot_at};
use super::{Tree, corrupt};
use crate::api::IndexError;
use crate::shared::heap::LONG_VALUE;
use crate::shared::surely;
use farwood_fabric::mem::Words;
use farwood_fabric::{Buf, Op, marks};
use smallvec::SmallVec;
use std::ops::Deref;

/// How often a leaf is read until it is whole.
const MAX_READS: u32 = 10_000;
/// After so many torn reads in a row the lock is taken, which waits for the writer, or lets a dead one be recovered.
const PATIENCE: u32 = 16;

/// Below so many branches (as a power of two) there are more nodes than a processor's nearest caches hold: there it pays to ask for memory first
/// and to make way for others until it has come.
const RARELY_CACHED: u32 = 12;

/// A node on the way of a key.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stop {
    pub(super) node: NodeRef,
    pub(super) head: Head,
    /// The hash of its prefix.
    pub(super) hash: u64,
    /// How the key goes on; `None` if it ends before.
    pub(super) step: Option<Step>,
    /// Where to.
    pub(super) slot: Slot,
}

/// What a leaf is looked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Purpose {
    Read,
    /// It will be locked.
    Change,
}

/// The way of a key: nodes, the last of which leads to a leaf or nowhere. It is hundreds of bytes, so whoever looks for it fills it in place.
#[derive(Default, Debug)]
pub(super) struct Way {
    pub(super) stops: SmallVec<[Stop; 8]>,
    pub(super) leaf: Option<LeafRef>,
}

impl Way {
    fn begin(&mut self) {
        self.stops.clear();
        self.leaf = None;
    }

    /// The last node.
    pub(super) fn last(&self) -> Option<(usize, &Stop)> {
        self.stops.iter().enumerate().next_back()
    }
}

impl Tree {
    /// The way of a key, from the deepest node that is found by hash, or from the root.
    pub(super) fn find_way(
        &self,
        op: &Op,
        key: &[u8],
        prefixes: &Prefixes<'_>,
        way: &mut Way,
    ) -> impl Future<Output = Result<(), IndexError>> {
        self.find_way_above(op, key, (prefixes, usize::MAX), way)
    }

    /// The same, from a node that is less deep than `below`.
    pub(super) async fn find_way_above(
        &self,
        op: &Op,
        key: &[u8],
        (prefixes, below): (&Prefixes<'_>, usize),
        way: &mut Way,
    ) -> Result<(), IndexError> {
        way.begin();
        let stops = &mut way.stops;
        if let Some(leaf) = self.descend::<true>(op, key, Purpose::Change, |stop| stops.push(stop)).await {
            way.leaf = leaf?;
            return Ok(());
        }
        if op.is_simulated() {
            let stops = &mut way.stops;
            if let Some(leaf) = self.descend::<false>(op, key, Purpose::Change, |stop| stops.push(stop)).await
            {
                way.leaf = leaf?;
                return Ok(());
            }
        }
        way.begin();
        let jump = self.jump(op, key, prefixes, below).await?;
        let first = match jump.stop {
            Some(stop) => stop,
            None => self.read_stop(op, key, self.shared.root, 0).await?,
        };
        self.follow(op, key, first, way).await?;
        self.learn(op, &jump, way, prefixes).await
    }

    /// The way of a key from the root and the leaf that it leads to, if any, where this thread can look at nodes itself; `None` where it
    /// cannot, or nodes are to be found by hash. `HERE`: by [`Op::look_here`] alone, so that what counts outside the simulator has nothing of it.
    #[inline]
    async fn descend<const HERE: bool>(
        &self,
        op: &Op,
        key: &[u8],
        purpose: Purpose,
        mut pass: impl FnMut(Stop),
    ) -> Option<Result<Option<LeafRef>, IndexError>> {
        if self.finder().is_some() {
            return None;
        }
        let (mut node, mut above) = (self.shared.root, None);
        let mut branching = 0;
        // Depths grow, so this ends.
        loop {
            let look = |words: Words<'_>| {
                Node::accept(node.kind, InPlace(words)).map(|image| stop_at(node, &image, key))
            };
            let bytes = node.kind.bytes();
            let seen =
                if HERE { op.look_here(node.addr, bytes, look)? } else { op.look(node.addr, bytes, look)? };
            let stop = match seen {
                Ok(Some(stop)) => stop,
                Ok(None) => return Some(Err(no_node(node))),
                Err(error) => return Some(Err(error.into())),
            };
            if above.is_some_and(|above| stop.head.depth <= above) {
                return Some(Err(not_deeper(node)));
            }
            if stop.head.is_dead {
                marks::hit("dead_node_on_descent");
            }
            above = Some(stop.head.depth);
            branching += branching_of(node.kind);
            pass(stop);
            node = match stop.slot.target() {
                Some(Target::Empty) => return Some(Ok(None)),
                Some(Target::Leaf(leaf)) => {
                    if branching >= RARELY_CACHED {
                        let lock = self.shared.locks.table().lock_of(leaf.addr).addr;
                        let places = [(leaf.addr, leaf.class.bytes()), (lock, 8)];
                        op.approach(&places[..if purpose == Purpose::Change { 2 } else { 1 }]).await;
                    }
                    return Some(Ok(Some(leaf)));
                }
                Some(Target::Node(child)) => child,
                None => return Some(Err(no_slot(node))),
            };
            if branching >= RARELY_CACHED {
                match node.kind {
                    NodeKind::N256 => {
                        let slot = slot_of(key, stop.head.depth + 1) as u64;
                        op.approach(&[(node.addr, NODE_SLOTS_AT), (node.addr.add(slot), 8)]).await;
                    }
                    // Slots fill from the front, and a processor has only so many lines on their way at a time. Whoever is about to add one
                    // looks at all of them.
                    kind => {
                        let lines = if purpose == Purpose::Change { 3 } else { 2 };
                        op.approach(&[(node.addr, kind.bytes().min(lines * LINE))]).await;
                    }
                }
            }
        }
    }

    /// The way of a key on from a node.
    async fn follow(&self, op: &Op, key: &[u8], first: Stop, way: &mut Way) -> Result<(), IndexError> {
        let mut stop = first;
        // Depths grow, so this ends.
        loop {
            way.stops.push(stop);
            let node = match stop.slot.target() {
                Some(Target::Empty) => return Ok(()),
                Some(Target::Leaf(leaf)) => {
                    way.leaf = Some(leaf);
                    return Ok(());
                }
                Some(Target::Node(child)) => child,
                None => return Err(no_slot(stop.node)),
            };
            let next = self.read_stop(op, key, node, stop.head.depth + 1).await?;
            if next.head.depth <= stop.head.depth {
                return Err(not_deeper(node));
            }
            stop = next;
        }
    }

    /// READs what a key needs of a node.
    async fn read_stop(&self, op: &Op, key: &[u8], node: NodeRef, guess: usize) -> Result<Stop, IndexError> {
        if node.kind == NodeKind::N256 && self.shared.config.switches.slot_reads {
            return self.read_slot_only(op, key, node, guess).await;
        }
        Ok(stop_at(node, &self.read_node(op, node).await?, key))
    }

    /// READs the head of a Node256 and, in the same round trip, the slot that counts if its depth is as guessed.
    pub(super) async fn read_slot_only(
        &self,
        op: &Op,
        key: &[u8],
        node: NodeRef,
        guess: usize,
    ) -> Result<Stop, IndexError> {
        let guessed = slot_of(key, guess);
        let (head, slot) = ((node.addr, NODE_SLOTS_AT), (node.addr.add(guessed as u64), 8));
        let (head_bytes, slot) = surely::read_pair(op, head, slot).await?;
        let mut slot = Slot(slot.word(0));
        let Some(head) = Head::from_word(head_bytes.word(NODE_HEAD_AT)) else { return Err(no_node(node)) };
        let step = Step::of(key, head.depth);
        let at = slot_of(key, head.depth);
        slot = match step {
            None => Slot::EMPTY,
            Some(_) if at == guessed => slot,
            Some(_) => Slot(surely::read_word(op, node.addr.add(at as u64)).await?),
        };
        Ok(Stop { node, head, hash: head_bytes.word(NODE_HASH_AT), step, slot })
    }

    /// READs a whole node.
    pub(super) async fn read_node(&self, op: &Op, node: NodeRef) -> Result<Node<Buf>, IndexError> {
        let bytes = surely::read(op, node.addr, node.kind.bytes()).await?;
        Node::accept(node.kind, bytes).ok_or_else(|| no_node(node))
    }

    /// Takes bytes for the leaf here, if they are whole.
    pub(super) fn accept<B: Deref<Target = [u8]>>(&self, leaf: LeafRef, bytes: B) -> Option<Leaf<B>> {
        let checked = !self.shared.config.sabotage.skip_checksum;
        let whole = Leaf::accept(self.shared.place(leaf.addr), bytes, checked).ok();
        if whole.is_none() {
            marks::hit("torn_read");
        }
        whole
    }

    /// READs a leaf until it is whole.
    pub(super) async fn read_leaf(&self, op: &Op, leaf: LeafRef) -> Result<Leaf<Buf>, IndexError> {
        for attempt in 1..=MAX_READS {
            let bytes = if attempt % PATIENCE == 0 {
                let (held, bytes) = self.lock(op, leaf.addr, leaf.class.bytes()).await?;
                self.shared.locks.unlock(op, held).await?;
                bytes
            } else {
                surely::read(op, leaf.addr, leaf.class.bytes()).await?
            };
            if let Some(leaf) = self.accept(leaf, bytes) {
                return Ok(leaf);
            }
            op.count_retry();
        }
        Err(corrupt(format!("the leaf at {} is torn, and stays so", leaf.addr)))
    }

    /// Whether an operation may fetch a leaf. If not, it ends here, and begins anew when it may.
    #[inline]
    pub(super) fn check_length(op: &Op, leaf: LeafRef) -> Result<(), IndexError> {
        if op.may_move(leaf.class.bytes()) {
            return Ok(());
        }
        Err(IndexError::Contended { what: LONG_VALUE, attempts: 0 })
    }

    /// The value of a key.
    pub(super) async fn look_up(&self, key: &[u8]) -> Result<Option<Vec<u8>>, IndexError> {
        let op = &self.endpoint.op();
        self.admit(op)?;
        let leaf = if let Some(leaf) = self.descend::<true>(op, key, Purpose::Read, drop).await {
            leaf?
        } else {
            let mut way = Way::default();
            self.find_way(op, key, &Prefixes::of(self.shared.seed, key), &mut way).await?;
            way.leaf
        };
        let Some(leaf) = leaf else { return Ok(None) };
        Self::check_length(op, leaf)?;
        let leaf = self.read_leaf(op, leaf).await?;
        let is_there = leaf.key() == key && leaf.state() != LeafState::Deleted;
        Ok(is_there.then(|| leaf.value().to_vec()))
    }

    /// Some key below a node; `None` if there is none.
    pub(super) async fn some_key(&self, op: &Op, node: NodeRef) -> Result<Option<Vec<u8>>, IndexError> {
        // Not only below its first child: that may be a node that has just lost all of its own.
        let mut left = vec![node];
        while let Some(at) = left.pop() {
            let image = self.read_node(op, at).await?;
            let mut children = image.children();
            if self.shared.config.sabotage.first_child_only {
                children.truncate(1);
            }
            for (_, slot) in children.iter().rev() {
                match slot.target() {
                    Some(Target::Leaf(leaf)) => {
                        Self::check_length(op, leaf)?;
                        return Ok(Some(self.read_leaf(op, leaf).await?.key().to_vec()));
                    }
                    Some(Target::Node(child)) => left.push(child),
                    _ => return Err(no_slot(at)),
                }
            }
        }
        Ok(None)
    }
}

/// Where the slot of a key is in a Node256 of this depth.
fn slot_of(key: &[u8], depth: usize) -> usize {
    match Step::of(key, depth) {
        Some(Step::Byte(byte)) => direct_slot_at(byte),
        _ => NODE_END_AT,
    }
}

/// The children of a node of this kind, roughly, as a power of two.
fn branching_of(kind: NodeKind) -> u32 {
    match kind {
        NodeKind::N4 => 1,
        NodeKind::N16 => 3,
        NodeKind::N48 => 5,
        NodeKind::N256 => 7,
    }
}

/// What a key needs of a node.
#[inline]
fn stop_at<B: Image>(node: NodeRef, image: &Node<B>, key: &[u8]) -> Stop {
    let step = Step::of(key, image.head.depth);
    let slot = step.map_or(Slot::EMPTY, |step| image.child(step));
    Stop { node, head: image.head, hash: image.hash(), step, slot }
}

pub(super) fn no_slot(node: NodeRef) -> IndexError {
    corrupt(format!("a slot of the node at {} is none", node.addr))
}

fn not_deeper(node: NodeRef) -> IndexError {
    corrupt(format!("the node at {} is not deeper than its parent", node.addr))
}

pub(super) fn no_node(node: NodeRef) -> IndexError {
    corrupt(format!("there is no {:?} at {}", node.kind, node.addr))
}
