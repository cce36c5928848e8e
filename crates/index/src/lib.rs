//! Ordered indexes in far memory: what a user of an index sees, and what the engines are built from.
//!
//! | module | what it is |
//! |---|---|
//! | [`api`] | the operations that every index offers, and their errors |
//! | [`engine`] | what an engine supplies beside its operations |
//! | [`index`] | an index by name: create, open, drop |
//! | [`client`] | the same for programs with threads and runtimes of their own |
//! | [`pool`] | a compute server's membership in a pool, and the catalog: create, open, list, drop |
//! | [`repair`] | what is leaked of an index, counted and freed |
//! | [`shared`] | what engines share: whole reads, remote locks, intents, the object heap |
//!
//! A future that is dropped leaves nothing locked: see *Cancellation* at [`OrderedIndex`].
//!
//! Engines never import each other, and nothing here knows which transport it runs on.

#![forbid(unsafe_code)]

pub mod api;
pub mod client;
pub mod engine;
pub mod index;
pub mod pool;
pub mod repair;
pub mod shared;

pub use api::{IndexError, KeyValue, Limits, OrderedIndex};
pub use client::Client;
pub use engine::{AnyEngine, Engine};
pub use index::Index;
pub use pool::Pool;
