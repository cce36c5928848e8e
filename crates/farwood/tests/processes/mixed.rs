//! Trees under all operations at once, from threads of two processes: every answer is explained by one order of the operations, and
//! the tree is whole afterwards. The suite of `farwood_sim::threads`, over servers that are processes.

use super::world::{AT_WORK, Over, Servers, client, connect};
use farwood_index::engine::{AnyEngine, sherman, sphinx};
use farwood_sim::history::{Action, Operation, Outcome};
use farwood_sim::spelling::Spelling;
use farwood_sim::threads::{self, Crew};
use serde_json::{Value, json};
use std::ops::Bound;

/// Small nodes, few locks and little cache, so that operations meet; the roomy ones are for transports where every round trip counts.
fn tree(name: &str) -> AnyEngine {
    let sherman = |config| AnyEngine::Sherman(sherman::Sherman::new(config));
    let sphinx = |config| AnyEngine::Sphinx(sphinx::Sphinx::new(config));
    let tiny = sherman::Config::tiny();
    let small = sherman::Config { locks: 64, cache_bytes: 4096, ..tiny.clone() }.with_entries(6);
    match name {
        "sherman" => sherman(small),
        "fg+" => sherman(sherman::Config { switches: sherman::Switches::FG_PLUS, ..small }),
        "roomy-sherman" => {
            sherman(sherman::Config { locks: 1024, cache_bytes: 1 << 20, ..tiny }.with_entries(12))
        }
        "sphinx" => sphinx(sphinx::Config::tiny()),
        "art" => sphinx(sphinx::Config::art()),
        "roomy-sphinx" => sphinx(sphinx::Config { filter_bytes: 1 << 20, ..sphinx::Config::tiny() }),
        _ => panic!("no such tree: {name}"),
    }
}

/// Keys that an engine can store and that hurt it.
fn spelling(engine: &AnyEngine) -> Spelling {
    match engine {
        AnyEngine::Sphinx(_) => Spelling::Prefixes,
        _ => Spelling::Numbers,
    }
}

/// Lets two processes, with two threads each, do `ops` operations a thread on a tree, and judges what they were told.
pub(crate) fn two_processes_agree(servers: &Servers, over: Over, name: &str, ops: u32) {
    let place = servers.place(over);
    let cluster = connect(&place).expect("the pool is there");
    threads::prepare(&tree(name), &cluster).expect("a tree");
    let processes = [0, 1].map(|number| client(&format!("mixed/{name}/{number}/{ops}"), &place));
    let mut operations = Vec::new();
    for mut process in processes {
        let said = process.rest();
        assert!(process.0.wait().expect("it ends").success(), "{said}");
        operations.extend(said.lines().filter(|line| line.starts_with('[')).map(read));
    }
    assert_eq!(operations.len() as u64, 4 * u64::from(ops), "all operations were written down");
    threads::judge(&tree(name), &cluster, operations)
        .unwrap_or_else(|failure| panic!("{name} over {over:?}: {failure}"));
}

/// What one of the processes does.
pub(crate) fn play(part: &str, place: &str) {
    let [name, number, ops] = part.split('/').collect::<Vec<_>>()[..] else { panic!("no such part: {part}") };
    let number = number.parse().expect("a number");
    let ops = ops.parse().expect("a number");
    let (engine, keys) = (tree(name), 200);
    let spelling = spelling(&engine);
    let crew = Crew { process: (number, 2), seed: 7, sessions: 1, threads: 2, ops, keys, spelling };
    println!("\n{AT_WORK}");
    let cluster = connect(place).expect("a pool");
    let done = threads::work(&engine, &cluster, &crew).unwrap_or_else(|failure| panic!("{failure}"));
    println!("{:?}", done.marks);
    for operation in &done.operations {
        println!("{}", written(operation));
    }
}

