//! What a row measures: one kind of access, as an operation of an engine would make it.
//!
//! | name | verbs | round trips | where it is used |
//! |---|---|---|---|
//! | `read`, `write` | READ n; WRITE n | 1 | nodes and leaves |
//! | `cas`, `masked-cas`, `faa` | one atomic | 1 | locks, pointers, counters |
//! | `write-write` | WRITE n, WRITE 8 | 1 | node, then unlock |
//! | `read-read` | READ n, READ 8 | 1 | two places of one server |
//! | `cas-read` | CAS, READ n | 1 | lock and read |
//! | `read-cas` | READ 8, CAS | 2 | a fence: the CAS waits for the READ |
//! | `call` | a control request, `Hello` | 1 | whatever the memory server has to do itself |
//!
//! Every slot of the working set begins with a word that stays 0, so that each CAS (0 to 0) finds what it expects and costs
//! what a successful one does; FAA counts in the word behind it; the second part of a batch has a line of its own.

use farwood_fabric::control::Request;
use farwood_fabric::verb::Verb;
use farwood_fabric::{Batch, Capabilities, Endpoint, FabricError, GlobalAddr, Op};

/// A line of the memory system, in which no two slots share.
pub(super) const LINE: u64 = 64;
const WORD: u64 = 8;

/// A kind of access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Access {
    Read,
    Write,
    Cas,
    MaskedCas,
    Faa,
    WriteWrite,
    ReadRead,
    CasRead,
    ReadCas,
    Call,
}

impl Access {
    pub(super) const ALL: [Self; 10] = [
        Self::Read,
        Self::Write,
        Self::Cas,
        Self::MaskedCas,
        Self::Faa,
        Self::WriteWrite,
        Self::ReadRead,
        Self::CasRead,
        Self::ReadCas,
        Self::Call,
    ];

    /// Its name on the command line and in JSON.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Cas => "cas",
            Self::MaskedCas => "masked-cas",
            Self::Faa => "faa",
            Self::WriteWrite => "write-write",
            Self::ReadRead => "read-read",
            Self::CasRead => "cas-read",
            Self::ReadCas => "read-cas",
            Self::Call => "call",
        }
    }

    pub(super) fn parse(name: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|access| access.name() == name).ok_or_else(|| {
            let known = Self::ALL.map(Self::name).join(", ");
            format!("--verbs: '{name}' is not one of {known}")
        })
    }

    /// The verbs, with `n` for the size.
    pub(super) fn title(self) -> &'static str {
        match self {
            Self::Read => "READ",
            Self::Write => "WRITE",
            Self::Cas => "CAS",
            Self::MaskedCas => "masked CAS",
            Self::Faa => "FAA",
            Self::WriteWrite => "WRITE, WRITE 8 B",
            Self::ReadRead => "READ, READ 8 B",
            Self::CasRead => "CAS, READ",
            Self::ReadCas => "READ 8 B, fence, CAS",
            Self::Call => "call",
        }
    }

    /// Whether it comes in sizes.
    pub(super) fn is_sized(self) -> bool {
        matches!(self, Self::Read | Self::Write | Self::WriteWrite | Self::ReadRead | Self::CasRead)
    }

    pub(super) fn is_supported(self, capabilities: &Capabilities) -> bool {
        self != Self::MaskedCas || capabilities.masked_cas
    }

    /// What the contract says it costs.
    pub(super) fn round_trips(self) -> u32 {
        if self == Self::ReadCas { 2 } else { 1 }
    }

    /// How far slots are apart, for accesses of `bytes`.
    pub(super) fn stride(self, bytes: u64) -> u64 {
        let data = bytes.next_multiple_of(LINE);
        match self {
            Self::WriteWrite | Self::ReadRead | Self::CasRead => data + LINE,
            _ => data,
        }
    }

    /// The verbs on the slot at `at`; `None` for a call, which is no verb.
    pub(super) fn batch(self, endpoint: &Endpoint, at: GlobalAddr, bytes: usize) -> Option<Batch> {
        let behind = at.add((bytes as u64).next_multiple_of(LINE));
        let mut batch = Batch::new(at.server());
        match self {
            Self::Read => batch.read(at, bytes),
            Self::Write if bytes == 8 => batch.write_word(at, 0),
            Self::Write => batch.write(at, contents(endpoint, bytes)),
            Self::Cas => batch.cas(at, 0, 0),
            Self::MaskedCas => batch.push(masked(at)),
            Self::Faa => batch.faa(at.add(WORD), 1),
            Self::WriteWrite => {
                batch.write(at, contents(endpoint, bytes));
                batch.write_word(behind, 0)
            }
            Self::ReadRead => {
                batch.read(at, bytes);
                batch.read(behind, 8)
            }
            Self::CasRead => {
                batch.cas(behind, 0, 0);
                batch.read(at, bytes)
            }
            Self::ReadCas => {
                batch.read(at, 8);
                batch.cas(at, 0, 0)
            }
            Self::Call => return None,
        };
        Some(batch)
    }

    /// Makes the access and waits for it. Returns a word made of what it brought, for the next address to depend on.
    #[inline]
    pub(super) async fn perform(self, op: &Op, at: GlobalAddr, bytes: usize) -> Result<u64, FabricError> {
        match self {
            Self::Read if bytes == 8 => op.read_word(at).await,
            Self::Read => {
                let object = op.read(at, bytes).await?;
                Ok(ends(&object))
            }
            Self::Write if bytes == 8 => op.write_word(at, 0).await.map(|()| 0),
            Self::Write => op.write(at, contents(op.endpoint(), bytes)).await.map(|()| 0),
            Self::Cas => op.cas(at, 0, 0).await,
            Self::Faa => op.faa(at.add(WORD), 1).await,
            Self::Call => op.control(at.server(), &Request::Hello {}).await.map(|_| 0),
            _ => self.perform_batch(op, at, bytes).await,
        }
    }

    async fn perform_batch(self, op: &Op, at: GlobalAddr, bytes: usize) -> Result<u64, FabricError> {
        let Some(batch) = self.batch(op.endpoint(), at, bytes) else { return Ok(0) };
        let mut completed = op.submit(batch).await?;
        Ok(match self {
            Self::MaskedCas => completed.previous(0),
            Self::ReadRead => ends(&completed.take(0)) ^ completed.take(1).word(0),
            Self::CasRead => completed.previous(0) ^ ends(&completed.take(1)),
            Self::ReadCas => completed.take(0).word(0) ^ completed.previous(1),
            _ => 0,
        })
    }
}

