//! How many files a process may have open.

use rustix::process::{Resource, getrlimit, setrlimit};

/// Asks the system for room for so many open files. A client is an open file, and systems let a process have few unless it asks. If there
/// are to be no more, accepting says so.
pub fn raise_limit(files: u64) {
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current.is_some_and(|current| current < files) {
        limit.current = Some(limit.maximum.map_or(files, |most| most.min(files)));
        let _ = setrlimit(Resource::Nofile, limit);
    }
}
