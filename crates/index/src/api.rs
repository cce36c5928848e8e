//! What every index offers: the operations, and the ways in which they can fail.

use farwood_fabric::control::ControlError;
use farwood_fabric::{FabricError, SessionId};
use std::fmt;
use std::ops::Bound;

/// A key and its value.
pub type KeyValue = (Vec<u8>, Vec<u8>);

/// How long keys and values may be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// The longest key.
    pub key_bytes: usize,
    /// The longest value.
    pub value_bytes: usize,
    /// The most bytes that a key and its value may have together.
    pub pair_bytes: usize,
}

impl Limits {
    /// None at all.
    pub const NONE: Self = Self { key_bytes: usize::MAX, value_bytes: usize::MAX, pair_bytes: usize::MAX };
}

/// Why an operation has no result.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum IndexError {
    /// The operation may have happened, or may yet: if it began to write before the way to a server failed, it is carried out as soon as the
    /// server is reached again, before anybody else changes the key. A read may still find what was there before.
    Unknown,
    /// This session is fenced; whether the operation happened is unknown. Open a new session, or connect a new client.
    Fenced,
    /// The key cannot be stored in this index.
    BadKey {
        /// Why not.
        why: String,
    },
    /// The value cannot be stored in this index.
    BadValue {
        /// Why not.
        why: String,
    },
    /// The index cannot be made, or opened, with these settings.
    BadConfig {
        /// Why not.
        why: String,
    },
    /// No memory is left. The operation did not happen.
    PoolFull(ControlError),
    /// The index is being dropped, or is gone. The operation did not happen.
    Dropped,
    /// This session leaves the pool, or has left. The operation did not happen.
    Closed,
    /// The operation was retried as often as allowed. It did not happen.
    Contended {
        /// What it did not get.
        what: &'static str,
        /// How often it tried.
        attempts: u32,
    },
    /// Far memory does not hold what it must hold.
    Corrupt {
        /// What was found.
        what: String,
    },
    /// A check found something wrong, and sessions are dead that may have left it so and are not recovered yet.
    Unrecovered {
        /// The dead.
        sessions: Vec<SessionId>,
        /// What was found.
        what: String,
    },
    /// The memory servers, or the way to them, failed. The operation did not happen.
    Fabric(FabricError),
}

impl IndexError {
    /// Whether the operation may have happened.
    pub fn is_unknown(&self) -> bool {
        match self {
            Self::Unknown | Self::Fenced => true,
            Self::Fabric(error) => error.is_unknown(),
            _ => false,
        }
    }
}

