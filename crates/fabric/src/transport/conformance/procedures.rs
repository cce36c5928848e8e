//! The procedures that servers must offer for the suite; sessions that serve calls offer the same ones.

use super::client::PATIENCE_NS;
use crate::addr::GlobalAddr;
use crate::call::{CallError, CallOutcome};
use crate::clock::{MICROSECOND, Nanos};
use crate::procedure::{Procedure, ProcedureContext, ProcedureFuture, ProcedureId, ProcedureSet, Weight};
use crate::wire::{Wire, encode, wire_enum};
use std::sync::Arc;

/// Answers with its request.
pub(super) const ECHO: ProcedureId = ProcedureId(0xc0f0_0000);
/// Fails.
pub(super) const FAIL: ProcedureId = ProcedureId(0xc0f0_0001);
/// Works beside the memory, see [`Task`].
pub(super) const WORK: ProcedureId = ProcedureId(0xc0f0_0002);
/// The same, but of weight `Long`.
pub(super) const LONG_WORK: ProcedureId = ProcedureId(0xc0f0_0003);

/// What [`FAIL`] fails with.
pub(super) const FAILS_WITH: &str = "it was asked to fail";

wire_enum! {
    /// What a procedure does.
    #[derive(Clone, PartialEq, Eq, Debug)]
    pub(super) enum Task {
        /// Says in whose name it works: caller, session of its endpoint.
        Whoami = 1 {},
        /// READs.
        Read = 2 {
            /// From where.
            at: GlobalAddr,
            /// How many bytes.
            len: u32,
        },
        /// WRITEs.
        Write = 3 {
            /// Where.
            at: GlobalAddr,
            /// What.
            data: Vec<u8>,
        },
        /// Counts its execution by an FAA, then takes its time. -> the word before
        Count = 4 {
            /// The counter.
            at: GlobalAddr,
            /// How long it takes.
            sleep_ns: Nanos,
        },
        /// Counts its execution and stays until a word is not zero. -> the counter before
        Gate = 5 {
            /// The counter.
            count: GlobalAddr,
            /// The word.
            gate: GlobalAddr,
        },
        /// WRITEs 1, 2, 3, ... to a word until it no longer can.
        Pump = 6 {
            /// The word.
            at: GlobalAddr,
        },
    }
}

/// The procedures of the suite.
pub fn procedures() -> ProcedureSet {
    let works = |id, weight| Arc::new(Works { id, weight });
    ProcedureSet::default()
        .with(Arc::new(Echo))
        .with(Arc::new(Fails))
        .with(works(WORK, Weight::Short))
        .with(works(LONG_WORK, Weight::Long))
}

#[derive(Debug)]
struct Echo;

impl Procedure for Echo {
    fn id(&self) -> ProcedureId {
        ECHO
    }

    fn run(self: Arc<Self>, _: ProcedureContext, request: Vec<u8>) -> ProcedureFuture {
        Box::pin(std::future::ready(Ok(request)))
    }
}

#[derive(Debug)]
struct Fails;

impl Procedure for Fails {
    fn id(&self) -> ProcedureId {
        FAIL
    }

    fn run(self: Arc<Self>, _: ProcedureContext, _: Vec<u8>) -> ProcedureFuture {
        Box::pin(std::future::ready(Err(CallError::Failed(FAILS_WITH.to_owned()))))
    }
}

#[derive(Debug)]
struct Works {
    id: ProcedureId,
    weight: Weight,
}

impl Procedure for Works {
    fn id(&self) -> ProcedureId {
        self.id
    }

    fn weight(&self) -> Weight {
        self.weight
    }

    fn run(self: Arc<Self>, context: ProcedureContext, request: Vec<u8>) -> ProcedureFuture {
        Box::pin(async move {
            let task = Task::take(&mut request.as_slice()).map_err(|_| CallError::Malformed)?;
            work(&context, task).await
        })
    }
}

async fn work(context: &ProcedureContext, task: Task) -> CallOutcome {
    let failed = |error: crate::FabricError| CallError::Failed(format!("{error:?}"));
    let endpoint = &context.endpoint;
    let op = endpoint.op();
    match task {
        Task::Whoami {} => {
            let mut names = encode(&context.caller);
            endpoint.session_id().put(&mut names);
            Ok(names)
        }
        Task::Read { at, len } => op.read(at, len as usize).await.map(|buf| buf.to_vec()).map_err(failed),
        Task::Write { at, data } => {
            op.write(at, endpoint.buf_of(&data)).await.map_err(failed)?;
            Ok(Vec::new())
        }
        Task::Count { at, sleep_ns } => {
            let before = op.faa(at, 1).await.map_err(failed)?;
            endpoint.sleep(sleep_ns).await;
            Ok(encode(&before))
        }
        Task::Gate { count, gate } => {
            let before = op.faa(count, 1).await.map_err(failed)?;
            let deadline = endpoint.now() + PATIENCE_NS;
            while op.read_word(gate).await.map_err(failed)? == 0 {
                if endpoint.now() > deadline {
                    return Err(CallError::Failed("the gate stayed shut".to_owned()));
                }
                endpoint.sleep(20 * MICROSECOND).await;
            }
            Ok(encode(&before))
        }
        Task::Pump { at } => {
            let deadline = endpoint.now() + PATIENCE_NS;
            let mut n = 0;
            while endpoint.now() < deadline {
                n += 1;
                op.write_word(at, n).await.map_err(failed)?;
                if n % 16 == 0 {
                    endpoint.sleep(MICROSECOND).await;
                }
            }
            Err(CallError::Failed("nobody stopped the pump".to_owned()))
        }
    }
}
