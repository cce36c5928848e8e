//! `farwood check --repair` on servers that run: what it says, whom it refuses, and that it can be killed.

use super::parts::TREES;
use super::world::{Over, Process, Servers, client, connect, farwood, nap};
use farwood_fabric::control::{ObjectChunk, Reply, Request};
use farwood_fabric::{Executor, GlobalAddr, Label, RegionId, SessionOptions};
use farwood_index::{Client, Pool};
use std::fmt::Write as _;
use std::io::Write as _;
use std::process::{Child, Stdio};
use std::time::Duration;

/// What a command prints, and its exit code.
fn run(url: &str, command: &str, arguments: &[&str]) -> (String, Option<i32>) {
    let output = farwood().args([command, url]).args(arguments).output().expect("it runs");
    let mut said = String::from_utf8(output.stdout).expect("text");
    said += &String::from_utf8(output.stderr).expect("text");
    (said, output.status.code())
}

/// Loads so many pairs.
fn load(url: &str, index: &str, pairs: u64) {
    let mut load = farwood()
        .args(["load", url, index])
        .stdin(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("it runs");
    let mut lines = String::new();
    for n in 0..pairs {
        let _ = writeln!(lines, "{n},v{n}");
    }
    load.stdin.take().expect("piped").write_all(lines.as_bytes()).expect("it reads");
    assert!(load.wait().expect("it ends").success());
}

/// Sets bits of the first objects that are free in every chunk of an index; how many, and how many bytes those objects
/// have.
fn leak(place: &str, index: &str, bits_of_chunk: u32) -> (u64, u64) {
    let cluster = connect(place).expect("the pool is there");
    let executor = Executor::new();
    let leaked = executor.block_on(async {
        let pool = Pool::join(&cluster, SessionOptions::default()).await.expect("joins");
        let (pool, endpoint) = pool.with_endpoint().await.expect("an endpoint");
        let op = endpoint.op();
        let info = pool.open_index(&op, index, None).await.expect("it is there");
        let (mut objects, mut bytes) = (0, 0);
        for server in pool.session().servers() {
            let listed = op.control(*server, &Request::ListChunks { owner: None }).await.expect("listed");
            let Reply::ChunkList { chunks, .. } = listed else { panic!("a list") };
            for chunk in chunks.iter().filter(|chunk| chunk.index == info.id && chunk.object_bytes > 0) {
                let chunk_bytes = pool.session().cluster().view().chunk_bytes(*server);
                let layout = ObjectChunk::new(chunk_bytes, chunk.object_bytes).expect("objects fit");
                let mut left = bits_of_chunk;
                for word in 0..layout.bitmap_words() {
                    let at = GlobalAddr::new(*server, RegionId::MAIN, chunk.offset)
                        .add(ObjectChunk::BITMAP_OFFSET + word * 8);
                    let seen = op.read_word(at).await.expect("read");
                    let mut wanted = !seen & layout.word_mask(word);
                    while wanted.count_ones() > left {
                        wanted &= wanted - 1;
                    }
                    if wanted != 0 {
                        assert_eq!(op.cas(at, seen, seen | wanted).await.expect("set"), seen);
                        left -= wanted.count_ones();
                        objects += u64::from(wanted.count_ones());
                        bytes += u64::from(wanted.count_ones()) * u64::from(chunk.object_bytes);
                    }
                }
            }
        }
        drop(op);
        pool.leave(&endpoint).await.expect("leaves");
        (objects, bytes)
    });
    executor.clear();
    leaked
}

#[test]
fn a_repair_by_hand() {
    let servers = Servers::start(&["--lease-ms", "600000"]);
    let place = servers.place(Over::Tcp);
    for engine in ["sphinx", "art", "sherman", "fg+"] {
        assert_eq!(run(&place, "create", &[engine, "--engine", engine]), (String::new(), Some(0)));
        let keys = if ["sphinx", "art"].contains(&engine) { ["--keys", "text"] } else { ["--keys", "u64"] };
        load(&place, engine, 500);
        let (said, code) = run(&place, "check", &[engine]);
        assert!(code == Some(0) && said.contains("is whole") && said.contains("nothing is leaked"), "{said}");

        let (objects, bytes) = leak(&place, engine, 70);
        assert!(objects > 70, "{engine}: {objects}");
        let (said, code) = run(&place, "check", &[engine]);
        let counted = format!("{objects} leaked ({bytes} bytes)");
        assert!(code == Some(0) && said.contains(&counted), "{said}, not {counted}");
        let (said, code) = run(&place, "check", &[engine, "--repair", "--dry-run"]);
        assert!(code == Some(1) && said.contains(&counted) && said.contains("nothing was freed"), "{said}");

        let cluster = connect(&place).expect("the pool is there");
        let stays = Client::labelled(&cluster, 1, Label::new("somebody who stays")).expect("joins");
        let (said, code) = run(&place, "check", &[engine]);
        assert!(code == Some(0) && said.contains("cannot be told"), "{said}");
        let (said, code) = run(&place, "check", &[engine, "--repair"]);
        assert!(code == Some(2) && said.contains("cannot be taken out of use"), "{said}");
        assert!(said.contains("(somebody who stays)"), "it says who is there: {said}");
        drop((stays, cluster));

        let before = run(&place, "scan", &[engine, "--limit", "1000", keys[0], keys[1]]);
        let (said, code) = run(&place, "check", &[engine, "--repair"]);
        let freed = format!("freed {objects} that were leaked ({bytes} bytes)");
        assert!(code == Some(0) && said.contains(&freed), "{said}, not {freed}");
        for arguments in [&[engine][..], &[engine, "--repair"], &[engine, "--repair", "--dry-run"]] {
            let (said, code) = run(&place, "check", arguments);
            assert!(code == Some(0) && said.contains("nothing is leaked"), "{arguments:?}: {said}");
        }
        let after = run(&place, "scan", &[engine, "--limit", "1000", keys[0], keys[1]]);
        assert!(before == after && after.0.lines().count() == 500, "{}", after.0.lines().count());
    }
    let (said, code) = run(&place, "check", &["art", "--dry-run"]);
    assert!(code == Some(2) && said.contains("--repair"), "{said}");
    let (said, code) = run(&place, "check", &["nothing", "--repair"]);
    assert!(code == Some(2) && said.contains("there is no index 'nothing'"), "{said}");
}

/// Whoever is killed in the middle of a repair leaves an index that another repair finishes, and that can be used
/// meanwhile again.
#[test]
fn a_repair_that_is_killed_is_ended_by_another() {
    let servers = Servers::start(&["--lease-ms", "1000"]);
    let place = servers.place(Over::Tcp);
    assert_eq!(run(&place, "create", &["numbers"]), (String::new(), Some(0)));
    load(&place, "numbers", 20_000);
    // Real deaths, too.
    for (name, engine) in TREES {
        assert_eq!(run(&place, "create", &[name, "--engine", engine]), (String::new(), Some(0)));
    }
    let mut clients = [client("trees", &place), client("trees", &place)];
    nap(Duration::from_millis(50));
    clients.iter_mut().for_each(Process::kill);
    let (mut ended, mut killed) = (0, 0);
    for round in 0..8u64 {
        let (said, code) = run(&place, "check", &["numbers", "--repair"]);
        assert!(code == Some(0), "round {round}: {said}");
        leak(&place, "numbers", 5_000);
        let mut repair = farwood()
            .args(["check", &place, "numbers", "--repair"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("it runs");
        nap(Duration::from_millis(10 + 25 * round));
        if repair.try_wait().expect("it can be asked").is_some() {
            ended += 1;
        } else {
            killed += 1;
        }
        kill(&mut repair);
    }
    assert!(killed > 0, "{ended} ended before they were killed");
    for index in ["numbers"].into_iter().chain(TREES.iter().map(|(name, _)| *name)) {
        let (said, code) = run(&place, "check", &[index, "--repair"]);
        assert!(code == Some(0) && said.contains("is whole"), "{said}");
        let (said, code) = run(&place, "check", &[index]);
        assert!(code == Some(0) && said.contains("nothing is leaked"), "{said}");
    }
    let (said, _) = run(&place, "scan", &["numbers", "--limit", "30000"]);
    assert_eq!(said.lines().count(), 20_000);
    assert!(
        said.lines().all(|line| line.split_once('\t').is_some_and(|(key, value)| value == format!("v{key}")))
    );
}

fn kill(child: &mut Child) {
    let _ = child.kill();
    let _ = child.wait();
}
