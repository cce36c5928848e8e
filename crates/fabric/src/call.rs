//! The two-sided path: who is called, how a call is named, and what makes a repeat run at most once.

use crate::addr::{ServerId, SessionId};
use crate::control::ControlError;
use crate::procedure::ProcedureId;
use crate::wire::{Malformed, Wire, wire_struct};
use rustc_hash::FxHashMap;
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;

/// Who executes a call.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Target {
    /// A memory server: one of its built-in or registered procedures.
    Server(ServerId),
    /// Another compute server: a procedure that its session serves.
    Session(SessionId),
}

impl Wire for Target {
    fn put(&self, out: &mut Vec<u8>) {
        match self {
            Self::Server(server) => {
                0u8.put(out);
                server.put(out);
            }
            Self::Session(session) => {
                1u8.put(out);
                session.put(out);
            }
        }
    }
    fn take(input: &mut &[u8]) -> Result<Self, Malformed> {
        match u8::take(input)? {
            0 => ServerId::take(input).map(Self::Server),
            1 => SessionId::take(input).map(Self::Session),
            _ => Err(Malformed),
        }
    }
}

/// The name of one call: the same id sent again is the same call, and runs at most once.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct CallId {
    /// Who calls.
    pub session: SessionId,
    /// Which holder of that number: a number is used again, a term never. 0 before there is a session.
    pub term: u64,
    /// Which of its endpoints; short-lived ones (of a procedure, or before there is a session) have random numbers.
    pub endpoint: u64,
    /// Which of that endpoint's calls to this target; grows.
    pub sequence: u64,
}

wire_struct!(CallId { session, term, endpoint, sequence });

/// Whether a call may be sent to one life of a server only, and to which. What one process of a server has run, the next does not know: it
/// would run a repeat as a new call. Requests that may be repeated find in the server's tables what came of them; procedures do not.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Once<'a>(Option<&'a Cell<Option<u64>>>);

impl<'a> Once<'a> {
    /// To any life.
    pub(crate) const ANY: Self = Self(None);

    /// To the life that it is first sent to, which the cell remembers.
    pub(crate) fn in_life(first: &'a Cell<Option<u64>>) -> Self {
        Self(Some(first))
    }

    /// It is about to be sent to a server in this life. If it was sent to another, what came of it stays unknown.
    pub(crate) fn check(self, life: u64) -> Result<(), CallError> {
        let first = self.0.map(|cell| {
            let first = cell.get().unwrap_or(life);
            cell.set(Some(first));
            first
        });
        if first.is_none_or(|first| first == life) { Ok(()) } else { Err(CallError::Unknown) }
    }
}

/// In whose name verbs and calls go out: a session, which holder of its number, and the proof of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Principal {
    /// The session; nobody, before there is one.
    pub session: SessionId,
    /// Which holder of that number.
    pub term: u64,
    /// What the coordinator gave to this session alone: whoever lacks it cannot speak in its name.
    pub ticket: u64,
}

impl Principal {
    /// Whoever has no session yet.
    pub const NOBODY: Self = Self { session: SessionId::NONE, term: 0, ticket: 0 };
}

wire_struct!(Principal { session, term, ticket });

/// A call on its way.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Call {
    /// Its name.
    pub id: CallId,
    /// The ticket of the session in whose name it comes; 0 before there is one.
    pub ticket: u64,
    /// The caller has seen the replies of all its calls below this sequence number: they may be forgotten.
    pub acknowledged_below: u64,
    /// What to run.
    pub procedure: ProcedureId,
    /// Its argument.
    pub request: Vec<u8>,
}

wire_struct!(Call { id, ticket, acknowledged_below, procedure, request });

