//! `farwood check`: walks an index and verifies it, counts what is leaked, and with `--repair` frees it
//! (`farwood_index::repair`).

use super::{Place, joined, plain, say};
use crate::interrupt;
use crate::units::things;
use farwood_fabric::Endpoint;
use farwood_fabric::control::PAGE_CLASS;
use farwood_index::repair::{self, Count, Findings, Leaks, Mode, Stage};
use farwood_index::{AnyEngine, IndexError, Pool};
use indicatif::{ProgressBar, ProgressStyle};
use std::fmt::Write;
use std::future::poll_fn;
use std::pin::pin;
use std::process::ExitCode;
use std::task::Poll;
use std::time::Duration;

/// How often the command looks whether it was interrupted.
const LOOK_NS: u64 = 50_000_000;
const TICK: Duration = Duration::from_millis(100);

#[derive(clap::Args, Debug)]
#[command(after_help = "\
What a crash left taken and nothing in the index leads to is leaked. It can be told from what sessions have in their hands only if no \
other session is in the pool, so a check counts it then and only then. With --repair the index is out of use meanwhile: close gateways \
and clients first (`farwood status` lists them); whoever comes later is told to wait. An index that is damaged is left as it is.

Exit code: 0 if the index is whole, with --dry-run 1 if something is leaked; 2 if it is damaged, or the command failed.")]
pub(crate) struct Check {
    #[command(flatten)]
    place: Place,
    /// The index's name
    index: String,
    /// Take the index out of use and free what is leaked, and nothing else
    #[arg(long)]
    repair: bool,
    /// Only say what a repair would free
    #[arg(long, requires = "repair")]
    dry_run: bool,
}

/// Shows how it goes, to whoever looks.
struct Display(ProgressBar);

impl Display {
    fn new() -> Self {
        // Hidden unless standard error is a terminal.
        let bar = ProgressBar::new_spinner();
        bar.enable_steady_tick(TICK);
        Self(bar)
    }

    fn show(&self, stage: Stage) {
        let (what, done) = match stage {
            Stage::Walking => ("walking the index", None),
            Stage::Comparing { chunks, of } => ("comparing chunks", Some((chunks, of))),
            Stage::Freeing { objects, of } => ("freeing objects", Some((objects, of))),
            _ => return,
        };
        let template = match done {
            None => "{spinner} {msg}, {elapsed}",
            Some(_) => "{spinner} {msg} {wide_bar} {pos}/{len}",
        };
        if let Ok(style) = ProgressStyle::with_template(template) {
            self.0.set_style(style);
        }
        self.0.set_message(what);
        if let Some((position, length)) = done {
            self.0.set_length(length);
            self.0.set_position(position);
        }
    }
}

/// What the work gives, unless the command is interrupted before.
async fn unless_interrupted<T>(endpoint: &Endpoint, work: impl Future<Output = T>) -> Result<T, String> {
    let mut work = pin!(work);
    while !interrupt::came() {
        let mut look = pin!(endpoint.sleep(LOOK_NS));
        let done = poll_fn(|context| match work.as_mut().poll(context) {
            Poll::Ready(done) => Poll::Ready(Some(done)),
            Poll::Pending => look.as_mut().poll(context).map(|()| None),
        });
        if let Some(done) = done.await {
            return Ok(done);
        }
    }
    Err(interrupt::SAID.to_owned())
}

async fn find(
    arguments: &Check,
    pool: &Pool,
    endpoint: &Endpoint,
    display: &Display,
) -> Result<Findings, IndexError> {
    let index = &arguments.index;
    // Not opened yet: whoever repaired it before may have died, and is to be recovered first.
    let listed = pool.list_indexes(&endpoint.op()).await?.into_iter().find(|info| info.name == *index);
    let info = match listed {
        Some(info) => info,
        None => pool.open_index(&endpoint.op(), index, None).await?,
    };
    let engine = AnyEngine::of(&info)?;
    let mut show = |stage| display.show(stage);
    match (arguments.repair, arguments.dry_run) {
        (false, _) => repair::check(pool, endpoint, &engine, index, &mut show).await,
        (true, true) => repair::repair(pool, endpoint, &engine, index, Mode::DryRun, &mut show).await,
        (true, false) => repair::repair(pool, endpoint, &engine, index, Mode::Free, &mut show).await,
    }
}

/// A line for each kind of what is leaked.
fn list(leaks: &Leaks) -> String {
    let mut text = String::new();
    let mut line = |what: &str, Count { objects, bytes }: Count| {
        if objects > 0 {
            let _ = writeln!(text, "{what}: {objects} ({bytes} bytes)");
        }
    };
    for ((class, bytes), count) in &leaks.objects {
        match *class {
            PAGE_CLASS => line(&format!("pages of journals, of {bytes} bytes"), *count),
            class => line(&format!("objects of {bytes} bytes (class {class})"), *count),
        }
    }
    line("extents of raw bytes", leaks.extents);
    line("chunks of indexes that are gone", leaks.chunks);
    text
}

pub(crate) fn check(arguments: &Check) -> Result<ExitCode, String> {
    let display = Display::new();
    let found = joined(&arguments.place, "check", async |pool, endpoint| {
        unless_interrupted(endpoint, find(arguments, pool, endpoint, &display)).await?.map_err(plain)
    });
    display.0.finish_and_clear();
    let Findings { linked, leaks } = found?;
    let (index, objects) = (&arguments.index, things(linked));
    let whole = format!("index '{index}' is whole: {objects} objects in far memory");
    let Some(leaks) = leaks else {
        say(&format!("{whole}; others are in the pool, so what is leaked cannot be told\n"))?;
        return Ok(ExitCode::SUCCESS);
    };
    let Count { objects, bytes } = leaks.total();
    let end = match (objects, arguments.repair, arguments.dry_run) {
        (0, ..) => "nothing is leaked".to_owned(),
        (_, false, _) => format!("{objects} leaked ({bytes} bytes), which --repair frees"),
        (_, true, true) => format!("{objects} leaked ({bytes} bytes), nothing was freed"),
        (_, true, false) => format!("freed {objects} that were leaked ({bytes} bytes)"),
    };
    say(&format!("{}{whole}; {end}\n", list(&leaks)))?;
    Ok(if arguments.dry_run && objects > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
