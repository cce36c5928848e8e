//! Ranges, forwards and backwards.
//!
//! A cursor is the key from which on (or down from which) nothing is known yet. Leaves are read several at a time, as the cache names
//! them; one is taken if it is whole and covers the cursor, which then moves to its other end. Where the cache does not lead
//! on, the leaf is looked for like any other. So a scan covers every key once, whatever the tree does meanwhile; each block of a leaf is as it
//! was at some instant of the scan.
//!
//! **A key in two slots.** Blocks are read at different instants, so a key that was deleted and inserted again meanwhile can be seen in two
//! slots. What either says was so when its block was read, and a scan owes each key one instant of its own: one of them is the answer, and
//! it does not matter which. (That a key seen in no slot was nowhere at some instant is shown in `node`.)

use super::Tree;
use super::node::{Head, Node};
use super::read::{MAX_DESCENTS, Trust};
use crate::api::{IndexError, KeyValue};
use crate::shared::surely;
use farwood_fabric::{Op, marks};
use std::ops::{Bound, RangeBounds};

/// Most leaves that are read at a time.
const MAX_PARALLEL: usize = 16;

/// A scan under way.
struct Scan<'a> {
    range: (Bound<&'a [u8]>, Bound<&'a [u8]>),
    limit: usize,
    reverse: bool,
    /// `None` when all is covered.
    cursor: Option<Vec<u8>>,
    found: Vec<KeyValue>,
}

impl Scan<'_> {
    fn is_done(&self) -> bool {
        let beyond = |cursor: &Vec<u8>| match (self.reverse, self.range) {
            (false, (_, Bound::Included(end))) => cursor.as_slice() > end,
            (false, (_, Bound::Excluded(end))) => cursor.as_slice() >= end,
            (true, (Bound::Included(start), _)) => cursor.as_slice() < start,
            (true, (Bound::Excluded(start), _)) => cursor.as_slice() <= start,
            _ => false,
        };
        self.found.len() >= self.limit || self.cursor.as_ref().is_none_or(beyond)
    }

    /// Takes what a leaf has to add, and moves on.
    fn take(&mut self, leaf: &Node) {
        let Some(cursor) = &self.cursor else { return };
        let mut slots = leaf.sorted();
        let read = slots.len();
        slots.dedup_by(|a, b| leaf.key(*a) == leaf.key(*b));
        if slots.len() < read {
            marks::hit("key_in_two_slots");
        }
        slots.retain(|slot| {
            let key = leaf.key(*slot);
            let ahead = if self.reverse { key <= cursor.as_slice() } else { key >= cursor.as_slice() };
            ahead && RangeBounds::<[u8]>::contains(&self.range, key)
        });
        if self.reverse {
            slots.reverse();
        }
        slots.truncate(self.limit - self.found.len());
        self.found.extend(slots.iter().map(|slot| (leaf.key(*slot).to_vec(), leaf.value(*slot).to_vec())));
        self.cursor = if self.reverse { predecessor(leaf.low()) } else { leaf.high().map(<[u8]>::to_vec) };
    }
}

/// The greatest key of the same length below `key`.
fn predecessor(key: &[u8]) -> Option<Vec<u8>> {
    let mut key = key.to_vec();
    for byte in key.iter_mut().rev() {
        *byte = byte.wrapping_sub(1);
        if *byte != u8::MAX {
            return Some(key);
        }
    }
    None
}

/// A bound cut or filled up to the length of keys.
fn fit(bound: &[u8], key_bytes: usize, fill: u8) -> Vec<u8> {
    let mut key = bound[..bound.len().min(key_bytes)].to_vec();
    key.resize(key_bytes, fill);
    key
}

