//! Verbs and calls in cost mode: where in their way they ask the model what, and the events in between.
//!
//! A resource is asked at the moment when its customer arrives, so that first come is first served; but an event for
//! each arrival would cost more than all the rest. So a verb has one event where it would take effect, and one where it
//! would complete, *if nobody were in its way*. When that event comes, it asks; if the model says later, it comes again.
//! Two verbs that arrive within a few nanoseconds of each other may thus be served in the other order; nothing is lost or idle for it.

use super::calls::{Arriving, Replying, Sender};
use super::{Action, Event, Landed, SimVerb, Trip, What, World};
use crate::addr::RegionId;
use crate::call::{CallOutcome, Target};
use crate::clock::Nanos;
use crate::exec::GroupId;
use crate::transport::sim::cost::{Access, Thread, ceil};
use crate::work::Work;

/// Both operands of an atomic, and the word that it brings back.
const ATOMIC_REQUEST_BYTES: u64 = 16;
const ATOMIC_ANSWER_BYTES: u64 = 8;
/// What names a call, on the wire.
const CALL_BYTES: u64 = 32;

impl SimVerb {
    /// What its request carries behind the header.
    fn request_bytes(&self) -> u64 {
        match self.action {
            Action::Read => 0,
            Action::Write => self.data.len() as u64,
            _ => ATOMIC_REQUEST_BYTES,
        }
    }

    /// What its answer carries behind the header; a WRITE is only acknowledged.
    fn answer_bytes(&self) -> u64 {
        match self.action {
            Action::Read => self.data.len() as u64,
            Action::Write => 0,
            _ => ATOMIC_ANSWER_BYTES,
        }
    }

    fn access(&self) -> Access {
        let atomic = !matches!(self.action, Action::Read | Action::Write);
        match (self.region == RegionId::LOCK, atomic) {
            (true, true) => Access::AtomicOnChip(self.offset),
            (true, false) => Access::OnChip,
            (false, true) => Access::AtomicMain(self.offset),
            (false, false) => Access::Main,
        }
    }
}

impl World {
    // --- verbs ---

    /// A flight leaves as soon as its thread gets to it.
    pub(super) fn depart(&mut self, key: usize) {
        let connection = &self.connections[self.flights[key].connection];
        let (Some(cost), Some(thread)) = (&mut self.cost, connection.thread) else { return };
        // A procedure's work is in its accesses.
        let at = if connection.near { self.now } else { cost.post(thread, self.now) };
        if at > self.now {
            let flying = self.flying(key);
            self.schedule(at, Event::new(What::Send, flying));
        } else {
            self.send(key);
        }
    }

    /// Sends the verbs of a flight from the next one up to a fence; after a fence, as soon as the answers are in.
    pub(super) fn send(&mut self, key: usize) {
        if let Some(at) = self.returns_later(key) {
            let flying = self.flying(key);
            self.schedule(at, Event::new(What::Send, flying));
            return;
        }
        let connection = &self.connections[self.flights[key].connection];
        let (server, nic, near) = (connection.server, connection.nic, connection.near);
        let slowness = self.slowness(server);
        let now = self.now;
        let Some(cost) = &mut self.cost else { return };
        let flight = &mut self.flights[key];
        flight.trip = Trip::default();
        let next = flight.next;
        let at = if near {
            let (begins, ends) = cost.access(server, now, flight.verbs[next].len() as u64);
            flight.trip.effect = ends * 1000;
            begins
        } else {
            for (n, verb) in flight.verbs[next..].iter_mut().enumerate() {
                if n > 0 && verb.fence_before {
                    break;
                }
                verb.reaches = cost.send(nic, now * 1000, verb.request_bytes(), slowness);
            }
            let verb = &flight.verbs[next];
            cost.verb_asks(verb.reaches, verb.request_bytes())
        };
        let flying = self.flying(key);
        self.schedule(at, Event::new(What::Start, flying));
    }

    /// Takes the current verb of a flight into the server's NIC; false if its effect comes later. Its answer leaves with it.
    pub(super) fn admit(&mut self, key: usize) -> bool {
        let connection = &self.connections[self.flights[key].connection];
        let (server, near) = (connection.server, connection.near);
        let slowness = self.slowness(server);
        let now = self.now;
        let Some(cost) = &mut self.cost else { return true };
        if near {
            return true;
        }
        let flight = &mut self.flights[key];
        let (verb, trip) = (&flight.verbs[flight.next], &mut flight.trip);
        if !trip.admitted {
            trip.admitted = true;
            trip.effect = cost.admit(server, verb.reaches, verb.request_bytes(), verb.access());
            let at = ceil(trip.effect);
            if at > now {
                let flying = self.flying(key);
                self.schedule(at, Event::new(What::Start, flying));
                return false;
            }
        }
        trip.admitted = false;
        // A verb that was held up by others of its batch, or by a fault, takes effect later than the NIC could have done it.
        let from = trip.effect.max(now.saturating_sub(1) * 1000);
        let bytes = verb.answer_bytes();
        trip.reaches = cost.send(server, from, bytes, slowness);
        trip.last = cost.message(bytes);
        trip.answers += trip.last;
        true
    }

    /// How long the effects of a flight's current verb spread: the time of its DMA, or of the procedure's copy.
    pub(super) fn spread(&self, key: usize) -> Option<Nanos> {
        let flight = &self.flights[key];
        let connection = &self.connections[flight.connection];
        let cost = self.cost.as_ref()?;
        if connection.near {
            return Some(ceil(flight.trip.effect).saturating_sub(self.now).max(1));
        }
        let bytes = flight.verbs[flight.next].len() as u64;
        Some(cost.dma(bytes).max(1) * self.slowness(connection.server))
    }

