//! The pool's indexes: name, engine, configuration, state, and an anchor of zeroed words for root pointers.
//!
//! Creating: the anchor zeroed, the entry written, its commit word, and last the number of the next index: a crash skips no number.
//! Dropping: the flush generation to wait for, then the commit word; the entry goes when that flush is through.
//!
//! Repairing: the repairer's term, then the commit word; back again when that session says so, or has ended.
//!
//! Invariants: names are unique among all states; an id is never used twice; an entry is absent or complete.

use crate::config::ServerConfig;
use crate::layout::{
    self, Layout, MAX_CONFIG_BYTES, MAX_ENGINE_BYTES, MAX_NAME_BYTES, catalog_entry, superblock,
};
use crate::repeats::CallTag;
use farwood_fabric::addr::RegionId;
use farwood_fabric::control::{ANCHOR_BYTES, ControlError, IndexId, IndexInfo, IndexState};
use farwood_fabric::server::{ServerMemory, StartError};

#[derive(Clone, PartialEq, Eq, Debug)]
struct Entry {
    id: IndexId,
    name: String,
    engine: String,
    config: Vec<u8>,
    state: IndexState,
    /// The flush to wait for, when it is being dropped; the tag of the call that made it, while it is being made.
    drop_generation: u64,
    /// The term of the session that makes it, while it is being made, or repairs it, while it is out of use.
    creator: u64,
}

/// The catalog.
#[derive(Debug)]
pub(crate) struct Catalog {
    layout: Layout,
    max: u16,
    slots: Vec<Option<Entry>>,
    next_id: u64,
}

impl Catalog {
    /// Reads the catalog from META.
    pub(crate) fn load(memory: &dyn ServerMemory, config: &ServerConfig) -> Result<Self, StartError> {
        let layout = Layout::new(config);
        let stored = layout::load(memory, superblock::NEXT_INDEX_AT);
        let mut slots = Vec::with_capacity(usize::from(config.max_indexes));
        let mut next_id = stored;
        for slot in 0..config.max_indexes {
            // The last one may have been entered by a server that died before it stored the next number.
            let entry = load_entry(memory, layout.catalog_entry(slot))
                .filter(|entry| entry.as_ref().is_none_or(|entry| u64::from(entry.id) <= stored))
                .ok_or_else(|| layout::damaged("catalog entry", u64::from(slot)))?;
            next_id = next_id.max(entry.as_ref().map_or(0, |entry| u64::from(entry.id) + 1));
            slots.push(entry);
        }
        if next_id != stored {
            layout::store(memory, superblock::NEXT_INDEX_AT, next_id);
        }
        Ok(Self { layout, max: config.max_indexes, slots, next_id })
    }

    /// Enters an index.
    pub(crate) fn create(
        &mut self,
        memory: &dyn ServerMemory,
        name: String,
        engine: String,
        config: Vec<u8>,
        (creator, tag): (u64, CallTag),
    ) -> Result<IndexInfo, ControlError> {
        check_text("the name", &name, MAX_NAME_BYTES)?;
        check_text("the engine's name", &engine, MAX_ENGINE_BYTES)?;
        if config.len() > MAX_CONFIG_BYTES {
            return Err(ControlError::BadName {
                why: format!("the configuration has {} bytes, at most {MAX_CONFIG_BYTES} fit", config.len()),
            });
        }
        if let Ok((slot, found)) = self.find(&name) {
            // What this very call has made, if the answer went with an earlier server process.
            let is_repeat = found.state == IndexState::Creating
                && found.creator == creator
                && tag.matches(found.drop_generation).is_some();
            return if is_repeat {
                Ok(self.info(slot, found))
            } else {
                Err(ControlError::NameExists { name })
            };
        }
        let full = ControlError::CatalogFull { max: self.max };
        let slot = (0..self.max).zip(&self.slots).find(|(_, entry)| entry.is_none()).map(|(slot, _)| slot);
        let (Some(slot), Ok(id)) = (slot, IndexId::try_from(self.next_id)) else { return Err(full) };

        layout::clear(memory, RegionId::BOARD, self.layout.anchor(slot).offset(), ANCHOR_BYTES);
        let (state, drop_generation) = (IndexState::Creating, tag.with(false));
        let entry = Entry { id, name, engine, config, state, drop_generation, creator };
        store_parts(memory, self.layout.catalog_entry(slot), &entry);
        let info = self.commit(memory, slot, entry);
        self.next_id += 1;
        layout::store(memory, superblock::NEXT_INDEX_AT, self.next_id);
        Ok(info)
    }

