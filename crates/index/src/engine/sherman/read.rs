//! The way down the tree, and node reads that are whole.
//!
//! A [`Target`] is where a node is expected, and how that is known. What a live node said in this very operation is *linked*: the epoch
//! that the operation pins keeps it from being anything else meanwhile. What a cache said is a *hint*.
//!
//! A torn read is repeated. After some repeats the reader takes the node's lock, which waits for the writer, or lets a dead one
//! be recovered, and then mends the node if it is still torn.

use super::Tree;
use super::node::{Head, Lookup, MAX_LEVEL, Node};
use super::restructure::LostSeparator;
use super::write::Reached;
use crate::api::IndexError;
use crate::shared::locks::Write;
use crate::shared::surely;
use farwood_fabric::{GlobalAddr, Op, marks};
use std::sync::atomic::Ordering;

/// How often a node is read until it is whole.
const MAX_READS: u32 = 10_000;
/// After so many torn reads in a row the lock is taken.
const PATIENCE: u32 = 16;
/// How often an operation goes down the tree.
pub(super) const MAX_DESCENTS: u32 = 1_000;
/// From so many on it does without the cache.
const DESCENTS_WITH_CACHE: u32 = 3;
/// How often it goes to the right on one level, or down.
const MAX_STEPS: u32 = 10_000;

/// How an address is known.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Trust {
    Hint,
    Linked,
}

/// Where a node is expected.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Target {
    pub(super) addr: GlobalAddr,
    pub(super) trust: Trust,
}

impl Target {
    pub(super) fn hint(addr: GlobalAddr) -> Self {
        Self { addr, trust: Trust::Hint }
    }

    pub(super) fn linked(addr: GlobalAddr) -> Self {
        Self { addr, trust: Trust::Linked }
    }
}

/// Where the way down ended.
enum Way {
    Found(Target),
    /// Something that led there was out of date.
    Stale,
    /// The root is below the level that was asked for.
    TooLow,
}

/// What a leaf says about a key.
enum Answer {
    Value(Vec<u8>),
    Absent,
    Right,
    Elsewhere,
}

impl Tree {
    /// Whether the node can be what was expected, as far as its first word says.
    pub(super) fn is_expected(&self, head: Head, trust: Trust, level: Option<u8>) -> bool {
        let trusting = self.shared.config.sabotage.trust_hint;
        (trusting || !head.is_dead)
            && (trusting || head.is_linked || trust == Trust::Linked)
            && level.is_none_or(|level| head.level == level)
            && head.level <= MAX_LEVEL
    }

    /// READs a node until `judge` is content with it. `None` if it is not what was expected.
    pub(super) async fn read_node<T>(
        &self,
        op: &Op,
        target: Target,
        level: Option<u8>,
        judge: impl Fn(&Node) -> Option<T>,
    ) -> Result<Option<(Node, T)>, IndexError> {
        for attempt in 1..=MAX_READS {
            let buf = surely::read(op, target.addr, self.shared.config.node_bytes).await?;
            if !self.is_expected(Head::of(&buf), target.trust, level) {
                return Ok(None);
            }
            if let Ok(node) = Node::accept(&self.shared.layouts, self.shared.place(target.addr), buf) {
                if let Some(verdict) = judge(&node) {
                    return Ok(Some((node, verdict)));
                }
            }
            marks::hit("torn_read");
            op.count_retry();
            if attempt % PATIENCE == 0 && !self.shared.config.sabotage.skip_repair {
                Box::pin(self.mend(op, target, level)).await?;
            }
        }
        Err(IndexError::Contended { what: "a node that is whole", attempts: MAX_READS })
    }

    /// READs an inner node, or any other, whole.
    pub(super) async fn read_whole(
        &self,
        op: &Op,
        target: Target,
        level: Option<u8>,
    ) -> Result<Option<Node>, IndexError> {
        let node = self.read_node(op, target, level, |node| node.is_whole().then_some(())).await?;
        Ok(node.map(|(node, ())| node))
    }

    /// Takes a node's lock, and mends the node if it is torn even so.
    async fn mend(&self, op: &Op, target: Target, level: Option<u8>) -> Result<(), IndexError> {
        match self.lock_node(op, target, level).await? {
            Reached::Node(locked) => {
                let locked = self.mended(op, locked).await?;
                self.unlock(op, locked.held).await
            }
            Reached::Elsewhere => Ok(()),
        }
    }

    /// The value of a key.
    pub(super) async fn look_up(&self, op: &Op, key: &[u8]) -> Result<Option<Vec<u8>>, IndexError> {
        let skip_fences = self.shared.config.sabotage.skip_fences;
        let judge = |leaf: &Node| {
            if !leaf.covers(key) && !skip_fences {
                return Some(if leaf.is_beyond(key) { Answer::Right } else { Answer::Elsewhere });
            }
            match leaf.find(key) {
                Lookup::Found(slot) => Some(Answer::Value(leaf.value(slot).to_vec())),
                Lookup::Absent => Some(Answer::Absent),
                Lookup::Torn => None,
            }
        };
        for descent in 0..MAX_DESCENTS {
            let mut target = self.locate_leaf(op, key, descent).await?;
            for _ in 0..MAX_STEPS {
                match self.read_node(op, target, Some(0), &judge).await? {
                    Some((_, Answer::Value(value))) => return Ok(Some(value)),
                    Some((_, Answer::Absent)) => return Ok(None),
                    Some((leaf, Answer::Right)) => target = self.go_right(op, &leaf, target, key),
                    Some((_, Answer::Elsewhere)) | None => {
                        self.forget_way(op, target, 0, key);
                        break;
                    }
                }
            }
            op.count_retry();
        }
        Err(IndexError::Contended { what: "the way to a leaf", attempts: MAX_DESCENTS })
    }

