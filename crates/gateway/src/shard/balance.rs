//! Spreading clients over threads as the load grows.
//!
//! A client begins on the first thread. As long as one thread keeps up, it serves everybody better than two would: what came meanwhile is
//! served in one go, and nobody has to be woken. A thread that was busy for two moments in a row hands some of the clients that keep it
//! busy to the thread with the least to do, provided that most of a processor is idle. Clients on the same machine need processors
//! too: a second thread that takes theirs, and has to be woken for every short request, makes everything slower (a sixth, with SETs one at
//! a time on two cores). For clients that cost much each time, with pipelines or ranges, a quarter of a processor is worth it.
//!
//! A client moves between two requests, with what it has sent of the next one ([`super::accept::Guest`]); it notices nothing.

use crate::options::Spread;
use crate::stats::ThreadStats;
use farwood_fabric::clock::Nanos;
use rustix::time::{ClockId, clock_gettime};
use std::cell::Cell;
use std::sync::Arc;

/// The whole of a processor.
const PERCENT: u64 = 100;
/// The system counts processors' time in such ticks.
const TICK_NS: Nanos = 10_000_000;

/// What a thread knows of its load.
#[derive(Default, Debug)]
pub(super) struct Balance {
    /// Counts moments, so that clients notice when a new one has begun.
    moment: Cell<u32>,
    /// Clients that said something in this moment.
    active: Cell<usize>,
    /// How often clients were served in this moment.
    turns: Cell<u64>,
    /// When the last moment ended, and how much of the processor this thread had taken by then.
    ended: Cell<(Nanos, Nanos)>,
    /// How long processors had been idle by then, if it was asked.
    idle: Cell<Option<Nanos>>,
    /// Clients that are to move, and where to.
    leaving: Cell<(usize, usize)>,
}

impl Balance {
    /// A client said something; `last` is for the client to keep.
    #[inline]
    pub(super) fn is_active(&self, last: &mut u32) {
        self.turns.set(self.turns.get() + 1);
        if *last != self.moment.get() {
            *last = self.moment.get();
            self.active.set(self.active.get() + 1);
        }
    }

    /// Where a client that has just been served is to move, if anywhere.
    #[inline]
    pub(super) fn next_home(&self) -> Option<usize> {
        let (count, home) = self.leaving.get();
        if count == 0 {
            return None;
        }
        self.leaving.set((count - 1, home));
        Some(home)
    }

    /// A moment has ended: decides who moves. `own` is this thread's place among all.
    pub(super) fn end_moment(&self, now: Nanos, own: usize, threads: &[Arc<ThreadStats>], spread: Spread) {
        let used = processor_time();
        let (began, used_before) = self.ended.replace((now, used));
        let (active, turns) = (self.active.replace(0), self.turns.replace(0));
        // Beginning with 1, so that a client that has just come has not been seen in any.
        self.moment.set(self.moment.get().wrapping_add(1).max(1));
        let wall = (now - began).max(1);
        let worked = used - used_before;
        let load = worked * PERCENT / wall;
        threads[own].load_percent.set(load);
        self.leaving.set((0, own));
        if threads.len() < 2 || load < spread.busy_percent {
            self.idle.set(None);
            return;
        }
        let idle = idle_time();
        let Some(idle_before) = self.idle.replace(Some(idle)) else { return };
        let is_heavy = worked >= turns.saturating_mul(spread.heavy_ns);
        let spare_percent = if is_heavy { spread.spare_percent_if_heavy } else { spread.spare_percent };
        if idle.saturating_sub(idle_before) * PERCENT < wall * spare_percent {
            return;
        }
        let loads = threads.iter().map(|thread| thread.load_percent.get());
        let others = loads.enumerate().filter(|(number, _)| *number != own);
        if let Some((home, least)) = others.min_by_key(|(_, load)| *load) {
            self.leaving.set((share(load, least, active), home));
        }
    }
}