/// An operation as a line of JSON, to be read by another process.
fn written(operation: &Operation) -> Value {
    let Operation { client, invoked, responded, action, outcome } = operation;
    let bound = |bound: &Bound<Vec<u8>>| match bound {
        Bound::Included(key) => json!([true, key]),
        Bound::Excluded(key) => json!([false, key]),
        Bound::Unbounded => Value::Null,
    };
    let action = match action {
        Action::Get { key } => json!(["get", key]),
        Action::Put { key, value } => json!(["put", key, value]),
        Action::PutIfAbsent { key, value } => json!(["put-if-absent", key, value]),
        Action::UpdateIfPresent { key, value } => json!(["update", key, value]),
        Action::CompareAndSwap { key, expected, new } => json!(["swap", key, expected, new]),
        Action::Delete { key } => json!(["delete", key]),
        Action::Scan { start, end, limit, reverse } => {
            json!(["scan", bound(start), bound(end), *limit as u64, reverse])
        }
    };
    let outcome = match outcome {
        Some(Outcome::Value(value)) => json!(["value", value]),
        Some(Outcome::Done) => json!(["done"]),
        Some(Outcome::Applied(applied)) => json!(["applied", applied]),
        Some(Outcome::Pairs(pairs)) => json!(["pairs", pairs]),
        None => Value::Null,
    };
    json!([client, invoked, responded, action, outcome])
}

fn from<T: serde::de::DeserializeOwned>(value: &Value) -> T {
    serde_json::from_value(value.clone()).unwrap_or_else(|error| panic!("{value}: {error}"))
}

/// What `written` has written.
fn read(line: &str) -> Operation {
    let line: Value = serde_json::from_str(line).expect("JSON");
    let bound = |value: &Value| match from::<Option<(bool, Vec<u8>)>>(value) {
        Some((true, key)) => Bound::Included(key),
        Some((false, key)) => Bound::Excluded(key),
        None => Bound::Unbounded,
    };
    let (action, outcome) = (&line[3], &line[4]);
    let key = || from(&action[1]);
    let action = match action[0].as_str() {
        Some("get") => Action::Get { key: key() },
        Some("put") => Action::Put { key: key(), value: from(&action[2]) },
        Some("put-if-absent") => Action::PutIfAbsent { key: key(), value: from(&action[2]) },
        Some("update") => Action::UpdateIfPresent { key: key(), value: from(&action[2]) },
        Some("swap") => {
            Action::CompareAndSwap { key: key(), expected: from(&action[2]), new: from(&action[3]) }
        }
        Some("delete") => Action::Delete { key: key() },
        Some("scan") => Action::Scan {
            start: bound(&action[1]),
            end: bound(&action[2]),
            limit: from(&action[3]),
            reverse: from(&action[4]),
        },
        _ => panic!("no such action: {action}"),
    };
    let outcome = match outcome[0].as_str() {
        Some("value") => Some(Outcome::Value(from(&outcome[1]))),
        Some("done") => Some(Outcome::Done),
        Some("applied") => Some(Outcome::Applied(from(&outcome[1]))),
        Some("pairs") => Some(Outcome::Pairs(from(&outcome[1]))),
        _ => None,
    };
    Operation { client: from(&line[0]), invoked: from(&line[1]), responded: from(&line[2]), action, outcome }
}

#[test]
fn over_shared_memory() {
    for (name, ops) in [("sherman", 10_000), ("fg+", 2_500), ("sphinx", 10_000), ("art", 2_500)] {
        two_processes_agree(&Servers::start(&["--lease-ms", "600000"]), Over::Shm, name, ops);
    }
}

#[test]
fn over_tcp() {
    for (name, ops) in
        [("sherman", 5_000), ("fg+", 2_500), ("roomy-sherman", 2_500), ("sphinx", 5_000), ("art", 2_500)]
    {
        two_processes_agree(&Servers::start(&["--lease-ms", "600000"]), Over::Tcp, name, ops);
    }
}
