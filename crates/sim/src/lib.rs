//! Whole worlds in virtual time: the harness that every engine is tried in.
//!
//! | module | what it is |
//! |---|---|
//! | [`trial`] | one run: a world, a workload, a fault plan, all from one line of text |
//! | [`spelling`] | what its keys look like |
//! | [`shrink`] | makes a failing trial small |
//! | [`history`] | what clients did and were told |
//! | [`locks`] | spin locks under skew, in cost mode: what published systems show the limits of their NICs with |
//! | [`check`] | one checker per property: linearizable, scans, leaks |
//! | [`mod@reference`] | two tiny structures that take the whole path, and know how to be wrong |

#![forbid(unsafe_code)]

pub mod check;
pub mod history;
pub mod locks;
pub mod reference;
pub mod shrink;
pub mod spelling;
pub mod trial;

pub use trial::{Failure, Report, Trial};
