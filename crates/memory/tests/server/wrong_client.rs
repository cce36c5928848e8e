//! What a wrong client asks that may connect: to release an index that lives, to be a session of the far future, to fence others or to
//! speak in their name. None of it has an effect, and what comes later goes on.

use crate::driver::{World, outcome, refused, s, understand};
use farwood_fabric::addr::ServerId;
use farwood_fabric::call::{Call, CallError};
use farwood_fabric::control::{ControlError, Reply, Request};
use farwood_memory::ServerConfig;

/// The coordinator and another server of a pool, as far as they have to be told apart here.
fn coordinator() -> World {
    World::new(ServerConfig::tiny(ServerId::new(0), 2, 8))
}

fn other() -> World {
    World::new(ServerConfig::tiny(ServerId::new(1), 2, 8))
}

fn unproven(server: u16) -> Result<Reply, CallError> {
    refused(ControlError::Unproven { server: ServerId::new(server) })
}

fn chunks(world: &mut World) -> usize {
    let lister = s(4);
    let Ok(Reply::ChunkList { chunks, .. }) = world.ask(lister, Request::ListChunks { owner: None }) else {
        panic!()
    };
    chunks.len()
}

fn alloc(index: u32) -> Request {
    Request::AllocChunks { index, class: 1, object_bytes: 64, count: 1, flushed_through: 0 }
}

#[test]
fn an_index_that_lives_is_not_released_anywhere() {
    let mut world = other();
    world.attach(s(4), 1).expect("it was opened");
    for index in [1, 2] {
        world.ask(s(4), alloc(index)).expect("there is memory");
    }
    // No proof, one that is made up, and the genuine one of another index.
    let Request::ReleaseIndex { seal: of_another, .. } = world.release(2) else { unreachable!() };
    for seal in [0, 1, u64::MAX, of_another] {
        assert_eq!(world.ask(s(4), Request::ReleaseIndex { index: 1, seal }), unproven(1));
    }
    assert_eq!(chunks(&mut world), 2);
    // The coordinator agreed to this one; whoever repeats it finds it done.
    let release = world.release(2);
    for _ in 0..2 {
        assert_eq!(world.ask(s(4), release.clone()), Ok(Reply::Released { seal: 0 }));
    }
    assert_eq!(chunks(&mut world), 1);
}

#[test]
fn no_release_is_to_be_had_for_an_index_that_lives_or_is_still_to_come() {
    let mut world = coordinator();
    let (me, _) = world.open().expect("there is room");
    let create = Request::CreateIndex { name: "live".into(), engine: "e".into(), config: vec![] };
    world.ask(me, create).expect("created");
    world.done(me, Request::IndexReady { index: 1 });
    let live = world.ask(me, Request::ReleaseIndex { index: 1, seal: 0 });
    assert!(crate::driver::is_bad_request(&live), "{live:?}");
    for index in [2, 3, u32::MAX] {
        let to_come = world.ask(me, Request::ReleaseIndex { index, seal: 0 });
        assert_eq!(to_come, refused(ControlError::NoSuchIndex { name: format!("#{index}") }));
    }
}

#[test]
fn an_index_is_ready_when_its_maker_says_so() {
    let mut world = coordinator();
    let ((maker, _), (wrong, _)) = (world.open().expect("room"), world.open().expect("room"));
    let create = Request::CreateIndex { name: "half".into(), engine: "e".into(), config: vec![] };
    world.ask(maker, create).expect("created");
    let early = world.ask(wrong, Request::IndexReady { index: 1 });
    assert!(crate::driver::is_bad_request(&early), "{early:?}");
    world.done(maker, Request::IndexReady { index: 1 });
    world.done(wrong, Request::IndexReady { index: 1 });
}

