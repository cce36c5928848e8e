//! How many verbs the simulator does per second of real time, on one core.
//!
//! `cargo bench -p farwood-sim` prints the figures (`-- PART` only those with PART in their name); without `--bench` (as `cargo test` runs it) a short run checks that it works.
//! Absolute rates depend on the machine; the bars are 1.5 M small verbs per second without tearing and 0.4 M with.

use farwood_fabric::clock::RealClock;
use farwood_fabric::control::{Reply, Request};
use farwood_fabric::procedure::ProcedureSet;
use farwood_fabric::server::ServerLogic;
use farwood_fabric::transport::sim::{FaultPlan, Sim, SimConfig};
use farwood_fabric::{Endpoint, GlobalAddr, RegionId, ServerId, Session, SessionOptions};
use farwood_memory::{MemoryServer, ServerConfig};
use std::sync::Arc;

#[derive(Clone, Copy)]
struct Setting {
    name: &'static str,
    tear: bool,
    /// Bytes of each READ and WRITE.
    bytes: usize,
    /// All clients work in a window of so many bytes: the smaller, the more conflicts.
    window: u64,
}

const CLIENTS: u64 = 16;

fn main() {
    let full = std::env::args().any(|arg| arg == "--bench");
    let wanted: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with("--")).collect();
    let verbs: u64 = if full { 4_000_000 } else { 40_000 };
    let wide = 64 << 20;
    let settings = [
        Setting { name: "8 B, no tearing", tear: false, bytes: 8, window: wide },
        Setting { name: "8 B, tearing on", tear: true, bytes: 8, window: wide },
        Setting { name: "64 B, tearing on, few conflicts", tear: true, bytes: 64, window: wide },
        Setting { name: "64 B, tearing on, many conflicts", tear: true, bytes: 64, window: 1 << 10 },
        Setting { name: "1 KiB, no tearing", tear: false, bytes: 1024, window: wide },
        Setting { name: "1 KiB, tearing on, few conflicts", tear: true, bytes: 1024, window: wide },
        Setting { name: "1 KiB, tearing on, many conflicts", tear: true, bytes: 1024, window: 16 << 10 },
    ];
    println!("one core, {CLIENTS} clients, half READs, quarter WRITEs, quarter CASes, {verbs} verbs a row");
    println!("{:<36} {:>14} {:>10} {:>14}", "setting", "verbs/s", "torn", "virtual ns/verb");
    for setting in settings.into_iter().filter(|s| wanted.iter().all(|part| s.name.contains(part.as_str()))) {
        let clock = RealClock::new();
        let (done, torn, virtual_ns) = run(setting, verbs);
        let seconds = clock.now() as f64 / 1e9;
        assert!(done >= verbs, "{done} verbs of {verbs} took effect");
        assert!(torn == 0 || setting.tear, "{torn} verbs were torn");
        assert!(torn > 0 || !setting.tear || setting.window == wide, "no verb was torn");
        println!(
            "{:<36} {:>14.0} {:>9.1}% {:>14.1}",
            setting.name,
            done as f64 / seconds,
            100.0 * torn as f64 / done as f64,
            virtual_ns as f64 / done as f64
        );
    }
}

fn run(setting: Setting, verbs: u64) -> (u64, u64, u64) {
    let config = ServerConfig {
        lease_ns: 0,
        ..ServerConfig::new(farwood_fabric::region::PoolId(1), ServerId::new(0), 1, 128 << 20)
    };
    let server = MemoryServer::new(config, ProcedureSet::default()).expect("a valid size");
    let mut config = SimConfig::adversarial(1);
    (config.tear, config.max_events) = (setting.tear, u64::MAX);
    let sim = Sim::new(config, FaultPlan::default(), vec![Arc::new(server) as Arc<dyn ServerLogic>])
        .expect("starts");
    let (spawner, cluster) = (sim.clone(), sim.cluster());
    sim.run(async move {
        let session = Session::open(&cluster, SessionOptions::default()).await.expect("a session");
        let endpoint = session.endpoint().expect("an endpoint");
        let request =
            Request::AllocChunks { index: 1, class: 0, object_bytes: 0, count: 8, flushed_through: 0 };
        let Ok(Reply::Chunks { offset, .. }) = endpoint.op().control(ServerId::new(0), &request).await else {
            panic!("no memory");
        };
        let base = GlobalAddr::new(ServerId::new(0), RegionId::MAIN, offset);
        let clients: Vec<_> = (0..CLIENTS)
            .map(|_| {
                let endpoint = session.endpoint().expect("an endpoint");
                spawner.spawn_client(async move { client(&endpoint, base, setting, verbs / CLIENTS).await })
            })
            .collect();
        for client in clients {
            client.await.expect("nobody is killed");
        }
    })
    .expect("the world ends");
    let report = sim.report();
    (report.counts.verbs, report.counts.torn, report.virtual_ns)
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
