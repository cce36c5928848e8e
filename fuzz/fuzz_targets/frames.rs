//! Everything that a memory server, or its client, reads from a TCP socket. The first byte says what the rest is.

#![no_main]

use farwood_fabric::transport::tcp::fuzz;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    match bytes.split_first() {
        Some((0, rest)) => fuzz::first_words(rest),
        Some((1, rest)) => fuzz::messages(rest),
        Some((_, rest)) => fuzz::requests(rest),
        None => {}
    }
});
