//! `farwood litmus` as its user runs it: what holds, what the adversary shows not to, replay, refusals.

mod common;

use common::{json_of, refused};
use serde_json::Value;

fn litmus(arguments: &[&str]) -> Value {
    json_of("litmus", arguments)
}

fn lines<'a>(litmus: &'a Value, property: &'a str) -> impl Iterator<Item = &'a Value> {
    let lines = litmus["lines"].as_array().expect("lines");
    lines.iter().filter(move |line| line["property"] == property)
}

fn line<'a>(litmus: &'a Value, property: &'a str) -> &'a Value {
    lines(litmus, property).next().unwrap_or_else(|| panic!("no line '{property}'"))
}

fn number(line: &Value, name: &str) -> u64 {
    line[name].as_u64().unwrap_or_else(|| panic!("no {name} in {line}"))
}

const PROMISED: [&str; 12] = [
    "8-byte words are whole",
    "batch: WRITE, then WRITE",
    "batch: WRITE, then atomic",
    "batch: atomic, fence, WRITE",
    "batch: READ, then READ",
    "batch: WRITE, then READ",
    "batch: atomic, then READ",
    "batch: READ, fence, WRITE",
    "FAA is atomic",
    "CAS is atomic",
    "masked CAS is atomic",
    "checksummed object",
];

#[test]
fn the_adversary_keeps_the_contract_and_nothing_more() {
    let result = litmus(&["--transport", "sim", "--rounds", "600", "--sizes", "256,4KiB"]);
    assert_eq!((&result["virtual"], &result["broken"]), (&true.into(), &0.into()));
    for property in PROMISED {
        let line = line(&result, property);
        assert_eq!(line["verdict"], "holds", "{line}");
        assert!(number(line, "chances") > 0 && number(line, "observations") >= 600, "{line}");
    }
    for property in [
        "64-byte lines are whole",
        "lines of a WRITE ascend",
        "lines of a READ ascend",
        "two batches posted together",
    ] {
        for line in lines(&result, property) {
            assert_eq!(line["verdict"], "not_promised_violated", "{line}");
            assert!(number(line, "violations") > 0 && line["promised_by"].is_null(), "{line}");
        }
    }
    assert_eq!(lines(&result, "lines of a READ ascend").count(), 2);
    assert_eq!(line(&result, "64-byte lines are whole")["unclaimed_capability"], "line_atomic");
    assert_eq!(line(&result, "batch: READ, then READ")["promised_by"], "ordered_reads");
}

#[test]
fn a_checksummed_reader_sees_torn_objects_and_accepts_none() {
    let result = litmus(&["--transport", "sim", "--rounds", "400", "--sizes", "64", "--clients", "4"]);
    assert_eq!(lines(&result, "checksummed object").count(), 3);
    for line in lines(&result, "checksummed object") {
        assert!(number(line, "torn_seen") > 0 && number(line, "violations") == 0, "{line}");
        // Three readers.
        assert_eq!(number(line, "observations"), 3 * 400, "{line}");
    }
}

#[test]
fn the_same_world_gives_the_same_counts() {
    let run = |seed| {
        let mut result = litmus(&["--transport", "sim", "--rounds", "100", "--sizes", "256", "--seed", seed]);
        result.as_object_mut().expect("an object").remove("wall").expect("real time");
        result
    };
    let first = run("5");
    assert_eq!(first, run("5"));
    assert_ne!(first["lines"], run("6")["lines"], "the seed decides nothing");
}

/// Threads may share a core, so that nothing races; but whatever does must hold.
#[test]
fn on_threads_no_promise_is_broken() {
    for transport in ["local", "local:2x8MiB", "shm"] {
        let result = litmus(&["--transport", transport, "--rounds", "3000", "--sizes", "256,64KiB"]);
        assert_eq!((&result["virtual"], &result["broken"]), (&false.into(), &0.into()));
        for property in PROMISED {
            let line = line(&result, property);
            assert!(matches!(line["verdict"].as_str(), Some("holds" | "untested")), "{line}");
            assert!(number(line, "observations") >= 3000 && number(line, "violations") == 0, "{line}");
        }
    }
}

#[test]
fn nonsense_is_refused_in_one_clear_line() {
    for (arguments, expected) in [
        (&["--transport", "udp://a:1"][..], "'udp://a:1' is not understood"),
        (&["--transport", "shm:///no/such.sock"], "there is no socket /no/such.sock"),
        (&["--transport", "sim", "--clients", "1"], "--clients: a race needs 2"),
        (&["--transport", "sim", "--sizes", "100"], "--sizes: 100 B is no multiple of 64"),
        (&["--transport", "sim", "--sizes", "2MiB"], "--sizes: 2 MiB"),
        (&["--transport", "sim", "--rounds", "0"], "--rounds"),
        (&["--transport", "sim", "--seconds=-1"], "--seconds"),
        (&["--transport", "sim", "--json", "/nowhere/at/all.json"], "cannot write /nowhere/at/all.json"),
    ] {
        refused("litmus", arguments, expected);
    }
}
