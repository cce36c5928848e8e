//! `farwood reproduce`: runs a paper's experiments in the simulator and sets what comes out beside what the paper says.
//!
//! | file | what it is |
//! |---|---|
//! | `papers/` | the papers, as data |
//! | `paper` | what such a file says |
//! | `plan` | which runs of the bench a figure needs |
//! | `runs` | runs them, and keeps what was run |
//! | `verdict` | how near two numbers are |
//! | `outcome` | the paper beside what came out, as tables and as a page |

mod outcome;
mod paper;
mod plan;
mod runs;
#[cfg(test)]
mod tests;
mod verdict;

use crate::report::unless_broken_pipe;
use outcome::Outcome;
use paper::{PAPERS, Paper};
use plan::Planned;
use runs::Runs;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// More at a time than this no machine here has memory for.
const MAX_JOBS: usize = 64;

#[derive(clap::Args, Debug)]
pub(crate) struct Arguments {
    /// A paper by name (sherman, sphinx), or a file that describes one (see docs/reproduce.md)
    paper: String,

    /// Only these figures, with commas: 10, 15c, table1 [default: all]
    #[arg(long, value_name = "N", value_delimiter = ',')]
    figure: Vec<String>,

    /// Short windows, fewer keys, fewer points: minutes, not the better part of an hour
    #[arg(long)]
    quick: bool,

    /// Where the report, its JSON and the results so far are kept [default: reproduce-PAPER, reproduce-PAPER-quick]
    #[arg(long, value_name = "DIRECTORY")]
    out: Option<PathBuf>,

    /// Start over; otherwise runs whose results are there are not repeated
    #[arg(long)]
    fresh: bool,

    /// Runs at a time [default: as many as there are cores]
    #[arg(long)]
    jobs: Option<usize>,
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, String> {
    let (name, text) = find(&arguments.paper)?;
    let paper = Paper::parse(&text).map_err(|why| format!("{}: {why}", arguments.paper))?;
    let figures = paper.figures(&arguments.figure)?;
    let plan: Vec<Planned<'_>> =
        figures.into_iter().map(|figure| Planned::new(&paper, figure, arguments.quick)).collect();
    let jobs = arguments.jobs.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    if !(1..=MAX_JOBS).contains(&jobs) {
        return Err(format!("--jobs: there can be 1 to {MAX_JOBS}"));
    }
    let mut wanted = Vec::new();
    for planned in &plan {
        wanted.extend(planned.wanted()?);
    }
    let usual = format!("reproduce-{name}{}", if arguments.quick { "-quick" } else { "" });
    let out = arguments.out.clone().unwrap_or_else(|| PathBuf::from(usual));
    std::fs::create_dir_all(&out)
        .map_err(|error| format!("--out: cannot make {}: {error}", out.display()))?;
    let mut runs = Runs::open(&out.join("runs.jsonl"), arguments.fresh)?;
    let count = runs.complete(&wanted, jobs)?;
    let outcome = Outcome::new(&paper, &plan, &runs)?;
    unless_broken_pipe(outcome.print(&mut std::io::stdout().lock()))?;
    let page = out.join("report.html");
    let json = outcome.into_document(arguments.quick, count).write(&page)?;
    let said = writeln!(std::io::stdout(), "\nThe report: {}, {}", page.display(), json.display());
    unless_broken_pipe(said)?;
    Ok(ExitCode::SUCCESS)
}

/// The text of a paper, and what it goes by.
fn find(paper: &str) -> Result<(String, String), String> {
    if let Some((name, text)) = PAPERS.iter().find(|(name, _)| *name == paper) {
        return Ok(((*name).to_owned(), (*text).to_owned()));
    }
    let path = PathBuf::from(paper);
    let text = std::fs::read_to_string(&path).map_err(|error| {
        let names = PAPERS.map(|(name, _)| name).join(", ");
        format!("{paper} is none of {names}, and cannot be read as a file: {error}")
    })?;
    let name = path.file_stem().map_or("paper".to_owned(), |stem| stem.to_string_lossy().into_owned());
    Ok((name, text))
}
