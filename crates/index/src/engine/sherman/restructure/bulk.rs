//! Bulk load: builds a tree from sorted pairs, bottom up, each node written once, around the empty leaf that is there.
//!
//! 1. The root is an empty leaf, N. N is to become the first leaf. Fill the leaves behind it from left to right, and above all of them inner
//!    nodes, to a fill factor. A node is written when the next one's place is known, which is its sibling. Nobody knows these nodes yet.
//! 2. Under the lock of N, which must still be the root, and empty: WRITE the first pairs into N's slots, then N's METAs for the next
//!    generation, then N's new half and flag. With the flag N ends where the second leaf begins, and leads there: everything is loaded,
//!    for whoever reaches N by the root pointer, by a hint, or has been on its way there.
//! 3. Still under the lock of N: CAS the root pointer from N to the new root. Nobody else moves it meanwhile.
//! 4. Mark all nodes linked, so that caches may lead to them.
//!
//! N lives on, so there is no instant at which one reader finds the new root and another an old one that does not know of it. Who dies
//! before the flag of step 2 leaves N empty, or with some of the first pairs; who dies between 2 and 3, leaves that lack their separators, which
//! writers add.

use crate::api::IndexError;
use crate::engine::sherman::Tree;
use crate::engine::sherman::layout::LINKED_AT;
use crate::engine::sherman::node::Plan;
use crate::engine::sherman::read::Target;
use crate::engine::sherman::write::{Locked, Reached};
use crate::shared::locks::{Write, begun};
use crate::shared::surely;
use farwood_fabric::{Batch, GlobalAddr, Op};
use std::sync::atomic::Ordering;

/// How many nodes are marked at a time.
const MARKS_PER_BATCH: usize = 16;
/// How many pairs are added under one pin.
const PAIRS_PER_PIN: u64 = 64;
/// How many lost completions the CAS of the root pointer may meet.
const MAX_LOST: u32 = 16;

/// The node of one level that is being filled.
struct Filling {
    addr: GlobalAddr,
    low: Vec<u8>,
    entries: Vec<(Vec<u8>, Vec<u8>)>,
}

/// The leaf that is there, as it is to become: its entries, and where the next one begins and is.
struct First {
    entries: Vec<(Vec<u8>, Vec<u8>)>,
    next: Option<(Vec<u8>, GlobalAddr)>,
}

/// A tree that is being built.
struct Builder<'a> {
    tree: &'a Tree,
    op: Op,
    fill: f64,
    /// The leaf that is there.
    leaf: GlobalAddr,
    levels: Vec<Filling>,
    first: Option<First>,
    written: Vec<GlobalAddr>,
}

