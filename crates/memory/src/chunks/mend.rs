//! The chunk table of memory that is not whole: what may be in use stays in use.
//!
//! | the table says | and | so it becomes |
//! |---|---|---|
//! | nothing that makes sense | | set aside |
//! | an extent over chunks that have entries of their own | | set aside, up to the next entry |
//! | objects | the chunk's header agrees | as it is; no object is free if the bitmap may be wrong |
//! | objects that are being drained | | as objects that are not |
//! | objects | there is no header | as it is, with a new header in which no object is free |
//! | objects | the header is for others | set aside |
//! | raw bytes | | as it is |
//! | free or freed | the entry is as it was | as it is |
//! | free or freed | the entry may be old, and the header is for objects of an index | that index's, no object free |
//! | freed raw bytes | the entry may be old | their index's |
//! | free | the entry may be old, and the chunk is not all zeroes | set aside |
//!
//! What is set aside belongs to [`SET_ASIDE`], which is no index, and is never given to anybody.

use super::{ChunkTable, ChunkType, Extent, chunk_entry, load_extent};
use crate::config::ServerConfig;
use crate::layout::{self, CHUNK_ENTRY_BYTES, Layout};
use farwood_fabric::addr::{RegionId, SessionId};
use farwood_fabric::control::{IndexId, MAIN_BASE, ObjectChunk};
use farwood_fabric::found::Damage;
use farwood_fabric::server::ServerMemory;
use std::collections::BTreeSet;

/// Whose the chunks are that nobody may use.
pub(crate) const SET_ASIDE: IndexId = IndexId::MAX;

/// What was done.
#[derive(Default, Debug)]
pub(crate) struct Mended {
    /// What was not believed.
    pub(crate) lines: Vec<String>,
    /// How many chunks nobody may use.
    pub(crate) set_aside: u32,
    /// Which indexes have chunks that may be other than they were.
    pub(crate) indexes: BTreeSet<IndexId>,
}

/// Puts the table right; `is_known` says which types of chunks belong to an index that there is.
pub(crate) fn mend(
    memory: &dyn ServerMemory,
    config: &ServerConfig,
    damage: &Damage,
    is_known: &dyn Fn(ChunkType) -> bool,
) -> Mended {
    let (chunks, layout) = (config.chunks(), Layout::new(config));
    let table = ChunkTable {
        server: config.server,
        layout,
        chunk_bytes: config.chunk_bytes,
        chunks,
        extents: vec![Extent::Free; chunks as usize],
        next_mark: 0,
    };
    let mut mender = Mender { memory, table, damage, is_known, mended: Mended::default() };
    let mut at = 0;
    while at < chunks {
        at += mender.mend_at(at);
    }
    mender.mended
}

struct Mender<'a> {
    memory: &'a dyn ServerMemory,
    table: ChunkTable,
    damage: &'a Damage,
    is_known: &'a dyn Fn(ChunkType) -> bool,
    mended: Mended,
}

