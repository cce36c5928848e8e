//! What power cuts, disks and people do to a file: pages come back from earlier, are lost, or change places; the end is cut off.
//!
//! Only what counts is torn: the header, its checksums, and the regions; gates and the gaps between regions mean nothing to the next server.

use crate::world::{BOOT, OTHER_BOOT, Snapshots};
use farwood_fabric::transport::serve::{BootId, NotWhole, ServeError};

const PAGE: usize = 4096;
/// The header: two slots, then checksums. Then tables and the rest, each from a multiple of 2 MiB on.
const HEADER_AT: usize = 1 << 20;
const SUMS_END: usize = HEADER_AT + 3 * PAGE;
const TABLES_AT: usize = 2 << 20;

#[derive(Clone, Copy, Debug)]
enum How {
    /// Pages of an earlier time.
    Older,
    /// Pages without anything in them.
    Lost,
    /// Pages that have changed places.
    Swapped,
    /// The end is cut off.
    Cut,
}

/// What is done to a file.
pub(crate) struct Tear<'a> {
    snapshots: &'a Snapshots,
    random: fastrand::Rng,
    how: How,
    was_closed: bool,
    boot: BootId,
}

/// The file after that.
pub(crate) struct Torn {
    pub(crate) bytes: Vec<u8>,
    /// The start of the machine under which it is found.
    pub(crate) boot: BootId,
    pub(crate) what: String,
}

impl<'a> Tear<'a> {
    pub(crate) fn of(snapshots: &'a Snapshots, round: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(round);
        let how = *random
            .choice(&[How::Older, How::Older, How::Lost, How::Swapped, How::Cut])
            .unwrap_or(&How::Older);
        let was_closed = random.bool();
        // Pages of memory in use are torn by a power cut alone.
        let boot = if was_closed && random.bool() { BOOT } else { OTHER_BOOT };
        Self { snapshots, random, how, was_closed, boot }
    }

    pub(crate) fn carry_out(mut self) -> Torn {
        let whole = if self.was_closed { &self.snapshots.closed } else { &self.snapshots.killed };
        let mut bytes = whole.clone();
        while bytes == *whole {
            self.tear(&mut bytes);
        }
        let what = format!("{:?}, closed {}, boot {:?}", self.how, self.was_closed, self.boot);
        Torn { bytes, boot: self.boot, what }
    }

    fn tear(&mut self, bytes: &mut Vec<u8>) {
        // Under the same boot a header that is replaced is nobody's doing but a person's.
        let with_header = self.boot == OTHER_BOOT;
        let old = if self.random.bool() { &self.snapshots.closed_before } else { &self.snapshots.in_use };
        let pages: Vec<usize> = (if with_header { HEADER_AT } else { TABLES_AT }..bytes.len())
            .step_by(PAGE)
            .filter(|at| *at < SUMS_END || *at >= TABLES_AT)
            .filter(|at| counts(&self.snapshots.closed, old, bytes, *at))
            .collect();
        let most = self.random.usize(1..=8);
        for _ in 0..most {
            let at = pages[self.random.usize(0..pages.len())];
            match self.how {
                How::Older => bytes[at..at + PAGE].copy_from_slice(&old[at..at + PAGE]),
                How::Lost => bytes[at..at + PAGE].fill(0),
                How::Swapped => {
                    let other = pages[self.random.usize(0..pages.len())];
                    for n in 0..PAGE {
                        bytes.swap(at + n, other + n);
                    }
                }
                How::Cut => {
                    let length = self.random.usize(1..bytes.len() / PAGE) * PAGE;
                    bytes.truncate(length);
                    return;
                }
            }
        }
    }
}

/// Whether a page says anything: one that is empty and always was is the same wherever it comes from, and so is the slot of the header
/// that does not count.
fn counts(closed: &[u8], old: &[u8], now: &[u8], at: usize) -> bool {
    let page = |bytes: &'_ [u8]| bytes[at..at + PAGE].iter().any(|byte| *byte != 0);
    let is_slot = (HEADER_AT..HEADER_AT + 2 * PAGE).contains(&at);
    if is_slot { page(now) } else { page(now) || page(old) || page(closed) }
}

/// A word for the reason why a server refuses a file.
pub(crate) fn reason(error: &ServeError) -> &'static str {
    match error {
        ServeError::NotWhole { why, .. } => match why {
            NotWhole::InUse => "in use",
            NotWhole::Copied => "copied",
            NotWhole::Pieces { .. } => "pieces",
            NotWhole::Checksums => "checksums",
            NotWhole::NoHeader => "no header",
            NotWhole::Length { .. } => "length",
            _ => "other",
        },
        ServeError::OtherShape { .. } => "no header, other length",
        other => panic!("refused for another reason: {other}"),
    }
}

/// Whether not even `accept_torn` helps.
pub(crate) fn is_hopeless(error: &ServeError) -> bool {
    matches!(error, ServeError::OtherShape { .. } | ServeError::Start(_))
}
