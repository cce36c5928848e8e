//! Clients that are stopped, fenced, and wake up: they write nothing.

use super::parts::{AREA_BYTES, area};
use super::world::{Over, PATIENCE, Servers, client, connect};
use farwood_fabric::clock::MICROSECOND;
use farwood_fabric::control::{ControlError, SessionInfo, SessionState};
use farwood_fabric::{Buf, Endpoint, Executor, GlobalAddr, Session, SessionId, SessionOptions};
use rustix::process::Signal;

/// How often; `FARWOOD_STOPS=20000` for more.
const STOPS: u64 = 1000;

/// The one who stops and fences.
struct Warden {
    session: Session,
    endpoint: Endpoint,
}

impl Warden {
    /// Looks again and again, with an end.
    async fn until<T>(&self, what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
        let deadline = u128::from(self.endpoint.now()) + PATIENCE.as_nanos();
        loop {
            if let Some(found) = look().await {
                return found;
            }
            assert!(u128::from(self.endpoint.now()) < deadline, "waited too long for {what}");
            self.endpoint.sleep(100 * MICROSECOND).await;
        }
    }

    /// The other session, if there is one that lives.
    async fn other(&self) -> Option<(SessionId, u64)> {
        let sessions = self.session.list(&self.endpoint.op()).await.expect("the coordinator answers");
        let other =
            |info: &&SessionInfo| info.session != self.session.id() && info.state == SessionState::Active;
        sessions.iter().find(other).map(|info| (info.session, info.term))
    }

    /// How often a life of the scribbler has been everywhere.
    async fn rounds(&self, term: u64) -> u64 {
        let last = *self.session.servers().last().expect("a pool has servers");
        self.endpoint.op().read_word(area(last, term)).await.expect("the servers are there")
    }

    /// The victim's life, once it writes.
    async fn writing(&self) -> (SessionId, u64) {
        self.until("the victim to write", async || {
            let (victim, term) = self.other().await?;
            (self.rounds(term).await > 2).then_some((victim, term))
        })
        .await
    }

    async fn snapshot(&self, term: u64) -> Vec<Buf> {
        let bytes = usize::try_from(AREA_BYTES).expect("it fits");
        let servers = self.session.servers().iter();
        let places: Vec<(GlobalAddr, usize)> = servers.map(|s| (area(*s, term), bytes)).collect();
        self.endpoint.op().read_many(&places).await.expect("the servers are there")
    }

    /// Zeroes the area of a life that has not begun.
    async fn clear(&self, term: u64) {
        for server in self.session.servers() {
            let mut zeroes = self.endpoint.buf(usize::try_from(AREA_BYTES).expect("it fits"));
            zeroes.fill(0);
            self.endpoint.op().write(area(*server, term), zeroes).await.expect("the servers are there");
        }
    }

    /// Whoever stands still loses its lease.
    async fn fence(&self, victim: SessionId) {
        let fenced = self.until("the lease to run out", async || {
            match self.session.fence(&self.endpoint.op(), victim).await {
                Err(error) if matches!(error.control(), Some(ControlError::LeaseAlive { .. })) => None,
                fenced => Some(fenced),
            }
        });
        fenced.await.expect("a session without a lease is fenced");
    }

    async fn bury(&self, victim: SessionId) {
        let op = self.endpoint.op();
        let estate = self.session.adopt(&op, victim).await.expect("nobody else adopts");
        self.session.finish_adoption(&op, &estate).await.expect("we adopted it");
    }
}

#[test]
fn a_stopped_client_that_wakes_after_it_was_fenced_writes_nothing() {
    let (told, ended) = stop_and_fence(Over::Shm);
    assert!(told > 0 && ended > 0, "both ways have to be tried: {told} told, {ended} ended");
}

/// The same over TCP, where nobody has to be ended: the server stands between the client and the memory.
#[test]
fn a_stopped_client_far_away_that_wakes_after_it_was_fenced_writes_nothing() {
    let (told, ended) = stop_and_fence(Over::Tcp);
    assert!(told > 0 && ended == 0, "{told} told, {ended} ended");
}

/// Stops clients, fences them, wakes them; how many woke up and were told, and how many had to be ended.
fn stop_and_fence(over: Over) -> (u64, u64) {
    let stops = std::env::var("FARWOOD_STOPS").ok().and_then(|n| n.parse().ok()).unwrap_or(STOPS);
    let servers = Servers::start(&["--lease-ms", "10"]);
    let place = servers.place(over);
    let cluster = connect(&place).expect("the pool is there");
    let executor = Executor::new();
    let (mut told, mut ended) = (0u64, 0u64);
    executor.block_on(async {
        let session = Session::open(&cluster, SessionOptions::default()).await.expect("a session");
        let endpoint = session.endpoint().expect("an endpoint");
        session.keep_alive(&endpoint, super::parts::HEARTBEAT_NS);
        let warden = Warden { session, endpoint };
        let mut process = client("scribbler", &place);
        for stop in 0..stops {
            let (victim, term) = warden.writing().await;
            // The next life's area must be clean, so that its first writes show.
            warden.clear(term + 1).await;
            warden.endpoint.sleep(warden.endpoint.random_below(300) * MICROSECOND).await;
            process.stop();
            warden.fence(victim).await;
            let before = warden.snapshot(term).await;
            if process.has_ended() {
                // It was in the middle of a batch: there was no other way.
                ended += 1;
                process = client("scribbler", &place);
            } else {
                told += 1;
                process.signal(Signal::CONT);
            }
            warden.bury(victim).await;
            // It is awake and has found out when it writes in a new life.
            let (_, next) = warden.writing().await;
            assert_eq!(next, term + 1, "one life follows the other");
            let after = warden.snapshot(term).await;
            for (server, (before, after)) in before.iter().zip(&after).enumerate() {
                let at = before.iter().zip(after.iter()).position(|(b, a)| b != a);
                assert_eq!(
                    at, None,
                    "stop {stop}: the fenced client wrote at this offset on server {server}"
                );
            }
        }
    });
    executor.clear();
    println!(
        "{over:?}, {stops} stops: {told} clients woke up and were told, {ended} were in the middle of a batch and were ended"
    );
    (told, ended)
}
