//! An endpoint's connections, one to each server, and the pool as a client process knows it: by TCP, or by RDMA to servers that
//! were found over TCP.

use super::attempts::Attempts;
use super::connection::{Connection, Credit, Ends};
use super::frames::Admission;
use super::station::{Station, aside};
use super::verbs::MAX_VERBS;
use crate::addr::{RegionId, ServerId, SessionId};
use crate::buf::BufPool;
use crate::call::{Call, CallError, CallId, CallOutcome, Once, Principal, Target};
use crate::caps::Capabilities;
use crate::error::FabricError;
use crate::exec::Executor;
use crate::region::{Permissions, RegionTable};
use crate::transport::verbs::device::Domain;
use crate::transport::verbs::offer::Offer;
use crate::transport::verbs::queue::PortAddress;
use crate::transport::verbs::{self, VerbsError};
use crate::transport::{Inbox, Posted, View};
use crate::verb::{Batch, BatchFailure};
use std::cell::{Cell, RefCell};
use std::net::TcpStream;
use std::rc::Rc;
use std::sync::Arc;

/// Servers that are reached over TCP.
#[derive(Debug)]
pub(crate) struct FarCluster {
    view: View,
    /// By number.
    stations: Vec<Arc<Station>>,
    capabilities: Capabilities,
    /// The RDMA device, if verbs go by it.
    device: Option<Arc<Domain>>,
}

impl FarCluster {
    /// The pool of these servers; the view has been made from their identities.
    pub(crate) fn new(view: View, mut stations: Vec<Arc<Station>>, device: Option<Arc<Domain>>) -> Self {
        stations.sort_by_key(|station| station.id());
        let locks = |station: &Arc<Station>| station.table().get(RegionId::LOCK).map_or(0, |spec| spec.bytes);
        let capabilities = Capabilities {
            // Not one of the verbs that all devices have.
            masked_cas: device.is_none(),
            lock_memory_bytes: stations.iter().map(locks).min().unwrap_or(0),
            line_atomic: false,
            ordered_lines_bytes: 0,
            ordered_reads: true,
            immediate: false,
            max_batch: MAX_VERBS,
            session_calls: true,
        };
        Self { view, stations, capabilities, device }
    }

    pub(crate) fn view(&self) -> &View {
        &self.view
    }

    pub(crate) fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    /// Connects an endpoint to every server; one of nobody's, or one that only calls, needs no connection of its own.
    pub(crate) fn connect(&self, who: Principal, verbs: bool) -> Result<FarLink, FabricError> {
        let session = who.session;
        let executor = Executor::current().ok_or(FabricError::NoExecutor)?;
        let mut routes = Vec::new();
        for station in &self.stations {
            let server = station.id();
            let (way, permissions) = if session.is_none() {
                (Err(FabricError::Disconnected { server }), Permissions::NONE)
            } else if !verbs {
                (Err(FabricError::Disconnected { server }), Permissions::ALL)
            } else {
                let dial = Dial::new(station.id(), self.device.as_ref(), &executor)?;
                match station.connect(who, 0, dial.address()) {
                    Ok(connected) => {
                        let (connection, permissions) = dial.open(connected, station, session, &executor)?;
                        (Ok(connection), permissions)
                    }
                    Err(error @ (FabricError::TooManyEndpoints { .. } | FabricError::Unreachable { .. })) => {
                        return Err(error);
                    }
                    Err(error) => (Err(error), Permissions::ALL),
                }
            };
            let table = station.table().restricted_to(permissions);
            let last = Cell::new(way.as_ref().map_or(0, Carrier::id));
            let (way, attempts) = (RefCell::new(way), Attempts::new(server));
            routes.push(Route { station: Arc::clone(station), table, way, last, attempts });
        }
        let (capabilities, routes, device) = (self.capabilities, routes.into(), self.device.clone());
        Ok(FarLink { who, verbs, capabilities, device, executor, routes })
    }
}

/// A connection that is about to be made: over the socket, or over queue pairs that wait for their other ends.
struct Dial(Option<Offer>);

impl Dial {
    fn new(server: ServerId, device: Option<&Arc<Domain>>, executor: &Executor) -> Result<Self, FabricError> {
        let offer = device.map(|device| Offer::new(device, executor.random())).transpose();
        offer.map(Self).map_err(|error| failed(server, &error))
    }

    fn address(&self) -> Option<PortAddress> {
        self.0.as_ref().map(Offer::address)
    }

