//! Races in which all clients do the same: the two-word litmus tests, and atomics.

use super::judge::{Count, Two, compare};
use super::scenes::{Bounds, COUNTER_AT, DATA_AT, FLAG_AT, YIELD_EVERY};
use crate::arena::Arena;
use crate::fleet::{Fleet, Meeting, all, with_session};
use crate::units::index;
use farwood_fabric::clock::MICROSECOND;
use farwood_fabric::verb::Verb;
use farwood_fabric::{Batch, Endpoint, FabricError, GlobalAddr, Op};
use std::sync::Arc;

/// The most rounds whose findings are kept.
const MOST_NOTES: u64 = 1 << 20;
/// Bits of a word that belong to one client of the masked CAS.
const FIELD_BITS: u32 = 16;
const FIELDS: u32 = 64 / FIELD_BITS;
/// Two blocks, between the words and the data of other tests, that only give a transport something to do.
const BLOCKS_AT: u64 = 2048;
const BLOCK_BYTES: u64 = 1024;
const _: () = assert!(COUNTER_AT + 64 <= BLOCKS_AT && BLOCKS_AT + 2 * BLOCK_BYTES <= DATA_AT);

/// What every client does, again and again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Contest {
    /// WRITE mine, READ yours, in one batch, by itself and among others.
    WriteRead,
    /// FAA mine, READ yours, in one batch.
    FaaRead,
    /// READ yours, and behind a fence WRITE mine, in one batch.
    ReadWrite,
    /// FAA of one word by all.
    Faa,
    /// CAS of one word by all, each counting what it won.
    Cas,
    /// Masked CAS by four clients, each on a quarter of one word.
    MaskedCas,
}

impl Contest {
    /// The litmus test of two clients and two words that it is, if it is one.
    fn two(self) -> Option<Two> {
        match self {
            Self::WriteRead | Self::FaaRead => Some(Two::StoreThenLoad),
            Self::ReadWrite => Some(Two::LoadThenStore),
            Self::Faa | Self::Cas | Self::MaskedCas => None,
        }
    }

    fn most_clients(self) -> u32 {
        match self {
            Self::Faa | Self::Cas => u32::MAX,
            Self::MaskedCas => FIELDS,
            Self::WriteRead | Self::FaaRead | Self::ReadWrite => 2,
        }
    }
}

/// What a client brought home.
#[derive(Default, Debug)]
struct Notes {
    /// Of the two-word tests: what it found in each round.
    found: Vec<u64>,
    count: Count,
    /// Of the atomics: how often it added one.
    added: u64,
    /// Of the atomics: the sum that was there when all were done.
    sum: Option<u64>,
}

/// Runs a contest of `clients` clients, or of as many as it has room for.
pub(super) fn compete(
    fleet: &Fleet,
    arena: &Arena,
    clients: u32,
    bounds: Bounds,
    contest: Contest,
) -> Result<Count, String> {
    let clients = clients.min(contest.most_clients());
    let (meeting, options) = (Meeting::of(clients), fleet.options("litmus"));
    let notes = all(fleet.run(clients, |number, cluster| {
        let (arena, meeting) = (arena.clone(), Arc::clone(&meeting));
        async move {
            let body = async |meeting: &Meeting| {
                with_session(&cluster, options, async |endpoint| {
                    let client =
                        Client { contest, arena, endpoint: endpoint.clone(), index: number, clients };
                    client.compete(bounds, meeting).await
                })
                .await
            };
            meeting.attend(body).await
        }
    }))?;
    Ok(judge(contest, &notes))
}

fn judge(contest: Contest, notes: &[Notes]) -> Count {
    if let (Some(two), [a, b]) = (contest.two(), notes) {
        return compare(two, &a.found, &b.found);
    }
    let mut count = Count::default();
    for notes in notes {
        count += notes.count;
    }
    let added: u64 = notes.iter().map(|notes| notes.added).sum();
    // What is missing in the sum was lost; what is too much was added twice.
    if let Some(sum) = notes.iter().find_map(|notes| notes.sum) {
        count.violations += sum.abs_diff(added);
    }
    count
}

struct Client {
    contest: Contest,
    arena: Arena,
    endpoint: Endpoint,
    index: u32,
    clients: u32,
}

impl Client {
    async fn compete(&self, bounds: Bounds, meeting: &Meeting) -> Result<Notes, String> {
        let failed = |error: FabricError| format!("a client failed: {error}");
        if self.index == 0 {
            for who in [0, 1] {
                self.endpoint.op().write_word(self.word(who), 0).await.map_err(failed)?;
            }
        }
        meeting.gather(&self.endpoint, 1).await?;
        let deadline = self.endpoint.now().saturating_add(bounds.span_ns);
        let mut notes = Notes::default();
        let mut last = 0;
        for round in 1..=bounds.rounds.min(MOST_NOTES) {
            if self.endpoint.now() >= deadline {
                break;
            }
            meeting.check()?;
            self.round(round, &mut last, &mut notes).await.map_err(failed)?;
            if round % YIELD_EVERY == 0 {
                self.endpoint.yield_now().await;
            }
        }
        meeting.finish();
        if self.index == 0 && self.contest.two().is_none() {
            while meeting.done() < self.clients {
                meeting.check()?;
                self.endpoint.sleep(20 * MICROSECOND).await;
            }
            let word = self.endpoint.op().read_word(self.word(0)).await.map_err(failed)?;
            notes.sum = Some(if self.contest == Contest::MaskedCas { sum_of_fields(word) } else { word });
        }
        Ok(notes)
    }

