//! Calls of all kinds from whoever may connect, into the server's dispatch: plausible and mutated, with right, late and invented
//! numbers, tickets and seals, some of them true and of something else. Whatever comes, the index that lives stays as it is, whoever works on it
//! goes on, the server does not grow, and there is room for the next.
//!
//! `FARWOOD_FRAMES=10000000` for more than a moment.
//!
//! What the token allows is not damage, and left out: to drop an index by its name, and to evict a session by its number and term.

use crate::driver::{World, outcome, s, understand};
use farwood_fabric::Label;
use farwood_fabric::addr::{RegionId, ServerId, SessionId};
use farwood_fabric::call::{Call, CallId};
use farwood_fabric::control::{INTENT_BYTES, IndexState, JOURNAL_BYTES, MAIN_BASE, Reply, Request};
use farwood_fabric::procedure::ProcedureId;
use farwood_fabric::server::{HostAction, ServerLogic, ServerMemory};
use farwood_fabric::wire::{decode, encode};
use farwood_memory::ServerConfig;
use farwood_memory::layout::Layout;

const CHUNKS: u32 = 24;
const SESSIONS: u16 = 8;
/// Who works on the index and who looks after the pool.
const AUTHOR: SessionId = SessionId::new(1);
const KEEPER: SessionId = SessionId::new(2);
/// How often it is looked whether all is well, and whoever means harm, whose session seldom lives for long, gets another.
const LOOK_EVERY: u64 = 100;
/// How many genuine answers are remembered, to be said elsewhere.
const SEEN: usize = 64;

fn rounds() -> u64 {
    let asked = std::env::var("FARWOOD_FRAMES").ok().and_then(|text| text.parse().ok());
    asked.unwrap_or(200_000)
}

fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("it has memory");
    line.split_whitespace().next().and_then(|kib| kib.parse().ok()).expect("a number")
}

/// Two servers of a pool.
struct Pool {
    servers: [World; 2],
    /// Who means harm.
    wrong: SessionId,
    rng: fastrand::Rng,
    /// Tickets and seals that whoever means harm was given.
    seen: Vec<u64>,
    /// What the author has written, as it has to stay.
    written: Vec<(usize, RegionId, u64, u64)>,
    counts: [u64; 3],
}

impl Pool {
    fn new(seed: u64) -> Self {
        let config = |server| ServerConfig {
            max_sessions: SESSIONS,
            lease_ns: 1_000_000,
            ..ServerConfig::tiny(ServerId::new(server), 2, CHUNKS)
        };
        let servers = [0, 1].map(|server| World::new(config(server)));
        let rng = fastrand::Rng::with_seed(seed);
        let mut pool =
            Self { servers, wrong: SessionId::NONE, rng, seen: vec![], written: vec![], counts: [0; 3] };
        assert_eq!(pool.join(), AUTHOR);
        assert_eq!(pool.servers[0].create(AUTHOR, "live"), 1);
        // With the next one, the other server hears of the index.
        assert_eq!(pool.join(), KEEPER);
        pool.wrong = pool.join();
        pool.write_index();
        pool
    }

    /// A session joins both servers by the whole protocol.
    fn join(&mut self) -> SessionId {
        let open = Request::OpenSession { read_only: false, reaper: false, label: Label::default() };
        // Newcomers are told apart by random numbers of their endpoints.
        let call = self.servers[0].control(SessionId::NONE, &open);
        let call = Call { id: CallId { endpoint: self.rng.u64(1 << 63..), ..call.id }, ..call };
        let reply = understand(outcome(&call, self.servers[0].send(&call)));
        let Ok(Reply::Session { session, term, next_index, seal, .. }) = reply else { panic!("{reply:?}") };
        let attach = |incarnation, next_index, indexes, seal| Request::AttachSession {
            read_only: false,
            term,
            coordinator: 1,
            next_index,
            incarnation,
            indexes,
            seal,
        };
        // The other server may be new, and takes only what is sealed for its memory.
        let renewed = self.servers[0].ask(session, attach(1, next_index, vec![], seal));
        let Ok(Reply::Session { next_index, indexes, seal, .. }) = renewed else { panic!("{renewed:?}") };
        let attach = attach(1, next_index, indexes, seal);
        let attached = self.servers[1].ask(session, attach);
        assert!(matches!(attached, Ok(Reply::Session { .. })), "{attached:?}");
        session
    }

