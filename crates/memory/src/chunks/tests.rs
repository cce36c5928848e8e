//! Chunks handed out, freed, inherited and released, one rule at a time.

use super::*;
use crate::testing::VecMemory;
use farwood_fabric::call::CallId;
use std::sync::atomic::{AtomicU64, Ordering};

const A: SessionId = SessionId::new(1);
const B: SessionId = SessionId::new(2);

impl ChunkTable {
    /// Hands out chunks to a call that is no repeat.
    fn allocate(&mut self, memory: &VecMemory, owner: SessionId, want: Want) -> Result<Handed, ControlError> {
        static NEXT: AtomicU64 = AtomicU64::new(1000);
        self.allocate_for(memory, owner, want, tag(owner, NEXT.fetch_add(1, Ordering::Relaxed)))
    }
}

fn tag(session: SessionId, sequence: u64) -> CallTag {
    CallTag::of(CallId { session, term: 1, endpoint: 0, sequence })
}

/// A server that comes back is asked again by those whom its predecessor did not answer.
#[test]
fn a_repeat_finds_the_extent_that_the_call_was_given() {
    let (memory, config, mut table) = world(8);
    let wants = [want(1, 64, 1, 0), want(1, 0, 2, 0), want(1, 0, 2, 0), want(2, 64, 1, 0)];
    let ask = |table: &mut ChunkTable, who, n: usize| {
        table.allocate_for(&memory, who, wants[n], tag(who, n as u64)).unwrap()
    };
    let given: Vec<Handed> = (0..wants.len()).map(|n| ask(&mut table, A, n)).collect();
    let mut table = ChunkTable::load(&memory, &config).unwrap();
    let free = table.free_chunks();
    assert_eq!((0..wants.len()).map(|n| ask(&mut table, A, n)).collect::<Vec<_>>(), given);
    assert_eq!(table.free_chunks(), free, "a repeat takes nothing");
    // The same call of somebody else, and a new one of the same session, are no repeats.
    assert_ne!(table.allocate(&memory, A, wants[1]).unwrap().offset, given[1].offset);
    // What was inherited is answered as inherited.
    table.disown(&memory, A);
    let inherited = ask(&mut table, B, 3);
    assert_eq!(inherited, Handed { offset: given[3].offset, inherited: true });
    let mut table = ChunkTable::load(&memory, &config).unwrap();
    assert_eq!(ask(&mut table, B, 3), inherited);
    // A chunk that was given back is not found again.
    let raw = table.list(None).into_iter().find(|chunk| chunk.offset == given[1].offset).unwrap();
    assert!(raw.owner.is_none(), "its owner's repeat has lost it");
}

fn world(chunks: u32) -> (VecMemory, ServerConfig, ChunkTable) {
    let config = ServerConfig::tiny(ServerId::new(0), 1, chunks);
    let memory = VecMemory::new(&layout::regions(&config));
    let table = ChunkTable::load(&memory, &config).unwrap();
    (memory, config, table)
}

fn want(index: IndexId, object_bytes: u32, count: u32, flushed_through: u64) -> Want {
    Want { kind: ChunkType { index, class: 1, object_bytes }, count, flushed_through }
}

fn at(chunk: u64) -> u64 {
    MAIN_BASE + chunk * 4096
}

fn full(wanted: u32, flush_helps: bool) -> Result<Handed, ControlError> {
    Err(ControlError::PoolFull { server: ServerId::new(0), wanted, flush_helps })
}

#[test]
fn an_orphan_is_inherited_with_its_objects() {
    let (memory, _, mut table) = world(3);
    let first = table.allocate(&memory, A, want(1, 64, 1, 0)).unwrap();
    assert_eq!(first, Handed { offset: at(0), inherited: false });
    memory.store(RegionId::MAIN, at(0) + 64, 0b101);
    table.disown(&memory, A);
    assert_eq!(table.allocate(&memory, B, want(1, 128, 1, 0)).unwrap().offset, at(1), "another size");
    assert_eq!(table.allocate(&memory, B, want(2, 64, 1, 0)).unwrap().offset, at(2), "another index");
    assert_eq!(table.allocate(&memory, B, want(1, 64, 1, 0)), Ok(Handed { offset: at(0), inherited: true }));
    assert_eq!(memory.load(RegionId::MAIN, at(0) + 64), 0b101);
}