#[test]
fn nobody_attaches_with_a_term_that_the_coordinator_did_not_give() {
    let mut world = other();
    world.attach(s(1), 5).expect("it was opened");
    let sealed = world.attachment(s(1), 6);
    let Request::AttachSession { seal, .. } = sealed else { unreachable!() };
    for number in 1..=4 {
        for (term, seal) in [(u64::MAX, 0), (u64::MAX, seal), (6, 0), (6, seal ^ 1)] {
            let (read_only, coordinator, next_index) = (false, 1, 1);
            let attach = Request::AttachSession { read_only, term, coordinator, next_index, seal };
            assert_eq!(world.ask(s(number), attach), unproven(1));
        }
    }
    // Neither rights nor what the server lost may be changed on the way; nor another's term be taken.
    for attach in [
        Request::AttachSession { read_only: true, term: 6, coordinator: 1, next_index: 1, seal },
        Request::AttachSession { read_only: false, term: 6, coordinator: 1, next_index: 2, seal },
        Request::AttachSession { read_only: false, term: 6, coordinator: 2, next_index: 1, seal },
    ] {
        assert_eq!(world.ask(s(1), attach), unproven(1));
    }
    assert_eq!(world.ask(s(2), sealed), unproven(1), "it was another number's");
    world.ask(s(1), Request::ListChunks { owner: None }).expect("nobody took its place");
    for number in 1..=4 {
        world.attach(s(number), 7).expect("no slot was taken for ever");
    }
}

/// Whoever attaches again hears its ticket again.
#[test]
fn the_coordinator_tells_nobody_anothers_ticket() {
    let mut world = coordinator();
    let (victim, term, _) = world.open_with_term().expect("room");
    for seal in [0, 1, u64::MAX] {
        let (read_only, coordinator, next_index) = (false, 1, 1);
        let attach = Request::AttachSession { read_only, term, coordinator, next_index, seal };
        assert_eq!(world.ask(victim, attach), unproven(0));
    }
    assert!(matches!(world.attach(victim, term), Ok(Reply::Session { .. })));
}

#[test]
fn who_comes_first_cannot_bind_a_server_to_a_coordinator_that_is_none() {
    let mut world = other();
    let bind = |coordinator| Request::AttachSession {
        read_only: false,
        term: 1,
        coordinator,
        next_index: 1,
        seal: 77,
    };
    for coordinator in [0, 2, u32::MAX] {
        assert_eq!(world.ask(s(1), bind(coordinator)), unproven(1));
    }
    world.attach(s(1), 1).expect("it belongs to nobody yet");
}

#[test]
fn nobody_is_fenced_or_adopted_elsewhere_without_the_coordinator() {
    let mut world = other();
    for (number, term) in [(1, 1), (2, 2), (4, 3)] {
        world.attach(s(number), term).expect("it was opened");
    }
    world.ask(s(1), alloc(1)).expect("there is memory");
    let (victim, wrong) = (s(1), s(2));
    for (term, seal) in [(1, 0), (1, 9), (u64::MAX, 9)] {
        assert_eq!(world.ask(wrong, Request::Fence { victim, term, seal }), unproven(1));
        assert_eq!(world.ask(wrong, Request::AdoptChunks { victim, term, seal }), unproven(1));
        assert_eq!(world.ask(wrong, Request::FinishAdopt { victim, term, seal }), unproven(1));
    }
    world.ask(victim, Request::ListChunks { owner: None }).expect("it was not fenced");
    // A genuine fence of the victim, and its adopter's seal, are of no use to others.
    let fence = world.fence(victim, 1);
    world.done(wrong, fence);
    for request in [world.adopt_chunks(s(4), victim, 1), world.finish_adopt(s(4), victim, 1)] {
        assert_eq!(world.ask(wrong, request), unproven(1), "it is another's adoption");
    }
    world.ask(s(4), world.adopt_chunks(s(4), victim, 1)).expect("the adopter");
    world.done(s(4), world.finish_adopt(s(4), victim, 1));
}

#[test]
fn a_session_that_lives_is_fenced_by_itself_or_by_eviction() {
    let mut world = coordinator();
    let ((victim, term, _), (wrong, _)) =
        (world.open_with_term().expect("room"), world.open().expect("room"));
    let refusal = world.ask(wrong, Request::BeginFence { victim });
    assert!(
        matches!(refusal, Err(CallError::Control(ControlError::LeaseAlive { .. }))),
        "there is no way to force it: {refusal:?}"
    );
    let not_fenced = refused(ControlError::NotFenced { session: victim });
    assert_eq!(world.ask(wrong, Request::CompleteFence { victim, term }), not_fenced);
    assert_eq!(world.ask(wrong, Request::BeginAdopt { victim }), not_fenced);
    world.ask(victim, Request::ListSessions {}).expect("it lives");
    world.victim(victim, Request::BeginFence { victim });
    let fenced = refused(ControlError::SessionFenced { session: victim });
    assert_eq!(world.ask(victim, Request::ListSessions {}), fenced);
}

