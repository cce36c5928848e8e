//! Sherman (Wang et al., SIGMOD '22): a B-link tree over all memory servers, written to under remote locks, read without.
//!
//! | file | what it is |
//! |---|---|
//! | `config` | sizes, the paper's techniques as switches, mistakes for tests of the tests |
//! | `layout`, `node` | a node's bytes; search and changes in one node: pure |
//! | `lock` | where the locks are (`shared/locks` is how they work) |
//! | `cache` | inner nodes that a compute server keeps |
//! | `read` | the way down to a node, and node reads that are whole |
//! | `write` | put, delete, compare-and-swap: one leaf under its lock |
//! | `restructure/` | split, merge, new roots and lower ones, bulk load |
//! | `scan` | ranges, several leaves at a time |
//! | `check` | walks the whole tree and verifies it |
//!
//! # The algorithm
//!
//! 1. **get**: the cache names a leaf; READ it; one round trip. Whole, linked, alive and covering the key, it has the answer. If the key is beyond
//!    its high fence, go to its sibling; if it is not the right node at all, forget what led there and go down from the root.
//! 2. **put** and the like: [CAS lock, READ leaf], then [WRITE entry, WRITE unlock]: two round trips, and 24 bytes for an update of 8 B.
//! 3. **split**, of a full node N under its lock: WRITE a new node X with the upper half; then turn N's fences. Then the separator goes into the parent
//!    under the parent's lock, and up, to a new root if need be (a CAS of the root pointer in the anchor). Who finds a separator missing adds it.
//! 4. **merge**, of a node N that has become small with its right neighbour X under the same parent P, under the locks of all three, of which the
//!    second and third are only tried for: copy X's entries into N, where they do not count yet; write an intent; turn N's fences, remove X's
//!    separator, bury X; then retire X. A root that has one child left is buried, and the child is the root.
//! 5. **scan**: READ several leaves at once as the cache names them, and take those that continue where the last one ended.
//!
//! # Invariants
//!
//! - A node's low fence, level and incarnation never change in its life; it covers [low, high).
//! - The nodes of a level cover all keys, each once, in the order of their siblings.
//! - A separator in a parent is its child's low fence. Children may lack a separator (then they are reached through their left
//!   sibling); a separator never leads to a node that is retired.
//! - A node is *linked* once a pointer to it was written. Pointers that this operation read in live nodes may lead to one that
//!   is not yet marked so; hints from a cache must not: the node may be one that its maker never linked.
//! - The root pointer moves away from a node only under that node's lock, or when the node is dead.
//! - A node is changed only under its lock. A node that is torn under its lock was left so by a session that died.

mod alone;
mod cache;
mod check;
mod config;
mod layout;
mod lock;
mod node;
mod read;
mod restructure;
mod scan;
#[cfg(test)]
mod tests;
mod write;

pub use alone::{LockTaker, LocksAlone};
pub use config::{Config, Sabotage, Switches};

use crate::Pool;
use crate::api::{IndexError, KeyValue, OrderedIndex};
use crate::engine::Engine;
use crate::pool;
use crate::shared::heap::{self, Class, when_there_is_room};
use crate::shared::locks::{LockTable, Locks, Manner, Mistakes};
use crate::shared::opening::Opening;
use crate::shared::surely;
use crate::shared::whole::Place;
use cache::Cache;
use farwood_fabric::control::{IndexId, IndexInfo, MAIN_BASE, ObjectChunk, Reply, Request};
use farwood_fabric::{CallError, Endpoint, FabricError, GlobalAddr, Op, RegionId, ServerId};
use node::{Layouts, Node, Plan};
use restructure::LostSeparator;
use std::cell::RefCell;
use std::ops::{Bound, RangeInclusive};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use write::Decision;

/// What the tree is called with the paper's techniques, and without all of them.
const SHERMAN: &str = "sherman";
const FG_PLUS: &str = "fg+";
/// The class of tree nodes, and that of lock tables in main memory.
const NODES: u16 = 0;
const LOCKS: u16 = 1;
/// The anchor: the root pointer, then each server's lock table in main memory, if that is where they are.
const ROOT_AT: u64 = 0;
const LOCK_TABLES_AT: u64 = 64;
/// How many zeros are written at a time.
const ZEROS: u64 = 64 << 10;

