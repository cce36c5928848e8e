//! How control messages become bytes: little-endian, lengths first, every length checked before anything is
//! allocated. Decoding bytes from outside never panics; it says `Malformed`.

use crate::addr::{GlobalAddr, RegionId, ServerId, SessionId};
use crate::region::{Identity, Permissions, PoolId, RegionSpec};

/// Bytes that are not the message they should be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Malformed;

/// A value that has one encoding.
pub trait Wire: Sized {
    /// Appends the encoding.
    fn put(&self, out: &mut Vec<u8>);
    /// Takes the value off the front of `input`.
    fn take(input: &mut &[u8]) -> Result<Self, Malformed>;
}

/// Decodes a whole message; left-over bytes are an error.
pub fn decode<T: Wire>(mut bytes: &[u8]) -> Result<T, Malformed> {
    let value = T::take(&mut bytes)?;
    if bytes.is_empty() { Ok(value) } else { Err(Malformed) }
}

/// The encoding of a whole message.
pub fn encode<T: Wire>(value: &T) -> Vec<u8> {
    let mut out = Vec::new();
    value.put(&mut out);
    out
}

macro_rules! integers {
    ($($t:ty),*) => {$(
        impl Wire for $t {
            fn put(&self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.to_le_bytes());
            }
            fn take(input: &mut &[u8]) -> Result<Self, Malformed> {
                let (head, rest) = input.split_first_chunk().ok_or(Malformed)?;
                *input = rest;
                Ok(<$t>::from_le_bytes(*head))
            }
        }
    )*};
}
integers!(u8, u16, u32, u64, u128);

impl Wire for bool {
    fn put(&self, out: &mut Vec<u8>) {
        u8::from(*self).put(out);
    }
    fn take(input: &mut &[u8]) -> Result<Self, Malformed> {
        match u8::take(input)? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(Malformed),
        }
    }
}

impl Wire for () {
    fn put(&self, _: &mut Vec<u8>) {}
    fn take(_: &mut &[u8]) -> Result<Self, Malformed> {
        Ok(())
    }
}

impl<T: Wire> Wire for Vec<T> {
    fn put(&self, out: &mut Vec<u8>) {
        u32::try_from(self.len()).expect("messages are far below 4 GiB").put(out);
        for item in self {
            item.put(out);
        }
    }
    fn take(input: &mut &[u8]) -> Result<Self, Malformed> {
        let len = u32::take(input)? as usize;
        // Every item takes at least one byte, so a length beyond what is left is a lie, told before we allocate.
        if len > input.len() {
            return Err(Malformed);
        }
        let mut items = Vec::with_capacity(len.min(1024));
        for _ in 0..len {
            items.push(T::take(input)?);
        }
        Ok(items)
    }
}

impl<T: Wire> Wire for Option<T> {
    fn put(&self, out: &mut Vec<u8>) {
        self.is_some().put(out);
        if let Some(value) = self {
            value.put(out);
        }
    }
    fn take(input: &mut &[u8]) -> Result<Self, Malformed> {
        if bool::take(input)? { T::take(input).map(Some) } else { Ok(None) }
    }
}

impl<T: Wire, E: Wire> Wire for Result<T, E> {
    fn put(&self, out: &mut Vec<u8>) {
        self.is_ok().put(out);
        match self {
            Ok(value) => value.put(out),
            Err(error) => error.put(out),
        }
    }
    fn take(input: &mut &[u8]) -> Result<Self, Malformed> {
        if bool::take(input)? { T::take(input).map(Ok) } else { E::take(input).map(Err) }
    }
}

impl Wire for String {
    fn put(&self, out: &mut Vec<u8>) {
        self.as_bytes().to_vec().put(out);
    }
    fn take(input: &mut &[u8]) -> Result<Self, Malformed> {
        String::from_utf8(Vec::take(input)?).map_err(|_| Malformed)
    }
}

impl Wire for SessionId {
    fn put(&self, out: &mut Vec<u8>) {
        self.get().put(out);
    }
    fn take(input: &mut &[u8]) -> Result<Self, Malformed> {
        u16::take(input).map(SessionId::new)
    }
}

