//! Files come back as they were written, and no other file does.

use super::read::Damaged;
use super::{BLOCK_BYTES, Header, KeyValue, Reader, Record, Saved, Writer};
use proptest::prelude::*;
use std::io::{self, Write};

type Contents = Vec<Vec<KeyValue>>;

fn header(indexes: usize, pool: u128) -> Header {
    let index = |n| Saved { name: format!("index {n}"), engine: "sphinx".to_owned(), config: vec![n, 2, 3] };
    Header { pool, unix_ms: 1_700_000_000_000, indexes: (0u8..).take(indexes).map(index).collect() }
}

fn write_to<W: Write>(out: W, header: &Header, contents: &Contents) -> io::Result<W> {
    let mut writer = Writer::new(out, header)?;
    for pairs in contents {
        for (key, value) in pairs {
            writer.add(key, value)?;
        }
        writer.end_index()?;
    }
    writer.finish()
}

fn write(pool: u128, contents: &Contents) -> Vec<u8> {
    write_to(Vec::new(), &header(contents.len(), pool), contents).unwrap()
}

fn read(bytes: &[u8]) -> Result<(Header, Contents), Damaged> {
    let mut reader = Reader::new(bytes)?;
    let (mut contents, mut pairs) = (Contents::new(), Vec::new());
    while let Some(record) = reader.next_record()? {
        match record {
            Record::Pairs(some) => pairs.extend(some),
            Record::EndOfIndex(count) => {
                assert_eq!(count, pairs.len() as u64);
                contents.push(std::mem::take(&mut pairs));
            }
        }
    }
    assert_eq!(reader.offset(), bytes.len() as u64);
    Ok((reader.header().clone(), contents))
}

/// Two indexes, one of them empty, of a few pairs.
fn small() -> Contents {
    let pair = |n: u8| (vec![n; usize::from(n % 5) + 1], vec![n; usize::from(n % 4) * 3]);
    vec![(0..12).map(pair).collect(), Vec::new(), vec![(Vec::new(), Vec::new()), (vec![1], vec![2])]]
}

proptest! {
    #[test]
    fn what_was_written_is_read(
        contents in proptest::collection::vec(
            proptest::collection::btree_map(
                proptest::collection::vec(any::<u8>(), 0..20), proptest::collection::vec(any::<u8>(), 0..60), 0..30),
            0..4),
        pool in any::<u128>(),
    ) {
        let contents: Contents = contents.into_iter().map(|pairs| pairs.into_iter().collect()).collect();
        let (found, pairs) = read(&write(pool, &contents)).unwrap();
        prop_assert_eq!(found, header(contents.len(), pool));
        prop_assert_eq!(pairs, contents);
    }

    #[test]
    fn garbage_behind_a_good_beginning_is_refused(from in 0usize..300, junk in proptest::collection::vec(any::<u8>(), 0..300)) {
        let whole = write(1, &small());
        let mut bytes = whole[..from.min(whole.len())].to_vec();
        bytes.extend(junk);
        prop_assert!(bytes == whole || read(&bytes).is_err());
    }
}

#[test]
fn long_pairs_and_many_blocks() {
    let pairs: Vec<KeyValue> =
        (0..200u32).map(|n| (n.to_be_bytes().to_vec(), vec![7; (n as usize % 9) * 4000])).collect();
    let mut contents = vec![pairs];
    contents[0].push((vec![255; 4096], vec![9; 4 * BLOCK_BYTES]));
    assert_eq!(read(&write(3, &contents)).unwrap().1, contents);
}

#[test]
fn every_changed_bit_is_noticed() {
    let whole = write(1, &small());
    for at in 0..whole.len() {
        for bit in 0..8 {
            let mut bytes = whole.clone();
            bytes[at] ^= 1 << bit;
            assert!(read(&bytes).is_err(), "bit {bit} of byte {at} of {}", whole.len());
        }
    }
}

#[test]
fn every_truncation_and_every_addition_is_noticed() {
    let whole = write(1, &small());
    for end in 0..whole.len() {
        assert!(read(&whole[..end]).is_err(), "{end} of {}", whole.len());
    }
    for more in [0, 1, 255] {
        assert!(read(&[&whole[..], &[more]].concat()).is_err());
    }
    assert!(read(&[&whole[..], &whole[..]].concat()).is_err());
    assert!(read(&whole).is_ok());
}

/// Records have checksums of their own: one in the place of another, or from another file, is noticed too.
#[test]
fn records_stay_in_their_place() {
    let pairs = |from: u8| (from..from + 3).map(|n| (vec![n], vec![n; BLOCK_BYTES])).collect::<Vec<_>>();
    let contents = vec![pairs(1), pairs(1)];
    let (whole, other) = (write(1, &contents), write(2, &contents));
    assert_eq!(whole.len(), other.len());
    let block = 16 + 8 + 1 + BLOCK_BYTES + 8;
    let begin = whole.len() - (2 * (3 * block + 40) + 32);
    for (first, second) in [(0, 1), (1, 2), (0, 2)] {
        let mut bytes = whole.clone();
        let (first, second) = (begin + first * block, begin + second * block);
        bytes.copy_within(second..second + block, first);
        bytes[second..second + block].copy_from_slice(&whole[first..first + block]);
        assert!(matches!(read(&bytes), Err(Damaged::At { .. })), "swapped");
        let mut bytes = whole.clone();
        bytes.drain(first..first + block);
        assert!(matches!(read(&bytes), Err(Damaged::At { .. })), "left out");
        let mut bytes = whole.clone();
        bytes[first..first + block].copy_from_slice(&other[first..first + block]);
        assert!(matches!(read(&bytes), Err(Damaged::At { .. })), "another file's");
    }
    // Those of one index in the place of the other's.
    let mut bytes = whole.clone();
    let second = begin + 3 * block + 40;
    bytes[begin..begin + 3 * block].copy_from_slice(&whole[second..second + 3 * block]);
    assert!(matches!(read(&bytes), Err(Damaged::At { .. })), "another index's");
}

/// A full disk.
#[derive(Default)]
struct Full(usize);

impl Write for Full {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self.0.checked_sub(bytes.len()) {
            Some(left) => {
                self.0 = left;
                Ok(bytes.len())
            }
            None => Err(io::ErrorKind::StorageFull.into()),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_full_disk_is_an_error_wherever_it_is_full() {
    let contents = small();
    let whole = write(1, &contents).len();
    for room in (0..whole).step_by(7) {
        let error = write_to(Full(room), &header(contents.len(), 1), &contents).err().expect("it is full");
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
    }
    assert!(write_to(Full(whole), &header(contents.len(), 1), &contents).is_ok());
}

#[test]
fn a_file_says_what_is_wrong_with_it() {
    let whole = write(1, &small());
    let why = |bytes: &[u8]| read(bytes).expect_err("it is damaged").to_string();
    assert!(why(b"key,value\na,1\nb,2\nc,3\n").contains("no file that `farwood save` wrote"));
    assert!(why(&whole[..whole.len() - 1]).contains("the file ends within block"));
    let mut bytes = whole.clone();
    let at = bytes.len() - 100;
    bytes[at] ^= 1;
    let said = why(&bytes);
    assert!(
        said.contains("checksum is wrong") && said.contains("at byte") && said.contains("of index"),
        "{said}"
    );
}
