//! Memory servers that are killed and started again, on the memory they had or on another: gateways and clients of the library join anew
//! by themselves, say what is wrong meanwhile, and leave no session behind.

use super::world::{Client, Folder, Running, binary, farwood, nap, sessions, wait_for};
use rustix::process::Signal;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

/// How a gateway reaches its server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Over {
    Shm,
    Tcp,
}

/// What becomes of a server's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Memory {
    Kept,
    Lost,
}

/// A memory server that can be killed and started again at the same place.
struct Server {
    folder: Folder,
    memory: Memory,
    /// Its number, and how many servers there are.
    number: [&'static str; 2],
    address: String,
    process: Option<Running>,
}

fn free_address() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("an address").to_string()
}

impl Server {
    /// Starts one, with an empty index.
    fn start(memory: Memory) -> Self {
        let server = Self::number(["0", "1"], memory);
        farwood(&["create", &server.url(Over::Tcp), "store", "--engine", "sphinx"]);
        server
    }

    fn number(number: [&'static str; 2], memory: Memory) -> Self {
        let address = free_address();
        let mut server = Self { folder: Folder::new(), memory, number, address, process: None };
        server.start_again();
        server
    }

    fn start_again(&mut self) {
        let folder = self.folder.text();
        let (socket, memory) = (format!("{folder}/m0.sock"), format!("{folder}/m0.memory"));
        let mut arguments = vec!["serve", "--shm", &socket, "--listen", &self.address, "--memory", "256MiB"];
        arguments.extend(["--pool", "0123456789abcdef0123456789abcdef", "--lease-ms", "1500"]);
        let [number, servers] = self.number;
        arguments.extend(["--server", number, "--servers", servers]);
        if self.memory == Memory::Kept {
            arguments.extend(["--path", &memory]);
        }
        self.process = Some(Running::start(&arguments, 1, &self.folder));
    }

    /// Ends it without a word.
    fn kill(&mut self) {
        self.process = None;
    }

    fn place(&self, over: Over) -> String {
        match over {
            Over::Shm => format!("{}/m0.sock", self.folder.text()),
            Over::Tcp => self.address.clone(),
        }
    }

    fn url(&self, over: Over) -> String {
        let scheme = if over == Over::Shm { "shm" } else { "tcp" };
        format!("{scheme}://{}", self.place(over))
    }
}

/// What a gateway says of its health: the status line and the text.
fn health(metrics: &str) -> (String, String) {
    let mut stream = TcpStream::connect(metrics).expect("it listens");
    stream.write_all(b"GET /healthz HTTP/1.1\r\n\r\n").expect("it reads");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("text");
    let (head, body) = text.split_once("\r\n\r\n").expect("a head and a body");
    (head.lines().next().expect("a status").to_owned(), body.trim_end().to_owned())
}

fn is_healthy(metrics: &str) -> bool {
    health(metrics).0 == "HTTP/1.1 200 OK"
}

/// A gateway goes through a restart of its server; its client keeps its connection.
fn a_gateway_rejoins(over: Over, memory: Memory) {
    let mut server = Server::start(memory);
    let (temporary, metrics) = (Folder::new(), free_address());
    let mut gateway =
        Running::gateway(&server.url(over), &["--threads", "2", "--metrics", &metrics], &temporary);
    let mut client = gateway.client();
    assert_eq!(client.say("SET a 1"), "OK");
    assert_eq!(health(&metrics), ("HTTP/1.1 200 OK".to_owned(), "ok".to_owned()));
    for _ in 0..2 {
        server.kill();
        wait_for("the gateway to notice", || !is_healthy(&metrics));
        let (status, why) = health(&metrics);
        assert!(status == "HTTP/1.1 503 Service Unavailable" && !why.is_empty(), "{status}: {why}");
        wait_for("the refusal of commands", || client.say("GET a").starts_with("LOADING "));
        assert_eq!(client.say("PING"), "PONG");
        assert_eq!(gateway.client().say("PING"), "PONG", "new clients, too");
        let stat = binary().args(["stat", &format!("127.0.0.1:{}", gateway.port)]).output().expect("it runs");
        let said = String::from_utf8_lossy(&stat.stdout).into_owned();
        assert!(stat.status.code() == Some(1) && said.contains("health: "), "{said}");
        server.start_again();
        wait_for("the gateway to join again", || is_healthy(&metrics));
        let expected = if memory == Memory::Kept { "1" } else { "nil" };
        // Where its session lives on, the connections of its threads may be a moment behind.
        wait_for("answers over the same connection", || client.say("GET a") == expected);
        assert_eq!(client.say("SET a 1"), "OK");
        assert_eq!(gateway.client().say("GET a"), "1");
    }
    gateway.signal(Signal::TERM);
    assert!(gateway.wait().success());
    let said = gateway.complaints();
    let told = said.lines().filter(|line| line.contains("came back with empty memory")).count();
    assert_eq!(told, if memory == Memory::Kept { 0 } else { 2 }, "once each time: {said}");
    let made = said.lines().filter(|line| line.contains("index 'store' went with the memory")).count();
    assert_eq!(made, told, "{said}");
    let left = sessions(&server.url(Over::Tcp));
    assert!(left.iter().all(|session| session["lease_left_ms"] == 0), "the last session has left: {left:?}");
}

#[test]
fn a_gateway_rejoins_over_shm_on_kept_memory() {
    a_gateway_rejoins(Over::Shm, Memory::Kept);
}

#[test]
fn a_gateway_rejoins_over_shm_on_empty_memory() {
    a_gateway_rejoins(Over::Shm, Memory::Lost);
}

#[test]
fn a_gateway_rejoins_over_tcp_on_kept_memory() {
    a_gateway_rejoins(Over::Tcp, Memory::Kept);
}

#[test]
fn a_gateway_rejoins_over_tcp_on_empty_memory() {
    a_gateway_rejoins(Over::Tcp, Memory::Lost);
}

/// Asks for keys while a server is away. What it holds is answered with `LOADING`; nothing that is said is about the inside.
fn ask_meanwhile(client: &mut Client) -> String {
    let replies: Vec<String> = (0..30).map(|n| client.say(&format!("GET k{n}"))).collect();
    for (n, reply) in replies.iter().enumerate() {
        assert!(reply.starts_with("LOADING ") || *reply == n.to_string(), "{reply}");
    }
    for n in 0..30 {
        let reply = client.say(&format!("SET k{n} {n}"));
        let is_open = reply.starts_with("ERR the command may or may not have happened");
        assert!(reply == "OK" || reply.starts_with("LOADING ") || is_open, "{reply}");
    }
    let info = client.say("INFO farwood");
    for inside in ["call reconnect", "before posting"] {
        assert!(!info.contains(inside) && !replies.iter().any(|reply| reply.contains(inside)));
    }
    replies.into_iter().find(|reply| reply.starts_with("LOADING ")).unwrap_or_default()
}

/// Keys of which a part went with a server's memory answer errors that say what to do.
#[test]
fn a_server_that_comes_back_empty_beside_another_is_spoken_of_plainly() {
    let mut servers = [Server::number(["0", "2"], Memory::Lost), Server::number(["1", "2"], Memory::Lost)];
    let url = format!("tcp://{}", servers.each_ref().map(|server| server.place(Over::Tcp)).join(","));
    let (temporary, metrics) = (Folder::new(), free_address());
    farwood(&["create", &url, "store", "--engine", "sphinx"]);
    let gateway = Running::gateway(&url, &["--threads", "2", "--metrics", &metrics], &temporary);
    let mut client = gateway.client();
    for n in 0..100 {
        assert_eq!(client.say(&format!("SET k{n} {n}")), "OK");
    }
    servers[1].kill();
    wait_for("the refusal of commands", || !ask_meanwhile(&mut client).is_empty());
    servers[1].start_again();
    wait_for("the gateway to join again", || is_healthy(&metrics));
    let mut client = gateway.client();
    let replies: Vec<String> = (0..100).map(|n| client.say(&format!("GET k{n}"))).collect();
    let lost = replies.iter().find(|reply| reply.starts_with("ERR a part of the index is damaged, or went"));
    assert!(lost.is_some(), "{replies:?}");
    assert!(!replies.iter().any(|reply| reply.contains("m1:")), "{replies:?}");
    let (_, why) = health(&metrics);
    assert!(why.contains("went with the memory of a server"), "{why}");
    let info = client.say("INFO");
    assert!(info.contains("health:a part of the index") && info.contains("# Memory"), "{info}");
    farwood(&["drop", &url, "store"]);
    farwood(&["create", &url, "store", "--engine", "sphinx"]);
    wait_for("the new index", || gateway.client().say("SET k0 anew") == "OK");
    assert!(is_healthy(&metrics), "{:?}", health(&metrics));
}

/// Two servers and a gateway that serves an index on them.
struct Pair {
    client: Client,
    gateway: Running,
    metrics: String,
    servers: [Server; 2],
    url: String,
    _temporary: Folder,
}

impl Pair {
    fn start(over: Over, memory: Memory) -> Self {
        let servers = ["0", "1"].map(|number| Server::number([number, "2"], memory));
        let places = servers.each_ref().map(|server| server.place(over)).join(",");
        let url = if over == Over::Shm { "shm://" } else { "tcp://" }.to_owned() + &places;
        let (temporary, metrics) = (Folder::new(), free_address());
        farwood(&["create", &url, "store", "--engine", "sphinx"]);
        let gateway = Running::gateway(&url, &["--threads", "2", "--metrics", &metrics], &temporary);
        let client = gateway.client();
        Self { servers, url, gateway, client, metrics, _temporary: temporary }
    }
}

/// The coordinator does not know that another server came back, and hears from the gateway as ever.
fn a_gateway_rejoins_when_another_server_comes_back(over: Over) {
    let mut pair = Pair::start(over, Memory::Kept);
    for n in 0..100 {
        assert_eq!(pair.client.say(&format!("SET k{n} {n}")), "OK");
    }
    pair.servers[1].kill();
    wait_for("the gateway to notice", || !is_healthy(&pair.metrics));
    if over == Over::Tcp {
        wait_for("the refusal of commands", || !ask_meanwhile(&mut pair.client).is_empty());
        let (_, why) = health(&pair.metrics);
        assert!(!why.contains("reconnect"), "{why}");
        // Those whose command was under way when the session ended are disconnected.
        pair.client = pair.gateway.client();
    }
    pair.servers[1].start_again();
    wait_for("the gateway to join again", || is_healthy(&pair.metrics));
    wait_for("the first answer", || pair.client.say("GET k0") == "0");
    for n in 0..100 {
        assert_eq!(pair.client.say(&format!("GET k{n}")), n.to_string());
        assert_eq!(pair.client.say(&format!("SET k{n} again")), "OK");
    }
}

#[test]
fn a_gateway_rejoins_when_another_server_comes_back_over_shm() {
    a_gateway_rejoins_when_another_server_comes_back(Over::Shm);
}

#[test]
fn a_gateway_rejoins_when_another_server_comes_back_over_tcp() {
    a_gateway_rejoins_when_another_server_comes_back(Over::Tcp);
}

/// A coordinator that comes back with empty memory counts its sessions anew and knows no index: what other servers hold means nothing to
/// it. They say so, and serve again as soon as they are empty, too.
fn a_gateway_says_which_servers_must_be_emptied(over: Over) {
    let mut pair = Pair::start(over, Memory::Lost);
    assert_eq!(pair.client.say("SET a 1"), "OK");
    pair.servers[0].kill();
    wait_for("the gateway to notice", || !is_healthy(&pair.metrics));
    pair.servers[0].start_again();
    let reason = "start m1 with empty memory, too";
    wait_for("the reason", || health(&pair.metrics).1.contains(reason));
    wait_for("what to do", || pair.client.say("GET a").contains("an operator has to start them anew"));
    pair.servers[1].kill();
    pair.servers[1].start_again();
    wait_for("the gateway to join again", || is_healthy(&pair.metrics));
    assert_eq!(pair.client.say("GET a"), "nil");
    assert_eq!(pair.client.say("SET a 2"), "OK");
    assert_eq!(pair.client.say("GET a"), "2");
    let sessions = sessions(&pair.url);
    assert_eq!(sessions.len(), 1, "attempts to join leave nothing behind: {sessions:?}");
}

#[test]
fn a_gateway_says_which_servers_must_be_emptied_over_shm() {
    a_gateway_says_which_servers_must_be_emptied(Over::Shm);
}

#[test]
fn a_gateway_says_which_servers_must_be_emptied_over_tcp() {
    a_gateway_says_which_servers_must_be_emptied(Over::Tcp);
}

/// PING is answered, and INFO too, while a session that cannot settle anything with a silent coordinator comes to its end.
#[test]
fn a_gateway_answers_pings_while_the_coordinator_is_silent() {
    let (server, metrics) = (Server::start(Memory::Lost), free_address());
    let temporary = Folder::new();
    let gateway =
        Running::gateway(&server.url(Over::Tcp), &["--threads", "2", "--metrics", &metrics], &temporary);
    let mut writer = TcpStream::connect(("127.0.0.1", gateway.port)).expect("it listens");
    assert_eq!(gateway.client().say("SET a 1"), "OK");
    server.process.as_ref().expect("it runs").signal(Signal::STOP);
    // Nobody reads the replies; some of the commands have begun, and hang.
    writer.write_all(&b"*3\r\n$3\r\nSET\r\n$1\r\na\r\n$1\r\n2\r\n".repeat(500)).expect("they are taken");
    let clock = farwood_fabric::clock::RealClock::new();
    let mut was_absent = false;
    // Its patience is four leases, and a dead line is one after some seconds.
    while clock.now() < 20_000_000_000 && !was_absent {
        for command in ["PING", "INFO"] {
            let begun = clock.now();
            let said = gateway.client().say(command);
            assert!(command == "INFO" || said == "PONG", "{said}");
            let ms = (clock.now() - begun) / 1_000_000;
            assert!(ms < 6_000, "{command} was answered after {ms} ms");
        }
        was_absent = health(&metrics).1.starts_with("no session");
        nap(100);
    }
    assert!(was_absent, "its session ends");
    for _ in 0..20 {
        assert_eq!(gateway.client().say("PING"), "PONG");
        nap(100);
    }
    server.process.as_ref().expect("it runs").signal(Signal::CONT);
    wait_for("the gateway to join again", || is_healthy(&metrics));
    assert_eq!(gateway.client().say("SET a 3"), "OK");
}

/// A server that stands still has hung up on nobody, and the coordinator hears from the gateway as ever.
#[test]
fn a_gateway_says_which_server_stands_still() {
    let pair = Pair::start(Over::Shm, Memory::Lost);
    let second = pair.servers[1].process.as_ref().expect("it runs");
    second.signal(Signal::STOP);
    wait_for("the gateway to say so", || {
        health(&pair.metrics).1.contains("memory server m1 does not answer")
    });
    assert!(pair.gateway.client().say("INFO farwood").contains("health:memory server m1"));
    second.signal(Signal::CONT);
    wait_for("health", || is_healthy(&pair.metrics));
    assert_eq!(pair.gateway.client().say("SET a 1"), "OK", "it has its session still");
    assert_eq!(sessions(&pair.url).len(), 1);
}

/// A program that uses the library goes through a restart of its server.
fn a_client_rejoins(over: Over, memory: Memory) {
    let mut server = Server::start(memory);
    let client = farwood_index::Client::connect(&server.url(over), b"", 2).expect("a client");
    let store = client.open("store").wait().expect("it is there");
    store.put("a", "1").wait().expect("it is put");
    for round in 0..2 {
        server.kill();
        wait_for("an error", || store.get("a").wait().is_err());
        server.start_again();
        wait_for("the client to join again", || client.indexes().wait().is_ok());
        let expected = match memory {
            Memory::Kept => Some(b"1".to_vec()),
            Memory::Lost => {
                let absent = store.get("a").wait().expect_err("it went with the memory");
                assert!(absent.to_string().contains("there is no index 'store'"), "{absent}");
                client.create("store", store.engine()).wait().expect("it is made anew");
                None
            }
        };
        assert_eq!(store.get("a").wait().expect("an answer"), expected, "round {round}");
        store.put("a", "1").wait().expect("it is put");
    }
    drop((store, client));
    let left = sessions(&server.url(Over::Tcp));
    assert!(left.iter().all(|session| session["lease_left_ms"] == 0), "the last session has left: {left:?}");
}

#[test]
fn a_client_rejoins_over_shm() {
    a_client_rejoins(Over::Shm, Memory::Kept);
    a_client_rejoins(Over::Shm, Memory::Lost);
}

#[test]
fn a_client_rejoins_over_tcp() {
    a_client_rejoins(Over::Tcp, Memory::Kept);
    a_client_rejoins(Over::Tcp, Memory::Lost);
}

/// A gateway that is told to stop under load lets commands end, leaves, and nothing waits for it.
#[test]
fn a_gateway_that_stops_under_load_leaves_nothing() {
    for over in [Over::Shm, Over::Tcp] {
        let server = Server::start(Memory::Lost);
        let temporary = Folder::new();
        let mut stopping = Running::gateway(&server.url(over), &["--threads", "2"], &temporary);
        let staying = Running::gateway(&server.url(Over::Tcp), &["--threads", "1"], &temporary);
        let before = sessions(&server.url(Over::Tcp)).len();
        std::thread::scope(|scope| {
            for client in 0..8 {
                let mut stream = TcpStream::connect(("127.0.0.1", stopping.port)).expect("it listens");
                let pipeline = format!("SET k0 {client}\r\nSET k1 1\r\nSET k2 2\r\nSET k3 3\r\n").repeat(16);
                scope.spawn(move || {
                    let mut replies = vec![0; 1 << 16];
                    // Until the gateway hangs up.
                    while stream.write_all(pipeline.as_bytes()).is_ok()
                        && stream.read(&mut replies).is_ok_and(|bytes| bytes > 0)
                    {}
                });
            }
            let mut other = staying.client();
            wait_for("some writing", || other.say("EXISTS k0 k1 k2 k3") == "4");
            stopping.signal(Signal::INT);
            assert!(stopping.wait().success());
        });
        assert_eq!(sessions(&server.url(Over::Tcp)).len(), before - 1, "it has left");
        let mut other: Client = staying.client();
        for n in 0..4 {
            assert_eq!(other.say(&format!("SET k{n} after")), "OK");
        }
        assert!(!stopping.complaints().contains("ERROR"));
    }
}

/// Who drops an index and creates it anew needs not start its gateways again; until then they say what is wrong.
#[test]
fn a_gateway_serves_an_index_that_was_dropped_and_created_again() {
    let server = Server::start(Memory::Lost);
    let (temporary, metrics) = (Folder::new(), free_address());
    let gateway = Running::gateway(&server.url(Over::Shm), &["--metrics", &metrics], &temporary);
    let mut client = gateway.client();
    assert_eq!(client.say("SET a 1"), "OK");
    farwood(&["drop", &server.url(Over::Tcp), "store"]);
    wait_for("the gateway to notice", || !is_healthy(&metrics));
    wait_for("the refusal of commands", || client.say("GET a").starts_with("LOADING "));
    farwood(&["create", &server.url(Over::Tcp), "store", "--engine", "sphinx"]);
    wait_for("the gateway to open the new one", || is_healthy(&metrics));
    assert_eq!(client.say("GET a"), "nil", "over the same connection");
    assert_eq!(client.say("SET a 2"), "OK");
}

/// Whatever keeps a gateway from starting, its session does not stay.
#[test]
fn a_gateway_that_cannot_start_leaves_the_pool() {
    let server = Server::start(Memory::Lost);
    for over in [Over::Shm, Over::Tcp] {
        let refused = binary()
            .args(["gateway", "--pool", &server.url(over), "--index", "absent", "--listen", "127.0.0.1:0"])
            .output()
            .expect("it runs");
        assert_eq!(refused.status.code(), Some(2));
        assert_eq!(sessions(&server.url(Over::Tcp)), [] as [serde_json::Value; 0]);
    }
}
