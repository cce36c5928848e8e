//! Time as the fabric sees it: nanoseconds since some start. On real transports the start is the executor's, in the
//! simulator the world's; nobody compares clocks of two machines.

/// A point in time, or a span of it, in nanoseconds.
pub type Nanos = u64;

/// One microsecond.
pub const MICROSECOND: Nanos = 1_000;
/// One millisecond.
pub const MILLISECOND: Nanos = 1_000_000;
/// One second.
pub const SECOND: Nanos = 1_000_000_000;

/// The monotonic clock of this process.
#[derive(Clone, Copy, Debug)]
pub struct RealClock {
    start: std::time::Instant,
}

impl RealClock {
    /// A clock that starts now.
    #[expect(clippy::disallowed_methods, reason = "this is the one place where real time enters")]
    pub fn new() -> Self {
        Self { start: std::time::Instant::now() }
    }

    /// Nanoseconds since the clock was made.
    pub fn now(&self) -> Nanos {
        let span = self.start.elapsed();
        // 584 years fit; `as_nanos` would compute with twice as many bits, and this is asked for often.
        span.as_secs() * SECOND + u64::from(span.subsec_nanos())
    }
}

impl Default for RealClock {
    fn default() -> Self {
        Self::new()
    }
}
