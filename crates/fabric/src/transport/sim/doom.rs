//! Deaths at marks: the process that hits a mark for the time that the plan names is doomed. The world buries it before its
//! next verb or call, or when its task has yielded, whichever comes first.
//!
//! Marks are hit in the middle of a poll, and sometimes while the world is at work, so all this does is take notes.

use super::faults::{Fault, FaultPlan};
use super::world::server_of;
use crate::exec::{DRIVER, GroupId};
use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Who dies at which mark.
pub(super) struct Doom {
    watches: RefCell<Vec<Watch>>,
    /// Everybody who was doomed, in order; the first so many of them are buried.
    doomed: RefCell<Vec<GroupId>>,
    buried: Cell<usize>,
    /// Raised when the runner has something to do.
    ordered: Arc<AtomicBool>,
}

struct Watch {
    fault: Fault,
    hits: u64,
    has_struck: bool,
}

impl Doom {
    pub(super) fn new(plan: &FaultPlan, ordered: Arc<AtomicBool>) -> Self {
        let at_marks = plan.faults.iter().filter(|fault| matches!(fault, Fault::KillAtMark { .. }));
        let watches = at_marks.map(|fault| Watch { fault: *fault, hits: 0, has_struck: false }).collect();
        Self { watches: RefCell::new(watches), doomed: RefCell::default(), buried: Cell::new(0), ordered }
    }

    /// Whether any mark kills.
    pub(super) fn is_watching(&self) -> bool {
        !self.watches.borrow().is_empty()
    }

    /// A process has hit a mark. The driver never dies of it, nor does a memory server.
    pub(super) fn hit(&self, group: GroupId, name: &str) {
        if group == DRIVER || server_of(group).is_some() || self.is_doomed(group) {
            return;
        }
        for watch in &mut *self.watches.borrow_mut() {
            let Fault::KillAtMark { client, mark, nth } = watch.fault else { continue };
            let is_meant = client.is_none_or(|client| client.checked_add(1) == Some(group));
            if !is_meant || mark.as_str() != name {
                continue;
            }
            watch.hits += 1;
            if watch.hits == nth {
                watch.has_struck = true;
                if !self.is_doomed(group) {
                    self.doomed.borrow_mut().push(group);
                }
                self.ordered.store(true, Ordering::Relaxed);
            }
        }
    }

    /// Whether a process has hit a mark that kills it.
    pub(super) fn is_doomed(&self, group: GroupId) -> bool {
        self.doomed.borrow().contains(&group)
    }

    /// The next one to be buried.
    pub(super) fn next(&self) -> Option<GroupId> {
        let next = self.doomed.borrow().get(self.buried.get()).copied();
        if next.is_some() {
            self.buried.set(self.buried.get() + 1);
        }
        next
    }

    /// The faults by which somebody died.
    pub(super) fn struck(&self) -> Vec<Fault> {
        let watches = self.watches.borrow();
        watches.iter().filter(|watch| watch.has_struck).map(|watch| watch.fault).collect()
    }
}
