//! INFO: how the gateway does, in the sections that tools for Redis read, and one of its own.

use super::keyspace::{COUNTED_KEYS, count};
use super::server::{MEMORY_POLICY, REDIS_VERSION};
use super::{Answer, COMMANDS};
use crate::common::{Common, at_most};
use crate::resp::{Reply, Request};
use crate::shard::Shard;
use crate::stats::{SAMPLED_ONE_IN, Totals};
use crate::store::Store;
use farwood_fabric::clock::{MILLISECOND, Nanos, SECOND};
use std::fmt::Write;

/// Sections that are shown unless others are asked for.
const USUAL: [&str; 6] = ["server", "clients", "memory", "stats", "farwood", "keyspace"];
const OTHERS: [&str; 2] = ["commandstats", "latencystats"];
/// How long the servers are waited for.
const ASK_NS: Nanos = SECOND;

pub(super) async fn info<S: Store>(shard: &Shard<S>, request: &Request) -> Answer {
    let asked: Vec<String> =
        request.from(1).map(|name| String::from_utf8_lossy(name).to_ascii_lowercase()).collect();
    let is_wanted = |section: &str| {
        let is_usual = USUAL.contains(&section);
        let is_meant = |asked: &String| match asked.as_str() {
            "default" => is_usual,
            "all" | "everything" => true,
            name => name == section,
        };
        if asked.is_empty() { is_usual } else { asked.iter().any(is_meant) }
    };
    // What is said of a gateway in trouble must not wait for the servers that cause it: what they do not say in time, or cannot, is
    // left out, or what they said before.
    let mut may_ask = !shard.common.health.is_cut_off();
    if is_wanted("memory") && may_ask {
        may_ask = matches!(at_most(shard.sleep(ASK_NS), shard.look_at_memory()).await, Some(Ok(())));
    }
    // A client finds its own commands counted; what other threads say is a moment old.
    shard.publish_costs();
    let totals = shard.common.totals();
    let mut text = String::new();
    for section in USUAL.into_iter().chain(OTHERS).filter(|section| is_wanted(section)) {
        if !text.is_empty() {
            text.push_str("\r\n");
        }
        let mut title = section.to_owned();
        title[..1].make_ascii_uppercase();
        let _ = write!(text, "# {title}\r\n");
        let lines = match section {
            "server" => server(&shard.common),
            "clients" => clients(&shard.common),
            "memory" => memory(&shard.common),
            "stats" => stats(&shard.common, &totals),
            "farwood" => farwood(shard, &totals),
            "keyspace" if may_ask => {
                at_most(shard.sleep(ASK_NS), keyspace(shard)).await.and_then(Result::ok).unwrap_or_default()
            }
            "keyspace" => Lines::new(),
            "commandstats" => command_stats(&totals),
            _ => latency_stats(&totals),
        };
        for (name, value) in lines {
            let _ = write!(text, "{name}:{value}\r\n");
        }
    }
    Ok(Reply::Text(text))
}

type Lines = Vec<(String, String)>;

