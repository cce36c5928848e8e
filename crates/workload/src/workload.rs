//! A workload: the mixes of its clients, how keys are chosen, and what it starts from. Data, not code; [`crate::Stream`]
//! carries it out.
//!
//! Its text is a name (`ycsb-a`, `A`, `range-only`), a name with another scan length (`range-only:1000`), or a custom mix
//! (`get=50,put=45,scan=5:100`). Mixes separated by `|` are taken by clients in turn: `scan=1:100|put=1` lets one half of the
//! clients scan and the other half write.

use crate::catalog::{DEFINITIONS, Definition};
use crate::chooser::Chooser;
use crate::mix::{Mix, OperationKind, ScanLength, Share};
use crate::text::BadText;
use std::fmt;
use std::str::FromStr;

/// What is there before the first operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Start {
    /// The keys 0 to count - 1.
    Loaded,
    /// Nothing: the workload itself writes these keys.
    Empty,
}

/// Which operations, on which keys, from which start.
#[derive(Clone, Debug)]
pub struct Workload {
    definition: Option<&'static Definition>,
    roles: Vec<Mix>,
    chooser: Chooser,
    start: Start,
}

impl Workload {
    /// All that have a name.
    pub fn all() -> Vec<Workload> {
        DEFINITIONS.iter().map(Self::of).collect()
    }

    /// A workload of one's own: uniformly chosen keys of a loaded index, unless a stream is told otherwise.
    pub fn custom(roles: Vec<Mix>) -> Result<Self, BadText> {
        if roles.is_empty() {
            return Err(BadText::Nothing);
        }
        Ok(Self { definition: None, roles, chooser: Chooser::Uniform, start: Start::Loaded })
    }

    fn of(definition: &'static Definition) -> Self {
        let roles = definition.roles.iter().map(|shares| Mix::of_valid(shares.to_vec())).collect();
        Self { definition: Some(definition), roles, chooser: definition.chooser, start: definition.start }
    }

    /// Its name, unless it is custom.
    pub fn name(&self) -> Option<&'static str> {
        self.definition.map(|definition| definition.name)
    }

    /// Other names for it.
    pub fn aliases(&self) -> &'static [&'static str] {
        self.definition.map_or(&[], |definition| definition.aliases)
    }

    /// Where it is defined: paper and section, or program.
    pub fn source(&self) -> &'static str {
        self.definition.map_or("custom", |definition| definition.source)
    }

    /// What the definition here adds to its source, or does otherwise; may be empty.
    pub fn note(&self) -> &'static str {
        self.definition.map_or("", |definition| definition.note)
    }

    /// Its mixes as text, in the form that [`Workload::from_str`] reads.
    pub fn mixes(&self) -> String {
        self.roles.iter().map(Mix::to_string).collect::<Vec<_>>().join("|")
    }

    /// The mixes that clients take in turn.
    pub fn roles(&self) -> &[Mix] {
        &self.roles
    }

    /// How keys are chosen, unless a stream is told otherwise.
    pub fn chooser(&self) -> Chooser {
        self.chooser
    }

    /// What it starts from.
    pub fn start(&self) -> Start {
        self.start
    }

    /// Whether keys appear that were not there at the start.
    pub fn inserts(&self) -> bool {
        self.roles.iter().any(|mix| mix.has(OperationKind::Insert))
    }

    /// The same with another length of scans; an error if it does not scan.
    pub fn with_scan_length(mut self, length: ScanLength) -> Result<Self, BadText> {
        if !self.roles.iter().flat_map(Mix::shares).any(|share| share.kind().has_length()) {
            return Err(BadText::NoScan(self.to_string()));
        }
        self.roles.iter_mut().for_each(|mix| mix.set_scan_length(length));
        Ok(self)
    }

    /// The scan length of the first share that scans.
    fn scan_length(&self) -> Option<ScanLength> {
        let mut shares = self.roles.iter().flat_map(Mix::shares);
        shares.find(|share| share.kind().has_length()).map(Share::length)
    }
}

/// Two are equal if they issue the same operations under the same name.
impl PartialEq for Workload {
    fn eq(&self, other: &Self) -> bool {
        self.name() == other.name()
            && self.roles == other.roles
            && self.chooser == other.chooser
            && self.start == other.start
    }
}

impl FromStr for Workload {
    type Err = BadText;

    fn from_str(text: &str) -> Result<Self, BadText> {
        if text.contains('=') {
            return Self::custom(text.split('|').map(str::parse).collect::<Result<_, _>>()?);
        }
        let (name, length) = text.split_once(':').map_or((text, None), |(name, length)| (name, Some(length)));
        let name = name.trim().to_ascii_lowercase();
        let found = DEFINITIONS
            .iter()
            .find(|definition| definition.name == name || definition.aliases.contains(&name.as_str()))
            .ok_or_else(|| BadText::Workload(text.to_owned()))?;
        match length {
            Some(length) => Self::of(found).with_scan_length(length.trim().parse()?),
            None => Ok(Self::of(found)),
        }
    }
}

impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(definition) = self.definition else {
            return f.write_str(&self.mixes());
        };
        f.write_str(definition.name)?;
        match self.scan_length() {
            Some(length) if Some(length) != Self::of(definition).scan_length() => write!(f, ":{length}"),
            _ => Ok(()),
        }
    }
}
