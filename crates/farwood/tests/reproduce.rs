//! `farwood reproduce` and `farwood report` as their user runs them, and their pages in a real browser.

mod common;

use common::{JsonPath, farwood, json_of, refused};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A paper of one plot over x, one by series, and a title that tries to be markup.
const PAPER: &str = r#"
name = "</script><b>Tiny & small</b>"
citation = "Nobody, nowhere."
about = ["A paper for tests."]
[setting]
transport = "sim"
key-set = "sequential"
keys = 200
workload = "ycsb-a"
engine = "cells"
threads = 1
seconds = 0.001
[[figure]]
id = "1"
title = "over threads"
about = "About it."
finding = "Found."
x = { label = "threads", log = true }
point = [{ x = 1 }, { x = 2 }, { x = 4, full-only = true }]
setting = { threads = "{x}" }
series = [{ name = "cells" }, { name = "records", setting = { engine = "records" } }]
metric = [
    { name = "throughput", path = "throughput_ops_s", unit = "Mop/s", scale = 1e-6 },
    { name = "99th percentile", path = "all.latency_us.p99", unit = "us", log = true },
]
paper = [{ series = "cells", x = 2, metric = "throughput", value = 0.3, source = "Section 1" }]
ratio = [{ name = "cells over records", of = "cells", over = "records", metric = "throughput", value = 1, source = "Section 1" }]
[[figure]]
id = "2"
title = "by engine"
about = "About it."
finding = "Found."
panel = [{ name = "a" }, { name = "b", setting = { workload = "ycsb-b" } }]
series = [{ name = "a series with a name that is rather long" }, { name = "records", setting = { engine = "records" } }]
metric = [{ name = "round trips", path = "all.round_trips.mean", unit = "per operation" }]
paper = [{ panel = "a", series = "records", metric = "round trips", value = 2, source = "Table 1", calibrated = true }]
"#;

/// A directory for one test, removed afterwards.
struct Directory(PathBuf);

impl Directory {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("farwood-reproduce-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a directory");
        std::fs::write(path.join("tiny.toml"), PAPER).expect("a paper");
        Self(path)
    }

    fn text(&self, name: &str) -> String {
        self.0.join(name).to_str().expect("a plain name").to_owned()
    }

    fn reproduce(&self, more: &[&str]) -> (String, String) {
        let (paper, out) = (self.text("tiny.toml"), self.text("out"));
        let output = farwood(&[&["reproduce", &paper, "--out", &out], more].concat());
        let (stdout, stderr) = both(&output);
        assert!(output.status.success(), "{stdout}{stderr}");
        (stdout, stderr)
    }

    fn report(&self) -> Value {
        let text = std::fs::read_to_string(self.0.join("out/report.json")).expect("a report");
        serde_json::from_str(&text).expect("JSON")
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn both(output: &Output) -> (String, String) {
    let utf8 = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (utf8(&output.stdout), utf8(&output.stderr))
}

#[test]
fn a_paper_is_run_resumed_by_figure_and_told() {
    let directory = Directory::new("run");
    let (_, stderr) = directory.reproduce(&["--quick", "--figure", "1"]);
    assert!(stderr.contains("4 runs, of which 0 are there already"), "{stderr}");
    assert!(stderr.contains("[4/4] Figure 1, "), "{stderr}");
    assert_eq!(directory.report()["sections"].as_array().unwrap().len(), 1);
    // Broken off after the first figure: it is not run again, and the second one shares two runs with it.
    let (stdout, stderr) = directory.reproduce(&["--quick"]);
    assert!(stderr.contains("6 runs, of which 4 are there already"), "{stderr}");
    for said in ["within", "fitted to", "not in the text", "Headline ratios of the paper's text: "] {
        assert!(stdout.contains(said), "no '{said}' in {stdout}");
    }
    let report = directory.report();
    assert_eq!(report["sections"].as_array().unwrap().len(), 2);
    let first = &report["sections"][0]["plots"][0]["series"][0]["points"];
    assert_eq!(first.as_array().unwrap().len(), 2, "a quick run leaves a point out");
    assert!(first[1]["paper"] == 0.3 && first[1]["verdict"].is_string() && first[0]["paper"].is_null());
    // A command under a figure is one that gives the figure.
    let command = report["sections"][0]["commands"][0].as_str().unwrap();
    let words: Vec<&str> = command.strip_prefix("farwood bench ").unwrap().split(' ').collect();
    let again = json_of("bench", &words);
    let ours = first[0]["ours"].as_f64().unwrap() * 1e6;
    assert!((again["throughput_ops_s"].as_f64().unwrap() / ours - 1.0).abs() < 1e-9, "{command}");
    let (_, stderr) = directory.reproduce(&["--quick", "--fresh"]);
    assert!(stderr.contains("6 runs, of which 0 are there already"), "{stderr}");
}

#[test]
fn what_makes_no_sense_is_refused() {
    let directory = Directory::new("refused");
    let paper = directory.text("tiny.toml");
    refused("reproduce", &["dostoevsky"], "none of sherman");
    refused("reproduce", &["sherman", "--figure", "99"], "there is no 99");
    refused("reproduce", &[&paper, "--jobs", "0"], "--jobs");
    refused("report", &[&paper], "is not JSON");
    let other = directory.text("other.json");
    std::fs::write(&other, "[{\"probe\": 1}]").unwrap();
    refused("report", &[&other], "no result of farwood bench");
    refused("report", &[&other, "--out", &directory.text("other.html")], "would replace");
    refused("report", &[&directory.text("absent.json")], "cannot read");
}

/// A browser, if there is one; looked for by the names that systems give it.
fn browser() -> Option<&'static str> {
    let names = ["chromium", "chromium-browser", "google-chrome"];
    let runs =
        |name: &&&str| Command::new(name).arg("--version").output().is_ok_and(|out| out.status.success());
    let found = names.iter().find(runs).copied();
    if found.is_none() {
        eprintln!("skipped: no browser; install chromium to see the pages drawn");
    }
    found
}

