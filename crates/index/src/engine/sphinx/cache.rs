//! How a compute server finds inner nodes by their prefix: the hash tables of the memory servers (III-A), and the filter that tells which
//! prefixes are worth asking for (III-B).
//!
//! ```text
//! hash entry   62          51 50     48 47                        0
//!              [ fingerprint 12 ] [ kind 3 ] [ packed address 48 ]
//! ```
//!
//! 1. The filter names the prefixes of a key that may have nodes, longest first.
//! 2. READ the buckets of the first one's hash: one round trip. Those with its fingerprint lead to nodes. (And those of the second one's, if the
//!    first is likely to be a false positive.)
//! 3. READ the node: head first, then the rest, in one batch. If it is linked, alive, and has this very prefix, the way goes on from there.
//!    If not, the next shorter prefix, and in the end the root.
//!
//! **Entries are hints.** They are written when a node has been linked and when it has been replaced, by whoever did that; if it dies between, an entry is
//! missing or out of date, and whoever notices mends it. There are none before somebody has come who asks the tables: where memory is
//! mapped nobody does, and to keep them is a tenth of what an insert costs.
//!
//! **What makes a hint safe**: a node that is linked and alive is part of the tree. Its memory may serve anything else once nothing leads
//! there but entries that a dead session left, since flushes do not reach those. So a node counts only with the hash of the prefix: 64 bits
//! keyed by the index's random seed, which other bytes have once in 10^19 looks. Within one operation memory does not change what it
//! serves, as its pin holds up the flush. The head is read first, since without it the rest might be of a former life of this memory: once
//! the node was seen linked in this operation, its epoch keeps it.

use super::filter::Filter;
use super::layout::{Head, NODE_HASH_AT, NODE_HEAD_AT, NODE_LINKED_AT, NodeKind, NodeRef, Slot, Step};
use super::node::Node;
use super::node::prefix::{self, Prefixes};
use super::read::{Stop, Way};
use super::table::{self, Candidates, Nodes, Probe, Table};
use super::{Shared, TABLES_IN_USE_AT, Tree};
use crate::api::IndexError;
use crate::shared::surely;
use farwood_fabric::addr::PackedAddr;
use farwood_fabric::{Buf, GlobalAddr, Op, marks};
use smallvec::SmallVec;
use std::sync::atomic::{AtomicU32, Ordering};

/// How many prefixes are asked for before the way begins at the root.
const MAX_PROBES: usize = 4;
/// How many prefixes are asked for at a time where there is no filter.
const PREFIXES_AT_A_TIME: usize = 64;
const KIND_SHIFT: u32 = PackedAddr::BITS;
const FINGERPRINT_SHIFT: u32 = KIND_SHIFT + 3;
const FINGERPRINT_BITS: u32 = 12;
const _: () = assert!(FINGERPRINT_SHIFT + FINGERPRINT_BITS == 63 && table::MAX_ENTRY == (1 << 63) - 1);
const _: () = assert!(table::HASH_BITS + FINGERPRINT_BITS <= 64 && (NodeKind::N256 as u64) < 8);

/// What a compute server knows of the prefixes that have nodes.
#[derive(Debug)]
pub(super) struct Finder {
    /// One for each memory server, in the order of their numbers.
    pub(super) tables: Vec<Table>,
    pub(super) filter: Option<Filter>,
    pub(super) doubts: Doubts,
}

/// How often the longest prefix that the filter knows turned out to have no node, by how much longer it is than the next one that the filter
/// knows. Nodes of dense keys are a byte apart, so a prefix that stands alone is almost always a false positive there, and never where
/// keys share long parts. Where doubt has proved right, both prefixes are asked for in the same round trip.
#[derive(Default, Debug)]
pub(super) struct Doubts([AtomicU32; 16]);

impl Doubts {
    const ONE: u32 = 1 << 16;
    /// The share from which on a second prefix is asked for too.
    const LIKELY: u32 = Self::ONE / 8;

