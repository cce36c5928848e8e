//! Clients that do not behave, limits, and what a gateway does by itself.

use super::common::{Client, Map, Value, bytes, encode, gateway, nap, options, start, wait_for};
use farwood_gateway::{Gateway, Options, StartError};
use std::io::{Read, Write};
use std::net::TcpStream;

#[test]
fn one_client_too_many_is_told_so() {
    let map = Map::default();
    let gateway = start(&map, Options { max_clients: 2, ..options() });
    let mut clients = [Client::to(gateway.address()), Client::to(gateway.address())];
    for client in &mut clients {
        assert_eq!(client.say("PING"), Value::Word("PONG".into()));
    }
    let mut third = Client::to(gateway.address());
    assert_eq!(third.try_read(), Some(Value::Error("ERR max number of clients reached".into())));
    assert_eq!(third.try_read(), None);
    assert_eq!(clients[0].say("PING"), Value::Word("PONG".into()), "the others are not disturbed");
    drop(clients);
    wait_for("a place", || Client::to(gateway.address()).try_ping());
}

impl Client {
    fn try_ping(&mut self) -> bool {
        let sent = self.stream.get_mut().write_all(b"PING\r\n");
        sent.is_ok() && self.try_read() == Some(Value::Word("PONG".into()))
    }
}

#[test]
fn a_password_is_asked_for() {
    let map = Map::default();
    let gateway = start(&map, Options { password: Some(b"open sesame".to_vec()), ..options() });
    let mut client = Client::to(gateway.address());
    let refused = Value::Error("NOAUTH Authentication required.".into());
    for command in ["GET a", "PING", "INFO", "nosuch"] {
        assert_eq!(client.say(command), refused, "{command}");
    }
    let wrong = Value::Error("WRONGPASS invalid username-password pair or user is disabled.".into());
    for attempt in [&["AUTH", "open"][..], &["AUTH", "open sesame!"], &["AUTH", "me", "open sesame"]] {
        assert_eq!(client.ask(attempt), wrong);
    }
    assert!(matches!(client.say("HELLO 3"), Value::Error(text) if text.starts_with("NOAUTH HELLO")));
    assert_eq!(client.ask(&["AUTH", "open sesame"]), Value::Word("OK".into()));
    assert_eq!(client.say("GET a"), Value::Nil);
    let mut other = Client::to(gateway.address());
    assert!(matches!(other.ask(&["HELLO", "3", "AUTH", "default", "open sesame"]), Value::Map(_)));
    assert_eq!(other.say("SET a 1"), Value::Word("OK".into()));
    // Who has not said it gets no memory for long requests.
    let mut stranger = Client::to(gateway.address());
    stranger.send(b"*2\r\n$4\r\nAUTH\r\n$1000000\r\n");
    assert!(matches!(stranger.read(), Value::Error(text) if text.ends_with("unauthenticated bulk length")));
    assert_eq!(stranger.try_read(), None);
}

/// A client that takes MULTI for granted sends its commands before it reads the answer.
#[test]
fn nothing_is_carried_out_between_multi_and_exec() {
    let map = Map::default();
    let gateway = start(&map, options());
    let mut client = Client::to(gateway.address());
    let error = |value: Value| match value {
        Value::Error(text) => text,
        other => panic!("{other:?}"),
    };
    client.send(b"MULTI\r\nSET a 1\r\nPING\r\nMULTI\r\nEXEC\r\nSET b 2\r\n");
    assert!(error(client.read()).starts_with("ERR there are no transactions"));
    for _ in 0..2 {
        assert!(error(client.read()).starts_with("ERR not carried out"));
    }
    assert!(error(client.read()).contains("nested"));
    assert!(
        error(client.read()).starts_with("EXECABORT "),
        "libraries take it for a transaction that was given up"
    );
    assert_eq!(client.read(), Value::Word("OK".into()));
    assert_eq!(map.lock().keys().collect::<Vec<_>>(), [b"b"]);
    client.send(b"MULTI\r\nDEL b\r\nDISCARD\r\nGET b\r\n");
    assert!(error(client.read()).starts_with("ERR ") && error(client.read()).starts_with("ERR "));
    assert_eq!(client.read(), Value::Word("OK".into()));
    assert_eq!(client.read(), bytes("2"));
    assert_eq!(error(client.say("EXEC")), "ERR EXEC without MULTI");
    assert_eq!(error(client.say("DISCARD")), "ERR DISCARD without MULTI");
    assert_eq!(client.say("PING"), Value::Word("PONG".into()), "no transaction has begun");
}

