//! `records`: a word per key that points to an immutable record; a change writes a new record and swings the word by CAS.
//!
//! ```text
//! slot     [ version 16 ] [ packed address of the record 48 ]      address 0: absent
//! record   +0   version, checksum   16 B   (see shared::whole) version = the slot's
//!          +16  key                 8 B
//!          +24  value length        8 B
//!          +32  value
//! ```
//!
//! 1. get: READ the slot, READ the record: two round trips. With a hint (the slot word as last seen) both go in one batch, and
//!    the record counts only if the slot still says the same: one round trip.
//! 2. A change: READ the slot and record, allocate beside the slot, [WRITE record, CAS slot] in one batch, retire the old
//!    record. No locks.
//! 3. After a lost completion the slot tells: my record, I won; the old word, I did not; a word of the next version but not
//!    mine, I did not; anything later, or an empty slot that several may have emptied, and it cannot be known: the records
//!    are abandoned rather than freed.
//! 4. scan: READ the slots of a range together, then their records.
//!
//! Records never change once they are linked, and an operation's pin keeps those it can reach from being used again. So a record
//! that is not whole, or not the one its slot meant, is damage, and is reported as such: readers rely on epochs alone.

use super::{Attached, Bugs, Decide, Geometry, Handle, Opened, corrupt};
use crate::history::Value;
use farwood_fabric::control::{IndexId, IndexInfo, Reply, Request};
use farwood_fabric::session::Estate;
use farwood_fabric::{
    Batch, Buf, CallError, Endpoint, FabricError, GlobalAddr, Op, PackedAddr, RegionId, marks,
};
use farwood_index::pool::recovery::LocalFuture;
use farwood_index::pool::{Mistakes, Recoverer};
use farwood_index::shared::heap::{self, Class};
use farwood_index::shared::surely;
use farwood_index::shared::whole::{self, HEADER_BYTES, Place};
use farwood_index::{Engine, IndexError, Pool};
use rustc_hash::FxHashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

const RECORD_BYTES: u32 = 128;
const RECORD_LEN: usize = RECORD_BYTES as usize;
const VALUE_AT: usize = HEADER_BYTES + 16;
/// The longest value that fits a record.
pub const MAX_VALUE_BYTES: usize = RECORD_LEN - VALUE_AT;
const MAX_ATTEMPTS: u32 = 10_000;
const RECORD_CLASS: u16 = 1;

/// The table of records, as a subject of trials.
#[derive(Clone, Copy, Debug)]
pub struct Records {
    /// How many keys there are: 0 to this, exclusive.
    pub keys: u64,
    /// Mistakes to make.
    pub bugs: Bugs,
}

/// A slot's word, taken apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Slot {
    raw: u64,
}

impl Slot {
    fn new(version: u64, addr: Option<PackedAddr>) -> Self {
        Self { raw: version << PackedAddr::BITS | addr.map_or(0, PackedAddr::to_raw) }
    }

    fn version(self) -> u64 {
        self.raw >> PackedAddr::BITS
    }

    fn next_version(self) -> u64 {
        (self.version() + 1) & 0xffff
    }

    fn record(self) -> Option<GlobalAddr> {
        let addr = PackedAddr::from_raw(self.raw);
        (!addr.is_null()).then(|| addr.unpack())
    }
}

impl Recoverer for Records {
    fn knows(&self, info: &IndexInfo) -> bool {
        info.engine == Engine::name(self)
    }

    /// Nobody holds locks and nothing is ever half-done: only memory is left behind.
    fn settle<'a>(
        &'a self,
        _: &'a Op,
        _: &'a Pool,
        _: &'a IndexInfo,
        _: &'a Estate,
    ) -> LocalFuture<'a, Result<(), IndexError>> {
        Box::pin(async { Ok(()) })
    }
}

fn class(index: IndexId) -> Class {
    Class { index, class: RECORD_CLASS, object_bytes: RECORD_BYTES }
}

