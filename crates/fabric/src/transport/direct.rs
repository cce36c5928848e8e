//! What `local` and `shm` share: verbs that the client itself carries out on mapped memory.
//!
//! Verbs run inline on the caller's thread; there is no server CPU in their path and nothing is ever in flight. Where the
//! server's logic runs, in this process or in another one, matters to calls only ([`Station`]).
//!
//! **Fencing** goes through a gate per connection ([`super::host::gates`]). A server in another process may end and another one take over the
//! memory, which closes all gates; a verb that finds its gate closed goes on through a new one ([`super::shm::client`]).
//!
//! **Completed means visible** (rule 5): a batch that wrote ends with a full fence, so that neither a later verb nor a
//! plain load of the caller can overtake its stores.

use super::host::gates::Gate;
use super::host::regions::{Regions, at};
use super::host::{HERE, Host};
use super::shm::client::Connection;
use super::verbs::loopback::Loopback;
use super::{Inbox, ReplySlot, View};
use crate::addr::{GlobalAddr, RegionId, ServerId};
use crate::buf::{Buf, BufPool};
use crate::call::{Call, CallError, CallId, CallOutcome, Once, Principal, Target};
use crate::caps::Capabilities;
use crate::error::FabricError;
use crate::mem::{Side, Words};
use crate::region::{Permissions, RegionTable};
use crate::verb::{Batch, BatchFailure, BatchResult, Completed, Landing, Output, Source, Verb, VerbOutcome};
use smallvec::SmallVec;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// The most verbs in one batch; memory has no limit of its own, so this is what an RDMA send queue takes.
const MAX_BATCH: usize = 128;

/// How many processes of a server one verb may meet that close its gate again.
const MAX_REOPENED: u32 = 8;

/// Servers whose memory this process has mapped.
#[derive(Debug)]
pub(crate) struct DirectCluster {
    view: View,
    /// By number.
    stations: Vec<Station>,
    capabilities: Capabilities,
}

/// Where a server's logic is.
#[derive(Clone, Debug)]
pub(crate) enum Station {
    /// In this process.
    Host(Arc<Host>),
    /// In another process of this machine.
    Process(Arc<Connection>),
}

impl Station {
    fn id(&self) -> ServerId {
        match self {
            Self::Host(host) => host.id(),
            Self::Process(connection) => connection.identity().server,
        }
    }

    fn table(&self) -> &RegionTable {
        match self {
            Self::Host(host) => host.table(),
            Self::Process(connection) => connection.table(),
        }
    }

    fn connect(&self, who: Principal) -> Result<Route, FabricError> {
        let (opened, memory) = match self {
            Self::Host(host) => (host.connect(who, None)?, host.memory()),
            Self::Process(connection) => (connection.connect(who)?, connection.memory()),
        };
        let table = self.table().restricted_to(opened.permissions);
        Ok(Route { memory: Arc::clone(memory), gate: opened.gate, table, station: self.clone() })
    }
}

impl DirectCluster {
    /// The pool of these servers; the view has been made from their identities.
    pub(crate) fn new(view: View, mut stations: Vec<Station>) -> Self {
        stations.sort_by_key(Station::id);
        let locks = |station: &Station| station.table().get(RegionId::LOCK).map_or(0, |region| region.bytes);
        let capabilities = Capabilities {
            masked_cas: true,
            lock_memory_bytes: stations.iter().map(locks).min().unwrap_or(0),
            line_atomic: false,
            ordered_lines_bytes: 0,
            ordered_reads: true,
            immediate: true,
            max_batch: MAX_BATCH,
            session_calls: true,
        };
        Self { view, stations, capabilities }
    }

    pub(crate) fn view(&self) -> &View {
        &self.view
    }

    pub(crate) fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    pub(crate) fn connect(&self, who: Principal) -> Result<DirectLink, FabricError> {
        let routes = self.stations.iter().map(|station| station.connect(who).map(Some));
        let routes = routes.collect::<Result<Box<[_]>, _>>()?;
        Ok(DirectLink { who, capabilities: self.capabilities, routes, loopback: None })
    }
}

/// One endpoint's way to one server.
#[derive(Debug)]
struct Route {
    memory: Arc<Regions>,
    gate: Gate,
    table: RegionTable,
    station: Station,
}

