//! A batch as frames, and frames as its results.
//!
//! Most batches are one frame. One that brings or asks for more than a frame may is cut: frames of one connection are carried
//! out in order, so the batch still takes effect in order. A READ or WRITE is cut between words, which keeps words whole.

use super::buffer::Outgoing;
use super::verbs::{
    BATCH, CAS, FAA, HEAD_BYTES, MASKED_CAS, MAX_PAYLOAD_BYTES, MAX_VERBS, READ, WRITE, head, verb_head,
};
use crate::buf::{BufPool, SharedBuf};
use crate::verb::{Landing, Output, Source, Verb, VerbList};
use crate::wire::Malformed;
use smallvec::SmallVec;

/// Long batches are cut into frames of so many bytes, so that a short batch waits for few of them. Longer ones would be no faster.
pub(super) const FRAME_BYTES: usize = 64 << 10;
const _: () = assert!(FRAME_BYTES <= MAX_PAYLOAD_BYTES);

/// A batch of which not all has been put into frames.
#[derive(Debug)]
pub(crate) struct Sending {
    verbs: VerbList,
    /// The first verb that is not in a frame, and how many of its bytes are.
    at: usize,
    done: usize,
}

/// Where a part of a reply goes.
#[derive(Debug)]
enum Place {
    Nowhere,
    Buffer { verb: usize, at: usize, len: usize },
    Shared { buf: SharedBuf, at: usize, len: usize },
    Word { verb: usize },
}

/// One frame that waits for its reply.
#[derive(Debug)]
pub(crate) struct Piece {
    places: SmallVec<[Place; 2]>,
    /// The first verb of it, and whether an earlier frame has begun that verb.
    pub(crate) first: usize,
    pub(crate) continues: bool,
    /// Whether the batch ends with it.
    pub(crate) is_last: bool,
    /// Bytes of the request and of its reply.
    pub(crate) cost: usize,
    reply_bytes: usize,
}

impl Sending {
    pub(crate) fn new(verbs: VerbList) -> Self {
        Self { verbs, at: 0, done: 0 }
    }

    /// How many there are.
    pub(crate) fn verbs(&self) -> usize {
        self.verbs.len()
    }

    pub(crate) fn has_begun(&self) -> bool {
        self.at > 0 || self.done > 0
    }

    /// What the batch will bring, still empty.
    pub(crate) fn outputs(&self, pool: &BufPool) -> SmallVec<[Output; 2]> {
        let output = |verb: &Verb| match verb {
            Verb::Read { len, into: Landing::Pooled, .. } => Output::Bytes(pool.take(*len)),
            Verb::Read { .. } | Verb::Write { .. } => Output::Done,
            Verb::Cas { .. } | Verb::MaskedCas { .. } | Verb::Faa { .. } => Output::Previous(0),
        };
        self.verbs.iter().map(output).collect()
    }

    /// Puts as much as fits into one frame.
    pub(crate) fn next(&mut self, sequence: u32, out: &mut Outgoing) -> Piece {
        let begin = out.len();
        out.room(4 + HEAD_BYTES);
        let (first, continues) = (self.at, self.done > 0);
        let (mut places, mut read_bytes, mut written, mut words) = (SmallVec::new(), 0, 0, 0);
        while places.len() < MAX_VERBS {
            let Some(verb) = self.verbs.get(self.at) else { break };
            let left = verb.len() - self.done;
            let used = if matches!(verb, Verb::Write { .. }) { written } else { read_bytes };
            let part = match verb {
                Verb::Read { .. } | Verb::Write { .. } => {
                    cut(verb.addr().offset() + self.done as u64, left, FRAME_BYTES - used)
                }
                _ => left,
            };
            if part == 0 {
                break;
            }
            places.push(self.put(part, out));
            match &self.verbs[self.at] {
                Verb::Read { .. } => read_bytes += part,
                Verb::Write { .. } => written += part,
                _ => words += 1,
            }
            if part == left {
                (self.at, self.done) = (self.at + 1, 0);
            } else {
                self.done += part;
                break;
            }
        }
        let bytes = out.len() - begin;
        out.patch(begin, &length(bytes - 4).to_le_bytes());
        let verbs = u8::try_from(places.len()).expect("at most 128");
        out.patch(begin + 4, &head(BATCH, verbs, sequence));
        let reply_bytes = read_bytes + words * 8;
        let cost = bytes + 4 + HEAD_BYTES + reply_bytes;
        Piece { places, first, continues, is_last: self.at == self.verbs.len(), cost, reply_bytes }
    }

