//! Atomics of many clients on the same words: nothing is lost, nothing happens twice.

use super::client::{Client, Outcome, ensure, mix};
use super::{Scenario, scenario};
use crate::addr::GlobalAddr;
use crate::endpoint::Op;
use crate::error::FabricError;
use crate::verb::{Batch, Verb};

pub(super) fn scenarios() -> Vec<Scenario> {
    vec![
        scenario!("atomics/faa", clients 4, faa,
            "rule 4: FAAs of many clients add up, and no two of them find the same"),
        scenario!("atomics/cas", clients 4, cas,
            "rule 4: of CASes that expect the same word one wins, and the losers see what it left"),
        scenario!("atomics/lanes", clients 4, lanes,
            "rule 4: masked CAS, CAS and FAA are one domain: each keeps its lane of a shared word exact"),
    ]
}

/// Words in every region that clients may use atomics in.
fn places(client: &Client) -> Vec<GlobalAddr> {
    let mut places = vec![client.board(20)];
    for server in 0..client.servers() {
        places.extend([client.at(server, 24_576), client.at(server, 24_584), client.lock(server, 11)]);
    }
    places
}

async fn faa(client: &Client) -> Outcome {
    add_up(client, async |op, addr| op.faa(addr, 1).await).await
}

/// All clients add one to some words by `add`, which brings the word as it was.
pub(super) async fn add_up(
    client: &Client,
    add: impl AsyncFn(&Op, GlobalAddr) -> Result<u64, FabricError>,
) -> Outcome {
    let places = places(client);
    // A sum of scrambled values tells two sets apart, whatever was found twice or never.
    let mut found = vec![0u64; places.len()];
    let mut done = vec![0u64; places.len()];
    for _ in 0..client.rounds * 4 {
        let n = client.random_size(places.len());
        let before = add(&client.op(), places[n]).await?;
        found[n] = found[n].wrapping_add(mix(before + 1));
        done[n] += 1;
    }
    let op = client.op();
    for n in 0..places.len() {
        op.faa(client.board(32 + n as u64), done[n]).await?;
        op.faa(client.board(128 + n as u64), found[n]).await?;
    }
    client.barrier().await?;
    for (n, place) in (0..).zip(&places) {
        let (sum, due) = (op.read_word(*place).await?, op.read_word(client.board(32 + n)).await?);
        ensure!(sum == due, "{due} additions of one to {place} left {sum}");
        let seen = op.read_word(client.board(128 + n)).await?;
        let all = (1..=due).fold(0u64, |all, value| all.wrapping_add(mix(value)));
        ensure!(seen == all, "{due} additions to {place} add up, but some found the same word before");
    }
    Ok(())
}

async fn cas(client: &Client) -> Outcome {
    let places = places(client);
    let mut won = vec![0u64; places.len()];
    let mut guesses = vec![0u64; places.len()];
    for _ in 0..client.rounds * 4 {
        let n = client.random_size(places.len());
        let before = client.op().cas(places[n], guesses[n], guesses[n] + 1).await?;
        if before == guesses[n] {
            won[n] += 1;
            guesses[n] += 1;
        } else {
            ensure!(before > guesses[n], "a counter went back from {} to {before}", guesses[n]);
            guesses[n] = before;
        }
    }
    let op = client.op();
    for (n, won) in (0..).zip(&won) {
        op.faa(client.board(32 + n), *won).await?;
    }
    client.barrier().await?;
    for (n, place) in (0..).zip(&places) {
        let (count, due) = (op.read_word(*place).await?, op.read_word(client.board(32 + n)).await?);
        ensure!(count == due, "{due} CASes won at {place}, and it counted to {count}");
    }
    Ok(())
}

/// Client 0 adds in the highest lane, 1 and 2 use masked CAS (CAS where there is none), 3 uses CAS.
async fn lanes(client: &Client) -> Outcome {
    let masked = client.endpoint.capabilities().masked_cas;
    let lane = 48 - 16 * client.index;
    let mask = 0xffff_u64 << lane;
    let places = [client.at(client.servers() - 1, 512), client.lock(0, 17)];
    let mut counts = [0u64; 2];
    for _ in 0..client.rounds * 2 {
        let n = client.random_size(2);
        let (addr, next) = (places[n], (counts[n] + 1) & 0xffff);
        let op = client.op();
        match client.index {
            0 => {
                let before = op.faa(addr, 1 << lane).await?;
                ensure!(
                    before >> lane == counts[n],
                    "an FAA found lane {lane} at {} instead of {}",
                    before >> lane,
                    counts[n]
                );
            }
            1 | 2 if masked => {
                let mut batch = Batch::new(addr.server());
                batch.push(Verb::MaskedCas {
                    addr,
                    compare: counts[n] << lane,
                    compare_mask: mask,
                    swap: next << lane,
                    swap_mask: mask,
                });
                let before = op.submit(batch).await?.previous(0);
                let found = (before & mask) >> lane;
                // Only the owner changes a lane, so a masked CAS on it cannot lose.
                ensure!(
                    found == counts[n],
                    "a masked CAS found lane {lane} at {found} instead of {}",
                    counts[n]
                );
            }
            _ => {
                let mut guess = op.read_word(addr).await?;
                let mut patience = super::client::Patience::new(&client.endpoint);
                loop {
                    let found = (guess & mask) >> lane;
                    ensure!(found == counts[n], "lane {lane} is {found}, its only user left {}", counts[n]);
                    let before = op.cas(addr, guess, guess & !mask | next << lane).await?;
                    if before == guess {
                        break;
                    }
                    guess = before;
                    patience.wait("a CAS to win").await?;
                }
            }
        }
        counts[n] = next;
    }
    client.barrier().await?;
    for (addr, count) in places.iter().zip(counts) {
        let seen = (client.op().read_word(*addr).await? & mask) >> lane;
        ensure!(seen == count, "at the end lane {lane} of {addr} is {seen} instead of {count}");
    }
    Ok(())
}
