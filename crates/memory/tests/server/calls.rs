//! Calls: at most once, in order, bounded, and deaf to garbage.

use crate::driver::{World, outcome, refused, s, understand};
use farwood_fabric::Label;
use farwood_fabric::addr::{RegionId, ServerId, SessionId};
use farwood_fabric::call::{Call, CallError, CallId};
use farwood_fabric::control::{ControlError, Reply, Request};
use farwood_fabric::procedure::{
    Procedure, ProcedureContext, ProcedureFuture, ProcedureId, ProcedureSet, Weight,
};
use farwood_fabric::server::{HostAction, ServerLogic, ServerMemory, StartError};
use farwood_fabric::wire::encode;
use farwood_memory::testing::VecMemory;
use farwood_memory::{MemoryServer, ServerConfig};
use proptest::prelude::*;
use std::sync::Arc;

#[derive(Debug)]
struct Echo(u32, Weight);

impl Procedure for Echo {
    fn id(&self) -> ProcedureId {
        ProcedureId(self.0)
    }
    fn weight(&self) -> Weight {
        self.1
    }
    fn run(self: Arc<Self>, _: ProcedureContext, request: Vec<u8>) -> ProcedureFuture {
        Box::pin(std::future::ready(Ok(request)))
    }
}

const SHORT: ProcedureId = ProcedureId(300);
const LONG: ProcedureId = ProcedureId(301);

fn procedures() -> ProcedureSet {
    let procedures = ProcedureSet::default();
    let procedures = procedures.with(Arc::new(Echo(300, Weight::Short)));
    procedures.with(Arc::new(Echo(301, Weight::Long)))
}

fn world() -> World {
    World::with(ServerConfig::tiny(ServerId::new(0), 1, 4), procedures())
}

fn runs(actions: &[HostAction]) -> Vec<CallId> {
    let runs = actions.iter().filter_map(|action| match action {
        HostAction::Run { call, .. } => Some(*call),
        _ => None,
    });
    runs.collect()
}

fn replies(actions: &[HostAction]) -> Vec<CallId> {
    let replies = actions.iter().filter_map(|action| match action {
        HostAction::Reply { to, .. } => Some(*to),
        _ => None,
    });
    replies.collect()
}

/// The answer to the first step of a fence.
fn first_step(world: &World, victim: SessionId, term: u64) -> Reply {
    let Request::Fence { seal, .. } = world.fence(victim, term) else { unreachable!() };
    Reply::Victim { term, seal }
}

#[test]
fn a_repeated_procedure_runs_once() {
    let mut world = world();
    let (a, _) = world.open().unwrap();
    let call = world.call(a, SHORT, vec![1]);
    assert_eq!(runs(&world.send(&call)), [call.id]);
    assert!(world.send(&call).is_empty(), "it runs; its reply goes out once");
    let actions = world.server.finished(call.id, Ok(vec![2]));
    assert_eq!(outcome(&call, actions), Ok(vec![2]));
    assert_eq!(outcome(&call, world.send(&call)), Ok(vec![2]));
    assert!(world.server.finished(call.id, Ok(vec![3])).is_empty(), "it had ended");
    let acknowledging = Call { acknowledged_below: call.id.sequence + 1, ..world.call(a, SHORT, vec![]) };
    assert_eq!(runs(&world.send(&acknowledging)).len(), 1);
    assert_eq!(outcome(&call, world.send(&call)), Err(CallError::Forgotten));
}

#[test]
fn queues_are_bounded_and_separate() {
    let mut world = world();
    let (a, _) = world.open().unwrap();
    let mut calls = vec![];
    for _ in 0..3 {
        let call = world.call(a, LONG, vec![]);
        calls.push((call.clone(), world.send(&call).len()));
    }
    assert_eq!(calls.iter().map(|(_, actions)| *actions).collect::<Vec<_>>(), [1, 0, 0]);
    let refused = world.call(a, LONG, vec![]);
    assert_eq!(outcome(&refused, world.send(&refused)), Err(CallError::Busy { queued: 2 }));
    let short = world.call(a, SHORT, vec![]);
    assert_eq!(runs(&world.send(&short)), [short.id]);
    let actions = world.server.finished(calls[0].0.id, Ok(vec![]));
    assert_eq!((replies(&actions), runs(&actions)), (vec![calls[0].0.id], vec![calls[1].0.id]));
    assert!(world.send(&refused).is_empty(), "what was busy may be repeated, and waits now");
}

