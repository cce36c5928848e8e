//! Lines that are cut, and reconnects: those that fence the old connection, and those that fail and settle nothing.

use super::{ConnectionState, Event, Rare, What, World};
use crate::call::CallError;
use crate::exec::GroupId;
use crate::transport::ReplySlot;
use crate::transport::sim::faults::Fault;
use std::sync::Arc;

impl World {
    /// Whether nothing passes between a process and a server now.
    pub(super) fn is_cut(&self, group: GroupId, between: usize) -> bool {
        let now = self.now;
        let cuts = |fault: &Fault| match *fault {
            Fault::Cut { client, server, from_ns, for_ns } => {
                client.checked_add(1) == Some(group)
                    && usize::from(server) == between
                    && now >= from_ns
                    && now - from_ns < for_ns
            }
            _ => false,
        };
        self.has_cuts && self.plan.faults.iter().any(cuts)
    }

    /// The same for a connection. One between a server and its own memory is no line.
    pub(super) fn is_cut_off(&self, connection: usize) -> bool {
        let c = &self.connections[connection];
        self.has_cuts && !c.near && self.is_cut(c.group, c.server)
    }

    /// A batch has taken effect, and the completion does not come through.
    pub(super) fn complete_in_vain(&mut self, flight: usize) {
        self.counts.cut_off += 1;
        self.flights[flight].lost = true;
        let flying = self.flying(flight);
        self.schedule(self.now + self.config.timeout_ns, Event::new(What::TimeOut, flying));
    }

    pub(in crate::transport::sim) fn reconnect(&mut self, connection: usize, slot: Arc<ReplySlot>) {
        self.bury_the_doomed();
        let c = &self.connections[connection];
        let (server, near, group) = (c.server, c.near, c.group);
        if self.is_dead(group) {
            return;
        }
        let process = self.process(group);
        let number = process.reconnects;
        process.reconnects += 1;
        let is_refused = |fault: &Fault| match *fault {
            Fault::FailReconnect { nth, times, .. } => number >= nth && number - nth < u64::from(times),
            _ => false,
        };
        let fails = process.faults.iter().any(is_refused) || self.is_cut_off(connection);
        let span = if fails {
            self.rng.u64(0..=self.config.timeout_ns)
        } else {
            self.latency(server, near) + self.latency(server, near)
        };
        self.schedule_rare(self.now + span, Rare::Reconnected { connection, fails, slot });
    }

    pub(super) fn reconnected(&mut self, connection: usize, fails: bool, slot: &ReplySlot) {
        self.note(2, connection as u64);
        let server = self.connections[connection].server;
        if self.servers[server].lost {
            let at_last = Err(CallError::Failed("lost".into()));
            return slot.set(at_last);
        }
        if fails || self.is_cut_off(connection) {
            self.stay_broken(connection);
            return slot.set(Err(CallError::Unknown));
        }
        if !self.config.sabotage.reconnect_without_fence {
            self.sever(connection);
        }
        if self.connections[connection].state == ConnectionState::Broken {
            self.connections[connection].state = ConnectionState::Open;
        }
        slot.set(Ok(Vec::new()));
    }

    /// A reconnect has failed: the server may never have heard of it, so what is in flight may still land, much later even.
    fn stay_broken(&mut self, connection: usize) {
        self.counts.failed_reconnects += 1;
        self.break_off(connection);
        for flight in self.flights_where(|_| true) {
            if self.flights[flight].connection == connection && self.rng.bool() {
                self.delay(flight);
            }
        }
    }
}
