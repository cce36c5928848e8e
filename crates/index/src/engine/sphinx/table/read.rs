//! Look-ups, and how one that finds nothing can be certain of it.
//!
//! A READ's words come in any order, and a split may pass between any two of them. So what a look-up finds was there at some time, and the tree
//! checks it; but that nothing was found says nothing until the state is read *behind* the slots: if by then the hash still belongs to the subtable, its
//! entries had not begun to be cleared away when the slots were read.

use super::layout::{CHILDREN_AT, FROZEN, PAIR_BYTES, RECORD_BYTES, STATE_AT, Standing, State, slot_order};
use super::{MAX_ATTEMPTS, Table, corrupt};
use crate::api::IndexError;
use crate::shared::surely;
use farwood_fabric::{Batch, Buf, GlobalAddr, Op, marks};
use smallvec::SmallVec;

/// An entry, and where it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Slot {
    /// Where.
    pub addr: GlobalAddr,
    /// The entry.
    pub entry: u64,
}

/// What a look-up found; most often one.
pub type Candidates = SmallVec<[Slot; 2]>;

/// An entry that several insert at once may be in two slots for a while; it is found once.
fn push(found: &mut Candidates, slot: Slot) {
    if found.iter().all(|other| other.entry != slot.entry) {
        found.push(slot);
    }
}

/// Where to look for a hash: the READs of a look-up, so that several look-ups can go out together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Probe {
    pub(super) subtable: GlobalAddr,
    /// From the start of the subtable.
    pub(super) pairs: [u64; 2],
}

impl Probe {
    /// What to READ, at any time and in any order.
    pub fn places(&self) -> [(GlobalAddr, usize); 2] {
        self.pairs.map(|pair| (self.subtable.add(pair), PAIR_BYTES))
    }

    /// The entries that match in what was read. `None` if there are none, or if they may be out of date: then ask
    /// [`Table::look_up_surely`].
    pub fn candidates(&self, pairs: [&Buf; 2], matches: impl Fn(u64) -> bool) -> Option<Candidates> {
        let mut found = Candidates::new();
        for slot in self.slots(|pair, n| pairs[pair].word(n * 8)) {
            if matches(slot.entry & !FROZEN) {
                if slot.entry & FROZEN != 0 {
                    marks::hit("hash_entry_frozen");
                    return None;
                }
                push(&mut found, slot);
            }
        }
        (!found.is_empty()).then_some(found)
    }

    /// All slots that are not empty, as they are, given each pair's words by their number.
    pub(super) fn slots(&self, word: impl Fn(usize, usize) -> u64) -> impl Iterator<Item = Slot> {
        (0..2 * PAIR_WORDS).filter_map(move |number| {
            let (pair, n) = (number / PAIR_WORDS, number % PAIR_WORDS);
            let entry = word(pair, n);
            let addr = self.subtable.add(self.pairs[pair] + n as u64 * 8);
            (entry != 0).then_some(Slot { addr, entry })
        })
    }
}

/// The pairs of a hash, and the state behind them. They are hundreds of bytes, so whoever looks fills one in place, again and again.
#[derive(Debug)]
pub(super) struct Seen {
    pub(super) probe: Probe,
    pairs: Pairs,
    pub(super) state: State,
}

/// The words of both pairs.
pub(super) type Pairs = [[u64; PAIR_WORDS]; 2];
const PAIR_WORDS: usize = PAIR_BYTES / 8;

impl Seen {
    /// Nothing yet.
    pub(super) fn nothing(probe: Probe) -> Self {
        Self { probe, pairs: Pairs::default(), state: State::new(0, 0) }
    }

    /// What was read.
    pub(super) fn fill(&mut self, probe: Probe, pairs: &[Buf; 2], state: State) {
        (self.probe, self.state) = (probe, state);
        for (pair, buf) in self.pairs.iter_mut().zip(pairs) {
            pair.iter_mut().enumerate().for_each(|(n, word)| *word = buf.word(n * 8));
        }
    }