#[test]
fn where_room_is_scarce_what_others_have_not_filled_is_shared() {
    let (memory, _, mut table) = world(2);
    let objects = ObjectChunk::new(4096, 64).unwrap();
    assert_eq!(table.allocate(&memory, A, want(1, 64, 1, 0)).unwrap().offset, at(0));
    assert_eq!(table.allocate(&memory, B, want(1, 64, 1, 0)).unwrap().offset, at(1), "there is room yet");
    memory.store(RegionId::MAIN, at(1) + 64, 0b11);
    assert_eq!(table.allocate(&memory, A, want(1, 64, 1, 0)), Ok(Handed { offset: at(1), inherited: true }));
    assert_eq!(memory.load(RegionId::MAIN, at(1) + 64), 0b11, "its objects live on");
    assert_eq!(table.allocate(&memory, A, want(1, 64, 1, 0)), full(1, false), "A has both");
    assert_eq!(table.allocate(&memory, B, want(1, 128, 1, 0)), full(1, false), "another size");
    memory.store(RegionId::MAIN, at(0) + 64, objects.word_mask(0));
    memory.store(RegionId::MAIN, at(1) + 64, objects.word_mask(0));
    assert_eq!(table.allocate(&memory, B, want(1, 64, 1, 0)), full(1, false), "all objects are in use");
}

#[test]
fn pages_of_journals_share_a_chunk() {
    let (memory, _, mut table) = world(16);
    let page = || {
        let kind = ChunkType { index: 1, class: PAGE_CLASS, object_bytes: 64 };
        Want { kind, count: 1, flushed_through: 0 }
    };
    assert_eq!(table.allocate(&memory, A, page()).unwrap().offset, at(0));
    assert_eq!(table.allocate(&memory, B, page()), Ok(Handed { offset: at(0), inherited: true }));
}

#[test]
fn the_last_chunk_is_kept_for_the_pages_of_journals() {
    let (memory, _, mut table) = world(16);
    let page = ChunkType { index: 1, class: PAGE_CLASS, object_bytes: 64 };
    for _ in 0..15 {
        table.allocate(&memory, A, want(1, 0, 1, 0)).unwrap();
    }
    assert_eq!(table.allocate(&memory, A, want(1, 64, 1, 0)), full(1, false));
    assert_eq!(
        table.allocate(&memory, A, want(2, 64, 1, 0)),
        full(1, false),
        "another index has no pages either"
    );
    table.allocate(&memory, A, Want { kind: page, count: 1, flushed_through: 0 }).unwrap();
    table.free(&memory, A, at(0), 1).unwrap();
    assert_eq!(table.allocate(&memory, A, want(2, 64, 1, 1)), full(1, false), "that one still has none");
    assert_eq!(table.allocate(&memory, A, want(1, 64, 1, 1)).unwrap().offset, at(0), "this one has");
}

#[test]
fn raw_orphans_are_neither_inherited_nor_freed() {
    let (memory, _, mut table) = world(2);
    table.allocate(&memory, A, want(1, 0, 2, 0)).unwrap();
    assert!(table.free(&memory, B, at(0), 0).is_err());
    table.disown(&memory, A);
    assert_eq!(table.allocate(&memory, B, want(1, 0, 2, 0)), full(2, false));
    assert_eq!(
        table.free(&memory, B, at(1), 0),
        Err(bad("0x2000 is inside an extent; free it by its first chunk"))
    );
    assert!(table.free(&memory, B, at(0), 0).is_err(), "they are the index's");
    table.release(&memory, 1);
    assert_eq!(table.free_chunks(), 2);
}

