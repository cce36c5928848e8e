//! The smallest program: a pool inside this process, an index, a few keys.
//!
//!     cargo run --release -p farwood-index --example embedded

use farwood_index::{AnyEngine, Client};
use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    // Two memory servers of 64 MiB. With servers that run elsewhere: Client::connect("tcp://10.0.0.1:7000,10.0.0.2:7000", b"token", 1)
    let cluster = farwood_memory::embedded(2, 64 << 20)?;
    let client = Client::new(&cluster, 1)?;
    // Keys of 16 bytes, values of 8.
    let heights = client.create("heights", &AnyEngine::named("sherman", 16, 8)?).wait()?;
    let mountains = [
        ("Aconcagua", 6961),
        ("Denali", 6190),
        ("Everest", 8849),
        ("Kilimanjaro", 5895),
        ("Mont Blanc", 4806),
    ];
    for (name, height) in mountains {
        heights.put(key(name), u64::to_be_bytes(height)).wait()?;
    }
    println!("all of them, in order:");
    for (name, height) in heights.scan(.., 100).wait()? {
        println!("  {:<12} {} m", text(&name), number(&height));
    }
    println!("from D to K:");
    let (from, to) = (key("D"), key("K"));
    for (name, height) in heights.scan(from.as_slice()..to.as_slice(), 100).wait()? {
        println!("  {:<12} {} m", text(&name), number(&height));
    }
    // Measured again: only if nobody else has changed it meanwhile.
    let swapped = heights.compare_and_swap(
        key("Mont Blanc"),
        Some(u64::to_be_bytes(4806).to_vec()),
        Some(u64::to_be_bytes(4808).to_vec()),
    );
    assert!(swapped.wait()?);
    assert_eq!(heights.get(key("Mont Blanc")).wait()?.as_deref().map(number), Some(4808));
    assert!(heights.delete(key("Denali")).wait()?);
    assert_eq!(heights.get(key("Denali")).wait()?, None);
    Ok(())
}

/// Text filled up with zeros to the length of keys, which keeps its order.
fn key(text: &str) -> Vec<u8> {
    let mut key = text.as_bytes().to_vec();
    key.resize(16, 0);
    key
}

fn text(key: &[u8]) -> String {
    String::from_utf8_lossy(key).trim_end_matches('\0').to_owned()
}

fn number(value: &[u8]) -> u64 {
    value.try_into().map_or(0, u64::from_be_bytes)
}