/// Why a call has no result.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum CallError {
    /// No reply came; the call may have run. Repeat it with the same id.
    Unknown,
    /// All cores are in use and the queue is full. It did not run.
    Busy {
        /// How many are queued.
        queued: u32,
    },
    /// The target has no such procedure.
    NoSuchProcedure {
        /// The number.
        procedure: ProcedureId,
    },
    /// No such session, or it serves no calls.
    NoSuchSession {
        /// The session.
        session: SessionId,
    },
    /// The request or the reply could not be decoded.
    Malformed,
    /// The caller had already acknowledged the reply, so it is gone. It is not run again.
    Forgotten,
    /// The endpoint has too many calls whose replies it has not acknowledged. It did not run.
    Unacknowledged {
        /// So many.
        open: u32,
    },
    /// The procedure itself failed.
    Failed(String),
    /// The memory server refused, and says why.
    Control(ControlError),
}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown => f.write_str("no reply to a call: it may have run; repeat it with the same id"),
            Self::Busy { queued } => {
                write!(f, "the server's cores are busy and {queued} calls wait; try again later")
            }
            Self::NoSuchProcedure { procedure } => {
                write!(f, "no procedure {procedure} there; start the server with the engine that needs it")
            }
            Self::NoSuchSession { session } => write!(f, "{session} does not exist or serves no calls"),
            Self::Malformed => f.write_str("a call's bytes could not be understood; the versions may differ"),
            Self::Forgotten => f.write_str("a call was repeated after its reply had been acknowledged"),
            Self::Unacknowledged { open } => write!(
                f,
                "{open} calls run or wait to be acknowledged; let the oldest end before you make more"
            ),
            Self::Failed(why) => write!(f, "the procedure failed: {why}"),
            Self::Control(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for CallError {}

impl From<ControlError> for CallError {
    fn from(error: ControlError) -> Self {
        Self::Control(error)
    }
}

impl Wire for CallError {
    fn put(&self, out: &mut Vec<u8>) {
        match self {
            Self::Unknown => 0u8.put(out),
            Self::Busy { queued } => {
                1u8.put(out);
                queued.put(out);
            }
            Self::NoSuchProcedure { procedure } => {
                2u8.put(out);
                procedure.put(out);
            }
            Self::NoSuchSession { session } => {
                3u8.put(out);
                session.put(out);
            }
            Self::Malformed => 4u8.put(out),
            Self::Forgotten => 5u8.put(out),
            Self::Failed(why) => {
                6u8.put(out);
                why.put(out);
            }
            Self::Control(error) => {
                7u8.put(out);
                error.put(out);
            }
            Self::Unacknowledged { open } => {
                8u8.put(out);
                open.put(out);
            }
        }
    }
    fn take(input: &mut &[u8]) -> Result<Self, Malformed> {
        Ok(match u8::take(input)? {
            0 => Self::Unknown,
            1 => Self::Busy { queued: u32::take(input)? },
            2 => Self::NoSuchProcedure { procedure: ProcedureId::take(input)? },
            3 => Self::NoSuchSession { session: SessionId::take(input)? },
            4 => Self::Malformed,
            5 => Self::Forgotten,
            6 => Self::Failed(String::take(input)?),
            7 => Self::Control(ControlError::take(input)?),
            8 => Self::Unacknowledged { open: u32::take(input)? },
            _ => return Err(Malformed),
        })
    }
}

/// What a call comes back with.
pub type CallOutcome = Result<Vec<u8>, CallError>;

/// Whether a call was seen before.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Seen {
    /// It was not: run it.
    New,
    /// It runs: its reply goes to whoever asked last.
    Running,
    /// It ran: this is its reply.
    Done(CallOutcome),
    /// It ran, and its reply was acknowledged or is not kept any more: do not run it.
    Forgotten,
    /// It is new, and not to be run: the caller has to acknowledge first what it has been answered.
    TooMany {
        /// How many of its calls have not been acknowledged.
        open: u32,
    },
}

