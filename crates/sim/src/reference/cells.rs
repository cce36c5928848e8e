//! `cells`: a remote array of checksummed cells with lock words, updated in place.
//!
//! The smallest structure that takes the whole path: ordered batches, locks, whole reads, intents, recovery of the dead.
//! Key k (eight bytes, big-endian) lives in a fixed cell on server k mod n:
//!
//! ```text
//! cell     +0   version, checksum   16 B   (see shared::whole)
//!          +16  present             8 B
//!          +24  value length        8 B
//!          +32  value               padded to the cell's size
//! intent   +0   version, checksum   16 B   keyed by the lock's address; version = the lock word under which it was written
//!          +16  address of the cell 8 B
//!          +24  the cell's new bytes
//! ```
//!
//! 1. get: READ the cell until it is whole. One round trip.
//! 2. put, delete, compare-and-swap: [CAS lock, READ cell], then [WRITE intent, WRITE cell, WRITE unlock]. Two round trips.
//!    The intent is whole before the first word of the cell changes (rule 3), so a writer that dies in the middle leaves
//!    enough to finish its work.
//! 3. A lock that does not come free for long: its owner is fenced, if its lease has run out, and recovered: for each of its
//!    locks, the intent written under that very acquisition is carried out again, then the lock is released.
//! 4. scan: READ the cells of a range together, repeat those that are torn.

use super::{Attached, Bugs, Geometry, Handle, Opened, corrupt};
use crate::history::Value;
use farwood_fabric::control::{ANCHOR_BYTES, INTENT_BYTES, IndexId, IndexInfo, RETIRE_SLOTS, Reply, Request};
use farwood_fabric::session::Estate;
use farwood_fabric::{
    Batch, Buf, CallError, Endpoint, FabricError, GlobalAddr, Op, RegionId, ServerId, SessionId, marks,
};
use farwood_index::pool::Recoverer;
use farwood_index::pool::recovery::LocalFuture;
use farwood_index::shared::heap::Class;
use farwood_index::shared::lock::LockWord;
use farwood_index::shared::surely;
use farwood_index::shared::whole::{self, HEADER_BYTES, Place};
use farwood_index::{Engine, IndexError, Pool};
use std::sync::Arc;

const CELL_BYTES: usize = 128;
const VALUE_AT: usize = HEADER_BYTES + 16;
/// The longest value that fits a cell.
pub const MAX_VALUE_BYTES: usize = CELL_BYTES - VALUE_AT;
const INTENT_SLOT_BYTES: usize = HEADER_BYTES + 8 + CELL_BYTES;
const INTENT_SLOTS: u64 = INTENT_BYTES / INTENT_SLOT_BYTES as u64;
/// Few locks, so that keys share them.
const LOCKS: u64 = 8;
const MAX_LOCK_ATTEMPTS: u32 = 20_000;
/// How long a reconnect that failed is not tried again.
const RECONNECT_EVERY_NS: u64 = 20_000;
/// After so many looks at the same lock word its owner is suspected.
const PATIENCE: u32 = 40;

/// The array of cells, as an engine.
#[derive(Clone, Copy, Debug)]
pub struct Cells {
    /// How many keys there are: 0 to this, exclusive.
    pub keys: u64,
    /// Mistakes to make.
    pub bugs: Bugs,
}

impl Engine for Cells {
    type Attached = Attached;
    type Index = Handle<CellsHandle>;

