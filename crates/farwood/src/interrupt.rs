//! Ctrl-C and SIGTERM in commands that join a pool.
//!
//! The first one asks the command to come to its end: it begins nothing new, lets what is under way end, and leaves the pool, so
//! that nobody has to recover it. The second one ends the process at once, and so does [`GRACE`] if leaving takes
//! longer; then the pool recovers what the session held, as after any death.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use signal_hook::iterator::Signals;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

/// How long a command that was interrupted may take to leave the pool.
const GRACE: Duration = Duration::from_secs(10);
/// How often input that does not come is left to look whether it is still wanted.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
/// What commands that were interrupted exit with.
pub(crate) const EXIT_CODE: u8 = 130;
/// What they say.
pub(crate) const SAID: &str = "interrupted";

static CAME: LazyLock<Arc<AtomicBool>> = LazyLock::new(Arc::default);

/// Whether the command is to come to its end.
pub(crate) fn came() -> bool {
    CAME.load(Ordering::Relaxed)
}

/// Listens for signals from now on.
#[expect(
    clippy::disallowed_methods,
    reason = "whoever leaves slowly is ended by a thread of its own, in real time"
)]
pub(crate) fn listen() -> Result<(), String> {
    let cannot = |error: io::Error| format!("cannot listen for signals: {error}");
    for signal in [SIGINT, SIGTERM] {
        // In this order: the first signal finds the flag lowered.
        flag::register_conditional_shutdown(signal, EXIT_CODE.into(), Arc::clone(&CAME)).map_err(cannot)?;
        flag::register(signal, Arc::clone(&CAME)).map_err(cannot)?;
    }
    let mut signals = Signals::new([SIGINT, SIGTERM]).map_err(cannot)?;
    std::thread::spawn(move || {
        if signals.forever().next().is_some() {
            std::thread::sleep(GRACE);
            eprintln!(
                "farwood: not out of the pool after {} s; it recovers what was held here",
                GRACE.as_secs()
            );
            std::process::exit(EXIT_CODE.into());
        }
    });
    Ok(())
}

/// Input that fails when the command is to end, even while nothing comes.
#[derive(Debug)]
pub(crate) struct Input(File);

impl Input {
    /// A file, or standard input.
    pub(crate) fn open(path: Option<&Path>) -> io::Result<Self> {
        match path {
            Some(path) => File::open(path).map(Self),
            // Not through the handle of the library, whose buffer may hold what a poll does not see.
            None => io::stdin().as_fd().try_clone_to_owned().map(|fd| Self(File::from(fd))),
        }
    }
}

impl Read for Input {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            if came() {
                return Err(io::Error::other(SAID));
            }
            match poll(&mut [PollFd::new(&self.0, PollFlags::IN)], Some(&LOOK)) {
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) => return self.0.read(buffer),
                Err(error) => return Err(error.into()),
            }
        }
    }
}
