//! `farwood up` and `farwood gateway` as real processes: a store that Redis clients use, whose parts are killed, and which leaves
//! nothing behind.

mod gateways;
mod kept;
mod pipelines;
mod rejoin;
mod saved;
mod store;
mod world;
