//! What `serve` and `up` are told of memory that is kept, and what `up` knows of all files of a folder together.
//!
//! Each file says by itself how it was left; that it is an older copy than the files beside it, it cannot know. So `up` counts the openings
//! of a folder, gives that number to all its servers, and writes it into the folder's record once all of them have it, before a client
//! comes. A file with a lower number than the record's is an old copy. When all files have been closed, the record says so: a file that
//! is still in use then is a copy made while it was.

use farwood_fabric::ServerId;
use farwood_fabric::transport::serve::{BootId, KeepOptions, LastOpening, Left, left};
use farwood_fabric::transport::shm::memory_in;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// The start of the machine, for tests of what happens after another one: 32 hexadecimal digits.
const BOOT_VARIABLE: &str = "FARWOOD_BOOT_ID";

#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Keeping {
    /// Use the memory of --path although it is not whole: end what was under way, drop what makes no sense, and say so for as long as it is
    /// used. Run `farwood check --repair` on each index then
    #[arg(long, requires = "path")]
    pub(crate) accept_torn: bool,

    /// The number of this opening of the memory, and of the last one, by who counts for a whole pool
    #[arg(long, hide = true, requires = "path", value_name = "N")]
    opening: Option<u64>,

    #[arg(long, hide = true, requires = "opening", value_name = "N")]
    last_opening: Option<u64>,

    /// Whether the last one was closed on all servers
    #[arg(long, hide = true, requires = "last_opening")]
    last_was_closed: bool,
}

impl Keeping {
    /// How the memory is to be taken over.
    pub(crate) fn options(&self) -> Result<KeepOptions, String> {
        let boot = match std::env::var(BOOT_VARIABLE) {
            Ok(text) => {
                let boot = text.parse::<BootId>();
                Some(boot.map_err(|_| format!("{BOOT_VARIABLE} has 32 hexadecimal digits, not '{text}'"))?)
            }
            Err(_) => None,
        };
        let was_closed = self.last_was_closed;
        let last = self.last_opening.map(|number| LastOpening { number, was_closed });
        Ok(KeepOptions { boot, accept_torn: self.accept_torn, opening: self.opening, last })
    }
}

/// How the memory of a folder was left, as its record says.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
struct Openings {
    /// The last opening that all servers have; 0: there was none.
    number: u64,
    /// The last one that was tried: some servers may have it.
    tried: u64,
    /// All memory has been closed since.
    is_closed: bool,
}

impl Openings {
    /// As it stands in the record.
    fn text(self) -> String {
        format!("opening={} tried={} closed={}", self.number, self.tried, self.is_closed)
    }

    fn parse(text: &str) -> Option<Self> {
        let mut words = text.split_whitespace();
        let mut field = |name: &str| words.next()?.strip_prefix(name)?.strip_prefix('=');
        let number = field("opening")?.parse().ok()?;
        let tried = field("tried")?.parse().ok()?;
        Some(Self { number, tried, is_closed: field("closed")?.parse().ok()? })
    }

    /// The next opening is about to be tried, of files that were left like this.
    fn begin(self, left: &[Option<Left>]) -> Self {
        let found = left.iter().flatten().map(|left| left.opening).max().unwrap_or(0);
        Self { tried: self.tried.max(found) + 1, ..self }
    }

    /// All servers have the one that was tried.
    fn done(self) -> Self {
        Self { number: self.tried, tried: self.tried, is_closed: false }
    }

    /// The servers have ended, and their files were left like this.
    fn ended(self, left: &[Option<Left>]) -> Self {
        let closed = Some(Left { opening: self.number, is_closed: true });
        Self { is_closed: left.iter().all(|left| *left == closed), ..self }
    }

    /// What a server is told.
    fn arguments(self, accept_torn: bool) -> Vec<OsString> {
        let numbers = [("--opening", self.tried), ("--last-opening", self.number)];
        let mut arguments: Vec<OsString> =
            numbers.iter().flat_map(|(name, number)| [(*name).into(), number.to_string().into()]).collect();
        arguments.extend(self.is_closed.then(|| "--last-was-closed".into()));
        arguments.extend(accept_torn.then(|| "--accept-torn".into()));
        arguments
    }
}

