//! Who may have which chunks of main memory.
//!
//! An *extent* is one chunk or several in a row. What is asked for is given from, in this order:
//!
//! 1. an extent that lost its owner, for objects of the same type: its objects live on, the new owner allocates
//!    between them;
//! 2. a freed extent of the same type and length: stale hints to it stay harmless, as memory is type-stable;
//! 3. free chunks, the first run that is long enough;
//! 4. the same, counting freed extents whose flush is through: no hint points there any more. Only those that the
//!    run needs are dissolved, so that the others keep serving their own type.
//!
//! Where room is scarce (fewer than one chunk in [`SCARCE_BELOW_ONE_IN`] is free), a chunk of objects of the same type that somebody
//! else has, with objects that are still free, comes before 3. It changes its owner, but the one before goes on to use it: objects
//! are claimed by CAS, so any number of sessions may. Otherwise a small pool were full as soon as every session had its own chunk
//! of each kind. Nobody can hand back a chunk that was ever shared: another may be about to claim what is free in it.
//!
//! Chunks that are nearly empty are drained when somebody else finds no room (`drain`).
//!
//! The last free chunk is for objects only if the index has pages of journals: it is kept for those.
//!
//! [`ChunkTable::choose`] decides that in one pass over the table (131,072 entries at 1 TiB), the rest acts. Each
//! act is one commit word in META, see [`crate::layout`]; this table is its mirror.
//!
//! Invariants: ONE-OWNER, TYPE-STABLE, and every chunk is in exactly one extent or free.

mod drain;
mod mend;

pub(crate) use drain::{Drain, Drained};
pub(crate) use mend::{SET_ASIDE, mend};

use crate::config::ServerConfig;
use crate::layout::{self, Layout, chunk_entry};
use crate::repeats::CallTag;
use farwood_fabric::addr::{RegionId, ServerId, SessionId};
use farwood_fabric::control::{ChunkInfo, ControlError, IndexId, MAIN_BASE, ObjectChunk, PAGE_CLASS};
use farwood_fabric::server::{ServerMemory, StartError};

/// What chunks hold; it changes only when no hint is left.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ChunkType {
    pub(crate) index: IndexId,
    pub(crate) class: u16,
    /// 0: raw bytes.
    pub(crate) object_bytes: u32,
}

/// What begins at a chunk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Extent {
    /// One chunk for any use.
    Free,
    Used {
        kind: ChunkType,
        owner: SessionId,
        count: u32,
        /// Somebody beside the owner has been given it, too, and may go on to claim objects in it.
        shared: bool,
    },
    /// One chunk of objects that live on. Nobody is given it for more, but for its own type; when the flush is through nobody claims
    /// in it, and once it is empty it is freed.
    Draining { kind: ChunkType, after: After },
    /// For the same type at once, for others when the flush is through.
    Freed { kind: ChunkType, count: u32, after: After },
    /// Nothing: the chunk belongs to an extent that began before it.
    Within,
}

impl Extent {
    fn count(self) -> u32 {
        match self {
            Self::Free | Self::Within | Self::Draining { .. } => 1,
            Self::Used { count, .. } | Self::Freed { count, .. } => count,
        }
    }

    /// The index that it serves.
    fn index(self) -> Option<IndexId> {
        match self {
            Self::Free | Self::Within => None,
            Self::Used { kind, .. } | Self::Draining { kind, .. } | Self::Freed { kind, .. } => {
                Some(kind.index)
            }
        }
    }
}

/// The flush that a chunk waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum After {
    /// This one.
    Flush(u64),
    /// One that somebody is going to ask for, who knows the chunk by this number.
    Stamp(u64),
}

/// Tells stamps from flushes.
const STAMP: u64 = 1 << 63;

impl After {
    fn from_raw(raw: u64) -> Self {
        if raw & STAMP == 0 { Self::Flush(raw) } else { Self::Stamp(raw & !STAMP) }
    }

    fn to_raw(self) -> u64 {
        match self {
            Self::Flush(generation) => generation & !STAMP,
            Self::Stamp(stamp) => stamp | STAMP,
        }
    }

    fn is_through(self, flushed_through: u64) -> bool {
        matches!(self, Self::Flush(generation) if generation <= flushed_through)
    }
}

/// What somebody asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Want {
    pub(crate) kind: ChunkType,
    pub(crate) count: u32,
    /// Every session has flushed so far.
    pub(crate) flushed_through: u64,
}