impl Drop for Route {
    fn drop(&mut self) {
        match &self.station {
            Station::Host(host) => host.disconnect(&self.gate),
            Station::Process(connection) => connection.disconnect(&self.gate),
        }
    }
}

/// An endpoint's connections to mapped memory.
#[derive(Debug)]
pub(crate) struct DirectLink {
    who: Principal,
    capabilities: Capabilities,
    routes: Box<[Option<Route>]>,
    /// (A procedure's) Atomics belong to an RDMA device, and lock memory is reached through it.
    loopback: Option<Arc<Loopback>>,
}

impl DirectLink {
    /// The link of a procedure on `host`: it reaches that server only, in its caller's name, so that fencing the caller ends
    /// it too.
    pub(crate) fn near(host: &Arc<Host>, who: Principal) -> Result<Self, FabricError> {
        let station = Station::Host(Arc::clone(host));
        let mut routes: Vec<Option<Route>> = (0..host.id().index()).map(|_| None).collect();
        routes.push(Some(station.connect(who)?));
        let (view, stations) = (View { number: 1, servers: vec![host.identity().clone()] }, vec![station]);
        let mut capabilities = DirectCluster::new(view, stations).capabilities;
        let loopback = host.loopback().cloned();
        capabilities.masked_cas = loopback.is_none();
        Ok(Self { who, capabilities, routes: routes.into(), loopback })
    }

    pub(crate) fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    #[inline]
    fn route(&self, server: ServerId) -> Result<&Route, FabricError> {
        match self.routes.get(server.index()) {
            Some(Some(route)) => Ok(route),
            _ => Err(FabricError::UnknownServer { server }),
        }
    }

    #[inline]
    pub(crate) fn table(&self, server: ServerId) -> Result<&RegionTable, FabricError> {
        self.route(server).map(|route| &route.table)
    }

    /// Whether there is anybody to call.
    pub(crate) fn check_alive(&self, server: ServerId) -> Result<(), FabricError> {
        match &self.route(server)?.station {
            Station::Process(connection) if connection.is_lost() => Err(FabricError::ServerLost { server }),
            _ => Ok(()),
        }
    }

    /// Goes on through another gate, if the one that is closed was closed because another process serves the memory now.
    #[cold]
    fn reopen(&self, route: &Route) -> Result<(), FabricError> {
        match &route.station {
            Station::Host(_) => Err(FabricError::Fenced { session: self.who.session }),
            Station::Process(connection) => connection.reopen(self.who, &route.gate),
        }
    }

    /// After a READ: what it brought counts if this succeeds.
    #[inline]
    fn check_open(&self, route: &Route) -> Result<(), FabricError> {
        if route.gate.is_open() { Ok(()) } else { self.reopen(route) }
    }

    /// Enters the gate, to change memory.
    #[inline]
    fn enter(&self, route: &Route) -> Result<(), FabricError> {
        if route.gate.enter() { Ok(()) } else { self.enter_another(route) }
    }

    #[cold]
    fn enter_another(&self, route: &Route) -> Result<(), FabricError> {
        for _ in 0..MAX_REOPENED {
            match self.reopen(route) {
                Ok(()) if route.gate.enter() => return Ok(()),
                // Nothing was done.
                Ok(()) => {}
                Err(FabricError::Unknown { server }) => return Err(FabricError::Disconnected { server }),
                Err(error) => return Err(error),
            }
        }
        Err(FabricError::Disconnected { server: route.station.id() })
    }

    /// Runs a checked batch, verb by verb.
    pub(crate) fn execute(&self, batch: Batch, pool: &BufPool) -> BatchResult {
        let verbs = batch.len();
        let route = self.route(batch.server()).map_err(|e| BatchFailure::refused(e, 0, verbs))?;
        if let Err(error) = self.enter(route) {
            let outcomes = (0..verbs).map(|_| VerbOutcome::NotExecuted).collect();
            return Err(Box::new(BatchFailure { error, at: 0, outcomes }));
        }
        let mut outputs = SmallVec::new();
        let mut wrote = false;
        if let Some(device) = &self.loopback {
            let result = execute_by(device, batch, &route.memory, pool);
            route.gate.leave();
            return result;
        }
        for verb in batch.verbs {
            if wrote && matches!(verb, Verb::Read { .. }) {
                // WRITE then READ is ordered, which stores and loads of one thread are not.
                fence(Ordering::SeqCst);
                wrote = false;
            }
            wrote |= matches!(verb, Verb::Write { .. });
            outputs.push(apply(verb, &route.memory, pool));
        }
        if wrote {
            fence(Ordering::SeqCst);
        }
        route.gate.leave();
        Ok(Completed { outputs })
    }

