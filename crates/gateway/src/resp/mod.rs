//! RESP2 and RESP3, the protocol of Redis: requests in ([`parse`]), replies out ([`reply`]). Nothing else in the project knows it.
//!
//! Requests are parsed in place: a [`Request`] is the chunk of input that it came in and where its arguments are in there, so
//! that a key goes from the socket to the index without a copy.

pub(crate) mod parse;
pub(crate) mod reply;

pub(crate) use parse::{Limits, Parser, ProtocolError};
pub(crate) use reply::{Protocol, Reply};

use smallvec::SmallVec;
use std::ops::Index;
use std::rc::Rc;

/// Where an argument is in its chunk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Span {
    pub(crate) start: u32,
    pub(crate) end: u32,
}

pub(crate) type Spans = SmallVec<[Span; 6]>;

/// One command with its arguments; the command's name is argument 0, and there always is one.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    chunk: Rc<Vec<u8>>,
    spans: Spans,
}

impl Request {
    pub(crate) fn new(chunk: Rc<Vec<u8>>, spans: Spans) -> Self {
        debug_assert!(!spans.is_empty(), "a request has a name");
        Self { chunk, spans }
    }

    /// How many arguments there are, the name included.
    pub(crate) fn len(&self) -> usize {
        self.spans.len()
    }

    /// How long it is, about.
    #[inline]
    pub(crate) fn bytes(&self) -> usize {
        match (self.spans.first(), self.spans.last()) {
            (Some(first), Some(last)) => last.end.abs_diff(first.start) as usize,
            _ => 0,
        }
    }

    /// The argument at `n`, if there are so many.
    pub(crate) fn get(&self, n: usize) -> Option<&[u8]> {
        let span = self.spans.get(n)?;
        Some(&self.chunk[span.start as usize..span.end as usize])
    }

    /// The arguments from `n` on.
    pub(crate) fn from(&self, n: usize) -> impl DoubleEndedIterator<Item = &[u8]> + ExactSizeIterator {
        (n.min(self.len())..self.len()).map(|n| &self[n])
    }
}

impl Index<usize> for Request {
    type Output = [u8];

    #[inline]
    fn index(&self, n: usize) -> &[u8] {
        let span = self.spans[n];
        &self.chunk[span.start as usize..span.end as usize]
    }
}
