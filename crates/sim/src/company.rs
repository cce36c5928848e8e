//! Operations that one task polls in turns, as a gateway does with the commands of a pipeline: they make way for each other
//! ([`Company`]) where a thread carries out verbs itself.

use farwood_fabric::{Company, marks};
use std::future::Future;
use std::pin::Pin;
use std::task::Poll;

/// How often those that step aside take turns before other tasks get one.
const MAX_TURNS: u32 = 64;

/// Runs futures on the endpoint with this company, all at once; their outputs, in order.
pub async fn run_all<F: Future>(company: &Company, futures: Vec<F>) -> Vec<F::Output> {
    let mut running: Vec<Option<Pin<Box<F>>>> =
        futures.into_iter().map(|future| Some(Box::pin(future))).collect();
    let mut outputs: Vec<Option<F::Output>> = running.iter().map(|_| None).collect();
    std::future::poll_fn(|context| {
        for _ in 0..MAX_TURNS {
            let mut left = running.iter().flatten().count();
            let mut any_aside = false;
            for (place, output) in running.iter_mut().zip(&mut outputs) {
                let Some(future) = place else { continue };
                let (polled, is_aside) = company.poll(left > 1, true, || future.as_mut().poll(context));
                if is_aside {
                    marks::hit("stepped_aside");
                    any_aside = true;
                }
                if let Poll::Ready(ended) = polled {
                    (*place, *output, left) = (None, Some(ended), left - 1);
                }
            }
            if left == 0 {
                return Poll::Ready(());
            }
            if !any_aside {
                return Poll::Pending;
            }
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
    outputs.into_iter().flatten().collect()
}
