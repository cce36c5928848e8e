//! Nodes and leaves as bytes.
