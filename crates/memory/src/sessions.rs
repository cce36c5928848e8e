//! Who exists, whose lease ran out, who is fenced, and who cleans up after whom.
//!
//! ```text
//! Free -> Active -> Fencing -> Fenced -> Adopting(by) -> Free       on the coordinator
//!           |                    ^------------'  when the adopter closes or is fenced itself
//!           '-> Free (closed)
//! Free -> Active -> Fenced -> Free                                  on the other servers
//!   '-----------------^  fenced before it ever came
//! any -> Free -> Active  when a session with a newer term comes
//! ```
//!
//! A session's number is its slot plus one. Free slots are searched from behind the one handed out last, so that a
//! number rests as long as possible before it means somebody else. Its term says who it means: the coordinator counts
//! sessions and never repeats a term, and a slot keeps the last one it knew when it is free.
//!
//! What the other servers do about a term:
//!
//! | it is      | attach                      | fence            | adopt           | finish adoption |
//! |---|---|---|---|---|
//! | the slot's | again, unless it ended here | done             | done            | done            |
//! | newer      | instead of whoever was here | done, remembered | no such session | no such session |
//! | older      | fenced                      | nothing to do    | no such session | nothing to do   |
//!
//! The coordinator handed out the terms itself: for it, one that is not the slot's does not exist (an older one that
//! attaches is told that it was fenced).
//!
//! Leases exist on the coordinator only, and only decide who may be fenced: nothing happens when one runs out, and
//! a late heartbeat renews it. After a restart all sessions found have *lost* their lease: the replies that made
//! their calls run at most once are gone, so none of their calls is taken any more. So has a session whose process is
//! known to be gone: it can be fenced at once.
//!
//! Invariants: a state is committed by the first word of its entry; a slot's term only grows; whoever leaves `Active`
//! or `Fencing` gives up its adoptions in the stores before, so an adopter is always a session that may still act.

use crate::config::ServerConfig;
use crate::epochs::Progress;
use crate::layout::{self, Layout, session_entry, superblock};
use farwood_fabric::addr::SessionId;
use farwood_fabric::clock::Nanos;
use farwood_fabric::control::{ControlError, SessionState};
use farwood_fabric::server::{ServerMemory, StartError};
use std::cmp::Ordering;

/// State of a session's slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum State {
    Free,
    Active,
    Fencing,
    Fenced,
    Adopting { by: SessionId },
}

/// How long a session may be silent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Lease {
    Forever,
    Until(Nanos),
    /// The server restarted, or the session's process is gone.
    Lost,
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    state: State,
    read_only: bool,
    lease: Lease,
    /// In state `Free`, the term of the last session known here.
    term: u64,
}

/// How a session comes to a server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Attach {
    /// It was here already.
    Again,
    /// It is new, and its number is free.
    New,
    /// It is new, but an earlier holder of its number left something behind.
    Instead,
}

/// A session as the table lists it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Listed {
    pub(crate) session: SessionId,
    pub(crate) term: u64,
    pub(crate) state: SessionState,
    pub(crate) lease_left_ns: Nanos,
    pub(crate) adopter: SessionId,
}

/// The session table.
#[derive(Debug)]
pub(crate) struct SessionTable {
    layout: Layout,
    coordinator: bool,
    lease_ns: Nanos,
    slots: Vec<Slot>,
    next_slot: u16,
    /// (Coordinator) The term of the next session.
    next_term: u64,
}

