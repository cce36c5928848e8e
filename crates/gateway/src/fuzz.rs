//! What clients send, for fuzzers: whatever bytes come in, in whatever pieces, are parsed and carried out as a connection does it, but
//! without sockets, one command after the other, on a map.
//!
//! [`Bench::check`] panics if
//!
//! - anything else does,
//! - the same bytes are answered otherwise when they come in other pieces,
//! - a request that is not whole, or a reply, takes more memory than its limit.
//!
//! The driver on stable compilers is `tests/gateway/fuzz.rs`, the one that coverage guides `fuzz/fuzz_targets/requests.rs`.

use crate::command::connection::{Talk, execute as execute_here};
use crate::command::{Command, Keys, Refused, Spec, execute};
use crate::common::Common;
use crate::options::Options;
use crate::resp::parse::Parsed;
use crate::resp::{Limits as RequestLimits, Parser, Reply, Request};
use crate::shard::{Joined, Shard, Start};
use crate::store::Store;
use farwood_fabric::clock::{MILLISECOND, Nanos};
use farwood_fabric::{Cluster, Endpoint, Executor, SessionOptions};
use farwood_index::{IndexError, KeyValue, Limits, OrderedIndex, Pool};
use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::ops::Bound;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// How much a request may be, a reply, and what is kept. Small, so that inputs reach them.
const REQUEST_BYTES: usize = 16 << 10;
const REPLY_BYTES: usize = 16 << 10;
const LIMITS: Limits = Limits { key_bytes: 64, value_bytes: 2048, pair_bytes: 2100 };
/// What replies and requests may take beyond their limits: a last item, a line.
const SLACK_BYTES: usize = (64 << 10) + 4096;
/// How long every request takes, by the clock that counts: keys that live for some milliseconds expire in the middle.
const REQUEST_NS: Nanos = MILLISECOND;
/// Replies that depend on the moment, or on chance: only their kind has to be the same.
const FICKLE: [Command; 10] = [
    Command::Client,
    Command::ExpireTime,
    Command::Info,
    Command::PExpireTime,
    Command::PTtl,
    Command::RandomKey,
    Command::Time,
    Command::Ttl,
    Command::Config,
    Command::DbSize,
];

/// Where fuzzed requests are carried out. Each conversation begins on an empty map.
#[derive(Debug)]
pub struct Bench {
    executor: Executor,
    joined: Joined<Map>,
    stream: TcpStream,
}

/// What one client was answered.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
struct Conversation {
    replies: Vec<Vec<u8>>,
    /// Whether the gateway hung up.
    is_over: bool,
}

impl Bench {
    /// A bench; the pool is only there because a session needs one.
    pub fn new(cluster: &Cluster) -> Result<Self, Box<dyn std::error::Error>> {
        let executor = Executor::new();
        let joined = executor.block_on(async {
            let pool = Pool::join(cluster, SessionOptions::default()).await?;
            let endpoint = pool.session().endpoint()?;
            Ok::<_, IndexError>(Joined { store: Map::default(), pool, endpoint })
        })?;
        // A client has a socket, on which nothing is ever sent.
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let stream = TcpStream::connect(listener.local_addr()?)?;
        Ok(Self { executor, joined, stream })
    }

    /// Takes bytes of a fuzzer: whether there is a password, how many cuts and where, and what the client sends. How many replies there
    /// were.
    pub fn run(&self, input: &[u8]) -> usize {
        let [head, count, rest @ ..] = input else { return 0 };
        let (places, bytes) = rest.split_at((usize::from(*count % 8) * 2).min(rest.len()));
        let cuts: Vec<usize> = places
            .chunks_exact(2)
            .map(|place| usize::from(u16::from_le_bytes([place[0], place[1]])))
            .collect();
        self.check(bytes, &cuts, head & 1 == 1)
    }

