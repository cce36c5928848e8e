//! One request of a client: may the caller ask it of this server, and which table answers.
//!
//! What a repeat of a request does to another server process is said in `repeats`. Nothing is changed before everything is checked. Where several stores are needed, those that a crash may leave
//! behind unharmed come first (see the modules that do them).

use crate::chunks::{ChunkType, Drain, Drained, Want};
use crate::epochs::Progress;
use crate::layout::{self, superblock};
use crate::repeats::CallTag;
use crate::seal::Opened;
use crate::server::Server;
use crate::sessions::{Attach, Kind, Listed, State};
use farwood_fabric::Label;
use farwood_fabric::addr::{ServerId, SessionId};
use farwood_fabric::call::{Call, CallError, Principal};
use farwood_fabric::clock::{MILLISECOND, Nanos};
use farwood_fabric::control::{Chore, ControlError, Epochs, IndexId, Reply, Request, SessionInfo};
use farwood_fabric::pool_clock::UnixMillis;
use farwood_fabric::region::{Identity, Permissions};
use farwood_fabric::server::ServerMemory;
use farwood_fabric::status::Tables;

/// How often leases are looked at, at most, and at least while one runs.
const LOOK_EVERY_NS: Nanos = MILLISECOND;
const LOOKS_PER_LEASE: Nanos = 64;
/// How long the one who drops an index has to finish that before others are asked to.
const DROP_OFFER_NS: Nanos = 200 * MILLISECOND;

/// A reply or refusal, and what the transport has to do before it leaves: fence, then admit (the next of that number).
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) fence: Option<SessionId>,
    pub(crate) admit: Option<(Principal, Permissions)>,
    pub(crate) reply: Result<Reply, CallError>,
}

impl From<Reply> for Answer {
    fn from(reply: Reply) -> Self {
        Self { fence: None, admit: None, reply: Ok(reply) }
    }
}

impl Answer {
    fn done() -> Self {
        Reply::Done {}.into()
    }

    fn fence(session: SessionId, reply: Reply) -> Self {
        Self { fence: Some(session), ..reply.into() }
    }
}

impl Server {
    /// `Hello` and `AttachSession`: what may be asked without an active session, as often as one likes.
    pub(crate) fn introduce(
        &mut self,
        memory: &dyn ServerMemory,
        (caller, term): (SessionId, u64),
        request: &Request,
    ) -> Result<Answer, CallError> {
        if let Request::AttachSession {
            read_only,
            term,
            coordinator,
            next_index,
            incarnation,
            ref indexes,
            seal,
        } = *request
        {
            // Whoever comes again is told its ticket again, so this has to be proven on the coordinator, too: by its first seal.
            let (of, sealed_for) = if self.is_coordinator() {
                (self.identity.incarnation, 0)
            } else {
                (coordinator, incarnation)
            };
            let opened = Opened { term, read_only, next_index, incarnation: sealed_for, indexes };
            self.check_seal(seal, self.config.secret.opened(of, caller, opened))?;
            if !self.is_coordinator() {
                self.check_coordinators(memory, coordinator, opened)?;
            }
            return self.attach(memory, caller, opened, incarnation);
        }
        let stranger = caller.is_none() || self.sessions.state(caller) == State::Free;
        if !stranger {
            self.sessions.check_active(caller, term)?;
        }
        Ok(Reply::Hello { identity: self.identity.clone() }.into())
    }

    /// What is here belongs to the memory of one coordinator: its terms and its catalog say what it means. One that comes back with
    /// empty memory begins to count anew. Whoever is new here himself had nothing of the indexes that there were before: how many those
    /// are must have been said after this memory was there, since a session may bring a seal that is older than the indexes.
    fn check_coordinators(
        &mut self,
        memory: &dyn ServerMemory,
        coordinator: u32,
        Opened { next_index, incarnation: sealed_for, indexes, .. }: Opened<'_>,
    ) -> Result<(), ControlError> {
        let known = layout::load(memory, superblock::COORDINATOR_AT);
        if known == 0 {
            let Identity { server, incarnation, .. } = self.identity;
            if sealed_for != incarnation {
                return Err(ControlError::Unbound { server, incarnation });
            }
            self.numbers.begin(memory, next_index, indexes);
            layout::store(memory, superblock::COORDINATOR_AT, u64::from(coordinator));
        } else if known != u64::from(coordinator) {
            return Err(ControlError::OtherCoordinator { server: self.identity.server });
        }
        self.numbers.learn(memory, next_index);
        Ok(())
    }

