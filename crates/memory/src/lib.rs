//! The memory server as pure logic: it decides, a transport carries out.
//!
//! [`MemoryServer`] implements [`ServerLogic`](farwood_fabric::server::ServerLogic). It opens no socket, starts no
//! thread and reads no clock: bytes, time and calls are handed in, actions are handed back, so the simulator, the
//! in-process transport and the sockets run the same code.
//!
//! # Code map
//!
//! | file | what it decides |
//! |---|---|
//! | [`config`] | sizes and limits, checked once |
//! | [`layout`] | where every table is in META and BOARD, and which word commits an entry |
//! | `chunks` | who may have which chunks of main memory |
//! | `sessions` | who exists, whose lease ran out, who is fenced and who cleans up |
//! | `epochs` | when retired memory may be reused, when hints are flushed everywhere (pure) |
//! | `catalog` | which indexes there are |
//! | `numbers` | on servers other than the coordinator: which indexes may have chunks |
//! | `repeats` | why every request may be repeated to the next server process |
//! | `host` | which procedures run, wait or are refused (pure) |
//! | [`seal`] | what only the coordinator can have said (pure) |
//! | `control` | one request: may the caller ask it, and which table answers |
//! | `server` | one call: seen before, known caller, and the order of actions |
//! | `torn` | what of memory that is not whole is believed |
//! | [`testing`] | memory made of vectors |
//!
//! # Invariants
//!
//! * **ONE-OWNER**: a chunk lies in at most one extent, and an extent in use has at most one owner.
//! * **TYPE-STABLE**: a chunk changes its index, class or object size only when the flush generation it was freed
//!   under is through (or its whole index is released, whose drop has waited for such a flush).
//! * **META-IS-TRUTH**: what survives the process is in META. A change is committed by the store of *one* word, its
//!   commit word; what that word makes meaningful is stored before it. Replies leave after the commit.
//! * **FENCE-FIRST**: a session's number, chunks and journal go to others only after the transport was told to
//!   fence it, and the answer to a fence leaves after the fence and after the victim's procedures have ended here.
//! * **ONE-TERM**: a session's number comes back, its term never does. What one session does to another names the
//!   term, and a slot's term only grows: what is late finds a newer term and does nothing, and a term that has
//!   ended on a server is not admitted there again.
//! * **COORDINATOR-ONLY**: what concerns the whole pool takes effect on another server only under the coordinator's seal, and what comes in a
//!   session's name only with its ticket: no number that a client makes up stays.
//! * **AT-MOST-ONCE**: a call of a session runs once per life of the server process. A restart forgets what ran, but not what came of it:
//!   a request that comes again finds that in META (see `repeats`), and clients send no procedure call to another life. So sessions live on,
//!   each with a new lease; those that were being fenced or adopted stay so.
//! * **FREE-IS-CLEAN**: the journal of a free session number and the anchor of a new index are zero.
//!
//! Deliberately absent: the server never fences anybody by itself (a client that is in the way of nobody may live
//! on), never compacts chunks, and does not know what engines put into memory.

#![forbid(unsafe_code)]

mod catalog;
mod chunks;
pub mod config;
mod control;
mod embedded;
mod epochs;
mod host;
mod labels;
pub mod layout;
mod numbers;
mod repair;
mod repeats;
pub mod seal;
mod server;
mod sessions;
pub mod testing;
mod torn;

pub use config::{Mistakes, ServerConfig};
pub use embedded::embedded;
pub use seal::Secret;
pub use server::MemoryServer;
