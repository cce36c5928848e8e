//! The sweep: the first thread goes through all keys again and again and removes those that have expired. It finds what nobody else
//! removes: keys of gateways that are gone, and those whose deadlines were too many to remember (`deadlines`).
//!
//! 1. It reads keys and the last bytes of their values, a page at a time, with a rest in between. A page is as long as it takes to be through in
//!    [`PASS_TICKS`] rests, but no longer than [`LONGEST_PAGE`]; a pass takes at least [`SHORTEST_PASS_NS`]. So it costs little, however
//!    long values are.
//! 2. What looks as if it had expired is read whole, and removed if it has, surely, by the pool's time (`Common::surely_ms`).
//! 3. Where at least one key in [`MANY_EXPIRED`] had expired it rests only as long as keeps the thread free for three quarters of the time;
//!    when commands wait for room (`scarcity`), for half of it.
//!
//! So of a store's keys some twelve in a hundred at most have expired for long. What it counts on its way is what DBSIZE knows of large
//! indexes.

use super::Shard;
use crate::command::Refused;
use crate::envelope::{self, Millis};
use crate::store::Store;
use farwood_fabric::clock::{MILLISECOND, Nanos};
use std::ops::Bound;
use std::rc::Rc;

/// How long it rests between two pages.
const REST_NS: Nanos = 100 * MILLISECOND;
/// Rests in one pass, and keys of a page.
const PASS_TICKS: usize = 600;
const SHORTEST_PAGE: usize = 128;
const LONGEST_PAGE: usize = 4096;
/// The next pass begins so long after the last one did, if that has found few.
const SHORTEST_PASS_NS: Nanos = 5_000 * MILLISECOND;
/// If one key in so many had expired, many have.
const MANY_EXPIRED: usize = 8;

/// What a pass has found.
#[derive(Clone, Copy, Default, Debug)]
struct Found {
    live: usize,
    removed: usize,
    /// The first deadline to come.
    first_deadline: Option<Millis>,
}

impl Found {
    fn has_many(&self) -> bool {
        has_many(self.removed, self.live + self.removed)
    }
}

fn has_many(expired: usize, of: usize) -> bool {
    expired * MANY_EXPIRED >= of.max(1)
}

/// Removes keys that have expired, and counts the others, until the session ends.
pub(super) async fn sweep<S: Store>(shard: Rc<Shard<S>>) {
    let mut page = SHORTEST_PAGE;
    while !shard.stop.is_set() {
        let scarcity = &shard.common.scarcity;
        let (began, pass, began_ms) = (shard.executor.now(), scarcity.begin_pass(), shard.common.surely_ms());
        match sweep_once(&shard, page).await {
            Ok(_) if shard.stop.is_set() => return,
            Ok(found) => {
                shard.common.census.found(found.live);
                page = (found.live / PASS_TICKS).clamp(SHORTEST_PAGE, LONGEST_PAGE);
                scarcity.end_pass(pass, began_ms, found.removed as u64, found.first_deadline);
                let is_over = || {
                    let waited = shard.executor.now().saturating_sub(began);
                    found.has_many()
                        || waited >= SHORTEST_PASS_NS
                        || scarcity.is_pressing()
                        || shard.stop.is_set()
                };
                shard.sleep(REST_NS).await;
                while !is_over() {
                    shard.sleep(REST_NS).await;
                }
            }
            // Whatever it is, commands meet it too and say so. Those that wait for room are told that there is none.
            Err(_) => {
                scarcity.end_pass(pass, began_ms, 0, None);
                shard.sleep(REST_NS).await;
            }
        }
    }
}

/// One pass.
async fn sweep_once<S: Store>(shard: &Shard<S>, page: usize) -> Result<Found, Refused> {
    let mut walk = shard.walk(Bound::Unbounded, Bound::Unbounded, false);
    let mut found = Found::default();
    let (mut looked_at, mut removed, mut began) = (0, 0, shard.executor.now());
    loop {
        let (mut expired, before) = (Vec::new(), looked_at);
        let now = shard.common.surely_ms();
        let took = |key: &[u8], end: &[u8]| {
            looked_at += 1;
            match envelope::open(end).expires_at {
                Some(at) if at <= now => expired.push(key.to_vec()),
                Some(at) => {
                    found.first_deadline = Some(found.first_deadline.map_or(at, |first| first.min(at)));
                }
                None => {}
            }
        };
        if shard.stop.is_set() || !walk.ends(page, took).await? {
            break;
        }
        let gone = shard.remove_expired(expired.iter().map(Vec::as_slice)).await?;
        found.live += looked_at - before - gone;
        found.removed += gone;
        removed += gone;
        let is_pressing = shard.common.scarcity.is_pressing();
        if looked_at >= page || is_pressing {
            let worked = shard.executor.now().saturating_sub(began);
            let rest = if is_pressing {
                worked
            } else if has_many(removed, looked_at) {
                REST_NS.min(3 * worked)
            } else {
                REST_NS
            };
            shard.sleep(rest).await;
            (looked_at, removed, began) = (0, 0, shard.executor.now());
        }
    }
    Ok(found)
}