/// Sherman, or with all techniques off FG+, as an engine.
#[derive(Clone, Debug, Default)]
pub struct Sherman {
    /// Sizes and switches.
    pub config: Config,
}

impl Sherman {
    /// With these sizes and switches.
    pub fn new(config: Config) -> Self {
        Self { config }
    }

    /// The engine of an index, with the settings that it was created with.
    pub fn of(info: &IndexInfo) -> Result<Self, IndexError> {
        let decoded =
            Config::decode(&info.config).filter(|_| [SHERMAN, FG_PLUS].contains(&info.engine.as_str()));
        let Some((mut config, _)) = decoded else {
            let why = format!(
                "index '{}' is no such tree, or one of a format that this version does not know",
                info.name
            );
            return Err(IndexError::BadConfig { why });
        };
        if info.engine == FG_PLUS {
            config.switches = Switches::FG_PLUS;
        }
        Ok(Self { config })
    }

    fn layouts(&self) -> Result<Layouts, IndexError> {
        let (leaf, inner) = self.config.layouts()?;
        let sabotage = self.config.sabotage;
        Ok(Layouts {
            leaf,
            inner,
            keyed_by_version: !sabotage.checksum_without_version,
            checked: !sabotage.skip_checksum,
        })
    }
}

/// What a compute server has of a tree.
#[derive(Debug)]
pub(crate) struct Shared {
    pool: Pool,
    info: IndexInfo,
    /// Whether operations may begin.
    opening: Arc<Opening>,
    config: Config,
    layouts: Layouts,
    locks: Locks,
    cache: Arc<Cache>,
    /// The root as it was last seen: a hint.
    root: AtomicU64,
}

/// A tree as one compute server has it. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Attached {
    shared: Arc<Shared>,
}

/// A tree as one task sees it.
#[derive(Debug)]
pub struct Tree {
    shared: Arc<Shared>,
    endpoint: Endpoint,
    /// The task, as its lock words say.
    number: u16,
    /// A node without a separator that an operation came by.
    lost: RefCell<Option<LostSeparator>>,
}

impl Shared {
    fn place(&self, addr: GlobalAddr) -> Place {
        Place { index: self.info.id, addr }
    }

    fn node_class(&self) -> Class {
        node_class(self.info.id, &self.config)
    }

    fn root_pointer(&self) -> GlobalAddr {
        self.info.anchor.add(ROOT_AT)
    }
}

fn node_class(index: IndexId, config: &Config) -> Class {
    Class { index, class: NODES, object_bytes: u32::try_from(config.node_bytes).unwrap_or(u32::MAX) }
}

impl Engine for Sherman {
    type Attached = Attached;
    type Index = Tree;

