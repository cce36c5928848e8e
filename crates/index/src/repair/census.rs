//! The bitmaps of an index beside what a walk of it has found.
//!
//! Everything is compared before anything is freed, so that damage is found first.

use super::{Leaks, Stage, Walked, corrupt};
use crate::Pool;
use crate::api::IndexError;
use crate::shared::heap::Class;
use crate::shared::surely;
use farwood_fabric::control::{ChunkInfo, ControlError, IndexId, IndexInfo, ObjectChunk, Reply, Request};
use farwood_fabric::{CallError, Endpoint, FabricError, GlobalAddr, RegionId, ServerId};
use std::collections::BTreeSet;

/// A word of a bitmap with bits that are set for nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Word {
    pub(super) at: GlobalAddr,
    /// What it was.
    pub(super) seen: u64,
    /// Those bits.
    pub(super) leaked: u64,
}

/// What nothing leads to, and where it is.
#[derive(Default, Debug)]
pub(super) struct Census {
    pub(super) leaks: Leaks,
    pub(super) words: Vec<Word>,
    pub(super) extents: Vec<GlobalAddr>,
    /// Indexes that do not exist, and have chunks.
    pub(super) unknown: BTreeSet<IndexId>,
}

impl Census {
    /// Compares all chunks of an index with what a walk has found, sorted by address. No session but this one is in the
    /// pool, and this one has nothing in its hands.
    pub(super) async fn take(
        pool: &Pool,
        endpoint: &Endpoint,
        info: &IndexInfo,
        walked: &Walked,
        progress: &mut dyn FnMut(Stage),
    ) -> Result<Self, IndexError> {
        let mut census = Self::default();
        let mut chunks = Vec::new();
        for server in pool.session().servers() {
            chunks.extend(list(endpoint, *server).await?.into_iter().map(|chunk| (*server, chunk)));
        }
        // Asked for after the chunks: an index that had some then and is not there now is gone.
        let known = pool.list_indexes(&endpoint.op()).await?;
        let (of, mut found, mut extents) = (chunks.len() as u64, 0, BTreeSet::new());
        for (n, (server, chunk)) in chunks.iter().enumerate() {
            let at = GlobalAddr::new(*server, RegionId::MAIN, chunk.offset);
            let bytes = pool.session().cluster().view().chunk_bytes(*server);
            if known.iter().all(|other| other.id != chunk.index) {
                census.unknown.insert(chunk.index);
                census.leaks.chunks.objects += u64::from(chunk.count);
                census.leaks.chunks.bytes += u64::from(chunk.count) * bytes;
            } else if chunk.index == info.id && chunk.object_bytes == 0 {
                extents.insert(at);
                if !walked.extents.contains(&at) {
                    census.extents.push(at);
                    census.leaks.extents.objects += 1;
                    census.leaks.extents.bytes += u64::from(chunk.count) * bytes;
                }
            } else if chunk.index == info.id {
                let linked = within(&walked.objects, at, bytes);
                found += linked.len();
                census.compare(endpoint, (at, bytes), chunk, linked).await?;
            }
            progress(Stage::Comparing { chunks: n as u64 + 1, of });
        }
        if found != walked.objects.len() {
            let outside = walked.objects.len() - found;
            return Err(corrupt(format!("{outside} linked objects are in no chunk of the index")));
        }
        match walked.extents.iter().find(|extent| !extents.contains(extent)) {
            Some(extent) => Err(corrupt(format!("the index has no raw bytes at {extent}"))),
            None => Ok(census),
        }
    }

    /// Compares one chunk of objects.
    async fn compare(
        &mut self,
        endpoint: &Endpoint,
        (at, bytes): (GlobalAddr, u64),
        chunk: &ChunkInfo,
        linked: &[(Class, GlobalAddr)],
    ) -> Result<(), IndexError> {
        let layout = ObjectChunk::new(bytes, chunk.object_bytes).ok_or_else(|| {
            let why = format!("a chunk of objects of {} bytes", chunk.object_bytes);
            FabricError::from(CallError::from(ControlError::BadRequest { why }))
        })?;
        let class = Class { index: chunk.index, class: chunk.class, object_bytes: chunk.object_bytes };
        let mut needed = vec![0u64; usize::try_from(layout.bitmap_words()).unwrap_or(0)];
        for (of, addr) in linked {
            let object = layout.object_at(addr.offset() - at.offset()).filter(|_| *of == class);
            let Some(object) = object else {
                return Err(corrupt(format!("the object at {addr} is of {of:?}, in a chunk of {class:?}")));
            };
            needed[object as usize / 64] |= 1 << (object % 64);
        }
        let bitmap = at.add(ObjectChunk::BITMAP_OFFSET);
        let seen = surely::read(&endpoint.op(), bitmap, needed.len() * 8).await?;
        for (number, needed) in (0u64..).zip(needed) {
            let set = seen.word(usize::try_from(number * 8).unwrap_or(0));
            let lacking = needed & !set;
            if lacking != 0 {
                let object = u32::try_from(number * 64).unwrap_or(0) + lacking.trailing_zeros();
                let addr = at.add(layout.object_offset(object));
                return Err(corrupt(format!("the object at {addr} is linked, but free to be used again")));
            }
            let leaked = set & !needed & layout.word_mask(number);
            if leaked != 0 {
                self.words.push(Word { at: bitmap.add(number * 8), seen: set, leaked });
                let count = self.leaks.objects.entry((chunk.class, chunk.object_bytes)).or_default();
                count.objects += u64::from(leaked.count_ones());
                count.bytes += u64::from(leaked.count_ones()) * u64::from(chunk.object_bytes);
            }
        }
        Ok(())
    }
}

/// The objects in one chunk, of objects in the order of their addresses.
fn within(objects: &[(Class, GlobalAddr)], at: GlobalAddr, bytes: u64) -> &[(Class, GlobalAddr)] {
    let from = objects.partition_point(|(_, addr)| *addr < at);
    let is_inside = |addr: &GlobalAddr| {
        (addr.server(), addr.region()) == (at.server(), at.region()) && addr.offset() < at.offset() + bytes
    };
    let count = objects[from..].iter().take_while(|(_, addr)| is_inside(addr)).count();
    &objects[from..from + count]
}

/// The chunks of a server that are in use.
async fn list(endpoint: &Endpoint, server: ServerId) -> Result<Vec<ChunkInfo>, IndexError> {
    match endpoint.op().control(server, &Request::ListChunks { owner: None }).await? {
        Reply::ChunkList { chunks, .. } => Ok(chunks),
        _ => Err(FabricError::from(CallError::Malformed).into()),
    }
}
