//! Key sets: keys differ by construction, lie in the order they should, and lead back to their number.

mod common;

use common::assert_fits;
use farwood_workload::keys::email::MAX_EMAIL_BYTES;
use farwood_workload::{BadText, KeyKind, KeySet};
use proptest::prelude::*;
use std::collections::BTreeSet;

fn set(text: &str, seed: u64) -> KeySet {
    KeySet::new(text.parse().expect("a key set"), seed)
}

#[test]
fn u64_keys_look_random() {
    let keys = set("u64", 1);
    let mut counts = [0; 256];
    let mut last = [0; 256];
    for index in 0..1_000_000 {
        let key = keys.key_u64(index).unwrap().to_be_bytes();
        counts[usize::from(key[0])] += 1;
        last[usize::from(key[7])] += 1;
    }
    assert_fits("first bytes of u64 keys", &counts, &[1.0 / 256.0; 256]);
    assert_fits("last bytes of u64 keys", &last, &[1.0 / 256.0; 256]);
    assert_ne!(set("u64", 1).key_u64(5), set("u64", 2).key_u64(5), "seeds have different keys");
    assert_eq!(set("u64", 1).key_u64(5), set("u64", 1).key_u64(5));
}

/// 2 to 32 bytes, 18.93 on average (Sphinx, section V.A), for small and large key counts alike; all different.
#[test]
fn emails_have_the_lengths_of_the_data_set_and_differ() {
    let (mut buffer, mut sizes) = (vec![], BTreeSet::new());
    for (seed, first, count) in [(1, 0, 1_000_000), (2, 0, 20_000), (3, 60_000_000, 100_000)] {
        let emails = set("email", seed);
        let mut all: Vec<Box<[u8]>> =
            (first..first + count).map(|index| emails.key(index, &mut buffer).into()).collect();
        let bytes: usize = all.iter().map(|address| address.len()).sum();
        let mean = bytes as f64 / count as f64;
        println!("{count} addresses from {first}: {mean:.3} bytes on average");
        assert!((mean - 18.93).abs() < 0.1, "{mean}");
        sizes.extend(all.iter().map(|address| address.len()));
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len() as u64, count, "all different");
    }
    println!("lengths: {sizes:?}");
    assert!(*sizes.first().unwrap() >= 2 && *sizes.first().unwrap() <= 4, "short ones: {sizes:?}");
    assert_eq!(sizes.last(), Some(&MAX_EMAIL_BYTES));
}

/// Of 10^8 addresses a hundred have two bytes; found by way of their text.
#[test]
fn the_shortest_emails_have_two_bytes() {
    let emails = set("email", 4);
    let index = emails.index_of(b"lo").unwrap();
    assert!(index < 100_000_000);
    assert_eq!(emails.key(index, &mut vec![]), b"lo");
}

/// Keys share beginnings as user names do: in key order, neighbours of 100 000 share several bytes, and the hundred first
/// names lead to far fewer first letters than random bytes would.
#[test]
fn emails_share_beginnings_and_look_like_addresses() {
    let emails = set("email", 1);
    let mut all: Vec<Vec<u8>> = (0..100_000).map(|index| emails.key(index, &mut vec![]).to_vec()).collect();
    let addresses = all.iter().filter(|address| address.contains(&b'@')).count();
    assert!((99_800..100_000).contains(&addresses), "{addresses}");
    let plausible = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"@._".contains(byte);
    assert!(all.iter().flatten().all(plausible));
    let ascending = all.windows(2).filter(|pair| pair[0] < pair[1]).count();
    assert!((49_000..51_000).contains(&ascending), "numbers do not follow the order of keys: {ascending}");
    all.sort_unstable();
    let shared = |pair: &[Vec<u8>]| pair[0].iter().zip(&pair[1]).take_while(|(a, b)| a == b).count();
    let mean = all.windows(2).map(shared).sum::<usize>() as f64 / all.len() as f64;
    assert!((4.0..8.0).contains(&mean), "neighbours share {mean} bytes");
}

#[test]
fn sequential_keys_are_ascending_and_padded() {
    let (mut one, mut two) = (vec![], vec![]);
    let keys = set("sequential:20", 1);
    for index in [0, 1, 255, 256, 65_535, u64::MAX - 1] {
        assert!(keys.key(index, &mut one) < keys.key(index + 1, &mut two));
    }
    assert_eq!(keys.key(258, &mut one), b"\0\0\0\0\0\0\x01\x02000000000000");
    assert_eq!(keys.key_u64(258), Some(258));
    assert_eq!(keys.index_of(b"\0\0\0\0\0\0\x01\x02000000000000"), Some(258));
    for stranger in [&b"\0\0\0\0\0\0\x01\x02"[..], b"\0\0\0\0\0\0\x01\x02000000000001", b"", b"\0\0\0"] {
        assert_eq!(keys.index_of(stranger), None, "{stranger:?}");
    }
}

/// Of e-mail addresses many begin with the same eight bytes, and some end before the eighth.
#[test]
fn sorted_numbers_are_in_the_order_of_their_keys_and_all_there() {
    for kind in ["u64", "u64:20", "sequential", "email"] {
        let keys = set(kind, 3);
        let mut expected: Vec<(Vec<u8>, u64)> =
            (0..50_000).map(|index| (keys.key(index, &mut vec![]).to_vec(), index)).collect();
        expected.sort_unstable();
        let expected: Vec<u64> = expected.into_iter().map(|(_, index)| index).collect();
        assert_eq!(keys.sorted(50_000).collect::<Vec<_>>(), expected, "{kind}");
    }
}

#[test]
fn bad_key_sets_are_refused_with_advice() {
    for text in
        ["", "u32", "u64:", "u64:7", "u64:1025", "u64:x", "email:20", "sequential:-8", "u64:4294967304"]
    {
        let error = text.parse::<KeyKind>().unwrap_err();
        assert_eq!(error, BadText::KeySet(text.to_owned()));
        assert!(error.to_string().contains("sequential"), "{error}");
    }
    for text in ["u64", "u64:9", "sequential", "sequential:1024", "email"] {
        assert_eq!(text.parse::<KeyKind>().unwrap().to_string(), text);
    }
}

proptest! {
    /// A key leads back to its number, for every number: so no two numbers share a key.
    #[test]
    fn keys_lead_back_to_their_number(index: u64, small in 0u64..1_000_000_000, seed: u64) {
        for kind in ["u64", "u64:20", "sequential", "email"] {
            let keys = set(kind, seed);
            for index in [index, small] {
                let mut buffer = vec![];
                let key = keys.key(index, &mut buffer);
                prop_assert_eq!(keys.index_of(key), Some(index), "{} {}", kind, key.escape_ascii());
                if kind == "email" {
                    prop_assert!((2..=MAX_EMAIL_BYTES).contains(&key.len()), "{}", key.escape_ascii());
                } else {
                    prop_assert_eq!(keys.key_u64(index).unwrap().to_be_bytes(), &key[..8]);
                }
            }
        }
    }

    /// Bytes from outside never panic, and lead to a number only if they are its key.
    #[test]
    fn strangers_have_no_number(text in "([a-z.]{0,9}[a-z0-9]{0,6}(\\+[a-z0-9]{0,14})?@(gmail.com|aol.com|x)?)|[a-z0-9]{0,8}", seed: u64) {
        let emails = set("email", seed);
        if let Some(index) = emails.index_of(text.as_bytes()) {
            let mut buffer = vec![];
            prop_assert_eq!(emails.key(index, &mut buffer), text.as_bytes());
        }
    }
}