    fn name(&self) -> &'static str {
        if self.config.switches == Switches::FG_PLUS { FG_PLUS } else { SHERMAN }
    }

    fn mistakes(&self) -> pool::Mistakes {
        let Sabotage {
            reuse_without_epoch,
            zero_freed,
            pages_only,
            ignore_flush,
            recovery,
            drop_without_clearing,
            ..
        } = self.config.sabotage;
        let reuse_in_doubt = false;
        let heap =
            heap::Sabotage { reuse_without_epoch, reuse_in_doubt, zero_freed, pages_only, ignore_flush };
        pool::Mistakes { heap, recovery, drop_without_clearing }
    }

    fn value_bytes(&self) -> RangeInclusive<usize> {
        self.config.value_bytes..=self.config.value_bytes
    }

    async fn create(&self, pool: &Pool, endpoint: &Endpoint, index: &str) -> Result<(), IndexError> {
        let info = self.lay_out(pool, endpoint, index).await?;
        Ok(pool.index_ready(&endpoint.op(), info.id).await?)
    }

    async fn attach(&self, pool: &Pool, endpoint: &Endpoint, index: &str) -> Result<Attached, IndexError> {
        // Locks in main memory are as far apart as nodes are.
        let stride = self.config.node_bytes as u64;
        self.attach_with_locks(pool, endpoint, index, self.name(), stride).await
    }

    fn open(&self, attached: &Attached, endpoint: &Endpoint, handle: u16) -> Result<Tree, IndexError> {
        Ok(Tree {
            shared: Arc::clone(&attached.shared),
            endpoint: endpoint.clone(),
            number: handle,
            lost: RefCell::default(),
        })
    }

    fn has_bulk_load(&self) -> bool {
        true
    }

    async fn bulk_load(
        &self,
        index: &Tree,
        pairs: impl Iterator<Item = KeyValue>,
        fill: f64,
    ) -> Result<u64, IndexError> {
        index.bulk_load(pairs, fill).await
    }

    async fn check(
        &self,
        attached: &Attached,
        endpoint: &Endpoint,
    ) -> Result<Vec<(Class, GlobalAddr)>, IndexError> {
        self.open(attached, endpoint, 0)?.check(&endpoint.op()).await
    }

    /// The lock tables, if they are in main memory.
    async fn extents(&self, attached: &Attached, endpoint: &Endpoint) -> Result<Vec<GlobalAddr>, IndexError> {
        if self.config.switches.lock_memory {
            return Ok(Vec::new());
        }
        let (op, shared) = (endpoint.op(), &attached.shared);
        let mut tables = Vec::new();
        for server in shared.pool.session().servers() {
            let pointer = lock_table_pointer(&shared.info, *server);
            tables.push(GlobalAddr::from_raw(surely::read_word(&op, pointer).await?));
        }
        Ok(tables)
    }

    fn cache_bytes(&self, attached: &Attached) -> u64 {
        attached.shared.cache.bytes()
    }
}

impl Sherman {
    /// Creates an index, empty, that is not ready yet.
    pub(super) async fn lay_out(
        &self,
        pool: &Pool,
        endpoint: &Endpoint,
        index: &str,
    ) -> Result<IndexInfo, IndexError> {
        let layouts = self.layouts()?;
        let info = self.create_with_locks(&endpoint.op(), pool, index, self.name()).await?;
        pool.heap().provide(endpoint, ServerId::COORDINATOR, node_class(info.id, &self.config)).await?;
        let op = endpoint.op();
        let addr =
            pool.heap().allocate(&op, ServerId::COORDINATOR, node_class(info.id, &self.config)).await?;
        let plan = Plan {
            level: 0,
            incarnation: endpoint.random(),
            is_linked: true,
            low: &vec![0; self.config.key_bytes],
            high: None,
            sibling: GlobalAddr::NULL,
        };
        let buf = endpoint.buf(self.config.node_bytes);
        let root = Node::build(&layouts, Place { index: info.id, addr }, buf, &plan, []);
        surely::write(&op, addr, root.bytes()).await?;
        surely::write_word(&op, info.anchor.add(ROOT_AT), addr.to_raw()).await?;
        Ok(info)
    }

    fn locks(&self, pool: &Pool, table: LockTable) -> Locks {
        let Switches { combine, hierarchical, handover, lock_and_read, faa_release, .. } =
            self.config.switches;
        let sabotage = self.config.sabotage;
        let mistakes = Mistakes {
            unlock_before_write_back: sabotage.unlock_before_write_back,
            handover_before_completion: sabotage.handover_before_completion,
            plain_masked_release: sabotage.plain_masked_release,
            forget_when_dropped: sabotage.forget_when_dropped,
            ..Mistakes::default()
        };
        Locks::new(
            pool,
            table,
            Manner { combine, hierarchical, handover, lock_and_read, faa_release },
            mistakes,
        )
    }

    /// Creates an index with its locks and nothing else; it is not ready yet.
    async fn create_with_locks(
        &self,
        op: &Op,
        pool: &Pool,
        index: &str,
        name: &str,
    ) -> Result<IndexInfo, IndexError> {
        let info = pool.create_index(op, index, name, &self.config.encode()).await?;
        if !self.config.switches.lock_memory {
            for server in pool.session().servers() {
                let table = create_lock_table(op, pool, info.id, *server).await?;
                surely::write_word(op, lock_table_pointer(&info, *server), table.to_raw()).await?;
            }
        }
        Ok(info)
    }

