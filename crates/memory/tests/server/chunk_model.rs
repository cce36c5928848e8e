//! Chunks, epochs and flushes of a coordinator against a model, through restarts and deaths.
//!
//! The model does not predict which chunk comes: it checks that the one that came was allowed, and that a refusal
//! was justified. The type-stability checker is separate, and looks only at what clients can know.

use crate::driver::{World, is_bad_request, outcome, refused};
use farwood_fabric::addr::{RegionId, ServerId, SessionId};
use farwood_fabric::call::CallError;
use farwood_fabric::control::MAIN_BASE;
use farwood_fabric::control::{ChunkInfo, ControlError, Epochs, ObjectChunk, Reply, Request};
use farwood_fabric::server::ServerMemory;
use farwood_fabric::wire::decode;
use farwood_memory::ServerConfig;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

const CHUNKS: u32 = 7;
const CHUNK_BYTES: u64 = 4096;
/// Index (by its place in [`NAMES`], from 1), class, object size.
type Kind = (u32, u16, u32);
const KINDS: [Kind; 5] = [(1, 1, 64), (1, 2, 64), (2, 1, 64), (1, 3, 0), (2, 3, 0)];

#[derive(Clone, Debug)]
enum Step {
    Open,
    Close { who: usize },
    Beat { who: usize, lag: u64, flush: bool },
    RequestFlush { who: usize },
    Alloc { who: usize, kind: usize, count: u32, claim: u64 },
    Free { who: usize, which: usize },
    FreeWild { who: usize, offset: u64 },
    Bury { who: usize, victim: usize },
    Release { who: usize, index: u32 },
    Restart,
}

fn step() -> impl Strategy<Value = Step> {
    let who = 0..4usize;
    prop_oneof![
        3 => Just(Step::Open),
        1 => who.clone().prop_map(|who| Step::Close { who }),
        6 => (who.clone(), 0..3u64, any::<bool>()).prop_map(|(who, lag, flush)| Step::Beat { who, lag, flush }),
        2 => who.clone().prop_map(|who| Step::RequestFlush { who }),
        12 => (who.clone(), 0..KINDS.len(), 1..4u32, prop_oneof![Just(0), Just(u64::MAX), 0..6u64])
            .prop_map(|(who, kind, count, claim)| Step::Alloc { who, kind, count, claim }),
        8 => (who.clone(), 0..8usize).prop_map(|(who, which)| Step::Free { who, which }),
        1 => (who.clone(), 0..40_000u64).prop_map(|(who, offset)| Step::FreeWild { who, offset }),
        2 => (who.clone(), 0..6usize).prop_map(|(who, victim)| Step::Bury { who, victim }),
        1 => (who, 1..3u32).prop_map(|(who, index)| Step::Release { who, index }),
        1 => Just(Step::Restart),
    ]
}

#[derive(Clone, PartialEq, Debug)]
enum Status {
    Used { owner: SessionId },
    Freed { generation: u64 },
}

#[derive(Clone, PartialEq, Debug)]
struct Extent {
    kind: Kind,
    count: u32,
    status: Status,
    /// It was given to somebody while another had it.
    shared: bool,
}

struct Model {
    world: World,
    /// The numbers of the indexes, which change when they are dropped and made again.
    ids: [u32; 2],
    /// Extents by their first chunk; chunks in none are free.
    extents: BTreeMap<u32, Extent>,
    /// Pin and flush of every session that is not fenced.
    published: BTreeMap<SessionId, (u64, u64)>,
    /// Those of them that still may ask.
    live: Vec<SessionId>,
    epochs: Epochs,
    /// What stale hints can expect in a chunk, and the flush after which there are none.
    hinted: BTreeMap<u32, (Kind, u64)>,
    /// What the owner left in a chunk's bitmap.
    bitmap: BTreeMap<u32, u64>,
    marks: u64,
}

const NAMES: [&str; 2] = ["one", "two"];

