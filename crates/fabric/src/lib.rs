//! One-sided verbs on far memory.
//!
//! Compute servers run the index, memory servers hold the bytes, and between them there are only READs, WRITEs, atomics
//! and the occasional call. This crate is that boundary: addresses and verbs, ordered batches with the round trips they
//! cost, buffers, an executor per thread, sessions and epochs, and the transports. The contract that all of it keeps
//! stands in [`transport`]; start there.
//!
//! | module | what it is |
//! |---|---|
//! | [`addr`], [`region`] | where bytes are, and who may touch them |
//! | [`verb`], [`buf`], [`stats`], [`caps`] | verbs, ordered batches, their buffers, counts and limits |
//! | [`endpoint`] | the client thread's access to everything outside: verbs, calls, time, randomness, tasks |
//! | [`session`], `pins` | leases, fencing, epochs, flushes: when memory may be reused |
//! | [`pool_clock`] | what time it is, for all sessions of a pool |
//! | [`call`], [`procedure`], [`control`], [`wire`] | the two-sided path, and what memory servers are asked |
//! | [`server`], [`status`] | what a transport and a memory server's logic need of each other, and what they say of themselves |
//! | [`transport`] | the contract, the conformance suite, `local`, `sim` |
//! | [`exec`], [`clock`], [`marks`], [`work`] | tasks, time, coverage marks, computation that the simulator charges for |
//! | [`company`], [`pipeline`] | operations that one task polls together: they make way for each other, and take effect in order |
//! | [`mem`], [`pages`] | the audited copies of memory that others race on; how the system backs it |

pub mod addr;
pub mod buf;
pub mod call;
pub mod caps;
pub mod clock;
pub mod company;
pub mod control;
mod doubt;
pub mod endpoint;
pub mod error;
pub mod exec;
pub mod files;
pub mod found;
pub mod label;
pub mod marks;
pub mod mem;
pub mod pages;
mod pins;
pub mod pipeline;
pub mod pool_clock;
pub mod procedure;
pub mod rarely;
pub mod region;
pub mod server;
pub mod session;
pub mod stats;
pub mod status;
pub mod transport;
pub mod verb;
mod wake;
pub mod wire;
pub mod work;

pub use addr::{GlobalAddr, PackedAddr, RegionId, ServerId, SessionId};
pub use buf::{Buf, SharedBuf};
pub use call::{CallError, Target};
pub use caps::Capabilities;
pub use company::Company;
pub use endpoint::{Endpoint, Op};
pub use error::FabricError;
pub use exec::Executor;
pub use label::Label;
pub use session::{Session, SessionOptions};
pub use stats::OpStats;
pub use transport::Cluster;
pub use verb::Batch;
pub use work::Work;
