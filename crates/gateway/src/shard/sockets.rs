//! The sockets of a thread, behind one epoll descriptor that its executor looks after as it does after connections to memory
//! servers.
//!
//! Sockets are watched for edges, so that each costs one system call when it comes and none later. The rule that goes with
//! edges: a socket is readable, or writable, until a call on it says that it is not.

use farwood_fabric::Executor;
use farwood_fabric::clock::Nanos;
use farwood_fabric::exec::Source;
use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags, Timespec};
use slab::Slab;
use std::cell::{Cell, RefCell};
use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

/// How many events are taken at a time.
const EVENTS: usize = 512;
const AT_ONCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// What is known of one socket.
#[derive(Default, Debug)]
struct State {
    is_readable: Cell<bool>,
    is_writable: Cell<bool>,
    /// The other end has closed: there is something to read, if only the end.
    is_hung_up: Cell<bool>,
    /// It was reset, or shut for both directions: nothing that is written will be read.
    is_gone: Cell<bool>,
    waker: RefCell<Option<Waker>>,
}

/// All sockets of a thread.
pub(crate) struct Sockets {
    epoll: OwnedFd,
    states: RefCell<Slab<Rc<State>>>,
    events: RefCell<Vec<Event>>,
    is_closing: Cell<bool>,
}

impl Sockets {
    /// Registers with the thread's executor, which looks after them as long as this lives.
    pub(crate) fn new(executor: &Executor) -> io::Result<Rc<Self>> {
        let sockets = Rc::new(Self {
            epoll: epoll::create(CreateFlags::CLOEXEC)?,
            states: RefCell::default(),
            events: RefCell::new(Vec::with_capacity(EVENTS)),
            is_closing: Cell::new(false),
        });
        let source: Rc<dyn Source> = Rc::clone(&sockets) as _;
        executor.register(&source)?;
        Ok(sockets)
    }

    /// Watches a socket, which does not block, until the result is dropped.
    pub(crate) fn watch<T: AsFd>(self: &Rc<Self>, socket: T) -> io::Result<Socket<T>> {
        let state = Rc::new(State::default());
        let key = self.states.borrow_mut().insert(Rc::clone(&state));
        let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        if let Err(error) = epoll::add(&self.epoll, &socket, EventData::new_u64(key as u64), flags) {
            self.states.borrow_mut().remove(key);
            return Err(error.into());
        }
        Ok(Socket { inner: socket, state, key, sockets: Rc::clone(self) })
    }

    /// From now on nobody waits for a socket: whoever does is woken, and looks why.
    pub(crate) fn close(&self) {
        self.is_closing.set(true);
        for (_, state) in self.states.borrow().iter() {
            if let Some(waker) = state.waker.take() {
                waker.wake();
            }
        }
    }

    /// Takes events; whether there were any.
    fn collect(&self) -> bool {
        let mut events = self.events.borrow_mut();
        events.clear();
        if epoll::wait(&self.epoll, spare_capacity(&mut events), Some(&AT_ONCE)).is_err() {
            // Interrupted: the executor looks again.
            return false;
        }
        let states = self.states.borrow();
        for event in events.iter() {
            let (flags, key) = (event.flags, event.data.u64());
            let Some(state) = usize::try_from(key).ok().and_then(|key| states.get(key)) else { continue };
            let has_ended = flags.intersects(EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR);
            if flags.contains(EventFlags::IN) || has_ended {
                state.is_readable.set(true);
            }
            if flags.contains(EventFlags::OUT) || has_ended {
                state.is_writable.set(true);
            }
            if has_ended {
                state.is_hung_up.set(true);
            }
            if flags.intersects(EventFlags::HUP | EventFlags::ERR) {
                state.is_gone.set(true);
            }
            if let Some(waker) = state.waker.take() {
                waker.wake();
            }
        }
        !events.is_empty()
    }
}

impl fmt::Debug for Sockets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sockets({})", self.states.borrow().len())
    }
}

impl Source for Sockets {
    fn flush(&self) -> bool {
        false
    }

    fn advance(&self) -> bool {
        self.collect()
    }

    /// Idle clients are looked for by the chores.
    fn expire(&self, _: Nanos) -> bool {
        false
    }

    fn is_expecting(&self) -> bool {
        false
    }

    fn interest(&self) -> Option<PollFd<'_>> {
        Some(PollFd::new(&self.epoll, PollFlags::IN))
    }

    fn deadline(&self) -> Option<Nanos> {
        None
    }
}

/// A socket that is watched.
#[derive(Debug)]
pub(crate) struct Socket<T: AsFd> {
    pub(crate) inner: T,
    state: Rc<State>,
    key: usize,
    sockets: Rc<Sockets>,
}

impl<T: AsFd> Socket<T> {
    pub(crate) fn is_readable(&self) -> bool {
        self.state.is_readable.get()
    }

    pub(crate) fn is_writable(&self) -> bool {
        self.state.is_writable.get()
    }

    /// Whether it is known that nobody reads what is written.
    #[inline]
    pub(crate) fn is_gone(&self) -> bool {
        self.state.is_gone.get()
    }

    /// A call on it has failed.
    pub(crate) fn set_gone(&self) {
        self.state.is_gone.set(true);
    }

    /// Wakes the task whenever something is new, the end among it; whoever waits for the socket afterwards says so anew.
    #[inline]
    pub(crate) fn wake_at_events(&self, context: &Context<'_>) {
        self.state.waker.replace(Some(context.waker().clone()));
    }

    /// There was less to read than was asked for. If the other end has closed, the end itself is still to be read.
    pub(crate) fn read_all(&self) {
        self.state.is_readable.set(self.state.is_hung_up.get());
    }

    pub(crate) fn not_readable(&self) {
        self.state.is_readable.set(false);
    }

    pub(crate) fn not_writable(&self) {
        self.state.is_writable.set(false);
    }

    #[inline]
    pub(crate) fn readable(&self) -> impl Future<Output = ()> {
        self.wait(|state| state.is_readable.get())
    }

    #[inline]
    pub(crate) fn writable(&self) -> impl Future<Output = ()> {
        self.wait(|state| state.is_writable.get())
    }

    /// Waits for either.
    #[inline]
    pub(crate) fn readable_or_writable(&self) -> impl Future<Output = ()> {
        self.wait(|state| state.is_readable.get() || state.is_writable.get())
    }

    #[inline]
    fn wait(&self, is_so: impl Fn(&State) -> bool) -> impl Future<Output = ()> {
        std::future::poll_fn(move |context| {
            if is_so(&self.state) || self.sockets.is_closing.get() {
                return Poll::Ready(());
            }
            self.state.waker.replace(Some(context.waker().clone()));
            Poll::Pending
        })
    }
}

impl<T: AsFd> Drop for Socket<T> {
    fn drop(&mut self) {
        // It fails only if it is not watched any more.
        let _ = epoll::delete(&self.sockets.epoll, &self.inner);
        self.sockets.states.borrow_mut().try_remove(self.key);
    }
}
