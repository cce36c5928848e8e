//! Addresses in far memory: which server, which region, which byte.
//!
//! ```text
//! GlobalAddr  63          52 51    48 47                                   0
//!             [ server 12 ] [ region 4 ] [ offset 48 ]
//! PackedAddr  47          36 35                                            0     (main memory only)
//!             [ server 12 ] [ offset / 64, 36 ]
//! ```
//!
//! A server number is *logical*: a view (see [`crate::transport::View`]) says which process answers to it, so an
//! address stays valid when a server moves. Offset 0 of main memory is never handed out, so the all-zero address
//! can mean "none".

use std::fmt;

/// Logical number of a memory server: 12 bits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServerId(u16);

impl ServerId {
    /// The greatest number a server can have.
    pub const MAX: u16 = (1 << 12) - 1;
    /// The server that keeps the pool's sessions, epochs and catalog.
    pub const COORDINATOR: ServerId = ServerId(0);

    /// A server number.
    ///
    /// # Panics
    /// If `id` exceeds [`ServerId::MAX`]; numbers from outside go through `try_from`.
    pub const fn new(id: u16) -> Self {
        assert!(id <= Self::MAX, "a server id has 12 bits");
        Self(id)
    }

    /// The number itself.
    pub const fn get(self) -> u16 {
        self.0
    }

    /// The number as an index into a table of servers.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl TryFrom<u16> for ServerId {
    type Error = u16;

    fn try_from(id: u16) -> Result<Self, u16> {
        if id <= Self::MAX { Ok(Self(id)) } else { Err(id) }
    }
}

impl fmt::Display for ServerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "m{}", self.0)
    }
}

impl fmt::Debug for ServerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Number of a region within its server: 4 bits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct RegionId(u8);

impl RegionId {
    /// The greatest number a region can have.
    pub const MAX: u8 = (1 << 4) - 1;
    /// Main memory: the chunks that hold indexes.
    pub const MAIN: RegionId = RegionId(0);
    /// Lock memory: small, the NIC's on-chip memory where there is one.
    pub const LOCK: RegionId = RegionId(1);
    /// The server's own tables (superblock, chunk table, session table, catalog): clients only read it.
    pub const META: RegionId = RegionId(2);
    /// What clients leave for each other: index anchors, session journals.
    pub const BOARD: RegionId = RegionId(3);

    /// A region number.
    ///
    /// # Panics
    /// If `id` exceeds [`RegionId::MAX`].
    pub const fn new(id: u8) -> Self {
        assert!(id <= Self::MAX, "a region id has 4 bits");
        Self(id)
    }

    /// The number itself.
    pub const fn get(self) -> u8 {
        self.0
    }
}

impl fmt::Display for RegionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::MAIN => f.write_str("main"),
            Self::LOCK => f.write_str("lock"),
            Self::META => f.write_str("meta"),
            Self::BOARD => f.write_str("board"),
            RegionId(other) => write!(f, "region{other}"),
        }
    }
}

/// A byte in far memory: server, region, offset in 64 bits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GlobalAddr(u64);

const OFFSET_BITS: u32 = 48;
const REGION_BITS: u32 = 4;
const OFFSET_MASK: u64 = (1 << OFFSET_BITS) - 1;
const _: () = assert!(OFFSET_BITS + REGION_BITS + 12 == 64);

impl GlobalAddr {
    /// No address.
    pub const NULL: GlobalAddr = GlobalAddr(0);
    /// The greatest offset within a region.
    pub const MAX_OFFSET: u64 = OFFSET_MASK;

    /// The address of byte `offset` of `region` on `server`.
    ///
    /// # Panics
    /// If the offset does not fit 48 bits: no region is that large, so the caller's arithmetic is wrong.
    pub const fn new(server: ServerId, region: RegionId, offset: u64) -> Self {
        assert!(offset <= OFFSET_MASK, "an offset has 48 bits");
        Self(((server.0 as u64) << (OFFSET_BITS + REGION_BITS)) | ((region.0 as u64) << OFFSET_BITS) | offset)
    }

    /// The address that the 64 bits name; every value names one.
    pub const fn from_raw(raw: u64) -> Self {
        Self(raw)
    }

    /// The 64 bits.
    pub const fn to_raw(self) -> u64 {
        self.0
    }

    /// Which server.
    pub const fn server(self) -> ServerId {
        ServerId((self.0 >> (OFFSET_BITS + REGION_BITS)) as u16)
    }

    /// Which region of it.
    pub const fn region(self) -> RegionId {
        RegionId(((self.0 >> OFFSET_BITS) & ((1 << REGION_BITS) - 1)) as u8)
    }

    /// Which byte of the region.
    pub const fn offset(self) -> u64 {
        self.0 & OFFSET_MASK
    }

