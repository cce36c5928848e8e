//! Nodes and leaves as bytes: what they hold, what a reader accepts of a mixture, what form a node takes.

use super::layout::{Head, LeafClass, LeafRef, LeafState, NodeKind, Slot, Step};
use super::node::leaf::{self, Leaf};
use super::node::{Children, Form, Node, build, form_of, is_too_large};
use crate::shared::whole::Place;
use farwood_fabric::{GlobalAddr, RegionId, ServerId};
use proptest::prelude::*;

fn place(n: u64) -> Place {
    Place { index: 5, addr: GlobalAddr::new(ServerId::new(2), RegionId::MAIN, 64 * n) }
}

fn slot(step: Step) -> Slot {
    let class = LeafClass::for_pair(8, 8).expect("small");
    let number = match step {
        Step::End => 1000,
        Step::Byte(byte) => 1 + u64::from(byte),
    };
    Slot::to_leaf(step, LeafRef { addr: place(number).addr, class }).expect("packed")
}

fn children(steps: impl IntoIterator<Item = Step>) -> Children {
    let mut children: Children = steps.into_iter().map(|step| (step, slot(step))).collect();
    children.sort_unstable_by_key(|(step, _)| *step);
    children
}

fn node(kind: NodeKind, children: &Children) -> Node<Vec<u8>> {
    let head = Head { is_dead: false, is_linked: true, kind, depth: 7 };
    Node::accept(kind, build(head, 99, children)).expect("a node")
}

/// A reader saw byte 7 in the slot that it had and, later, in the one that it came back to.
#[test]
fn of_a_byte_that_was_seen_in_two_slots_a_reader_follows_one() {
    let seen: Children = [7, 3, 7, 9].map(Step::Byte).map(|step| (step, slot(step))).into_iter().collect();
    let node = node(NodeKind::N4, &seen);
    assert!(!node.is_sound(), "whoever has the lock sees no such thing");
    let bytes = [3, 7, 9];
    assert_eq!(node.distinct_children(), children(bytes.map(Step::Byte)));
    let mut slots = Vec::new();
    node.slots_into(&mut slots, true);
    assert_eq!(slots, bytes.map(|byte| slot(Step::Byte(byte))));
    node.slots_into(&mut slots, false);
    assert_eq!(slots.len(), 4);
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let bytes = proptest::collection::btree_set(any::<u8>(), 0..=256);
    (bytes, any::<bool>()).prop_map(|(bytes, with_end)| {
        let end = with_end.then_some(Step::End);
        end.into_iter().chain(bytes.into_iter().map(Step::Byte)).collect()
    })
}

proptest! {
    #[test]
    fn a_node_has_the_children_that_it_was_built_of(steps in steps()) {
        let all = children(steps.iter().copied());
        let kind = NodeKind::for_children(steps.iter().filter(|step| **step != Step::End).count());
        let node = node(kind, &all);
        prop_assert_eq!(node.children(), all.clone());
        prop_assert_eq!((node.count(), node.hash(), node.head.depth), (all.len(), 99, 7));
        prop_assert!(node.is_sound());
        for byte in 0..=255 {
            let step = Step::Byte(byte);
            let there = all.iter().find(|(other, _)| *other == step).map_or(Slot::EMPTY, |(_, slot)| *slot);
            prop_assert_eq!(node.child(step), there);
            match node.find(step) {
                Some((_, found)) => prop_assert_eq!(found, there),
                None => prop_assert!(there.is_empty() && node.count() >= kind.slots()),
            }
        }
    }

    #[test]
    fn a_leaf_is_whole_only_as_itself(key in proptest::collection::vec(any::<u8>(), 0..40), value in proptest::collection::vec(any::<u8>(), 0..90), at in any::<proptest::sample::Index>()) {
        let bytes = leaf::build(place(3), 7, &key, &value);
        let whole = Leaf::accept(place(3), bytes.clone(), true).expect("whole");
        prop_assert_eq!((whole.key(), whole.value(), whole.state()), (&key[..], &value[..], LeafState::Alive));
        prop_assert!(Leaf::accept(place(4), bytes.clone(), true).is_err(), "elsewhere");
        prop_assert!(Leaf::accept(Place { index: 6, ..place(3) }, bytes.clone(), true).is_err(), "another index");
        let mut flipped = bytes.clone();
        flipped[at.index(bytes.len())] ^= 1;
        prop_assert!(Leaf::accept(place(3), flipped, true).is_err(), "a flipped bit");
        for state in [LeafState::Moved, LeafState::Deleted] {
            let mut frozen = bytes.clone();
            frozen[..8].copy_from_slice(&whole.frozen(state).to_le_bytes());
            let frozen = Leaf::accept(place(3), frozen, true).expect("whole in any state");
            prop_assert_eq!((frozen.key(), frozen.value(), frozen.state()), (&key[..], &value[..], state));
        }
    }

    #[test]
    fn any_mixture_of_two_values_is_refused(old in proptest::collection::vec(any::<u8>(), 0..60), new in proptest::collection::vec(any::<u8>(), 0..60), mask: u64) {
        let mut before = leaf::build(place(3), 7, b"key", &old);
        let mut after = leaf::build(place(3), 8, b"key", &new);
        before.resize(128, 0);
        after.resize(128, 0);
        let mut mixed = before.clone();
        for word in (0..16).filter(|word| mask >> word & 1 == 1) {
            mixed[word * 8..word * 8 + 8].copy_from_slice(&after[word * 8..word * 8 + 8]);
        }
        if let Ok(leaf) = Leaf::accept(place(3), mixed, true) {
            // Words behind the value do not matter.
            prop_assert!(leaf.value() == old && leaf.head.version == 7 || leaf.value() == new && leaf.head.version == 8);
        }
    }
}

#[test]
fn a_node_takes_the_form_that_its_children_need() {
    let bytes = |count: u8| (0..count).map(Step::Byte);
    assert_eq!(form_of(&children([])), Form::Nothing);
    assert_eq!(form_of(&children([Step::End])), Form::Child(slot(Step::End)));
    assert_eq!(form_of(&children(bytes(1))), Form::Child(slot(Step::Byte(0))));
    assert_eq!(form_of(&children(bytes(1).chain([Step::End]))), Form::Node(NodeKind::N4));
    assert_eq!(form_of(&children(bytes(5).chain([Step::End]))), Form::Node(NodeKind::N4));
    assert_eq!(form_of(&children(bytes(6))), Form::Node(NodeKind::N16));
    assert_eq!(form_of(&children(bytes(54))), Form::Node(NodeKind::N256));
    assert!(is_too_large(NodeKind::N4, 1) && !is_too_large(NodeKind::N4, 2));
    assert!(is_too_large(NodeKind::N16, 3) && !is_too_large(NodeKind::N16, 4));
}

#[test]
fn bytes_that_are_no_node_are_refused() {
    assert!(Node::accept(NodeKind::N4, vec![0; 64]).is_none(), "never written");
    assert!(Node::accept(NodeKind::N4, vec![0xff; 64]).is_none());
    let bytes = build(
        Head { is_dead: false, is_linked: false, kind: NodeKind::N16, depth: 0 },
        0,
        &children([Step::End]),
    );
    assert!(Node::accept(NodeKind::N4, bytes.clone()).is_none(), "of another kind");
    assert!(Node::accept(NodeKind::N16, bytes[..64].to_vec()).is_none(), "cut off");
    assert!(Node::accept(NodeKind::N16, bytes).is_some());
}
