//! Patterns as KEYS, SCAN and CONFIG GET take them: `*`, `?`, `[abc]`, `[^a-z]`, and `\` before what is meant literally.

/// Whether all of `text` matches. Bounded: a star that fails hands over to the last one only, so that no pattern costs more than the
/// product of both lengths.
pub(crate) fn matches(pattern: &[u8], text: &[u8]) -> bool {
    let (mut p, mut t) = (0, 0);
    // Where to go on if what follows the last star does not match here: behind the star, one byte later in the text.
    let mut retry: Option<(usize, usize)> = None;
    loop {
        if pattern.get(p) == Some(&b'*') {
            p += 1;
            retry = Some((p, t));
            continue;
        }
        let step = if t == text.len() {
            if p == pattern.len() {
                return true;
            }
            None
        } else {
            one(&pattern[p..], text[t])
        };
        match (step, retry) {
            (Some(taken), _) => {
                p += taken;
                t += 1;
            }
            (None, Some((behind, from))) if from < text.len() => {
                p = behind;
                t = from + 1;
                retry = Some((behind, t));
            }
            _ => return false,
        }
    }
}

/// If the pattern's first item matches the byte, how long the item is.
fn one(pattern: &[u8], byte: u8) -> Option<usize> {
    match pattern {
        [] => None,
        [b'?', ..] => Some(1),
        [b'[', rest @ ..] => {
            let (is_in, taken) = class(rest, byte);
            is_in.then_some(1 + taken)
        }
        [b'\\', escaped, ..] => (*escaped == byte).then_some(2),
        [literal, ..] => (*literal == byte).then_some(1),
    }
}

/// Whether a byte is in a class, and how long the class is. One that does not end, ends with the pattern.
fn class(mut rest: &[u8], byte: u8) -> (bool, usize) {
    let whole = rest.len();
    let is_negated = rest.first() == Some(&b'^');
    if is_negated {
        rest = &rest[1..];
    }
    let mut is_in = false;
    loop {
        match rest {
            [] => break,
            [b'\\', escaped, ..] => {
                is_in |= *escaped == byte;
                rest = &rest[2..];
            }
            [b']', ..] => {
                rest = &rest[1..];
                break;
            }
            [from, b'-', to, ..] => {
                is_in |= (*from.min(to)..=*from.max(to)).contains(&byte);
                rest = &rest[3..];
            }
            [literal, ..] => {
                is_in |= *literal == byte;
                rest = &rest[1..];
            }
        }
    }
    (is_in != is_negated, whole - rest.len())
}

/// What every match begins with.
pub(crate) fn literal_prefix(pattern: &[u8]) -> Vec<u8> {
    let mut prefix = Vec::new();
    let mut rest = pattern;
    loop {
        match rest {
            [] | [b'*' | b'?' | b'[', ..] => return prefix,
            [b'\\', escaped, ..] => {
                prefix.push(*escaped);
                rest = &rest[2..];
            }
            [literal, ..] => {
                prefix.push(*literal);
                rest = &rest[1..];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn patterns_match_as_in_redis() {
        for (pattern, text, is_match) in [
            ("*", "", true),
            ("", "", true),
            ("", "a", false),
            ("a*c", "abbbc", true),
            ("a*c", "abbbd", false),
            ("*a*b*", "xxaxxbxx", true),
            ("h?llo", "hello", true),
            ("h?llo", "hllo", false),
            ("h[ae]llo", "hallo", true),
            ("h[^e]llo", "hello", false),
            ("h[a-c]llo", "hbllo", true),
            ("h[c-a]llo", "hbllo", true),
            ("h\\*llo", "h*llo", true),
            ("h\\*llo", "hello", false),
            ("[\\]]", "]", true),
            ("[abc", "b", true),
            ("a\\", "a\\", true),
            ("*ab", "aab", true),
            ("**", "x", true),
        ] {
            assert_eq!(matches(pattern.as_bytes(), text.as_bytes()), is_match, "{pattern} {text}");
        }
    }

    #[test]
    fn a_hard_pattern_is_still_cheap() {
        let pattern = b"a*".repeat(1000);
        assert!(!matches(&[&pattern[..], b"b"].concat(), &[b'a'; 5000]));
    }

    proptest! {
        #[test]
        fn what_matches_has_the_prefix(
            pattern in prop::collection::vec(prop_oneof![Just(b'*'), Just(b'?'), Just(b'['), Just(b'\\'), b'a'..b'd'], 0..8),
            text in prop::collection::vec(b'a'..b'd', 0..8),
        ) {
            if matches(&pattern, &text) {
                prop_assert!(text.starts_with(&literal_prefix(&pattern)));
            }
        }
    }
}
