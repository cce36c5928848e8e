//! Hardware as data: what a profile says, and how its text is read.
//!
//! A profile is lines of `name = value  # source`. All names must be there, once each; what is wrong is said with its line
//! and with what to do. The built-in ones live in `crates/fabric/profiles/`, one file each, where every number has its
//! source beside it; anybody may supply another text ([`Profile`] is `FromStr`).

use crate::clock::Nanos;
use std::fmt;
use std::str::FromStr;

/// Thousandths of a nanosecond: a NIC's share of a byte is 80 of them.
pub(in crate::transport::sim) type Picos = u64;

/// What things cost on some hardware. Names in the text are `group.field`.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub struct Profile {
    /// What it is called.
    pub name: String,
    /// `link.round_trip_ns`: a small verb on an idle network, without what the NICs below add; half each way.
    pub round_trip_ns: Nanos,
    /// `link.bytes_per_ns`: of each NIC, each direction.
    pub link_bytes_per_ns: f64,
    /// `link.header_bytes`: of each message.
    pub header_bytes: u64,
    /// `nic.message_ns`: a NIC, each direction, takes at least this long over a message.
    pub message_ns: f64,
    /// `nic.units`: how many inbound verbs a memory server's NIC works on at a time.
    pub units: usize,
    /// `nic.verb_ns`: how long each of them holds its unit.
    pub verb_ns: f64,
    /// `nic.pcie_ns`: one verb of the NIC's at a time crosses to main memory, for so long.
    pub pcie_ns: f64,
    /// `atomic.word_ns`: an atomic in main memory keeps others from its bucket for so long.
    pub atomic_ns: f64,
    /// `atomic.bucket_bits`: addresses that agree in so many low bits share a bucket.
    pub bucket_bits: u32,
    /// `atomic.on_chip_ns`: the same in lock memory.
    pub on_chip_ns: f64,
    /// `compute.operation_ns`: a client's own work for one operation of an index.
    pub operation_ns: Nanos,
    /// `compute.spread`: charged work varies by this share up and down.
    pub spread: f64,
    /// `compute.bytes_per_ns`: work by the byte.
    pub compute_bytes_per_ns: f64,
    /// `compute.post_ns`: a client's own work for one doorbell.
    pub post_ns: Nanos,
    /// `compute.poll_ns`: a client's own work for one completion.
    pub poll_ns: Nanos,
    /// `server.call_ns`: a core's work for one call.
    pub call_ns: Nanos,
    /// `server.access_ns`: a procedure's access to the memory beside it.
    pub access_ns: Nanos,
    /// `server.bytes_per_ns`: a procedure's copies.
    pub server_bytes_per_ns: f64,
    /// `server.slice_ns`: how long a procedure keeps a core while others wait.
    pub slice_ns: Nanos,
}

/// A number of the text: its name, the least and the most it may be, and whether it must be whole.
struct Number {
    name: &'static str,
    least: f64,
    most: f64,
    whole: bool,
}

const fn number(name: &'static str, least: f64, most: f64) -> Number {
    Number { name, least, most, whole: false }
}

const fn whole(name: &'static str, least: f64, most: f64) -> Number {
    Number { name, least, most, whole: true }
}

/// A second: nothing that is priced takes longer.
const LONG: f64 = 1e9;
const NUMBERS: [Number; 20] = [
    whole("link.round_trip_ns", 2.0, LONG),
    number("link.bytes_per_ns", 0.01, 1000.0),
    whole("link.header_bytes", 0.0, 4096.0),
    number("nic.message_ns", 0.0, LONG),
    whole("nic.units", 1.0, 1024.0),
    number("nic.verb_ns", 0.0, LONG),
    number("nic.pcie_ns", 0.0, LONG),
    number("atomic.word_ns", 0.0, LONG),
    whole("atomic.bucket_bits", 3.0, 24.0),
    number("atomic.on_chip_ns", 0.0, LONG),
    whole("compute.operation_ns", 0.0, LONG),
    number("compute.spread", 0.0, 1.0),
    number("compute.bytes_per_ns", 0.01, 1000.0),
    whole("compute.post_ns", 0.0, LONG),
    whole("compute.poll_ns", 0.0, LONG),
    whole("server.call_ns", 0.0, LONG),
    whole("server.access_ns", 0.0, LONG),
    number("server.bytes_per_ns", 0.01, 1000.0),
    whole("server.slice_ns", 100.0, LONG),
    // Last, so that a missing one is named after everything above it.
    NAME,
];
const NAME: Number = whole("name", 0.0, 0.0);

