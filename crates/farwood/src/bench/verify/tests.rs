//! Each rule both ways, by hand.

use super::*;
use std::ops::Bound::{Excluded, Included, Unbounded};

const K: &[u8] = b"k";

fn put(model: &Model, key: &[u8], value: &[u8]) {
    model.wrote(model.begin_write(key, Some(value))).unwrap();
}

fn get(model: &Model, key: &[u8], value: Option<&[u8]>) -> Result<(), Violation> {
    model.got(model.begin_read(), key, value)
}

fn delete(model: &Model, key: &[u8], existed: bool) -> Result<(), Violation> {
    model.deleted(model.begin_write(key, None), existed)
}

fn insert(model: &Model, key: &[u8], value: &[u8], was_absent: bool) -> Result<(), Violation> {
    model.inserted(model.begin_write(key, Some(value)), was_absent)
}

fn update(model: &Model, key: &[u8], value: &[u8], was_present: bool) -> Result<(), Violation> {
    model.updated(model.begin_write(key, Some(value)), was_present)
}

fn swap(model: &Model, expected: Option<&[u8]>, new: Option<&[u8]>, happened: bool) -> Result<(), Violation> {
    model.swapped(model.begin_write(K, new), expected, happened)
}

const ALL: Scan<'static> = Scan { start: Unbounded, end: Unbounded, limit: 100, reverse: false };

fn scan(model: &Model, scan: Scan<'_>, pairs: &[(&str, &str)]) -> Result<(), Violation> {
    model.scanned(model.begin_read(), scan, pairs)
}

fn of_three() -> Model {
    let model = Model::new();
    for (key, value) in [("a", "1"), ("c", "3"), ("e", "5")] {
        model.load(key.as_bytes(), value.as_bytes());
    }
    model
}

fn kept_writes(model: &Model) -> usize {
    model.lock().keys.values().map(History::len).sum()
}

#[test]
fn a_model_can_be_shared() {
    fn is_shared<T: Send + Sync>() {}
    is_shared::<Model>();
    is_shared::<ReadTicket>();
}

#[test]
fn what_was_loaded_is_there_and_nothing_else_is() {
    let model = Model::new();
    model.load(K, b"a");
    get(&model, K, Some(b"a")).unwrap();
    get(&model, K, None).unwrap_err();
    get(&model, b"other", None).unwrap();
    get(&model, b"other", Some(b"a")).unwrap_err();
}

#[test]
fn stale_read_after_a_completed_overwrite() {
    let model = Model::new();
    put(&model, K, b"a");
    get(&model, K, Some(b"a")).unwrap();
    put(&model, K, b"b");
    let violation = get(&model, K, Some(b"a")).unwrap_err();
    assert_eq!(violation.to_string(), "get: key \"k\" cannot have held \"a\"; it may have held \"b\"");
    get(&model, K, Some(b"b")).unwrap();
}

#[test]
fn a_read_during_a_write_may_find_old_or_new() {
    for seen in [b"a", b"b"] {
        let model = Model::new();
        put(&model, K, b"a");
        let read = model.begin_read();
        let write = model.begin_write(K, Some(b"b"));
        model.wrote(write).unwrap();
        model.got(read, K, Some(seen)).unwrap();
    }
    let model = Model::new();
    put(&model, K, b"a");
    let write = model.begin_write(K, Some(b"b"));
    get(&model, K, Some(b"a")).unwrap();
    get(&model, K, Some(b"b")).unwrap();
    get(&model, K, None).unwrap_err();
    model.wrote(write).unwrap();
}

#[test]
fn a_value_that_nobody_wrote_or_of_another_key() {
    let model = Model::new();
    put(&model, K, b"a");
    put(&model, b"l", b"b");
    get(&model, K, Some(b"x")).unwrap_err();
    get(&model, K, Some(b"b")).unwrap_err();
    get(&model, b"l", Some(b"b")).unwrap();
}

