//! Pairs into a file.

use super::{
    BLOCK_BYTES, Header, KIND_BLOCK, KIND_END, KIND_TRAILER, MAGIC, PairSum, RECORD_HEAD_BYTES, VERSION,
};
use std::io::{self, Write};
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

/// Writes a file from its beginning to its end.
pub(crate) struct Writer<W> {
    out: W,
    seed: u64,
    records: u64,
    /// Which index is written, the pairs that are not written yet, and what was.
    index: u16,
    block: Vec<u8>,
    pairs: u64,
    sum: PairSum,
    all_pairs: u64,
}

/// A length that a file can hold: a name, a configuration, a key, a value.
fn length<N: TryFrom<usize>>(bytes: &[u8]) -> io::Result<N> {
    N::try_from(bytes.len()).map_err(|_| io::Error::other("it is too long for a file"))
}

impl<W: Write> Writer<W> {
    pub(crate) fn new(mut out: W, header: &Header) -> io::Result<Self> {
        let mut body = Vec::new();
        body.extend_from_slice(&header.pool.to_le_bytes());
        body.extend_from_slice(&header.unix_ms.to_le_bytes());
        let count = u16::try_from(header.indexes.len()).map_err(|_| io::Error::other("too many indexes"))?;
        body.extend_from_slice(&u32::from(count).to_le_bytes());
        for index in &header.indexes {
            for part in [index.name.as_bytes(), index.engine.as_bytes(), &index.config] {
                body.extend_from_slice(&length::<u32>(part)?.to_le_bytes());
                body.extend_from_slice(part);
            }
        }
        let mut bytes = MAGIC.to_vec();
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&length::<u32>(&body)?.to_le_bytes());
        bytes.extend_from_slice(&body);
        let seed = xxh3_64(&bytes);
        bytes.extend_from_slice(&seed.to_le_bytes());
        out.write_all(&bytes)?;
        let (block, sum) = (Vec::new(), PairSum::default());
        Ok(Self { out, seed, records: 0, index: 0, block, pairs: 0, sum, all_pairs: 0 })
    }

    /// The next pair of the index that is written, in the order of keys.
    pub(crate) fn add(&mut self, key: &[u8], value: &[u8]) -> io::Result<()> {
        self.block.extend_from_slice(&length::<u32>(key)?.to_le_bytes());
        self.block.extend_from_slice(&length::<u32>(value)?.to_le_bytes());
        self.block.extend_from_slice(key);
        self.block.extend_from_slice(value);
        self.sum.add(key, value);
        self.pairs += 1;
        if self.block.len() >= BLOCK_BYTES { self.end_block() } else { Ok(()) }
    }

    fn end_block(&mut self) -> io::Result<()> {
        if self.block.is_empty() {
            return Ok(());
        }
        let block = std::mem::take(&mut self.block);
        self.record(KIND_BLOCK, self.index, &block)?;
        self.block = block;
        self.block.clear();
        Ok(())
    }

    /// All pairs of the index have been added; the next one begins.
    pub(crate) fn end_index(&mut self) -> io::Result<()> {
        self.end_block()?;
        let end = [self.pairs.to_le_bytes(), self.sum.sum().to_le_bytes()].concat();
        self.record(KIND_END, self.index, &end)?;
        self.all_pairs += self.pairs;
        self.index += 1;
        (self.pairs, self.sum) = (0, PairSum::default());
        Ok(())
    }

    /// All indexes have been written.
    pub(crate) fn finish(mut self) -> io::Result<W> {
        let total = self.all_pairs.to_le_bytes();
        self.record(KIND_TRAILER, self.index, &total)?;
        self.out.flush()?;
        Ok(self.out)
    }

    fn record(&mut self, kind: u16, index: u16, body: &[u8]) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(RECORD_HEAD_BYTES + body.len());
        bytes.extend_from_slice(&kind.to_le_bytes());
        bytes.extend_from_slice(&index.to_le_bytes());
        bytes.extend_from_slice(&length::<u32>(body)?.to_le_bytes());
        bytes.extend_from_slice(&self.records.to_le_bytes());
        bytes.extend_from_slice(body);
        let sum = xxh3_64_with_seed(&bytes, self.seed);
        self.out.write_all(&bytes)?;
        self.out.write_all(&sum.to_le_bytes())?;
        self.records += 1;
        Ok(())
    }
}
