//! `farwood probe` as its user runs it: rows, exact round trips, replay, refusals.

mod common;

use common::{JsonPath, farwood, json_of, refused};
use serde_json::Value;

fn probe(arguments: &[&str]) -> Value {
    json_of("probe", arguments)
}

fn rows(probe: &Value) -> &Vec<Value> {
    probe["rows"].as_array().expect("rows")
}

const FEW: [&str; 8] = ["--sizes", "8,1KiB", "--depths", "1,4", "--ops", "300", "--working-set", "1MiB"];

/// Checks what must be true of every row, whatever the machine does.
fn check_rows(probe: &Value, clients: u64) {
    // Five accesses with two sizes, five without, each at two depths.
    assert_eq!(rows(probe).len(), 30);
    for row in rows(probe) {
        let number = |name: &str| row[name].as_f64().unwrap_or_else(|| panic!("no {name} in {row}"));
        assert_eq!(row["ops"], 300 * clients, "{row}");
        let trips = if row["verb"] == "read-cas" { 2.0 } else { 1.0 };
        assert!((number("round_trips_per_op") - trips).abs() < 1e-9, "{row}");
        for name in
            ["latency_ns_p50", "latency_ns_p99", "latency_ns_mean", "ns_per_op", "rate_per_s", "bytes_per_s"]
        {
            assert!(number(name) > 0.0, "{name} in {row}");
        }
        assert!(number("latency_ns_p50") <= number("latency_ns_p99"), "{row}");
        assert!(number("baseline_ns") > 0.0 && number("ratio") > 0.0 && row["baseline"].is_string(), "{row}");
        let sized = !matches!(row["verb"].as_str(), Some("cas" | "masked-cas" | "faa" | "read-cas" | "call"));
        assert_eq!(row["bytes"].is_u64(), sized, "{row}");
    }
}

#[test]
fn local_rows_are_complete_and_their_round_trips_exact() {
    let result = probe(&[&["--transport", "local", "--clients", "2"], &FEW[..]].concat());
    check_rows(&result, 2);
    assert_eq!(
        (&result["virtual"], &result["settings"]["working_set_bytes"]),
        (&false.into(), &(1 << 20).into())
    );
}

/// The servers are processes of their own.
#[test]
fn shared_memory_rows_are_complete() {
    check_rows(&probe(&[&["--transport", "shm:2x16MiB", "--clients", "2"], &FEW[..]].concat()), 2);
}

#[test]
fn several_servers_share_the_working_set() {
    check_rows(&probe(&[&["--transport", "local:3x16MiB"], &FEW[..]].concat()), 1);
}

#[test]
fn simulated_rows_are_complete_and_the_same_every_time() {
    let run = |seed| {
        let mut result =
            probe(&[&["--transport", "sim", "--clients", "2", "--seed", seed], &FEW[..]].concat());
        let wall = result.as_object_mut().expect("an object").remove("wall");
        assert!(wall.is_some_and(|wall| wall["seconds"].is_f64()));
        result
    };
    let first = run("3");
    check_rows(&first, 2);
    assert_eq!(first["virtual"], true);
    assert_eq!(first, run("3"));
    assert_ne!(rows(&first), rows(&run("4")), "the seed decides nothing");
}

#[test]
fn in_virtual_time_more_in_flight_is_more_done_and_a_fence_takes_twice_as_long() {
    let arguments = ["--verbs", "cas,read-cas,call", "--depths", "1,16", "--ops", "2000"];
    let result = probe(&[&["--transport", "sim"], &arguments[..]].concat());
    let rate = |n: usize| rows(&result)[n]["rate_per_s"].as_f64().expect("a rate");
    assert!(rate(1) > 8.0 * rate(0), "16 in flight: {} against {}", rate(1), rate(0));
    for row in rows(&result) {
        // With one client, the time for each is what the rate says: of calls, which take a task each, too.
        let product =
            row["ns_per_op"].as_f64().expect("a time") * row["rate_per_s"].as_f64().expect("a rate");
        assert!((0.8e9..1.25e9).contains(&product), "{row}");
    }
    let ratio = rate(0) / rate(2);
    assert!((1.8..2.2).contains(&ratio), "the fence costs {ratio} times as much");
}

#[test]
fn the_verbs_are_those_asked_for_and_bytes_are_counted() {
    let arguments = ["--verbs", "read,write-write", "--sizes", "256", "--depths", "1", "--ops", "500"];
    let result = probe(&[&["--transport", "sim"], &arguments[..]].concat());
    let verbs: Vec<_> = rows(&result).iter().map(|row| row["verb"].as_str().expect("a name")).collect();
    assert_eq!(verbs, ["read", "write-write"]);
    for (row, bytes) in rows(&result).iter().zip([256.0, 264.0]) {
        let each =
            row["bytes_per_s"].as_f64().expect("a number") / row["rate_per_s"].as_f64().expect("a number");
        assert!((each - bytes).abs() < 1e-6, "{row}");
    }
}

#[test]
fn the_table_has_a_line_for_every_row() {
    let output = farwood(&["probe", "--transport", "sim", "--verbs", "faa,call", "--ops", "50"]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}");
    assert_eq!(
        text.lines().filter(|line| line.starts_with("FAA") || line.starts_with("call")).count(),
        4,
        "{text}"
    );
}

#[test]
fn nonsense_is_refused_in_one_clear_line() {
    for (arguments, expected) in [
        (&["--transport", "pigeon"][..], "'pigeon' is not understood"),
        (&["--transport", "local:0x1MiB"], "is not understood"),
        (&["--transport", "shm:///no/such.sock"], "there is no socket /no/such.sock"),
        (&["--transport", "shm:1x100000GiB"], "of memory needed"),
        (&["--transport", "local", "--token-file", "/no/such"], "--token-file"),
        (&["--transport", "local:2x100000GiB"], "of memory needed"),
        (&["--transport", "local", "--working-set", "16777216TiB"], "more than can be counted"),
        (&["--transport", "local", "--working-set", "16000000TiB"], "memory needed"),
        (
            &["--transport", "local:1x16MiB", "--working-set", "64MiB", "--ops", "1"],
            "no far memory of 64 MiB",
        ),
        (&["--transport", "local", "--sizes", "8,0"], "--sizes: a size of 0"),
        (&["--transport", "local", "--sizes", "8kb"], "'8kb' is no size"),
        (&["--transport", "local", "--working-set", "4KiB"], "--working-set"),
        (&["--transport", "local", "--depths", "0"], "--depths"),
        (&["--transport", "local", "--clients", "0"], "--clients"),
        (&["--transport", "local", "--seconds", "0"], "--seconds"),
        (&["--transport", "local", "--seconds", "nan"], "--seconds"),
        (&["--transport", "local", "--ops", "0"], "--ops"),
        (&["--transport", "local", "--verbs", "read,fly"], "'fly' is not one of"),
        (&["--transport", "local", "--json", "/nowhere/at/all.json"], "cannot write /nowhere/at/all.json"),
    ] {
        refused("probe", arguments, expected);
    }
}

#[test]
fn a_refusal_leaves_an_earlier_result_alone() {
    let path = JsonPath::new();
    std::fs::write(path.path(), "earlier").expect("a file");
    refused("probe", &["--transport", "shm:///no/such.sock", "--json", path.text()], "there is no socket");
    assert_eq!(std::fs::read_to_string(path.path()).expect("a file"), "earlier");
}