/// Remembers calls so that a repeat runs at most once.
///
/// Bounded, whatever sessions do. A caller (an endpoint) keeps few calls open and acknowledges the rest with each new one; one with
/// [`MAX_OPEN`] is told to. Of a session's callers that have nothing running, the [`MAX_CALLERS`] that called last are remembered.
/// The replies kept for a session, refusals included, have [`MAX_KEPT_BYTES`], and the last one: of older ones it is only known that they
/// were there, since whoever has not repeated a call for so long has its reply. All sessions together have [`MAX_OPEN_IN_TABLE`] calls and
/// [`MAX_KEPT_BYTES_IN_TABLE`]; beyond that the session that has most gives way, so that none takes room from one that has little.
/// Invariant: a sequence number below `acknowledged_below` is not in `done`. It may be in `running` until it finishes (the
/// caller gave up on it); its outcome is then not kept.
#[derive(Default, Debug)]
pub struct CallTable {
    sessions: FxHashMap<SessionId, Calls>,
    /// What all of them hold.
    held: Held,
    clock: u64,
}

/// How many callers of one session a table remembers. Those who have no session yet are one here.
pub const MAX_CALLERS: usize = 1024;
/// How many calls a caller may have that run, or whose replies it has not acknowledged.
pub const MAX_OPEN: usize = 1024;
/// How many a session's callers may have together, before some are forgotten.
pub const MAX_OPEN_OF_SESSION: usize = 16 * MAX_OPEN;
/// How many all sessions may have together; one that has fewer than `SHARE_OPEN` is served nevertheless.
pub const MAX_OPEN_IN_TABLE: usize = 64 * MAX_OPEN;
const SHARE_OPEN: usize = MAX_OPEN / 4;
/// How many bytes of replies are kept for a session, beside the last one.
pub const MAX_KEPT_BYTES: usize = 1 << 20;
/// How many are kept for all sessions, beside the last one of each.
pub const MAX_KEPT_BYTES_IN_TABLE: usize = 64 << 20;

/// What is held of calls.
#[derive(Clone, Copy, Default, Debug)]
struct Held {
    /// Calls that run, or whose replies are not acknowledged.
    open: usize,
    /// Bytes of those replies.
    bytes: usize,
}

/// A session's calls.
#[derive(Default, Debug)]
struct Calls {
    callers: FxHashMap<u64, Caller>,
    /// Replies in the order in which they came, by caller and sequence number; some were acknowledged since.
    kept: VecDeque<(u64, u64)>,
    held: Held,
}

#[derive(Default, Debug)]
struct Caller {
    called_at: u64,
    acknowledged_below: u64,
    running: BTreeSet<u64>,
    done: BTreeMap<u64, CallOutcome>,
}

impl Caller {
    fn open(&self) -> usize {
        self.running.len() + self.done.len()
    }
}

/// What a reply takes, as long as it is kept.
fn bytes_of(outcome: &CallOutcome) -> usize {
    match outcome {
        Ok(reply) => reply.len(),
        Err(CallError::Forgotten) => 0,
        Err(error) => crate::wire::encode(error).len(),
    }
}

impl Calls {
    fn acknowledge(&mut self, endpoint: u64, below: u64) {
        let caller = self.callers.entry(endpoint).or_default();
        if below > caller.acknowledged_below {
            caller.acknowledged_below = below;
            let kept = caller.done.split_off(&below);
            let gone = std::mem::replace(&mut caller.done, kept);
            self.held.open -= gone.len();
            self.held.bytes -= gone.values().map(bytes_of).sum::<usize>();
        }
    }

    fn keep(&mut self, endpoint: u64, sequence: u64, outcome: &CallOutcome) {
        let Some(caller) = self.callers.get_mut(&endpoint) else { return };
        match caller.done.insert(sequence, outcome.clone()) {
            None => self.held.open += 1,
            Some(before) => self.held.bytes -= bytes_of(&before),
        }
        self.kept.push_back((endpoint, sequence));
        self.held.bytes += bytes_of(outcome);
        while self.held.bytes > MAX_KEPT_BYTES && self.forget_reply() {}
        if self.kept.len() > 2 * self.held.open + MAX_OPEN {
            let callers = &self.callers;
            self.kept.retain(|(endpoint, sequence)| {
                callers.get(endpoint).is_some_and(|caller| caller.done.contains_key(sequence))
            });
        }
    }

