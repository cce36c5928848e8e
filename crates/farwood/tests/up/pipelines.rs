//! Clients that reset their connections in the middle of pipelines, or never read a reply: whatever they do, nobody else waits for it.

use super::gateways::pool;
use super::world::{Client, Folder, Running, nap, sessions, wait_for};
use rustix::net::sockopt::set_socket_linger;
use std::io::Write;
use std::net::TcpStream;
use std::time::Duration;

const KEYS: usize = 32;
const LARGE: usize = 8;

/// A pipeline of GETs of large values, whose replies are far more than sockets hold, and of SETs on few keys, which are under way when
/// those replies are there.
fn pipeline() -> Vec<u8> {
    let mut commands = String::new();
    for round in 0..100 {
        let gets = (0..4).map(|n| format!("GET large{}\r\n", (round + n) % LARGE));
        let sets = (0..KEYS).map(|key| format!("SET k{key} {round}\r\n"));
        commands.extend(gets.chain(sets));
    }
    commands.into_bytes()
}

/// Two gateways on one index, reached over a network, so that commands take time; a client of the second.
fn gateways(temporary: &Folder) -> (Running, [Running; 2], String, Client) {
    let (server, [_, tcp]) = pool(temporary);
    let gateways = [(); 2].map(|()| Running::gateway(&tcp, &["--threads", "1"], temporary));
    let mut other = gateways[1].client();
    for n in 0..LARGE {
        assert_eq!(other.say(&format!("SET large{n} {}", "x".repeat(60_000))), "OK");
    }
    (server, gateways, tcp, other)
}

/// The oldest epoch of every session.
fn epochs(url: &str) -> Vec<u64> {
    sessions(url).iter().map(|session| session["oldest_epoch"].as_u64().expect("an epoch")).collect()
}

/// All keys can be written, and no session holds an epoch.
fn nobody_waits(url: &str, other: &mut Client) {
    for n in 0..KEYS {
        assert_eq!(other.say(&format!("SET k{n} after")), "OK", "k{n} is not stuck");
    }
    let newest = epochs(url).into_iter().max().expect("two gateways");
    wait_for("epochs to go on", || epochs(url).into_iter().all(|epoch| epoch > newest));
}

#[test]
fn reset_pipelines_leave_no_key_stuck() {
    let temporary = Folder::new();
    let (_server, [one, _other], tcp, mut other) = gateways(&temporary);
    let pipeline = pipeline();
    for n in 0..300u64 {
        let mut stream = TcpStream::connect(("127.0.0.1", one.port)).expect("it listens");
        set_socket_linger(&stream, Some(Duration::ZERO)).expect("it can");
        // The gateway may have stopped reading: what it took is enough.
        stream.set_write_timeout(Some(Duration::from_millis(1 + n % 20))).expect("a time");
        let _ = stream.write_all(&pipeline);
    }
    nobody_waits(&tcp, &mut other);
    assert_eq!(one.client().say("SET k0 again"), "OK");
}

#[test]
fn clients_that_never_read_hold_nothing() {
    let temporary = Folder::new();
    let (_server, [one, _other], tcp, mut other) = gateways(&temporary);
    let deaf: Vec<TcpStream> = (0..20)
        .map(|_| {
            let mut stream = TcpStream::connect(("127.0.0.1", one.port)).expect("it listens");
            stream.set_write_timeout(Some(Duration::from_millis(100))).expect("a time");
            let _ = stream.write_all(&pipeline());
            stream
        })
        .collect();
    // They have filled what holds their replies when nothing comes through any more.
    let sent = |one: &Running| {
        let info = one.client().say("INFO stats");
        let line = info.lines().find_map(|line| line.strip_prefix("keyspace_hits:"));
        line.and_then(|hits| hits.trim().parse::<u64>().ok()).expect("a number")
    };
    let mut before = 0;
    wait_for("all of them to be waited for", || {
        nap(200);
        let now = sent(&one);
        std::mem::replace(&mut before, now) == now
    });
    nobody_waits(&tcp, &mut other);
    let memory = one.resident_bytes();
    assert!(memory < 400 << 20, "{memory} bytes for {} clients", deaf.len());
}
