//! The shape of a scan's answer, and which keys it owes.

use super::history::History;
use super::violation::Violation;
use std::collections::BTreeMap;
use std::ops::{Bound, RangeBounds};
use std::sync::Arc;

type Range<'a> = (Bound<&'a [u8]>, Bound<&'a [u8]>);

/// What was asked of a scan.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Scan<'a> {
    /// The lower end.
    pub(crate) start: Bound<&'a [u8]>,
    /// The upper end.
    pub(crate) end: Bound<&'a [u8]>,
    /// At most so many pairs.
    pub(crate) limit: usize,
    /// From the upper end on.
    pub(crate) reverse: bool,
}

impl<'a> Scan<'a> {
    /// Judges the pairs by themselves.
    pub(super) fn check_shape<K: AsRef<[u8]>, V>(self, pairs: &[(K, V)]) -> Result<(), Violation> {
        if pairs.len() > self.limit {
            return Err(Violation::TooMany { pairs: pairs.len(), limit: self.limit });
        }
        let keys = || pairs.iter().map(|(key, _)| key.as_ref());
        if let Some(key) = keys().find(|key| !RangeBounds::<[u8]>::contains(&(self.start, self.end), *key)) {
            return Err(Violation::OutOfBounds { key: key.to_vec() });
        }
        for (after, key) in keys().zip(keys().skip(1)) {
            if after == key {
                return Err(Violation::Repeated { key: key.to_vec() });
            }
            if (after > key) != self.reverse {
                return Err(Violation::OutOfOrder { key: key.to_vec(), after: after.to_vec() });
            }
        }
        Ok(())
    }

    /// Keys with an entry that are not among the pairs, though the scan passed them. The pairs are in order.
    pub(super) fn missing<K: AsRef<[u8]>, V>(
        self,
        entries: &BTreeMap<Arc<[u8]>, History>,
        pairs: &[(K, V)],
    ) -> Vec<Arc<[u8]>> {
        let is_returned = |key: &[u8]| {
            let order = |(pair, _): &(K, V)| {
                let order = pair.as_ref().cmp(key);
                if self.reverse { order.reverse() } else { order }
            };
            pairs.binary_search_by(order).is_ok()
        };
        let Some((start, end)) = self.passed(pairs) else { return Vec::new() };
        let entries = entries.range::<[u8], _>((start, end));
        entries.map(|(key, _)| key).filter(|key| !is_returned(key)).cloned().collect()
    }

    /// The part of the range that the pairs answer for: up to the last one if there could have been more. `None` if empty
    /// (which a map would not take for a range).
    fn passed<'b, K: AsRef<[u8]>, V>(self, pairs: &'b [(K, V)]) -> Option<Range<'b>>
    where
        'a: 'b,
    {
        let (mut start, mut end) = (self.start, self.end);
        if pairs.len() == self.limit {
            let last = Bound::Included(pairs.last()?.0.as_ref());
            *(if self.reverse { &mut start } else { &mut end }) = last;
        }
        let is_empty = match (start, end) {
            (Bound::Unbounded, _) | (_, Bound::Unbounded) => false,
            (Bound::Included(start), Bound::Included(end)) => start > end,
            (
                Bound::Included(start) | Bound::Excluded(start),
                Bound::Included(end) | Bound::Excluded(end),
            ) => start >= end,
        };
        (!is_empty).then_some((start, end))
    }
}
