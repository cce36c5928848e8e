//! Where everything is in the server's own regions, and which word commits it. Pure, but for the helpers that move
//! runs of words.
//!
//! ```text
//! MAIN    +0     reserved page: never handed out, so address 0 can mean "none"
//!         +4096  chunk 0, chunk 1, ...
//! META    +0     superblock (one page)
//!         +4096  session table   32 B an entry
//!                catalog         640 B an entry
//!                chunk table     32 B an entry
//! BOARD   +0     anchors         ANCHOR_BYTES an index (catalog slot)
//!                journals        JOURNAL_BYTES a session (session slot)
//!
//! superblock
//! +0   magic            8 B   "FARWOOD\0"; the commit word of formatting: stored last
//! +8   format           4 B   | server 2 B | servers 2 B
//! +16  pool            16 B
//! +32  incarnation      4 B   | max_sessions 2 B | max_indexes 2 B
//! +40  chunk_bytes      8 B
//! +48  chunks           8 B
//! +56  lock_bytes       8 B
//! +64  next index id    8 B   stored behind the entry that has the id, which counts if a crash came between; on other servers, the
//!                             highest that a seal of the coordinator's has said
//! +72  epoch            8 B   \ grow; stored before anybody is told
//! +80  flush generation 8 B   /
//! +88  next session     8 B   the slot where the search for a free number begins
//! +96  next term        8 B   stored before the entry that has the term: a crash skips terms, never repeats one
//! +104 coordinator      8 B   the incarnation of the coordinator whose sessions come here; 0: none came yet
//! +256 life             8 B   how many server processes have started on this memory; stored before anything else
//! +112 lost below       8 B   (other servers) indexes with lower numbers lost what they had here
//! +2048 torn            8 B   1: the memory was not whole when it was taken over; stays until it is formatted anew
//! +2056 failed, pieces, dropped, set aside, number of indexes, indexes: 8 B each, see `torn`
//!
//! session entry
//! +0   state            1 B   | read only, lost, reaper 1 bit each | adopter 2 B | zero 4 B      <- commit word
//! +8   oldest pin       8 B   \ grow; a crash between them leaves older, that is safer, values
//! +16  flushed          8 B   /
//! +24  term             8 B   of the session; in state free, of the last one known here (0: none); only grows
//!
//! chunk entry: describes the extent that begins at this chunk
//! +0   state            1 B   | zero 1 B | owner 2 B | count 4 B            <- commit word; used, shared, draining are states of their own
//! +8   index            4 B   | class 2 B | tag, high 2 B
//! +16  object_bytes     4 B   | tag, low 4 B        the tag names the call that was given the extent (see `repeats`); 0: none
//! +24  after            8 B   the flush to wait for; meaningful in states freed and draining only. With the highest bit: the number by
//!                             which whoever is going to ask for that flush knows the chunk
//!
//! catalog entry
//! +0   state            1 B   | name length 1 B | engine length 1 B | zero 1 B | index id 4 B   <- commit word
//! +8   config length    8 B
//! +16  drop generation  8 B   meaningful in state dropping; in state creating, the tag of the call that made the entry
//! +24  creator          8 B   the term of the session that makes it; meaningful in state creating only
//! +32  name            64 B
//! +96  engine          32 B
//! +128 config         512 B
//!
//! catalog entry on other servers: the number of an index that may have chunks here, in any order
//! +0   zero            24 B
//! +24  index id         8 B   0: none                                       <- commit word
//! ```
//!
//! **The chunk table and crashes.** An extent is its head's entry alone: the `count` in the head's commit word says
//! how many chunks it covers, and the entries of the others are state 0 and mean nothing while a head covers them.
//! So one store hands out an extent of any length, one store frees it, and one store dissolves it into free chunks:
//! there is no moment at which a crash could leave part of an extent behind, lose a chunk or hand it out twice.

use crate::config::ServerConfig;
use farwood_fabric::addr::{GlobalAddr, RegionId, ServerId};
use farwood_fabric::control::{
    ANCHOR_BYTES, JOURNAL_BYTES, MAIN_BASE, SESSION_ENTRY_BYTES, SESSION_TABLE_AT,
};
use farwood_fabric::region::{Permissions, PoolId, RegionSpec};
use farwood_fabric::server::{ServerMemory, StartError};

