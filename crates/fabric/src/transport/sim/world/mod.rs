//! The simulated world: servers, connections, verbs in flight, and the events that move them.
//!
//! A batch becomes a *flight*. Each of its verbs has a window of virtual time in which it takes effect:
//!
//! 1. `Start`: the verb arrives. A verb of one word takes effect at once. A longer one opens its window and, if another
//!    verb that conflicts with it is open, both are torn: their words fall into pieces with times of their own. A READ may be one
//!    that lasts long ([`SimConfig::long_read_ns`]); then it opens a window even for one word.
//!    A WRITE to a word that an atomic has changed which is still on its way may be lost (contract, rule 4).
//! 2. `Piece`: some words of a torn verb take effect.
//! 3. `End`: what has not taken effect yet does. The batch's next verb starts, after a full round trip if a fence stands
//!    between them; behind the last one the completion is on its way.
//! 4. `Complete`: the client learns of it.
//!
//! When these come is the adversary's choice, or in cost mode the model's (`priced`).
//!
//! Invariant: two conflicting verbs of which at least one is longer than a word are never both open and whole. So whatever
//! the contract allows to be observed can be observed, and what cannot be observed costs nothing.

mod calls;
mod cuts;
mod effects;
mod event;
mod flight;
mod looks;
mod priced;
mod queue;
mod servers;

use super::cost::{Cost, Thread};
use super::doom::Doom;
use super::faults::{Fault, FaultPlan};
use super::memory::Memory;
use super::{Order, SimConfig};
use crate::addr::{ServerId, SessionId};
use crate::call::{CallId, Principal, Target};
use crate::clock::Nanos;
use crate::endpoint::ClockSkew;
use crate::error::FabricError;
use crate::exec::GroupId;
use crate::region::{Permissions, RegionTable};
use crate::server::ServerLogic;
use crate::transport::{Inbox, ReplySlot, View};
pub(super) use calls::Sender;
use effects::RecentAtomic;
use event::{Event, Flying, Rare, What};
use fastrand::Rng;
pub(super) use flight::{Action, Bytes, Landed, Masks, SimVerb, SimVerbs};
use flight::{Flight, Trip};
use queue::Queue;
use rustc_hash::{FxHashMap, FxHashSet, FxHasher};
use slab::Slab;
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::hash::Hasher;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Waker;

/// One READ in so many lasts long, where READs do.
const LONG_READ_ONE_IN: u32 = 16;

/// The group of a server's procedures.
pub(super) fn server_group(server: usize) -> GroupId {
    u32::MAX - u32::try_from(server).unwrap_or(0)
}

/// The server whose procedures are this group, if it is one.
pub(super) fn server_of(group: GroupId) -> Option<usize> {
    let server = u32::MAX - group;
    (server <= u32::from(ServerId::MAX)).then_some(server as usize)
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ConnectionState {
    Open,
    /// A completion was lost: nothing can be posted until it is reconnected.
    Broken,
    /// The session was fenced here, or never admitted.
    Closed,
}

#[derive(Debug)]
struct Connection {
    session: SessionId,
    group: GroupId,
    process: usize,
    server: usize,
    state: ConnectionState,
    near: bool,
    /// In cost mode: the client's NIC and the endpoint's thread.
    nic: usize,
    thread: Option<Thread>,
}

/// A server: its logic, its memory, and who may come.
pub(super) struct SimServer {
    pub(super) logic: Arc<dyn ServerLogic>,
    pub(super) table: RegionTable,
    regions: Vec<Option<Memory>>,
    admitted: FxHashMap<SessionId, (Principal, Permissions)>,
    /// Flights whose current verb is longer than a word and open here.
    open: Vec<usize>,
    lost: bool,
    /// How often its logic has started on its memory.
    life: u64,
}

/// A call whose reply has not come.
#[derive(Debug)]
struct Waiting {
    slot: Arc<ReplySlot>,
    group: GroupId,
    target: Target,
}

#[derive(Default, Debug)]
struct Process {
    verbs: u64,
    calls: u64,
    reconnects: u64,
    dead: bool,
    faults: Vec<Fault>,
}

impl Process {
    /// Counts verbs that the process posts; returns the faults that are due.
    fn count_verbs(&mut self, verbs: u64) -> SmallVec<[Fault; 1]> {
        let due = self.verbs..self.verbs + verbs;
        self.verbs = due.end;
        if self.faults.is_empty() {
            return SmallVec::new();
        }
        let is_due = |fault: &&Fault| match fault {
            Fault::Kill { at_verb, .. }
            | Fault::Pause { at_verb, .. }
            | Fault::LoseCompletion { at_verb, .. } => due.contains(at_verb),
            _ => false,
        };
        self.faults.iter().filter(is_due).copied().collect()
    }
}

/// What happened in a world, in numbers.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct SimCounts {
    /// Events.
    pub events: u64,
    /// Verbs that took effect.
    pub verbs: u64,
    /// Of these, torn ones.
    pub torn: u64,
    /// Verbs that took effect after their client had been told `Unknown`, had died, or had been paused.
    pub late: u64,
    /// Verbs that never took effect, or only in part.
    pub cut: u64,
    /// Processes that died.
    pub deaths: u64,
    /// Connections that broke, each with the verbs in flight on it.
    pub broken: u64,
    /// Servers that were restarted.
    pub restarts: u64,
    /// Reconnects that failed.
    pub failed_reconnects: u64,
    /// Completions and replies that a cut line kept back.
    pub cut_off: u64,
    /// READs and looks that lasted long.
    pub long: u64,
    /// Looks.
    pub looks: u64,
}

