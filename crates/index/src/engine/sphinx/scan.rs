//! Ranges, forwards and backwards.
//!
//! What is still to be looked at is a list in the order of the scan: slots, each with what is known of the keys below, and leaves that
//! are read. Each round trip reads the first slots of the list, many at a time, and puts what they led to in their place. So
//! every key is looked at once, through slots that this operation read; each node and leaf is as it was at some instant of the scan.
//!
//! A subtree is left out if the hash of its prefix shows on which side of a bound it lies. Where a key of the bound is not on the way
//! (the hash is another), one key below tells the side for all.

use super::layout::{LeafRef, LeafState, NodeRef, Step, Target};
use super::node::Node;
use super::node::prefix::Prefixes;
use super::restructure::common_bytes;
use super::{Tree, corrupt};
use crate::api::{IndexError, KeyValue};
use crate::shared::surely;
use farwood_fabric::{Buf, Op, marks};
use std::cmp::Ordering;
use std::collections::VecDeque;
use std::ops::{Bound, RangeBounds};

/// Most nodes and leaves that are read at a time.
const MAX_PARALLEL: usize = 32;
/// Most bytes that are read at a time, beside the first object.
const MAX_PARALLEL_BYTES: usize = 256 << 10;

/// A range of keys.
pub(super) type Range<'a> = (Bound<&'a [u8]>, Bound<&'a [u8]>);

/// One end of a range.
struct Edge<'a> {
    key: &'a [u8],
    prefixes: Prefixes,
}

/// Something in the order of keys that is still to be looked at.
enum Item {
    Node { node: NodeRef, on_edge: OnEdge },
    Leaf(LeafRef),
    Pair(KeyValue),
}

/// For each end of the range, whether it may lie within a subtree.
#[derive(Clone, Copy, Debug)]
struct OnEdge {
    start: bool,
    end: bool,
}

/// A scan under way.
struct Scan<'a> {
    range: Range<'a>,
    start: Option<Edge<'a>>,
    end: Option<Edge<'a>>,
    limit: usize,
    reverse: bool,
    /// What comes next, in the order of the scan.
    ahead: VecDeque<Item>,
    found: Vec<KeyValue>,
}

impl<'a> Edge<'a> {
    fn of(bound: Bound<&'a [u8]>, seed: u64) -> Option<Self> {
        match bound {
            Bound::Included(key) | Bound::Excluded(key) => {
                Some(Self { key, prefixes: Prefixes::new(seed, key) })
            }
            Bound::Unbounded => None,
        }
    }

    /// Where the keys below a step of a node lie, if the node's prefix is one of the edge's.
    fn side(&self, depth: usize, step: Step) -> Ordering {
        match Step::of(self.key, depth) {
            Some(ours) => step.cmp(&ours),
            // The edge is shorter than the prefix, so its hash cannot have been the same.
            None => Ordering::Greater,
        }
    }
}

impl Scan<'_> {
    /// Takes the pairs at the head of the list.
    fn harvest(&mut self) {
        while self.found.len() < self.limit && matches!(self.ahead.front(), Some(Item::Pair(_))) {
            if let Some(Item::Pair(pair)) = self.ahead.pop_front() {
                self.found.push(pair);
            }
        }
    }

    fn is_done(&self) -> bool {
        self.ahead.is_empty() || self.found.len() >= self.limit
    }

    /// Where in the list are the first objects to be read, and of how many bytes.
    fn next_reads(&self) -> Vec<(usize, farwood_fabric::GlobalAddr, usize)> {
        let most = self.limit.saturating_sub(self.found.len()).clamp(1, MAX_PARALLEL);
        let (mut reads, mut bytes, mut pairs) = (Vec::new(), 0, 0);
        for (n, item) in self.ahead.iter().enumerate() {
            let (addr, len) = match item {
                Item::Node { node, .. } => (node.addr, node.kind.bytes()),
                Item::Leaf(leaf) => (leaf.addr, leaf.class.bytes()),
                Item::Pair(_) => {
                    pairs += 1;
                    continue;
                }
            };
            if reads.len() + pairs >= most || (bytes + len > MAX_PARALLEL_BYTES && !reads.is_empty()) {
                break;
            }
            bytes += len;
            reads.push((n, addr, len));
        }
        reads
    }

    /// Whether the range is at an end with this key, in the order of the scan.
    fn is_beyond(&self, key: &[u8]) -> bool {
        let (start, end) = self.range;
        if self.reverse {
            !RangeBounds::<[u8]>::contains(&(start, Bound::Unbounded), key)
        } else {
            !RangeBounds::<[u8]>::contains(&(Bound::Unbounded, end), key)
        }
    }

    /// The children of a node that may have keys within the range, in the order of the scan.
    fn children(&self, image: &Node<Buf>, on_edge: OnEdge) -> Result<Vec<Item>, IndexError> {
        let depth = image.head.depth;
        let mut items = Vec::new();
        for (step, slot) in image.children() {
            let side = |edge: &Option<Edge<'_>>, is_on: bool| match edge {
                Some(edge) if is_on => Some(edge.side(depth, step)),
                _ => None,
            };
            let (start, end) = (side(&self.start, on_edge.start), side(&self.end, on_edge.end));
            if start == Some(Ordering::Less) || end == Some(Ordering::Greater) {
                continue;
            }
            let on_edge = OnEdge { start: start == Some(Ordering::Equal), end: end == Some(Ordering::Equal) };
            match slot.target() {
                Some(Target::Node(node)) => items.push(Item::Node { node, on_edge }),
                Some(Target::Leaf(leaf)) => items.push(Item::Leaf(leaf)),
                _ => return Err(corrupt(format!("a slot of a node at depth {depth} is none"))),
            }
        }
        if self.reverse {
            items.reverse();
        }
        Ok(items)
    }
}

