//! Asking one server how it does, without a session and whatever the rest of its pool does.

use crate::error::FabricError;
use crate::status::ServerStatus;
use crate::transport::shm::{ShmOptions, client::Connection};
use crate::transport::tcp::{TcpOptions, station::Station};
use std::path::PathBuf;

/// Where a server is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ServerPlace {
    /// Behind the Unix socket at this path.
    Shm(PathBuf),
    /// At this address, `host:port`.
    Tcp(String),
}

/// How the server at a place does. Blocks, for as long as a client waits for anything.
pub fn status(place: &ServerPlace, token: &[u8]) -> Result<ServerStatus, FabricError> {
    let token = token.to_vec();
    let (status, name) = match place {
        ServerPlace::Shm(path) => {
            let connection = Connection::open(path, &ShmOptions { token })?;
            (connection.status(), path.display().to_string())
        }
        ServerPlace::Tcp(address) => {
            let station = Station::open(address, &TcpOptions { token, ..TcpOptions::default() })?;
            (station.line().status(), address.clone())
        }
    };
    status.ok_or_else(|| FabricError::Unreachable {
        why: format!("the server at {name} does not say how it does; it may be stopped or overloaded"),
    })
}