    /// An index with objects and raw bytes on both servers, an anchor, and the author's journal.
    fn write_index(&mut self) {
        for server in 0..2 {
            let mut places = vec![(RegionId::BOARD, 8)];
            for object_bytes in [64, 0] {
                let alloc =
                    Request::AllocChunks { index: 1, class: 1, object_bytes, count: 1, flushed_through: 0 };
                let reply = self.servers[server].ask(AUTHOR, alloc);
                let Ok(Reply::Chunks { offset, .. }) = reply else { panic!("{reply:?}") };
                // The bitmap, and what is behind it.
                places.extend((64..4096).step_by(8).map(|at| (RegionId::MAIN, offset + at)));
            }
            let journal = Layout::new(&self.servers[server].config).journal(AUTHOR.get() - 1).offset();
            places.extend(
                (0..JOURNAL_BYTES - INTENT_BYTES).step_by(64).map(|at| (RegionId::BOARD, journal + at)),
            );
            for (region, at) in places {
                let word = self.rng.u64(1..);
                self.servers[server].memory.store(region, at, word);
                self.written.push((server, region, at, word));
            }
        }
    }

    /// All is as it was, and those who belong there can work.
    fn check(&mut self) {
        for (server, region, at, word) in &self.written {
            assert_eq!(self.servers[*server].memory.load(*region, *at), *word, "m{server} {region}+{at:#x}");
        }
        for session in [AUTHOR, KEEPER] {
            let beat = Request::Heartbeat {
                oldest_pin: u64::MAX,
                flushed: u64::MAX,
                does_chores: false,
                is_waiting: false,
            };
            let alive = self.ask(0, session, &beat);
            let Ok(Reply::Alive { dropping, .. }) = alive else { panic!("{session}: {alive:?}") };
            assert!(!dropping.contains(&1));
            for server in 0..2 {
                let listed = self.ask(server, session, &Request::ListChunks { owner: None });
                let Ok(Reply::ChunkList { chunks, .. }) = listed else { panic!("{session}: {listed:?}") };
                let of_index = chunks.iter().filter(|chunk| chunk.index == 1 && chunk.class == 1);
                assert!(of_index.count() >= 2, "m{server} has lost chunks of the index");
            }
        }
        let listed = self.ask(0, KEEPER, &Request::ListIndexes {});
        let Ok(Reply::Indexes { infos }) = listed else { panic!("{listed:?}") };
        assert!(
            infos.iter().any(|info| info.name == "live" && info.id == 1 && info.state == IndexState::Ready)
        );
    }

    /// A request of somebody who acknowledges what he is answered.
    fn ask(
        &mut self,
        server: usize,
        session: SessionId,
        request: &Request,
    ) -> Result<Reply, farwood_fabric::CallError> {
        let world = &mut self.servers[server];
        let call = world.control(session, request);
        let call = Call { acknowledged_below: call.id.sequence, ..call };
        understand(outcome(&call, world.send(&call)))
    }

    fn number(&mut self) -> u64 {
        match self.rng.u8(..8) {
            0 => 0,
            1 => u64::MAX,
            2 => self.rng.u64(..),
            3..5 if !self.seen.is_empty() => self.seen[self.rng.usize(..self.seen.len())],
            _ => self.rng.u64(..12),
        }
    }

    fn session(&mut self) -> SessionId {
        match self.rng.u8(..16) {
            0 => SessionId::NONE,
            1 => s(self.rng.u16(..)),
            _ => s(self.rng.u16(1..=SESSIONS + 1)),
        }
    }

