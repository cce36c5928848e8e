//! Where a server's bytes are: one memfd, file or device that holds its gates and all its regions.
//!
//! ```text
//! 0        gates
//! 1 MiB    of kept memory: how it was left, see `kept`
//! 2 MiB    the server's tables, then the board, lock memory, main memory; each on a multiple of 2 MiB (or of the
//!          file system's block, if that is larger)
//! ```
//!
//! Tables come first, so that they are found whatever the sizes of the rest: memory of another shape is recognised and
//! refused. What is in a file or device stays when the server ends, and the next one takes it over.
//!
//! **Large pages.** Anonymous memory comes from pages that were set aside as huge, if there are enough. Otherwise it is mapped,
//! filled with large pages as far as the system finds some ([`crate::pages`]), and only then reserved: memory that is first
//! reserved gets small ones.

use super::ServeError;
use super::kept::{self, HEADER_END, KeepOptions, Keeper, Length};
use crate::addr::RegionId;
use crate::mem::RacyMemory;
use crate::pages::available_bytes;
use crate::region::RegionSpec;
use crate::status::Pages;
use crate::transport::host::gates::{GATES_BYTES, Gates, Holder};
use crate::transport::host::regions::{Regions, at};
use crate::transport::line::frames::{Extent, Mapped};
use crate::transport::shm::process::Process;
use rustix::fs::{FallocateFlags, FlockOperation, MemfdFlags, SealFlags};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Where the regions begin: on pages of this size, where the system has them.
const ALIGN: u64 = 2 << 20;

/// What a server's memory is made of.
#[derive(Clone, Default, Debug)]
pub enum Backing {
    /// Anonymous memory: gone when the last process that maps it is.
    #[default]
    Memfd,
    /// This file (in a tmpfs, a hugetlbfs, any file system) or device (DAX). It is kept.
    Path(PathBuf),
    /// Anonymous memory ([`anonymous_memory`]) that the process has inherited, by the number of its descriptor. Whoever started us keeps it, and
    /// lets no other server have it before this one has ended.
    Inherited(i32),
}

/// What a server's clients get to see of its memory, for as long as it serves.
#[derive(Debug)]
pub(crate) struct Share {
    pub(crate) layout: Layout,
    /// What is mapped, here and by clients. It has no part in the lock, which ends with the server, not with the last mapping.
    pub(crate) descriptor: File,
    pub(crate) pages: Pages,
    /// Who says in kept memory how it is left.
    pub(super) keeper: Option<Keeper>,
    _locked: Arc<File>,
}

/// What lies where.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Layout {
    pub(crate) gates: Extent,
    pub(crate) regions: Vec<Mapped>,
    pub(super) total: u64,
}

impl Layout {
    /// Lays out regions in blocks of `block` bytes.
    fn new(specs: &[RegionSpec], block: u64) -> Self {
        let align = ALIGN.max(block);
        let gates = Extent { offset: 0, bytes: (GATES_BYTES as u64).next_multiple_of(block) };
        let mut order: Vec<&RegionSpec> = specs.iter().collect();
        order.sort_by_key(|spec| match spec.id {
            RegionId::META => 0,
            RegionId::MAIN => u8::MAX,
            other => other.get() + 1,
        });
        let mut end = gates.bytes;
        let mut regions = Vec::new();
        for spec in order {
            let offset = end.next_multiple_of(align);
            let extent = Extent { offset, bytes: spec.bytes.next_multiple_of(block) };
            end = offset + extent.bytes;
            regions.push(Mapped { region: spec.id, extent });
        }
        Self { gates, regions, total: end }
    }

    fn extents(&self) -> impl Iterator<Item = Extent> + '_ {
        std::iter::once(self.gates).chain(self.regions.iter().map(|mapped| mapped.extent))
    }

    /// Gates and, in kept memory, the header behind them.
    fn first_block(&self) -> Extent {
        Extent { offset: 0, bytes: self.gates.bytes.max(HEADER_END as u64) }
    }
}

/// Makes memory for these regions, or takes over what is there.
pub(crate) fn open(
    backing: &Backing,
    keep: &KeepOptions,
    specs: &[RegionSpec],
) -> Result<(Regions, Gates, Share), ServeError> {
    match backing {
        Backing::Path(path) => open_in(open_locked(path)?, &path.display().to_string(), Some(keep), specs),
        Backing::Inherited(number) => {
            let name = format!("descriptor {number}");
            let file = File::options().read(true).write(true).open(format!("/proc/self/fd/{number}"));
            open_in(file.map_err(ServeError::memory(&name))?, &name, None, specs)
        }
        Backing::Memfd => {
            if let Some(file) = huge_memfd(specs) {
                match open_in(file, "huge pages", None, specs) {
                    Err(error) => tracing::warn!("{error}; using small pages instead"),
                    opened => return opened,
                }
            }
            let file = memfd(MemfdFlags::empty()).map_err(ServeError::memory("a memfd"))?;
            open_in(file, "a memfd", None, specs)
        }
    }
}

