//! Reading and changing keys: what all commands are made of.
//!
//! A change is a READ, a decision and a compare-and-swap, again until nobody came between, so that every command on one key is one
//! step for all clients of all gateways. A value that has expired counts as absent, and whoever meets one removes it, if it is
//! still the same.
//!
//! A change takes effect after the commands before it on its connection ([`Company::turn`](farwood_fabric::Company::turn)). One that
//! finds nothing to change, or is refused because of what it finds, has looked when it was its turn.

use super::Refused;
use super::limits::is_behind;
use crate::envelope::{self, Millis, Opened};
use crate::shard::Shard;
use crate::shard::turns::LONG_BYTES;
use crate::store::Store;
use farwood_fabric::clock::MICROSECOND;
use farwood_fabric::pipeline::run_all;
use farwood_index::{KeyValue, OrderedIndex};
use std::ops::Bound;

/// How often a change begins anew because others were faster.
const MAX_ATTEMPTS: u32 = 2_000;
/// Attempts before it waits in between, and the longest wait.
const EAGER_ATTEMPTS: u32 = 4;
const LONGEST_WAIT_NS: u64 = 500 * MICROSECOND;
/// Keys of one command that are under way together.
const WIDTH: usize = 16;

/// The value of a key.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) stored: Vec<u8>,
    pub(crate) opened: Opened,
}

impl Held {
    pub(crate) fn value(&self) -> &[u8] {
        &self.stored[..self.opened.bytes]
    }
}

/// What is to become of a key.
#[derive(Debug)]
pub(crate) enum Change {
    /// Nothing.
    Keep,
    /// This is to be stored, sealed; so many bytes of it are the value's.
    Store(Vec<u8>, usize),
    /// The value stays; this is to be stored, since it expires at another time, or never. That works in a full pool.
    Retime(Vec<u8>),
    /// It is to be removed.
    Remove,
}

impl Change {
    /// Lets the same value expire at another time.
    pub(crate) fn retime(held: &Held, expires_at: Option<Millis>) -> Self {
        Self::Retime(envelope::seal(held.value(), expires_at).into_owned())
    }

    /// Stores a value with the time at which it expires.
    pub(crate) fn value(value: &[u8], expires_at: Option<Millis>) -> Self {
        Self::Store(envelope::seal(value, expires_at).into_owned(), value.len())
    }
}

impl<S: Store> Shard<S> {
    /// The value of a key, unless it has expired.
    #[inline]
    pub(crate) async fn read(&self, key: &[u8]) -> Result<Option<Held>, Refused> {
        if self.is_too_long(key) {
            return Ok(None);
        }
        let handle = self.handle()?;
        let Some(stored) = handle.get(key).await? else { return Ok(None) };
        let opened = envelope::open(&stored);
        if opened.expires_at.is_none() || !opened.has_expired(self.common.pool_ms()) {
            return Ok(Some(Held { stored, opened }));
        }
        if opened.has_expired(self.common.surely_ms()) {
            self.bury(&handle, key, &stored).await?;
        }
        Ok(None)
    }

    /// The same, counted as a hit or a miss.
    #[inline]
    pub(crate) async fn look_up(&self, key: &[u8]) -> Result<Option<Held>, Refused> {
        let held = self.read(key).await?;
        let counter = if held.is_some() { &self.stats.hits } else { &self.stats.misses };
        counter.add(1);
        Ok(held)
    }

    /// Removes what has expired, if it is still there.
    pub(crate) async fn bury(&self, handle: &S::Handle, key: &[u8], stored: &[u8]) -> Result<(), Refused> {
        if handle.compare_and_swap(key, Some(stored), None).await? {
            self.stats.expired.add(1);
        }
        Ok(())
    }

