//! Memory: what the bitmaps say is in use is what the index reaches.
//!
//! Read when all sessions but the checker's have left or were recovered. A reachable object whose bit is clear is an error at
//! any time: it would be handed out again. A set bit without a reachable object is a leak; sessions that died, and
//! completions that were lost, may leave a bounded number of those (see `shared::heap`), nothing else may.

use farwood_fabric::control::{ControlError, MAIN_BASE, ObjectChunk, Reply, Request};
use farwood_fabric::{CallError, Endpoint, FabricError, GlobalAddr, RegionId, Session};
use farwood_index::shared::heap::Class;
use farwood_index::shared::surely;
use std::collections::BTreeSet;
use std::fmt;

/// How memory is used.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Usage {
    /// Objects that are reachable and whose bit is set.
    pub in_use: u64,
    /// Objects whose bit is set, but nothing leads to them.
    pub leaked: Vec<GlobalAddr>,
    /// Objects that are reachable, but whose bit is clear.
    pub dangling: Vec<GlobalAddr>,
    /// Chunks of sessions that do not exist any more.
    pub lost_chunks: u64,
    /// Chunks in use, of any kind.
    pub chunks: u64,
}

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} objects in use, {} leaked {:?}, {} dangling {:?}, {} chunks of sessions that are gone",
            self.in_use,
            self.leaked.len(),
            self.leaked.iter().take(5).collect::<Vec<_>>(),
            self.dangling.len(),
            self.dangling.iter().take(5).collect::<Vec<_>>(),
            self.lost_chunks
        )
    }
}

/// Compares the bitmaps of all object chunks with what is reachable.
pub async fn measure(
    session: &Session,
    endpoint: &Endpoint,
    reachable: &[(Class, GlobalAddr)],
) -> Result<Usage, FabricError> {
    let op = endpoint.op();
    let mut unseen: BTreeSet<GlobalAddr> = reachable.iter().map(|(_, addr)| *addr).collect();
    let living: BTreeSet<_> = session.list(&op).await?.into_iter().map(|info| info.session).collect();
    let mut usage = Usage::default();
    for server in session.servers() {
        let chunk_bytes = session.cluster().view().servers[server.index()].chunk_bytes;
        let Reply::ChunkList { chunks, .. } =
            op.control(*server, &Request::ListChunks { owner: None }).await?
        else {
            return Err(CallError::Malformed.into());
        };
        for chunk in chunks {
            usage.chunks += 1;
            usage.lost_chunks += u64::from(!chunk.owner.is_none() && !living.contains(&chunk.owner));
            if chunk.object_bytes == 0 {
                continue;
            }
            let layout = ObjectChunk::new(chunk_bytes, chunk.object_bytes).ok_or_else(|| {
                let why = format!("a chunk of objects of {} bytes", chunk.object_bytes);
                FabricError::from(CallError::from(ControlError::BadRequest { why }))
            })?;
            debug_assert!(chunk.offset >= MAIN_BASE);
            let at = GlobalAddr::new(*server, RegionId::MAIN, chunk.offset);
            for word in 0..layout.bitmap_words() {
                let bits = surely::read_word(&op, at.add(ObjectChunk::BITMAP_OFFSET + word * 8)).await?;
                for bit in (0..64).filter(|bit| bits >> bit & 1 == 1) {
                    let object = u32::try_from(word * 64 + bit).unwrap_or(u32::MAX);
                    let addr = at.add(layout.object_offset(object));
                    if unseen.remove(&addr) {
                        usage.in_use += 1;
                    } else {
                        usage.leaked.push(addr);
                    }
                }
            }
        }
    }
    usage.dangling = unseen.into_iter().collect();
    Ok(usage)
}
