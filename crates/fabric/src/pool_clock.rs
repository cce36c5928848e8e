//! The pool's time: what the coordinator's clock on the wall says, as a session knows it.
//!
//! Clocks of machines differ, by hours if nobody looks after them. So whatever has to mean the same to all, when a key expires, is said in
//! the coordinator's time. Each heartbeat brings a sample of it:
//!
//! 1. The coordinator read its clock after the heartbeat was sent and before the reply was here: so the difference between its clock and
//!    ours lies between two bounds.
//! 2. Bounds age: clocks drift, by at most five times as much as quartz does.
//! 3. A new sample narrows what is known. If the two have nothing in common, the coordinator's clock was set, or there is another
//!    coordinator: then the new one counts alone.
//!
//! **Invariant**: as long as nobody sets the coordinator's clock, its time lies between the bounds at any moment.

use crate::clock::{MILLISECOND, Nanos, SECOND};
use std::sync::{Mutex, PoisonError};

/// By how much two clocks drift apart, in millionths.
const DRIFT_PPM: u64 = 500;

/// Milliseconds since 1970.
pub type UnixMillis = u64;

/// The pool's time lies between these two; in milliseconds since 1970.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PoolTime {
    /// It is at least this.
    pub earliest: UnixMillis,
    /// And at most this.
    pub latest: UnixMillis,
}

/// What is known of the coordinator's clock.
#[derive(Default, Debug)]
pub struct PoolClock {
    known: Mutex<Option<Bounds>>,
}

/// Coordinator's clock minus ours, in nanoseconds, as of a moment of ours.
#[derive(Clone, Copy, Debug)]
struct Bounds {
    least: i128,
    most: i128,
    as_of: Nanos,
}

impl Bounds {
    fn aged(self, now: Nanos) -> Self {
        let drift = i128::from(now.saturating_sub(self.as_of)) * i128::from(DRIFT_PPM) / 1_000_000;
        Self { least: self.least - drift, most: self.most + drift, as_of: now }
    }

    fn at(self, now: Nanos) -> PoolTime {
        let Self { least, most, .. } = self.aged(now);
        let millis =
            |ns: i128| UnixMillis::try_from(ns.max(0) / i128::from(MILLISECOND)).unwrap_or(UnixMillis::MAX);
        PoolTime { earliest: millis(i128::from(now) + least), latest: millis(i128::from(now) + most) }
    }
}

impl PoolClock {
    /// The coordinator's clock said `unix_ms` at some moment between `sent` and `received`, which are ours.
    pub fn learn(&self, unix_ms: UnixMillis, sent: Nanos, received: Nanos) {
        let said = i128::from(unix_ms) * i128::from(MILLISECOND);
        // It said whole milliseconds.
        let new = Bounds {
            least: said - i128::from(received),
            most: said + i128::from(MILLISECOND) - i128::from(sent),
            as_of: received,
        };
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let both = known.map(|known| known.aged(received.max(known.as_of))).map(|known| Bounds {
            least: known.least.max(new.least),
            most: known.most.min(new.most),
            as_of: known.as_of,
        });
        *known = Some(both.filter(|both| both.least <= both.most).unwrap_or(new));
    }

    /// The pool's time at a moment of ours; `None` before the first heartbeat.
    pub fn at(&self, now: Nanos) -> Option<PoolTime> {
        let known = *self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.map(|known| known.at(now))
    }
}

/// The clock on the wall of this machine, which counts for a pool only if its coordinator runs here.
#[expect(clippy::disallowed_methods, reason = "the coordinator's clock is that of the outside world")]
pub fn wall_clock_ms() -> UnixMillis {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    since.as_secs() * (SECOND / MILLISECOND) + u64::from(since.subsec_millis())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Whatever the delays, and whatever the coordinator's clock is ahead or behind, its time lies between the bounds.
        #[test]
        fn the_coordinators_time_lies_between_the_bounds(
            ahead_s in -100_000i64..100_000,
            drift_ppm in -400i64..400,
            beats in prop::collection::vec((0u64..30_000, 0u64..2_000_000, 0u64..2_000_000), 1..40),
        ) {
            const BORN: i64 = 1_700_000_000_000_000_000;
            let coordinator = |now: Nanos| {
                let now = i64::try_from(now).expect("a day");
                u64::try_from(BORN + ahead_s * 1_000_000_000 + now + now / 1_000_000 * drift_ppm).expect("after 1970")
            };
            let clock = PoolClock::default();
            let mut now = SECOND;
            for (pause_ms, there_us, back_us) in beats {
                now += pause_ms * MILLISECOND;
                if let Some(time) = clock.at(now) {
                    let truth = coordinator(now) / MILLISECOND;
                    prop_assert!(time.earliest <= truth && truth <= time.latest, "{time:?} without {truth}");
                }
                let sent = now;
                let said = coordinator(now + there_us * 1_000) / MILLISECOND;
                now += (there_us + back_us) * 1_000;
                clock.learn(said, sent, now);
                let (time, truth) = (clock.at(now).expect("a sample"), coordinator(now) / MILLISECOND);
                prop_assert!(time.earliest <= truth && truth <= time.latest, "{time:?} without {truth}");
                prop_assert!(time.latest - time.earliest <= (there_us + back_us) / 1_000 + 2, "as narrow as the sample");
            }
        }
    }

    #[test]
    fn a_slow_heartbeat_does_not_blur_what_is_known() {
        let clock = PoolClock::default();
        clock.learn(1_000_000, SECOND, SECOND + MILLISECOND);
        clock.learn(1_005_000, 2 * SECOND, 10 * SECOND);
        let time = clock.at(10 * SECOND).expect("a sample");
        assert!(time.latest - time.earliest < 15, "{time:?}");
    }

    #[test]
    fn a_clock_that_was_set_counts_as_it_is_now() {
        let clock = PoolClock::default();
        assert_eq!(clock.at(SECOND), None);
        clock.learn(1_000_000, SECOND, SECOND + MILLISECOND);
        clock.learn(90_000_000, 2 * SECOND, 2 * SECOND + MILLISECOND);
        let time = clock.at(2 * SECOND).expect("a sample");
        assert!((89_999_990..90_000_010).contains(&time.earliest) && time.latest < 90_000_010, "{time:?}");
    }
}
