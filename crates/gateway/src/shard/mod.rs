//! A thread of the gateway: its clients, its endpoint, and what its commands need.
//!
//! Everything a client asks for is carried out by the thread that its connection belongs to; there is no hop. The first thread
//! also accepts connections; they stay there until it is busy (`balance`).
//!
//! | file | what it is |
//! |---|---|
//! | `sockets` | the thread's sockets, behind one epoll descriptor |
//! | `connection` | one client |
//! | `accept` | taking in new clients |
//! | `balance` | spreading clients over threads |
//! | `chores` | what is done every now and then: clients that are silent, keys that have expired, counting |

pub(crate) mod accept;
mod balance;
mod chores;
mod connection;
mod sockets;

pub(crate) use accept::Inbox;

use crate::command::{Finder, Refused, execute};
use crate::common::{Common, Stop};
use crate::resp::Reply;
use crate::stats::{Far, ThreadStats};
use crate::store::Store;
use crate::together::Boxes;
use balance::Balance;
use connection::{CHUNK_BYTES, Connection, Execute};
use farwood_fabric::{Endpoint, Executor, marks};
use farwood_index::{IndexError, Pool};
use sockets::Sockets;
use std::cell::{Cell, RefCell};
use std::fmt;
use std::net::TcpListener;
use std::ops::Deref;
use std::rc::Rc;
use std::sync::Arc;

/// Chunks of input that a thread keeps for the next clients that say something.
const SPARE_CHUNKS: usize = 64;
/// Handles that a thread keeps for the next commands.
const SPARE_HANDLES: usize = 1024;

/// What the clients of one thread share.
pub(crate) struct Shard<S: Store> {
    pub(crate) store: S,
    pub(crate) pool: Pool,
    pub(crate) endpoint: Endpoint,
    pub(crate) common: Arc<Common>,
    pub(crate) stats: Arc<ThreadStats>,
    pub(crate) stop: Arc<Stop>,
    /// Which thread it is.
    number: usize,
    inboxes: Arc<[Inbox]>,
    balance: Balance,
    finder: Finder,
    handles: RefCell<Vec<S::Handle>>,
    chunks: RefCell<Vec<Rc<Vec<u8>>>>,
    /// Handles that are in use: operations that must not be cut short.
    busy: Cell<usize>,
    /// Commands until one is timed again.
    unsampled: Cell<u32>,
    /// What the clock said a moment ago.
    seconds: Cell<u64>,
}

/// What a thread starts with.
#[derive(Debug)]
pub(crate) struct Start<S> {
    /// Which thread it is.
    pub(crate) number: usize,
    pub(crate) store: S,
    pub(crate) pool: Pool,
    pub(crate) common: Arc<Common>,
    pub(crate) stop: Arc<Stop>,
    pub(crate) inboxes: Arc<[Inbox]>,
    /// The first thread accepts clients.
    pub(crate) listener: Option<TcpListener>,
}

/// Serves clients on this thread, whose executor runs, until it is told to stop.
pub(crate) async fn serve<S: Store>(start: Start<S>, endpoint: &Endpoint) -> Result<(), IndexError> {
    let executor = Executor::current().ok_or(farwood_fabric::FabricError::NoExecutor)?;
    let system =
        |error: std::io::Error| IndexError::BadConfig { why: format!("no sockets to be had: {error}") };
    let sockets = Sockets::new(&executor).map_err(system)?;
    let Start { number, store, pool, common, stop, inboxes, listener } = start;
    let shard = Rc::new(Shard {
        store,
        pool,
        endpoint: endpoint.clone(),
        stats: Arc::clone(&common.threads[number]),
        seconds: Cell::new(common.seconds()),
        common,
        stop: Arc::clone(&stop),
        number,
        inboxes,
        balance: Balance::default(),
        finder: Finder::new(),
        handles: RefCell::default(),
        chunks: RefCell::default(),
        busy: Cell::new(0),
        unsampled: Cell::new(0),
    });
    let is_first = listener.is_some();
    if let Some(listener) = listener {
        let listener = sockets.watch(listener).map_err(system)?;
        endpoint.spawn(accept::accept(Rc::clone(&shard), listener));
    }
    endpoint.spawn(welcome(Rc::clone(&shard), sockets, execute::<S>));
    endpoint.spawn(chores::every_moment(Rc::clone(&shard)));
    if is_first {
        endpoint.spawn(chores::sweep(Rc::clone(&shard)));
        endpoint.spawn(chores::watch_memory(Rc::clone(&shard)));
    }
    stop.wait().await;
    shard.come_to_rest().await;
    Ok(())
}

/// Serves the clients that are handed to this thread.
async fn welcome<S: Store, F: Future<Output = Reply> + 'static>(
    shard: Rc<Shard<S>>,
    sockets: Rc<Sockets>,
    execute: Execute<S, F>,
) {
    let boxes = Boxes::new(shard.endpoint.company());
    loop {
        let guest = shard.inboxes[shard.number].next().await;
        match sockets.watch(Arc::clone(&guest.talk.client)) {
            Ok(socket) => {
                let connection = Connection::new(Rc::clone(&shard), socket, guest, boxes.clone(), execute);
                shard.endpoint.spawn(connection.serve());
            }
            Err(error) => {
                tracing::warn!("a client was turned away: {error}");
                shard.common.clients.leave(&guest.talk.client);
            }
        }
    }
}

impl<S: Store> Shard<S> {
    /// Lets every thread see what this one's operations cost up to now.
    pub(crate) fn publish_costs(&self) {
        self.stats.publish(Far { costs: self.endpoint.totals(), paths: marks::snapshot() });
    }

    /// Operations for one task, until the result is dropped.
    #[inline]
    pub(crate) fn handle(&self) -> Result<Lent<'_, S>, IndexError> {
        let spare = self.handles.borrow_mut().pop();
        let handle = match spare {
            Some(handle) => handle,
            None => self.store.handle(&self.endpoint)?,
        };
        self.busy.set(self.busy.get() + 1);
        Ok(Lent { shard: self, handle: Some(handle) })
    }

    /// Refuses a reply that would be too long.
    pub(crate) fn check_reply(&self, bytes: usize) -> Result<(), Refused> {
        let most = self.common.options.max_reply_bytes;
        if bytes <= most {
            return Ok(());
        }
        Err(Refused(
            format!("ERR the reply is longer than the {most} bytes of --max-reply; ask for less at a time, with LIMIT or COUNT")
                .into(),
        ))
    }

    fn take_chunk(&self) -> Rc<Vec<u8>> {
        self.chunks.borrow_mut().pop().unwrap_or_else(|| Rc::new(Vec::with_capacity(CHUNK_BYTES)))
    }

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
        write!(f, "Shard({} busy)", self.busy.get())
    }
}

/// A handle that goes back when it is dropped.
pub(crate) struct Lent<'a, S: Store> {
    shard: &'a Shard<S>,
    handle: Option<S::Handle>,
}

impl<S: Store> Deref for Lent<'_, S> {
    type Target = S::Handle;

    fn deref(&self) -> &S::Handle {
        self.handle.as_ref().expect("it goes back only when this is dropped")
    }
}

impl<S: Store> Drop for Lent<'_, S> {
    fn drop(&mut self) {
        self.shard.busy.set(self.shard.busy.get() - 1);
        let mut handles = self.shard.handles.borrow_mut();
        if handles.len() < SPARE_HANDLES {
            handles.extend(self.handle.take());
        }
    }
}
