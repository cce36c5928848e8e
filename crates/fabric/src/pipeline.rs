//! A pipeline: operations that one task polls together, and whose results come out in the order in which they went in. The commands
//! of a client, the keys of an MGET.
//!
//! On transports where the thread carries out verbs itself, futures wait for nothing but memory, for which they make way for each other
//! ([`Company`]); alone, a future is ready as soon as it is first polled. It costs no allocation, since the boxes that futures run in are
//! used again.
//!
//! **Order.** What is started [`Order::InTurn`] takes effect after everything before it has ended. It is polled from the start, so it
//! finds its way down beside the others; before it takes its first lock it waits for its turn ([`Op::turn`](crate::Op::turn)).
//!
//! **Long values.** A [limited](Pipeline::limited) pipeline lets nobody move long values until its owner says so ([`Pipeline::free`]). Only the first
//! that has not ended is asked about: it waits for none of the others, so whoever is free comes to its end.

use crate::clock::Nanos;
use crate::company::Company;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::fmt;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

type Place<F> = Pin<Box<Option<F>>>;

/// Boxes for futures, which those of one thread share.
pub struct Boxes<F> {
    spare: Rc<RefCell<Vec<Place<F>>>>,
    company: Company,
}

/// More boxes are not kept.
const MAX_SPARE: usize = 256;
/// How often those that step aside take turns before other tasks of the thread get one.
const MAX_TURNS: u32 = 64;

impl<F> Boxes<F> {
    /// Boxes for futures on the endpoint with this company.
    pub fn new(company: &Company) -> Self {
        Self { spare: Rc::default(), company: company.clone() }
    }

    fn take(&self) -> Place<F> {
        self.spare.borrow_mut().pop().unwrap_or_else(|| Box::pin(None))
    }

    fn give_back(&self, mut place: Place<F>) {
        place.as_mut().set(None);
        let mut spare = self.spare.borrow_mut();
        if spare.len() < MAX_SPARE {
            spare.push(place);
        }
    }
}

impl<F> Clone for Boxes<F> {
    fn clone(&self) -> Self {
        Self { spare: Rc::clone(&self.spare), company: self.company.clone() }
    }
}

impl<F> fmt::Debug for Boxes<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Boxes({} spare)", self.spare.borrow().len())
    }
}

/// When an operation may take effect.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Order {
    /// At any time.
    Free,
    /// When all that was started before it has ended.
    InTurn,
}

/// Futures under way, each with a tag that says what it is.
pub struct Pipeline<F: Future, T> {
    boxes: Boxes<F>,
    entries: VecDeque<Entry<F, T>>,
    /// Those that have not ended.
    running: usize,
    /// One has stepped aside and is to be polled again, though nobody will wake it.
    any_aside: bool,
    /// Whether they may move long values only when they are told so.
    is_limited: bool,
    /// Until when the task will be woken in any case ([`Op::turn`](crate::Op::turn)).
    alarm: Nanos,
}

struct Entry<F: Future, T> {
    state: State<F>,
    order: Order,
    freedom: Freedom,
    tag: T,
}

/// Whether an operation may move long values.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Freedom {
    /// If it has to, it asks.
    Limited,
    /// It has asked.
    Asks,
    /// It may.
    Free,
}

enum State<F: Future> {
    Running(Place<F>),
    Ended(F::Output),
}

impl<F: Future, T> Pipeline<F, T> {
    /// An empty pipeline.
    pub fn new(boxes: Boxes<F>) -> Self {
        Self { boxes, entries: VecDeque::new(), running: 0, any_aside: false, is_limited: false, alarm: 0 }
    }

    /// The same, where nothing moves long values before it is told so.
    pub fn limited(boxes: Boxes<F>) -> Self {
        Self { is_limited: true, ..Self::new(boxes) }
    }

    /// The tag of the first that has not ended, if that asks whether it may move long values.
    pub fn asking(&mut self) -> Option<&mut T> {
        self.first_running().filter(|entry| entry.freedom == Freedom::Asks).map(|entry| &mut entry.tag)
    }

    /// Lets the first that has not ended move long values. It has to be polled.
    pub fn free(&mut self) {
        if let Some(first) = self.first_running() {
            first.freedom = Freedom::Free;
        }
    }

    fn first_running(&mut self) -> Option<&mut Entry<F, T>> {
        self.entries.iter_mut().find(|entry| matches!(entry.state, State::Running(_)))
    }

    /// How many there are whose results have not come out.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The tags of those that have not ended.
    pub fn running(&self) -> impl Iterator<Item = &T> {
        self.entries.iter().filter(|entry| matches!(entry.state, State::Running(_))).map(|entry| &entry.tag)
    }

