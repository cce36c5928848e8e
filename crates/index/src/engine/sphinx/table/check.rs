//! Walks the whole table while nobody uses it and verifies every invariant.

use super::layout::{FROZEN, Phase, Standing};
use super::{Nodes, Table, corrupt};
use crate::api::IndexError;
use crate::shared::heap::Class;
use farwood_fabric::{GlobalAddr, Op};
use rustc_hash::FxHashSet;

/// What a table holds.
#[derive(Clone, Default, Debug)]
pub struct Census {
    /// Its subtables.
    pub objects: Vec<(Class, GlobalAddr)>,
    /// Its slots, full and empty.
    pub slots: u64,
    /// The entries, each with its hash.
    pub entries: Vec<(u64, u64)>,
    /// Entries that nobody finds: left behind by a session that died in the middle of an insert, while the subtable was split. At most one for each task
    /// that died so.
    pub strays: u64,
    /// Slots with an entry that another slot has too: left behind by a session that died while several inserted the entry at once. At most as many.
    pub copies: u64,
    /// Entries that lead to no node any more.
    pub dead: u64,
    /// The depth of the deepest subtable.
    pub depth: u8,
}

impl Table {
    /// Every subtable, from the root. Splits that dead sessions left half done are finished on the way.
    pub async fn check(&self, op: &Op, nodes: &impl Nodes) -> Result<Census, IndexError> {
        let mut census = Census::default();
        let mut seen = FxHashSet::default();
        // With the birth and the suffix that its parent says it has.
        let mut left = vec![(self.inner.directory.root(), 0, 0)];
        while let Some((subtable, birth, suffix)) = left.pop() {
            self.finish(op, nodes, subtable).await?;
            let (state, children) = self.learn(op, subtable).await?;
            if (state.birth, state.suffix, state.phase) != (birth, suffix, Phase::Idle) {
                return Err(corrupt(format!(
                    "the hash subtable at {subtable} is {state:?}; its parent says birth {birth}, suffix {suffix:#x}"
                )));
            }
            if !seen.insert(subtable) {
                return Err(corrupt(format!("two ways lead to the hash subtable at {subtable}")));
            }
            for (depth, child) in (state.birth..state.depth).zip(children) {
                left.push((child, depth + 1, suffix | 1 << depth));
            }
            census.objects.push((self.inner.class, subtable));
            census.slots += self.inner.geometry.groups_bytes() / 8;
            census.depth = census.depth.max(state.depth);
            self.check_slots(op, nodes, subtable, &mut census).await?;
        }
        let mut entries = FxHashSet::default();
        let slots = census.entries.len();
        census.entries.retain(|(_, entry)| entries.insert(*entry));
        census.copies = (slots - census.entries.len()) as u64;
        Ok(census)
    }

    /// Every entry is in a place where it is looked for.
    async fn check_slots(
        &self,
        op: &Op,
        nodes: &impl Nodes,
        subtable: GlobalAddr,
        census: &mut Census,
    ) -> Result<(), IndexError> {
        let (state, _) = self.learn(op, subtable).await?;
        let slots = self.all_slots(op, subtable).await?;
        let words: Vec<u64> = slots.iter().map(|(_, word)| *word).collect();
        if let Some(word) = words.iter().find(|word| *word & FROZEN != 0) {
            return Err(corrupt(format!("entry {word:#x} is frozen though nobody splits {subtable}")));
        }
        let hashes = nodes.hashes_of(op, &words).await?;
        for ((at, word), hash) in slots.into_iter().zip(hashes) {
            let Some(hash) = hash else {
                census.dead += 1;
                continue;
            };
            if !self.inner.geometry.may_hold(hash, at) {
                return Err(corrupt(format!(
                    "entry {word:#x} of hash {hash:#x} is in a wrong bucket of {subtable}"
                )));
            }
            if state.standing(hash) == Standing::Here {
                census.entries.push((hash, word));
            } else {
                census.strays += 1;
            }
        }
        Ok(())
    }
}