/// A web page can make somebody's browser send such requests to any port that the machine reaches.
#[test]
fn http_is_hung_up_on() {
    let map = Map::default();
    for options in [options(), Options { password: Some(b"open sesame".to_vec()), ..options() }] {
        let gateway = start(&map, options);
        for head in ["POST / HTTP/1.1\r\nHost: x\r\n\r\n", "GET / HTTP/1.1\r\nHost: x\r\n\r\n", "hOST: x\r\n"]
        {
            let mut client = Client::to(gateway.address());
            client.send(format!("{head}SET a 1\r\n").as_bytes());
            // What came before, a GET with too many arguments for one, is answered.
            while let Some(value) = client.try_read() {
                assert!(matches!(value, Value::Error(_)), "{head}: {value:?}");
            }
        }
    }
    assert!(map.lock().is_empty());
}

#[test]
fn nobody_listens_beyond_the_machine_without_a_password() {
    let listen = "0.0.0.0:0".parse().expect("an address");
    let started = Gateway::start(&super::common::pool(), Map::default(), Options { listen, ..options() });
    assert!(
        matches!(&started, Err(error @ StartError::Unprotected(_)) if error.to_string().contains("--password-file"))
    );
}

#[test]
fn silent_clients_are_disconnected_and_others_are_not() {
    let map = Map::default();
    let gateway = start(&map, Options { idle_seconds: 1, ..options() });
    let (mut silent, mut busy) = (Client::to(gateway.address()), Client::to(gateway.address()));
    assert_eq!(silent.say("PING"), Value::Word("PONG".into()));
    let ended = std::thread::scope(|scope| {
        let ended = scope.spawn(move || silent.try_read());
        while !ended.is_finished() {
            assert_eq!(busy.say("PING"), Value::Word("PONG".into()));
            nap(100);
        }
        ended.join().expect("it was disconnected")
    });
    assert_eq!(ended, None);
    assert_eq!(busy.say("PING"), Value::Word("PONG".into()));
}

#[test]
fn a_client_that_does_not_read_is_not_listened_to_and_then_disconnected() {
    let map = Map::default();
    let gateway = start(&map, Options { unread_seconds: 1, threads: 1, ..options() });
    let mut other = Client::to(gateway.address());
    other.ask(&[b"SET".to_vec(), b"long".to_vec(), vec![b'x'; 1 << 20]]);
    let mut deaf = TcpStream::connect(gateway.address()).expect("it listens");
    deaf.set_nonblocking(true).expect("it can");
    // Much at a time, or what lies between the two would hold all of it.
    let request = encode(&["GET", "long"]).repeat(5000);
    let mut refused = false;
    wait_for("the end of the deaf client", || {
        let written = deaf.write(&request);
        assert_eq!(other.say("STRLEN long"), Value::Number(1 << 20), "others are served");
        refused |= matches!(&written, Err(error) if error.kind() == std::io::ErrorKind::WouldBlock);
        matches!(written, Err(error) if error.kind() != std::io::ErrorKind::WouldBlock)
    });
    assert!(refused, "what it sends is not taken in without end");
    drop(deaf.read(&mut [0]));
}

#[test]
fn requests_and_replies_have_a_longest() {
    let map = Map::default();
    let gateway = start(&map, Options { max_request_bytes: 4096, max_reply_bytes: 10_000, ..options() });
    let mut client = Client::to(gateway.address());
    for n in 0..20 {
        assert_eq!(client.ask(&["SET", &format!("k{n:02}"), &"v".repeat(1000)]), Value::Word("OK".into()));
    }
    let keys: Vec<String> = (0..20).map(|n| format!("k{n:02}")).collect();
    let mget: Vec<&str> = ["MGET"].into_iter().chain(keys.iter().map(String::as_str)).collect();
    for too_much in [&["RANGE", "-", "+"][..], &mget] {
        assert!(
            matches!(client.ask(too_much), Value::Error(text) if text.contains("--max-reply")),
            "{too_much:?}"
        );
    }
    assert_eq!(
        client.say("RANGE - + LIMIT 5").items().len(),
        10,
        "less at a time is fine, on the same connection"
    );
    client.send(b"*2\r\n$3\r\nGET\r\n$4096\r\n");
    assert!(matches!(client.read(), Value::Error(text) if text.contains("--max-request")));
    assert_eq!(client.try_read(), None);
}