pub(super) struct World {
    pub(super) config: SimConfig,
    pub(super) now: Nanos,
    pub(super) counts: SimCounts,
    /// What the runner has to do, since it owns the tasks.
    pub(super) orders: Vec<Order>,
    /// Raised with every order.
    ordered: Arc<AtomicBool>,
    pub(super) servers: Vec<SimServer>,
    pub(super) view: View,
    events: Queue<Event>,
    rare: Slab<Rare>,
    /// What things take; without it, the adversary decides.
    pub(super) cost: Option<Box<Cost>>,
    flights: Slab<Flight>,
    /// Atomics that changed a word and have not completed yet, or have just.
    recent_atomics: VecDeque<RecentAtomic>,
    flights_made: u32,
    connections: Vec<Connection>,
    waiting: FxHashMap<CallId, Waiting>,
    inboxes: FxHashMap<SessionId, (Arc<Inbox>, GroupId)>,
    /// Calls whose reply will be lost.
    muted: FxHashSet<CallId>,
    processes: Vec<Process>,
    /// Which of them each group is.
    process_of: FxHashMap<GroupId, usize>,
    /// Calls whose caller dies when they have taken effect.
    fatal: FxHashSet<CallId>,
    /// Who dies at marks.
    doom: Rc<Doom>,
    /// Whether lines are ever cut, so that asking costs nothing where they are not.
    has_cuts: bool,
    plan: FaultPlan,
    rng: Rng,
    /// A look is under way, inside which the world goes on.
    looking: bool,
    trace: FxHasher,
}

impl World {
    pub(super) fn new(
        config: SimConfig,
        plan: FaultPlan,
        servers: Vec<SimServer>,
        view: View,
        (ordered, doom): (Arc<AtomicBool>, Rc<Doom>),
    ) -> Self {
        let rng = Rng::with_seed(config.seed);
        // Who touches memory itself has no line to it that could be cut.
        let is_immediate = config.capabilities.immediate;
        let cores = servers.iter().map(|server| server.logic.cores());
        let cost = config.pricing.clone().map(|pricing| Box::new(Cost::new(pricing, cores, config.seed)));
        let mut world = Self {
            config,
            now: 0,
            counts: SimCounts::default(),
            orders: Vec::new(),
            ordered,
            servers,
            view,
            events: Queue::new(),
            rare: Slab::new(),
            cost,
            flights: Slab::new(),
            recent_atomics: VecDeque::new(),
            flights_made: 0,
            connections: Vec::new(),
            waiting: FxHashMap::default(),
            inboxes: FxHashMap::default(),
            muted: FxHashSet::default(),
            processes: Vec::new(),
            process_of: FxHashMap::default(),
            fatal: FxHashSet::default(),
            doom,
            has_cuts: !is_immediate && plan.faults.iter().any(|fault| matches!(fault, Fault::Cut { .. })),
            plan,
            rng,
            looking: false,
            trace: FxHasher::default(),
        };
        for fault in world.plan.faults.clone() {
            let (server, at_ns, event) = match fault {
                Fault::LoseServer { server, at_ns } => {
                    (server, at_ns, Rare::LoseServer { server: usize::from(server) })
                }
                Fault::RestartServer { server, at_ns } => {
                    (server, at_ns, Rare::RestartServer { server: usize::from(server) })
                }
                _ => continue,
            };
            if usize::from(server) < world.servers.len() {
                world.schedule_rare(at_ns, event);
            }
        }
        world
    }

