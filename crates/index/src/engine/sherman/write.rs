//! Changes of one leaf under its lock: put, delete, compare-and-swap.
//!
//! 1. [CAS lock, READ leaf] (one round trip; two without `lock_and_read`).
//! 2. The leaf must be what was expected and cover the key; else give the lock back and go on from there.
//! 3. [WRITE entry, WRITE unlock] (one round trip; two without `combine`). A full leaf is split first. A value longer than a word
//!    that is overwritten is written down in an intent before.
//! 4. A leaf that has become small may be merged; a separator that was missing is added.

use super::Tree;
use super::node::{Head, Lookup, Node, Patch, Patches};
use super::read::{MAX_DESCENTS, Target, Trust};
use crate::api::IndexError;
use crate::shared::heap::Room;
use crate::shared::intents::{Redo, Slot};
use crate::shared::locks::{Behind, Held, Write, begun};
use farwood_fabric::{GlobalAddr, Op, marks};
use smallvec::{SmallVec, smallvec};

/// How often a change goes from node to node.
const MAX_STEPS: u32 = 10_000;

/// What is to become of a key.
#[derive(Clone, Copy, Debug)]
pub(super) enum Decision<'a> {
    Keep,
    Put(&'a [u8]),
    Remove,
}

/// Decides, given what the key holds.
pub(super) type Decide<'a> = &'a dyn Fn(Option<&[u8]>) -> Decision<'a>;

/// A node under its lock; what was expected, and its header is whole.
#[derive(Debug)]
pub(super) struct Locked {
    pub(super) held: Held,
    pub(super) addr: GlobalAddr,
    pub(super) node: Node,
}

/// What a target turned out to be.
pub(super) enum Reached {
    Node(Locked),
    Elsewhere,
}

impl Tree {
    /// Locks and reads a node.
    pub(super) async fn lock_node(
        &self,
        op: &Op,
        target: Target,
        level: Option<u8>,
    ) -> Result<Reached, IndexError> {
        let (held, buf) = self.lock_and_read(op, target.addr).await?;
        self.adopt(op, held, buf, target, level).await
    }

    /// Takes what was read under a lock for a node.
    pub(super) async fn adopt(
        &self,
        op: &Op,
        held: Held,
        buf: farwood_fabric::Buf,
        target: Target,
        level: Option<u8>,
    ) -> Result<Reached, IndexError> {
        if !self.is_expected(Head::of(&buf), target.trust, level) {
            self.unlock(op, held).await?;
            return Ok(Reached::Elsewhere);
        }
        let place = self.shared.place(target.addr);
        let Ok(node) = Node::accept(&self.shared.layouts, place, buf) else {
            self.unlock(op, held).await?;
            // A hint may lead to a node that is just being made.
            return if target.trust == Trust::Hint {
                Ok(Reached::Elsewhere)
            } else {
                Err(super::corrupt(format!(
                    "the header of the node at {} is torn under its lock",
                    target.addr
                )))
            };
        };
        Ok(Reached::Node(Locked { held, addr: target.addr, node }))
    }

    /// Mends a node under its lock, if a session that died left it torn.
    pub(super) async fn mended(&self, op: &Op, mut locked: Locked) -> Result<Locked, IndexError> {
        if self.shared.config.sabotage.skip_repair {
            return Ok(locked);
        }
        let Some(patch) = locked.node.repair() else { return Ok(locked) };
        marks::hit("node_mended");
        self.write(op, locked.addr.server(), &[Self::patch_at(locked.addr, patch)]).await?;
        Ok(locked)
    }

    /// Locks the node on `level` that covers `key`; `None` if the tree is not that high.
    pub(super) async fn lock_covering(
        &self,
        op: &Op,
        key: &[u8],
        level: u8,
    ) -> Result<Option<Locked>, IndexError> {
        for descent in 0..MAX_DESCENTS {
            let Some(mut target) = self.locate(op, key, level, descent).await? else { return Ok(None) };
            for _ in 0..MAX_STEPS {
                let Reached::Node(locked) = self.lock_node(op, target, Some(level)).await? else {
                    self.forget_way(op, target, level, key);
                    break;
                };
                if locked.node.covers(key) || self.shared.config.sabotage.skip_fences {
                    return Ok(Some(locked));
                }
                let next = locked.node.is_beyond(key).then(|| self.go_right(op, &locked.node, target, key));
                self.unlock(op, locked.held).await?;
                let Some(next) = next else {
                    self.forget_way(op, target, level, key);
                    break;
                };
                target = next;
            }
            op.count_retry();
        }
        Err(IndexError::Contended { what: "the way to a node", attempts: MAX_DESCENTS })
    }

    /// Changes a key as `decide` says; whether it did.
    pub(super) async fn modify(&self, key: &[u8], decide: Decide<'_>) -> Result<bool, IndexError> {
        let op = self.endpoint.op();
        self.admit(&op)?;
        // What an earlier operation noted may be gone by now.
        self.lost.replace(None);
        let changed = self.change(&op, key, decide).await;
        if let (Ok(_), Some(lost)) = (&changed, self.lost.take()) {
            // The operation has happened; what fails here will be tried again by others.
            if let Err(IndexError::Fenced) = Box::pin(self.add_separators(&op, lost)).await {
                return Err(IndexError::Fenced);
            }
        }
        changed
    }

