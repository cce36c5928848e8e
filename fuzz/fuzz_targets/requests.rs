//! What Redis clients send to a gateway: parsed in one piece and in several, carried out on a map, answered alike. The first bytes say whether
//! there is a password, and where the rest is cut.

#![no_main]

use farwood_gateway::fuzz::Bench;
use libfuzzer_sys::fuzz_target;

thread_local! {
    static BENCH: Bench = {
        let cluster = farwood_memory::embedded(1, 16 << 20).expect("a pool");
        Bench::new(&cluster).expect("a bench")
    };
}

fuzz_target!(|bytes: &[u8]| {
    BENCH.with(|bench| bench.run(bytes));
});