#[test]
fn a_freed_chunk_serves_its_own_type_at_once_and_others_after_the_flush() {
    let (memory, _, mut table) = world(1);
    table.allocate(&memory, A, want(1, 64, 1, 0)).unwrap();
    memory.store(RegionId::MAIN, at(0) + 64, 7);
    assert!(table.free(&memory, A, at(0), 5).is_err(), "objects are in it");
    memory.store(RegionId::MAIN, at(0) + 64, 0);
    table.free(&memory, A, at(0), 5).unwrap();
    assert_eq!(table.allocate(&memory, B, want(2, 64, 1, 4)), full(1, true));
    assert_eq!(table.allocate(&memory, B, want(1, 64, 1, 4)).unwrap().offset, at(0));
    assert_eq!(memory.load(RegionId::MAIN, at(0) + 64), 0, "all objects are free");
    table.free(&memory, B, at(0), 6).unwrap();
    assert_eq!(table.allocate(&memory, B, want(2, 128, 1, 6)).unwrap().offset, at(0));
    assert_eq!(memory.load(RegionId::MAIN, at(0)), ObjectChunk::MAGIC);
    assert_eq!(memory.load(RegionId::MAIN, at(0) + 8), 2 | 1 << 32);
    let objects = ObjectChunk::new(4096, 128).unwrap().objects;
    assert_eq!(memory.load(RegionId::MAIN, at(0) + 16), 128 | u64::from(objects) << 32);
}

#[test]
fn free_chunks_come_before_flushed_ones_and_only_what_is_needed_is_dissolved() {
    let (memory, config, mut table) = world(6);
    table.allocate(&memory, A, want(1, 0, 2, 0)).unwrap();
    table.allocate(&memory, A, want(1, 0, 2, 0)).unwrap();
    table.free(&memory, A, at(0), 1).unwrap();
    table.free(&memory, A, at(2), 1).unwrap();
    assert_eq!(table.allocate(&memory, A, want(2, 0, 1, 1)).unwrap().offset, at(4));
    table.free(&memory, A, at(4), 1).unwrap();
    // Chunks 0..2, 2..4 and 4 are freed, 5 is free: three in a row begin at 0 and take half of 2..4.
    assert_eq!(table.allocate(&memory, A, want(3, 0, 3, 0)), full(3, true));
    assert_eq!(table.allocate(&memory, A, want(3, 0, 3, 1)).unwrap().offset, at(0));
    assert_eq!(table.free_chunks(), 2);
    assert_eq!(table.allocate(&memory, A, want(2, 0, 1, 0)).unwrap().offset, at(4), "still of its type");
    assert_eq!(ChunkTable::load(&memory, &config).unwrap().extents, table.extents);
}

#[test]
fn releasing_an_index_frees_all_of_it_and_nothing_else() {
    let (memory, config, mut table) = world(5);
    table.allocate(&memory, A, want(1, 0, 2, 0)).unwrap();
    table.allocate(&memory, A, want(2, 64, 1, 0)).unwrap();
    table.allocate(&memory, B, want(1, 64, 1, 0)).unwrap();
    table.free(&memory, B, at(3), 99).unwrap();
    table.release(&memory, 1);
    assert_eq!((table.free_chunks(), table.any_of(1), table.any_of(2)), (4, false, true));
    assert_eq!(table.owners(), [A]);
    assert_eq!(ChunkTable::load(&memory, &config).unwrap().extents, table.extents);
}