    /// What a compute server has of an index, whose locks in main memory are `stride` bytes apart.
    async fn attach_with_locks(
        &self,
        pool: &Pool,
        endpoint: &Endpoint,
        index: &str,
        name: &str,
        stride: u64,
    ) -> Result<Attached, IndexError> {
        let layouts = self.layouts()?;
        let op = endpoint.op();
        let info = pool.open_index(&op, index, Some(name)).await?;
        self.config.check_same(&info.config)?;
        let Some(table) = self.lock_table_with(&op, pool, &info, stride).await? else {
            return Err(corrupt(format!("index '{index}' has no lock table")));
        };
        let locks = self.locks(pool, table);
        let cache = Arc::new(Cache::new(self.config.cache_bytes));
        let flushed = Arc::downgrade(&cache);
        pool.session().on_flush(move || {
            if let Some(cache) = flushed.upgrade() {
                cache.flush();
            }
        });
        let shared = Shared {
            opening: pool.opening(info.id),
            pool: pool.clone(),
            info,
            config: self.config.clone(),
            layouts,
            locks,
            cache,
            root: AtomicU64::new(0),
        };
        Ok(Attached { shared: Arc::new(shared) })
    }

    /// The lock table of a tree, or of locks alone, if it is in main memory.
    pub(super) async fn locks_in_main_memory(
        op: &Op,
        pool: &Pool,
        info: &IndexInfo,
    ) -> Result<Option<LockTable>, IndexError> {
        let Some((config, _)) = Config::decode(&info.config) else { return Ok(None) };
        let is_alone = info.engine == LocksAlone::NAME;
        let stride = if is_alone { alone::STRIDE } else { config.node_bytes as u64 };
        let switches = if info.engine == FG_PLUS { Switches::FG_PLUS } else { config.switches };
        if switches.lock_memory {
            return Ok(None);
        }
        let tree = Self::new(Config { switches, ..config });
        tree.lock_table_with(op, pool, info, stride).await
    }

    /// Where the locks of a tree are; none, if its maker has not written that down, or it cannot be: whoever frees locks there would change
    /// what is somebody else's.
    async fn lock_table_with(
        &self,
        op: &Op,
        pool: &Pool,
        info: &IndexInfo,
        stride: u64,
    ) -> Result<Option<LockTable>, IndexError> {
        let Switches { lock_memory, masked_locks, .. } = self.config.switches;
        let capabilities = op.endpoint().capabilities();
        if masked_locks && !capabilities.masked_cas {
            let why = "this transport has no masked CAS, which 16-bit locks need".into();
            return Err(IndexError::BadConfig { why });
        }
        let servers = pool.session().servers();
        if lock_memory {
            let bytes = capabilities.lock_memory_bytes;
            return Ok(Some(LockTable::in_lock_memory(servers, bytes, self.config.locks, masked_locks)));
        }
        let mut bases = Vec::new();
        for server in servers {
            let raw = surely::read_word(op, lock_table_pointer(info, *server)).await?;
            let base = GlobalAddr::from_raw(raw);
            if !may_be_lock_table(op, pool, *server, base).await? {
                return Ok(None);
            }
            bases.push(base);
        }
        Ok(Some(LockTable::new(bases, chunk_bytes(pool), stride, self.config.locks, masked_locks)))
    }
}

fn lock_table_pointer(info: &IndexInfo, server: ServerId) -> GlobalAddr {
    info.anchor.add(LOCK_TABLES_AT + u64::from(server.get()) * 8)
}

