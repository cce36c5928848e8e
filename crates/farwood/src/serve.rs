//! `farwood serve`: one memory server as a process, until it is told to stop.
//!
//! It prints one line when clients can connect, with the URLs they connect to; what happens later goes to standard error as
//! log lines. SIGTERM and SIGINT (or, if wanted, the end of standard input) end it: the socket is removed, clients are told, memory that
//! is kept is closed, and other memory is gone with the last process that maps it.

use crate::keeping::Keeping;
use crate::units::Size;
use farwood_fabric::ServerId;
use farwood_fabric::clock::MILLISECOND;
use farwood_fabric::procedure::ProcedureSet;
use farwood_fabric::region::PoolId;
use farwood_fabric::transport::serve::{Backing, MemoryProcess, ServeOptions};
use farwood_fabric::transport::shm;
use farwood_memory::{MemoryServer, Secret, ServerConfig};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::io::Write;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

/// How many sessions there can be, unless something else is said.
pub(crate) const SESSIONS: u16 = 256;

#[derive(clap::Args, Debug)]
pub(crate) struct Arguments {
    /// Where processes of this machine find the server: a socket, or a folder in which it makes one
    #[arg(long, value_name = "PATH", required_unless_present = "listen")]
    shm: Option<PathBuf>,

    /// Where other machines find it: an address with a port (0: any that is free), such as 10.0.0.1:7000
    #[arg(long, value_name = "ADDR", value_parser = parse_address)]
    listen: Option<SocketAddr>,

    /// The RDMA device (see `farwood devices`) by which other machines reach its memory; they find it at the address of --listen
    #[arg(long, value_name = "DEVICE", requires = "listen")]
    verbs: Option<String>,

    /// How much memory to hand out, such as 1GiB
    #[arg(long, value_name = "SIZE")]
    memory: Size,

    /// Keep the memory in this file, folder (of /dev/shm, a hugetlbfs, ...) or DAX device; a server that is started again there takes it over
    #[arg(long, value_name = "PATH")]
    path: Option<PathBuf>,

    /// The memory is in the descriptor of this number, which whoever starts the server keeps
    #[arg(long, value_name = "N", hide = true, conflicts_with = "path")]
    memory_fd: Option<i32>,
    #[command(flatten)]
    keeping: Keeping,

    /// The server's number in its pool
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u16).range(0..=i64::from(ServerId::MAX)))]
    server: u16,

    /// How many servers the pool has
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=i64::from(ServerId::MAX) + 1))]
    servers: u16,

    /// The pool: 32 hexadecimal digits, the same for all its servers [default, for a pool of one server: that of the memory
    /// that is taken over, or random]
    #[arg(long, value_name = "ID", value_parser = parse_pool)]
    pool: Option<PoolId>,

    /// How many cores procedures may use
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    cores: u16,

    /// How many milliseconds a client may be silent before others may take its locks; 0: for ever
    #[arg(long, value_name = "MS", default_value_t = 10_000)]
    lease_ms: u32,

    /// How many client sessions there can be at a time; two of them, or one of less than 16, are kept for those who clean up after the dead
    #[arg(long, default_value_t = SESSIONS, value_parser = clap::value_parser!(u16).range(8..=60_000))]
    sessions: u16,

    /// Stop when standard input closes, too: for those who start servers that are to end with them
    #[arg(long)]
    stop_with_stdin: bool,

    /// Take only clients that know what is in this file
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,

    /// What all servers of the pool know and no client does: by it servers tell what the coordinator has decided from what a client makes
    /// up [default: the token, which clients know]
    #[arg(long, value_name = "FILE")]
    secret_file: Option<PathBuf>,
}

/// The first address that a name and a port stand for.
pub(crate) fn parse_address(text: &str) -> Result<SocketAddr, String> {
    let wrong = || "give an address and a port, such as 127.0.0.1:7000".to_owned();
    text.to_socket_addrs().map_err(|_| wrong())?.next().ok_or_else(wrong)
}

/// A pool's id, with or without the dashes of a UUID.
fn parse_pool(text: &str) -> Result<PoolId, String> {
    let digits: String = text.chars().filter(|c| *c != '-').collect();
    let is_hex = digits.len() == 32 && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    match u128::from_str_radix(&digits, 16) {
        Ok(id) if is_hex => Ok(PoolId(id)),
        _ => Err("a pool's id has 32 hexadecimal digits; `uuidgen` makes one".to_owned()),
    }
}

