//! Nodes as bytes: what a reader accepts of a mixture, and what is left when a writer dies after any word of a change.

use super::layout::Layout;
use super::node::{Head, Layouts, Lookup, Node, Patch, Plan};
use crate::shared::whole::Place;
use farwood_fabric::{GlobalAddr, RegionId, ServerId};
use proptest::prelude::*;
use std::collections::BTreeMap;

type Pairs = BTreeMap<Vec<u8>, Vec<u8>>;

/// Which words of a WRITE had landed.
type Words = u64;

fn layouts(key_bytes: usize, value_bytes: usize, entries: usize) -> Layouts {
    let node_bytes = Layout::bytes_for(key_bytes, value_bytes.max(8), entries);
    let leaf = Layout::new(key_bytes, value_bytes, node_bytes);
    Layouts { leaf, inner: Layout::new(key_bytes, 8, node_bytes), keyed_by_version: true, checked: true }
}

fn place(n: u64) -> Place {
    Place { index: 5, addr: GlobalAddr::new(ServerId::new(2), RegionId::MAIN, 4096 * n) }
}

fn key(n: u8, layouts: &Layouts) -> Vec<u8> {
    // Different in the first and in the last word.
    let mut key = vec![n; layouts.leaf.key_bytes];
    key[0] = n;
    key
}

fn value(n: u8, layouts: &Layouts) -> Vec<u8> {
    vec![n ^ 0x55; layouts.leaf.value_bytes]
}

/// A leaf for keys from `low` up to `high` with entries for `keys`.
fn leaf(layouts: &Layouts, at: u64, (low, high): (u8, Option<u8>), keys: &[u8]) -> Node<Vec<u8>> {
    let (low, high) = (key(low, layouts), high.map(|high| key(high, layouts)));
    let plan = Plan {
        level: 0,
        incarnation: 0x12_3456_789a,
        is_linked: false,
        low: &low,
        high: high.as_deref(),
        sibling: place(99).addr,
    };
    let pairs: Vec<_> = keys.iter().map(|n| (key(*n, layouts), value(*n, layouts))).collect();
    let entries = pairs.iter().map(|(key, value)| (key.as_slice(), value.as_slice()));
    Node::build(layouts, place(at), vec![0; layouts.leaf.node_bytes], &plan, entries)
}

fn pairs(node: &Node<Vec<u8>>) -> Pairs {
    assert!(node.is_whole());
    node.live().map(|slot| (node.key(slot).to_vec(), node.value(slot).to_vec())).collect()
}

fn copy(layouts: &Layouts, at: u64, node: &Node<Vec<u8>>) -> Node<Vec<u8>> {
    Node::accept(layouts, place(at), node.bytes().to_vec()).expect("whole")
}

/// Found by a long run: words of a READ come in any order, so a reader may see the flag of a split and, in the half that it names, the fences
/// and the sibling of the split before, which are valid in themselves.
#[test]
fn a_flag_does_not_bring_back_the_half_before_last() {
    let layouts = layouts(8, 8, 6);
    let mut node = leaf(&layouts, 1, (0, None), &[1, 2, 3, 4]);
    for (n, high) in [(7, 9), (8, 8), (9, 7)] {
        let before = node.bytes().to_vec();
        drop(node.shrink(&key(high, &layouts), place(n).addr));
        let mut mixed = before.clone();
        mixed[..8].copy_from_slice(&node.bytes()[..8]);
        assert!(Node::accept(&layouts, place(1), mixed).is_err(), "a new flag and an old half, at {high}");
        let mut mixed = node.bytes().to_vec();
        mixed[..8].copy_from_slice(&before[..8]);
        let old = Node::accept(&layouts, place(1), mixed).expect("the old half is still there");
        assert_ne!(old.sibling(), place(n).addr);
    }
}

/// The node after a writer died: all patches before `patch` landed, of that one some words, of the others nothing.
fn after_death(before: &[u8], patches: &[Patch], patch: usize, words: Words) -> Vec<u8> {
    let mut bytes = before.to_vec();
    for (n, Patch { at, bytes: data }) in patches.iter().enumerate().take(patch + 1) {
        for (i, byte) in data.iter().enumerate() {
            let word = (at + i) / 8 - at / 8;
            if n < patch || words >> (word % 64) & 1 == 1 {
                bytes[at + i] = *byte;
            }
        }
    }
    bytes
}

/// What is found in a node that a dead writer left, once it is mended.
fn mended(layouts: &Layouts, at: u64, bytes: Vec<u8>) -> (Node<Vec<u8>>, Pairs) {
    let mut node = Node::accept(layouts, place(at), bytes).expect("a header is never torn for good");
    if let Some(patch) = node.repair() {
        let mut written = node.bytes().to_vec();
        written[patch.at..patch.at + patch.bytes.len()].copy_from_slice(&patch.bytes);
        assert_eq!(written, node.bytes(), "the patch holds all that was mended");
    }
    let pairs = pairs(&node);
    (node, pairs)
}