impl Tree {
    pub(super) async fn range(
        &self,
        range: Range<'_>,
        limit: usize,
        reverse: bool,
    ) -> Result<Vec<KeyValue>, IndexError> {
        let op = self.endpoint.op();
        let seed = self.shared.seed;
        let (start, end) = (Edge::of(range.0, seed), Edge::of(range.1, seed));
        let on_edge = OnEdge { start: start.is_some(), end: end.is_some() };
        let ahead = VecDeque::from([Item::Node { node: self.shared.root, on_edge }]);
        let mut scan = Scan { range, start, end, limit, reverse, ahead, found: Vec::new() };
        while !scan.is_done() {
            self.look_ahead(&op, &mut scan).await?;
            scan.harvest();
        }
        Ok(scan.found)
    }

    /// Reads what comes next, all at once, and puts what it leads to in its place.
    async fn look_ahead(&self, op: &Op, scan: &mut Scan<'_>) -> Result<(), IndexError> {
        let reads = scan.next_reads();
        if reads.len() > 1 {
            marks::hit("parallel_reads");
        }
        let places: Vec<_> = reads.iter().map(|(_, addr, len)| (*addr, *len)).collect();
        let bufs = surely::read_many(op, &places).await?;
        let mut bufs = reads.iter().map(|(n, ..)| *n).zip(bufs).peekable();
        let ahead = std::mem::take(&mut scan.ahead);
        let mut ahead = ahead.into_iter().enumerate();
        for (n, item) in ahead.by_ref() {
            let Some((_, buf)) = bufs.next_if(|(at, _)| *at == n) else {
                scan.ahead.push_back(item);
                continue;
            };
            let is_over = match item {
                Item::Node { node, on_edge } => self.open_node(op, scan, (node, on_edge), buf).await?,
                Item::Leaf(leaf) => self.open_leaf(op, scan, leaf, buf).await?,
                pair @ Item::Pair(_) => {
                    scan.ahead.push_back(pair);
                    false
                }
            };
            if is_over {
                return Ok(());
            }
            if bufs.peek().is_none() {
                break;
            }
        }
        scan.ahead.extend(ahead.map(|(_, item)| item));
        Ok(())
    }

    /// Puts a node's children in its place. Whether the range ends here.
    async fn open_node(
        &self,
        op: &Op,
        scan: &mut Scan<'_>,
        (node, mut on_edge): (NodeRef, OnEdge),
        buf: Buf,
    ) -> Result<bool, IndexError> {
        let Some(image) = Node::accept(node.kind, buf) else {
            return Err(corrupt(format!("there is no {:?} at {}", node.kind, node.addr)));
        };
        let parts = |edge: &Option<Edge<'_>>, is_on: bool| {
            let hash = edge.as_ref().filter(|_| is_on).map(|edge| edge.prefixes.get(image.head.depth));
            hash.is_some_and(|hash| hash != Some(image.hash()))
        };
        if parts(&scan.start, on_edge.start) || parts(&scan.end, on_edge.end) {
            let Some(key) = self.some_key(op, node).await? else { return Ok(false) };
            let parted = |edge: &Option<Edge<'_>>, is_on: bool| {
                let edge = edge.as_ref().filter(|_| is_on)?;
                (common_bytes(edge.key, &key) < image.head.depth).then(|| key.as_slice().cmp(edge.key))
            };
            // The whole subtree lies on one side of an edge that is not within it.
            let (start, end) = (parted(&scan.start, on_edge.start), parted(&scan.end, on_edge.end));
            match (start, end) {
                (Some(Ordering::Less), _) => return Ok(scan.reverse),
                (_, Some(Ordering::Greater)) => return Ok(!scan.reverse),
                _ => {}
            }
            on_edge.start &= start.is_none();
            on_edge.end &= end.is_none();
        }
        let children = scan.children(&image, on_edge)?;
        scan.ahead.extend(children);
        Ok(false)
    }

    /// Puts a pair in the place of its leaf, if it counts. Whether the range ends here.
    async fn open_leaf(
        &self,
        op: &Op,
        scan: &mut Scan<'_>,
        at: LeafRef,
        buf: Buf,
    ) -> Result<bool, IndexError> {
        let leaf = match self.accept(at, buf) {
            Some(leaf) => leaf,
            None => self.read_leaf(op, at).await?,
        };
        if scan.is_beyond(leaf.key()) {
            return Ok(true);
        }
        let is_inside = RangeBounds::<[u8]>::contains(&scan.range, leaf.key());
        if is_inside && leaf.state() != LeafState::Deleted {
            scan.ahead.push_back(Item::Pair((leaf.key().to_vec(), leaf.value().to_vec())));
        }
        Ok(false)
    }
}