    /// The incarnation of the coordinator's memory, under which everything is sealed.
    pub(crate) fn coordinator(&self, memory: &dyn ServerMemory) -> u32 {
        if self.is_coordinator() {
            return self.identity.incarnation;
        }
        u32::try_from(layout::load(memory, superblock::COORDINATOR_AT)).unwrap_or(0)
    }

    pub(crate) fn check_seal(&self, said: u64, right: u64) -> Result<(), ControlError> {
        let server = self.identity.server;
        if said == right { Ok(()) } else { Err(ControlError::Unproven { server }) }
    }

    /// Whether a call is from the session in whose name it comes, which is active.
    pub(crate) fn check_ticket(&self, memory: &dyn ServerMemory, call: &Call) -> Result<(), ControlError> {
        let (session, term) = (call.id.session, call.id.term);
        self.check_seal(call.ticket, self.config.secret.ticket(self.coordinator(memory), session, term))
    }

    fn attach(
        &mut self,
        memory: &dyn ServerMemory,
        caller: SessionId,
        Opened { term, read_only, .. }: Opened<'_>,
        seal_for: u32,
    ) -> Result<Answer, CallError> {
        let mut fence = None;
        if self.sessions.check_attach(caller, term)? == Attach::Instead {
            // Nothing of the old holder of the number may be taken for the new one's.
            fence = Some(caller);
            self.forget(caller);
            if self.host.runs_for(caller) {
                // Procedures write on the old one's behalf: it is only shut out yet, and the new one has to come again.
                self.sessions.fence_here(memory, caller, self.sessions.term(caller))?;
                return Ok(Answer { fence, admit: None, reply: Err(CallError::Busy { queued: 0 }) });
            }
            self.clean_up(memory, caller)?;
        }
        self.sessions.attach(memory, caller, term, read_only)?;
        Ok(Answer { fence, ..self.welcome(memory, caller, read_only, seal_for)? })
    }

    /// Everything else; the caller is active, or nobody yet and opens a session.
    pub(crate) fn control(
        &mut self,
        memory: &dyn ServerMemory,
        (caller, tag): (SessionId, CallTag),
        request: Request,
        now: Nanos,
    ) -> Result<Answer, CallError> {
        if is_for_coordinator(&request) {
            self.check_coordinator()?;
        }
        if self.sessions.is_read_only(caller) && !is_for_readers(&request, caller) {
            return Err(bad(format!("{caller} only reads; open a session that may write")).into());
        }
        match request {
            Request::OpenSession { read_only, reaper, label } => {
                Ok(self.open(memory, caller, (Kind { read_only, reaper }, label), now)?)
            }
            Request::CloseSession {} => self.close(memory, caller),
            Request::Heartbeat { oldest_pin, flushed, does_chores, is_waiting } => {
                if is_waiting {
                    self.clock.wait();
                }
                self.heartbeat(memory, caller, Progress { oldest_pin, flushed }, now);
                let may = does_chores && !self.sessions.is_read_only(caller);
                let chore = if may { self.chore(caller, now) } else { None };
                Ok(self.alive(chore, memory.wall_clock_ms(now)))
            }
            Request::RequestFlush {} => {
                self.begin_flush(memory);
                Ok(self.alive(None, memory.wall_clock_ms(now)))
            }
            Request::ListSessions {} => Ok(Reply::Sessions { sessions: self.list_sessions(now) }.into()),
            Request::BeginFence { .. }
            | Request::Evict { .. }
            | Request::Fence { .. }
            | Request::CompleteFence { .. }
            | Request::BeginAdopt { .. }
            | Request::AdoptChunks { .. }
            | Request::FinishAdopt { .. } => Ok(self.bury(memory, caller, &request, now)?),
            Request::AllocChunks { .. } | Request::DrainChunks { .. } if self.sessions.is_reaper(caller) => {
                Err(bad(format!("{caller} came to recover others and may own nothing")).into())
            }
            Request::AllocChunks { .. }
            | Request::DrainChunks { .. }
            | Request::FreeChunks { .. }
            | Request::ListChunks { .. }
            | Request::ReleaseIndex { .. } => Ok(self.chunk_request(memory, (caller, tag), &request)?.into()),
            Request::CreateIndex { .. }
            | Request::IndexReady { .. }
            | Request::OpenIndex { .. }
            | Request::ListIndexes {}
            | Request::BeginDrop { .. }
            | Request::FinishDrop { .. } => Ok(self.catalog_request(memory, (caller, tag), request)?.into()),
            Request::TakeOffline { .. } | Request::BringOnline { .. } | Request::FreeExtent { .. } => {
                Ok(self.repair_request(memory, caller, &request, now)?.into())
            }
            _ => Err(CallError::Malformed),
        }
    }

