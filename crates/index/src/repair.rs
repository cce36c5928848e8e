//! Leaks: objects that are taken and that nothing in an index leads to; counted, and freed while the index is out of
//! use.
//!
//! A set bit in a chunk's bitmap says that an object is linked, or in the hands of a session. If no session but ours is
//! in the pool and ours has nothing in its hands, a set bit that no walk of the index explains is a leak. Old versions
//! left such when sessions died.
//!
//! 1. Recover the dead. Take the index out of use ([`Request::TakeOffline`]): refused unless this session is alone in
//!    the pool; from then on nobody else can open the index, until this session says so or ends.
//! 2. Walk the index ([`Engine::check`], [`Engine::extents`]). Any damage ends the repair here, with nothing freed.
//! 3. Give back all that this session has in its hands ([`crate::shared::heap::Heap::close`]).
//! 4. Compare the bitmaps with what was found (`census`). An object that is linked and whose bit is clear is damage,
//!    too.
//! 5. Clear the bits of what is leaked, word by word, by CAS from the word that was compared; free raw bytes that
//!    nothing names.
//!
//! Whoever dies in the middle leaves a prefix of step 5, which is as right as the whole. It is fenced before anybody
//! else can open the index. Nothing is written but bits of unlinked objects, and what any operation mends that comes by
//! what a dead session left.

mod census;

use crate::Pool;
use crate::api::IndexError;
use crate::engine::Engine;
use crate::shared::heap::Class;
use crate::shared::surely;
use census::{Census, Word};
use farwood_fabric::control::{ControlError, IndexId, IndexInfo, Reply, Request};
use farwood_fabric::{
    Batch, CallError, Endpoint, FabricError, GlobalAddr, ServerId, Session, SessionOptions, marks,
};
use std::collections::BTreeMap;
use std::fmt;

/// How many words of bitmaps are changed at a time.
const WORDS_AT_A_TIME: usize = 64;
/// How often that is repeated through lost completions.
const MAX_LOST: u32 = 16;

/// What is done with leaks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// They are counted. Nothing is freed.
    DryRun,
    /// They are freed.
    Free,
}

/// How far a repair has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Stage {
    /// The index is walked.
    Walking,
    /// So many chunks have been compared, of so many.
    Comparing {
        /// So many.
        chunks: u64,
        /// Of so many.
        of: u64,
    },
    /// So many leaks have been freed, of so many.
    Freeing {
        /// So many objects.
        objects: u64,
        /// Of so many.
        of: u64,
    },
}

/// Objects of one kind.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Count {
    /// How many.
    pub objects: u64,
    /// Bytes of all.
    pub bytes: u64,
}

/// What nothing leads to.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Leaks {
    /// Objects, by the number of their class and the bytes of one.
    pub objects: BTreeMap<(u16, u32), Count>,
    /// Extents of raw bytes.
    pub extents: Count,
    /// Chunks of indexes that do not exist any more.
    pub chunks: Count,
}

impl Leaks {
    /// All of them.
    pub fn total(&self) -> Count {
        let mut total = Count::default();
        for count in self.objects.values().chain([&self.extents, &self.chunks]) {
            total.objects += count.objects;
            total.bytes += count.bytes;
        }
        total
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.total().objects == 0
    }
}

/// What was found.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Findings {
    /// Objects that the index has.
    pub linked: u64,
    /// What nothing leads to; `None`, if others are in the pool, or came meanwhile: what they have in their hands looks
    /// the same.
    pub leaks: Option<Leaks>,
}

/// Walks an index and verifies it, and counts what is leaked, if nobody else is in the pool. The index stays in use.
pub async fn check<E: Engine>(
    pool: &Pool,
    endpoint: &Endpoint,
    engine: &E,
    index: &str,
    progress: &mut dyn FnMut(Stage),
) -> Result<Findings, IndexError> {
    let dead = pool.recover_all(endpoint).await?;
    let is_alone = is_alone(pool, endpoint).await?;
    let info = pool.open_index(&endpoint.op(), index, None).await?;
    progress(Stage::Walking);
    let walked = walk(pool, endpoint, engine, &info).await;
    let walked = walked.map_err(|error| match error {
        IndexError::Corrupt { what } if !dead.is_empty() => IndexError::Unrecovered { sessions: dead, what },
        error => error,
    })?;
    let mut findings = Findings { linked: walked.objects.len() as u64, leaks: None };
    if !is_alone {
        return Ok(findings);
    }
    empty_hands(pool, endpoint).await?;
    let census = Census::take(pool, endpoint, &info, &walked, progress).await;
    // Whoever came meanwhile may have linked and freed what it likes.
    if is_alone_still(pool, endpoint).await? {
        findings.leaks = Some(census?.leaks);
    }
    Ok(findings)
}