impl Model {
    fn new() -> Self {
        let config = ServerConfig::tiny(ServerId::new(0), 1, CHUNKS);
        let mut world = World::new(config);
        let (maker, _) = world.open().expect("room");
        let ids = NAMES.map(|name| world.create(maker, name));
        world.done(maker, Request::CloseSession {});
        Self {
            world,
            ids,
            extents: BTreeMap::new(),
            published: BTreeMap::new(),
            live: Vec::new(),
            epochs: Epochs { epoch: 1, safe: 1, flush: 0, flushed_through: 0, is_awaited: false },
            hinted: BTreeMap::new(),
            bitmap: BTreeMap::new(),
            marks: 0,
        }
    }

    fn flushed_through(&self) -> u64 {
        self.published.values().map(|(_, flushed)| *flushed).min().unwrap_or(self.epochs.flush)
    }

    /// What the server says must be what the model knows, and must not go back.
    fn check_epochs(&mut self, now: Epochs) {
        let before = self.epochs;
        let safe = self.published.values().map(|(pin, _)| *pin).min().unwrap_or(now.epoch);
        assert_eq!(now.safe, safe, "safe is the least published pin");
        assert_eq!(now.flush, before.flush);
        assert_eq!(now.flushed_through, self.flushed_through());
        assert!(now.epoch >= before.epoch && now.safe >= before.safe, "{before:?} -> {now:?}");
        assert!(now.flushed_through >= before.flushed_through, "{before:?} -> {now:?}");
        self.epochs = now;
    }

    /// Chunks that belong to an extent for which `keep` holds.
    fn covered(&self, keep: impl Fn(&Extent) -> bool) -> BTreeSet<u32> {
        let kept = self.extents.iter().filter(|(_, extent)| keep(extent));
        kept.flat_map(|(at, extent)| *at..at + extent.count).collect()
    }

    /// Whether `count` chunks in a row are outside `taken`.
    fn has_run(taken: &BTreeSet<u32>, count: u32) -> bool {
        (0..CHUNKS).any(|at| at + count <= CHUNKS && (at..at + count).all(|c| !taken.contains(&c)))
    }

    fn is_waiting(extent: &Extent, flushed_through: u64) -> bool {
        match extent.status {
            Status::Used { .. } => true,
            Status::Freed { generation } => generation > flushed_through,
        }
    }

    fn id(&self, index: u32) -> u32 {
        self.ids[index as usize - 1]
    }

    fn alloc(&mut self, owner: SessionId, kind: Kind, count: u32, claim: u64) {
        let (index, class, object_bytes) = (self.id(kind.0), kind.1, kind.2);
        let flushed_through = claim.min(self.flushed_through());
        let request = Request::AllocChunks { index, class, object_bytes, count, flushed_through: claim };
        let reply = self.world.ask_twice(owner, request);
        let nobody = Status::Used { owner: SessionId::NONE };
        let orphan = self.extents.values().any(|e| object_bytes > 0 && e.kind == kind && e.status == nobody);
        let same =
            |e: &Extent| e.kind == kind && e.count == count && matches!(e.status, Status::Freed { .. });
        let reusable = self.extents.values().any(same);
        let all_taken = self.covered(|_| true);
        let taken = self.covered(|e| Self::is_waiting(e, flushed_through));
        let used = self.covered(|e| matches!(e.status, Status::Used { .. }));
        // Bitmaps of the model are never full.
        let others = |e: &Extent| {
            object_bytes > 0
                && e.kind == kind
                && matches!(e.status, Status::Used { owner: other } if other != owner)
        };
        let is_scarce = all_taken.len() == CHUNKS as usize;
        let shared = is_scarce && !orphan && !reusable && self.extents.values().any(others);
        match reply {
            Err(CallError::Control(ControlError::PoolFull { wanted, flush_helps, .. })) => {
                assert_eq!(wanted, count);
                assert!(
                    !orphan && !reusable && !shared && !Self::has_run(&taken, count),
                    "there was memory for {kind:?}"
                );
                assert_eq!(flush_helps, Self::has_run(&used, count));
            }
            Ok(Reply::Chunks { offset, inherited }) => {
                let at = u32::try_from((offset - MAIN_BASE) / CHUNK_BYTES).expect("few chunks");
                assert_eq!((offset - MAIN_BASE) % CHUNK_BYTES, 0);
                let range = at..at + count;
                assert_eq!(
                    inherited,
                    orphan || shared,
                    "orphans come first, and sharing before others' freed chunks"
                );
                let was_shared = inherited && self.extents[&at].shared;
                match self.extents.get(&at).cloned() {
                    Some(extent) if shared => assert!(others(&extent) && extent.count == count, "{extent:?}"),
                    Some(extent) if inherited => {
                        assert_eq!(extent, Extent { kind, count, status: nobody, shared: was_shared });
                    }
                    Some(extent) if reusable => {
                        assert!(same(&extent), "its own type comes second: {extent:?}");
                    }
                    _ => {
                        assert!(!orphan && !reusable);
                        let gives = if Self::has_run(&all_taken, count) { &all_taken } else { &taken };
                        assert!(
                            range.clone().all(|c| c < CHUNKS && !gives.contains(&c)),
                            "chunk {at} was taken"
                        );
                        self.extents
                            .retain(|begin, e| !(*begin < range.end && range.start < begin + e.count));
                    }
                }
                self.check_types(range, kind);
                let shared = shared || was_shared;
                self.extents.insert(at, Extent { kind, count, status: Status::Used { owner }, shared });
                self.check_bitmap(at, kind, inherited);
            }
            other => panic!("{other:?}"),
        }
    }