/// Where it can be had.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Choice {
    Inherit(u32),
    /// Somebody else's, who has not filled it.
    Share(u32),
    Reuse(u32),
    /// Free chunks; what is freed among them is dissolved first.
    Take(u32),
    Full {
        flush_helps: bool,
    },
}

/// With fewer free chunks than this part of all, chunks are shared.
const SCARCE_BELOW_ONE_IN: u32 = 8;
/// A server of so many chunks keeps its last one for the pages of journals.
const KEEP_FOR_PAGES_OF: u32 = 16;
/// So many bitmaps are looked at for room, at most: a server has better to do.
const MAX_BITMAPS: usize = 256;

/// The first run of usable chunks that is long enough.
#[derive(Clone, Copy, Default, Debug)]
struct Run {
    begin: u32,
    length: u32,
    found: Option<u32>,
}

impl Run {
    fn extend(&mut self, at: u32, count: u32, wanted: u32) {
        if self.length == 0 {
            self.begin = at;
        }
        self.length += count;
        if self.length >= wanted && self.found.is_none() {
            self.found = Some(self.begin);
        }
    }

    fn cut(&mut self) {
        self.length = 0;
    }
}

/// Chunks handed out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Handed {
    pub(crate) offset: u64,
    pub(crate) inherited: bool,
}

/// The chunk table.
#[derive(Debug)]
pub(crate) struct ChunkTable {
    server: ServerId,
    layout: Layout,
    chunk_bytes: u64,
    chunks: u32,
    extents: Vec<Extent>,
    /// Where the search for chunks to drain goes on.
    next_mark: u32,
}

impl ChunkTable {
    /// Reads the table from META.
    pub(crate) fn load(memory: &dyn ServerMemory, config: &ServerConfig) -> Result<Self, StartError> {
        let chunks = config.chunks();
        let layout = Layout::new(config);
        let mut table = Self {
            server: config.server,
            layout,
            chunk_bytes: config.chunk_bytes,
            chunks,
            extents: vec![Extent::Free; chunks as usize],
            next_mark: 0,
        };
        let mut at = 0;
        while at < chunks {
            let extent = load_extent(memory, &layout, at)
                .filter(|extent| extent.count() >= 1 && extent.count() <= chunks - at)
                .ok_or_else(|| layout::damaged("chunk", u64::from(at)))?;
            let end = at + extent.count();
            if let Some(bad) = (at + 1..end).find(|c| layout::load(memory, layout.chunk_entry(*c)) != 0) {
                return Err(layout::damaged("chunk", u64::from(bad)));
            }
            table.note(at, extent);
            at = end;
        }
        table.mend_headers(memory);
        Ok(table)
    }

    /// Hands out chunks to the call of this name.
    pub(crate) fn allocate_for(
        &mut self,
        memory: &dyn ServerMemory,
        owner: SessionId,
        want: Want,
        tag: CallTag,
    ) -> Result<Handed, ControlError> {
        let objects = self.check(want)?;
        if let Some(given) = self.given(memory, owner, want, tag) {
            return Ok(given);
        }
        let choice = self.choose(memory, owner, want);
        let at = match choice {
            Choice::Full { flush_helps } => {
                return Err(ControlError::PoolFull { server: self.server, wanted: want.count, flush_helps });
            }
            Choice::Inherit(at) | Choice::Share(at) | Choice::Reuse(at) => at,
            Choice::Take(at) => {
                self.dissolve_freed(memory, at, want.count);
                at
            }
        };
        let inherited = matches!(choice, Choice::Inherit(_) | Choice::Share(_));
        if let (Some(objects), false) = (objects, inherited) {
            self.write_header(memory, at, want.kind, objects);
        }
        // Those who knew a chunk before it was drained may still claim in it.
        let was_shared =
            matches!(self.extents[at as usize], Extent::Used { shared: true, .. } | Extent::Draining { .. });
        let shared = was_shared || matches!(choice, Choice::Share(_));
        let extent = Extent::Used { kind: want.kind, owner, count: want.count, shared };
        self.commit_for(memory, at, extent, tag.with(inherited));
        if inherited {
            self.mark_drained(memory, at, false);
        }
        Ok(Handed { offset: self.offset(at), inherited })
    }

