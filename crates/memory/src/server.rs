//! One call: was it seen before, may the caller ask, and in which order are the actions.
//!
//! 1. A request that is longer than any makes sense is refused. The caller is looked up: what comes from a session that is not active here is refused, and leaves no trace.
//!    Only `OpenSession` is taken from nobody.
//! 2. The call table: a repeat of a running call is ignored (the one reply goes to whoever asked last), a repeat of
//!    a finished one gets the kept outcome.
//! 3. Built-in calls are executed at once (see `control`), procedures go to the host.
//! 4. Actions: `Fence`, then `Admit`, then `Reply`. The answer to a fence is held back while procedures that the
//!    victim called still run here.
//!
//! `Hello` and `AttachSession` skip 1 and 2: they may be repeated anyway. Those who have no session yet are told
//! apart by the random numbers of their endpoints, so a repeated `OpenSession` is answered with the session that it
//! opened. To the call table they are all one session, nobody, which therefore is never forgotten as a whole.
//!
//! Thread safety: one lock around everything; every call is short.

use crate::catalog::Catalog;
use crate::chunks::{ChunkTable, SET_ASIDE};
use crate::config::ServerConfig;
use crate::control::Answer;
use crate::epochs::EpochClock;
use crate::host::{Admission, Host, Job};
use crate::labels::Labels;
use crate::layout::{
    self, FORMAT_VERSION, Layout, MAGIC, MAX_CONFIG_BYTES, MAX_ENGINE_BYTES, MAX_NAME_BYTES, superblock,
};
use crate::numbers::IndexNumbers;
use crate::repeats::CallTag;
use crate::sessions::{SessionTable, State};
use crate::torn;
use farwood_fabric::addr::{RegionId, SessionId};
use farwood_fabric::call::{Call, CallError, CallId, CallOutcome, CallTable, Principal, Seen};
use farwood_fabric::clock::Nanos;
use farwood_fabric::control::{ControlError, IndexId, JOURNAL_BYTES, Request};
use farwood_fabric::found::Found;
use farwood_fabric::procedure::{ProcedureId, ProcedureSet};
use farwood_fabric::region::{Identity, Permissions, RegionSpec};
use farwood_fabric::server::{HostAction, ServerLogic, ServerMemory, StartError};
use farwood_fabric::status::{Tables, Torn};
use farwood_fabric::wire::{decode, encode};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A memory server without a network.
#[derive(Debug)]
pub struct MemoryServer {
    config: ServerConfig,
    procedures: ProcedureSet,
    server: Mutex<Option<Server>>,
}

impl MemoryServer {
    /// A server that will offer `procedures`, once it is started on its memory.
    pub fn new(config: ServerConfig, procedures: ProcedureSet) -> Result<Self, StartError> {
        config.validate()?;
        Ok(Self { config, procedures, server: Mutex::new(None) })
    }

    /// How it is set up.
    pub fn config(&self) -> &ServerConfig {
        &self.config
    }