    fn request(&mut self) -> Request {
        let (victim, term, seal) = (self.session(), self.number(), self.number());
        let index = u32::try_from(self.number()).unwrap_or(u32::MAX);
        let name = ["live", "a", "b", ""][self.rng.usize(..4)].to_owned();
        let chunk = MAIN_BASE + u64::from(self.rng.u32(..CHUNKS + 2)) * 4096;
        let is = self.rng.bool();
        match self.rng.u8(..26) {
            0 => Request::Hello {},
            1 => Request::OpenSession { read_only: is, reaper: self.rng.bool(), label: Label::default() },
            2 => Request::AttachSession {
                read_only: is,
                term,
                coordinator: u32::from(self.rng.u8(..3)),
                next_index: index,
                incarnation: u32::from(self.rng.u8(..3)),
                indexes: (0..u32::from(self.rng.u8(..4))).collect(),
                seal,
            },
            3 => Request::CloseSession {},
            4 | 5 => Request::Heartbeat { oldest_pin: term, flushed: seal, does_chores: is, is_waiting: is },
            6 => Request::RequestFlush {},
            7 => Request::BeginFence { victim },
            8 => Request::Fence { victim, term, seal },
            9 => Request::CompleteFence { victim, term },
            10 => Request::BeginAdopt { victim },
            11 => Request::AdoptChunks { victim, term, seal },
            12 => Request::FinishAdopt { victim, term, seal },
            13 | 14 => Request::AllocChunks {
                index: if is { 1 } else { index },
                class: self.rng.u16(..3),
                object_bytes: [0, 64, 100, u32::MAX][self.rng.usize(..4)],
                count: [1, 1, 2, 0, u32::MAX][self.rng.usize(..5)],
                flushed_through: seal,
            },
            15 | 16 => Request::FreeChunks { offset: if is { chunk } else { term }, generation: seal },
            17 => Request::ListChunks { owner: is.then_some(victim) },
            18 | 19 => Request::ReleaseIndex { index: if is { 1 } else { index }, seal },
            20 => Request::CreateIndex { name, engine: "e".into(), config: vec![0; self.rng.usize(..600)] },
            21 => Request::IndexReady { index },
            22 => Request::OpenIndex { name, engine: None },
            23 => Request::BeginDrop { name },
            24 => Request::FinishDrop { index, seals: vec![seal] },
            _ => Request::Evict { victim, term },
        }
    }

    /// Bytes of a call, as whoever means harm sends them to a server.
    fn frame(&mut self, server: usize) -> Vec<u8> {
        let own = self.servers[server].control(self.wrong, &Request::Hello {});
        let mut id = own.id;
        let mut ticket = own.ticket;
        if self.rng.u8(..3) == 0 {
            (id.session, id.term, ticket) = (self.session(), self.number(), self.number());
        }
        id.endpoint = self.rng.u64(..256);
        id.sequence = if self.rng.u8(..4) == 0 { self.number() } else { id.sequence };
        let acknowledged_below = match self.rng.u8(..16) {
            0 => self.number(),
            1..4 => 0,
            _ => id.sequence,
        };
        let request = encode(&self.request());
        let procedure = if self.rng.u8(..16) == 0 { ProcedureId(300) } else { ProcedureId::CONTROL };
        let mut frame = encode(&Call { id, ticket, acknowledged_below, procedure, request });
        if self.rng.bool() {
            for _ in 0..self.rng.usize(1..4) {
                let at = self.rng.usize(..frame.len());
                match self.rng.u8(..4) {
                    0 => frame[at] = self.rng.u8(..),
                    1 => frame[at] ^= 1 << self.rng.u8(..8),
                    2 => frame.truncate(at.max(1)),
                    _ => frame.insert(at, self.rng.u8(..)),
                }
            }
        }
        frame
    }

    /// What the token allows whoever has it.
    fn is_allowed_harm(&self, server: usize, call: &Call) -> bool {
        let genuine = |session: SessionId, term: u64| {
            self.servers[server].terms().get(&session).is_some_and(|(known, _)| *known == term)
        };
        match decode::<Request>(&call.request) {
            Ok(Request::BeginDrop { name }) => name == "live",
            Ok(Request::Evict { victim, term }) => {
                [AUTHOR, KEEPER].contains(&victim) && genuine(victim, term)
            }
            _ => false,
        }
    }

