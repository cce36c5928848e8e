//! The Redis protocol in front of an index in far memory: any Redis client can use the index, through any number of gateways.
//!
//! | module | what it is |
//! |---|---|
//! | [`gateway`] | starting and stopping |
//! | `lead` | one session of the pool after the other, and what serves clients in between |
//! | `health` | whether it can serve, and why not |
//! | `shard` | one thread: its sockets, its clients, its chores |
//! | `command` | the commands |
//! | `resp` | the protocol: requests in, replies out; nothing else in the project knows it |
//! | [`envelope`] | what is kept with a value: when it expires |
//! | `fuzz` | what clients send, for fuzzers |
//! | [`ask`] | asking a gateway how it does |
//! | [`store`] | where keys and values are: an index by name |
//! | `budget`, `logins` | what clients may not do: take all memory, guess passwords |
//! | `scarcity` | a full store: what has expired goes first |
//! | `stats`, `metrics`, `clients`, `cursors`, `common` | what is counted and shown; what threads share |
//!
//! Threads own an endpoint and carry out commands inline (the executor's `Source` brings sockets and far memory together), so a
//! command costs no hop between threads; clients move to another thread when theirs is busy. Every command on one key is one step
//! for all clients of all gateways, by compare-and-swap.

#![forbid(unsafe_code)]

pub mod ask;
mod budget;
mod clients;
mod command;
mod common;
mod cursors;
pub mod envelope;
#[doc(hidden)]
pub mod fuzz;
pub mod gateway;
mod glob;
mod health;
mod lead;
mod logins;
mod metrics;
mod number;
pub mod options;
mod resp;
mod scarcity;
mod shard;
mod stats;
pub mod store;

pub use gateway::Gateway;
pub use options::{Options, StartError};
pub use store::{Backing, NamedIndex, Store};
