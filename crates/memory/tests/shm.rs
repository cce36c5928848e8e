//! Runs the fabric's conformance suite over `shm`: every server and every client is a process of its own.
//!
//! The processes are this test binary once more, with a part to play in its environment. A server lives until its standard
//! input closes, so that none outlives the test. A client plays its number in all scenarios of a group, one after the other.
//! `FARWOOD_ROUNDS=10` runs ten times the rounds.

use farwood_fabric::Executor;
use farwood_fabric::addr::ServerId;
use farwood_fabric::clock::MILLISECOND;
use farwood_fabric::region::PoolId;
use farwood_fabric::transport::conformance::{Scenario, mistakes, procedures, run_client, scenarios};
use farwood_fabric::transport::shm::{Backing, ServeOptions, ShmCluster, ShmOptions, ShmServer};
use farwood_memory::{MemoryServer, ServerConfig};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;

const PART: &str = "FARWOOD_TEST_PART";
const SERVERS: u16 = 2;
const TOKEN: &[u8] = b"open sesame";

// --- the parts ---

/// What a process of this binary does when a test has given it a part.
#[test]
#[ignore = "a part that processes started by other tests play"]
fn play() {
    let Ok(part) = std::env::var(PART) else { return };
    let words: Vec<&str> = part.split(' ').collect();
    match words[..] {
        ["server", folder, number] => serve(Path::new(folder), number.parse().unwrap()),
        ["client", folder, names, index, rounds] => {
            let failed =
                play_client(Path::new(folder), names, index.parse().unwrap(), rounds.parse().unwrap());
            if let Err(why) = failed {
                eprintln!("FAILED {why}");
                std::process::exit(1);
            }
        }
        _ => panic!("no such part: {part}"),
    }
}

fn serve(folder: &Path, number: u16) {
    let config = ServerConfig {
        chunk_bytes: 64 << 10,
        lock_bytes: 16 << 10,
        max_sessions: 12,
        max_indexes: 3,
        lease_ns: 500 * MILLISECOND,
        queue: 12,
        ..ServerConfig::new(PoolId(7), ServerId::new(number), SERVERS, 3 << 20)
    };
    let logic = MemoryServer::new(config, procedures()).expect("the limits are valid");
    let socket = folder.join(format!("m{number}.sock"));
    let options = ServeOptions { socket, backing: Backing::Memfd, token: TOKEN.to_vec() };
    let server = ShmServer::start(Arc::new(logic), options).expect("the server starts");
    println!("\nready");
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
    drop(server);
}

fn play_client(folder: &Path, names: &str, index: u32, rounds: u64) -> Result<(), String> {
    let options = ShmOptions { token: TOKEN.to_vec() };
    let cluster = ShmCluster::connect(&[folder.to_owned()], &options).map_err(|error| error.to_string())?;
    let all: Vec<Scenario> = scenarios().into_iter().chain(mistakes()).collect();
    for name in names.split(',') {
        let scenario = all.iter().find(|scenario| scenario.name == name).expect("a scenario's name");
        if index < scenario.clients {
            Executor::new().block_on(run_client(scenario, &cluster, index, rounds))?;
        }
    }
    Ok(())
}

// --- those who give them ---

fn start(part: &str) -> Child {
    Command::new(std::env::current_exe().expect("this test has a binary"))
        .args(["--exact", "play", "--ignored", "--nocapture"])
        .env(PART, part)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("a process starts")
}

/// Two servers, and a folder for their sockets. They end with it.
struct Pool {
    folder: PathBuf,
    servers: Vec<Child>,
}

impl Pool {
    fn start(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("farwood-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder for sockets");
        let servers = (0..SERVERS)
            .map(|number| {
                let mut server = start(&format!("server {} {number}", folder.display()));
                let said = BufReader::new(server.stdout.take().expect("piped"));
                let ready = said.lines().map_while(Result::ok).any(|line| line == "ready");
                assert!(ready, "the server did not start");
                server
            })
            .collect();
        Self { folder, servers }
    }

