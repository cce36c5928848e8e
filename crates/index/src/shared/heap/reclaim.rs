//! Chunks of other classes, for a class that finds no room.
//!
//! An operation that found the pool full has ended, since its pin would hold up what is to come. It waits until what its session had retired is
//! free ([`Heap::come_again`]); if that brings nothing, the memory may be in chunks that serve other classes and are empty, or are nearly
//! and other sessions have the rest in their hands. Then
//!
//! 1. the server that had no chunk is asked to drain some (`DrainChunks`);
//! 2. a flush is asked for: nobody claims in those any more, and what was in hands is given back;
//! 3. those that are empty by then need another flush, for hints; then they serve any class.
//!
//! One task of a session does that at a time, for all classes that lacked something. A pool that is really full answers so: then it is not asked
//! again for a while, unless the session has given back as much as a chunk since. A flush costs everybody their caches, so it is asked for if
//! there are chunks that wait for it, and now and then for what others have in their hands.

use super::{Class, Heap, Waits};
use farwood_fabric::clock::{MILLISECOND, Nanos, SECOND};
use farwood_fabric::control::{Reply, Request};
use farwood_fabric::{CallError, Endpoint, FabricError, ServerId, marks};

/// How often the servers are asked: to mark, after the first flush, after the second, and once more if others were at it.
const MAX_ROUNDS: u32 = 5;
/// How often it is looked whether a flush is through, and how long is waited in between, twice as long as before each time.
const MAX_FLUSH_WAITS: u32 = 120;
const FIRST_WAIT_NS: Nanos = 100_000;
const LONGEST_WAIT_NS: Nanos = 10 * MILLISECOND;
/// How long nobody asks again after it was in vain, at first and at most.
const FIRST_PAUSE_NS: Nanos = 10 * MILLISECOND;
const LONGEST_PAUSE_NS: Nanos = 200 * MILLISECOND;
/// How long nobody asks for a flush for which no chunk waits.
const HANDS_PAUSE_NS: Nanos = SECOND;
/// How often an operation has that done: others may take what it brings.
const MAX_RECLAIMS: u32 = 4;
/// How often others look whether the one who asks is done, and how long they wait in between.
const MAX_WAITS: u32 = 2_000;
const WAIT_NS: Nanos = MILLISECOND;
/// So many classes are remembered that found no room.
const MAX_LACKING: usize = 16;
/// Stamps are the session's term and a number of its own.
const STAMPS_PER_TERM_LOG2: u32 = 20;

/// Who lacked what, and when it may be asked for.
#[derive(Default, Debug)]
pub(super) struct Reclaim {
    lacking: Vec<(ServerId, Class)>,
    is_under_way: bool,
    /// Whether it brought something the last time.
    was_good: bool,
    not_before: Nanos,
    pause_ns: Nanos,
    /// How many bytes the session has given back since.
    given_back: u64,
    /// When a flush may be asked for for which no chunk waits.
    no_hands_before: Nanos,
    stamps: u64,
}

impl Reclaim {
    /// A server had no chunk for this class.
    pub(super) fn note_lack(&mut self, server: ServerId, class: Class) {
        if self.lacking.len() < MAX_LACKING && !self.lacking.contains(&(server, class)) {
            self.lacking.push((server, class));
        }
    }

    /// The session gives an object back.
    pub(super) fn note_given_back(&mut self, class: Class) {
        self.given_back += u64::from(class.object_bytes);
    }

    /// Whether hands may be emptied now, and not soon again.
    fn may_empty_hands(&mut self, now: Nanos) -> bool {
        let may = now >= self.no_hands_before;
        if may {
            self.no_hands_before = now.saturating_add(HANDS_PAUSE_NS);
        }
        may
    }
}

/// The right to ask for chunks, which one task has at a time.
struct Reclaiming(Heap);

impl Reclaiming {
    fn begin(heap: &Heap, now: Nanos) -> Option<Self> {
        let mut state = heap.state();
        let reclaim = &mut state.reclaim;
        let (server, _) = reclaim.lacking.first()?;
        let is_too_soon = now < reclaim.not_before && reclaim.given_back < heap.chunk_bytes(*server);
        if reclaim.is_under_way || is_too_soon {
            return None;
        }
        reclaim.given_back = 0;
        reclaim.is_under_way = true;
        reclaim.was_good = false;
        drop(state);
        Some(Self(heap.clone()))
    }

    /// Notes whether it was of use.
    fn end(self, now: Nanos, was_good: bool) {
        let mut state = self.0.state();
        let reclaim = &mut state.reclaim;
        reclaim.was_good = was_good;
        reclaim.pause_ns =
            if was_good { 0 } else { (reclaim.pause_ns * 2).clamp(FIRST_PAUSE_NS, LONGEST_PAUSE_NS) };
        reclaim.not_before = now.saturating_add(reclaim.pause_ns);
    }
}

