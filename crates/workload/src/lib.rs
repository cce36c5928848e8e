//! Workloads: streams of operations, key sets, values that can be recognised, and distributions of what was measured. It
//! knows nothing of indexes, verbs or time, so that benchmarks, the simulator and tests can all draw from it.
//!
//! | module | what it is |
//! |---|---|
//! | [`workload`] | a workload as data: by name, or a mix of one's own |
//! | [`mix`] | kinds of operations with their weights |
//! | [`chooser`] | which keys operations are about: uniform, Zipf's law, the latest, in order |
//! | [`stream`] | the operations of one client, one after the other |
//! | [`keys`] | the bytes of a key from its number, and back |
//! | [`values`] | values that say which write they come from |
//! | [`distribution`] | latencies, round trips and the like: quantiles, mean, maximum |
//! | [`zipf`], [`random`] | the draws beneath |
//! | [`text`] | the one error for texts that cannot be read |
//!
//! # Workloads
//!
//! Weights are relative. Zipf's law is drawn over as many ranks as the source has keys and folded onto the loaded ones
//! ([`chooser`]). `load`, `fillseq` and `fillrandom` start from nothing, the others from loaded keys. YCSB's may be called `a` or `A`,
//! those of Sherman and DEX also `sherman-...` and `dex-...`.
//!
//! | name | mix | keys | source |
//! |---|---|---|---|
//! | `load` | `insert=1` | each once | YCSB |
//! | `ycsb-a` | `get=1,put=1` | `zipfian:0.99@1e10` | YCSB |
//! | `ycsb-b` | `get=95,put=5` | `zipfian:0.99@1e10` | YCSB |
//! | `ycsb-c` | `get=1` | `zipfian:0.99@1e10` | YCSB |
//! | `ycsb-d` | `get=95,insert=5` | `latest` | YCSB |
//! | `ycsb-e` | `scan=95:1-100,insert=5` | `zipfian:0.99@1e10` | YCSB |
//! | `ycsb-f` | `get=1,rmw=1` | `zipfian:0.99@1e10` | YCSB |
//! | `write-only` | `put=2,insert=1` | `zipfian:0.99@1e9` | Sherman, table 3: two of three inserts update |
//! | `write-intensive` | `get=3,put=2,insert=1` | `zipfian:0.99@1e9` | Sherman, table 3 |
//! | `read-intensive` | `get=57,put=2,insert=1` | `zipfian:0.99@1e9` | Sherman, table 3 |
//! | `range-only` | `scan=1:100` | `zipfian:0.99@1e9` | Sherman, table 3; section 5.3: 100 and 1000 |
//! | `range-write` | `scan=1:100\|put=2,insert=1` | `zipfian:0.99@1e9` | Sherman, table 3; section 5.3: halves of the clients |
//! | `read-only` | `get=1` | `zipfian:0.99@2e8` | DEX, table 1 |
//! | `dex-read-intensive` | `get=95,put=5` | `zipfian:0.99@2e8` | DEX, table 1: updates only |
//! | `dex-write-intensive` | `get=1,put=1` | `zipfian:0.99@2e8` | DEX, table 1: updates only |
//! | `insert-intensive` | `get=1,insert=1` | `zipfian:0.99@2e8` | DEX, table 1 |
//! | `scan-intensive` | `scan=95:100,insert=5` | `zipfian:0.99@2e8` | DEX, table 1 |
//! | `dolphin-range-only` | `scan=1:100` | `uniform` | Dolphin, section IV.A |
//! | `dolphin-range-write` | `scan=1:100,insert=1` | `uniform` | Dolphin, section IV.A |
//! | `sphinx-d` | `get=95,put=5` | `latest` | Sphinx, section V.A |
//! | `fillseq` | `put=1` | `sequential` | db_bench |
//! | `fillrandom` | `put=1` | `uniform` | db_bench |
//! | `readrandom` | `get=1` | `uniform` | db_bench |
//! | `readrandomwriterandom` | `get=9,put=1` | `uniform` | db_bench |
//! | `readseq` | `iterate=1:1000` | all, ascending | db_bench |
//! | `overwrite` | `put=1` | `uniform` | db_bench |
//! | `deleterandom` | `delete=1` | `uniform` | db_bench |
//!
//! # Example
//!
//! ```
//! use farwood_workload::{KeyKind, KeySet, Operation, Stream, StreamOptions, ValueId, Values, Workload};
//!
//! let workload: Workload = "ycsb-a".parse()?;
//! let options = StreamOptions { seed: 7, client: 3, clients: 176, ..StreamOptions::new(1_000_000) };
//! let keys = KeySet::new(KeyKind::Email, 7);
//! let values = Values::fixed(64);
//! let (mut key, mut value) = (Vec::new(), Vec::new());
//! let mut stream = Stream::new(&workload, &options)?;
//! for _ in 0..100 {
//!     match stream.next() {
//!         Some(Operation::Get(index)) => println!("get {}", keys.key(index, &mut key).escape_ascii()),
//!         Some(Operation::Put(index)) => {
//!             let id = ValueId { index, version: stream.version() };
//!             assert_eq!(values.identify(values.value(id, &mut value)), Ok(id));
//!         }
//!         other => unreachable!("ycsb-a has no {other:?}"),
//!     }
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

mod catalog;
pub mod chooser;
pub mod distribution;
pub mod keys;
pub mod mix;
pub mod random;
pub mod stream;
pub mod text;
pub mod values;
pub mod workload;
pub mod zipf;

pub use chooser::Chooser;
pub use distribution::{Distribution, Exported, Summary};
pub use keys::{KeyKind, KeySet};
pub use mix::{Mix, OperationKind, ScanLength, Share};
pub use stream::{Operation, Stream, StreamError, StreamOptions};
pub use text::BadText;
pub use values::{BadValue, ValueId, Values};
pub use workload::{Start, Workload};
