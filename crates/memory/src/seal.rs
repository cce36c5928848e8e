//! What only the coordinator can have said: seals on its decisions, which clients carry to the other servers.
//!
//! Servers do not talk to each other. What the coordinator has decided (a session was opened, a victim may be fenced, who adopts it, an
//! index was dropped) comes to the others by clients, any of which may be wrong. So the coordinator adds a keyed hash of its decision, and
//! the others check it: SipHash-2-4, whose key is a secret that all servers of a pool have. A client that lacks the secret
//! would have to guess 64 bits, one call for each guess. Clients that know the token and a pool without a secret of its own can compute the
//! key; then seals keep out whatever is wrong, and not whoever is bent on harm. The other way goes one
//! thing only: a server that has released a dropped index seals that, so that the coordinator forgets no index that has chunks elsewhere.
//!
//! A seal never expires, so nothing is sealed that could come to mean something else: terms and numbers of indexes are used once,
//! and all are those of one memory of the coordinator (its incarnation) and of one pool: the key is derived from the secret and the
//! pool's id, since several pools may have one secret.

use crate::layout::low_half;
use farwood_fabric::addr::{ServerId, SessionId};
use farwood_fabric::control::IndexId;
use farwood_fabric::region::PoolId;
use std::fmt;

/// What the servers of a pool know, and clients do not.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Secret([u64; 2]);

impl Secret {
    /// From the bytes that all servers of a pool are given.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let mut words = vec![bytes.len() as u64];
        words.extend(bytes.chunks(8).map(|part| {
            let mut word = [0; 8];
            word[..part.len()].copy_from_slice(part);
            u64::from_le_bytes(word)
        }));
        Self([siphash([1, 1], &words), siphash([2, 2], &words)])
    }

    /// The one that the servers of this pool seal with: other pools may have been given the same bytes.
    #[must_use]
    pub fn of_pool(self, pool: PoolId) -> Self {
        let halves = [pool.0, pool.0 >> 64].map(low_half);
        Self([3, 4].map(|number| siphash(self.0, &[number, halves[0], halves[1]])))
    }

    fn seal(self, what: What, coordinator: u32, words: [u64; 4]) -> u64 {
        let [a, b, c, d] = words;
        siphash(self.0, &[what as u64, u64::from(coordinator), a, b, c, d])
    }

    /// What a session proves itself by.
    pub fn ticket(self, coordinator: u32, session: SessionId, term: u64) -> u64 {
        self.seal(What::Ticket, coordinator, [u64::from(session.get()), term, 0, 0])
    }

    /// A session was opened, and how.
    pub fn opened(self, coordinator: u32, session: SessionId, opened: Opened<'_>) -> u64 {
        let Opened { term, read_only, next_index, incarnation, indexes } = opened;
        let who = u64::from(session.get()) | u64::from(read_only) << 16;
        let numbers = u64::from(next_index) | u64::from(incarnation) << 32;
        let indexes: Vec<u64> = indexes.iter().map(|index| u64::from(*index)).collect();
        self.seal(What::Opened, coordinator, [who, term, numbers, siphash(self.0, &indexes)])
    }

    /// A session is to be fenced everywhere.
    pub fn fence(self, coordinator: u32, victim: SessionId, term: u64) -> u64 {
        self.seal(What::Fence, coordinator, [u64::from(victim.get()), term, 0, 0])
    }

    /// A fenced session is adopted by this holder of another number.
    pub fn adoption(
        self,
        coordinator: u32,
        (victim, term): (SessionId, u64),
        (by, by_term): (SessionId, u64),
    ) -> u64 {
        let words = [u64::from(victim.get()), term, u64::from(by.get()), by_term];
        self.seal(What::Adoption, coordinator, words)
    }

    /// This server has released a dropped index. The one thing that another server than the coordinator seals.
    pub fn released_by(self, coordinator: u32, index: IndexId, server: ServerId) -> u64 {
        self.seal(What::ReleasedBy, coordinator, [u64::from(index), u64::from(server.get()), 0, 0])
    }

    /// An index is out of use for the repair by this session.
    pub fn offline(self, coordinator: u32, index: IndexId, (by, term): (SessionId, u64)) -> u64 {
        self.seal(What::Offline, coordinator, [u64::from(index), u64::from(by.get()), term, 0])
    }

    /// An index was dropped, and every session has let go of it.
    pub fn released(self, coordinator: u32, index: IndexId) -> u64 {
        self.seal(What::Released, coordinator, [u64::from(index), 0, 0, 0])
    }
}

