//! What is wrong with an answer, for people.

use super::counters::Kind;
use farwood_sim::history::Bytes;
use std::fmt;

/// Values that would have been allowed, of which a message names so many.
const SHOWN_VALUES: usize = 8;

/// What an answer says that the key held; `None` is "nothing".
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Seen<T> {
    /// Just this.
    Is(Option<T>),
    /// Some value.
    Present,
    /// Anything but this.
    Not(Option<T>),
}

impl Seen<&[u8]> {
    /// Whether a key that holds `held` fits.
    pub(super) fn admits(self, held: Option<&[u8]>) -> bool {
        match self {
            Self::Is(value) => held == value,
            Self::Present => held.is_some(),
            Self::Not(value) => held != value,
        }
    }

    fn to_owned(self) -> Seen<Vec<u8>> {
        match self {
            Self::Is(value) => Seen::Is(value.map(<[u8]>::to_vec)),
            Self::Present => Seen::Present,
            Self::Not(value) => Seen::Not(value.map(<[u8]>::to_vec)),
        }
    }
}

/// An answer that a correct index cannot have given.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub(crate) enum Violation {
    /// The key held no such thing while the operation was under way.
    Impossible {
        /// Which operation says so.
        kind: Kind,
        /// The key.
        key: Vec<u8>,
        /// What it held, by the answer.
        seen: Seen<Vec<u8>>,
        /// What it may have held: some of it.
        allowed: Vec<Option<Vec<u8>>>,
        /// How much more.
        allowed_more: usize,
    },
    /// The operation says that it wrote nothing, yet what it would have written was found.
    Undone {
        /// The key.
        key: Vec<u8>,
        /// What was found; `None` is "nothing".
        value: Option<Vec<u8>>,
    },
    /// A scan returned more pairs than its limit.
    TooMany {
        /// How many.
        pairs: usize,
        /// The limit.
        limit: usize,
    },
    /// A scan returned a key that is not in its range.
    OutOfBounds {
        /// The key.
        key: Vec<u8>,
    },
    /// A scan returned a key twice.
    Repeated {
        /// The key.
        key: Vec<u8>,
    },
    /// A scan returned a key behind one that belongs behind it.
    OutOfOrder {
        /// The key.
        key: Vec<u8>,
        /// The one before it.
        after: Vec<u8>,
    },
}

impl Violation {
    pub(super) fn impossible(
        kind: Kind,
        key: &[u8],
        seen: Seen<&[u8]>,
        mut allowed: Vec<Option<Vec<u8>>>,
    ) -> Self {
        let allowed_more = allowed.len().saturating_sub(SHOWN_VALUES);
        allowed.truncate(SHOWN_VALUES);
        Self::Impossible { kind, key: key.to_vec(), seen: seen.to_owned(), allowed, allowed_more }
    }
}

/// A value or nothing.
struct Held<'a>(Option<&'a Vec<u8>>);

impl fmt::Display for Held<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(value) => Bytes(value).fmt(f),
            None => f.write_str("nothing"),
        }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Impossible { kind, key, seen, allowed, allowed_more } => {
                write!(f, "{kind}: key {} cannot have held ", Bytes(key))?;
                match seen {
                    Seen::Is(value) => Held(value.as_ref()).fmt(f)?,
                    Seen::Present => f.write_str("a value")?,
                    Seen::Not(value) => write!(f, "anything but {}", Held(value.as_ref()))?,
                }
                for (place, value) in allowed.iter().enumerate() {
                    let before = if place == 0 { "; it may have held" } else { " or" };
                    write!(f, "{before} {}", Held(value.as_ref()))?;
                }
                if *allowed_more > 0 {
                    write!(f, " or {allowed_more} more")?;
                }
                if allowed.is_empty() {
                    f.write_str("; all that it held was replaced by others")?;
                }
                Ok(())
            }
            Self::Undone { key, value } => write!(
                f,
                "key {} was found with {} by another operation, but the one that would have made it so says it did not",
                Bytes(key),
                Held(value.as_ref())
            ),
            Self::TooMany { pairs, limit } => write!(f, "scan: {pairs} pairs, though the limit was {limit}"),
            Self::OutOfBounds { key } => write!(f, "scan: key {} is not in the range", Bytes(key)),
            Self::Repeated { key } => write!(f, "scan: key {} comes twice", Bytes(key)),
            Self::OutOfOrder { key, after } => {
                write!(f, "scan: key {} comes behind {}", Bytes(key), Bytes(after))
            }
        }
    }
}

impl std::error::Error for Violation {}
