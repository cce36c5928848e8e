//! What the threads of a gateway share.

use crate::clients::Clients;
use crate::cursors::Cursors;
use crate::envelope::Millis;
use crate::health::Health;
use crate::logins::Logins;
use crate::options::Options;
use crate::scarcity::Scarcity;
use crate::shard::Inbox;
use crate::stats::{ThreadStats, Totals};
use farwood_fabric::Session;
use farwood_fabric::clock::{MILLISECOND, Nanos, RealClock, SECOND};
use farwood_fabric::pool_clock::PoolTime;
use farwood_fabric::rarely::Rarely;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

#[derive(Debug)]
pub(crate) struct Common {
    pub(crate) options: Options,
    pub(crate) clients: Arc<Clients>,
    pub(crate) logins: Arc<Logins>,
    /// What is said of clients that are turned away.
    pub(crate) refusals: Rarely,
    pub(crate) cursors: Cursors,
    pub(crate) census: Census,
    pub(crate) memory: Memory,
    pub(crate) health: Health,
    /// Clients that no thread serves just now: their session has ended, and the next has not begun.
    pub(crate) lobby: Inbox,
    pub(crate) threads: Vec<Arc<ThreadStats>>,
    /// Names this run of the gateway.
    pub(crate) run: String,
    clock: Clock,
    calendar: Calendar,
    pub(crate) scarcity: Scarcity,
}

/// Where time comes from.
#[derive(Debug)]
enum Clock {
    Real(RealClock),
    /// It goes on only by what it is told, so that what is done again happens at the same time: for fuzzers.
    Counted(AtomicU64),
}

impl Common {
    pub(crate) fn new(options: Options, random: [u64; 3]) -> Self {
        Self::with_clock(options, random, Clock::Real(RealClock::new()))
    }

    /// One whose time goes on only by [`Common::pass`].
    pub(crate) fn with_counted_time(options: Options, random: [u64; 3]) -> Self {
        Self::with_clock(options, random, Clock::Counted(AtomicU64::new(0)))
    }

    /// Lets some time pass, if it is counted.
    pub(crate) fn pass(&self, span: Nanos) {
        if let Clock::Counted(now) = &self.clock {
            now.fetch_add(span, Ordering::Relaxed);
        }
    }

    fn with_clock(options: Options, random: [u64; 3], clock: Clock) -> Self {
        Self {
            clients: Arc::new(Clients::new(options.client_memory_bytes)),
            logins: Arc::default(),
            refusals: Rarely::default(),
            cursors: Cursors::new(random[0]),
            census: Census::default(),
            memory: Memory::default(),
            health: Health::default(),
            lobby: Inbox::default(),
            threads: (0..options.threads.max(1)).map(|_| Arc::default()).collect(),
            run: format!("{:020x}{:020x}", random[1], random[2]),
            clock,
            calendar: Calendar::default(),
            scarcity: Scarcity::default(),
            options,
        }
    }

    /// Since the gateway started.
    #[inline]
    pub(crate) fn now(&self) -> Nanos {
        match &self.clock {
            Clock::Real(clock) => clock.now(),
            Clock::Counted(now) => now.load(Ordering::Relaxed),
        }
    }

    /// The same in seconds, beginning with 1, so that 0 means never.
    pub(crate) fn seconds(&self) -> u64 {
        1 + self.now() / SECOND
    }

    /// Takes over what a session knows of the pool's time.
    pub(crate) fn hear_time(&self, session: &Session) {
        let now = self.now();
        if let Some(time) = session.pool_time(RealClock::of_process().now()) {
            self.calendar.set(time, now);
        }
    }

    /// The pool's time, in nanoseconds since 1970.
    #[inline]
    pub(crate) fn pool_ns(&self) -> i64 {
        signed(self.now()).saturating_add(self.calendar.ahead_ns.load(Ordering::Relaxed))
    }

    /// The same in milliseconds.
    #[inline]
    pub(crate) fn pool_ms(&self) -> Millis {
        self.pool_ns() / signed(MILLISECOND)
    }

    /// The pool's time is surely at least this: what has expired by then is gone for everybody.
    pub(crate) fn surely_ms(&self) -> Millis {
        let since = signed(self.now().saturating_sub(self.calendar.found_ns.load(Ordering::Relaxed)));
        self.pool_ms() - self.calendar.blur_ms.load(Ordering::Relaxed) - since / signed(MILLISECOND) / DRIFT
    }

