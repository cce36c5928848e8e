//! Servers that end without having been told to are started again on the memory that they had.
//!
//! Memory that no folder keeps belongs to this process: it makes the memfds, and its servers find them among their descriptors
//! (`serve --memory-fd`). So whatever becomes of a server's process, its memory stays, and the next process takes it over. Sessions live on
//! (`farwood_memory`, AT-MOST-ONCE), and clients reconnect by themselves.
//!
//! A server that cannot live on its memory would be started for ever: [`MAX_QUICK`] ends within [`QUICK_WITHIN`], each of a process that
//! did not start or lived for less than [`QUICK`], are enough.

use super::neighbours::Neighbours;
use farwood_fabric::transport::serve;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::collections::VecDeque;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::Child;
use std::time::{Duration, Instant};

/// A process that ends so soon was of no use.
const QUICK: Duration = Duration::from_millis(50);
/// So many of them...
const MAX_QUICK: usize = 5;
/// ...within this time are enough.
const QUICK_WITHIN: Duration = Duration::from_secs(10);
/// How long it is waited before a server that did not start is started again.
const PAUSE: Duration = Duration::from_millis(50);

/// A server's memory, which outlives its processes.
#[derive(Debug)]
pub(super) struct OwnMemory(File);

impl OwnMemory {
    /// Memory for the regions of a server.
    pub(super) fn make(config: &farwood_memory::ServerConfig) -> Result<Self, String> {
        let regions = farwood_memory::layout::regions(config);
        serve::anonymous_memory(&regions).map(Self).map_err(|error| error.to_string())
    }

    /// The descriptor's number, for the process that is started meanwhile.
    pub(super) fn lend<T>(&self, start: impl FnOnce(i32) -> io::Result<T>) -> io::Result<T> {
        fcntl_setfd(&self.0, FdFlags::empty())?;
        let started = start(self.0.as_raw_fd());
        // Later children do not get it.
        fcntl_setfd(&self.0, FdFlags::CLOEXEC)?;
        started
    }
}

/// What is known of a server's process.
#[derive(Debug)]
pub(super) struct Life {
    /// Readable when it has ended.
    end: Option<OwnedFd>,
    since: Instant,
    /// How often one was started again.
    restarts: u64,
    /// When processes ended that were of no use.
    quick: VecDeque<Instant>,
}

impl Life {
    #[expect(clippy::disallowed_methods, reason = "processes live in real time")]
    pub(super) fn of(child: &Child) -> Self {
        let (since, quick) = (Instant::now(), VecDeque::new());
        Self { end: descriptor_of(child), since, restarts: 0, quick }
    }

    /// Whether the process that has ended now was one too many of those that were of no use.
    fn has_had_enough(&mut self, now: Instant, lived: Duration) -> bool {
        if lived >= QUICK {
            self.quick.clear();
            return false;
        }
        self.quick.push_back(now);
        self.quick.retain(|end| now.duration_since(*end) < QUICK_WITHIN);
        self.quick.len() >= MAX_QUICK
    }
}

fn descriptor_of(child: &Child) -> Option<OwnedFd> {
    pidfd_open(Pid::from_child(child), PidfdFlags::empty()).ok()
}

/// A server was started again.
#[derive(Debug)]
pub(crate) struct Restarted {
    server: usize,
    how: String,
    took: Duration,
    restarts: u64,
}

impl fmt::Display for Restarted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { server, how, took, restarts } = self;
        let times = match restarts {
            1 => "once".to_owned(),
            more => format!("{more} times"),
        };
        let ms = took.as_millis();
        write!(
            f,
            "memory server {server} has ended ({how}) and was started again on its memory within {ms} ms, {times} so far"
        )
    }
}

impl Neighbours {
    /// Waits for a moment, or until a server ends.
    #[expect(clippy::disallowed_methods, reason = "looks at processes every now and then")]
    pub(crate) fn wait(&self, span: Duration) {
        let mut ends: Vec<PollFd<'_>> = self
            .lives
            .iter()
            .filter_map(|life| Some(PollFd::new(life.end.as_ref()?, PollFlags::IN)))
            .collect();
        let span_ns = Timespec { tv_sec: 0, tv_nsec: i64::from(span.subsec_nanos()) };
        if ends.len() < self.lives.len() || poll(&mut ends, Some(&span_ns)).is_err() {
            std::thread::sleep(span);
        }
    }

    /// Starts servers again that have ended; what was done. An error says that one of them does not live.
    pub(crate) fn tend(&mut self) -> Result<Vec<Restarted>, (usize, String)> {
        let mut restarted = Vec::new();
        while let Some((server, how)) = self.ended() {
            restarted.push(self.restart(server, how)?);
        }
        Ok(restarted)
    }

    #[expect(clippy::disallowed_methods, reason = "processes live in real time")]
    fn restart(&mut self, server: usize, mut how: String) -> Result<Restarted, (usize, String)> {
        let begin = Instant::now();
        let mut lived = begin.duration_since(self.lives[server].since);
        loop {
            if self.lives[server].has_had_enough(Instant::now(), lived) {
                let times = MAX_QUICK;
                return Err((
                    server,
                    format!("{how}; that was the end of {times} processes in a row that did not live"),
                ));
            }
            match self.start_again(server) {
                Ok(child) => {
                    let life = &mut self.lives[server];
                    (life.end, life.since) = (descriptor_of(&child), Instant::now());
                    life.restarts += 1;
                    let restarts = life.restarts;
                    self.servers[server] = child;
                    return Ok(Restarted { server, how, took: begin.elapsed(), restarts });
                }
                Err(why) => {
                    (how, lived) = (why, Duration::ZERO);
                    std::thread::sleep(PAUSE);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[expect(clippy::disallowed_methods, reason = "moments that are compared")]
    fn only_processes_that_end_at_once_and_in_a_row_are_too_many() {
        let begin = Instant::now();
        let mut life = Life { end: None, since: begin, restarts: 0, quick: VecDeque::new() };
        let at = |ms| begin + Duration::from_millis(ms);
        // Each of them had served.
        assert!((0..100).all(|n| !life.has_had_enough(at(n * 100), QUICK)));
        // Never five within the time.
        assert!((0..100).all(|n| !life.has_had_enough(at(n * 2500), Duration::ZERO)));
        let mut life = Life { end: None, since: begin, restarts: 0, quick: VecDeque::new() };
        assert!((0..4).all(|n| !life.has_had_enough(at(n), Duration::ZERO)));
        assert!(!life.has_had_enough(at(5), QUICK), "this one served");
        assert!((6..10).all(|n| !life.has_had_enough(at(n), Duration::ZERO)));
        assert!(life.has_had_enough(at(10), Duration::ZERO));
    }

    #[test]
    fn what_was_done_is_one_line() {
        let took = Duration::from_millis(42);
        let mut restarted = Restarted { server: 1, how: "signal: 9 (SIGKILL)".to_owned(), took, restarts: 1 };
        let said = "memory server 1 has ended (signal: 9 (SIGKILL)) and was started again on its memory within 42 ms, once so far";
        assert_eq!(restarted.to_string(), said);
        restarted.restarts = 7;
        assert!(restarted.to_string().ends_with("7 times so far"));
    }
}
