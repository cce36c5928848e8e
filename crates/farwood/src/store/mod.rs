//! `farwood create`, `get`, `put`, `del`, `scan`, `check`, `drop`, `list`: the indexes of a pool, by hand.
//!
//! Each command opens a session, does one thing and leaves. A key that is not there makes `get` and `del` exit with 1, as `grep` does.
//!
//! | file | what it is |
//! |---|---|
//! | `text` | keys and values as they are typed and printed |
//! | `bulk` | `farwood load` and `dump`: many pairs at a time |
//! | `lines` | pairs as CSV and as JSON lines |
//! | `save`, `restore` | `farwood save` and `restore`: whole indexes in a file of their own format |
//! | `check` | `farwood check`: whether an index is whole, and what is leaked |

mod bulk;
mod check;
mod lines;
mod restore;
mod save;
mod text;

pub(crate) use bulk::{Dump, Load, dump, load};
pub(crate) use check::{Check, check};
pub(crate) use restore::{Restore, restore};
pub(crate) use save::{Save, save};

use crate::report::unless_broken_pipe;
use crate::serve::read_token;
use farwood_fabric::clock::{MILLISECOND, Nanos};
use farwood_fabric::control::ControlError;
use farwood_fabric::transport::url::{Access, BadUrl, PoolUrl};
use farwood_fabric::{Cluster, Endpoint, Executor, FabricError, Label, SessionOptions};
use farwood_index::client::ClientIndex;
use farwood_index::pool::JoinOptions;
use farwood_index::{AnyEngine, Client, Engine, IndexError, Pool};
use std::io::{self, Write};
use std::ops::Bound;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use text::Spelling;

/// How often the sessions of commands that do chores are heard of.
const BEAT_NS: Nanos = 50 * MILLISECOND;
/// How often a drop is waited for, each time for some seconds: it may have to recover all dead sessions first.
const DROP_ATTEMPTS: u32 = 5;

/// Which pool.
#[derive(clap::Args, Debug)]
pub(crate) struct Place {
    /// The pool's servers: tcp://HOST:PORT,..., verbs://HOST:PORT,... or shm://PATH,...
    url: String,

    /// The token of servers that ask for one
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
}

/// Which index, and how keys and values are typed.
#[derive(clap::Args, Debug)]
pub(crate) struct Target {
    #[command(flatten)]
    place: Place,

    /// The index's name
    index: String,

    /// How keys are typed: u64, text or hex [default: u64 if keys have 8 bytes, else text]
    #[arg(long, value_name = "SPELLING")]
    keys: Option<Spelling>,

    /// How values are typed [default: text]
    #[arg(long, value_name = "SPELLING", default_value = "text")]
    values: Spelling,
}

#[derive(clap::Args, Debug)]
pub(crate) struct Create {
    #[command(flatten)]
    place: Place,

    /// The index's name
    index: String,

    /// Its engine: sphinx, for keys and values of any length; sherman; or one of their baselines, art and fg+
    #[arg(long, default_value = "sherman")]
    engine: String,

    /// Bytes of a key
    #[arg(long, default_value_t = 8)]
    key_bytes: usize,

    /// Bytes of a value
    #[arg(long, default_value_t = 8)]
    value_bytes: usize,
}

#[derive(clap::Args, Debug)]
pub(crate) struct Get {
    #[command(flatten)]
    target: Target,
    /// The key
    key: String,
}

#[derive(clap::Args, Debug)]
pub(crate) struct Put {
    #[command(flatten)]
    target: Target,
    /// The key
    key: String,
    /// The value
    value: String,
    /// Only if the key is not there
    #[arg(long)]
    if_absent: bool,
}

#[derive(clap::Args, Debug)]
pub(crate) struct Scan {
    #[command(flatten)]
    target: Target,
    /// The first key [default: the smallest]
    #[arg(long, value_name = "KEY")]
    from: Option<String>,
    /// The key before which it ends [default: behind the greatest]
    #[arg(long, value_name = "KEY")]
    to: Option<String>,
    /// The most pairs
    #[arg(long, default_value_t = 100)]
    limit: usize,
    /// From the upper end
    #[arg(long)]
    reverse: bool,
}

