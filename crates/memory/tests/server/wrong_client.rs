//! What a wrong client asks that may connect: to release an index that lives, to be a session of the far future, to fence others or to
//! speak in their name. None of it has an effect, and what comes later goes on.

use crate::driver::{World, outcome, refused, s, understand};
use farwood_fabric::addr::{RegionId, ServerId};
use farwood_fabric::call::{Call, CallError};
use farwood_fabric::control::{ControlError, Reply, Request};
use farwood_fabric::region::PoolId;
use farwood_fabric::server::ServerMemory;
use farwood_memory::ServerConfig;
use farwood_memory::layout::Layout;

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
        let seal = world.released_by(2);
        assert_eq!(world.ask(s(4), release.clone()), Ok(Reply::Released { seal }));
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
    let sealed = world.attachment_of(s(1), 6, (1, 1));
    let Request::AttachSession { seal, .. } = sealed else { unreachable!() };
    for number in 1..=4 {
        for (term, seal) in [(u64::MAX, 0), (u64::MAX, seal), (6, 0), (6, seal ^ 1)] {
            let (read_only, coordinator, next_index) = (false, 1, 1);
            let attach = Request::AttachSession {
                read_only,
                term,
                coordinator,
                next_index,
                incarnation: 1,
                indexes: vec![],
                seal,
            };
            assert_eq!(world.ask(s(number), attach), unproven(1));
        }
    }
    // Neither rights nor what the server lost may be changed on the way; nor another's term be taken.
    for attach in [
        Request::AttachSession {
            read_only: true,
            term: 6,
            coordinator: 1,
            next_index: 1,
            incarnation: 1,
            indexes: vec![],
            seal,
        },
        Request::AttachSession {
            read_only: false,
            term: 6,
            coordinator: 1,
            next_index: 2,
            incarnation: 1,
            indexes: vec![],
            seal,
        },
        Request::AttachSession {
            read_only: false,
            term: 6,
            coordinator: 2,
            next_index: 1,
            incarnation: 1,
            indexes: vec![],
            seal,
        },
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
        let attach = Request::AttachSession {
            read_only,
            term,
            coordinator,
            next_index,
            incarnation: 1,
            indexes: vec![],
            seal,
        };
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
        incarnation: 1,
        indexes: vec![],
        seal: 77,
    };
    for coordinator in [0, 2, u32::MAX] {
        assert_eq!(world.ask(s(1), bind(coordinator)), unproven(1));
    }
    world.attach(s(1), 1).expect("it belongs to nobody yet");
}

/// A session that was opened before there was any index attaches first to a server that came back empty.
#[test]
fn what_an_emptied_server_lost_is_not_hidden_by_an_old_seal() {
    let mut world = World::new(ServerConfig { incarnation: 5, ..other().config });
    let unbound = refused(ControlError::Unbound { server: ServerId::new(1), incarnation: 5 });
    for sealed_for in [0, 4] {
        let old = world.attachment_of(s(1), 1, (1, sealed_for));
        assert_eq!(world.ask(s(1), old), unbound, "it was sealed before this memory was there");
    }
    let lost_below = |reply: Result<Reply, CallError>| match reply {
        Ok(Reply::Session { lost_below, .. }) => lost_below,
        other => panic!("{other:?}"),
    };
    let renewed = world.attachment_of(s(1), 1, (3, 5));
    assert_eq!(lost_below(world.ask(s(1), renewed)), 3);
    // From now on it is known; indexes that are made later lose nothing.
    for (session, next_index) in [(s(2), 1), (s(3), 9)] {
        let attachment = world.attachment_of(session, 2, (next_index, 0));
        assert_eq!(lost_below(world.ask(session, attachment)), 3);
    }
}