#[test]
fn a_value_before_its_write_begins() {
    let model = Model::new();
    get(&model, K, Some(b"a")).unwrap_err();
    put(&model, K, b"a");
    get(&model, K, Some(b"a")).unwrap();
}

#[test]
fn writes_that_overlap_may_come_in_either_order_until_one_is_found() {
    let model = Model::new();
    let (first, second) = (model.begin_write(K, Some(b"a")), model.begin_write(K, Some(b"b")));
    model.wrote(second).unwrap();
    model.wrote(first).unwrap();
    get(&model, K, None).unwrap_err();
    get(&model, K, Some(b"b")).unwrap();
    get(&model, K, Some(b"b")).unwrap();
    get(&model, K, Some(b"a")).unwrap_err();
}

#[test]
fn old_after_new_while_the_write_is_under_way() {
    let model = Model::new();
    put(&model, K, b"a");
    let write = model.begin_write(K, Some(b"b"));
    let (early, late) = (model.begin_read(), model.begin_read());
    get(&model, K, Some(b"b")).unwrap();
    // These began before that read ended.
    model.got(early, K, Some(b"a")).unwrap();
    model.got(late, K, Some(b"b")).unwrap();
    get(&model, K, Some(b"a")).unwrap_err();
    model.wrote(write).unwrap();
}

#[test]
fn old_after_new_was_found_by_a_read_that_began_before_both() {
    let model = Model::new();
    let read = model.begin_read();
    put(&model, K, b"a");
    let write = model.begin_write(K, Some(b"b"));
    model.got(read, K, Some(b"b")).unwrap();
    get(&model, K, Some(b"a")).unwrap_err();
    model.wrote(write).unwrap();
}

#[test]
fn old_after_new_between_two_writes_under_way() {
    let model = Model::new();
    let writes = [model.begin_write(K, Some(b"a")), model.begin_write(K, Some(b"b"))];
    get(&model, K, Some(b"a")).unwrap();
    get(&model, K, Some(b"b")).unwrap();
    get(&model, K, Some(b"a")).unwrap_err();
    for write in writes {
        model.wrote(write).unwrap();
    }
}

#[test]
fn delete_then_get() {
    let model = Model::new();
    delete(&model, K, true).unwrap_err();
    put(&model, K, b"a");
    delete(&model, K, false).unwrap_err();
    delete(&model, K, true).unwrap();
    get(&model, K, Some(b"a")).unwrap_err();
    get(&model, K, None).unwrap();
    delete(&model, K, false).unwrap();
}

#[test]
fn insert_twice() {
    let model = Model::new();
    insert(&model, K, b"a", false).unwrap_err();
    insert(&model, K, b"a", true).unwrap();
    insert(&model, K, b"b", false).unwrap();
    get(&model, K, Some(b"b")).unwrap_err();
    get(&model, K, Some(b"a")).unwrap();
    insert(&model, K, b"c", true).unwrap_err();
}

#[test]
fn two_concurrent_inserts_or_deletes_do_not_both_succeed() {
    let model = Model::new();
    let inserts = [model.begin_write(K, Some(b"a")), model.begin_write(K, Some(b"b"))];
    let [first, second] = inserts.map(|ticket| model.inserted(ticket, true));
    first.unwrap();
    second.unwrap_err();
    let model = of_three();
    let deletes = [model.begin_write(b"a", None), model.begin_write(b"a", None)];
    let [first, second] = deletes.map(|ticket| model.deleted(ticket, true));
    first.unwrap();
    let text = second.unwrap_err().to_string();
    assert!(
        text.starts_with("delete: key \"a\" cannot have held a value; it may have held nothing"),
        "{text}"
    );
}

#[test]
fn two_concurrent_inserts_may_both_succeed_around_a_delete() {
    let model = Model::new();
    let inserts = [model.begin_write(K, Some(b"a")), model.begin_write(K, Some(b"b"))];
    let between = model.begin_write(K, None);
    for insert in inserts {
        model.inserted(insert, true).unwrap();
    }
    model.deleted(between, true).unwrap();
}

