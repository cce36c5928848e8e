//! `farwood evict`: ends a session of a pool by hand, whether its lease runs or not.
//!
//! The session is fenced on every server: when that is done, nothing that it still sends has an effect. Its locks and its memory are
//! recovered by the sessions that live in the pool, or by this command; it waits a moment for that and says what it saw. A process that
//! is evicted but alive finds out at its next heartbeat: gateways join again by themselves.

use crate::report::unless_broken_pipe;
use crate::store::{Place, as_reaper, plain};
use farwood_fabric::clock::{MILLISECOND, Nanos, SECOND};
use farwood_fabric::control::SessionInfo;
use farwood_fabric::{Endpoint, FabricError, Session, SessionId};
use std::io::Write;
use std::process::ExitCode;

/// How long the recovery is waited for.
const WAIT_NS: Nanos = 5 * SECOND;
/// How often it is looked at.
const LOOK_NS: Nanos = 50 * MILLISECOND;

#[derive(clap::Args, Debug)]
pub(crate) struct Arguments {
    #[command(flatten)]
    place: Place,

    /// The session's number, as `farwood status` lists it
    #[arg(value_parser = clap::value_parser!(u16).range(1..))]
    session: u16,

    /// Only if the number has this term: numbers are used again, terms never
    #[arg(long)]
    term: Option<u64>,
}

/// What has become of the session.
enum Outcome {
    Recovered,
    /// It is still listed.
    Waits,
}

fn text(error: FabricError) -> String {
    plain(error.into())
}

/// The session, if the pool has it; `term`: and no other holder of its number.
fn find(sessions: &[SessionInfo], number: u16, term: Option<u64>) -> Result<&SessionInfo, String> {
    let found = sessions.iter().find(|info| info.session.get() == number);
    let found = found.ok_or_else(|| {
        format!("the pool has no session {number}; `farwood status` lists those that it has")
    })?;
    match term {
        Some(term) if term != found.term => Err(format!(
            "session {number} has term {} now, not {term}: it is somebody else ({}), and was not touched",
            found.term,
            who(found)
        )),
        _ => Ok(found),
    }
}

fn who(info: &SessionInfo) -> &str {
    if info.label.is_empty() { "it did not say who it is" } else { info.label.as_str() }
}

/// Fences the session and waits a moment for its recovery.
async fn evict(
    session: &Session,
    endpoint: &Endpoint,
    arguments: &Arguments,
) -> Result<(SessionInfo, Outcome), String> {
    let victim = SessionId::new(arguments.session);
    let sessions = session.list(&endpoint.op()).await.map_err(text)?;
    if victim == session.id() {
        return Err(format!("{} is this command's own session", arguments.session));
    }
    let found = find(&sessions, arguments.session, arguments.term)?.clone();
    session.evict(&endpoint.op(), victim, found.term).await.map_err(text)?;
    let give_up = endpoint.now() + WAIT_NS;
    while endpoint.now() < give_up {
        // Whoever recovers it waits for epochs, which must not wait for us.
        session.heartbeat(endpoint).await.map_err(text)?;
        let sessions = session.list(&endpoint.op()).await.map_err(text)?;
        if !sessions.iter().any(|info| info.session == victim && info.term == found.term) {
            return Ok((found, Outcome::Recovered));
        }
        endpoint.sleep(LOOK_NS).await;
    }
    Ok((found, Outcome::Waits))
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, String> {
    let evicted = as_reaper(&arguments.place, "evict", async |pool, endpoint| {
        // Where nobody else lives in the pool, this command recovers the session itself.
        evict(pool.session(), endpoint, arguments).await
    });
    let (info, outcome) = evicted?;
    let next = match outcome {
        Outcome::Recovered => "What it held was recovered, and its number is free.",
        Outcome::Waits => {
            "It is not recovered yet. A gateway or client that stays in the pool does that; until then `farwood status` lists it."
        }
    };
    let said = format!(
        "session {} of term {} ({}) is fenced: nothing that it sends has an effect any more. {next}\n",
        info.session.get(),
        info.term,
        who(&info)
    );
    unless_broken_pipe(std::io::stdout().write_all(said.as_bytes()))?;
    Ok(ExitCode::SUCCESS)
}
