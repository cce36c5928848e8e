//! Bulk load: builds a tree from sorted pairs, bottom up, each node written once, and puts it in the place of an empty one.
//!
//! 1. Fill leaves from left to right, and above them inner nodes, to a fill factor. A node is written when the next one's place is
//!    known, which is its sibling. Nobody knows these nodes yet.
//! 2. Under the lock of the old root, which must be an empty leaf: CAS the root pointer, bury the old root.
//! 3. Mark all nodes linked, so that caches may lead to them.

use crate::api::IndexError;
use crate::engine::sherman::Tree;
use crate::engine::sherman::layout::LINKED_AT;
use crate::engine::sherman::node::Plan;
use crate::engine::sherman::write::{Locked, Reached};
use crate::shared::surely;
use farwood_fabric::{Batch, GlobalAddr, Op};
use std::sync::atomic::Ordering;

/// How many nodes are marked at a time.
const MARKS_PER_BATCH: usize = 16;

/// The node of one level that is being filled.
struct Filling {
    addr: GlobalAddr,
    low: Vec<u8>,
    entries: Vec<(Vec<u8>, Vec<u8>)>,
}

/// A tree that is being built.
struct Builder<'a> {
    tree: &'a Tree,
    op: &'a Op,
    fill: f64,
    levels: Vec<Filling>,
    written: Vec<GlobalAddr>,
}

impl Builder<'_> {
    fn most(&self, level: usize) -> usize {
        let layout =
            if level == 0 { &self.tree.shared.layouts.leaf } else { &self.tree.shared.layouts.inner };
        let capacity = layout.capacity();
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "between 0 and the capacity"
        )]
        let filled = (capacity as f64 * self.fill).round() as usize;
        filled.clamp(2, capacity)
    }

    /// Adds an entry to a level, and what follows from it to those above.
    async fn add(&mut self, key: Vec<u8>, value: Vec<u8>) -> Result<(), IndexError> {
        let mut entry = (key, value);
        for level in 0.. {
            if level == self.levels.len() {
                let addr = self.tree.new_place(self.op).await?;
                // The leftmost node of a level begins where all keys do.
                let low = vec![0; self.tree.shared.config.key_bytes];
                self.levels.push(Filling { addr, low, entries: vec![entry] });
                return Ok(());
            }
            if self.levels[level].entries.len() < self.most(level) {
                self.levels[level].entries.push(entry);
                return Ok(());
            }
            let next = self.tree.new_place(self.op).await?;
            let low = entry.0.clone();
            let filling = Filling { addr: next, low: low.clone(), entries: vec![entry] };
            let full = std::mem::replace(&mut self.levels[level], filling);
            self.write(level, &full, Some((&low, next))).await?;
            if level + 1 == self.levels.len() {
                // The first node above: its first child is the node just written.
                self.add_first(level + 1, &full).await?;
            }
            entry = (low, next.to_raw().to_le_bytes().to_vec());
        }
        Ok(())
    }

    async fn add_first(&mut self, level: usize, child: &Filling) -> Result<(), IndexError> {
        debug_assert_eq!(level, self.levels.len());
        let addr = self.tree.new_place(self.op).await?;
        let pointer = child.addr.to_raw().to_le_bytes().to_vec();
        self.levels.push(Filling {
            addr,
            low: child.low.clone(),
            entries: vec![(child.low.clone(), pointer)],
        });
        Ok(())
    }

    async fn write(
        &mut self,
        level: usize,
        filling: &Filling,
        next: Option<(&[u8], GlobalAddr)>,
    ) -> Result<(), IndexError> {
        let plan = Plan {
            level: u8::try_from(level).unwrap_or(u8::MAX),
            incarnation: self.op.endpoint().random(),
            is_linked: false,
            low: &filling.low,
            high: next.map(|(high, _)| high),
            sibling: next.map_or(GlobalAddr::NULL, |(_, sibling)| sibling),
        };
        let entries = filling.entries.iter().map(|(key, value)| (key.as_slice(), value.as_slice()));
        self.tree.write_new(self.op, filling.addr, &plan, entries).await?;
        self.written.push(filling.addr);
        // Where nothing makes us wait, the lease must be kept all the same.
        self.op.endpoint().yield_now().await;
        Ok(())
    }

    /// Writes the last node of every level; the root.
    async fn end(&mut self) -> Result<Option<GlobalAddr>, IndexError> {
        let levels = std::mem::take(&mut self.levels);
        for (level, filling) in levels.iter().enumerate() {
            self.write(level, filling, None).await?;
        }
        Ok(levels.last().map(|root| root.addr))
    }
}

