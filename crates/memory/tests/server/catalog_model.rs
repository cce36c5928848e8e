//! The catalog against a map of names: every answer and every refusal, through restarts.

use crate::driver::{World, is_bad_request, outcome, refused};
use farwood_fabric::addr::{RegionId, ServerId, SessionId};
use farwood_fabric::call::{Call, CallOutcome};
use farwood_fabric::control::{ControlError, IndexInfo, IndexState, Reply, Request};
use farwood_fabric::server::ServerMemory;
use farwood_fabric::wire::decode;
use farwood_memory::ServerConfig;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

#[derive(Clone, Debug)]
enum Step {
    Create { name: usize, engine: usize, config: Vec<u8> },
    Ready { which: u32 },
    Open { name: usize, engine: Option<usize> },
    BeginDrop { name: usize },
    FinishDrop { which: u32 },
    Chunk { which: u32 },
    Release { which: u32 },
    Flush,
    Restart { ends: bool },
}

const NAMES: [&str; 5] = ["a", "b", "ç", "d", "the fifth"];
const ENGINES: [&str; 2] = ["dex", "dolphin"];

fn step() -> impl Strategy<Value = Step> {
    let (name, which) = (0..NAMES.len(), 1..8u32);
    prop_oneof![
        4 => (name.clone(), 0..2usize, proptest::collection::vec(any::<u8>(), 0..20))
            .prop_map(|(name, engine, config)| Step::Create { name, engine, config }),
        3 => which.clone().prop_map(|which| Step::Ready { which }),
        3 => (name.clone(), proptest::option::of(0..2usize)).prop_map(|(name, engine)| Step::Open { name, engine }),
        3 => name.prop_map(|name| Step::BeginDrop { name }),
        3 => which.clone().prop_map(|which| Step::FinishDrop { which }),
        1 => which.clone().prop_map(|which| Step::Chunk { which }),
        2 => which.prop_map(|which| Step::Release { which }),
        2 => Just(Step::Flush),
        2 => any::<bool>().prop_map(|ends| Step::Restart { ends }),
    ]
}

struct Model {
    world: World,
    me: SessionId,
    /// By name, with the flush that a drop waits for.
    indexes: BTreeMap<String, (IndexInfo, u64)>,
    used_ids: BTreeSet<u32>,
    chunks: BTreeSet<u32>,
    flush: u64,
    flushed: u64,
    /// The last call of the last step, and what came of it.
    last: Option<(Call, CallOutcome)>,
}

impl Model {
    fn new() -> Self {
        let mut world = World::new(ServerConfig::tiny(ServerId::new(0), 1, 2));
        let me = world.open().expect("the first session").0;
        let (indexes, used_ids, chunks) = (BTreeMap::new(), BTreeSet::new(), BTreeSet::new());
        Self { world, me, indexes, used_ids, chunks, flush: 0, flushed: 0, last: None }
    }

    fn create(&mut self, name: &str, engine: &str, config: &[u8]) {
        // What an index that had the slot before left in the anchor must not be seen.
        for at in (0..3 * 4096).step_by(512) {
            let taken = self.indexes.values().any(|(info, _)| at / 4096 == info.anchor.offset() / 4096);
            if !taken {
                self.world.memory.store(RegionId::BOARD, at, 0xdead);
            }
        }
        let (name, engine) = (name.to_owned(), engine.to_owned());
        let request =
            Request::CreateIndex { name: name.clone(), engine: engine.clone(), config: config.to_vec() };
        let reply = self.world.ask_twice(self.me, request);
        if self.indexes.contains_key(&name) {
            assert_eq!(reply, refused(ControlError::NameExists { name }));
        } else if self.indexes.len() == 3 {
            assert_eq!(reply, refused(ControlError::CatalogFull { max: 3 }));
        } else {
            let Ok(Reply::Index { info }) = reply else { panic!("{reply:?}") };
            assert!(self.used_ids.insert(info.id), "id {} was used before", info.id);
            let anchor = info.anchor;
            assert!(self.indexes.values().all(|(other, _)| other.anchor != anchor));
            let words = (anchor.offset()..anchor.offset() + 4096).step_by(8);
            assert!(words.into_iter().all(|at| self.world.memory.load(RegionId::BOARD, at) == 0));
            let state = IndexState::Creating;
            assert_eq!(
                info,
                IndexInfo { id: info.id, name: name.clone(), engine, config: config.to_vec(), state, anchor }
            );
            self.indexes.insert(name, (info, 0));
        }
    }

