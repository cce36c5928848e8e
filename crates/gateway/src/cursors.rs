//! Cursors of SCAN: numbers for clients, keys for the index.
//!
//! A cursor stands for the key behind which the scan goes on. The table is bounded. Clients use each cursor once, as a rule, but may
//! repeat a call whose reply was lost; so a cursor that was used stays for a while, and those that were used are forgotten
//! first. Numbers begin at random, so that a cursor of another gateway, or of one that was here before, is not taken for
//! another place; they stay below 2^53, since some clients keep numbers as floating point.

use rustc_hash::FxHashMap;
use std::collections::{BTreeSet, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// How many cursors there are at most that have not been used, and that have.
const MAX_WAITING: usize = 16_384;
const MAX_USED: usize = 4_096;
/// Numbers begin below this.
const FIRST_BELOW: u64 = 1 << 48;

/// The cursors of a gateway, for all its threads.
#[derive(Debug)]
pub(crate) struct Cursors {
    table: Mutex<Table>,
}

#[derive(Debug)]
struct Table {
    next: u64,
    places: FxHashMap<u64, Box<[u8]>>,
    /// Those that were not used, the oldest first.
    waiting: BTreeSet<u64>,
    used: VecDeque<u64>,
}

impl Cursors {
    pub(crate) fn new(random: u64) -> Self {
        let table = Table {
            next: 1 + random % FIRST_BELOW,
            places: FxHashMap::default(),
            waiting: BTreeSet::new(),
            used: VecDeque::new(),
        };
        Self { table: Mutex::new(table) }
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A cursor for what comes behind a key.
    pub(crate) fn issue(&self, behind: &[u8]) -> u64 {
        let mut table = self.lock();
        let cursor = table.next;
        table.next += 1;
        table.places.insert(cursor, behind.into());
        table.waiting.insert(cursor);
        if table.waiting.len() > MAX_WAITING {
            if let Some(oldest) = table.waiting.pop_first() {
                table.places.remove(&oldest);
            }
        }
        cursor
    }

    /// The key behind which a cursor goes on; `None` if it is not known, or not any more.
    pub(crate) fn redeem(&self, cursor: u64) -> Option<Box<[u8]>> {
        let mut table = self.lock();
        let behind = table.places.get(&cursor)?.clone();
        if table.waiting.remove(&cursor) {
            table.used.push_back(cursor);
            if table.used.len() > MAX_USED {
                if let Some(oldest) = table.used.pop_front() {
                    table.places.remove(&oldest);
                }
            }
        }
        Some(behind)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_leads_back_and_may_be_used_again() {
        let cursors = Cursors::new(7);
        let (a, b) = (cursors.issue(b"a"), cursors.issue(b"b"));
        assert_eq!(
            (cursors.redeem(a).as_deref(), cursors.redeem(b).as_deref()),
            (Some(&b"a"[..]), Some(&b"b"[..]))
        );
        assert_eq!(cursors.redeem(a).as_deref(), Some(&b"a"[..]));
        assert_eq!(cursors.redeem(b + 1), None);
    }

    #[test]
    fn one_long_scan_does_not_make_another_lose_its_place() {
        let cursors = Cursors::new(7);
        let slow = cursors.issue(b"slow");
        let mut fast = cursors.issue(b"0");
        for n in 0..2 * MAX_WAITING {
            cursors.redeem(fast).expect("the latest is there");
            fast = cursors.issue(n.to_string().as_bytes());
        }
        assert_eq!(cursors.redeem(slow).as_deref(), Some(&b"slow"[..]));
    }

    #[test]
    fn the_table_is_bounded() {
        let cursors = Cursors::new(u64::MAX);
        let first = cursors.issue(b"first");
        for _ in 0..2 * MAX_WAITING {
            cursors.issue(b"x");
        }
        for cursor in first..first + 3 * MAX_WAITING as u64 {
            let _ = cursors.redeem(cursor);
        }
        let table = cursors.lock();
        assert!(table.places.len() <= MAX_WAITING + MAX_USED && !table.places.contains_key(&first));
        assert!(table.waiting.len() <= MAX_WAITING && table.used.len() <= MAX_USED);
        assert!(table.next < 1 << 53);
    }
}
