//! Servers: how they begin, how they are lost, and how another process takes over the memory of one.

use super::{ConnectionState, Event, SimServer, What, World, server_group};
use crate::addr::{RegionId, ServerId};
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
    /// not been answered stay so; nobody is admitted until it comes to the new process with a call of its own.
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
            for (_, (inbox, _)) in self.inboxes.drain() {
                inbox.close();
            }
            self.give_up_calls(|_, of| matches!(of, Target::Session(_)));
        }
        for connection in 0..self.connections.len() {
            if self.connections[connection].server == server {
                self.sever(connection);
                self.connections[connection].state = ConnectionState::Closed;
            }
        }
        let (now, started) = (self.now, &mut self.servers[server]);
        started.admitted.clear();
        let identity = started.start(now).expect("it started on this memory before");
        debug_assert_eq!(identity.server, self.view.servers[server].server);
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
        Self { logic, table, regions, admitted: FxHashMap::default(), open: Vec::new(), lost: false }
    }

    /// Lets the logic start on the server's memory.
    pub(in crate::transport::sim) fn start(
        &mut self,
        now: Nanos,
    ) -> Result<crate::region::Identity, crate::server::StartError> {
        let Self { logic, regions, .. } = self;
        logic.start(&SimServerMemory { regions: RefCell::new(regions) }, now)
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
