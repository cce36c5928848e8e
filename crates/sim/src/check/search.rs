//! Finds out whether one register's operations have an order that explains them: the engine of
//! [`linearizable`](super::linearizable).
//!
//! The search is that of Wing and Gong (1993) with the memory of Lowe (2017):
//!
//! 1. Of the operations not yet ordered, the one that responds first is the *target*: it must be ordered before
//!    anything that was invoked after its response. The *frontier* is every operation invoked before that response.
//! 2. Operations of the frontier that only observe, and agree with the present state, are ordered at once.
//! 3. Try each writer of the frontier that the state admits as the next one, depth first.
//! 4. A configuration (frontier, state, unknown operations used up) from which everything failed is remembered.
//! 5. No target left: linearizable. Everything tried: not linearizable. Too much tried: undecided, and said so.
//!
//! Step 3 would try exponentially many sets. These rules leave branches out; each keeps at least one good order if
//! there is any, by the exchange argument given.
//!
//! - **Observers at once.** Moving an admitted observer forward to now changes no state that another one sees.
//! - **Values nobody will ask about are one value.** If no remaining guard names a value, no remaining operation can
//!   tell it from another such value.
//! - **Of equal writers, the most urgent.** Two writers of the frontier with the same guard and (in the sense above) the
//!   same value can swap places in any order that starts with the less urgent one. Urgency is the response; an unknown
//!   operation has none, so it yields to every equal one, and the earlier invoked goes before the later.
//! - **An unknown operation only where it helps.** Take a good order with the fewest unknown operations. What follows an
//!   unknown one directly was not admitted before it, else the unknown one could be left out. And what follows it
//!   stands before the target, or is it, so it is in the frontier. If the frontier holds nothing that the new state
//!   admits and the old one does not, the unknown operation is not next.
//! - **A value still needed is not left for good.** If an operation still needs the value that a write replaces, and
//!   nothing that can write it again is invoked before that operation's response, the branch is dead. Where all values
//!   differ this alone makes the search nearly linear.
//! - **Fewer used up is better.** What fails with some unknown operations used up fails with more of them used up, or
//!   with equal ones in their stead.

use std::collections::BTreeMap;

use super::{Effect, Guard, Held};

/// What the search found out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// An order was found.
    Linearizable,
    /// There is none.
    NotLinearizable,
    /// The search was given up.
    Undecided,
}

/// What a register holds, as a small number.
pub(super) type State = u32;

/// Nothing.
const ABSENT: State = 0;

/// Any value that no remaining guard names.
const UNNAMED: State = 1;

/// Gives every value of a register a small number.
pub(super) struct Interner<'a> {
    states: BTreeMap<&'a [u8], State>,
    next: State,
}

impl<'a> Interner<'a> {
    pub(super) fn new() -> Self {
        Self { states: BTreeMap::new(), next: UNNAMED + 1 }
    }

    pub(super) fn intern(&mut self, held: Held<'a>) -> State {
        let Some(value) = held else { return ABSENT };
        *self.states.entry(value).or_insert_with(|| {
            self.next += 1;
            self.next - 1
        })
    }

    pub(super) fn intern_effect(&mut self, effect: Effect<Held<'a>>) -> Effect<State> {
        let guard = match effect.guard {
            Guard::Any => Guard::Any,
            Guard::Is(held) => Guard::Is(self.intern(held)),
            Guard::Not(held) => Guard::Not(self.intern(held)),
            Guard::Never => Guard::Never,
        };
        Effect { guard, write: effect.write.map(|held| self.intern(held)) }
    }

    pub(super) fn count(&self) -> usize {
        self.next as usize
    }
}

/// An operation of the search.
pub(super) struct Entry {
    pub(super) invoked: u64,
    pub(super) responded: u64,
    pub(super) effect: Effect<State>,
}

/// Doubly linked rings over node numbers, whose nodes can be put back in the reverse order of their removal (Knuth's
/// dancing links).
struct Rings {
    next: Vec<usize>,
    previous: Vec<usize>,
}

impl Rings {
    /// As many rings of one node each.
    fn new(nodes: usize) -> Self {
        Self { next: (0..nodes).collect(), previous: (0..nodes).collect() }
    }

    /// Appends a node to the ring that starts and ends at `head`.
    fn append(&mut self, head: usize, node: usize) {
        let last = self.previous[head];
        self.next[last] = node;
        self.previous[node] = last;
        self.next[node] = head;
        self.previous[head] = node;
    }