/// Frees what is leaked of an index, or only counts it, while the index is out of use. This session must not have it
/// open, and must be the only one in the pool: [`ControlError::IndexInUse`] says who else is. An index that is damaged
/// is left as it is: [`IndexError::Corrupt`].
pub async fn repair<E: Engine>(
    pool: &Pool,
    endpoint: &Endpoint,
    engine: &E,
    index: &str,
    mode: Mode,
    progress: &mut dyn FnMut(Stage),
) -> Result<Findings, IndexError> {
    let sessions = pool.recover_all(endpoint).await?;
    if !sessions.is_empty() {
        return Err(IndexError::Unrecovered { sessions, what: "the repair cannot begin".to_owned() });
    }
    let offline = Offline::take(pool, endpoint, index).await?;
    let repaired = sweep(pool, endpoint, engine, &offline, mode, progress).await;
    let ended = offline.end(endpoint).await;
    let findings = repaired?;
    ended?;
    Ok(findings)
}

/// The right to have an index alone.
#[derive(Debug)]
struct Offline {
    info: IndexInfo,
    seal: u64,
}

impl Offline {
    async fn take(pool: &Pool, endpoint: &Endpoint, index: &str) -> Result<Self, IndexError> {
        let request = Request::TakeOffline { name: index.to_owned() };
        let Reply::Offline { info, seal } = endpoint.op().control(ServerId::COORDINATOR, &request).await?
        else {
            return Err(FabricError::from(CallError::Malformed).into());
        };
        let offline = Self { info, seal };
        if pool.has_open(offline.info.id) {
            offline.end(endpoint).await?;
            let why = format!("this session has index '{index}' open; drop its handles before the repair");
            return Err(IndexError::BadConfig { why });
        }
        marks::hit("index_taken_offline");
        Ok(offline)
    }

    async fn end(self, endpoint: &Endpoint) -> Result<(), FabricError> {
        let request = Request::BringOnline { index: self.info.id };
        endpoint.op().control(ServerId::COORDINATOR, &request).await.map(drop)
    }
}

/// What an index holds.
struct Walked {
    objects: Vec<(Class, GlobalAddr)>,
    extents: Vec<GlobalAddr>,
}

async fn walk<E: Engine>(
    pool: &Pool,
    endpoint: &Endpoint,
    engine: &E,
    info: &IndexInfo,
) -> Result<Walked, IndexError> {
    let attached = engine.attach(pool, endpoint, &info.name).await?;
    let mut objects = engine.check(&attached, endpoint).await?;
    let extents = engine.extents(&attached, endpoint).await?;
    objects.sort_unstable_by_key(|(_, addr)| *addr);
    if let Some(pair) = objects.windows(2).find(|pair| pair[0].1 == pair[1].1) {
        return Err(corrupt(format!("two ways lead to the object at {}", pair[0].1)));
    }
    Ok(Walked { objects, extents })
}

/// Gives back whatever this session has in its hands: free objects, retired ones, pages of its journal.
async fn empty_hands(pool: &Pool, endpoint: &Endpoint) -> Result<(), IndexError> {
    if !pool.session().settled(endpoint).await || pool.heap().close(endpoint).await? > 0 {
        return Err(IndexError::Contended { what: "the end of what this session retired", attempts: 1 });
    }
    Ok(())
}

