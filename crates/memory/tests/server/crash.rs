//! The server dies between any two of its stores; another process takes over what was stored until then.
//!
//! One scripted life is recorded: after every call, how many stores there were and what the server listed. Then it
//! is lived again for every k, on memory that keeps the first k stores only, and a new server starts on that. What
//! it lists must be, chunk by chunk and index by index, what was listed before the call that died or after it.

use crate::driver::{World, outcome, refused, understand};
use farwood_fabric::addr::{RegionId, ServerId, SessionId};
use farwood_fabric::call::{CallError, CallOutcome};
use farwood_fabric::control::{
    ChunkInfo, ControlError, IndexInfo, JOURNAL_BYTES, Reply, Request, SessionState,
};
use farwood_fabric::procedure::ProcedureSet;
use farwood_fabric::server::{ServerLogic, ServerMemory};
use farwood_fabric::wire::decode;
use farwood_memory::layout::Layout;
use farwood_memory::testing::VecMemory;
use farwood_memory::{MemoryServer, ServerConfig};
use std::cell::Cell;
use std::collections::BTreeMap;

const CHUNKS: u32 = 6;

/// Memory of which only the first `kept` stores last.
pub(crate) struct MortalMemory {
    live: VecMemory,
    pub(crate) lasting: VecMemory,
    kept: u64,
    pub(crate) stores: Cell<u64>,
}

impl ServerMemory for MortalMemory {
    fn load(&self, region: RegionId, offset: u64) -> u64 {
        self.live.load(region, offset)
    }

    fn store(&self, region: RegionId, offset: u64, value: u64) {
        self.stores.set(self.stores.get() + 1);
        self.live.store(region, offset, value);
        if self.stores.get() <= self.kept {
            self.lasting.store(region, offset, value);
        }
    }
}

/// What a server lists.
#[derive(Clone, Default, PartialEq, Debug)]
struct Facts {
    chunks: BTreeMap<u32, ChunkInfo>,
    free: u64,
    indexes: BTreeMap<u32, IndexInfo>,
    /// State and term.
    sessions: BTreeMap<SessionId, (SessionState, u64)>,
    epoch: u64,
    flush: u64,
    /// The newest term told.
    term: u64,
}

fn config() -> ServerConfig {
    ServerConfig { max_sessions: 6, ..ServerConfig::tiny(ServerId::new(0), 1, CHUNKS) }
}

fn facts<M: ServerMemory>(world: &mut World<M>, observer: SessionId) -> Facts {
    let mut ask = |request| world.ask(observer, request).expect("the observer may look");
    let Reply::ChunkList { chunks, free, total } = ask(Request::ListChunks { owner: None }) else { panic!() };
    assert_eq!(total, u64::from(CHUNKS));
    let Reply::Indexes { infos } = ask(Request::ListIndexes {}) else { panic!() };
    let Reply::Sessions { sessions } = ask(Request::ListSessions {}) else { panic!() };
    let number = |chunk: &ChunkInfo| u32::try_from(chunk.offset / 4096 - 1).expect("few chunks");
    let mut by_chunk = BTreeMap::new();
    for chunk in chunks {
        for covered in number(&chunk)..number(&chunk) + chunk.count {
            assert!(by_chunk.insert(covered, chunk.clone()).is_none(), "chunk {covered} is in two extents");
        }
    }
    Facts {
        chunks: by_chunk,
        free,
        indexes: infos.into_iter().map(|info| (info.id, info)).collect(),
        term: sessions.iter().map(|info| info.term).max().unwrap_or(0),
        sessions: sessions.into_iter().map(|info| (info.session, (info.state, info.term))).collect(),
        epoch: 0,
        flush: 0,
    }
}

/// Takes down the facts, as the observer sees them, with the epoch and flush told so far.
type Note<'a, M> = &'a mut dyn FnMut(&mut World<M>, SessionId, u64, u64);

