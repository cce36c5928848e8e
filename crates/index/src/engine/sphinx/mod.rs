//! Sphinx (Li et al., DAC '25): an adaptive radix tree over all memory servers whose inner nodes are found by hash, for keys and values
//! of any length; and with both of its techniques off `art`, the paper's baseline.
//!
//! | file | what it is |
//! |---|---|
//! | `config` | the paper's techniques as switches, mistakes for tests of the tests |
//! | `layout`, `node`, `node/` | the words of far memory; inner nodes, leaves, hashes of prefixes: pure |
//! | `read` | the way down to a leaf |
//! | `write` | put, delete, compare-and-swap: one leaf under its lock, or one slot under its node's |
//! | `restructure/` | nodes that split an edge, grow, shrink or go; bulk load |
//! | `cache`, `table/`, `filter` | inner nodes found by the hash of their prefix (III-A), and what a compute server remembers of them (III-B) |
//! | `scan` | ranges, many nodes and leaves at a time |
//! | `check` | walks the whole tree and verifies it |
//!
//! # The algorithm
//!
//! 1. **Way down**: each node tells which byte of the key counts next, and its slot for that byte where to go on. Bytes in between are
//!    skipped: all keys below a node agree on them, and whether this key does is seen at the leaf (*path compression*).
//! 2. **get**: the way down, then READ the leaf. Another key there, or no leaf: absent.
//! 3. **update in place**, if the leaf has room: [CAS lock, READ leaf], then [WRITE intent, WRITE leaf, WRITE unlock]. Of a leaf that is
//!    longer than an intent, only the head and what changes at the end of the value are written; if more changes, 5. Behind every value
//!    there is room for a few bytes more, which only *adjust* uses: it needs no memory.
//! 4. **insert**: WRITE the leaf; under the lock of the node, WRITE the slot that leads to it. Where the way parts from the keys that
//!    are there, a new node takes the old child and the new leaf, and the slot leads to that node: a Node4, or where keys are dense a Node16.
//! 5. **out of place**: freeze the old leaf under its lock (*moved*); under the lock of the node turn the slot to a new leaf.
//! 6. **delete**: mark the leaf as *deleted* under its lock; then clear the slot under the lock of the node.
//! 7. **grow, shrink, re-compress**: freeze the node under its lock (*dead*); under the lock of the parent turn the slot to a larger or
//!    smaller copy, to the only child, or to nothing.
//!
//! Nobody ever holds two locks. Each change is the WRITE of one word, so a session that dies leaves one of these states, and
//! whoever comes by goes on from there: a dead node that is linked is replaced by the next one who has to write to it; a deleted
//! or moved leaf that is linked by the next one who writes to its key. Only updates in place need an intent.
//!
//! # Invariants
//!
//! - A node's prefix, depth and kind, and a leaf's key, never change.
//! - A node or leaf that is alive is linked: it is marked before it is unlinked, and nobody knows it before it is linked. So whoever holds
//!   the lock of a live one may change it.
//! - A dead node's slots, and the value of a leaf that is moved or deleted, never change; as long as a slot leads there, they count.
//! - So an operation may take what a slot led to that it read itself, dead or alive, for what was there at that instant or later: its epoch
//!   keeps it from being anything else.
//! - Whoever turns the slot away from an object retires it.

mod cache;
mod check;
mod config;
pub mod filter;
mod layout;
mod node;
mod read;
mod restructure;
mod scan;
pub mod table;
#[cfg(test)]
mod tests;
mod write;

pub use config::{Config, Sabotage, Switches};

use crate::Pool;
use crate::api::{IndexError, KeyValue, Limits, OrderedIndex};
use crate::engine::Engine;
use crate::pool;
use crate::shared::heap::{self, Class, when_there_is_room};
use crate::shared::locks::{LockTable, Locks, Manner, Mistakes};
use crate::shared::opening::Opening;
use crate::shared::surely;
use crate::shared::whole::Place;
use cache::{Doubts, Finder};
use farwood_fabric::control::{ANCHOR_BYTES, IndexId, IndexInfo, ObjectChunk};
use farwood_fabric::{Endpoint, FabricError, GlobalAddr, Op, ServerId};
use filter::Filter;
use layout::{Head, LEAF_KEY_AT, LeafClass, MAX_KEY_BYTES, MAX_VALUE_BYTES, NodeKind, NodeRef, SPARE_BYTES};
use node::prefix;
use std::cell::RefCell;
use std::ops::{Bound, RangeInclusive};
use std::sync::Arc;
use table::Table;
use write::Decision;

