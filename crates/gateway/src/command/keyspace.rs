//! Commands about the keys as a whole.

use super::{Answer, NO_NUMBER, Refused, SYNTAX};
use crate::envelope::{self, Millis};
use crate::glob;
use crate::number;
use crate::resp::reply::{Items, write_bytes};
use crate::resp::{Reply, Request};
use crate::shard::Shard;
use crate::store::Store;
use farwood_index::{KeyValue, OrderedIndex};
use std::ops::Bound;

/// Up to so many keys DBSIZE counts; what it says of more is what the last sweep found.
pub(crate) const COUNTED_KEYS: usize = 10_000;
/// How many keys SCAN looks at, if it is not told.
const SCAN_COUNT: usize = 10;
/// From so many keys in a row RANDOMKEY takes one, and with fewer keys than that from all.
const RANDOM_KEYS: usize = 128;

/// The range of the keys that have a prefix.
fn prefixed(prefix: &[u8]) -> (Bound<Vec<u8>>, Bound<Vec<u8>>) {
    let mut end = prefix.to_vec();
    // The smallest that is greater than all of them: the last byte that can grow does, what is behind it goes.
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            return (Bound::Included(prefix.to_vec()), Bound::Excluded(end));
        }
    }
    let start = if prefix.is_empty() { Bound::Unbounded } else { Bound::Included(prefix.to_vec()) };
    (start, Bound::Unbounded)
}

/// Whether what is stored has not expired.
pub(super) fn is_live(stored: &[u8], now: Millis) -> bool {
    !envelope::open(stored).has_expired(now)
}

pub(super) async fn type_of<S: Store>(shard: &Shard<S>, request: &Request) -> Answer {
    let is_there = shard.look_up(&request[1]).await?.is_some();
    Ok(Reply::Word(if is_there { "string" } else { "none" }))
}

pub(super) async fn keys<S: Store>(shard: &Shard<S>, request: &Request) -> Answer {
    let pattern = &request[1];
    let (start, end) = prefixed(&glob::literal_prefix(pattern));
    let mut walk = shard.walk(start, end, false);
    let (mut found, mut charge) = (Items::with_room(0), shard.charge());
    while let Some(page) = walk.next(usize::MAX).await? {
        let now = shard.common.pool_ms();
        for (key, value) in &page {
            if glob::matches(pattern, key) && is_live(value, now) {
                found.push(key);
            }
        }
        shard.check_reply(&mut charge, found.bytes())?;
    }
    Ok(found.finish(Vec::new()))
}

/// The options of SCAN.
struct ScanOptions<'a> {
    count: usize,
    pattern: Option<&'a [u8]>,
    is_of_strings: bool,
}

impl<'a> ScanOptions<'a> {
    fn parse(request: &'a Request) -> Result<Self, Refused> {
        let mut options = Self { count: SCAN_COUNT, pattern: None, is_of_strings: true };
        let mut at = 2;
        while let Some(word) = request.get(at) {
            let value = request.get(at + 1).ok_or(SYNTAX)?;
            match word.to_ascii_lowercase().as_slice() {
                b"count" => {
                    let count = number::parse(value).ok_or(NO_NUMBER)?;
                    options.count = usize::try_from(count).ok().filter(|count| *count > 0).ok_or(SYNTAX)?;
                }
                b"match" => options.pattern = Some(value),
                b"type" => options.is_of_strings = value.eq_ignore_ascii_case(b"string"),
                _ => return Err(SYNTAX),
            }
            at += 2;
        }
        Ok(options)
    }
}

pub(super) async fn scan<S: Store>(shard: &Shard<S>, request: &Request) -> Answer {
    let wrong = || Refused::new("ERR invalid cursor");
    let cursor: u64 =
        std::str::from_utf8(&request[1]).ok().and_then(|text| text.parse().ok()).ok_or_else(wrong)?;
    let options = ScanOptions::parse(request)?;
    let (mut start, end) = prefixed(&options.pattern.map_or_else(Vec::new, glob::literal_prefix));
    if cursor != 0 {
        let behind = shard.common.cursors.redeem(cursor).ok_or_else(|| {
            Refused::new(
                "ERR invalid cursor: this gateway does not know it, or not any more; begin again with 0",
            )
        })?;
        start = Bound::Excluded(behind.into());
    }
    let mut walk = shard.walk(start, end, false);
    let (mut found, mut charge) = (Items::with_room(0), shard.charge());
    let mut left = options.count;
    let mut next = 0;
    while left > 0 {
        let Some(page) = walk.next(left).await? else {
            next = 0;
            break;
        };
        left -= page.len();
        let now = shard.common.pool_ms();
        for (key, value) in &page {
            let matches = options.pattern.is_none_or(|pattern| glob::matches(pattern, key));
            if matches && options.is_of_strings && is_live(value, now) {
                found.push(key);
            }
        }
        shard.check_reply(&mut charge, found.bytes())?;
        if left == 0 {
            next = page.last().map_or(0, |(last, _)| shard.common.cursors.issue(last));
        }
    }
    let mut front = b"*2\r\n".to_vec();
    write_bytes(&mut front, next.to_string().as_bytes());
    Ok(found.finish(front))
}

