//! What a Sherman tree can be told: sizes, switches of the paper's techniques, and mistakes that the checkers must catch.
//!
//! Sizes, and where the locks are, belong to the tree: they are kept in the catalog, and whoever opens it with others is
//! refused. The other switches belong to each compute server: they change which verbs it posts, not what they leave behind.

use super::layout::Layout;
use crate::api::IndexError;
use crate::pool::RecoveryMistakes;
use crate::shared::intents::Redo;
use farwood_fabric::control::INTENT_BYTES;

/// The fewest entries that a node of a real tree must hold.
const MIN_ENTRIES: usize = 8;
/// The fewest that anything works with.
const MIN_ENTRIES_IN_TRIALS: usize = 4;
/// The longest key, and the longest value.
const MAX_FIELD_BYTES: usize = 3072;
/// The largest node.
const MAX_NODE_BYTES: usize = 256 << 10;
/// Begins what the catalog keeps; changes with the layout.
const FORMAT: u32 = 0x5348_0002;

/// The paper's techniques (sections 4.2 to 4.5), each of which can be left out, and one step beyond it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a technique of its own")]
pub struct Switches {
    /// 4.5: what ends an operation (write-back, unlock) goes out as one batch, not one after the other.
    pub combine: bool,
    /// 4.3: the lock table is in lock memory (the NIC's), not in main memory.
    pub lock_memory: bool,
    /// 4.3: threads of a compute server queue for a lock among themselves; only the first asks for it remotely.
    pub hierarchical: bool,
    /// 4.3: whoever is done hands the lock to the next in that queue.
    pub handover: bool,
    /// 4.4: only the entry is written back, not its node.
    pub two_level_versions: bool,
    /// Beyond the paper: take the lock and read the node in one batch.
    pub lock_and_read: bool,
    /// The paper's 16-bit locks, four in a word, taken and released by masked CAS. Needs `hierarchical`.
    pub masked_locks: bool,
    /// Locks are given back by an FAA, as in the original FG (3.1.1), not by a WRITE.
    pub faa_release: bool,
    /// The paper's bare 4-bit versions instead of checksums. Wrong where words land in any order, and only good to show that.
    pub bare_versions: bool,
}

impl Switches {
    /// Sherman as Farwood runs it.
    pub const SHERMAN: Self = Self {
        combine: true,
        lock_memory: true,
        hierarchical: true,
        handover: true,
        two_level_versions: true,
        lock_and_read: true,
        masked_locks: false,
        faa_release: false,
        bare_versions: false,
    };
    /// The paper's baseline: none of its techniques.
    pub const FG_PLUS: Self = Self {
        combine: false,
        lock_memory: false,
        hierarchical: false,
        handover: false,
        two_level_versions: false,
        lock_and_read: false,
        masked_locks: false,
        faa_release: false,
        bare_versions: false,
    };

    /// The switches by name, in the paper's order.
    pub const NAMES: [&'static str; 9] = [
        "combine",
        "lock_memory",
        "hierarchical",
        "handover",
        "two_level_versions",
        "lock_and_read",
        "masked_locks",
        "faa_release",
        "bare_versions",
    ];

    /// The switch of this name.
    pub fn by_name(&mut self, name: &str) -> Option<&mut bool> {
        Some(match name {
            "combine" => &mut self.combine,
            "lock_memory" => &mut self.lock_memory,
            "hierarchical" => &mut self.hierarchical,
            "handover" => &mut self.handover,
            "two_level_versions" => &mut self.two_level_versions,
            "lock_and_read" => &mut self.lock_and_read,
            "masked_locks" => &mut self.masked_locks,
            "faa_release" => &mut self.faa_release,
            "bare_versions" => &mut self.bare_versions,
            _ => return None,
        })
    }
}

/// Mistakes that published codes make, or that are easily made. They test the tests.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a mistake of its own")]
pub struct Sabotage {
    /// An operation that is dropped keeps its lock.
    pub forget_when_dropped: bool,
    /// The lock is released before what it protects is written.
    pub unlock_before_write_back: bool,
    /// The lock is handed over while the write-back is under way (as in the paper's Figure 6).
    pub handover_before_completion: bool,
    /// A masked lock is released by a plain WRITE, which a neighbour's CAS may undo.
    pub plain_masked_release: bool,
    /// Readers take entries without looking at their checksum.
    pub skip_checksum: bool,
    /// Entries' checksums are not keyed by the node's version.
    pub checksum_without_version: bool,
    /// Retired nodes are used again at once.
    pub reuse_without_epoch: bool,
    /// A node that a cached address leads to need not be linked into the tree.
    pub trust_hint: bool,
    /// A node that was reached need not cover the key.
    pub skip_fences: bool,
    /// A merge waits for its second lock.
    pub wait_for_second_lock: bool,
    /// A scan takes the leaves that its cache names for all that there are.
    pub scan_trusts_cache: bool,
    /// Those of recovery.
    pub recovery: RecoveryMistakes,
    /// A session keeps what it has of a dropped index.
    pub drop_without_clearing: bool,
    /// Intents are not ended before locks are handed on. No mistake where none is.
    pub intent_not_ended: bool,
    /// The intent of a merge names only the lock with which it began, the parent's.
    pub one_lock_named: bool,
    /// A node that a dead session left torn is not mended.
    pub skip_repair: bool,
    /// A walk does not name the inner nodes.
    pub walk_forgets_inner_nodes: bool,
    /// No mistake: nodes that become free are zeroed, so that whoever still reads them is found out.
    pub zero_freed: bool,
    /// No mistake: what is retired is written down in pages alone.
    pub pages_only: bool,
    /// A flush changes nothing in the heap: objects are claimed in chunks that are being drained.
    pub ignore_flush: bool,
}

