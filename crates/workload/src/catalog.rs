//! The workloads that have names: data, each with its source. A paper's table is the definition; where the program that was
//! published with a paper does something else, the note says so.

use crate::chooser::Chooser;
use crate::mix::OperationKind::{Delete, Get, Insert, Put, ReadModifyWrite};
use crate::mix::{ScanLength, Share};
use crate::workload::Start;

/// One named workload.
#[derive(Debug)]
pub(crate) struct Definition {
    pub(crate) name: &'static str,
    /// Other names that are understood.
    pub(crate) aliases: &'static [&'static str],
    /// The mixes that clients take in turn; one for all, mostly.
    pub(crate) roles: &'static [&'static [Share]],
    pub(crate) chooser: Chooser,
    pub(crate) start: Start,
    pub(crate) source: &'static str,
    /// What this definition leaves open in the source, or does otherwise.
    pub(crate) note: &'static str,
}

/// The skew that YCSB and all the papers use unless they say otherwise, over as many ranks as the source has: YCSB's
/// scrambled Zipfian has 10^10 whatever the number of keys, Sherman loads 10^9 keys (section 5.1.3), DEX 2 * 10^8 (section 8.1).
const fn skewed(ranks: u64) -> Chooser {
    Chooser::Zipfian { theta: 0.99, ranks: Some(ranks) }
}
const YCSB_SKEW: Chooser = skewed(10_000_000_000);
const SHERMAN_SKEW: Chooser = skewed(1_000_000_000);
const DEX_SKEW: Chooser = skewed(200_000_000);
const LATEST: Chooser = Chooser::Latest { theta: 0.99 };
const HUNDRED: ScanLength = ScanLength::fixed(100);
const GET: Share = Share::of(Get, 1);
const PUT: Share = Share::of(Put, 1);
const INSERT: Share = Share::of(Insert, 1);
/// Two of three inserts of Sherman's table update a key that is there.
const SHERMAN_WRITES: [Share; 2] = [Share::of(Put, 2), INSERT];

const YCSB: &str = "YCSB core workloads, workloads/workload[a-f]";
const SHERMAN: &str = "Sherman, SIGMOD 2022, section 5.1.3, table 3";
const DEX: &str = "DEX, VLDB 2024, section 8.1, table 1";
/// dLSM (ICDE 2023, section XI) is measured with it.
const DB_BENCH: &str = "db_bench of RocksDB, tools/db_bench_tool.cc";
const DOLPHIN: &str = "Dolphin, section IV.A";
const SPHINX: &str = "Sphinx, section V.A";

const SHERMAN_NOTE: &str = "new keys lie evenly in the key space, so that a third of the writes do not contend; \
                            a custom mix of get and put keeps all writes on the chooser's keys";
const DEX_INSERT_NOTE: &str = "inserts are of new keys; the program published with the paper draws them from the whole key \
                               space, keys that are there included";

type Roles = &'static [&'static [Share]];

const fn named(name: &'static str, roles: Roles, chooser: Chooser, source: &'static str) -> Definition {
    Definition { name, aliases: &[], roles, chooser, start: Start::Loaded, source, note: "" }
}

const fn ycsb(name: &'static str, roles: Roles) -> Definition {
    named(name, roles, YCSB_SKEW, YCSB)
}

const fn sherman(name: &'static str, roles: Roles) -> Definition {
    named(name, roles, SHERMAN_SKEW, SHERMAN)
}

const fn dex(name: &'static str, roles: Roles) -> Definition {
    named(name, roles, DEX_SKEW, DEX)
}

const fn db_bench(name: &'static str, roles: Roles) -> Definition {
    named(name, roles, Chooser::Uniform, DB_BENCH)
}

impl Definition {
    const fn also(self, aliases: &'static [&'static str]) -> Self {
        Self { aliases, ..self }
    }

    const fn choosing(self, chooser: Chooser) -> Self {
        Self { chooser, ..self }
    }

    const fn empty(self) -> Self {
        Self { start: Start::Empty, ..self }
    }

    const fn note(self, note: &'static str) -> Self {
        Self { note, ..self }
    }
}