    fn open(
        &mut self,
        memory: &dyn ServerMemory,
        caller: SessionId,
        (kind, label): (Kind, Label),
        now: Nanos,
    ) -> Result<Answer, ControlError> {
        if !caller.is_none() {
            return Err(bad(format!("{caller} is a session already; close it before opening another")));
        }
        let progress = self.clock.newcomer();
        let session = self.sessions.open(memory, kind, progress, now)?;
        self.clock.join(session, progress);
        self.labels.enter(session, self.sessions.term(session), label, now);
        // One that takes the place of a lost reaper shuts it out here, and elsewhere when it attaches.
        Ok(Answer {
            fence: kind.reaper.then_some(session),
            ..self.welcome(memory, session, kind.read_only, 0)?
        })
    }

    /// The caller leaves. Its procedures write on its behalf, so it has to wait for them.
    fn close(&mut self, memory: &dyn ServerMemory, caller: SessionId) -> Result<Answer, CallError> {
        if self.host.runs_for(caller) || self.host.waits_for(caller) {
            return Err(CallError::Busy { queued: 0 });
        }
        self.clean_up(memory, caller)?;
        Ok(Answer::fence(caller, Reply::Done {}))
    }

    /// Chunks and journal first, the number last: whoever gets the number next finds nothing.
    fn clean_up(&mut self, memory: &dyn ServerMemory, session: SessionId) -> Result<(), ControlError> {
        let slot = self.sessions.slot(session)?;
        self.chunks.disown(memory, session);
        self.clear_journal(memory, slot);
        self.sessions.release(memory, session);
        self.clock.leave(session);
        self.drop_orphans(memory);
        self.catalog.bring_back(memory, |_, term| !self.sessions.has_term(term));
        Ok(())
    }

    /// (Coordinator) Indexes whose makers are gone are dropped: nobody else can finish them.
    pub(crate) fn drop_orphans(&mut self, memory: &dyn ServerMemory) {
        for name in self.catalog.orphans(|term| self.sessions.has_term(term)) {
            let generation = self.begin_flush(memory);
            // It was found a moment ago, so it is there.
            let _ = self.catalog.begin_drop(memory, &name, generation);
        }
    }

    fn heartbeat(&mut self, memory: &dyn ServerMemory, caller: SessionId, news: Progress, now: Nanos) {
        self.sessions.renew(memory, caller, now);
        if let Some(published) = self.clock.publish(caller, news) {
            self.sessions.publish(memory, caller, published);
        }
        layout::store(memory, superblock::EPOCH_AT, self.clock.epochs().epoch);
        if now >= self.next_look {
            self.next_look = now.saturating_add(LOOK_EVERY_NS.min(self.config.lease_ns / LOOKS_PER_LEASE));
            self.sessions.note_lost(memory, now);
        }
    }

    fn alive(&self, chore: Option<Chore>, unix_ms: UnixMillis) -> Answer {
        Reply::Alive { epochs: self.clock.epochs(), dropping: self.catalog.all_dropping(), chore, unix_ms }
            .into()
    }

    /// What `caller` is asked to do.
    fn chore(&mut self, caller: SessionId, now: Nanos) -> Option<Chore> {
        if let Some(victim) = self.sessions.offer(caller, now) {
            return Some(Chore::Recover { victim });
        }
        let ready = self.catalog.to_finish(self.clock.epochs().flushed_through);
        self.drop_offers.retain(|index, _| ready.contains(index));
        for index in ready {
            let since = self.drop_offers.entry(index).or_insert(now);
            // Whoever asked for the drop comes first.
            if now.saturating_sub(*since) >= DROP_OFFER_NS.min(self.config.lease_ns) {
                *since = now;
                return Some(Chore::FinishDrop { index });
            }
        }
        None
    }

    fn begin_flush(&mut self, memory: &dyn ServerMemory) -> u64 {
        let generation = self.clock.request_flush();
        layout::store(memory, superblock::FLUSH_AT, generation);
        generation
    }

