//! What is said in messages over queue pairs: a call, and its answer.

use crate::call::{Call, CallId, CallOutcome, Target};
use crate::wire::{wire_enum, wire_struct};

/// A call.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Asked {
    pub(super) target: Target,
    pub(super) call: Call,
}

wire_struct!(Asked { target, call });

wire_enum! {
    /// What a server says.
    #[derive(Clone, PartialEq, Eq, Debug)]
    pub(super) enum Note {
        /// A call has ended.
        Answered = 1 { to: CallId, outcome: CallOutcome },
        /// It has, and the answer is too long for a message: send the same call over the line.
        TooLong = 2 { to: CallId },
    }
}
