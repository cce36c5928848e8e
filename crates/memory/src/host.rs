//! Which procedures run, which wait, which are refused. Pure: the transport runs them and reports back.
//!
//! At most `cores` short and `max_long` long procedures run at a time. Each weight has its own slots and its own
//! first-in-first-out queue of `queue` calls, so a long call never keeps a short one from starting; what finds its
//! queue full is refused as busy and did not run. The long ones come on top of the short ones: with all slots
//! taken, `cores + max_long` procedures share the cores that the transport gives them.
//!
//! A caller that is fenced or gone loses its waiting calls. Those that run cannot be stopped: they keep their slot,
//! their outcome is dropped, and whoever fences the caller waits for them, as their writes are the caller's.

use farwood_fabric::addr::SessionId;
use farwood_fabric::call::CallId;
use farwood_fabric::procedure::{Procedure, Weight};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// A call that may run.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) call: CallId,
    pub(crate) ticket: u64,
    pub(crate) procedure: Arc<dyn Procedure>,
    pub(crate) request: Vec<u8>,
}

/// What becomes of a call.
#[derive(Debug)]
pub(crate) enum Admission {
    /// It runs now.
    Run(Job),
    /// It runs later.
    Waits,
    /// It does not run.
    Busy { queued: u32 },
}

/// A procedure ended.
#[derive(Debug)]
pub(crate) struct Finished {
    /// Its caller is gone: nobody gets the outcome.
    pub(crate) abandoned: bool,
    /// What runs in its place.
    pub(crate) next: Option<Job>,
}

/// Slots and queue of one weight.
#[derive(Debug)]
struct Lane {
    slots: usize,
    running: usize,
    waiting: VecDeque<Job>,
}

impl Lane {
    fn new(slots: usize) -> Self {
        Self { slots, running: 0, waiting: VecDeque::new() }
    }
}

#[derive(Debug)]
struct Running {
    weight: Weight,
    abandoned: bool,
}

/// The procedure host.
/// Invariant: a lane has waiting calls only while all its slots are taken.
#[derive(Debug)]
pub(crate) struct Host {
    queue: usize,
    short: Lane,
    long: Lane,
    running: BTreeMap<CallId, Running>,
}

impl Host {
    pub(crate) fn new(cores: usize, max_long: usize, queue: usize) -> Self {
        Self { queue, short: Lane::new(cores), long: Lane::new(max_long), running: BTreeMap::new() }
    }

    /// A new call.
    pub(crate) fn admit(&mut self, job: Job) -> Admission {
        let weight = job.procedure.weight();
        let queue = self.queue;
        // The same name may still run for a session that had this number before: two of them could not be told apart.
        let taken = self.running.contains_key(&job.call);
        let lane = self.lane(weight);
        if !taken && lane.running < lane.slots {
            lane.running += 1;
            self.running.insert(job.call, Running { weight, abandoned: false });
            return Admission::Run(job);
        }
        if taken || lane.waiting.len() >= queue {
            return Admission::Busy { queued: u32::try_from(lane.waiting.len()).unwrap_or(u32::MAX) };
        }
        lane.waiting.push_back(job);
        Admission::Waits
    }

    /// A procedure ended; `None` if no such one runs.
    pub(crate) fn finish(&mut self, call: CallId) -> Option<Finished> {
        let Running { weight, abandoned } = self.running.remove(&call)?;
        let lane = self.lane(weight);
        let next = lane.waiting.pop_front();
        match &next {
            None => lane.running -= 1,
            Some(job) => {
                self.running.insert(job.call, Running { weight, abandoned: false });
            }
        }
        Some(Finished { abandoned, next })
    }

    /// The session is fenced or gone.
    pub(crate) fn forget(&mut self, session: SessionId) {
        for lane in [&mut self.short, &mut self.long] {
            lane.waiting.retain(|job| job.call.session != session);
        }
        for (call, running) in &mut self.running {
            running.abandoned |= call.session == session;
        }
    }

    /// Whether a procedure runs that this session, or one that had its number, called.
    pub(crate) fn runs_for(&self, session: SessionId) -> bool {
        self.running.keys().any(|call| call.session == session)
    }

    /// Whether a procedure of this session waits to run.
    pub(crate) fn waits_for(&self, session: SessionId) -> bool {
        [&self.short, &self.long]
            .iter()
            .any(|lane| lane.waiting.iter().any(|job| job.call.session == session))
    }

    /// How many calls run, and how many wait to.
    pub(crate) fn load(&self) -> (u32, u32) {
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        (count(self.running.len()), count(self.short.waiting.len() + self.long.waiting.len()))
    }

