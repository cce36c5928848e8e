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
//! Leases exist on the coordinator only, and only decide who may be fenced: a late heartbeat renews one that ran out.
//! After a restart each active session's lease begins anew, in full: nobody could renew it while the server was away. One whose lease had
//! been lost before has [`SILENCE_NS`] to be heard of. A session whose process is known to be gone has *lost* its lease: it can be fenced
//! at once. One whose last connection closed has [`SILENCE_NS`] left.
//!
//! **Who recovers the dead.** Servers know no engines, so sessions do it; the coordinator notices and offers
//! ([`SessionTable::offer`]). With every heartbeat of a session that does chores it looks for one that needs recovery,
//! and sets the *lost* bit of those whose lease has run out, for whoever waits for their locks. An offer is no right: fencing is
//! idempotent and the adoption is one session's at a time. It is offered to somebody else after a while, and when [`OFFERS`] were of
//! no use, to all who come: whoever asks most often must not keep the others from it.
//!
//! **Kept back.** The last [`KEPT_BACK`] free numbers are for sessions that come to recover others (`reaper`), so that a pool
//! full of dead sessions lets somebody in to clean it. Only that many reapers may take them: whoever comes beside those is let in like
//! any other session, and as many numbers fewer are kept back as reapers have. So free numbers and reapers together are never fewer than
//! [`KEPT_BACK`], and where no number is free there are reapers. Reapers own nothing. If they are dead, in whatever state, a new one takes the place of one of them: it has the
//! same number and a newer term, goes on with the adoptions that its predecessor had not given up, and fences it on every server
//! by attaching there. An adopter of the predecessor learns that its victim is gone.
//!
//! Invariants: a state is committed by the first word of its entry; a slot's term only grows; whoever leaves `Active`
//! or `Fencing` gives up its adoptions in the stores before, so an adopter is always a session that may still act.

use crate::config::{Mistakes, ServerConfig};
use crate::epochs::Progress;
use crate::layout::{self, Layout, session_entry, superblock};
use farwood_fabric::addr::SessionId;
use farwood_fabric::clock::MILLISECOND;
use farwood_fabric::clock::Nanos;
use farwood_fabric::control::{ControlError, SessionState, SessionWord};
use farwood_fabric::found::Found;
use farwood_fabric::server::{ServerMemory, StartError};
use std::cmp::Ordering;

/// How long a session lives that has hung up and is not heard of again.
const SILENCE_NS: Nanos = 500 * MILLISECOND;
/// How many free numbers are for reapers alone, of at least eight times as many.
const KEPT_BACK: u16 = 2;
/// An offer to recover somebody stands for this part of a lease, then others get it too.
const OFFERS_PER_LEASE: Nanos = 8;
/// The same where leases last for ever.
const OFFER_NS: Nanos = 500 * MILLISECOND;
/// So many offers are made one after the other.
const OFFERS: u32 = 3;

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
    /// The session's process is gone.
    Lost,
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    state: State,
    read_only: bool,
    lease: Lease,
    /// The table says that its lease is lost.
    is_lost: bool,
    /// It holds nothing: it came to recover others.
    reaper: bool,
    /// In state `Free`, the term of the last session known here.
    term: u64,
    /// (Coordinator) The last offer to recover it.
    offered: Option<Offer>,
    /// (Coordinator) When it was last asked to recover somebody.
    asked: Option<Nanos>,
}

/// An offer to recover a session.
#[derive(Clone, Copy, Debug)]
struct Offer {
    to: SessionId,
    since: Nanos,
    /// How many there were before it.
    before: u32,
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

/// What a session comes for.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Kind {
    /// It only reads.
    pub(crate) read_only: bool,
    /// It recovers others and holds nothing.
    pub(crate) reaper: bool,
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
    mistakes: Mistakes,
    ends_sessions: bool,
    lease_ns: Nanos,
    slots: Vec<Slot>,
    next_slot: u16,
    /// (Coordinator) The term of the next session.
    next_term: u64,
}

