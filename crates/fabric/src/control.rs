//! What clients and a memory server say to each other: sessions, leases and fencing, epochs, chunks, the catalog.
//!
//! All of it travels as calls to [`ProcedureId::CONTROL`](crate::procedure::ProcedureId::CONTROL), so it has the
//! at-most-once ids, the time-outs and the faults of every other call. The server's side is the `memory` crate, the
//! client's is [`crate::session`]; this file is the language both speak, and the layout of an object chunk, which both
//! touch. The *coordinator* (server 0) alone answers what concerns the whole pool.
//!
//! **Terms.** The number of a session is used again when it has ended, its *term* never: the coordinator counts terms
//! from 1 and keeps the count. Every step that reaches a session by its number from outside says which term it means, as
//! told by `BeginFence` or `BeginAdopt`, so a step that comes late cannot hit the next holder of the number.
//!
//! **Proofs.** Servers do not talk to each other: clients carry from the coordinator to the others what it has decided. So that nobody
//! can make that up, the coordinator puts a *seal* on it, which the others check with a secret that all servers share: that a session
//! was opened, that a victim may be fenced, who adopts it, that an index was dropped. A session proves itself by its *ticket*, which
//! stands in every call and introduction. Clients do not understand either, and pass them on.

use crate::addr::{GlobalAddr, RegionId, ServerId, SessionId};
use crate::clock::Nanos;
use crate::label::Label;
use crate::pool_clock::UnixMillis;
use crate::region::Identity;
use crate::wire::{wire_enum, wire_struct};
use std::fmt;

/// Number of an index in its pool. Never used twice, so that what is keyed by it stays unmistakable.
pub type IndexId = u32;

/// Where chunks begin in main memory. What is below is never handed out, so that address 0 can mean none.
pub const MAIN_BASE: u64 = 4096;
/// Bytes of CAS-able words that each index has for its root pointers.
pub const ANCHOR_BYTES: u64 = 4096;
/// Slots of eight bytes in which a session records, per server, what it has unlinked but not yet freed.
pub const RETIRE_SLOTS: u64 = 512;
/// The class of pages in which journals go on that need more slots, in every index. Each session needs few, so they share chunks.
pub const PAGE_CLASS: u16 = u16::MAX;
/// Bytes of intent slots per session and server, for the recovery of half-done work.
pub const INTENT_BYTES: u64 = 4096;
/// A session's journal on one server: retire slots, then intents.
pub const JOURNAL_BYTES: u64 = RETIRE_SLOTS * 8 + INTENT_BYTES;

