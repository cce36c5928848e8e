//! Clients that take more than their share: memory, time, log lines.

use super::common::{Client, Map, PATIENCE, Value, encode, options, start, wait_for};
use farwood_gateway::envelope::seal;
use farwood_gateway::{Gateway, Options};
use std::io::{BufReader, Read, Write};
use std::net::TcpStream;

const MIB: usize = 1 << 20;
/// What a connection keeps that is about to say something.
const CHUNK_BYTES: u64 = 16 << 10;

/// A number of INFO.
pub(crate) fn number(client: &mut Client, name: &str) -> u64 {
    let info = client.say("INFO everything").text();
    let line = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.and_then(|number| number.trim().parse().ok()).unwrap_or_else(|| panic!("no {name} in {info}"))
}

fn connect(gateway: &Gateway) -> TcpStream {
    let stream = TcpStream::connect(gateway.address()).expect("it listens");
    stream.set_write_timeout(Some(PATIENCE)).expect("a time");
    stream
}

/// Programs that load data often send everything before they read a reply.
#[test]
fn a_million_requests_may_be_sent_before_the_first_reply_is_read() {
    const REQUESTS: usize = 1_000_000;
    let map = Map::default();
    let gateway = start(&map, options());
    let mut stream = connect(&gateway);
    stream.write_all(&b"STRLEN 0123456789\r\n".repeat(REQUESTS)).expect("it reads on");
    stream.write_all(b"SET last 1\r\n").expect("it reads on");
    let mut replies = vec![0; REQUESTS * 4 + 5];
    stream.set_read_timeout(Some(PATIENCE)).expect("a time");
    stream.read_exact(&mut replies).expect("all replies");
    assert!(replies[..REQUESTS * 4].chunks(4).all(|reply| reply == b":0\r\n"));
    assert_eq!(replies[REQUESTS * 4..], *b"+OK\r\n");
}

