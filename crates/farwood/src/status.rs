//! `farwood status`: how memory servers do, each asked by itself, so that what is left of a pool can be looked at.
//!
//! Exits with 1 if a server does not answer: it serves as a check for whatever watches servers. The names in JSON stay as they
//! are.

use crate::report::{Table, unless_broken_pipe};
use crate::serve::read_token;
use crate::units::{Size, things, time};
use farwood_fabric::clock::Nanos;
use farwood_fabric::control::{IndexInfo, IndexState, SessionInfo, SessionState};
use farwood_fabric::status::{Pages, ServerStatus, Tables, Torn, Traffic};
use farwood_fabric::transport::serve::{ServerPlace, status};
use farwood_fabric::transport::shm;
use farwood_fabric::transport::url::PoolUrl;
use farwood_fabric::{RegionId, ServerId};
use serde::Serialize;
use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;

#[derive(clap::Args, Debug)]
pub(crate) struct Arguments {
    /// The servers: tcp://HOST:PORT,..., verbs://HOST:PORT,... or shm://PATH,...
    url: String,

    /// Print JSON, for programs
    #[arg(long)]
    json: bool,

    /// The token of servers that ask for one
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
}

/// One server, as it goes into the JSON.
#[derive(Serialize, Debug)]
struct Line {
    url: String,
    #[serde(flatten)]
    outcome: Outcome,
}

#[derive(Serialize, Debug)]
#[serde(rename_all = "lowercase")]
enum Outcome {
    Status(Box<Status>),
    Error(String),
}

#[derive(Serialize, Debug)]
struct Status {
    pool: String,
    server: u16,
    servers: u16,
    incarnation: u32,
    format: u32,
    up_seconds: f64,
    memory_bytes: u64,
    lock_memory_bytes: u64,
    chunk_bytes: u64,
    chunks: u64,
    free_chunks: u64,
    /// The server came back empty: indexes with lower numbers have lost what they had here. 0: it did not.
    lost_below: u32,
    /// The memory was not whole when it was taken over.
    torn: Option<TornMemory>,
    pages: PagesFound,
    lease_ms: u64,
    max_sessions: u16,
    epoch: u64,
    sessions: Vec<SessionLine>,
    indexes: Vec<IndexLine>,
    cores: u16,
    procedures_running: u32,
    procedures_queued: u32,
    processes_mapping: u32,
    processes_far: u32,
    endpoints: u32,
    connections: u32,
    calls: u64,
    batches: u64,
    verbs: u64,
    bytes_in: u64,
    bytes_out: u64,
}

#[derive(Serialize, Debug)]
#[serde(tag = "kind", rename_all = "lowercase")]
enum PagesFound {
    Small { page_bytes: u64 },
    Transparent { large_bytes: u64, of_bytes: u64 },
    Huge { page_bytes: u64 },
    Other,
}

#[derive(Serialize, Debug)]
struct TornMemory {
    pieces_failed: u32,
    /// 0: it was not closed, so that any page may be of any age.
    pieces: u32,
    entries_dropped: u32,
    chunks_set_aside: u32,
    /// The numbers of indexes that have something there.
    indexes: Vec<u32>,
}

impl From<&Torn> for TornMemory {
    fn from(torn: &Torn) -> Self {
        let Torn { failed, pieces, dropped, set_aside, ref indexes } = *torn;
        let indexes = indexes.clone();
        Self { pieces_failed: failed, pieces, entries_dropped: dropped, chunks_set_aside: set_aside, indexes }
    }
}

#[derive(Serialize, Debug)]
struct SessionLine {
    session: u16,
    term: u64,
    state: &'static str,
    /// Who adopts it.
    adopter: Option<u16>,
    label: String,
    since_seconds: f64,
    lease_left_ms: u64,
    oldest_epoch: u64,
}

#[derive(Serialize, Debug)]
struct IndexLine {
    id: u32,
    name: String,
    engine: String,
    state: &'static str,
}