impl Arguments {
    fn config(&self, token: &[u8]) -> Result<ServerConfig, String> {
        let pool = match self.pool {
            Some(pool) => pool,
            None if self.servers == 1 => PoolId(fastrand::u128(..)),
            None => {
                return Err(
                    "a pool of several servers needs a name that they share: give each the same --pool \
                            (32 hexadecimal digits; `uuidgen` makes one)"
                        .to_owned(),
                );
            }
        };
        let secret = match &self.secret_file {
            Some(file) => Secret::from_bytes(&read_token(Some(file))?),
            None => Secret::from_bytes(token),
        };
        Ok(ServerConfig {
            secret,
            any_pool: self.pool.is_none(),
            incarnation: incarnation(),
            lease_ns: u64::from(self.lease_ms) * MILLISECOND,
            cores: usize::from(self.cores),
            max_sessions: self.sessions,
            ends_sessions: self.verbs.is_some(),
            ..ServerConfig::new(pool, ServerId::new(self.server), self.servers, self.memory.0)
        })
    }
}

/// A number that differs from start to start, and that nobody can know before: what is sealed for empty memory is sealed for this number,
/// so whoever knew it could have it sealed before the indexes were there that the memory lost.
fn incarnation() -> u32 {
    use std::hash::{BuildHasher, RandomState};
    // Its keys are the system's randomness.
    let random = RandomState::new().hash_one("incarnation");
    u32::try_from(random >> 32).unwrap_or(1).max(1)
}

/// What is in a token file, without the line's end that an editor leaves.
pub(crate) fn read_token(file: Option<&Path>) -> Result<Vec<u8>, String> {
    let Some(file) = file else { return Ok(Vec::new()) };
    let bytes = std::fs::read(file).map_err(|error| format!("cannot read {}: {error}", file.display()))?;
    let token = bytes.trim_ascii_end().to_vec();
    if token.is_empty() {
        return Err(format!("{} holds no token", file.display()));
    }
    Ok(token)
}

/// Ends the server when nobody can write to its standard input any more.
#[expect(clippy::disallowed_methods, reason = "a thread that waits for the outside world")]
fn stop_with_stdin() {
    std::thread::spawn(|| {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        let _ = signal_hook::low_level::raise(SIGTERM);
    });
}

/// The URLs that clients use.
fn places(server: &MemoryProcess) -> Vec<String> {
    let shm = server.path().map(|path| {
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        format!("shm://{}", path.display())
    });
    let scheme = if server.verbs().is_some() { "verbs" } else { "tcp" };
    shm.into_iter().chain(server.address().map(|address| format!("{scheme}://{address}"))).collect()
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, String> {
    // From here on a signal ends the server in good order, however early it comes.
    let mut signals =
        Signals::new([SIGINT, SIGTERM]).map_err(|error| format!("cannot listen for signals: {error}"))?;
    let token = read_token(arguments.token_file.as_deref())?;
    let config = arguments.config(&token)?;
    let number = config.server;
    let logic = MemoryServer::new(config, ProcedureSet::default()).map_err(|error| error.to_string())?;
    let options = ServeOptions {
        shm: arguments.shm.as_deref().map(|place| shm::socket_in(place, number)),
        tcp: arguments.listen,
        verbs: arguments.verbs.clone(),
        backing: match (&arguments.path, arguments.memory_fd) {
            (Some(place), _) => Backing::Path(shm::memory_in(place, number)),
            (None, Some(descriptor)) => Backing::Inherited(descriptor),
            (None, None) => Backing::Memfd,
        },
        keep: arguments.keeping.options()?,
        token,
    };
    let server = MemoryProcess::start(Arc::new(logic), options).map_err(|error| error.to_string())?;
    if server.verbs() == Some(true) {
        tracing::info!("lock memory is on the RDMA device");
    }
    // Whoever started us may not want to read it.
    let _ = writeln!(
        std::io::stdout(),
        "memory server {number} of {} (pool {}), {}, at {}",
        arguments.servers,
        server.identity().pool,
        arguments.memory,
        places(&server).join(" and ")
    );
    if let Some(torn) = server.torn() {
        let place = places(&server).into_iter().next().unwrap_or_default();
        let _ = writeln!(
            std::io::stdout(),
            "its memory was torn when it was taken over: {torn}. Run `farwood check --repair {place} INDEX` on each index"
        );
    }
    let _ = std::io::stdout().flush();
    if arguments.stop_with_stdin {
        stop_with_stdin();
    }
    signals.forever().next();
    // What cannot be closed is as if we had been killed: whole for as long as the machine is up.
    server.end().map_err(|error| format!("the memory could not be closed: {error}"))?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pools_are_named_by_digits_with_or_without_dashes() {
        let id = PoolId(0x0123_4567_89ab_cdef_0123_4567_89ab_cdef);
        assert_eq!(parse_pool("0123456789abcdef0123456789abcdef"), Ok(id));
        assert_eq!(parse_pool("01234567-89ab-cdef-0123-456789abcdef"), Ok(id));
        assert_eq!(parse_pool(&id.to_string()), Ok(id));
        for wrong in ["", "123", "0123456789abcdef0123456789abcdeg", "+123456789abcdef0123456789abcdef"] {
            assert!(parse_pool(wrong).is_err(), "{wrong}");
        }
    }
}
