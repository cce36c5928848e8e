//! Bytes on their way out or in. They are initialised once and used again, so that nothing is cleared only to be written over.

/// Bytes that wait to be sent.
#[derive(Default, Debug)]
pub(crate) struct Outgoing {
    bytes: Vec<u8>,
    sent: usize,
    end: usize,
}

/// What an empty buffer keeps; more is given back.
const KEPT_BYTES: usize = 1 << 20;

impl Outgoing {
    /// Room for `len` more bytes at the end, which the caller fills.
    #[inline]
    pub(crate) fn room(&mut self, len: usize) -> &mut [u8] {
        let at = self.end;
        if self.bytes.len() - at < len {
            self.grow(len);
        }
        self.end = at + len;
        &mut self.bytes[at..at + len]
    }

    #[cold]
    fn grow(&mut self, len: usize) {
        let needed = self.end + len;
        self.bytes.resize(needed.next_power_of_two().max(4096), 0);
    }

    #[inline]
    pub(crate) fn put(&mut self, bytes: &[u8]) {
        self.room(bytes.len()).copy_from_slice(bytes);
    }

    pub(crate) fn unsent(&self) -> &[u8] {
        &self.bytes[self.sent..self.end]
    }

    /// Writes over bytes that begin at so many unsent ones.
    pub(crate) fn patch(&mut self, at: usize, bytes: &[u8]) {
        let at = self.sent + at;
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.sent == self.end
    }

    pub(crate) fn len(&self) -> usize {
        self.end - self.sent
    }

    /// So many have been sent.
    pub(crate) fn advance(&mut self, sent: usize) {
        self.sent += sent;
        if self.is_empty() {
            (self.sent, self.end) = (0, 0);
            if self.bytes.len() > KEPT_BYTES {
                self.bytes = Vec::new();
            }
        }
    }
}

/// Bytes that have come and wait to be understood.
#[derive(Debug)]
pub(crate) struct Incoming {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
}

impl Incoming {
    pub(crate) fn new(bytes: usize) -> Self {
        Self { bytes: vec![0; bytes], start: 0, end: 0 }
    }

    /// Where the next bytes go. Never empty, as long as frames are taken out and none is longer than the buffer.
    pub(crate) fn space(&mut self) -> &mut [u8] {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.bytes.len() - self.end < self.bytes.len() / 2 {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        &mut self.bytes[self.end..]
    }

    /// So many have come.
    pub(crate) fn filled(&mut self, bytes: usize) {
        self.end += bytes;
    }

    /// What has come and not been consumed.
    #[inline]
    pub(crate) fn arrived(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    pub(crate) fn consume(&mut self, bytes: usize) {
        self.start += bytes;
    }
}

/// The first frame of what has come, without its length; `None` if it has not come whole, an error if it never may.
#[inline]
pub(crate) fn first_frame(arrived: &[u8], max: usize) -> Result<Option<&[u8]>, crate::wire::Malformed> {
    let Some((head, rest)) = arrived.split_first_chunk::<4>() else { return Ok(None) };
    let length = u32::from_le_bytes(*head) as usize;
    if length > max { Err(crate::wire::Malformed) } else { Ok(rest.get(..length)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_put_in_comes_out_in_order() {
        let mut out = Outgoing::default();
        out.put(b"abc");
        out.put(&[7; 5000]);
        assert!(out.len() == 5003 && out.unsent().starts_with(b"abc\x07"));
        out.advance(2);
        out.put(b"z");
        assert!(out.unsent().starts_with(b"c\x07") && out.unsent().ends_with(b"\x07z"));
        out.patch(1, b"y");
        assert!(out.unsent().starts_with(b"cy\x07"));
        out.advance(out.len());
        assert!(out.is_empty());
    }

    #[test]
    fn frames_are_found_across_reads_and_lies_are_refused() {
        let mut arrived = Incoming::new(16);
        let mut seen = Vec::new();
        for chunk in [&b"\x02\0\0\0ab\x01"[..], b"\0\0\0", b"c\x08\0\0\0", b"12345678"] {
            arrived.space()[..chunk.len()].copy_from_slice(chunk);
            arrived.filled(chunk.len());
            while let Some(frame) = first_frame(arrived.arrived(), 8).unwrap() {
                seen.push(frame.to_vec());
                let length = 4 + frame.len();
                arrived.consume(length);
            }
        }
        assert_eq!(seen, [b"ab".to_vec(), b"c".to_vec(), b"12345678".to_vec()]);
        assert!(first_frame(b"\x09\0\0\0", 8).is_err());
    }
}
