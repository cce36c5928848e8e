//! A thread of the gateway: its clients, its endpoint, and what its commands need.
//!
//! Everything a client asks for is carried out by the thread that its connection belongs to; there is no hop. The first thread
//! also accepts connections; they stay there until it is busy (`balance`).
//!
//! A shard lasts as long as a session. While there is none, one shard without an index accepts clients and says so to whoever wants more
//! than that. Clients go from one to the next through [`Common::lobby`], between two requests, and keep their connections.
//!
//! | file | what it is |
//! |---|---|
//! | `sockets` | the thread's sockets, behind one epoll descriptor |
//! | `connection`, `output` | one client; the replies that it has not read |
//! | `turns` | long work, a piece at a time |
//! | `accept` | taking in new clients |
//! | `balance` | spreading clients over threads |
//! | `deadlines`, `sweep` | removing keys that have expired |
//! | `chores` | what is done every now and then: clients that are silent, counting |

pub(crate) mod accept;
mod balance;
mod chores;
mod connection;
mod deadlines;
mod output;
mod sockets;
mod sweep;
pub(crate) mod turns;

pub(crate) use accept::Inbox;

use crate::budget::Charge;
use crate::command::{Finder, Refused, Spec, execute, execute_absent, limits};
use crate::common::{Common, Stop};
use crate::resp::Reply;
use crate::scarcity::Room;
use crate::stats::{Far, ThreadStats};
use crate::store::Store;
use balance::Balance;
use connection::{CHUNK_BYTES, Connection, Execute};
use deadlines::Deadlines;
use farwood_fabric::clock::{MILLISECOND, Nanos, SECOND};
use farwood_fabric::pipeline::Boxes;
use farwood_fabric::{Company, Endpoint, Executor, marks};
use farwood_index::{IndexError, Limits, OrderedIndex, Pool};
use output::BLOCK_BYTES;
use sockets::Sockets;
use std::cell::{Cell, RefCell};
use std::fmt;
use std::net::TcpListener;
use std::ops::Deref;
use std::rc::Rc;
use std::sync::Arc;
use turns::{TURN_BYTES, Turns, VALUE_ROOM_BYTES};

/// Chunks of input, and blocks of replies, that a thread keeps for the next clients that say something.
const SPARE_CHUNKS: usize = 64;
/// Handles that a thread keeps for the next commands.
const SPARE_HANDLES: usize = 1024;

/// How often a command that waits for room looks whether there is some.
const ROOM_LOOK_NS: Nanos = MILLISECOND;

/// How long a long command waits until others have read their replies, and how often it looks. By then those who read nothing are gone.
const REPLY_PATIENCE_NS: Nanos = 10 * SECOND;
const REPLY_LOOK_NS: Nanos = MILLISECOND;

/// What the clients of one thread share.
pub(crate) struct Shard<S: Store> {
    /// The index, unless there is no session.
    pub(crate) joined: Option<Joined<S>>,
    pub(crate) executor: Executor,
    pub(crate) company: Company,
    pub(crate) common: Arc<Common>,
    pub(crate) stats: Arc<ThreadStats>,
    pub(crate) stop: Arc<Stop>,
    /// Which thread it is.
    number: usize,
    inboxes: Arc<[Inbox]>,
    balance: Balance,
    finder: Finder,
    pub(crate) deadlines: Deadlines,
    pub(crate) turns: Turns,
    /// How long keys and values may be.
    pub(crate) limits: Limits,
    /// Boxed, so that a command takes one and gives it back without a copy.
    handles: RefCell<Vec<Box<S::Handle>>>,
    chunks: RefCell<Vec<Rc<Vec<u8>>>>,
    blocks: RefCell<Vec<Vec<u8>>>,
    /// Tasks that may be in the middle of an operation.
    at_work: Cell<usize>,
    /// Commands that need the index would only wait: the coordinator is silent.
    is_cut_off: Cell<bool>,
    /// Commands until one is timed again.
    unsampled: Cell<u32>,
    /// What the clock said a moment ago.
    seconds: Cell<u64>,
}

