//! An endpoint's connections, one to each server, and the pool as a client process knows it.

use super::connection::{Connection, Credit, Ends, FarTicket, not_executed};
use super::frames::Admission;
use super::station::{Station, aside};
use super::verbs::MAX_VERBS;
use crate::addr::{RegionId, ServerId, SessionId};
use crate::buf::BufPool;
use crate::call::{Call, CallError, CallId, CallOutcome, Target};
use crate::caps::Capabilities;
use crate::error::FabricError;
use crate::exec::Executor;
use crate::region::{Permissions, RegionTable};
use crate::transport::{Inbox, Posted, View};
use crate::verb::Batch;
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
}

impl FarCluster {
    /// The pool of these servers; the view has been made from their identities.
    pub(crate) fn new(view: View, mut stations: Vec<Arc<Station>>) -> Self {
        stations.sort_by_key(|station| station.id());
        let locks = |station: &Arc<Station>| station.table().get(RegionId::LOCK).map_or(0, |spec| spec.bytes);
        let capabilities = Capabilities {
            masked_cas: true,
            lock_memory_bytes: stations.iter().map(locks).min().unwrap_or(0),
            line_atomic: false,
            ordered_lines_bytes: 0,
            ordered_reads: true,
            max_batch: MAX_VERBS,
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

    /// Connects an endpoint to every server; one of nobody's, or one that only calls, needs no connection of its own.
    pub(crate) fn connect(&self, session: SessionId, term: u64, verbs: bool) -> Result<FarLink, FabricError> {
        let executor = Executor::current().ok_or(FabricError::NoExecutor)?;
        let mut routes = Vec::new();
        for station in &self.stations {
            let server = station.id();
            let (way, permissions) = if session.is_none() {
                (Err(FabricError::Disconnected { server }), Permissions::NONE)
            } else if !verbs {
                (Err(FabricError::Disconnected { server }), Permissions::ALL)
            } else {
                match station.connect(session, term, 0) {
                    Ok(connected) => {
                        let (connection, permissions) = open(connected, station, session, &executor)?;
                        (Ok(connection), permissions)
                    }
                    Err(error @ (FabricError::TooManyEndpoints { .. } | FabricError::Unreachable { .. })) => {
                        return Err(error);
                    }
                    Err(error) => (Err(error), Permissions::ALL),
                }
            };
            let table = station.table().restricted_to(permissions);
            let last = Cell::new(way.as_ref().map_or(0, |connection| connection.id()));
            routes.push(Route { station: Arc::clone(station), table, way: RefCell::new(way), last });
        }
        let (capabilities, routes) = (self.capabilities, routes.into());
        Ok(FarLink { session, term, verbs, capabilities, executor, routes })
    }
}

fn open(
    (socket, admission): (TcpStream, Admission),
    station: &Station,
    session: SessionId,
    executor: &Executor,
) -> Result<(Rc<Connection>, Permissions), FabricError> {
    let server = station.id();
    let Admission::Verbs { connection: id, permissions, batches, bytes } = admission else {
        return Err(FabricError::Disconnected { server });
    };
    let credit = Credit { batches: batches.max(1) as usize, bytes: bytes.max(1) as usize };
    let ends = Ends { id, server, session };
    let connection = Connection::new(ends, socket, credit, station.patience_ns(), executor);
    let connection = connection.map_err(|_| FabricError::Disconnected { server })?;
    Ok((connection, permissions))
}

/// One endpoint's way to one server.
#[derive(Debug)]
struct Route {
    station: Arc<Station>,
    table: RegionTable,
    /// The connection, or why there is none.
    way: RefCell<Result<Rc<Connection>, FabricError>>,
    /// The last connection's number at the server: the next one has to fence it, however often that is tried.
    last: Cell<u64>,
}

/// An endpoint's connections.
#[derive(Debug)]
pub(crate) struct FarLink {
    session: SessionId,
    term: u64,
    verbs: bool,
    capabilities: Capabilities,
    executor: Executor,
    routes: Box<[Route]>,
}

impl FarLink {
    pub(crate) fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn route(&self, server: ServerId) -> Result<&Route, FabricError> {
        self.routes.get(server.index()).ok_or(FabricError::UnknownServer { server })
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

    /// Posts a checked batch.
    pub(crate) fn post(&self, batch: Batch, pool: &BufPool) -> Posted {
        let verbs = batch.len();
        let posted = match self.route(batch.server()) {
            Ok(route) => match &*route.way.borrow() {
                Ok(connection) => connection.post(batch, pool),
                Err(error) => Err(not_executed(error.clone(), verbs)),
            },
            Err(error) => Err(not_executed(error, verbs)),
        };
        match posted {
            Ok(ticket) => Posted::Far(ticket),
            Err(failure) => Posted::Ready(Err(failure)),
        }
    }

    pub(crate) async fn call(&self, target: Target, call: Call) -> CallOutcome {
        // Sessions are reached through the coordinator.
        let through = match target {
            Target::Server(server) => server,
            Target::Session(_) => ServerId::COORDINATOR,
        };
        let route = self.route(through).map_err(|error| CallError::Failed(error.to_string()))?;
        if route.station.line().is_lost() {
            let station = Arc::clone(&route.station);
            if aside(move || station.reopen_line()).await.is_err() {
                return Err(CallError::Unknown);
            }
        }
        let line = route.station.line();
        line.call(target, call).await
    }

    /// Fences the connection to `server` and opens a new one.
    pub(crate) async fn reconnect(&self, server: ServerId) -> Result<(), FabricError> {
        let route = self.route(server)?;
        let before =
            std::mem::replace(&mut *route.way.borrow_mut(), Err(FabricError::Disconnected { server }));
        match &before {
            Ok(connection) => connection.break_off(),
            Err(FabricError::Fenced { session }) => {
                // It stays so.
                let session = *session;
                *route.way.borrow_mut() = before;
                return Err(FabricError::Fenced { session });
            }
            Err(_) => {}
        }
        let replaces = route.last.get();
        let (station, session, term, verbs) =
            (Arc::clone(&route.station), self.session, self.term, self.verbs);
        let connected = aside(move || {
            station.reopen_line()?;
            if session.is_none() || !verbs {
                Ok(None)
            } else {
                station.connect(session, term, replaces).map(Some)
            }
        })
        .await;
        let opened = connected.and_then(|connected| match connected {
            Some(connected) => {
                open(connected, &route.station, session, &self.executor).map(|(opened, _)| opened)
            }
            None => Err(FabricError::Disconnected { server }),
        });
        let outcome = match &opened {
            Ok(_) => Ok(()),
            Err(FabricError::Disconnected { .. }) if session.is_none() || !verbs => Ok(()),
            Err(error) => Err(error.clone()),
        };
        if let Ok(connection) = &opened {
            route.last.set(connection.id());
        }
        *route.way.borrow_mut() = opened;
        outcome
    }

    pub(crate) fn serve(&self) -> Arc<Inbox> {
        match self.route(ServerId::COORDINATOR) {
            Ok(route) => route.station.line().serve(self.session, self.term),
            Err(_) => Arc::new(Inbox::closed()),
        }
    }

    pub(crate) fn reply(&self, to: CallId, outcome: CallOutcome) {
        if let Ok(route) = self.route(ServerId::COORDINATOR) {
            route.station.line().reply(to, outcome);
        }
    }
}

/// A batch under way.
pub(crate) type Ticket = FarTicket;
