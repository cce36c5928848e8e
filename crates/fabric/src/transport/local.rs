//! Transport `local`: memory servers inside the process, the embedded default of the library.
//!
//! Verbs run inline on the caller's thread (module `direct`); calls go to the server's logic on the caller's thread;
//! procedures run on threads of their own, as many as the server has cores.

use super::direct::{DirectCluster, Station};
use super::host::Host;
use super::host::gates::{GATES_BYTES, Gates};
use super::host::regions::{Regions, at};
use super::{Cluster, Origin, View, Way};
use crate::mem::RacyMemory;
use crate::server::{ServerLogic, StartError};
use std::sync::Arc;

/// The memory servers of this process.
#[derive(Debug)]
#[non_exhaustive]
pub struct LocalCluster;

impl LocalCluster {
    /// Starts these servers, in any order, and connects them as one pool.
    pub fn start(logics: Vec<Arc<dyn ServerLogic>>) -> Result<Cluster, StartError> {
        let hosts: Vec<Arc<Host>> = logics.into_iter().map(start_host).collect::<Result<_, _>>()?;
        let identities = hosts.iter().map(|host| host.identity().clone()).collect();
        let view = View::new(identities).map_err(|error| StartError::Mismatch(error.to_string()))?;
        let stations = hosts.into_iter().map(Station::Host).collect();
        Ok(Cluster::new(Way::Direct(Arc::new(DirectCluster::new(view, stations))), Origin::Here))
    }
}

fn start_host(logic: Arc<dyn ServerLogic>) -> Result<Arc<Host>, StartError> {
    let zeroed = |bytes| {
        RacyMemory::zeroed(bytes).ok_or_else(|| StartError::Config(format!("no memory for {bytes} bytes")))
    };
    let mut regions = Regions::default();
    for spec in logic.regions() {
        regions.insert(spec.id, zeroed(at(spec.bytes))?);
    }
    Host::start(logic, regions, Gates::new(zeroed(GATES_BYTES)?))
}