    /// What this very call was given before, if the answer went with an earlier server process.
    fn given(
        &self,
        memory: &dyn ServerMemory,
        caller: SessionId,
        want: Want,
        tag: CallTag,
    ) -> Option<Handed> {
        self.heads().find_map(|(at, extent)| match extent {
            Extent::Used { kind, owner, count, .. }
                if (kind, owner, count) == (want.kind, caller, want.count) =>
            {
                let inherited = tag.matches(stored_tag(memory, &self.layout, at))?;
                Some(Handed { offset: self.offset(at), inherited })
            }
            _ => None,
        })
    }

    /// Takes chunks back, in which nothing may be left.
    pub(crate) fn free(
        &mut self,
        memory: &dyn ServerMemory,
        caller: SessionId,
        offset: u64,
        generation: u64,
    ) -> Result<(), ControlError> {
        let at = self.chunk_at(offset).ok_or_else(|| bad(format!("no chunk begins at {offset:#x}")))?;
        match self.extents[at as usize] {
            Extent::Used { kind, owner, .. } if owner.is_none() && kind.object_bytes == 0 => {
                // Its owner left it to its index; nobody here can see whether anything is in it.
                Err(bad(format!("the chunk at {offset:#x} is its index's; drop index #{}", kind.index)))
            }
            Extent::Used { shared: true, .. } => {
                // Whoever else has it may be about to claim what is free in it.
                Err(bad(format!("several sessions have the chunk at {offset:#x}; it stays with its index")))
            }
            Extent::Used { kind, owner, .. }
                if (owner == caller || owner.is_none()) && self.holds_objects(memory, at, kind) =>
            {
                Err(bad(format!("the chunk at {offset:#x} still holds objects; free them first")))
            }
            Extent::Used { kind, owner, count, .. } if owner == caller || owner.is_none() => {
                self.commit(memory, at, Extent::Freed { kind, count, after: After::Flush(generation) });
                Ok(())
            }
            Extent::Used { owner, .. } => Err(bad(format!("the chunk at {offset:#x} belongs to {owner}"))),
            Extent::Within => {
                Err(bad(format!("{offset:#x} is inside an extent; free it by its first chunk")))
            }
            Extent::Draining { .. } => Err(bad(format!("the chunk at {offset:#x} is being drained"))),
            Extent::Free | Extent::Freed { .. } => {
                Err(bad(format!("the chunk at {offset:#x} is free already")))
            }
        }
    }

    /// Takes raw bytes of an index back, whoever had them: the index is being repaired, and nothing of it leads there. Once more does no
    /// harm.
    pub(crate) fn free_extent(
        &mut self,
        memory: &dyn ServerMemory,
        index: IndexId,
        offset: u64,
        generation: u64,
    ) -> Result<(), ControlError> {
        let at = self.chunk_at(offset).ok_or_else(|| bad(format!("no chunk begins at {offset:#x}")))?;
        match self.extents[at as usize] {
            Extent::Used { kind, count, .. } if kind.index == index && kind.object_bytes == 0 => {
                self.commit(memory, at, Extent::Freed { kind, count, after: After::Flush(generation) });
                Ok(())
            }
            Extent::Freed { kind, .. } if kind.index == index && kind.object_bytes == 0 => Ok(()),
            _ => Err(bad(format!("no raw bytes of index #{index} begin at {offset:#x}"))),
        }
    }

    /// Whether an object of this chunk is taken, as its bitmap says.
    fn holds_objects(&self, memory: &dyn ServerMemory, at: u32, kind: ChunkType) -> bool {
        let Some(objects) = ObjectChunk::new(self.chunk_bytes, kind.object_bytes) else { return false };
        let bitmap = self.offset(at) + ObjectChunk::BITMAP_OFFSET;
        (0..objects.bitmap_words())
            .any(|word| memory.load(RegionId::MAIN, bitmap + word * 8) & objects.word_mask(word) != 0)
    }

    /// Makes all chunks of a session nobody's; which they are.
    pub(crate) fn disown(&mut self, memory: &dyn ServerMemory, session: SessionId) -> Vec<ChunkInfo> {
        let owned = |extent: Extent| matches!(extent, Extent::Used { owner, .. } if owner == session);
        let heads: Vec<_> = self.heads().filter(|(_, extent)| owned(*extent)).collect();
        let mut disowned = Vec::with_capacity(heads.len());
        for (at, extent) in heads {
            if let Extent::Used { kind, count, shared, .. } = extent {
                let owner = SessionId::NONE;
                self.commit(memory, at, Extent::Used { kind, owner, count, shared });
                disowned.push(self.info(at, kind, owner, count));
            }
        }
        disowned
    }

