//! The commands: their names, how many arguments they take, and where each is carried out.
//!
//! | file | commands |
//! |---|---|
//! | `access` | nothing of its own: reading and changing one key as one step, for all the others |
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
mod ordered;
pub(crate) mod server;
mod strings;
mod table;

pub(crate) use table::{COMMANDS, Command, Finder, Keys, Spec};

use crate::resp::{Reply, Request};
use crate::shard::Shard;
use crate::store::Store;
use farwood_index::IndexError;
use std::borrow::Cow;
use std::rc::Rc;

/// Why a command was not carried out, or not known to be.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Refused(pub(crate) Cow<'static, str>);

pub(crate) type Answer = Result<Reply, Refused>;

pub(crate) const SYNTAX: Refused = Refused(Cow::Borrowed("ERR syntax error"));
pub(crate) const NO_NUMBER: Refused = Refused(Cow::Borrowed("ERR value is not an integer or out of range"));

impl Refused {
    pub(crate) fn new(text: impl Into<Cow<'static, str>>) -> Self {
        Self(text.into())
    }

    pub(crate) fn arity(name: &str) -> Self {
        Self(format!("ERR wrong number of arguments for '{name}' command").into())
    }
}

impl From<IndexError> for Refused {
    fn from(error: IndexError) -> Self {
        match error {
            IndexError::PoolFull(_) => Self::new("OOM command not allowed when used memory > 'maxmemory'."),
            error => Self(format!("ERR {error}").into()),
        }
    }
}

impl From<Refused> for Reply {
    fn from(Refused(text): Refused) -> Self {
        Self::Error(text)
    }
}

/// A command's name is not known.
pub(crate) fn unknown(request: &Request) -> Refused {
    const SHOWN_BYTES: usize = 128;
    let cut =
        |bytes: &[u8], most: usize| String::from_utf8_lossy(&bytes[..bytes.len().min(most)]).into_owned();
    let mut arguments = String::new();
    for argument in request.from(1) {
        if arguments.len() >= SHOWN_BYTES {
            break;
        }
        let shown = cut(argument, SHOWN_BYTES - arguments.len());
        arguments.extend(["'", &shown, "' "]);
    }
    let name = cut(&request[0], SHOWN_BYTES);
    Refused(format!("ERR unknown command '{name}', with args beginning with: {arguments}").into())
}

/// Carries out a command that needs the index.
pub(crate) async fn execute<S: Store>(shard: Rc<Shard<S>>, spec: &'static Spec, request: Request) -> Reply {
    let shard = &*shard;
    let request = &request;
    let answer = match spec.command {
        // What most calls are; everything else is larger and kept elsewhere, so that these stay small.
        Command::Get => strings::get(shard, request).await,
        Command::Set if request.len() == 3 => strings::set_plainly(shard, request).await,
        _ => Box::pin(execute_other(shard, spec, request)).await,
    };
    answer.unwrap_or_else(Reply::from)
}

/// Answers a command that needs the index while there is none.
pub(crate) async fn execute_absent<S: Store>(
    shard: Rc<Shard<S>>,
    spec: &'static Spec,
    request: Request,
) -> Reply {
    match spec.command {
        Command::Info => info::info(&shard, &request).await.unwrap_or_else(Reply::from),
        _ => Reply::error(shard.common.health.refusal()),
    }
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
