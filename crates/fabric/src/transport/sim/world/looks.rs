//! What a look needs of the world: when its words are read, what goes wrong meanwhile, and whether it counts.

use super::{LONG_READ_ONE_IN, Rare, World};
use crate::addr::RegionId;
use crate::clock::Nanos;
use crate::error::FabricError;
use crate::transport::sim::Order;
use crate::transport::sim::faults::Fault;
use crate::transport::sim::look::Look;
use std::hash::Hasher;

impl World {
    /// Begins a look, which counts as a verb of its process.
    pub(in crate::transport::sim) fn begin_look(
        &mut self,
        connection: usize,
        offset: usize,
        len: usize,
    ) -> Result<Look, FabricError> {
        let (group, process) = (self.connections[connection].group, self.connections[connection].process);
        self.bury_the_doomed();
        // A process that dies here sees nothing more, and its tasks are ended after this poll.
        let dies = Err(FabricError::Fenced { session: self.connections[connection].session });
        if self.processes[process].dead {
            return dies;
        }
        let mut stopped_ns = 0;
        for fault in self.processes[process].count_verbs(1) {
            match fault {
                Fault::Kill { .. } => {
                    self.die(group);
                    return dies;
                }
                Fault::Pause { for_ns, .. } => {
                    self.note(3, u64::from(group));
                    self.order(Order::Pause(group));
                    self.schedule_rare(self.now + for_ns, Rare::Resume { group });
                    stopped_ns = for_ns;
                }
                _ => {}
            }
        }
        self.counts.looks += 1;
        self.note(10, offset as u64);
        let span = if self.looking { 0 } else { self.draw_span() + stopped_ns };
        Ok(Look::draw(offset, len, self.now, span, &mut self.rng))
    }

    /// How long a look lasts.
    fn draw_span(&mut self) -> Nanos {
        if !self.config.tear || self.rng.bool() {
            return 0;
        }
        if self.config.long_read_ns > 0 && self.rng.u32(0..LONG_READ_ONE_IN / 2) == 0 {
            self.counts.long += 1;
            return self.rng.u64(1..=self.config.long_read_ns);
        }
        self.rng.u64(1..=self.config.window_ns)
    }

    /// Whether there is time until then for the world to go on inside a look.
    pub(in crate::transport::sim) fn begin_pass(&mut self, until: Nanos) -> bool {
        let begins = !self.looking && self.now < until;
        self.looking |= begins;
        begins
    }

    pub(in crate::transport::sim) fn end_pass(&mut self) {
        self.looking = false;
    }

    /// Which of so many goes first.
    pub(in crate::transport::sim) fn choose(&mut self, ready: usize) -> usize {
        self.rng.usize(0..ready)
    }

    pub(in crate::transport::sim) fn load_word(
        &self,
        connection: usize,
        region: RegionId,
        offset: usize,
    ) -> u64 {
        let server = &self.servers[self.connections[connection].server];
        server.regions[usize::from(region.get())].as_ref().expect("checked").load(offset)
    }

    /// Takes a word that was looked at into the trace.
    pub(in crate::transport::sim) fn note_look(&mut self, word: u64) {
        self.trace.write_u64(word);
    }

    /// Whether what a look has seen counts: the connection is still open.
    pub(in crate::transport::sim) fn check_gate(&self, connection: usize) -> Result<(), FabricError> {
        if self.config.sabotage.look_without_gate {
            return Ok(());
        }
        self.why_not_reconnected(connection).map_or(Ok(()), Err)
    }
}
