//! An index that is out of use for a repair: whose right that is, when it ends, and what it allows.

use crate::driver::{World, is_bad_request, refused, s};
use farwood_fabric::addr::{ServerId, SessionId};
use farwood_fabric::call::CallError;
use farwood_fabric::control::{ControlError, IndexState, Reply, Request};
use farwood_memory::ServerConfig;

fn world() -> World {
    World::new(ServerConfig::tiny(ServerId::new(0), 1, 8))
}

fn open(world: &mut World, who: SessionId) -> Result<Reply, CallError> {
    world.ask_twice(who, Request::OpenIndex { name: "it".to_owned(), engine: None })
}

fn take_offline(world: &mut World, who: SessionId) -> Result<Reply, CallError> {
    world.ask_twice(who, Request::TakeOffline { name: "it".to_owned() })
}

fn state(world: &mut World, who: SessionId) -> IndexState {
    match world.ask(who, Request::ListIndexes {}) {
        Ok(Reply::Indexes { infos }) => infos[0].state,
        other => panic!("{other:?}"),
    }
}

#[test]
fn one_session_alone_takes_an_index_out_of_use_and_keeps_others_out() {
    let mut world = world();
    let (first, _) = world.open().expect("there is room");
    let (second, _) = world.open().expect("there is room");
    let index = world.create(first, "it");
    for who in [first, second] {
        match take_offline(&mut world, who) {
            Err(CallError::Control(ControlError::IndexInUse { name, others })) => {
                assert_eq!((name.as_str(), others.len()), ("it", 1));
                assert_ne!(others[0].session, who);
            }
            other => panic!("{other:?}"),
        }
    }
    // Dead or alive, as long as nobody has cleaned up after it.
    let term = world.evict(first, second);
    assert!(take_offline(&mut world, first).is_err());
    world.done(first, Request::CompleteFence { victim: second, term });
    assert!(take_offline(&mut world, first).is_err());
    world.bury(first, second, false);
    assert!(matches!(take_offline(&mut world, first), Ok(Reply::Offline { .. })));
    assert_eq!(state(&mut world, first), IndexState::Offline);

    // Whoever joins later is kept out; the repairer is not, and may take it again.
    let (third, _) = world.open().expect("there is room");
    let offline = || refused(ControlError::IndexOffline { name: "it".to_owned(), by: first });
    assert_eq!(open(&mut world, third), offline());
    assert_eq!(world.ask_twice(third, Request::BeginDrop { name: "it".to_owned() }), offline());
    assert_eq!(world.ask_twice(first, Request::BeginDrop { name: "it".to_owned() }), offline());
    assert!(matches!(
        take_offline(&mut world, third),
        Err(CallError::Control(ControlError::IndexInUse { .. }))
    ));
    assert!(matches!(take_offline(&mut world, first), Ok(Reply::Offline { .. })));
    assert!(matches!(open(&mut world, first), Ok(Reply::Index { .. })));

    // Only the repairer ends it.
    world.done(third, Request::BringOnline { index });
    assert_eq!(state(&mut world, third), IndexState::Offline);
    world.done(first, Request::BringOnline { index });
    world.done(first, Request::BringOnline { index });
    assert_eq!(state(&mut world, third), IndexState::Ready);
    assert!(matches!(open(&mut world, third), Ok(Reply::Index { .. })));
}

#[test]
fn the_right_to_repair_ends_with_its_session() {
    for restarts in [false, true] {
        for leaves in [false, true] {
            let mut world = world();
            let (repairer, _) = world.open().expect("there is room");
            world.create(repairer, "it");
            assert!(take_offline(&mut world, repairer).is_ok());
            let (other, _) = world.open().expect("there is room");
            if leaves {
                world.done(repairer, Request::CloseSession {});
            }
            if restarts {
                world.restart();
            }
            if leaves {
                assert_eq!(state(&mut world, other), IndexState::Ready, "it left");
                continue;
            }
            assert_eq!(state(&mut world, other), IndexState::Offline, "it may be writing still");
            assert!(open(&mut world, other).is_err());
            world.bury(other, repairer, true);
            assert_eq!(state(&mut world, other), IndexState::Ready, "it is gone");
            assert!(open(&mut world, other).is_ok());
        }
    }
}

#[test]
fn raw_bytes_are_freed_by_who_repairs_their_index() {
    let mut world = world();
    let (repairer, _) = world.open().expect("there is room");
    let (index, beside) = (world.create(repairer, "it"), world.create(repairer, "beside"));
    let chunk = |world: &mut World, index, object_bytes| {
        let request = Request::AllocChunks { index, class: 1, object_bytes, count: 1, flushed_through: 0 };
        match world.ask(repairer, request) {
            Ok(Reply::Chunks { offset, .. }) => offset,
            other => panic!("{other:?}"),
        }
    };
    let (raw, objects) = (chunk(&mut world, index, 0), chunk(&mut world, index, 64));
    let others = chunk(&mut world, beside, 0);
    let free = |offset| Request::FreeExtent { index, offset, generation: 0, seal: 0 };
    assert!(is_bad_request(&world.ask(repairer, free(raw))), "it is in use");
    assert!(take_offline(&mut world, repairer).is_ok());
    assert!(is_bad_request(&world.ask(repairer, free(objects))), "those are objects");
    assert!(is_bad_request(&world.ask(repairer, free(others))), "that is another index's");
    assert!(is_bad_request(&world.ask(repairer, free(raw + 8))), "nothing begins there");
    world.done(repairer, free(raw));
    world.done(repairer, free(raw));
    let Ok(Reply::ChunkList { chunks, .. }) = world.ask(repairer, Request::ListChunks { owner: None }) else {
        panic!("a list");
    };
    assert!(chunks.iter().all(|chunk| chunk.offset != raw) && chunks.len() == 2);
    assert_eq!(chunk(&mut world, index, 0), raw, "it is free for the same index and class at once");
}

/// A server without a catalog believes the coordinator's seal, of this index and this session.
#[test]
fn other_servers_free_raw_bytes_for_a_seal() {
    let mut world = World::new(ServerConfig::tiny(ServerId::new(1), 2, 8));
    let attachment = world.attachment_of(s(1), 1, (4, world.config.incarnation));
    world.ask(s(1), attachment).expect("it is genuine");
    let request = Request::AllocChunks { index: 2, class: 1, object_bytes: 0, count: 1, flushed_through: 0 };
    let Ok(Reply::Chunks { offset, .. }) = world.ask(s(1), request) else { panic!("a chunk") };
    let unproven = refused(ControlError::Unproven { server: ServerId::new(1) });
    for seal in [0, world.offline(2, (s(1), 2)), world.offline(2, (s(2), 1)), world.offline(3, (s(1), 1))] {
        let request = Request::FreeExtent { index: 2, offset, generation: 0, seal };
        assert_eq!(world.ask(s(1), request), unproven);
    }
    let seal = world.offline(2, (s(1), 1));
    world.done(s(1), Request::FreeExtent { index: 2, offset, generation: 0, seal });
}
