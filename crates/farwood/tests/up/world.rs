//! Processes of the binary, and a client that speaks just enough of the protocol.

use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, ChildStderr, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// How long anything may take before the test gives up.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A folder that is removed with its contents.
pub(crate) struct Folder(pub(crate) PathBuf);

impl Folder {
    pub(crate) fn new() -> Self {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let name = format!("farwood-up-{}-{}", std::process::id(), MADE.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).expect("a folder");
        Self(path)
    }

    pub(crate) fn text(&self) -> &str {
        self.0.to_str().expect("a plain name")
    }

    pub(crate) fn names(&self) -> Vec<String> {
        let entries = self.0.read_dir().expect("the folder is there").flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The binary: the one that was built with this test, or where `FARWOOD_BINARY` says.
pub(crate) fn binary() -> Command {
    Command::new(std::env::var_os("FARWOOD_BINARY").unwrap_or(env!("CARGO_BIN_EXE_farwood").into()))
}

/// Runs a command that must succeed; what it says.
pub(crate) fn farwood(arguments: &[&str]) -> String {
    let output = binary().args(arguments).output().expect("it runs");
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The sessions of a pool of one server.
pub(crate) fn sessions(url: &str) -> Vec<serde_json::Value> {
    let status: serde_json::Value =
        serde_json::from_str(&farwood(&["status", url, "--json"])).expect("it is JSON");
    status[0]["status"]["sessions"].as_array().expect("a list").clone()
}

/// A process of the binary that ends with the test.
pub(crate) struct Running {
    process: Child,
    said: BufReader<ChildStdout>,
    complaints: ChildStderr,
    pub(crate) port: u16,
    /// What it said when it was ready.
    pub(crate) lines: Vec<String>,
}

impl Running {
    /// Starts a command that says where it listens within so many lines.
    pub(crate) fn start(arguments: &[&str], lines: usize, temporary: &Folder) -> Self {
        let mut process = binary()
            .args(arguments)
            .env("TMPDIR", temporary.text())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("it starts");
        let said = BufReader::new(process.stdout.take().expect("piped"));
        let complaints = process.stderr.take().expect("piped");
        let mut running = Self { process, said, complaints, port: 0, lines: Vec::new() };
        for _ in 0..lines {
            let mut line = String::new();
            running.said.read_line(&mut line).expect("it speaks");
            assert!(!line.is_empty(), "it ended: {}", running.complaints());
            running.lines.push(line.trim_end().to_owned());
        }
        running
    }

    /// `farwood up` on any free port.
    pub(crate) fn up(arguments: &[&str], temporary: &Folder) -> Self {
        let small = ["up", "--memory", "512MiB", "--listen", "127.0.0.1:0"];
        let mut running = Self::start(&[&small, arguments].concat(), 5, temporary);
        let connect = running.lines.iter().find(|line| line.contains("redis-cli")).expect("how to connect");
        let port = connect.split("-p ").nth(1).and_then(|rest| rest.split(' ').next());
        running.port = port.and_then(|port| port.parse().ok()).expect("a port");
        running
    }

    /// `farwood gateway` on any free port.
    pub(crate) fn gateway(pool: &str, arguments: &[&str], temporary: &Folder) -> Self {
        let usual = ["gateway", "--pool", pool, "--index", "store", "--listen", "127.0.0.1:0"];
        let mut running = Self::start(&[&usual, arguments].concat(), 1, temporary);
        let address = running.lines[0].split(' ').nth(2).expect("an address");
        running.port = address.rsplit(':').next().and_then(|port| port.parse().ok()).expect("a port");
        running
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.process), signal).expect("it is there");
    }

    pub(crate) fn id(&self) -> u32 {
        self.process.id()
    }

    pub(crate) fn wait(&mut self) -> ExitStatus {
        let mut status = None;
        wait_for("the end", || {
            status = self.process.try_wait().expect("it can be asked");
            status.is_some()
        });
        status.expect("it has ended")
    }

    /// What it has to say on standard error, when it has ended.
    pub(crate) fn complaints(&mut self) -> String {
        let mut text = String::new();
        let _ = self.complaints.read_to_string(&mut text);
        text
    }

    /// How much memory it has.
    pub(crate) fn resident_bytes(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.id())).expect("it runs");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("it has some");
        let kib = line.split_whitespace().next().and_then(|kib| kib.parse::<u64>().ok()).expect("a number");
        kib << 10
    }

    pub(crate) fn client(&self) -> Client {
        Client::to(self.port)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Whether a process is there.
pub(crate) fn is_alive(process: u32) -> bool {
    i32::try_from(process).ok().and_then(Pid::from_raw).is_some_and(|pid| test_kill_process(pid).is_ok())
}

pub(crate) fn kill(process: u32, signal: Signal) {
    let pid = i32::try_from(process).ok().and_then(Pid::from_raw).expect("a process");
    kill_process(pid, signal).expect("it is there");
}

/// Looks again and again, with an end.
pub(crate) fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let clock = farwood_fabric::clock::RealClock::new();
    while !done() {
        assert!(u128::from(clock.now()) < PATIENCE.as_nanos(), "waited too long for {what}");
        nap(1);
    }
}

#[expect(clippy::disallowed_methods, reason = "tests of processes live in real time")]
pub(crate) fn nap(ms: u64) {
    std::thread::sleep(Duration::from_millis(ms));
}

/// A client whose commands are typed by hand.
pub(crate) struct Client(BufReader<TcpStream>);

impl Client {
    pub(crate) fn to(port: u16) -> Self {
        let stream = TcpStream::connect(("127.0.0.1", port)).expect("it listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("a time");
        Self(BufReader::new(stream))
    }

    /// The reply, its parts separated by spaces; `None` if the connection has ended.
    pub(crate) fn try_say(&mut self, line: &str) -> Option<String> {
        self.0.get_mut().write_all(format!("{line}\r\n").as_bytes()).ok()?;
        self.reply()
    }

    #[track_caller]
    pub(crate) fn say(&mut self, line: &str) -> String {
        self.try_say(line).expect("a reply")
    }

    fn reply(&mut self) -> Option<String> {
        let mut line = String::new();
        if self.0.read_line(&mut line).ok()? == 0 {
            return None;
        }
        let (kind, rest) = line.trim_end().split_at(1);
        Some(match kind {
            "$" if rest == "-1" => "nil".to_owned(),
            "$" => {
                let mut bytes = vec![0; rest.parse::<usize>().ok()? + 2];
                self.0.read_exact(&mut bytes).ok()?;
                String::from_utf8_lossy(&bytes[..bytes.len() - 2]).into_owned()
            }
            "*" => {
                let parts: Option<Vec<_>> = (0..rest.parse::<usize>().ok()?).map(|_| self.reply()).collect();
                parts?.join(" ")
            }
            _ => rest.to_owned(),
        })
    }
}
