//! Papers are data, and data can be wrong: everything in them must be known to the bench, and every number must have its place.

use super::*;
use paper::Options;

/// A paper with one figure of two series over two points.
const TINY: &str = r#"
name = "Tiny"
citation = "Nobody, nowhere."
about = ["A paper for tests."]
[setting]
engine = "cells"
transport = "sim"
key-set = "sequential"
keys = 100
ops = 3500
workload = "ycsb-a"
[quick]
ops = 2000
[[figure]]
id = "3a"
title = "a figure"
about = "About it."
finding = "Found."
series = [{ name = "few" }, { name = "many", setting = { threads = 4 } }]
x = { label = "keys" }
point = [{ x = 50 }, { x = 100, full-only = true }]
setting = { keys = "{x}" }
metric = [{ name = "gets", path = "kinds.get.count", unit = "ops" }]
paper = [{ series = "few", x = 50, metric = "gets", value = 1000, source = "Section 1" }]
ratio = [{ name = "all alike", of = "few", over = "many", metric = "gets", value = 1, source = "Section 2" }]
"#;

#[test]
fn every_run_of_every_paper_is_one_that_the_bench_understands() {
    for (name, text) in PAPERS {
        let paper = Paper::parse(text).unwrap_or_else(|why| panic!("{name}: {why}"));
        for quick in [true, false] {
            for figure in &paper.figure {
                let planned = Planned::new(&paper, figure, quick);
                assert!(!planned.slots.is_empty(), "{name}, {}", figure.id);
                planned.wanted().unwrap_or_else(|why| panic!("{name}: {why}"));
            }
        }
    }
}

#[test]
fn sherman_has_all_its_figures_and_its_numbers_are_used() {
    let paper = Paper::parse(PAPERS[0].1).unwrap();
    for id in ["table1", "2", "10", "11", "12", "13", "14", "15", "16"] {
        assert!(!paper.figures(&[id.to_owned()]).unwrap().is_empty(), "{id}");
    }
    for figure in &paper.figure {
        assert!(figure.finding.len() > 20, "somebody has to look at figure {}", figure.id);
        for number in &figure.paper {
            let panel = number.panel.as_deref().unwrap_or("");
            let found = figure.number(panel, &number.series, number.x.unwrap_or(0.0), &number.metric);
            assert!(
                found.is_some_and(|found| std::ptr::eq(found, number)),
                "{}: {number:?} twice",
                figure.id
            );
        }
    }
}

#[test]
fn later_options_replace_earlier_ones_and_switches_add_up() {
    let options = |text: &str| toml::from_str::<Options>(text).unwrap();
    let base = options("engine = 'fg+'\nkeys = 10\nshared-nics = true\nset = { combine = true, locks = 3 }");
    let more = options("keys = '{x}'\nshared-nics = false\nset = { locks = 4 }");
    let words = paper::command(&[&base, &more], 0.5);
    assert_eq!(words.join(" "), "--engine fg+ --keys 0.5 --set combine=true --set locks=4");
    assert_eq!(paper::command(&[&base], 1.0)[4], "--shared-nics");
}

#[test]
fn a_paper_that_is_wrong_says_where() {
    let refused = |from: &str, to: &str, said: &str| {
        assert!(TINY.contains(from), "{from}");
        let why = Paper::parse(&TINY.replace(from, to)).unwrap_err();
        assert!(why.contains(said), "{from} -> {to}: {why}");
    };
    refused("source = \"Section 1\"", "source = \"somewhere\"", "its section, table or figure");
    refused("source = \"Section 2\"", "source = \"\"", "the ratio 'all alike'");
    refused("value = 1000", "value = 0", "above 0");
    refused("{ series = \"few\"", "{ series = \"fewer\"", "not in the figure");
    refused("x = 50, metric", "x = 51, metric", "not in the figure");
    refused("over = \"many\"", "over = \"more\"", "not in the figure");
    refused("x = { label = \"keys\" }", "", "several points");
    refused("finding = \"Found.\"", "findings = \"Found.\"", "findings");
    let paper = Paper::parse(&TINY.replace("threads = 4", "thread = 4")).unwrap();
    let why = Planned::new(&paper, &paper.figure[0], true).wanted().unwrap_err();
    assert!(why.contains("Figure 3a, many, 50") && why.contains("--thread"), "{why}");
}

#[test]
fn figures_are_found_by_number_and_by_letter() {
    let paper = Paper::parse(TINY).unwrap();
    let ids = |wanted: &[&str]| {
        let wanted: Vec<String> = wanted.iter().map(|id| (*id).to_owned()).collect();
        paper.figures(&wanted).map(|figures| figures.len())
    };
    assert_eq!((ids(&[]), ids(&["3"]), ids(&["3a"])), (Ok(1), Ok(1), Ok(1)));
    assert!(ids(&["3", "4"]).unwrap_err().contains("there is no 4; there are 3a"));
}

#[test]
fn a_paper_becomes_numbers_verdicts_and_a_document() {
    let paper = Paper::parse(TINY).unwrap();
    let path = std::env::temp_dir().join(format!("farwood-outcome-{}.jsonl", std::process::id()));
    let document = |quick: bool, runs: &mut Runs| {
        let plan: Vec<_> = paper.figure.iter().map(|figure| Planned::new(&paper, figure, quick)).collect();
        let wanted: Vec<_> = plan.iter().flat_map(|planned| planned.wanted().unwrap()).collect();
        runs.complete(&wanted, 2).unwrap();
        let outcome = Outcome::new(&paper, &plan, runs).unwrap();
        let mut said = Vec::new();
        outcome.print(&mut said).unwrap();
        (outcome.into_document(quick, wanted.len()), String::from_utf8(said).unwrap())
    };
    let mut runs = Runs::open(&path, true).unwrap();
    let (quick, said) = document(true, &mut runs);
    let points =
        |document: &crate::page::Document, series: usize| -> Vec<(f64, Option<f64>, Option<String>)> {
            let points = &document.sections[0].plots[0].series[series].points;
            points.iter().map(|point| (point.x, point.ours, point.verdict.clone())).collect()
        };
    // Half of 2000 operations are gets, give or take; the paper is said to have 1000.
    assert_eq!(points(&quick, 0).len(), 1, "a quick run leaves points out");
    assert_eq!(points(&quick, 0)[0].2.as_deref(), Some("within 1.2x"));
    assert_eq!(points(&quick, 1)[0].2, None, "the paper says nothing about that");
    assert!(said.contains("not in the text") && said.contains("1 of 1 within 1.5x (100%)"), "{said}");
    let (full, _) = document(false, &mut runs);
    assert_eq!(points(&full, 0).len(), 2);
    assert_eq!(
        points(&full, 0)[0].2.as_deref(),
        Some("within 2x"),
        "3500 operations have nearly twice as many gets"
    );
    assert_eq!(full.headlines.unwrap().rows[0].verdict, "within 1.2x");
    std::fs::remove_file(&path).unwrap();
}