    fn name(&self) -> &'static str {
        "cells"
    }

    async fn create(&self, pool: &Pool, endpoint: &Endpoint, index: &str) -> Result<(), IndexError> {
        let op = endpoint.op();
        let info = pool.create_index(&op, index, self.name(), &[]).await?;
        let servers = pool.session().servers().to_vec();
        let geometry = Geometry { servers: servers.len() as u64, entry_bytes: CELL_BYTES as u64 };
        let chunk_bytes = pool.session().cluster().view().smallest_chunk_bytes();
        let mut arrays = Vec::new();
        for server in servers {
            let count =
                u32::try_from(geometry.bytes_per_server(self.keys).div_ceil(chunk_bytes)).unwrap_or(u32::MAX);
            let request =
                Request::AllocChunks { index: info.id, class: 0, object_bytes: 0, count, flushed_through: 0 };
            let Reply::Chunks { offset, .. } = op.control(server, &request).await? else {
                return Err(FabricError::Call(CallError::Malformed).into());
            };
            arrays.push(GlobalAddr::new(server, RegionId::MAIN, offset));
        }
        for key in 0..self.keys {
            let addr = geometry.addr(&arrays, key);
            let cell = sealed(&op, Place { index: info.id, addr }, 1, None);
            op.write(addr, cell).await?;
        }
        super::publish_arrays(&op, &info, &arrays).await?;
        pool.index_ready(&op, info.id).await?;
        Ok(())
    }

    async fn attach(&self, pool: &Pool, endpoint: &Endpoint, index: &str) -> Result<Attached, IndexError> {
        Attached::new(&endpoint.op(), pool, index, self.name(), CELL_BYTES as u64).await
    }

    fn open(&self, attached: &Attached, endpoint: &Endpoint, handle: u16) -> Result<Self::Index, IndexError> {
        if u64::from(handle) >= INTENT_SLOTS {
            return Err(IndexError::BadValue {
                why: format!("cells have room for {INTENT_SLOTS} handles a session"),
            });
        }
        let Attached { pool, opened } = attached.clone();
        Ok(Handle(CellsHandle { opened, pool, endpoint: endpoint.clone(), number: handle, engine: *self }))
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
        let Attached { pool, opened } = attached;
        for key in 0..self.keys {
            let addr = opened.addr(key);
            let place = Place { index: opened.info.id, addr };
            let cell = surely::read(&op, addr, CELL_BYTES).await?;
            if place.version_if_whole(&cell).is_none() {
                return Err(corrupt(format!("the cell of key {key} is torn though nobody writes")));
            }
        }
        for server in pool.session().servers() {
            for lock in 0..LOCKS {
                let word = LockWord::from_raw(surely::read_word(&op, lock_addr(*server, lock)).await?);
                if !word.is_free() {
                    return Err(corrupt(format!("lock {lock} of {server} is still held by {}", word.owner)));
                }
            }
        }
        Ok(Vec::new())
    }
}

impl Cells {
    /// What an intent's checksum is keyed by: the lock it was written under. (Sequence numbers of two locks may agree.)
    fn intent_key(&self, lock: GlobalAddr) -> GlobalAddr {
        if self.bugs.intent_without_lock { GlobalAddr::NULL } else { lock }
    }
}

fn lock_addr(server: ServerId, lock: u64) -> GlobalAddr {
    GlobalAddr::new(server, RegionId::LOCK, lock * 8)
}

/// A cell with this value, sealed.
fn sealed(op: &Op, place: Place, version: u64, value: Option<&[u8]>) -> Buf {
    let mut cell = op.endpoint().buf(CELL_BYTES);
    cell.fill(0);
    if let Some(value) = value {
        cell.set_word(HEADER_BYTES, 1);
        cell.set_word(HEADER_BYTES + 8, value.len() as u64);
        cell[VALUE_AT..VALUE_AT + value.len()].copy_from_slice(value);
    }
    place.seal(version, &mut cell);
    cell
}

/// The value in a cell's payload.
fn value_of(payload: &[u8]) -> Option<Value> {
    let word = |at: usize| payload[at..at + 8].try_into().map_or(0, u64::from_le_bytes);
    let len = usize::try_from(word(8)).unwrap_or(usize::MAX).min(MAX_VALUE_BYTES);
    (word(0) == 1).then(|| payload[16..16 + len].to_vec())
}

/// One task's access to the cells.
#[derive(Debug)]
pub struct CellsHandle {
    opened: Opened,
    pool: Pool,
    endpoint: Endpoint,
    number: u16,
    engine: Cells,
}

/// A lock that is held, and the cell as it was when it was taken.
struct Held {
    word: LockWord,
    lock: GlobalAddr,
    addr: GlobalAddr,
    version: u64,
    value: Option<Value>,
}

