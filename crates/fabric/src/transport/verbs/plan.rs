//! Verbs as requests to a device: pure, so that it is tested without one.
//!
//! A verb is one request, or several. Words have to stay whole (rule 2), but a device moves packets, and whoever copies for it may
//! move words of its own: an unaligned transfer is cut so that each piece begins and ends between words or lies in one. What is
//! longer than a message is cut too. Pieces of one batch take effect in order, and the fence stands before the first piece of
//! its verb.

use crate::addr::GlobalAddr;
use crate::buf::{Buf, BufPool, SharedBuf};
use crate::error::FabricError;
use crate::verb::{Fences, INLINE_BYTES, Landing, Output, Source, Verb};
use std::collections::VecDeque;

/// What a device takes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Bytes of a message.
    pub(super) message_bytes: usize,
    /// Bytes of a WRITE that travel with the request, so that the device need not know where they are.
    pub(super) inline_bytes: usize,
}

/// What a request does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Read,
    Write,
    Cas { expected: u64, desired: u64 },
    Faa { add: u64 },
}

/// One request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Request {
    pub(super) kind: Kind,
    pub(super) addr: GlobalAddr,
    /// Its bytes on our side: `len` of them, from `at`, in the memory of verb `verb`.
    pub(super) verb: u64,
    pub(super) at: usize,
    pub(super) len: usize,
    pub(super) is_fenced: bool,
    /// The last of its batch.
    pub(super) is_last: bool,
}

/// The memory on our side that a verb reads or fills.
#[derive(Debug)]
pub(super) enum Memory {
    /// A WRITE's few bytes.
    Inline([u8; INLINE_BYTES]),
    /// A WRITE's bytes.
    Source(Buf),
    /// Where a READ's bytes go.
    Landing(Buf),
    /// Where an atomic's word goes.
    Word(Buf),
    /// Somebody's, for either.
    Shared(SharedBuf),
}

impl Memory {
    /// What the verb has brought, when it is done.
    pub(super) fn output(self) -> Output {
        match self {
            Self::Landing(buf) => Output::Bytes(buf),
            Self::Word(buf) => Output::Previous(buf.word(0)),
            Self::Inline(_) | Self::Source(_) | Self::Shared(_) => Output::Done,
        }
    }
}

/// Adds the requests of a checked verb to those that wait to be posted; brings its memory, which the verb has no more. The verb is
/// number `n` of its queue.
#[inline]
pub(super) fn plan(
    verb: &mut Verb,
    n: u64,
    fences: &mut Fences,
    pool: &BufPool,
    limits: Limits,
    requests: &mut VecDeque<Request>,
) -> Result<Memory, FabricError> {
    let (addr, len, is_fenced) = (verb.addr(), verb.len(), fences.before(verb));
    let (kind, memory, first) = match verb {
        Verb::Read { into: Landing::Pooled, .. } => (Kind::Read, Memory::Landing(pool.take(len)), 0),
        Verb::Read { into: Landing::Shared { buf, at }, .. } => {
            (Kind::Read, Memory::Shared(buf.clone()), *at)
        }
        Verb::Write { from, .. } => match std::mem::replace(from, Source::NOTHING) {
            Source::Inline { bytes, .. } if len <= limits.inline_bytes => {
                (Kind::Write, Memory::Inline(bytes), 0)
            }
            Source::Inline { bytes, .. } => (Kind::Write, Memory::Source(pool.copy_of(&bytes[..len])), 0),
            Source::Owned(buf) => (Kind::Write, Memory::Source(buf), 0),
            Source::Shared { buf, at, .. } => (Kind::Write, Memory::Shared(buf), at),
        },
        Verb::Cas { expected, desired, .. } => {
            (Kind::Cas { expected: *expected, desired: *desired }, Memory::Word(pool.take(8)), 0)
        }
        Verb::Faa { add, .. } => (Kind::Faa { add: *add }, Memory::Word(pool.take(8)), 0),
        // Refused before it comes here: no device of ours has it.
        Verb::MaskedCas { .. } => return Err(FabricError::Unsupported { what: "masked CAS" }),
    };
    let request = |at, len, is_fenced| {
        let addr = if at == 0 { addr } else { addr.add(at as u64) };
        Request { kind, addr, verb: n, at: first + at, len, is_fenced, is_last: false }
    };
    // Most verbs are whole words, and few of them.
    if (addr.offset() | len as u64) % 8 == 0 && len <= limits.message_bytes {
        requests.push_back(request(0, len, is_fenced));
    } else {
        let pieces = pieces(addr.offset(), len, limits.message_bytes);
        requests.extend(pieces.map(|(at, len)| request(at, len, is_fenced && at == 0)));
    }
    Ok(memory)
}

