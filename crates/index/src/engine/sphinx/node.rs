//! Inner nodes as bytes: search, and the form that a node takes when children come or go. Pure.

pub(super) mod leaf;
pub(super) mod prefix;

use super::layout::{
    Head, NODE_END_AT, NODE_HASH_AT, NODE_HEAD_AT, NODE_SLOTS_AT, NodeKind, Slot, Step, Target,
};
use farwood_fabric::marks;
use farwood_fabric::mem::Words;
use smallvec::SmallVec;
use std::ops::Deref;

/// The children of a node, each with the step that leads to it, in the order of keys.
pub(super) type Children = SmallVec<[(Step, Slot); 8]>;

/// What a node is read from, word by word.
pub(super) trait Image {
    fn len(&self) -> usize;
    /// The word at byte `at`; 0 if there is none.
    fn word(&self, at: usize) -> u64;
    /// So many words from byte `at` on, or as many as there are.
    fn words(&self, at: usize, count: usize) -> impl Iterator<Item = u64>;
}

/// A copy.
impl<B: Deref<Target = [u8]>> Image for B {
    fn len(&self) -> usize {
        self.deref().len()
    }

    #[inline]
    fn word(&self, at: usize) -> u64 {
        self.get(at..at + 8).and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_le_bytes)
    }

    #[inline]
    fn words(&self, at: usize, count: usize) -> impl Iterator<Item = u64> {
        let words = self.get(at..).unwrap_or_default().chunks_exact(8).take(count);
        words.map(|word| word.try_into().map_or(0, u64::from_le_bytes))
    }
}

/// The node itself, where it is. No method of [`Node`] looks at a word twice.
#[derive(Clone, Copy, Debug)]
pub(super) struct InPlace<'a>(pub(super) Words<'a>);

impl Image for InPlace<'_> {
    fn len(&self) -> usize {
        self.0.len()
    }

    #[inline]
    fn word(&self, at: usize) -> u64 {
        self.0.get(at)
    }

    #[inline]
    fn words(&self, at: usize, count: usize) -> impl Iterator<Item = u64> {
        self.0.from(at, count)
    }
}

/// An inner node, as it was read.
#[derive(Debug)]
pub(super) struct Node<B> {
    bytes: B,
    pub(super) head: Head,
}

/// What is to be in the place of a node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Form {
    /// Nothing: it has no children.
    Nothing,
    /// Its only child.
    Child(Slot),
    /// A node of this kind.
    Node(NodeKind),
}

/// Where the slot of a byte is in a Node256, which has one for each.
pub(super) fn direct_slot_at(byte: u8) -> usize {
    NODE_SLOTS_AT + 8 * usize::from(byte)
}

/// The form of a node with these children that is not the root.
pub(super) fn form_of(children: &Children) -> Form {
    match children[..] {
        [] => Form::Nothing,
        [(_, only)] => Form::Child(only),
        _ => {
            let beside = children.iter().filter(|(step, _)| *step != Step::End).count();
            Form::Node(NodeKind::for_children(beside))
        }
    }
}

/// Whether a node of this kind with so many children, the one in its end slot included, should take another form.
pub(super) fn is_too_large(kind: NodeKind, children: usize) -> bool {
    children <= kind.shrinks_at().max(1)
}

impl<B: Image> Node<B> {
    /// Takes bytes for a node; `None` if they are none of this kind.
    #[inline]
    pub(super) fn accept(kind: NodeKind, bytes: B) -> Option<Self> {
        let head = Head::from_word(bytes.word(NODE_HEAD_AT))?;
        (head.kind == kind && bytes.len() >= kind.bytes()).then_some(Self { bytes, head })
    }

    /// The hash of its prefix.
    pub(super) fn hash(&self) -> u64 {
        self.bytes.word(NODE_HASH_AT)
    }

    #[inline]
    fn slot(&self, at: usize) -> Slot {
        Slot(self.bytes.word(at))
    }

    /// The slots, the end slot left out.
    #[inline]
    fn slots(&self) -> impl Iterator<Item = Slot> {
        self.bytes.words(NODE_SLOTS_AT, self.head.kind.slots()).map(Slot)
    }

