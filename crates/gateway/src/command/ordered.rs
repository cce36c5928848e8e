//! Commands about ranges of keys, which Redis lacks.
//!
//! ```text
//! RANGE start end [REV] [LIMIT n]        keys and values: key, value, key, value, ...
//! RANGEKEYS start end [REV] [LIMIT n]    keys
//! COUNTRANGE start end                   how many
//! DELRANGE start end [LIMIT n]           removes them, each by itself; how many
//! ```
//!
//! Ends are written as for ZRANGEBYLEX: `[key` with the key, `(key` without it, `-` before all keys, `+` behind all. With REV the upper
//! end comes first, as in ZRANGE. They may be longer than any key.

use super::keyspace::is_live;
use super::{Answer, NO_NUMBER, Refused, SYNTAX};
use crate::number;
use crate::resp::reply::Items;
use crate::resp::{Reply, Request};
use crate::shard::Shard;
use crate::store::Store;
use farwood_index::OrderedIndex;
use std::ops::Bound;

/// Room for so much is made beforehand; more is made as it is needed.
const USUAL_ITEMS: usize = 128;
const USUAL_ITEM_BYTES: usize = 32;

/// One end of a range.
#[derive(Clone, PartialEq, Eq, Debug)]
enum End {
    BeforeAll,
    BehindAll,
    With(Vec<u8>),
    Without(Vec<u8>),
}

impl End {
    fn parse(text: &[u8]) -> Result<Self, Refused> {
        match text {
            b"-" => Ok(Self::BeforeAll),
            b"+" => Ok(Self::BehindAll),
            [b'[', key @ ..] => Ok(Self::With(key.to_vec())),
            [b'(', key @ ..] => Ok(Self::Without(key.to_vec())),
            _ => Err(Refused::new("ERR min or max not valid string range item")),
        }
    }

    fn bound(self) -> Bound<Vec<u8>> {
        match self {
            Self::BeforeAll | Self::BehindAll => Bound::Unbounded,
            Self::With(key) => Bound::Included(key),
            Self::Without(key) => Bound::Excluded(key),
        }
    }
}

/// A range and how much of it.
struct Wanted {
    start: Bound<Vec<u8>>,
    end: Bound<Vec<u8>>,
    is_empty: bool,
    reverse: bool,
    limit: usize,
}

impl Wanted {
    fn parse(request: &Request, may_reverse: bool) -> Result<Self, Refused> {
        let (mut low, mut high) = (End::parse(&request[1])?, End::parse(&request[2])?);
        let (mut reverse, mut limit) = (false, usize::MAX);
        let mut at = 3;
        while let Some(word) = request.get(at) {
            match (word.to_ascii_lowercase().as_slice(), request.get(at + 1)) {
                (b"rev", _) if may_reverse => reverse = true,
                (b"limit", Some(value)) => {
                    let value = number::parse(value).ok_or(NO_NUMBER)?;
                    // As in Redis, a negative one means all.
                    limit = usize::try_from(value).unwrap_or(usize::MAX);
                    at += 1;
                }
                _ => return Err(SYNTAX),
            }
            at += 1;
        }
        if reverse {
            std::mem::swap(&mut low, &mut high);
        }
        let is_empty = low == End::BehindAll || high == End::BeforeAll;
        Ok(Self { start: low.bound(), end: high.bound(), is_empty, reverse, limit })
    }

    fn walk<S: Store>(self, shard: &Shard<S>) -> Option<(super::access::Walk<'_, S>, usize)> {
        let is_nothing = self.is_empty || self.limit == 0;
        (!is_nothing).then(|| (shard.walk(self.start, self.end, self.reverse), self.limit))
    }
}

/// RANGE, and RANGEKEYS without values.
pub(super) async fn range<S: Store>(shard: &Shard<S>, request: &Request, with_values: bool) -> Answer {
    let wanted = Wanted::parse(request, true)?;
    let mut found = Items::with_room(wanted.limit.min(USUAL_ITEMS) * USUAL_ITEM_BYTES);
    let mut charge = shard.charge();
    if let Some((mut walk, mut left)) = wanted.walk(shard) {
        while left > 0 {
            let most = left;
            let now = shard.common.pool_ms();
            let took = |key: &[u8], stored: &[u8]| {
                let opened = crate::envelope::open(stored);
                if opened.has_expired(now) {
                    return;
                }
                found.push(key);
                if with_values {
                    found.push(&stored[..opened.bytes]);
                }
                left -= 1;
            };
            if !walk.each(most, took).await? {
                break;
            }
            shard.check_reply(&mut charge, found.bytes())?;
        }
    }
    Ok(found.finish(Vec::new()))
}

pub(super) async fn count<S: Store>(shard: &Shard<S>, request: &Request) -> Answer {
    let mut count = 0;
    if let Some((mut walk, _)) = Wanted::parse(request, false)?.walk(shard) {
        while let Some(page) = walk.next(usize::MAX).await? {
            let now = shard.common.pool_ms();
            count += page.iter().filter(|(_, stored)| is_live(stored, now)).count();
        }
    }
    Ok(Reply::count(count))
}

pub(super) async fn delete<S: Store>(shard: &Shard<S>, request: &Request) -> Answer {
    let mut count = 0;
    if let Some((mut walk, limit)) = Wanted::parse(request, false)?.walk(shard) {
        while count < limit {
            let Some(page) = walk.next(limit - count).await? else { break };
            let now = shard.common.pool_ms();
            let live = page.iter().filter(|(_, stored)| is_live(stored, now)).map(|(key, _)| key.as_slice());
            let work = async |key: &[u8]| {
                let handle = shard.handle()?;
                Ok(handle.delete(key).await?)
            };
            count += shard.count_keys(live, work).await?;
        }
    }
    Ok(Reply::count(count))
}