    /// The current verb of a flight has taken effect.
    pub(super) fn priced_next_verb(&mut self, key: usize) {
        let near = self.connections[self.flights[key].connection].near;
        let flight = &mut self.flights[key];
        flight.next += 1;
        let flying = self.flying(key);
        let flight = &self.flights[key];
        let Some(cost) = &self.cost else { return };
        let answer_at =
            if near { self.now } else { ceil(cost.asks_for(flight.trip.reaches, flight.trip.last)) };
        if let Some(verb) = flight.verbs.get(flight.next) {
            if near || verb.fence_before {
                self.schedule(answer_at, Event::new(What::Send, flying));
            } else {
                let at = cost.verb_asks(verb.reaches, verb.request_bytes());
                self.schedule(at.max(self.now), Event::new(What::Start, flying));
            }
            return;
        }
        let lost = flight.lost;
        self.settle(key);
        if !lost && self.flights.contains(key) {
            self.schedule(answer_at.max(self.now), Event::new(What::Complete, flying));
        }
    }

    /// The client's NIC takes in the answers to a flight; when it has them, if that is not now.
    fn returns_later(&mut self, key: usize) -> Option<Nanos> {
        let flight = &mut self.flights[key];
        let connection = &self.connections[flight.connection];
        let cost = self.cost.as_mut()?;
        if connection.near || flight.trip.returned || flight.trip.answers == 0 {
            return None;
        }
        let trip = &mut flight.trip;
        trip.returned = true;
        let at = ceil(cost.receive_all(connection.nic, trip.reaches, trip.last, trip.answers));
        (at > self.now).then_some(at)
    }

    /// The answers to a flight come in.
    pub(super) fn complete(&mut self, key: usize) {
        let flight = &self.flights[key];
        let connection = &self.connections[flight.connection];
        let first = !flight.trip.returned;
        if let (Some(thread), true) = (connection.thread.filter(|_| !connection.near), first) {
            let later = self.returns_later(key);
            let received = later.unwrap_or(self.now);
            let at = self.cost.as_mut().map_or(received, |cost| cost.poll(thread, received));
            if at > self.now {
                let flying = self.flying(key);
                self.schedule(at, Event::new(What::Complete, flying));
                return;
            }
        }
        self.land(key, Landed::Done);
    }

    // --- calls ---

    /// A call leaves its caller; when it asks at its target.
    pub(super) fn price_call(
        &mut self,
        group: GroupId,
        server: usize,
        arriving: &mut Arriving,
    ) -> Option<Nanos> {
        let slowness = if matches!(arriving.target, Target::Server(_)) { self.slowness(server) } else { 1 };
        let cost = self.cost.as_mut()?;
        let bytes = CALL_BYTES + arriving.call.request.len() as u64;
        let nic = cost.nic_of(group);
        let reaches = cost.send(nic, self.now * 1000, bytes, slowness);
        arriving.reaches = Some(reaches);
        Some(ceil(cost.asks(reaches, bytes)))
    }

    /// A call reaches its target's machine; when it is taken up, if that is not now.
    pub(super) fn price_arrival(&mut self, arriving: &mut Arriving) -> Option<Nanos> {
        let reaches = arriving.reaches.take()?;
        let bytes = CALL_BYTES + arriving.call.request.len() as u64;
        let cost = self.cost.as_mut()?;
        let at = match arriving.target {
            Target::Server(id) if id.index() < self.servers.len() => {
                let received = ceil(cost.receive(id.index(), reaches, bytes));
                cost.call(id.index(), received)
            }
            Target::Session(session) => {
                let (_, group) = self.inboxes.get(&session)?;
                let nic = cost.nic_of(*group);
                ceil(cost.receive(nic, reaches, bytes))
            }
            Target::Server(_) => return None,
        };
        (at > self.now).then_some(at)
    }

    /// A reply leaves; when it asks at its caller's.
    pub(super) fn price_reply(&mut self, from: Sender, reply: &mut Replying) -> Option<Nanos> {
        let slowness = if let Sender::Server(server) = from { self.slowness(server) } else { 1 };
        let cost = self.cost.as_mut()?;
        let nic = match from {
            Sender::Server(server) => server,
            Sender::Process(group) => cost.nic_of(group),
        };
        let bytes = reply_bytes(&reply.outcome);
        let reaches = cost.send(nic, self.now * 1000, bytes, slowness);
        reply.reaches = Some(reaches);
        Some(ceil(cost.asks(reaches, bytes)))
    }

    /// A reply reaches its caller's machine; when it is delivered, if that is not now.
    pub(super) fn price_delivery(&mut self, reply: &mut Replying) -> Option<Nanos> {
        let reaches = reply.reaches.take()?;
        let group = self.waiting.get(&reply.to)?.group;
        let cost = self.cost.as_mut()?;
        let nic = cost.nic_of(group);
        let at = ceil(cost.receive(nic, reaches, reply_bytes(&reply.outcome)));
        (at > self.now).then_some(at)
    }

    // --- computation ---

    /// What a piece of work takes on a thread, and how much of it at a stretch; `None` where work is free.
    pub(in crate::transport::sim) fn price_work(
        &mut self,
        thread: Thread,
        work: Work,
    ) -> Option<(Nanos, Nanos)> {
        let cost = self.cost.as_mut()?;
        Some((cost.work(thread, work), cost.slice(thread)))
    }

    /// Works on a thread; when that is done.
    pub(in crate::transport::sim) fn occupy(&mut self, thread: Thread, span: Nanos) -> Nanos {
        let now = self.now;
        self.cost.as_mut().map_or(now, |cost| cost.occupy(thread, now, span))
    }
}

fn reply_bytes(outcome: &CallOutcome) -> u64 {
    CALL_BYTES + outcome.as_ref().map_or(0, |reply| reply.len() as u64)
}