#[test]
fn unknown_procedures_and_strangers_are_refused() {
    let mut world = world();
    let (a, _) = world.open().unwrap();
    for procedure in [ProcedureId(1), ProcedureId(255), ProcedureId(999)] {
        let call = world.call(a, procedure, vec![]);
        assert_eq!(outcome(&call, world.send(&call)), Err(CallError::NoSuchProcedure { procedure }));
    }
    for session in [SessionId::NONE, s(2), s(77), s(u16::MAX)] {
        let stranger = Err(CallError::Control(ControlError::NoSuchSession { session }));
        let call = world.call(session, SHORT, vec![]);
        assert_eq!(outcome(&call, world.send(&call)), stranger);
        let call = world.control(session, &Request::ListIndexes {});
        assert_eq!(outcome(&call, world.send(&call)), stranger);
    }
    assert!(matches!(world.ask(SessionId::NONE, Request::Hello {}), Ok(Reply::Hello { .. })));
    assert!(matches!(world.ask(s(3), Request::Hello {}), Ok(Reply::Hello { .. })), "before it attaches");
}

#[test]
fn a_repeated_open_is_answered_with_the_same_session() {
    let mut world = world();
    let call = world.control(
        SessionId::NONE,
        &Request::OpenSession { read_only: false, reaper: false, label: Label::default() },
    );
    let first = world.send(&call);
    assert!(matches!(first[..], [HostAction::Admit { .. }, HostAction::Reply { .. }]), "{first:?}");
    let first = outcome(&call, first);
    let Ok(Reply::Session { session, term: 1, .. }) = understand(first.clone()) else { panic!("{first:?}") };
    let stranger = Call { id: CallId { endpoint: 4, ..call.id }, ..call.clone() };
    let other = understand(outcome(&stranger, world.send(&stranger)));
    let Ok(Reply::Session { session: other, term: 2, .. }) = other else { panic!("{other:?}") };
    assert_ne!(session, other, "another endpoint is another newcomer");

    world.bury(session, other, true);
    let (third, _) = world.open().unwrap();
    world.done(third, Request::CloseSession {});
    let again = world.send(&call);
    assert_eq!(again.len(), 1, "nobody is admitted twice");
    assert_eq!(outcome(&call, again), first, "others end, and what nobody asked is still known");
    world.done(session, Request::CloseSession {});
    assert_eq!(outcome(&call, world.send(&call)), first, "a late repeat does not open another session");

    let (me, _) = world.open().unwrap();
    assert!(crate::driver::is_bad_request(
        &world.ask(me, Request::OpenSession { read_only: false, reaper: false, label: Label::default() })
    ));
    let Ok(Reply::Sessions { sessions }) = world.ask(me, Request::ListSessions {}) else { panic!() };
    assert_eq!(sessions.iter().map(|info| (info.session, info.term)).collect::<Vec<_>>(), [(me, 4)]);
}

#[test]
fn an_eviction_ends_one_holder_of_a_number_whose_lease_runs() {
    let mut world = world();
    let ((a, term, _), (b, _)) = (world.open_with_term().unwrap(), world.open().unwrap());
    let early = world.ask(b, Request::BeginFence { victim: a });
    assert!(matches!(early, Err(CallError::Control(ControlError::LeaseAlive { .. }))), "{early:?}");
    let other = Err(CallError::Control(ControlError::NoSuchSession { session: a }));
    for wrong in [0, term + 1, u64::MAX] {
        assert_eq!(world.ask(b, Request::Evict { victim: a, term: wrong }), other, "another holder's term");
    }
    world.ask(a, Request::ListSessions {}).expect("it was not touched");
    assert_eq!(world.ask(b, Request::Evict { victim: a, term }), Ok(first_step(&world, a, term)));
    let fenced = Err(CallError::Control(ControlError::SessionFenced { session: a }));
    assert_eq!(world.ask(a, Request::ListSessions {}), fenced);
    assert_eq!(world.ask(b, Request::Evict { victim: a, term }), Ok(first_step(&world, a, term)), "again");
    world.done(b, Request::CompleteFence { victim: a, term });
}

