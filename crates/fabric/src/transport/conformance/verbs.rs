//! Single verbs: the named bytes arrive, from and in every kind of buffer, and no others change; atomics do what a pure
//! model says.

use super::client::{Client, Failure, LOCKS_ZEROED_BYTES, Outcome, ensure, noise, poll_once, size, words_of};
use super::{Scenario, scenario};
use crate::addr::GlobalAddr;
use crate::endpoint::Op;
use crate::error::FabricError;
use crate::verb::{Batch, INLINE_BYTES, Verb};
use std::pin::pin;

pub(super) fn scenarios() -> Vec<Scenario> {
    vec![
        scenario!("verbs/sizes", clients 1, sizes,
            "rule 1: a READ brings what a WRITE of any size at any offset took, and its neighbours are untouched"),
        scenario!("verbs/buffers", clients 1, buffers,
            "rule 1: bytes keep their place from and into buffers of every kind, however both sides are aligned"),
        scenario!("verbs/atomics", clients 1, atomics,
            "rule 4: CAS, masked CAS and FAA bring the word before, and leave what a model says"),
        scenario!("verbs/servers", clients 1, servers,
            "rule 1: equal offsets on different servers and regions are different bytes"),
        scenario!("verbs/dropped", clients 1, dropped,
            "rule 5: a detached WRITE still happens, with the bytes it had; a dropped READ harms nobody"),
        scenario!("verbs/tasks", clients 2, tasks,
            "API: tasks interleave on one endpoint and each gets its own results"),
    ]
}

/// Bytes around a write that must not change.
const MARGIN: usize = 72;
const SIZES: [usize; 15] = [1, 2, 3, 7, 8, 9, 17, 24, 63, 64, 65, 428, 1024, 4096, 4097];
const OFFSETS: [u64; 8] = [0, 1, 3, 4, 7, 8, 29, 61];
const LARGE: [usize; 5] = [65_535, 65_536, 65_544, (1 << 20) - 3, 1 << 20];

/// WRITEs by one of the ways there are.
pub(super) async fn put(client: &Client, op: &Op, addr: GlobalAddr, data: &[u8]) -> Outcome {
    let mut batch = Batch::new(addr.server());
    match client.random(3) {
        0 if data.len() <= INLINE_BYTES => batch.write_inline(addr, data),
        0 | 1 => batch.write(addr, client.endpoint.buf_of(data)),
        _ => {
            let at = client.random_size(24);
            let buf = client.shared(at + data.len())?;
            buf.memory().write(at, data);
            batch.write_from(addr, &buf, at, data.len())
        }
    };
    op.submit(batch).await?;
    Ok(())
}

/// READs by one of the ways there are.
pub(super) async fn get(client: &Client, op: &Op, addr: GlobalAddr, len: usize) -> Result<Vec<u8>, Failure> {
    if client.random(2) == 0 {
        return Ok(op.read(addr, len).await?.to_vec());
    }
    let at = client.random_size(24);
    get_shared(client, op, addr, len, at).await
}

/// READs into a shared buffer at `at`, and checks that the rest of the buffer is untouched.
async fn get_shared(
    client: &Client,
    op: &Op,
    addr: GlobalAddr,
    len: usize,
    at: usize,
) -> Result<Vec<u8>, Failure> {
    let buf = client.shared(at + len + 32)?;
    let mut bytes = noise(7, at + len + 32);
    buf.memory().write(0, &bytes);
    let mut batch = Batch::new(addr.server());
    batch.read_into(addr, len, &buf, at);
    op.submit(batch).await?;
    let mut after = vec![0; bytes.len()];
    buf.memory().read(0, &mut after);
    let landed = after[at..at + len].to_vec();
    bytes[at..at + len].copy_from_slice(&landed);
    ensure!(after == bytes, "a READ of {len} bytes to {at} of a buffer changed other bytes of the buffer");
    Ok(landed)
}

/// One WRITE amid known bytes.
async fn write_and_compare(client: &Client, addr: GlobalAddr, len: usize) -> Outcome {
    let op = client.op();
    let from = GlobalAddr::from_raw(addr.to_raw() - MARGIN as u64);
    let mut model = noise(client.random(u64::MAX), len + 2 * MARGIN);
    op.write(from, client.endpoint.buf_of(&model)).await?;
    let data = noise(client.random(u64::MAX), len);
    put(client, &op, addr, &data).await?;
    model[MARGIN..MARGIN + len].copy_from_slice(&data);
    let around = get(client, &op, from, model.len()).await?;
    if around != model {
        let first = around.iter().zip(&model).position(|(a, b)| a != b).unwrap_or(0);
        return Err(Failure::new(format_args!(
            "after a WRITE of {len} bytes at {addr}, byte {first} counted from {MARGIN} before it is {:#x} instead of {:#x}",
            around[first], model[first]
        )));
    }
    let exact = get(client, &op, addr, len).await?;
    ensure!(exact == data, "a READ of exactly the {len} bytes WRITTEN at {addr} brought others");
    Ok(())
}

