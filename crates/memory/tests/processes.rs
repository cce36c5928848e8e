//! Runs the fabric's conformance suite over `shm`, `tcp` and `verbs`: every server and every client is a process of its own.
//!
//! The processes are this test binary once more, with a part to play in its environment. A server lives until its standard
//! input closes, so that none outlives the test. A client plays its number in all scenarios of a group, one after the other.
//! `FARWOOD_ROUNDS=10` runs ten times the rounds. RDMA is tested where `FARWOOD_VERBS` names a device and an IP address of its
//! network interface, as in `rxe0,10.9.0.1`; `.ci/rdma-vm` makes such a place. Where `FARWOOD_DAX` names two DAX devices, as in
//! `/dev/dax0.0,/dev/dax1.0`, the servers keep their memory there, and there are fewer rounds.

use farwood_fabric::Cluster;
use farwood_fabric::Executor;
use farwood_fabric::addr::ServerId;
use farwood_fabric::clock::MILLISECOND;
use farwood_fabric::mem::RacyMemory;
use farwood_fabric::region::PoolId;
use farwood_fabric::transport::conformance::{Scenario, mistakes, procedures, run_client, scenarios};
use farwood_fabric::transport::serve::{Backing, MemoryProcess, ServeOptions};
use farwood_fabric::transport::shm::{ShmCluster, ShmOptions};
use farwood_fabric::transport::tcp::{TcpCluster, TcpOptions};
use farwood_fabric::transport::verbs::{VerbsCluster, VerbsOptions};
use farwood_memory::{MemoryServer, ServerConfig};
use std::io::{BufRead, BufReader, Read};
use std::net::IpAddr;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;

const PART: &str = "FARWOOD_TEST_PART";
const SERVERS: u16 = 2;
const TOKEN: &[u8] = b"open sesame";
/// What a server says when it can be reached, with its address.
const READY: &str = "ready";

// --- the parts ---

/// How processes reach the servers.
#[derive(Clone, Copy, Debug)]
enum Over {
    Shm,
    Tcp,
    Verbs,
}

/// The RDMA device to be tested, and an address at which it is reached.
fn verbs() -> Option<(String, IpAddr)> {
    let named = std::env::var("FARWOOD_VERBS").ok()?;
    let (device, address) = named.split_once(',').expect("FARWOOD_VERBS is DEVICE,ADDRESS");
    Some((device.to_owned(), address.parse().expect("an IP address")))
}

impl Over {
    fn name(self) -> &'static str {
        match self {
            Self::Shm => "shm",
            Self::Tcp => "tcp",
            Self::Verbs => "verbs",
        }
    }

    fn named(name: &str) -> Self {
        [Self::Shm, Self::Tcp, Self::Verbs].into_iter().find(|over| over.name() == name).expect("a transport")
    }

    /// Connects to the servers at these places, which commas separate.
    fn connect(self, places: &str) -> Result<Cluster, String> {
        let connected = match self {
            Self::Shm => {
                let places: Vec<PathBuf> = places.split(',').map(PathBuf::from).collect();
                ShmCluster::connect(&places, &ShmOptions { token: TOKEN.to_vec() })
            }
            Self::Tcp => {
                let places: Vec<String> = places.split(',').map(str::to_owned).collect();
                TcpCluster::connect(&places, &TcpOptions { token: TOKEN.to_vec(), ..TcpOptions::default() })
            }
            Self::Verbs => {
                let places: Vec<String> = places.split(',').map(str::to_owned).collect();
                VerbsCluster::connect(
                    &places,
                    &VerbsOptions { token: TOKEN.to_vec(), ..VerbsOptions::default() },
                )
            }
        };
        connected.map_err(|error| error.to_string())
    }
}

/// What a process of this binary does when a test has given it a part.
#[test]
#[ignore = "a part that processes started by other tests play"]
fn play() {
    let Ok(part) = std::env::var(PART) else { return };
    let words: Vec<&str> = part.split(' ').collect();
    match words[..] {
        ["server", over, folder, number] => {
            serve(Over::named(over), Path::new(folder), number.parse().unwrap());
        }
        ["wipe", device] => wipe(Path::new(device)),
        ["client", over, places, names, index, rounds] => {
            let over = Over::named(over);
            let failed = play_client(over, places, names, index.parse().unwrap(), rounds.parse().unwrap());
            if let Err(why) = failed {
                eprintln!("FAILED {why}");
                std::process::exit(1);
            }
        }
        _ => panic!("no such part: {part}"),
    }
}

