//! Chunks that change their class while others work.
//!
//! A chunk of objects serves one index and class, and any number of sessions know it and claim objects in it by CAS. So that its memory can
//! serve something else, nobody may know it any more:
//!
//! 1. **Mark**: a chunk that is nearly empty is *draining*, in the table and in its header. It is given to nobody for more; its own type may
//!    have it back ([`Choice::Inherit`](super::Choice)).
//! 2. **First flush**, asked for after the mark: every session looks at the headers of the chunks that it knows before it claims
//!    in one again, gives back the free objects in its hands, and lets the operations end that began before. From then on bits are only
//!    cleared, by those who free what lives there.
//! 3. **Empty**: the chunk is freed. Its own type may have it at once.
//! 4. **Second flush**, asked for after that: hints that were picked up while objects lived there go. Then it serves any class and index.
//!
//! Only the coordinator knows which flush is newer than a mark. So a chunk waits for a *stamp*, a number of whoever asked, who asks for a flush
//! and says then which one it was. If that session ends before it does, or found what it wanted and asks anew, its stamps are replaced by those
//! of who asks next: a later flush is as good. A session asks once at a time.
//!
//! Every step is one commit word, and may be repeated.

use super::{After, Choice, ChunkTable, ChunkType, Extent, Want};
use farwood_fabric::addr::{RegionId, SessionId};
use farwood_fabric::control::{ControlError, ObjectChunk, PAGE_CLASS};
use farwood_fabric::server::ServerMemory;

/// A chunk is nearly empty if at most this part of its objects is taken, or so many, as sessions may have in their hands, but no more
/// than half of them.
const NEARLY_EMPTY_ONE_IN: u32 = 16;
const IN_HANDS: u32 = 64;
/// So many words of bitmaps are looked at in one call, and so many chunks are marked, at most: a server has better to do.
const MAX_WORDS: u64 = 256 << 10;
const MAX_MARKS: usize = 64;
/// Stamps: the session's term, then a number of its own.
const STAMPS_PER_TERM_LOG2: u32 = 20;

/// What somebody wants who found no chunk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Drain {
    pub(crate) kind: ChunkType,
    /// For the flush that will be asked for.
    pub(crate) stamp: u64,
    /// The stamp before, and the flush that was asked for after it.
    pub(crate) flushing: Option<(u64, u64)>,
    pub(crate) flushed_through: u64,
}

/// What came of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Drained {
    /// A chunk can be had.
    pub(crate) is_ready: bool,
    /// So many chunks wait for a flush.
    pub(crate) waiting: u32,
}

/// The term of the session that gave a stamp.
fn term_of(stamp: u64) -> u64 {
    stamp >> STAMPS_PER_TERM_LOG2
}

impl ChunkTable {
    /// Goes on with chunks that are being drained, and marks others if no chunk can be had for `drain.kind`.
    pub(crate) fn drain(
        &mut self,
        memory: &dyn ServerMemory,
        caller: SessionId,
        drain: Drain,
        is_active: impl Fn(u64) -> bool,
    ) -> Result<Drained, ControlError> {
        let Drain { kind, stamp, flushing, flushed_through } = drain;
        let want = Want { kind, count: 1, flushed_through };
        self.check(want)?;
        let waiting: Vec<_> = self.heads().filter(|(_, extent)| extent.after().is_some()).collect();
        for (at, extent) in waiting {
            let mut next = extent;
            match (extent.after(), flushing) {
                (Some(After::Stamp(held)), Some((flushed, generation))) if held == flushed => {
                    next = extent.waiting_for(After::Flush(generation));
                }
                (Some(After::Stamp(held)), _)
                    if held != stamp && (term_of(held) == term_of(stamp) || !is_active(term_of(held))) =>
                {
                    next = extent.waiting_for(After::Stamp(stamp));
                }
                _ => {}
            }
            if let Extent::Draining { kind, after } = next {
                if after.is_through(flushed_through) && !self.holds_objects(memory, at, kind) {
                    next = Extent::Freed { kind, count: 1, after: After::Stamp(stamp) };
                }
            }
            if next != extent {
                self.commit(memory, at, next);
            }
        }
        let is_ready = |table: &Self| !matches!(table.choose(memory, caller, want), Choice::Full { .. });
        let mut ready = is_ready(self);
        if !ready {
            self.mark(memory, kind, stamp);
            ready = is_ready(self);
        }
        let waits = |extent: &Extent| extent.after().is_some_and(|after| !after.is_through(flushed_through));
        let waiting = self.heads().filter(|(_, extent)| waits(extent)).map(|_| 1).sum();
        Ok(Drained { is_ready: ready, waiting })
    }

