//! Commands about the gateway: its settings, its commands.

use super::connection::unknown_subcommand;
use super::{Answer, COMMANDS, Keys, Refused, Spec};
use crate::common::Common;
use crate::glob;
use crate::resp::{Reply, Request};

/// The version of Redis whose commands and replies these are.
pub(crate) const REDIS_VERSION: &str = "7.0.15";

/// What becomes of keys when far memory is full.
pub(super) const MEMORY_POLICY: &str = "noeviction";

/// CONFIG GET: what clients ask for, and what can be set.
pub(super) fn config(common: &Common, request: &Request) -> Answer {
    match (request[1].to_ascii_lowercase().as_slice(), request.len()) {
        (b"get", 3..) => {}
        (b"get", _) => return Err(Refused::arity("config|get")),
        _ => return Err(unknown_subcommand(request)),
    }
    let options = &common.options;
    let settings = [
        ("appendonly", "no".to_owned()),
        ("bind", options.listen.ip().to_string()),
        ("databases", "1".to_owned()),
        ("maxclients", options.max_clients.to_string()),
        ("maxmemory", common.memory.total_bytes().to_string()),
        ("maxmemory-clients", options.client_memory_bytes.to_string()),
        ("maxmemory-policy", MEMORY_POLICY.to_owned()),
        ("port", options.listen.port().to_string()),
        ("proto-max-bulk-len", options.max_request_bytes.to_string()),
        ("save", String::new()),
        ("timeout", options.idle_seconds.to_string()),
    ];
    let is_wanted = |name: &str| {
        request.from(2).any(|pattern| glob::matches(&pattern.to_ascii_lowercase(), name.as_bytes()))
    };
    let wanted = settings.into_iter().filter(|(name, _)| is_wanted(name));
    Ok(Reply::Map(wanted.map(|(name, value)| (name.into(), value.as_str().into())).collect()))
}

/// So many commands may be asked about at a time.
const MAX_NAMES: usize = 1_000;

/// COMMAND, COMMAND COUNT, COMMAND LIST, COMMAND INFO, COMMAND DOCS.
pub(super) fn command(request: &Request) -> Answer {
    let Some(word) = request.get(1).map(<[u8]>::to_ascii_lowercase) else {
        return Ok(Reply::Array(COMMANDS.iter().map(details).collect()));
    };
    // What is said of each is much longer than its name.
    if request.len() > MAX_NAMES + 2 {
        return Err(Refused::new(format!("ERR too many names; ask for {MAX_NAMES} at a time")));
    }
    let named = |name: &[u8]| COMMANDS.iter().find(|spec| name.eq_ignore_ascii_case(spec.name.as_bytes()));
    match (word.as_slice(), request.len()) {
        (b"count", 2) => Ok(Reply::count(COMMANDS.len())),
        (b"count", _) => Err(Refused::arity("command|count")),
        (b"list", 2) => Ok(Reply::Array(COMMANDS.iter().map(|spec| spec.name.into()).collect())),
        (b"list", _) => Err(super::SYNTAX),
        (b"info", 2) => Ok(Reply::Array(COMMANDS.iter().map(details).collect())),
        (b"info", _) => {
            let asked = request.from(2).map(|name| named(name).map_or(Reply::Nil, details));
            Ok(Reply::Array(asked.collect()))
        }
        (b"docs", 2) => Ok(Reply::Map(COMMANDS.iter().map(docs).collect())),
        (b"docs", _) => Ok(Reply::Map(request.from(2).filter_map(named).map(docs).collect())),
        _ => Err(unknown_subcommand(request)),
    }
}

/// What COMMAND INFO says: name, arity, flags, first and last key and the step between them, categories, tips, and what Redis adds
/// about keys and subcommands, which is empty here.
fn details(spec: &Spec) -> Reply {
    let (first, last, step) = match spec.keys {
        Keys::Nobodys | Keys::Whole => (0, 0, 0),
        Keys::One => (1, 1, 1),
        Keys::All => (1, -1, 1),
        Keys::Pairs => (1, -1, 2),
    };
    let flag = if spec.writes { "write" } else { "readonly" };
    let flags = if spec.uses_index() { vec![Reply::Word(flag)] } else { vec![Reply::Word("fast")] };
    let category = if spec.writes { "@write" } else { "@read" };
    Reply::Array(vec![
        spec.name.into(),
        Reply::Number(i64::from(spec.arity)),
        Reply::Set(flags),
        Reply::Number(first),
        Reply::Number(last),
        Reply::Number(step),
        Reply::Set(vec![Reply::Word(category)]),
        Reply::Array(Vec::new()),
        Reply::Array(Vec::new()),
        Reply::Array(Vec::new()),
    ])
}

fn docs(spec: &'static Spec) -> (Reply, Reply) {
    let fields = vec![
        ("summary".into(), spec.summary.into()),
        ("since".into(), "1.0.0".into()),
        ("group".into(), spec.group.into()),
        ("complexity".into(), "one descent of the index for each key".into()),
    ];
    (spec.name.into(), Reply::Map(fields))
}
