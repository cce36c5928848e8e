//! The README's examples are compiled and run: the README is always true. (Doctests need a library, which this crate has not got.)

/// The first Rust block of the README, as a function body. Kept in step by `the_examples_are_the_readmes`.
fn fabric_example() -> Result<(), Box<dyn std::error::Error>> {
    // begin
    use farwood_fabric::transport::local::LocalCluster;
    use farwood_fabric::{Executor, GlobalAddr, RegionId, ServerId, Session, SessionOptions};
    use farwood_fabric::{procedure::ProcedureSet, region::PoolId, server::ServerLogic};
    use farwood_memory::{MemoryServer, ServerConfig};
    use std::sync::Arc;

    let server = |n| {
        let config = ServerConfig::new(PoolId(1), ServerId::new(n), 2, 64 << 20);
        let server = MemoryServer::new(config, ProcedureSet::default())?;
        Ok::<_, Box<dyn std::error::Error>>(Arc::new(server) as Arc<dyn ServerLogic>)
    };
    let cluster = LocalCluster::start(vec![server(0)?, server(1)?])?;
    Executor::new().block_on(async {
        let session = Session::open(&cluster, SessionOptions::default()).await?;
        let endpoint = session.endpoint()?;
        let op = endpoint.op();
        let lock = GlobalAddr::new(ServerId::new(1), RegionId::LOCK, 0);
        assert_eq!(op.cas(lock, 0, 7).await?, 0);
        assert_eq!(op.read_word(lock).await?, 7);
        assert_eq!(op.stats().round_trips, 2);
        drop(op);
        session.close(&endpoint).await?;
        Ok::<_, Box<dyn std::error::Error>>(())
    })?;
    // end
    Ok(())
}

/// The second one.
fn index_example() -> Result<(), Box<dyn std::error::Error>> {
    // begin
    use farwood_fabric::transport::local::LocalCluster;
    use farwood_fabric::{Executor, ServerId, SessionOptions};
    use farwood_fabric::{procedure::ProcedureSet, region::PoolId, server::ServerLogic};
    use farwood_index::engine::sherman::{Config, Sherman};
    use farwood_index::{Engine, OrderedIndex, Pool};
    use farwood_memory::{MemoryServer, ServerConfig};
    use std::ops::Bound;
    use std::sync::Arc;

    let config = ServerConfig::new(PoolId(1), ServerId::new(0), 1, 64 << 20);
    let server: Arc<dyn ServerLogic> = Arc::new(MemoryServer::new(config, ProcedureSet::default())?);
    let cluster = LocalCluster::start(vec![server])?;
    Executor::new().block_on(async {
        let pool = Pool::join(&cluster, SessionOptions::default()).await?;
        let endpoint = pool.session().endpoint()?;
        let engine = Sherman::new(Config { key_bytes: 5, value_bytes: 3, ..Config::default() });
        engine.create(&pool, &endpoint, "words").await?;
        let attached = engine.attach(&pool, &endpoint, "words").await?;
        let words = engine.open(&attached, &endpoint, 0)?;
        words.put(b"maple", b"tre").await?;
        words.put(b"aspen", b"tre").await?;
        assert!(words.put_if_absent(b"birch", b"tre").await?);
        assert_eq!(words.get(b"aspen").await?.as_deref(), Some(&b"tre"[..]));
        let found = words.scan(Bound::Included(b"b"), Bound::Unbounded, 10, false).await?;
        assert_eq!(found.iter().map(|(key, _)| key.as_slice()).collect::<Vec<_>>(), [b"birch", b"maple"]);
        pool.leave(&endpoint).await?;
        Ok::<_, Box<dyn std::error::Error>>(())
    })?;
    // end
    Ok(())
}

#[test]
fn the_examples_run() {
    fabric_example().expect("the README's first example works");
    index_example().expect("the README's second example works");
}

#[test]
fn the_examples_are_the_readmes() {
    let parts = |text: &'static str, begin: &str, end: &'static str| -> Vec<Vec<&'static str>> {
        let blocks = text.split(begin).skip(1).filter_map(|rest| rest.split(end).next());
        blocks.map(|block| block.split_whitespace().collect()).collect()
    };
    let shown = parts(include_str!("../../../README.md"), "```rust\n", "```");
    let run = parts(include_str!("readme.rs"), "    // begin\n", "    // end\n");
    assert_eq!(shown, run);
    assert_eq!(shown.len(), 2);
}

#[test]
fn the_commands_are_those_that_ci_runs() {
    let (readme, ci) = (include_str!("../../../README.md"), include_str!("../../../.ci/run"));
    assert!(readme.contains("\ncargo test --workspace\n") && ci.contains("step cargo test --workspace"));
}
