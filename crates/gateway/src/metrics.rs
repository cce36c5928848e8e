//! The counts for Prometheus (`GET /metrics`) and whether the gateway can serve (`GET /healthz`), on threads of their own that nobody waits
//! for.
//!
//! One thread accepts, and each request has a thread until it is answered, for at most [`PATIENCE`] in all, however slowly it is sent
//! or read. When [`MAX_REQUESTS`] are under way the oldest is hung up on, so whoever asks now is answered.

use crate::command::COMMANDS;
use crate::common::{Common, Stop};
use crate::stats::{SAMPLED_ONE_IN, bucket_limit_ns};
use farwood_fabric::clock::RealClock;
use std::collections::VecDeque;
use std::fmt::Write as _;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// How long a request and its answer may take.
const PATIENCE: Duration = Duration::from_secs(2);
/// How many requests are under way at a time.
const MAX_REQUESTS: usize = 16;
/// Longer requests are not read.
const MAX_REQUEST_BYTES: u64 = 8 << 10;

/// The thread that accepts; dropping it ends it.
#[derive(Debug)]
pub(crate) struct Metrics {
    address: SocketAddr,
    stop: Arc<Stop>,
    thread: Option<JoinHandle<()>>,
}

impl Metrics {
    #[expect(clippy::disallowed_methods, reason = "a thread that waits for the outside world")]
    pub(crate) fn start(at: SocketAddr, common: Arc<Common>) -> io::Result<Self> {
        let listener = TcpListener::bind(at)?;
        let address = listener.local_addr()?;
        let stop = Arc::<Stop>::default();
        let its_stop = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let under_way = Arc::<UnderWay>::default();
            for stream in listener.incoming() {
                if its_stop.is_set() {
                    return;
                }
                // Whoever asked is gone, or said too little: the next one may do better.
                let Ok(stream) = stream.map(Arc::new) else { continue };
                under_way.begin(&stream);
                let (common, under_way) = (Arc::clone(&common), Arc::clone(&under_way));
                std::thread::spawn(move || {
                    let _ = answer(&stream, &common);
                    under_way.end(&stream);
                });
            }
        });
        Ok(Self { address, stop, thread: Some(thread) })
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Metrics {
    fn drop(&mut self) {
        self.stop.set();
        // It waits for somebody to connect.
        let woken = TcpStream::connect_timeout(&self.address, PATIENCE).is_ok();
        if let Some(thread) = self.thread.take().filter(|_| woken) {
            let _ = thread.join();
        }
    }
}

/// Requests that are being read or answered, the oldest first.
#[derive(Default, Debug)]
struct UnderWay {
    streams: Mutex<VecDeque<Arc<TcpStream>>>,
}

impl UnderWay {
    /// Adds a request; the oldest goes if there are too many.
    fn begin(&self, stream: &Arc<TcpStream>) {
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        if streams.len() >= MAX_REQUESTS {
            if let Some(oldest) = streams.pop_front() {
                // Its thread finds that out and ends.
                let _ = oldest.shutdown(Shutdown::Both);
            }
        }
        streams.push_back(Arc::clone(stream));
    }

    fn end(&self, stream: &Arc<TcpStream>) {
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        streams.retain(|other| !Arc::ptr_eq(other, stream));
    }
}

/// What is left of a request's time.
struct Deadline {
    clock: RealClock,
}

impl Deadline {
    fn left(&self) -> io::Result<Duration> {
        let left = PATIENCE.saturating_sub(Duration::from_nanos(self.clock.now()));
        if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
    }
}

