//! A subtable becomes two while others read and write it; and what becomes of a split whose maker died.
//!
//! Whoever needs a split takes the subtable's lock and carries it out, from wherever it stands. Everybody else who needs it waits, and takes the lock
//! over if its holder is dead. The steps are numbered in [`super`].

use super::layout::{CHILDREN_AT, FROZEN, LOCK_AT, Phase, RECORD_BYTES, STATE_AT, Standing, State, low_bits};
use super::read::decode;
use super::{MAX_ATTEMPTS, MAX_DEPTH, Nodes, Table, corrupt, image};
use crate::api::IndexError;
use crate::shared::heap::Room;
use crate::shared::lock::Patience;
use crate::shared::locks::settle_word;
use crate::shared::surely;
use farwood_fabric::clock::Nanos;
use farwood_fabric::control::SessionState;
use farwood_fabric::{Batch, Endpoint, FabricError, GlobalAddr, Op, Session, marks};

/// How often a lock is looked at. With the waits between this is far beyond a lease.
const MAX_LOOKS: u32 = 1_000_000;
const WAIT_NS: Nanos = 2_000;
/// How many slots are changed at a time.
const SWAPS_AT_ONCE: usize = 64;

/// Who holds a subtable's lock: a session's term, and which of its acquisitions. 0: nobody.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Holder(u64);

impl Holder {
    const ACQUISITION_BITS: u8 = 24;

    fn new(term: u64, acquisition: u32) -> Self {
        Self(term << Self::ACQUISITION_BITS | u64::from(acquisition) & low_bits(Self::ACQUISITION_BITS))
    }

    fn term(self) -> u64 {
        self.0 >> Self::ACQUISITION_BITS
    }
}

/// A subtable's lock, held or perhaps held. Who drops it leaves it to be freed in the background, once nothing of the holder can land any
/// more; a split that was begun is taken up by whoever locks the subtable next.
struct Locked {
    session: Session,
    endpoint: Endpoint,
    lock: GlobalAddr,
    mine: Holder,
    is_held: bool,
}

impl Drop for Locked {
    fn drop(&mut self) {
        if self.is_held {
            settle_word(&self.session, &self.endpoint, self.lock, self.mine.0);
        }
    }
}

/// One slot to be changed: where, from what, to what.
#[derive(Clone, Copy, Debug)]
struct Change {
    at: GlobalAddr,
    from: u64,
    to: u64,
}

impl Table {
    /// Returns when the subtable is deeper than `past`: splits it, or waits for whoever does.
    pub(super) async fn resize(
        &self,
        op: &Op,
        nodes: &impl Nodes,
        subtable: GlobalAddr,
        past: u8,
    ) -> Result<(), IndexError> {
        let mut patience = Patience::default();
        for _ in 0..MAX_LOOKS {
            let head = surely::read(op, subtable, 16).await?;
            let state = decode(head.word(8), subtable)?;
            if state.depth > past {
                return Ok(());
            }
            let holder = Holder(head.word(0));
            if self.is_free(op, holder, &mut patience).await? {
                // Before the lock, since it may take waiting.
                let room = self.room(op).await;
                if let Some(locked) = self.lock(op, subtable, holder).await? {
                    // Boxed: most operations never come here, and should not carry it about.
                    let split = Box::pin(self.split(op, nodes, subtable, past, room)).await;
                    return split.and(self.unlock(op, locked).await);
                }
            }
            op.count_retry();
            op.endpoint().sleep(WAIT_NS + op.endpoint().random_below(WAIT_NS)).await;
        }
        Err(IndexError::Contended { what: "the split of a hash subtable", attempts: MAX_LOOKS })
    }

    /// Finishes what a dead session left of a split, if it did. For [`Table::check`].
    pub(super) async fn finish(
        &self,
        op: &Op,
        nodes: &impl Nodes,
        subtable: GlobalAddr,
    ) -> Result<(), IndexError> {
        let head = surely::read(op, subtable, 16).await?;
        let (holder, state) = (Holder(head.word(0)), decode(head.word(8), subtable)?);
        if holder.0 == 0 && state.phase == Phase::Idle {
            return Ok(());
        }
        if holder.0 != 0 && !self.is_gone(op, holder).await? {
            return Err(corrupt(format!(
                "the hash subtable at {subtable} is still locked, by term {}",
                holder.term()
            )));
        }
        let room = self.room(op).await;
        let Some(locked) = self.lock(op, subtable, holder).await? else {
            return Err(corrupt(format!("the hash subtable at {subtable} is in use")));
        };
        let split = match state.phase {
            Phase::Idle => Ok(()),
            Phase::Splitting => Box::pin(self.split(op, nodes, subtable, state.depth, room)).await,
            Phase::Clearing => self.clear(op, subtable, state).await,
        };
        split.and(self.unlock(op, locked).await)
    }

