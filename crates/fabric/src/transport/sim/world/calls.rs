//! Calls on their way to servers and sessions, their replies, and what becomes of those that nobody will answer.

use super::servers::SimServerMemory;
use super::{ConnectionState, Rare, SimServer, Waiting, World};
use crate::addr::{ServerId, SessionId};
use crate::call::{Call, CallError, CallId, CallOutcome, Principal, Target};
use crate::clock::Nanos;
use crate::control::{ControlError, Request};
use crate::error::FabricError;
use crate::exec::GroupId;
use crate::procedure::ProcedureId;
use crate::server::HostAction;
use crate::transport::sim::Order;
use crate::transport::sim::cost::Picos;
use crate::transport::sim::faults::Fault;
use crate::transport::{Inbox, ReplySlot};
use crate::wire;
use smallvec::SmallVec;
use std::cell::RefCell;
use std::sync::Arc;

/// A call on its way.
#[derive(Debug)]
pub(super) struct Arriving {
    pub(super) target: Target,
    pub(super) call: Call,
    /// Whose it is.
    pub(super) group: GroupId,
    /// Its caller died, and it was held up for that.
    pub(super) is_late: bool,
    /// In cost mode: when it reaches the target's NIC, unless that is behind it.
    pub(super) reaches: Option<Picos>,
}

/// A reply on its way, or the news that none comes.
#[derive(Debug)]
pub(super) struct Replying {
    pub(super) to: CallId,
    pub(super) outcome: CallOutcome,
    /// In cost mode: when it reaches the caller's NIC, unless that is behind it.
    pub(super) reaches: Option<Picos>,
}

/// Who answers a call.
#[derive(Clone, Copy, Debug)]
pub(in crate::transport::sim) enum Sender {
    Server(usize),
    Process(GroupId),
}

impl World {
    /// Tells a caller, at that time, that no reply comes.
    fn fail_call(&mut self, at: Nanos, to: CallId, error: CallError) {
        self.schedule_rare(at, Rare::Reply(Box::new(Replying { to, outcome: Err(error), reaches: None })));
    }

    pub(in crate::transport::sim) fn call(
        &mut self,
        group: GroupId,
        target: Target,
        call: Call,
        slot: &Arc<ReplySlot>,
    ) {
        self.mark_call(group, "before", &call);
        self.bury_the_doomed();
        if self.is_dead(group) {
            return;
        }
        self.waiting.insert(call.id, Waiting { slot: Arc::clone(slot), group, target });
        let process = self.process(group);
        let number = process.calls;
        process.calls += 1;
        let kills = |fault: &Fault| match *fault {
            Fault::KillAtCall { at_call, after, .. } if at_call == number => Some(after),
            _ => None,
        };
        match process.faults.iter().find_map(kills) {
            Some(false) => return self.die(group),
            Some(true) => drop(self.fatal.insert(call.id)),
            None => {}
        }
        let process = self.process(group);
        let mute = |fault: &Fault| matches!(fault, Fault::LoseReply { at_call, .. } if *at_call == number);
        let is_muted = process.faults.iter().any(mute);
        if is_muted || matches!(target, Target::Server(id) if self.is_cut(group, id.index())) {
            self.fail_call(self.now + self.config.timeout_ns, call.id, CallError::Unknown);
            if self.rng.bool() {
                return;
            }
            self.muted.insert(call.id);
        }
        let server = match target {
            Target::Server(id) => id.index().min(self.servers.len() - 1),
            Target::Session(_) => 0,
        };
        let mut arriving = Box::new(Arriving { target, call, group, is_late: false, reaches: None });
        let at = match self.price_call(group, server, &mut arriving) {
            Some(at) => at,
            None => self.now + self.latency(server, false),
        };
        self.schedule_rare(at, Rare::Arrive(arriving));
    }

