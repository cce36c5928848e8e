//! Whose messages the door hears first, turn by turn.

use super::door::{Door, OTHERS_PER_TURN};
use super::{Listeners, ServeOptions, Shared, prepare};
use crate::call::{CallOutcome, Target};
use crate::status::ServerStatus;
use crate::transport::host::tests::{ADMIT, Clerk, SERVER, call, who};
use crate::transport::line::frames::{FromClient, FromServer, frame, status_frame, take_frame};
use crate::transport::tcp::frames::{Introduction, Purpose};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;

struct Line {
    socket: TcpStream,
    arrived: Vec<u8>,
}

impl Line {
    fn open(door: &mut Open) -> Self {
        let socket = TcpStream::connect(door.address).expect("it listens");
        socket.set_nodelay(true).expect("a socket");
        let hello = Introduction { features: 0, token: vec![], purpose: Purpose::Calls {} };
        (&socket).write_all(&hello.encode()).expect("sent");
        // It is let in, greeted, and heard.
        door.turn();
        door.turn();
        let mut length = [0; 4];
        (&socket).read_exact(&mut [0; 20]).expect("a greeting");
        (&socket).read_exact(&mut length).expect("an answer");
        let mut welcome = vec![0; u32::from_le_bytes(length) as usize];
        (&socket).read_exact(&mut welcome).expect("an answer");
        assert_eq!(welcome[0], 1);
        socket.set_nonblocking(true).expect("a socket");
        Self { socket, arrived: Vec::new() }
    }

    fn say(&self, message: &FromClient) {
        (&self.socket).write_all(&frame(message)).expect("sent");
    }

    fn call(&self, target: Target, sequence: u64, what: &[u8]) {
        self.say(&FromClient::Call { target, call: call(who(1), sequence, what) });
    }

    /// What has been answered since.
    fn answers(&mut self) -> Vec<FromServer> {
        let mut buffer = [0; 4096];
        loop {
            match (&self.socket).read(&mut buffer) {
                Ok(0) => panic!("the server hung up"),
                Ok(bytes) => self.arrived.extend_from_slice(&buffer[..bytes]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => panic!("{error}"),
            }
        }
        std::iter::from_fn(|| take_frame(&mut self.arrived).expect("frames")).collect()
    }

    /// The outcome of the one call that has been answered since.
    fn outcome(&mut self) -> Option<CallOutcome> {
        match self.answers().pop()? {
            FromServer::Answer { outcome, .. } => Some(outcome),
            other => panic!("{other:?}"),
        }
    }
}

/// A door that is opened turn by turn.
struct Open {
    door: Door,
    shared: Arc<Shared>,
    address: SocketAddr,
}

impl Open {
    fn new() -> Self {
        let tcp = Some("127.0.0.1:0".parse().expect("an address"));
        let options = ServeOptions { tcp, ..ServeOptions::default() };
        let listeners = Listeners::open(&options).expect("a port");
        let address = listeners.tcp.as_ref().and_then(|tcp| tcp.local_addr().ok()).expect("an address");
        let (shared, share) = prepare(Arc::<Clerk>::default(), &options).expect("memory");
        let door = Door::new(&shared, listeners, share, Vec::new());
        Self { door, shared, address }
    }

    /// A turn, even if there is nothing to do.
    fn turn(&mut self) {
        self.shared.wake.wake();
        self.door.turn();
    }
}

#[test]
fn a_session_is_heard_in_every_turn_however_much_others_say() {
    const LINES: usize = 100;
    const QUESTIONS: usize = 1000;
    let mut door = Open::new();
    let mut others: Vec<Line> = (0..LINES).map(|_| Line::open(&mut door)).collect();
    let mut session = Line::open(&mut door);
    session.call(SERVER, 0, ADMIT);
    door.turn();
    assert_eq!(session.outcome(), Some(Ok(vec![])));
    let questions = frame(&FromClient::Status { request: 7 }).repeat(QUESTIONS);
    for line in &others {
        (&line.socket).write_all(&questions).expect("there is room for them");
    }
    let (mut told, mut of_line, mut turns) = (0, vec![0; LINES], 0u64);
    while told < LINES * QUESTIONS {
        turns += 1;
        session.call(SERVER, turns, b"beat");
        door.turn();
        assert_eq!(session.outcome(), Some(Ok(b"beat".to_vec())), "turn {turns}");
        let before = told;
        for (line, count) in others.iter_mut().zip(&mut of_line) {
            let answers = line.answers().len();
            assert!(answers <= 16, "a line had {answers} answers in a turn");
            *count += answers;
            told += answers;
        }
        assert!(told - before <= OTHERS_PER_TURN + 16, "{} answers in turn {turns}", told - before);
        let (least, most) = (of_line.iter().min(), of_line.iter().max());
        assert!(most.zip(least).is_some_and(|(most, least)| most - least <= 32), "{of_line:?}");
        assert!(turns < 1000, "{told} answers in {turns} turns");
    }
}

#[test]
fn a_status_that_was_encoded_before_is_the_same_frame() {
    let shared = Open::new().shared;
    let status: ServerStatus = shared.host.status(crate::status::Pages::Small { page_bytes: 4096 });
    let encoded = crate::wire::encode(&status);
    assert_eq!(status_frame(77, &encoded), frame(&FromServer::Status { request: 77, status }));
}
