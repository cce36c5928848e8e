//! Sessions on a coordinator and another server, against a table of states and terms: any step of fencing and adoption,
//! by anybody, at any time, with the right term, a late one or one from the future, through restarts.

use crate::driver::{World, outcome, refused, s, understand};
use farwood_fabric::Label;
use farwood_fabric::addr::{RegionId, ServerId, SessionId};
use farwood_fabric::call::CallError;
use farwood_fabric::control::{ControlError, JOURNAL_BYTES, Reply, Request};
use farwood_fabric::region::Permissions;
use farwood_fabric::server::{HostAction, ServerMemory};
use farwood_memory::ServerConfig;
use farwood_memory::layout::Layout;
use proptest::prelude::*;
use std::cmp::Ordering;
use std::collections::BTreeMap;

const IDS: std::ops::RangeInclusive<u16> = 1..=5; // Only four can exist.

#[derive(Clone, Copy, PartialEq, Debug)]
enum State {
    Free,
    Active,
    Fencing,
    Fenced,
    Adopting(SessionId),
}
use State::{Active, Adopting, Fenced, Fencing, Free};

#[derive(Clone, Copy, Debug)]
enum What {
    Open,
    /// With a term so much beyond the last one.
    Attach {
        step: i64,
    },
    Close,
    BeginFence,
    Evict,
    Fence,
    CompleteFence,
    BeginAdopt,
    AdoptChunks,
    FinishAdopt,
    Alloc,
    Beat,
    Wait {
        ns: u64,
    },
    Restart,
}

fn what() -> impl Strategy<Value = What> {
    prop_oneof![
        6 => Just(What::Open),
        5 => prop_oneof![2 => Just(0), 3 => Just(1), 1 => Just(-1)].prop_map(|step| What::Attach { step }),
        1 => Just(What::Close),
        3 => Just(What::BeginFence),
        3 => Just(What::Evict),
        4 => Just(What::Fence),
        5 => Just(What::CompleteFence),
        5 => Just(What::BeginAdopt),
        4 => Just(What::AdoptChunks),
        4 => Just(What::FinishAdopt),
        6 => Just(What::Alloc),
        4 => Just(What::Beat),
        3 => (1..700u64).prop_map(|ns| What::Wait { ns }),
        1 => Just(What::Restart),
    ]
}

/// How far the term that is said for a victim is from the right one.
fn lapse() -> impl Strategy<Value = i64> {
    prop_oneof![8 => Just(0), 1 => Just(-1), 2 => Just(1)]
}

/// One server as the model knows it.
struct Side {
    world: World,
    states: BTreeMap<SessionId, State>,
    /// The last term known of each number.
    terms: BTreeMap<SessionId, u64>,
    /// (Coordinator) How many sessions there were.
    opened: u64,
    leases: BTreeMap<SessionId, u64>,
    owners: BTreeMap<u64, SessionId>,
}

type Outcome = Result<Option<Reply>, ControlError>;

impl Side {
    fn new(server: u16) -> Self {
        let mut world = World::new(ServerConfig::tiny(ServerId::new(server), 2, 9));
        let states = IDS.map(|id| (s(id), Free)).collect();
        let mut terms: BTreeMap<_, _> = IDS.map(|id| (s(id), 0)).collect();
        let mut opened = 0;
        if world.config.is_coordinator() {
            // Somebody has made the index for which memory is wanted.
            let (maker, term, _) = world.open_with_term().expect("room");
            assert_eq!(world.create(maker, "one"), 1);
            world.done(maker, Request::CloseSession {});
            opened = term;
            terms.insert(maker, term);
        }
        Self { world, states, terms, opened, leases: BTreeMap::new(), owners: BTreeMap::new() }
    }

    fn is_coordinator(&self) -> bool {
        self.world.config.is_coordinator()
    }

    fn state(&self, session: SessionId) -> State {
        self.states[&session]
    }

    fn set(&mut self, session: SessionId, state: State) {
        self.states.insert(session, state);
    }

    /// The session is gone for good: nobody's chunks, no adoptions.
    fn clean(&mut self, session: SessionId) {
        self.set(session, Free);
        self.end_adoptions(session);
        self.disown(session);
    }

