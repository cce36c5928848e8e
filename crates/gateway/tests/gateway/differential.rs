//! The same commands to a gateway and to a real Redis: the same replies, to the byte.
//!
//! Skipped, with a line that says so, where `redis-server` is not installed.

use super::common::{Client, Map, Redis, Value, gateway};
use farwood_index::Limits;
use fastrand::Rng;

/// Keys are few, so that commands meet.
const KEYS: [&str; 6] = ["a", "b", "key:1", "key:2", "key:3", "é\0x"];

fn word(rng: &mut Rng, words: &[&str]) -> String {
    words[rng.usize(..words.len())].to_owned()
}

fn key(rng: &mut Rng) -> String {
    word(rng, &KEYS)
}

/// A key that is looked for: now and then one that is longer than any, and so absent.
fn sought(rng: &mut Rng) -> String {
    if rng.u8(..30) == 0 { "k".repeat(LIMITS.key_bytes + rng.usize(1..3)) } else { key(rng) }
}

/// What an engine takes.
const LIMITS: Limits = Limits { key_bytes: 4096, ..Limits::NONE };

/// Words that no command knows, with what errors must not repeat as it is.
const ODD: [&str; 7] = ["QQ", "line\r\nend\n\r\n", "\r\n", "ze\0ro", "'\"`", "%s%n", "é"];

fn odd(rng: &mut Rng) -> String {
    let word = word(rng, &ODD);
    if rng.u8(..4) == 0 { word.repeat(rng.usize(1..80)) } else { word }
}

fn value(rng: &mut Rng) -> String {
    let fixed =
        ["", "0", "-7", "41", "9223372036854775807", "-9223372036854775808", "text", "1.5", " 1", "01"];
    match rng.u8(..10) {
        0 => "x".repeat(rng.usize(..300)),
        1 => rng.i64(-1000..1000).to_string(),
        _ => word(rng, &fixed),
    }
}

/// Times that are far off, or have passed, or are none. Those far off differ by far more than what passes between
/// the two servers' looks at the clock, so that which of two is later (`EXPIRE GT`) is no question of milliseconds.
fn time(rng: &mut Rng) -> String {
    let odd = ["0", "-1", "abc", "9223372036854775807", "-9223372036854775808", "", "1.0"];
    if rng.u8(..4) == 0 { word(rng, &odd) } else { (rng.u64(100..1_000_000) * 100_000).to_string() }
}

fn whole_time(rng: &mut Rng) -> String {
    let odd = ["0", "-1", "abc", "1", "9223372036854775000", "4102444800", "4102444800000", "32503680000000"];
    word(rng, &odd)
}