impl Builder<'_> {
    /// Pins the epoch of now, instead of an earlier one: a load takes long, and the epochs that everybody's memory waits for must go on.
    /// Nobody knows what it has made, so nothing of it needs the earlier pin.
    fn renew_pin(&mut self) -> Result<(), IndexError> {
        let op = self.tree.endpoint.op();
        // If not, the earlier one stays until all is given back.
        self.tree.admit(&op)?;
        self.op = op;
        Ok(())
    }

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
                // The leftmost node of a level begins where all keys do.
                let low = vec![0; self.tree.shared.config.key_bytes];
                self.levels.push(Filling { addr: self.leaf, low, entries: vec![entry] });
                return Ok(());
            }
            if self.levels[level].entries.len() < self.most(level) {
                self.levels[level].entries.push(entry);
                return Ok(());
            }
            let next = self.tree.new_place(&self.op).await?;
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
        let addr = self.tree.new_place(&self.op).await?;
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
        if filling.addr == self.leaf {
            let next = next.map(|(low, addr)| (low.to_vec(), addr));
            self.first = Some(First { entries: filling.entries.clone(), next });
            return Ok(());
        }
        let plan = Plan {
            level: u8::try_from(level).unwrap_or(u8::MAX),
            incarnation: self.op.endpoint().random(),
            is_linked: false,
            low: &filling.low,
            high: next.map(|(high, _)| high),
            sibling: next.map_or(GlobalAddr::NULL, |(_, sibling)| sibling),
        };
        let entries = filling.entries.iter().map(|(key, value)| (key.as_slice(), value.as_slice()));
        self.written.push(filling.addr);
        self.tree.write_new(&self.op, filling.addr, &plan, entries).await?;
        // Where nothing makes us wait, the lease must be kept all the same.
        self.op.endpoint().yield_now().await;
        Ok(())
    }

    /// Writes the last node of every level; the root.
    async fn end(&mut self) -> Result<Option<GlobalAddr>, IndexError> {
        let mut levels = std::mem::take(&mut self.levels);
        for level in 0..levels.len() {
            if let Err(error) = self.write(level, &levels[level], None).await {
                self.levels = levels.split_off(level + 1);
                return Err(error);
            }
        }
        Ok(levels.last().map(|root| root.addr))
    }

    /// Settles what becomes of the new nodes when nothing was loaded, or nobody knows.
    fn give_up(&self, error: &IndexError) {
        let heap = self.tree.shared.pool.heap();
        let unwritten = self.levels.iter().map(|filling| filling.addr).filter(|addr| *addr != self.leaf);
        for addr in self.written.iter().copied().chain(unwritten) {
            match error {
                IndexError::Unknown | IndexError::Fenced => heap.abandon(),
                _ => heap.free_unpublished(self.tree.shared.node_class(), addr),
            }
        }
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
        let op = self.endpoint.op();
        self.admit(&op)?;
        let leaf = self.root(&op, false).await?.addr;
        let (levels, written) = (Vec::new(), Vec::new());
        let mut builder = Builder { tree: self, op, fill, leaf, levels, first: None, written };
        let loaded = match self.build(&mut builder, pairs).await {
            Ok((count, Some(root))) => self.take_place(&builder.op, &builder, root).await.map(|()| count),
            Ok((count, None)) => return Ok(count),
            Err(error) => Err(error),
        };
        if let Err(error) = &loaded {
            builder.give_up(error);
            return loaded;
        }
        self.mark_all_linked(&builder.op, &builder.written).await?;
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
            if count % PAIRS_PER_PIN == 0 {
                builder.renew_pin()?;
            }
            builder.add(key, value).await?;
            count += 1;
        }
        Ok((count, builder.end().await?))
    }

    /// Steps 2 and 3. An error that is not [`IndexError::Unknown`] or [`IndexError::Fenced`] says that nothing was loaded.
    async fn take_place(&self, op: &Op, builder: &Builder<'_>, root: GlobalAddr) -> Result<(), IndexError> {
        let Some(first) = &builder.first else { return Ok(()) };
        let target = Target::linked(builder.leaf);
        let Reached::Node(locked) = self.lock_node(op, target, None).await? else { return Err(not_empty()) };
        let Locked { held, addr, mut node } = self.mended(op, locked).await?;
        let filled = async {
            let is_empty = node.level() == 0 && node.live().next().is_none() && node.high().is_none();
            let pointer = surely::read_word(op, self.shared.root_pointer()).await?;
            if !is_empty || pointer != addr.to_raw() {
                return Err(not_empty());
            }
            let entries = first.entries.iter().map(|(key, value)| (key.as_slice(), value.as_slice()));
            let next = first.next.as_ref().map(|(low, addr)| (low.as_slice(), *addr));
            let patches = node.fill(entries, next).ok_or_else(not_empty)?;
            let writes: Vec<Write> = patches.into_iter().map(|patch| Self::patch_at(addr, patch)).collect();
            self.write(op, addr.server(), &writes).await.map_err(may_be_loaded)?;
            if root == addr {
                return Ok(());
            }
            self.lead_to(op, addr, root).await
        };
        let filled = filled.await;
        let unlocked = self.unlock(op, held).await;
        filled?;
        unlocked.map_err(may_be_loaded)
    }

    /// Moves the root pointer away from a leaf that is locked and is the root: nobody else does meanwhile.
    async fn lead_to(&self, op: &Op, leaf: GlobalAddr, root: GlobalAddr) -> Result<(), IndexError> {
        let pointer = self.shared.root_pointer();
        for _ in 0..MAX_LOST {
            match op.cas(pointer, leaf.to_raw(), root.to_raw()).await {
                // Ours, now or by a CAS before whose completion was lost. (Another may be above it by now.)
                Ok(_) => {
                    self.shared.root.store(root.to_raw(), Ordering::Relaxed);
                    return Ok(());
                }
                Err(error) => surely::reconnected(op, error).await.map_err(begun)?,
            }
        }
        Err(IndexError::Unknown)
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

/// An error after the first WRITE to the leaf that is there.
fn may_be_loaded(error: IndexError) -> IndexError {
    if error == IndexError::Fenced { error } else { IndexError::Unknown }
}

fn not_empty() -> IndexError {
    IndexError::BadConfig {
        why: "only an empty index can be loaded in bulk; this one has been written to".into(),
    }
}