impl Tree {
    /// Fills an empty tree with pairs in the order of their keys, each key once, so that nodes are filled to `fill` (above 0, up to 1).
    /// While it runs the tree stays empty for everybody; if anybody writes meanwhile nothing is loaded and the error says so.
    pub async fn bulk_load(
        &self,
        pairs: impl IntoIterator<Item = (Vec<u8>, Vec<u8>)>,
        fill: f64,
    ) -> Result<u64, IndexError> {
        if !(fill > 0.0 && fill <= 1.0) {
            let why = format!("a fill factor of {fill}; it must be above 0 and at most 1");
            return Err(IndexError::BadConfig { why });
        }
        let op = self.begin()?;
        let mut builder = Builder { tree: self, op: &op, fill, levels: Vec::new(), written: Vec::new() };
        let built = self.build(&mut builder, pairs).await;
        let loaded = match built {
            Ok((count, Some(root))) => self.replace_empty_root(&op, root).await.map(|()| count),
            Ok((count, None)) => return Ok(count),
            Err(error) => Err(error),
        };
        if let Err(error) = loaded {
            let unwritten = builder.levels.iter().map(|filling| filling.addr);
            for addr in builder.written.iter().copied().chain(unwritten) {
                self.shared.pool.heap().free_unpublished(self.shared.node_class(), addr);
            }
            return Err(error);
        }
        self.mark_all_linked(&op, &builder.written).await?;
        loaded
    }

    async fn build(
        &self,
        builder: &mut Builder<'_>,
        pairs: impl IntoIterator<Item = (Vec<u8>, Vec<u8>)>,
    ) -> Result<(u64, Option<GlobalAddr>), IndexError> {
        let mut last: Option<Vec<u8>> = None;
        let mut count = 0;
        for (key, value) in pairs {
            self.check_key(&key)?;
            self.check_value(&value)?;
            if last.as_ref().is_some_and(|last| *last >= key) {
                let why = "pairs that are loaded in bulk come in the order of their keys, each once".into();
                return Err(IndexError::BadKey { why });
            }
            last = Some(key.clone());
            builder.add(key, value).await?;
            count += 1;
        }
        Ok((count, builder.end().await?))
    }

    async fn replace_empty_root(&self, op: &Op, root: GlobalAddr) -> Result<(), IndexError> {
        let old = self.root(op, false).await?;
        let Reached::Node(locked) = self.lock_node(op, old, None).await? else { return Err(not_empty()) };
        let Locked { held, addr, mut node } = self.mended(op, locked).await?;
        if node.level() != 0 || node.live().next().is_some() || node.high().is_some() {
            self.unlock(op, held).await?;
            return Err(not_empty());
        }
        if !self.swap_root_only(op, addr, root).await? {
            self.unlock(op, held).await?;
            return Err(not_empty());
        }
        self.shared.root.store(root.to_raw(), Ordering::Relaxed);
        let bury = Self::patch_at(addr, node.bury());
        self.finish(op, held, &[bury]).await?;
        Ok(self.shared.pool.heap().retire(op, self.shared.node_class(), addr).await?)
    }

    /// CASes the root pointer from an empty leaf that is locked: nobody else moves it meanwhile, so its outcome can be read.
    async fn swap_root_only(&self, op: &Op, old: GlobalAddr, new: GlobalAddr) -> Result<bool, IndexError> {
        let pointer = self.shared.root_pointer();
        if let Err(error) = op.cas(pointer, old.to_raw(), new.to_raw()).await {
            surely::reconnected(op, error).await?;
        }
        Ok(surely::read_word(op, pointer).await? == new.to_raw())
    }

    async fn mark_all_linked(&self, op: &Op, nodes: &[GlobalAddr]) -> Result<(), IndexError> {
        for server in self.shared.pool.session().servers() {
            let here: Vec<_> = nodes.iter().filter(|addr| addr.server() == *server).collect();
            for some in here.chunks(MARKS_PER_BATCH) {
                let mut batch = Batch::new(*server);
                for addr in some {
                    batch.write_inline(addr.add(LINKED_AT as u64), &[1]);
                }
                if let Err(failure) = op.submit(batch).await {
                    surely::reconnected(op, failure.error).await?;
                    for addr in some {
                        self.mark_linked(op, **addr).await?;
                    }
                }
            }
        }
        Ok(())
    }
}

fn not_empty() -> IndexError {
    IndexError::BadConfig {
        why: "only an empty index can be loaded in bulk; this one has been written to".into(),
    }
}
