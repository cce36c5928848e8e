//! Ranges where this thread can look at far memory itself: one object after the other, while those that come next are on their way into
//! the processor's cache.
//!
//! Slots that are still to be followed are a stack, in the order of the scan. Leaves are taken from it some time before they are looked at,
//! and nodes are opened when their leaves are due for that: so a leaf has been fetched by the time that it is looked at, though nobody knew
//! of it before its node was opened.

use super::{OnEdge, Scan, Side};
use crate::api::IndexError;
use crate::engine::sphinx::Tree;
use crate::engine::sphinx::layout::{LeafRef, NodeRef, Slot, Step, Target};
use crate::engine::sphinx::node::leaf::{Leaf, Outline};
use crate::engine::sphinx::node::{Image, InPlace, Node};
use crate::engine::sphinx::read::{no_node, no_slot};
use farwood_fabric::{Op, marks};
use std::collections::VecDeque;

/// How many leaves are fetched before the first of them is looked at: about as many as a processor fetches at a time.
const MAX_COMING: usize = 12;
/// How many leaves are looked at before other tasks may get a turn.
const LEAVES_PER_TURN: usize = 32;
/// More room than this, for long values or deep trees, is given back.
const MAX_KEPT_BYTES: usize = 16 << 10;

/// Slots, each with what is known of the keys below.
type Ahead = Vec<(Target, OnEdge)>;

/// What a scan needs room for, kept from one to the next.
#[derive(Default, Debug)]
pub(in super::super) struct Room {
    /// Slots that are still to be followed, the first one last.
    ahead: Ahead,
    /// Leaves that come before all of those, and are being fetched.
    coming: VecDeque<(LeafRef, OnEdge)>,
    /// What the node that was opened last leads to: by its end, and by bytes, in their order.
    end: Slot,
    slots: Vec<Slot>,
    leaf: Vec<u8>,
}

/// Why looking stopped.
enum Halt {
    /// There is nothing more to look at, or all that is wanted was found.
    End,
    /// Others may have a turn.
    Turn,
    /// This leaf was torn.
    Torn(LeafRef, OnEdge),
    /// This node cannot be opened without waiting.
    Node(NodeRef, OnEdge),
}

impl Room {
    /// How much memory it takes, but for what is always small.
    fn bytes(&self) -> usize {
        self.leaf.capacity() + size_of::<(Target, OnEdge)>() * self.ahead.capacity()
    }

    fn clear(&mut self) {
        self.ahead.clear();
        self.coming.clear();
    }

    /// Takes a node's slots; its depth, and the hash of its prefix.
    fn take_slots<B: Image>(&mut self, scan: &Scan<'_>, node: &Node<B>) -> (usize, u64) {
        self.end = node.slots_into(&mut self.slots, scan.distinct);
        (node.head.depth, node.hash())
    }

    /// Puts a node's slots in its place, unless that takes a wait: whether it did.
    fn open(&mut self, op: &Op, scan: &Scan<'_>, node: NodeRef, on_edge: OnEdge) -> Result<bool, IndexError> {
        // What follows will be opened next.
        if let Some((Target::Node(next), _)) = self.ahead.last() {
            op.expect(next.addr, next.kind.bytes());
        }
        let seen = op.look(node.addr, node.kind.bytes(), |words| {
            Node::accept(node.kind, InPlace(words)).map(|image| self.take_slots(scan, &image))
        });
        let Some(seen) = seen else { return Ok(false) };
        let (depth, hash) = seen?.ok_or_else(|| no_node(node))?;
        if scan.edges.are_unclear(depth, hash, on_edge) {
            return Ok(false);
        }
        self.put_slots(scan, (node, depth), on_edge).map(|()| true)
    }

    /// Puts the slots that were taken in front of all that is ahead, where keys of the range may be below.
    fn put_slots(
        &mut self,
        scan: &Scan<'_>,
        (node, depth): (NodeRef, usize),
        on_edge: OnEdge,
    ) -> Result<(), IndexError> {
        // What comes first goes on top of the stack.
        let are_put = if scan.reverse {
            self.put_end(scan, depth, on_edge)
                && self.slots.iter().all(|slot| put(&mut self.ahead, scan, depth, *slot, on_edge))
        } else {
            self.slots.iter().rev().all(|slot| put(&mut self.ahead, scan, depth, *slot, on_edge))
                && self.put_end(scan, depth, on_edge)
        };
        if are_put { Ok(()) } else { Err(no_slot(node)) }
    }

    fn put_end(&mut self, scan: &Scan<'_>, depth: usize, on_edge: OnEdge) -> bool {
        let below = scan.edges.below(depth, Step::End, on_edge);
        self.end.is_empty() || below.is_none_or(|on_edge| push(&mut self.ahead, self.end, on_edge))
    }
}

/// Puts one slot on the stack, if keys of the range may be below. Whether it is one.
#[inline]
fn put(ahead: &mut Ahead, scan: &Scan<'_>, depth: usize, slot: Slot, on_edge: OnEdge) -> bool {
    if !on_edge.is_on_any() {
        return push(ahead, slot, on_edge);
    }
    scan.edges.below(depth, Step::Byte(slot.byte()), on_edge).is_none_or(|on_edge| push(ahead, slot, on_edge))
}

