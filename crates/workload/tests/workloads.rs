//! Workloads by name: their mixes against their sources, their texts, and what is said about texts that mean nothing.

mod common;

use common::assert_fits;
use farwood_workload::OperationKind::{
    CompareAndSwap, Delete, Get, Insert, Iterate, Put, ReadModifyWrite, Scan,
};
use farwood_workload::{
    BadText, Mix, Operation, OperationKind, ScanLength, Share, Start, Stream, StreamOptions, Workload,
};
use proptest::prelude::*;
use std::collections::BTreeSet;

/// What the sources say, written down a second time, in percent of all operations of all clients.
const PERCENT: &[(&str, &[(OperationKind, f64)])] = &[
    ("load", &[(Insert, 100.0)]),
    ("ycsb-a", &[(Get, 50.0), (Put, 50.0)]),
    ("ycsb-b", &[(Get, 95.0), (Put, 5.0)]),
    ("ycsb-c", &[(Get, 100.0)]),
    ("ycsb-d", &[(Get, 95.0), (Insert, 5.0)]),
    ("ycsb-e", &[(Scan, 95.0), (Insert, 5.0)]),
    ("ycsb-f", &[(Get, 50.0), (ReadModifyWrite, 50.0)]),
    ("write-only", &[(Put, 66.667), (Insert, 33.333)]),
    ("write-intensive", &[(Get, 50.0), (Put, 33.333), (Insert, 16.667)]),
    ("read-intensive", &[(Get, 95.0), (Put, 3.333), (Insert, 1.667)]),
    ("range-only", &[(Scan, 100.0)]),
    ("range-write", &[(Scan, 50.0), (Put, 33.333), (Insert, 16.667)]),
    ("read-only", &[(Get, 100.0)]),
    ("dex-read-intensive", &[(Get, 95.0), (Put, 5.0)]),
    ("dex-write-intensive", &[(Get, 50.0), (Put, 50.0)]),
    ("insert-intensive", &[(Get, 50.0), (Insert, 50.0)]),
    ("scan-intensive", &[(Scan, 95.0), (Insert, 5.0)]),
    ("dolphin-range-only", &[(Scan, 100.0)]),
    ("dolphin-range-write", &[(Scan, 50.0), (Insert, 50.0)]),
    ("sphinx-d", &[(Get, 95.0), (Put, 5.0)]),
    ("fillseq", &[(Put, 100.0)]),
    ("fillrandom", &[(Put, 100.0)]),
    ("readrandom", &[(Get, 100.0)]),
    ("readrandomwriterandom", &[(Get, 90.0), (Put, 10.0)]),
    ("readseq", &[(Iterate, 100.0)]),
    ("overwrite", &[(Put, 100.0)]),
    ("deleterandom", &[(Delete, 100.0)]),
];

#[test]
fn streams_issue_what_the_sources_say() {
    let names: Vec<&str> = Workload::all().iter().map(|workload| workload.name().unwrap()).collect();
    assert!(names.iter().eq(PERCENT.iter().map(|(name, _)| name)), "{names:?}");
    for (name, percent) in PERCENT {
        let workload: Workload = name.parse().unwrap();
        let mut counts = vec![0; percent.len()];
        for client in 0..4 {
            let options = StreamOptions { client, clients: 4, seed: 3, ..StreamOptions::new(1_000_000) };
            for operation in Stream::new(&workload, &options).unwrap().take(50_000) {
                let kind = operation.kind();
                let at = percent.iter().position(|(expected, _)| *expected == kind);
                counts[at.unwrap_or_else(|| panic!("{name} has no {kind:?}"))] += 1;
            }
        }
        // Halves of the clients are exactly halves, closer than chance would be: nothing to test there but the rest.
        let by_chance = usize::from(*name == "range-write");
        let (counts, percent) = (&counts[by_chance..], &percent[by_chance..]);
        let whole: f64 = percent.iter().map(|(_, part)| part).sum();
        if counts.len() > 1 {
            let parts: Vec<f64> = percent.iter().map(|(_, part)| part / whole).collect();
            assert_fits(name, counts, &parts);
        }
    }
}

