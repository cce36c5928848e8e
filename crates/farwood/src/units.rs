//! Sizes and times as people write and read them: `64`, `1KiB`, `64MiB`, lists of them, seconds in; `1 KiB`, `1.23 us` out.
//!
//! Only binary units are taken: `1K` and `1KB` mean different things to different people, so they are refused.

use std::str::FromStr;

/// The units, largest first.
const UNITS: [(&str, u64); 4] = [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];

/// Longer than this nobody waits for one row or test.
const MAX_SECONDS: f64 = 3600.0;

/// A number of bytes, at least one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Size(pub(crate) u64);

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let unit = UNITS.iter().find(|(name, _)| text.ends_with(name));
        let (digits, factor) = match unit {
            Some((name, factor)) => (&text[..text.len() - name.len()], *factor),
            None => (text.strip_suffix('B').unwrap_or(text), 1),
        };
        // `u64::from_str` would take a sign.
        if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(format!("'{text}' is no size: write bytes as 512, 4KiB, 64MiB or 2GiB"));
        }
        let bytes = digits.parse::<u64>().ok().and_then(|count| count.checked_mul(factor));
        match bytes {
            Some(0) => Err("a size of 0 makes no sense here".to_owned()),
            Some(bytes) => Ok(Self(bytes)),
            None => Err(format!("'{text}' is more than can be counted")),
        }
    }
}

impl std::fmt::Display for Size {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let fits = UNITS.iter().find(|(_, factor)| self.0 % factor == 0 && self.0 > 0);
        match fits {
            Some((name, factor)) => write!(f, "{} {name}", self.0 / factor),
            None => write!(f, "{} B", self.0),
        }
    }
}

/// A time with three digits that count.
pub(crate) fn time(ns: f64) -> String {
    match ns {
        ns if ns < 1e3 => format!("{} ns", three_digits(ns)),
        ns if ns < 1e6 => format!("{} us", three_digits(ns / 1e3)),
        ns if ns < 1e9 => format!("{} ms", three_digits(ns / 1e6)),
        ns => format!("{} s", three_digits(ns / 1e9)),
    }
}

/// A large number with three digits that count, and `k`, `M` or `G` behind it.
pub(crate) fn count(number: f64) -> String {
    match number {
        n if n < 1e3 => three_digits(n),
        n if n < 1e6 => format!("{} k", three_digits(n / 1e3)),
        n if n < 1e9 => format!("{} M", three_digits(n / 1e6)),
        n => format!("{} G", three_digits(n / 1e9)),
    }
}

/// A number of things: exact while it is small.
pub(crate) fn things(number: u64) -> String {
    if number < 10_000 { number.to_string() } else { count(number as f64) }
}

fn three_digits(number: f64) -> String {
    match number {
        n if n < 9.995 => format!("{n:.2}"),
        n if n < 99.95 => format!("{n:.1}"),
        n => format!("{n:.0}"),
    }
}

/// Refuses a time that is none, or too long to wait for.
pub(crate) fn check_seconds(seconds: Option<f64>) -> Result<(), String> {
    match seconds {
        Some(seconds) if !(seconds > 0.0 && seconds <= MAX_SECONDS) => {
            Err(format!("--seconds: {seconds} is not above 0 and at most {MAX_SECONDS}"))
        }
        _ => Ok(()),
    }
}

/// The nanoseconds of a checked number of seconds.
pub(crate) fn nanos(seconds: f64) -> u64 {
    u64::try_from(std::time::Duration::from_secs_f64(seconds).as_nanos()).unwrap_or(u64::MAX)
}

/// What stands between the commas.
pub(crate) fn list<T>(
    name: &str,
    text: &str,
    parse: impl Fn(&str) -> Result<T, String>,
) -> Result<Vec<T>, String> {
    text.split(',').map(|item| parse(item).map_err(|why| format!("{name}: {why}"))).collect()
}

/// An offset or length as an index. What is addressed here is mapped, so it fits.
pub(crate) fn index(n: u64) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_in_binary_units() {
        for (text, bytes) in [
            ("512", 512),
            ("8B", 8),
            ("1KiB", 1024),
            ("64MiB", 64 << 20),
            ("2GiB", 2 << 30),
            ("1TiB", 1 << 40),
        ] {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
    }

    #[test]
    fn what_is_no_size_is_refused() {
        for text in [
            "",
            "KiB",
            "0",
            "0MiB",
            "1K",
            "1KB",
            "1kib",
            "-1",
            "+1",
            "1.5MiB",
            "1 KiB",
            "99999999TiB",
            "MiB1",
        ] {
            assert!(text.parse::<Size>().is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_are_shown_in_the_largest_unit_that_divides_them() {
        for (bytes, text) in
            [(8, "8 B"), (1000, "1000 B"), (1536, "1536 B"), (65536, "64 KiB"), (3 << 30, "3 GiB")]
        {
            assert_eq!(Size(bytes).to_string(), text);
        }
    }

    #[test]
    fn lists_name_what_is_wrong_with_them() {
        let sizes = |text| list("--sizes", text, str::parse::<Size>);
        assert_eq!(sizes("8,1KiB"), Ok(vec![Size(8), Size(1024)]));
        assert!(sizes("8,,9").is_err_and(|why| why.starts_with("--sizes: ")));
    }

    #[test]
    fn seconds_are_some_and_not_too_many() {
        assert!([None, Some(0.001), Some(3600.0)].into_iter().all(|seconds| check_seconds(seconds).is_ok()));
        let wrong = [0.0, -1.0, f64::NAN, f64::INFINITY, 3601.0];
        assert!(wrong.into_iter().all(|seconds| check_seconds(Some(seconds)).is_err()));
        assert_eq!(nanos(0.25), 250_000_000);
    }

    #[test]
    fn times_and_counts_have_three_digits() {
        for (ns, text) in
            [(0.5, "0.50 ns"), (61.23, "61.2 ns"), (999.4, "999 ns"), (2801.0, "2.80 us"), (3e9, "3.00 s")]
        {
            assert_eq!(time(ns), text);
        }
        assert_eq!(
            (count(12.0), count(1_234_567.0), count(2.5e9)),
            ("12.0".into(), "1.23 M".into(), "2.50 G".into())
        );
    }
}
