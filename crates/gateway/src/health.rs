//! Whether the gateway can serve, and why not: what `/healthz`, INFO, the metrics and commands without a session say.
//!
//! A gateway is healthy if it has a session whose last heartbeat the coordinator acknowledged within [`SILENCE_NS`], or within the lease if
//! that is shorter, if no other server is silent, and if no command has found the index damaged. A process that runs and answers PING proves
//! none of that.

use farwood_fabric::clock::{MILLISECOND, Nanos, RealClock, SECOND};
use farwood_fabric::{ServerId, Session};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Heartbeats go out ten times a second; after so long without an answer something is wrong.
const SILENCE_NS: Nanos = 3 * SECOND;
/// What operators are told of an index in which commands have found a part gone.
const DAMAGED: &str = "a part of the index is damaged, or went with the memory of a server; `farwood check` says more, or drop the index and \
                       create it anew";

#[derive(Debug)]
pub(crate) struct Health {
    state: Mutex<State>,
    sessions: AtomicU64,
}

/// What it takes until there is a session again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Remedy {
    /// Nothing but time.
    Time,
    /// Somebody creates the index.
    Index,
    /// An operator starts servers on other memory.
    Operator,
}

#[derive(Debug)]
enum State {
    /// There is no session.
    Absent { why: String, remedy: Remedy },
    /// There is one; perhaps a server other than the coordinator does not answer, or a part of the index is gone.
    Joined { session: Session, silent: Option<ServerId>, is_damaged: bool },
}

impl Default for Health {
    fn default() -> Self {
        Self {
            state: Mutex::new(State::Absent {
                why: "it has not joined the pool yet".to_owned(),
                remedy: Remedy::Time,
            }),
            sessions: AtomicU64::new(0),
        }
    }
}

impl Health {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The pool was joined; how many times by now.
    pub(crate) fn joined(&self, session: &Session) -> u64 {
        *self.lock() = State::Joined { session: session.clone(), silent: None, is_damaged: false };
        self.sessions.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// There is no session, or none any more; whether this is another reason than before.
    pub(crate) fn absent(&self, why: &str, remedy: Remedy) -> bool {
        let now = State::Absent { why: why.to_owned(), remedy };
        let before = std::mem::replace(&mut *self.lock(), now);
        !matches!(before, State::Absent { why: before, .. } if before == why)
    }

    /// A server does not answer, or all do again.
    pub(crate) fn heard(&self, of_others: Option<ServerId>) {
        if let State::Joined { silent, .. } = &mut *self.lock() {
            *silent = of_others;
        }
    }

    /// A command found that a part of the index is gone. The next session may find another index of that name.
    pub(crate) fn damaged(&self) {
        if let State::Joined { is_damaged, .. } = &mut *self.lock() {
            *is_damaged = true;
        }
    }

    /// How many sessions there have been: one more each time that the pool was joined again.
    pub(crate) fn sessions(&self) -> u64 {
        self.sessions.load(Ordering::Relaxed)
    }

    /// How long ago the coordinator acknowledged a heartbeat, if there is a session.
    pub(crate) fn heartbeat_age_ns(&self) -> Option<Nanos> {
        match &*self.lock() {
            State::Absent { .. } => None,
            State::Joined { session, .. } => Some(age_ns(session)),
        }
    }

    /// Why the gateway cannot serve, if it cannot.
    pub(crate) fn trouble(&self) -> Option<String> {
        match &*self.lock() {
            State::Absent { why, .. } => Some(format!("no session with the memory servers: {why}")),
            State::Joined { session, .. } if session.is_lost() => {
                Some("the session with the memory servers was lost".to_owned())
            }
            State::Joined { session, .. } if is_silent(session) => {
                Some(format!("the coordinator has been silent for {} ms", age_ns(session) / MILLISECOND))
            }
            State::Joined { silent: Some(server), .. } => Some(format!(
                "memory server {server} does not answer; commands that need it wait, or are refused, until it does"
            )),
            State::Joined { is_damaged: true, .. } => Some(DAMAGED.to_owned()),
            State::Joined { .. } => None,
        }
    }

    /// Whether commands that need the index would only wait: there is no session, or the coordinator cannot be reached. A gateway that was
    /// itself late with its heartbeats goes on.
    pub(crate) fn is_cut_off(&self) -> bool {
        match &*self.lock() {
            State::Absent { .. } => true,
            State::Joined { session, .. } => {
                session.is_lost() || (session.is_unheard() && is_silent(session))
            }
        }
    }

    /// What commands that need the index answer meanwhile. Client libraries take `LOADING` for what passes by itself; the reason is for
    /// operators ([`Self::trouble`]), unless it is theirs to mend.
    pub(crate) fn refusal(&self) -> &'static str {
        match &*self.lock() {
            State::Absent { remedy: Remedy::Index, .. } => {
                "LOADING there is no index that the gateway can serve; it goes on by itself when one is created, try again"
            }
            State::Absent { remedy: Remedy::Operator, .. } => {
                "LOADING memory servers were started on memory that does not belong together; an operator has to start them \
                 anew, as the gateway's log and /healthz say"
            }
            State::Joined { session, .. } if !session.is_lost() => {
                "LOADING the memory servers do not answer; the gateway goes on by itself when they do, try again"
            }
            _ => "LOADING the gateway has lost the memory servers and joins them again by itself, try again",
        }
    }
}

fn age_ns(session: &Session) -> Nanos {
    RealClock::of_process().now().saturating_sub(session.heard_at())
}

fn is_silent(session: &Session) -> bool {
    let limit = if session.lease_ns() == 0 { SILENCE_NS } else { SILENCE_NS.min(session.lease_ns()) };
    age_ns(session) > limit
}
