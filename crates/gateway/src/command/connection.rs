//! Commands about the connection itself.

use super::{Answer, Command, Refused, SHOWN_BYTES, SYNTAX, server, shown, unknown};
use crate::clients::{Client, Seat};
use crate::common::Common;
use crate::logins::Penalty;
use crate::number;
use crate::resp::{Protocol, Reply, Request};
use std::collections::HashSet;
use std::sync::atomic::Ordering;

/// One client's side of the conversation.
#[derive(Debug)]
pub(crate) struct Talk {
    pub(crate) client: Seat,
    pub(crate) protocol: Protocol,
    /// It still has to say the password.
    pub(crate) is_stranger: bool,
    /// It has said MULTI: there are no transactions, so nothing is carried out until EXEC or DISCARD.
    is_in_transaction: bool,
    /// It has said a wrong password, and waits for the answer.
    pub(crate) penalty: Option<Penalty>,
    /// It ends when all replies have been sent.
    pub(crate) is_over: bool,
}

impl Talk {
    pub(crate) fn new(client: Seat, common: &Common) -> Self {
        let is_stranger = common.options.password.is_some();
        Self {
            client,
            protocol: Protocol::default(),
            is_stranger,
            is_in_transaction: false,
            penalty: None,
            is_over: false,
        }
    }

    /// Why the client may not say this now.
    #[inline]
    pub(crate) fn refusal(&self, command: Command) -> Option<Refused> {
        if !self.is_stranger && !self.is_in_transaction {
            return None;
        }
        match command {
            Command::Quit => None,
            Command::Auth | Command::Hello if self.is_stranger => None,
            _ if self.is_stranger => Some(STRANGER),
            _ => Some(NOT_QUEUED),
        }
    }

    /// Answers what is no command here. `None`: the client is no client of Redis, and is hung up on.
    pub(crate) fn answer_unknown(&mut self, request: &Request) -> Option<Answer> {
        let name = request[0].to_ascii_lowercase();
        let answer = match (name.as_slice(), self.is_in_transaction) {
            // The beginning of HTTP: a web page makes somebody's browser send commands in the body of a request.
            (b"post" | b"host:", _) => {
                self.is_over = true;
                return None;
            }
            _ if self.is_stranger => Err(STRANGER),
            (b"multi" | b"exec" | b"discard", _) if request.len() > 1 => {
                Err(Refused::arity(&String::from_utf8_lossy(&name)))
            }
            (b"multi", true) => Err(Refused::new("ERR MULTI calls can not be nested")),
            (b"multi", false) => {
                self.is_in_transaction = true;
                Err(Refused::new(
                    "ERR there are no transactions here; commands up to EXEC or DISCARD are not carried out",
                ))
            }
            (b"exec", true) => {
                self.is_in_transaction = false;
                Err(Refused::new("EXECABORT Transaction discarded because of previous errors."))
            }
            (b"discard", true) => {
                self.is_in_transaction = false;
                Ok(Reply::Ok)
            }
            (b"exec", false) => Err(Refused::new("ERR EXEC without MULTI")),
            (b"discard", false) => Err(Refused::new("ERR DISCARD without MULTI")),
            _ => Err(unknown(request)),
        };
        Some(answer)
    }
}

const STRANGER: Refused = Refused::fixed("NOAUTH Authentication required.");
const NOT_QUEUED: Refused =
    Refused::fixed("ERR not carried out: there are no transactions here; say EXEC or DISCARD first");

/// Carries out a command that needs no index.
pub(crate) fn execute(common: &Common, talk: &mut Talk, command: Command, request: &Request) -> Answer {
    match command {
        Command::Ping => match request.len() {
            1 => Ok(Reply::Word("PONG")),
            2 => Ok(Reply::bytes(&request[1])),
            _ => Err(Refused::arity("ping")),
        },
        Command::Echo => Ok(Reply::bytes(&request[1])),
        Command::Quit => {
            talk.is_over = true;
            Ok(Reply::Ok)
        }
        Command::Select => match number::parse(&request[1]) {
            Some(0) => Ok(Reply::Ok),
            Some(_) => Err(Refused::new("ERR DB index is out of range")),
            None => Err(super::NO_NUMBER),
        },
        Command::Auth => auth(common, talk, request),
        Command::Hello => hello(common, talk, request),
        Command::Client => client(common, talk, request),
        Command::Config => server::config(common, request),
        Command::Commands => server::command(request),
        Command::Time => {
            let us = common.pool_ns() / 1_000;
            let parts = [us / 1_000_000, us % 1_000_000];
            Ok(Reply::Array(parts.map(|part| Reply::bytes(part.to_string())).into()))
        }
        _ => Err(unknown(request)),
    }
}

