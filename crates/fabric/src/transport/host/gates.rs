//! Gates: how a connection whose client touches the memory itself is closed for good.
//!
//! No server stands between such a client and the bytes, so the client asks a gate: a line of memory that both ends see,
//! one per connection. It raises `busy` before each batch that may change memory and then looks at `open`; whoever fences
//! it lowers `open`, then waits until `busy` is down. Both sides use sequentially consistent accesses, so either the client
//! sees the fence or the fence waits for the batch. A client that has been stopped in the middle of a batch keeps `busy` up;
//! its process is then ended ([`Holder::end`]) and waited for, which lowers nothing but makes sure of the same.
//!
//! ```text
//! +0   busy     1 while a batch runs; written by the client
//! +8   open     1 while the connection may be used; written by the server, lowered by the client when its server is gone
//! +16  pid      the client's process; 0: this gate is free, or the client is in the server's own process
//! +24  started  when that process started: a pid that was used again means somebody else
//! +32  session  whose connection it is, and
//! +40  term     of which term: so that the next server on this memory knows whose process ended while there was none
//! ```
//!
//! Gate 0 is never open: it is what those get who may not touch memory.
//!
//! Invariant: a gate is given out again only when whoever had it has given it back or its process is gone. A process that
//! sleeps and wakes up much later, perhaps under another server on the same memory, finds its own gate, closed.

use crate::addr::SessionId;
use crate::mem::RacyMemory;
use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

const GATE_BYTES: usize = 64;
const BUSY_AT: usize = 0;
const OPEN_AT: usize = 8;
const PID_AT: usize = 16;
const STARTED_AT: usize = 24;
const SESSION_AT: usize = 32;
const TERM_AT: usize = 40;

/// How many connections one server can have: as many gates as fit in this much memory.
pub(crate) const GATES_BYTES: usize = 1 << 20;

/// How often a fence looks at a busy gate before it lets other threads run.
const SPINS: u32 = 2000;

/// A client process, to those who may have to end it.
pub(crate) trait Holder: Send + Sync + fmt::Debug {
    /// Its pid, and when it started.
    fn name(&self) -> (u64, u64);
    /// Whether it has ended.
    fn is_gone(&self) -> bool;
    /// Waits a little for `idle` to come true; if it does not, ends the process and returns when it is gone.
    fn end_unless(&self, idle: &dyn Fn() -> bool);
}

/// One connection's gate, as either end sees it.
pub(crate) struct Gate {
    memory: Arc<RacyMemory>,
    /// It changes only where a connection gets another gate ([`Gate::move_to`]).
    at: AtomicUsize,
}

impl Clone for Gate {
    fn clone(&self) -> Self {
        Self { memory: Arc::clone(&self.memory), at: AtomicUsize::new(self.at()) }
    }
}

impl Gate {
    pub(crate) fn new(memory: &Arc<RacyMemory>, number: u32) -> Option<Self> {
        let at = usize::try_from(number).ok()?.checked_mul(GATE_BYTES)?;
        (at.checked_add(GATE_BYTES)? <= memory.len())
            .then(|| Self { memory: Arc::clone(memory), at: AtomicUsize::new(at) })
    }

    pub(crate) fn number(&self) -> u32 {
        u32::try_from(self.at() / GATE_BYTES).expect("there are far fewer gates")
    }

    #[inline]
    fn at(&self) -> usize {
        self.at.load(Ordering::Relaxed)
    }

    /// The connection goes through another gate of the same server from now on. No batch is inside.
    pub(crate) fn move_to(&self, number: u32) {
        if let Some(other) = Self::new(&self.memory, number) {
            self.at.store(other.at(), Ordering::Relaxed);
        }
    }

    /// Raises `busy`; false if the gate is closed.
    #[inline]
    pub(crate) fn enter(&self) -> bool {
        self.memory.word(self.at() + BUSY_AT).swap(1, Ordering::SeqCst);
        let open = self.memory.word(self.at() + OPEN_AT).load(Ordering::SeqCst) == 1;
        if !open {
            self.leave();
        }
        open
    }

    #[inline]
    pub(crate) fn leave(&self) {
        self.memory.word(self.at() + BUSY_AT).store(0, Ordering::Release);
    }

