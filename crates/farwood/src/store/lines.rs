//! Pairs as lines of text: CSV and JSON.
//!
//! ```text
//! key,value                                  {"key":"a","value":"1"}
//! a,1                                        {"key":"b","value":"2","expires_at_ms":1893456000000}
//! b,2,1893456000000
//! ```
//!
//! The third column is there for values that expire. Keys and values are spelled as `--keys` and `--values` say.

use serde::{Deserialize, Serialize};
use std::io::{BufRead, Write};
use std::str::FromStr;

/// How pairs are written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Format {
    Csv,
    Json,
}

impl FromStr for Format {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "csv" => Ok(Self::Csv),
            "json" | "jsonl" => Ok(Self::Json),
            _ => Err(format!("there is no format '{name}'; there are csv and json")),
        }
    }
}

/// A pair, spelled.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub(super) struct Line {
    pub(super) key: String,
    pub(super) value: String,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(super) expires_at_ms: Option<i64>,
}

impl Format {
    /// Writes what stands above all lines.
    pub(super) fn write_head(self, out: &mut impl Write) -> std::io::Result<()> {
        match self {
            Self::Csv => out.write_all(b"key,value\n"),
            Self::Json => Ok(()),
        }
    }

    pub(super) fn write(self, line: &Line, out: &mut impl Write) -> std::io::Result<()> {
        match self {
            Self::Csv => {
                let expires = line.expires_at_ms.map_or(String::new(), |at| format!(",{at}"));
                writeln!(out, "{},{}{expires}", quoted(&line.key), quoted(&line.value))
            }
            Self::Json => {
                serde_json::to_writer(&mut *out, line)?;
                out.write_all(b"\n")
            }
        }
    }

    /// The next line; `None` at the end. CSV begins with a head, which is skipped.
    pub(super) fn read(self, input: &mut impl BufRead, is_first: bool) -> Result<Option<Line>, String> {
        match self {
            Self::Json => loop {
                let mut text = String::new();
                if input.read_line(&mut text).map_err(|error| error.to_string())? == 0 {
                    return Ok(None);
                }
                if !text.trim().is_empty() {
                    return serde_json::from_str(&text).map(Some).map_err(|error| error.to_string());
                }
            },
            Self::Csv => {
                let Some(mut record) = read_record(input)? else { return Ok(None) };
                let is_head = record.first().is_some_and(|first| first == "key")
                    && record.get(1).is_some_and(|second| second == "value");
                if is_first && is_head {
                    match read_record(input)? {
                        Some(next) => record = next,
                        None => return Ok(None),
                    }
                }
                let mut fields = record.into_iter();
                match (fields.next(), fields.next(), fields.next(), fields.next()) {
                    (Some(key), Some(value), expires, None) => {
                        let expires_at_ms = expires.filter(|text| !text.is_empty());
                        let expires_at_ms = expires_at_ms.map(|text| text.parse()).transpose();
                        let expires_at_ms =
                            expires_at_ms.map_err(|_| "the third column is no time in milliseconds")?;
                        Ok(Some(Line { key, value, expires_at_ms }))
                    }
                    _ => Err("a line has a key, a value, and perhaps a time in milliseconds".to_owned()),
                }
            }
        }
    }
}

/// A field of CSV (RFC 4180): in quotes if it has to be.
fn quoted(field: &str) -> String {
    let is_plain = !field.is_empty() && !field.contains(['"', ',', '\n', '\r']) && field.trim() == field;
    if is_plain { field.to_owned() } else { format!("\"{}\"", field.replace('"', "\"\"")) }
}

/// The fields of the next record of CSV, which may go on over several lines inside quotes. Empty lines are skipped.
fn read_record(input: &mut impl BufRead) -> Result<Option<Vec<String>>, String> {
    let mut text = String::new();
    loop {
        if input.read_line(&mut text).map_err(|error| error.to_string())? == 0 {
            return if text.trim().is_empty() { Ok(None) } else { Err("a quote does not end".to_owned()) };
        }
        if text.trim().is_empty() {
            text.clear();
        } else if text.bytes().filter(|byte| *byte == b'"').count() % 2 == 0 {
            return split_record(text.trim_end_matches(['\r', '\n'])).map(Some);
        }
    }
}

fn split_record(text: &str) -> Result<Vec<String>, String> {
    let (mut fields, mut rest) = (Vec::new(), text);
    loop {
        let (field, behind) = if let Some(inside) = rest.strip_prefix('"') {
            take_quoted(inside)?
        } else {
            let end = rest.find(',').unwrap_or(rest.len());
            (rest[..end].to_owned(), &rest[end..])
        };
        fields.push(field);
        match behind.strip_prefix(',') {
            Some(next) => rest = next,
            None if behind.is_empty() => return Ok(fields),
            None => return Err("a comma has to follow a closing quote".to_owned()),
        }
    }
}

/// What is inside quotes, and what is behind them.
fn take_quoted(mut rest: &str) -> Result<(String, &str), String> {
    let mut field = String::new();
    loop {
        let end = rest.find('"').ok_or("a quote does not end")?;
        field.push_str(&rest[..end]);
        rest = &rest[end + 1..];
        match rest.strip_prefix('"') {
            Some(more) => {
                field.push('"');
                rest = more;
            }
            None => return Ok((field, rest)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read_all(format: Format, text: &str) -> Result<Vec<Line>, String> {
        let mut input = text.as_bytes();
        let mut lines = Vec::new();
        while let Some(line) = format.read(&mut input, lines.is_empty())? {
            lines.push(line);
        }
        Ok(lines)
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(
            pairs in prop::collection::vec(("[ab,\"\n\r é]{0,6}", "[ab,\"\n\r 0]{0,6}", prop::option::of(any::<i64>())), 0..8),
            is_csv in any::<bool>(),
        ) {
            let format = if is_csv { Format::Csv } else { Format::Json };
            let lines: Vec<Line> =
                pairs.into_iter().map(|(key, value, expires_at_ms)| Line { key, value, expires_at_ms }).collect();
            let mut text = Vec::new();
            format.write_head(&mut text).expect("it fits");
            for line in &lines {
                format.write(line, &mut text).expect("it fits");
            }
            prop_assert_eq!(read_all(format, &String::from_utf8_lossy(&text)), Ok(lines));
        }
    }

    #[test]
    fn what_is_no_pair_is_refused() {
        for wrong in ["a\n", "a,b,c\n", "a,b,1,2\n", "\"a,b\n", "\"a\"b,c\n"] {
            assert!(read_all(Format::Csv, wrong).is_err(), "{wrong}");
        }
        for wrong in ["a,b\n", "{\"key\":\"a\"}\n", "{\"key\":\"a\",\"value\":\"b\",\"other\":1}\n"] {
            assert!(read_all(Format::Json, wrong).is_err(), "{wrong}");
        }
        assert_eq!(read_all(Format::Csv, "a,b\n\n").map(|lines| lines.len()), Ok(1), "a head is not needed");
    }
}
