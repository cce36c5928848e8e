//! Which of the existing keys an operation is about.
//!
//! **Positions.** A client knows `known` keys: those that were loaded and those it inserted itself, in that order. A chooser
//! draws a position among them.
//!
//! - `uniform`: all known keys alike.
//! - `zipfian:THETA`: Zipf's law over the *loaded* keys. Ranks are shuffled over the keys by a [`Permutation`], so that popular
//!   keys are not neighbours and each key has exactly the probability of its one rank. Keys that were inserted later have no
//!   rank: which keys are popular must not change while keys are added.
//! - `zipfian:THETA@RANKS`: the law is drawn over RANKS ranks, say the 10^9 keys of a paper, and folded onto the fewer keys
//!   that are loaded: rank r stands for key r modulo the number of keys (then shuffled). The hottest key is then as hot as in
//!   the paper, which matters where clients contend for it; over 10^6 ranks instead of 10^9 it would be one and a half times
//!   as hot. With fewer ranks than keys, only so many keys are ever chosen. YCSB's scrambled Zipfian is of this kind: it draws
//!   over 10^10 ranks whatever the number of keys, and folds by a hash (FNV) modulo that number, under which two hot ranks may
//!   meet on one key; here the ranks below the number of keys do not.
//! - `latest:THETA`: Zipf's law over the known keys from the newest to the oldest, THETA 0.99 if not given. Each client
//!   counts its own insertions as the newest, then the loaded keys from the last to the first.
//! - `sequential`: the loaded keys in order, clients in turn: client c of n takes c, c + n, c + 2n, ..., and starts again.

use crate::random::{Permutation, Random};
use crate::text::{BadText, parse_count, write_count};
use crate::zipf::{MAX_COUNT, MAX_THETA, Zipf};
use std::fmt;
use std::str::FromStr;

/// The skew of YCSB.
pub const DEFAULT_THETA: f64 = 0.99;

/// A way of choosing keys, as data.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Chooser {
    /// All alike.
    Uniform,
    /// By Zipf's law, popular keys scattered.
    Zipfian {
        /// The exponent, 0 or more; 0 is uniform.
        theta: f64,
        /// Over how many ranks, if not as many as keys.
        ranks: Option<u64>,
    },
    /// By Zipf's law, the newest most popular.
    Latest {
        /// The exponent.
        theta: f64,
    },
    /// One after the other.
    Sequential,
}

impl FromStr for Chooser {
    type Err = BadText;

    fn from_str(text: &str) -> Result<Self, BadText> {
        let bad = || BadText::Chooser(text.to_owned());
        let theta =
            |text: &str| text.parse().ok().filter(|theta| (0.0..=MAX_THETA).contains(theta)).ok_or_else(bad);
        let (name, rest) = text.split_once(':').map_or((text, None), |(name, rest)| (name, Some(rest)));
        match (name, rest) {
            ("uniform", None) => Ok(Self::Uniform),
            ("sequential", None) => Ok(Self::Sequential),
            ("latest", None) => Ok(Self::Latest { theta: DEFAULT_THETA }),
            ("latest", Some(rest)) => Ok(Self::Latest { theta: theta(rest)? }),
            ("zipfian", Some(rest)) => match rest.split_once('@') {
                None => Ok(Self::Zipfian { theta: theta(rest)?, ranks: None }),
                Some((exponent, ranks)) => {
                    let ranks =
                        parse_count(ranks).filter(|ranks| (1..=MAX_COUNT).contains(ranks)).ok_or_else(bad)?;
                    Ok(Self::Zipfian { theta: theta(exponent)?, ranks: Some(ranks) })
                }
            },
            _ => Err(bad()),
        }
    }
}

impl fmt::Display for Chooser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Uniform => f.write_str("uniform"),
            Self::Sequential => f.write_str("sequential"),
            Self::Latest { theta: DEFAULT_THETA } => f.write_str("latest"),
            Self::Latest { theta } => write!(f, "latest:{theta}"),
            Self::Zipfian { theta, ranks } => {
                write!(f, "zipfian:{theta}")?;
                ranks.map_or(Ok(()), |ranks| {
                    f.write_str("@")?;
                    write_count(f, ranks)
                })
            }
        }
    }
}

/// A chooser at work for one client.
#[derive(Clone, Debug)]
pub(crate) enum Sampler {
    Uniform,
    Zipfian { zipf: Zipf, keys: u64, shuffle: Permutation },
    Latest { zipf: Zipf },
    Sequential { keys: u64, first: u64, step: u64, next: u64 },
}

impl Sampler {
    /// For `keys` loaded keys, at least one. The seed decides which keys are popular and is the same for all clients.
    /// `None` if theta or ranks are out of range.
    pub(crate) fn new(chooser: Chooser, keys: u64, seed: u64, client: u64, clients: u64) -> Option<Self> {
        Some(match chooser {
            Chooser::Uniform => Self::Uniform,
            Chooser::Zipfian { theta, ranks } => Self::Zipfian {
                zipf: Zipf::new(theta, ranks.unwrap_or(keys))?,
                keys,
                shuffle: Permutation::new(keys, seed),
            },
            Chooser::Latest { theta } => Self::Latest { zipf: Zipf::new(theta, keys)? },
            Chooser::Sequential => {
                Self::Sequential { keys, first: client % keys, step: clients, next: client % keys }
            }
        })
    }

    /// A position below `known`, which is at least the number of loaded keys and never shrinks.
    #[inline]
    pub(crate) fn draw(&mut self, random: &mut Random, known: u64) -> u64 {
        match self {
            Self::Uniform => random.below(known),
            Self::Zipfian { zipf, keys, shuffle } => {
                let rank = zipf.draw(random) - 1;
                shuffle.apply(if rank < *keys { rank } else { rank % *keys })
            }
            Self::Latest { zipf } => {
                if zipf.count() != known {
                    zipf.set_count(known);
                }
                known - zipf.draw(random)
            }
            Self::Sequential { keys, first, step, next } => {
                let at = *next;
                *next = at.checked_add(*step).filter(|next| next < keys).unwrap_or(*first);
                at
            }
        }
    }
}