fn answer(stream: &TcpStream, common: &Common) -> io::Result<()> {
    let deadline = Deadline { clock: RealClock::new() };
    let mut request = Vec::new();
    let mut part = [0u8; 1024];
    let mut limited = stream.take(MAX_REQUEST_BYTES);
    while !request.windows(4).any(|end| end == b"\r\n\r\n") {
        stream.set_read_timeout(Some(deadline.left()?))?;
        match limited.read(&mut part)? {
            0 => break,
            bytes => request.extend_from_slice(&part[..bytes]),
        }
    }
    let (status, body) = match path(&request) {
        b"/metrics" => ("200 OK", page(common)),
        b"/healthz" => match common.health.trouble() {
            None => ("200 OK", "ok\n".to_owned()),
            Some(why) => ("503 Service Unavailable", why + "\n"),
        },
        _ => ("404 Not Found", "there are /metrics and /healthz\n".to_owned()),
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    let text = head + &body;
    let mut left = text.as_bytes();
    while !left.is_empty() {
        stream.set_write_timeout(Some(deadline.left()?))?;
        match (&mut { stream }).write(left)? {
            0 => return Err(ErrorKind::WriteZero.into()),
            bytes => left = &left[bytes..],
        }
    }
    Ok(())
}

/// What a GET asks for, without what it adds behind a question mark.
fn path(request: &[u8]) -> &[u8] {
    let target = request.strip_prefix(b"GET ").unwrap_or_default();
    target.split(|byte| matches!(byte, b' ' | b'?' | b'\r')).next().unwrap_or_default()
}

/// The whole page.
fn page(common: &Common) -> String {
    let mut page = Page::default();
    let totals = common.totals();
    let called = || COMMANDS.iter().zip(&totals.commands).filter(|(_, command)| command.calls > 0);
    page.head("commands_total", "counter", "Commands that clients sent.");
    called().for_each(|(spec, c)| page.line("commands_total", &[("command", spec.name)], c.calls));
    page.head("command_errors_total", "counter", "Commands that were answered with an error.");
    called().for_each(|(spec, c)| page.line("command_errors_total", &[("command", spec.name)], c.errors));
    let help = format!("Time from a command's start to its reply; one command in {SAMPLED_ONE_IN} is timed.");
    page.head("command_seconds", "histogram", &help);
    for (spec, command) in called() {
        let mut sum = 0;
        for (n, count) in command.buckets.iter().enumerate() {
            sum += count;
            let limit = bucket_limit_ns(n).map_or("+Inf".to_owned(), |ns| format!("{}", ns as f64 / 1e9));
            page.line("command_seconds_bucket", &[("command", spec.name), ("le", &limit)], sum);
        }
        page.line("command_seconds_sum", &[("command", spec.name)], command.timed_ns as f64 / 1e9);
        page.line("command_seconds_count", &[("command", spec.name)], command.timed);
    }
    let (ever, refused) = common.clients.counts();
    let far = &totals.far;
    for (name, help, count) in [
        ("connections_total", "Clients that have connected.", ever),
        ("sessions_total", "Times that the gateway has joined the pool.", common.health.sessions()),
        ("connections_refused_total", "Clients that were one too many.", refused),
        (
            "clients_evicted_total",
            "Clients that were disconnected because clients had too much memory.",
            common.clients.budget().evicted(),
        ),
        (
            "clients_handed_over_total",
            "Clients that moved from a busy thread to another.",
            totals.handed_over,
        ),
        ("input_bytes_total", "Bytes that clients sent.", totals.bytes_in),
        ("output_bytes_total", "Bytes that clients were sent.", totals.bytes_out),
        ("hits_total", "Reads of keys that were there.", totals.hits),
        ("misses_total", "Reads of keys that were not there.", totals.misses),
        ("expired_total", "Keys that were removed since they had expired.", totals.expired),
        ("operations_total", "Commands that went to the index.", totals.operations()),
        ("far_round_trips_total", "Times that operations waited for memory servers.", far.round_trips),
        ("far_reads_total", "READs of far memory.", far.reads),
        ("far_writes_total", "WRITEs to far memory.", far.writes),
        ("far_atomics_total", "Atomics on far memory.", far.atomics),
        ("far_calls_total", "Calls of memory servers.", far.calls),
        ("far_retries_total", "Times that operations began something anew.", far.retries),
        ("far_hints_total", "Times that operations went where a cache led them.", far.hints),
        ("far_wrong_hints_total", "Those of them that led to nothing of use.", far.wrong_hints),
        ("far_bytes_read_total", "Bytes that came from far memory.", far.bytes_read),
        ("far_bytes_written_total", "Bytes that went to far memory.", far.bytes_written),
    ] {
        page.head(name, "counter", help);
        page.line(name, &[], count);
    }
    page.head("paths_total", "counter", "Times that operations took a path of the engine that is counted.");
    totals.paths.iter().for_each(|(path, count)| page.line("paths_total", &[("path", path)], count));
    let (servers, cache_bytes) = common.memory.get();
    let is_healthy = common.health.trouble().is_none();
    for (name, help, value) in [
        ("healthy", "1 if the gateway can serve, as /healthz says; otherwise 0.", u64::from(is_healthy)),
        ("clients", "Clients that are connected.", common.clients.len() as u64),
        (
            "client_memory_bytes",
            "Memory of clients: requests half sent, replies unread.",
            common.clients.budget().used(),
        ),
        ("keys", "Keys, as of the last count.", common.census.keys().unwrap_or(0) as u64),
        ("cache_bytes", "Bytes that this process spends on the index.", cache_bytes),
    ] {
        page.head(name, "gauge", help);
        page.line(name, &[], value);
    }
    if let Some(age_ns) = common.health.heartbeat_age_ns() {
        let help = "How long ago the coordinator acknowledged a heartbeat of the session.";
        page.head("heartbeat_age_seconds", "gauge", help);
        page.line("heartbeat_age_seconds", &[], age_ns as f64 / 1e9);
    }
    page.head("thread_load_percent", "gauge", "How much of a processor each thread took a moment ago.");
    for (number, thread) in common.threads.iter().enumerate() {
        page.line("thread_load_percent", &[("thread", &number.to_string())], thread.load_percent.get());
    }
    page.head("memory_bytes", "gauge", "Far memory of each server, by what it is used for.");
    for server in servers {
        let number = server.server.to_string();
        page.line("memory_bytes", &[("server", &number), ("use", "free")], server.free_bytes);
        for (index, bytes) in &server.indexes {
            page.line("memory_bytes", &[("server", &number), ("use", "index"), ("index", index)], bytes);
        }
    }
    page.text
}

#[derive(Default)]
struct Page {
    text: String,
}

impl Page {
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.text, "# HELP farwood_{name} {help}\n# TYPE farwood_{name} {kind}");
    }

    fn line(&mut self, name: &str, labels: &[(&str, &str)], value: impl std::fmt::Display) {
        let quoted = |text: &str| text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
        let labels: Vec<_> =
            labels.iter().map(|(name, value)| format!("{name}=\"{}\"", quoted(value))).collect();
        let labels = if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) };
        let _ = writeln!(self.text, "farwood_{name}{labels} {value}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_stands_behind_a_path_is_ignored() {
        for asked in
            ["GET /metrics HTTP/1.1\r\n\r\n", "GET /metrics?x=1 HTTP/1.1\r\n\r\n", "GET /metrics\r\n\r\n"]
        {
            assert_eq!(path(asked.as_bytes()), b"/metrics", "{asked}");
        }
        for asked in ["GET /metrics/ HTTP/1.1\r\n", "POST /metrics HTTP/1.1\r\n", "GET ", ""] {
            assert_ne!(path(asked.as_bytes()), b"/metrics", "{asked}");
        }
    }
}
