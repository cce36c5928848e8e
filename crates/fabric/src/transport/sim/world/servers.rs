//! Servers: how they begin, how they are lost, and how another process takes over the memory of one.

use super::{ConnectionState, Event, SimServer, What, World, server_group};
use crate::addr::{RegionId, ServerId, SessionId};
use crate::call::Target;
use crate::clock::Nanos;
use crate::region::RegionTable;
use crate::server::{ServerLogic, ServerMemory};
use crate::transport::sim::Order;
use crate::transport::sim::memory::Memory;
use rustc_hash::FxHashMap;
use std::cell::RefCell;
use std::sync::Arc;

impl World {
    pub(super) fn lose_server(&mut self, server: usize) {
        self.note(9, server as u64);
        self.servers[server].lost = true;
        self.order(Order::Kill(server_group(server)));
        let target = Target::Server(self.view.servers[server].server);
        self.give_up_calls(|_, of| of == target);
        for key in self.flights_where(|c| c.server == server) {
            if self.flights[key].open {
                self.close(key);
            }
            self.give_up(key);
        }
    }

    /// Nothing comes back from a server that is gone; the client finds out by a time-out.
    pub(super) fn give_up(&mut self, key: usize) {
        let flying = self.flying(key);
        self.settle(key);
        if self.flights.contains(key) {
            self.schedule(self.now + self.config.timeout_ns, Event::new(What::TimeOut, flying));
        }
    }

    /// Another process takes over the server's memory. Verbs in flight land now or never, procedures end, and calls that have
    /// not been answered stay so. The sessions that it lets in again reconnect and go on; where clients touch memory themselves, nothing is in
    /// flight at the server, and they find another gate without noticing ([`crate::transport::shm`]). All others find their connections closed.
    pub(super) fn restart_server(&mut self, server: usize) {
        if self.servers[server].lost {
            return;
        }
        self.note(10, server as u64);
        self.counts.restarts += 1;
        self.order(Order::Kill(server_group(server)));
        let target = Target::Server(self.view.servers[server].server);
        self.give_up_calls(|_, of| of == target);
        if server == ServerId::COORDINATOR.index() {
            self.give_up_calls(|_, of| matches!(of, Target::Session(_)));
        }
        let (now, started) = (self.now, &mut self.servers[server]);
        started.admitted.clear();
        let identity = started.start(now).expect("it started on this memory before");
        debug_assert!(identity.has_memory_of(&self.view.servers[server]));
        self.carry_out_readmission(server);
        if server == ServerId::COORDINATOR.index() {
            let admitted = &self.servers[server].admitted;
            let mut ended: Vec<SessionId> =
                self.inboxes.keys().filter(|session| !admitted.contains_key(session)).copied().collect();
            ended.sort_unstable();
            for (inbox, _) in ended.iter().filter_map(|session| self.inboxes.remove(session)) {
                inbox.close();
            }
        }
        for connection in 0..self.connections.len() {
            let c = &self.connections[connection];
            if c.server != server || c.state == ConnectionState::Closed {
                continue;
            }
            let goes_on = !c.near && self.servers[server].admitted.contains_key(&c.session);
            if goes_on && self.config.capabilities.immediate {
                continue;
            }
            self.sever(connection);
            self.counts.broken += u64::from(goes_on);
            self.connections[connection].state =
                if goes_on { ConnectionState::Broken } else { ConnectionState::Closed };
        }
    }

    /// Lets those in whom the logic knows.
    fn carry_out_readmission(&mut self, server: usize) {
        let SimServer { logic, regions, .. } = &mut self.servers[server];
        let actions = logic.readmit(&SimServerMemory { regions: RefCell::new(regions) });
        self.carry_out(server, actions);
    }

    /// Which life of a server this is.
    pub(in crate::transport::sim) fn life(&self, server: ServerId) -> u64 {
        self.servers.get(server.index()).map_or(0, |server| server.life)
    }
}

impl SimServer {
    pub(in crate::transport::sim) fn new(logic: Arc<dyn ServerLogic>) -> Self {
        let specs = logic.regions();
        let mut regions: Vec<Option<Memory>> = (0..=RegionId::MAX).map(|_| None).collect();
        for spec in &specs {
            regions[usize::from(spec.id.get())] = Some(Memory::new(spec));
        }
        let table = RegionTable::new(&specs);
        Self { logic, table, regions, admitted: FxHashMap::default(), open: Vec::new(), lost: false, life: 0 }
    }

    /// Lets the logic start on the server's memory.
    pub(in crate::transport::sim) fn start(
        &mut self,
        now: Nanos,
    ) -> Result<crate::region::Identity, crate::server::StartError> {
        let Self { logic, regions, life, .. } = self;
        let identity = logic.start(&SimServerMemory { regions: RefCell::new(regions) }, now)?;
        *life = identity.life;
        Ok(identity)
    }
}

/// The server's side of its memory.
pub(super) struct SimServerMemory<'a> {
    pub(super) regions: RefCell<&'a mut Vec<Option<Memory>>>,
}

impl ServerMemory for SimServerMemory<'_> {
    fn load(&self, region: RegionId, offset: u64) -> u64 {
        let offset = usize::try_from(offset).expect("a simulated offset fits");
        self.regions.borrow()[usize::from(region.get())]
            .as_ref()
            .expect("the logic knows its regions")
            .load(offset)
    }

    fn store(&self, region: RegionId, offset: u64, value: u64) {
        let offset = usize::try_from(offset).expect("a simulated offset fits");
        let mut regions = self.regions.borrow_mut();
        regions[usize::from(region.get())]
            .as_mut()
            .expect("the logic knows its regions")
            .store(offset, value);
    }
}
