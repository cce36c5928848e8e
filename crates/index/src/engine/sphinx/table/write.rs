//! Insert, replace, remove: one CAS of a slot each, and a look behind it in the same batch.

use super::layout::{FROZEN, STATE_AT, Standing};
use super::read::{Probe, Seen, Slot, decode};
use super::{MAX_ATTEMPTS, MAX_ENTRY, Nodes, Table};
use crate::api::IndexError;
use crate::shared::surely;
use farwood_fabric::{Batch, GlobalAddr, Op, marks};
use smallvec::SmallVec;

/// What became of an attempt to change a slot.
enum Swap {
    /// It is changed.
    Done,
    /// It held something else.
    Lost,
    /// The completion was lost, and what the slot holds now does not tell.
    Doubtful,
}

impl Table {
    /// Inserts an entry whose node is in place. Two round trips, if nobody is in the way. Done already if the entry is there.
    pub async fn insert(&self, op: &Op, nodes: &impl Nodes, hash: u64, entry: u64) -> Result<(), IndexError> {
        check_entry(entry)?;
        let mut strays: SmallVec<[GlobalAddr; 2]> = SmallVec::new();
        let mut seen = Seen::nothing(self.probe(hash));
        for _ in 0..MAX_ATTEMPTS {
            self.see(op, hash, &mut seen).await?;
            let subtable = seen.probe.subtable;
            let is_here = seen.state.standing(hash) == Standing::Here;
            if is_here && seen.holds(entry) || seen.holds(entry | FROZEN) {
                return self.remove_from(op, &strays, entry).await;
            }
            let Some(slot) = seen.empty_slot().filter(|_| is_here) else {
                // Full, or no longer to be inserted into: after the split there is room.
                self.resize(op, nodes, subtable, seen.state.depth).await?;
                continue;
            };
            if let Swap::Done = self.swap(op, slot, (0, entry), &mut seen).await? {
                if self.counts(op, nodes, hash, Slot { addr: slot, entry }, &seen).await? {
                    // If several insert one entry at once, the first slot stays. All agree on which that is.
                    let copies = seen.copies_of(entry);
                    strays.extend(copies.iter().skip(1).map(|copy| copy.addr));
                    return self.remove_from(op, &strays, entry).await;
                }
                strays.push(slot);
            }
            marks::hit("hash_insert_again");
            op.count_retry();
        }
        Err(IndexError::Contended { what: "a slot of the hash table", attempts: MAX_ATTEMPTS })
    }

    /// Replaces an entry that a look-up found by another of the same hash. One round trip, if nobody is in the way. Whether the old one was there.
    pub async fn replace(
        &self,
        op: &Op,
        nodes: &impl Nodes,
        hash: u64,
        old: Slot,
        new: u64,
    ) -> Result<bool, IndexError> {
        check_entry(new)?;
        let mut guess = Some(old.addr);
        let mut is_doubtful = false;
        let mut seen = Seen::nothing(self.probe(hash));
        for _ in 0..MAX_ATTEMPTS {
            seen.probe = self.probe(hash);
            let Some(addr) = guess.take().filter(|addr| seen.probe.holds(*addr)) else {
                self.see(op, hash, &mut seen).await?;
                guess = self.find_slot(op, nodes, &seen, old.entry).await?;
                match guess {
                    Some(_) => continue,
                    None if !seen.matching(|other| other == old.entry).is_empty() => continue,
                    None if !is_doubtful => return Ok(false),
                    None if !seen.matching(|other| other == new).is_empty() => return Ok(true),
                    None => return Err(IndexError::Unknown),
                }
            };
            match self.swap(op, addr, (old.entry, new), &mut seen).await? {
                Swap::Done => {
                    let copies: SmallVec<[GlobalAddr; 2]> =
                        seen.copies_of(old.entry).iter().map(|copy| copy.addr).collect();
                    if !self.counts(op, nodes, hash, Slot { addr, entry: new }, &seen).await? {
                        Box::pin(self.insert(op, nodes, hash, new)).await?;
                        self.remove_from(op, &[addr], new).await?;
                    }
                    self.remove_from(op, &copies, old.entry).await?;
                    return Ok(true);
                }
                Swap::Lost => marks::hit("hash_replace_lost"),
                Swap::Doubtful => is_doubtful = true,
            }
            op.count_retry();
        }
        Err(IndexError::Contended { what: "an entry of the hash table", attempts: MAX_ATTEMPTS })
    }

    /// Removes an entry. Two round trips, if nobody is in the way. Whether it was there.
    pub async fn remove(
        &self,
        op: &Op,
        nodes: &impl Nodes,
        hash: u64,
        entry: u64,
    ) -> Result<bool, IndexError> {
        let mut was_there = false;
        let mut seen = Seen::nothing(self.probe(hash));
        self.see(op, hash, &mut seen).await?;
        for _ in 0..MAX_ATTEMPTS {
            if seen.matching(|other| other == entry).is_empty() {
                return Ok(was_there);
            }
            if let Some(slot) = self.find_slot(op, nodes, &seen, entry).await? {
                match self.swap(op, slot, (entry, 0), &mut seen).await? {
                    Swap::Done => {
                        was_there = true;
                        // Behind the CAS, in order: if no other copy was seen and nothing moves, there is none.
                        if op.endpoint().capabilities().ordered_reads
                            && seen.state.standing(hash) == Standing::Here
                        {
                            continue;
                        }
                    }
                    Swap::Lost => {}
                    Swap::Doubtful => was_there = true,
                }
                op.count_retry();
            }
            self.see(op, hash, &mut seen).await?;
        }
        Err(IndexError::Contended { what: "an entry of the hash table", attempts: MAX_ATTEMPTS })
    }

