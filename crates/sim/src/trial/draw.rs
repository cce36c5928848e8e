//! Drawing what goes wrong in a trial, from its seed.

use super::{GUESTS, LEASE_NS, LONG_READ_NS, Trial};
use farwood_fabric::clock::{MICROSECOND, MILLISECOND};
use farwood_fabric::transport::sim::{Fault, MarkName};
use fastrand::Rng;

/// Faults that a trial draws. The loss of a server is not among them: what it held is gone, so there is nothing to check;
/// see the tests of the fabric for that.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[expect(missing_docs, reason = "they are those of `Fault`")]
pub enum FaultKind {
    Kill,
    KillAtCall,
    KillAtMark,
    Pause,
    LoseCompletion,
    LoseReply,
    FailReconnect,
    Cut,
    SlowServer,
    RestartServer,
    SkewClock,
}

impl FaultKind {
    /// Those that are drawn at random: all.
    pub const ALL: [FaultKind; 11] = [
        Self::Kill,
        Self::KillAtCall,
        Self::KillAtMark,
        Self::Pause,
        Self::LoseCompletion,
        Self::LoseReply,
        Self::FailReconnect,
        Self::Cut,
        Self::SlowServer,
        Self::RestartServer,
        Self::SkewClock,
    ];
}

/// The steps of the recovery of a dead session, in their order: whoever recovers it may die at each.
pub const ADOPTION_MARKS: [&str; 9] = [
    "adopt_fence_begun",
    "adopt_fenced",
    "adopt_begun",
    "adopt_intent_written",
    "adopt_replayed",
    "adopt_unlocked",
    "adopt_safe",
    "adopt_freed",
    "adopt_finished",
];

/// Whoever dies there was in the middle of a change of several WRITEs, and has written down what it was about to do.
pub const AMID_INTENT: &str = "amid-intent";
/// At which intent of a trial somebody dies, at the latest.
const MAX_INTENTS: u64 = 6;

/// The control calls in the middle of whose sequences it matters to die: fencing, adopting, dropping, joining, creating, leaving.
pub const CALLS: [&str; 14] = [
    "BeginFence",
    "Fence",
    "CompleteFence",
    "BeginAdopt",
    "AdoptChunks",
    "FinishAdopt",
    "BeginDrop",
    "ReleaseIndex",
    "FinishDrop",
    "OpenSession",
    "AttachSession",
    "CreateIndex",
    "IndexReady",
    "CloseSession",
];

impl Trial {
    /// The trial with up to four faults of any kind, drawn from its seed. Where somebody dies, those who clean up may die of it
    /// too, one after the other. In one of four, some READs outlast many operations.
    #[must_use]
    pub fn with_random_faults(mut self) -> Self {
        let mut world = Rng::with_seed(self.seed ^ 0x1095);
        if world.u8(0..4) == 0 {
            self.long_ns = world.u64(1..=LONG_READ_NS);
        }
        self.immediate |= world.u8(0..4) == 0;
        let mut rng = Rng::with_seed(self.seed ^ 0xfa17);
        for _ in 0..rng.u32(0..=4) {
            let kind = rng.choice(FaultKind::ALL).unwrap_or(FaultKind::Kill);
            self.add_fault(kind, &mut rng);
        }
        let kills = |fault: &Fault| matches!(fault, Fault::Kill { .. } | Fault::KillAtCall { .. });
        if self.faults.faults.iter().any(kills) {
            for _ in 0..rng.u32(0..=2) {
                self.add_fault(FaultKind::KillAtMark, &mut rng);
            }
        }
        self
    }

    /// The trial with `count` faults of one kind, drawn from its seed.
    #[must_use]
    pub fn with_faults(mut self, kind: FaultKind, count: u32) -> Self {
        let mut rng = Rng::with_seed(self.seed ^ 0xfa17);
        for _ in 0..count {
            self.add_fault(kind, &mut rng);
        }
        self
    }