async fn sweep<E: Engine>(
    pool: &Pool,
    endpoint: &Endpoint,
    engine: &E,
    offline: &Offline,
    mode: Mode,
    progress: &mut dyn FnMut(Stage),
) -> Result<Findings, IndexError> {
    progress(Stage::Walking);
    let walked = walk(pool, endpoint, engine, &offline.info).await?;
    empty_hands(pool, endpoint).await?;
    let census = Census::take(pool, endpoint, &offline.info, &walked, progress).await?;
    marks::hit("repair_compared");
    if mode == Mode::Free {
        let of = census.words.iter().map(|word| u64::from(word.leaked.count_ones())).sum();
        let mut objects = 0;
        for some in census.words.chunks(WORDS_AT_A_TIME) {
            clear(endpoint, some.to_vec()).await?;
            marks::hit("repair_cleared_some");
            objects += some.iter().map(|word| u64::from(word.leaked.count_ones())).sum::<u64>();
            progress(Stage::Freeing { objects, of });
        }
        free_extents(pool, endpoint, offline, &census.extents).await?;
        for index in &census.unknown {
            release(pool, endpoint, *index).await?;
        }
    }
    Ok(Findings { linked: walked.objects.len() as u64, leaks: Some(census.leaks) })
}

/// Clears bits, each word by CAS from what it was when it was compared. Nobody else changes it: a word that is anything
/// else ends the repair.
async fn clear(endpoint: &Endpoint, mut words: Vec<Word>) -> Result<(), IndexError> {
    let op = endpoint.op();
    let mut is_in_doubt = false;
    for _ in 0..MAX_LOST {
        let cas = |word: &Word| {
            let mut batch = Batch::new(word.at.server());
            batch.cas(word.at, word.seen, word.seen & !word.leaked);
            batch
        };
        let results = op.submit_all(words.iter().map(cas)).await;
        let (mut again, mut failures) = (Vec::new(), Vec::new());
        for (word, result) in words.into_iter().zip(results) {
            match result.map(|done| done.previous(0)) {
                Ok(found) if found == word.seen => {}
                // By the CAS whose completion was lost.
                Ok(found) if is_in_doubt && found == word.seen & !word.leaked => {}
                Ok(found) => {
                    return Err(corrupt(format!(
                        "the bitmap word at {} became {found:#x} while the index was out of use, it was {:#x}",
                        word.at, word.seen
                    )));
                }
                Err(failure) => {
                    failures.push(failure.error);
                    again.push(word);
                }
            }
        }
        if again.is_empty() {
            return Ok(());
        }
        is_in_doubt = true;
        for error in failures {
            surely::reconnected(&op, error).await?;
        }
        words = again;
    }
    Err(FabricError::RetriesExhausted { what: "a CAS", attempts: MAX_LOST }.into())
}

/// Frees extents of raw bytes: for the same class of the index at once, for others after a flush.
async fn free_extents(
    pool: &Pool,
    endpoint: &Endpoint,
    offline: &Offline,
    extents: &[GlobalAddr],
) -> Result<(), IndexError> {
    if extents.is_empty() {
        return Ok(());
    }
    let generation = pool.session().request_flush(&endpoint.op()).await?;
    for extent in extents {
        let (index, offset, seal) = (offline.info.id, extent.offset(), offline.seal);
        let request = Request::FreeExtent { index, offset, generation, seal };
        endpoint.op().control(extent.server(), &request).await?;
        marks::hit("repair_freed_extent");
    }
    Ok(())
}

/// Frees what is left of an index that was dropped.
async fn release(pool: &Pool, endpoint: &Endpoint, index: IndexId) -> Result<(), IndexError> {
    match pool.session().release_index(&endpoint.op(), index).await {
        // It is there by now: nothing of it is leaked.
        Err(error) if matches!(error.control(), Some(ControlError::BadRequest { .. })) => Ok(()),
        released => Ok(released.map(drop)?),
    }
}

/// Whether no other session is in the pool.
async fn is_alone(pool: &Pool, endpoint: &Endpoint) -> Result<bool, IndexError> {
    let sessions = pool.session().list(&endpoint.op()).await?;
    Ok(sessions.iter().all(|info| info.session == pool.session().id()))
}

/// Whether nobody has joined since this session did. Terms are counted, so a session that joins now has the next one;
/// unless there is no number left for it.
async fn is_alone_still(pool: &Pool, endpoint: &Endpoint) -> Result<bool, IndexError> {
    if !is_alone(pool, endpoint).await? {
        return Ok(false);
    }
    let session = pool.session();
    let Ok(probe) = Session::open(session.cluster(), SessionOptions::default()).await else {
        return Ok(false);
    };
    let is_next = probe.term() == session.term() + 1;
    probe.close_unused().await?;
    Ok(is_next)
}

fn corrupt(what: String) -> IndexError {
    IndexError::Corrupt { what }
}

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({} bytes)", self.objects, self.bytes)
    }
}
