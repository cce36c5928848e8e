//! One client: reads requests, has them carried out, writes replies.
//!
//! 1. Read what has come, at most a chunk.
//! 2. Start the commands in it, several at a time. Writes find their way down together, and take effect in the order of the commands, each
//!    after all before it ([`Order::InTurn`]). Reads next to each other are under way together; one begins when the writes before it have
//!    ended. A command waits for those before it that are about the same key, and one about several keys, or none, for all. Replies keep
//!    the order of the commands. (With `--pipeline-order keys` only commands about the same key keep their order.)
//! 3. Write the replies as far as the client takes them, and go on reading.
//!
//! Between these steps it lets the others run that are ready. So a thread reads from all clients that have said something, then carries out what they
//! want, then writes to all: system calls and commands each find their code and data in the processor's caches, which saves a tenth
//! to a quarter of a short command.
//!
//! **A command that has begun comes to its end, whatever the client's socket does.** It may hold a lock or pin an epoch of the whole pool.
//! So the connection waits for its socket only while no command is under way, and whatever ends the connection (a reset, a shutdown, a
//! move to another thread) lets the commands end first; their replies are then of no use, but their effects are whole. Commands that only
//! wait for their turn have not begun in that sense: if the client is gone they are dropped.
//!
//! **Replies wait for a client that does not read them**, so that one may send a million requests before it reads the first reply. Their
//! number has a bound: no command begins while half of `--client-memory` waits for this client alone, or while all clients have more than
//! that together (`budget`). A client that reads nothing for `--unread-timeout` seconds is disconnected. What commands that have begun
//! bring comes on top: one about several keys is alone, so it brings one reply of at most `--max-reply` bytes; commands about one key are
//! so many together that replies like the last ones fill [`WINDOW_BYTES`], and never more than [`WIDTH`], each with one value. A client
//! that waits for nothing costs no buffers at all.

use super::Shard;
use super::accept::Guest;
use super::output::{BLOCK_BYTES, Output};
use super::sockets::Socket;
use super::turns::{LONG_BYTES, Room, VALUE_ROOM_BYTES};
use crate::budget::FREE_BYTES;
use crate::clients::Client;
use crate::command::connection::{Talk, execute as execute_here};
use crate::command::{Answer, Command, Keys, Refused, Spec};
use crate::resp::parse::Parsed;
use crate::resp::{Limits, Parser, ProtocolError, Reply, Request};
use crate::stats::SAMPLED_ONE_IN;
use crate::store::Store;
use farwood_fabric::clock::{MILLISECOND, Nanos};
use farwood_fabric::pipeline::{Boxes, Freedom, Order, Pipeline};
use rustc_hash::FxHasher;
use rustix::buffer::spare_capacity;
use smallvec::SmallVec;
use std::hash::Hasher;
use std::io::{self, Write};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};

/// How much is read at a time, unless a longer argument is on its way.
pub(super) const CHUNK_BYTES: usize = 16 << 10;
/// There is room for at least so much whenever something is read.
const LEAST_READ_BYTES: usize = CHUNK_BYTES / 4;
/// For a long argument room is made in such steps, so that nobody gets memory for saying that much will come.
const GROWTH_BYTES: usize = 1 << 20;
/// What has come of a request and is shorter than this does not keep a chunk while the rest is waited for.
const SHORT_REST_BYTES: usize = 1 << 10;
/// How long a connection waits before it looks again whether it may grow.
const PAUSE_NS: Nanos = 50 * MILLISECOND;
/// A client that has said a wrong password is kept waiting in such steps, so that a gateway that stops does not wait for it.
const PENALTY_STEP_NS: Nanos = 100 * MILLISECOND;
/// Commands of one client that are under way together, at most...
const WIDTH: usize = 32;
/// ...and so many bytes of replies that they are expected to bring.
const WINDOW_BYTES: usize = 256 << 10;

