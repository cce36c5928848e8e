//! Texts that people write on a command line: the one error for all of them, and what several of them share.

use crate::catalog;
use crate::mix::OperationKind;
use crate::zipf::{MAX_COUNT, MAX_THETA};
use std::fmt;
use std::ops::RangeInclusive;

/// A text that does not say what it should. The message says what to write instead.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum BadText {
    /// Not the name of a workload.
    Workload(String),
    /// A scan length for a workload that does not scan.
    NoScan(String),
    /// Not an operation with its share, in a mix.
    Share(String),
    /// The same operation twice, in a mix.
    Twice(OperationKind),
    /// A mix whose shares are all 0.
    Nothing,
    /// Not a scan length.
    ScanLength(String),
    /// Not a key chooser.
    Chooser(String),
    /// Not a key set.
    KeySet(String),
    /// Not a value size.
    ValueSize(String),
}

impl fmt::Display for BadText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Workload(text) => {
                write!(f, "'{text}' is no workload; write a mix like get=50,put=45,scan=5:100, or one of: ")?;
                list(f, catalog::DEFINITIONS.iter().map(|definition| definition.name))
            }
            Self::NoScan(text) => {
                write!(f, "'{text}': this workload does not scan; leave out the scan length")
            }
            Self::Share(text) => {
                write!(
                    f,
                    "'{text}' is no share of a mix; write OPERATION=WEIGHT (a whole number below 2^32; scans: "
                )?;
                write!(f, "WEIGHT:LENGTH), where OPERATION is one of: ")?;
                list(f, OperationKind::ALL.iter().map(|kind| kind.name()))
            }
            Self::Twice(kind) => write!(f, "'{}' stands twice in the mix; add its weights up", kind.name()),
            Self::Nothing => write!(f, "the mix has no operation; give at least one a weight above 0"),
            Self::ScanLength(text) => {
                write!(f, "'{text}' is no scan length; write a number of keys above 0, or a range like 1-100")
            }
            Self::Chooser(text) => write!(
                f,
                "'{text}' is no key chooser; write uniform, sequential, latest, latest:THETA, zipfian:THETA or \
                 zipfian:THETA@RANKS, as in zipfian:0.99@1e9, with THETA in 0..={MAX_THETA} and RANKS in 1..={MAX_COUNT}"
            ),
            Self::KeySet(text) => write!(
                f,
                "'{text}' is no key set; write u64, sequential or email, or u64:BYTES or sequential:BYTES with BYTES in 8..=1024"
            ),
            Self::ValueSize(text) => {
                write!(
                    f,
                    "'{text}' is no value size; write a number of bytes up to 16777216, or a range like 16-400"
                )
            }
        }
    }
}

impl std::error::Error for BadText {}

fn list(f: &mut fmt::Formatter<'_>, names: impl Iterator<Item = &'static str>) -> fmt::Result {
    for (n, name) in names.enumerate() {
        write!(f, "{}{name}", if n == 0 { "" } else { ", " })?;
    }
    Ok(())
}

/// A count as people write it: `1000000`, `1_000_000`, `1e6`, `2.5e8`.
pub(crate) fn parse_count(text: &str) -> Option<u64> {
    let digits = text.replace('_', "");
    if digits.starts_with(|c: char| !c.is_ascii_digit()) {
        return None;
    }
    let Some((mantissa, exponent)) = digits.split_once(['e', 'E']) else {
        return digits.parse().ok();
    };
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let exponent: usize = exponent.parse().ok().filter(|exponent| *exponent <= 19)?;
    let zeros = exponent.checked_sub(fraction.len())?;
    format!("{whole}{fraction}{}", "0".repeat(zeros)).parse().ok()
}

/// A count as short as it can be written exactly.
pub(crate) fn write_count(f: &mut fmt::Formatter<'_>, count: u64) -> fmt::Result {
    let (mut mantissa, mut zeros) = (count, 0);
    while mantissa != 0 && mantissa % 10 == 0 {
        mantissa /= 10;
        zeros += 1;
    }
    if zeros >= 4 { write!(f, "{mantissa}e{zeros}") } else { write!(f, "{count}") }
}

/// `100` or `1-100`, within limits.
pub(crate) fn parse_range(text: &str, limits: RangeInclusive<u32>) -> Option<(u32, u32)> {
    let number = |text: &str| u32::try_from(parse_count(text)?).ok();
    let (low, high) = match text.split_once('-') {
        Some((low, high)) => (number(low)?, number(high)?),
        None => (number(text)?, number(text)?),
    };
    (low <= high && limits.contains(&low) && limits.contains(&high)).then_some((low, high))
}

/// Writes what [`parse_range`] reads.
pub(crate) fn write_range(f: &mut fmt::Formatter<'_>, low: u32, high: u32) -> fmt::Result {
    if low == high { write!(f, "{low}") } else { write!(f, "{low}-{high}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    struct Count(u64);

    impl fmt::Display for Count {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write_count(f, self.0)
        }
    }

    #[test]
    fn counts_are_read_as_people_write_them() {
        for (text, count) in
            [("1000", 1000), ("1_000", 1000), ("1e9", 1_000_000_000), ("2.5E8", 250_000_000), ("0", 0)]
        {
            assert_eq!(parse_count(text), Some(count), "{text}");
        }
        for text in
            ["", "-1", "+1", "1.5", "1.55e1", "e9", "1e", "1e20", "1e-3", "ten", "18446744073709551616"]
        {
            assert_eq!(parse_count(text), None, "{text}");
        }
        assert_eq!(Count(1_000_000_000).to_string(), "1e9");
        assert_eq!(Count(1000).to_string(), "1000");
    }

    proptest! {
        #[test]
        fn counts_survive_their_text(count: u64, zeros in 0u32..19) {
            for count in [count, count / 10u64.pow(zeros) * 10u64.pow(zeros)] {
                prop_assert_eq!(parse_count(&Count(count).to_string()), Some(count));
            }
        }
    }
}
