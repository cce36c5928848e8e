//! What goes wrong in a simulated world, as data: a plan can be printed, parsed, and shrunk.
//!
//! A plan's text is one fault per word, for example `kill:c2@v57 lose:c0@v12+4000 slow:m1@90000+50000x20`; clients are
//! counted from 0 in the order in which they were started, `v` counts the verbs a client has posted, `r` its calls, `n` its
//! reconnects, `#` the times that a mark was hit (from 1), a bare number is a time in nanoseconds.

use crate::clock::Nanos;
use std::fmt;
use std::str::FromStr;

/// One fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// The client dies when it posts its `at_verb`-th verb; what it has in flight lands in part, late, or not at all.
    Kill {
        /// Which client.
        client: u32,
        /// At which of its verbs.
        at_verb: u64,
    },
    /// The client dies when it makes its `at_call`-th call: before the call has left, or when its effect has happened and the
    /// reply has not come.
    KillAtCall {
        /// Which client.
        client: u32,
        /// At which of its calls.
        at_call: u64,
        /// Whether the call takes effect.
        after: bool,
    },
    /// The client dies where it hits a mark ([`crate::marks`]) for the `nth` time, before it posts another verb. Control calls
    /// are marks too: `before-BeginAdopt` when the call is made, `after-BeginAdopt` when it has taken effect. `amid-intent` is when it posts
    /// an intent, which arrives, with none, some or all of what is posted along.
    KillAtMark {
        /// Which client; `None`: whichever it is, and the hits of all clients count.
        client: Option<u32>,
        /// Which mark.
        mark: MarkName,
        /// At which hit, from 1.
        nth: u64,
    },
    /// The client stops (SIGSTOP, a long page fault) and goes on later: a zombie, if it was fenced meanwhile.
    Pause {
        /// Which client.
        client: u32,
        /// At which of its verbs.
        at_verb: u64,
        /// For how long.
        for_ns: Nanos,
    },
    /// A completion never comes: the client is told `Unknown`, and the effect may come up to `late_ns` after that.
    LoseCompletion {
        /// Which client.
        client: u32,
        /// At which of its verbs.
        at_verb: u64,
        /// How late the effect may be.
        late_ns: Nanos,
    },
    /// A call's request or its reply is lost.
    LoseReply {
        /// Which client.
        client: u32,
        /// At which of its calls.
        at_call: u64,
    },
    /// Reconnects of the client fail: what was in flight is not fenced and may still land.
    FailReconnect {
        /// Which client.
        client: u32,
        /// From which of its reconnects on.
        nth: u64,
        /// How many of them.
        times: u32,
    },
    /// The line between a client and a server is cut for a while: completions and replies do not come, effects may or may not
    /// happen, also late, and reconnects fail.
    Cut {
        /// Which client.
        client: u32,
        /// Which server.
        server: u16,
        /// From when.
        from_ns: Nanos,
        /// For how long.
        for_ns: Nanos,
    },
    /// The server is gone, with its memory.
    LoseServer {
        /// Which.
        server: u16,
        /// When.
        at_ns: Nanos,
    },
    /// The server's process is replaced by another on the same memory: what it had in hand is lost, its tables are not.
    RestartServer {
        /// Which.
        server: u16,
        /// When.
        at_ns: Nanos,
    },
    /// The server is slow for a while.
    SlowServer {
        /// Which.
        server: u16,
        /// From when.
        from_ns: Nanos,
        /// For how long.
        for_ns: Nanos,
        /// By which factor.
        factor: u32,
    },
    /// The client's clock is off, and drifts.
    SkewClock {
        /// Which client.
        client: u32,
        /// How far it is ahead.
        ahead_ns: Nanos,
        /// How many millionths it runs too fast.
        drift_ppm: i32,
    },
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kill { client, at_verb } => write!(f, "kill:c{client}@v{at_verb}"),
            Self::KillAtCall { client, at_call, after: false } => {
                write!(f, "kill-before:c{client}@r{at_call}")
            }
            Self::KillAtCall { client, at_call, after: true } => write!(f, "kill-after:c{client}@r{at_call}"),
            Self::KillAtMark { client: Some(client), mark, nth } => {
                write!(f, "kill-at:c{client}@{mark}#{nth}")
            }
            Self::KillAtMark { client: None, mark, nth } => write!(f, "kill-at:{mark}#{nth}"),
            Self::Pause { client, at_verb, for_ns } => write!(f, "pause:c{client}@v{at_verb}+{for_ns}"),
            Self::LoseCompletion { client, at_verb, late_ns } => {
                write!(f, "lose:c{client}@v{at_verb}+{late_ns}")
            }
            Self::LoseReply { client, at_call } => write!(f, "mute:c{client}@r{at_call}"),
            Self::FailReconnect { client, nth, times } => write!(f, "refuse:c{client}@n{nth}x{times}"),
            Self::Cut { client, server, from_ns, for_ns } => {
                write!(f, "cut:c{client}-m{server}@{from_ns}+{for_ns}")
            }
            Self::LoseServer { server, at_ns } => write!(f, "gone:m{server}@{at_ns}"),
            Self::RestartServer { server, at_ns } => write!(f, "restart:m{server}@{at_ns}"),
            Self::SlowServer { server, from_ns, for_ns, factor } => {
                write!(f, "slow:m{server}@{from_ns}+{for_ns}x{factor}")
            }
            Self::SkewClock { client, ahead_ns, drift_ppm } => {
                write!(f, "skew:c{client}@{ahead_ns}+{drift_ppm}")
            }
        }
    }
}

