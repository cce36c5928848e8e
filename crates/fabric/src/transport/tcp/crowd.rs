//! Many connections at the desk: whose are ended when there is no room, and what the clients of a session hear that is over.

use super::buffer::first_frame;
use super::frames::Admission;
use super::server::{Admitted, Asked, Desk, MAX_CONNECTIONS};
use super::verbs::{FENCED, HEAD_BYTES, MAX_REPLY_BYTES};
use crate::transport::host::Host;
use crate::transport::host::tests::{ADMIT, LEAVE, Process, SERVER, call, host, who};
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

/// A desk where sessions 1 to 4 are admitted.
fn desk() -> (Arc<Host>, Arc<Desk>) {
    let host = host();
    let desk = Arc::new(Desk::new(&host).expect("an epoll instance"));
    for session in 1..=4 {
        tell(&host, session, 0, ADMIT);
    }
    (host, desk)
}

fn tell(host: &Arc<Host>, session: u16, sequence: u64, what: &[u8]) {
    host.call(SERVER, call(who(session), sequence, what), 1, Arc::<Process>::default());
}

/// A connection of a session; `None` if there is no room.
fn open(desk: &Desk, session: u16) -> Option<TcpStream> {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let client = TcpStream::connect(listener.local_addr().expect("an address")).expect("it listens");
    let (server, _) = listener.accept().expect("it has connected");
    server.set_nonblocking(true).expect("a socket");
    client.set_read_timeout(Some(Duration::from_secs(20))).expect("a socket");
    match desk.admit(Asked { who: who(session), replaces: 0 }, server, vec![]) {
        Admitted::Yes(newcomer, _) => {
            desk.hand_over(newcomer);
            Some(client)
        }
        Admitted::No(answer) => {
            assert_eq!(answer, Admission::NoRoom {});
            None
        }
    }
}

/// Whether the server has ended a connection on which nothing was said.
fn has_ended(client: &TcpStream) -> bool {
    client.set_nonblocking(true).expect("a socket");
    let seen = client.peek(&mut [0]);
    client.set_nonblocking(false).expect("a socket");
    match seen {
        Ok(bytes) => bytes == 0,
        Err(error) => error.kind() != ErrorKind::WouldBlock,
    }
}

/// A READ of 8 bytes of main memory.
fn read_frame(sequence: u32) -> Vec<u8> {
    let head = [&[1, 1, 0, 0][..], &sequence.to_le_bytes()].concat();
    let verb = [&[1, 0, 0, 0][..], &8u32.to_le_bytes(), &64u64.to_le_bytes()].concat();
    let length = u32::try_from(head.len() + verb.len()).expect("short");
    [&length.to_le_bytes()[..], &head, &verb].concat()
}

#[expect(clippy::disallowed_methods, reason = "the desk is a thread")]
fn run(desk: &Arc<Desk>) -> std::thread::JoinHandle<()> {
    let desk = Arc::clone(desk);
    std::thread::spawn(move || desk.run())
}

#[test]
fn a_connection_whose_gate_is_closed_makes_room_first_then_the_idlest_of_who_has_most() {
    let (host, desk) = desk();
    let first: Vec<_> = (0..12).map(|_| open(&desk, 1).expect("there is room")).collect();
    assert!(open(&desk, 1).is_none(), "no session has more");
    let second: Vec<_> = (0..4).map(|_| open(&desk, 2).expect("there is room")).collect();
    assert_eq!(first.len() + second.len(), MAX_CONNECTIONS);
    let third = open(&desk, 3).expect("somebody makes room");
    let ended = |clients: &[TcpStream]| clients.iter().map(has_ended).collect::<Vec<_>>();
    assert!(ended(&first)[0] && ended(&first).iter().filter(|ended| **ended).count() == 1);
    // Those of a session that is over go before any other.
    tell(&host, 2, 1, LEAVE);
    let fourth: Vec<_> = (0..4).map(|_| open(&desk, 4).expect("somebody makes room")).collect();
    assert_eq!(ended(&second), [true; 4]);
    assert_eq!(ended(&first).iter().filter(|ended| **ended).count(), 1);
    assert!(desk.make_room(10) && !desk.make_room(10), "nobody has more than that now");
    assert!(!has_ended(&third) && fourth.iter().all(|client| !has_ended(client)));
}

