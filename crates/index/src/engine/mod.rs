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

pub use any::{AnyAttached, AnyEngine, AnyIndex};

use crate::Pool;
use crate::api::{IndexError, OrderedIndex};
use crate::shared::heap::{self, Class};
use farwood_fabric::{Endpoint, GlobalAddr, SessionId};
use std::ops::RangeInclusive;

/// An engine with its configuration.
pub trait Engine: Clone + Send + Sync + 'static {
    /// What one compute server has of an index: its caches, its local locks. Its threads share it.
    type Attached: Clone + Send + Sync + 'static;
    /// The index as one task sees it.
    type Index: OrderedIndex + 'static;

    /// Its name, in the catalog too.
    fn name(&self) -> &'static str;

    /// Mistakes that the heap is to make, for tests of the tests.
    fn heap_sabotage(&self) -> heap::Sabotage {
        heap::Sabotage::default()
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

    /// Cleans up after a session whose lease has run out; nothing, if it has not or somebody else does.
    fn recover(
        &self,
        attached: &Self::Attached,
        endpoint: &Endpoint,
        victim: SessionId,
    ) -> impl Future<Output = Result<(), IndexError>>;

    /// Walks the whole structure while nobody uses it and verifies every invariant; returns the heap objects it reaches.
    fn check(
        &self,
        attached: &Self::Attached,
        endpoint: &Endpoint,
    ) -> impl Future<Output = Result<Vec<(Class, GlobalAddr)>, IndexError>>;

    /// How many bytes the compute server spends on it.
    fn cache_bytes(&self, _attached: &Self::Attached) -> u64 {
        0
    }

    /// How many bytes it holds outside far memory's chunks, if that is where its entries are.
    fn own_memory_bytes(&self, _attached: &Self::Attached) -> Option<u64> {
        None
    }
}