wire_enum! {
    /// What a client asks of a memory server.
    #[derive(Clone, PartialEq, Eq, Debug)]
    #[non_exhaustive]
    pub enum Request {
        /// Who are you? -> `Hello`
        Hello = 1 {},
        /// (Coordinator) A new session; the same call sent again answers with the same one. -> `Session`
        OpenSession = 2 {
            /// It will only read.
            read_only: bool,
            /// It comes to recover others and holds nothing of its own: it may have one of the numbers that are kept back for
            /// that.
            reaper: bool,
            /// Who it is, for people.
            label: Label,
        },
        /// (Other servers) Admit a session that the coordinator opened. It takes the place of an earlier holder of its
        /// number; one whose term has ended here, or is followed by a newer one, is refused. -> `Session`
        AttachSession = 3 {
            /// It will only read.
            read_only: bool,
            /// Its term, as the coordinator said.
            term: u64,
            /// The coordinator's incarnation: terms of another one mean somebody else.
            coordinator: u32,
            /// The number of the next index, as the coordinator said.
            next_index: IndexId,
            /// The incarnation of the server's memory for which the seal was made; 0: it was made when the session was opened, and is
            /// not taken by memory that nobody has attached to. Said to the coordinator, who answers with its newest seal: for which
            /// to make it.
            incarnation: u32,
            /// For such a memory: the numbers of all indexes, as the coordinator said.
            indexes: Vec<IndexId>,
            /// The coordinator's seal on all that.
            seal: u64,
        },
        /// The caller ends its session; its chunks become nobody's. -> `Done`
        CloseSession = 4 {},
        /// (Coordinator) Renews the lease, publishes the oldest epoch in flight and the last flush done; tells the time. -> `Alive`
        Heartbeat = 5 {
            /// No operation in flight began before this epoch.
            oldest_pin: u64,
            /// Hints were dropped, and the operations that used them ended, up to this generation.
            flushed: u64,
            /// The caller does chores: the reply may have one.
            does_chores: bool,
            /// The caller waits for the epochs to go on.
            is_waiting: bool,
        },
        /// (Coordinator) Asks every session to drop its hints. -> `Alive`
        RequestFlush = 6 {},
        /// (Coordinator) First step of fencing: refused while the lease runs, except of oneself. -> `Victim`
        BeginFence = 7 {
            /// Who.
            victim: SessionId,
        },
        /// (Other servers) Second step: none of the victim's verbs can land here any more, even if it never came here.
        /// Without effect if the number has a newer holder. -> `Done`
        Fence = 8 {
            /// Who.
            victim: SessionId,
            /// Which holder of that number.
            term: u64,
            /// The coordinator's seal: the first step was taken. The coordinator itself does not look at it.
            seal: u64,
        },
        /// (Coordinator) Third step, after every server has fenced. -> `Done`
        CompleteFence = 9 {
            /// Who.
            victim: SessionId,
            /// Which holder of that number.
            term: u64,
        },
        /// (Coordinator) Takes on the clean-up of a fenced session; one at a time. -> `Victim`
        BeginAdopt = 10 {
            /// Whose.
            victim: SessionId,
        },
        /// The victim's chunks on this server become nobody's, and are listed. -> `Adopted`
        AdoptChunks = 11 {
            /// Whose.
            victim: SessionId,
            /// Which holder of that number.
            term: u64,
            /// The coordinator's seal: the caller is the adopter. The coordinator itself does not look at it.
            seal: u64,
        },
        /// The victim's journal was dealt with: clear it; on the coordinator, its number may be used again. On other
        /// servers without effect if the number has a newer holder. -> `Done`
        FinishAdopt = 12 {
            /// Whose.
            victim: SessionId,
            /// Which holder of that number.
            term: u64,
            /// As in `AdoptChunks`.
            seal: u64,
        },
        /// Contiguous chunks for one index and class. -> `Chunks`
        AllocChunks = 13 {
            /// For which index.
            index: IndexId,
            /// For which class of its objects.
            class: u16,
            /// Objects of this size with a bitmap in front; 0: raw bytes, nothing written.
            object_bytes: u32,
            /// How many chunks in a row.
            count: u32,
            /// Every session has flushed up to this generation: what was freed before it may change its type.
            flushed_through: u64,
        },
        /// Gives chunks back; at once for the same index and class, for others after flush `generation`. -> `Done`
        FreeChunks = 14 {
            /// Their offset in main memory.
            offset: u64,
            /// The flush that has to be through first: at most the next one. The coordinator takes its newest for any before.
            generation: u64,
        },
        /// Lists chunks in use, of one owner or of all. -> `ChunkList`
        ListChunks = 15 {
            /// Whose, or everybody's.
            owner: Option<SessionId>,
        },
        /// Frees all chunks of a dropped index, whose hints are flushed. The coordinator is asked first: it knows whether that is so.
        /// -> `Released`
        ReleaseIndex = 16 {
            /// Which.
            index: IndexId,
            /// What the coordinator answered to the same request; it does not look at it itself.
            seal: u64,
        },
        /// (Coordinator) Enters an index in the catalog, in state `Creating`. -> `Index`
        CreateIndex = 17 {
            /// Its name.
            name: String,
            /// Which engine.
            engine: String,
            /// The engine's configuration, as the engine encodes it.
            config: Vec<u8>,
        },
        /// (Coordinator) The engine has laid out the index: others may open it. -> `Done`
        IndexReady = 18 {
            /// Which.
            index: IndexId,
        },
        /// (Coordinator) Finds an index by name. -> `Index`
        OpenIndex = 19 {
            /// Its name.
            name: String,
            /// The engine the caller expects, if it does.
            engine: Option<String>,
        },
        /// (Coordinator) All indexes. -> `Indexes`
        ListIndexes = 20 {},
        /// (Coordinator) First step of a drop: nobody opens it any more, everybody flushes. -> `Dropping`
        BeginDrop = 21 {
            /// Its name.
            name: String,
        },
        /// (Coordinator) Last step, after every server has released it. -> `Done`
        FinishDrop = 22 {
            /// Which.
            index: IndexId,
            /// What the other servers answered to `ReleaseIndex`, in the order of their numbers.
            seals: Vec<u64>,
        },
        /// (Coordinator) All sessions. -> `Sessions`
        ListSessions = 23 {},
        /// (Coordinator) First step of fencing, by order of somebody who knows: whether the lease runs or not, but only this
        /// holder of the number. -> `Victim`
        Evict = 25 {
            /// Who.
            victim: SessionId,
            /// Which holder of that number.
            term: u64,
        },
        /// Makes room for a class where no chunk is left: chunks of others that are nearly empty are *drained*. Nobody is given one any
        /// more; after a flush nobody claims objects in it; once it is empty, and after another flush, it serves any class.
        /// -> `Draining`
        DrainChunks = 26 {
            /// For which index.
            index: IndexId,
            /// For which class of its objects.
            class: u16,
            /// Of this size.
            object_bytes: u32,
            /// A number of the caller's, never used before, for the flush that it is going to ask for.
            stamp: u64,
            /// The number that it gave before.
            flushed_stamp: u64,
            /// The flush that it asked for after that; 0: none.
            flush: u64,
            /// Every session has flushed up to this generation.
            flushed_through: u64,
        },
        /// (Coordinator) Takes an index out of use, for a repair: nobody but the caller may open it until `BringOnline`, or until the
        /// caller's session has ended. Refused while any other session is in the pool, dead or alive: the coordinator does not know
        /// which index a session has open. -> `Offline`
        TakeOffline = 30 {
            /// Its name.
            name: String,
        },
        /// (Coordinator) Whoever took the index out of use is done. -> `Done`
        BringOnline = 31 {
            /// Which.
            index: IndexId,
        },
        /// Frees raw bytes of an index that the caller has taken out of use, whoever had them. -> `Done`
        FreeExtent = 32 {
            /// Which index.
            index: IndexId,
            /// Their offset in main memory.
            offset: u64,
            /// The flush that has to be through before others get them, as in `FreeChunks`.
            generation: u64,
            /// The coordinator's seal, as `TakeOffline` answered.
            seal: u64,
        },
    }
}