    /// The slot that a step leads to and where it is in the node; an empty one's place is where it would be filled. `None` if the node
    /// has no such slot and no room for it.
    #[inline]
    pub(super) fn find(&self, step: Step) -> Option<(usize, Slot)> {
        let byte = match step {
            Step::End => return Some((NODE_END_AT, self.slot(NODE_END_AT))),
            Step::Byte(byte) if self.head.kind == NodeKind::N256 => {
                let at = direct_slot_at(byte);
                return Some((at, self.slot(at)));
            }
            Step::Byte(byte) => byte,
        };
        let mut free = None;
        let place = |n: usize| NODE_SLOTS_AT + 8 * n;
        for (n, slot) in self.slots().enumerate() {
            if slot.is_empty() {
                free = free.or(Some((place(n), slot)));
            } else if slot.byte() == byte {
                return Some((place(n), slot));
            }
        }
        free
    }

    /// What a step leads to.
    pub(super) fn child(&self, step: Step) -> Slot {
        self.find(step).map_or(Slot::EMPTY, |(_, slot)| slot)
    }

    /// How many children it has, the one in the end slot included.
    pub(super) fn count(&self) -> usize {
        let end = usize::from(!self.slot(NODE_END_AT).is_empty());
        end + self.slots().filter(|slot| !slot.is_empty()).count()
    }

    /// Its children, in the order of keys.
    pub(super) fn children(&self) -> Children {
        let mut children = Children::new();
        self.add_children(|child| children.push(child));
        children.sort_unstable_by_key(|(step, _)| *step);
        children
    }

    /// The same for a reader without the lock, who may have seen a step in two slots: one for each step.
    ///
    /// Words of a READ are of different ages, and a byte whose slot was cleared can have come back in another one meanwhile. Either slot led
    /// to all keys of that byte at the instant when it was read, so whoever follows one of them, and only one, learns for each key what was
    /// so at some instant since. Both together would tell of some keys twice, and not in their order. A step that was seen in no slot led
    /// nowhere at some instant: it is never in two slots at once, and moves only by being cleared first.
    pub(super) fn distinct_children(&self) -> Children {
        let mut children = self.children();
        let read = children.len();
        children.dedup_by_key(|(step, _)| *step);
        note_if_fewer(children.len(), read);
        children
    }

    /// Its slots, in the order of their bytes, in the place of what `slots` held; and its end slot, which may be empty. If they are to be
    /// `distinct`, one for each byte, as in [`Node::distinct_children`].
    pub(super) fn slots_into(&self, slots: &mut Vec<Slot>, distinct: bool) -> Slot {
        slots.clear();
        let (mut next, mut are_ascending) = (0, true);
        for slot in self.slots().filter(|slot| !slot.is_empty()) {
            // They are, if keys came in their order.
            are_ascending &= next <= u16::from(slot.byte());
            next = u16::from(slot.byte()) + 1;
            slots.push(slot);
        }
        if !are_ascending {
            slots.sort_unstable_by_key(|slot| slot.byte());
            if distinct {
                let read = slots.len();
                slots.dedup_by_key(|slot| slot.byte());
                note_if_fewer(slots.len(), read);
            }
        }
        self.slot(NODE_END_AT)
    }

    #[inline]
    fn add_children(&self, mut add: impl FnMut((Step, Slot))) {
        let end = self.slot(NODE_END_AT);
        if !end.is_empty() {
            add((Step::End, end));
        }
        for slot in self.slots().filter(|slot| !slot.is_empty()) {
            add((Step::Byte(slot.byte()), slot));
        }
    }

    /// Whether all its slots are slots, each of a byte of its own.
    pub(super) fn is_sound(&self) -> bool {
        let children = self.children();
        children.windows(2).all(|pair| pair[0].0 < pair[1].0)
            && children.iter().all(|(_, slot)| slot.target().is_some_and(|to| to != Target::Empty))
    }
}

fn note_if_fewer(kept: usize, read: usize) {
    if kept < read {
        marks::hit("byte_in_two_slots");
    }
}

/// The bytes of a new node with these children, which fit.
pub(super) fn build(head: Head, hash: u64, children: &Children) -> Vec<u8> {
    let mut bytes = vec![0; head.kind.bytes()];
    let mut put = |at: usize, word: u64| bytes[at..at + 8].copy_from_slice(&word.to_le_bytes());
    put(NODE_HEAD_AT, head.to_word());
    put(NODE_HASH_AT, hash);
    let mut next = NODE_SLOTS_AT;
    for (step, slot) in children {
        let slot = slot.reached_by(*step);
        match step {
            Step::End => put(NODE_END_AT, slot.0),
            Step::Byte(byte) if head.kind == NodeKind::N256 => put(direct_slot_at(*byte), slot.0),
            Step::Byte(_) => {
                put(next, slot.0);
                next += 8;
            }
        }
    }
    bytes
}