/// A folder with the memory of all servers of a pool, and the record of what is in it.
#[derive(Debug)]
pub(crate) struct KeptFolder {
    folder: PathBuf,
    servers: u16,
    /// The record's first line: which pool it is.
    pool: String,
    openings: Openings,
}

impl KeptFolder {
    /// The file that says what is in the folder.
    pub(crate) const RECORD: &str = "pool";

    /// The folder's memory is about to be opened. `pool` is the first line of the record.
    pub(crate) fn begin(folder: &Path, servers: u16, pool: String) -> Result<Self, String> {
        let said = std::fs::read_to_string(folder.join(Self::RECORD)).unwrap_or_default();
        let openings = match said.lines().nth(1) {
            None => Openings::default(),
            Some(line) => Openings::parse(line).ok_or_else(|| {
                format!("{} does not say how its memory was left", folder.join(Self::RECORD).display())
            })?,
        };
        let mut kept = Self { folder: folder.to_owned(), servers, pool, openings };
        kept.openings = openings.begin(&kept.left());
        kept.write()?;
        Ok(kept)
    }

    /// All servers have opened it.
    pub(crate) fn opened(&mut self) -> Result<(), String> {
        self.openings = self.openings.done();
        self.write()
    }

    /// All servers have ended.
    pub(crate) fn ended(&mut self) -> Result<(), String> {
        self.openings = self.openings.ended(&self.left());
        self.write()
    }

    /// What servers are told.
    pub(crate) fn arguments(&self, accept_torn: bool) -> Vec<OsString> {
        self.openings.arguments(accept_torn)
    }

    /// Why a server refused its memory, for who sees the folder.
    pub(crate) fn explain(&self, why: &str) -> String {
        let folder = self.folder.display();
        if why.contains("is not whole") {
            return format!(
                "{why}. The whole pool is in {folder}: `farwood up --path {folder} --accept-torn` serves what is left of it"
            );
        }
        why.to_owned()
    }

    fn left(&self) -> Vec<Option<Left>> {
        let number = |server| ServerId::new(server);
        (0..self.servers).map(|server| left(&memory_in(&self.folder, number(server)))).collect()
    }

    fn write(&self) -> Result<(), String> {
        let file = self.folder.join(Self::RECORD);
        replace(&file, &format!("{}\n{}\n", self.pool.trim_end(), self.openings.text()))
            .map_err(|error| format!("cannot write {}: {error}", file.display()))
    }
}

/// Puts a text in the place of a file, so that a power cut leaves the one or the other.
fn replace(file: &Path, text: &str) -> io::Result<()> {
    let next = file.with_extension("next");
    let mut written = File::create(&next)?;
    written.write_all(text.as_bytes())?;
    written.sync_all()?;
    std::fs::rename(&next, file)?;
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty());
    File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn left(opening: u64, is_closed: bool) -> Left {
        Left { opening, is_closed }
    }

    #[test]
    fn an_opening_counts_when_all_servers_have_it() {
        let first = Openings::default().begin(&[None, None]);
        assert_eq!((first.number, first.tried), (0, 1));
        // It failed half way, or a server was started by hand; the next one is another than any file has.
        assert_eq!(first.begin(&[Some(left(1, false)), None]).tried, 2);
        let second = first.begin(&[Some(left(4, false)), None]);
        let done = second.done();
        assert_eq!(done, Openings { number: 5, tried: 5, is_closed: false });
        assert!(done.ended(&[Some(left(5, true)); 2]).is_closed);
        for not_closed in [Some(left(5, false)), Some(left(4, true)), None] {
            assert!(!done.ended(&[Some(left(5, true)), not_closed]).is_closed, "{not_closed:?}");
        }
        for openings in [first, done, Openings { is_closed: true, ..done }] {
            assert_eq!(Openings::parse(&openings.text()), Some(openings));
        }
        assert_eq!(Openings::parse("opening=1 tried=x closed=true"), None);
    }

    #[test]
    fn servers_are_told_what_the_record_says() {
        let closed = Openings { number: 4, tried: 5, is_closed: true };
        let expected = ["--opening", "5", "--last-opening", "4", "--last-was-closed", "--accept-torn"];
        assert_eq!(closed.arguments(true), expected.map(OsString::from));
    }
}