    /// Whether the gate is open. A READ changes nothing, so a fence need not wait for it; but what it brings counts only if
    /// the gate is still open afterwards, or it might be memory that was reused meanwhile.
    #[inline]
    pub(crate) fn is_open(&self) -> bool {
        self.memory.word(self.at() + OPEN_AT).load(Ordering::Acquire) == 1
    }

    /// Nothing new passes from now on; a batch that is inside may still run.
    pub(crate) fn shut(&self) {
        self.memory.word(self.at() + OPEN_AT).store(0, Ordering::SeqCst);
    }

    fn is_idle(&self) -> bool {
        self.memory.word(self.at() + BUSY_AT).load(Ordering::SeqCst) == 0
    }

    /// Returns when no batch runs behind the gate and none can begin.
    pub(crate) fn close(&self, holder: Option<&dyn Holder>) {
        self.shut();
        for _ in 0..SPINS {
            if self.is_idle() {
                return;
            }
            std::hint::spin_loop();
        }
        match holder {
            Some(holder) => holder.end_unless(&|| self.is_idle()),
            // A thread of this process: it is inside for microseconds and never blocks there, so this ends.
            None => {
                while !self.is_idle() {
                    std::thread::yield_now();
                }
            }
        }
    }
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gate({})", self.number())
    }
}

/// All gates of one server, on the server's side.
#[derive(Debug)]
pub(crate) struct Gates {
    memory: Arc<RacyMemory>,
    state: Mutex<State>,
}

#[derive(Default, Debug)]
struct State {
    /// Gates that can be given out, the lowest last.
    free: Vec<u32>,
    /// Closed gates of processes that left them behind, and are not known to be gone.
    forlorn: Vec<(Gate, Arc<dyn Holder>)>,
    /// Sessions, with their terms, whose processes had gates of an earlier server and are gone.
    orphans: Vec<(SessionId, u64)>,
}

impl Gates {
    /// The gates in this memory. Those that an earlier server gave out are closed first: `find` brings the process that has
    /// one, if it is still there.
    pub(crate) fn take_over(memory: RacyMemory, find: impl Fn(u64, u64) -> Option<Arc<dyn Holder>>) -> Self {
        // What else is in the same large page is not ours.
        let bytes = memory.len().min(GATES_BYTES);
        let count = u32::try_from(bytes / GATE_BYTES).unwrap_or(u32::MAX);
        let gates = Self { memory: Arc::new(memory), state: Mutex::default() };
        for gate in (1..count).rev().filter_map(|number| Gate::new(&gates.memory, number)) {
            let [pid, started] = [PID_AT, STARTED_AT].map(|at| gates.word(&gate, at).load(Ordering::SeqCst));
            gate.shut();
            if let Some(holder) = find(pid, started).filter(|_| pid != 0) {
                gate.close(Some(&*holder));
                gates.leave_behind(&gate, holder);
                continue;
            }
            let [session, term] =
                [SESSION_AT, TERM_AT].map(|at| gates.word(&gate, at).load(Ordering::SeqCst));
            let session = u16::try_from(session).ok().filter(|session| pid != 0 && *session != 0);
            if let Some(session) = session {
                crate::exec::lock(&gates.state).orphans.push((SessionId::new(session), term));
            }
            gates.give_back(&gate);
        }
        gates
    }

    /// Whose processes ended while there was no server that could have noticed.
    pub(crate) fn take_orphans(&self) -> Vec<(SessionId, u64)> {
        let mut orphans = std::mem::take(&mut crate::exec::lock(&self.state).orphans);
        orphans.sort_unstable();
        orphans.dedup();
        orphans
    }

    /// Gates in memory of this process alone.
    pub(crate) fn new(memory: RacyMemory) -> Self {
        Self::take_over(memory, |_, _| None)
    }

    fn word(&self, gate: &Gate, at: usize) -> &AtomicU64 {
        self.memory.word(gate.at() + at)
    }

    /// The gate that is never open.
    pub(crate) fn closed(&self) -> Gate {
        Gate { memory: Arc::clone(&self.memory), at: AtomicUsize::new(0) }
    }