    fn remove(&mut self, node: usize) {
        let (previous, next) = (self.previous[node], self.next[node]);
        self.next[previous] = next;
        self.previous[next] = previous;
    }

    fn restore(&mut self, node: usize) {
        let (previous, next) = (self.previous[node], self.next[node]);
        self.next[previous] = node;
        self.previous[next] = node;
    }

    fn first(&self, head: usize) -> Option<usize> {
        self.after(head, head)
    }

    fn after(&self, node: usize, head: usize) -> Option<usize> {
        let next = self.next[node];
        (next != head).then_some(next)
    }
}

/// A choice of the search: which operation comes next.
struct Frame {
    /// How many operations were ordered when the choice arose.
    ordered: usize,
    /// Where the choices start in `Search::choices`, and the next one to try.
    first: usize,
    next: usize,
}

/// Where the search stands, as far as the future can tell: the frontier not yet ordered, and the state.
type Configuration = (Box<[usize]>, State);

/// The unknown operations used up, as far as the future can tell them apart, sorted.
type UsedUp = Box<[Effect<State>]>;

/// The depth-first search over the orders of one register's operations.
///
/// # Invariants
/// - Everything but `frames`, `choices` and `failed` is a function of `initial state` and `ordered`: undoing the last
///   operation restores it exactly.
/// - Entries below `required` were answered and stand in `timeline`; the others may be ordered or not, and stand in
///   `unused` until they are.
pub(super) struct Search {
    entries: Vec<Entry>,
    required: usize,
    state: State,
    /// The operations ordered so far, each with the state before it.
    ordered: Vec<(usize, State)>,
    /// Invocations (node `2 * entry`) and responses (`2 * entry + 1`) of what must still be ordered, by stamp.
    timeline: Rings,
    /// The unknown operations not used up, by invocation.
    unused: Rings,
    /// The unknown operations used up, in the order of their use.
    used: Vec<usize>,
    /// Per state, what must still be ordered and needs it, by response.
    demand: Rings,
    /// Per state, what may still be ordered and writes it, by invocation.
    supply: Rings,
    /// Per state, how many operations that must still be ordered, or are unknown, name it in their guard. The unknown
    /// ones count even if used up, so that this depends only on the frontier.
    named: Vec<u32>,
    frames: Vec<Frame>,
    choices: Vec<usize>,
    /// Configurations from which everything failed, each with the least that was used up.
    failed: BTreeMap<Configuration, Vec<UsedUp>>,
    failures: usize,
    limit: usize,
}

impl Search {
    /// Sets out from `initial`, with the answered operations, the unknown ones, and how many states there are.
    pub(super) fn new(
        initial: State,
        mut required: Vec<Entry>,
        mut optional: Vec<Entry>,
        states: usize,
        limit: usize,
    ) -> Self {
        required.sort_by_key(|entry| entry.invoked);
        optional.sort_by_key(|entry| entry.invoked);
        let answered = required.len();
        let mut entries = required;
        entries.append(&mut optional);
        let mut search = Self {
            required: answered,
            state: initial,
            ordered: Vec::with_capacity(entries.len()),
            timeline: Rings::new(2 * answered + 1),
            unused: Rings::new(entries.len() + 1),
            used: Vec::new(),
            demand: Rings::new(entries.len() + states),
            supply: Rings::new(entries.len() + states),
            named: vec![0; states],
            frames: Vec::new(),
            choices: Vec::new(),
            failed: BTreeMap::new(),
            failures: 0,
            limit,
            entries,
        };
        search.link();
        search
    }

    /// Fills the rings.
    fn link(&mut self) {
        let mut nodes: Vec<(u64, usize)> = Vec::with_capacity(2 * self.required);
        for (index, entry) in self.entries[..self.required].iter().enumerate() {
            nodes.push((entry.invoked, 2 * index));
            nodes.push((entry.responded, 2 * index + 1));
        }
        nodes.sort_unstable();
        for (_, node) in nodes {
            self.timeline.append(self.timeline_head(), node);
            let index = node / 2;
            // Taken at the response, so that the ring is in order of response.
            if node % 2 == 1
                && let Guard::Is(state) = self.entries[index].effect.guard
            {
                self.demand.append(self.head_of(state), index);
            }
        }
        let mut by_invocation: Vec<usize> = (0..self.entries.len()).collect();
        by_invocation.sort_unstable_by_key(|&index| self.entries[index].invoked);
        for index in by_invocation {
            let effect = self.entries[index].effect;
            if let Some(state) = effect.write {
                self.supply.append(self.head_of(state), index);
            }
            if let Guard::Is(state) | Guard::Not(state) = effect.guard {
                self.named[state as usize] += 1;
            }
            if index >= self.required {
                self.unused.append(self.unused_head(), index);
            }
        }
    }

