//! How long keys, values and the ends of ranges may be.

use super::common::{Client, Map, Value, bytes, gateway};
use farwood_index::Limits;

/// Of the engine: the envelope of a value that expires has to fit, too.
const LIMITS: Limits = Limits { key_bytes: 20, value_bytes: 110, pair_bytes: 120 };
const ENVELOPE_BYTES: usize = 10;
const VALUE_BYTES: usize = LIMITS.value_bytes - ENVELOPE_BYTES;
const PAIR_BYTES: usize = LIMITS.pair_bytes - ENVELOPE_BYTES;

fn ok() -> Value {
    Value::Word("OK".into())
}

fn error(value: &Value) -> &str {
    match value {
        Value::Error(text) => text,
        other => panic!("no error: {other:?}"),
    }
}

#[test]
fn a_value_has_one_limit_whether_it_expires_or_not() {
    let map = Map::with_limits(LIMITS);
    let gateway = gateway(&map);
    let mut client = Client::to(gateway.address());
    // Values that end with the byte of envelopes have one in any case.
    for last in [b'v', 0xfd] {
        let value = |length: usize| [vec![b'v'; length - 1], vec![last]].concat();
        let (longest, longer) = (value(VALUE_BYTES), value(VALUE_BYTES + 1));
        let command = |words: &[&str], value: &[u8]| -> Vec<Vec<u8>> {
            let words = words.iter().map(|word| word.as_bytes());
            words.map(|word| if word == b"V" { value.to_vec() } else { word.to_vec() }).collect()
        };
        for words in [
            &["SET", "k", "V"][..],
            &["SET", "k", "V", "EX", "100"],
            &["SET", "k", "V", "KEEPTTL"],
            &["SETEX", "k", "100", "V"],
            &["GETSET", "k", "V"],
            &["MSET", "k", "V"],
        ] {
            let refused = client.ask(&command(words, &longer));
            assert_eq!(error(&refused), "ERR the value is longer than the 100 bytes that a value may have");
            let stored = client.ask(&command(words, &longest));
            assert!(!matches!(stored, Value::Error(_)), "{words:?}: {stored:?}");
            assert_eq!(client.say("GET k"), bytes(&longest), "{words:?}");
            for (expiry, changed) in
                [("EXPIRE k 1000", 1), ("PERSIST k", 1), ("PEXPIRE k 100000", 1), ("PERSIST k", 1)]
            {
                assert_eq!(client.say(expiry), Value::Number(changed));
                assert_eq!(client.say("GET k"), bytes(&longest), "{words:?}, {expiry}");
            }
            for expiry in ["GETEX k EX 100", "GETEX k PERSIST"] {
                assert_eq!(client.say(expiry), bytes(&longest));
            }
            assert_eq!(error(&client.say("APPEND k x")), error(&refused));
            assert_eq!(
                client.ask(&["APPEND", "k", ""]),
                Value::Number(i64::try_from(VALUE_BYTES).expect("few"))
            );
        }
        assert_eq!(client.say("DEL k"), Value::Number(1));
    }
    // With a key of 20 bytes a chunk has less room for the value.
    let key = "k".repeat(LIMITS.key_bytes);
    let longer = client.ask(&["SET", &key, &"v".repeat(PAIR_BYTES + 1 - key.len())]);
    assert_eq!(error(&longer), "ERR key and value are longer than the 110 bytes that both may have together");
    assert_eq!(client.ask(&["SET", &key, &"v".repeat(PAIR_BYTES - key.len()), "EX", "100"]), ok());
}

#[test]
fn several_keys_are_set_only_if_all_can_be() {
    let map = Map::with_limits(LIMITS);
    let gateway = gateway(&map);
    let mut client = Client::to(gateway.address());
    let (long_key, long_value) = ("k".repeat(LIMITS.key_bytes + 1), "v".repeat(VALUE_BYTES + 1));
    for (bad, text) in [
        ([long_key.as_str(), "v"], "ERR the key is longer than the 20 bytes that a key may have"),
        (["k", &long_value], "ERR the value is longer than the 100 bytes that a value may have"),
    ] {
        for at in 0..4 {
            let mut pairs = vec![["a", "1"], ["b", "2"], ["c", "3"]];
            pairs.insert(at, bad);
            let command: Vec<&str> = ["MSET"].into_iter().chain(pairs.concat()).collect();
            assert_eq!(error(&client.ask(&command)), text);
            assert!(map.lock().is_empty(), "nothing is set, wherever the bad pair is");
        }
        // One that would be overwritten at once, too.
        let command = [&["MSET"][..], &bad, &[bad[0], "v"]].concat();
        assert_eq!(error(&client.ask(&command)), text);
    }
    assert_eq!(client.say("MSET a 1 b 2"), ok());
}

