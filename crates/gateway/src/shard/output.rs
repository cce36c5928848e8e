//! Replies that a client has not taken yet.
//!
//! They are in blocks of about [`BLOCK_BYTES`], so that what the client has read is freed while the rest waits, and a long reply stays
//! where it was made. A client that has read everything has no block.

use crate::resp::reply::write_length;
use crate::resp::{Protocol, Reply};
use std::collections::VecDeque;

/// Replies go into one block until it has grown to this.
pub(super) const BLOCK_BYTES: usize = 64 << 10;

/// Replies, in order.
#[derive(Default, Debug)]
pub(crate) struct Output {
    /// Blocks that nothing is added to.
    full: VecDeque<Vec<u8>>,
    /// The last block.
    last: Vec<u8>,
    /// How much the client has taken of the first one.
    taken: usize,
    /// All bytes that it has not taken.
    bytes: usize,
    /// What the full blocks cost.
    full_capacity: usize,
}

impl Output {
    /// How many bytes wait.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.bytes
    }

    pub(super) fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// What it costs.
    #[inline]
    pub(super) fn memory(&self) -> usize {
        self.full_capacity + self.last.capacity()
    }

    /// Whether replies need a block to go into.
    #[inline]
    pub(super) fn lacks_block(&self) -> bool {
        self.last.capacity() == 0
    }

    /// A block that is empty, to be filled.
    #[inline]
    pub(super) fn give_block(&mut self, block: Vec<u8>) {
        self.last = block;
    }

    /// The block of a client that has taken everything, to be used for others.
    #[inline]
    pub(super) fn take_block(&mut self) -> Vec<u8> {
        debug_assert!(self.is_empty(), "replies wait");
        std::mem::take(&mut self.last)
    }

    /// Adds a reply; its length.
    #[inline]
    pub(super) fn push(&mut self, reply: Reply, protocol: Protocol) -> usize {
        if self.last.len() >= BLOCK_BYTES {
            self.close_block();
        }
        match reply {
            Reply::Written(bytes, from) if bytes.len() >= BLOCK_BYTES => self.push_block(bytes, from),
            Reply::Bytes(bytes) if bytes.len() >= BLOCK_BYTES => self.push_long(bytes),
            Reply::Array(replies) => {
                let before = self.bytes;
                self.append(|last| write_length(last, b'*', replies.len()));
                for reply in replies {
                    self.push(reply, protocol);
                }
                self.bytes - before
            }
            reply => self.append(|last| reply.write(last, protocol)),
        }
    }

    #[inline]
    fn append(&mut self, write: impl FnOnce(&mut Vec<u8>)) -> usize {
        let before = self.last.len();
        write(&mut self.last);
        let written = self.last.len() - before;
        self.bytes += written;
        written
    }

    /// A long value, which is a block of its own.
    fn push_long(&mut self, value: Vec<u8>) -> usize {
        let head = self.append(|last| write_length(last, b'$', value.len()));
        let length = self.push_block(value, 0);
        head + length + self.append(|last| last.extend_from_slice(b"\r\n"))
    }

    /// A long part of a reply, which is a block of its own.
    fn push_block(&mut self, mut bytes: Vec<u8>, from: usize) -> usize {
        self.close_block();
        // Only the first block may have been taken in part.
        bytes.drain(..from);
        let length = bytes.len();
        self.last = bytes;
        self.bytes += length;
        self.close_block();
        length
    }

    fn close_block(&mut self) {
        if !self.last.is_empty() {
            self.full_capacity += self.last.capacity();
            self.full.push_back(std::mem::take(&mut self.last));
        }
    }

    /// What is to be sent next.
    #[inline]
    pub(super) fn front(&self) -> &[u8] {
        &self.full.front().unwrap_or(&self.last)[self.taken..]
    }

    /// The client has taken so many bytes of the front.
    #[inline]
    pub(super) fn take(&mut self, bytes: usize) {
        self.taken += bytes;
        self.bytes -= bytes;
        if self.taken < self.full.front().map_or(self.last.len(), Vec::len) {
            return;
        }
        self.taken = 0;
        match self.full.pop_front() {
            Some(block) => self.full_capacity -= block.capacity(),
            None => self.last.clear(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_pushed_comes_out_in_order_and_is_freed_on_the_way() {
        let mut output = Output::default();
        let (mut expected, mut pushed) = (Vec::new(), 0);
        for n in 0..200usize {
            let bytes = vec![u8::try_from(n).expect("small"); (n * 7919) % (3 * BLOCK_BYTES)];
            let reply = match n % 4 {
                0 => Reply::Written(bytes, 0),
                1 => Reply::Array(vec![Reply::bytes(bytes.clone()), Reply::Nil, Reply::bytes(bytes)]),
                _ => Reply::bytes(bytes),
            };
            reply.write(&mut expected, Protocol::Resp2);
            pushed += output.push(reply, Protocol::Resp2);
        }
        assert_eq!((output.len(), pushed), (expected.len(), expected.len()));
        assert!(output.memory() < 2 * expected.len() + BLOCK_BYTES);
        let mut found = Vec::new();
        let mut step = 1;
        while !output.is_empty() {
            let bytes = output.front().len().min(step);
            found.extend_from_slice(&output.front()[..bytes]);
            output.take(bytes);
            step = step * 3 % 100_003;
            assert_eq!(output.len(), expected.len() - found.len());
        }
        assert!(found == expected && output.full.is_empty() && output.full_capacity == 0);
        assert!(output.front().is_empty());
    }

    #[test]
    fn a_long_reply_is_not_copied() {
        let mut output = Output::default();
        output.push(Reply::Ok, Protocol::Resp2);
        let long = vec![b'x'; 2 * BLOCK_BYTES];
        let at = long.as_ptr();
        output.push(Reply::Written(long, 0), Protocol::Resp2);
        output.take(5);
        assert_eq!(output.front().as_ptr(), at);
        output.take(2 * BLOCK_BYTES);
        let value = vec![b'x'; BLOCK_BYTES];
        let at = value.as_ptr();
        output.push(Reply::Array(vec![Reply::Bytes(value)]), Protocol::Resp2);
        output.take(b"*1\r\n$65536\r\n".len());
        assert_eq!(output.front().as_ptr(), at);
    }
}
