//! E-mail addresses in the place of those that Sphinx is measured with (section V.A: public addresses of 2 to 32 bytes, 18.93
//! on average; the set is not redistributed here, so these are made).
//!
//! Addresses stand as they are written, user name first, so neighbours in key order share the beginnings of user names: a
//! hundred first names and initials, then syllables. Most are of the form
//!
//! ```text
//! maria. tomari @gmail.com          first name or initial (100) | token (10^6) | provider
//! maria. toma42 @gmail.com          the same token, its last two digits not as a syllable
//! maria. tomari +3f @gmail.com      numbers of 10^8 and more: their higher part after a plus sign, in base 36
//! lo                                one in a thousand: a bare piece of a name; of these come lengths down to 2
//! ```
//!
//! What the short ones of the real set look like is not published; bare names stand in for them.
//!
//! **All different.** A number below 10^8 is shuffled by a permutation of 0..10^8, and the result is spelled as first name and
//! token. Both can be read back: what follows `@` is the provider, what follows `+` the higher part, the last six bytes before
//! that the token (a syllable is one of 100, a pair of digits one of 100), what is left the first name, all of which differ. Bare
//! names have no `@`, spell a number below 10^5, and have as many syllables as it takes. So the number can be computed from
//! the address, and no two numbers have the same.
//!
//! **Lengths** do not depend on the number up to 10^8; beyond, addresses are two or more bytes longer. At 32 bytes a long provider gives way
//! to a short one.

use crate::random::{Permutation, Random, mix64, scale};

/// No address is longer.
pub const MAX_EMAIL_BYTES: usize = 32;

const TOKENS: u64 = 1_000_000;
const TOKEN_BYTES: usize = 6;
const SPELLED: u64 = FIRST_NAMES.len() as u64 * TOKENS;
/// Numbers, after the shuffle, that become bare names.
const BARE: u64 = 100_000;
const CONSONANTS: &[u8; 20] = b"bcdfghjklmnpqrstvwxz";
const VOWELS: &[u8; 5] = b"aeiou";

/// What user names begin with.
#[rustfmt::skip]
const FIRST_NAMES: [&str; 100] = [
    "a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l", "m", "n", "o", "p", "q", "r", "s", "t", "u", "v", "w", "y", "z",
    "a.", "b.", "c.", "d.", "e.", "f.", "g.", "h.", "j.", "k.", "l.", "m.", "n.", "p.", "r.", "s.", "t.", "v.", "w.",
    "a_", "c_", "d_", "j_", "m_", "s_",
    "adam", "al", "alex", "ali", "amy", "ana", "andrea", "anna", "bob", "carl", "chris", "dan", "dave", "david", "eva", "info",
    "jack", "james", "jan", "jay", "jen", "jim", "joe", "john", "john.", "jose", "juan", "julia", "kate", "kim", "lee", "leo",
    "li", "lisa", "luis", "maria", "maria.", "mark", "marta", "max", "mike", "nick", "paul", "paula", "peter", "rob", "sam",
    "sara", "tom", "wei",
];

/// Providers, with the at sign, and how many of 256 addresses they have. The last one is for those that would be too long.
const PROVIDERS: [(&str, u32); 20] = [
    ("@gmail.com", 54),
    ("@yahoo.com", 46),
    ("@hotmail.com", 38),
    ("@aol.com", 29),
    ("@outlook.com", 6),
    ("@comcast.net", 6),
    ("@msn.com", 8),
    ("@mail.ru", 10),
    ("@live.com", 7),
    ("@yahoo.co.uk", 4),
    ("@sbcglobal.net", 6),
    ("@hotmail.co.uk", 6),
    ("@wanadoo.fr", 6),
    ("@yandex.ru", 6),
    ("@verizon.net", 4),
    ("@web.de", 8),
    ("@btinternet.com", 4),
    ("@student.example.edu", 2),
    ("@libero.it", 3),
    ("@qq.com", 3),
];
const SHORTEST_PROVIDER: usize = PROVIDERS.len() - 1;

/// Which provider each of 256 addresses has.
const PROVIDER_OF: [usize; 256] = {
    let mut table = [0; 256];
    let (mut at, mut provider) = (0, 0);
    while provider < PROVIDERS.len() {
        let mut left = PROVIDERS[provider].1;
        while left > 0 {
            table[at] = provider;
            at += 1;
            left -= 1;
        }
        provider += 1;
    }
    assert!(at == 256, "the providers' shares must add up");
    table
};

/// The addresses of one seed.
#[derive(Clone, Debug)]
pub(crate) struct Emails {
    shuffle: Permutation,
    flavour: u64,
}

