//! What a Sphinx index can be told: switches of the paper's techniques, how much a compute server may cache, and mistakes that the
//! checkers must catch.
//!
//! Whether there is an inner node hash table belongs to the index: all who write must keep it. The rest belongs to each compute server.

use super::table;
use super::write::MAX_IN_PLACE_BYTES;
use crate::api::IndexError;
use crate::pool::RecoveryMistakes;
use farwood_fabric::Endpoint;

/// Begins what the catalog keeps; changes with the layout.
const FORMAT: u32 = 0x5350_0001;
/// The smallest filter: a few buckets.
const MIN_FILTER_BYTES: u64 = 64;

/// The paper's techniques (III-A and III-B), each of which can be left out, and one step beyond it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a technique of its own")]
pub struct Switches {
    /// III-A: inner nodes are found by the hash of their prefix.
    pub hash_table: bool,
    /// III-B: a filter tells which prefixes are worth asking for. Needs `hash_table`.
    pub filter: bool,
    /// V-B: scans read many nodes and leaves at a time.
    pub batched_scans: bool,
    /// Nodes are looked for by hash also where round trips cost nothing (`local`, `shm`).
    pub always_by_hash: bool,
    /// Beyond the paper: of a Node256 only its head and the slot that counts are read.
    pub slot_reads: bool,
}

impl Switches {
    /// Sphinx as Farwood runs it.
    pub const SPHINX: Self =
        Self { hash_table: true, filter: true, batched_scans: true, always_by_hash: false, slot_reads: true };
    /// The paper's baseline: an adaptive radix tree in far memory.
    pub const ART: Self = Self {
        hash_table: false,
        filter: false,
        batched_scans: false,
        always_by_hash: false,
        slot_reads: false,
    };

    /// The switches by name.
    pub const NAMES: [&'static str; 5] =
        ["hash_table", "filter", "batched_scans", "always_by_hash", "slot_reads"];

    /// The switch of this name.
    pub fn by_name(&mut self, name: &str) -> Option<&mut bool> {
        Some(match name {
            "hash_table" => &mut self.hash_table,
            "filter" => &mut self.filter,
            "batched_scans" => &mut self.batched_scans,
            "always_by_hash" => &mut self.always_by_hash,
            "slot_reads" => &mut self.slot_reads,
            _ => return None,
        })
    }
}

/// Mistakes that are easily made. They test the tests.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a mistake of its own")]
pub struct Sabotage {
    /// A node that another takes the place of is not marked as dead.
    pub switch_without_invalidation: bool,
    /// A node's hash entry is published before a slot leads to the node.
    pub entry_before_node: bool,
    /// A node that a hash entry leads to need not be alive, nor have the prefix that was asked for.
    pub trust_filter: bool,
    /// The lock is released in front of what it protects, in the same batch.
    pub unlock_inside_payload: bool,
    /// Readers take leaves without looking at their checksum.
    pub skip_checksum: bool,
    /// Retired objects are used again at once.
    pub reuse_without_epoch: bool,
    /// Room that was never linked is used again at once, though a WRITE to it may still land.
    pub reuse_in_doubt: bool,
    /// An operation that is dropped keeps its lock.
    pub forget_when_dropped: bool,
    /// A leaf is unlinked without being marked as deleted.
    pub delete_without_mark: bool,
    /// Those of recovery.
    pub recovery: RecoveryMistakes,
    /// A session keeps what it has of a dropped index.
    pub drop_without_clearing: bool,
    /// An insert into a hash table does not look whether a subtable was split meanwhile.
    pub resize_without_recheck: bool,
    /// Whether a subtree has keys, and which, is asked of its first child alone.
    pub first_child_only: bool,
    /// A key goes where its bytes lead, whatever the prefix of the node there.
    pub skip_prefix_check: bool,
    /// A scan follows both slots of a byte that it saw in two, and takes a leaf that has moved for one that counts, though the key is found
    /// behind the other slot too.
    pub scan_trusts_moved_leaf: bool,
    /// A walk does not name the subtables of the hash tables.
    pub walk_forgets_tables: bool,
    /// No mistake: what is retired is written down in pages alone.
    pub pages_only: bool,
    /// A flush changes nothing in the heap: objects are claimed in chunks that are being drained.
    pub ignore_flush: bool,
    /// No mistake: sessions find nodes by hash from this term on, and those before it do not.
    pub by_hash_from_term: Option<u64>,
}

/// How a compute server works on an index.
#[derive(Clone, Debug)]
pub struct Config {
    /// Bytes of the filter of each compute server.
    pub filter_bytes: u64,
    /// Groups of buckets in a subtable of a hash table, each with 24 slots.
    pub table_groups: u32,
    /// Leaves of up to so many bytes are written whole when they are updated in place; of larger ones, only what changes.
    pub whole_leaf_bytes: usize,
    /// Techniques.
    pub switches: Switches,
    /// Mistakes.
    pub sabotage: Sabotage,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            filter_bytes: 16 << 20,
            table_groups: table::Config::default().groups,
            whole_leaf_bytes: MAX_IN_PLACE_BYTES,
            switches: Switches::SPHINX,
            sabotage: Sabotage::default(),
        }
    }
}

