//! Asking a gateway how it does: what `farwood stat` does.

use crate::resp::reply::write_bytes;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// How long a gateway may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// Longer answers are not read.
const MAX_BYTES: u64 = 16 << 20;

/// All sections of INFO: names and values, with the section in front (`stats.keyspace_hits`).
pub fn info(gateway: SocketAddr, password: Option<&[u8]>) -> io::Result<Vec<(String, String)>> {
    let mut stream = TcpStream::connect_timeout(&gateway, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut replies = BufReader::new(stream.try_clone()?);
    if let Some(password) = password {
        ask(&mut stream, &mut replies, &[b"AUTH", password])?;
    }
    let text = ask(&mut stream, &mut replies, &[b"INFO", b"everything"])?;
    let mut section = String::new();
    let mut found = Vec::new();
    for line in text.lines() {
        if let Some(name) = line.strip_prefix("# ") {
            section = name.to_ascii_lowercase();
        } else if let Some((name, value)) = line.split_once(':') {
            found.push((format!("{section}.{name}"), value.to_owned()));
        }
    }
    Ok(found)
}

/// Sends one command; its reply, a line or bytes.
fn ask(stream: &mut TcpStream, replies: &mut impl BufRead, arguments: &[&[u8]]) -> io::Result<String> {
    let mut request = format!("*{}\r\n", arguments.len()).into_bytes();
    for argument in arguments {
        write_bytes(&mut request, argument);
    }
    stream.write_all(&request)?;
    let mut line = String::new();
    replies.take(MAX_BYTES).read_line(&mut line)?;
    let line = line.trim_end();
    if let Some(error) = line.strip_prefix('-') {
        return Err(io::Error::other(error.to_owned()));
    }
    let Some(length) = line.strip_prefix('$') else { return Ok(line.to_owned()) };
    let length: u64 = length.parse().map_err(|_| io::Error::other("this is no gateway"))?;
    let mut bytes = Vec::new();
    replies.take(length.min(MAX_BYTES) + 2).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
