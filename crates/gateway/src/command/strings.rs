//! Commands about values.

use super::access::{Change, Held};
use super::expiry::{Expiry, Moment, Unit};
use super::{Answer, NO_NUMBER, Refused, SYNTAX};
use crate::envelope::{self, Millis};
use crate::number;
use crate::resp::{Reply, Request};
use crate::shard::Shard;
use crate::store::Store;
use farwood_index::OrderedIndex;

/// What a key held, as a reply.
fn found(held: Option<Held>) -> Reply {
    held.map_or(Reply::Nil, |Held { mut stored, opened }| {
        stored.truncate(opened.bytes);
        Reply::Bytes(stored)
    })
}

fn copied(held: Option<&Held>) -> Reply {
    held.map_or(Reply::Nil, |held| Reply::bytes(held.value()))
}

fn expiry_of(held: Option<&Held>) -> Option<Millis> {
    held.and_then(|held| held.opened.expires_at)
}

#[inline]
pub(super) async fn get<S: Store>(shard: &Shard<S>, request: &Request) -> Answer {
    Ok(found(shard.look_up(&request[1]).await?))
}

/// SET without options: whatever was there, is gone.
#[inline]
pub(super) async fn set_plainly<S: Store>(shard: &Shard<S>, request: &Request) -> Answer {
    put(shard, &request[1], &request[2], None).await?;
    Ok(Reply::Ok)
}

#[inline]
async fn put<S: Store>(
    shard: &Shard<S>,
    key: &[u8],
    value: &[u8],
    expires_at: Option<Millis>,
) -> Result<(), Refused> {
    shard.check_pair(key, value.len())?;
    let handle = shard.handle()?;
    handle.put(key, &envelope::seal(value, expires_at)).await?;
    if let Some(at) = expires_at {
        shard.deadlines.note(key, at);
    }
    Ok(())
}

/// The options of SET.
#[derive(Default, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is an option of its own")]
struct SetOptions {
    if_absent: bool,
    if_present: bool,
    keep_ttl: bool,
    get: bool,
    expiry: Expiry,
}

impl SetOptions {
    fn parse(request: &Request) -> Result<Self, Refused> {
        let mut options = Self::default();
        let mut at = 3;
        while let Some(word) = request.get(at) {
            let word = word.to_ascii_lowercase();
            match word.as_slice() {
                b"nx" if !options.if_present => options.if_absent = true,
                b"xx" if !options.if_absent => options.if_present = true,
                b"get" => options.get = true,
                b"keepttl" if options.expiry.is_none() => options.keep_ttl = true,
                _ if !options.keep_ttl && options.expiry.take(&word, request.get(at + 1))? => at += 1,
                _ => return Err(SYNTAX),
            }
            at += 1;
        }
        Ok(options)
    }
}

pub(super) async fn set<S: Store>(shard: &Shard<S>, request: &Request) -> Answer {
    let options = SetOptions::parse(request)?;
    let expires_at = options.expiry.at("set", shard.common.pool_ms())?;
    let (key, value) = (&request[1], &request[2]);
    let is_plain = !(options.if_absent || options.if_present || options.keep_ttl || options.get);
    if is_plain {
        put(shard, key, value, expires_at).await?;
        return Ok(Reply::Ok);
    }
    let decide = |held: Option<&Held>| {
        let is_wanted = if held.is_some() { !options.if_absent } else { !options.if_present };
        let expires_at = if options.keep_ttl { expiry_of(held) } else { expires_at };
        let change = if is_wanted { Change::value(value, expires_at) } else { Change::Keep };
        let reply = match (options.get, is_wanted) {
            (true, _) => copied(held),
            (false, true) => Reply::Ok,
            (false, false) => Reply::Nil,
        };
        Ok((change, reply))
    };
    shard.change(key, decide).await
}

pub(super) async fn set_nx<S: Store>(shard: &Shard<S>, request: &Request) -> Answer {
    let (key, value) = (&request[1], &request[2]);
    shard.check_pair(key, value.len())?;
    {
        let handle = shard.handle()?;
        if handle.put_if_absent(key, &envelope::seal(value, None)).await? {
            return Ok(Reply::Number(1));
        }
    }
    // What is there may have expired.
    let decide = |held: Option<&Held>| match held {
        Some(_) => Ok((Change::Keep, Reply::Number(0))),
        None => Ok((Change::value(value, None), Reply::Number(1))),
    };
    shard.change(key, decide).await
}

/// SETEX and PSETEX.
pub(super) async fn set_ex<S: Store>(shard: &Shard<S>, request: &Request, unit: Unit) -> Answer {
    let name = if unit == Unit::Seconds { "setex" } else { "psetex" };
    let expiry = Expiry::new(unit, Moment::FromNow, &request[2]);
    put(shard, &request[1], &request[3], expiry.at(name, shard.common.pool_ms())?).await?;
    Ok(Reply::Ok)
}

pub(super) async fn get_set<S: Store>(shard: &Shard<S>, request: &Request) -> Answer {
    let decide = |held: Option<&Held>| Ok((Change::value(&request[2], None), copied(held)));
    shard.change(&request[1], decide).await
}

