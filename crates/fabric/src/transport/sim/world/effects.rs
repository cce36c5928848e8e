//! How verbs take effect: whole, or in pieces where somebody could notice.

use super::{Action, Event, Masks, World};
use crate::addr::RegionId;
use crate::clock::Nanos;
use crate::transport::sim::tear::{Limits, Torn};
use smallvec::SmallVec;
use std::hash::Hasher;

/// How many atomics are remembered.
const MAX_RECENT_ATOMICS: usize = 32;

/// An atomic that changed a word.
#[derive(Clone, Copy, Debug)]
pub(super) struct RecentAtomic {
    flight: usize,
    serial: u32,
    at: Nanos,
    place: (usize, RegionId, usize),
}

impl World {
    pub(super) fn open_conflicts(&self, key: usize) -> impl Iterator<Item = usize> + '_ {
        let flight = &self.flights[key];
        let server = self.connections[flight.connection].server;
        let verb = &flight.verbs[flight.next];
        self.servers[server].open.iter().copied().filter(move |other| {
            let o = &self.flights[*other];
            *other != key && verb.conflicts(&o.verbs[o.next])
        })
    }

    pub(super) fn has_open_conflict(&self, key: usize) -> bool {
        self.open_conflicts(key).next().is_some()
    }

    /// Tears the open verbs that conflict with the current verb of flight `key`, which is about to take effect.
    pub(super) fn tear_conflicting(&mut self, key: usize) {
        if self.servers[self.connections[self.flights[key].connection].server].open.is_empty() {
            return;
        }
        let conflicts: SmallVec<[usize; 4]> = self.open_conflicts(key).collect();
        for other in conflicts {
            self.tear(other);
        }
    }

    /// Tears an open verb now, unless it is: some of it may have taken effect already.
    pub(super) fn tear(&mut self, key: usize) {
        if self.flights[key].torn.is_some() {
            return;
        }
        self.cut_up(key);
        if self.rng.u8(0..4) != 0 {
            self.apply_piece(key, 0);
        }
    }

    pub(super) fn cut_up(&mut self, key: usize) {
        let caps = self.config.capabilities;
        let flight = &self.flights[key];
        let (next, until, flying) = (flight.next, flight.ends_at, self.flying(key));
        let verb = &flight.verbs[next];
        let limits = Limits {
            line_atomic: caps.line_atomic,
            ascending: verb.len() as u64 <= u64::from(caps.ordered_lines_bytes),
        };
        let torn = Torn::new(verb.offset, verb.len(), limits, &mut self.rng);
        let mut times: SmallVec<[Nanos; 8]> =
            (0..torn.pieces()).map(|_| self.rng.u64(self.now..=until)).collect();
        times.sort_unstable();
        for (piece, at) in (0..torn.pieces()).zip(times) {
            self.schedule(at, Event::piece(flying, u8::try_from(next).unwrap_or(u8::MAX), piece));
        }
        self.flights[key].torn = Some(Box::new(torn));
        self.counts.torn += 1;
    }

    /// Tears everything that is open on a server: its logic is about to write.
    pub(super) fn tear_all(&mut self, server: usize) {
        for key in self.servers[server].open.clone() {
            self.tear(key);
        }
    }

    pub(super) fn apply_piece(&mut self, key: usize, piece: u8) {
        let flight = &mut self.flights[key];
        if !flight.open || !flight.torn.as_mut().is_some_and(|torn| torn.begin(piece)) {
            return;
        }
        let verb = &mut flight.verbs[flight.next];
        let torn = flight.torn.as_ref().expect("just begun");
        let ranges = torn.ranges(piece, verb.offset, verb.data.len());
        let server = self.connections[flight.connection].server;
        let memory = self.servers[server].regions[usize::from(verb.region.get())].as_mut().expect("checked");
        for (from, to) in ranges {
            match verb.action {
                Action::Read => memory.read(verb.offset + from, &mut verb.data[from..to]),
                _ => memory.write(verb.offset + from, &verb.data[from..to]),
            }
        }
    }

    /// Whatever of the open verb has not taken effect does so now.
    pub(super) fn apply_rest(&mut self, key: usize) {
        match self.flights[key].torn.as_ref().map(|torn| torn.pieces()) {
            Some(pieces) => {
                for piece in 0..pieces {
                    self.apply_piece(key, piece);
                }
                self.effect_noted(key);
            }
            None => self.apply_whole(key),
        }
    }

    /// Whether a WRITE within one word is lost: an atomic, still on its way, had read the word before and wrote it back after.
    fn is_lost_to_atomic(&mut self, key: usize) -> bool {
        if self.recent_atomics.is_empty() {
            return false;
        }
        let (place, since) = (self.place(key), self.now.saturating_sub(self.config.window_ns));
        let is_racing = |atomic: &RecentAtomic| {
            let flying = self.flights.get(atomic.flight).filter(|flight| flight.serial == atomic.serial);
            let under_way = flying.is_some_and(|flight| flight.landed.is_none());
            atomic.flight != key && atomic.place == place && atomic.at >= since && under_way
        };
        let racing = self.recent_atomics.iter().any(is_racing);
        racing && self.flights[key].verbs[self.flights[key].next].in_one_word() && self.rng.bool()
    }

    /// Which word the current verb of a flight begins in.
    fn place(&self, key: usize) -> (usize, RegionId, usize) {
        let flight = &self.flights[key];
        let verb = &flight.verbs[flight.next];
        (self.connections[flight.connection].server, verb.region, verb.offset / 8)
    }

    fn note_atomic(&mut self, key: usize) {
        let adversarial = self.config.tear && self.cost.is_none();
        if adversarial {
            if self.recent_atomics.len() == MAX_RECENT_ATOMICS {
                self.recent_atomics.pop_front();
            }
            let (place, serial) = (self.place(key), self.flights[key].serial);
            self.recent_atomics.push_back(RecentAtomic { flight: key, serial, at: self.now, place });
        }
    }

    pub(super) fn apply_whole(&mut self, key: usize) {
        if matches!(self.flights[key].verbs[self.flights[key].next].action, Action::Write)
            && self.is_lost_to_atomic(key)
        {
            self.effect_noted(key);
            return;
        }
        let mut changed = false;
        let flight = &mut self.flights[key];
        let server = self.connections[flight.connection].server;
        let verb = &mut flight.verbs[flight.next];
        let memory = self.servers[server].regions[usize::from(verb.region.get())].as_mut().expect("checked");
        match verb.action {
            Action::Read => memory.read(verb.offset, &mut verb.data),
            Action::Write => memory.write(verb.offset, &verb.data),
            Action::Cas { .. } | Action::MaskedCas(_) | Action::Faa { .. } => {
                let before = memory.load(verb.offset);
                verb.previous = before;
                if let Some(after) = after_atomic(&verb.action, before) {
                    memory.store(verb.offset, after);
                    changed = true;
                }
            }
        }
        if changed {
            self.note_atomic(key);
        }
        self.effect_noted(key);
    }

    /// Counts an effect and takes it into the trace.
    pub(super) fn effect_noted(&mut self, key: usize) {
        self.counts.verbs += 1;
        let flight = &self.flights[key];
        let verb = &flight.verbs[flight.next];
        let (serial, at, previous) = (flight.serial, verb.offset as u64, verb.previous);
        match (&verb.action, &self.cost) {
            (Action::Read, None) => self.trace.write(&verb.data),
            // Where speed counts, what the first bytes are has to do; when everything happened is in the trace as well.
            (Action::Read, Some(_)) => self.trace.write(&verb.data[..verb.data.len().min(8)]),
            _ => {}
        }
        self.note(5, u64::from(serial) << 20 ^ at ^ previous);
    }
}

/// What an atomic leaves behind; `None` if a comparison failed.
fn after_atomic(action: &Action, before: u64) -> Option<u64> {
    match action {
        Action::Cas { expected, desired } => (before == *expected).then_some(*desired),
        Action::MaskedCas(masks) => {
            let Masks { compare, compare_mask, swap, swap_mask } = **masks;
            ((before ^ compare) & compare_mask == 0).then_some((before & !swap_mask) | (swap & swap_mask))
        }
        Action::Faa { add } => Some(before.wrapping_add(*add)),
        Action::Read | Action::Write => None,
    }
}
