//! Requests, as they come in pieces: the parser remembers how far it came, so that a request of a million arguments that comes
//! in a thousand pieces is looked at once.
//!
//! Lengths are checked before anything waits for so many bytes, against limits that are tighter for clients that have not said
//! the password. What breaks the protocol ends the connection, with the texts that Redis has for it.

use super::{Request, Span, Spans};
use crate::number;
use std::rc::Rc;

/// Longer than this no line is: a length, or a whole command typed by hand.
const MAX_LINE_BYTES: usize = 64 << 10;
/// More arguments no request has.
const MAX_ARGUMENTS: i64 = 1 << 20;
/// What a client may send that has not said the password.
const MAX_STRANGER_ARGUMENTS: i64 = 10;
const MAX_STRANGER_BULK_BYTES: i64 = 16 << 10;

/// How large requests may be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Of one request, all in all.
    pub(crate) request_bytes: usize,
    /// The client still has to say the password.
    pub(crate) is_stranger: bool,
}

/// What no request is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum ProtocolError {
    TooBigInline,
    TooBigCount,
    InvalidCount,
    StrangerCount,
    ExpectedBulk(u8),
    TooBigBulkLength,
    InvalidBulkLength,
    StrangerBulk,
    UnbalancedQuotes,
    TooBigRequest(usize),
}

impl ProtocolError {
    /// What the client is told.
    pub(crate) fn text(&self) -> Vec<u8> {
        let what = match self {
            Self::TooBigInline => "too big inline request",
            Self::TooBigCount => "too big mbulk count string",
            Self::InvalidCount => "invalid multibulk length",
            Self::StrangerCount => "unauthenticated multibulk length",
            // The byte as it came, as Redis does it.
            Self::ExpectedBulk(got) => {
                return [&b"ERR Protocol error: expected '$', got '"[..], &[*got], b"'"].concat();
            }
            Self::TooBigBulkLength => "too big bulk count string",
            Self::InvalidBulkLength => "invalid bulk length",
            Self::StrangerBulk => "unauthenticated bulk length",
            Self::UnbalancedQuotes => "unbalanced quotes in request",
            Self::TooBigRequest(limit) => {
                let why = format!("the request is larger than the {limit} bytes of --max-request");
                return format!("ERR Protocol error: {why}").into_bytes();
            }
        };
        format!("ERR Protocol error: {what}").into_bytes()
    }
}

/// What has been read of a request that is not whole yet. Places count from the request's first byte, so that the input may be
/// moved while the rest of it is awaited.
#[derive(Default, Debug)]
pub(crate) struct Parser {
    spans: Spans,
    /// Arguments that are still to come; 0: the request has not begun.
    left: i64,
    /// The length of the argument whose bytes are awaited.
    bulk: Option<u32>,
    /// What has been understood.
    at: usize,
    /// What has been searched for the end of a line, behind `at`.
    searched: usize,
}

/// What became of the next request.
#[derive(Debug)]
pub(crate) enum Parsed {
    /// A request; so many bytes of the input belong to it.
    Whole(Request, usize),
    /// An empty line or an empty array; so many bytes.
    Nothing(usize),
    /// More has to come.
    Partial,
}

impl Parser {
    /// The next request in `chunk`, which begins at `from`.
    pub(crate) fn next(
        &mut self,
        chunk: &Rc<Vec<u8>>,
        from: usize,
        limits: Limits,
    ) -> Result<Parsed, ProtocolError> {
        let input = &chunk[from..];
        if self.left == 0 {
            match input.first() {
                None => return Ok(Parsed::Partial),
                Some(b'*') => match self.begin(input, limits)? {
                    Some(true) => {}
                    Some(false) => return Ok(self.finish_empty()),
                    None => return Ok(Parsed::Partial),
                },
                Some(_) => return self.inline(input),
            }
        }
        while self.left > 0 {
            if !self.argument(input, limits)? {
                return Ok(Parsed::Partial);
            }
        }
        let taken = self.at;
        let mut spans = std::mem::take(&mut self.spans);
        *self = Self::default();
        if from > 0 {
            let shift = u32::try_from(from).unwrap_or(u32::MAX);
            for span in &mut spans {
                span.start += shift;
                span.end += shift;
            }
        }
        Ok(Parsed::Whole(Request::new(Rc::clone(chunk), spans), taken))
    }

    fn finish_empty(&mut self) -> Parsed {
        let taken = self.at;
        *self = Self::default();
        Parsed::Nothing(taken)
    }

