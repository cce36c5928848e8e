//! The executor: one per thread, with tasks that never leave it and wake-ups that may come from any thread.
//!
//! The same task set serves real threads ([`Executor::block_on`] parks the thread when idle) and the simulator, which
//! owns the clock and decides which ready task runs next. An executor with sockets (`Source`) does their input and output
//! itself when it has run out of ready tasks, so that what many tasks send goes out together; it then spins for a little
//! while something is under way, and waits for sockets and wake-ups alike after that. Tasks belong to a *group* (in the simulator: a process), so that
//! a whole process can be killed or paused between two polls.

use crate::clock::{MICROSECOND, Nanos, RealClock, SECOND};
use crate::wake::Wake as WakeUp;
use rustc_hash::FxHashMap;
use rustix::event::{PollFd, Timespec, poll};
use slab::Slab;
use std::cell::{Cell, RefCell};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::fmt;
use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::rc::{Rc, Weak};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

/// Which process a task belongs to; everything is 0 outside the simulator.
pub type GroupId = u32;

/// The group of the test driver, and of every task on a real thread.
pub const DRIVER: GroupId = 0;

type TaskId = usize;
/// The task id of the future given to `block_on`, which is not in the slab.
const MAIN: TaskId = usize::MAX;
/// How many tasks are polled before new ones are collected.
const BURST: usize = 64;
/// After so many bursts the clock, timers and connections get a look, though tasks are ready. A thread with nothing to do looks
/// at them every time.
const BURSTS_PER_LOOK: u32 = 16;
/// How often a thread that waits for what does not need its core looks for it before it looks at the clock.
const LOOKS_PER_CLOCK: u32 = 8;
/// How long a thread that expects something looks for it before it sleeps.
const SPIN_NS: Nanos = 50 * MICROSECOND;

thread_local! {
    static CURRENT: RefCell<Option<Executor>> = const { RefCell::new(None) };
}

/// How often all tasks are dropped before an executor counts as cleared.
const MAX_CLEARINGS: u32 = 8;

/// A lock whose holder cannot leave broken state behind: a poisoned one is simply taken over.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Something beside tasks that an executor's thread has to look after: a connection, or many of them behind one descriptor.
pub trait Source {
    /// Sends what tasks have left there; whether there was anything.
    fn flush(&self) -> bool;
    /// Takes in what has come; whether anything has.
    fn advance(&self) -> bool;
    /// Gives up what has not come in time; whether there was anything. Not asked every time, since clocks are slow.
    fn expire(&self, now: Nanos) -> bool;
    /// Whether something is under way, so that spinning may pay.
    fn is_expecting(&self) -> bool;
    /// What to wait for when spinning does not. `None`: nothing comes any more. A socket that was hung up must not be waited for, since
    /// the system would say at once, every time, that it was.
    fn interest(&self) -> Option<PollFd<'_>>;
    /// When to look again though nothing has come.
    fn deadline(&self) -> Option<Nanos>;
    /// A flag that it raises while nothing is under way and nothing is to be sent: until it is lowered, by whoever posts something, or by
    /// [`Source::interest`], the source is only asked when the thread sleeps.
    fn rests(&self) -> Option<&Rc<Cell<bool>>> {
        None
    }
    /// How long spinning may pay.
    fn spin(&self) -> Spin {
        Spin { ns: SPIN_NS, alone_ns: 0 }
    }
}

/// How a thread looks for something that is under way before it sleeps.
#[derive(Clone, Copy, Debug)]
pub struct Spin {
    /// How long.
    pub ns: Nanos,
    /// How much of that without giving way to others: what is waited for does not need this core.
    pub alone_ns: Nanos,
}

/// A source that the thread attends to.
struct Registered {
    source: Weak<dyn Source>,
    rests: Rc<Cell<bool>>,
}

impl Registered {
    fn is_there(&self) -> bool {
        self.source.strong_count() > 0
    }
}

