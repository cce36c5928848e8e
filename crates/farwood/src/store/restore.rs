//! `farwood restore`: indexes out of a file that `farwood save` wrote.
//!
//! 1. The whole file is read and verified before the pool is touched.
//! 2. Each index is created, and filled, before anybody else can open it. If this process ends before that, the
//!    coordinator drops the index when the session is recovered, and another restore begins anew.
//! 3. When all are filled, all are published.

use super::save::Progress;
use super::{Place, as_member, plain};
use crate::archive::{Reader, Record, Saved};
use crate::interrupt;
use farwood_fabric::Endpoint;
use farwood_fabric::control::{ControlError, IndexInfo, IndexState};
use farwood_fabric::{FabricError, GlobalAddr};
use farwood_index::{AnyEngine, Index, IndexError, KeyValue, Pool};
use std::cell::RefCell;
use std::fs::File;
use std::io::{BufReader, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// How full nodes are, where there are such: some room for what comes.
const FILL: f64 = 0.8;
/// How often a drop is waited for, each time for some seconds.
const DROP_ATTEMPTS: u32 = 5;

#[derive(clap::Args, Debug)]
#[command(after_help = "\
The file is verified as a whole before anything is written. Nobody can open an index before it is complete; if a restore is killed, what it \
had made is dropped, and it can be run again. Keys of gateways expire when they would have.")]
pub(crate) struct Restore {
    /// The file
    file: PathBuf,
    #[command(flatten)]
    place: Place,
    /// Only this index; may be given more than once [default: all that the file has]
    #[arg(long, value_name = "NAME")]
    index: Vec<String>,
    /// The name that the index is to have, of which there must be one
    #[arg(long, value_name = "NAME")]
    into: Option<String>,
    /// Drop indexes of these names first, if there are any
    #[arg(long)]
    replace: bool,
    /// Say nothing but errors
    #[arg(long)]
    quiet: bool,
}

type Archive<'a> = Reader<BufReader<&'a File>>;

/// Reads a file from its beginning.
fn open<'a>(path: &Path, mut file: &'a File) -> Result<Archive<'a>, String> {
    file.seek(SeekFrom::Start(0)).map_err(|error| format!("cannot read {}: {error}", path.display()))?;
    Reader::new(BufReader::new(file)).map_err(|damaged| format!("{}: {damaged}", path.display()))
}

/// Reads all of a file, which is whole then.
fn verify(path: &Path, file: &File, progress: &Progress) -> Result<Vec<Saved>, String> {
    let mut reader = open(path, file)?;
    progress.at("verifying");
    while reader.next_record().map_err(|damaged| format!("{}: {damaged}", path.display()))?.is_some() {
        progress.show(reader.offset());
        if interrupt::came() {
            return Err(format!("{}; nothing was restored", interrupt::SAID));
        }
    }
    Ok(reader.header().indexes.clone())
}

/// The pairs of one index, out of the file.
struct Pairs<'a, 'b> {
    reader: &'a mut Archive<'b>,
    block: std::vec::IntoIter<KeyValue>,
    /// Why they ended before their end, if they did.
    failed: &'a RefCell<Option<String>>,
    progress: &'a mut Progress,
    /// All have been handed out; how many the file says there are.
    end: Option<u64>,
}

impl Iterator for Pairs<'_, '_> {
    type Item = KeyValue;

    fn next(&mut self) -> Option<KeyValue> {
        loop {
            if let Some((key, value)) = self.block.next() {
                self.progress.add(&key, &value);
                return Some((key, value));
            }
            if self.end.is_some() {
                return None;
            }
            self.progress.show(self.reader.offset());
            match self.reader.next_record() {
                _ if interrupt::came() => self.fail(interrupt::SAID.to_owned()),
                Ok(Some(Record::Pairs(pairs))) => self.block = pairs.into_iter(),
                Ok(Some(Record::EndOfIndex(count))) => self.end = Some(count),
                Ok(None) => self.fail("the file changed while it was read".to_owned()),
                Err(damaged) => self.fail(damaged.to_string()),
            }
        }
    }
}

impl Pairs<'_, '_> {
    fn fail(&mut self, why: String) {
        self.end = Some(0);
        self.failed.replace(Some(why));
    }
}

/// What is to be restored: for each index of the file the name that it gets, if it is chosen.
fn names(arguments: &Restore, saved: &[Saved]) -> Result<Vec<Option<String>>, String> {
    let Restore { index, into, file, .. } = arguments;
    let has = |name: &String| saved.iter().any(|saved| saved.name == *name);
    if let Some(missing) = index.iter().find(|name| !has(name)) {
        let all: Vec<_> = saved.iter().map(|saved| format!("'{}'", saved.name)).collect();
        return Err(format!("{} has no index '{missing}'; it has {}", file.display(), all.join(", ")));
    }
    let chosen = saved
        .iter()
        .map(|saved| (index.is_empty() || index.contains(&saved.name)).then(|| saved.name.clone()));
    let mut chosen: Vec<_> = chosen.collect();
    if let Some(into) = into {
        if chosen.iter().flatten().count() != 1 {
            return Err(
                "--into names one index, and there are more in the file; choose one by --index".to_owned()
            );
        }
        chosen.iter_mut().flatten().for_each(|name| name.clone_from(into));
    }
    Ok(chosen)
}

