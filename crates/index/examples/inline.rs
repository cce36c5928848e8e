//! For speed: operations run on the caller's own thread, many at a time, and say what they cost.
//!
//!     cargo run --release -p farwood-index --example inline

use farwood_fabric::{Executor, SessionOptions};
use farwood_index::{AnyEngine, Index, IndexError, OrderedIndex, Pool};
use std::error::Error;

const KEYS: u64 = 10_000;
const TASKS: usize = 16;

fn main() -> Result<(), Box<dyn Error>> {
    let cluster = farwood_memory::embedded(2, 64 << 20)?;
    let executor = Executor::new();
    executor.block_on(async {
        let pool = Pool::join(&cluster, SessionOptions::default()).await?;
        let endpoint = pool.session().endpoint()?;
        let index = Index::create(&pool, &endpoint, "numbers", &AnyEngine::named("sherman", 8, 8)?).await?;
        // Tasks of one thread take turns whenever one waits for far memory.
        let tasks: Vec<_> = (0u64..)
            .take(TASKS)
            .map(|task| {
                let handle = index.handle(&endpoint)?;
                Ok(endpoint.spawn(async move {
                    for n in (task..KEYS).step_by(TASKS) {
                        handle.put(&n.to_be_bytes(), &(n * n).to_be_bytes()).await?;
                    }
                    Ok::<_, IndexError>(())
                }))
            })
            .collect::<Result<_, IndexError>>()?;
        for task in tasks {
            task.await.map_err(|_| IndexError::Unknown)??;
        }
        let handle = index.handle(&endpoint)?;
        let before = endpoint.totals();
        for n in 0..KEYS {
            let square = handle.get(&n.to_be_bytes()).await?;
            assert_eq!(square.as_deref(), Some(&(n * n).to_be_bytes()[..]));
        }
        let trips = endpoint.totals().round_trips - before.round_trips;
        println!(
            "{KEYS} keys were written by {TASKS} tasks; reading each took {:.2} round trips",
            trips as f64 / KEYS as f64
        );
        println!("the cache of this compute server has {} KiB", index.cache_bytes() >> 10);
        println!("the index is whole: {} nodes", index.check(&endpoint).await?);
        drop(handle);
        pool.leave(&endpoint).await?;
        Ok::<_, IndexError>(())
    })?;
    executor.clear();
    Ok(())
}