    fn end_adoptions(&mut self, by: SessionId) {
        for state in self.states.values_mut().filter(|state| **state == Adopting(by)) {
            *state = Fenced;
        }
    }

    fn disown(&mut self, session: SessionId) -> Vec<u64> {
        let held: Vec<u64> = self.owners.iter().filter(|(_, o)| **o == session).map(|(at, _)| *at).collect();
        for at in &held {
            self.owners.insert(*at, SessionId::NONE);
        }
        held
    }

    fn admitted(&self, caller: SessionId) -> Result<(), ControlError> {
        match self.state(caller) {
            Active => Ok(()),
            Free => Err(ControlError::NoSuchSession { session: caller }),
            _ => Err(ControlError::SessionFenced { session: caller }),
        }
    }

    fn leads(&self) -> Result<(), ControlError> {
        if self.is_coordinator() {
            Ok(())
        } else {
            Err(ControlError::NotCoordinator { server: ServerId::new(0) })
        }
    }

    /// How the term compares with the last one known.
    fn age(&self, session: SessionId, term: u64) -> Result<Ordering, ControlError> {
        if session.get() > 4 || term == 0 {
            return Err(ControlError::NoSuchSession { session });
        }
        Ok(term.cmp(&self.terms[&session]))
    }

    fn is_current(&self, session: SessionId, term: u64) -> Result<(), ControlError> {
        match self.age(session, term)? {
            Ordering::Equal => Ok(()),
            _ => Err(ControlError::NoSuchSession { session }),
        }
    }

    /// Whether another server has nothing to do about this victim any more.
    fn is_past(&self, victim: SessionId, term: u64) -> bool {
        !self.is_coordinator() && self.age(victim, term) == Ok(Ordering::Less)
    }

    /// The answer to the first step of a fence.
    fn fenced(&self, victim: SessionId) -> Reply {
        let Request::Fence { term, seal, .. } = self.world.fence(victim, self.terms[&victim]) else {
            unreachable!()
        };
        Reply::Victim { term, seal }
    }

    /// The answer to the first step of an adoption.
    fn adopted(&self, by: SessionId, victim: SessionId) -> Reply {
        let Request::AdoptChunks { term, seal, .. } =
            self.world.adopt_chunks(by, victim, self.terms[&victim])
        else {
            unreachable!()
        };
        Reply::Victim { term, seal }
    }

    fn evict(&mut self, by: SessionId, victim: SessionId, term: u64) -> Outcome {
        self.admitted(by)?;
        self.leads()?;
        if self.terms.get(&victim).is_none_or(|known| *known != term || victim.get() > 4) {
            return Err(ControlError::NoSuchSession { session: victim });
        }
        self.begin_fence(by, victim, true)
    }

    fn begin_fence(&mut self, by: SessionId, victim: SessionId, force: bool) -> Outcome {
        self.admitted(by)?;
        self.leads()?;
        let left_ns = match self.state(victim) {
            Free => return Err(ControlError::NoSuchSession { session: victim }),
            Active if !force && victim != by => self.leases[&victim].saturating_sub(self.world.now),
            Active => 0,
            _ => return Ok(Some(self.fenced(victim))),
        };
        if left_ns > 0 {
            return Err(ControlError::LeaseAlive { session: victim, left_ns });
        }
        self.set(victim, Fencing);
        Ok(Some(self.fenced(victim)))
    }

    fn fence(&mut self, by: SessionId, victim: SessionId, term: u64) -> Outcome {
        self.admitted(by)?;
        if self.is_past(victim, term) {
            return Ok(None);
        }
        if self.is_coordinator() {
            self.is_current(victim, term)?;
        } else {
            self.age(victim, term)?;
        }
        match (self.is_coordinator(), self.state(victim)) {
            (false, _) => {
                self.set(victim, Fenced);
                self.terms.insert(victim, term);
            }
            (true, Free) => return Err(ControlError::NoSuchSession { session: victim }),
            (true, Active) => return Err(ControlError::NotFenced { session: victim }),
            (true, _) => {}
        }
        Ok(None)
    }