    /// The line that starts at `self.at`, without its end, if it is all there.
    fn line<'a>(
        &mut self,
        input: &'a [u8],
        too_long: ProtocolError,
    ) -> Result<Option<&'a [u8]>, ProtocolError> {
        let rest = &input[self.at..];
        let found = rest[self.searched..].iter().position(|byte| *byte == b'\n');
        match found.map(|n| n + self.searched) {
            Some(end) if end <= MAX_LINE_BYTES => {
                self.at += end + 1;
                self.searched = 0;
                Ok(Some(rest[..end].strip_suffix(b"\r").unwrap_or(&rest[..end])))
            }
            None if rest.len() <= MAX_LINE_BYTES => {
                self.searched = rest.len();
                Ok(None)
            }
            _ => Err(too_long),
        }
    }

    /// The line that starts at `self.at`, if it is a sign and a number of one or two digits, as most are: without a search for its end.
    #[inline]
    fn short_count(&mut self, input: &[u8], sign: u8) -> Option<i64> {
        let (tens, ones, bytes) = match input.get(self.at..)? {
            [first, ones @ b'0'..=b'9', b'\r', b'\n', ..] if *first == sign => (b'0', *ones, 4),
            [first, tens @ b'1'..=b'9', ones @ b'0'..=b'9', b'\r', b'\n', ..] if *first == sign => {
                (*tens, *ones, 5)
            }
            _ => return None,
        };
        self.at += bytes;
        self.searched = 0;
        Some(10 * i64::from(tens - b'0') + i64::from(ones - b'0'))
    }

    /// Reads how many arguments follow; whether any do.
    fn begin(&mut self, input: &[u8], limits: Limits) -> Result<Option<bool>, ProtocolError> {
        let count = if let Some(count) = self.short_count(input, b'*') {
            count
        } else {
            let Some(line) = self.line(input, ProtocolError::TooBigCount)? else { return Ok(None) };
            number::parse(&line[1..]).ok_or(ProtocolError::InvalidCount)?
        };
        if count > MAX_ARGUMENTS {
            return Err(ProtocolError::InvalidCount);
        }
        if limits.is_stranger && count > MAX_STRANGER_ARGUMENTS {
            return Err(ProtocolError::StrangerCount);
        }
        self.left = count.max(0);
        Ok(Some(count > 0))
    }

    /// Reads one argument; whether it was all there.
    fn argument(&mut self, input: &[u8], limits: Limits) -> Result<bool, ProtocolError> {
        let length = if let Some(length) = self.bulk {
            length
        } else {
            let length = if let Some(length) = self.short_count(input, b'$') {
                length
            } else {
                let Some(line) = self.line(input, ProtocolError::TooBigBulkLength)? else { return Ok(false) };
                let digits = match line {
                    [b'$', digits @ ..] => digits,
                    line => return Err(ProtocolError::ExpectedBulk(line.first().copied().unwrap_or(b'\r'))),
                };
                number::parse(digits).unwrap_or(-1)
            };
            if limits.is_stranger && length > MAX_STRANGER_BULK_BYTES {
                return Err(ProtocolError::StrangerBulk);
            }
            let length = u32::try_from(length).map_err(|_| ProtocolError::InvalidBulkLength)?;
            if self.at + length as usize > limits.request_bytes {
                return Err(ProtocolError::TooBigRequest(limits.request_bytes));
            }
            *self.bulk.insert(length)
        };
        let end = self.at + length as usize;
        if input.len() < end + 2 {
            return Ok(false);
        }
        // As Redis does, the two bytes behind an argument are skipped, whatever they are.
        let place = |at: usize| u32::try_from(at).unwrap_or(u32::MAX);
        self.spans.push(Span { start: place(self.at), end: place(end) });
        self.at = end + 2;
        self.bulk = None;
        self.left -= 1;
        Ok(true)
    }

    /// How many bytes the request that has begun will have at least, as far as that is known.
    pub(crate) fn awaits(&self) -> usize {
        self.bulk.map_or(0, |length| self.at + length as usize + 2)
    }

    /// What it costs to remember how far it came.
    #[inline]
    pub(crate) fn memory(&self) -> usize {
        if self.spans.spilled() { self.spans.capacity() * size_of::<Span>() } else { 0 }
    }

    /// A command typed by hand: words, with quotes where wanted.
    fn inline(&mut self, input: &[u8]) -> Result<Parsed, ProtocolError> {
        let Some(line) = self.line(input, ProtocolError::TooBigInline)? else { return Ok(Parsed::Partial) };
        let taken = self.at;
        *self = Self::default();
        let mut text = Vec::with_capacity(line.len());
        let spans = split_words(line, &mut text).ok_or(ProtocolError::UnbalancedQuotes)?;
        if spans.is_empty() {
            return Ok(Parsed::Nothing(taken));
        }
        Ok(Parsed::Whole(Request::new(Rc::new(text), spans), taken))
    }
}