    fn strike(&mut self) {
        let server = self.rng.usize(..2);
        let frame = self.frame(server);
        let Ok(call) = decode::<Call>(&frame) else {
            self.counts[0] += 1;
            return;
        };
        if self.is_allowed_harm(server, &call) {
            return;
        }
        let id: CallId = call.id;
        let speaks_for = [AUTHOR, KEEPER].contains(&id.session)
            && self.servers[server]
                .terms()
                .get(&id.session)
                .is_some_and(|who| *who == (id.term, call.ticket));
        assert!(!speaks_for, "a ticket was guessed");
        let world = &self.servers[server];
        for action in world.server.call(&world.memory, call, world.now) {
            match action {
                HostAction::Fence { session } => {
                    assert!(![AUTHOR, KEEPER].contains(&session), "m{server} fences {session}");
                }
                HostAction::Reply { outcome: Ok(reply), .. } => {
                    self.counts[1] += 1;
                    if let Ok(
                        Reply::Session { ticket: one, seal: two, .. }
                        | Reply::Victim { term: one, seal: two },
                    ) = decode::<Reply>(&reply)
                    {
                        for number in [one, two] {
                            if self.seen.len() >= SEEN {
                                self.seen.swap_remove(self.rng.usize(..SEEN));
                            }
                            self.seen.push(number);
                        }
                    } else if let Ok(Reply::Released { seal }) = decode::<Reply>(&reply) {
                        self.seen.push(seal);
                    }
                }
                HostAction::Reply { outcome: Err(_), .. } => self.counts[2] += 1,
                HostAction::Admit { .. } | HostAction::Run { .. } => {}
            }
        }
    }

    /// Whoever means harm ends its session, or loses it, and comes back with the next: as an operator sees to, the keeper buries the dead.
    fn tidy(&mut self) {
        for world in &mut self.servers {
            world.now += 2_000_000;
        }
        for session in [AUTHOR, KEEPER] {
            let beat =
                Request::Heartbeat { oldest_pin: 0, flushed: 0, does_chores: false, is_waiting: false };
            self.ask(0, session, &beat).expect("those who live stay");
        }
        let Ok(Reply::Sessions { sessions }) = self.ask(0, KEEPER, &Request::ListSessions {}) else {
            panic!()
        };
        for dead in sessions.iter().filter(|info| ![AUTHOR, KEEPER].contains(&info.session)) {
            let victim = dead.session;
            let begun = self.ask(0, KEEPER, &Request::BeginFence { victim });
            let Ok(Reply::Victim { term, seal }) = begun else { panic!("{victim}: {begun:?}") };
            self.ask(1, KEEPER, &Request::Fence { victim, term, seal }).expect("it is sealed");
            self.ask(0, KEEPER, &Request::CompleteFence { victim, term }).expect("it was fenced");
        }
        for dead in sessions.iter().filter(|info| ![AUTHOR, KEEPER].contains(&info.session)) {
            let victim = dead.session;
            let begun = self.ask(0, KEEPER, &Request::BeginAdopt { victim });
            let Ok(Reply::Victim { term, seal }) = begun else { panic!("{victim}: {begun:?}") };
            for server in [1, 0] {
                let adopt = Request::AdoptChunks { victim, term, seal };
                self.ask(server, KEEPER, &adopt).expect("it is adopted");
                let finish = Request::FinishAdopt { victim, term, seal };
                self.ask(server, KEEPER, &finish).expect("it is adopted");
            }
        }
        self.wrong = self.join();
        self.check();
    }
}

#[test]
fn a_storm_of_calls_leaves_the_index_and_the_server_as_they_were() {
    let rounds = rounds();
    let mut pool = Pool::new(18);
    let mut early = 0;
    for round in 0..rounds {
        pool.strike();
        if round % 97 == 0 {
            for world in &mut pool.servers {
                world.now += 500;
            }
        }
        if round % LOOK_EVERY == LOOK_EVERY - 1 {
            pool.tidy();
        }
        if round == rounds / 10 {
            early = resident_kib();
        }
    }
    pool.tidy();
    let late = resident_kib();
    let [malformed, done, refused] = pool.counts;
    println!(
        "{rounds} frames: {malformed} were no calls, {done} were done, {refused} refused; {early} KiB, then {late} KiB"
    );
    assert!(done > rounds / 50 && refused > rounds / 50, "both are tried");
    assert!(late < early + (16 << 10), "it grew from {early} KiB to {late} KiB");
}
