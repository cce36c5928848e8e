//! Verbs on the wire: a batch, and its reply. Byte by byte: `docs/wire.md`.
//!
//! A frame never asks for more than [`MAX_PAYLOAD_BYTES`] in either direction; larger batches travel as several frames, which
//! the server carries out one after the other (`pieces`). Decoding bytes from outside never panics and allocates nothing.

use crate::addr::{GlobalAddr, RegionId, ServerId};
use crate::error::FabricError;
use crate::region::{Permissions, RegionTable};
use crate::wire::{Malformed, Wire};
use std::fmt;

/// The most verbs in one frame, and in one batch.
pub(crate) const MAX_VERBS: usize = 128;
/// The most bytes that the WRITEs of one frame bring, and the most that its READs ask for.
pub(crate) const MAX_PAYLOAD_BYTES: usize = 256 << 10;
/// Kind, verbs, nothing, sequence.
pub(crate) const HEAD_BYTES: usize = 1 + 1 + 2 + 4;
/// Kind, region, nothing, length, offset.
pub(crate) const VERB_BYTES: usize = 1 + 1 + 2 + 4 + 8;
const MAX_OPERAND_BYTES: usize = 32;
/// The longest request and the longest reply, without their length.
pub(crate) const MAX_REQUEST_BYTES: usize =
    HEAD_BYTES + MAX_VERBS * (VERB_BYTES + MAX_OPERAND_BYTES) + MAX_PAYLOAD_BYTES;
pub(crate) const MAX_REPLY_BYTES: usize = HEAD_BYTES + MAX_VERBS * 8 + MAX_PAYLOAD_BYTES;

/// Kinds of frames. Requests are batches; 2 is `Refused`, in every version.
pub(crate) const BATCH: u8 = 1;
pub(crate) const REFUSED: u8 = 2;
pub(crate) const FENCED: u8 = 3;

/// Kinds of verbs.
pub(crate) const READ: u8 = 1;
pub(crate) const WRITE: u8 = 2;
pub(crate) const CAS: u8 = 3;
pub(crate) const MASKED_CAS: u8 = 4;
pub(crate) const FAA: u8 = 5;

/// The head of a request or a reply.
pub(crate) fn head(kind: u8, verbs: u8, sequence: u32) -> [u8; HEAD_BYTES] {
    let [a, b, c, d] = sequence.to_le_bytes();
    [kind, verbs, 0, 0, a, b, c, d]
}

/// Kind, verbs and sequence.
pub(crate) fn take_head(input: &mut &[u8]) -> Result<(u8, u8, u32), Malformed> {
    let (kind, verbs, zero) = (u8::take(input)?, u8::take(input)?, u16::take(input)?);
    let sequence = u32::take(input)?;
    if zero == 0 { Ok((kind, verbs, sequence)) } else { Err(Malformed) }
}

/// How a verb begins.
pub(crate) fn verb_head(kind: u8, addr: GlobalAddr, length: u32) -> [u8; VERB_BYTES] {
    let mut out = [0; VERB_BYTES];
    (out[0], out[1]) = (kind, addr.region().get());
    out[4..8].copy_from_slice(&length.to_le_bytes());
    out[8..].copy_from_slice(&addr.offset().to_le_bytes());
    out
}

/// A verb as it came.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct WireVerb<'a> {
    pub(crate) addr: GlobalAddr,
    pub(crate) what: What<'a>,
}

/// What a verb does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum What<'a> {
    Read { len: usize },
    Write { bytes: &'a [u8] },
    Cas { expected: u64, desired: u64 },
    MaskedCas { compare: u64, compare_mask: u64, swap: u64, swap_mask: u64 },
    Faa { add: u64 },
}

