//! The inner node hash table of one memory server (Sphinx, III-A): RACE hashing (Zuo et al., USENIX ATC '21), made to hold under the
//! contract.
//!
//! The table maps the hash of a prefix to an *entry*: 63 bits, not zero, which the tree makes of a node's address and what else it likes.
//! Several entries may have one hash. What is looked up is a hint to the tree, which checks the node that it leads to.
//!
//! | file | what it is |
//! |---|---|
//! | `layout` | a subtable's bytes, and where in them a hash may be: pure |
//! | `directory` | where the subtables are, as far as a compute server knows |
//! | `read` | look-ups, and how one that finds nothing can be certain of it |
//! | `write` | insert, replace, remove: one CAS each |
//! | `split` | a subtable becomes two while others read and write; what becomes of a split whose maker died |
//! | `check` | walks the whole table and verifies it |
//!
//! # The algorithm
//!
//! 1. **look-up**: the directory names a subtable, the hash two pairs of buckets there; READ both: one round trip. If no entry matches, READ them
//!    again and the subtable's state behind them: unless the state says that the hash belongs elsewhere, there is none.
//! 2. **insert**: READ the pairs and the state; then [CAS an empty slot, READ pairs and state]: two round trips. The second look at the state is the
//!    *re-check*: if it is still as before, then whoever splits the subtable later will see the entry. If not, wait for the split, and see whether the
//!    entry was taken along. An entry that is there already is not inserted again, and if several insert it at once, the first slot stays.
//! 3. **replace**, **remove**: one CAS of the slot, with the same re-check behind it where a new word is stored.
//! 4. **split**, of a subtable A of depth d whose pairs are full, under A's lock:
//!    1. allocate B; WRITE its address among A's children, then A's state: `Splitting`. From here on nobody can complete an insert that would
//!       have to move.
//!    2. READ A. Ask the nodes for their hashes. *Freeze* the entries whose bit d is set, by a CAS each, so that they stay as they are.
//!    3. WRITE B, with the frozen entries in the same places that they have in A: the same buckets are right there.
//!    4. WRITE A's state: depth d + 1, `Clearing`. This word is the moment at which B counts.
//!    5. Empty the frozen slots of A; WRITE A's state: `Idle`; unlock.
//!
//! # Invariants
//!
//! - An entry is in one of the two pairs of its hash, in the one subtable that the hash belongs to; or, frozen, in the one that it is leaving.
//! - A subtable never moves and is never freed while its index lives. So a directory that is behind leads to a subtable that is right, or whose
//!   children are; flushes of hints have nothing to drop here.
//! - State and children are written under the subtable's lock only. A child is written before the state that makes it count.
//! - A split can be taken up at any point by whoever holds the lock: what its maker did is done again, and nothing of it counts before step 4.
//! - The lock names its holder's *term*, which no other session ever has: if the coordinator does not know that term any more, or knows that it is
//!   fenced, then the lock is nobody's. So recovery, whichever index it comes through, has nothing to do here.
//! - Who holds a lock waits for nothing but verbs; so tasks may come here with locks of their own.
//!
//! # What differs from RACE, and why
//!
//! - *One state word in place of a header in each bucket.* A READ brings its words in any order, so a header that came with the slots does not prove
//!   that nothing moved while they were read. The state, read behind the slots, does; and a split writes one word, not one for each bucket.
//! - *No directory in far memory.* Each subtable has a list of those that were split off from it, so that a split is published by one word and
//!   there is no directory to double. The compute server's directory is filled from these lists as it comes by.
//! - *Frozen entries*, so that a change of an entry never meets its move half way.

mod check;
mod directory;
mod layout;
mod read;
mod split;
mod write;

pub use check::Census;
pub use read::{Candidates, Probe, Slot};

use crate::Pool;
use crate::api::IndexError;
use crate::shared::heap::Class;
use crate::shared::surely;
use directory::Directory;
use farwood_fabric::control::IndexId;
use farwood_fabric::{GlobalAddr, Op, ServerId};
use layout::{FROZEN, Geometry, State};
use std::sync::Arc;

/// How often a subtable can be split.
pub const MAX_DEPTH: u8 = 20;
/// So many of a hash's lowest bits count; the rest is the tree's, for fingerprints.
pub const HASH_BITS: u32 = 42;
/// The largest entry.
pub const MAX_ENTRY: u64 = FROZEN - 1;
/// The fewest and the most groups of buckets in a subtable.
const GROUPS: std::ops::RangeInclusive<u32> = 2..=4096;
/// How often an operation begins anew, because of lost CASes, splits, and a directory that was behind.
const MAX_ATTEMPTS: u32 = 10_000;