fn auth(common: &Common, talk: &mut Talk, request: &Request) -> Answer {
    let (user, password) = match request.len() {
        2 => (&b"default"[..], &request[1]),
        3 => (&request[1], &request[2]),
        _ => return Err(SYNTAX),
    };
    if request.len() == 2 && common.options.password.is_none() {
        return Err(Refused::new(
            "ERR AUTH <password> called without any password configured for the default user. Are you sure your \
             configuration is correct?",
        ));
    }
    let_in(common, talk, user, password)?;
    Ok(Reply::Ok)
}

fn let_in(common: &Common, talk: &mut Talk, user: &[u8], password: &[u8]) -> Result<(), Refused> {
    let peer = talk.client.peer;
    if !common.logins.may_try(peer) {
        talk.is_over = true;
        return Err(Refused::new("ERR too many wrong passwords from this address, try again later"));
    }
    // Without a password anything will do, as in Redis.
    let is_right = common.options.password.as_deref().is_none_or(|right| is_same(right, password));
    if user != b"default" || !is_right {
        talk.penalty = Some(common.logins.failed(peer, common.now()));
        return Err(Refused::new("WRONGPASS invalid username-password pair or user is disabled."));
    }
    talk.is_stranger = false;
    common.logins.succeeded(peer);
    Ok(())
}

/// Compares in a time that does not tell how much was right.
fn is_same(right: &[u8], said: &[u8]) -> bool {
    let differences = right.iter().zip(said).fold(0, |so_far, (a, b)| so_far | (a ^ b));
    right.len() == said.len() && differences == 0
}

fn hello(common: &Common, talk: &mut Talk, request: &Request) -> Answer {
    let protocol = match request.get(1).map(number::parse) {
        None => talk.protocol,
        Some(Some(2)) => Protocol::Resp2,
        Some(Some(3)) => Protocol::Resp3,
        Some(Some(_)) => return Err(Refused::new("NOPROTO unsupported protocol version")),
        Some(None) => return Err(Refused::new("ERR Protocol version is not an integer or out of range")),
    };
    let (mut login, mut name) = (None, None);
    let mut at = 2;
    while let Some(word) = request.get(at) {
        match (word.to_ascii_lowercase().as_slice(), request.get(at + 1), request.get(at + 2)) {
            (b"auth", Some(user), Some(password)) => {
                login = Some((user, password));
                at += 3;
            }
            (b"setname", Some(given), _) => {
                name = Some(given);
                at += 2;
            }
            _ => return Err(Refused::quoting("ERR Syntax error in HELLO option '", word, "'")),
        }
    }
    if let Some((user, password)) = login {
        let_in(common, talk, user, password)?;
    }
    if talk.is_stranger {
        return Err(Refused::new(
            "NOAUTH HELLO must be called with the client already authenticated, otherwise the HELLO <proto> AUTH <user> \
             <pass> option can be used to authenticate the client and select the RESP protocol version at the same time",
        ));
    }
    if let Some(name) = name {
        set_name(talk, name)?;
    }
    talk.protocol = protocol;
    let version = if protocol == Protocol::Resp3 { 3 } else { 2 };
    talk.client.protocol.store(version, Ordering::Relaxed);
    Ok(Reply::Map(vec![
        ("server".into(), "redis".into()),
        ("version".into(), server::REDIS_VERSION.into()),
        ("proto".into(), Reply::Number(i64::from(version))),
        ("id".into(), client_id(talk)),
        ("mode".into(), "standalone".into()),
        ("role".into(), "master".into()),
        ("modules".into(), Reply::Array(Vec::new())),
    ]))
}

fn client_id(talk: &Talk) -> Reply {
    Reply::Number(i64::try_from(talk.client.id).unwrap_or(i64::MAX))
}

