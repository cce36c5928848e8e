//! Log lines that anybody can provoke: at most one in a while of each kind, with how many were left out.

use crate::clock::{Nanos, SECOND};
use crate::exec::lock;
use std::sync::Mutex;

/// How often a line of one kind is written.
const EVERY_NS: Nanos = SECOND;

/// One kind of line.
#[derive(Default, Debug)]
pub struct Rarely {
    /// When the next may be written, and how many were not since the last.
    state: Mutex<(Nanos, u64)>,
}

impl Rarely {
    /// Whether a line may be written now; if so, what to add to it.
    pub fn say(&self, now: Nanos) -> Option<String> {
        let mut state = lock(&self.state);
        if now < state.0 {
            state.1 += 1;
            return None;
        }
        let left_out = std::mem::take(&mut state.1);
        state.0 = now.saturating_add(EVERY_NS);
        Some(if left_out == 0 {
            String::new()
        } else {
            format!(" ({left_out} more like this were not logged)")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_in_a_while_says_how_many_there_would_have_been() {
        let rarely = Rarely::default();
        assert_eq!(rarely.say(5).as_deref(), Some(""));
        assert_eq!((rarely.say(6), rarely.say(EVERY_NS)), (None, None));
        assert!(rarely.say(5 + EVERY_NS).is_some_and(|more| more.contains(" (2 more ")));
        assert_eq!(rarely.say(5 + 2 * EVERY_NS).as_deref(), Some(""));
    }
}