async fn sizes(client: &Client) -> Outcome {
    let margin = MARGIN as u64;
    for server in 0..client.servers() {
        for len in SIZES {
            for offset in OFFSETS {
                write_and_compare(client, client.at(server, 128 + offset), len).await?;
            }
        }
        for len in SIZES.into_iter().filter(|len| *len <= 1024) {
            write_and_compare(client, client.lock(server, 16).add(client.random(9)), len).await?;
            write_and_compare(client, client.board(16).add(client.random(9)), len.min(512)).await?;
        }
    }
    for len in LARGE {
        let server = client.random_size(client.servers());
        write_and_compare(client, client.at(server, margin + client.random(70)), len).await?;
    }
    Ok(())
}

/// Every pair of alignments, of far memory and of a shared buffer, both ways.
async fn buffers(client: &Client) -> Outcome {
    const LENGTHS: [usize; 12] = [1, 5, 8, 11, 16, 31, 64, 130, 4095, 4096, 4097, 8203];
    let op = client.op();
    let all = 64 * LENGTHS.len() as u64;
    // A long run takes every combination, a short one some.
    let (steps, stride) =
        if client.rounds * 4 >= all { (all, 1) } else { (client.rounds * 4, client.random(all) | 1) };
    for step in 0..steps {
        let n = step * stride % all;
        let (len, far, near) = (LENGTHS[size(n / 64)], n / 8 % 8, size(n % 8));
        let addr = client.at(client.random_size(client.servers()), 256 + far);
        let data = noise(client.random(u64::MAX), len);
        let buf = client.shared(near + len)?;
        buf.memory().write(near, &data);
        let mut batch = Batch::new(addr.server());
        batch.write_from(addr, &buf, near, len);
        op.submit(batch).await?;
        let seen = op.read(addr, len).await?;
        ensure!(seen[..] == data, "{len} bytes from {near} of a buffer to {addr} arrived changed");
        let seen = get_shared(client, &op, addr, len, near).await?;
        ensure!(seen == data, "{len} bytes from {addr} to {near} of a buffer arrived changed");
    }
    Ok(())
}

/// What an atomic leaves, as the contract says it.
fn model(verb: &Verb, word: u64) -> u64 {
    match *verb {
        Verb::Cas { expected, desired, .. } => {
            if word == expected {
                desired
            } else {
                word
            }
        }
        Verb::MaskedCas { compare, compare_mask, swap, swap_mask, .. } => {
            if word & compare_mask == compare & compare_mask {
                word & !swap_mask | swap & swap_mask
            } else {
                word
            }
        }
        Verb::Faa { add, .. } => word.wrapping_add(add),
        _ => word,
    }
}

fn random_atomic(client: &Client, addr: GlobalAddr, word: u64) -> Verb {
    let any = || client.random(u64::MAX);
    let mask = || match client.random(5) {
        0 => 0,
        1 => u64::MAX,
        2 => 0xffff << (16 * client.random(4)),
        _ => any(),
    };
    // Half of the comparisons hold, a few fail by one bit only.
    let guess = |client: &Client| match client.random(4) {
        0 | 1 => word,
        2 => word ^ 1 << client.random(64),
        _ => any(),
    };
    match client.random(3) {
        0 => Verb::Cas { addr, expected: guess(client), desired: any() },
        1 => {
            let (compare, compare_mask) = (guess(client), mask());
            Verb::MaskedCas { addr, compare, compare_mask, swap: any(), swap_mask: mask() }
        }
        _ => Verb::Faa { addr, add: if client.random(4) == 0 { u64::MAX - client.random(3) } else { any() } },
    }
}

async fn atomics(client: &Client) -> Outcome {
    let op = client.op();
    let last = client.random_size(client.servers());
    let places = [client.at(last, 4096), client.at(0, 4104), client.lock(last, 3), client.board(5)];
    let mut words = [0; 4];
    let masked = client.endpoint.capabilities().masked_cas;
    for _ in 0..client.rounds * 4 {
        let n = client.random_size(places.len());
        let verb = random_atomic(client, places[n], words[n]);
        let after = model(&verb, words[n]);
        let (is_masked, said) = (matches!(verb, Verb::MaskedCas { .. }), format!("{verb:?}"));
        let mut batch = Batch::new(places[n].server());
        batch.push(verb);
        match op.submit(batch).await {
            Ok(completed) => {
                let previous = completed.previous(0);
                ensure!(previous == words[n], "{said} found {previous:#x}, but {:#x} was there", words[n]);
                words[n] = after;
            }
            Err(failure) if is_masked && !masked => {
                let unsupported = matches!(failure.error, FabricError::Unsupported { .. });
                ensure!(unsupported, "masked CAS is not claimed; expected Unsupported, got {failure}");
            }
            Err(failure) => return Err(failure.into()),
        }
        let seen = op.read_word(places[n]).await?;
        ensure!(seen == words[n], "after {said} the word is {seen:#x} instead of {:#x}", words[n]);
    }
    // The short forms are the same verbs.
    let addr = places[0];
    op.write_word(addr, 5).await?;
    let seen = (op.cas(addr, 4, 9).await?, op.cas(addr, 5, u64::MAX).await?, op.faa(addr, 2).await?);
    ensure!(seen == (5, 5, u64::MAX), "cas, cas, faa on 5 brought {seen:?}");
    let word = op.read_word(addr).await?;
    ensure!(word == 1, "an FAA of 2 on the greatest word left {word}, not 1");
    Ok(())
}

