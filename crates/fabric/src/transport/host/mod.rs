//! A memory server in this process: its logic, its mapped memory, and what every transport does on its side.
//!
//! The logic decides ([`ServerLogic`]), the host carries out: it opens and closes gates, answers calls, runs procedures on
//! threads of its own (as many as the server has cores). Who the clients are, it does not know: threads of this process
//! (`local`) or processes that reach it through a socket (`shm`).
//!
//! Invariant: a call and the actions that come of it are one *turn*; turns follow each other. Locks are taken in the order
//! turn, admitted, serving, waiting, and none is held while a fence waits, except the turn.

pub(crate) mod gates;
pub(crate) mod regions;
#[cfg(test)]
pub(crate) mod tests;
mod workers;

use super::Inbox;
use super::verbs::loopback::Loopback;
use crate::addr::{ServerId, SessionId};
use crate::call::{Call, CallError, CallId, CallOutcome, Principal, Target};
use crate::clock::RealClock;
use crate::control::{ControlError, Request};
use crate::error::FabricError;
use crate::exec::lock;
use crate::procedure::ProcedureId;
use crate::rarely::Rarely;
use crate::region::{Identity, Permissions, RegionTable};
use crate::server::{HostAction, ServerLogic, StartError};
use crate::status::{Pages, ServerStatus, Tables, Traffic};
use crate::wake::Bell;
use crate::wire;
use gates::{Gate, Gates, Holder};
use regions::Regions;
use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;
use std::collections::hash_map::Entry;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use workers::{Job, Workers};

/// Who a call came from or goes to: a process behind a socket, by number, or [`HERE`].
pub(crate) type PeerId = u64;

/// The threads of this process.
pub(crate) const HERE: PeerId = 0;

/// Somebody who waits for the answer to a call.
pub(crate) trait Caller: Send + Sync + fmt::Debug {
    /// The call has ended.
    fn answer(&self, to: CallId, outcome: CallOutcome);

    /// Where it is, for people.
    fn whence(&self) -> String {
        "this process".to_owned()
    }
}

/// A process that serves calls to its sessions.
pub(crate) trait SessionServer: Send + Sync + fmt::Debug {
    /// A call came for a session that it serves.
    fn incoming(&self, session: SessionId, term: u64, call: Call);
    /// A session that it served has ended.
    fn ended(&self, session: SessionId, term: u64);
    /// How many bytes wait for it to read them.
    fn unread(&self) -> usize;
}

/// Where calls to a session go.
#[derive(Clone, Debug)]
enum Serving {
    Here(Arc<Inbox>),
    Peer(Arc<dyn SessionServer>),
}

impl Serving {
    fn incoming(&self, session: SessionId, term: u64, call: Call) {
        match self {
            Self::Here(inbox) => inbox.push(call),
            Self::Peer(peer) => peer.incoming(session, term, call),
        }
    }

    fn ended(&self, session: SessionId, term: u64) {
        match self {
            Self::Here(inbox) => inbox.close(),
            Self::Peer(peer) => peer.ended(session, term),
        }
    }

    /// Whether more calls wait to be read than it should be sent.
    fn is_behind(&self) -> bool {
        matches!(self, Self::Peer(peer) if peer.unread() > MAX_UNREAD_BYTES)
    }
}

#[derive(Debug)]
struct Server {
    term: u64,
    peer: PeerId,
    serving: Serving,
}

/// A call that has not been answered, and those who asked: one may ask again by another way, and whichever is heard first, none of
/// them waits in vain.
#[derive(Debug)]
struct Waiting {
    target: Target,
    /// Who asked first.
    by: PeerId,
    askers: SmallVec<[(PeerId, Arc<dyn Caller>); 1]>,
}

/// Of those who ask the same again and again, so many are answered.
const MAX_ASKERS: usize = 16;

/// How many calls of one process may wait for sessions to answer: sessions may take as long as they like.
const MAX_WAITING: u32 = 16 << 10;
/// How many calls of all processes may wait; one that has fewer than its share is served nevertheless.
const MAX_WAITING_OF_ALL: usize = 64 << 10;
const SHARE_WAITING: u32 = 128;
/// Calls that a session's process has not read: beyond so many bytes it is sent no more.
const MAX_UNREAD_BYTES: usize = 16 << 20;

