//! The first words on a server's Unix socket.
//!
//! ```text
//! server: greeting   magic 8, version u32, nonce u64
//! client: hello      magic 8, version u32, nonce u64 (the server's), pid u32, token length u32, token
//! server: a frame    Welcome, with the descriptor of its memory, or Refused
//! then frames both ways (see `transport::line`)
//! ```
//!
//! Greeting, hello and `Refused` are the same in every version, so that whoever does not fit can say so. The nonce
//! proves that whoever answers was alive when the server had taken hold of its process.

use crate::wire::{Malformed, Wire};

/// The version of the protocol, and of what a gate looks like.
pub const VERSION: u32 = 3;

const MAGIC: [u8; 8] = *b"FARWOOD\x01";
const GREETING_BYTES: usize = 8 + 4 + 8;
const HELLO_HEAD_BYTES: usize = 8 + 4 + 8 + 4 + 4;
/// The longest token.
pub(crate) const MAX_TOKEN_BYTES: usize = 4096;

/// The other end is not a Farwood, or not one that we understand.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Stranger {
    NotFarwood,
    Version(u32),
}

/// How a server opens the conversation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Greeting {
    pub(crate) nonce: u64,
}

impl Greeting {
    pub(crate) const BYTES: usize = GREETING_BYTES;

    pub(crate) fn encode(self, version: u32) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        version.put(&mut out);
        self.nonce.put(&mut out);
        out
    }

    pub(crate) fn decode(bytes: &[u8; GREETING_BYTES]) -> Result<Self, Stranger> {
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
pub(crate) struct Hello {
    pub(crate) nonce: u64,
    pub(crate) pid: u32,
    pub(crate) token: Vec<u8>,
}

impl Hello {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        VERSION.put(&mut out);
        self.nonce.put(&mut out);
        self.pid.put(&mut out);
        self.token.put(&mut out);
        out
    }

    /// A hello and its length, once it has come whole.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Option<(Self, usize)>, Stranger> {
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

    /// The first words are frozen: other versions rely on them to say that they do not fit.
    #[test]
    fn the_first_words_never_change() {
        assert_eq!(Greeting { nonce: 2 }.encode(9), *b"FARWOOD\x01\x09\0\0\0\x02\0\0\0\0\0\0\0");
    }
}
