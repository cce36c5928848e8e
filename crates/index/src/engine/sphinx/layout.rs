//! The words of far memory: slots, headers of nodes and of leaves, and the sizes of both. Pure.
//!
//! ```text
//! slot        63     56 55     48 47                        0
//!             [ byte 8 ] [ kind 8 ] [ packed address 48 ]        all zero: empty
//! node head   63      62 61      56 55       40 39      8 7         0
//!             [ state 2 ] [ kind 6 ] [ depth 16 ] [ zero 32 ] [ linked 8 ]
//! leaf head   63      62 61        34 33        21 20         0
//!             [ state 2 ] [ version 28 ] [ key bytes 13 ] [ value bytes 21 ]
//!
//! node        +0 head   +8 prefix hash   +16 end slot   +24 slots
//! leaf        +0 head   +8 checksum      +16 key, then value
//! ```
//!
//! Slots and heads are words, so each is whole by itself however a READ is torn (the paper's Figure 3). What differs from it:
//!
//! - The hash of a node's prefix has a word of its own: 42 bits would let one insertion in 4 x 10^12 go astray.
//! - *The end slot* is for the key that ends where the node begins, so that keys may be prefixes of others.
//! - Objects take whole lines of 64 bytes, since slots have packed addresses. Nodes have as many slots as fit their lines: 5, 21, 53
//!   and 256 in the place of 4, 16, 48 and 256.
//! - Locks are in lock memory (`shared/locks`), where whoever recovers a dead session finds them all.

use farwood_fabric::GlobalAddr;
use farwood_fabric::addr::{PACKED_ALIGN, PackedAddr};

/// The longest key.
pub(super) const MAX_KEY_BYTES: usize = 4096;
/// A leaf has room for at least so many bytes more than its value has, which only `adjust` uses: those who keep a little with their values,
/// as the gateway does when a value expires, can add it and take it away in a full pool too.
pub(super) const SPARE_BYTES: usize = 10;
/// The longest value: 1 MiB, and what is kept with it.
pub(super) const MAX_VALUE_BYTES: usize = (1 << 20) + SPARE_BYTES;

pub(super) const NODE_HEAD_AT: usize = 0;
pub(super) const NODE_HASH_AT: usize = 8;
pub(super) const NODE_END_AT: usize = 16;
pub(super) const NODE_SLOTS_AT: usize = 24;
pub(super) const LEAF_HEAD_AT: usize = 0;
pub(super) const LEAF_CHECKSUM_AT: usize = 8;
pub(super) const LEAF_KEY_AT: usize = 16;
pub(super) const LINE: usize = 64;
const _: () = assert!(LINE as u64 == PACKED_ALIGN && PackedAddr::BITS == 48);
const _: () = assert!(NODE_HEAD_AT + 8 == NODE_HASH_AT && NODE_HASH_AT + 8 == NODE_END_AT);
const _: () = assert!(NODE_END_AT + 8 == NODE_SLOTS_AT && LEAF_HEAD_AT + 8 == LEAF_CHECKSUM_AT);
const _: () = assert!(LEAF_CHECKSUM_AT + 8 == LEAF_KEY_AT && NODE_SLOTS_AT + 5 * 8 == LINE);
const _: () = assert!(MAX_KEY_BYTES < 1 << 13 && MAX_VALUE_BYTES < 1 << 21 && MAX_KEY_BYTES < 1 << 16);
const _: () =
    assert!(LeafClass::LARGEST.bytes() >= LEAF_KEY_AT + MAX_KEY_BYTES + MAX_VALUE_BYTES + SPARE_BYTES);
const _: () = assert!(LEAF_KINDS_FROM as usize + (LeafClass::COUNT as usize) < 64);

/// How large an inner node is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum NodeKind {
    N4 = 1,
    N16 = 2,
    N48 = 3,
    N256 = 4,
}

impl NodeKind {
    pub(super) const ALL: [Self; 4] = [Self::N4, Self::N16, Self::N48, Self::N256];

