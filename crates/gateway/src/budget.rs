//! How much memory clients take, all together, and who goes when it is too much (`--client-memory`).
//!
//! 1. A connection says what it has whenever that has changed: what has come of requests that are not whole, and replies that were not
//!    read. A command says what it builds up beside that ([`Charge`]).
//! 2. When the sum exceeds the limit, clients that stand still are disconnected until the rest fits into seven eighths of it, the
//!    largest first: they do not read, or leave a request half sent, for [`STILL_SECONDS`]. If what connections have, without what
//!    commands build up, still exceeds it, the largest of all go. A command that builds up too much is refused, and harms nobody else.
//! 3. A long command begins only when its reply has room. For that, too, clients are disconnected that stand still.
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
    /// What connections have.
    kept: AtomicU64,
    /// What commands build up.
    in_hand: AtomicU64,
    evicted: AtomicU64,
    /// One thread at a time looks for clients to disconnect.
    evicting: Mutex<()>,
    log: Rarely,
}

impl Budget {
    pub(crate) fn new(limit: u64) -> Self {
        let [kept, in_hand, evicted] = [0; 3].map(AtomicU64::new);
        Self { limit, kept, in_hand, evicted, evicting: Mutex::new(()), log: Rarely::default() }
    }

    pub(crate) fn limit(&self) -> u64 {
        self.limit
    }

    pub(crate) fn used(&self) -> u64 {
        self.kept.load(Ordering::Relaxed) + self.in_hand.load(Ordering::Relaxed)
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

    /// A client has so much now.
    pub(crate) fn note(&self, client: &Client, bytes: u64) {
        let before = client.memory.swap(bytes, Ordering::Relaxed);
        change(&self.kept, before, bytes);
    }

    /// Whether there is room for so much more.
    pub(crate) fn has_room_for(&self, bytes: u64) -> bool {
        self.used().saturating_add(bytes) <= self.limit
    }

    /// Disconnects clients if they have too much, all together.
    pub(crate) fn enforce(&self, clients: &Clients, now: Nanos, seconds: u64) {
        if self.is_exceeded() {
            let most = self.limit / 8 * 7;
            self.disconnect(
                clients,
                now,
                || self.used().saturating_sub(most),
                |client| stands_still(client, seconds),
            );
            if self.kept.load(Ordering::Relaxed) > self.limit {
                let kept = || self.kept.load(Ordering::Relaxed).saturating_sub(most);
                self.disconnect(clients, now, kept, |_| true);
            }
        }
    }

    /// Makes room for so much more, as far as clients have it that stand still; the others are waited for.
    pub(crate) fn make_room(&self, bytes: u64, clients: &Clients, now: Nanos, seconds: u64) {
        if !self.has_room_for(bytes) {
            let most = self.limit.saturating_sub(bytes);
            self.disconnect(
                clients,
                now,
                || self.used().saturating_sub(most),
                |client| stands_still(client, seconds),
            );
        }
    }

    /// Disconnects clients of this `kind` until so much comes back, the largest first.
    fn disconnect(
        &self,
        clients: &Clients,
        now: Nanos,
        wanted: impl Fn() -> u64,
        kind: impl Fn(&Client) -> bool,
    ) {
        let Ok(_guard) = self.evicting.try_lock() else { return };
        let (going, mut staying): (Vec<_>, Vec<_>) = clients
            .list()
            .into_iter()
            .filter(|client| memory_of(client) > 0)
            .partition(|client| client.is_evicted());
        let mut promised: u64 = going.iter().map(memory_of).sum();
        let wanted = wanted();
        staying.retain(|client| memory_of(client) > LITTLE_BYTES && kind(client));
        staying.sort_by_key(|client| std::cmp::Reverse(memory_of(client)));
        for client in staying {
            if promised >= wanted {
                break;
            }
            let bytes = memory_of(&client);
            promised += bytes;
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

fn change(sum: &AtomicU64, before: u64, now: u64) {
    if now >= before {
        sum.fetch_add(now - before, Ordering::Relaxed);
    } else {
        sum.fetch_sub(before - now, Ordering::Relaxed);
    }
}

fn memory_of(client: &Arc<Client>) -> u64 {
    client.memory.load(Ordering::Relaxed)
}

/// Whether a client has read none of its replies for a while, or said nothing though it is waited for.
fn stands_still(client: &Client, seconds: u64) -> bool {
    client.still_since().is_some_and(|since| seconds.saturating_sub(since) >= STILL_SECONDS)
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
        change(&self.budget.in_hand, std::mem::replace(&mut self.bytes, now), now);
        bytes <= FREE_BYTES || !self.budget.is_exceeded()
    }
}

impl Drop for Charge<'_> {
    fn drop(&mut self) {
        change(&self.budget.in_hand, self.bytes, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clients::Seat;
    use std::net::{TcpListener, TcpStream};

    const LIMIT: u64 = 1 << 20;
    const NOW: u64 = 60;

    /// Clients that have so much and did something at that time; who is disconnected when commands have so much in hand.
    fn who_goes(clients: &[(u64, u64)], in_hand: usize) -> Vec<bool> {
        let all = Arc::new(Clients::new(LIMIT));
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let enter = |&(bytes, active): &(u64, u64)| -> Seat {
            let stream =
                TcpStream::connect(listener.local_addr().expect("an address")).expect("a connection");
            let (peer, local) = (stream.peer_addr().expect("a peer"), stream.local_addr().expect("an end"));
            let seat = all.enter(10, stream, peer, local, active).expect("a seat");
            // Replies of those who are busy wait, too, for a moment.
            seat.unread_since.store(active, Ordering::Relaxed);
            all.budget().note(&seat, bytes);
            seat
        };
        let seats: Vec<Seat> = clients.iter().map(enter).collect();
        let mut charge = Charge::new(all.budget());
        charge.grow_to(in_hand);
        all.budget().enforce(&all, 0, NOW);
        seats.iter().map(|seat| seat.is_evicted()).collect()
    }

    #[test]
    fn a_command_that_builds_up_too_much_costs_nobody_who_is_busy_the_connection() {
        let going = who_goes(&[(100 << 10, NOW), (15, 1), (40 << 10, 1), (200 << 10, NOW - 1)], 2 << 20);
        assert_eq!(going, [false, false, true, false], "who stands still goes, unless that helps nobody");
    }

    #[test]
    fn of_those_who_keep_too_much_the_slow_go_first_and_then_the_largest() {
        let (slow, busy) = ((330 << 10, 1), (290 << 10, NOW));
        assert_eq!(who_goes(&[busy, slow, busy, busy], 0), [false, true, false, false]);
        assert_eq!(who_goes(&[busy, slow, (700 << 10, NOW), busy], 0), [false, true, true, false]);
    }
}