#[derive(clap::Args, Debug)]
pub(crate) struct Whole {
    #[command(flatten)]
    place: Place,
    /// The index's name
    index: String,
}

pub(crate) fn plain(error: IndexError) -> String {
    match error {
        IndexError::Fabric(FabricError::Unreachable { why }) => why,
        error => error.to_string(),
    }
}

/// Joins the pool as one who comes to recover others, and does so while `work` is done. It gets in where all sessions are taken, also by
/// dead ones that nobody can recover yet.
pub(crate) fn as_reaper<T>(
    place: &Place,
    command: &str,
    work: impl AsyncFnOnce(&Pool, &Endpoint) -> Result<T, String>,
) -> Result<T, String> {
    let session = SessionOptions { reaper: true, ..SessionOptions::default() };
    joined_as(place, command, session, work)
}

/// Joins the pool as anybody does, and leaves it when `work` is done. A thread of its own keeps the session alive, so `work` may wait for a
/// disk.
#[expect(clippy::disallowed_methods, reason = "the session lives on while this thread waits for a disk")]
pub(crate) fn as_member<T>(
    place: &Place,
    command: &str,
    work: impl AsyncFnOnce(&Pool, &Endpoint) -> Result<T, String>,
) -> Result<T, String> {
    joined(place, command, async |pool, endpoint| {
        let (keeper, is_over) = (pool.clone(), Arc::new(AtomicBool::new(false)));
        let until = Arc::clone(&is_over);
        let thread = std::thread::spawn(move || {
            let executor = Executor::new();
            executor.block_on(async {
                let Ok(endpoint) = keeper.session().endpoint() else { return };
                keeper.keep_alive(&endpoint, BEAT_NS);
                while !until.load(Ordering::Relaxed) && !keeper.session().is_closed() {
                    endpoint.sleep(BEAT_NS).await;
                }
            });
            executor.clear();
        });
        let done = work(pool, endpoint).await;
        is_over.store(true, Ordering::Relaxed);
        // It ends by itself; that it panicked is no reason to lose what was done.
        let _ = thread.join();
        done
    })
}

/// Joins the pool as anybody does, and leaves it when `work` is done.
pub(crate) fn joined<T>(
    place: &Place,
    command: &str,
    work: impl AsyncFnOnce(&Pool, &Endpoint) -> Result<T, String>,
) -> Result<T, String> {
    joined_as(place, command, SessionOptions::default(), work)
}

fn joined_as<T>(
    place: &Place,
    command: &str,
    session: SessionOptions,
    work: impl AsyncFnOnce(&Pool, &Endpoint) -> Result<T, String>,
) -> Result<T, String> {
    let cluster = place.cluster()?;
    let executor = Executor::new();
    let session = SessionOptions { label: Label::of_process(command), ..session };
    let options = JoinOptions { session, ..JoinOptions::default() };
    let text = |error: FabricError| plain(error.into());
    let done = executor.block_on(async {
        let pool = Pool::join_with(&cluster, options).await.map_err(text)?;
        let (pool, endpoint) = pool.with_endpoint().await.map_err(text)?;
        pool.keep_alive(&endpoint, BEAT_NS);
        let done = work(&pool, &endpoint).await;
        // If it fails, our lease runs out.
        let _ = pool.leave(&endpoint).await;
        done
    });
    executor.clear();
    done
}

impl Place {
    /// Joins the pool, for a command of this name.
    fn client(&self, command: &str) -> Result<Client, String> {
        Client::labelled(&self.cluster()?, 1, Label::of_process(command)).map_err(plain)
    }

    /// Finds the servers.
    pub(crate) fn cluster(&self) -> Result<Cluster, String> {
        let token = read_token(self.token_file.as_deref())?;
        let url: PoolUrl = self.url.parse().map_err(|bad: BadUrl| bad.to_string())?;
        Cluster::open(&url, &Access::with_token(&token)).map_err(|error| plain(error.into()))
    }
}

/// An index that is open, with the spelling of its keys and values.
struct Opened {
    index: ClientIndex,
    keys: Spelling,
    values: Spelling,
    _client: Client,
}