#[test]
fn requests_half_sent_have_a_bound_and_who_stands_still_goes() {
    let map = Map::default();
    let limit = 8 * MIB;
    let gateway = start(&map, Options { client_memory_bytes: limit as u64, ..options() });
    let mut other = Client::to(gateway.address());
    let half = [&b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$2097152\r\n"[..], &vec![b'x'; MIB]].concat();
    let mut half_sent = Vec::new();
    for n in 0..40 {
        let mut stream = connect(&gateway);
        // The gateway may hang up on it at once.
        let _ = stream.write_all(&half);
        half_sent.push(stream);
        assert_eq!(other.say(&format!("SET k{n} v")), Value::Word("OK".into()), "others are served");
        let used = number(&mut other, "client_memory_bytes");
        // Each of two threads reads once more before it looks.
        assert!(used <= (limit + 4 * MIB) as u64, "{used}");
    }
    wait_for("what is left to fit", || number(&mut other, "client_memory_bytes") <= limit as u64);
    assert!(number(&mut other, "evicted_clients") > 0);
    drop(half_sent);
    wait_for("the memory to come back", || number(&mut other, "client_memory_bytes") < MIB as u64);
}

/// Whoever always has more to say never makes the gateway wait, and is counted all the same.
#[test]
fn requests_that_never_pause_have_a_bound() {
    const SENT: usize = 16 * MIB;
    let map = Map::default();
    let gateway = start(&map, Options { client_memory_bytes: 8 * MIB as u64, ..options() });
    let mut other = Client::to(gateway.address());
    let part = vec![b'x'; MIB];
    let sent: Vec<usize> = std::thread::scope(|scope| {
        let send = || {
            let mut stream = connect(&gateway);
            let _ = stream.write_all(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$60000000\r\n");
            (0..SENT / MIB).take_while(|_| stream.write_all(&part).is_ok()).count() * MIB
        };
        let senders: Vec<_> = (0..32).map(|_| scope.spawn(send)).collect();
        senders.into_iter().map(|sender| sender.join().expect("it ends")).collect()
    });
    // The system takes some MiB for each that the gateway has not read.
    let all: usize = sent.iter().sum();
    println!("{} MiB of {} MiB were taken in", all / MIB, 32 * SENT / MIB);
    assert!(all < 32 * SENT * 5 / 8, "{sent:?}");
    assert!(number(&mut other, "evicted_clients") >= 24);
}

#[test]
fn unread_replies_have_a_bound_and_who_reads_gets_all() {
    let map = Map::default();
    let limit = 16 * MIB;
    let gateway = start(&map, Options { client_memory_bytes: limit as u64, ..options() });
    let mut other = Client::to(gateway.address());
    other.ask(&[&b"SET"[..], b"long", &vec![b'x'; MIB / 2]]);
    let request = encode(&["GET", "long"]).repeat(100);
    let mut deaf: Vec<_> = (0..10)
        .map(|_| {
            let mut stream = connect(&gateway);
            stream.write_all(&request).expect("it is short");
            stream
        })
        .collect();
    for _ in 0..200 {
        assert_eq!(other.say("STRLEN long"), Value::Number(524_288), "others are served");
        // A reply comes on top for each connection that is not held back yet.
        let used = number(&mut other, "client_memory_bytes");
        assert!(used <= (2 * limit) as u64, "{used}");
    }
    wait_for("somebody to go", || number(&mut other, "evicted_clients") > 0);
    deaf.clear();
    wait_for("the memory to come back", || number(&mut other, "client_memory_bytes") < MIB as u64);
    // Whoever reads, however late it begins, gets everything.
    let mut slow = connect(&gateway);
    slow.write_all(&request).expect("it is short");
    slow.set_read_timeout(Some(PATIENCE)).expect("a time");
    let mut slow = BufReader::new(slow);
    let mut reply = vec![0; b"$524288\r\n".len() + MIB / 2 + 2];
    for _ in 0..100 {
        slow.read_exact(&mut reply).expect("all replies");
        assert!(reply.starts_with(b"$524288\r\nxxx") && reply.ends_with(b"xxx\r\n"));
    }
}

/// Over a network a long request comes in parts, and its end is read into room that it fills: that is given back all the same.
#[test]
fn idle_clients_are_not_charged_for_their_last_request() {
    let map = Map::default();
    let gateway = start(&map, Options { client_memory_bytes: 8 * MIB as u64, ..options() });
    let mut other = Client::to(gateway.address());
    let mut idle = Vec::new();
    for n in 0..20 {
        let mut client = Client::to(gateway.address());
        let request = encode(&["SET", &format!("k{n}"), &"x".repeat(MIB)]);
        let (first, rest) = request.split_at(40_000);
        client.send(first);
        // So it is read by itself.
        assert_eq!(other.say("PING"), Value::Word("PONG".into()));
        client.send(rest);
        assert_eq!(client.read(), Value::Word("OK".into()));
        idle.push(client);
        wait_for("memory to come back", || number(&mut other, "client_memory_bytes") < 2 * CHUNK_BYTES);
    }
    for client in &mut idle {
        assert_eq!(client.say("PING"), Value::Word("PONG".into()));
    }
    assert_eq!(number(&mut other, "evicted_clients"), 0);
}

/// A command that would build up too much is refused. That clients are busy, with requests that come in parts, is no reason to disconnect them.
#[test]
fn a_command_that_asks_for_too_much_costs_nobody_else_the_connection() {
    let map = Map::default();
    let gateway = start(&map, Options { client_memory_bytes: 8 * MIB as u64, ..options() });
    let mut greedy = Client::to(gateway.address());
    greedy.ask(&[&b"SET"[..], b"long", &vec![b'x'; MIB]]);
    let mut busy: Vec<_> = (0..20).map(|_| Client::to(gateway.address())).collect();
    let request = encode(&["SET", "k", &"v".repeat(40_000)]);
    let (first, rest) = request.split_at(30_000);
    let asked: Vec<&str> = std::iter::once("MGET").chain(std::iter::repeat_n("long", 40)).collect();
    for _ in 0..5 {
        for client in &mut busy {
            client.send(first);
        }
        assert!(matches!(greedy.ask(&asked), Value::Error(text) if text.contains("--client-memory")));
        for client in &mut busy {
            client.send(rest);
            assert_eq!(client.read(), Value::Word("OK".into()));
        }
    }
    assert_eq!(number(&mut greedy, "evicted_clients"), 0);
}

/// Short requests do not make long replies, and leave nothing behind that grows.
#[test]
fn names_are_short_and_few_are_asked_about_at_a_time() {
    let map = Map::default();
    let gateway = start(&map, options());
    let mut client = Client::to(gateway.address());
    let long = "x".repeat(257);
    for command in [
        &["CLIENT", "SETNAME", &long][..],
        &["CLIENT", "SETINFO", "lib-name", &long],
        &["CLIENT", "SETINFO", "lib-ver", &long],
        &["HELLO", "3", "SETNAME", &long],
    ] {
        assert!(
            matches!(client.ask(command), Value::Error(text) if text.contains("256 bytes")),
            "{command:?}"
        );
    }
    assert_eq!(client.ask(&["CLIENT", "SETNAME", &long[1..]]), Value::Word("OK".into()));
    for what in ["INFO", "DOCS"] {
        let asked: Vec<&str> =
            ["COMMAND", what].into_iter().chain(std::iter::repeat_n("get", 1_001)).collect();
        assert!(!matches!(client.ask(&asked[..1_002]), Value::Error(_)));
        assert!(matches!(client.ask(&asked), Value::Error(text) if text.contains("1000 at a time")));
    }
}

/// One answer at a time, and each later than the one before: a guesser gets a few a second at first, one in seconds soon.
#[test]
fn whoever_guesses_passwords_is_slowed_down_and_nobody_else() {
    let map = Map::default();
    let gateway = start(&map, Options { password: Some(b"right".to_vec()), ..options() });
    let mut other = Client::to(gateway.address());
    assert_eq!(other.say("AUTH right"), Value::Word("OK".into()));
    let mut guessers: Vec<_> = (0..32)
        .map(|_| {
            let mut client = Client::to(gateway.address());
            client.send(b"AUTH wrong\r\n");
            client
        })
        .collect();
    assert_eq!(other.say("SET a 1"), Value::Word("OK".into()), "others are served");
    let told: Vec<_> = guessers.iter_mut().map(|client| client.read().text()).collect();
    let refused = told.iter().filter(|text| text.starts_with("ERR too many wrong passwords")).count();
    let wrong = told.iter().filter(|text| text.starts_with("WRONGPASS")).count();
    assert_eq!((refused, wrong), (16, 16), "so many of one address wait at a time: {told:?}");
    // The password lets one in while nobody waits any more.
    assert_eq!(Client::to(gateway.address()).say("AUTH right"), Value::Word("OK".into()));
}

#[test]
fn the_metrics_port_survives_readers_that_stand_still() {
    let map = Map::default();
    let metrics = Some("127.0.0.1:0".parse().expect("an address"));
    let gateway = start(&map, Options { metrics, ..options() });
    let at = gateway.metrics_address().expect("it has one");
    let mut still: Vec<_> = (0..100).map(|_| TcpStream::connect(at).expect("it listens")).collect();
    for stream in &mut still {
        // Some say nothing, some half of it.
        let _ = stream.write_all(b"GET /metr");
    }
    let mut stream = TcpStream::connect(at).expect("it listens");
    stream.write_all(b"GET /healthz HTTP/1.1\r\n\r\n").expect("it reads");
    stream.set_read_timeout(Some(PATIENCE)).expect("a time");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("an answer");
    assert!(text.starts_with("HTTP/1.1 200 OK\r\n"), "{text}");
    // At most so many are waited for; the others were hung up on.
    still[0].set_read_timeout(Some(PATIENCE)).expect("a time");
    assert_eq!(still[0].read(&mut [0]).unwrap_or(0), 0);
}

/// What is there was stored by a gateway that is gone.
#[test]
fn what_has_expired_makes_room_in_a_full_store() {
    let map = Map::with_capacity(100_000);
    {
        let mut entries = map.lock();
        for n in 0..900 {
            entries.insert(format!("old{n}").into_bytes(), seal(&[b'x'; 90], Some(1)).into_owned());
        }
    }
    let gateway = start(&map, options());
    let mut client = Client::to(gateway.address());
    for n in 0..700 {
        assert_eq!(client.ask(&["SET", &format!("new{n}"), &"y".repeat(100)]), Value::Word("OK".into()));
    }
    // A store full of what lives says so, without a long look each time.
    let refused = (0..3000)
        .map(|n| client.ask(&["SET", &format!("more{n}"), &"y".repeat(100)]))
        .filter(|value| matches!(value, Value::Error(text) if text.starts_with("OOM ")))
        .count();
    assert!(refused > 2000, "{refused}");
    assert_eq!(client.say("GET old1"), Value::Nil);
    assert_eq!(client.ask(&["GET", "new1"]), Value::Bytes(b"y".repeat(100)));
}

/// 20,000 keys a second that live for a second each are not kept for long.
#[test]
fn keys_are_removed_as_fast_as_they_expire() {
    let map = Map::default();
    let gateway = start(&map, options());
    let mut client = Client::to(gateway.address());
    for round in 0..20 {
        let commands: Vec<u8> =
            (0..1000).flat_map(|n| encode(&["SET", &format!("k{round}:{n}"), "v", "PX", "200"])).collect();
        client.send(&commands);
        for _ in 0..1000 {
            assert_eq!(client.read(), Value::Word("OK".into()));
        }
    }
    wait_for("all of them to go", || map.lock().is_empty());
    assert_eq!(number(&mut client, "expired_keys"), 20_000);
}
