//! One client, many threads: they count words into one index, by compare-and-swap, and nothing is lost.
//!
//!     cargo run --release -p farwood-index --example many_threads [URL]
//!
//! Without a URL, on a pool inside this process; with one (`tcp://...` or `shm://...`), on servers that run.

use farwood_index::client::ClientIndex;
use farwood_index::{AnyEngine, Client, IndexError};
use std::error::Error;

const THREADS: usize = 8;
const WORDS: [&str; 5] = ["far", "memory", "near", "far", "far"];
const ROUNDS: usize = 200;

fn main() -> Result<(), Box<dyn Error>> {
    let client = match std::env::args().nth(1) {
        Some(url) => Client::connect(&url, b"", 2)?,
        None => Client::new(&farwood_memory::embedded(2, 64 << 20)?, 2)?,
    };
    let name = format!("words-{}", std::process::id());
    let counts = client.create(&name, &AnyEngine::named("sherman", 16, 8)?).wait()?;
    let counted: Result<(), IndexError> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|_| {
                let counts = counts.clone();
                scope.spawn(move || {
                    (0..ROUNDS).flat_map(|_| WORDS).try_for_each(|word| increment(&counts, word))
                })
            })
            .collect();
        threads.into_iter().try_for_each(|thread| thread.join().unwrap_or(Err(IndexError::Unknown)))
    });
    counted?;
    for (word, count) in counts.scan(.., 10).wait()? {
        let word = String::from_utf8_lossy(&word).trim_end_matches('\0').to_owned();
        let expected = (WORDS.iter().filter(|w| **w == word).count() * THREADS * ROUNDS) as u64;
        let count = u64::from_be_bytes(count.as_slice().try_into()?);
        println!("{word:<8} {count}");
        assert_eq!(count, expected, "nothing is lost");
    }
    drop(counts);
    client.drop_index(&name).wait()?;
    Ok(())
}

fn increment(counts: &ClientIndex, word: &str) -> Result<(), IndexError> {
    let mut key = word.as_bytes().to_vec();
    key.resize(16, 0);
    loop {
        let before = counts.get(key.clone()).wait()?;
        let count = before.as_deref().and_then(|value| value.try_into().ok()).map_or(0, u64::from_be_bytes);
        let after = (count + 1).to_be_bytes().to_vec();
        if counts.compare_and_swap(key.clone(), before, Some(after)).wait()? {
            return Ok(());
        }
    }
}