fn lines<const N: usize>(pairs: [(&str, String); N]) -> Lines {
    pairs.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

fn server(common: &Common) -> Lines {
    let seconds = common.seconds() - 1;
    lines([
        ("redis_version", REDIS_VERSION.to_owned()),
        ("redis_mode", "standalone".to_owned()),
        ("farwood_version", env!("CARGO_PKG_VERSION").to_owned()),
        ("os", std::env::consts::OS.to_owned()),
        ("arch_bits", usize::BITS.to_string()),
        ("multiplexing_api", "epoll".to_owned()),
        ("process_id", std::process::id().to_string()),
        ("run_id", common.run.clone()),
        ("tcp_port", common.options.listen.port().to_string()),
        ("uptime_in_seconds", seconds.to_string()),
        ("uptime_in_days", (seconds / 86_400).to_string()),
    ])
}

fn clients(common: &Common) -> Lines {
    let budget = common.clients.budget();
    lines([
        ("connected_clients", common.clients.len().to_string()),
        ("maxclients", common.options.max_clients.to_string()),
        ("blocked_clients", "0".to_owned()),
        ("client_memory_bytes", budget.used().to_string()),
        ("client_memory_limit_bytes", budget.limit().to_string()),
    ])
}

/// `used_memory` is far memory that indexes have; the maximum is all there is.
fn memory(common: &Common) -> Lines {
    let (servers, cache_bytes) = common.memory.get();
    let used: u64 = servers.iter().map(|server| server.total_bytes - server.free_bytes).sum();
    let mut found = lines([
        ("used_memory", used.to_string()),
        ("used_memory_human", format!("{:.2}M", used as f64 / f64::from(1 << 20))),
        ("maxmemory", common.memory.total_bytes().to_string()),
        ("maxmemory_policy", MEMORY_POLICY.to_owned()),
        ("cache_bytes", cache_bytes.to_string()),
    ]);
    for server in servers {
        let mut value = format!("total={},free={}", server.total_bytes, server.free_bytes);
        for (name, bytes) in &server.indexes {
            let _ = write!(value, ",index_{name}={bytes}");
        }
        found.push((format!("server{}", server.server), value));
    }
    found
}

fn stats(common: &Common, totals: &Totals) -> Lines {
    let (connections, rejected) = common.clients.counts();
    lines([
        ("total_connections_received", connections.to_string()),
        ("total_commands_processed", totals.calls().to_string()),
        ("total_net_input_bytes", totals.bytes_in.to_string()),
        ("total_net_output_bytes", totals.bytes_out.to_string()),
        ("rejected_connections", rejected.to_string()),
        ("expired_keys", totals.expired.to_string()),
        ("evicted_keys", "0".to_owned()),
        ("evicted_clients", common.clients.budget().evicted().to_string()),
        ("keyspace_hits", totals.hits.to_string()),
        ("keyspace_misses", totals.misses.to_string()),
        ("total_error_replies", totals.errors().to_string()),
    ])
}

/// What operations cost in far memory, how often they went where a cache led them (with Sphinx, where its filter knew a prefix) and found
/// nothing there, and how often they took the engine's rare paths.
fn farwood<S: Store>(shard: &Shard<S>, totals: &Totals) -> Lines {
    let operations = totals.operations();
    let each = |count: u64| format!("{:.3}", count as f64 / operations.max(1) as f64);
    let far = &totals.far;
    let loads: Vec<_> =
        shard.common.threads.iter().map(|thread| thread.load_percent.get().to_string()).collect();
    let health = &shard.common.health;
    let heartbeat = health.heartbeat_age_ns().map_or("-".to_owned(), |age| (age / MILLISECOND).to_string());
    let mut found = lines([
        ("index", shard.common.options.index.clone()),
        ("engine", shard.joined.as_ref().map_or("-", |joined| joined.store.engine()).to_owned()),
        ("health", health.trouble().unwrap_or_else(|| "ok".to_owned())),
        ("sessions", health.sessions().to_string()),
        ("heartbeat_age_ms", heartbeat),
        ("threads", shard.common.threads.len().to_string()),
        ("thread_load_percent", loads.join(",")),
        ("clients_handed_over", totals.handed_over.to_string()),
        ("operations", operations.to_string()),
        ("round_trips_per_operation", each(far.round_trips)),
        ("reads_per_operation", each(far.reads)),
        ("writes_per_operation", each(far.writes)),
        ("atomics_per_operation", each(far.atomics)),
        ("retries_per_operation", each(far.retries)),
        ("hints_per_operation", each(far.hints)),
        ("wrong_hints_per_operation", each(far.wrong_hints)),
        ("bytes_read_per_operation", each(far.bytes_read)),
        ("bytes_written_per_operation", each(far.bytes_written)),
        ("calls", far.calls.to_string()),
        ("timed_one_in", SAMPLED_ONE_IN.to_string()),
    ]);
    found.extend(totals.paths.iter().map(|(path, count)| (format!("path_{path}"), count.to_string())));
    found
}

async fn keyspace<S: Store>(shard: &Shard<S>) -> Result<Lines, super::Refused> {
    let keys = count(shard).await?;
    if keys == 0 {
        return Ok(Lines::new());
    }
    let exact = if keys <= COUNTED_KEYS { "yes" } else { "no" };
    Ok(lines([("db0", format!("keys={keys},expires=0,avg_ttl=0,exact={exact}"))]))
}

fn command_stats(totals: &Totals) -> Lines {
    let called = COMMANDS.iter().zip(&totals.commands).filter(|(_, command)| command.calls > 0);
    called
        .map(|(spec, command)| {
            let each = command.timed_ns as f64 / 1e3 / command.timed.max(1) as f64;
            let all = each * command.calls as f64;
            let value = format!(
                "calls={},usec={all:.0},usec_per_call={each:.2},rejected_calls=0,failed_calls={}",
                command.calls, command.errors
            );
            (format!("cmdstat_{}", spec.name), value)
        })
        .collect()
}

fn latency_stats(totals: &Totals) -> Lines {
    let timed = COMMANDS.iter().zip(&totals.commands).filter(|(_, command)| command.timed > 0);
    timed
        .map(|(spec, command)| {
            let us = |share| command.quantile_ns(share) as f64 / 1e3;
            let value = format!("p50={:.3},p99={:.3},p99.9={:.3}", us(0.5), us(0.99), us(0.999));
            (format!("latency_percentiles_usec_{}", spec.name), value)
        })
        .collect()
}
