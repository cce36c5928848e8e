//! The two-sided path: who is called, how a call is named, and what makes a repeat run at most once.

use crate::addr::{ServerId, SessionId};
use crate::control::ControlError;
use crate::procedure::ProcedureId;
use crate::wire::{Malformed, Wire, wire_struct};
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, BTreeSet};
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
    /// It ran, and its reply was acknowledged: do not run it.
    Forgotten,
}

/// Remembers calls so that a repeat runs at most once.
///
/// Bounded: a caller keeps few calls open and acknowledges the rest with each new one; of callers that have nothing
/// running, the [`MAX_CALLERS`] that called last are remembered.
/// Invariant: a sequence number below `acknowledged_below` is not in `done`. It may be in `running` until it finishes (the
/// caller gave up on it); its outcome is then not kept.
#[derive(Default, Debug)]
pub struct CallTable {
    callers: FxHashMap<(SessionId, u64), Caller>,
    clock: u64,
}

/// How many callers a table remembers.
pub const MAX_CALLERS: usize = 4096;

#[derive(Default, Debug)]
struct Caller {
    called_at: u64,
    acknowledged_below: u64,
    running: BTreeSet<u64>,
    done: BTreeMap<u64, CallOutcome>,
}

impl CallTable {
    /// Notes the call, unless it was seen.
    pub fn begin(&mut self, call: &Call) -> Seen {
        if self.callers.len() > MAX_CALLERS {
            self.forget_oldest();
        }
        self.clock += 1;
        let caller = self.callers.entry((call.id.session, call.id.endpoint)).or_default();
        caller.called_at = self.clock;
        if call.acknowledged_below > caller.acknowledged_below {
            caller.acknowledged_below = call.acknowledged_below;
            caller.done = caller.done.split_off(&call.acknowledged_below);
        }
        let sequence = call.id.sequence;
        if let Some(outcome) = caller.done.get(&sequence) {
            Seen::Done(outcome.clone())
        } else if caller.running.contains(&sequence) {
            Seen::Running
        } else if sequence < caller.acknowledged_below {
            Seen::Forgotten
        } else {
            caller.running.insert(sequence);
            Seen::New
        }
    }

    /// Keeps the outcome of a call that ran. A refusal that left nothing behind (`Busy`) is not kept: a repeat may run.
    pub fn finish(&mut self, id: CallId, outcome: &CallOutcome) {
        let Some(caller) = self.callers.get_mut(&(id.session, id.endpoint)) else { return };
        caller.running.remove(&id.sequence);
        let keep =
            !matches!(outcome, Err(CallError::Busy { .. })) && id.sequence >= caller.acknowledged_below;
        if keep {
            caller.done.insert(id.sequence, outcome.clone());
        }
    }

    /// Forgets half of the callers that have nothing running, those that called longest ago.
    fn forget_oldest(&mut self) {
        let mut idle: Vec<u64> =
            self.callers.values().filter(|c| c.running.is_empty()).map(|c| c.called_at).collect();
        idle.sort_unstable();
        if let Some(limit) = idle.get(idle.len() / 2).copied() {
            self.callers.retain(|_, c| !c.running.is_empty() || c.called_at >= limit);
        }
    }

    /// Forgets a session that is closed or fenced.
    pub fn forget(&mut self, session: SessionId) {
        self.callers.retain(|(s, _), _| *s != session);
    }

    /// How many outcomes are kept.
    pub fn kept(&self) -> usize {
        self.callers.values().map(|c| c.done.len()).sum()
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
        assert_eq!(decode::<CallOutcome>(&[0, 8]), Err(Malformed));
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
        for caller in table.callers.values() {
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
