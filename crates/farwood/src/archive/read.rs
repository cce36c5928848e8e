//! Pairs out of a file that may be damaged: everything is checked before it is handed out.

use super::{
    CHECKSUM_BYTES, HEADER_HEAD_BYTES, Header, KIND_BLOCK, KIND_END, KIND_TRAILER, KeyValue, MAGIC,
    MAX_BODY_BYTES, PAIR_HEAD_BYTES, PairSum, RECORD_HEAD_BYTES, Saved, VERSION,
};
use std::fmt;
use std::io::{self, ErrorKind, Read};
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

/// Why a file is not taken.
#[derive(Debug)]
pub(crate) enum Damaged {
    /// It cannot be read.
    Io(io::Error),
    /// It is no such file, or one of a later version.
    Other(String),
    /// Something in it is not as it was written.
    At {
        /// What, and of which index.
        what: String,
        /// Where that begins in the file.
        offset: u64,
    },
}

impl fmt::Display for Damaged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(error) => write!(f, "it cannot be read: {error}"),
            Self::Other(why) => f.write_str(why),
            Self::At { what, offset } => {
                write!(f, "it is damaged: {what}, at byte {offset}")
            }
        }
    }
}

/// The next part of a file.
#[derive(Debug)]
pub(crate) enum Record {
    /// Pairs of an index, in the order of their keys, behind those before.
    Pairs(Vec<KeyValue>),
    /// The index is complete, and has so many.
    EndOfIndex(u64),
}

/// Reads a file from its beginning to its end.
pub(crate) struct Reader<R> {
    input: R,
    header: Header,
    seed: u64,
    offset: u64,
    records: u64,
    /// Which index is read, and what was read of it.
    index: usize,
    last: Option<Vec<u8>>,
    pairs: u64,
    sum: PairSum,
    all_pairs: u64,
}

/// A place in bytes that were checked.
struct Cursor<'a>(&'a [u8]);

impl<'a> Cursor<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(head)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }

    fn u32(&mut self) -> Option<usize> {
        usize::try_from(u32::from_le_bytes(self.array()?)).ok()
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }
}

fn decode_header(body: &[u8]) -> Option<Header> {
    let mut body = Cursor(body);
    let (pool, unix_ms) = (u128::from_le_bytes(body.array()?), body.u64()?);
    let mut indexes = Vec::new();
    for _ in 0..body.u32()? {
        let mut part = || {
            let len = body.u32()?;
            body.take(len)
        };
        let (name, engine, config) = (part()?, part()?, part()?);
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).ok();
        indexes.push(Saved { name: text(name)?, engine: text(engine)?, config: config.to_vec() });
    }
    body.0.is_empty().then_some(Header { pool, unix_ms, indexes })
}

/// Reads as much as there must be.
fn fill(input: &mut impl Read, buffer: &mut [u8], what: &str, offset: u64) -> Result<(), Damaged> {
    input.read_exact(buffer).map_err(|error| match error.kind() {
        ErrorKind::UnexpectedEof => Damaged::At { what: format!("the file ends within {what}"), offset },
        _ => Damaged::Io(error),
    })
}

impl<R: Read> Reader<R> {
    pub(crate) fn new(mut input: R) -> Result<Self, Damaged> {
        let header = |what: &str| Damaged::At { what: what.to_owned(), offset: 0 };
        let mut bytes = vec![0; HEADER_HEAD_BYTES];
        fill(&mut input, &mut bytes, "its header", 0)?;
        if !bytes.starts_with(MAGIC) {
            return Err(Damaged::Other("it is no file that `farwood save` wrote".to_owned()));
        }
        let word = |at: usize| bytes[at..].first_chunk().map_or(0, |word| u32::from_le_bytes(*word));
        let (version, length) = (word(8), usize::try_from(word(12)).unwrap_or(usize::MAX));
        if length > MAX_BODY_BYTES {
            return Err(header("the header's length cannot be"));
        }
        bytes.resize(HEADER_HEAD_BYTES + length + CHECKSUM_BYTES, 0);
        fill(&mut input, &mut bytes[HEADER_HEAD_BYTES..], "its header", 0)?;
        let (checked, sum) = bytes.split_at(HEADER_HEAD_BYTES + length);
        let seed = xxh3_64(checked);
        if sum != seed.to_le_bytes() {
            return Err(header("the header's checksum is wrong"));
        }
        if version != VERSION {
            let why = format!("it has version {version} of the format; this program reads version {VERSION}");
            return Err(Damaged::Other(why));
        }
        let decoded = decode_header(&checked[HEADER_HEAD_BYTES..]);
        Ok(Self {
            input,
            header: decoded.ok_or_else(|| header("the header makes no sense"))?,
            seed,
            offset: bytes.len() as u64,
            records: 0,
            index: 0,
            last: None,
            pairs: 0,
            sum: PairSum::default(),
            all_pairs: 0,
        })
    }