    /// Frees all chunks of an index for any use: the drop has waited for a flush. A crash on the way leaves some
    /// released and some not; asking again finishes it.
    pub(crate) fn release(&mut self, memory: &dyn ServerMemory, index: IndexId) {
        self.release_all(memory, |other| other == index);
    }

    /// The same for all indexes for which `is_gone` holds.
    pub(crate) fn release_all(&mut self, memory: &dyn ServerMemory, is_gone: impl Fn(IndexId) -> bool) {
        let heads: Vec<_> = self.heads().filter(|(_, extent)| extent.index().is_some_and(&is_gone)).collect();
        for (at, _) in heads {
            self.dissolve(memory, at);
        }
    }

    /// Whether the index still has chunks here.
    pub(crate) fn any_of(&self, index: IndexId) -> bool {
        self.heads().any(|(_, extent)| extent.index() == Some(index))
    }

    /// Chunks in use, of one owner or of all.
    pub(crate) fn list(&self, of: Option<SessionId>) -> Vec<ChunkInfo> {
        let used = self.heads().filter_map(|(at, extent)| match extent {
            Extent::Used { kind, owner, count, .. } if of.is_none_or(|of| of == owner) => {
                Some(self.info(at, kind, owner, count))
            }
            Extent::Draining { kind, .. } if of.is_none_or(SessionId::is_none) => {
                Some(self.info(at, kind, SessionId::NONE, 1))
            }
            _ => None,
        });
        used.collect()
    }

    /// Who owns chunks.
    pub(crate) fn owners(&self) -> Vec<SessionId> {
        let mut owners: Vec<_> = self.list(None).iter().map(|chunk| chunk.owner).collect();
        owners.sort_unstable();
        owners.dedup();
        owners.retain(|owner| !owner.is_none());
        owners
    }

    /// How many chunks there are.
    pub(crate) fn total(&self) -> u64 {
        u64::from(self.chunks)
    }

    /// How many chunks are free for any use.
    pub(crate) fn free_chunks(&self) -> u64 {
        self.heads().filter(|(_, extent)| *extent == Extent::Free).map(|_| 1).sum()
    }

    /// Whether the request makes sense; the layout of the chunk, if it is for objects.
    fn check(&self, want: Want) -> Result<Option<ObjectChunk>, ControlError> {
        let size = want.kind.object_bytes;
        if want.kind.index == 0 {
            return Err(bad("index 0 does not exist"));
        }
        if want.count == 0 {
            return Err(bad("no chunks were asked for"));
        }
        if size == 0 {
            return Ok(None);
        }
        if want.count != 1 {
            return Err(bad("objects live in single chunks; ask for one at a time, or for raw bytes"));
        }
        let objects = ObjectChunk::new(self.chunk_bytes, size);
        objects.map(Some).ok_or_else(|| {
            bad(format!("objects of {size} bytes do not fit a chunk, or are no multiple of 8"))
        })
    }

    fn choose(&self, memory: &dyn ServerMemory, asker: SessionId, want: Want) -> Choice {
        let Want { kind, count, flushed_through } = want;
        let (mut free_chunks, mut flushed_chunks, mut freed_chunks) = (0, 0, 0);
        let (mut free_now, mut flushed, mut eventually) = (Run::default(), Run::default(), Run::default());
        let mut reuse = None;
        for (at, extent) in self.heads() {
            match extent {
                Extent::Used { kind: held, owner, .. } => {
                    if owner.is_none() && held == kind && kind.object_bytes > 0 {
                        return Choice::Inherit(at);
                    }
                    free_now.cut();
                    flushed.cut();
                    eventually.cut();
                }
                Extent::Draining { kind: held, .. } => {
                    if held == kind {
                        return Choice::Inherit(at);
                    }
                    free_now.cut();
                    flushed.cut();
                    eventually.cut();
                }
                Extent::Freed { kind: held, count: length, after } => {
                    if held == kind && length == count {
                        reuse = reuse.or(Some(at));
                    }
                    free_now.cut();
                    freed_chunks += length;
                    if after.is_through(flushed_through) {
                        flushed_chunks += length;
                        flushed.extend(at, length, count);
                    } else {
                        flushed.cut();
                    }
                    eventually.extend(at, length, count);
                }
                Extent::Free => {
                    free_chunks += 1;
                    free_now.extend(at, 1, count);
                    flushed.extend(at, 1, count);
                    eventually.extend(at, 1, count);
                }
                Extent::Within => {}
            }
        }
        if let Some(at) = reuse {
            return Choice::Reuse(at);
        }
        if kind.class == PAGE_CLASS || free_chunks < self.chunks.div_ceil(SCARCE_BELOW_ONE_IN) {
            if let Some(at) = self.with_room(memory, asker, kind) {
                return Choice::Share(at);
            }
        }
        if free_chunks + flushed_chunks <= count && self.keeps_chunk_for_pages(kind) {
            let flush_helps = eventually.found.is_some() && free_chunks + freed_chunks > count;
            return Choice::Full { flush_helps };
        }
        match free_now.found.or(flushed.found) {
            Some(at) => Choice::Take(at),
            None => Choice::Full { flush_helps: eventually.found.is_some() },
        }
    }