impl SessionTable {
    /// Reads the table from META, and what its living sessions had published.
    pub(crate) fn load(
        memory: &dyn ServerMemory,
        config: &ServerConfig,
    ) -> Result<(Self, Vec<(SessionId, Progress)>), StartError> {
        let layout = Layout::new(config);
        let next_slot = layout::load(memory, superblock::NEXT_SLOT_AT);
        let mut table = Self {
            layout,
            coordinator: config.is_coordinator(),
            lease_ns: config.lease_ns,
            slots: Vec::with_capacity(usize::from(config.max_sessions)),
            next_slot: u16::try_from(next_slot).unwrap_or(0) % config.max_sessions,
            next_term: layout::load(memory, superblock::NEXT_TERM_AT),
        };
        let mut living = Vec::new();
        for number in 0..config.max_sessions {
            let entry = layout.session_entry(number);
            let [word, term] =
                [session_entry::COMMIT_AT, session_entry::TERM_AT].map(|at| layout::load(memory, entry + at));
            let slot = decode(word, term)
                .filter(|slot| !table.coordinator || slot.term < table.next_term)
                .ok_or_else(|| layout::damaged("session", u64::from(number) + 1))?;
            if matches!(slot.state, State::Active | State::Fencing) {
                let progress = Progress {
                    oldest_pin: layout::load(memory, entry + session_entry::PIN_AT),
                    flushed: layout::load(memory, entry + session_entry::FLUSHED_AT),
                };
                living.push((SessionId::new(number + 1), progress));
            }
            table.slots.push(slot);
        }
        Ok((table, living))
    }

    /// (Coordinator) A new session.
    pub(crate) fn open(
        &mut self,
        memory: &dyn ServerMemory,
        read_only: bool,
        progress: Progress,
        now: Nanos,
    ) -> Result<SessionId, ControlError> {
        let max = self.max();
        let free = (0..max)
            .map(|step| {
                let slot = u32::from(self.next_slot) + u32::from(step);
                u16::try_from(slot % u32::from(max)).unwrap_or(0)
            })
            .find(|slot| self.slots[usize::from(*slot)].state == State::Free);
        let slot = free.ok_or(ControlError::SessionsFull { max })?;
        self.next_slot = (slot + 1) % max;
        layout::store(memory, superblock::NEXT_SLOT_AT, u64::from(self.next_slot));
        let term = self.next_term;
        self.next_term += 1;
        layout::store(memory, superblock::NEXT_TERM_AT, self.next_term);
        let session = SessionId::new(slot + 1);
        self.publish(memory, session, progress);
        let lease = self.fresh_lease(now);
        self.set(memory, slot, Slot { state: State::Active, read_only, lease, term });
        Ok(session)
    }

    /// Whether a session that the coordinator opened may come in here; on the coordinator itself, one that it knows
    /// already.
    pub(crate) fn check_attach(&self, session: SessionId, term: u64) -> Result<Attach, ControlError> {
        let (slot, age) = self.compare(session, term)?;
        let held = self.slots[usize::from(slot)];
        match (age, held.state) {
            (Ordering::Equal, State::Active) if held.lease != Lease::Lost => Ok(Attach::Again),
            (Ordering::Less, _) => Err(ControlError::SessionFenced { session }),
            (Ordering::Greater, _) | (_, State::Free) if self.coordinator => {
                Err(ControlError::NoSuchSession { session })
            }
            (Ordering::Greater, State::Free) => Ok(Attach::New),
            (Ordering::Greater, _) => Ok(Attach::Instead),
            // Free: it was closed or adopted, and this is a late repeat.
            (Ordering::Equal, _) => Err(ControlError::SessionFenced { session }),
        }
    }

    /// Admits a session that passed the check. If it comes instead of another, that one was released before.
    pub(crate) fn attach(
        &mut self,
        memory: &dyn ServerMemory,
        session: SessionId,
        term: u64,
        read_only: bool,
    ) -> Result<(), ControlError> {
        let slot = self.slot(session)?;
        let held = self.slots[usize::from(slot)];
        let lease = if held.term == term { held.lease } else { Lease::Forever };
        self.set(memory, slot, Slot { state: State::Active, read_only, lease, term });
        Ok(())
    }

    /// Whether the session may ask anything here.
    pub(crate) fn check_active(&self, session: SessionId, term: u64) -> Result<(), ControlError> {
        let slot = &self.slots[usize::from(self.slot(session)?)];
        match slot.state {
            State::Free => Err(ControlError::NoSuchSession { session }),
            // An earlier holder of the number is long gone.
            State::Active if slot.lease != Lease::Lost && slot.term == term => Ok(()),
            _ => Err(ControlError::SessionFenced { session }),
        }
    }

