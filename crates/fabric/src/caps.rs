//! What a transport can do beyond the contract's minimum: asked, never guessed.

/// The capabilities of a transport to one pool. A `false` or 0 means: do not rely on it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a question of its own")]
pub struct Capabilities {
    /// CAS with separate masks for compare and swap.
    pub masked_cas: bool,
    /// Bytes of lock memory on each server.
    pub lock_memory_bytes: u64,
    /// Aligned 64-byte lines are read and written atomically (by litmus test, not by promise of the contract).
    pub line_atomic: bool,
    /// A READ or WRITE of at most this many bytes touches its lines in order of increasing address; 0: no order.
    /// A size, because published code found the order to hold at 1 KiB and to break at 4 KiB.
    pub ordered_lines_bytes: u32,
    /// READs of one batch take effect in order.
    pub ordered_reads: bool,
    /// The caller's thread carries out verbs itself, at once: a round trip costs no more than touching memory.
    pub immediate: bool,
    /// The most verbs that one batch may have.
    pub max_batch: usize,
    /// Calls to other sessions are possible.
    pub session_calls: bool,
}