impl Engine for Records {
    type Attached = Attached;
    type Index = Handle<RecordsHandle>;

    fn name(&self) -> &'static str {
        "records"
    }

    fn mistakes(&self) -> Mistakes {
        let reuse_without_epoch = self.bugs.reuse_without_epoch;
        Mistakes { heap: heap::Sabotage { reuse_without_epoch, ..Default::default() }, ..Default::default() }
    }

    async fn create(&self, pool: &Pool, endpoint: &Endpoint, index: &str) -> Result<(), IndexError> {
        let op = endpoint.op();
        let info = pool.create_index(&op, index, self.name(), &[]).await?;
        let servers = pool.session().servers().to_vec();
        let geometry = Geometry { servers: servers.len() as u64, entry_bytes: 8 };
        let chunk_bytes = pool.session().cluster().view().smallest_chunk_bytes();
        let mut arrays = Vec::new();
        for server in servers {
            let bytes = geometry.bytes_per_server(self.keys);
            let count = u32::try_from(bytes.div_ceil(chunk_bytes)).unwrap_or(u32::MAX);
            let request =
                Request::AllocChunks { index: info.id, class: 0, object_bytes: 0, count, flushed_through: 0 };
            let Reply::Chunks { offset, .. } = op.control(server, &request).await? else {
                return Err(FabricError::Call(CallError::Malformed).into());
            };
            let array = GlobalAddr::new(server, RegionId::MAIN, offset);
            for entry in 0..bytes / 8 {
                surely::write_word(&op, array.add(entry * 8), 0).await?;
            }
            arrays.push(array);
        }
        super::publish_arrays(&op, &info, &arrays).await?;
        pool.index_ready(&op, info.id).await?;
        Ok(())
    }

    async fn attach(&self, pool: &Pool, endpoint: &Endpoint, index: &str) -> Result<Attached, IndexError> {
        Attached::new(&endpoint.op(), pool, index, self.name(), 8).await
    }

    fn open(&self, attached: &Attached, endpoint: &Endpoint, _: u16) -> Result<Self::Index, IndexError> {
        let hints = Arc::<Mutex<FxHashMap<u64, u64>>>::default();
        let dropped = Arc::downgrade(&hints);
        let Attached { pool, opened } = attached.clone();
        pool.session().on_flush(move || {
            if let Some(hints) = dropped.upgrade() {
                hints.lock().unwrap_or_else(PoisonError::into_inner).clear();
            }
        });
        Ok(Handle(RecordsHandle { opened, pool, endpoint: endpoint.clone(), engine: *self, hints }))
    }

    fn recoverer(&self) -> Option<Arc<dyn Recoverer>> {
        Some(Arc::new(*self))
    }

    async fn extents(&self, attached: &Attached, _: &Endpoint) -> Result<Vec<GlobalAddr>, IndexError> {
        Ok(attached.opened.arrays.clone())
    }

    async fn check(
        &self,
        attached: &Attached,
        endpoint: &Endpoint,
    ) -> Result<Vec<(Class, GlobalAddr)>, IndexError> {
        let op = endpoint.op();
        let opened = &attached.opened;
        let mut reachable = Vec::new();
        for key in 0..self.keys {
            let slot = Slot { raw: surely::read_word(&op, opened.addr(key)).await? };
            let Some(addr) = slot.record() else { continue };
            let record = surely::read(&op, addr, RECORD_LEN).await?;
            let place = Place { index: opened.info.id, addr };
            if place.version_if_whole(&record) != Some(slot.version()) || record.word(HEADER_BYTES) != key {
                return Err(corrupt(format!(
                    "the slot of key {key} leads to something that is not its record"
                )));
            }
            reachable.push((class(opened.info.id), addr));
        }
        Ok(reachable)
    }
}

/// One task's access to the records.
#[derive(Debug)]
pub struct RecordsHandle {
    opened: Opened,
    pool: Pool,
    endpoint: Endpoint,
    engine: Records,
    /// Slot words as last seen, by key.
    hints: Arc<Mutex<FxHashMap<u64, u64>>>,
}