/// The calls that have not been answered.
#[derive(Default, Debug)]
struct AllWaiting {
    calls: FxHashMap<CallId, Waiting>,
    /// How many of them each process asked first.
    by: FxHashMap<PeerId, u32>,
}

impl AllWaiting {
    /// Whether a call of that process may wait: it does already, or there is room.
    fn check_room(&self, id: CallId, peer: PeerId) -> Result<(), CallError> {
        let own = self.by.get(&peer).copied().unwrap_or(0);
        let is_full = own >= MAX_WAITING || (own >= SHARE_WAITING && self.calls.len() >= MAX_WAITING_OF_ALL);
        if is_full && peer != HERE && !self.calls.contains_key(&id) {
            return Err(CallError::Busy { queued: own });
        }
        Ok(())
    }

    /// There is room for it.
    fn insert(&mut self, id: CallId, target: Target, peer: PeerId, caller: Arc<dyn Caller>) {
        let waiting = self.calls.entry(id).or_insert_with(|| {
            *self.by.entry(peer).or_default() += 1;
            Waiting { target, by: peer, askers: SmallVec::new() }
        });
        if waiting.askers.len() == MAX_ASKERS {
            waiting.askers.remove(0);
        }
        waiting.askers.push((peer, caller));
    }

    fn remove(&mut self, id: CallId) -> Option<Waiting> {
        let waiting = self.calls.remove(&id)?;
        Self::forget(&mut self.by, waiting.by);
        Some(waiting)
    }

    fn retain(&mut self, mut stays: impl FnMut(CallId, &mut Waiting) -> bool) {
        let by = &mut self.by;
        self.calls.retain(|id, waiting| {
            let stays = stays(*id, waiting);
            if !stays {
                Self::forget(by, waiting.by);
            }
            stays
        });
    }

    fn forget(by: &mut FxHashMap<PeerId, u32>, peer: PeerId) {
        if let Entry::Occupied(mut count) = by.entry(peer) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }
}

/// A memory server in this process.
pub(crate) struct Host {
    identity: Identity,
    logic: Arc<dyn ServerLogic>,
    memory: Arc<Regions>,
    table: RegionTable,
    gates: Gates,
    clock: RealClock,
    /// Held while a call is answered and its actions are carried out: the logic counts on their order.
    turn: Mutex<()>,
    /// Who may use the server, with the gates to close when it may no longer.
    admitted: Mutex<FxHashMap<SessionId, Admitted>>,
    /// (Coordinator) Who answers calls to a session.
    serving: Mutex<FxHashMap<SessionId, Server>>,
    /// Calls that have not been answered.
    waiting: Mutex<AllWaiting>,
    /// From which process each session was last heard of.
    callers: Mutex<FxHashMap<SessionId, (u64, PeerId)>>,
    workers: Mutex<Option<Workers>>,
    /// How many calls have come.
    calls: AtomicU64,
    /// By which procedures take part in the atomics of an RDMA device.
    loopback: OnceLock<Arc<Loopback>>,
    evictions: Rarely,
    /// Rings when gates of a session were closed: whoever serves connections behind them ends those.
    fenced: OnceLock<Arc<Bell>>,
}

#[derive(Debug)]
struct Admitted {
    term: u64,
    ticket: u64,
    permissions: Permissions,
    gates: Vec<Passage>,
}

impl Admitted {
    /// Whether it is this holder of the number that was admitted, and no other who says so.
    fn is(&self, who: Principal) -> bool {
        (self.term, self.ticket) == (who.term, who.ticket)
    }
}

/// A gate that was given out, and who may have to be ended to close it.
#[derive(Clone, Debug)]
struct Passage {
    gate: Gate,
    holder: Option<Arc<dyn Holder>>,
}

impl Passage {
    fn close(&self) {
        self.gate.close(self.holder.as_deref());
    }
}

/// What a new connection got.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) gate: Gate,
    pub(crate) permissions: Permissions,
}

