//! An index that is out of use for a repair: one session has it to itself, and frees what nothing in it leads to.
//!
//! The coordinator does not know which session has which index open. So an index can be taken out of use only by a
//! session that is alone in the pool, which is decided in one call; whoever joins later cannot open the index. The
//! right ends with `BringOnline`, or with the session that has it: that one is fenced on every server before it is
//! recovered, so nothing of it can land in an index that is in use again. It is a state in the catalog, so it survives
//! the coordinator's process as the session does.
//!
//! What the repairer frees are bits of objects, by CAS, without the server; and raw bytes, by `FreeExtent`, whose seal
//! proves the right to servers that have no catalog.

use crate::server::Server;
use farwood_fabric::addr::SessionId;
use farwood_fabric::clock::Nanos;
use farwood_fabric::control::{ControlError, IndexId, Reply, Request};
use farwood_fabric::server::ServerMemory;

impl Server {
    /// Requests of whoever repairs an index.
    pub(crate) fn repair_request(
        &mut self,
        memory: &dyn ServerMemory,
        caller: SessionId,
        request: &Request,
        now: Nanos,
    ) -> Result<Reply, ControlError> {
        match request {
            Request::TakeOffline { name } => self.take_offline(memory, caller, name, now),
            Request::BringOnline { index } => {
                let term = self.sessions.term(caller);
                self.catalog.bring_back(memory, |other, by| other == *index && by == term);
                Ok(Reply::Done {})
            }
            Request::FreeExtent { index, offset, generation, seal } => {
                self.check_repairer(memory, caller, *index, *seal)?;
                let generation = self.check_generation(*generation)?;
                self.chunks.free_extent(memory, *index, *offset, generation)?;
                Ok(Reply::Done {})
            }
            _ => Err(ControlError::BadRequest { why: "no request about a repair".to_owned() }),
        }
    }

    fn take_offline(
        &mut self,
        memory: &dyn ServerMemory,
        caller: SessionId,
        name: &str,
        now: Nanos,
    ) -> Result<Reply, ControlError> {
        let term = self.sessions.term(caller);
        if self.catalog.repairer(name)? != Some(term) {
            let mut others = self.list_sessions(now);
            others.retain(|info| info.session != caller);
            if !others.is_empty() {
                return Err(ControlError::IndexInUse { name: name.to_owned(), others });
            }
        }
        let info = self.catalog.take_offline(memory, name, term)?;
        let seal = self.config.secret.offline(self.identity.incarnation, info.id, (caller, term));
        Ok(Reply::Offline { info, seal })
    }

    /// Whether the index is out of use for the caller's repair: the coordinator knows, the others are shown its seal.
    fn check_repairer(
        &self,
        memory: &dyn ServerMemory,
        caller: SessionId,
        index: IndexId,
        seal: u64,
    ) -> Result<(), ControlError> {
        let term = self.sessions.term(caller);
        if !self.config.is_coordinator() {
            let right = self.config.secret.offline(self.coordinator(memory), index, (caller, term));
            return self.check_seal(seal, right);
        }
        if self.catalog.repairer_of(index) == Some(term) {
            return Ok(());
        }
        Err(ControlError::BadRequest { why: format!("index #{index} is not out of use for {caller}") })
    }

    /// Whether this session may open the index: nobody repairs it, or this one does.
    pub(crate) fn check_online(&self, name: &str, caller: SessionId) -> Result<(), ControlError> {
        match self.catalog.repairer(name)? {
            Some(term) if caller.is_none() || self.sessions.term(caller) != term => {
                let by = self.sessions.of_term(term);
                Err(ControlError::IndexOffline { name: name.to_owned(), by })
            }
            _ => Ok(()),
        }
    }
}
