//! What the table must answer, as the clients know it: they work on one key at a time, as the tree does under a node's lock, and readers go on meanwhile.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

/// What a client does with a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Insert,
    Replace,
    Remove,
    /// The node goes, its entry stays: from now on it may go at any time.
    Abandon,
    /// After somebody died: sees what is there, and tidies up.
    Settle,
}

/// A change under way.
#[derive(Clone, Debug)]
struct Change {
    kind: Kind,
    new: Option<u64>,
    /// How many clients are at it: several may insert one entry.
    clients: u32,
    /// One of them was cut short, and one came to its end.
    is_cut: bool,
    is_done: bool,
}

#[derive(Clone, Default, Debug)]
pub(crate) struct Key {
    /// The entry that must be found.
    pub(crate) present: Option<u64>,
    /// Entries that may be found or not.
    pub(crate) maybe: BTreeSet<u64>,
    /// One of those that may be found must be.
    pub(crate) one_of_them: bool,
    /// Sessions (by term) that were cut short: what they posted may land until they are fenced.
    pub(crate) cut: BTreeSet<u64>,
    change: Option<Change>,
    /// All changes begun: their kinds, and their new entries.
    begun: Vec<(Kind, Option<u64>)>,
}

/// All keys. Shared by all clients of a world, which has one thread.
#[derive(Clone)]
pub(crate) struct Model {
    keys: Rc<RefCell<Vec<Key>>>,
    owners: Rc<RefCell<BTreeMap<u64, usize>>>,
    pub(crate) trouble: Rc<RefCell<Option<String>>>,
    pub(crate) changes: Rc<RefCell<u64>>,
    pub(crate) looks: Rc<RefCell<u64>>,
}

/// A look-up under way: what was so when it began.
pub(crate) struct Look {
    key: usize,
    before: Key,
}

/// A client's part in a change; ends when dropped.
pub(crate) struct Turn {
    model: Model,
    pub(crate) key: usize,
    term: u64,
    is_done: bool,
}

impl Model {
    pub(crate) fn new(keys: u64) -> Self {
        let keys = vec![Key::default(); usize::try_from(keys).unwrap()];
        Self {
            keys: Rc::new(RefCell::new(keys)),
            owners: Rc::default(),
            trouble: Rc::default(),
            changes: Rc::default(),
            looks: Rc::default(),
        }
    }

    pub(crate) fn key(&self, key: usize) -> Key {
        self.keys.borrow()[key].clone()
    }

    pub(crate) fn fail(&self, what: String) {
        self.trouble.borrow_mut().get_or_insert(what);
    }

    /// Whether an entry is one of this key's.
    pub(crate) fn is_of(&self, key: usize, entry: u64) -> bool {
        self.owners.borrow().get(&entry) == Some(&key)
    }

    /// Begins a change of a key that holds `old`, if nobody else is at it.
    pub(crate) fn begin(
        &self,
        (key, term): (usize, u64),
        kind: Kind,
        old: Option<u64>,
        new: Option<u64>,
    ) -> Option<Turn> {
        let mut keys = self.keys.borrow_mut();
        let state = &mut keys[key];
        let is_as_expected = state.present == old && state.maybe.is_empty() != (kind == Kind::Settle);
        if state.change.is_some() || !is_as_expected {
            return None;
        }
        if let Some(new) = new {
            self.owners.borrow_mut().insert(new, key);
        }
        state.change = Some(Change { kind, new, clients: 1, is_cut: false, is_done: false });
        state.begun.push((kind, new));
        *self.changes.borrow_mut() += 1;
        Some(Turn { model: self.clone(), key, term, is_done: false })
    }

    /// Joins an insert that somebody is at; with which entry.
    pub(crate) fn join(&self, key: usize, term: u64) -> Option<(Turn, u64)> {
        let mut keys = self.keys.borrow_mut();
        let change = keys[key].change.as_mut()?;
        let entry = change.new.filter(|_| change.kind == Kind::Insert && !change.is_cut)?;
        change.clients += 1;
        Some((Turn { model: self.clone(), key, term, is_done: false }, entry))
    }

    pub(crate) fn begin_look(&self, key: usize) -> Look {
        *self.looks.borrow_mut() += 1;
        Look { key, before: self.key(key) }
    }

    /// Judges what a look-up found.
    pub(crate) fn end_look(&self, look: &Look, found: &[u64]) {
        let (before, after) = (&look.before, self.key(look.key));
        let mut during: Vec<_> = before.change.iter().map(|change| (change.kind, change.new)).collect();
        during.extend(&after.begun[before.begun.len()..]);
        let mut allowed: BTreeSet<u64> = before.maybe.union(&after.maybe).copied().collect();
        allowed.extend(before.present);
        allowed.extend(during.iter().filter_map(|(_, new)| *new));
        let is_steady = during.iter().all(|(kind, _)| *kind == Kind::Replace);
        let must_find = is_steady && (before.present.is_some() || before.one_of_them);
        let distinct: BTreeSet<u64> = found.iter().copied().collect();
        let is_wrong = distinct.len() != found.len()
            || !distinct.is_subset(&allowed)
            || (must_find && found.is_empty())
            || (during.is_empty() && before.present.is_some_and(|entry| !distinct.contains(&entry)));
        if is_wrong {
            self.fail(format!("key {}: found {found:x?}; before {before:x?}, after {after:x?}", look.key));
        }
    }
}

impl Turn {
    /// The client has done its part.
    pub(crate) fn done(mut self) {
        self.is_done = true;
    }

    /// What a settling client found there.
    pub(crate) fn settled(self, present: Option<u64>) {
        let mut keys = self.model.keys.borrow_mut();
        let state = &mut keys[self.key];
        state.present = present;
        state.maybe.clear();
        state.cut.clear();
        state.one_of_them = false;
        drop(keys);
        self.done();
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut keys = self.model.keys.borrow_mut();
        let state = &mut keys[self.key];
        let Some(mut change) = state.change.take() else { return };
        change.clients -= 1;
        change.is_done |= self.is_done;
        change.is_cut |= !self.is_done;
        if !self.is_done {
            state.cut.insert(self.term);
        }
        if change.clients > 0 {
            state.change = Some(change);
            return;
        }
        if !change.is_cut {
            match change.kind {
                Kind::Insert | Kind::Replace => state.present = change.new,
                Kind::Remove => state.present = None,
                Kind::Abandon => state.maybe.extend(state.present.take()),
                Kind::Settle => {}
            }
            return;
        }
        // Cut short: what was there may be there still, and what was to be may be, now or later.
        state.one_of_them = match change.kind {
            Kind::Insert => change.is_done,
            Kind::Replace => true,
            Kind::Remove | Kind::Abandon | Kind::Settle => false,
        };
        state.maybe.extend(state.present.take());
        state.maybe.extend(change.new);
    }
}
