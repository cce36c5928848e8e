//! A mix: which operations a client issues, in which proportions.
//!
//! Weights are whole numbers and only their ratio counts: `get=95,put=5` and `get=19,put=1` issue the same operations. So
//! shares that are no whole percentages, such as Sherman's thirds, are exact.

use crate::random::Random;
use crate::text::{BadText, parse_count, parse_range, write_range};
use std::fmt;
use std::str::FromStr;

/// What an operation does.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum OperationKind {
    /// Reads the value of a key.
    Get,
    /// Sets the value of a key, whether it is there or not.
    Put,
    /// Sets the value of a key that was never there.
    Insert,
    /// Removes a key.
    Delete,
    /// Reads a number of keys in ascending order, from a chosen key on.
    Scan,
    /// Reads on where this client's last `Iterate` ended; the first one, and one after the end, from the smallest key.
    Iterate,
    /// Reads a key, then sets it, unconditionally, as YCSB's F does.
    ReadModifyWrite,
    /// Reads a key, then sets it if it still holds what was read.
    CompareAndSwap,
}

impl OperationKind {
    /// All of them.
    pub const ALL: [OperationKind; 8] = [
        Self::Get,
        Self::Put,
        Self::Insert,
        Self::Delete,
        Self::Scan,
        Self::Iterate,
        Self::ReadModifyWrite,
        Self::CompareAndSwap,
    ];

    /// Its name in a mix.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Get => "get",
            Self::Put => "put",
            Self::Insert => "insert",
            Self::Delete => "delete",
            Self::Scan => "scan",
            Self::Iterate => "iterate",
            Self::ReadModifyWrite => "rmw",
            Self::CompareAndSwap => "cas",
        }
    }

    /// Whether it needs a key that a chooser draws from those that exist.
    pub const fn chooses_key(self) -> bool {
        !matches!(self, Self::Insert | Self::Iterate)
    }

    /// Whether it reads several keys, so that its share has a length.
    pub const fn has_length(self) -> bool {
        matches!(self, Self::Scan | Self::Iterate)
    }
}

/// How many keys a scan asks for: evenly distributed between two numbers, both included, above 0.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ScanLength {
    min: u32,
    max: u32,
}

impl ScanLength {
    /// Between `min` and `max` keys; at least 1, at least `min`.
    pub const fn between(min: u32, max: u32) -> Self {
        let min = if min == 0 { 1 } else { min };
        Self { min, max: if max < min { min } else { max } }
    }

    /// Always `keys` keys, at least 1.
    pub const fn fixed(keys: u32) -> Self {
        Self::between(keys, keys)
    }

    /// The shortest and the longest scan.
    pub const fn bounds(self) -> (u32, u32) {
        (self.min, self.max)
    }

    pub(crate) fn draw(self, random: &mut Random) -> u32 {
        if self.min == self.max {
            return self.min;
        }
        let above = random.below(u64::from(self.max - self.min) + 1);
        self.min + u32::try_from(above).unwrap_or(0)
    }
}

impl FromStr for ScanLength {
    type Err = BadText;

    fn from_str(text: &str) -> Result<Self, BadText> {
        let (min, max) =
            parse_range(text, 1..=u32::MAX).ok_or_else(|| BadText::ScanLength(text.to_owned()))?;
        Ok(Self { min, max })
    }
}

impl fmt::Display for ScanLength {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_range(f, self.min, self.max)
    }
}

/// One kind of operation in a mix.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Share {
    kind: OperationKind,
    weight: u32,
    /// Of kinds that have one; elsewhere 1.
    length: ScanLength,
}

impl Share {
    /// An operation on one key.
    pub const fn of(kind: OperationKind, weight: u32) -> Self {
        Self { kind, weight, length: ScanLength::fixed(1) }
    }

    /// A scan from a chosen key.
    pub const fn scan(weight: u32, length: ScanLength) -> Self {
        Self { kind: OperationKind::Scan, weight, length }
    }