/// The DAX device of a server, if there is to be one.
fn dax(number: u16) -> Option<PathBuf> {
    let named = std::env::var("FARWOOD_DAX").ok()?;
    let device = named.split(',').nth(usize::from(number)).expect("FARWOOD_DAX is DEVICE,DEVICE");
    Some(device.into())
}

/// Nothing is left on a device of what the servers of another test had there.
fn wipe(device: &Path) {
    let file = std::fs::File::options().read(true).write(true).open(device).expect("a device");
    let memory = RacyMemory::map(file, 0, 16 << 20, true).expect("it can be mapped");
    memory.write(0, &vec![0; memory.len()]);
}

/// A server that can be reached both ways, or by RDMA alone.
fn serve(over: Over, folder: &Path, number: u16) {
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
    let device = verbs().filter(|_| matches!(over, Over::Verbs));
    let kept = dax(number);
    if let Some(device) = &kept {
        wipe(device);
    }
    let options = ServeOptions {
        backing: kept.map_or(Backing::Memfd, Backing::Path),
        shm: device.is_none().then(|| folder.join(format!("m{number}.sock"))),
        tcp: Some(device.as_ref().map_or(([127, 0, 0, 1], 0).into(), |(_, address)| (*address, 0).into())),
        verbs: device.map(|(name, _)| name),
        token: TOKEN.to_vec(),
        ..ServeOptions::default()
    };
    let server = MemoryProcess::start(Arc::new(logic), options).expect("the server starts");
    println!("\n{READY} {}", server.address().expect("it listens"));
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
    server.end().expect("what is kept is closed");
}

fn play_client(over: Over, places: &str, names: &str, index: u32, rounds: u64) -> Result<(), String> {
    let cluster = over.connect(places)?;
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
    addresses: Vec<String>,
}

impl Pool {
    fn start(over: Over, name: &str) -> Self {
        let folder =
            std::env::temp_dir().join(format!("farwood-{}-{}-{name}", std::process::id(), over.name()));
        std::fs::create_dir_all(&folder).expect("a folder for sockets");
        let start = |number| {
            let mut server = start(&format!("server {} {} {number}", over.name(), folder.display()));
            let said = BufReader::new(server.stdout.take().expect("piped"));
            let mut lines = said.lines().map_while(Result::ok);
            let address = lines.find_map(|line| line.strip_prefix(READY).map(|rest| rest.trim().to_owned()));
            (server, address.expect("the server starts"))
        };
        let (servers, addresses) = (0..SERVERS).map(start).unzip();
        Self { folder, servers, addresses }
    }

    /// Lets as many clients as needed play these scenarios; what went wrong.
    fn play(&self, over: Over, scenarios: &[Scenario], rounds: u64) -> Vec<String> {
        let clients = scenarios.iter().map(|scenario| scenario.clients).max().expect("some scenario");
        self.play_mixed(&vec![over; clients as usize], scenarios, rounds)
    }