    fn timeline_head(&self) -> usize {
        2 * self.required
    }

    fn unused_head(&self) -> usize {
        self.entries.len()
    }

    /// The head of a state's ring in `demand` and `supply`.
    fn head_of(&self, state: State) -> usize {
        self.entries.len() + state as usize
    }

    pub(super) fn run(mut self) -> Verdict {
        let states = (0..self.named.len()).filter_map(|state| State::try_from(state).ok());
        if states.filter(|&state| state != self.state).any(|state| self.is_lost(state)) {
            return Verdict::NotLinearizable;
        }
        loop {
            let Some(target) = self.order_observers() else {
                return Verdict::Linearizable;
            };
            if !self.has_failed_before() {
                self.open_frame(target);
            }
            if !self.take_next_choice() {
                return Verdict::NotLinearizable;
            }
            if self.failures > self.limit {
                return Verdict::Undecided;
            }
        }
    }

    /// Orders every observer of the frontier that agrees with the state. Returns the target, if anything is left.
    fn order_observers(&mut self) -> Option<usize> {
        let head = self.timeline_head();
        let mut node = self.timeline.next[head];
        while node != head {
            let index = node / 2;
            if node % 2 == 1 {
                return Some(index);
            }
            let effect = self.entries[index].effect;
            if effect.write.is_none() && effect.guard.admits(self.state) {
                self.order(index);
            }
            node = self.timeline.next[node];
        }
        None
    }

    /// Goes back to the innermost frame that has a choice left, and takes it.
    fn take_next_choice(&mut self) -> bool {
        while let Some(frame) = self.frames.last_mut() {
            let (ordered, first, next) = (frame.ordered, frame.first, frame.next);
            frame.next += 1;
            while self.ordered.len() > ordered {
                self.undo();
            }
            if let Some(&choice) = self.choices.get(next) {
                let left = self.state;
                self.order(choice);
                if self.state == left || !self.is_lost(left) {
                    return true;
                }
            } else {
                self.remember_failure();
                self.choices.truncate(first);
                self.frames.pop();
            }
        }
        false
    }

    /// Makes `index` the next operation of the order.
    fn order(&mut self, index: usize) {
        let Effect { guard, write } = self.entries[index].effect;
        self.ordered.push((index, self.state));
        if index < self.required {
            // The response first: the invocation may stand directly before it and must not keep a link to it.
            self.timeline.remove(2 * index + 1);
            self.timeline.remove(2 * index);
            if let Guard::Is(state) | Guard::Not(state) = guard {
                self.named[state as usize] -= 1;
            }
        } else {
            self.unused.remove(index);
            self.used.push(index);
        }
        self.demand.remove(index);
        self.supply.remove(index);
        self.state = write.unwrap_or(self.state);
    }

    /// Takes the last operation of the order back.
    fn undo(&mut self) {
        let Some((index, state)) = self.ordered.pop() else {
            return;
        };
        self.state = state;
        self.supply.restore(index);
        self.demand.restore(index);
        if index < self.required {
            if let Guard::Is(state) | Guard::Not(state) = self.entries[index].effect.guard {
                self.named[state as usize] += 1;
            }
            self.timeline.restore(2 * index);
            self.timeline.restore(2 * index + 1);
        } else {
            self.unused.restore(index);
            self.used.pop();
        }
    }

    /// Whether something needs a state that the register is not in and cannot get into in time.
    fn is_lost(&self, state: State) -> bool {
        let head = self.head_of(state);
        let Some(needing) = self.demand.first(head) else {
            return false;
        };
        self.supply
            .first(head)
            .is_none_or(|writing| self.entries[writing].invoked > self.entries[needing].responded)
    }

    /// The state as far as the remaining operations can tell it from others.
    fn seen(&self, state: State) -> State {
        if state != ABSENT && self.named[state as usize] == 0 { UNNAMED } else { state }
    }

