//! Checks every result of a benchmark against a model, while it runs.
//!
//! Clients (threads, or tasks of a simulated world) share one [`Model`]. Each asks for a ticket before an operation and hands
//! it back with the result. Both take a stamp from one counter, so that an operation lies somewhere within its *span*,
//! and what ended before another began is known to have come first. No clock is involved.
//!
//! # The rules
//!
//! Keys are judged one by one. A key has writes (its initial state is the first), and each write has a span: it ends when its
//! operation does, or earlier, see 3. Every answer says that the key held something at some instant of the answer's span:
//!
//! | answer | the key held |
//! |---|---|
//! | got, or scanned, a value or nothing | just that |
//! | deleted, updated: yes; inserted: no | some value |
//! | deleted, updated: no; inserted: yes | nothing |
//! | swapped: yes | what was expected |
//! | swapped: no | anything but what was expected |
//!
//! 1. **Legal.** Some write that has begun and is not *gone* must have made what the answer says. Writes under way and of
//!    unknown outcome count, as they may have happened; the answering operation's own write does not.
//! 2. **Gone.** If an operation began after a write had ended, and shows that the key then held something else, the write
//!    is gone for all that begins after that operation. A finished write shows what it wrote, an answer what it says
//!    (and that not before the first write began that it can mean, however early it began itself).
//! 3. **Seen.** If only one write can have made what an answer says, it has happened by the end of that answer: its
//!    span ends there, though its operation may go on. (With 2, this refuses an old value after a new one was read.) If its
//!    operation says later that it did not happen, that is refused too.
//! 4. **Replaced once.** If a conditional write happened, and only one write can have made what it found, then it replaced
//!    that one, which is gone at its end. No second one can have found it: concurrent lost updates are caught.
//! 5. **Scans** are in order, within bounds and limit, and amount to one read of each key, each at its own instant: of the value
//!    that was returned; of nothing for a key that is missing, up to the last pair if the limit was reached.
//!
//! **Never accuses the innocent.** By induction: the write that a key really holds at an instant is never gone for an operation
//! that is under way then. By 2: at the instant of the operation that shows something else, the write has been made and is no
//! longer held, and a write is made once. By 3 and 4: if the true one is among those that can be meant, and there is only
//! one, it is that. (The tests hold every accusation against the simulator's exact checker.)
//!
//! # What is not caught
//!
//! - This is not full linearizability, which takes a search: that is the work of the simulator's checker. Answers are used one at
//!   a time. Of writes that overlap all may be the last one until an answer tells; several reads that
//!   could each be right, but not all of them together, pass. (Of small random histories that the exact checker refuses, nine in
//!   ten are refused here; a test holds it to that.)
//! - Two writes of the same value cannot be told apart. Let values say which write they come from.
//! - A write of unknown outcome may be read at any time until it was seen for certain, perhaps never, and takes memory
//!   until then. Use [`Model::settled`] where it is known that nothing more can come of it. Whether the condition of a conditional
//!   one could ever hold is not asked.
//! - A scan need not be atomic, so it may mix the times of different keys. With [`Model::with_initial`], only keys that have
//!   an entry (written and not yet back at their initial state, or loaded) can be missing; use [`Model::load`] for all.
//! - What was wrong is judged once: after a violation the model goes on, but what it says then may be a consequence.
//!
//! # Cost
//!
//! One lock. An operation takes O(log keys) plus a walk over the key's writes, which are those that some operation under way
//! may still find: one on a quiet key. A write that is gone is dropped as soon as everything under way began later, on
//! keys that nobody touches any more too. So memory is bounded by the keys that have an entry plus what was
//! written since the oldest operation under way began. A ticket that is never handed back is an operation under way: a client
//! that dies must have its ticket ended, by [`Model::unknown`] or [`Model::abandoned`].

mod counters;
mod history;
mod scan;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod trials;
mod violation;

use history::{History, Reading, Span};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub(crate) use counters::{Counters, Kind};
pub(crate) use scan::Scan;
pub(crate) use violation::{Seen, Violation};