    /// The trial with a death, and the deaths of `count` of those who clean up after it.
    #[must_use]
    pub fn with_dying_adopters(mut self, count: u32) -> Self {
        let mut rng = Rng::with_seed(self.seed ^ 0xdead);
        if rng.bool() {
            self.add_fault(FaultKind::Kill, &mut rng);
        } else {
            // It leaves an intent behind, most likely.
            let mark = MarkName::new(AMID_INTENT).expect("our own names are plain");
            self.faults.faults.push(Fault::KillAtMark { client: None, mark, nth: rng.u64(1..=MAX_INTENTS) });
        }
        for _ in 0..count {
            self.add_fault(FaultKind::KillAtMark, &mut rng);
        }
        self
    }

    fn add_fault(&mut self, kind: FaultKind, rng: &mut Rng) {
        // Those who use other indexes come after those who use the one that is tried.
        let guests = if self.others { GUESTS } else { 0 };
        let client = rng.u32(0..self.sessions.max(1) + guests);
        let server = rng.u16(0..self.servers.max(1));
        // A task's operation takes about four verbs.
        let at_verb = rng.u64(0..u64::from(self.tasks) * u64::from(self.ops) * 4);
        let fault = match kind {
            FaultKind::Kill => Fault::Kill { client, at_verb },
            FaultKind::KillAtCall => Fault::KillAtCall { client, at_call: rng.u64(0..40), after: rng.bool() },
            FaultKind::KillAtMark => {
                let mark = draw_mark(rng, self.others);
                Fault::KillAtMark { client: None, mark, nth: rng.u64(1..=3) }
            }
            FaultKind::Pause => {
                Fault::Pause { client, at_verb, for_ns: rng.u64(100 * MICROSECOND..8 * LEASE_NS) }
            }
            FaultKind::LoseCompletion => {
                Fault::LoseCompletion { client, at_verb, late_ns: rng.u64(0..2 * LEASE_NS) }
            }
            FaultKind::LoseReply => Fault::LoseReply { client, at_call: rng.u64(0..40) },
            FaultKind::FailReconnect => {
                // Without a lost completion nobody reconnects.
                self.faults.faults.push(Fault::LoseCompletion {
                    client,
                    at_verb,
                    late_ns: rng.u64(0..2 * LEASE_NS),
                });
                Fault::FailReconnect { client, nth: rng.u64(0..2), times: rng.u32(1..6) }
            }
            FaultKind::Cut => Fault::Cut {
                client,
                server,
                from_ns: rng.u64(0..2 * MILLISECOND),
                for_ns: rng.u64(0..2 * MILLISECOND),
            },
            FaultKind::SlowServer => Fault::SlowServer {
                server,
                from_ns: rng.u64(0..MILLISECOND),
                for_ns: rng.u64(0..MILLISECOND),
                factor: rng.u32(2..20),
            },
            FaultKind::RestartServer => {
                Fault::RestartServer { server, at_ns: rng.u64(MILLISECOND / 2..3 * MILLISECOND) }
            }
            FaultKind::SkewClock => Fault::SkewClock {
                client,
                ahead_ns: rng.u64(0..10 * LEASE_NS),
                drift_ppm: rng.i32(-100_000..100_000),
            },
        };
        self.faults.faults.push(fault);
    }
}

/// A place to die at: a step of an adoption, or a control call, before or after its effect.
fn draw_mark(rng: &mut Rng, others: bool) -> MarkName {
    let name = if rng.bool() {
        rng.choice(ADOPTION_MARKS).unwrap_or_default().to_owned()
    } else {
        // Mostly those of an adoption, which come first; where indexes come and go, any.
        let calls = if others || rng.u8(0..4) == 0 { &CALLS[..] } else { &CALLS[..6] };
        let when = if rng.bool() { "before" } else { "after" };
        format!("{when}-{}", rng.choice(calls).unwrap_or(&CALLS[0]))
    };
    MarkName::new(&name).expect("our own names are plain")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_faults_cover_every_kind() {
        let mut kinds = std::collections::BTreeSet::new();
        for seed in 0..300 {
            let trial = Trial { seed, ..Trial::default() }.with_random_faults();
            kinds.extend(
                trial.faults.faults.iter().map(|f| f.to_string().split(':').next().map(str::to_owned)),
            );
        }
        assert_eq!(kinds.len(), 12, "{kinds:?}");
    }
}