/// The coordinator seals what is so now, for whoever proves that it is a session.
#[test]
fn the_coordinator_renews_its_seal() {
    let (mut world, mut elsewhere) = (coordinator(), other());
    let (me, term, _) = world.open_with_term().expect("room");
    let create = Request::CreateIndex { name: "a".into(), engine: "e".into(), config: vec![] };
    world.ask(me, create).expect("created");
    let ask = world.attachment_of(me, term, (1, 1));
    let Ok(Reply::Session { next_index: 2, indexes, seal, .. }) = world.ask(me, ask) else { panic!() };
    assert_eq!(indexes, [1]);
    let (read_only, coordinator, next_index) = (false, 1, 2);
    let attach =
        Request::AttachSession { read_only, term, coordinator, next_index, incarnation: 1, indexes, seal };
    assert!(matches!(elsewhere.ask(me, attach), Ok(Reply::Session { lost_below: 2, .. })));
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
    world.create(author, "one");
    let Ok(Reply::Chunks { offset, .. }) = world.ask(author, alloc(1)) else { panic!() };
    // It claims an object, links it somewhere, and leaves.
    let bitmap = offset + farwood_fabric::control::ObjectChunk::BITMAP_OFFSET;
    world.memory.store(RegionId::MAIN, bitmap, 1);
    world.done(author, Request::CloseSession {});
    let free = Request::FreeChunks { offset, generation: 0 };
    assert!(crate::driver::is_bad_request(&world.ask(wrong, free.clone())), "nobody's, but not empty");
    assert!(matches!(world.ask(wrong, alloc(1)), Ok(Reply::Chunks { inherited: true, .. })));
    assert!(crate::driver::is_bad_request(&world.ask(wrong, free)), "its own now, but not empty");
}

#[test]
fn a_seal_of_another_pool_with_the_same_secret_is_none() {
    let mut world = other();
    let neighbour = World::new(ServerConfig { pool: PoolId(7), ..other().config });
    assert_eq!(neighbour.config.secret, world.config.secret);
    assert_eq!(world.ask(s(1), neighbour.attachment(s(1), 1)), unproven(1));
    world.attach(s(1), 1).expect("this one is its own");
}

#[test]
fn freed_chunks_wait_for_a_flush_that_the_coordinator_has_announced() {
    let mut world = World::new(ServerConfig::tiny(ServerId::new(0), 1, 1));
    let ((me, _), (other, _)) = (world.open().expect("room"), world.open().expect("room"));
    for name in ["a", "b"] {
        let create = Request::CreateIndex { name: name.into(), engine: "e".into(), config: vec![] };
        world.ask(me, create).expect("created");
    }
    world.ask(me, Request::RequestFlush {}).expect("flush 1");
    let Ok(Reply::Chunks { offset, .. }) = world.ask(me, alloc(1)) else { panic!() };
    for generation in [3, u64::MAX] {
        let refused = world.ask(me, Request::FreeChunks { offset, generation });
        assert!(crate::driver::is_bad_request(&refused), "{generation}: {refused:?}");
    }
    world.done(me, Request::FreeChunks { offset, generation: 0 });
    let full =
        |flush_helps| refused(ControlError::PoolFull { server: ServerId::new(0), wanted: 1, flush_helps });
    assert_eq!(world.ask(me, alloc(2)), full(true), "flush 1 was announced, and is not through");
    let beat = Request::Heartbeat { oldest_pin: 0, flushed: 1, does_chores: false, is_waiting: false };
    world.ask(me, beat.clone()).expect("it lives");
    let asks = |flushed_through| Request::AllocChunks {
        index: 2,
        class: 1,
        object_bytes: 64,
        count: 1,
        flushed_through,
    };
    assert_eq!(world.ask(me, asks(1)), full(true), "one session has not flushed");
    world.ask(other, beat).expect("it lives");
    assert!(matches!(world.ask(me, asks(1)), Ok(Reply::Chunks { inherited: false, .. })));
}

