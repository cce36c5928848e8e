//! Commands that are interrupted leave the pool: nobody has to recover them.

use super::status::{parse, status};
use super::world::{Over, Servers, farwood, wait_for};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::process::{Child, Stdio};

/// Leases that nobody waits for: what is gone has left.
const LEASE: [&str; 2] = ["--lease-ms", "600000"];

fn coordinator(url: &str) -> Value {
    parse(&status(&[url, "--json"]).0)[0]["status"].clone()
}

fn labels(url: &str) -> Vec<String> {
    let said = coordinator(url);
    let sessions = said["sessions"].as_array().expect("a list");
    sessions.iter().map(|session| session["label"].as_str().expect("text").to_owned()).collect()
}

/// Starts a command and waits until it has joined the pool and done something.
fn start(url: &str, arguments: &[&str], is_at_work: impl Fn() -> bool) -> Child {
    let child = farwood()
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    let label = format!("{} pid {} on ", arguments[0], child.id());
    wait_for("the command to join", || labels(url).iter().any(|other| other.starts_with(&label)));
    wait_for("the command to be at work", is_at_work);
    child
}

fn interrupt(child: Child, signal: Signal) -> (String, Option<i32>) {
    kill_process(Pid::from_child(&child), signal).expect("it is there");
    let output = child.wait_with_output().expect("it ends");
    (String::from_utf8(output.stderr).expect("text"), output.status.code())
}

#[test]
fn who_loads_or_measures_leaves_the_pool_when_interrupted() {
    let servers = Servers::start(&LEASE);
    let url = servers.place(Over::Tcp);
    assert!(farwood().args(["create", &url, "numbers"]).status().expect("it runs").success());
    for signal in [Signal::INT, Signal::TERM] {
        // Its input does not come, and does not end.
        let load = start(&url, &["load", &url, "numbers"], || true);
        let (said, code) = interrupt(load, signal);
        assert!(code == Some(130) && said.contains("interrupted"), "{said}");
        assert_eq!(labels(&url), [""; 0], "{said}");

        let has_index = || coordinator(&url)["indexes"].as_array().is_some_and(|indexes| indexes.len() == 2);
        let arguments = [
            "bench",
            "--engine",
            "sherman",
            "--transport",
            &url,
            "--keys",
            "1000",
            "--threads",
            "2",
            "--seconds",
            "600",
        ];
        let (said, code) = interrupt(start(&url, &arguments, has_index), signal);
        assert!(code == Some(130) && said.contains("interrupted"), "{said}");
        assert_eq!(labels(&url), [""; 0], "{said}");
        assert!(!has_index(), "its index is gone with it: {said}");
    }
}

#[test]
fn a_command_that_cannot_begin_leaves_no_session() {
    let servers = Servers::start(&LEASE);
    let url = servers.place(Over::Shm);
    let url = format!("shm://{url}");
    for arguments in [
        &["load", &url, "nowhere"][..],
        &["dump", &url, "nowhere"],
        &["check", &url, "nowhere"],
        &["drop", &url, "nowhere"],
        &["get", &url, "nowhere", "1"],
    ] {
        let output = farwood().args(arguments).stdin(Stdio::null()).output().expect("it runs");
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert_eq!(labels(&url), [""; 0], "{arguments:?}");
    }
    let is_there = farwood().args(["create", &url, "numbers"]).status().expect("it runs");
    assert!(is_there.success());
    for arguments in [
        &["load", &url, "numbers", "--file", "/nowhere"][..],
        &["put", &url, "numbers", "no number", "1"],
        &["create", &url, "numbers"],
        &["bench", "--engine", "sherman", "--transport", &url, "--keys", "10000000", "--seconds", "1"],
    ] {
        let output = farwood().args(arguments).stdin(Stdio::null()).output().expect("it runs");
        assert!(!output.status.success(), "{arguments:?}");
        assert_eq!(labels(&url), [""; 0], "{arguments:?}");
    }
}
