//! What `--transport` and its companions say.

use crate::serve::read_token;
use crate::units::Size;
use farwood_fabric::ServerId;
use std::path::PathBuf;
use std::str::FromStr;

/// The ways to far memory that a user can name.
const TRANSPORTS: &str =
    "local, sim and shm, each also with servers and memory as in local:2x256MiB, and shm://PATH[,PATH]";

/// Where a command finds its memory servers.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct TransportArguments {
    /// Where: local, sim or shm (with servers of its own, as many as in local:2x256MiB), or servers that run:
    /// shm://PATH[,PATH]
    #[arg(long, value_name = "URL")]
    pub(crate) transport: String,

    /// The token of servers that ask for one
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
}

impl TransportArguments {
    pub(crate) fn parse(&self) -> Result<Transport, String> {
        let mut transport: Transport = self.transport.parse()?;
        match (&mut transport, &self.token_file) {
            (_, None) => {}
            (Transport::ShmAt { token, .. }, Some(file)) => *token = read_token(Some(file))?,
            (_, Some(_)) => return Err("--token-file: only servers that run ask for a token".to_owned()),
        }
        Ok(transport)
    }

    #[cfg(test)]
    pub(crate) fn of(transport: &str) -> Self {
        Self { transport: transport.to_owned(), token_file: None }
    }
}

/// A transport as named by the user.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Transport {
    /// Memory servers inside this process.
    Local(Option<Shape>),
    /// Memory servers in a simulated world.
    Sim(Option<Shape>),
    /// Shared memory, with servers started for the occasion.
    Shm(Option<Shape>),
    /// Shared memory of servers that run, by the paths of their sockets.
    ShmAt { paths: Vec<PathBuf>, token: Vec<u8> },
}

/// How many servers, and how much memory each has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Shape {
    pub(super) servers: u16,
    pub(super) bytes: u64,
}

impl Shape {
    pub(crate) fn new(servers: u16, bytes: u64) -> Self {
        Self { servers, bytes }
    }
}

impl Transport {
    /// The shape, where it is up to the user.
    pub(crate) fn shape_mut(&mut self) -> Option<&mut Option<Shape>> {
        match self {
            Self::Local(shape) | Self::Sim(shape) | Self::Shm(shape) => Some(shape),
            Self::ShmAt { .. } => None,
        }
    }
}

impl FromStr for Transport {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let unknown = || format!("--transport: '{text}' is not understood; there are {TRANSPORTS}");
        if let Some(paths) = text.strip_prefix("shm://") {
            let paths: Vec<PathBuf> = paths.split(',').map(PathBuf::from).collect();
            let is_empty = paths.iter().any(|path| path.as_os_str().is_empty());
            return if is_empty { Err(unknown()) } else { Ok(Self::ShmAt { paths, token: Vec::new() }) };
        }
        let (name, shape) = match text.split_once(':') {
            Some((name, shape)) => (name, Some(shape)),
            None => (text, None),
        };
        let shape = shape.map(|shape| parse_shape(shape).ok_or_else(unknown)).transpose()?;
        match name {
            "local" => Ok(Self::Local(shape)),
            "sim" => Ok(Self::Sim(shape)),
            "shm" => Ok(Self::Shm(shape)),
            _ => Err(unknown()),
        }
    }
}

/// `2x256MiB`.
fn parse_shape(text: &str) -> Option<Shape> {
    let (servers, bytes) = text.split_once('x')?;
    let servers = servers.parse().ok().filter(|servers| (1..=ServerId::MAX + 1).contains(servers))?;
    Some(Shape { servers, bytes: bytes.parse::<Size>().ok()?.0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transports_are_read() {
        let shape = Some(Shape { servers: 2, bytes: 256 << 20 });
        let paths = ["/run/a", "/run/b"].map(PathBuf::from).to_vec();
        for (text, transport) in [
            ("local", Transport::Local(None)),
            ("local:2x256MiB", Transport::Local(shape)),
            ("sim", Transport::Sim(None)),
            ("sim:2x256MiB", Transport::Sim(shape)),
            ("shm", Transport::Shm(None)),
            ("shm:2x256MiB", Transport::Shm(shape)),
            ("shm:///run/a,/run/b", Transport::ShmAt { paths, token: vec![] }),
        ] {
            assert_eq!(text.parse(), Ok(transport), "{text}");
        }
    }

    #[test]
    fn what_is_no_transport_is_refused() {
        for text in [
            "",
            "tcp",
            "LOCAL",
            "local:",
            "local:2",
            "local:0x1MiB",
            "local:2x0",
            "local:9999x1MiB",
            "shm:1",
            "shm://",
            "shm://a,,b",
        ] {
            assert!(text.parse::<Transport>().is_err(), "{text}");
        }
        let token = TransportArguments { token_file: Some("x".into()), ..TransportArguments::of("local") };
        assert!(token.parse().is_err());
    }
}
