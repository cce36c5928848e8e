//! `farwood up`: everything on this machine, with one command: memory servers as processes of their own, an index in their memory,
//! and a gateway that Redis clients connect to. A server that dies is started again on the memory it had. Ctrl-C ends all of it and leaves nothing behind, except for what `--path` keeps.

use crate::fleet::{Neighbours, Plan, Shape};
use crate::gateway::{Front, say, stop};
use crate::keeping::KeptFolder;
use crate::units::Size;
use farwood_fabric::control::ControlError;
use farwood_fabric::region::PoolId;
use farwood_fabric::{CallError, Cluster, FabricError, Label};
use farwood_gateway::{Gateway, NamedIndex};
use farwood_index::{AnyEngine, Client, IndexError};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// What the index is called.
const INDEX: &str = "store";
/// How often it is looked for signals.
const LOOK: Duration = Duration::from_millis(20);
/// A server's memory comes in such pieces.
const PIECE_BYTES: u64 = 8 << 20;

#[derive(clap::Args, Debug)]
pub(crate) struct Arguments {
    /// The index's engine; it has to take keys and values of any length
    #[arg(long, default_value = "sphinx")]
    engine: String,

    /// How much memory the servers have, all together [default: 1GiB, or what is kept]
    #[arg(long, value_name = "SIZE")]
    memory: Option<Size>,

    /// How many memory servers there are [default: 2, or as many as were kept]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=64))]
    servers: Option<u16>,

    /// Keep the memory in this folder (of /dev/shm, or of a disk), and use what is there
    #[arg(long, value_name = "DIR")]
    path: Option<PathBuf>,

    /// Use the memory of --path although it is not whole: end what was under way, drop what makes no sense, and say so for as long as it is
    /// used. Run `farwood check --repair` on the index then
    #[arg(long, requires = "path")]
    accept_torn: bool,

    #[command(flatten)]
    front: Front,
}

/// What is kept in a folder: a line of text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Record {
    pool: PoolId,
    servers: u16,
    bytes_each: u64,
}

impl Record {
    fn text(&self) -> String {
        format!("pool={} servers={} bytes_each={}\n", self.pool, self.servers, self.bytes_each)
    }

    fn parse(text: &str) -> Option<Self> {
        let mut words = text.split_whitespace();
        let mut field = |name: &str| words.next()?.strip_prefix(name)?.strip_prefix('=');
        let pool = field("pool")?.chars().filter(|c| *c != '-').collect::<String>();
        let pool = PoolId(u128::from_str_radix(&pool, 16).ok()?);
        let servers = field("servers")?.parse().ok()?;
        Some(Self { pool, servers, bytes_each: field("bytes_each")?.parse().ok()? })
    }
}

impl Arguments {
    /// What is to run: what was kept, or what is asked for.
    fn record(&self) -> Result<Record, String> {
        let servers = self.servers.unwrap_or(2);
        let memory = self.memory.unwrap_or(Size(1 << 30));
        let bytes_each = (memory.0 / u64::from(servers)).next_multiple_of(PIECE_BYTES);
        let wanted = Record { pool: PoolId(fastrand::u128(..)), servers, bytes_each };
        let Some(folder) = &self.path else { return Ok(wanted) };
        let unusable = |error: std::io::Error| format!("cannot use {}: {error}", folder.display());
        std::fs::create_dir_all(folder).map_err(unusable)?;
        let file = folder.join(KeptFolder::RECORD);
        match std::fs::read_to_string(&file) {
            Ok(text) => {
                let kept = Record::parse(&text)
                    .ok_or_else(|| format!("{} does not say what is kept there", file.display()))?;
                self.check_kept(folder, kept, bytes_each)
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                std::fs::write(&file, wanted.text()).map_err(unusable)?;
                Ok(wanted)
            }
            Err(error) => Err(unusable(error)),
        }
    }

