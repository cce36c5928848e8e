//! `farwood save`: indexes of a pool into a file, while they are in use.
//!
//! No engine has snapshots yet, so the copy is not of one instant. What it is: each pair is one that the index held at
//! some moment of the save; a key that was there all the time is in it; what was acknowledged before the save began is
//! in it, or what came after it. Values are the bytes that are stored, so keys of gateways keep the time at which they
//! expire.
//!
//! The file is written beside its place under the name `FILE.partial`, and takes its place by a rename when it is
//! complete and on the disk. So FILE is whole, or what it was before, whatever happens. Only one save writes to it at a
//! time.

use super::{Place, as_member, plain};
use crate::archive::{Header, Saved, Writer};
use crate::interrupt;
use crate::units::{count, things};
use farwood_fabric::Endpoint;
use farwood_fabric::clock::{MILLISECOND, Nanos, RealClock};
use farwood_fabric::control::{IndexInfo, IndexState};
use farwood_fabric::pool_clock::wall_clock_ms;
use farwood_index::engine::PLAIN;
use farwood_index::engine::sherman::LocksAlone;
use farwood_index::{Index, IndexError, OrderedIndex, Pool};
use indicatif::{ProgressBar, ProgressStyle};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter};
use std::ops::Bound;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// Pairs that are fetched at a time, at most, and of how many bytes.
const PAGE_PAIRS: usize = 4096;
const PAGE_BYTES: usize = 1 << 20;
/// How often a page is asked for that cannot be had, and how long is waited in between.
const MAX_TRIES: u32 = 20;
const WAIT_NS: Nanos = 100 * MILLISECOND;
/// How often another save may take the partial file's place while this one opens it.
const MAX_OPENS: u32 = 10;
const TICK: Duration = Duration::from_millis(100);

#[derive(clap::Args, Debug)]
#[command(after_help = "\
The indexes may be in use. Each pair in the file is one that its index held at some moment of the save; a key that was there all the time \
is in it; what was acknowledged before the save began is in it, or what came after. The file is written as FILE.partial and renamed when it \
is complete, so FILE is whole or what it was before.")]
pub(crate) struct Save {
    #[command(flatten)]
    place: Place,
    /// The file
    file: PathBuf,
    /// Only this index; may be given more than once [default: all]
    #[arg(long, value_name = "NAME")]
    index: Vec<String>,
    /// Say nothing but errors
    #[arg(long)]
    quiet: bool,
}

/// Shows how it goes, and counts.
pub(super) struct Progress {
    bar: ProgressBar,
    clock: RealClock,
    is_quiet: bool,
    pub(super) pairs: u64,
    pub(super) bytes: u64,
}

impl Progress {
    /// Of so many bytes, if that is known.
    pub(super) fn new(is_quiet: bool, of: Option<u64>) -> Self {
        // Hidden unless standard error is a terminal.
        let bar = match of {
            _ if is_quiet => ProgressBar::hidden(),
            Some(bytes) => ProgressBar::new(bytes),
            None => ProgressBar::new_spinner(),
        };
        let template = match of {
            Some(_) => "{spinner} {msg} {wide_bar} {bytes}/{total_bytes}, {elapsed}",
            None => "{spinner} {msg} {bytes}, {bytes_per_sec}, {elapsed}",
        };
        bar.set_style(
            ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()),
        );
        if !is_quiet {
            bar.enable_steady_tick(TICK);
        }
        Self { bar, clock: RealClock::new(), is_quiet, pairs: 0, bytes: 0 }
    }

    pub(super) fn at(&self, what: &str) {
        self.bar.set_message(what.to_owned());
    }

    pub(super) fn add(&mut self, key: &[u8], value: &[u8]) {
        self.pairs += 1;
        self.bytes += (key.len() + value.len()) as u64;
    }

    pub(super) fn show(&self, position: u64) {
        self.bar.set_position(position);
    }

    /// What was done, of so many indexes.
    pub(super) fn finish(self, verb: &str, indexes: usize) {
        self.bar.finish_and_clear();
        if !self.is_quiet {
            let (pairs, seconds) = (things(self.pairs), self.clock.now() as f64 / 1e9);
            let bytes = count(self.bytes as f64);
            let indexes = if indexes == 1 { "1 index".to_owned() } else { format!("{indexes} indexes") };
            eprintln!("{verb} {indexes}, {pairs} pairs ({bytes} bytes) in {seconds:.1} s");
        }
    }
}

/// A file that is not complete yet. Dropped before that, it goes.
struct Partial {
    path: PathBuf,
    target: PathBuf,
    file: File,
    is_done: bool,
}

