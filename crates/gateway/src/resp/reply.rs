//! Replies, and how each version of the protocol writes them.

use crate::number;
use std::borrow::Cow;

/// The version that a client speaks.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) enum Protocol {
    /// What every client begins with.
    #[default]
    Resp2,
    /// What `HELLO 3` asks for.
    Resp3,
}

/// What a command answers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Reply {
    /// `OK`.
    Ok,
    /// A word.
    Word(&'static str),
    /// What went wrong; its first word is a code. Bytes that clients sent are in it as they were.
    Error(Cow<'static, [u8]>),
    /// A number.
    Number(i64),
    /// Nothing.
    Nil,
    /// Bytes.
    Bytes(Vec<u8>),
    /// Text for people.
    Text(String),
    /// Several.
    Array(Vec<Reply>),
    /// Names and what they stand for.
    Map(Vec<(Reply, Reply)>),
    /// Bytes in an order that does not matter.
    Set(Vec<Reply>),
    /// Arrays of bytes, written out already, from some place on: all versions write those in the same way.
    Written(Vec<u8>, usize),
}

impl Reply {
    pub(crate) fn error(text: impl Into<Cow<'static, [u8]>>) -> Self {
        Self::Error(text.into())
    }

    pub(crate) fn bytes(bytes: impl Into<Vec<u8>>) -> Self {
        Self::Bytes(bytes.into())
    }

    /// How many.
    pub(crate) fn count(count: usize) -> Self {
        Self::Number(i64::try_from(count).unwrap_or(i64::MAX))
    }

    pub(crate) fn is_error(&self) -> bool {
        matches!(self, Self::Error(_))
    }

    /// Appends the reply.
    pub(crate) fn write(&self, out: &mut Vec<u8>, protocol: Protocol) {
        let is_third = protocol == Protocol::Resp3;
        match self {
            Self::Ok => out.extend_from_slice(b"+OK\r\n"),
            Self::Word(word) => {
                out.push(b'+');
                out.extend_from_slice(word.as_bytes());
                out.extend_from_slice(b"\r\n");
            }
            Self::Error(text) => {
                out.push(b'-');
                // A line's end inside would be taken for the reply's.
                out.extend(text.iter().map(|byte| if matches!(byte, b'\r' | b'\n') { b' ' } else { *byte }));
                out.extend_from_slice(b"\r\n");
            }
            Self::Number(number) => write_head(out, b':', *number),
            Self::Nil => out.extend_from_slice(if is_third { b"_\r\n" } else { b"$-1\r\n" }),
            Self::Bytes(bytes) => write_bytes(out, bytes),
            Self::Text(text) if is_third => {
                write_length(out, b'=', text.len() + 4);
                out.extend_from_slice(b"txt:");
                out.extend_from_slice(text.as_bytes());
                out.extend_from_slice(b"\r\n");
            }
            Self::Text(text) => write_bytes(out, text.as_bytes()),
            Self::Array(replies) => {
                write_length(out, b'*', replies.len());
                for reply in replies {
                    reply.write(out, protocol);
                }
            }
            Self::Map(pairs) => {
                let (kind, length) = if is_third { (b'%', pairs.len()) } else { (b'*', 2 * pairs.len()) };
                write_length(out, kind, length);
                for (name, value) in pairs {
                    name.write(out, protocol);
                    value.write(out, protocol);
                }
            }
            Self::Set(replies) => {
                write_length(out, if is_third { b'~' } else { b'*' }, replies.len());
                for reply in replies {
                    reply.write(out, protocol);
                }
            }
            Self::Written(bytes, from) => out.extend_from_slice(&bytes[*from..]),
        }
    }
}

impl From<&str> for Reply {
    fn from(text: &str) -> Self {
        Self::bytes(text.as_bytes())
    }
}

/// In front of an array whose length is not known yet there is so much room for it.
const ROOM_BYTES: usize = 64;

/// An array of bytes that grows while its length is not known yet.
#[derive(Debug)]
pub(crate) struct Items {
    /// Room, then what is in the array.
    body: Vec<u8>,
    count: usize,
}

impl Items {
    /// An empty array, with room for about so many bytes.
    pub(crate) fn with_room(bytes: usize) -> Self {
        let mut body = Vec::with_capacity(ROOM_BYTES + bytes);
        body.resize(ROOM_BYTES, 0);
        Self { body, count: 0 }
    }

    pub(crate) fn push(&mut self, bytes: &[u8]) {
        write_bytes(&mut self.body, bytes);
        self.count += 1;
    }

    /// How large it is by now.
    pub(crate) fn bytes(&self) -> usize {
        self.body.len() - ROOM_BYTES
    }

    /// The array, with something in front if it is a part of something larger.
    pub(crate) fn finish(mut self, mut front: Vec<u8>) -> Reply {
        write_length(&mut front, b'*', self.count);
        let from = ROOM_BYTES.saturating_sub(front.len());
        self.body.splice(from..ROOM_BYTES, front);
        Reply::Written(self.body, from)
    }
}

/// A kind and a number, on a line.
pub(crate) fn write_head(out: &mut Vec<u8>, kind: u8, number: i64) {
    out.push(kind);
    number::write(out, number);
    out.extend_from_slice(b"\r\n");
}

pub(crate) fn write_length(out: &mut Vec<u8>, kind: u8, length: usize) {
    write_head(out, kind, i64::try_from(length).unwrap_or(i64::MAX));
}

/// Bytes of up to this length are short; two digits say it.
const SHORT: u8 = 57;

pub(crate) fn write_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    // Most are short, and are written by the hundred: in one piece.
    if let Ok(len @ ..=SHORT) = u8::try_from(bytes.len()) {
        let mut line = [0; 5 + SHORT as usize + 2];
        let head = if len < 10 {
            line[..4].copy_from_slice(&[b'$', b'0' + len, b'\r', b'\n']);
            4
        } else {
            line[..5].copy_from_slice(&[b'$', b'0' + len / 10, b'0' + len % 10, b'\r', b'\n']);
            5
        };
        let end = head + bytes.len();
        line[head..end].copy_from_slice(bytes);
        line[end..end + 2].copy_from_slice(b"\r\n");
        out.extend_from_slice(&line[..end + 2]);
        return;
    }
    out.reserve(bytes.len() + 24);
    write_length(out, b'$', bytes.len());
    out.extend_from_slice(bytes);
    out.extend_from_slice(b"\r\n");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(reply: &Reply, protocol: Protocol) -> String {
        let mut out = Vec::new();
        reply.write(&mut out, protocol);
        String::from_utf8(out).expect("text")
    }

    #[test]
    fn both_versions_are_written() {
        let map = Reply::Map(vec![("a".into(), Reply::Number(-1))]);
        for (reply, second, third) in [
            (Reply::Ok, "+OK\r\n", "+OK\r\n"),
            (Reply::Word("none"), "+none\r\n", "+none\r\n"),
            (Reply::error(&b"ERR a\r\nb"[..]), "-ERR a  b\r\n", "-ERR a  b\r\n"),
            (Reply::Nil, "$-1\r\n", "_\r\n"),
            (Reply::bytes(*b"abc"), "$3\r\nabc\r\n", "$3\r\nabc\r\n"),
            (Reply::Text("hi".into()), "$2\r\nhi\r\n", "=6\r\ntxt:hi\r\n"),
            (Reply::Array(vec![Reply::Nil]), "*1\r\n$-1\r\n", "*1\r\n_\r\n"),
            (map, "*2\r\n$1\r\na\r\n:-1\r\n", "%1\r\n$1\r\na\r\n:-1\r\n"),
            (Reply::Set(vec!["a".into()]), "*1\r\n$1\r\na\r\n", "~1\r\n$1\r\na\r\n"),
        ] {
            assert_eq!(text(&reply, Protocol::Resp2), second);
            assert_eq!(text(&reply, Protocol::Resp3), third);
        }
    }

    #[test]
    fn bytes_of_any_length_say_it() {
        for len in [0, 1, 9, 10, 11, 99, 100, 255, 256, 1000] {
            let written = text(&Reply::bytes(vec![b'x'; len]), Protocol::Resp2);
            assert_eq!(written, format!("${len}\r\n{}\r\n", "x".repeat(len)));
        }
    }

    #[test]
    fn a_long_front_finds_room() {
        let mut items = Items::with_room(0);
        items.push(b"a");
        let front = "x".repeat(2 * ROOM_BYTES);
        let whole = format!("{front}*1\r\n$1\r\na\r\n");
        assert_eq!(text(&items.finish(front.into_bytes()), Protocol::Resp2), whole);
    }

    #[test]
    fn items_are_an_array() {
        let mut items = Items::with_room(0);
        items.push(b"a");
        items.push(b"");
        assert_eq!((items.count, items.bytes()), (2, 13));
        assert_eq!(
            text(&items.finish(b"*2\r\n".to_vec()), Protocol::Resp2),
            "*2\r\n*2\r\n$1\r\na\r\n$0\r\n\r\n"
        );
    }
}