    fn lock(&self) -> MutexGuard<'_, Option<Server>> {
        // What a panic under the lock can leave behind is what a crash can: the tables allow for that.
        self.server.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ServerLogic for MemoryServer {
    fn regions(&self) -> Vec<RegionSpec> {
        layout::regions(&self.config)
    }

    fn start(&self, memory: &dyn ServerMemory, now: Nanos) -> Result<Identity, StartError> {
        let server = Server::start(memory, &self.config, now)?;
        let identity = server.identity.clone();
        *self.lock() = Some(server);
        Ok(identity)
    }

    fn readmit(&self, memory: &dyn ServerMemory) -> Vec<HostAction> {
        self.lock().as_ref().map_or_else(Vec::new, |server| server.readmit(memory))
    }

    fn call(&self, memory: &dyn ServerMemory, call: Call, now: Nanos) -> Vec<HostAction> {
        match self.lock().as_mut() {
            Some(server) => server.call(memory, &self.procedures, call, now),
            None => vec![reply(call.id, Err(CallError::Failed("the server has not started".to_owned())))],
        }
    }

    fn finished(&self, call: CallId, outcome: CallOutcome) -> Vec<HostAction> {
        self.lock().as_mut().map_or_else(Vec::new, |server| server.finished(call, outcome))
    }

    fn abandoned(&self, memory: &dyn ServerMemory, session: SessionId, term: u64) {
        if let Some(server) = self.lock().as_mut() {
            server.sessions.abandon(memory, session, term);
        }
    }

    fn silent(&self, session: SessionId, term: u64, now: Nanos) {
        if let Some(server) = self.lock().as_mut() {
            server.sessions.hush(session, term, now);
        }
    }

    fn status(&self, now: Nanos) -> Tables {
        self.lock().as_ref().map_or_else(Tables::default, |server| server.status(now))
    }

    fn cores(&self) -> usize {
        self.config.cores
    }
}

/// The answer to a fence that waits for procedures of the victim.
#[derive(Debug)]
struct HeldBack {
    victim: SessionId,
    to: CallId,
    outcome: CallOutcome,
}

/// A started server.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) config: ServerConfig,
    pub(crate) layout: Layout,
    pub(crate) identity: Identity,
    pub(crate) chunks: ChunkTable,
    pub(crate) sessions: SessionTable,
    pub(crate) labels: Labels,
    pub(crate) clock: EpochClock,
    pub(crate) catalog: Catalog,
    pub(crate) host: Host,
    calls: CallTable,
    held_back: Vec<HeldBack>,
    /// (Coordinator) When leases are looked at again.
    pub(crate) next_look: Nanos,
    /// (Coordinator) When somebody was last asked to finish the drop of an index.
    pub(crate) drop_offers: BTreeMap<IndexId, Nanos>,
    /// (Other servers) Which indexes may have chunks here.
    pub(crate) numbers: IndexNumbers,
    /// What was not whole when the memory was taken over, now or earlier.
    pub(crate) torn: Option<Torn>,
}

impl Server {
    /// Formats zeroed memory, or takes over what is there.
    fn start(memory: &dyn ServerMemory, config: &ServerConfig, now: Nanos) -> Result<Self, StartError> {
        let mut config = config.clone();
        let magic = layout::load(memory, superblock::MAGIC_AT);
        if config.any_pool && magic == MAGIC {
            config.pool = layout::pool(memory);
        }
        config.secret = config.secret.of_pool(config.pool);
        let config = &config;
        match (memory.found(), magic) {
            (Found::Torn(damage), _) => torn::mend(memory, config, damage)?,
            (_, 0) => layout::format(memory, config),
            (_, MAGIC) => {}
            _ => return Err(layout::not_ours()),
        }
        let incarnation = layout::recognise(memory, config)?;
        // Whatever this process answers, it answers in a new life.
        let life = layout::load(memory, superblock::LIFE_AT).saturating_add(1);
        layout::store(memory, superblock::LIFE_AT, life);
        let (mut sessions, known) = SessionTable::load(memory, config, now)?;
        sessions.outlive(memory.found());
        let mut clock = EpochClock::new(
            layout::load(memory, superblock::EPOCH_AT),
            layout::load(memory, superblock::FLUSH_AT),
        );
        for (session, progress) in known {
            let progress = if config.mistakes.restart_forgets_pins { clock.newcomer() } else { progress };
            clock.join(session, progress);
            if matches!(sessions.state(session), State::Fenced | State::Adopting { .. }) {
                clock.fence(session);
            }
        }
        let identity = Identity {
            pool: config.pool,
            server: config.server,
            servers: config.servers,
            incarnation,
            life,
            format: FORMAT_VERSION,
            chunk_bytes: config.chunk_bytes,
            regions: layout::regions(config),
        };
        let mut server = Self {
            config: config.clone(),
            layout: Layout::new(config),
            identity,
            chunks: ChunkTable::load(memory, config)?,
            sessions,
            labels: Labels::new(now),
            clock,
            catalog: Catalog::load(memory, config)?,
            host: Host::new(config.cores, config.max_long, config.queue),
            calls: CallTable::default(),
            held_back: Vec::new(),
            next_look: 0,
            drop_offers: BTreeMap::new(),
            numbers: IndexNumbers::load(memory, config)?,
            torn: torn::load_mark(memory),
        };
        server.sessions.repair(memory);
        server.disown_the_gone(memory);
        server.release_the_unknown(memory);
        server.drop_orphans(memory);
        server.catalog.bring_back(memory, |_, term| !server.sessions.has_term(term));
        Ok(server)
    }