    /// The numbers of all indexes, in whatever state.
    pub(crate) fn numbers(&self) -> Vec<IndexId> {
        self.slots.iter().flatten().map(|entry| entry.id).collect()
    }

    /// The number of the next index.
    pub(crate) fn next_id(&self) -> IndexId {
        IndexId::try_from(self.next_id).unwrap_or(IndexId::MAX)
    }

    /// The engine has laid out the index, and the session of this term says so, which makes it.
    pub(crate) fn ready(
        &mut self,
        memory: &dyn ServerMemory,
        id: IndexId,
        caller: u64,
    ) -> Result<(), ControlError> {
        let (slot, entry) = self.find_id(id)?;
        match entry.state {
            IndexState::Creating if entry.creator != caller => {
                let why = format!("index '{}' is made by another session; wait for it", entry.name);
                Err(ControlError::BadRequest { why })
            }
            IndexState::Ready | IndexState::Offline => Ok(()),
            IndexState::Creating => {
                let entry = Entry { state: IndexState::Ready, ..entry.clone() };
                self.commit(memory, slot, entry);
                Ok(())
            }
            IndexState::Dropping => {
                Err(ControlError::IndexNotReady { name: entry.name.clone(), state: entry.state })
            }
        }
    }

    /// Finds a ready index.
    pub(crate) fn open(&self, name: &str, engine: Option<&str>) -> Result<IndexInfo, ControlError> {
        if let Some(engine) = engine {
            check_length("the engine's name", engine, MAX_ENGINE_BYTES)?;
        }
        let (slot, entry) = self.find(name)?;
        if let Some(wanted) = engine.filter(|wanted| *wanted != entry.engine) {
            let (name, engine, wanted) = (entry.name.clone(), entry.engine.clone(), wanted.to_owned());
            return Err(ControlError::WrongEngine { name, engine, wanted });
        }
        if !matches!(entry.state, IndexState::Ready | IndexState::Offline) {
            return Err(ControlError::IndexNotReady { name: entry.name.clone(), state: entry.state });
        }
        Ok(self.info(slot, entry))
    }

    /// The term of the session that repairs this index, if one does.
    pub(crate) fn repairer(&self, name: &str) -> Result<Option<u64>, ControlError> {
        let (_, entry) = self.find(name)?;
        Ok((entry.state == IndexState::Offline).then_some(entry.creator))
    }

    /// The term of the session that repairs the index of this number, if one does.
    pub(crate) fn repairer_of(&self, id: IndexId) -> Option<u64> {
        let (_, entry) = self.find_id(id).ok()?;
        (entry.state == IndexState::Offline).then_some(entry.creator)
    }

    /// Takes an index that is ready out of use, for the session of this term; one that is out of use already stays so.
    pub(crate) fn take_offline(
        &mut self,
        memory: &dyn ServerMemory,
        name: &str,
        term: u64,
    ) -> Result<IndexInfo, ControlError> {
        let (slot, entry) = self.find(name)?;
        match entry.state {
            IndexState::Ready => {}
            IndexState::Offline => return Ok(self.info(slot, entry)),
            state => return Err(ControlError::IndexNotReady { name: entry.name.clone(), state }),
        }
        let entry = Entry { state: IndexState::Offline, creator: term, ..entry.clone() };
        // It means nothing in an index that is ready, so a crash before the commit word does no harm.
        layout::store(memory, self.layout.catalog_entry(slot) + catalog_entry::CREATOR_AT, term);
        Ok(self.commit(memory, slot, entry))
    }

