//! The operations of one client, one after the other: an iterator, the same for the same workload, options and client,
//! however fast the other clients are. (Zipf's law is drawn with the machine's logarithm and exponential: where their last bit
//! differs, one rank in a million or so may be its neighbour.)
//!
//! **Keys are numbers here**; a [`crate::KeySet`] turns a number into bytes. The keys 0 to `keys` - 1 are those that were
//! loaded.
//!
//! **New keys.** Clients share no counter, or a stream would depend on the speed of the others: client c of n inserts the keys
//! `insert_from` + c, + c + n, + c + 2n and so on. No two clients insert the same key. For the same reason a client reads, of the
//! keys that were inserted, only its own: it knows that these are there. (In YCSB clients share the counter, so that under
//! `latest` they read each other's newest keys.)
//!
//! **Deleted keys** are not remembered: a later operation may choose one and find nothing.
//!
//! **Ends.** A workload that loads an empty index by insertion (`load`) ends when the client has inserted its part of the
//! `keys` keys; every other stream is endless.

use crate::chooser::{Chooser, Sampler};
use crate::mix::{Mix, OperationKind};
use crate::random::Random;
use crate::workload::{Start, Workload};
use crate::zipf::MAX_COUNT;
use std::fmt;

/// One operation, on keys that are numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Operation {
    /// Read this key.
    Get(u64),
    /// Set this key, whether it is there or not.
    Put(u64),
    /// Set this key, which was never there.
    Insert(u64),
    /// Remove this key.
    Delete(u64),
    /// Read up to `limit` keys in ascending order, from `start` on. Order is that of the keys' bytes.
    Scan {
        /// The first key, if it is there.
        start: u64,
        /// How many keys.
        limit: u32,
    },
    /// Read up to `limit` keys, on from where this client's last `Iterate` ended; the first one, and one after the end, from
    /// the smallest key.
    Iterate {
        /// How many keys.
        limit: u32,
    },
    /// Read this key, then set it.
    ReadModifyWrite(u64),
    /// Read this key, then set it if it still holds what was read.
    CompareAndSwap(u64),
}

impl Operation {
    /// What it does.
    pub const fn kind(self) -> OperationKind {
        match self {
            Self::Get(_) => OperationKind::Get,
            Self::Put(_) => OperationKind::Put,
            Self::Insert(_) => OperationKind::Insert,
            Self::Delete(_) => OperationKind::Delete,
            Self::Scan { .. } => OperationKind::Scan,
            Self::Iterate { .. } => OperationKind::Iterate,
            Self::ReadModifyWrite(_) => OperationKind::ReadModifyWrite,
            Self::CompareAndSwap(_) => OperationKind::CompareAndSwap,
        }
    }

    /// The key it is about, or starts from.
    pub const fn key(self) -> Option<u64> {
        match self {
            Self::Get(key)
            | Self::Put(key)
            | Self::Insert(key)
            | Self::Delete(key)
            | Self::Scan { start: key, .. }
            | Self::ReadModifyWrite(key)
            | Self::CompareAndSwap(key) => Some(key),
            Self::Iterate { .. } => None,
        }
    }
}

/// What a stream is made from, beside its workload.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct StreamOptions {
    /// How many keys are loaded, or are to be loaded by a workload that starts from nothing.
    pub keys: u64,
    /// How keys are chosen, if not as the workload says.
    pub chooser: Option<Chooser>,
    /// Decides everything that is random; the same for all clients.
    pub seed: u64,
    /// Which client, below `clients`.
    pub client: u64,
    /// How many clients there are.
    pub clients: u64,
    /// Where new keys begin, if not after the loaded ones: beyond all keys that an earlier run inserted.
    pub insert_from: Option<u64>,
}

impl StreamOptions {
    /// One client on so many keys, with seed 0 and what the workload says.
    pub const fn new(keys: u64) -> Self {
        Self { keys, chooser: None, seed: 0, client: 0, clients: 1, insert_from: None }
    }
}

/// Why there is no such stream.
#[derive(Clone, Copy, PartialEq, Debug)]
#[non_exhaustive]
pub enum StreamError {
    /// The workload chooses among existing keys, and there are none, or more than can be counted.
    Keys(u64),
    /// No such client.
    Client {
        /// Which.
        client: u64,
        /// Of how many.
        clients: u64,
    },
    /// Fewer clients than the workload has parts for.
    TooFewClients {
        /// How many there are.
        clients: u64,
        /// How many it takes.
        roles: usize,
    },
    /// An exponent or a number of ranks that no chooser can have.
    Chooser(Chooser),
    /// New keys would meet the loaded ones.
    InsertFrom {
        /// Where new keys were to begin.
        insert_from: u64,
        /// How many are loaded.
        keys: u64,
    },
}

