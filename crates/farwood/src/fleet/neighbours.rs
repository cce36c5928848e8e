//! Memory servers started for the occasion: processes of this binary that end with this one.

use super::restarts::{Life, OwnMemory};
use super::transport::Shape;
use crate::serve::SESSIONS;
use farwood_fabric::region::PoolId;
use farwood_fabric::transport::serve::{ServerPlace, status};
use farwood_fabric::transport::shm::{self, ShmCluster, ShmOptions};
use farwood_fabric::transport::tcp::{TcpCluster, TcpOptions};
use farwood_fabric::{Cluster, ServerId};
use farwood_memory::ServerConfig;
use rustix::fs::{FlockOperation, Mode, OFlags, flock, open};
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, Read};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// How long servers may take to end when they are told to.
const ENDING: Duration = Duration::from_secs(10);
/// Memory that is kept is written to its disk first, and read for its checksums: so many bytes a second at least.
const CLOSED_PER_SECOND: u64 = 16 << 20;
const LOOK: Duration = Duration::from_millis(5);

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
    /// Whether a server that ends is to be started again on its memory.
    pub(crate) restarts: bool,
    /// What else servers are told of memory that is kept.
    pub(crate) keeping: Vec<OsString>,
}

impl Plan {
    /// Servers of a new pool that share their memory with this process.
    pub(crate) fn shm(shape: Shape) -> Self {
        let (pool, keeping) = (PoolId(fastrand::u128(..)), Vec::new());
        Self { over: Over::Shm, shape, pool, kept: None, restarts: false, keeping }
    }
}

/// Server processes and the folder with their sockets; both go with this.
#[derive(Debug)]
pub(crate) struct Neighbours {
    pub(super) servers: Vec<Child>,
    pub(super) lives: Vec<Life>,
    plan: Plan,
    /// Memory that no folder keeps, by server, if it has to outlive their processes.
    memory: Vec<OwnMemory>,
    folder: Folder,
    /// How long they may take to end.
    ending: Duration,
}

/// A folder of this process that is removed with its contents. Its name says whose it is, and its owner has a lock on it, so that what a
/// killed process left is removed by the next one.
#[derive(Debug)]
struct Folder {
    path: PathBuf,
    _lock: OwnedFd,
}

impl Folder {
    const NAME: &str = "farwood";

    fn make() -> Result<Self, String> {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let place = std::env::temp_dir();
        Self::remove_abandoned(&place);
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let path = place.join(format!("{}-{}-{number}", Self::NAME, std::process::id()));
        let cannot = |error: io::Error| format!("cannot make the folder {}: {error}", path.display());
        std::fs::create_dir(&path).map_err(cannot)?;
        let lock = Self::lock(&path, OFlags::CREATE).map_err(|error| cannot(error.into()))?;
        Ok(Self { path, _lock: lock })
    }

    /// The lock on a folder, which ends with the process; an error if another process has it. Not on the folder itself, which servers lock.
    fn lock(path: &Path, flags: OFlags) -> Result<OwnedFd, Errno> {
        let flags = flags | OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = open(path.join("owner"), flags, Mode::RUSR | Mode::WUSR)?;
        flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        Ok(file)
    }

    /// Removes folders whose processes are gone.
    fn remove_abandoned(place: &Path) {
        let Ok(entries) = place.read_dir() else { return };
        for entry in entries.flatten() {
            let is_gone = entry.file_name().to_str().and_then(Self::owner).is_some_and(|pid| {
                // A process of another container may be there though this one does not see it; its lock is seen.
                test_kill_process(pid) == Err(Errno::SRCH)
            });
            // What is not ours cannot be removed.
            if is_gone && matches!(Self::lock(&entry.path(), OFlags::empty()), Ok(_) | Err(Errno::NOENT)) {
                let _ = std::fs::remove_dir_all(entry.path());
            }
        }
    }