    /// Whether the session only reads.
    pub(crate) fn is_read_only(&self, session: SessionId) -> bool {
        self.slot(session).is_ok_and(|slot| self.slots[usize::from(slot)].read_only)
    }

    /// A heartbeat came.
    pub(crate) fn renew(&mut self, session: SessionId, now: Nanos) {
        let lease = self.fresh_lease(now);
        if let Ok(slot) = self.slot(session) {
            self.slots[usize::from(slot)].lease = lease;
        }
    }

    /// The session's process is gone: nobody renews its lease, and nothing that still comes in its name is taken.
    pub(crate) fn abandon(&mut self, session: SessionId, term: u64) {
        if let Ok(slot) = self.slot(session) {
            let slot = &mut self.slots[usize::from(slot)];
            if slot.state == State::Active && slot.term == term {
                slot.lease = Lease::Lost;
            }
        }
    }

    /// Records what a session has published, so that a restart does not hold it to less, or let it off with more.
    pub(crate) fn publish(&self, memory: &dyn ServerMemory, session: SessionId, progress: Progress) {
        if let Ok(slot) = self.slot(session) {
            let entry = self.layout.session_entry(slot);
            layout::store(memory, entry + session_entry::PIN_AT, progress.oldest_pin);
            layout::store(memory, entry + session_entry::FLUSHED_AT, progress.flushed);
        }
    }

    /// (Coordinator) First step of fencing; the victim's term.
    pub(crate) fn begin_fence(
        &mut self,
        memory: &dyn ServerMemory,
        victim: SessionId,
        force: bool,
        now: Nanos,
    ) -> Result<u64, ControlError> {
        let slot = self.slot(victim)?;
        let Slot { state, term, .. } = self.slots[usize::from(slot)];
        match state {
            State::Free => return Err(ControlError::NoSuchSession { session: victim }),
            State::Fencing | State::Fenced | State::Adopting { .. } => return Ok(term),
            State::Active => {}
        }
        let left_ns = self.lease_left_ns(slot, now);
        if left_ns > 0 && !force {
            return Err(ControlError::LeaseAlive { session: victim, left_ns });
        }
        self.change(memory, slot, State::Fencing);
        Ok(term)
    }

    /// (Other servers) Whether the number had a newer holder here since: there is nothing left to do about this one.
    pub(crate) fn is_past(&self, victim: SessionId, term: u64) -> bool {
        !self.coordinator && self.compare(victim, term).is_ok_and(|(_, age)| age == Ordering::Less)
    }

    /// (Other servers) Second step of fencing, of a victim that is not past. On the coordinator, which has its own
    /// first step, it only confirms.
    pub(crate) fn fence_here(
        &mut self,
        memory: &dyn ServerMemory,
        victim: SessionId,
        term: u64,
    ) -> Result<(), ControlError> {
        if self.coordinator {
            let slot = self.current(victim, term)?;
            return match self.slots[usize::from(slot)].state {
                State::Free => Err(ControlError::NoSuchSession { session: victim }),
                State::Active => Err(ControlError::NotFenced { session: victim }),
                State::Fencing | State::Fenced | State::Adopting { .. } => Ok(()),
            };
        }
        let (slot, age) = self.compare(victim, term)?;
        let held = self.slots[usize::from(slot)];
        if age == Ordering::Greater || held.state != State::Fenced {
            // What an earlier holder may have left is the adopter's now.
            self.set(memory, slot, Slot { state: State::Fenced, term, ..held });
        }
        Ok(())
    }

