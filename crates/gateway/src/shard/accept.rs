//! Taking in new clients.

use super::Shard;
use super::output::Output;
use super::sockets::Socket;
use crate::command::connection::Talk;
use crate::resp::Parser;
use crate::store::Store;
use farwood_fabric::clock::MILLISECOND;
use rustix::net::sockopt;
use std::collections::VecDeque;
use std::io::{self, ErrorKind, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::rc::Rc;
use std::sync::{Mutex, PoisonError};
use std::task::{Poll, Waker};
use std::time::Duration;

/// How long accepting rests when the system has no more descriptors.
const REST_NS: u64 = 100 * MILLISECOND;
/// How long a client is silent before its machine is asked whether it is still there, and how often.
const KEEPALIVE: Duration = Duration::from_secs(300);
const KEEPALIVE_PROBES: u32 = 3;
/// So many clients are taken in before those that are there get a turn.
const BURST: usize = 64;

/// A client on its way to a thread: a new one, or one that another thread hands over.
#[derive(Debug)]
pub(crate) struct Guest {
    pub(super) talk: Talk,
    /// What it has sent of its next request, and what is understood of that.
    pub(super) input: Vec<u8>,
    pub(super) parser: Parser,
    /// Replies that it has not taken yet.
    pub(super) output: Output,
}

/// Clients on their way to a thread.
#[derive(Default, Debug)]
pub(crate) struct Inbox {
    state: Mutex<(VecDeque<Guest>, Option<Waker>)>,
}

impl Inbox {
    pub(crate) fn push(&self, guest: Guest) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.0.push_back(guest);
        if let Some(waker) = state.1.take() {
            waker.wake();
        }
    }

    /// All that are there.
    pub(crate) fn take_all(&self) -> VecDeque<Guest> {
        std::mem::take(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner).0)
    }

    pub(super) async fn next(&self) -> Guest {
        std::future::poll_fn(|context| {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(next) = state.0.pop_front() {
                return Poll::Ready(next);
            }
            state.1 = Some(context.waker().clone());
            Poll::Pending
        })
        .await
    }
}

/// Accepts clients until the session ends. They begin on this thread.
pub(super) async fn accept<S: Store>(shard: Rc<Shard<S>>, listener: Socket<TcpListener>) {
    while !shard.stop.is_set() {
        listener.readable().await;
        for _ in 0..BURST {
            match listener.inner.accept() {
                Ok((stream, peer)) => {
                    let local = stream.local_addr().unwrap_or(shard.common.options.listen);
                    let most = shard.common.options.max_clients;
                    match shard.common.clients.enter(most, stream, peer, local, shard.common.seconds()) {
                        Ok(client) => match prepare(&client.stream, peer) {
                            Ok(()) => {
                                let talk = Talk::new(client, &shard.common);
                                let (input, parser, output) =
                                    (Vec::new(), Parser::default(), Output::default());
                                shard.inboxes[shard.number].push(Guest { talk, input, parser, output });
                            }
                            // It is gone already.
                            Err(_) => drop(client),
                        },
                        Err(stream) => turn_away(&stream),
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    listener.not_readable();
                    break;
                }
                // The client was gone before we came.
                Err(error)
                    if matches!(error.kind(), ErrorKind::ConnectionAborted | ErrorKind::Interrupted) => {}
                Err(error) => {
                    if let Some(more) = shard.common.refusals.say(shard.common.now()) {
                        tracing::warn!(
                            "cannot take in a client: {error}; raise the limit of open files (ulimit -n){more}"
                        );
                    }
                    shard.sleep(REST_NS).await;
                    break;
                }
            }
        }
        shard.executor.yield_now().await;
    }
}

fn prepare(stream: &TcpStream, peer: SocketAddr) -> io::Result<()> {
    stream.set_nonblocking(true)?;
    if peer.ip().is_loopback() {
        // There is no network whose rate would have to be found out: pacing, which some systems do, would only cost timers. If it is refused,
        // it stays as it is.
        let _ = sockopt::set_tcp_congestion(stream, "reno");
    }
    // A peer whose machine is gone is noticed after 5 minutes and three probes, as in Redis.
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, KEEPALIVE)?;
    sockopt::set_tcp_keepintvl(stream, KEEPALIVE / KEEPALIVE_PROBES)?;
    sockopt::set_tcp_keepcnt(stream, KEEPALIVE_PROBES)?;
    stream.set_nodelay(true)
}

fn turn_away(mut stream: &TcpStream) {
    let _ = stream.set_nonblocking(true);
    let _ = stream.write_all(b"-ERR max number of clients reached\r\n");
}
