//! Code that runs where it is called: on a memory server (DEX's offloaded traversal, dLSM's compaction) or on
//! another compute server (DEX's hand-over of a range).
//!
//! A procedure is `async` and works through the same [`Endpoint`] as a client, so that one piece of engine code can
//! run on either side, takes locks by the same means, and has a scheduling point at every verb, in the simulator too.
//! It acts in its caller's name: locks carry the caller's session, the caller's epoch pin protects what it reads, and
//! fencing the caller ends its verbs too.

use crate::addr::SessionId;
use crate::call::CallOutcome;
use crate::endpoint::Endpoint;
use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

/// Number of a procedure. Below [`ProcedureId::FIRST_FREE`] they belong to the memory server itself.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ProcedureId(pub u32);

impl ProcedureId {
    /// The memory server's own calls (see [`crate::control`]).
    pub const CONTROL: ProcedureId = ProcedureId(0);
    /// The first number that engines may use.
    pub const FIRST_FREE: ProcedureId = ProcedureId(256);
}

impl fmt::Display for ProcedureId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{}", self.0)
    }
}

impl crate::wire::Wire for ProcedureId {
    fn put(&self, out: &mut Vec<u8>) {
        self.0.put(out);
    }
    fn take(input: &mut &[u8]) -> Result<Self, crate::wire::Malformed> {
        u32::take(input).map(ProcedureId)
    }
}

/// How long a procedure is expected to run; long ones never keep short ones from starting.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Weight {
    /// Microseconds: a traversal, a hand-over message.
    Short,
    /// Milliseconds and more: a compaction.
    Long,
}

/// A procedure under way.
pub type ProcedureFuture = Pin<Box<dyn Future<Output = CallOutcome>>>;

/// What a procedure gets to work with.
#[derive(Clone, Debug)]
pub struct ProcedureContext {
    /// Verbs on the memory it runs beside (on a memory server: that server's regions only), time, randomness, tasks.
    pub endpoint: Endpoint,
    /// Who called.
    pub caller: SessionId,
}

/// Code that can be called.
pub trait Procedure: Send + Sync + fmt::Debug {
    /// Its number, at least [`ProcedureId::FIRST_FREE`].
    fn id(&self) -> ProcedureId;

    /// How long it runs.
    fn weight(&self) -> Weight {
        Weight::Short
    }

    /// Runs it.
    fn run(self: Arc<Self>, context: ProcedureContext, request: Vec<u8>) -> ProcedureFuture;
}

/// The procedures that a server or a session offers.
#[derive(Clone, Default, Debug)]
pub struct ProcedureSet {
    by_id: BTreeMap<ProcedureId, Arc<dyn Procedure>>,
}

impl ProcedureSet {
    /// Adds a procedure.
    ///
    /// # Panics
    /// If its number is reserved or taken: two engines would answer each other's calls.
    #[must_use]
    pub fn with(mut self, procedure: Arc<dyn Procedure>) -> Self {
        let id = procedure.id();
        assert!(id >= ProcedureId::FIRST_FREE, "procedure {id} is reserved for the memory server");
        assert!(self.by_id.insert(id, procedure).is_none(), "procedure {id} is registered twice");
        self
    }

    /// Finds a procedure.
    pub fn get(&self, id: ProcedureId) -> Option<Arc<dyn Procedure>> {
        self.by_id.get(&id).cloned()
    }
}
