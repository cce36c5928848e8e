//! `farwood save` and `restore` on servers that run: whole, beside writers, killed in the middle, from files that are
//! damaged.

use super::world::{Folder, Over, Servers, connect, farwood, nap, wait_for};
use farwood_index::client::ClientIndex;
use farwood_index::{AnyEngine, Client, KeyValue};
use std::collections::BTreeMap;
use std::ops::Bound;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// What a command says, and its exit code.
fn run(arguments: &[&str]) -> (String, Option<i32>) {
    let output = farwood().args(arguments).output().expect("it runs");
    let mut said = String::from_utf8(output.stdout).expect("text");
    said += &String::from_utf8(output.stderr).expect("text");
    (said, output.status.code())
}

#[track_caller]
fn succeeds(arguments: &[&str]) -> String {
    let (said, code) = run(arguments);
    assert_eq!(code, Some(0), "{arguments:?}: {said}");
    said
}

#[track_caller]
fn refused(arguments: &[&str], why: &str) {
    let (said, code) = run(arguments);
    assert!(
        code == Some(2) && said.contains(why) && said.lines().count() == 1,
        "{arguments:?}: {code:?} {said}"
    );
}

fn begin(arguments: &[&str]) -> Child {
    farwood().args(arguments).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it runs")
}

fn kill(mut child: Child) {
    let _ = child.kill();
    let _ = child.wait();
}

fn client(servers: &Servers) -> Client {
    Client::new(&connect(&servers.place(Over::Tcp)).expect("the pool is there"), 1).expect("joins")
}

/// All pairs of an index.
fn all(index: &ClientIndex) -> Vec<KeyValue> {
    let mut pairs: Vec<KeyValue> = Vec::new();
    loop {
        let from = pairs.last().map(|(key, _)| key.clone());
        let start = from.as_deref().map_or(Bound::Unbounded, Bound::Excluded);
        let page = index.scan((start, Bound::Unbounded), 2_000).wait().expect("scanned");
        if page.is_empty() {
            return pairs;
        }
        pairs.extend(page);
    }
}

/// Puts many pairs at a time.
fn put_all(index: &ClientIndex, pairs: impl Iterator<Item = KeyValue>) {
    let mut under_way = Vec::new();
    for (key, value) in pairs {
        under_way.push(index.put(key, value));
        if under_way.len() == 256 {
            under_way.drain(..).for_each(|put| put.wait().expect("put"));
        }
    }
    for put in under_way {
        put.wait().expect("put");
    }
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a plain name")
}

fn file_in(folder: &Folder) -> PathBuf {
    folder.0.join("saved")
}

const ENGINES: [&str; 4] = ["sherman", "fg+", "sphinx", "art"];

/// Keys and values of every length that an engine takes, the limits among them.
fn pairs_for(engine: &str) -> Vec<KeyValue> {
    let of_any_length = ["sphinx", "art"].contains(&engine);
    let pair = |n: u64| {
        let scattered = n.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        if of_any_length {
            let key = scattered.to_be_bytes()[..usize::try_from(n % 9).expect("small")].to_vec();
            return (key, vec![n.to_le_bytes()[0]; usize::try_from(n % 700).expect("small")]);
        }
        (scattered.to_be_bytes().to_vec(), n.to_le_bytes().to_vec())
    };
    let mut pairs: BTreeMap<_, _> = (0..3_000).map(pair).collect();
    if of_any_length {
        pairs.insert(Vec::new(), Vec::new());
        pairs.insert(vec![7; 4096], b"the longest key".to_vec());
        pairs.insert(b"the longest value".to_vec(), vec![8; 1 << 20]);
        pairs.insert(vec![9; 4096], vec![9; 1 << 20]);
    } else {
        pairs.insert(vec![0; 8], vec![0; 8]);
        pairs.insert(vec![255; 8], vec![255; 8]);
    }
    pairs.into_iter().collect()
}

