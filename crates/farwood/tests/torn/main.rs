//! Files of kept memory whose pages are of different ages: each is noticed when a server is started on it, and stays as it is; with
//! `accept_torn` it is served, and whoever asks gets an answer or an error.
//!
//! `FARWOOD_TORN_ROUNDS=1000` tears a thousand times.

mod tear;
mod world;

use tear::{Tear, Torn};
use world::{BOOT, Kept, OTHER_BOOT, Snapshots};

/// How many files are torn.
fn rounds(usual: u64) -> u64 {
    std::env::var("FARWOOD_TORN_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(usual)
}

#[test]
fn every_torn_file_is_noticed_and_left_alone() {
    let snapshots = Snapshots::make("noticed");
    let kept = Kept::new("noticed-torn");
    let (mut unnoticed, mut by_reason) = (Vec::new(), std::collections::BTreeMap::new());
    let all = rounds(60);
    for round in 0..all {
        let Torn { bytes, boot, what } = Tear::of(&snapshots, round).carry_out();
        kept.write(&bytes);
        match kept.start(boot, false) {
            Err(error) => *by_reason.entry(tear::reason(&error)).or_insert(0) += 1,
            Ok(_) => unnoticed.push(format!("round {round}: {what}")),
        }
        assert!(kept.read() == bytes, "round {round}: {what}: a start that was refused has changed the file");
    }
    println!("{} of {all} torn files were noticed: {by_reason:?}", all - unnoticed.len() as u64);
    assert!(unnoticed.is_empty(), "{unnoticed:#?}");
    assert!(by_reason.len() >= 4, "tears of one kind only: {by_reason:?}");
}

/// The same files untorn are taken: what is refused above is refused for what was done to it.
#[test]
fn whole_files_are_taken() {
    let snapshots = Snapshots::make("whole");
    let kept = Kept::new("whole-again");
    let cases =
        [(&snapshots.closed, BOOT), (&snapshots.closed, OTHER_BOOT), (&snapshots.closed_before, OTHER_BOOT)];
    for (bytes, boot) in cases {
        kept.write(bytes);
        let server = kept.start(boot, false).expect("it is whole");
        assert_eq!(server.torn(), None);
        let found = world::read_all(&server).expect("it is served");
        assert!(
            found.iter().all(|(key, value)| value.as_deref().is_some_and(|v| world::is_value_of(key, v)))
        );
        assert!(kept.start(boot, false).is_err(), "one server at a time");
        server.end().expect("it is closed");
    }
}

/// A server that was killed has lost nothing while the machine is up; after another boot nobody knows.
#[test]
fn memory_in_use_is_whole_until_the_machine_is_started_again() {
    let kept = Kept::new("killed");
    drop(kept.start(BOOT, false).expect("new memory"));
    // Killed twice.
    drop(kept.start(BOOT, false).expect("the same boot"));
    let error = kept.start(OTHER_BOOT, false).expect_err("another boot").to_string();
    assert!(
        error.contains("in use when the machine went down") && error.contains("--accept-torn"),
        "{error}"
    );
    kept.start(BOOT, false).expect("the same boot").end().expect("it is closed");
    kept.start(OTHER_BOOT, false).expect("closed before").end().expect("it is closed");
}

/// Whatever a torn file holds, it is served: by answers and typed errors, and no call is left without one.
#[test]
fn torn_files_that_are_accepted_are_served() {
    let snapshots = Snapshots::make("accepted");
    let kept = Kept::new("accepted-torn");
    let (mut right, mut other, mut errors, mut refused) = (0, 0, 0, 0);
    for round in 0..rounds(60).div_ceil(5) {
        let Torn { bytes, boot, what } = Tear::of(&snapshots, round).carry_out();
        kept.write(&bytes);
        let server = match kept.start(boot, true) {
            Ok(server) => server,
            Err(error) => {
                // Without a superblock or a length nobody can say what it was.
                assert!(tear::is_hopeless(&error), "round {round}: {what}: {error}");
                refused += 1;
                continue;
            }
        };
        assert!(server.torn().is_some(), "round {round}: {what}: it does not say that it is torn");
        match world::read_all(&server) {
            Err(error) => {
                println!("round {round}: {what}: {error}");
                errors += 1;
            }
            Ok(found) => {
                for (key, value) in found {
                    let is_right = value.is_some_and(|value| world::is_value_of(&key, &value));
                    if is_right { right += 1 } else { other += 1 }
                }
            }
        }
        world::write_some(&server);
        server.end().expect("it is closed");
        // It says so until it is formatted anew.
        let again = kept.start(OTHER_BOOT, false).expect("it was closed");
        assert!(again.torn().is_some());
        again.end().expect("it is closed");
    }
    println!(
        "{right} keys were right, {other} were not, {errors} pools answered with errors, {refused} files were hopeless"
    );
    assert!(right > 0, "nothing could be read");
}
