//! The baseline: the same access on plain memory of this process, made the same way, in the same run.
//!
//! Dependent at depth 1, independent above it. A WRITE that has completed is visible, so the store or copy it is compared with
//! is followed by a full fence (one for every `depth` of them). Several clients store to their own parts of the memory,
//! since plain stores must not race. A call is compared with a round trip to another thread over a pair of Unix sockets.

use super::access::{Access, LINE, Walk, ends};
use super::measure::{Job, Windows};
use crate::fleet::{all, on_threads};
use crate::units::index;
use farwood_fabric::clock::RealClock;
use std::hint::black_box;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Mutex, PoisonError};

/// The clock is read once for so many accesses.
const BLOCK_OPS: u64 = 256;
/// Bytes of a request and of its answer: a small control message.
const MESSAGE_BYTES: usize = 64;
/// What the words hold that are compared and exchanged.
const FILL: u64 = 1;

/// Plain memory as large as the working set: bytes for copies, words for atomics.
#[derive(Debug)]
pub(super) struct Raw {
    bytes: Vec<u8>,
    words: Vec<AtomicU64>,
}

/// What the baseline of an access is.
pub(super) fn name(access: Access, bytes: usize) -> &'static str {
    match access {
        Access::Read if bytes == 8 => "load",
        Access::Read => "memcpy",
        Access::Write if bytes == 8 => "store, fence",
        Access::Write => "memcpy, fence",
        Access::Cas => "compare-exchange",
        Access::MaskedCas | Access::ReadCas => "load, compare-exchange",
        Access::Faa => "fetch-add",
        Access::WriteWrite => "memcpy, store, fence",
        Access::ReadRead => "memcpy, load",
        Access::CasRead => "compare-exchange, memcpy",
        Access::Call => "round trip over a socket pair",
    }
}

impl Raw {
    /// Memory of `bytes`, all of it written, so that none of it is the shared page of zeroes.
    pub(super) fn new(bytes: u64) -> Self {
        // Not 0: memory that only has to be zero would not be written at all.
        let words = (0..bytes / 8).map(|_| AtomicU64::new(FILL)).collect();
        Self { bytes: vec![1; index(bytes)], words }
    }

    /// How many nanoseconds an access takes a client when `clients` make them at once, in one window after the other.
    pub(super) fn measure(&mut self, job: &Job, clients: u32) -> Result<Vec<f64>, String> {
        let walk = |client: u32| Walk::new(job.seed ^ u64::from(client) << 32 ^ 1, 0);
        let spans = match job.access {
            Access::Call => on_threads(clients, |_| ping_pong(job)),
            Access::Write | Access::WriteWrite => {
                let share = self.bytes.len() / clients as usize;
                let shares: Vec<_> = self.bytes.chunks_exact_mut(share).map(Mutex::new).collect();
                on_threads(clients, |client| {
                    let mut share = shares[client as usize].lock().unwrap_or_else(PoisonError::into_inner);
                    Ok(stores(job, walk(client), &mut share))
                })
            }
            _ => {
                let (bytes, words) = (&self.bytes[..], &self.words[..]);
                on_threads(clients, |client| {
                    Ok(if job.depth == 1 {
                        loads::<true>(job, walk(client), bytes, words)
                    } else {
                        loads::<false>(job, walk(client), bytes, words)
                    })
                })
            }
        };
        Ok(all(spans)?.concat())
    }
}

/// Repeats `access` until the job's time or count is up; nanoseconds for each, in one window after the other.
fn repeat(job: &Job, mut access: impl FnMut()) -> Vec<f64> {
    let clock = RealClock::new();
    let mut windows = Windows::starting(clock.now());
    let mut made = 0;
    loop {
        let block = BLOCK_OPS.min(job.ops - made).max(1);
        for _ in 0..block {
            access();
        }
        made += block;
        let now = clock.now();
        windows.count(now, block);
        if made >= job.ops || now >= job.span_ns {
            return windows.finish(now);
        }
    }
}