    pub(super) fn trace_hash(&self) -> u64 {
        self.trace.finish()
    }

    /// READs next to each other have no order where the transport does not claim `ordered_reads`. `companions` go along.
    pub(super) fn shuffle_reads<T>(&mut self, verbs: &mut [SimVerb], companions: &mut [T]) {
        let mut from = 0;
        while from < verbs.len() {
            let run = verbs[from..].iter().take_while(|verb| !verb.mutates()).count();
            for n in (1..run).rev() {
                let other = self.rng.usize(0..=n);
                verbs.swap(from + n, from + other);
                companions.swap(from + n, from + other);
            }
            from += run.max(1);
        }
    }

    fn order(&mut self, order: Order) {
        self.orders.push(order);
        self.ordered.store(true, Ordering::Relaxed);
    }

    #[inline]
    fn schedule(&mut self, at: Nanos, event: Event) {
        self.events.push(at, event);
    }

    fn note(&mut self, kind: u64, what: u64) {
        self.trace.write_u64(self.now);
        self.trace.write_u64(kind << 56 ^ what);
    }

    /// The next event, unless it is due after `until`.
    #[inline]
    pub(super) fn next_event(&mut self, until: Nanos) -> Option<(Nanos, Event)> {
        self.events.pop(until)
    }

    /// Lets an event happen.
    pub(super) fn happen(&mut self, at: Nanos, event: Event) {
        self.now = at;
        self.counts.events += 1;
        let flying = event.flying();
        match event.what() {
            What::Send => {
                if let Some(flight) = self.due(flying) {
                    self.send(flight);
                }
            }
            What::Start => {
                if let Some(flight) = self.due(flying) {
                    self.start(flight);
                }
            }
            What::Piece => {
                let (verb, piece) = event.part();
                if let Some(flight) = self.due(flying).filter(|key| self.flights[*key].next == verb) {
                    self.apply_piece(flight, piece);
                }
            }
            What::End => {
                if let Some(flight) = self.due(flying) {
                    self.end(flight);
                }
            }
            What::Complete => {
                if let Some(flight) = self.find(flying) {
                    if self.is_cut_off(self.flights[flight].connection) {
                        self.complete_in_vain(flight);
                    } else {
                        self.complete(flight);
                    }
                }
            }
            What::TimeOut => {
                if let Some(flight) = self.find(flying) {
                    self.time_out(flight);
                }
            }
            What::Rare => self.happen_rarely(event.key()),
        }
    }

    #[cold]
    fn happen_rarely(&mut self, key: usize) {
        match self.rare.remove(key) {
            Rare::Arrive(call) => self.arrive(call),
            Rare::Reply(reply) => self.deliver(reply),
            Rare::LoseServer { server } => self.lose_server(server),
            Rare::RestartServer { server } => self.restart_server(server),
            Rare::Resume { group } => self.order(Order::Resume(group)),
            Rare::Reconnected { connection, fails, slot } => self.reconnected(connection, fails, &slot),
        }
    }

    fn schedule_rare(&mut self, at: Nanos, event: Rare) {
        let key = self.rare.insert(event);
        self.schedule(at, Event::rare(key));
    }

    /// The flight, if it is still there.
    fn find(&self, flying: Flying) -> Option<usize> {
        let key = flying.key as usize;
        self.flights.get(key).filter(|flight| flight.serial == flying.serial).map(|_| key)
    }

    /// The flight, if it has effects to come.
    fn due(&self, flying: Flying) -> Option<usize> {
        self.find(flying).filter(|key| !self.flights[*key].settled)
    }

    fn flying(&self, key: usize) -> Flying {
        Flying { key: u32::try_from(key).unwrap_or(u32::MAX), serial: self.flights[key].serial }
    }

    /// Voids the events of a flight.
    fn renew(&mut self, key: usize) -> Flying {
        self.flights_made = self.flights_made.wrapping_add(1);
        self.flights[key].serial = self.flights_made;
        self.flying(key)
    }

    // --- time ---