    /// READ without a batch.
    #[inline]
    pub(crate) fn read(&self, addr: GlobalAddr, len: usize, pool: &BufPool) -> Result<Buf, FabricError> {
        let route = self.route(addr.server())?;
        route.table.check(addr, len as u64, Permissions::READ)?;
        let mut buf = pool.take(len);
        match self.device_for(addr) {
            Some(device) => device.read(addr, &mut buf)?,
            None => route.memory.region(addr.region()).read(at(addr.offset()), &mut buf),
        }
        self.check_open(route)?;
        Ok(buf)
    }

    /// READ of aligned words where they are; `None` if it is not the processor that reaches them.
    #[inline]
    pub(crate) fn look<T>(
        &self,
        addr: GlobalAddr,
        len: usize,
        with: impl FnOnce(Words<'_>) -> T,
    ) -> Option<Result<T, FabricError>> {
        if self.device_for(addr).is_some() {
            return None;
        }
        Some(self.checked_for_reading(addr, len).and_then(|route| {
            let seen = with(route.memory.region(addr.region()).words(at(addr.offset()), len));
            self.check_open(route)?;
            Ok(seen)
        }))
    }

    #[inline]
    fn checked_for_reading(&self, addr: GlobalAddr, len: usize) -> Result<&Route, FabricError> {
        let route = self.route(addr.server())?;
        if !addr.is_word_aligned() || len % 8 != 0 {
            return Err(FabricError::Misaligned { addr });
        }
        route.table.check(addr, len as u64, Permissions::READ)?;
        Ok(route)
    }

    /// Whether some bytes are reached through a device.
    #[inline]
    pub(crate) fn has_device(&self) -> bool {
        self.loopback.is_some()
    }

    /// Says that these bytes will be read soon.
    #[inline]
    pub(crate) fn expect(&self, addr: GlobalAddr, len: usize) {
        if let Ok(route) = self.route(addr.server()) {
            if route.table.get(addr.region()).is_some() {
                route.memory.region(addr.region()).expect(at(addr.offset()), len);
            }
        }
    }

    /// READ of one aligned word, without a buffer.
    #[inline]
    pub(crate) fn read_word(&self, addr: GlobalAddr) -> Result<u64, FabricError> {
        let route = self.route(addr.server())?;
        if !addr.is_word_aligned() {
            return Err(FabricError::Misaligned { addr });
        }
        route.table.check(addr, 8, Permissions::READ)?;
        if self.device_for(addr).is_some() {
            return Ok(self.read(addr, 8, &BufPool::default())?.word(0));
        }
        let word = route.memory.region(addr.region()).word(at(addr.offset())).load(Ordering::SeqCst);
        self.check_open(route)?;
        Ok(word)
    }

    /// WRITE without a batch.
    #[inline]
    pub(crate) fn write(&self, addr: GlobalAddr, data: &[u8]) -> Result<(), FabricError> {
        let route = self.route(addr.server())?;
        route.table.check(addr, data.len() as u64, Permissions::WRITE)?;
        self.enter(route)?;
        let written = if let Some(device) = self.device_for(addr) {
            device.write(addr, data)
        } else {
            route.memory.region(addr.region()).write(at(addr.offset()), data);
            Ok(())
        };
        fence(Ordering::SeqCst);
        route.gate.leave();
        written
    }

    /// WRITEs on one server, one after the other, without a batch.
    #[inline]
    pub(crate) fn write_in_order<'a>(
        &self,
        server: ServerId,
        writes: impl Iterator<Item = (GlobalAddr, &'a [u8])> + Clone,
    ) -> Result<(), FabricError> {
        let route = self.route(server)?;
        for (addr, data) in writes.clone() {
            route.table.check(addr, data.len() as u64, Permissions::WRITE)?;
        }
        self.enter(route)?;
        let mut written = Ok(());
        for (addr, data) in writes {
            if let Some(device) = self.device_for(addr) {
                // Device and processor see each other's verbs in order.
                fence(Ordering::SeqCst);
                written = device.write(addr, data);
            } else {
                route.memory.region(addr.region()).write(at(addr.offset()), data);
            }
            if written.is_err() {
                break;
            }
        }
        fence(Ordering::SeqCst);
        route.gate.leave();
        written
    }

    /// CAS and, behind it, a READ on the same server, without a batch.
    #[inline]
    pub(crate) fn cas_and_read(
        &self,
        (addr, expected, desired): (GlobalAddr, u64, u64),
        (from, len): (GlobalAddr, usize),
        pool: &BufPool,
    ) -> Result<(u64, Buf), FabricError> {
        self.route(addr.server())?.table.check(from, len as u64, Permissions::READ)?;
        let before = self.cas(addr, expected, desired)?;
        if self.loopback.is_some() {
            // Device and processor see each other's verbs in order.
            fence(Ordering::SeqCst);
        }
        Ok((before, self.read(from, len, pool)?))
    }

    /// WRITE of one aligned word, without a buffer.
    #[inline]
    pub(crate) fn write_word(&self, addr: GlobalAddr, value: u64) -> Result<(), FabricError> {
        self.on_word(addr, Permissions::WRITE, |word| {
            if let Some(device) = self.device_for(addr) {
                return device.write(addr, &value.to_le_bytes());
            }
            word.swap(value, Ordering::SeqCst);
            Ok(())
        })?
    }

    /// CAS without a batch.
    #[inline]
    pub(crate) fn cas(&self, addr: GlobalAddr, expected: u64, desired: u64) -> Result<u64, FabricError> {
        self.on_word(addr, Permissions::ATOMIC, |word| match &self.loopback {
            Some(device) => device.cas(addr, expected, desired),
            None => Ok(compare_exchange(word, expected, desired)),
        })?
    }

    /// The device through which the bytes at `addr` are reached, if it is not the processor that reaches them.
    #[inline]
    fn device_for(&self, addr: GlobalAddr) -> Option<&Loopback> {
        self.loopback.as_deref().filter(|_| addr.region() == RegionId::LOCK)
    }

    #[inline]
    fn on_word<T>(
        &self,
        addr: GlobalAddr,
        needed: Permissions,
        access: impl FnOnce(&AtomicU64) -> T,
    ) -> Result<T, FabricError> {
        let route = self.route(addr.server())?;
        if !addr.is_word_aligned() {
            return Err(FabricError::Misaligned { addr });
        }
        route.table.check(addr, 8, needed)?;
        self.enter(route)?;
        let result = access(route.memory.region(addr.region()).word(at(addr.offset())));
        route.gate.leave();
        Ok(result)
    }

    pub(crate) async fn call(&self, target: Target, call: Call, once: Once<'_>) -> CallOutcome {
        // Sessions are reached through the coordinator.
        let through = match target {
            Target::Server(server) => server,
            Target::Session(_) => ServerId::COORDINATOR,
        };
        let route = self.route(through).map_err(|error| CallError::Failed(error.to_string()))?;
        match &route.station {
            Station::Host(host) => {
                let slot = Arc::new(ReplySlot::default());
                let _guard = Waiting { host, id: call.id };
                host.call(target, call, HERE, Arc::clone(&slot) as _);
                slot.wait().await
            }
            Station::Process(connection) => connection.call(target, call, once).await,
        }
    }

    /// Nothing is ever in flight, so there is nothing to fence. A connection that was fenced stays closed; one to a server whose process
    /// has ended goes on with the next process.
    pub(crate) async fn reconnect(&self, server: ServerId) -> Result<(), FabricError> {
        let route = self.route(server)?;
        if let Station::Process(connection) = &route.station {
            if !route.gate.is_open() {
                connection.reconnect().await?;
            }
        }
        self.check_open(route).map_err(|error| match error {
            FabricError::Unknown { server } => FabricError::Disconnected { server },
            error => error,
        })
    }

    pub(crate) fn serve(&self) -> Arc<Inbox> {
        match self.route(ServerId::COORDINATOR).map(|route| &route.station) {
            Ok(Station::Host(host)) => host.serve_here(self.who),
            Ok(Station::Process(connection)) => connection.serve(self.who),
            Err(_) => Arc::new(Inbox::closed()),
        }
    }

    pub(crate) fn reply(&self, to: CallId, outcome: CallOutcome) {
        match self.route(ServerId::COORDINATOR).map(|route| &route.station) {
            Ok(Station::Host(host)) => host.reply(to, outcome),
            Ok(Station::Process(connection)) => connection.reply(to, outcome),
            Err(_) => {}
        }
    }
}

/// Stops waiting for a reply when the caller goes away.
struct Waiting<'a> {
    host: &'a Host,
    id: CallId,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.host.forget_call(self.id);
    }
}

