//! The server's socket: making it where no other server is, finding it, and passing a descriptor through it.

use crate::error::FabricError;
use crate::transport::serve::ServeError;
use rustix::fs::FlockOperation;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use std::fs::{File, Permissions};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

/// What a Unix socket's path may have, with the zero at its end (`sun_path`).
const MAX_PATH_BYTES: usize = 107;

/// Listens at `path`. A socket that a dead server left is replaced; one with a server behind it is not.
pub(crate) fn listen(path: &Path) -> Result<UnixListener, ServeError> {
    let place = || path.to_owned();
    if path.as_os_str().len() > MAX_PATH_BYTES {
        return Err(ServeError::PathTooLong { path: place(), max: MAX_PATH_BYTES });
    }
    let failed = |error: io::Error| ServeError::Socket { path: path.to_owned(), error };
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    // Held until we listen, so that of two servers that find a dead one's socket only one replaces it.
    let folder = File::open(folder).map_err(failed)?;
    rustix::fs::flock(&folder, FlockOperation::LockExclusive).map_err(|error| failed(error.into()))?;
    match std::fs::symlink_metadata(path) {
        Ok(found) if !found.file_type().is_socket() => return Err(ServeError::NotASocket { path: place() }),
        Ok(_) => match UnixStream::connect(path) {
            Ok(_) => return Err(ServeError::SocketInUse { path: place() }),
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                tracing::warn!(path = %path.display(), "replaced the socket of a server that is gone");
                std::fs::remove_file(path).map_err(failed)?;
            }
            Err(error) => return Err(failed(error)),
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(failed(error)),
    }
    let listener = UnixListener::bind(path).map_err(failed)?;
    std::fs::set_permissions(path, Permissions::from_mode(0o600)).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    Ok(listener)
}

/// Connects to the server at `path`, or says what to do.
pub(crate) fn connect(path: &Path) -> Result<UnixStream, FabricError> {
    let place = path.display();
    UnixStream::connect(path).map_err(|error| {
        let why = match error.kind() {
            io::ErrorKind::NotFound => {
                format!("there is no socket {place}; start a server there with `farwood serve --shm {place}`")
            }
            io::ErrorKind::ConnectionRefused => format!(
                "the server that made {place} is gone; start it again with `farwood serve --shm {place}`"
            ),
            io::ErrorKind::PermissionDenied => {
                format!("no permission to use {place}; run as the user that runs its server")
            }
            _ => format!("cannot connect to {place}: {error}"),
        };
        FabricError::Unreachable { why }
    })
}

/// Sends bytes with a descriptor. They are few and the socket is empty, so they fit or the other end is gone.
pub(crate) fn send_with(socket: &UnixStream, bytes: &[u8], descriptor: impl AsFd) -> io::Result<()> {
    let descriptors = [descriptor.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(&descriptors)) {
        return Err(io::ErrorKind::OutOfMemory.into());
    }
    let sent = sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?;
    if sent == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

/// Receives bytes and perhaps a descriptor; no bytes mean that the other end is gone.
pub(crate) fn receive_with(socket: &UnixStream, into: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = recvmsg(socket, &mut [IoSliceMut::new(into)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let mut descriptor = None;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            descriptor = descriptors.last().or(descriptor);
        }
    }
    Ok((received.bytes, descriptor))
}