impl fmt::Display for StreamError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Keys(keys) => write!(f, "{keys} keys: load at least 1, at most {MAX_COUNT}"),
            Self::Client { client, clients } => {
                write!(f, "client {client} of {clients}: count clients from 0, and have at least one")
            }
            Self::TooFewClients { clients, roles } => {
                write!(
                    f,
                    "clients of this workload take {roles} mixes in turn: have at least {roles}, not {clients}"
                )
            }
            Self::Chooser(chooser) => write!(f, "{chooser}: exponent or number of ranks out of range"),
            Self::InsertFrom { insert_from, keys } => {
                write!(
                    f,
                    "new keys from {insert_from} would be among the {keys} loaded ones: begin at {keys} or later"
                )
            }
        }
    }
}

impl std::error::Error for StreamError {}

/// The operations of one client.
#[derive(Clone, Debug)]
pub struct Stream {
    mix: Mix,
    sampler: Sampler,
    random: Random,
    /// Keys that were there when the stream began, and that a chooser may draw.
    keys: u64,
    /// The first key that this client inserts, and the distance to the next.
    insert_first: u64,
    insert_step: u64,
    inserted: u64,
    /// How many it inserts at most.
    insert_limit: u64,
    issued: u64,
    client: u64,
}

impl Stream {
    /// The operations of one client of a workload.
    pub fn new(workload: &Workload, options: &StreamOptions) -> Result<Self, StreamError> {
        let StreamOptions { keys, seed, client, clients, .. } = *options;
        let roles = workload.roles();
        if client >= clients {
            return Err(StreamError::Client { client, clients });
        }
        if clients < roles.len() as u64 {
            return Err(StreamError::TooFewClients { clients, roles: roles.len() });
        }
        if !(1..=MAX_COUNT).contains(&keys) {
            return Err(StreamError::Keys(keys));
        }
        // Fewer roles than clients: the remainder fits any integer.
        let role = usize::try_from(client % roles.len() as u64).unwrap_or(0);
        let mix = roles[role].clone();
        let chooser = options.chooser.unwrap_or(workload.chooser());
        let sampler =
            Sampler::new(chooser, keys, seed, client, clients).ok_or(StreamError::Chooser(chooser))?;
        let loads = workload.start() == Start::Empty;
        let insert_from = if loads { 0 } else { options.insert_from.unwrap_or(keys) };
        if !loads && insert_from < keys {
            return Err(StreamError::InsertFrom { insert_from, keys });
        }
        // Of 0..keys, every `clients`-th from `client` on.
        let insert_limit = if loads { keys.saturating_sub(client).div_ceil(clients) } else { u64::MAX };
        Ok(Self {
            mix,
            sampler,
            random: Random::new(seed, client),
            keys,
            insert_first: insert_from + client,
            insert_step: clients,
            inserted: 0,
            insert_limit,
            issued: 0,
            client,
        })
    }

    /// The number of the `nth` key that this client inserts.
    fn inserted_key(&self, nth: u64) -> u64 {
        self.insert_first + nth * self.insert_step
    }

    /// A key that is there: one of the loaded ones, or one that this client inserted.
    #[inline]
    fn existing(&mut self) -> u64 {
        let position = self.sampler.draw(&mut self.random, self.keys + self.inserted);
        if position < self.keys { position } else { self.inserted_key(position - self.keys) }
    }

    /// How many operations it has yielded.
    pub fn issued(&self) -> u64 {
        self.issued
    }

    /// How many new keys it has yielded.
    pub fn inserted(&self) -> u64 {
        self.inserted
    }

    /// A number for the value that the last operation writes: above 0, which is left to loaded values, and different for
    /// every operation of every client of the run.
    pub fn version(&self) -> u64 {
        1 + self.client + self.issued.saturating_sub(1) * self.insert_step
    }
}

impl Iterator for Stream {
    type Item = Operation;

    #[inline]
    fn next(&mut self) -> Option<Operation> {
        let share = self.mix.draw(&mut self.random);
        let operation = match share.kind() {
            OperationKind::Insert => {
                if self.inserted == self.insert_limit {
                    return None;
                }
                self.inserted += 1;
                Operation::Insert(self.inserted_key(self.inserted - 1))
            }
            OperationKind::Get => Operation::Get(self.existing()),
            OperationKind::Put => Operation::Put(self.existing()),
            OperationKind::Delete => Operation::Delete(self.existing()),
            OperationKind::ReadModifyWrite => Operation::ReadModifyWrite(self.existing()),
            OperationKind::CompareAndSwap => Operation::CompareAndSwap(self.existing()),
            OperationKind::Scan => {
                Operation::Scan { start: self.existing(), limit: share.length().draw(&mut self.random) }
            }
            OperationKind::Iterate => Operation::Iterate { limit: share.length().draw(&mut self.random) },
        };
        self.issued += 1;
        Some(operation)
    }
}
