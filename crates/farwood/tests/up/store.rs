//! One command gives a store.

use super::world::{Folder, Running, is_alive, kill, wait_for};
use rustix::process::Signal;
use std::os::unix::fs::FileExt;

/// The processes that `up` names as its memory servers.
fn servers(up: &Running) -> Vec<u32> {
    let line = up.lines.iter().find(|line| line.contains("memory ")).expect("it names its servers");
    let inside = line.split("processes ").nth(1).and_then(|rest| rest.split(')').next()).expect("processes");
    inside.split(", ").map(|number| number.parse().expect("a process")).collect()
}

/// What a new user does: start, set, look, Ctrl-C.
#[test]
fn a_new_users_path_and_nothing_is_left_behind() {
    let temporary = Folder::new();
    let mut up = Running::up(&[], &temporary);
    let processes = servers(&up);
    assert_eq!(processes.len(), 2);
    let mut client = up.client();
    assert_eq!(client.say("set a 1"), "OK");
    assert_eq!(client.say("set ab 2"), "OK");
    assert_eq!(client.say("RANGE - + LIMIT 10"), "a 1 ab 2");
    assert_eq!(client.say("INCR a"), "2");
    assert!(client.say("INFO memory").contains("index_store="));
    up.signal(Signal::INT);
    assert!(up.wait().success());
    let said = up.complaints();
    assert!(!said.contains("WARN") && !said.contains("ERROR"), "{said}");
    assert_eq!(client.try_say("PING"), None);
    assert!(!processes.iter().any(|process| is_alive(*process)), "servers have ended");
    assert_eq!(temporary.names(), [] as [&str; 0]);
}

/// However it ends, no folder stays; if it was killed, until the next one starts.
#[test]
fn no_ending_leaves_a_folder() {
    let temporary = Folder::new();
    let start = || Running::up(&["--servers", "1"], &temporary);
    for signal in [Signal::TERM, Signal::HUP] {
        let mut up = start();
        assert_eq!(temporary.names().len(), 1);
        up.signal(signal);
        assert!(up.wait().success());
        assert_eq!(temporary.names(), [] as [&str; 0], "{signal:?}");
    }
    let running = start();
    let taken = format!("127.0.0.1:{}", running.port);
    let mut failed = Running::start(&["up", "--memory", "64MiB", "--listen", &taken], 0, &temporary);
    assert_eq!(failed.wait().code(), Some(2));
    assert_eq!(temporary.names().len(), 1, "that of the one that runs");
    let processes = servers(&running);
    kill(processes[0], Signal::STOP);
    // It is killed, and its server does not notice.
    drop(running);
    let left = temporary.names();
    assert_eq!(left.len(), 1);
    let mut next = start();
    assert_eq!(temporary.names().len(), 1);
    assert_ne!(temporary.names(), left);
    kill(processes[0], Signal::KILL);
    next.signal(Signal::INT);
    assert!(next.wait().success());
    assert_eq!(temporary.names(), [] as [&str; 0]);
}

/// A memory server that stands still cannot keep `up` from ending.
#[test]
fn a_stopped_server_is_ended_too() {
    let temporary = Folder::new();
    let mut up = Running::up(&["--servers", "2"], &temporary);
    let processes = servers(&up);
    kill(processes[1], Signal::STOP);
    up.signal(Signal::INT);
    up.wait();
    assert!(!processes.iter().any(|process| is_alive(*process)), "servers have ended");
    assert_eq!(temporary.names(), [] as [&str; 0]);
}

