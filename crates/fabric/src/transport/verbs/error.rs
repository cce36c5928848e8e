//! Why RDMA cannot be used here, or not as asked. The message says what is missing.

use super::sys::LIBRARY;
use std::fmt;
use std::io;

/// Why RDMA cannot be used here, or not as asked.
#[derive(Debug)]
#[non_exhaustive]
pub enum VerbsError {
    /// The library is not installed, or cannot be used.
    NoLibrary {
        /// What the system says.
        why: String,
    },
    /// The kernel offers no RDMA device.
    NoDevice,
    /// There are devices, but not this one.
    NoSuchDevice {
        /// What was asked for.
        name: String,
        /// What there is.
        there: Vec<String>,
    },
    /// No port of the device is up and has an address.
    NotConnected {
        /// The device.
        device: String,
    },
    /// The device has no remote atomics.
    NoAtomics {
        /// The device.
        device: String,
    },
    /// Memory cannot be registered: mostly, the limit of locked memory.
    Register {
        /// How much.
        bytes: usize,
        /// What the system says.
        error: io::Error,
    },
    /// A function of the library failed.
    Failed {
        /// What was tried.
        what: &'static str,
        /// What the system says.
        error: io::Error,
    },
}

impl VerbsError {
    /// What the last function of the library left in `errno`.
    pub(super) fn last(what: &'static str) -> Self {
        Self::Failed { what, error: io::Error::last_os_error() }
    }

    /// What a function of the library returned.
    pub(super) fn check(what: &'static str, returned: i32) -> Result<(), Self> {
        if returned == 0 {
            Ok(())
        } else {
            Err(Self::Failed { what, error: io::Error::from_raw_os_error(returned.abs()) })
        }
    }
}

impl fmt::Display for VerbsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoLibrary { why } => write!(
                f,
                "{LIBRARY} cannot be loaded ({why}); install it (Debian: libibverbs1 and ibverbs-providers)"
            ),
            Self::NoDevice => f.write_str(
                "there is no RDMA device; install the driver of the card, or make a software device on a network card \
                 (`rdma link add rxe0 type rxe netdev eth0`)",
            ),
            Self::NoSuchDevice { name, there } => {
                write!(f, "there is no RDMA device '{name}'; there are {}", there.join(", "))
            }
            Self::NotConnected { device } => write!(
                f,
                "no port of RDMA device {device} is active and has an address; connect it, and give its network \
                 interface an IP address"
            ),
            Self::NoAtomics { device } => {
                write!(f, "RDMA device {device} has no remote atomics, without which there are no locks; use another")
            }
            Self::Register { bytes, error } => write!(
                f,
                "{bytes} bytes of memory cannot be registered with the RDMA device: {error}; raise the limit of locked \
                 memory (`ulimit -l unlimited`), and keep memory in RAM, not in a file of a disk"
            ),
            Self::Failed { what, error } => write!(f, "the RDMA device cannot {what}: {error}"),
        }
    }
}

impl std::error::Error for VerbsError {}