    fn of(&self, gap: usize) -> &AtomicU32 {
        &self.0[gap.min(self.0.len() - 1)]
    }

    fn is_likely_false(&self, gap: usize) -> bool {
        self.of(gap).load(Ordering::Relaxed) > Self::LIKELY
    }

    /// Notes how it was this time. What threads note at the same time may be lost, and only what changes something is written, so that they do
    /// not take the line from each other.
    fn note(&self, gap: usize, was_false: bool) {
        let before = self.of(gap).load(Ordering::Relaxed);
        let after = before - before / 16 + if was_false { Self::ONE / 16 } else { 0 };
        if after != before {
            self.of(gap).store(after, Ordering::Relaxed);
        }
    }
}

/// What came of looking for a node by hash.
#[derive(Default, Debug)]
pub(super) struct Jump {
    pub(super) stop: Option<Stop>,
    /// The lengths of prefixes that were asked for in vain.
    missed: SmallVec<[usize; 4]>,
}

fn fingerprint(hash: u64) -> u64 {
    hash >> (64 - FINGERPRINT_BITS)
}

/// The entry of a node; 0, which is none, if its address cannot be packed, which those of the heap can.
fn entry_of(hash: u64, node: NodeRef) -> u64 {
    let packed = PackedAddr::pack(node.addr).map_or(0, PackedAddr::to_raw);
    fingerprint(hash) << FINGERPRINT_SHIFT | (node.kind as u64) << KIND_SHIFT | packed
}

fn matches(hash: u64) -> impl Fn(u64) -> bool + Copy {
    move |entry| entry >> FINGERPRINT_SHIFT == fingerprint(hash)
}

pub(super) fn node_of(entry: u64) -> Option<NodeRef> {
    let kind = NodeKind::of(entry >> KIND_SHIFT & 7)?;
    Some(NodeRef { addr: PackedAddr::from_raw(entry).unpack(), kind })
}

impl Finder {
    fn table(&self, shared: &Shared, hash: u64) -> &Table {
        &self.tables[prefix::server_of(hash, shared.servers()).index()]
    }

    /// What the compute server spends on it.
    pub(super) fn bytes(&self) -> u64 {
        let directories: u64 = self.tables.iter().map(Table::directory_bytes).sum();
        directories + self.filter.as_ref().map_or(0, Filter::bytes)
    }
}

impl Tree {
    /// How nodes are found by hash, if they are to be.
    pub(super) fn finder(&self) -> Option<&Finder> {
        self.shared.finder.as_ref().filter(|_| self.shared.finds_by_hash)
    }

    /// The deepest node of a key that is found by hash, less deep than `below`.
    pub(super) async fn jump(
        &self,
        op: &Op,
        key: &[u8],
        prefixes: &Prefixes<'_>,
        below: usize,
    ) -> Result<Jump, IndexError> {
        let mut jump = Jump::default();
        let Some(finder) = self.finder() else { return Ok(jump) };
        let hashes = &prefixes.all()[..prefixes.all().len().min(below)];
        let Some(filter) = &finder.filter else {
            return self.jump_unfiltered(op, key, (finder, hashes)).await;
        };
        let mut known = filter.longest(hashes).take_while(|len| *len > 0).take(MAX_PROBES).peekable();
        while let Some(len) = known.next() {
            let gap = len - known.peek().copied().unwrap_or(0);
            let second = if finder.doubts.is_likely_false(gap) { known.next() } else { None };
            let lens: SmallVec<[usize; 2]> = std::iter::once(len).chain(second).collect();
            let found = self.ask(op, key, (finder, hashes), &lens).await?;
            let missed = found.as_ref().map_or(lens.len(), |(n, _)| *n);
            finder.doubts.note(gap, missed > 0);
            for len in &lens[..missed] {
                marks::hit("hash_probe_in_vain");
                op.count_wrong_hint();
                jump.missed.push(*len);
            }
            if let Some((_, stop)) = found {
                jump.stop = Some(stop);
                return Ok(jump);
            }
        }
        Ok(jump)
    }