#[test]
fn nonsense_is_refused() {
    let (memory, _, mut table) = world(2);
    for nonsense in
        [want(0, 0, 1, 0), want(1, 0, 0, 0), want(1, 64, 2, 0), want(1, 4096, 1, 0), want(1, 12, 1, 0)]
    {
        let refused = table.allocate(&memory, A, nonsense);
        assert!(matches!(refused, Err(ControlError::BadRequest { .. })), "{nonsense:?}");
    }
    assert_eq!(table.allocate(&memory, A, want(1, 0, u32::MAX, 0)), full(u32::MAX, false));
    for offset in [0, 8, 4096, at(0) + 8, at(2), u64::MAX] {
        assert!(matches!(table.free(&memory, A, offset, 0), Err(ControlError::BadRequest { .. })));
    }
}

#[test]
fn a_damaged_table_is_refused() {
    let (memory, config, _) = world(3);
    let entry = Layout::new(&config).chunk_entry(1);
    for word in [3, 1 | 1 << 8, STATE_USED, STATE_USED | 3 << 32, 1 << 20] {
        layout::store(&memory, entry, word);
        assert!(matches!(ChunkTable::load(&memory, &config), Err(StartError::Mismatch(_))), "{word:#x}");
    }
}

/// A drain for objects of this size, at the caller's first question, or with the flush it asked for after the one before.
fn drain(object_bytes: u32, stamp: u64, flushing: Option<(u64, u64)>, flushed_through: u64) -> Drain {
    Drain { kind: ChunkType { index: 1, class: 9, object_bytes }, stamp, flushing, flushed_through }
}

/// The stamp of a session's question: its term comes first.
fn stamp(term: u64, number: u64) -> u64 {
    term << 20 | number
}

fn drained(is_ready: bool, waiting: u32) -> Drained {
    Drained { is_ready, waiting }
}

#[test]
fn an_empty_chunk_serves_another_class_after_two_flushes() {
    let (memory, config, mut table) = world(1);
    table.allocate(&memory, A, want(1, 64, 1, 0)).unwrap();
    let mut ask = |drain| {
        let answer = table.drain(&memory, B, drain, |_| true).unwrap();
        assert_eq!(ChunkTable::load(&memory, &config).unwrap().extents, table.extents);
        answer
    };
    assert_eq!(ask(drain(128, stamp(7, 1), None, 0)), drained(false, 1));
    assert_eq!(memory.load(RegionId::MAIN, at(0) + ObjectChunk::DRAINED_AT), 1, "those who know it are told");
    assert_eq!(ask(drain(128, stamp(7, 2), Some((stamp(7, 1), 5)), 4)), drained(false, 1), "not through");
    assert_eq!(ask(drain(128, stamp(7, 3), None, 5)), drained(false, 1), "freed, but there may be hints");
    assert_eq!(ask(drain(128, stamp(7, 4), Some((stamp(7, 3), 6)), 5)), drained(false, 1));
    assert_eq!(ask(drain(128, stamp(7, 5), None, 6)), drained(true, 0));
    let wanted =
        Want { kind: ChunkType { index: 1, class: 9, object_bytes: 128 }, count: 1, flushed_through: 6 };
    assert_eq!(table.allocate(&memory, B, wanted), Ok(Handed { offset: at(0), inherited: false }));
    assert_eq!(memory.load(RegionId::MAIN, at(0) + ObjectChunk::DRAINED_AT), 0);
    assert_eq!(memory.load(RegionId::MAIN, at(0) + 16) & 0xffff_ffff, 128);
}

#[test]
fn a_chunk_that_is_drained_waits_until_it_is_empty_and_its_own_type_may_have_it_back() {
    let (memory, _, mut table) = world(1);
    table.allocate(&memory, A, want(1, 64, 1, 0)).unwrap();
    memory.store(RegionId::MAIN, at(0) + 64, 1);
    table.drain(&memory, B, drain(128, stamp(7, 1), None, 0), |_| true).unwrap();
    let later = drain(128, stamp(7, 2), Some((stamp(7, 1), 1)), 1);
    assert_eq!(table.drain(&memory, B, later, |_| true).unwrap(), drained(false, 0), "an object lives there");
    assert_eq!(table.list(None).len(), 1);
    assert_eq!(table.allocate(&memory, B, want(1, 64, 1, 1)), Ok(Handed { offset: at(0), inherited: true }));
    assert_eq!(memory.load(RegionId::MAIN, at(0) + ObjectChunk::DRAINED_AT), 0, "it is what it was");
    assert_eq!(memory.load(RegionId::MAIN, at(0) + 64), 1);
    assert!(table.free(&memory, B, at(0), 9).is_err(), "A may still know it");
}