/// What a command about several keys may have in its hands.
const VALUES_ROOM_BYTES: usize = 5 * VALUE_ROOM_BYTES;

/// So much of long replies is sent at a time.
const SEND_BYTES: usize = 256 << 10;

/// How commands are carried out. A type of its own for each way, no pointer: so the future is made where it runs, and not copied there.
pub(super) trait Execute<S: Store, F>: Fn(Rc<Shard<S>>, &'static Spec, Request) -> F + Copy {}

impl<S: Store, F, X: Fn(Rc<Shard<S>>, &'static Spec, Request) -> F + Copy> Execute<S, F> for X {}

/// Why a client is served here no more.
enum Parting {
    End,
    /// It goes to this thread.
    Move(usize),
    /// It waits for the next session.
    Wait,
}

/// What is remembered of a command under way.
struct Tag {
    /// Its key's hash; none, if it is about several keys, or all.
    key: Option<u64>,
    writes: bool,
    number: usize,
    started: Option<Nanos>,
    /// Whether it is about several keys.
    has_several: bool,
    /// Room for what it has in its hands, if it is long.
    room: Option<Room>,
}

/// Waits for the room that a command has asked for.
type Asking = Pin<Box<dyn Future<Output = Room>>>;

pub(super) struct Connection<S: Store, F: Future<Output = Reply>, X: Execute<S, F>> {
    shard: Rc<Shard<S>>,
    socket: Socket<Arc<Client>>,
    talk: Talk,
    parser: Parser,
    /// What has come; kept only while something of it is still to be used.
    input: Option<Rc<Vec<u8>>>,
    output: Output,
    /// What it was last said to cost.
    noted_bytes: usize,
    /// The moment in which it last said something.
    active_in: u32,
    under_way: Pipeline<F, Tag>,
    asking: Option<Asking>,
    /// How many may be under way together: twice as many after every reply, as far as replies like it fit into [`WINDOW_BYTES`].
    width: usize,
    execute: X,
}

impl<S: Store, F: Future<Output = Reply>, X: Execute<S, F>> Connection<S, F, X> {
    pub(super) fn new(
        shard: Rc<Shard<S>>,
        socket: Socket<Arc<Client>>,
        guest: Guest,
        boxes: Boxes<F>,
        execute: X,
    ) -> Self {
        let Guest { talk, input, parser, output } = guest;
        Self {
            shard,
            socket,
            talk,
            parser,
            input: (!input.is_empty()).then(|| Rc::new(input)),
            output,
            noted_bytes: usize::MAX,
            active_in: 0,
            under_way: Pipeline::limited(boxes),
            asking: None,
            width: 1,
            execute,
        }
    }

    /// Serves the client until it leaves, or has to, or moves to another thread or session.
    pub(super) async fn serve(mut self) {
        let parting = self.converse().await;
        // The socket may have failed in the middle of a pipeline.
        self.settle(0).await;
        match parting {
            Ok(Parting::Move(home)) => {
                self.shard.stats.handed_over.add(1);
                let inboxes = Arc::clone(&self.shard.inboxes);
                inboxes[home].push(self.into_guest());
            }
            Ok(Parting::Wait) => {
                let common = Arc::clone(&self.shard.common);
                common.lobby.push(self.into_guest());
            }
            // What goes wrong with a socket means that the client is gone.
            Ok(Parting::End) | Err(_) => {}
        }
    }

    /// The client, for whoever serves it next.
    fn into_guest(self) -> Guest {
        let Self { socket, talk, input, parser, output, .. } = self;
        // It is watched by one thread at a time.
        drop(socket);
        Guest { talk, input: input.map_or_else(Vec::new, Rc::unwrap_or_clone), parser, output }
    }

    async fn converse(&mut self) -> io::Result<Parting> {
        let mut has_spoken = false;
        loop {
            // What it has said just now, or what it brought along.
            self.run_requests().await?;
            if has_spoken {
                self.shard.executor.yield_to_ready().await;
            }
            if self.talk.is_over {
                self.write().await?;
                return Ok(Parting::End);
            }
            let is_written = self.send().await?;
            if has_spoken {
                if self.shard.stop.is_set() {
                    return Ok(Parting::Wait);
                }
                if let Some(home) = self.shard.balance.next_home() {
                    return Ok(Parting::Move(home));
                }
                if self.socket.is_readable() {
                    // Others first.
                    self.shard.executor.yield_now().await;
                }
            }
            if !self.socket.is_readable() || !is_written {
                self.save_memory();
            }
            if let Some(parting) = self.hear().await? {
                return Ok(parting);
            }
            has_spoken = true;
            self.shard.executor.yield_to_ready().await;
            self.talk.client.active.store(self.shard.seconds.get(), Ordering::Relaxed);
            self.shard.balance.is_active(&mut self.active_in);
        }
    }

    /// Waits until the client says something, and reads it; meanwhile it is sent its replies. Or how it ended.
    async fn hear(&mut self) -> io::Result<Option<Parting>> {
        // From now on we wait for it. What it has waited for may have taken long.
        self.talk.client.active.store(self.shard.seconds.get(), Ordering::Relaxed);
        self.talk.client.is_served.store(false, Ordering::Relaxed);
        loop {
            if !self.may_go_on() {
                self.hold_back().await?;
            } else if self.output.is_empty() {
                self.socket.readable().await;
            } else {
                self.socket.readable_or_writable().await;
            }
            if self.shard.stop.is_set() {
                return Ok(Some(Parting::Wait));
            }
            if self.talk.client.is_evicted() {
                return Ok(Some(Parting::End));
            }
            if !self.output.is_empty() && self.send().await? {
                self.save_memory();
            }
            if !self.socket.is_readable() || !self.may_go_on() {
                continue;
            }
            match self.read() {
                Ok(0) => {
                    // It may still read what it has asked for.
                    self.write().await?;
                    return Ok(Some(Parting::End));
                }
                Ok(bytes) => {
                    self.talk.client.is_served.store(true, Ordering::Relaxed);
                    self.shard.stats.bytes_in.add(bytes as u64);
                    if self.memory() >= self.noted_bytes + LONG_BYTES {
                        // Who always has more to say never waits, where it would be noted.
                        self.note_memory();
                    }
                    return Ok(None);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.socket.not_readable();
                    self.save_memory();
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// What it costs just now.
    #[inline]
    fn memory(&self) -> usize {
        let input = self.input.as_ref().map_or(0, |input| input.capacity());
        input + self.parser.memory() + self.output.memory()
    }

    /// Gives back what it does not need while it waits, and says what it costs.
    fn save_memory(&mut self) {
        if self.output.is_empty() && !self.output.lacks_block() {
            self.shard.give_block(self.output.take_block());
        }
        if let Some(input) = self.input.take_if(|input| {
            input.len() <= SHORT_REST_BYTES && input.capacity() >= CHUNK_BYTES && self.parser.awaits() == 0
        }) {
            self.input = Some(Rc::new(input.to_vec()));
            self.shard.give_chunk(input);
        }
        self.note_memory();
    }

    fn note_memory(&mut self) {
        let bytes = self.memory();
        if bytes == self.noted_bytes {
            return;
        }
        self.noted_bytes = bytes;
        let common = &self.shard.common;
        let budget = common.clients.budget();
        budget.note(&self.talk.client, bytes as u64);
        if budget.is_exceeded() {
            budget.enforce(&common.clients, common.now(), common.seconds());
        }
    }

    /// Whether it may take more memory than it has.
    #[inline]
    fn may_go_on(&self) -> bool {
        let budget = self.shard.common.clients.budget();
        self.output.len() < budget.most_unread() && (!budget.is_exceeded() || self.memory() <= FREE_BYTES)
    }

    /// Waits until it may take more memory: the client reads its replies, or others give back what they have.
    async fn hold_back(&mut self) -> io::Result<()> {
        self.note_memory();
        while !self.may_go_on() && !self.shard.stop.is_set() && !self.talk.client.is_evicted() {
            // While the client does not read nothing may be under way.
            self.settle(0).await;
            if self.output.len() < self.shard.common.clients.budget().most_unread() {
                self.shard.sleep(PAUSE_NS).await;
            } else {
                self.socket.writable().await;
            }
            self.settle(0).await;
            self.send().await?;
            self.note_memory();
        }
        Ok(())
    }

    /// Reads once; how much.
    fn read(&mut self) -> io::Result<usize> {
        let is_rest = |input: &Rc<Vec<u8>>| input.capacity() < CHUNK_BYTES;
        let input = match self.input.take_if(|input| is_rest(input)) {
            Some(rest) => {
                let mut chunk = self.shard.take_chunk();
                Rc::make_mut(&mut chunk).extend_from_slice(&rest);
                self.input.insert(chunk)
            }
            None => self.input.get_or_insert_with(|| self.shard.take_chunk()),
        };
        // Nothing refers to it any more: all commands have ended.
        let chunk = Rc::make_mut(input);
        if chunk.capacity() - chunk.len() < LEAST_READ_BYTES {
            let wanted = self.parser.awaits().saturating_sub(chunk.len());
            let is_scarce = self.shard.common.clients.budget().is_exceeded();
            let most = if is_scarce { LEAST_READ_BYTES } else { GROWTH_BYTES };
            chunk.reserve_exact(wanted.clamp(LEAST_READ_BYTES, most));
        }
        let room = chunk.capacity() - chunk.len();
        let bytes = rustix::io::read(&self.socket.inner, spare_capacity(chunk))?;
        if bytes < room {
            self.socket.read_all();
        }
        Ok(bytes)
    }

    /// Runs all requests that are whole.
    async fn run_requests(&mut self) -> io::Result<()> {
        let Some(mut chunk) = self.input.take() else { return Ok(()) };
        let mut at = 0;
        // Nobody would read the replies of a client that is gone.
        while !self.talk.is_over && !self.shard.stop.is_set() && !self.socket.is_gone() {
            let limits = Limits {
                request_bytes: self.shard.common.options.max_request_bytes,
                is_stranger: self.talk.is_stranger,
            };
            match self.parser.next(&chunk, at, limits) {
                Ok(Parsed::Whole(request, taken)) => {
                    at += taken;
                    self.run(request, at < chunk.len()).await;
                    if self.output.len() >= BLOCK_BYTES && !self.send_early().await? {
                        self.hold_back().await?;
                    }
                }
                Ok(Parsed::Nothing(taken)) => at += taken,
                Ok(Parsed::Partial) => break,
                Err(error) => {
                    self.refuse(&error).await;
                    break;
                }
            }
        }
        self.settle(0).await;
        if at == chunk.len() || self.talk.is_over {
            self.shard.give_chunk(chunk);
        } else {
            // All commands have ended, so that the rest can be moved to the front.
            Rc::make_mut(&mut chunk).drain(..at);
            self.input = Some(chunk);
        }
        Ok(())
    }

    /// What is not the protocol ends the connection.
    async fn refuse(&mut self, error: &ProtocolError) {
        self.settle(0).await;
        self.push(Reply::error(error.text()));
        self.talk.is_over = true;
    }

    /// Runs one request, or starts it; `more` have come with it.
    async fn run(&mut self, request: Request, more: bool) {
        let shard = &self.shard;
        let Some((spec, number)) = shard.finder.find(&request[0]) else {
            return match self.talk.answer_unknown(&request) {
                Some(answer) => self.answer(answer).await,
                None => self.settle(0).await,
            };
        };
        self.talk.client.last_command.store(number, Ordering::Relaxed);
        let stats = &shard.stats.commands[number];
        stats.calls.add(1);
        if let Some(refused) = self.talk.refusal(spec.command) {
            stats.errors.add(1);
            return self.answer(Err(refused)).await;
        }
        if !spec.takes(request.len()) {
            stats.errors.add(1);
            return self.answer(Err(Refused::arity(spec.name))).await;
        }
        if spec.keys == Keys::Nobodys {
            self.settle(0).await;
            let answer = execute_here(&self.shard.common, &mut self.talk, spec.command, &request);
            if answer.is_err() {
                self.shard.stats.commands[number].errors.add(1);
            }
            self.serve_penalty().await;
            return self.answer(answer).await;
        }
        if shard.is_cut_off.get() && spec.command != Command::Info {
            stats.errors.add(1);
            let refusal = shard.common.health.refusal();
            return self.answer(Err(Refused::new(refusal))).await;
        }
        let key = (spec.keys == Keys::One || (spec.keys == Keys::All && request.len() == 2))
            .then(|| hash(&request[1]));
        let started = shard.is_sampled().then(|| shard.common.now());
        if !self.under_way.is_empty() {
            self.make_way(key, spec.writes).await;
        }
        let is_long = request.bytes() >= LONG_BYTES;
        let room = if is_long || spec.gathers() { self.room(is_long).await } else { None };
        if self.is_over() {
            // What was in front of it may have been given up: it must not take effect without that.
            return;
        }
        let (execute, shard) = (self.execute, &self.shard);
        let under_way = &mut self.under_way;
        let order = if spec.writes && shard.common.options.keeps_order { Order::InTurn } else { Order::Free };
        let freedom =
            if room.is_some() || spec.keys == Keys::Whole { Freedom::Free } else { Freedom::Limited };
        let has_several = key.is_none();
        let tag = Tag { key, writes: spec.writes, number, started, has_several, room };
        let mut given = Some((request, tag));
        let ended = std::future::poll_fn(|context| {
            let started = given.take().and_then(|(request, tag)| {
                under_way.start(
                    || execute(Rc::clone(shard), spec, request),
                    (tag, order, freedom),
                    more,
                    context,
                )
            });
            Poll::Ready(started)
        })
        .await;
        if let Some((reply, tag)) = ended {
            self.finish(reply, &tag);
        }
    }

    #[inline]
    fn finish(&mut self, reply: Reply, tag: &Tag) {
        note(&self.shard, &reply, tag);
        let bytes = self.push(reply);
        self.width = next_width(self.width, bytes);
    }

    /// Adds a reply; its length.
    #[inline]
    fn push(&mut self, reply: Reply) -> usize {
        if self.talk.client.is_evicted() {
            // Nobody will read it, and its memory is wanted.
            return 0;
        }
        if self.output.lacks_block() {
            self.output.give_block(self.shard.take_block());
        }
        let bytes = self.output.push(reply, self.talk.protocol);
        if bytes >= LONG_BYTES {
            self.note_memory();
        }
        bytes
    }

    /// An answer that took no time; those before it first.
    async fn answer(&mut self, answer: Answer) {
        self.settle(0).await;
        self.push(answer.unwrap_or_else(Reply::from));
    }

    /// Lets a client wait that has said a wrong password.
    async fn serve_penalty(&mut self) {
        let Some(penalty) = self.talk.penalty.take() else { return };
        let end = self.shard.executor.now() + penalty.delay_ns;
        while self.shard.executor.now() < end && !self.shard.stop.is_set() {
            self.shard.sleep(PENALTY_STEP_NS).await;
        }
    }

    /// Waits until a command about this key may start.
    async fn make_way(&mut self, key: Option<u64>, writes: bool) {
        let keeps_order = self.shard.common.options.keeps_order;
        let is_in_the_way = |tag: &Tag| {
            tag.key.is_none() || key.is_none() || tag.key == key || (keeps_order && tag.writes && !writes)
        };
        loop {
            let must_wait = self.under_way.running().any(is_in_the_way);
            match (must_wait, self.under_way.len()) {
                (true, length) => self.settle(length - 1).await,
                (false, length) if length >= self.width => self.settle(self.width - 1).await,
                (false, _) => return,
            }
        }
    }

    /// Room for a command that is known to be long before it begins; those before it come to their end first, since they may ask for some, too.
    /// Meanwhile replies are sent. `None` if the client is gone.
    async fn room(&mut self, is_long: bool) -> Option<Room> {
        self.settle(0).await;
        let shard = Rc::clone(&self.shard);
        let mut room = pin!(shard.room(VALUE_ROOM_BYTES));
        let room = loop {
            let room = std::future::poll_fn(|context| {
                if self.is_over() || self.may_send() {
                    return Poll::Ready(None);
                }
                self.socket.wake_at_events(context);
                room.as_mut().poll(context).map(Some)
            })
            .await;
            if room.is_some() || self.is_over() {
                break room;
            }
            self.send_piece().await;
        };
        if is_long && room.is_some() {
            self.shard.turns.pass(LONG_BYTES).await;
        }
        room
    }

    /// Whether nobody will read what is still to be said.
    #[inline]
    fn is_over(&self) -> bool {
        self.socket.is_gone() || self.talk.client.is_evicted()
    }

    /// Waits until at most so many commands are left. If one of them waits for room, replies are sent meanwhile: others may wait for the
    /// memory that those take.
    async fn settle(&mut self, most: usize) {
        while self.under_way.len() > most {
            let may_send = std::future::poll_fn(|context: &mut Context<'_>| {
                if self.is_over() {
                    self.give_up();
                }
                self.advance(context);
                if self.under_way.len() <= most {
                    return Poll::Ready(false);
                }
                if self.asking.is_some() && self.may_send() { Poll::Ready(true) } else { Poll::Pending }
            })
            .await;
            if may_send {
                self.send_piece().await;
            }
        }
    }

    /// The client is gone: what has not begun is dropped, since clients that reset their connections again and again would keep others from
    /// the same keys, and so are the replies, since others wait for their memory.
    fn give_up(&mut self) {
        self.under_way.give_up_waiting();
        if self.under_way.asking().is_some_and(|tag| !tag.has_several) {
            self.under_way.give_up_first();
            self.asking = None;
        }
        if !self.output.is_empty() {
            self.output = Output::default();
            self.note_memory();
        }
    }

    /// Lets commands under way go on, and takes the replies of those that have ended.
    fn advance(&mut self, context: &mut Context<'_>) {
        loop {
            let mut ended = SmallVec::<[_; 16]>::new();
            self.under_way.advance(context, |reply, tag| ended.push((reply, tag)));
            for (reply, tag) in ended {
                self.finish(reply, &tag);
            }
            if !self.give_room(context) {
                return;
            }
        }
    }

    /// Room for the first command under way if it asks for some; whether it has got it.
    #[inline]
    fn give_room(&mut self, context: &mut Context<'_>) -> bool {
        let Some(tag) = self.under_way.asking() else {
            self.asking = None;
            return false;
        };
        self.socket.wake_at_events(context);
        let asking = self.asking.get_or_insert_with(|| {
            let bytes = if tag.has_several { VALUES_ROOM_BYTES } else { VALUE_ROOM_BYTES };
            let shard = Rc::clone(&self.shard);
            Box::pin(async move {
                let room = shard.room(bytes).await;
                shard.turns.pass(bytes).await;
                room
            })
        });
        let Poll::Ready(room) = asking.as_mut().poll(context) else { return false };
        tag.room = Some(room);
        self.asking = None;
        self.under_way.free();
        true
    }

    /// Sends replies as far as the client takes them, long ones in turns; whether that is all. Nothing may be under way.
    async fn send(&mut self) -> io::Result<bool> {
        while self.output.len() >= LONG_BYTES && self.socket.is_writable() {
            self.shard.turns.pass(SEND_BYTES).await;
            self.try_write(SEND_BYTES)?;
        }
        self.try_write(SEND_BYTES)
    }

    #[inline]
    fn may_send(&self) -> bool {
        !self.output.is_empty() && self.socket.is_writable()
    }

    /// Sends a piece in its turn; commands under way go on.
    async fn send_piece(&mut self) {
        let shard = Rc::clone(&self.shard);
        let mut turn = pin!(shard.turns.pass(SEND_BYTES));
        std::future::poll_fn(|context| {
            self.advance(context);
            turn.as_mut().poll(context)
        })
        .await;
        if self.try_write(SEND_BYTES).is_err() {
            self.socket.set_gone();
        }
    }

    /// Sends what has become long; commands may be under way.
    async fn send_early(&mut self) -> io::Result<bool> {
        if self.under_way.is_empty() { self.send().await } else { self.try_write(SEND_BYTES) }
    }

    /// Writes all replies, and waits until the client has taken them, or the session ends. Nothing may be under way.
    async fn write(&mut self) -> io::Result<()> {
        while !self.send().await? && !self.shard.stop.is_set() {
            self.note_memory();
            self.socket.writable().await;
        }
        Ok(())
    }

    /// Writes what the socket takes of the replies, and no more than so many bytes; whether that is all.
    fn try_write(&mut self, most: usize) -> io::Result<bool> {
        let mut left = most;
        while !self.output.is_empty() && left > 0 {
            let front = self.output.front();
            match (&self.socket.inner.stream).write(&front[..front.len().min(left)]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(bytes) => {
                    left -= bytes;
                    self.output.take(bytes);
                    self.shard.stats.bytes_out.add(bytes as u64);
                    self.talk.client.unread_since.store(0, Ordering::Relaxed);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let since = &self.talk.client.unread_since;
                    if since.load(Ordering::Relaxed) == 0 {
                        since.store(self.shard.seconds.get(), Ordering::Relaxed);
                    }
                    self.socket.not_writable();
                    break;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        if self.noted_bytes >= LONG_BYTES {
            // Others may wait for that memory.
            self.note_memory();
        }
        Ok(self.output.is_empty())
    }
}

/// How many commands may be under way together after a reply of so many bytes.
#[inline]
fn next_width(width: usize, reply_bytes: usize) -> usize {
    let fitting =
        if reply_bytes <= WINDOW_BYTES / WIDTH { WIDTH } else { (WINDOW_BYTES / reply_bytes).max(1) };
    fitting.min(2 * width)
}

/// Counts a command that has ended.
fn note<S: Store>(shard: &Shard<S>, reply: &Reply, tag: &Tag) {
    let stats = &shard.stats.commands[tag.number];
    if reply.is_error() {
        stats.errors.add(1);
    }
    if let Some(started) = tag.started {
        stats.time(shard.common.now().saturating_sub(started));
    }
}

#[inline]
fn hash(key: &[u8]) -> u64 {
    let mut hasher = FxHasher::default();
    hasher.write(key);
    hasher.finish()
}

impl<S: Store> Shard<S> {
    /// Whether this command is one of those that are timed.
    #[inline]
    fn is_sampled(&self) -> bool {
        let left = self.unsampled.get();
        self.unsampled.set(if left == 0 { SAMPLED_ONE_IN - 1 } else { left - 1 });
        left == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_together_as_far_as_their_replies_fit() {
        let after = |replies: &[usize]| replies.iter().fold(1, |width, bytes| next_width(width, *bytes));
        assert_eq!(after(&[5]), 2);
        assert_eq!(after(&[5; 5]), WIDTH);
        assert_eq!(after(&[5; 100]), WIDTH);
        assert_eq!(after(&[25 << 10; 10]), 10);
        assert_eq!(after(&[1 << 20; 10]), 1);
        assert_eq!(after(&[64 << 20]), 1, "one at a time, however long");
        assert_eq!(after(&[64 << 20, 5, 5]), 4, "and more again after short ones");
    }
}
