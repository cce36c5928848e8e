//! Checkers: each judges one property of what is left after a run (a [`History`], the memory), and knows nothing of
//! how it came about.
//!
//! | module | property |
//! |---|---|
//! | [`linearizable`] | the point operations on each key have one order that explains every answer |
//! | [`scan`] | a scan returns, in order and once, every key present throughout, and no pair that never was |
//! | [`leaks`] | what the memory servers say is in use is what the index reaches |
//! | [`settled`] | nobody has left anything behind that would have to be cleaned up |
//!
//! The first two read an operation as an `Effect` on the one key it is about: a guard on what the key held, and what the key
//! held afterwards. That is all an answer tells about a key, so the checkers need not know the actions apart.

use std::fmt;

use crate::history::{Action, History, Outcome};

pub mod leaks;
pub mod linearizable;
pub mod scan;
mod search;
pub mod settled;

#[cfg(test)]
mod model;

/// Why a history was not accepted.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Failure {
    /// No order of the operations on some key explains their answers.
    NotLinearizable(Box<linearizable::Violation>),
    /// Some scan returned what it could not, or left out what it could not.
    BadScan(Box<scan::Violation>),
    /// The search for an order was given up; the history may be good or bad.
    Undecided(Box<linearizable::Undecided>),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotLinearizable(violation) => violation.fmt(f),
            Self::BadScan(violation) => violation.fmt(f),
            Self::Undecided(undecided) => undecided.fmt(f),
        }
    }
}

impl std::error::Error for Failure {}

/// Runs every checker: the scans one by one, then all operations on each key together with what scans saw of it.
///
/// # Errors
/// The first failure found.
pub fn all(history: &History) -> Result<(), Failure> {
    scan::check(history)?;
    linearizable::check_with_scans(history)
}

/// What a key holds: a value, or nothing.
type Held<'a> = Option<&'a [u8]>;

/// What a key must hold for an operation to have ended as it did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Guard<S> {
    Any,
    Is(S),
    Not(S),
    /// No state of the key explains the answer.
    Never,
}

impl<S: Copy + PartialEq> Guard<S> {
    fn admits(self, state: S) -> bool {
        match self {
            Self::Any => true,
            Self::Is(wanted) => state == wanted,
            Self::Not(unwanted) => state != unwanted,
            Self::Never => false,
        }
    }
}

/// An operation as its key sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Effect<S> {
    guard: Guard<S>,
    /// What the key holds afterwards; `None` if the operation leaves it as it is.
    write: Option<S>,
}

impl<'a> Effect<Held<'a>> {
    fn read(held: Held<'a>) -> Self {
        Self { guard: Guard::Is(held), write: None }
    }

    /// The effect of a point operation that was answered; a scan has none.
    fn completed(action: &'a Action, outcome: &'a Outcome) -> Self {
        let effect = |guard, write| Self { guard, write };
        match (action, outcome) {
            (Action::Get { .. }, Outcome::Value(held)) => Self::read(held.as_deref()),
            (Action::Put { value, .. }, Outcome::Done) => effect(Guard::Any, Some(Some(value))),
            (Action::PutIfAbsent { value, .. }, Outcome::Applied(true)) => {
                effect(Guard::Is(None), Some(Some(value)))
            }
            (Action::PutIfAbsent { .. }, Outcome::Applied(false)) => effect(Guard::Not(None), None),
            (Action::UpdateIfPresent { value, .. }, Outcome::Applied(true)) => {
                effect(Guard::Not(None), Some(Some(value)))
            }
            (Action::CompareAndSwap { expected, new, .. }, Outcome::Applied(true)) if expected == new => {
                Self::read(expected.as_deref())
            }
            (Action::CompareAndSwap { expected, new, .. }, Outcome::Applied(true)) => {
                effect(Guard::Is(expected.as_deref()), Some(new.as_deref()))
            }
            (Action::CompareAndSwap { expected, .. }, Outcome::Applied(false)) => {
                effect(Guard::Not(expected.as_deref()), None)
            }
            (Action::Delete { .. }, Outcome::Applied(true)) => effect(Guard::Not(None), Some(None)),
            (Action::Delete { .. } | Action::UpdateIfPresent { .. }, Outcome::Applied(false)) => {
                Self::read(None)
            }
            _ => effect(Guard::Never, None),
        }
    }

    /// The effect a point operation of unknown outcome has if it has any; `None` if it cannot have one.
    fn possible(action: &'a Action) -> Option<Self> {
        let (guard, write) = match action {
            Action::Put { value, .. } => (Guard::Any, Some(value.as_slice())),
            Action::PutIfAbsent { value, .. } => (Guard::Is(None), Some(value.as_slice())),
            Action::UpdateIfPresent { value, .. } => (Guard::Not(None), Some(value.as_slice())),
            Action::CompareAndSwap { expected, new, .. } if expected != new => {
                (Guard::Is(expected.as_deref()), new.as_deref())
            }
            // Deleting an absent key changes nothing, so the guard can be dropped.
            Action::Delete { .. } => (Guard::Any, None),
            Action::Get { .. } | Action::Scan { .. } | Action::CompareAndSwap { .. } => return None,
        };
        Some(Self { guard, write: Some(write) })
    }
}
