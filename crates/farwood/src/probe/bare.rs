//! The baseline of TCP: a bare pair of sockets on the loopback device, one thread at each end, both spinning. One request for
//! each send, one answer for each request, of the sizes that the access takes on the wire, and nothing else: no batches, no
//! checks, no memory. One round trip after the other, each timed, whatever the depth of the row.

use super::access::Access;
use super::measure::Job;
use crate::fleet::{all, on_threads};
use farwood_fabric::clock::RealClock;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};

/// What a request and a reply take beside the bytes that they carry.
const REQUEST_HEAD: usize = 28;
const REPLY_HEAD: usize = 12;

/// What it is called.
pub(super) const NAME: &str = "round trip on a bare socket";

/// Nanoseconds for each round trip of `clients` pairs at once.
pub(super) fn measure(job: &Job, clients: u32) -> Result<Vec<f64>, String> {
    Ok(all(on_threads(clients, |_| round_trips(job).map_err(|error| format!("no bare socket: {error}"))))?
        .concat())
}

/// Bytes of a request and of its answer.
fn sizes(access: Access, bytes: usize) -> (usize, usize) {
    match access {
        Access::Read | Access::ReadRead => (REQUEST_HEAD, REPLY_HEAD + bytes),
        Access::Write | Access::WriteWrite => (REQUEST_HEAD + bytes, REPLY_HEAD),
        Access::CasRead => (REQUEST_HEAD + 16, REPLY_HEAD + bytes),
        Access::Cas | Access::MaskedCas | Access::Faa | Access::ReadCas | Access::Call => {
            (REQUEST_HEAD + 16, REPLY_HEAD + 8)
        }
    }
}

fn round_trips(job: &Job) -> io::Result<Vec<f64>> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut near = TcpStream::connect(listener.local_addr()?)?;
    let (mut far, _) = listener.accept()?;
    for socket in [&near, &far] {
        socket.set_nodelay(true)?;
        socket.set_nonblocking(true)?;
    }
    let (asked, answered) = sizes(job.access, job.bytes);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let (mut request, answer) = (vec![0; asked], vec![1; answered]);
            // Ends when the other side hangs up.
            while receive(&mut far, &mut request).is_ok() && send(&mut far, &answer).is_ok() {}
        });
        let (request, mut answer) = (vec![1; asked], vec![0; answered]);
        let clock = RealClock::new();
        let (start, mut took) = (clock.now(), Vec::new());
        loop {
            let before = clock.now();
            send(&mut near, &request)?;
            receive(&mut near, &mut answer)?;
            let now = clock.now();
            took.push((now - before) as f64);
            if took.len() as u64 >= job.ops || now - start >= job.span_ns {
                drop(near);
                return Ok(took);
            }
        }
    })
}

fn receive(socket: &mut TcpStream, into: &mut [u8]) -> io::Result<()> {
    let mut filled = 0;
    while filled < into.len() {
        match socket.read(&mut into[filled..]) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(bytes) => filled += bytes,
            // What is waited for may need this very core.
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::thread::yield_now(),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn send(socket: &mut TcpStream, bytes: &[u8]) -> io::Result<()> {
    let mut sent = 0;
    while sent < bytes.len() {
        match socket.write(&bytes[sent..]) {
            Ok(bytes) => sent += bytes,
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::thread::yield_now(),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