    /// The same, with clients that reach the servers in different ways.
    fn play_mixed(&self, over: &[Over], scenarios: &[Scenario], rounds: u64) -> Vec<String> {
        let names: Vec<_> = scenarios.iter().map(|scenario| scenario.name).collect();
        let names = names.join(",");
        let clients = u32::try_from(over.len()).expect("few");
        let children: Vec<Child> = over
            .iter()
            .enumerate()
            .map(|(index, over)| {
                let places = match over {
                    Over::Shm => self.folder.display().to_string(),
                    Over::Tcp | Over::Verbs => self.addresses.join(","),
                };
                start(&format!("client {} {places} {names} {index} {rounds}", over.name()))
            })
            .collect();
        let doomed = scenarios.iter().map(|scenario| scenario.doomed).max().unwrap_or(0);
        let ended = children.into_iter().map(|child| child.wait_with_output().expect("it ends"));
        let failed = ended.zip(0..).filter_map(|(output, index): (_, u32)| {
            let may_be_ended = index >= clients - doomed && output.status.signal() == Some(SIGKILL);
            if output.status.success() || may_be_ended {
                return None;
            }
            let said = String::from_utf8_lossy(&output.stderr);
            let why = said.lines().find_map(|line| line.strip_prefix("FAILED ")).unwrap_or(&said).to_owned();
            Some(format!("{over:?}: client {index} of {names}: {}: {why}", describe(output.status)))
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
    let usual = if dax(0).is_some() { usual.div_ceil(50) } else { usual };
    usual * factor
}

fn of_group(group: &str) -> Vec<Scenario> {
    let of_group: Vec<_> = scenarios().into_iter().filter(|s| s.group() == group).collect();
    assert!(!of_group.is_empty(), "no scenario in group {group}");
    of_group
}

/// Whether there is nothing to test here; says so.
fn is_missing(over: Over) -> bool {
    let missing = matches!(over, Over::Verbs) && verbs().is_none();
    if missing {
        println!("skipped: FARWOOD_VERBS names no RDMA device");
    }
    missing
}

fn report(failures: &[String]) {
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
}

fn run(over: Over, group: &str, usual_rounds: u64) {
    if is_missing(over) {
        return;
    }
    let (pool, scenarios) = (Pool::start(over, group), of_group(group));
    // Where verbs are slow, a scenario takes longer than those that wait for the next one have patience.
    let is_slow = matches!(over, Over::Verbs) || (matches!(over, Over::Tcp) && dax(0).is_some());
    let together = if is_slow { 1 } else { scenarios.len() };
    for scenarios in scenarios.chunks(together) {
        report(&pool.play(over, scenarios, rounds(usual_rounds)));
    }
}

/// Each group of scenarios, with its rounds over shared memory, over TCP, where a verb takes a hundred times as long, and over the
/// software device of a virtual machine, where it takes ten times as long again.
macro_rules! conformance {
    ($($group:ident, $shm:literal, $tcp:literal, $verbs:literal;)*) => {
        mod shm {
            $(#[test] fn $group() { super::run(super::Over::Shm, stringify!($group), $shm); })*
        }
        mod tcp {
            $(#[test] fn $group() { super::run(super::Over::Tcp, stringify!($group), $tcp); })*
        }
        mod verbs {
            $(#[test] fn $group() { super::run(super::Over::Verbs, stringify!($group), $verbs); })*
        }
    };
}

conformance! {
    verbs, 2000, 200, 40;
    batches, 5000, 300, 60;
    words, 15_000, 1500, 120;
    order, 4000, 400, 50;
    atomics, 50_000, 2000, 150;
    visible, 500, 200, 40;
    calls, 200, 100, 20;
    sessions, 5000, 300, 60;
    bad_input, 5000, 1000, 200;
}

/// A fenced process may be ended, so each scenario has its own.
fn fencing(over: Over) {
    if is_missing(over) {
        return;
    }
    let pool = Pool::start(over, "fencing");
    for scenario in of_group("fencing") {
        report(&pool.play(over, &[scenario], 1));
    }
}

#[test]
fn shm_fencing() {
    fencing(Over::Shm);
}

#[test]
fn tcp_fencing() {
    fencing(Over::Tcp);
}

#[test]
fn verbs_fencing() {
    fencing(Over::Verbs);
}

/// Whether a fence comes in the middle of a WRITE is a matter of luck: many of them.
fn fences_in_the_middle(over: Over, times: u32) {
    if is_missing(over) {
        return;
    }
    let pool = Pool::start(over, "middle");
    let scenario = scenarios().into_iter().find(|s| s.name == "fencing/verbs").expect("it is there");
    for _ in 0..times {
        report(&pool.play(over, &[scenario], 1));
    }
}

#[test]
fn shm_fences_in_the_middle() {
    fences_in_the_middle(Over::Shm, 20);
}

#[test]
fn tcp_fences_in_the_middle() {
    fences_in_the_middle(Over::Tcp, 20);
}

#[test]
fn verbs_fences_in_the_middle() {
    fences_in_the_middle(Over::Verbs, 5);
}

/// Clients of both kinds at once, on the same regions.
#[test]
fn shared_memory_and_tcp_are_the_same_memory() {
    let pool = Pool::start(Over::Tcp, "mixed");
    for group in ["words", "order", "atomics", "visible", "calls"] {
        for scenario in of_group(group) {
            let over: Vec<Over> =
                (0..scenario.clients).map(|n| if n % 2 == 0 { Over::Shm } else { Over::Tcp }).collect();
            report(&pool.play_mixed(&over, &[scenario], 200));
        }
    }
}

/// Whether processes meet is a matter of luck, so each mistake gets several chances.
fn catches_races(over: Over, names: &[&str], rounds: u64) {
    for name in names {
        let mistake = mistakes().into_iter().find(|s| s.name == *name).expect("no mistake of that name");
        let caught = (0..20)
            .any(|n| !Pool::start(over, &format!("mistake{n}")).play(over, &[mistake], rounds).is_empty());
        assert!(caught, "{name} went unnoticed on {over:?}");
    }
}

#[test]
fn shm_catches_races() {
    catches_races(Over::Shm, &["mistakes/flag_first", "mistakes/no_lock", "mistakes/read_and_write"], 5000);
}

/// One thread carries out the batches of all connections, so that the order within a batch does not show.
#[test]
fn tcp_catches_races() {
    catches_races(Over::Tcp, &["mistakes/no_lock", "mistakes/read_and_write"], 500);
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
