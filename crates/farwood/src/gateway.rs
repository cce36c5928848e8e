//! `farwood gateway`: the Redis protocol in front of an index of a pool, until it is told to stop.
//!
//! Any number of gateways may serve one index; each sees at once what the others write. SIGINT and SIGTERM stop one in good order, within
//! half a minute.

use crate::serve::{parse_address, read_token};
use crate::units::{Size, index};
use farwood_fabric::Cluster;
use farwood_fabric::transport::url::{Access, PoolUrl};
use farwood_gateway::{Gateway, NamedIndex, Options};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::io::Write;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// How often a gateway that runs is looked at.
pub(crate) const LOOK: Duration = Duration::from_millis(200);
/// How long a gateway that is told to stop may take: its commands, and then the memory servers.
const STOP_PATIENCE: Duration = Duration::from_secs(30);
/// More threads than this a gateway takes only if it is told.
const MOST_THREADS: usize = 8;

#[derive(clap::Args, Debug)]
pub(crate) struct Arguments {
    /// The pool's servers: tcp://HOST:PORT,..., verbs://HOST:PORT,... or shm://PATH,...
    #[arg(long, value_name = "URL")]
    pool: String,

    /// The index, which has to be there (`farwood create` makes one); its engine must take keys of any length, as sphinx does
    #[arg(long, value_name = "NAME")]
    index: String,

    /// The token of servers that ask for one
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,

    #[command(flatten)]
    front: Front,
}

/// How clients are served.
#[derive(clap::Args, Debug)]
pub(crate) struct Front {
    /// Where Redis clients connect
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:7379", value_parser = parse_address)]
    listen: SocketAddr,

    /// Answer GET /metrics there, for Prometheus, and GET /healthz
    #[arg(long, value_name = "ADDR", value_parser = parse_address)]
    metrics: Option<SocketAddr>,

    /// Clients have to say what is in this file (AUTH); needed to listen beyond this machine
    #[arg(long, value_name = "FILE")]
    password_file: Option<PathBuf>,

    /// How many threads serve clients, when one does not keep up [default: as many as there are cores, at most 8]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=256))]
    threads: Option<u16>,

    /// How many clients may be connected at a time
    #[arg(long, value_name = "CLIENTS", default_value_t = 10_000)]
    max_clients: usize,

    /// Disconnect clients that say nothing for so many seconds; 0: never
    #[arg(long, value_name = "SECONDS", default_value_t = 0)]
    idle_timeout: u64,

    /// Disconnect clients that leave replies unread for so many seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    unread_timeout: u64,

    /// How much memory clients may take, all together: requests half sent, replies unread; who stands still, and has most, is
    /// disconnected first
    #[arg(long, value_name = "SIZE", default_value = "256MiB")]
    client_memory: Size,

    /// What keeps its order in a pipeline: all commands, as in Redis, or only those about the same key, which is faster over a network
    #[arg(long, value_name = "WHAT", value_enum, default_value_t = PipelineOrder::Commands)]
    pipeline_order: PipelineOrder,

    /// The longest request
    #[arg(long, value_name = "SIZE", default_value = "64MiB")]
    max_request: Size,

    /// The longest reply
    #[arg(long, value_name = "SIZE", default_value = "256MiB")]
    max_reply: Size,
}

/// What keeps its order in a pipeline.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum, Debug)]
enum PipelineOrder {
    Commands,
    Keys,
}

impl Front {
    pub(crate) fn options(&self, name: &str) -> Result<Options, String> {
        let password = match &self.password_file {
            Some(file) => Some(read_token(Some(file))?),
            None => None,
        };
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Ok(Options {
            metrics: self.metrics,
            threads: self.threads.map_or(cores.min(MOST_THREADS), usize::from),
            password,
            max_clients: self.max_clients,
            idle_seconds: self.idle_timeout,
            unread_seconds: self.unread_timeout,
            keeps_order: self.pipeline_order == PipelineOrder::Commands,
            client_memory_bytes: self.client_memory.0,
            max_request_bytes: index(self.max_request.0),
            max_reply_bytes: index(self.max_reply.0),
            ..Options::new(self.listen, name)
        })
    }
}

/// Says something to whoever started us, if he reads it.
pub(crate) fn say(text: &str) {
    let mut out = std::io::stdout();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

/// Waits a moment.
#[expect(clippy::disallowed_methods, reason = "looks at processes every now and then")]
pub(crate) fn nap() {
    std::thread::sleep(LOOK);
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, String> {
    let mut signals =
        Signals::new([SIGINT, SIGTERM]).map_err(|error| format!("cannot listen for signals: {error}"))?;
    let url: PoolUrl = arguments.pool.parse().map_err(|bad| format!("--pool: {bad}"))?;
    let token = read_token(arguments.token_file.as_deref())?;
    let cluster = Cluster::open(&url, &Access::with_token(&token)).map_err(|error| error.to_string())?;
    let name = &arguments.index;
    let gateway = Gateway::start(&cluster, NamedIndex::new(name), arguments.front.options(name)?)
        .map_err(|error| error.to_string())?;
    say(&format!("gateway at {} for index '{name}' of {}\n", gateway.address(), arguments.pool));
    while signals.pending().next().is_none() {
        if gateway.has_ended() {
            return Err("the gateway has ended; what was wrong stands above".to_owned());
        }
        nap();
    }
    stop(gateway)?;
    Ok(ExitCode::SUCCESS)
}

/// Stops a gateway, in good order if the memory servers answer.
pub(crate) fn stop(gateway: Gateway) -> Result<(), String> {
    if gateway.stop(STOP_PATIENCE) {
        return Ok(());
    }
    let seconds = STOP_PATIENCE.as_secs();
    Err(format!(
        "the memory servers did not let the gateway leave within {seconds} s; its session ends with its lease"
    ))
}