/// The script: chunks of all kinds, a death, a drop. Calls `note` after every step.
fn live<M: ServerMemory>(world: &mut World<M>, note: Note<'_, M>) {
    let Ok((observer, epochs)) = world.open() else { panic!() };
    let (mut epoch, mut flush) = (epochs.epoch, epochs.flush);
    note(world, observer, epoch, flush);
    let Ok((a, term, _)) = world.open_with_term() else { panic!() };
    note(world, observer, epoch, flush);
    let Ok((b, _)) = world.open() else { panic!() };
    note(world, observer, epoch, flush);
    let alloc = |index, object_bytes, count, flushed_through| Request::AllocChunks {
        index,
        class: 1,
        object_bytes,
        count,
        flushed_through,
    };
    let create = |name: &str| Request::CreateIndex {
        name: name.to_owned(),
        engine: "sherman".to_owned(),
        config: (0..50).collect(),
    };
    let at = |chunk: u64| 4096 * (chunk + 1);
    let steps = vec![
        (a, create("first")),
        (a, Request::IndexReady { index: 1 }),
        (b, create("second")),
        (a, alloc(1, 64, 1, 0)),
        (a, alloc(1, 0, 3, 0)),
        (b, alloc(2, 64, 1, 0)),
        (a, Request::FreeChunks { offset: at(1), generation: 1 }),
        (a, alloc(1, 0, 3, 0)),
        (a, Request::FreeChunks { offset: at(1), generation: 1 }),
        (b, Request::RequestFlush {}),
        (a, Request::Heartbeat { oldest_pin: 1, flushed: 1, does_chores: false, is_waiting: false }),
        (b, Request::Heartbeat { oldest_pin: 1, flushed: 1, does_chores: false, is_waiting: false }),
        (observer, Request::Heartbeat { oldest_pin: 1, flushed: 1, does_chores: false, is_waiting: false }),
        (b, alloc(2, 0, 2, 1)),
        (b, alloc(2, 64, 1, 1)),
        (b, Request::Evict { victim: a, term }),
        (b, Request::CompleteFence { victim: a, term }),
        (b, Request::BeginAdopt { victim: a }),
        (b, world.adopt_chunks(b, a, term)),
        (b, world.finish_adopt(b, a, term)),
        (b, alloc(1, 64, 1, 1)),
        (b, Request::BeginDrop { name: "second".to_owned() }),
        (b, Request::Heartbeat { oldest_pin: 2, flushed: 2, does_chores: false, is_waiting: false }),
        (observer, Request::Heartbeat { oldest_pin: 2, flushed: 2, does_chores: false, is_waiting: false }),
        (b, Request::ReleaseIndex { index: 2, seal: 0 }),
        (b, Request::FinishDrop { index: 2, seals: vec![] }),
        (b, create("third")),
        (b, alloc(3, 0, 4, 2)),
        (b, Request::CloseSession {}),
    ];
    for (who, request) in steps {
        // What the dying one had not finished, and what the leaving one did not tidy up.
        let untidy = match request {
            Request::Evict { victim, .. } => Some(victim),
            Request::CloseSession {} => Some(who),
            _ => None,
        };
        if let Some(session) = untidy {
            let journal = Layout::new(&world.config).journal(session.get() - 1).offset();
            for at in [journal, journal + JOURNAL_BYTES - 8] {
                world.memory.store(RegionId::BOARD, at, 0xbad);
            }
        }
        let reply = world.ask(who, request.clone());
        assert!(reply.is_ok(), "{request:?}: {reply:?}");
        if let Ok(Reply::Alive { epochs, .. }) = reply {
            (epoch, flush) = (epochs.epoch, epochs.flush);
        }
        note(world, observer, epoch, flush);
    }
}

pub(crate) fn mortal(config: ServerConfig, kept: u64) -> World<MortalMemory> {
    let regions = MemoryServer::new(config.clone(), ProcedureSet::default()).expect("valid").regions();
    let (live, lasting) = (VecMemory::new(&regions), VecMemory::new(&regions));
    let memory = MortalMemory { live, lasting, kept, stores: Cell::new(0) };
    World::on(memory, config, ProcedureSet::default())
}

/// Each entry is as it was before or after; `None` counts as a value.
fn check_between<K: Ord + std::fmt::Debug, V: PartialEq + std::fmt::Debug>(
    what: &str,
    [before, found, after]: [&BTreeMap<K, V>; 3],
) {
    for key in before.keys().chain(found.keys()).chain(after.keys()) {
        let [was, is, becomes] = [before.get(key), found.get(key), after.get(key)];
        assert!(is == was || is == becomes, "{what} {key:?}: {is:?} is neither {was:?} nor {becomes:?}");
    }
}

