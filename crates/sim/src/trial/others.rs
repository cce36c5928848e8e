//! Indexes that come and go in the pool while another is tried, of another engine each time: one compute server creates, uses and
//! drops them, another uses them until they are gone under its hands.
//!
//! Each has keys of its own, so it knows what must be there. A handle answers as ever, or says that the index was dropped; when the
//! drop is complete, it says so.

use super::{HEARTBEAT_NS, INDEX, Log, Patience, Trial};
use farwood_fabric::clock::{MICROSECOND, Nanos};
use farwood_fabric::control::{ControlError, IndexId, IndexState};
use farwood_fabric::{Cluster, Endpoint, FabricError, marks};
use farwood_index::engine::{sherman, sphinx};
use farwood_index::pool::JoinOptions;
use farwood_index::{AnyEngine, Index, IndexError, OrderedIndex, Pool};
use fastrand::Rng;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

/// What they are called.
const NAME: &str = "other";
/// Keys of each of the two.
const KEYS: u64 = 12;
/// Operations on an index before it is dropped, or opened again.
const OPERATIONS: u32 = 24;
const PAUSE_NS: Nanos = 50 * MICROSECOND;
/// How often a compute server that was fenced joins again.
pub(super) const MAX_LIVES: u32 = 6;

/// One of the two.
pub(super) struct Guest {
    pub(super) cluster: Cluster,
    /// How it joins: it cleans up after those who use the index that is tried, too.
    pub(super) joins: JoinOptions,
    pub(super) trial: Trial,
    pub(super) log: Rc<RefCell<Log>>,
    /// The trial is over.
    pub(super) over: Rc<Cell<bool>>,
    /// It creates and drops, rather than only use what it finds.
    pub(super) is_maker: bool,
    /// Keys of the index that it uses of which it does not know what they hold: what it gave up, or what failed, may happen yet.
    pub(super) doubtful: RefCell<BTreeSet<u64>>,
    /// Which index that is.
    pub(super) used: Cell<Option<IndexId>>,
}

/// What must be under the keys; nothing is known of those that are missing.
type Known = BTreeMap<u64, Option<Vec<u8>>>;

impl Guest {
    /// As many lives as it takes until the trial is over.
    pub(super) async fn stay(self) {
        for life in 0..MAX_LIVES {
            let ended = self.live(life).await;
            if let Err(error) = ended {
                self.judge("an operation beside the trial", &error);
            }
            if self.over.get() || self.log.borrow().trouble.is_some() {
                return;
            }
        }
    }

    async fn live(&self, life: u32) -> Result<(), IndexError> {
        let pool = Pool::join_with(&self.cluster, self.joins.clone()).await?;
        let endpoint = pool.session().endpoint()?;
        pool.keep_alive(&endpoint, HEARTBEAT_NS);
        let seed = self.trial.seed ^ u64::from(life) << 8 ^ u64::from(self.is_maker);
        let mut rng = Rng::with_seed(seed ^ 0x07e5);
        while !self.over.get() && self.log.borrow().trouble.is_none() {
            let ended = if self.is_maker {
                self.make_and_drop(&pool, &endpoint, &mut rng).await
            } else {
                self.look_on(&pool, &endpoint, &mut rng).await
            };
            match ended {
                Err(IndexError::Fenced) => return Err(IndexError::Fenced),
                Err(error) => self.judge("an operation beside the trial", &error),
                Ok(()) => {}
            }
            endpoint.sleep(rng.u64(0..PAUSE_NS)).await;
        }
        pool.leave(&endpoint).await?;
        Ok(())
    }

    async fn make_and_drop(&self, pool: &Pool, endpoint: &Endpoint, rng: &mut Rng) -> Result<(), IndexError> {
        let engine = if rng.bool() {
            // Not the tiniest: it is opened by its name, with the settings that the catalog keeps.
            let config = sherman::Config { locks: 16, cache_bytes: 4096, ..sherman::Config::default() };
            AnyEngine::Sherman(sherman::Sherman::new(config.with_entries(8)))
        } else {
            AnyEngine::Sphinx(sphinx::Sphinx::new(sphinx::Config::tiny()))
        };
        let index = match Index::create(pool, endpoint, NAME, &engine).await {
            Ok(index) => index,
            // It was made or dropped by halves before.
            Err(error) => {
                let _ = Index::drop(pool, endpoint, NAME).await;
                return Err(error);
            }
        };
        let handle = index.handle(endpoint)?;
        self.doubtful.borrow_mut().clear();
        self.use_it(&handle, 0, rng).await?;
        Index::drop(pool, endpoint, NAME).await?;
        marks::hit("other_index_dropped");
        match handle.get(&0u64.to_be_bytes()).await {
            Err(IndexError::Dropped) => Ok(()),
            Err(error) => Err(error),
            Ok(_) => {
                let what = "a handle of an index that is dropped still answers".to_owned();
                self.judge("a get", &IndexError::Corrupt { what });
                Ok(())
            }
        }
    }