#[test]
fn a_full_pool_is_an_error_and_what_is_there_stays() {
    let map = Map::with_capacity(4000);
    let gateway = gateway(&map);
    let mut client = Client::to(gateway.address());
    let mut stored = 0;
    let refused = loop {
        match client.ask(&["SET", &format!("k{stored}"), &"v".repeat(100)]) {
            Value::Word(_) => stored += 1,
            other => break other,
        }
    };
    assert_eq!(refused, Value::Error("OOM command not allowed when used memory > 'maxmemory'.".into()));
    assert!(stored > 20);
    assert_eq!(client.say("DBSIZE"), Value::Number(stored));
    assert_eq!(client.say("DEL k0"), Value::Number(1));
    assert_eq!(client.ask(&["SET", "k0", &"w".repeat(100)]), Value::Word("OK".into()));
}

#[test]
fn expired_keys_are_swept_though_nobody_asks() {
    let map = Map::default();
    let gateway = gateway(&map);
    let mut client = Client::to(gateway.address());
    for n in 0..300 {
        let time = if n % 2 == 0 { "1" } else { "100000" };
        client.ask(&["SET", &format!("k{n}"), "v", "PX", time]);
    }
    wait_for("the sweep", || map.lock().len() == 150);
    assert_eq!(client.say("DBSIZE"), Value::Number(150));
    let info = client.say("INFO stats").text();
    assert!(info.contains("expired_keys:150\r\n"), "{info}");
}

#[test]
fn bytes_may_come_one_at_a_time() {
    let map = Map::default();
    let gateway = gateway(&map);
    let mut client = Client::to(gateway.address());
    let requests = [encode(&["SET", "a", "1"]), b"GET a\r\n".to_vec(), encode(&["INCR", "a"])].concat();
    for byte in &requests {
        client.send(&[*byte]);
    }
    assert_eq!(client.read(), Value::Word("OK".into()));
    assert_eq!(client.read(), bytes("1"));
    assert_eq!(client.read(), Value::Number(2));
}

#[test]
fn clients_move_between_threads_and_notice_nothing() {
    let map = Map::default();
    let gateway = gateway(&map);
    let mut clients: Vec<_> = (0..8).map(|_| Client::to(gateway.address())).collect();
    for (n, client) in clients.iter_mut().enumerate() {
        assert!(matches!(client.say("HELLO 3"), Value::Map(_)));
        assert_eq!(client.say(&format!("CLIENT SETNAME number-{n}")), Value::Word("OK".into()));
    }
    let mut count = 0;
    wait_for("clients to move", || {
        count += 1;
        let mut rests = Vec::new();
        for (n, client) in clients.iter_mut().enumerate() {
            // One request and the beginning of the next, which moves along.
            let mut requests = encode(&["INCR", &format!("counter-{n}")]);
            let whole = requests.len();
            requests.extend(encode(&["SET", &format!("key-{n}"), &count.to_string()]));
            let rest = requests.split_off(whole + (count * 7 + n) % (requests.len() - whole));
            client.send(&requests);
            assert_eq!(client.read(), Value::Number(i64::try_from(count).expect("few")));
            rests.push(rest);
        }
        for (client, rest) in clients.iter_mut().zip(&rests) {
            client.send(rest);
            assert_eq!(client.read(), Value::Word("OK".into()));
        }
        let info = clients[0].say("INFO farwood").text();
        let moved = info.lines().find_map(|line| line.strip_prefix("clients_handed_over:"));
        moved.and_then(|moved| moved.parse::<u32>().ok()).is_some_and(|moved| moved >= 3)
    });
    for (n, client) in clients.iter_mut().enumerate() {
        assert_eq!(client.say("CLIENT GETNAME"), bytes(format!("number-{n}")));
        assert_eq!(client.say(&format!("GET key-{n}")), bytes(count.to_string()));
        assert_eq!(client.say("GET nothing"), Value::Nil);
    }
    assert_eq!(clients[0].say("CLIENT LIST").text().lines().count(), clients.len(), "nobody is there twice");
}