#[test]
fn update_needs_a_value() {
    let model = Model::new();
    update(&model, K, b"a", true).unwrap_err();
    let model = Model::new();
    update(&model, K, b"a", false).unwrap();
    get(&model, K, Some(b"a")).unwrap_err();
    put(&model, K, b"b");
    update(&model, K, b"c", false).unwrap_err();
    update(&model, K, b"d", true).unwrap();
    get(&model, K, Some(b"b")).unwrap_err();
    get(&model, K, Some(b"d")).unwrap();
}

#[test]
fn swaps_find_what_they_expect() {
    let model = Model::new();
    swap(&model, None, Some(b"a"), false).unwrap_err();
    swap(&model, None, Some(b"a"), true).unwrap();
    let violation = swap(&model, Some(b"a"), Some(b"b"), false).unwrap_err();
    assert_eq!(
        violation.to_string(),
        "swap: key \"k\" cannot have held anything but \"a\"; it may have held \"a\""
    );
    swap(&model, Some(b"x"), Some(b"b"), false).unwrap();
    swap(&model, Some(b"x"), Some(b"b"), true).unwrap_err();
}

#[test]
fn an_update_lost_by_swaps() {
    let model = Model::new();
    put(&model, K, b"a");
    swap(&model, Some(b"a"), Some(b"b"), true).unwrap();
    swap(&model, Some(b"a"), Some(b"c"), true).unwrap_err();
    // With a write between, all is well.
    put(&model, K, b"a");
    swap(&model, Some(b"a"), Some(b"d"), true).unwrap();
    get(&model, K, Some(b"d")).unwrap();
}

#[test]
fn an_update_lost_by_concurrent_swaps() {
    let model = Model::new();
    put(&model, K, b"a");
    let (first, second) = (model.begin_write(K, Some(b"b")), model.begin_write(K, Some(b"c")));
    model.swapped(first, Some(b"a"), true).unwrap();
    model.swapped(second, Some(b"a"), true).unwrap_err();
    let model = Model::new();
    put(&model, K, b"a");
    let (first, second) = (model.begin_write(K, Some(b"b")), model.begin_write(K, Some(b"c")));
    model.swapped(second, Some(b"b"), true).unwrap();
    model.swapped(first, Some(b"a"), true).unwrap();
    get(&model, K, Some(b"b")).unwrap_err();
    get(&model, K, Some(b"c")).unwrap();
}

#[test]
fn an_unknown_write_shows_late_or_never_but_once() {
    let model = Model::new();
    put(&model, K, b"a");
    model.unknown(model.begin_write(K, Some(b"u")));
    get(&model, K, Some(b"a")).unwrap();
    put(&model, K, b"b");
    get(&model, K, Some(b"b")).unwrap();
    get(&model, K, Some(b"u")).unwrap();
    get(&model, K, Some(b"b")).unwrap_err();
    put(&model, K, b"c");
    get(&model, K, Some(b"u")).unwrap_err();
    assert_eq!(kept_writes(&model), 1);
    assert_eq!(model.counters().unknown, 1);
}

#[test]
fn a_settled_write_happened_before_it_was_settled_or_never() {
    for seen in [b"a", b"s"] {
        let model = Model::new();
        put(&model, K, b"a");
        model.settled(model.begin_write(K, Some(b"s")));
        get(&model, K, Some(seen)).unwrap();
        get(&model, K, Some(if seen == b"a" { b"s" } else { b"a" })).unwrap_err();
        put(&model, K, b"b");
        get(&model, K, Some(b"s")).unwrap_err();
        assert_eq!(kept_writes(&model), 1);
    }
}

#[test]
fn a_failed_write_is_never_found() {
    let model = Model::new();
    model.failed(model.begin_write(K, Some(b"f"))).unwrap();
    get(&model, K, Some(b"f")).unwrap_err();
    get(&model, K, None).unwrap();
}