impl Emails {
    pub(crate) fn new(seed: u64) -> Self {
        Self { shuffle: Permutation::new(SPELLED, seed), flavour: Random::new(seed, 0x6d61_696c).word() }
    }

    /// Appends the address with this number.
    pub(crate) fn write(&self, index: u64, into: &mut Vec<u8>) {
        let (higher, spelled) = (index / SPELLED, self.shuffle.apply(index % SPELLED));
        if higher == 0 && spelled < BARE {
            return write_bare(spelled, into);
        }
        let taste = mix64(index ^ self.flavour);
        let begin = into.len();
        into.extend_from_slice(FIRST_NAMES[at(spelled / TOKENS)].as_bytes());
        let token = spelled % TOKENS;
        write_syllable(token / 10_000, into);
        write_syllable(token / 100 % 100, into);
        if taste & 1 == 0 {
            write_syllable(token % 100, into);
        } else {
            into.extend_from_slice(&[digit(token / 10 % 10), digit(token % 10)]);
        }
        if higher > 0 {
            into.push(b'+');
            write_base36(higher, into);
        }
        let mut provider = PROVIDERS[PROVIDER_OF[at(scale(taste, 256))]].0;
        if into.len() - begin + provider.len() > MAX_EMAIL_BYTES {
            provider = PROVIDERS[SHORTEST_PROVIDER].0;
        }
        into.extend_from_slice(provider.as_bytes());
    }

    /// The number of an address; `None` if no number has it.
    pub(crate) fn index_of(&self, address: &[u8]) -> Option<u64> {
        let (higher, spelled) = match address.iter().position(|byte| *byte == b'@') {
            None => (0, read_bare(address)?),
            Some(end) => read_user(&address[..end])?,
        };
        let index = higher.checked_mul(SPELLED)?.checked_add(self.shuffle.invert(spelled))?;
        // Whatever was not looked at on the way must be right too.
        let mut again = Vec::with_capacity(MAX_EMAIL_BYTES);
        self.write(index, &mut again);
        (again == address).then_some(index)
    }
}

fn write_bare(spelled: u64, into: &mut Vec<u8>) {
    if spelled >= 10_000 {
        write_syllable(spelled / 10_000, into);
    }
    if spelled >= 100 {
        write_syllable(spelled / 100 % 100, into);
    }
    write_syllable(spelled % 100, into);
}

fn read_bare(name: &[u8]) -> Option<u64> {
    if name.len() <= TOKEN_BYTES { read_pairs(name) } else { None }
}

/// The higher part and the spelled part of a user name.
fn read_user(user: &[u8]) -> Option<(u64, u64)> {
    let (name, higher) = match user.iter().position(|byte| *byte == b'+') {
        Some(plus) => (&user[..plus], read_base36(&user[plus + 1..])?),
        None => (user, 0),
    };
    let (first, token) = name.split_at_checked(name.len().checked_sub(TOKEN_BYTES)?)?;
    let first = FIRST_NAMES.iter().position(|name| name.as_bytes() == first)? as u64;
    Some((higher, first * TOKENS + read_pairs(token)?))
}

/// One of 100, as a consonant and a vowel.
fn write_syllable(number: u64, into: &mut Vec<u8>) {
    into.extend_from_slice(&[CONSONANTS[at(number / 5)], VOWELS[at(number % 5)]]);
}

fn read_pairs(name: &[u8]) -> Option<u64> {
    name.chunks(2).try_fold(0, |number, pair| Some(number * 100 + read_pair(pair)?))
}

/// What a syllable or two digits stand for.
fn read_pair(pair: &[u8]) -> Option<u64> {
    let &[first, second] = pair else {
        return None;
    };
    if first.is_ascii_digit() && second.is_ascii_digit() {
        return Some(u64::from(first - b'0') * 10 + u64::from(second - b'0'));
    }
    let consonant = CONSONANTS.iter().position(|byte| *byte == first)?;
    let vowel = VOWELS.iter().position(|byte| *byte == second)?;
    Some((consonant * 5 + vowel) as u64)
}

fn write_base36(number: u64, into: &mut Vec<u8>) {
    let begin = into.len();
    let mut left = number;
    while left > 0 {
        let at = at(left % 36);
        into.push(b"0123456789abcdefghijklmnopqrstuvwxyz"[at]);
        left /= 36;
    }
    into[begin..].reverse();
}

fn read_base36(text: &[u8]) -> Option<u64> {
    u64::from_str_radix(std::str::from_utf8(text).ok()?, 36).ok()
}

fn digit(number: u64) -> u8 {
    b"0123456789"[at(number)]
}

/// A small number as an index.
fn at(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}