    fn lane(&mut self, weight: Weight) -> &mut Lane {
        match weight {
            Weight::Short => &mut self.short,
            Weight::Long => &mut self.long,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farwood_fabric::procedure::{ProcedureContext, ProcedureFuture, ProcedureId};
    use proptest::prelude::*;

    #[derive(Debug)]
    struct Idle(Weight);

    impl Procedure for Idle {
        fn id(&self) -> ProcedureId {
            ProcedureId::FIRST_FREE
        }
        fn weight(&self) -> Weight {
            self.0
        }
        fn run(self: Arc<Self>, _: ProcedureContext, request: Vec<u8>) -> ProcedureFuture {
            Box::pin(std::future::ready(Ok(request)))
        }
    }

    fn id(session: u16, sequence: u64) -> CallId {
        CallId { session: SessionId::new(session), term: 1, endpoint: 0, sequence }
    }

    fn job(session: u16, sequence: u64, weight: Weight) -> Job {
        Job { call: id(session, sequence), ticket: 0, procedure: Arc::new(Idle(weight)), request: vec![] }
    }

    #[test]
    fn long_calls_never_keep_short_ones_from_starting() {
        let mut host = Host::new(2, 1, 1);
        assert!(matches!(host.admit(job(1, 0, Weight::Long)), Admission::Run(_)));
        assert!(matches!(host.admit(job(1, 1, Weight::Long)), Admission::Waits));
        assert!(matches!(host.admit(job(1, 2, Weight::Long)), Admission::Busy { queued: 1 }));
        assert!(matches!(host.admit(job(1, 3, Weight::Short)), Admission::Run(_)));
        assert!(matches!(host.admit(job(1, 4, Weight::Short)), Admission::Run(_)));
        assert!(matches!(host.admit(job(1, 5, Weight::Short)), Admission::Waits));
        assert!(host.finish(id(1, 0)).unwrap().next.is_some_and(|job| job.call == id(1, 1)));
        assert!(host.finish(id(1, 3)).unwrap().next.is_some_and(|job| job.call == id(1, 5)));
        assert!(host.finish(id(1, 3)).is_none(), "it ended before");
    }

    #[test]
    fn a_fenced_caller_keeps_its_slot_until_its_procedure_ends() {
        let mut host = Host::new(1, 1, 2);
        host.admit(job(1, 0, Weight::Short));
        host.admit(job(1, 1, Weight::Short));
        host.admit(job(2, 0, Weight::Short));
        assert!(host.waits_for(SessionId::new(1)));
        host.forget(SessionId::new(1));
        assert!(host.runs_for(SessionId::new(1)) && !host.waits_for(SessionId::new(1)));
        assert!(
            matches!(host.admit(job(1, 0, Weight::Short)), Admission::Busy { .. }),
            "a namesake still runs"
        );
        let finished = host.finish(id(1, 0)).unwrap();
        assert!(finished.abandoned && finished.next.unwrap().call == id(2, 0));
        assert!(!host.finish(id(2, 0)).unwrap().abandoned);
    }

    proptest! {
        #[test]
        fn limits_hold_order_is_kept_and_nobody_starves(
            steps in proptest::collection::vec((0u8..4, 0u16..3, any::<bool>(), 0usize..8), 1..120)
        ) {
            let (cores, max_long, queue) = (2, 1, 3);
            let mut host = Host::new(cores, max_long, queue);
            let mut running: Vec<(CallId, Weight)> = vec![];
            let mut waiting: [VecDeque<CallId>; 2] = [VecDeque::new(), VecDeque::new()];
            let lane = |weight| usize::from(weight == Weight::Long);
            for (sequence, (what, session, long, pick)) in (0..).zip(steps) {
                let weight = if long { Weight::Long } else { Weight::Short };
                match what {
                    0 | 1 => match host.admit(job(session + 1, sequence, weight)) {
                        Admission::Run(job) => {
                            prop_assert!(waiting[lane(weight)].is_empty());
                            running.push((job.call, weight));
                        }
                        Admission::Waits => waiting[lane(weight)].push_back(id(session + 1, sequence)),
                        Admission::Busy { .. } => prop_assert_eq!(waiting[lane(weight)].len(), queue),
                    },
                    2 if !running.is_empty() => {
                        let (call, weight) = running.remove(pick % running.len());
                        let next = host.finish(call).unwrap().next.map(|job| job.call);
                        prop_assert_eq!(next, waiting[lane(weight)].pop_front());
                        running.extend(next.map(|call| (call, weight)));
                    }
                    _ => {
                        host.forget(SessionId::new(session + 1));
                        for calls in &mut waiting {
                            calls.retain(|call| call.session != SessionId::new(session + 1));
                        }
                    }
                }
                for (weight, slots) in [(Weight::Short, cores), (Weight::Long, max_long)] {
                    let held = running.iter().filter(|(_, w)| *w == weight).count();
                    prop_assert!(held <= slots && waiting[lane(weight)].len() <= queue);
                    prop_assert!(waiting[lane(weight)].is_empty() || held == slots, "a slot idles while calls wait");
                }
            }
        }
    }
}