#[test]
fn every_engine_there_and_back() {
    // Chunks of many classes.
    let servers = || Servers::start(&["--memory", "256MiB"]);
    let (from, to, folder) = (servers(), servers(), Folder::new());
    let (from_url, to_url, file) = (from.place(Over::Tcp), to.place(Over::Tcp), file_in(&folder));
    let source = client(&from);
    for engine in ENGINES {
        let made = AnyEngine::named(engine, 8, 8).expect("it is known");
        put_all(&source.create(engine, &made).wait().expect("created"), pairs_for(engine).into_iter());
        source.create(&format!("empty {engine}"), &made).wait().expect("created");
    }
    let said = succeeds(&["save", &from_url, text(&file)]);
    assert!(said.contains("saved 8 indexes"), "{said}");
    assert_eq!(folder.names(), ["saved"], "nothing else is left");
    let said = succeeds(&["restore", text(&file), &to_url]);
    assert!(said.contains("restored 8 indexes"), "{said}");
    let target = client(&to);
    for engine in ENGINES {
        let index = target.open(engine).wait().expect("it was restored");
        assert_eq!(
            format!("{:?}", index.engine()),
            format!("{:?}", source.open(engine).wait().expect("open").engine())
        );
        assert!(all(&index) == pairs_for(engine), "{engine}");
        assert!(all(&target.open(&format!("empty {engine}")).wait().expect("restored")).is_empty());
        // It can be used.
        index.put(vec![1; 8], vec![2; 8]).wait().expect("put");
        assert_eq!(index.get(vec![1; 8]).wait().expect("got"), Some(vec![2; 8]));
    }
    // What is there is not overwritten; by another name, or if that is wanted.
    refused(&["restore", text(&file), &to_url], "there is an index");
    refused(&["restore", text(&file), &to_url, "--into", "x"], "choose one by --index");
    refused(&["restore", text(&file), &to_url, "--index", "missing"], "has no index 'missing'");
    refused(&["restore", text(&file), &to_url, "--index", "art"], "there is an index 'art'");
    let quiet = succeeds(&["restore", text(&file), &to_url, "--index", "art", "--into", "copy", "--quiet"]);
    assert_eq!(quiet, "");
    assert!(all(&target.open("copy").wait().expect("restored")) == pairs_for("art"));
    succeeds(&["restore", text(&file), &to_url, "--index", "sphinx", "--replace"]);
    let replaced = client(&to);
    assert!(
        all(&replaced.open("sphinx").wait().expect("restored")) == pairs_for("sphinx"),
        "as it was saved"
    );
    // Some indexes alone.
    succeeds(&["save", &from_url, text(&file), "--index", "fg+", "--index", "empty art"]);
    refused(
        &["restore", text(&file), &to_url, "--index", "sphinx"],
        "has no index 'sphinx'; it has 'fg+', 'empty art'",
    );
    for engine in ENGINES {
        succeeds(&["check", &to_url, engine]);
    }
}

/// Where a save cannot be written, or what it is to save is not there, no file is left.
#[test]
fn a_save_that_fails_leaves_the_file_that_was_there() {
    let (servers, folder) = (Servers::start(&[]), Folder::new());
    let (url, file) = (servers.place(Over::Tcp), file_in(&folder));
    let source = client(&servers);
    let index =
        source.create("it", &AnyEngine::named("sphinx", 0, 0).expect("known")).wait().expect("created");
    put_all(&index, (0..2_000u64).map(|n| (n.to_be_bytes().to_vec(), vec![1; 500])));
    succeeds(&["save", &url, text(&file)]);
    let before = std::fs::read(&file).expect("it is there");
    refused(&["save", &url, text(&file), "--index", "missing"], "there is no index 'missing'");
    refused(&["save", "tcp://127.0.0.1:1", text(&file)], "no server listens");
    refused(&["save", &url, text(&folder.0.join("nowhere/saved"))], "cannot write");
    refused(&["save", &url, text(&folder.0)], "is a folder");
    // A full disk.
    let partial = folder.0.join("saved.partial");
    std::os::unix::fs::symlink("/dev/full", &partial).expect("a link");
    refused(&["save", &url, text(&file)], "No space left");
    assert_eq!((folder.names(), std::fs::read(&file).expect("there")), (vec!["saved".to_owned()], before));
    // What a save that was killed left is written over.
    std::fs::write(&partial, vec![0; 10 << 20]).expect("written");
    succeeds(&["save", &url, text(&file)]);
    assert_eq!(folder.names(), ["saved"]);
    succeeds(&["restore", text(&file), &url, "--into", "copy"]);
    assert!(all(&source.open("copy").wait().expect("restored")) == all(&index));
}

