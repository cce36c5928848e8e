//! A real index in a pool that is full: what takes memory is refused, what takes none works.

use super::clients::{serve_index, serve_index_with};
use super::common::{Client, Value, bytes, encode, options};
use super::hostile::number;
use farwood_fabric::ServerId;
use farwood_fabric::procedure::ProcedureSet;
use farwood_fabric::region::PoolId;
use farwood_fabric::transport::local::LocalCluster;
use farwood_gateway::Options;
use farwood_memory::{MemoryServer, ServerConfig};
use std::sync::Arc;

const FULL: &str = "OOM command not allowed when used memory > 'maxmemory'.";

/// A value of this length that says whose it is. Some end with the byte that envelopes end with.
fn value_of(key: usize, length: usize) -> Vec<u8> {
    let mut value = key.to_string().into_bytes().repeat(length + 1);
    value.truncate(length);
    if let (0, Some(last)) = (key % 5, value.last_mut()) {
        *last = 0xfd;
    }
    value
}

#[test]
fn times_can_be_set_and_keys_removed_in_a_full_pool() {
    // Small chunks, so that every size of leaves gets some.
    let config = ServerConfig::new(PoolId(1), ServerId::COORDINATOR, 1, 8 << 20);
    let config = ServerConfig { chunk_bytes: 64 << 10, ..config };
    let server = MemoryServer::new(config, ProcedureSet::default()).expect("a server");
    let gateway = serve_index(&LocalCluster::start(vec![Arc::new(server)]).expect("a pool"));
    let mut client = Client::to(gateway.address());
    // Long values first, then shorter ones into what is left, until not even an empty one fits; and those that are looked for at the end. Leaves have 64 bytes more from one size to
    // the next, so that some of these fill theirs to the last byte.
    let mut rng = fastrand::Rng::with_seed(7);
    let mut fill = |client: &mut Client, lengths: &mut Vec<usize>| {
        for range in [0..20_000, 0..3000, 0..1200, 0..500, 0..100, 0..30, 0..1, 10_000..10_001] {
            loop {
                let (key, length) = (lengths.len(), rng.usize(range.clone()));
                match client.ask(&[&b"SET"[..], format!("key:{key:06}").as_bytes(), &value_of(key, length)]) {
                    Value::Word(_) => lengths.push(length),
                    refused => break assert_eq!(refused, Value::Error(FULL.into())),
                }
            }
        }
    };
    let mut lengths = Vec::new();
    fill(&mut client, &mut lengths);
    assert!(lengths.len() > 1000, "{} keys", lengths.len());
    // What values gain while it is full does not take the room for times.
    for (key, length) in lengths.iter_mut().enumerate().step_by(3) {
        let more = value_of(key, *length + 1 + key % 12);
        match client.ask(&[&b"SET"[..], format!("key:{key:06}").as_bytes(), &more]) {
            Value::Word(_) => *length = more.len(),
            refused => assert_eq!(refused, Value::Error(FULL.into())),
        }
    }
    fill(&mut client, &mut lengths);
    let each = |client: &mut Client, command: &[&str], told: &dyn Fn(usize) -> Value| {
        for (key, _) in lengths.iter().enumerate() {
            let mut words = command.to_vec();
            let name = format!("key:{key:06}");
            words.insert(1, &name);
            let (said, told) = (client.ask(&words), told(key));
            let end = |value: &Value| match value {
                Value::Bytes(bytes) => {
                    format!("{} bytes, {:?}", bytes.len(), &bytes[bytes.len().saturating_sub(24)..])
                }
                other => format!("{other:?}"),
            };
            assert!(said == told, "{words:?}: {} where {} were expected", end(&said), end(&told));
        }
    };
    let value = |key: usize| bytes(value_of(key, lengths[key]));
    let done = |_| Value::Number(1);
    each(&mut client, &["EXPIRE", "1000"], &done);
    each(&mut client, &["GET"], &value);
    each(&mut client, &["PEXPIRE", "5000000"], &done);
    each(&mut client, &["PERSIST"], &done);
    each(&mut client, &["GETEX", "EXAT", "32503680000"], &value);
    each(&mut client, &["EXPIRETIME"], &|_| Value::Number(32_503_680_000));
    each(&mut client, &["GETEX", "PERSIST"], &value);
    each(&mut client, &["TTL"], &|_| Value::Number(-1));
    assert_eq!(client.ask(&["SET", "another", &"v".repeat(10_000)]), Value::Error(FULL.into()), "it is full");
    // Every third each way. Some are for others to remove: they expire.
    let removes = ["DEL", "UNLINK", "GETDEL", "PEXPIRE"];
    for (key, _) in lengths.iter().enumerate() {
        let (name, command) = (format!("key:{key:06}"), removes[key % removes.len()]);
        let told = if command == "PEXPIRE" {
            client.ask(&[command, &name, "-1"])
        } else {
            client.ask(&[command, &name])
        };
        let expected = if command == "GETDEL" { value(key) } else { Value::Number(1) };
        assert_eq!(told, expected, "{command} {name}");
    }
    assert_eq!(client.say("DBSIZE"), Value::Number(0));
    assert_eq!(client.ask(&["SET", "another", &"v".repeat(10_000)]), Value::Word("OK".into()));
}