/// A tree's sizes and how a compute server works on it.
#[derive(Clone, Debug)]
pub struct Config {
    /// Bytes of a key.
    pub key_bytes: usize,
    /// Bytes of a value.
    pub value_bytes: usize,
    /// Bytes of a node.
    pub node_bytes: usize,
    /// Most locks per server.
    pub locks: u64,
    /// Bytes for cached nodes on each compute server, beside the top two levels.
    pub cache_bytes: u64,
    /// Techniques.
    pub switches: Switches,
    /// Mistakes.
    pub sabotage: Sabotage,
    /// Nodes may be smaller than is of any use, so that rare paths are common.
    pub tiny: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            key_bytes: 8,
            value_bytes: 8,
            node_bytes: 1024,
            locks: u64::MAX,
            cache_bytes: 500 << 20,
            switches: Switches::SHERMAN,
            sabotage: Sabotage::default(),
            tiny: false,
        }
    }
}

impl Config {
    /// Nodes of four entries, few locks, a cache of few nodes: for trials.
    pub fn tiny() -> Self {
        Self { node_bytes: 144, locks: 16, cache_bytes: 600, tiny: true, ..Self::default() }
    }

    /// The baseline of the paper.
    pub fn fg_plus() -> Self {
        Self { switches: Switches::FG_PLUS, ..Self::default() }
    }

    /// The smallest node that holds so many entries.
    #[must_use]
    pub fn with_entries(mut self, entries: usize) -> Self {
        let leaf = Layout::bytes_for(self.key_bytes, self.value_bytes, entries);
        self.node_bytes = leaf.max(Layout::bytes_for(self.key_bytes, 8, entries));
        self
    }

    /// For keys and values of these sizes: nodes as they are, or as large as 32 entries need.
    #[must_use]
    pub fn sized(self, key_bytes: usize, value_bytes: usize) -> Self {
        let sized = Self { key_bytes, value_bytes, ..self };
        let for_32 = sized.clone().with_entries(32).node_bytes;
        Self { node_bytes: for_32.max(sized.node_bytes), ..sized }
    }

    /// The layouts of leaves and inner nodes, if the sizes work out.
    pub(super) fn layouts(&self) -> Result<(Layout, Layout), IndexError> {
        let refuse = |why: String| Err(IndexError::BadConfig { why });
        for (what, bytes) in [("key", self.key_bytes), ("value", self.value_bytes)] {
            if bytes == 0 || bytes > MAX_FIELD_BYTES {
                return refuse(format!("a {what} of {bytes} bytes; it can have 1 to {MAX_FIELD_BYTES}"));
            }
        }
        if self.node_bytes % 8 != 0 || self.node_bytes > MAX_NODE_BYTES {
            return refuse(format!(
                "nodes of {} bytes; it must be a multiple of 8, at most {MAX_NODE_BYTES}",
                self.node_bytes
            ));
        }
        let is_bare = self.switches.bare_versions;
        let layout = |value_bytes| {
            let layout = Layout::new(self.key_bytes, value_bytes, self.node_bytes);
            if is_bare { layout.bare() } else { layout }
        };
        let (leaf, inner) = (layout(self.value_bytes), layout(8));
        let least = if self.tiny { MIN_ENTRIES_IN_TRIALS } else { MIN_ENTRIES };
        if leaf.capacity().min(inner.capacity()) < least {
            let bytes = self.clone().with_entries(least).node_bytes;
            return refuse(format!(
                "nodes of {} bytes hold fewer than {least} entries; they need at least {bytes} bytes",
                self.node_bytes
            ));
        }
        // An update waits for room in the journal while it holds a lock: room that does not exist would never come.
        let intent_bytes = Redo::encoded_bytes_of_one(leaf.update_bytes()) as u64;
        if leaf.update_needs_intent() && intent_bytes > INTENT_BYTES {
            return refuse(format!(
                "keys of {} and values of {} bytes: an update of one takes {intent_bytes} bytes of a journal of {INTENT_BYTES}; \
                 use shorter ones",
                self.key_bytes, self.value_bytes
            ));
        }
        if self.switches.masked_locks && !self.switches.hierarchical {
            return refuse("16-bit locks do not say which task holds them; they need hierarchical".into());
        }
        if self.switches.masked_locks && self.switches.faa_release {
            return refuse("16-bit locks are given back by masked CAS; faa_release needs whole words".into());
        }
        if self.switches.handover && !self.switches.hierarchical {
            return refuse(
                "a lock is handed over within the local queue; handover needs hierarchical".into(),
            );
        }
        if self.locks == 0 {
            return refuse("there must be at least one lock".into());
        }
        Ok((leaf, inner))
    }

