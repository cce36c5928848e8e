//! What a trial is run on: an index that can be created, opened, recovered and checked.

use farwood_fabric::{Endpoint, GlobalAddr, SessionId};
use farwood_index::shared::heap::{self, Class};
use farwood_index::{IndexError, OrderedIndex, Pool};

/// A structure under test. Engines implement it beside their [`OrderedIndex`]; the harness supplies the rest.
pub trait Subject: Clone + 'static {
    /// The index as one task sees it.
    type Index: OrderedIndex;

    /// Its name, in the catalog too.
    fn name(&self) -> &'static str;

    /// Mistakes that the heap is to make.
    fn heap_sabotage(&self) -> heap::Sabotage {
        heap::Sabotage::default()
    }

    /// Creates it, empty.
    fn create(&self, pool: &Pool, endpoint: &Endpoint) -> impl Future<Output = Result<(), IndexError>>;

    /// Opens it for one task; `handle` is the task's number within its session.
    fn open(
        &self,
        pool: &Pool,
        endpoint: &Endpoint,
        handle: u16,
    ) -> impl Future<Output = Result<Self::Index, IndexError>>;

    /// Cleans up after a session whose lease has run out; nothing, if it has not or somebody else does.
    fn recover(
        &self,
        pool: &Pool,
        endpoint: &Endpoint,
        victim: SessionId,
    ) -> impl Future<Output = Result<(), IndexError>>;

    /// Walks the whole structure while nobody uses it and verifies every invariant; returns the heap objects it reaches.
    fn check(
        &self,
        pool: &Pool,
        endpoint: &Endpoint,
    ) -> impl Future<Output = Result<Vec<(Class, GlobalAddr)>, IndexError>>;
}
