//! Several gateways on one index, over shared memory and TCP; one of them is killed.

use super::world::{Folder, Running, farwood};
use rustix::process::Signal;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// A memory server with an empty index; its URLs.
pub(crate) fn pool(temporary: &Folder) -> (Running, [String; 2]) {
    let socket = format!("{}/memory.sock", temporary.text());
    let serve =
        ["serve", "--shm", &socket, "--listen", "127.0.0.1:0", "--memory", "512MiB", "--lease-ms", "1500"];
    let server = Running::start(&serve, 1, temporary);
    let tcp = server.lines[0].rsplit(' ').next().expect("an address").to_owned();
    farwood(&["create", &tcp, "store", "--engine", "sphinx"]);
    (server, [format!("shm://{socket}"), tcp])
}

#[test]
fn gateways_see_each_other_at_once_and_survive_each_other() {
    let temporary = Folder::new();
    let (_server, [shm, tcp]) = pool(&temporary);
    let near = Running::gateway(&shm, &["--threads", "2"], &temporary);
    let far = Running::gateway(&tcp, &["--threads", "1"], &temporary);
    let (mut one, mut other) = (near.client(), far.client());
    for n in 0..100 {
        assert_eq!(one.say(&format!("SET k {n}")), "OK");
        assert_eq!(other.say("GET k"), n.to_string(), "at once");
        assert_eq!(other.say(&format!("SET l {n}")), "OK");
        assert_eq!(one.say("GET l"), n.to_string());
    }
    // Both count; the near one is killed in the middle of it.
    let (is_over, counted, unknown) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for gateway in [&near, &near, &near, &far, &far] {
            let mut client = gateway.client();
            let (is_over, counted, unknown) = (&is_over, &counted, &unknown);
            scope.spawn(move || {
                while !is_over.load(Ordering::SeqCst) {
                    match client.try_say("INCR n") {
                        Some(reply) if reply.parse::<u64>().is_ok() => counted.fetch_add(1, Ordering::SeqCst),
                        // It may have counted.
                        _ => {
                            unknown.fetch_add(1, Ordering::SeqCst);
                            return;
                        }
                    };
                }
            });
        }
        super::world::wait_for("some counting", || counted.load(Ordering::SeqCst) > 300);
        near.signal(Signal::KILL);
        let then = counted.load(Ordering::SeqCst);
        super::world::wait_for("the other to go on", || counted.load(Ordering::SeqCst) > then + 300);
        is_over.store(true, Ordering::SeqCst);
    });
    let (counted, unknown) = (counted.load(Ordering::SeqCst), unknown.load(Ordering::SeqCst));
    assert!(unknown <= 3, "only clients of the one that was killed lost their connection");
    let n: u64 = other.say("GET n").parse().expect("a number");
    assert!((counted..=counted + unknown).contains(&n), "{counted} and {unknown}, not {n}");
    assert_eq!(other.say("SET k after"), "OK");
}

#[test]
fn an_index_that_no_gateway_can_serve_is_refused() {
    let temporary = Folder::new();
    let (_server, [shm, tcp]) = pool(&temporary);
    farwood(&["create", &tcp, "fixed", "--engine", "sherman"]);
    for (index, why) in [("fixed", "takes only keys of 8 bytes"), ("absent", "there is no index 'absent'")] {
        let output = Command::new(env!("CARGO_BIN_EXE_farwood"))
            .args(["gateway", "--pool", &shm, "--index", index, "--listen", "127.0.0.1:0"])
            .output()
            .expect("it runs");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && said.contains(why), "{said}");
    }
}
