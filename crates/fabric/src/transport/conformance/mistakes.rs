//! Users of the fabric that get it wrong, under the same checks as the scenarios: where the transport makes use of its
//! freedom (the simulator always does, real threads for some), each of them must be caught. They test the test.

use super::client::{Client, Outcome, ensure, repeat, words_of};
use super::order::{Litmus, Locking, Publish, Receive, count_under_lock, pass, two_words};
use super::{Scenario, atomics, fencing, scenario, words};
use crate::addr::{GlobalAddr, SessionId};

pub(super) fn scenarios() -> Vec<Scenario> {
    vec![
        scenario!("mistakes/flag_first", clients 3, flag_first, "the flag is written before the data"),
        scenario!("mistakes/two_batches", clients 3, two_batches, "data and flag go in two batches, which have no order"),
        scenario!("mistakes/unordered_reads", clients 3, unordered_reads,
            "flag and data are read in one batch where READs have no order"),
        scenario!("mistakes/read_too_early", clients 2, read_too_early, "the READ is posted before the WRITE completed"),
        scenario!("mistakes/no_lock", clients 4, no_lock, "a counter is incremented without its lock"),
        scenario!("mistakes/read_and_write", clients 4, read_and_write, "an FAA is made of a READ and a WRITE"),
        scenario!("mistakes/whole_words", clients 4, whole_words,
            "part of a word is written by writing back the whole word"),
        scenario!("mistakes/long_read", clients 2, long_read, "a READ of many words is taken for atomic"),
        scenario!("mistakes/no_fence", clients 2, doomed 1, no_fence, "a session is taken for fenced that is not"),
    ]
}

async fn flag_first(client: &Client) -> Outcome {
    pass(client, Publish::FlagFirst, Receive::AsPromised).await
}

async fn two_batches(client: &Client) -> Outcome {
    pass(client, Publish::TwoBatches, Receive::AsPromised).await
}

async fn unordered_reads(client: &Client) -> Outcome {
    pass(client, Publish::WriteWrite, Receive::OneBatch).await
}

async fn read_too_early(client: &Client) -> Outcome {
    two_words(client, Litmus::StoreTooLate).await
}

async fn no_lock(client: &Client) -> Outcome {
    count_under_lock(client, Locking::Not, 3).await
}

async fn read_and_write(client: &Client) -> Outcome {
    atomics::add_up(client, async |op, addr| {
        let before = op.read_word(addr).await?;
        op.write_word(addr, before + 1).await?;
        Ok(before)
    })
    .await
}

async fn whole_words(client: &Client) -> Outcome {
    words::own_parts(client, async |client, op, addr, data| {
        let inside = addr.offset() % 16;
        let base = GlobalAddr::from_raw(addr.to_raw() - inside);
        let mut bytes = op.read(base, 16).await?;
        let from = super::client::size(inside);
        bytes[from..from + data.len()].copy_from_slice(data);
        op.write(base, client.endpoint.buf_of(&bytes)).await?;
        Ok(())
    })
    .await
}

async fn long_read(client: &Client) -> Outcome {
    const WORDS: usize = 64;
    let block = client.at(0, 0);
    for n in 1..=client.rounds * 4 {
        let op = client.op();
        if client.index == 0 {
            op.write(block, client.endpoint.buf_of(&repeat(n, WORDS))).await?;
            continue;
        }
        let bytes = op.read(block, WORDS * 8).await?;
        let first = bytes.word(0);
        ensure!(
            words_of(&bytes).all(|word| word == first),
            "a READ of {WORDS} words brought parts of two WRITEs"
        );
    }
    Ok(())
}

async fn no_fence(client: &Client) -> Outcome {
    let id = client.board(0);
    if client.index == 1 {
        client.tell(id, u64::from(client.session.id().get())).await?;
        return fencing::keep_writing(client).await;
    }
    let victim = client.until("the victim", id, |id| id != 0).await?;
    fencing::fence_and_watch(client, SessionId::new(u16::try_from(victim)?), false).await
}