    pub(super) const fn of(number: u64) -> Option<Self> {
        Some(match number {
            1 => Self::N4,
            2 => Self::N16,
            3 => Self::N48,
            4 => Self::N256,
            _ => return None,
        })
    }

    /// How many slots it has, beside the end slot.
    pub(super) const fn slots(self) -> usize {
        match self {
            Self::N4 => 5,
            Self::N16 => 21,
            Self::N48 => 53,
            Self::N256 => 256,
        }
    }

    /// How many bytes.
    pub(super) const fn bytes(self) -> usize {
        (NODE_SLOTS_AT + 8 * self.slots()).next_multiple_of(LINE)
    }

    /// The smallest that has room for so many children, beside the one in the end slot.
    pub(super) fn for_children(count: usize) -> Self {
        Self::ALL.into_iter().find(|kind| count <= kind.slots()).unwrap_or(Self::N256)
    }

    /// At how few children a node is made smaller: so few that it does not become larger again at once.
    pub(super) const fn shrinks_at(self) -> usize {
        match self {
            Self::N4 => 0,
            Self::N16 => 3,
            Self::N48 => 16,
            Self::N256 => 42,
        }
    }
}

/// How large a leaf is: multiples of 64 bytes up to 512, then four sizes for each doubling.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct LeafClass(u8);

const EVEN_CLASSES: u8 = 8;
const LEAF_KINDS_FROM: u8 = 8;

impl LeafClass {
    pub(super) const LARGEST: Self = Self(EVEN_CLASSES + 44);
    pub(super) const COUNT: u8 = Self::LARGEST.0 + 1;

    pub(super) const fn bytes(self) -> usize {
        if self.0 < EVEN_CLASSES {
            return (self.0 as usize + 1) * LINE;
        }
        let above = (self.0 - EVEN_CLASSES) as usize;
        let quarter = (EVEN_CLASSES as usize * LINE / 4) << (above / 4);
        quarter * (5 + above % 4)
    }

    /// The one of a new leaf for a key and a value of these lengths, with the room to spare; `None` if there is none.
    pub(super) fn for_pair(key_bytes: usize, value_bytes: usize) -> Option<Self> {
        let bytes = leaf_bytes(key_bytes, value_bytes) + SPARE_BYTES;
        Self::all().find(|class| class.bytes() >= bytes)
    }

    /// Whether a leaf of this size takes another value in the place of its own, with room to spare. One that is much smaller goes to a
    /// smaller leaf.
    pub(super) fn keeps(self, key_bytes: usize, value_bytes: usize) -> bool {
        let class = |more| Self::for_pair(key_bytes, value_bytes + more);
        class(0).is_some_and(|least| least <= self) && class(SPARE_BYTES).is_none_or(|most| self <= most)
    }

    /// The same for a value that may use the room to spare, or has used it.
    pub(super) fn keeps_adjusted(self, key_bytes: usize, value_bytes: usize) -> bool {
        leaf_bytes(key_bytes, value_bytes) <= self.bytes()
    }

    /// All sizes.
    pub(super) fn all() -> impl Iterator<Item = Self> {
        (0..Self::COUNT).map(Self)
    }

    /// Its number, as a class of heap objects.
    pub(super) fn number(self) -> u16 {
        u16::from(self.0)
    }
}

/// How many bytes of a leaf a key and a value of these lengths take.
pub(super) const fn leaf_bytes(key_bytes: usize, value_bytes: usize) -> usize {
    LEAF_KEY_AT + key_bytes + value_bytes
}

/// What a slot leads to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Target {
    Empty,
    Node(NodeRef),
    Leaf(LeafRef),
}

/// Where an inner node is, and of what kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct NodeRef {
    pub(super) addr: GlobalAddr,
    pub(super) kind: NodeKind,
}

/// Where a leaf is, and of what size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct LeafRef {
    pub(super) addr: GlobalAddr,
    pub(super) class: LeafClass,
}