    fn complete_fence(&mut self, by: SessionId, victim: SessionId, term: u64) -> Outcome {
        self.admitted(by)?;
        self.leads()?;
        self.is_current(victim, term)?;
        match self.state(victim) {
            Free => return Err(ControlError::NoSuchSession { session: victim }),
            Active => return Err(ControlError::NotFenced { session: victim }),
            Fencing => {
                self.set(victim, Fenced);
                self.end_adoptions(victim);
            }
            Fenced | Adopting(_) => {}
        }
        Ok(None)
    }

    fn begin_adopt(&mut self, by: SessionId, victim: SessionId) -> Outcome {
        self.admitted(by)?;
        self.leads()?;
        match self.state(victim) {
            Free => Err(ControlError::NoSuchSession { session: victim }),
            Active | Fencing => Err(ControlError::NotFenced { session: victim }),
            Adopting(other) if other != by => Err(ControlError::BeingAdopted { session: victim, by: other }),
            Fenced | Adopting(_) => {
                self.set(victim, Adopting(by));
                Ok(Some(self.adopted(by, victim)))
            }
        }
    }

    /// Whether `by` may clean up after the victim here.
    fn adopts(&self, by: SessionId, victim: SessionId, term: u64) -> Result<(), ControlError> {
        self.admitted(by)?;
        self.is_current(victim, term)?;
        match self.state(victim) {
            Active | Fencing => Err(ControlError::NotFenced { session: victim }),
            Adopting(other) if other == by => Ok(()),
            Adopting(other) => Err(ControlError::BeingAdopted { session: victim, by: other }),
            Free if self.is_coordinator() => Err(ControlError::NoSuchSession { session: victim }),
            Fenced if self.is_coordinator() => {
                Err(ControlError::BadRequest { why: format!("begin to adopt {victim} first") })
            }
            Free | Fenced => Ok(()),
        }
    }

    /// Asks the server and compares with what the model expects.
    fn check(&mut self, caller: SessionId, request: &Request, expected: &Outcome) {
        let call = self.world.control(caller, request);
        let actions = self.world.send(&call);
        let fences = actions.iter().filter(|action| matches!(action, HostAction::Fence { .. })).count();
        let reply = understand(outcome(&call, actions));
        let is_fence = match *request {
            Request::BeginFence { .. } | Request::Evict { .. } | Request::CloseSession {} => true,
            Request::Fence { victim, term, .. } => !self.is_past(victim, term),
            _ => false,
        };
        assert_eq!(fences, usize::from(is_fence && expected.is_ok()), "a fence goes with {request:?}");
        match expected {
            Err(error) => assert_eq!(reply, refused(error.clone()), "{caller}: {request:?}"),
            Ok(Some(expected)) => assert_eq!(reply.as_ref(), Ok(expected), "{caller}: {request:?}"),
            Ok(None) => assert_eq!(reply, Ok(Reply::Done {}), "{caller}: {request:?}"),
        }
    }

    /// Who is let in is exactly who is active, the coordinator knows the terms, and a free number has a clean journal.
    fn check_all(&mut self) {
        let looks = IDS.map(s).find(|session| self.is_coordinator() && self.state(*session) == Active);
        if let Some(session) = looks {
            let reply = self.world.ask(session, Request::ListSessions {});
            let Ok(Reply::Sessions { sessions }) = reply else { panic!("{reply:?}") };
            let listed: Vec<_> = sessions.iter().map(|info| (info.session, info.term)).collect();
            let there = self.terms.iter().filter(|(session, _)| self.state(**session) != Free);
            assert_eq!(listed, there.map(|(session, term)| (*session, *term)).collect::<Vec<_>>());
        }
        let layout = Layout::new(&self.world.config);
        for id in IDS {
            let session = s(id);
            let reply = self.world.ask(session, Request::ListChunks { owner: Some(session) });
            match self.admitted(session) {
                Err(error) => assert_eq!(reply, refused(error)),
                Ok(()) => {
                    let Ok(Reply::ChunkList { chunks, .. }) = reply else { panic!("{reply:?}") };
                    let held = self.owners.values().filter(|owner| **owner == session).count();
                    assert_eq!(chunks.len(), held);
                }
            }
            if self.state(session) == Free && id <= 4 {
                let at = layout.journal(id - 1).offset();
                let mut words = (at..at + JOURNAL_BYTES).step_by(8);
                assert!(words.all(|at| self.world.memory.load(RegionId::BOARD, at) == 0));
            }
        }
    }