fn between(pairs: &Pairs, low: u8, high: Option<u8>, layouts: &Layouts) -> Pairs {
    let inside = |k: &Vec<u8>| *k >= key(low, layouts) && high.is_none_or(|high| *k < key(high, layouts));
    pairs.iter().filter(|(k, _)| inside(k)).map(|(k, v)| (k.clone(), v.clone())).collect()
}

#[test]
fn a_node_is_what_it_was_built_of() {
    let layouts = layouts(20, 9, 8);
    let node = leaf(&layouts, 1, (3, Some(200)), &[9, 4, 100]);
    assert_eq!((node.low(), node.high()), (key(3, &layouts).as_slice(), Some(key(200, &layouts).as_slice())));
    assert_eq!(node.head(), Head { level: 0, is_dead: false, is_linked: false });
    assert_eq!(node.sibling(), place(99).addr);
    assert!(
        node.covers(&key(3, &layouts))
            && !node.covers(&key(200, &layouts))
            && !node.covers(&key(2, &layouts))
    );
    assert!(matches!(node.find(&key(4, &layouts)), Lookup::Found(1)));
    assert_eq!(node.find(&key(5, &layouts)), Lookup::Absent);
    assert_eq!(node.sorted(), [1, 0, 2]);
    assert!(Node::accept(&layouts, place(2), node.bytes().to_vec()).is_err(), "it is not that node");
    assert!(Node::accept(&layouts, Place { index: 6, ..place(1) }, node.bytes().to_vec()).is_err());
}

#[test]
fn whatever_bytes_there_are_nothing_panics() {
    let layouts = layouts(8, 8, 6);
    let mut rng = 7u64;
    for _ in 0..2000 {
        let bytes: Vec<u8> = (0..layouts.leaf.node_bytes)
            .map(|_| {
                rng = rng.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                rng.to_le_bytes()[7]
            })
            .collect();
        let _ = Head::of(&bytes);
        assert!(Node::accept(&layouts, place(1), bytes).is_err());
    }
    assert!(Node::accept(&layouts, place(1), vec![0; layouts.leaf.node_bytes]).is_err(), "never written");
}

#[test]
fn the_life_of_a_node_is_told_by_single_bytes() {
    let layouts = layouts(8, 8, 4);
    let mut node = leaf(&layouts, 1, (0, None), &[1]);
    let link = node.link();
    let bury = node.bury();
    assert_eq!((link.bytes.len(), bury.bytes.len()), (1, 1));
    let node = copy(&layouts, 1, &node);
    assert_eq!(node.head(), Head { level: 0, is_dead: true, is_linked: true });
}

