//! What a wrong client does to the port of a memory server that runs: it leaves messages half said, opens lines and says nothing, does not
//! read; and what the pool says of a server that came back empty.

use super::evict::sessions;
use super::frames::{line, resident_kib};
use super::parts::{INDEX, cells};
use super::status::{parse, status};
use super::world::{Folder, Over, Process, Servers, address_in, connect, farwood, serve_at, wait_for};
use farwood_fabric::control::Request;
use farwood_fabric::{Executor, GlobalAddr, RegionId, ServerId, Session, SessionOptions};
use farwood_index::{Engine, Pool};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Stdio;
use std::time::Duration;

/// A line on which somebody was let in and has said nothing yet.
fn open_line(address: &str) -> TcpStream {
    let mut socket = TcpStream::connect(address).expect("it listens");
    socket.set_nodelay(true).expect("a socket");
    socket.set_read_timeout(Some(Duration::from_secs(5))).expect("a socket");
    socket.set_write_timeout(Some(Duration::from_secs(5))).expect("a socket");
    socket.read_exact(&mut [0; 20]).expect("a greeting");
    socket.write_all(&line()).expect("said");
    socket.read_exact(&mut [0; 4]).expect("an answer");
    socket
}

fn on_a_server(work: impl AsyncFnOnce(Process, String, Session)) {
    let (server, said) = serve_at(&["--listen", "127.0.0.1:0"], &["--lease-ms", "0"]);
    let address = address_in(&said);
    let cluster = connect(&format!("tcp://{address}")).expect("it is there");
    let executor = Executor::new();
    executor.block_on(async {
        let session = Session::open(&cluster, SessionOptions::default()).await.expect("a session");
        work(server, address, session).await;
    });
    executor.clear();
}

/// 40 of them held 600 MB.
#[test]
fn messages_that_are_half_said_do_not_fill_a_server() {
    on_a_server(async |server, address, session| {
        let endpoint = session.endpoint().expect("an endpoint");
        let before = resident_kib(&server);
        // 16 MiB are announced, all but the last byte comes.
        let mut message = (16u32 << 20).to_le_bytes().to_vec();
        message.resize(4 + (16 << 20) - 1, 7);
        let lines: Vec<TcpStream> = (0..40)
            .map(|_| {
                let mut line = open_line(&address);
                // It may be hung up on.
                let _ = line.write_all(&message);
                line
            })
            .collect();
        session.list(&endpoint.op()).await.expect("others are served");
        let after = resident_kib(&server);
        println!("{before} KiB, with {} half messages {after} KiB", lines.len());
        // 64 MiB are messages; an allocator that has moved them as they grew holds some times that.
        assert!(after < before + (256 << 10), "it grew from {before} KiB to {after} KiB");
        drop(lines);
        let word = GlobalAddr::new(ServerId::COORDINATOR, RegionId::LOCK, 0);
        endpoint.op().faa(word, 1).await.expect("others are served");
    });
}

/// 1,024 of them locked everybody out.
#[test]
fn lines_that_say_nothing_lock_nobody_out() {
    on_a_server(async |_server, address, session| {
        let endpoint = session.endpoint().expect("an endpoint");
        let mut idle: Vec<TcpStream> = (0..1100).map(|_| open_line(&address)).collect();
        session.list(&endpoint.op()).await.expect("who has a session keeps its line");
        let cluster = connect(&format!("tcp://{address}")).expect("there is a place for newcomers");
        let another = Session::open(&cluster, SessionOptions::default()).await.expect("a session");
        idle.extend((0..300).map(|_| open_line(&address)));
        // Those that have not said who they are take no place from anybody either.
        let strangers: Vec<TcpStream> =
            (0..600).map(|_| TcpStream::connect(&address).expect("it listens")).collect();
        connect(&format!("tcp://{address}")).expect("there is a place for newcomers");
        let endpoints = [endpoint, another.endpoint().expect("an endpoint")];
        for (endpoint, session) in endpoints.iter().zip([&session, &another]) {
            assert_eq!(session.list(&endpoint.op()).await.expect("it is served").len(), 2);
        }
        drop((idle, strangers));
    });
}