/// What a key holds before the first operation.
pub(crate) type Initial = Box<dyn Fn(&[u8]) -> Option<Vec<u8>> + Send + Sync>;

/// A get or a scan under way.
#[derive(Debug)]
#[must_use = "an operation under way keeps old values in memory until its ticket is handed back"]
pub(crate) struct ReadTicket {
    begin: u64,
}

/// Any other operation under way. The stamp of its begin names its write.
#[derive(Debug)]
#[must_use = "an operation under way keeps old values in memory until its ticket is handed back"]
pub(crate) struct WriteTicket {
    begin: u64,
    key: Arc<[u8]>,
}

/// What the index may answer, shared by all clients.
pub(crate) struct Model {
    state: Mutex<State>,
}

struct State {
    /// The last stamp that was given out; 0 is the time of what was loaded.
    clock: u64,
    /// The begins of operations under way.
    under_way: BTreeSet<u64>,
    keys: BTreeMap<Arc<[u8]>, History>,
    /// Keys with writes that are gone, and when they were found to be: what may be dropped once all under way began later.
    gone: VecDeque<(u64, Arc<[u8]>)>,
    initial: Option<Initial>,
    counters: Counters,
}

#[expect(clippy::needless_pass_by_value, reason = "a ticket can be handed back only once")]
impl Model {
    /// A model of an empty index, to be loaded.
    pub(crate) fn new() -> Self {
        Self::with(None)
    }

    /// A model of an index that holds what the function says, so that only keys in use take memory. It is called with
    /// the model locked.
    pub(crate) fn with_initial(initial: Initial) -> Self {
        Self::with(Some(initial))
    }

    fn with(initial: Option<Initial>) -> Self {
        let state = State {
            clock: 0,
            under_way: BTreeSet::new(),
            keys: BTreeMap::new(),
            gone: VecDeque::new(),
            initial,
            counters: Counters::default(),
        };
        Self { state: Mutex::new(state) }
    }

    /// Whether keys need not be loaded into the model.
    pub(crate) fn knows_what_was_loaded(&self) -> bool {
        self.lock().initial.is_some()
    }

    /// Lets a key hold a value from the beginning, in the memory of the model too: scans must return it. Only before the first
    /// operation on the key.
    pub(crate) fn load(&self, key: &[u8], value: &[u8]) {
        let mut state = self.lock();
        let absent_without = state.initial.as_ref().is_none_or(|initial| initial(key).is_none());
        state.keys.insert(Arc::from(key), History::loaded(value, absent_without));
    }

    /// Before a get or a scan starts.
    pub(crate) fn begin_read(&self) -> ReadTicket {
        ReadTicket { begin: self.lock().begin() }
    }

    /// Before an operation starts that may write: what the key then holds. Readers may see it from now on.
    pub(crate) fn begin_write(&self, key: &[u8], new: Option<&[u8]>) -> WriteTicket {
        let mut state = self.lock();
        let (begin, key) = (state.begin(), Arc::from(key));
        let history = state.history(&key);
        history.propose(begin, new);
        let writes = history.len();
        state.counters.longest_history = state.counters.longest_history.max(writes);
        WriteTicket { begin, key }
    }

    /// A get answered.
    pub(crate) fn got(&self, ticket: ReadTicket, key: &[u8], value: Option<&[u8]>) -> Result<(), Violation> {
        let mut state = self.lock();
        let span = state.end(ticket.begin);
        let result = state.read(Kind::Get, span, &Arc::from(key), Seen::Is(value));
        state.sweep();
        state.counters.add(Kind::Get, result?);
        Ok(())
    }

    /// A scan answered.
    pub(crate) fn scanned<K: AsRef<[u8]>, V: AsRef<[u8]>>(
        &self,
        ticket: ReadTicket,
        scan: Scan<'_>,
        pairs: &[(K, V)],
    ) -> Result<(), Violation> {
        let mut state = self.lock();
        let span = state.end(ticket.begin);
        let result = scan.check_shape(pairs).and_then(|()| state.read_all(span, scan, pairs));
        state.sweep();
        state.counters.add(Kind::Scan, result?);
        Ok(())
    }

