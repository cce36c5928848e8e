//! The filter by itself: what it must not forget, how often it may be wrong, who goes first, and many threads at once.

use super::*;
use std::collections::BTreeSet;

/// A number that looks like a hash.
fn hash(n: u64) -> u64 {
    PrefixHash::all(&n.to_be_bytes()).last().unwrap()
}

/// One filter of each shape, with the same number of buckets.
fn filters(buckets: u64) -> [Filter; 2] {
    let [slim, wide] = [None, Some(1)].map(|expected| Filter::new(buckets * 8, expected));
    assert_eq!((slim.shape, wide.shape), (Shape::SLIM, Shape::WIDE));
    [slim, wide]
}

#[test]
fn what_fits_is_never_missing() {
    for filter in filters(10_007) {
        let count = filter.capacity();
        for n in 0..count {
            filter.insert(hash(n));
        }
        let missing = (0..count).filter(|n| !filter.contains(hash(*n))).count();
        assert_eq!(missing, 0, "of {count} in {filter:?}");
        assert!(
            filter.count() <= count && filter.count() > count * 99 / 100,
            "{} of {count}",
            filter.count()
        );
    }
}

#[test]
fn a_full_filter_is_wrong_less_often_than_once_in_a_hundred_checks() {
    for (filter, most_per_million) in filters(50_021).into_iter().zip([5_000, 300]) {
        for n in 0..filter.capacity() {
            filter.insert(hash(n));
        }
        let wrong = (1 << 40..(1 << 40) + 1_000_000u64).filter(|n| filter.contains(hash(*n))).count();
        // Two buckets full of lanes, each with one chance in as many as there are fingerprints.
        assert!(
            (most_per_million / 2..=most_per_million).contains(&wrong),
            "{wrong} of a million in {filter:?}"
        );
    }
}

#[test]
fn the_budget_is_kept_and_chooses_the_fingerprints() {
    for (budget, expected, shape) in [
        (24 << 20, Some(11_900_000), Shape::WIDE),
        (24 << 20, Some(14_600_000), Shape::SLIM),
        (24 << 20, None, Shape::SLIM),
        (0, None, Shape::SLIM),
    ] {
        let filter = Filter::new(budget, expected);
        assert_eq!(filter.shape, shape, "{budget} bytes for {expected:?}");
        assert!(filter.bytes() <= budget.max(8));
    }
    // The inner nodes of 60 M random u64 fit the 24 MB that are meant for them.
    assert!(Filter::new(24_000_000, None).capacity() > 14_200_000);
}

#[test]
fn what_is_hot_outlives_what_is_not() {
    for filter in filters(1_009) {
        let hot = filter.capacity() / 4;
        for n in 0..hot {
            filter.insert(hash(n));
        }
        // Ten times as many pass through as fit, and the hot ones are used now and then.
        for n in hot..filter.capacity() * 10 {
            filter.insert(hash(n));
            let used = n % hot;
            filter.contains(hash(used));
        }
        let kept = (0..hot).filter(|n| filter.contains(hash(*n))).count();
        let passing =
            (filter.capacity() * 5..filter.capacity() * 6).filter(|n| filter.contains(hash(*n))).count();
        assert!(kept as u64 > hot * 95 / 100, "{kept} of {hot} hot ones are left in {filter:?}");
        assert!((passing as u64) < filter.capacity() / 2, "{passing} passed through long ago, and are there");
    }
}

#[test]
fn what_was_hot_once_makes_room_in_the_end() {
    for filter in filters(1_009) {
        let count = filter.capacity();
        for n in 0..count {
            filter.insert(hash(n));
            filter.contains(hash(n));
        }
        // All are hot. Newcomers get in all the same, and if they are used, they stay.
        let mut refused = 0;
        for n in count..4 * count {
            filter.insert(hash(n));
            refused += u64::from(!filter.contains(hash(n)));
        }
        assert!(refused <= count / 100, "{refused} of {count} did not get in");
        let old = (0..count).filter(|n| filter.contains(hash(*n))).count();
        assert!((old as u64) < count / 4, "{old} of {count} that nobody used are still there");
    }
}