impl Target {
    fn open(&self, command: &str) -> Result<Opened, String> {
        let client = self.place.client(command)?;
        let index = client.open(&self.index).wait().map_err(plain)?;
        let keys = self.keys.unwrap_or(match index.engine().key_bytes() {
            Some(8) => Spelling::U64,
            _ => Spelling::Text,
        });
        Ok(Opened { index, keys, values: self.values, _client: client })
    }
}

impl Opened {
    fn key(&self, typed: &str) -> Result<Vec<u8>, String> {
        self.keys.read(typed, self.index.engine().key_bytes()).map_err(|why| format!("key: {why}"))
    }

    fn value(&self, typed: &str) -> Result<Vec<u8>, String> {
        let lengths = self.index.engine().value_bytes();
        let fixed = (lengths.start() == lengths.end()).then(|| *lengths.start());
        self.values.read(typed, fixed).map_err(|why| format!("value: {why}"))
    }
}

fn say(text: &str) -> Result<(), String> {
    unless_broken_pipe(io::stdout().lock().write_all(text.as_bytes()))
}

/// 0 if it was so, 1 if not.
fn code(was: bool) -> ExitCode {
    if was { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

pub(crate) fn create(arguments: &Create) -> Result<ExitCode, String> {
    let Create { place, index, engine, key_bytes, value_bytes } = arguments;
    let engine = AnyEngine::named(engine, *key_bytes, *value_bytes).map_err(plain)?;
    place.client("create")?.create(index, &engine).wait().map_err(plain)?;
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn get(Get { target, key }: &Get) -> Result<ExitCode, String> {
    let opened = target.open("get")?;
    let value = opened.index.get(opened.key(key)?).wait().map_err(plain)?;
    if let Some(value) = &value {
        say(&format!("{}\n", opened.values.write(value)))?;
    }
    Ok(code(value.is_some()))
}

pub(crate) fn put(Put { target, key, value, if_absent }: &Put) -> Result<ExitCode, String> {
    let opened = target.open("put")?;
    let (key, value) = (opened.key(key)?, opened.value(value)?);
    if *if_absent {
        return opened.index.put_if_absent(key, value).wait().map(code).map_err(plain);
    }
    opened.index.put(key, value).wait().map_err(plain)?;
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn delete(Get { target, key }: &Get) -> Result<ExitCode, String> {
    let opened = target.open("del")?;
    opened.index.delete(opened.key(key)?).wait().map(code).map_err(plain)
}

pub(crate) fn scan(arguments: &Scan) -> Result<ExitCode, String> {
    let Scan { target, from, to, limit, reverse } = arguments;
    let opened = target.open("scan")?;
    let bound = |typed: &Option<String>| typed.as_deref().map(|typed| opened.key(typed)).transpose();
    let (from, to) = (bound(from)?, bound(to)?);
    let start = from.as_deref().map_or(Bound::Unbounded, Bound::Included);
    let end = to.as_deref().map_or(Bound::Unbounded, Bound::Excluded);
    let range = (start, end);
    let pairs =
        if *reverse { opened.index.scan_back(range, *limit) } else { opened.index.scan(range, *limit) };
    let mut text = String::new();
    for (key, value) in pairs.wait().map_err(plain)? {
        text.extend([&opened.keys.write(&key), "\t", &opened.values.write(&value), "\n"]);
    }
    say(&text)?;
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn drop_index(Whole { place, index }: &Whole) -> Result<ExitCode, String> {
    as_reaper(place, "drop", async |pool, endpoint| {
        for _ in 1..DROP_ATTEMPTS {
            match pool.drop_index(endpoint, index).await {
                Err(error) if matches!(error.control(), Some(ControlError::DropPending { .. })) => {}
                dropped => return dropped.map_err(|error| plain(error.into())),
            }
        }
        pool.drop_index(endpoint, index).await.map_err(|error| plain(error.into()))
    })?;
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn list(place: &Place) -> Result<ExitCode, String> {
    let names = place.client("list")?.indexes().wait().map_err(plain)?;
    say(&names.iter().flat_map(|name| [name, "\n"]).collect::<String>())?;
    Ok(ExitCode::SUCCESS)
}