    /// Marks chunks of other types that are nearly empty.
    fn mark(&mut self, memory: &dyn ServerMemory, wanted: ChunkType, stamp: u64) {
        let (mut words, mut marks) = (0, Vec::new());
        let first = self.next_mark.min(self.chunks);
        // Not always the same ones, if all cannot be looked at.
        for at in (first..self.chunks).chain(0..first) {
            let Extent::Used { kind, .. } = self.extents[at as usize] else { continue };
            if kind == wanted || kind.object_bytes == 0 || kind.class == PAGE_CLASS {
                continue;
            }
            let Some(objects) = ObjectChunk::new(self.chunk_bytes, kind.object_bytes) else { continue };
            if words >= MAX_WORDS || marks.len() == MAX_MARKS {
                self.next_mark = at;
                break;
            }
            let few = (objects.objects / NEARLY_EMPTY_ONE_IN).max(IN_HANDS.min(objects.objects / 2));
            let (taken, looked_at) = self.count_taken(memory, at, objects, few);
            words += looked_at;
            if taken <= few {
                marks.push((at, kind));
            }
        }
        for (at, kind) in marks {
            self.commit(memory, at, Extent::Draining { kind, after: After::Stamp(stamp) });
            self.mark_drained(memory, at, true);
        }
    }

    /// How many objects of a chunk are taken, counted up to a limit, and how many words of its bitmap were looked at.
    fn count_taken(&self, memory: &dyn ServerMemory, at: u32, objects: ObjectChunk, most: u32) -> (u32, u64) {
        let bitmap = self.offset(at) + ObjectChunk::BITMAP_OFFSET;
        let mut taken = 0;
        for word in 0..objects.bitmap_words() {
            let bits = memory.load(RegionId::MAIN, bitmap + word * 8) & objects.word_mask(word);
            taken += bits.count_ones();
            if taken > most {
                return (taken, word + 1);
            }
        }
        (taken, objects.bitmap_words())
    }

    /// Writes into a chunk's header whether it is being drained. After the table says so: whoever looks before that has not flushed.
    pub(super) fn mark_drained(&self, memory: &dyn ServerMemory, at: u32, is_drained: bool) {
        let word = self.offset(at) + ObjectChunk::DRAINED_AT;
        if memory.load(RegionId::MAIN, word) != u64::from(is_drained) {
            memory.store(RegionId::MAIN, word, u64::from(is_drained));
        }
    }

    /// Makes the headers say what the table says, after a crash between the two.
    pub(super) fn mend_headers(&self, memory: &dyn ServerMemory) {
        for (at, extent) in self.heads() {
            match extent {
                Extent::Used { kind, .. } if kind.object_bytes > 0 => self.mark_drained(memory, at, false),
                Extent::Draining { .. } => self.mark_drained(memory, at, true),
                _ => {}
            }
        }
    }
}

impl Extent {
    /// The flush that it waits for.
    fn after(self) -> Option<After> {
        match self {
            Self::Draining { after, .. } | Self::Freed { after, .. } => Some(after),
            Self::Free | Self::Used { .. } | Self::Within => None,
        }
    }

    /// The same, waiting for another one.
    fn waiting_for(self, after: After) -> Self {
        match self {
            Self::Draining { kind, .. } => Self::Draining { kind, after },
            Self::Freed { kind, count, .. } => Self::Freed { kind, count, after },
            other => other,
        }
    }
}