/// Whether there can be a lock table: in a chunk of its own, which is none of objects.
async fn may_be_lock_table(
    op: &Op,
    pool: &Pool,
    server: ServerId,
    base: GlobalAddr,
) -> Result<bool, IndexError> {
    let chunk_bytes = pool.session().cluster().view().chunk_bytes(server).max(1);
    let is_chunk = base.server() == server
        && base.region() == RegionId::MAIN
        && base.offset() >= MAIN_BASE
        && (base.offset() - MAIN_BASE) % chunk_bytes == 0;
    if !is_chunk {
        return Ok(false);
    }
    match surely::read_word(op, base).await {
        Ok(word) => Ok(word != ObjectChunk::MAGIC),
        Err(FabricError::OutOfBounds { .. }) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// The bytes of a lock table: a chunk, wherever it is.
fn chunk_bytes(pool: &Pool) -> u64 {
    pool.session().cluster().view().smallest_chunk_bytes()
}

/// A chunk of free locks.
async fn create_lock_table(
    op: &Op,
    pool: &Pool,
    index: IndexId,
    server: ServerId,
) -> Result<GlobalAddr, IndexError> {
    let request = Request::AllocChunks {
        index,
        class: LOCKS,
        object_bytes: 0,
        count: 1,
        flushed_through: pool.session().flushed_through(),
    };
    let Reply::Chunks { offset, .. } = op.control(server, &request).await? else {
        return Err(FabricError::Call(CallError::Malformed).into());
    };
    let table = GlobalAddr::new(server, RegionId::MAIN, offset);
    let bytes = chunk_bytes(pool);
    let zeros = vec![0; usize::try_from(bytes.min(ZEROS)).unwrap_or(0)];
    for at in (0..bytes).step_by(zeros.len()) {
        surely::write(op, table.add(at), &zeros).await?;
    }
    Ok(table)
}

impl Tree {
    /// Whether an operation may go on that has pinned its epoch: not if the index is dropped or the session leaves. The pin comes first:
    /// whoever drops the index waits for it.
    #[inline]
    fn admit(&self, _pinned: &Op) -> Result<(), IndexError> {
        self.shared.opening.check()
    }

    fn check_key(&self, key: &[u8]) -> Result<(), IndexError> {
        let bytes = self.shared.config.key_bytes;
        if key.len() == bytes {
            return Ok(());
        }
        Err(IndexError::BadKey {
            why: format!("keys of this index have {bytes} bytes, this one has {}", key.len()),
        })
    }

    fn check_value(&self, value: &[u8]) -> Result<(), IndexError> {
        let bytes = self.shared.config.value_bytes;
        if value.len() == bytes {
            return Ok(());
        }
        let why = format!("values of this index have {bytes} bytes, this one has {}", value.len());
        Err(IndexError::BadValue { why })
    }
}

impl OrderedIndex for Tree {
    async fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, IndexError> {
        self.check_key(key)?;
        let op = self.endpoint.op();
        self.admit(&op)?;
        self.look_up(&op, key).await
    }

    async fn put(&self, key: &[u8], value: &[u8]) -> Result<(), IndexError> {
        self.check_key(key)?;
        self.check_value(value)?;
        when_there_is_room!(self, self.modify(key, &|_| Decision::Put(value))).map(drop)
    }

    async fn compare_and_swap(
        &self,
        key: &[u8],
        expected: Option<&[u8]>,
        new: Option<&[u8]>,
    ) -> Result<bool, IndexError> {
        self.check_key(key)?;
        new.map_or(Ok(()), |new| self.check_value(new))?;
        let decide = |held: Option<&[u8]>| match new {
            _ if held != expected => Decision::Keep,
            Some(new) => Decision::Put(new),
            None => Decision::Remove,
        };
        when_there_is_room!(self, self.modify(key, &decide))
    }

    async fn put_if_absent(&self, key: &[u8], value: &[u8]) -> Result<bool, IndexError> {
        self.check_key(key)?;
        self.check_value(value)?;
        let decide = |held: Option<&[u8]>| if held.is_none() { Decision::Put(value) } else { Decision::Keep };
        when_there_is_room!(self, self.modify(key, &decide))
    }

    async fn update_if_present(&self, key: &[u8], value: &[u8]) -> Result<bool, IndexError> {
        self.check_key(key)?;
        self.check_value(value)?;
        let decide = |held: Option<&[u8]>| if held.is_some() { Decision::Put(value) } else { Decision::Keep };
        when_there_is_room!(self, self.modify(key, &decide))
    }

    async fn delete(&self, key: &[u8]) -> Result<bool, IndexError> {
        self.check_key(key)?;
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
        self.range(start, end, limit, reverse).await
    }
}

fn corrupt(what: String) -> IndexError {
    IndexError::Corrupt { what }
}
