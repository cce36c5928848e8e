//! What a flush means for the objects of a session: a chunk that it knows may be another's soon.
//!
//! A memory server that needs chunks for other classes *drains* those that are nearly empty, and says so in their headers. After a flush that was
//! asked for later, nobody may claim objects there. So at each flush a session
//!
//! 1. forgets which chunks it knows: before it claims in one of them again it looks at its header ([`Heap::verify_chunks`]);
//! 2. gives back the free objects in its hands, so that chunks come to be empty. What it has in use meanwhile, and what it has retired,
//!    it gives back later, unless it knows the chunk again by then.
//!
//! The flush is done when the operations that began before have ended and 2 has happened ([`Heap::clear_flushed`]).

use super::{Class, ClassPool, Heap, State};
use crate::shared::surely;
use farwood_fabric::buf::Buf;
use farwood_fabric::control::ObjectChunk;
use farwood_fabric::{FabricError, GlobalAddr, Op, RegionId, ServerId, Session, marks};
use std::sync::Arc;

/// The headers of so many chunks are looked at in one round trip.
const AT_A_TIME: usize = 64;

impl ClassPool {
    /// Objects may be claimed in this chunk.
    fn learn(&mut self, chunk: u64) {
        if self.known.insert(chunk) {
            self.chunks.push(chunk);
        }
    }

    /// Objects may be claimed in this chunk, and are from now on. The session may have had it before.
    pub(super) fn turn_to(&mut self, chunk: u64) {
        self.unverified.retain(|other| *other != chunk);
        self.learn(chunk);
        self.cursor = self.chunks.iter().rposition(|other| *other == chunk).unwrap_or(0);
        self.word = 0;
    }

    fn flush(&mut self) {
        self.unverified.append(&mut self.chunks);
        self.known.clear();
        self.cursor = 0;
        self.word = 0;
        self.returning.extend(self.free.drain(..).map(|(addr, _)| addr));
    }
}

impl State {
    /// Whether there are objects to be given back.
    pub(super) fn is_returning(&self) -> bool {
        self.pools.values().any(|pool| !pool.returning.is_empty())
    }
}

impl Heap {
    /// From now on flushes of the session are the heap's, too.
    pub(super) fn flush_with(&self, session: &Session) {
        if self.inner.sabotage.ignore_flush {
            return;
        }
        let heap = Arc::downgrade(&self.inner);
        session.on_flush(move || {
            if let Some(inner) = heap.upgrade() {
                let heap = Self { inner };
                let mut state = heap.state();
                state.flushes += 1;
                state.pools.values_mut().for_each(ClassPool::flush);
            }
        });
    }

    pub(super) fn has_unverified(&self, server: ServerId, class: Class) -> bool {
        self.state().pools.get(&(server, class)).is_some_and(|pool| !pool.unverified.is_empty())
    }

    /// Looks at some chunks that were known before the last flush: those that still serve this class, and are not being drained, are known
    /// again. To be seen through: who is cut short forgets them.
    pub(super) async fn verify_chunks(&self, op: &Op, of: (ServerId, Class)) -> Result<(), FabricError> {
        let (some, flushes) = {
            let mut state = self.state();
            let flushes = state.flushes;
            let pool = state.pools.entry(of).or_default();
            let rest = pool.unverified.len().saturating_sub(AT_A_TIME);
            (pool.unverified.split_off(rest), flushes)
        };
        let at = |chunk: &u64| (GlobalAddr::new(of.0, RegionId::MAIN, *chunk), ObjectChunk::HEAD_BYTES);
        let heads = surely::read_many(op, &some.iter().map(at).collect::<Vec<_>>()).await;
        let mut state = self.state();
        let is_behind = state.flushes != flushes;
        let pool = state.pools.entry(of).or_default();
        match heads {
            Ok(heads) if !is_behind => {
                for (chunk, head) in some.into_iter().zip(&heads) {
                    if is_open_for(of.1, head) {
                        pool.learn(chunk);
                    } else {
                        marks::hit("drained_chunk_forgotten");
                    }
                }
                Ok(())
            }
            // What was read before a flush does not count after it.
            heads => {
                pool.unverified.extend(some);
                heads.map(drop)
            }
        }
    }
}

/// Whether a chunk with this header serves the class and is not being drained.
fn is_open_for(class: Class, head: &Buf) -> bool {
    let kind = u64::from(class.index) | u64::from(class.class) << 32;
    let drained_at = usize::try_from(ObjectChunk::DRAINED_AT).unwrap_or(0);
    head.word(0) == ObjectChunk::MAGIC
        && head.word(8) == kind
        && head.word(16) & 0xffff_ffff == u64::from(class.object_bytes)
        && head.word(drained_at) == 0
}
