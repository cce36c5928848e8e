//! Whole numbers as Redis reads and writes them: `-12`, and not `+12`, `012`, `-0` or ` 12`.

/// The number that these bytes spell, if they spell one, in the one way there is.
pub(crate) fn parse(bytes: &[u8]) -> Option<i64> {
    let (is_negative, digits) = match bytes {
        [b'-', digits @ ..] => (true, digits),
        digits => (false, digits),
    };
    match digits {
        [b'0'] if !is_negative => return Some(0),
        [] | [b'0', ..] => return None,
        _ => {}
    }
    let mut number: i64 = 0;
    for byte in digits {
        if !byte.is_ascii_digit() {
            return None;
        }
        // Downwards, since there is one more negative number.
        number = number.checked_mul(10)?.checked_sub(i64::from(byte - b'0'))?;
    }
    if is_negative { Some(number) } else { number.checked_neg() }
}

/// Appends a number's digits.
pub(crate) fn write(out: &mut Vec<u8>, number: i64) {
    let mut digits = [0u8; 20];
    let mut at = digits.len();
    let mut left = number.unsigned_abs();
    loop {
        at -= 1;
        digits[at] = b'0' + u8::try_from(left % 10).unwrap_or(0);
        left /= 10;
        if left == 0 {
            break;
        }
    }
    if number < 0 {
        out.push(b'-');
    }
    out.extend_from_slice(&digits[at..]);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn only_the_one_spelling_counts() {
        for wrong in
            ["", "-", "+1", "01", "-0", " 1", "1 ", "1x", "9223372036854775808", "-9223372036854775809", "00"]
        {
            assert_eq!(parse(wrong.as_bytes()), None, "{wrong}");
        }
    }

    proptest! {
        #[test]
        fn numbers_are_read_back(number in prop_oneof![any::<i64>(), Just(i64::MIN), Just(i64::MAX), -20i64..20]) {
            let mut text = Vec::new();
            write(&mut text, number);
            prop_assert_eq!(String::from_utf8_lossy(&text), number.to_string());
            prop_assert_eq!(parse(&text), Some(number));
        }
    }
}
