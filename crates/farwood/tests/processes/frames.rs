//! What an attacker sends to a server that runs: frames that make no sense, and introductions as somebody else.
//!
//! What happens to a frame once it is taken in is tried a hundred times as often inside the fabric (`transport::tcp::tests`);
//! here it is seen that the process lives, keeps its size, lets nobody in by mistake, and serves others meanwhile.
//! `FARWOOD_FRAMES=10000000` for more.

use super::world::{Process, address_in, connect, serve_at};
use farwood_fabric::region::Identity;
use farwood_fabric::{Batch, Executor, GlobalAddr, RegionId, ServerId, Session, SessionOptions};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};

/// A hundredth of what the fabric's own tests try: each takes a connection.
fn frames() -> u64 {
    let asked = std::env::var("FARWOOD_FRAMES").ok().and_then(|text| text.parse().ok());
    asked.unwrap_or(1_000_000u64) / 100
}

/// What a verbs connection says of itself: see `docs/wire.md`.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Introduction {
    pool: u128,
    server: u16,
    incarnation: u32,
    view: u64,
    session: u16,
    term: u64,
    ticket: u64,
    replaces: u64,
}

impl Introduction {
    fn of(session: &Session, identity: &Identity) -> Self {
        Self {
            pool: identity.pool.0,
            server: identity.server.get(),
            incarnation: identity.incarnation,
            view: 1,
            session: session.id().get(),
            term: session.term(),
            ticket: session.principal().ticket,
            replaces: 0,
        }
    }

    fn encode(&self) -> Vec<u8> {
        let mut said = vec![0; 8 + 4];
        said.push(2);
        said.extend(self.pool.to_le_bytes());
        said.extend(self.server.to_le_bytes());
        said.extend(self.incarnation.to_le_bytes());
        said.extend(self.view.to_le_bytes());
        said.extend(self.session.to_le_bytes());
        said.extend(self.term.to_le_bytes());
        said.extend(self.ticket.to_le_bytes());
        said.extend(self.replaces.to_le_bytes());
        hello(&said)
    }
}

fn hello(introduction: &[u8]) -> Vec<u8> {
    let mut hello = b"FARWOOD\x02\x03\0\0\0".to_vec();
    hello.extend(u32::try_from(introduction.len()).expect("short").to_le_bytes());
    hello.extend(introduction);
    hello
}

/// A line for calls, as any process opens it.
pub(crate) fn line() -> Vec<u8> {
    let mut said = vec![0; 8 + 4];
    said.push(1);
    hello(&said)
}

fn framed(message: &[u8]) -> Vec<u8> {
    [&u32::try_from(message.len()).expect("short").to_le_bytes()[..], message].concat()
}

/// Says something to the server and hears what it answers, until it hangs up or has nothing to say.
fn say(address: &str, words: &[&[u8]]) -> Vec<u8> {
    let mut socket = TcpStream::connect(address).expect("it listens");
    socket.set_nodelay(true).expect("a socket");
    let _ = socket.read_exact(&mut [0; 20]);
    for words in words {
        // It may have hung up by now.
        let _ = socket.write_all(words);
    }
    let _ = socket.shutdown(Shutdown::Write);
    let mut answer = Vec::new();
    let _ = socket.read_to_end(&mut answer);
    answer
}

fn mutate(rng: &mut fastrand::Rng, frame: &mut Vec<u8>) {
    for _ in 0..rng.usize(1..4) {
        let at = rng.usize(..frame.len());
        match rng.u8(..4) {
            0 => frame[at] = rng.u8(..),
            1 => frame[at] ^= 1 << rng.u8(..8),
            2 => frame.truncate(at.max(1)),
            _ => frame.insert(at, rng.u8(..)),
        }
    }
}

pub(crate) fn resident_kib(process: &Process) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", process.0.id())).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("it has memory");
    line.split_whitespace().next().and_then(|kib| kib.parse().ok()).expect("a number")
}

