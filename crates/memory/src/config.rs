//! Sizes and limits of a memory server, checked once so that the rest of the crate may rely on them.

use crate::layout::PAGE_BYTES;
use crate::seal::Secret;
use farwood_fabric::addr::ServerId;
use farwood_fabric::clock::{Nanos, SECOND};
use farwood_fabric::control::MAIN_BASE;
use farwood_fabric::region::PoolId;
use farwood_fabric::server::StartError;

/// Mistakes of the coordinator. They test the tests.
#[expect(clippy::struct_excessive_bools, reason = "each is a mistake of its own")]
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Mistakes {
    /// A session may adopt another whose adopter is not fenced.
    pub adopters_not_chained: bool,
    /// Flushes wait for a dead session until it is fenced, not until somebody has cleaned up after it.
    pub flush_before_adoption: bool,
    /// A server that comes back on its memory takes the sessions that it finds for dead.
    pub restart_ends_sessions: bool,
    /// A server that comes back on its memory forgets what its sessions had pinned.
    pub restart_forgets_pins: bool,
}

/// How a memory server is set up. All but `any_pool`, `lease_ns`, `cores`, `queue`, `max_long`, `ends_sessions`, `secret` and `mistakes` is the *shape* of its
/// memory: a restart on the same memory must say the same.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ServerConfig {
    /// The pool it belongs to.
    pub pool: PoolId,
    /// Whether memory that is taken over may be another pool's, to which the server then belongs.
    pub any_pool: bool,
    /// Its logical number there; number 0 is the coordinator.
    pub server: ServerId,
    /// How many servers the pool has.
    pub servers: u16,
    /// The incarnation that freshly formatted memory gets. Zeroed memory does not know how often it was lost, so
    /// whoever starts the server has to raise this; memory that is taken over keeps its own.
    pub incarnation: u32,
    /// Bytes of main memory to hand out, besides one reserved page; what is no whole chunk stays unused.
    pub memory_bytes: u64,
    /// Size of a chunk: a multiple of 4096.
    pub chunk_bytes: u64,
    /// Size of lock memory.
    pub lock_bytes: u64,
    /// How many sessions there can be at a time.
    pub max_sessions: u16,
    /// How many indexes there can be at a time.
    pub max_indexes: u16,
    /// How long a session lives without a heartbeat; 0: for ever.
    pub lease_ns: Nanos,
    /// How many short procedures run at a time.
    pub cores: usize,
    /// How many procedures of each weight may wait.
    pub queue: usize,
    /// How many long procedures run at a time, beside the short ones.
    pub max_long: usize,
    /// Whether a server that comes back on its memory ends the sessions that it finds, because verbs of theirs may still land that the earlier
    /// process had let in: a device may be carrying them out.
    pub ends_sessions: bool,
    /// What all servers of the pool know, and clients do not: by it they believe what clients bring from the coordinator.
    pub secret: Secret,
    /// Mistakes, for tests of the tests.
    pub mistakes: Mistakes,
}

/// More than this a packed address cannot reach.
const MAX_MAIN_BYTES: u64 = 1 << 42;

/// The usual size of chunks: the smallest pools have small ones too, so that there are enough of them for objects of many sizes.
fn chunk_bytes_for(memory_bytes: u64) -> u64 {
    (memory_bytes / 256).next_power_of_two().clamp(2 << 20, 8 << 20)
}

impl ServerConfig {
    /// The usual limits for `memory_bytes` of main memory.
    pub fn new(pool: PoolId, server: ServerId, servers: u16, memory_bytes: u64) -> Self {
        Self {
            pool,
            any_pool: false,
            server,
            servers,
            incarnation: 1,
            memory_bytes,
            chunk_bytes: chunk_bytes_for(memory_bytes),
            lock_bytes: 256 << 10,
            max_sessions: 256,
            max_indexes: 64,
            lease_ns: 10 * SECOND,
            cores: 1,
            queue: 64,
            max_long: 1,
            secret: Secret::from_bytes(&pool.0.to_le_bytes()),
            ends_sessions: false,
            mistakes: Mistakes::default(),
        }
    }

    /// Limits so small that a test runs into all of them: 4 KiB chunks, 4 sessions, 3 indexes, a queue of 2, and a
    /// lease of 1000 ns.
    pub fn tiny(server: ServerId, servers: u16, chunks: u32) -> Self {
        Self {
            chunk_bytes: PAGE_BYTES,
            lock_bytes: 512,
            max_sessions: 4,
            max_indexes: 3,
            lease_ns: 1000,
            queue: 2,
            ..Self::new(PoolId(0xfa2), server, servers, u64::from(chunks) * PAGE_BYTES)
        }
    }