    /// A put is done.
    pub(crate) fn wrote(&self, ticket: WriteTicket) -> Result<(), Violation> {
        self.happened(Kind::Put, &ticket, None)
    }

    /// A delete is done, and the key was there or not.
    pub(crate) fn deleted(&self, ticket: WriteTicket, existed: bool) -> Result<(), Violation> {
        if existed {
            self.happened(Kind::Delete, &ticket, Some(Seen::Present))
        } else {
            self.refused(Kind::Delete, &ticket, Seen::Is(None))
        }
    }

    /// A put-if-absent is done, and the key was absent or not.
    pub(crate) fn inserted(&self, ticket: WriteTicket, was_absent: bool) -> Result<(), Violation> {
        if was_absent {
            self.happened(Kind::Insert, &ticket, Some(Seen::Is(None)))
        } else {
            self.refused(Kind::Insert, &ticket, Seen::Present)
        }
    }

    /// An update-if-present is done, and the key was present or not.
    pub(crate) fn updated(&self, ticket: WriteTicket, was_present: bool) -> Result<(), Violation> {
        if was_present {
            self.happened(Kind::Update, &ticket, Some(Seen::Present))
        } else {
            self.refused(Kind::Update, &ticket, Seen::Is(None))
        }
    }

    /// A compare-and-swap is done, and the key held what was expected or not.
    pub(crate) fn swapped(
        &self,
        ticket: WriteTicket,
        expected: Option<&[u8]>,
        happened: bool,
    ) -> Result<(), Violation> {
        if happened {
            self.happened(Kind::Swap, &ticket, Some(Seen::Is(expected)))
        } else {
            self.refused(Kind::Swap, &ticket, Seen::Not(expected))
        }
    }

    /// The operation may have happened, may happen at any time from now on, or never.
    pub(crate) fn unknown(&self, ticket: WriteTicket) {
        let mut state = self.lock();
        state.end(ticket.begin);
        state.counters.unknown += 1;
        state.sweep();
    }

    /// The operation may have happened or not, and nothing more will come of it.
    pub(crate) fn settled(&self, ticket: WriteTicket) {
        let mut state = self.lock();
        let span = state.end(ticket.begin);
        state.history(&ticket.key).finish(span);
        state.counters.unknown += 1;
        state.sweep();
    }

    /// The operation certainly did not happen.
    pub(crate) fn failed(&self, ticket: WriteTicket) -> Result<(), Violation> {
        let mut state = self.lock();
        state.end(ticket.begin);
        state.counters.failed += 1;
        let result = state.history(&ticket.key).retract(ticket.begin);
        state.tidy(&ticket.key);
        state.sweep();
        result.map_err(|value| Violation::Undone { key: ticket.key.to_vec(), value })
    }

    /// A get or a scan has no answer.
    pub(crate) fn abandoned(&self, ticket: ReadTicket) {
        let mut state = self.lock();
        state.end(ticket.begin);
        state.counters.failed += 1;
        state.sweep();
    }

    /// What was checked so far.
    pub(crate) fn counters(&self) -> Counters {
        self.lock().counters.clone()
    }

    /// A write took place, having found what it required.
    fn happened(
        &self,
        kind: Kind,
        ticket: &WriteTicket,
        found: Option<Seen<&[u8]>>,
    ) -> Result<(), Violation> {
        let mut state = self.lock();
        let span = state.end(ticket.begin);
        let history = state.history(&ticket.key);
        // It may be known to have happened earlier.
        let span = history.finish(span);
        let result = found.map(|found| history.judge(Reading { span, replaces: true }, found)).transpose();
        history.overrule(span);
        state.finish(kind, &ticket.key, result.map(|constrained| constrained.unwrap_or(false)), found)
    }

