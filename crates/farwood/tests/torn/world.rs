//! A memory server of this process whose memory is a file, and what is put into it.

use farwood_fabric::procedure::ProcedureSet;
use farwood_fabric::region::PoolId;
use farwood_fabric::transport::serve::{
    Backing, BootId, KeepOptions, MemoryProcess, ServeError, ServeOptions,
};
use farwood_fabric::transport::tcp::{TcpCluster, TcpOptions};
use farwood_fabric::{Cluster, ServerId};
use farwood_index::client::ClientIndex;
use farwood_index::{AnyEngine, Client, IndexError};
use farwood_memory::{MemoryServer, ServerConfig};
use std::path::PathBuf;
use std::sync::Arc;

/// The start of the machine under which memory was used.
pub(crate) const BOOT: BootId = BootId(1);
/// The next one.
pub(crate) const OTHER_BOOT: BootId = BootId(2);

/// Indexes of different engines, so that the memory holds chunks of many kinds.
const INDEXES: [&str; 2] = ["sphinx", "sherman"];
const KEYS: u64 = 300;

/// A key, and what is under it.
pub(crate) type Found = (Vec<u8>, Option<Vec<u8>>);

/// A file, and the folder that it is in.
pub(crate) struct Kept {
    folder: PathBuf,
}

impl Kept {
    pub(crate) fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("farwood-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        Self { folder }
    }

    fn file(&self) -> PathBuf {
        self.folder.join("memory")
    }

    pub(crate) fn read(&self) -> Vec<u8> {
        std::fs::read(self.file()).expect("the memory")
    }

    /// In the place of what is there: it stays the same file.
    pub(crate) fn write(&self, bytes: &[u8]) {
        std::fs::write(self.file(), bytes).expect("the memory");
    }

    pub(crate) fn start(&self, boot: BootId, accept_torn: bool) -> Result<MemoryProcess, ServeError> {
        let config = ServerConfig {
            chunk_bytes: 64 << 10,
            lock_bytes: 16 << 10,
            max_sessions: 16,
            max_indexes: 4,
            ..ServerConfig::new(PoolId(7), ServerId::new(0), 1, 3 << 20)
        };
        let logic = MemoryServer::new(config, ProcedureSet::default()).expect("the limits are valid");
        let options = ServeOptions {
            backing: Backing::Path(self.file()),
            keep: KeepOptions { boot: Some(boot), accept_torn, ..KeepOptions::default() },
            tcp: Some(([127, 0, 0, 1], 0).into()),
            ..ServeOptions::default()
        };
        MemoryProcess::start(Arc::new(logic), options)
    }
}

fn connect(server: &MemoryProcess) -> Cluster {
    let address = server.address().expect("it listens").to_string();
    TcpCluster::connect(&[address], &TcpOptions::default()).expect("it listens")
}

/// Makes the indexes.
fn create(server: &MemoryProcess) {
    let client = Client::new(&connect(server), 1).expect("a session");
    for name in INDEXES {
        client.create(name, &AnyEngine::named(name, 8, 8).expect("an engine")).wait().expect("an index");
    }
}

/// Puts values of a generation under every key.
fn fill(server: &MemoryProcess, generation: u64) {
    let client = Client::new(&connect(server), 1).expect("a session");
    for name in INDEXES {
        let index = client.open(name).wait().expect("it is there");
        for n in (0..KEYS).filter(|n| generation == 0 || n % 2 == 0) {
            index.put(key(n), value(n, generation)).wait().expect("there is room");
        }
    }
}

/// What is under every key of every index.
pub(crate) fn read_all(server: &MemoryProcess) -> Result<Vec<Found>, IndexError> {
    let client = Client::new(&connect(server), 1)?;
    let mut found = Vec::new();
    for name in INDEXES {
        let index = client.open(name).wait()?;
        for n in 0..KEYS {
            found.push((key(n), index.get(key(n)).wait()?));
        }
        scan(&index)?;
    }
    Ok(found)
}

/// Writes, whether it can be done or not.
pub(crate) fn write_some(server: &MemoryProcess) {
    let Ok(client) = Client::new(&connect(server), 1) else { return };
    for name in INDEXES {
        let Ok(index) = client.open(name).wait() else { continue };
        for n in (0..KEYS + 40).step_by(20) {
            let _ = index.put(key(n), value(n, 9)).wait();
            let _ = index.delete(key(n + 1)).wait();
        }
    }
}

fn scan(index: &ClientIndex) -> Result<(), IndexError> {
    let found = index.scan(.., 2 * usize::try_from(KEYS).expect("few")).wait()?;
    assert!(found.windows(2).all(|pair| pair[0].0 < pair[1].0), "a scan is in order");
    Ok(())
}

impl Drop for Kept {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn key(n: u64) -> Vec<u8> {
    // Far from each other, so that trees have inner nodes.
    n.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes().to_vec()
}

/// It says whose it is, whatever its generation.
fn value(n: u64, generation: u64) -> Vec<u8> {
    (n << 8 | generation).to_be_bytes().to_vec()
}

/// Whether a value was put under this key at some time.
pub(crate) fn is_value_of(its_key: &[u8], found: &[u8]) -> bool {
    let found = found.try_into().map_or(u64::MAX, u64::from_be_bytes);
    found & 0xff <= 9 && key(found >> 8) == its_key
}

/// One file at different times.
pub(crate) struct Snapshots {
    /// Closed after the first half of what was put.
    pub(crate) closed_before: Vec<u8>,
    /// In use.
    pub(crate) in_use: Vec<u8>,
    /// In use when the server was killed.
    pub(crate) killed: Vec<u8>,
    /// Closed at last.
    pub(crate) closed: Vec<u8>,
}

impl Snapshots {
    pub(crate) fn make(name: &str) -> Self {
        let kept = Kept::new(name);
        let server = kept.start(BOOT, false).expect("new memory");
        create(&server);
        fill(&server, 0);
        server.end().expect("it is closed");
        let closed_before = kept.read();
        let server = kept.start(BOOT, false).expect("it was closed");
        fill(&server, 1);
        let in_use = kept.read();
        fill(&server, 2);
        drop(server);
        let killed = kept.read();
        let server = kept.start(BOOT, false).expect("the machine is up");
        server.end().expect("it is closed");
        Self { closed_before, in_use, killed, closed: kept.read() }
    }
}
