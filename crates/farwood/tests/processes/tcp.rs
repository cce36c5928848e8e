//! Servers behind TCP: lines that say what is wrong, servers that die and come back, crowds that say nothing.

use super::world::{Folder, Over, Servers, address_in, connect, farwood, serve_at};
use farwood_fabric::clock::{MILLISECOND, SECOND};
use farwood_fabric::transport::tcp::{TcpCluster, TcpOptions, VERSION};
use farwood_fabric::{Batch, Executor, FabricError, GlobalAddr, RegionId, ServerId, Session, SessionOptions};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

const HERE: [&str; 2] = ["--listen", "127.0.0.1:0"];

fn word(server: u16, at: u64) -> GlobalAddr {
    GlobalAddr::new(ServerId::new(server), RegionId::LOCK, at * 8)
}

/// Why a client cannot connect, in one line that names the address.
fn unreachable(address: &str, token: &[u8]) -> String {
    let options = TcpOptions { token: token.to_vec(), patience: Duration::from_millis(500) };
    let refused = TcpCluster::connect(&[address.to_owned()], &options);
    let said = refused.expect_err("it cannot connect").to_string();
    assert!(said.lines().count() == 1 && said.contains(address), "{said}");
    said
}

/// Why a server does not start.
fn refused(arguments: &[&str]) -> String {
    let output = farwood().args(["serve", "--memory", "16MiB"]).args(arguments).output().expect("it runs");
    let said = String::from_utf8(output.stderr).expect("text");
    assert!(output.status.code() == Some(2) && output.stdout.is_empty(), "{said}");
    said
}

#[test]
fn addresses_that_cannot_be_used() {
    let said = refused(&["--listen", "0.0.0.0:0"]);
    assert!(said.lines().count() == 1 && said.contains("--token-file"), "{said}");
    assert!(refused(&["--listen", "nonsense"]).contains("an address and a port"));
    assert!(refused(&[]).contains("--shm"), "it has to listen somewhere");
    let (server, said) = serve_at(&HERE, &[]);
    let address = address_in(&said);
    assert!(refused(&["--listen", &address]).contains("already listens"));
    drop(server);
    assert!(unreachable(&address, b"").contains("no server listens"));
    assert!(unreachable("127.0.0.1", b"").contains("host:port"));
}

#[test]
fn tokens_and_strangers() {
    let folder = Folder::new();
    let token = folder.0.join("token");
    std::fs::write(&token, "open sesame\n").unwrap();
    let (_server, said) = serve_at(&["--listen", "0.0.0.0:0"], &["--token-file", token.to_str().unwrap()]);
    let address = address_in(&said).replace("0.0.0.0", "127.0.0.1");
    assert!(unreachable(&address, b"").contains("the token is wrong"));
    assert!(unreachable(&address, b"open says me").contains("the token is wrong"));
    let right = TcpOptions { token: b"open sesame".to_vec(), ..TcpOptions::default() };
    assert!(TcpCluster::connect(std::slice::from_ref(&address), &right).is_ok());
    let mut stranger = TcpStream::connect(&address).unwrap();
    stranger.write_all(b"GET / HTTP/1.1\r\n\r\nHost: somewhere\r\n").unwrap();
    let mut said = Vec::new();
    let _ = stranger.read_to_end(&mut said);
    assert!(String::from_utf8_lossy(&said).contains("this is a Farwood memory server"));
    assert!(TcpCluster::connect(&[address], &right).is_ok(), "others are still served");
}

#[test]
fn another_version_and_no_answer() {
    let next = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = next.local_addr().unwrap().to_string();
    assert!(unreachable(&address, b"").contains("does not answer"));
    let mut greeting = b"FARWOOD\x02".to_vec();
    greeting.extend((VERSION + 1).to_le_bytes());
    greeting.extend([0; 8]);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // The first one has given up; it is still in the queue.
            for _ in 0..2 {
                let (mut client, _) = next.accept().unwrap();
                let _ = client.write_all(&greeting);
                let _ = client.read(&mut [0; 64]);
            }
        });
        let said = unreachable(&address, b"");
        let versions =
            format!("speaks version {} of the tcp protocol and this farwood version {VERSION}", VERSION + 1);
        assert!(said.contains(&versions), "{said}");
    });
    // A client of the next version says hello.
    let (_server, said) = serve_at(&HERE, &[]);
    let mut client = TcpStream::connect(address_in(&said)).unwrap();
    let mut hello = [0; 20];
    client.read_exact(&mut hello).unwrap();
    hello[8..12].copy_from_slice(&(VERSION + 1).to_le_bytes());
    client.write_all(&hello).unwrap();
    let mut said = Vec::new();
    let _ = client.read_to_end(&mut said);
    assert!(String::from_utf8_lossy(&said).contains("use the same farwood on both sides"));
}