    /// The same by a look, behind a CAS if there is one, where this thread can look itself; brings the word before the CAS.
    pub(super) async fn here(
        &mut self,
        op: &Op,
        probe: Probe,
        swap: Option<(GlobalAddr, u64, u64)>,
    ) -> Option<Result<u64, IndexError>> {
        let (pairs, mut raw) = (&mut self.pairs, 0);
        let [one, two] = probe.places();
        let places = [one, two, (probe.subtable.add(STATE_AT), 8)];
        let looked = op.swap_and_look_here(swap, places, |n, words| match pairs.get_mut(n) {
            Some(pair) => pair.iter_mut().enumerate().for_each(|(n, word)| *word = words.get(n * 8)),
            None => raw = words.get(0),
        })?;
        op.endpoint().breathe().await;
        Some(looked.map_err(IndexError::from).and_then(|before| {
            (self.probe, self.state) = (probe, decode(raw, probe.subtable)?);
            Ok(before)
        }))
    }

    /// The entries that match, frozen or not; as the tree knows them.
    pub(super) fn matching(&self, matches: impl Fn(u64) -> bool) -> Candidates {
        let mut found = Candidates::new();
        for slot in self.slots() {
            let plain = Slot { entry: slot.entry & !FROZEN, ..slot };
            if matches(plain.entry) {
                push(&mut found, plain);
            }
        }
        found
    }

    /// The slots with this very word.
    pub(super) fn copies_of(&self, word: u64) -> Candidates {
        if !self.holds(word) {
            return Candidates::new();
        }
        self.slots().filter(|slot| slot.entry == word).collect()
    }

    /// Whether there are any: most often there are none, and this is quicker.
    #[expect(
        clippy::needless_bitwise_bool,
        reason = "without branches the compiler compares several at a time"
    )]
    pub(super) fn holds(&self, word: u64) -> bool {
        self.pairs.as_flattened().iter().fold(false, |held, other| held | (*other == word))
    }

    fn slots(&self) -> impl Iterator<Item = Slot> {
        self.probe.slots(|pair, n| self.pairs[pair][n])
    }

    /// The slot that a new entry goes into: in the emptier pair, in the main bucket if it has room.
    pub(super) fn empty_slot(&self) -> Option<GlobalAddr> {
        let [one, two] = self.pairs.map(|pair| pair.iter().filter(|word| **word == 0).count());
        let emptier = usize::from(two > one);
        let (offset, words) = (self.probe.pairs[emptier], &self.pairs[emptier]);
        let slot = slot_order(offset).find(|n| words[*n] == 0)?;
        Some(self.probe.subtable.add(offset + slot as u64 * 8))
    }
}

impl Table {
    /// Where to look for a hash, as far as this compute server knows.
    pub fn probe(&self, hash: u64) -> Probe {
        Probe { subtable: self.inner.directory.find(hash), pairs: self.inner.geometry.pairs(hash) }
    }

    /// The entries of a hash that match (other hashes' entries are in the same buckets: compare fingerprints). One round trip if there are some,
    /// else one more to be certain, and more if the directory is behind.
    ///
    /// An entry that was inserted before and is not removed meanwhile is found. If the nodes that the entries lead to are all the wrong ones, or
    /// out of date, [`Table::look_up_surely`] tells whether the directory was behind.
    pub async fn look_up(
        &self,
        op: &Op,
        hash: u64,
        matches: impl Fn(u64) -> bool,
    ) -> Result<Candidates, IndexError> {
        let probe = self.probe(hash);
        let mut batch = Batch::new(self.server());
        let reads = probe.places().map(|(addr, bytes)| batch.read(addr, bytes));
        match op.submit(batch).await {
            Ok(mut done) => {
                let [one, two] = reads.map(|read| done.take(read));
                if let Some(found) = probe.candidates([&one, &two], &matches) {
                    return Ok(found);
                }
                if self.inner.sabotage.trust_absence {
                    return Ok(Candidates::new());
                }
            }
            Err(failure) => surely::reconnected(op, failure.error).await?,
        }
        let mut seen = Seen::nothing(probe);
        self.see(op, hash, &mut seen).await?;
        Ok(seen.matching(matches))
    }

