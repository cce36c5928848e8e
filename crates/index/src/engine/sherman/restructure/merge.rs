//! Merges: a node that has become small takes over its right neighbour's entries and place.
//!
//! 1. Lock the parent P; find two neighbours N and X in it. (Never across parents: X's separator must be one that can go.)
//! 2. Try for the locks of N and X; whatever does not come at once ends the attempt. A merge is never needed, only good.
//! 3. WRITE X's entries into N's empty slots, where they are beyond N's high fence and do not count; then N's METAs for the next generation.
//! 4. WRITE an intent with all that follows; from here on the merge happens, whoever dies.
//! 5. WRITE N's new half and flag: now N covers X's keys. WRITE P without X's separator. WRITE X's flag: dead.
//! 6. End the intent, unlock, retire X. Then the same for P, if it has become small; a root with one child left goes ([`super::root`]).
//!
//! Until 5 readers find X's keys in X, and after it in N; between, both say the same, since both are locked. Readers of N wait from 3 to 5, since
//! its blocks are not of the generation that its header names.

use crate::api::IndexError;
use crate::engine::sherman::Tree;
use crate::engine::sherman::node::{Head, MAX_LEVEL, Node};
use crate::engine::sherman::write::Locked;
use crate::shared::intents::{HeldWord, Redo};
use crate::shared::locks::{Behind, Commit, Held, LockAt, Write};
use crate::shared::surely;
use farwood_fabric::{GlobalAddr, Op, marks};
use smallvec::SmallVec;

/// A neighbour: under its own lock, or under one that is held for another node.
struct Neighbour {
    held: Option<Held>,
    addr: GlobalAddr,
    node: Node,
}

impl Tree {
    /// Merges the node on `level` that begins at `low` with a neighbour, and then its parents, as far as they have become small.
    pub(in super::super) async fn merge(&self, op: &Op, level: u8, low: Vec<u8>) -> Result<(), IndexError> {
        let mut low = low;
        for level in level..MAX_LEVEL {
            match self.merge_once(op, level, &low).await? {
                Some(parent) => low = parent,
                None => return Ok(()),
            }
        }
        Ok(())
    }

    /// The low fence of the parent, if it has become small.
    async fn merge_once(&self, op: &Op, level: u8, low: &[u8]) -> Result<Option<Vec<u8>>, IndexError> {
        let Some(parent) = self.lock_covering(op, low, level + 1).await? else {
            return self.shrink_root(op).await.map(|()| None);
        };
        let parent = self.mended(op, parent).await?;
        let slots = parent.node.sorted();
        let at = slots.iter().position(|slot| parent.node.key(*slot) == low);
        let pair = at.and_then(|at| if at + 1 < slots.len() { Some(at) } else { at.checked_sub(1) });
        let neighbours = match pair {
            Some(at) => {
                let pair = (parent.node.child(slots[at]), parent.node.child(slots[at + 1]));
                self.neighbours(op, pair, level, parent.held.at).await
            }
            None => Ok(None),
        };
        match (neighbours, pair) {
            (Ok(Some((left, right))), Some(at)) => self.join(op, parent, slots[at + 1], left, right).await,
            (given_up, _) => {
                // An only child has no neighbours here; its parent may have.
                let parent_low = (slots.len() == 1).then(|| parent.node.low().to_vec());
                self.unlock(op, parent.held).await?;
                given_up.map(|_| parent_low)
            }
        }
    }

    /// Two neighbours under their locks, while the lock of their parent is held.
    async fn neighbours(
        &self,
        op: &Op,
        (left, right): (GlobalAddr, GlobalAddr),
        level: u8,
        parent: LockAt,
    ) -> Result<Option<(Neighbour, Neighbour)>, IndexError> {
        let Some(left) = self.neighbour(op, left, level, &[parent]).await? else { return Ok(None) };
        let mut held = vec![parent];
        held.extend(left.held.as_ref().map(|held| held.at));
        match self.neighbour(op, right, level, &held).await {
            Ok(Some(right)) => Ok(Some((left, right))),
            given_up => {
                self.release(op, left.held).await?;
                given_up.map(|_| None)
            }
        }
    }

    async fn release(&self, op: &Op, held: Option<Held>) -> Result<(), IndexError> {
        match held {
            Some(held) => self.unlock(op, held).await,
            None => Ok(()),
        }
    }

    /// Gives back as many as can be; the first error, if there was one.
    async fn release_all(&self, op: &Op, held: [Option<Held>; 3]) -> Result<(), IndexError> {
        let mut all = Ok(());
        for held in held {
            all = all.and(self.release(op, held).await);
        }
        all
    }