/// One command, right or wrong.
fn command(rng: &mut Rng) -> Vec<String> {
    let name = word(
        rng,
        &[
            "GET",
            "GET",
            "SET",
            "SET",
            "SET",
            "SETNX",
            "SETEX",
            "PSETEX",
            "GETSET",
            "GETDEL",
            "GETEX",
            "MGET",
            "MSET",
            "DEL",
            "UNLINK",
            "EXISTS",
            "TOUCH",
            "STRLEN",
            "APPEND",
            "INCR",
            "DECR",
            "INCRBY",
            "DECRBY",
            "TYPE",
            "EXPIRE",
            "PEXPIRE",
            "EXPIREAT",
            "PEXPIREAT",
            "TTL",
            "PTTL",
            "EXPIRETIME",
            "PEXPIRETIME",
            "PERSIST",
            "KEYS",
            "PING",
            "ECHO",
            "SELECT",
            "nosuch",
            "DBSIZE",
            "CLIENT",
            "FLUSHDB",
        ],
    );
    let mut command = vec![name.clone()];
    match name.as_str() {
        "SET" => {
            command.extend([key(rng), value(rng)]);
            for _ in 0..rng.usize(..4) {
                let option = word(rng, &["NX", "XX", "GET", "KEEPTTL", "ex", "PX", "EXAT", "PXAT", "BAD"]);
                let is_timed = matches!(option.as_str(), "ex" | "PX");
                let is_whole = matches!(option.as_str(), "EXAT" | "PXAT");
                command.push(option);
                if is_timed {
                    command.push(time(rng));
                } else if is_whole {
                    command.push(whole_time(rng));
                }
            }
        }
        "SETNX" | "GETSET" | "APPEND" | "INCRBY" | "DECRBY" => command.extend([key(rng), value(rng)]),
        "SETEX" | "PSETEX" => command.extend([key(rng), time(rng), value(rng)]),
        "GETEX" => {
            command.push(sought(rng));
            match rng.u8(..4) {
                0 => command.push("PERSIST".into()),
                1 => command.extend(["EX".into(), time(rng)]),
                2 => command.extend(["PXAT".into(), whole_time(rng)]),
                _ => {}
            }
        }
        "MGET" | "DEL" | "UNLINK" | "EXISTS" | "TOUCH" => {
            command.extend((0..rng.usize(1..4)).map(|_| sought(rng)));
        }
        "MSET" => {
            command.extend((0..rng.usize(2..7)).map(|n| if n % 2 == 0 { key(rng) } else { value(rng) }));
        }
        "EXPIRE" | "PEXPIRE" | "EXPIREAT" | "PEXPIREAT" => {
            command.push(sought(rng));
            command.push(if name.ends_with("AT") { whole_time(rng) } else { time(rng) });
            for _ in 0..rng.usize(..3) {
                let option = word(rng, &["NX", "xx", "GT", "LT", ""]);
                command.push(if option.is_empty() { odd(rng) } else { option });
            }
        }
        "KEYS" => {
            command.push(word(rng, &["*", "key:*", "key:[12]", "?", "[^a]", "é*", "key:\\1", "nothing*"]));
        }
        "PING" => command.extend((0..rng.usize(..3)).map(|_| value(rng))),
        "SELECT" => command.push(word(rng, &["0", "1", "x", "-1"])),
        "ECHO" => command.push(value(rng)),
        "CLIENT" => {
            let subcommand = word(rng, &["GETNAME", "SETNAME", "SETNAME", ""]);
            let subcommand = if subcommand.is_empty() { odd(rng) } else { subcommand };
            if subcommand == "SETNAME" {
                command.extend([subcommand, word(rng, &["me", "with space", "", "you"])]);
            } else {
                command.push(subcommand);
            }
        }
        "nosuch" => {
            if rng.bool() {
                command[0] = odd(rng);
            }
            command.extend((0..rng.usize(..5)).map(|_| if rng.bool() { value(rng) } else { odd(rng) }));
        }
        "DBSIZE" | "FLUSHDB" => {
            // Rarely: everything would be gone all the time.
            if name == "FLUSHDB" && rng.u8(..6) > 0 {
                return vec!["DBSIZE".into()];
            }
        }
        "INCR" | "DECR" => command.push(key(rng)),
        _ => command.push(sought(rng)),
    }
    // Now and then one argument too few, or too many.
    match rng.u8(..40) {
        0 if command.len() > 1 => drop(command.pop()),
        1 => command.push("more".into()),
        _ => {}
    }
    command
}

/// Whether the replies are equal to the byte, where they have to be.
fn are_alike(command: &[String], our: &Value, their: &Value) -> bool {
    match (command[0].to_ascii_uppercase().as_str(), our, their) {
        // Redis knows no order of keys.
        ("KEYS", Value::Array(ours), Value::Array(theirs)) => {
            let sorted = |keys: &[Value]| {
                let mut keys = keys.to_vec();
                keys.sort();
                keys
            };
            sorted(ours) == sorted(theirs)
        }
        // Redis counts keys that have expired until it meets them.
        ("DBSIZE", Value::Number(_), Value::Number(_)) => true,
        // Time passes between the two.
        ("PTTL" | "PEXPIRETIME", Value::Number(our), Value::Number(their)) if *our > 0 && *their > 0 => {
            our.abs_diff(*their) < 50_000
        }
        ("TTL" | "EXPIRETIME", Value::Number(our), Value::Number(their)) if *our > 0 && *their > 0 => {
            our.abs_diff(*their) < 50
        }
        _ => our == their,
    }
}

#[test]
fn replies_are_those_of_redis() {
    let Some(redis) = Redis::start() else { return };
    let map = Map::with_limits(LIMITS);
    let gateway = gateway(&map);
    for seed in 0..60 {
        let mut rng = Rng::with_seed(seed);
        let (mut ours, mut theirs) = (Client::to(gateway.address()), Client::to(redis.address));
        for client in [&mut ours, &mut theirs] {
            client.say("FLUSHALL");
        }
        if seed % 2 == 1 {
            for client in [&mut ours, &mut theirs] {
                let Value::Map(hello) = client.say("HELLO 3") else { panic!("a map") };
                assert_eq!(hello[0], (super::common::bytes("server"), super::common::bytes("redis")));
            }
        }
        let mut so_far = Vec::new();
        for _ in 0..300 {
            let command = command(&mut rng);
            let (our, their) = (ours.ask(&command), theirs.ask(&command));
            let is_alike = are_alike(&command, &our, &their);
            so_far.push(command);
            let recent = &so_far[so_far.len().saturating_sub(12)..];
            assert!(is_alike, "seed {seed}: {our:?} where Redis says {their:?}, after {recent:#?}");
        }
    }
}