/// What the engine is called with the paper's techniques, and without all of them.
const SPHINX: &str = "sphinx";
const ART: &str = "art";
/// The anchor: where the root is, what hashes are seeded with, whether the hash tables are in use, and each server's table.
const ROOT_AT: u64 = 0;
const SEED_AT: u64 = 8;
const TABLES_IN_USE_AT: u64 = 16;
const TABLES_AT: u64 = 64;
/// The most servers that the anchor has room for.
const MAX_SERVERS: usize = ((ANCHOR_BYTES - TABLES_AT) / 8) as usize;
/// Classes of heap objects: leaves by their size, then nodes by their kind.
const NODE_CLASSES_FROM: u16 = 128;
const TABLE_CLASS: u16 = 160;

/// Sphinx, or with its techniques off the radix tree by itself, as an engine.
#[derive(Clone, Debug, Default)]
pub struct Sphinx {
    /// Switches and sizes.
    pub config: Config,
}

impl Sphinx {
    /// With these settings.
    pub fn new(config: Config) -> Self {
        Self { config }
    }

    /// The engine of an index, with the settings that it was created with.
    pub fn of(info: &IndexInfo) -> Result<Self, IndexError> {
        let decoded = Config::decode(&info.config).filter(|_| [SPHINX, ART].contains(&info.engine.as_str()));
        let Some(config) = decoded else {
            let why = format!(
                "index '{}' is no such tree, or one of a format that this version does not know",
                info.name
            );
            return Err(IndexError::BadConfig { why });
        };
        Ok(Self { config })
    }

    /// Creates an index, empty, that is not ready yet.
    pub(super) async fn lay_out(
        &self,
        pool: &Pool,
        endpoint: &Endpoint,
        index: &str,
    ) -> Result<IndexInfo, IndexError> {
        self.config.validate()?;
        if pool.session().servers().len() > MAX_SERVERS {
            let why = format!("a pool of more than {MAX_SERVERS} servers; this engine can use as many");
            return Err(IndexError::BadConfig { why });
        }
        let info = pool.create_index(&endpoint.op(), index, self.name(), &self.config.encode()).await?;
        let seed = endpoint.random();
        let kind = NodeKind::N256;
        pool.heap().provide(endpoint, ServerId::COORDINATOR, node_class(info.id, kind)).await?;
        if self.config.switches.hash_table {
            for server in pool.session().servers() {
                let class = Table::class(self.config.table(), info.id, TABLE_CLASS)?;
                pool.heap().provide(endpoint, *server, class).await?;
            }
        }
        let op = endpoint.op();
        let addr = pool.heap().allocate(&op, ServerId::COORDINATOR, node_class(info.id, kind)).await?;
        let head = Head { is_dead: false, is_linked: true, kind, depth: 0 };
        let root = node::build(head, prefix::hash(seed, &[]), &node::Children::new());
        surely::write(&op, addr, &root).await?;
        surely::write_word(&op, info.anchor.add(ROOT_AT), addr.to_raw()).await?;
        surely::write_word(&op, info.anchor.add(SEED_AT), seed).await?;
        if self.config.switches.hash_table {
            for server in pool.session().servers() {
                let class = (info.id, TABLE_CLASS);
                let table = Table::create(&op, pool, class, *server, self.config.table()).await?;
                surely::write_word(&op, table_pointer(&info, *server), table.to_raw()).await?;
            }
        }
        Ok(info)
    }

    /// What a compute server needs to find nodes by their prefix.
    async fn finder(&self, op: &Op, pool: &Pool, info: &IndexInfo) -> Result<Option<Finder>, IndexError> {
        if !self.config.switches.hash_table {
            return Ok(None);
        }
        let mut tables = Vec::new();
        for server in pool.session().servers() {
            let root = GlobalAddr::from_raw(surely::read_word(op, table_pointer(info, *server)).await?);
            tables.push(Table::attach(pool, (info.id, TABLE_CLASS), root, self.config.table())?);
        }
        let filter = self.config.switches.filter.then(|| Filter::new(self.config.filter_bytes, None));
        Ok(Some(Finder { tables, filter, doubts: Doubts::default() }))
    }

