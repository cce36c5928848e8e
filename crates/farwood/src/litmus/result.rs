//! What the litmus tests found: lines for people and for programs. The names in JSON stay as they are.

use super::judge::{Count, Promise, Verdict};
use crate::fleet::Fleet;
use crate::report::{Claims, Table, Wall, unless_broken_pipe};
use crate::units::Size;
use serde::Serialize;
use std::io::{self, Write};

/// Everything, as it goes into the JSON file.
#[derive(Serialize, Debug)]
pub(super) struct Litmus {
    command: &'static str,
    version: &'static str,
    /// Times are those of a simulated world.
    r#virtual: bool,
    settings: Settings,
    capabilities: Claims,
    lines: Vec<Line>,
    /// How many promises were violated.
    broken: usize,
    /// The only part that differs between two runs of the same simulated world.
    wall: Wall,
}

/// What was asked for.
#[derive(Serialize, Debug)]
pub(super) struct Settings {
    pub(super) transport: String,
    pub(super) servers: u64,
    pub(super) clients: u32,
    pub(super) sizes_bytes: Vec<usize>,
    pub(super) seconds_per_test: Option<f64>,
    pub(super) rounds_per_reader: Option<u64>,
    pub(super) seed: u64,
}

/// One property.
#[derive(Serialize, Debug)]
pub(super) struct Line {
    property: &'static str,
    /// The size of the block, where there are several.
    bytes: Option<usize>,
    /// `contract`, the capability (or the `checksum`) that claims it, or nothing.
    promised_by: Option<&'static str>,
    /// The capability that could claim it, and does not.
    unclaimed_capability: Option<&'static str>,
    #[serde(flatten)]
    count: Count,
    /// Of checksummed objects: how many were torn and refused. Those that were accepted are violations.
    #[serde(skip_serializing_if = "Option::is_none")]
    torn_seen: Option<u64>,
    verdict: Verdict,
    text: String,
}

impl Line {
    pub(super) fn new(property: &'static str, promise: Promise, count: Count) -> Self {
        let (promised_by, unclaimed_capability) = match promise {
            Promise::Contract => (Some("contract"), None),
            Promise::Claimed(name) => (Some(name), None),
            Promise::Nobody(name) => (None, name),
        };
        let verdict = Verdict::of(promise, count);
        let text = verdict.text(count);
        Self {
            property,
            bytes: None,
            promised_by,
            unclaimed_capability,
            count,
            torn_seen: None,
            verdict,
            text,
        }
    }

    pub(super) fn of(self, bytes: usize) -> Self {
        Self { bytes: Some(bytes), ..self }
    }

    pub(super) fn with_torn(self, torn: u64) -> Self {
        let text = format!("{}; torn reads seen {torn}, accepted {}", self.text, self.count.violations);
        Self { torn_seen: Some(torn), text, ..self }
    }
}

impl Litmus {
    pub(super) fn new(fleet: &Fleet, settings: Settings, lines: Vec<Line>, wall: Wall) -> Self {
        Self {
            command: "litmus",
            version: env!("CARGO_PKG_VERSION"),
            r#virtual: fleet.is_virtual(),
            settings,
            capabilities: fleet.cluster().capabilities().into(),
            broken: lines.iter().filter(|line| line.verdict == Verdict::Broken).count(),
            lines,
            wall,
        }
    }

    /// Whether a promise was violated.
    pub(super) fn is_broken(&self) -> bool {
        self.broken > 0
    }

    pub(super) fn print(&self) -> Result<(), String> {
        unless_broken_pipe(self.write(&mut io::stdout().lock()))
    }

    fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let Settings { transport, servers, clients, seed, .. } = &self.settings;
        writeln!(out, "{transport}: {servers} server(s), {clients} clients, seed {seed}")?;
        let mut table = Table::new(&[
            "property",
            "size",
            "promised by",
            "observations",
            "chances",
            "violations",
            "verdict",
        ]);
        for line in &self.lines {
            table.row(vec![
                line.property.to_owned(),
                line.bytes.map_or("-".to_owned(), |bytes| Size(bytes as u64).to_string()),
                line.promised_by.unwrap_or("-").to_owned(),
                line.count.observations.to_string(),
                line.count.chances.to_string(),
                line.count.violations.to_string(),
                line.text.clone(),
            ]);
        }
        table.print(out)?;
        writeln!(out, "chances: observations that raced with a change, and so could have shown a violation")?;
        if self.broken > 0 {
            writeln!(out, "{} promise(s) BROKEN", self.broken)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_who_promised_and_what_was_seen() {
        let count = Count { observations: 5, chances: 4, violations: 3 };
        let json = |line: Line| serde_json::to_value(line).unwrap();
        let broken = json(Line::new("words", Promise::Contract, count).of(64).with_torn(9));
        assert_eq!((&broken["promised_by"], &broken["verdict"]), (&"contract".into(), &"broken".into()));
        assert_eq!(
            (&broken["bytes"], &broken["violations"], &broken["torn_seen"]),
            (&64.into(), &3.into(), &9.into())
        );
        let unclaimed = json(Line::new("lines", Promise::by("line_atomic", false), count));
        assert_eq!(unclaimed["unclaimed_capability"], "line_atomic");
        assert_eq!(unclaimed["verdict"], "not_promised_violated");
        assert!(unclaimed["promised_by"].is_null() && unclaimed.get("torn_seen").is_none());
    }
}