#[test]
fn no_chunk_is_given_to_an_index_that_is_not_there() {
    let mut world = coordinator();
    let (me, _) = world.open().expect("room");
    let unknown = |index| refused(ControlError::NoSuchIndex { name: format!("#{index}") });
    for index in [1, 2, u32::MAX] {
        assert_eq!(world.ask(me, alloc(index)), unknown(index));
    }
    let create = Request::CreateIndex { name: "a".into(), engine: "e".into(), config: vec![] };
    world.ask(me, create).expect("created");
    world.ask(me, alloc(1)).expect("its maker lays it out");
    world.done(me, Request::IndexReady { index: 1 });
    world.ask(me, Request::BeginDrop { name: "a".into() }).expect("flush 1");
    world.ask(me, alloc(1)).expect("operations that have begun go on");
    let beat = Request::Heartbeat { oldest_pin: 0, flushed: 1, does_chores: false, is_waiting: false };
    world.ask(me, beat).expect("it has let go");
    let late = world.ask(me, alloc(1));
    assert!(matches!(late, Err(CallError::Control(ControlError::IndexNotReady { .. }))), "{late:?}");
    world.ask(me, Request::ReleaseIndex { index: 1, seal: 0 }).expect("flushed");
    // It is gone only when the other server has released it, too: there nobody could any more.
    let other_server = other();
    for seals in [vec![], vec![0], vec![other_server.released_by(2)], vec![other_server.released_by(1); 2]] {
        let early = world.ask(me, Request::FinishDrop { index: 1, seals });
        assert!(crate::driver::is_bad_request(&early), "{early:?}");
    }
    let seals = vec![other_server.released_by(1)];
    world.done(me, Request::FinishDrop { index: 1, seals });
    assert_eq!(world.ask(me, alloc(1)), unknown(1));

    let mut world = other();
    let attachment = world.attachment_of(me, 1, (3, 1));
    world.ask(me, attachment).expect("it was opened");
    world.ask(me, alloc(2)).expect("there is memory");
    for index in [3, 4, u32::MAX] {
        assert_eq!(world.ask(me, alloc(index)), unknown(index));
    }
    // Whoever has made the next one says so, and a restart remembers.
    let renewed = world.attachment_of(me, 1, (4, 0));
    world.ask(me, renewed).expect("it is there already");
    world.restart();
    let older = world.attachment_of(me, 2, (1, 0));
    world.ask(me, older).expect("another");
    world.ask(me, alloc(3)).expect("there is memory");
    assert_eq!(world.ask(me, alloc(4)), unknown(4));
}

#[test]
fn a_restart_frees_chunks_of_indexes_that_are_not_in_the_catalog() {
    let mut world = coordinator();
    let (me, _) = world.open().expect("room");
    for name in ["a", "b"] {
        let index = world.create(me, name);
        world.ask(me, alloc(index)).expect("there is memory");
    }
    // As if the second one had been given out without being there.
    let entry = Layout::new(&world.config).catalog_entry(1);
    world.memory.store(RegionId::META, entry, 0);
    world.restart();
    let (me, _) = world.open().expect("room");
    let Ok(Reply::ChunkList { chunks, .. }) = world.ask(me, Request::ListChunks { owner: None }) else {
        panic!()
    };
    assert_eq!(chunks.iter().map(|chunk| chunk.index).collect::<Vec<_>>(), [1]);
}

/// Where room is scarce a server gives one session's chunk to another, too, and both claim in it.
#[test]
fn nobody_hands_back_a_chunk_that_another_claims_in() {
    let mut world = other();
    for (number, term) in [(1, 1), (2, 2), (4, 3)] {
        world.attach(s(number), term).expect("it was opened");
    }
    // The first one takes all chunks but the one that is kept.
    let mut offsets = Vec::new();
    while let Ok(Reply::Chunks { offset, inherited: false }) = world.ask(s(1), alloc(1)) {
        offsets.push(offset);
    }
    let Ok(Reply::Chunks { offset, inherited: true }) = world.ask(s(2), alloc(1)) else { panic!() };
    assert!(offsets.contains(&offset));
    for restarts in [false, true] {
        if restarts {
            world.restart();
            for (number, term) in [(1, 11), (2, 12)] {
                world.attach(s(number), term).expect("it was opened");
            }
            // It is nobody's by now, and whoever had it may have gone on claiming.
            world.ask(s(2), alloc(1)).expect("there is room in it");
        }
        for who in [s(1), s(2)] {
            let refused = world.ask(who, Request::FreeChunks { offset, generation: 0 });
            assert!(crate::driver::is_bad_request(&refused), "{refused:?}");
        }
    }
}
