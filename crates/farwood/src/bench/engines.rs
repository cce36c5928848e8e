//! The engines by name, with their switches (`--set`), and the one place where a name becomes a type.

use super::baseline::{Nothing, ShardedMap};
use crate::fleet::Transport;
use farwood_sim::reference::Bugs;
use farwood_sim::reference::cells::Cells;
use farwood_sim::reference::records::Records;
use farwood_workload::KeyKind;

/// An engine that can be measured.
#[derive(Clone, Debug)]
pub(super) enum Choice {
    BTreeMap(ShardedMap),
    Null(Nothing),
    Cells(Cells),
    Records(Records),
}

/// Names, and what they are.
pub(super) const ENGINES: [(&str, &str); 4] = [
    ("btreemap", "a sharded BTreeMap behind locks, on local only: the baseline"),
    (
        "cells",
        "fixed cells updated in place under remote locks: a reference structure, keys are numbers below a limit",
    ),
    (
        "records",
        "immutable records behind words swung by CAS: a reference structure, keys are numbers below a limit",
    ),
    ("null", "does nothing: what the bench itself costs"),
];

impl Choice {
    /// The engine of this name, for `capacity` keys at most, with these switches.
    pub(super) fn new(name: &str, capacity: u64, switches: &[(String, String)]) -> Result<Self, String> {
        let mut choice = match name {
            "btreemap" => Self::BTreeMap(ShardedMap::new(ShardedMap::DEFAULT_SHARDS)),
            "null" => Self::Null(Nothing::default()),
            "cells" => Self::Cells(Cells { keys: capacity, bugs: Bugs::default() }),
            "records" => Self::Records(Records { keys: capacity, bugs: Bugs::default() }),
            _ => {
                let names = ENGINES.map(|(name, _)| name).join(", ");
                return Err(format!("--engine: there is no '{name}'; there are {names}"));
            }
        };
        for (switch, value) in switches {
            choice.set(name, switch, value)?;
        }
        Ok(choice)
    }

    fn set(&mut self, engine: &str, switch: &str, value: &str) -> Result<(), String> {
        match (self, switch) {
            (Self::BTreeMap(map), "shards") => match value.parse() {
                Ok(shards) if (1..=65_536).contains(&shards) => *map = ShardedMap::new(shards),
                _ => return Err(format!("--set shards={value}: shards are a number from 1 to 65536")),
            },
            (Self::BTreeMap(_), _) => {
                return Err(format!("--set: {engine} has no switch '{switch}'; it has: shards"));
            }
            _ => return Err(format!("--set: {engine} has no switch '{switch}', nor any other")),
        }
        Ok(())
    }

    /// Whether it can run there, on such keys.
    pub(super) fn check(&self, transport: &Transport, keys: KeyKind) -> Result<(), String> {
        match self {
            Self::BTreeMap(_) if !matches!(transport, Transport::Local(_)) => {
                Err("--engine: btreemap has no far memory and runs on local only".to_owned())
            }
            Self::Cells(_) | Self::Records(_) if keys != (KeyKind::Sequential { bytes: 8 }) => {
                Err("--engine: the keys of cells and records are numbers; add --key-set sequential"
                    .to_owned())
            }
            _ => Ok(()),
        }
    }
}

/// Runs `$body` with `$engine` bound to the engine itself, whichever it is.
macro_rules! with_engine {
    ($choice:expr, $engine:ident => $body:expr) => {
        match $choice {
            $crate::bench::engines::Choice::BTreeMap($engine) => $body,
            $crate::bench::engines::Choice::Null($engine) => $body,
            $crate::bench::engines::Choice::Cells($engine) => $body,
            $crate::bench::engines::Choice::Records($engine) => $body,
        }
    };
}
pub(super) use with_engine;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_engine_listed_exists_and_no_other() {
        for (name, _) in ENGINES {
            assert!(Choice::new(name, 10, &[]).is_ok(), "{name}");
        }
        assert!(Choice::new("bplus", 10, &[]).is_err());
    }

    #[test]
    fn switches_belong_to_their_engine() {
        let set = |engine, switch: &str, value: &str| {
            Choice::new(engine, 10, &[(switch.to_owned(), value.to_owned())])
        };
        assert!(set("btreemap", "shards", "8").is_ok());
        for (engine, switch, value) in
            [("btreemap", "shards", "0"), ("btreemap", "shads", "8"), ("cells", "shards", "8")]
        {
            assert!(set(engine, switch, value).is_err(), "{engine} {switch}={value}");
        }
    }
}