    /// The same without a filter: all prefixes are asked for at once (III-A).
    async fn jump_unfiltered(
        &self,
        op: &Op,
        key: &[u8],
        (finder, hashes): (&Finder, &[u64]),
    ) -> Result<Jump, IndexError> {
        let lens: Vec<usize> = (1..hashes.len()).rev().collect();
        for some in lens.chunks(PREFIXES_AT_A_TIME) {
            if let Some((_, stop)) = self.ask(op, key, (finder, hashes), some).await? {
                return Ok(Jump { stop: Some(stop), ..Jump::default() });
            }
        }
        Ok(Jump::default())
    }

    /// Asks the tables for prefixes of these lengths, all in one round trip; the first that has a node, by its place in `lens`, and what a
    /// key needs of the node.
    async fn ask(
        &self,
        op: &Op,
        key: &[u8],
        (finder, hashes): (&Finder, &[u64]),
        lens: &[usize],
    ) -> Result<Option<(usize, Stop)>, IndexError> {
        let probe = |len: &usize| finder.table(&self.shared, hashes[*len]).probe(hashes[*len]);
        for _ in lens {
            op.count_hint();
        }
        // One look is enough: an entry that it does not see because it has just moved is no loss, and whoever finds the node by
        // another way sees to it.
        if let [len] = lens {
            let [first, second] = probe(len).places();
            let (one, two) = surely::read_pair(op, first, second).await?;
            return self
                .judge(op, key, (*len, hashes[*len]), probe(len), [&one, &two])
                .await
                .map(|stop| Some((0, stop?)));
        }
        let places: Vec<_> = lens.iter().flat_map(|len| probe(len).places()).collect();
        let pairs = surely::read_many(op, &places).await?;
        for (n, (len, pair)) in lens.iter().zip(pairs.chunks(2)).enumerate() {
            let [one, two] = pair else { continue };
            let stop = self.judge(op, key, (*len, hashes[*len]), probe(len), [one, two]).await?;
            if let Some(stop) = stop {
                return Ok(Some((n, stop)));
            }
        }
        Ok(None)
    }

    /// The node of a prefix, if what was read of its table leads to it.
    async fn judge(
        &self,
        op: &Op,
        key: &[u8],
        (len, hash): (usize, u64),
        probe: Probe,
        pairs: [&Buf; 2],
    ) -> Result<Option<Stop>, IndexError> {
        let Some(found) = probe.candidates(pairs, matches(hash)) else { return Ok(None) };
        self.first_match(op, key, (len, hash), &found).await
    }

    /// The node among those that hash entries lead to that has this very prefix.
    async fn first_match(
        &self,
        op: &Op,
        key: &[u8],
        (len, hash): (usize, u64),
        found: &Candidates,
    ) -> Result<Option<Stop>, IndexError> {
        for slot in found {
            let Some(node) = node_of(slot.entry) else { continue };
            let Some(stop) = self.read_hinted(op, key, node, len).await? else { continue };
            let is_it = stop.hash == hash && stop.head.depth == len;
            if self.shared.config.sabotage.trust_filter && stop.head.depth <= key.len() {
                return Ok(Some(stop));
            }
            if is_it && stop.head.is_linked && !stop.head.is_dead {
                return Ok(Some(stop));
            }
            if stop.head.is_dead {
                // Whoever buried it is not done, or died. The entry is of no use to anybody.
                marks::hit("stale_hash_entry");
                self.forget(op, hash, node).await?;
            }
        }
        Ok(None)
    }