/// Whoever asks for much and reads nothing is not read from.
#[test]
fn answers_that_nobody_reads_do_not_fill_a_server() {
    on_a_server(async |server, address, session| {
        let endpoint = session.endpoint().expect("an endpoint");
        let before = resident_kib(&server);
        // How does the server do? Some 300 bytes for 13.
        let question = [&9u32.to_le_bytes()[..], &[6], &7u64.to_le_bytes()].concat();
        let questions = question.repeat(20_000);
        let lines: Vec<TcpStream> = (0..40)
            .map(|_| {
                let mut line = open_line(&address);
                line.set_write_timeout(Some(Duration::from_millis(100))).expect("a socket");
                while line.write_all(&questions).is_ok() {}
                line
            })
            .collect();
        session.list(&endpoint.op()).await.expect("others are served");
        let after = resident_kib(&server);
        println!("{before} KiB, with {} who do not read {after} KiB", lines.len());
        assert!(after < before + (160 << 10), "it grew from {before} KiB to {after} KiB");
    });
}

/// Systems let a process have few files unless it asks, and one session's connections were enough to use them up.
#[test]
fn a_server_asks_for_as_many_files_as_it_may_need() {
    let mut child = std::process::Command::new("sh")
        .args(["-c", "ulimit -Sn 128; exec \"$@\"", "sh"])
        .arg(farwood().get_program())
        .args(["serve", "--memory", "64MiB", "--listen", "127.0.0.1:0"])
        .stdout(Stdio::piped())
        .spawn()
        .expect("a server starts");
    child.stdout.as_mut().expect("piped").read_exact(&mut [0; 13]).expect("it says where");
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", child.id())).expect("it runs");
    let _ = child.kill();
    let _ = child.wait();
    let files = limits.lines().find(|line| line.starts_with("Max open files")).expect("it is there");
    let mut limits = files.split_whitespace().skip(3);
    let limits: [Option<u64>; 2] = std::array::from_fn(|_| limits.next().and_then(|n| n.parse().ok()));
    let [Some(soft), hard] = limits else { return };
    assert!(soft >= hard.unwrap_or(u64::MAX).min(10_000), "{files}");
}

#[test]
fn an_eviction_is_logged_with_who_asked_for_it() {
    let folder = Folder::new();
    let log = folder.0.join("log");
    let mut child = farwood()
        .args(["serve", "--memory", "64MiB", "--listen", "127.0.0.1:0", "--lease-ms", "600000"])
        .stdout(Stdio::piped())
        .stderr(std::fs::File::create(&log).expect("a file"))
        .spawn()
        .expect("a server starts");
    let mut said = vec![0; 200];
    let length = child.stdout.as_mut().expect("piped").read(&mut said).expect("it says where");
    let url = format!("tcp://{}", address_in(&String::from_utf8_lossy(&said[..length])));
    let executor = Executor::new();
    let victim = executor.block_on(async {
        let cluster = connect(&url).expect("it is there");
        Session::open(&cluster, SessionOptions::default()).await.expect("a session").id()
    });
    assert_eq!(sessions(&url).len(), 1);
    let evicted = farwood().args(["evict", &url, &victim.get().to_string()]).output().expect("it runs");
    assert!(evicted.status.success(), "{evicted:?}");
    let read = || std::fs::read_to_string(&log).expect("text");
    wait_for("the log", || read().contains("was evicted by session"));
    assert!(read().contains(" at 127.0.0.1:"), "{}", read());
    executor.clear();
    let _ = child.kill();
    let _ = child.wait();
}

/// Starts the server of that number again at the place it had, with empty memory.
fn restart_empty(servers: &mut Servers, number: usize) {
    servers.processes[number].kill();
    let pool = ["--servers", "2", "--pool", "0123456789abcdef0123456789abcdef", "--lease-ms", "2000"];
    let number_text = number.to_string();
    let arguments = [&pool[..], &["--server", &number_text]].concat();
    let address = servers.addresses[number].clone();
    servers.processes[number] = serve_at(&["--listen", &address], &arguments).0;
}

