//! What is believed of memory that is not whole, one rule at a time.

use super::*;
use crate::catalog::Catalog;
use crate::chunks::{ChunkTable, SET_ASIDE, Want};
use crate::layout::chunk_entry;
use crate::repeats::CallTag;
use crate::sessions::SessionTable;
use crate::testing::VecMemory;
use farwood_fabric::addr::{ServerId, SessionId};
use farwood_fabric::call::CallId;
use farwood_fabric::control::{MAIN_BASE, ObjectChunk};
use farwood_fabric::found::Piece;
use std::sync::atomic::{AtomicU64, Ordering};

const A: SessionId = SessionId::new(1);
const CHUNK: u64 = 4096;

/// Of a call that is no repeat.
fn tag() -> CallTag {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let sequence = NEXT.fetch_add(1, Ordering::Relaxed);
    CallTag::of(CallId { session: A, term: 1, endpoint: 0, sequence })
}

struct World {
    memory: VecMemory,
    config: ServerConfig,
    index: IndexId,
}

/// One index, whose first chunk is for objects of 64 bytes, and the second for raw bytes.
fn world(chunks: u32) -> World {
    let config = ServerConfig::tiny(ServerId::new(0), 1, chunks);
    let memory = VecMemory::new(&layout::regions(&config));
    layout::format(&memory, &config);
    let mut catalog = Catalog::load(&memory, &config).unwrap();
    let index = catalog.create(&memory, "a".to_owned(), "dex".to_owned(), vec![1], (7, tag())).unwrap().id;
    let mut table = ChunkTable::load(&memory, &config).unwrap();
    for object_bytes in [64, 0] {
        let kind = ChunkType { index, class: 1, object_bytes };
        table.allocate_for(&memory, A, Want { kind, count: 1, flushed_through: 0 }, tag()).unwrap();
    }
    World { memory, config, index }
}

impl World {
    fn mend(&self, damage: &Damage) -> Torn {
        mend(&self.memory, &self.config, damage).unwrap();
        load_mark(&self.memory).unwrap()
    }

    fn entry(&self, chunk: u32) -> u64 {
        Layout::new(&self.config).chunk_entry(chunk)
    }

    /// Of all chunks that are in use, first chunk and index.
    fn used(&self) -> Vec<(u64, IndexId)> {
        let table = ChunkTable::load(&self.memory, &self.config).unwrap();
        table.list(None).iter().map(|chunk| ((chunk.offset - MAIN_BASE) / CHUNK, chunk.index)).collect()
    }

    fn bitmap(&self, chunk: u64) -> u64 {
        self.memory.load(RegionId::MAIN, MAIN_BASE + chunk * CHUNK + ObjectChunk::BITMAP_OFFSET)
    }
}

fn all_taken() -> u64 {
    ObjectChunk::new(CHUNK, 64).unwrap().word_mask(0)
}

#[test]
fn no_object_is_free_where_a_bitmap_may_be_old() {
    let w = world(4);
    let elsewhere = Piece { region: RegionId::MAIN, offset: MAIN_BASE + CHUNK, bytes: CHUNK };
    let torn = w.mend(&Damage { pieces: 9, failed: vec![elsewhere] });
    assert_eq!((w.bitmap(0), torn.indexes), (0, vec![w.index]), "its checksum holds");
    let torn = w.mend(&Damage::default());
    assert_eq!((w.bitmap(0), torn.indexes), (all_taken(), vec![w.index]));
    assert_eq!(w.used(), [(0, w.index), (1, w.index)]);
}

#[test]
fn chunks_that_the_table_has_forgotten_are_not_given_to_others() {
    let w = world(4);
    // The page with all entries came back from before.
    for chunk in 0..2 {
        layout::store(&w.memory, w.entry(chunk) + chunk_entry::COMMIT_AT, 0);
    }
    w.memory.store(RegionId::MAIN, MAIN_BASE + CHUNK + 512, 5);
    let torn = w.mend(&Damage::default());
    assert_eq!(w.used(), [(0, w.index), (1, SET_ASIDE)], "by its header, and because it is not empty");
    assert_eq!((w.bitmap(0), torn.set_aside), (all_taken(), 1));
    // What is empty is given out, what is set aside is not.
    let mut table = ChunkTable::load(&w.memory, &w.config).unwrap();
    let kind = ChunkType { index: w.index, class: 1, object_bytes: 64 };
    let mut handed =
        || table.allocate_for(&w.memory, A, Want { kind, count: 1, flushed_through: u64::MAX }, tag());
    let offsets: Vec<_> =
        (0..3).map_while(|_| handed().ok()).map(|chunk| (chunk.offset - MAIN_BASE) / CHUNK).collect();
    assert_eq!(offsets, [0, 2, 3], "the first is inherited, full as it is");
}

