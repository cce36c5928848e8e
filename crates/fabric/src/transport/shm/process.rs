//! A client process, so that it can be ended and waited for when it is stuck in the middle of a batch.

use crate::clock::{MILLISECOND, Nanos, RealClock, SECOND};
use crate::transport::host::gates::Holder;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal, test_kill_process};
use std::io;
use std::os::fd::OwnedFd;

/// How long a process that is inside a gate may take to come out before it is ended. A batch takes microseconds; a process
/// that was preempted inside is back within a few time slices.
const GRACE_NS: Nanos = 250 * MILLISECOND;
/// How long to wait for a process that was ended. With SIGKILL pending it runs no instruction of its own any more, even if
/// the kernel still holds it (in a broken disk's driver, say): that is what counts.
const END_NS: Nanos = 10 * SECOND;
/// How often a busy gate is looked at.
const LOOK_EVERY_NS: Nanos = MILLISECOND / 4;

/// A process of this machine, by a descriptor that never means another one.
#[derive(Debug)]
pub(crate) struct Process {
    pid: u32,
    started: u64,
    descriptor: OwnedFd,
}

impl Process {
    /// Takes hold of a process that is there now.
    pub(crate) fn open(pid: u32) -> io::Result<Self> {
        let number = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let number = number.ok_or(io::ErrorKind::InvalidInput)?;
        let descriptor = pidfd_open(number, PidfdFlags::empty())?;
        let started = stat(pid, STARTED)?.parse().map_err(|_| io::ErrorKind::InvalidData)?;
        Ok(Self { pid, started, descriptor })
    }

    /// The process that had this number and started at that time; `None` if it is gone.
    pub(crate) fn find(pid: u64, started: u64) -> Option<Self> {
        let process = Self::open(u32::try_from(pid).ok()?).ok()?;
        (process.started == started).then_some(process)
    }

    /// Whether we could end it.
    pub(crate) fn can_be_ended(&self) -> bool {
        let number = i32::try_from(self.pid).ok().and_then(Pid::from_raw);
        number.is_some_and(|number| test_kill_process(number).is_ok())
    }

    /// Whether it has been stopped (SIGSTOP, a debugger).
    fn is_stopped(&self) -> bool {
        stat(self.pid, STATE).is_ok_and(|state| state.starts_with(['T', 't']))
    }

    /// Whether it is gone, or goes within `wait`.
    fn goes_within(&self, wait: Nanos) -> bool {
        let mut ends = [PollFd::new(&self.descriptor, PollFlags::IN)];
        let wait = Timespec {
            tv_sec: i64::try_from(wait / SECOND).unwrap_or(i64::MAX),
            tv_nsec: i64::try_from(wait % SECOND).unwrap_or(0),
        };
        poll(&mut ends, Some(&wait)).is_ok_and(|ready| ready > 0)
    }
}

impl Holder for Process {
    fn name(&self) -> (u64, u64) {
        (u64::from(self.pid), self.started)
    }

    fn is_gone(&self) -> bool {
        self.goes_within(0)
    }

    fn end_unless(&self, idle: &dyn Fn() -> bool) {
        let clock = RealClock::new();
        // One that has been stopped does not come out by itself, however long one waits.
        while clock.now() < GRACE_NS && !self.is_stopped() {
            if idle() || self.goes_within(LOOK_EVERY_NS) {
                return;
            }
        }
        // It may have been stopped just after it came out.
        if idle() {
            return;
        }
        tracing::warn!(
            pid = self.pid,
            "ended a client process: its session was fenced while it was stuck in the middle of a batch"
        );
        // If that fails, it is gone: that it may be ended was tested when it came.
        let _ = pidfd_send_signal(&self.descriptor, Signal::KILL);
        if !self.goes_within(END_NS) {
            tracing::warn!(pid = self.pid, "an ended client process still lingers in the kernel");
        }
    }
}

/// Fields of /proc/pid/stat behind the name: the state, and when the process started, in ticks since the machine did.
const STATE: usize = 0;
const STARTED: usize = 19;

fn stat(pid: u32, field: usize) -> io::Result<String> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The name is in parentheses and may hold anything, parentheses too.
    let fields = stat.rsplit_once(')').map(|(_, fields)| fields.split_whitespace());
    let field = fields.and_then(|mut fields| fields.nth(field));
    field.map(str::to_owned).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    fn sleeper() -> std::process::Child {
        Command::new("sleep").arg("60").stdin(Stdio::null()).spawn().unwrap()
    }

    #[test]
    fn a_process_is_found_by_number_and_start_only() {
        let me = Process::open(std::process::id()).unwrap();
        let (pid, started) = me.name();
        assert!(!me.is_gone() && me.can_be_ended());
        assert!(Process::find(pid, started).is_some());
        assert!(Process::find(pid, started + 1).is_none(), "the number was used again");
        assert!(Process::find(u64::MAX, started).is_none());
    }

    #[test]
    fn who_comes_out_in_time_lives() {
        let mut child = sleeper();
        let process = Process::open(child.id()).unwrap();
        let looks = std::cell::Cell::new(0);
        process.end_unless(&|| {
            looks.set(looks.get() + 1);
            looks.get() > 3
        });
        assert!(!process.is_gone());
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn who_was_stopped_is_not_waited_for() {
        let mut child = sleeper();
        let process = Process::open(child.id()).unwrap();
        pidfd_send_signal(&process.descriptor, Signal::STOP).unwrap();
        while !process.is_stopped() {
            std::thread::yield_now();
        }
        let looks = std::cell::Cell::new(0);
        process.end_unless(&|| {
            looks.set(looks.get() + 1);
            false
        });
        assert!(process.is_gone() && looks.get() == 1);
        child.wait().unwrap();
    }

    #[test]
    fn who_is_stuck_is_ended_and_waited_for() {
        let mut child = sleeper();
        let process = Process::open(child.id()).unwrap();
        process.end_unless(&|| false);
        assert!(process.is_gone());
        child.wait().unwrap();
    }
}
