//! What is said on a server's socket.
//!
//! ```text
//! server: greeting   magic 8, version u32, nonce u64
//! client: hello      magic 8, version u32, nonce u64 (the server's), pid u32, token length u32, token
//! server: a frame    Welcome, with the descriptor of its memory, or Refused
//! then frames both ways: length u32, message (see `crate::wire`)
//! ```
//!
//! Greeting, hello and `Refused` are the same in every version, so that whoever does not fit can say so. The nonce
//! proves that whoever answers was alive when the server had taken hold of its process.

use crate::addr::{RegionId, SessionId};
use crate::call::{Call, CallId, CallOutcome, Target};
use crate::region::{Identity, Permissions};
use crate::wire::{Malformed, Wire, decode, wire_enum, wire_struct};

/// The version of the protocol, and of what a gate looks like.
pub const VERSION: u32 = 1;

const MAGIC: [u8; 8] = *b"FARWOOD\x01";
const GREETING_BYTES: usize = 8 + 4 + 8;
const HELLO_HEAD_BYTES: usize = 8 + 4 + 8 + 4 + 4;
/// The longest token.
pub(super) const MAX_TOKEN_BYTES: usize = 4096;
/// The longest message.
pub(super) const MAX_FRAME_BYTES: usize = 16 << 20;

/// The other end is not a Farwood, or not one that we understand.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stranger {
    NotFarwood,
    Version(u32),
}

/// How a server opens the conversation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Greeting {
    pub(super) nonce: u64,
}

impl Greeting {
    pub(super) const BYTES: usize = GREETING_BYTES;

    pub(super) fn encode(self, version: u32) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        version.put(&mut out);
        self.nonce.put(&mut out);
        out
    }

    pub(super) fn decode(bytes: &[u8; GREETING_BYTES]) -> Result<Self, Stranger> {
        let (nonce, _) = introduction(bytes)?;
        Ok(Self { nonce })
    }
}

/// Magic and version, the same at the beginning of both sides' first words; then the nonce.
fn introduction(bytes: &[u8]) -> Result<(u64, &[u8]), Stranger> {
    let mut rest = bytes.strip_prefix(&MAGIC[..]).ok_or(Stranger::NotFarwood)?;
    let version = u32::take(&mut rest).map_err(|_| Stranger::NotFarwood)?;
    if version != VERSION {
        return Err(Stranger::Version(version));
    }
    let nonce = u64::take(&mut rest).map_err(|_| Stranger::NotFarwood)?;
    Ok((nonce, rest))
}

/// How a client answers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Hello {
    pub(super) nonce: u64,
    pub(super) pid: u32,
    pub(super) token: Vec<u8>,
}

impl Hello {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        VERSION.put(&mut out);
        self.nonce.put(&mut out);
        self.pid.put(&mut out);
        self.token.put(&mut out);
        out
    }

    /// A hello and its length, once it has come whole.
    pub(super) fn decode(bytes: &[u8]) -> Result<Option<(Self, usize)>, Stranger> {
        if bytes.len() < HELLO_HEAD_BYTES {
            let known = bytes.len().min(MAGIC.len());
            return if bytes[..known] == MAGIC[..known] { Ok(None) } else { Err(Stranger::NotFarwood) };
        }
        let (nonce, mut rest) = introduction(bytes)?;
        let malformed = |_: Malformed| Stranger::NotFarwood;
        let pid = u32::take(&mut rest).map_err(malformed)?;
        let token_bytes = u32::take(&mut rest).map_err(malformed)? as usize;
        if token_bytes > MAX_TOKEN_BYTES {
            return Err(Stranger::NotFarwood);
        }
        let Some(token) = rest.get(..token_bytes) else { return Ok(None) };
        Ok(Some((Self { nonce, pid, token: token.to_vec() }, HELLO_HEAD_BYTES + token_bytes)))
    }
}

/// Where a region lies in the server's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Extent {
    /// From the front of the file.
    pub(super) offset: u64,
    /// How many bytes to map.
    pub(super) bytes: u64,
}

wire_struct!(Extent { offset, bytes });

/// A region and where it lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Mapped {
    pub(super) region: RegionId,
    pub(super) extent: Extent,
}

wire_struct!(Mapped { region, extent });

wire_enum! {
    /// What a server says.
    #[derive(Clone, PartialEq, Eq, Debug)]
    pub(super) enum FromServer {
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
    }
}

wire_enum! {
    /// What a client says.
    #[derive(Clone, PartialEq, Eq, Debug)]
    pub(super) enum FromClient {
        /// An endpoint wants a gate.
        Connect = 1 { request: u64, session: SessionId, term: u64 },
        /// An endpoint is gone.
        Disconnect = 2 { gate: u32 },
        /// A call.
        Call = 3 { target: Target, call: Call },
        /// Calls to this session are to come here.
        Serve = 4 { request: u64, session: SessionId, term: u64 },
        /// A call to a session of ours has ended.
        Reply = 5 { to: CallId, outcome: CallOutcome },
    }
}

/// A message with its length before it.
pub(super) fn frame(message: &impl Wire) -> Vec<u8> {
    let mut out = vec![0; 4];
    message.put(&mut out);
    let length = u32::try_from(out.len() - 4).expect("messages are far below 4 GiB");
    out[..4].copy_from_slice(&length.to_le_bytes());
    out
}

/// Takes the first message off the front of what has come; `None` if it has not come whole.
pub(super) fn take_frame<T: Wire>(arrived: &mut Vec<u8>) -> Result<Option<T>, Malformed> {
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
    fn a_hello_is_taken_when_it_is_whole_and_not_before() {
        let hello = Hello { nonce: 7, pid: 42, token: b"secret".to_vec() };
        let mut bytes = hello.encode();
        for cut in 0..bytes.len() {
            assert_eq!(Hello::decode(&bytes[..cut]), Ok(None), "{cut} bytes");
        }
        let length = bytes.len();
        bytes.extend(b"next");
        assert_eq!(Hello::decode(&bytes), Ok(Some((hello, length))));
    }

    #[test]
    fn strangers_and_other_versions_are_told_apart() {
        assert_eq!(Hello::decode(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"), Err(Stranger::NotFarwood));
        assert_eq!(Hello::decode(b"G"), Err(Stranger::NotFarwood));
        let newer: [u8; Greeting::BYTES] =
            Greeting { nonce: 1 }.encode(VERSION + 1).try_into().expect("its length is fixed");
        assert_eq!(Greeting::decode(&newer), Err(Stranger::Version(VERSION + 1)));
        let mut long = Hello { nonce: 0, pid: 0, token: vec![] }.encode();
        long[HELLO_HEAD_BYTES - 4..].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(Hello::decode(&long), Err(Stranger::NotFarwood), "a token of 4 GiB is not waited for");
    }

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

    /// The first words are frozen: other versions rely on them to say that they do not fit.
    #[test]
    fn the_first_words_never_change() {
        assert_eq!(Greeting { nonce: 2 }.encode(9), *b"FARWOOD\x01\x09\0\0\0\x02\0\0\0\0\0\0\0");
        let refused = FromServer::Refused { why: "no".into() };
        assert_eq!(frame(&refused), *b"\x07\0\0\0\x02\x02\0\0\0no");
    }
}
