//! The engines by name, with their switches (`--set`), and the one place where a name becomes a type.

use super::baseline::{Nothing, ShardedMap};
use crate::fleet::Transport;
use crate::units::Size;
use farwood_index::engine::sherman::{Config, LocksAlone, Sherman, Switches};
use farwood_index::engine::sphinx::{self, Sphinx};
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
    Sherman(Sherman),
    Sphinx(Sphinx),
    Locks(LocksAlone),
}

/// What an engine is to hold.
#[derive(Clone, Copy, Debug)]
pub(super) struct Load {
    /// The most keys there can be.
    pub(super) keys: u64,
    /// Bytes of a key, if all have as many.
    pub(super) key_bytes: Option<usize>,
    /// Bytes of a value, if all have as many.
    pub(super) value_bytes: Option<usize>,
}

/// Names, and what they are.
pub(super) const ENGINES: [(&str, &str); 9] = [
    ("sherman", "a B-link tree with hierarchical locks and entry-sized writes (Sherman, SIGMOD '22)"),
    ("fg+", "the same tree with none of the paper's techniques: the paper's baseline"),
    ("locks", "Sherman's locks alone, on one server: a put takes and gives back the lock of that number"),
    (
        "sphinx",
        "a radix tree for keys and values of any length, its inner nodes found by hash (Sphinx, DAC '25)",
    ),
    ("art", "the same tree without hash table and filter: the paper's baseline"),
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
    /// The engine of this name, for such a load, with these switches.
    pub(super) fn new(name: &str, load: Load, switches: &[(String, String)]) -> Result<Self, String> {
        let capacity = load.keys;
        let mut choice = match name {
            "btreemap" => Self::BTreeMap(ShardedMap::new(ShardedMap::DEFAULT_SHARDS)),
            "null" => Self::Null(Nothing::default()),
            "cells" => Self::Cells(Cells { keys: capacity, bugs: Bugs::default() }),
            "records" => Self::Records(Records { keys: capacity, bugs: Bugs::default() }),
            "sherman" => Self::Sherman(sherman(name, &Config::default(), load)?),
            "locks" => Self::Locks(LocksAlone::default()),
            "fg+" => Self::Sherman(sherman(name, &Config::fg_plus(), load)?),
            "sphinx" => Self::Sphinx(Sphinx::default()),
            "art" => Self::Sphinx(Sphinx::new(sphinx::Config::art())),
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
            (Self::Sherman(Sherman { config }) | Self::Locks(LocksAlone { config }), switch) => {
                return set_sherman(config, engine, switch, value);
            }
            (Self::Sphinx(tree), switch) => return set_sphinx(&mut tree.config, engine, switch, value),
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
            Self::Cells(_) | Self::Records(_) | Self::Locks(_)
                if keys != (KeyKind::Sequential { bytes: 8 }) =>
            {
                Err("--engine: the keys of cells, records and locks are numbers; add --key-set sequential"
                    .to_owned())
            }
            _ => Ok(()),
        }
    }
}

/// The tree for keys and values of this size.
fn sherman(name: &str, config: &Config, load: Load) -> Result<Sherman, String> {
    let (Some(key_bytes), Some(value_bytes)) = (load.key_bytes, load.value_bytes) else {
        return Err(format!(
            "--engine: keys and values of {name} have one length; choose such a --key-set and --value-size"
        ));
    };
    Ok(Sherman::new(config.clone().sized(key_bytes, value_bytes)))
}

fn set_sherman(config: &mut Config, engine: &str, switch: &str, value: &str) -> Result<(), String> {
    let bad = |what: &str| format!("--set {switch}={value}: {what}");
    if let Some(technique) = config.switches.by_name(switch) {
        *technique = value.parse().map_err(|_| bad("a technique is true or false"))?;
        return Ok(());
    }
    let size = || value.parse::<Size>().map(|size| size.0).map_err(|error| bad(&error));
    match switch {
        "cache_bytes" => config.cache_bytes = size()?,
        "node_bytes" => config.node_bytes = usize::try_from(size()?).map_err(|_| bad("that is too large"))?,
        "entries" => match value.parse() {
            Ok(entries @ 1..=65_536) => *config = config.clone().with_entries(entries),
            _ => return Err(bad("entries of a node are a number from 1 to 65536")),
        },
        "locks" => config.locks = value.parse().map_err(|_| bad("locks are a number"))?,
        _ => {
            let techniques = Switches::NAMES.join(", ");
            return Err(format!(
                "--set: {engine} has no switch '{switch}'; it has: {techniques}, cache_bytes, node_bytes, entries, locks"
            ));
        }
    }
    Ok(())
}

fn set_sphinx(config: &mut sphinx::Config, engine: &str, switch: &str, value: &str) -> Result<(), String> {
    let bad = |what: &str| format!("--set {switch}={value}: {what}");
    if let Some(technique) = config.switches.by_name(switch) {
        *technique = value.parse().map_err(|_| bad("a technique is true or false"))?;
        return Ok(());
    }
    if switch == "filter_bytes" {
        config.filter_bytes = value.parse::<Size>().map_err(|error| bad(&error))?.0;
        return Ok(());
    }
    let techniques = sphinx::Switches::NAMES.join(", ");
    Err(format!("--set: {engine} has no switch '{switch}'; it has: {techniques}, filter_bytes"))
}

/// Runs `$body` with `$engine` bound to the engine itself, whichever it is.
macro_rules! with_engine {
    ($choice:expr, $engine:ident => $body:expr) => {
        match $choice {
            $crate::bench::engines::Choice::BTreeMap($engine) => $body,
            $crate::bench::engines::Choice::Null($engine) => $body,
            $crate::bench::engines::Choice::Cells($engine) => $body,
            $crate::bench::engines::Choice::Records($engine) => $body,
            $crate::bench::engines::Choice::Sherman($engine) => $body,
            $crate::bench::engines::Choice::Sphinx($engine) => $body,
            $crate::bench::engines::Choice::Locks($engine) => $body,
        }
    };
}
pub(super) use with_engine;

#[cfg(test)]
mod tests {
    use super::*;

    const LOAD: Load = Load { keys: 10, key_bytes: Some(8), value_bytes: Some(8) };

    #[test]
    fn every_engine_listed_exists_and_no_other() {
        for (name, _) in ENGINES {
            assert!(Choice::new(name, LOAD, &[]).is_ok(), "{name}");
        }
        assert!(Choice::new("bplus", LOAD, &[]).is_err());
    }

    #[test]
    fn switches_belong_to_their_engine() {
        let set = |engine, switch: &str, value: &str| {
            Choice::new(engine, LOAD, &[(switch.to_owned(), value.to_owned())])
        };
        assert!(set("btreemap", "shards", "8").is_ok());
        assert!(
            set("sherman", "lock_and_read", "false").is_ok() && set("fg+", "cache_bytes", "1MiB").is_ok()
        );
        assert!(set("sphinx", "filter", "false").is_ok() && set("sphinx", "filter_bytes", "20MiB").is_ok());
        for (engine, switch, value) in [
            ("btreemap", "shards", "0"),
            ("btreemap", "shads", "8"),
            ("cells", "shards", "8"),
            ("sherman", "combine", "yes"),
            ("sherman", "shards", "8"),
            ("sphinx", "filter", "1"),
            ("art", "cache_bytes", "8"),
        ] {
            assert!(set(engine, switch, value).is_err(), "{engine} {switch}={value}");
        }
    }
}
