//! The README's example is compiled and run: the README is always true. (Doctests need a library, which this crate has not got.)

/// The Rust block of the README, as a function body. Kept in step by `the_example_is_the_readmes`.
fn example() -> Result<(), Box<dyn std::error::Error>> {
    // begin
    use farwood_index::{AnyEngine, Client};

    let client = Client::new(&farwood_memory::embedded(2, 64 << 20)?, 1)?;
    // With servers that run: Client::connect("tcp://10.0.0.1:7000,10.0.0.2:7000", b"the token", 1)?
    let orders = client.create("orders", &AnyEngine::named("sherman", 8, 8)?).wait()?;
    orders.put(7u64.to_be_bytes(), *b"8 bytes!").wait()?;
    orders.put(9u64.to_be_bytes(), *b"8 more..").wait()?;
    assert_eq!(orders.get(7u64.to_be_bytes()).wait()?.as_deref(), Some(&b"8 bytes!"[..]));
    let from = 8u64.to_be_bytes();
    let pairs = orders.scan(from.as_slice().., 100).wait()?;
    assert_eq!(pairs, [(9u64.to_be_bytes().to_vec(), b"8 more..".to_vec())]);
    assert!(orders.delete(7u64.to_be_bytes()).wait()?);
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
