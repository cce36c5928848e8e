//! What a memory server says of itself, for people and for what watches it: `farwood status`.
//!
//! Anybody who may connect may ask, without a session, and of one server of a pool alone. Counts are those since the server
//! started; they are taken while it works, so that two of them need not belong to the same moment.

use crate::clock::Nanos;
use crate::control::{IndexId, IndexInfo, SessionInfo};
use crate::region::Identity;
use crate::wire::{wire_enum, wire_struct};
use std::fmt;

/// Everything that a server says of itself.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ServerStatus {
    /// Who it is.
    pub identity: Identity,
    /// How long it has been up.
    pub up_ns: Nanos,
    /// What its memory is made of.
    pub pages: Pages,
    /// What its tables hold.
    pub tables: Tables,
    /// Who uses it, and how much.
    pub traffic: Traffic,
}
wire_struct!(ServerStatus { identity, up_ns, pages, tables, traffic });

wire_enum! {
    /// The pages that a server's memory is mapped by, which decide how often an access misses the translation cache.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    #[non_exhaustive]
    pub enum Pages {
        /// The system's usual ones.
        Small = 1 {
            /// Their size.
            page_bytes: u64,
        },
        /// Those, and large ones where the system found some.
        Transparent = 2 {
            /// So much is in large ones.
            large_bytes: u64,
            /// Of so much in all.
            of_bytes: u64,
        },
        /// Large ones that were set aside for such a purpose (hugetlbfs).
        Huge = 3 {
            /// Their size.
            page_bytes: u64,
        },
        /// A device's own.
        Device = 4 {},
    }
}

impl fmt::Display for Pages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Small { page_bytes } => write!(f, "pages of {} KiB", page_bytes >> 10),
            Self::Transparent { large_bytes, of_bytes } => {
                let percent = large_bytes * 100 / (*of_bytes).max(1);
                write!(f, "{percent}% in large pages, as far as the system found some")
            }
            Self::Huge { page_bytes } => write!(f, "huge pages of {} MiB", page_bytes >> 20),
            Self::Device {} => f.write_str("a device's own pages"),
        }
    }
}

/// What a server's logic knows.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Tables {
    /// Chunks of main memory, and how many of them are free for any use.
    pub chunks: u64,
    /// Those that are free for any use.
    pub free_chunks: u64,
    /// How many sessions there can be at a time.
    pub max_sessions: u16,
    /// How long a session lives without a heartbeat; 0: for ever.
    pub lease_ns: Nanos,
    /// (Coordinator) The pool's epoch.
    pub epoch: u64,
    /// The sessions that are known here.
    pub sessions: Vec<SessionInfo>,
    /// (Coordinator) The catalog.
    pub indexes: Vec<IndexInfo>,
    /// How many cores procedures may use.
    pub cores: u16,
    /// Procedures that run, and that wait to.
    pub running: u32,
    /// Those that wait.
    pub queued: u32,
    /// (Other servers) The server came back empty: indexes with numbers below this have lost what they had on it. At most 1: none.
    pub lost_below: IndexId,
    /// The memory was not whole when it was taken over, and has not been formatted since.
    pub torn: Option<Torn>,
}
wire_struct!(Tables {
    chunks,
    free_chunks,
    max_sessions,
    lease_ns,
    epoch,
    sessions,
    indexes,
    cores,
    running,
    queued,
    lost_below,
    torn
});

/// What is known of memory that was taken over although it was not whole.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Torn {
    /// So many pieces did not have the checksum that they were closed with.
    pub failed: u32,
    /// Of so many; 0: it was not closed, so that any page may be of any age.
    pub pieces: u32,
    /// Entries of tables, and headers of chunks, that made no sense.
    pub dropped: u32,
    /// Chunks that nobody can say anything about, so that they are never used again.
    pub set_aside: u32,
    /// Indexes that have something in what may be other than it was.
    pub indexes: Vec<IndexId>,
}
wire_struct!(Torn { failed, pieces, dropped, set_aside, indexes });

impl fmt::Display for Torn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { failed, pieces, dropped, set_aside, indexes } = self;
        match pieces {
            0 => f.write_str("it was not closed, so that any page may be of any age")?,
            _ => write!(f, "{failed} of {pieces} pieces are not what they were")?,
        }
        write!(f, "; {dropped} entries of tables made no sense, {set_aside} chunk(s) are set aside")?;
        if indexes.is_empty() {
            return f.write_str("; no index has anything there");
        }
        let indexes: Vec<_> = indexes.iter().map(|id| format!("#{id}")).collect();
        write!(f, "; it concerns index {}", indexes.join(", "))
    }
}

/// Who uses a server, and how much.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Traffic {
    /// Processes that map its memory.
    pub mapping: u32,
    /// Processes that reach it over a network.
    pub far: u32,
    /// Endpoints of sessions that may use its memory.
    pub endpoints: u32,
    /// Those of them whose verbs the server carries out.
    pub connections: u32,
    /// Calls that came.
    pub calls: u64,
    /// Batches that the server carried out. Those who map the memory carry out theirs themselves, and nobody counts them.
    pub batches: u64,
    /// Verbs in them.
    pub verbs: u64,
    /// Bytes that came with them.
    pub bytes_in: u64,
    /// Bytes that went back.
    pub bytes_out: u64,
}
wire_struct!(Traffic { mapping, far, endpoints, connections, calls, batches, verbs, bytes_in, bytes_out });
