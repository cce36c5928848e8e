//! Wakes a thread that waits for sockets from threads that have something for it.

use rustix::event::{EventfdFlags, eventfd};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

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

/// Wakes a thread for one reason, which it asks for.
#[derive(Debug)]
pub(crate) struct Bell {
    wake: Arc<Wake>,
    has_rung: AtomicBool,
}

impl Bell {
    pub(crate) fn new(wake: &Arc<Wake>) -> Self {
        Self { wake: Arc::clone(wake), has_rung: AtomicBool::new(false) }
    }

    pub(crate) fn ring(&self) {
        self.has_rung.store(true, Ordering::Release);
        self.wake.wake();
    }

    /// Whether it has rung since this was asked last.
    #[inline]
    pub(crate) fn has_rung(&self) -> bool {
        self.has_rung.load(Ordering::Relaxed) && self.has_rung.swap(false, Ordering::Acquire)
    }
}

impl AsFd for Wake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
