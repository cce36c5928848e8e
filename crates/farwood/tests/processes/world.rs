//! Servers and clients as processes: starting them, signalling them, ending them with the test.

use farwood_fabric::transport::shm::{ShmCluster, ShmOptions};
use farwood_fabric::transport::tcp::{TcpCluster, TcpOptions};
use farwood_fabric::transport::verbs::{VerbsCluster, VerbsOptions};
use farwood_fabric::{Cluster, FabricError};
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Where a process finds its part.
pub(crate) const PART: &str = "FARWOOD_TEST_PART";

/// How long anything may take before the test gives up.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// A folder that is removed with its contents.
pub(crate) struct Folder(pub(crate) PathBuf);

impl Folder {
    pub(crate) fn new() -> Self {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let name = format!("farwood-test-{}-{}", std::process::id(), MADE.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).expect("a folder");
        Self(path)
    }

    pub(crate) fn names(&self) -> Vec<String> {
        let entries = self.0.read_dir().expect("the folder is there").flatten();
        let mut names: Vec<_> = entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A process that ends with the test. What it says is kept open, so that it can say more.
pub(crate) struct Process(pub(crate) Child, BufReader<ChildStdout>);

impl Process {
    fn new(mut child: Child) -> Self {
        let said = BufReader::new(child.stdout.take().expect("piped"));
        Self(child, said)
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let pid = Pid::from_child(&self.0);
        kill_process(pid, signal).expect("the process is there");
    }

    /// Ends it at once, and waits for that.
    pub(crate) fn kill(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }

    /// Stops it, and waits until it stands still.
    pub(crate) fn stop(&self) {
        self.signal(Signal::STOP);
        wait_for("the process to stop", || self.stat(0).starts_with('T'));
    }

    /// A field of /proc/pid/stat behind the name.
    pub(crate) fn stat(&self, field: usize) -> String {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.0.id())).unwrap_or_default();
        let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
        fields.split_whitespace().nth(field).unwrap_or("").to_owned()
    }

    /// The time that it spent on processors, in ticks (usually 10 ms).
    pub(crate) fn cpu_ticks(&self) -> u64 {
        [11, 12].iter().map(|field| self.stat(*field).parse::<u64>().expect("a number")).sum()
    }

    /// All that it has still to say, until its end.
    pub(crate) fn rest(&mut self) -> String {
        let mut said = String::new();
        self.1.read_to_string(&mut said).expect("text");
        said
    }

    pub(crate) fn has_ended(&mut self) -> bool {
        self.0.try_wait().expect("it can be asked").is_some()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Looks again and again, with an end.
pub(crate) fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let clock = farwood_fabric::clock::RealClock::new();
    while !done() {
        assert!(u128::from(clock.now()) < PATIENCE.as_nanos(), "waited too long for {what}");
        nap(Duration::from_micros(200));
    }
}

#[expect(clippy::disallowed_methods, reason = "tests of processes live in real time")]
pub(crate) fn nap(span: Duration) {
    std::thread::sleep(span);
}

/// The binary: the one that was built with this test, or where `FARWOOD_BINARY` says, if both were taken elsewhere.
pub(crate) fn farwood() -> Command {
    Command::new(std::env::var_os("FARWOOD_BINARY").unwrap_or(env!("CARGO_BIN_EXE_farwood").into()))
}

/// Starts a server and waits until clients can connect.
pub(crate) fn serve(socket: &Path, arguments: &[&str]) -> Process {
    serve_at(&["--shm", socket.to_str().expect("a plain name")], arguments).0
}

/// Starts a server that listens somewhere; what it says.
pub(crate) fn serve_at(place: &[&str], arguments: &[&str]) -> (Process, String) {
    let memory: &[&str] = if arguments.contains(&"--memory") { &[] } else { &["--memory", "64MiB"] };
    let child = farwood()
        .arg("serve")
        .args(memory)
        .args(place)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        // Not a pipe that nobody reads: a server that logs more than it holds would stand still.
        .stderr(Stdio::null())
        .spawn()
        .expect("a server starts");
    let mut process = Process::new(child);
    let mut line = String::new();
    let said = process.1.read_line(&mut line);
    assert!(said.is_ok() && line.starts_with("memory server"), "the server said '{line}'");
    (process, line)
}

/// The address in what a server said.
pub(crate) fn address_in(said: &str) -> String {
    said.trim_end().rsplit_once("://").expect("it listens").1.to_owned()
}

/// How clients reach the servers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Over {
    Shm,
    Tcp,
    Verbs,
}

/// Two servers in a folder, which can be reached both ways.
pub(crate) struct Servers {
    pub(crate) folder: Folder,
    pub(crate) processes: Vec<Process>,
    pub(crate) addresses: Vec<String>,
}

impl Servers {
    pub(crate) fn start(arguments: &[&str]) -> Self {
        let folder = Folder::new();
        let shm = folder.0.to_str().expect("a plain name").to_owned();
        Self::start_at(folder, &["--shm", &shm, "--listen", "127.0.0.1:0"], arguments)
    }

    /// Servers that are reached through an RDMA device.
    pub(crate) fn start_on(device: &str, arguments: &[&str]) -> Self {
        Self::start_at(Folder::new(), &["--listen", "127.0.0.1:0", "--verbs", device], arguments)
    }

    fn start_at(folder: Folder, place: &[&str], arguments: &[&str]) -> Self {
        let pool = ["--servers", "2", "--pool", "0123456789abcdef0123456789abcdef"];
        let (servers, addresses) = ["0", "1"]
            .into_iter()
            .map(|number| {
                let numbered: Vec<&str> = pool.into_iter().chain(["--server", number]).collect();
                let (server, said) = serve_at(place, &[&numbered, arguments].concat());
                (server, address_in(&said))
            })
            .unzip();
        Self { folder, processes: servers, addresses }
    }

    pub(crate) fn connect(&self) -> Result<Cluster, FabricError> {
        connect(&self.place(Over::Shm))
    }

    /// What clients are given to find the servers.
    pub(crate) fn place(&self, over: Over) -> String {
        match over {
            Over::Shm => self.folder.0.display().to_string(),
            Over::Tcp => format!("tcp://{}", self.addresses.join(",")),
            Over::Verbs => format!("verbs://{}", self.addresses.join(",")),
        }
    }
}

/// Connects to the servers at a place.
pub(crate) fn connect(place: &str) -> Result<Cluster, FabricError> {
    let list = |addresses: &str| addresses.split(',').map(str::to_owned).collect::<Vec<String>>();
    match place.split_once("://") {
        Some(("tcp", addresses)) => TcpCluster::connect(&list(addresses), &TcpOptions::default()),
        Some((_, addresses)) => VerbsCluster::connect(&list(addresses), &VerbsOptions::default()),
        None => ShmCluster::connect(&[PathBuf::from(place)], &ShmOptions::default()),
    }
}

/// Starts a client process with a part to play, and waits until it says that it is at work.
pub(crate) fn client(part: &str, place: &str) -> Process {
    let child = Command::new(std::env::current_exe().expect("this test has a binary"))
        .args(["--exact", "play", "--ignored", "--nocapture"])
        .env(PART, format!("{part} {place}"))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .expect("a client starts");
    let mut process = Process::new(child);
    let at_work = process.1.by_ref().lines().map_while(Result::ok).any(|line| line == AT_WORK);
    assert!(at_work, "the client '{part}' did not begin");
    process
}

/// What a client says when it has begun.
pub(crate) const AT_WORK: &str = "at work";
