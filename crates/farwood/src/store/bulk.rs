//! `farwood load` and `farwood dump`: many pairs at a time, as CSV or JSON lines.

use super::lines::{Format, Line};
use super::{Opened, Target, plain};
use crate::interrupt::{self, Input};
use crate::units::{count, things};
use farwood_fabric::clock::RealClock;
use farwood_gateway::envelope;
use farwood_index::IndexError;
use farwood_index::client::Pending;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use std::collections::{HashSet, VecDeque};
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Write};
use std::ops::Bound;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Writes that are under way together.
const WIDTH: usize = 256;
/// Pairs that are fetched at a time.
const PAGE: usize = 1000;
/// The display is renewed after so many pairs.
const SHOWN_EVERY: u64 = 1000;

#[derive(clap::Args, Debug)]
pub(crate) struct Load {
    #[command(flatten)]
    target: Target,
    #[command(flatten)]
    lines: Lines,
}

#[derive(clap::Args, Debug)]
pub(crate) struct Dump {
    #[command(flatten)]
    target: Target,
    #[command(flatten)]
    lines: Lines,
    /// The first key [default: the smallest]
    #[arg(long, value_name = "KEY")]
    from: Option<String>,
    /// The key before which it ends [default: behind the greatest]
    #[arg(long, value_name = "KEY")]
    to: Option<String>,
}

/// Where the lines are, and what is said when all is done.
#[derive(clap::Args, Debug)]
struct Lines {
    /// csv or json (one object a line)
    #[arg(long, default_value = "csv")]
    format: Format,
    /// The file [default: standard input or output]
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Say in JSON, on standard error, what was done
    #[arg(long)]
    json: bool,
}

/// What was done.
#[derive(Serialize, Default, Debug)]
struct Done {
    pairs: u64,
    bytes: u64,
    seconds: f64,
}

/// Counts pairs and shows how it goes, to whoever looks.
struct Progress {
    bar: ProgressBar,
    clock: RealClock,
    done: Done,
}

