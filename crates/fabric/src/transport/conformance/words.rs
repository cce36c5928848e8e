//! Words are whole under races, and parts of words are independent of each other.

use super::client::{Client, Outcome, ensure, size};
use super::verbs::put;
use super::{Scenario, scenario};
use crate::addr::GlobalAddr;
use crate::endpoint::Op;
use crate::verb::Batch;

pub(super) fn scenarios() -> Vec<Scenario> {
    vec![
        scenario!("words/whole", clients 4, whole,
            "rule 2: an aligned word is never seen half written, however long the verbs are"),
        scenario!("words/out_of_phase", clients 4, out_of_phase,
            "rule 2: nor when a READ lands in, or a WRITE comes from, a buffer that is aligned otherwise"),
        scenario!("words/parts", clients 4, parts,
            "rule 2: a WRITE of part of a word leaves the other bytes to whoever writes them at that time"),
        scenario!("words/neighbours", clients 4, neighbours,
            "rule 2: atomics and WRITEs next to each other do not disturb each other"),
    ]
}

const AREA_WORDS: u64 = 1200;

async fn whole(client: &Client) -> Outcome {
    words_stay_whole(client, 600, 0).await
}

async fn out_of_phase(client: &Client) -> Outcome {
    words_stay_whole(client, AREA_WORDS, 1).await
}

/// Half of the clients write words of equal bytes, the others look for words of which the bytes differ. `phase`: how
/// far local buffers are off the words of far memory.
async fn words_stay_whole(client: &Client, longest: u64, phase: usize) -> Outcome {
    let shared = client.shared(size(AREA_WORDS) * 8 + 64)?;
    for round in 0..client.rounds * 2 {
        let server = size(round / 16) % client.servers();
        let first = client.random(AREA_WORDS);
        let words = 1 + client.random(longest.min(AREA_WORDS - first));
        let addr = client.at(server, first * 8);
        let at = phase * (1 + client.random_size(7)) + 8 * client.random_size(3);
        let op = client.op();
        let mut batch = Batch::new(addr.server());
        if client.index % 2 == 0 {
            let byte = 1 + client.random(255).to_le_bytes()[0] % 255;
            let data = vec![byte; size(words) * 8];
            if phase == 0 && round % 2 == 0 {
                batch.write(addr, client.endpoint.buf_of(&data));
            } else {
                shared.memory().write(at, &data);
                batch.write_from(addr, &shared, at, data.len());
            }
            op.submit(batch).await?;
            continue;
        }
        // READs may begin and end within a word; the whole ones between count.
        let skip = if phase == 0 { client.random(8) } else { 0 };
        let len = size(words * 8 - skip);
        let bytes = if phase == 0 && round % 2 == 0 {
            op.read(addr.add(skip), len).await?.to_vec()
        } else {
            let at = at + size(skip);
            batch.read_into(addr.add(skip), len, &shared, at);
            op.submit(batch).await?;
            let mut bytes = vec![0; len];
            shared.memory().read(at, &mut bytes);
            bytes
        };
        let from = size((8 - skip) % 8).min(len);
        for (n, word) in bytes[from..].chunks_exact(8).enumerate() {
            let torn = word.iter().any(|byte| *byte != word[0]);
            ensure!(!torn, "word {n} of a READ of {len} bytes at {} is torn: {word:x?}", addr.add(skip));
        }
    }
    Ok(())
}

/// Which bytes of sixteen each client owns. The third part lies in two words.
pub(super) const PARTS: [(u64, usize); 4] = [(0, 1), (1, 3), (4, 7), (11, 5)];
const GROUPS: usize = 24;

async fn parts(client: &Client) -> Outcome {
    own_parts(client, async |client, op, addr, data| put(client, op, addr, data).await).await
}

/// Each client writes its own bytes of sixteen by `write` and looks whether they stay.
pub(super) async fn own_parts(
    client: &Client,
    write: impl AsyncFn(&Client, &Op, GlobalAddr, &[u8]) -> Outcome,
) -> Outcome {
    let (from, len) = PARTS[client.index as usize % PARTS.len()];
    let mut mine = [0; GROUPS];
    for round in 0..client.rounds * 4 {
        let group = client.random_size(GROUPS);
        let base = client.at(group % client.servers(), 4096 + group as u64 * 16);
        let value = 1 + round.to_le_bytes()[0] % 255;
        let op = client.op();
        write(client, &op, base.add(from), &vec![value; len]).await?;
        mine[group] = value;
        let other = client.random_size(GROUPS);
        let base = client.at(other % client.servers(), 4096 + other as u64 * 16);
        let seen = op.read(base, 16).await?;
        let own = &seen[size(from)..size(from) + len];
        let due = mine[other];
        ensure!(
            own.iter().all(|byte| *byte == due),
            "bytes {from}..+{len} of {base} are {own:?}, but their only writer left {due}: a neighbour's WRITE undid them"
        );
        for (from, len) in PARTS {
            // The share of a part that lies in one word was written at once.
            for word in 0..2 {
                let share: Vec<u8> =
                    (size(from)..size(from) + len).filter(|b| b / 8 == word).map(|b| seen[b]).collect();
                let torn = share.iter().any(|byte| *byte != share[0]);
                ensure!(!torn, "bytes {from}..+{len} of {base} are torn within a word: {share:?}");
            }
        }
    }
    Ok(())
}

async fn neighbours(client: &Client) -> Outcome {
    const GROUPS: usize = 4;
    let mut last = [0; GROUPS];
    let mut added = [0u64; GROUPS];
    for round in 1..=client.rounds * 4 {
        let n = client.random_size(GROUPS);
        let base = client.at(n % client.servers(), 8192 + n as u64 * 32);
        let op = client.op();
        match client.index {
            0 => {
                let add = client.random(1 << 40);
                let before = op.faa(base.add(8), add).await?;
                ensure!(before == added[n], "an FAA found {before:#x}, its only user left {:#x}", added[n]);
                added[n] += add;
            }
            1 => {
                let before = op.cas(base.add(16), last[n], round).await?;
                ensure!(before == last[n], "a CAS found {before}, its only user left {}", last[n]);
                last[n] = round;
            }
            2 => {
                let seen = op.read_word(base).await?;
                ensure!(seen == last[n], "a word is {seen}, its only writer left {}", last[n]);
                op.write_word(base, round).await?;
                last[n] = round;
            }
            _ => {
                // Five bytes within the fourth word.
                let seen = op.read_word(base.add(24)).await?;
                ensure!(
                    seen == last[n] << 8,
                    "a word is {seen:#x}, its only writer left {:#x}",
                    last[n] << 8
                );
                last[n] = round & 0xff_ffff_ffff;
                put(client, &op, base.add(25), &last[n].to_le_bytes()[..5]).await?;
            }
        }
    }
    client.barrier().await?;
    for n in 0..GROUPS {
        let base = client.at(n % client.servers(), 8192 + n as u64 * 32);
        let (at, due) = match client.index {
            0 => (8, added[n]),
            1 => (16, last[n]),
            2 => (0, last[n]),
            _ => (24, last[n] << 8),
        };
        let seen = client.op().read_word(base.add(at)).await?;
        ensure!(seen == due, "at the end a word is {seen:#x}, its only user left {due:#x}");
    }
    Ok(())
}
