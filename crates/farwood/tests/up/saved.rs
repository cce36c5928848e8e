//! A gateway's store, saved while it serves, and restored in another pool: keys with a time to live keep the time at which they expire.

use super::gateways::pool;
use super::world::{Folder, Running, farwood, nap, wait_for};

#[test]
fn keys_keep_the_time_at_which_they_expire() {
    let (here, there) = (Folder::new(), Folder::new());
    let (_server, [_, from]) = pool(&here);
    let (_other, [_, to]) = pool(&there);
    let gateway = Running::gateway(&from, &[], &here);
    let mut client = gateway.client();
    assert_eq!(client.say("SET forever 1"), "OK");
    assert_eq!(client.say("SET later 2 PX 100000"), "OK");
    assert_eq!(client.say("SET soon 3 PX 3000"), "OK");
    assert_eq!(client.say("SET gone 4 PX 1"), "OK");
    let expires = client.say("PEXPIRETIME later");
    let file = format!("{}/saved", here.text());
    // The gateway has the index open, and goes on to write to it.
    farwood(&["save", &from, &file]);
    assert_eq!(client.say("SET forever changed"), "OK");
    farwood(&["restore", &file, &to, "--replace"]);

    let restored = Running::gateway(&to, &[], &there);
    let mut client = restored.client();
    assert_eq!(client.say("GET forever"), "1", "as it was saved");
    assert_eq!((client.say("TTL forever"), client.say("GET later")), ("-1".to_owned(), "2".to_owned()));
    assert_eq!(client.say("PEXPIRETIME later"), expires, "the time has not begun anew");
    wait_for("the short ones to expire", || {
        nap(20);
        ["soon", "gone"].iter().all(|key| client.say(&format!("GET {key}")) == "nil")
    });
    assert_eq!(client.say("GET later"), "2");
}