fn open_in(
    file: File,
    name: &str,
    keep: Option<&KeepOptions>,
    specs: &[RegionSpec],
) -> Result<(Regions, Gates, Share), ServeError> {
    let failed = ServeError::memory(name);
    let file = Arc::new(file);
    let metadata = file.metadata().map_err(&failed)?;
    let is_device = metadata.file_type().is_char_device();
    let block = if is_device { ALIGN } else { block_bytes(&file).map_err(&failed)? };
    let layout = Layout::new(specs, block);
    let length = match keep {
        Some(keep) if !is_device => kept::check_length(&file, name, metadata.len(), layout.total, keep)?,
        Some(_) => Length::Whole,
        None if ![0, layout.total].contains(&metadata.len()) => {
            let (found, expected) = (metadata.len(), layout.total);
            return Err(ServeError::OtherShape { path: name.to_owned(), found, expected });
        }
        None => Length::Empty,
    };
    if !is_device {
        check_room(&file, &layout, name)?;
        if length != Length::Whole {
            file.set_len(layout.total).map_err(&failed)?;
        }
    }
    let kind = if is_device { Kind::Device } else { Kind::of(&file).map_err(&failed)? };
    if keep.is_none() {
        // Nobody who has the descriptor can take the memory away from the others.
        seal(&file).map_err(&failed)?;
    }
    let descriptor = reopen(&file).map_err(&failed)?;
    let mut regions = Regions::default();
    for Mapped { region, extent } in &layout.regions {
        let memory = map(&descriptor, *extent, true).map_err(&failed)?;
        if kind == Kind::Memory {
            // If not all of it can be had, the reservation says so.
            let _ = memory.populate();
        }
        regions.insert(*region, memory);
    }
    if !is_device {
        reserve(&file, layout.extents(), name)?;
    }
    let mut keeper = None;
    if let Some(keep) = keep {
        if !is_device {
            reserve(&file, [layout.first_block()], name)?;
        }
        let block = map(&descriptor, layout.first_block(), true).map_err(&failed)?;
        let (taken, found) = Keeper::take((&file, name), (kind, &layout, block), &regions, length, keep)?;
        regions.set_found(found);
        keeper = Some(taken);
    }
    let pages = pages(&descriptor, kind, block, layout.extents().map(|extent| extent.bytes).sum());
    let hint = match pages {
        Pages::Small { .. } => "; large ones are faster: set some aside (sysctl vm.nr_hugepages)",
        _ => "",
    };
    tracing::info!("memory of {} MiB: {pages}{hint}", layout.total >> 20);
    let is_same_boot = regions.is_of_same_boot();
    // When this is done, the clients of an earlier server on this memory cannot touch it any more.
    let gates = Gates::take_over(map(&descriptor, layout.gates, true).map_err(&failed)?, |pid, started| {
        // Another boot's processes are gone; one of ours may have such a number.
        let process = if is_same_boot { Process::find(pid, started) } else { None };
        process.map(|process| Arc::new(process) as Arc<dyn Holder>)
    });
    Ok((regions, gates, Share { layout, descriptor, pages, keeper, _locked: file }))
}

/// Memory for these regions, for servers that are to [inherit](Backing::Inherited) it: in huge pages, if enough of them are set aside.
pub fn anonymous_memory(specs: &[RegionSpec]) -> Result<File, ServeError> {
    if let Some(file) = huge_memfd(specs) {
        let layout = Layout::new(specs, ALIGN);
        // Others may have taken them meanwhile.
        if file.set_len(layout.total).is_ok() && reserve(&file, layout.extents(), "huge pages").is_ok() {
            return Ok(file);
        }
    }
    memfd(MemfdFlags::empty()).map_err(ServeError::memory("a memfd"))
}

/// Fixes the size of anonymous memory, once.
fn seal(file: &File) -> io::Result<()> {
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    if !rustix::fs::fcntl_get_seals(file)?.contains(seals) {
        rustix::fs::fcntl_add_seals(file, seals)?;
    }
    Ok(())
}

/// Maps a part of a server's memory.
pub(crate) fn map(file: impl AsFd, extent: Extent, writable: bool) -> io::Result<RacyMemory> {
    RacyMemory::map(file, extent.offset, at(extent.bytes), writable)
}