impl Tree {
    pub(super) async fn range(
        &self,
        start: Bound<&[u8]>,
        end: Bound<&[u8]>,
        limit: usize,
        reverse: bool,
    ) -> Result<Vec<KeyValue>, IndexError> {
        let op = self.endpoint.op();
        self.admit(&op)?;
        let key_bytes = self.shared.config.key_bytes;
        let (from, fill) = if reverse { (end, u8::MAX) } else { (start, 0) };
        // A little too wide rather than too narrow: what is outside is left out when leaves are taken.
        let cursor = match from {
            Bound::Included(bound) | Bound::Excluded(bound) => fit(bound, key_bytes, fill),
            Bound::Unbounded => vec![fill; key_bytes],
        };
        let mut scan = Scan { range: (start, end), limit, reverse, cursor: Some(cursor), found: Vec::new() };
        while !scan.is_done() {
            self.read_ahead(&op, &mut scan).await?;
            if let (false, Some(cursor)) = (scan.is_done(), scan.cursor.clone()) {
                let leaf = self.whole_leaf(&op, &cursor).await?;
                scan.take(&leaf);
            }
        }
        Ok(scan.found)
    }

    /// Reads the next leaves that the cache knows of, all at once, and takes them as far as they lead on.
    async fn read_ahead(&self, op: &Op, scan: &mut Scan<'_>) -> Result<(), IndexError> {
        let Some(cursor) = scan.cursor.clone() else { return Ok(()) };
        let missing = scan.limit.saturating_sub(scan.found.len());
        // Leaves are half full at least, as a rule; those at the ends give less.
        let leaves = missing.div_ceil((self.shared.layouts.leaf.capacity() / 2).max(1)).saturating_add(1);
        let places = self.shared.cache.children(1, &cursor, leaves.min(MAX_PARALLEL), scan.reverse);
        if places.len() < 2 {
            return Ok(());
        }
        marks::hit("parallel_leaf_reads");
        let bytes = self.shared.config.node_bytes;
        let reads: Vec<_> = places.iter().map(|addr| (*addr, bytes)).collect();
        let bufs = match op.read_many(&reads).await {
            Ok(bufs) => bufs,
            Err(error) => {
                surely::reconnected(op, error).await?;
                return Ok(());
            }
        };
        for (addr, buf) in places.into_iter().zip(bufs) {
            let Some(cursor) = scan.cursor.as_ref() else { return Ok(()) };
            if !self.is_expected(Head::of(&buf), Trust::Hint, Some(0)) {
                self.shared.cache.forget(1, cursor);
                return Ok(());
            }
            let Ok(leaf) = Node::accept(&self.shared.layouts, self.shared.place(addr), buf) else {
                return Ok(());
            };
            if !leaf.is_whole() {
                return Ok(());
            }
            if !leaf.covers(cursor) && !self.shared.config.sabotage.scan_trusts_cache {
                self.shared.cache.forget(1, cursor);
                return Ok(());
            }
            scan.take(&leaf);
            if scan.is_done() {
                return Ok(());
            }
        }
        Ok(())
    }

    /// The leaf that covers `key`, whole.
    async fn whole_leaf(&self, op: &Op, key: &[u8]) -> Result<Node, IndexError> {
        for descent in 0..MAX_DESCENTS {
            let mut target = self.locate_leaf(op, key, descent).await?;
            while let Some(leaf) = self.read_whole(op, target, Some(0)).await? {
                if leaf.covers(key) {
                    return Ok(leaf);
                }
                if !leaf.is_beyond(key) {
                    break;
                }
                target = self.go_right(op, &leaf, target, key);
            }
            self.forget_way(op, target, 0, key);
            op.count_retry();
        }
        Err(IndexError::Contended { what: "the way to a leaf", attempts: MAX_DESCENTS })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn predecessors_borrow() {
        assert_eq!(predecessor(&[1, 0, 0]), Some(vec![0, 255, 255]));
        assert_eq!(predecessor(&[0, 7]), Some(vec![0, 6]));
        assert_eq!(predecessor(&[0, 0]), None);
    }
}