impl Mender<'_> {
    fn commit_word(&self, at: u32) -> u64 {
        layout::load(self.memory, self.table.layout.chunk_entry(at) + chunk_entry::COMMIT_AT)
    }

    /// Mends what begins at a chunk; how many chunks that were.
    fn mend_at(&mut self, at: u32) -> u32 {
        let left = self.table.chunks - at;
        let extent = load_extent(self.memory, &self.table.layout, at)
            .filter(|extent| (1..=left).contains(&extent.count()))
            .filter(|extent| extent.index() != Some(0));
        let Some(extent) = extent else {
            self.mended.lines.push(format!("the entry of chunk {at} makes no sense; the chunk is set aside"));
            return self.set_aside(at, 1);
        };
        let count = extent.count();
        if let Some(other) = (at + 1..at + count).find(|chunk| self.commit_word(*chunk) != 0) {
            let line = format!("the extents at chunks {at} and {other} overlap; the first is set aside");
            self.mended.lines.push(line);
            return self.set_aside(at, other - at);
        }
        match extent {
            Extent::Used { kind, .. } if kind.index == SET_ASIDE => self.mended.set_aside += count,
            Extent::Used { kind, .. } => self.mend_used(at, kind, count),
            Extent::Draining { kind, .. } => {
                // Whoever wanted it is gone.
                let nobodys = Extent::Used { kind, owner: SessionId::NONE, count, shared: true };
                self.table.commit(self.memory, at, nobodys);
                self.mend_used(at, kind, count);
            }
            Extent::Free | Extent::Freed { .. } | Extent::Within if !self.is_doubtful(at) => {}
            Extent::Freed { kind, .. } if kind.object_bytes == 0 => self.keep(at, kind, count),
            Extent::Free | Extent::Freed { .. } | Extent::Within => match self.header(at) {
                Some(kind) if (self.is_known)(kind) => {
                    self.keep(at, kind, 1);
                    self.fill(at, kind);
                }
                _ if extent == Extent::Free && self.is_zero(at) => {}
                _ => return self.set_aside(at, count),
            },
        }
        count
    }

    fn mend_used(&mut self, at: u32, kind: ChunkType, count: u32) {
        let begin = self.table.offset(at);
        if self.damage.touches(RegionId::MAIN, begin, u64::from(count) * self.table.chunk_bytes)
            || self.is_doubtful(at)
        {
            self.mended.indexes.insert(kind.index);
        }
        if kind.object_bytes == 0 {
            return;
        }
        let Some(objects) =
            ObjectChunk::new(self.table.chunk_bytes, kind.object_bytes).filter(|_| count == 1)
        else {
            self.mended.lines.push(format!("chunk {at} cannot hold what its entry says, and is set aside"));
            self.set_aside(at, count);
            return;
        };
        let bitmap_end = ObjectChunk::BITMAP_OFFSET + objects.bitmap_words() * 8;
        match self.header(at) {
            Some(found) if found == kind => {
                if self.damage.touches(RegionId::MAIN, begin, bitmap_end) || self.is_doubtful(at) {
                    self.fill(at, kind);
                }
            }
            Some(other) => {
                let line = format!(
                    "chunk {at} is index #{}'s by its entry and #{}'s by its header; it is set aside",
                    kind.index, other.index
                );
                self.mended.lines.push(line);
                self.set_aside(at, count);
            }
            None => {
                self.mended.lines.push(format!("chunk {at} of index #{} has lost its header", kind.index));
                self.table.write_header(self.memory, at, kind, objects);
                self.fill(at, kind);
            }
        }
    }

    /// Whether the chunk's entry may be an old one.
    fn is_doubtful(&self, at: u32) -> bool {
        self.damage.touches(RegionId::META, self.table.layout.chunk_entry(at), CHUNK_ENTRY_BYTES)
    }

    /// For which objects a chunk is, as it says itself.
    fn header(&self, at: u32) -> Option<ChunkType> {
        let begin = self.table.offset(at);
        let [magic, kind, sizes] =
            [0, 8, 16].map(|word_at| self.memory.load(RegionId::MAIN, begin + word_at));
        let kind = ChunkType {
            index: (kind & 0xffff_ffff) as u32,
            class: (kind >> 32 & 0xffff) as u16,
            object_bytes: (sizes & 0xffff_ffff) as u32,
        };
        let objects = ObjectChunk::new(self.table.chunk_bytes, kind.object_bytes)?;
        (magic == ObjectChunk::MAGIC && u64::from(objects.objects) == sizes >> 32).then_some(kind)
    }

    fn is_zero(&self, at: u32) -> bool {
        let begin = self.table.offset(at);
        debug_assert!(begin >= MAIN_BASE, "chunks begin behind the reserved page");
        (begin..begin + self.table.chunk_bytes)
            .step_by(8)
            .all(|word| self.memory.load(RegionId::MAIN, word) == 0)
    }

    /// It stays an index's, and nobody's in particular.
    fn keep(&mut self, at: u32, kind: ChunkType, count: u32) {
        self.mended.indexes.insert(kind.index);
        self.table.commit(
            self.memory,
            at,
            Extent::Used { kind, owner: SessionId::NONE, count, shared: true },
        );
    }

    /// No object of the chunk is free, until somebody has looked which are.
    fn fill(&mut self, at: u32, kind: ChunkType) {
        self.mended.indexes.insert(kind.index);
        let Some(objects) = ObjectChunk::new(self.table.chunk_bytes, kind.object_bytes) else { return };
        let bitmap = self.table.offset(at) + ObjectChunk::BITMAP_OFFSET;
        for word in 0..objects.bitmap_words() {
            self.memory.store(RegionId::MAIN, bitmap + word * 8, objects.word_mask(word));
        }
    }

    fn set_aside(&mut self, at: u32, count: u32) -> u32 {
        let kind = ChunkType { index: SET_ASIDE, class: 0, object_bytes: 0 };
        self.table.commit(
            self.memory,
            at,
            Extent::Used { kind, owner: SessionId::NONE, count, shared: true },
        );
        self.mended.set_aside += count;
        count
    }
}
