//! What `--transport` and its companions say.

use crate::serve::read_token;
use crate::units::Size;
use farwood_fabric::ServerId;
use farwood_fabric::transport::sim::{Placement, Profile};
use farwood_fabric::transport::url::{Access, PoolUrl};
use std::path::PathBuf;
use std::str::FromStr;

/// The ways to far memory that a user can name.
const TRANSPORTS: &str = "local, sim, shm and tcp, each also with servers and memory as in local:2x256MiB, shm://PATH[,PATH], \
     tcp://HOST:PORT[,HOST:PORT] and verbs://HOST:PORT[,HOST:PORT]";

/// Where a command finds its memory servers.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct TransportArguments {
    /// Where: local, sim, shm or tcp (with servers of its own, as many as in local:2x256MiB), or servers that run:
    /// shm://PATH,PATH,..., tcp://HOST:PORT,HOST:PORT,... or, by RDMA, verbs://HOST:PORT,HOST:PORT,...
    #[arg(long, value_name = "URL", default_value = "local")]
    pub(crate) transport: String,

    /// What a simulated world costs: cx5-100g, cx6-200g, a file with such a profile, or adversary, which has no prices and does
    /// whatever the contract allows
    #[arg(long, value_name = "NAME")]
    profile: Option<String>,

    /// In a simulated world, compute server i shares the network card of memory server i
    #[arg(long)]
    shared_nics: bool,

    /// The RDMA device by which servers are reached [default: the first that can be used]
    #[arg(long, value_name = "NAME")]
    device: Option<String>,

    /// The token of servers that ask for one
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
}

/// What a simulated world is like.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum World {
    /// No prices; tears, delays and reorders as far as the contract allows.
    Adversary,
    /// Everything has its price.
    Priced(Box<Profile>, Placement),
}

impl World {
    /// What worlds cost unless something else is said: the machines of most of the papers.
    pub(crate) const USUAL: &str = "cx5-100g";
    pub(crate) const ADVERSARY: &str = "adversary";

    fn new(name: &str, placement: Placement) -> Result<Self, String> {
        if name == Self::ADVERSARY {
            return Ok(Self::Adversary);
        }
        let profile = if Profile::names().any(|known| known == name) {
            Profile::named(name)
        } else {
            let names: Vec<_> = Profile::names().collect();
            let text = std::fs::read_to_string(name).map_err(|error| {
                format!(
                    "--profile: {name} is none of {}, and cannot be read as a file: {error}",
                    names.join(", ")
                )
            })?;
            text.parse()
        };
        let profile = profile.map_err(|error| format!("--profile: {error}"))?;
        Ok(Self::Priced(Box::new(profile), placement))
    }

    /// The profile's name.
    pub(crate) fn name(&self) -> &str {
        match self {
            Self::Adversary => Self::ADVERSARY,
            Self::Priced(profile, _) => &profile.name,
        }
    }
}

impl TransportArguments {
    /// What was said; a simulated world of which nothing was said has the profile `usual`.
    pub(crate) fn parse(&self, usual: &str) -> Result<Transport, String> {
        let mut transport: Transport = self.transport.parse()?;
        match &mut transport {
            Transport::At { url, access } => {
                access.token = read_token(self.token_file.as_deref())?;
                access.device.clone_from(&self.device);
                if self.device.is_some() && !matches!(url, PoolUrl::Verbs(_)) {
                    return Err("--device: only servers at verbs:// are reached by RDMA".to_owned());
                }
            }
            _ if self.token_file.is_some() => {
                return Err("--token-file: only servers that run ask for a token".to_owned());
            }
            _ if self.device.is_some() => {
                return Err("--device: only servers at verbs:// are reached by RDMA".to_owned());
            }
            _ => {}
        }
        match &mut transport {
            Transport::Sim { world, .. } => {
                let placement = if self.shared_nics { Placement::Shared } else { Placement::Separate };
                *world = World::new(self.profile.as_deref().unwrap_or(usual), placement)?;
            }
            _ if self.profile.is_some() || self.shared_nics => {
                return Err("--profile, --shared-nics: only a simulated world has a profile".to_owned());
            }
            _ => {}
        }
        Ok(transport)
    }

