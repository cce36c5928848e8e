//! `farwood create`, `put`, `get`, `del`, `scan`, `check`, `drop`, `list` on a pool that runs, as typed by hand.

use super::parts::{TREES, cells};
use super::world::{Over, Process, Servers, client, connect, farwood, nap, wait_for};
use farwood_fabric::{Executor, SessionOptions};
use farwood_index::{AnyEngine, Client, Engine, IndexError, Pool};
use std::collections::BTreeMap;
use std::io::Write;
use std::process::Stdio;
use std::time::Duration;

struct Shell {
    url: String,
}

impl Shell {
    /// What a command prints, and its exit code.
    fn run(&self, command: &str, arguments: &[&str]) -> (String, Option<i32>) {
        let output = farwood().args([command, &self.url]).args(arguments).output().expect("it runs");
        let mut said = String::from_utf8(output.stdout).expect("text");
        said += &String::from_utf8(output.stderr).expect("text");
        (said, output.status.code())
    }

    #[track_caller]
    fn expect(&self, command: &str, arguments: &[&str], said: &str, code: i32) {
        assert_eq!(self.run(command, arguments), (said.to_owned(), Some(code)), "{command} {arguments:?}");
    }

    #[track_caller]
    fn refused(&self, command: &str, arguments: &[&str], why: &str) {
        let (said, code) = self.run(command, arguments);
        assert!(code == Some(2) && said.contains(why) && said.lines().count() == 1, "{said}");
    }
}

/// Pairs are put many at a time, and a key is there once: as the last line has it.
#[test]
fn the_last_line_of_a_key_is_what_a_load_leaves() {
    const KEYS: u64 = 2_000;
    let servers = Servers::start(&["--lease-ms", "2000"]);
    let shell = Shell { url: servers.place(Over::Tcp) };
    shell.expect("create", &["names", "--engine", "sphinx"], "", 0);
    let scattered = |n: u64| n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
    let lines: Vec<String> = (0..20_000).map(|n| format!("k{},{n}", scattered(n * n) % KEYS)).collect();
    let mut load =
        farwood().args(["load", &shell.url, "names"]).stdin(Stdio::piped()).spawn().expect("it runs");
    let mut input = load.stdin.take().expect("piped");
    input.write_all(lines.join("\n").as_bytes()).expect("it reads");
    drop(input);
    assert!(load.wait().expect("it ends").success());
    let mut last: BTreeMap<&str, &str> = lines.iter().filter_map(|line| line.split_once(',')).collect();
    let (said, _) = shell.run("scan", &["names", "--limit", "10000"]);
    for (key, value) in said.lines().filter_map(|line| line.split_once('\t')) {
        assert_eq!(last.remove(key), Some(value), "{key}");
    }
    assert!(last.is_empty(), "{last:?}");
}

#[test]
fn an_index_by_hand() {
    let servers = Servers::start(&["--lease-ms", "2000"]);
    for over in [Over::Tcp, Over::Shm] {
        let place = servers.place(over);
        let url = if over == Over::Tcp { place } else { format!("shm://{place}") };
        let shell = Shell { url };
        shell.expect("list", &[], "", 0);
        shell.expect("create", &["numbers"], "", 0);
        shell.refused("create", &["numbers"], "exists");
        for key in ["10", "9", "18446744073709551615", "0"] {
            shell.expect("put", &["numbers", key, &format!("v{key:.6}")], "", 0);
        }
        shell.expect("get", &["numbers", "9"], "v9\n", 0);
        shell.expect("get", &["numbers", "8"], "", 1);
        shell.expect("put", &["numbers", "9", "other", "--if-absent"], "", 1);
        shell.expect("scan", &["numbers"], "0\tv0\n9\tv9\n10\tv10\n18446744073709551615\tv184467\n", 0);
        shell.expect("scan", &["numbers", "--from", "1", "--to", "10"], "9\tv9\n", 0);
        shell.expect(
            "scan",
            &["numbers", "--reverse", "--limit", "2"],
            "18446744073709551615\tv184467\n10\tv10\n",
            0,
        );
        shell.expect("del", &["numbers", "9"], "", 0);
        shell.expect("del", &["numbers", "9"], "", 1);
        shell.expect("get", &["numbers", "10", "--values", "hex"], "7631300000000000\n", 0);
        let (said, code) = shell.run("check", &["numbers"]);
        assert!(code == Some(0) && said.contains("is whole: 1 objects"), "{said}");
        shell.expect("create", &["names", "--key-bytes", "20", "--value-bytes", "40"], "", 0);
        shell.expect("put", &["names", "Ångström", "a unit of length"], "", 0);
        shell.expect("scan", &["names"], "Ångström\ta unit of length\n", 0);
        shell.expect("list", &[], "numbers\nnames\n", 0);
        shell.refused("put", &["names", "a name of more than 20 bytes", "x"], "here they have 20");
        shell.refused("put", &["numbers", "ten", "x"], "no number");
        shell.refused("get", &["missing", "1"], "there is no index 'missing'");
        shell.refused("create", &["x", "--engine", "bplus"], "there is no engine 'bplus'");
        shell.refused("create", &["x", "--key-bytes", "0"], "a key of 0 bytes");
        for index in ["numbers", "names"] {
            shell.expect("drop", &[index], "", 0);
        }
        shell.expect("list", &[], "", 0);
    }
    let nowhere = Shell { url: "tcp://127.0.0.1:1".to_owned() };
    nowhere.refused("get", &["numbers", "1"], "no server listens");
    Shell { url: "nowhere".to_owned() }.refused("list", &[], "names no servers");
}