/// An index of a pool, as one thread has it.
#[derive(Clone, Debug)]
pub(crate) struct Joined<S> {
    pub(crate) store: S,
    pub(crate) pool: Pool,
    pub(crate) endpoint: Endpoint,
}

/// What a thread starts with.
#[derive(Debug)]
pub(crate) struct Start {
    /// Which thread it is.
    pub(crate) number: usize,
    pub(crate) common: Arc<Common>,
    pub(crate) stop: Arc<Stop>,
    pub(crate) inboxes: Arc<[Inbox]>,
    /// The first thread accepts clients.
    pub(crate) listener: Option<TcpListener>,
}

/// Serves clients on this thread, whose executor runs, until it is told to stop, and lets what has begun come to its end: whether it
/// has, within [`chores::REST_NS`].
pub(crate) async fn serve<S: Store>(start: Start, joined: Option<Joined<S>>) -> Result<bool, IndexError> {
    let executor = Executor::current().ok_or(farwood_fabric::FabricError::NoExecutor)?;
    let system =
        |error: std::io::Error| IndexError::BadConfig { why: format!("no sockets to be had: {error}") };
    let sockets = Sockets::new(&executor).map_err(system)?;
    let mut start = start;
    let (listener, stop) = (start.listener.take(), Arc::clone(&start.stop));
    let shard = Rc::new(Shard::new(&executor, start, joined)?);
    let is_first = listener.is_some();
    if let Some(listener) = listener {
        let listener = sockets.watch(listener).map_err(system)?;
        executor.spawn(accept::accept(Rc::clone(&shard), listener));
        for guest in shard.common.lobby.take_all() {
            shard.inboxes[shard.number].push(guest);
        }
    }
    if shard.joined.is_some() {
        executor.spawn(welcome(Rc::clone(&shard), Rc::clone(&sockets), execute::<S>));
    } else {
        executor.spawn(welcome(Rc::clone(&shard), Rc::clone(&sockets), execute_absent::<S>));
        // Clients come from the last session as their commands end there.
        executor.spawn(take_in(Rc::clone(&shard)));
    }
    executor.spawn(chores::every_moment(Rc::clone(&shard)));
    if shard.joined.is_some() {
        shard.spawn_work(deadlines::remove_due(Rc::clone(&shard)));
    }
    if is_first && shard.joined.is_some() {
        shard.spawn_work(sweep::sweep(Rc::clone(&shard)));
        shard.spawn_work(chores::watch_memory(Rc::clone(&shard)));
    }
    stop.wait().await;
    sockets.close();
    Ok(shard.come_to_rest().await)
}

/// Takes in those who wait in the lobby, until this thread's clients go there themselves.
async fn take_in<S: Store>(shard: Rc<Shard<S>>) {
    loop {
        let guest = shard.common.lobby.next().await;
        if shard.stop.is_set() {
            return shard.common.lobby.push(guest);
        }
        shard.inboxes[shard.number].push(guest);
    }
}

/// Serves the clients that are handed to this thread.
async fn welcome<S: Store, F: Future<Output = Reply> + 'static>(
    shard: Rc<Shard<S>>,
    sockets: Rc<Sockets>,
    execute: impl Execute<S, F> + 'static,
) {
    let boxes = Boxes::new(&shard.company);
    loop {
        let guest = shard.inboxes[shard.number].next().await;
        match sockets.watch(Arc::clone(&guest.talk.client)) {
            Ok(socket) => {
                let connection = Connection::new(Rc::clone(&shard), socket, guest, boxes.clone(), execute);
                shard.spawn_work(connection.serve());
            }
            Err(error) => {
                if let Some(more) = shard.common.refusals.say(shard.common.now()) {
                    tracing::warn!("a client was turned away: {error}{more}");
                }
            }
        }
    }
}