    /// Starts a future: it is polled once, and may make way for others if there are any, or `more` to come; so
    /// [`Pipeline::advance`] has to be called before anything is waited for. If it has ended by that and nothing is in front of it, its
    /// output is here at once. It is made where it runs, since futures of engines are kilobytes long and would be copied at every step
    /// on the way.
    #[inline]
    pub fn start(
        &mut self,
        make: impl FnOnce() -> F,
        (tag, order, freedom): (T, Order, Freedom),
        more: bool,
        context: &mut Context<'_>,
    ) -> Option<(F::Output, T)> {
        let mut place = self.boxes.take();
        place.as_mut().set(Some(make()));
        let has_others = more || !self.entries.is_empty();
        let has_turn = order == Order::Free || self.running == 0;
        let company = &self.boxes.company;
        let is_free = !self.is_limited || freedom == Freedom::Free;
        let others = company.change_alarm(self.alarm);
        let ((polled, asks), is_aside) =
            company.poll(has_others, has_turn, || company.limit(is_free, || poll(&mut place, context)));
        self.alarm = company.change_alarm(others);
        let freedom = if asks { Freedom::Asks } else { freedom };
        self.any_aside |= is_aside;
        match polled {
            Poll::Ready(output) => {
                self.boxes.give_back(place);
                if self.entries.is_empty() {
                    return Some((output, tag));
                }
                self.entries.push_back(Entry { state: State::Ended(output), order, freedom, tag });
            }
            Poll::Pending => {
                self.running += 1;
                self.entries.push_back(Entry { state: State::Running(place), order, freedom, tag });
            }
        }
        None
    }

    /// Polls all, again while they step aside for each other, and calls `ended` for those in front that have ended.
    pub fn advance(&mut self, context: &mut Context<'_>, mut ended: impl FnMut(F::Output, T)) {
        for _ in 0..MAX_TURNS {
            self.poll_all(context);
            if !self.any_aside {
                break;
            }
        }
        if self.any_aside {
            context.waker().wake_by_ref();
        }
        while self.entries.front().is_some_and(|entry| matches!(entry.state, State::Ended(_))) {
            if let Some(Entry { state: State::Ended(output), tag, .. }) = self.entries.pop_front() {
                ended(output, tag);
            }
        }
    }

    /// Drops the first that has not ended. If it waits for leave to move a long value, nothing of it has happened.
    pub fn give_up_first(&mut self) {
        let first = self.entries.iter().position(|entry| matches!(entry.state, State::Running(_)));
        if let Some(Entry { state: State::Running(place), .. }) = first.and_then(|at| self.entries.remove(at))
        {
            self.running -= 1;
            self.boxes.give_back(place);
        }
    }

    /// Drops what waits for its turn: nothing of it has happened, and nothing will.
    pub fn give_up_waiting(&mut self) {
        let Some(first) = self.entries.iter().position(|entry| matches!(entry.state, State::Running(_)))
        else {
            return;
        };
        let mut at = first + 1;
        while let Some(entry) = self.entries.get(at) {
            if entry.order == Order::Free || matches!(entry.state, State::Ended(_)) {
                at += 1;
            } else if let Some(Entry { state: State::Running(place), .. }) = self.entries.remove(at) {
                self.running -= 1;
                self.boxes.give_back(place);
            }
        }
    }

    /// Polls all, once, in order: one that ends leaves the next one its turn.
    fn poll_all(&mut self, context: &mut Context<'_>) {
        let (entries, boxes, running) = (&mut self.entries, &self.boxes, &mut self.running);
        self.any_aside = false;
        let is_limited = self.is_limited;
        let mut is_first = true;
        let others = boxes.company.change_alarm(self.alarm);
        for entry in entries {
            let State::Running(place) = &mut entry.state else { continue };
            let has_turn = is_first || entry.order == Order::Free;
            let is_free = !is_limited || entry.freedom == Freedom::Free;
            let company = &boxes.company;
            let ((polled, asks), is_aside) =
                company.poll(*running > 1, has_turn, || company.limit(is_free, || poll(place, context)));
            if asks {
                entry.freedom = Freedom::Asks;
            }
            self.any_aside |= is_aside;
            if let Poll::Ready(output) = polled {
                *running -= 1;
                if let State::Running(place) = std::mem::replace(&mut entry.state, State::Ended(output)) {
                    boxes.give_back(place);
                }
            } else {
                is_first = false;
            }
        }
        self.alarm = boxes.company.change_alarm(others);
    }
}

impl<F: Future, T> fmt::Debug for Pipeline<F, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pipeline({} of {} running)", self.running, self.entries.len())
    }
}

