//! How many verbs the simulator does per second of real time, on one core.
//!
//! `cargo bench -p farwood-sim` prints the figures (`-- PART` only those with PART in their name); without `--bench` (as `cargo test` runs it) a short run checks that it works.
//! Absolute rates depend on the machine; the bars are 1.5 M small verbs per second without tearing and 0.4 M with, and in cost mode 1.0 M with
//! 1 KiB effects over 1 GiB of memory (not reached yet on a shared machine: 0.8 to 0.9 M).

use farwood_fabric::clock::RealClock;
use farwood_fabric::control::{Reply, Request};
use farwood_fabric::procedure::ProcedureSet;
use farwood_fabric::server::ServerLogic;
use farwood_fabric::transport::sim::{FaultPlan, Profile, Sim, SimConfig};
use farwood_fabric::{Endpoint, GlobalAddr, RegionId, ServerId, Session, SessionOptions};
use farwood_memory::{MemoryServer, ServerConfig};
use std::sync::Arc;

#[derive(Clone, Copy)]
struct Setting {
    name: &'static str,
    /// Times come from the cost model, not from the adversary.
    priced: bool,
    clients: u64,
    tear: bool,
    /// Bytes of each READ and WRITE.
    bytes: usize,
    /// All clients work in a window of so many bytes: the smaller, the more conflicts.
    window: u64,
}

const WIDE: u64 = 64 << 20;

/// Under the adversary: 16 clients.
const fn adversary(name: &'static str, tear: bool, bytes: usize, window: u64) -> Setting {
    Setting { name, priced: false, clients: 16, tear, bytes, window }
}

/// In cost mode: as many clients as Sherman has.
const fn priced(name: &'static str, bytes: usize, window: u64) -> Setting {
    Setting { name, priced: true, clients: 176, tear: true, bytes, window }
}

fn main() {
    let full = std::env::args().any(|arg| arg == "--bench");
    let wanted: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with("--")).collect();
    let verbs: u64 = if full { 4_000_000 } else { 40_000 };
    let settings = [
        adversary("8 B, no tearing", false, 8, WIDE),
        adversary("8 B, tearing on", true, 8, WIDE),
        adversary("64 B, tearing on, few conflicts", true, 64, WIDE),
        adversary("64 B, tearing on, many conflicts", true, 64, 1 << 10),
        adversary("1 KiB, no tearing", false, 1024, WIDE),
        adversary("1 KiB, tearing on, few conflicts", true, 1024, WIDE),
        adversary("1 KiB, tearing on, many conflicts", true, 1024, 16 << 10),
        priced("cost mode, 8 B, 64 MiB", 8, WIDE),
        priced("cost mode, 1 KiB, 64 MiB", 1024, WIDE),
        priced("cost mode, 1 KiB, 1 GiB", 1024, 1 << 30),
    ];
    println!(
        "one core, half READs, quarter WRITEs, quarter CASes, {verbs} verbs a row; 16 clients, in cost mode 176"
    );
    println!("{:<36} {:>14} {:>10} {:>14}", "setting", "verbs/s", "torn", "virtual ns/verb");
    for setting in settings.into_iter().filter(|s| wanted.iter().all(|part| s.name.contains(part.as_str()))) {
        let (done, torn, virtual_ns, real_ns) = run(setting, verbs);
        let seconds = real_ns as f64 / 1e9;
        assert!(done >= verbs, "{done} verbs of {verbs} took effect");
        assert!(torn == 0 || setting.tear, "{torn} verbs were torn");
        assert!(torn > 0 || !setting.tear || setting.priced || setting.window == WIDE, "no verb was torn");
        println!(
            "{:<36} {:>14.0} {:>9.1}% {:>14.1}",
            setting.name,
            done as f64 / seconds,
            100.0 * torn as f64 / done as f64,
            virtual_ns as f64 / done as f64
        );
    }
}

/// Verbs, torn verbs, virtual and real time, from when all memory has been written once: the machine's first touch is not ours.
fn run(setting: Setting, verbs: u64) -> (u64, u64, u64, u64) {
    let config = ServerConfig {
        lease_ns: 0,
        max_sessions: 256,
        ..ServerConfig::new(
            farwood_fabric::region::PoolId(1),
            ServerId::new(0),
            1,
            setting.window.max(WIDE) + WIDE,
        )
    };
    let server = MemoryServer::new(config, ProcedureSet::default()).expect("a valid size");
    let mut config = if setting.priced {
        SimConfig::priced(1, Profile::named("cx5-100g").expect("built in"))
    } else {
        SimConfig::adversarial(1)
    };
    (config.tear, config.max_events) = (setting.tear, u64::MAX);
    let sim = Sim::new(config, FaultPlan::default(), vec![Arc::new(server) as Arc<dyn ServerLogic>])
        .expect("starts");
    let (spawner, cluster) = (sim.clone(), sim.cluster());
    let (before, real_ns) = sim
        .run(async move {
            let session = Session::open(&cluster, SessionOptions::default()).await.expect("a session");
            let endpoint = session.endpoint().expect("an endpoint");
            let count = u32::try_from(setting.window.max(WIDE) >> 23).expect("chunks of 8 MiB");
            let index = session.create_index(&endpoint.op(), "speed", "none", &[]).await.expect("created").id;
            let request =
                Request::AllocChunks { index, class: 0, object_bytes: 0, count, flushed_through: 0 };
            let Ok(Reply::Chunks { offset, .. }) = endpoint.op().control(ServerId::new(0), &request).await
            else {
                panic!("no memory");
            };
            let base = GlobalAddr::new(ServerId::new(0), RegionId::MAIN, offset);
            fill(&endpoint, base, setting.window).await;
            let (before, clock) = (spawner.report(), RealClock::new());
            let clients: Vec<_> = (0..setting.clients)
                .map(|_| {
                    let session = session.clone();
                    spawner.spawn_client(async move {
                        let endpoint = session.endpoint().expect("an endpoint");
                        client(&endpoint, base, setting, verbs.div_ceil(setting.clients)).await;
                    })
                })
                .collect();
            for client in clients {
                client.await.expect("nobody is killed");
            }
            (before, clock.now())
        })
        .expect("the world ends");
    let report = sim.report();
    let (done, torn) = (report.counts.verbs - before.counts.verbs, report.counts.torn - before.counts.torn);
    (done, torn, report.virtual_ns - before.virtual_ns, real_ns)
}

async fn fill(endpoint: &Endpoint, base: GlobalAddr, window: u64) {
    const STEP: usize = 64 << 10;
    let op = endpoint.op();
    for at in (0..window.max(STEP as u64)).step_by(STEP) {
        let mut data = endpoint.buf(STEP);
        data.fill(0);
        op.write(base.add(at), data).await.expect("no faults");
    }
}

async fn client(endpoint: &Endpoint, base: GlobalAddr, setting: Setting, verbs: u64) {
    let op = endpoint.op();
    let slots = setting.window / setting.bytes as u64;
    for n in 0..verbs {
        let at = base.add(endpoint.random_below(slots) * setting.bytes as u64);
        match n % 4 {
            0 | 1 => drop(op.read(at, setting.bytes).await.expect("no faults")),
            2 => op.write(at, endpoint.buf(setting.bytes)).await.expect("no faults"),
            _ => drop(op.cas(at, 0, n).await.expect("no faults")),
        }
    }
}