    /// What the catalog keeps: all that everybody who opens the tree must agree on.
    pub(super) fn encode(&self) -> Vec<u8> {
        let Switches { lock_memory, masked_locks, bare_versions, .. } = self.switches;
        let numbers = [self.key_bytes as u64, self.value_bytes as u64, self.node_bytes as u64, self.locks];
        let mut bytes = FORMAT.to_le_bytes().to_vec();
        bytes.extend(numbers.iter().flat_map(|n| n.to_le_bytes()));
        bytes.extend([lock_memory, masked_locks, bare_versions].map(u8::from));
        bytes
    }

    /// Refuses a tree that was made with other settings.
    pub(super) fn check_same(&self, kept: &[u8]) -> Result<(), IndexError> {
        if kept == self.encode() {
            return Ok(());
        }
        let theirs = match Self::decode(kept) {
            Some((theirs, locks)) => format!(
                "keys of {} B, values of {} B, nodes of {} B, {locks}",
                theirs.key_bytes, theirs.value_bytes, theirs.node_bytes
            ),
            None => "a format that this version does not know".to_owned(),
        };
        Err(IndexError::BadConfig {
            why: format!("the index was created with {theirs}; open it with the same"),
        })
    }

    pub(super) fn decode(kept: &[u8]) -> Option<(Self, String)> {
        let (format, rest) = kept.split_first_chunk::<4>()?;
        let (numbers, flags) = rest.split_first_chunk::<32>()?;
        if u32::from_le_bytes(*format) != FORMAT {
            return None;
        }
        let number = |n: usize| numbers[n * 8..n * 8 + 8].try_into().map_or(0, u64::from_le_bytes);
        let size = |n: usize| usize::try_from(number(n)).unwrap_or(usize::MAX);
        let [lock_memory, masked_locks, bare_versions] = *flags else { return None };
        let place = if lock_memory == 1 { "lock memory" } else { "main memory" };
        let width = if masked_locks == 1 { 16 } else { 64 };
        let config = Self {
            key_bytes: size(0),
            value_bytes: size(1),
            node_bytes: size(2),
            locks: number(3),
            switches: Switches {
                lock_memory: lock_memory == 1,
                masked_locks: masked_locks == 1,
                bare_versions: bare_versions == 1,
                ..Switches::SHERMAN
            },
            ..Self::default()
        };
        let proof = if bare_versions == 1 { "bare versions" } else { "checksums" };
        Some((config, format!("{width}-bit locks in {place}, {proof}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usual_sizes_work_out() {
        for config in [Config::default(), Config::fg_plus(), Config::tiny()] {
            config.layouts().unwrap();
        }
        let long = Config { key_bytes: 1024, ..Config::default() }.with_entries(8);
        assert!(long.layouts().unwrap().1.capacity() >= 8);
    }

    #[test]
    fn sizes_that_do_not_work_out_are_refused_with_what_would() {
        let base = Config::default;
        let off = Switches { hierarchical: false, ..Switches::SHERMAN };
        for config in [
            Config { key_bytes: 0, ..base() },
            Config { value_bytes: 0, ..base() },
            Config { key_bytes: 4000, ..base() },
            Config { node_bytes: 1020, ..base() },
            Config { node_bytes: 144, ..base() },
            Config { node_bytes: 104, tiny: true, ..base() },
            Config { locks: 0, ..base() },
            Config { switches: off, ..base() },
            Config { switches: Switches { masked_locks: true, handover: false, ..off }, ..base() },
            Config {
                switches: Switches { masked_locks: true, faa_release: true, ..Switches::SHERMAN },
                ..base()
            },
            Config { key_bytes: 2048, value_bytes: 2048, ..base() }.with_entries(8),
        ] {
            assert!(matches!(config.layouts(), Err(IndexError::BadConfig { .. })), "{config:?}");
        }
    }

    #[test]
    fn a_tree_is_opened_as_it_was_created_or_not_at_all() {
        let ours = Config::default();
        assert_eq!(ours.check_same(&ours.encode()), Ok(()));
        let mut others = vec![Config { key_bytes: 16, ..ours.clone() }.encode(), Config::fg_plus().encode()];
        others.extend([vec![], vec![1, 2, 3], vec![0xff; 38]]);
        for kept in others {
            let error = ours.check_same(&kept).unwrap_err();
            assert!(matches!(error, IndexError::BadConfig { .. }), "{kept:?}");
        }
    }
}