impl Host {
    /// Starts the logic on memory that nobody else uses.
    pub(crate) fn start(
        logic: Arc<dyn ServerLogic>,
        memory: impl Into<Arc<Regions>>,
        gates: Gates,
    ) -> Result<Arc<Self>, StartError> {
        let memory = memory.into();
        let clock = RealClock::new();
        let identity = logic.start(&*memory, clock.now())?;
        for (session, term) in gates.take_orphans() {
            logic.abandoned(&*memory, session, term);
        }
        let readmitted = logic.readmit(&*memory);
        let table = RegionTable::new(&identity.regions);
        let host = Arc::new(Self {
            identity,
            logic,
            memory,
            table,
            gates,
            clock,
            turn: Mutex::default(),
            admitted: Mutex::default(),
            serving: Mutex::default(),
            waiting: Mutex::default(),
            callers: Mutex::default(),
            workers: Mutex::default(),
            calls: AtomicU64::new(0),
            loopback: OnceLock::new(),
            evictions: Rarely::default(),
            fenced: OnceLock::new(),
        });
        host.carry_out(readmitted);
        Ok(host)
    }

    pub(crate) fn identity(&self) -> &Identity {
        &self.identity
    }

    pub(crate) fn id(&self) -> ServerId {
        self.identity.server
    }

    /// The number of the first connection that is made here: no number of an earlier life comes again.
    pub(crate) fn first_connection(&self) -> u64 {
        self.identity.life << 32 | 1
    }

    pub(crate) fn table(&self) -> &RegionTable {
        &self.table
    }

    pub(crate) fn memory(&self) -> &Arc<Regions> {
        &self.memory
    }

    /// What the server, whose memory has these pages, says of itself; whoever answers sockets adds what it knows.
    pub(crate) fn status(&self, pages: Pages) -> ServerStatus {
        let now = self.clock.now();
        let endpoints: usize = lock(&self.admitted).values().map(|entry| entry.gates.len()).sum();
        let traffic = Traffic {
            endpoints: u32::try_from(endpoints).unwrap_or(u32::MAX),
            calls: self.calls.load(Ordering::Relaxed),
            ..Traffic::default()
        };
        let (identity, tables) = (self.identity.clone(), self.tables());
        ServerStatus { identity, up_ns: now, pages, tables, traffic }
    }

    /// What the logic's tables hold.
    pub(crate) fn tables(&self) -> Tables {
        self.logic.status(self.clock.now())
    }

    /// Atomics belong to an RDMA device from now on. To be said before anybody is let in.
    pub(crate) fn use_loopback(&self, loopback: Arc<Loopback>) {
        let _ = self.loopback.set(loopback);
    }

    /// The way to atomics that belong to an RDMA device.
    pub(crate) fn loopback(&self) -> Option<&Arc<Loopback>> {
        self.loopback.get()
    }

    /// The bell rings from now on when a session was fenced.
    pub(crate) fn tell_of_fences(&self, bell: Arc<Bell>) {
        let _ = self.fenced.set(bell);
    }

    // --- connections ---

    /// A gate for an endpoint of a session. Nobody's endpoints may call and no more; those of a session that is not (or no
    /// longer) admitted find their gate closed.
    pub(crate) fn connect(
        &self,
        who: Principal,
        holder: Option<Arc<dyn Holder>>,
    ) -> Result<Opened, FabricError> {
        let mut admitted = lock(&self.admitted);
        let Some(entry) = admitted.get_mut(&who.session).filter(|entry| entry.is(who)) else {
            let permissions = if who.session.is_none() { Permissions::NONE } else { Permissions::ALL };
            return Ok(Opened { gate: self.gates.closed(), permissions });
        };
        let Some(gate) = self.gates.take(holder.as_deref(), (who.session, who.term)) else {
            return Err(FabricError::TooManyEndpoints { server: self.id() });
        };
        let passage = Passage { gate: gate.clone(), holder };
        entry.gates.push(passage);
        Ok(Opened { gate, permissions: entry.permissions })
    }

    /// An endpoint goes away: it will not use its gate again.
    pub(crate) fn disconnect(&self, gate: &Gate) {
        if gate.number() != 0 {
            self.close(gate);
            self.gates.give_back(gate);
        }
    }

    /// A process gives a gate back that it had from an earlier server on this memory: it will not use it again.
    pub(crate) fn reclaim(&self, gate: u32, from: &dyn Holder) {
        self.gates.reclaim(gate, from);
    }

    /// Closes a gate, unless a fence has. Whoever has it still has to give it back.
    pub(crate) fn close(&self, gate: &Gate) {
        let passage = lock(&self.admitted).values_mut().find_map(|entry| {
            let at = entry.gates.iter().position(|passage| passage.gate.number() == gate.number())?;
            Some(entry.gates.swap_remove(at))
        });
        if let Some(passage) = passage {
            passage.close();
        }
    }

