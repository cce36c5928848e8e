//! A batch as requests to a device: pure, so that it is tested without one.
//!
//! A verb is one request, or several. Words have to stay whole (rule 2), but a device moves packets, and whoever copies for it may
//! move words of its own: an unaligned transfer is cut so that each piece begins and ends between words or lies in one. What is
//! longer than a message is cut too. Pieces of one batch take effect in order, and the fence stands before the first piece of
//! its verb.

use crate::addr::GlobalAddr;
use crate::buf::{Buf, BufPool, SharedBuf};
use crate::verb::{Batch, INLINE_BYTES, Landing, Output, Source, Verb};
use smallvec::SmallVec;

/// What a request does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Read,
    Write,
    Cas { expected: u64, desired: u64 },
    Faa { add: u64 },
}

/// Where its bytes are on our side.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Local {
    /// Carried along.
    Inline { bytes: [u8; INLINE_BYTES], from: u8, len: u8 },
    /// A part of the memory that goes with verb `verb`.
    Part { verb: usize, at: usize, len: usize },
}

/// One request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Request {
    pub(super) kind: Kind,
    pub(super) addr: GlobalAddr,
    pub(super) local: Local,
    pub(super) is_fenced: bool,
}

/// The memory on our side that a verb reads or fills.
#[derive(Debug)]
pub(super) enum Memory {
    None,
    Owned(Buf),
    Shared(SharedBuf),
}

/// What a verb brings when it is done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Brings {
    Nothing,
    Bytes,
    Word,
}

/// A batch as requests.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) requests: SmallVec<[Request; 4]>,
    /// By verb.
    pub(super) memory: SmallVec<[Memory; 2]>,
    pub(super) brings: SmallVec<[Brings; 2]>,
    /// How much is moved.
    pub(super) bytes: usize,
}

impl Plan {
    /// The requests of a checked batch, to a device that takes messages of `max_bytes`.
    pub(super) fn new(batch: Batch, pool: &BufPool, max_bytes: usize) -> Self {
        let fences = batch.fences();
        let mut plan =
            Self { requests: SmallVec::new(), memory: SmallVec::new(), brings: SmallVec::new(), bytes: 0 };
        for (verb, is_fenced) in batch.verbs.into_iter().zip(fences) {
            plan.add(verb, is_fenced, pool, max_bytes);
        }
        plan
    }

    fn add(&mut self, verb: Verb, is_fenced: bool, pool: &BufPool, max_bytes: usize) {
        let (n, addr, len) = (self.memory.len(), verb.addr(), verb.len());
        self.bytes += len;
        let (kind, memory, brings, first) = match verb {
            Verb::Read { into: Landing::Pooled, .. } => {
                (Kind::Read, Memory::Owned(pool.take(len)), Brings::Bytes, 0)
            }
            Verb::Read { into: Landing::Shared { buf, at }, .. } => {
                (Kind::Read, Memory::Shared(buf), Brings::Nothing, at)
            }
            Verb::Write { from: Source::Inline { bytes, .. }, .. } => {
                for (at, len) in pieces(addr.offset(), len, max_bytes) {
                    let (from, len) = (short(at), short(len));
                    let local = Local::Inline { bytes, from, len };
                    self.push(Kind::Write, addr, at, local, is_fenced);
                }
                self.memory.push(Memory::None);
                self.brings.push(Brings::Nothing);
                return;
            }
            Verb::Write { from: Source::Owned(buf), .. } => {
                (Kind::Write, Memory::Owned(buf), Brings::Nothing, 0)
            }
            Verb::Write { from: Source::Shared { buf, at, .. }, .. } => {
                (Kind::Write, Memory::Shared(buf), Brings::Nothing, at)
            }
            Verb::Cas { expected, desired, .. } => {
                (Kind::Cas { expected, desired }, Memory::Owned(pool.take(8)), Brings::Word, 0)
            }
            Verb::Faa { add, .. } => (Kind::Faa { add }, Memory::Owned(pool.take(8)), Brings::Word, 0),
            // Refused before it comes here: no device of ours has it.
            Verb::MaskedCas { .. } => return,
        };
        for (at, len) in pieces(addr.offset(), len, max_bytes) {
            self.push(kind, addr, at, Local::Part { verb: n, at: first + at, len }, is_fenced);
        }
        self.memory.push(memory);
        self.brings.push(brings);
    }

    fn push(&mut self, kind: Kind, addr: GlobalAddr, at: usize, local: Local, is_fenced: bool) {
        let addr = if at == 0 { addr } else { addr.add(at as u64) };
        self.requests.push(Request { kind, addr, local, is_fenced: is_fenced && at == 0 });
    }
}

/// What a verb brought.
pub(super) fn output(brings: Brings, memory: Memory) -> Output {
    match (brings, memory) {
        (Brings::Bytes, Memory::Owned(buf)) => Output::Bytes(buf),
        (Brings::Word, Memory::Owned(buf)) => Output::Previous(buf.word(0)),
        _ => Output::Done,
    }
}

fn short(n: usize) -> u8 {
    u8::try_from(n).expect("inline bytes are few")
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
    use proptest::prelude::*;

    const AT: GlobalAddr = GlobalAddr::new(ServerId::new(0), RegionId::MAIN, 64);

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

    #[test]
    fn an_aligned_verb_is_one_request() {
        for len in [8, 64, 1024, 1 << 20] {
            assert_eq!(pieces(64, len, 1 << 30).count(), 1, "{len} bytes");
        }
        assert_eq!(pieces(67, 3, 1 << 30).count(), 1, "inside one word");
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
        let plan = Plan::new(batch, &pool, 1 << 20);
        let said: Vec<(Kind, u64, bool)> =
            plan.requests.iter().map(|r| (r.kind, r.addr.offset() - AT.offset(), r.is_fenced)).collect();
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
        assert_eq!(plan.bytes, 8 + 100 + 100 + 8 + 8);
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
        let plan = Plan::new(batch, &pool, 1 << 20);
        assert_eq!(plan.brings[..], [Brings::Bytes, Brings::Nothing, Brings::Word, Brings::Nothing]);
        assert_eq!(plan.memory.len(), 4);
        assert_eq!(plan.requests[1].local, Local::Part { verb: 1, at: 8, len: 16 });
        let inline: Vec<(u8, u8)> = plan.requests[3..]
            .iter()
            .map(|request| match request.local {
                Local::Inline { from, len, .. } => (from, len),
                Local::Part { .. } => (99, 99),
            })
            .collect();
        assert_eq!(inline, [(0, 2), (2, 2)], "cut between words");
        let outputs: Vec<Output> =
            plan.brings.iter().zip(plan.memory).map(|(brings, memory)| output(*brings, memory)).collect();
        assert!(matches!(&outputs[0], Output::Bytes(buf) if buf.len() == 16));
        assert!(matches!(outputs[1..], [Output::Done, Output::Previous(_), Output::Done]));
    }
}