    /// The sibling of a node that the key is beyond; and the note that it has no separator, or that the cache does not know it.
    pub(super) fn go_right(&self, op: &Op, node: &Node, from: Target, key: &[u8]) -> Target {
        let sibling = node.sibling();
        match from.trust {
            Trust::Hint => self.forget_way(op, from, node.level(), key),
            Trust::Linked => {
                if let Some(high) = node.high() {
                    let (level, separator) = (node.level() + 1, high.to_vec());
                    self.lost.replace(Some(LostSeparator { level, separator, child: sibling }));
                }
            }
        }
        Target::linked(sibling)
    }

    /// Forgets the snapshots that led to what was not expected.
    pub(super) fn forget_way(&self, op: &Op, target: Target, level: u8, key: &[u8]) {
        if target.trust == Trust::Hint {
            marks::hit("stale_hint");
            op.count_wrong_hint();
            self.shared.cache.forget(level + 1, key);
        }
    }

    /// Where the leaf is that `key` is under.
    pub(super) async fn locate_leaf(&self, op: &Op, key: &[u8], descent: u32) -> Result<Target, IndexError> {
        match self.locate(op, key, 0, descent).await? {
            Some(target) => Ok(target),
            None => Err(super::corrupt("the tree has no leaves".into())),
        }
    }

    /// Where the node on `level` is that `key` is under; `None` if the tree is not that high.
    pub(super) async fn locate(
        &self,
        op: &Op,
        key: &[u8],
        level: u8,
        descent: u32,
    ) -> Result<Option<Target>, IndexError> {
        if descent < DESCENTS_WITH_CACHE {
            if let Some(child) = self.shared.cache.child(level + 1, key) {
                op.count_hint();
                return Ok(Some(Target::hint(child)));
            }
        }
        for again in descent..descent + MAX_DESCENTS {
            match self.descend(op, key, level, again < DESCENTS_WITH_CACHE).await? {
                Way::Found(target) => return Ok(Some(target)),
                Way::TooLow => return Ok(None),
                Way::Stale => op.count_retry(),
            }
        }
        Err(IndexError::Contended { what: "the way down the tree", attempts: MAX_DESCENTS })
    }

    /// Goes down from the lowest snapshot above, or from the root.
    async fn descend(&self, op: &Op, key: &[u8], level: u8, with_cache: bool) -> Result<Way, IndexError> {
        let flushes = self.shared.cache.flushes();
        let cached = if with_cache { self.shared.cache.lowest_child(level + 2, key) } else { None };
        let (mut at, mut at_level) = match cached {
            Some((level, child)) => {
                op.count_hint();
                (Target::hint(child), Some(level))
            }
            None => (self.root(op, with_cache).await?, None),
        };
        let from_root = at_level.is_none() && at.trust == Trust::Linked;
        for _ in 0..MAX_STEPS {
            let Some(node) = self.read_whole(op, at, at_level).await? else {
                match at_level {
                    Some(level) => self.forget_way(op, at, level, key),
                    None => self.shared.root.store(0, Ordering::Relaxed),
                }
                if from_root && at_level.is_none() {
                    Box::pin(self.replace_dead_root(op, at.addr)).await?;
                }
                return Ok(Way::Stale);
            };
            if node.is_beyond(key) {
                at_level = Some(node.level());
                at = self.go_right(op, &node, at, key);
                continue;
            }
            if !node.covers(key) || node.level() < level {
                self.shared.root.store(0, Ordering::Relaxed);
                return Ok(if from_root && node.covers(key) { Way::TooLow } else { Way::Stale });
            }
            if node.level() == level {
                return Ok(Way::Found(Target::linked(at.addr)));
            }
            self.shared.cache.keep(&node, flushes, || op.endpoint().random());
            let Some(slot) = node.child_slot(key) else {
                let what = format!("the inner node at {} has no child for its low fence", at.addr);
                return Err(super::corrupt(what));
            };
            let child = Target::linked(node.child(slot));
            if node.level() == level + 1 {
                return Ok(Way::Found(child));
            }
            (at, at_level) = (child, Some(node.level() - 1));
        }
        Err(IndexError::Contended { what: "the way down the tree", attempts: MAX_STEPS })
    }

    /// The root, as it was last seen if that will do.
    pub(super) async fn root(&self, op: &Op, with_cache: bool) -> Result<Target, IndexError> {
        let seen = GlobalAddr::from_raw(self.shared.root.load(Ordering::Relaxed));
        if with_cache && !seen.is_null() {
            op.count_hint();
            return Ok(Target::hint(seen));
        }
        let raw = surely::read_word(op, self.shared.root_pointer()).await?;
        self.shared.root.store(raw, Ordering::Relaxed);
        Ok(Target::linked(GlobalAddr::from_raw(raw)))
    }

    /// A WRITE within a node.
    pub(super) fn patch_at(node: GlobalAddr, patch: super::node::Patch) -> Write {
        Write { addr: node.add(patch.at as u64), bytes: patch.bytes }
    }
}