#[test]
fn a_crash_between_any_two_stores_leaves_whole_tables() {
    // Facts after each call, by the number of stores until then.
    let mut history = vec![(0, Facts::default())];
    let mut world = mortal(config(), u64::MAX);
    live(&mut world, &mut |world, observer, epoch, flush| {
        let stores = world.memory.stores.get();
        let mut facts = Facts { epoch, flush, ..facts(world, observer) };
        facts.term = facts.term.max(history.last().map_or(0, |(_, before)| before.term));
        assert_eq!(world.memory.stores.get(), stores, "looking changes nothing");
        history.push((stores, facts));
    });
    let total = world.memory.stores.get();
    assert!(total > 130 && history.len() > 30, "{total} stores in {} calls", history.len());

    for kept in 0..=total {
        let mut world = mortal(config(), kept);
        live(&mut world, &mut |_, _, _, _| {});
        let MortalMemory { lasting, .. } = world.memory;
        let mut heir = World::on(lasting, config(), ProcedureSet::default());
        let (observer, term, epochs) = heir.open_with_term().expect("there is room for one more");
        let mut found = facts(&mut heir, observer);
        found.sessions.remove(&observer);

        // The last call that was answered, and the one that died (or the last one again).
        let answered = history.iter().rposition(|(stores, _)| *stores <= kept).expect("it begins with 0");
        let before = &history[answered].1;
        let after = &history[(answered + 1).min(history.len() - 1)].1;
        check_between("chunk", [&before.chunks, &found.chunks, &after.chunks]);
        check_between("index", [&before.indexes, &found.indexes, &after.indexes]);
        check_between("session", [&before.sessions, &found.sessions, &after.sessions]);
        assert!(
            epochs.epoch >= before.epoch && epochs.flush >= before.flush,
            "what was told is not taken back"
        );
        assert!(term > before.term, "term {term} was told before");
        check_extents_are_whole(&found);
        check_pool_serves(&mut heir, observer, &found);
    }
}

/// Who was not answered asks again, and the next process answers what the dead one would have: as if it had never died.
#[test]
fn a_repeat_after_a_crash_between_any_two_stores_is_answered_as_if_there_had_been_none() {
    struct Asked {
        answered: CallOutcome,
        stores: u64,
        chunks: BTreeMap<u32, ChunkInfo>,
        indexes: BTreeMap<u32, IndexInfo>,
    }
    let mut asked: Vec<Asked> = Vec::new();
    let mut world = mortal(config(), u64::MAX);
    live(&mut world, &mut |world, observer, _, _| {
        let Some((_, answered)) = world.last.clone() else { return };
        let stores = world.memory.stores.get();
        let Facts { chunks, indexes, .. } = facts(world, observer);
        asked.push(Asked { answered, stores, chunks, indexes });
    });
    let total = world.memory.stores.get();
    let mut repeated = BTreeMap::<String, u32>::new();
    for kept in 0..=total {
        // The one that died, or whose answer did.
        for (n, one) in asked.iter().enumerate().filter(|(_, one)| one.stores >= kept).take(2) {
            let mut world = mortal(config(), kept);
            let mut calls = Vec::new();
            live(&mut world, &mut |world, _, _, _| calls.extend(world.last.clone().map(|(call, _)| call)));
            let call = &calls[n];
            let mut heir = World::on(world.memory.lasting, config(), ProcedureSet::default());
            let before =
                asked.iter().rev().find(|other| other.stores < one.stores).map_or(0, |other| other.stores);
            let request = decode::<Request>(&call.request).expect("ours");
            if kept < before || call.id.session.is_none() || matches!(request, Request::FreeChunks { .. }) {
                // Another one died, or nothing is promised: a newcomer gets a second session, and what was given back is not asked again.
                continue;
            }
            let reply = understand(outcome(call, heir.send(call)));
            let answered = understand(one.answered.clone());
            let name = format!("{request:?}").split(' ').next().unwrap_or_default().to_owned();
            match (&request, &answered) {
                // The epochs go on.
                (Request::Heartbeat { .. } | Request::RequestFlush {}, _) => {
                    assert!(reply.is_ok(), "{request:?}: {reply:?}");
                }
                // A flush more; the index is the same.
                (Request::BeginDrop { .. }, Ok(Reply::Dropping { info, generation })) => {
                    let Ok(Reply::Dropping { info: again, generation: later }) = &reply else {
                        panic!("{reply:?}")
                    };
                    assert!(again == info && later >= generation, "{reply:?}");
                }
                // What is nobody's already is not listed again.
                (Request::AdoptChunks { .. }, Ok(Reply::Adopted { journal, .. })) => {
                    assert!(
                        matches!(&reply, Ok(Reply::Adopted { journal: again, .. }) if again == journal),
                        "{reply:?}"
                    );
                }
                // Whoever is gone is closed.
                (Request::CloseSession {}, _) => {
                    let session = call.id.session;
                    assert!(
                        reply == answered || reply == refused(ControlError::NoSuchSession { session }),
                        "{reply:?}"
                    );
                }
                _ => assert_eq!(reply, answered, "{request:?} after {kept} of {} stores", one.stores),
            }
            let (observer, _) = heir.open().expect("there is room for one more");
            let found = facts(&mut heir, observer);
            assert_eq!(found.chunks, one.chunks, "{request:?} after {kept} of {} stores", one.stores);
            assert_eq!(found.indexes, one.indexes, "{request:?} after {kept} of {} stores", one.stores);
            *repeated.entry(name).or_default() += 1;
        }
    }
    for name in
        ["AllocChunks", "CreateIndex", "IndexReady", "BeginDrop", "FinishDrop", "FinishAdopt", "CloseSession"]
    {
        assert!(repeated.contains_key(name), "{name} was never repeated: {repeated:?}");
    }
}