    /// (Coordinator) Third step of fencing: every server has fenced.
    pub(crate) fn complete_fence(
        &mut self,
        memory: &dyn ServerMemory,
        victim: SessionId,
        term: u64,
    ) -> Result<(), ControlError> {
        let slot = self.current(victim, term)?;
        match self.slots[usize::from(slot)].state {
            State::Free => return Err(ControlError::NoSuchSession { session: victim }),
            State::Active => return Err(ControlError::NotFenced { session: victim }),
            State::Fenced | State::Adopting { .. } => {}
            State::Fencing => {
                self.give_up_adoptions(memory, victim);
                self.change(memory, slot, State::Fenced);
            }
        }
        Ok(())
    }

    /// (Coordinator) `by` takes on the clean-up; the victim's term.
    pub(crate) fn begin_adopt(
        &mut self,
        memory: &dyn ServerMemory,
        victim: SessionId,
        by: SessionId,
    ) -> Result<u64, ControlError> {
        let slot = self.slot(victim)?;
        let Slot { state, term, .. } = self.slots[usize::from(slot)];
        match state {
            State::Free => Err(ControlError::NoSuchSession { session: victim }),
            State::Active | State::Fencing => Err(ControlError::NotFenced { session: victim }),
            State::Adopting { by: other } if other != by => {
                Err(ControlError::BeingAdopted { session: victim, by: other })
            }
            State::Adopting { .. } => Ok(term),
            State::Fenced => {
                self.change(memory, slot, State::Adopting { by });
                Ok(term)
            }
        }
    }

    /// Whether `by` may touch what the victim left here. Only the coordinator knows who adopts; the others trust
    /// whoever asks, but not before they have fenced the victim. One whose adoption is finished here left nothing.
    pub(crate) fn check_adopter(
        &self,
        victim: SessionId,
        term: u64,
        by: SessionId,
    ) -> Result<(), ControlError> {
        let slot = self.current(victim, term)?;
        match self.slots[usize::from(slot)].state {
            State::Active | State::Fencing => Err(ControlError::NotFenced { session: victim }),
            State::Adopting { by: other } if other != by => {
                Err(ControlError::BeingAdopted { session: victim, by: other })
            }
            State::Free if self.coordinator => Err(ControlError::NoSuchSession { session: victim }),
            State::Fenced if self.coordinator => {
                Err(ControlError::BadRequest { why: format!("begin to adopt {victim} first") })
            }
            State::Free | State::Fenced | State::Adopting { .. } => Ok(()),
        }
    }

    /// The number is free again; the term stays known. The caller has disowned the chunks and cleared the journal.
    pub(crate) fn release(&mut self, memory: &dyn ServerMemory, session: SessionId) {
        self.give_up_adoptions(memory, session);
        if let Ok(slot) = self.slot(session) {
            self.change(memory, slot, State::Free);
        }
    }

    /// Repairs what a crash can have left: adoptions by sessions that cannot adopt.
    pub(crate) fn repair(&mut self, memory: &dyn ServerMemory) {
        for number in 1..=self.max() {
            let session = SessionId::new(number);
            if !matches!(self.state(session), State::Active | State::Fencing) {
                self.give_up_adoptions(memory, session);
            }
        }
    }

    /// State of a session; `Free` for a number that no session can have.
    pub(crate) fn state(&self, session: SessionId) -> State {
        self.slot(session).map_or(State::Free, |slot| self.slots[usize::from(slot)].state)
    }

    /// Term of a session, or of the last that had the number; 0 if there was none.
    pub(crate) fn term(&self, session: SessionId) -> u64 {
        self.slot(session).map_or(0, |slot| self.slots[usize::from(slot)].term)
    }

    /// Sessions there are.
    pub(crate) fn list(&self, now: Nanos) -> Vec<Listed> {
        let slots = (0..self.max()).zip(&self.slots);
        let sessions = slots.filter_map(|(number, slot)| {
            let state = match slot.state {
                State::Free => return None,
                State::Active => SessionState::Active,
                State::Fencing => SessionState::Fencing,
                State::Fenced => SessionState::Fenced,
                State::Adopting { .. } => SessionState::Adopting,
            };
            let lease_left_ns =
                if state == SessionState::Active { self.lease_left_ns(number, now) } else { 0 };
            let adopter = if let State::Adopting { by } = slot.state { by } else { SessionId::NONE };
            let session = SessionId::new(number + 1);
            Some(Listed { session, term: slot.term, state, lease_left_ns, adopter })
        });
        sessions.collect()
    }