impl RecordsHandle {
    fn hints(&self) -> MutexGuard<'_, FxHashMap<u64, u64>> {
        self.hints.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The value, if the bytes are the record that `slot` means.
    fn value_of(&self, key: u64, slot: Slot, record: &Buf) -> Option<Value> {
        let place = Place { index: self.opened.info.id, addr: slot.record()? };
        let whole =
            place.version_if_whole(record) == Some(slot.version()) && record.word(HEADER_BYTES) == key;
        whole.then(|| value_in(record))
    }

    /// The slot, and the value it leads to, as of one instant of the call.
    async fn look(&self, op: &Op, key: u64) -> Result<(Slot, Option<Value>), IndexError> {
        let at = self.opened.addr(key);
        let hint = self.hints().get(&key).copied().map(|raw| Slot { raw });
        if let Some((hint, addr)) = hint.and_then(|hint| Some((hint, hint.record()?))) {
            let mut batch = Batch::new(at.server());
            let (slot, record) = (batch.read(at, 8), batch.read(addr, RECORD_LEN));
            match op.submit(batch).await {
                Ok(mut done) => {
                    let (now, record) = (done.take(slot).word(0), done.take(record));
                    if now == hint.raw {
                        marks::hit("hint_good");
                        let value = self.value_of(key, hint, &record);
                        let value = value.ok_or_else(|| damaged(key))?;
                        return Ok((hint, Some(value)));
                    }
                    marks::hit("hint_stale");
                }
                Err(failure) => surely::reconnected(op, failure.error).await?,
            }
        }
        let slot = Slot { raw: surely::read_word(op, at).await? };
        let Some(addr) = slot.record() else { return Ok((slot, None)) };
        // The record may be unlinked by now, but this operation's pin keeps it from being used again.
        let record = surely::read(op, addr, RECORD_LEN).await?;
        let value = self.value_of(key, slot, &record).ok_or_else(|| damaged(key))?;
        self.hints().insert(key, slot.raw);
        Ok((slot, Some(value)))
    }

    /// Swings the slot from `old` to a record with `value` (or to nothing). Whether it won.
    async fn swing(&self, op: &Op, key: u64, old: Slot, value: Option<&[u8]>) -> Result<bool, IndexError> {
        let (at, index, heap) = (self.opened.addr(key), self.opened.info.id, self.pool.heap());
        let mut batch = Batch::new(at.server());
        let mut fresh = None;
        let new = match value {
            None => Slot::new(old.next_version(), None),
            Some(value) => {
                let addr = heap.allocate(op, at.server(), class(index)).await?;
                fresh = Some(addr);
                let new = Slot::new(old.next_version(), PackedAddr::pack(addr));
                batch.write(addr, self.record(op, addr, key, new.version(), value));
                new
            }
        };
        let cas = batch.cas(at, old.raw, new.raw);
        let won = match op.submit(batch).await {
            Ok(done) => done.previous(cas) == old.raw,
            Err(failure) => {
                let found = async {
                    surely::reconnected(op, failure.error).await?;
                    surely::read_word(op, at).await
                };
                // Whoever cannot look does not know: the record is not used again, since it may be linked yet, or written to.
                let now = found.await.inspect_err(|_| heap.abandon()).map_err(nobody_knows)?;
                let now = Slot { raw: now };
                // An emptied slot says that somebody emptied it, not who; a record says whose it is.
                let can_tell = match fresh {
                    Some(_) => now.raw == old.raw || now.version() == new.version(),
                    None => now.raw == old.raw || (now.version() == new.version() && now.raw != new.raw),
                };
                if !can_tell {
                    heap.abandon();
                    return Err(IndexError::Unknown);
                }
                marks::hit("outcome_found_out");
                now.raw == new.raw
            }
        };
        if won {
            if let Some(addr) = old.record() {
                heap.retire(op, class(index), addr).await.map_err(nobody_knows)?;
            }
            if new.record().is_some() {
                self.hints().insert(key, new.raw);
            } else {
                self.hints().remove(&key);
            }
        } else if let Some(addr) = fresh {
            marks::hit("lost_cas");
            heap.free_unpublished(class(index), addr);
        }
        Ok(won)
    }

