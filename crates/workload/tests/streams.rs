//! Streams: the same every time, apart from each other where they insert, and never about keys that cannot be there.

use farwood_workload::random::mix64;
use farwood_workload::{Chooser, Operation, Stream, StreamError, StreamOptions, Workload};
use proptest::prelude::*;
use std::collections::BTreeSet;

fn stream(workload: &str, options: StreamOptions) -> Stream {
    Stream::new(&workload.parse().expect("a workload"), &options).expect("a valid stream")
}

#[test]
fn a_stream_is_the_same_every_time_and_different_for_others() {
    let options = StreamOptions { client: 2, clients: 5, seed: 11, ..StreamOptions::new(100_000) };
    for workload in Workload::all() {
        let text = workload.to_string();
        let operations = |options| stream(&text, options).take(500).collect::<Vec<_>>();
        assert_eq!(operations(options), operations(options), "{text}");
        if !["load", "fillseq", "readseq"].contains(&text.as_str()) {
            assert_ne!(
                operations(options),
                operations(StreamOptions { seed: 12, ..options }),
                "{text}: seed"
            );
            assert_ne!(
                operations(options),
                operations(StreamOptions { client: 4, ..options }),
                "{text}: client"
            );
        }
    }
}

/// The operations of a seed are part of what a figure means: a change here makes earlier figures incomparable, and must
/// be made on purpose. (So few ranks that the last bit of a logarithm does not matter.)
#[test]
fn streams_do_not_change_from_version_to_version() {
    let digest = |(text, chooser): (&str, &str)| {
        let chooser = Some(chooser.parse().unwrap());
        let options = StreamOptions { client: 1, clients: 4, seed: 1, chooser, ..StreamOptions::new(1000) };
        stream(text, options).take(10_000).fold(0, |digest, operation| {
            let limit = match operation {
                Operation::Scan { limit, .. } | Operation::Iterate { limit } => u64::from(limit),
                _ => 0,
            };
            let word = operation.key().unwrap_or(0) ^ (limit << 32) ^ ((operation.kind() as u64) << 60);
            mix64(digest ^ word)
        })
    };
    let digests = [("ycsb-a", "zipfian:0.99"), ("ycsb-d", "latest"), ("ycsb-e", "uniform")].map(digest);
    let known = [0xb0d2_82b3_da02_6057, 0x73a8_d863_cec9_968e, 0x9734_3be5_edfd_0568];
    assert_eq!(digests, known, "{digests:#x?}");
}

/// Popular keys are those of the seed, not of the client: or clients would not contend.
#[test]
fn clients_agree_on_the_popular_keys() {
    let hottest = |client| {
        let options = StreamOptions { client, clients: 3, ..StreamOptions::new(1000) };
        let mut counts = vec![0; 1000];
        for operation in stream("ycsb-c", options).take(10_000) {
            counts[usize::try_from(operation.key().unwrap()).unwrap()] += 1;
        }
        (0..1000).max_by_key(|key| counts[*key]).unwrap()
    };
    assert_eq!(hottest(0), hottest(1));
    assert_eq!(hottest(1), hottest(2));
}

#[test]
fn loading_inserts_every_key_once_and_ends() {
    for (keys, clients) in [(1, 1), (10, 3), (1000, 7), (3, 8)] {
        let mut inserted: Vec<u64> = (0..clients)
            .flat_map(|client| stream("load", StreamOptions { client, clients, ..StreamOptions::new(keys) }))
            .map(|operation| match operation {
                Operation::Insert(key) => key,
                other => panic!("{other:?}"),
            })
            .collect();
        inserted.sort_unstable();
        assert!(inserted.into_iter().eq(0..keys), "{keys} keys, {clients} clients");
    }
}