    /// Lets those in again who were active when an earlier server process ended.
    fn readmit(&self, memory: &dyn ServerMemory) -> Vec<HostAction> {
        let coordinator = self.coordinator(memory);
        let admit = |(session, term, read_only): (SessionId, u64, bool)| HostAction::Admit {
            session,
            term,
            ticket: self.config.secret.ticket(coordinator, session, term),
            permissions: if read_only { Permissions::READ } else { Permissions::ALL },
        };
        self.sessions.active().map(admit).collect()
    }

    /// Chunks of sessions that do not exist become nobody's. Numbers are freed after their chunks, so none should
    /// be found; if one were, the next session of that number would take it for its own.
    fn disown_the_gone(&mut self, memory: &dyn ServerMemory) {
        for owner in self.chunks.owners() {
            if self.sessions.state(owner) == State::Free {
                self.chunks.disown(memory, owner);
            }
        }
    }

    /// (Coordinator) Chunks of indexes that are not in the catalog become free. Such an index never was, or was dropped when every session
    /// had let go of it; nobody would release them later.
    fn release_the_unknown(&mut self, memory: &dyn ServerMemory) {
        if self.config.is_coordinator() {
            let catalog = &self.catalog;
            self.chunks.release_all(memory, |index| index != SET_ASIDE && !catalog.contains(index));
        }
    }

    fn call(
        &mut self,
        memory: &dyn ServerMemory,
        procedures: &ProcedureSet,
        call: Call,
        now: Nanos,
    ) -> Vec<HostAction> {
        let id = call.id;
        if call.procedure != ProcedureId::CONTROL {
            return self.call_procedure(memory, procedures, call);
        }
        if let Err(refusal) = check_length(&call.request) {
            return vec![reply(id, Err(refusal.into()))];
        }
        let Ok(request) = decode::<Request>(&call.request) else {
            return vec![reply(id, Err(CallError::Malformed))];
        };
        if matches!(request, Request::Hello {} | Request::AttachSession { .. }) {
            return actions(id, self.introduce(memory, (id.session, id.term), &request));
        }
        let is_newcomer = id.session.is_none() && matches!(request, Request::OpenSession { .. });
        let known = if is_newcomer { self.seen(&call) } else { self.recall(memory, &call) };
        if let Some(known) = known {
            return known;
        }
        let answer = self.control(memory, (id.session, CallTag::of(id)), request, now);
        let fenced = answer.as_ref().ok().and_then(|answer| answer.fence);
        if let Some(victim) = fenced {
            self.forget(victim);
        }
        let mut actions = actions(id, answer);
        match fenced {
            Some(victim) if self.host.runs_for(victim) => {
                if let Some(HostAction::Reply { to, outcome }) = actions.pop() {
                    self.held_back.push(HeldBack { victim, to, outcome });
                }
            }
            _ => {
                if let Some(HostAction::Reply { outcome, .. }) = actions.last() {
                    self.calls.finish(id, outcome);
                }
            }
        }
        actions
    }

    fn call_procedure(
        &mut self,
        memory: &dyn ServerMemory,
        procedures: &ProcedureSet,
        call: Call,
    ) -> Vec<HostAction> {
        let id = call.id;
        if let Some(known) = self.recall(memory, &call) {
            return known;
        }
        let refusal = match procedures.get(call.procedure) {
            None => CallError::NoSuchProcedure { procedure: call.procedure },
            Some(procedure) => {
                match self.host.admit(Job { call: id, ticket: call.ticket, procedure, request: call.request })
                {
                    Admission::Run(job) => return vec![run(job)],
                    Admission::Waits => return vec![],
                    Admission::Busy { queued } => CallError::Busy { queued },
                }
            }
        };
        let outcome = Err(refusal);
        self.calls.finish(id, &outcome);
        vec![reply(id, outcome)]
    }