    async fn look_on(&self, pool: &Pool, endpoint: &Endpoint, rng: &mut Rng) -> Result<(), IndexError> {
        let handle = Index::open(pool, endpoint, NAME).await?.handle(endpoint)?;
        if self.trial.cancel > 0 {
            // After it was opened: if it is another one by now, what is doubtful of this one counts for that too.
            let infos = pool.list_indexes(&endpoint.op()).await?;
            let used = infos.iter().find(|info| info.name == NAME).map(|info| info.id);
            if self.used.replace(used) != used {
                self.doubtful.borrow_mut().clear();
            }
        }
        self.use_it(&handle, KEYS, rng).await
    }

    /// Operations on keys of its own, whose answers are certain.
    async fn use_it(&self, index: &impl OrderedIndex, first: u64, rng: &mut Rng) -> Result<(), IndexError> {
        // Nobody else uses these keys, but the one who looks on may have opened the same index before.
        let mut known = Known::new();
        let mut whims = Rng::with_seed(rng.get_seed() ^ 0xca9c_e100);
        if first == 0 {
            known.extend((0..KEYS).map(|key| (key, None)));
        }
        for _ in 0..OPERATIONS {
            let key = first + rng.u64(0..KEYS);
            let bytes = key.to_be_bytes();
            let value = rng.u64(..).to_le_bytes().to_vec();
            let patience = Patience::draw(self.trial.cancel, &mut whims);
            // What is given up, or fails, may happen at any time.
            let was_doubtful = !self.doubtful.borrow_mut().insert(key);
            match rng.u8(0..3) {
                0 => {
                    let Some(found) = wait(patience, index.get(&bytes)).await? else { continue };
                    self.compare(key, &known, found.as_ref());
                    known.insert(key, found);
                }
                1 => {
                    known.remove(&key);
                    let Some(()) = wait(patience, index.put(&bytes, &value)).await? else { continue };
                    known.insert(key, Some(value));
                }
                _ => {
                    let before = known.remove(&key);
                    let Some(removed) = wait(patience, index.delete(&bytes)).await? else { continue };
                    if before.is_some_and(|held| held.is_some() != removed) {
                        let what = format!("a delete of key {key} of an index beside it says {removed}");
                        self.judge("a delete", &IndexError::Corrupt { what });
                    }
                    known.insert(key, None);
                }
            }
            if was_doubtful {
                known.remove(&key);
            } else {
                self.doubtful.borrow_mut().remove(&key);
            }
        }
        Ok(())
    }

    fn compare(&self, key: u64, known: &Known, found: Option<&Vec<u8>>) {
        if known.get(&key).is_some_and(|held| held.as_ref() != found) {
            let what = format!("key {key} of an index beside it is {found:?}, not {:?}", known[&key]);
            self.judge("a get", &IndexError::Corrupt { what });
        }
    }

    /// Keeps an error that nothing explains.
    fn judge(&self, what: &str, error: &IndexError) {
        let is_explained = match error {
            IndexError::Dropped => {
                marks::hit("other_index_gone");
                true
            }
            IndexError::PoolFull(_) => self.trial.chunks.is_some(),
            IndexError::Fabric(error) => match error.control() {
                Some(
                    ControlError::NoSuchIndex { .. }
                    | ControlError::IndexNotReady { .. }
                    | ControlError::DropPending { .. }
                    | ControlError::NameExists { .. },
                ) => true,
                _ => matches!(error, FabricError::Disconnected { .. } | FabricError::RetriesExhausted { .. }),
            },
            error => error.is_unknown(),
        };
        let mut log = self.log.borrow_mut();
        if !is_explained && log.trouble.is_none() {
            log.trouble = Some((what.to_owned(), error.clone()));
        }
    }
}

/// What an operation says, unless it takes too long and is given up.
async fn wait<T>(
    patience: Option<Patience>,
    operation: impl Future<Output = Result<T, IndexError>>,
) -> Result<Option<T>, IndexError> {
    match patience {
        None => operation.await.map(Some),
        Some(patience) => {
            let ended = patience.wait(operation).await;
            if ended.is_none() {
                marks::hit("operation_cancelled");
            }
            ended.transpose()
        }
    }
}

/// Drops what is left of them when the trial is over; those that were left half made or half dropped are others' work.
pub(super) async fn clear(pool: &Pool, endpoint: &Endpoint) -> Result<(), IndexError> {
    // Not in the loop's head, where the operation would live, and keep its pin, as long as the loop.
    let infos = pool.list_indexes(&endpoint.op()).await?;
    for info in infos {
        if info.name != INDEX && info.state == IndexState::Ready {
            Index::drop(pool, endpoint, &info.name).await?;
        }
    }
    Ok(())
}