async fn servers(client: &Client) -> Outcome {
    let op = client.op();
    let mut places = Vec::new();
    for server in 0..client.servers() {
        for word in 0..LOCKS_ZEROED_BYTES / 8 {
            if word % 37 == 0 {
                places.push(client.lock(server, word));
            }
        }
        let here = client.at(server, 0).offset();
        for other in 0..client.servers() {
            // The same offsets on every server, as far as they are ours.
            let there = client.at(other, 0).offset();
            if here == there || client.servers() == 1 {
                places.push(client.at(other, 8 * server as u64));
            }
        }
        places.push(client.at(server, 512));
    }
    places.push(client.board(0));
    places.push(client.board(9));
    places.sort_unstable();
    places.dedup();
    for (n, place) in (1..).zip(&places) {
        op.write_word(*place, n).await?;
    }
    for (n, place) in (1..).zip(&places) {
        let seen = op.read_word(*place).await?;
        ensure!(seen == n, "{place} holds {seen} instead of {n}: another place was taken for it");
    }
    Ok(())
}

async fn dropped(client: &Client) -> Outcome {
    const LENGTHS: [usize; 5] = [8, 24, 100, 1024, 5000];
    for n in 1..=client.rounds.min(500) {
        let len = LENGTHS[client.random_size(LENGTHS.len())];
        let server = client.random_size(client.servers());
        let (at, other) = (client.at(server, 8192), client.at(server, 32_768));
        let data = noise(n, len);
        let op = client.op();
        let mut batch = Batch::new(at.server());
        batch.write(at, client.endpoint.buf_of(&data));
        // The flag comes last, so whoever sees it sees the data.
        let flag = client.at(server, 16_384);
        batch.write_word(flag, n);
        if n % 2 == 0 {
            drop(op.post(batch));
        } else {
            let submitted = pin!(op.submit(batch));
            poll_once(submitted).await;
        }
        drop(op);
        // Buffers that are reused while the WRITE is on its way must not be its own.
        for _ in 0..4 {
            client.endpoint.buf(len).fill(0xee);
        }
        let op = client.op();
        let mut read = Batch::new(other.server());
        read.read(other, len);
        drop(op.post(read));
        for _ in 0..2 {
            client.endpoint.buf(len).fill(0xdd);
        }
        client.until("a detached WRITE to happen", flag, |flag| flag >= n).await?;
        let seen = op.read(at, len).await?;
        ensure!(seen[..] == data, "a detached WRITE of {len} bytes wrote others than it was given");
        let untouched = op.read(other, len).await?;
        ensure!(untouched.iter().all(|byte| *byte == 0), "a dropped READ changed what it read");
    }
    Ok(())
}

async fn tasks(client: &Client) -> Outcome {
    let mut handles = Vec::new();
    for task in 0..16u64 {
        let client = client.clone();
        handles.push(client.endpoint.clone().spawn(async move {
            let server = size(task) % client.servers();
            let slot = u64::from(client.index) * 16 + task;
            let (block, counter) = (client.at(server, slot * 128), client.at(server, 20_480 + slot * 8));
            let mine = mix_of(&client, task);
            for n in 1..=client.rounds {
                let op = client.op();
                let data = super::client::repeat(mine ^ n, 12);
                put(&client, &op, block, &data).await?;
                let before = op.faa(counter, 1).await?;
                ensure!(before == n - 1, "task {task} found its counter at {before} instead of {}", n - 1);
                let seen = get(&client, &op, block, 96).await?;
                let own = words_of(&seen).all(|word| word == mine ^ n);
                ensure!(
                    own,
                    "task {task} wrote {:#x} and read {:x?}",
                    mine ^ n,
                    words_of(&seen).collect::<Vec<_>>()
                );
            }
            Ok::<(), Failure>(())
        }));
    }
    for handle in handles {
        handle.await??;
    }
    Ok(())
}

fn mix_of(client: &Client, task: u64) -> u64 {
    super::client::mix(u64::from(client.index) << 32 | task)
}