#[test]
fn in_range_write_half_of_the_clients_scan_and_the_others_write() {
    let workload: Workload = "range-write".parse().unwrap();
    for client in 0..6 {
        let options = StreamOptions { client, clients: 6, ..StreamOptions::new(1000) };
        let mut stream = Stream::new(&workload, &options).unwrap().take(1000);
        let scans = client % 2 == 0;
        assert!(stream.all(|operation| (operation.kind() == Scan) == scans), "client {client}");
    }
}

#[test]
fn every_workload_says_where_it_comes_from_and_survives_its_text() {
    let mut names = BTreeSet::new();
    for workload in Workload::all() {
        let name = workload.name().unwrap();
        assert!(!workload.source().is_empty(), "{name}");
        assert_eq!(workload.to_string(), name);
        for text in workload.aliases().iter().copied().chain([name]) {
            assert!(names.insert(text), "{text} means two workloads");
            assert_eq!(text.parse(), Ok(workload.clone()), "{text}");
            assert_eq!(text.to_uppercase().parse(), Ok(workload.clone()), "{text}");
        }
        // Its mixes are valid, though nobody parsed them, and mean the same as a custom workload.
        let custom: Workload = workload.mixes().parse().unwrap();
        assert_eq!(custom.roles(), workload.roles(), "{name}");
        for mix in workload.roles() {
            assert_eq!(Mix::new(mix.shares()).as_ref(), Ok(mix), "{name}");
        }
        // Who starts from nothing either inserts all keys, or puts them: nothing else could be found.
        let fills = |mix: &Mix| mix.part(Insert) + mix.part(Put) > 0.999;
        assert!(workload.start() == Start::Loaded || workload.roles().iter().all(fills), "{name}");
    }
}

/// The table in the documentation is the catalog.
#[test]
fn the_documentation_lists_every_workload() {
    let documentation = include_str!("../src/lib.rs");
    for workload in Workload::all() {
        let mixes = workload.mixes().replace('|', "\\|");
        let row = format!("//! | `{workload}` | `{mixes}` | ");
        assert!(documentation.contains(&row), "missing: {row}");
        let row = documentation.lines().find(|line| line.starts_with(&row)).unwrap();
        let chooser = format!("`{}`", workload.chooser());
        let by_words = row.contains("| each once |") || row.contains("| all, ascending |");
        assert!(by_words || row.contains(&chooser), "{row} should have {chooser}");
    }
}

#[test]
fn scan_lengths_are_drawn_from_their_range() {
    let lengths = |text: &str| {
        let workload: Workload = text.parse().unwrap();
        let stream =
            Stream::new(&workload, &StreamOptions { clients: 2, ..StreamOptions::new(100) }).unwrap();
        stream.filter_map(|operation| match operation {
            Operation::Scan { limit, .. } | Operation::Iterate { limit } => Some(limit),
            _ => None,
        })
    };
    let mut counts = [0; 100];
    lengths("ycsb-e").take(100_000).for_each(|length| counts[length as usize - 1] += 1);
    assert_fits("scan lengths of ycsb-e", &counts, &[0.01; 100]);
    for (text, length) in [
        ("range-only", 100),
        ("range-only:1000", 1000),
        ("range-write:7", 7),
        ("scan-intensive", 100),
        ("readseq", 1000),
    ] {
        assert!(lengths(text).take(1000).all(|drawn| drawn == length), "{text}");
    }
    let extremes: BTreeSet<u32> = lengths("scan=1:4294967294-4294967295").take(100).collect();
    assert!(extremes.into_iter().eq([u32::MAX - 1, u32::MAX]));
}