/// The built-in profiles.
const BUILT_IN: [(&str, &str); 2] = [
    ("cx5-100g", include_str!("../../../../profiles/cx5-100g.profile")),
    ("cx6-200g", include_str!("../../../../profiles/cx6-200g.profile")),
];

impl Profile {
    /// A built-in profile.
    pub fn named(name: &str) -> Result<Self, BadProfile> {
        let (_, text) = BUILT_IN
            .iter()
            .find(|(known, _)| *known == name)
            .ok_or_else(|| BadProfile::Unknown { name: name.to_owned() })?;
        text.parse()
    }

    /// The names of the built-in profiles.
    pub fn names() -> impl Iterator<Item = &'static str> {
        BUILT_IN.iter().map(|(name, _)| *name)
    }

    /// The text of a built-in profile, with the source of every number.
    pub fn text(name: &str) -> Option<&'static str> {
        BUILT_IN.iter().find(|(known, _)| *known == name).map(|(_, text)| *text)
    }
}

/// Why a text is no profile.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum BadProfile {
    /// No built-in profile has this name.
    Unknown {
        /// The name.
        name: String,
    },
    /// A line that does not say `name = value`.
    NotALine {
        /// Which, counted from 1.
        line: usize,
    },
    /// A name that means nothing here.
    UnknownName {
        /// Which line.
        line: usize,
        /// The name.
        name: String,
    },
    /// A name that was there before.
    Twice {
        /// Which line.
        line: usize,
        /// The name.
        name: &'static str,
        /// Where it was first.
        first: usize,
    },
    /// A value that is no number, or not a whole one where it must be.
    BadNumber {
        /// Which line.
        line: usize,
        /// The name.
        name: &'static str,
        /// The value.
        value: String,
    },
    /// A number that makes no sense.
    OutOfRange {
        /// Which line.
        line: usize,
        /// The name.
        name: &'static str,
        /// The limits, as text.
        limits: String,
    },
    /// A name that is not there.
    Missing {
        /// The name.
        name: &'static str,
    },
}

impl fmt::Display for BadProfile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown { name } => {
                let known: Vec<&str> = Profile::names().collect();
                write!(f, "there is no profile '{name}'; choose one of {}", known.join(", "))
            }
            Self::NotALine { line } => {
                write!(f, "line {line} of the profile: write 'name = value  # source', or '# a comment'")
            }
            Self::UnknownName { line, name } => {
                let known: Vec<&str> = NUMBERS.iter().map(|number| number.name).collect();
                write!(
                    f,
                    "line {line} of the profile: '{name}' means nothing; the names are {}",
                    known.join(", ")
                )
            }
            Self::Twice { line, name, first } => {
                write!(
                    f,
                    "line {line} of the profile: '{name}' is on line {first} already; remove one of them"
                )
            }
            Self::BadNumber { line, name, value } => {
                write!(
                    f,
                    "line {line} of the profile: '{name}' is '{value}'; write a number, whole if it ends in _ns or counts"
                )
            }
            Self::OutOfRange { line, name, limits } => {
                write!(f, "line {line} of the profile: '{name}' must be {limits}")
            }
            Self::Missing { name } => {
                write!(f, "the profile does not say '{name}'; add a line '{name} = ...'")
            }
        }
    }
}

impl std::error::Error for BadProfile {}

/// The values as they are read: per number, its line and value.
struct Values([Option<(usize, f64)>; NUMBERS.len()]);

impl Values {
    fn get(&self, name: &str) -> Result<f64, BadProfile> {
        let at = NUMBERS.iter().position(|number| number.name == name).expect("one of the names");
        self.0[at].map(|(_, value)| value).ok_or(BadProfile::Missing { name: NUMBERS[at].name })
    }

    fn whole(&self, name: &str) -> Result<u64, BadProfile> {
        self.get(name).map(round)
    }
}

/// To the nearest whole number; profiles hold none that is negative or beyond a second in nanoseconds.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "saturates; the values are checked to be small"
)]
pub(in crate::transport::sim) fn round(value: f64) -> u64 {
    value.round() as u64
}

/// Nanoseconds as thousandths of them.
pub(in crate::transport::sim) fn picos(ns: f64) -> Picos {
    round(ns * 1000.0)
}

impl FromStr for Profile {
    type Err = BadProfile;