    /// Carries out what a client sends, in one piece and cut into pieces, and compares. How many replies there were.
    pub fn check(&self, bytes: &[u8], cuts: &[usize], has_password: bool) -> usize {
        let mut places: Vec<usize> = cuts.iter().map(|cut| cut % (bytes.len() + 1)).collect();
        places.extend([0, bytes.len()]);
        places.sort_unstable();
        let pieces: Vec<&[u8]> = places.windows(2).map(|pair| &bytes[pair[0]..pair[1]]).collect();
        let whole = self.converse(&[bytes], has_password);
        let parts = self.converse(&pieces, has_password);
        assert!(whole == parts, "in one piece {whole:?}, in pieces {parts:?}");
        whole.replies.len()
    }

    fn converse(&self, pieces: &[&[u8]], has_password: bool) -> Conversation {
        self.executor.block_on(Box::pin(self.converse_in(pieces, has_password))).unwrap_or_default()
    }

    async fn converse_in(&self, pieces: &[&[u8]], has_password: bool) -> Option<Conversation> {
        let address = SocketAddr::from(([127, 0, 0, 1], 1));
        let options = Options {
            password: has_password.then(|| b"pass".to_vec()),
            max_request_bytes: REQUEST_BYTES,
            max_reply_bytes: REPLY_BYTES,
            ..Options::new(address, "fuzzed")
        };
        let common = Arc::new(Common::with_counted_time(options, [1, 2, 3]));
        self.joined.store.lock().clear();
        let start = Start {
            number: 0,
            common: Arc::clone(&common),
            stop: Arc::default(),
            inboxes: Arc::new([]),
            listener: None,
        };
        let shard = Rc::new(Shard::new(&self.executor, start, Some(self.joined.clone())).ok()?);
        let seat = common.clients.enter(1, self.stream.try_clone().ok()?, address, address, 1).ok()?;
        let mut client = OneClient { shard, talk: Talk::new(seat, &common), said: Conversation::default() };
        client.hear(pieces).await;
        Some(client.said)
    }
}

/// A connection's work, without its socket.
struct OneClient {
    shard: Rc<Shard<Map>>,
    talk: Talk,
    said: Conversation,
}

impl OneClient {
    async fn hear(&mut self, pieces: &[&[u8]]) {
        let (mut parser, mut held) = (Parser::default(), Vec::new());
        for piece in pieces {
            held.extend_from_slice(piece);
            let chunk = Rc::new(std::mem::take(&mut held));
            let mut at = 0;
            loop {
                let limits =
                    RequestLimits { request_bytes: REQUEST_BYTES, is_stranger: self.talk.is_stranger };
                match parser.next(&chunk, at, limits) {
                    Ok(Parsed::Whole(request, taken)) => {
                        at += taken;
                        let (reply, spec) = self.answer(request).await;
                        if let Some(reply) = reply {
                            self.push(&reply, spec);
                        }
                    }
                    Ok(Parsed::Nothing(taken)) => at += taken,
                    Ok(Parsed::Partial) => break,
                    Err(error) => {
                        self.push(&Reply::error(error.text()), None);
                        self.talk.is_over = true;
                    }
                }
                if self.talk.is_over {
                    self.said.is_over = true;
                    return;
                }
            }
            held.extend_from_slice(&chunk[at..]);
            assert!(held.len() <= REQUEST_BYTES + SLACK_BYTES, "{} bytes of one request wait", held.len());
            assert!(parser.memory() <= 4 * REQUEST_BYTES, "the parser has {} bytes", parser.memory());
        }
    }

    /// As the connection does it.
    async fn answer(&mut self, request: Request) -> (Option<Reply>, Option<&'static Spec>) {
        self.shard.common.pass(REQUEST_NS);
        let Some((spec, number)) = self.shard.find(&request[0]) else {
            return (
                self.talk.answer_unknown(&request).map(|answer| answer.unwrap_or_else(Reply::from)),
                None,
            );
        };
        self.talk.client.last_command.store(number, std::sync::atomic::Ordering::Relaxed);
        let reply = if let Some(refused) = self.talk.refusal(spec.command) {
            refused.into()
        } else if !spec.takes(request.len()) {
            Refused::arity(spec.name).into()
        } else if spec.keys == Keys::Nobodys {
            let answer = execute_here(&self.shard.common, &mut self.talk, spec.command, &request);
            // Nobody is kept waiting here.
            self.talk.penalty = None;
            answer.unwrap_or_else(Reply::from)
        } else {
            execute(Rc::clone(&self.shard), spec, request).await
        };
        (Some(reply), Some(spec))
    }

