//! Memory that is kept tells how it was left: whether somebody worked on it, under which start of the machine, and what it held.
//!
//! **Taking it over.**
//!
//! 1. Nothing is changed before it is clear that the memory is whole. What was closed has to fit its checksums, all of them, whatever
//!    boot it is. What was in use is whole if the machine has been up ever since: a killed process loses nothing that it stored. It is
//!    not if the machine was started again, or if it is a copy. What has no header has to be all zeroes.
//! 2. Anything else is refused ([`NotWhole`]), or taken as torn ([`Found::Torn`]), if that was asked for.
//! 3. The header says *in use*, durably, before the server's logic changes a word, and long before a client comes. Of torn memory it says
//!    so under no boot at all until the logic has put it right, so that nobody takes what is half mended for whole.
//!
//! **Closing it**, when nobody can touch it any more:
//!
//! 1. Every piece of every region gets a checksum, keyed by its place. Gates have none: they mean nothing to the next server.
//! 2. Checksums and memory are made durable.
//! 3. The header says *clean*, with a checksum of the checksums, and is made durable.
//!
//! A process that ends, or cannot write, anywhere in between leaves memory that is in use. What cannot be noticed stands in
//! `docs/kept-memory.md`.
//!
//! **Durable** is `fsync` for a file. A DAX device has neither pages to write back nor an `fsync`: lines of the processor's caches are
//! written back instead.

mod header;

pub(super) use header::HEADER_END;
pub use header::{BootId, NotWhole};

use super::ServeError;
use super::backing::{Kind, Layout};
use crate::found::{Damage, Found, Piece};
use crate::mem::RacyMemory;
use crate::transport::host::regions::{Regions, at};
use header::{ENCODED_BYTES, HEADER_AT, Header, SLOT_BYTES, SUMS_AT, State};
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// How kept memory is to be taken over.
#[derive(Clone, Default, Debug)]
pub struct KeepOptions {
    /// This start of the machine; `None`: as the system says.
    pub boot: Option<BootId>,
    /// Take what is not whole, too.
    pub accept_torn: bool,
    /// The number of this opening, where somebody counts for a whole pool; `None`: one more than the last.
    pub opening: Option<u64>,
    /// What is known of the last opening from elsewhere.
    pub last: Option<LastOpening>,
}

/// What is known elsewhere of how memory was left.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LastOpening {
    /// Its number; 0: there was none.
    pub number: u64,
    /// It has ended, and all memory of the pool was closed.
    pub was_closed: bool,
}

/// How a file says that it was left.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Left {
    /// By which opening.
    pub opening: u64,
    /// Whether it was closed.
    pub is_closed: bool,
}

/// How this file was left; `None` if it does not say.
pub fn left(path: &Path) -> Option<Left> {
    let file = File::open(path).ok()?;
    let (_, header) = read_slots(|place, bytes| file.read_exact_at(bytes, place as u64).is_ok())?;
    Some(Left { opening: header.opening, is_closed: header.state == State::Clean })
}

fn read_slots(read: impl Fn(usize, &mut [u8]) -> bool) -> Option<(usize, Header)> {
    let slot = |number: usize| {
        let mut bytes = [0; ENCODED_BYTES];
        read(slot_at(number), &mut bytes).then(|| Header::decode(&bytes)).flatten()
    };
    Header::choose([slot(0), slot(1)])
}

fn slot_at(number: usize) -> usize {
    HEADER_AT + number * SLOT_BYTES
}

/// How long the file was before it was opened, and whether it has to be made longer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Length {
    /// There was nothing.
    Empty,
    /// As it should be.
    Whole,
    /// It was cut, or grew, and is to be used all the same.
    Wrong { found: u64 },
}

/// Whether a file of `found` bytes can be this memory.
pub(super) fn check_length(
    file: &File,
    name: &str,
    found: u64,
    expected: u64,
    keep: &KeepOptions,
) -> Result<Length, ServeError> {
    if found == 0 {
        return Ok(Length::Empty);
    }
    if found == expected {
        return Ok(Length::Whole);
    }
    let said = read_slots(|place, bytes| file.read_exact_at(bytes, place as u64).is_ok());
    match said {
        Some((_, header)) if header.total == expected && keep.accept_torn => Ok(Length::Wrong { found }),
        Some((_, header)) if header.total == expected => {
            let path = name.to_owned();
            Err(ServeError::NotWhole { path, why: NotWhole::Length { found, expected } })
        }
        Some((_, header)) => {
            Err(ServeError::OtherShape { path: name.to_owned(), found: header.total, expected })
        }
        None => Err(ServeError::OtherShape { path: name.to_owned(), found, expected }),
    }
}

/// Under which no machine was ever started.
const NO_BOOT: BootId = BootId(0);

/// Who writes how the memory is left.
#[derive(Debug)]
pub(super) struct Keeper {
    name: String,
    file: Arc<File>,
    kind: Kind,
    layout: Layout,
    /// The first block, with the header.
    block: RacyMemory,
    /// The slot that counts.
    current: usize,
    header: Header,
    /// What the header said before, if the memory was closed.
    closed: Option<Header>,
    /// This start of the machine.
    boot: BootId,
}