impl Partial {
    fn create(target: &Path) -> Result<Self, String> {
        let Some(name) = target.file_name().filter(|_| !target.is_dir()) else {
            return Err(format!("{} is a folder; name a file", target.display()));
        };
        let mut partial = name.to_owned();
        partial.push(".partial");
        let path = target.with_file_name(partial);
        let cannot = |error: io::Error| format!("cannot write {}: {error}", path.display());
        for _ in 0..MAX_OPENS {
            let file =
                OpenOptions::new().create(true).truncate(false).write(true).open(&path).map_err(cannot)?;
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) => {
                    return Err(format!("another save is writing {}; wait for it", path.display()));
                }
                Err(error) => return Err(cannot(error.into())),
            }
            // The one that had the lock may have renamed, or removed, what we opened.
            let opened = file.metadata().map_err(cannot)?;
            let is_there =
                path.metadata().is_ok_and(|there| (there.dev(), there.ino()) == (opened.dev(), opened.ino()));
            if is_there {
                if opened.len() > 0 {
                    file.set_len(0).map_err(cannot)?;
                }
                return Ok(Self { path, target: target.to_owned(), file, is_done: false });
            }
        }
        Err(format!("other saves are writing {}; wait for them", path.display()))
    }

    /// On the disk, and in its place.
    fn finish(mut self) -> io::Result<()> {
        self.file.sync_all()?;
        std::fs::rename(&self.path, &self.target)?;
        self.is_done = true;
        let folder = self.target.parent().filter(|folder| !folder.as_os_str().is_empty());
        File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if self.is_done {
            return;
        }
        if let Err(error) = std::fs::remove_file(&self.path) {
            eprintln!("farwood: {} is not complete, and cannot be removed: {error}", self.path.display());
        }
    }
}

/// The indexes to save, in the order of their numbers.
async fn chosen(pool: &Pool, endpoint: &Endpoint, names: &[String]) -> Result<Vec<IndexInfo>, String> {
    let mut infos = pool.list_indexes(&endpoint.op()).await.map_err(|error| plain(error.into()))?;
    infos.sort_by_key(|info| info.id);
    if let Some(missing) = names.iter().find(|name| infos.iter().all(|info| info.name != **name)) {
        return Err(format!("there is no index '{missing}'; list the indexes"));
    }
    if !names.is_empty() {
        infos.retain(|info| names.contains(&info.name));
        return Ok(infos);
    }
    // Those that are not there yet, or not any more, and what measures itself without being an index.
    infos.retain(|info| !matches!(info.state, IndexState::Creating | IndexState::Dropping));
    let (saved, others): (Vec<_>, _) =
        infos.into_iter().partition(|info| ![PLAIN, LocksAlone::NAME].contains(&info.engine.as_str()));
    for other in others {
        eprintln!("farwood: left out '{}', which has no keys (engine '{}')", other.name, other.engine);
    }
    Ok(saved)
}

/// Some pairs behind a key, as many as fit a page.
async fn page(
    index: &impl OrderedIndex,
    endpoint: &Endpoint,
    after: Option<&[u8]>,
) -> Result<Vec<(Vec<u8>, Vec<u8>)>, IndexError> {
    let start = after.map_or(Bound::Unbounded, Bound::Excluded);
    let mut tries = 0;
    loop {
        let (mut pairs, mut bytes) = (Vec::new(), 0);
        let mut each = |key: &[u8], value: &[u8]| {
            pairs.push((key.to_vec(), value.to_vec()));
            bytes += key.len() + value.len();
            bytes < PAGE_BYTES
        };
        match index.scan_with(start, Bound::Unbounded, PAGE_PAIRS, false, &mut each).await {
            Ok(_) => return Ok(pairs),
            Err(IndexError::Fabric(_) | IndexError::Contended { .. } | IndexError::Unknown)
                if tries < MAX_TRIES =>
            {
                tries += 1;
                endpoint.sleep(WAIT_NS).await;
            }
            Err(error) => return Err(error),
        }
    }
}

async fn write(
    pool: &Pool,
    endpoint: &Endpoint,
    infos: &[IndexInfo],
    partial: &Partial,
    progress: &mut Progress,
) -> Result<(), String> {
    let cannot = |error: io::Error| format!("cannot write {}: {error}", partial.path.display());
    let saved = |info: &IndexInfo| Saved {
        name: info.name.clone(),
        engine: info.engine.clone(),
        config: info.config.clone(),
    };
    let view = pool.session().cluster().view();
    let header = Header {
        pool: view.servers.first().map_or(0, |server| server.pool.0),
        unix_ms: wall_clock_ms(),
        indexes: infos.iter().map(saved).collect(),
    };
    let mut writer = Writer::new(BufWriter::new(&partial.file), &header).map_err(cannot)?;
    for info in infos {
        let of = |error: IndexError| format!("index '{}': {}", info.name, plain(error));
        let index = Index::open(pool, endpoint, &info.name).await.map_err(of)?;
        let handle = index.handle(endpoint).map_err(of)?;
        progress.at(&info.name);
        let mut last: Option<Vec<u8>> = None;
        loop {
            if interrupt::came() {
                return Err(format!("{}; nothing was saved", interrupt::SAID));
            }
            let pairs = page(&handle, endpoint, last.as_deref()).await.map_err(of)?;
            for (key, value) in &pairs {
                writer.add(key, value).map_err(cannot)?;
                progress.add(key, value);
            }
            progress.show(progress.bytes);
            match pairs.into_iter().next_back() {
                Some((key, _)) => last = Some(key),
                None => break,
            }
        }
        writer.end_index().map_err(cannot)?;
    }
    writer.finish().map(drop).map_err(cannot)
}

pub(crate) fn save(arguments: &Save) -> Result<ExitCode, String> {
    let Save { place, file, index, quiet } = arguments;
    let partial = Partial::create(file)?;
    let mut progress = Progress::new(*quiet, None);
    let indexes = as_member(place, "save", async |pool, endpoint| {
        let infos = chosen(pool, endpoint, index).await?;
        write(pool, endpoint, &infos, &partial, &mut progress).await?;
        Ok(infos.len())
    })?;
    partial.finish().map_err(|error| format!("cannot write {}: {error}", file.display()))?;
    progress.finish("saved", indexes);
    Ok(ExitCode::SUCCESS)
}
