//! Wakes a thread that waits for sockets from threads that have something for it.

use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Something to wait for beside sockets.
#[derive(Debug)]
pub(crate) struct Wake(OwnedFd);

impl Wake {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    pub(crate) fn wake(&self) {
        // It fails when the counter is full: then the thread is about to wake anyway.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// To be called by whoever was woken, before it looks for what it was woken for.
    pub(crate) fn settle(&self) {
        let _ = rustix::io::read(&self.0, &mut [0u8; 8]);
    }
}

impl AsFd for Wake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
