//! The regions of a server, who may do what in them, and the one check that every verb passes before it is posted.

use crate::addr::{GlobalAddr, RegionId, ServerId};
use crate::error::FabricError;
use std::fmt;

/// What a session may do in a region.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Permissions(u8);

impl Permissions {
    /// Nothing.
    pub const NONE: Permissions = Permissions(0);
    /// READ.
    pub const READ: Permissions = Permissions(1);
    /// WRITE.
    pub const WRITE: Permissions = Permissions(2);
    /// CAS, masked CAS, FAA.
    pub const ATOMIC: Permissions = Permissions(4);
    /// Everything.
    pub const ALL: Permissions = Permissions(7);

    /// Whether all of `needed` is allowed.
    pub const fn allows(self, needed: Permissions) -> bool {
        self.0 & needed.0 == needed.0
    }

    /// What both allow.
    #[must_use]
    pub const fn intersect(self, other: Permissions) -> Permissions {
        Permissions(self.0 & other.0)
    }

    /// The bits, as they travel.
    pub const fn bits(self) -> u8 {
        self.0
    }

    /// From bits that travelled; unknown bits are dropped.
    pub const fn from_bits(bits: u8) -> Self {
        Self(bits & 7)
    }
}

impl fmt::Display for Permissions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = [(Self::READ, "read"), (Self::WRITE, "write"), (Self::ATOMIC, "atomic")];
        let held: Vec<_> = names.iter().filter(|(p, _)| self.allows(*p)).map(|(_, n)| *n).collect();
        f.write_str(if held.is_empty() { "nothing".to_owned() } else { held.join("+") }.as_str())
    }
}

impl fmt::Debug for Permissions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// One region as its server declares it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RegionSpec {
    /// Its number.
    pub id: RegionId,
    /// Its length, a multiple of 8.
    pub bytes: u64,
    /// What clients may do in it.
    pub permissions: Permissions,
}

/// The regions of one server, by number: what a client checks its verbs against.
#[derive(Clone, Default, Debug)]
pub struct RegionTable {
    regions: [Option<RegionSpec>; RegionId::MAX as usize + 1],
}

impl RegionTable {
    /// The table of these regions; a number that comes twice keeps its last entry.
    pub fn new(specs: &[RegionSpec]) -> Self {
        let mut table = Self::default();
        for spec in specs {
            table.regions[spec.id.get() as usize] = Some(*spec);
        }
        table
    }

    /// The same table for somebody who may do at most `mask`.
    #[must_use]
    pub fn restricted_to(&self, mask: Permissions) -> Self {
        let mut table = self.clone();
        for spec in table.regions.iter_mut().flatten() {
            spec.permissions = spec.permissions.intersect(mask);
        }
        table
    }

    /// The region's entry.
    #[inline]
    pub fn get(&self, region: RegionId) -> Option<&RegionSpec> {
        self.regions[region.get() as usize].as_ref()
    }

    /// All regions there are.
    pub fn iter(&self) -> impl Iterator<Item = &RegionSpec> {
        self.regions.iter().flatten()
    }

    /// Whether `len` bytes at `addr` exist and `needed` is allowed there.
    #[inline]
    pub fn check(&self, addr: GlobalAddr, len: u64, needed: Permissions) -> Result<(), FabricError> {
        let Some(spec) = self.get(addr.region()) else {
            return Err(FabricError::UnknownRegion { server: addr.server(), region: addr.region() });
        };
        if len > spec.bytes || addr.offset() > spec.bytes - len || len == 0 {
            return Err(FabricError::OutOfBounds { addr, len, region_bytes: spec.bytes });
        }
        if !spec.permissions.allows(needed) {
            return Err(FabricError::PermissionDenied { addr, needed, held: spec.permissions });
        }
        Ok(())
    }

    /// [`RegionTable::check`] for an atomic, which also has to be aligned.
    #[inline]
    pub fn check_atomic(&self, addr: GlobalAddr) -> Result<(), FabricError> {
        if !addr.is_word_aligned() {
            return Err(FabricError::Misaligned { addr });
        }
        self.check(addr, 8, Permissions::ATOMIC)
    }
}

/// Who a server is, as its handshake says: compared on every connect, so that the order of servers in a URL means
/// nothing and a stranger's memory is never taken for ours.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Identity {
    /// The pool the server belongs to.
    pub pool: PoolId,
    /// Its logical number in the pool.
    pub server: ServerId,
    /// How many servers the pool has.
    pub servers: u16,
    /// Grows by one each time the server starts with empty memory.
    pub incarnation: u32,
    /// How many server processes have started on this memory: a call that must not run twice is not repeated to another one.
    pub life: u64,
    /// Version of the layout of its tables.
    pub format: u32,
    /// Size of a chunk.
    pub chunk_bytes: u64,
    /// Its regions.
    pub regions: Vec<RegionSpec>,
}

impl Identity {
    /// Whether it is the same server with the memory that it had, whichever process serves it.
    pub fn has_memory_of(&self, other: &Self) -> bool {
        *self == Self { life: self.life, ..other.clone() }
    }
}

/// Identity of a pool: 128 random bits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PoolId(pub u128);

impl fmt::Display for PoolId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for PoolId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