    /// Indexes whose repair is over, as `is_over` says of the index and the repairer's term, can be used again.
    pub(crate) fn bring_back(&mut self, memory: &dyn ServerMemory, is_over: impl Fn(IndexId, u64) -> bool) {
        for slot in 0..self.max {
            let Some(entry) = &self.slots[usize::from(slot)] else { continue };
            if entry.state == IndexState::Offline && is_over(entry.id, entry.creator) {
                let entry = Entry { state: IndexState::Ready, ..entry.clone() };
                self.commit(memory, slot, entry);
            }
        }
    }

    /// All indexes.
    pub(crate) fn list(&self) -> Vec<IndexInfo> {
        let slots = (0..self.max).zip(&self.slots);
        slots.filter_map(|(slot, entry)| Some(self.info(slot, entry.as_ref()?))).collect()
    }

    /// The flush that the drop of this index waits for, if it is being dropped.
    pub(crate) fn dropping(&self, name: &str) -> Result<Option<(IndexInfo, u64)>, ControlError> {
        let (slot, entry) = self.find(name)?;
        Ok((entry.state == IndexState::Dropping).then(|| (self.info(slot, entry), entry.drop_generation)))
    }

    /// Marks an index as being dropped; `generation` begins with this.
    pub(crate) fn begin_drop(
        &mut self,
        memory: &dyn ServerMemory,
        name: &str,
        generation: u64,
    ) -> Result<IndexInfo, ControlError> {
        let (slot, entry) = self.find(name)?;
        let entry = Entry { state: IndexState::Dropping, drop_generation: generation, ..entry.clone() };
        let at = self.layout.catalog_entry(slot);
        layout::store(memory, at + catalog_entry::DROP_GENERATION_AT, generation);
        Ok(self.commit(memory, slot, entry))
    }

    /// Indexes that are being made by sessions that are not there any more.
    pub(crate) fn orphans(&self, is_there: impl Fn(u64) -> bool) -> Vec<String> {
        let is_orphan = |entry: &&Entry| entry.state == IndexState::Creating && !is_there(entry.creator);
        self.slots.iter().flatten().filter(is_orphan).map(|entry| entry.name.clone()).collect()
    }

    /// Indexes that are being dropped.
    pub(crate) fn all_dropping(&self) -> Vec<IndexId> {
        let dropping = self.slots.iter().flatten().filter(|entry| entry.state == IndexState::Dropping);
        dropping.map(|entry| entry.id).collect()
    }

    /// An index that is being dropped and that every session has let go of.
    pub(crate) fn to_finish(&self, flushed_through: u64) -> Vec<IndexId> {
        let is_free =
            |entry: &&Entry| entry.state == IndexState::Dropping && entry.drop_generation <= flushed_through;
        self.slots.iter().flatten().filter(is_free).map(|entry| entry.id).collect()
    }

    /// Whether there is such an index, in whatever state.
    pub(crate) fn contains(&self, id: IndexId) -> bool {
        self.find_id(id).is_ok()
    }

    /// Whether this index may be given chunks: it is there, and not every session has let go of it.
    pub(crate) fn check_serves(&self, id: IndexId, flushed_through: u64) -> Result<(), ControlError> {
        let (_, entry) = self.find_id(id)?;
        if entry.state == IndexState::Dropping && entry.drop_generation <= flushed_through {
            return Err(ControlError::IndexNotReady { name: entry.name.clone(), state: entry.state });
        }
        Ok(())
    }

    /// Whether the chunks of this index may be released: it is unknown (dropped before), or its drop has waited.
    pub(crate) fn check_released(&self, id: IndexId, flushed_through: u64) -> Result<(), ControlError> {
        if u64::from(id) >= self.next_id {
            // One day there may be such an index, and this answer would still be known.
            return Err(ControlError::NoSuchIndex { name: format!("#{id}") });
        }
        let Ok((_, entry)) = self.find_id(id) else { return Ok(()) };
        if entry.state != IndexState::Dropping {
            let why = format!("index '{}' is not being dropped; begin that first", entry.name);
            return Err(ControlError::BadRequest { why });
        }
        if flushed_through < entry.drop_generation {
            return Err(ControlError::DropPending { name: entry.name.clone() });
        }
        Ok(())
    }