    /// Whether a lock can be taken: it is nobody's, or has been a dead session's for a while.
    async fn is_free(&self, op: &Op, holder: Holder, patience: &mut Patience) -> Result<bool, IndexError> {
        if holder.0 == 0 {
            return Ok(true);
        }
        if !patience.is_over(holder.0, op.endpoint().now(), self.inner.pool.suspicion_ns()) {
            return Ok(false);
        }
        if self.inner.sabotage.steal_without_fence {
            return Ok(true);
        }
        self.is_gone(op, holder).await
    }

    /// Whether nothing of a lock's holder can land any more. If its lease has run out, it is recovered first.
    async fn is_gone(&self, op: &Op, holder: Holder) -> Result<bool, IndexError> {
        let session = self.inner.pool.session();
        if holder.term() == session.term() {
            return Ok(false);
        }
        let known = session.list(op).await?.into_iter().find(|info| info.term == holder.term());
        match known {
            None => Ok(true),
            Some(info) if matches!(info.state, SessionState::Fenced | SessionState::Adopting) => Ok(true),
            // When it is recovered, it is fenced.
            Some(info) => self.inner.pool.suspect(op, info.session).await,
        }
    }

    /// Room for another subtable.
    async fn room(&self, op: &Op) -> Result<Room, FabricError> {
        self.inner.pool.heap().room(op, self.server(), self.inner.class).await
    }

    /// Takes the lock from whoever has it, as was seen.
    async fn lock(&self, op: &Op, subtable: GlobalAddr, from: Holder) -> Result<Option<Locked>, IndexError> {
        let (pool, lock) = (&self.inner.pool, subtable.add(LOCK_AT));
        let mine = Holder::new(pool.session().term(), pool.next_acquisition());
        let (session, endpoint) = (pool.session().clone(), op.endpoint().clone());
        let mut locked = Locked { session, endpoint, lock, mine, is_held: true };
        locked.is_held = match op.cas(lock, from.0, mine.0).await {
            Ok(before) => before == from.0,
            Err(error) => {
                locked.is_held = error.is_unknown();
                // Once reconnected it has happened or never will, and the word tells which. If that cannot be asked, it stays open.
                surely::reconnected(op, error).await?;
                surely::read_word(op, lock).await? == mine.0
            }
        };
        if locked.is_held && from.0 != 0 {
            marks::hit("hash_lock_taken_over");
        }
        Ok(locked.is_held.then_some(locked))
    }

    /// Only the holder WRITEs the lock, and nobody else changes it while he lives.
    async fn unlock(&self, op: &Op, mut locked: Locked) -> Result<(), IndexError> {
        for _ in 0..MAX_ATTEMPTS {
            match op.write_word(locked.lock, 0).await {
                Ok(()) => {
                    locked.is_held = false;
                    return Ok(());
                }
                Err(error) => surely::reconnected(op, error).await?,
            }
            if surely::read_word(op, locked.lock).await? != locked.mine.0 {
                locked.is_held = false;
                return Ok(());
            }
        }
        Err(IndexError::Contended { what: "a completion", attempts: MAX_ATTEMPTS })
    }

    /// Splits a subtable whose lock is held, unless it is deeper than `past` already.
    async fn split(
        &self,
        op: &Op,
        nodes: &impl Nodes,
        subtable: GlobalAddr,
        past: u8,
        room: Result<Room, FabricError>,
    ) -> Result<(), IndexError> {
        let record = surely::read(op, subtable, usize::try_from(RECORD_BYTES).unwrap_or(0)).await?;
        let mut state = decode(record.word(8), subtable)?;
        if state.depth > past {
            return Ok(());
        }
        if state.phase == Phase::Clearing {
            self.clear(op, subtable, state).await?;
            state = state.with(state.depth, Phase::Idle);
        }
        if state.depth == MAX_DEPTH {
            let why = format!(
                "a hash subtable was split {MAX_DEPTH} times and is full again; they have to be larger"
            );
            return Err(IndexError::BadConfig { why });
        }
        let child_at = subtable.add(CHILDREN_AT + 8 * u64::from(state.depth));
        let begun = GlobalAddr::from_raw(
            record.word(usize::try_from(child_at.offset() - subtable.offset()).unwrap_or(0)),
        );
        let child = if begun.is_null() {
            let mut room = room?;
            room.link();
            room.addr()
        } else {
            marks::hit("hash_split_resumed");
            begun
        };
        // In this order: whoever goes on after us must find the child.
        surely::write_word(op, child_at, child.to_raw()).await?;
        self.set_state(op, subtable, state.with(state.depth, Phase::Splitting)).await?;
        let moving = self.freeze(op, nodes, subtable, state).await?;
        surely::write(op, child, &image(self.inner.geometry, state.child(), &moving)).await?;
        let deeper = state.with(state.depth + 1, Phase::Clearing);
        self.set_state(op, subtable, deeper).await?;
        self.inner.directory.note(deeper.depth, deeper.suffix, subtable);
        self.inner.directory.note(deeper.depth, state.child().suffix, child);
        marks::hit("hash_split");
        self.clear(op, subtable, deeper).await
    }