impl fmt::Display for IndexError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown => {
                f.write_str("the operation may or may not have happened; read before repeating it")
            }
            Self::Fenced => f.write_str(
                "this session was fenced; open a new one (or a new client), and read before repeating the operation",
            ),
            Self::BadKey { why } => write!(f, "this index cannot store the key: {why}"),
            Self::BadValue { why } => write!(f, "this index cannot store the value: {why}"),
            Self::BadConfig { why } => write!(f, "the index cannot have these settings: {why}"),
            Self::PoolFull(error) => error.fmt(f),
            Self::Dropped => f.write_str("the index was dropped"),
            Self::Closed => f.write_str("this session has left the pool; open a new one"),
            Self::Contended { what, attempts } => {
                write!(f, "did not get {what} in {attempts} attempts; try again later")
            }
            Self::Corrupt { what } => write!(f, "far memory is damaged: {what}; run a check of the index"),
            Self::Unrecovered { sessions, what } => {
                let names: Vec<_> = sessions.iter().map(ToString::to_string).collect();
                write!(
                    f,
                    "not known to be whole: dead and not recovered yet: {}; that may be why {what}; check again later",
                    names.join(", ")
                )
            }
            // Who uses an index has no connection to see to.
            Self::Fabric(FabricError::Disconnected { server }) => {
                write!(f, "the connection to server {server} is down; the operation did not happen, try again later")
            }
            Self::Fabric(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for IndexError {}

impl From<FabricError> for IndexError {
    fn from(error: FabricError) -> Self {
        match error {
            FabricError::Fenced { .. } => Self::Fenced,
            error if error.is_unknown() => Self::Unknown,
            error => match error.control() {
                Some(full @ ControlError::PoolFull { .. }) => Self::PoolFull(full.clone()),
                Some(ControlError::SessionFenced { .. }) => Self::Fenced,
                _ => Self::Fabric(error),
            },
        }
    }
}

/// An ordered map in far memory, as one endpoint sees it. Point operations are linearizable; a scan returns, in order and
/// once, every key that was present throughout, and no pair that never was.
///
/// **Cancellation.** The future of an operation may be dropped at any time, as by a time-out or `select!`. The operation may then have
/// happened, or happens a moment later, or does not; read before repeating it. Nothing stays locked and nothing leaks: what it held is
/// settled by a task on the endpoint's executor, which therefore has to be run on. If the executor ends first, or the servers are not
/// to be reached for several leases, the session condemns itself: its operations fail with [`IndexError::Fenced`], and others recover
/// it as if it had died. Dropping the future of a read costs nothing.
pub trait OrderedIndex {
    /// How long keys and values may be. What is longer is refused with [`IndexError::BadKey`] or [`IndexError::BadValue`].
    fn limits(&self) -> Limits {
        Limits::NONE
    }

    /// The value of a key.
    fn get(&self, key: &[u8]) -> impl Future<Output = Result<Option<Vec<u8>>, IndexError>>;

    /// Sets the value of a key.
    fn put(&self, key: &[u8], value: &[u8]) -> impl Future<Output = Result<(), IndexError>>;

    /// If the key holds `expected` (`None`: nothing), lets it hold `new` (`None`: nothing). Whether it did.
    fn compare_and_swap(
        &self,
        key: &[u8],
        expected: Option<&[u8]>,
        new: Option<&[u8]>,
    ) -> impl Future<Output = Result<bool, IndexError>>;

    /// The same of a key that is there, for a change of a few bytes at the end of the value that has to work when no memory is left: an
    /// engine may keep room for it behind every value, which nothing else uses.
    fn adjust(
        &self,
        key: &[u8],
        expected: &[u8],
        new: &[u8],
    ) -> impl Future<Output = Result<bool, IndexError>> {
        self.compare_and_swap(key, Some(expected), Some(new))
    }

    /// Sets the value of a key that is absent. Whether it was.
    fn put_if_absent(&self, key: &[u8], value: &[u8]) -> impl Future<Output = Result<bool, IndexError>>;

    /// Sets the value of a key that is present. Whether it was.
    fn update_if_present(&self, key: &[u8], value: &[u8]) -> impl Future<Output = Result<bool, IndexError>>;

    /// Removes a key. Whether it was there.
    fn delete(&self, key: &[u8]) -> impl Future<Output = Result<bool, IndexError>>;

    /// Up to `limit` pairs between two bounds, from the lower end, or from the upper if `reverse`.
    fn scan(
        &self,
        start: Bound<&[u8]>,
        end: Bound<&[u8]>,
        limit: usize,
        reverse: bool,
    ) -> impl Future<Output = Result<Vec<KeyValue>, IndexError>>;

    /// The same, but hands each pair to `each`, in order, until that says that it wants no more, and says how many there were: an engine
    /// can spare the copies that way. If it fails, some may have been handed out.
    fn scan_with(
        &self,
        start: Bound<&[u8]>,
        end: Bound<&[u8]>,
        limit: usize,
        reverse: bool,
        each: &mut dyn FnMut(&[u8], &[u8]) -> bool,
    ) -> impl Future<Output = Result<usize, IndexError>> {
        async move {
            let pairs = self.scan(start, end, limit, reverse).await?;
            let refused = pairs.iter().position(|(key, value)| !each(key, value));
            Ok(refused.map_or(pairs.len(), |last| last + 1))
        }
    }

    /// The same, but hands out only the last `end_bytes` of each value, and these unchecked: they may be torn, of two values that the key
    /// had meanwhile. For whoever goes through many pairs to find the few that are to be read: an engine need not read the rest.
    fn scan_ends(
        &self,
        (start, end): (Bound<&[u8]>, Bound<&[u8]>),
        limit: usize,
        reverse: bool,
        end_bytes: usize,
        each: &mut dyn FnMut(&[u8], &[u8]) -> bool,
    ) -> impl Future<Output = Result<usize, IndexError>> {
        async move {
            let mut cut =
                |key: &[u8], value: &[u8]| each(key, &value[value.len() - value.len().min(end_bytes)..]);
            self.scan_with(start, end, limit, reverse, &mut cut).await
        }
    }
}