#[test]
fn what_was_found_cannot_be_denied() {
    let model = Model::new();
    let failing = model.begin_write(K, Some(b"f"));
    get(&model, K, Some(b"f")).unwrap();
    let violation = model.failed(failing).unwrap_err();
    assert_eq!(violation, Violation::Undone { key: K.to_vec(), value: Some(b"f".to_vec()) });
    let model = of_three();
    let refused = model.begin_write(b"a", None);
    get(&model, b"a", None).unwrap();
    model.deleted(refused, false).unwrap_err();
}

#[test]
fn a_scan_returns_all_that_is_there() {
    let model = of_three();
    scan(&model, ALL, &[("a", "1"), ("c", "3"), ("e", "5")]).unwrap();
    scan(&model, Scan { reverse: true, ..ALL }, &[("e", "5"), ("c", "3"), ("a", "1")]).unwrap();
    scan(&model, Scan { start: Included(b"b"), end: Excluded(b"e"), ..ALL }, &[("c", "3")]).unwrap();
    scan(&model, Scan { start: Included(b"e"), end: Included(b"a"), ..ALL }, &[]).unwrap();
    scan(&model, Scan { start: Excluded(b"a"), end: Excluded(b"a"), ..ALL }, &[]).unwrap();
    scan(&model, ALL, &[("a", "1"), ("e", "5")]).unwrap_err();
    scan(&model, ALL, &[("a", "1"), ("c", "3")]).unwrap_err();
    scan(&model, ALL, &[("a", "1"), ("c", "old"), ("e", "5")]).unwrap_err();
    scan(&model, ALL, &[("a", "1"), ("b", "2"), ("c", "3"), ("e", "5")]).unwrap_err();
    let counters = model.counters();
    assert_eq!((counters.of(Kind::Scan).answers, counters.of(Kind::Scan).constrained), (5, 5));
}

#[test]
fn a_scan_owes_keys_up_to_its_limit() {
    let model = of_three();
    let two = Scan { limit: 2, ..ALL };
    scan(&model, two, &[("a", "1"), ("c", "3")]).unwrap();
    scan(&model, Scan { reverse: true, ..two }, &[("e", "5"), ("c", "3")]).unwrap();
    scan(&model, Scan { limit: 0, ..ALL }, &[]).unwrap();
    scan(&model, two, &[("a", "1"), ("e", "5")]).unwrap_err();
    scan(&model, two, &[("c", "3"), ("e", "5")]).unwrap_err();
    scan(&model, two, &[("a", "1")]).unwrap_err();
    scan(&model, Scan { reverse: true, ..two }, &[("e", "5"), ("a", "1")]).unwrap_err();
}

#[test]
fn a_scan_of_the_wrong_shape() {
    let model = of_three();
    let refused = |asked, pairs: &[_]| scan(&model, asked, pairs).unwrap_err();
    let (a, c, e) = (("a", "1"), ("c", "3"), ("e", "5"));
    assert!(matches!(refused(ALL, &[a, c, c, e]), Violation::Repeated { .. }));
    assert!(matches!(refused(ALL, &[a, e, c]), Violation::OutOfOrder { .. }));
    assert!(matches!(refused(Scan { reverse: true, ..ALL }, &[a, c, e]), Violation::OutOfOrder { .. }));
    assert!(matches!(refused(Scan { limit: 2, ..ALL }, &[a, c, e]), Violation::TooMany { .. }));
    let after = Scan { start: Excluded(b"a"), ..ALL };
    assert!(matches!(refused(after, &[a, c, e]), Violation::OutOfBounds { .. }));
    let before = Scan { end: Excluded(b"e"), ..ALL };
    assert!(matches!(refused(before, &[a, c, e]), Violation::OutOfBounds { .. }));
}