#[inline]
fn compare_exchange(word: &AtomicU64, expected: u64, desired: u64) -> u64 {
    match word.compare_exchange(expected, desired, Ordering::SeqCst, Ordering::SeqCst) {
        Ok(before) | Err(before) => before,
    }
}

/// Carries out a procedure's batch where atomics and lock memory are the device's. Bytes that the device does not have to move
/// are copied as always.
fn execute_by(device: &Loopback, batch: Batch, memory: &Regions, pool: &BufPool) -> BatchResult {
    let verbs = batch.len();
    let mut outputs: SmallVec<[Output; 2]> = SmallVec::new();
    for (n, verb) in batch.verbs.into_iter().enumerate() {
        // Device and processor see each other's verbs in order.
        fence(Ordering::SeqCst);
        match apply_by(device, verb, memory, pool) {
            Ok(output) => outputs.push(output),
            Err(error) => {
                let unknown = (n..verbs).map(|verb| match verb {
                    verb if verb == n => VerbOutcome::Unknown,
                    _ => VerbOutcome::NotExecuted,
                });
                let outcomes = outputs.into_iter().map(VerbOutcome::Completed).chain(unknown).collect();
                return Err(Box::new(BatchFailure { error, at: n, outcomes }));
            }
        }
    }
    fence(Ordering::SeqCst);
    Ok(Completed { outputs })
}

