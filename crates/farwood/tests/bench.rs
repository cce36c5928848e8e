//! `farwood bench` as its user runs it: fields, replay, mixes, checks, several processes, refusals.

mod common;

use common::{JsonPath, farwood, json_of, refused};
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

fn bench(arguments: &[&str]) -> Value {
    json_of("bench", arguments)
}

fn number(value: &Value, path: &[&str]) -> f64 {
    let found = path.iter().fold(value, |value, name| &value[*name]);
    found.as_f64().unwrap_or_else(|| panic!("no {path:?} in {value}"))
}

fn count(run: &Value, kind: &str) -> u64 {
    run["kinds"][kind]["count"].as_u64().unwrap_or_else(|| panic!("no {kind} in {run}"))
}

/// The fields that every result has, whatever was run.
fn check_fields(run: &Value) {
    for name in ["engine", "transport", "workload"] {
        assert!(run[name].is_string(), "{name} in {run}");
    }
    for name in [
        "keys",
        "ops",
        "seed",
        "throughput_ops_s",
        "elapsed_s",
        "errors",
        "compute_cache_bytes",
        "memory_bytes",
    ] {
        assert!(run[name].is_number(), "{name} in {run}");
    }
    assert!(run["virtual"].is_boolean() && run["wall"]["seconds"].is_f64(), "{run}");
    for kind in ["get", "put", "delete", "scan", "cas"] {
        let result = &run["kinds"][kind];
        for quantile in ["p50", "p90", "p99", "p999", "max"] {
            assert!(result["latency_us"][quantile].is_number(), "{kind} {quantile} in {run}");
        }
        for part in ["mean", "p50", "p99", "max"] {
            assert!(result["round_trips"][part].is_number(), "{kind} {part} in {run}");
        }
        for name in ["count", "reads", "writes", "atomics", "calls", "bytes_read", "bytes_written", "retries"]
        {
            assert!(result[name].is_number(), "{kind} {name} in {run}");
        }
    }
}

const SIM: [&str; 12] = [
    "--engine",
    "cells",
    "--transport",
    "sim",
    "--key-set",
    "sequential",
    "--keys",
    "500",
    "--ops",
    "3000",
    "--compute",
    "2",
];

#[test]
fn the_same_world_gives_the_same_result() {
    let run = |seed: &str, more: &[&str]| {
        let mut result = bench(
            &[&SIM[..], &["--workload", "ycsb-a", "--threads", "4", "--memory", "3", "--seed", seed], more]
                .concat(),
        );
        check_fields(&result);
        result.as_object_mut().expect("an object").remove("wall");
        result
    };
    let first = run("5", &[]);
    assert_eq!(first, run("5", &[]));
    let other = run("6", &[]);
    assert_ne!(first["kinds"], other["kinds"], "the seed decides nothing");
    let slower = run("5", &["--profile", "adversary"]);
    assert_ne!(first["elapsed_s"], slower["elapsed_s"], "the profile decides nothing");
    assert_eq!((&first["virtual"], &first["profile"]), (&true.into(), &"cx5-100g".into()));
}

#[test]
fn operations_cost_what_their_protocol_says() {
    let run = bench(&[&SIM[..], &["--workload", "get=1,put=1", "--dist", "uniform"][..]].concat());
    // Two clients on 500 cells hardly ever meet.
    let get = &run["kinds"]["get"];
    assert_eq!(
        (&get["round_trips"]["p50"], &get["reads"], &get["bytes_read"]),
        (&1.into(), &1.0.into(), &128.0.into())
    );
    assert!(
        number(&run, &["kinds", "put", "atomics"]) >= 1.0 && number(&run, &["kinds", "put", "writes"]) >= 3.0
    );
    assert!(
        number(&run, &["kinds", "put", "latency_us", "p50"])
            > number(&run, &["kinds", "get", "latency_us", "p50"])
    );
}

#[test]
fn several_engines_are_an_array_and_mixes_are_as_asked() {
    let runs = bench(&[
        "--engine",
        "btreemap,null",
        "--transport",
        "local",
        "--keys",
        "2000",
        "--ops",
        "20000",
        "--workload",
        "get=40,put=20,insert=10,delete=10,scan=10:5,rmw=5,cas=5",
        "--threads",
        "2",
    ]);
    let runs = runs.as_array().expect("an array");
    assert_eq!(runs.len(), 2);
    for run in runs {
        check_fields(run);
        let ops = run["ops"].as_u64().expect("a count");
        assert!(ops >= 20_000 && run["errors"] == 0, "{run}");
        // A read-modify-write is a get and a put, a swap a get and a cas.
        let share = |kind: &str| count(run, kind) as f64 / ops as f64;
        for (kind, expected) in [("get", 0.5), ("put", 0.35), ("delete", 0.1), ("scan", 0.1), ("cas", 0.05)] {
            assert!((share(kind) - expected).abs() < 0.02, "{kind}: {} of {run}", share(kind));
        }
    }
    assert!(runs[0]["memory_bytes"].as_u64() > Some(2000 * 16));
    assert_eq!(runs[1]["memory_bytes"], 0);
}