/// Mutated hellos, batches and messages on lines, one connection each.
#[test]
fn mutated_frames_do_a_running_server_no_harm() {
    let (server, said) = serve_at(&["--listen", "127.0.0.1:0"], &["--lease-ms", "0"]);
    let address = address_in(&said);
    let cluster = connect(&format!("tcp://{address}")).expect("it is there");
    let executor = Executor::new();
    executor.block_on(async {
        let session = Session::open(&cluster, SessionOptions::default()).await.expect("a session");
        let endpoint = session.endpoint().expect("an endpoint");
        let victim = Session::open(&cluster, SessionOptions::default()).await.expect("a session");
        let word = GlobalAddr::new(ServerId::COORDINATOR, RegionId::LOCK, 0);
        let as_victim = Introduction::of(&victim, &cluster.view().servers[0]).encode();
        // READ 64 bytes of main memory at 4096.
        let mut batch = vec![1, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0];
        batch.extend(64u32.to_le_bytes());
        batch.extend(4096u64.to_le_bytes());
        let batch = framed(&batch);
        // A call of nobody's to server 0: a message on the line, as long as one is.
        let call = framed(&[&[3u8][..], &[0; 60]].concat());
        let status = framed(&[&[6u8][..], &7u64.to_le_bytes()].concat());
        let mut rng = fastrand::Rng::with_seed(11);
        let (mut early, rounds) = (0, frames());
        for round in 0..rounds {
            let (mut first, mut second) = match round % 4 {
                0 | 1 => (as_victim.clone(), batch.clone()),
                2 => (line(), call.clone()),
                _ => (line(), status.clone()),
            };
            if round % 8 < 4 {
                mutate(&mut rng, &mut second);
            } else {
                mutate(&mut rng, &mut first);
            }
            drop(say(&address, &[&first, &second]));
            if round % 16 == 0 {
                endpoint.op().faa(word, 1).await.expect("others are served");
            }
            if round == rounds / 10 {
                early = resident_kib(&server);
            }
        }
        assert_eq!(endpoint.op().read_word(word).await, Ok(rounds.div_ceil(16)));
        let late = resident_kib(&server);
        println!("{rounds} mutated frames: the server has {early} KiB, then {late} KiB");
        assert!(late < early + (32 << 10), "it grew from {early} KiB to {late} KiB");
    });
    executor.clear();
}

/// Nobody gets in with another view, pool, server, incarnation, or as a session that is not.
#[test]
fn forged_introductions_are_not_let_in() {
    let (_server, said) = serve_at(&["--listen", "127.0.0.1:0"], &["--lease-ms", "0"]);
    let address = address_in(&said);
    let cluster = connect(&format!("tcp://{address}")).expect("it is there");
    let executor = Executor::new();
    executor.block_on(async {
        let session = Session::open(&cluster, SessionOptions::default()).await.expect("a session");
        let endpoint = session.endpoint().expect("an endpoint");
        let reader = Session::open(&cluster, SessionOptions { read_only: true, ..SessionOptions::default() })
            .await
            .expect("a session");
        let honest = Introduction::of(&session, &cluster.view().servers[0]);
        let word = GlobalAddr::new(ServerId::COORDINATOR, RegionId::MAIN, 8192);
        endpoint.op().write_word(word, 5).await.expect("it is there");
        // A WRITE of that word: what forgers would do.
        let mut write = vec![1, 1, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0];
        write.extend(8u32.to_le_bytes());
        write.extend(8192u64.to_le_bytes());
        write.extend(6u64.to_le_bytes());
        let write = framed(&write);
        let mut rng = fastrand::Rng::with_seed(12);
        for _ in 0..frames() / 5 {
            let mut forged = honest.clone();
            match rng.u8(..8) {
                0 => forged.view = rng.u64(..) | 2,
                1 => forged.pool ^= 1 << rng.u8(..128),
                2 => forged.server ^= 1 << rng.u8(..9),
                3 => forged.incarnation ^= 1 << rng.u8(..32),
                4 => forged.session = rng.u16(3..),
                5 => forged.term ^= 1 << rng.u8(1..64),
                6 => forged.ticket ^= 1 << rng.u8(..64),
                _ => forged = Introduction { session: 0, term: 0, ..forged },
            }
            let answer = say(&address, &[&forged.encode(), &write]);
            assert_ne!(answer.get(4), Some(&3), "{forged:?} was let in");
        }
        // Somebody who may only read is let in, and may only read.
        let as_reader = Introduction::of(&reader, &cluster.view().servers[0]);
        let answer = say(&address, &[&as_reader.encode(), &write]);
        assert_eq!(answer.get(4), Some(&3));
        assert!(String::from_utf8_lossy(&answer).contains("must not be carried out"));
        // Nobody fences a connection that is not theirs.
        let thief = Introduction { replaces: 1, ..as_reader };
        drop(say(&address, &[&thief.encode()]));
        assert_eq!(endpoint.op().read_word(word).await, Ok(5));
        // The same words from the session itself are obeyed: the forgers were refused for what they said.
        drop(say(&address, &[&honest.encode(), &write]));
        assert_eq!(endpoint.op().read_word(word).await, Ok(6));
        let mut batch = Batch::new(ServerId::COORDINATOR);
        batch.write_word(word, 7);
        endpoint.op().submit(batch).await.expect("it is still served");
    });
    executor.clear();
}