/// Where a key goes on from a node: with its next byte, or nowhere, since it ends.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Step {
    End,
    Byte(u8),
}

impl Step {
    /// How `key` goes on from depth `depth`; `None` if it is shorter than that.
    pub(super) fn of(key: &[u8], depth: usize) -> Option<Self> {
        match key.len().cmp(&depth) {
            std::cmp::Ordering::Less => None,
            std::cmp::Ordering::Equal => Some(Self::End),
            std::cmp::Ordering::Greater => Some(Self::Byte(key[depth])),
        }
    }

    fn byte(self) -> u8 {
        match self {
            Self::End => 0,
            Self::Byte(byte) => byte,
        }
    }
}

/// The word in a slot.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(super) struct Slot(pub(super) u64);

impl Slot {
    pub(super) const EMPTY: Self = Self(0);

    fn new(step: Step, kind: u8, addr: GlobalAddr) -> Option<Self> {
        let packed = PackedAddr::pack(addr)?;
        Some(Self(u64::from(step.byte()) << 56 | u64::from(kind) << 48 | packed.to_raw()))
    }

    /// A slot that leads to a node; `None` if its address cannot be packed, which those of the heap can.
    pub(super) fn to_node(step: Step, node: NodeRef) -> Option<Self> {
        Self::new(step, node.kind as u8, node.addr)
    }

    /// A slot that leads to a leaf.
    pub(super) fn to_leaf(step: Step, leaf: LeafRef) -> Option<Self> {
        Self::new(step, LEAF_KINDS_FROM + leaf.class.0, leaf.addr)
    }

    pub(super) fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The byte that leads here.
    pub(super) fn byte(self) -> u8 {
        self.0.to_be_bytes()[0]
    }

    /// The same target, reached by another step.
    #[must_use]
    pub(super) fn reached_by(self, step: Step) -> Self {
        if self.is_empty() { self } else { Self(self.0 & (u64::MAX >> 8) | u64::from(step.byte()) << 56) }
    }

    /// What it leads to; `None` if no slot looks like that.
    pub(super) fn target(self) -> Option<Target> {
        if self.is_empty() {
            return Some(Target::Empty);
        }
        let addr = PackedAddr::from_raw(self.0).unpack();
        let number = self.0.to_be_bytes()[1];
        if let Some(kind) = NodeKind::of(u64::from(number)) {
            return Some(Target::Node(NodeRef { addr, kind }));
        }
        let class = number.checked_sub(LEAF_KINDS_FROM).filter(|class| *class < LeafClass::COUNT)?;
        Some(Target::Leaf(LeafRef { addr, class: LeafClass(class) }))
    }
}

/// The first word of a node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Head {
    /// Frozen: another takes its place. As long as a slot leads here, it counts.
    pub(super) is_dead: bool,
    /// A slot was seen to lead here. Hints count only then: the node may be one that its maker never linked.
    pub(super) is_linked: bool,
    pub(super) kind: NodeKind,
    /// The length of the prefix that all keys below have in common.
    pub(super) depth: usize,
}

const ALIVE: u64 = 1;
const DEAD: u64 = 2;
/// The byte of a node's head that says dead or alive, and the one that says linked: each is written by itself.
pub(super) const NODE_STATE_AT: usize = NODE_HEAD_AT + 7;
pub(super) const NODE_LINKED_AT: usize = NODE_HEAD_AT;

impl Head {
    pub(super) fn to_word(self) -> u64 {
        let state = if self.is_dead { DEAD } else { ALIVE };
        state << 62 | (self.kind as u64) << 56 | (self.depth as u64) << 40 | u64::from(self.is_linked)
    }

    /// The byte at [`NODE_STATE_AT`].
    pub(super) fn state_byte(self) -> u8 {
        self.to_word().to_le_bytes()[7]
    }

