//! Memory that is kept: a server that is started again takes it over, and clients of the dead one cannot touch it.

use super::parts::{AREA_BYTES, INDEX, area, cells};
use super::world::{Folder, address_in, client, connect, farwood, serve, serve_at};
use farwood_fabric::clock::{MILLISECOND, SECOND};
use farwood_fabric::control::SessionState;
use farwood_fabric::transport::shm::{ShmCluster, ShmOptions};
use farwood_fabric::{Executor, ServerId, Session, SessionOptions};
use farwood_index::{Engine, OrderedIndex, Pool};
use farwood_sim::trial::join_options;
use rustix::process::Signal;

const POOL: [&str; 4] = ["--pool", "00000000000000000000000000000007", "--lease-ms", "50"];

/// A pool of one server need not be named: its memory says which it is.
#[test]
fn kept_memory_knows_its_pool() {
    let folder = Folder::new();
    let memory = folder.0.to_string_lossy().into_owned();
    let pool = || {
        let server = serve(&folder.0, &["--path", &memory]);
        let cluster = ShmCluster::connect(std::slice::from_ref(&folder.0), &ShmOptions::default()).unwrap();
        drop(server);
        std::fs::remove_file(folder.0.join("m0.sock")).unwrap();
        cluster.view().servers[0].pool
    };
    let first = pool();
    assert_eq!(pool(), first);
    let refused = farwood()
        .args(["serve", "--memory", "64MiB", "--shm"])
        .arg(&folder.0)
        .args(["--path", &memory])
        .args(POOL)
        .output();
    let said = String::from_utf8(refused.unwrap().stderr).unwrap();
    assert!(said.contains("it belongs to pool") && said.contains(&first.to_string()), "{said}");
}

/// An operation that a client is in the middle of goes on with the next process, and so does its session.
#[test]
fn a_server_that_is_started_again_has_what_it_had_and_its_sessions() {
    let folder = Folder::new();
    let memory = folder.0.to_string_lossy().into_owned();
    let arguments = [&POOL[..], &["--path", &memory]].concat();
    let mut server = serve(&folder.0, &arguments);
    let cluster = ShmCluster::connect(std::slice::from_ref(&folder.0), &ShmOptions::default()).unwrap();
    let executor = Executor::new();
    executor.block_on(async {
        let pool = Pool::join_with(&cluster, join_options(&cells())).await.unwrap();
        let endpoint = pool.session().endpoint().unwrap();
        cells().create(&pool, &endpoint, INDEX).await.unwrap();
        let attached = cells().attach(&pool, &endpoint, INDEX).await.unwrap();
        let index = cells().open(&attached, &endpoint, 0).unwrap();
        for life in 1..=3u64 {
            index.put(&5u64.to_be_bytes(), &life.to_be_bytes()).await.unwrap();
            server.kill();
            // Nobody serves the memory, and nobody could have fenced us.
            assert_eq!(index.get(&5u64.to_be_bytes()).await.unwrap(), Some(life.to_be_bytes().to_vec()));
            server = serve(&folder.0, &arguments);
            assert_eq!(index.get(&5u64.to_be_bytes()).await.unwrap(), Some(life.to_be_bytes().to_vec()));
            pool.session().heartbeat(&endpoint).await.unwrap();
            assert!(!pool.session().is_lost());
            // Whoever comes now is beside us.
            let other = Session::open(&cluster, SessionOptions::default()).await.unwrap();
            let listed = other.list(&endpoint.op()).await.unwrap();
            let ours = listed.iter().find(|info| info.session == pool.session().id()).unwrap();
            assert_eq!((ours.term, ours.state), (pool.session().term(), SessionState::Active));
            other.close_unused().await.unwrap();
        }
        cells().check(&attached, &endpoint).await.unwrap();
        pool.leave(&endpoint).await.unwrap();
    });
    executor.clear();
    server.signal(Signal::TERM);
    assert!(server.0.wait().unwrap().success());
    assert_eq!(folder.names(), ["m0.memory"], "a clean stop leaves the memory and nothing else");
}