#[test]
fn connections_of_a_session_that_is_over_are_told_so_and_closed() {
    let (host, desk) = desk();
    let mut over: Vec<_> = (0..8).map(|_| open(&desk, 1).expect("there is room")).collect();
    let mut other = open(&desk, 2).expect("there is room");
    let thread = run(&desk);
    for client in &mut over {
        // It is served, and then says more than the server reads.
        client.write_all(&read_frame(0)).expect("sent");
        client.read_exact(&mut [0; 4 + HEAD_BYTES + 8]).expect("a reply");
    }
    tell(&host, 1, 1, LEAVE);
    for (n, client) in over.iter_mut().enumerate() {
        for sequence in 1..100 {
            if n % 2 == 1 && client.write_all(&read_frame(sequence)).is_err() {
                break;
            }
        }
        let mut said = Vec::new();
        // It may end with a reset, but not before what was said.
        let _ = client.read_to_end(&mut said);
        let mut at = 0;
        while let Some(frame) = first_frame(&said[at..], MAX_REPLY_BYTES).expect("frames") {
            assert_eq!(frame[0], FENCED, "nothing was carried out any more");
            at += 4 + frame.len();
            assert_eq!(frame[1] == 0, at == said.len(), "the last word is that it is over");
        }
        assert!(at > 0 && at == said.len(), "connection {n} said {said:?}");
    }
    other.write_all(&read_frame(0)).expect("sent");
    other.read_exact(&mut [0; 4 + HEAD_BYTES + 8]).expect("the others are served");
    let mut traffic = crate::status::Traffic::default();
    desk.report(&mut traffic);
    assert_eq!(traffic.connections, 1);
    desk.stop();
    thread.join().expect("it ends");
}

/// Says as much as the socket takes: batches of 128 READs.
fn pump(mut client: &TcpStream) {
    let verb = [&[1, 0, 0, 0][..], &8u32.to_le_bytes(), &64u64.to_le_bytes()].concat();
    let request = [&[1, 128, 0, 0, 0, 0, 0, 0][..], &verb.repeat(128)].concat();
    let length = u32::try_from(request.len()).expect("short");
    let frames = [&length.to_le_bytes()[..], &request].concat().repeat(1000);
    client.set_nonblocking(true).expect("a socket");
    // What the socket does not take is not sent.
    let _ = client.write(&frames);
}

/// How much has been done for others before a READ is answered.
fn done_before_a_read(pumping: usize) -> u64 {
    let (_host, desk) = desk();
    let many: Vec<_> = (0..pumping).map(|_| open(&desk, 1).expect("there is room")).collect();
    let mut other = open(&desk, 2).expect("there is room");
    let mut clerk = desk.clerk();
    // Nobody is busy, and then many are.
    while !clerk.is_calm() {
        desk.nudge();
        clerk.round();
    }
    many.iter().for_each(pump);
    let bytes = || {
        let mut traffic = crate::status::Traffic::default();
        desk.report(&mut traffic);
        traffic.bytes_in + traffic.bytes_out
    };
    while bytes() < 200_000 {
        desk.nudge();
        clerk.round();
    }
    let before = bytes();
    other.write_all(&read_frame(0)).expect("sent");
    other.set_nonblocking(true).expect("a socket");
    for _ in 0..1000 {
        desk.nudge();
        clerk.round();
        if other.peek(&mut [0]).is_ok() {
            return bytes() - before;
        }
    }
    panic!("it is not served")
}

#[test]
fn a_session_that_asks_for_little_waits_for_little_of_what_others_ask_for() {
    // Turns of two connections, and what is over a quantum of each.
    for pumping in [1, 4, 11] {
        let done = done_before_a_read(pumping);
        assert!(done < 768 << 10, "{done} bytes of {pumping} others came first");
    }
}
