//! Ranges, forwards and backwards.
//!
//! A scan goes through the tree in the order of keys and keeps a list of what is still to be looked at: slots that this operation read, each with
//! what is known of the keys below.
//!
//! **Every key once, each at an instant of its own.** A slot led to all keys of its step at the instant when its word was read, which is one of
//! the scan's. What was found below it, a leaf that has moved or a node that is dead included, was so then or later: they do not change once
//! they are frozen, and were linked until then. So each slot gives a true answer for all keys of its step, and of a step that was seen in two
//! slots of one node only one is followed (`Node::distinct_children`): the keys of different steps are different, and in order.
//!
//! | file | what it is |
//! |---|---|
//! | `far` | where each look costs a round trip: many at a time |
//! | `near` | where this thread can look at far memory itself: one at a time, while the next are on their way into the cache |
//!
//! A subtree is left out if the hash of its prefix shows on which side of a bound it lies. Where a key of the bound is not on the way
//! (the hash is another), one key below tells the side for all.

mod far;
mod near;

pub(super) use near::Room;

use super::Tree;
use super::layout::{LINE, LeafRef, LeafState, MAX_KEY_BYTES, NodeRef, Step, leaf_bytes};
use super::node::leaf::{Leaf, Outline};
use super::node::prefix::Prefixes;
use super::restructure::common_bytes;
use crate::api::IndexError;
use crate::shared::surely;
use farwood_fabric::{Buf, Op};
use std::cmp::Ordering;
use std::ops::{Bound, Deref, RangeBounds};

/// Of a leaf of whose value only the end is wanted so much is read at first: enough for keys of usual lengths. Then the end.
const FIRST_BYTES: usize = 256;

/// A range of keys.
pub(super) type Range<'a> = (Bound<&'a [u8]>, Bound<&'a [u8]>);

/// One end of a range.
struct Edge<'a> {
    key: &'a [u8],
    prefixes: Prefixes<'a>,
}

/// Both ends, where there are any.
struct Edges<'a> {
    start: Option<Edge<'a>>,
    end: Option<Edge<'a>>,
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

/// What was read of a leaf.
#[derive(Debug)]
enum Part {
    Whole(Buf),
    /// Its key, and the end of its value.
    End(Vec<u8>),
}

impl Deref for Part {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Whole(bytes) => bytes,
            Self::End(bytes) => bytes,
        }
    }
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
    edges: Edges<'a>,
    limit: usize,
    reverse: bool,
    /// Of values only so many bytes are wanted, and unchecked.
    end_bytes: Option<usize>,
    /// Of each step one slot is followed. Always, but for a test of the tests.
    distinct: bool,
    /// Where pairs go, until it wants no more, and how many went there.
    each: &'a mut dyn FnMut(&[u8], &[u8]) -> bool,
    found: usize,
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

impl OnEdge {
    fn is_on_any(self) -> bool {
        self.start || self.end
    }
}

impl Edges<'_> {
    /// The edges that may lie below a step of a node on some; `None` if all of that is outside.
    fn below(&self, depth: usize, step: Step, on_edge: OnEdge) -> Option<OnEdge> {
        let side = |edge: &Option<Edge<'_>>, is_on: bool| match edge {
            Some(edge) if is_on => Some(edge.side(depth, step)),
            _ => None,
        };
        let (start, end) = (side(&self.start, on_edge.start), side(&self.end, on_edge.end));
        if start == Some(Ordering::Less) || end == Some(Ordering::Greater) {
            return None;
        }
        Some(OnEdge { start: start == Some(Ordering::Equal), end: end == Some(Ordering::Equal) })
    }

    /// Whether an edge that might lie within a subtree cannot be told by the hash of its prefix.
    fn are_unclear(&self, depth: usize, hash: u64, on_edge: OnEdge) -> bool {
        let parts = |edge: &Option<Edge<'_>>, is_on: bool| {
            let known = edge.as_ref().filter(|_| is_on).map(|edge| edge.prefixes.get(depth));
            known.is_some_and(|known| known != Some(hash))
        };
        parts(&self.start, on_edge.start) || parts(&self.end, on_edge.end)
    }
}