    /// How long a message takes one way between a connection's ends.
    fn latency(&mut self, server: usize, near: bool) -> Nanos {
        if let Some(cost) = &self.cost {
            return if near { 0 } else { cost.one_way(self.slowness(server)) };
        }
        let latency = self.config.latency;
        if near {
            return self.rng.u64(latency.near_ns / 2..=latency.near_ns);
        }
        let mut ns = self.rng.u64(latency.min_ns..=latency.max_ns);
        if latency.tail_one_in > 0 && self.rng.u32(0..latency.tail_one_in) == 0 {
            ns += self.rng.u64(0..=latency.tail_ns);
        }
        ns * self.slowness(server)
    }

    fn slowness(&self, slow: usize) -> u64 {
        let now = self.now;
        let factor = |fault: &Fault| match *fault {
            Fault::SlowServer { server, from_ns, for_ns, factor }
                if usize::from(server) == slow && now >= from_ns && now - from_ns < for_ns =>
            {
                Some(u64::from(factor.max(1)))
            }
            _ => None,
        };
        self.plan.faults.iter().filter_map(factor).product()
    }

    // --- processes and their faults ---

    pub(super) fn clock_skew(&self, group: GroupId) -> ClockSkew {
        let skew = |fault: &Fault| match *fault {
            Fault::SkewClock { client, ahead_ns, drift_ppm } if client.checked_add(1) == Some(group) => {
                Some(ClockSkew { ahead_ns, drift_ppm })
            }
            _ => None,
        };
        self.plan.faults.iter().find_map(skew).unwrap_or_default()
    }

    /// The number of a group's process.
    fn process_number(&mut self, group: GroupId) -> usize {
        let (plan, processes) = (&self.plan, &mut self.processes);
        *self.process_of.entry(group).or_insert_with(|| {
            let of_group = |fault: &&Fault| match fault {
                Fault::Kill { client, .. }
                | Fault::KillAtCall { client, .. }
                | Fault::FailReconnect { client, .. }
                | Fault::Pause { client, .. }
                | Fault::LoseCompletion { client, .. }
                | Fault::LoseReply { client, .. } => client.checked_add(1) == Some(group),
                _ => false,
            };
            let faults = plan.faults.iter().filter(of_group).copied().collect();
            processes.push(Process { faults, ..Process::default() });
            processes.len() - 1
        })
    }

    fn process(&mut self, group: GroupId) -> &mut Process {
        let number = self.process_number(group);
        &mut self.processes[number]
    }

    fn is_dead(&self, group: GroupId) -> bool {
        self.process_of.get(&group).is_some_and(|number| self.processes[*number].dead)
    }

    /// Whoever is doomed dies.
    pub(super) fn bury_the_doomed(&mut self) {
        while let Some(group) = self.doom.next() {
            self.die(group);
        }
    }

    /// A process dies of a fault.
    fn die(&mut self, group: GroupId) {
        self.counts.deaths += u64::from(!self.is_dead(group));
        self.exit(group);
    }

    /// A process ends: what it has in flight lands, is cut, or comes late.
    pub(super) fn exit(&mut self, group: GroupId) {
        if std::mem::replace(&mut self.process(group).dead, true) {
            return;
        }
        self.note(1, u64::from(group));
        self.order(Order::Kill(group));
        let sessions = self.inboxes.iter().filter(|(_, (_, of))| *of == group).map(|(session, _)| *session);
        let sessions: SmallVec<[SessionId; 2]> = sessions.collect();
        self.give_up_calls(
            |_, target| matches!(target, Target::Session(session) if sessions.contains(&session)),
        );
        for flight in self.flights_where(|c| c.group == group) {
            match self.rng.u8(0..3) {
                0 => self.cut(flight),
                1 => self.delay(flight),
                _ => {}
            }
        }
    }

    fn flights_where(&self, of: impl Fn(&Connection) -> bool) -> Vec<usize> {
        let ours = |(_, f): &(usize, &Flight)| !f.settled && of(&self.connections[f.connection]);
        self.flights.iter().filter(ours).map(|(key, _)| key).collect()
    }

    /// The rest of a flight never takes effect; of an open verb, some words may.
    fn cut(&mut self, flight: usize) {
        if self.flights[flight].open {
            if self.config.tear && self.rng.bool() {
                self.tear(flight);
            }
            self.close(flight);
        }
        self.counts.cut += 1;
        self.settle(flight);
    }