pub(super) async fn get_del<S: Store>(shard: &Shard<S>, request: &Request) -> Answer {
    shard.change(&request[1], |held| Ok((Change::Remove, copied(held)))).await
}

pub(super) async fn get_ex<S: Store>(shard: &Shard<S>, request: &Request) -> Answer {
    let (mut expiry, mut persist) = (Expiry::default(), false);
    let mut at = 2;
    while let Some(word) = request.get(at) {
        let word = word.to_ascii_lowercase();
        match word.as_slice() {
            b"persist" if expiry.is_none() => persist = true,
            _ if !persist && expiry.take(&word, request.get(at + 1))? => at += 1,
            _ => return Err(SYNTAX),
        }
        at += 1;
    }
    if expiry.is_none() && !persist {
        return get(shard, request).await;
    }
    let now = shard.common.pool_ms();
    let decide = |held: Option<&Held>| {
        // As in Redis, a time that is none does not matter if there is no such key.
        let Some(held) = held else { return Ok((Change::Keep, Reply::Nil)) };
        let expires_at = expiry.at("getex", now)?;
        let is_over = expires_at.is_some_and(|at| at <= now);
        let change = if is_over { Change::Remove } else { Change::retime(held, expires_at) };
        Ok((change, copied(Some(held))))
    };
    shard.change(&request[1], decide).await
}

pub(super) async fn mget<S: Store>(shard: &Shard<S>, request: &Request) -> Answer {
    let mut replies = Vec::with_capacity(request.len() - 1);
    let mut charge = shard.charge();
    let mut bytes = 0;
    let work = async |key: &[u8]| shard.look_up(key).await;
    let took = |held: Option<Held>| {
        bytes += held.as_ref().map_or(0, |held| held.stored.len()) + size_of::<Reply>();
        replies.push(found(held));
        shard.check_reply(&mut charge, bytes)
    };
    shard.each_key(request.from(1), work, took).await?;
    Ok(Reply::Array(replies))
}

/// Each key by itself: whoever looks meanwhile sees some of them set. If one of them cannot be, because it or its value is too long, none is.
pub(super) async fn mset<S: Store>(shard: &Shard<S>, request: &Request) -> Answer {
    if request.len() % 2 == 0 {
        return Err(Refused::arity("mset"));
    }
    // A key that comes twice holds what comes last, so those are not set together.
    let pairs = (1..request.len()).step_by(2).map(|at| (&request[at], &request[at + 1]));
    for (key, value) in pairs.clone() {
        shard.check_pair(key, value.len())?;
    }
    let last: std::collections::BTreeMap<&[u8], &[u8]> = pairs.collect();
    let work = async |key: &[u8]| match last.get(key) {
        Some(value) => put(shard, key, value, None).await,
        None => Ok(()),
    };
    shard.each_key(last.keys().copied(), work, Ok).await?;
    Ok(Reply::Ok)
}

pub(super) async fn del<S: Store>(shard: &Shard<S>, request: &Request) -> Answer {
    let work = async |key: &[u8]| shard.change(key, |held| Ok((Change::Remove, held.is_some()))).await;
    Ok(Reply::count(shard.count_keys(request.from(1), work).await?))
}

pub(super) async fn exists<S: Store>(shard: &Shard<S>, request: &Request) -> Answer {
    let work = async |key: &[u8]| Ok(shard.look_up(key).await?.is_some());
    Ok(Reply::count(shard.count_keys(request.from(1), work).await?))
}

pub(super) async fn strlen<S: Store>(shard: &Shard<S>, request: &Request) -> Answer {
    let held = shard.look_up(&request[1]).await?;
    Ok(Reply::count(held.map_or(0, |held| held.value().len())))
}

pub(super) async fn append<S: Store>(shard: &Shard<S>, request: &Request) -> Answer {
    let decide = |held: Option<&Held>| {
        let value = [held.map_or(&[][..], Held::value), &request[2]].concat();
        // Appending nothing to nothing makes an empty value, as in Redis.
        Ok((Change::value(&value, expiry_of(held)), Reply::count(value.len())))
    };
    shard.change(&request[1], decide).await
}

pub(super) async fn incr_by<S: Store>(shard: &Shard<S>, request: &Request) -> Answer {
    let step = number::parse(&request[2]).ok_or(NO_NUMBER)?;
    add(shard, &request[1], step).await
}

pub(super) async fn decr_by<S: Store>(shard: &Shard<S>, request: &Request) -> Answer {
    let step = number::parse(&request[2]).ok_or(NO_NUMBER)?;
    let step = step.checked_neg().ok_or(Refused::new("ERR decrement would overflow"))?;
    add(shard, &request[1], step).await
}

/// Adds to a number; a key that is not there counts as 0.
pub(super) async fn add<S: Store>(shard: &Shard<S>, key: &[u8], step: i64) -> Answer {
    let decide = |held: Option<&Held>| {
        let before = match held {
            Some(held) => number::parse(held.value()).ok_or(NO_NUMBER)?,
            None => 0,
        };
        let after =
            before.checked_add(step).ok_or(Refused::new("ERR increment or decrement would overflow"))?;
        let mut value = Vec::with_capacity(20);
        number::write(&mut value, after);
        Ok((Change::value(&value, expiry_of(held)), Reply::Number(after)))
    };
    shard.change(key, decide).await
}