#[test]
fn what_a_path_keeps_is_there_again() {
    let (temporary, kept) = (Folder::new(), Folder::new());
    let arguments = ["--path", kept.text(), "--servers", "3"];
    let mut up = Running::up(&arguments, &temporary);
    let mut client = up.client();
    for n in 0..200 {
        assert_eq!(client.say(&format!("set key:{n:03} {n}")), "OK");
    }
    up.signal(Signal::TERM);
    assert!(up.wait().success());
    // Again, with what was kept; then it cannot be another size.
    let mut again = Running::start(&["up", "--path", kept.text(), "--listen", "127.0.0.1:0"], 5, &temporary);
    assert!(
        again.lines[1].contains("3 servers") && again.lines[2].contains("as it was left"),
        "{:?}",
        again.lines
    );
    again.port = again.lines[3]
        .split("-p ")
        .nth(1)
        .and_then(|rest| rest.split(' ').next()?.parse().ok())
        .expect("a port");
    let mut client = again.client();
    assert_eq!(client.say("DBSIZE"), "200");
    assert_eq!(client.say("GET key:123"), "123");
    again.signal(Signal::INT);
    assert!(again.wait().success());
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_farwood"))
        .args(["up", "--path", kept.text(), "--servers", "2"])
        .output()
        .expect("it runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && said.contains("cannot be changed"), "{said}");
}

/// The process that serves a memory server's socket now: a child of `up`.
fn server_now(up: &Running, number: usize) -> Option<u32> {
    let is_it = |process: &u32| {
        let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
        let parent = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(1)?.parse().ok());
        let line = std::fs::read_to_string(format!("/proc/{process}/cmdline")).unwrap_or_default();
        parent == Some(up.id()) && line.contains(&format!("--server\0{number}\0"))
    };
    let names = std::fs::read_dir("/proc").expect("it is there").flatten();
    let mut numbers = names.filter_map(|name| name.file_name().to_str()?.parse().ok());
    numbers.find(is_it)
}

/// A memory server that is killed is started again on the memory it had, with and without a folder: clients go on.
#[test]
fn a_server_that_dies_is_started_again_and_nobody_loses_anything() {
    let (temporary, kept) = (Folder::new(), Folder::new());
    for arguments in [&[][..], &["--path", kept.text()]] {
        let mut up = Running::up(arguments, &temporary);
        let mut client = up.client();
        for n in 0..200 {
            assert_eq!(client.say(&format!("set key:{n:03} {n}")), "OK");
        }
        for (kill_nr, number) in [1, 0, 1].into_iter().enumerate() {
            let mut process = None;
            wait_for("the server", || {
                process = server_now(&up, number);
                process.is_some()
            });
            let process = process.expect("it is there");
            kill(process, Signal::KILL);
            wait_for("its end", || !is_alive(process));
            for n in 0..200 {
                assert_eq!(client.say(&format!("GET key:{n:03}")), n.to_string(), "after {kill_nr} kills");
                assert_eq!(client.say(&format!("SET new:{kill_nr}:{n} {n}")), "OK");
            }
            wait_for("its successor", || server_now(&up, number).is_some_and(|now| now != process));
        }
        assert_eq!(client.say("DBSIZE"), "800");
        up.signal(Signal::INT);
        assert!(up.wait().success());
        let said = up.complaints();
        let told: Vec<_> = said.lines().filter(|line| line.contains("was started again")).collect();
        assert!(told.len() == 3 && told[0].contains("memory server 1 has ended (signal: 9"), "{said}");
        assert!(told[0].ends_with("once so far") && told[2].ends_with("2 times so far"), "{said}");
        assert!(!said.contains("fenced") && !said.contains("joined the pool again"), "{said}");
        assert_eq!(temporary.names(), [] as [&str; 0]);
    }
}

/// One whose memory is of no use any more is not started for ever.
#[test]
fn a_server_that_cannot_live_on_its_memory_is_named_and_everything_ends() {
    let (temporary, kept) = (Folder::new(), Folder::new());
    let mut up = Running::up(&["--path", kept.text()], &temporary);
    let processes = servers(&up);
    // Where its tables begin.
    let memory =
        std::fs::File::options().write(true).open(kept.0.join("m1.memory")).expect("it is kept there");
    memory.write_all_at(b"nonsense", 2 << 20).expect("it is written");
    kill(processes[1], Signal::KILL);
    assert_eq!(up.wait().code(), Some(2));
    let said = up.complaints();
    assert!(
        said.contains("memory server 1 cannot be started again") && said.contains("not Farwood's"),
        "{said}"
    );
    wait_for("the other server to end", || !is_alive(processes[0]));
    assert_eq!(temporary.names(), [] as [&str; 0]);
}

#[test]
fn engines_with_keys_of_one_length_are_refused() {
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_farwood"))
        .args(["up", "--engine", "sherman"])
        .output()
        .expect("it runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && said.contains("sphinx takes any"), "{said}");
}