    fn locks(&self, pool: &Pool, op: &Op) -> Locks {
        let bytes = op.endpoint().capabilities().lock_memory_bytes;
        let table = LockTable::in_lock_memory(pool.session().servers(), bytes, u64::MAX, false);
        let manner = Manner {
            combine: true,
            hierarchical: true,
            handover: true,
            lock_and_read: true,
            faa_release: false,
        };
        let config::Sabotage { unlock_inside_payload, forget_when_dropped, .. } = self.config.sabotage;
        let mistakes = Mistakes { unlock_inside_payload, forget_when_dropped, ..Mistakes::default() };
        Locks::new(pool, table, manner, mistakes)
    }
}

/// What a compute server has of an index.
#[derive(Debug)]
pub(crate) struct Shared {
    pool: Pool,
    info: IndexInfo,
    /// Whether operations may begin.
    opening: Arc<Opening>,
    config: Config,
    locks: Locks,
    /// The node of the empty prefix, a Node256 that is never replaced.
    root: NodeRef,
    seed: u64,
    /// How nodes are found by their prefix; `None` in `art`.
    finder: Option<Finder>,
    /// Whether this session finds them so.
    finds_by_hash: bool,
    /// How long a key and its value may be together: a chunk of this pool has to hold their leaf.
    max_pair_bytes: usize,
}

/// An index as one compute server has it. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Attached {
    shared: Arc<Shared>,
}

/// An index as one task sees it.
#[derive(Debug)]
pub struct Tree {
    shared: Arc<Shared>,
    endpoint: Endpoint,
    /// The task, as its lock words say.
    number: u16,
    /// Room for its scans.
    room: RefCell<scan::Room>,
}

impl Shared {
    fn place(&self, addr: GlobalAddr) -> Place {
        Place { index: self.info.id, addr }
    }

    fn servers(&self) -> &[ServerId] {
        self.pool.session().servers()
    }

    fn leaf_class(&self, class: LeafClass) -> Class {
        let object_bytes = u32::try_from(class.bytes()).unwrap_or(u32::MAX);
        Class { index: self.info.id, class: class.number(), object_bytes }
    }

    fn node_class(&self, kind: NodeKind) -> Class {
        node_class(self.info.id, kind)
    }
}

fn node_class(index: IndexId, kind: NodeKind) -> Class {
    let object_bytes = u32::try_from(kind.bytes()).unwrap_or(u32::MAX);
    Class { index, class: NODE_CLASSES_FROM + kind as u16, object_bytes }
}

impl Engine for Sphinx {
    type Attached = Attached;
    type Index = Tree;