impl Progress {
    fn new() -> Self {
        // Hidden unless standard error is a terminal.
        let bar = ProgressBar::new_spinner();
        let style = ProgressStyle::with_template("{spinner} {pos} pairs, {per_sec}, {elapsed}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()));
        Self { bar, clock: RealClock::new(), done: Done::default() }
    }

    fn add(&mut self, key: &[u8], value: &[u8]) {
        self.done.pairs += 1;
        self.done.bytes += (key.len() + value.len()) as u64;
        if self.done.pairs % SHOWN_EVERY == 0 {
            self.bar.set_position(self.done.pairs);
        }
    }

    fn finish(mut self, verb: &str, as_json: bool) -> Result<ExitCode, String> {
        if interrupt::came() {
            eprintln!("farwood: {}; what was begun was finished", interrupt::SAID);
        }
        self.bar.finish_and_clear();
        self.done.seconds = self.clock.now() as f64 / 1e9;
        let Done { pairs, bytes, seconds } = &self.done;
        if as_json {
            eprintln!("{}", serde_json::to_string(&self.done).map_err(|error| error.to_string())?);
        } else {
            let rate = count(*pairs as f64 / seconds.max(1e-9));
            eprintln!(
                "{verb} {} pairs ({} bytes) in {seconds:.1} s, {rate} a second",
                things(*pairs),
                count(*bytes as f64)
            );
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn cannot(what: &str, path: &Path, error: &io::Error) -> String {
    format!("cannot {what} {}: {error}", path.display())
}

impl Opened {
    /// Whether values may have an envelope, as those of gateways have.
    fn has_envelopes(&self) -> bool {
        self.index.engine().key_bytes().is_none()
    }
}

/// Pairs that are being put, several at a time; those of one key one after the other, so that the last line of a key is what it holds.
#[derive(Default)]
struct UnderWay {
    /// In the order of their lines: number, key and outcome.
    pairs: VecDeque<(u64, Vec<u8>, Pending<()>)>,
    keys: HashSet<Vec<u8>>,
}

impl UnderWay {
    /// Waits until there is room for one more, and nothing of this key is under way.
    fn make_way(&mut self, key: &[u8]) -> Result<(), String> {
        while self.pairs.len() >= WIDTH || self.keys.contains(key) {
            self.wait_for_first()?;
        }
        Ok(())
    }

    fn add(&mut self, number: u64, key: Vec<u8>, pending: Pending<()>) {
        self.keys.insert(key.clone());
        self.pairs.push_back((number, key, pending));
    }

    fn wait_for_first(&mut self) -> Result<(), String> {
        let Some((number, key, pending)) = self.pairs.pop_front() else { return Ok(()) };
        self.keys.remove(&key);
        pending.wait().map_err(|error: IndexError| format!("pair {number}: {}", plain(error)))
    }

    fn wait_for_all(mut self) -> Result<(), String> {
        while !self.pairs.is_empty() {
            self.wait_for_first()?;
        }
        Ok(())
    }
}

pub(crate) fn load(Load { target, lines }: &Load) -> Result<ExitCode, String> {
    let opened = target.open("load")?;
    let input = Input::open(lines.file.as_deref());
    let named = lines.file.as_deref().unwrap_or(Path::new("standard input"));
    let mut input = BufReader::new(input.map_err(|error| cannot("read", named, &error))?);
    let mut progress = Progress::new();
    let mut under_way = UnderWay::default();
    for number in 1.. {
        let at = |why: String| format!("pair {number}: {why}");
        let line = match lines.format.read(&mut input, number == 1) {
            // What was begun comes to its end below.
            _ if interrupt::came() => break,
            line => line.map_err(at)?,
        };
        let Some(line) = line else { break };
        let (key, value) = (opened.key(&line.key).map_err(at)?, opened.value(&line.value).map_err(at)?);
        progress.add(&key, &value);
        let stored = match line.expires_at_ms {
            Some(_) if !opened.has_envelopes() => {
                return Err(at("values of this index cannot expire".to_owned()));
            }
            expires_at if opened.has_envelopes() => envelope::seal(&value, expires_at).into_owned(),
            _ => value,
        };
        under_way.make_way(&key)?;
        under_way.add(number, key.clone(), opened.index.put(key, stored));
    }
    under_way.wait_for_all()?;
    progress.finish("loaded", lines.json)
}

pub(crate) fn dump(arguments: &Dump) -> Result<ExitCode, String> {
    let Dump { target, lines, from, to } = arguments;
    let opened = target.open("dump")?;
    let bound = |typed: &Option<String>| typed.as_deref().map(|typed| opened.key(typed)).transpose();
    let (from, to) = (bound(from)?, bound(to)?);
    let end = to.as_deref().map_or(Bound::Unbounded, Bound::Excluded);
    let mut start = from.map_or(Bound::Unbounded, Bound::Included);
    let mut output: Box<dyn Write> = match &lines.file {
        Some(path) => Box::new(File::create(path).map_err(|error| cannot("write", path, &error))?),
        None => Box::new(io::stdout().lock()),
    };
    let mut output = BufWriter::new(&mut output);
    let unwritable = |error: io::Error| format!("cannot write: {error}");
    lines.format.write_head(&mut output).map_err(unwritable)?;
    let mut progress = Progress::new();
    while !interrupt::came() {
        let page = opened.index.scan((start.as_ref().map(Vec::as_slice), end), PAGE).wait().map_err(plain)?;
        for (key, stored) in &page {
            lines.format.write(&opened.line(key, stored)?, &mut output).map_err(unwritable)?;
            progress.add(key, stored);
        }
        match page.into_iter().next_back() {
            Some((last, _)) => start = Bound::Excluded(last),
            None => break,
        }
    }
    output.flush().map_err(unwritable)?;
    progress.finish("dumped", lines.json)
}

impl Opened {
    fn line(&self, key: &[u8], stored: &[u8]) -> Result<Line, String> {
        let opened = envelope::open(stored);
        let (value, expires_at_ms) =
            if self.has_envelopes() { (&stored[..opened.bytes], opened.expires_at) } else { (stored, None) };
        let spell = |what: &str, spelling: super::Spelling, bytes: &[u8]| {
            let text = spelling.write(bytes);
            let is_read_back = spelling.read(&text, None).is_ok_and(|read| read == bytes);
            let is_fixed = self.index.engine().key_bytes().is_some();
            if is_read_back || is_fixed {
                return Ok(text);
            }
            Err(format!("a {what} cannot be spelled as it was asked for ({text}); dump with --{what}s hex"))
        };
        let key = spell("key", self.keys, key)?;
        Ok(Line { key, value: spell("value", self.values, value)?, expires_at_ms })
    }
}
