//! The first words on a server's TCP socket. Byte by byte: `docs/wire.md`.
//!
//! ```text
//! server: greeting   magic 8, version u32, features u64
//! client: hello      magic 8, version u32, length u32, introduction (length bytes)
//! server: a frame    length u32, admission
//! ```
//!
//! Greeting, the head of a hello and `Refused` are the same in every version, so that whoever does not fit can say so.

use crate::addr::ServerId;
use crate::call::Principal;
use crate::region::{Identity, Permissions, PoolId};
use crate::transport::verbs::dock::RegionKey;
use crate::transport::verbs::queue::PortAddress;
use crate::wire::{Wire, decode, wire_enum, wire_struct};

/// The version of the protocol.
pub const VERSION: u32 = 3;
/// What can be done beyond the version's minimum, one bit each: nothing yet.
pub(crate) const FEATURES: u64 = 0;

const MAGIC: [u8; 8] = *b"FARWOOD\x02";
/// The longest introduction: a token and little else.
const MAX_INTRODUCTION_BYTES: usize = MAX_TOKEN_BYTES + 256;
const HELLO_HEAD_BYTES: usize = 8 + 4 + 4;
/// The longest token.
pub(crate) const MAX_TOKEN_BYTES: usize = 4096;
/// The longest admission: an identity, or a reason.
pub(crate) const MAX_ADMISSION_BYTES: usize = 4096;
/// The bytes of a greeting.
pub(crate) const GREETING_BYTES: usize = 8 + 4 + 8;

/// The other end is not a Farwood, or not one that we understand.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Stranger {
    NotFarwood,
    Version(u32),
}

/// How a server opens the conversation.
pub(crate) fn greeting(version: u32) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    version.put(&mut out);
    FEATURES.put(&mut out);
    out
}

/// Whether the other end is a server that we understand. Features that we do not know are not used, so they do not matter.
pub(crate) fn check_greeting(bytes: &[u8; GREETING_BYTES]) -> Result<(), Stranger> {
    introduced(bytes).map(drop)
}

/// Magic and version; what follows.
fn introduced(bytes: &[u8]) -> Result<&[u8], Stranger> {
    let mut rest = bytes.strip_prefix(&MAGIC[..]).ok_or(Stranger::NotFarwood)?;
    match u32::take(&mut rest) {
        Ok(VERSION) => Ok(rest),
        Ok(other) => Err(Stranger::Version(other)),
        Err(_) => Err(Stranger::NotFarwood),
    }
}

/// Who wants to be connected, and what for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Introduction {
    pub(crate) features: u64,
    pub(crate) token: Vec<u8>,
    pub(crate) purpose: Purpose,
}

wire_struct!(Introduction { features, token, purpose });

wire_enum! {
    /// What a connection is for.
    #[derive(Clone, PartialEq, Eq, Debug)]
    pub(crate) enum Purpose {
        /// Everything but verbs, for a whole process.
        Calls = 1 {},
        /// The verbs of one endpoint.
        Verbs = 2 {
            pool: PoolId,
            server: ServerId,
            incarnation: u32,
            view: u64,
            who: Principal,
            /// The connection that this one comes instead of, which is fenced first; 0: none.
            replaces: u64,
        },
        /// The same, by RDMA: these are the endpoint's ends of queue pairs.
        Queues = 3 {
            pool: PoolId,
            server: ServerId,
            incarnation: u32,
            view: u64,
            who: Principal,
            replaces: u64,
            port: PortAddress,
        },
    }
}

wire_enum! {
    /// How a server answers an introduction.
    #[derive(Clone, PartialEq, Eq, Debug)]
    pub(crate) enum Admission {
        /// You may call. This is who I am.
        Calls = 1 { identity: Identity, view: u64 },
        /// No. The same in every version.
        Refused = 2 { why: String },
        /// You may send verbs, so much at a time without a reply: batches, and bytes of them and of their replies together.
        Verbs = 3 { connection: u64, permissions: Permissions, batches: u32, bytes: u32 },
        /// That session is not, or no longer, admitted here.
        NotAdmitted = 4 {},
        /// There is no room for another endpoint.
        NoRoom = 5 {},
        /// I am not who you want: another server, another pool, or the memory that you knew is gone.
        OtherServer = 6 {},
        /// Your queue pairs are connected to these, through which the regions are reached at these places.
        Queues = 7 { connection: u64, permissions: Permissions, port: PortAddress, regions: Vec<RegionKey> },
    }
}

impl Introduction {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        VERSION.put(&mut out);
        crate::wire::encode(self).put(&mut out);
        out
    }

    /// An introduction and how many bytes the hello had, once it has come whole.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Option<(Self, usize)>, Stranger> {
        if bytes.len() < HELLO_HEAD_BYTES {
            let known = bytes.len().min(MAGIC.len());
            return if bytes[..known] == MAGIC[..known] { Ok(None) } else { Err(Stranger::NotFarwood) };
        }
        let mut rest = introduced(bytes)?;
        let length = u32::take(&mut rest).map_err(|_| Stranger::NotFarwood)? as usize;
        if length > MAX_INTRODUCTION_BYTES {
            return Err(Stranger::NotFarwood);
        }
        let Some(introduction) = rest.get(..length) else { return Ok(None) };
        let introduction = decode(introduction).map_err(|_| Stranger::NotFarwood)?;
        Ok(Some((introduction, HELLO_HEAD_BYTES + length)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::addr::SessionId;

    fn introduction() -> Introduction {
        let purpose = Purpose::Verbs {
            pool: PoolId(1),
            server: ServerId::new(2),
            incarnation: 3,
            view: 4,
            who: Principal { session: SessionId::new(5), term: 6, ticket: 8 },
            replaces: 7,
        };
        Introduction { features: 0, token: b"secret".to_vec(), purpose }
    }

    #[test]
    fn a_hello_is_taken_when_it_is_whole_and_not_before() {
        let mut bytes = introduction().encode();
        for cut in 0..bytes.len() {
            assert_eq!(Introduction::decode(&bytes[..cut]), Ok(None), "{cut} bytes");
        }
        let length = bytes.len();
        bytes.extend(b"next");
        assert_eq!(Introduction::decode(&bytes), Ok(Some((introduction(), length))));
    }

    #[test]
    fn strangers_and_other_versions_are_told_apart() {
        assert_eq!(Introduction::decode(b"GET / HTTP/1.1\r\n"), Err(Stranger::NotFarwood));
        assert_eq!(Introduction::decode(b"G"), Err(Stranger::NotFarwood));
        let newer: [u8; GREETING_BYTES] = greeting(VERSION + 1).try_into().expect("its length is fixed");
        assert_eq!(check_greeting(&newer), Err(Stranger::Version(VERSION + 1)));
        let mut long = introduction().encode();
        long[12..16].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(Introduction::decode(&long), Err(Stranger::NotFarwood), "4 GiB are not waited for");
    }

    /// The first words are frozen: other versions rely on them to say that they do not fit.
    #[test]
    fn the_first_words_never_change() {
        assert_eq!(greeting(9), *b"FARWOOD\x02\x09\0\0\0\0\0\0\0\0\0\0\0");
        assert_eq!(introduction().encode()[..12], *b"FARWOOD\x02\x03\0\0\0");
        let refused = crate::wire::encode(&Admission::Refused { why: "no".into() });
        assert_eq!(refused, *b"\x02\x02\0\0\0no");
    }
}