    async fn set_state(&self, op: &Op, subtable: GlobalAddr, state: State) -> Result<(), IndexError> {
        Ok(surely::write_word(op, subtable.add(STATE_AT), state.to_raw()).await?)
    }

    /// All slots that are not empty, by their offset in the subtable.
    pub(super) async fn all_slots(
        &self,
        op: &Op,
        subtable: GlobalAddr,
    ) -> Result<Vec<(u64, u64)>, IndexError> {
        let bytes = usize::try_from(self.inner.geometry.groups_bytes()).unwrap_or(0);
        let groups = surely::read(op, subtable.add(RECORD_BYTES), bytes).await?;
        let slot = |n: usize| (RECORD_BYTES + n as u64 * 8, groups.word(n * 8));
        Ok((0..bytes / 8).map(slot).filter(|(_, word)| *word != 0).collect())
    }

    /// Freezes the entries that leave. Returns them with their places, each once.
    async fn freeze(
        &self,
        op: &Op,
        nodes: &impl Nodes,
        subtable: GlobalAddr,
        state: State,
    ) -> Result<Vec<(u64, u64)>, IndexError> {
        let during = state.with(state.depth, Phase::Splitting);
        let mut moving = Vec::new();
        let mut undecided = self.all_slots(op, subtable).await?;
        for _ in 0..MAX_ATTEMPTS {
            undecided.retain(|(at, word)| {
                if word & FROZEN != 0 {
                    moving.push((*at, word & !FROZEN));
                }
                word & FROZEN == 0
            });
            if undecided.is_empty() {
                moving.sort_unstable();
                // Several may have inserted one entry at once. One place is enough.
                let mut seen = rustc_hash::FxHashSet::default();
                moving.retain(|(_, entry)| seen.insert(*entry));
                return Ok(moving);
            }
            let entries: Vec<u64> = undecided.iter().map(|(_, word)| *word).collect();
            let hashes = nodes.hashes_of(op, &entries).await?;
            let mut changes = Vec::new();
            for ((at, word), hash) in undecided.iter().zip(hashes) {
                let at = subtable.add(*at);
                match hash.map(|hash| during.standing(hash)) {
                    Some(Standing::Leaving) if self.inner.sabotage.skip_freeze => {
                        moving.push((at.offset() - subtable.offset(), *word));
                    }
                    Some(Standing::Leaving) => changes.push(Change { at, from: *word, to: word | FROZEN }),
                    Some(_) => {}
                    None => {
                        marks::hit("hash_entry_of_no_node");
                        changes.push(Change { at, from: *word, to: 0 });
                    }
                }
            }
            let held = self.apply(op, &changes).await?;
            let offset = |at: GlobalAddr| at.offset() - subtable.offset();
            undecided = held
                .into_iter()
                .map(|(at, word)| (offset(at), word))
                .filter(|(_, word)| *word != 0)
                .collect();
        }
        Err(IndexError::Contended { what: "the entries of a hash subtable", attempts: MAX_ATTEMPTS })
    }

    /// Empties the slots of entries that have moved, and ends the split.
    async fn clear(&self, op: &Op, subtable: GlobalAddr, state: State) -> Result<(), IndexError> {
        let slots = self.all_slots(op, subtable).await?;
        let frozen = slots.into_iter().filter(|(_, word)| word & FROZEN != 0);
        let mut changes: Vec<_> =
            frozen.map(|(at, word)| Change { at: subtable.add(at), from: word, to: 0 }).collect();
        for _ in 0..MAX_ATTEMPTS {
            let held = self.apply(op, &changes).await?;
            // Nobody else changes a frozen slot; once it is empty others may use it.
            changes = changes
                .into_iter()
                .zip(held)
                .filter(|(change, (_, now))| *now == change.from)
                .map(|(change, _)| change)
                .collect();
            if changes.is_empty() {
                return self.set_state(op, subtable, state.with(state.depth, Phase::Idle)).await;
            }
        }
        Err(IndexError::Contended { what: "the entries of a hash subtable", attempts: MAX_ATTEMPTS })
    }

    /// Carries out CASes, many at once. Returns what each slot holds by then.
    async fn apply(&self, op: &Op, changes: &[Change]) -> Result<Vec<(GlobalAddr, u64)>, IndexError> {
        let mut held = Vec::with_capacity(changes.len());
        for some in changes.chunks(SWAPS_AT_ONCE) {
            let batches = some.iter().map(|change| {
                let mut batch = Batch::new(self.server());
                batch.cas(change.at, change.from, change.to);
                batch
            });
            let results = op.submit_all(batches).await;
            for (change, result) in some.iter().zip(results) {
                let now = match result {
                    Ok(done) if done.previous(0) == change.from => change.to,
                    Ok(done) => {
                        marks::hit("hash_move_lost");
                        done.previous(0)
                    }
                    Err(failure) => {
                        surely::reconnected(op, failure.error).await?;
                        surely::read_word(op, change.at).await?
                    }
                };
                held.push((change.at, now));
            }
        }
        Ok(held)
    }
}