    /// Changes a key as one step: `decide` is asked what is to become of the value, again if somebody else changed it meanwhile.
    pub(crate) async fn change<T>(
        &self,
        key: &[u8],
        mut decide: impl FnMut(Option<&Held>) -> Result<(Change, T), Refused>,
    ) -> Result<T, Refused> {
        if self.is_too_long(key) {
            return match decide(None)? {
                (Change::Store(_, bytes), said) => self.check_pair(key, bytes).map(|()| said),
                (Change::Keep | Change::Remove | Change::Retime(_), said) => Ok(said),
            };
        }
        let handle = self.handle()?;
        for attempt in 0..MAX_ATTEMPTS {
            let is_early = !self.company.has_turn();
            let stored = handle.get(key).await?;
            let opened = stored.as_deref().map(envelope::open);
            let has_expired = opened.is_some_and(|opened| {
                opened.expires_at.is_some() && opened.has_expired(self.common.pool_ms())
            });
            let held = stored.zip(opened).map(|(stored, opened)| Held { stored, opened });
            let expected = held.as_ref().map(|held| held.stored.as_slice());
            let decided = decide(held.as_ref().filter(|_| !has_expired)).and_then(|(change, said)| {
                match change {
                    Change::Store(_, bytes) => self.check_pair(key, bytes)?,
                    Change::Retime(_) => {
                        self.check_pair(key, held.as_ref().map_or(0, |held| held.value().len()))?;
                    }
                    Change::Keep | Change::Remove => {}
                }
                Ok((change, said))
            });
            let is_nothing = match &decided {
                Err(_) => true,
                // What has expired goes, as soon as it surely has.
                Ok((Change::Keep, _)) => {
                    !opened.is_some_and(|opened| has_expired && opened.has_expired(self.common.surely_ms()))
                }
                Ok((Change::Remove, _)) => expected.is_none(),
                Ok((Change::Store(..) | Change::Retime(_), _)) => false,
            };
            if is_nothing && is_early {
                self.company.turn().await;
                continue;
            }
            let (change, said) = decided?;
            let is_done = match (&change, expected) {
                _ if is_nothing => return Ok(said),
                (Change::Keep | Change::Remove, _) => handle.compare_and_swap(key, expected, None).await?,
                (Change::Retime(new), Some(expected)) => handle.adjust(key, expected, new).await?,
                (Change::Store(new, _) | Change::Retime(new), _) => {
                    handle.compare_and_swap(key, expected, Some(new)).await?
                }
            };
            if is_done {
                if has_expired {
                    self.stats.expired.add(1);
                }
                if let Change::Store(new, _) | Change::Retime(new) = &change {
                    if let Some(at) = envelope::open(new).expires_at {
                        self.deadlines.note(key, at);
                    }
                }
                return Ok(said);
            }
            self.wait_for_others(attempt).await;
        }
        Err(Refused::new(format!(
            "ERR others changed the key in each of {MAX_ATTEMPTS} attempts; try again later"
        )))
    }

    async fn wait_for_others(&self, attempt: u32) {
        if attempt < EAGER_ATTEMPTS {
            self.executor.yield_now().await;
        } else {
            let most = LONGEST_WAIT_NS.min(MICROSECOND << attempt.min(20));
            self.sleep(self.executor.random() % most.max(1)).await;
        }
    }

    /// Does something with each key, several at a time; the outputs come in the order of the keys.
    pub(crate) async fn each_key<'a, T>(
        &self,
        keys: impl Iterator<Item = &'a [u8]>,
        work: impl AsyncFn(&'a [u8]) -> Result<T, Refused>,
        mut took: impl FnMut(T) -> Result<(), Refused>,
    ) -> Result<(), Refused> {
        let mut keys = keys.peekable();
        let mut width = if self.turns.are_wanted() { 1 } else { WIDTH };
        while keys.peek().is_some() {
            let before = self.far_bytes();
            let group = keys.by_ref().take(width).map(|key| work(key));
            run_all(&self.company, group, width, |output| took(output?)).await?;
            if self.far_bytes() - before < PAGE_BYTES as u64 {
                width = (2 * width).min(WIDTH);
                // Many keys of which none is there move nothing, but take time.
                self.executor.yield_to_ready().await;
            } else if keys.peek().is_some() {
                // Their values are long: one by one.
                width = 1;
                self.turns.pass(usize::MAX).await;
            }
        }
        Ok(())
    }

