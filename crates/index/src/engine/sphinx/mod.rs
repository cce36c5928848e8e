//! Sphinx (Li et al.): an adaptive radix tree with a hash table of its inner nodes and a succinct filter of their prefixes.
//!
//! | file | what it is |
//! |---|---|
//! | `table/` | the inner node hash table of one memory server (III-A) |
//! | `filter` | the succinct filter cache of a compute server (III-B) |

pub mod filter;
pub mod table;