    /// The frontier, in order of invocation.
    fn frontier(&self) -> impl Iterator<Item = usize> + '_ {
        let head = self.timeline_head();
        std::iter::successors(self.timeline.first(head), move |&node| self.timeline.after(node, head))
            .take_while(|node| node % 2 == 0)
            .map(|node| node / 2)
    }

    /// The unknown operations that could be ordered before the target, in order of invocation.
    fn available(&self, target: usize) -> impl Iterator<Item = usize> + '_ {
        let head = self.unused_head();
        let end = self.entries[target].responded;
        std::iter::successors(self.unused.first(head), move |&node| self.unused.after(node, head))
            .take_while(move |&index| self.entries[index].invoked < end)
    }

    /// Finds what can come next, the most promising first.
    fn open_frame(&mut self, target: usize) {
        let mut choices: Vec<usize> = Vec::new();
        let mut waiting: Vec<Guard<State>> = Vec::new();
        for index in self.frontier() {
            let effect = self.entries[index].effect;
            if !effect.guard.admits(self.state) {
                waiting.push(effect.guard);
            } else if let Some(equal) = choices.iter_mut().find(|other| self.are_equal(index, **other)) {
                if self.entries[index].responded < self.entries[*equal].responded {
                    *equal = index;
                }
            } else {
                choices.push(index);
            }
        }
        let guards = self.available(target).map(|index| self.entries[index].effect.guard);
        waiting.extend(guards.filter(|guard| !guard.admits(self.state)));
        for index in self.available(target) {
            let Effect { guard, write } = self.entries[index].effect;
            let helps = write.is_some_and(|state| waiting.iter().any(|guard| guard.admits(state)));
            if helps && guard.admits(self.state) && !choices.iter().any(|&other| self.are_equal(index, other))
            {
                choices.push(index);
            }
        }
        choices.sort_by_key(|&index| self.rank(index, target));
        let first = self.choices.len();
        self.choices.append(&mut choices);
        self.frames.push(Frame { ordered: self.ordered.len(), first, next: first });
    }

    /// An effect as far as the remaining operations can tell it from others.
    fn seen_effect(&self, index: usize) -> Effect<State> {
        let Effect { guard, write } = self.entries[index].effect;
        Effect { guard, write: write.map(|state| self.seen(state)) }
    }

    /// Whether two writers can stand for each other in any order of what remains.
    fn are_equal(&self, one: usize, other: usize) -> bool {
        self.seen_effect(one) == self.seen_effect(other)
    }

    /// How late to try a choice. Only a matter of speed.
    fn rank(&self, index: usize, target: usize) -> u8 {
        let goal = self.entries[target].effect.guard;
        let Effect { guard, write } = self.seen_effect(index);
        let reaches_goal = write.is_some_and(|state| goal.admits(state));
        let goal_is_reached = goal.admits(self.state);
        let is_required = index < self.required;
        if index == target {
            1
        } else if is_required && guard == Guard::Any && write == Some(UNNAMED) {
            // Nobody asks for the value, so it is best hidden under the next write; but not at the price of one that
            // needs the state as it is.
            if goal_is_reached && goal != Guard::Any { 3 } else { 0 }
        } else if goal_is_reached || !reaches_goal {
            if is_required { 3 } else { 4 }
        } else if is_required {
            1
        } else {
            2
        }
    }

    fn configuration(&self) -> Configuration {
        (self.frontier().collect(), self.seen(self.state))
    }

    fn used_up(&self) -> UsedUp {
        let mut used: UsedUp = self.used.iter().map(|&index| self.seen_effect(index)).collect();
        used.sort_unstable();
        used
    }

    fn has_failed_before(&self) -> bool {
        if self.failed.is_empty() {
            return false;
        }
        let Some(failures) = self.failed.get(&self.configuration()) else {
            return false;
        };
        let used = self.used_up();
        failures.iter().any(|fewer| is_subset(fewer, &used))
    }

    fn remember_failure(&mut self) {
        self.failures += 1;
        let used = self.used_up();
        let failures = self.failed.entry(self.configuration()).or_default();
        failures.retain(|other| !is_subset(&used, other));
        failures.push(used);
    }
}

/// Whether all of `part` is in `whole`, as often as in `part`; both are sorted.
fn is_subset<T: PartialEq>(part: &[T], whole: &[T]) -> bool {
    let mut rest = whole.iter();
    part.iter().all(|wanted| rest.any(|found| found == wanted))
}
