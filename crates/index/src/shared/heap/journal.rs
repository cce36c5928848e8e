//! Where a session writes down what it has retired, so that others can free it if the session dies.
//!
//! ```text
//! board    RETIRE_SLOTS words a session and server:   the address of a retired object | of a page, with PAGE set | 0
//! page     words, in an object of its own:            the same
//! ```
//!
//! 1. A slot is a word on the server of the object. The board's are used first; how many objects wait for an epoch has no bound, so when those
//!    are used up, the journal goes on in pages. A page belongs to an index, as the objects do that it names, and goes when that is dropped.
//!    The board names pages; when it has no slot left, pages of the same index do.
//! 2. A page is added ahead of need, in the background. It is zeroed before it is named, and named before a slot of it is used.
//! 3. Who recovers a session frees what its journal names (`inherit`).
//!
//! If there is no room for a page, objects are retired without a slot, and leak in a crash ([`super::HeapCounts::unjournaled`]).

use super::{Class, Heap, Room};
use crate::shared::surely;
use farwood_fabric::clock::{MICROSECOND, MILLISECOND, Nanos};
use farwood_fabric::control::{IndexId, PAGE_CLASS, RETIRE_SLOTS};
use farwood_fabric::{Endpoint, FabricError, GlobalAddr, Op, RegionId, ServerId, Session, marks};
use rustc_hash::FxHashMap;

/// Pages are so large, or so small a part of a chunk.
const PAGE_BYTES: u64 = 4096;
const PAGES_PER_CHUNK: u64 = 16;
const LEAST_PAGE_BYTES: u64 = 256;
/// Marks the name of a page in a slot: addresses of objects are multiples of eight.
pub(super) const PAGE: u64 = 1;
/// So many slots of the board are kept for the names of pages.
const KEPT_FOR_PAGES: usize = 64;
/// A page is added when fewer slots are left: operations that are under way meanwhile want one each.
const AHEAD: usize = 128;
/// How often whoever has no slot looks whether a page has been added, and how long it waits in between.
const MAX_GROWTH_WAITS: u32 = 10_000;
const GROWTH_WAIT_NS: Nanos = 20 * MICROSECOND;
/// If there was no room for a page, it is not asked for again so soon.
const GROW_AGAIN_NS: Nanos = 10 * MILLISECOND;

/// The slots that are not in use, and the pages.
#[derive(Default)]
pub(super) struct Slots {
    board: FxHashMap<ServerId, Vec<GlobalAddr>>,
    pages: FxHashMap<(ServerId, IndexId), Pages>,
}

#[derive(Default)]
struct Pages {
    all: Vec<Page>,
    slots: Vec<GlobalAddr>,
    /// Somebody makes one.
    is_growing: bool,
    /// Nobody does before this time.
    next_growth: Nanos,
}

#[derive(Clone, Copy)]
struct Page {
    addr: GlobalAddr,
    /// The slot that names it.
    named_in: GlobalAddr,
    /// It surely does, and the page's slots may be used.
    is_named: bool,
}

impl Slots {
    pub(super) fn of(session: &Session, pages_only: bool) -> Self {
        let count = if pages_only { 2 } else { RETIRE_SLOTS };
        let slots = |server: &ServerId| {
            let journal = session.journal(*server)?;
            Some((*server, (0..count).map(|n| journal.add(n * 8)).collect()))
        };
        Self { board: session.servers().iter().filter_map(slots).collect(), ..Self::default() }
    }

    /// A slot, if there is one, and how many are left.
    fn take(&mut self, index: IndexId, server: ServerId) -> (Option<GlobalAddr>, usize) {
        let Some(board) = self.board.get_mut(&server) else { return (None, 0) };
        let free = board.len().saturating_sub(KEPT_FOR_PAGES);
        if free > AHEAD {
            return (board.pop(), free - 1);
        }
        let mut none = Vec::new();
        let in_pages = self.pages.get_mut(&(server, index)).map_or(&mut none, |pages| &mut pages.slots);
        // The last slot of all is for the name of the next page.
        let is_last = board.is_empty() && in_pages.len() == 1;
        let slot = match free {
            0 if is_last => None,
            0 => in_pages.pop(),
            _ => board.pop(),
        };
        (slot, (free + in_pages.len()).saturating_sub(usize::from(free > 0)))
    }