    fn by_id(&mut self, id: u32) -> Option<&mut (IndexInfo, u64)> {
        self.indexes.values_mut().find(|(info, _)| info.id == id)
    }

    fn finish_drop(&mut self, index: u32) {
        let reply = self.world.ask_twice(self.me, Request::FinishDrop { index, seals: vec![] });
        let (flushed, has_chunks) = (self.flushed, self.chunks.contains(&index));
        match self.by_id(index).cloned() {
            // It was dropped before.
            None if self.used_ids.contains(&index) => assert_eq!(reply, Ok(Reply::Done {})),
            None => assert_eq!(reply, refused(ControlError::NoSuchIndex { name: format!("#{index}") })),
            Some((info, _)) if info.state != IndexState::Dropping => assert!(is_bad_request(&reply)),
            Some((info, generation)) if flushed < generation => {
                assert_eq!(reply, refused(ControlError::DropPending { name: info.name }));
            }
            Some(_) if has_chunks => assert!(is_bad_request(&reply)),
            Some((info, _)) => {
                assert_eq!(reply, Ok(Reply::Done {}));
                self.indexes.remove(&info.name);
            }
        }
    }

    fn release(&mut self, index: u32) {
        let reply = self.world.ask_twice(self.me, Request::ReleaseIndex { index, seal: 0 });
        let flushed = self.flushed;
        match self.by_id(index).cloned() {
            Some((info, _)) if info.state != IndexState::Dropping => assert!(is_bad_request(&reply)),
            Some((info, generation)) if flushed < generation => {
                assert_eq!(reply, refused(ControlError::DropPending { name: info.name }));
            }
            None if !self.used_ids.contains(&index) => {
                assert_eq!(reply, refused(ControlError::NoSuchIndex { name: format!("#{index}") }));
            }
            _ => {
                let Request::ReleaseIndex { seal, .. } = self.world.release(index) else { unreachable!() };
                assert_eq!(reply, Ok(Reply::Released { seal }));
                self.chunks.remove(&index);
            }
        }
    }

    fn open(&mut self, name: &str, engine: Option<&str>) {
        let request = Request::OpenIndex { name: name.to_owned(), engine: engine.map(str::to_owned) };
        let reply = self.world.ask_twice(self.me, request);
        let name = name.to_owned();
        let expected = match self.indexes.get(&name) {
            None => refused(ControlError::NoSuchIndex { name }),
            Some((info, _)) => match engine {
                Some(wanted) if wanted != info.engine => refused(ControlError::WrongEngine {
                    name,
                    engine: info.engine.clone(),
                    wanted: wanted.to_owned(),
                }),
                _ if info.state != IndexState::Ready => {
                    refused(ControlError::IndexNotReady { name, state: info.state })
                }
                _ => Ok(Reply::Index { info: info.clone() }),
            },
        };
        assert_eq!(reply, expected);
    }

    fn begin_drop(&mut self, name: &str) {
        let reply = self.world.ask_twice(self.me, Request::BeginDrop { name: name.to_owned() });
        let Some((info, generation)) = self.indexes.get_mut(name) else {
            assert_eq!(reply, refused(ControlError::NoSuchIndex { name: name.to_owned() }));
            return;
        };
        if info.state != IndexState::Dropping {
            self.flush += 1;
            *generation = self.flush;
            info.state = IndexState::Dropping;
        }
        assert_eq!(reply, Ok(Reply::Dropping { info: info.clone(), generation: *generation }));
    }

