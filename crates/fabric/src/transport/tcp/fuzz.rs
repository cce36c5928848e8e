//! What comes from outside, for a fuzzer: see `fuzz/` at the root of the repository. Each function takes whatever bytes it is
//! given and panics if they do what they must not.

use super::buffer::{Outgoing, first_frame};
use super::frames::{Admission, Introduction};
use super::scope::Bench;
use super::verbs::{MAX_PAYLOAD_BYTES, MAX_REQUEST_BYTES};
use crate::transport::line::frames::{FromClient, FromServer, take_frame};
use crate::wire::decode;

/// What nobody may change.
const SECRET: u64 = 0x5ec2_e75e_c2e7_5ec2;

/// Bytes on a verbs connection, as the server takes them in.
pub fn requests(mut bytes: &[u8]) {
    let bench = Bench::new();
    bench.mark(SECRET);
    while let Ok(Some(request)) = first_frame(bytes, MAX_REQUEST_BYTES) {
        let mut out = Outgoing::default();
        if bench.reach.execute(request, &bench.memory, &mut out).is_err() {
            assert!(out.is_empty(), "a refused batch has no reply");
            break;
        }
        assert!(out.len() <= MAX_PAYLOAD_BYTES + 4096);
        bytes = &bytes[4 + request.len()..];
    }
    assert!(bench.is_unharmed(SECRET), "memory out of reach was changed");
    // Whatever came, the gate is free: a fence would not wait.
    bench.gate.close(None);
}

/// Bytes with which somebody introduces itself, or is admitted.
pub fn first_words(bytes: &[u8]) {
    if let Ok(Some((introduction, length))) = Introduction::decode(bytes) {
        assert_eq!(introduction.encode(), bytes[..length], "one introduction has one encoding");
    }
    let _ = decode::<Admission>(bytes);
}

/// Bytes on a line for calls, in both directions.
pub fn messages(bytes: &[u8]) {
    let mut arrived = bytes.to_vec();
    while let Ok(Some(_)) = take_frame::<FromClient>(&mut arrived) {}
    let mut arrived = bytes.to_vec();
    while let Ok(Some(_)) = take_frame::<FromServer>(&mut arrived) {}
}
