//! An index of a pool, by name.
//!
//! ```
//! use farwood_index::{AnyEngine, Index, OrderedIndex, Pool};
//! # use farwood_fabric::{Executor, SessionOptions};
//! # let cluster = farwood_memory::embedded(2, 64 << 20).unwrap();
//! # Executor::new().block_on(async {
//! let pool = Pool::join(&cluster, SessionOptions::default()).await?;
//! let endpoint = pool.session().endpoint()?;
//! let orders = Index::create(&pool, &endpoint, "orders", &AnyEngine::named("sherman", 8, 8)?).await?;
//! let handle = orders.handle(&endpoint)?;
//! handle.put(&7u64.to_be_bytes(), b"8 bytes!").await?;
//! assert_eq!(handle.get(&7u64.to_be_bytes()).await?.as_deref(), Some(&b"8 bytes!"[..]));
//! drop((handle, orders));
//! Index::drop(&pool, &endpoint, "orders").await?;
//! assert!(Index::open(&pool, &endpoint, "orders").await.is_err());
//! # Ok::<_, farwood_index::IndexError>(())
//! # }).unwrap();
//! ```

use crate::Pool;
use crate::api::{IndexError, KeyValue, Limits, OrderedIndex};
use crate::engine::{AnyAttached, AnyEngine, AnyIndex, Engine};
use farwood_fabric::Endpoint;
use farwood_fabric::control::{IndexId, IndexInfo};
use std::collections::BTreeSet;
use std::fmt;
use std::ops::Bound;
use std::sync::{Arc, Mutex, PoisonError};

/// An index, as one compute server has it: its threads share its cache and its local locks. Cheap to clone.
#[derive(Clone)]
pub struct Index {
    inner: Arc<Inner>,
}

struct Inner {
    id: IndexId,
    name: String,
    pool: Pool,
    engine: AnyEngine,
    attached: AnyAttached,
    numbers: Mutex<Numbers>,
}

/// Numbers of handles: each task that works on an index at the same time as another needs one of its own.
#[derive(Default, Debug)]
struct Numbers {
    next: u16,
    given_back: BTreeSet<u16>,
}

/// Operations on an index, for one task at a time.
#[derive(Debug)]
pub struct Handle {
    operations: AnyIndex,
    number: u16,
    index: Index,
}

impl Index {
    /// Creates an index, empty, and opens it.
    pub async fn create(
        pool: &Pool,
        endpoint: &Endpoint,
        name: &str,
        engine: &AnyEngine,
    ) -> Result<Self, IndexError> {
        engine.create(pool, endpoint, name).await?;
        let info = pool.open_index(&endpoint.op(), name, None).await?;
        Self::attach(pool, endpoint, &info, engine.clone()).await
    }

    /// Creates an index, empty, that nobody else can open until it is [published](Self::publish): to fill it first. If this session ends
    /// before that, in whatever way, the index is dropped.
    pub async fn create_unpublished(
        pool: &Pool,
        endpoint: &Endpoint,
        name: &str,
        engine: &AnyEngine,
    ) -> Result<Self, IndexError> {
        let info = engine.lay_out(pool, endpoint, name).await?;
        Self::attach(pool, endpoint, &info, engine.clone()).await
    }

    /// Lets others open an index that this session has created unpublished.
    pub async fn publish(&self, endpoint: &Endpoint) -> Result<(), IndexError> {
        Ok(self.inner.pool.index_ready(&endpoint.op(), self.inner.id).await?)
    }

    /// Opens an index that is there, whichever engine made it, with the settings that it was created with. Who opens it again shares
    /// the cache and the local locks of the first.
    pub async fn open(pool: &Pool, endpoint: &Endpoint, name: &str) -> Result<Self, IndexError> {
        let info = pool.open_index(&endpoint.op(), name, None).await?;
        Self::attach(pool, endpoint, &info, AnyEngine::of(&info)?).await
    }

    async fn attach(
        pool: &Pool,
        endpoint: &Endpoint,
        info: &IndexInfo,
        engine: AnyEngine,
    ) -> Result<Self, IndexError> {
        if let Some(inner) = pool.opened(info.id) {
            return Ok(Self { inner });
        }
        let attached = engine.attach(pool, endpoint, &info.name).await?;
        let (name, numbers) = (info.name.clone(), Mutex::default());
        let inner = Inner { id: info.id, name, pool: pool.clone(), engine, attached, numbers };
        Ok(Self { inner: pool.remember(info.id, Arc::new(inner)) })
    }