fn said_by(arguments: &[&str]) -> String {
    let output = farwood().args(arguments).output().expect("it runs");
    String::from_utf8([output.stdout, output.stderr].concat()).expect("text")
}

#[test]
fn a_pool_says_which_server_came_back_empty() {
    let mut servers = Servers::start(&["--lease-ms", "2000"]);
    let place = servers.place(Over::Tcp);
    let executor = Executor::new();
    executor.block_on(async {
        let pool =
            Pool::join(&connect(&place).expect("a pool"), SessionOptions::default()).await.expect("joins");
        let endpoint = pool.session().endpoint().expect("an endpoint");
        assert!(pool.session().emptied().is_empty());
        cells().create(&pool, &endpoint, INDEX).await.expect("creates");
        pool.leave(&endpoint).await.expect("leaves");
    });
    executor.clear();
    assert_eq!(parse(&status(&[&place, "--json"]).0)[1]["status"]["lost_below"], 0);
    restart_empty(&mut servers, 1);
    // Whoever joins hears of it, the first and all others, until the index is dropped.
    for _ in 0..2 {
        let said = said_by(&["list", &place]);
        assert!(said.contains("server m1 came back with empty memory"), "{said}");
        assert!(
            said.contains(&format!("'{INDEX}'")) && said.contains("drop the index and load it again"),
            "{said}"
        );
    }
    let said = parse(&status(&[&place, "--json"]).0);
    assert_eq!((&said[0]["status"]["lost_below"], &said[1]["status"]["lost_below"]), (&0.into(), &2.into()));
    assert!(
        status(&[&place])
            .0
            .contains("it came back with empty memory: what indexes below #2 had here is gone")
    );
    let dropped = said_by(&["drop", &place, INDEX]);
    let said = said_by(&["list", &place]);
    assert!(!said.contains("empty memory"), "{dropped}{said}");

    // The other way round it is the coordinator, without which what the others hold means nothing.
    restart_empty(&mut servers, 0);
    for command in ["list", "list"] {
        let said = said_by(&[command, &place]);
        assert!(
            said.contains("server m1 holds parts of indexes that went with the memory of server m0"),
            "{said}"
        );
        assert!(said.contains("start m1 with empty memory, too"), "{said}");
    }
}

/// The dead of such a pool cannot be recovered: nobody knows what they left in that index. When they have all numbers, whoever drops it
/// gets in, and then they are recovered.
#[test]
fn an_index_of_an_unknown_engine_can_be_dropped_where_the_dead_have_all_numbers() {
    let servers = Servers::start(&["--lease-ms", "300", "--sessions", "8"]);
    let place = servers.place(Over::Tcp);
    let executor = Executor::new();
    executor.block_on(async {
        let cluster = connect(&place).expect("a pool");
        let session = Session::open(&cluster, SessionOptions::default()).await.expect("a session");
        let op = session.endpoint().expect("an endpoint").op();
        let made = session.create_index(&op, "theirs", "nobodys", &[]).await.expect("created");
        op.control(ServerId::COORDINATOR, &Request::IndexReady { index: made.id })
            .await
            .expect("it is ready");
        let mut others = Vec::new();
        while let Ok(other) = Session::open(&cluster, SessionOptions::default()).await {
            others.push(other);
        }
        assert!(others.len() >= 6, "{} sessions", others.len());
    });
    executor.clear();
    wait_for("all leases to run out", || {
        said_by(&["list", &place]).contains("7 of them by sessions that are dead")
    });
    let said = said_by(&["list", &place]);
    assert!(said.contains("unless nobody knows the engine of some index; drop that one"), "{said}");
    assert_eq!(said_by(&["drop", &place, "theirs"]), "");
    assert_eq!(said_by(&["list", &place]), "");
}
