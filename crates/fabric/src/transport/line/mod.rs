//! The client's end of a line: one per process and server, for everything but verbs.
//!
//! A thread reads what the server says: it answers those who wait for a gate or a reply, fills inboxes, and notices when the
//! line breaks. A reply that does not come in time is an unknown outcome; the same call can be sent again.

pub(crate) mod frames;

use super::stream::Stream;
use super::{Inbox, ReplySlot};
use crate::addr::SessionId;
use crate::call::{Call, CallError, CallId, CallOutcome, Principal, Target};
use crate::clock::{Nanos, RealClock};
use crate::exec::lock;
use crate::status::ServerStatus;
use frames::{FromClient, FromServer, frame, take_frame};
use rustc_hash::FxHashMap;
use std::fmt;
use std::io::{self, Read, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

/// How often it is looked whether a reply is overdue.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Sessions of this process that serve calls, by number and term, with the ticket that proves it.
pub(crate) type Inboxes = Arc<Mutex<FxHashMap<(SessionId, u64), (u64, Arc<Inbox>)>>>;

/// Ends all of them: nothing comes any more.
pub(crate) fn close_all(inboxes: &Inboxes) {
    let inboxes = std::mem::take(&mut *lock(inboxes));
    for (_, inbox) in inboxes.into_values() {
        inbox.close();
    }
}

/// Which sessions serve calls, with their tickets: what the next line has to say again.
pub(crate) fn serving(inboxes: &Inboxes) -> Vec<((SessionId, u64), u64)> {
    lock(inboxes).iter().map(|(key, (ticket, _))| (*key, *ticket)).collect()
}

/// An open line to one server.
pub(crate) struct Line {
    socket: Stream,
    /// Frames go out whole.
    writing: Mutex<()>,
    clock: RealClock,
    patience: Duration,
    lost: AtomicBool,
    next_request: AtomicU64,
    /// Questions to the server itself, by number.
    asked: Mutex<FxHashMap<u64, SyncSender<FromServer>>>,
    /// Calls without a reply, with the time at which they were sent.
    waiting: Mutex<FxHashMap<CallId, (Arc<ReplySlot>, Nanos)>>,
    inboxes: Inboxes,
    on_loss: Box<dyn Fn() + Send + Sync>,
}

impl Line {
    /// A line over a socket on which the first words have been said. `arrived` has come after them; `on_loss` is done, once,
    /// when the line is found broken.
    #[expect(clippy::disallowed_methods, reason = "the socket is read by a thread of its own")]
    pub(crate) fn start(
        socket: Stream,
        arrived: Vec<u8>,
        patience: Duration,
        inboxes: Inboxes,
        on_loss: impl Fn() + Send + Sync + 'static,
    ) -> io::Result<Arc<Self>> {
        let reader = socket.try_clone()?;
        reader.set_read_timeout(Some(LOOK_EVERY.min(patience)))?;
        socket.set_write_timeout(Some(patience))?;
        let line = Arc::new(Self {
            socket,
            writing: Mutex::default(),
            clock: RealClock::new(),
            patience,
            lost: AtomicBool::new(false),
            next_request: AtomicU64::new(0),
            asked: Mutex::default(),
            waiting: Mutex::default(),
            inboxes,
            on_loss: Box::new(on_loss),
        });
        let weak = Arc::downgrade(&line);
        std::thread::spawn(move || listen(&reader, arrived, &weak));
        Ok(line)
    }

    /// Whether the line is broken.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::SeqCst)
    }

    pub(crate) fn send(&self, message: &FromClient) -> io::Result<()> {
        let bytes = frame(message);
        let _whole = lock(&self.writing);
        (&self.socket).write_all(&bytes).inspect_err(|_| {
            // A frame that went out in part can never be completed.
            self.socket.hang_up();
        })
    }

    /// Asks the server and waits for the answer.
    pub(crate) fn ask(&self, question: impl FnOnce(u64) -> FromClient) -> Option<FromServer> {
        let request = self.next_request.fetch_add(1, Ordering::Relaxed);
        let (sender, answer) = sync_channel(1);
        lock(&self.asked).insert(request, sender);
        let answer = self.send(&question(request)).ok().and_then(|()| {
            // The reader may have gone before it could see our question.
            let patience = if self.is_lost() { Duration::ZERO } else { self.patience };
            answer.recv_timeout(patience).ok()
        });
        lock(&self.asked).remove(&request);
        answer
    }

    /// How the server does; `None` if it does not say in time.
    pub(crate) fn status(&self) -> Option<ServerStatus> {
        match self.ask(|request| FromClient::Status { request })? {
            FromServer::Status { status, .. } => Some(status),
            _ => None,
        }
    }

    pub(crate) async fn call(&self, target: Target, call: Call) -> CallOutcome {
        let slot = Arc::new(ReplySlot::default());
        let id = call.id;
        lock(&self.waiting).insert(id, (Arc::clone(&slot), self.clock.now()));
        let _guard = Waiting { line: self, id };
        // The reader looks at those who wait once more when it has found the server gone.
        if self.send(&FromClient::Call { target, call }).is_err() || self.is_lost() {
            return Err(CallError::Unknown);
        }
        slot.wait().await
    }

    pub(crate) fn serve(&self, who: Principal) -> Arc<Inbox> {
        let key = (who.session, who.term);
        let (_, inbox) =
            lock(&self.inboxes).entry(key).or_insert_with(|| (who.ticket, Arc::default())).clone();
        // Each endpoint asks, since the session may have ended meanwhile.
        let answer = self.ask(|request| FromClient::Serve { request, who });
        if !matches!(answer, Some(FromServer::Serving { accepted: true, .. })) {
            lock(&self.inboxes).remove(&key);
            inbox.close();
        }
        inbox
    }

    pub(crate) fn reply(&self, to: CallId, outcome: CallOutcome) {
        // If it cannot be sent, the caller learns from the server's end, or by a time-out.
        let _ = self.send(&FromClient::Reply { to, outcome });
    }

    // --- what the server says ---

    fn heed(&self, message: FromServer) {
        match message {
            FromServer::Connected { request, .. }
            | FromServer::NoGate { request }
            | FromServer::Serving { request, .. }
            | FromServer::Status { request, .. } => {
                let asked = lock(&self.asked).remove(&request);
                if let Some(asked) = asked {
                    // Who asked may have given up.
                    let _ = asked.try_send(message);
                } else if let FromServer::Connected { gate, .. } = message {
                    // A gate that comes too late is nobody's.
                    let _ = self.send(&FromClient::Disconnect { gate });
                }
            }
            FromServer::Answer { to, outcome } => {
                let waiting = lock(&self.waiting).remove(&to);
                if let Some((slot, _)) = waiting {
                    slot.set(outcome);
                }
            }
            FromServer::Incoming { session, term, call } => {
                let inbox = lock(&self.inboxes).get(&(session, term)).cloned();
                match inbox {
                    Some((_, inbox)) => inbox.push(call),
                    None => self.reply(call.id, Err(CallError::NoSuchSession { session })),
                }
            }
            FromServer::Ended { session, term } => {
                let inbox = lock(&self.inboxes).remove(&(session, term));
                if let Some((_, inbox)) = inbox {
                    inbox.close();
                }
            }
            FromServer::Refused { why } => tracing::error!("the memory server ended the connection: {why}"),
            FromServer::Welcome { .. } => {}
        }
    }

    /// Replies that are overdue will not be waited for any longer.
    fn give_up_overdue(&self, now: Nanos) {
        self.give_up(|since| u128::from(now.saturating_sub(since)) > self.patience.as_nanos());
    }

    fn give_up(&self, on: impl Fn(Nanos) -> bool) {
        let mut given_up = Vec::new();
        lock(&self.waiting).retain(|_, (slot, since)| {
            let overdue = on(*since);
            given_up.extend(overdue.then(|| Arc::clone(slot)));
            !overdue
        });
        for slot in given_up {
            slot.set(Err(CallError::Unknown));
        }
    }

    /// The line is broken: nobody waits.
    fn lose(&self) {
        self.lost.store(true, Ordering::SeqCst);
        (self.on_loss)();
        lock(&self.asked).clear();
        self.give_up(|_| true);
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        // Ends the thread that reads.
        self.socket.hang_up();
    }
}

impl fmt::Debug for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_lost() { "Line(lost)" } else { "Line(open)" })
    }
}

/// Stops waiting for a reply when the caller goes away.
struct Waiting<'a> {
    line: &'a Line,
    id: CallId,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        lock(&self.line.waiting).remove(&self.id);
    }
}

/// Reads what the server says until one of the two is gone.
fn listen(socket: &Stream, mut arrived: Vec<u8>, line: &Weak<Line>) {
    let mut buffer = vec![0; 64 << 10];
    let lost = 'listening: loop {
        let Some(strong) = line.upgrade() else { break false };
        loop {
            match take_frame(&mut arrived) {
                Ok(Some(message)) => strong.heed(message),
                Ok(None) => break,
                Err(_) => break 'listening true,
            }
        }
        strong.give_up_overdue(strong.clock.now());
        // While we wait, the line may go.
        drop(strong);
        match (&mut &*socket).read(&mut buffer) {
            Ok(0) => break true,
            Ok(bytes) => arrived.extend_from_slice(&buffer[..bytes]),
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted
                ) => {}
            Err(_) => break true,
        }
    };
    if let (true, Some(line)) = (lost, line.upgrade()) {
        line.lose();
    }
}