/// Each saved value is one that its key had during the save: at least as new as what was acknowledged before, and not
/// newer than what was tried until it ended. Keys that nobody touches are all there.
#[test]
fn a_save_beside_writers() {
    const KEYS: u64 = 400;
    let (servers, folder) = (Servers::start(&[]), Folder::new());
    let (url, file) = (servers.place(Over::Tcp), file_in(&folder));
    let source = client(&servers);
    for engine in ["sphinx", "sherman"] {
        let made = AnyEngine::named(engine, 8, 8).expect("known");
        let index = source.create(engine, &made).wait().expect("created");
        let key = |n: u64| n.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes().to_vec();
        // Four keys of five stay as they are.
        put_all(&index, (0..5 * KEYS).map(|n| (key(n), 0u64.to_le_bytes().to_vec())));
        let versions = || (0..KEYS).map(|_| AtomicU64::new(0)).collect::<Vec<_>>();
        let (tried, acknowledged, is_over) = (versions(), versions(), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                let writer = client(&servers);
                let index = writer.open(engine).wait().expect("open");
                for version in 1.. {
                    for n in 0..KEYS {
                        if is_over.load(Ordering::SeqCst) {
                            return version;
                        }
                        let at = usize::try_from(n).expect("small");
                        tried[at].store(version, Ordering::SeqCst);
                        index.put(key(5 * n), version.to_le_bytes().to_vec()).wait().expect("put");
                        acknowledged[at].store(version, Ordering::SeqCst);
                    }
                }
                0
            });
            wait_for("some writes", || acknowledged[0].load(Ordering::SeqCst) > 2);
            for round in 0..3 {
                let before: Vec<u64> = acknowledged.iter().map(|one| one.load(Ordering::SeqCst)).collect();
                succeeds(&["save", &url, text(&file), "--index", engine]);
                let after: Vec<u64> = tried.iter().map(|one| one.load(Ordering::SeqCst)).collect();
                let copy = format!("copy {round}");
                succeeds(&["restore", text(&file), &url, "--into", &copy]);
                let saved: BTreeMap<_, _> =
                    all(&source.open(&copy).wait().expect("there")).into_iter().collect();
                assert_eq!(saved.len() as u64, 5 * KEYS, "every key was there all the time");
                for n in 0..5 * KEYS {
                    let value = saved[&key(n)]
                        .first_chunk()
                        .map(|bytes| u64::from_le_bytes(*bytes))
                        .expect("8 bytes");
                    let at = usize::try_from(n / 5).expect("small");
                    let may = if n % 5 == 0 { before[at]..=after[at] } else { 0..=0 };
                    assert!(may.contains(&value), "{engine}: key {n} has {value}, not {may:?}");
                }
                succeeds(&["drop", &url, &copy]);
            }
            is_over.store(true, Ordering::SeqCst);
            assert!(writer.join().expect("it wrote") > 3);
        });
    }
}

/// A restore looks at the whole file first, so nothing of a damaged one arrives.
#[test]
fn a_damaged_file_is_refused() {
    let (servers, folder) = (Servers::start(&[]), Folder::new());
    let (url, file) = (servers.place(Over::Tcp), file_in(&folder));
    let source = client(&servers);
    let index =
        source.create("it", &AnyEngine::named("sphinx", 0, 0).expect("known")).wait().expect("created");
    put_all(&index, (0..3_000u64).map(|n| (n.to_be_bytes().to_vec(), vec![1; 400])));
    succeeds(&["save", &url, text(&file)]);
    let whole = std::fs::read(&file).expect("it is there");
    for part in 0..8 {
        let at = whole.len() / 8 * part + 5;
        let mut bytes = whole.clone();
        bytes[at] ^= 1 << part;
        std::fs::write(&file, &bytes).expect("written");
        refused(
            &["restore", text(&file), &url, "--into", "copy"],
            if part == 0 { "no file that" } else { "damaged" },
        );
        std::fs::write(&file, &whole[..at]).expect("written");
        refused(&["restore", text(&file), &url, "--into", "copy"], "damaged");
    }
    std::fs::write(&file, b"key,value\na,1\nb,2\n").expect("written");
    refused(&["restore", text(&file), &url], "no file that `farwood save` wrote");
    refused(&["restore", text(&folder.0.join("missing")), &url], "cannot read");
    assert_eq!(succeeds(&["list", &url]), "it\n");
}

