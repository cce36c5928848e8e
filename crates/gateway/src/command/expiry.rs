//! When keys expire.

use super::access::{Change, Held};
use super::{Answer, NO_NUMBER, Refused, SYNTAX};
use crate::envelope::Millis;
use crate::number;
use crate::resp::{Reply, Request};
use crate::shard::Shard;
use crate::store::Store;

/// How a time is written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Unit {
    Seconds,
    Millis,
}

/// What a time counts from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Moment {
    FromNow,
    At,
}

/// EX, PX, EXAT or PXAT with its time, or none of them.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Expiry(Option<(Unit, Moment, Time)>);

/// A time as it was written; what is none is refused only after all options were read.
type Time = Option<i64>;

impl Expiry {
    pub(super) fn new(unit: Unit, moment: Moment, time: &[u8]) -> Self {
        Self(Some((unit, moment, number::parse(time))))
    }

    pub(super) fn is_none(&self) -> bool {
        self.0.is_none()
    }

    /// Takes an option and its time; whether the word is one. The same one twice is fine, two different ones are not.
    pub(super) fn take(&mut self, word: &[u8], time: Option<&[u8]>) -> Result<bool, Refused> {
        let (unit, moment) = match word {
            b"ex" => (Unit::Seconds, Moment::FromNow),
            b"px" => (Unit::Millis, Moment::FromNow),
            b"exat" => (Unit::Seconds, Moment::At),
            b"pxat" => (Unit::Millis, Moment::At),
            _ => return Ok(false),
        };
        let is_another = self.0.is_some_and(|(before, of, _)| (before, of) != (unit, moment));
        match time {
            Some(time) if !is_another => *self = Self::new(unit, moment, time),
            _ => return Err(SYNTAX),
        }
        Ok(true)
    }

    /// When that is.
    pub(super) fn at(&self, command: &str, now: Millis) -> Result<Option<Millis>, Refused> {
        let Some((unit, moment, time)) = self.0 else { return Ok(None) };
        let time = time.ok_or(NO_NUMBER)?;
        let millis = if unit == Unit::Seconds { time.checked_mul(1000) } else { Some(time) };
        let at = match moment {
            Moment::FromNow => millis.filter(|_| time > 0).and_then(|millis| millis.checked_add(now)),
            Moment::At => millis.filter(|_| time > 0),
        };
        at.map(Some).ok_or_else(|| invalid(command))
    }
}

fn invalid(command: &str) -> Refused {
    Refused::new(format!("ERR invalid expire time in '{command}' command"))
}

/// The conditions of EXPIRE.
#[derive(Default, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is an option of its own")]
struct Conditions {
    if_none: bool,
    if_some: bool,
    if_later: bool,
    if_earlier: bool,
}

impl Conditions {
    fn parse(request: &Request) -> Result<Self, Refused> {
        let mut conditions = Self::default();
        for word in request.from(3) {
            match word.to_ascii_lowercase().as_slice() {
                b"nx" => conditions.if_none = true,
                b"xx" => conditions.if_some = true,
                b"gt" => conditions.if_later = true,
                b"lt" => conditions.if_earlier = true,
                _ => return Err(Refused::quoting("ERR Unsupported option ", word, "").trimmed()),
            }
        }
        let Self { if_none, if_some, if_later, if_earlier } = conditions;
        if if_none && (if_some || if_later || if_earlier) {
            return Err(Refused::new("ERR NX and XX, GT or LT options at the same time are not compatible"));
        }
        if if_later && if_earlier {
            return Err(Refused::new("ERR GT and LT options at the same time are not compatible"));
        }
        Ok(conditions)
    }

    fn allow(&self, before: Option<Millis>, at: Millis) -> bool {
        (!self.if_none || before.is_none())
            && (!self.if_some || before.is_some())
            && (!self.if_later || before.is_some_and(|before| at > before))
            && (!self.if_earlier || before.is_none_or(|before| at < before))
    }
}

/// EXPIRE, PEXPIRE, EXPIREAT, PEXPIREAT. A time that has passed removes the key.
pub(super) async fn expire<S: Store>(
    shard: &Shard<S>,
    request: &Request,
    unit: Unit,
    moment: Moment,
) -> Answer {
    let conditions = Conditions::parse(request)?;
    let time = number::parse(&request[2]).ok_or(NO_NUMBER)?;
    let now = shard.common.pool_ms();
    let millis = if unit == Unit::Seconds { time.checked_mul(1000) } else { Some(time) };
    let base = if moment == Moment::FromNow { now } else { 0 };
    let name = request[0].to_ascii_lowercase();
    let at = millis.and_then(|millis| millis.checked_add(base));
    let at = at.ok_or_else(|| invalid(&String::from_utf8_lossy(&name)))?;
    let decide = |held: Option<&Held>| {
        let change = match held {
            Some(held) if conditions.allow(held.opened.expires_at, at) => {
                if at <= now {
                    Change::Remove
                } else {
                    Change::retime(held, Some(at))
                }
            }
            _ => return Ok((Change::Keep, Reply::Number(0))),
        };
        Ok((change, Reply::Number(1)))
    };
    shard.change(&request[1], decide).await
}

/// TTL, PTTL, EXPIRETIME, PEXPIRETIME: -2 if there is no such key, -1 if it does not expire.
pub(super) async fn left<S: Store>(
    shard: &Shard<S>,
    request: &Request,
    unit: Unit,
    moment: Moment,
) -> Answer {
    let Some(held) = shard.look_up(&request[1]).await? else { return Ok(Reply::Number(-2)) };
    let Some(at) = held.opened.expires_at else { return Ok(Reply::Number(-1)) };
    let millis = if moment == Moment::FromNow { (at - shard.common.pool_ms()).max(0) } else { at };
    let is_rounded = unit == Unit::Seconds;
    Ok(Reply::Number(if is_rounded { millis.saturating_add(500) / 1000 } else { millis }))
}

pub(super) async fn persist<S: Store>(shard: &Shard<S>, request: &Request) -> Answer {
    let decide = |held: Option<&Held>| match held {
        Some(held) if held.opened.expires_at.is_some() => Ok((Change::retime(held, None), Reply::Number(1))),
        _ => Ok((Change::Keep, Reply::Number(0))),
    };
    shard.change(&request[1], decide).await
}