    /// TYPE-STABLE: a chunk that hints may point to holds what they expect.
    fn check_types(&mut self, chunks: std::ops::Range<u32>, kind: Kind) {
        for chunk in chunks {
            if let Some((expected, until)) = self.hinted.insert(chunk, (kind, u64::MAX)) {
                let flushed = self.published.values().all(|(_, flushed)| *flushed >= until);
                assert!(expected == kind || flushed, "chunk {chunk} was {expected:?} and is {kind:?}");
            }
        }
    }

    fn check_bitmap(&mut self, at: u32, kind: Kind, inherited: bool) {
        let begin = MAIN_BASE + u64::from(at) * CHUNK_BYTES;
        let (index, class, object_bytes) = (self.id(kind.0), kind.1, kind.2);
        if object_bytes == 0 {
            return;
        }
        let word = |offset| self.world.memory.load(RegionId::MAIN, begin + offset);
        let objects = ObjectChunk::new(CHUNK_BYTES, object_bytes).expect("it fits");
        assert_eq!(word(0), ObjectChunk::MAGIC);
        assert_eq!(word(8), u64::from(index) | u64::from(class) << 32);
        assert_eq!(word(16), u64::from(object_bytes) | u64::from(objects.objects) << 32);
        let expected = if inherited { self.bitmap[&at] } else { 0 };
        assert_eq!(word(ObjectChunk::BITMAP_OFFSET), expected);
        self.marks += 1;
        self.world.memory.store(RegionId::MAIN, begin + ObjectChunk::BITMAP_OFFSET, self.marks);
        self.bitmap.insert(at, self.marks);
    }

    fn free(&mut self, who: SessionId, at: u32) {
        let offset = MAIN_BASE + u64::from(at) * CHUNK_BYTES;
        // The next flush that anybody asks for begins after this free.
        let generation = self.epochs.flush + 1;
        let mut reply = self.world.ask_twice(who, Request::FreeChunks { offset, generation });
        let Some(extent) = self.extents.get_mut(&at) else {
            assert!(is_bad_request(&reply));
            return;
        };
        let is_raw = extent.kind.2 == 0;
        let allowed =
            matches!(extent.status, Status::Used { owner } if owner == who || (owner.is_none() && !is_raw));
        if !allowed || extent.shared {
            assert!(is_bad_request(&reply), "{extent:?} was freed by {who}");
            return;
        }
        let objects = ObjectChunk::new(CHUNK_BYTES, extent.kind.2);
        if objects.is_some_and(|objects| self.bitmap[&at] & objects.word_mask(0) != 0) {
            assert!(is_bad_request(&reply), "{extent:?} holds objects");
            self.world.memory.store(RegionId::MAIN, offset + ObjectChunk::BITMAP_OFFSET, 0);
            self.bitmap.insert(at, 0);
            reply = self.world.ask_twice(who, Request::FreeChunks { offset, generation });
        }
        assert_eq!(reply, Ok(Reply::Done {}));
        extent.status = Status::Freed { generation };
        for chunk in at..at + extent.count {
            self.hinted.insert(chunk, (extent.kind, generation));
        }
    }