/// A pipeline is answered in order, whatever its commands are about and however they overtake each other.
#[test]
fn pipelines_are_answered_as_redis_does() {
    let Some(redis) = Redis::start() else { return };
    let map = Map::default();
    let gateway = gateway(&map);
    for seed in 0..30 {
        let mut rng = Rng::with_seed(1000 + seed);
        let (mut ours, mut theirs) = (Client::to(gateway.address()), Client::to(redis.address));
        for client in [&mut ours, &mut theirs] {
            client.say("FLUSHALL");
        }
        for _ in 0..4 {
            let commands: Vec<_> = (0..rng.usize(1..150)).map(|_| command(&mut rng)).collect();
            let bytes: Vec<u8> = commands.iter().flat_map(|command| super::common::encode(command)).collect();
            ours.send(&bytes);
            theirs.send(&bytes);
            for (n, command) in commands.iter().enumerate() {
                let (our, their) = (ours.read(), theirs.read());
                let is_alike = are_alike(command, &our, &their);
                assert!(
                    is_alike,
                    "seed {seed}, command {n}, {command:?}: {our:?} where Redis says {their:?}"
                );
            }
        }
    }
}

/// Errors repeat what clients have said: byte for byte, but for line ends, up to the first zero, and not all of what is long.
#[test]
fn errors_repeat_bytes_as_redis_does() {
    let Some(redis) = Redis::start() else { return };
    let map = Map::default();
    let gateway = gateway(&map);
    let (mut ours, mut theirs) = (Client::to(gateway.address()), Client::to(redis.address));
    let mut words: Vec<Vec<u8>> = ODD.iter().map(|word| word.as_bytes().to_vec()).collect();
    words.extend([
        b"\xff\xfe".to_vec(),
        b"\xc3".to_vec(),
        vec![],
        b"\r".to_vec(),
        b"x\xf0\x9f\r\n\0y".to_vec(),
    ]);
    words.extend([127, 128, 129, 300].map(|length| "é".repeat(length).into_bytes()[1..length].to_vec()));
    let mut rng = Rng::with_seed(3);
    words.extend((0..40).map(|_| {
        let some = [0, b'\r', b'\n', b'\'', b'"', b'a', 0x80, 0xff];
        (0..rng.usize(..150)).map(|_| some[rng.usize(..some.len())]).collect()
    }));
    for client in [&mut ours, &mut theirs] {
        client.say("SET k v");
    }
    let mut count = 0;
    for (n, word) in words.iter().enumerate() {
        let (word, next) = (word.as_slice(), words[(n + 1) % words.len()].as_slice());
        for command in [
            &[&b"nosuch"[..], word, next, word][..],
            &[&b"nosuch"[..], &[b'x'; 120], word, next],
            &[&b"x"[..], word],
            &[&b"CLIENT"[..], word],
            &[&b"cLiEnT"[..], word, next],
            &[&b"CONFIG"[..], word, b"x"],
            &[&b"COMMAND"[..], word],
            &[&b"CLIENT"[..], b"LIST", b"TYPE", word],
            &[&b"CLIENT"[..], b"LIST", b"ID", word],
            &[&b"CLIENT"[..], b"LIST", word],
            &[&b"CLIENT"[..], b"SETNAME", word],
            &[&b"HELLO"[..], word],
            &[&b"HELLO"[..], b"2", word],
            &[&b"HELLO"[..], b"2", word, next],
            &[&b"HELLO"[..], b"2", b"SETNAME", word],
            &[&b"HELLO"[..], b"4", word],
            &[&b"AUTH"[..], word],
            &[&b"SELECT"[..], word],
            &[&b"EXPIRE"[..], b"k", b"10", word],
            &[&b"EXPIRE"[..], b"k", word],
            &[&b"PEXPIREAT"[..], b"k", b"9223372036854775807", b"nx", word],
            &[&b"pExpire"[..], b"k", b"9223372036854775807"],
            &[&b"SET"[..], b"k", b"v", word],
            &[&b"SET"[..], b"k", b"v", b"EX", word],
            &[&b"SETEX"[..], b"k", b"0", word],
            &[&b"GETEX"[..], b"k", b"EX", b"-1"],
            &[&b"GETEX"[..], b"k", word],
            &[&b"INCRBY"[..], b"k", word],
            &[&b"SCAN"[..], b"0", word],
            &[&b"SCAN"[..], b"0", b"COUNT", word],
            &[&b"get"[..], word, word],
            &[&b"get\0"[..], b"k"],
            &[&b"FLUSHALL\0\0"[..]],
        ] {
            let (our, their) = (ours.ask(command), theirs.ask(command));
            // Whether there are clients of some kind is no question of bytes; a name may be right.
            let is_error = matches!((&our, &their), (Value::Error(_), _) | (_, Value::Error(_)));
            let text: Vec<_> = command.iter().map(|word| word.escape_ascii().to_string()).collect();
            assert!(!is_error || our == their, "{our:?} where Redis says {their:?} to {text:?}");
            count += usize::from(is_error);
        }
    }
    assert!(count > 25 * words.len(), "{count} errors");
}