    /// Fencing and adoption of sessions that may be dead.
    fn bury(
        &mut self,
        memory: &dyn ServerMemory,
        caller: SessionId,
        request: &Request,
        now: Nanos,
    ) -> Result<Answer, ControlError> {
        match *request {
            Request::Fence { victim, term, .. } | Request::FinishAdopt { victim, term, .. }
                if self.sessions.is_past(victim, term) =>
            {
                Ok(Answer::done())
            }
            Request::BeginFence { victim } => {
                // Of itself a session knows best.
                let term = self.sessions.begin_fence(memory, victim, victim == caller, now)?;
                Ok(Answer::fence(victim, self.victim(victim, term)))
            }
            Request::Evict { victim, term } => {
                if self.sessions.term(victim) != term {
                    return Err(ControlError::NoSuchSession { session: victim });
                }
                self.sessions.begin_fence(memory, victim, true, now)?;
                Ok(Answer::fence(victim, self.victim(victim, term)))
            }
            Request::Fence { victim, term, seal } => {
                if !self.is_coordinator() {
                    self.check_seal(seal, self.config.secret.fence(self.coordinator(memory), victim, term))?;
                }
                self.sessions.fence_here(memory, victim, term)?;
                Ok(Answer::fence(victim, Reply::Done {}))
            }
            Request::CompleteFence { victim, term } => {
                self.sessions.complete_fence(memory, victim, term)?;
                if self.config.mistakes.flush_before_adoption {
                    self.clock.leave(victim);
                } else {
                    self.clock.fence(victim);
                }
                Ok(Answer::done())
            }
            Request::BeginAdopt { victim } => {
                let term = self.sessions.begin_adopt(memory, victim, caller)?;
                let caller = (caller, self.sessions.term(caller));
                let seal = self.config.secret.adoption(self.coordinator(memory), (victim, term), caller);
                Ok(Reply::Victim { term, seal }.into())
            }
            Request::AdoptChunks { victim, term, seal } => {
                self.check_adoption(memory, (victim, term), caller, seal)?;
                self.sessions.check_adopter(victim, term, caller)?;
                let journal = self.layout.journal(self.sessions.slot(victim)?);
                let chunks = self.chunks.disown(memory, victim);
                Ok(Reply::Adopted { chunks, journal }.into())
            }
            Request::FinishAdopt { victim, term, seal } => {
                self.check_adoption(memory, (victim, term), caller, seal)?;
                if self.sessions.has_ended(victim, term) {
                    return Ok(Answer::done());
                }
                self.sessions.check_adopter(victim, term, caller)?;
                self.clean_up(memory, victim)?;
                Ok(Answer::done())
            }
            _ => Err(bad("no request about a victim")),
        }
    }

    /// The first step of a fence was taken.
    fn victim(&self, victim: SessionId, term: u64) -> Reply {
        // Only the coordinator takes it, and its own memory is what it speaks for.
        let seal = self.config.secret.fence(self.identity.incarnation, victim, term);
        Reply::Victim { term, seal }
    }

    /// (Other servers) Whether the coordinator knows the caller as the adopter.
    fn check_adoption(
        &self,
        memory: &dyn ServerMemory,
        victim: (SessionId, u64),
        by: SessionId,
        seal: u64,
    ) -> Result<(), ControlError> {
        if self.is_coordinator() {
            return Ok(());
        }
        let by = (by, self.sessions.term(by));
        self.check_seal(seal, self.config.secret.adoption(self.coordinator(memory), victim, by))
    }