    fn open(&mut self) {
        let call = self.world.control(
            SessionId::NONE,
            &Request::OpenSession { read_only: false, reaper: false, label: Label::default() },
        );
        let actions = self.world.send(&call);
        let admitted = actions.iter().find_map(|action| match action {
            HostAction::Admit { session, term, permissions, .. } => Some((*session, *term, *permissions)),
            _ => None,
        });
        match understand(outcome(&call, actions)) {
            Ok(Reply::Session { session, term, .. }) => {
                assert_eq!(admitted, Some((session, term, Permissions::ALL)));
                assert_eq!(self.state(session), Free, "{session} is somebody else");
                self.opened += 1;
                assert_eq!(term, self.opened, "terms count sessions, through restarts");
                self.terms.insert(session, term);
                self.set(session, Active);
                self.leases.insert(session, self.world.now + 1000);
            }
            Err(CallError::Control(error)) if !self.is_coordinator() => {
                assert_eq!(error, ControlError::NotCoordinator { server: ServerId::new(0) });
            }
            Err(CallError::Control(error)) => {
                let is_dead = |session| match self.state(session) {
                    Active => self.leases[&session] <= self.world.now,
                    state => state != Free,
                };
                let dead = (1..=4).filter(|id| is_dead(s(*id))).count();
                let dead = u16::try_from(dead).expect("there are four");
                assert_eq!(error, ControlError::SessionsFull { max: 4, dead });
                assert!((1..=4).all(|id| self.state(s(id)) != Free));
            }
            other => panic!("{other:?}"),
        }
    }

    fn attach(&mut self, caller: SessionId, term: u64) {
        let request = self.world.attachment(caller, term);
        let call = self.world.control(caller, &request);
        let actions = self.world.send(&call);
        let mut kinds: Vec<_> = actions.iter().map(std::mem::discriminant).collect();
        kinds.pop();
        let [fence, admit] = [
            HostAction::Fence { session: caller },
            HostAction::Admit { session: caller, term, ticket: 0, permissions: Permissions::ALL },
        ]
        .map(|action| std::mem::discriminant(&action));
        let reply = understand(outcome(&call, actions));
        let (gone, fenced) = (
            ControlError::NoSuchSession { session: caller },
            ControlError::SessionFenced { session: caller },
        );
        let expected = match (self.age(caller, term), self.is_coordinator(), self.state(caller)) {
            (Err(error), _, _) => Err(error),
            (Ok(Ordering::Greater), true, _) | (Ok(Ordering::Equal), true, Free) => Err(gone),
            (Ok(Ordering::Equal), _, Active) | (Ok(Ordering::Greater), _, Free) => Ok(vec![admit]),
            (Ok(Ordering::Less | Ordering::Equal), _, _) => Err(fenced),
            (Ok(Ordering::Greater), false, _) => Ok(vec![fence, admit]),
        };
        match expected {
            Err(error) => {
                assert_eq!(reply, refused(error));
                assert!(kinds.is_empty(), "who is refused changes nothing");
            }
            Ok(expected) => {
                assert_eq!(kinds, expected);
                let Ok(Reply::Session { session, term: told, .. }) = reply else { panic!("{reply:?}") };
                assert_eq!((session, told), (caller, term));
                if self.age(caller, term) == Ok(Ordering::Greater) {
                    self.clean(caller);
                }
                self.set(caller, Active);
                self.terms.insert(caller, term);
            }
        }
    }