/// The tasks of one thread.
#[derive(Clone)]
pub struct Executor {
    inner: Rc<Inner>,
}

struct Inner {
    tasks: RefCell<Slab<Task>>,
    ready: Arc<ReadyQueue>,
    /// Ready tasks in the order in which they became so.
    queue: RefCell<VecDeque<TaskId>>,
    timers: RefCell<BinaryHeap<Reverse<Timer>>>,
    timers_made: Cell<u64>,
    clock: Clock,
    rng: RefCell<fastrand::Rng>,
    group: Cell<GroupId>,
    /// Paused groups, with the tasks that became ready meanwhile.
    paused: RefCell<FxHashMap<GroupId, Vec<TaskId>>>,
    sources: RefCell<Vec<Registered>>,
    /// When sources were first found to have nothing to do, since they last had.
    idle_since: Cell<Option<Nanos>>,
    /// Whether what is waited for does not need this core, so far.
    is_alone: Cell<bool>,
}

enum Clock {
    Real(RealClock),
    Virtual {
        now: Cell<Nanos>,
        /// How long it takes, at most, until a task that lets others run goes on.
        jitter_ns: Nanos,
    },
}

struct Task {
    /// Taken out while it is polled, so that a task may spawn others.
    future: Option<Pin<Box<dyn Future<Output = ()>>>>,
    group: GroupId,
    state: Arc<TaskWaker>,
    /// The same as a waker; taken out together with the future.
    waker: Option<Waker>,
    /// It was ended while it was polled, and goes when that is over.
    is_ended: bool,
}

struct Timer {
    at: Nanos,
    made: u64,
    waker: Waker,
}

impl PartialEq for Timer {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.made) == (other.at, other.made)
    }
}
impl Eq for Timer {}
impl PartialOrd for Timer {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Timer {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.made).cmp(&(other.at, other.made))
    }
}

/// What wakers of all threads push into.
struct ReadyQueue {
    woken: Mutex<Woken>,
    /// Whether there may be woken tasks, so that looking costs no lock.
    any: AtomicBool,
    thread: std::thread::Thread,
    /// What wakes the thread while it waits for its sources.
    wake: OnceLock<WakeUp>,
}

#[derive(Default)]
struct Woken {
    tasks: Vec<TaskId>,
    /// Whether the thread sleeps, or is about to: only then does a wake-up cost a system call.
    sleep: Sleep,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Sleep {
    #[default]
    Awake,
    Parked,
    /// It waits for its sources.
    Polling,
}

impl ReadyQueue {
    fn push(&self, id: TaskId) {
        let mut woken = lock(&self.woken);
        woken.tasks.push(id);
        // Under the lock, so that whoever takes the list lowers it for what he took only.
        self.any.store(true, Ordering::Release);
        match std::mem::take(&mut woken.sleep) {
            Sleep::Awake => {}
            Sleep::Parked => self.thread.unpark(),
            Sleep::Polling => {
                if let Some(wake) = self.wake.get() {
                    wake.wake();
                }
            }
        }
    }
}

struct TaskWaker {
    id: TaskId,
    queued: AtomicBool,
    queue: Arc<ReadyQueue>,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.queued.swap(true, Ordering::AcqRel) {
            return;
        }
        self.queue.push(self.id);
    }
}

/// Makes an executor the current one of its thread for as long as it lives.
struct Entered {
    before: Option<Executor>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        let before = self.before.take();
        CURRENT.with_borrow_mut(|current| *current = before);
    }
}

impl Executor {
    /// An executor on real time, with randomness from the operating system.
    pub fn new() -> Self {
        use std::hash::{BuildHasher, RandomState};
        Self::with(Clock::Real(RealClock::of_process()), RandomState::new().hash_one(0u64))
    }

    /// An executor whose clock stands still until it is told otherwise. A task that lets others run goes on after up to `jitter_ns`, at random.
    pub(crate) fn with_virtual_time(seed: u64, jitter_ns: Nanos) -> Self {
        Self::with(Clock::Virtual { now: Cell::new(0), jitter_ns }, seed)
    }

