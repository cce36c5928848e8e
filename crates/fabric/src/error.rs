//! Everything that can go wrong between a compute server and far memory, as one enum. The message says what to do.

use crate::addr::{GlobalAddr, RegionId, ServerId, SessionId};
use crate::call::CallError;
use crate::control::ControlError;
use crate::region::{Permissions, PoolId};
use std::fmt;

/// Why a verb, a batch or a call did not complete.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum FabricError {
    /// The bytes do not exist, or there are none (length 0). Nothing was touched.
    OutOfBounds {
        /// Where the verb pointed.
        addr: GlobalAddr,
        /// How many bytes it named.
        len: u64,
        /// How many the region has.
        region_bytes: u64,
    },
    /// No server has this number. Nothing was touched.
    UnknownServer {
        /// The number.
        server: ServerId,
    },
    /// The server has no such region. Nothing was touched.
    UnknownRegion {
        /// The server.
        server: ServerId,
        /// The region it lacks.
        region: RegionId,
    },
    /// An atomic on an address that is not a multiple of 8. Nothing was touched.
    Misaligned {
        /// The address.
        addr: GlobalAddr,
    },
    /// The session may not do that there. Nothing was touched.
    PermissionDenied {
        /// Where.
        addr: GlobalAddr,
        /// What the verb needs.
        needed: Permissions,
        /// What the session has.
        held: Permissions,
    },
    /// The transport cannot do that (see `Capabilities`). Nothing was touched.
    Unsupported {
        /// What it lacks.
        what: &'static str,
    },
    /// A batch addressed to one server contains a verb for another. Nothing was touched.
    MixedServers {
        /// The batch's server.
        batch: ServerId,
        /// The verb's.
        verb: ServerId,
    },
    /// A batch with more verbs than the transport takes (or none). Nothing was touched.
    BatchLength {
        /// How many it has.
        verbs: usize,
        /// How many are allowed.
        max: usize,
    },
    /// A local buffer is shorter than the verb says. Nothing was touched.
    BufferRange {
        /// Where in the buffer the verb begins.
        at: usize,
        /// How many bytes it names.
        len: usize,
        /// How many the buffer has.
        buffer_bytes: usize,
    },
    /// No completion came. The verb may have happened, or may still happen until the connection is fenced.
    Unknown {
        /// The server it was posted to.
        server: ServerId,
    },
    /// The connection failed earlier and was not re-established. Nothing of this batch was posted.
    Disconnected {
        /// The server.
        server: ServerId,
    },
    /// The session was fenced: it lost its lease, and nothing it posts is executed any more.
    Fenced {
        /// The session.
        session: SessionId,
    },
    /// The server is gone, and its memory with it.
    ServerLost {
        /// The server.
        server: ServerId,
    },
    /// The server has no place for another endpoint.
    TooManyEndpoints {
        /// The server.
        server: ServerId,
    },
    /// There is no server to be reached where one was expected, or it refuses us. Says where and what to do.
    Unreachable {
        /// Where, why and what to do.
        why: String,
    },
    /// A server answered the handshake with an identity that does not fit.
    WrongServer {
        /// What does not fit.
        why: String,
    },
    /// The pool's servers belong to different pools.
    WrongPool {
        /// The pool we have.
        ours: PoolId,
        /// The pool the server belongs to.
        theirs: PoolId,
    },
    /// A call was refused or failed on the other side.
    Call(CallError),
    /// An operation was retried as often as allowed and still lost.
    RetriesExhausted {
        /// What was retried.
        what: &'static str,
        /// How often.
        attempts: u32,
    },
    /// A buffer cannot be made known to the network card. Nothing was posted.
    CannotRegister {
        /// How long it is.
        bytes: usize,
    },
    /// An endpoint was asked for on a thread that runs no executor.
    NoExecutor,
}

impl FabricError {
    /// Whether the verb may have taken effect, or may yet: the caller must re-read before it concludes anything.
    pub fn is_unknown(&self) -> bool {
        matches!(self, Self::Unknown { .. } | Self::Call(CallError::Unknown))
    }

    /// What a memory server refused, if that is what happened.
    pub fn control(&self) -> Option<&ControlError> {
        match self {
            Self::Call(CallError::Control(error)) => Some(error),
            _ => None,
        }
    }
}

impl fmt::Display for FabricError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OutOfBounds { addr, len, region_bytes } => {
                write!(
                    f,
                    "{len} bytes at {addr} are not within the region's {region_bytes} bytes; check the address"
                )
            }
            Self::UnknownServer { server } => {
                write!(f, "the pool has no server {server}; check the address or the pool's URL")
            }
            Self::UnknownRegion { server, region } => write!(f, "server {server} has no region '{region}'"),
            Self::Misaligned { addr } => write!(f, "an atomic at {addr} must be 8-byte aligned"),
            Self::PermissionDenied { addr, needed, held } => {
                write!(f, "{needed} is not permitted at {addr} (permitted: {held}); open a session that may")
            }
            Self::Unsupported { what } => {
                write!(f, "this transport has no {what}; ask `capabilities()` before using it")
            }
            Self::MixedServers { batch, verb } => {
                write!(f, "a batch for server {batch} contains a verb for {verb}; use one batch per server")
            }
            Self::BatchLength { verbs, max } => {
                write!(f, "a batch has {verbs} verbs; between 1 and {max} are allowed, split it")
            }
            Self::BufferRange { at, len, buffer_bytes } => {
                write!(f, "bytes {at}..{at}+{len} are not within a buffer of {buffer_bytes} bytes")
            }
            Self::Unknown { server } => write!(
                f,
                "no completion from server {server}: the effect is unknown; reconnect (which fences the old \
                 connection), then read before deciding"
            ),
            Self::Disconnected { server } => {
                write!(f, "the connection to server {server} is down; call reconnect before posting again")
            }
            Self::Fenced { session } => {
                write!(f, "session {session} was fenced after its lease ran out; open a new session")
            }
            Self::ServerLost { server } => {
                write!(f, "server {server} is gone and so is what it held; reload the pool")
            }
            Self::TooManyEndpoints { server } => {
                write!(
                    f,
                    "server {server} has no room for another endpoint; close endpoints that are not in use"
                )
            }
            Self::Unreachable { why } => f.write_str(why),
            Self::WrongServer { why } => {
                write!(f, "not the server that was expected: {why}; check the pool's URL")
            }
            Self::WrongPool { ours, theirs } => {
                write!(f, "a server of pool {theirs} among those of pool {ours}; check the pool's URL")
            }
            Self::Call(error) => error.fmt(f),
            Self::RetriesExhausted { what, attempts } => {
                write!(
                    f,
                    "{what} did not succeed in {attempts} attempts; the pool is overloaded or a peer is stuck"
                )
            }
            Self::CannotRegister { bytes } => write!(
                f,
                "a buffer of {bytes} bytes cannot be registered with the RDMA device; raise the limit of locked memory \
                 (`ulimit -l unlimited`) or use smaller buffers"
            ),
            Self::NoExecutor => {
                f.write_str("this thread runs no executor; create endpoints inside `Executor::block_on`")
            }
        }
    }
}

impl std::error::Error for FabricError {}

impl From<CallError> for FabricError {
    fn from(error: CallError) -> Self {
        Self::Call(error)
    }
}