/// Many clients want a long value at once, more together than clients may have, and read slowly: each gets it, and none has to go.
#[test]
fn long_replies_wait_for_room_and_nobody_who_reads_is_disconnected() {
    const CLIENTS: usize = 48;
    const LIMIT: u64 = 16 << 20;
    let embedded = farwood_memory::embedded(1, 64 << 20).expect("a pool");
    let gateway = serve_index_with(&embedded, Options { client_memory_bytes: LIMIT, ..options() });
    let mut other = Client::to(gateway.address());
    let value = value_of(1, 1 << 20);
    assert_eq!(other.ask(&[&b"SET"[..], b"long", &value]), Value::Word("OK".into()));
    for words in [&["GET", "long"][..], &["GETEX", "long", "EX", "1000"], &["MGET", "long", "absent"]] {
        let mut clients: Vec<_> = (0..CLIENTS).map(|_| Client::to(gateway.address())).collect();
        for client in &mut clients {
            client.send(&encode(words));
        }
        let expected =
            if words[0] == "MGET" { Value::Array(vec![bytes(&value), Value::Nil]) } else { bytes(&value) };
        for client in &mut clients {
            assert_eq!(client.read(), expected, "{words:?}");
            assert!(number(&mut other, "client_memory_bytes") <= LIMIT + (2 << 20), "{words:?}");
        }
    }
    assert_eq!(number(&mut other, "evicted_clients"), 0);
}

/// Clients that want many long values and read none go when others want their room, also those that wait for room themselves. Nobody waits
/// for them until patience ends, and what is short waits for nothing.
#[test]
fn who_reads_nothing_and_waits_for_room_is_in_nobodys_way() {
    let embedded = farwood_memory::embedded(1, 64 << 20).expect("a pool");
    let gateway = serve_index_with(&embedded, Options { client_memory_bytes: 16 << 20, ..options() });
    let mut other = Client::to(gateway.address());
    let value = value_of(1, 1 << 20);
    assert_eq!(other.ask(&[&b"SET"[..], b"long", &value]), Value::Word("OK".into()));
    let kinds = [&["GET", "long"][..], &["MGET", "long", "long"], &["GETEX", "long", "EX", "1000"]];
    let deaf: Vec<_> = (0..24)
        .map(|n| {
            let mut client = Client::to(gateway.address());
            client.send(&encode(kinds[n % kinds.len()]).repeat(40));
            client
        })
        .collect();
    for _ in 0..8 {
        assert_eq!(other.ask(&["GET", "long"]), bytes(&value));
        assert_eq!(other.say("SET short 1"), Value::Word("OK".into()));
    }
    assert!(number(&mut other, "evicted_clients") > 0);
    assert!(!other.say("INFO everything").text().contains("path_room_waited_for_in_vain"));
    drop(deaf);
}

#[test]
fn the_longest_value_takes_a_time() {
    let gateway = serve_index(&farwood_memory::embedded(1, 64 << 20).expect("a pool"));
    let mut client = Client::to(gateway.address());
    for last in [b'v', 0xfd] {
        let longest = [vec![b'v'; (1 << 20) - 1], vec![last]].concat();
        let longer = [&longest[..], b"v"].concat();
        let key = vec![b'k'; 4096];
        let set = |value: &[u8], more: &[&str]| {
            let words = [b"SET".to_vec(), key.clone(), value.to_vec()];
            words.into_iter().chain(more.iter().map(|word| word.as_bytes().to_vec())).collect::<Vec<_>>()
        };
        let get = |client: &mut Client| client.ask(&[b"GET", &key[..]]);
        assert_eq!(client.ask(&set(&longest, &["EX", "100"])), Value::Word("OK".into()));
        assert_eq!(get(&mut client), bytes(&longest));
        assert_eq!(client.ask(&[b"PERSIST", &key[..]]), Value::Number(1));
        assert_eq!(client.ask(&set(&longest, &[])), Value::Word("OK".into()));
        for _ in 0..2 {
            assert_eq!(client.ask(&[b"EXPIRE", &key[..], b"100"]), Value::Number(1));
            assert_eq!(get(&mut client), bytes(&longest));
        }
        let refused =
            Value::Error("ERR the value is longer than the 1048576 bytes that a value may have".to_owned());
        for more in [&[][..], &["EX", "100"], &["KEEPTTL"]] {
            assert_eq!(client.ask(&set(&longer, more)), refused);
        }
        for persist in [false, true] {
            assert_eq!(client.ask(&[b"APPEND", &key[..], b"v"]), refused, "{persist}");
            assert_eq!(client.ask(&[b"PERSIST", &key[..]]), Value::Number(i64::from(!persist)));
        }
        assert_eq!(get(&mut client), bytes(&longest), "it is as it was");
        let longer_key = vec![b'k'; 4097];
        assert_eq!(client.ask(&[b"GET", &longer_key[..]]), Value::Nil);
        assert!(
            matches!(client.ask(&[b"SET", &longer_key[..], b"v"]), Value::Error(text) if text.contains("4096"))
        );
        let end = [&b"["[..], &vec![b'k'; 100_000]].concat();
        assert_eq!(client.ask(&[b"COUNTRANGE", &b"-"[..], &end]), Value::Number(1));
        assert_eq!(client.ask(&[b"COUNTRANGE", &end[..], b"+"]), Value::Number(0));
    }
}

#[test]
fn config_and_info_say_the_same_of_memory() {
    let gateway = serve_index(&farwood_memory::embedded(1, 64 << 20).expect("a pool"));
    let mut client = Client::to(gateway.address());
    let info = client.say("INFO memory").text();
    let said = |name: &str| info.lines().find_map(|line| line.strip_prefix(name)).map(str::to_owned);
    let mut config = |name: &str| client.say(&format!("CONFIG GET {name}")).items()[1].text();
    assert_eq!(said("maxmemory:"), Some((64u64 << 20).to_string()));
    assert_eq!(Some(config("maxmemory")), said("maxmemory:"));
    assert_eq!(Some(config("maxmemory-policy")), said("maxmemory_policy:"));
}