impl Request {
    /// Whether it does no harm if the next process of the server carries it out again, because its answer went with the last one: all but
    /// one find in the server's tables what came of them. What was given back may have been handed out again.
    pub(crate) fn may_be_repeated(&self) -> bool {
        !matches!(self, Self::FreeChunks { .. })
    }
}

wire_enum! {
    /// What a memory server answers.
    #[derive(Clone, PartialEq, Eq, Debug)]
    #[non_exhaustive]
    pub enum Reply {
        /// It is done (or was done already).
        Done = 1 {},
        /// Who the server is.
        Hello = 2 {
            /// This.
            identity: Identity,
        },
        /// The session is admitted.
        Session = 3 {
            /// Its number.
            session: SessionId,
            /// Its term: no other session ever has it.
            term: u64,
            /// How long it lives without a heartbeat; 0: for ever.
            lease_ns: Nanos,
            /// Its journal on this server.
            journal: GlobalAddr,
            /// The epoch and flush generation to begin with.
            epochs: Epochs,
            /// What proves that a call or a connection is the session's own.
            ticket: u64,
            /// (Coordinator) The number of the next index, to be said when attaching.
            next_index: IndexId,
            /// (Coordinator) The numbers of all indexes, to be said when attaching to memory that nobody has attached to.
            indexes: Vec<IndexId>,
            /// (Coordinator) The seal on all that is to be said when attaching.
            seal: u64,
            /// (Other servers) Indexes with numbers below this have lost what they had here: the server came back empty. At most 1: none.
            lost_below: IndexId,
        },
        /// The pool as whoever is alive has to know it.
        Alive = 4 {
            /// The pool's epochs.
            epochs: Epochs,
            /// Indexes that are being dropped: nobody may begin an operation on them.
            dropping: Vec<IndexId>,
            /// What the caller is asked to do. An offer, not a right: others may be at it.
            chore: Option<Chore>,
            /// What the coordinator's clock on the wall says.
            unix_ms: UnixMillis,
        },
        /// Chunks for the caller.
        Chunks = 5 {
            /// Where in main memory.
            offset: u64,
            /// They hold objects of an earlier owner: read the bitmap.
            inherited: bool,
        },
        /// What a dead session held on this server.
        Adopted = 6 {
            /// Its chunks, now nobody's.
            chunks: Vec<ChunkInfo>,
            /// Its journal, to be read and finished.
            journal: GlobalAddr,
        },
        /// Chunks in use.
        ChunkList = 7 {
            /// These.
            chunks: Vec<ChunkInfo>,
            /// How many chunks the server has in all.
            total: u64,
            /// How many of them are free for any use.
            free: u64,
        },
        /// An index.
        Index = 8 {
            /// This.
            info: IndexInfo,
        },
        /// The catalog.
        Indexes = 9 {
            /// These.
            infos: Vec<IndexInfo>,
        },
        /// A drop is under way.
        Dropping = 10 {
            /// The index.
            info: IndexInfo,
            /// Wait until every session has flushed this generation.
            generation: u64,
        },
        /// The sessions.
        Sessions = 11 {
            /// These.
            sessions: Vec<SessionInfo>,
        },
        /// Whom a fence or an adoption is about.
        Victim = 12 {
            /// The victim's term, to be said in all further steps.
            term: u64,
            /// The coordinator's seal, by which other servers know that it has agreed.
            seal: u64,
        },
        /// An index's chunks are free.
        Released = 13 {
            /// (Coordinator) Its seal, by which other servers know that it is so. It stays valid: no number is used twice. (Other servers)
            /// A seal by which the coordinator knows that they have done it.
            seal: u64,
        },
        /// How far draining is.
        Draining = 14 {
            /// A chunk can be had now.
            is_ready: bool,
            /// So many chunks wait for a flush.
            waiting: u32,
        },
        /// An index is out of use.
        Offline = 20 {
            /// The index.
            info: IndexInfo,
            /// The coordinator's seal, by which other servers know that it is so, and whose right it is.
            seal: u64,
        },
    }
}

