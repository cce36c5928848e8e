//! Bulk load: builds the tree from sorted pairs.