#[test]
fn a_key_that_is_too_long_is_absent() {
    let map = Map::with_limits(LIMITS);
    let gateway = gateway(&map);
    let mut client = Client::to(gateway.address());
    let (long, longest) = ("k".repeat(LIMITS.key_bytes + 1), "k".repeat(LIMITS.key_bytes));
    assert_eq!(client.ask(&["SET", &longest, "v"]), ok());
    let (zero, nil) = (Value::Number(0), Value::Nil);
    for (command, told) in [
        (&["GET", &long][..], nil.clone()),
        (&["MGET", &longest, &long], Value::Array(vec![bytes("v"), nil.clone()])),
        (&["EXISTS", &long, &longest], Value::Number(1)),
        (&["TOUCH", &long], zero.clone()),
        (&["STRLEN", &long], zero.clone()),
        (&["TYPE", &long], Value::Word("none".into())),
        (&["TTL", &long], Value::Number(-2)),
        (&["PTTL", &long], Value::Number(-2)),
        (&["EXPIRETIME", &long], Value::Number(-2)),
        (&["PEXPIRETIME", &long], Value::Number(-2)),
        (&["EXPIRE", &long, "10"], zero.clone()),
        (&["PEXPIREAT", &long, "10"], zero.clone()),
        (&["PERSIST", &long], zero.clone()),
        (&["GETEX", &long], nil.clone()),
        (&["GETEX", &long, "EX", "10"], nil.clone()),
        (&["GETDEL", &long], nil.clone()),
        (&["SET", &long, "v", "XX"], nil.clone()),
        (&["SET", &long, "v", "XX", "GET"], nil.clone()),
        (&["UNLINK", &long], zero.clone()),
        (&["DEL", &long, &longest], Value::Number(1)),
    ] {
        assert_eq!(client.ask(command), told, "{command:?}");
    }
    for command in [
        &["SET", &long, "v"][..],
        &["SET", &long, "v", "NX"],
        &["SET", &long, "v", "EX", "100"],
        &["SETNX", &long, "v"],
        &["SETEX", &long, "100", "v"],
        &["GETSET", &long, "v"],
        &["APPEND", &long, "v"],
        &["INCR", &long],
        &["DECRBY", &long, "7"],
    ] {
        let told = client.ask(command);
        assert_eq!(
            error(&told),
            "ERR the key is longer than the 20 bytes that a key may have",
            "{command:?}"
        );
    }
    assert!(map.lock().is_empty());
    // They are about a key, so they keep their place in a pipeline.
    let pipeline = [
        super::common::encode(&["SET", "a", "1"]),
        super::common::encode(&["DEL", &long]),
        super::common::encode(&["GET", "a"]),
    ];
    client.send(&pipeline.concat());
    assert_eq!([client.read(), client.read(), client.read()], [ok(), zero, bytes("1")]);
}

#[test]
fn ends_of_ranges_and_patterns_may_be_longer_than_any_key() {
    let map = Map::with_limits(LIMITS);
    let gateway = gateway(&map);
    let mut client = Client::to(gateway.address());
    let most = LIMITS.key_bytes;
    let mut keys: Vec<Vec<u8>> = Vec::new();
    for byte in [b'a', b'm', b'z', 0xff] {
        keys.extend([most - 1, most].map(|length| vec![byte; length]));
        keys.push([vec![byte; most - 1], vec![b'b']].concat());
    }
    for key in &keys {
        assert_eq!(client.ask(&[b"SET", key.as_slice(), b"v"]), ok());
    }
    let mut ends = Vec::new();
    for byte in [0, b'a', b'm', 0xff] {
        for length in [most - 1, most, most + 1, 3 * most, 100_000] {
            ends.push(vec![byte; length]);
            ends.push([vec![byte; length - 1], vec![b'b']].concat());
        }
    }
    for start in &ends {
        for end in &ends {
            for (open, close) in [(b'[', b'['), (b'(', b'('), (b'[', b'(')] {
                let is_in = |key: &&Vec<u8>| {
                    let is_above = if open == b'[' { *key >= start } else { *key > start };
                    is_above && if close == b'[' { *key <= end } else { *key < end }
                };
                let expected = keys.iter().filter(is_in).count();
                let (from, to) = ([&[open], &start[..]].concat(), [&[close], &end[..]].concat());
                let told = client.ask(&[b"COUNTRANGE", &from[..], &to]);
                assert_eq!(told, Value::Number(i64::try_from(expected).expect("few")), "{from:?} {to:?}");
            }
        }
    }
    let end = |byte: u8| [&b"["[..], &vec![byte; 3 * most]].concat();
    let reverse = client.ask(&[b"RANGEKEYS", &end(b'm')[..], &end(b'a'), b"REV"]).items();
    let key = |byte: u8, last: u8| bytes([vec![byte; most - 1], vec![last]].concat());
    let expected = [key(b'm', b'm'), key(b'm', b'b'), bytes(vec![b'm'; most - 1]), key(b'a', b'b')];
    assert_eq!(reverse, expected);
    // Patterns begin with what keys have to begin with.
    for (pattern, count) in [
        ([&vec![b'a'; most], &b"*"[..]].concat(), 1),
        ([&vec![b'a'; most + 1], &b"*"[..]].concat(), 0),
        ([&vec![0xff; 100_000], &b"*"[..]].concat(), 0),
        (vec![b'a'; 100_000], 0),
    ] {
        assert_eq!(client.ask(&[b"KEYS", &pattern[..]]).items().len(), count);
        let scanned = client.ask(&[b"SCAN", &b"0"[..], b"MATCH", &pattern]).items();
        assert_eq!(scanned[1].clone().items().len(), count);
    }
    // A cursor may be used with a pattern whose keys are all before it.
    let scanned = client.ask(&["SCAN", "0", "COUNT", "5"]).items();
    let behind = client.ask(&["SCAN", &scanned[0].text(), "MATCH", "a*"]).items();
    assert_eq!((behind[0].text(), behind[1].clone().items().len()), ("0".to_owned(), 0));
    assert_eq!(client.ask(&[b"DELRANGE", &end(b'a')[..], &end(b'm')]), Value::Number(4));
}