/// Version of everything above.
pub const FORMAT_VERSION: u32 = 4;
/// First word of META.
pub const MAGIC: u64 = u64::from_le_bytes(*b"FARWOOD\0");
/// What the big tables are aligned to.
pub const PAGE_BYTES: u64 = 4096;
const _: () = assert!(MAIN_BASE % PAGE_BYTES == 0);
/// Size of the superblock.
pub const SUPERBLOCK_BYTES: u64 = PAGE_BYTES;
const _: () = assert!(SUPERBLOCK_BYTES == SESSION_TABLE_AT, "clients look at sessions there");
/// Size of a chunk's entry.
pub const CHUNK_ENTRY_BYTES: u64 = 32;
/// Size of an index's entry.
pub const CATALOG_ENTRY_BYTES: u64 = 640;
/// Longest name of an index.
pub const MAX_NAME_BYTES: usize = 64;
/// Longest name of an engine.
pub const MAX_ENGINE_BYTES: usize = 32;
/// Longest configuration of an engine.
pub const MAX_CONFIG_BYTES: usize = 512;

/// Words of the superblock.
pub(crate) mod superblock {
    pub(crate) const MAGIC_AT: u64 = 0;
    pub(crate) const IDENTITY_AT: u64 = 8;
    pub(crate) const POOL_LOW_AT: u64 = 16;
    pub(crate) const POOL_HIGH_AT: u64 = 24;
    pub(crate) const SHAPE_AT: u64 = 32;
    pub(crate) const CHUNK_BYTES_AT: u64 = 40;
    pub(crate) const CHUNKS_AT: u64 = 48;
    pub(crate) const LOCK_BYTES_AT: u64 = 56;
    pub(crate) const NEXT_INDEX_AT: u64 = 64;
    pub(crate) const EPOCH_AT: u64 = 72;
    pub(crate) const FLUSH_AT: u64 = 80;
    pub(crate) const NEXT_SLOT_AT: u64 = 88;
    pub(crate) const NEXT_TERM_AT: u64 = 96;
    pub(crate) const COORDINATOR_AT: u64 = 104;
    /// (Other servers) Indexes with numbers below this lost what they had here.
    pub(crate) const LOST_BELOW_AT: u64 = 112;
    const _: () = assert!(LOST_BELOW_AT + 8 <= super::SUPERBLOCK_BYTES);
    /// How many server processes have started on this memory.
    pub(crate) const LIFE_AT: u64 = 256;
    const _: () = assert!(LIFE_AT + 8 <= super::SUPERBLOCK_BYTES);
}

/// Words of the superblock that say what was not whole.
pub(crate) mod torn_mark {
    pub(crate) const IS_TORN_AT: u64 = 2048;
    /// Five words, then the numbers of indexes.
    pub(crate) const FAILED_AT: u64 = 2056;
    /// So many of them are kept.
    pub(crate) const MAX_INDEXES: usize = 64;
    const _: () = assert!(super::superblock::LOST_BELOW_AT + 8 <= IS_TORN_AT);
    const _: () = assert!(FAILED_AT + (5 + MAX_INDEXES as u64) * 8 <= super::SUPERBLOCK_BYTES);
}

/// Words of a session's entry.
pub(crate) mod session_entry {
    pub(crate) const COMMIT_AT: u64 = 0;
    pub(crate) const PIN_AT: u64 = 8;
    pub(crate) const FLUSHED_AT: u64 = 16;
    pub(crate) const TERM_AT: u64 = 24;
    const _: () = assert!(TERM_AT + 8 == super::SESSION_ENTRY_BYTES);
}

/// Words of a chunk's entry.
pub(crate) mod chunk_entry {
    pub(crate) const COMMIT_AT: u64 = 0;
    pub(crate) const KIND_AT: u64 = 8;
    pub(crate) const OBJECT_AT: u64 = 16;
    pub(crate) const AFTER_AT: u64 = 24;
    const _: () = assert!(AFTER_AT + 8 == super::CHUNK_ENTRY_BYTES);
}

