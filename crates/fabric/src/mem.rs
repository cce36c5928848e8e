//! Memory that several parties touch at once: the one audited place where bytes are copied under races.
//!
//! Racing on plain memory is undefined behaviour in Rust, so every access here is either an atomic of one word or
//! happens in inline assembly, outside the language's memory model. A loop of relaxed word loads would do, but costs
//! three times a `memcpy` on cold memory; the assembly moves 64 bytes a step and costs the same as one.
//!
//! What the copies promise (rule 2 of the contract in [`crate::transport`]): aligned 8-byte words never tear, the part
//! of a write that lies in one word is atomic and touches only its own bytes, and nothing is said about the order of
//! words. On x86-64 the 16- and 32-byte moves are split by the hardware at cache-line boundaries only, which are multiples of 8
//! here because both ends of the racy side are word-aligned; `farwood`'s conformance suite looks for torn words.

use crate::pages;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::alloc::{Layout, alloc, dealloc};
use std::fmt;
use std::io;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// A block of memory whose words may be read and written by any thread at any time.
pub struct RacyMemory {
    base: NonNull<AtomicU64>,
    bytes: usize,
    origin: Origin,
}

/// Where a block came from, and so how it is given back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Origin {
    Heap,
    Mapped,
}

// SAFETY: the memory is owned by the value and every access goes through atomics or assembly (see the module text).
unsafe impl Send for RacyMemory {}
// SAFETY: as above; all methods take `&self` and are made to race.
unsafe impl Sync for RacyMemory {}

/// Words of a block, where they are. Each look at one is a load by itself: who looks twice may see two things.
#[derive(Clone, Copy, Debug)]
pub struct Words<'a>(&'a [AtomicU64]);

impl<'a> Words<'a> {
    /// Words that are somewhere else.
    pub(crate) fn of(words: &'a [AtomicU64]) -> Self {
        Self(words)
    }
}

impl Words<'_> {
    /// How many bytes they have.
    #[inline]
    pub fn len(self) -> usize {
        self.0.len() * 8
    }

    /// Whether there are none.
    #[inline]
    pub fn is_empty(self) -> bool {
        self.0.is_empty()
    }

    /// The word at byte `at`, a multiple of 8; 0 if there is none.
    #[inline]
    pub fn get(self, at: usize) -> u64 {
        debug_assert!(at % 8 == 0, "a word is 8-byte aligned");
        self.0.get(at / 8).map_or(0, |word| word.load(Ordering::Acquire))
    }

    /// So many words from byte `at` on, a multiple of 8, or as many as there are.
    #[inline]
    pub fn from(self, at: usize, count: usize) -> impl Iterator<Item = u64> {
        let words = self.0.get(at / 8..).unwrap_or_default();
        words[..count.min(words.len())].iter().map(|word| word.load(Ordering::Acquire))
    }

    /// Copies all of them in the place of what `into` held.
    #[inline]
    pub fn copy_to(self, into: &mut Vec<u8>) {
        into.resize(self.len(), 0);
        // SAFETY: both sides have that many bytes and do not overlap, since `into` is exclusively borrowed; words are aligned.
        unsafe { copy_words(self.0.as_ptr().cast(), into.as_mut_ptr(), self.0.len()) };
        fence(Ordering::Acquire);
    }
}

/// One side of a copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    /// Where bytes come from.
    Source,
    /// Where they go.
    Destination,
}

/// Where blocks begin: a page, so that lines and pages of two blocks never mix.
const ALIGN: usize = 4096;
const LINE: usize = 64;

impl RacyMemory {
    /// Zeroed memory of at least `bytes` bytes, rounded up to whole lines; `None` if there is not enough.
    pub fn zeroed(bytes: usize) -> Option<Self> {
        let bytes = bytes.max(1).checked_next_multiple_of(LINE)?;
        let layout = Layout::from_size_align(bytes, ALIGN).ok()?;
        // SAFETY: the layout has a non-zero size.
        let base = NonNull::new(unsafe { alloc(layout) })?;
        // Before it is touched: memory that is there already stays as it is.
        pages::prefer_large(base.as_ptr(), bytes);
        // SAFETY: that many bytes were just allocated.
        unsafe { base.write_bytes(0, bytes) };
        Some(Self { base: base.cast(), bytes, origin: Origin::Heap })
    }