impl Wire for ServerId {
    fn put(&self, out: &mut Vec<u8>) {
        self.get().put(out);
    }
    fn take(input: &mut &[u8]) -> Result<Self, Malformed> {
        ServerId::try_from(u16::take(input)?).map_err(|_| Malformed)
    }
}

impl Wire for RegionId {
    fn put(&self, out: &mut Vec<u8>) {
        self.get().put(out);
    }
    fn take(input: &mut &[u8]) -> Result<Self, Malformed> {
        match u8::take(input)? {
            id @ 0..=RegionId::MAX => Ok(RegionId::new(id)),
            _ => Err(Malformed),
        }
    }
}

impl Wire for GlobalAddr {
    fn put(&self, out: &mut Vec<u8>) {
        self.to_raw().put(out);
    }
    fn take(input: &mut &[u8]) -> Result<Self, Malformed> {
        u64::take(input).map(GlobalAddr::from_raw)
    }
}

impl Wire for Permissions {
    fn put(&self, out: &mut Vec<u8>) {
        self.bits().put(out);
    }
    fn take(input: &mut &[u8]) -> Result<Self, Malformed> {
        u8::take(input).map(Permissions::from_bits)
    }
}

impl Wire for PoolId {
    fn put(&self, out: &mut Vec<u8>) {
        self.0.put(out);
    }
    fn take(input: &mut &[u8]) -> Result<Self, Malformed> {
        u128::take(input).map(PoolId)
    }
}

/// Defines `Wire` for a struct, field by field in the order given.
macro_rules! wire_struct {
    ($name:ident { $($field:ident),* $(,)? }) => {
        impl $crate::wire::Wire for $name {
            fn put(&self, out: &mut Vec<u8>) {
                $($crate::wire::Wire::put(&self.$field, out);)*
            }
            fn take(input: &mut &[u8]) -> Result<Self, $crate::wire::Malformed> {
                Ok(Self { $($field: $crate::wire::Wire::take(input)?),* })
            }
        }
    };
}
pub(crate) use wire_struct;

/// Defines an enum whose variants have a number on the wire and named fields, with its `Wire`.
macro_rules! wire_enum {
    ($(#[$meta:meta])* $vis:vis enum $name:ident {
        $($(#[$vmeta:meta])* $variant:ident = $tag:literal { $($(#[$fmeta:meta])* $field:ident : $ftype:ty),* $(,)? }),* $(,)?
    }) => {
        $(#[$meta])* $vis enum $name { $($(#[$vmeta])* $variant { $($(#[$fmeta])* $field: $ftype),* }),* }

        impl $crate::wire::Wire for $name {
            fn put(&self, out: &mut Vec<u8>) {
                match self {
                    $(Self::$variant { $($field),* } => {
                        $crate::wire::Wire::put(&($tag as u8), out);
                        $($crate::wire::Wire::put($field, out);)*
                    })*
                }
            }
            fn take(input: &mut &[u8]) -> Result<Self, $crate::wire::Malformed> {
                match <u8 as $crate::wire::Wire>::take(input)? {
                    $($tag => Ok(Self::$variant { $($field: $crate::wire::Wire::take(input)?),* }),)*
                    _ => Err($crate::wire::Malformed),
                }
            }
        }
    };
}
pub(crate) use wire_enum;

wire_struct!(RegionSpec { id, bytes, permissions });
wire_struct!(Identity { pool, server, servers, incarnation, life, format, chunk_bytes, regions });

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_length_that_lies_is_refused_before_allocation() {
        let mut bytes = encode(&u32::MAX);
        bytes.extend_from_slice(b"short");
        assert_eq!(decode::<Vec<u8>>(&bytes), Err(Malformed));
        assert_eq!(decode::<Vec<u64>>(&bytes), Err(Malformed));
    }

    #[test]
    fn left_over_bytes_are_refused() {
        let mut bytes = encode(&7u64);
        bytes.push(0);
        assert_eq!(decode::<u64>(&bytes), Err(Malformed));
    }
}