/// Names go into lists that are split at spaces and line ends.
fn is_plain(name: &[u8]) -> bool {
    name.iter().all(|byte| (b'!'..=b'~').contains(byte))
}

/// Names are with the client for good, and CLIENT LIST says all of them in one reply.
const MAX_NAME_BYTES: usize = 256;

fn check_length(name: &[u8]) -> Result<(), Refused> {
    if name.len() <= MAX_NAME_BYTES {
        return Ok(());
    }
    Err(Refused::new(format!("ERR Client names and attributes cannot be longer than {MAX_NAME_BYTES} bytes")))
}

fn set_name(talk: &Talk, name: &[u8]) -> Result<(), Refused> {
    if !is_plain(name) {
        return Err(Refused::new("ERR Client names cannot contain spaces, newlines or special characters."));
    }
    check_length(name)?;
    talk.client.names().name = name.to_vec();
    Ok(())
}

fn client(common: &Common, talk: &mut Talk, request: &Request) -> Answer {
    let arity = |name: &str| Refused::arity(&format!("client|{name}"));
    let word = request[1].to_ascii_lowercase();
    match (word.as_slice(), request.len()) {
        (b"id", 2) => Ok(client_id(talk)),
        (b"id", _) => Err(arity("id")),
        (b"getname", 2) => {
            let name = talk.client.names().name.clone();
            Ok(if name.is_empty() { Reply::Nil } else { Reply::bytes(name) })
        }
        (b"getname", _) => Err(arity("getname")),
        (b"setname", 3) => set_name(talk, &request[2]).map(|()| Reply::Ok),
        (b"setname", _) => Err(arity("setname")),
        (b"setinfo", 4) => set_info(talk, &request[2], &request[3]),
        (b"setinfo", _) => Err(arity("setinfo")),
        (b"info", 2) => Ok(Reply::Text(line(common, &talk.client))),
        (b"info", _) => Err(arity("info")),
        (b"list", _) => list(common, request),
        _ => Err(unknown_subcommand(request)),
    }
}

fn set_info(talk: &Talk, what: &[u8], value: &[u8]) -> Answer {
    let what = what.to_ascii_lowercase();
    if !is_plain(value) {
        let after = " cannot contain spaces, newlines or special characters.";
        return Err(Refused::quoting("ERR ", &what, after));
    }
    check_length(value)?;
    let mut names = talk.client.names();
    match what.as_slice() {
        b"lib-name" => names.library = value.to_vec(),
        b"lib-ver" => names.library_version = value.to_vec(),
        _ => return Err(Refused::quoting("ERR Unrecognized option '", &what, "'")),
    }
    Ok(Reply::Ok)
}

fn line(common: &Common, client: &Client) -> String {
    let last = client.last_command.load(Ordering::Relaxed);
    let command = super::COMMANDS.get(last).map_or("NULL", |spec| spec.name);
    client.line(common.seconds(), command) + "\n"
}

fn list(common: &Common, request: &Request) -> Answer {
    let option = request.get(2).map(<[u8]>::to_ascii_lowercase);
    let mut clients = common.clients.list();
    match (option.as_deref(), request.len()) {
        (None, _) => {}
        (Some(b"type"), 4) => match request[3].to_ascii_lowercase().as_slice() {
            b"normal" => {}
            b"master" | b"replica" | b"slave" | b"pubsub" => clients.clear(),
            _ => return Err(Refused::quoting("ERR Unknown client type '", &request[3], "'")),
        },
        (Some(b"id"), 4..) => {
            let ids: Option<HashSet<u64>> =
                request.from(3).map(|id| number::parse(id).filter(|id| *id > 0)?.try_into().ok()).collect();
            let ids = ids.ok_or(Refused::new("ERR Invalid client ID"))?;
            clients.retain(|client| ids.contains(&client.id));
        }
        _ => return Err(SYNTAX),
    }
    Ok(Reply::Text(clients.iter().map(|client| line(common, client)).collect()))
}

/// What Redis says of a command whose second word it does not know.
pub(super) fn unknown_subcommand(request: &Request) -> Refused {
    let (name, word) = (request[0].to_ascii_uppercase(), shown(&request[1], SHOWN_BYTES));
    Refused([b"ERR unknown subcommand '", word, b"'. Try ", &name, b" HELP."].concat().into())
}