    /// Whether this is [`GlobalAddr::NULL`].
    pub const fn is_null(self) -> bool {
        self.0 == 0
    }

    /// The address `bytes` further on in the same region.
    ///
    /// # Panics
    /// If that leaves the 48 bits of an offset.
    #[must_use]
    pub const fn add(self, bytes: u64) -> Self {
        assert!(bytes <= OFFSET_MASK - self.offset(), "an offset has 48 bits");
        Self(self.0 + bytes)
    }

    /// Whether the address is a multiple of 8, as an atomic needs.
    pub const fn is_word_aligned(self) -> bool {
        self.0 % 8 == 0
    }
}

impl fmt::Display for GlobalAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_null() {
            return f.write_str("null");
        }
        write!(f, "{}:{}+{:#x}", self.server(), self.region(), self.offset())
    }
}

impl fmt::Debug for GlobalAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A 64-byte-aligned address in main memory, in 48 bits: for structures that pack an address with other bits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PackedAddr(u64);

/// What a [`PackedAddr`] is aligned to.
pub const PACKED_ALIGN: u64 = 64;
const PACKED_OFFSET_BITS: u32 = 36;

impl PackedAddr {
    /// No address.
    pub const NULL: PackedAddr = PackedAddr(0);
    /// How many low bits of a word a packed address takes.
    pub const BITS: u32 = PACKED_OFFSET_BITS + 12;

    /// Packs `addr`; `None` if it is not in main memory, not 64-byte aligned, or beyond 4 TiB.
    pub const fn pack(addr: GlobalAddr) -> Option<Self> {
        let line = addr.offset() / PACKED_ALIGN;
        if addr.region().0 != RegionId::MAIN.0
            || addr.offset() % PACKED_ALIGN != 0
            || line >= 1 << PACKED_OFFSET_BITS
        {
            return None;
        }
        Some(Self(((addr.server().0 as u64) << PACKED_OFFSET_BITS) | line))
    }

    /// The address in the low 48 bits of `raw`; the other bits are ignored.
    pub const fn from_raw(raw: u64) -> Self {
        Self(raw & ((1 << Self::BITS) - 1))
    }

    /// The 48 bits.
    pub const fn to_raw(self) -> u64 {
        self.0
    }

    /// The full address.
    pub const fn unpack(self) -> GlobalAddr {
        let server = self.0 >> PACKED_OFFSET_BITS;
        let line = self.0 & ((1 << PACKED_OFFSET_BITS) - 1);
        // Region 0 is main memory, so its four bits stay clear.
        GlobalAddr((server << (OFFSET_BITS + REGION_BITS)) | (line * PACKED_ALIGN))
    }

    /// Whether this is [`PackedAddr::NULL`].
    pub const fn is_null(self) -> bool {
        self.0 == 0
    }
}

impl fmt::Debug for PackedAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.unpack(), f)
    }
}

/// A session: one compute server as the memory servers know it. 16 bits, as in a lock word.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(u16);

impl SessionId {
    /// Nobody: the owner of a free lock, the sender of a call before there is a session.
    pub const NONE: SessionId = SessionId(0);

    /// A session by its number.
    pub const fn new(id: u16) -> Self {
        Self(id)
    }

    /// The number itself.
    pub const fn get(self) -> u16 {
        self.0
    }

    /// Whether this is [`SessionId::NONE`].
    pub const fn is_none(self) -> bool {
        self.0 == 0
    }
}

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "s{}", self.0)
    }
}

impl fmt::Debug for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn global_address_keeps_its_parts(server in 0..=ServerId::MAX, region in 0..=RegionId::MAX, offset in 0..=GlobalAddr::MAX_OFFSET) {
            let addr = GlobalAddr::new(ServerId::new(server), RegionId::new(region), offset);
            prop_assert_eq!(addr.server().get(), server);
            prop_assert_eq!(addr.region().get(), region);
            prop_assert_eq!(addr.offset(), offset);
            prop_assert_eq!(GlobalAddr::from_raw(addr.to_raw()), addr);
        }

        #[test]
        fn packing_is_exact_or_refused(raw in any::<u64>()) {
            let addr = GlobalAddr::from_raw(raw);
            let fits = addr.region() == RegionId::MAIN && addr.offset() % 64 == 0 && addr.offset() < 1 << 42;
            match PackedAddr::pack(addr) {
                Some(packed) => {
                    prop_assert!(fits);
                    prop_assert_eq!(packed.unpack(), addr);
                    prop_assert_eq!(PackedAddr::from_raw(packed.to_raw() | 0xabcd << 48), packed);
                }
                None => prop_assert!(!fits),
            }
        }
    }
}