/// How many of the clients that keep a thread busy are to move to one with this load, so that both have the same to do.
fn share(load: u64, of_other: u64, active: usize) -> usize {
    // With a single one, the load would only move with it. Differences of a few percent are chance.
    if active < 2 || of_other >= load * 3 / 4 {
        return 0;
    }
    let excess = active as u64 * (load - of_other) / (2 * load);
    usize::try_from(excess).unwrap_or(active).max(1)
}

/// How much of the processor this thread has taken.
fn processor_time() -> Nanos {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    u64::try_from(time.tv_sec * 1_000_000_000 + time.tv_nsec).unwrap_or(0)
}

/// How long processors of this machine have been idle, all together; if the system does not say, always.
fn idle_time() -> Nanos {
    let stat = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    idle_ticks(&stat).map_or_else(|| processor_time().saturating_mul(PERCENT), |ticks| ticks * TICK_NS)
}

/// The sum of idle time and of waiting for disks, from the line about all processors.
fn idle_ticks(stat: &str) -> Option<u64> {
    let mut times = stat.lines().next()?.strip_prefix("cpu ")?.split_whitespace().skip(3);
    Some(times.next()?.parse::<u64>().ok()? + times.next()?.parse::<u64>().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_of_the_clients_go_to_a_thread_with_nothing_to_do_and_none_to_one_as_busy() {
        assert_eq!(share(100, 0, 50), 25);
        assert_eq!(share(100, 50, 50), 12);
        assert_eq!(share(100, 80, 50), 0);
        assert_eq!(share(100, 0, 1), 0);
        assert_eq!(share(100, 0, 2), 1);
        assert_eq!(share(0, 0, 50), 0);
    }

    #[test]
    fn idle_time_is_that_of_all_processors() {
        let stat = "cpu  5403 28 2113 93250 170 0 11 3 0 0\ncpu0 2700 14 1050 46000 80 0 5 1 0 0\n";
        assert_eq!(idle_ticks(stat), Some(93_420));
        assert_eq!(idle_ticks(""), None);
        assert!(idle_ticks(&std::fs::read_to_string("/proc/stat").unwrap_or_default()).is_some());
    }

    fn threads() -> Vec<Arc<ThreadStats>> {
        (0..2).map(|_| Arc::default()).collect()
    }

    /// A thread that has taken the processor since the last moment, as far as this test can.
    fn work() {
        let began = processor_time();
        while processor_time() < began + 2_000_000 {
            std::hint::spin_loop();
        }
    }

    #[test]
    fn clients_move_after_two_busy_moments_and_no_more_of_them_than_were_said() {
        let (balance, threads) = (Balance::default(), threads());
        let spread =
            Spread { busy_percent: 50, spare_percent: 0, heavy_ns: u64::MAX, spare_percent_if_heavy: 0 };
        let mut seen = [0; 10];
        let mut moment = |now| {
            work();
            balance.end_moment(now, 0, &threads, spread);
            let home = balance.next_home();
            for last in &mut seen {
                balance.is_active(last);
                // Twice in a moment counts once.
                balance.is_active(last);
            }
            assert_eq!(balance.active.get(), seen.len());
            home
        };
        assert_eq!(moment(1_000_000), None);
        assert_eq!(moment(2_000_000), Some(1), "busy for the second time");
        balance.end_moment(3_000_000, 0, &threads, spread);
        assert_eq!(balance.next_home(), None, "nothing was done since");
    }

    #[test]
    fn without_an_idle_processor_only_clients_that_cost_much_move() {
        // More than the machine has.
        let spread =
            Spread { busy_percent: 0, spare_percent: 1 << 40, heavy_ns: 100_000, spare_percent_if_heavy: 0 };
        for (turns, moves) in [(1000, false), (1, true)] {
            let (balance, threads) = (Balance::default(), threads());
            let mut seen = [0; 10];
            for now in 1..10 {
                for _ in 0..turns {
                    for last in &mut seen {
                        balance.is_active(last);
                    }
                }
                work();
                balance.end_moment(now * 10_000_000, 0, &threads, spread);
                assert_eq!(balance.next_home().is_some(), moves && now > 1, "{turns} turns, moment {now}");
            }
        }
    }
}