    /// A flight that has not begun (its next verb) begins much later.
    fn delay(&mut self, flight: usize) {
        if self.flights[flight].open {
            return;
        }
        let at = self.now + self.rng.u64(0..=self.config.late_ns);
        let flying = self.renew(flight);
        self.schedule(at, Event::new(What::Start, flying));
        self.counts.late += 1;
    }

    /// No more effects of this flight. It stays until its client has been told, unless there is nobody to tell.
    fn settle(&mut self, key: usize) {
        let flight = &mut self.flights[key];
        flight.settled = true;
        if flight.detached {
            self.flights.remove(key);
        }
    }

    // --- connections ---

    pub(super) fn connect(
        &mut self,
        who: Principal,
        group: GroupId,
        server: usize,
        near: bool,
        thread: Option<Thread>,
    ) -> (usize, RegionTable) {
        let session = who.session;
        let admitted = self.servers[server].admitted.get(&session);
        let permissions = admitted.filter(|(of, _)| *of == who).map(|(_, permissions)| *permissions);
        let state = if permissions.is_some() { ConnectionState::Open } else { ConnectionState::Closed };
        let nic = self.cost.as_mut().map_or(0, |cost| cost.nic_of(group));
        let process = self.process_number(group);
        self.connections.push(Connection { session, group, process, server, state, near, nic, thread });
        // Nobody's endpoints have no rights; those of a fenced session are told that it was.
        let otherwise = if session.is_none() { Permissions::NONE } else { Permissions::ALL };
        let table = self.servers[server].table.restricted_to(permissions.unwrap_or(otherwise));
        (self.connections.len() - 1, table)
    }

    /// Nothing that is in flight on the connection lands after this: some of it lands now, the rest never.
    fn sever(&mut self, connection: usize) {
        for flight in self.flights_where(|_| true) {
            if self.flights.get(flight).is_none_or(|f| f.connection != connection) {
                continue;
            }
            if self.rng.bool() {
                self.finish_at_once(flight);
            } else {
                self.cut(flight);
            }
            let server = self.server_id(connection);
            if self.flights.contains(flight) {
                self.land(flight, Landed::Failed(FabricError::Unknown { server }));
            }
        }
    }

    fn finish_at_once(&mut self, flight: usize) {
        if self.flights[flight].open {
            self.apply_rest(flight);
            self.close(flight);
            self.flights[flight].next += 1;
        }
        while self.flights[flight].next < self.flights[flight].verbs.len() {
            self.tear_conflicting(flight);
            self.apply_whole(flight);
            self.flights[flight].next += 1;
        }
        self.counts.late += 1;
        self.settle(flight);
    }

    fn server_id(&self, connection: usize) -> ServerId {
        self.view.servers[self.connections[connection].server].server
    }

    /// What a post on this connection is refused with, if it is.
    fn refusal(&self, connection: usize) -> Option<FabricError> {
        let c = &self.connections[connection];
        match c.state {
            ConnectionState::Open => None,
            ConnectionState::Broken => Some(FabricError::Disconnected { server: self.server_id(connection) }),
            ConnectionState::Closed => Some(FabricError::Fenced { session: c.session }),
        }
    }

    pub(super) fn why_not_reconnected(&self, connection: usize) -> Option<FabricError> {
        if self.servers[self.connections[connection].server].lost {
            return Some(FabricError::ServerLost { server: self.server_id(connection) });
        }
        self.refusal(connection)
    }

    // --- verbs ---