fn memfd(flags: MemfdFlags) -> io::Result<File> {
    let flags = flags | MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    Ok(File::from(rustix::fs::memfd_create("farwood", flags)?))
}

/// Memory in huge pages, if as many as these regions need are set aside and free.
fn huge_memfd(specs: &[RegionSpec]) -> Option<File> {
    let free = std::fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages").ok()?;
    let free: u64 = free.trim().parse().ok()?;
    let needed: u64 = Layout::new(specs, ALIGN).extents().map(|extent| extent.bytes).sum();
    (free >= needed / ALIGN).then(|| memfd(MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB).ok()).flatten()
}

/// Opens or creates a file that no other server uses.
fn open_locked(path: &Path) -> Result<File, ServeError> {
    let name = path.display().to_string();
    let file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path)
        .map_err(ServeError::memory(&name))?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(ServeError::MemoryInUse { path: path.to_owned() }),
        Err(error) => Err(ServeError::memory(&name)(error.into())),
    }
}

/// The same file through a descriptor that shares nothing with the first.
fn reopen(file: &File) -> io::Result<File> {
    File::options().read(true).write(true).open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// The unit in which the file can be mapped: a page, or a huge one.
fn block_bytes(file: &File) -> io::Result<u64> {
    let block = rustix::fs::fstatfs(file)?.f_bsize;
    Ok(u64::try_from(block).unwrap_or(0).next_power_of_two().max(4096))
}

/// Looks whether the machine has so much memory.
fn check_room(file: &File, layout: &Layout, name: &str) -> Result<(), ServeError> {
    let failed = ServeError::memory(name);
    let needed: u64 = layout.extents().map(|extent| extent.bytes).sum();
    let missing = needed.saturating_sub(file.metadata().map_err(&failed)?.blocks() * 512);
    if Kind::of(file).map_err(&failed)? == Kind::Memory && missing > 0 {
        // Asking for it would not fail: the system would end processes until there is enough.
        let available = available_bytes();
        if missing > available {
            return Err(ServeError::NotEnoughMemory { missing, available });
        }
    }
    Ok(())
}

/// Makes sure that all bytes are there: a full file system shows now, not as a crash in the middle of a verb.
fn reserve(file: &File, extents: impl IntoIterator<Item = Extent>, name: &str) -> Result<(), ServeError> {
    let failed = ServeError::memory(name);
    for extent in extents {
        rustix::fs::fallocate(file, FallocateFlags::empty(), extent.offset, extent.bytes)
            .map_err(|error| failed(error.into()))?;
    }
    Ok(())
}

/// What a file's bytes are in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    /// The machine's memory (tmpfs, memfd).
    Memory,
    /// Pages of it that were set aside (hugetlbfs).
    Huge,
    /// A DAX device.
    Device,
    /// Something slower.
    Other,
}

impl Kind {
    fn of(file: &File) -> io::Result<Self> {
        const TMPFS_MAGIC: u64 = 0x0102_1994;
        const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;
        let magic = u64::try_from(rustix::fs::fstatfs(file)?.f_type).unwrap_or(0) & u64::from(u32::MAX);
        Ok(match magic {
            TMPFS_MAGIC => Self::Memory,
            HUGETLBFS_MAGIC => Self::Huge,
            _ => Self::Other,
        })
    }
}

/// Which pages were obtained.
fn pages(file: &File, kind: Kind, block: u64, of_bytes: u64) -> Pages {
    match kind {
        Kind::Huge => Pages::Huge { page_bytes: block },
        Kind::Device => Pages::Device {},
        Kind::Memory | Kind::Other => match large_bytes(file) {
            0 => Pages::Small { page_bytes: block },
            large_bytes => Pages::Transparent { large_bytes, of_bytes },
        },
    }
}

/// How many bytes of a file this process maps by large pages.
fn large_bytes(file: &File) -> u64 {
    let (Ok(metadata), Ok(smaps)) = (file.metadata(), std::fs::read_to_string("/proc/self/smaps")) else {
        return 0;
    };
    mapped_large(&smaps, metadata.ino())
}