/// What a look at the memory brought.
enum Look {
    Fresh,
    SameBoot,
    Closed,
    NotWhole(NotWhole, Damage),
}

impl Keeper {
    /// Looks how the memory was left, takes it over, and says so in it.
    pub(super) fn take(
        (file, name): (&Arc<File>, &str),
        (kind, layout, block): (Kind, &Layout, RacyMemory),
        regions: &Regions,
        length: Length,
        keep: &KeepOptions,
    ) -> Result<(Self, Found), ServeError> {
        let metadata = file.metadata().map_err(ServeError::memory(name))?;
        let boot = keep.boot.unwrap_or_else(BootId::of_this_machine);
        let said = read_slots(|place, bytes| {
            block.read(place, bytes);
            true
        });
        if let Some((_, said)) = said.filter(|(_, said)| said.total != layout.total) {
            // A device has no length by which that shows before.
            let (found, expected) = (said.total, layout.total);
            return Err(ServeError::OtherShape { path: name.to_owned(), found, expected });
        }
        let piece_bytes = header::piece_bytes(layout);
        let mut keeper = Self {
            name: name.to_owned(),
            file: Arc::clone(file),
            kind,
            layout: layout.clone(),
            block,
            current: said.map_or(1, |(slot, _)| slot),
            header: Header {
                state: State::InUse,
                sequence: said.map_or(0, |(_, header)| header.sequence),
                opening: said.map_or(0, |(_, header)| header.opening),
                boot,
                file: if kind == Kind::Device {
                    (metadata.rdev(), 0)
                } else {
                    (metadata.dev(), metadata.ino())
                },
                total: layout.total,
                piece_bytes,
                pieces: header::pieces(layout, piece_bytes).count() as u64,
                sums: 0,
            },
            closed: None,
            boot,
        };
        let found = match keeper.look(said.map(|(_, header)| header), regions, length, keep.last) {
            Look::Fresh | Look::SameBoot => Found::SameBoot,
            Look::Closed => {
                keeper.closed = said.map(|(_, header)| header);
                let is_same = keeper.closed.is_some_and(|header| header.boot == boot);
                if is_same { Found::SameBoot } else { Found::OtherBoot }
            }
            Look::NotWhole(why, damage) if keep.accept_torn => {
                tracing::warn!("{name} is taken although {why}");
                // Whoever is killed before it has been put right leaves it as torn as it was.
                keeper.header.boot = NO_BOOT;
                Found::Torn(damage)
            }
            Look::NotWhole(why, _) => return Err(ServeError::NotWhole { path: name.to_owned(), why }),
        };
        let before = keeper.header.opening;
        keeper.header.opening = keep.opening.map_or(before + 1, |opening| opening.max(before));
        let header = keeper.header;
        // What is in use already need not be made so again, and there may be much that would be written.
        let is_noted = said.is_some_and(|(_, said)| said.state == State::InUse && said.boot == boot);
        keeper.write(header, !is_noted)?;
        Ok((keeper, found))
    }

    fn look(
        &self,
        said: Option<Header>,
        regions: &Regions,
        length: Length,
        last: Option<LastOpening>,
    ) -> Look {
        let unknown = |why| Look::NotWhole(why, Damage::default());
        let Some(said) = said else {
            let is_empty = length == Length::Empty || self.is_zero(regions);
            return match last.filter(|last| last.number > 0) {
                Some(last) if is_empty => unknown(NotWhole::Older { found: 0, expected: last.number }),
                None if is_empty => Look::Fresh,
                _ => unknown(NotWhole::NoHeader),
            };
        };
        if let Some(last) = last.filter(|last| said.opening < last.number) {
            // It may be whole, but what the pool's other memory leads to has changed since.
            return unknown(NotWhole::Older { found: said.opening, expected: last.number });
        }
        if said.state == State::InUse {
            let was_closed = last.is_some_and(|last| last.was_closed && last.number == said.opening);
            return match said {
                _ if said.boot != self.header.boot => unknown(NotWhole::InUse),
                _ if was_closed || said.file != self.header.file => unknown(NotWhole::Copied),
                _ => Look::SameBoot,
            };
        }
        if (said.total, said.piece_bytes, said.pieces)
            != (self.header.total, self.header.piece_bytes, self.header.pieces)
        {
            return unknown(NotWhole::Checksums);
        }
        self.verify(&said, regions, length)
    }