    fn record(&self, op: &Op, addr: GlobalAddr, key: u64, version: u64, value: &[u8]) -> Buf {
        let mut record = op.endpoint().buf(RECORD_LEN);
        record.fill(0);
        record.set_word(HEADER_BYTES, key);
        record.set_word(HEADER_BYTES + 8, value.len() as u64);
        record[VALUE_AT..VALUE_AT + value.len()].copy_from_slice(value);
        Place { index: self.opened.info.id, addr }.seal(version, &mut record);
        record
    }
}

/// The operation may have happened; what comes after it failed.
fn nobody_knows(error: FabricError) -> IndexError {
    match IndexError::from(error) {
        IndexError::Fenced => IndexError::Fenced,
        _ => IndexError::Unknown,
    }
}

fn damaged(key: u64) -> IndexError {
    corrupt(format!("the slot of key {key} leads to a record that is not whole, or not its own"))
}

fn value_in(record: &Buf) -> Value {
    let len = usize::try_from(record.word(HEADER_BYTES + 8)).unwrap_or(usize::MAX).min(MAX_VALUE_BYTES);
    record[VALUE_AT..VALUE_AT + len].to_vec()
}

impl super::Access for RecordsHandle {
    fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    fn keys(&self) -> u64 {
        self.engine.keys
    }

    fn max_value_bytes(&self) -> usize {
        MAX_VALUE_BYTES
    }

    async fn fetch(&self, op: &Op, key: u64) -> Result<Option<Value>, IndexError> {
        let hint = self.hints().get(&key).and_then(|raw| Slot { raw: *raw }.record());
        if let (true, Some(addr)) = (self.engine.bugs.trust_hint, hint) {
            return Ok(Some(value_in(&surely::read(op, addr, RECORD_LEN).await?)));
        }
        Ok(self.look(op, key).await?.1)
    }

    async fn fetch_many(&self, op: &Op, keys: &[u64]) -> Result<Vec<Option<Value>>, IndexError> {
        let slots: Vec<_> = keys.iter().map(|key| (self.opened.addr(*key), 8)).collect();
        let slots: Vec<Slot> = match op.read_many(&slots).await {
            Ok(words) => words.iter().map(|word| Slot { raw: word.word(0) }).collect(),
            Err(error) => {
                surely::reconnected(op, error).await?;
                vec![Slot::new(0, None); keys.len()]
            }
        };
        let records: Vec<_> =
            slots.iter().filter_map(|s| s.record()).map(|addr| (addr, RECORD_LEN)).collect();
        let mut records = op.read_many(&records).await.unwrap_or_default().into_iter();
        let mut values = Vec::new();
        for (key, slot) in keys.iter().zip(slots) {
            let record = slot.record().and_then(|_| records.next());
            let value = record.and_then(|record| self.value_of(*key, slot, &record));
            values.push(match value {
                Some(value) => Some(value),
                // Absent, or changed meanwhile, or not read: look again.
                None => self.fetch(op, *key).await?,
            });
        }
        Ok(values)
    }

    async fn modify(&self, op: &Op, key: u64, decide: Decide<'_>) -> Result<bool, IndexError> {
        for _ in 0..MAX_ATTEMPTS {
            let (slot, value) = self.look(op, key).await?;
            let Some(change) = decide(value.as_deref()) else { return Ok(false) };
            if self.swing(op, key, slot, change.as_deref()).await? {
                return Ok(true);
            }
            op.count_retry();
        }
        Err(IndexError::Contended { what: "a slot", attempts: MAX_ATTEMPTS })
    }
}

const _: () = assert!(whole::HEADER_BYTES == 16 && RECORD_BYTES % 64 == 0);
