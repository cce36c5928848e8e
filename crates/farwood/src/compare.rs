//! `farwood report`: a page from results of `farwood bench --json`, to compare engines, settings or versions.
//!
//! Runs of one workload in one setting are one section, with a plot for each figure that matters. A series is an engine with its
//! switches, and the file it comes from where that is the difference. Where a series was run with several numbers of clients, its
//! plots are over these.

use crate::page::{Document, Passage, Plot, PlotPoint, PlotSeries, Section, XAxis};
use crate::report::unless_broken_pipe;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

#[derive(clap::Args, Debug)]
pub(crate) struct Arguments {
    /// Results of `farwood bench --json`
    #[arg(required = true, value_name = "FILE")]
    results: Vec<PathBuf>,

    /// Where the page goes; its JSON goes beside it
    #[arg(long, value_name = "FILE", default_value = "report.html")]
    out: PathBuf,

    /// What the page is called
    #[arg(long, default_value = "Benchmark results")]
    title: String,
}

/// One result, and which file it is from.
#[derive(Debug)]
struct Run {
    file: String,
    result: Value,
}

/// A figure that runs are compared by.
struct Figure {
    title: String,
    unit: &'static str,
    log: bool,
    path: String,
    /// Divided by the number of keys.
    per_key: bool,
    scale: f64,
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, String> {
    if arguments
        .results
        .iter()
        .any(|path| *path == arguments.out || *path == arguments.out.with_extension("json"))
    {
        return Err("--out: the page, or its JSON, would replace one of the results".to_owned());
    }
    let mut runs = Vec::new();
    for path in &arguments.results {
        runs.extend(read(path)?);
    }
    let document = document(&arguments.title, &runs);
    let json = document.write(&arguments.out)?;
    let said =
        writeln!(std::io::stdout(), "{} runs: {}, {}", runs.len(), arguments.out.display(), json.display());
    unless_broken_pipe(said).map(|()| ExitCode::SUCCESS)
}

/// The runs of a file: one, or an array.
fn read(path: &Path) -> Result<Vec<Run>, String> {
    let name = path.display();
    let text = std::fs::read_to_string(path).map_err(|error| format!("cannot read {name}: {error}"))?;
    let value: Value = serde_json::from_str(&text).map_err(|error| format!("{name} is not JSON: {error}"))?;
    let results = match value {
        Value::Array(results) => results,
        one => vec![one],
    };
    let file = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    if results.is_empty()
        || !results.iter().all(|result| result["engine"].is_string() && result["kinds"].is_object())
    {
        return Err(format!("{name} is no result of farwood bench; make one with --json"));
    }
    Ok(results.into_iter().map(|result| Run { file: file.clone(), result }).collect())
}

impl Run {
    fn text(&self, name: &str) -> String {
        match &self.result[name] {
            Value::String(text) => text.clone(),
            Value::Null => String::new(),
            other => other.to_string(),
        }
    }

    fn number(&self, name: &str) -> f64 {
        self.result[name].as_f64().unwrap_or(0.0)
    }

    fn clients(&self) -> u64 {
        let count = |name: &str| self.result[name].as_u64().unwrap_or(1);
        count("compute") * count("threads") * count("tasks") * count("processes")
    }

    /// What runs of one section have in common.
    fn setting(&self) -> String {
        let time = if self.result["virtual"] == true { "virtual" } else { "real" };
        let profile = self.text("profile");
        format!(
            "{} keys ({}), values of {} B, {}, {}{}, {} memory server(s), {time} time",
            self.text("keys"),
            self.text("key_set"),
            self.text("value_size"),
            self.text("dist"),
            self.text("transport"),
            if profile.is_empty() { profile } else { format!(" ({profile})") },
            self.text("memory")
        )
    }

    /// The engine, with what it was told.
    fn name(&self) -> String {
        let mut words = vec![self.text("engine")];
        let set = self.result["set"].as_object().into_iter().flatten();
        words.extend(set.map(|(name, value)| format!("{name}={}", value.as_str().unwrap_or_default())));
        words.join(" ")
    }

