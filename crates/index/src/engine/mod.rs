//! What an engine supplies, beside the operations themselves: how its index comes to be, is attached and opened, and how it is
//! recovered and checked. The bench, the simulator's trials and the front ends know engines by this alone.
//!
//! | engine | what it is |
//! |---|---|
//! | [`sherman`] | a B-link tree with hierarchical locks and entry-sized writes (Sherman, SIGMOD '22), and its baseline FG+ |
//! | [`sphinx`] | a radix tree for keys of any length, its inner nodes found by hash (Sphinx, DAC '25), and its baseline ART |

mod any;
pub mod sherman;
pub mod sphinx;

pub use any::{AnyAttached, AnyEngine, AnyIndex, Engines, PLAIN};

use crate::Pool;
use crate::api::{IndexError, KeyValue, OrderedIndex};
use crate::pool::{self, Recoverer};
use crate::shared::heap::Class;
use farwood_fabric::{Endpoint, GlobalAddr, Work};
use std::ops::RangeInclusive;
use std::sync::Arc;

/// An engine with its configuration.
pub trait Engine: Clone + Send + Sync + 'static {
    /// What one compute server has of an index: its caches, its local locks. Its threads share it.
    type Attached: Clone + Send + Sync + 'static;
    /// The index as one task sees it.
    type Index: OrderedIndex + 'static;

    /// Its name, in the catalog too.
    fn name(&self) -> &'static str;

    /// Mistakes that the pool is to make, for tests of the tests.
    fn mistakes(&self) -> pool::Mistakes {
        pool::Mistakes::default()
    }

    /// Who recovers what dead sessions left in its indexes, if it is none of this library's engines ([`Engines`]).
    fn recoverer(&self) -> Option<Arc<dyn Recoverer>> {
        None
    }

    /// The lengths of values that it can store, as far as trials are to try them.
    fn value_bytes(&self) -> RangeInclusive<usize> {
        8..=89
    }

    /// Creates an index, empty.
    fn create(
        &self,
        pool: &Pool,
        endpoint: &Endpoint,
        index: &str,
    ) -> impl Future<Output = Result<(), IndexError>>;

    /// Makes an index that is there known to a compute server, once.
    fn attach(
        &self,
        pool: &Pool,
        endpoint: &Endpoint,
        index: &str,
    ) -> impl Future<Output = Result<Self::Attached, IndexError>>;

    /// Opens it for one task; `handle` is the task's number within its compute server.
    fn open(
        &self,
        attached: &Self::Attached,
        endpoint: &Endpoint,
        handle: u16,
    ) -> Result<Self::Index, IndexError>;

    /// Whether [`bulk_load`](Self::bulk_load) is more than a put of each pair; if not, several tasks that put are faster.
    fn has_bulk_load(&self) -> bool {
        false
    }

    /// Fills an empty index, to which nobody else writes meanwhile, with pairs in the order of their keys, each key once. Nodes are
    /// filled to `fill` (above 0, up to 1) where there are such. Returns how many pairs there were.
    fn bulk_load(
        &self,
        index: &Self::Index,
        pairs: impl Iterator<Item = KeyValue>,
        _fill: f64,
    ) -> impl Future<Output = Result<u64, IndexError>> {
        async move {
            let mut count = 0;
            for (key, value) in pairs {
                index.put(&key, &value).await?;
                count += 1;
            }
            Ok(count)
        }
    }

    /// Fills what this compute server caches of an index that others have filled, instead of learning it operation by operation.
    fn warm_up(&self, _index: &Self::Index) -> impl Future<Output = Result<(), IndexError>> {
        async { Ok(()) }
    }

    /// Walks the whole structure while nobody uses it and verifies every invariant; returns the heap objects that are linked.
    ///
    /// It MUST name every object that anything in the index leads to, each once: a repair ([`crate::repair`]) frees all others. What it
    /// cannot read, or what is not as it must be, MUST end it with [`IndexError::Corrupt`]; it must never go on without that part. Hints
    /// that sessions must distrust anyway (entries of hash tables) lead to nothing in this sense.
    fn check(
        &self,
        attached: &Self::Attached,
        endpoint: &Endpoint,
    ) -> impl Future<Output = Result<Vec<(Class, GlobalAddr)>, IndexError>>;

    /// The extents of raw bytes that the index has beside its objects. It MUST name every one, by its first byte: a repair frees all others.
    fn extents(
        &self,
        attached: &Self::Attached,
        endpoint: &Endpoint,
    ) -> impl Future<Output = Result<Vec<GlobalAddr>, IndexError>>;

    /// What one operation costs its client beside its verbs, for those who charge for it.
    fn work(&self) -> Work {
        Work::Operation
    }

    /// How many bytes the compute server spends on it.
    fn cache_bytes(&self, _attached: &Self::Attached) -> u64 {
        0
    }

    /// How many bytes it holds outside far memory's chunks, if that is where its entries are.
    fn own_memory_bytes(&self, _attached: &Self::Attached) -> Option<u64> {
        None
    }
}
