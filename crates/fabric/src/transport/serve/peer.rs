//! A client process behind a socket, to those who have something to tell it.
//!
//! Sockets do not block: what a client does not read waits in its outbox, up to a limit; who lets it grow beyond that is
//! dropped.

use crate::addr::SessionId;
use crate::call::{Call, CallId, CallOutcome};
use crate::exec::lock;
use crate::transport::host::{Caller, PeerId, SessionServer};
use crate::transport::line::frames::{FromServer, frame};
use crate::transport::stream::Stream;
use crate::wake::Wake;
use std::io::{self, Write};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// What may wait for a client that does not read.
const MAX_OUTBOX_BYTES: usize = 64 << 20;
/// What may wait for all of them. If it is more, whoever lets more than its share wait is dropped.
const MAX_ALL_OUTBOXES_BYTES: usize = 256 << 20;
const SHARE_BYTES: usize = 1 << 20;
/// A client for whom so much waits is not read from: its calls would only make it more.
pub(super) const ENOUGH_UNSENT_BYTES: usize = 1 << 20;

/// What waits for all clients together.
pub(super) type Outboxes = Arc<AtomicUsize>;

/// A client process, to those who have something to tell it.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) id: PeerId,
    pub(super) socket: Stream,
    outbox: Mutex<Outbox>,
    all: Outboxes,
    wake: Arc<Wake>,
}

#[derive(Default, Debug)]
struct Outbox {
    unsent: Vec<u8>,
    /// The thread hears its messages: what comes of them goes out at once.
    is_held: bool,
    /// It does not read, or is gone.
    failed: bool,
}

impl Peer {
    pub(super) fn new(id: PeerId, socket: Stream, all: &Outboxes, wake: &Arc<Wake>) -> Self {
        Self { id, socket, outbox: Mutex::default(), all: Arc::clone(all), wake: Arc::clone(wake) }
    }

    /// How many bytes wait to be sent.
    pub(super) fn unsent(&self) -> usize {
        lock(&self.outbox).unsent.len()
    }

    /// Whether it does not read, or is gone.
    pub(super) fn has_failed(&self) -> bool {
        lock(&self.outbox).failed
    }

    /// Sends what waits, as far as it goes; false if the client has to be dropped.
    pub(super) fn send_rest(&self) -> bool {
        let mut outbox = lock(&self.outbox);
        if !outbox.unsent.is_empty() && !outbox.failed {
            self.flush(&mut outbox);
        }
        !outbox.failed
    }

    /// What is said to it from now on is sent together.
    pub(super) fn hold(&self) {
        lock(&self.outbox).is_held = true;
    }

    /// Sends that.
    pub(super) fn release(&self) {
        let mut outbox = lock(&self.outbox);
        outbox.is_held = false;
        if !outbox.unsent.is_empty() && !outbox.failed {
            self.flush(&mut outbox);
        }
    }

    /// Whatever still refers to it sends into the void from now on.
    pub(super) fn forget(&self) {
        let mut outbox = lock(&self.outbox);
        outbox.failed = true;
        self.empty(&mut outbox);
    }

    /// What waits is not sent any more.
    fn empty(&self, outbox: &mut Outbox) {
        self.all.fetch_sub(outbox.unsent.len(), Ordering::Relaxed);
        outbox.unsent = Vec::new();
    }

    pub(super) fn send(&self, message: &FromServer) {
        self.send_bytes(&frame(message));
    }

    pub(super) fn send_bytes(&self, bytes: &[u8]) {
        let mut outbox = lock(&self.outbox);
        if outbox.failed {
            return;
        }
        outbox.unsent.extend_from_slice(bytes);
        self.all.fetch_add(bytes.len(), Ordering::Relaxed);
        if outbox.is_held {
            return;
        }
        self.flush(&mut outbox);
        if outbox.failed || !outbox.unsent.is_empty() {
            // The thread sends the rest when it can be sent, or drops the client.
            self.wake.wake();
        }
    }

    fn flush(&self, outbox: &mut Outbox) {
        let mut sent = 0;
        while sent < outbox.unsent.len() {
            match (&self.socket).write(&outbox.unsent[sent..]) {
                Ok(0) => outbox.failed = true,
                Ok(bytes) => sent += bytes,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => outbox.failed = true,
            }
            if outbox.failed {
                return self.empty(outbox);
            }
        }
        outbox.unsent.drain(..sent);
        let (own, all) = (outbox.unsent.len(), self.all.fetch_sub(sent, Ordering::Relaxed) - sent);
        if own == 0 && outbox.unsent.capacity() > SHARE_BYTES {
            outbox.unsent = Vec::new();
        }
        outbox.failed = own > MAX_OUTBOX_BYTES || (all > MAX_ALL_OUTBOXES_BYTES && own > SHARE_BYTES);
        if outbox.failed {
            self.empty(outbox);
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.forget();
    }
}

impl Caller for Peer {
    fn whence(&self) -> String {
        match &self.socket {
            Stream::Unix(_) => "a process of this machine".to_owned(),
            Stream::Tcp(socket) => socket
                .peer_addr()
                .map_or_else(|_| "an address that is gone".to_owned(), |address| address.to_string()),
        }
    }

    fn answer(&self, to: CallId, outcome: CallOutcome) {
        self.send(&FromServer::Answer { to, outcome });
    }
}

impl SessionServer for Peer {
    fn incoming(&self, session: SessionId, term: u64, call: Call) {
        self.send(&FromServer::Incoming { session, term, call });
    }

    fn ended(&self, session: SessionId, term: u64) {
        self.send(&FromServer::Ended { session, term });
    }

    fn unread(&self) -> usize {
        self.unsent()
    }
}