wire_enum! {
    /// What the coordinator asks a session to do for the pool. It notices; only sessions can act, since servers know no engines.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    #[non_exhaustive]
    pub enum Chore {
        /// Recover a session that is dead.
        Recover = 1 {
            /// Whom.
            victim: SessionId,
        },
        /// Finish the drop of an index that every session has let go of.
        FinishDrop = 2 {
            /// Which.
            index: IndexId,
        },
    }
}

/// The pool's clockwork of reclamation.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Epochs {
    /// The current epoch.
    pub epoch: u64,
    /// No session has an operation in flight that began before this epoch.
    pub safe: u64,
    /// The newest flush asked for.
    pub flush: u64,
    /// Every session has done the flushes up to this one.
    pub flushed_through: u64,
    /// Somebody waited for the last epoch to come to its end: heartbeats are wanted sooner.
    pub is_awaited: bool,
}
wire_struct!(Epochs { epoch, safe, flush, flushed_through, is_awaited });

/// Chunks in use.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ChunkInfo {
    /// Where in main memory.
    pub offset: u64,
    /// How many in a row.
    pub count: u32,
    /// The index they serve.
    pub index: IndexId,
    /// The class of objects they hold.
    pub class: u16,
    /// The size of an object; 0: raw bytes.
    pub object_bytes: u32,
    /// Who allocates from them; nobody, if the owner died or left.
    pub owner: SessionId,
}
wire_struct!(ChunkInfo { offset, count, index, class, object_bytes, owner });

/// State of an index in the catalog.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IndexState {
    /// Its creator lays it out.
    Creating,
    /// It can be opened.
    Ready,
    /// It is being dropped; whoever drops it again finishes the work.
    Dropping,
    /// One session repairs it; nobody else can open it until that session is done, or has ended.
    Offline,
}

impl crate::wire::Wire for IndexState {
    fn put(&self, out: &mut Vec<u8>) {
        (*self as u8).put(out);
    }
    fn take(input: &mut &[u8]) -> Result<Self, crate::wire::Malformed> {
        match u8::take(input)? {
            0 => Ok(Self::Creating),
            1 => Ok(Self::Ready),
            2 => Ok(Self::Dropping),
            3 => Ok(Self::Offline),
            _ => Err(crate::wire::Malformed),
        }
    }
}

/// An index as the catalog knows it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct IndexInfo {
    /// Its number.
    pub id: IndexId,
    /// Its name.
    pub name: String,
    /// Which engine.
    pub engine: String,
    /// The engine's configuration.
    pub config: Vec<u8>,
    /// Its state.
    pub state: IndexState,
    /// Its [`ANCHOR_BYTES`] of CAS-able words, zero at first.
    pub anchor: GlobalAddr,
}
wire_struct!(IndexInfo { id, name, engine, config, state, anchor });

/// State of a session.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SessionState {
    /// Alive, or not yet found dead.
    Active,
    /// Being fenced: some servers may still execute its verbs.
    Fencing,
    /// Nothing of it can land any more; its locks may be stolen, its memory taken.
    Fenced,
    /// Somebody cleans up after it.
    Adopting,
}

