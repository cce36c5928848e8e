//! Gateways for tests, on a map instead of an index, and a client that speaks the bare protocol.

use farwood_fabric::clock::RealClock;
use farwood_fabric::{Cluster, Endpoint};
use farwood_gateway::options::Spread;
use farwood_gateway::{Backing, Gateway, Options, Store};
use farwood_index::{IndexError, KeyValue, Limits, OrderedIndex, Pool};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::ops::Bound;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// How long anything may take before a test gives up.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

type Entries = BTreeMap<Vec<u8>, Vec<u8>>;

/// An ordered map with the operations of an index; each gives way to other tasks before and after it takes effect, as far memory does.
#[derive(Clone, Default)]
pub(crate) struct Map {
    entries: Arc<Mutex<Entries>>,
    /// More bytes do not fit.
    capacity_bytes: Option<usize>,
    limits: Option<Limits>,
}

impl Map {
    pub(crate) fn with_capacity(bytes: usize) -> Self {
        Self { capacity_bytes: Some(bytes), ..Self::default() }
    }

    pub(crate) fn with_limits(limits: Limits) -> Self {
        Self { limits: Some(limits), ..Self::default() }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().expect("no test panics with it")
    }
}

impl Backing for Map {
    type Store = Self;

    async fn open(&self, _: &Pool, _: &Endpoint) -> Result<Self, IndexError> {
        Ok(self.clone())
    }
}

impl Store for Map {
    type Handle = MapHandle;

    fn handle(&self, endpoint: &Endpoint) -> Result<MapHandle, IndexError> {
        Ok(MapHandle { map: self.clone(), endpoint: endpoint.clone() })
    }

    fn engine(&self) -> &'static str {
        "map"
    }

    fn cache_bytes(&self) -> u64 {
        0
    }
}

/// One task's access to the map.
pub(crate) struct MapHandle {
    map: Map,
    endpoint: Endpoint,
}

impl MapHandle {
    /// Half of the operations wait, so that those of a pipeline overtake each other.
    async fn pause(&self) {
        for _ in 0..self.endpoint.random_below(3) {
            self.endpoint.yield_now().await;
        }
    }

    async fn change(
        &self,
        key: &[u8],
        decide: impl FnOnce(Option<&Vec<u8>>) -> Option<Option<Vec<u8>>>,
    ) -> Result<bool, IndexError> {
        self.pause().await;
        let changed = {
            let mut entries = self.map.lock();
            match decide(entries.get(key)) {
                None => false,
                Some(None) => {
                    entries.remove(key);
                    true
                }
                Some(Some(value)) => {
                    let bytes: usize = entries.iter().map(|(key, value)| key.len() + value.len()).sum();
                    if self.map.capacity_bytes.is_some_and(|most| bytes + value.len() > most) {
                        return Err(full());
                    }
                    entries.insert(key.to_vec(), value);
                    true
                }
            }
        };
        self.pause().await;
        Ok(changed)
    }
}

impl MapHandle {
    /// An engine refuses what is too long for it.
    fn check(&self, key: &[u8], value: &[u8]) -> Result<(), IndexError> {
        let limits = self.limits();
        let fits = key.len() <= limits.key_bytes
            && value.len() <= limits.value_bytes
            && key.len() + value.len() <= limits.pair_bytes;
        if fits { Ok(()) } else { Err(IndexError::BadValue { why: "it is too long for the map".into() }) }
    }
}

fn full() -> IndexError {
    let error = farwood_fabric::control::ControlError::PoolFull {
        server: farwood_fabric::ServerId::COORDINATOR,
        wanted: 1,
        flush_helps: false,
    };
    IndexError::PoolFull(error)
}

impl OrderedIndex for MapHandle {
    fn limits(&self) -> Limits {
        self.map.limits.unwrap_or(Limits::NONE)
    }

    async fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, IndexError> {
        assert!(key.len() <= self.limits().key_bytes, "nobody asks for a key that cannot be there");
        self.pause().await;
        Ok(self.map.lock().get(key).cloned())
    }

