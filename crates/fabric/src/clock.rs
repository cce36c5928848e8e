//! Time as the fabric sees it: nanoseconds since some start. On real transports the start is the process's, in the
//! simulator the world's; nobody compares clocks of two machines.

use std::sync::OnceLock;

/// A point in time, or a span of it, in nanoseconds.
pub type Nanos = u64;

/// One microsecond.
pub const MICROSECOND: Nanos = 1_000;
/// One millisecond.
pub const MILLISECOND: Nanos = 1_000_000;
/// One second.
pub const SECOND: Nanos = 1_000_000_000;

/// The system's monotonic clock: the one place where real time enters. Asked directly, since `std` takes twice as long to say the same,
/// and this is asked twice for every verb that somebody times.
#[inline]
fn since_boot() -> Nanos {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    // 292 years fit, and it is never negative.
    u64::try_from(time.tv_sec * 1_000_000_000 + time.tv_nsec).unwrap_or(0)
}

/// The monotonic clock of this process.
#[derive(Clone, Copy, Debug)]
pub struct RealClock {
    start: Nanos,
}

impl RealClock {
    /// A clock that starts now.
    pub fn new() -> Self {
        Self { start: since_boot() }
    }

    /// The clock of this process, the same on all its threads: it started when it was first asked for.
    pub fn of_process() -> Self {
        static START: OnceLock<Nanos> = OnceLock::new();
        Self { start: *START.get_or_init(since_boot) }
    }

    /// Nanoseconds since the clock started.
    #[inline]
    pub fn now(&self) -> Nanos {
        since_boot().saturating_sub(self.start)
    }
}

impl Default for RealClock {
    fn default() -> Self {
        Self::new()
    }
}
