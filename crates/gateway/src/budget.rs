//! How much memory clients take, all together, and who goes when it is too much (`--client-memory`).
//!
//! 1. A connection says what it has whenever that has changed: what has come of requests that are not whole, and replies that were not
//!    read. A command says what it builds up beside that ([`Charge`]).
//! 2. When the sum exceeds the limit, clients are disconnected until what is left fits into seven eighths of it: first those that
//!    stand still (they do not read, or leave a request half sent), and the largest first.
//! 3. A long command begins only when its reply has room. For that, clients are disconnected that have read nothing for two seconds.
//! 4. Their memory comes back when their connections have ended, a moment later. Until then connections that have more than
//!    [`FREE_BYTES`] do not grow; clients with short requests and replies notice nothing.
//!
//! So the limit is exceeded by no more than what one read or one reply brings on each thread, and [`LITTLE_BYTES`] for each client.

use crate::clients::{Client, Clients};
use farwood_fabric::clock::Nanos;
use farwood_fabric::rarely::Rarely;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// So much every connection may have, whatever others do.
pub(crate) const FREE_BYTES: usize = 32 << 10;
/// Whoever has no more than so much is not disconnected for it: the memory is elsewhere.
const LITTLE_BYTES: u64 = 1 << 10;
/// A client that has said nothing for so many seconds stands still.
const STILL_SECONDS: u64 = 2;

/// What clients may have.
#[derive(Debug)]
pub(crate) struct Budget {
    limit: u64,
    used: AtomicU64,
    evicted: AtomicU64,
    /// One thread at a time looks for clients to disconnect.
    evicting: Mutex<()>,
    log: Rarely,
}

impl Budget {
    pub(crate) fn new(limit: u64) -> Self {
        let (used, evicted) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { limit, used, evicted, evicting: Mutex::new(()), log: Rarely::default() }
    }

    pub(crate) fn limit(&self) -> u64 {
        self.limit
    }

    pub(crate) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// How many clients had to go.
    pub(crate) fn evicted(&self) -> u64 {
        self.evicted.load(Ordering::Relaxed)
    }

    /// How much one client's unread replies may be: half of all, so that one alone does not make others go.
    pub(crate) fn most_unread(&self) -> usize {
        usize::try_from(self.limit / 2).unwrap_or(usize::MAX)
    }

    #[inline]
    pub(crate) fn is_exceeded(&self) -> bool {
        self.used() > self.limit
    }

    fn change(&self, before: u64, now: u64) {
        if now >= before {
            self.used.fetch_add(now - before, Ordering::Relaxed);
        } else {
            self.used.fetch_sub(before - now, Ordering::Relaxed);
        }
    }

    /// A client has so much now.
    pub(crate) fn note(&self, client: &Client, bytes: u64) {
        let before = client.memory.swap(bytes, Ordering::Relaxed);
        self.change(before, bytes);
    }

    /// Whether there is room for so much more.
    pub(crate) fn has_room_for(&self, bytes: u64) -> bool {
        self.used().saturating_add(bytes) <= self.limit
    }

    /// Disconnects clients if they have too much, all together.
    pub(crate) fn enforce(&self, clients: &Clients, now: Nanos, seconds: u64) {
        if self.is_exceeded() {
            self.disconnect(clients, now, self.limit / 8 * 7, |client| Some(stands_still(client, seconds)));
        }
    }

    /// Makes room for so much more, as far as clients have it that have read nothing for a while; who reads is waited for.
    pub(crate) fn make_room(&self, bytes: u64, clients: &Clients, now: Nanos, seconds: u64) {
        if !self.has_room_for(bytes) {
            let most = self.limit.saturating_sub(bytes);
            self.disconnect(clients, now, most, |client| has_stopped(client, seconds).then_some(true));
        }
    }

    /// Disconnects clients of this `kind` until they have `most` bytes at the most, all together: those of which it is true first, the largest first.
    fn disconnect(&self, clients: &Clients, now: Nanos, most: u64, kind: impl Fn(&Client) -> Option<bool>) {
        let Ok(_guard) = self.evicting.try_lock() else { return };
        let all = clients.list();
        let (going, mut staying): (Vec<_>, Vec<_>) =
            all.into_iter().filter(|client| memory_of(client) > 0).partition(|client| client.is_evicted());
        let promised: u64 = going.iter().map(memory_of).sum();
        let mut left = self.used().saturating_sub(promised);
        staying.retain(|client| memory_of(client) > LITTLE_BYTES && kind(client).is_some());
        staying.sort_by_key(|client| std::cmp::Reverse((kind(client), memory_of(client))));
        for client in staying {
            if left <= most {
                break;
            }
            let bytes = memory_of(&client);
            left = left.saturating_sub(bytes);
            client.evict();
            self.evicted.fetch_add(1, Ordering::Relaxed);
            if let Some(more) = self.log.say(now) {
                let (peer, limit) = (client.peer, self.limit);
                tracing::warn!(
                    "disconnected {peer}, which had {bytes} of the {limit} bytes that clients may have (--client-memory){more}"
                );
            }
        }
    }
}

fn memory_of(client: &Arc<Client>) -> u64 {
    client.memory.load(Ordering::Relaxed)
}

fn stands_still(client: &Client, seconds: u64) -> bool {
    client.unread_since.load(Ordering::Relaxed) > 0
        || seconds.saturating_sub(client.active.load(Ordering::Relaxed)) >= STILL_SECONDS
}

/// Whether a client has read none of its replies for a while.
fn has_stopped(client: &Client, seconds: u64) -> bool {
    let since = client.unread_since.load(Ordering::Relaxed);
    since > 0 && seconds.saturating_sub(since) >= STILL_SECONDS
}

/// What a command builds up, until it is dropped.
#[derive(Debug)]
pub(crate) struct Charge<'a> {
    budget: &'a Budget,
    bytes: u64,
}

impl<'a> Charge<'a> {
    pub(crate) fn new(budget: &'a Budget) -> Self {
        Self { budget, bytes: 0 }
    }

    /// It has so much now; whether that is still within the limit.
    pub(crate) fn grow_to(&mut self, bytes: usize) -> bool {
        let now = (bytes as u64).max(self.bytes);
        self.budget.change(std::mem::replace(&mut self.bytes, now), now);
        bytes <= FREE_BYTES || !self.budget.is_exceeded()
    }
}

impl Drop for Charge<'_> {
    fn drop(&mut self) {
        self.budget.change(self.bytes, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clients::Seat;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn who_has_little_stays_whatever_commands_have_in_hand() {
        const LIMIT: u64 = 1 << 20;
        let clients = Arc::new(Clients::new(LIMIT));
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let enter = |bytes: u64| -> Seat {
            let stream =
                TcpStream::connect(listener.local_addr().expect("an address")).expect("a connection");
            let (peer, local) = (stream.peer_addr().expect("a peer"), stream.local_addr().expect("an end"));
            let seat = clients.enter(10, stream, peer, local, 0).expect("a seat");
            clients.budget().note(&seat, bytes);
            seat
        };
        let (half_sent, still, busy) = (enter(15), enter(40 << 10), enter(100 << 10));
        let now = 60;
        busy.active.store(now, Ordering::Relaxed);
        let mut charge = Charge::new(clients.budget());
        charge.grow_to(LIMIT as usize);
        clients.budget().enforce(&clients, 0, now);
        assert!(still.is_evicted() && busy.is_evicted(), "these have what is too much");
        assert!(!half_sent.is_evicted(), "15 bytes help nobody");
    }
}