    /// Removes a dropped index.
    pub(crate) fn finish_drop(
        &mut self,
        memory: &dyn ServerMemory,
        id: IndexId,
        flushed_through: u64,
    ) -> Result<(), ControlError> {
        self.check_released(id, flushed_through)?;
        // One that was given out and is gone was dropped before.
        let Ok((slot, _)) = self.find_id(id) else { return Ok(()) };
        layout::store(memory, self.layout.catalog_entry(slot) + catalog_entry::COMMIT_AT, 0);
        self.slots[usize::from(slot)] = None;
        Ok(())
    }

    /// The index of that name. A name that no index can have is not repeated in the refusal.
    fn find(&self, name: &str) -> Result<(u16, &Entry), ControlError> {
        check_length("the name", name, MAX_NAME_BYTES)?;
        self.entries()
            .find(|(_, entry)| entry.name == name)
            .ok_or_else(|| ControlError::NoSuchIndex { name: name.to_owned() })
    }

    fn find_id(&self, id: IndexId) -> Result<(u16, &Entry), ControlError> {
        self.entries()
            .find(|(_, entry)| entry.id == id)
            .ok_or_else(|| ControlError::NoSuchIndex { name: format!("#{id}") })
    }

    fn entries(&self) -> impl Iterator<Item = (u16, &Entry)> {
        (0..self.max).zip(&self.slots).filter_map(|(slot, entry)| Some((slot, entry.as_ref()?)))
    }

    fn commit(&mut self, memory: &dyn ServerMemory, slot: u16, entry: Entry) -> IndexInfo {
        let at = self.layout.catalog_entry(slot) + catalog_entry::COMMIT_AT;
        layout::store(memory, at, commit_word(&entry));
        let info = self.info(slot, &entry);
        self.slots[usize::from(slot)] = Some(entry);
        info
    }

    fn info(&self, slot: u16, entry: &Entry) -> IndexInfo {
        IndexInfo {
            id: entry.id,
            name: entry.name.clone(),
            engine: entry.engine.clone(),
            config: entry.config.clone(),
            state: entry.state,
            anchor: self.layout.anchor(slot),
        }
    }
}

fn check_length(what: &str, text: &str, max_bytes: usize) -> Result<(), ControlError> {
    if text.len() <= max_bytes {
        return Ok(());
    }
    Err(ControlError::BadName { why: format!("{what} has {} bytes, at most {max_bytes} fit", text.len()) })
}

fn check_text(what: &str, text: &str, max_bytes: usize) -> Result<(), ControlError> {
    check_length(what, text, max_bytes)?;
    let why = if text.is_empty() {
        format!("{what} is empty")
    } else if text.chars().any(char::is_control) {
        format!("{what} contains a control character")
    } else {
        return Ok(());
    };
    Err(ControlError::BadName { why })
}

fn commit_word(entry: &Entry) -> u64 {
    let state = match entry.state {
        IndexState::Creating => 1,
        IndexState::Ready => 2,
        IndexState::Dropping => 3,
        IndexState::Offline => 4,
    };
    // Both lengths were checked to fit a byte.
    state | (entry.name.len() as u64) << 8 | (entry.engine.len() as u64) << 16 | u64::from(entry.id) << 32
}

/// Everything but the commit word.
fn store_parts(memory: &dyn ServerMemory, at: u64, entry: &Entry) {
    layout::store(memory, at + catalog_entry::CONFIG_LENGTH_AT, entry.config.len() as u64);
    layout::store(memory, at + catalog_entry::DROP_GENERATION_AT, entry.drop_generation);
    layout::store(memory, at + catalog_entry::CREATOR_AT, entry.creator);
    layout::store_bytes(memory, at + catalog_entry::NAME_AT, entry.name.as_bytes());
    layout::store_bytes(memory, at + catalog_entry::ENGINE_AT, entry.engine.as_bytes());
    layout::store_bytes(memory, at + catalog_entry::CONFIG_AT, &entry.config);
}

/// Number and name of the index in an entry, if there is one; `None` if it was not written by this code.
#[expect(clippy::option_option, reason = "as for the whole entry")]
pub(crate) fn entry_at(memory: &dyn ServerMemory, at: u64) -> Option<Option<(IndexId, String)>> {
    load_entry(memory, at).map(|entry| entry.map(|entry| (entry.id, entry.name)))
}