    fn with(clock: Clock, seed: u64) -> Self {
        let ready = ReadyQueue {
            woken: Mutex::default(),
            any: AtomicBool::new(false),
            thread: std::thread::current(),
            wake: OnceLock::new(),
        };
        Self {
            inner: Rc::new(Inner {
                tasks: RefCell::default(),
                ready: Arc::new(ready),
                queue: RefCell::default(),
                timers: RefCell::default(),
                timers_made: Cell::new(0),
                clock,
                rng: RefCell::new(fastrand::Rng::with_seed(seed)),
                group: Cell::new(DRIVER),
                paused: RefCell::default(),
                sources: RefCell::default(),
                idle_since: Cell::new(None),
                is_alone: Cell::new(false),
            }),
        }
    }

    /// The executor that this thread runs.
    pub fn current() -> Option<Executor> {
        CURRENT.with_borrow(Clone::clone)
    }

    /// Now, on the executor's clock.
    pub fn now(&self) -> Nanos {
        match &self.inner.clock {
            Clock::Real(clock) => clock.now(),
            Clock::Virtual { now, .. } => now.get(),
        }
    }

    /// A random number.
    pub fn random(&self) -> u64 {
        self.inner.rng.borrow_mut().u64(..)
    }

    /// Runs a task beside the others, in the group of the task that spawns it.
    pub fn spawn<T: 'static>(&self, future: impl Future<Output = T> + 'static) -> JoinHandle<T> {
        self.spawn_in(self.inner.group.get(), future)
    }

    /// Runs a task in a group.
    pub(crate) fn spawn_in<T: 'static>(
        &self,
        group: GroupId,
        future: impl Future<Output = T> + 'static,
    ) -> JoinHandle<T> {
        let join = Rc::new(RefCell::new(Join { result: JoinResult::Running, waiter: None }));
        let finish = Finish { state: Rc::clone(&join) };
        let future = Box::pin(async move {
            let value = future.await;
            finish.set(JoinResult::Finished(value));
        });
        let mut tasks = self.inner.tasks.borrow_mut();
        let entry = tasks.vacant_entry();
        let state = Arc::new(TaskWaker {
            id: entry.key(),
            queued: AtomicBool::new(true),
            queue: Arc::clone(&self.inner.ready),
        });
        self.inner.ready.push(entry.key());
        let waker = Some(Waker::from(Arc::clone(&state)));
        entry.insert(Task { future: Some(future), group, state, waker, is_ended: false });
        JoinHandle { state: join }
    }

    /// The group of the task that runs now.
    pub(crate) fn group(&self) -> GroupId {
        self.inner.group.get()
    }

    /// Waits until the executor's clock says `at`.
    pub async fn sleep_until(&self, at: Nanos) {
        let mut registered: Option<Waker> = None;
        std::future::poll_fn(|context| {
            if self.now() >= at {
                return Poll::Ready(());
            }
            // Another task may poll it than the last time.
            if !registered.as_ref().is_some_and(|waker| waker.will_wake(context.waker())) {
                registered = Some(context.waker().clone());
                self.wake_at(at, context.waker());
            }
            Poll::Pending
        })
        .await;
    }

    /// Wakes somebody then, once.
    pub(crate) fn wake_at(&self, at: Nanos, waker: &Waker) {
        let made = self.inner.timers_made.get();
        self.inner.timers_made.set(made + 1);
        let timer = Timer { at, made, waker: waker.clone() };
        self.inner.timers.borrow_mut().push(Reverse(timer));
    }

    /// Lets the other ready tasks run.
    pub async fn yield_now(&self) {
        let mut yielded = false;
        std::future::poll_fn(|context| {
            if yielded {
                return Poll::Ready(());
            }
            yielded = true;
            match self.inner.clock {
                Clock::Virtual { ref now, jitter_ns } if jitter_ns > 0 => {
                    let jitter = self.inner.rng.borrow_mut().u64(0..=jitter_ns);
                    self.wake_at(now.get() + jitter, context.waker());
                }
                _ => context.waker().wake_by_ref(),
            }
            Poll::Pending
        })
        .await;
    }

    /// Lets those run that are ready, if there are any.
    #[inline]
    pub async fn yield_to_ready(&self) {
        if !self.inner.queue.borrow().is_empty() {
            self.yield_now().await;
        }
    }

    /// Runs `future` and all tasks until it is ready. Tasks that are still there stay, for the next call.
    pub fn block_on<T>(&self, future: impl Future<Output = T>) -> T {
        let _entered = self.enter();
        let mut future = pin!(future);
        let ready = &self.inner.ready;
        let main = Arc::new(TaskWaker { id: MAIN, queued: AtomicBool::new(true), queue: Arc::clone(ready) });
        let waker = Waker::from(Arc::clone(&main));
        self.inner.queue.borrow_mut().push_back(MAIN);
        let mut was_idle = true;
        for turn in (0..BURSTS_PER_LOOK).cycle() {
            if was_idle || turn == 0 {
                self.fire_timers();
            }
            self.collect_woken();
            for _ in 0..BURST {
                let Some(id) = self.inner.queue.borrow_mut().pop_front() else { break };
                if id == MAIN {
                    main.queued.store(false, Ordering::Release);
                    if let Poll::Ready(value) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
                        // What else was ready stays queued; only main's own wake-ups are void now.
                        self.collect_woken();
                        self.inner.queue.borrow_mut().retain(|id| *id != MAIN);
                        self.each_source(|source| {
                            source.flush();
                        });
                        return value;
                    }
                } else {
                    self.poll_task(id);
                }
            }
            was_idle = self.inner.queue.borrow().is_empty();
            if !self.inner.sources.borrow().is_empty() {
                // Tasks that are always ready do not keep connections waiting for ever.
                if was_idle || turn == 0 {
                    was_idle &= !self.attend_sources(was_idle, turn == 0);
                }
            } else if was_idle {
                self.park();
            }
        }
        unreachable!("turns go on for ever")
    }

    /// Registers something to be looked after, for as long as somebody else holds it.
    pub fn register(&self, source: &Rc<dyn Source>) -> io::Result<()> {
        if self.inner.ready.wake.get().is_none() {
            // Only this thread registers, so nobody else sets it.
            let _ = self.inner.ready.wake.set(WakeUp::new()?);
        }
        let mut sources = self.inner.sources.borrow_mut();
        sources.retain(Registered::is_there);
        let rests = source.rests().cloned().unwrap_or_default();
        sources.push(Registered { source: Rc::downgrade(source), rests });
        Ok(())
    }

    /// Does something with each source that is still there and does not rest; whether all are there.
    fn each_source(&self, mut work: impl FnMut(&dyn Source)) -> bool {
        let mut all = true;
        // One at a time, since a source may wake what registers another.
        for n in 0.. {
            let source = match self.inner.sources.borrow().get(n) {
                Some(one) if one.rests.get() => continue,
                Some(one) => one.source.upgrade(),
                None => break,
            };
            match source {
                Some(source) => work(&*source),
                None => all = false,
            }
        }
        all
    }

    /// Input and output; whether there was any. If there was none and no task is ready, spins for a while or sleeps.
    fn attend_sources(&self, is_idle: bool, is_clock_due: bool) -> bool {
        let mut did = false;
        let mut all = self.each_source(|source| {
            did |= source.flush();
            did |= source.advance();
        });
        if self.inner.is_alone.get() && is_idle {
            for _ in 1..LOOKS_PER_CLOCK {
                if did || !all || self.any_woken() {
                    break;
                }
                all = self.each_source(|source| did |= source.advance());
            }
        }
        if !all {
            self.inner.sources.borrow_mut().retain(Registered::is_there);
        }
        if did && !is_clock_due {
            self.rest(None);
            return true;
        }
        let now = self.now();
        let mut spin: Option<Spin> = None;
        self.each_source(|source| {
            did |= source.expire(now);
            if source.is_expecting() {
                let (more, so_far) = (source.spin(), spin.unwrap_or(source.spin()));
                spin =
                    Some(Spin { ns: so_far.ns.max(more.ns), alone_ns: so_far.alone_ns.min(more.alone_ns) });
            }
        });
        if did || !is_idle {
            self.rest(None);
            return did;
        }
        let idle_ns = now.saturating_sub(self.inner.idle_since.get().unwrap_or(now));
        self.rest(Some(now - idle_ns));
        if spin.is_none_or(|spin| idle_ns > spin.ns) {
            self.sleep_on_sources();
            self.rest(None);
        } else if spin.is_none_or(|spin| idle_ns >= spin.alone_ns) {
            // What is waited for may need this very core.
            std::thread::yield_now();
        } else {
            self.inner.is_alone.set(true);
        }
        false
    }

    /// Notes since when there has been nothing to do.
    fn rest(&self, since: Option<Nanos>) {
        self.inner.idle_since.set(since);
        self.inner.is_alone.set(false);
    }

    /// Sleeps until a source is ready, a wake-up or the next timer.
    fn sleep_on_sources(&self) {
        let ready = &self.inner.ready;
        let Some(wake) = ready.wake.get() else { return };
        {
            let mut woken = lock(&ready.woken);
            if !woken.tasks.is_empty() {
                return;
            }
            woken.sleep = Sleep::Polling;
        }
        let sources: Vec<_> =
            self.inner.sources.borrow().iter().filter_map(|one| one.source.upgrade()).collect();
        let mut ends = vec![PollFd::new(wake, rustix::event::PollFlags::IN)];
        ends.extend(sources.iter().filter_map(|source| source.interest()));
        let deadline = sources.iter().filter_map(|source| source.deadline()).chain(self.next_timer()).min();
        let patience = deadline.map(|at| {
            let span = at.saturating_sub(self.now());
            Timespec {
                tv_sec: i64::try_from(span / SECOND).unwrap_or(i64::MAX),
                tv_nsec: i64::try_from(span % SECOND).unwrap_or(0),
            }
        });
        // If it fails, somebody interrupted us: we look again.
        let _ = poll(&mut ends, patience.as_ref());
        if !ends[0].revents().is_empty() {
            wake.settle();
        }
        lock(&ready.woken).sleep = Sleep::Awake;
    }

    /// Sleeps until a wake-up or the next timer.
    fn park(&self) {
        let ready = &self.inner.ready;
        debug_assert_eq!(ready.thread.id(), std::thread::current().id(), "an executor stays on its thread");
        {
            let mut woken = lock(&ready.woken);
            if !woken.tasks.is_empty() {
                return;
            }
            woken.sleep = Sleep::Parked;
        }
        match self.next_timer() {
            Some(at) => std::thread::park_timeout(Duration::from_nanos(at.saturating_sub(self.now()))),
            None => std::thread::park(),
        }
        lock(&ready.woken).sleep = Sleep::Awake;
    }

    fn enter(&self) -> Entered {
        Entered { before: CURRENT.with_borrow_mut(|current| current.replace(self.clone())) }
    }

    /// Runs `body` with this executor as the thread's current one.
    pub(crate) fn within<T>(&self, body: impl FnOnce() -> T) -> T {
        let _entered = self.enter();
        body()
    }

    /// Moves what wakers pushed into the ready queue, except for paused groups.
    fn collect_woken(&self) {
        let ready = &self.inner.ready;
        if !ready.any.load(Ordering::Acquire) {
            return;
        }
        let mut queue = self.inner.queue.borrow_mut();
        let mut paused = self.inner.paused.borrow_mut();
        let mut woken = lock(&ready.woken);
        ready.any.store(false, Ordering::Relaxed);
        if paused.is_empty() {
            queue.extend(woken.tasks.drain(..));
            return;
        }
        let tasks = self.inner.tasks.borrow();
        for id in woken.tasks.drain(..) {
            let group = tasks.get(id).map_or(DRIVER, |task| task.group);
            match paused.get_mut(&group) {
                Some(held) => held.push(id),
                None => queue.push_back(id),
            }
        }
    }

    fn poll_task(&self, id: TaskId) {
        let (mut future, group, waker) = {
            let mut tasks = self.inner.tasks.borrow_mut();
            let Some(task) = tasks.get_mut(id) else { return };
            // A task that wakes itself through two paths may be queued while it runs; the second poll finds nothing.
            let (Some(future), Some(waker)) = (task.future.take(), task.waker.take()) else { return };
            task.state.queued.store(false, Ordering::Release);
            (future, task.group, waker)
        };
        let before = self.inner.group.replace(group);
        let polled = future.as_mut().poll(&mut Context::from_waker(&waker));
        self.inner.group.set(before);
        let mut tasks = self.inner.tasks.borrow_mut();
        if polled.is_ready() || tasks.get(id).is_some_and(|task| task.is_ended) {
            tasks.try_remove(id);
        } else if let Some(task) = tasks.get_mut(id) {
            (task.future, task.waker) = (Some(future), Some(waker));
            return;
        }
        drop(tasks);
        // Outside the borrow: what the future owns may use the executor while it is dropped.
        drop(future);
    }

    // What the simulator drives the executor with.

    /// Polls one ready task, chosen by `choose` from how many there are. False if none is ready.
    pub(crate) fn poll_one(&self, choose: impl FnOnce(usize) -> usize) -> bool {
        self.collect_woken();
        let id = {
            let mut queue = self.inner.queue.borrow_mut();
            match queue.len() {
                0 => return false,
                1 => queue.pop_front(),
                ready => queue.swap_remove_back(choose(ready)),
            }
        };
        if let Some(id) = id {
            self.poll_task(id);
        }
        true
    }

    /// The same, but for the tasks of one group, which stay where they are.
    pub(crate) fn poll_one_except(&self, group: GroupId, choose: impl FnOnce(usize) -> usize) -> bool {
        self.collect_woken();
        let id = {
            let (mut queue, tasks) = (self.inner.queue.borrow_mut(), self.inner.tasks.borrow());
            let is_other = |id: TaskId| tasks.get(id).is_none_or(|task| task.group != group);
            let others: Vec<usize> = (0..queue.len()).filter(|at| is_other(queue[*at])).collect();
            if others.is_empty() {
                return false;
            }
            queue.swap_remove_back(others[choose(others.len())])
        };
        if let Some(id) = id {
            self.poll_task(id);
        }
        true
    }

    /// Whether a task has been woken since one was last chosen.
    pub(crate) fn any_woken(&self) -> bool {
        self.inner.ready.any.load(Ordering::Acquire)
    }

    /// When the next timer is due.
    pub(crate) fn next_timer(&self) -> Option<Nanos> {
        self.inner.timers.borrow().peek().map(|Reverse(timer)| timer.at)
    }

    /// Sets the virtual clock.
    pub(crate) fn set_now(&self, at: Nanos) {
        if let Clock::Virtual { now, .. } = &self.inner.clock {
            debug_assert!(at >= now.get(), "time does not go back");
            now.set(at);
        }
    }

    /// Wakes whatever waits for a time that has come.
    pub(crate) fn fire_timers(&self) {
        if self.inner.timers.borrow().is_empty() {
            return;
        }
        let now = self.now();
        loop {
            let mut timers = self.inner.timers.borrow_mut();
            match timers.peek() {
                Some(Reverse(timer)) if timer.at <= now => {
                    let timer = timers.pop();
                    drop(timers);
                    if let Some(Reverse(timer)) = timer {
                        timer.waker.wake();
                    }
                }
                _ => return,
            }
        }
    }

    /// Ends all tasks of a group: they are dropped where they stand.
    pub(crate) fn kill_group(&self, group: GroupId) {
        self.inner.paused.borrow_mut().remove(&group);
        let before = self.inner.group.replace(group);
        loop {
            let mut victims = Vec::new();
            {
                let mut tasks = self.inner.tasks.borrow_mut();
                let ids: Vec<_> = tasks.iter().filter(|(_, t)| t.group == group).map(|(id, _)| id).collect();
                for id in ids {
                    victims.extend(tasks.try_remove(id));
                }
            }
            if victims.is_empty() {
                break;
            }
            // What is dropped may spawn tasks that were to clean up behind it; the dead clean up nothing.
            drop(victims);
        }
        self.inner.group.set(before);
    }

    /// Stops polling the tasks of a group.
    pub(crate) fn pause_group(&self, group: GroupId) {
        let mut queue = self.inner.queue.borrow_mut();
        let tasks = self.inner.tasks.borrow();
        let (held, rest) =
            queue.drain(..).partition(|id| tasks.get(*id).is_some_and(|task| task.group == group));
        *queue = rest;
        self.inner.paused.borrow_mut().entry(group).or_default().extend(Vec::from(held));
    }

    /// Polls the tasks of a group again.
    pub(crate) fn resume_group(&self, group: GroupId) {
        let held = self.inner.paused.borrow_mut().remove(&group);
        self.inner.queue.borrow_mut().extend(held.into_iter().flatten());
    }

    /// How many tasks there are.
    pub(crate) fn tasks(&self) -> usize {
        self.inner.tasks.borrow().len()
    }

    /// Drops all tasks. What they own (endpoints) refers back to the executor, so without this they keep each other alive:
    /// call it when a thread is done with its executor.
    pub fn clear(&self) {
        // What is dropped may leave a task behind that would have settled it. Such a task leaves none itself.
        for _ in 0..MAX_CLEARINGS {
            let tasks = std::mem::take(&mut *self.inner.tasks.borrow_mut());
            if tasks.is_empty() {
                break;
            }
            drop(tasks);
        }
        self.inner.timers.borrow_mut().clear();
    }
}

