//! The README's example is compiled and run: the README is always true. (Doctests need a library, which this crate has not got.)

/// The Rust block of the README, as a function body. Kept in step by `the_example_is_the_readmes`.
fn example() -> Result<(), Box<dyn std::error::Error>> {
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

#[test]
fn the_example_runs() {
    example().expect("the README's example works");
}

#[test]
fn the_example_is_the_readmes() {
    let readme = include_str!("../../../README.md");
    let shown =
        readme.split("```rust\n").nth(1).and_then(|rest| rest.split("```").next()).expect("a Rust block");
    let run = include_str!("readme.rs");
    let run = run
        .split("    // begin\n")
        .nth(1)
        .and_then(|rest| rest.split("    // end").next())
        .expect("the marks");
    let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(words(shown), words(run));
}

#[test]
fn the_commands_are_those_that_ci_runs() {
    let (readme, ci) = (include_str!("../../../README.md"), include_str!("../../../.ci/run"));
    assert!(readme.contains("\ncargo test --workspace\n") && ci.contains("step cargo test --workspace"));
}