#[test]
fn sessions_are_listed_with_who_they_are_and_who_adopts_them() {
    let mut world = world();
    let label = Label::new("load pid 99 on here");
    let call =
        world.control(SessionId::NONE, &Request::OpenSession { read_only: false, reaper: false, label });
    let opened = understand(outcome(&call, world.send(&call)));
    let Ok(Reply::Session { session: loader, term, .. }) = opened else { panic!("{opened:?}") };
    let (me, _) = world.open().unwrap();
    world.now += 40;
    let listed = |world: &mut World| {
        let Ok(Reply::Sessions { sessions }) = world.ask(me, Request::ListSessions {}) else { panic!() };
        sessions.into_iter().find(|info| info.session == loader).expect("it is there")
    };
    let found = listed(&mut world);
    assert_eq!((found.label, found.adopter), (label, SessionId::NONE));
    assert!(found.since_ns >= 40, "{found:?}");

    world.evict(me, loader);
    world.done(me, Request::CompleteFence { victim: loader, term });
    world.ask(me, Request::BeginAdopt { victim: loader }).unwrap();
    let found = listed(&mut world);
    assert_eq!((found.label, found.adopter), (label, me), "it is still known by its label");
}

#[test]
fn a_refused_open_may_be_tried_again_under_another_name() {
    let mut world = world();
    let full: Vec<_> = (0..4).map(|_| world.open().unwrap().0).collect();
    let call = world.control(
        SessionId::NONE,
        &Request::OpenSession { read_only: false, reaper: false, label: Label::default() },
    );
    let refusal = Err(CallError::Control(ControlError::SessionsFull { max: 4, dead: 0 }));
    assert_eq!(outcome(&call, world.send(&call)), refusal);
    world.done(full[0], Request::CloseSession {});
    assert_eq!(outcome(&call, world.send(&call)), refusal, "a call has one outcome");
    assert_eq!(world.open().unwrap().0, full[0]);
}

#[test]
fn a_fence_is_answered_when_the_victims_procedures_have_ended() {
    let mut world = world();
    let [(a, _), (b, _)] = [world.open().unwrap(), world.open().unwrap()];
    let running = world.call(a, LONG, vec![]);
    let waiting = world.call(a, LONG, vec![]);
    world.send(&running);
    world.send(&waiting);
    assert_eq!(world.ask(a, Request::CloseSession {}), Err(CallError::Busy { queued: 0 }));
    let fence = world.control(b, &Request::Evict { victim: a, term: 1 });
    let actions = world.send(&fence);
    assert!(matches!(actions[..], [HostAction::Fence { session }] if session == a), "{actions:?}");
    assert!(world.send(&fence).is_empty(), "the repeat waits too");
    let actions = world.server.finished(running.id, Ok(vec![1]));
    assert_eq!((replies(&actions), runs(&actions)), (vec![fence.id], vec![]), "nothing for or of the fenced");
    assert_eq!(understand(outcome(&fence, world.send(&fence))), Ok(first_step(&world, a, 1)));
    for call in [&running, &waiting] {
        let refusal = CallError::Control(ControlError::SessionFenced { session: a });
        assert_eq!(outcome(call, world.send(call)), Err(refusal));
    }
}

#[test]
fn who_gets_a_number_next_is_not_answered_for_its_predecessor() {
    let mut world = world();
    let (a, _) = world.open().unwrap();
    let call = world.call(a, SHORT, vec![]);
    world.send(&call);
    world.server.finished(call.id, Ok(vec![1]));
    world.done(a, Request::CloseSession {});
    let (heir, term, _) = (0..4).map(|_| world.open_with_term().unwrap()).last().unwrap();
    assert_eq!(heir, a, "the number comes round");
    let ticket = world.call(heir, SHORT, vec![]).ticket;
    let call = Call { id: CallId { term, ..call.id }, ticket, ..call };
    assert_eq!(runs(&world.send(&call)), [call.id]);
}

