//! The commands: their names, how many arguments they take, and where each is carried out.
//!
//! | file | commands |
//! |---|---|
//! | `access` | nothing of its own: reading and changing one key as one step, for all the others |
//! | `limits` | how long keys and values may be |
//! | `strings` | GET, SET, INCR and the others about one value, or several |
//! | `expiry` | EXPIRE, TTL and their relatives |
//! | `keyspace` | SCAN, KEYS, RANDOMKEY, DBSIZE, FLUSHDB, TYPE |
//! | `ordered` | RANGE and its relatives, which Redis lacks |
//! | `connection` | HELLO, AUTH, CLIENT, SELECT, QUIT: about the connection itself |
//! | `server` | COMMAND, CONFIG, TIME |
//! | `info` | INFO |
//!
//! A command answers with a reply or is [`Refused`]; texts are those of Redis, since clients look for them.

pub(crate) mod access;
pub(crate) mod connection;
mod expiry;
pub(crate) mod info;
pub(crate) mod keyspace;
pub(crate) mod limits;
mod ordered;
pub(crate) mod server;
mod strings;
mod table;

pub(crate) use table::{COMMANDS, Command, Finder, Keys, Spec};

use crate::resp::{Reply, Request};
use crate::scarcity::PATIENCE_NS;
use crate::shard::Shard;
use crate::store::Store;
use farwood_fabric::clock::{RealClock, SECOND};
use farwood_fabric::{CallError, FabricError};
use farwood_index::IndexError;
use std::borrow::Cow;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Why a command was not carried out, or not known to be. Bytes, since Redis repeats what clients sent as it was.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Refused(pub(crate) Cow<'static, [u8]>);

pub(crate) type Answer = Result<Reply, Refused>;

pub(crate) const SYNTAX: Refused = Refused::fixed("ERR syntax error");
pub(crate) const NO_NUMBER: Refused = Refused::fixed("ERR value is not an integer or out of range");

impl Refused {
    pub(crate) const fn fixed(text: &'static str) -> Self {
        Self(Cow::Borrowed(text.as_bytes()))
    }

    fn is(&self, text: &str) -> bool {
        *self.0 == *text.as_bytes()
    }

    pub(crate) fn new(text: impl Into<Cow<'static, str>>) -> Self {
        Self(match text.into() {
            Cow::Borrowed(text) => Cow::Borrowed(text.as_bytes()),
            Cow::Owned(text) => Cow::Owned(text.into_bytes()),
        })
    }

    /// A text with something of the client's inside. As Redis does, which writes it as a C string, it is cut at the first zero byte.
    pub(crate) fn quoting(before: &str, said: &[u8], after: &str) -> Self {
        Self([before.as_bytes(), until_zero(said), after.as_bytes()].concat().into())
    }

    /// The same, without the line ends at the text's end: Redis trims most of its texts.
    pub(crate) fn trimmed(self) -> Self {
        let is_line_end = |byte: &u8| matches!(byte, b'\r' | b'\n');
        let length = self.0.iter().rposition(|byte| !is_line_end(byte)).map_or(0, |last| last + 1);
        let mut text = self.0.into_owned();
        text.truncate(length);
        Self(text.into())
    }

    pub(crate) fn arity(name: &str) -> Self {
        Self::new(format!("ERR wrong number of arguments for '{name}' command"))
    }
}

/// What clients are told of failures that they cannot look into. Libraries repeat what was answered with `LOADING`, so that says: nothing was done.
const AWAY: &str =
    "LOADING the gateway does not reach a memory server just now; nothing was done, try again in a moment";
const PARTLY: &str = "ERR the gateway does not reach a memory server just now; a part of the command may be done, read before \
                      repeating it";
const UNKNOWN: &str = "ERR the command may or may not have happened; read before repeating it";
const DROPPED: &str = "LOADING the index was dropped; the gateway serves it again when it is created anew";
const BUSY: &str =
    "ERR others held what the command needs for too long; it was not carried out, try again later";
const DAMAGED: &str =
    "ERR a part of the index is damaged, or went with the memory of a server; the gateway's log says more";
const FAILED: &str = "ERR the command failed; the gateway's log says why";
const OUT_OF_MEMORY: &str = "OOM command not allowed when used memory > 'maxmemory'.";

impl From<IndexError> for Refused {
    fn from(error: IndexError) -> Self {
        Self::new(match &error {
            IndexError::PoolFull(_) => OUT_OF_MEMORY,
            IndexError::Unknown | IndexError::Fenced => UNKNOWN,
            IndexError::Dropped => DROPPED,
            IndexError::Closed => AWAY,
            IndexError::Contended { .. } => BUSY,
            IndexError::Corrupt { .. } => log_rarely(&error, DAMAGED),
            IndexError::Fabric(fabric) => match fabric {
                FabricError::Disconnected { .. }
                | FabricError::ServerLost { .. }
                | FabricError::Unreachable { .. } => AWAY,
                FabricError::RetriesExhausted { .. } | FabricError::Call(CallError::Busy { .. }) => BUSY,
                _ => log_rarely(&error, FAILED),
            },
            _ => log_rarely(&error, FAILED),
        })
    }
}

/// Says what is wrong where operators look, now and then.
fn log_rarely(error: &IndexError, told: &'static str) -> &'static str {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    const EVERY_NS: u64 = 10 * SECOND;
    let now = RealClock::of_process().now();
    if NEXT.load(Ordering::Relaxed) <= now {
        NEXT.store(now + EVERY_NS, Ordering::Relaxed);
        tracing::error!("a command failed: {error}");
    }
    told
}

impl Refused {
    /// What a command that failed so is answered: one that only reads can always be repeated, one that writes several keys may have
    /// written some.
    fn of(self, spec: &Spec, arguments: usize) -> Self {
        let has_several = match spec.keys {
            Keys::Nobodys | Keys::One => false,
            Keys::All => arguments > 2,
            Keys::Pairs => arguments > 3,
            Keys::Whole => true,
        };
        let is = |text: &str| *self.0 == *text.as_bytes();
        if is(UNKNOWN) && !spec.writes {
            Self::fixed(AWAY)
        } else if (is(AWAY) || is(DROPPED)) && spec.writes && has_several {
            Self::fixed(PARTLY)
        } else {
            self
        }
    }
}

impl From<Refused> for Reply {
    fn from(Refused(text): Refused) -> Self {
        Self::Error(text)
    }
}

/// Longer names and arguments are cut in error texts.
const SHOWN_BYTES: usize = 128;

/// What a C string of these bytes is.
fn until_zero(bytes: &[u8]) -> &[u8] {
    let end = bytes.iter().position(|byte| *byte == 0);
    &bytes[..end.unwrap_or(bytes.len())]
}

/// The beginning of what a client said, as error texts show it.
fn shown(bytes: &[u8], most: usize) -> &[u8] {
    until_zero(&bytes[..bytes.len().min(most)])
}

/// A command's name is not known.
pub(crate) fn unknown(request: &Request) -> Refused {
    let mut arguments = Vec::new();
    for argument in request.from(1) {
        if arguments.len() >= SHOWN_BYTES {
            break;
        }
        let shown = shown(argument, SHOWN_BYTES - arguments.len());
        for part in [b"'", shown, b"' "] {
            arguments.extend_from_slice(part);
        }
    }
    let name = shown(&request[0], SHOWN_BYTES);
    let parts = [b"ERR unknown command '", name, b"', with args beginning with: ", &arguments];
    Refused(parts.concat().into())
}

/// Carries out a command that needs the index.
pub(crate) async fn execute<S: Store>(shard: Rc<Shard<S>>, spec: &'static Spec, request: Request) -> Reply {
    let shard = &*shard;
    let request = &request;
    let mut answer = match spec.command {
        // What most calls are; everything else is larger and kept elsewhere, so that these stay small.
        Command::Get => strings::get(shard, request).await,
        Command::Set if request.len() == 3 => strings::set_plainly(shard, request).await,
        _ => Box::pin(execute_other(shard, spec, request)).await,
    };
    if matches!(&answer, Err(refused) if refused.is(OUT_OF_MEMORY) && spec.may_repeat()) {
        answer = Box::pin(execute_with_room(shard, spec, request, answer)).await;
    }
    answer.unwrap_or_else(|refused| {
        if refused.is(DAMAGED) {
            shard.common.health.damaged();
        }
        refused.of(spec, request.len()).into()
    })
}

/// Answers a command that needs the index while there is none.
pub(crate) async fn execute_absent<S: Store>(
    shard: Rc<Shard<S>>,
    spec: &'static Spec,
    request: Request,
) -> Reply {
    match spec.command {
        Command::Info => info::info(&shard, &request).await.unwrap_or_else(Reply::from),
        _ => Reply::error(shard.common.health.refusal().as_bytes()),
    }
}

/// Carries out a command again that found no memory left, as often as keys that have expired are removed for it.
async fn execute_with_room<S: Store>(
    shard: &Shard<S>,
    spec: &'static Spec,
    request: &Request,
    mut answer: Answer,
) -> Answer {
    let end = shard.common.now() + PATIENCE_NS;
    while matches!(&answer, Err(refused) if refused.is(OUT_OF_MEMORY)) && shard.make_room(end).await {
        answer = execute_other(shard, spec, request).await;
    }
    answer
}

async fn execute_other<S: Store>(shard: &Shard<S>, spec: &'static Spec, request: &Request) -> Answer {
    use expiry::{Moment, Unit};
    match spec.command {
        Command::Get => strings::get(shard, request).await,
        Command::Set => strings::set(shard, request).await,
        Command::SetNx => strings::set_nx(shard, request).await,
        Command::SetEx => strings::set_ex(shard, request, Unit::Seconds).await,
        Command::PSetEx => strings::set_ex(shard, request, Unit::Millis).await,
        Command::GetSet => strings::get_set(shard, request).await,
        Command::GetDel => strings::get_del(shard, request).await,
        Command::GetEx => strings::get_ex(shard, request).await,
        Command::MGet => strings::mget(shard, request).await,
        Command::MSet => strings::mset(shard, request).await,
        Command::Del | Command::Unlink => strings::del(shard, request).await,
        Command::Exists | Command::Touch => strings::exists(shard, request).await,
        Command::StrLen => strings::strlen(shard, request).await,
        Command::Append => strings::append(shard, request).await,
        Command::Incr => strings::add(shard, &request[1], 1).await,
        Command::Decr => strings::add(shard, &request[1], -1).await,
        Command::IncrBy => strings::incr_by(shard, request).await,
        Command::DecrBy => strings::decr_by(shard, request).await,
        Command::Type => keyspace::type_of(shard, request).await,
        Command::Expire => expiry::expire(shard, request, Unit::Seconds, Moment::FromNow).await,
        Command::PExpire => expiry::expire(shard, request, Unit::Millis, Moment::FromNow).await,
        Command::ExpireAt => expiry::expire(shard, request, Unit::Seconds, Moment::At).await,
        Command::PExpireAt => expiry::expire(shard, request, Unit::Millis, Moment::At).await,
        Command::Ttl => expiry::left(shard, request, Unit::Seconds, Moment::FromNow).await,
        Command::PTtl => expiry::left(shard, request, Unit::Millis, Moment::FromNow).await,
        Command::ExpireTime => expiry::left(shard, request, Unit::Seconds, Moment::At).await,
        Command::PExpireTime => expiry::left(shard, request, Unit::Millis, Moment::At).await,
        Command::Persist => expiry::persist(shard, request).await,
        Command::Scan => keyspace::scan(shard, request).await,
        Command::Keys => keyspace::keys(shard, request).await,
        Command::RandomKey => keyspace::random_key(shard).await,
        Command::FlushDb => keyspace::flush(shard, request).await,
        Command::DbSize => keyspace::size(shard).await,
        Command::Range => ordered::range(shard, request, true).await,
        Command::RangeKeys => ordered::range(shard, request, false).await,
        Command::CountRange => ordered::count(shard, request).await,
        Command::DelRange => ordered::delete(shard, request).await,
        Command::Info => info::info(shard, request).await,
        // The connection carries those out.
        Command::Auth
        | Command::Client
        | Command::Commands
        | Command::Config
        | Command::Echo
        | Command::Hello
        | Command::Ping
        | Command::Quit
        | Command::Select
        | Command::Time => Err(unknown(request)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farwood_fabric::control::ControlError;
    use farwood_fabric::{ServerId, SessionId};

    fn answer(error: IndexError, words: &[&str]) -> String {
        let finder = Finder::new();
        let (spec, _) = finder.find(words[0].as_bytes()).expect("a command");
        String::from_utf8(Refused::from(error).of(spec, words.len()).0.into_owned()).expect("text")
    }

    /// Who is told `LOADING` may repeat the command without a thought.
    #[test]
    fn loading_means_that_nothing_was_done() {
        let down = || IndexError::Fabric(FabricError::Disconnected { server: ServerId::new(1) });
        for words in
            [&["incr", "a"][..], &["get", "a"], &["mget", "a", "b"], &["del", "a"], &["mset", "a", "1"]]
        {
            assert_eq!(answer(down(), words), AWAY);
        }
        for words in
            [&["del", "a", "b"][..], &["mset", "a", "1", "b", "2"], &["delrange", "-", "+"], &["flushdb"]]
        {
            assert_eq!(answer(down(), words), PARTLY);
        }
        for error in [IndexError::Unknown, IndexError::Fenced] {
            assert_eq!(answer(error.clone(), &["incr", "a"]), UNKNOWN);
            assert_eq!(answer(error, &["get", "a"]), AWAY, "it can be read again");
        }
    }

    #[test]
    fn clients_are_not_told_of_what_they_cannot_know() {
        let (server, session) = (ServerId::new(1), SessionId::new(2));
        let fabric = [
            FabricError::Disconnected { server },
            FabricError::ServerLost { server },
            FabricError::Unknown { server },
            FabricError::Fenced { session },
            FabricError::UnknownServer { server },
            FabricError::Unreachable { why: "no server listens at 10.0.0.1:7000".to_owned() },
            FabricError::Call(CallError::Unknown),
            FabricError::NoExecutor,
        ];
        let control = [
            ControlError::PoolFull { server, wanted: 1, flush_helps: true },
            ControlError::SessionFenced { session },
            ControlError::BadRequest { why: "no object of 99 bytes fits a chunk".to_owned() },
        ];
        let refused = control.map(|error| IndexError::from(FabricError::Call(CallError::Control(error))));
        let why = || "session s2 at m1, as `farwood check` says".to_owned();
        let index = [
            IndexError::Corrupt { what: "there is no N16 at m1:main+0x601800".to_owned() },
            IndexError::BadKey { why: why() },
            IndexError::BadValue { why: why() },
            IndexError::BadConfig { why: why() },
            IndexError::Unrecovered { sessions: vec![session], what: why() },
            IndexError::Contended { what: "room for an intent", attempts: 9 },
            IndexError::Unknown,
            IndexError::Fenced,
            IndexError::Dropped,
            IndexError::Closed,
        ];
        for error in fabric.map(IndexError::from).into_iter().chain(refused).chain(index) {
            let told = answer(error.clone(), &["set", "a", "1"]);
            for internal in [
                "reconnect",
                "session",
                "m1",
                "s2",
                "executor",
                "10.0.0.1",
                "call",
                "farwood",
                "chunk",
                "intent",
            ] {
                assert!(!told.contains(internal), "{error:?}: {told}");
            }
        }
    }
}
