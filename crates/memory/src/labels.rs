//! Who the sessions say they are, and since when they are there: for people who look at a pool.
//!
//! Nothing depends on it, so it is kept by the process alone: after a restart no session has a label, and all are there
//! since the restart. An entry counts for one term only, so none has to be taken out when a number is used again; there are never
//! more than there are numbers.

use farwood_fabric::Label;
use farwood_fabric::addr::SessionId;
use farwood_fabric::clock::Nanos;
use std::collections::BTreeMap;

#[derive(Clone, Copy, Debug)]
struct Entry {
    term: u64,
    label: Label,
    since: Nanos,
}

/// The labels of the sessions that this process has opened.
#[derive(Debug)]
pub(crate) struct Labels {
    started: Nanos,
    entries: BTreeMap<SessionId, Entry>,
}

impl Labels {
    /// Nobody is known at the start.
    pub(crate) fn new(now: Nanos) -> Self {
        Self { started: now, entries: BTreeMap::new() }
    }

    /// A session was opened.
    pub(crate) fn enter(&mut self, session: SessionId, term: u64, label: Label, now: Nanos) {
        self.entries.insert(session, Entry { term, label, since: now });
    }

    /// Who a session says it is, and how long it has been there.
    pub(crate) fn find(&self, session: SessionId, term: u64, now: Nanos) -> (Label, Nanos) {
        let entry = self.entries.get(&session).filter(|entry| entry.term == term);
        let (label, since) =
            entry.map_or((Label::default(), self.started), |entry| (entry.label, entry.since));
        (label, now.saturating_sub(since))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_is_that_of_one_holder_of_a_number() {
        let (session, mut labels) = (SessionId::new(3), Labels::new(100));
        assert_eq!(labels.find(session, 1, 150), (Label::default(), 50), "it was there before the restart");
        labels.enter(session, 2, Label::new("load pid 7"), 200);
        assert_eq!(labels.find(session, 2, 230), (Label::new("load pid 7"), 30));
        assert_eq!(labels.find(session, 1, 230), (Label::default(), 130));
    }
}