/// Not to be read in a log.
impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// What the coordinator says of a session that it has opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Opened<'a> {
    /// Its term.
    pub term: u64,
    /// It may only read.
    pub read_only: bool,
    /// The number that the next index gets.
    pub next_index: IndexId,
    /// The incarnation of another server's memory that was there when this was said; 0: of none.
    pub incarnation: u32,
    /// For such a memory: the numbers of all indexes.
    pub indexes: &'a [IndexId],
}

/// So that a seal on one thing is none on another.
#[derive(Clone, Copy, Debug)]
enum What {
    Ticket = 1,
    Opened,
    Fence,
    Adoption,
    Released,
    ReleasedBy,
    Offline = 30,
}

/// SipHash-2-4 of words, each as eight bytes, the low one first (Aumasson and Bernstein, 2012).
fn siphash([k0, k1]: [u64; 2], words: &[u64]) -> u64 {
    let mut v = [
        k0 ^ 0x736f_6d65_7073_6575,
        k1 ^ 0x646f_7261_6e64_6f6d,
        k0 ^ 0x6c79_6765_6e65_7261,
        k1 ^ 0x7465_6462_7974_6573,
    ];
    let length = (words.len() as u64) << 59;
    for word in words.iter().copied().chain([length]) {
        v[3] ^= word;
        round(&mut v);
        round(&mut v);
        v[0] ^= word;
    }
    v[2] ^= 0xff;
    (0..4).for_each(|_| round(&mut v));
    v[0] ^ v[1] ^ v[2] ^ v[3]
}

fn round(v: &mut [u64; 4]) {
    v[0] = v[0].wrapping_add(v[1]);
    v[1] = v[1].rotate_left(13) ^ v[0];
    v[0] = v[0].rotate_left(32);
    v[2] = v[2].wrapping_add(v[3]);
    v[3] = v[3].rotate_left(16) ^ v[2];
    v[0] = v[0].wrapping_add(v[3]);
    v[3] = v[3].rotate_left(21) ^ v[0];
    v[2] = v[2].wrapping_add(v[1]);
    v[1] = v[1].rotate_left(17) ^ v[2];
    v[2] = v[2].rotate_left(32);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// From the authors' list of test vectors: the key is 00 01 ... 0f, the message 8 and 0 bytes of 00 01 ...
    #[test]
    fn it_is_siphash() {
        let key = [0x0706_0504_0302_0100, 0x0f0e_0d0c_0b0a_0908];
        assert_eq!(siphash(key, &[0x0706_0504_0302_0100]), 0x93f5_f579_9a93_2462);
        assert_eq!(siphash(key, &[]), 0x726f_db47_dd0e_0e31);
    }

    #[test]
    fn a_seal_is_for_one_thing() {
        let (a, b) = (Secret::from_bytes(b"token"), Secret::from_bytes(b"token\0"));
        let (one, two) = (SessionId::new(1), SessionId::new(2));
        let opened = Opened { term: 3, read_only: true, next_index: 1, incarnation: 0, indexes: &[] };
        let mut seals = vec![
            a.ticket(7, one, 3),
            a.ticket(8, one, 3),
            a.ticket(7, one, 4),
            a.ticket(7, two, 3),
            b.ticket(7, one, 3),
            a.of_pool(PoolId(1)).ticket(7, one, 3),
            a.of_pool(PoolId(1 << 64)).ticket(7, one, 3),
            a.fence(7, one, 3),
            a.adoption(7, (one, 3), (two, 4)),
            a.adoption(7, (one, 3), (two, 5)),
            a.released(7, 3),
            a.released_by(7, 3, ServerId::new(1)),
            a.released_by(7, 3, ServerId::new(2)),
            a.opened(7, one, opened),
            a.opened(7, one, Opened { read_only: false, ..opened }),
            a.opened(7, one, Opened { next_index: 2, ..opened }),
            a.opened(7, one, Opened { incarnation: 1, ..opened }),
            a.opened(7, one, Opened { indexes: &[1], ..opened }),
            a.opened(7, one, Opened { indexes: &[1, 2], ..opened }),
        ];
        let count = seals.len();
        seals.sort_unstable();
        seals.dedup();
        assert_eq!(seals.len(), count);
    }
}