    /// A chunk, and something in the journal.
    fn alloc(&mut self, caller: SessionId) {
        let request =
            Request::AllocChunks { index: 1, class: 1, object_bytes: 0, count: 1, flushed_through: 0 };
        let reply = self.world.ask_twice(caller, request);
        match (self.admitted(caller), reply) {
            (Err(error), reply) => assert_eq!(reply, refused(error)),
            (Ok(()), Ok(Reply::Chunks { offset, .. })) => {
                assert!(self.owners.insert(offset, caller).is_none(), "{offset:#x} has an owner");
                let journal = Layout::new(&self.world.config).journal(caller.get() - 1);
                self.world.memory.store(RegionId::BOARD, journal.offset() + JOURNAL_BYTES - 8, 7);
            }
            (Ok(()), reply) => {
                assert!(matches!(reply, Err(CallError::Control(ControlError::PoolFull { .. }))));
                assert_eq!(self.owners.len(), 9);
            }
        }
    }

    fn apply(&mut self, what: What, caller: SessionId, victim: SessionId, lapse: i64) {
        let term = self.terms[&victim].saturating_add_signed(lapse);
        match what {
            What::Open => self.open(),
            What::Attach { step } => self.attach(caller, self.terms[&caller].saturating_add_signed(step)),
            What::Alloc => self.alloc(caller),
            What::Wait { ns } => self.world.now += ns,
            What::Restart => {
                self.world.restart();
                // Nobody could renew a lease meanwhile.
                let now = self.world.now;
                let active: Vec<SessionId> =
                    self.states.iter().filter(|(_, state)| **state == Active).map(|(who, _)| *who).collect();
                self.leases.extend(active.iter().map(|session| (*session, now + 1000)));
                // Exactly those are let in again, and with the tickets that they have.
                let terms = self.world.terms().clone();
                let expected: Vec<_> = active.iter().map(|who| (*who, terms[who].0, terms[who].1)).collect();
                assert_eq!(self.world.readmitted(), expected);
            }
            What::Close => {
                let expected = self.admitted(caller).map(|()| None);
                if expected.is_ok() {
                    self.clean(caller);
                }
                self.check(caller, &Request::CloseSession {}, &expected);
            }
            What::Beat => {
                let expected = self.admitted(caller).and_then(|()| self.leads());
                let reply = self.world.ask(
                    caller,
                    Request::Heartbeat { oldest_pin: 0, flushed: 0, does_chores: false, is_waiting: false },
                );
                match expected {
                    Err(error) => assert_eq!(reply, refused(error)),
                    Ok(()) => {
                        assert!(matches!(reply, Ok(Reply::Alive { .. })));
                        self.leases.insert(caller, self.world.now + 1000);
                    }
                }
            }
            What::BeginFence => {
                let expected = self.begin_fence(caller, victim, false);
                self.check(caller, &Request::BeginFence { victim }, &expected);
            }
            What::Evict => {
                let expected = self.evict(caller, victim, term);
                self.check(caller, &Request::Evict { victim, term }, &expected);
            }
            What::Fence => {
                let expected = self.fence(caller, victim, term);
                self.check(caller, &self.world.fence(victim, term), &expected);
            }
            What::CompleteFence => {
                let expected = self.complete_fence(caller, victim, term);
                self.check(caller, &Request::CompleteFence { victim, term }, &expected);
            }
            What::BeginAdopt => {
                let expected = self.begin_adopt(caller, victim);
                self.check(caller, &Request::BeginAdopt { victim }, &expected);
            }
            What::FinishAdopt => {
                let expected = match self.adopts(caller, victim, term) {
                    Ok(()) => {
                        self.clean(victim);
                        Ok(None)
                    }
                    Err(_) if self.admitted(caller).is_ok() && self.is_past(victim, term) => Ok(None),
                    // It was finished before, or there was nothing to adopt.
                    Err(ControlError::NoSuchSession { .. })
                        if self.admitted(caller).is_ok() && self.is_current(victim, term).is_ok() =>
                    {
                        Ok(None)
                    }
                    Err(error) => Err(error),
                };
                let request = self.world.finish_adopt(caller, victim, term);
                self.check(caller, &request, &expected);
            }
            What::AdoptChunks => match self.adopts(caller, victim, term) {
                Err(error) => {
                    self.check(caller, &self.world.adopt_chunks(caller, victim, term), &Err(error));
                }
                Ok(()) => {
                    let held = self.disown(victim);
                    let reply = self.world.ask(caller, self.world.adopt_chunks(caller, victim, term));
                    let Ok(Reply::Adopted { chunks, .. }) = reply else { panic!("{reply:?}") };
                    assert!(chunks.iter().all(|chunk| chunk.owner.is_none()));
                    assert_eq!(chunks.iter().map(|chunk| chunk.offset).collect::<Vec<_>>(), held);
                }
            },
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(700))]