    async fn put(&self, key: &[u8], value: &[u8]) -> Result<(), IndexError> {
        self.check(key, value)?;
        self.change(key, |_| Some(Some(value.to_vec()))).await.map(drop)
    }

    async fn compare_and_swap(
        &self,
        key: &[u8],
        expected: Option<&[u8]>,
        new: Option<&[u8]>,
    ) -> Result<bool, IndexError> {
        if let Some(new) = new {
            self.check(key, new)?;
        }
        let is_so = |held: Option<&Vec<u8>>| held.map(Vec::as_slice) == expected;
        self.change(key, |held| is_so(held).then(|| new.map(<[u8]>::to_vec))).await
    }

    async fn put_if_absent(&self, key: &[u8], value: &[u8]) -> Result<bool, IndexError> {
        self.compare_and_swap(key, None, Some(value)).await
    }

    async fn update_if_present(&self, key: &[u8], value: &[u8]) -> Result<bool, IndexError> {
        self.change(key, |held| held.map(|_| Some(value.to_vec()))).await
    }

    async fn delete(&self, key: &[u8]) -> Result<bool, IndexError> {
        self.change(key, |held| held.map(|_| None)).await
    }

    async fn scan(
        &self,
        start: Bound<&[u8]>,
        end: Bound<&[u8]>,
        limit: usize,
        reverse: bool,
    ) -> Result<Vec<KeyValue>, IndexError> {
        self.pause().await;
        let longest = |end: Bound<&[u8]>| match end {
            Bound::Included(key) | Bound::Excluded(key) => key.len(),
            Bound::Unbounded => 0,
        };
        assert!(longest(start).max(longest(end)) <= self.limits().key_bytes, "no bound is longer than a key");
        let entries = self.map.lock();
        let pairs = entries.range::<[u8], _>((start, end)).map(|(key, value)| (key.clone(), value.clone()));
        Ok(if reverse { pairs.rev().take(limit).collect() } else { pairs.take(limit).collect() })
    }
}

/// A pool inside the process, for the gateways' sessions.
pub(crate) fn pool() -> Cluster {
    farwood_memory::embedded(1, 64 << 20).expect("a pool")
}

/// Two threads, and clients move whenever the other one has less to do.
pub(crate) fn options() -> Options {
    let spread = Spread { busy_percent: 0, spare_percent: 0, heavy_ns: 0, spare_percent_if_heavy: 0 };
    Options { threads: 2, spread, ..Options::new("127.0.0.1:0".parse().expect("an address"), "test") }
}

pub(crate) fn gateway(map: &Map) -> Gateway {
    start(map, options())
}

pub(crate) fn start(map: &Map, options: Options) -> Gateway {
    Gateway::start(&pool(), map.clone(), options).expect("a gateway")
}

/// A reply.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Value {
    Word(String),
    Error(String),
    Number(i64),
    Nil,
    Bytes(Vec<u8>),
    Text(String),
    Array(Vec<Value>),
    Map(Vec<(Value, Value)>),
    Set(Vec<Value>),
}

impl Value {
    pub(crate) fn text(&self) -> String {
        match self {
            Self::Word(text) | Self::Error(text) | Self::Text(text) => text.clone(),
            Self::Bytes(bytes) => String::from_utf8_lossy(bytes).into_owned(),
            Self::Number(number) => number.to_string(),
            other => format!("{other:?}"),
        }
    }

    pub(crate) fn items(self) -> Vec<Value> {
        match self {
            Self::Array(items) | Self::Set(items) => items,
            other => panic!("no array: {other:?}"),
        }
    }
}

pub(crate) fn bytes(text: impl AsRef<[u8]>) -> Value {
    Value::Bytes(text.as_ref().to_vec())
}

/// A client that speaks the bare protocol.
pub(crate) struct Client {
    pub(crate) stream: BufReader<TcpStream>,
}

