//! Ranges where each look at far memory costs a round trip.
//!
//! Each round trip reads the first slots of the list, many at a time, and puts what they led to in their place.

use super::{OnEdge, Part, Scan, Side, Verdict};
use crate::api::IndexError;
use crate::engine::sphinx::Tree;
use crate::engine::sphinx::layout::{LeafRef, NodeKind, NodeRef, Target};
use crate::engine::sphinx::node::Node;
use crate::engine::sphinx::node::leaf::Leaf;
use crate::engine::sphinx::read::{no_node, no_slot};
use crate::shared::surely;
use farwood_fabric::{Buf, GlobalAddr, Op, marks};
use std::collections::VecDeque;

/// Most nodes and leaves that are read at a time.
const MAX_PARALLEL: usize = 32;
/// Most bytes that are read at a time, beside the first object.
const MAX_PARALLEL_BYTES: usize = 256 << 10;

/// Something in the order of keys that is still to be looked at.
enum Item {
    Node {
        node: NodeRef,
        on_edge: OnEdge,
    },
    Leaf {
        leaf: LeafRef,
        on_edge: OnEdge,
    },
    /// In a box, since the list is mostly of the others, which are small.
    Pair(Box<Leaf<Part>>),
}

/// What comes next, in the order of the scan.
type Ahead = VecDeque<Item>;

impl Item {
    /// How many pairs it stands for, at a guess: nodes that will not be needed are not read ahead.
    fn pairs(&self) -> usize {
        match self {
            Self::Node { on_edge, .. } if on_edge.is_on_any() => 1,
            Self::Node { node, .. } => match node.kind {
                NodeKind::N4 => 3,
                NodeKind::N16 => 10,
                NodeKind::N48 => 32,
                NodeKind::N256 => 128,
            },
            Self::Leaf { .. } | Self::Pair(_) => 1,
        }
    }

    /// What is to be read, and of how many bytes.
    fn place(&self, scan: &Scan<'_>) -> Option<(GlobalAddr, usize)> {
        match self {
            Self::Node { node, .. } => Some((node.addr, node.kind.bytes())),
            Self::Leaf { leaf, .. } => Some((leaf.addr, scan.first_bytes(*leaf))),
            Self::Pair(_) => None,
        }
    }
}

/// Takes the pairs at the head of the list.
fn harvest(ahead: &mut Ahead, scan: &mut Scan<'_>) {
    while scan.wanted() > 0 && matches!(ahead.front(), Some(Item::Pair(_))) {
        if let Some(Item::Pair(pair)) = ahead.pop_front() {
            scan.take(&pair);
        }
    }
}

/// Where in the list are the first objects to be read, up to so many, and of how many bytes.
fn next_reads(ahead: &Ahead, scan: &Scan<'_>, most: usize) -> Vec<(usize, GlobalAddr, usize)> {
    let (mut reads, mut bytes, mut pairs) = (Vec::new(), 0, 0);
    for (n, item) in ahead.iter().enumerate() {
        if reads.len() >= most || pairs >= scan.wanted().max(1) {
            break;
        }
        pairs += item.pairs();
        let Some((addr, len)) = item.place(scan) else { continue };
        if bytes + len > MAX_PARALLEL_BYTES && !reads.is_empty() {
            break;
        }
        bytes += len;
        reads.push((n, addr, len));
    }
    reads
}

impl Tree {
    pub(super) async fn scan_far(
        &self,
        op: &Op,
        scan: &mut Scan<'_>,
        root: NodeRef,
        on_edge: OnEdge,
    ) -> Result<(), IndexError> {
        let mut ahead = Ahead::from([Item::Node { node: root, on_edge }]);
        let most = if self.shared.config.switches.batched_scans { MAX_PARALLEL } else { 1 };
        while !ahead.is_empty() && scan.wanted() > 0 {
            ahead = self.look_ahead(op, scan, ahead, most).await?;
            harvest(&mut ahead, scan);
        }
        Ok(())
    }

    /// Reads what comes next, up to so many objects at once, and puts what it leads to in its place.
    async fn look_ahead(
        &self,
        op: &Op,
        scan: &mut Scan<'_>,
        ahead: Ahead,
        most: usize,
    ) -> Result<Ahead, IndexError> {
        let reads = next_reads(&ahead, scan, most);
        if reads.len() > 1 {
            marks::hit("parallel_reads");
        }
        let places: Vec<_> = reads.iter().map(|(_, addr, len)| (*addr, *len)).collect();
        let bufs = surely::read_many(op, &places).await?;
        let mut bufs = reads.iter().map(|(n, ..)| *n).zip(bufs).peekable();
        let mut next = Ahead::new();
        let mut ahead = ahead.into_iter().enumerate();
        for (n, item) in ahead.by_ref() {
            let Some((_, buf)) = bufs.next_if(|(at, _)| *at == n) else {
                next.push_back(item);
                continue;
            };
            let is_over = match item {
                Item::Node { node, on_edge } => {
                    self.open_node(op, scan, &mut next, (node, on_edge), buf).await?
                }
                Item::Leaf { leaf, on_edge } => {
                    self.open_leaf(op, scan, &mut next, (leaf, on_edge), buf).await?
                }
                pair @ Item::Pair(_) => {
                    next.push_back(pair);
                    false
                }
            };
            if is_over {
                return Ok(next);
            }
            if bufs.peek().is_none() {
                break;
            }
        }
        next.extend(ahead.map(|(_, item)| item));
        Ok(next)
    }

    /// Puts a node's children in its place. Whether the range ends here.
    async fn open_node(
        &self,
        op: &Op,
        scan: &Scan<'_>,
        next: &mut Ahead,
        (node, on_edge): (NodeRef, OnEdge),
        buf: Buf,
    ) -> Result<bool, IndexError> {
        let image = Node::accept(node.kind, buf).ok_or_else(|| no_node(node))?;
        let depth = image.head.depth;
        let on_edge = match self.side_of(op, scan, (node, depth, image.hash()), on_edge).await? {
            Side::Outside => return Ok(false),
            Side::Behind => return Ok(true),
            Side::Inside(on_edge) => on_edge,
        };
        let mut children = if scan.distinct { image.distinct_children() } else { image.children() };
        if scan.reverse {
            children.reverse();
        }
        for (step, slot) in children {
            let Some(on_edge) = scan.edges.below(depth, step, on_edge) else { continue };
            next.push_back(match slot.target() {
                Some(Target::Node(node)) => Item::Node { node, on_edge },
                Some(Target::Leaf(leaf)) => Item::Leaf { leaf, on_edge },
                _ => return Err(no_slot(node)),
            });
        }
        Ok(false)
    }

    /// Puts a pair in the place of its leaf, if it counts. Whether the range ends here.
    async fn open_leaf(
        &self,
        op: &Op,
        scan: &Scan<'_>,
        next: &mut Ahead,
        (at, on_edge): (LeafRef, OnEdge),
        buf: Buf,
    ) -> Result<bool, IndexError> {
        let leaf = if buf.len() < at.class.bytes() {
            self.read_wanted(op, at, scan.end_bytes, Some(buf)).await?
        } else {
            match self.accept(at, buf) {
                Some(leaf) => leaf.map(Part::Whole),
                None => self.read_wanted(op, at, scan.end_bytes, None).await?,
            }
        };
        match scan.judge(&leaf, on_edge) {
            Verdict::Counts => next.push_back(Item::Pair(Box::new(leaf))),
            Verdict::DoesNot => {}
            Verdict::Behind => return Ok(true),
        }
        Ok(false)
    }
}
