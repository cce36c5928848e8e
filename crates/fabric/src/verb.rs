//! Verbs, and the ordered batches in which they travel.
//!
//! A [`Batch`] goes to one server and takes effect in order; what it costs in round trips follows from rule 3 of the
//! contract alone ([`Batch::round_trips`]), so every transport counts the same.

use crate::addr::{GlobalAddr, ServerId};
use crate::buf::{Buf, SharedBuf};
use crate::caps::Capabilities;
use crate::error::FabricError;
use crate::region::{Permissions, RegionTable};
use crate::stats::OpStats;
use smallvec::SmallVec;

/// Bytes that a WRITE carries in itself, so that an unlock or a pointer needs no buffer.
pub const INLINE_BYTES: usize = 32;

/// Where a WRITE's bytes come from.
#[derive(Debug)]
pub enum Source {
    /// A few bytes, carried along.
    Inline {
        /// The bytes.
        bytes: [u8; INLINE_BYTES],
        /// How many of them.
        len: u8,
    },
    /// An owned buffer, whole.
    Owned(Buf),
    /// A range of a shared buffer.
    Shared {
        /// The buffer.
        buf: SharedBuf,
        /// Where in it the bytes begin.
        at: usize,
        /// How many.
        len: usize,
    },
}

impl Source {
    /// No bytes.
    pub(crate) const NOTHING: Self = Self::Inline { bytes: [0; INLINE_BYTES], len: 0 };

