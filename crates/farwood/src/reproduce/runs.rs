//! Runs of the bench: each once, several at a time, and kept in a file as soon as they are done, so that what was broken off
//! goes on where it was.
//!
//! A run is known by its command. The file has a line of JSON for each; a line counts only for the very program that
//! wrote it, so that nothing stale is shown after a change. The last line may be torn, if the power was.

use crate::bench::Order;
use farwood_fabric::clock::RealClock;
use rustc_hash::FxHasher;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::hash::Hasher;
use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;

/// What loading a key takes, in client-seconds of a run: only for the estimate of the time that is left.
const CLIENT_SECONDS_PER_KEY: f64 = 1e-5;

/// One run, and who asked for it first.
#[derive(Debug)]
pub(super) struct Wanted {
    pub(super) words: Vec<String>,
    pub(super) order: Order,
    pub(super) label: String,
}

impl Wanted {
    pub(super) fn command(&self) -> String {
        command_of(&self.words)
    }

    /// How much work it is, roughly.
    fn weight(&self) -> f64 {
        let (clients, keys, seconds) = self.order.size();
        clients as f64 * seconds + keys as f64 * CLIENT_SECONDS_PER_KEY
    }
}

/// A command as one would type it.
pub(super) fn command_of(words: &[String]) -> String {
    let quoted = words.iter().map(|word| if word.contains('|') { format!("'{word}'") } else { word.clone() });
    format!("farwood bench {}", quoted.collect::<Vec<_>>().join(" "))
}

/// A line of the file.
#[derive(Serialize, Deserialize)]
struct Line {
    command: String,
    build: String,
    result: Value,
}

/// The results so far, and the file that keeps them.
#[derive(Debug)]
pub(super) struct Runs {
    file: File,
    build: String,
    results: BTreeMap<String, Value>,
}

impl Runs {
    /// Opens the file of earlier results; with `fresh` it is emptied.
    pub(super) fn open(path: &Path, fresh: bool) -> Result<Self, String> {
        let failed = |error: std::io::Error| format!("cannot use {}: {error}", path.display());
        let build = build().map_err(|error| format!("cannot read this program: {error}"))?;
        let text = match std::fs::read_to_string(path) {
            Ok(text) if !fresh => text,
            Ok(_) => String::new(),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(failed(error)),
        };
        let lines = text.lines().filter_map(|line| serde_json::from_str::<Line>(line).ok());
        let ours: Vec<Line> = lines.filter(|line| line.build == build).collect();
        // What does not count any more goes, a torn line too: nothing may be appended to that.
        let mut file = File::create(path).map_err(failed)?;
        for line in &ours {
            write_line(&mut file, line).map_err(failed)?;
        }
        let results = ours.into_iter().map(|line| (line.command, line.result)).collect();
        Ok(Self { file, build, results })
    }

    pub(super) fn get(&self, words: &[String]) -> Option<&Value> {
        self.results.get(&command_of(words))
    }

    /// Carries out those that have no result yet, `jobs` at a time, and says how it goes; how many runs there are.
    pub(super) fn complete(&mut self, wanted: &[Wanted], jobs: usize) -> Result<usize, String> {
        let mut seen = BTreeSet::new();
        let missing =
            |wanted: &&Wanted| !self.results.contains_key(&wanted.command()) && seen.insert(wanted.command());
        let missing: Vec<&Wanted> = wanted.iter().filter(missing).collect();
        let all: BTreeSet<String> = wanted.iter().map(Wanted::command).collect();
        eprintln!("{} runs, of which {} are there already", all.len(), all.len() - missing.len());
        let (next, (send, receive)) = (AtomicUsize::new(0), mpsc::channel());
        let mut progress = Progress::new(&missing);
        std::thread::scope(|scope| {
            for _ in 0..jobs.max(1).min(missing.len()) {
                let (send, next, missing) = (send.clone(), &next, &missing);
                scope.spawn(move || {
                    while let Some(wanted) = missing.get(next.fetch_add(1, Ordering::Relaxed)) {
                        let clock = RealClock::new();
                        let result = wanted.order.carry_out();
                        if send.send((*wanted, result, clock.now() as f64 / 1e9)).is_err() {
                            return;
                        }
                    }
                });
            }
            drop(send);
            let mut ended = Ok(());
            for (wanted, result, seconds) in &receive {
                let kept = result.and_then(|result| self.keep(wanted, result));
                match kept {
                    Ok(()) => progress.done(wanted, seconds),
                    Err(why) => {
                        // Whoever is in the middle of a run ends it; nobody begins another.
                        next.store(missing.len(), Ordering::Relaxed);
                        ended = Err(format!("{}: {why}\n  {}", wanted.label, wanted.command()));
                    }
                }
            }
            ended.map(|()| all.len())
        })
    }

