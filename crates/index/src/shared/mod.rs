//! What two or more engines use, and nothing else.
//!
//! | module | what it is |
//! |---|---|
//! | [`whole`] | proof that an object was read whole, on every transport |
//! | [`lock`] | the 64-bit remote lock word |
//! | `locks` | tables of remote locks with local queues in front, and what becomes of a dead session's |
//! | [`heap`] | remote objects: allocation, safe reuse, what a dead session left behind |
//! | [`intents`] | what a session is in the middle of, so that others can finish it |
//! | `opening` | whether operations on an index may begin: not if it is dropped, or the session leaves |
//! | `boxed` | large futures on the heap |
//! | [`surely`] | verbs that are repeated through lost completions |

pub(crate) mod boxed;
pub mod heap;
pub mod intents;
pub mod lock;
pub(crate) mod locks;
pub(crate) mod opening;
pub mod surely;
pub mod whole;
