//! Choosers draw what their definition says: frequencies against the closed form, at the head and in the tail.

mod common;

use common::{assert_fits, harmonic};
use farwood_workload::random::Random;
use farwood_workload::zipf::Zipf;
use farwood_workload::{BadText, Chooser, Operation, Stream, StreamOptions, Workload};
use proptest::prelude::*;

const DRAWS: u64 = 1_000_000;

/// Ends of bins over ranks: the first ranks one by one, then wider and wider ones; none with fewer than 50 expected draws.
fn bins(n: u64, theta: f64) -> (Vec<u64>, Vec<f64>) {
    let all = harmonic(n, theta);
    let (mut ends, mut parts) = (vec![], vec![]);
    let (mut begin, mut width) = (0, 1);
    while begin < n {
        let end = (begin + width).min(n);
        let part = (harmonic(end, theta) - harmonic(begin, theta)) / all;
        if part * DRAWS as f64 >= 50.0 {
            ends.push(end);
            parts.push(part);
            begin = end;
        } else if end == n {
            // A last bin that is too small joins the one before it.
            *ends.last_mut().expect("a bin before it") = n;
            *parts.last_mut().expect("a bin before it") += part;
            begin = n;
        }
        if ends.len() > 20 || part * (DRAWS as f64) < 50.0 {
            width += width.div_ceil(3);
        }
    }
    (ends, parts)
}

#[test]
fn ranks_follow_zipfs_law() {
    for theta in [0.0, 0.5, 0.9, 0.99, 1.0, 1.2, 1.9] {
        for n in [2, 10, 1000, 100_000, 1_000_000_000] {
            let (ends, parts) = bins(n, theta);
            if ends.len() < 2 {
                continue;
            }
            let zipf = Zipf::new(theta, n).unwrap();
            let mut random = Random::new(20_240_601, n);
            let mut counts = vec![0; ends.len()];
            for _ in 0..DRAWS {
                let rank = zipf.draw(&mut random);
                assert!((1..=n).contains(&rank));
                counts[ends.partition_point(|end| *end < rank)] += 1;
            }
            assert_fits(&format!("zipfian:{theta}@{n}"), &counts, &parts);
        }
    }
}

/// How often each key is read, by one client.
fn counts(chooser: &str, keys: u64, draws: usize) -> Vec<u64> {
    let options = StreamOptions {
        chooser: Some(chooser.parse().expect("a chooser")),
        seed: 5,
        ..StreamOptions::new(keys)
    };
    let stream = Stream::new(&"get=1".parse().expect("a mix"), &options).expect("a valid stream");
    let mut counts = vec![0; usize::try_from(keys).expect("few keys")];
    for operation in stream.take(draws) {
        counts[usize::try_from(operation.key().expect("a get has one")).expect("few keys")] += 1;
    }
    counts
}

#[test]
fn uniform_is_uniform() {
    assert_fits("uniform", &counts("uniform", 1000, 1_000_000), &vec![0.001; 1000]);
    assert_fits("zipfian:0", &counts("zipfian:0", 1000, 1_000_000), &vec![0.001; 1000]);
}

/// Sorted, the frequencies of the keys are those of the ranks: no two ranks share a key, none is lost.
#[test]
fn scrambling_changes_only_which_keys_are_popular() {
    let mut sorted = counts("zipfian:0.99", 50, 1_000_000);
    assert_ne!(
        sorted.iter().position(|count| count == sorted.iter().max().unwrap()),
        Some(0),
        "not scrambled"
    );
    sorted.sort_unstable_by(|a, b| b.cmp(a));
    let all = harmonic(50, 0.99);
    let parts: Vec<f64> = (1..=50).map(|k| f64::from(k).powf(-0.99) / all).collect();
    // Sorting moves neighbours only where chance has swapped them; the first ten ranks are far enough apart to be checked.
    for (rank, (count, part)) in sorted.iter().zip(&parts).enumerate().take(10) {
        let expected = part * 1e6;
        assert!(
            (*count as f64 - expected).abs() < 5.0 * expected.sqrt(),
            "rank {rank}: {count} of {expected}"
        );
    }
    assert!(*sorted.last().unwrap() > 3000, "a key that no rank stands for: {sorted:?}");
}

/// The hundred most popular of 100 000 keys lie anywhere: each tenth of the keys has some, and they are no neighbours.
#[test]
fn popular_keys_are_scattered() {
    let counts = counts("zipfian:0.99", 100_000, 500_000);
    let mut popular: Vec<usize> = (0..counts.len()).collect();
    popular.sort_unstable_by_key(|key| std::cmp::Reverse(counts[*key]));
    popular.truncate(100);
    let mut tenths = [0; 10];
    for key in &popular {
        tenths[key / 10_000] += 1;
    }
    assert!(tenths.iter().all(|count| (1..=25).contains(count)), "{tenths:?}");
    popular.sort_unstable();
    let neighbours = popular.windows(2).filter(|pair| pair[1] - pair[0] < 10).count();
    assert!(neighbours < 10, "{neighbours} of 100 are neighbours");
}

#[test]
fn folded_ranks_keep_the_heat_of_the_larger_set() {
    // Key k of 20 stands for the ranks k + 1, k + 21, k + 41 and so on, of 1000.
    let all = harmonic(1000, 0.99);
    let heat = |key: u32| (0..50).map(|fold| f64::from(key + 1 + 20 * fold).powf(-0.99) / all).sum::<f64>();
    let mut parts: Vec<f64> = (0..20).map(heat).collect();
    // Which key a rank stands for does not depend on the number of ranks: take the order from a steep law.
    let steep = counts("zipfian:2", 20, 2_000_000);
    let mut order: Vec<usize> = (0..20).collect();
    order.sort_unstable_by_key(|key| std::cmp::Reverse(steep[*key]));
    let folded = counts("zipfian:0.99@1000", 20, 1_000_000);
    let by_rank: Vec<u64> = order.iter().map(|key| folded[*key]).collect();
    assert_fits("zipfian:0.99@1000 on 20 keys", &by_rank, &parts);
    // Without folding the hottest key would be hotter by far.
    parts[0] = 1.0 / harmonic(20, 0.99);
    assert!(by_rank[0] as f64 / 1e6 < 0.8 * parts[0]);
}