impl From<&SessionInfo> for SessionLine {
    fn from(info: &SessionInfo) -> Self {
        let state = match info.state {
            // Anybody may fence it now.
            SessionState::Active if info.lease_left_ns == 0 => "lost",
            SessionState::Active => "active",
            SessionState::Fencing => "being fenced",
            SessionState::Fenced => "fenced",
            SessionState::Adopting => "being adopted",
        };
        Self {
            session: info.session.get(),
            term: info.term,
            state,
            adopter: (!info.adopter.is_none()).then(|| info.adopter.get()),
            label: info.label.to_string(),
            since_seconds: info.since_ns as f64 / 1e9,
            lease_left_ms: info.lease_left_ns / 1_000_000,
            oldest_epoch: info.oldest_pin,
        }
    }
}

impl From<&IndexInfo> for IndexLine {
    fn from(info: &IndexInfo) -> Self {
        let state = match info.state {
            IndexState::Creating => "being created",
            IndexState::Ready => "ready",
            IndexState::Dropping => "being dropped",
            IndexState::Offline => "being repaired",
        };
        Self { id: info.id, name: info.name.clone(), engine: info.engine.clone(), state }
    }
}

impl From<&ServerStatus> for Status {
    fn from(said: &ServerStatus) -> Self {
        let (identity, tables, traffic) = (&said.identity, &said.tables, &said.traffic);
        let region = |id| identity.regions.iter().find(|spec| spec.id == id).map_or(0, |spec| spec.bytes);
        Self {
            pool: identity.pool.to_string(),
            server: identity.server.get(),
            servers: identity.servers,
            incarnation: identity.incarnation,
            format: identity.format,
            up_seconds: said.up_ns as f64 / 1e9,
            memory_bytes: region(RegionId::MAIN),
            lock_memory_bytes: region(RegionId::LOCK),
            chunk_bytes: identity.chunk_bytes,
            chunks: tables.chunks,
            free_chunks: tables.free_chunks,
            lost_below: if tables.lost_below > 1 { tables.lost_below } else { 0 },
            torn: tables.torn.as_ref().map(TornMemory::from),
            pages: match said.pages {
                Pages::Small { page_bytes } => PagesFound::Small { page_bytes },
                Pages::Transparent { large_bytes, of_bytes } => {
                    PagesFound::Transparent { large_bytes, of_bytes }
                }
                Pages::Huge { page_bytes } => PagesFound::Huge { page_bytes },
                _ => PagesFound::Other,
            },
            lease_ms: tables.lease_ns / 1_000_000,
            max_sessions: tables.max_sessions,
            epoch: tables.epoch,
            sessions: tables.sessions.iter().map(SessionLine::from).collect(),
            indexes: tables.indexes.iter().map(IndexLine::from).collect(),
            cores: tables.cores,
            procedures_running: tables.running,
            procedures_queued: tables.queued,
            processes_mapping: traffic.mapping,
            processes_far: traffic.far,
            endpoints: traffic.endpoints,
            connections: traffic.connections,
            calls: traffic.calls,
            batches: traffic.batches,
            verbs: traffic.verbs,
            bytes_in: traffic.bytes_in,
            bytes_out: traffic.bytes_out,
        }
    }
}

/// The sessions for people; nothing if there are none.
fn session_table(tables: &Tables) -> Table {
    if tables.sessions.is_empty() {
        return Table::default();
    }
    let mut table = Table::new(&["number", "term", "since", "lease left", "epochs behind", "state", "who"]);
    for info in &tables.sessions {
        let line = SessionLine::from(info);
        let is_active = info.state == SessionState::Active;
        table.row(vec![
            line.session.to_string(),
            line.term.to_string(),
            time(info.since_ns as f64),
            match info.lease_left_ns {
                Nanos::MAX => "for ever".to_owned(),
                left if is_active && left > 0 => time(left as f64),
                _ => "-".to_owned(),
            },
            // Whoever is fenced holds no epoch back.
            if info.oldest_pin > 0 {
                tables.epoch.saturating_sub(info.oldest_pin).to_string()
            } else {
                "-".to_owned()
            },
            line.adopter.map_or(line.state.to_owned(), |by| format!("{} by {by}", line.state)),
            if line.label.is_empty() { "(did not say)".to_owned() } else { line.label },
        ]);
    }
    table
}

