//! Long work: fetching and storing long values, pages of ranges, long replies. It takes turns, so that short commands do not wait behind it, and so
//! much of it is under way at a time as there is memory for.
//!
//! 1. A command is long if it moves [`LONG_BYTES`] or more. Nobody guesses: an operation that meets a long value asks before it fetches it
//!    ([`Company::limit`](farwood_fabric::Company::limit)), and begins anew when it may. Long requests, and commands about ranges, ask at once.
//! 2. A long command takes [`Room`] for what it may have in its hands, and keeps it until its reply is in its connection's output. Whoever
//!    waits gets room in its turn. What has room never waits for what has none, so room always comes back.
//! 3. It also waits until its reply has room among what clients have (`budget`): those who do not read have to go for that, those who read are
//!    waited for.
//! 4. It is done in pieces, and before each it waits in line ([`Turns::pass`]). Pieces of at most [`TURN_BYTES`] are let through at a time,
//!    in the order in which they came. Who is let through first lets all others run, and the thread look at its sockets: short commands wait
//!    for one piece at most. A turn is over when its piece begins: nobody has one while it waits for anything else.

use farwood_fabric::Executor;
pub(crate) use farwood_fabric::company::LONG_BYTES;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::task::{Poll, Waker};

/// Pieces of so many bytes are let through at a time: about the longest value.
pub(super) const TURN_BYTES: usize = 1 << 20;
/// What a command about one value may have in its hands: the value, a copy, what is to replace it, and what is sent of that.
pub(crate) const VALUE_ROOM_BYTES: usize = 4 * TURN_BYTES;
/// There is room for so much, however little memory there is.
const LEAST_ROOM_BYTES: usize = 2 * VALUE_ROOM_BYTES;

/// The turns of one thread.
#[derive(Clone, Debug)]
pub(crate) struct Turns {
    executor: Executor,
    line: Rc<Line>,
    room: Rc<Line>,
}

/// Who waits for a part of something, in order.
#[derive(Debug)]
struct Line {
    all_bytes: usize,
    free_bytes: Cell<usize>,
    waiting: RefCell<VecDeque<Rc<Waiting>>>,
}

#[derive(Debug)]
struct Waiting {
    bytes: usize,
    waker: RefCell<Option<Waker>>,
    part: RefCell<Option<Part>>,
}

/// A part of what a line gives out; it goes to the next when it is dropped.
#[derive(Debug)]
struct Part {
    bytes: usize,
    line: Rc<Line>,
}

/// Room for what a long command has in its hands, until it is dropped.
#[derive(Debug)]
pub(crate) struct Room(#[expect(dead_code, reason = "it is given back when it is dropped")] Part);

impl Turns {
    /// Those of one thread, on which commands may have so much in their hands.
    pub(super) fn new(executor: &Executor, room_bytes: usize) -> Self {
        let room = Line::new(room_bytes.max(LEAST_ROOM_BYTES));
        Self { executor: executor.clone(), line: Line::new(TURN_BYTES), room }
    }

    /// Waits for the turn of a piece of so many bytes, which is to begin at once.
    pub(crate) async fn pass(&self, bytes: usize) {
        let turn = self.line.take(bytes.clamp(LONG_BYTES, TURN_BYTES)).await;
        self.executor.yield_now().await;
        drop(turn);
    }

    /// Waits for room for a command that may have so much in its hands.
    pub(super) async fn room(&self, bytes: usize) -> Room {
        Room(self.room.take(bytes).await)
    }

    /// How much commands may have in their hands that have room.
    pub(super) fn taken_bytes(&self) -> usize {
        self.room.all_bytes - self.room.free_bytes.get()
    }

    /// Whether there is other long work.
    pub(crate) fn are_wanted(&self) -> bool {
        self.line.free_bytes.get() < TURN_BYTES
    }
}

impl Line {
    fn new(all_bytes: usize) -> Rc<Self> {
        Rc::new(Self { all_bytes, free_bytes: Cell::new(all_bytes), waiting: RefCell::default() })
    }

    /// Waits for so much, or for all that there is.
    async fn take(self: &Rc<Self>, bytes: usize) -> Part {
        let bytes = bytes.min(self.all_bytes);
        let waiting = Rc::new(Waiting { bytes, waker: RefCell::default(), part: RefCell::default() });
        self.waiting.borrow_mut().push_back(Rc::clone(&waiting));
        self.call_next();
        std::future::poll_fn(|context| {
            if let Some(part) = waiting.part.take() {
                return Poll::Ready(part);
            }
            waiting.waker.replace(Some(context.waker().clone()));
            Poll::Pending
        })
        .await
    }

    /// Gives to those who have waited longest, as far as it goes.
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
            next.part.replace(Some(Part { bytes: next.bytes, line: Rc::clone(self) }));
            if let Some(waker) = next.waker.take() {
                waker.wake();
            }
        }
    }
}

impl Drop for Part {
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
        let turns = Turns::new(&executor, 0);
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
    fn room_goes_in_order_and_nobody_asks_for_more_than_there_is() {
        let executor = Executor::new();
        let turns = Turns::new(&executor, 0);
        executor.block_on(async {
            let first = turns.room(VALUE_ROOM_BYTES).await;
            assert_eq!(turns.taken_bytes(), VALUE_ROOM_BYTES);
            let order = Rc::new(RefCell::new(Vec::new()));
            let work = |name, bytes| {
                let (turns, order) = (turns.clone(), Rc::clone(&order));
                executor.spawn(async move {
                    let _room = turns.room(bytes).await;
                    order.borrow_mut().push(name);
                })
            };
            let tasks = [work("all", usize::MAX), work("little", 1)];
            executor.yield_now().await;
            assert!(order.borrow().is_empty(), "nobody overtakes");
            drop(first);
            for task in tasks {
                task.await.expect("it has had room");
            }
            assert_eq!(*order.borrow(), ["all", "little"]);
        });
        assert_eq!(turns.taken_bytes(), 0);
    }

    #[test]
    fn who_waits_no_more_is_passed_over() {
        let executor = Executor::new();
        let turns = Turns::new(&executor, 0);
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