    /// How many bytes.
    pub fn len(&self) -> usize {
        match self {
            Self::Inline { len, .. } => usize::from(*len),
            Self::Owned(buf) => buf.len(),
            Self::Shared { len, .. } => *len,
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Where a READ's bytes go.
#[derive(Debug)]
pub enum Landing {
    /// A pooled buffer, handed over with the completion.
    Pooled,
    /// A range of a shared buffer.
    Shared {
        /// The buffer.
        buf: SharedBuf,
        /// Where in it.
        at: usize,
    },
}

/// One access to far memory.
#[derive(Debug)]
pub enum Verb {
    /// Fetches bytes.
    Read {
        /// From where.
        addr: GlobalAddr,
        /// How many.
        len: usize,
        /// Into what.
        into: Landing,
    },
    /// Stores bytes.
    Write {
        /// Where.
        addr: GlobalAddr,
        /// What.
        from: Source,
    },
    /// Stores `desired` if the word is `expected`; brings the word as it was.
    Cas {
        /// Which word.
        addr: GlobalAddr,
        /// What it must be.
        expected: u64,
        /// What it becomes.
        desired: u64,
    },
    /// CAS of some bits: compares under one mask, swaps under another.
    MaskedCas {
        /// Which word.
        addr: GlobalAddr,
        /// What it must be, under `compare_mask`.
        compare: u64,
        /// Which bits are compared.
        compare_mask: u64,
        /// What it becomes, under `swap_mask`.
        swap: u64,
        /// Which bits change.
        swap_mask: u64,
    },
    /// Adds to the word, wrapping; brings the word as it was.
    Faa {
        /// Which word.
        addr: GlobalAddr,
        /// What to add.
        add: u64,
    },
}

impl Verb {
    /// The address.
    pub fn addr(&self) -> GlobalAddr {
        match self {
            Self::Read { addr, .. }
            | Self::Write { addr, .. }
            | Self::Cas { addr, .. }
            | Self::MaskedCas { addr, .. }
            | Self::Faa { addr, .. } => *addr,
        }
    }

    /// How many bytes of far memory it touches.
    pub fn len(&self) -> usize {
        match self {
            Self::Read { len, .. } => *len,
            Self::Write { from, .. } => from.len(),
            _ => 8,
        }
    }

    /// Whether it touches none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn is_write(&self) -> bool {
        matches!(self, Self::Write { .. })
    }

    fn is_read(&self) -> bool {
        matches!(self, Self::Read { .. })
    }

    /// Whether the verb may be posted at all: exists, is permitted, is possible, has its buffers.
    #[inline]
    fn check(&self, batch: ServerId, table: &RegionTable, caps: &Capabilities) -> Result<(), FabricError> {
        let addr = self.addr();
        if addr.server() != batch {
            return Err(FabricError::MixedServers { batch, verb: addr.server() });
        }
        match self {
            Self::Read { len, into, .. } => {
                if let Landing::Shared { buf, at } = into {
                    check_range(buf, *at, *len)?;
                }
                table.check(addr, *len as u64, Permissions::READ)
            }
            Self::Write { from, .. } => {
                if let Source::Shared { buf, at, len } = from {
                    check_range(buf, *at, *len)?;
                }
                table.check(addr, from.len() as u64, Permissions::WRITE)
            }
            Self::MaskedCas { .. } if !caps.masked_cas => {
                Err(FabricError::Unsupported { what: "masked CAS" })
            }
            Self::Cas { .. } | Self::MaskedCas { .. } | Self::Faa { .. } => table.check_atomic(addr),
        }
    }

    /// Adds what the verb costs to `stats`.
    fn count(&self, stats: &mut OpStats) {
        let bytes = self.len() as u64;
        match self {
            Self::Read { .. } => {
                stats.reads += 1;
                stats.bytes_read += bytes;
            }
            Self::Write { .. } => {
                stats.writes += 1;
                stats.bytes_written += bytes;
            }
            _ => {
                stats.atomics += 1;
                stats.bytes_read += 8;
                stats.bytes_written += 8;
            }
        }
    }
}

fn check_range(buf: &SharedBuf, at: usize, len: usize) -> Result<(), FabricError> {
    let buffer_bytes = buf.memory().len();
    if len <= buffer_bytes && at <= buffer_bytes - len {
        Ok(())
    } else {
        Err(FabricError::BufferRange { at, len, buffer_bytes })
    }
}

/// Most batches are short: a lock, a node, an unlock.
pub(crate) type VerbList = SmallVec<[Verb; 2]>;

/// Verbs for one server that take effect in the order they were added.
#[derive(Debug)]
pub struct Batch {
    server: ServerId,
    pub(crate) verbs: VerbList,
}

impl Batch {
    /// An empty batch for `server`.
    pub fn new(server: ServerId) -> Self {
        Self { server, verbs: SmallVec::new() }
    }

    /// The server it goes to.
    pub fn server(&self) -> ServerId {
        self.server
    }

    /// How many verbs it has.
    pub fn len(&self) -> usize {
        self.verbs.len()
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.verbs.is_empty()
    }

    /// How many bytes of far memory its verbs touch.
    pub(crate) fn bytes(&self) -> usize {
        self.verbs.iter().map(Verb::len).sum()
    }

    /// Adds a verb; returns its place, by which its result is asked for.
    pub fn push(&mut self, verb: Verb) -> usize {
        self.verbs.push(verb);
        self.verbs.len() - 1
    }

    /// Adds a READ into a pooled buffer.
    pub fn read(&mut self, addr: GlobalAddr, len: usize) -> usize {
        self.push(Verb::Read { addr, len, into: Landing::Pooled })
    }

    /// Adds a READ into a shared buffer.
    pub fn read_into(&mut self, addr: GlobalAddr, len: usize, buf: &SharedBuf, at: usize) -> usize {
        self.push(Verb::Read { addr, len, into: Landing::Shared { buf: buf.clone(), at } })
    }

    /// Adds a WRITE of a whole buffer.
    pub fn write(&mut self, addr: GlobalAddr, data: Buf) -> usize {
        self.push(Verb::Write { addr, from: Source::Owned(data) })
    }

    /// Adds a WRITE of a range of a shared buffer.
    pub fn write_from(&mut self, addr: GlobalAddr, buf: &SharedBuf, at: usize, len: usize) -> usize {
        self.push(Verb::Write { addr, from: Source::Shared { buf: buf.clone(), at, len } })
    }

    /// Adds a WRITE of a few bytes, at most [`INLINE_BYTES`].
    ///
    /// # Panics
    /// If there are more: they need a buffer.
    pub fn write_inline(&mut self, addr: GlobalAddr, data: &[u8]) -> usize {
        let mut bytes = [0; INLINE_BYTES];
        assert!(data.len() <= INLINE_BYTES, "at most {INLINE_BYTES} bytes are carried inline");
        bytes[..data.len()].copy_from_slice(data);
        let len = u8::try_from(data.len()).expect("at most 32");
        self.push(Verb::Write { addr, from: Source::Inline { bytes, len } })
    }

    /// Adds a WRITE of one word.
    pub fn write_word(&mut self, addr: GlobalAddr, word: u64) -> usize {
        self.write_inline(addr, &word.to_le_bytes())
    }

    /// Adds a CAS.
    pub fn cas(&mut self, addr: GlobalAddr, expected: u64, desired: u64) -> usize {
        self.push(Verb::Cas { addr, expected, desired })
    }

    /// Adds an FAA.
    pub fn faa(&mut self, addr: GlobalAddr, add: u64) -> usize {
        self.push(Verb::Faa { addr, add })
    }

    /// For each verb, whether it waits for a fence: a WRITE or atomic behind a READ or atomic that no fence covers yet.
    /// (Rule 3: WRITE then anything, atomic then READ and READ then READ are free.)
    pub fn fences(&self) -> impl Iterator<Item = bool> {
        let mut fences = Fences::default();
        self.verbs.iter().map(move |verb| fences.before(verb))
    }

    /// How many round trips the batch takes: one, and one more for each fence.
    #[inline]
    pub fn round_trips(&self) -> u64 {
        if self.verbs.len() == 1 {
            return 1;
        }
        1 + self.fences().filter(|fenced| *fenced).count() as u64
    }

    /// Checks every verb (rule 6). The first that must not be posted, with its place.
    #[inline]
    pub fn check(&self, table: &RegionTable, caps: &Capabilities) -> Result<(), (usize, FabricError)> {
        if self.verbs.is_empty() || self.verbs.len() > caps.max_batch {
            let error = FabricError::BatchLength { verbs: self.verbs.len(), max: caps.max_batch };
            return Err((0, error));
        }
        for (n, verb) in self.verbs.iter().enumerate() {
            verb.check(self.server, table, caps).map_err(|error| (n, error))?;
        }
        Ok(())
    }

    /// Adds the verbs and bytes to `stats`, not the round trips.
    #[inline]
    pub(crate) fn count(&self, stats: &mut OpStats) {
        for verb in &self.verbs {
            verb.count(stats);
        }
    }
}

/// Where the fences of a batch stand, verb by verb.
#[derive(Default, Debug)]
pub(crate) struct Fences {
    /// There was a READ or atomic that no fence covers yet.
    pending: bool,
}

impl Fences {
    /// Whether the next verb waits for a fence.
    pub(crate) fn before(&mut self, verb: &Verb) -> bool {
        let fenced = self.pending && !verb.is_read();
        self.pending = (self.pending && !fenced) || !verb.is_write();
        fenced
    }
}

/// What a completed verb brought.
#[derive(Debug)]
pub enum Output {
    /// Nothing: a WRITE, or a READ into a shared buffer.
    Done,
    /// The bytes of a READ.
    Bytes(Buf),
    /// The word as it was before an atomic.
    Previous(u64),
}

/// What became of one verb of a batch that failed.
#[derive(Debug)]
pub enum VerbOutcome {
    /// It completed.
    Completed(Output),
    /// It was refused and touched nothing; the batch's error says why.
    Refused,
    /// It did not happen and will not.
    NotExecuted,
    /// It may have happened, or may happen until the connection is fenced.
    Unknown,
}

/// The results of a batch of which every verb completed.
#[derive(Debug)]
pub struct Completed {
    pub(crate) outputs: SmallVec<[Output; 2]>,
}

impl Completed {
    /// The word that atomic `n` found.
    ///
    /// # Panics
    /// If verb `n` is no atomic of this batch.
    pub fn previous(&self, n: usize) -> u64 {
        match &self.outputs[n] {
            Output::Previous(word) => *word,
            other => panic!("verb {n} is no atomic but brought {other:?}"),
        }
    }

    /// The bytes that READ `n` brought; they can be taken once.
    ///
    /// # Panics
    /// If verb `n` is no READ into a pooled buffer, or its bytes were taken.
    pub fn take(&mut self, n: usize) -> Buf {
        match std::mem::replace(&mut self.outputs[n], Output::Done) {
            Output::Bytes(buf) => buf,
            other => panic!("verb {n} brought no bytes (or they were taken) but {other:?}"),
        }
    }
}

/// A batch that did not complete: why, where, and what became of each verb.
#[derive(Debug)]
pub struct BatchFailure {
    /// Why.
    pub error: FabricError,
    /// At which verb.
    pub at: usize,
    /// What became of each.
    pub outcomes: Vec<VerbOutcome>,
}

impl BatchFailure {
    /// A batch of `verbs` verbs that was not posted because verb `at` must not be.
    #[expect(clippy::unnecessary_box_returns, reason = "it is only ever used boxed, in a `BatchResult`")]
    pub(crate) fn refused(error: FabricError, at: usize, verbs: usize) -> Box<Self> {
        let outcome = |n| if n == at { VerbOutcome::Refused } else { VerbOutcome::NotExecuted };
        Box::new(Self { error, at, outcomes: (0..verbs).map(outcome).collect() })
    }

    /// A batch of `verbs` verbs that nothing was done about.
    #[expect(clippy::unnecessary_box_returns, reason = "it is only ever used boxed, in a `BatchResult`")]
    pub(crate) fn not_executed(error: FabricError, verbs: usize) -> Box<Self> {
        let outcomes = (0..verbs).map(|_| VerbOutcome::NotExecuted).collect();
        Box::new(Self { error, at: 0, outcomes })
    }

    /// Whether the CAS, FAA or WRITE at `n` may have happened or may happen yet.
    pub fn may_have_happened(&self, n: usize) -> bool {
        !matches!(self.outcomes.get(n), Some(VerbOutcome::Refused | VerbOutcome::NotExecuted))
    }
}

impl std::fmt::Display for BatchFailure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "verb {} of {}: {}", self.at, self.outcomes.len(), self.error)
    }
}

