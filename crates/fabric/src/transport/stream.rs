//! A connected socket of either family, for what does not care which.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// A connected socket.
#[derive(Debug)]
pub(crate) enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Stream {
    pub(crate) fn try_clone(&self) -> io::Result<Self> {
        Ok(match self {
            Self::Unix(socket) => Self::Unix(socket.try_clone()?),
            Self::Tcp(socket) => Self::Tcp(socket.try_clone()?),
        })
    }

    pub(crate) fn set_read_timeout(&self, wait: Option<Duration>) -> io::Result<()> {
        match self {
            Self::Unix(socket) => socket.set_read_timeout(wait),
            Self::Tcp(socket) => socket.set_read_timeout(wait),
        }
    }

    pub(crate) fn set_write_timeout(&self, wait: Option<Duration>) -> io::Result<()> {
        match self {
            Self::Unix(socket) => socket.set_write_timeout(wait),
            Self::Tcp(socket) => socket.set_write_timeout(wait),
        }
    }

    /// Hangs up. It may be closed already, which is as good.
    pub(crate) fn hang_up(&self) {
        let _ = match self {
            Self::Unix(socket) => socket.shutdown(Shutdown::Both),
            Self::Tcp(socket) => socket.shutdown(Shutdown::Both),
        };
    }
}

impl Read for &Stream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Unix(socket) => (&mut &*socket).read(into),
            Stream::Tcp(socket) => (&mut &*socket).read(into),
        }
    }
}

impl Write for &Stream {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Unix(socket) => (&mut &*socket).write(from),
            Stream::Tcp(socket) => (&mut &*socket).write(from),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(socket) => socket.as_fd(),
            Self::Tcp(socket) => socket.as_fd(),
        }
    }
}