    fn name(&self) -> &'static str {
        if self.config.switches.hash_table { SPHINX } else { ART }
    }

    fn mistakes(&self) -> pool::Mistakes {
        let Sabotage {
            reuse_without_epoch,
            reuse_in_doubt,
            pages_only,
            ignore_flush,
            recovery,
            drop_without_clearing,
            ..
        } = self.config.sabotage;
        // Hints lead to nodes that are gone, and find what is left of them, so those are not zeroed.
        let zero_freed = false;
        let heap =
            heap::Sabotage { reuse_without_epoch, reuse_in_doubt, zero_freed, pages_only, ignore_flush };
        pool::Mistakes { heap, recovery, drop_without_clearing }
    }

    fn value_bytes(&self) -> RangeInclusive<usize> {
        // From none to several sizes of leaves.
        8..=48
    }

    async fn create(&self, pool: &Pool, endpoint: &Endpoint, index: &str) -> Result<(), IndexError> {
        let info = self.lay_out(pool, endpoint, index).await?;
        Ok(pool.index_ready(&endpoint.op(), info.id).await?)
    }

    async fn attach(&self, pool: &Pool, endpoint: &Endpoint, index: &str) -> Result<Attached, IndexError> {
        self.config.validate()?;
        let op = endpoint.op();
        let info = pool.open_index(&op, index, Some(self.name())).await?;
        self.config.check_same(&info.config)?;
        let addr = GlobalAddr::from_raw(surely::read_word(&op, info.anchor.add(ROOT_AT)).await?);
        let seed = surely::read_word(&op, info.anchor.add(SEED_AT)).await?;
        let finder = self.finder(&op, pool, &info).await?;
        let finds_by_hash = self.config.finds_by_hash(endpoint);
        if finder.is_some() && finds_by_hash {
            let said = surely::write_word(&op, info.anchor.add(TABLES_IN_USE_AT), 1).await;
            if let Err(error @ FabricError::Fenced { .. }) = said {
                return Err(error.into());
            }
            // Otherwise it is one who may only read, and finds what others have entered.
        }
        let chunk_bytes = pool.session().cluster().view().smallest_chunk_bytes();
        let shared = Shared {
            opening: pool.opening(info.id),
            pool: pool.clone(),
            locks: self.locks(pool, &op),
            info,
            config: self.config.clone(),
            root: NodeRef { addr, kind: NodeKind::N256 },
            seed,
            finder,
            finds_by_hash,
            max_pair_bytes: max_leaf_bytes(chunk_bytes).saturating_sub(LEAF_KEY_AT + SPARE_BYTES),
        };
        Ok(Attached { shared: Arc::new(shared) })
    }

    fn open(&self, attached: &Attached, endpoint: &Endpoint, handle: u16) -> Result<Tree, IndexError> {
        Ok(Tree::new(&attached.shared, endpoint, handle))
    }

    fn has_bulk_load(&self) -> bool {
        true
    }

    async fn bulk_load(
        &self,
        index: &Tree,
        pairs: impl Iterator<Item = KeyValue>,
        _fill: f64,
    ) -> Result<u64, IndexError> {
        index.bulk_load(pairs).await
    }

    async fn warm_up(&self, index: &Tree) -> Result<(), IndexError> {
        index.fill_filter().await
    }

    async fn check(
        &self,
        attached: &Attached,
        endpoint: &Endpoint,
    ) -> Result<Vec<(Class, GlobalAddr)>, IndexError> {
        self.open(attached, endpoint, 0)?.check(&endpoint.op()).await
    }

    /// None: all that it has are objects.
    async fn extents(&self, _: &Attached, _: &Endpoint) -> Result<Vec<GlobalAddr>, IndexError> {
        Ok(Vec::new())
    }

    fn cache_bytes(&self, attached: &Attached) -> u64 {
        attached.shared.finder.as_ref().map_or(0, Finder::bytes)
    }
}

fn table_pointer(info: &IndexInfo, server: ServerId) -> GlobalAddr {
    info.anchor.add(TABLES_AT + u64::from(server.get()) * 8)
}

/// The longest leaf that fits a chunk of so many bytes.
fn max_leaf_bytes(chunk_bytes: u64) -> usize {
    let fits = |class: &LeafClass| {
        u32::try_from(class.bytes()).is_ok_and(|bytes| ObjectChunk::new(chunk_bytes, bytes).is_some())
    };
    LeafClass::all().filter(fits).last().map_or(0, LeafClass::bytes)
}

impl Tree {
    fn new(shared: &Arc<Shared>, endpoint: &Endpoint, number: u16) -> Self {
        Self { shared: Arc::clone(shared), endpoint: endpoint.clone(), number, room: RefCell::default() }
    }

    /// Whether an operation may go on that has pinned its epoch: not if the index is dropped or the session leaves. The pin comes first:
    /// whoever drops the index waits for it.
    #[inline]
    fn admit(&self, _pinned: &Op) -> Result<(), IndexError> {
        self.shared.opening.check()
    }

    fn check_key(key: &[u8]) -> Result<(), IndexError> {
        if key.len() <= MAX_KEY_BYTES {
            return Ok(());
        }
        let why = format!("a key has at most {MAX_KEY_BYTES} bytes, this one has {}", key.len());
        Err(IndexError::BadKey { why })
    }

