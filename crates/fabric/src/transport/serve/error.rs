//! Why a server process does not start.

use super::NotWhole;
use crate::server::StartError;
use crate::transport::verbs::VerbsError;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

/// Why a server process does not start. The message says what to do.
#[derive(Debug)]
#[non_exhaustive]
pub enum ServeError {
    /// The server's logic refuses the memory or the settings.
    Start(StartError),
    /// It would listen nowhere.
    Nowhere,
    /// Whoever can reach the address could use the memory.
    NeedsToken {
        /// Which address.
        address: SocketAddr,
    },
    /// The address cannot be listened at.
    Address {
        /// Which.
        address: SocketAddr,
        /// Why not.
        error: io::Error,
    },
    /// Another server listens there.
    SocketInUse {
        /// Where.
        path: PathBuf,
    },
    /// There is something else.
    NotASocket {
        /// Where.
        path: PathBuf,
    },
    /// Unix sockets have short names.
    PathTooLong {
        /// Which.
        path: PathBuf,
        /// The most bytes.
        max: usize,
    },
    /// The socket cannot be made.
    Socket {
        /// Where.
        path: PathBuf,
        /// Why not.
        error: io::Error,
    },
    /// Another server uses that memory.
    MemoryInUse {
        /// Which.
        path: PathBuf,
    },
    /// What is there has another size.
    OtherShape {
        /// Where.
        path: String,
        /// Its size.
        found: u64,
        /// What these settings need.
        expected: u64,
    },
    /// What is kept there is not what it was.
    NotWhole {
        /// Where.
        path: String,
        /// How one can tell.
        why: NotWhole,
    },
    /// The machine has not so much.
    NotEnoughMemory {
        /// How many bytes more are needed.
        missing: u64,
        /// How many there are.
        available: u64,
    },
    /// The RDMA device cannot be used.
    Verbs(VerbsError),
    /// An RDMA device has no address of its own: clients find it over TCP.
    VerbsNeedsAddress,
    /// The device's atomics and the processor's would race on the same words.
    MixedAtomics {
        /// The device.
        device: String,
    },
    /// The memory cannot be had.
    Memory {
        /// Where.
        place: String,
        /// Why not.
        error: io::Error,
    },
}

impl ServeError {
    pub(crate) fn memory(place: &str) -> impl Fn(io::Error) -> Self {
        move |error| Self::Memory { place: place.to_owned(), error }
    }
}

impl fmt::Display for ServeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Start(error) => error.fmt(f),
            Self::Nowhere => f.write_str("a server has to listen somewhere: give a path, an address or both"),
            Self::NeedsToken { address } => write!(
                f,
                "{address} can be reached from other machines, and whoever reaches it could use the memory; give a token \
                 (--token-file), or listen at 127.0.0.1"
            ),
            Self::Address { address, error } if error.kind() == io::ErrorKind::AddrInUse => {
                write!(f, "another process already listens at {address}; choose another port or stop it")
            }
            Self::Address { address, error } if error.kind() == io::ErrorKind::AddrNotAvailable => {
                write!(f, "{address} is no address of this machine; choose one that is")
            }
            Self::Address { address, error } => write!(f, "cannot listen at {address}: {error}"),
            Self::SocketInUse { path } => {
                write!(
                    f,
                    "another server already listens at {}; choose another path or stop it",
                    path.display()
                )
            }
            Self::NotASocket { path } => {
                write!(f, "{} exists and is not a socket; choose another path", path.display())
            }
            Self::PathTooLong { path, max } => write!(
                f,
                "{} is too long for a socket, which may have {max} bytes; choose a shorter path",
                path.display()
            ),
            Self::Socket { path, error } if error.kind() == io::ErrorKind::PermissionDenied => write!(
                f,
                "no permission to make the socket {}; choose a folder that you may write to",
                path.display()
            ),
            Self::Socket { path, error } if error.kind() == io::ErrorKind::NotFound => {
                write!(f, "there is no folder for the socket {}; make it first", path.display())
            }
            Self::Socket { path, error } => write!(f, "cannot make the socket {}: {error}", path.display()),
            Self::MemoryInUse { path } => {
                write!(f, "another server uses the memory {}; stop it or choose another path", path.display())
            }
            Self::OtherShape { path, found, expected } => write!(
                f,
                "{path} holds {found} bytes of another server's memory, these settings make {expected}; give the \
                 settings it was made with, or another path"
            ),
            Self::NotWhole { path, why } => write!(
                f,
                "the memory kept in {path} is not whole: {why}; put a copy of it back, remove it to begin anew, or give \
                 --accept-torn to serve what is left and `farwood check --repair` each index then"
            ),
            Self::NotEnoughMemory { missing, available } => write!(
                f,
                "the server needs {} MiB of memory and {} MiB are available; ask for less",
                missing >> 20,
                available >> 20
            ),
            Self::Verbs(error) => error.fmt(f),
            Self::VerbsNeedsAddress => f.write_str(
                "clients of an RDMA device introduce themselves over TCP; give an address (--listen), too",
            ),
            Self::MixedAtomics { device } => write!(
                f,
                "the atomics of RDMA device {device} and of processes that map the memory would not be atomic among each \
                 other; offer the memory by RDMA (--verbs) or as shared memory (--shm), not both"
            ),
            Self::Memory { place, error } if error.kind() == io::ErrorKind::StorageFull => {
                write!(f, "not enough room for the memory in {place}; ask for less, or choose another path")
            }
            Self::Memory { place, error } => write!(f, "cannot use {place} as memory: {error}"),
        }
    }
}

impl std::error::Error for ServeError {}