    fn push(&mut self, reply: &Reply, spec: Option<&Spec>) {
        let mut bytes = Vec::new();
        reply.write(&mut bytes, self.talk.protocol);
        assert!(bytes.len() <= REPLY_BYTES + SLACK_BYTES, "a reply of {} bytes", bytes.len());
        assert!(bytes.ends_with(b"\r\n"), "every reply ends");
        if spec.is_some_and(|spec| FICKLE.contains(&spec.command)) {
            bytes.truncate(1);
        }
        self.said.replies.push(bytes);
    }
}

type Entries = BTreeMap<Vec<u8>, Vec<u8>>;

/// An ordered map with the operations of an index.
#[derive(Clone, Default, Debug)]
struct Map {
    entries: Arc<Mutex<Entries>>,
}

impl Map {
    fn lock(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, key: &[u8], decide: impl FnOnce(Option<&Vec<u8>>) -> Option<Option<Vec<u8>>>) -> bool {
        let mut entries = self.lock();
        let Some(new) = decide(entries.get(key)) else { return false };
        let value_bytes = new.as_ref().map_or(0, Vec::len);
        let fits = value_bytes <= LIMITS.value_bytes && key.len() + value_bytes <= LIMITS.pair_bytes;
        assert!(fits && key.len() <= LIMITS.key_bytes, "nothing is stored that an engine would refuse");
        match new {
            Some(value) => entries.insert(key.to_vec(), value),
            None => entries.remove(key),
        };
        true
    }
}

impl Store for Map {
    type Handle = Self;

    fn handle(&self, _: &Endpoint) -> Result<Self, IndexError> {
        Ok(self.clone())
    }

    fn engine(&self) -> &'static str {
        "map"
    }

    fn cache_bytes(&self) -> u64 {
        0
    }
}

impl OrderedIndex for Map {
    fn limits(&self) -> Limits {
        LIMITS
    }

    async fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, IndexError> {
        Ok(self.lock().get(key).cloned())
    }

    async fn put(&self, key: &[u8], value: &[u8]) -> Result<(), IndexError> {
        self.change(key, |_| Some(Some(value.to_vec())));
        Ok(())
    }

    async fn compare_and_swap(
        &self,
        key: &[u8],
        expected: Option<&[u8]>,
        new: Option<&[u8]>,
    ) -> Result<bool, IndexError> {
        let is_so = |held: Option<&Vec<u8>>| held.map(Vec::as_slice) == expected;
        Ok(self.change(key, |held| is_so(held).then(|| new.map(<[u8]>::to_vec))))
    }

    async fn put_if_absent(&self, key: &[u8], value: &[u8]) -> Result<bool, IndexError> {
        Ok(self.change(key, |held| held.is_none().then(|| Some(value.to_vec()))))
    }

    async fn update_if_present(&self, key: &[u8], value: &[u8]) -> Result<bool, IndexError> {
        Ok(self.change(key, |held| held.map(|_| Some(value.to_vec()))))
    }

    async fn delete(&self, key: &[u8]) -> Result<bool, IndexError> {
        Ok(self.change(key, |held| held.map(|_| None)))
    }

    async fn scan(
        &self,
        start: Bound<&[u8]>,
        end: Bound<&[u8]>,
        limit: usize,
        reverse: bool,
    ) -> Result<Vec<KeyValue>, IndexError> {
        let entries = self.lock();
        let pairs = entries.range::<[u8], _>((start, end)).map(|(key, value)| (key.clone(), value.clone()));
        Ok(if reverse { pairs.rev().take(limit).collect() } else { pairs.take(limit).collect() })
    }
}