#[test]
fn only_chunks_that_are_nearly_empty_are_drained() {
    let (memory, _, mut table) = world(3);
    for kind in [want(1, 8, 1, 0), want(1, 512, 1, 0), want(1, 0, 1, 0)] {
        table.allocate(&memory, A, kind).unwrap();
    }
    // 65 of some 500 objects, 4 of 7, and raw bytes.
    memory.store(RegionId::MAIN, at(0) + 64, u64::MAX);
    memory.store(RegionId::MAIN, at(0) + 72, 1);
    memory.store(RegionId::MAIN, at(1) + 64, 0b1111);
    assert_eq!(
        table.drain(&memory, B, drain(128, stamp(7, 1), None, 0), |_| true).unwrap(),
        drained(false, 0)
    );
    memory.store(RegionId::MAIN, at(0) + 72, 0);
    memory.store(RegionId::MAIN, at(1) + 64, 0b111);
    assert_eq!(
        table.drain(&memory, B, drain(128, stamp(7, 2), None, 0), |_| true).unwrap(),
        drained(false, 2)
    );
    assert_eq!(
        table.drain(&memory, B, drain(512, stamp(7, 3), None, 0), |_| true).unwrap(),
        drained(false, 2),
        "another class of that size"
    );
}

#[test]
fn the_stamps_of_who_is_gone_are_replaced_and_those_of_others_are_not() {
    let (memory, _, mut table) = world(1);
    table.allocate(&memory, A, want(1, 64, 1, 0)).unwrap();
    table.drain(&memory, A, drain(128, stamp(7, 1), None, 0), |_| true).unwrap();
    // Session 8's flush may be older than the mark.
    let wrong = drain(128, stamp(8, 2), Some((stamp(8, 1), 1)), 1);
    table.drain(&memory, B, wrong, |_| true).unwrap();
    assert!(
        matches!(table.extents[0], Extent::Draining { after: After::Stamp(held), .. } if held == stamp(7, 1))
    );
    table.drain(&memory, B, drain(128, stamp(8, 3), None, 1), |term| term != 7).unwrap();
    assert!(
        matches!(table.extents[0], Extent::Draining { after: After::Stamp(held), .. } if held == stamp(8, 3))
    );
    let right = drain(128, stamp(8, 4), Some((stamp(8, 3), 2)), 2);
    table.drain(&memory, B, right, |_| true).unwrap();
    assert!(matches!(table.extents[0], Extent::Freed { .. }));
}

#[test]
fn headers_say_what_the_table_says_after_a_crash_between_the_two() {
    let (memory, config, mut table) = world(2);
    table.allocate(&memory, A, want(1, 64, 1, 0)).unwrap();
    table.allocate(&memory, A, want(1, 512, 1, 0)).unwrap();
    memory.store(RegionId::MAIN, at(1) + 64, 0b1111);
    table.drain(&memory, B, drain(128, stamp(7, 1), None, 0), |_| true).unwrap();
    memory.store(RegionId::MAIN, at(0) + ObjectChunk::DRAINED_AT, 0);
    memory.store(RegionId::MAIN, at(1) + ObjectChunk::DRAINED_AT, 1);
    ChunkTable::load(&memory, &config).unwrap();
    let said = [at(0), at(1)].map(|chunk| memory.load(RegionId::MAIN, chunk + ObjectChunk::DRAINED_AT));
    assert_eq!(said, [1, 0]);
}