impl Config {
    /// The baseline of the paper.
    pub fn art() -> Self {
        Self { switches: Switches::ART, ..Self::default() }
    }

    /// A filter of few buckets, subtables of few entries, most leaves written in parts: for trials.
    pub fn tiny() -> Self {
        let switches = Switches { always_by_hash: true, ..Switches::SPHINX };
        Self {
            filter_bytes: MIN_FILTER_BYTES,
            table_groups: 2,
            whole_leaf_bytes: 64,
            switches,
            ..Self::default()
        }
    }

    /// Whether a session with such endpoints finds nodes by hash. Where round trips cost nothing, nothing is saved by it: the way from the
    /// root touches less memory.
    pub(super) fn finds_by_hash(&self, endpoint: &Endpoint) -> bool {
        match (self.sabotage.by_hash_from_term, endpoint.session()) {
            (Some(first), Some(session)) => session.term() >= first,
            _ => self.switches.always_by_hash || !endpoint.capabilities().immediate,
        }
    }

    /// Refuses what does not work.
    pub(super) fn validate(&self) -> Result<(), IndexError> {
        let refuse = |why: String| Err(IndexError::BadConfig { why });
        if self.switches.filter && !self.switches.hash_table {
            return refuse("a filter tells what to ask a hash table for; it needs hash_table".into());
        }
        if self.switches.filter && self.filter_bytes < MIN_FILTER_BYTES {
            return refuse(format!(
                "a filter of {} bytes; it needs at least {MIN_FILTER_BYTES}",
                self.filter_bytes
            ));
        }
        Ok(())
    }

    /// The settings of the hash tables.
    pub(super) fn table(&self) -> table::Config {
        let sabotage =
            table::Sabotage { skip_recheck: self.sabotage.resize_without_recheck, ..Default::default() };
        table::Config { groups: self.table_groups, sabotage }
    }

    /// What the catalog keeps: all that everybody who opens the index must agree on.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = FORMAT.to_le_bytes().to_vec();
        bytes.push(u8::from(self.switches.hash_table));
        bytes.extend(self.table_groups.to_le_bytes());
        bytes
    }

    /// Refuses an index that was made with other settings.
    pub(super) fn check_same(&self, kept: &[u8]) -> Result<(), IndexError> {
        let why = match Self::decode(kept) {
            Some(theirs) if theirs.encode() == self.encode() => return Ok(()),
            Some(theirs) => format!(
                "the index was created with hash_table={} and subtables of {} groups; open it with the same",
                theirs.switches.hash_table, theirs.table_groups
            ),
            None => "the index is of a format that this version does not know".to_owned(),
        };
        Err(IndexError::BadConfig { why })
    }

    pub(super) fn decode(kept: &[u8]) -> Option<Self> {
        let (format, rest) = kept.split_first_chunk::<4>()?;
        let (hash_table, table_groups) = match *rest {
            [0, a, b, c, d] => (false, [a, b, c, d]),
            [1, a, b, c, d] => (true, [a, b, c, d]),
            _ => return None,
        };
        if u32::from_le_bytes(*format) != FORMAT {
            return None;
        }
        let switches = if hash_table { Switches::SPHINX } else { Switches::ART };
        Some(Self { switches, table_groups: u32::from_le_bytes(table_groups), ..Self::default() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_that_do_not_work_are_refused() {
        let filter_alone = Switches { hash_table: false, ..Switches::SPHINX };
        for config in [
            Config { switches: filter_alone, ..Config::default() },
            Config { filter_bytes: 8, ..Config::default() },
        ] {
            assert!(matches!(config.validate(), Err(IndexError::BadConfig { .. })), "{config:?}");
        }
        assert_eq!((Config::default().validate(), Config::art().validate()), (Ok(()), Ok(())));
    }

    #[test]
    fn an_index_is_opened_as_it_was_created_or_not_at_all() {
        let ours = Config::default();
        let less = Config { filter_bytes: 100, ..Config::default() };
        assert_eq!((ours.check_same(&ours.encode()), less.check_same(&ours.encode())), (Ok(()), Ok(())));
        for kept in [Config::art().encode(), vec![], vec![1, 2], vec![0xff; 9]] {
            assert!(matches!(ours.check_same(&kept), Err(IndexError::BadConfig { .. })), "{kept:?}");
        }
    }
}