    /// `None` if it is no node's.
    pub(super) fn from_word(word: u64) -> Option<Self> {
        let is_dead = match word >> 62 {
            ALIVE => false,
            DEAD => true,
            _ => return None,
        };
        let depth = usize::try_from(word >> 40 & 0xffff).ok().filter(|depth| *depth <= MAX_KEY_BYTES)?;
        let is_linked = word & 0xff == 1;
        Some(Self { is_dead, is_linked, kind: NodeKind::of(word >> 56 & 0x3f)?, depth })
    }
}

/// Whether a leaf can be written to, and whether it counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum LeafState {
    Alive = 1,
    /// Frozen: another leaf takes its place. As long as a slot leads here, it counts.
    Moved = 2,
    /// The key is deleted, whatever leads here.
    Deleted = 3,
}

/// The first word of a leaf.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct LeafHead {
    pub(super) state: LeafState,
    /// Grows with every rewrite; wraps.
    pub(super) version: u32,
    pub(super) key_bytes: usize,
    pub(super) value_bytes: usize,
}

const VERSION_MASK: u64 = (1 << 28) - 1;
/// All of the word but the state.
pub(super) const LEAF_KEYED_BITS: u64 = u64::MAX >> 2;

impl LeafHead {
    pub(super) fn to_word(self) -> u64 {
        (self.state as u64) << 62
            | (u64::from(self.version) & VERSION_MASK) << 34
            | (self.key_bytes as u64) << 21
            | self.value_bytes as u64
    }