    async fn change(&self, op: &Op, key: &[u8], decide: Decide<'_>) -> Result<bool, IndexError> {
        // What was lacking under the lock, and was got without it.
        let (mut room, mut slot_room): (Option<Room>, Option<Slot>) = (None, None);
        for _ in 0..MAX_STEPS {
            let Some(mut locked) = self.lock_covering(op, key, 0).await? else {
                return Err(super::corrupt("the tree has no leaves".into()));
            };
            let mut found = locked.node.find(key);
            if found == Lookup::Torn {
                locked = self.mended(op, locked).await?;
                found = locked.node.find(key);
            }
            let slot = match found {
                Lookup::Found(slot) => Some(slot),
                Lookup::Absent => None,
                Lookup::Torn => {
                    self.unlock(op, locked.held).await?;
                    return Err(super::corrupt(format!(
                        "the node at {} is torn under its lock",
                        locked.addr
                    )));
                }
            };
            let decision = decide(slot.map(|slot| locked.node.value(slot)));
            let patches = match (decision, slot) {
                (Decision::Keep, _) => {
                    self.unlock(op, locked.held).await?;
                    return Ok(false);
                }
                (Decision::Remove, None) => {
                    self.unlock(op, locked.held).await?;
                    return Ok(true);
                }
                (Decision::Remove, Some(slot)) => return self.remove(op, locked, slot).await.map(|()| true),
                (Decision::Put(value), Some(slot)) => {
                    let patches = locked.node.update(slot, value);
                    if self.shared.layouts.leaf.update_needs_intent() {
                        if self.write_with_intent(op, locked, patches, &mut slot_room).await? {
                            return Ok(true);
                        }
                        continue;
                    }
                    patches
                }
                (Decision::Put(value), None) => {
                    let Some(slot) = locked.node.free_slot() else {
                        Box::pin(self.split(op, locked, &mut room)).await?;
                        continue;
                    };
                    locked.node.insert(slot, key, value)
                }
            };
            self.write_back(op, locked, patches).await?;
            return Ok(true);
        }
        Err(IndexError::Contended { what: "room for a key", attempts: MAX_STEPS })
    }

    /// Writes a change of one entry and gives the lock back.
    pub(super) fn write_back(
        &self,
        op: &Op,
        locked: Locked,
        patches: Patches,
    ) -> impl Future<Output = Result<(), IndexError>> {
        let Locked { held, addr, node } = locked;
        let writes = self.writes_of(addr, node, patches);
        async move { self.finish(op, held, &writes).await }
    }

    /// The WRITEs of a change. Without two-level versions the last of them takes the whole node along.
    fn writes_of(&self, addr: GlobalAddr, mut node: Node, mut patches: Patches) -> SmallVec<[Write; 4]> {
        let mut writes = SmallVec::new();
        let link = (!node.head().is_linked).then(|| node.link());
        if !self.shared.config.switches.two_level_versions {
            patches.pop();
            writes.extend(patches.into_iter().map(|patch| Self::patch_at(addr, patch)));
            writes.push(Write { addr, bytes: SmallVec::from_slice(node.bytes()) });
            return writes;
        }
        writes.extend(patches.into_iter().chain(link).map(|patch| Self::patch_at(addr, patch)));
        writes
    }

    async fn remove(&self, op: &Op, mut locked: Locked, slot: usize) -> Result<(), IndexError> {
        let patches = locked.node.remove(slot);
        // Counted as META says, torn or not: it only decides whether to look closer.
        let small = locked.node.live().count() <= self.shared.layouts.leaf.capacity() / 4;
        let low = locked.node.low().to_vec();
        self.write_back(op, locked, patches).await?;
        if small {
            // The key is gone; that the leaf stays small is no failure.
            if let Err(IndexError::Fenced) = Box::pin(self.merge(op, 0, low)).await {
                return Err(IndexError::Fenced);
            }
        }
        Ok(())
    }

    /// Writes what could be left half done: first down in an intent. That is the change itself, which always fits the journal, also where
    /// the whole node is written along: the rest of the node stays as it is. Whether there was room for it; if not, it is reserved for the
    /// next attempt.
    async fn write_with_intent(
        &self,
        op: &Op,
        locked: Locked,
        patches: Patches,
        reserved: &mut Option<Slot>,
    ) -> Result<bool, IndexError> {
        let Locked { held, addr, node } = locked;
        let change = |patch: &Patch| (addr.add(patch.at as u64), patch.bytes.to_vec());
        let redo = Redo { locks: smallvec![held.shows()], writes: patches.iter().map(change).collect() };
        let writes = self.writes_of(addr, node, patches);
        let (intents, server, needed) = (self.shared.pool.intents(), addr.server(), redo.encoded_bytes());
        let reserved_one = reserved.take().filter(|slot| slot.fits(server, needed));
        let Some(slot) = reserved_one.or_else(|| intents.take(server, needed)) else {
            self.unlock(op, held).await?;
            marks::hit("waited_for_room_of_an_intent");
            *reserved = Some(intents.room(op, server, needed).await?);
            return Ok(false);
        };
        let mut all: SmallVec<[Write; 4]> = SmallVec::new();
        all.push(Write { addr: slot.addr(), bytes: redo.encode(slot.addr()).into() });
        all.extend(writes);
        // The lock may be handed on, and then its word stays what it is.
        if !self.shared.config.sabotage.intent_not_ended {
            all.push(Write { addr: slot.end_addr(), bytes: SmallVec::from_slice(&[0; 8]) });
        }
        let behind = Behind { slot: Some(slot), retire: None };
        self.shared.locks.finish_with(op, held, &all, behind).await?;
        Ok(true)
    }

    /// Marks a node as linked, after a pointer to it was written.
    pub(super) async fn mark_linked(&self, op: &Op, addr: GlobalAddr) -> Result<(), IndexError> {
        let linked = addr.add(super::layout::LINKED_AT as u64);
        crate::shared::surely::write(op, linked, &[1]).await.map_err(begun)
    }
}
