//! How a gateway is set up, and what it says when that cannot be.

use farwood_index::IndexError;
use std::fmt;
use std::net::SocketAddr;

/// How a gateway is set up.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where clients connect; port 0: any that is free.
    pub listen: SocketAddr,
    /// Where `GET /metrics` is answered for Prometheus.
    pub metrics: Option<SocketAddr>,
    /// The name of the index, as INFO shows it.
    pub index: String,
    /// How many threads serve clients, if there is so much to do.
    pub threads: usize,
    /// When clients are spread over threads.
    pub spread: Spread,
    /// What clients have to say before anything else.
    pub password: Option<Vec<u8>>,
    /// How many clients there may be at a time.
    pub max_clients: usize,
    /// How long a client may be silent before it is disconnected, in seconds; 0: for ever.
    pub idle_seconds: u64,
    /// How long a client may leave its replies unread before it is disconnected, in seconds.
    pub unread_seconds: u64,
    /// Whether the commands of a connection take effect in their order; otherwise only those about the same key do.
    pub keeps_order: bool,
    /// How much memory clients may take, all together: requests that are not whole, replies that were not read.
    pub client_memory_bytes: u64,
    /// The longest request.
    pub max_request_bytes: usize,
    /// The longest reply.
    pub max_reply_bytes: usize,
}

/// When a thread hands clients to another one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Spread {
    /// It was at least so busy for two moments in a row, in percent of a processor.
    pub busy_percent: u64,
    /// And so much of the machine's processors was idle, in percent of one.
    pub spare_percent: u64,
    /// What a client has to cost each time that it is served, for another thread to be worth waking even if less is idle.
    pub heavy_ns: u64,
    /// So much is enough then, in percent of one.
    pub spare_percent_if_heavy: u64,
}

impl Default for Spread {
    fn default() -> Self {
        Self { busy_percent: 90, spare_percent: 60, heavy_ns: 18_000, spare_percent_if_heavy: 25 }
    }
}

impl Options {
    /// The usual settings.
    pub fn new(listen: SocketAddr, index: &str) -> Self {
        Self {
            listen,
            metrics: None,
            index: index.to_owned(),
            threads: 1,
            spread: Spread::default(),
            password: None,
            max_clients: 10_000,
            idle_seconds: 0,
            unread_seconds: 60,
            keeps_order: true,
            client_memory_bytes: 256 << 20,
            max_request_bytes: 64 << 20,
            max_reply_bytes: 256 << 20,
        }
    }
}

/// Why a gateway does not start.
#[derive(Debug)]
#[non_exhaustive]
pub enum StartError {
    /// Anybody could connect, and nobody would be asked for a password.
    Unprotected(SocketAddr),
    /// It cannot listen there.
    Listen(SocketAddr, std::io::Error),
    /// It cannot get what it needs of the system.
    System(std::io::Error),
    /// The pool, or the index, is not to be had.
    Index(IndexError),
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unprotected(at) => write!(
                f,
                "{at} can be reached from other machines: give a password with --password-file, or listen on 127.0.0.1"
            ),
            Self::Listen(at, error) => write!(f, "cannot listen on {at}: {error}"),
            Self::System(error) => write!(f, "cannot start: {error}"),
            Self::Index(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for StartError {}

impl From<IndexError> for StartError {
    fn from(error: IndexError) -> Self {
        Self::Index(error)
    }
}