    /// `None` if it is no leaf's.
    pub(super) fn from_word(word: u64) -> Option<Self> {
        let state = match word >> 62 {
            1 => LeafState::Alive,
            2 => LeafState::Moved,
            3 => LeafState::Deleted,
            _ => return None,
        };
        let part = |shift: u32, bits: u32| usize::try_from(word >> shift & ((1 << bits) - 1)).unwrap_or(0);
        let version = u32::try_from(word >> 34 & VERSION_MASK).unwrap_or(0);
        Some(Self { state, version, key_bytes: part(21, 13), value_bytes: part(0, 21) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farwood_fabric::{RegionId, ServerId};
    use proptest::prelude::*;

    #[test]
    fn sizes_are_whole_lines_that_grow() {
        assert_eq!(NodeKind::ALL.map(NodeKind::bytes), [64, 192, 448, 2112]);
        for kind in NodeKind::ALL {
            assert_eq!(NodeKind::for_children(kind.slots()), kind);
            assert!(kind.shrinks_at() < kind.slots(), "{kind:?}");
        }
        for (small, large) in NodeKind::ALL.iter().zip(&NodeKind::ALL[1..]) {
            assert!(large.shrinks_at() < small.slots(), "{large:?} becomes {small:?} with room to spare");
        }
        let sizes: Vec<usize> = (0..LeafClass::COUNT).map(|n| LeafClass(n).bytes()).collect();
        assert_eq!(sizes[..10], [64, 128, 192, 256, 320, 384, 448, 512, 640, 768]);
        assert!(sizes.iter().all(|bytes| bytes % 64 == 0) && sizes.is_sorted());
        assert!(sizes.windows(2).all(|pair| pair[1] <= pair[0] * 2 && pair[1] > pair[0]));
        assert_eq!(LeafClass::for_pair(0, 48 - SPARE_BYTES), Some(LeafClass(0)));
        assert_eq!(LeafClass::for_pair(1, 48 - SPARE_BYTES), Some(LeafClass(1)));
        assert_eq!(LeafClass::for_pair(MAX_KEY_BYTES, MAX_VALUE_BYTES), Some(LeafClass::LARGEST));
        assert_eq!(LeafClass::for_pair(MAX_KEY_BYTES, 2 * MAX_VALUE_BYTES), None);
    }

    #[test]
    fn every_leaf_has_room_to_spare_which_is_not_used_by_chance() {
        let longest = MAX_VALUE_BYTES - SPARE_BYTES;
        for value_bytes in (0..3000).chain(longest - SPARE_BYTES..=longest) {
            let class = |more| LeafClass::for_pair(8, value_bytes + more).expect("it is not too long");
            assert!(class(0).keeps(8, value_bytes) && class(0).keeps_adjusted(8, value_bytes + SPARE_BYTES));
            assert!(
                class(SPARE_BYTES).keeps(8, value_bytes),
                "{value_bytes}: made with it, and left without"
            );
            for more in (0..200).filter(|more| value_bytes + more <= MAX_VALUE_BYTES) {
                let has_room = class(0).keeps_adjusted(8, value_bytes + more + SPARE_BYTES);
                assert_eq!(class(0).keeps(8, value_bytes + more), has_room, "{value_bytes} and {more} more");
            }
        }
        let large = LeafClass::for_pair(8, 100).expect("small");
        assert!(!large.keeps(8, 20) && !large.keeps(8, 200));
    }

    #[test]
    fn a_key_goes_on_by_its_next_byte_or_ends() {
        assert_eq!(Step::of(b"ab", 1), Some(Step::Byte(b'b')));
        assert_eq!(Step::of(b"ab", 2), Some(Step::End));
        assert_eq!(Step::of(b"ab", 3), None);
        assert!(Step::End < Step::Byte(0));
    }

    proptest! {
        #[test]
        fn slots_keep_what_they_are_made_of(server in 0..=ServerId::MAX, line in 1u64..1 << 36, byte: u8, other: u8, node in 0usize..4, class in 0..LeafClass::COUNT) {
            let addr = GlobalAddr::new(ServerId::new(server), RegionId::MAIN, line * 64);
            let to = NodeRef { addr, kind: NodeKind::ALL[node] };
            let slot = Slot::to_node(Step::Byte(byte), to).expect("packed");
            prop_assert_eq!((slot.target(), slot.byte()), (Some(Target::Node(to)), byte));
            let leaf = LeafRef { addr, class: LeafClass(class) };
            let slot = Slot::to_leaf(Step::Byte(byte), leaf).expect("packed").reached_by(Step::Byte(other));
            prop_assert_eq!((slot.target(), slot.byte()), (Some(Target::Leaf(leaf)), other));
            prop_assert_eq!(Slot::to_leaf(Step::Byte(0), leaf), Slot::to_leaf(Step::End, leaf));
            let misplaced = LeafRef { addr: addr.add(8), ..leaf };
            prop_assert!(Slot::to_leaf(Step::End, misplaced).is_none());
        }

        #[test]
        fn heads_keep_what_they_are_made_of(kind in 0usize..4, depth in 0..=MAX_KEY_BYTES, version in 0u32..1 << 28, value_bytes in 0..=MAX_VALUE_BYTES) {
            for (is_dead, is_linked) in [(false, false), (false, true), (true, false), (true, true)] {
                let head = Head { is_dead, is_linked, kind: NodeKind::ALL[kind], depth };
                let mut bytes = head.to_word().to_le_bytes();
                prop_assert_eq!(Head::from_word(u64::from_le_bytes(bytes)), Some(head));
                bytes[NODE_STATE_AT] = Head { is_dead: true, ..head }.state_byte();
                bytes[NODE_LINKED_AT] = 1;
                let buried = Head { is_dead: true, is_linked: true, ..head };
                prop_assert_eq!(Head::from_word(u64::from_le_bytes(bytes)), Some(buried));
            }
            for state in [LeafState::Alive, LeafState::Moved, LeafState::Deleted] {
                let head = LeafHead { state, version, key_bytes: depth, value_bytes };
                prop_assert_eq!(LeafHead::from_word(head.to_word()), Some(head));
                prop_assert_eq!(head.to_word() & LEAF_KEYED_BITS, LeafHead { state: LeafState::Alive, ..head }.to_word() & LEAF_KEYED_BITS);
            }
        }

        #[test]
        fn whatever_the_word_nothing_panics(word: u64) {
            let _ = (Slot(word).target(), Head::from_word(word), LeafHead::from_word(word));
        }
    }
}
