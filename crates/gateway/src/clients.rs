//! Who is connected: what CLIENT LIST shows, how many there may be, and how much memory they may have (`budget`).

use crate::budget::Budget;
use std::collections::BTreeMap;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// One connection, as others see it.
#[derive(Debug)]
pub(crate) struct Client {
    pub(crate) id: u64,
    pub(crate) peer: SocketAddr,
    pub(crate) local: SocketAddr,
    /// Seconds of the gateway's clock.
    pub(crate) since: u64,
    /// When it last said something.
    pub(crate) active: AtomicU64,
    /// When replies that it does not read began to wait; 0: none do.
    pub(crate) unread_since: AtomicU64,
    /// What it has said is being carried out, or its replies wait for their turn: it waits for us.
    pub(crate) is_served: AtomicBool,
    /// The place of its last command in the table.
    pub(crate) last_command: AtomicUsize,
    pub(crate) protocol: AtomicU32,
    /// Bytes that its connection takes.
    pub(crate) memory: AtomicU64,
    is_evicted: AtomicBool,
    pub(crate) stream: TcpStream,
    names: Mutex<Names>,
}

impl AsFd for Client {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// What a client says of itself.
#[derive(Clone, Default, Debug)]
pub(crate) struct Names {
    pub(crate) name: Vec<u8>,
    pub(crate) library: Vec<u8>,
    pub(crate) library_version: Vec<u8>,
}

impl Client {
    pub(crate) fn names(&self) -> MutexGuard<'_, Names> {
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the connection: whoever serves it finds that out.
    pub(crate) fn disconnect(&self) {
        // It fails if it has ended already.
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Ends the connection of a client that has too much memory.
    pub(crate) fn evict(&self) {
        self.is_evicted.store(true, Ordering::Relaxed);
        self.disconnect();
    }

    /// Since when we have waited for it, to read or to say something; none, if it waits for us.
    pub(crate) fn still_since(&self) -> Option<u64> {
        let unread_since = self.unread_since.load(Ordering::Relaxed);
        if unread_since > 0 {
            return Some(unread_since);
        }
        (!self.is_served.load(Ordering::Relaxed)).then(|| self.active.load(Ordering::Relaxed))
    }

    pub(crate) fn is_evicted(&self) -> bool {
        self.is_evicted.load(Ordering::Relaxed)
    }

    /// A line of CLIENT LIST.
    pub(crate) fn line(&self, now: u64, command: &str) -> String {
        let names = self.names().clone();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        format!(
            "id={} addr={} laddr={} fd=-1 name={} age={} idle={} flags=N db=0 sub=0 psub=0 ssub=0 multi=-1 tot-mem={} cmd={command} \
             user=default lib-name={} lib-ver={} resp={}",
            self.id,
            self.peer,
            self.local,
            text(&names.name),
            now.saturating_sub(self.since),
            now.saturating_sub(self.active.load(Ordering::Relaxed)),
            self.memory.load(Ordering::Relaxed),
            text(&names.library),
            text(&names.library_version),
            self.protocol.load(Ordering::Relaxed),
        )
    }
}

/// A client's place among the connections: whoever serves it has it. Wherever that ends, also in the middle of a command, the client is
/// hung up on.
#[derive(Debug)]
pub(crate) struct Seat {
    client: Arc<Client>,
    clients: Arc<Clients>,
}

impl Deref for Seat {
    type Target = Arc<Client>;

    fn deref(&self) -> &Arc<Client> {
        &self.client
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.client.disconnect();
        self.clients.budget.note(&self.client, 0);
        self.clients.lock().remove(&self.client.id);
    }
}

/// All connections of a gateway.
#[derive(Debug)]
pub(crate) struct Clients {
    now: Mutex<BTreeMap<u64, Arc<Client>>>,
    budget: Budget,
    ever: AtomicU64,
    refused: AtomicU64,
}

impl Clients {
    /// None yet; they may have so much memory.
    pub(crate) fn new(memory_bytes: u64) -> Self {
        let (ever, refused) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { now: Mutex::default(), budget: Budget::new(memory_bytes), ever, refused }
    }

    pub(crate) fn budget(&self) -> &Budget {
        &self.budget
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<Client>>> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes in a connection, unless there are `most` already: then it comes back.
    pub(crate) fn enter(
        self: &Arc<Self>,
        most: usize,
        stream: TcpStream,
        peer: SocketAddr,
        local: SocketAddr,
        since: u64,
    ) -> Result<Seat, TcpStream> {
        let mut clients = self.lock();
        if clients.len() >= most {
            self.refused.fetch_add(1, Ordering::Relaxed);
            return Err(stream);
        }
        let id = 1 + self.ever.fetch_add(1, Ordering::Relaxed);
        let client = Arc::new(Client {
            id,
            peer,
            local,
            since,
            active: AtomicU64::new(since),
            unread_since: AtomicU64::new(0),
            is_served: AtomicBool::new(false),
            last_command: AtomicUsize::new(usize::MAX),
            protocol: AtomicU32::new(2),
            memory: AtomicU64::new(0),
            is_evicted: AtomicBool::new(false),
            stream,
            names: Mutex::default(),
        });
        clients.insert(id, Arc::clone(&client));
        Ok(Seat { client, clients: Arc::clone(self) })
    }

    pub(crate) fn list(&self) -> Vec<Arc<Client>> {
        self.lock().values().cloned().collect()
    }

    pub(crate) fn len(&self) -> usize {
        self.lock().len()
    }

    /// How many there have been, and how many were refused since there were too many.
    pub(crate) fn counts(&self) -> (u64, u64) {
        (self.ever.load(Ordering::Relaxed), self.refused.load(Ordering::Relaxed))
    }
}