/// A pool with an index of each engine.
fn trees(servers: &Servers) -> (String, Shell) {
    let place = servers.place(Over::Tcp);
    let shell = Shell { url: place.clone() };
    for (name, engine) in TREES {
        shell.expect("create", &[name, "--engine", engine], "", 0);
    }
    (place, shell)
}

/// Who is killed holds locks, and has a lease for a moment: a check waits for his recovery, or does it.
#[test]
fn a_check_recovers_the_dead_first() {
    let servers = Servers::start(&["--lease-ms", "5000"]);
    let (place, shell) = trees(&servers);
    for round in 0..3 {
        let mut clients = [client("trees", &place), client("trees", &place)];
        nap(Duration::from_millis(50));
        clients.iter_mut().for_each(Process::kill);
        for (name, _) in TREES {
            let (said, code) = shell.run("check", &[name]);
            assert!(code == Some(0) && said.contains("is whole"), "round {round}: {said}");
        }
    }
}

/// The binary does not know the engine of one index, so it cannot recover anybody; what the dead hold is not damage.
#[test]
fn a_check_says_who_is_dead_and_not_recovered() {
    let servers = Servers::start(&["--lease-ms", "1000"]);
    let (place, shell) = trees(&servers);
    let executor = Executor::new();
    executor.block_on(async {
        let cluster = connect(&place).expect("the pool is there");
        let (pool, endpoint) = Pool::join_alive(&cluster, SessionOptions::default()).await.expect("joins");
        cells().create(&pool, &endpoint, "strange").await.expect("creates");
        pool.leave(&endpoint).await.expect("leaves");
    });
    executor.clear();
    // It may be that none of them holds a lock when they die.
    let is_told = (0..5).any(|_| {
        let mut clients = [client("trees", &place), client("trees", &place)];
        nap(Duration::from_millis(50));
        clients.iter_mut().for_each(Process::kill);
        let (said, code) = shell.run("check", &["one"]);
        assert!(!said.contains("damaged"), "{said}");
        code == Some(2) && said.contains("dead and not recovered yet")
    });
    assert!(is_told);
}

/// A client whose server dies says so, whatever it is asked, and ends; nothing hangs.
#[test]
fn a_client_of_a_killed_server_is_told() {
    for over in [Over::Tcp, Over::Shm] {
        // Mapped memory is gone in the middle of operations; what those held is waited for, for some leases.
        let mut servers = Servers::start(&["--lease-ms", "2000"]);
        let place = servers.place(over);
        let url = if over == Over::Tcp { place } else { format!("shm://{place}") };
        let client = Client::connect(&url, b"", 2).expect("the pool is there");
        let engine = AnyEngine::named("sherman", 8, 8).expect("it exists");
        let index = client.create("lost", &engine).wait().expect("created");
        for n in 0..2000u64 {
            index.put(n.to_be_bytes(), [1; 8]).wait().expect("put");
        }
        servers.processes[1].kill();
        // Leaves are on both servers, so of many keys some are on the one that is gone.
        let mut errors = Vec::new();
        wait_for("an error: half of the tree is gone", || {
            // Whoever maps the memory goes on for a while: another process may take it over.
            let answers: Vec<_> = (0..2000u64).map(|n| index.put(n.to_be_bytes(), [2; 8])).collect();
            errors.extend(answers.into_iter().filter_map(|put| put.wait().err()));
            !errors.is_empty()
        });
        let is_told = |error: &IndexError| error.is_unknown() || matches!(error, IndexError::Fabric(_));
        assert!(errors.iter().all(is_told), "{over:?}: {errors:?}");
        let said = errors.iter().map(ToString::to_string).find(|said| said.contains("server"));
        assert!(said.is_some(), "{over:?}: nobody says what is wrong: {errors:?}");
        drop((index, client));
    }
}
