//! A real client library, unmodified, on a real index in far memory: the Rust `redis` crate, over both versions of the protocol.

use super::common::{Client, Value, bytes, options, wait_for};
use farwood_fabric::control::SessionState;
use farwood_fabric::{Cluster, Executor, Session, SessionOptions};
use farwood_gateway::{Gateway, NamedIndex, Options};
use farwood_index::AnyEngine;
use redis::{Commands, Connection, ErrorKind, ExistenceCheck, SetExpiry, SetOptions};
use std::collections::BTreeSet;

/// A pool with an empty index.
fn pool() -> Cluster {
    let cluster = farwood_memory::embedded(2, 512 << 20).expect("a pool");
    create(&cluster);
    cluster
}

fn create(cluster: &Cluster) {
    let engine = AnyEngine::named("sphinx", 0, 0).expect("it is there");
    let client = farwood_index::Client::new(cluster, 1).expect("a client");
    client.create("test", &engine).wait().expect("an index");
}

/// A gateway on an empty index of this pool.
pub(crate) fn serve_index(cluster: &Cluster) -> Gateway {
    serve_index_with(cluster, options())
}

pub(crate) fn serve_index_with(cluster: &Cluster, options: Options) -> Gateway {
    create(cluster);
    Gateway::start(cluster, NamedIndex::new("test"), options).expect("a gateway")
}

fn gateway(cluster: &Cluster) -> Gateway {
    Gateway::start(cluster, NamedIndex::new("test"), options()).expect("a gateway")
}

fn connect(gateway: &Gateway, protocol: &str) -> Connection {
    let url = format!("redis://{}/?protocol={protocol}", gateway.address());
    redis::Client::open(url).and_then(|client| client.get_connection()).expect("a connection")
}

type Outcome = redis::RedisResult<()>;

#[test]
fn every_kind_of_command_over_both_protocols() -> Outcome {
    let cluster = pool();
    let gateway = gateway(&cluster);
    for protocol in ["resp2", "resp3"] {
        let mut redis = connect(&gateway, protocol);
        values(&mut redis)?;
        expiry(&mut redis)?;
        keyspace(&mut redis)?;
        ordered(&mut redis)?;
        server(&mut redis)?;
        redis::cmd("FLUSHDB").exec(&mut redis)?;
        assert_eq!(redis::cmd("DBSIZE").query::<usize>(&mut redis)?, 0);
    }
    Ok(())
}

fn values(redis: &mut Connection) -> Outcome {
    let _: () = redis.set("text", "hello")?;
    assert_eq!(redis.get::<_, String>("text")?, "hello");
    assert_eq!(redis.get::<_, Option<String>>("absent")?, None);
    let binary: Vec<u8> = (0..=255).chain([0xfd, 0, 0xfd, 1]).collect();
    for cut in 0..4 {
        let value = &binary[253 - cut..];
        let _: () = redis.set(&binary[cut..], value)?;
        assert_eq!(redis.get::<_, Vec<u8>>(&binary[cut..])?, value);
    }
    assert!(redis.set_nx::<_, _, bool>("once", 1)? && !redis.set_nx::<_, _, bool>("once", 2)?);
    let only_there = || SetOptions::default().conditional_set(ExistenceCheck::XX).get(true);
    assert_eq!(redis.set_options::<_, _, Option<String>>("once", 3, only_there())?, Some("1".into()));
    assert_eq!(redis.set_options::<_, _, Option<String>>("never", 3, only_there())?, None);
    assert_eq!(redis.getset::<_, _, String>("once", "x")?, "3");
    assert_eq!(redis.get_del::<_, String>("once")?, "x");
    assert!(!redis.exists::<_, bool>("once")?);
    let _: () = redis.mset(&[("m1", "1"), ("m2", "2"), ("m1", "3")])?;
    let found: Vec<Option<String>> = redis.mget(&["m1", "absent", "m2"])?;
    assert_eq!(found, [Some("3".into()), None, Some("2".into())]);
    assert_eq!(redis.append::<_, _, usize>("text", " world")?, 11);
    assert_eq!(redis.strlen::<_, usize>("text")?, 11);
    assert_eq!(redis.incr::<_, _, i64>("count", 1)?, 1);
    assert_eq!(redis.incr::<_, _, i64>("count", 41)?, 42);
    assert_eq!(redis.decr::<_, _, i64>("count", 50)?, -8);
    let error = redis.incr::<_, _, i64>("text", 1).expect_err("no number");
    assert!(error.to_string().contains("not an integer"), "{error}");
    assert_eq!(redis.del::<_, usize>(&["m1", "m2", "absent"])?, 2);
    assert_eq!(redis.unlink::<_, usize>("count")?, 1);
    Ok(())
}