/// A server is killed while verbs are under way; everything comes back, and when it is there again, so do its clients.
#[test]
fn a_killed_server_is_an_error_within_a_bounded_time() {
    let mut servers = Servers::start(&["--lease-ms", "0"]);
    let cluster = connect(&servers.place(Over::Tcp)).expect("the pool is there");
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
        endpoint.sleep(20 * MILLISECOND).await;
        servers.processes[1].kill();
        for worker in workers {
            let error = worker.await.expect("it ends");
            let expected = matches!(error, FabricError::Unknown { .. } | FabricError::Disconnected { .. });
            assert!(expected, "{error:?}");
        }
        let disconnected = Err(FabricError::Disconnected { server: gone });
        assert_eq!(endpoint.op().read_word(word(1, 0)).await.map(drop), disconnected);
        let mut batch = Batch::new(gone);
        batch.write_word(word(1, 0), 1);
        let failure = endpoint.op().submit(batch).await.expect_err("nobody is there");
        assert!(!failure.may_have_happened(0));
        assert_eq!(endpoint.reconnect(gone).await, disconnected);
        let hello = farwood_fabric::control::Request::Hello {};
        assert!(endpoint.op().control(gone, &hello).await.is_err());
        // The other server goes on.
        assert!(endpoint.op().faa(word(0, 0), 1).await.is_ok());
        assert!(session.heartbeat(&endpoint).await.is_ok());
        // One that comes back without its memory is another one.
        let pool = ["--servers", "2", "--pool", "0123456789abcdef0123456789abcdef", "--server", "1"];
        endpoint.sleep(SECOND).await;
        let (server, _) = serve_at(&["--listen", &servers.addresses[1]], &pool);
        servers.processes[1] = server;
        assert_eq!(endpoint.reconnect(gone).await, Err(FabricError::ServerLost { server: gone }));
        assert!(connect(&servers.place(Over::Tcp)).is_ok(), "those who come anew can use it");
    });
    executor.clear();
}

/// A server that is stopped answers nobody, but nobody waits for ever; when it goes on, a reconnect makes sure of what was.
#[test]
fn a_stopped_server_is_given_up_and_taken_up_again() {
    let servers = Servers::start(&["--lease-ms", "0"]);
    let options = TcpOptions { patience: Duration::from_millis(200), ..TcpOptions::default() };
    let cluster = TcpCluster::connect(&servers.addresses, &options).expect("the pool is there");
    let executor = Executor::new();
    executor.block_on(async {
        let session = Session::open(&cluster, SessionOptions::default()).await.expect("a session");
        let endpoint = session.endpoint().expect("an endpoint");
        endpoint.op().write_word(word(1, 0), 1).await.expect("it is there");
        servers.processes[1].stop();
        let unknown = endpoint.op().write_word(word(1, 0), 2).await;
        assert_eq!(unknown, Err(FabricError::Unknown { server: ServerId::new(1) }));
        assert!(endpoint.reconnect(ServerId::new(1)).await.is_err());
        assert!(endpoint.op().faa(word(0, 0), 1).await.is_ok(), "the other server goes on");
        servers.processes[1].signal(rustix::process::Signal::CONT);
        let deadline = endpoint.now() + 20 * SECOND;
        while endpoint.reconnect(ServerId::new(1)).await.is_err() {
            assert!(endpoint.now() < deadline, "it does not come back");
        }
        // It may have happened before, but nothing of it happens from now on.
        let seen = endpoint.op().read_word(word(1, 0)).await.expect("it is there");
        assert!(seen == 1 || seen == 2);
        endpoint.op().write_word(word(1, 0), 3).await.expect("it is there");
        endpoint.sleep(50 * MILLISECOND).await;
        assert_eq!(endpoint.op().read_word(word(1, 0)).await, Ok(3));
    });
    executor.clear();
}

/// Crowds that connect and say nothing, or half of it, do not keep those out who do.
#[test]
fn half_open_connections_keep_nobody_out() {
    const CROWD: usize = 10_000;
    let (_server, said) = serve_at(&HERE, &["--lease-ms", "0"]);
    let address = address_in(&said);
    let cluster = connect(&format!("tcp://{address}")).expect("it is there");
    let executor = Executor::new();
    executor.block_on(async {
        let session = Session::open(&cluster, SessionOptions::default()).await.expect("a session");
        let endpoint = session.endpoint().expect("an endpoint");
        let mut crowd = Vec::new();
        for n in 0..CROWD {
            // As many as this process may have open.
            let Ok(mut stranger) = TcpStream::connect(&address) else { break };
            if n % 2 == 0 {
                let _ = stranger.write_all(b"FARWOOD\x02\x01\0");
            }
            crowd.push(stranger);
            if n % 100 == 0 {
                endpoint.op().faa(word(0, 0), 1).await.expect("it is served");
            }
            if n % 1000 == 999 {
                let newcomer = Session::open(&cluster, SessionOptions::default()).await.expect("let in");
                newcomer.endpoint().expect("an endpoint");
            }
        }
        println!("{} connections that said nothing, or half of it", crowd.len());
        assert!(crowd.len() > 500, "only {} connections could be made", crowd.len());
        let newcomer = connect(&format!("tcp://{address}")).expect("it lets others in");
        assert!(Session::open(&newcomer, SessionOptions::default()).await.is_ok());
    });
    executor.clear();
}