    /// Whose folder this is, if it is one.
    fn owner(name: &str) -> Option<Pid> {
        let (pid, number) = name.strip_prefix(Self::NAME)?.strip_prefix('-')?.split_once('-')?;
        number.parse::<u32>().ok()?;
        Pid::from_raw(pid.parse().ok()?)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // A server that was killed has left its socket.
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

impl Neighbours {
    /// Starts servers, and connects to them.
    pub(crate) fn start(over: Over, shape: Shape) -> Result<(Self, Cluster), String> {
        Self::start_as(&Plan { over, ..Plan::shm(shape) })
    }

    /// The same, with everything said.
    pub(crate) fn start_as(plan: &Plan) -> Result<(Self, Cluster), String> {
        let all_bytes = plan.shape.bytes.saturating_mul(u64::from(plan.shape.servers));
        let closing =
            plan.kept.as_ref().map_or(Duration::ZERO, |_| Duration::from_secs(all_bytes / CLOSED_PER_SECOND));
        let mut neighbours = Self {
            servers: Vec::new(),
            lives: Vec::new(),
            plan: plan.clone(),
            memory: Vec::new(),
            folder: Folder::make()?,
            ending: ENDING + closing,
        };
        let mut addresses = Vec::new();
        for server in 0..plan.shape.servers {
            if plan.restarts && plan.kept.is_none() {
                neighbours.memory.push(OwnMemory::make(&config(plan, server))?);
            }
            let (child, said) = neighbours.start_one(server)?;
            neighbours.lives.push(Life::of(&child));
            neighbours.servers.push(child);
            addresses.extend(said.trim_end().rsplit_once("tcp://").map(|(_, address)| address.to_owned()));
        }
        let cluster = match plan.over {
            Over::Shm => ShmCluster::connect(&[neighbours.folder.path.clone()], &ShmOptions::default()),
            Over::Tcp => TcpCluster::connect(&addresses, &TcpOptions::default()),
        };
        Ok((neighbours, cluster.map_err(|error| error.to_string())?))
    }

    /// Starts a server again on the memory that it had.
    pub(super) fn start_again(&self, server: usize) -> Result<Child, String> {
        let number = u16::try_from(server).map_err(|_| "there is no such server".to_owned())?;
        // It has left its socket, of which the next one would have to find out that nobody is behind it.
        let socket = shm::socket_in(&self.folder.path, ServerId::new(number));
        let _ = std::fs::remove_file(socket);
        self.start_one(number).map(|(child, _)| child)
    }

    /// Starts one server; what it says.
    fn start_one(&self, server: u16) -> Result<(Child, String), String> {
        let plan = &self.plan;
        let Shape { servers, bytes } = plan.shape;
        let place = match plan.over {
            Over::Shm => ["--shm".as_ref(), self.folder.path.as_os_str()],
            Over::Tcp => ["--listen".as_ref(), "127.0.0.1:0".as_ref()],
        };
        let failed = |error: std::io::Error| format!("cannot start a memory server: {error}");
        let mut command = Command::new(std::env::current_exe().map_err(failed)?);
        command
            .args(["serve", "--stop-with-stdin"])
            .args(place)
            .args(["--memory", &bytes.to_string(), "--pool", &plan.pool.to_string()])
            .args(["--server", &server.to_string(), "--servers", &servers.to_string()])
            .args(plan.kept.iter().flat_map(|folder| ["--path".as_ref(), folder.as_os_str()]))
            .args(&plan.keeping)
            // Ctrl-C is for us: we end them when we are done with them.
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = match self.memory.get(usize::from(server)) {
            None => command.spawn(),
            Some(memory) => memory.lend(|number| command.args(["--memory-fd", &number.to_string()]).spawn()),
        }
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
        Ok((child, ready))
    }
}

/// How the process of a server will set itself up, as far as the shape of its memory depends on it.
fn config(plan: &Plan, server: u16) -> ServerConfig {
    let Shape { servers, bytes } = plan.shape;
    ServerConfig {
        max_sessions: SESSIONS,
        ..ServerConfig::new(plan.pool, ServerId::new(server), servers, bytes)
    }
}

impl Neighbours {
    /// Their process ids.
    pub(crate) fn processes(&self) -> impl Iterator<Item = u32> {
        self.servers.iter().map(Child::id)
    }

    /// A line for each whose memory was torn when it was taken over.
    pub(crate) fn torn(&self) -> Vec<String> {
        let place = &self.folder.path;
        let sockets = shm::sockets(std::slice::from_ref(place)).unwrap_or_default();
        let line = |(number, socket): (usize, PathBuf)| {
            let torn = status(&ServerPlace::Shm(socket), &[]).ok()?.tables.torn?;
            let repair = format!("`farwood check --repair shm://{} INDEX`", place.display());
            Some(format!("  torn     memory server {number}: {torn}; run {repair}\n"))
        };
        sockets.into_iter().enumerate().filter_map(line).collect()
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
    #[expect(clippy::disallowed_methods, reason = "waits for processes")]
    fn drop(&mut self) {
        for server in &mut self.servers {
            // That is what they wait for.
            drop(server.stdin.take());
        }
        let mut looks = self.ending.as_millis() / LOOK.as_millis();
        for server in &mut self.servers {
            while looks > 0 && matches!(server.try_wait(), Ok(None)) {
                std::thread::sleep(LOOK);
                looks -= 1;
            }
            // One that was stopped does not hear us.
            let _ = server.kill();
            let _ = server.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_of_processes_that_are_gone_are_removed_and_no_others() {
        let place = Folder::make().expect("a folder");
        // No process has such a number.
        let gone = place.path.join("farwood-2000000000-0");
        let locked = place.path.join("farwood-2000000000-1");
        let ours = place.path.join(format!("farwood-{}-0", std::process::id()));
        let others = ["farwood-up-2000000000-0", "farwood-2000000000", "farwood-x-0"]
            .map(|name| place.path.join(name));
        for folder in [&gone, &locked, &ours].into_iter().chain(&others) {
            std::fs::create_dir(folder).expect("a folder");
            std::fs::write(folder.join("m0.sock"), "").expect("a file");
        }
        let lock = Folder::lock(&locked, OFlags::CREATE).expect("nobody has it");
        Folder::remove_abandoned(&place.path);
        assert!(!gone.exists());
        assert!([&locked, &ours].into_iter().chain(&others).all(|folder| folder.exists()));
        drop(lock);
        Folder::remove_abandoned(&place.path);
        assert!(!locked.exists());
    }
}
