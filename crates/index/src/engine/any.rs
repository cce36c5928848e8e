//! Any engine, by the name in the catalog: the one place where a name becomes a type for those who open indexes by name.

use super::Engine;
use super::sherman::{self, LocksAlone, Sherman};
use super::sphinx::{self, Sphinx};
use crate::Pool;
use crate::api::{IndexError, KeyValue, Limits, OrderedIndex};
use crate::pool::Mistakes;
use crate::pool::recovery::{LocalFuture, Recoverer};
use crate::shared::heap::Class;
use farwood_fabric::control::IndexInfo;
use farwood_fabric::session::Estate;
use farwood_fabric::{Endpoint, GlobalAddr, Op};
use std::ops::{Bound, RangeInclusive};

/// An engine, whichever it is.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum AnyEngine {
    /// A B-link tree; keys and values of one length.
    Sherman(Sherman),
    /// A radix tree; keys and values of any length.
    Sphinx(Sphinx),
}

/// What a compute server has of an index of any engine.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum AnyAttached {
    /// Sherman's.
    Sherman(sherman::Attached),
    /// Sphinx's.
    Sphinx(sphinx::Attached),
}

/// An index of any engine, as one task sees it.
#[derive(Debug)]
#[non_exhaustive]
pub enum AnyIndex {
    /// Sherman's.
    Sherman(sherman::Tree),
    /// Sphinx's.
    Sphinx(sphinx::Tree),
}

impl AnyEngine {
    /// The engines' names.
    pub const NAMES: [&'static str; 4] = ["sherman", "fg+", "sphinx", "art"];

    /// The engine of this name, for keys and values of these sizes where all have one.
    pub fn named(name: &str, key_bytes: usize, value_bytes: usize) -> Result<Self, IndexError> {
        let config = match name {
            "sherman" => sherman::Config::default(),
            "fg+" => sherman::Config::fg_plus(),
            "sphinx" => return Ok(Self::Sphinx(Sphinx::default())),
            "art" => return Ok(Self::Sphinx(Sphinx::new(sphinx::Config::art()))),
            _ => return Err(unknown(name)),
        };
        Ok(Self::Sherman(Sherman::new(config.sized(key_bytes, value_bytes))))
    }

    /// The engine of an index, with the settings that it was created with.
    pub fn of(info: &IndexInfo) -> Result<Self, IndexError> {
        match info.engine.as_str() {
            "sherman" | "fg+" => Sherman::of(info).map(Self::Sherman),
            "sphinx" | "art" => Sphinx::of(info).map(Self::Sphinx),
            other => Err(unknown(other)),
        }
    }

    /// Creates an index, empty, that is not ready yet: nobody else can open it, and if this session ends before
    /// [`Pool::index_ready`], it is dropped.
    pub async fn lay_out(
        &self,
        pool: &Pool,
        endpoint: &Endpoint,
        index: &str,
    ) -> Result<IndexInfo, IndexError> {
        let info = match self {
            Self::Sherman(engine) => engine.lay_out(pool, endpoint, index).await?,
            Self::Sphinx(engine) => engine.lay_out(pool, endpoint, index).await?,
        };
        pool.note_laid_out(&info);
        Ok(info)
    }

    /// Bytes of a key, if all have as many.
    pub fn key_bytes(&self) -> Option<usize> {
        match self {
            Self::Sherman(sherman) => Some(sherman.config.key_bytes),
            Self::Sphinx(_) => None,
        }
    }
}

fn unknown(name: &str) -> IndexError {
    let names = AnyEngine::NAMES.join(", ");
    IndexError::BadConfig { why: format!("there is no engine '{name}' in this version; there are {names}") }
}

/// The engine's name of an index that is no engine's: words and chunks of its own, without locks and intents.
pub const PLAIN: &str = "plain";

/// What recovery has to know of this library's engines.
#[derive(Clone, Copy, Debug)]
pub struct Engines;

impl Recoverer for Engines {
    fn knows(&self, info: &IndexInfo) -> bool {
        let name = info.engine.as_str();
        AnyEngine::NAMES.contains(&name) || [LocksAlone::NAME, PLAIN].contains(&name)
    }

