//! Connections on which nothing happens cost next to nothing, on either side.

use super::world::{Over, Process, Servers, client, nap};
use std::time::Duration;

/// How many connections the part `idle` has to each server.
pub(crate) const CONNECTIONS: usize = 64;
/// How long they are watched.
const SPAN: Duration = Duration::from_secs(6);

/// The time that all threads of a process spent on processors.
pub(crate) fn cpu_ns(process: &Process) -> u64 {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", process.0.id())).expect("it runs");
    let spent = tasks.flatten().filter_map(|task| {
        let text = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        text.split_whitespace().next()?.parse::<u64>().ok()
    });
    spent.sum()
}

/// Under 1% of a core for 64 connections, with the heartbeats of their session.
#[test]
fn idle_connections_cost_next_to_nothing() {
    let servers = Servers::start(&[]);
    let client = client("idle", &servers.place(Over::Tcp));
    // What was going on when the last endpoint connected settles.
    nap(Duration::from_secs(1));
    let all: Vec<&Process> = servers.processes.iter().chain([&client]).collect();
    let before: Vec<u64> = all.iter().map(|process| cpu_ns(process)).collect();
    nap(SPAN);
    for (n, (process, before)) in all.iter().zip(before).enumerate() {
        let spent = cpu_ns(process) - before;
        let permille = spent * 1000 / u64::try_from(SPAN.as_nanos()).expect("seconds");
        println!("{}: {spent} ns in {SPAN:?}", if n < 2 { "a server" } else { "the client" });
        assert!(permille < 10, "process {n} spent {spent} ns in {SPAN:?}");
    }
}

/// Connections that broke while nobody used them are not waited for: a socket that was hung up says so at once, every time.
#[test]
fn broken_connections_cost_next_to_nothing() {
    let mut servers = Servers::start(&[]);
    let client = client("idle", &servers.place(Over::Tcp));
    servers.processes[1].kill();
    nap(Duration::from_secs(1));
    let before = cpu_ns(&client);
    nap(SPAN);
    let spent = cpu_ns(&client) - before;
    let permille = spent * 1000 / u64::try_from(SPAN.as_nanos()).expect("seconds");
    assert!(permille < 10, "the client spent {spent} ns in {SPAN:?}");
}