impl crate::wire::Wire for SessionState {
    fn put(&self, out: &mut Vec<u8>) {
        (*self as u8).put(out);
    }
    fn take(input: &mut &[u8]) -> Result<Self, crate::wire::Malformed> {
        match u8::take(input)? {
            0 => Ok(Self::Active),
            1 => Ok(Self::Fencing),
            2 => Ok(Self::Fenced),
            3 => Ok(Self::Adopting),
            _ => Err(crate::wire::Malformed),
        }
    }
}

/// Where the session table is in the coordinator's META, and how long its entries are: whoever waits for a session's lock looks
/// there whether it is alive.
pub const SESSION_TABLE_AT: u64 = 4096;
/// Bytes of a session's entry there. Its first word is a [`SessionWord`].
pub const SESSION_ENTRY_BYTES: u64 = 32;

/// The first word of a session's entry in the coordinator's META.
///
/// ```text
/// 63    32 31       16 15  11 10       9        8           7     0
/// [ zero ] [ adopter ] [ zero ] [ reaper ] [ lost ] [ read only ] [ state ]      state 0: nobody has the number
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SessionWord {
    /// Its state; `None`: nobody has the number.
    pub state: Option<SessionState>,
    /// It may only READ.
    pub read_only: bool,
    /// Its lease has run out, or its process is gone. A hint: a late heartbeat takes it back.
    pub is_lost: bool,
    /// It came to recover others and holds nothing.
    pub reaper: bool,
    /// Who cleans up after it, in state [`SessionState::Adopting`].
    pub adopter: SessionId,
}

impl SessionWord {
    /// Where the word of this session is.
    pub fn addr(session: SessionId) -> Option<GlobalAddr> {
        let slot = u64::from(session.get().checked_sub(1)?);
        let offset = SESSION_TABLE_AT + slot * SESSION_ENTRY_BYTES;
        Some(GlobalAddr::new(ServerId::COORDINATOR, RegionId::META, offset))
    }

    /// From the 64 bits; `None` if they are nobody's word.
    pub fn from_raw(raw: u64) -> Option<Self> {
        let state = match raw & 0xff {
            0 => None,
            1 => Some(SessionState::Active),
            2 => Some(SessionState::Fencing),
            3 => Some(SessionState::Fenced),
            4 => Some(SessionState::Adopting),
            _ => return None,
        };
        let adopter = SessionId::new(u16::try_from(raw >> 16 & 0xffff).unwrap_or(0));
        let [read_only, is_lost, reaper] = [8, 9, 10].map(|bit| raw >> bit & 1 == 1);
        let word = Self { state, read_only, is_lost, reaper, adopter };
        (word.to_raw() == raw).then_some(word)
    }

    /// The 64 bits.
    pub fn to_raw(self) -> u64 {
        let state = match self.state {
            None => return 0,
            Some(SessionState::Active) => 1,
            Some(SessionState::Fencing) => 2,
            Some(SessionState::Fenced) => 3,
            Some(SessionState::Adopting) => 4,
        };
        state
            | u64::from(self.read_only) << 8
            | u64::from(self.is_lost) << 9
            | u64::from(self.reaper) << 10
            | u64::from(self.adopter.get()) << 16
    }

    /// Whether the session needs somebody who recovers it, as far as the word says.
    pub fn is_dead(self) -> bool {
        match self.state {
            None => false,
            Some(SessionState::Active) => self.is_lost,
            Some(_) => true,
        }
    }
}

/// A session as the coordinator knows it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SessionInfo {
    /// Its number.
    pub session: SessionId,
    /// Its term.
    pub term: u64,
    /// Its state.
    pub state: SessionState,
    /// How long its lease still runs; 0: it ran out.
    pub lease_left_ns: Nanos,
    /// The oldest epoch it published.
    pub oldest_pin: u64,
    /// Who cleans up after it; nobody, unless its state is `Adopting`.
    pub adopter: SessionId,
    /// Who it says it is. Empty if it did not say, or the coordinator restarted since.
    pub label: Label,
    /// How long it has been there, as far as this process of the coordinator knows.
    pub since_ns: Nanos,
}
wire_struct!(SessionInfo { session, term, state, lease_left_ns, oldest_pin, adopter, label, since_ns });