/// The engine of an index of the file.
fn engine_of(saved: &Saved) -> Result<AnyEngine, IndexError> {
    AnyEngine::of(&IndexInfo {
        id: 0,
        name: saved.name.clone(),
        engine: saved.engine.clone(),
        config: saved.config.clone(),
        state: IndexState::Ready,
        anchor: GlobalAddr::NULL,
    })
}

async fn drop_index(pool: &Pool, endpoint: &Endpoint, name: &str) -> Result<(), FabricError> {
    for _ in 1..DROP_ATTEMPTS {
        match pool.drop_index(endpoint, name).await {
            Err(error) if matches!(error.control(), Some(ControlError::DropPending { .. })) => {}
            Err(error) if matches!(error.control(), Some(ControlError::NoSuchIndex { .. })) => return Ok(()),
            dropped => return dropped,
        }
    }
    pool.drop_index(endpoint, name).await
}

/// Sees to it that there are no indexes of these names: what restores that were killed have left goes, others only if
/// they may.
async fn make_way(pool: &Pool, endpoint: &Endpoint, names: &[&String], replace: bool) -> Result<(), String> {
    let text = |error: FabricError| plain(error.into());
    pool.recover_all(endpoint).await.map_err(plain)?;
    let infos = pool.list_indexes(&endpoint.op()).await.map_err(text)?;
    let in_the_way: Vec<_> = infos.into_iter().filter(|info| names.contains(&&info.name)).collect();
    for info in &in_the_way {
        match info.state {
            IndexState::Dropping => {}
            IndexState::Creating => {
                return Err(format!(
                    "index '{}' is being created by another session; wait for it",
                    info.name
                ));
            }
            _ if replace => {}
            _ => {
                return Err(format!(
                    "there is an index '{}'; restore --into another name, or --replace it",
                    info.name
                ));
            }
        }
    }
    for info in in_the_way {
        drop_index(pool, endpoint, &info.name).await.map_err(text)?;
    }
    Ok(())
}

/// Creates the indexes and fills them.
async fn fill(
    pool: &Pool,
    endpoint: &Endpoint,
    (saved, names): (&[Saved], &[Option<String>]),
    (path, file): (&Path, &File),
    made: &mut Vec<Index>,
    progress: &mut Progress,
) -> Result<(), String> {
    let mut reader = open(path, file)?;
    let failed = RefCell::new(None);
    for (saved, name) in saved.iter().zip(names) {
        let mut pairs = Pairs {
            reader: &mut reader,
            block: Vec::new().into_iter(),
            failed: &failed,
            progress,
            end: None,
        };
        let Some(name) = name else {
            // Read, and not counted.
            let before = (pairs.progress.pairs, pairs.progress.bytes);
            pairs.by_ref().for_each(drop);
            (progress.pairs, progress.bytes) = before;
            continue;
        };
        let of = |error: IndexError| format!("index '{name}': {}", plain(error));
        let engine = engine_of(saved).map_err(of)?;
        let index = Index::create_unpublished(pool, endpoint, name, &engine).await.map_err(of)?;
        pairs.progress.at(name);
        let handle = index.handle(endpoint).map_err(of)?;
        let loaded = handle.bulk_load(&mut pairs, FILL).await;
        drop(handle);
        made.push(index);
        let said = pairs.end.unwrap_or(0);
        if let Some(why) = failed.take() {
            return Err(format!("{}: {why}", path.display()));
        }
        let loaded = loaded.map_err(of)?;
        if loaded != said {
            return Err(format!("index '{name}': {loaded} pairs were loaded of {said}"));
        }
    }
    Ok(())
}

pub(crate) fn restore(arguments: &Restore) -> Result<ExitCode, String> {
    let Restore { file: path, place, replace, quiet, .. } = arguments;
    let cannot = |error: std::io::Error| format!("cannot read {}: {error}", path.display());
    let file = File::open(path).map_err(cannot)?;
    let bytes = file.metadata().map_err(cannot)?.len();
    let mut progress = Progress::new(*quiet, Some(bytes));
    let saved = verify(path, &file, &progress)?;
    let names = names(arguments, &saved)?;
    let wanted: Vec<_> = names.iter().flatten().collect();
    // Before anything is dropped: this version may not know an engine of the file.
    for (saved, _) in saved.iter().zip(&names).filter(|(_, name)| name.is_some()) {
        engine_of(saved).map_err(|error| format!("index '{}': {}", saved.name, plain(error)))?;
    }
    as_member(place, "restore", async |pool, endpoint| {
        make_way(pool, endpoint, &wanted, *replace).await?;
        let mut indexes = Vec::new();
        let of = (&saved[..], &names[..]);
        if let Err(why) = fill(pool, endpoint, of, (path, &file), &mut indexes, &mut progress).await {
            for index in indexes {
                // If it fails, the coordinator does it when this session has left.
                let _ = drop_index(pool, endpoint, index.name()).await;
            }
            return Err(format!("{why}; nothing was restored"));
        }
        for index in &indexes {
            let published = index.publish(endpoint).await;
            published.map_err(|error| format!("index '{}': {}", index.name(), plain(error)))?;
        }
        Ok(())
    })?;
    progress.finish("restored", wanted.len());
    Ok(ExitCode::SUCCESS)
}