    pub(crate) fn header(&self) -> &Header {
        &self.header
    }

    /// How many bytes have been read.
    pub(crate) fn offset(&self) -> u64 {
        self.offset
    }

    /// The next part; `None` at the end of the file, which is complete then.
    pub(crate) fn next_record(&mut self) -> Result<Option<Record>, Damaged> {
        let (offset, index) = (self.offset, self.header.indexes.get(self.index));
        let is_within = index.is_some();
        let of = index.map_or_else(String::new, |index| format!(" of index '{}'", index.name));
        let what = format!("block {}{of}", self.records);
        let (kind, index, body) = self.record(&what)?;
        let bad = |why: &str| Damaged::At { what: format!("{what} {why}"), offset };
        if usize::from(index) != self.index {
            return Err(bad("belongs to another index"));
        }
        match (kind, is_within) {
            (KIND_BLOCK, true) => {
                let pairs = self.decode(&body).ok_or_else(|| bad("holds no pairs in the order of keys"))?;
                Ok(Some(Record::Pairs(pairs)))
            }
            (KIND_END, true) => {
                let expected = [self.pairs.to_le_bytes(), self.sum.sum().to_le_bytes()].concat();
                if body != expected {
                    return Err(bad("does not agree with the pairs before it"));
                }
                let pairs = std::mem::take(&mut self.pairs);
                (self.sum, self.last) = (PairSum::default(), None);
                self.all_pairs += pairs;
                self.index += 1;
                Ok(Some(Record::EndOfIndex(pairs)))
            }
            (KIND_TRAILER, false) if body == self.all_pairs.to_le_bytes() => {
                let mut more = [0];
                match self.input.read(&mut more) {
                    Ok(0) => Ok(None),
                    Ok(_) => {
                        let what = "something stands behind its end".to_owned();
                        Err(Damaged::At { what, offset: self.offset })
                    }
                    Err(error) => Err(Damaged::Io(error)),
                }
            }
            _ => Err(bad("does not belong there")),
        }
    }

    /// The next record, whose checksum is right: kind, index and body.
    fn record(&mut self, what: &str) -> Result<(u16, u16, Vec<u8>), Damaged> {
        let offset = self.offset;
        let bad = |why: &str| Damaged::At { what: format!("{what}: {why}"), offset };
        let mut bytes = vec![0; RECORD_HEAD_BYTES];
        fill(&mut self.input, &mut bytes, what, offset)?;
        let mut head = Cursor(&bytes);
        let (kind, index) = (head.array().map(u16::from_le_bytes), head.array().map(u16::from_le_bytes));
        let (length, number) = (head.u32(), head.u64());
        let (Some(kind), Some(index), Some(length), Some(number)) = (kind, index, length, number) else {
            return Err(bad("it is too short"));
        };
        if length > MAX_BODY_BYTES {
            return Err(bad("its length cannot be"));
        }
        bytes.resize(RECORD_HEAD_BYTES + length + CHECKSUM_BYTES, 0);
        fill(&mut self.input, &mut bytes[RECORD_HEAD_BYTES..], what, offset)?;
        let sum = bytes.split_off(RECORD_HEAD_BYTES + length);
        if sum != xxh3_64_with_seed(&bytes, self.seed).to_le_bytes() {
            return Err(bad("its checksum is wrong"));
        }
        if number != self.records {
            return Err(bad("it is not the next one"));
        }
        self.records += 1;
        self.offset += (bytes.len() + CHECKSUM_BYTES) as u64;
        Ok((kind, index, bytes.split_off(RECORD_HEAD_BYTES)))
    }

    /// The pairs of a block.
    fn decode(&mut self, body: &[u8]) -> Option<Vec<KeyValue>> {
        let (mut body, mut pairs) = (Cursor(body), Vec::new());
        while body.0.len() >= PAIR_HEAD_BYTES {
            let (key_bytes, value_bytes) = (body.u32()?, body.u32()?);
            let (key, value) = (body.take(key_bytes)?, body.take(value_bytes)?);
            if self.last.as_deref().is_some_and(|last| last >= key) {
                return None;
            }
            self.last = Some(key.to_vec());
            self.sum.add(key, value);
            self.pairs += 1;
            pairs.push((key.to_vec(), value.to_vec()));
        }
        (body.0.is_empty() && !pairs.is_empty()).then_some(pairs)
    }
}