/// Sessions are listed with their terms, so numbers and terms alone prove nothing.
#[test]
fn nobody_speaks_in_anothers_name() {
    for mut world in [coordinator(), other()] {
        let is_coordinator = world.config.is_coordinator();
        let victim = if is_coordinator {
            world.open().expect("room").0
        } else {
            world.attach(s(1), 1).expect("it was opened");
            s(1)
        };
        let requests = [Request::CloseSession {}, Request::BeginFence { victim }, alloc(1)];
        for request in requests {
            let genuine = world.control(victim, &request);
            for ticket in [0, 1, genuine.ticket ^ 1] {
                let forged = Call { ticket, ..genuine.clone() };
                let actions = world.send(&forged);
                assert_eq!(actions.len(), 1, "nothing is done: {actions:?}");
                let server = u16::from(!is_coordinator);
                assert_eq!(understand(outcome(&forged, actions)), unproven(server));
            }
        }
        world.ask(victim, Request::ListChunks { owner: None }).expect("it lives");
        world.done(victim, Request::CloseSession {});
    }
}

#[test]
fn who_never_acknowledges_is_stopped_and_others_are_not() {
    let mut world = coordinator();
    let ((wrong, _), (fine, _)) = (world.open().expect("room"), world.open().expect("room"));
    let mut refusals = 0;
    for _ in 0..20_000 {
        match world.ask(wrong, Request::ListSessions {}) {
            Ok(Reply::Sessions { .. }) => assert_eq!(refusals, 0),
            Err(CallError::Unacknowledged { open: 1024 }) => refusals += 1,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(refusals, 20_000 - 1024);
    world.ask(fine, Request::ListSessions {}).expect("others are served");
    // It goes on when it acknowledges.
    let call = world.control(wrong, &Request::ListSessions {});
    let call = Call { acknowledged_below: call.id.sequence, ..call };
    understand(outcome(&call, world.send(&call))).expect("it is served again");
}

/// A refusal that repeats a name is kept until it is acknowledged: a name as long as a message would fill the server.
#[test]
fn what_is_too_long_is_refused_and_not_repeated() {
    let mut world = coordinator();
    let (me, _) = world.open().expect("room");
    let open = |name: String| Request::OpenIndex { name, engine: None };
    for bytes in [5 << 10, 16 << 20] {
        let refusal = world.ask(me, open("a".repeat(bytes)));
        assert!(crate::driver::is_bad_request(&refusal), "{refusal:?}");
    }
    for request in [
        open("a".repeat(65)),
        Request::BeginDrop { name: "a".repeat(4000) },
        Request::OpenIndex { name: "a".into(), engine: Some("e".repeat(33)) },
    ] {
        let refusal = world.ask(me, request);
        let Err(CallError::Control(ControlError::BadName { why })) = refusal else { panic!("{refusal:?}") };
        assert!(why.len() < 100, "{why}");
    }
    let name = "a".repeat(64);
    assert_eq!(world.ask(me, open(name.clone())), refused(ControlError::NoSuchIndex { name }));
}

#[test]
fn objects_of_others_are_not_freed_with_their_chunk() {
    let mut world = coordinator();
    let ((author, _), (wrong, _)) = (world.open().expect("room"), world.open().expect("room"));
    let Ok(Reply::Chunks { offset, .. }) = world.ask(author, alloc(1)) else { panic!() };
    // It claims an object, links it somewhere, and leaves.
    farwood_fabric::server::ServerMemory::store(
        &world.memory,
        farwood_fabric::RegionId::MAIN,
        offset + farwood_fabric::control::ObjectChunk::BITMAP_OFFSET,
        1,
    );
    world.done(author, Request::CloseSession {});
    let free = Request::FreeChunks { offset, generation: 0 };
    assert!(crate::driver::is_bad_request(&world.ask(wrong, free.clone())), "nobody's, but not empty");
    assert!(matches!(world.ask(wrong, alloc(1)), Ok(Reply::Chunks { inherited: true, .. })));
    assert!(crate::driver::is_bad_request(&world.ask(wrong, free)), "its own now, but not empty");
}