impl Scan<'_> {
    fn take<B: Deref<Target = [u8]>>(&mut self, pair: &Leaf<B>) {
        let value = pair.value();
        let wanted = self.end_bytes.map_or(value.len(), |end_bytes| end_bytes.min(value.len()));
        self.found += 1;
        if !(self.each)(pair.key(), &value[value.len() - wanted..]) {
            self.limit = self.found;
        }
    }

    /// Takes the pair of a leaf, if it counts. Whether the range goes on behind it.
    fn weigh<B: Deref<Target = [u8]>>(&mut self, leaf: &Leaf<B>, on_edge: OnEdge) -> bool {
        match self.judge(leaf, on_edge) {
            Verdict::Counts => self.take(leaf),
            Verdict::DoesNot => {}
            Verdict::Behind => return false,
        }
        true
    }

    /// How many bytes of a leaf are read at first.
    fn first_bytes(&self, leaf: LeafRef) -> usize {
        match self.end_bytes {
            None => leaf.class.bytes(),
            Some(_) => leaf.class.bytes().min(FIRST_BYTES),
        }
    }

    /// How many pairs are still wanted.
    fn wanted(&self) -> usize {
        self.limit.saturating_sub(self.found)
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
        let may_be_outside = on_edge.is_on_any();
        if may_be_outside && self.is_beyond(leaf.key()) {
            return Verdict::Behind;
        }
        let is_outside = may_be_outside && !RangeBounds::<[u8]>::contains(&self.range, leaf.key());
        if is_outside || leaf.state() == LeafState::Deleted { Verdict::DoesNot } else { Verdict::Counts }
    }
}

impl Tree {
    /// Hands pairs of a range to `each`, until it wants no more; how many.
    pub(super) async fn range(
        &self,
        range: Range<'_>,
        limit: usize,
        reverse: bool,
        end_bytes: Option<usize>,
        each: &mut dyn FnMut(&[u8], &[u8]) -> bool,
    ) -> Result<usize, IndexError> {
        let op = self.endpoint.op();
        self.admit(&op)?;
        let seed = self.shared.seed;
        let edges = Edges { start: Edge::of(range.0, seed), end: Edge::of(range.1, seed) };
        let on_edge = OnEdge { start: edges.start.is_some(), end: edges.end.is_some() };
        let distinct = !self.shared.config.sabotage.scan_trusts_moved_leaf;
        let mut scan = Scan { range, edges, limit, reverse, end_bytes, distinct, each, found: 0 };
        let root = self.shared.root;
        if self.endpoint.capabilities().immediate {
            self.scan_near(&op, &mut scan, root, on_edge).await?;
        } else {
            self.scan_far(&op, &mut scan, root, on_edge).await?;
        }
        Ok(scan.found)
    }

    /// READs as much of a leaf as is wanted; `first` are its first bytes, if they were read.
    async fn read_wanted(
        &self,
        op: &Op,
        at: LeafRef,
        end_bytes: Option<usize>,
        first: Option<Buf>,
    ) -> Result<Leaf<Part>, IndexError> {
        let most = at.class.bytes();
        if let Some(end_bytes) = end_bytes.filter(|_| most > FIRST_BYTES) {
            let outline = |first: &Buf| Outline::of(first, end_bytes, most);
            let mut first = first;
            if first.as_ref().and_then(outline).is_none() {
                // Not read yet, or the key is longer than usual.
                let bytes = leaf_bytes(MAX_KEY_BYTES, 0).next_multiple_of(LINE).min(most);
                first = Some(surely::read(op, at.addr, bytes).await?);
            }
            if let Some((first, outline)) = first.as_ref().and_then(|first| Some((first, outline(first)?))) {
                if outline.end_bytes == 0 {
                    return Ok(outline.with_end(first, &[]).map(Part::End));
                }
                let (from, to) = outline.words();
                let words = surely::read(op, at.addr.add(from as u64), to - from).await?;
                let end = &words[outline.end_at - from..][..outline.end_bytes];
                return Ok(outline.with_end(first, end).map(Part::End));
            }
        }
        Ok(self.read_leaf(op, at).await?.map(Part::Whole))
    }

    /// Where a subtree lies that edges of the range may lie within.
    async fn side_of(
        &self,
        op: &Op,
        scan: &Scan<'_>,
        (node, depth, hash): (NodeRef, usize, u64),
        mut on_edge: OnEdge,
    ) -> Result<Side, IndexError> {
        if scan.edges.are_unclear(depth, hash, on_edge) {
            let Some(key) = Box::pin(self.some_key(op, node)).await? else { return Ok(Side::Outside) };
            let parted = |edge: &Option<Edge<'_>>, is_on: bool| {
                let edge = edge.as_ref().filter(|_| is_on)?;
                (common_bytes(edge.key, &key) < depth).then(|| key.as_slice().cmp(edge.key))
            };
            // The whole subtree lies on one side of an edge that is not within it.
            let (start, end) =
                (parted(&scan.edges.start, on_edge.start), parted(&scan.edges.end, on_edge.end));
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
}
