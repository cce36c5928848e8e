//! Which RDMA devices there are, what they can do, and what of it is used.

use super::device::{self, Context};
use super::error::VerbsError;
use super::sys;

/// What a device's atomics are worth.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Atomics {
    /// It has none: no locks, and so no Farwood.
    None,
    /// Among themselves.
    Device,
    /// Among themselves and with the processor's.
    Global,
}

/// What a port is connected to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LinkLayer {
    /// RoCE, or a software device.
    Ethernet,
    /// InfiniBand.
    InfiniBand,
}

/// One port of a device.
#[derive(Clone, Debug)]
pub struct PortInfo {
    /// Its number.
    pub number: u8,
    /// Whether it is up.
    pub is_active: bool,
    /// What it is connected to.
    pub link_layer: LinkLayer,
    /// The most bytes in a packet.
    pub mtu_bytes: u32,
    /// The most bytes in a message; longer transfers are cut.
    pub max_message_bytes: u64,
}

/// The address that connections use.
#[derive(Clone, Debug)]
pub struct UsedAddress {
    /// The port's number.
    pub port: u8,
    /// The address's place in the port's table.
    pub gid_index: u8,
    /// The address.
    pub gid: std::net::Ipv6Addr,
}

/// One device.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// Its name, as `farwood serve --verbs` wants it.
    pub name: String,
    /// The version of its firmware.
    pub firmware: String,
    /// Its ports.
    pub ports: Vec<PortInfo>,
    /// What its atomics are worth.
    pub atomics: Atomics,
    /// READs and atomics that one queue pair has under way.
    pub reads_at_once: u32,
    /// Requests that one queue takes.
    pub queue_requests: u32,
    /// How many queue pairs it has.
    pub queue_pairs: u32,
    /// On-chip memory that it hands out, for locks.
    pub device_memory_bytes: u64,
    /// The address that connections use, or why none can be.
    pub used: Result<UsedAddress, String>,
}

/// All devices; an error says what is missing.
pub fn devices() -> Result<Vec<DeviceInfo>, VerbsError> {
    let names = device::names()?;
    if names.is_empty() {
        return Err(VerbsError::NoDevice);
    }
    names.iter().map(|name| describe(&*Context::open(name)?)).collect()
}

fn describe(context: &Context) -> Result<DeviceInfo, VerbsError> {
    let attr = context.attr();
    let count = |n: i32| u32::try_from(n).unwrap_or(0);
    let port = |number| {
        let port = context.port(number)?;
        let is_ethernet = u32::from(port.link_layer) == sys::LINK_LAYER_ETHERNET;
        Ok(PortInfo {
            number,
            is_active: port.state == sys::PORT_ACTIVE,
            link_layer: if is_ethernet { LinkLayer::Ethernet } else { LinkLayer::InfiniBand },
            mtu_bytes: 128 << port.active_mtu.clamp(1, 5),
            max_message_bytes: u64::from(port.max_msg_sz),
        })
    };
    let atomics = match count(attr.atomic_cap) {
        sys::ATOMIC_NONE => Atomics::None,
        sys::ATOMIC_GLOB => Atomics::Global,
        _ => Atomics::Device,
    };
    let used = if atomics == Atomics::None {
        Err(VerbsError::NoAtomics { device: context.name().to_owned() }.to_string())
    } else {
        let used = context.active_port().map_err(|error| error.to_string());
        used.map(|port| UsedAddress { port: port.number, gid_index: port.gid_index, gid: port.gid.into() })
    };
    let firmware: Vec<u8> =
        attr.fw_ver.iter().map(|byte| byte.to_ne_bytes()[0]).take_while(|byte| *byte != 0).collect();
    Ok(DeviceInfo {
        name: context.name().to_owned(),
        firmware: String::from_utf8_lossy(&firmware).into_owned(),
        ports: (1..=attr.phys_port_cnt).map(port).collect::<Result<_, _>>()?,
        atomics,
        reads_at_once: count(attr.max_qp_rd_atom),
        queue_requests: count(attr.max_qp_wr),
        queue_pairs: count(attr.max_qp),
        device_memory_bytes: context.device_memory_bytes(),
        used,
    })
}