    /// A process has hung up: it neither serves nor waits any more. If it had mapped the memory (through gates that it
    /// `held`), it is gone, and sessions that it leaves behind have nobody who could keep them alive.
    pub(crate) fn hung_up(&self, peer: PeerId, held: &[Gate], holder: Option<&Arc<dyn Holder>>) {
        let theirs = |passage: &Passage| held.iter().any(|gate| gate.number() == passage.gate.number());
        let abandoned: Vec<(SessionId, u64)> = lock(&self.admitted)
            .iter()
            .filter(|(_, entry)| entry.gates.iter().any(theirs))
            .map(|(session, entry)| (*session, entry.term))
            .collect();
        for gate in held {
            self.close(gate);
            match holder {
                Some(holder) => self.gates.leave_behind(gate, Arc::clone(holder)),
                None => self.gates.give_back(gate),
            }
        }
        let mut silent = Vec::new();
        lock(&self.serving).retain(|session, server| {
            let gone = server.peer == peer;
            silent.extend(gone.then_some(*session));
            !gone
        });
        lock(&self.waiting).retain(|_, waiting| {
            waiting.askers.retain(|(asker, _)| *asker != peer);
            !waiting.askers.is_empty()
        });
        self.end_waiting(|_, target| match target {
            Target::Session(session) if silent.contains(&session) => Some(CallError::Unknown),
            _ => None,
        });
        let mut unheard = Vec::new();
        lock(&self.callers).retain(|session, (term, caller)| {
            let gone = *caller == peer;
            unheard.extend(gone.then_some((*session, *term)));
            !gone
        });
        let _turn = lock(&self.turn);
        for (session, term) in unheard {
            self.logic.silent(session, term, self.clock.now());
        }
        for (session, term) in abandoned {
            self.logic.abandoned(&*self.memory, session, term);
        }
    }

    /// When this returns, nobody can touch the memory any more, not even procedures. To be said when nobody is let in any more.
    pub(crate) fn close_all(&self) {
        let workers = lock(&self.workers).take();
        drop(workers);
        let all: Vec<Admitted> = lock(&self.admitted).drain().map(|(_, admitted)| admitted).collect();
        all.iter().flat_map(|admitted| &admitted.gates).for_each(Passage::close);
    }

    // --- calls ---

    /// A call for this server, or (coordinator) for a session.
    pub(crate) fn call(self: &Arc<Self>, target: Target, call: Call, peer: PeerId, caller: Arc<dyn Caller>) {
        let id = call.id;
        self.calls.fetch_add(1, Ordering::Relaxed);
        match target {
            Target::Server(server) if server == self.id() => self.call_here(call, peer, caller),
            Target::Server(server) => {
                let error = CallError::Failed(FabricError::UnknownServer { server }.to_string());
                caller.answer(id, Err(error));
            }
            Target::Session(session) => {
                let served =
                    self.check(Principal { session: id.session, term: id.term, ticket: call.ticket });
                let served = served.and_then(|()| self.served(session, id, peer));
                match served {
                    Ok((term, serving)) => {
                        lock(&self.waiting).insert(id, target, peer, caller);
                        serving.incoming(session, term, call);
                    }
                    Err(error) => caller.answer(id, Err(error)),
                }
            }
        }
    }

    /// A call for this server. What the logic answers at once goes to whoever asked just now and to nobody else: it may be the refusal of
    /// a call that only bears the name of another's. Only what the logic has taken on waits, and it takes on no call without its ticket.
    fn call_here(self: &Arc<Self>, call: Call, peer: PeerId, caller: Arc<dyn Caller>) {
        let id = call.id;
        if let Err(busy) = lock(&self.waiting).check_room(id, peer) {
            return caller.answer(id, Err(busy));
        }
        let who = Principal { session: id.session, term: id.term, ticket: call.ticket };
        let eviction = eviction(&call).map(|victim| (victim, caller.whence()));
        let _turn = lock(&self.turn);
        let mut actions = self.logic.call(&*self.memory, call, self.clock.now());
        if let Some((victim, whence)) = eviction {
            self.log_eviction(victim, id.session, &whence, &actions);
        }
        let is_answered = actions.last().and_then(HostAction::answers) == Some(id);
        let answer = if is_answered { actions.pop() } else { None };
        if let Some(HostAction::Reply { outcome, .. }) = answer {
            self.carry_out(actions);
            caller.answer(id, outcome);
        } else {
            lock(&self.waiting).insert(id, Target::Server(self.id()), peer, caller);
            self.carry_out(actions);
        }
        // Only whoever is the session: when this peer hangs up, the session's lease ends soon.
        if peer != HERE && self.check(who).is_ok() {
            lock(&self.callers).insert(who.session, (who.term, peer));
        }
    }