/// Accesses that bring something, on which the next place depends or not. Two functions, since whatever chooses at run time
/// may become an instruction that waits for the word.
fn loads<const DEPENDENT: bool>(job: &Job, walk: Walk, bytes: &[u8], words: &[AtomicU64]) -> Vec<f64> {
    let mut walk = walk.over(bytes.len() as u64 / job.stride);
    let mut into = vec![0u8; job.bytes.max(8)];
    let stride = index(job.stride);
    let behind = job.bytes.next_multiple_of(index(LINE));
    let cas = |at: usize| {
        let word = &words[at / 8];
        word.compare_exchange(FILL, FILL, Ordering::SeqCst, Ordering::SeqCst).unwrap_or_else(|found| found)
    };
    let mut copy = |at: usize| {
        into[..job.bytes].copy_from_slice(black_box(&bytes[at..at + job.bytes]));
        ends(black_box(&into[..job.bytes]))
    };
    let mut at = 0;
    repeat(job, || {
        let seen = match job.access {
            Access::Read if job.bytes == 8 => words[at / 8].load(Ordering::Relaxed),
            Access::Read => copy(at),
            Access::Cas => cas(at),
            Access::MaskedCas | Access::ReadCas => words[at / 8].load(Ordering::Acquire) ^ cas(at),
            Access::Faa => words[at / 8 + 1].fetch_add(1, Ordering::SeqCst),
            Access::ReadRead => copy(at) ^ u64::from(black_box(bytes[at + behind])),
            Access::CasRead => cas(at + behind) ^ copy(at),
            Access::Write | Access::WriteWrite | Access::Call => 0,
        };
        let seen = black_box(seen);
        at = index(walk.next(if DEPENDENT { seen } else { 0 })) * stride;
    })
}

/// Accesses that leave something.
fn stores(job: &Job, walk: Walk, bytes: &mut [u8]) -> Vec<f64> {
    let slots = (bytes.len() as u64 / job.stride).max(1);
    let mut walk = walk.over(slots);
    let from = vec![2u8; job.bytes];
    let stride = index(job.stride);
    let behind = job.bytes.next_multiple_of(index(LINE));
    let mut until_fence = job.depth;
    repeat(job, || {
        let at = index(walk.next(0)) * stride;
        if job.bytes == 8 {
            // Of a length that the compiler knows: one store.
            bytes[at..at + 8].copy_from_slice(black_box(&[2; 8]));
        } else {
            // A part that is smaller than one slot is written as far as it goes.
            let end = (at + job.bytes).min(bytes.len());
            bytes[at..end].copy_from_slice(black_box(&from[..end - at]));
        }
        if job.access == Access::WriteWrite {
            if let Some(word) = bytes.get_mut(at + behind..at + behind + 8) {
                word.copy_from_slice(black_box(&[0; 8]));
            }
        }
        black_box(&mut *bytes);
        until_fence -= 1;
        if until_fence == 0 {
            fence(Ordering::SeqCst);
            until_fence = job.depth;
        }
    })
}

/// Messages to a thread that sends each back, `depth` at a time.
fn ping_pong(job: &Job) -> Result<Vec<f64>, String> {
    let failed = |error: std::io::Error| format!("no socket pair to compare calls with: {error}");
    let (mut near, mut far) = UnixStream::pair().map_err(failed)?;
    std::thread::scope(|scope| {
        let echo = scope.spawn(move || {
            let mut message = [0; MESSAGE_BYTES];
            // Ends when the other side hangs up.
            while far.read_exact(&mut message).is_ok() && far.write_all(&message).is_ok() {}
        });
        let mut failure = None;
        let mut message = [0; MESSAGE_BYTES];
        let mut in_flight = 0;
        let spans = repeat(job, || {
            let mut exchange = || {
                near.write_all(&message)?;
                in_flight += 1;
                if in_flight == job.depth {
                    for _ in 0..in_flight {
                        near.read_exact(&mut message)?;
                    }
                    in_flight = 0;
                }
                Ok(())
            };
            if failure.is_none() {
                failure = exchange().err();
            }
        });
        drop(near);
        let _ = echo.join();
        failure.map_or(Ok(spans), |error| Err(failed(error)))
    })
}
