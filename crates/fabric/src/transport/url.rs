//! Servers that run, as a URL names them.
//!
//! ```text
//! shm://PATH,PATH,...               sockets, or folders of them
//! tcp://HOST:PORT,HOST:PORT,...
//! verbs://HOST:PORT,HOST:PORT,...  by RDMA; the port is the server's TCP port
//! ```

use super::Cluster;
use super::shm::{ShmCluster, ShmOptions};
use super::tcp::{TcpCluster, TcpOptions};
use super::verbs::{VerbsCluster, VerbsOptions};
use crate::error::FabricError;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// The servers of a pool, in any order.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum PoolUrl {
    /// Processes of this machine, by the paths of their sockets.
    Shm(Vec<PathBuf>),
    /// Anywhere that TCP reaches, by host and port.
    Tcp(Vec<String>),
    /// By RDMA, by host and (TCP) port.
    Verbs(Vec<String>),
}

/// What is not such a URL.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BadUrl {
    url: String,
}

impl fmt::Display for BadUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "'{}' names no servers; give tcp://HOST:PORT,..., verbs://HOST:PORT,... or shm://PATH,...",
            self.url
        )
    }
}

impl std::error::Error for BadUrl {}

impl FromStr for PoolUrl {
    type Err = BadUrl;

    fn from_str(url: &str) -> Result<Self, BadUrl> {
        let bad = || BadUrl { url: url.to_owned() };
        let (scheme, places) = url.split_once("://").ok_or_else(bad)?;
        let places = places.split(',');
        match scheme {
            "shm" => {
                let paths: Vec<PathBuf> = places.map(PathBuf::from).collect();
                let is_whole = paths.iter().all(|path| !path.as_os_str().is_empty());
                if is_whole { Ok(Self::Shm(paths)) } else { Err(bad()) }
            }
            "tcp" | "verbs" => {
                let addresses: Vec<String> = places.map(str::to_owned).collect();
                if !addresses.iter().all(|address| has_port(address)) {
                    return Err(bad());
                }
                Ok(if scheme == "tcp" { Self::Tcp(addresses) } else { Self::Verbs(addresses) })
            }
            _ => Err(bad()),
        }
    }
}

fn has_port(address: &str) -> bool {
    address.rsplit_once(':').is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok())
}

/// What it takes to be let in.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Access {
    /// The token that the servers ask for, if they do.
    pub token: Vec<u8>,
    /// The RDMA device by which servers are reached; none: the first that can be used.
    pub device: Option<String>,
}

impl Access {
    /// With this token.
    pub fn with_token(token: &[u8]) -> Self {
        Self { token: token.to_vec(), device: None }
    }
}

impl Cluster {
    /// Connects to servers that run. Blocks for as long as a client waits for anything.
    pub fn open(url: &PoolUrl, access: &Access) -> Result<Self, FabricError> {
        let token = access.token.clone();
        match url {
            PoolUrl::Shm(paths) => ShmCluster::connect(paths, &ShmOptions { token }),
            PoolUrl::Tcp(addresses) => {
                TcpCluster::connect(addresses, &TcpOptions { token, ..TcpOptions::default() })
            }
            PoolUrl::Verbs(addresses) => {
                let device = access.device.clone();
                VerbsCluster::connect(addresses, &VerbsOptions { token, device, ..VerbsOptions::default() })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_read_or_refused() {
        let paths = ["/run/a", "/run/b"].map(PathBuf::from).to_vec();
        assert_eq!("shm:///run/a,/run/b".parse(), Ok(PoolUrl::Shm(paths)));
        let addresses = ["a:7000", "[::1]:7001"].map(str::to_owned).to_vec();
        assert_eq!("tcp://a:7000,[::1]:7001".parse(), Ok(PoolUrl::Tcp(addresses.clone())));
        assert_eq!("verbs://a:7000,[::1]:7001".parse(), Ok(PoolUrl::Verbs(addresses)));
        for wrong in [
            "",
            "tcp",
            "tcp://",
            "tcp://a",
            "tcp://a:7000,",
            "tcp://:7000",
            "shm://",
            "shm://a,,b",
            "udp://a:1",
        ] {
            assert!(wrong.parse::<PoolUrl>().is_err(), "{wrong}");
        }
    }
}