fn expiry(redis: &mut Connection) -> Outcome {
    let soon = SetOptions::default().with_expiration(SetExpiry::PX(1));
    let _: () = redis.set_options("soon", "x", soon)?;
    while redis.exists("soon")? {}
    assert_eq!(redis.ttl::<_, i64>("soon")?, -2);
    assert!(redis.set_nx::<_, _, bool>("soon", "again")?, "what has expired is absent");
    assert_eq!(redis.ttl::<_, i64>("soon")?, -1);
    assert!(redis.expire::<_, bool>("soon", 1000)?);
    assert!((990..=1000).contains(&redis.ttl::<_, i64>("soon")?));
    assert_eq!(redis.append::<_, _, usize>("soon", "!")?, 6);
    assert!(redis.pttl::<_, i64>("soon")? > 990_000, "appending keeps the time");
    assert!(redis.persist::<_, bool>("soon")? && !redis.persist::<_, bool>("soon")?);
    assert!(redis.pexpire::<_, bool>("soon", -1)?);
    assert_eq!(redis.get::<_, Option<String>>("soon")?, None);
    Ok(())
}

fn keyspace(redis: &mut Connection) -> Outcome {
    redis::cmd("FLUSHDB").exec(redis)?;
    let names: BTreeSet<String> = (0..250).map(|n| format!("key:{n:03}")).collect();
    for name in &names {
        let _: () = redis.set(name, "v")?;
    }
    assert_eq!(redis.keys::<_, Vec<String>>("key:00?")?.len(), 10);
    let scanned: Vec<String> = redis.scan::<String>()?.collect::<Result<_, _>>()?;
    assert_eq!(scanned, names.iter().cloned().collect::<Vec<_>>(), "once, and in order");
    let matched: Vec<String> = redis.scan_match::<_, String>("key:1*")?.collect::<Result<_, _>>()?;
    assert_eq!(matched.len(), 100);
    assert_eq!(redis::cmd("DBSIZE").query::<usize>(redis)?, 250);
    let random: BTreeSet<String> =
        (0..64).map(|_| redis::cmd("RANDOMKEY").query(redis)).collect::<Result<_, _>>()?;
    assert!(random.len() > 8 && random.is_subset(&names), "{random:?}");
    assert_eq!(redis::cmd("TYPE").arg("key:000").query::<String>(redis)?, "string");
    assert_eq!(redis::cmd("TYPE").arg("nothing").query::<String>(redis)?, "none");
    Ok(())
}

fn ordered(redis: &mut Connection) -> Outcome {
    let pairs: Vec<(String, String)> = redis::cmd("RANGE").arg(&["[key:010", "(key:013"]).query(redis)?;
    let keys: Vec<&str> = pairs.iter().map(|(key, _)| key.as_str()).collect();
    assert_eq!(keys, ["key:010", "key:011", "key:012"]);
    let back: Vec<String> = redis::cmd("RANGEKEYS").arg(&["+", "-", "REV", "LIMIT", "2"]).query(redis)?;
    assert_eq!(back, ["key:249", "key:248"]);
    assert_eq!(redis::cmd("COUNTRANGE").arg(&["(key:100", "+"]).query::<usize>(redis)?, 149);
    assert_eq!(redis::cmd("DELRANGE").arg(&["[key:2", "+", "LIMIT", "20"]).query::<usize>(redis)?, 20);
    assert_eq!(redis::cmd("DELRANGE").arg(&["[key:2", "+"]).query::<usize>(redis)?, 30);
    assert_eq!(redis::cmd("DBSIZE").query::<usize>(redis)?, 200);
    let error = redis::cmd("RANGE").arg(&["a", "b"]).exec(redis).expect_err("no ends");
    assert!(error.to_string().contains("not valid string range item"), "{error}");
    Ok(())
}

