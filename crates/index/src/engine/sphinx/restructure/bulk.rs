//! Bulk load: builds the tree from sorted pairs, each node written once, when all of its children are known, and lets the root of an
//! empty tree lead to it.
//!
//! 1. The nodes on the way of the last key are open. The next key parts from it somewhere: nodes below that are done, are written, and become
//!    children of those above. Nobody knows these nodes yet.
//! 2. Under the lock of the root, which must have no children: WRITE all of its slots. (Each by itself: whoever dies here leaves some loaded.)
//! 3. Mark all nodes linked, and enter them into the hash tables.

use super::split::{common_bytes, to_node};
use crate::api::{IndexError, KeyValue};
use crate::engine::sphinx::layout::{
    Head, LeafClass, LeafRef, NODE_LINKED_AT, NODE_SLOTS_AT, NodeKind, NodeRef, Slot, Step,
};
use crate::engine::sphinx::node::prefix;
use crate::engine::sphinx::node::{Children, build, leaf};
use crate::engine::sphinx::write::to_leaf;
use crate::engine::sphinx::{Tree, corrupt};
use crate::shared::heap::Class;
use crate::shared::locks::Write;
use crate::shared::surely;
use farwood_fabric::{Batch, GlobalAddr, Op, ServerId};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use std::cell::RefCell;
use std::rc::Rc;

/// How many objects are written at a time to one server.
const WRITES_PER_BATCH: usize = 16;
/// How many nodes are entered into the hash tables at a time.
const ANNOUNCERS: usize = 32;
/// How many pairs are added under one pin.
const PAIRS_PER_PIN: u64 = 64;
/// How often a batch is repeated through lost completions.
const MAX_LOST: u32 = 16;

/// A node that gets more children.
struct Open {
    depth: usize,
    children: Children,
}

/// A tree that is being built.
struct Builder<'a> {
    tree: &'a Tree,
    op: Op,
    /// The nodes on the way of the last key, the root first.
    open: Vec<Open>,
    last: Vec<u8>,
    /// What is to become a child: the last leaf, or the last node that is done.
    pending: Slot,
    count: u64,
    made: Vec<(Class, GlobalAddr)>,
    nodes: Vec<(u64, NodeRef)>,
    writes: FxHashMap<ServerId, Vec<(GlobalAddr, Vec<u8>)>>,
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

    async fn room(&mut self, hash: u64, class: Class) -> Result<GlobalAddr, IndexError> {
        let server = prefix::server_of(hash, self.tree.shared.servers());
        let made = self.tree.allocate(&self.op, server, class).await?.release();
        self.made.push(made);
        Ok(made.1)
    }

    async fn write(&mut self, addr: GlobalAddr, bytes: Vec<u8>) -> Result<(), IndexError> {
        let waiting = self.writes.entry(addr.server()).or_default();
        waiting.push((addr, bytes));
        if waiting.len() < WRITES_PER_BATCH {
            return Ok(());
        }
        let writes = std::mem::take(waiting);
        write_all(&self.op, addr.server(), &writes).await?;
        // Where nothing makes us wait, the lease must be kept all the same.
        self.op.endpoint().yield_now().await;
        Ok(())
    }

    async fn add(&mut self, key: Vec<u8>, value: &[u8]) -> Result<(), IndexError> {
        if self.count > 0 {
            if self.last >= key {
                let why = "pairs that are loaded in bulk come in the order of their keys, each once".into();
                return Err(IndexError::BadKey { why });
            }
            self.close_below(common_bytes(&self.last, &key)).await?;
        }
        let hash = prefix::hash(self.tree.shared.seed, &key);
        let Some(class) = LeafClass::for_pair(key.len(), value.len()) else {
            return Err(IndexError::BadValue { why: "it is too long".into() });
        };
        let addr = self.room(hash, self.tree.shared.leaf_class(class)).await?;
        let version = u32::try_from(hash >> 36).unwrap_or(0);
        self.write(addr, leaf::build(self.tree.shared.place(addr), version, &key, value)).await?;
        self.pending = to_leaf(Step::End, LeafRef { addr, class })?;
        self.last = key;
        self.count += 1;
        Ok(())
    }

    /// The last key and the next one have so many bytes in common: what is deeper is done.
    async fn close_below(&mut self, common: usize) -> Result<(), IndexError> {
        self.close_deeper_than(common).await?;
        let step = self.step_at(common)?;
        match self.open.last_mut() {
            Some(open) if open.depth == common => open.children.push((step, self.pending)),
            _ => {
                let children = [(step, self.pending)].into_iter().collect();
                self.open.push(Open { depth: common, children });
            }
        }
        Ok(())
    }

    async fn close_deeper_than(&mut self, depth: usize) -> Result<(), IndexError> {
        while self.open.last().is_some_and(|open| open.depth > depth) {
            if let Some(open) = self.open.pop() {
                self.close(open).await?;
            }
        }
        Ok(())
    }

    fn step_at(&self, depth: usize) -> Result<Step, IndexError> {
        Step::of(&self.last, depth).ok_or_else(|| corrupt("a key is shorter than its prefix".into()))
    }

    /// Writes a node that has all of its children but the pending one, and lets it be pending.
    async fn close(&mut self, mut open: Open) -> Result<(), IndexError> {
        open.children.push((self.step_at(open.depth)?, self.pending));
        let beside = open.children.iter().filter(|(step, _)| *step != Step::End).count();
        let kind = NodeKind::for_children(beside);
        let hash = prefix::hash(self.tree.shared.seed, &self.last[..open.depth]);
        let addr = self.room(hash, self.tree.shared.node_class(kind)).await?;
        let head = Head { is_dead: false, is_linked: false, kind, depth: open.depth };
        self.write(addr, build(head, hash, &open.children)).await?;
        let node = NodeRef { addr, kind };
        self.nodes.push((hash, node));
        self.pending = to_node(Step::End, node)?;
        Ok(())
    }

    /// Writes what is left; the children of the root.
    async fn end(&mut self) -> Result<Children, IndexError> {
        let mut root = Children::new();
        if self.count > 0 {
            self.close_deeper_than(0).await?;
            root = self.open.pop().map(|open| open.children).unwrap_or_default();
            root.push((self.step_at(0)?, self.pending));
        }
        for (server, writes) in std::mem::take(&mut self.writes) {
            write_all(&self.op, server, &writes).await?;
        }
        Ok(root)
    }
}