#[test]
fn a_new_holder_of_a_number_waits_for_its_predecessors_procedures() {
    let mut world = World::with(ServerConfig::tiny(ServerId::new(1), 2, 4), procedures());
    let a = s(1);
    world.attach(a, 1).unwrap();
    let [running, waiting] = [0; 2].map(|_| world.call(a, LONG, vec![]));
    world.send(&running);
    world.send(&waiting);
    let come = world.attachment(a, 2);
    let come = world.control(a, &come);
    let actions = world.send(&come);
    assert!(matches!(actions[0], HostAction::Fence { session } if session == a), "{actions:?}");
    assert_eq!((actions.len(), outcome(&come, actions)), (2, Err(CallError::Busy { queued: 0 })));
    let fenced = CallError::Control(ControlError::SessionFenced { session: a });
    assert_eq!(outcome(&waiting, world.send(&waiting)), Err(fenced), "the predecessor is shut out already");
    assert!(world.server.finished(running.id, Ok(vec![1])).is_empty(), "nothing for or of it");
    let actions = world.send(&come);
    assert!(
        matches!(actions[..], [HostAction::Fence { .. }, HostAction::Admit { .. }, HostAction::Reply { .. }]),
        "{actions:?}"
    );
    let ticket = world.call(a, SHORT, vec![]).ticket;
    let same = Call { id: CallId { term: 2, ..running.id }, ticket, ..running };
    assert_eq!(runs(&world.send(&same)), [same.id], "its call is not taken for the predecessor's");
}

#[test]
fn fencing_oneself_is_answered_after_the_fence() {
    let mut world = world();
    let (a, _) = world.open().unwrap();
    let call = world.control(a, &Request::BeginFence { victim: a });
    let actions = world.send(&call);
    assert!(matches!(actions[..], [HostAction::Fence { .. }, HostAction::Reply { outcome: Ok(_), .. }]));
}

#[test]
fn memory_of_others_is_not_touched() {
    let config = ServerConfig::tiny(ServerId::new(0), 1, 2);
    let server = MemoryServer::new(config.clone(), ProcedureSet::default()).unwrap();
    let memory = VecMemory::new(&server.regions());
    let call = Call {
        ticket: 0,
        id: CallId { session: SessionId::NONE, term: 0, endpoint: 0, sequence: 0 },
        acknowledged_below: 0,
        procedure: ProcedureId::CONTROL,
        request: encode(&Request::Hello {}),
    };
    let early = outcome(&call, server.call(&memory, call.clone(), 0));
    assert!(matches!(early, Err(CallError::Failed(_))), "not started");
    assert!(server.finished(call.id, Ok(vec![])).is_empty());
    memory.store(RegionId::META, 0, 0x1234);
    assert!(matches!(server.start(&memory, 0), Err(StartError::Mismatch(_))));
    memory.store(RegionId::META, 0, 0);
    let identity = server.start(&memory, 0).unwrap();
    assert_eq!((identity.incarnation, identity.regions), (1, server.regions()));
    let other =
        MemoryServer::new(ServerConfig { max_sessions: 5, ..config.clone() }, ProcedureSet::default());
    assert!(matches!(other.unwrap().start(&memory, 0), Err(StartError::Mismatch(_))));
    let broken = MemoryServer::new(ServerConfig { cores: 0, ..config }, ProcedureSet::default());
    assert!(matches!(broken, Err(StartError::Config(_))));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn garbage_is_refused_or_is_a_request(bytes in proptest::collection::vec(any::<u8>(), 0..60), tag in 0u8..30) {
        let mut world = world();
        let (a, _) = world.open().unwrap();
        let mut tagged = vec![tag];
        tagged.extend_from_slice(&bytes);
        for request in [bytes, tagged] {
            for session in [a, SessionId::NONE, s(4)] {
                let understood = farwood_fabric::wire::decode::<Request>(&request).is_ok();
                let call = world.call(session, ProcedureId::CONTROL, request.clone());
                let outcome = outcome(&call, world.send(&call));
                prop_assert_eq!(outcome == Err(CallError::Malformed), !understood);
            }
        }
    }
}

#[test]
fn an_earlier_holder_of_a_number_is_not_taken_for_the_present_one() {
    let mut world = World::new(ServerConfig::tiny(ServerId::new(0), 1, 8));
    let (keeper, _) = world.open().expect("there is room");
    let (victim, old_term, _) = world.open_with_term().expect("there is room");
    let late = world.control(victim, &Request::CloseSession {});
    world.bury(keeper, victim, true);
    // Numbers are used again as late as possible, so the others have to be taken first.
    let next = loop {
        let (next, _) = world.open().expect("there is room");
        if next == victim {
            break next;
        }
    };
    assert_eq!(late.id.term, old_term);
    let reply = understand(outcome(&late, world.send(&late)));
    assert_eq!(reply, refused(ControlError::SessionFenced { session: victim }));
    world.done(next, Request::CloseSession {});
}