impl super::Access for CellsHandle {
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
        let addr = self.opened.addr(key);
        if self.engine.bugs.trust_single_read {
            let cell = surely::read(op, addr, CELL_BYTES).await?;
            return Ok(value_of(&cell[HEADER_BYTES..]));
        }
        Ok(value_of(read_cell(op, self.place(addr)).await?.payload()))
    }

    async fn fetch_many(&self, op: &Op, keys: &[u64]) -> Result<Vec<Option<Value>>, IndexError> {
        let places: Vec<_> = keys.iter().map(|key| (self.opened.addr(*key), CELL_BYTES)).collect();
        let bufs = match op.read_many(&places).await {
            Ok(bufs) => bufs,
            Err(error) => {
                surely::reconnected(op, error).await?;
                Vec::new()
            }
        };
        let mut values = Vec::new();
        let mut bufs = bufs.into_iter();
        for key in keys {
            let place = self.place(self.opened.addr(*key));
            let accepted = bufs.next().and_then(|buf| whole::accept(place, buf).ok());
            values.push(match accepted {
                Some(cell) => value_of(cell.payload()),
                None => self.fetch(op, *key).await?,
            });
        }
        Ok(values)
    }

    async fn modify(
        &self,
        op: &Op,
        key: u64,
        decide: &dyn Fn(Option<&[u8]>) -> Option<Option<Value>>,
    ) -> Result<bool, IndexError> {
        let held = self.or_condemn(self.lock_and_read(op, key).await)?;
        if let Some(value) = decide(held.value.as_deref()) {
            self.or_condemn(self.write_and_unlock(op, &held, value.as_deref()).await)?;
            Ok(true)
        } else {
            self.or_condemn(self.unlock(op, &held).await)?;
            Ok(false)
        }
    }
}

async fn read_cell(op: &Op, place: Place) -> Result<whole::Whole, FabricError> {
    for _ in 0..whole::MAX_ATTEMPTS {
        match whole::read(op, place, CELL_BYTES).await {
            Err(error) => surely::reconnected(op, error).await?,
            whole => return whole,
        }
    }
    Err(FabricError::RetriesExhausted { what: "reading a cell", attempts: whole::MAX_ATTEMPTS })
}

impl CellsHandle {
    fn place(&self, addr: GlobalAddr) -> Place {
        Place { index: self.opened.info.id, addr }
    }

    async fn lock_and_read(&self, op: &Op, key: u64) -> Result<Held, IndexError> {
        let addr = self.opened.addr(key);
        let lock = lock_addr(addr.server(), key / self.opened.geometry.servers % LOCKS);
        let me = self.pool.session().id();
        let mut expected = LockWord::from_raw(0);
        let mut patience = Patience::default();
        for _ in 0..MAX_LOCK_ATTEMPTS {
            let mine = expected.taken_by(me, self.number);
            let mut batch = Batch::new(addr.server());
            let cas = batch.cas(lock, expected.to_raw(), mine.to_raw());
            let read = batch.read(addr, CELL_BYTES);
            let seen = match op.submit(batch).await {
                Ok(mut done) if done.previous(cas) == expected.to_raw() => {
                    let cell = whole::accept(self.place(addr), done.take(read));
                    let cell =
                        cell.map_err(|_| corrupt(format!("the cell of key {key} is torn under its lock")))?;
                    return Ok(Held {
                        word: mine,
                        lock,
                        addr,
                        version: cell.version,
                        value: value_of(cell.payload()),
                    });
                }
                Ok(done) => done.previous(cas),
                Err(failure) => {
                    // Now the CAS has happened or never will.
                    reconnected(op, failure.error).await?;
                    let seen = insist(op, || surely::read_word(op, lock)).await?;
                    if seen == mine.to_raw() {
                        marks::hit("lock_taken_unknowingly");
                        let cell = insist(op, || read_cell(op, self.place(addr))).await?;
                        let value = value_of(cell.payload());
                        return Ok(Held { word: mine, lock, addr, version: cell.version, value });
                    }
                    seen
                }
            };
            let seen = LockWord::from_raw(seen);
            if seen.is_free() {
                marks::hit("lost_cas");
                expected = seen;
                continue;
            }
            op.count_retry();
            if patience.tried(seen) {
                if self.engine.bugs.steal_without_fence {
                    marks::hit("stolen_without_fence");
                    expected = seen;
                    continue;
                }
                self.suspect(op, seen.owner).await?;
            }
            op.endpoint().sleep(500 + op.endpoint().random_below(2000)).await;
        }
        Err(IndexError::Contended { what: "a lock", attempts: MAX_LOCK_ATTEMPTS })
    }