/// Takes one of the keys that follow a place between the smallest and the greatest key. Where keys are dense, each is taken less
/// often.
pub(super) async fn random_key<S: Store>(shard: &Shard<S>) -> Answer {
    let mut walk = shard.walk(Bound::Unbounded, Bound::Unbounded, false);
    let first = walk.next(RANDOM_KEYS).await?.unwrap_or_default();
    let is_all = first.len() < RANDOM_KEYS;
    if let Some(key) = pick(shard, &first).filter(|_| is_all) {
        return Ok(Reply::bytes(key));
    }
    let mut back = shard.walk(Bound::Unbounded, Bound::Unbounded, true);
    let last = back.next(1).await?.unwrap_or_default();
    if let (Some((low, _)), Some((high, _))) = (first.first(), last.first()) {
        let from = between(low, high, shard.executor.random());
        let mut walk = shard.walk(Bound::Included(from), Bound::Unbounded, false);
        let page = walk.next(RANDOM_KEYS).await?.unwrap_or_default();
        if let Some(key) = pick(shard, &page) {
            return Ok(Reply::bytes(key));
        }
    }
    // There were none, or all have expired.
    Ok(pick(shard, &first).map_or(Reply::Nil, Reply::bytes))
}

fn pick<'a, S: Store>(shard: &Shard<S>, page: &'a [KeyValue]) -> Option<&'a [u8]> {
    let now = shard.common.pool_ms();
    let live: Vec<&KeyValue> = page.iter().filter(|(_, value)| is_live(value, now)).collect();
    let at = usize::try_from(shard.executor.random() % (live.len() as u64).max(1)).unwrap_or(0);
    live.get(at).map(|(key, _)| key.as_slice())
}

/// A place between two keys, by what follows their common prefix, as a number.
fn between(low: &[u8], high: &[u8], random: u64) -> Vec<u8> {
    let common = low.iter().zip(high).take_while(|(a, b)| a == b).count();
    let number = |key: &[u8]| {
        let mut bytes = [0u8; 8];
        for (byte, of) in bytes.iter_mut().zip(&key[common..]) {
            *byte = *of;
        }
        u64::from_be_bytes(bytes)
    };
    let (low_number, high_number) = (number(low), number(high));
    let span = u128::from(high_number.saturating_sub(low_number)) + 1;
    let offset = u64::try_from((u128::from(random) * span) >> 64).unwrap_or(0);
    [&low[..common], &low_number.saturating_add(offset).to_be_bytes()].concat()
}

/// Removes all keys, a page at a time: those that others set meanwhile may stay.
pub(super) async fn flush<S: Store>(shard: &Shard<S>, request: &Request) -> Answer {
    match request.get(1).map(<[u8]>::to_ascii_lowercase).as_deref() {
        None | Some(b"async" | b"sync") if request.len() <= 2 => {}
        _ => return Err(SYNTAX),
    }
    let mut walk = shard.walk(Bound::Unbounded, Bound::Unbounded, false);
    while let Some(page) = walk.next(usize::MAX).await? {
        let work = async |key: &[u8]| {
            let handle = shard.handle()?;
            Ok(handle.delete(key).await?)
        };
        shard.count_keys(page.iter().map(|(key, _)| key.as_slice()), work).await?;
    }
    shard.common.census.forget();
    Ok(Reply::Ok)
}

/// How many keys there are: counted, if they are few, else as many as the last sweep met.
pub(super) async fn size<S: Store>(shard: &Shard<S>) -> Answer {
    Ok(Reply::count(count(shard).await?))
}

pub(crate) async fn count<S: Store>(shard: &Shard<S>) -> Result<usize, Refused> {
    let known = shard.common.census.keys();
    if let Some(known) = known.filter(|known| *known > COUNTED_KEYS) {
        return Ok(known);
    }
    let mut walk = shard.walk(Bound::Unbounded, Bound::Unbounded, false);
    let (mut count, mut expired) = (0, Vec::new());
    let now = shard.common.pool_ms();
    let mut took = |key: &[u8], end: &[u8]| {
        if is_live(end, now) { count += 1 } else { expired.push(key.to_vec()) }
    };
    while walk.ends(usize::MAX, &mut took).await? {}
    // What was read may be torn: whether a key has expired is for the whole value to say.
    let work = async |key: &[u8]| Ok(shard.read(key).await?.is_some());
    count += shard.count_keys(expired.iter().map(Vec::as_slice), work).await?;
    // So that the next one need not count them all.
    if count > COUNTED_KEYS {
        shard.common.census.found(count);
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn is_in(key: &[u8], (start, end): &(Bound<Vec<u8>>, Bound<Vec<u8>>)) -> bool {
        use std::ops::RangeBounds;
        (start.as_ref(), end.as_ref()).contains(&key.to_vec())
    }

    proptest! {
        #[test]
        fn a_prefix_is_a_range(
            prefix in prop::collection::vec(prop_oneof![Just(0xffu8), Just(0), Just(1)], 0..4),
            key in prop::collection::vec(prop_oneof![Just(0xffu8), Just(0), Just(1)], 0..5),
        ) {
            prop_assert_eq!(is_in(&key, &prefixed(&prefix)), key.starts_with(&prefix));
        }

        #[test]
        fn a_place_between_keys_is_not_above_the_greatest(
            a in prop::collection::vec(any::<u8>(), 0..12),
            b in prop::collection::vec(any::<u8>(), 0..12),
            random in any::<u64>(),
        ) {
            let (low, high) = if a <= b { (a, b) } else { (b, a) };
            let place = between(&low, &high, random);
            let cut = |key: &[u8]| key[..key.len().min(8)].to_vec();
            prop_assert!(cut(&place) <= [cut(&high), vec![0; 8]].concat());
        }
    }
}