impl SessionTable {
    /// Reads the table from META, and what its sessions had published.
    pub(crate) fn load(
        memory: &dyn ServerMemory,
        config: &ServerConfig,
        now: Nanos,
    ) -> Result<(Self, Vec<(SessionId, Progress)>), StartError> {
        let layout = Layout::new(config);
        let next_slot = layout::load(memory, superblock::NEXT_SLOT_AT);
        let mut table = Self {
            layout,
            coordinator: config.is_coordinator(),
            mistakes: config.mistakes,
            ends_sessions: config.ends_sessions || config.mistakes.restart_ends_sessions,
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
            let slot = Slot { lease: table.lease_after_restart(slot, now), ..slot };
            if slot.state != State::Free {
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

    /// The lease of a session that an earlier server process left.
    fn lease_after_restart(&self, slot: Slot, now: Nanos) -> Lease {
        if slot.state != State::Active || self.ends_sessions {
            return Lease::Lost;
        }
        match (self.coordinator, slot.is_lost) {
            (true, false) => self.fresh_lease(now),
            // It was late or its process is gone: which of the two is seen soon.
            (true, true) if self.lease_ns == 0 => Lease::Until(now.saturating_add(SILENCE_NS)),
            (true, true) => Lease::Until(now.saturating_add(SILENCE_NS.min(self.lease_ns))),
            (false, false) => Lease::Forever,
            // There, only those whose process is gone are lost.
            (false, true) => Lease::Lost,
        }
    }

    /// Sessions that may use the server: number, term, and whether they only read.
    pub(crate) fn active(&self) -> impl Iterator<Item = (SessionId, u64, bool)> {
        let is_active = |slot: &&Slot| slot.state == State::Active && slot.lease != Lease::Lost;
        (1..)
            .zip(&self.slots)
            .filter(move |(_, slot)| is_active(slot))
            .map(|(number, slot)| (SessionId::new(number), slot.term, slot.read_only))
    }

    /// Sessions of another boot have ended, since no process is left that had one; what they left waits for whoever adopts them.
    pub(crate) fn outlive(&mut self, found: &Found) {
        if *found != Found::SameBoot {
            self.slots.iter_mut().for_each(|slot| slot.lease = Lease::Lost);
        }
    }

    /// (Coordinator) A new session.
    pub(crate) fn open(
        &mut self,
        memory: &dyn ServerMemory,
        kind: Kind,
        progress: Progress,
        now: Nanos,
    ) -> Result<SessionId, ControlError> {
        let max = self.max();
        let Kind { read_only, reaper } = kind;
        let mut free = (0..max)
            .map(|step| {
                let slot = u32::from(self.next_slot) + u32::from(step);
                u16::try_from(slot % u32::from(max)).unwrap_or(0)
            })
            .filter(|slot| self.slots[usize::from(*slot)].state == State::Free)
            .take(usize::from(KEPT_BACK) + 1);
        let (first, behind) = (free.next(), free.count());
        let reapers = self.slots.iter().filter(|held| held.reaper && held.state != State::Free).count();
        let takes_all = reaper && reapers < usize::from(KEPT_BACK);
        let kept_back = KEPT_BACK.min(max / 8);
        let still_kept = if takes_all { 0 } else { usize::from(kept_back).saturating_sub(reapers) };
        let slot = first.filter(|_| behind >= still_kept);
        let slot = slot.or_else(|| if reaper { self.lost_reaper(now) } else { None }).ok_or_else(|| {
            let dead = (0..max).filter(|slot| self.is_dead(*slot, now)).count();
            ControlError::SessionsFull { max: max - kept_back, dead: u16::try_from(dead).unwrap_or(max) }
        })?;
        self.next_slot = (slot + 1) % max;
        layout::store(memory, superblock::NEXT_SLOT_AT, u64::from(self.next_slot));
        let term = self.next_term;
        self.next_term += 1;
        layout::store(memory, superblock::NEXT_TERM_AT, self.next_term);
        let session = SessionId::new(slot + 1);
        self.publish(memory, session, progress);
        let lease = self.fresh_lease(now);
        let state = State::Active;
        self.set(
            memory,
            slot,
            Slot { state, read_only, lease, is_lost: false, reaper, term, offered: None, asked: None },
        );
        Ok(session)
    }

    /// A reaper that is dead: fenced or not, it holds nothing that anybody would miss. If somebody who lives has adopted it, its number
    /// is free in a moment.
    fn lost_reaper(&self, now: Nanos) -> Option<u16> {
        let is_left = |held: Slot| match held.state {
            State::Adopting { by } => self.slot(by).is_ok_and(|by| self.is_dead(by, now)),
            _ => true,
        };
        let is_lost = |slot: &u16| {
            let held = self.slots[usize::from(*slot)];
            held.reaper && self.is_dead(*slot, now) && is_left(held)
        };
        (0..self.max()).find(is_lost)
    }

    fn is_dead(&self, slot: u16, now: Nanos) -> bool {
        match self.slots[usize::from(slot)].state {
            State::Free => false,
            State::Active => self.lease_left_ns(slot, now) == 0,
            State::Fencing | State::Fenced | State::Adopting { .. } => true,
        }
    }

    /// (Coordinator) Notes in the table whose lease has run out, for those who wait for their locks.
    pub(crate) fn note_lost(&mut self, memory: &dyn ServerMemory, now: Nanos) {
        for number in 0..self.max() {
            let slot = self.slots[usize::from(number)];
            if slot.state == State::Active && !slot.is_lost && self.lease_left_ns(number, now) == 0 {
                self.set(memory, number, Slot { is_lost: true, ..slot });
            }
        }
    }

    /// (Coordinator) A session that needs recovery, which `by` is now asked for. Those whom nobody has adopted come first: an adoption
    /// waits for epochs, which they hold.
    pub(crate) fn offer(&mut self, by: SessionId, now: Nanos) -> Option<SessionId> {
        let slot = (0..self.max())
            .find(|slot| self.needs_fence(*slot, now) && !self.stands(*slot, by, now))
            .or_else(|| {
                // Whoever has adopted is reminded. If it dies, it is recovered itself, and gives the adoption up.
                let is_adopted = |slot: &u16| self.slots[usize::from(*slot)].state == State::Adopting { by };
                (0..self.max()).find(|slot| is_adopted(slot) && !self.stands(*slot, by, now))
            })?;
        let offered = &mut self.slots[usize::from(slot)].offered;
        let before = offered.map_or(0, |offer| offer.before.saturating_add(1));
        *offered = Some(Offer { to: by, since: now, before });
        if let Ok(asked) = self.slot(by) {
            self.slots[usize::from(asked)].asked = Some(now);
        }
        let session = SessionId::new(slot + 1);
        (session != by).then_some(session)
    }

    fn needs_fence(&self, slot: u16, now: Nanos) -> bool {
        self.is_dead(slot, now) && !matches!(self.slots[usize::from(slot)].state, State::Adopting { .. })
    }

    /// Whether an earlier offer stands, so that `by` is not asked. Whoever had the last one comes after those who had none.
    fn stands(&self, slot: u16, by: SessionId, now: Nanos) -> bool {
        let stands_for = if self.lease_ns == 0 { OFFER_NS } else { self.lease_ns / OFFERS_PER_LEASE };
        let is_fresh = |since: Nanos, times| now.saturating_sub(since) < stands_for * times;
        self.slots[usize::from(slot)].offered.is_some_and(|offer| {
            let was_asked = self.slot(by).ok().and_then(|by| self.slots[usize::from(by)].asked);
            if offer.before >= OFFERS && !was_asked.is_some_and(|since| is_fresh(since, 1)) {
                return false;
            }
            let is_there = self.state(offer.to) == State::Active && !self.is_lost(offer.to);
            is_there && is_fresh(offer.since, if offer.to == by { 2 } else { 1 })
        })
    }

    fn is_lost(&self, session: SessionId) -> bool {
        self.slot(session).is_ok_and(|slot| self.slots[usize::from(slot)].is_lost)
    }

    /// Whether the session came to recover others.
    pub(crate) fn is_reaper(&self, session: SessionId) -> bool {
        self.slot(session).is_ok_and(|slot| self.slots[usize::from(slot)].reaper)
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
        let state = State::Active;
        self.set(memory, slot, Slot { state, read_only, lease, term, is_lost: false, ..held });
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
    pub(crate) fn renew(&mut self, memory: &dyn ServerMemory, session: SessionId, now: Nanos) {
        let lease = self.fresh_lease(now);
        if let Ok(number) = self.slot(session) {
            let slot = &mut self.slots[usize::from(number)];
            slot.lease = lease;
            if slot.is_lost {
                let slot = Slot { is_lost: false, offered: None, ..*slot };
                self.set(memory, number, slot);
            }
        }
    }

    /// The session's process is gone: nobody renews its lease, and nothing that still comes in its name is taken.
    pub(crate) fn abandon(&mut self, memory: &dyn ServerMemory, session: SessionId, term: u64) {
        if let Ok(number) = self.slot(session) {
            let slot = self.slots[usize::from(number)];
            if slot.state == State::Active && slot.term == term {
                self.set(memory, number, Slot { lease: Lease::Lost, is_lost: true, ..slot });
            }
        }
    }

    /// The session has hung up: unless it is heard of again, its lease ends soon.
    pub(crate) fn hush(&mut self, session: SessionId, term: u64, now: Nanos) {
        if let Ok(number) = self.slot(session) {
            let slot = &mut self.slots[usize::from(number)];
            if let (State::Active, Lease::Until(end)) = (slot.state, slot.lease) {
                if slot.term == term {
                    slot.lease = Lease::Until(end.min(now.saturating_add(SILENCE_NS)));
                }
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
            State::Adopting { by: other } if other != by && !self.mistakes.adopters_not_chained => {
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
            State::Adopting { by: other } if other != by && !self.mistakes.adopters_not_chained => {
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

    /// Whether the session of this term is gone, and nobody has had its number since.
    pub(crate) fn has_ended(&self, session: SessionId, term: u64) -> bool {
        let slot = self.current(session, term).map(|slot| self.slots[usize::from(slot)].state);
        slot.is_ok_and(|state| state == State::Free)
    }

    /// Whether there is a session of this term, dead or alive.
    pub(crate) fn has_term(&self, term: u64) -> bool {
        self.slots.iter().any(|slot| slot.term == term && slot.state != State::Free)
    }

    /// The session of this term; none, if it is over.
    pub(crate) fn of_term(&self, term: u64) -> SessionId {
        let of_term = |(_, slot): &(u16, &Slot)| slot.term == term && slot.state != State::Free;
        (0..self.max())
            .zip(&self.slots)
            .find(of_term)
            .map_or(SessionId::NONE, |(slot, _)| SessionId::new(slot + 1))
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
    let (state, adopter) = match slot.state {
        State::Free => (None, SessionId::NONE),
        State::Active => (Some(SessionState::Active), SessionId::NONE),
        State::Fencing => (Some(SessionState::Fencing), SessionId::NONE),
        State::Fenced => (Some(SessionState::Fenced), SessionId::NONE),
        State::Adopting { by } => (Some(SessionState::Adopting), by),
    };
    let Slot { read_only, is_lost, reaper, .. } = slot;
    SessionWord { state, read_only, is_lost, reaper, adopter }.to_raw()
}

/// Whether these words of an entry can have been written by this code.
pub(crate) fn is_entry(word: u64, term: u64) -> bool {
    decode(word, term).is_some()
}

fn decode(word: u64, term: u64) -> Option<Slot> {
    let SessionWord { state, read_only, is_lost, reaper, adopter } = SessionWord::from_raw(word)?;
    let state = match state {
        None => State::Free,
        Some(SessionState::Active) => State::Active,
        Some(SessionState::Fencing) => State::Fencing,
        Some(SessionState::Fenced) => State::Fenced,
        Some(SessionState::Adopting) => State::Adopting { by: adopter },
    };
    let slot =
        Slot { state, read_only, lease: Lease::Lost, is_lost, reaper, term, offered: None, asked: None };
    (encode(slot) == word && (term > 0 || state == State::Free)).then_some(slot)
}

#[cfg(test)]
mod tests;