    /// What failed on the way to a lock, or under one, may have left the lock taken: others have to free it.
    fn or_condemn<T>(&self, result: Result<T, IndexError>) -> Result<T, IndexError> {
        if matches!(result, Err(IndexError::Unknown | IndexError::Fabric(_))) {
            self.pool.session().condemn();
        }
        result
    }

    /// The owner of a lock may be dead: cleans up after it, if its lease has run out.
    async fn suspect(&self, op: &Op, owner: SessionId) -> Result<(), IndexError> {
        self.pool.suspect(op, owner).await.map(drop)
    }

    fn intent_addr(&self, server: ServerId) -> Option<GlobalAddr> {
        let journal = self.pool.session().journal(server)?;
        Some(journal.add(RETIRE_SLOTS * 8 + u64::from(self.number) * INTENT_SLOT_BYTES as u64))
    }

    async fn write_and_unlock(&self, op: &Op, held: &Held, value: Option<&[u8]>) -> Result<(), IndexError> {
        let Some(intent_addr) = self.intent_addr(held.addr.server()) else {
            return Err(corrupt("no journal on the cell's server".into()));
        };
        for _ in 0..whole::MAX_ATTEMPTS {
            let cell = sealed(op, self.place(held.addr), held.version + 1, value);
            let mut intent = op.endpoint().buf(INTENT_SLOT_BYTES);
            intent.set_word(HEADER_BYTES, held.addr.to_raw());
            intent[HEADER_BYTES + 8..].copy_from_slice(&cell);
            self.place(self.engine.intent_key(held.lock)).seal(held.word.to_raw(), &mut intent);
            let mut batch = Batch::new(held.addr.server());
            batch.write(intent_addr, intent);
            batch.write(held.addr, cell);
            batch.write_word(held.lock, held.word.released().to_raw());
            match op.submit(batch).await {
                Ok(_) => return Ok(()),
                Err(failure) => reconnected(op, failure.error).await?,
            }
            // Nothing of the batch lands later. The unlock was its last verb: if it happened, all did.
            if insist(op, || surely::read_word(op, held.lock)).await? != held.word.to_raw() {
                return Ok(());
            }
            marks::hit("write_repeated");
        }
        Err(IndexError::Contended { what: "a completion", attempts: whole::MAX_ATTEMPTS })
    }

    async fn unlock(&self, op: &Op, held: &Held) -> Result<(), IndexError> {
        for _ in 0..whole::MAX_ATTEMPTS {
            match op.write_word(held.lock, held.word.released().to_raw()).await {
                Ok(()) => return Ok(()),
                Err(error) => reconnected(op, error).await?,
            }
            if insist(op, || surely::read_word(op, held.lock)).await? != held.word.to_raw() {
                return Ok(());
            }
        }
        Err(IndexError::Contended { what: "a completion", attempts: whole::MAX_ATTEMPTS })
    }
}

/// Reconnects, as often as it takes: before that nothing is settled, and whoever holds a lock, or may hold it, cannot go.
async fn reconnected(op: &Op, mut error: FabricError) -> Result<(), FabricError> {
    for _ in 0..MAX_LOCK_ATTEMPTS {
        match surely::reconnected(op, error).await {
            Err(again @ FabricError::Disconnected { .. }) => error = again,
            ended => return ended,
        }
        op.endpoint().sleep(RECONNECT_EVERY_NS).await;
    }
    Err(FabricError::RetriesExhausted { what: "a reconnect", attempts: MAX_LOCK_ATTEMPTS })
}

