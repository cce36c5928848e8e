//! Pages: how the operating system backs memory, and how much of it there is.
//!
//! Random access to gigabytes in small pages misses the address translation cache nearly every time, which costs half as much again as
//! the access itself; so whatever is large asks for large pages. They may be refused, which is as good as not asking.

use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::ffi::c_void;
use std::io;
use std::ptr;

/// From so many bytes on, large pages are worth asking for.
const WORTHWHILE: usize = 4 << 20;
const LARGE: usize = 2 << 20;
const SMALL: usize = 4096;
/// So much is made of large pages by one call: each has the system settle its books first, and what comes after a failure stays as it is.
const COLLAPSED_AT_ONCE: usize = 1 << 30;

/// Asks for large pages for this memory, if it is large; best before it is touched. What it costs is that memory is taken 2 MiB at a time.
pub(crate) fn prefer_large(memory: *const u8, bytes: usize) {
    let start = memory.addr().next_multiple_of(SMALL);
    let end = memory.addr().saturating_add(bytes) / SMALL * SMALL;
    if bytes >= WORTHWHILE {
        let first = memory.with_addr(start).cast_mut();
        // SAFETY: the advice changes how whole pages are backed, not what they hold, whoever's they are.
        let _ = unsafe { rustix::mm::madvise(first.cast(), end - start, Advice::LinuxHugepage) };
    }
}

/// Where to map a file so that large pages can be used, which have to lie in memory as they lie in the file: an address from which so
/// many bytes were free a moment ago. Null, for the system to choose, where that does not matter.
pub(crate) fn aligned_hole(bytes: usize) -> *mut c_void {
    if bytes < WORTHWHILE {
        return ptr::null_mut();
    }
    let (room, flags) = (bytes + LARGE, MapFlags::PRIVATE | MapFlags::NORESERVE);
    // SAFETY: a new mapping at an address of the system's choice touches no memory of ours, and is gone before anybody knows of it.
    let found = unsafe {
        rustix::mm::mmap_anonymous(ptr::null_mut(), room, ProtFlags::empty(), flags)
            .and_then(|hole| rustix::mm::munmap(hole, room).map(|()| hole))
    };
    found.map_or(ptr::null_mut(), |hole| hole.map_addr(|address| address.next_multiple_of(LARGE)))
}

/// Makes sure that every page of a mapping is there, in large pages where the system finds some.
///
/// By itself the system gives large pages to shared memory only where an administrator allowed it (`shmem_enabled`), which is rare. Asking
/// it to collapse what is there works everywhere (Linux 6.1 and later), and what is not there is cleared on the way: so one page of
/// each large one is made, then the large one from it.
///
/// # Safety
/// The range is mapped, for writing, and stays so during the call. Contents stay what they are.
pub(crate) unsafe fn populate(memory: *mut u8, bytes: usize) -> io::Result<()> {
    // SAFETY: parts of the range that the caller vouches for.
    let fill = |at: usize, bytes| unsafe {
        rustix::mm::madvise(memory.with_addr(at).cast(), bytes, Advice::LinuxPopulateWrite)
    };
    let start = memory.addr().next_multiple_of(LARGE);
    let end = (memory.addr() + bytes) / LARGE * LARGE;
    for step in (start..end).step_by(COLLAPSED_AT_ONCE) {
        let step_end = end.min(step + COLLAPSED_AT_ONCE);
        for page in (step..step_end).step_by(LARGE) {
            fill(page, SMALL)?;
        }
        // SAFETY: as above.
        unsafe { libc::madvise(memory.with_addr(step).cast(), step_end - step, libc::MADV_COLLAPSE) };
    }
    Ok(fill(memory.addr(), bytes)?)
}

/// How much memory this process can have before others suffer, as far as the system says.
pub fn available_bytes() -> u64 {
    let number = |text: &str| text.split_whitespace().next().and_then(|n| n.parse::<u64>().ok());
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let meminfo = read("/proc/meminfo");
    let kib = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:")).and_then(number);
    let machine = kib.map_or(u64::MAX, |kib| kib.saturating_mul(1024));
    let group = |name: &str| number(&read(&format!("/sys/fs/cgroup/{name}")));
    let limit =
        group("memory.max").map_or(u64::MAX, |max| max.saturating_sub(group("memory.current").unwrap_or(0)));
    machine.min(limit)
}

#[cfg(test)]
mod tests {
    use crate::mem::RacyMemory;
    use rustix::fs::MemfdFlags;
    use std::fs::File;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn populating_brings_every_page_and_keeps_what_is_there() {
        const BYTES: usize = 9 << 20;
        let file = File::from(rustix::fs::memfd_create("pages", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(BYTES as u64).unwrap();
        let memory = RacyMemory::map(&file, 0, BYTES, true).unwrap();
        let places: Vec<usize> = (0..BYTES).step_by(700_008).collect();
        for at in &places {
            memory.write(*at, &at.to_le_bytes());
        }
        memory.populate().unwrap();
        assert!(file.metadata().unwrap().blocks() * 512 >= BYTES as u64, "some pages are missing");
        let other = RacyMemory::map(&file, 0, BYTES, false).unwrap();
        for at in places {
            let (mut here, mut there) = ([0; 8], [0; 8]);
            memory.read(at, &mut here);
            other.read(at, &mut there);
            assert_eq!((here, there), (at.to_le_bytes(), at.to_le_bytes()));
        }
    }
}