#[test]
fn a_scan_may_find_what_is_being_inserted_and_deleted_or_not() {
    let (a, b, c, e) = (("a", "1"), ("b", "2"), ("c", "3"), ("e", "5"));
    let answers: [&[_]; 4] = [&[a, b, c, e], &[a, c, e], &[a, e], &[a, b, e]];
    for pairs in answers {
        let model = of_three();
        let ticket = model.begin_read();
        insert(&model, b"b", b"2", true).unwrap();
        delete(&model, b"c", true).unwrap();
        model.scanned(ticket, ALL, pairs).unwrap();
        scan(&model, ALL, &[a, c, e]).unwrap_err();
        scan(&model, ALL, &[a, b, e]).unwrap();
    }
}

#[test]
fn what_a_scan_found_cannot_be_older_for_those_who_come_later() {
    let model = of_three();
    let write = model.begin_write(b"a", Some(b"new"));
    scan(&model, ALL, &[("a", "new"), ("c", "3"), ("e", "5")]).unwrap();
    get(&model, b"a", Some(b"1")).unwrap_err();
    model.wrote(write).unwrap();
}

#[test]
fn initial_values_by_a_function_take_no_memory() {
    let model = Model::with_initial(Box::new(|key| key.starts_with(b"i").then(|| key.to_vec())));
    for number in 0..1000 {
        let key = format!("i{number}");
        get(&model, key.as_bytes(), Some(key.as_bytes())).unwrap();
        get(&model, key.as_bytes(), None).unwrap_err();
        get(&model, format!("j{number}").as_bytes(), None).unwrap();
    }
    assert_eq!(kept_writes(&model), 0);
    // Without an entry a key is not missed, with one it is.
    scan(&model, ALL, &[("i1", "i1")]).unwrap();
    put(&model, b"i2", b"new");
    scan(&model, ALL, &[("i1", "i1")]).unwrap_err();
    scan(&model, ALL, &[("i1", "i1"), ("i2", "new")]).unwrap();
    // Deleted, it is not what the function says; a new key that is deleted is.
    delete(&model, b"i2", true).unwrap();
    get(&model, b"i2", Some(b"i2")).unwrap_err();
    assert_eq!(kept_writes(&model), 1);
    insert(&model, b"new", b"1", true).unwrap();
    delete(&model, b"new", true).unwrap();
    assert_eq!(kept_writes(&model), 1);
    // What is loaded stays.
    model.load(b"i3", b"loaded");
    get(&model, b"i3", Some(b"i3")).unwrap_err();
    scan(&model, ALL, &[]).unwrap_err();
}

#[test]
fn forgetting_a_deleted_key_waits_for_those_who_may_have_seen_it() {
    let model = of_three();
    let early = model.begin_read();
    let write = model.begin_write(b"a", Some(b"2"));
    model.wrote(write).unwrap();
    delete(&model, b"a", true).unwrap();
    get(&model, b"a", None).unwrap();
    model.got(early, b"a", Some(b"1")).unwrap();
    get(&model, b"a", None).unwrap();
    assert_eq!(kept_writes(&model), 2, "the two other keys");
}

#[test]
fn what_is_gone_is_dropped_when_the_oldest_operation_ends() {
    let model = Model::new();
    let long = model.begin_read();
    for number in 0..100u32 {
        for round in 0..10 {
            put(&model, &number.to_be_bytes(), &[round]);
        }
    }
    assert_eq!(kept_writes(&model), 100 * 11);
    assert_eq!(model.counters().longest_history, 11);
    model.got(long, &7u32.to_be_bytes(), Some(&[4])).unwrap();
    // Also on keys that nobody touches any more.
    assert_eq!(kept_writes(&model), 100);
    assert!(model.lock().gone.is_empty());
}

#[test]
fn messages_are_bounded() {
    let model = Model::new();
    let read = model.begin_read();
    for round in 0..100 {
        put(&model, K, &[round; 1000]);
    }
    let text = model.got(read, K, Some(b"x")).unwrap_err().to_string();
    assert!(text.ends_with("or 93 more") && text.len() < 1000, "{text}");
}