impl std::error::Error for BatchFailure {}

impl From<Box<BatchFailure>> for FabricError {
    fn from(failure: Box<BatchFailure>) -> Self {
        failure.error
    }
}

/// What a batch comes back with.
pub type BatchResult = Result<Completed, Box<BatchFailure>>;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::addr::RegionId;
    use proptest::prelude::*;

    const AT: GlobalAddr = GlobalAddr::new(ServerId::new(0), RegionId::MAIN, 64);

    fn batch(kinds: &str) -> Batch {
        let mut batch = Batch::new(AT.server());
        for kind in kinds.chars() {
            match kind {
                'R' => batch.read(AT, 8),
                'W' => batch.write_word(AT, 1),
                'A' => batch.cas(AT, 0, 1),
                _ => unreachable!(),
            };
        }
        batch
    }

    #[test]
    fn round_trips_follow_the_contract() {
        for (kinds, trips) in [
            ("R", 1),
            ("W", 1),
            ("A", 1),
            ("WW", 1),  // Sherman: node and unlock
            ("WWW", 1), // Sherman: sibling, node, unlock
            ("AR", 1),  // lock and read
            ("WA", 1),  // Dolphin: value, then leave the leaf
            ("WR", 1),
            ("RR", 1), // Sphinx: two bucket groups
            ("RW", 2),
            ("RA", 2),
            ("AW", 2),
            ("AA", 2), // Sphinx: pointer, then unlock
            ("ARR", 1),
            ("ARW", 2),
            ("AWA", 2), // the WRITE waits for the first atomic, the second atomic follows a WRITE
            ("AAA", 3),
            ("RWRW", 3),
            ("AWRA", 3),
        ] {
            assert_eq!(batch(kinds).round_trips(), trips, "{kinds}");
        }
    }

    proptest! {
        /// A batch without its fences: pieces, each of which is free, so that no piece can be longer.
        #[test]
        fn fences_cut_a_batch_into_free_pieces(kinds in "[RWA]{1,12}") {
            let fences: Vec<bool> = batch(&kinds).fences().collect();
            let mut piece = String::new();
            for (kind, fenced) in kinds.chars().zip(fences) {
                let free = |piece: &str| piece.is_empty() || kind == 'R' || !piece.contains(['R', 'A']);
                prop_assert_eq!(fenced, !free(&piece), "{} before {}", kinds, kind);
                if fenced {
                    piece.clear();
                }
                piece.push(kind);
            }
        }
    }
}
