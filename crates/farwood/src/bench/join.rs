//! Several processes in one run (`--join N`): they meet in far memory, start together, and the first one tells the result of all.
//!
//! The meeting is an index in the pool's catalog. Whoever creates it is process 0; the others find it. Its configuration is what
//! they all must agree on. Its anchor:
//!
//! ```text
//! +0     how many processes have come: each takes its number from here
//! +8     how many times a process has come to a barrier, all barriers together
//! +64    for each process, the address and length of its result
//! ```
//!
//! Clocks of two processes cannot be compared, so a merged run lasts as long as its longest part.

use super::drive::Measured;
use crate::fleet::{Fleet, with_pool};
use crate::interrupt;
use farwood_fabric::clock::{MILLISECOND, Nanos, SECOND};
use farwood_fabric::control::{ANCHOR_BYTES, ControlError, IndexInfo, Reply, Request};
use farwood_fabric::{CallError, Endpoint, FabricError, GlobalAddr, RegionId, ServerId};
use farwood_index::Pool;
use farwood_index::engine::PLAIN;

const MEETING: &str = "farwood-bench-meeting";
const CAME_AT: u64 = 0;
const BARRIER_AT: u64 = 8;
const RESULTS_AT: u64 = 64;
/// How many processes fit into an anchor.
pub(super) const MAX_PROCESSES: u32 = 128;
const _: () = assert!(RESULTS_AT + MAX_PROCESSES as u64 * 16 <= ANCHOR_BYTES);

/// How long a process waits for the others to come.
const COME_NS: Nanos = 60 * SECOND;
/// How long it waits for them at a barrier: as long as a run may last.
const BARRIER_NS: Nanos = 3600 * SECOND;
const LOOK_EVERY_NS: Nanos = MILLISECOND;
/// The longest piece that is read or written at once.
const PIECE_BYTES: usize = 1 << 20;

/// A process's place in a run of several.
#[derive(Clone, Copy, Debug)]
pub(super) struct Joint {
    pub(super) number: u32,
    pub(super) of: u32,
    index: u32,
    anchor: GlobalAddr,
}

impl Joint {
    /// Comes to the meeting, and waits for the others. `settings` is what all must agree on.
    pub(super) fn enter(fleet: &Fleet, of: u32, settings: &str) -> Result<Self, String> {
        let (settings, options) = (settings.to_owned(), fleet.options("bench"));
        fleet.run_one(|cluster| {
            let settings = settings.clone();
            async move {
                let pool = Pool::join(&cluster, options).await.map_err(to_text)?;
                let endpoint = pool.session().endpoint().map_err(to_text)?;
                let met = Self::meet(&pool, &endpoint, of, &settings).await;
                let left = pool.leave(&endpoint).await.map_err(to_text);
                let joint = met?;
                left.map(|_| joint)
            }
        })
    }

    async fn meet(pool: &Pool, endpoint: &Endpoint, of: u32, settings: &str) -> Result<Self, String> {
        let joint = Self::come(pool, endpoint, of, settings.as_bytes()).await?;
        let came = joint.wait(endpoint, COME_NS, CAME_AT, u64::from(of)).await.map_err(to_text)?;
        if came >= u64::from(of) {
            return Ok(joint);
        }
        if joint.is_first() {
            // Or the next run would find it.
            pool.drop_index(endpoint, MEETING).await.map_err(to_text)?;
        }
        Err(format!("--join: only {came} of {of} processes came within a minute"))
    }

    async fn come(pool: &Pool, endpoint: &Endpoint, of: u32, settings: &[u8]) -> Result<Self, String> {
        let op = endpoint.op();
        let info = match pool.create_index(&op, MEETING, PLAIN, settings).await {
            Ok(info) => {
                pool.index_ready(&op, info.id).await.map_err(to_text)?;
                info
            }
            Err(error) if matches!(error.control(), Some(ControlError::NameExists { .. })) => {
                Self::find(pool, endpoint).await?
            }
            Err(error) => return Err(to_text(error)),
        };
        if info.config != settings {
            return Err(format!(
                "--join: the other processes were started with other settings: {}",
                String::from_utf8_lossy(&info.config)
            ));
        }
        let number = op.faa(info.anchor.add(CAME_AT), 1).await.map_err(to_text)?;
        match u32::try_from(number) {
            Ok(number) if number < of => Ok(Self { number, of, index: info.id, anchor: info.anchor }),
            _ => Err(format!("--join: {of} processes have come already; wait until their run has ended")),
        }
    }

    /// Opens the meeting that another process is about to open.
    async fn find(pool: &Pool, endpoint: &Endpoint) -> Result<IndexInfo, String> {
        let deadline = endpoint.now() + COME_NS;
        loop {
            match pool.open_index(&endpoint.op(), MEETING, None).await {
                Err(error)
                    if matches!(error.control(), Some(ControlError::IndexNotReady { .. }))
                        && endpoint.now() < deadline =>
                {
                    endpoint.sleep(LOOK_EVERY_NS).await;
                }
                opened => return opened.map_err(to_text),
            }
        }
    }

