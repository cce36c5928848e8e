//! Computation that is charged for, so that the simulator's cost model knows of it.
//!
//! A verb has a price by itself; the work between verbs has none unless its author says how much there is. Engines say so
//! by name ([`Endpoint::charge`](crate::Endpoint::charge)); what the names cost stands in the profile. On real transports, where
//! the work takes the time it takes, and under the simulator's adversary, charging is free.

use crate::clock::Nanos;

/// Some work of a thread.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Work {
    /// What one operation of an index does beside its verbs: search the cache, check and change a node, keep the books.
    Operation,
    /// So many bytes copied, compared or checked.
    Bytes(u64),
    /// Taking up a call and answering it.
    Call,
    /// So long, by some measurement of its own.
    Nanos(Nanos),
}
