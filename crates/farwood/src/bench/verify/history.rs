//! The writes of one key that somebody may still find, and what answers say about them. The rules stand in the parent module.

use super::violation::Seen;

/// The end of a write under way or of unknown outcome; and of one that is not gone, when it was gone.
const NEVER: u64 = u64::MAX;
/// Room that is kept however short a history gets.
const KEPT_CAPACITY: usize = 4;

/// From the stamp at the begin of an operation to that at its end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Span {
    pub(super) begin: u64,
    pub(super) end: u64,
}

/// One answer to be judged.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reading {
    pub(super) span: Span,
    /// It put its own write, the one that began with it, in the place of what it found.
    pub(super) replaces: bool,
}

#[derive(Debug)]
struct Write {
    value: Option<Box<[u8]>>,
    /// Its name too: no two writes of a key begin with the same stamp.
    begin: u64,
    /// It has happened by then, or never will.
    end: u64,
    /// What begins after this cannot find it.
    gone: u64,
    /// Somebody has found it for certain.
    seen: bool,
    /// A conditional write has found it for certain, and replaced it.
    replaced: bool,
}

impl Write {
    fn new(begin: u64, end: u64, value: Option<&[u8]>) -> Self {
        Self { value: value.map(Box::from), begin, end, gone: NEVER, seen: false, replaced: false }
    }

    fn can_be_found_by(&self, reading: Reading) -> bool {
        let Reading { span, replaces } = reading;
        self.begin < span.end
            && self.gone > span.begin
            && !(replaces && (self.replaced || self.begin == span.begin))
    }
}

/// What one key holds, held, or may come to hold. There is always one write at least.
#[derive(Debug)]
pub(super) struct History {
    writes: Vec<Write>,
    /// There was an explicit load: the key must not be forgotten while it holds what was loaded.
    loaded: bool,
    /// Without an entry, the key counts as absent.
    absent_without: bool,
    /// A write is gone since this was last asked.
    lost: bool,
}

impl History {
    /// Of a key without an entry.
    pub(super) fn untouched(value: Option<&[u8]>) -> Self {
        let writes = vec![Write::new(0, 0, value)];
        Self { writes, loaded: false, absent_without: value.is_none(), lost: false }
    }

    /// Of a key that was loaded.
    pub(super) fn loaded(value: &[u8], absent_without: bool) -> Self {
        Self { loaded: true, absent_without, ..Self::untouched(Some(value)) }
    }

    pub(super) fn len(&self) -> usize {
        self.writes.len()
    }

    /// A write that may happen from now on.
    pub(super) fn propose(&mut self, begin: u64, value: Option<&[u8]>) {
        self.writes.push(Write::new(begin, NEVER, value));
    }

    /// The write did not and will not happen. An error, with its value, if somebody has found it: then it stays.
    pub(super) fn retract(&mut self, begin: u64) -> Result<(), Option<Vec<u8>>> {
        let Some(place) = self.place(begin) else { return Ok(()) };
        if self.writes[place].seen {
            return Err(self.writes[place].value.as_deref().map(<[u8]>::to_vec));
        }
        self.writes.remove(place);
        Ok(())
    }

    /// The write's operation has ended. Returns the span of the write, which may be known to have ended earlier.
    pub(super) fn finish(&mut self, span: Span) -> Span {
        let Some(place) = self.place(span.begin) else { return span };
        let write = &mut self.writes[place];
        write.end = write.end.min(span.end);
        Span { end: write.end, ..span }
    }

    /// The write with this span did happen: all that had ended before it is gone at its end. (Those of the same value
    /// too: whoever can find them can find this one.)
    pub(super) fn overrule(&mut self, span: Span) {
        for place in 0..self.writes.len() {
            if self.writes[place].end < span.begin {
                self.lose(place, span.end);
            }
        }
    }

    /// Judges an answer and learns from it. Says whether only one answer was possible; the error is what would have been.
    pub(super) fn judge(
        &mut self,
        reading: Reading,
        seen: Seen<&[u8]>,
    ) -> Result<bool, Vec<Option<Vec<u8>>>> {
        let Reading { span, replaces } = reading;
        let findable = self.writes.iter().filter(|write| write.can_be_found_by(reading));
        let mut values = findable.clone().map(|write| &write.value);
        let first = values.next();
        let constrained = first.is_some() && values.all(|value| Some(value) == first);
        let mut meant = findable.filter(|write| seen.admits(write.value.as_deref()));
        let Some((mut earliest, only)) = meant.next().map(|write| (write.begin, write.begin)) else {
            return Err(self.findable_values(reading));
        };
        let mut ambiguous = false;
        for write in meant {
            earliest = earliest.min(write.begin);
            ambiguous = true;
        }
        if !ambiguous && let Some(place) = self.place(only) {
            let write = &mut self.writes[place];
            write.seen = true;
            write.end = write.end.min(span.end);
            if replaces {
                write.replaced = true;
                self.lose(place, span.end);
            }
        }
        let shown_from = span.begin.max(earliest);
        for place in 0..self.writes.len() {
            let write = &self.writes[place];
            if write.end < shown_from && !seen.admits(write.value.as_deref()) {
                self.lose(place, span.end);
            }
        }
        Ok(constrained)
    }

    /// Drops what is gone for everything that begins at the low-water mark or later.
    pub(super) fn prune(&mut self, low_water: u64) {
        self.writes.retain(|write| write.gone > low_water);
        if self.writes.capacity() > KEPT_CAPACITY.max(4 * self.writes.len()) {
            self.writes.shrink_to(KEPT_CAPACITY);
        }
    }

    /// Whether this says no more than a key without an entry does: it holds the same, since before all that is under
    /// way began.
    pub(super) fn is_as_untouched(&self, low_water: u64) -> bool {
        let [write] = self.writes.as_slice() else { return false };
        let holds_initial = write.begin == 0 && !self.loaded;
        let is_absent = write.value.is_none() && self.absent_without;
        (holds_initial || is_absent) && write.end < low_water && write.gone == NEVER
    }

    /// Whether a write is gone since this was last asked, and not dropped.
    pub(super) fn take_lost(&mut self) -> bool {
        std::mem::take(&mut self.lost) && self.writes.iter().any(|write| write.gone != NEVER)
    }

    fn lose(&mut self, place: usize, at: u64) {
        let write = &mut self.writes[place];
        self.lost |= write.gone == NEVER;
        write.gone = write.gone.min(at);
    }

    fn place(&self, begin: u64) -> Option<usize> {
        self.writes.binary_search_by_key(&begin, |write| write.begin).ok()
    }

    fn findable_values(&self, reading: Reading) -> Vec<Option<Vec<u8>>> {
        let findable = self.writes.iter().filter(|write| write.can_be_found_by(reading));
        let mut values: Vec<_> = findable.map(|write| write.value.as_deref().map(<[u8]>::to_vec)).collect();
        values.sort_unstable();
        values.dedup();
        values
    }
}