impl<S: Store> Shard<S> {
    /// What the clients of a thread will share.
    pub(crate) fn new(
        executor: &Executor,
        start: Start,
        joined: Option<Joined<S>>,
    ) -> Result<Self, IndexError> {
        let Start { number, common, stop, inboxes, listener: _ } = start;
        let room_bytes =
            usize::try_from(common.clients.budget().limit()).unwrap_or(usize::MAX) / inboxes.len().max(1);
        let limits = match &joined {
            Some(joined) => limits::of_clients(joined.store.handle(&joined.endpoint)?.limits()),
            None => Limits::NONE,
        };
        Ok(Self {
            company: joined
                .as_ref()
                .map_or_else(Company::default, |joined| joined.endpoint.company().clone()),
            joined,
            executor: executor.clone(),
            stats: Arc::clone(&common.threads[number]),
            seconds: Cell::new(common.seconds()),
            turns: Turns::new(executor, room_bytes),
            common,
            stop,
            number,
            deadlines: Deadlines::new(inboxes.len()),
            inboxes,
            balance: Balance::default(),
            finder: Finder::new(),
            limits,
            handles: RefCell::default(),
            chunks: RefCell::default(),
            blocks: RefCell::default(),
            at_work: Cell::new(0),
            is_cut_off: Cell::new(false),
            unsampled: Cell::new(0),
        })
    }

    /// A command by its name, and its place in the table.
    pub(crate) fn find(&self, name: &[u8]) -> Option<(&'static Spec, usize)> {
        self.finder.find(name)
    }

    /// Lets every thread see what this one's operations cost up to now.
    pub(crate) fn publish_costs(&self) {
        if let Some(joined) = &self.joined {
            self.stats.publish(Far { costs: joined.endpoint.totals(), paths: marks::snapshot() });
        }
    }

    /// Runs a task that may be in the middle of an operation and ends by itself soon after the thread was told to stop.
    fn spawn_work(self: &Rc<Self>, work: impl Future<Output = ()> + 'static) {
        self.at_work.set(self.at_work.get() + 1);
        let shard = Rc::clone(self);
        self.executor.spawn(async move {
            work.await;
            shard.at_work.set(shard.at_work.get() - 1);
        });
    }

    pub(crate) async fn sleep(&self, ns: Nanos) {
        self.executor.sleep_until(self.executor.now() + ns).await;
    }

