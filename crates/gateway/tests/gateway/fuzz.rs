//! Mutated requests, in one piece and in several: what `fuzz/fuzz_targets/requests.rs` does, on any compiler and from a seed.
//!
//! `FARWOOD_FUZZ=10000000 cargo test --release -p farwood-gateway --test gateway fuzz -- --nocapture` runs so many requests.

use super::common::encode;
use farwood_fabric::clock::{RealClock, SECOND};
use farwood_gateway::fuzz::Bench;
use fastrand::Rng;

/// Requests of the usual run.
const REQUESTS: usize = 20_000;
/// The memory of the process may grow by so much after the first tenth of a long run.
const GROWTH_BYTES: u64 = 32 << 20;

/// Valid requests, of every command.
const CORPUS: &str = "SET a 1|SET b text NX|SET a 2 XX GET|SET c v EX 100|SET c v PXAT 32503680000000|SET a 3 KEEPTTL\
    |GET a|GET nothing|GETSET a 5|GETDEL b|GETEX a|GETEX a EX 100|GETEX a PERSIST|GETEX a PXAT 4102444800000\
    |MGET a b c|MSET a 1 b 2|MSET key:1 x key:2 y key:1 z|SETNX d 1|SETEX e 100 v|PSETEX e 100000 v|STRLEN a|APPEND a xyz\
    |INCR n|DECR n|INCRBY n 41|DECRBY n -7|DEL a|DEL a b c|UNLINK d e|EXISTS a b a|TOUCH a|TYPE a|EXPIRE a 100 NX|EXPIRE a 200 XX GT\
    |PEXPIRE a 100000|EXPIREAT a 4102444800|PEXPIREAT a 4102444800000 LT|TTL a|PTTL a|EXPIRETIME a|PEXPIRETIME a|PERSIST a\
    |SCAN 0|SCAN 0 MATCH key:* COUNT 100 TYPE string|KEYS *|KEYS key:[12]?|KEYS [^a]\\*|RANDOMKEY|DBSIZE|FLUSHDB|FLUSHALL ASYNC\
    |RANGE - +|RANGE [a (b LIMIT 2|RANGEKEYS + - REV LIMIT 1|COUNTRANGE [key: (key;|DELRANGE - + LIMIT 2\
    |PING|PING hi|ECHO hello|HELLO|HELLO 2|HELLO 3 SETNAME me|HELLO 3 AUTH default pass|AUTH pass|AUTH default pass|SELECT 0\
    |CLIENT ID|CLIENT GETNAME|CLIENT SETNAME me|CLIENT SETINFO lib-name x|CLIENT INFO|CLIENT LIST|CLIENT LIST TYPE normal|CLIENT LIST ID 1\
    |INFO|INFO everything|INFO farwood|CONFIG GET max*|COMMAND COUNT|COMMAND LIST|COMMAND INFO get|COMMAND DOCS set|COMMAND|TIME\
    |MULTI|EXEC|DISCARD|QUIT|LPUSH list x";

/// What numbers go wrong with.
const NUMBERS: [&str; 12] = [
    "0",
    "-1",
    "1",
    "9223372036854775807",
    "-9223372036854775808",
    "9223372036854775808",
    "18446744073709551615",
    "16384",
    "1048576",
    "1048577",
    "4294967296",
    "x",
];

fn pick<'a, T>(rng: &mut Rng, all: &'a [T]) -> &'a T {
    &all[rng.usize(..all.len())]
}

/// One request with some of its arguments changed.
fn request(rng: &mut Rng, corpus: &[Vec<&str>]) -> Vec<Vec<u8>> {
    let mut words: Vec<Vec<u8>> = pick(rng, corpus).iter().map(|word| word.as_bytes().to_vec()).collect();
    while rng.u8(..4) == 0 {
        let at = rng.usize(..words.len());
        match rng.u8(..7) {
            0 => words[at] = pick(rng, &NUMBERS).as_bytes().to_vec(),
            1 => words[at] = (0..rng.usize(..20)).map(|_| rng.u8(..)).collect(),
            2 => words[at] = vec![rng.u8(..); rng.usize(..3000)],
            3 => {
                let other = pick(rng, corpus);
                words.insert(at, pick(rng, other).as_bytes().to_vec());
            }
            4 if words.len() > 1 => drop(words.remove(at)),
            5 => words.push(words[at].clone()),
            _ => {
                let other = rng.usize(..words.len());
                words.swap(at, other);
            }
        }
    }
    words
}