    fn settle<'a>(
        &'a self,
        op: &'a Op,
        pool: &'a Pool,
        info: &'a IndexInfo,
        estate: &'a Estate,
    ) -> LocalFuture<'a, Result<(), IndexError>> {
        Box::pin(async move {
            // What Sphinx leaves is mended by whoever comes by it; its locks are in lock memory.
            if !["sherman", "fg+", LocksAlone::NAME].contains(&info.engine.as_str()) {
                return Ok(());
            }
            match Sherman::locks_in_main_memory(op, pool, info).await? {
                Some(table) => table.free_all_of(op, estate.victim).await,
                None => Ok(()),
            }
        })
    }
}

/// One engine was given what another has of an index.
fn mixed() -> IndexError {
    IndexError::BadConfig { why: "the index was attached by another engine than this one".into() }
}

impl Engine for AnyEngine {
    type Attached = AnyAttached;
    type Index = AnyIndex;

    fn name(&self) -> &'static str {
        match self {
            Self::Sherman(engine) => engine.name(),
            Self::Sphinx(engine) => engine.name(),
        }
    }

    fn mistakes(&self) -> Mistakes {
        match self {
            Self::Sherman(engine) => engine.mistakes(),
            Self::Sphinx(engine) => engine.mistakes(),
        }
    }

    fn value_bytes(&self) -> RangeInclusive<usize> {
        match self {
            Self::Sherman(engine) => engine.value_bytes(),
            Self::Sphinx(engine) => engine.value_bytes(),
        }
    }

    async fn create(&self, pool: &Pool, endpoint: &Endpoint, index: &str) -> Result<(), IndexError> {
        match self {
            Self::Sherman(engine) => engine.create(pool, endpoint, index).await,
            Self::Sphinx(engine) => engine.create(pool, endpoint, index).await,
        }
    }

    async fn attach(&self, pool: &Pool, endpoint: &Endpoint, index: &str) -> Result<AnyAttached, IndexError> {
        match self {
            Self::Sherman(engine) => engine.attach(pool, endpoint, index).await.map(AnyAttached::Sherman),
            Self::Sphinx(engine) => engine.attach(pool, endpoint, index).await.map(AnyAttached::Sphinx),
        }
    }

    fn open(&self, attached: &AnyAttached, endpoint: &Endpoint, handle: u16) -> Result<AnyIndex, IndexError> {
        match (self, attached) {
            (Self::Sherman(engine), AnyAttached::Sherman(attached)) => {
                engine.open(attached, endpoint, handle).map(AnyIndex::Sherman)
            }
            (Self::Sphinx(engine), AnyAttached::Sphinx(attached)) => {
                engine.open(attached, endpoint, handle).map(AnyIndex::Sphinx)
            }
            _ => Err(mixed()),
        }
    }

    fn has_bulk_load(&self) -> bool {
        match self {
            Self::Sherman(engine) => engine.has_bulk_load(),
            Self::Sphinx(engine) => engine.has_bulk_load(),
        }
    }

    async fn bulk_load(
        &self,
        index: &AnyIndex,
        pairs: impl Iterator<Item = KeyValue>,
        fill: f64,
    ) -> Result<u64, IndexError> {
        match (self, index) {
            (Self::Sherman(engine), AnyIndex::Sherman(index)) => engine.bulk_load(index, pairs, fill).await,
            (Self::Sphinx(engine), AnyIndex::Sphinx(index)) => engine.bulk_load(index, pairs, fill).await,
            _ => Err(mixed()),
        }
    }

    async fn warm_up(&self, index: &AnyIndex) -> Result<(), IndexError> {
        match (self, index) {
            (Self::Sherman(engine), AnyIndex::Sherman(index)) => engine.warm_up(index).await,
            (Self::Sphinx(engine), AnyIndex::Sphinx(index)) => engine.warm_up(index).await,
            _ => Err(mixed()),
        }
    }

    async fn check(
        &self,
        attached: &AnyAttached,
        endpoint: &Endpoint,
    ) -> Result<Vec<(Class, GlobalAddr)>, IndexError> {
        match (self, attached) {
            (Self::Sherman(engine), AnyAttached::Sherman(attached)) => engine.check(attached, endpoint).await,
            (Self::Sphinx(engine), AnyAttached::Sphinx(attached)) => engine.check(attached, endpoint).await,
            _ => Err(mixed()),
        }
    }

    async fn extents(
        &self,
        attached: &AnyAttached,
        endpoint: &Endpoint,
    ) -> Result<Vec<GlobalAddr>, IndexError> {
        match (self, attached) {
            (Self::Sherman(engine), AnyAttached::Sherman(attached)) => {
                engine.extents(attached, endpoint).await
            }
            (Self::Sphinx(engine), AnyAttached::Sphinx(attached)) => engine.extents(attached, endpoint).await,
            _ => Err(mixed()),
        }
    }

    fn cache_bytes(&self, attached: &AnyAttached) -> u64 {
        match (self, attached) {
            (Self::Sherman(engine), AnyAttached::Sherman(attached)) => engine.cache_bytes(attached),
            (Self::Sphinx(engine), AnyAttached::Sphinx(attached)) => engine.cache_bytes(attached),
            _ => 0,
        }
    }
}