/// A restore that finds the pool full leaves nothing, and its room can be used again.
#[test]
fn a_pool_that_is_too_full_is_left_as_it_was() {
    const PAIRS: u64 = 40;
    let (servers, folder) = (Servers::start(&[]), Folder::new());
    let (url, file) = (servers.place(Over::Tcp), file_in(&folder));
    let source = client(&servers);
    let index =
        source.create("it", &AnyEngine::named("sphinx", 0, 0).expect("known")).wait().expect("created");
    put_all(&index, (0..PAIRS).map(|n| (n.to_be_bytes().to_vec(), vec![n.to_le_bytes()[0]; 1_000_000])));
    succeeds(&["save", &url, text(&file)]);
    for _ in 0..2 {
        refused(&["restore", text(&file), &url, "--into", "copy"], "add memory or drop an index");
        // On a slow machine the drop may be left to others.
        wait_for("the half of it to be dropped", || succeeds(&["list", &url]) == "it\n");
    }
    drop((index, source));
    succeeds(&["restore", text(&file), &url, "--replace"]);
    let restored = all(&client(&servers).open("it").wait().expect("restored"));
    assert_eq!(restored.len() as u64, PAIRS);
    assert!(restored.iter().all(|(key, value)| value.len() == 1_000_000 && value[0] == key[7]));
}

/// `kill -9` of a save, and of a restore, anywhere: the file is whole or not there, the index is whole or not there,
/// and the next one works.
#[test]
fn kills_in_the_middle() {
    const PAIRS: u64 = 60_000;
    let servers = Servers::start(&["--lease-ms", "500", "--memory", "256MiB"]);
    let (url, folder) = (servers.place(Over::Tcp), Folder::new());
    let file = file_in(&folder);
    let source = client(&servers);
    let index =
        source.create("it", &AnyEngine::named("sphinx", 0, 0).expect("known")).wait().expect("created");
    put_all(&index, (0..PAIRS).map(|n| (n.to_be_bytes().to_vec(), vec![n.to_le_bytes()[0]; 60])));
    let mut cut = 0;
    for round in 0..4 {
        let save = begin(&["save", &url, text(&file)]);
        nap(Duration::from_millis(20 + 40 * round));
        kill(save);
        if file.exists() {
            succeeds(&["restore", text(&file), &url, "--into", "copy"]);
            succeeds(&["drop", &url, "copy"]);
            std::fs::remove_file(&file).expect("removed");
        } else {
            cut += 1;
        }
    }
    succeeds(&["save", &url, text(&file)]);
    assert_eq!(folder.names(), ["saved"]);
    let (mut half, restored) = (0, || {
        let listed = succeeds(&["list", &url]);
        listed.lines().any(|name| name == "copy")
    });
    for round in 0..6u64 {
        let restore = begin(&["restore", text(&file), &url, "--into", "copy", "--replace"]);
        nap(Duration::from_millis(20 + 40 * round));
        kill(restore);
        // Whoever can open it finds all of it.
        let opened = client(&servers).open("copy").wait();
        match opened {
            Ok(copy) => assert_eq!(all(&copy).len() as u64, PAIRS),
            Err(_) => half += u64::from(restored()),
        }
        if round % 3 == 2 {
            let (said, code) = run(&["restore", text(&file), &url, "--into", "copy", "--replace"]);
            assert_eq!(code, Some(0), "{said}\n{}", succeeds(&["status", &url]));
            assert!(all(&client(&servers).open("copy").wait().expect("restored")) == all(&index));
        }
    }
    assert!(cut > 0 && half > 0, "{cut} saves and {half} restores were killed in the middle");
    succeeds(&["restore", text(&file), &url, "--into", "copy", "--replace"]);
    drop(source);
    for name in ["it", "copy"] {
        let said = succeeds(&["check", &url, name]);
        assert!(said.contains("is whole"), "{said}");
    }
}