#[test]
fn a_run_of_so_many_seconds_lasts_as_long() {
    let run = bench(&[
        "--engine",
        "cells",
        "--transport",
        "sim",
        "--key-set",
        "sequential",
        "--keys",
        "200",
        "--seconds",
        "0.002",
        "--threads",
        "3",
    ]);
    let elapsed = number(&run, &["elapsed_s"]);
    assert!((0.002..0.0022).contains(&elapsed), "{elapsed} s");
    assert!(run["ops"].as_u64() > Some(100));
}

#[test]
fn a_load_stores_every_key_once() {
    let run = bench(&[
        "--engine",
        "btreemap",
        "--transport",
        "local",
        "--workload",
        "load",
        "--keys",
        "5000",
        "--ops",
        "10000",
        "--verify",
    ]);
    assert_eq!((count(&run, "put"), &run["errors"]), (5000, &0.into()));
}

#[test]
fn every_answer_is_checked() {
    for arguments in [
        &["--engine", "btreemap", "--transport", "local", "--threads", "2", "--key-set", "email"][..],
        &[
            "--engine",
            "cells",
            "--transport",
            "sim",
            "--profile",
            "adversary",
            "--key-set",
            "sequential",
            "--threads",
            "6",
        ],
        &[
            "--engine",
            "records",
            "--transport",
            "shm",
            "--key-set",
            "sequential",
            "--threads",
            "2",
            "--tasks",
            "2",
        ],
        &["--engine", "sherman", "--transport", "local:2x64MiB", "--threads", "2", "--tasks", "3"],
        &["--engine", "sherman", "--transport", "shm", "--threads", "2", "--compute", "2"],
        &["--engine", "sherman", "--transport", "tcp", "--threads", "2", "--tasks", "2"],
        &["--engine", "fg+", "--transport", "local:2x64MiB", "--threads", "2"],
        &["--engine", "sherman", "--transport", "sim", "--profile", "adversary", "--threads", "6"],
        &["--engine", "sphinx", "--transport", "local:2x64MiB", "--threads", "2", "--key-set", "email"],
        &["--engine", "art", "--transport", "shm", "--threads", "2", "--key-set", "email"],
        &["--engine", "sphinx", "--transport", "tcp", "--threads", "2", "--tasks", "2"],
    ] {
        let more = [
            "--keys",
            "300",
            "--ops",
            "6000",
            "--value-size",
            "16",
            "--verify",
            "--workload",
            "get=40,put=30,delete=10,scan=10:8,cas=10",
        ];
        let run = bench(&[arguments, &more].concat());
        assert_eq!(run["errors"], 0, "{run}");
        let (checked, constrained) =
            (number(&run, &["answers_checked"]), number(&run, &["answers_constrained"]));
        assert!(checked >= 6000.0 && constrained > 500.0, "{run}");
    }
    // An index that answers nonsense is caught, and the exit says so.
    let wrong = farwood(&[
        "bench",
        "--engine",
        "null",
        "--transport",
        "local",
        "--keys",
        "100",
        "--ops",
        "100",
        "--verify",
    ]);
    let said = String::from_utf8_lossy(&wrong.stdout).into_owned();
    assert_eq!(wrong.status.code(), Some(1), "{said}");
    assert!(said.contains("a wrong answer"), "{said}");
}