impl OrderedIndex for AnyIndex {
    fn limits(&self) -> Limits {
        match self {
            Self::Sherman(index) => index.limits(),
            Self::Sphinx(index) => index.limits(),
        }
    }

    async fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, IndexError> {
        match self {
            Self::Sherman(index) => index.get(key).await,
            Self::Sphinx(index) => index.get(key).await,
        }
    }

    async fn put(&self, key: &[u8], value: &[u8]) -> Result<(), IndexError> {
        match self {
            Self::Sherman(index) => index.put(key, value).await,
            Self::Sphinx(index) => index.put(key, value).await,
        }
    }

    async fn compare_and_swap(
        &self,
        key: &[u8],
        expected: Option<&[u8]>,
        new: Option<&[u8]>,
    ) -> Result<bool, IndexError> {
        match self {
            Self::Sherman(index) => index.compare_and_swap(key, expected, new).await,
            Self::Sphinx(index) => index.compare_and_swap(key, expected, new).await,
        }
    }

    async fn adjust(&self, key: &[u8], expected: &[u8], new: &[u8]) -> Result<bool, IndexError> {
        match self {
            Self::Sherman(index) => index.adjust(key, expected, new).await,
            Self::Sphinx(index) => index.adjust(key, expected, new).await,
        }
    }

    async fn put_if_absent(&self, key: &[u8], value: &[u8]) -> Result<bool, IndexError> {
        match self {
            Self::Sherman(index) => index.put_if_absent(key, value).await,
            Self::Sphinx(index) => index.put_if_absent(key, value).await,
        }
    }

    async fn update_if_present(&self, key: &[u8], value: &[u8]) -> Result<bool, IndexError> {
        match self {
            Self::Sherman(index) => index.update_if_present(key, value).await,
            Self::Sphinx(index) => index.update_if_present(key, value).await,
        }
    }

    async fn delete(&self, key: &[u8]) -> Result<bool, IndexError> {
        match self {
            Self::Sherman(index) => index.delete(key).await,
            Self::Sphinx(index) => index.delete(key).await,
        }
    }

    async fn scan(
        &self,
        start: Bound<&[u8]>,
        end: Bound<&[u8]>,
        limit: usize,
        reverse: bool,
    ) -> Result<Vec<KeyValue>, IndexError> {
        match self {
            Self::Sherman(index) => index.scan(start, end, limit, reverse).await,
            Self::Sphinx(index) => index.scan(start, end, limit, reverse).await,
        }
    }

    async fn scan_with(
        &self,
        start: Bound<&[u8]>,
        end: Bound<&[u8]>,
        limit: usize,
        reverse: bool,
        each: &mut dyn FnMut(&[u8], &[u8]) -> bool,
    ) -> Result<usize, IndexError> {
        match self {
            Self::Sherman(index) => index.scan_with(start, end, limit, reverse, each).await,
            Self::Sphinx(index) => index.scan_with(start, end, limit, reverse, each).await,
        }
    }

    async fn scan_ends(
        &self,
        range: (Bound<&[u8]>, Bound<&[u8]>),
        limit: usize,
        reverse: bool,
        end_bytes: usize,
        each: &mut dyn FnMut(&[u8], &[u8]) -> bool,
    ) -> Result<usize, IndexError> {
        match self {
            Self::Sherman(index) => index.scan_ends(range, limit, reverse, end_bytes, each).await,
            Self::Sphinx(index) => index.scan_ends(range, limit, reverse, end_bytes, each).await,
        }
    }
}