    /// The number of keys for which something is so.
    pub(crate) async fn count_keys<'a>(
        &self,
        keys: impl Iterator<Item = &'a [u8]>,
        work: impl AsyncFn(&'a [u8]) -> Result<bool, Refused>,
    ) -> Result<usize, Refused> {
        let mut count = 0;
        let took = |is_so| {
            count += usize::from(is_so);
            Ok(())
        };
        self.each_key(keys, work, took).await.map(|()| count)
    }

    /// Goes through a range, from one end.
    pub(crate) fn walk(&self, start: Bound<Vec<u8>>, end: Bound<Vec<u8>>, reverse: bool) -> Walk<'_, S> {
        let (start, end) = (self.lower_end(start), self.upper_end(end));
        let is_through = is_behind(&start, &end);
        Walk { shard: self, start, end, reverse, page_bytes: 0, has_begun: false, is_through }
    }
}

/// A page has at most so many pairs, and ends with the one that makes it so long.
const PAGE_PAIRS: usize = 1024;
const PAGE_BYTES: usize = 256 << 10;

/// A walk through a range, a page at a time, so that nobody else waits long.
pub(crate) struct Walk<'a, S: Store> {
    shard: &'a Shard<S>,
    start: Bound<Vec<u8>>,
    end: Bound<Vec<u8>>,
    reverse: bool,
    /// How long the last page was.
    page_bytes: usize,
    has_begun: bool,
    is_through: bool,
}

impl<S: Store> Walk<'_, S> {
    /// The next page, of at most so many pairs, expired ones included; `None` at the end.
    pub(crate) async fn next(&mut self, most: usize) -> Result<Option<Vec<KeyValue>>, Refused> {
        let mut pairs = Vec::new();
        let took = |key: &[u8], stored: &[u8]| pairs.push((key.to_vec(), stored.to_vec()));
        Ok(self.each(most, took).await?.then_some(pairs))
    }

    /// The same, one by one, without a copy of the page. Whether there were any.
    pub(crate) async fn each(
        &mut self,
        most: usize,
        mut took: impl FnMut(&[u8], &[u8]),
    ) -> Result<bool, Refused> {
        self.page(most, None, &mut took).await
    }

    /// The same with the last bytes of each value, enough to tell when it expires. They may be torn.
    pub(crate) async fn ends(
        &mut self,
        most: usize,
        mut took: impl FnMut(&[u8], &[u8]),
    ) -> Result<bool, Refused> {
        self.page(most, Some(envelope::MOST_BYTES), &mut took).await
    }

    async fn page(
        &mut self,
        most: usize,
        end_bytes: Option<usize>,
        took: &mut dyn FnMut(&[u8], &[u8]),
    ) -> Result<bool, Refused> {
        if self.is_through {
            return Ok(false);
        }
        if self.page_bytes >= LONG_BYTES {
            self.shard.turns.pass(self.page_bytes).await;
        } else if self.has_begun {
            self.shard.executor.yield_now().await;
        }
        self.has_begun = true;
        let limit = most.clamp(1, PAGE_PAIRS);
        let (mut last, mut bytes, mut pairs) = (Vec::new(), 0, 0);
        let mut each = |key: &[u8], stored: &[u8]| {
            took(key, stored);
            bytes += key.len() + stored.len();
            pairs += 1;
            let is_page_full = pairs == limit || bytes >= PAGE_BYTES;
            if is_page_full {
                last.extend_from_slice(key);
            }
            !is_page_full
        };
        {
            let (start, end) = (self.start.as_ref().map(Vec::as_slice), self.end.as_ref().map(Vec::as_slice));
            let handle = self.shard.handle()?;
            match end_bytes {
                None => handle.scan_with(start, end, limit, self.reverse, &mut each).await?,
                Some(bytes) => handle.scan_ends((start, end), limit, self.reverse, bytes, &mut each).await?,
            }
        };
        self.page_bytes = bytes;
        if pairs < limit && bytes < PAGE_BYTES {
            // There is nothing behind.
            self.is_through = true;
            return Ok(pairs > 0);
        }
        let behind = Bound::Excluded(last);
        if self.reverse {
            self.end = behind;
        } else {
            self.start = behind;
        }
        Ok(true)
    }
}
