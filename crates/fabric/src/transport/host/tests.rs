//! Who may call, who hears the answer, and how many may wait. The logic here is as small as it can be.

use super::*;
use crate::mem::RacyMemory;
use crate::region::{PoolId, RegionSpec};
use crate::server::ServerMemory;
use crate::status::Tables;

/// Knows sessions by their tickets, and has three answers.
#[derive(Default, Debug)]
pub(crate) struct Clerk {
    tickets: Mutex<FxHashMap<SessionId, u64>>,
}

/// Lets a session in, and answers.
pub(crate) const ADMIT: &[u8] = b"admit";
/// Shuts a session out, and answers.
pub(crate) const LEAVE: &[u8] = b"leave";
/// Is not answered.
const WAIT: &[u8] = b"wait";

impl ServerLogic for Clerk {
    fn regions(&self) -> Vec<RegionSpec> {
        vec![RegionSpec { id: crate::addr::RegionId::MAIN, bytes: 1 << 20, permissions: Permissions::ALL }]
    }

    fn start(&self, _: &dyn ServerMemory, _: u64) -> Result<Identity, StartError> {
        let (pool, server, regions) = (PoolId(1), ServerId::COORDINATOR, self.regions());
        Ok(Identity {
            pool,
            server,
            servers: 1,
            incarnation: 1,
            life: 1,
            format: 1,
            chunk_bytes: 4096,
            regions,
        })
    }

    fn call(&self, _: &dyn ServerMemory, call: Call, _: u64) -> Vec<HostAction> {
        let CallId { session, term, .. } = call.id;
        let ticket = call.ticket;
        let mut tickets = lock(&self.tickets);
        let reply = |outcome| HostAction::Reply { to: call.id, outcome };
        if call.request == ADMIT {
            tickets.insert(session, ticket);
            let permissions = Permissions::ALL;
            return vec![HostAction::Admit { session, term, ticket, permissions }, reply(Ok(vec![]))];
        }
        match &*call.request {
            _ if tickets.get(&session) != Some(&ticket) => {
                vec![reply(Err(ControlError::Unproven { server: ServerId::COORDINATOR }.into()))]
            }
            WAIT => vec![],
            LEAVE => vec![HostAction::Fence { session }, reply(Ok(vec![]))],
            _ => vec![reply(Ok(call.request))],
        }
    }

    fn finished(&self, to: CallId, outcome: CallOutcome) -> Vec<HostAction> {
        vec![HostAction::Reply { to, outcome }]
    }

    fn abandoned(&self, _: &dyn ServerMemory, _: SessionId, _: u64) {}

    fn silent(&self, _: SessionId, _: u64, _: u64) {}

    fn status(&self, _: u64) -> Tables {
        Tables::default()
    }

    fn cores(&self) -> usize {
        1
    }
}

pub(crate) fn host() -> Arc<Host> {
    let mut memory = Regions::default();
    memory.insert(crate::addr::RegionId::MAIN, RacyMemory::zeroed(1 << 20).unwrap());
    let gates = Gates::new(RacyMemory::zeroed(gates::GATES_BYTES).unwrap());
    Host::start(Arc::<Clerk>::default(), memory, gates).unwrap()
}

/// A process: what it was answered, and what it was asked.
#[derive(Default, Debug)]
pub(crate) struct Process {
    answers: Mutex<Vec<CallOutcome>>,
    asked: Mutex<Vec<Call>>,
    unread: AtomicU64,
}

impl Process {
    fn answers(&self) -> Vec<CallOutcome> {
        std::mem::take(&mut *lock(&self.answers))
    }
}

impl Caller for Process {
    fn answer(&self, _: CallId, outcome: CallOutcome) {
        lock(&self.answers).push(outcome);
    }
}

impl SessionServer for Process {
    fn incoming(&self, _: SessionId, _: u64, call: Call) {
        lock(&self.asked).push(call);
    }

    fn ended(&self, _: SessionId, _: u64) {}

    fn unread(&self) -> usize {
        usize::try_from(self.unread.load(Ordering::Relaxed)).unwrap()
    }
}

pub(crate) fn who(session: u16) -> Principal {
    Principal { session: SessionId::new(session), term: 5, ticket: 100 + u64::from(session) }
}

pub(crate) fn call(who: Principal, sequence: u64, request: &[u8]) -> Call {
    let id = CallId { session: who.session, term: who.term, endpoint: 3, sequence };
    let (ticket, request) = (who.ticket, request.to_vec());
    Call { id, ticket, acknowledged_below: 0, procedure: ProcedureId(9), request }
}

pub(crate) const SERVER: Target = Target::Server(ServerId::COORDINATOR);
const A: Target = Target::Session(SessionId::new(1));
/// The numbers of processes.
const SERVES: PeerId = 1;
const CALLS: PeerId = 2;
const WRONG: PeerId = 3;