/// Cuts `len` bytes at `offset` so that no piece ends inside a word that it does not begin in, nor is longer than `max`.
fn pieces(offset: u64, len: usize, max: usize) -> impl Iterator<Item = (usize, usize)> {
    let max = (max & !7).max(8);
    let mut done = 0;
    std::iter::from_fn(move || {
        let left = len - done;
        if left == 0 {
            return None;
        }
        let into_word = usize::try_from((offset + done as u64) % 8).unwrap_or(0);
        let part = match (into_word, left) {
            (0, 0..8) => left,
            (0, _) => (left & !7).min(max),
            (into, _) => left.min(8 - into),
        };
        let piece = (done, part);
        done += part;
        Some(piece)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::addr::{RegionId, ServerId};
    use crate::verb::Batch;
    use proptest::prelude::*;

    const AT: GlobalAddr = GlobalAddr::new(ServerId::new(0), RegionId::MAIN, 64);
    const LIMITS: Limits = Limits { message_bytes: 1 << 20, inline_bytes: 32 };

    proptest! {
        #[test]
        fn pieces_are_all_the_bytes_and_keep_words_whole(offset in 0u64..100, len in 1usize..5000, max in 8usize..600) {
            let mut done = 0;
            for (at, part) in pieces(offset, len, max) {
                prop_assert_eq!(at, done);
                prop_assert!(part > 0 && part <= max);
                let (begin, end) = (offset + at as u64, offset + (at + part) as u64);
                let in_one_word = begin / 8 == (end - 1) / 8;
                prop_assert!(in_one_word || (begin % 8 == 0 && end % 8 == 0));
                done += part;
            }
            prop_assert_eq!(done, len);
        }
    }

    /// The requests of a batch, and the memory of its verbs.
    fn plan_all(mut batch: Batch, pool: &BufPool, limits: Limits) -> (VecDeque<Request>, Vec<Memory>) {
        let (mut requests, mut fences) = (VecDeque::new(), Fences::default());
        let verbs = (0..).zip(&mut batch.verbs);
        let memory = verbs.map(|(n, verb)| plan(verb, n, &mut fences, pool, limits, &mut requests).unwrap());
        let memory = memory.collect();
        (requests, memory)
    }

    #[test]
    fn an_aligned_verb_is_one_request() {
        let (pool, limits) = (BufPool::default(), Limits { message_bytes: 1 << 20, ..LIMITS });
        for (at, len, expected) in
            [(0, 8, 1), (0, 64, 1), (0, 1 << 20, 1), (0, 8 + (1 << 20), 2), (3, 3, 1), (0, 12, 2), (4, 8, 2)]
        {
            let mut batch = Batch::new(AT.server());
            batch.read(AT.add(at), len);
            let (requests, _) = plan_all(batch, &pool, limits);
            assert_eq!(requests.len(), expected, "{len} bytes at {at}");
            let cut: Vec<_> = pieces(at, len, limits.message_bytes).collect();
            assert_eq!(requests.iter().map(|r| (r.at, r.len)).collect::<Vec<_>>(), cut);
        }
    }

    #[test]
    fn fences_stand_where_the_contract_says_and_once() {
        let pool = BufPool::default();
        let mut batch = Batch::new(AT.server());
        batch.cas(AT, 1, 2);
        batch.read(AT.add(3), 100);
        batch.write(AT.add(3), pool.copy_of(&[7; 100]));
        batch.write_word(AT, 5);
        batch.faa(AT, 1);
        let (requests, memory) = plan_all(batch, &pool, LIMITS);
        let said: Vec<(Kind, u64, bool)> =
            requests.iter().map(|r| (r.kind, r.addr.offset() - AT.offset(), r.is_fenced)).collect();
        let write = |at, fenced| (Kind::Write, at, fenced);
        assert_eq!(
            said,
            [
                (Kind::Cas { expected: 1, desired: 2 }, 0, false),
                (Kind::Read, 3, false),
                (Kind::Read, 8, false),
                (Kind::Read, 96, false),
                write(3, true),
                write(8, false),
                write(96, false),
                write(0, false),
                (Kind::Faa { add: 1 }, 0, false),
            ]
        );
        assert_eq!(memory.len(), 5);
    }

    #[test]
    fn what_verbs_bring_is_theirs() {
        let pool = BufPool::default();
        let shared = SharedBuf::zeroed(64).unwrap();
        let mut batch = Batch::new(AT.server());
        batch.read(AT, 16);
        batch.read_into(AT, 16, &shared, 8);
        batch.cas(AT, 1, 2);
        batch.write_inline(AT.add(6), &[1, 2, 3, 4]);
        let (requests, memory) = plan_all(batch, &pool, LIMITS);
        assert_eq!(memory.len(), 4);
        let places: Vec<_> = requests.iter().map(|r| (r.verb, r.at, r.len)).collect();
        assert_eq!(places, [(0, 0, 16), (1, 8, 16), (2, 0, 8), (3, 0, 2), (3, 2, 2)], "cut between words");
        let outputs: Vec<Output> = memory.into_iter().map(Memory::output).collect();
        assert!(matches!(&outputs[0], Output::Bytes(buf) if buf.len() == 16));
        assert!(matches!(outputs[1..], [Output::Done, Output::Previous(_), Output::Done]));
    }

    #[test]
    fn a_device_that_carries_nothing_along_finds_a_writes_bytes_in_a_buffer() {
        let pool = BufPool::default();
        for (inline_bytes, is_carried) in [(0, false), (7, false), (8, true)] {
            let mut batch = Batch::new(AT.server());
            batch.write_word(AT, 0x0102_0304_0506_0708);
            let (_, memory) = plan_all(batch, &pool, Limits { inline_bytes, ..LIMITS });
            match &memory[0] {
                Memory::Inline(bytes) => assert!(is_carried && bytes[..8] == [8, 7, 6, 5, 4, 3, 2, 1]),
                Memory::Source(buf) => assert!(!is_carried && buf[..] == [8, 7, 6, 5, 4, 3, 2, 1]),
                other => panic!("{other:?}"),
            }
        }
    }
}
