//! What the measuring commands leave behind: an aligned table for people, and a JSON file for programs.

use farwood_fabric::Capabilities;
use serde::Serialize;
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

/// Rows of text, aligned when printed: the first column and the last to the left, the others to the right.
#[derive(Default, Debug)]
pub(crate) struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn new(heads: &[&str]) -> Self {
        Self { rows: vec![heads.iter().map(|head| (*head).to_owned()).collect()] }
    }

    pub(crate) fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }

    /// The table as text; trailing blanks are cut.
    pub(crate) fn lines(&self) -> Vec<String> {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            self.rows
                .iter()
                .filter_map(|row| row.get(column))
                .map(|cell| cell.chars().count())
                .max()
                .unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let line = |row: &Vec<String>| {
            let cells = row.iter().zip(&widths).enumerate().map(|(column, (cell, width))| {
                if column == 0 || column + 1 == columns {
                    format!("{cell:<width$}")
                } else {
                    format!("{cell:>width$}")
                }
            });
            cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
        };
        self.rows.iter().map(line).collect()
    }

    pub(crate) fn print(&self, out: &mut impl Write) -> io::Result<()> {
        self.lines().iter().try_for_each(|line| writeln!(out, "{line}"))
    }
}

/// A file that will hold the result. It is opened before the work, so that a typing mistake does not cost an hour.
#[derive(Debug)]
pub(crate) struct JsonFile {
    name: String,
    file: File,
}

impl JsonFile {
    /// Opens the file, if one was named. What it holds stays until there is a result.
    pub(crate) fn open(path: Option<&Path>) -> Result<Option<Self>, String> {
        let Some(path) = path else { return Ok(None) };
        let name = path.display().to_string();
        let opened = File::options().write(true).create(true).truncate(false).open(path);
        let file = opened.map_err(|error| format!("--json: cannot write {name}: {error}"))?;
        Ok(Some(Self { name, file }))
    }

    /// Replaces what the file holds by the result.
    pub(crate) fn write(mut self, result: &impl Serialize) -> Result<(), String> {
        let failed = |error: io::Error| format!("--json: cannot write {}: {error}", self.name);
        let mut text = serde_json::to_vec_pretty(result).map_err(|error| failed(error.into()))?;
        text.push(b'\n');
        // A terminal or a pipe has no length; that is no reason to fail.
        let _ = self.file.set_len(0);
        self.file.write_all(&text).map_err(failed)
    }
}

/// What the transport says of itself.
#[derive(Serialize, Clone, Copy, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a question of its own")]
pub(crate) struct Claims {
    masked_cas: bool,
    lock_memory_bytes: u64,
    line_atomic: bool,
    ordered_lines_bytes: u32,
    ordered_reads: bool,
    max_batch: usize,
    session_calls: bool,
}

impl From<Capabilities> for Claims {
    fn from(capabilities: Capabilities) -> Self {
        Self {
            masked_cas: capabilities.masked_cas,
            lock_memory_bytes: capabilities.lock_memory_bytes,
            line_atomic: capabilities.line_atomic,
            ordered_lines_bytes: capabilities.ordered_lines_bytes,
            ordered_reads: capabilities.ordered_reads,
            max_batch: capabilities.max_batch,
            session_calls: capabilities.session_calls,
        }
    }
}

/// Real time that the command took.
#[derive(Serialize, Debug)]
pub(crate) struct Wall {
    pub(crate) seconds: f64,
}

/// Whoever reads the table may have gone (`| head`); that is no failure.
pub(crate) fn unless_broken_pipe(written: io::Result<()>) -> Result<(), String> {
    match written {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(format!("cannot write the result: {error}"))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned() {
        let mut table = Table::new(&["verb", "p50", "rate"]);
        table.row(vec!["READ".into(), "1.00 us".into(), "9".into()]);
        table.row(vec!["masked CAS".into(), "7 ns".into(), "12345".into()]);
        assert_eq!(
            table.lines(),
            ["verb            p50  rate", "READ        1.00 us  9", "masked CAS     7 ns  12345",]
        );
    }

    #[test]
    fn a_shorter_result_replaces_a_longer_one_whole() {
        let path = std::env::temp_dir().join(format!("farwood-report-{}.json", std::process::id()));
        for result in [vec![1; 100], vec![2]] {
            JsonFile::open(Some(&path)).unwrap().unwrap().write(&result).unwrap();
        }
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(serde_json::from_str::<Vec<u32>>(&text).unwrap(), [2]);
    }
}
