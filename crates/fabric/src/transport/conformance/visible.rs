//! A completed verb is visible to everybody, to procedures beside the memory too, and so is what they did when they reply.

use super::client::{Client, Outcome, ensure, noise, repeat, size, words_of};
use super::procedures::{Task, WORK};
use super::{Scenario, scenario};
use crate::verb::Batch;
use crate::wire::decode;

pub(super) fn scenarios() -> Vec<Scenario> {
    vec![
        scenario!("visible/to_others", clients 3, to_others,
            "rule 5: what completed is seen by whoever hears of it, over any number of clients and servers"),
        scenario!("visible/to_procedures", clients 2, to_procedures,
            "rule 5: a procedure called after a WRITE completed sees it; its own WRITEs are there when it replies"),
        scenario!("visible/one_domain", clients 2, one_domain,
            "rule 4: FAAs of procedures and of clients on one word add up"),
    ]
}

/// Client 0 does something, tells client 1 on another server, who tells client 2; both look.
async fn to_others(client: &Client) -> Outcome {
    let servers = client.servers();
    for n in 1..=client.rounds {
        let here = size(n) % servers;
        let (block, word) = (client.at(here, 4096), client.at(here, 2048));
        let ear = |who: u64| client.at((here + 1) % servers, 16_384 + who * 8);
        let words = 13;
        if client.index == 0 {
            let op = client.op();
            op.write(block, client.endpoint.buf_of(&repeat(n, words))).await?;
            let before = op.read_word(word).await?;
            match n % 3 {
                0 => op.write_word(word, n).await?,
                1 => {
                    op.faa(word, n - before).await?;
                }
                _ => {
                    op.cas(word, before, n).await?;
                }
            }
            client.tell(ear(1), n).await?;
            client.until("the last listener", ear(0), |heard| heard >= n).await?;
            continue;
        }
        let me = u64::from(client.index);
        client.until("news", ear(me), |heard| heard >= n).await?;
        let mut batch = Batch::new(block.server());
        batch.read(block, words * 8);
        batch.read(word, 8);
        let mut completed = client.op().submit(batch).await?;
        let (bytes, seen) = (completed.take(0), completed.take(1).word(0));
        for seen in words_of(&bytes).chain([seen]) {
            ensure!(seen == n, "client {me} heard of round {n}, which had completed, and sees {seen}");
        }
        client.tell(ear((me + 1) % 3), n).await?;
    }
    Ok(())
}

async fn to_procedures(client: &Client) -> Outcome {
    const LENGTHS: [usize; 6] = [8, 24, 100, 1024, 4097, 20_000];
    for n in 0..client.rounds.min(1000) {
        let server = client.random_size(client.servers());
        let at = client.at(server, 65_536 * (1 + u64::from(client.index)) + client.random(8));
        let len = LENGTHS[client.random_size(LENGTHS.len())];
        let data = noise(n, len);
        client.op().write(at, client.endpoint.buf_of(&data)).await?;
        let seen = client.work(server, WORK, &Task::Read { at, len: u32::try_from(len)? }).await?;
        ensure!(seen == data, "a procedure did not see the {len} bytes whose WRITE had completed");
        let answer = noise(!n, len);
        client.work(server, WORK, &Task::Write { at, data: answer.clone() }).await?;
        let seen = client.op().read(at, len).await?;
        ensure!(seen[..] == answer, "a procedure has replied, and its {len} bytes are not there");
    }
    Ok(())
}

async fn one_domain(client: &Client) -> Outcome {
    let mut added = 0;
    let server = client.servers() - 1;
    let at = client.at(server, 40);
    let calls = client.rounds.min(1000);
    for n in 0..calls {
        if client.index == 0 {
            for _ in 0..3 {
                client.op().faa(at, 1).await?;
                added += 1;
            }
        }
        let reply = client.work(server, WORK, &Task::Count { at, sleep_ns: 0 }).await?;
        added += 1;
        let before: u64 = decode(&reply).map_err(|_| super::client::Failure::new("no word came back"))?;
        ensure!(before >= n, "after {n} FAAs of its own a procedure's FAA found {before}");
    }
    client.op().faa(client.board(0), added).await?;
    client.barrier().await?;
    let (sum, due) = (client.op().read_word(at).await?, client.op().read_word(client.board(0)).await?);
    ensure!(sum == due, "{due} FAAs of clients and procedures left {sum}");
    Ok(())
}
