//! Servers behind an RDMA device: clients and servers that are killed, keys that are wrong, transports that do not mix. Where
//! `FARWOOD_VERBS` names no device (as in `rxe0,10.9.0.1`), only what can be said without one is tested.

use super::killed::survives_kills_of;
use super::mixed::two_processes_agree;
use super::parts::cells;
use super::world::{Over, Servers, address_in, connect, farwood, serve_at};
use farwood_fabric::clock::{MILLISECOND, SECOND};
use farwood_fabric::{Batch, Executor, FabricError, GlobalAddr, RegionId, ServerId, Session, SessionOptions};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The device to be tested; says so if there is none.
fn device() -> Option<String> {
    let named = std::env::var("FARWOOD_VERBS").ok();
    if named.is_none() {
        println!("skipped: FARWOOD_VERBS names no RDMA device");
    }
    named.map(|named| named.split(',').next().unwrap_or_default().to_owned())
}

fn word(server: u16, at: u64) -> GlobalAddr {
    GlobalAddr::new(ServerId::new(server), RegionId::LOCK, at * 8)
}

/// What a command that fails says, in one line.
fn refused(arguments: &[&str]) -> String {
    let output = farwood().args(arguments).output().expect("it runs");
    let said = String::from_utf8(output.stderr).expect("text");
    assert!(output.status.code() == Some(2) && said.lines().count() == 1, "{said}");
    said
}

#[test]
fn what_is_missing_is_said() {
    let listed = farwood().args(["devices", "--json"]).output().expect("it runs");
    if listed.status.success() {
        let devices: serde_json::Value = serde_json::from_slice(&listed.stdout).expect("JSON");
        assert!(devices[0]["name"].is_string() && devices[0]["atomics"].is_string(), "{devices}");
    } else {
        let said = refused(&["devices"]);
        assert!(said.contains("libibverbs") || said.contains("no RDMA device"), "{said}");
    }
    let serve = ["serve", "--memory", "16MiB", "--verbs", "nonesuch"];
    let said = refused(&[&serve[..], &["--listen", "127.0.0.1:0"]].concat());
    assert!(said.contains("RDMA device") || said.contains("libibverbs"), "{said}");
    let nowhere = farwood().args(serve).output().expect("it runs");
    assert!(String::from_utf8_lossy(&nowhere.stderr).contains("--listen"));
}

#[test]
fn transports_whose_atomics_do_not_mix_are_refused() {
    let Some(device) = device() else { return };
    let both = [
        "serve",
        "--memory",
        "16MiB",
        "--listen",
        "127.0.0.1:0",
        "--verbs",
        &device,
        "--shm",
        "/tmp/both.sock",
    ];
    assert!(refused(&both).contains("not both"));
    let (_server, said) = serve_at(&["--listen", "127.0.0.1:0", "--verbs", &device], &[]);
    let executor = Executor::new();
    executor.block_on(async {
        let by_tcp = connect(&format!("tcp://{}", address_in(&said))).expect("calls are possible");
        let session = Session::open(&by_tcp, SessionOptions::default()).await.expect("a session");
        let refused = session.endpoint().expect_err("verbs are not").to_string();
        assert!(refused.contains("verbs://"), "{refused}");
    });
    executor.clear();
    let (_server, said) = serve_at(&["--listen", "127.0.0.1:0"], &[]);
    executor.block_on(async {
        let by_rdma = connect(&format!("verbs://{}", address_in(&said))).expect("calls are possible");
        let session = Session::open(&by_rdma, SessionOptions::default()).await.expect("a session");
        let refused = session.endpoint().expect_err("verbs are not").to_string();
        assert!(refused.contains("--verbs"), "{refused}");
    });
    executor.clear();
}

#[test]
fn a_killed_client_is_fenced_and_the_others_go_on() {
    let Some(device) = device() else { return };
    let servers = Servers::start_on(&device, &["--lease-ms", "1000"]);
    survives_kills_of(&servers, Over::Verbs, &cells(), "cells", 3);
}

/// Two client processes of two threads on two servers; `FARWOOD_OPS` sets how many operations each thread does, for longer runs.
fn is_linearizable(name: &str, ops: u32) {
    let Some(device) = device() else { return };
    let servers = Servers::start_on(&device, &["--lease-ms", "600000"]);
    let ops = std::env::var("FARWOOD_OPS").ok().and_then(|ops| ops.parse().ok()).unwrap_or(ops);
    two_processes_agree(&servers, Over::Verbs, name, ops);
}

#[test]
fn sherman_is_linearizable() {
    is_linearizable("roomy-sherman", 4_000);
}

#[test]
fn sphinx_is_linearizable() {
    is_linearizable("roomy-sphinx", 2_000);
}

