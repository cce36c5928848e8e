//! A server on memory made of vectors, driven by one call at a time.

use farwood_fabric::Label;
use farwood_fabric::addr::SessionId;
use farwood_fabric::call::{Call, CallError, CallId, CallOutcome};
use farwood_fabric::clock::Nanos;
use farwood_fabric::control::{ControlError, Epochs, IndexId, Reply, Request};
use farwood_fabric::procedure::{ProcedureId, ProcedureSet};
use farwood_fabric::server::{HostAction, ServerLogic, ServerMemory};
use farwood_fabric::wire::{decode, encode};
use farwood_memory::seal::{Opened, Secret};
use farwood_memory::testing::VecMemory;
use farwood_memory::{MemoryServer, ServerConfig};
use std::cell::{Ref, RefCell};
use std::collections::BTreeMap;

/// The incarnation of the coordinator's memory, in every test here.
const COORDINATOR: u32 = 1;
/// The number of the next index that sessions bring from it to another server: those before have been.
const NEXT_INDEX: IndexId = 10;

pub(crate) struct World<M = VecMemory> {
    pub(crate) config: ServerConfig,
    pub(crate) memory: M,
    pub(crate) server: MemoryServer,
    pub(crate) procedures: ProcedureSet,
    pub(crate) now: Nanos,
    sequence: u64,
    /// The last call that was asked, and what came of it.
    pub(crate) last: Option<(Call, CallOutcome)>,
    /// The terms in which sessions were admitted last, and their tickets, which their calls carry.
    terms: RefCell<BTreeMap<SessionId, (u64, u64)>>,
}

impl World {
    pub(crate) fn new(config: ServerConfig) -> Self {
        Self::with(config, ProcedureSet::default())
    }

    pub(crate) fn with(config: ServerConfig, procedures: ProcedureSet) -> Self {
        let server = MemoryServer::new(config.clone(), procedures.clone()).expect("the limits are valid");
        let memory = VecMemory::new(&server.regions());
        Self::on(memory, config, procedures)
    }
}

impl<M: ServerMemory> World<M> {
    /// A server on memory that is there already.
    pub(crate) fn on(memory: M, config: ServerConfig, procedures: ProcedureSet) -> Self {
        let server = MemoryServer::new(config.clone(), procedures.clone()).expect("the limits are valid");
        server.start(&memory, 0).expect("the memory is ours");
        Self {
            config,
            memory,
            server,
            procedures,
            now: 0,
            sequence: 0,
            last: None,
            terms: RefCell::default(),
        }
    }

    /// The process ends, another one takes over the memory.
    pub(crate) fn restart(&mut self) {
        self.server =
            MemoryServer::new(self.config.clone(), self.procedures.clone()).expect("the limits are valid");
        self.server.start(&self.memory, self.now).expect("the memory is ours");
    }

    /// Who is let in again by a process that has just started, with term and ticket.
    pub(crate) fn readmitted(&self) -> Vec<(SessionId, u64, u64)> {
        let actions = self.server.readmit(&self.memory);
        let who = actions.into_iter().map(|action| match action {
            HostAction::Admit { session, term, ticket, .. } => (session, term, ticket),
            other => panic!("{other:?}"),
        });
        who.collect()
    }

    pub(crate) fn call(&mut self, session: SessionId, procedure: ProcedureId, request: Vec<u8>) -> Call {
        self.sequence += 1;
        let (term, ticket) = self.terms.borrow().get(&session).copied().unwrap_or((0, 0));
        let id = CallId { session, term, endpoint: 3, sequence: self.sequence };
        Call { id, ticket, acknowledged_below: 0, procedure, request }
    }

    pub(crate) fn control(&mut self, session: SessionId, request: &Request) -> Call {
        self.call(session, ProcedureId::CONTROL, encode(request))
    }