#[test]
fn entries_that_make_no_sense_are_dropped_and_their_chunks_set_aside() {
    for word in [9, 1 | 7 << 32, 1, 1 | u64::from(u32::MAX) << 32] {
        let w = world(4);
        layout::store(&w.memory, w.entry(0) + chunk_entry::COMMIT_AT, word);
        let torn = w.mend(&Damage::default());
        assert_eq!((torn.dropped, torn.set_aside), (1, 1), "{word:#x}");
        assert_eq!(w.used(), [(0, SET_ASIDE), (1, w.index)]);
    }
    // An extent over another: only what the other does not have is set aside.
    let w = world(4);
    layout::store(&w.memory, w.entry(0) + chunk_entry::COMMIT_AT, 1 | 2 << 32);
    w.mend(&Damage::default());
    assert_eq!(w.used(), [(0, SET_ASIDE), (1, w.index)]);
}

#[test]
fn headers_are_checked_against_the_table() {
    let header = |w: &World| MAIN_BASE + (u64::from(w.index) - 1) * CHUNK;
    let w = world(4);
    w.memory.store(RegionId::MAIN, header(&w), 0);
    assert_eq!(w.mend(&Damage::default()).dropped, 1);
    assert_eq!((w.memory.load(RegionId::MAIN, header(&w)), w.bitmap(0)), (ObjectChunk::MAGIC, all_taken()));
    let w = world(4);
    w.memory.store(RegionId::MAIN, header(&w) + 8, 77);
    assert_eq!(
        (w.mend(&Damage::default()).dropped, w.used()[0]),
        (1, (0, SET_ASIDE)),
        "two say that it is theirs"
    );
}

#[test]
fn indexes_and_sessions_that_make_no_sense_are_dropped() {
    let w = world(4);
    let layout = Layout::new(&w.config);
    let [catalog, session] = [layout.catalog_entry(0), layout.session_entry(2)];
    w.memory.store(RegionId::META, catalog, 0xff);
    w.memory.store(RegionId::META, session, 0xff);
    assert!(
        Catalog::load(&w.memory, &w.config).is_err() && SessionTable::load(&w.memory, &w.config, 0).is_err()
    );
    let torn = w.mend(&Damage::default());
    // The chunks' index is not known any more: the one with a header is not believed, but stays in use until the server has started.
    assert_eq!(torn.dropped, 2);
    assert!(
        Catalog::load(&w.memory, &w.config).is_ok() && SessionTable::load(&w.memory, &w.config, 0).is_ok()
    );
    let mut catalog = Catalog::load(&w.memory, &w.config).unwrap();
    let info = catalog.create(&w.memory, "b".to_owned(), "dex".to_owned(), vec![], (7, tag())).unwrap();
    assert!(info.id > w.index, "the number of the lost index does not come back");
}

#[test]
fn numbers_that_must_not_come_twice_leap_and_nobody_holds_a_lock() {
    let w = world(4);
    let words = [superblock::NEXT_TERM_AT, superblock::EPOCH_AT, superblock::FLUSH_AT];
    let before = words.map(|at| layout::load(&w.memory, at));
    w.memory.store(RegionId::LOCK, 8, 5);
    let journal = Layout::new(&w.config).journal(1).offset();
    w.memory.store(RegionId::BOARD, journal, 5);
    w.mend(&Damage::default());
    let after = words.map(|at| layout::load(&w.memory, at));
    assert!(before.iter().zip(after).all(|(before, after)| after >= before + LEAP), "{before:?} {after:?}");
    assert_eq!((w.memory.load(RegionId::LOCK, 8), w.memory.load(RegionId::BOARD, journal)), (0, 0));
}

#[test]
fn a_superblock_that_is_gone_is_made_again_and_a_strangers_is_not_touched() {
    let w = world(4);
    layout::clear(&w.memory, RegionId::META, 0, layout::SUPERBLOCK_BYTES);
    assert_eq!(w.mend(&Damage::default()).dropped, 1);
    assert_eq!(layout::recognise(&w.memory, &w.config), Ok(w.config.incarnation));
    assert_eq!(w.used(), [(0, w.index), (1, w.index)]);
    assert!(Catalog::load(&w.memory, &w.config).unwrap().contains(w.index));
    let w = world(4);
    w.memory.store(RegionId::META, superblock::MAGIC_AT, 77);
    assert!(matches!(mend(&w.memory, &w.config, &Damage::default()), Err(StartError::Mismatch(_))));
    assert_eq!(load_mark(&w.memory), None);
}
