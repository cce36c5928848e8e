//! A pool inside this process: for programs that want far memory's interface before they have far memory, and for tests.

use crate::{MemoryServer, ServerConfig};
use farwood_fabric::procedure::ProcedureSet;
use farwood_fabric::region::PoolId;
use farwood_fabric::server::{ServerLogic, StartError};
use farwood_fabric::transport::local::LocalCluster;
use farwood_fabric::{Cluster, ServerId};
use std::sync::Arc;

/// A pool of `servers` memory servers in this process with `bytes` of memory each. It is gone with the last clone of the
/// cluster.
pub fn embedded(servers: u16, bytes: u64) -> Result<Cluster, StartError> {
    let server = |number| {
        let config = ServerConfig::new(PoolId(1), ServerId::new(number), servers, bytes);
        Ok(Arc::new(MemoryServer::new(config, ProcedureSet::default())?) as Arc<dyn ServerLogic>)
    };
    let servers = (0..servers).map(server).collect::<Result<_, StartError>>()?;
    LocalCluster::start(servers)
}