    /// `bytes` bytes at `offset` of a file or device, shared with everybody who maps them; both are multiples of the page
    /// size. What is mapped for reading only must not be written: the processor would end the process.
    pub fn map(file: impl AsFd, offset: u64, bytes: usize, writable: bool) -> io::Result<Self> {
        if bytes == 0 || bytes % LINE != 0 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let protection = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        let wish = pages::aligned_hole(bytes);
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
        let base = unsafe { rustix::mm::mmap(wish, bytes, protection, MapFlags::SHARED, file, offset)? };
        let base = NonNull::new(base).ok_or(io::ErrorKind::AddrNotAvailable)?;
        let mapped = Self { base: base.cast(), bytes, origin: Origin::Mapped };
        // A child that inherited the mapping could write when its parent has been fenced.
        // SAFETY: the range is the mapping just made; nothing but a fork is affected.
        unsafe { rustix::mm::madvise(base.as_ptr(), bytes, Advice::LinuxDontFork)? };
        pages::prefer_large(base.as_ptr().cast(), bytes);
        Ok(mapped)
    }

    /// Makes sure that every page is there by now, in large pages where the system finds some.
    pub fn populate(&self) -> io::Result<()> {
        // SAFETY: the range is this block's own memory.
        unsafe { pages::populate(self.base.as_ptr().cast(), self.bytes) }
    }

    /// Writes what processors' caches hold of a mapped device back to it: only that survives a power cut. (Stores of other processes
    /// included: caches are coherent.)
    pub fn write_back(&self) -> io::Result<()> {
        if !cfg!(target_arch = "x86_64") {
            return Err(io::ErrorKind::Unsupported.into());
        }
        // SAFETY: the range is this block's own memory.
        unsafe { write_back(self.base.as_ptr().cast(), self.bytes) };
        Ok(())
    }

