//! A client's queue pairs before they are connected, and what both ends have to know of each other.

use super::device::Domain;
use super::dock::RegionKey;
use super::error::VerbsError;
use super::mailbox::{Mailbox, SLOTS};
use super::queue::{CompletionQueue, Depth, PortAddress, QueuePair};
use super::sender::{FarRegion, FarRegions};
use std::sync::Arc;

/// Requests that a lane has under way.
pub(super) const ROOM: u32 = 512;
/// WRITEs up to so many bytes are handed to the device with the request, if it takes that many.
const INLINE_BYTES: u32 = 256;
/// How many queue pairs a connection has.
pub(super) const LANES: usize = 2;

/// Queue pairs that are not connected yet.
#[derive(Debug)]
pub(crate) struct Offer {
    pub(super) domain: Arc<Domain>,
    pub(super) completions: Arc<CompletionQueue>,
    pub(super) mailbox: Arc<Mailbox>,
    pub(super) lanes: [QueuePair; LANES],
}

impl Offer {
    pub(crate) fn new(domain: &Arc<Domain>, random: u64) -> Result<Self, VerbsError> {
        let lanes = u32::try_from(LANES).unwrap_or(2);
        let completions = CompletionQueue::new(domain.context(), lanes * ROOM + 4 * message_count())?;
        let mailbox = Mailbox::new(domain)?;
        let max = u32::try_from(domain.context().attr().max_qp_wr).unwrap_or(ROOM);
        let depth = |messages: u32| Depth {
            sends: (ROOM + messages).min(max),
            receives: messages.max(1),
            inline_bytes: INLINE_BYTES,
        };
        let psn = u32::try_from(random & 0xff_ffff).unwrap_or(0);
        let short =
            QueuePair::new(domain, &completions, depth(message_count()), psn, Some(Arc::clone(&mailbox)))?;
        let bulk = QueuePair::new(domain, &completions, depth(0), psn ^ 0x55_5555, None)?;
        Ok(Self { domain: Arc::clone(domain), completions, mailbox, lanes: [short, bulk] })
    }

    /// What the server has to know of it.
    pub(crate) fn address(&self) -> PortAddress {
        PortAddress::of(&self.domain, self.lanes.iter())
    }
}

/// How many messages may be under way.
pub(super) fn message_count() -> u32 {
    u32::try_from(SLOTS).unwrap_or(8)
}

/// The server's regions by number, as it named them.
pub(super) fn far_regions(keys: &[RegionKey]) -> FarRegions {
    let mut regions = FarRegions::default();
    for RegionKey { region, base, key } in keys {
        regions[usize::from(region.get())] = FarRegion { base: *base, key: *key };
    }
    regions
}