    pub(crate) fn totals(&self) -> Totals {
        Totals::of(self.threads.iter().map(|thread| &**thread))
    }
}

/// The pool's time as the gateway's sessions hear it: the coordinator's. All gateways say the same of when a key expires, whatever
/// their own clocks say.
#[derive(Default, Debug)]
pub(crate) struct Calendar {
    /// Pool's time minus ours, in nanoseconds, and when that was found out, on our clock.
    ahead_ns: AtomicI64,
    found_ns: AtomicU64,
    /// It may be so many milliseconds earlier or later than that.
    blur_ms: AtomicI64,
}

/// One part in so many is how far clocks drift apart between two looks at the pool's time, at most.
const DRIFT: i64 = 1_000;

impl Calendar {
    fn set(&self, time: PoolTime, now: Nanos) {
        let half = (time.latest - time.earliest).div_ceil(2);
        let middle = time.earliest + half;
        let ahead_ns = signed(middle).saturating_mul(signed(MILLISECOND)).saturating_sub(signed(now));
        self.ahead_ns.store(ahead_ns, Ordering::Relaxed);
        self.blur_ms.store(signed(half) + 1, Ordering::Relaxed);
        self.found_ns.store(now, Ordering::Relaxed);
    }
}

fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// How many keys there were, when they were last counted.
#[derive(Default, Debug)]
pub(crate) struct Census {
    keys: Mutex<Option<usize>>,
}

impl Census {
    fn lock(&self) -> MutexGuard<'_, Option<usize>> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn keys(&self) -> Option<usize> {
        *self.lock()
    }

    pub(crate) fn found(&self, keys: usize) {
        *self.lock() = Some(keys);
    }

    pub(crate) fn forget(&self) {
        *self.lock() = None;
    }
}

/// Memory of one server.
#[derive(Clone, Default, Debug)]
pub(crate) struct ServerMemory {
    pub(crate) server: u16,
    pub(crate) total_bytes: u64,
    pub(crate) free_bytes: u64,
    /// What indexes take, by name.
    pub(crate) indexes: Vec<(String, u64)>,
}

/// What far memory is used for, as of a moment ago.
#[derive(Default, Debug)]
pub(crate) struct Memory {
    servers: Mutex<(Vec<ServerMemory>, u64)>,
}

impl Memory {
    /// The servers, and how many bytes this process spends on the index.
    pub(crate) fn get(&self) -> (Vec<ServerMemory>, u64) {
        self.servers.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// All far memory that there is.
    pub(crate) fn total_bytes(&self) -> u64 {
        let state = self.servers.lock().unwrap_or_else(PoisonError::into_inner);
        state.0.iter().map(|server| server.total_bytes).sum()
    }

    pub(crate) fn set(&self, servers: Vec<ServerMemory>, cache_bytes: u64) {
        *self.servers.lock().unwrap_or_else(PoisonError::into_inner) = (servers, cache_bytes);
    }
}

/// Tells all threads to come to an end.
#[derive(Default, Debug)]
pub(crate) struct Stop {
    is_set: AtomicBool,
    waiting: Mutex<Vec<Waker>>,
}

impl Stop {
    pub(crate) fn set(&self) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        self.is_set.store(true, Ordering::SeqCst);
        waiting.drain(..).for_each(Waker::wake);
    }

    pub(crate) fn is_set(&self) -> bool {
        self.is_set.load(Ordering::SeqCst)
    }

    /// Waits until it is set.
    pub(crate) async fn wait(&self) {
        poll_fn(|context| {
            let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
            if self.is_set() {
                return Poll::Ready(());
            }
            waiting.retain(|waker| !waker.will_wake(context.waker()));
            waiting.push(context.waker().clone());
            Poll::Pending
        })
        .await;
    }
}

/// What the future gives, if that comes before the limit does; else it is dropped.
pub(crate) async fn at_most<T>(
    limit: impl Future<Output = ()>,
    future: impl Future<Output = T>,
) -> Option<T> {
    let (mut limit, mut future) = (pin!(limit), pin!(future));
    poll_fn(|context| match future.as_mut().poll(context) {
        Poll::Ready(value) => Poll::Ready(Some(value)),
        Poll::Pending => limit.as_mut().poll(context).map(|()| None),
    })
    .await
}