    /// Forgets the oldest reply, but not that it was there; false if it is the only one.
    fn forget_reply(&mut self) -> bool {
        if self.kept.len() <= 1 {
            return false;
        }
        let Some((endpoint, sequence)) = self.kept.pop_front() else { return false };
        let done = self.callers.get_mut(&endpoint).and_then(|caller| caller.done.get_mut(&sequence));
        if let Some(outcome) = done {
            self.held.bytes -= bytes_of(outcome);
            *outcome = Err(CallError::Forgotten);
        }
        true
    }

    /// Forgets half of the callers that have nothing running, those that called longest ago, but not the one that calls now.
    fn forget_oldest(&mut self, calling: Option<u64>) {
        let is_idle =
            |endpoint: &u64, caller: &Caller| caller.running.is_empty() && Some(*endpoint) != calling;
        let idle = self.callers.iter().filter(|(endpoint, caller)| is_idle(endpoint, caller));
        let mut idle: Vec<u64> = idle.map(|(_, caller)| caller.called_at).collect();
        idle.sort_unstable();
        let Some(last) = idle.len().div_ceil(2).checked_sub(1).and_then(|n| idle.get(n).copied()) else {
            return;
        };
        let held = &mut self.held;
        self.callers.retain(|endpoint, caller| {
            let stays = !is_idle(endpoint, caller) || caller.called_at > last;
            if !stays {
                held.open -= caller.done.len();
                held.bytes -= caller.done.values().map(bytes_of).sum::<usize>();
            }
            stays
        });
    }

    /// Whether the caller may have one more call open; how many are, if not.
    fn admit(&mut self, endpoint: u64) -> Result<(), usize> {
        let is_new = !self.callers.contains_key(&endpoint);
        if self.held.open >= MAX_OPEN_OF_SESSION || (is_new && self.callers.len() >= MAX_CALLERS) {
            self.forget_oldest(Some(endpoint));
        }
        let is_full =
            self.held.open >= MAX_OPEN_OF_SESSION || (is_new && self.callers.len() >= 2 * MAX_CALLERS);
        if is_full { Err(self.held.open) } else { Ok(()) }
    }

    /// What is known of a call; `None`: it is new, and may be made as far as its caller is concerned.
    fn recall(&mut self, call: &Call, now: u64) -> Option<Seen> {
        let CallId { endpoint, sequence, .. } = call.id;
        if !self.callers.contains_key(&endpoint) {
            return None;
        }
        self.acknowledge(endpoint, call.acknowledged_below);
        let caller = self.callers.get_mut(&endpoint)?;
        caller.called_at = now;
        if let Some(outcome) = caller.done.get(&sequence) {
            Some(match outcome {
                Err(CallError::Forgotten) => Seen::Forgotten,
                outcome => Seen::Done(outcome.clone()),
            })
        } else if caller.running.contains(&sequence) {
            Some(Seen::Running)
        } else if sequence < caller.acknowledged_below {
            Some(Seen::Forgotten)
        } else {
            (caller.open() >= MAX_OPEN).then(|| too_many(caller.open()))
        }
    }

    /// Notes a new call.
    fn enter(&mut self, call: &Call, now: u64) -> Seen {
        let CallId { endpoint, sequence, .. } = call.id;
        self.acknowledge(endpoint, call.acknowledged_below);
        let caller = self.callers.entry(endpoint).or_default();
        caller.called_at = now;
        if sequence < caller.acknowledged_below {
            return Seen::Forgotten;
        }
        if caller.running.insert(sequence) {
            self.held.open += 1;
        }
        Seen::New
    }