    /// READs what a key needs of a node that a hint leads to: the head before the rest.
    async fn read_hinted(
        &self,
        op: &Op,
        key: &[u8],
        node: NodeRef,
        len: usize,
    ) -> Result<Option<Stop>, IndexError> {
        let is_ordered = op.endpoint().capabilities().ordered_reads;
        if node.kind == NodeKind::N256 && self.shared.config.switches.slot_reads && is_ordered {
            return self.read_slot_only(op, key, node, len).await.map(Some);
        }
        let whole = (node.addr, node.kind.bytes());
        let (head, image) = if is_ordered {
            surely::read_pair(op, (node.addr, 8), whole).await?
        } else {
            (surely::read(op, node.addr, 8).await?, surely::read(op, whole.0, whole.1).await?)
        };
        let head = head.word(NODE_HEAD_AT);
        let (Some(head), Some(image)) = (Head::from_word(head), Node::accept(node.kind, image)) else {
            return Ok(None);
        };
        let step = Step::of(key, head.depth);
        let slot = step.map_or(Slot::EMPTY, |step| image.child(step));
        Ok(Some(Stop { node, head, hash: image.hash(), step, slot }))
    }

    /// Notes what was found on a way that the filter did not know of, and mends what is missing in the tables.
    pub(super) async fn learn(
        &self,
        op: &Op,
        jump: &Jump,
        way: &Way,
        prefixes: &Prefixes<'_>,
    ) -> Result<(), IndexError> {
        let Some(finder) = self.finder() else { return Ok(()) };
        let begin = usize::from(jump.stop.is_some());
        for stop in way.stops.iter().skip(begin).filter(|stop| stop.head.depth > 0 && !stop.head.is_dead) {
            let is_missing = jump.missed.contains(&stop.head.depth);
            if is_missing && prefixes.get(stop.head.depth) == Some(stop.hash) {
                marks::hit("hash_entry_missing");
                Box::pin(self.announce(op, stop.hash, stop.node, None)).await?;
            } else if let Some(filter) = &finder.filter {
                filter.insert(stop.hash);
            }
        }
        Ok(())
    }

    /// Lets others find a node by its prefix, after a slot was made to lead to it, in the place of another if it takes one's.
    pub(super) async fn announce(
        &self,
        op: &Op,
        hash: u64,
        node: NodeRef,
        before: Option<NodeRef>,
    ) -> Result<(), IndexError> {
        self.note(hash);
        unless_fenced(self.link(op, hash, node, before).await)
    }

    /// Marks a node as linked and enters it into its hash table.
    async fn link(
        &self,
        op: &Op,
        hash: u64,
        node: NodeRef,
        before: Option<NodeRef>,
    ) -> Result<(), IndexError> {
        let Some(finder) = &self.shared.finder else { return Ok(()) };
        if !self.are_tables_in_use(op).await? {
            return Ok(());
        }
        surely::write(op, node.addr.add(NODE_LINKED_AT as u64), &[1]).await?;
        let (table, entry) = (finder.table(&self.shared, hash), entry_of(hash, node));
        if let Some(before) = before {
            let old = entry_of(hash, before);
            let found = table.look_up_surely(op, hash, |other| other == old).await?;
            if let Some(slot) = found.first() {
                if table.replace(op, self, hash, *slot, entry).await? {
                    return self.forget_if_dead(op, hash, node).await;
                }
            }
        }
        table.insert(op, self, hash, entry).await?;
        self.forget_if_dead(op, hash, node).await
    }

    fn tables_in_use_at(&self) -> GlobalAddr {
        self.shared.info.anchor.add(TABLES_IN_USE_AT)
    }

    /// Whether the tables hold entries: not before somebody has come who asks them. Until then all who use the index look at nodes
    /// themselves. What they made is entered later, by those who miss it ([`Tree::learn`]). Who buries a node and then finds that the
    /// tables are not in use has no entry to remove: whoever enters one looks afterwards whether the node is dead.
    pub(super) async fn are_tables_in_use(&self, op: &Op) -> Result<bool, IndexError> {
        if self.finder().is_some() {
            return Ok(true);
        }
        let in_use = surely::read_word(op, self.tables_in_use_at()).await? != 0;
        if !in_use {
            marks::hit("hash_tables_not_in_use");
        }
        Ok(in_use)
    }