    /// Makes the connection that the server has admitted.
    fn open(
        self,
        (socket, admission): (TcpStream, Admission),
        station: &Station,
        session: SessionId,
        executor: &Executor,
    ) -> Result<(Carrier, Permissions), FabricError> {
        let (server, patience) = (station.id(), station.patience_ns());
        match (self.0, admission) {
            (None, Admission::Verbs { connection: id, permissions, batches, bytes }) => {
                let credit = Credit { batches: batches.max(1) as usize, bytes: bytes.max(1) as usize };
                let ends = Ends { id, server, session };
                let connection = Connection::new(ends, socket, credit, patience, executor);
                let connection = connection.map_err(|_| FabricError::Disconnected { server })?;
                Ok((Carrier::Socket(connection), permissions))
            }
            (Some(offer), Admission::Queues { connection: id, permissions, port, regions }) => {
                let ends = verbs::connection::Ends { id, server, session, port, regions, patience };
                let connection = verbs::connection::Connection::new(offer, ends, socket, executor);
                let connection = connection.map_err(|error| failed(server, &error))?;
                Ok((Carrier::Queues(connection), permissions))
            }
            _ => Err(FabricError::Disconnected { server }),
        }
    }
}

fn failed(server: ServerId, error: &VerbsError) -> FabricError {
    tracing::error!(%server, "{error}");
    FabricError::Unreachable { why: format!("cannot reach server {server} by RDMA: {error}") }
}

/// What carries an endpoint's verbs to a server.
#[derive(Clone, Debug)]
enum Carrier {
    Socket(Rc<Connection>),
    Queues(Rc<verbs::connection::Connection>),
}

impl Carrier {
    /// The connection's number at the server.
    fn id(&self) -> u64 {
        match self {
            Self::Socket(connection) => connection.id(),
            Self::Queues(connection) => connection.id(),
        }
    }

    #[inline]
    fn post(&self, batch: &mut Batch, pool: &BufPool) -> Result<Posted, Box<BatchFailure>> {
        match self {
            Self::Socket(connection) => connection.post(batch, pool).map(Posted::Far),
            Self::Queues(connection) => connection.post(batch, pool).map(Posted::Queued),
        }
    }

    fn break_off(&self, server: ServerId) {
        match self {
            Self::Socket(connection) => connection.break_off(),
            Self::Queues(connection) => connection.break_off(&FabricError::Disconnected { server }),
        }
    }
}

/// One endpoint's way to one server.
#[derive(Debug)]
struct Route {
    station: Arc<Station>,
    table: RegionTable,
    /// The connection, or why there is none.
    way: RefCell<Result<Carrier, FabricError>>,
    /// The last connection's number at the server: the next one has to fence it, however often that is tried.
    last: Cell<u64>,
    /// At replacing the connection.
    attempts: Arc<Attempts>,
}

impl Route {
    /// Breaks the connection off: nothing is posted until it has been replaced.
    fn take_down(&self) {
        let server = self.station.id();
        let before = self.way.replace(Err(FabricError::Disconnected { server }));
        if let Ok(connection) = before {
            connection.break_off(server);
        }
    }
}

/// What an endpoint needs to connect again.
struct Redial {
    who: Principal,
    needs_verbs: bool,
    device: Option<Arc<Domain>>,
    executor: Executor,
}

impl Redial {
    async fn run(&self, route: &Route) -> Result<(), FabricError> {
        match self.open(route).await {
            Ok(Some(connection)) => {
                route.last.set(connection.id());
                *route.way.borrow_mut() = Ok(connection);
                Ok(())
            }
            Ok(None) => Ok(()),
            Err(error) => {
                // After any other failure it can be tried again, so posts go on to say `Disconnected`.
                if matches!(error, FabricError::Fenced { .. } | FabricError::ServerLost { .. }) {
                    *route.way.borrow_mut() = Err(error.clone());
                }
                Err(error)
            }
        }
    }

    async fn open(&self, route: &Route) -> Result<Option<Carrier>, FabricError> {
        route.station.restore_line().await?;
        if !self.needs_verbs {
            return Ok(None);
        }
        let dial = Dial::new(route.station.id(), self.device.as_ref(), &self.executor)?;
        let (station, address) = (Arc::clone(&route.station), dial.address());
        let (who, replaces) = (self.who, route.last.get());
        let connected = aside(move || station.connect(who, replaces, address)).await?;
        let (connection, _) = dial.open(connected, &route.station, who.session, &self.executor)?;
        Ok(Some(connection))
    }
}

/// An endpoint's connections.
#[derive(Debug)]
pub(crate) struct FarLink {
    who: Principal,
    verbs: bool,
    capabilities: Capabilities,
    device: Option<Arc<Domain>>,
    executor: Executor,
    routes: Rc<[Route]>,
}