    /// Compares closed memory with its checksums.
    fn verify(&self, said: &Header, regions: &Regions, length: Length) -> Look {
        let mut sums = vec![0; at(said.pieces) * 8];
        self.block.read(SUMS_AT, &mut sums);
        if xxh3_64(&sums) != said.sums {
            return Look::NotWhole(NotWhole::Checksums, Damage::default());
        }
        let stored = sums.chunks_exact(8).map(|sum| sum.try_into().map_or(0, u64::from_le_bytes));
        let failed: Vec<Piece> = self
            .sums(regions)
            .zip(stored)
            .filter(|((_, sum), s)| sum != s)
            .map(|((piece, _), _)| piece)
            .collect();
        let pieces = said.pieces;
        let why = match (failed.first(), length) {
            (_, Length::Wrong { found }) => NotWhole::Length { found, expected: self.layout.total },
            (Some(first), _) => NotWhole::Pieces {
                failed: failed.len() as u64,
                pieces,
                region: first.region,
                offset: first.offset,
            },
            (None, _) => return Look::Closed,
        };
        Look::NotWhole(why, Damage { pieces, failed })
    }

    /// The checksum of each piece.
    fn sums<'a>(&'a self, regions: &'a Regions) -> impl Iterator<Item = (Piece, u64)> + 'a {
        let mut buffer = vec![0; 64 << 10];
        header::pieces(&self.layout, self.header.piece_bytes).zip(1..).map(move |(piece, number)| {
            let mut hash = Xxh3::with_seed(number);
            each_part(regions, piece, &mut buffer, |part| hash.update(part));
            (piece, hash.digest())
        })
    }

    fn is_zero(&self, regions: &Regions) -> bool {
        let mut buffer = vec![0; 64 << 10];
        header::pieces(&self.layout, self.header.piece_bytes).all(|piece| {
            let mut is_zero = true;
            each_part(regions, piece, &mut buffer, |part| is_zero &= part.iter().all(|byte| *byte == 0));
            is_zero
        })
    }

    /// Nobody touches the memory any more: it can be told apart from what it should not become.
    pub(super) fn close(&mut self, regions: &Regions) -> Result<(), ServeError> {
        let sums: Vec<u8> = self.sums(regions).flat_map(|(_, sum)| sum.to_le_bytes()).collect();
        self.put(SUMS_AT, &sums)?;
        self.make_durable(Some(regions))?;
        self.write(Header { state: State::Clean, sums: xxh3_64(&sums), ..self.header }, true)
    }

    /// The server has started: its tables are what they should be, whatever they were.
    pub(super) fn started(&mut self) -> Result<(), ServeError> {
        if self.header.boot == self.boot {
            return Ok(());
        }
        self.write(Header { boot: self.boot, ..self.header }, true)
    }

    /// The server has not started after all. Closed memory that nothing has been stored in is closed again.
    pub(super) fn put_back(&mut self, regions: &Regions) {
        let Some(closed) = self.closed else { return };
        if matches!(self.verify(&closed, regions, Length::Whole), Look::Closed) {
            let sequence = self.header.sequence;
            if let Err(error) = self.write(Header { sequence, ..closed }, true) {
                tracing::warn!("{error}");
            }
        }
    }

    /// Writes a header to the slot that does not count, from when on it does.
    fn write(&mut self, header: Header, durably: bool) -> Result<(), ServeError> {
        let header = Header { sequence: self.header.sequence + 1, ..header };
        let (next, previous) = (1 - self.current, self.current);
        self.put(slot_at(next), &header.encode())?;
        if durably {
            self.make_durable(None)?;
        }
        (self.current, self.header) = (next, header);
        self.put(slot_at(previous), &[0; ENCODED_BYTES])?;
        if durably {
            self.make_durable(None)?;
        }
        Ok(())
    }

    /// Writes into the first block.
    fn put(&self, place: usize, bytes: &[u8]) -> Result<(), ServeError> {
        match self.kind {
            // A full disk is an error of a call; of a store it would be the end of the process.
            Kind::Memory | Kind::Other => {
                self.file.write_all_at(bytes, place as u64).map_err(ServeError::memory(&self.name))
            }
            Kind::Huge | Kind::Device => {
                self.block.write(place, bytes);
                Ok(())
            }
        }
    }

    /// When this returns, the first block is what it is now, whatever happens to the machine; and so are these regions.
    fn make_durable(&self, regions: Option<&Regions>) -> Result<(), ServeError> {
        let done: io::Result<()> = match self.kind {
            // It lasts as long as the machine is up, and so does all of it.
            Kind::Memory | Kind::Huge => Ok(()),
            Kind::Other => self.file.sync_all(),
            Kind::Device => {
                let mapped = regions.into_iter().flat_map(|regions| {
                    self.layout.regions.iter().map(|mapped| regions.region(mapped.region))
                });
                mapped.chain([&self.block]).try_for_each(RacyMemory::write_back)
            }
        };
        done.map_err(ServeError::memory(&self.name))
    }
}

/// Brings a piece in parts that fit the buffer.
fn each_part(regions: &Regions, piece: Piece, buffer: &mut [u8], mut take: impl FnMut(&[u8])) {
    let memory = regions.region(piece.region);
    let (begin, end) = (at(piece.offset), at(piece.offset + piece.bytes));
    for from in (begin..end).step_by(buffer.len()) {
        let part = &mut buffer[..(end - from).min(64 << 10)];
        memory.read(from, part);
        take(part);
    }
}

#[cfg(test)]
mod tests;