/// The entry, if there is one; `None` if it was not written by this code.
#[expect(clippy::option_option, reason = "the outer one says damaged, the inner one absent")]
fn load_entry(memory: &dyn ServerMemory, at: u64) -> Option<Option<Entry>> {
    let word = layout::load(memory, at + catalog_entry::COMMIT_AT);
    if word == 0 {
        return Some(None);
    }
    let state = match word & 0xff {
        1 => IndexState::Creating,
        2 => IndexState::Ready,
        3 => IndexState::Dropping,
        4 => IndexState::Offline,
        _ => return None,
    };
    let name_bytes = (word >> 8 & 0xff) as usize;
    let engine_bytes = (word >> 16 & 0xff) as usize;
    let config_bytes = usize::try_from(layout::load(memory, at + catalog_entry::CONFIG_LENGTH_AT)).ok()?;
    if name_bytes > MAX_NAME_BYTES || engine_bytes > MAX_ENGINE_BYTES || config_bytes > MAX_CONFIG_BYTES {
        return None;
    }
    let text = |offset, len| String::from_utf8(layout::load_bytes(memory, at + offset, len)).ok();
    Some(Some(Entry {
        id: (word >> 32) as u32,
        name: text(catalog_entry::NAME_AT, name_bytes)?,
        engine: text(catalog_entry::ENGINE_AT, engine_bytes)?,
        config: layout::load_bytes(memory, at + catalog_entry::CONFIG_AT, config_bytes),
        state,
        drop_generation: layout::load(memory, at + catalog_entry::DROP_GENERATION_AT),
        creator: layout::load(memory, at + catalog_entry::CREATOR_AT),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::VecMemory;
    use farwood_fabric::addr::ServerId;

    fn world() -> (VecMemory, ServerConfig, Catalog) {
        let config = ServerConfig::tiny(ServerId::new(0), 1, 1);
        let memory = VecMemory::new(&layout::regions(&config));
        layout::format(&memory, &config);
        let catalog = Catalog::load(&memory, &config).unwrap();
        (memory, config, catalog)
    }

    fn tag(sequence: u64) -> CallTag {
        let session = farwood_fabric::addr::SessionId::new(1);
        CallTag::of(farwood_fabric::call::CallId { session, term: 7, endpoint: 0, sequence })
    }

    fn create(catalog: &mut Catalog, memory: &VecMemory, name: &str) -> Result<IndexInfo, ControlError> {
        catalog.create(memory, name.to_owned(), "dex".to_owned(), vec![1, 2, 3], (7, tag(7)))
    }

    #[test]
    fn an_index_lives_from_creating_to_dropped() {
        let (memory, config, mut catalog) = world();
        memory.store(RegionId::BOARD, 16, 77);
        let info = create(&mut catalog, &memory, "a").unwrap();
        assert_eq!(memory.load(RegionId::BOARD, 16), 0, "an anchor begins as zeroes");
        assert_eq!((info.id, info.state), (1, IndexState::Creating));
        let not_ready = |state| Err(ControlError::IndexNotReady { name: "a".to_owned(), state });
        assert_eq!(catalog.open("a", None), not_ready(IndexState::Creating));
        assert!(matches!(catalog.ready(&memory, 1, 8), Err(ControlError::BadRequest { .. })), "another's");
        catalog.ready(&memory, 1, 7).unwrap();
        catalog.ready(&memory, 1, 7).unwrap();
        assert_eq!(catalog.open("a", Some("dex")).unwrap().config, [1, 2, 3]);
        assert!(matches!(catalog.open("a", Some("sphinx")), Err(ControlError::WrongEngine { .. })));
        assert!(matches!(catalog.finish_drop(&memory, 1, 9), Err(ControlError::BadRequest { .. })));
        assert_eq!(catalog.dropping("a"), Ok(None));
        catalog.begin_drop(&memory, "a", 5).unwrap();
        assert_eq!(catalog.open("a", None), not_ready(IndexState::Dropping));
        assert_eq!(
            catalog.ready(&memory, 1, 7),
            Err(ControlError::IndexNotReady { name: "a".to_owned(), state: IndexState::Dropping })
        );
        let mut catalog = Catalog::load(&memory, &config).unwrap();
        assert_eq!(catalog.dropping("a").unwrap().unwrap().1, 5);
        assert_eq!(
            catalog.finish_drop(&memory, 1, 4),
            Err(ControlError::DropPending { name: "a".to_owned() })
        );
        assert_eq!(catalog.finish_drop(&memory, 1, 5), Ok(()));
        assert_eq!(catalog.finish_drop(&memory, 1, 5), Ok(()), "a repeat");
        assert_eq!(
            catalog.finish_drop(&memory, 2, 5),
            Err(ControlError::NoSuchIndex { name: "#2".to_owned() })
        );
        assert_eq!(create(&mut catalog, &memory, "a").unwrap().id, 2, "an id is never used twice");
        assert_eq!(Catalog::load(&memory, &config).unwrap().slots, catalog.slots);
    }

    #[test]
    fn the_same_call_finds_what_it_made_and_another_of_the_same_session_does_not() {
        let (memory, config, mut catalog) = world();
        let make = |catalog: &mut Catalog, term, sequence| {
            catalog.create(&memory, "a".into(), "dex".into(), vec![], (term, tag(sequence)))
        };
        let made = make(&mut catalog, 7, 1).unwrap();
        let mut catalog = Catalog::load(&memory, &config).unwrap();
        assert_eq!(make(&mut catalog, 7, 1), Ok(made));
        for (term, sequence) in [(7, 2), (8, 1)] {
            assert_eq!(
                make(&mut catalog, term, sequence),
                Err(ControlError::NameExists { name: "a".to_owned() })
            );
        }
        assert_eq!(catalog.next_id(), 2, "a repeat takes no number");
    }

    #[test]
    fn what_cannot_be_stored_is_refused() {
        let (memory, config, mut catalog) = world();
        let long = "ü".repeat(33);
        for name in ["", "a\nb", "\u{7f}", long.as_str()] {
            assert!(
                matches!(create(&mut catalog, &memory, name), Err(ControlError::BadName { .. })),
                "{name:?}"
            );
        }
        let engine = "e".repeat(33);
        let refused = [
            catalog.create(&memory, "n".into(), engine, vec![], (7, tag(7))),
            catalog.create(&memory, "n".into(), String::new(), vec![], (7, tag(7))),
            catalog.create(&memory, "n".into(), "e".into(), vec![0; 513], (7, tag(7))),
        ];
        assert!(refused.iter().all(|r| matches!(r, Err(ControlError::BadName { .. }))));
        let full = "ü".repeat(32);
        catalog.create(&memory, full.clone(), "e".repeat(32), vec![9; 512], (7, tag(7))).unwrap();
        let another = catalog.create(&memory, full.clone(), "e".into(), vec![], (7, tag(8)));
        assert_eq!(another, Err(ControlError::NameExists { name: full }));
        create(&mut catalog, &memory, "b").unwrap();
        create(&mut catalog, &memory, "c").unwrap();
        assert_eq!(create(&mut catalog, &memory, "d"), Err(ControlError::CatalogFull { max: 3 }));
        assert_eq!(Catalog::load(&memory, &config).unwrap().slots, catalog.slots);
    }

    #[test]
    fn a_damaged_entry_is_refused() {
        let (memory, config, mut catalog) = world();
        create(&mut catalog, &memory, "a").unwrap();
        let at = Layout::new(&config).catalog_entry(0);
        let good = layout::load(&memory, at);
        for word in [good | 0xff, good | 0xff00, good | 0xff_0000, good | 9 << 32] {
            layout::store(&memory, at, word);
            assert!(matches!(Catalog::load(&memory, &config), Err(StartError::Mismatch(_))), "{word:#x}");
        }
        layout::store(&memory, at, good);
        layout::store(&memory, at + catalog_entry::NAME_AT, 0xff);
        assert!(Catalog::load(&memory, &config).is_err(), "a name that is no text");
    }
}