    fn check_kept(&self, folder: &Path, kept: Record, bytes_each: u64) -> Result<Record, String> {
        let other_servers = self.servers.is_some_and(|servers| servers != kept.servers);
        if other_servers || (self.memory.is_some() && bytes_each != kept.bytes_each) {
            let all = Size(u64::from(kept.servers) * kept.bytes_each);
            return Err(format!(
                "{} holds a pool of {} servers with {all} in all, which cannot be changed; leave out --servers and --memory, or \
                 use another folder",
                folder.display(),
                kept.servers
            ));
        }
        Ok(kept)
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, String> {
    // From here on a signal ends everything in good order, however early it comes.
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])
        .map_err(|error| format!("cannot listen for signals: {error}"))?;
    let engine = AnyEngine::named(&arguments.engine, 0, 0).map_err(|error| error.to_string())?;
    if let Some(bytes) = engine.key_bytes() {
        let name = &arguments.engine;
        return Err(format!("--engine: {name} takes only keys of {bytes} bytes; sphinx takes any"));
    }
    let options = arguments.front.options(INDEX)?;
    let record = arguments.record()?;
    let begin = |folder: &PathBuf| KeptFolder::begin(folder, record.servers, record.text());
    let mut kept = arguments.path.as_ref().map(begin).transpose()?;
    let plan = Plan {
        pool: record.pool,
        kept: arguments.path.clone(),
        restarts: true,
        keeping: kept.as_ref().map_or_else(Vec::new, |kept| kept.arguments(arguments.accept_torn)),
        ..Plan::shm(Shape { servers: record.servers, bytes: record.bytes_each })
    };
    let explain = |why: String| kept.as_ref().map_or(why.clone(), |kept| kept.explain(&why));
    let (mut servers, cluster) = Neighbours::start_as(&plan).map_err(explain)?;
    // Before a client comes: what is changed from now on belongs to this opening.
    kept.as_mut().map_or(Ok(()), KeptFolder::opened)?;
    let is_new = create(&cluster, &engine)?;
    let gateway =
        Gateway::start(&cluster, NamedIndex::new(INDEX), options).map_err(|error| error.to_string())?;
    say(&describe(arguments, &record, &servers, &gateway, is_new));
    servers.torn().iter().for_each(|line| say(line));
    loop {
        if signals.pending().next().is_some() {
            // In this order: the gateway leaves the pool, and we hang up, while the servers are still there.
            let stopped = stop(gateway);
            drop(cluster);
            drop(servers);
            kept.as_mut().map_or(Ok(()), KeptFolder::ended)?;
            return stopped.map(|()| ExitCode::SUCCESS);
        }
        match servers.tend() {
            Ok(restarted) => restarted.iter().for_each(|one| eprintln!("{one}")),
            Err((number, how)) => return Err(died(number, &how, arguments.path.as_deref())),
        }
        if gateway.has_ended() {
            return Err("the gateway has ended; what was wrong stands above".to_owned());
        }
        servers.wait(LOOK);
    }
}

/// Creates the index, unless it is there; whether it was not.
fn create(cluster: &Cluster, engine: &AnyEngine) -> Result<bool, String> {
    let client = Client::labelled(cluster, 1, Label::of_process("up")).map_err(|error| error.to_string())?;
    match client.create(INDEX, engine).wait() {
        Ok(_) => Ok(true),
        Err(IndexError::Fabric(FabricError::Call(CallError::Control(ControlError::NameExists {
            ..
        })))) => Ok(false),
        Err(error) => Err(error.to_string()),
    }
}

/// Five lines: what runs, and how to use it.
fn describe(
    arguments: &Arguments,
    record: &Record,
    servers: &Neighbours,
    gateway: &Gateway,
    is_new: bool,
) -> String {
    let (count, each) = (record.servers, Size(record.bytes_each));
    let processes: Vec<_> = servers.processes().map(|id| id.to_string()).collect();
    let kept = match &arguments.path {
        Some(folder) => format!("kept in {}", folder.display()),
        None => "gone when this ends (--path DIR keeps it)".to_owned(),
    };
    let state = if is_new { "empty" } else { "as it was left" };
    let at = gateway.address();
    let host = if at.ip().is_loopback() { String::new() } else { format!(" -h {}", at.ip()) };
    let mut text = format!("Farwood {} is up.\n", env!("CARGO_PKG_VERSION"));
    let _ = writeln!(
        text,
        "  memory   {count} servers with {each} each (processes {}), {kept}",
        processes.join(", ")
    );
    let _ = writeln!(text, "  index    '{INDEX}', engine {}, {state}", arguments.engine);
    let metrics =
        gateway.metrics_address().map_or(String::new(), |at| format!("; metrics at http://{at}/metrics"));
    let _ = writeln!(
        text,
        "  connect  redis-cli{host} -p {}   then for example: SET a 1, RANGE - + LIMIT 10{metrics}",
        at.port()
    );
    text + "  stop     Ctrl-C\n"
}

/// What it means that a server does not live.
fn died(number: usize, how: &str, path: Option<&Path>) -> String {
    let meaning = match path {
        Some(folder) => {
            format!("its memory is kept in {}: start again with the same --path", folder.display())
        }
        None => "a part of the keys is gone with it, so everything stops; start again with an empty store"
            .to_owned(),
    };
    format!("memory server {number} cannot be started again on its memory ({how}); {meaning}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_is_read_again() {
        let record = Record { pool: PoolId(7 << 64 | 9), servers: 3, bytes_each: 64 << 20 };
        assert_eq!(Record::parse(&record.text()), Some(record));
        for wrong in ["", "pool=1", "pool=x servers=1 bytes_each=1", "servers=1 pool=1 bytes_each=1"] {
            assert_eq!(Record::parse(wrong), None, "{wrong}");
        }
    }
}