    /// Posts a batch; the key of its flight, or why it was not posted. `None`: the process is dead, nothing will come.
    pub(super) fn post(&mut self, connection: usize, verbs: SimVerbs) -> Result<Option<usize>, FabricError> {
        if let Some(error) = self.refusal(connection) {
            return Err(error);
        }
        self.bury_the_doomed();
        let Connection { group, process, .. } = self.connections[connection];
        let process = &mut self.processes[process];
        if process.dead {
            return Ok(None);
        }
        let posted_before = process.verbs;
        if self.doom.is_watching() && verbs[0].is_intent() {
            self.doom.hit(group, "amid-intent");
            if self.doom.is_doomed(group) {
                let cut_at = self.rng.usize(1..=verbs.len());
                self.launch_of_the_dead(connection, verbs, Some(cut_at));
                self.bury_the_doomed();
                return Ok(None);
            }
        }
        let process = self.process(group);
        let mut lose = None;
        for fault in process.count_verbs(verbs.len() as u64) {
            match fault {
                Fault::Kill { at_verb, .. } => {
                    // The batch is not posted, or posted whole, or dies with its client in the middle.
                    let cut_at = usize::try_from(at_verb - posted_before).unwrap_or(0);
                    let how = self.rng.u8(0..3);
                    if how > 0 {
                        self.launch_of_the_dead(connection, verbs, (how == 1).then_some(cut_at));
                    }
                    self.die(group);
                    return Ok(None);
                }
                Fault::Pause { for_ns, .. } => {
                    self.note(3, u64::from(group));
                    self.order(Order::Pause(group));
                    self.schedule_rare(self.now + for_ns, Rare::Resume { group });
                }
                // Who carries out verbs itself knows what became of them.
                Fault::LoseCompletion { late_ns, .. } if !self.config.capabilities.immediate => {
                    lose = Some(late_ns);
                }
                _ => {}
            }
        }
        let flight = self.launch(connection, verbs);
        if lose.is_none() && self.is_cut_off(connection) {
            lose = Some(self.config.late_ns);
        }
        if let Some(late_ns) = lose {
            self.lose_completion(flight, late_ns);
        }
        Ok(Some(flight))
    }

    /// What somebody posts that dies meanwhile: all of it, or so many verbs.
    fn launch_of_the_dead(&mut self, connection: usize, verbs: SimVerbs, cut_at: Option<usize>) {
        let flight = self.launch(connection, verbs);
        self.flights[flight].detached = true;
        self.flights[flight].cut_at = cut_at;
    }

    fn launch(&mut self, connection: usize, verbs: SimVerbs) -> usize {
        self.flights_made = self.flights_made.wrapping_add(1);
        if let Some(memory) = verbs[0].region_of(&self.servers[self.connections[connection].server]) {
            memory.prefetch(verbs[0].offset, verbs[0].len());
        }
        let flight = Flight {
            serial: self.flights_made,
            connection,
            verbs,
            next: 0,
            open: false,
            ends_at: 0,
            torn: None,
            settled: false,
            landed: None,
            waker: None,
            detached: false,
            lost: false,
            cut_at: None,
            trip: Trip::default(),
        };
        let key = self.flights.insert(flight);
        if self.cost.is_some() {
            self.depart(key);
            return key;
        }
        let (server, near) = (self.connections[connection].server, self.connections[connection].near);
        let at = self.now + self.latency(server, near);
        let flying = self.flying(key);
        self.schedule(at, Event::new(What::Start, flying));
        key
    }

    fn lose_completion(&mut self, flight: usize, late_ns: Nanos) {
        self.flights[flight].lost = true;
        let at = self.now + self.config.timeout_ns;
        match self.rng.u8(0..3) {
            // It takes effect in time, and nobody learns of it.
            0 => {}
            // It never arrives.
            1 => self.cut(flight),
            // It comes late.
            _ => {
                let flying = self.renew(flight);
                let late = at + self.rng.u64(0..=late_ns);
                self.schedule(late, Event::new(What::Start, flying));
                self.counts.late += 1;
            }
        }
        let flying = self.flying(flight);
        self.schedule(at, Event::new(What::TimeOut, flying));
    }

    /// The client gives up on a flight: its outcome is unknown, and so is that of all else on the connection.
    fn time_out(&mut self, flight: usize) {
        self.break_off(self.flights[flight].connection);
    }

    /// The outcome of all that is in flight on a connection is unknown, and it is of no use until it is reconnected.
    fn break_off(&mut self, connection: usize) {
        self.note(4, connection as u64);
        if self.connections[connection].state == ConnectionState::Open {
            self.connections[connection].state = ConnectionState::Broken;
            self.counts.broken += 1;
        }
        let error = FabricError::Unknown { server: self.server_id(connection) };
        let same = |(_, f): &(usize, &Flight)| f.connection == connection && f.landed.is_none();
        let keys: Vec<usize> = self.flights.iter().filter(same).map(|(key, _)| key).collect();
        for key in keys {
            self.flights[key].lost = true;
            self.land(key, Landed::Failed(error.clone()));
        }
    }

    /// The client learns how its flight ended.
    fn land(&mut self, key: usize, landed: Landed) {
        let flight = &mut self.flights[key];
        if flight.landed.is_some() {
            return;
        }
        flight.landed = Some(landed);
        if let Some(waker) = flight.waker.take() {
            waker.wake();
        }
        if flight.detached && flight.settled {
            self.flights.remove(key);
        }
    }