    /// The word of client `who` in the two-word tests; the first is the one that atomics share.
    fn word(&self, who: u32) -> GlobalAddr {
        self.arena.at(0, if who == 0 { FLAG_AT } else { COUNTER_AT })
    }

    async fn round(&self, round: u64, last: &mut u64, notes: &mut Notes) -> Result<(), FabricError> {
        let op = self.endpoint.op();
        let shared = self.word(0);
        match self.contest {
            Contest::WriteRead | Contest::FaaRead | Contest::ReadWrite => {
                notes.found.push(self.two_words(&op, round).await?);
            }
            Contest::Faa => {
                let before = op.faa(shared, 1).await?;
                notes.added += 1;
                // A chance if somebody else was there since our last; going back is a violation by itself.
                notes.count += Count::one(before != *last, before < *last);
                *last = before + 1;
            }
            Contest::Cas => {
                let found = op.cas(shared, *last, *last + 1).await?;
                let won = found == *last;
                notes.added += u64::from(won);
                notes.count += Count::one(!won, found < *last);
                *last = if won { found + 1 } else { found };
            }
            Contest::MaskedCas => self.masked(&op, last, notes).await?,
        }
        Ok(())
    }

    /// Makes this client's word `round` and reads the other's, in the order of the contest.
    async fn two_words(&self, op: &Op, round: u64) -> Result<u64, FabricError> {
        let (mine, yours) = (self.word(self.index), self.word(u32::from(self.index == 0)));
        let mut batch = Batch::new(mine.server());
        let read = match self.contest {
            Contest::ReadWrite => {
                let read = batch.read(yours, 8);
                batch.write_word(mine, round);
                read
            }
            Contest::FaaRead => {
                // Nobody else changes it, so it becomes `round`.
                batch.faa(mine, 1);
                batch.read(yours, 8)
            }
            _ if round % 2 == 0 => {
                batch.write_word(mine, round);
                batch.read(yours, 8)
            }
            _ => {
                // Much to write before, to lines that the other has just read: the word's turn comes late, and a READ that
                // does not wait for it overtakes it.
                let block = |who: u32| self.arena.at(0, BLOCKS_AT + u64::from(who) * BLOCK_BYTES);
                batch.write(block(self.index), self.endpoint.buf(index(BLOCK_BYTES)));
                batch.write_word(mine, round);
                let read = batch.read(yours, 8);
                batch.read(block(u32::from(self.index == 0)), index(BLOCK_BYTES));
                read
            }
        };
        Ok(op.submit(batch).await?.take(read).word(0))
    }

    /// Adds one to this client's quarter of the word, which nobody else changes. `last`: the word as far as we know.
    async fn masked(&self, op: &Op, last: &mut u64, notes: &mut Notes) -> Result<(), FabricError> {
        let shift = self.index * FIELD_BITS;
        let mask = 0xffff << shift;
        let (addr, compare) = (self.word(0), *last & mask);
        if compare == mask {
            // Full: it would start again at 0, and the sum would not add up.
            return Ok(());
        }
        let swap = compare + (1 << shift);
        let mut batch = Batch::new(addr.server());
        batch.push(Verb::MaskedCas { addr, compare, compare_mask: mask, swap, swap_mask: mask });
        let found = op.submit(batch).await?.previous(0);
        let ours_is_there = found & mask == compare;
        notes.added += u64::from(ours_is_there);
        notes.count += Count::one(found & !mask != *last & !mask, !ours_is_there);
        *last = if ours_is_there { (found & !mask) | swap } else { found };
        Ok(())
    }
}

fn sum_of_fields(word: u64) -> u64 {
    (0..FIELDS).map(|field| word >> (field * FIELD_BITS) & 0xffff).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn notes(added: u64, sum: Option<u64>) -> Notes {
        let count = Count { observations: added, chances: added / 2, violations: 0 };
        Notes { count, added, sum, ..Notes::default() }
    }

    #[test]
    fn additions_that_are_missing_or_too_many_are_violations() {
        for (sum, violations) in [(30, 0), (27, 3), (31, 1)] {
            let count = judge(Contest::Faa, &[notes(10, Some(sum)), notes(20, None)]);
            assert_eq!(count, Count { observations: 30, chances: 15, violations });
        }
    }

    #[test]
    fn two_word_tests_are_judged_by_what_was_found() {
        let found = |found: &[u64]| Notes { found: found.to_vec(), ..Notes::default() };
        let both_missed = [found(&[0]), found(&[0])];
        assert_eq!(judge(Contest::WriteRead, &both_missed).violations, 1);
        assert_eq!(judge(Contest::FaaRead, &both_missed).violations, 1);
        assert_eq!(judge(Contest::ReadWrite, &both_missed).violations, 0);
    }

    #[test]
    fn quarters_add_up() {
        assert_eq!(sum_of_fields(0x0001_0002_0003_ffff), 6 + 65535);
    }
}