    #[test]
    fn sessions_follow_the_table(
        other in any::<bool>(),
        steps in proptest::collection::vec((what(), IDS, IDS, lapse()), 1..120)
    ) {
        let mut side = Side::new(u16::from(other));
        for (what, caller, victim, lapse) in steps {
            side.apply(what, s(caller), s(victim), lapse);
            side.check_all();
        }
    }
}

#[test]
fn a_session_that_only_reads_is_held_to_it() {
    let mut world = World::new(ServerConfig::tiny(ServerId::new(0), 1, 2));
    let call = world.control(
        SessionId::NONE,
        &Request::OpenSession { read_only: true, reaper: false, label: Label::default() },
    );
    let actions = world.send(&call);
    assert!(matches!(actions[0], HostAction::Admit { permissions: Permissions::READ, .. }));
    let Ok(Reply::Session { session, .. }) = understand(outcome(&call, actions)) else { panic!() };
    let create = Request::CreateIndex { name: "n".to_owned(), engine: "e".to_owned(), config: vec![] };
    for request in [create, Request::RequestFlush {}, Request::ReleaseIndex { index: 1, seal: 0 }] {
        assert!(crate::driver::is_bad_request(&world.ask(session, request)));
    }
    assert!(world.ask(session, Request::ListIndexes {}).is_ok());
    world.done(session, Request::CloseSession {});
}

#[test]
fn the_number_of_a_dead_session_counts_until_it_is_fenced() {
    let mut world = World::new(ServerConfig::tiny(ServerId::new(0), 1, 2));
    let [(a, _), (b, _)] = [world.open().unwrap(), world.open().unwrap()];
    let beat = |world: &mut World| match world.ask(
        b,
        Request::Heartbeat { oldest_pin: u64::MAX, flushed: 0, does_chores: false, is_waiting: false },
    ) {
        Ok(Reply::Alive { epochs, .. }) => epochs.safe,
        other => panic!("{other:?}"),
    };
    for _ in 0..3 {
        beat(&mut world);
    }
    assert_eq!(beat(&mut world), 1, "a is silent");
    world.now += 1000;
    let term = world.victim(b, Request::BeginFence { victim: a });
    assert_eq!(beat(&mut world), 1, "its verbs may still land elsewhere");
    world.done(b, Request::CompleteFence { victim: a, term });
    assert_eq!(beat(&mut world), 2);
}

/// A server that is not the coordinator, with a session that looks on.
fn elsewhere() -> (World, SessionId) {
    let mut world = World::new(ServerConfig::tiny(ServerId::new(1), 2, 4));
    world.attach(s(4), 100).expect("it is the first");
    (world, s(4))
}

/// Gives the session a chunk and a note in its journal.
fn settle(world: &mut World, session: SessionId) {
    let alloc =
        Request::AllocChunks { index: 1, class: 1, object_bytes: 64, count: 1, flushed_through: u64::MAX };
    world.ask(session, alloc).expect("there is memory");
    let journal = Layout::new(&world.config).journal(session.get() - 1);
    world.memory.store(RegionId::BOARD, journal.offset(), 7);
}

/// How many chunks it has, and whether there is something in its journal.
fn belongings(world: &mut World, session: SessionId) -> (usize, bool) {
    let reply = world.ask(s(4), Request::ListChunks { owner: Some(session) });
    let Ok(Reply::ChunkList { chunks, .. }) = reply else { panic!("{reply:?}") };
    let journal = Layout::new(&world.config).journal(session.get() - 1);
    (chunks.len(), world.memory.load(RegionId::BOARD, journal.offset()) != 0)
}