/// Changes some bytes of what is sent.
fn mutate(rng: &mut Rng, bytes: &mut Vec<u8>) {
    for _ in 0..rng.usize(1..4) {
        if bytes.is_empty() {
            return;
        }
        let (at, length) = (rng.usize(..bytes.len()), rng.usize(..20));
        let end = (at + length).min(bytes.len());
        match rng.u8(..7) {
            0 => bytes[at] ^= 1 << rng.u8(..8),
            1 => bytes[at] = *pick(rng, b"*$\r\n\"'\\ 019-:\0\xff"),
            2 => bytes.insert(at, rng.u8(..)),
            3 => drop(bytes.drain(at..end)),
            4 => {
                let copy = bytes[at..end].to_vec();
                bytes.splice(at..at, copy);
            }
            5 => bytes.truncate(at),
            _ => drop(bytes.splice(at..end, pick(rng, &NUMBERS).bytes())),
        }
    }
}

/// A line as somebody types it.
fn typed(words: &[Vec<u8>]) -> Vec<u8> {
    [words.join(&b' '), b"\r\n".to_vec()].concat()
}

/// Says what was being done when something panics.
struct Input {
    seed: u64,
    bytes: Vec<u8>,
    cuts: Vec<usize>,
    has_password: bool,
}

impl Drop for Input {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let Self { seed, bytes, cuts, has_password } = self;
            eprintln!(
                "seed {seed}, password {has_password}, cuts {cuts:?}, bytes \"{}\"",
                bytes.escape_ascii()
            );
        }
    }
}

fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok()).unwrap_or(0) << 10
}

#[test]
fn mutated_requests_are_answered_alike_in_any_pieces() {
    let requests =
        std::env::var("FARWOOD_FUZZ").ok().and_then(|count| count.parse().ok()).unwrap_or(REQUESTS);
    let corpus: Vec<Vec<&str>> = CORPUS.split('|').map(|line| line.split_whitespace().collect()).collect();
    let cluster = farwood_memory::embedded(1, 16 << 20).expect("a pool");
    let bench = Bench::new(&cluster).expect("a bench");
    let clock = RealClock::new();
    let (mut sent, mut replies, mut bytes_sent, mut conversations, mut resident) = (0, 0, 0, 0, None);
    while sent < requests {
        let mut rng = Rng::with_seed(conversations);
        let mut bytes = Vec::new();
        for _ in 0..rng.usize(1..30) {
            let words = request(&mut rng, &corpus);
            bytes.extend(if rng.u8(..10) == 0 { typed(&words) } else { encode(&words) });
            sent += 1;
        }
        if rng.bool() {
            mutate(&mut rng, &mut bytes);
        }
        let cuts = (0..rng.usize(..12)).map(|_| rng.usize(..)).collect();
        let input = Input { seed: conversations, bytes, cuts, has_password: rng.u8(..8) == 0 };
        replies += bench.check(&input.bytes, &input.cuts, input.has_password);
        bytes_sent += input.bytes.len();
        conversations += 1;
        if sent > requests / 10 && resident.is_none() {
            resident = Some(resident_bytes());
        }
    }
    let grown = resident_bytes().saturating_sub(resident.unwrap_or_default());
    println!(
        "{sent} requests of {conversations} clients, {bytes_sent} bytes, {replies} replies, each twice, in {} s; {grown} bytes more memory than at a tenth",
        clock.now() / SECOND
    );
    assert!(replies > requests / 4, "most requests are whole: {replies} replies to {sent}");
    // Other tests run in this process, too, unless this is a long run.
    assert!(requests <= REQUESTS || grown <= GROWTH_BYTES, "memory grows: {grown} bytes");
}