    /// A slot for the name of a page: of the board, or of another page.
    fn take_for_name(&mut self, of: (ServerId, IndexId)) -> Option<GlobalAddr> {
        let on_board = self.board.get_mut(&of.0).and_then(Vec::pop);
        on_board.or_else(|| self.pages.get_mut(&of)?.slots.pop())
    }

    /// A slot has been cleared.
    pub(super) fn give(&mut self, index: IndexId, slot: GlobalAddr) {
        if slot.region() == RegionId::BOARD {
            self.board.entry(slot.server()).or_default().push(slot);
        } else if let Some(pages) = self.pages.get_mut(&(slot.server(), index)) {
            pages.slots.push(slot);
        }
    }
}

/// The right to add a page for an index on a server, which one has at a time.
struct Growing {
    heap: Heap,
    of: (ServerId, IndexId),
}

impl Growing {
    fn begin(heap: &Heap, of: (ServerId, IndexId), now: Nanos) -> Option<Self> {
        let mut state = heap.state();
        let pages = state.slots.pages.entry(of).or_default();
        if pages.is_growing || now < pages.next_growth {
            return None;
        }
        pages.is_growing = true;
        Some(Self { heap: heap.clone(), of })
    }

    /// Adds a page, if there is room for one.
    async fn grow(self, endpoint: Endpoint) {
        let added = self.add_page(&endpoint.op()).await;
        if !matches!(added, Ok(true)) {
            // Without it there may be no slot: a crash would leak an object, and that is all.
            let next = endpoint.now().saturating_add(GROW_AGAIN_NS);
            self.heap.state().slots.pages.entry(self.of).or_default().next_growth = next;
        }
    }

    async fn add_page(&self, op: &Op) -> Result<bool, FabricError> {
        let page = match self.page_without_name() {
            Some(page) => page,
            None => match self.new_page(op).await? {
                Some(page) => page,
                None => return Ok(false),
            },
        };
        surely::write_word(op, page.named_in, page.addr.to_raw() | PAGE).await?;
        let is_on_board = page.named_in.region() == RegionId::BOARD;
        marks::hit(if is_on_board { "journal_page_added" } else { "journal_page_chained" });
        let (server, index) = self.of;
        let count = u64::from(self.heap.page_class(index, server).object_bytes) / 8;
        let mut state = self.heap.state();
        let pages = state.slots.pages.entry(self.of).or_default();
        pages.slots.extend((0..count).map(|n| page.addr.add(n * 8)));
        for named in pages.all.iter_mut().filter(|other| other.addr == page.addr) {
            named.is_named = true;
        }
        Ok(true)
    }

    /// One whose name was written, and nobody knows whether it is there.
    fn page_without_name(&self) -> Option<Page> {
        let state = self.heap.state();
        state.slots.pages.get(&self.of)?.all.iter().find(|page| !page.is_named).copied()
    }

    /// Room for a page, zeroed, and a slot for its name. It is a page before it has the name: whatever becomes of that is cleared with it.
    async fn new_page(&self, op: &Op) -> Result<Option<Page>, FabricError> {
        let (server, index) = self.of;
        let class = self.heap.page_class(index, server);
        let mut room: Room = self.heap.room(op, server, class).await?;
        let bytes = usize::try_from(class.object_bytes).unwrap_or(0);
        surely::write(op, room.addr(), &vec![0; bytes]).await?;
        let Some(named_in) = self.heap.state().slots.take_for_name(self.of) else { return Ok(None) };
        room.link();
        let page = Page { addr: room.addr(), named_in, is_named: false };
        self.heap.state().slots.pages.entry(self.of).or_default().all.push(page);
        Ok(Some(page))
    }
}

impl Drop for Growing {
    fn drop(&mut self) {
        if let Some(pages) = self.heap.state().slots.pages.get_mut(&self.of) {
            pages.is_growing = false;
        }
    }
}

