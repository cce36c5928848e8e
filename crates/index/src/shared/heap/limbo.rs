//! What has been retired and is not yet safe, in the order in which it came.
//!
//! A stamp counts for what was retired *before it was asked for*. Several may ask at a time, and their answers come in any order; so who asks
//! notes first how much there is ([`Limbo::mark`]), and the answer stamps no more than that.
//!
//! Invariant: what has a stamp stands before what has none. So looking at the front is enough.

use std::collections::VecDeque;

/// Things of type `T` that wait until stamps of type `S` are safe.
#[derive(Debug)]
pub(super) struct Limbo<T, S> {
    waiting: VecDeque<Waiting<T, S>>,
    ever: u64,
}

#[derive(Debug)]
struct Waiting<T, S> {
    what: T,
    number: u64,
    stamp: Option<S>,
}

/// How much had been retired at some time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mark(u64);

impl<T, S> Default for Limbo<T, S> {
    fn default() -> Self {
        Self { waiting: VecDeque::new(), ever: 0 }
    }
}

impl<T, S: Copy> Limbo<T, S> {
    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Something has been retired.
    pub(super) fn push(&mut self, what: T) {
        self.waiting.push_back(Waiting { what, number: self.ever, stamp: None });
        self.ever += 1;
    }

    /// To be asked before a stamp is asked for.
    pub(super) fn mark(&self) -> Mark {
        Mark(self.ever)
    }

    /// Whether all that was there at the mark is out.
    pub(super) fn is_past(&self, mark: Mark) -> bool {
        self.waiting.front().is_none_or(|one| one.number >= mark.0)
    }

    /// Stamps what was there at the mark and has no stamp.
    pub(super) fn stamp(&mut self, mark: Mark, stamp: S) {
        let later = |one: &&mut Waiting<T, S>| one.number >= mark.0;
        let unstamped = |one: &&mut Waiting<T, S>| one.stamp.is_none();
        for one in self.waiting.iter_mut().rev().skip_while(later).take_while(unstamped) {
            one.stamp = Some(stamp);
        }
    }

    /// Takes out what is safe, the oldest first and at most so many, but for what is to stay.
    pub(super) fn take_safe(
        &mut self,
        most: usize,
        is_safe: impl Fn(S) -> bool,
        stays: impl Fn(&T) -> bool,
    ) -> Vec<(T, S)> {
        let (mut safe, mut staying) = (Vec::new(), Vec::new());
        while safe.len() < most {
            let stamp = self.waiting.front().and_then(|one| one.stamp).filter(|stamp| is_safe(*stamp));
            let Some((stamp, one)) = stamp.and_then(|stamp| Some((stamp, self.waiting.pop_front()?))) else {
                break;
            };
            if stays(&one.what) {
                staying.push(one);
            } else {
                safe.push((one.what, stamp));
            }
        }
        for one in staying.into_iter().rev() {
            self.waiting.push_front(one);
        }
        safe
    }

    /// Puts back, in its order, what was taken out.
    pub(super) fn put_back(&mut self, taken: impl DoubleEndedIterator<Item = (T, S)>) {
        for (what, stamp) in taken.rev() {
            self.waiting.push_front(Waiting { what, number: 0, stamp: Some(stamp) });
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &T> {
        self.waiting.iter().map(|one| &one.what)
    }

    /// Takes out what is so, safe or not.
    pub(super) fn take_where(&mut self, is_so: impl Fn(&T) -> bool) -> Vec<T> {
        let (gone, kept) = std::mem::take(&mut self.waiting).into_iter().partition(|one| is_so(&one.what));
        self.waiting = kept;
        VecDeque::into_iter(gone).map(|one| one.what).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn safe_below(limbo: &mut Limbo<char, u64>, limit: u64) -> String {
        limbo
            .take_safe(usize::MAX, |stamp| stamp < limit, |_| false)
            .into_iter()
            .map(|(what, _)| what)
            .collect()
    }

    #[test]
    fn what_is_safe_comes_out_in_order_and_may_go_back() {
        let mut limbo = Limbo::default();
        limbo.push('a');
        limbo.push('b');
        assert_eq!(safe_below(&mut limbo, 100), "", "nothing has a stamp");
        limbo.stamp(limbo.mark(), 5);
        limbo.push('c');
        limbo.stamp(limbo.mark(), 7);
        assert_eq!(safe_below(&mut limbo, 5), "");
        let taken = limbo.take_safe(usize::MAX, |stamp| stamp < 7, |_| false);
        assert_eq!(taken, [('a', 5), ('b', 5)]);
        limbo.put_back(taken.into_iter());
        assert_eq!((limbo.len(), safe_below(&mut limbo, 8).as_str()), (3, "abc"));
        assert!(limbo.is_empty());
    }

    #[test]
    fn some_come_out_at_a_time_and_some_stay() {
        let mut limbo = Limbo::default();
        "abcde".chars().for_each(|what| limbo.push(what));
        limbo.stamp(limbo.mark(), 1);
        limbo.push('f');
        let some = |limbo: &mut Limbo<char, u64>| -> String {
            limbo.take_safe(2, |_| true, |what| *what == 'b').into_iter().map(|(what, _)| what).collect()
        };
        let mark = limbo.mark();
        assert_eq!(some(&mut limbo), "ac");
        assert_eq!(some(&mut limbo), "de");
        assert_eq!(some(&mut limbo), "", "f has no stamp, and b stays");
        limbo.stamp(limbo.mark(), 2);
        limbo.push('g');
        assert!(!limbo.is_past(mark));
        assert_eq!(safe_below(&mut limbo, 3), "bf", "in their order");
        assert!(limbo.is_past(mark), "g came later");
    }

    #[test]
    fn a_late_stamp_is_not_for_what_was_retired_since_it_was_asked_for() {
        let mut limbo = Limbo::default();
        limbo.push('a');
        let slow = limbo.mark();
        // Another one asks, and has its answer first.
        limbo.stamp(limbo.mark(), 6);
        limbo.push('b');
        limbo.stamp(slow, 5);
        assert_eq!(safe_below(&mut limbo, 100), "a", "readers of b may have begun after stamp 5");
        limbo.stamp(limbo.mark(), 8);
        assert_eq!(safe_below(&mut limbo, 100), "b");
    }

    #[test]
    fn what_belongs_to_a_dropped_index_is_forgotten() {
        let mut limbo = Limbo::default();
        "abc".chars().for_each(|what| limbo.push(what));
        assert_eq!(limbo.take_where(|what| *what == 'b'), ['b']);
        limbo.stamp(limbo.mark(), 1);
        assert_eq!(safe_below(&mut limbo, 2), "ac");
    }
}