    fn chunk_request(
        &mut self,
        memory: &dyn ServerMemory,
        (caller, tag): (SessionId, CallTag),
        request: &Request,
    ) -> Result<Reply, ControlError> {
        match *request {
            Request::AllocChunks { index, class, object_bytes, count, flushed_through } => {
                let kind = ChunkType { index, class, object_bytes };
                self.check_index(index)?;
                let flushed_through = self.flushed_through(flushed_through);
                let want = Want { kind, count, flushed_through };
                let handed = self.chunks.allocate_for(memory, caller, want, tag)?;
                Ok(Reply::Chunks { offset: handed.offset, inherited: handed.inherited })
            }
            Request::DrainChunks {
                index,
                class,
                object_bytes,
                stamp,
                flushed_stamp,
                flush,
                flushed_through,
            } => {
                self.check_index(index)?;
                let drain = Drain {
                    kind: ChunkType { index, class, object_bytes },
                    stamp,
                    flushing: (flush > 0).then_some((flushed_stamp, flush)),
                    flushed_through: self.flushed_through(flushed_through),
                };
                let sessions = &self.sessions;
                let Drained { is_ready, waiting } =
                    self.chunks.drain(memory, caller, drain, |term| sessions.has_term(term))?;
                Ok(Reply::Draining { is_ready, waiting })
            }
            Request::FreeChunks { offset, generation } => {
                let generation = self.check_generation(generation)?;
                self.chunks.free(memory, caller, offset, generation)?;
                Ok(Reply::Done {})
            }
            Request::ListChunks { owner } => Ok(Reply::ChunkList {
                chunks: self.chunks.list(owner),
                total: self.chunks.total(),
                free: self.chunks.free_chunks(),
            }),
            Request::ReleaseIndex { index, seal } => {
                let (secret, coordinator) = (self.config.secret, self.coordinator(memory));
                let right = secret.released(coordinator, index);
                let answer = if self.is_coordinator() {
                    self.catalog.check_released(index, self.clock.epochs().flushed_through)?;
                    right
                } else {
                    self.check_seal(seal, right)?;
                    secret.released_by(coordinator, index, self.identity.server)
                };
                self.chunks.release(memory, index);
                if !self.is_coordinator() {
                    self.numbers.released(memory, index);
                }
                Ok(Reply::Released { seal: answer })
            }
            _ => Err(bad("no request about chunks")),
        }
    }

    /// Whether the index may have chunks here: what is given to one that does not exist, nobody ever releases. The other servers know which
    /// numbers are in use: whoever creates an index tells them before it asks for memory, and whoever drops one, too.
    fn check_index(&self, index: IndexId) -> Result<(), ControlError> {
        if self.is_coordinator() {
            return self.catalog.check_serves(index, self.clock.epochs().flushed_through);
        }
        self.numbers.check(index)
    }

    /// Up to which flush every session has flushed. The coordinator knows better than any client; the others can only believe it.
    fn flushed_through(&self, said: u64) -> u64 {
        let known = self.is_coordinator().then(|| self.clock.epochs().flushed_through);
        said.min(known.unwrap_or(u64::MAX))
    }

    /// The flush that a chunk freed now waits for. The coordinator, which announces them, takes none before its newest, and none
    /// beyond the next, which might never come. The others can only believe the caller.
    pub(crate) fn check_generation(&self, generation: u64) -> Result<u64, ControlError> {
        if !self.is_coordinator() {
            return Ok(generation);
        }
        let flush = self.clock.epochs().flush;
        if generation > flush.saturating_add(1) {
            return Err(bad(format!(
                "flush {generation} was not announced, {flush} was; request one and name that"
            )));
        }
        Ok(generation.max(flush))
    }

    fn catalog_request(
        &mut self,
        memory: &dyn ServerMemory,
        (caller, tag): (SessionId, CallTag),
        request: Request,
    ) -> Result<Reply, ControlError> {
        match request {
            Request::CreateIndex { name, engine, config } => {
                let creator = (self.sessions.term(caller), tag);
                Ok(Reply::Index { info: self.catalog.create(memory, name, engine, config, creator)? })
            }
            Request::IndexReady { index } => {
                self.catalog.ready(memory, index, self.sessions.term(caller))?;
                Ok(Reply::Done {})
            }
            Request::OpenIndex { name, engine } => {
                let info = self.catalog.open(&name, engine.as_deref())?;
                self.check_online(&name, caller)?;
                Ok(Reply::Index { info })
            }
            Request::ListIndexes {} => Ok(Reply::Indexes { infos: self.catalog.list() }),
            Request::BeginDrop { name } => {
                if let Some((info, generation)) = self.catalog.dropping(&name)? {
                    return Ok(Reply::Dropping { info, generation });
                }
                self.check_online(&name, SessionId::NONE)?;
                // Nobody learns of the generation before the state has changed: both happen within this call.
                let generation = self.begin_flush(memory);
                let info = self.catalog.begin_drop(memory, &name, generation)?;
                Ok(Reply::Dropping { info, generation })
            }
            Request::FinishDrop { index, seals } => {
                let flushed_through = self.clock.epochs().flushed_through;
                self.catalog.check_released(index, flushed_through)?;
                let (secret, coordinator) = (self.config.secret, self.identity.incarnation);
                let others = (1..self.config.servers).map(ServerId::new);
                let are_done = others.map(|server| secret.released_by(coordinator, index, server)).eq(seals);
                if self.catalog.contains(index) && (self.chunks.any_of(index) || !are_done) {
                    return Err(bad(format!(
                        "index #{index} still has chunks; release it on every server first"
                    )));
                }
                self.catalog.finish_drop(memory, index, flushed_through)?;
                Ok(Reply::Done {})
            }
            _ => Err(bad("no request about the catalog")),
        }
    }

