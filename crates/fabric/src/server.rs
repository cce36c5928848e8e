//! What a transport and a memory server's logic need of each other.
//!
//! The logic ([`ServerLogic`], implemented by the `memory` crate) decides; the transport carries out. So the same
//! logic runs inside `local`, inside the simulator, and behind sockets, and none of it knows which.

use crate::addr::{RegionId, SessionId};
use crate::call::{Call, CallId, CallOutcome};
use crate::clock::{MILLISECOND, Nanos};
use crate::found::Found;
use crate::pool_clock::UnixMillis;
use crate::procedure::Procedure;
use crate::region::{Identity, Permissions, RegionSpec};
use crate::status::Tables;
use std::fmt;
use std::sync::Arc;

/// The server's own access to its regions, word by word. Clients may race with it: readers of what the server
/// writes see words in any order, as with any other verb.
pub trait ServerMemory {
    /// The word at `offset` (a multiple of 8) of `region`.
    fn load(&self, region: RegionId, offset: u64) -> u64;
    /// Stores a word.
    fn store(&self, region: RegionId, offset: u64, value: u64);
    /// How the memory was found when it was opened.
    fn found(&self) -> &Found {
        &Found::SameBoot
    }
    /// What the clock on the wall says where the server runs, at a moment of its own clock: milliseconds since 1970. A world without a
    /// calendar counts from its start.
    fn wall_clock_ms(&self, now: Nanos) -> UnixMillis {
        now / MILLISECOND
    }
}

/// What the transport has to do, in order: an action is finished before the next one is begun.
#[derive(Debug)]
pub enum HostAction {
    /// Accept verbs and calls of this session from now on, within `permissions`.
    Admit {
        /// The session.
        session: SessionId,
        /// Which holder of that number: connections of an earlier one stay closed.
        term: u64,
        /// What its connections have to show.
        ticket: u64,
        /// What it may do.
        permissions: Permissions,
    },
    /// Make sure that no verb of this session can land any more, and refuse it from now on.
    Fence {
        /// The session.
        session: SessionId,
    },
    /// Answer a call.
    Reply {
        /// Which.
        to: CallId,
        /// With what.
        outcome: CallOutcome,
    },
    /// Run a procedure beside the server's memory and report to [`ServerLogic::finished`].
    Run {
        /// For which call.
        call: CallId,
        /// The ticket of its caller, in whose name the procedure acts.
        ticket: u64,
        /// What.
        procedure: Arc<dyn Procedure>,
        /// Its argument.
        request: Vec<u8>,
    },
}

impl HostAction {
    /// The call that the action answers, if it does.
    pub fn answers(&self) -> Option<CallId> {
        match self {
            Self::Reply { to, .. } => Some(*to),
            _ => None,
        }
    }
}

/// Why a server does not start on the memory it was given.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum StartError {
    /// The sizes do not work out.
    Config(String),
    /// The memory holds tables of another version.
    FormatVersion {
        /// The version found.
        found: u32,
        /// The version this code understands.
        supported: u32,
    },
    /// The memory belongs to another pool or server, or has another shape.
    Mismatch(String),
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Config(why) => write!(f, "the memory server cannot start: {why}"),
            Self::FormatVersion { found, supported } => write!(
                f,
                "the memory holds format version {found}, this version of farwood understands {supported}; use the \
                 version that wrote it, or give the server fresh memory"
            ),
            Self::Mismatch(what) => write!(f, "the memory is not this server's: {what}; check the path"),
        }
    }
}

impl std::error::Error for StartError {}

/// A memory server's logic. Calls may come from several threads; each is short.
pub trait ServerLogic: Send + Sync + fmt::Debug {
    /// The regions to map before [`ServerLogic::start`].
    fn regions(&self) -> Vec<RegionSpec>;

    /// Formats zeroed memory, or takes over tables that are there; says who the server is.
    fn start(&self, memory: &dyn ServerMemory, now: Nanos) -> Result<Identity, StartError>;

    /// Who is let in at once after [`ServerLogic::start`]: those who were there when an earlier process served this memory.
    fn readmit(&self, _memory: &dyn ServerMemory) -> Vec<HostAction> {
        Vec::new()
    }

    /// A call arrived.
    fn call(&self, memory: &dyn ServerMemory, call: Call, now: Nanos) -> Vec<HostAction>;

    /// A procedure begun by [`HostAction::Run`] ended.
    fn finished(&self, call: CallId, outcome: CallOutcome) -> Vec<HostAction>;

    /// The process of this session is gone: nobody can keep its lease any more, so that it may be fenced at once. What it
    /// had stays as it is until then.
    fn abandoned(&self, memory: &dyn ServerMemory, session: SessionId, term: u64);

    /// The last connection on which this session made calls has closed. Its process may be gone, or only its network: unless it is
    /// heard of again soon, its lease ends.
    fn silent(&self, session: SessionId, term: u64, now: Nanos);

    /// What its tables hold, for those who watch.
    fn status(&self, now: Nanos) -> Tables;

    /// How many cores procedures may use.
    fn cores(&self) -> usize;
}