    /// An open gate for a connection of this session and term; `None` if all are in use.
    pub(crate) fn take(&self, holder: Option<&dyn Holder>, who: (SessionId, u64)) -> Option<Gate> {
        self.forget_the_gone();
        let number = crate::exec::lock(&self.state).free.pop()?;
        let gate = Gate::new(&self.memory, number)?;
        let (pid, started) = holder.map_or((0, 0), Holder::name);
        let (session, term) = (u64::from(who.0.get()), who.1);
        let names = [(SESSION_AT, session), (TERM_AT, term), (STARTED_AT, started), (PID_AT, pid)];
        for (at, value) in [(BUSY_AT, 0)].into_iter().chain(names).chain([(OPEN_AT, 1)]) {
            self.word(&gate, at).store(value, Ordering::SeqCst);
        }
        Some(gate)
    }

    /// A closed gate that its client will not use again.
    pub(crate) fn give_back(&self, gate: &Gate) {
        self.word(gate, PID_AT).store(0, Ordering::SeqCst);
        crate::exec::lock(&self.state).free.push(gate.number());
    }

    /// A closed gate whose client did not say goodbye.
    pub(crate) fn leave_behind(&self, gate: &Gate, holder: Arc<dyn Holder>) {
        crate::exec::lock(&self.state).forlorn.push((gate.clone(), holder));
    }

    /// A process gives a gate back that it had from an earlier server on this memory.
    pub(crate) fn reclaim(&self, number: u32, from: &dyn Holder) {
        let is_it = |(gate, holder): &(Gate, Arc<dyn Holder>)| {
            gate.number() == number && holder.name() == from.name()
        };
        let found = {
            let mut state = crate::exec::lock(&self.state);
            state.forlorn.iter().position(is_it).map(|at| state.forlorn.swap_remove(at))
        };
        if let Some((gate, _)) = found {
            self.give_back(&gate);
        }
    }