impl Default for Executor {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Executor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Executor({} tasks)", self.inner.tasks.try_borrow().map_or(0, |tasks| tasks.len()))
    }
}

struct Join<T> {
    result: JoinResult<T>,
    waiter: Option<Waker>,
}

enum JoinResult<T> {
    Running,
    Finished(T),
    Killed,
    Taken,
}

/// Sets the result of a task, or that it was killed, when dropped.
struct Finish<T> {
    state: Rc<RefCell<Join<T>>>,
}

impl<T> Finish<T> {
    fn set(&self, result: JoinResult<T>) {
        let mut state = self.state.borrow_mut();
        if matches!(state.result, JoinResult::Running) {
            state.result = result;
            if let Some(waiter) = state.waiter.take() {
                waiter.wake();
            }
        }
    }
}

impl<T> Drop for Finish<T> {
    fn drop(&mut self) {
        self.set(JoinResult::Killed);
    }
}

/// The task was ended before it finished.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Killed;

impl fmt::Display for Killed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the task was ended before it finished")
    }
}

impl std::error::Error for Killed {}

/// Waits for a task. Dropping it detaches: the task runs on.
pub struct JoinHandle<T> {
    state: Rc<RefCell<Join<T>>>,
}

impl<T> Future for JoinHandle<T> {
    type Output = Result<T, Killed>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.state.borrow_mut();
        match std::mem::replace(&mut state.result, JoinResult::Taken) {
            JoinResult::Finished(value) => Poll::Ready(Ok(value)),
            JoinResult::Killed | JoinResult::Taken => Poll::Ready(Err(Killed)),
            JoinResult::Running => {
                state.result = JoinResult::Running;
                state.waiter = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl<T> fmt::Debug for JoinHandle<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JoinHandle")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::MILLISECOND;
    use std::sync::mpsc;

    #[test]
    fn tasks_interleave_and_join() {
        let executor = Executor::new();
        let order = Rc::new(RefCell::new(Vec::new()));
        let spawned = |name: &'static str| {
            let (order, executor2) = (Rc::clone(&order), executor.clone());
            executor.spawn(async move {
                for step in 0..3 {
                    order.borrow_mut().push((name, step));
                    executor2.yield_now().await;
                }
                name
            })
        };
        let (a, b) = (spawned("a"), spawned("b"));
        let (a, b) = executor.block_on(async { (a.await, b.await) });
        assert_eq!((a, b), (Ok("a"), Ok("b")));
        assert_eq!(*order.borrow(), [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]);
    }

    #[test]
    fn a_sleeping_thread_is_woken_from_another() {
        let executor = Executor::new();
        let (waker_out, waker_in) = mpsc::channel::<Waker>();
        let woken = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&woken);
        #[expect(clippy::disallowed_methods, reason = "the test is about a second thread")]
        let other = std::thread::spawn(move || {
            for waker in waker_in {
                flag.store(true, Ordering::SeqCst);
                waker.wake();
            }
        });
        for _ in 0..2000 {
            woken.store(false, Ordering::SeqCst);
            let mut sent = false;
            executor.block_on(std::future::poll_fn(|context| {
                if woken.load(Ordering::SeqCst) {
                    return Poll::Ready(());
                }
                if !sent {
                    sent = true;
                    waker_out.send(context.waker().clone()).unwrap();
                }
                Poll::Pending
            }));
        }
        drop(waker_out);
        other.join().unwrap();
    }

