//! Passwords that were wrong: whoever guesses gets slower answers.
//!
//! A wrong password is answered late: after a tenth of a second for the first one of an address, twice as long for each further one,
//! up to some seconds. Meanwhile the connection says nothing, and counts as one of its address that is *held*. When [`MAX_HELD`] of one
//! address are, its next attempts are refused without a look at the password: so guessing on many connections at a time does not help either.
//! An address that leaves it be for [`FORGET_NS`] begins anew.

use farwood_fabric::clock::{MILLISECOND, Nanos, SECOND};
use farwood_fabric::rarely::Rarely;
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

const FIRST_DELAY_NS: Nanos = 100 * MILLISECOND;
/// How often the delay doubles.
const MAX_DOUBLINGS: u32 = 6;
/// Connections of one address that wait for their answer; then others of it are not looked at.
const MAX_HELD: u32 = 16;
const FORGET_NS: Nanos = 60 * SECOND;
/// Addresses that are remembered. Beyond that those without a connection that waits are forgotten.
const MAX_ADDRESSES: usize = 4096;

#[derive(Clone, Copy, Default, Debug)]
struct Record {
    failures: u32,
    held: u32,
    last: Nanos,
}

/// What is known of addresses.
#[derive(Default, Debug)]
pub(crate) struct Logins {
    records: Mutex<HashMap<IpAddr, Record>>,
    log: Rarely,
}

/// A connection that waits for the answer to a wrong password.
#[derive(Debug)]
pub(crate) struct Penalty {
    pub(crate) delay_ns: Nanos,
    address: IpAddr,
    logins: Arc<Logins>,
}

impl Drop for Penalty {
    fn drop(&mut self) {
        if let Some(record) = self.logins.lock().get_mut(&self.address) {
            record.held = record.held.saturating_sub(1);
        }
    }
}

impl Logins {
    fn lock(&self) -> MutexGuard<'_, HashMap<IpAddr, Record>> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a password from there is looked at.
    pub(crate) fn may_try(&self, peer: SocketAddr) -> bool {
        self.lock().get(&peer.ip()).is_none_or(|record| record.held < MAX_HELD)
    }

    /// A password was wrong.
    pub(crate) fn failed(self: &Arc<Self>, peer: SocketAddr, now: Nanos) -> Penalty {
        let address = peer.ip();
        let mut records = self.lock();
        if records.len() >= MAX_ADDRESSES && !records.contains_key(&address) {
            records.retain(|_, record| record.held > 0);
        }
        let record = records.entry(address).or_default();
        if now > record.last + FORGET_NS {
            record.failures = 0;
        }
        record.last = now;
        record.failures = record.failures.saturating_add(1);
        record.held += 1;
        let (failures, doublings) = (record.failures, (record.failures - 1).min(MAX_DOUBLINGS));
        drop(records);
        if let Some(more) = self.log.say(now) {
            tracing::warn!("wrong password from {peer}, the {failures}. from there in a row{more}");
        }
        Penalty { delay_ns: FIRST_DELAY_NS << doublings, address, logins: Arc::clone(self) }
    }

    /// A password was right.
    pub(crate) fn succeeded(&self, peer: SocketAddr) {
        if let Some(record) = self.lock().get_mut(&peer.ip()) {
            record.failures = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(n: u32) -> SocketAddr {
        SocketAddr::from((n.to_be_bytes(), 1))
    }

    #[test]
    fn who_guesses_waits_longer_each_time_and_others_do_not() {
        let logins = Arc::<Logins>::default();
        let delays: Vec<_> = (0..9).map(|n| logins.failed(peer(1), n).delay_ns / MILLISECOND).collect();
        assert_eq!(delays, [100, 200, 400, 800, 1600, 3200, 6400, 6400, 6400]);
        assert_eq!(logins.failed(peer(2), 9).delay_ns, FIRST_DELAY_NS);
        logins.succeeded(peer(1));
        assert_eq!(logins.failed(peer(1), 10).delay_ns, FIRST_DELAY_NS);
        logins.failed(peer(1), 11);
        assert_eq!(logins.failed(peer(1), 12 + FORGET_NS).delay_ns, FIRST_DELAY_NS, "long ago");
    }

    #[test]
    fn many_connections_at_a_time_do_not_help() {
        let logins = Arc::<Logins>::default();
        let mut held: Vec<_> = (0..MAX_HELD).map(|_| logins.failed(peer(1), 0)).collect();
        assert!(!logins.may_try(peer(1)) && logins.may_try(peer(2)));
        held.pop();
        assert!(logins.may_try(peer(1)));
    }

    #[test]
    fn the_table_is_bounded() {
        let logins = Arc::<Logins>::default();
        let held = logins.failed(peer(7), 0);
        for n in 0..3 * u32::try_from(MAX_ADDRESSES).expect("few") {
            logins.failed(peer(n), 0);
        }
        let records = logins.lock();
        assert!(records.len() <= MAX_ADDRESSES && records[&peer(7).ip()].held == 1);
        drop((records, held));
    }
}