/// Session 1, which serves, and session 2, which calls, each in a process; and one without a session.
fn three() -> (Arc<Host>, [Arc<Process>; 3]) {
    let host = host();
    let processes: [Arc<Process>; 3] = std::array::from_fn(|_| Arc::default());
    for (n, peer) in [(1, SERVES), (2, CALLS)] {
        let process = &processes[usize::from(n) - 1];
        host.call(SERVER, call(who(n), 0, ADMIT), peer, Arc::clone(process) as _);
        assert_eq!(process.answers(), [Ok(vec![])]);
    }
    assert!(host.serve(who(1), SERVES, Arc::clone(&processes[0]) as _));
    (host, processes)
}

#[test]
fn a_call_to_a_session_comes_from_the_session_that_it_names() {
    let (host, [a, b, wrong]) = three();
    let unproven = Err(ControlError::Unproven { server: ServerId::COORDINATOR }.into());
    let fenced = |n| Err(ControlError::SessionFenced { session: SessionId::new(n) }.into());
    for (name, due) in [
        (Principal { ticket: 0, ..who(2) }, unproven.clone()),
        (Principal { ticket: 101, ..who(2) }, unproven.clone()),
        (Principal { term: 4, ..who(2) }, fenced(2)),
        (Principal { ..who(7) }, fenced(7)),
        (Principal::NOBODY, unproven),
    ] {
        host.call(A, call(name, 9, b"forged"), WRONG, Arc::clone(&wrong) as _);
        assert_eq!(wrong.answers(), [due], "{name:?}");
    }
    assert!(lock(&a.asked).is_empty(), "nothing of it was delivered");
    host.call(A, call(who(2), 9, b"work"), CALLS, Arc::clone(&b) as _);
    assert_eq!(lock(&a.asked).len(), 1);
}

#[test]
fn a_refusal_goes_only_to_whoever_asked() {
    let (host, [_, b, wrong]) = three();
    // One call waits for a session, the other for the server.
    for (target, sequence) in [(A, 9), (SERVER, 10)] {
        host.call(target, call(who(2), sequence, WAIT), CALLS, Arc::clone(&b) as _);
        for target in [SERVER, A] {
            let forged = call(Principal { ticket: 0, ..who(2) }, sequence, b"forged");
            host.call(target, forged, WRONG, Arc::clone(&wrong) as _);
            assert_eq!(wrong.answers().len(), 1, "it is refused");
        }
        assert!(b.answers().is_empty(), "and that is no answer to another's call");
    }
    let id = |sequence| call(who(2), sequence, WAIT).id;
    host.reply_of(SERVES, id(9), Ok(b"done".to_vec()));
    host.finished(id(10), Ok(b"done".to_vec()));
    assert_eq!(b.answers(), [Ok(b"done".to_vec()), Ok(b"done".to_vec())]);
    assert!(wrong.answers().is_empty(), "who is refused hears no more");
}

#[test]
fn a_session_that_is_fenced_hears_so_of_what_it_waits_for() {
    let (host, [_, b, _]) = three();
    host.call(SERVER, call(who(2), 1, WAIT), CALLS, Arc::clone(&b) as _);
    host.call(SERVER, call(who(2), 2, LEAVE), CALLS, Arc::clone(&b) as _);
    let fenced = Err(ControlError::SessionFenced { session: who(2).session }.into());
    assert_eq!(b.answers(), [fenced, Ok(vec![])], "and of its leaving that it was done");
}

#[test]
fn calls_that_wait_for_sessions_have_a_bound_and_who_has_few_is_served() {
    let (host, [a, b, _]) = three();
    let mut refused = 0;
    for peer in 10..18 {
        for n in 0..u64::from(MAX_WAITING) {
            host.call(A, call(who(2), peer << 32 | n, b"work"), peer, Arc::clone(&b) as _);
        }
        for answer in b.answers() {
            assert!(matches!(answer, Err(CallError::Busy { .. })), "{answer:?}");
            refused += 1;
        }
    }
    let waiting = lock(&host.waiting).calls.len();
    assert_eq!((waiting + refused, waiting), (8 * MAX_WAITING as usize, MAX_WAITING_OF_ALL + 4 * 128));
    // Newcomers have their share, and what waits already may be repeated.
    lock(&a.asked).clear();
    host.call(A, call(who(2), 1, b"work"), CALLS, Arc::clone(&b) as _);
    host.call(A, call(who(2), 10 << 32, b"work"), 10, Arc::clone(&b) as _);
    assert_eq!((lock(&a.asked).len(), b.answers().len()), (2, 0));
    host.hung_up(10, &[], None);
    assert_eq!(lock(&host.waiting).calls.len(), waiting + 1 - MAX_WAITING as usize);
    // Whoever does not read what it is asked is asked no more.
    a.unread.store(17 << 20, Ordering::Relaxed);
    host.call(A, call(who(2), 2, b"work"), CALLS, Arc::clone(&b) as _);
    assert_eq!(b.answers(), [Err(CallError::Busy { queued: 0 })]);
}