fn server(redis: &mut Connection) -> Outcome {
    assert_eq!(redis::cmd("PING").query::<String>(redis)?, "PONG");
    let info: redis::InfoDict = redis::cmd("INFO").query(redis)?;
    assert_eq!(info.get::<String>("engine"), Some("sphinx".into()));
    assert!(info.get::<f64>("round_trips_per_operation").is_some_and(|trips| trips > 0.0));
    assert!(info.get::<u64>("used_memory").is_some_and(|bytes| bytes > 0));
    let time: (u64, u64) = redis::cmd("TIME").query(redis)?;
    assert!(time.0 > 1_600_000_000 && time.1 < 1_000_000);
    assert!(redis::cmd("COMMAND").arg("COUNT").query::<usize>(redis)? > 50);
    let error = redis::cmd("LPUSH").arg(&["list", "x"]).exec(redis).expect_err("not supported");
    assert_eq!(error.kind(), ErrorKind::Server(redis::ServerErrorKind::ResponseError));
    assert!(error.to_string().contains("unknown command 'LPUSH'"), "{error}");
    let piped: (i64, Option<String>, i64) = redis::pipe().incr("p", 1).get("p").incr("p", 1).query(redis)?;
    assert_eq!(piped, (1, Some("1".into()), 2));
    redis.del("p")
}

/// A gateway whose session is fenced joins again; its clients keep their connections, and what they have sent of a request.
#[test]
fn a_fenced_gateway_joins_again_and_its_clients_stay() {
    let cluster = pool();
    let gateway = gateway(&cluster);
    let mut clients: Vec<_> = (0..4).map(|_| Client::to(gateway.address())).collect();
    for round in 0..3 {
        for (n, client) in clients.iter_mut().enumerate() {
            assert_eq!(client.ask(&["SET", &format!("k{n}"), "before"]), Value::Word("OK".into()));
            assert_eq!(client.say(&format!("CLIENT SETNAME round-{round}")), Value::Word("OK".into()));
            client.send(b"*2\r\n$3\r\nGET\r\n$2\r\nk");
        }
        Executor::new().block_on(async {
            let warden = Session::open(&cluster, SessionOptions::default()).await.expect("a session");
            let endpoint = warden.endpoint().expect("an endpoint");
            for victim in warden.list(&endpoint.op()).await.expect("listed") {
                if victim.session != warden.id() && victim.state == SessionState::Active {
                    warden.evict(&endpoint.op(), victim.session, victim.term).await.expect("fenced");
                }
            }
            warden.close(&endpoint).await.expect("closed");
        });
        for (n, client) in clients.iter_mut().enumerate() {
            client.send(format!("{n}\r\n").as_bytes());
            let first = client.read();
            let is_told = matches!(&first, Value::Error(text) if text.starts_with("LOADING "));
            assert!(is_told || first == bytes("before"), "{first:?}");
            wait_for("the gateway to join again", || {
                client.ask(&["GET", &format!("k{n}")]) == bytes("before")
            });
            assert_eq!(client.say("CLIENT GETNAME"), bytes(format!("round-{round}")));
        }
    }
}

/// Two gateways on one index: what one client adds no other loses, whichever gateway it uses.
#[test]
fn commands_on_one_key_are_one_step_for_all_gateways() -> Outcome {
    const CLIENTS: usize = 4;
    const ROUNDS: usize = 400;
    let cluster = pool();
    let gateways = [gateway(&cluster), gateway(&cluster)];
    std::thread::scope(|scope| {
        for client in 0..CLIENTS * gateways.len() {
            let gateway = &gateways[client % gateways.len()];
            scope.spawn(move || {
                let mut redis = connect(gateway, "resp2");
                for round in 0..ROUNDS {
                    let _: () = redis.incr(format!("count:{}", round % 3), 1).expect("it counts");
                    if round % 4 == 0 {
                        let _: () = redis.append("log", format!("{client};")).expect("it appends");
                    }
                }
            });
        }
    });
    let all = CLIENTS * gateways.len();
    for gateway in &gateways {
        let mut redis = connect(gateway, "resp2");
        let counts: Vec<usize> = redis.mget(&["count:0", "count:1", "count:2"])?;
        assert_eq!(counts.iter().sum::<usize>(), all * ROUNDS);
        let log: String = redis.get("log")?;
        for client in 0..all {
            let entries = log.split(';').filter(|entry| *entry == client.to_string()).count();
            assert_eq!(entries, ROUNDS / 4, "of client {client}");
        }
    }
    Ok(())
}
