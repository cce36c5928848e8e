//! What comes from outside: mutated frames, and requests that ask for what is not theirs. `FARWOOD_FRAMES=10000000` for more.

use super::buffer::{Outgoing, first_frame};
use super::pieces::Sending;
use super::scope::{Bench, REGION_BYTES, SERVER};
use super::verbs::{BATCH, FENCED, MAX_PAYLOAD_BYTES, MAX_REQUEST_BYTES, Request, VERB_BYTES, take_head};
use crate::addr::{GlobalAddr, RegionId};
use crate::buf::BufPool;
use crate::verb::{Batch, Output};

fn frames(usual: u64) -> u64 {
    std::env::var("FARWOOD_FRAMES").ok().and_then(|text| text.parse().ok()).unwrap_or(usual)
}

/// A batch of a few verbs within bounds.
fn batch(rng: &mut fastrand::Rng, pool: &BufPool) -> Batch {
    let mut batch = Batch::new(SERVER);
    for _ in 0..rng.usize(1..6) {
        let len = rng.usize(1..200);
        let at = GlobalAddr::new(SERVER, RegionId::MAIN, rng.u64(..REGION_BYTES - 200) & !7);
        match rng.u8(..5) {
            0 => batch.read(at, len),
            1 => batch.write(at, pool.take(len)),
            2 => batch.cas(at, rng.u64(..), rng.u64(..)),
            3 => batch.faa(at, 1),
            _ => batch.write_word(at, rng.u64(..)),
        };
    }
    batch
}

fn encoded(batch: Batch) -> Vec<u8> {
    let mut out = Outgoing::default();
    Sending::new(batch.verbs).next(0, &mut out);
    out.unsent().to_vec()
}

#[test]
fn mutated_frames_are_carried_out_within_bounds_or_refused() {
    let (bench, pool) = (Bench::new(), BufPool::default());
    let mut rng = fastrand::Rng::with_seed(5);
    let (mut done, mut refused) = (0u64, 0u64);
    bench.mark(0x5ec2_e75e_c2e7_5ec2);
    for _ in 0..frames(100_000) {
        let mut frame = encoded(batch(&mut rng, &pool));
        for _ in 0..rng.usize(1..4) {
            let at = rng.usize(..frame.len());
            match rng.u8(..4) {
                0 => frame[at] = rng.u8(..),
                1 => frame[at] ^= 1 << rng.u8(..8),
                2 => frame.truncate(at.max(1)),
                _ => frame.insert(at, rng.u8(..)),
            }
        }
        let mut out = Outgoing::default();
        match first_frame(&frame, MAX_REQUEST_BYTES) {
            Ok(Some(request)) => match bench.reach.execute(request, &bench.memory, &mut out) {
                Ok(_) => done += 1,
                Err(refusal) => {
                    assert!(out.is_empty() && !refusal.to_string().is_empty());
                    refused += 1;
                }
            },
            Ok(None) | Err(_) => refused += 1,
        }
        assert!(out.len() <= MAX_PAYLOAD_BYTES + 4096);
    }
    assert!(bench.is_unharmed(0x5ec2_e75e_c2e7_5ec2));
    assert!(done > 0 && refused > 0, "{done} done, {refused} refused");
    // Whatever came, the gate is free: a fence would not wait.
    bench.gate.close(None);
}