    /// Control calls are marks, before they are made and after they have taken effect.
    fn mark_call(&self, group: GroupId, when: &str, call: &Call) {
        if !self.doom.is_watching() || call.procedure != ProcedureId::CONTROL {
            return;
        }
        if let Ok(request) = wire::decode::<Request>(&call.request) {
            let text = format!("{request:?}");
            let name = text.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default();
            self.doom.hit(group, &format!("{when}-{name}"));
        }
    }

    pub(super) fn arrive(&mut self, mut arriving: Box<Arriving>) {
        if let Some(at) = self.price_arrival(&mut arriving) {
            self.schedule_rare(at, Rare::Arrive(arriving));
            return;
        }
        if !arriving.is_late && self.is_dead(arriving.group) {
            // What the dead have sent comes, comes late, or not at all.
            match self.rng.u8(0..4) {
                0 => return,
                1 => {
                    arriving.is_late = true;
                    let at = self.now + self.rng.u64(0..=self.config.late_ns);
                    return self.schedule_rare(at, Rare::Arrive(arriving));
                }
                _ => {}
            }
        }
        let Arriving { target, call, group, .. } = *arriving;
        self.note(6, call.id.sequence);
        let (name, gives_up) = (call.id, self.now + self.config.timeout_ns);
        match target {
            Target::Server(id) => {
                let server = id.index();
                match self.servers.get(server) {
                    None => {
                        let error = CallError::Failed(FabricError::UnknownServer { server: id }.to_string());
                        self.answer(call.id, Err(error), Sender::Server(0));
                    }
                    Some(gone) if gone.lost => self.fail_call(gives_up, name, CallError::Unknown),
                    Some(_) => {
                        self.tear_all(server);
                        let now = self.now;
                        let SimServer { logic, regions, .. } = &mut self.servers[server];
                        let memory = SimServerMemory { regions: RefCell::new(regions) };
                        let request = self.doom.is_watching().then(|| call.clone());
                        let actions = logic.call(&memory, call, now);
                        self.carry_out(server, actions);
                        if let Some(call) = request {
                            self.mark_call(group, "after", &call);
                            self.bury_the_doomed();
                        }
                        if self.fatal.remove(&name) {
                            self.die(group);
                        }
                    }
                }
            }
            Target::Session(_) if !self.is_admitted(&call) => {
                let error = ControlError::SessionFenced { session: call.id.session };
                self.answer(name, Err(error.into()), Sender::Server(0));
            }
            Target::Session(session) => match self.inboxes.get(&session) {
                Some((_, group)) if self.is_dead(*group) => {
                    self.fail_call(gives_up, name, CallError::Unknown);
                }
                Some((inbox, _)) => inbox.push(call),
                None => self.answer(name, Err(CallError::NoSuchSession { session }), Sender::Server(0)),
            },
        }
    }

    /// Whether the coordinator knows a call's session.
    fn is_admitted(&self, call: &Call) -> bool {
        let CallId { session, term, .. } = call.id;
        let who = Principal { session, term, ticket: call.ticket };
        let coordinator = &self.servers[ServerId::COORDINATOR.index()];
        coordinator.admitted.get(&session).is_some_and(|(admitted, _)| *admitted == who)
    }

    /// The callers of those who will not answer find out by a time-out.
    pub(super) fn give_up_calls(&mut self, of: impl Fn(CallId, Target) -> bool) {
        let at = self.now + self.config.timeout_ns;
        let mut given_up: Vec<CallId> =
            self.waiting.iter().filter(|(id, waiting)| of(**id, waiting.target)).map(|(id, _)| *id).collect();
        // In order, so that what happens does not depend on the order of a hash map.
        given_up.sort_unstable();
        for id in given_up {
            self.fail_call(at, id, CallError::Unknown);
        }
    }

    /// Answers the calls that a session sent to a server which has fenced it.
    pub(super) fn refuse_calls(&mut self, server: usize, session: SessionId, answered: &[CallId]) {
        let target = Target::Server(self.view.servers[server].server);
        let sent = |id: &CallId| id.session == session && !answered.contains(id);
        let mut refused: Vec<CallId> =
            self.waiting.iter().filter(|(_, w)| w.target == target).map(|(id, _)| *id).collect();
        refused.retain(sent);
        refused.sort_unstable();
        for id in refused {
            let error = CallError::Control(ControlError::SessionFenced { session });
            self.fail_call(self.now, id, error);
        }
    }