    /// Drops an index and frees its memory, once every session has let go of it.
    pub async fn drop(pool: &Pool, endpoint: &Endpoint, name: &str) -> Result<(), IndexError> {
        Ok(pool.drop_index(endpoint, name).await?)
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// Whether both are the same opening of an index.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// Its engine, with the settings that it was created with.
    pub fn engine(&self) -> &AnyEngine {
        &self.inner.engine
    }

    /// Operations for one task of the endpoint's thread.
    pub fn handle(&self, endpoint: &Endpoint) -> Result<Handle, IndexError> {
        let number = self.numbers(|numbers| {
            numbers.given_back.pop_first().or_else(|| {
                let number = numbers.next;
                numbers.next = number.checked_add(1)?;
                Some(number)
            })
        });
        let number = number.ok_or(IndexError::Contended { what: "a handle", attempts: 1 })?;
        let opened = self.inner.engine.open(&self.inner.attached, endpoint, number);
        match opened {
            Ok(operations) => Ok(Handle { operations, number, index: self.clone() }),
            Err(error) => {
                self.numbers(|numbers| numbers.given_back.insert(number));
                Err(error)
            }
        }
    }

    fn numbers<T>(&self, work: impl FnOnce(&mut Numbers) -> T) -> T {
        work(&mut self.inner.numbers.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Walks the whole index while nobody writes and verifies every invariant; how many heap objects it has. Dead sessions are
    /// recovered first; if some cannot be, what is wrong may be theirs, and is [`IndexError::Unrecovered`].
    pub async fn check(&self, endpoint: &Endpoint) -> Result<usize, IndexError> {
        let sessions = self.inner.pool.recover_all(endpoint).await?;
        match self.inner.engine.check(&self.inner.attached, endpoint).await {
            Ok(objects) => Ok(objects.len()),
            Err(IndexError::Corrupt { what }) if !sessions.is_empty() => {
                Err(IndexError::Unrecovered { sessions, what })
            }
            Err(error) => Err(error),
        }
    }

    /// How many bytes this compute server spends on it.
    pub fn cache_bytes(&self) -> u64 {
        self.inner.engine.cache_bytes(&self.inner.attached)
    }
}

impl fmt::Debug for Index {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Index('{}', {})", self.inner.name, self.inner.engine.name())
    }
}

impl Handle {
    /// The index that it works on.
    pub fn index(&self) -> &Index {
        &self.index
    }

    /// Fills an empty index, to which nobody else writes meanwhile, with pairs in the order of their keys: see
    /// [`Engine::bulk_load`].
    ///
    /// ```
    /// # use farwood_fabric::{Executor, SessionOptions};
    /// # use farwood_index::{AnyEngine, Index, IndexError, OrderedIndex, Pool};
    /// # let cluster = farwood_memory::embedded(1, 64 << 20).unwrap();
    /// # Executor::new().block_on(async {
    /// # let pool = Pool::join(&cluster, SessionOptions::default()).await?;
    /// # let endpoint = pool.session().endpoint()?;
    /// let squares = Index::create(&pool, &endpoint, "squares", &AnyEngine::named("sherman", 8, 8)?).await?;
    /// let handle = squares.handle(&endpoint)?;
    /// let pairs = (0..1000u64).map(|n| (n.to_be_bytes().to_vec(), (n * n).to_le_bytes().to_vec()));
    /// assert_eq!(handle.bulk_load(pairs, 0.8).await?, 1000);
    /// assert_eq!(handle.get(&12u64.to_be_bytes()).await?, Some(144u64.to_le_bytes().to_vec()));
    /// # Ok::<_, IndexError>(())
    /// # }).unwrap();
    /// ```
    pub async fn bulk_load(
        &self,
        pairs: impl IntoIterator<Item = KeyValue>,
        fill: f64,
    ) -> Result<u64, IndexError> {
        self.index.inner.engine.bulk_load(&self.operations, pairs.into_iter(), fill).await
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.index.numbers(|numbers| numbers.given_back.insert(self.number));
    }
}

/// The futures of its operations, and no others around them: they are polled often.
impl OrderedIndex for Handle {
    fn limits(&self) -> Limits {
        self.operations.limits()
    }

    fn get(&self, key: &[u8]) -> impl Future<Output = Result<Option<Vec<u8>>, IndexError>> {
        self.operations.get(key)
    }

    fn put(&self, key: &[u8], value: &[u8]) -> impl Future<Output = Result<(), IndexError>> {
        self.operations.put(key, value)
    }

    fn compare_and_swap(
        &self,
        key: &[u8],
        expected: Option<&[u8]>,
        new: Option<&[u8]>,
    ) -> impl Future<Output = Result<bool, IndexError>> {
        self.operations.compare_and_swap(key, expected, new)
    }

    fn adjust(
        &self,
        key: &[u8],
        expected: &[u8],
        new: &[u8],
    ) -> impl Future<Output = Result<bool, IndexError>> {
        self.operations.adjust(key, expected, new)
    }

    fn put_if_absent(&self, key: &[u8], value: &[u8]) -> impl Future<Output = Result<bool, IndexError>> {
        self.operations.put_if_absent(key, value)
    }

    fn update_if_present(&self, key: &[u8], value: &[u8]) -> impl Future<Output = Result<bool, IndexError>> {
        self.operations.update_if_present(key, value)
    }

    fn delete(&self, key: &[u8]) -> impl Future<Output = Result<bool, IndexError>> {
        self.operations.delete(key)
    }

    fn scan(
        &self,
        start: Bound<&[u8]>,
        end: Bound<&[u8]>,
        limit: usize,
        reverse: bool,
    ) -> impl Future<Output = Result<Vec<KeyValue>, IndexError>> {
        self.operations.scan(start, end, limit, reverse)
    }

    fn scan_with(
        &self,
        start: Bound<&[u8]>,
        end: Bound<&[u8]>,
        limit: usize,
        reverse: bool,
        each: &mut dyn FnMut(&[u8], &[u8]) -> bool,
    ) -> impl Future<Output = Result<usize, IndexError>> {
        self.operations.scan_with(start, end, limit, reverse, each)
    }

    fn scan_ends(
        &self,
        range: (Bound<&[u8]>, Bound<&[u8]>),
        limit: usize,
        reverse: bool,
        end_bytes: usize,
        each: &mut dyn FnMut(&[u8], &[u8]) -> bool,
    ) -> impl Future<Output = Result<usize, IndexError>> {
        self.operations.scan_ends(range, limit, reverse, end_bytes, each)
    }
}