/// The same way leads to the server's successor, which knows the sessions that were there.
#[test]
fn a_server_that_is_started_again_is_reached_again_over_tcp() {
    let folder = Folder::new();
    let memory = folder.0.to_string_lossy().into_owned();
    let arguments = [&POOL[..2], &["--lease-ms", "10000", "--path", &memory]].concat();
    let (mut server, said) = serve_at(&["--listen", "127.0.0.1:0"], &arguments);
    let address = address_in(&said);
    let cluster = connect(&format!("tcp://{address}")).unwrap();
    let executor = Executor::new();
    executor.block_on(async {
        let session = Session::open(&cluster, SessionOptions::default()).await.unwrap();
        let endpoint = session.endpoint().unwrap();
        let word = area(ServerId::COORDINATOR, 0);
        endpoint.op().write_word(word, 77).await.unwrap();
        server.kill();
        assert!(endpoint.op().write_word(word, 78).await.is_err());
        assert!(endpoint.reconnect(ServerId::COORDINATOR).await.is_err(), "nobody is there");
        (server, _) = serve_at(&["--listen", &address], &arguments);
        endpoint.reconnect(ServerId::COORDINATOR).await.unwrap();
        let seen = endpoint.op().read_word(word).await.unwrap();
        assert!(seen == 77 || seen == 78, "{seen}");
        endpoint.op().write_word(word, 79).await.unwrap();
        assert_eq!(endpoint.op().read_word(word).await, Ok(79));
        session.heartbeat(&endpoint).await.unwrap();
        // One whose process ends while no server is there is not kept for it.
        let other = Session::open(&cluster, SessionOptions::default()).await.unwrap();
        assert!(other.fence(&other.endpoint().unwrap().op(), session.id()).await.is_err(), "its lease runs");
        other.close_unused().await.unwrap();
        session.close(&endpoint).await.unwrap();
    });
    executor.clear();
}

/// Nobody sees a process end while there is no server: the next one finds that it has gone.
#[test]
fn a_client_that_ends_while_the_server_is_away_is_recovered_at_once() {
    let folder = Folder::new();
    let memory = folder.0.to_string_lossy().into_owned();
    let arguments = [&POOL[..2], &["--lease-ms", "0", "--path", &memory]].concat();
    let mut server = serve(&folder.0, &arguments);
    let mut mortal = client("scribbler", folder.0.to_str().unwrap());
    server.kill();
    mortal.kill();
    server = serve(&folder.0, &arguments);
    let cluster = ShmCluster::connect(std::slice::from_ref(&folder.0), &ShmOptions::default()).unwrap();
    let executor = Executor::new();
    executor.block_on(async {
        let session = Session::open(&cluster, SessionOptions::default()).await.unwrap();
        let endpoint = session.endpoint().unwrap();
        let listed = session.list(&endpoint.op()).await.unwrap();
        let others: Vec<_> = listed.iter().filter(|info| info.session != session.id()).collect();
        assert_eq!(others.len(), 1, "{listed:?}");
        // Leases last for ever here.
        session.fence(&endpoint.op(), others[0].session).await.expect("its process is gone");
        session.close(&endpoint).await.unwrap();
    });
    executor.clear();
    drop(server);
}

#[test]
fn clients_of_a_dead_server_cannot_touch_what_its_successor_has() {
    let folder = Folder::new();
    let memory = folder.0.to_string_lossy().into_owned();
    let arguments = [&POOL[..], &["--path", &memory]].concat();
    let executor = Executor::new();
    let mut server = serve(&folder.0, &arguments);
    let (mut told, mut ended) = (0, 0);
    for _ in 0..20 {
        let mut zombie = client("scribbler", folder.0.to_str().unwrap());
        zombie.stop();
        server.kill();
        // Takes over; the zombie is stopped, and has not found out.
        server = serve(&folder.0, &arguments);
        let cluster = ShmCluster::connect(std::slice::from_ref(&folder.0), &ShmOptions::default()).unwrap();
        executor.block_on(async {
            let session = Session::open(&cluster, SessionOptions::default()).await.unwrap();
            let endpoint = session.endpoint().unwrap();
            // Its session lives on, so it is shut out: it must find its gate closed, and get no other in that session.
            let op = endpoint.op();
            let listed = session.list(&op).await.unwrap();
            let victim =
                listed.iter().find(|info| info.session != session.id()).expect("it lives on").clone();
            session.evict(&op, victim.session, victim.term).await.unwrap();
            // Each session scribbles in an area of its own.
            let (its, bytes) =
                (area(ServerId::COORDINATOR, victim.term), usize::try_from(AREA_BYTES).unwrap());
            let before = op.read(its, bytes).await.unwrap();
            if zombie.has_ended() {
                ended += 1;
            } else {
                told += 1;
                zombie.signal(Signal::CONT);
                let known = [session.term(), victim.term];
                let deadline = endpoint.now() + 20 * SECOND;
                // When it has found out, it begins anew.
                while session.list(&op).await.unwrap().iter().all(|info| known.contains(&info.term)) {
                    assert!(endpoint.now() < deadline, "the zombie has not found out");
                    endpoint.sleep(MILLISECOND).await;
                }
            }
            let after = op.read(its, bytes).await.unwrap();
            assert!(*before == *after, "a client of the dead server wrote");
            zombie.kill();
            for victim in session.list(&op).await.unwrap() {
                if victim.session != session.id() {
                    session.evict(&op, victim.session, victim.term).await.unwrap();
                    let estate = session.adopt(&op, victim.session).await.unwrap();
                    session.finish_adoption(&op, &estate).await.unwrap();
                }
            }
            drop(op);
            session.close(&endpoint).await.unwrap();
        });
    }
    executor.clear();
    assert!(ended > 0 && told > 0, "both ways have to be tried: {told} told, {ended} ended");
}