/// All of them, by source.
pub(crate) static DEFINITIONS: &[Definition] = &[
    ycsb("load", &[&[INSERT]])
        .also(&["ycsb-load"])
        .choosing(Chooser::Uniform)
        .empty()
        .note("inserts keys 0 to count - 1, each once, then ends"),
    ycsb("ycsb-a", &[&[GET, PUT]]).also(&["a"]),
    ycsb("ycsb-b", &[&[Share::of(Get, 95), Share::of(Put, 5)]]).also(&["b"]),
    ycsb("ycsb-c", &[&[GET]]).also(&["c"]),
    ycsb("ycsb-d", &[&[Share::of(Get, 95), Share::of(Insert, 5)]])
        .also(&["d"])
        .choosing(LATEST)
        .note("a client knows the newest of its own keys, not of the others'"),
    ycsb("ycsb-e", &[&[Share::scan(95, ScanLength::between(1, 100)), Share::of(Insert, 5)]]).also(&["e"]),
    ycsb("ycsb-f", &[&[GET, Share::of(ReadModifyWrite, 1)]]).also(&["f"]),
    sherman("write-only", &[&SHERMAN_WRITES]).also(&["sherman-write-only"]).note(SHERMAN_NOTE),
    sherman("write-intensive", &[&[Share::of(Get, 3), Share::of(Put, 2), INSERT]])
        .also(&["sherman-write-intensive"])
        .note(SHERMAN_NOTE),
    sherman("read-intensive", &[&[Share::of(Get, 57), Share::of(Put, 2), INSERT]])
        .also(&["sherman-read-intensive"])
        .note(SHERMAN_NOTE),
    sherman("range-only", &[&[Share::scan(1, HUNDRED)]])
        .also(&["sherman-range-only"])
        .note("section 5.3 also has ranges of 1000: range-only:1000"),
    sherman("range-write", &[&[Share::scan(1, HUNDRED)], &SHERMAN_WRITES])
        .also(&["sherman-range-write"])
        .note("half of the clients scan, the other half write (section 5.3); also with range-write:1000"),
    dex("read-only", &[&[GET]]).also(&["dex-read-only"]),
    dex("dex-read-intensive", &[&[Share::of(Get, 95), Share::of(Put, 5)]])
        .note("writes are updates only, unlike Sherman's read-intensive"),
    dex("dex-write-intensive", &[&[GET, PUT]])
        .note("writes are updates only, unlike Sherman's write-intensive"),
    dex("insert-intensive", &[&[GET, INSERT]]).also(&["dex-insert-intensive"]).note(DEX_INSERT_NOTE),
    dex("scan-intensive", &[&[Share::scan(95, HUNDRED), Share::of(Insert, 5)]])
        .also(&["dex-scan-intensive"])
        .note(DEX_INSERT_NOTE),
    named("dolphin-range-only", &[&[Share::scan(1, HUNDRED)]], Chooser::Uniform, DOLPHIN),
    named("dolphin-range-write", &[&[Share::scan(1, HUNDRED), INSERT]], Chooser::Uniform, DOLPHIN)
        .note("every client does both, unlike Sherman's range-write"),
    named("sphinx-d", &[&[Share::of(Get, 95), Share::of(Put, 5)]], LATEST, SPHINX)
        .note("5% updates where YCSB's D inserts"),
    db_bench("fillseq", &[&[PUT]])
        .choosing(Chooser::Sequential)
        .empty()
        .note("clients share the keys, where each thread of db_bench writes all; ascending with sequential keys only"),
    db_bench("fillrandom", &[&[PUT]])
        .empty()
        .note("as many puts as keys leave 37% of the keys absent"),
    db_bench("readrandom", &[&[GET]]),
    db_bench("readrandomwriterandom", &[&[Share::of(Get, 9), Share::of(Put, 1)]])
        .note("at random, where db_bench does 90 gets, then 10 puts; dLSM varies the ratio: get=50,put=50 and so on"),
    db_bench("readseq", &[&[Share::iterate(1, ScanLength::fixed(1000))]])
        .note("each client reads everything in steps; db_bench counts keys, not steps"),
    db_bench("overwrite", &[&[PUT]]),
    db_bench("deleterandom", &[&[Share::of(Delete, 1)]])
        .note("a key may be deleted again"),
];
