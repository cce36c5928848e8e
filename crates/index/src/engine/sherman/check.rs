//! Walks the whole tree while nobody uses it and verifies every invariant.

use super::node::Node;
use super::read::Target;
use super::{Tree, corrupt};
use crate::api::IndexError;
use crate::shared::heap::Class;
use crate::shared::surely;
use farwood_fabric::{GlobalAddr, Op};
use std::collections::{BTreeMap, BTreeSet};

impl Tree {
    /// Every node, level by level, from the root down; returns where they are.
    pub(super) async fn check(&self, op: &Op) -> Result<Vec<(Class, GlobalAddr)>, IndexError> {
        self.shared.locks.check_free(op).await?;
        let root = self.root(op, false).await?.addr;
        self.replace_dead_root(op, root).await?;
        let root = self.root(op, false).await?.addr;
        let mut found = Vec::new();
        let mut first = root;
        let mut level = None;
        let mut expected = Vec::new();
        loop {
            let nodes = self.check_level(op, first, level).await?;
            check_reached(&nodes, &expected)?;
            let Some((_, leftmost)) = nodes.first() else {
                return Err(corrupt("a level without nodes".into()));
            };
            let forgets = self.shared.config.sabotage.walk_forgets_inner_nodes && leftmost.level() > 0;
            let named = nodes.iter().filter(|_| !forgets);
            found.extend(named.map(|(addr, _)| (self.shared.node_class(), *addr)));
            let here = leftmost.level();
            if here == 0 {
                return Ok(found);
            }
            let children = children(&nodes)?;
            first = match children.first_key_value() {
                Some((key, child)) if key.as_slice() == leftmost.low() => *child,
                _ => return Err(corrupt(format!("level {here} has no child for the smallest key"))),
            };
            self.check_children(op, &children, here - 1).await?;
            level = Some(here - 1);
            expected = children.into_values().collect();
        }
    }

    /// The nodes of one level from left to right: whole, alive, and without gaps.
    async fn check_level(
        &self,
        op: &Op,
        first: GlobalAddr,
        level: Option<u8>,
    ) -> Result<Vec<(GlobalAddr, Node)>, IndexError> {
        let mut nodes: Vec<(GlobalAddr, Node)> = Vec::new();
        let (mut addr, mut level, mut low) = (first, level, vec![0; self.shared.config.key_bytes]);
        loop {
            let node = self.check_node(op, addr).await?;
            let expected = *level.get_or_insert(node.level());
            if node.head().is_dead || node.level() != expected || node.low() != low.as_slice() {
                return Err(corrupt(format!(
                    "the node at {addr} is {:?} and begins at {:x?}; on level {expected} one was expected that begins at {low:x?}",
                    node.head(),
                    node.low()
                )));
            }
            let next = node.high().map(|high| (high.to_vec(), node.sibling()));
            nodes.push((addr, node));
            let Some((high, sibling)) = next else { return Ok(nodes) };
            if high <= low {
                return Err(corrupt(format!("the node at {addr} covers nothing: {low:x?} to {high:x?}")));
            }
            (low, addr) = (high, sibling);
        }
    }

    async fn check_node(&self, op: &Op, addr: GlobalAddr) -> Result<Node, IndexError> {
        // Under its lock, since what a dead session left torn is mended there and nowhere else.
        let buf = surely::read(op, addr, self.shared.config.node_bytes).await?;
        let torn = || corrupt(format!("the node at {addr} is torn though nobody writes"));
        let mut node =
            Node::accept(&self.shared.layouts, self.shared.place(addr), buf).map_err(|_| torn())?;
        if !node.is_whole() {
            if self.shared.config.sabotage.skip_repair {
                return Err(torn());
            }
            if let Some(patch) = node.repair() {
                self.write(op, addr.server(), &[Self::patch_at(addr, patch)]).await?;
            }
        }
        let keys: Vec<usize> = node.sorted();
        if keys.windows(2).any(|pair| node.key(pair[0]) == node.key(pair[1])) {
            return Err(corrupt(format!("the node at {addr} has a key twice")));
        }
        Ok(node)
    }

    /// Every separator leads to the node that begins with it.
    async fn check_children(
        &self,
        op: &Op,
        children: &BTreeMap<Vec<u8>, GlobalAddr>,
        level: u8,
    ) -> Result<(), IndexError> {
        for (separator, child) in children {
            let node = self.read_whole(op, Target::linked(*child), Some(level)).await?;
            if node.is_none_or(|node| node.low() != separator.as_slice()) {
                return Err(corrupt(format!(
                    "separator {separator:x?} leads to {child}, which is dead, or not on level {level}, or begins elsewhere"
                )));
            }
        }
        Ok(())
    }
}

/// Whether the way along the siblings passes by all children of the level above.
fn check_reached(nodes: &[(GlobalAddr, Node)], children: &[GlobalAddr]) -> Result<(), IndexError> {
    let reached: BTreeSet<_> = nodes.iter().map(|(addr, _)| *addr).collect();
    match children.iter().find(|child| !reached.contains(child)) {
        Some(child) => Err(corrupt(format!("a separator leads to {child}, which no sibling leads to"))),
        None => Ok(()),
    }
}

/// All separators of a level.
fn children(nodes: &[(GlobalAddr, Node)]) -> Result<BTreeMap<Vec<u8>, GlobalAddr>, IndexError> {
    let mut children = BTreeMap::new();
    for (addr, node) in nodes {
        if node.child_slot(node.low()).is_none() {
            return Err(corrupt(format!("the inner node at {addr} has no child for its low fence")));
        }
        children.extend(node.live().map(|slot| (node.key(slot).to_vec(), node.child(slot))));
    }
    Ok(children)
}