    fn finish(&mut self, id: CallId, outcome: &CallOutcome) {
        let Some(caller) = self.callers.get_mut(&id.endpoint) else { return };
        if caller.running.remove(&id.sequence) {
            self.held.open -= 1;
        }
        let keep =
            !matches!(outcome, Err(CallError::Busy { .. })) && id.sequence >= caller.acknowledged_below;
        if keep {
            self.keep(id.endpoint, id.sequence, outcome);
        }
    }
}

fn too_many(open: usize) -> Seen {
    Seen::TooMany { open: u32::try_from(open).unwrap_or(u32::MAX) }
}

impl CallTable {
    /// Notes the call, unless it was seen.
    pub fn begin(&mut self, call: &Call) -> Seen {
        let CallId { session, endpoint, .. } = call.id;
        self.clock += 1;
        let now = self.clock;
        if let Some(seen) = self.change(session, |calls| calls.recall(call, now)) {
            return seen;
        }
        match self.admit(session, endpoint) {
            Ok(()) => self.change(session, |calls| calls.enter(call, now)),
            Err(open) => too_many(open),
        }
    }

    /// Whether one more call has room, when whoever has most has made some; how many are open, if not.
    fn admit(&mut self, session: SessionId, endpoint: u64) -> Result<(), usize> {
        let own = self.change(session, |calls| calls.admit(endpoint).map(|()| calls.held.open))?;
        if self.held.open >= MAX_OPEN_IN_TABLE && own >= SHARE_OPEN {
            let most = self.sessions.iter().max_by_key(|(_, calls)| calls.held.open);
            if let Some(greediest) = most.map(|(session, _)| *session) {
                self.change(greediest, |calls| {
                    calls.forget_oldest((greediest == session).then_some(endpoint));
                });
            }
            if self.held.open >= MAX_OPEN_IN_TABLE {
                return Err(own);
            }
        }
        Ok(())
    }

    /// Changes what is known of a session, and counts what it holds then.
    fn change<T>(&mut self, session: SessionId, change: impl FnOnce(&mut Calls) -> T) -> T {
        let calls = self.sessions.entry(session).or_default();
        let before = calls.held;
        let result = change(calls);
        self.held.open = self.held.open - before.open + calls.held.open;
        self.held.bytes = self.held.bytes - before.bytes + calls.held.bytes;
        result
    }

    /// Keeps the outcome of a call that ran. A refusal that left nothing behind (`Busy`) is not kept: a repeat may run.
    pub fn finish(&mut self, id: CallId, outcome: &CallOutcome) {
        if !self.sessions.contains_key(&id.session) {
            return;
        }
        self.change(id.session, |calls| calls.finish(id, outcome));
        while self.held.bytes > MAX_KEPT_BYTES_IN_TABLE {
            let most = self.sessions.iter().max_by_key(|(_, calls)| calls.held.bytes);
            let Some(greediest) = most.map(|(session, _)| *session) else { return };
            if !self.change(greediest, Calls::forget_reply) {
                return;
            }
        }
    }

    /// Forgets a session that is closed or fenced.
    pub fn forget(&mut self, session: SessionId) {
        if let Some(calls) = self.sessions.remove(&session) {
            self.held.open -= calls.held.open;
            self.held.bytes -= calls.held.bytes;
        }
    }

    /// How many outcomes are kept.
    pub fn kept(&self) -> usize {
        self.sessions.values().flat_map(|calls| calls.callers.values()).map(|c| c.done.len()).sum()
    }

