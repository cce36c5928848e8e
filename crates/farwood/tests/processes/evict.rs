//! `farwood evict`: ends a session that lives, and no other one.

use super::parts::{INDEX, cells};
use super::status::{parse, status};
use super::world::{Over, Servers, client, connect, farwood, wait_for};
use farwood_fabric::{Executor, SessionOptions};
use farwood_index::{Engine, Pool};
use serde_json::Value;

/// What `farwood evict` prints, and what it exits with.
fn evict(arguments: &[&str]) -> (String, Option<i32>) {
    let output = farwood().arg("evict").args(arguments).output().expect("it runs");
    let said = [output.stdout, output.stderr].concat();
    (String::from_utf8(said).expect("text"), output.status.code())
}

pub(crate) fn sessions(url: &str) -> Vec<Value> {
    let said = parse(&status(&[url, "--json"]).0);
    said[0]["status"]["sessions"].as_array().expect("a list").clone()
}

#[test]
fn a_session_that_lives_is_ended_and_no_other() {
    for over in [Over::Tcp, Over::Shm] {
        let servers = Servers::start(&["--lease-ms", "600000"]);
        let place = servers.place(over);
        let url = if over == Over::Tcp { place.clone() } else { format!("shm://{place}") };
        let executor = Executor::new();
        executor.block_on(async {
            let pool = Pool::join(&connect(&place).expect("a pool"), SessionOptions::default())
                .await
                .expect("joins");
            let endpoint = pool.session().endpoint().expect("an endpoint");
            cells().create(&pool, &endpoint, INDEX).await.expect("creates");
            pool.leave(&endpoint).await.expect("leaves");
        });
        executor.clear();
        let mut victim = client("cells", &place);
        let [listed] = &sessions(&url)[..] else { panic!("one session") };
        let number = listed["session"].to_string();
        let term = listed["term"].as_u64().expect("a number");

        let (said, code) = evict(&[&url, &number, "--term", &(term + 1).to_string()]);
        assert!(code == Some(2) && said.contains("was not touched"), "{over:?}: {said}");
        let (said, code) = evict(&[&url, "200"]);
        assert!(code == Some(2) && said.contains("no session 200"), "{over:?}: {said}");
        let [still] = &sessions(&url)[..] else { panic!("one session") };
        assert!(still["state"] == "active" && !victim.has_ended(), "{over:?}: {still}");

        let (said, code) = evict(&[&url, &number, "--term", &term.to_string()]);
        assert!(code == Some(0) && said.contains("is fenced"), "{over:?}: {said}");
        // It writes without a pause, so it finds out soon, and says so by ending.
        wait_for("the victim to find out", || victim.has_ended());
        let lives = |session: &Value| session["term"] == term && session["state"] == "active";
        assert!(!sessions(&url).iter().any(lives), "{over:?}");
    }
}