    /// What there is to do about a session's call that is not to be run; `None`: it is new, and noted.
    fn recall(&mut self, memory: &dyn ServerMemory, call: &Call) -> Option<Vec<HostAction>> {
        let refused = self.sessions.check_active(call.id.session, call.id.term);
        if let Err(refusal) = refused.and_then(|()| self.check_ticket(memory, call)) {
            return Some(vec![reply(call.id, Err(refusal.into()))]);
        }
        self.seen(call)
    }

    /// The same, whoever calls.
    fn seen(&mut self, call: &Call) -> Option<Vec<HostAction>> {
        match self.calls.begin(call) {
            Seen::New => None,
            Seen::Running => Some(vec![]),
            Seen::Done(outcome) => Some(vec![reply(call.id, outcome)]),
            Seen::Forgotten => Some(vec![reply(call.id, Err(CallError::Forgotten))]),
            Seen::TooMany { open } => Some(vec![reply(call.id, Err(CallError::Unacknowledged { open }))]),
        }
    }

    fn finished(&mut self, call: CallId, outcome: CallOutcome) -> Vec<HostAction> {
        let Some(finished) = self.host.finish(call) else { return vec![] };
        let mut actions = Vec::new();
        if !finished.abandoned {
            self.calls.finish(call, &outcome);
            actions.push(reply(call, outcome));
        }
        actions.extend(finished.next.map(run));
        let (done, waiting) = std::mem::take(&mut self.held_back)
            .into_iter()
            .partition::<Vec<_>, _>(|held| !self.host.runs_for(held.victim));
        self.held_back = waiting;
        for HeldBack { to, outcome, .. } in done {
            self.calls.finish(to, &outcome);
            actions.push(reply(to, outcome));
        }
        actions
    }

    /// Nothing of the session counts any more: its calls, its procedures' outcomes, the answers it waits for.
    pub(crate) fn forget(&mut self, session: SessionId) {
        debug_assert!(!session.is_none(), "nobody's calls are those of many newcomers");
        self.calls.forget(session);
        self.host.forget(session);
        self.held_back.retain(|held| held.to.session != session);
    }

    /// Zeroes a session's journal.
    pub(crate) fn clear_journal(&self, memory: &dyn ServerMemory, slot: u16) {
        layout::clear(memory, RegionId::BOARD, self.layout.journal(slot).offset(), JOURNAL_BYTES);
    }
}

/// Nothing that is asked of the server itself is longer: the longest names an index with its configuration.
const MAX_REQUEST_BYTES: usize = MAX_NAME_BYTES + MAX_ENGINE_BYTES + MAX_CONFIG_BYTES + (4 << 10);

fn check_length(request: &[u8]) -> Result<(), ControlError> {
    if request.len() <= MAX_REQUEST_BYTES {
        return Ok(());
    }
    let why = format!("it has {} bytes, at most {MAX_REQUEST_BYTES} make sense; shorten it", request.len());
    Err(ControlError::BadRequest { why })
}

fn reply(to: CallId, outcome: CallOutcome) -> HostAction {
    HostAction::Reply { to, outcome }
}

fn run(job: Job) -> HostAction {
    HostAction::Run { call: job.call, ticket: job.ticket, procedure: job.procedure, request: job.request }
}

/// The actions of a built-in call, the reply last.
fn actions(to: CallId, answer: Result<Answer, CallError>) -> Vec<HostAction> {
    let Answer { fence, admit, reply: message } = match answer {
        Ok(answer) => answer,
        Err(error) => return vec![reply(to, Err(error))],
    };
    let admit = admit.map(|(who, permissions)| {
        let Principal { session, term, ticket } = who;
        HostAction::Admit { session, term, ticket, permissions }
    });
    let fence = fence.map(|session| HostAction::Fence { session });
    fence.into_iter().chain(admit).chain([reply(to, message.map(|message| encode(&message)))]).collect()
}