/// Splits a line into words, without their quotes and with what is escaped in double quotes put in; `None` if a quote does not end,
/// or does not end a word.
fn split_words(line: &[u8], text: &mut Vec<u8>) -> Option<Spans> {
    let mut spans = Spans::new();
    let mut rest = line;
    loop {
        rest = rest.trim_ascii_start();
        if rest.is_empty() {
            return Some(spans);
        }
        let start = text.len();
        rest = take_word(rest, text)?;
        let place = |at: usize| u32::try_from(at).unwrap_or(u32::MAX);
        spans.push(Span { start: place(start), end: place(text.len()) });
    }
}

/// Takes one word from the front; what is behind it.
fn take_word<'a>(mut rest: &'a [u8], text: &mut Vec<u8>) -> Option<&'a [u8]> {
    loop {
        match rest {
            [] => return Some(rest),
            [byte, ..] if byte.is_ascii_whitespace() || *byte == 0 => return Some(&rest[1..]),
            [quote @ (b'"' | b'\''), ..] => {
                rest = take_quoted(&rest[1..], *quote, text)?;
                // Only a space, or nothing, may follow.
                return match rest.first() {
                    None => Some(rest),
                    Some(byte) if byte.is_ascii_whitespace() => Some(&rest[1..]),
                    Some(_) => None,
                };
            }
            [byte, ..] => {
                text.push(*byte);
                rest = &rest[1..];
            }
        }
    }
}