/// Does something until the line to its server lasts long enough.
async fn insist<T, F: Future<Output = Result<T, FabricError>>>(
    op: &Op,
    work: impl Fn() -> F,
) -> Result<T, FabricError> {
    for _ in 0..MAX_LOCK_ATTEMPTS {
        match work().await {
            Err(error @ FabricError::Disconnected { .. }) => reconnected(op, error).await?,
            ended => return ended,
        }
    }
    Err(FabricError::RetriesExhausted { what: "a line that lasts", attempts: MAX_LOCK_ATTEMPTS })
}

/// Counts looks at one lock word.
#[derive(Default)]
struct Patience {
    word: Option<LockWord>,
    looks: u32,
}

impl Patience {
    /// One more look; true when it is time to suspect the owner.
    fn tried(&mut self, seen: LockWord) -> bool {
        if self.word != Some(seen) {
            *self = Self { word: Some(seen), looks: 0 };
        }
        self.looks += 1;
        self.looks % PATIENCE == 0
    }
}

impl Recoverer for Cells {
    fn knows(&self, info: &IndexInfo) -> bool {
        info.engine == Engine::name(self)
    }

    /// Finishes what the dead session was in the middle of, lock by lock, and frees its locks.
    fn settle<'a>(
        &'a self,
        op: &'a Op,
        pool: &'a Pool,
        info: &'a IndexInfo,
        estate: &'a Estate,
    ) -> LocalFuture<'a, Result<(), IndexError>> {
        Box::pin(async move {
            for server in pool.session().servers() {
                for lock in 0..LOCKS {
                    let lock = lock_addr(*server, lock);
                    let word = LockWord::from_raw(surely::read_word(op, lock).await?);
                    if word.owner == estate.victim {
                        finish_write(self, op, info.id, estate, lock, word).await?;
                        free(op, lock, word).await?;
                        marks::hit("lock_of_the_dead_released");
                    }
                }
            }
            Ok(())
        })
    }
}

/// Frees a lock of the dead. Somebody else may hold it when a lost completion makes us try again, so we look first.
async fn free(op: &Op, lock: GlobalAddr, word: LockWord) -> Result<(), IndexError> {
    for _ in 0..whole::MAX_ATTEMPTS {
        match op.write_word(lock, word.released().to_raw()).await {
            Ok(()) => return Ok(()),
            Err(error) => surely::reconnected(op, error).await?,
        }
        if surely::read_word(op, lock).await? != word.to_raw() {
            return Ok(());
        }
    }
    Err(IndexError::Contended { what: "a completion", attempts: whole::MAX_ATTEMPTS })
}

/// Carries out again what a dead session wrote, or was about to write, under the lock word `word`.
async fn finish_write(
    engine: &Cells,
    op: &Op,
    index: IndexId,
    estate: &Estate,
    lock: GlobalAddr,
    word: LockWord,
) -> Result<(), IndexError> {
    let Some(journal) = estate.journals.get(lock.server().index()) else { return Ok(()) };
    let slot = journal.add(RETIRE_SLOTS * 8 + u64::from(word.flags) * INTENT_SLOT_BYTES as u64);
    let intent = surely::read(op, slot, INTENT_SLOT_BYTES).await?;
    let place = Place { index, addr: engine.intent_key(lock) };
    if place.version_if_whole(&intent) != Some(word.to_raw()) {
        return Ok(());
    }
    marks::hit("write_of_the_dead_finished");
    let addr = GlobalAddr::from_raw(intent.word(HEADER_BYTES));
    for _ in 0..whole::MAX_ATTEMPTS {
        match op.write(addr, op.endpoint().buf_of(&intent[HEADER_BYTES + 8..])).await {
            Ok(()) => return Ok(()),
            Err(error) => surely::reconnected(op, error).await?,
        }
    }
    Err(IndexError::Contended { what: "a completion", attempts: whole::MAX_ATTEMPTS })
}

const _: () = assert!(INTENT_SLOTS >= 16 && ANCHOR_BYTES >= 8 * 256);