    /// Whether the last free chunk is not for this, but for the first pages of a journal: in a pool that is full, and then emptied, there
    /// would be none. Raw bytes are in no journal.
    fn keeps_chunk_for_pages(&self, wanted: ChunkType) -> bool {
        let is_page = |kind: ChunkType| kind.index == wanted.index && kind.class == PAGE_CLASS;
        let mut used = self.heads().filter_map(|(_, extent)| match extent {
            Extent::Used { kind, .. } => Some(kind),
            _ => None,
        });
        let is_of_objects = wanted.object_bytes > 0;
        self.chunks >= KEEP_FOR_PAGES_OF && is_of_objects && !is_page(wanted) && !used.any(is_page)
    }

    /// A chunk of this type that somebody else has and that has free objects.
    fn with_room(&self, memory: &dyn ServerMemory, asker: SessionId, kind: ChunkType) -> Option<u32> {
        let objects = ObjectChunk::new(self.chunk_bytes, kind.object_bytes)?;
        let others = self.heads().filter(|(_, extent)| {
            matches!(extent, Extent::Used { kind: held, owner, .. } if *held == kind && *owner != asker)
        });
        let has_room = |at: u32| {
            let bitmap = self.offset(at) + ObjectChunk::BITMAP_OFFSET;
            (0..objects.bitmap_words())
                .any(|word| !memory.load(RegionId::MAIN, bitmap + word * 8) & objects.word_mask(word) != 0)
        };
        others.map(|(at, _)| at).take(MAX_BITMAPS).find(|at| has_room(*at))
    }

    /// Dissolves the freed extents among the `count` chunks at `at`. A crash on the way leaves free chunks, which
    /// they may be: their flush is through.
    fn dissolve_freed(&mut self, memory: &dyn ServerMemory, at: u32, count: u32) {
        let end = at + count;
        let mut next = at;
        while next < end {
            let extent = self.extents[next as usize];
            if matches!(extent, Extent::Freed { .. }) {
                self.dissolve(memory, next);
            }
            next += extent.count();
        }
    }

    /// Makes every chunk of an extent free for any use, by one store.
    fn dissolve(&mut self, memory: &dyn ServerMemory, at: u32) {
        let count = self.extents[at as usize].count();
        layout::store(memory, self.layout.chunk_entry(at) + chunk_entry::COMMIT_AT, 0);
        self.extents[at as usize..(at + count) as usize].fill(Extent::Free);
    }

    /// Records an extent: what its commit word makes meaningful first, then that word.
    fn commit(&mut self, memory: &dyn ServerMemory, at: u32, extent: Extent) {
        self.commit_for(memory, at, extent, 0);
    }

    /// The same, with the tag of the call that is given it.
    fn commit_for(&mut self, memory: &dyn ServerMemory, at: u32, extent: Extent, tag: u64) {
        let entry = self.layout.chunk_entry(at);
        let (state, owner, count) = match extent {
            Extent::Used { kind, owner, count, shared } => {
                let word = u64::from(kind.index) | u64::from(kind.class) << 32 | tag >> 32 << 48;
                layout::store(memory, entry + chunk_entry::KIND_AT, word);
                layout::store(
                    memory,
                    entry + chunk_entry::OBJECT_AT,
                    u64::from(kind.object_bytes) | tag << 32,
                );
                (if shared { STATE_SHARED } else { STATE_USED }, owner, count)
            }
            Extent::Draining { after, .. } => {
                layout::store(memory, entry + chunk_entry::AFTER_AT, after.to_raw());
                (STATE_DRAINING, SessionId::NONE, 1)
            }
            Extent::Freed { count, after, .. } => {
                layout::store(memory, entry + chunk_entry::AFTER_AT, after.to_raw());
                (STATE_FREED, SessionId::NONE, count)
            }
            Extent::Free | Extent::Within => return,
        };
        let word = state | u64::from(owner.get()) << 16 | u64::from(count) << 32;
        layout::store(memory, entry + chunk_entry::COMMIT_AT, word);
        self.note(at, extent);
    }