/// Parts of an index's entry.
pub(crate) mod catalog_entry {
    use super::{CATALOG_ENTRY_BYTES, MAX_CONFIG_BYTES, MAX_ENGINE_BYTES, MAX_NAME_BYTES};
    pub(crate) const COMMIT_AT: u64 = 0;
    pub(crate) const CONFIG_LENGTH_AT: u64 = 8;
    pub(crate) const DROP_GENERATION_AT: u64 = 16;
    pub(crate) const CREATOR_AT: u64 = 24;
    /// (Other servers) All that there is of an entry.
    pub(crate) const NUMBER_AT: u64 = 24;
    pub(crate) const NAME_AT: u64 = 32;
    pub(crate) const ENGINE_AT: u64 = 96;
    pub(crate) const CONFIG_AT: u64 = 128;
    const _: () = assert!(NAME_AT + MAX_NAME_BYTES as u64 == ENGINE_AT);
    const _: () = assert!(ENGINE_AT + MAX_ENGINE_BYTES as u64 == CONFIG_AT);
    const _: () = assert!(CONFIG_AT + MAX_CONFIG_BYTES as u64 == CATALOG_ENTRY_BYTES);
    const _: () = assert!(MAX_NAME_BYTES < 256 && MAX_ENGINE_BYTES < 256);
}

const _: () = assert!(SESSION_ENTRY_BYTES % 8 == 0 && CATALOG_ENTRY_BYTES % 8 == 0);
const _: () = assert!(ANCHOR_BYTES % 8 == 0 && JOURNAL_BYTES % 8 == 0);

/// Where the tables of one server are: a function of its configuration.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Layout {
    /// Which server.
    pub server: ServerId,
    /// The session table, in META.
    pub sessions_at: u64,
    /// The catalog, in META.
    pub catalog_at: u64,
    /// The chunk table, in META.
    pub chunks_at: u64,
    /// Length of META.
    pub meta_bytes: u64,
    /// The journals, in BOARD; the anchors are before them, from 0.
    pub journals_at: u64,
    /// Length of BOARD.
    pub board_bytes: u64,
}

impl Layout {
    /// The layout for a valid configuration.
    pub fn new(config: &ServerConfig) -> Self {
        let sessions = u64::from(config.max_sessions);
        let indexes = u64::from(config.max_indexes);
        let sessions_at = SUPERBLOCK_BYTES;
        let catalog_at = (sessions_at + sessions * SESSION_ENTRY_BYTES).next_multiple_of(PAGE_BYTES);
        let chunks_at = (catalog_at + indexes * CATALOG_ENTRY_BYTES).next_multiple_of(PAGE_BYTES);
        let meta_bytes =
            (chunks_at + u64::from(config.chunks()) * CHUNK_ENTRY_BYTES).next_multiple_of(PAGE_BYTES);
        let journals_at = indexes * ANCHOR_BYTES;
        let board_bytes = journals_at + sessions * JOURNAL_BYTES;
        Self {
            server: config.server,
            sessions_at,
            catalog_at,
            chunks_at,
            meta_bytes,
            journals_at,
            board_bytes,
        }
    }

    /// A session's entry in META.
    pub fn session_entry(&self, slot: u16) -> u64 {
        self.sessions_at + u64::from(slot) * SESSION_ENTRY_BYTES
    }

    /// An index's entry in META.
    pub fn catalog_entry(&self, slot: u16) -> u64 {
        self.catalog_at + u64::from(slot) * CATALOG_ENTRY_BYTES
    }

    /// A chunk's entry in META.
    pub fn chunk_entry(&self, chunk: u32) -> u64 {
        self.chunks_at + u64::from(chunk) * CHUNK_ENTRY_BYTES
    }

    /// The anchor of the index in a catalog slot.
    pub fn anchor(&self, slot: u16) -> GlobalAddr {
        GlobalAddr::new(self.server, RegionId::BOARD, u64::from(slot) * ANCHOR_BYTES)
    }

    /// The journal of the session in a slot.
    pub fn journal(&self, slot: u16) -> GlobalAddr {
        GlobalAddr::new(self.server, RegionId::BOARD, self.journals_at + u64::from(slot) * JOURNAL_BYTES)
    }
}

/// The regions of a server and what clients may do in them.
pub fn regions(config: &ServerConfig) -> Vec<RegionSpec> {
    let layout = Layout::new(config);
    let spec = |id, bytes, permissions| RegionSpec { id, bytes, permissions };
    vec![
        spec(RegionId::MAIN, config.main_bytes(), Permissions::ALL),
        spec(RegionId::LOCK, config.lock_bytes, Permissions::ALL),
        spec(RegionId::META, layout.meta_bytes, Permissions::READ),
        spec(RegionId::BOARD, layout.board_bytes, Permissions::ALL),
    ]
}

/// A word of META.
pub(crate) fn load(memory: &dyn ServerMemory, at: u64) -> u64 {
    memory.load(RegionId::META, at)
}

