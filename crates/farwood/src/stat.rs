//! `farwood stat`: how a gateway does: whether it can serve, operations and their latencies, what they cost in far memory, memory per
//! server and index. Exits with 1 if it cannot serve, so that it can be used as a check.

use crate::report::{Table, unless_broken_pipe};
use crate::serve::{parse_address, read_token};
use farwood_gateway::ask;
use serde_json::{Map, Value};
use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

#[derive(clap::Args, Debug)]
pub(crate) struct Arguments {
    /// The gateway
    #[arg(default_value = "127.0.0.1:7379", value_parser = parse_address)]
    gateway: SocketAddr,

    /// Print JSON, for programs
    #[arg(long)]
    json: bool,

    /// The password of a gateway that asks for one
    #[arg(long, value_name = "FILE")]
    password_file: Option<PathBuf>,
}

/// A number, if it is one.
fn value_of(text: &str) -> Value {
    match (text.parse::<u64>(), text.parse::<f64>()) {
        (Ok(number), _) => number.into(),
        (_, Ok(number)) => number.into(),
        _ => text.into(),
    }
}

/// `a=1,b=2` as names and values; anything else as it is.
fn fields_of(text: &str) -> Value {
    let fields: Option<Map<String, Value>> = text
        .split(',')
        .map(|field| field.split_once('=').map(|(name, value)| (name.to_owned(), value_of(value))))
        .collect();
    fields.map_or_else(|| value_of(text), Value::Object)
}

fn as_json(found: Vec<(String, String)>) -> Value {
    let mut sections: Map<String, Value> = Map::new();
    for (name, value) in found {
        let (section, name) = name.split_once('.').unwrap_or(("", &name));
        let section = sections.entry(section).or_insert_with(|| Value::Object(Map::new()));
        if let Value::Object(section) = section {
            section.insert(name.to_owned(), fields_of(&value));
        }
    }
    Value::Object(sections)
}

/// What people want to know: not everything, and in columns.
fn as_text(found: &[(String, String)], out: &mut Vec<u8>) -> io::Result<()> {
    let get = |name: &str| found.iter().find(|(found, _)| found == name).map_or("-", |(_, value)| value);
    // A gateway in trouble may not be able to count them.
    let uncounted = if get("farwood.health") == "ok" { "0" } else { "?" };
    let keys = get("keyspace.db0").split(['=', ',']).nth(1).unwrap_or(uncounted);
    writeln!(
        out,
        "index '{}' ({}), up {} s, {} clients, {} keys",
        get("farwood.index"),
        get("farwood.engine"),
        get("server.uptime_in_seconds"),
        get("clients.connected_clients"),
        keys,
    )?;
    writeln!(
        out,
        "health: {} (session number {}, heartbeat acknowledged {} ms ago)",
        get("farwood.health"),
        get("farwood.sessions"),
        get("farwood.heartbeat_age_ms"),
    )?;
    writeln!(
        out,
        "{} hits, {} misses, {} errors\n",
        get("stats.keyspace_hits"),
        get("stats.keyspace_misses"),
        get("stats.total_error_replies")
    )?;
    let mut commands = Table::new(&["command", "calls", "us each", "p50 us", "p99 us", "p99.9 us"]);
    for (name, value) in found {
        let Some(command) = name.strip_prefix("commandstats.cmdstat_") else { continue };
        let times = get(&format!("latencystats.latency_percentiles_usec_{command}"));
        let field = |text: &str, name: &str| {
            let found = text.split(',').find_map(|field| field.strip_prefix(name)?.strip_prefix('='));
            found.unwrap_or("-").to_owned()
        };
        let mut row = vec![command.to_owned(), field(value, "calls"), field(value, "usec_per_call")];
        row.extend(["p50", "p99", "p99.9"].map(|name| field(times, name)));
        commands.row(row);
    }
    commands.print(out)?;
    writeln!(out)?;
    let mut far = Table::new(&["far memory, per operation", ""]);
    for name in [
        "round_trips",
        "reads",
        "writes",
        "atomics",
        "retries",
        "hints",
        "wrong_hints",
        "bytes_read",
        "bytes_written",
    ] {
        far.row(vec![name.replace('_', " "), get(&format!("farwood.{name}_per_operation")).to_owned()]);
    }
    far.row(vec!["cache bytes of this gateway".to_owned(), get("memory.cache_bytes").to_owned()]);
    far.print(out)?;
    writeln!(out)?;
    let mut memory = Table::new(&["server", "memory in bytes, by what it is used for"]);
    for (name, value) in found {
        if let Some(server) = name.strip_prefix("memory.server") {
            memory.row(vec![server.to_owned(), value.replace(',', "  ").replace("index_", "index ")]);
        }
    }
    memory.print(out)
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, String> {
    let password = match &arguments.password_file {
        Some(file) => Some(read_token(Some(file))?),
        None => None,
    };
    let at = arguments.gateway;
    let found =
        ask::info(at, password.as_deref()).map_err(|error| format!("the gateway at {at}: {error}"))?;
    let is_healthy = found.iter().any(|(name, value)| name == "farwood.health" && value == "ok");
    let mut text = Vec::new();
    if arguments.json {
        serde_json::to_writer_pretty(&mut text, &as_json(found)).map_err(|error| error.to_string())?;
        text.push(b'\n');
    } else {
        as_text(&found, &mut text).map_err(|error| error.to_string())?;
    }
    unless_broken_pipe(io::stdout().write_all(&text))?;
    Ok(if is_healthy { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn info_becomes_json() {
        let found =
            [("memory.server0", "total=16,free=8"), ("stats.keyspace_hits", "3"), ("farwood.engine", "map")];
        let json = as_json(found.map(|(name, value)| (name.to_owned(), value.to_owned())).into());
        assert_eq!(json["memory"]["server0"]["free"], 8);
        assert_eq!(json["stats"]["keyspace_hits"], 3);
        assert_eq!(json["farwood"]["engine"], "map");
    }
}