#[test]
fn a_long_value_comes_through_whole() {
    let map = Map::default();
    let gateway = gateway(&map);
    let mut client = Client::to(gateway.address());
    let value: Vec<u8> = (0..5_000_000u32).map(|n| n.to_le_bytes()[n as usize % 3]).collect();
    assert_eq!(client.ask(&[&b"SET"[..], b"long", &value]), Value::Word("OK".into()));
    assert_eq!(client.ask(&["GET", "long"]), Value::Bytes(value));
}

#[test]
fn a_scan_meets_every_key_that_stays_once() {
    let map = Map::default();
    let gateway = gateway(&map);
    let (mut client, mut other) = (Client::to(gateway.address()), Client::to(gateway.address()));
    let stays = |n: u32| format!("stays:{n:04}");
    for n in 0..500 {
        client.ask(&["SET", &stays(n), "v"]);
    }
    let (mut cursor, mut found, mut calls) = ("0".to_owned(), Vec::new(), 0);
    loop {
        // Others come and go.
        other.ask(&["SET", &format!("stays:{:04}x", calls * 7), "v"]);
        other.ask(&["DEL", &format!("stays:{:04}x", calls * 3)]);
        let reply = client.ask(&["SCAN", &cursor, "MATCH", "stays:????", "COUNT", "7"]).items();
        calls += 1;
        found.extend(reply[1].clone().items().iter().map(Value::text));
        let again = client.ask(&["SCAN", &cursor, "MATCH", "stays:????", "COUNT", "7"]).items();
        assert_eq!(again[1], reply[1], "a cursor may be used again");
        cursor = reply[0].text();
        if cursor == "0" {
            break;
        }
    }
    assert_eq!(found, (0..500).map(stays).collect::<Vec<_>>());
    assert!(calls > 500 / 7);
    for wrong in ["12345", "x", "-1"] {
        assert!(
            matches!(client.ask(&["SCAN", wrong]), Value::Error(text) if text.starts_with("ERR invalid cursor"))
        );
    }
}

#[test]
fn counts_are_shown_to_people_and_to_prometheus() {
    let map = Map::default();
    let metrics = Some("127.0.0.1:0".parse().expect("an address"));
    let gateway = start(&map, Options { metrics, ..options() });
    let mut client = Client::to(gateway.address());
    client.say("CLIENT SETNAME tester");
    for _ in 0..100 {
        client.say("SET a 1");
        client.say("GET a");
        client.say("GET b");
    }
    client.say("INCR nosuch extra");
    let info = client.say("INFO everything").text();
    for line in
        ["keyspace_hits:100", "keyspace_misses:100", "connected_clients:1", "engine:map", "db0:keys=1,"]
    {
        assert!(info.contains(&format!("\n{line}")), "{line} in {info}");
    }
    for part in [
        "cmdstat_set:calls=100,",
        "latency_percentiles_usec_get:p50=",
        "server0:total=",
        "total_error_replies:1",
    ] {
        assert!(info.contains(part), "{part} in {info}");
    }
    assert!(client.say("CLIENT LIST").text().contains("name=tester "));
    let page = |path: &str| {
        let mut stream =
            TcpStream::connect(gateway.metrics_address().expect("it has one")).expect("it listens");
        stream.write_all(format!("GET {path} HTTP/1.1\r\n\r\n").as_bytes()).expect("it reads");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("text");
        text
    };
    let metrics = page("/metrics");
    assert!(metrics.starts_with("HTTP/1.1 200 OK\r\n"), "{metrics}");
    for line in [
        "farwood_commands_total{command=\"get\"} 200",
        "farwood_command_errors_total{command=\"incr\"} 1",
        "farwood_hits_total 100",
        "farwood_clients 1",
        "farwood_command_seconds_bucket{command=\"get\",le=\"+Inf\"}",
        "farwood_memory_bytes{server=\"0\",use=\"free\"}",
    ] {
        assert!(metrics.contains(line), "{line} in {metrics}");
    }
    assert!(page("/else").starts_with("HTTP/1.1 404"));
}

#[test]
fn a_gateway_that_stops_hangs_up_and_frees_its_port() {
    let map = Map::default();
    let gateway = gateway(&map);
    let address = gateway.address();
    let mut client = Client::to(address);
    assert_eq!(client.say("SET a 1"), Value::Word("OK".into()));
    drop(gateway);
    assert_eq!(client.try_read(), None);
    assert!(TcpStream::connect(address).is_err(), "nobody listens any more");
    let again = start(&map, Options { listen: address, ..options() });
    assert_eq!(Client::to(again.address()).say("GET a"), bytes("1"));
}