fn check_extents_are_whole(facts: &Facts) {
    for chunk in facts.chunks.values() {
        let covered = facts.chunks.values().filter(|other| *other == chunk).count();
        assert_eq!(covered, chunk.count as usize, "{chunk:?}");
    }
}

/// After the dead are buried, every chunk is handed out exactly once or was in use: none is lost, none is doubled.
fn check_pool_serves(heir: &mut World, observer: SessionId, found: &Facts) {
    // Nobody else is heard of. All are fenced before the first is buried: one of the dead may have been adopting another.
    heir.now += heir.config.lease_ns;
    for victim in found.sessions.keys() {
        let term = heir.victim(observer, Request::BeginFence { victim: *victim });
        heir.done(observer, Request::CompleteFence { victim: *victim, term });
    }
    for victim in found.sessions.keys() {
        heir.bury(observer, *victim, false);
    }
    for slot in (0..heir.config.max_sessions).filter(|slot| slot + 1 != observer.get()) {
        let journal = Layout::new(&heir.config).journal(slot).offset();
        let clean = [journal, journal + JOURNAL_BYTES - 8].map(|at| heir.memory.load(RegionId::BOARD, at));
        assert_eq!(clean, [0, 0], "the journal of a free number is clean");
    }
    let mut owners: BTreeMap<u64, u32> = BTreeMap::new();
    for chunk in found.chunks.values() {
        owners.insert(chunk.offset, chunk.count);
    }
    let index = heir.create(observer, "heir");
    let alloc =
        Request::AllocChunks { index, class: 9, object_bytes: 0, count: 1, flushed_through: u64::MAX };
    loop {
        match heir.ask(observer, alloc.clone()) {
            Ok(Reply::Chunks { offset, .. }) => {
                let taken =
                    owners.iter().any(|(at, count)| (*at..at + u64::from(*count) * 4096).contains(&offset));
                assert!(!taken, "{offset:#x} is handed out twice");
                owners.insert(offset, 1);
            }
            Err(CallError::Control(ControlError::PoolFull { flush_helps: true, .. })) => {
                let Ok(Reply::Alive { epochs, .. }) = heir.ask(observer, Request::RequestFlush {}) else {
                    panic!()
                };
                let flushed = epochs.flush;
                let _ = heir.ask(
                    observer,
                    Request::Heartbeat { oldest_pin: 0, flushed, does_chores: false, is_waiting: false },
                );
            }
            Err(CallError::Control(ControlError::PoolFull { .. })) => break,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(owners.values().sum::<u32>(), CHUNKS, "a chunk is lost");
}

#[test]
fn a_crash_while_a_number_changes_hands_leaves_the_heir_nothing() {
    let config = ServerConfig::tiny(ServerId::new(1), 2, CHUNKS);
    let (number, other) = (SessionId::new(2), SessionId::new(1));
    let journal = Layout::new(&config).journal(number.get() - 1).offset();
    let alloc =
        Request::AllocChunks { index: 1, class: 1, object_bytes: 64, count: 1, flushed_through: u64::MAX };
    let live = |world: &mut World<MortalMemory>| {
        world.attach(number, 1).expect("it is the first");
        world.ask(number, alloc.clone()).expect("there is memory");
        world.memory.store(RegionId::BOARD, journal, 0xbad);
        world.attach(number, 2).expect("it is newer");
        world.ask(number, alloc.clone()).expect("there is memory");
        world.attach(other, 3).expect("it is the first");
        world.done(other, world.fence(number, 4));
        world.memory.stores.get()
    };
    let total = live(&mut mortal(config.clone(), u64::MAX));
    for kept in 0..=total {
        let mut world = mortal(config.clone(), kept);
        live(&mut world);
        let mut heir = World::on(world.memory.lasting, config.clone(), ProcedureSet::default());
        if kept == total {
            assert!(heir.attach(number, 4).is_err(), "it was fenced before it came");
        }
        heir.attach(number, 5).expect("whatever happened to its predecessors");
        let reply = heir.ask(number, Request::ListChunks { owner: Some(number) });
        let Ok(Reply::ChunkList { chunks, .. }) = reply else { panic!("{reply:?}") };
        assert!(chunks.is_empty(), "{chunks:?} after {kept} stores");
        assert_eq!(heir.memory.load(RegionId::BOARD, journal), 0, "after {kept} stores");
    }
}