    /// The slot of a number that a client session can have here.
    pub(crate) fn slot(&self, session: SessionId) -> Result<u16, ControlError> {
        let slot = session.get().checked_sub(1).filter(|slot| *slot < self.max());
        slot.ok_or(ControlError::NoSuchSession { session })
    }

    /// The slot of a number, and how the term said compares with the slot's.
    fn compare(&self, session: SessionId, term: u64) -> Result<(u16, Ordering), ControlError> {
        let slot = self.slot(session)?;
        if term == 0 {
            return Err(ControlError::NoSuchSession { session });
        }
        Ok((slot, term.cmp(&self.slots[usize::from(slot)].term)))
    }

    /// The slot of a number whose term is this one.
    fn current(&self, session: SessionId, term: u64) -> Result<u16, ControlError> {
        match self.compare(session, term)? {
            (slot, Ordering::Equal) => Ok(slot),
            _ => Err(ControlError::NoSuchSession { session }),
        }
    }

    fn give_up_adoptions(&mut self, memory: &dyn ServerMemory, by: SessionId) {
        for slot in 0..self.max() {
            if self.slots[usize::from(slot)].state == (State::Adopting { by }) {
                self.change(memory, slot, State::Fenced);
            }
        }
    }

    fn max(&self) -> u16 {
        // The table was made with a `u16` of slots.
        u16::try_from(self.slots.len()).unwrap_or(u16::MAX)
    }

    fn fresh_lease(&self, now: Nanos) -> Lease {
        if self.lease_ns == 0 { Lease::Forever } else { Lease::Until(now.saturating_add(self.lease_ns)) }
    }

    fn lease_left_ns(&self, slot: u16, now: Nanos) -> Nanos {
        match self.slots[usize::from(slot)].lease {
            Lease::Forever => Nanos::MAX,
            Lease::Until(end) => end.saturating_sub(now),
            Lease::Lost => 0,
        }
    }

    fn change(&mut self, memory: &dyn ServerMemory, slot: u16, state: State) {
        let held = self.slots[usize::from(slot)];
        self.set(memory, slot, Slot { state, ..held });
    }

    fn set(&mut self, memory: &dyn ServerMemory, number: u16, slot: Slot) {
        let entry = self.layout.session_entry(number);
        let held = self.slots[usize::from(number)].term;
        debug_assert!(slot.term >= held, "the term of slot {number} goes back from {held} to {}", slot.term);
        if slot.term != held {
            layout::store(memory, entry + session_entry::TERM_AT, slot.term);
        }
        layout::store(memory, entry + session_entry::COMMIT_AT, encode(slot));
        self.slots[usize::from(number)] = slot;
    }
}

fn encode(slot: Slot) -> u64 {
    let (state, by) = match slot.state {
        State::Free => return 0,
        State::Active => (1, SessionId::NONE),
        State::Fencing => (2, SessionId::NONE),
        State::Fenced => (3, SessionId::NONE),
        State::Adopting { by } => (4, by),
    };
    state | u64::from(slot.read_only) << 8 | u64::from(by.get()) << 16
}

fn decode(word: u64, term: u64) -> Option<Slot> {
    let by = SessionId::new((word >> 16 & 0xffff) as u16);
    let state = match word & 0xff {
        0 if word == 0 => State::Free,
        1 => State::Active,
        2 => State::Fencing,
        3 => State::Fenced,
        4 => State::Adopting { by },
        _ => return None,
    };
    let slot = Slot { state, read_only: word >> 8 & 1 == 1, lease: Lease::Lost, term };
    (encode(slot) == word && (term > 0 || state == State::Free)).then_some(slot)
}

#[cfg(test)]
mod tests;