    /// How many chunks there are; 0 if that is too many to count, which [`ServerConfig::validate`] refuses.
    pub fn chunks(&self) -> u32 {
        u32::try_from(self.memory_bytes.checked_div(self.chunk_bytes).unwrap_or(0)).unwrap_or(0)
    }

    /// Length of main memory: the reserved page and the chunks.
    pub fn main_bytes(&self) -> u64 {
        MAIN_BASE + u64::from(self.chunks()) * self.chunk_bytes
    }

    /// Whether this server keeps the sessions, epochs and catalog of the pool.
    pub fn is_coordinator(&self) -> bool {
        self.server == ServerId::COORDINATOR
    }

    /// Whether the sizes work out.
    pub fn validate(&self) -> Result<(), StartError> {
        match self.fault() {
            Some(why) => Err(StartError::Config(why)),
            None => Ok(()),
        }
    }

    fn fault(&self) -> Option<String> {
        let limits = [
            (self.servers == 0 || self.servers > ServerId::MAX + 1, "a pool has 1 to 4096 servers"),
            (self.server.get() >= self.servers, "the server's number must be below the number of servers"),
            (self.incarnation == 0, "incarnations count from 1"),
            (
                self.chunk_bytes == 0 || self.chunk_bytes % PAGE_BYTES != 0,
                "the chunk size must be a multiple of 4096 bytes",
            ),
            (self.memory_bytes < self.chunk_bytes, "the memory must hold at least one chunk"),
            (
                self.memory_bytes > MAX_MAIN_BYTES - MAIN_BASE,
                "a server has at most 4 TiB less a page; use more servers",
            ),
            (self.lock_bytes == 0 || self.lock_bytes % 8 != 0, "lock memory must be a multiple of 8 bytes"),
            (self.max_sessions == 0 || self.max_sessions == u16::MAX, "there can be 1 to 61439 sessions"),
            (self.max_indexes == 0, "there must be room for at least one index"),
            (self.cores == 0, "procedures need at least one core"),
            (self.max_long == 0, "at least one long procedure must be able to run"),
        ];
        limits.iter().find(|(broken, _)| *broken).map(|(_, why)| {
            format!(
                "{why} (server {} of {}, memory {} B, chunk {} B, lock memory {} B, {} sessions, {} indexes, {} cores)",
                self.server,
                self.servers,
                self.memory_bytes,
                self.chunk_bytes,
                self.lock_bytes,
                self.max_sessions,
                self.max_indexes,
                self.cores
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usual_and_tiny_limits_are_valid() {
        assert_eq!(ServerConfig::new(PoolId(1), ServerId::new(0), 1, 1 << 30).validate(), Ok(()));
        let tiny = ServerConfig::tiny(ServerId::new(1), 2, 5);
        assert_eq!((tiny.validate(), tiny.chunks(), tiny.main_bytes()), (Ok(()), 5, 6 * 4096));
    }

    #[test]
    fn each_limit_is_checked() {
        let base = ServerConfig::tiny(ServerId::new(0), 1, 4);
        let broken = [
            ServerConfig { servers: 0, ..base.clone() },
            ServerConfig { servers: 4097, ..base.clone() },
            ServerConfig { server: ServerId::new(1), ..base.clone() },
            ServerConfig { incarnation: 0, ..base.clone() },
            ServerConfig { chunk_bytes: 0, ..base.clone() },
            ServerConfig { chunk_bytes: 4104, ..base.clone() },
            ServerConfig { memory_bytes: 4095, ..base.clone() },
            ServerConfig { memory_bytes: 1 << 42, ..base.clone() },
            ServerConfig { memory_bytes: u64::MAX, ..base.clone() },
            ServerConfig { lock_bytes: 12, ..base.clone() },
            ServerConfig { max_sessions: 0, ..base.clone() },
            ServerConfig { max_sessions: u16::MAX, ..base.clone() },
            ServerConfig { max_indexes: 0, ..base.clone() },
            ServerConfig { cores: 0, ..base.clone() },
            ServerConfig { max_long: 0, ..base },
        ];
        for config in broken {
            assert!(matches!(config.validate(), Err(StartError::Config(_))), "{config:?}");
        }
    }
}