impl Heap {
    fn page_class(&self, index: IndexId, server: ServerId) -> Class {
        let bytes =
            (self.chunk_bytes(server) / PAGES_PER_CHUNK).clamp(LEAST_PAGE_BYTES, PAGE_BYTES) / 64 * 64;
        Class { index, class: PAGE_CLASS, object_bytes: u32::try_from(bytes).unwrap_or(u32::MAX) }
    }

    /// A slot for an object of `index` on `server`; `None` if there is none, and no room for a page.
    pub(super) async fn slot_for(&self, op: &Op, index: IndexId, server: ServerId) -> Option<GlobalAddr> {
        let (of, endpoint) = ((server, index), op.endpoint());
        for _ in 0..MAX_GROWTH_WAITS {
            let (slot, left) = self.take_slot(index, server);
            if left >= AHEAD {
                return slot;
            }
            match (Growing::begin(self, of, endpoint.now()), slot) {
                (Some(growing), None) => endpoint.see_through(growing.grow(endpoint.clone())).await,
                (Some(growing), Some(_)) => {
                    endpoint.settle(growing.grow(endpoint.clone()));
                    return slot;
                }
                (None, None) if self.is_growing(of) => endpoint.sleep(GROWTH_WAIT_NS).await,
                (None, _) => return slot,
            }
        }
        None
    }

    fn is_growing(&self, of: (ServerId, IndexId)) -> bool {
        self.state().slots.pages.get(&of).is_some_and(|pages| pages.is_growing)
    }

    fn take_slot(&self, index: IndexId, server: ServerId) -> (Option<GlobalAddr>, usize) {
        self.state().slots.take(index, server)
    }

    /// Takes the pages of dropped indexes out of the journal, whose memory goes with them.
    pub(super) async fn forget_pages(&self, op: &Op, dropped: &[IndexId]) -> Result<(), FabricError> {
        self.unname_pages(op, |index| dropped.contains(&index)).await?;
        self.state().slots.pages.retain(|(_, index), _| !dropped.contains(index));
        Ok(())
    }

    /// Takes the pages out of the journal, when nothing is in it, and frees them. Those of indexes that are being dropped are left to whoever
    /// clears them.
    pub(super) async fn free_pages(&self, op: &Op) -> Result<(), FabricError> {
        let dropping = self.inner.session.dropping();
        for (index, addr) in self.unname_pages(op, |index| !dropping.contains(&index)).await? {
            self.free_unpublished(self.page_class(index, addr.server()), addr);
        }
        Ok(())
    }

    /// Clears the names of the pages of some indexes; which they were. If that fails, those that are left are still pages, and named.
    async fn unname_pages(
        &self,
        op: &Op,
        is_so: impl Fn(IndexId) -> bool,
    ) -> Result<Vec<(IndexId, GlobalAddr)>, FabricError> {
        let mut unnamed = Vec::new();
        while let Some((of, addr, named_in)) = self.first_page(&is_so) {
            surely::write_word(op, named_in, 0).await?;
            let mut state = self.state();
            if let Some(pages) = state.slots.pages.get_mut(&of) {
                pages.all.retain(|page| page.addr != addr);
                pages.slots.clear();
            }
            if named_in.region() == RegionId::BOARD {
                state.slots.give(of.1, named_in);
            }
            unnamed.push((of.1, addr));
        }
        Ok(unnamed)
    }

    /// The first page of some indexes, by address, so that what is done does not depend on the order of a hash map; and what names it.
    fn first_page(
        &self,
        is_so: impl Fn(IndexId) -> bool,
    ) -> Option<((ServerId, IndexId), GlobalAddr, GlobalAddr)> {
        let state = self.state();
        let of_some = state.slots.pages.iter().filter(|((_, index), _)| is_so(*index));
        let pages =
            of_some.flat_map(|(of, pages)| pages.all.iter().map(|page| (*of, page.addr, page.named_in)));
        pages.min_by_key(|(_, addr, _)| *addr)
    }
}