#[test]
fn custom_mixes_are_what_they_say() {
    let text = "get=50,put=25,insert=10,delete=5,scan=4:100,iterate=2:1-9,rmw=3,cas=1";
    let workload: Workload = text.parse().unwrap();
    assert_eq!(workload.to_string(), text);
    assert!(workload.inserts());
    let stream = Stream::new(&workload, &StreamOptions::new(1000)).unwrap();
    let mut counts = [0; 8];
    stream.take(200_000).for_each(|operation| {
        let kind = operation.kind();
        counts[OperationKind::ALL.iter().position(|known| *known == kind).unwrap()] += 1;
    });
    assert_fits("a custom mix", &counts, &[0.50, 0.25, 0.10, 0.05, 0.04, 0.02, 0.03, 0.01]);
    // Only the ratio counts, and kinds without weight do not exist.
    let mix: Mix = " get = 1, cas=0, put=1 ".parse().unwrap();
    assert!((mix.part(Get) - 0.5).abs() < 1e-12 && !mix.has(CompareAndSwap));
    assert!(!"get=1|put=1".parse::<Workload>().unwrap().inserts());
}

#[test]
fn bad_workloads_are_refused_with_advice() {
    let refused = |text: &str| text.parse::<Workload>().unwrap_err();
    for text in ["", "g", "ycsb", "ycsb-g", "write", "get"] {
        let error = refused(text);
        assert_eq!(error, BadText::Workload(text.to_owned()));
        for workload in Workload::all() {
            assert!(error.to_string().contains(workload.name().unwrap()), "{error}");
        }
    }
    for text in [
        "get=",
        "get=x",
        "get=-1",
        "get=1:5",
        "scan=5",
        "read=5",
        "=5",
        "get=1,",
        "get=1||put=1",
        "get=4294967296",
    ] {
        let error = refused(text);
        assert!(matches!(error, BadText::Share(_)), "{text}: {error}");
        assert!(error.to_string().contains("rmw"), "{error}");
    }
    for text in ["scan=5:", "scan=5:0", "scan=5:9-3", "scan=5:x", "range-only:0", "range-only:1-"] {
        assert!(matches!(refused(text), BadText::ScanLength(_)), "{text}");
    }
    assert_eq!(refused("get=1,put=1,get=2"), BadText::Twice(Get));
    assert_eq!(refused("get=0"), BadText::Nothing);
    assert!(matches!(refused("ycsb-a:100"), BadText::NoScan(_)));
}

fn shares() -> impl Strategy<Value = Vec<Share>> {
    let share = (0usize..8, 1u32.., 1u32.., 1u32..).prop_map(|(kind, weight, one, two)| {
        let length = ScanLength::between(one.min(two), one.max(two));
        match OperationKind::ALL[kind] {
            Scan => Share::scan(weight, length),
            Iterate => Share::iterate(weight, length),
            kind => Share::of(kind, weight),
        }
    });
    proptest::collection::vec(share, 1..8).prop_map(|mut shares| {
        shares.sort_by_key(Share::kind);
        shares.dedup_by_key(|share| share.kind());
        shares
    })
}

proptest! {
    #[test]
    fn custom_workloads_survive_their_text(roles in proptest::collection::vec(shares(), 1..4)) {
        let roles = roles.iter().map(|shares| Mix::new(shares).unwrap()).collect();
        let workload = Workload::custom(roles).unwrap();
        prop_assert_eq!(workload.to_string().parse(), Ok(workload));
    }

    #[test]
    fn named_workloads_with_lengths_survive_their_text(min in 1u32..1000, more in 0u32..1000) {
        let length = ScanLength::between(min, min + more);
        for name in ["range-only", "range-write", "ycsb-e", "readseq"] {
            let workload = name.parse::<Workload>().unwrap().with_scan_length(length).unwrap();
            prop_assert_eq!(workload.to_string().parse(), Ok(workload));
        }
    }

    #[test]
    fn any_text_is_refused_or_understood(text in "[a-z=,:|0-9@.-]{0,24}") {
        if let Ok(workload) = text.parse::<Workload>() {
            prop_assert_eq!(workload.to_string().parse(), Ok(workload));
        }
    }
}