proptest! {
    /// A READ that meets a change finds the key as it was before or after it, or nothing that it can use.
    #[test]
    fn a_reader_never_takes_a_mixture(
        present in proptest::collection::btree_set(1u8..20, 0..8),
        wanted in 1u8..20,
        change in 0..4,
        words: Words,
        long: bool,
    ) {
        let layouts = if long { layouts(20, 24, 8) } else { layouts(8, 8, 8) };
        let keys: Vec<u8> = present.iter().copied().collect();
        let old = leaf(&layouts, 1, (0, None), &keys);
        let mut new = copy(&layouts, 1, &old);
        let patches: Vec<Patch> = match (new.find(&key(wanted, &layouts)), change) {
            (Lookup::Found(slot), 0) => new.remove(slot).into_vec(),
            (_, 1) if keys.len() > 1 => new.shrink(&key(keys[1], &layouts), place(3).addr).into_vec(),
            (Lookup::Found(slot), _) => new.update(slot, &vec![7; layouts.leaf.value_bytes]).into_vec(),
            _ => match new.free_slot() {
                Some(slot) => new.insert(slot, &key(wanted, &layouts), &value(wanted, &layouts)).into_vec(),
                None => Vec::new(),
            },
        };
        for patch in 0..patches.len() {
            let mixed = after_death(old.bytes(), &patches, patch, words);
            let Ok(read) = Node::accept(&layouts, place(1), mixed) else { continue };
            for n in 1..20 {
                let k = key(n, &layouts);
                if !read.covers(&k) {
                    continue;
                }
                let seen = match read.find(&k) {
                    Lookup::Found(slot) => Some(read.value(slot).to_vec()),
                    Lookup::Absent => None,
                    Lookup::Torn => continue,
                };
                let before = pairs(&old).get(&k).cloned();
                let after = pairs(&new).get(&k).cloned();
                prop_assert!(seen == before || seen == after, "{:?}: {:?} {:?} {:?}", n, seen, before, after);
            }
        }
    }

    /// A writer may die after any word of an insert, a removal, or an update of one word: the other entries stay, and this one
    /// is as before or after.
    #[test]
    fn a_change_of_one_entry_survives_its_writer(
        present in proptest::collection::btree_set(1u8..20, 0..7),
        wanted in 1u8..20,
        words: Words,
        long_keys: bool,
        remove: bool,
    ) {
        let layouts = if long_keys { layouts(20, 8, 8) } else { layouts(8, 8, 8) };
        let keys: Vec<u8> = present.iter().copied().collect();
        let old = leaf(&layouts, 1, (0, None), &keys);
        let mut new = copy(&layouts, 1, &old);
        let patches = match new.find(&key(wanted, &layouts)) {
            Lookup::Found(slot) if remove => new.remove(slot),
            Lookup::Found(slot) => new.update(slot, &[7; 8]),
            _ => new.insert(new.free_slot().expect("room"), &key(wanted, &layouts), &value(wanted, &layouts)),
        };
        let (before, after) = (pairs(&old), pairs(&new));
        for patch in 0..patches.len() {
            let (_, found) = mended(&layouts, 1, after_death(old.bytes(), &patches, patch, words));
            prop_assert!(found == before || found == after, "{:?}", found);
        }
    }

    /// A split happens with one byte: before it all entries are there, after it those below the new fence.
    #[test]
    fn a_split_survives_its_writer(present in proptest::collection::btree_set(1u8..20, 2..8), words: Words) {
        let layouts = layouts(20, 40, 8);
        let keys: Vec<u8> = present.iter().copied().collect();
        let middle = keys[keys.len() / 2];
        let old = leaf(&layouts, 1, (0, None), &keys);
        let mut new = copy(&layouts, 1, &old);
        let patches = new.shrink(&key(middle, &layouts), place(3).addr);
        prop_assert_eq!(pairs(&new), between(&pairs(&old), 0, Some(middle), &layouts));
        for patch in 0..patches.len() {
            let (node, found) = mended(&layouts, 1, after_death(old.bytes(), &patches, patch, words));
            if node.is_beyond(&key(middle, &layouts)) {
                prop_assert_eq!((found, node.sibling()), (pairs(&new), place(3).addr));
            } else {
                prop_assert_eq!((found, node.sibling()), (pairs(&old), place(99).addr));
            }
        }
    }

    /// A merge fills in entries that do not count, and happens with one byte.
    #[test]
    fn a_merge_survives_its_writer(
        left in proptest::collection::btree_set(1u8..10, 0..4),
        right in proptest::collection::btree_set(10u8..20, 0..4),
        words: Words,
    ) {
        let layouts = layouts(20, 40, 8);
        let (left, right): (Vec<u8>, Vec<u8>) = (left.into_iter().collect(), right.into_iter().collect());
        let old = leaf(&layouts, 1, (0, Some(10)), &left);
        let other = leaf(&layouts, 2, (10, Some(20)), &right);
        let mut new = copy(&layouts, 1, &old);
        let (fill, turn) = new.grow(&other).expect("they fit");
        let mut all = pairs(&old);
        all.extend(pairs(&other));
        prop_assert_eq!(pairs(&new), all.clone());
        let patches: Vec<Patch> = fill.into_iter().chain(turn).collect();
        for patch in 0..patches.len() {
            let (node, found) = mended(&layouts, 1, after_death(old.bytes(), &patches, patch, words));
            if node.is_beyond(&key(10, &layouts)) {
                prop_assert_eq!(found, pairs(&old));
            } else {
                prop_assert_eq!(found, all.clone());
            }
        }
    }

    /// Entries of a merge that never happened do not come back, and their slots serve again.
    #[test]
    fn what_does_not_count_is_overwritten_safely(words: Words, patch in 0usize..4) {
        let layouts = layouts(20, 40, 4);
        let old = leaf(&layouts, 1, (0, Some(10)), &[1, 2]);
        let other = leaf(&layouts, 2, (10, Some(20)), &[11, 12]);
        let mut filled = copy(&layouts, 1, &old);
        for from in 0..2 {
            let slot = filled.empty().next().expect("room");
            filled.insert(slot, other.key(from), other.value(from));
        }
        prop_assert_eq!(pairs(&filled), pairs(&old), "beyond the fence");
        let mut new = copy(&layouts, 1, &filled);
        let patches = new.insert(new.free_slot().expect("a slot that does not count"), &key(5, &layouts), &value(5, &layouts));
        prop_assert_eq!(patches.len(), 3);
        let (before, after) = (pairs(&old), pairs(&new));
        prop_assert!(after.len() == 3);
        let (_, found) = mended(&layouts, 1, after_death(filled.bytes(), &patches, patch.min(2), words));
        prop_assert!(found == before || found == after, "{:?}", found);
    }
}