/// WRITEs to one server, through lost completions.
async fn write_all(op: &Op, server: ServerId, writes: &[(GlobalAddr, Vec<u8>)]) -> Result<(), IndexError> {
    for _ in 0..MAX_LOST {
        let mut batch = Batch::new(server);
        for (addr, bytes) in writes {
            batch.write(*addr, op.endpoint().buf_of(bytes));
        }
        if batch.is_empty() {
            return Ok(());
        }
        match op.submit(batch).await {
            Ok(_) => return Ok(()),
            Err(failure) => surely::reconnected(op, failure.error).await?,
        }
    }
    Err(IndexError::Contended { what: "a completion", attempts: MAX_LOST })
}

impl Tree {
    /// Fills an empty tree with pairs in the order of their keys, each key once. While it runs the tree stays empty for everybody; if
    /// anybody writes meanwhile nothing is loaded and the error says so.
    pub async fn bulk_load(&self, pairs: impl IntoIterator<Item = KeyValue>) -> Result<u64, IndexError> {
        let op = self.endpoint.op();
        self.admit(&op)?;
        let mut builder = Builder {
            tree: self,
            op,
            open: Vec::new(),
            last: Vec::new(),
            pending: Slot::EMPTY,
            count: 0,
            made: Vec::new(),
            nodes: Vec::new(),
            writes: FxHashMap::default(),
        };
        let loaded = match self.build(&mut builder, pairs).await {
            Ok(children) => self.fill_root(&builder.op, &children).await,
            Err(error) => Err(error),
        };
        match loaded {
            Ok(()) => {}
            Err(error @ (IndexError::Unknown | IndexError::Fenced)) => {
                for _ in &builder.made {
                    self.shared.pool.heap().abandon();
                }
                return Err(error);
            }
            Err(error) => {
                for (class, addr) in &builder.made {
                    self.shared.pool.heap().give_back_room(&self.endpoint, *class, *addr);
                }
                return Err(error);
            }
        }
        if self.shared.finder.is_some() {
            let Builder { count, nodes, op, .. } = builder;
            drop(op);
            self.announce_all(nodes).await?;
            return Ok(count);
        }
        Ok(builder.count)
    }

    async fn build(
        &self,
        builder: &mut Builder<'_>,
        pairs: impl IntoIterator<Item = KeyValue>,
    ) -> Result<Children, IndexError> {
        for (key, value) in pairs {
            self.check_pair(&key, &value)?;
            if builder.count % PAIRS_PER_PIN == 0 {
                builder.renew_pin()?;
            }
            builder.add(key, &value).await?;
        }
        builder.end().await
    }

    async fn fill_root(&self, op: &Op, children: &Children) -> Result<(), IndexError> {
        let root = self.shared.root;
        let (held, image) = self.lock_node(op, root).await?;
        if image.count() > 0 {
            self.shared.locks.unlock(op, held).await?;
            let why = "only an empty index can be loaded in bulk; this one has been written to".into();
            return Err(IndexError::BadConfig { why });
        }
        let bytes = build(image.head, image.hash(), children);
        let from = NODE_SLOTS_AT - 8;
        let slots = Write { addr: root.addr.add(from as u64), bytes: SmallVec::from_slice(&bytes[from..]) };
        self.shared.locks.finish(op, held, &[slots]).await
    }

    /// Marks nodes as linked and enters them into the hash tables, several at a time.
    async fn announce_all(&self, nodes: Vec<(u64, NodeRef)>) -> Result<(), IndexError> {
        if !self.are_tables_in_use(&self.endpoint.op()).await? {
            return Ok(());
        }
        for server in self.shared.servers() {
            let here: Vec<_> = nodes.iter().filter(|(_, node)| node.addr.server() == *server).collect();
            for some in here.chunks(WRITES_PER_BATCH) {
                let linked = |(_, node): &&(u64, NodeRef)| (node.addr.add(NODE_LINKED_AT as u64), vec![1]);
                let writes: Vec<_> = some.iter().map(linked).collect();
                write_all(&self.endpoint.op(), *server, &writes).await?;
            }
        }
        let left = Rc::new(RefCell::new(nodes));
        let announce = |_| {
            let (left, endpoint) = (Rc::clone(&left), self.endpoint.clone());
            let tree = Tree::new(&self.shared, &endpoint, self.number);
            self.endpoint.spawn(async move {
                loop {
                    let Some((hash, node)) = left.borrow_mut().pop() else { return Ok(()) };
                    tree.enter(&endpoint.op(), hash, node).await?;
                    endpoint.yield_now().await;
                }
            })
        };
        let announcers: Vec<_> = (0..ANNOUNCERS).map(announce).collect();
        for announcer in announcers {
            announcer.await.unwrap_or(Err(IndexError::Unknown))?;
        }
        Ok(())
    }
}