    #[cfg(test)]
    pub(crate) fn of(transport: &str) -> Self {
        Self {
            transport: transport.to_owned(),
            profile: None,
            shared_nics: false,
            device: None,
            token_file: None,
        }
    }
}

/// A transport as named by the user.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Transport {
    /// Memory servers inside this process.
    Local(Option<Shape>),
    /// Memory servers in a simulated world.
    Sim { shape: Option<Shape>, world: World },
    /// Shared memory, with servers started for the occasion.
    Shm(Option<Shape>),
    /// TCP, with servers started for the occasion.
    Tcp(Option<Shape>),
    /// Servers that run.
    At { url: PoolUrl, access: Access },
}

/// How many servers, and how much memory each has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Shape {
    pub(crate) servers: u16,
    pub(crate) bytes: u64,
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
            Self::Local(shape) | Self::Sim { shape, .. } | Self::Shm(shape) | Self::Tcp(shape) => Some(shape),
            Self::At { .. } => None,
        }
    }
}

impl FromStr for Transport {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let unknown = || format!("--transport: '{text}' is not understood; there are {TRANSPORTS}");
        if text.contains("://") {
            let url = text.parse().map_err(|_| unknown())?;
            return Ok(Self::At { url, access: Access::default() });
        }
        let (name, shape) = match text.split_once(':') {
            Some((name, shape)) => (name, Some(shape)),
            None => (text, None),
        };
        let shape = shape.map(|shape| parse_shape(shape).ok_or_else(unknown)).transpose()?;
        match name {
            "local" => Ok(Self::Local(shape)),
            "sim" => Ok(Self::Sim { shape, world: World::Adversary }),
            "shm" => Ok(Self::Shm(shape)),
            "tcp" => Ok(Self::Tcp(shape)),
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
        let at = |url: &str| Transport::At { url: url.parse().unwrap(), access: Access::default() };
        for (text, transport) in [
            ("local", Transport::Local(None)),
            ("local:2x256MiB", Transport::Local(shape)),
            ("sim", Transport::Sim { shape: None, world: World::Adversary }),
            ("sim:2x256MiB", Transport::Sim { shape, world: World::Adversary }),
            ("shm", Transport::Shm(None)),
            ("shm:2x256MiB", Transport::Shm(shape)),
            ("shm:///run/a,/run/b", at("shm:///run/a,/run/b")),
            ("tcp", Transport::Tcp(None)),
            ("tcp:2x256MiB", Transport::Tcp(shape)),
            ("verbs://a:7000,[::1]:7001", at("verbs://a:7000,[::1]:7001")),
        ] {
            assert_eq!(text.parse(), Ok(transport), "{text}");
        }
    }

    #[test]
    fn what_is_no_transport_is_refused() {
        for text in [
            "",
            "udp",
            "tcp:",
            "tcp://",
            "tcp://a",
            "tcp://a:7000,",
            "tcp://:7000",
            "verbs",
            "verbs://a",
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
        assert!(token.parse(World::USUAL).is_err());
        let with = |transport| {
            let arguments =
                TransportArguments { device: Some("mlx5_0".to_owned()), ..TransportArguments::of(transport) };
            arguments.parse(World::USUAL)
        };
        assert!(with("tcp://a:7000").is_err());
        assert!(
            matches!(with("verbs://a:7000"), Ok(Transport::At { access, .. }) if access.device.as_deref() == Some("mlx5_0"))
        );
    }

    #[test]
    fn only_a_simulated_world_has_a_profile() {
        let with = |transport: &str, profile: &str| {
            let arguments =
                TransportArguments { profile: Some(profile.to_owned()), ..TransportArguments::of(transport) };
            arguments.parse(World::ADVERSARY)
        };
        assert!(matches!(with("sim", "cx6-200g"), Ok(Transport::Sim { world: World::Priced(..), .. })));
        assert!(matches!(with("sim", "adversary"), Ok(Transport::Sim { world: World::Adversary, .. })));
        assert!(with("sim", "cx7").is_err_and(|why| why.contains("none of cx5-100g, cx6-200g")));
        assert!(with("local", "cx6-200g").is_err());
        let usual = TransportArguments::of("sim").parse(World::USUAL).unwrap();
        assert!(matches!(usual, Transport::Sim { world, .. } if world.name() == World::USUAL));
    }
}