#[test]
fn versions_are_unique_and_not_zero() {
    let mut versions = BTreeSet::from([0]);
    for client in 0..3 {
        let mut stream = stream("ycsb-a", StreamOptions { client, clients: 3, ..StreamOptions::new(10) });
        for issued in 1..=100 {
            stream.next();
            assert_eq!(stream.issued(), issued);
            assert!(versions.insert(stream.version()), "{} twice", stream.version());
        }
    }
    assert_eq!(versions.last(), Some(&300), "dense, so that they fit where there is little room");
}

#[test]
fn impossible_streams_are_refused_with_advice() {
    let refused =
        |text: &str, options: StreamOptions| Stream::new(&text.parse().unwrap(), &options).unwrap_err();
    let one = StreamOptions::new(10);
    for keys in [0, u64::MAX] {
        assert_eq!(refused("ycsb-a", StreamOptions::new(keys)), StreamError::Keys(keys));
    }
    for (client, clients) in [(1, 1), (0, 0), (9, 3)] {
        let error = refused("ycsb-a", StreamOptions { client, clients, ..one });
        assert_eq!(error, StreamError::Client { client, clients });
    }
    let error = refused("range-write", one);
    assert_eq!(error, StreamError::TooFewClients { clients: 1, roles: 2 });
    assert!(error.to_string().contains("at least 2"), "{error}");
    let error = refused("ycsb-d", StreamOptions { insert_from: Some(9), ..one });
    assert_eq!(error, StreamError::InsertFrom { insert_from: 9, keys: 10 });
    let chooser = Chooser::Latest { theta: -1.0 };
    assert_eq!(
        refused("ycsb-d", StreamOptions { chooser: Some(chooser), ..one }),
        StreamError::Chooser(chooser)
    );
}

fn choosers() -> impl Strategy<Value = Chooser> {
    let theta = prop_oneof![Just(0.0), Just(0.99), Just(1.0), 0.0..2.0];
    prop_oneof![
        Just(Chooser::Uniform),
        Just(Chooser::Sequential),
        theta.clone().prop_map(|theta| Chooser::Latest { theta }),
        (theta, proptest::option::of(1u64..10_000))
            .prop_map(|(theta, ranks)| Chooser::Zipfian { theta, ranks }),
    ]
}

proptest! {
    /// No client inserts a loaded key or another's; each addresses, at every moment, only keys that were loaded or that it
    /// has inserted itself.
    #[test]
    fn operations_are_about_keys_that_can_be_there(
        keys in 1u64..200, clients in 1u64..5, gap in 0u64..1000, seed: u64, chooser in choosers(),
    ) {
        let mut everybodys = BTreeSet::new();
        for client in 0..clients {
            let options = StreamOptions {
                chooser: Some(chooser), seed, client, clients, insert_from: Some(keys + gap), ..StreamOptions::new(keys)
            };
            let mut own = BTreeSet::new();
            for operation in stream("get=2,put=1,insert=3,delete=1,scan=1:5,rmw=1,cas=1,iterate=1:3", options).take(300) {
                match operation {
                    Operation::Insert(key) => {
                        prop_assert!(key >= keys + gap, "{key} is loaded, or of an earlier run");
                        prop_assert!(everybodys.insert(key), "{key} is inserted twice");
                        own.insert(key);
                    }
                    Operation::Iterate { .. } => {}
                    other => {
                        let key = other.key().unwrap();
                        prop_assert!(key < keys || own.contains(&key), "{other:?}: nobody has inserted that");
                    }
                }
            }
        }
    }

    /// Choosers that know of inserted keys do draw them.
    #[test]
    fn own_insertions_are_read(seed: u64) {
        for chooser in [Chooser::Uniform, Chooser::Latest { theta: 0.99 }] {
            let options = StreamOptions { chooser: Some(chooser), seed, client: 1, clients: 2, ..StreamOptions::new(10) };
            let reads = stream("get=1,insert=1", options).take(1000).filter(|operation| matches!(operation, Operation::Get(11..)));
            prop_assert!(reads.count() > 100);
        }
    }
}
