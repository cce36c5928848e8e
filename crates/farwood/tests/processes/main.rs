//! `farwood serve` and its clients as real processes: they are killed, stopped and started again, and the contract holds.
//!
//! Servers are the binary itself. Clients that have to die are this test binary once more, with a part to play in its
//! environment (see `parts`).

mod crowd;
mod evict;
mod frames;
mod hosts;
mod idle;
mod interrupted;
mod kept;
mod killed;
mod lines;
mod mixed;
mod parts;
mod port;
mod repair;
mod saved;
mod status;
mod stopped;
mod store;
mod tcp;
mod verbs;
mod world;

/// What a process of this binary does when a test has given it a part.
#[test]
#[ignore = "a part that processes started by other tests play"]
fn play() {
    if let Ok(part) = std::env::var(world::PART) {
        parts::play(&part);
    }
}