    pub(super) fn carry_out(&mut self, server: usize, actions: Vec<HostAction>) {
        let answered: SmallVec<[CallId; 2]> = actions.iter().filter_map(HostAction::answers).collect();
        for action in actions {
            match action {
                HostAction::Admit { session, term, ticket, permissions } => {
                    let who = Principal { session, term, ticket };
                    self.servers[server].admitted.insert(session, (who, permissions));
                }
                HostAction::Fence { session } => {
                    self.fence(server, session);
                    self.refuse_calls(server, session, &answered);
                }
                HostAction::Reply { to, outcome } => self.answer(to, outcome, Sender::Server(server)),
                HostAction::Run { call, ticket, procedure, request } => {
                    self.order(Order::Run { server, call, ticket, procedure, request });
                }
            }
        }
    }

    pub(super) fn fence(&mut self, server: usize, session: SessionId) {
        self.note(7, u64::from(session.get()));
        self.servers[server].admitted.remove(&session);
        if server == ServerId::COORDINATOR.index() {
            if let Some((inbox, _)) = self.inboxes.remove(&session) {
                inbox.close();
            }
            self.give_up_calls(|_, target| target == Target::Session(session));
        }
        for connection in 0..self.connections.len() {
            let c = &self.connections[connection];
            if c.session == session && c.server == server {
                self.sever(connection);
                self.connections[connection].state = ConnectionState::Closed;
            }
        }
    }

    pub(in crate::transport::sim) fn procedure_finished(
        &mut self,
        server: usize,
        call: CallId,
        outcome: CallOutcome,
    ) {
        if self.servers[server].lost {
            return;
        }
        let logic = Arc::clone(&self.servers[server].logic);
        let actions = logic.finished(call, outcome);
        self.carry_out(server, actions);
    }

    /// Sends a reply on its way, unless it is to be lost.
    pub(in crate::transport::sim) fn answer(&mut self, to: CallId, outcome: CallOutcome, from: Sender) {
        if self.muted.remove(&to) {
            return;
        }
        if let (Sender::Server(server), Some(waiting)) = (from, self.waiting.get(&to)) {
            if self.is_cut(waiting.group, server) {
                self.counts.cut_off += 1;
                return self.fail_call(self.now + self.config.timeout_ns, to, CallError::Unknown);
            }
        }
        let mut reply = Box::new(Replying { to, outcome, reaches: None });
        let at = match self.price_reply(from, &mut reply) {
            Some(at) => at,
            None => {
                self.now + self.latency(if let Sender::Server(server) = from { server } else { 0 }, false)
            }
        };
        self.schedule_rare(at, Rare::Reply(reply));
    }

    pub(super) fn deliver(&mut self, mut reply: Box<Replying>) {
        if let Some(at) = self.price_delivery(&mut reply) {
            self.schedule_rare(at, Rare::Reply(reply));
            return;
        }
        let Replying { to, outcome, .. } = *reply;
        self.note(8, to.sequence);
        if let Some(waiting) = self.waiting.remove(&to) {
            if !self.is_dead(waiting.group) {
                waiting.slot.set(outcome);
            }
        }
    }

    pub(in crate::transport::sim) fn forget_call(&mut self, id: CallId) {
        self.waiting.remove(&id);
    }

    pub(in crate::transport::sim) fn serve(
        &mut self,
        connection: Option<usize>,
        session: SessionId,
        group: GroupId,
    ) -> Arc<Inbox> {
        // The number of a session that was fenced may be another's by now: its calls are not ours to answer.
        if connection.is_none_or(|connection| self.connections[connection].state == ConnectionState::Closed) {
            return Arc::new(Inbox::closed());
        }
        let (inbox, _) = self.inboxes.entry(session).or_insert_with(|| (Arc::default(), group));
        Arc::clone(inbox)
    }
}