/// The same, from what the system says of all mappings: for each a line with its file's inode, then one for each kind of page.
fn mapped_large(smaps: &str, inode: u64) -> u64 {
    let (mut is_ours, mut kib) = (false, 0);
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        let first = words.next().unwrap_or_default();
        match first.strip_suffix(':') {
            Some("ShmemPmdMapped" | "FilePmdMapped") if is_ours => {
                kib += words.next().and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0);
            }
            Some(_) => {}
            None => is_ours = words.nth(3).and_then(|word| word.parse().ok()) == Some(inode),
        }
    }
    kib << 10
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::region::Permissions;
    use std::sync::atomic::Ordering;

    fn specs() -> Vec<RegionSpec> {
        let sizes = [(RegionId::MAIN, 10 << 20), (RegionId::LOCK, 4096), (RegionId::META, 5000)];
        sizes.map(|(id, bytes)| RegionSpec { id, bytes, permissions: Permissions::ALL }).to_vec()
    }

    #[test]
    fn nothing_overlaps_and_tables_come_first() {
        for block in [4096, 2 << 20, 1 << 30] {
            let layout = Layout::new(&specs(), block);
            let mut end = 0;
            for extent in layout.extents() {
                assert!(extent.offset >= end && extent.offset % block == 0 && extent.bytes % block == 0);
                end = extent.offset + extent.bytes;
            }
            assert_eq!(layout.total, end);
            assert_eq!(layout.regions[0].region, RegionId::META);
            assert_eq!(layout.regions[2].region, RegionId::MAIN);
        }
    }

    #[test]
    fn large_pages_are_counted_for_the_file_alone() {
        let smaps = "7f0000000000-7f0000400000 rw-s 00000000 00:01 77    /memfd:farwood (deleted)\nSize: 4096 kB\n\
            FilePmdMapped:        0 kB\nShmemPmdMapped:     2048 kB\nVmFlags: rd wr\n\
            7f0000400000-7f0000800000 rw-s 00400000 00:01 77 /memfd:farwood (deleted)\nShmemPmdMapped: 4096 kB\n\
            7f0000800000-7f0000a00000 rw-s 00000000 00:01 78 /memfd:other (deleted)\nShmemPmdMapped: 2048 kB\n";
        assert_eq!(mapped_large(smaps, 77), 6144 << 10);
        assert_eq!(mapped_large(smaps, 79), 0);
    }

    #[test]
    fn more_memory_than_there_is_is_refused_before_it_is_taken() {
        let mut greedy = specs();
        greedy[0].bytes = 1 << 50;
        assert!(matches!(
            open(&Backing::Memfd, &KeepOptions::default(), &greedy),
            Err(ServeError::NotEnoughMemory { .. })
        ));
        assert!(open(&Backing::Memfd, &KeepOptions::default(), &specs()).is_ok());
    }

    #[test]
    fn inherited_memory_goes_from_one_server_to_the_next() {
        let file = anonymous_memory(&specs()).unwrap();
        let backing = Backing::Inherited(file.as_raw_fd());
        let (regions, _, share) = open(&backing, &KeepOptions::default(), &specs()).unwrap();
        regions.region(RegionId::LOCK).word(8).store(77, Ordering::SeqCst);
        drop((regions, share));
        let (regions, ..) = open(&backing, &KeepOptions::default(), &specs()).unwrap();
        assert_eq!(regions.region(RegionId::LOCK).word(8).load(Ordering::SeqCst), 77);
        let mut other = specs();
        other[0].bytes *= 2;
        assert!(matches!(
            open(&backing, &KeepOptions::default(), &other),
            Err(ServeError::OtherShape { .. })
        ));
        assert!(open(&Backing::Inherited(-1), &KeepOptions::default(), &specs()).is_err());
    }

    #[test]
    fn kept_memory_is_one_servers_at_a_time_and_has_one_shape() {
        let path = std::env::temp_dir().join(format!("farwood-backing-{}.mem", std::process::id()));
        let backing = Backing::Path(path.clone());
        let (regions, _, share) = open(&backing, &KeepOptions::default(), &specs()).unwrap();
        regions.region(RegionId::LOCK).word(8).store(77, Ordering::SeqCst);
        assert!(matches!(
            open(&backing, &KeepOptions::default(), &specs()),
            Err(ServeError::MemoryInUse { .. })
        ));
        // What a client holds does not keep the next server out.
        let clients = share.descriptor.try_clone().unwrap();
        drop(share);
        let (regions, _, second) = open(&backing, &KeepOptions::default(), &specs()).unwrap();
        assert_eq!(regions.region(RegionId::LOCK).word(8).load(Ordering::SeqCst), 77);
        drop((regions, second, clients));
        let mut other = specs();
        other[0].bytes *= 2;
        assert!(matches!(
            open(&backing, &KeepOptions::default(), &other),
            Err(ServeError::OtherShape { .. })
        ));
        std::fs::remove_file(&path).unwrap();
    }
}
