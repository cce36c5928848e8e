//! Changes of the tree's shape: [`split`] with separators and new roots, [`merge`], [`bulk`] load.

mod bulk;
mod merge;
mod split;

pub(super) use split::LostSeparator;