    pub(super) fn is_first(&self) -> bool {
        self.number == 0
    }

    /// Waits until a word of the anchor has grown to `wanted`, or as long as one may; what it is then.
    async fn wait(
        &self,
        endpoint: &Endpoint,
        patience: Nanos,
        at: u64,
        wanted: u64,
    ) -> Result<u64, FabricError> {
        let deadline = endpoint.now().saturating_add(patience);
        loop {
            let word = endpoint.op().read_word(self.anchor.add(at)).await?;
            if word >= wanted || endpoint.now() > deadline || interrupt::came() {
                return Ok(word);
            }
            endpoint.sleep(LOOK_EVERY_NS).await;
        }
    }

    /// Waits until all processes have come here, for the `nth` time (from 1).
    pub(super) async fn barrier(&self, endpoint: &Endpoint, nth: u32) -> Result<(), String> {
        let wanted = u64::from(self.of) * u64::from(nth);
        endpoint.op().faa(self.anchor.add(BARRIER_AT), 1).await.map_err(to_text)?;
        let came = self.wait(endpoint, BARRIER_NS, BARRIER_AT, wanted).await.map_err(to_text)?;
        if came < wanted { Err("--join: another process is gone".to_owned()) } else { Ok(()) }
    }

    /// Leaves this process's result where the first one finds it.
    pub(super) async fn deliver(&self, endpoint: &Endpoint, measured: &Measured) -> Result<(), String> {
        let bytes = serde_json::to_vec(&measured.export()).map_err(|error| error.to_string())?;
        let place = self.room(endpoint, bytes.len()).await.map_err(to_text)?;
        let op = endpoint.op();
        for (n, piece) in (0u64..).zip(bytes.chunks(PIECE_BYTES)) {
            let at = place.add(n * PIECE_BYTES as u64);
            op.write(at, endpoint.buf_of(piece)).await.map_err(to_text)?;
        }
        let entry = self.anchor.add(RESULTS_AT + u64::from(self.number) * 16);
        op.write_word(entry, place.to_raw()).await.map_err(to_text)?;
        op.write_word(entry.add(8), bytes.len() as u64).await.map_err(to_text)
    }

    async fn room(&self, endpoint: &Endpoint, bytes: usize) -> Result<GlobalAddr, FabricError> {
        let session = endpoint.session().ok_or(FabricError::NoExecutor)?;
        let chunk = session.cluster().view().chunk_bytes(ServerId::COORDINATOR);
        let count = u32::try_from((bytes as u64).div_ceil(chunk)).unwrap_or(u32::MAX);
        let flushed_through = session.flushed_through();
        let request =
            Request::AllocChunks { index: self.index, class: 0, object_bytes: 0, count, flushed_through };
        match endpoint.op().control(ServerId::COORDINATOR, &request).await? {
            Reply::Chunks { offset, .. } => {
                Ok(GlobalAddr::new(ServerId::COORDINATOR, RegionId::MAIN, offset))
            }
            _ => Err(CallError::Malformed.into()),
        }
    }

    /// Adds the results of the others.
    pub(super) async fn collect(&self, endpoint: &Endpoint, measured: &mut Measured) -> Result<(), String> {
        let op = endpoint.op();
        for number in 1..self.of {
            let entry = self.anchor.add(RESULTS_AT + u64::from(number) * 16);
            let place = GlobalAddr::from_raw(op.read_word(entry).await.map_err(to_text)?);
            let length = op.read_word(entry.add(8)).await.map_err(to_text)?;
            let mut bytes = Vec::new();
            while (bytes.len() as u64) < length {
                let left = length - bytes.len() as u64;
                let piece = usize::try_from(left).unwrap_or(PIECE_BYTES).min(PIECE_BYTES);
                let at = place.add(bytes.len() as u64);
                bytes.extend_from_slice(&op.read(at, piece).await.map_err(to_text)?);
            }
            let theirs = serde_json::from_slice(&bytes).map_err(|error| format!("--join: {error}"))?;
            measured.import(&theirs);
        }
        Ok(())
    }

    /// Ends the meeting.
    pub(super) fn leave(&self, fleet: &Fleet) -> Result<(), String> {
        if !self.is_first() {
            return Ok(());
        }
        let options = fleet.options("bench");
        fleet.run_one(|cluster| async move {
            let dropped = with_pool(&cluster, options, async |pool, endpoint| {
                pool.drop_index(endpoint, MEETING).await.map_err(Into::into)
            });
            dropped.await.map_err(|error| format!("--join: {error}"))
        })
    }
}

#[expect(clippy::needless_pass_by_value, reason = "it ends an error's way")]
fn to_text(error: FabricError) -> String {
    format!("--join: {error}")
}