    pub(crate) fn send(&self, call: &Call) -> Vec<HostAction> {
        let actions = self.server.call(&self.memory, call.clone(), self.now);
        for action in &actions {
            if let HostAction::Admit { session, term, ticket, .. } = action {
                self.terms.borrow_mut().insert(*session, (*term, *ticket));
            }
        }
        actions
    }

    /// The terms and tickets of those who were admitted.
    pub(crate) fn terms(&self) -> Ref<'_, BTreeMap<SessionId, (u64, u64)>> {
        self.terms.borrow()
    }

    /// The reply to a request.
    pub(crate) fn ask(&mut self, session: SessionId, request: Request) -> Result<Reply, CallError> {
        let call = self.control(session, &request);
        let actions = self.send(&call);
        let outcome = outcome(&call, actions);
        self.last = Some((call, outcome.clone()));
        understand(outcome)
    }

    /// The reply to a request that is sent twice under one name: it must be the same.
    pub(crate) fn ask_twice(&mut self, session: SessionId, request: Request) -> Result<Reply, CallError> {
        let call = self.control(session, &request);
        let first = outcome(&call, self.send(&call));
        let second = outcome(&call, self.send(&call));
        assert_eq!(first, second, "a repeat of {request:?} got another reply");
        understand(first)
    }

    pub(crate) fn open(&mut self) -> Result<(SessionId, Epochs), CallError> {
        self.open_with_term().map(|(session, _, epochs)| (session, epochs))
    }

    pub(crate) fn open_with_term(&mut self) -> Result<(SessionId, u64, Epochs), CallError> {
        match self.ask(
            SessionId::NONE,
            Request::OpenSession { read_only: false, reaper: false, label: Label::default() },
        )? {
            Reply::Session { session, term, epochs, .. } => Ok((session, term, epochs)),
            other => panic!("{other:?}"),
        }
    }

    /// Comes to a server that is not the coordinator.
    pub(crate) fn attach(&mut self, session: SessionId, term: u64) -> Result<Reply, CallError> {
        let request = self.attachment(session, term);
        self.ask(session, request)
    }

    fn secret(&self) -> Secret {
        self.config.secret.of_pool(self.config.pool)
    }

    /// What the coordinator's answer makes a session say that comes to another server.
    pub(crate) fn attachment(&self, session: SessionId, term: u64) -> Request {
        // The coordinator itself has begun with none.
        let next_index = if self.config.is_coordinator() { 1 } else { NEXT_INDEX };
        self.attachment_of(session, term, (next_index, self.config.incarnation))
    }

    /// The same, with the number of the next index and the memory for which it is sealed.
    pub(crate) fn attachment_of(
        &self,
        session: SessionId,
        term: u64,
        (next_index, incarnation): (IndexId, u32),
    ) -> Request {
        let (read_only, coordinator) = (false, COORDINATOR);
        // The coordinator itself takes the first seal only.
        let sealed_for = if self.config.is_coordinator() { 0 } else { incarnation };
        // All that were made are there, as far as there is room for them.
        let indexes: Vec<IndexId> = match sealed_for {
            0 => Vec::new(),
            _ => (1..next_index.min(IndexId::from(self.config.max_indexes) + 1)).collect(),
        };
        let opened = Opened { term, read_only, next_index, incarnation: sealed_for, indexes: &indexes };
        let seal = self.secret().opened(COORDINATOR, session, opened);
        Request::AttachSession { read_only, term, coordinator, next_index, incarnation, indexes, seal }
    }

    /// The requests about a victim, sealed as the coordinator seals them.
    pub(crate) fn fence(&self, victim: SessionId, term: u64) -> Request {
        Request::Fence { victim, term, seal: self.secret().fence(COORDINATOR, victim, term) }
    }

    pub(crate) fn adopt_chunks(&self, by: SessionId, victim: SessionId, term: u64) -> Request {
        Request::AdoptChunks { victim, term, seal: self.adoption(by, victim, term) }
    }

    pub(crate) fn finish_adopt(&self, by: SessionId, victim: SessionId, term: u64) -> Request {
        Request::FinishAdopt { victim, term, seal: self.adoption(by, victim, term) }
    }

    fn adoption(&self, by: SessionId, victim: SessionId, term: u64) -> u64 {
        let by_term = self.terms.borrow().get(&by).map_or(0, |(term, _)| *term);
        self.secret().adoption(COORDINATOR, (victim, term), (by, by_term))
    }

    pub(crate) fn release(&self, index: IndexId) -> Request {
        Request::ReleaseIndex { index, seal: self.secret().released(COORDINATOR, index) }
    }

    /// The right of a session to repair an index, as the coordinator seals it.
    pub(crate) fn offline(&self, index: IndexId, by: (SessionId, u64)) -> u64 {
        self.secret().offline(COORDINATOR, index, by)
    }

    /// What this server answers when it has released an index, unless it is the coordinator.
    pub(crate) fn released_by(&self, index: IndexId) -> u64 {
        self.secret().released_by(COORDINATOR, index, self.config.server)
    }

    /// The victim's term, which the first step of a fence or an adoption answers with.
    pub(crate) fn victim(&mut self, by: SessionId, request: Request) -> u64 {
        match self.ask(by, request.clone()) {
            Ok(Reply::Victim { term, .. }) => term,
            other => panic!("{request:?}: {other:?}"),
        }
    }

    /// (Coordinator) An index that is ready; its number.
    pub(crate) fn create(&mut self, maker: SessionId, name: &str) -> IndexId {
        let create = Request::CreateIndex { name: name.to_owned(), engine: "e".to_owned(), config: vec![] };
        let Ok(Reply::Index { info }) = self.ask(maker, create) else { panic!("no room for '{name}'") };
        self.done(maker, Request::IndexReady { index: info.id });
        info.id
    }

    pub(crate) fn done(&mut self, session: SessionId, request: Request) {
        assert_eq!(self.ask(session, request.clone()), Ok(Reply::Done {}), "{request:?}");
    }

    /// Fences a session, whether its lease runs or not.
    pub(crate) fn evict(&mut self, by: SessionId, victim: SessionId) -> u64 {
        let term = self.terms.borrow()[&victim].0;
        self.victim(by, Request::Evict { victim, term })
    }

    /// Fences and adopts a session by the whole protocol of a pool of one server.
    pub(crate) fn bury(&mut self, by: SessionId, victim: SessionId, force: bool) -> Reply {
        let term =
            if force { self.evict(by, victim) } else { self.victim(by, Request::BeginFence { victim }) };
        self.done(by, Request::CompleteFence { victim, term });
        assert_eq!(self.victim(by, Request::BeginAdopt { victim }), term, "nobody else comes in between");
        let adopted = self.ask(by, self.adopt_chunks(by, victim, term)).expect("it is fenced");
        self.done(by, self.finish_adopt(by, victim, term));
        adopted
    }
}

/// The outcome that the last action replies with.
pub(crate) fn outcome(call: &Call, mut actions: Vec<HostAction>) -> CallOutcome {
    match actions.pop() {
        Some(HostAction::Reply { to, outcome }) if to == call.id => outcome,
        other => panic!("the last action is no reply: {other:?}"),
    }
}

pub(crate) fn understand(outcome: CallOutcome) -> Result<Reply, CallError> {
    outcome.map(|bytes| decode(&bytes).expect("the server's replies can be decoded"))
}

pub(crate) fn refused(error: ControlError) -> Result<Reply, CallError> {
    Err(CallError::Control(error))
}

pub(crate) fn is_bad_request(reply: &Result<Reply, CallError>) -> bool {
    matches!(reply, Err(CallError::Control(ControlError::BadRequest { .. })))
}

pub(crate) fn s(id: u16) -> SessionId {
    SessionId::new(id)
}
