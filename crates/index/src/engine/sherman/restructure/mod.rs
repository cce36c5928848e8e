//! Changes of the tree's shape: [`split`] with separators, the [`root`] up and down, [`merge`], [`bulk`] load.

mod bulk;
mod merge;
mod root;
mod split;

pub(super) use split::LostSeparator;