    /// Whether a call comes from the session in whose name it comes, and that is admitted.
    fn check(&self, who: Principal) -> Result<(), CallError> {
        let Principal { session, term, .. } = who;
        match lock(&self.admitted).get(&session) {
            Some(entry) if entry.is(who) => Ok(()),
            None if !session.is_none() => Err(ControlError::SessionFenced { session }.into()),
            Some(entry) if entry.term != term => Err(ControlError::SessionFenced { session }.into()),
            _ => Err(ControlError::Unproven { server: self.id() }.into()),
        }
    }

    /// Who answers calls to a session, if this one may wait for that.
    fn served(&self, session: SessionId, id: CallId, peer: PeerId) -> Result<(u64, Serving), CallError> {
        let server = lock(&self.serving).get(&session).map(|s| (s.term, s.serving.clone()));
        let (term, serving) = server.ok_or(CallError::NoSuchSession { session })?;
        lock(&self.waiting).check_room(id, peer)?;
        if serving.is_behind() {
            return Err(CallError::Busy { queued: 0 });
        }
        Ok((term, serving))
    }

    /// Ending a session that lives is somebody's decision: who took it is written down.
    fn log_eviction(
        &self,
        (victim, term): (SessionId, u64),
        by: SessionId,
        whence: &str,
        actions: &[HostAction],
    ) {
        let is_refused =
            actions.iter().any(|action| matches!(action, HostAction::Reply { outcome: Err(_), .. }));
        if let Some(more) = self.evictions.say(self.clock.now()) {
            let what = if is_refused { "was not evicted, as was asked" } else { "was evicted" };
            tracing::warn!("session {victim} of term {term} {what} by session {by} at {whence}{more}");
        }
    }

    /// Whether a session was last heard of from this process.
    pub(crate) fn speaks(&self, peer: PeerId) -> bool {
        lock(&self.callers).values().any(|(_, caller)| *caller == peer)
            || lock(&self.serving).values().any(|server| server.peer == peer)
    }

    /// The processes from which sessions were last heard of.
    pub(crate) fn speakers(&self) -> FxHashSet<PeerId> {
        let mut speakers: FxHashSet<PeerId> =
            lock(&self.callers).values().map(|(_, caller)| *caller).collect();
        speakers.extend(lock(&self.serving).values().map(|server| server.peer));
        speakers
    }

    /// The caller does not wait any more.
    pub(crate) fn forget_call(&self, id: CallId) {
        lock(&self.waiting).remove(id);
    }

    /// Where calls to a session arrive for endpoints of this process, which all share it.
    pub(crate) fn serve_here(&self, who: Principal) -> Arc<Inbox> {
        let admitted = lock(&self.admitted);
        if !self.may_serve(&admitted, who) {
            return Arc::new(Inbox::closed());
        }
        let Principal { session, term, .. } = who;
        let mut serving = lock(&self.serving);
        if let Some(Server { term: of, serving: Serving::Here(inbox), .. }) = serving.get(&session) {
            if *of == term {
                return Arc::clone(inbox);
            }
        }
        let inbox = Arc::<Inbox>::default();
        let here = Serving::Here(Arc::clone(&inbox));
        serving.insert(session, Server { term, peer: HERE, serving: here });
        inbox
    }

    /// A process answers calls to its session from now on; false if the session has ended.
    pub(crate) fn serve(&self, who: Principal, peer: PeerId, server: Arc<dyn SessionServer>) -> bool {
        let admitted = lock(&self.admitted);
        let may = self.may_serve(&admitted, who);
        if may {
            let Principal { session, term, .. } = who;
            lock(&self.serving).insert(session, Server { term, peer, serving: Serving::Peer(server) });
        }
        may
    }