impl FarLink {
    pub(crate) fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn route(&self, server: ServerId) -> Result<&Route, FabricError> {
        // Not `ok_or`: it would make the error for every verb, and drop it.
        let Some(route) = self.routes.get(server.index()) else {
            return Err(FabricError::UnknownServer { server });
        };
        Ok(route)
    }

    pub(crate) fn table(&self, server: ServerId) -> Result<&RegionTable, FabricError> {
        self.route(server).map(|route| &route.table)
    }

    /// Whether the server is not known to be gone for good.
    pub(crate) fn check_alive(&self, server: ServerId) -> Result<(), FabricError> {
        if self.route(server)?.station.is_lost() {
            return Err(FabricError::ServerLost { server });
        }
        Ok(())
    }

    /// Buffers for its verbs.
    pub(crate) fn pool(&self) -> BufPool {
        self.device.as_ref().map_or_else(BufPool::default, verbs::pool)
    }

    /// Posts a checked batch: its verbs are taken out.
    #[inline]
    pub(crate) fn post(&self, batch: &mut Batch, pool: &BufPool) -> Posted {
        let verbs = batch.len();
        let posted = match self.route(batch.server()) {
            Ok(route) => match &*route.way.borrow() {
                Ok(connection) => connection.post(batch, pool),
                Err(error) => Err(BatchFailure::not_executed(error.clone(), verbs)),
            },
            Err(error) => Err(BatchFailure::not_executed(error, verbs)),
        };
        posted.unwrap_or_else(|failure| Posted::Ready(Err(failure)))
    }

    pub(crate) async fn call(&self, target: Target, call: Call, once: Once<'_>) -> CallOutcome {
        // Sessions are reached through the coordinator.
        let through = match target {
            Target::Server(server) => server,
            Target::Session(_) => ServerId::COORDINATOR,
        };
        let route = self.route(through).map_err(|error| CallError::Failed(error.to_string()))?;
        let queues = match &*route.way.borrow() {
            Ok(Carrier::Queues(connection)) => Some(Rc::clone(connection)),
            _ => None,
        };
        let call = match queues {
            Some(queues) => match queues.call(target, call).await {
                Ok(outcome) => return outcome,
                Err(call) => call,
            },
            None => call,
        };
        if route.station.line().is_lost() && route.station.restore_line().await.is_err() {
            return Err(CallError::Unknown);
        }
        let (line, life) = route.station.line_of_life();
        once.check(life)?;
        line.call(target, call).await
    }

    /// Fences the connection to `server` and opens a new one. If an attempt is under way, this waits for it: nothing has been posted
    /// since it began. `settled` is done, once for all who wait, when what was in flight can no longer land and nothing has been
    /// posted on the new connection.
    pub(crate) async fn reconnect(
        &self,
        server: ServerId,
        settled: impl FnOnce() + 'static,
    ) -> Result<(), FabricError> {
        let route = self.route(server)?;
        if let Err(FabricError::Fenced { session }) = &*route.way.borrow() {
            // It stays so.
            return Err(FabricError::Fenced { session: *session });
        }
        let asked = route.attempts.ask(|attempt| {
            route.take_down();
            let (who, verbs) = (self.who, self.verbs);
            let (device, executor) = (self.device.clone().filter(|_| verbs), self.executor.clone());
            let needs_verbs = verbs && !who.session.is_none();
            let redial = Redial { who, needs_verbs, device, executor };
            let routes = Rc::clone(&self.routes);
            // A task, so that it goes on for the others if this operation is dropped.
            self.executor.spawn(async move {
                let Some(route) = routes.get(server.index()) else { return };
                let pause = attempt.pause_ns();
                redial.executor.sleep_until(redial.executor.now().saturating_add(pause)).await;
                let outcome = redial.run(route).await;
                if matches!(outcome, Ok(()) | Err(FabricError::ServerLost { .. })) {
                    settled();
                }
                attempt.end(outcome);
            });
        });
        asked.await
    }

    pub(crate) fn serve(&self) -> Arc<Inbox> {
        match self.route(ServerId::COORDINATOR) {
            Ok(route) => route.station.line().serve(self.who),
            Err(_) => Arc::new(Inbox::closed()),
        }
    }

    pub(crate) fn reply(&self, to: CallId, outcome: CallOutcome) {
        if let Ok(route) = self.route(ServerId::COORDINATOR) {
            route.station.line().reply(to, outcome);
        }
    }
}
