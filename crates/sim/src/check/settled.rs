//! What is left when everybody has ended or was recovered: nothing that somebody would have to clean up.
//!
//! - No session but the checker's is listed, dead or alive.
//! - No lock is held.
//! - No index is half made or half dropped.
//! - No journal but the checker's holds a word: what it lists would be freed, or done again, for whoever gets the number next.

use farwood_fabric::control::{IndexState, JOURNAL_BYTES};
use farwood_fabric::{Endpoint, FabricError, GlobalAddr, RegionId};
use farwood_index::Pool;
use farwood_index::shared::surely;

/// How much is read at a time.
const STEP_BYTES: u64 = 4096;

/// What is left over, in words; `None` if nothing is.
pub async fn left_over(
    pool: &Pool,
    endpoint: &Endpoint,
    max_sessions: u16,
) -> Result<Option<String>, FabricError> {
    let (session, op) = (pool.session(), endpoint.op());
    let listed = session.list(&op).await?;
    if let Some(other) = listed.iter().find(|info| info.session != session.id()) {
        return Ok(Some(format!("session {} (term {}) is {:?}", other.session, other.term, other.state)));
    }
    let indexes = pool.list_indexes(&op).await?;
    if let Some(half) = indexes.iter().find(|info| info.state != IndexState::Ready) {
        return Ok(Some(format!("index '{}' is {:?}", half.name, half.state)));
    }
    let lock_bytes = endpoint.capabilities().lock_memory_bytes;
    for server in session.servers() {
        let locks = GlobalAddr::new(*server, RegionId::LOCK, 0);
        if let Some((at, word)) = find(endpoint, locks, lock_bytes, |word| word >> 48 != 0).await? {
            return Ok(Some(format!("the lock at {at} is held ({word:#x})")));
        }
        let Some(ours) = session.journal(*server) else { continue };
        let before = u64::from(session.id().get() - 1) * JOURNAL_BYTES;
        let first = GlobalAddr::new(*server, RegionId::BOARD, ours.offset() - before);
        for slot in (0..max_sessions).filter(|slot| slot + 1 != session.id().get()) {
            let journal = first.add(u64::from(slot) * JOURNAL_BYTES);
            if let Some((at, word)) = find(endpoint, journal, JOURNAL_BYTES, |word| word != 0).await? {
                let why = format!("the journal of number {} has {word:#x} at {at}", slot + 1);
                return Ok(Some(why));
            }
        }
    }
    Ok(None)
}

/// The first word in so many bytes that is as it must not be.
async fn find(
    endpoint: &Endpoint,
    from: GlobalAddr,
    bytes: u64,
    is_bad: impl Fn(u64) -> bool,
) -> Result<Option<(GlobalAddr, u64)>, FabricError> {
    let op = endpoint.op();
    let mut at = 0;
    while at < bytes {
        let step = STEP_BYTES.min(bytes - at);
        let read = surely::read(&op, from.add(at), usize::try_from(step).unwrap_or(0)).await?;
        for word in (0..step).step_by(8) {
            let found = read.word(usize::try_from(word).unwrap_or(0));
            if is_bad(found) {
                return Ok(Some((from.add(at + word), found)));
            }
        }
        at += step;
    }
    Ok(None)
}
