//! Walks the whole tree while nobody uses it and verifies every invariant.

use super::cache::node_of;
use super::layout::{NodeRef, Step, Target};
use super::node::prefix;
use super::restructure::common_bytes;
use super::{Tree, corrupt};
use crate::api::IndexError;
use crate::shared::heap::Class;
use farwood_fabric::{GlobalAddr, Op, marks};
use rustc_hash::FxHashMap;

/// A node on the way to where the walk is.
struct Level {
    node: NodeRef,
    depth: usize,
    hash: u64,
    /// Children that are still to be visited, the next one last.
    left: Vec<(Step, Target)>,
    /// The step that leads to the one that is being visited.
    step: Step,
    has_keys: bool,
    is_dead: bool,
}

impl Tree {
    /// Every node and leaf in the order of keys; returns where they are.
    pub(super) async fn check(&self, op: &Op) -> Result<Vec<(Class, GlobalAddr)>, IndexError> {
        self.shared.locks.check_free(op).await?;
        let mut found = Vec::new();
        let mut levels = vec![self.check_node(op, self.shared.root, None).await?];
        let mut last: Option<Vec<u8>> = None;
        let mut nodes = FxHashMap::default();
        while let Some(level) = levels.last_mut() {
            let Some((step, target)) = level.left.pop() else {
                found.push((self.shared.node_class(level.node.kind), level.node.addr));
                if !level.is_dead && level.depth > 0 {
                    nodes.insert(level.node.addr, level.hash);
                }
                levels.pop();
                continue;
            };
            level.step = step;
            match target {
                Target::Empty => {}
                Target::Node(node) => {
                    let below = self.check_node(op, node, Some(level.depth)).await?;
                    levels.push(below);
                }
                Target::Leaf(at) => {
                    found.push((self.shared.leaf_class(at.class), at.addr));
                    let leaf = self.read_leaf(op, at).await?;
                    let key = leaf.key().to_vec();
                    if last.as_ref().is_some_and(|last| *last >= key) {
                        return Err(corrupt(format!("key {key:x?} comes after {last:x?}")));
                    }
                    for level in &mut levels {
                        self.check_prefix(level, &key, last.as_deref())?;
                    }
                    last = Some(key);
                }
            }
        }
        self.check_tables(op, &nodes, &mut found).await?;
        Ok(found)
    }

    /// The hash tables are sound. Sessions that died may have left entries out of date, or none for a node; others not.
    async fn check_tables(
        &self,
        op: &Op,
        nodes: &FxHashMap<GlobalAddr, u64>,
        found: &mut Vec<(Class, GlobalAddr)>,
    ) -> Result<(), IndexError> {
        let Some(finder) = &self.shared.finder else { return Ok(()) };
        let mut entries = 0;
        for table in &finder.tables {
            let census = table.check(op, self).await?;
            if !self.shared.config.sabotage.walk_forgets_tables {
                found.extend(census.objects);
            }
            entries += census.entries.len();
            let is_stale = |(hash, entry): &&(u64, u64)| {
                node_of(*entry).and_then(|node| nodes.get(&node.addr)) != Some(hash)
            };
            let stale = census.entries.iter().filter(is_stale).count();
            entries -= stale;
            if stale > 0 || census.dead > 0 || census.strays > 0 || census.copies > 0 {
                marks::hit("hash_entry_out_of_date");
            }
        }
        if entries < nodes.len() {
            marks::hit("hash_entry_lacking");
        }
        Ok(())
    }

    async fn check_node(&self, op: &Op, node: NodeRef, above: Option<usize>) -> Result<Level, IndexError> {
        let image = self.read_node(op, node).await?;
        let (depth, hash) = (image.head.depth, image.hash());
        let is_root = above.is_none();
        if !image.is_sound() || above.is_some_and(|above| above >= depth) || is_root != (depth == 0) {
            return Err(corrupt(format!(
                "the node at {} has slots or a depth ({depth}) that it cannot have",
                node.addr
            )));
        }
        if is_root && image.head.is_dead {
            return Err(corrupt("the root is dead".into()));
        }
        if image.head.is_dead {
            marks::hit("dead_node_left");
        }
        let left = image.children().into_iter().rev();
        let left = left.filter_map(|(step, slot)| Some((step, slot.target()?))).collect();
        Ok(Level { node, depth, hash, left, step: Step::End, has_keys: false, is_dead: image.head.is_dead })
    }

    /// Whether a key that was found below a node belongs there.
    fn check_prefix(&self, level: &mut Level, key: &[u8], last: Option<&[u8]>) -> Result<(), IndexError> {
        let belongs = match (level.has_keys, last) {
            // All keys below have the same prefix, so it is enough to hash the first one's.
            (true, Some(last)) => common_bytes(last, key) >= level.depth,
            _ => {
                key.len() >= level.depth && prefix::hash(self.shared.seed, &key[..level.depth]) == level.hash
            }
        };
        level.has_keys = true;
        if belongs && Step::of(key, level.depth) == Some(level.step) {
            return Ok(());
        }
        Err(corrupt(format!(
            "key {key:x?} is below the node at {} of depth {}, where it does not belong",
            level.node.addr, level.depth
        )))
    }
}
