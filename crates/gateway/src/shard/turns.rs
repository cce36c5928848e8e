//! Long work takes turns, so that short commands do not wait behind it: fetching and storing long values, pages of ranges, and sending
//! long replies.
//!
//! 1. Work is long if it moves [`LONG_BYTES`] or more, or is expected to: the last work of that client did, or nothing is known of the client.
//! 2. It is done in pieces, and before each it waits in line ([`Turns::pass`]). Pieces of at most [`TURN_BYTES`] are let through at a time,
//!    in the order in which they came.
//! 3. Who is let through first lets all others run, and the thread look at its sockets. So short commands wait for one piece at most.
//!
//! A turn is over when its piece begins: nobody has one while it waits for anything else. Whoever waits for one has no operation under way
//! that is not polled meanwhile.

use farwood_fabric::Executor;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::task::{Poll, Waker};

/// What moves so many bytes is long.
pub(crate) const LONG_BYTES: usize = 64 << 10;
/// Pieces of so many bytes are let through at a time: about the longest value.
const TURN_BYTES: usize = 1 << 20;

/// The turns of one thread.
#[derive(Clone, Debug)]
pub(crate) struct Turns {
    executor: Executor,
    line: Rc<Line>,
}

#[derive(Debug)]
struct Line {
    free_bytes: Cell<usize>,
    waiting: RefCell<VecDeque<Rc<Waiting>>>,
}

#[derive(Debug)]
struct Waiting {
    bytes: usize,
    waker: RefCell<Option<Waker>>,
    turn: RefCell<Option<Turn>>,
}

/// The right to be let through; it goes to the next when it is dropped.
#[derive(Debug)]
struct Turn {
    bytes: usize,
    line: Rc<Line>,
}

impl Turns {
    pub(super) fn new(executor: &Executor) -> Self {
        let line = Line { free_bytes: Cell::new(TURN_BYTES), waiting: RefCell::default() };
        Self { executor: executor.clone(), line: Rc::new(line) }
    }

    /// Waits for the turn of a piece of so many bytes, which is to begin at once.
    pub(crate) async fn pass(&self, bytes: usize) {
        let bytes = bytes.clamp(LONG_BYTES, TURN_BYTES);
        let waiting = Rc::new(Waiting { bytes, waker: RefCell::default(), turn: RefCell::default() });
        self.line.waiting.borrow_mut().push_back(Rc::clone(&waiting));
        self.line.call_next();
        let turn = std::future::poll_fn(|context| {
            if let Some(turn) = waiting.turn.take() {
                return Poll::Ready(turn);
            }
            waiting.waker.replace(Some(context.waker().clone()));
            Poll::Pending
        })
        .await;
        self.executor.yield_now().await;
        drop(turn);
    }

    /// Whether there is other long work: then what is not known to be short is expected to be long.
    pub(crate) fn are_wanted(&self) -> bool {
        self.line.free_bytes.get() < TURN_BYTES
    }
}

impl Line {
    /// Gives turns to those who have waited longest, as far as they go.
    fn call_next(self: &Rc<Self>) {
        loop {
            let next = {
                let mut waiting = self.waiting.borrow_mut();
                // Who waits no more has dropped the other reference.
                while waiting.front().is_some_and(|next| Rc::strong_count(next) == 1) {
                    waiting.pop_front();
                }
                match waiting.front() {
                    Some(next) if next.bytes <= self.free_bytes.get() => waiting.pop_front(),
                    _ => None,
                }
            };
            let Some(next) = next else { return };
            self.free_bytes.set(self.free_bytes.get() - next.bytes);
            next.turn.replace(Some(Turn { bytes: next.bytes, line: Rc::clone(self) }));
            if let Some(waker) = next.waker.take() {
                waker.wake();
            }
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.line.free_bytes.set(self.line.free_bytes.get() + self.bytes);
        self.line.call_next();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_go_in_order_as_far_as_their_bytes_go_and_others_run_first() {
        let executor = Executor::new();
        let turns = Turns::new(&executor);
        let order = Rc::new(RefCell::new(Vec::new()));
        let work = |name: &'static str, bytes: Option<usize>| {
            let (turns, order) = (turns.clone(), Rc::clone(&order));
            executor.spawn(async move {
                if let Some(bytes) = bytes {
                    turns.pass(bytes).await;
                }
                order.borrow_mut().push(name);
            })
        };
        executor.block_on(async {
            let all = [
                work("half", Some(TURN_BYTES / 2)),
                work("quarter", Some(TURN_BYTES / 4)),
                work("all", Some(usize::MAX)),
                work("little", Some(1)),
                work("short", None),
            ];
            executor.yield_now().await;
            assert!(turns.are_wanted());
            for one in all {
                one.await.expect("it has had its turn");
            }
        });
        assert_eq!(*order.borrow(), ["short", "half", "quarter", "all", "little"]);
        assert!(!turns.are_wanted());
    }

    #[test]
    fn who_waits_no_more_is_passed_over() {
        let executor = Executor::new();
        let turns = Turns::new(&executor);
        executor.block_on(async {
            let poll_once = async |pass: &mut std::pin::Pin<Box<dyn Future<Output = ()> + '_>>| {
                std::future::poll_fn(|context| Poll::Ready(pass.as_mut().poll(context).is_pending())).await
            };
            // The first has its turn, the others wait.
            let mut passes: Vec<std::pin::Pin<Box<dyn Future<Output = ()>>>> =
                (0..3).map(|_| Box::pin(turns.pass(usize::MAX)) as _).collect();
            for pass in &mut passes {
                assert!(poll_once(pass).await);
            }
            drop(passes.remove(1));
            drop(passes.remove(0));
            passes.remove(0).await;
        });
        assert!(!turns.are_wanted());
    }
}