#[inline]
fn poll<F: Future>(place: &mut Place<F>, context: &mut Context<'_>) -> Poll<F::Output> {
    match place.as_mut().as_pin_mut() {
        Some(future) => future.poll(context),
        // Its box is taken back as soon as it has ended, so this is never asked.
        None => Poll::Pending,
    }
}

/// Runs futures, up to `width` of them at a time, and calls `ended` with their outputs, in order. It ends early when `ended` says
/// what went wrong, after those under way have ended.
pub async fn run_all<F: Future, E>(
    company: &Company,
    futures: impl IntoIterator<Item = F>,
    width: usize,
    mut ended: impl FnMut(F::Output) -> Result<(), E>,
) -> Result<(), E> {
    let mut futures = futures.into_iter();
    let mut pipeline = Pipeline::new(Boxes::new(company));
    let mut failed = None;
    let mut is_through = false;
    std::future::poll_fn(|context| {
        loop {
            let mut note = |output: F::Output| {
                if let Err(error) = ended(output) {
                    failed.get_or_insert(error);
                }
            };
            pipeline.advance(context, |output, ()| note(output));
            while !is_through && pipeline.len() < width {
                match futures.next() {
                    Some(future) => {
                        if let Some((output, ())) =
                            pipeline.start(|| future, ((), Order::Free, Freedom::Limited), true, context)
                        {
                            note(output);
                        }
                    }
                    None => is_through = true,
                }
            }
            is_through |= failed.is_some();
            if pipeline.is_empty() && is_through {
                return Poll::Ready(());
            }
            // Those in front may have ended while the last ones were started.
            if !pipeline.any_aside && (is_through || pipeline.running().next().is_some()) {
                return Poll::Pending;
            }
        }
    })
    .await;
    failed.map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Executor;
    use std::cell::Cell;

    /// Ends after a number of polls.
    async fn after(polls: u32, value: u32, under_way: Rc<Cell<(u32, u32)>>) -> u32 {
        let executor = Executor::current().expect("tests run on one");
        let (now, most) = under_way.get();
        under_way.set((now + 1, most.max(now + 1)));
        for _ in 0..polls {
            executor.yield_now().await;
        }
        let (now, most) = under_way.get();
        under_way.set((now - 1, most));
        value
    }

    #[test]
    fn outputs_come_in_order_and_futures_are_under_way_together() {
        let under_way = Rc::new(Cell::new((0, 0)));
        let company = Company::default();
        let mut found = Vec::new();
        let futures = (0..50).map(|n| after((n * 7) % 5, n, Rc::clone(&under_way)));
        let all = run_all(&company, futures, 4, |n| {
            found.push(n);
            Ok::<(), ()>(())
        });
        assert_eq!(Executor::new().block_on(all), Ok(()));
        assert_eq!(found, (0..50).collect::<Vec<_>>());
        assert_eq!(under_way.get(), (0, 4));
    }

    #[test]
    fn what_waits_for_its_turn_can_be_given_up_and_the_rest_ends() {
        let company = Company::default();
        let (begun, ended) = (RefCell::new(Vec::new()), RefCell::new(Vec::new()));
        let mut pipeline = Pipeline::new(Boxes::new(&company));
        let work = async |n: u32| {
            company.turn().await;
            begun.borrow_mut().push(n);
            Executor::current().expect("tests run on one").yield_now().await;
            n
        };
        let mut is_started = false;
        let all = std::future::poll_fn(|context| {
            if !is_started {
                is_started = true;
                for n in 0..6 {
                    let order = if n == 3 { Order::Free } else { Order::InTurn };
                    assert!(
                        pipeline.start(|| work(n), ((), order, Freedom::Limited), true, context).is_none()
                    );
                }
                pipeline.give_up_waiting();
            }
            pipeline.advance(context, |n, ()| ended.borrow_mut().push(n));
            if pipeline.is_empty() { Poll::Ready(()) } else { Poll::Pending }
        });
        Executor::new().block_on(all);
        assert_eq!((&*begun.borrow(), &*ended.borrow()), (&vec![0, 3], &vec![0, 3]));
    }

    #[test]
    fn a_failure_ends_it_but_nothing_is_cut_short() {
        let under_way = Rc::new(Cell::new((0, 0)));
        let company = Company::default();
        let started = Cell::new(0);
        let futures = (0..50).map(|n| {
            started.set(n);
            after(n % 3, n, Rc::clone(&under_way))
        });
        let all = run_all(&company, futures, 8, |n| if n == 10 { Err("ten") } else { Ok(()) });
        assert_eq!(Executor::new().block_on(all), Err("ten"));
        assert!(started.get() < 49 && under_way.get().0 == 0, "{started:?} {under_way:?}");
    }
}