    /// A step of an iteration over everything.
    pub const fn iterate(weight: u32, length: ScanLength) -> Self {
        Self { kind: OperationKind::Iterate, weight, length }
    }

    /// What it does.
    pub const fn kind(&self) -> OperationKind {
        self.kind
    }

    /// Its weight among the others.
    pub const fn weight(&self) -> u32 {
        self.weight
    }

    /// How many keys it reads.
    pub const fn length(&self) -> ScanLength {
        self.length
    }
}

impl FromStr for Share {
    type Err = BadText;

    fn from_str(text: &str) -> Result<Self, BadText> {
        let bad = || BadText::Share(text.to_owned());
        let (name, rest) = text.split_once('=').ok_or_else(bad)?;
        let kind = OperationKind::ALL.into_iter().find(|kind| kind.name() == name.trim()).ok_or_else(bad)?;
        let (weight, length) = match rest.split_once(':') {
            Some((weight, length)) if kind.has_length() => (weight, length.trim().parse()?),
            None if !kind.has_length() => (rest, ScanLength::fixed(1)),
            _ => return Err(bad()),
        };
        let weight =
            parse_count(weight.trim()).and_then(|weight| u32::try_from(weight).ok()).ok_or_else(bad)?;
        Ok(Self { kind, weight, length })
    }
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.kind.name(), self.weight)?;
        if self.kind.has_length() { write!(f, ":{}", self.length) } else { Ok(()) }
    }
}

/// Kinds of operations with their weights: `get=50,put=30,insert=10,delete=5,scan=5:1-100`. Each kind at most once, at least
/// one weight above 0.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mix {
    shares: Vec<Share>,
    total: u64,
}

impl Mix {
    /// A mix of shares; those of weight 0 are left out.
    pub fn new(shares: &[Share]) -> Result<Self, BadText> {
        let shares: Vec<Share> = shares.iter().copied().filter(|share| share.weight > 0).collect();
        for (n, share) in shares.iter().enumerate() {
            if shares[..n].iter().any(|earlier| earlier.kind == share.kind) {
                return Err(BadText::Twice(share.kind));
            }
        }
        if shares.is_empty() { Err(BadText::Nothing) } else { Ok(Self::of_valid(shares)) }
    }

    /// A mix of shares that a test has found valid.
    pub(crate) fn of_valid(shares: Vec<Share>) -> Self {
        let total = shares.iter().map(|share| u64::from(share.weight)).sum();
        Self { shares, total }
    }

    /// Its shares, as they were written.
    pub fn shares(&self) -> &[Share] {
        &self.shares
    }

    /// How large a part of the operations is of a kind, between 0 and 1.
    pub fn part(&self, kind: OperationKind) -> f64 {
        let of_kind = self.shares.iter().filter(|share| share.kind == kind);
        of_kind.map(|share| f64::from(share.weight)).sum::<f64>() / self.total as f64
    }

    /// Whether it has operations of a kind.
    pub fn has(&self, kind: OperationKind) -> bool {
        self.shares.iter().any(|share| share.kind == kind)
    }

    pub(crate) fn set_scan_length(&mut self, length: ScanLength) {
        for share in self.shares.iter_mut().filter(|share| share.kind.has_length()) {
            share.length = length;
        }
    }

    pub(crate) fn draw(&self, random: &mut Random) -> Share {
        let mut at = if self.shares.len() > 1 { random.below(self.total) } else { 0 };
        for share in &self.shares {
            match at.checked_sub(u64::from(share.weight)) {
                None => return *share,
                Some(rest) => at = rest,
            }
        }
        unreachable!("a draw lies below the sum of the weights")
    }
}

impl FromStr for Mix {
    type Err = BadText;

    fn from_str(text: &str) -> Result<Self, BadText> {
        let shares = text.split(',').map(|share| share.trim().parse()).collect::<Result<Vec<Share>, _>>()?;
        Self::new(&shares)
    }
}

impl fmt::Display for Mix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, share) in self.shares.iter().enumerate() {
            write!(f, "{}{share}", if n == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}