/// A plan that cannot be read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BadPlan {
    /// The word that is not a fault.
    pub word: String,
}

impl fmt::Display for BadPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "'{}' is no fault; write for example kill:c2@v57, lose:c0@v12+4000 or slow:m1@90000+50000x20",
            self.word
        )
    }
}

impl std::error::Error for BadPlan {}

impl FromStr for Fault {
    type Err = BadPlan;

    fn from_str(word: &str) -> Result<Self, BadPlan> {
        parse(word).ok_or_else(|| BadPlan { word: word.to_owned() })
    }
}

fn parse(word: &str) -> Option<Fault> {
    let (kind, rest) = word.split_once(':')?;
    if kind == "kill-at" {
        return parse_mark(rest);
    }
    let (who, rest) = rest.split_once('@')?;
    let (at, more) = match rest.split_once('+') {
        Some((at, more)) => (at, Some(more)),
        None => (rest, None),
    };
    let client = || who.strip_prefix('c')?.parse().ok();
    let server = || who.strip_prefix('m')?.parse().ok();
    let verb = || at.strip_prefix('v')?.parse().ok();
    let call = || at.strip_prefix('r')?.parse().ok();
    match (kind, more) {
        ("kill-before" | "kill-after", None) => {
            Some(Fault::KillAtCall { client: client()?, at_call: call()?, after: kind == "kill-after" })
        }
        ("kill", None) => Some(Fault::Kill { client: client()?, at_verb: verb()? }),
        ("pause", Some(span)) => {
            Some(Fault::Pause { client: client()?, at_verb: verb()?, for_ns: span.parse().ok()? })
        }
        ("lose", Some(span)) => {
            Some(Fault::LoseCompletion { client: client()?, at_verb: verb()?, late_ns: span.parse().ok()? })
        }
        ("mute", None) => Some(Fault::LoseReply { client: client()?, at_call: call()? }),
        ("refuse", None) => {
            let (nth, times) = at.strip_prefix('n')?.split_once('x')?;
            Some(Fault::FailReconnect {
                client: client()?,
                nth: nth.parse().ok()?,
                times: times.parse().ok()?,
            })
        }
        ("cut", Some(span)) => {
            let (client, server) = who.split_once('-')?;
            Some(Fault::Cut {
                client: client.strip_prefix('c')?.parse().ok()?,
                server: server.strip_prefix('m')?.parse().ok()?,
                from_ns: at.parse().ok()?,
                for_ns: span.parse().ok()?,
            })
        }
        ("gone", None) => Some(Fault::LoseServer { server: server()?, at_ns: at.parse().ok()? }),
        ("restart", None) => Some(Fault::RestartServer { server: server()?, at_ns: at.parse().ok()? }),
        ("slow", Some(more)) => {
            let (span, factor) = more.split_once('x')?;
            let (server, from_ns) = (server()?, at.parse().ok()?);
            Some(Fault::SlowServer {
                server,
                from_ns,
                for_ns: span.parse().ok()?,
                factor: factor.parse().ok()?,
            })
        }
        ("skew", Some(drift)) => Some(Fault::SkewClock {
            client: client()?,
            ahead_ns: at.parse().ok()?,
            drift_ppm: drift.parse().ok()?,
        }),
        _ => None,
    }
}

/// `c2@mark#3`, or without the client.
fn parse_mark(text: &str) -> Option<Fault> {
    let (place, nth) = text.split_once('#')?;
    let (client, mark) = match place.split_once('@') {
        Some((who, mark)) => (Some(who.strip_prefix('c')?.parse().ok()?), mark),
        None => (None, place),
    };
    Some(Fault::KillAtMark { client, mark: MarkName::new(mark)?, nth: nth.parse().ok()? })
}

/// The name of a mark, in place, so that a fault stays plain data.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct MarkName {
    bytes: [u8; Self::MAX_BYTES],
    len: u8,
}

