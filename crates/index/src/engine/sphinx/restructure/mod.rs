//! Changes of the tree's shape.

mod bulk;
mod replace;
mod split;

pub(super) use split::common_bytes;