/// The page as the browser has it once its scripts have run.
fn drawn(browser: &str, page: &Path, directory: &Directory) -> String {
    let profile = format!("--user-data-dir={}", directory.text("browser"));
    let output = Command::new(browser)
        .args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            &profile,
        ])
        .args(["--virtual-time-budget=5000", "--dump-dom", &format!("file://{}", page.display())])
        .output()
        .expect("the browser runs");
    let (dom, said) = both(&output);
    assert!(output.status.success() && dom.contains("<html"), "{said}");
    dom
}

fn items(value: &Value) -> &[Value] {
    value.as_array().expect("an array")
}

/// Every plot has as many marks as its data have numbers, and no script failed.
fn check_page(dom: &str, document: &Value) {
    assert!(
        dom.contains("data-errors=\"0\""),
        "a script failed: {}",
        dom.lines().take(4).collect::<String>()
    );
    let plots: Vec<&Value> = items(&document["sections"]).iter().flat_map(|s| items(&s["plots"])).collect();
    assert!(
        !plots.is_empty() && dom.contains(&format!("data-drawn=\"{}\"", plots.len())),
        "not all are drawn"
    );
    let figures: Vec<&str> = dom.split("<figure class=\"plot\">").skip(1).collect();
    assert_eq!(figures.len(), plots.len());
    for (figure, plot) in figures.iter().zip(plots) {
        let points: Vec<&Value> =
            items(&plot["series"]).iter().flat_map(|series| items(&series["points"])).collect();
        let numbers = |name: &str| points.iter().filter(|point| point[name].is_number()).count();
        let figure = figure.split("</figure>").next().expect("its end");
        assert_eq!(figure.matches("class=\"mark ours\"").count(), numbers("ours"), "{}", plot["title"]);
        assert_eq!(figure.matches("class=\"mark paper\"").count(), numbers("paper"), "{}", plot["title"]);
        assert_eq!(figure.matches("<tr>").count(), points.len() + 1, "the table of {}", plot["title"]);
        assert!(!figure.contains("NaN") && !figure.contains("undefined"), "{figure}");
    }
}

#[test]
fn a_browser_draws_every_plot_of_a_reproduction() {
    let Some(browser) = browser() else { return };
    let directory = Directory::new("page");
    directory.reproduce(&["--quick"]);
    let document = directory.report();
    let dom = drawn(browser, &directory.0.join("out/report.html"), &directory);
    check_page(&dom, &document);
    assert!(!dom.contains("<b>Tiny"), "text is text");
    assert!(dom.contains("Tiny &amp; small"));
    assert!(dom.matches("class=\"mark paper\"").count() == 2, "the paper's numbers are beside ours");
}

#[test]
fn bench_results_become_a_page_that_a_browser_draws() {
    let directory = Directory::new("report");
    let bench = ["bench", "--transport", "sim", "--key-set", "sequential", "--keys", "200", "--ops", "500"];
    let results = [JsonPath::new(), JsonPath::new()];
    for (result, (engine, threads)) in results.iter().zip([("cells,records", "1"), ("cells", "4")]) {
        let more =
            ["--workload", "ycsb-a", "--engine", engine, "--threads", threads, "--json", result.text()];
        assert!(farwood(&[&bench[..], &more].concat()).status.success());
    }
    let page = directory.text("page.html");
    let files = results.each_ref().map(JsonPath::text);
    let output =
        farwood(&[&["report"], &files[..], &["--out", &page, "--title", "Cells & records"]].concat());
    let (stdout, stderr) = both(&output);
    assert!(output.status.success() && stdout.contains("3 runs"), "{stdout}{stderr}");
    let document: Value =
        serde_json::from_str(&std::fs::read_to_string(directory.0.join("page.json")).unwrap()).unwrap();
    let plot = &document["sections"][0]["plots"][0];
    assert_eq!((&plot["title"], &plot["x"]["label"]), (&"Throughput".into(), &"clients".into()));
    let points = |n: usize| plot["series"][n]["points"].as_array().unwrap().len();
    assert_eq!((points(0), points(1)), (2, 1), "cells with 1 and 4 threads, records with 1");
    if let Some(browser) = browser() {
        check_page(&drawn(browser, Path::new(&page), &directory), &document);
    }
}