    fn check_pair(&self, key: &[u8], value: &[u8]) -> Result<(), IndexError> {
        Self::check_key(key)?;
        if value.len() > MAX_VALUE_BYTES {
            let why = format!("a value has at most {MAX_VALUE_BYTES} bytes, this one has {}", value.len());
            return Err(IndexError::BadValue { why });
        }
        let bytes = key.len() + value.len();
        if bytes > self.shared.max_pair_bytes {
            let why = format!(
                "key and value have {bytes} bytes; the chunks of this pool hold {} at most; start its servers with larger ones",
                self.shared.max_pair_bytes
            );
            return Err(IndexError::BadValue { why });
        }
        Ok(())
    }
}

impl OrderedIndex for Tree {
    fn limits(&self) -> Limits {
        Limits {
            key_bytes: MAX_KEY_BYTES,
            value_bytes: MAX_VALUE_BYTES,
            pair_bytes: self.shared.max_pair_bytes,
        }
    }

    async fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, IndexError> {
        Self::check_key(key)?;
        when_there_is_room!(self, self.look_up(key))
    }

    async fn put(&self, key: &[u8], value: &[u8]) -> Result<(), IndexError> {
        self.check_pair(key, value)?;
        when_there_is_room!(self, self.modify(key, &|_| Decision::Put(value))).map(drop)
    }

    async fn compare_and_swap(
        &self,
        key: &[u8],
        expected: Option<&[u8]>,
        new: Option<&[u8]>,
    ) -> Result<bool, IndexError> {
        self.check_pair(key, new.unwrap_or_default())?;
        let decide = |held: Option<&[u8]>| match new {
            _ if held != expected => Decision::Keep,
            Some(new) => Decision::Put(new),
            None => Decision::Remove,
        };
        when_there_is_room!(self, self.modify(key, &decide))
    }

    async fn adjust(&self, key: &[u8], expected: &[u8], new: &[u8]) -> Result<bool, IndexError> {
        self.check_pair(key, new)?;
        let decide = |held: Option<&[u8]>| {
            if held == Some(expected) { Decision::Adjust(new) } else { Decision::Keep }
        };
        when_there_is_room!(self, self.modify(key, &decide))
    }

    async fn put_if_absent(&self, key: &[u8], value: &[u8]) -> Result<bool, IndexError> {
        self.check_pair(key, value)?;
        let decide = |held: Option<&[u8]>| if held.is_none() { Decision::Put(value) } else { Decision::Keep };
        when_there_is_room!(self, self.modify(key, &decide))
    }

    async fn update_if_present(&self, key: &[u8], value: &[u8]) -> Result<bool, IndexError> {
        self.check_pair(key, value)?;
        let decide = |held: Option<&[u8]>| if held.is_some() { Decision::Put(value) } else { Decision::Keep };
        when_there_is_room!(self, self.modify(key, &decide))
    }

    async fn delete(&self, key: &[u8]) -> Result<bool, IndexError> {
        Self::check_key(key)?;
        let decide = |held: Option<&[u8]>| if held.is_some() { Decision::Remove } else { Decision::Keep };
        when_there_is_room!(self, self.modify(key, &decide))
    }

    async fn scan(
        &self,
        start: Bound<&[u8]>,
        end: Bound<&[u8]>,
        limit: usize,
        reverse: bool,
    ) -> Result<Vec<KeyValue>, IndexError> {
        let mut found = Vec::new();
        let mut each = |key: &[u8], value: &[u8]| {
            found.push((key.to_vec(), value.to_vec()));
            true
        };
        self.range((start, end), limit, reverse, None, &mut each).await?;
        Ok(found)
    }

    async fn scan_with(
        &self,
        start: Bound<&[u8]>,
        end: Bound<&[u8]>,
        limit: usize,
        reverse: bool,
        each: &mut dyn FnMut(&[u8], &[u8]) -> bool,
    ) -> Result<usize, IndexError> {
        self.range((start, end), limit, reverse, None, each).await
    }

    async fn scan_ends(
        &self,
        range: (Bound<&[u8]>, Bound<&[u8]>),
        limit: usize,
        reverse: bool,
        end_bytes: usize,
        each: &mut dyn FnMut(&[u8], &[u8]) -> bool,
    ) -> Result<usize, IndexError> {
        self.range(range, limit, reverse, Some(end_bytes), each).await
    }
}

fn corrupt(what: String) -> IndexError {
    IndexError::Corrupt { what }
}