    /// Takes the verbs of a flight that has landed, with how.
    pub(super) fn collect(&mut self, key: usize, waker: &Waker) -> Option<(Landed, SimVerbs)> {
        let flight = &mut self.flights[key];
        if flight.landed.is_none() {
            flight.waker = Some(waker.clone());
            return None;
        }
        if flight.settled {
            let Flight { landed, verbs, .. } = self.flights.remove(key);
            return landed.map(|landed| (landed, verbs));
        }
        // A late effect needs its verbs still; a failed flight's results are not looked at.
        flight.detached = true;
        flight.landed.clone().map(|landed| (landed, SimVerbs::new()))
    }

    pub(super) fn detach(&mut self, key: usize) {
        let flight = &mut self.flights[key];
        flight.detached = true;
        flight.waker = None;
        if flight.settled && flight.landed.is_some() {
            self.flights.remove(key);
        }
    }

    fn start(&mut self, key: usize) {
        let connection = &self.connections[self.flights[key].connection];
        let (server, near) = (connection.server, connection.near);
        if self.servers[server].lost {
            self.give_up(key);
            return;
        }
        if self.cost.is_some() && !self.admit(key) {
            return;
        }
        self.tear_conflicting(key);
        let long = self.draw_long_read(key);
        let flight = &self.flights[key];
        let verb = &flight.verbs[flight.next];
        let is_instant = !self.config.tear || (verb.in_one_word() && long.is_none());
        let (cut_here, instant) = (flight.cut_at == Some(flight.next), is_instant);
        if instant && cut_here {
            self.cut(key);
            return;
        }
        if instant {
            self.apply_whole(key);
            self.next_verb(key);
            return;
        }
        let window = match self.spread(key).or(long) {
            Some(window) => window,
            None => self.rng.u64(1..=self.config.window_ns) * if near { 1 } else { self.slowness(server) },
        };
        let ends_at = self.now + window;
        let flight = &mut self.flights[key];
        (flight.open, flight.ends_at) = (true, ends_at);
        self.servers[server].open.push(key);
        if cut_here {
            self.cut(key);
            return;
        }
        // `tear_conflicting` has torn those that were open before; if there are any, this one is torn too.
        if self.has_open_conflict(key) {
            self.cut_up(key);
        }
        let flying = self.flying(key);
        self.schedule(ends_at, Event::new(What::End, flying));
    }

    /// How long the current verb of a flight lasts, if it is a READ and one of those that last long.
    fn draw_long_read(&mut self, key: usize) -> Option<Nanos> {
        let most = self.config.long_read_ns;
        // Worlds without them draw nothing, so that their seeds stay what they were.
        if most == 0 || !self.config.tear || self.cost.is_some() {
            return None;
        }
        let flight = &self.flights[key];
        if flight.verbs[flight.next].mutates() || self.rng.u32(0..LONG_READ_ONE_IN) != 0 {
            return None;
        }
        self.counts.long += 1;
        Some(self.rng.u64(1..=most))
    }

    fn end(&mut self, key: usize) {
        self.apply_rest(key);
        self.close(key);
        self.next_verb(key);
    }

    fn close(&mut self, key: usize) {
        let flight = &mut self.flights[key];
        flight.open = false;
        flight.torn = None;
        let server = self.connections[flight.connection].server;
        self.servers[server].open.retain(|k| *k != key);
    }

    fn next_verb(&mut self, key: usize) {
        if self.cost.is_some() {
            return self.priced_next_verb(key);
        }
        let connection = &self.connections[self.flights[key].connection];
        let (server, near) = (connection.server, connection.near);
        let flight = &mut self.flights[key];
        flight.next += 1;
        if let Some(verb) = flight.verbs.get(flight.next) {
            let fenced = verb.fence_before;
            let mut at = self.now + self.rng.u64(0..=self.config.latency.near_ns);
            if fenced {
                at += self.latency(server, near) + self.latency(server, near);
            }
            let flying = self.flying(key);
            self.schedule(at, Event::new(What::Start, flying));
            return;
        }
        let lost = flight.lost;
        self.settle(key);
        if !lost && self.flights.contains(key) {
            let at = self.now + self.latency(server, near);
            let flying = self.flying(key);
            self.schedule(at, Event::new(What::Complete, flying));
        }
    }
}