    fn from_str(text: &str) -> Result<Self, BadProfile> {
        let mut values = Values([None; NUMBERS.len()]);
        let mut called = String::new();
        for (line, content) in (1..).zip(text.lines()) {
            let content = content.split('#').next().unwrap_or("").trim();
            if content.is_empty() {
                continue;
            }
            let (name, value) = content.split_once('=').ok_or(BadProfile::NotALine { line })?;
            let (name, value) = (name.trim(), value.trim());
            let at = NUMBERS.iter().position(|number| number.name == name);
            let at = at.ok_or_else(|| BadProfile::UnknownName { line, name: name.to_owned() })?;
            let name = NUMBERS[at].name;
            if let Some((first, _)) = values.0[at] {
                return Err(BadProfile::Twice { line, name, first });
            }
            values.0[at] = Some((line, 0.0));
            if name == NAME.name {
                if value.is_empty() {
                    return Err(BadProfile::NotALine { line });
                }
                value.clone_into(&mut called);
            } else {
                values.0[at] = Some((line, NUMBERS[at].read(line, value)?));
            }
        }
        values.get(NAME.name)?;
        Ok(Self {
            name: called,
            round_trip_ns: values.whole("link.round_trip_ns")?,
            link_bytes_per_ns: values.get("link.bytes_per_ns")?,
            header_bytes: values.whole("link.header_bytes")?,
            message_ns: values.get("nic.message_ns")?,
            units: usize::try_from(values.whole("nic.units")?).unwrap_or(1),
            verb_ns: values.get("nic.verb_ns")?,
            pcie_ns: values.get("nic.pcie_ns")?,
            atomic_ns: values.get("atomic.word_ns")?,
            bucket_bits: u32::try_from(values.whole("atomic.bucket_bits")?).unwrap_or(3),
            on_chip_ns: values.get("atomic.on_chip_ns")?,
            operation_ns: values.whole("compute.operation_ns")?,
            spread: values.get("compute.spread")?,
            compute_bytes_per_ns: values.get("compute.bytes_per_ns")?,
            post_ns: values.whole("compute.post_ns")?,
            poll_ns: values.whole("compute.poll_ns")?,
            call_ns: values.whole("server.call_ns")?,
            access_ns: values.whole("server.access_ns")?,
            server_bytes_per_ns: values.get("server.bytes_per_ns")?,
            slice_ns: values.whole("server.slice_ns")?,
        })
    }
}

impl Number {
    fn read(&self, line: usize, value: &str) -> Result<f64, BadProfile> {
        let name = self.name;
        let bad = || BadProfile::BadNumber { line, name, value: value.to_owned() };
        let number: f64 = value.parse().map_err(|_| bad())?;
        if !number.is_finite() || (self.whole && number.fract() != 0.0) {
            return Err(bad());
        }
        if number < self.least || number > self.most {
            let limits = format!("between {} and {}", self.least, self.most);
            return Err(BadProfile::OutOfRange { line, name, limits });
        }
        Ok(number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_built_in_profiles_are_read_and_every_number_has_a_source() {
        for name in Profile::names() {
            let profile = Profile::named(name).unwrap();
            assert_eq!(profile.name, name);
            for (line, content) in (1..).zip(Profile::text(name).unwrap().lines()) {
                let content = content.trim();
                if content.is_empty() || content.starts_with('#') {
                    continue;
                }
                let source = content.split_once('#').map_or("", |(_, source)| source.trim());
                assert!(source.len() >= 10, "{name}, line {line}: '{content}' has no source");
            }
        }
        assert!(Profile::named("cx7").unwrap_err().to_string().contains("cx5-100g"));
    }

    #[test]
    fn what_is_wrong_is_said_with_its_line() {
        let good = Profile::text("cx5-100g").unwrap();
        assert!(good.parse::<Profile>().is_ok());
        let line_of = |part: &str| good.lines().position(|line| line.starts_with(part)).unwrap() + 1;
        let units = line_of("nic.units");
        let change = |to: &str| {
            let replace =
                |(n, line): (usize, &str)| if n + 1 == units { to.to_owned() } else { line.to_owned() };
            let text: Vec<String> = good.lines().enumerate().map(replace).collect();
            text.join("\n").parse::<Profile>().unwrap_err()
        };
        let name = "nic.units";
        assert_eq!(change(""), BadProfile::Missing { name });
        assert_eq!(change("nic.units 16"), BadProfile::NotALine { line: units });
        assert_eq!(change("nic.unit = 16"), BadProfile::UnknownName { line: units, name: "nic.unit".into() });
        assert_eq!(
            change("nic.verb_ns = 16"),
            BadProfile::Twice { line: units + 1, name: "nic.verb_ns", first: units }
        );
        for value in ["many", "", "1.5", "NaN", "inf"] {
            let value = value.to_owned();
            assert_eq!(
                change(&format!("nic.units = {value}")),
                BadProfile::BadNumber { line: units, name, value }
            );
        }
        for value in ["0", "-1", "1025"] {
            let error = change(&format!("nic.units = {value}"));
            assert!(matches!(error, BadProfile::OutOfRange { line, .. } if line == units), "{error}");
        }
    }
}