    fn value(&self, figure: &Figure) -> Option<f64> {
        let found = figure.path.split('.').try_fold(&self.result, |value, name| value.get(name))?.as_f64()?;
        let keys = if figure.per_key { self.number("keys").max(1.0) } else { 1.0 };
        Some(found * figure.scale / keys)
    }
}

/// The figures that are worth a plot: for all operations, then for each kind that occurred.
fn figures(runs: &[&Run]) -> Vec<Figure> {
    let figure = |title: &str, unit, log, path: &str, per_key, scale| Figure {
        title: title.to_owned(),
        unit,
        log,
        path: path.to_owned(),
        per_key,
        scale,
    };
    let mut figures = vec![figure("Throughput", "Mop/s", false, "throughput_ops_s", false, 1e-6)];
    let occurred = |kind: &str| {
        runs.iter().any(|run| run.result["kinds"][kind]["count"].as_u64().is_some_and(|count| count > 0))
    };
    for kind in ["get", "put", "delete", "scan", "cas"].into_iter().filter(|kind| occurred(kind)) {
        let title = |what: &str| format!("{kind}: {what}");
        let path = |what: &str| format!("kinds.{kind}.{what}");
        figures.extend([
            figure(&title("median latency"), "us", true, &path("latency_us.p50"), false, 1.0),
            figure(&title("99th percentile latency"), "us", true, &path("latency_us.p99"), false, 1.0),
            figure(&title("round trips"), "per operation", false, &path("round_trips.mean"), false, 1.0),
            figure(&title("bytes read"), "B per operation", false, &path("bytes_read"), false, 1.0),
            figure(&title("bytes written"), "B per operation", false, &path("bytes_written"), false, 1.0),
        ]);
    }
    figures.push(figure("Compute-side cache", "B per key", false, "compute_cache_bytes", true, 1.0));
    figures.push(figure("Far memory", "B per key", false, "memory_bytes", true, 1.0));
    figures
}

fn document(title: &str, runs: &[Run]) -> Document {
    let mut sections: BTreeMap<(String, String), Vec<&Run>> = BTreeMap::new();
    for run in runs {
        sections.entry((run.text("workload"), run.setting())).or_default().push(run);
    }
    let files: BTreeSet<&str> = runs.iter().map(|run| run.file.as_str()).collect();
    let names: Vec<&str> = files.into_iter().collect();
    let paragraphs = vec![
        format!("{} runs of farwood bench, from {}.", runs.len(), names.join(", ")),
        "Round trips and bytes hold on any hardware. Virtual times come from the simulator's cost model and do not depend on the \
         machine that ran it; real times are those of one machine, and only what was measured in one command should be \
         compared."
            .to_owned(),
    ];
    let errors = runs.iter().filter(|run| run.number("errors") > 0.0);
    let points = errors.map(|run| {
        format!(
            "{} ({}): {} operations failed and are in no figure.",
            run.name(),
            run.file,
            run.text("errors")
        )
    });
    let opening =
        Passage { heading: "What was run".to_owned(), paragraphs, points: points.collect(), folded: None };
    let sections = sections.into_iter().enumerate();
    Document {
        title: title.to_owned(),
        opening: vec![opening],
        headlines: None,
        sections: sections
            .map(|(n, ((workload, setting), runs))| section(n, &workload, setting, &runs))
            .collect(),
    }
}

/// The runs of one section by series: by name, and by file where a name alone would not tell two runs apart.
fn series<'a>(runs: &[&'a Run]) -> Vec<(String, Vec<&'a Run>)> {
    let mut series: Vec<(String, Vec<&Run>)> = Vec::new();
    let is_ambiguous = |run: &Run| {
        let same = |other: &&&Run| other.name() == run.name() && other.clients() == run.clients();
        runs.iter().filter(same).count() > 1
    };
    let ambiguous: BTreeSet<String> =
        runs.iter().filter(|run| is_ambiguous(run)).map(|run| run.name()).collect();
    for run in runs {
        let plain = run.name();
        let name = if ambiguous.contains(&plain) { format!("{plain} ({})", run.file) } else { plain };
        match series.iter_mut().find(|(known, _)| *known == name) {
            Some((_, runs)) => runs.push(run),
            None => series.push((name, vec![run])),
        }
    }
    for (_, runs) in &mut series {
        runs.sort_by_key(|run| run.clients());
    }
    series
}

fn section(n: usize, workload: &str, setting: String, runs: &[&Run]) -> Section {
    let series = series(runs);
    let clients: BTreeSet<u64> = runs.iter().map(|run| run.clients()).collect();
    let x = (clients.len() > 1).then(|| XAxis { label: "clients".to_owned(), log: true });
    let plot = |figure: &Figure| {
        let points = |runs: &[&Run]| {
            let point = |run: &&Run| PlotPoint {
                x: run.clients() as f64,
                ours: run.value(figure),
                ..PlotPoint::default()
            };
            runs.iter().map(point).collect()
        };
        let all = series.iter().map(|(name, runs)| PlotSeries { name: name.clone(), points: points(runs) });
        Plot {
            title: figure.title.clone(),
            unit: figure.unit.to_owned(),
            log: figure.log,
            x: x.clone(),
            series: all.collect(),
        }
    };
    Section {
        id: format!("section-{n}"),
        title: format!("{workload}: {} runs", runs.len()),
        about: setting,
        finding: String::new(),
        plots: figures(runs).iter().map(plot).collect(),
        commands: Vec::new(),
    }
}