    fn welcome(
        &self,
        memory: &dyn ServerMemory,
        session: SessionId,
        read_only: bool,
        seal_for: u32,
    ) -> Result<Answer, ControlError> {
        let permissions = if read_only { Permissions::READ } else { Permissions::ALL };
        let (is_coordinator, coordinator) = (self.is_coordinator(), self.coordinator(memory));
        let (secret, term) = (self.config.secret, self.sessions.term(session));
        let ticket = secret.ticket(coordinator, session, term);
        let next_index = if is_coordinator { self.catalog.next_id() } else { 0 };
        let is_bound = is_coordinator && seal_for != 0;
        let indexes = if is_bound { self.catalog.numbers() } else { Vec::new() };
        let opened = Opened { term, read_only, next_index, incarnation: seal_for, indexes: &indexes };
        let seal = if is_coordinator { secret.opened(coordinator, session, opened) } else { 0 };
        let reply = Reply::Session {
            session,
            term,
            lease_ns: self.config.lease_ns,
            journal: self.layout.journal(self.sessions.slot(session)?),
            epochs: if is_coordinator { self.clock.epochs() } else { Epochs::default() },
            ticket,
            next_index,
            indexes,
            seal,
            lost_below: self.numbers.lost_below(),
        };
        let who = Principal { session, term, ticket };
        Ok(Answer { fence: None, admit: Some((who, permissions)), reply: Ok(reply) })
    }

    /// What the tables hold, for those who watch.
    pub(crate) fn status(&self, now: Nanos) -> Tables {
        let (running, queued) = self.host.load();
        Tables {
            chunks: self.chunks.total(),
            free_chunks: self.chunks.free_chunks(),
            max_sessions: self.config.max_sessions,
            lease_ns: self.config.lease_ns,
            epoch: self.clock.epochs().epoch,
            sessions: self.list_sessions(now),
            indexes: self.catalog.list(),
            cores: u16::try_from(self.config.cores).unwrap_or(u16::MAX),
            running,
            queued,
            lost_below: self.numbers.lost_below(),
            torn: self.torn.clone(),
        }
    }

    pub(crate) fn list_sessions(&self, now: Nanos) -> Vec<SessionInfo> {
        let sessions = self.sessions.list(now).into_iter();
        let sessions = sessions.map(|Listed { session, term, state, lease_left_ns, adopter }| {
            let oldest_pin = self.clock.progress(session).map_or(0, |progress| progress.oldest_pin);
            let (label, since_ns) = self.labels.find(session, term, now);
            SessionInfo { session, term, state, lease_left_ns, oldest_pin, adopter, label, since_ns }
        });
        sessions.collect()
    }

    fn is_coordinator(&self) -> bool {
        self.config.is_coordinator()
    }

    fn check_coordinator(&self) -> Result<(), ControlError> {
        let server = ServerId::COORDINATOR;
        if self.is_coordinator() { Ok(()) } else { Err(ControlError::NotCoordinator { server }) }
    }
}

/// What concerns the whole pool.
fn is_for_coordinator(request: &Request) -> bool {
    matches!(
        request,
        Request::OpenSession { .. }
            | Request::Heartbeat { .. }
            | Request::RequestFlush {}
            | Request::BeginFence { .. }
            | Request::Evict { .. }
            | Request::CompleteFence { .. }
            | Request::BeginAdopt { .. }
            | Request::CreateIndex { .. }
            | Request::IndexReady { .. }
            | Request::OpenIndex { .. }
            | Request::ListIndexes {}
            | Request::BeginDrop { .. }
            | Request::FinishDrop { .. }
            | Request::TakeOffline { .. }
            | Request::BringOnline { .. }
            | Request::ListSessions {}
    )
}

/// What a session that only reads may ask: to look, to live, and to end itself.
fn is_for_readers(request: &Request, caller: SessionId) -> bool {
    match request {
        Request::CloseSession {}
        | Request::Heartbeat { .. }
        | Request::ListChunks { .. }
        | Request::OpenIndex { .. }
        | Request::ListIndexes {}
        | Request::ListSessions {} => true,
        Request::BeginFence { victim } | Request::Fence { victim, .. } => *victim == caller,
        _ => false,
    }
}

fn bad(why: impl Into<String>) -> ControlError {
    ControlError::BadRequest { why: why.into() }
}
