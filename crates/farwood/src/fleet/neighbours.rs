//! Memory servers started for the occasion: processes of this binary that end with this one.

use super::transport::Shape;
use farwood_fabric::Cluster;
use farwood_fabric::region::PoolId;
use farwood_fabric::transport::shm::{ShmCluster, ShmOptions};
use farwood_fabric::transport::tcp::{TcpCluster, TcpOptions};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

/// How neighbours are reached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Over {
    Shm,
    Tcp,
}

/// Which servers to start.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) over: Over,
    pub(crate) shape: Shape,
    pub(crate) pool: PoolId,
    /// The folder that keeps their memory.
    pub(crate) kept: Option<PathBuf>,
}

impl Plan {
    /// Servers of a new pool that share their memory with this process.
    pub(crate) fn shm(shape: Shape) -> Self {
        Self { over: Over::Shm, shape, pool: PoolId(fastrand::u128(..)), kept: None }
    }
}

/// Server processes and the folder with their sockets; both go with this.
#[derive(Debug)]
pub(crate) struct Neighbours {
    folder: PathBuf,
    servers: Vec<Child>,
}

impl Neighbours {
    /// Starts servers, and connects to them.
    pub(crate) fn start(over: Over, shape: Shape) -> Result<(Self, Cluster), String> {
        Self::start_as(&Plan { over, ..Plan::shm(shape) })
    }

    /// The same, with everything said.
    pub(crate) fn start_as(plan: &Plan) -> Result<(Self, Cluster), String> {
        static STARTED: AtomicU32 = AtomicU32::new(0);
        let number = STARTED.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("farwood-{}-{number}", std::process::id()));
        std::fs::create_dir(&folder)
            .map_err(|error| format!("cannot make the folder {}: {error}", folder.display()))?;
        let mut neighbours = Self { folder, servers: Vec::new() };
        let mut addresses = Vec::new();
        for server in 0..plan.shape.servers {
            let said = neighbours.start_one(plan, server)?;
            addresses.extend(said.trim_end().rsplit_once("tcp://").map(|(_, address)| address.to_owned()));
        }
        let cluster = match plan.over {
            Over::Shm => ShmCluster::connect(&[neighbours.folder.clone()], &ShmOptions::default()),
            Over::Tcp => TcpCluster::connect(&addresses, &TcpOptions::default()),
        };
        Ok((neighbours, cluster.map_err(|error| error.to_string())?))
    }

    /// Starts one server; what it says.
    fn start_one(&mut self, plan: &Plan, server: u16) -> Result<String, String> {
        let Shape { servers, bytes } = plan.shape;
        let place = match plan.over {
            Over::Shm => ["--shm".as_ref(), self.folder.as_os_str()],
            Over::Tcp => ["--listen".as_ref(), "127.0.0.1:0".as_ref()],
        };
        let failed = |error: std::io::Error| format!("cannot start a memory server: {error}");
        let mut child = Command::new(std::env::current_exe().map_err(failed)?)
            .args(["serve", "--stop-with-stdin"])
            .args(place)
            .args(["--memory", &bytes.to_string(), "--pool", &plan.pool.to_string()])
            .args(["--server", &server.to_string(), "--servers", &servers.to_string()])
            .args(plan.kept.iter().flat_map(|folder| ["--path".as_ref(), folder.as_os_str()]))
            // Ctrl-C is for us: we end them when we are done with them.
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(failed)?;
        let mut ready = String::new();
        if let Some(said) = child.stdout.take() {
            BufReader::new(said).read_line(&mut ready).map_err(failed)?;
        }
        if ready.is_empty() {
            let mut why = String::new();
            if let Some(mut said) = child.stderr.take() {
                let _ = said.read_to_string(&mut why);
            }
            let _ = child.wait();
            return Err(why.trim_end().trim_start_matches("farwood: ").to_owned());
        }
        if let Some(said) = child.stderr.take() {
            pass_on(said);
        }
        self.servers.push(child);
        Ok(ready)
    }
}

impl Neighbours {
    /// Their process ids.
    pub(crate) fn processes(&self) -> impl Iterator<Item = u32> {
        self.servers.iter().map(Child::id)
    }

    /// One that has ended, and how, if any has.
    pub(crate) fn ended(&mut self) -> Option<(usize, String)> {
        let ended = |server: &mut Child| server.try_wait().ok().flatten().map(|how| how.to_string());
        self.servers.iter_mut().enumerate().find_map(|(number, server)| Some((number, ended(server)?)))
    }
}

/// Lets warnings and errors of a server appear with what we say. It would stand still if nobody read them.
#[expect(clippy::disallowed_methods, reason = "a thread that waits for another process")]
fn pass_on(said: ChildStderr) {
    std::thread::spawn(move || {
        let lines = BufReader::new(said).lines().map_while(Result::ok);
        lines.filter(|line| !line.contains(" INFO ")).for_each(|line| eprintln!("{line}"));
    });
}

impl Drop for Neighbours {
    fn drop(&mut self) {
        for server in &mut self.servers {
            // That is what they wait for.
            drop(server.stdin.take());
        }
        for server in &mut self.servers {
            let _ = server.wait();
        }
        let _ = std::fs::remove_dir(&self.folder);
    }
}
