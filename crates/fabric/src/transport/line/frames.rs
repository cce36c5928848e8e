//! What is said between a process and a memory server beside verbs: calls, and who serves which session.
//!
//! Frames go both ways: length u32, message (see `crate::wire`). `shm` and `tcp` say the same things here, after handshakes of
//! their own; asking for gates is for those who map the memory.

use crate::addr::{RegionId, SessionId};
use crate::call::{Call, CallId, CallOutcome, Principal, Target};
use crate::region::{Identity, Permissions};
use crate::status::ServerStatus;
use crate::wire::{Malformed, Wire, decode, wire_enum, wire_struct};

/// The longest message.
pub(crate) const MAX_FRAME_BYTES: usize = 16 << 20;

/// Where a region lies in the server's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Extent {
    /// From the front of the file.
    pub(crate) offset: u64,
    /// How many bytes to map.
    pub(crate) bytes: u64,
}

wire_struct!(Extent { offset, bytes });

/// A region and where it lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Mapped {
    pub(crate) region: RegionId,
    pub(crate) extent: Extent,
}

wire_struct!(Mapped { region, extent });

wire_enum! {
    /// What a server says.
    #[derive(Clone, PartialEq, Eq, Debug)]
    pub(crate) enum FromServer {
        /// You are a client now; the descriptor comes along.
        Welcome = 1 {
            identity: Identity,
            gates: Extent,
            regions: Vec<Mapped>,
        },
        /// You are not. The same in every version.
        Refused = 2 { why: String },
        /// A connection's gate; 0: it may call, and no more.
        Connected = 3 { request: u64, gate: u32, permissions: Permissions },
        /// There is no gate left.
        NoGate = 4 { request: u64 },
        /// Whether calls to a session come here from now on.
        Serving = 5 { request: u64, accepted: bool },
        /// A call has ended.
        Answer = 6 { to: CallId, outcome: CallOutcome },
        /// A call to a session of this process.
        Incoming = 7 { session: SessionId, term: u64, call: Call },
        /// A session has ended: it serves no calls any more.
        Ended = 8 { session: SessionId, term: u64 },
        /// How the server does.
        Status = 9 { request: u64, status: ServerStatus },
    }
}

wire_enum! {
    /// What a client says.
    #[derive(Clone, PartialEq, Eq, Debug)]
    pub(crate) enum FromClient {
        /// An endpoint wants a gate.
        Connect = 1 { request: u64, who: Principal },
        /// An endpoint is gone.
        Disconnect = 2 { gate: u32 },
        /// A call.
        Call = 3 { target: Target, call: Call },
        /// Calls to this session are to come here.
        Serve = 4 { request: u64, who: Principal },
        /// A call to a session of ours has ended.
        Reply = 5 { to: CallId, outcome: CallOutcome },
        /// How does the server do?
        Status = 6 { request: u64 },
    }
}

/// A message with its length before it.
pub(crate) fn frame(message: &impl Wire) -> Vec<u8> {
    let mut out = vec![0; 4];
    message.put(&mut out);
    let length = u32::try_from(out.len() - 4).expect("messages are far below 4 GiB");
    out[..4].copy_from_slice(&length.to_le_bytes());
    out
}

/// The frame of [`FromServer::Status`], from a status that was encoded before.
pub(crate) fn status_frame(request: u64, status: &[u8]) -> Vec<u8> {
    let mut out = vec![0; 4];
    STATUS.put(&mut out);
    request.put(&mut out);
    out.extend_from_slice(status);
    let length = u32::try_from(out.len() - 4).expect("messages are far below 4 GiB");
    out[..4].copy_from_slice(&length.to_le_bytes());
    out
}

/// The first byte of [`FromServer::Status`].
const STATUS: u8 = 9;

/// Takes the first message off the front of what has come; `None` if it has not come whole.
pub(crate) fn take_frame<T: Wire>(arrived: &mut Vec<u8>) -> Result<Option<T>, Malformed> {
    let Some(head) = arrived.first_chunk::<4>() else { return Ok(None) };
    let length = u32::from_le_bytes(*head) as usize;
    if length > MAX_FRAME_BYTES {
        return Err(Malformed);
    }
    let Some(message) = arrived.get(4..4 + length) else { return Ok(None) };
    let message = decode(message)?;
    arrived.drain(..4 + length);
    Ok(Some(message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_follow_each_other_and_lies_are_refused() {
        let (a, b) = (FromClient::Disconnect { gate: 3 }, FromServer::Refused { why: "no".into() });
        let mut arrived = frame(&a);
        arrived.extend(frame(&b));
        let last = arrived.pop().expect("not empty");
        assert_eq!(take_frame(&mut arrived), Ok(Some(a)));
        assert_eq!(take_frame::<FromServer>(&mut arrived), Ok(None));
        arrived.push(last);
        assert_eq!(take_frame(&mut arrived), Ok(Some(b)));
        assert!(arrived.is_empty());
        let mut huge = u32::MAX.to_le_bytes().to_vec();
        assert_eq!(take_frame::<FromServer>(&mut huge), Err(Malformed));
        let mut nonsense = vec![1, 0, 0, 0, 99];
        assert_eq!(take_frame::<FromServer>(&mut nonsense), Err(Malformed));
    }

    /// Frozen: other versions rely on it to say that they do not fit.
    #[test]
    fn a_refusal_never_changes() {
        let refused = FromServer::Refused { why: "no".into() };
        assert_eq!(frame(&refused), *b"\x07\0\0\0\x02\x02\0\0\0no");
    }
}
