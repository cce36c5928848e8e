//! Values are recognised; mixtures, cuts and changed bits are not.

use farwood_workload::values::{IDENTITY_BYTES, SHORT_VERSION_BITS, VERSION_BYTES};
use farwood_workload::{BadText, BadValue, ValueId, Values};
use proptest::prelude::*;

fn value(values: Values, index: u64, version: u64) -> Vec<u8> {
    values.value(ValueId { index, version }, &mut vec![]).to_vec()
}

#[test]
fn every_size_is_met_and_says_what_it_can() {
    for bytes in 0..200u32 {
        let values = Values::fixed(bytes);
        let id = ValueId { index: 77, version: 5 };
        let made = value(values, 77, 5);
        assert_eq!(made.len(), bytes as usize);
        assert!(values.matches(id, &made));
        let known = made.len() >= VERSION_BYTES;
        let version = values.version_of(77, &made);
        assert_eq!(version, if known { Ok(5) } else { Err(BadValue::TooSmall { bytes: made.len() }) });
        let identity = values.identify(&made);
        let expected =
            if made.len() >= IDENTITY_BYTES { Ok(id) } else { Err(BadValue::TooSmall { bytes: made.len() }) };
        assert_eq!(identity, expected);
        // From one byte on, another write has, nearly always, another value.
        let same =
            (0..100).filter(|version| value(values, 77, *version) == value(values, 78, *version)).count();
        assert!(bytes == 0 || same < 10, "{bytes} bytes: {same} of 100 values are the same");
    }
}

/// Whatever part of a value is torn off, it shows: two versions differ in every word, two keys in every word after the version.
#[test]
fn versions_differ_in_every_word() {
    for bytes in [8, 15, 16, 24, 64, 400] {
        let values = Values::fixed(bytes);
        let differ = |one: &[u8], two: &[u8]| {
            one.chunks_exact(8).zip(two.chunks_exact(8)).all(|(one, two)| one != two)
        };
        for version in 0..100 {
            assert!(
                differ(&value(values, 7, version), &value(values, 7, version + 1)),
                "{bytes} bytes, version {version}"
            );
            let skip = if bytes < 16 { 0 } else { 8 };
            assert!(
                differ(&value(values, 7, version)[skip..], &value(values, 8, version)[skip..]),
                "{bytes} bytes"
            );
        }
    }
}

#[test]
fn small_values_keep_forty_bits_of_the_version() {
    let values = Values::fixed(8);
    let version = (1 << SHORT_VERSION_BITS) - 1;
    assert_eq!(values.version_of(3, &value(values, 3, version)), Ok(version));
    assert_eq!(values.version_of(4, &value(values, 3, version)), Err(BadValue::Mixed), "of another key");
    for bytes in 8..16 {
        let values = Values::fixed(bytes);
        assert_eq!(
            values.version_of(3, &value(values, 3, version + 6)),
            Ok(5),
            "{bytes} bytes: the lower bits"
        );
    }
}

#[test]
fn sizes_fill_their_range() {
    let values: Values = "10-13".parse().unwrap();
    let mut counts = [0; 4];
    for version in 0..4000 {
        counts[value(values, 1, version).len() - 10] += 1;
    }
    assert!(counts.iter().all(|count| (850..1150).contains(count)), "{counts:?}");
    assert_eq!(values.version_of(1, &[0; 9]), Err(BadValue::WrongSize { bytes: 9 }));
    assert_eq!(values.identify(&[0; 20]), Err(BadValue::WrongSize { bytes: 20 }));
}

#[test]
fn bad_sizes_are_refused_with_advice() {
    for text in ["", "x", "-1", "5-", "9-3", "16777217", "1-16777217"] {
        let error = text.parse::<Values>().unwrap_err();
        assert_eq!(error, BadText::ValueSize(text.to_owned()));
        assert!(error.to_string().contains("16-400"), "{error}");
    }
}

proptest! {
    /// Two versions of one key, mixed at any byte, as a torn read would: found out, unless the result is one of the two.
    #[test]
    fn mixed_halves_are_found_out(
        bytes in 8u32..300, index: u64, one in 0u64..1 << 40, two in 0u64..1 << 40, at in 0usize..300,
    ) {
        let values = Values::fixed(bytes);
        let (first, second) = (value(values, index, one), value(values, index, two));
        let at = at % first.len();
        let mixed = [&first[..at], &second[at..]].concat();
        if mixed != first && mixed != second {
            prop_assert_eq!(values.version_of(index, &mixed), Err(BadValue::Mixed));
            if mixed.len() >= IDENTITY_BYTES {
                // Of 16 bytes all are key and version, so a mixture names a key; but not this one.
                prop_assert_ne!(values.identify(&mixed).map(|id| id.index), Ok(index));
            }
        }
    }

    /// Versions that differ in one low bit, mixed by 8-byte words, as remote memory tears: the hardest case if versions
    /// stood there as they are.
    #[test]
    fn mixed_words_are_found_out(words in 2u32..20, index in 0u64..1000, version in 0u64..1000, mask: u32) {
        let values = Values::fixed(words * 8);
        let (first, second) = (value(values, index, version), value(values, index, version ^ 1));
        let pick = |(n, (a, b)): (usize, (&[u8], &[u8]))| if mask >> n & 1 == 0 { a.to_vec() } else { b.to_vec() };
        let mixed: Vec<u8> = first.chunks(8).zip(second.chunks(8)).enumerate().flat_map(pick).collect();
        let expected = if mixed == first {
            Ok(version)
        } else if mixed == second {
            Ok(version ^ 1)
        } else {
            Err(BadValue::Mixed)
        };
        prop_assert_eq!(values.version_of(index, &mixed), expected);
    }

    #[test]
    fn changed_bits_and_cuts_are_found_out(bytes in 8u32..300, index: u64, version in 0u64..1 << 40, bit: usize) {
        let values = Values::between(8, bytes);
        let mut made = value(values, index, version);
        prop_assert_eq!(values.version_of(index, &made), Ok(version));
        prop_assert!(values.version_of(index, &made[..made.len() - 1]).is_err());
        let bit = bit % (made.len() * 8);
        made[bit / 8] ^= 1 << (bit % 8);
        prop_assert_eq!(values.version_of(index, &made), Err(BadValue::Mixed));
    }

    #[test]
    fn identities_survive(index: u64, version: u64, bytes in 16u32..100) {
        let values = Values::fixed(bytes);
        prop_assert_eq!(values.identify(&value(values, index, version)), Ok(ValueId { index, version }));
    }

    #[test]
    fn sizes_survive_their_text(min in 0u32..=1 << 24, max in 0u32..=1 << 24) {
        let values = Values::between(min.min(max), min.max(max));
        prop_assert_eq!(values.to_string().parse(), Ok(values));
    }
}