    /// Lets as many clients as needed play these scenarios; what went wrong.
    fn play(&self, scenarios: &[Scenario], rounds: u64) -> Vec<String> {
        let names: Vec<_> = scenarios.iter().map(|scenario| scenario.name).collect();
        let names = names.join(",");
        let clients = scenarios.iter().map(|scenario| scenario.clients).max().expect("some scenario");
        let children: Vec<Child> = (0..clients)
            .map(|index| start(&format!("client {} {names} {index} {rounds}", self.folder.display())))
            .collect();
        let doomed = scenarios.iter().map(|scenario| scenario.doomed).max().unwrap_or(0);
        let ended = children.into_iter().map(|child| child.wait_with_output().expect("it ends"));
        let failed = ended.zip(0..).filter_map(|(output, index)| {
            let may_be_ended = index >= clients - doomed && output.status.signal() == Some(SIGKILL);
            if output.status.success() || may_be_ended {
                return None;
            }
            let said = String::from_utf8_lossy(&output.stderr);
            let why = said.lines().find_map(|line| line.strip_prefix("FAILED ")).unwrap_or(&said).to_owned();
            Some(format!("shm: client {index} of {names}: {}: {why}", describe(output.status)))
        });
        failed.collect()
    }
}

const SIGKILL: i32 = 9;

fn describe(status: ExitStatus) -> String {
    status.signal().map_or_else(|| status.to_string(), |signal| format!("ended by signal {signal}"))
}

impl Drop for Pool {
    fn drop(&mut self) {
        for server in &mut self.servers {
            drop(server.stdin.take());
            let _ = server.wait();
        }
        // The servers leave nothing behind, so the folder is empty.
        let left = std::fs::remove_dir(&self.folder);
        assert!(left.is_ok() || std::thread::panicking(), "the servers left something behind: {left:?}");
    }
}

fn rounds(usual: u64) -> u64 {
    let factor = std::env::var("FARWOOD_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    usual * factor
}

fn shm(group: &str, usual_rounds: u64) {
    let of_group: Vec<_> = scenarios().into_iter().filter(|s| s.group() == group).collect();
    assert!(!of_group.is_empty(), "no scenario in group {group}");
    let pool = Pool::start(group);
    let failures = pool.play(&of_group, rounds(usual_rounds));
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn shm_verbs() {
    shm("verbs", 2000);
}

#[test]
fn shm_batches() {
    shm("batches", 5000);
}

#[test]
fn shm_words() {
    shm("words", 15_000);
}

#[test]
fn shm_order() {
    shm("order", 4000);
}

#[test]
fn shm_atomics() {
    shm("atomics", 50_000);
}

#[test]
fn shm_visible() {
    shm("visible", 500);
}

#[test]
fn shm_calls() {
    shm("calls", 200);
}

#[test]
fn shm_sessions() {
    shm("sessions", 5000);
}

#[test]
fn shm_bad_input() {
    shm("bad_input", 5000);
}

/// A fenced process may be ended, so each scenario has its own.
#[test]
fn shm_fencing() {
    let pool = Pool::start("fencing");
    for scenario in scenarios().into_iter().filter(|s| s.group() == "fencing") {
        let failures = pool.play(&[scenario], 1);
        assert!(failures.is_empty(), "{}", failures.join("\n"));
    }
}

/// Whether a fence comes in the middle of a WRITE is a matter of luck: many of them.
#[test]
fn shm_fences_in_the_middle() {
    let pool = Pool::start("middle");
    let scenario = scenarios().into_iter().find(|s| s.name == "fencing/verbs").expect("it is there");
    for _ in 0..20 {
        let failures = pool.play(&[scenario], 1);
        assert!(failures.is_empty(), "{}", failures.join("\n"));
    }
}

/// Whether processes meet is a matter of luck, so each mistake gets several chances.
#[test]
fn shm_catches_races() {
    for name in ["mistakes/flag_first", "mistakes/no_lock", "mistakes/read_and_write"] {
        let mistake = mistakes().into_iter().find(|s| s.name == name).expect("no mistake of that name");
        let caught = (0..20).any(|n| !Pool::start(&format!("mistake{n}")).play(&[mistake], 5000).is_empty());
        assert!(caught, "{name} went unnoticed on shm");
    }
}

/// Races need several processes; should scenarios shrink, this says so.
#[test]
fn many_scenarios_have_three_clients_and_more() {
    assert!(scenarios().iter().filter(|scenario| scenario.clients >= 3).count() >= 8);
}

/// Something that accepts connections and says nothing is given up after a while.
#[test]
fn a_server_that_does_not_answer_is_given_up() {
    let folder = std::env::temp_dir().join(format!("farwood-{}-mute", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let socket = folder.join("m0.sock");
    let mute = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let refused = ShmCluster::connect(std::slice::from_ref(&socket), &ShmOptions::default());
    assert!(refused.unwrap_err().to_string().contains("does not answer"));
    drop(mute);
    std::fs::remove_dir_all(&folder).unwrap();
}
