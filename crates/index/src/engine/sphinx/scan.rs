//! Ranges, forwards and backwards.
//!
//! What is still to be looked at is a list in the order of the scan: slots, each with what is known of the keys below, and leaves that
//! are read. Each round trip reads the first slots of the list, many at a time, and puts what they led to in their place. So
//! every key is looked at once, through slots that this operation read; each node and leaf is as it was at some instant of the scan.
//!
//! Where this thread can look at far memory itself, nothing is gained by reading many objects at a time: the first slot of the list is followed, and
//! what will be next is fetched into the processor's cache meanwhile.
//!
//! A subtree is left out if the hash of its prefix shows on which side of a bound it lies. Where a key of the bound is not on the way
//! (the hash is another), one key below tells the side for all.

use super::Tree;
use super::layout::{LeafRef, LeafState, NodeKind, NodeRef, Slot, Step, Target};
use super::node::leaf::Leaf;
use super::node::prefix::Prefixes;
use super::node::{InPlace, Node};
use super::read::{no_node, no_slot};
use super::restructure::common_bytes;
use crate::api::IndexError;
use crate::shared::surely;
use farwood_fabric::{Buf, GlobalAddr, Op, marks};
use std::cmp::Ordering;
use std::collections::VecDeque;
use std::ops::{Bound, Deref, RangeBounds};

/// Most nodes and leaves that are read at a time.
const MAX_PARALLEL: usize = 32;
/// Most bytes that are read at a time, beside the first object.
const MAX_PARALLEL_BYTES: usize = 256 << 10;
/// How many objects are fetched into the cache before they are looked at.
const MAX_EXPECTED: usize = 8;

/// A range of keys.
pub(super) type Range<'a> = (Bound<&'a [u8]>, Bound<&'a [u8]>);

/// One end of a range.
struct Edge<'a> {
    key: &'a [u8],
    prefixes: Prefixes<'a>,
}

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
    Pair(Box<Leaf<Buf>>),
}

/// What becomes of a leaf.
enum Verdict {
    Counts,
    /// Deleted, or outside of the range.
    DoesNot,
    /// Behind the range, in the order of the scan.
    Behind,
}

/// For each end of the range, whether it may lie within a subtree. Where neither does, keys need not be compared.
#[derive(Clone, Copy, Debug)]
struct OnEdge {
    start: bool,
    end: bool,
}

/// Where a subtree lies.
enum Side {
    /// Outside of the range.
    Outside,
    /// Behind the range, in the order of the scan.
    Behind,
    /// Some of it may be inside.
    Inside(OnEdge),
}

/// A scan under way.
struct Scan<'a> {
    range: Range<'a>,
    start: Option<Edge<'a>>,
    end: Option<Edge<'a>>,
    limit: usize,
    reverse: bool,
    /// How many objects are read at a time.
    parallel: usize,
    /// What comes next, in the order of the scan.
    ahead: VecDeque<Item>,
    /// Where pairs go, and how many went there.
    each: &'a mut dyn FnMut(&[u8], &[u8]),
    found: usize,
    /// The children of the node that was read last.
    children: Vec<(Step, Slot)>,
}