#[inline]
fn push(ahead: &mut Ahead, slot: Slot, on_edge: OnEdge) -> bool {
    let target = slot.target().filter(|target| *target != Target::Empty);
    target.map(|target| ahead.push((target, on_edge))).is_some()
}

/// A leaf with the end of its value, whose first bytes were seen; none, if that is to be read with waiting.
fn look_at_end(
    op: &Op,
    at: LeafRef,
    end_bytes: usize,
    first: &[u8],
) -> Result<Option<Leaf<Vec<u8>>>, IndexError> {
    let Some(outline) = Outline::of(first, end_bytes, at.class.bytes()) else { return Ok(None) };
    if outline.end_bytes == 0 {
        return Ok(Some(outline.with_end(first, &[])));
    }
    let ((from, to), mut words) = (outline.words(), Vec::new());
    let seen = op.look(at.addr.add(from as u64), to - from, |seen| seen.copy_to(&mut words));
    let Some(seen) = seen else { return Ok(None) };
    seen?;
    Ok(Some(outline.with_end(first, &words[outline.end_at - from..][..outline.end_bytes])))
}

impl Tree {
    pub(super) async fn scan_near(
        &self,
        op: &Op,
        scan: &mut Scan<'_>,
        root: NodeRef,
        on_edge: OnEdge,
    ) -> Result<(), IndexError> {
        let mut room = self.room.take();
        room.clear();
        room.ahead.push((Target::Node(root), on_edge));
        loop {
            match self.look_near(op, scan, &mut room)? {
                Halt::End => break,
                Halt::Turn => {}
                Halt::Torn(leaf, on_edge) => {
                    marks::hit("near_scan_torn");
                    let leaf = Box::pin(self.read_wanted(op, leaf, scan.end_bytes, None)).await?;
                    if !scan.weigh(&leaf, on_edge) {
                        room.clear();
                    }
                }
                Halt::Node(node, on_edge) => {
                    marks::hit("near_scan_waited");
                    Box::pin(self.wait_for_node(op, scan, &mut room, node, on_edge)).await?;
                }
            }
            self.endpoint.breathe().await;
        }
        if room.bytes() <= MAX_KEPT_BYTES {
            self.room.replace(room);
        }
        Ok(())
    }

    /// Goes on as long as it need not wait for anything.
    fn look_near(&self, op: &Op, scan: &mut Scan<'_>, room: &mut Room) -> Result<Halt, IndexError> {
        for _ in 0..LEAVES_PER_TURN {
            let wanted = scan.wanted().min(MAX_COMING);
            if wanted == 0 {
                return Ok(Halt::End);
            }
            while room.coming.len() < wanted {
                let Some((target, on_edge)) = room.ahead.pop() else { break };
                match target {
                    Target::Leaf(leaf) => {
                        op.expect(leaf.addr, scan.first_bytes(leaf));
                        room.coming.push_back((leaf, on_edge));
                    }
                    Target::Node(node) => {
                        if !room.open(op, scan, node, on_edge)? {
                            return Ok(Halt::Node(node, on_edge));
                        }
                    }
                    Target::Empty => {}
                }
            }
            let Some((at, on_edge)) = room.coming.pop_front() else { return Ok(Halt::End) };
            let scratch = &mut room.leaf;
            let first_bytes = scan.first_bytes(at);
            let is_seen = match op.look(at.addr, first_bytes, |words| words.copy_to(scratch)) {
                Some(seen) => seen.map(|()| true)?,
                None => false,
            };
            if let Some(end_bytes) = scan.end_bytes.filter(|_| first_bytes < at.class.bytes()) {
                match look_at_end(op, at, end_bytes, &room.leaf)?.filter(|_| is_seen) {
                    Some(leaf) if scan.weigh(&leaf, on_edge) => {}
                    Some(_) => room.clear(),
                    None => return Ok(Halt::Torn(at, on_edge)),
                }
                continue;
            }
            let whole = if is_seen { self.accept(at, &room.leaf[..]) } else { None };
            let Some(leaf) = whole else { return Ok(Halt::Torn(at, on_edge)) };
            if !scan.weigh(&leaf, on_edge) {
                room.clear();
            }
        }
        Ok(Halt::Turn)
    }

    /// Puts a node's slots in its place, with waiting.
    async fn wait_for_node(
        &self,
        op: &Op,
        scan: &Scan<'_>,
        room: &mut Room,
        node: NodeRef,
        on_edge: OnEdge,
    ) -> Result<(), IndexError> {
        let image = self.read_node(op, node).await?;
        let (depth, hash) = room.take_slots(scan, &image);
        match self.side_of(op, scan, (node, depth, hash), on_edge).await? {
            Side::Outside => {}
            // Leaves that are coming lie in front of it.
            Side::Behind => room.ahead.clear(),
            Side::Inside(on_edge) => room.put_slots(scan, (node, depth), on_edge)?,
        }
        Ok(())
    }
}
