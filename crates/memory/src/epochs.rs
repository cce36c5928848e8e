//! When retired memory may be reused and when hints are gone everywhere: the coordinator's arithmetic. Pure.
//!
//! * Every session publishes with its heartbeat the oldest epoch in which it still has an operation in flight, and
//!   the last flush of its hints that it has done. `safe` is the minimum over all sessions that are not fenced: a dead one may
//!   still have verbs on their way. `flushed_through` also waits for those that are fenced, until somebody has
//!   cleaned up after them: their journals name objects by address, so memory must not change its type under them.
//! * The epoch advances by one, at a heartbeat, when every session has published at least the current one. Whoever waits for that says so,
//!   and those who have nothing else to say are asked for their heartbeats sooner.
//!
//! Both values of a session only grow. A smaller one is an older heartbeat that was overtaken, or a client's bug
//! (what it had declared finished may have been reused): it is ignored. One beyond what the coordinator has
//! announced counts as the newest announced, so that "nothing in flight" may be said as `u64::MAX`.
//!
//! **Every flush request begins a new generation**; requests are never joined to one that is under way. A session
//! may have done that one already, and have picked up a hint since, to memory that was unlinked after: it would
//! not flush again, and the memory would change its type under the hint. It costs little: a session flushes at most
//! once a heartbeat, to the newest generation, however many were asked for.

use farwood_fabric::addr::SessionId;
use farwood_fabric::control::Epochs;
use std::collections::BTreeMap;

/// What a session has published.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Progress {
    /// No operation in flight began before this epoch.
    pub(crate) oldest_pin: u64,
    /// The last flush done.
    pub(crate) flushed: u64,
}

/// The pool's epoch and flush generation.
/// Invariant: no session's `oldest_pin` exceeds `epoch`, unless it is fenced; none's `flushed` exceeds `flush`.
#[derive(Debug)]
pub(crate) struct EpochClock {
    epoch: u64,
    flush: u64,
    sessions: BTreeMap<SessionId, Progress>,
    /// Somebody waits for this epoch to come to its end; somebody waited for the last one to.
    is_awaited: bool,
    was_awaited: bool,
}

/// The pin of a session that is fenced: it holds no epoch.
const NOTHING_PINNED: u64 = u64::MAX;

impl EpochClock {
    pub(crate) fn new(epoch: u64, flush: u64) -> Self {
        Self { epoch, flush, sessions: BTreeMap::new(), is_awaited: false, was_awaited: false }
    }

    /// What a new session begins with: it has nothing in flight and no hints.
    pub(crate) fn newcomer(&self) -> Progress {
        Progress { oldest_pin: self.epoch, flushed: self.flush }
    }

    /// The session counts from now on.
    pub(crate) fn join(&mut self, session: SessionId, progress: Progress) {
        let progress = self.announced(progress);
        self.sessions.insert(session, progress);
    }

    /// The session is fenced: nothing of it is in flight, but it has a journal.
    pub(crate) fn fence(&mut self, session: SessionId) {
        if let Some(progress) = self.sessions.get_mut(&session) {
            progress.oldest_pin = NOTHING_PINNED;
        }
    }

    /// The session is closed or cleaned up after: nothing is left of it.
    pub(crate) fn leave(&mut self, session: SessionId) {
        self.sessions.remove(&session);
    }

    /// What the session has published; `None` if it does not count.
    pub(crate) fn progress(&self, session: SessionId) -> Option<Progress> {
        self.sessions.get(&session).copied()
    }

    /// A heartbeat: what the session has published now.
    pub(crate) fn publish(&mut self, session: SessionId, news: Progress) -> Option<Progress> {
        let news = self.announced(news);
        let progress = self.sessions.get_mut(&session).filter(|held| held.oldest_pin != NOTHING_PINNED)?;
        progress.oldest_pin = progress.oldest_pin.max(news.oldest_pin);
        progress.flushed = progress.flushed.max(news.flushed);
        let published = *progress;
        if self.epochs().safe >= self.epoch {
            self.epoch += 1;
            self.was_awaited = std::mem::take(&mut self.is_awaited);
        }
        Some(published)
    }

    /// Somebody waits for the epochs to go on.
    pub(crate) fn wait(&mut self) {
        self.is_awaited = true;
    }

    /// Begins a flush generation.
    pub(crate) fn request_flush(&mut self) -> u64 {
        self.flush += 1;
        self.flush
    }

    /// The state as clients see it.
    pub(crate) fn epochs(&self) -> Epochs {
        let pins = self.sessions.values().map(|progress| progress.oldest_pin);
        let flushed = self.sessions.values().map(|progress| progress.flushed);
        Epochs {
            epoch: self.epoch,
            safe: pins.min().unwrap_or(self.epoch).min(self.epoch),
            flush: self.flush,
            flushed_through: flushed.min().unwrap_or(self.flush),
            is_awaited: self.was_awaited,
        }
    }