    /// A conditional write did not take place, having found what prevents it.
    fn refused(&self, kind: Kind, ticket: &WriteTicket, found: Seen<&[u8]>) -> Result<(), Violation> {
        let mut state = self.lock();
        let span = state.end(ticket.begin);
        let history = state.history(&ticket.key);
        let undone = history.retract(ticket.begin);
        let result = history.judge(Reading { span, replaces: false }, found);
        let result = state.finish(kind, &ticket.key, result, Some(found));
        undone.map_err(|value| Violation::Undone { key: ticket.key.to_vec(), value })?;
        result
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn begin(&mut self) -> u64 {
        self.clock += 1;
        self.under_way.insert(self.clock);
        self.clock
    }

    fn end(&mut self, begin: u64) -> Span {
        self.clock += 1;
        self.under_way.remove(&begin);
        Span { begin, end: self.clock }
    }

    /// Everything under way, and all that is to come, begins here or later.
    fn low_water(&self) -> u64 {
        self.under_way.first().copied().unwrap_or(self.clock + 1)
    }

    fn history(&mut self, key: &Arc<[u8]>) -> &mut History {
        let initial = &self.initial;
        self.keys.entry(Arc::clone(key)).or_insert_with(|| {
            History::untouched(initial.as_ref().and_then(|initial| initial(key)).as_deref())
        })
    }

    /// Judges one read, and says whether only one answer was possible.
    fn read(
        &mut self,
        kind: Kind,
        span: Span,
        key: &Arc<[u8]>,
        seen: Seen<&[u8]>,
    ) -> Result<bool, Violation> {
        let result = self.history(key).judge(Reading { span, replaces: false }, seen);
        self.tidy(key);
        result.map_err(|allowed| Violation::impossible(kind, key, seen, allowed))
    }

    /// Judges what a scan says of each key, and says whether for all of them only that was possible.
    fn read_all<K: AsRef<[u8]>, V: AsRef<[u8]>>(
        &mut self,
        span: Span,
        scan: Scan<'_>,
        pairs: &[(K, V)],
    ) -> Result<bool, Violation> {
        let missing = scan.missing(&self.keys, pairs);
        let returned = pairs.iter().map(|(key, value)| (Arc::from(key.as_ref()), Some(value.as_ref())));
        let mut all = true;
        for (key, value) in returned.chain(missing.into_iter().map(|key| (key, None))) {
            let constrained = self.read(Kind::Scan, span, &key, Seen::Is(value))?;
            self.counters.add_scanned_key(constrained);
            all &= constrained;
        }
        Ok(all)
    }

    /// Counts an operation that was judged, and cleans up behind it.
    fn finish(
        &mut self,
        kind: Kind,
        key: &Arc<[u8]>,
        result: Result<bool, Vec<Option<Vec<u8>>>>,
        found: Option<Seen<&[u8]>>,
    ) -> Result<(), Violation> {
        self.tidy(key);
        self.sweep();
        match (result, found) {
            (Err(allowed), Some(found)) => Err(Violation::impossible(kind, key, found, allowed)),
            (result, _) => {
                self.counters.add(kind, result.unwrap_or(false));
                Ok(())
            }
        }
    }

    /// Drops what nobody can find any more from one key, or remembers to do so later.
    fn tidy(&mut self, key: &Arc<[u8]>) {
        let low_water = self.low_water();
        let Some(history) = self.keys.get_mut(key) else { return };
        history.prune(low_water);
        if history.is_as_untouched(low_water) {
            self.keys.remove(key);
        } else if history.take_lost() {
            self.gone.push_back((self.clock, Arc::clone(key)));
        }
    }

    /// The same for all keys whose time has come.
    fn sweep(&mut self) {
        let low_water = self.low_water();
        while self.gone.front().is_some_and(|(found, _)| *found < low_water) {
            if let Some((_, key)) = self.gone.pop_front() {
                self.tidy(&key);
            }
        }
    }
}

impl fmt::Debug for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.lock();
        f.debug_struct("Model")
            .field("keys", &state.keys.len())
            .field("under_way", &state.under_way.len())
            .field("counters", &state.counters)
            .finish_non_exhaustive()
    }
}