    /// Where it begins, for those who make it known to a network card.
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base.cast()
    }

    /// How many bytes there are.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether there are none; there always are some.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    #[inline]
    fn check(&self, offset: usize, len: usize) {
        assert!(len <= self.bytes && offset <= self.bytes - len, "bytes beyond the end of a memory block");
    }

    /// The word at `offset`, which must be a multiple of 8 inside the block.
    #[inline]
    pub fn word(&self, offset: usize) -> &AtomicU64 {
        self.check(offset, 8);
        assert!(offset % 8 == 0, "a word is 8-byte aligned");
        // SAFETY: in bounds and aligned as just checked; the memory lives as long as `self` and is only accessed as
        // atomics or from assembly.
        unsafe { self.base.add(offset / 8).as_ref() }
    }

    /// The words of `len` bytes at `offset`, both multiples of 8 inside the block.
    #[inline]
    pub fn words(&self, offset: usize, len: usize) -> Words<'_> {
        self.check(offset, len);
        assert!(offset % 8 == 0 && len % 8 == 0, "a word is 8-byte aligned");
        // SAFETY: in bounds and aligned as just checked; as for `word`.
        Words(unsafe { std::slice::from_raw_parts(self.base.add(offset / 8).as_ptr(), len / 8) })
    }

    /// Masked compare-and-swap: if the word equals `compare` under `compare_mask`, its bits under `swap_mask` become
    /// those of `swap`. Returns the word as it was.
    pub fn masked_cas(
        &self,
        offset: usize,
        compare: u64,
        compare_mask: u64,
        swap: u64,
        swap_mask: u64,
    ) -> u64 {
        let word = self.word(offset);
        let mut seen = word.load(Ordering::Acquire);
        loop {
            if (seen ^ compare) & compare_mask != 0 {
                return seen;
            }
            let next = (seen & !swap_mask) | (swap & swap_mask);
            match word.compare_exchange_weak(seen, next, Ordering::SeqCst, Ordering::Acquire) {
                Ok(_) => return seen,
                Err(now) => seen = now,
            }
        }
    }

    /// Says that these bytes will be needed soon; of many, the first ones. What is out of bounds is left out.
    #[inline]
    pub fn expect(&self, offset: usize, len: usize) {
        const MOST: usize = 2048;
        let end = offset.saturating_add(len.min(MOST)).min(self.bytes);
        for at in (offset..end).step_by(LINE) {
            prefetch(self.base.as_ptr().cast::<u8>().wrapping_add(at));
        }
    }

    /// Copies the bytes at `offset` into `into`.
    #[inline]
    pub fn read(&self, offset: usize, into: &mut [u8]) {
        self.check(offset, into.len());
        let mut done = 0;
        let head = (8 - offset % 8) % 8;
        if head != 0 {
            done = head.min(into.len());
            let bytes = self.word(offset - offset % 8).load(Ordering::Relaxed).to_le_bytes();
            into[..done].copy_from_slice(&bytes[offset % 8..offset % 8 + done]);
        }
        let words = (into.len() - done) / 8;
        // SAFETY: both ranges are in bounds (checked above) and do not overlap, since `into` is exclusively borrowed
        // plain memory; the racy side starts word-aligned after the head.
        unsafe {
            let from = self.base.as_ptr().cast::<u8>().add(offset + done);
            copy_words(from, into.as_mut_ptr().add(done), words);
        }
        done += words * 8;
        if done < into.len() {
            let bytes = self.word(offset + done).load(Ordering::Relaxed).to_le_bytes();
            let tail = into.len() - done;
            into[done..].copy_from_slice(&bytes[..tail]);
        }
        fence(Ordering::Acquire);
    }

    /// Copies `from` to the bytes at `offset`.
    #[inline]
    pub fn write(&self, offset: usize, from: &[u8]) {
        self.check(offset, from.len());
        fence(Ordering::Release);
        let mut done = 0;
        let head = (8 - offset % 8) % 8;
        if head != 0 {
            done = head.min(from.len());
            self.write_within_word(offset, &from[..done]);
        }
        let words = (from.len() - done) / 8;
        // SAFETY: as in `read`, with the roles swapped; `from` is plain memory that nobody writes while borrowed.
        unsafe {
            let to = self.base.as_ptr().cast::<u8>().add(offset + done);
            copy_words(from.as_ptr().add(done), to, words);
        }
        done += words * 8;
        if done < from.len() {
            self.write_within_word(offset + done, &from[done..]);
        }
    }

    /// Copies between two blocks, either of which may be raced on. Where they are aligned differently, a word of one side is
    /// taken in two parts; `whole` says on which side that must not happen.
    pub fn copy_to(&self, offset: usize, to: &RacyMemory, to_offset: usize, len: usize, whole: Side) {
        self.check(offset, len);
        to.check(to_offset, len);
        if offset % 8 == 0 && to_offset % 8 == 0 && len % 8 == 0 {
            // SAFETY: in bounds, word-aligned on both sides; two blocks never overlap, and one block is only copied
            // onto itself forwards, for which a torn result is within the contract.
            unsafe {
                let from = self.base.as_ptr().cast::<u8>().add(offset);
                copy_words(from, to.base.as_ptr().cast::<u8>().add(to_offset), len / 8);
            }
            fence(Ordering::AcqRel);
            return;
        }
        let mut bounce = [0u8; 4096];
        let mut done = 0;
        while done < len {
            // Steps end where words of the side that matters end, so that none of them is taken in two parts.
            let at = match whole {
                Side::Source => offset + done,
                Side::Destination => to_offset + done,
            };
            let step = (len - done).min(bounce.len() - at % 8);
            self.read(offset + done, &mut bounce[..step]);
            to.write(to_offset + done, &bounce[..step]);
            done += step;
        }
    }

    /// Writes fewer than 8 bytes inside one word, atomically, leaving the word's other bytes to whoever writes them.
    fn write_within_word(&self, offset: usize, from: &[u8]) {
        let shift = offset % 8;
        debug_assert!(shift + from.len() <= 8, "the bytes lie in one word");
        let (mut value, mut mask) = ([0u8; 8], [0u8; 8]);
        value[shift..shift + from.len()].copy_from_slice(from);
        mask[shift..shift + from.len()].fill(0xff);
        self.masked_cas(offset - shift, 0, 0, u64::from_le_bytes(value), u64::from_le_bytes(mask));
    }
}

impl Drop for RacyMemory {
    fn drop(&mut self) {
        match self.origin {
            Origin::Heap => {
                let layout =
                    Layout::from_size_align(self.bytes, ALIGN).expect("the layout was valid when allocated");
                // SAFETY: allocated in `zeroed` with this layout, and nobody borrows it any more.
                unsafe { dealloc(self.base.as_ptr().cast(), layout) }
            }
            Origin::Mapped => {
                // SAFETY: mapped in `map` with this length, and nobody borrows it any more. If it fails, it stays mapped.
                let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
            }
        }
    }
}

impl fmt::Debug for RacyMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RacyMemory({} bytes)", self.bytes)
    }
}

