//! Two hosts: network namespaces joined by a pair of virtual interfaces, a server in one and its clients in the other.
//!
//! Making them takes a privilege that not everybody has; without it, the tests say so and check nothing.

use super::world::{AT_WORK, Folder, PART, farwood};
use farwood_fabric::clock::{MILLISECOND, SECOND};
use farwood_fabric::transport::tcp::{TcpCluster, TcpOptions};
use farwood_fabric::{Executor, FabricError, GlobalAddr, RegionId, ServerId, Session, SessionOptions};
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const SERVER: &str = "10.213.77.1:7000";
const TOKEN: &str = "between hosts";
/// The client's interface.
const CLIENTS_END: &str = "fw-far";

/// Two namespaces and the wire between them; they end with the test.
struct Hosts {
    near: String,
    far: String,
}

fn ip(arguments: &str) -> Result<(), String> {
    let output = Command::new("ip").args(arguments.split(' ')).output().map_err(|error| error.to_string())?;
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
}

impl Hosts {
    fn new() -> Result<Self, String> {
        let name = |host| format!("fw-{host}-{}", std::process::id());
        let hosts = Self { near: name("near"), far: name("far") };
        let Self { near, far } = &hosts;
        for host in [near, far] {
            ip(&format!("netns add {host}"))?;
            ip(&format!("-n {host} link set lo up"))?;
        }
        ip(&format!("-n {near} link add fw-near type veth peer name {CLIENTS_END} netns {far}"))?;
        ip(&format!("-n {near} addr add 10.213.77.1/24 dev fw-near"))?;
        ip(&format!("-n {far} addr add 10.213.77.2/24 dev {CLIENTS_END}"))?;
        ip(&format!("-n {near} link set fw-near up"))?;
        ip(&format!("-n {far} link set {CLIENTS_END} up"))?;
        Ok(hosts)
    }

    /// A command that runs on a host.
    fn on(host: &str, command: &Command) -> Command {
        let mut moved = Command::new("ip");
        moved.args(["netns", "exec", host]).arg(command.get_program()).args(command.get_args());
        moved
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for host in [&self.near, &self.far] {
            let _ = ip(&format!("netns del {host}"));
        }
    }
}

/// Ends a process with the test. `ip netns exec` becomes the process that it starts.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn two_hosts() {
    let hosts = match Hosts::new() {
        Ok(hosts) => hosts,
        Err(why) => {
            println!("skipped: no network namespaces here ({})", why.trim());
            return;
        }
    };
    let folder = Folder::new();
    let token = folder.0.join("token");
    std::fs::write(&token, TOKEN).unwrap();
    let token = token.to_str().unwrap();
    let mut serve = farwood();
    serve.args(["serve", "--memory", "64MiB", "--listen", SERVER, "--token-file", token]);
    let mut server = Ended(
        Hosts::on(&hosts.near, &serve).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("it runs"),
    );
    let mut said = String::new();
    BufReader::new(server.0.stdout.take().expect("piped")).read_line(&mut said).expect("it speaks");
    assert!(said.contains(SERVER), "{said}");
    let mut probe = farwood();
    probe.args(["probe", "--transport", &format!("tcp://{SERVER}"), "--token-file", token]);
    probe.args(["--verbs", "read,write-write,call", "--sizes", "1024", "--depths", "1,16", "--ops", "200"]);
    let probed = Hosts::on(&hosts.far, &probe).output().expect("it runs");
    assert!(probed.status.success(), "{}", String::from_utf8_lossy(&probed.stderr));
    let mut client = Command::new(std::env::current_exe().expect("this test has a binary"));
    client.args(["--exact", "play", "--ignored", "--nocapture"]);
    let output =
        Hosts::on(&hosts.far, &client).env(PART, format!("cut-off {SERVER}")).output().expect("it runs");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && said.contains(AT_WORK),
        "{said}{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// A client whose wire is cut while it works: everything comes back in time, and when the wire is whole again, it goes on.
pub(crate) fn cut_off(address: &str) {
    let options = TcpOptions { token: TOKEN.into(), patience: Duration::from_millis(300) };
    let cluster = TcpCluster::connect(&[address.to_owned()], &options).expect("the wire is whole");
    let server = ServerId::COORDINATOR;
    let executor = Executor::new();
    executor.block_on(async {
        let session = Session::open(&cluster, SessionOptions::default()).await.expect("a session");
        let endpoint = session.endpoint().expect("an endpoint");
        let word = move |n: u64| GlobalAddr::new(server, RegionId::LOCK, n * 8);
        let workers: Vec<_> = (0..16)
            .map(|n| {
                let endpoint = endpoint.clone();
                endpoint.clone().spawn(async move {
                    let mut done = 0u64;
                    loop {
                        match endpoint.op().faa(word(n), 1).await {
                            Ok(_) => done += 1,
                            Err(error) => return (done, error),
                        }
                    }
                })
            })
            .collect();
        endpoint.sleep(50 * MILLISECOND).await;
        ip(&format!("link set {CLIENTS_END} down")).expect("we may");
        let mut counted = Vec::new();
        for worker in workers {
            let (done, error) = worker.await.expect("it ends");
            assert!(done > 0, "it worked before");
            assert_eq!(error, FabricError::Unknown { server });
            counted.push(done);
        }
        assert!(endpoint.reconnect(server).await.is_err(), "the wire is cut");
        assert!(session.heartbeat(&endpoint).await.is_err());
        ip(&format!("link set {CLIENTS_END} up")).expect("we may");
        let deadline = endpoint.now() + 20 * SECOND;
        while let Err(error) = endpoint.reconnect(server).await {
            assert!(endpoint.now() < deadline, "it does not come back: {error}");
        }
        // What was under way happened once or not at all, and happens no more.
        for (n, done) in (0..).zip(counted) {
            let seen = endpoint.op().read_word(word(n)).await.expect("it is there");
            assert!(seen == done || seen == done + 1, "{done} were acknowledged, {seen} happened");
        }
        session.heartbeat(&endpoint).await.expect("its lease was long enough");
    });
    executor.clear();
    println!("\n{AT_WORK}");
}
