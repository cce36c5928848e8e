//! Whole worlds in virtual time: the harness that every engine is tried in.
//!
//! | module | what it is |
//! |---|---|
//! | [`trial`] | one run: a world, a workload, a fault plan, all from one line of text |
//! | [`spelling`] | what its keys look like |
//! | [`mix`] | what one client does |
//! | [`company`] | several operations at once in one task |
//! | [`threads`] | the same on threads and processes of real transports |
//! | [`shrink`] | makes a failing trial small |
//! | [`history`] | what clients did and were told |
//! | [`locks`] | spin locks under skew, in cost mode: what published systems show the limits of their NICs with |
//! | [`check`] | one checker per property: linearizable, scans, leaks |
//! | [`mod@reference`] | two tiny structures that take the whole path, and know how to be wrong |

#![forbid(unsafe_code)]

pub mod check;
pub mod company;
pub mod history;
pub mod locks;
pub mod mix;
pub mod reference;
pub mod shrink;
pub mod spelling;
pub mod threads;
pub mod trial;

pub use trial::{Failure, Report, Trial};