wire_enum! {
    /// Why a memory server refuses.
    #[derive(Clone, PartialEq, Eq, Debug)]
    #[non_exhaustive]
    pub enum ControlError {
        /// No chunks left that this index and class may have.
        PoolFull = 1 {
            /// On which server.
            server: ServerId,
            /// How many in a row were asked for.
            wanted: u32,
            /// Freed chunks wait for a flush: asking for one will help.
            flush_helps: bool,
        },
        /// This server does not keep the pool's sessions and catalog.
        NotCoordinator = 2 {
            /// It is this one.
            server: ServerId,
        },
        /// No such session.
        NoSuchSession = 3 {
            /// Which.
            session: SessionId,
        },
        /// As many sessions as there can be.
        SessionsFull = 4 {
            /// That many.
            max: u16,
            /// So many of them are dead, and nobody has cleaned up after them yet.
            dead: u16,
        },
        /// The caller was fenced.
        SessionFenced = 5 {
            /// Who.
            session: SessionId,
        },
        /// The victim's lease still runs.
        LeaseAlive = 6 {
            /// Whose.
            session: SessionId,
            /// For so long.
            left_ns: Nanos,
        },
        /// The victim is not fenced everywhere yet.
        NotFenced = 7 {
            /// Who.
            session: SessionId,
        },
        /// Somebody else cleans up after the victim.
        BeingAdopted = 8 {
            /// After whom.
            session: SessionId,
            /// Who does.
            by: SessionId,
        },
        /// The name is taken.
        NameExists = 9 {
            /// The name.
            name: String,
        },
        /// No index of that name.
        NoSuchIndex = 10 {
            /// The name.
            name: String,
        },
        /// The index is not ready.
        IndexNotReady = 11 {
            /// Its name.
            name: String,
            /// What it is instead.
            state: IndexState,
        },
        /// The index belongs to another engine.
        WrongEngine = 12 {
            /// Its name.
            name: String,
            /// Its engine.
            engine: String,
            /// The engine the caller expected.
            wanted: String,
        },
        /// As many indexes as there can be.
        CatalogFull = 13 {
            /// That many.
            max: u16,
        },
        /// A name, engine or configuration that cannot be stored.
        BadName = 14 {
            /// What is wrong with it.
            why: String,
        },
        /// A request that makes no sense.
        BadRequest = 15 {
            /// Why.
            why: String,
        },
        /// The drop waits for sessions to flush.
        DropPending = 16 {
            /// Which index.
            name: String,
        },
        /// What this server holds belongs to another coordinator's memory than the caller's.
        OtherCoordinator = 17 {
            /// On which server.
            server: ServerId,
        },
        /// A request says what only the coordinator may decide, or comes in a session's name, and the proof is not the coordinator's.
        Unproven = 18 {
            /// On which server.
            server: ServerId,
        },
        /// Nobody has attached to this server's memory yet: whoever is the first has to bring a seal that was made for it.
        Unbound = 19 {
            /// Which server.
            server: ServerId,
            /// The incarnation of its memory.
            incarnation: u32,
        },
        /// Somebody repairs the index.
        IndexOffline = 30 {
            /// Its name.
            name: String,
            /// Who repairs it.
            by: SessionId,
        },
        /// The index cannot be taken out of use: others are in the pool, who may have it open.
        IndexInUse = 31 {
            /// Its name.
            name: String,
            /// Who they are.
            others: Vec<SessionInfo>,
        },
    }
}