impl Drop for Reclaiming {
    fn drop(&mut self) {
        self.0.state().reclaim.is_under_way = false;
    }
}

impl Heap {
    /// For an operation that has waited for all else: chunks of other classes. Whether it may begin anew.
    pub(super) async fn reclaim_for(
        &self,
        endpoint: &Endpoint,
        waits: &mut Waits,
    ) -> Result<bool, FabricError> {
        if waits.reclaimed == MAX_RECLAIMS {
            return Ok(false);
        }
        waits.reclaimed += 1;
        let was_good = Box::pin(self.reclaim(endpoint)).await?;
        if was_good {
            waits.count = 0;
            waits.reused = None;
        }
        Ok(was_good)
    }

    /// Gets chunks of other classes for those that lacked room; whether there are any.
    pub async fn reclaim(&self, endpoint: &Endpoint) -> Result<bool, FabricError> {
        let Some(reclaiming) = Reclaiming::begin(self, endpoint.now()) else {
            return Ok(self.wait_for_reclaimer(endpoint).await);
        };
        let lacking = std::mem::take(&mut self.state().reclaim.lacking);
        let was_good = self.drain_for(endpoint, &lacking).await;
        reclaiming.end(endpoint.now(), was_good.as_ref().is_ok_and(|good| *good));
        was_good
    }

    /// Waits for whoever asks already; whether that brought something.
    async fn wait_for_reclaimer(&self, endpoint: &Endpoint) -> bool {
        for _ in 0..MAX_WAITS {
            {
                let state = self.state();
                if !state.reclaim.is_under_way {
                    return state.reclaim.was_good;
                }
            }
            endpoint.sleep(WAIT_NS).await;
        }
        false
    }

    async fn drain_for(
        &self,
        endpoint: &Endpoint,
        lacking: &[(ServerId, Class)],
    ) -> Result<bool, FabricError> {
        let (mut flushed_stamp, mut flush) = (0, 0);
        for _ in 0..MAX_ROUNDS {
            let stamp = self.next_stamp();
            // Each class wants a chunk of some server.
            let mut without: Vec<Class> = lacking.iter().map(|(_, class)| *class).collect();
            let mut waiting = 0;
            for (server, class) in lacking {
                let request = Request::DrainChunks {
                    index: class.index,
                    class: class.class,
                    object_bytes: class.object_bytes,
                    stamp,
                    flushed_stamp,
                    flush,
                    flushed_through: self.inner.session.flushed_through(),
                };
                match endpoint.op().control(*server, &request).await? {
                    Reply::Draining { is_ready, waiting: more } => {
                        waiting += more;
                        if is_ready {
                            without.retain(|other| other != class);
                        }
                    }
                    _ => return Err(CallError::Malformed.into()),
                }
            }
            let some_have = lacking.iter().any(|(_, class)| !without.contains(class));
            // Even if no chunk is nearly empty, others may have in their hands what makes one so.
            let is_over = waiting == 0 && !self.state().reclaim.may_empty_hands(endpoint.now());
            if without.is_empty() || is_over {
                if some_have {
                    marks::hit("chunks_reclaimed");
                }
                return Ok(some_have);
            }
            (flushed_stamp, flush) = (stamp, self.inner.session.request_flush(&endpoint.op()).await?);
            if !self.wait_for_flush(endpoint, flush).await? {
                return Ok(false);
            }
        }
        Ok(false)
    }

    /// Waits until every session has flushed, a bounded time. Whether they have.
    async fn wait_for_flush(&self, endpoint: &Endpoint, flush: u64) -> Result<bool, FabricError> {
        let session = &self.inner.session;
        let mut wait_ns = FIRST_WAIT_NS;
        for _ in 0..MAX_FLUSH_WAITS {
            // Those who have nothing to say hurry, too.
            session.retire_stamp(endpoint, true).await?;
            if session.flushed_through() >= flush {
                return Ok(true);
            }
            self.clear_flushed(endpoint).await?;
            endpoint.sleep(wait_ns).await;
            wait_ns = LONGEST_WAIT_NS.min(wait_ns * 2);
        }
        marks::hit("flush_awaited_in_vain");
        Ok(false)
    }

    fn next_stamp(&self) -> u64 {
        let mut state = self.state();
        state.reclaim.stamps += 1;
        self.inner.session.term() << STAMPS_PER_TERM_LOG2
            | state.reclaim.stamps & ((1 << STAMPS_PER_TERM_LOG2) - 1)
    }
}