    /// Operations for one task, until the result is dropped.
    #[inline]
    pub(crate) fn handle(&self) -> Result<Lent<'_, S>, IndexError> {
        if self.joined.as_ref().is_some_and(|joined| joined.pool.session().is_lost()) {
            // Nothing begins that could not be known to have happened.
            return Err(IndexError::Closed);
        }
        let spare = self.handles.borrow_mut().pop();
        let handle = match (spare, &self.joined) {
            (Some(handle), _) => handle,
            (None, Some(joined)) => Box::new(joined.store.handle(&joined.endpoint)?),
            // Without a session nothing that needs a handle begins.
            (None, None) => return Err(IndexError::Unknown),
        };
        Ok(Lent { shard: self, handle: Some(handle) })
    }

    /// Room for a long command that may have so much in its hands, once there is some for its reply, too.
    pub(crate) async fn room(&self, bytes: usize) -> turns::Room {
        let room = self.turns.room(bytes).await;
        let (common, budget) = (&self.common, self.common.clients.budget());
        // What has room may bring a reply of a quarter of that.
        let wanted = || self.turns.taken_bytes() as u64 / (VALUE_ROOM_BYTES / TURN_BYTES) as u64;
        let end = common.now() + REPLY_PATIENCE_NS;
        while !budget.has_room_for(wanted()) && !self.stop.is_set() {
            budget.make_room(wanted(), &common.clients, common.now(), common.seconds());
            if common.now() >= end {
                marks::hit("room_waited_for_in_vain");
                break;
            }
            self.sleep(REPLY_LOOK_NS).await;
        }
        room
    }

    /// What a command says that builds up a long reply, or whatever else.
    pub(crate) fn charge(&self) -> Charge<'_> {
        Charge::new(self.common.clients.budget())
    }

    /// Refuses a reply that would be too long, or that there is no memory for.
    pub(crate) fn check_reply(&self, charge: &mut Charge<'_>, bytes: usize) -> Result<(), Refused> {
        let most = self.common.options.max_reply_bytes;
        if bytes > most {
            return Err(Refused::new(format!(
                "ERR the reply is longer than the {most} bytes of --max-reply; ask for less at a time, with LIMIT or COUNT"
            )));
        }
        self.check_memory(charge, bytes)
    }

    /// Refuses a command that has built up so much, if clients have too much together.
    pub(crate) fn check_memory(&self, charge: &mut Charge<'_>, bytes: usize) -> Result<(), Refused> {
        if charge.grow_to(bytes) {
            return Ok(());
        }
        let common = &self.common;
        let budget = common.clients.budget();
        budget.enforce(&common.clients, common.now(), common.seconds());
        Err(Refused::new(format!(
            "ERR clients have more than the {} bytes of --client-memory, all together; ask for less at a time, or try again in a moment",
            budget.limit()
        )))
    }

    /// A block for replies.
    #[inline]
    fn take_block(&self) -> Vec<u8> {
        self.blocks.borrow_mut().pop().unwrap_or_else(|| Vec::with_capacity(CHUNK_BYTES))
    }

    #[inline]
    fn give_block(&self, block: Vec<u8>) {
        let mut blocks = self.blocks.borrow_mut();
        // Long replies are rare: their room is not kept.
        if blocks.len() < SPARE_CHUNKS && block.capacity() <= 2 * BLOCK_BYTES {
            blocks.push(block);
        }
    }

    /// How many bytes of far memory this thread's operations have moved.
    pub(crate) fn far_bytes(&self) -> u64 {
        let moved = |joined: &Joined<S>| {
            let totals = joined.endpoint.totals();
            totals.bytes_read + totals.bytes_written
        };
        self.joined.as_ref().map_or(0, moved)
    }

    /// Waits until keys that have expired were removed; whether any were before this time.
    pub(crate) async fn make_room(&self, end: Nanos) -> bool {
        let common = &self.common;
        let Some(waiting) = common.scarcity.want(common.pool_ms()) else { return false };
        while waiting.look() == Room::Unknown && common.now() < end && !self.stop.is_set() {
            self.sleep(ROOM_LOOK_NS).await;
        }
        waiting.look() == Room::Made
    }

    #[inline]
    fn take_chunk(&self) -> Rc<Vec<u8>> {
        self.chunks.borrow_mut().pop().unwrap_or_else(|| Rc::new(Vec::with_capacity(CHUNK_BYTES)))
    }

    #[inline]
    fn give_chunk(&self, mut chunk: Rc<Vec<u8>>) {
        let mut chunks = self.chunks.borrow_mut();
        if let Some(bytes) = Rc::get_mut(&mut chunk).filter(|bytes| bytes.capacity() == CHUNK_BYTES) {
            bytes.clear();
            if chunks.len() < SPARE_CHUNKS {
                chunks.push(chunk);
            }
        }
    }
}

impl<S: Store> fmt::Debug for Shard<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Shard({} at work)", self.at_work.get())
    }
}

/// A handle that goes back when it is dropped.
pub(crate) struct Lent<'a, S: Store> {
    shard: &'a Shard<S>,
    handle: Option<Box<S::Handle>>,
}

impl<S: Store> Deref for Lent<'_, S> {
    type Target = S::Handle;

    fn deref(&self) -> &S::Handle {
        self.handle.as_ref().expect("it goes back only when this is dropped")
    }
}

impl<S: Store> Drop for Lent<'_, S> {
    fn drop(&mut self) {
        let mut handles = self.shard.handles.borrow_mut();
        if handles.len() < SPARE_HANDLES {
            handles.extend(self.handle.take());
        }
    }
}