/// A table's sizes, and mistakes for tests of the tests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Config {
    /// Groups of buckets in a subtable, each with 24 slots. The same for all who open the table.
    pub groups: u32,
    /// Mistakes.
    pub sabotage: Sabotage,
}

impl Default for Config {
    fn default() -> Self {
        Self { groups: 64, sabotage: Sabotage::default() }
    }
}

/// Mistakes that are easily made. They test the tests.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a mistake of its own")]
pub struct Sabotage {
    /// An insert does not look whether a split began meanwhile.
    pub skip_recheck: bool,
    /// A look-up that finds nothing believes it.
    pub trust_absence: bool,
    /// Entries are copied without being frozen.
    pub skip_freeze: bool,
    /// A lock is taken from whoever has held it for long, fenced or not.
    pub steal_without_fence: bool,
}

/// What the table needs to know of the nodes that its entries lead to.
pub trait Nodes {
    /// The hash of each entry's prefix, as the node says; `None` if there is no such node any more, and the entry may go. A node must be in place
    /// before its entry is inserted. A split asks for a subtable's entries at once, so that their nodes can be read together.
    fn hashes_of(
        &self,
        op: &Op,
        entries: &[u64],
    ) -> impl Future<Output = Result<Vec<Option<u64>>, IndexError>>;
}

/// The table of one memory server, as a compute server has it. Cheap to clone, usable from any thread.
#[derive(Clone, Debug)]
pub struct Table {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    pool: Pool,
    class: Class,
    geometry: Geometry,
    sabotage: Sabotage,
    directory: Directory,
}

impl Table {
    /// Lays out an empty table on `server`, of subtables that are objects of the index's class `class`. Returns where it begins, which is all that it is
    /// found by.
    pub async fn create(
        op: &Op,
        pool: &Pool,
        (index, class): (IndexId, u16),
        server: ServerId,
        config: Config,
    ) -> Result<GlobalAddr, IndexError> {
        let geometry = geometry(config)?;
        let root = pool.heap().allocate(op, server, class_of(geometry, index, class)).await?;
        surely::write(op, root, &image(geometry, State::new(0, 0), &[])).await?;
        Ok(root)
    }

    /// The class of a table's objects.
    pub(super) fn class(config: Config, index: IndexId, class: u16) -> Result<Class, IndexError> {
        Ok(class_of(geometry(config)?, index, class))
    }

    /// The table that begins at `root`.
    pub fn attach(
        pool: &Pool,
        (index, class): (IndexId, u16),
        root: GlobalAddr,
        config: Config,
    ) -> Result<Self, IndexError> {
        let geometry = geometry(config)?;
        if root.is_null() || !root.is_word_aligned() {
            return Err(corrupt(format!("a hash table cannot begin at {root}")));
        }
        let inner = Inner {
            pool: pool.clone(),
            class: class_of(geometry, index, class),
            geometry,
            sabotage: config.sabotage,
            directory: Directory::new(root),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Which server it is on.
    pub fn server(&self) -> ServerId {
        self.inner.directory.root().server()
    }

    /// What the compute server spends on knowing where the subtables are.
    pub fn directory_bytes(&self) -> u64 {
        self.inner.directory.bytes()
    }

    /// Bytes of one subtable; the table has as many as [`Census::objects`] lists.
    pub fn subtable_bytes(&self) -> u64 {
        self.inner.geometry.bytes()
    }
}

fn geometry(config: Config) -> Result<Geometry, IndexError> {
    if GROUPS.contains(&config.groups) {
        return Ok(Geometry::new(config.groups));
    }
    let why = format!(
        "hash subtables of {} groups; they can have {} to {}",
        config.groups,
        GROUPS.start(),
        GROUPS.end()
    );
    Err(IndexError::BadConfig { why })
}

fn class_of(geometry: Geometry, index: IndexId, class: u16) -> Class {
    Class { index, class, object_bytes: u32::try_from(geometry.bytes()).unwrap_or(u32::MAX) }
}

/// The bytes of a new subtable, with these words in its slots (by their offset among the groups).
fn image(geometry: Geometry, state: State, slots: &[(u64, u64)]) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(geometry.bytes()).unwrap_or(0)];
    let mut put = |at: u64, word: u64| {
        let at = usize::try_from(at).unwrap_or(0);
        bytes[at..at + 8].copy_from_slice(&word.to_le_bytes());
    };
    put(layout::STATE_AT, state.to_raw());
    for (at, word) in slots {
        put(*at, *word);
    }
    bytes
}

fn corrupt(what: String) -> IndexError {
    IndexError::Corrupt { what }
}
