//! A label: who a session says it is, for people who look at a pool (`farwood status`).
//!
//! Nothing depends on it. It is short, and what comes from outside is checked when it is decoded, so that a label can be
//! printed to a terminal as it is: printable UTF-8, at most [`Label::MAX_BYTES`] bytes.

use crate::wire::{Malformed, Wire};
use std::fmt;

/// A short, printable text. Empty by default: nobody said who he is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Label {
    /// Valid UTF-8 up to `len`, zeros behind it.
    bytes: [u8; Self::MAX_BYTES],
    len: u8,
}

impl Label {
    /// The longest label.
    pub const MAX_BYTES: usize = 64;

    /// A label of this text. What is too long is cut, what cannot be printed becomes `?`.
    pub fn new(text: &str) -> Self {
        let mut label = Self::default();
        for c in text.chars().map(|c| if is_printable(c) { c } else { '?' }) {
            let (from, to) = (usize::from(label.len), usize::from(label.len) + c.len_utf8());
            let Some(room) = label.bytes.get_mut(from..to) else { break };
            c.encode_utf8(room);
            label.len = u8::try_from(to).unwrap_or(label.len);
        }
        label
    }

    /// The label of a process of this machine: `ROLE pid PID on HOST`.
    pub fn of_process(role: &str) -> Self {
        let system = rustix::system::uname();
        let host = system.nodename().to_string_lossy();
        Self::new(&format!("{role} pid {} on {host}", std::process::id()))
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        std::str::from_utf8(&self.bytes[..usize::from(self.len)]).unwrap_or_default()
    }

    /// Whether nobody said who he is.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// Whether a character leaves a mark, and no other, on a terminal: no control characters, no line ends, nothing that turns the
/// direction of what follows or joins what stands before.
fn is_printable(c: char) -> bool {
    matches!(c, '"' | '\'' | '\\') || c.escape_debug().len() == 1
}

impl Default for Label {
    fn default() -> Self {
        Self { bytes: [0; Self::MAX_BYTES], len: 0 }
    }
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl fmt::Debug for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

impl Wire for Label {
    fn put(&self, out: &mut Vec<u8>) {
        self.len.put(out);
        out.extend_from_slice(&self.bytes[..usize::from(self.len)]);
    }

    fn take(input: &mut &[u8]) -> Result<Self, Malformed> {
        let len = u8::take(input)?;
        let (bytes, rest) = input.split_at_checked(usize::from(len)).ok_or(Malformed)?;
        let text = std::str::from_utf8(bytes).map_err(|_| Malformed)?;
        if bytes.len() > Self::MAX_BYTES || !text.chars().all(is_printable) {
            return Err(Malformed);
        }
        *input = rest;
        Ok(Self::new(text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{decode, encode};
    use proptest::prelude::*;

    #[test]
    fn what_is_long_is_cut_between_characters_and_what_cannot_be_printed_is_replaced() {
        assert_eq!(Label::new("gateway pid 7 on 'host'").as_str(), "gateway pid 7 on 'host'");
        assert_eq!(Label::new(&"x".repeat(65)).as_str(), "x".repeat(64));
        assert_eq!(Label::new(&format!("{}é!", "x".repeat(63))).as_str(), "x".repeat(63));
        assert_eq!(Label::new("a\x1b[2J\nb\u{202e}c").as_str(), "a?[2J?b?c");
        assert!(Label::new("").is_empty() && Label::default().as_str().is_empty());
    }

    #[test]
    fn a_process_says_its_number() {
        let label = Label::of_process("load");
        assert!(label.as_str().starts_with(&format!("load pid {} on ", std::process::id())), "{label}");
    }

    #[test]
    fn what_comes_from_outside_is_checked() {
        let said = |bytes: &[u8]| {
            let mut message = vec![u8::try_from(bytes.len()).expect("short")];
            message.extend_from_slice(bytes);
            decode::<Label>(&message)
        };
        assert_eq!(said("é".as_bytes()).map(|label| label.to_string()), Ok("é".to_owned()));
        for wrong in [&[0xff][..], b"a\x1bb", b"\n", "\u{202e}".as_bytes(), &[b'x'; 65]] {
            assert_eq!(said(wrong), Err(Malformed), "{wrong:?}");
        }
        assert_eq!(decode::<Label>(&[3, b'a']), Err(Malformed), "shorter than it says");
    }

    proptest! {
        #[test]
        fn labels_survive_the_wire(text in ".{0,80}") {
            let label = Label::new(&text);
            prop_assert!(label.as_str().len() <= Label::MAX_BYTES);
            prop_assert_eq!(decode::<Label>(&encode(&label)), Ok(label));
        }
    }
}
