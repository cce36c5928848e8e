//! What a dead session had retired, freed by whoever recovers it.
//!
//! Its journal ([`super::journal`]) names the objects, on the board and in pages. They are freed first, and then the pages, those that others
//! name before these. Each slot is cleared by CAS and then its object is free: whoever dies in between leaks
//! [`AT_A_TIME`] objects at most, and nothing is freed twice.

use super::journal::PAGE;
use super::{Class, Heap, Objects};
use crate::shared::surely;
use farwood_fabric::control::{MAIN_BASE, PAGE_CLASS, RETIRE_SLOTS};
use farwood_fabric::session::Estate;
use farwood_fabric::{Batch, Endpoint, FabricError, GlobalAddr, Op, marks};
use rustc_hash::FxHashMap;
use std::collections::BTreeSet;

/// How many slots are cleared at a time.
const AT_A_TIME: usize = 8;
/// How often they are cleared again when completions are lost.
const MAX_LOST: u32 = 16;

/// The classes of chunks that were looked at.
type Classes = FxHashMap<GlobalAddr, Option<Class>>;

/// A slot in use, and what it names, if that is ours to free.
struct Named {
    slot: GlobalAddr,
    raw: u64,
    object: Option<(Class, GlobalAddr)>,
}

impl Heap {
    /// Frees what a fenced session had retired, and what is safe by now, from that session's journal. Returns how many objects. No pin of it
    /// is long: others wait for epochs meanwhile.
    pub async fn free_retired_of(&self, endpoint: &Endpoint, estate: &Estate) -> Result<u64, FabricError> {
        let (mut freed, mut classes) = (0, Classes::default());
        for journal in &estate.journals {
            // A page comes after the one that names it.
            let (mut objects, mut pages) = (Vec::new(), Vec::new());
            let mut places = vec![(*journal, RETIRE_SLOTS)];
            while let Some(place) = places.pop() {
                let op = endpoint.op();
                for (slot, raw) in self.slots_in_use(&op, place).await? {
                    if raw & PAGE == 0 {
                        objects.push((slot, raw));
                        continue;
                    }
                    pages.push((slot, raw));
                    if let Some(class) = self.class_named(&op, &mut classes, raw).await? {
                        places.push((GlobalAddr::from_raw(raw & !PAGE), u64::from(class.object_bytes) / 8));
                    }
                }
            }
            for some in objects.chunks(AT_A_TIME) {
                freed += self.free_named(&endpoint.op(), &mut classes, some).await?;
            }
            pages.reverse();
            for some in pages.chunks(AT_A_TIME) {
                marks::hit("journal_page_inherited");
                self.free_named(&endpoint.op(), &mut classes, some).await?;
            }
        }
        Ok(freed)
    }

    async fn slots_in_use(
        &self,
        op: &Op,
        (first, count): (GlobalAddr, u64),
    ) -> Result<Vec<(GlobalAddr, u64)>, FabricError> {
        let words = surely::read(op, first, usize::try_from(count * 8).unwrap_or(0)).await?;
        let slot = |n: u64| (first.add(n * 8), words.word(usize::try_from(n * 8).unwrap_or(0)));
        Ok((0..count).map(slot).filter(|(_, raw)| *raw != 0).collect())
    }

    /// The class of what a slot names. What a name of a page leads to is a page, or nothing of ours any more.
    async fn class_named(
        &self,
        op: &Op,
        classes: &mut Classes,
        raw: u64,
    ) -> Result<Option<Class>, FabricError> {
        let addr = GlobalAddr::from_raw(raw & !PAGE);
        if addr.offset() < MAIN_BASE {
            return Ok(None);
        }
        let chunk = self.chunk_of(addr).0;
        let class = match classes.get(&chunk) {
            Some(class) => *class,
            // It stays so: no chunk changes its class before the adoption is over.
            None => *classes.entry(chunk).or_insert(self.class_at(op, addr).await?),
        };
        Ok(class.filter(|class| (class.class == PAGE_CLASS) == (raw & PAGE != 0)))
    }

    /// Clears slots and frees what they name, unless somebody else has; how many objects that were.
    async fn free_named(
        &self,
        op: &Op,
        classes: &mut Classes,
        slots: &[(GlobalAddr, u64)],
    ) -> Result<u64, FabricError> {
        let mut named = Vec::with_capacity(slots.len());
        for (slot, raw) in slots {
            let (class, addr) =
                (self.class_named(op, classes, *raw).await?, GlobalAddr::from_raw(raw & !PAGE));
            if let Some(class) = class {
                self.wipe(op, class, addr).await?;
            }
            named.push(Named { slot: *slot, raw: *raw, object: class.map(|class| (class, addr)) });
        }
        let (ours, ended) = self.clear_slots(op, named).await;
        let freed = ours.len() as u64;
        self.give_back(op, ours).await?;
        ended.map(|()| freed)
    }

    /// Clears slots; what was in those that we cleared. By CAS: if we die in the middle and somebody else goes on, no object is freed twice.
    async fn clear_slots(&self, op: &Op, mut named: Vec<Named>) -> (Objects, Result<(), FabricError>) {
        let mut ours = Vec::new();
        // Those that an earlier CAS may have cleared: nobody else does while we can.
        let mut in_doubt = BTreeSet::new();
        for _ in 0..MAX_LOST {
            let cas = |named: &Named| {
                let mut batch = Batch::new(named.slot.server());
                batch.cas(named.slot, named.raw, 0);
                batch
            };
            let results = op.submit_all(named.iter().map(cas)).await;
            let (mut again, mut failures) = (Vec::new(), Vec::new());
            for (one, result) in named.into_iter().zip(results) {
                match result {
                    Ok(done) => {
                        let found = done.previous(0);
                        if found == one.raw || (found == 0 && in_doubt.contains(&one.slot)) {
                            marks::hit("retired_object_inherited");
                            ours.extend(one.object);
                        }
                    }
                    Err(failure) => {
                        if failure.may_have_happened(0) {
                            in_doubt.insert(one.slot);
                        }
                        failures.push(failure.error);
                        again.push(one);
                    }
                }
            }
            if again.is_empty() {
                return (ours, Ok(()));
            }
            for error in failures {
                if let Err(error) = surely::reconnected(op, error).await {
                    self.state().counts.doubtful += in_doubt.len() as u64;
                    return (ours, Err(error));
                }
            }
            named = again;
        }
        self.state().counts.doubtful += in_doubt.len() as u64;
        (ours, Err(FabricError::RetriesExhausted { what: "a CAS", attempts: MAX_LOST }))
    }
}
