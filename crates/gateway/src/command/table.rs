//! The table of commands, and finding one in it.

use rustc_hash::FxHashMap;

/// A command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Command {
    Append,
    Auth,
    Client,
    Commands,
    Config,
    CountRange,
    DbSize,
    Decr,
    DecrBy,
    Del,
    DelRange,
    Echo,
    Exists,
    Expire,
    ExpireAt,
    ExpireTime,
    FlushDb,
    Get,
    GetDel,
    GetEx,
    GetSet,
    Hello,
    Incr,
    IncrBy,
    Info,
    Keys,
    MGet,
    MSet,
    PExpire,
    PExpireAt,
    PExpireTime,
    PSetEx,
    PTtl,
    Persist,
    Ping,
    Quit,
    RandomKey,
    Range,
    RangeKeys,
    Scan,
    Select,
    Set,
    SetEx,
    SetNx,
    StrLen,
    Time,
    Touch,
    Ttl,
    Type,
    Unlink,
}

/// Which arguments of a command are keys.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Keys {
    /// None, and the command is about the connection or the gateway alone.
    Nobodys,
    /// None, but the command looks at the index as a whole.
    Whole,
    /// The first argument.
    One,
    /// All arguments.
    All,
    /// Every second argument.
    Pairs,
}

/// What is known of a command.
#[derive(Debug)]
pub(crate) struct Spec {
    /// Its name, in small letters.
    pub(crate) name: &'static str,
    pub(crate) command: Command,
    /// How many arguments it takes, its name included; if negative, at least so many.
    pub(crate) arity: i32,
    pub(crate) keys: Keys,
    /// Whether it changes anything.
    pub(crate) writes: bool,
    /// The group in which Redis's documentation has it.
    pub(crate) group: &'static str,
    pub(crate) summary: &'static str,
}

impl Spec {
    pub(crate) fn takes(&self, arguments: usize) -> bool {
        let (arguments, least) = (i64::try_from(arguments).unwrap_or(i64::MAX), i64::from(self.arity.abs()));
        if self.arity < 0 { arguments >= least } else { arguments == least }
    }

    pub(crate) fn uses_index(&self) -> bool {
        self.keys != Keys::Nobodys
    }

    /// Whether it goes through keys and gathers what it finds, or removes it: that may be much.
    pub(crate) fn gathers(&self) -> bool {
        self.keys == Keys::Whole && !matches!(self.command, Command::DbSize | Command::Info)
    }

    /// Whether a command that found no memory left, perhaps after a part of it, may be carried out again from the start.
    pub(crate) fn may_repeat(&self) -> bool {
        self.writes && (self.keys == Keys::One || self.command == Command::MSet)
    }

    /// Its place in [`COMMANDS`].
    pub(crate) fn number(&self) -> usize {
        COMMANDS.iter().position(|spec| std::ptr::eq(spec, self)).unwrap_or(0)
    }
}

const fn spec(
    name: &'static str,
    command: Command,
    arity: i32,
    keys: Keys,
    writes: bool,
    group: &'static str,
    summary: &'static str,
) -> Spec {
    Spec { name, command, arity, keys, writes, group, summary }
}

const READS: bool = false;
const WRITES: bool = true;