    fn note(&mut self, at: u32, extent: Extent) {
        self.extents[at as usize..(at + extent.count()) as usize].fill(Extent::Within);
        self.extents[at as usize] = extent;
    }

    /// Header and empty bitmap of an object chunk.
    fn write_header(&self, memory: &dyn ServerMemory, at: u32, kind: ChunkType, objects: ObjectChunk) {
        let begin = self.offset(at);
        layout::clear(memory, RegionId::MAIN, begin + 24, ObjectChunk::BITMAP_OFFSET - 24);
        layout::clear(memory, RegionId::MAIN, begin + ObjectChunk::BITMAP_OFFSET, objects.bitmap_words() * 8);
        let words = [
            (16, u64::from(kind.object_bytes) | u64::from(objects.objects) << 32),
            (8, u64::from(kind.index) | u64::from(kind.class) << 32),
            (0, ObjectChunk::MAGIC),
        ];
        for (word_at, word) in words {
            memory.store(RegionId::MAIN, begin + word_at, word);
        }
    }

    fn heads(&self) -> impl Iterator<Item = (u32, Extent)> {
        (0..self.chunks).zip(self.extents.iter().copied()).filter(|(_, extent)| *extent != Extent::Within)
    }

    fn info(&self, at: u32, kind: ChunkType, owner: SessionId, count: u32) -> ChunkInfo {
        let ChunkType { index, class, object_bytes } = kind;
        ChunkInfo { offset: self.offset(at), count, index, class, object_bytes, owner }
    }

    fn offset(&self, at: u32) -> u64 {
        MAIN_BASE + u64::from(at) * self.chunk_bytes
    }

    fn chunk_at(&self, offset: u64) -> Option<u32> {
        let within = offset.checked_sub(MAIN_BASE)?;
        let at = u32::try_from(within / self.chunk_bytes).ok()?;
        (within % self.chunk_bytes == 0 && at < self.chunks).then_some(at)
    }
}

const STATE_USED: u64 = 1;
const STATE_FREED: u64 = 2;
const STATE_SHARED: u64 = 3;
const STATE_DRAINING: u64 = 4;

/// The tag of the call that was given an extent in use; 0: none.
fn stored_tag(memory: &dyn ServerMemory, layout: &Layout, at: u32) -> u64 {
    let entry = layout.chunk_entry(at);
    let [kind, object] =
        [chunk_entry::KIND_AT, chunk_entry::OBJECT_AT].map(|word| layout::load(memory, entry + word));
    kind >> 48 << 32 | object >> 32
}

/// The extent whose head's entry this is; `None` if no such entry was ever written.
fn load_extent(memory: &dyn ServerMemory, layout: &Layout, at: u32) -> Option<Extent> {
    let entry = layout.chunk_entry(at);
    let word = layout::load(memory, entry + chunk_entry::COMMIT_AT);
    let kind_word = layout::load(memory, entry + chunk_entry::KIND_AT);
    let kind = ChunkType {
        index: (kind_word & 0xffff_ffff) as u32,
        class: (kind_word >> 32 & 0xffff) as u16,
        object_bytes: (layout::load(memory, entry + chunk_entry::OBJECT_AT) & 0xffff_ffff) as u32,
    };
    let owner = SessionId::new((word >> 16 & 0xffff) as u16);
    let count = (word >> 32) as u32;
    let after = After::from_raw(layout::load(memory, entry + chunk_entry::AFTER_AT));
    match word & 0xffff {
        0 if word == 0 => Some(Extent::Free),
        STATE_USED | STATE_SHARED => {
            Some(Extent::Used { kind, owner, count, shared: word & 0xffff == STATE_SHARED })
        }
        STATE_DRAINING if count == 1 => Some(Extent::Draining { kind, after }),
        STATE_FREED => Some(Extent::Freed { kind, count, after }),
        _ => None,
    }
}

fn bad(why: impl Into<String>) -> ControlError {
    ControlError::BadRequest { why: why.into() }
}

#[cfg(test)]
mod tests;