    /// A neighbour under its lock, unless that takes waiting, or the node is not as it should be.
    async fn neighbour(
        &self,
        op: &Op,
        addr: GlobalAddr,
        level: u8,
        held: &[LockAt],
    ) -> Result<Option<Neighbour>, IndexError> {
        let at = self.shared.locks.table().lock_of(addr);
        let (held, buf) = if held.contains(&at) {
            (None, surely::read(op, addr, self.shared.config.node_bytes).await?)
        } else if self.shared.config.sabotage.wait_for_second_lock {
            let (held, buf) = self.lock_and_read(op, addr).await?;
            (Some(held), buf)
        } else {
            let Some((held, buf)) = self.try_lock(op, addr).await? else {
                marks::hit("merge_given_up");
                return Ok(None);
            };
            (Some(held), buf)
        };
        let head = Head::of(&buf);
        if !head.is_dead && head.level == level {
            if let Ok(node) = Node::accept(&self.shared.layouts, self.shared.place(addr), buf) {
                if node.is_whole() {
                    return Ok(Some(Neighbour { held, addr, node }));
                }
            }
        }
        self.release(op, held).await?;
        Ok(None)
    }

    /// Steps 3 to 6.
    async fn join(
        &self,
        op: &Op,
        mut parent: Locked,
        separator: usize,
        mut left: Neighbour,
        mut right: Neighbour,
    ) -> Result<Option<Vec<u8>>, IndexError> {
        let capacity = self.shared.layouts.of(left.node.level()).capacity();
        let (lefts, rights) = (left.node.live().count(), right.node.live().count());
        // Half full at most, or the next inserts would split it again; but an empty node only stands in the way.
        let fits = lefts + rights <= capacity / 2 || lefts == 0 || rights == 0;
        let are_neighbours = left.node.sibling() == right.addr && left.node.high() == Some(right.node.low());
        let grown = if fits && are_neighbours { left.node.grow(&right.node) } else { None };
        let locks = [left.held.as_ref(), right.held.as_ref(), Some(&parent.held)].into_iter().flatten();
        let unnamed = if self.shared.config.sabotage.one_lock_named { locks.clone().count() - 1 } else { 0 };
        let locks: SmallVec<[HeldWord; 3]> = locks.map(Held::shows).skip(unnamed).collect();
        let mut redo = Redo { locks, writes: Vec::new() };
        let slot = grown.as_ref().and_then(|(_, turn)| {
            let remove = parent.node.remove(separator);
            let steps = turn.iter().cloned().map(|patch| (left.addr, patch));
            let steps = steps.chain(remove.into_iter().map(|patch| (parent.addr, patch)));
            let steps = steps.chain([(right.addr, right.node.bury())]);
            redo.writes =
                steps.map(|(addr, patch)| (addr.add(patch.at as u64), patch.bytes.to_vec())).collect();
            self.shared.pool.intents().take(left.addr.server(), redo.encoded_bytes())
        });
        let (Some((fill, _)), Some(slot)) = (grown, slot) else {
            self.release_all(op, [left.held, right.held, Some(parent.held)]).await?;
            return Ok(None);
        };
        let fill: Vec<Write> = fill.into_iter().map(|patch| Self::patch_at(left.addr, patch)).collect();
        // Nothing counts yet: if this fails, whoever locks N next mends it.
        self.write(op, left.addr.server(), &fill).await?;
        let mut writes = vec![Write { addr: slot.addr(), bytes: redo.encode(slot.addr()).into() }];
        writes.extend(
            redo.writes.iter().map(|(addr, bytes)| Write { addr: *addr, bytes: bytes.as_slice().into() }),
        );
        if !self.shared.config.sabotage.intent_not_ended {
            writes.push(Write { addr: slot.end_addr(), bytes: SmallVec::from_slice(&[0; 8]) });
        }
        let small = parent.node.live().count() <= self.shared.layouts.inner.capacity() / 4;
        let parent_low = small.then(|| parent.node.low().to_vec());
        let held = [Some(parent.held), right.held, left.held].into_iter().flatten().collect();
        let behind = Behind { slot: Some(slot), retire: Some((self.shared.node_class(), right.addr)) };
        let commit = Commit::new(&self.shared.locks, op, held, writes, behind);
        self.shared.locks.commit(op, commit).await?;
        marks::hit("merge");
        self.shared.cache.forget(parent.node.level(), parent.node.low());
        Ok(parent_low)
    }
}