    /// The same, with a directory that is certain not to be behind.
    pub async fn look_up_surely(
        &self,
        op: &Op,
        hash: u64,
        matches: impl Fn(u64) -> bool,
    ) -> Result<Candidates, IndexError> {
        let mut seen = Seen::nothing(self.probe(hash));
        self.see(op, hash, &mut seen).await?;
        let found = seen.matching(&matches);
        if !found.is_empty() {
            return Ok(found);
        }
        // Twice, as `look_up` does: an entry that several insert at once may have been in a slot that came too early, and gone from one that came too late.
        self.see(op, hash, &mut seen).await?;
        Ok(seen.matching(matches))
    }

    /// The pairs of a hash in the subtable that it belongs to, at an instant of this call.
    pub(super) async fn see(&self, op: &Op, hash: u64, seen: &mut Seen) -> Result<(), IndexError> {
        for _ in 0..MAX_ATTEMPTS {
            self.look(op, self.probe(hash), seen).await?;
            if seen.state.standing(hash) != Standing::Gone {
                return Ok(());
            }
            marks::hit("hash_directory_behind");
            op.count_retry();
            self.learn(op, seen.probe.subtable).await?;
        }
        Err(IndexError::Contended { what: "a look into the hash table", attempts: MAX_ATTEMPTS })
    }

    /// READs pairs, and behind them the state.
    pub(super) async fn look(&self, op: &Op, probe: Probe, seen: &mut Seen) -> Result<(), IndexError> {
        if let Some(looked) = seen.here(op, probe, None).await {
            return looked.map(drop);
        }
        let state_at = probe.subtable.add(STATE_AT);
        for _ in 0..MAX_ATTEMPTS {
            let mut batch = Batch::new(self.server());
            let reads = probe.places().map(|(addr, bytes)| batch.read(addr, bytes));
            let is_ordered = op.endpoint().capabilities().ordered_reads;
            let state = is_ordered.then(|| batch.read(state_at, 8));
            match op.submit(batch).await {
                Ok(mut done) => {
                    let pairs = reads.map(|read| done.take(read));
                    let raw = match state {
                        Some(state) => done.take(state).word(0),
                        None => surely::read_word(op, state_at).await?,
                    };
                    seen.fill(probe, &pairs, decode(raw, probe.subtable)?);
                    return Ok(());
                }
                Err(failure) => surely::reconnected(op, failure.error).await?,
            }
        }
        Err(IndexError::Contended { what: "a completion", attempts: MAX_ATTEMPTS })
    }

    /// Enters a subtable and those that were split off from it into the directory. Returns its state and children.
    pub(super) async fn learn(
        &self,
        op: &Op,
        subtable: GlobalAddr,
    ) -> Result<(State, Vec<GlobalAddr>), IndexError> {
        for _ in 0..MAX_ATTEMPTS {
            let record = surely::read(op, subtable, usize::try_from(RECORD_BYTES).unwrap_or(0)).await?;
            let word = |at: u64| record.word(usize::try_from(at).unwrap_or(0));
            let state = decode(word(STATE_AT), subtable)?;
            let child = |depth: u8| GlobalAddr::from_raw(word(CHILDREN_AT + 8 * u64::from(depth)));
            let children: Vec<_> = (state.birth..state.depth).map(child).collect();
            // The words of the record came in any order: a child may be older than the state.
            if children.iter().any(|child| child.is_null()) {
                marks::hit("hash_record_torn");
                op.count_retry();
                continue;
            }
            if let Some(child) = children.iter().find(|child| !self.is_plausible(**child)) {
                return Err(corrupt(format!("the hash subtable at {subtable} has a child at {child}")));
            }
            for (depth, child) in (state.birth..state.depth).zip(&children) {
                self.inner.directory.note(depth + 1, state.suffix | 1 << depth, *child);
            }
            self.inner.directory.note(state.depth, state.suffix, subtable);
            return Ok((state, children));
        }
        Err(IndexError::Contended { what: "a whole record of a hash subtable", attempts: MAX_ATTEMPTS })
    }

    fn is_plausible(&self, subtable: GlobalAddr) -> bool {
        let root = self.inner.directory.root();
        subtable.is_word_aligned() && subtable.server() == root.server() && subtable.region() == root.region()
    }
}

pub(super) fn decode(raw: u64, subtable: GlobalAddr) -> Result<State, IndexError> {
    State::from_raw(raw)
        .ok_or_else(|| corrupt(format!("no hash subtable at {subtable}: its state is {raw:#x}")))
}