/// A server is killed while verbs are under way: everything comes back, and the other server goes on.
#[test]
fn a_killed_server_is_an_error_within_a_bounded_time() {
    let Some(device) = device() else { return };
    let mut servers = Servers::start_on(&device, &["--lease-ms", "0"]);
    let cluster = connect(&servers.place(Over::Verbs)).expect("the pool is there");
    let executor = Executor::new();
    let gone = ServerId::new(1);
    executor.block_on(async {
        let session = Session::open(&cluster, SessionOptions::default()).await.expect("a session");
        let endpoint = session.endpoint().expect("an endpoint");
        let workers: Vec<_> = (0..32)
            .map(|n| {
                let endpoint = endpoint.clone();
                endpoint.clone().spawn(async move {
                    loop {
                        if let Err(error) = endpoint.op().faa(word(1, n), 1).await {
                            return error;
                        }
                    }
                })
            })
            .collect();
        endpoint.sleep(50 * MILLISECOND).await;
        servers.processes[1].kill();
        let killed_at = endpoint.now();
        for worker in workers {
            let error = worker.await.expect("it ends");
            let expected = matches!(error, FabricError::Unknown { .. } | FabricError::Disconnected { .. });
            assert!(expected, "{error:?}");
        }
        assert!(endpoint.now() - killed_at < 10 * SECOND, "errors come within the time-out");
        let disconnected = Err(FabricError::Disconnected { server: gone });
        assert_eq!(endpoint.op().read_word(word(1, 0)).await.map(drop), disconnected);
        let mut batch = Batch::new(gone);
        batch.write_word(word(1, 0), 1);
        let failure = endpoint.op().submit(batch).await.expect_err("nobody is there");
        assert!(!failure.may_have_happened(0));
        assert_eq!(endpoint.reconnect(gone).await, disconnected);
        assert!(endpoint.op().faa(word(0, 0), 1).await.is_ok(), "the other server goes on");
        assert!(session.heartbeat(&endpoint).await.is_ok());
    });
    executor.clear();
}

/// Stands between client and server, and spoils the key of lock memory once.
fn spoil_a_key(server: String) -> (String, Arc<AtomicBool>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address").to_string();
    let spoils = Arc::new(AtomicBool::new(true));
    let still = Arc::clone(&spoils);
    pass_on(move || {
        for client in listener.incoming().flatten() {
            let (to, still) = (TcpStream::connect(&server).expect("the server"), Arc::clone(&still));
            let (mut up, mut down) =
                (client.try_clone().expect("a socket"), to.try_clone().expect("a socket"));
            pass_on(move || {
                let _ = std::io::copy(&mut up, &mut down);
                let _ = down.shutdown(std::net::Shutdown::Both);
            });
            pass_on(move || {
                let _ = admit(to, client, &still);
            });
        }
    });
    (address, spoils)
}

#[expect(clippy::disallowed_methods, reason = "sockets that others wait for")]
fn pass_on(work: impl FnOnce() + Send + 'static) {
    std::thread::spawn(work);
}

/// Passes on the greeting, the admission and the rest. An admission with queue pairs ends with four regions, each a number, an
/// address of 8 bytes and a key of 4.
fn admit(mut from: TcpStream, mut to: TcpStream, spoils: &AtomicBool) -> std::io::Result<u64> {
    const REGION_BYTES: usize = 1 + 8 + 4;
    let mut greeting = [0; 20];
    from.read_exact(&mut greeting)?;
    to.write_all(&greeting)?;
    let mut length = [0; 4];
    from.read_exact(&mut length)?;
    let mut admission = vec![0; u32::from_le_bytes(length) as usize];
    from.read_exact(&mut admission)?;
    if admission[0] == 7 && spoils.swap(false, Ordering::SeqCst) {
        let lock = admission.len() - 3 * REGION_BYTES;
        assert_eq!(admission[lock], RegionId::LOCK.get());
        admission[lock + 9] ^= 0x5a;
    }
    to.write_all(&length)?;
    to.write_all(&admission)?;
    let passed = std::io::copy(&mut from, &mut to);
    let _ = to.shutdown(std::net::Shutdown::Both);
    passed
}

#[test]
fn a_wrong_key_is_a_session_error_and_the_connection_is_made_again() {
    let Some(device) = device() else { return };
    let (_server, said) = serve_at(&["--listen", "127.0.0.1:0", "--verbs", &device], &[]);
    let (address, spoils) = spoil_a_key(address_in(&said));
    let executor = Executor::new();
    executor.block_on(async {
        let cluster = connect(&format!("verbs://{address}")).expect("the pool is there");
        let session = Session::open(&cluster, SessionOptions::default()).await.expect("a session");
        let endpoint = session.endpoint().expect("an endpoint");
        assert!(!spoils.load(Ordering::SeqCst), "a key was spoiled");
        let server = ServerId::COORDINATOR;
        let main = GlobalAddr::new(server, RegionId::MAIN, 4096);
        let op = endpoint.op();
        assert!(op.read_word(main).await.is_ok(), "the other keys are right");
        let mut batch = Batch::new(server);
        batch.write_word(main, 1);
        batch.faa(word(0, 0), 1);
        let failure = op.submit(batch).await.expect_err("the server's device refuses");
        assert!(
            failure.error == FabricError::Unknown { server } && failure.may_have_happened(1),
            "{failure:?}"
        );
        let after = op.read_word(main).await;
        assert_eq!(after, Err(FabricError::Disconnected { server }));
        endpoint.reconnect(server).await.expect("the connection is made again");
        assert_eq!(op.faa(word(0, 0), 1).await, Ok(0), "nothing landed");
    });
    executor.clear();
}