/// Stores a word of META.
pub(crate) fn store(memory: &dyn ServerMemory, at: u64, value: u64) {
    memory.store(RegionId::META, at, value);
}

/// Zeroes a range; words that are zero stay untouched, so that fresh memory is not paged in for nothing.
pub(crate) fn clear(memory: &dyn ServerMemory, region: RegionId, at: u64, bytes: u64) {
    for offset in (at..at + bytes).step_by(8) {
        if memory.load(region, offset) != 0 {
            memory.store(region, offset, 0);
        }
    }
}

/// Stores bytes in META; the last word is filled up with zeroes.
pub(crate) fn store_bytes(memory: &dyn ServerMemory, at: u64, bytes: &[u8]) {
    for (word_at, part) in (at..).step_by(8).zip(bytes.chunks(8)) {
        let mut word = [0; 8];
        word[..part.len()].copy_from_slice(part);
        store(memory, word_at, u64::from_le_bytes(word));
    }
}

/// Loads bytes from META.
pub(crate) fn load_bytes(memory: &dyn ServerMemory, at: u64, len: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = (at..)
        .step_by(8)
        .take(len.div_ceil(8))
        .flat_map(|word_at| load(memory, word_at).to_le_bytes())
        .collect();
    bytes.truncate(len);
    bytes
}

/// Formats memory. The magic comes last: a crash before it leaves memory that is formatted again.
pub(crate) fn format(memory: &dyn ServerMemory, config: &ServerConfig) {
    let layout = Layout::new(config);
    clear(memory, RegionId::META, 0, layout.meta_bytes);
    clear(memory, RegionId::BOARD, 0, layout.board_bytes);
    clear(memory, RegionId::LOCK, 0, config.lock_bytes);
    store_superblock(memory, config);
}

/// The superblock of memory that is empty otherwise.
pub(crate) fn store_superblock(memory: &dyn ServerMemory, config: &ServerConfig) {
    clear(memory, RegionId::META, 0, SUPERBLOCK_BYTES);
    for (at, value) in shape(config) {
        store(memory, at, value);
    }
    let incarnation = shape_word(config) | u64::from(config.incarnation);
    store(memory, superblock::SHAPE_AT, incarnation);
    store(memory, superblock::NEXT_INDEX_AT, 1);
    store(memory, superblock::EPOCH_AT, 1);
    store(memory, superblock::NEXT_TERM_AT, 1);
    store(memory, superblock::MAGIC_AT, MAGIC);
}

/// The pool that formatted memory belongs to.
pub(crate) fn pool(memory: &dyn ServerMemory) -> PoolId {
    PoolId(
        u128::from(load(memory, superblock::POOL_LOW_AT))
            | u128::from(load(memory, superblock::POOL_HIGH_AT)) << 64,
    )
}

/// Whether memory that bears our magic is this server's; its incarnation.
pub(crate) fn recognise(memory: &dyn ServerMemory, config: &ServerConfig) -> Result<u32, StartError> {
    let identity = load(memory, superblock::IDENTITY_AT);
    let found = (identity & 0xffff_ffff) as u32;
    if found != FORMAT_VERSION {
        return Err(StartError::FormatVersion { found, supported: FORMAT_VERSION });
    }
    let pool = pool(memory);
    if pool != config.pool {
        return Err(StartError::Mismatch(format!("it belongs to pool {pool}, not {}", config.pool)));
    }
    let names = [
        (superblock::IDENTITY_AT, "server number or number of servers"),
        (superblock::CHUNK_BYTES_AT, "chunk size"),
        (superblock::CHUNKS_AT, "number of chunks"),
        (superblock::LOCK_BYTES_AT, "size of lock memory"),
    ];
    let expected = shape(config);
    for (at, what) in names {
        let wanted = expected.iter().find(|(a, _)| *a == at).map_or(0, |(_, value)| *value);
        let found = load(memory, at);
        if found != wanted {
            return Err(StartError::Mismatch(format!("it has another {what} ({found:#x}, not {wanted:#x})")));
        }
    }
    let word = load(memory, superblock::SHAPE_AT);
    if word & !0xffff_ffff != shape_word(config) {
        return Err(StartError::Mismatch("it has room for other numbers of sessions or indexes".to_owned()));
    }
    Ok((word & 0xffff_ffff) as u32)
}

