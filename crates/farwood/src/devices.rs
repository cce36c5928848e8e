//! `farwood devices`: which RDMA devices there are, what they can do, and what Farwood will use of it.

use farwood_fabric::transport::verbs::{Atomics, DeviceInfo, LinkLayer, devices};
use serde::Serialize;
use std::process::ExitCode;

#[derive(clap::Args, Debug)]
pub(crate) struct Arguments {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Device {
    name: String,
    firmware: String,
    ports: Vec<Port>,
    atomics: &'static str,
    reads_at_once: u32,
    queue_requests: u32,
    queue_pairs: u32,
    on_chip_memory_bytes: u64,
    /// What Farwood uses of it; absent if it cannot use it.
    #[serde(skip_serializing_if = "Option::is_none")]
    used: Option<Used>,
    #[serde(skip_serializing_if = "Option::is_none")]
    unusable_because: Option<String>,
}

#[derive(Serialize)]
struct Port {
    number: u8,
    active: bool,
    link_layer: &'static str,
    mtu_bytes: u32,
    max_message_bytes: u64,
}

#[derive(Serialize)]
struct Used {
    port: u8,
    gid_index: u8,
    gid: String,
    /// Whether the same server may also be used by TCP and as shared memory.
    mixes_with_other_transports: bool,
    locks_on_the_device: bool,
    masked_cas: bool,
}

/// What a server keeps locks in, unless it is told otherwise.
const LOCK_BYTES: u64 = 256 << 10;

impl From<DeviceInfo> for Device {
    fn from(info: DeviceInfo) -> Self {
        let is_global = info.atomics == Atomics::Global;
        let (used, unusable_because) = match info.used {
            Ok(used) => {
                let used = Used {
                    port: used.port,
                    gid_index: used.gid_index,
                    gid: used.gid.to_string(),
                    mixes_with_other_transports: is_global,
                    locks_on_the_device: !is_global && info.device_memory_bytes >= LOCK_BYTES,
                    masked_cas: false,
                };
                (Some(used), None)
            }
            Err(why) => (None, Some(why)),
        };
        let port = |port: &farwood_fabric::transport::verbs::PortInfo| Port {
            number: port.number,
            active: port.is_active,
            link_layer: match port.link_layer {
                LinkLayer::Ethernet => "Ethernet (RoCE)",
                LinkLayer::InfiniBand => "InfiniBand",
            },
            mtu_bytes: port.mtu_bytes,
            max_message_bytes: port.max_message_bytes,
        };
        Self {
            ports: info.ports.iter().map(port).collect(),
            name: info.name,
            firmware: info.firmware,
            atomics: match info.atomics {
                Atomics::None => "none",
                Atomics::Device => "among themselves",
                Atomics::Global => "among themselves and with the processor's",
            },
            reads_at_once: info.reads_at_once,
            queue_requests: info.queue_requests,
            queue_pairs: info.queue_pairs,
            on_chip_memory_bytes: info.device_memory_bytes,
            used,
            unusable_because,
        }
    }
}

impl Device {
    fn print(&self) {
        println!("{} (firmware {})", self.name, self.firmware);
        for port in &self.ports {
            println!(
                "  port {}: {}, {}, packets of {} bytes, messages of {} MiB",
                port.number,
                port.link_layer,
                if port.active { "active" } else { "down" },
                port.mtu_bytes,
                port.max_message_bytes >> 20
            );
        }
        println!("  atomics: {}", self.atomics);
        println!(
            "  {} queue pairs, {} requests in a queue, {} READs and atomics at once",
            self.queue_pairs, self.queue_requests, self.reads_at_once
        );
        println!("  on-chip memory: {} KiB", self.on_chip_memory_bytes >> 10);
        match (&self.used, &self.unusable_because) {
            (Some(used), _) => {
                println!(
                    "  Farwood uses port {} with address {} (index {})",
                    used.port, used.gid, used.gid_index
                );
                println!(
                    "    locks: {}",
                    if used.locks_on_the_device { "in on-chip memory" } else { "in main memory" }
                );
                println!("    masked CAS: no, which is not among the verbs that all devices have");
                println!(
                    "    the same server over TCP or shared memory: {}",
                    if used.mixes_with_other_transports { "yes" } else { "no, atomics would not mix" }
                );
            }
            (None, Some(why)) => println!("  Farwood cannot use it: {why}"),
            (None, None) => {}
        }
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, String> {
    let found: Vec<Device> =
        devices().map_err(|error| error.to_string())?.into_iter().map(Device::from).collect();
    if arguments.json {
        println!("{}", serde_json::to_string_pretty(&found).map_err(|error| error.to_string())?);
    } else {
        found.iter().for_each(Device::print);
    }
    Ok(ExitCode::SUCCESS)
}