fn masked(addr: GlobalAddr) -> Verb {
    Verb::MaskedCas { addr, compare: 0, compare_mask: 0xffff, swap: 0, swap_mask: 0xffff }
}

/// A buffer to write from. Only its first word counts; filling the rest is the engine's work, not the transport's.
fn contents(endpoint: &Endpoint, bytes: usize) -> farwood_fabric::Buf {
    let mut buf = endpoint.buf(bytes);
    let first = bytes.min(8);
    buf[..first].fill(0);
    buf
}

/// The first and the last word of an object: whoever reads an object needs all of it.
pub(super) fn ends(object: &[u8]) -> u64 {
    let first = object.first_chunk().map_or(0, |word| u64::from_le_bytes(*word));
    first ^ object.last_chunk().map_or(0, |word| u64::from_le_bytes(*word))
}

/// Where to go next: random slots, each of which can be known only when the access before it has brought its word.
#[derive(Debug)]
pub(super) struct Walk {
    state: u64,
    slots: u64,
    /// Zero, but the compiler must not know.
    zero: u64,
}

impl Walk {
    pub(super) fn new(seed: u64, slots: u64) -> Self {
        // The multiplier spreads small seeds; a state of 0 would stay 0.
        Self { state: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1, slots, zero: std::hint::black_box(0) }
    }

    /// The same walk over another number of slots.
    pub(super) fn over(self, slots: u64) -> Self {
        Self { slots, ..self }
    }

    /// The next slot (xorshift64*), after an access that brought `seen`.
    #[inline]
    pub(super) fn next(&mut self, seen: u64) -> u64 {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        let random = self.state.wrapping_mul(0x2545_f491_4f6c_dd1d) ^ (seen & self.zero);
        // The upper half of the product is below `slots`.
        u64::try_from((u128::from(random) * u128::from(self.slots)) >> 64).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_walk_stays_inside_and_goes_everywhere() {
        let mut walk = Walk::new(0, 7);
        let mut seen = [0; 7];
        for _ in 0..700 {
            seen[usize::try_from(walk.next(u64::MAX)).unwrap()] += 1;
        }
        assert!(seen.iter().all(|visits| *visits > 50), "{seen:?}");
    }

    #[test]
    fn what_was_seen_does_not_change_where_the_walk_goes() {
        let (mut a, mut b) = (Walk::new(3, 1000), Walk::new(3, 1000));
        assert!((0..100).all(|n| a.next(n) == b.next(0)));
    }

    #[test]
    fn slots_hold_what_is_accessed() {
        for access in Access::ALL {
            for bytes in [1, 8, 64, 65, 4096] {
                let second = if access.stride(bytes) == bytes.next_multiple_of(64) { 0 } else { LINE };
                assert!(access.stride(bytes) >= bytes.next_multiple_of(LINE) + second);
                assert_eq!(access.stride(bytes) % LINE, 0);
            }
        }
    }

    #[test]
    fn names_are_read_back() {
        for access in Access::ALL {
            assert_eq!(Access::parse(access.name()), Ok(access));
        }
        assert!(Access::parse("READ").is_err());
    }
}