    /// Appends the next `part` bytes of the current verb.
    fn put(&self, part: usize, out: &mut Outgoing) -> Place {
        let (n, done, verb) = (self.at, self.done, &self.verbs[self.at]);
        let addr = if done == 0 { verb.addr() } else { verb.addr().add(done as u64) };
        let mut begin = |kind| out.put(&verb_head(kind, addr, length(part)));
        match verb {
            Verb::Read { into, .. } => {
                begin(READ);
                match into {
                    Landing::Pooled => Place::Buffer { verb: n, at: done, len: part },
                    Landing::Shared { buf, at } => {
                        Place::Shared { buf: buf.clone(), at: at + done, len: part }
                    }
                }
            }
            Verb::Write { from, .. } => {
                begin(WRITE);
                match from {
                    Source::Inline { bytes, .. } => out.put(&bytes[done..done + part]),
                    Source::Owned(buf) => out.put(&buf[done..done + part]),
                    Source::Shared { buf, at, .. } => buf.memory().read(at + done, out.room(part)),
                }
                Place::Nowhere
            }
            Verb::Cas { expected, desired, .. } => {
                begin(CAS);
                put_words(&[*expected, *desired], out);
                Place::Word { verb: n }
            }
            Verb::MaskedCas { compare, compare_mask, swap, swap_mask, .. } => {
                begin(MASKED_CAS);
                put_words(&[*compare, *compare_mask, *swap, *swap_mask], out);
                Place::Word { verb: n }
            }
            Verb::Faa { add, .. } => {
                begin(FAA);
                put_words(&[*add], out);
                Place::Word { verb: n }
            }
        }
    }
}

impl Piece {
    /// How many verbs the frame had.
    pub(crate) fn verbs(&self) -> usize {
        self.places.len()
    }

    /// Takes what a reply brings to its places.
    pub(crate) fn land(&self, mut reply: &[u8], outputs: &mut [Output]) -> Result<(), Malformed> {
        if reply.len() != self.reply_bytes {
            return Err(Malformed);
        }
        let mut take = |len: usize| {
            let (taken, rest) = reply.split_at_checked(len).ok_or(Malformed)?;
            reply = rest;
            Ok(taken)
        };
        for place in &self.places {
            match place {
                Place::Nowhere => {}
                Place::Buffer { verb, at, len } => {
                    if let Output::Bytes(buf) = &mut outputs[*verb] {
                        buf[*at..*at + *len].copy_from_slice(take(*len)?);
                    }
                }
                Place::Shared { buf, at, len } => buf.memory().write(*at, take(*len)?),
                Place::Word { verb } => {
                    let word = take(8)?.try_into().map_err(|_| Malformed)?;
                    outputs[*verb] = Output::Previous(u64::from_le_bytes(word));
                }
            }
        }
        Ok(())
    }
}

/// How many of `left` bytes at `offset` go into a frame that has room for `room`: all, or so many that no word is cut.
fn cut(offset: u64, left: usize, room: usize) -> usize {
    if left <= room {
        return left;
    }
    let end = (offset + room as u64) & !7;
    usize::try_from(end.saturating_sub(offset)).unwrap_or(0)
}

fn put_words(words: &[u64], out: &mut Outgoing) {
    for word in words {
        out.put(&word.to_le_bytes());
    }
}

fn length(bytes: usize) -> u32 {
    u32::try_from(bytes).expect("frames are far below 4 GiB")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn cuts_fit_and_lie_between_words(offset in 0u64..1000, left in 1usize..100_000, room in 0usize..100_000) {
            let part = cut(offset, left, room);
            prop_assert!(part <= left && part <= room.max(part.min(left)) && (part == left || part <= room));
            prop_assert!(part == left || (offset + part as u64) % 8 == 0 || part == 0);
            prop_assert!(part > 0 || room < 8 || left == 0);
        }
    }
}