impl fmt::Display for ControlError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PoolFull { server, wanted, flush_helps: true } => write!(
                f,
                "server {server} has no {wanted} free chunks in a row now, but freed ones wait for a flush; request a \
                 flush and try again"
            ),
            Self::PoolFull { server, wanted, flush_helps: false } => {
                write!(f, "server {server} has no {wanted} free chunks in a row; add memory or drop an index")
            }
            Self::NotCoordinator { server } => {
                write!(f, "only server {server} keeps sessions and the catalog; ask it")
            }
            Self::NoSuchSession { session } => write!(f, "there is no session {session}; open one"),
            Self::SessionsFull { max, dead: 0 } => {
                write!(f, "all {max} sessions are in use; close one, or start the pool with more")
            }
            Self::SessionsFull { max, dead } => write!(
                f,
                "all {max} sessions are in use, {dead} of them by sessions that are dead and wait to be recovered; try again \
                 in a moment: whoever joins recovers them, unless nobody knows the engine of some index; drop that one"
            ),
            Self::SessionFenced { session } => {
                write!(f, "session {session} was fenced after its lease ran out; open a new session")
            }
            Self::LeaseAlive { session, left_ns } => {
                write!(f, "the lease of {session} runs for another {} ms; wait for it", left_ns / 1_000_000)
            }
            Self::NotFenced { session } => {
                write!(f, "{session} is not fenced on every server yet; fence it first")
            }
            Self::BeingAdopted { session, by } => {
                write!(f, "{by} already cleans up after {session}; wait, or fence {by} if it is dead")
            }
            Self::NameExists { name } => {
                write!(f, "an index '{name}' exists; open it, drop it or choose another name")
            }
            Self::NoSuchIndex { name } => {
                write!(f, "there is no index '{name}'; list the indexes or create it")
            }
            Self::IndexNotReady { name, state: IndexState::Dropping } => {
                write!(
                    f,
                    "index '{name}' is being dropped; drop it again to finish that, then create it anew"
                )
            }
            Self::IndexNotReady { name, .. } => {
                write!(f, "index '{name}' is still being created; try again, or drop it if its creator died")
            }
            Self::WrongEngine { name, engine, wanted } => {
                write!(
                    f,
                    "index '{name}' belongs to engine '{engine}', not '{wanted}'; open it with '{engine}'"
                )
            }
            Self::CatalogFull { max } => {
                write!(f, "the catalog holds {max} indexes already; drop one, or start the pool with more")
            }
            Self::Unbound { server, .. } => write!(
                f,
                "server {server} has empty memory, and what the caller brings from the coordinator may be older than that; let the \
                 coordinator seal it anew for this memory"
            ),
            Self::IndexOffline { name, by } => write!(
                f,
                "index '{name}' is out of use while {by} repairs it; try again when that is done, or has been recovered"
            ),
            Self::IndexInUse { name, others } => {
                write!(f, "index '{name}' cannot be taken out of use while others are in the pool:")?;
                for other in others {
                    let label = if other.label.is_empty() { "no label" } else { other.label.as_str() };
                    write!(f, " {} ({label});", other.session)?;
                }
                f.write_str(" close gateways and clients, or evict them, and try again")
            }
            Self::BadName { why } => write!(f, "the catalog cannot store that: {why}"),
            Self::BadRequest { why } => write!(f, "the memory server refused a request: {why}"),
            Self::DropPending { name } => {
                write!(
                    f,
                    "index '{name}' is marked as dropped, but some session has not let go of it yet; drop it again"
                )
            }
            Self::OtherCoordinator { server } => write!(
                f,
                "server {server} holds parts of indexes that went with the memory of server {}; start {server} with empty \
                 memory, too, or {} with the memory that it had",
                ServerId::COORDINATOR,
                ServerId::COORDINATOR
            ),
            Self::Unproven { server } => write!(
                f,
                "server {server} finds no proof of server {} in a request; start all servers of a pool with the same \
                 --token-file and --secret-file, and say to {server} what {} answered",
                ServerId::COORDINATOR,
                ServerId::COORDINATOR
            ),
        }
    }
}

impl std::error::Error for ControlError {}

/// Where things are in a chunk of equal objects. The server writes the header and clears the bitmap when it hands
/// the chunk to a new index or class; clients set and clear bits by atomics.
///
/// ```text
/// +0   magic            8 B   "FWCHUNK1"
/// +8   index            4 B   | class 2 B | zero 2 B
/// +16  object_bytes     4 B   | object count 4 B
/// +24  drained          8 B   not 0: from their next flush on, sessions claim nothing in it
/// +32  zero                   to 64
/// +64  bitmap           one bit an object, set = not free, rounded up to whole words
///      objects          from the next multiple of 64
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ObjectChunk {
    /// Size of an object.
    pub object_bytes: u32,
    /// How many there are.
    pub objects: u32,
    /// Where they begin, relative to the chunk.
    pub data_offset: u64,
}

impl ObjectChunk {
    /// First word of a chunk's header.
    pub const MAGIC: u64 = u64::from_le_bytes(*b"FWCHUNK1");
    /// Where the header says whether the chunk is being drained.
    pub const DRAINED_AT: u64 = 24;
    /// How much of the header tells whether a chunk is still what it was.
    pub const HEAD_BYTES: usize = 32;
    /// Where the bitmap begins.
    pub const BITMAP_OFFSET: u64 = 64;

    /// The layout of a chunk; `None` if `object_bytes` is no multiple of 8 or not even one object fits.
    pub fn new(chunk_bytes: u64, object_bytes: u32) -> Option<Self> {
        if object_bytes == 0 || object_bytes % 8 != 0 {
            return None;
        }
        let size = u64::from(object_bytes);
        let begin = |objects: u64| (Self::BITMAP_OFFSET + objects.div_ceil(64) * 8).next_multiple_of(64);
        // An object costs its bytes and a bit; what rounding adds on top is less than 72 bytes, so nine steps at most.
        let mut objects = chunk_bytes.saturating_sub(Self::BITMAP_OFFSET) * 8 / (size * 8 + 1);
        while objects > 0 && begin(objects) + objects * size > chunk_bytes {
            objects -= 1;
        }
        let objects_u32 = u32::try_from(objects).ok()?;
        (objects > 0).then(|| Self { object_bytes, objects: objects_u32, data_offset: begin(objects) })
    }