    fn ready(&mut self, index: u32) {
        let reply = self.world.ask_twice(self.me, Request::IndexReady { index });
        match self.by_id(index) {
            None => assert_eq!(reply, refused(ControlError::NoSuchIndex { name: format!("#{index}") })),
            Some((info, _)) if info.state == IndexState::Dropping => {
                let (name, state) = (info.name.clone(), info.state);
                assert_eq!(reply, refused(ControlError::IndexNotReady { name, state }));
            }
            Some((info, _)) => {
                assert_eq!(reply, Ok(Reply::Done {}));
                info.state = IndexState::Ready;
            }
        }
    }

    fn apply(&mut self, step: Step) {
        match step {
            Step::Create { name, engine, config } => self.create(NAMES[name], ENGINES[engine], &config),
            Step::Ready { which } => self.ready(which),
            Step::Open { name, engine } => self.open(NAMES[name], engine.map(|engine| ENGINES[engine])),
            Step::BeginDrop { name } => self.begin_drop(NAMES[name]),
            Step::FinishDrop { which } => self.finish_drop(which),
            Step::Release { which } => self.release(which),
            Step::Chunk { which: index } => {
                let request =
                    Request::AllocChunks { index, class: 1, object_bytes: 0, count: 1, flushed_through: 0 };
                if self.by_id(index).is_some() && self.world.ask(self.me, request).is_ok() {
                    self.chunks.insert(index);
                }
            }
            Step::Flush => {
                self.flushed = self.flush;
                let beat = Request::Heartbeat {
                    oldest_pin: 0,
                    flushed: self.flush,
                    does_chores: false,
                    is_waiting: false,
                };
                assert!(self.world.ask(self.me, beat).is_ok());
            }
            Step::Restart { ends } => {
                self.world.restart();
                self.repeat_last();
                if !ends {
                    // The session lives on, and nothing has changed.
                    return self.check_list();
                }
                let before = std::mem::replace(&mut self.me, self.world.open().expect("two at a time").0);
                self.world.bury(self.me, before, true);
                // The new session has no hints, and the old one is gone.
                self.flushed = self.flush;
                // With it go the indexes that it was making.
                let mut orphans: Vec<_> = self
                    .indexes
                    .values_mut()
                    .filter(|(info, _)| info.state == IndexState::Creating)
                    .collect();
                orphans.sort_by_key(|(info, _)| info.anchor);
                for (info, generation) in orphans {
                    self.flush += 1;
                    *generation = self.flush;
                    info.state = IndexState::Dropping;
                }
            }
        }
        self.last = self.world.last.clone();
        self.check_list();
    }

    /// The answer of the last call went with the old process: it comes again, and is answered the same.
    fn repeat_last(&mut self) {
        let Some((call, answered)) = self.last.take().filter(|(_, answered)| answered.is_ok()) else {
            return;
        };
        let request = decode::<Request>(&call.request).expect("ours");
        let is_told = matches!(
            request,
            Request::CreateIndex { .. }
                | Request::IndexReady { .. }
                | Request::BeginDrop { .. }
                | Request::FinishDrop { .. }
                | Request::AllocChunks { .. }
                | Request::ReleaseIndex { .. }
        );
        if is_told {
            assert_eq!(outcome(&call, self.world.send(&call)), answered, "a repeat of {request:?}");
        }
    }

    fn check_list(&mut self) {
        let mut infos: Vec<_> = self.indexes.values().map(|(info, _)| info.clone()).collect();
        infos.sort_by_key(|info| info.anchor);
        assert_eq!(self.world.ask(self.me, Request::ListIndexes {}), Ok(Reply::Indexes { infos }));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn the_catalog_follows_the_model(steps in proptest::collection::vec(step(), 1..70)) {
        let mut model = Model::new();
        for step in steps {
            model.apply(step);
        }
    }
}

#[test]
fn names_that_cannot_be_stored_are_refused() {
    let mut model = Model::new();
    for name in [String::new(), "x\0".to_owned(), "n".repeat(65)] {
        let request = Request::CreateIndex { name, engine: "dex".to_owned(), config: vec![] };
        let reply = model.world.ask(model.me, request);
        assert!(matches!(reply, Err(farwood_fabric::call::CallError::Control(ControlError::BadName { .. }))));
    }
}