    /// Tells the filter of a node, if anybody asks the filter.
    fn note(&self, hash: u64) {
        if let Some(Finder { filter: Some(filter), .. }) = self.finder() {
            filter.insert(hash);
        }
    }

    /// Says that the hash entry of a prefix will be written soon.
    pub(super) fn expect_entry(&self, op: &Op, hash: u64) {
        let Some(finder) = &self.shared.finder else { return };
        let in_use = op.peek_here(self.tables_in_use_at(), 8, |words| words.get(0) != 0);
        if !matches!(in_use, Some(Ok(true))) {
            return;
        }
        for (addr, bytes) in finder.table(&self.shared, hash).probe(hash).places() {
            op.expect(addr, bytes);
        }
    }

    /// Removes the hash entry of a node that died while it was written: whoever buried the node may have looked for it too early.
    async fn forget_if_dead(&self, op: &Op, hash: u64, node: NodeRef) -> Result<(), IndexError> {
        let head = Head::from_word(surely::read_word(op, node.addr).await?);
        if head.is_some_and(|head| !head.is_dead) {
            return Ok(());
        }
        marks::hit("announced_too_late");
        self.forget(op, hash, node).await
    }

    /// Tells the filter of all nodes that the hash tables know, while nobody writes.
    pub(super) async fn fill_filter(&self) -> Result<(), IndexError> {
        let Some(Finder { tables, filter: Some(filter), .. }) = self.finder() else { return Ok(()) };
        for table in tables {
            let op = self.endpoint.op();
            self.admit(&op)?;
            for (hash, _) in table.check(&op, self).await?.entries {
                filter.insert(hash);
            }
        }
        Ok(())
    }

    /// Enters a node that is marked as linked into its hash table, and into the filter.
    pub(super) async fn enter(&self, op: &Op, hash: u64, node: NodeRef) -> Result<(), IndexError> {
        let Some(finder) = &self.shared.finder else { return Ok(()) };
        self.note(hash);
        let inserted = finder.table(&self.shared, hash).insert(op, self, hash, entry_of(hash, node)).await;
        unless_fenced(inserted)
    }

    /// Removes the hash entry of a node that is dead.
    pub(super) async fn forget(&self, op: &Op, hash: u64, node: NodeRef) -> Result<(), IndexError> {
        let Some(finder) = &self.shared.finder else { return Ok(()) };
        if !self.are_tables_in_use(op).await? {
            return Ok(());
        }
        let table = finder.table(&self.shared, hash);
        unless_fenced(Box::pin(table.remove(op, self, hash, entry_of(hash, node))).await)
    }
}

/// A hash entry that could not be written is one that is missing, or out of date: no failure of the operation.
fn unless_fenced<T>(outcome: Result<T, IndexError>) -> Result<(), IndexError> {
    match outcome {
        Err(error @ IndexError::Fenced) => Err(error),
        _ => Ok(()),
    }
}

impl Nodes for Tree {
    async fn hashes_of(&self, op: &Op, entries: &[u64]) -> Result<Vec<Option<u64>>, IndexError> {
        let nodes: Vec<Option<NodeRef>> = entries.iter().map(|entry| node_of(*entry)).collect();
        let places: Vec<_> = nodes.iter().flatten().map(|node| (node.addr, NODE_HASH_AT + 8)).collect();
        let mut heads = Vec::new();
        for some in places.chunks(PREFIXES_AT_A_TIME) {
            heads.extend(surely::read_many(op, some).await?);
        }
        let mut heads = heads.into_iter();
        let hash_in = |head: Buf, entry: u64| {
            let is_alive = Head::from_word(head.word(NODE_HEAD_AT)).is_some_and(|head| !head.is_dead);
            let hash = head.word(NODE_HASH_AT);
            (is_alive && matches(hash)(entry)).then_some(hash)
        };
        let of = |(node, entry): (Option<NodeRef>, &u64)| {
            node.and_then(|_| heads.next()).and_then(|head| hash_in(head, *entry))
        };
        Ok(nodes.into_iter().zip(entries).map(of).collect())
    }
}
