//! How busy a world's hardware was: it explains what bounded a result.

use crate::clock::Nanos;
use std::fmt;

/// How long the two directions of a NIC were busy.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct NicUsage {
    /// Taking messages in.
    pub in_ns: Nanos,
    /// Sending them out.
    pub out_ns: Nanos,
}

/// How long the parts of a memory server were busy.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct ServerUsage {
    /// Its NIC.
    pub nic: NicUsage,
    /// The processing units of its NIC, all together.
    pub units_ns: Nanos,
    /// How many of them there are.
    pub units: usize,
    /// The way to main memory.
    pub pcie_ns: Nanos,
    /// Atomics being executed, in all buckets and on the chip together: more than the span where buckets work side by side.
    pub atomics_ns: Nanos,
    /// Its cores, all together.
    pub cores_ns: Nanos,
    /// How many of them there are.
    pub cores: usize,
}

/// How busy a world's hardware was in some span of time. What was promised and lies ahead is counted in.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Usage {
    /// The span.
    pub span_ns: Nanos,
    /// The memory servers.
    pub servers: Vec<ServerUsage>,
    /// The NICs of the client processes that have one of their own.
    pub clients: Vec<NicUsage>,
}

impl NicUsage {
    fn since(self, before: Self) -> Self {
        Self { in_ns: self.in_ns - before.in_ns, out_ns: self.out_ns - before.out_ns }
    }
}

impl Usage {
    /// What happened after `before`, an earlier look at the same world.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let server = |(n, now): (usize, &ServerUsage)| {
            let then = before.servers.get(n).copied().unwrap_or_default();
            ServerUsage {
                nic: now.nic.since(then.nic),
                units_ns: now.units_ns - then.units_ns,
                pcie_ns: now.pcie_ns - then.pcie_ns,
                atomics_ns: now.atomics_ns - then.atomics_ns,
                cores_ns: now.cores_ns - then.cores_ns,
                ..*now
            }
        };
        let client =
            |(n, now): (usize, &NicUsage)| now.since(before.clients.get(n).copied().unwrap_or_default());
        Self {
            span_ns: self.span_ns - before.span_ns,
            servers: self.servers.iter().enumerate().map(server).collect(),
            clients: self.clients.iter().enumerate().map(client).collect(),
        }
    }

    /// Which share of the span something was busy.
    pub fn share(&self, busy: Nanos) -> f64 {
        busy as f64 / self.span_ns.max(1) as f64
    }
}

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = |busy: Nanos, of: usize| 100.0 * self.share(busy) / of.max(1) as f64;
        for (n, server) in self.servers.iter().enumerate() {
            writeln!(
                f,
                "m{n}: NIC in {:.0}%, out {:.0}%, units {:.0}%, PCIe {:.0}%, atomics {:.0}%, cores {:.0}%",
                percent(server.nic.in_ns, 1),
                percent(server.nic.out_ns, 1),
                percent(server.units_ns, server.units),
                percent(server.pcie_ns, 1),
                percent(server.atomics_ns, 1),
                percent(server.cores_ns, server.cores),
            )?;
        }
        Ok(())
    }
}