fn apply_by(device: &Loopback, verb: Verb, memory: &Regions, pool: &BufPool) -> Result<Output, FabricError> {
    let is_lock = verb.addr().region() == RegionId::LOCK;
    match verb {
        Verb::Cas { addr, expected, desired } => device.cas(addr, expected, desired).map(Output::Previous),
        Verb::Faa { addr, add } => device.faa(addr, add).map(Output::Previous),
        Verb::Read { addr, len, into } if is_lock => {
            let mut buf = pool.take(len);
            device.read(addr, &mut buf)?;
            Ok(match into {
                Landing::Pooled => Output::Bytes(buf),
                Landing::Shared { buf: shared, at } => {
                    shared.memory().write(at, &buf);
                    Output::Done
                }
            })
        }
        Verb::Write { addr, from } if is_lock => {
            match from {
                Source::Inline { bytes, len } => device.write(addr, &bytes[..usize::from(len)])?,
                Source::Owned(buf) => device.write(addr, &buf)?,
                Source::Shared { buf, at, len } => {
                    let mut bytes = pool.take(len);
                    buf.memory().read(at, &mut bytes);
                    device.write(addr, &bytes)?;
                }
            }
            Ok(Output::Done)
        }
        verb => Ok(apply(verb, memory, pool)),
    }
}

/// Carries out one verb.
fn apply(verb: Verb, memory: &Regions, pool: &BufPool) -> Output {
    let addr = verb.addr();
    let region = memory.region(addr.region());
    let offset = at(addr.offset());
    match verb {
        Verb::Read { len, into: Landing::Pooled, .. } => {
            let mut buf = pool.take(len);
            region.read(offset, &mut buf);
            Output::Bytes(buf)
        }
        Verb::Read { len, into: Landing::Shared { buf, at }, .. } => {
            region.copy_to(offset, buf.memory(), at, len, Side::Source);
            Output::Done
        }
        Verb::Write { from, .. } => {
            match from {
                Source::Inline { bytes, len } => region.write(offset, &bytes[..usize::from(len)]),
                Source::Owned(buf) => region.write(offset, &buf),
                Source::Shared { buf, at, len } => {
                    buf.memory().copy_to(at, region, offset, len, Side::Destination);
                }
            }
            Output::Done
        }
        Verb::Cas { expected, desired, .. } => {
            Output::Previous(compare_exchange(region.word(offset), expected, desired))
        }
        Verb::MaskedCas { compare, compare_mask, swap, swap_mask, .. } => {
            Output::Previous(region.masked_cas(offset, compare, compare_mask, swap, swap_mask))
        }
        Verb::Faa { add, .. } => Output::Previous(region.word(offset).fetch_add(add, Ordering::SeqCst)),
    }
}
