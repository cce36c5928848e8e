//! How the tests of `probe` and `litmus` run the binary and read what it leaves.

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};

pub(crate) fn farwood(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_farwood")).args(arguments).output().expect("the binary runs")
}

/// A file for one result, removed afterwards.
#[derive(Debug)]
pub(crate) struct JsonPath(PathBuf);

impl JsonPath {
    pub(crate) fn new() -> Self {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let n = MADE.fetch_add(1, Ordering::Relaxed);
        Self(std::env::temp_dir().join(format!("farwood-test-{}-{n}.json", std::process::id())))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    pub(crate) fn text(&self) -> &str {
        self.0.to_str().expect("a plain name")
    }
}

impl Drop for JsonPath {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Runs a command that must succeed; its JSON.
pub(crate) fn json_of(command: &str, arguments: &[&str]) -> Value {
    let path = JsonPath::new();
    let output = farwood(&[&[command], arguments, &["--json", path.text()]].concat());
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{command} {arguments:?}: {stderr}");
    let text = std::fs::read_to_string(path.path()).expect("a result");
    serde_json::from_str(&text).expect("JSON")
}

/// Runs a command that must be refused, in one line and before any work.
pub(crate) fn refused(command: &str, arguments: &[&str], expected: &str) {
    let output = farwood(&[&[command], arguments].concat());
    let utf8 = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (stdout, stderr) = (utf8(&output.stdout), utf8(&output.stderr));
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {stdout}{stderr}");
    assert!(stdout.is_empty(), "{arguments:?}: {stdout}");
    assert!(stderr.starts_with("farwood: ") && stderr.lines().count() == 1, "{arguments:?}: {stderr}");
    assert!(stderr.contains(expected), "{arguments:?}: {stderr}");
}