    fn leave(&mut self, session: SessionId) {
        self.live.retain(|other| *other != session);
        self.published.remove(&session);
        for extent in self.extents.values_mut() {
            if extent.status == (Status::Used { owner: session }) {
                extent.status = Status::Used { owner: SessionId::NONE };
            }
        }
    }

    fn bury(&mut self, by: SessionId, victim: SessionId) {
        let force = self.live.contains(&victim);
        let mut held = self.listed();
        held.retain(|chunk| chunk.owner == victim);
        self.leave(victim);
        let Reply::Adopted { chunks, .. } = self.world.bury(by, victim, force) else { panic!() };
        for chunk in &mut held {
            chunk.owner = SessionId::NONE;
        }
        assert_eq!(chunks, held, "exactly its chunks");
        let gone = refused(ControlError::NoSuchSession { session: victim });
        assert_eq!(self.world.ask(victim, Request::ListChunks { owner: None }), gone);
    }

    fn beat(&mut self, who: SessionId, lag: u64, flush: bool) {
        let oldest_pin = self.epochs.epoch.saturating_sub(lag);
        let flushed = if flush { self.epochs.flush } else { 0 };
        let published = self.published.get_mut(&who).expect("it lives");
        *published = (published.0.max(oldest_pin), published.1.max(flushed));
        let advances = self.published.values().all(|(pin, _)| *pin >= self.epochs.epoch);
        let epoch = self.epochs.epoch + u64::from(advances);
        let Ok(Reply::Alive { epochs, .. }) = self.world.ask_twice(
            who,
            Request::Heartbeat { oldest_pin, flushed, does_chores: false, is_waiting: false },
        ) else {
            panic!("a heartbeat of {who} was refused")
        };
        assert_eq!(epochs.epoch, epoch);
        self.check_epochs(epochs);
    }

    fn listed(&self) -> Vec<ChunkInfo> {
        let used = self.extents.iter().filter_map(|(at, extent)| match extent.status {
            Status::Freed { .. } => None,
            Status::Used { owner } => {
                let (_, class, object_bytes) = extent.kind;
                let index = self.id(extent.kind.0);
                let offset = MAIN_BASE + u64::from(*at) * CHUNK_BYTES;
                Some(ChunkInfo { offset, count: extent.count, index, class, object_bytes, owner })
            }
        });
        used.collect()
    }

    fn check_list(&mut self) {
        let Some(&who) = self.live.first() else { return };
        let free = u64::from(CHUNKS) - self.covered(|_| true).len() as u64;
        let expected = Reply::ChunkList { chunks: self.listed(), total: u64::from(CHUNKS), free };
        assert_eq!(self.world.ask(who, Request::ListChunks { owner: None }), Ok(expected));
    }

    fn open(&mut self) {
        let max = usize::from(self.world.config.max_sessions);
        match self.world.open() {
            Ok((session, epochs)) => {
                assert!(self.published.insert(session, (self.epochs.epoch, self.epochs.flush)).is_none());
                self.live.push(session);
                self.check_epochs(epochs);
            }
            Err(error) => {
                assert!(matches!(error, CallError::Control(ControlError::SessionsFull { max: 4, .. })));
                assert_eq!(self.published.len(), max);
            }
        }
    }

    fn restart(&mut self) {
        // The answer of the last call went with the old process: it comes again.
        let last = self.world.last.clone();
        self.world.restart();
        if let Some((call, answered)) = last {
            let request = decode::<Request>(&call.request).expect("ours");
            let is_alloc = matches!(request, Request::AllocChunks { .. });
            if is_alloc && answered.is_ok() && self.live.contains(&call.id.session) {
                assert_eq!(outcome(&call, self.world.send(&call)), answered, "a repeat of {request:?}");
            }
        }
        for session in self.live.clone() {
            assert!(
                self.world.ask(session, Request::ListChunks { owner: None }).is_ok(),
                "{session} lives on"
            );
        }
    }

