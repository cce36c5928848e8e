//! A server that is not the coordinator gives no chunks to an index that was dropped, or is still to come: nobody would release them.

use crate::crash::{MortalMemory, mortal};
use crate::driver::{World, refused, s};
use farwood_fabric::addr::ServerId;
use farwood_fabric::control::{ControlError, IndexId, Reply, Request};
use farwood_fabric::procedure::ProcedureSet;
use farwood_fabric::server::ServerMemory;
use farwood_memory::ServerConfig;

/// With room for three indexes.
fn config() -> ServerConfig {
    ServerConfig::tiny(ServerId::new(1), 2, 8)
}

/// A session says, as the coordinator has sealed it, which number the next index gets.
fn hear<M: ServerMemory>(world: &mut World<M>, next_index: IndexId) {
    let attachment = world.attachment_of(s(1), 1, (next_index, world.config.incarnation));
    world.ask(s(1), attachment).expect("it is genuine");
}

fn may_have_chunks<M: ServerMemory>(world: &mut World<M>, index: IndexId) -> bool {
    let wanted = Request::AllocChunks { index, class: 1, object_bytes: 0, count: 1, flushed_through: 0 };
    match world.ask(s(1), wanted) {
        Ok(Reply::Chunks { offset, .. }) => {
            world.done(s(1), Request::FreeChunks { offset, generation: 0 });
            true
        }
        other => {
            assert_eq!(other, refused(ControlError::NoSuchIndex { name: format!("#{index}") }));
            false
        }
    }
}

fn release<M: ServerMemory>(world: &mut World<M>, index: IndexId) {
    let seal = world.released_by(index);
    assert_eq!(world.ask(s(1), world.release(index)), Ok(Reply::Released { seal }));
}

#[test]
fn only_an_index_that_lives_gets_chunks() {
    let mut world = World::new(config());
    hear(&mut world, 1);
    hear(&mut world, 3);
    assert_eq!([1, 2, 3].map(|index| may_have_chunks(&mut world, index)), [true, true, false]);
    release(&mut world, 1);
    // It was made and dropped by those who had nothing to do here; the one before it lives.
    release(&mut world, 4);
    hear(&mut world, 5);
    let lives = [false, true, true, false, false];
    assert_eq!([1, 2, 3, 4, 5].map(|index| may_have_chunks(&mut world, index)), lives);
    world.restart();
    // The server has ended the session that it found.
    let attachment = world.attachment_of(s(1), 2, (6, 0));
    world.ask(s(1), attachment).expect("it is genuine");
    let lives = [false, true, true, false, true];
    assert_eq!([1, 2, 3, 4, 5].map(|index| may_have_chunks(&mut world, index)), lives);
}

#[test]
fn empty_memory_is_told_which_indexes_there_are() {
    let mut world = World::new(config());
    // Five were made, of which the first three are there.
    hear(&mut world, 6);
    assert_eq!(
        [1, 2, 3, 4, 5, 6].map(|index| may_have_chunks(&mut world, index)),
        [true, true, true, false, false, false]
    );
    release(&mut world, 2);
    release(&mut world, 4);
    world.restart();
    let attachment = world.attachment_of(s(1), 2, (7, 0));
    world.ask(s(1), attachment).expect("it is genuine");
    assert_eq!(
        [1, 2, 3, 4, 5, 6].map(|index| may_have_chunks(&mut world, index)),
        [true, false, true, false, false, true]
    );
}

#[test]
fn indexes_come_and_go_without_end() {
    let mut world = World::new(config());
    hear(&mut world, 1);
    for index in 1..100 {
        hear(&mut world, index + 1);
        assert!(may_have_chunks(&mut world, index));
        // As many live as the catalog has room for.
        if index >= 3 {
            assert!(may_have_chunks(&mut world, index - 2));
            release(&mut world, index - 2);
            assert!(!may_have_chunks(&mut world, index - 2));
        }
    }
}

#[test]
fn a_crash_forgets_no_index_that_lives_and_no_release_that_was_confirmed() {
    let live = |world: &mut World<MortalMemory>| {
        let mut said = Vec::new();
        for (next, released) in [(1, 0), (3, 1), (4, 2), (6, 5)] {
            hear(world, next);
            if released > 0 {
                release(world, released);
            }
            said.push((world.memory.stores.get(), next, released));
        }
        said
    };
    let said = live(&mut mortal(config(), u64::MAX));
    let (total, _, _) = *said.last().expect("it has lived");
    for kept in 0..=total {
        let mut world = mortal(config(), kept);
        live(&mut world);
        let mut heir = World::on(world.memory.lasting, config(), ProcedureSet::default());
        let told: Vec<_> = said.iter().filter(|(stores, _, _)| *stores <= kept).collect();
        let next = told.last().map_or(1, |(_, next, _)| *next);
        let attachment = heir.attachment_of(s(1), 2, (next, heir.config.incarnation));
        heir.ask(s(1), attachment).expect("it is genuine");
        let released: Vec<_> = told.iter().map(|(_, _, released)| *released).collect();
        for index in (1..next).filter(|_| !told.is_empty()) {
            let lives = !released.contains(&index);
            assert!(
                may_have_chunks(&mut heir, index) == lives || is_being_released(&said, kept, index),
                "#{index} after {kept} of {total} stores"
            );
        }
    }
}

/// Whether the release of this index was under way: it may be done or not.
fn is_being_released(said: &[(u64, IndexId, IndexId)], kept: u64, index: IndexId) -> bool {
    said.iter().any(|(stores, _, released)| *released == index && *stores > kept)
}
