//! Keys and values as they are typed and printed.

use std::fmt::Write;
use std::str::FromStr;

/// How bytes are spelled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Spelling {
    /// A number; eight bytes, the most significant first, so that numbers and bytes have one order.
    U64,
    /// Itself; where all keys have one length, shorter ones are filled up with zeros, which keeps their order.
    Text,
    /// Two digits for each byte.
    Hex,
}

impl FromStr for Spelling {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "u64" => Ok(Self::U64),
            "text" => Ok(Self::Text),
            "hex" => Ok(Self::Hex),
            _ => Err(format!("there is no spelling '{name}'; there are u64, text and hex")),
        }
    }
}

impl Spelling {
    /// The bytes of what was typed, if all have `fixed` bytes, so many.
    pub(super) fn read(self, typed: &str, fixed: Option<usize>) -> Result<Vec<u8>, String> {
        let mut bytes = match self {
            Self::U64 => {
                let number: u64 = typed.parse().map_err(|_| format!("'{typed}' is no number of 64 bits"))?;
                number.to_be_bytes().to_vec()
            }
            Self::Text => typed.as_bytes().to_vec(),
            Self::Hex => unhex(typed)
                .ok_or_else(|| format!("'{typed}' is not two hexadecimal digits for each byte"))?,
        };
        match fixed {
            Some(fixed) if self == Self::Text && bytes.len() < fixed => bytes.resize(fixed, 0),
            Some(fixed) if bytes.len() != fixed => {
                return Err(format!("'{typed}' has {} bytes, here they have {fixed}", bytes.len()));
            }
            _ => {}
        }
        Ok(bytes)
    }

    /// Bytes as text; what cannot be spelled so is spelled in hexadecimal digits behind `0x`.
    pub(super) fn write(self, bytes: &[u8]) -> String {
        let hex = || {
            bytes.iter().fold(String::new(), |mut text, byte| {
                // Writing to a string cannot fail.
                let _ = write!(text, "{byte:02x}");
                text
            })
        };
        match self {
            Self::U64 => match bytes.try_into() {
                Ok(bytes) => u64::from_be_bytes(bytes).to_string(),
                Err(_) => format!("0x{}", hex()),
            },
            Self::Text => {
                let end = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
                match std::str::from_utf8(&bytes[..end]) {
                    Ok(text) if !text.chars().any(char::is_control) => text.to_owned(),
                    _ => format!("0x{}", hex()),
                }
            }
            Self::Hex => hex(),
        }
    }
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    let digits: Option<Vec<u8>> =
        text.chars().map(|c| c.to_digit(16).and_then(|digit| u8::try_from(digit).ok())).collect();
    let digits = digits?;
    (digits.len() % 2 == 0).then(|| digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_typed_is_printed_again() {
        for (spelling, typed, fixed, bytes) in [
            (Spelling::U64, "258", Some(8), vec![0, 0, 0, 0, 0, 0, 1, 2]),
            (Spelling::Text, "abc", Some(5), b"abc\0\0".to_vec()),
            (Spelling::Text, "abc", None, b"abc".to_vec()),
            (Spelling::Hex, "00ff", Some(2), vec![0, 255]),
        ] {
            assert_eq!(spelling.read(typed, fixed), Ok(bytes.clone()));
            assert_eq!(spelling.write(&bytes), typed);
        }
        assert_eq!(Spelling::Text.write(&[0xff, 1]), "0xff01");
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        for (spelling, typed, fixed) in [
            (Spelling::U64, "x", Some(8)),
            (Spelling::U64, "1", Some(16)),
            (Spelling::Text, "too long", Some(4)),
            (Spelling::Hex, "abc", None),
            (Spelling::Hex, "xy", None),
            (Spelling::Hex, "00", Some(8)),
        ] {
            assert!(spelling.read(typed, fixed).is_err(), "{typed}");
        }
    }
}
