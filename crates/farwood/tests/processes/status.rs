//! `farwood status`: what servers say of themselves, and of servers that say nothing.

use super::parts::{INDEX, cells};
use super::world::{Over, Servers, connect, farwood};
use farwood_fabric::{Executor, GlobalAddr, Label, RegionId, ServerId, SessionOptions};
use farwood_index::{Engine, Pool};
use serde_json::Value;

/// What `farwood status` prints, and whether it is content.
pub(crate) fn status(arguments: &[&str]) -> (String, bool) {
    let output = farwood().arg("status").args(arguments).output().expect("it runs");
    (String::from_utf8(output.stdout).expect("text"), output.status.success())
}

#[test]
fn servers_say_who_they_are_and_who_uses_them() {
    let mut servers = Servers::start(&["--lease-ms", "0", "--sessions", "9"]);
    let (tcp, shm) = (servers.place(Over::Tcp), format!("shm://{}", servers.folder.0.display()));
    let cluster = connect(&tcp).expect("the pool is there");
    let executor = Executor::new();
    let pool = executor.block_on(async {
        let label = Label::new("a test of status");
        let options = SessionOptions { label, ..SessionOptions::default() };
        let pool = Pool::join(&cluster, options).await.expect("joins");
        let endpoint = pool.session().endpoint().expect("an endpoint");
        cells().create(&pool, &endpoint, INDEX).await.expect("creates");
        let before = parse(&status(&[&tcp, "--json"]).0);
        let word = GlobalAddr::new(ServerId::COORDINATOR, RegionId::LOCK, 0);
        for _ in 0..100 {
            endpoint.op().faa(word, 1).await.expect("it is there");
        }
        let (said, is_fine) = status(&[&tcp, "--json"]);
        let said = parse(&said);
        assert!(is_fine);
        let number = |at: usize, name: &str| said[at]["status"][name].as_u64().expect("a number");
        for server in [0, 1] {
            assert_eq!(said[server]["status"]["pool"], "0123456789abcdef0123456789abcdef");
            assert_eq!((number(server, "server"), number(server, "servers")), (server as u64, 2));
            assert_eq!(number(server, "memory_bytes") >> 20, 64, "{said}");
            assert_eq!((number(server, "endpoints"), number(server, "connections")), (1, 1));
            assert_eq!((number(server, "processes_far"), number(server, "processes_mapping")), (2, 0));
        }
        assert_eq!(number(0, "verbs") - before[0]["status"]["verbs"].as_u64().expect("a number"), 100);
        assert!(number(0, "batches") >= 100 && number(0, "bytes_in") > 100 && number(0, "bytes_out") > 100);
        assert_eq!(number(0, "max_sessions"), 9);
        assert_eq!(said[0]["status"]["sessions"].as_array().map(Vec::len), Some(1));
        let session = &said[0]["status"]["sessions"][0];
        assert_eq!((&session["label"], &session["state"]), (&label.as_str().into(), &"active".into()));
        assert!(session["adopter"].is_null() && session["since_seconds"].as_f64() > Some(0.0), "{session}");
        assert_eq!(said[0]["status"]["indexes"][0]["name"], INDEX);
        assert!(
            number(0, "free_chunks") < number(0, "chunks") || number(1, "free_chunks") < number(1, "chunks")
        );
        pool
    });
    // For people, and over the other way.
    let (text, is_fine) = status(&[&shm]);
    assert!(is_fine && text.contains("sessions   1 of 9, leases never end"), "{text}");
    assert!(text.contains("for ever") && text.contains("active  a test of status"), "{text}");
    assert!(text.contains(&format!("'{INDEX}', cells, ready")), "{text}");
    drop(pool);
    executor.clear();
    // One of them is gone; of the other we still hear.
    servers.processes[0].kill();
    let (said, is_fine) = status(&[&tcp, "--json"]);
    let said = parse(&said);
    assert!(!is_fine && said[1]["status"]["server"] == 1);
    assert!(said[0]["error"].as_str().is_some_and(|why| why.contains("no server listens")), "{said}");
}

pub(crate) fn parse(text: &str) -> Value {
    serde_json::from_str(text).expect("JSON")
}

#[test]
fn what_names_no_server_is_said_so() {
    for url in ["local", "tcp", "nonsense", "tcp://nowhere"] {
        let output = farwood().args(["status", url]).output().expect("it runs");
        let said = String::from_utf8(output.stderr).expect("text");
        assert!(output.status.code() == Some(2) && said.contains("names no servers"), "{said}");
    }
}
