//! The conformance suite: one list of scenarios that every transport has to pass.
//!
//! A [`Scenario`] is data: a name, the rule of the [contract](super) it holds the transport to, how many clients it
//! needs, and the body that each of them runs. A client is a thread, a simulated process or a process of the operating
//! system: the bodies do not know, because clients find each other through the pool's catalog and coordinate through far
//! memory only. Whoever runs the suite starts servers with [`procedures`] registered and calls [`run_client`] once per
//! client; `Err` says what was expected and what was seen.
//!
//! | file | what it holds a transport to |
//! |---|---|
//! | `client` | a client's way into a scenario and out of it: index, arena, barrier, failure |
//! | `procedures` | what the servers have to offer |
//! | `verbs`, `batches` | bytes arrive where they should and nowhere else; results, tickets, counts (rules 1, 3, 5) |
//! | `words` | words are whole, parts of words are independent (rule 2) |
//! | `order` | what a batch orders: message passing, store and load buffering, locks (rule 3) |
//! | `atomics` | atomics are atomic among themselves (rule 4) |
//! | `visible` | completed is visible, to procedures too (rule 5) |
//! | `calls` | the two-sided path: at most once, long and short, refusals |
//! | `sessions`, `fencing` | permissions, epochs, flushes, chunks; fencing, adoption, leases (rule 5) |
//! | `bad_input` | what must not be posted is refused, typed, and touches nothing (rule 6) |
//! | `mistakes` | users of the fabric that do it wrong, and that the same checks must catch: they test the test |

mod atomics;
mod bad_input;
mod batches;
mod calls;
mod client;
mod fencing;
mod mistakes;
mod order;
mod procedures;
mod sessions;
mod verbs;
mod visible;
mod words;

pub use client::{Client, run_client};
pub use procedures::procedures;

use std::future::Future;
use std::pin::Pin;

/// A client's part of a scenario under way.
pub type Body = Pin<Box<dyn Future<Output = Result<(), String>>>>;

/// One thing that a transport has to get right.
#[derive(Clone, Copy, Debug)]
pub struct Scenario {
    /// `group/name`, unique; also the name of its index in the catalog.
    pub name: &'static str,
    /// Which rule of the contract, and what would go wrong.
    pub what: &'static str,
    /// How many clients run it at the same time.
    pub clients: u32,
    /// So many of them, the last ones, are fenced by the others as the scenario goes on. Where fencing ends a process,
    /// theirs ends.
    pub doomed: u32,
    /// What each client does.
    pub body: fn(Client) -> Body,
}

impl Scenario {
    /// The part of the name before the slash.
    pub fn group(&self) -> &'static str {
        self.name.split_once('/').map_or(self.name, |(group, _)| group)
    }
}

/// A scenario from an `async fn(&Client) -> Result<(), Failure>`.
macro_rules! scenario {
    ($name:literal, clients $clients:literal, $body:expr, $what:literal) => {
        scenario!($name, clients $clients, doomed 0, $body, $what)
    };
    ($name:literal, clients $clients:literal, doomed $doomed:literal, $body:expr, $what:literal) => {
        $crate::transport::conformance::Scenario {
            name: $name,
            what: $what,
            clients: $clients,
            doomed: $doomed,
            body: |client| Box::pin(async move { $body(&client).await.map_err(String::from) }),
        }
    };
}
use scenario;

/// All scenarios, in groups.
pub fn scenarios() -> Vec<Scenario> {
    let groups = [
        verbs::scenarios(),
        batches::scenarios(),
        words::scenarios(),
        order::scenarios(),
        atomics::scenarios(),
        visible::scenarios(),
        calls::scenarios(),
        sessions::scenarios(),
        fencing::scenarios(),
        bad_input::scenarios(),
    ];
    groups.concat()
}

/// Scenarios whose clients break the rules: where the transport makes use of its freedom, each has to fail.
pub fn mistakes() -> Vec<Scenario> {
    mistakes::scenarios()
}
