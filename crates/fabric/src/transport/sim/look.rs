//! Looks: READs that a thread carries out itself, while the rest of the world goes on.
//!
//! In an *immediate* world ([`Capabilities::immediate`](crate::caps::Capabilities)) clients touch memory themselves, as on `local` and `shm`.
//! Their batches are flights as everywhere: what others can see of a verb is the same, whoever carries it out. A look is none. It happens
//! within the poll of its task, which does not end meanwhile, so the world goes on *inside* it: between the pieces into which its words fall,
//! time passes, events happen, and tasks of other processes are polled. Those of its own process wait, as if it had one thread.
//!
//! - One look in two takes no time; most of the others as long as a verb's effects may spread; one in sixteen as long as a READ that lasts
//!   long. A process that is stopped at a look ([`Fault::Pause`](super::Fault::Pause)) is stopped in the middle of it.
//! - Only one look at a time lasts: those of tasks that are polled inside it take no time.
//! - What was made of the words counts if the connection was open afterwards, as behind a real gate.

use super::tear::{Limits, Torn};
use super::world::World;
use super::{SimCluster, SimLink};
use crate::addr::{GlobalAddr, RegionId};
use crate::clock::Nanos;
use crate::error::FabricError;
use crate::exec::{Executor, GroupId};
use crate::marks;
use crate::mem::Words;
use crate::region::Permissions;
use smallvec::SmallVec;
use std::sync::atomic::{AtomicU64, Ordering};

/// Which words of a look are read when.
pub(super) struct Look {
    pub(super) torn: Torn,
    /// When each piece is.
    pub(super) times: SmallVec<[Nanos; 8]>,
    pub(super) ends_at: Nanos,
}

impl Look {
    /// Draws a look at `len` bytes that lasts for `span` from `now` on.
    pub(super) fn draw(offset: usize, len: usize, now: Nanos, span: Nanos, rng: &mut fastrand::Rng) -> Self {
        // A processor keeps words whole and promises nothing about their order.
        let torn = Torn::new(offset, len, Limits { line_atomic: false, ascending: false }, rng);
        let ends_at = now + span;
        let mut times: SmallVec<[Nanos; 8]> =
            (0..torn.pieces()).map(|_| if span == 0 { now } else { rng.u64(now..=ends_at) }).collect();
        times.sort_unstable();
        Self { torn, times, ends_at }
    }
}

impl SimLink {
    /// READ of aligned words where they are; `None` unless the world is immediate.
    #[cold]
    #[inline(never)]
    pub(crate) fn look<T>(
        &self,
        executor: &Executor,
        addr: GlobalAddr,
        len: usize,
        with: impl FnOnce(Words<'_>) -> T,
    ) -> Option<Result<T, FabricError>> {
        self.cluster.capabilities.immediate.then(|| {
            let words = self.words(executor, addr, len)?;
            let seen = with(Words::of(&words));
            self.cluster.world.borrow().check_gate(self.route(addr.server())?.0)?;
            Ok(seen)
        })
    }

    /// The words, each as it was at some instant of the look.
    fn words(
        &self,
        executor: &Executor,
        addr: GlobalAddr,
        len: usize,
    ) -> Result<Vec<AtomicU64>, FabricError> {
        let (connection, table) = self.route(addr.server())?;
        if !addr.is_word_aligned() || len % 8 != 0 {
            return Err(FabricError::Misaligned { addr });
        }
        table.check(addr, len as u64, Permissions::READ)?;
        let words: Vec<AtomicU64> = (0..len / 8).map(|_| AtomicU64::new(0)).collect();
        if words.is_empty() {
            return Ok(words);
        }
        let place = (addr.region(), usize::try_from(addr.offset()).expect("checked against the region"));
        let look = self.cluster.world.borrow().begin_look(*connection, place.1, len)?;
        for (piece, at) in (0..look.torn.pieces()).zip(&look.times) {
            self.cluster.pass(executor, *at, self.group);
            self.cluster.world.borrow().load_piece(
                *connection,
                place,
                &look.torn.ranges(piece, place.1, len),
                &words,
            );
        }
        self.cluster.pass(executor, look.ends_at, self.group);
        Ok(words)
    }
}

impl SimCluster {
    /// Lets the world go on until then, without the tasks of one process.
    fn pass(&self, executor: &Executor, until: Nanos, without: GroupId) {
        if !self.world.borrow().begin_pass(until) {
            return;
        }
        marks::hit("look_lasted");
        loop {
            let choose = |ready| self.world.borrow().choose(ready);
            while executor.poll_one_except(without, choose) {
                self.carry_out_orders(executor);
            }
            // A world that is stuck is found so by its runner.
            if !matches!(self.advance(executor, until), Ok(true)) {
                break;
            }
            self.carry_out_orders(executor);
        }
        self.world.borrow().end_pass();
    }
}

impl World {
    /// Reads some words of a look now.
    fn load_piece(
        &mut self,
        connection: usize,
        (region, offset): (RegionId, usize),
        ranges: &[(usize, usize)],
        words: &[AtomicU64],
    ) {
        for (from, to) in ranges {
            for at in (*from..*to).step_by(8) {
                let word = self.load_word(connection, region, offset + at);
                words[at / 8].store(word, Ordering::Relaxed);
                self.note_look(word);
            }
        }
    }
}