impl MarkName {
    /// The longest name.
    pub const MAX_BYTES: usize = 47;

    /// A name of letters, digits, `_` and `-`; `None` if it is another, too long or empty.
    pub fn new(name: &str) -> Option<Self> {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
        if name.is_empty() || name.len() > Self::MAX_BYTES || !name.bytes().all(is_plain) {
            return None;
        }
        let mut bytes = [0; Self::MAX_BYTES];
        bytes[..name.len()].copy_from_slice(name.as_bytes());
        Some(Self { bytes, len: u8::try_from(name.len()).ok()? })
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        std::str::from_utf8(&self.bytes[..usize::from(self.len)]).unwrap_or_default()
    }
}

impl fmt::Display for MarkName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Debug for MarkName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.as_str())
    }
}

/// Everything that goes wrong in one world.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct FaultPlan {
    /// The faults, in no particular order.
    pub faults: Vec<Fault>,
}

impl fmt::Display for FaultPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, fault) in self.faults.iter().enumerate() {
            write!(f, "{}{fault}", if n == 0 { "" } else { " " })?;
        }
        Ok(())
    }
}

impl FromStr for FaultPlan {
    type Err = BadPlan;

    fn from_str(text: &str) -> Result<Self, BadPlan> {
        let faults = text.split_whitespace().map(Fault::from_str).collect::<Result<_, _>>()?;
        Ok(Self { faults })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn mark() -> impl Strategy<Value = MarkName> {
        "[a-zA-Z0-9_-]{1,47}".prop_map(|name| MarkName::new(&name).expect("a plain name"))
    }

    fn fault() -> impl Strategy<Value = Fault> {
        prop_oneof![
            (any::<u32>(), any::<u64>(), any::<bool>())
                .prop_map(|(client, at_call, after)| Fault::KillAtCall { client, at_call, after }),
            (any::<Option<u32>>(), mark(), any::<u64>()).prop_map(|(client, mark, nth)| Fault::KillAtMark {
                client,
                mark,
                nth
            }),
            (any::<u32>(), any::<u64>()).prop_map(|(client, at_verb)| Fault::Kill { client, at_verb }),
            (any::<u32>(), any::<u64>(), any::<u64>()).prop_map(|(client, at_verb, for_ns)| Fault::Pause {
                client,
                at_verb,
                for_ns
            }),
            (any::<u32>(), any::<u64>(), any::<u64>())
                .prop_map(|(client, at_verb, late_ns)| Fault::LoseCompletion { client, at_verb, late_ns }),
            (any::<u32>(), any::<u64>()).prop_map(|(client, at_call)| Fault::LoseReply { client, at_call }),
            (any::<u32>(), any::<u64>(), any::<u32>())
                .prop_map(|(client, nth, times)| Fault::FailReconnect { client, nth, times }),
            (any::<u32>(), any::<u16>(), any::<u64>(), any::<u64>())
                .prop_map(|(client, server, from_ns, for_ns)| Fault::Cut { client, server, from_ns, for_ns }),
            (any::<u16>(), any::<u64>()).prop_map(|(server, at_ns)| Fault::LoseServer { server, at_ns }),
            (any::<u16>(), any::<u64>()).prop_map(|(server, at_ns)| Fault::RestartServer { server, at_ns }),
            (any::<u16>(), any::<u64>(), any::<u64>(), any::<u32>()).prop_map(
                |(server, from_ns, for_ns, factor)| Fault::SlowServer { server, from_ns, for_ns, factor }
            ),
            (any::<u32>(), any::<u64>(), any::<i32>())
                .prop_map(|(client, ahead_ns, drift_ppm)| Fault::SkewClock { client, ahead_ns, drift_ppm }),
        ]
    }

    #[test]
    fn names_of_marks_are_plain_and_short() {
        let long = "m".repeat(MarkName::MAX_BYTES);
        assert_eq!(MarkName::new(&long).map(|name| name.to_string()), Some(long.clone()));
        for bad in ["", "two words", "c1@mark", "mark#1", &format!("{long}m")] {
            assert_eq!(MarkName::new(bad), None, "{bad}");
        }
    }

    proptest! {
        #[test]
        fn a_plan_survives_its_text(faults in proptest::collection::vec(fault(), 0..6)) {
            let plan = FaultPlan { faults };
            prop_assert_eq!(plan.to_string().parse::<FaultPlan>(), Ok(plan));
        }

        #[test]
        fn other_text_is_refused_without_a_panic(text in "[a-z:@+#xcmvrn0-9-]{1,20}") {
            if let Ok(plan) = text.parse::<FaultPlan>() {
                prop_assert_eq!(plan.faults.len(), 1);
            }
        }
    }
}