    /// A slot where this entry can be changed. If it is frozen, waits until it has moved.
    async fn find_slot(
        &self,
        op: &Op,
        nodes: &impl Nodes,
        seen: &Seen,
        entry: u64,
    ) -> Result<Option<GlobalAddr>, IndexError> {
        let slot = seen.copies_of(entry).first().map(|slot| slot.addr);
        if slot.is_none() && seen.holds(entry | FROZEN) {
            marks::hit("hash_change_waits");
            self.resize(op, nodes, seen.probe.subtable, seen.state.depth).await?;
        }
        Ok(slot)
    }

    /// Whether an entry that was just stored counts, going by what was seen behind that. If not, it has to be stored where its hash belongs now, and then
    /// to be removed from here: in this order, so that it is not lost if we die between.
    async fn counts(
        &self,
        op: &Op,
        nodes: &impl Nodes,
        hash: u64,
        stored: Slot,
        behind: &Seen,
    ) -> Result<bool, IndexError> {
        let standing = behind.state.standing(hash);
        if standing == Standing::Here || self.inner.sabotage.skip_recheck {
            return Ok(true);
        }
        marks::hit("hash_recheck_failed");
        if standing == Standing::Leaving {
            self.resize(op, nodes, behind.probe.subtable, behind.state.depth).await?;
        }
        // The split is through. What is not frozen by now was not seen by it; and if something else is there, somebody else has
        // changed or removed the entry, or it was moved.
        let is_left_behind = surely::read_word(op, stored.addr).await? == stored.entry;
        if is_left_behind {
            marks::hit("hash_entry_left_behind");
        }
        Ok(!is_left_behind)
    }

    /// Empties slots, as far as they still hold the entry.
    async fn remove_from(&self, op: &Op, slots: &[GlobalAddr], entry: u64) -> Result<(), IndexError> {
        for slot in slots {
            marks::hit("hash_copy_removed");
            if let Err(error) = op.cas(*slot, entry, 0).await {
                // Repeated once, so that a copy that nobody looks for stays only if this is cut off too.
                surely::reconnected(op, error).await?;
                let _ = op.cas(*slot, entry, 0).await;
            }
        }
        Ok(())
    }

    /// One CAS of a slot, with a look behind it at where `seen` was seen: one round trip. If it was changed, `seen` is what was there then.
    async fn swap(
        &self,
        op: &Op,
        slot: GlobalAddr,
        (old, new): (u64, u64),
        seen: &mut Seen,
    ) -> Result<Swap, IndexError> {
        let probe = seen.probe;
        if let Some(looked) = seen.here(op, probe, Some((slot, old, new))).await {
            if looked? == old {
                return Ok(Swap::Done);
            }
            marks::hit("lost_cas");
            return Ok(Swap::Lost);
        }
        let mut batch = Batch::new(self.server());
        let cas = batch.cas(slot, old, new);
        let reads = probe.places().map(|(addr, bytes)| batch.read(addr, bytes));
        let state = batch.read(probe.subtable.add(STATE_AT), 8);
        match op.submit(batch).await {
            Ok(mut done) if done.previous(cas) == old => {
                let pairs = reads.map(|read| done.take(read));
                seen.fill(probe, &pairs, decode(done.take(state).word(0), probe.subtable)?);
                Ok(Swap::Done)
            }
            Ok(_) => {
                marks::hit("lost_cas");
                Ok(Swap::Lost)
            }
            Err(failure) => {
                // Once reconnected the CAS has happened or never will, and the slot may tell which.
                surely::reconnected(op, failure.error).await?;
                let now = surely::read_word(op, slot).await?;
                if now == old {
                    return Ok(Swap::Lost);
                }
                if now & !FROZEN == new && new != 0 {
                    marks::hit("hash_swapped_unknowingly");
                    self.look(op, probe, seen).await?;
                    return Ok(Swap::Done);
                }
                Ok(Swap::Doubtful)
            }
        }
    }
}

impl Probe {
    /// Whether a slot is one of those that it looks at.
    fn holds(&self, slot: GlobalAddr) -> bool {
        self.places().iter().any(|(addr, bytes)| {
            slot.server() == addr.server()
                && (addr.offset()..addr.offset() + *bytes as u64).contains(&slot.offset())
        })
    }
}

fn check_entry(entry: u64) -> Result<(), IndexError> {
    if (1..=MAX_ENTRY).contains(&entry) {
        return Ok(());
    }
    Err(IndexError::BadValue { why: format!("a hash entry of {entry:#x}; it can be 1 to {MAX_ENTRY:#x}") })
}