    fn keep(&mut self, wanted: &Wanted, result: Value) -> Result<(), String> {
        let line = Line { command: wanted.command(), build: self.build.clone(), result };
        write_line(&mut self.file, &line).map_err(|error| format!("cannot keep the result: {error}"))?;
        self.results.insert(line.command, line.result);
        Ok(())
    }
}

fn write_line(file: &mut File, line: &Line) -> std::io::Result<()> {
    let mut text = serde_json::to_vec(line)?;
    text.push(b'\n');
    file.write_all(&text)
}

/// What tells this program from any other.
fn build() -> std::io::Result<String> {
    let mut hasher = FxHasher::default();
    hasher.write(&std::fs::read(std::env::current_exe()?)?);
    Ok(format!("{} {:016x}", env!("CARGO_PKG_VERSION"), hasher.finish()))
}

/// How far it is, and how long it may yet take.
struct Progress {
    clock: RealClock,
    runs: usize,
    done: usize,
    weight: f64,
    weight_done: f64,
}

impl Progress {
    fn new(missing: &[&Wanted]) -> Self {
        let weight = missing.iter().map(|wanted| wanted.weight()).sum();
        Self { clock: RealClock::new(), runs: missing.len(), done: 0, weight, weight_done: 0.0 }
    }

    fn done(&mut self, wanted: &Wanted, seconds: f64) {
        self.done += 1;
        self.weight_done += wanted.weight();
        let so_far = self.clock.now() as f64 / 1e9;
        let left = so_far * (self.weight - self.weight_done).max(0.0) / self.weight_done.max(1e-9);
        eprintln!("[{}/{}] {}: {seconds:.1} s{}", self.done, self.runs, wanted.label, left_text(left));
    }
}

fn left_text(seconds: f64) -> String {
    match seconds {
        s if s < 1.0 => String::new(),
        s if s < 90.0 => format!("; about {s:.0} s left"),
        s => format!("; about {:.0} min left", s / 60.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(ops: u32) -> Wanted {
        let line = format!(
            "--engine cells --transport sim --key-set sequential --keys 50 --ops {ops} --workload ycsb-a"
        );
        let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        Wanted { order: Order::parse(&words).unwrap(), words, label: format!("{ops} operations") }
    }

    fn path(name: &str) -> std::path::PathBuf {
        std::env::temp_dir().join(format!("farwood-runs-{name}-{}.jsonl", std::process::id()))
    }

    #[test]
    fn what_is_kept_is_not_run_again() {
        let path = path("kept");
        let (few, more) = (wanted(100), wanted(200));
        let mut runs = Runs::open(&path, true).unwrap();
        runs.complete(&[few, wanted(100)], 2).unwrap();
        assert_eq!(runs.results.len(), 1, "the same command is one run");
        let first = runs.get(&wanted(100).words).unwrap().clone();
        // The time that it took would be another if it were run again.
        let mut again = Runs::open(&path, false).unwrap();
        again.complete(&[wanted(100), more], 1).unwrap();
        assert_eq!(again.get(&wanted(100).words), Some(&first));
        assert_eq!(again.get(&wanted(200).words).unwrap()["ops"], 200);
        assert!(Runs::open(&path, true).unwrap().results.is_empty(), "fresh is fresh");
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn torn_and_foreign_lines_do_not_count() {
        let path = path("torn");
        let mut runs = Runs::open(&path, true).unwrap();
        runs.complete(&[wanted(100)], 1).unwrap();
        let line = std::fs::read_to_string(&path).unwrap();
        let foreign = line.replace(&runs.build, "another build").replace("--ops 100", "--ops 300");
        std::fs::write(&path, format!("{foreign}{line}{}", &line[..line.len() / 2])).unwrap();
        let mut runs = Runs::open(&path, false).unwrap();
        assert!(runs.get(&wanted(100).words).is_some() && runs.get(&wanted(300).words).is_none());
        runs.complete(&[wanted(200)], 1).unwrap();
        assert_eq!(Runs::open(&path, false).unwrap().results.len(), 2, "what follows a torn line is whole");
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_run_that_fails_ends_it_and_says_which() {
        let path = path("failed");
        let mut runs = Runs::open(&path, true).unwrap();
        // Locks can be put to, and not read.
        let line = "--engine locks --transport sim --key-set sequential --keys 10 --ops 50 --workload ycsb-c";
        let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        let bad = Wanted { order: Order::parse(&words).unwrap(), words, label: "the bad one".to_owned() };
        let why = runs.complete(&[bad, wanted(100)], 1).unwrap_err();
        assert!(why.contains("the bad one") && why.contains("by put") && why.contains(line), "{why}");
        std::fs::remove_file(&path).unwrap();
    }
}