    /// How many words the bitmap has.
    pub fn bitmap_words(&self) -> u64 {
        u64::from(self.objects).div_ceil(64)
    }

    /// Where object `n` is, relative to the chunk.
    pub fn object_offset(&self, n: u32) -> u64 {
        self.data_offset + u64::from(n) * u64::from(self.object_bytes)
    }

    /// Which object begins at `offset` (relative to the chunk), if one does.
    pub fn object_at(&self, offset: u64) -> Option<u32> {
        let within = offset.checked_sub(self.data_offset)?;
        let n = u32::try_from(within / u64::from(self.object_bytes)).ok()?;
        (within % u64::from(self.object_bytes) == 0 && n < self.objects).then_some(n)
    }

    /// The bits of bitmap word `word` that stand for objects.
    pub fn word_mask(&self, word: u64) -> u64 {
        let left = u64::from(self.objects).saturating_sub(word * 64);
        if left >= 64 { u64::MAX } else { (1 << left) - 1 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{decode, encode};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn garbage_never_decodes_into_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(request) = decode::<Request>(&bytes) {
                prop_assert_eq!(encode(&request), bytes.clone(), "one value has one encoding");
            }
            if let Ok(reply) = decode::<Reply>(&bytes) {
                prop_assert_eq!(decode::<Reply>(&encode(&reply)), Ok(reply));
            }
            let _ = decode::<ControlError>(&bytes);
        }

        #[test]
        fn requests_survive_the_wire_and_no_prefix_does(index in any::<u32>(), name in ".{0,20}", config in proptest::collection::vec(any::<u8>(), 0..40), generation in any::<u64>()) {
            let requests = [
                Request::CreateIndex { name: name.clone(), engine: "e".into(), config },
                Request::OpenIndex { name, engine: None },
                Request::AllocChunks { index, class: 3, object_bytes: 64, count: 1, flushed_through: generation },
                Request::ListChunks { owner: Some(SessionId::new(7)) },
                Request::OpenSession { read_only: true, reaper: true, label: Label::new("gateway pid 7 on é") },
                Request::AttachSession { read_only: true, term: generation, coordinator: index, next_index: 3, incarnation: 4, indexes: vec![1, 2], seal: 9 },
                Request::Fence { victim: SessionId::new(7), term: generation, seal: 1 },
                Request::FinishAdopt { victim: SessionId::new(7), term: generation, seal: 2 },
                Request::FreeExtent { index, offset: 4096, generation, seal: 3 },
            ];
            for request in requests {
                let bytes = encode(&request);
                prop_assert_eq!(decode::<Request>(&bytes), Ok(request));
                for cut in 0..bytes.len() {
                    prop_assert!(decode::<Request>(&bytes[..cut]).is_err());
                }
            }
        }

        #[test]
        fn chunk_layout_uses_the_chunk_and_stays_inside(chunk_kib in 1u64..9000, words in 1u32..2000) {
            let (chunk_bytes, object_bytes) = (chunk_kib * 1024, words * 8);
            let Some(layout) = ObjectChunk::new(chunk_bytes, object_bytes) else {
                prop_assert!(u64::from(object_bytes) + 128 > chunk_bytes);
                return Ok(());
            };
            let end = layout.object_offset(layout.objects - 1) + u64::from(object_bytes);
            prop_assert!(end <= chunk_bytes);
            prop_assert!(layout.data_offset >= 64 + layout.bitmap_words() * 8 && layout.data_offset % 64 == 0);
            prop_assert!(chunk_bytes - end < u64::from(object_bytes) + 72, "at most an object and a bitmap step are wasted");
            for n in [0, layout.objects / 2, layout.objects - 1] {
                prop_assert_eq!(layout.object_at(layout.object_offset(n)), Some(n));
                prop_assert_eq!(layout.object_at(layout.object_offset(n) + 4), None);
            }
            let bits: u32 = (0..layout.bitmap_words()).map(|w| layout.word_mask(w).count_ones()).sum();
            prop_assert_eq!(bits, layout.objects);
        }
    }
}