impl<'a> Edge<'a> {
    fn of(bound: Bound<&'a [u8]>, seed: u64) -> Option<Self> {
        match bound {
            Bound::Included(key) | Bound::Excluded(key) => {
                Some(Self { key, prefixes: Prefixes::of(seed, key) })
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

impl Item {
    /// How many pairs it stands for, at a guess: nodes that will not be needed are not read ahead.
    fn pairs(&self) -> usize {
        match self {
            Self::Node { on_edge, .. } if on_edge.start || on_edge.end => 1,
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
    fn place(&self) -> Option<(GlobalAddr, usize)> {
        match self {
            Self::Node { node, .. } => Some((node.addr, node.kind.bytes())),
            Self::Leaf { leaf, .. } => Some((leaf.addr, leaf.class.bytes())),
            Self::Pair(_) => None,
        }
    }
}

impl Scan<'_> {
    /// Takes the pairs at the head of the list.
    fn harvest(&mut self) {
        while self.found < self.limit && matches!(self.ahead.front(), Some(Item::Pair(_))) {
            if let Some(Item::Pair(pair)) = self.ahead.pop_front() {
                self.take(&pair);
            }
        }
    }

    fn take<B: Deref<Target = [u8]>>(&mut self, pair: &Leaf<B>) {
        (self.each)(pair.key(), pair.value());
        self.found += 1;
    }

    fn is_done(&self) -> bool {
        self.ahead.is_empty() || self.found >= self.limit
    }

    /// Where in the list are the first objects to be read, and of how many bytes.
    fn next_reads(&self) -> Vec<(usize, GlobalAddr, usize)> {
        let wanted = self.limit.saturating_sub(self.found).max(1);
        let (mut reads, mut bytes, mut pairs) = (Vec::new(), 0, 0);
        for (n, item) in self.ahead.iter().enumerate() {
            if reads.len() >= self.parallel || pairs >= wanted {
                break;
            }
            pairs += item.pairs();
            let Some((addr, len)) = item.place() else { continue };
            if bytes + len > MAX_PARALLEL_BYTES && !reads.is_empty() {
                break;
            }
            bytes += len;
            reads.push((n, addr, len));
        }
        reads
    }

    /// Lets the leaves at the head of the list be fetched into the cache. Of nodes only the first is near enough to be worth it.
    fn expect_leaves(&self, op: &Op) {
        for (n, item) in self.ahead.iter().take(MAX_EXPECTED).enumerate() {
            match (item, item.place()) {
                (Item::Node { .. }, _) if n > 0 => return,
                (_, Some((addr, len))) => op.expect(addr, len),
                _ => {}
            }
        }
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

    /// Whether a leaf counts.
    fn judge<B: Deref<Target = [u8]>>(&self, leaf: &Leaf<B>, on_edge: OnEdge) -> Verdict {
        let may_be_outside = on_edge.start || on_edge.end;
        if may_be_outside && self.is_beyond(leaf.key()) {
            return Verdict::Behind;
        }
        let is_outside = may_be_outside && !RangeBounds::<[u8]>::contains(&self.range, leaf.key());
        if is_outside || leaf.state() == LeafState::Deleted { Verdict::DoesNot } else { Verdict::Counts }
    }

    /// Puts those of `children` that may have keys within the range into the list, in the order of the scan: in front of all, or behind.
    fn put_children(
        &mut self,
        (node, depth): (NodeRef, usize),
        on_edge: OnEdge,
        in_front: bool,
    ) -> Result<(), IndexError> {
        let mut children = std::mem::take(&mut self.children);
        if self.reverse != in_front {
            children.reverse();
        }
        for (step, slot) in children.drain(..) {
            let side = |edge: &Option<Edge<'_>>, is_on: bool| match edge {
                Some(edge) if is_on => Some(edge.side(depth, step)),
                _ => None,
            };
            let (start, end) = (side(&self.start, on_edge.start), side(&self.end, on_edge.end));
            if start == Some(Ordering::Less) || end == Some(Ordering::Greater) {
                continue;
            }
            let on_edge = OnEdge { start: start == Some(Ordering::Equal), end: end == Some(Ordering::Equal) };
            let item = match slot.target() {
                Some(Target::Node(node)) => Item::Node { node, on_edge },
                Some(Target::Leaf(leaf)) => Item::Leaf { leaf, on_edge },
                _ => return Err(no_slot(node)),
            };
            if in_front {
                self.ahead.push_front(item);
            } else {
                self.ahead.push_back(item);
            }
        }
        self.children = children;
        Ok(())
    }
}

impl Tree {
    /// Hands pairs of a range to `each`; how many.
    pub(super) async fn range(
        &self,
        range: Range<'_>,
        limit: usize,
        reverse: bool,
        each: &mut dyn FnMut(&[u8], &[u8]),
    ) -> Result<usize, IndexError> {
        let op = self.endpoint.op();
        let seed = self.shared.seed;
        let (start, end) = (Edge::of(range.0, seed), Edge::of(range.1, seed));
        let on_edge = OnEdge { start: start.is_some(), end: end.is_some() };
        let ahead = VecDeque::from([Item::Node { node: self.shared.root, on_edge }]);
        let parallel = if self.shared.config.switches.batched_scans { MAX_PARALLEL } else { 1 };
        let (found, children) = (0, Vec::new());
        let mut scan = Scan { range, start, end, limit, reverse, parallel, ahead, each, found, children };
        let mut leaf = Vec::new();
        let is_immediate = self.endpoint.capabilities().immediate;
        while !scan.is_done() {
            if is_immediate {
                if let Some((leaf, on_edge)) = self.look_at_leaves(&op, &mut scan, &mut leaf)? {
                    self.reread(&op, &mut scan, leaf, on_edge).await?;
                }
                if !scan.is_done() {
                    self.look_at_node(&op, &mut scan).await?;
                }
            } else {
                self.look_ahead(&op, &mut scan).await?;
                scan.harvest();
            }
        }
        Ok(scan.found)
    }

    /// Opens the node at the head of the list, if there is one.
    async fn look_at_node(&self, op: &Op, scan: &mut Scan<'_>) -> Result<(), IndexError> {
        let Some(&Item::Node { node, on_edge }) = scan.ahead.front() else { return Ok(()) };
        scan.ahead.pop_front();
        let children = &mut scan.children;
        let seen = op.look(node.addr, node.kind.bytes(), |words| {
            let image = Node::accept(node.kind, InPlace(words))?;
            image.children_into(children);
            Some((image.head.depth, image.hash()))
        });
        let seen = if let Some(seen) = seen {
            seen?
        } else {
            let image = self.read_node(op, node).await?;
            image.children_into(children);
            Some((image.head.depth, image.hash()))
        };
        let (depth, hash) = seen.ok_or_else(|| no_node(node))?;
        match self.side_of(op, scan, (node, depth, hash), on_edge).await? {
            Side::Outside => {}
            Side::Behind => scan.ahead.clear(),
            Side::Inside(on_edge) => scan.put_children((node, depth), on_edge, true)?,
        }
        scan.expect_leaves(op);
        self.endpoint.breathe().await;
        Ok(())
    }

    /// Takes the pairs of the leaves at the head of the list, without waiting for anything: it stops at one that is torn, and returns it.
    /// `scratch` is room for a leaf.
    fn look_at_leaves(
        &self,
        op: &Op,
        scan: &mut Scan<'_>,
        scratch: &mut Vec<u8>,
    ) -> Result<Option<(LeafRef, OnEdge)>, IndexError> {
        while !scan.is_done() {
            let (at, on_edge) = match scan.ahead.front() {
                Some(Item::Leaf { leaf, on_edge }) => (*leaf, *on_edge),
                _ => break,
            };
            scan.ahead.pop_front();
            if let Some((addr, len)) = scan.ahead.get(MAX_EXPECTED - 1).and_then(Item::place) {
                op.expect(addr, len);
            }
            let whole = match op.look(at.addr, at.class.bytes(), |words| words.copy_to(scratch)) {
                Some(seen) => seen.map(|()| self.accept(at, &scratch[..]))?,
                None => None,
            };
            let Some(leaf) = whole else { return Ok(Some((at, on_edge))) };
            match scan.judge(&leaf, on_edge) {
                Verdict::Counts => scan.take(&leaf),
                Verdict::DoesNot => {}
                Verdict::Behind => scan.ahead.clear(),
            }
        }
        Ok(None)
    }

    /// Takes the pair of a leaf that was torn.
    #[cold]
    async fn reread(
        &self,
        op: &Op,
        scan: &mut Scan<'_>,
        at: LeafRef,
        on_edge: OnEdge,
    ) -> Result<(), IndexError> {
        let leaf = self.read_leaf(op, at).await?;
        match scan.judge(&leaf, on_edge) {
            Verdict::Counts => scan.take(&leaf),
            Verdict::DoesNot => {}
            Verdict::Behind => scan.ahead.clear(),
        }
        Ok(())
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
                Item::Leaf { leaf, on_edge } => self.open_leaf(op, scan, (leaf, on_edge), buf).await?,
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
        (node, on_edge): (NodeRef, OnEdge),
        buf: Buf,
    ) -> Result<bool, IndexError> {
        let image = Node::accept(node.kind, buf).ok_or_else(|| no_node(node))?;
        let depth = image.head.depth;
        match self.side_of(op, scan, (node, depth, image.hash()), on_edge).await? {
            Side::Outside => Ok(false),
            Side::Behind => Ok(true),
            Side::Inside(on_edge) => {
                image.children_into(&mut scan.children);
                scan.put_children((node, depth), on_edge, false).map(|()| false)
            }
        }
    }

    /// Where a subtree lies that edges of the range may lie within.
    async fn side_of(
        &self,
        op: &Op,
        scan: &Scan<'_>,
        (node, depth, hash): (NodeRef, usize, u64),
        mut on_edge: OnEdge,
    ) -> Result<Side, IndexError> {
        let parts = |edge: &Option<Edge<'_>>, is_on: bool| {
            let known = edge.as_ref().filter(|_| is_on).map(|edge| edge.prefixes.get(depth));
            known.is_some_and(|known| known != Some(hash))
        };
        if parts(&scan.start, on_edge.start) || parts(&scan.end, on_edge.end) {
            let Some(key) = Box::pin(self.some_key(op, node)).await? else { return Ok(Side::Outside) };
            let parted = |edge: &Option<Edge<'_>>, is_on: bool| {
                let edge = edge.as_ref().filter(|_| is_on)?;
                (common_bytes(edge.key, &key) < depth).then(|| key.as_slice().cmp(edge.key))
            };
            // The whole subtree lies on one side of an edge that is not within it.
            let (start, end) = (parted(&scan.start, on_edge.start), parted(&scan.end, on_edge.end));
            match (start, end) {
                (Some(Ordering::Less), _) => {
                    return Ok(if scan.reverse { Side::Behind } else { Side::Outside });
                }
                (_, Some(Ordering::Greater)) => {
                    return Ok(if scan.reverse { Side::Outside } else { Side::Behind });
                }
                _ => {}
            }
            on_edge.start &= start.is_none();
            on_edge.end &= end.is_none();
        }
        Ok(Side::Inside(on_edge))
    }

    /// Puts a pair in the place of its leaf, if it counts. Whether the range ends here.
    async fn open_leaf(
        &self,
        op: &Op,
        scan: &mut Scan<'_>,
        (at, on_edge): (LeafRef, OnEdge),
        buf: Buf,
    ) -> Result<bool, IndexError> {
        let leaf = match self.accept(at, buf) {
            Some(leaf) => leaf,
            None => self.read_leaf(op, at).await?,
        };
        match scan.judge(&leaf, on_edge) {
            Verdict::Counts => scan.ahead.push_back(Item::Pair(Box::new(leaf))),
            Verdict::DoesNot => {}
            Verdict::Behind => return Ok(true),
        }
        Ok(false)
    }
}