impl Client {
    pub(crate) fn to(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).expect("it listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("a time");
        stream.set_write_timeout(Some(PATIENCE)).expect("a time");
        stream.set_nodelay(true).expect("no delay");
        Self { stream: BufReader::new(stream) }
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) {
        self.stream.get_mut().write_all(bytes).expect("it listens");
    }

    pub(crate) fn ask<A: AsRef<[u8]>>(&mut self, arguments: &[A]) -> Value {
        self.send(&encode(arguments));
        self.read()
    }

    /// Asks with words.
    pub(crate) fn say(&mut self, line: &str) -> Value {
        self.ask(&line.split(' ').collect::<Vec<_>>())
    }

    pub(crate) fn read(&mut self) -> Value {
        self.try_read().expect("a reply")
    }

    /// A reply, unless the connection has ended.
    pub(crate) fn try_read(&mut self) -> Option<Value> {
        let mut line = Vec::new();
        match self.stream.read_until(b'\n', &mut line) {
            Ok(0) => return None,
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return None,
            Err(error) => panic!("no reply: {error}"),
        }
        let line = line.strip_suffix(b"\r\n").expect("a line");
        // Errors repeat what clients have said, which need not be text.
        let line = std::str::from_utf8(line).map_or_else(|_| line.escape_ascii().to_string(), str::to_owned);
        let (kind, rest) = line.split_at(1);
        let number = || rest.parse::<i64>().expect("a number");
        Some(match kind {
            "+" => Value::Word(rest.to_owned()),
            "-" => Value::Error(rest.to_owned()),
            ":" => Value::Number(number()),
            "_" => Value::Nil,
            "$" | "=" => match usize::try_from(number()) {
                Err(_) => Value::Nil,
                Ok(length) => {
                    let mut bytes = vec![0; length + 2];
                    self.stream.read_exact(&mut bytes).expect("as much as was said");
                    bytes.truncate(length);
                    if kind == "=" {
                        Value::Text(String::from_utf8(bytes).expect("text"))
                    } else {
                        Value::Bytes(bytes)
                    }
                }
            },
            "*" => Value::Array((0..number()).map(|_| self.read()).collect()),
            "~" => Value::Set((0..number()).map(|_| self.read()).collect()),
            "%" => Value::Map((0..number()).map(|_| (self.read(), self.read())).collect()),
            other => panic!("'{other}' begins no reply"),
        })
    }
}

pub(crate) fn encode<A: AsRef<[u8]>>(arguments: &[A]) -> Vec<u8> {
    let mut out = format!("*{}\r\n", arguments.len()).into_bytes();
    for argument in arguments {
        let argument = argument.as_ref();
        out.extend(format!("${}\r\n", argument.len()).into_bytes());
        out.extend(argument);
        out.extend(b"\r\n");
    }
    out
}

/// Looks again and again, with an end.
pub(crate) fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let clock = RealClock::new();
    while !done() {
        assert!(u128::from(clock.now()) < PATIENCE.as_nanos(), "waited too long for {what}");
        nap(1);
    }
}

#[expect(clippy::disallowed_methods, reason = "tests of a server live in real time")]
pub(crate) fn nap(ms: u64) {
    std::thread::sleep(Duration::from_millis(ms));
}

/// A real Redis, which ends with the test.
pub(crate) struct Redis {
    process: Child,
    pub(crate) address: SocketAddr,
}

impl Redis {
    /// Starts one; `None`, with a line that says so, where there is none to start.
    pub(crate) fn start() -> Option<Self> {
        let free =
            TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a port");
        let started = Command::new("redis-server")
            .args([
                "--port",
                &free.port().to_string(),
                "--bind",
                "127.0.0.1",
                "--databases",
                "1",
                "--save",
                "",
            ])
            .args(["--proto-max-bulk-len", "67108864", "--dir", "/tmp"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let Ok(process) = started else {
            eprintln!("SKIPPED: redis-server is not installed, so nothing was compared with it");
            return None;
        };
        let redis = Self { process, address: free };
        wait_for("redis-server", || TcpStream::connect(free).is_ok());
        Some(redis)
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