/// Takes a verb for server `server` off the front.
pub(crate) fn take_verb<'a>(input: &mut &'a [u8], server: ServerId) -> Result<WireVerb<'a>, Malformed> {
    let (kind, region, zero) = (u8::take(input)?, RegionId::take(input)?, u16::take(input)?);
    let (length, offset) = (u32::take(input)?, u64::take(input)?);
    if zero != 0 || offset > GlobalAddr::MAX_OFFSET {
        return Err(Malformed);
    }
    let addr = GlobalAddr::new(server, region, offset);
    let what = match (kind, length) {
        (READ, _) => What::Read { len: length as usize },
        (WRITE, _) => {
            let (bytes, rest) = input.split_at_checked(length as usize).ok_or(Malformed)?;
            *input = rest;
            What::Write { bytes }
        }
        (CAS, 8) => What::Cas { expected: u64::take(input)?, desired: u64::take(input)? },
        (MASKED_CAS, 8) => What::MaskedCas {
            compare: u64::take(input)?,
            compare_mask: u64::take(input)?,
            swap: u64::take(input)?,
            swap_mask: u64::take(input)?,
        },
        (FAA, 8) => What::Faa { add: u64::take(input)? },
        _ => return Err(Malformed),
    };
    Ok(WireVerb { addr, what })
}

/// A batch that must not be carried out.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// It makes no sense.
    Malformed,
    /// It asks for more than one frame may.
    TooMuch,
    /// A verb is not allowed.
    Verb(usize, FabricError),
}

impl From<Malformed> for Refusal {
    fn from(_: Malformed) -> Self {
        Self::Malformed
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Malformed => {
                f.write_str("the requests of this client make no sense to the server; use the same farwood")
            }
            Self::TooMuch => write!(f, "a request asks for more than {MAX_PAYLOAD_BYTES} bytes at once"),
            Self::Verb(at, error) => write!(f, "verb {at} of a request must not be carried out: {error}"),
        }
    }
}

/// A batch of which every verb has been checked against the session's regions.
#[derive(Debug)]
pub(crate) struct Request<'a> {
    pub(crate) sequence: u32,
    pub(crate) verbs: u8,
    /// How many bytes its reply has behind the head.
    pub(crate) reply_bytes: usize,
    server: ServerId,
    body: &'a [u8],
}

impl<'a> Request<'a> {
    /// Reads a frame (without its length), and checks every verb of it before any is carried out.
    pub(crate) fn check(mut frame: &'a [u8], server: ServerId, table: &RegionTable) -> Result<Self, Refusal> {
        let (kind, verbs, sequence) = take_head(&mut frame)?;
        if kind != BATCH || verbs == 0 || usize::from(verbs) > MAX_VERBS {
            return Err(Refusal::Malformed);
        }
        let (body, mut reply_bytes, mut read_bytes) = (frame, 0, 0usize);
        for n in 0..usize::from(verbs) {
            let WireVerb { addr, what } = take_verb(&mut frame, server)?;
            let allowed = match what {
                What::Read { len } => {
                    read_bytes = read_bytes.saturating_add(len);
                    table.check(addr, len as u64, Permissions::READ)
                }
                What::Write { bytes } => table.check(addr, bytes.len() as u64, Permissions::WRITE),
                What::Cas { .. } | What::MaskedCas { .. } | What::Faa { .. } => {
                    reply_bytes += 8;
                    table.check_atomic(addr)
                }
            };
            allowed.map_err(|error| Refusal::Verb(n, error))?;
        }
        if !frame.is_empty() {
            return Err(Refusal::Malformed);
        }
        if read_bytes > MAX_PAYLOAD_BYTES {
            return Err(Refusal::TooMuch);
        }
        Ok(Self { sequence, verbs, reply_bytes: reply_bytes + read_bytes, server, body })
    }

    /// Its verbs, in order.
    pub(crate) fn verbs(&self) -> impl Iterator<Item = WireVerb<'a>> + use<'a> {
        let (mut body, server) = (self.body, self.server);
        (0..self.verbs).map_while(move |_| take_verb(&mut body, server).ok())
    }
}