/// 10^9 ranks on 10^6 keys, as for the papers: the hottest key has the share that it has among 10^9.
#[test]
fn the_hottest_key_is_as_hot_as_in_the_paper() {
    let hottest = |chooser| *counts(chooser, 1_000_000, 2_000_000).iter().max().unwrap() as f64 / 2e6;
    let expected = 1.0 / harmonic(1_000_000_000, 0.99);
    let folded = hottest("zipfian:0.99@1e9");
    assert!((folded / expected - 1.0).abs() < 0.02, "{folded} instead of {expected}");
    let plain = hottest("zipfian:0.99");
    assert!(plain > 1.4 * folded, "{plain} against {folded}: the example in the documentation");
}

#[test]
fn fewer_ranks_than_keys_choose_only_so_many() {
    let touched = counts("zipfian:0.5@10", 1000, 10_000).iter().filter(|count| **count > 0).count();
    assert_eq!(touched, 10);
}

/// Without insertions: Zipf's law counted from the last loaded key.
#[test]
fn latest_prefers_the_last_keys() {
    let mut counts = counts("latest", 100, 1_000_000);
    counts.reverse();
    let all = harmonic(100, 0.99);
    let parts: Vec<f64> = (1..=100).map(|k| f64::from(k).powf(-0.99) / all).collect();
    assert_fits("latest", &counts, &parts);
}

/// With insertions, the age of what is read follows the law at every moment; here over the first ages, where the slowly
/// growing number of keys hardly matters.
#[test]
fn latest_moves_along_with_the_insertions() {
    let options = StreamOptions { client: 1, clients: 4, seed: 9, ..StreamOptions::new(10_000) };
    let stream = Stream::new(&"ycsb-d".parse().unwrap(), &options).unwrap();
    let (mut inserted, mut ages, mut reads) = (vec![], vec![0u64; 20], 0u64);
    for operation in stream.take(1_000_000) {
        match operation {
            Operation::Insert(key) => inserted.push(key),
            Operation::Get(key) if inserted.len() >= 20 => {
                reads += 1;
                let newest = inserted.iter().rev().take(20).position(|newer| *newer == key);
                newest.map(|age| ages[age] += 1).unwrap_or_default();
            }
            _ => {}
        }
    }
    let read: u64 = ages.iter().sum();
    let shares: f64 = (1..=20).map(|k| f64::from(k).powf(-0.99)).sum();
    let parts: Vec<f64> = (1..=20).map(|k| f64::from(k).powf(-0.99) / shares).collect();
    assert_fits("latest, by age", &ages, &parts);
    // Between 10 000 and 60 000 keys, the twenty newest have between 34% and 29% of the reads.
    let part = read as f64 / reads as f64;
    let expected = |n| harmonic(20, 0.99) / harmonic(n, 0.99);
    assert!(part < expected(10_000) && part > expected(60_000), "{part}");
}

#[test]
fn sequential_clients_cover_all_keys_in_order() {
    let mut seen = vec![];
    for client in 0..3 {
        let options = StreamOptions {
            chooser: Some(Chooser::Sequential),
            client,
            clients: 3,
            ..StreamOptions::new(10)
        };
        let stream = Stream::new(&"get=1".parse().unwrap(), &options).unwrap();
        let keys: Vec<u64> = stream.map(|operation| operation.key().unwrap()).take(8).collect();
        let part: Vec<u64> = (0..10).filter(|key| key % 3 == client).collect();
        assert!(keys.iter().eq(part.iter().cycle().take(8)), "client {client}: {keys:?}");
        seen.extend(part);
    }
    seen.sort_unstable();
    assert!(seen.into_iter().eq(0..10));
}

#[test]
fn bad_choosers_are_refused_with_advice() {
    for text in [
        "",
        "zipf",
        "zipfian",
        "zipfian:",
        "zipfian:x",
        "zipfian:-1",
        "zipfian:NaN",
        "zipfian:inf",
        "zipfian:11",
        "zipfian:0.99@",
        "zipfian:0.99@0",
        "zipfian:0.99@1e17",
        "uniform:1",
        "latest:",
        "sequential:3",
    ] {
        let error = text.parse::<Chooser>().unwrap_err();
        assert_eq!(error, BadText::Chooser(text.to_owned()));
        assert!(error.to_string().contains("zipfian:0.99@1e9"), "{error}");
    }
    let workload: Workload = "ycsb-c".parse().unwrap();
    for (theta, ranks) in [(f64::NAN, None), (-1.0, None), (0.99, Some(0))] {
        let options =
            StreamOptions { chooser: Some(Chooser::Zipfian { theta, ranks }), ..StreamOptions::new(10) };
        assert!(Stream::new(&workload, &options).is_err());
    }
}

proptest! {
    #[test]
    fn choosers_survive_their_text(theta in 0.0f64..10.0, ranks in proptest::option::of(1u64..1 << 53)) {
        let choosers = [
            Chooser::Uniform,
            Chooser::Sequential,
            Chooser::Latest { theta },
            Chooser::Latest { theta: 0.99 },
            Chooser::Zipfian { theta, ranks },
        ];
        for chooser in choosers {
            prop_assert_eq!(chooser.to_string().parse(), Ok(chooser));
        }
    }
}