#[test]
fn forged_requests_touch_nothing_that_is_not_theirs() {
    const SECRET_BYTE: u8 = 0xee;
    let bench = Bench::new();
    bench.mark(u64::from_le_bytes([SECRET_BYTE; 8]));
    let mut rng = fastrand::Rng::with_seed(6);
    let mut refused = 0u64;
    let rounds = frames(1_000_000);
    for _ in 0..rounds {
        let region = *rng.choice([0u8, 0, 2, 9, 1, 3, 15].iter()).expect("some");
        let offset = match rng.u8(..4) {
            0 => rng.u64(..REGION_BYTES),
            1 => REGION_BYTES - rng.u64(..64),
            2 => REGION_BYTES + rng.u64(..REGION_BYTES),
            _ => rng.u64(..1 << 48),
        };
        let kind = rng.u8(..7);
        let length = match rng.u8(..4) {
            0 => rng.u32(..64),
            1 => 8,
            2 => rng.u32(..1 << 20),
            _ => u32::MAX - rng.u32(..64),
        };
        let mut frame = vec![BATCH, 1, 0, 0, 7, 0, 0, 0];
        let mut verb = [0; VERB_BYTES];
        (verb[0], verb[1]) = (kind, region);
        verb[4..8].copy_from_slice(&length.to_le_bytes());
        verb[8..].copy_from_slice(&offset.to_le_bytes());
        frame.extend(verb);
        let operands = match kind {
            2 => length.min(4096) as usize,
            3 => 16,
            4 => 32,
            5 => 8,
            _ => 0,
        };
        frame.extend(std::iter::repeat_n(0x11, operands));
        let mut out = Outgoing::default();
        match bench.reach.execute(&frame, &bench.memory, &mut out) {
            Ok(_) => {
                let len = u64::from(if matches!(kind, 1 | 2) { length } else { 8 });
                let fits = offset.checked_add(len).is_some_and(|end| end <= REGION_BYTES);
                let may = region == 0 || (region == 2 && kind == 1);
                assert!(fits && may, "kind {kind}, region {region}, {length} bytes at {offset} were touched");
                let is_secret = region == 0 && out.unsent()[12..].contains(&SECRET_BYTE);
                assert!(!is_secret, "bytes of somebody else were read");
            }
            Err(_) => refused += 1,
        }
    }
    assert!(bench.is_unharmed(u64::from_le_bytes([SECRET_BYTE; 8])));
    assert!(refused > rounds / 2 && refused < rounds, "{refused} of {rounds} were refused");
}

/// What goes out as frames and comes back as replies is what a batch does on memory.
#[test]
fn batches_survive_the_wire_in_one_frame_or_many() {
    let (bench, pool) = (Bench::new(), BufPool::default());
    let at = |offset| GlobalAddr::new(SERVER, RegionId::MAIN, offset);
    let mut batch = Batch::new(SERVER);
    batch.write(at(5), pool.copy_of(&[7; 3000]));
    batch.cas(at(4096), 0, 9);
    batch.faa(at(4096), 1);
    batch.read(at(3), 3005);
    // So many that they do not fit into one frame, in more verbs than bytes of memory.
    for _ in 0..120 {
        batch.read(at(1), 8190);
    }
    let mut sending = Sending::new(batch.verbs);
    let mut outputs = sending.outputs(&pool);
    let mut frames = 0;
    loop {
        let (mut request, mut reply) = (Outgoing::default(), Outgoing::default());
        let piece = sending.next(frames, &mut request);
        let frame = first_frame(request.unsent(), MAX_REQUEST_BYTES).expect("not too long").expect("whole");
        bench.reach.execute(frame, &bench.memory, &mut reply).expect("it is allowed");
        let mut rest = &reply.unsent()[4..];
        assert_eq!(take_head(&mut rest).map(|(kind, _, sequence)| (kind, sequence)), Ok((BATCH, frames)));
        piece.land(rest, &mut outputs).expect("as long as expected");
        frames += 1;
        if piece.is_last {
            break;
        }
    }
    assert!(frames > 3, "{frames} frames");
    assert!(matches!(&outputs[1], Output::Previous(0)) && matches!(&outputs[2], Output::Previous(9)));
    let Output::Bytes(read) = &outputs[3] else { panic!("a READ brings bytes") };
    assert!(read[..2] == [0, 0] && read[2..3002].iter().all(|byte| *byte == 7) && read[3002..] == [0, 0, 0]);
    for output in &outputs[4..] {
        let Output::Bytes(read) = output else { panic!("a READ brings bytes") };
        assert!(read[4095] == 10 && read[4] == 7);
    }
}

#[test]
fn behind_a_closed_gate_nothing_is_carried_out() {
    let (bench, pool) = (Bench::new(), BufPool::default());
    bench.gate.close(None);
    let mut batch = Batch::new(SERVER);
    batch.write(GlobalAddr::new(SERVER, RegionId::MAIN, 0), pool.copy_of(&[1; 64]));
    let frame = encoded(batch);
    assert!(Request::check(&frame[4..], SERVER, &bench.reach.table).is_ok());
    let mut out = Outgoing::default();
    bench.reach.execute(&frame[4..], &bench.memory, &mut out).expect("it makes sense");
    assert_eq!(out.unsent()[4], FENCED);
    assert_eq!(bench.memory.region(RegionId::MAIN).word(0).load(std::sync::atomic::Ordering::SeqCst), 0);
}