/// A process that ends with the test.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn several_processes_make_one_run_and_leave_nothing_behind() {
    let folder = std::env::temp_dir().join(format!("farwood-bench-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let socket = folder.join("m0.sock");
    let mut server = Command::new(env!("CARGO_BIN_EXE_farwood"))
        .args(["serve", "--memory", "128MiB", "--shm"])
        .arg(&socket)
        .stdout(Stdio::piped())
        .spawn()
        .expect("a server");
    let mut ready = String::new();
    BufReader::new(server.stdout.take().expect("piped"))
        .read_line(&mut ready)
        .expect("it says that it is ready");
    let _server = Server(server);
    let url = format!("shm://{}", socket.display());
    let json = JsonPath::new();
    let arguments = [
        "bench",
        "--engine",
        "cells",
        "--transport",
        &url,
        "--key-set",
        "sequential",
        "--keys",
        "1000",
        "--ops",
        "30000",
        "--workload",
        "ycsb-a",
        "--join",
        "3",
        "--json",
        json.text(),
    ];
    for _ in 0..2 {
        let start = |_| {
            let command = Command::new(env!("CARGO_BIN_EXE_farwood"))
                .args(arguments)
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn();
            command.expect("a process")
        };
        let processes: Vec<Child> = (0..3).map(start).collect();
        let outputs: Vec<_> =
            processes.into_iter().map(|process| process.wait_with_output().expect("it ends")).collect();
        let said: Vec<_> = outputs.iter().map(|o| String::from_utf8_lossy(&o.stdout).into_owned()).collect();
        for output in &outputs {
            assert!(output.status.success(), "{said:?} {}", String::from_utf8_lossy(&output.stderr));
        }
        assert_eq!(
            said.iter().filter(|text| text.contains("with the process that came first")).count(),
            2,
            "{said:?}"
        );
        let run: Value =
            serde_json::from_str(&std::fs::read_to_string(json.path()).expect("a result")).expect("JSON");
        check_fields(&run);
        assert_eq!(
            (&run["processes"], &run["ops"], &run["errors"]),
            (&3.into(), &30_000.into(), &0.into()),
            "{run}"
        );
        assert_eq!(count(&run, "get") + count(&run, "put"), 30_000);
    }
    // Settings have to agree: whoever comes second is refused, and the first one waits for nothing.
    let start = |seed: &str| {
        let arguments = [&arguments[..arguments.len() - 2], &["--seed", seed]].concat();
        let command = Command::new(env!("CARGO_BIN_EXE_farwood"))
            .args(arguments)
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn();
        Server(command.expect("a process"))
    };
    let mut both = [start("1"), start("9")];
    let clock = farwood_fabric::clock::RealClock::new();
    let second = loop {
        assert!(clock.now() < 30_000_000_000, "nobody was refused");
        if let Some(second) =
            both.iter_mut().find_map(|p| p.0.try_wait().expect("asks").and_then(|_| p.0.stderr.take()))
        {
            break second;
        }
        std::thread::yield_now();
    };
    let said: Vec<String> = BufReader::new(second).lines().map_while(Result::ok).collect();
    assert!(said.len() == 1 && said[0].contains("were started with other settings"), "{said:?}");
    std::fs::remove_dir_all(&folder).expect("the folder is there");
}

#[test]
fn nonsense_is_refused_in_one_clear_line() {
    let profile = JsonPath::new();
    std::fs::write(profile.path(), "name = mine # me\nlink.round_trip_ns = fast\n").expect("a file");
    for (arguments, expected) in [
        (
            &["--engine", "bplus", "--transport", "local"][..],
            "there is no 'bplus'; there are sherman, fg+, locks, sphinx, art, btreemap, cells",
        ),
        (&["--engine", "btreemap", "--transport", "pigeon"], "'pigeon' is not understood"),
        (&["--engine", "btreemap", "--transport", "sim"], "runs on local only"),
        (&["--engine", "cells", "--transport", "sim"], "add --key-set sequential"),
        (
            &["--engine", "btreemap", "--transport", "local", "--keys", "0"],
            "--keys: there must be at least 1",
        ),
        (&["--engine", "btreemap", "--transport", "local", "--ops", "0"], "--ops"),
        (&["--engine", "btreemap", "--transport", "local", "--seconds", "0"], "--seconds"),
        (&["--engine", "btreemap", "--transport", "local", "--workload", "ycsb-z"], "--workload"),
        (&["--engine", "btreemap", "--transport", "local", "--dist", "zipfian:x"], "--dist"),
        (&["--engine", "btreemap", "--transport", "local", "--key-set", "uuid"], "--key-set"),
        (&["--engine", "btreemap", "--transport", "local", "--value-size", "big"], "--value-size"),
        (&["--engine", "btreemap", "--transport", "local", "--threads", "0"], "--threads"),
        (&["--engine", "btreemap", "--transport", "local", "--tasks", "0"], "--tasks"),
        (&["--engine", "btreemap", "--transport", "local", "--set", "shards"], "name=value"),
        (&["--engine", "btreemap", "--transport", "local", "--set", "colour=red"], "no switch 'colour'"),
        (&["--engine", "btreemap", "--transport", "local", "--join", "2"], "--join: several processes need"),
        (&["--engine", "null", "--transport", "sim", "--profile", profile.text()], "--profile"),
        (
            &["--engine", "null", "--transport", "sim", "--profile", "/no/such"],
            "--profile: /no/such is none of",
        ),
        (&["--engine", "null", "--transport", "local", "--profile", "cx5-100g"], "only a simulated world"),
        (&["--engine", "btreemap", "--transport", "local", "--json", "/nowhere/at/all.json"], "cannot write"),
        (&["--engine", "btreemap", "--transport", "local", "--keys", "100000000000"], "of memory needed"),
        (
            &["--engine", "null", "--transport", "local:1x16MiB", "--keys", "10000000"],
            "--keys: 10000000 keys take",
        ),
        (&["--engine", "null", "--transport", "shm:///no/such.sock"], "there is no socket"),
    ] {
        refused("bench", arguments, expected);
    }
}

#[test]
fn engines_and_workloads_are_listed() {
    let output = farwood(&["bench", "--list"]);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    for name in [
        "sherman",
        "fg+",
        "btreemap",
        "cells",
        "ycsb-a",
        "write-intensive",
        "scan-intensive",
        "readrandomwriterandom",
    ] {
        assert!(said.contains(name), "no {name} in {said}");
    }
}