    /// How many bytes they have.
    pub fn kept_bytes(&self) -> usize {
        self.held.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{decode, encode};

    fn call(sequence: u64, acknowledged_below: u64) -> Call {
        let id = CallId { session: SessionId::new(1), term: 1, endpoint: 0, sequence };
        Call { id, ticket: 0, acknowledged_below, procedure: ProcedureId(9), request: vec![] }
    }

    #[test]
    fn outcomes_and_targets_survive_the_wire() {
        let session = SessionId::new(7);
        let errors = [
            CallError::Unknown,
            CallError::Busy { queued: 9 },
            CallError::NoSuchProcedure { procedure: ProcedureId(300) },
            CallError::NoSuchSession { session },
            CallError::Malformed,
            CallError::Forgotten,
            CallError::Unacknowledged { open: 1024 },
            CallError::Failed("why".into()),
            CallError::Control(ControlError::SessionFenced { session }),
        ];
        let outcomes = errors.into_iter().map(Err).chain([Ok(vec![]), Ok(vec![1, 2, 3])]);
        for outcome in outcomes {
            assert_eq!(decode::<CallOutcome>(&encode(&outcome)), Ok(outcome));
        }
        for target in [Target::Server(ServerId::new(3)), Target::Session(session)] {
            assert_eq!(decode::<Target>(&encode(&target)), Ok(target));
        }
        assert_eq!(decode::<CallOutcome>(&[0, 9]), Err(Malformed));
        assert_eq!(decode::<Target>(&[2, 0, 0]), Err(Malformed));
    }

    #[test]
    fn a_repeat_runs_at_most_once() {
        let mut table = CallTable::default();
        assert_eq!(table.begin(&call(0, 0)), Seen::New);
        assert_eq!(table.begin(&call(0, 0)), Seen::Running);
        table.finish(call(0, 0).id, &Ok(vec![7]));
        assert_eq!(table.begin(&call(0, 0)), Seen::Done(Ok(vec![7])));
        assert_eq!(table.begin(&call(1, 1)), Seen::New);
        assert_eq!(table.kept(), 0, "an acknowledged reply is dropped");
        assert_eq!(table.begin(&call(0, 1)), Seen::Forgotten);
    }

    #[test]
    fn what_is_acknowledged_while_it_runs_is_not_kept() {
        let mut table = CallTable::default();
        assert_eq!(table.begin(&call(0, 0)), Seen::New);
        assert_eq!(table.begin(&call(1, 1)), Seen::New, "the caller does not wait for call 0 any more");
        assert_eq!(table.begin(&call(0, 1)), Seen::Running, "it still runs, and is not run beside itself");
        table.finish(call(0, 0).id, &Ok(vec![7]));
        assert_eq!(table.kept(), 0);
        assert_eq!(table.begin(&call(0, 0)), Seen::Forgotten);
        table.finish(call(1, 1).id, &Ok(vec![8]));
        assert_eq!(table.begin(&call(1, 1)), Seen::Done(Ok(vec![8])));
        check_counts(&table);
        for caller in table.sessions.values().flat_map(|calls| calls.callers.values()) {
            assert!(caller.running.is_empty());
            assert!(caller.done.keys().all(|sequence| *sequence >= caller.acknowledged_below));
        }
    }

    #[test]
    fn a_busy_refusal_may_be_repeated() {
        let mut table = CallTable::default();
        assert_eq!(table.begin(&call(3, 0)), Seen::New);
        table.finish(call(3, 0).id, &Err(CallError::Busy { queued: 1 }));
        assert_eq!(table.begin(&call(3, 0)), Seen::New);
    }

    #[test]
    fn short_lived_callers_do_not_pile_up() {
        let mut table = CallTable::default();
        for endpoint in 0..3 * MAX_CALLERS as u64 {
            let mut once = call(0, 0);
            once.id.endpoint = endpoint;
            assert_eq!(table.begin(&once), Seen::New);
            table.finish(once.id, &Ok(vec![1]));
            assert_eq!(table.begin(&once), Seen::Done(Ok(vec![1])), "a repeat right away is known");
        }
        assert!(table.kept() <= MAX_CALLERS + 1);
    }

    #[test]
    fn who_does_not_acknowledge_is_told_to() {
        let mut table = CallTable::default();
        for sequence in 0..MAX_OPEN as u64 {
            assert_eq!(table.begin(&call(sequence, 0)), Seen::New);
            table.finish(call(sequence, 0).id, &Ok(vec![1]));
        }
        let next = MAX_OPEN as u64;
        assert_eq!(table.begin(&call(next, 0)), Seen::TooMany { open: 1024 });
        assert_eq!(table.begin(&call(0, 0)), Seen::Done(Ok(vec![1])), "what it has stays");
        let mut other = call(next, 0);
        other.id.endpoint = 1;
        assert_eq!(table.begin(&other), Seen::New, "the session's other endpoints go on");
        assert_eq!(table.begin(&call(next, 1)), Seen::New, "and so does this one when it acknowledges");
        // Calls that run count, too.
        let mut table = CallTable::default();
        assert!((0..MAX_OPEN as u64).all(|sequence| table.begin(&call(sequence, 0)) == Seen::New));
        assert!(matches!(table.begin(&call(next, 0)), Seen::TooMany { .. }));
    }

    #[test]
    fn replies_that_are_kept_have_a_bound_in_bytes() {
        let mut table = CallTable::default();
        let reply = vec![7; 1 << 16];
        for endpoint in 0..64 {
            let mut call = call(0, 0);
            call.id.endpoint = endpoint;
            assert_eq!(table.begin(&call), Seen::New);
            table.finish(call.id, &Ok(reply.clone()));
            assert!(table.kept_bytes() <= MAX_KEPT_BYTES);
            assert_eq!(table.begin(&call), Seen::Done(Ok(reply.clone())), "the last one is there");
        }
        assert_eq!(table.begin(&call(0, 0)), Seen::Forgotten, "it is not run again");
        // A reply that is longer than all may be is there until the next one.
        let long = call(1, 1);
        assert_eq!(table.begin(&long), Seen::New);
        table.finish(long.id, &Ok(vec![7; 2 * MAX_KEPT_BYTES]));
        assert!(matches!(table.begin(&long), Seen::Done(Ok(_))));
        assert_eq!(table.begin(&call(2, 2)), Seen::New);
        assert_eq!(table.kept_bytes(), 0, "and its bytes are counted once");
    }

    #[test]
    fn refusals_take_what_their_text_takes() {
        let mut table = CallTable::default();
        for sequence in 0..100 {
            assert_eq!(table.begin(&call(sequence, 0)), Seen::New);
            let error = ControlError::BadRequest { why: "x".repeat(1 << 16) };
            table.finish(call(sequence, 0).id, &Err(error.into()));
            assert!(table.kept_bytes() <= MAX_KEPT_BYTES);
        }
        assert_eq!(table.begin(&call(0, 0)), Seen::Forgotten);
        assert_eq!(table.begin(&call(100, 100)), Seen::New);
        assert_eq!((table.kept(), table.kept_bytes()), (0, 0));
    }

    /// A call of a session, at an endpoint.
    fn call_of(session: u16, endpoint: u64, sequence: u64) -> Call {
        let id = CallId { session: SessionId::new(session), term: 1, endpoint, sequence };
        Call { id, ..call(0, 0) }
    }

    /// What is held is what is counted.
    fn check_counts(table: &CallTable) {
        let callers = || table.sessions.values().flat_map(|calls| calls.callers.values());
        assert_eq!(table.held.open, callers().map(Caller::open).sum::<usize>());
        let bytes = callers().flat_map(|caller| caller.done.values()).map(bytes_of).sum::<usize>();
        assert_eq!(table.kept_bytes(), bytes);
        for calls in table.sessions.values() {
            assert_eq!(calls.held.open, calls.callers.values().map(Caller::open).sum::<usize>());
        }
    }

    #[test]
    fn endpoints_that_are_known_bring_no_more_calls_than_a_session_may_have() {
        let mut table = CallTable::default();
        let make = |table: &mut CallTable, call: &Call| {
            let seen = table.begin(call);
            table.finish(call.id, &Ok(vec![1]));
            seen
        };
        for endpoint in 0..MAX_CALLERS as u64 {
            assert_eq!(make(&mut table, &call_of(1, endpoint, 0)), Seen::New);
        }
        for endpoint in 0..64 {
            for sequence in 1..MAX_OPEN as u64 {
                assert_eq!(make(&mut table, &call_of(1, endpoint, sequence)), Seen::New);
                assert!(table.kept() <= MAX_OPEN_OF_SESSION);
            }
            let last = call_of(1, endpoint, MAX_OPEN as u64 - 1);
            assert_eq!(table.begin(&last), Seen::Done(Ok(vec![1])), "who calls is not forgotten");
        }
        check_counts(&table);
        // Nothing can be forgotten of calls that run.
        let mut table = CallTable::default();
        let accepted = (0..32 * MAX_OPEN as u64)
            .filter(|n| table.begin(&call_of(1, n % 64, n / 64)) == Seen::New)
            .count();
        assert_eq!(accepted, MAX_OPEN_OF_SESSION);
        assert_eq!(table.begin(&call_of(1, 0, 0)), Seen::Running, "a repeat is known");
        check_counts(&table);
    }

    #[test]
    fn all_sessions_together_have_a_bound_and_who_has_little_is_served() {
        let mut table = CallTable::default();
        let reply = Ok(vec![7; 2048]);
        for session in 1..=80 {
            for n in 0..2 * MAX_OPEN as u64 {
                let call = call_of(session, n % 8, n / 8);
                assert_eq!(table.begin(&call), Seen::New);
                table.finish(call.id, &reply);
            }
            assert!(table.kept() <= MAX_OPEN_IN_TABLE && table.kept_bytes() <= MAX_KEPT_BYTES_IN_TABLE);
        }
        check_counts(&table);
        // Calls that run cannot be forgotten: whoever has more than its share is refused, others are not.
        let mut table = CallTable::default();
        for n in 0..(MAX_OPEN_IN_TABLE + MAX_OPEN) as u64 {
            let session = u16::try_from(n % 8 + 1).unwrap();
            table.begin(&call_of(session, n / 8 % 32, n / 256));
        }
        assert_eq!(table.held.open, MAX_OPEN_IN_TABLE);
        assert!(matches!(table.begin(&call_of(1, 0, 1000)), Seen::TooMany { .. }));
        assert_eq!(table.begin(&call_of(9, 0, 0)), Seen::New);
        for session in 1..=9 {
            table.forget(SessionId::new(session));
        }
        assert_eq!(table.held.open, 0);
    }

    #[test]
    fn no_session_takes_the_room_of_another() {
        let mut table = CallTable::default();
        let mine = call(0, 0);
        assert_eq!(table.begin(&mine), Seen::New);
        table.finish(mine.id, &Ok(vec![9]));
        for endpoint in 0..5 * MAX_CALLERS as u64 {
            let mut wrong = call(0, 0);
            (wrong.id.session, wrong.id.endpoint) = (SessionId::new(2), endpoint);
            assert_eq!(table.begin(&wrong), Seen::New);
            table.finish(wrong.id, &Ok(vec![0; 1 << 12]));
        }
        assert_eq!(table.begin(&mine), Seen::Done(Ok(vec![9])));
        assert!(table.kept() <= MAX_CALLERS + 1 && table.kept_bytes() <= MAX_KEPT_BYTES + 1);
        let queued: usize = table.sessions.values().map(|calls| calls.kept.len()).sum();
        assert!(queued <= 4 * MAX_CALLERS, "{queued} names of replies are kept");
    }

    #[test]
    fn forgetting_a_session_frees_its_replies() {
        let mut table = CallTable::default();
        table.begin(&call(0, 0));
        table.finish(call(0, 0).id, &Ok(vec![]));
        table.forget(SessionId::new(2));
        assert_eq!(table.kept(), 1);
        table.forget(SessionId::new(1));
        assert_eq!(table.kept(), 0);
    }
}