/// The words of the superblock that never change and follow from the configuration alone.
fn shape(config: &ServerConfig) -> [(u64, u64); 6] {
    let identity =
        u64::from(FORMAT_VERSION) | u64::from(config.server.get()) << 32 | u64::from(config.servers) << 48;
    [
        (superblock::IDENTITY_AT, identity),
        (superblock::POOL_LOW_AT, low_half(config.pool.0)),
        (superblock::POOL_HIGH_AT, low_half(config.pool.0 >> 64)),
        (superblock::CHUNK_BYTES_AT, config.chunk_bytes),
        (superblock::CHUNKS_AT, u64::from(config.chunks())),
        (superblock::LOCK_BYTES_AT, config.lock_bytes),
    ]
}

fn shape_word(config: &ServerConfig) -> u64 {
    u64::from(config.max_sessions) << 32 | u64::from(config.max_indexes) << 48
}

pub(crate) fn low_half(value: u128) -> u64 {
    value.to_le_bytes().first_chunk().map_or(0, |half| u64::from_le_bytes(*half))
}

/// Nothing of ours.
pub(crate) fn not_ours() -> StartError {
    StartError::Mismatch("it holds something that is not Farwood's".to_owned())
}

/// A table entry that this code cannot have written.
pub(crate) fn damaged(what: &str, number: u64) -> StartError {
    StartError::Mismatch(format!("{what} {number} is damaged"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::VecMemory;

    #[test]
    fn tables_do_not_overlap() {
        let config = ServerConfig::tiny(ServerId::new(0), 1, 7);
        let layout = Layout::new(&config);
        assert!(layout.session_entry(config.max_sessions) <= layout.catalog_entry(0));
        assert!(layout.catalog_entry(config.max_indexes) <= layout.chunk_entry(0));
        assert!(layout.chunk_entry(config.chunks()) <= layout.meta_bytes);
        assert_eq!(layout.anchor(config.max_indexes).offset(), layout.journal(0).offset());
        assert_eq!(layout.journal(config.max_sessions).offset(), layout.board_bytes);
    }

    #[test]
    fn clients_only_read_the_tables() {
        for spec in regions(&ServerConfig::tiny(ServerId::new(0), 1, 7)) {
            let all = spec.id != RegionId::META;
            assert_eq!(spec.permissions, if all { Permissions::ALL } else { Permissions::READ });
            assert_eq!(spec.bytes % 8, 0);
        }
    }

    #[test]
    fn bytes_survive() {
        let memory = VecMemory::new(&regions(&ServerConfig::tiny(ServerId::new(0), 1, 1)));
        for len in [0, 1, 7, 8, 9, 64] {
            let bytes: Vec<u8> = (1..=len).collect();
            store_bytes(&memory, 4096, &bytes);
            assert_eq!(load_bytes(&memory, 4096, bytes.len()), bytes);
        }
    }

    #[test]
    fn formatted_memory_is_recognised_and_a_strangers_is_not() {
        let config = ServerConfig { incarnation: 7, ..ServerConfig::tiny(ServerId::new(1), 2, 7) };
        let memory = VecMemory::new(&regions(&config));
        memory.store(RegionId::LOCK, 8, 5);
        format(&memory, &config);
        assert_eq!(memory.load(RegionId::LOCK, 8), 0, "a lock that nobody holds is free");
        assert_eq!(recognise(&memory, &config), Ok(7));
        let strangers = [
            ServerConfig { pool: PoolId(1 << 70), ..config.clone() },
            ServerConfig { server: ServerId::new(0), ..config.clone() },
            ServerConfig { servers: 3, ..config.clone() },
            ServerConfig { chunk_bytes: 8192, ..config.clone() },
            ServerConfig { memory_bytes: 4096, ..config.clone() },
            ServerConfig { lock_bytes: 8, ..config.clone() },
            ServerConfig { max_sessions: 5, ..config.clone() },
            ServerConfig { max_indexes: 5, ..config.clone() },
        ];
        for stranger in strangers {
            assert!(matches!(recognise(&memory, &stranger), Err(StartError::Mismatch(_))), "{stranger:?}");
        }
        let word = memory.load(RegionId::META, superblock::IDENTITY_AT);
        memory.store(RegionId::META, superblock::IDENTITY_AT, word + 1);
        assert_eq!(
            recognise(&memory, &config),
            Err(StartError::FormatVersion { found: FORMAT_VERSION + 1, supported: FORMAT_VERSION })
        );
    }
}