/// Takes what is inside quotes; what is behind the closing one.
fn take_quoted<'a>(mut rest: &'a [u8], quote: u8, text: &mut Vec<u8>) -> Option<&'a [u8]> {
    let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    loop {
        match rest {
            [] => return None,
            [b'\\', b'x', high, low, ..]
                if quote == b'"' && digit(*high).is_some() && digit(*low).is_some() =>
            {
                text.push(digit(*high)? << 4 | digit(*low)?);
                rest = &rest[4..];
            }
            [b'\\', escaped, ..] if quote == b'"' => {
                text.push(match escaped {
                    b'n' => b'\n',
                    b'r' => b'\r',
                    b't' => b'\t',
                    b'b' => 8,
                    b'a' => 7,
                    other => *other,
                });
                rest = &rest[2..];
            }
            [b'\\', b'\'', ..] if quote == b'\'' => {
                text.push(b'\'');
                rest = &rest[2..];
            }
            [byte, ..] if *byte == quote => return Some(&rest[1..]),
            [byte, ..] => {
                text.push(*byte);
                rest = &rest[1..];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const FREE: Limits = Limits { request_bytes: 1 << 20, is_stranger: false };

    /// Feeds input in pieces, as a connection does; the requests, and what went wrong.
    fn feed(pieces: &[&[u8]], limits: Limits) -> (Vec<Vec<Vec<u8>>>, Option<ProtocolError>) {
        let (mut parser, mut held, mut found) = (Parser::default(), Vec::new(), Vec::new());
        for piece in pieces {
            held.extend_from_slice(piece);
            let chunk = Rc::new(std::mem::take(&mut held));
            let mut from = 0;
            loop {
                match parser.next(&chunk, from, limits) {
                    Ok(Parsed::Whole(request, taken)) => {
                        found.push(request.from(0).map(<[u8]>::to_vec).collect());
                        from += taken;
                    }
                    Ok(Parsed::Nothing(taken)) => from += taken,
                    Ok(Parsed::Partial) => break,
                    Err(error) => return (found, Some(error)),
                }
            }
            held = chunk[from..].to_vec();
        }
        (found, None)
    }

    fn encode(request: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = format!("*{}\r\n", request.len()).into_bytes();
        for argument in request {
            bytes.extend(format!("${}\r\n", argument.len()).into_bytes());
            bytes.extend(argument);
            bytes.extend(b"\r\n");
        }
        bytes
    }

    fn cut(bytes: &[u8], cuts: &[usize]) -> Vec<Vec<u8>> {
        let mut places: Vec<usize> = cuts.iter().map(|cut| cut % (bytes.len() + 1)).collect();
        places.extend([0, bytes.len()]);
        places.sort_unstable();
        places.windows(2).map(|pair| bytes[pair[0]..pair[1]].to_vec()).collect()
    }

    proptest! {
        #[test]
        fn requests_survive_any_cuts(
            requests in prop::collection::vec(
                prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 1..12), 0..6),
            cuts in prop::collection::vec(any::<usize>(), 0..20),
        ) {
            let bytes: Vec<u8> = requests.iter().flat_map(|request| encode(request)).collect();
            let pieces = cut(&bytes, &cuts);
            let pieces: Vec<&[u8]> = pieces.iter().map(Vec::as_slice).collect();
            let (found, error) = feed(&pieces, FREE);
            prop_assert_eq!(error, None);
            prop_assert_eq!(found, requests);
        }

        /// Whatever comes, in whatever pieces, is understood in the same way, and nothing panics.
        #[test]
        fn garbage_means_the_same_in_any_pieces(
            bytes in prop::collection::vec(prop_oneof![
                Just(b'*'), Just(b'$'), Just(b'\r'), Just(b'\n'), Just(b'1'), Just(b'3'), Just(b'-'),
                Just(b'"'), Just(b'\\'), Just(b'x'), Just(b' '), any::<u8>()], 0..200),
            cuts in prop::collection::vec(any::<usize>(), 0..10),
        ) {
            let pieces = cut(&bytes, &cuts);
            let pieces: Vec<&[u8]> = pieces.iter().map(Vec::as_slice).collect();
            prop_assert_eq!(feed(&pieces, FREE), feed(&[&bytes], FREE));
        }
    }

    #[test]
    fn commands_typed_by_hand_are_split_as_redis_does() {
        let words = |line: &str| feed(&[line.as_bytes()], FREE).0.concat();
        assert_eq!(words("PING\r\n"), [b"PING"]);
        assert_eq!(words("  set  a 'b c'\n"), [&b"set"[..], b"a", b"b c"]);
        assert_eq!(words("set \"\\x00\\n\\\"\" 'it\\'s'\n"), [&b"set"[..], b"\0\n\"", b"it's"]);
        assert_eq!(words("get \"\"\n"), [&b"get"[..], b""]);
        assert_eq!(words("\r\n\r\n"), Vec::<Vec<u8>>::new());
        for unbalanced in ["get \"a\n", "get 'a\n", "get \"a\"b\n"] {
            let (found, error) = feed(&[unbalanced.as_bytes()], FREE);
            assert_eq!((found, error), (vec![], Some(ProtocolError::UnbalancedQuotes)), "{unbalanced}");
        }
    }

    #[test]
    fn what_is_no_request_is_named_as_redis_names_it() {
        let text = |bytes: &[u8], limits| {
            feed(&[bytes], limits).1.map(|error| String::from_utf8(error.text()).expect("text"))
        };
        let long = |first: u8| [vec![first], vec![b'1'; MAX_LINE_BYTES + 1]].concat();
        for (bytes, expected) in [
            (b"*x\r\n".to_vec(), "ERR Protocol error: invalid multibulk length"),
            (b"*1048577\r\n".to_vec(), "ERR Protocol error: invalid multibulk length"),
            (b"*1\r\n:1\r\n".to_vec(), "ERR Protocol error: expected '$', got ':'"),
            (b"*1\r\n$-1\r\n".to_vec(), "ERR Protocol error: invalid bulk length"),
            (b"*1\r\n$4294967296\r\n".to_vec(), "ERR Protocol error: invalid bulk length"),
            (b"*1\r\n$x\r\n".to_vec(), "ERR Protocol error: invalid bulk length"),
            (long(b'*'), "ERR Protocol error: too big mbulk count string"),
            (long(b'x'), "ERR Protocol error: too big inline request"),
            ([b"*1\r\n".to_vec(), long(b'$')].concat(), "ERR Protocol error: too big bulk count string"),
            (
                b"*1\r\n$1048576\r\n".to_vec(),
                "ERR Protocol error: the request is larger than the 1048576 bytes of --max-request",
            ),
        ] {
            assert_eq!(text(&bytes, FREE).as_deref(), Some(expected));
        }
        let stranger = Limits { is_stranger: true, ..FREE };
        assert_eq!(
            text(b"*11\r\n", stranger),
            Some("ERR Protocol error: unauthenticated multibulk length".into())
        );
        assert_eq!(
            text(b"*1\r\n$16385\r\n", stranger),
            Some("ERR Protocol error: unauthenticated bulk length".into())
        );
        assert_eq!(text(b"*0\r\n*-1\r\n", FREE), None);
    }

    #[test]
    fn a_request_in_many_pieces_is_looked_at_once() {
        let request: Vec<Vec<u8>> = (0..50_000).map(|n| format!("{n}").into_bytes()).collect();
        let bytes = encode(&request);
        let limits = Limits { request_bytes: 16 << 20, is_stranger: false };
        let mut parser = Parser::default();
        let chunk = Rc::new(bytes[..bytes.len() - 1].to_vec());
        assert!(matches!(parser.next(&chunk, 0, limits), Ok(Parsed::Partial)));
        assert_eq!(parser.left, 1, "all but the last argument were taken the first time");
        assert_eq!(parser.awaits(), bytes.len());
        let chunk = Rc::new(bytes);
        assert!(
            matches!(parser.next(&chunk, 0, limits), Ok(Parsed::Whole(whole, _)) if whole.len() == 50_000)
        );
    }
}
