//! Batches on their way: the verbs with their bytes, and how far each batch has come.

use super::SimServer;
use crate::addr::RegionId;
use crate::buf::Buf;
use crate::clock::Nanos;
use crate::error::FabricError;
use crate::transport::sim::cost::Picos;
use crate::transport::sim::memory::Memory;
use crate::transport::sim::tear::Torn;
use crate::verb::INLINE_BYTES;
use smallvec::SmallVec;
use std::ops::{Deref, DerefMut};
use std::task::Waker;

/// What a verb does, without the buffers.
#[derive(Clone, Debug)]
pub(in crate::transport::sim) enum Action {
    Read,
    Write,
    Cas { expected: u64, desired: u64 },
    MaskedCas(Box<Masks>),
    Faa { add: u64 },
}

/// The operands of a masked CAS, apart, since they are many and it is rare.
#[derive(Clone, Copy, Debug)]
pub(in crate::transport::sim) struct Masks {
    pub(in crate::transport::sim) compare: u64,
    pub(in crate::transport::sim) compare_mask: u64,
    pub(in crate::transport::sim) swap: u64,
    pub(in crate::transport::sim) swap_mask: u64,
}

/// The bytes that a verb in flight owns, so that nothing has to be copied on the way.
#[derive(Debug)]
pub(in crate::transport::sim) enum Bytes {
    /// An atomic has none.
    None,
    /// A few, that a WRITE carries.
    Few([u8; INLINE_BYTES], u8),
    /// What a WRITE carries or a READ fills.
    Owned(Buf),
}

impl Deref for Bytes {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        match self {
            Self::None => &[],
            Self::Few(bytes, len) => &bytes[..usize::from(*len)],
            Self::Owned(buf) => buf,
        }
    }
}

impl DerefMut for Bytes {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        match self {
            Self::None => &mut [],
            Self::Few(bytes, len) => &mut bytes[..usize::from(*len)],
            Self::Owned(buf) => buf,
        }
    }
}

/// A verb in flight, with its bytes.
#[derive(Debug)]
pub(in crate::transport::sim) struct SimVerb {
    pub(in crate::transport::sim) action: Action,
    pub(in crate::transport::sim) region: RegionId,
    pub(in crate::transport::sim) offset: usize,
    /// What a WRITE carries or a READ has fetched.
    pub(in crate::transport::sim) data: Bytes,
    /// What an atomic found.
    pub(in crate::transport::sim) previous: u64,
    pub(in crate::transport::sim) fence_before: bool,
    /// In cost mode: when its request reaches the server's NIC.
    pub(in crate::transport::sim) reaches: Picos,
}

impl SimVerb {
    pub(super) fn len(&self) -> usize {
        match self.action {
            Action::Read | Action::Write => self.data.len(),
            _ => 8,
        }
    }

    pub(super) fn region_of<'a>(&self, server: &'a SimServer) -> Option<&'a Memory> {
        server.regions[usize::from(self.region.get())].as_ref()
    }

    pub(super) fn mutates(&self) -> bool {
        !matches!(self.action, Action::Read)
    }

    /// Whether it writes down what its author is about to do: nothing else of more than a word is written to the board, but anchors, by
    /// those who make an index.
    pub(super) fn is_intent(&self) -> bool {
        matches!(self.action, Action::Write) && self.region == RegionId::BOARD && self.len() > 8
    }

    pub(super) fn in_one_word(&self) -> bool {
        self.offset / 8 == (self.offset + self.len() - 1) / 8
    }

    pub(super) fn conflicts(&self, other: &SimVerb) -> bool {
        // Word granularity: two writes of different bytes in one word are each atomic, so only shared words matter, but
        // a torn verb's piece is a whole word's share and never splits one.
        self.region == other.region
            && (self.mutates() || other.mutates())
            && self.offset / 8 < (other.offset + other.len()).div_ceil(8)
            && other.offset / 8 < (self.offset + self.len()).div_ceil(8)
    }
}

pub(in crate::transport::sim) type SimVerbs = SmallVec<[SimVerb; 1]>;

/// How a flight ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(in crate::transport::sim) enum Landed {
    Done,
    Failed(FabricError),
}

#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "they change independently of each other")]
pub(in crate::transport::sim) struct Flight {
    pub(super) serial: u32,
    pub(super) connection: usize,
    pub(in crate::transport::sim) verbs: SimVerbs,
    /// The verb that is due or open.
    pub(super) next: usize,
    pub(super) open: bool,
    /// When the open verb's window ends.
    pub(super) ends_at: Nanos,
    pub(super) torn: Option<Box<Torn>>,
    /// All effects have happened, or never will.
    pub(super) settled: bool,
    pub(in crate::transport::sim) landed: Option<Landed>,
    pub(super) waker: Option<Waker>,
    /// Nobody waits for the result.
    pub(super) detached: bool,
    /// The completion will not come.
    pub(super) lost: bool,
    /// The client dies while this verb is on its way: it lands in part, and nothing behind it does.
    pub(super) cut_at: Option<usize>,
    /// How far the model has priced it.
    pub(super) trip: Trip,
}

/// Where the current verb, and the answers since the last fence, stand in the cost model.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Trip {
    /// The current verb has been taken in by the server: its `effect` is known.
    pub(super) admitted: bool,
    pub(super) effect: Picos,
    /// When the last answer reaches the client's NIC, what it takes of it, and what all of them take.
    pub(super) reaches: Picos,
    pub(super) last: Picos,
    pub(super) answers: Picos,
    /// The client's NIC has the answers.
    pub(super) returned: bool,
}