    fn forget_the_gone(&self) {
        let mut state = crate::exec::lock(&self.state);
        if state.forlorn.is_empty() {
            return;
        }
        let (gone, forlorn) =
            std::mem::take(&mut state.forlorn).into_iter().partition(|(_, holder)| holder.is_gone());
        state.forlorn = forlorn;
        drop(state);
        let gone: Vec<(Gate, Arc<dyn Holder>)> = gone;
        for (gate, _) in gone {
            self.give_back(&gate);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHO: (SessionId, u64) = (SessionId::new(3), 9);

    fn gates() -> Gates {
        Gates::new(RacyMemory::zeroed(4 * GATE_BYTES).unwrap())
    }

    #[test]
    fn a_closed_gate_lets_nobody_in_and_stays_idle() {
        let gates = gates();
        let gate = gates.take(None, WHO).unwrap();
        assert!(gate.enter());
        gate.leave();
        gate.close(None);
        assert!(!gate.enter() && !gate.is_open() && gate.is_idle());
        assert!(!gates.closed().enter());
    }

    #[test]
    fn gates_run_out_and_come_back_open() {
        let gates = gates();
        let taken: Vec<_> = (0..3).map(|_| gates.take(None, WHO).unwrap()).collect();
        assert_eq!(taken.iter().map(Gate::number).collect::<Vec<_>>(), [1, 2, 3]);
        assert!(gates.take(None, WHO).is_none(), "gate 0 is nobody's");
        taken[1].close(None);
        gates.give_back(&taken[1]);
        let again = gates.take(None, WHO).unwrap();
        assert!(again.number() == 2 && again.enter());
    }

    #[derive(Default, Debug)]
    struct Named {
        ended: AtomicU64,
        gone: std::sync::atomic::AtomicBool,
    }

    impl Holder for Named {
        fn name(&self) -> (u64, u64) {
            (77, 5)
        }
        fn is_gone(&self) -> bool {
            self.gone.load(Ordering::Relaxed)
        }
        fn end_unless(&self, idle: &dyn Fn() -> bool) {
            assert!(!idle());
            self.ended.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn who_is_stuck_inside_is_ended_and_who_is_not_is_not() {
        let gates = gates();
        let holder = Named::default();
        let (stuck, fine) =
            (gates.take(Some(&holder), WHO).unwrap(), gates.take(Some(&holder), WHO).unwrap());
        assert!(stuck.enter());
        stuck.close(Some(&holder));
        fine.close(Some(&holder));
        assert_eq!(holder.ended.load(Ordering::Relaxed), 1);
    }

    /// A zombie that came back under a new server on the same memory found its gate open: another client's.
    #[test]
    fn a_gate_is_not_given_out_again_while_the_process_that_had_it_lives() {
        let gates = gates();
        let holder = Arc::new(Named::default());
        let zombies = gates.take(Some(&*holder), WHO).unwrap();
        let gave_back = gates.take(Some(&*holder), WHO).unwrap();
        gave_back.close(Some(&*holder));
        gates.give_back(&gave_back);
        let memory = Arc::into_inner({
            drop(gave_back);
            let Gates { memory, .. } = gates;
            memory
        });
        assert!(memory.is_none(), "the zombie has it mapped");
        let again = RacyMemory::zeroed(4 * GATE_BYTES).unwrap();
        zombies.memory.copy_to(0, &again, 0, 4 * GATE_BYTES, crate::mem::Side::Source);
        let find = Arc::clone(&holder);
        let next = Gates::take_over(again, |pid, started| {
            assert_eq!((pid, started), if pid == 0 { (0, started) } else { (77, 5) });
            Some(Arc::clone(&find) as Arc<dyn Holder>)
        });
        let woken = Gate::new(&next.memory, zombies.number()).unwrap();
        let given: Vec<_> = std::iter::from_fn(|| next.take(None, WHO)).collect();
        assert!(given.len() == 2 && given.iter().all(|gate| gate.number() != woken.number()));
        assert!(!woken.enter());
        assert_eq!(next.take_orphans(), [], "its process lives");
        holder.gone.store(true, Ordering::Relaxed);
        assert_eq!(next.take(None, WHO).map(|gate| gate.number()), Some(woken.number()));
    }

    fn taken_over(gates: &Gates, find: impl Fn(u64, u64) -> Option<Arc<dyn Holder>>) -> Gates {
        let again = RacyMemory::zeroed(4 * GATE_BYTES).unwrap();
        gates.memory.copy_to(0, &again, 0, 4 * GATE_BYTES, crate::mem::Side::Source);
        Gates::take_over(again, find)
    }

    #[test]
    fn the_next_server_knows_whose_process_ended_meanwhile() {
        let gates = gates();
        let holder = Named::default();
        let kept = [0; 2].map(|_| gates.take(Some(&holder), WHO).unwrap());
        let gave_back = gates.take(Some(&holder), (SessionId::new(5), 1)).unwrap();
        gave_back.close(Some(&holder));
        gates.give_back(&gave_back);
        let next = taken_over(&gates, |_, _| None);
        assert_eq!(next.take_orphans(), [WHO]);
        assert_eq!(next.take_orphans(), [], "once");
        assert!(
            kept.iter()
                .all(|gate| next.take(None, WHO).is_some_and(|taken| taken.number() <= gate.number() + 2))
        );
    }

    #[test]
    fn who_lives_gives_its_old_gate_back_itself_and_nobody_elses() {
        #[derive(Debug)]
        struct Other;
        impl Holder for Other {
            fn name(&self) -> (u64, u64) {
                (78, 5)
            }
            fn is_gone(&self) -> bool {
                false
            }
            fn end_unless(&self, _: &dyn Fn() -> bool) {}
        }
        let gates = gates();
        let holder = Arc::new(Named::default());
        let old = gates.take(Some(&*holder), WHO).unwrap().number();
        let next = taken_over(&gates, |_, _| Some(Arc::clone(&holder) as Arc<dyn Holder>));
        let others: Vec<_> = std::iter::from_fn(|| next.take(None, WHO)).collect();
        assert!(others.len() == 2 && others.iter().all(|gate| gate.number() != old));
        next.reclaim(old, &Other);
        next.reclaim(others[0].number(), &*holder);
        assert!(next.take(None, WHO).is_none());
        next.reclaim(old, &*holder);
        assert_eq!(next.take(None, WHO).map(|gate| gate.number()), Some(old));
    }

    #[test]
    fn a_connection_goes_on_through_another_gate() {
        let gates = gates();
        let [first, second] = [0; 2].map(|_| gates.take(None, WHO).unwrap());
        first.close(None);
        let used = first.clone();
        assert!(!used.enter());
        used.move_to(second.number());
        assert!(used.enter() && !first.is_open());
        used.leave();
        used.move_to(u32::MAX);
        assert_eq!(used.number(), second.number(), "there is no such gate");
    }
}