    fn announced(&self, progress: Progress) -> Progress {
        Progress {
            oldest_pin: progress.oldest_pin.min(self.epoch),
            flushed: progress.flushed.min(self.flush),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const A: SessionId = SessionId::new(1);
    const B: SessionId = SessionId::new(2);

    fn beat(clock: &mut EpochClock, session: SessionId, oldest_pin: u64, flushed: u64) {
        clock.publish(session, Progress { oldest_pin, flushed });
    }

    #[test]
    fn who_is_waited_for_is_told_so() {
        let mut clock = EpochClock::new(5, 0);
        clock.join(A, clock.newcomer());
        clock.join(B, clock.newcomer());
        let end_epoch = |clock: &mut EpochClock| {
            let epoch = clock.epochs().epoch;
            for session in [A, B, A, B] {
                if clock.epochs().epoch == epoch {
                    beat(clock, session, u64::MAX, 0);
                }
            }
            assert_eq!(clock.epochs().epoch, epoch + 1);
            clock.epochs().is_awaited
        };
        assert!(!end_epoch(&mut clock));
        clock.wait();
        assert!(!clock.epochs().is_awaited, "it is told when the epoch has come to its end");
        assert!(end_epoch(&mut clock));
        assert!(!end_epoch(&mut clock), "nobody waited for this one");
    }

    #[test]
    fn the_epoch_waits_for_the_slowest() {
        let mut clock = EpochClock::new(5, 0);
        clock.join(A, clock.newcomer());
        clock.join(B, clock.newcomer());
        beat(&mut clock, A, 5, 0);
        assert_eq!((clock.epochs().epoch, clock.epochs().safe), (6, 5));
        beat(&mut clock, A, 6, 0);
        assert_eq!((clock.epochs().epoch, clock.epochs().safe), (6, 5), "B has not published 6");
        beat(&mut clock, B, 6, 0);
        assert_eq!((clock.epochs().epoch, clock.epochs().safe), (7, 6));
        clock.leave(B);
        beat(&mut clock, A, u64::MAX, 0);
        assert_eq!(
            (clock.epochs().epoch, clock.epochs().safe),
            (8, 7),
            "what was not announced counts as announced"
        );
        clock.leave(A);
        assert_eq!(clock.epochs().safe, 8);
    }

    #[test]
    fn who_is_fenced_holds_flushes_but_no_epoch() {
        let mut clock = EpochClock::new(5, 0);
        clock.join(A, clock.newcomer());
        clock.join(B, clock.newcomer());
        clock.request_flush();
        clock.fence(B);
        beat(&mut clock, A, 5, 1);
        beat(&mut clock, A, 6, 1);
        assert_eq!(
            clock.epochs(),
            Epochs { epoch: 7, safe: 6, flush: 1, flushed_through: 0, is_awaited: false }
        );
        beat(&mut clock, B, 7, 1);
        assert_eq!(clock.epochs().flushed_through, 0, "nobody publishes for the dead");
        clock.leave(B);
        assert_eq!(clock.epochs().flushed_through, 1);
        clock.fence(A);
        assert_eq!(clock.epochs().safe, 7, "no more than was announced");
    }

    #[test]
    fn a_flush_under_way_is_not_joined() {
        let mut clock = EpochClock::new(1, 0);
        clock.join(A, clock.newcomer());
        clock.join(B, clock.newcomer());
        assert_eq!(clock.request_flush(), 1);
        beat(&mut clock, A, 1, 1);
        // A's hints from here on are not covered by generation 1.
        assert_eq!(clock.request_flush(), 2);
        beat(&mut clock, B, 1, 2);
        assert_eq!(clock.epochs().flushed_through, 1);
        beat(&mut clock, A, 1, 2);
        assert_eq!(clock.epochs().flushed_through, 2);
    }

    #[test]
    fn a_newcomer_holds_nothing_back() {
        let mut clock = EpochClock::new(1, 3);
        clock.join(A, clock.newcomer());
        assert_eq!(clock.epochs().flushed_through, 3);
        beat(&mut clock, B, 9, 9);
        assert_eq!(clock.progress(B), None, "nobody publishes for a session that does not count");
    }

    proptest! {
        #[test]
        fn nothing_goes_back_and_nobody_is_overtaken(steps in proptest::collection::vec((0u16..4, 0u8..8, 0u64..12, 0u64..6), 0..80)) {
            let mut clock = EpochClock::new(1, 0);
            let mut before = clock.epochs();
            for (who, what, pin, flushed) in steps {
                let session = SessionId::new(who + 1);
                match what {
                    0 if clock.progress(session).is_none() => clock.join(session, clock.newcomer()),
                    1 => clock.leave(session),
                    2 => { clock.request_flush(); }
                    3 => clock.fence(session),
                    _ => beat(&mut clock, session, pin, flushed),
                }
                let now = clock.epochs();
                prop_assert!(now.epoch >= before.epoch && now.epoch <= before.epoch + 1);
                prop_assert!(now.safe >= before.safe && now.safe <= now.epoch);
                prop_assert!(now.flush >= before.flush);
                prop_assert!(now.flushed_through >= before.flushed_through && now.flushed_through <= now.flush);
                for progress in clock.sessions.values() {
                    prop_assert!(now.safe <= progress.oldest_pin && now.flushed_through <= progress.flushed);
                }
                before = now;
            }
        }
    }
}