    /// Calls to sessions go through the coordinator. The number of a session that was fenced may be another's by now: its
    /// calls are not for the first one to answer. (With the lock held: a fence changes it before it looks who serves.)
    fn may_serve(&self, admitted: &FxHashMap<SessionId, Admitted>, who: Principal) -> bool {
        self.id() == ServerId::COORDINATOR && admitted.get(&who.session).is_some_and(|entry| entry.is(who))
    }

    /// A process has answered a call to one of its sessions. What it was not asked it cannot answer.
    pub(crate) fn reply_of(&self, peer: PeerId, to: CallId, outcome: CallOutcome) {
        let target = lock(&self.waiting).calls.get(&to).map(|waiting| waiting.target);
        let asked = match target {
            Some(Target::Session(session)) => {
                lock(&self.serving).get(&session).is_some_and(|server| server.peer == peer)
            }
            _ => false,
        };
        if asked {
            self.reply(to, outcome);
        }
    }

    /// A call has been answered.
    pub(crate) fn reply(&self, to: CallId, outcome: CallOutcome) {
        let waiting = lock(&self.waiting).remove(to);
        let mut askers = waiting.map(|waiting| waiting.askers).unwrap_or_default();
        let last = askers.pop();
        for (_, caller) in askers {
            caller.answer(to, outcome.clone());
        }
        if let Some((_, caller)) = last {
            caller.answer(to, outcome);
        }
    }

    fn end_waiting(&self, how: impl Fn(CallId, Target) -> Option<CallError>) {
        let mut ended = Vec::new();
        lock(&self.waiting).retain(|id, waiting| match how(id, waiting.target) {
            Some(error) => {
                ended.extend(waiting.askers.drain(..).map(|(_, caller)| (id, caller, error.clone())));
                false
            }
            None => true,
        });
        for (id, caller, error) in ended {
            caller.answer(id, Err(error));
        }
    }

    // --- what the logic decides ---

    fn finished(self: &Arc<Self>, call: CallId, outcome: CallOutcome) {
        let _turn = lock(&self.turn);
        let actions = self.logic.finished(call, outcome);
        self.carry_out(actions);
    }

    /// Carries out what the logic decided, in order.
    fn carry_out(self: &Arc<Self>, actions: Vec<HostAction>) {
        for action in actions {
            match action {
                HostAction::Admit { session, term, ticket, permissions } => {
                    let mut admitted = lock(&self.admitted);
                    // The same session may be admitted again; its connections stay.
                    let gates = admitted.remove(&session).map(|a| a.gates).unwrap_or_default();
                    admitted.insert(session, Admitted { term, ticket, permissions, gates });
                }
                HostAction::Fence { session } => self.fence(session),
                HostAction::Reply { to, outcome } => self.reply(to, outcome),
                HostAction::Run { call, ticket, procedure, request } => {
                    let job = Job { call, ticket, procedure, request };
                    lock(&self.workers).get_or_insert_with(|| Workers::start(self)).push(job);
                }
            }
        }
    }

    /// When this returns, nothing of the session can land here any more.
    fn fence(&self, session: SessionId) {
        let admitted = lock(&self.admitted).remove(&session);
        for passage in admitted.into_iter().flat_map(|a| a.gates) {
            // Its endpoint still has it, so it is not given back here.
            passage.close();
        }
        if let Some(bell) = self.fenced.get() {
            bell.ring();
        }
        let server = lock(&self.serving).remove(&session);
        if let Some(server) = server {
            server.serving.ended(session, server.term);
        }
        // Answers the calls that will have no other answer: those the session sent here and those that others sent to it.
        self.end_waiting(|id, target| match target {
            Target::Server(_) if id.session == session => {
                Some(CallError::Control(ControlError::SessionFenced { session }))
            }
            Target::Session(to) if to == session => Some(CallError::Unknown),
            _ => None,
        });
    }
}

/// Whom a call is to evict, if that is what it asks for.
fn eviction(call: &Call) -> Option<(SessionId, u64)> {
    if call.procedure != ProcedureId::CONTROL {
        return None;
    }
    match wire::decode::<Request>(&call.request) {
        Ok(Request::Evict { victim, term }) => Some((victim, term)),
        _ => None,
    }
}

impl fmt::Debug for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Host({})", self.id())
    }
}

impl Caller for super::ReplySlot {
    fn answer(&self, _: CallId, outcome: CallOutcome) {
        self.set(outcome);
    }
}