/// What breaks the protocol ends the connection, with the words that Redis has for it.
#[test]
fn broken_requests_are_answered_as_redis_does() {
    let Some(redis) = Redis::start() else { return };
    let map = Map::default();
    let gateway = gateway(&map);
    for broken in [
        &b"*1\r\n:1\r\n"[..],
        b"*x\r\n",
        b"*3000000000\r\n",
        b"*1\r\n$-5\r\n",
        b"*1\r\n$x\r\n",
        b"*1\r\n$99999999999\r\n",
        b"get \"a\r\n",
        b"*1\r\n\xff1\r\n",
        b"*1\r\n\r\n",
        b"*1\r\n'1\r\n",
        b"*2\r\n$4\r\nECHO\r\n\n\r\n",
        b"\xff\x80 \"a\\r\\nb\"\r\nQUIT\r\n",
        b"*2\r\n$4\r\nECHO\r\n$2\r\nhi\r\n*1\r\nx\r\n",
        b"PING\r\n*-1\r\n*0\r\n\r\nECHO \"a b\"\r\nQUIT\r\n",
    ] {
        let replies = [gateway.address(), redis.address].map(|address| {
            let mut client = Client::to(address);
            client.send(broken);
            let mut replies = Vec::new();
            while let Some(reply) = client.try_read() {
                replies.push(reply);
            }
            replies
        });
        assert_eq!(replies[0], replies[1], "{:?}", String::from_utf8_lossy(broken));
        assert!(!replies[0].is_empty());
    }
}

/// RANGE and RANGEKEYS are what ZRANGE BYLEX is for the members of a sorted set.
#[test]
fn ranges_are_those_of_sorted_sets() {
    let Some(redis) = Redis::start() else { return };
    let map = Map::default();
    let gateway = gateway(&map);
    let (mut ours, mut theirs) = (Client::to(gateway.address()), Client::to(redis.address));
    let mut rng = Rng::with_seed(7);
    let mut some =
        || (0..rng.usize(..4)).map(|_| word(&mut rng, &["a", "b", "\0", "\u{7f}", "c"])).collect::<String>();
    for _ in 0..150 {
        let member = some();
        ours.ask(&["SET", &member, "v"]);
        theirs.ask(&["ZADD", "set", "0", &member]);
    }
    let mut rng = Rng::with_seed(8);
    for _ in 0..600 {
        let mut end = || match rng.u8(..10) {
            0 => "-".to_owned(),
            1 => "+".to_owned(),
            2 => word(&mut rng, &["x", "", "[", "("]),
            n => format!(
                "{}{}",
                if n % 2 == 0 { '[' } else { '(' },
                word(&mut rng, &["a", "ab", "b\0", "", "c", "cc"])
            ),
        };
        let (from, to) = (end(), end());
        let reverse = rng.bool();
        let limit = rng.bool().then(|| rng.i64(-1..12).to_string());
        let mut our: Vec<&str> = vec!["RANGEKEYS", &from, &to];
        let mut their: Vec<&str> = vec!["ZRANGE", "set", &from, &to, "BYLEX"];
        if reverse {
            our.push("REV");
            their.push("REV");
        }
        if let Some(limit) = &limit {
            our.extend(["LIMIT", limit]);
            their.extend(["LIMIT", "0", limit]);
        }
        let (keys, members) = (ours.ask(&our), theirs.ask(&their));
        assert_eq!(keys, members, "{our:?}");
        let is_whole = limit.is_none() && !reverse;
        if let (true, Value::Array(members)) = (is_whole, members) {
            let count = i64::try_from(members.len()).expect("few");
            assert_eq!(ours.ask(&["COUNTRANGE", &from, &to]), Value::Number(count));
            let pairs = ours.ask(&["RANGE", &from, &to]).items();
            assert_eq!(pairs.iter().step_by(2).cloned().collect::<Vec<_>>(), members);
            assert!(pairs.iter().skip(1).step_by(2).all(|value| *value == super::common::bytes("v")));
        }
    }
}