/// All commands, in the order of their names.
#[rustfmt::skip]
pub(crate) static COMMANDS: [Spec; 51] = {
    use Command as C;
    use Keys::{All, Nobodys, One, Pairs, Whole};
    [
        spec("append", C::Append, 3, One, WRITES, "string", "Append to a value"),
        spec("auth", C::Auth, -2, Nobodys, READS, "connection", "Say the password"),
        spec("client", C::Client, -2, Nobodys, READS, "connection", "Ask about, and name, connections"),
        spec("command", C::Commands, -1, Nobodys, READS, "server", "List and explain commands"),
        spec("config", C::Config, -2, Nobodys, READS, "server", "Read the settings"),
        spec("countrange", C::CountRange, 3, Whole, READS, "ordered", "Count the keys of a range"),
        spec("dbsize", C::DbSize, 1, Whole, READS, "server", "About how many keys there are"),
        spec("decr", C::Decr, 2, One, WRITES, "string", "Take one from a number"),
        spec("decrby", C::DecrBy, 3, One, WRITES, "string", "Take from a number"),
        spec("del", C::Del, -2, All, WRITES, "generic", "Remove keys"),
        spec("delrange", C::DelRange, -3, Whole, WRITES, "ordered", "Remove the keys of a range"),
        spec("echo", C::Echo, 2, Nobodys, READS, "connection", "Say something back"),
        spec("exists", C::Exists, -2, All, READS, "generic", "Count which of these keys are there"),
        spec("expire", C::Expire, -3, One, WRITES, "generic", "Let a key expire in so many seconds"),
        spec("expireat", C::ExpireAt, -3, One, WRITES, "generic", "Let a key expire at a time, in seconds"),
        spec("expiretime", C::ExpireTime, 2, One, READS, "generic", "When a key expires, in seconds"),
        spec("flushall", C::FlushDb, -1, Whole, WRITES, "server", "Remove all keys"),
        spec("flushdb", C::FlushDb, -1, Whole, WRITES, "server", "Remove all keys"),
        spec("get", C::Get, 2, One, READS, "string", "The value of a key"),
        spec("getdel", C::GetDel, 2, One, WRITES, "string", "The value of a key, which is removed"),
        spec("getex", C::GetEx, -2, One, WRITES, "string", "The value of a key, and when it shall expire"),
        spec("getset", C::GetSet, 3, One, WRITES, "string", "The value of a key, which gets another"),
        spec("hello", C::Hello, -1, Nobodys, READS, "connection", "Agree on a version of the protocol"),
        spec("incr", C::Incr, 2, One, WRITES, "string", "Add one to a number"),
        spec("incrby", C::IncrBy, 3, One, WRITES, "string", "Add to a number"),
        spec("info", C::Info, -1, Whole, READS, "server", "How the gateway does"),
        spec("keys", C::Keys, 2, Whole, READS, "generic", "The keys that match a pattern, in order"),
        spec("mget", C::MGet, -2, All, READS, "string", "The values of several keys"),
        spec("mset", C::MSet, -3, Pairs, WRITES, "string", "Set several keys, each by itself"),
        spec("persist", C::Persist, 2, One, WRITES, "generic", "Let a key never expire"),
        spec("pexpire", C::PExpire, -3, One, WRITES, "generic", "Let a key expire in so many milliseconds"),
        spec("pexpireat", C::PExpireAt, -3, One, WRITES, "generic", "Let a key expire at a time, in milliseconds"),
        spec("pexpiretime", C::PExpireTime, 2, One, READS, "generic", "When a key expires, in milliseconds"),
        spec("ping", C::Ping, -1, Nobodys, READS, "connection", "Whether somebody answers"),
        spec("psetex", C::PSetEx, 4, One, WRITES, "string", "Set a key that expires in so many milliseconds"),
        spec("pttl", C::PTtl, 2, One, READS, "generic", "How many milliseconds a key has left"),
        spec("quit", C::Quit, -1, Nobodys, READS, "connection", "Close the connection"),
        spec("randomkey", C::RandomKey, 1, Whole, READS, "generic", "Some key"),
        spec("range", C::Range, -3, Whole, READS, "ordered", "The keys and values of a range, in order"),
        spec("rangekeys", C::RangeKeys, -3, Whole, READS, "ordered", "The keys of a range, in order"),
        spec("scan", C::Scan, -2, Whole, READS, "generic", "Go through all keys, in order"),
        spec("select", C::Select, 2, Nobodys, READS, "connection", "Use database 0, the one there is"),
        spec("set", C::Set, -3, One, WRITES, "string", "Set the value of a key"),
        spec("setex", C::SetEx, 4, One, WRITES, "string", "Set a key that expires in so many seconds"),
        spec("setnx", C::SetNx, 3, One, WRITES, "string", "Set a key that is not there"),
        spec("strlen", C::StrLen, 2, One, READS, "string", "The length of a value"),
        spec("time", C::Time, 1, Nobodys, READS, "server", "What the gateway's clock says"),
        spec("touch", C::Touch, -2, All, READS, "generic", "Count which of these keys are there"),
        spec("ttl", C::Ttl, 2, One, READS, "generic", "How many seconds a key has left"),
        spec("type", C::Type, 2, One, READS, "generic", "The type of a value: string"),
        spec("unlink", C::Unlink, -2, All, WRITES, "generic", "Remove keys"),
    ]
};

/// Finds commands by name, whatever the case of its letters.
#[derive(Debug)]
pub(crate) struct Finder {
    by_name: FxHashMap<u128, (&'static Spec, usize)>,
}

/// A name as a number. No command has a longer one, or one with zeros, which a shorter one is filled with.
fn number_of(name: &[u8]) -> Option<u128> {
    if name.contains(&0) {
        return None;
    }
    let mut bytes = [0u8; 16];
    let place = bytes.get_mut(..name.len())?;
    place.copy_from_slice(name);
    place.make_ascii_lowercase();
    Some(u128::from_le_bytes(bytes))
}

impl Finder {
    pub(crate) fn new() -> Self {
        let entry = |spec: &'static Spec| Some((number_of(spec.name.as_bytes())?, (spec, spec.number())));
        Self { by_name: COMMANDS.iter().filter_map(entry).collect() }
    }

    /// The command, and its place in [`COMMANDS`].
    #[inline]
    pub(crate) fn find(&self, name: &[u8]) -> Option<(&'static Spec, usize)> {
        self.by_name.get(&number_of(name)?).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_is_found_whatever_the_case() {
        let finder = Finder::new();
        assert!(COMMANDS.is_sorted_by_key(|spec| spec.name));
        for (n, spec) in COMMANDS.iter().enumerate() {
            for name in [spec.name.to_owned(), spec.name.to_uppercase()] {
                assert!(
                    finder
                        .find(name.as_bytes())
                        .is_some_and(|(found, at)| found.name == spec.name && at == n)
                );
            }
        }
        for wrong in ["", "gett", "ge", "get\0", "flushall\0\0", "a name that is longer than any command's"] {
            assert!(finder.find(wrong.as_bytes()).is_none(), "{wrong}");
        }
    }

    #[test]
    fn arguments_are_counted_with_the_name() {
        let finder = Finder::new();
        let takes = |name: &str, n| finder.find(name.as_bytes()).is_some_and(|(spec, _)| spec.takes(n));
        assert!(takes("get", 2) && !takes("get", 1) && !takes("get", 3));
        assert!(takes("del", 2) && takes("del", 9) && !takes("del", 1));
    }
}
