//! Hashes of all prefixes of a key in one pass, and the servers that follow from them. Pure.
//!
//! A hash is the state of a chain of folded multiplications (as in wyhash), one a byte, so that each prefix's follows from
//! the one before it. They are seeded by the index, from a random number in its anchor.

use farwood_fabric::ServerId;
use smallvec::SmallVec;

const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
const FIRST: u64 = 0xa076_1d64_78bd_642f;

/// The hashes of a key's prefixes, the empty one and the key itself included.
#[derive(Debug)]
pub(in super::super) struct Prefixes(SmallVec<[u64; 40]>);

fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    let high = u64::try_from(product >> 64).unwrap_or(0);
    let low = u64::try_from(product & u128::from(u64::MAX)).unwrap_or(0);
    high ^ low
}

fn begin(seed: u64) -> u64 {
    fold(seed ^ FIRST, FACTOR)
}

fn next(state: u64, byte: u8) -> u64 {
    // Added, not only multiplied: a state of zero must not stay one.
    fold(state ^ (u64::from(byte) + 1).wrapping_mul(FIRST), FACTOR).wrapping_add(state.rotate_left(29))
}

impl Prefixes {
    pub(in super::super) fn new(seed: u64, key: &[u8]) -> Self {
        let mut hashes = SmallVec::with_capacity(key.len() + 1);
        let mut state = begin(seed);
        hashes.push(state);
        for byte in key {
            state = next(state, *byte);
            hashes.push(state);
        }
        Self(hashes)
    }

    /// The hash of the first `len` bytes; `None` if the key is shorter.
    pub(in super::super) fn get(&self, len: usize) -> Option<u64> {
        self.0.get(len).copied()
    }

    /// The hash of the key.
    pub(in super::super) fn whole(&self) -> u64 {
        self.0.last().copied().unwrap_or(0)
    }

    /// All of them, by length.
    pub(in super::super) fn all(&self) -> &[u64] {
        &self.0
    }
}

/// The hash of one prefix.
pub(in super::super) fn hash(seed: u64, prefix: &[u8]) -> u64 {
    prefix.iter().fold(begin(seed), |state, byte| next(state, *byte))
}

/// The server for what has this hash: consistent hashing, in the form of a jump hash (Lamping and Veach, 2014), so that a pool with
/// one server more would move only that server's share.
pub(in super::super) fn server_of(hash: u64, servers: &[ServerId]) -> ServerId {
    let count = servers.len() as u64;
    let (mut key, mut at, mut next) = (hash, 0u64, 0u64);
    while next < count {
        at = next;
        key = key.wrapping_mul(2_862_933_555_777_941_757).wrapping_add(1);
        let share = (key >> 33) + 1;
        next = ((at + 1) << 31) / share;
    }
    usize::try_from(at).ok().and_then(|at| servers.get(at)).copied().unwrap_or(ServerId::COORDINATOR)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn hashes_of_prefixes_follow_from_each_other_and_differ() {
        let key: Vec<u8> = (0..4096u32).map(|n| u8::try_from(n % 7).unwrap_or(0)).collect();
        let all = Prefixes::new(5, &key);
        for len in [0, 1, 8, 4095, 4096] {
            assert_eq!(all.get(len), Some(hash(5, &key[..len])));
        }
        assert_eq!((all.get(4097), all.whole()), (None, hash(5, &key)));
        let zeros = Prefixes::new(5, &[0; 4096]);
        let distinct: BTreeSet<u64> = all.all().iter().chain(&zeros.all()[1..]).copied().collect();
        assert_eq!(distinct.len(), 2 * 4096 + 1);
        assert_ne!(hash(5, b"a"), hash(6, b"a"));
    }

    #[test]
    fn servers_have_equal_shares_and_a_new_one_takes_only_its_own() {
        let servers: Vec<ServerId> = (0..5).map(ServerId::new).collect();
        let mut shares = [0u32; 5];
        for n in 0..50_000u64 {
            let hash = hash(1, &n.to_be_bytes());
            let (of_four, of_five) = (server_of(hash, &servers[..4]), server_of(hash, &servers));
            assert!(of_four == of_five || of_five == servers[4]);
            shares[of_five.index()] += 1;
        }
        assert!(shares.iter().all(|share| (9_500..10_500).contains(share)), "{shares:?}");
    }
}