    /// Drops an index, unless somebody is dead, who cannot let go of it; and makes it again.
    fn drop_index(&mut self, who: SessionId, index: u32) {
        let (id, name) = (self.id(index), NAMES[index as usize - 1]);
        let refused = self.world.ask(who, Request::ReleaseIndex { index: id, seal: 0 });
        assert!(is_bad_request(&refused), "it lives: {refused:?}");
        let begun = self.world.ask(who, Request::BeginDrop { name: name.to_owned() });
        assert!(matches!(begun, Ok(Reply::Dropping { .. })), "{begun:?}");
        self.epochs.flush += 1;
        for session in self.live.clone() {
            self.beat(session, 0, true);
        }
        let released = self.world.ask(who, Request::ReleaseIndex { index: id, seal: 0 });
        assert!(matches!(released, Ok(Reply::Released { .. })), "{released:?}");
        self.world.done(who, Request::FinishDrop { index: id, seals: vec![] });
        self.ids[index as usize - 1] = self.world.create(who, name);
    }

    fn apply(&mut self, step: &Step) {
        let pick = |who: &usize| self.live.get(*who % self.live.len().max(1)).copied();
        match step {
            Step::Open => self.open(),
            Step::Restart => self.restart(),
            Step::Close { who } => {
                let Some(who) = pick(who) else { return };
                self.world.done(who, Request::CloseSession {});
                self.leave(who);
            }
            Step::Beat { who, lag, flush } => {
                let Some(who) = pick(who) else { return };
                self.beat(who, *lag, *flush);
            }
            Step::RequestFlush { who } => {
                let Some(who) = pick(who) else { return };
                self.epochs.flush += 1;
                let reply = self.world.ask_twice(who, Request::RequestFlush {});
                let Ok(Reply::Alive { epochs, .. }) = reply else { panic!("{reply:?}") };
                self.check_epochs(epochs);
            }
            Step::Alloc { who, kind, count, claim } => {
                let Some(who) = pick(who) else { return };
                let kind = KINDS[*kind];
                self.alloc(who, kind, if kind.2 > 0 { 1 } else { *count }, *claim);
            }
            Step::Free { who, which } => {
                let Some(who) = pick(who) else { return };
                let heads: Vec<u32> = self.extents.keys().copied().collect();
                let Some(at) = heads.get(which % heads.len().max(1)) else { return };
                self.free(who, *at);
            }
            Step::FreeWild { who, offset } => {
                let Some(who) = pick(who) else { return };
                let at = u32::try_from(offset.saturating_sub(MAIN_BASE) / CHUNK_BYTES).expect("small");
                let begins = *offset == MAIN_BASE + u64::from(at) * CHUNK_BYTES;
                if !begins {
                    let reply = self.world.ask(who, Request::FreeChunks { offset: *offset, generation: 0 });
                    assert!(is_bad_request(&reply));
                }
            }
            Step::Bury { who, victim } => {
                let Some(who) = pick(who) else { return };
                let known: Vec<SessionId> = self.published.keys().copied().collect();
                let victim = known[victim % known.len()];
                if victim != who {
                    self.bury(who, victim);
                }
            }
            Step::Release { who, index } => {
                let Some(who) = pick(who) else { return };
                if self.live.len() < self.published.len() {
                    return;
                }
                self.drop_index(who, *index);
                let released = self.covered(|extent| extent.kind.0 == *index);
                self.extents.retain(|_, extent| extent.kind.0 != *index);
                self.hinted.retain(|chunk, _| !released.contains(chunk));
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    #[test]
    fn chunks_and_epochs_follow_the_model(steps in proptest::collection::vec(step(), 1..90)) {
        let mut model = Model::new();
        model.open();
        for step in &steps {
            model.apply(step);
            model.check_list();
        }
    }
}

#[test]
fn freed_memory_serves_again_for_ever() {
    let mut model = Model::new();
    model.open();
    let who = model.live[0];
    for round in 0..40 {
        let kind = KINDS[round % KINDS.len()];
        for _ in 0..CHUNKS {
            model.alloc(who, kind, 1, u64::MAX);
        }
        assert_eq!(model.listed().len(), CHUNKS as usize, "all memory is in use in round {round}");
        for at in 0..CHUNKS {
            model.free(who, at);
        }
        model.apply(&Step::RequestFlush { who: 0 });
        model.beat(who, 0, true);
    }
}