#[test]
fn what_is_removed_is_gone_and_nothing_else() {
    for filter in filters(1_009) {
        let count = filter.capacity() / 2;
        for n in 0..count {
            filter.insert(hash(n));
            filter.insert(hash(n));
        }
        for n in 0..count / 2 {
            filter.remove(hash(n));
        }
        assert_eq!(filter.count(), filter.count_by_walk());
        let left = (0..count / 2).filter(|n| filter.contains(hash(*n))).count();
        let missing = (count / 2..count).filter(|n| !filter.contains(hash(*n))).count();
        let few = usize::try_from(count / 100).unwrap();
        assert!(left <= few && missing <= few, "{left} left, {missing} missing of {count} in {filter:?}");
    }
}

#[test]
fn the_longest_prefixes_come_first() {
    let filter = Filter::new(1 << 16, Some(100));
    let key = b"LYRICS";
    let hashes: Vec<u64> = PrefixHash::all(key).collect();
    assert_eq!((hashes.len(), filter.longest(&hashes).count()), (7, 0));
    for prefix in [&b"L"[..], b"LYR", b"LYRIC"] {
        filter.insert(PrefixHash::all(prefix).last().unwrap());
    }
    assert_eq!(filter.longest(&hashes).collect::<Vec<_>>(), [5, 3, 1]);
}

#[test]
fn hashes_of_prefixes_are_all_different_and_even() {
    let mut seen = BTreeSet::new();
    let mut ones = [0u32; 64];
    let keys = (0..20_000u64).map(|n| format!("user{n}@mail{}.example", n % 7));
    for key in keys {
        let mut hash = PrefixHash::EMPTY;
        for byte in key.bytes() {
            hash = hash.extended(byte);
            if seen.insert(hash.get()) {
                (0..64).for_each(|bit| ones[bit] += u32::try_from(hash.get() >> bit & 1).unwrap());
            }
        }
    }
    let prefixes: BTreeSet<String> = (0..20_000u64)
        .flat_map(|n| {
            let key = format!("user{n}@mail{}.example", n % 7);
            (1..=key.len()).map(move |len| key[..len].to_owned()).collect::<Vec<_>>()
        })
        .collect();
    assert_eq!(seen.len(), prefixes.len(), "two prefixes have one hash");
    let half = u32::try_from(seen.len() / 2).unwrap();
    assert!(ones.iter().all(|ones| ones.abs_diff(half) < half / 50), "{half} is half; {ones:?}");
    // Prefixes of zeros, of all lengths, and single bytes in every place: what a weak step would let collide.
    let mut zeros: Vec<u64> = PrefixHash::all(&[0; 4096]).collect();
    for place in 0..64 {
        for byte in 1..=255 {
            let mut key = [0; 64];
            key[place] = byte;
            zeros.extend(PrefixHash::all(&key).last());
        }
    }
    let count = zeros.len();
    // The empty key's and that of 64 zeros are there once.
    assert_eq!(zeros.into_iter().collect::<BTreeSet<_>>().len(), count);
}

#[test]
#[expect(clippy::disallowed_methods, reason = "threads are what is tested")]
fn threads_do_not_make_each_other_forget() {
    const THREADS: u64 = 4;
    for filter in filters(20_011) {
        let filter = std::sync::Arc::new(filter);
        let each = filter.capacity() * 9 / 10 / THREADS;
        let threads: Vec<_> = (0..THREADS)
            .map(|thread| {
                let filter = std::sync::Arc::clone(&filter);
                std::thread::spawn(move || {
                    let mut missing = 0u64;
                    for n in 0..each {
                        let n = n * THREADS + thread;
                        filter.insert(hash(n));
                        // What this thread has put in before, while the others move their neighbours about.
                        missing += u64::from(!filter.contains(hash(n / 2 / THREADS * THREADS + thread)));
                    }
                    missing
                })
            })
            .collect();
        let missing: u64 = threads.into_iter().map(|thread| thread.join().unwrap()).sum();
        assert_eq!(filter.count(), filter.count_by_walk());
        let left = (0..each * THREADS).filter(|n| !filter.contains(hash(*n))).count() as u64;
        // A lane that two threads want at once may go to one that nobody asked; nothing else is lost.
        assert!(
            missing <= each / 100 && left <= each / 100,
            "{missing} and {left} of {} missing",
            each * THREADS
        );
    }
}