/// Writes cache lines back to memory, and waits until they are there.
///
/// # Safety
/// The range is mapped.
#[cfg(target_arch = "x86_64")]
unsafe fn write_back(memory: *const u8, bytes: usize) {
    // The instruction keeps its order with stores before it and with fences.
    fence(Ordering::SeqCst);
    for at in (0..bytes).step_by(LINE) {
        // SAFETY: the line is in the caller's range, which starts on a page; every x86-64 processor has the instruction.
        unsafe { std::arch::x86_64::_mm_clflush(memory.wrapping_add(at)) };
    }
    fence(Ordering::SeqCst);
}

/// Where nobody has said how, it is not called: kept memory on a device is never closed there.
///
/// # Safety
/// None is needed.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn write_back(_: *const u8, _: usize) {}

/// Says that a byte will be needed soon.
#[inline]
pub(crate) fn prefetch(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch, of whatever address, changes nothing but the cache.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Copies `words` 8-byte words. Neither side tears a word on the side that is word-aligned.
///
/// # Safety
/// Both ranges are valid for `words * 8` bytes and do not overlap (or the destination is below the source); whatever is
/// raced on is word-aligned.
#[cfg(target_arch = "x86_64")]
#[inline]
unsafe fn copy_words(mut from: *const u8, mut to: *mut u8, words: usize) {
    use std::arch::asm;
    let lines = words / 8;
    if lines > 0 {
        // SAFETY: `lines * 64` bytes are within the caller's ranges; the wide moves are used where the processor has them.
        unsafe {
            if lines >= 2 && std::arch::is_x86_feature_detected!("avx") {
                copy_lines_avx(from, to, lines);
            } else {
                copy_lines_sse(from, to, lines);
            }
            from = from.add(lines * LINE);
            to = to.add(lines * LINE);
        }
    }
    for _ in 0..words % 8 {
        // SAFETY: one more word within the caller's ranges.
        unsafe {
            asm!(
                "mov {w}, [{from}]",
                "mov [{to}], {w}",
                w = out(reg) _, from = in(reg) from, to = in(reg) to,
                options(nostack, preserves_flags),
            );
            from = from.add(8);
            to = to.add(8);
        }
    }
}

/// Copies lines of 64 bytes by 16 bytes at a time.
///
/// # Safety
/// As for `copy_words`.
#[cfg(target_arch = "x86_64")]
#[inline]
unsafe fn copy_lines_sse(from: *const u8, to: *mut u8, lines: usize) {
    // SAFETY: moves `lines * 64` bytes within the ranges the caller vouches for; clobbers what it declares.
    unsafe {
        std::arch::asm!(
            "2:",
            "movups {a}, [{from}]",
            "movups {b}, [{from} + 16]",
            "movups {c}, [{from} + 32]",
            "movups {d}, [{from} + 48]",
            "movups [{to}], {a}",
            "movups [{to} + 16], {b}",
            "movups [{to} + 32], {c}",
            "movups [{to} + 48], {d}",
            "add {from}, 64",
            "add {to}, 64",
            "dec {lines}",
            "jnz 2b",
            from = inout(reg) from => _,
            to = inout(reg) to => _,
            lines = inout(reg) lines => _,
            a = out(xmm_reg) _, b = out(xmm_reg) _, c = out(xmm_reg) _, d = out(xmm_reg) _,
            options(nostack),
        );
    }
}

/// Copies lines of 64 bytes by 32 bytes at a time: half the instructions, which is what a copy within the cache waits for.
///
/// # Safety
/// As for `copy_words`; the processor has AVX.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx")]
unsafe fn copy_lines_avx(from: *const u8, to: *mut u8, lines: usize) {
    // SAFETY: moves `lines * 64` bytes within the ranges the caller vouches for; clobbers what it declares.
    unsafe {
        std::arch::asm!(
            "test {lines}, 1",
            "jz 2f",
            "vmovups {a}, [{from}]",
            "vmovups {b}, [{from} + 32]",
            "vmovups [{to}], {a}",
            "vmovups [{to} + 32], {b}",
            "add {from}, 64",
            "add {to}, 64",
            "2:",
            "shr {lines}, 1",
            "jz 4f",
            "3:",
            "vmovups {a}, [{from}]",
            "vmovups {b}, [{from} + 32]",
            "vmovups {c}, [{from} + 64]",
            "vmovups {d}, [{from} + 96]",
            "vmovups [{to}], {a}",
            "vmovups [{to} + 32], {b}",
            "vmovups [{to} + 64], {c}",
            "vmovups [{to} + 96], {d}",
            "sub {from}, -128",
            "sub {to}, -128",
            "dec {lines}",
            "jnz 3b",
            "4:",
            "vzeroupper",
            from = inout(reg) from => _,
            to = inout(reg) to => _,
            lines = inout(reg) lines => _,
            a = out(ymm_reg) _, b = out(ymm_reg) _, c = out(ymm_reg) _, d = out(ymm_reg) _,
            out("xmm4") _, out("xmm5") _, out("xmm6") _, out("xmm7") _,
            out("xmm8") _, out("xmm9") _, out("xmm10") _, out("xmm11") _,
            out("xmm12") _, out("xmm13") _, out("xmm14") _, out("xmm15") _,
            options(nostack),
        );
    }
}

/// As above where we have no assembly: relaxed atomics on whichever side is aligned.
///
/// # Safety
/// As above.
#[cfg(not(target_arch = "x86_64"))]
#[inline]
unsafe fn copy_words(from: *const u8, to: *mut u8, words: usize) {
    /// Loads a word, atomically if it is aligned.
    unsafe fn load(at: *const u8) -> u64 {
        if at.cast::<u64>().is_aligned() {
            // SAFETY: valid and aligned; possibly raced on, hence atomic.
            unsafe { (*at.cast::<AtomicU64>()).load(Ordering::Relaxed) }
        } else {
            // SAFETY: valid; an unaligned side is private plain memory.
            unsafe { at.cast::<u64>().read_unaligned() }
        }
    }
    for n in 0..words {
        // SAFETY: word `n` is within both ranges.
        unsafe {
            let word = load(from.add(n * 8));
            let at = to.add(n * 8);
            if at.cast::<u64>().is_aligned() {
                (*at.cast::<AtomicU64>()).store(word, Ordering::Relaxed);
            } else {
                at.cast::<u64>().write_unaligned(word);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn copies_move_exactly_the_named_bytes(offset in 0usize..200, len in 0usize..700, to_offset in 0usize..200, seed in any::<u8>()) {
            let memory = RacyMemory::zeroed(1024).unwrap();
            let mut model = vec![0u8; 1024];
            let data: Vec<u8> = (0..len).map(|i| seed.wrapping_add(i.to_le_bytes()[0]) | 1).collect();
            memory.write(offset, &data);
            model[offset..offset + len].copy_from_slice(&data);
            let mut all = vec![0u8; 1024];
            memory.read(0, &mut all);
            prop_assert_eq!(&all, &model);
            let mut part = vec![0u8; len];
            memory.read(offset, &mut part);
            prop_assert_eq!(&part, &data);
            let words = memory.words(offset / 8 * 8, len / 8 * 8);
            words.copy_to(&mut part);
            prop_assert_eq!(&part, &model[offset / 8 * 8..][..len / 8 * 8]);
            let one_by_one: Vec<u8> = (0..words.len() / 8).flat_map(|n| words.get(8 * n).to_le_bytes()).collect();
            prop_assert_eq!((&one_by_one, words.get(words.len())), (&part, 0));
            let other = RacyMemory::zeroed(1024).unwrap();
            memory.copy_to(offset, &other, to_offset, len, if seed % 2 == 0 { Side::Source } else { Side::Destination });
            let mut copied = vec![0u8; 1024];
            other.read(0, &mut copied);
            prop_assert!(copied[..to_offset].iter().chain(&copied[to_offset + len..]).all(|b| *b == 0));
            prop_assert_eq!(&copied[to_offset..to_offset + len], &data[..]);
        }

        #[test]
        fn masked_cas_is_what_it_says(word: u64, compare: u64, compare_mask: u64, swap: u64, swap_mask: u64, agree: bool) {
            let compare = if agree { word } else { compare };
            let memory = RacyMemory::zeroed(64).unwrap();
            memory.word(8).store(word, Ordering::Relaxed);
            prop_assert_eq!(memory.masked_cas(8, compare, compare_mask, swap, swap_mask), word);
            let expected = if word & compare_mask == compare & compare_mask { word & !swap_mask | swap & swap_mask } else { word };
            prop_assert_eq!(memory.word(8).load(Ordering::Relaxed), expected);
        }
    }

    #[test]
    #[should_panic(expected = "beyond the end")]
    fn out_of_bounds_is_caught() {
        RacyMemory::zeroed(64).unwrap().read(60, &mut [0; 8]);
    }
}