/// A server's status for people.
fn describe(said: &ServerStatus) -> String {
    let ServerStatus { identity, tables, traffic, .. } = said;
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = write!(
        text,
        "server {} of {}, pool {}, up {}\n  memory     ",
        identity.server,
        identity.servers,
        identity.pool,
        time(said.up_ns as f64)
    );
    let Tables { chunks, free_chunks, .. } = tables;
    let _ = writeln!(
        text,
        "{} free of {} in {chunks} chunks, {}",
        Size(free_chunks * identity.chunk_bytes),
        Size(chunks * identity.chunk_bytes),
        said.pages
    );
    if tables.lost_below > 1 {
        let _ = writeln!(
            text,
            "  emptied    it came back with empty memory: what indexes below #{} had here is gone; drop those and load them again, \
             or start it with the memory that it had",
            tables.lost_below
        );
    }
    if let Some(torn) = &tables.torn {
        let _ = writeln!(
            text,
            "  torn       its memory was not whole when it was taken over: {torn}. Run `farwood check --repair` on each index, or load \
             them again into fresh memory"
        );
    }
    if identity.server == ServerId::COORDINATOR {
        let lease = match tables.lease_ns {
            0 => "leases never end".to_owned(),
            ns => format!("leases of {}", time(ns as f64)),
        };
        let _ = writeln!(text, "  sessions   {} of {}, {lease}", tables.sessions.len(), tables.max_sessions);
        for line in session_table(tables).lines() {
            let _ = writeln!(text, "             {line}");
        }
        let _ = writeln!(text, "  indexes    {}", tables.indexes.len());
        for IndexLine { id, name, engine, state } in tables.indexes.iter().map(IndexLine::from) {
            let _ = writeln!(text, "             #{id} '{name}', {engine}, {state}");
        }
    }
    let Traffic { mapping, far, endpoints, connections, calls, .. } = traffic;
    let _ = writeln!(
        text,
        "  clients    {mapping} process(es) that map the memory, {far} over a network; {endpoints} endpoint(s), \
         {connections} of them served here"
    );
    let _ = writeln!(
        text,
        "  served     {} verbs in {} batches, {} bytes in, {} bytes out; {calls} calls",
        things(traffic.verbs),
        things(traffic.batches),
        things(traffic.bytes_in),
        things(traffic.bytes_out)
    );
    let _ = writeln!(
        text,
        "  procedures {} running, {} waiting, {} core(s)",
        tables.running, tables.queued, tables.cores
    );
    text
}

/// Each server of a URL, with the URL that names it alone.
fn places(url: &str) -> Result<Vec<(String, ServerPlace)>, String> {
    let far = |scheme: &str, addresses: Vec<String>| {
        let named = |address: String| (format!("{scheme}://{address}"), ServerPlace::Tcp(address));
        addresses.into_iter().map(named).collect()
    };
    match url.parse::<PoolUrl>().map_err(|bad| bad.to_string())? {
        PoolUrl::Tcp(addresses) => Ok(far("tcp", addresses)),
        // How it does, a server says over its TCP port.
        PoolUrl::Verbs(addresses) => Ok(far("verbs", addresses)),
        PoolUrl::Shm(paths) => {
            let sockets = shm::sockets(&paths).map_err(|error| error.to_string())?;
            let named = |path: PathBuf| (format!("shm://{}", path.display()), ServerPlace::Shm(path));
            Ok(sockets.into_iter().map(named).collect())
        }
        _ => Err(format!("'{url}' names servers that cannot be asked")),
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, String> {
    let token = read_token(arguments.token_file.as_deref())?;
    let asked: Vec<_> = places(&arguments.url)?
        .into_iter()
        .map(|(url, place)| (url, status(&place, &token).map_err(|error| error.to_string())))
        .collect();
    let all_answered = asked.iter().all(|(_, said)| said.is_ok());
    let mut text = String::new();
    if arguments.json {
        let lines: Vec<Line> = asked
            .into_iter()
            .map(|(url, said)| {
                let outcome = match said {
                    Ok(said) => Outcome::Status(Box::new(Status::from(&said))),
                    Err(why) => Outcome::Error(why),
                };
                Line { url, outcome }
            })
            .collect();
        text = serde_json::to_string_pretty(&lines).map_err(|error| error.to_string())?;
        text.push('\n');
    } else {
        for (url, said) in asked {
            let said = said.map_or_else(|why| format!("{why}\n"), |said| describe(&said));
            let _ = write!(text, "{url}: {said}");
        }
    }
    unless_broken_pipe(io::stdout().write_all(text.as_bytes()))?;
    Ok(if all_answered { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