#[test]
fn a_delayed_fence_does_not_touch_the_next_holder_of_the_number() {
    let (mut world, by) = elsewhere();
    let victim = s(1);
    world.attach(victim, 1).unwrap();
    let fence = world.fence(victim, 1);
    let delayed = world.control(by, &fence);
    world.done(by, fence);
    world.ask(by, world.adopt_chunks(by, victim, 1)).unwrap();
    world.done(by, world.finish_adopt(by, victim, 1));
    world.attach(victim, 2).unwrap();
    settle(&mut world, victim);
    let actions = world.send(&delayed);
    assert_eq!(actions.len(), 1, "the transport fences nobody: {actions:?}");
    assert_eq!(understand(outcome(&delayed, actions)), Ok(Reply::Done {}));
    assert!(world.ask(victim, Request::ListChunks { owner: None }).is_ok(), "it is still admitted");
    assert_eq!(belongings(&mut world, victim), (1, true));
    let gone = refused(ControlError::NoSuchSession { session: victim });
    assert_eq!(world.ask(by, world.adopt_chunks(by, victim, 1)), gone);
    world.done(by, world.fence(victim, 2));
    assert!(world.ask(victim, Request::ListChunks { owner: None }).is_err());
}

#[test]
fn a_late_end_of_an_adoption_does_not_end_the_next_one() {
    let (mut world, by) = elsewhere();
    let victim = s(1);
    for term in [1, 2] {
        world.attach(victim, term).unwrap();
        settle(&mut world, victim);
        world.done(by, world.fence(victim, term));
        if term == 1 {
            world.done(by, world.finish_adopt(by, victim, term));
        }
    }
    world.done(by, world.finish_adopt(by, victim, 1));
    assert_eq!(belongings(&mut world, victim), (1, true), "somebody else works on it");
    let gone = refused(ControlError::NoSuchSession { session: victim });
    assert_eq!(world.ask(by, world.finish_adopt(by, victim, 3)), gone);
    world.done(by, world.finish_adopt(by, victim, 2));
    world.done(by, world.finish_adopt(by, victim, 2));
    assert_eq!(belongings(&mut world, victim), (0, false));
}

#[test]
fn a_newer_term_takes_the_place_of_an_older_one() {
    for restart in [false, true] {
        let (mut world, _) = elsewhere();
        let session = s(2);
        let fenced = refused(ControlError::SessionFenced { session });
        world.attach(session, 5).unwrap();
        settle(&mut world, session);
        if restart {
            world.restart();
        }
        world.attach(session, 5).unwrap();
        assert_eq!(belongings(&mut world, session), (1, true), "neither changes what it has");
        assert_eq!(world.attach(session, 4), fenced);
        assert!(matches!(world.attach(session, 6), Ok(Reply::Session { term: 6, .. })));
        assert_eq!(belongings(&mut world, session), (0, false), "the heir finds nothing");
        assert_eq!(world.attach(session, 5), fenced);
        world.done(session, Request::CloseSession {});
        assert_eq!(world.attach(session, 6), fenced, "a late repeat does not bring it back");
        world.attach(session, 7).unwrap();
    }
}

#[test]
fn who_was_fenced_before_it_came_is_not_let_in() {
    let (mut world, by) = elsewhere();
    let victim = s(3);
    let fenced = refused(ControlError::SessionFenced { session: victim });
    world.done(by, world.fence(victim, 9));
    assert_eq!(world.attach(victim, 9), fenced);
    world.done(by, world.finish_adopt(by, victim, 9));
    assert_eq!(world.attach(victim, 9), fenced, "not even when its number is free");
    world.attach(victim, 10).unwrap();
}

#[test]
fn terms_never_repeat_on_the_same_memory() {
    let mut world = World::new(ServerConfig::tiny(ServerId::new(0), 1, 2));
    let mut last = 0;
    for round in 0..12 {
        let [(a, of_a, _), (b, of_b, _)] = [0; 2].map(|_| world.open_with_term().unwrap());
        assert_eq!([of_a, of_b], [last + 1, last + 2], "in round {round}");
        world.bury(a, b, true);
        world.done(a, Request::CloseSession {});
        world.restart();
        let (c, of_c, _) = world.open_with_term().unwrap();
        assert_eq!(of_c, last + 3);
        world.restart();
        let (d, of_d, _) = world.open_with_term().unwrap();
        world.bury(d, c, true);
        world.done(d, Request::CloseSession {});
        last = of_d;
    }
    assert_eq!(last, 48);
}