    #[test]
    fn timers_fire_in_order_of_time() {
        let executor = Executor::new();
        let order = Rc::new(RefCell::new(Vec::new()));
        let handles: Vec<_> = [3u64, 1, 2]
            .map(|n| {
                let (order, executor2) = (Rc::clone(&order), executor.clone());
                let at = executor.now() + n * MILLISECOND;
                executor.spawn(async move {
                    executor2.sleep_until(at).await;
                    assert!(executor2.now() >= at);
                    order.borrow_mut().push(n);
                })
            })
            .into_iter()
            .collect();
        executor.block_on(async {
            for handle in handles {
                handle.await.unwrap();
            }
        });
        assert_eq!(*order.borrow(), [1, 2, 3]);
    }

    #[test]
    fn a_killed_group_ends_and_its_joiners_learn_it() {
        let executor = Executor::with_virtual_time(1, 0);
        let never = executor.spawn_in(7, std::future::pending::<()>());
        let other = executor.spawn_in(8, async { 5 });
        executor.within(|| while executor.poll_one(|_| 0) {});
        executor.kill_group(7);
        let joined = Rc::new(Cell::new(None));
        let out = Rc::clone(&joined);
        executor.spawn(async move { out.set(Some((never.await, other.await))) });
        executor.within(|| while executor.poll_one(|_| 0) {});
        assert_eq!(joined.get(), Some((Err(Killed), Ok(5))));
    }

    #[test]
    fn a_paused_group_keeps_its_wake_ups() {
        let executor = Executor::with_virtual_time(1, 0);
        let steps = Rc::new(Cell::new(0));
        let (counter, executor2) = (Rc::clone(&steps), executor.clone());
        executor.spawn_in(3, async move {
            loop {
                counter.set(counter.get() + 1);
                executor2.sleep_until(executor2.now() + 10).await;
            }
        });
        let run = || executor.within(|| while executor.poll_one(|_| 0) {});
        run();
        executor.pause_group(3);
        executor.set_now(10);
        executor.fire_timers();
        run();
        assert_eq!(steps.get(), 1, "paused");
        executor.resume_group(3);
        run();
        assert_eq!(steps.get(), 2, "the wake-up was kept");
    }
}
