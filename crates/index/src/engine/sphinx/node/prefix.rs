//! Hashes of all prefixes of a key in one pass, and the servers that follow from them. Pure.
//!
//! They are seeded by the index, from a random number in its anchor.

use crate::engine::sphinx::filter::PrefixHash;
use farwood_fabric::ServerId;
use smallvec::SmallVec;
use std::cell::OnceCell;

/// The hashes of a key's prefixes, the empty one and the key itself included. They are computed when they are asked for: who finds the
/// key's leaf by looking needs none.
#[derive(Debug)]
pub(in super::super) struct Prefixes<'a> {
    seed: u64,
    key: &'a [u8],
    hashes: OnceCell<SmallVec<[u64; 40]>>,
}

impl<'a> Prefixes<'a> {
    pub(in super::super) fn of(seed: u64, key: &'a [u8]) -> Self {
        Self { seed, key, hashes: OnceCell::new() }
    }

    /// The hash of the first `len` bytes; `None` if the key is shorter. Who asks for one needs no list.
    pub(in super::super) fn get(&self, len: usize) -> Option<u64> {
        match self.hashes.get() {
            Some(hashes) => hashes.get(len).copied(),
            None => self.key.get(..len).map(|prefix| hash(self.seed, prefix)),
        }
    }

    /// The hash of the key.
    pub(in super::super) fn whole(&self) -> u64 {
        self.get(self.key.len()).unwrap_or(0)
    }

    /// All of them, by length.
    pub(in super::super) fn all(&self) -> &[u64] {
        self.hashes.get_or_init(|| {
            let mut hashes = SmallVec::with_capacity(self.key.len() + 1);
            let mut hash = PrefixHash::seeded(self.seed);
            hashes.push(hash.get());
            for byte in self.key {
                hash = hash.extended(*byte);
                hashes.push(hash.get());
            }
            hashes
        })
    }
}

/// The hash of one prefix.
pub(in super::super) fn hash(seed: u64, prefix: &[u8]) -> u64 {
    prefix.iter().fold(PrefixHash::seeded(seed), |hash, byte| hash.extended(*byte)).get()
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
        let all = Prefixes::of(5, &key);
        // One by one, and from the list.
        for _ in 0..2 {
            for len in [0, 1, 8, 4095, 4096] {
                assert_eq!(all.get(len), Some(hash(5, &key[..len])));
            }
            assert_eq!((all.get(4097), all.whole()), (None, hash(5, &key)));
            assert_eq!(all.all().len(), 4097);
        }
        let zeros = Prefixes::of(5, &[0; 4096]);
        // The first byte of both is 0.
        let distinct: BTreeSet<u64> = all.all().iter().chain(&zeros.all()[2..]).copied().collect();
        assert_eq!(distinct.len(), 2 * 4096);
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
